-- Copy events: what was copied, skipped or failed, one row a fact, never edited.
--
-- Partitioned by month of the fact. Partitions are made ahead by copy_events_make_partitions();
-- what falls between them lands in the default partition and is moved when its month is made.
-- No foreign keys: history outlives the link it tells of, and a batch must not wait for it.

create table copy_events (
    -- Made by the node: a batch that is sent twice is stored once.
    id               uuid        not null,
    at               timestamptz not null,
    node_id          text        not null,
    lease_token      bigint      not null,
    link_id          bigint      not null,
    follower_id      bigint      not null,
    master_ticket    bigint      not null,
    follower_ticket  bigint,
    action           text        not null,
    outcome          text        not null,
    reason           text,
    symbol           text,
    lots             numeric,
    price            numeric,
    -- From the master's callback to the order call, without the broker's answer.
    own_time_us      bigint,
    -- From the order call to the broker's answer.
    broker_time_us   bigint,
    written_at       timestamptz not null default clock_timestamp(),

    constraint copy_events_pkey primary key (id, at),
    constraint copy_events_action_word check (action ~ '^[a-z][a-z_]{1,31}$'),
    constraint copy_events_outcome_word check (outcome in ('done', 'skipped', 'rejected', 'not_sent', 'unknown')),
    constraint copy_events_reason_short check (length(reason) <= 300),
    constraint copy_events_symbol_short check (length(symbol) <= 64),
    constraint copy_events_times_not_negative check (own_time_us >= 0 and broker_time_us >= 0)
) partition by range (at);

create table copy_events_default partition of copy_events default;

create index copy_events_of_link on copy_events (link_id, at desc);
create index copy_events_of_follower on copy_events (follower_id, at desc);

-- Makes the partitions of this month and of the months_ahead after it; returns how many were
-- new. Rows of such a month that already lie in the default partition are moved.
create function copy_events_make_partitions(months_ahead integer) returns integer language plpgsql as $$
declare
    month_start timestamptz;
    month_end   timestamptz;
    part        text;
    made        integer := 0;
begin
    if months_ahead is null or months_ahead not between 0 and 24 then
        raise exception 'months_ahead must be between 0 and 24, got %', months_ahead
            using errcode = 'invalid_parameter_value';
    end if;
    -- Two nodes starting at once would both find the month missing.
    perform pg_advisory_xact_lock(hashtext('copy_events_make_partitions'));
    for ahead in 0..months_ahead loop
        month_start := (date_trunc('month', now() at time zone 'utc') + make_interval(months => ahead)) at time zone 'utc';
        month_end := (date_trunc('month', now() at time zone 'utc') + make_interval(months => ahead + 1)) at time zone 'utc';
        part := 'copy_events_' || to_char(month_start at time zone 'utc', '"y"YYYY"m"MM');
        continue when to_regclass(part) is not null;
        -- Nothing may enter the month between the move and the attach.
        lock table copy_events in share row exclusive mode;
        execute format('create table %I (like copy_events including defaults including constraints)', part);
        execute format(
            'with moved as (delete from copy_events_default where at >= %L and at < %L returning *) insert into %I select * from moved',
            month_start, month_end, part);
        execute format('alter table copy_events attach partition %I for values from (%L) to (%L)', part, month_start, month_end);
        made := made + 1;
    end loop;
    return made;
end
$$;

-- Drops whole months that ended more than keep_months ago; returns how many. Nobody calls it
-- unasked: how long history is kept is the operator's decision.
create function copy_events_drop_partitions(keep_months integer) returns integer language plpgsql as $$
declare
    oldest  text;
    part    record;
    dropped integer := 0;
begin
    if keep_months is null or keep_months < 1 then
        raise exception 'keep_months must be at least 1, got %', keep_months
            using errcode = 'invalid_parameter_value';
    end if;
    oldest := 'copy_events_' || to_char((now() at time zone 'utc') - make_interval(months => keep_months), '"y"YYYY"m"MM');
    for part in
        select c.relname
        from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'copy_events'::regclass
          and c.relname ~ '^copy_events_y[0-9]{4}m[0-9]{2}$' and c.relname < oldest
    loop
        execute format('drop table %I', part.relname);
        dropped := dropped + 1;
    end loop;
    return dropped;
end
$$;

select copy_events_make_partitions(2);
