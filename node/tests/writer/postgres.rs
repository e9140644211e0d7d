//! What only a real Postgres can show: locks, commits, broken connections, a schema that does not fit.

use crate::world::*;
use lockstep::writer::batch::{BATCH_ROWS_MAX, Batch};
use lockstep::writer::store::persist_on;
use lockstep::writer::*;
use reconcile::{Pair, PairState};
use schemas::Micros;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use RowOutcome::{Already, Busy, NotOwner, Written};

/// What the lease does to take expired rows: the row lock is what matters here.
async fn claim(connection: &mut PgConnection, id: u64, name: &str) -> u64 {
    let sql = "with free as materialized (
            select id from trading_accounts where id = $1 for update skip locked)
        update trading_accounts t set node_id = $2, lease_token = t.lease_token + 1
        from free where t.id = free.id";
    let query = sqlx::query(sql).bind(id as i64).bind(name);
    query.execute(connection).await.unwrap().rows_affected()
}

async fn begin(world: &PostgresWorld) -> PgConnection {
    let mut connection = world.connect().await;
    connection.execute("begin").await.unwrap();
    connection
}

fn open(follower: u64, token: u64) -> Batch {
    let row = versioned(pair(follower, 1, PairState::Open, Some(900 + token)), token, 1);
    Batch::sorted([Row::Pair(row)]).remove(0)
}

