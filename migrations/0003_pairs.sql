-- Pairs: which follower trade copies which master trade of a link.
--
-- A row is live (sending, open, closing) or it has ended (closed, failed, skipped). Live rows
-- are written under the owner's lease token; rows that ended never change again and are the
-- memory that keeps a finished ticket from being opened a second time.

-- Lets a pair name its link and its follower as one, so that the fence, which looks at the
-- follower's account, cannot be passed with somebody else's link.
alter table copy_links add constraint copy_links_id_and_follower_unique unique (id, follower_id);

create table pairs (
    -- Made by the node from link, master ticket and the first follower ticket that was known.
    id                   uuid        primary key,
    link_id              bigint      not null,
    follower_id          bigint      not null,
    master_ticket        bigint      not null,
    follower_ticket      bigint,
    state                text        not null,
    is_pending           boolean     not null default false,
    symbol               text        not null,
    side                 text        not null,
    -- Direction of the master's trade when it was copied; differs on a reversed copy.
    master_side          text        not null,
    lots_at_open         numeric,
    master_lots_at_open  numeric     not null,
    close_price          numeric,
    -- Why it ended: a word of the list in the crate reconcile.
    reason               text,
    -- What the broker refused for good, so that the next owner does not ask for it again.
    rejected_stops          boolean  not null default false,
    rejected_stop_loss      numeric,
    rejected_take_profit    numeric,
    rejected_pending_price  numeric,
    rejected_target         numeric,
    sent_at              timestamptz,
    opened_at            timestamptz,
    closed_at            timestamptz,

    -- Raised by the owner with every change of the pair; counts within one lease token.
    version              bigint      not null,
    lease_token          bigint      not null,
    node_id              text        not null,
    written_at           timestamptz not null default clock_timestamp(),

    constraint pairs_link_and_follower_exist foreign key (link_id, follower_id)
        references copy_links (id, follower_id),
    constraint pairs_state_word check (state in ('sending', 'open', 'closing', 'closed', 'failed', 'skipped')),
    constraint pairs_side_word check (side in ('buy', 'sell') and master_side in ('buy', 'sell')),
    constraint pairs_master_ticket_positive check (master_ticket > 0),
    constraint pairs_follower_ticket_positive check (follower_ticket > 0),
    constraint pairs_ticket_known_once_open check (
        follower_ticket is not null or state in ('sending', 'failed', 'skipped')),
    constraint pairs_lots_positive check (lots_at_open > 0 and master_lots_at_open > 0),
    constraint pairs_close_price_positive check (close_price > 0),
    constraint pairs_rejected_positive check (
        rejected_stop_loss > 0 and rejected_take_profit > 0
        and rejected_pending_price > 0 and rejected_target > 0),
    constraint pairs_symbol_short check (length(symbol) between 1 and 64),
    constraint pairs_reason_short check (length(reason) <= 300),
    constraint pairs_version_not_negative check (version >= 0),
    constraint pairs_lease_token_not_negative check (lease_token >= 0)
) with (fillfactor = 80);

-- Small indexes: what is live now, and what must not be opened again. A change that leaves the
-- state alone is a HOT update.
create unique index pairs_one_live_per_link_and_ticket on pairs (link_id, master_ticket)
    where state in ('sending', 'open', 'closing');
create index pairs_live_of_follower on pairs (follower_id)
    where state in ('sending', 'open', 'closing');
create index pairs_ended_of_follower on pairs (follower_id, link_id, master_ticket)
    where state in ('closed', 'failed', 'skipped');

-- The writer's statements already leave such rows alone. This holds for everybody else.
create function pairs_refuse_change_after_end() returns trigger language plpgsql as $$
begin
    raise exception 'pair % has ended as % and does not change', old.id, old.state
        using errcode = 'check_violation', constraint = 'pairs_ended_rows_stay';
end
$$;

create trigger pairs_ended_rows_stay
    before update on pairs
    for each row when (old.state in ('closed', 'failed', 'skipped'))
    execute function pairs_refuse_change_after_end();
