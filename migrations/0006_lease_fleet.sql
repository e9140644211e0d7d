-- What the lease cycle knows of the fleet, and of accounts that end their owners.
--
-- lease_nodes has one row per process, written by its own lease cycle: who is alive, how much it
-- may own and how much it owns. The columns below are written with the claim and the renewal,
-- which write the row anyway; none of them is in an index, so that a renewal stays a HOT update.

create table lease_nodes (
    node_id      text        primary key,
    platforms    text[]      not null,
    -- 0 while the node lets go of everything.
    capacity     integer     not null,
    owned        integer     not null,
    alive_until  timestamptz not null,

    constraint lease_nodes_counts_not_negative check (capacity >= 0 and owned >= 0)
) with (fillfactor = 50);

alter table trading_accounts
    -- When the present tenure began.
    add column tenure_since timestamptz not null default '-infinity',
    -- Tenures begun since the last one that went well for five minutes.
    add column starts       integer     not null default 0,
    -- Since when nobody owns it, where nobody does.
    add column free_since   timestamptz not null default now(),
    add constraint trading_accounts_starts_not_negative check (starts >= 0);

-- How long after the end of its lease an account is left alone. The same as `claim_wait` of the
-- node, which a test compares.
create function lockstep_claim_wait(starts integer, account bigint) returns interval
language sql immutable parallel safe as $$
    select case when starts < 2 then interval '0'
        else least(interval '30 s' * power(2, least(starts - 2, 10)), interval '900 s')
             * (500 + account % 1000003 * 7919 % 1000) / 1000
    end
$$;

-- An account that is switched on is without an owner from now on, not since it was last given back.
create function trading_accounts_free_since() returns trigger language plpgsql as $$
begin
    new.free_since := clock_timestamp();
    return new;
end
$$;

create trigger trading_accounts_free_since
    before update of enabled on trading_accounts
    for each row when (new.enabled and not old.enabled and new.node_id is null)
    execute function trading_accounts_free_since();