async fn wait_until(what: &str, world: &PostgresWorld, sql: &'static str, wanted: i64) {
    let deadline = Instant::now() + LIMIT;
    while world.number(sql).await != wanted {
        assert!(Instant::now() < deadline, "{what} did not come about");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn the_server_says_its_timeline_once_something_was_written() {
    let world = PostgresWorld::start().await;
    let rows = world.rows("a");
    assert_eq!(rows.timeline(), None);
    assert_eq!(rows.persist(&open(11, 1)).await.unwrap(), [Written]);
    assert_eq!(rows.timeline(), Some(1));
}

#[tokio::test]
async fn claim_between_fence_check_and_commit_passes_the_account_over() {
    let world = PostgresWorld::start().await;
    let mut old_owner = begin(&world).await;
    let outcomes = persist_on(&mut old_owner, &node("a"), &open(11, 1)).await.unwrap();
    assert_eq!(outcomes, [Written]);

    let mut new_owner = world.connect().await;
    assert_eq!(claim(&mut new_owner, 11, "b").await, 0);
    old_owner.execute("commit").await.unwrap();
    assert_eq!(claim(&mut new_owner, 11, "b").await, 1);

    // The row of the old owner was there before the claim, so the new owner has seen it.
    let seen = world.pairs(11).await;
    assert_eq!(seen.len(), 1);
    let outcomes = world.rows("a").persist(&open(11, 1)).await.unwrap();
    assert_eq!(outcomes, [NotOwner]);
    let outcomes = world.rows("b").persist(&open(11, 2)).await.unwrap();
    assert_eq!(outcomes, [Written]);
}

// The audit of every test here can fail: a row that somebody writes past the fence.
#[tokio::test]
async fn live_row_that_is_not_the_owners_at_commit_is_seen_by_the_audit() {
    let world = PostgresWorld::start().await;
    let mut owner = begin(&world).await;
    let outcomes = persist_on(&mut owner, &node("a"), &open(11, 1)).await.unwrap();
    assert_eq!(outcomes, [Written]);
    // What a fence without a lock would let happen between the check and the commit (M6).
    owner
        .execute("update trading_accounts set node_id = 'b', lease_token = 2 where id = 11")
        .await
        .unwrap();
    let error = owner.execute("commit").await.unwrap_err().into_database_error().unwrap();
    assert_eq!(error.constraint(), Some("audit_owner_at_commit"));
}

// H44, H45 and H46 by chance: two owners take an account from each other, buffer rows of all
// their tenures and write them in transactions that stay open across the claims of the other.
#[tokio::test]
async fn rows_of_every_tenure_in_any_order_leave_only_the_owners_alive_at_every_commit() {
    let world = PostgresWorld::start().await;
    let seed = fastrand::u64(..);
    let mut tenures = 0;
    for seed in [1, 2, seed] {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut token = 1;
        world.set_owner(11, "a", 1).await;
        world.run("delete from pairs").await;
        let (mut a, mut b) = (begin(&world).await, begin(&world).await);
        let mut claims = world.connect().await;
        let mut buffered: Vec<(u64, Row)> = Vec::new();
        for step in 0..120 {
            let who = if token % 2 == 1 { "a" } else { "b" };
            match random.u8(..10) {
                0..3 => {
                    let state = [PairState::Open, PairState::Closing, PairState::Closed];
                    let state = state[random.usize(..3)];
                    let row = pair(11, random.u64(1..4), state, Some(900 + token));
                    buffered.push((token, Row::Pair(versioned(row, token, step + 1))));
                }
                3..7 if !buffered.is_empty() => {
                    let (of, row) = buffered.swap_remove(random.usize(..buffered.len()));
                    let (connection, name) =
                        if of % 2 == 1 { (&mut a, "a") } else { (&mut b, "b") };
                    let batch = Batch::sorted([row]).remove(0);
                    connection.execute("set local lock_timeout = '50ms'").await.unwrap();
                    if persist_on(connection, &node(name), &batch).await.is_err() {
                        // A row or an index entry that the other transaction holds.
                        connection.execute("rollback").await.unwrap();
                        connection.execute("begin").await.unwrap();
                    }
                }
                7 => {
                    let next = if who == "a" { "b" } else { "a" };
                    token += claim(&mut claims, 11, next).await;
                }
                _ => {
                    let connection = if random.bool() { &mut a } else { &mut b };
                    let committed = connection.execute("commit").await;
                    assert!(committed.is_ok(), "seed {seed}, step {step}: {committed:?}");
                    connection.execute("begin").await.unwrap();
                }
            }
        }
        for connection in [&mut a, &mut b] {
            let committed = connection.execute("commit").await;
            assert!(committed.is_ok(), "seed {seed}: {committed:?}");
        }
        tenures += token;
        // Terminal rows stayed, and one ticket has one live row at most.
        let doubled = "select count(*) from (select 1 from pairs where state in ('sending', 'open', 'closing')
            group by link_id, master_ticket having count(*) > 1) d";
        assert_eq!(world.number(doubled).await, 0);
    }
    // A claim that meets an open transaction takes nothing; one seed alone may have few.
    assert!(tenures > 9, "only {tenures} tenures in three runs, the last with seed {seed}");
}

#[tokio::test]
async fn live_row_during_a_claim_waits_and_is_refused_after_it() {
    let world = PostgresWorld::start().await;
    let mut new_owner = begin(&world).await;
    assert_eq!(claim(&mut new_owner, 11, "b").await, 1);
    // The claim is not committed: this row cannot be judged yet, and nobody waits for it.
    assert_eq!(world.rows("a").persist(&open(11, 1)).await.unwrap(), [Busy]);
    new_owner.execute("commit").await.unwrap();
    assert_eq!(world.rows("a").persist(&open(11, 1)).await.unwrap(), [NotOwner]);
    assert!(world.pairs(11).await.is_empty());
}

#[tokio::test]
async fn row_seen_before_a_claim_and_locked_after_it_is_not_written() {
    let world = PostgresWorld::start().await;
    // The old owner's statement has its snapshot, and is stopped before it locks the account.
    let mut old_owner = world.connect().await;
    world
        .run(
            "create function stop_here() returns boolean language plpgsql as
        $$ begin perform pg_advisory_lock_shared(7); return true; end $$;
        alter table trading_accounts enable row level security;
        create role writer_role; grant all on all tables in schema public to writer_role;
        create policy stopped on trading_accounts using (stop_here());",
        )
        .await;
    old_owner.execute("set role writer_role").await.unwrap();
    let mut new_owner = world.connect().await;
    new_owner.execute("select pg_advisory_lock(7)").await.unwrap();
    let writing =
        tokio::spawn(async move { persist_on(&mut old_owner, &node("a"), &open(11, 1)).await });
    let waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted
        and database = (select oid from pg_database where datname = current_database())";
    wait_until("the writer at its stop", &world, waiting, 1).await;
    assert_eq!(claim(&mut new_owner, 11, "b").await, 1);
    new_owner.execute("select pg_advisory_unlock(7)").await.unwrap();
    let outcomes = writing.await.unwrap().unwrap();
    // It looked like the owner's at first, so it is looked at once more.
    assert_eq!(outcomes, [Busy]);
    assert!(world.pairs(11).await.is_empty());
    assert_eq!(world.rows("a").persist(&open(11, 1)).await.unwrap(), [NotOwner]);
}

#[tokio::test]
async fn writer_renewals_and_claims_at_once_neither_deadlock_nor_miss_a_renewal() {
    // The three go on until each has had its rounds: how quick one is beside another is chance.
    const RENEWALS: usize = 150;
    const CLAIMS: usize = 150;
    const WRITES: u64 = 6;
    let world = PostgresWorld::start().await;
    let has_written = Arc::new(AtomicBool::new(false));
    let (url, is_over) = (world.url.clone(), has_written.clone());
    let renewals = tokio::spawn(async move {
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let mut round = 0;
        while round < RENEWALS || !is_over.load(Relaxed) {
            round += 1;
            // Rows in the other order than the writer's, as M5 had it.
            let sql = "with mine as materialized (
                    select id from trading_accounts where node_id = 'a' order by id desc
                    for no key update skip locked)
                update trading_accounts t set lease_until = clock_timestamp() + interval '1 minute'
                from mine where t.id = mine.id";
            let renewed = connection.execute(sql).await.unwrap().rows_affected();
            assert_eq!(renewed, 10, "round {round}");
        }
    });
    let (url, is_over) = (world.url.clone(), has_written.clone());
    let claims = tokio::spawn(async move {
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let mut round = 0;
        while round < CLAIMS || !is_over.load(Relaxed) {
            round += 1;
            let sql = "with free as materialized (
                    select id from trading_accounts where node_id is null order by id
                    for update skip locked)
                update trading_accounts t set node_id = 'b' from free where t.id = free.id";
            connection.execute(sql).await.unwrap();
        }
    });
    let rows = world.rows("a");
    let mut version = 0;
    while version < WRITES || !(renewals.is_finished() && claims.is_finished()) {
        version += 1;
        let all = FOLLOWERS.flat_map(|follower| {
            (1..=20).map(move |n| {
                let state = if n == version % 20 { PairState::Closed } else { PairState::Open };
                Row::Pair(versioned(pair(follower, version * 100 + n, state, Some(n)), 1, version))
            })
        });
        for batch in Batch::sorted(all) {
            let outcomes = rows.persist(&batch).await.unwrap();
            assert!(outcomes.iter().all(|outcome| *outcome == Written), "{outcomes:?}");
        }
        has_written.store(version >= WRITES, Relaxed);
    }
    renewals.await.unwrap();
    claims.await.unwrap();
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(world.number(deadlocks).await, 0);
}

