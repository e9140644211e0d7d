-- What each node was in each minute: one row a node and minute, written once, by the node itself, late
-- where the database was away. A minute without a row is a minute of which nobody knows anything.
create table node_minutes (
    -- The node's name, without the part that is drawn anew at every start.
    node     text        not null,
    -- When the minute began.
    minute   timestamptz not null,
    -- What was not there; empty where all was well.
    reasons  text[]      not null,
    state    text        not null
        generated always as (case when reasons = '{}'::text[] then 'ok' else 'degraded' end) stored,
    -- A row that is much later than its minute waited for the database.
    written_at timestamptz not null default clock_timestamp(),

    constraint node_minutes_one_per_node_and_minute primary key (node, minute),
    constraint node_minutes_whole check (extract(epoch from minute) % 60 = 0),
    constraint node_minutes_reasons_word
        check (reasons <@ array['no account lease', 'bus', 'database', 'broker'])
);

-- The last day, of every node.
create index node_minutes_minute on node_minutes (minute);
