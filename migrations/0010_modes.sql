-- What a person allows: on a link, on an account (all its links, as master and as follower), and
-- on the whole fleet. The strictest of the four counts.
--
--   copy        opens, changes and closes
--   close_only  opens nothing; what is open is followed and closed
--   paused      sends no order at all; everything is still followed, and repaired when it ends
--
-- A domain and not a check of the table: 0009 says why.
create domain lockstep_mode as text
    constraint lockstep_mode_word check (value in ('copy', 'close_only', 'paused'));

alter table copy_links add column mode lockstep_mode not null default 'copy';
-- In no index: it shares its row with the lease, whose updates stay HOT.
alter table trading_accounts add column mode lockstep_mode not null default 'copy';

-- One row, always there: a node that finds none reads no links at all.
create table fleet_mode (
    is_only     boolean       primary key default true,
    mode        lockstep_mode not null,
    changed_at  timestamptz   not null default now(),

    constraint fleet_mode_one_row check (is_only)
);
insert into fleet_mode (mode) values ('copy');

-- Heard by the owners of every account, as changed links are; a link's own change is announced by
-- the trigger that it has.
create function lockstep_announce_mode() returns trigger language plpgsql as $$
begin
    perform pg_notify('lockstep_links', tg_table_name);
    return null;
end
$$;

create trigger trading_accounts_announce_mode
    after update of mode on trading_accounts
    for each row when (new.mode is distinct from old.mode)
    execute function lockstep_announce_mode();

create trigger fleet_mode_announce
    after update on fleet_mode
    for each row when (new.mode is distinct from old.mode)
    execute function lockstep_announce_mode();