#[tokio::test]
async fn statement_that_was_given_up_leaves_no_transaction_and_is_stored_once_when_sent_again() {
    let world = PostgresWorld::start().await;
    let rows = world.pg_rows("a");
    assert_eq!(rows.persist(&open(11, 1)).await.unwrap(), [Written]);
    let ours = "select count(*) from pg_stat_activity
        where application_name = 'lockstep-writer' and datname = current_database()";
    assert_eq!(world.number(ours).await, 1);

    // Somebody holds the pair's row; the statement waits for it and its future is dropped.
    let mut other = begin(&world).await;
    other.execute("select 1 from pairs for update").await.unwrap();
    let closing = versioned(pair(11, 1, PairState::Closing, Some(901)), 1, 2);
    let batch = Batch::sorted([Row::Pair(closing)]).remove(0);
    let waiting = "select count(*) from pg_stat_activity where application_name = 'lockstep-writer'
        and datname = current_database() and wait_event_type = 'Lock'";
    tokio::select! {
        result = rows.persist(&batch) => panic!("it did not wait: {result:?}"),
        () = wait_until("the statement waiting for a lock", &world, waiting, 1) => {}
    }
    other.execute("rollback").await.unwrap();
    wait_until("the end of the connection", &world, ours, 0).await;
    // The server may have finished it before it saw that nobody listens.
    let again = rows.persist(&batch).await.unwrap();
    assert!(matches!(again[..], [Written | Already]), "{again:?}");
    assert_eq!(rows.persist(&batch).await.unwrap(), [Already]);
    assert_eq!(world.pairs(11).await[0].pair.version, 2);
}

