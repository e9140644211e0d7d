-- Since when an account that was switched on has no owner is set after the update and no longer before
-- it. A trigger before an update makes the server lock every row first, with a record of 54 bytes in its
-- log, at every update of any column, whatever the trigger waits for: a renewed lease cost as much for
-- that as for itself.
drop trigger trading_accounts_free_since on trading_accounts;

-- With the rights of the tables' owner: who may switch an account on need not be allowed to write the
-- columns of the lease.
create or replace function trading_accounts_free_since() returns trigger language plpgsql
security definer set search_path = pg_catalog, pg_temp as $$
begin
    execute format('update %I.%I set free_since = clock_timestamp() where id = $1', tg_table_schema, tg_table_name)
        using new.id;
    return null;
end
$$;

create trigger trading_accounts_free_since
    after update of enabled on trading_accounts
    for each row when (new.enabled and not old.enabled and new.node_id is null)
    execute function trading_accounts_free_since();
