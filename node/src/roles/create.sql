-- The roles themselves. They belong to the whole server, and nobody logs in as one of them: a login of
-- your own is made a member. Needs the right to create roles, where one is missing.
do $$
declare
    wanted text;
begin
    foreach wanted in array array['lockstep_node', 'lockstep_api', 'lockstep_readonly'] loop
        continue when exists (select from pg_roles where rolname = wanted);
        begin
            execute format('create role %I nologin', wanted);
        exception when duplicate_object or unique_violation then
            -- Somebody else was quicker, perhaps for another database of this server.
            null;
        end;
    end loop;
end
$$;