#[tokio::test]
async fn rows_are_kept_while_the_database_is_away_and_drain_when_it_is_back() {
    let world = PostgresWorld::start().await;
    let writer = world.writer("a");
    writer.push(Row::Pair(pair(11, 1, PairState::Sending, None)));
    flush(&writer, 11).await;

    let server = devstack::shared_postgres().await.unwrap();
    let mut admin = PgConnection::connect(&server.url("postgres")).await.unwrap();
    let name = world.url.rsplit('/').next().unwrap().to_owned();
    let allow = async |admin: &mut PgConnection, is_allowed: bool| {
        let sql = format!("alter database {name} allow_connections {is_allowed}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut *admin).await.unwrap();
    };
    allow(&mut admin, false).await;
    let end = "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1";
    sqlx::query(end).bind(&name).execute(&mut admin).await.unwrap();
    for version in 2..=500 {
        for ticket in 1..=20 {
            let row = pair(11, ticket, PairState::Open, Some(ticket));
            writer.push(Row::Pair(versioned(row, 1, version)));
        }
    }
    writer.push(Row::CopyEvent(event(11)));
    // One flush at least meets the closed door.
    let early = tokio::time::timeout(Duration::from_millis(500), writer.flush_account(account(11)));
    assert!(early.await.is_err());
    assert_eq!(writer.pending(account(11)), 21);

    allow(&mut admin, true).await;
    flush(&writer, 11).await;
    let stored = world.pairs(11).await;
    assert_eq!(stored.len(), 20);
    assert!(stored.iter().all(|row| row.pair.version == 500));
    assert_eq!(world.count_events().await, 1);
}

#[tokio::test]
async fn rows_are_kept_while_a_table_is_missing_and_other_tables_wait_with_them() {
    let world = PostgresWorld::start().await;
    world.run("alter table pairs rename to pairs_away").await;
    let writer = world.writer("a");
    writer.push(Row::Pair(pair(11, 1, PairState::Open, Some(901))));
    let early = tokio::time::timeout(Duration::from_millis(500), writer.flush_account(account(11)));
    assert!(early.await.is_err());
    assert_eq!(writer.pending(account(11)), 1);
    world.run("alter table pairs_away rename to pairs").await;
    flush(&writer, 11).await;
    assert_eq!(world.pairs(11).await.len(), 1);
}

#[tokio::test]
async fn value_that_postgres_cannot_store_costs_only_its_row() {
    let world = PostgresWorld::start().await;
    let writer = world.writer("a");
    for ticket in 1..=100 {
        let mut row = pair(11, ticket, PairState::Open, Some(ticket));
        row.opened_at = Some(Micros(if ticket == 7 { i64::MAX } else { 0 }));
        writer.push(Row::Pair(row));
    }
    let mut far = event(11);
    far.at = Micros(i64::MIN);
    writer.push(Row::CopyEvent(far));
    writer.push(Row::CopyEvent(event(11)));
    flush(&writer, 11).await;
    assert_eq!(world.pairs(11).await.len(), 99);
    assert_eq!(world.count_events().await, 1);
}

#[tokio::test]
async fn pair_of_a_link_that_is_marked_deleted_is_still_written() {
    let world = PostgresWorld::start().await;
    world.run("update copy_links set deleted_at = now(), enabled = false where id = 11").await;
    let row = Row::Pair(pair(11, 1, PairState::Closing, Some(901)));
    assert_eq!(world.store("a", [row]).await, [Written]);
}

#[tokio::test]
async fn dropped_and_left_out_rows_are_counted_by_reason() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _guard = ::metrics::set_default_local_recorder(&recorder);
    let world = PostgresWorld::start().await;
    let writer = world.writer("a");
    let mut gone = pair(11, 1, PairState::Open, Some(901));
    gone.pair.link = link(999);
    writer.push(Row::Pair(gone));
    writer.push(Row::Pair(versioned(pair(11, 2, PairState::Open, Some(902)), 7, 1)));
    writer.push(Row::Pair(pair(11, 3, PairState::Open, Some(903))));
    flush(&writer, 11).await;
    let text = handle.render();
    for outcome in ["refused", "not_owner", "written"] {
        let line =
            format!("lockstep_writer_rows_total{{kind=\"pair_live\",outcome=\"{outcome}\"}} 1");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    let exported: Vec<&str> = lockstep::writer::metrics::METRICS
        .iter()
        .map(|metric| metric.name)
        .filter(|name| *name != lockstep::writer::metrics::DEPLOYMENT_FAULT)
        .collect();
    for name in exported {
        assert!(text.contains(name), "{name} is not in\n{text}");
    }
}

// One read of everything took longer than its limit for a follower of some years.
#[tokio::test]
async fn more_ended_rows_than_one_read_takes_are_all_loaded() {
    let world = PostgresWorld::start().await;
    world.store("a", [Row::Pair(pair(11, 1, PairState::Open, Some(901)))]).await;
    world
        .run(
            "insert into pairs (id, link_id, follower_id, master_ticket, follower_ticket, state,
                symbol, side, master_side, master_lots_at_open, version, lease_token, node_id)
            select gen_random_uuid(), 11, 11, 1 + n / 3, 1000 + n, 'closed', 'EURUSD', 'buy', 'buy',
                1, 1, 1, 'a' from generate_series(1, 40001) n",
        )
        .await;
    let loaded = world.rows("b").load_pairs(account(11)).await.unwrap();
    assert_eq!(loaded.live.len(), 1);
    let tickets: std::collections::BTreeSet<_> =
        loaded.ended.iter().map(|row| row.pair.follower_ticket).collect();
    assert_eq!((loaded.ended.len(), tickets.len()), (40_001, 40_001));
}

