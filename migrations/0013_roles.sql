-- Nodes may run under a role that makes no tables (see `lockstep roles`). The months of copy events are
-- made in the name of the tables' owner; nobody else may throw months away.

do $$
begin
    execute format(
        'alter function copy_events_make_partitions(integer) security definer set search_path = %I, pg_temp',
        current_schema());
end
$$;

revoke execute on function copy_events_make_partitions(integer), copy_events_drop_partitions(integer) from public;
