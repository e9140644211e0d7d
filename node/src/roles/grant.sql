-- What each role may do in the current schema. Everything that is not named here is refused; what was
-- granted before and is not named any more is taken back. To be run by the owner of the tables, again after
-- each migration. Roles and tables that are not there are passed over.
do $$
declare
    line    record;
    action  text;
    columns text;
    role    text;
    owned   regclass;
begin
    -- Two that grant at once would trip over each other's rows of the catalogue.
    perform pg_advisory_xact_lock(hashtext('lockstep roles'));
    for role in
        select rolname from pg_roles where rolname in ('lockstep_node', 'lockstep_api', 'lockstep_readonly')
    loop
        for owned in
            select oid from pg_class
            where relnamespace = current_schema()::regnamespace and relkind in ('r', 'p', 'v')
              and not relispartition and pg_has_role(relowner, 'usage')
        loop
            execute format('revoke all on %s from %I', owned, role);
        end loop;
        if not has_schema_privilege(role, current_schema(), 'usage') then
            execute format('grant usage on schema %I to %I', current_schema(), role);
        end if;
    end loop;
    for line in
        select g.*
        from (values
            -- The lease and the epoch are the nodes'; everything else of an account is the operator's.
            ('trading_accounts', 'lockstep_node', array['select'], null, null),
            ('trading_accounts', 'lockstep_node', array['update'], array[
                'node_id', 'lease_until', 'lease_token', 'tenure_since', 'starts', 'free_since', 'epoch_max'], null),
            ('trading_accounts', 'lockstep_api', array['select'], null, null),
            ('trading_accounts', 'lockstep_api', array['insert', 'update'], null, array[
                'id', 'node_id', 'lease_until', 'lease_token', 'tenure_since', 'starts', 'free_since', 'epoch_max']),
            ('trading_accounts', 'lockstep_readonly', array['select'], null, null),
            ('lease_nodes', 'lockstep_node', array['select', 'insert', 'update', 'delete'], null, null),
            ('lease_nodes', 'lockstep_api', array['select'], null, null),
            ('lease_nodes', 'lockstep_readonly', array['select'], null, null),
            -- A node notes one thing on a link: that its broker keeps no tags.
            ('copy_links', 'lockstep_node', array['select'], null, null),
            ('copy_links', 'lockstep_node', array['update'], array['untaggable_since'], null),
            ('copy_links', 'lockstep_api', array['select', 'insert', 'update'], null, null),
            ('copy_links', 'lockstep_readonly', array['select'], null, null),
            ('pairs', 'lockstep_node', array['select', 'insert', 'update'], null, null),
            ('pairs', 'lockstep_api', array['select'], null, null),
            ('pairs', 'lockstep_readonly', array['select'], null, null),
            ('copy_events', 'lockstep_node', array['select', 'insert'], null, null),
            ('copy_events', 'lockstep_api', array['select'], null, null),
            ('copy_events', 'lockstep_readonly', array['select'], null, null),
            ('account_status', 'lockstep_node', array['select', 'insert', 'update'], null, null),
            ('account_status', 'lockstep_api', array['select'], null, null),
            ('account_status', 'lockstep_readonly', array['select'], null, null),
            -- Nodes open what is sealed; whoever stores a password, or wraps its key anew, need not read it.
            ('account_credentials', 'lockstep_node', array['select'], null, null),
            ('account_credentials', 'lockstep_api', array['select'], null, array['sealed']),
            ('account_credentials', 'lockstep_api', array['insert', 'update', 'delete'], null, null),
            -- What stops everything.
            ('fleet_mode', 'lockstep_node', array['select'], null, null),
            ('fleet_mode', 'lockstep_api', array['select', 'insert', 'update'], null, null),
            ('fleet_mode', 'lockstep_readonly', array['select'], null, null),
            -- Hashes of tokens, which nobody but who checks them has to see.
            ('api_tokens', 'lockstep_api', array['select', 'insert', 'update', 'delete'], null, null),
            ('node_minutes', 'lockstep_node', array['select', 'insert', 'update', 'delete'], null, null),
            ('node_minutes', 'lockstep_api', array['select'], null, null),
            ('node_minutes', 'lockstep_readonly', array['select'], null, null),
            -- Whether the schema is the one of the program.
            ('_sqlx_migrations', 'lockstep_node', array['select'], null, null),
            ('_sqlx_migrations', 'lockstep_api', array['select'], null, null),
            ('_sqlx_migrations', 'lockstep_readonly', array['select'], null, null)
        ) as g (relation, grantee, actions, columns_only, columns_without)
        join pg_roles r on r.rolname = g.grantee
        where to_regclass(g.relation) is not null
    loop
        foreach action in array line.actions loop
            if line.columns_only is null and line.columns_without is null then
                execute format('grant %s on %I to %I', action, line.relation, line.grantee);
            else
                select string_agg(quote_ident(a.attname), ', ') into columns
                from pg_attribute a
                where a.attrelid = to_regclass(line.relation) and a.attnum > 0 and not a.attisdropped
                  and (line.columns_only is null or a.attname = any (line.columns_only))
                  and (line.columns_without is null or a.attname <> all (line.columns_without));
                execute format('grant %s (%s) on %I to %I', action, columns, line.relation, line.grantee);
            end if;
        end loop;
    end loop;
    if exists (select from pg_roles where rolname = 'lockstep_node') then
        grant execute on function copy_events_make_partitions(integer) to lockstep_node;
    end if;
end
$$;