#[tokio::test]
async fn ended_row_is_kept_from_every_other_program_too() {
    let world = PostgresWorld::start().await;
    world.store("a", [Row::Pair(pair(11, 1, PairState::Closed, Some(901)))]).await;
    let sql = "update pairs set state = 'open'";
    let error = world.connect().await.execute(sql).await.unwrap_err();
    let error = error.into_database_error().unwrap();
    assert_eq!(error.constraint(), Some("pairs_ended_rows_stay"));
    assert_eq!(error.code().as_deref(), Some("23514"));
}

#[tokio::test]
async fn full_batch_of_each_kind_is_written_with_one_statement() {
    let world = PostgresWorld::start().await;
    world
        .run(
            "create table statements (about text);
            create function count_statement() returns trigger language plpgsql as
            $$ begin insert into statements values (tg_table_name); return null; end $$;
            create trigger counted after insert on pairs execute function count_statement();
            create trigger counted after insert on copy_events execute function count_statement();
            create trigger counted after insert on account_status execute function count_statement();",
        )
        .await;
    let tickets = 1..=u64::try_from(BATCH_ROWS_MAX).unwrap();
    let pairs =
        |state| tickets.clone().map(move |n| Row::Pair(pair(11, n, state, Some(10_000 + n))));
    let events = tickets.clone().map(|_| Row::CopyEvent(event(11)));
    let statuses = FOLLOWERS.map(|id| Row::AccountStatus(status(id, "copying", 1)));
    let batches: [Vec<Row>; 4] = [
        pairs(PairState::Open).collect(),
        pairs(PairState::Closed).collect(),
        events.collect(),
        statuses.collect(),
    ];
    for (written, rows) in (1..).zip(batches) {
        let wanted = vec![Written; rows.len()];
        assert_eq!(world.store("a", rows).await, wanted);
        assert_eq!(world.number("select count(*) from statements").await, written);
    }
}

#[tokio::test]
async fn events_between_partitions_are_moved_when_their_month_is_made() {
    let world = PostgresWorld::start().await;
    let in_default = "select count(*) from copy_events_default";
    let mut far = event(11);
    let month = Duration::from_secs(30 * 24 * 3600);
    let now: i64 = world.number("select (extract(epoch from now()) * 1000000)::bigint").await;
    far.at = Micros(now).plus(5 * month);
    world.store("a", [Row::CopyEvent(far)]).await;
    assert_eq!(world.number(in_default).await, 1);
    assert!(world.number("select copy_events_make_partitions(7)::bigint").await >= 4);
    assert_eq!(world.number(in_default).await, 0);
    assert_eq!(world.count_events().await, 1);
    // What is there is made once, and the writer's own call finds it there.
    assert_eq!(world.number("select copy_events_make_partitions(7)::bigint").await, 0);
    world.rows("a").prepare().await.unwrap();
    let mut soon = event(11);
    soon.at = Micros(now);
    world.store("a", [Row::CopyEvent(soon)]).await;
    assert_eq!(world.number(in_default).await, 0);
}

/// A small generator, so that a failure names its seed.
fn random_rows(random: &mut fastrand::Rng) -> Vec<Row> {
    let count = random.usize(1..12);
    let row = |random: &mut fastrand::Rng| {
        let state = PairState::ALL[random.usize(0..6)];
        let copy = match state {
            PairState::Sending => None,
            PairState::Failed | PairState::Skipped if random.bool() => None,
            _ => Some(random.u64(900..903)),
        };
        let row = pair(random.u64(11..13), random.u64(1..4), state, copy);
        let mut row = versioned(row, random.u64(1..4), random.u64(1..6));
        if random.u8(..10) == 0 {
            // A second identity for the same ticket, and for no other: a pair has one follower.
            let place = row.pair.link.get() * 100 + row.pair.master_ticket.get() * 10;
            let id = u128::from(place + random.u64(1..4));
            row.pair = Pair { id: reconcile::PairId(id), ..row.pair };
        }
        Row::Pair(row)
    };
    (0..count).map(|_| row(random)).collect()
}

#[tokio::test]
async fn memory_and_postgres_answer_and_store_the_same_for_any_history() {
    let seed = fastrand::u64(..);
    for seed in [1, 2, 3, seed] {
        let mut random = fastrand::Rng::with_seed(seed);
        let (memory, postgres) = (MemoryWorld::start().await, PostgresWorld::start().await);
        let in_memory = ["a", "b"].map(|name| memory.rows(name));
        let in_postgres = ["a", "b"].map(|name| postgres.rows(name));
        for step in 0..60 {
            if random.u8(..6) == 0 {
                let (id, name) = (random.u64(11..13), ["a", "b"][random.usize(0..2)]);
                let token = random.u64(1..4);
                memory.set_owner(id, name, token).await;
                postgres.set_owner(id, name, token).await;
            }
            let who = random.usize(0..2);
            for batch in Batch::sorted(random_rows(&mut random)) {
                let answers =
                    (in_memory[who].persist(&batch).await, in_postgres[who].persist(&batch).await);
                let shape = |result: Result<Vec<RowOutcome>, WriteError>| {
                    result.map_err(|error| error.sqlstate().map(str::to_owned))
                };
                assert_eq!(
                    shape(answers.0),
                    shape(answers.1),
                    "seed {seed}, step {step}, {batch:?}"
                );
            }
            for follower in (11..13).map(account) {
                let stored = in_postgres[0].load_pairs(follower).await.unwrap();
                let expected = in_memory[0].load_pairs(follower).await.unwrap();
                assert_eq!(expected, stored, "seed {seed}, step {step}");
            }
        }
    }
}
