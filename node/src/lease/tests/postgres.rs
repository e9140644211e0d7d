//! What only a real server can show.

use super::super::claim::CLAIM;
use super::super::store::{LeaseError, TRANSACTION_AGE_MAX, session_options};
use super::super::task::{LeaseHandle, LeaseSettings, start};
use super::*;
use crate::clock::NodeClock;
use crate::gate::Gate;
use devstack::{FaultMode, FaultProxy};
use sqlx::postgres::types::PgInterval;
use sqlx::{AssertSqlSafe, ConnectOptions, Row as _};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Barrier;

/// Short enough to wait for, long enough for two cores that run everything at once.
const SHORT: LeaseTiming = LeaseTiming {
    lease: Duration::from_millis(3_000),
    fence: Duration::from_millis(1_000),
    cycle: Duration::from_millis(600),
    retry: Duration::from_millis(200),
    query_limit: Duration::from_millis(800),
};

struct Node {
    lease: LeaseHandle,
    gate: Gate,
    clock: NodeClock,
}

impl Node {
    fn start(name: &str, url: &str, timing: LeaseTiming, capacity: u32) -> Self {
        let gate = Gate::new();
        let clock = NodeClock::system();
        let settings = LeaseSettings {
            node: node(name),
            platforms: vec!["paper".into()],
            timing,
            capacity,
            claim_rows_max: 50,
            listen_url: Some(url.to_owned()),
            proven_dead: Vec::new(),
        };
        let store = PostgresOwnership::new(url, timing.query_limit).unwrap();
        let lease = start(settings, store, gate.clone(), clock.clone()).unwrap();
        Self { lease, gate, clock }
    }

    fn held(&self) -> Vec<TenureKey> {
        let state = Arc::clone(&self.lease.state().borrow());
        let key = |(account, tenure): (&AccountId, &super::super::Tenure)| TenureKey {
            account: *account,
            token: tenure.token,
        };
        state.held.iter().map(key).collect()
    }

    async fn owns(&self, count: usize) {
        eventually("the node owns its accounts", async || self.held().len() == count).await;
    }

    fn may_send(&self, id: u64) -> bool {
        self.gate.permission(account(id), self.clock.now()).is_some()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_racing_for_two_hundred_accounts_never_share_one() {
    const ACCOUNTS: i64 = 200;
    let world = PostgresWorld::new().await;
    world.fill(ACCOUNTS).await;
    for round in 0..10 {
        // Every other round the accounts are those of a dead node instead of free ones.
        world
            .run(if round % 2 == 0 {
                "update trading_accounts set node_id = null, lease_until = '-infinity', starts = 0"
            } else {
                "update trading_accounts set node_id = 'dead', lease_until = now() - interval '1 s',
                 starts = 0"
            })
            .await;
        let barrier = Arc::new(Barrier::new(2));
        let racers = ["a", "b"].map(|name| {
            let (mut store, barrier) = (world.store(), Arc::clone(&barrier));
            tokio::spawn(async move {
                store.cycle(&cycle_of(name)).await.unwrap();
                barrier.wait().await;
                let mut mine = BTreeSet::new();
                loop {
                    let reply = store.cycle(&claiming(name, 7)).await.unwrap();
                    mine.extend(reply.claimed.iter().map(|row| row.tenure));
                    let owned: BTreeSet<TenureKey> =
                        reply.owned.iter().map(|row| row.tenure).collect();
                    assert_eq!(mine, owned, "what was claimed is what is owned");
                    if reply.claimed.is_empty() {
                        return mine;
                    }
                }
            })
        });
        let [a, b] = racers;
        let (a, b) = (a.await.unwrap(), b.await.unwrap());
        let accounts: BTreeSet<AccountId> = a.iter().chain(&b).map(|key| key.account).collect();
        assert_eq!(a.len() + b.len(), accounts.len(), "round {round}: an account has two owners");
        assert_eq!(accounts.len(), ACCOUNTS as usize, "round {round}: an account has no owner");
    }
}

#[tokio::test]
async fn claim_keeps_to_its_limit_when_statistics_speak_of_one_row() {
    let world = PostgresWorld::new().await;
    world.run("alter table trading_accounts set (autovacuum_enabled = false)").await;
    world.fill(1).await;
    world.run("analyze trading_accounts").await;
    world.run("delete from trading_accounts").await;
    world.fill(60).await;
    let mut store = world.store();
    let free = store.cycle(&claiming("a", 5)).await.unwrap();
    assert_eq!(free.claimed.len(), 5);
    world
        .run("update trading_accounts set node_id = 'dead', lease_until = now() - interval '1 s'")
        .await;
    let expired = store.cycle(&claiming("a", 5)).await.unwrap();
    assert_eq!(expired.claimed.len(), 5);
    assert_eq!(world.number("select count(*) from trading_accounts where node_id = 'a'").await, 5);
}

#[tokio::test]
async fn row_whose_owners_writer_is_at_work_is_renewed_but_not_claimed_and_not_released() {
    let world = PostgresWorld::new().await;
    world.fill(1).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    let mut writer = world.connection().await;
    let mut batch = writer.begin().await.unwrap();
    sqlx::query("select 1 from trading_accounts where id = 1 for key share")
        .execute(&mut *batch)
        .await
        .unwrap();
    let renewed = store.cycle(&renewing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(renewed.renewed, [account(1)]);
    assert_eq!(store.cycle(&releasing("a", &[key(1, 1)])).await.unwrap().released, []);
    world.expire(1).await;
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed, []);
    batch.commit().await.unwrap();
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed.len(), 1);
}

#[tokio::test]
async fn wait_after_bad_starts_is_the_same_in_the_database_and_in_the_node() {
    let world = PostgresWorld::new().await;
    let accounts = [1u64, 2, 77, 1_000_003, 123_456_789_012];
    let all = accounts.into_iter().flat_map(|id| [2u32, 60].map(|lease| (id, lease)));
    for (id, lease) in all {
        for starts in 0..20u32 {
            let there: i64 = sqlx::query_scalar(
                "select (extract(epoch from
                    lockstep_claim_wait($1, $2, make_interval(secs => $3))) * 1000000)::bigint",
            )
            .bind(starts as i32)
            .bind(id as i64)
            .bind(f64::from(lease))
            .fetch_one(&world.admin)
            .await
            .unwrap();
            let lease = Duration::from_secs(lease.into());
            let here = claim_wait(starts, account(id), lease).as_micros() as i64;
            assert_eq!(here, there, "{starts} starts of account {id}, lease {lease:?}");
        }
    }
}

#[tokio::test]
async fn row_that_is_written_late_in_its_transaction_gets_the_whole_lease() {
    let world = PostgresWorld::new().await;
    world.fill(2).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    world
        .run(
            "create function slowly() returns trigger language plpgsql as $$
             begin if new.id = 1 then perform pg_sleep(0.6); end if; return new; end $$;
             create trigger slowly before update on trading_accounts
             for each row execute function slowly();",
        )
        .await;
    store.cycle(&renewing("a", &[key(1, 1), key(2, 1)])).await.unwrap();
    let later_us = world
        .number(
            "select (extract(epoch from (select lease_until from trading_accounts where id = 2)
                 - (select lease_until from trading_accounts where id = 1)) * 1000000)::bigint",
        )
        .await;
    assert!(
        later_us >= 600_000,
        "the second row was written 600 ms later, and ends {later_us} us later"
    );
}

#[tokio::test]
async fn transaction_older_than_a_second_is_refused_and_rolled_back() {
    let world = PostgresWorld::new().await;
    world.fill(1).await;
    world
        .run(
            "create function slowly() returns trigger language plpgsql as $$
             begin perform pg_sleep(1.2); return new; end $$;
             create trigger slowly before update on trading_accounts
             for each row execute function slowly();",
        )
        .await;
    let error = world.store().cycle(&claiming("a", 5)).await.unwrap_err();
    match error {
        LeaseError::TransactionTooOld { age } => assert!(age > TRANSACTION_AGE_MAX, "{age:?}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(world.row(1).await, Row { node_id: None, token: token(0) });
}

#[tokio::test]
async fn renewal_that_the_table_swallows_is_not_taken_as_confirmed() {
    let world = PostgresWorld::new().await;
    world.fill(2).await;
    let mut store = world.store();
    let claimed = store.cycle(&claiming("a", 2)).await.unwrap().claimed;
    let tenures: Vec<TenureKey> = claimed.iter().map(|row| row.tenure).collect();
    world
        .run(
            "create function swallow() returns trigger language plpgsql as
                $$ begin if new.id = 1 then return null; end if; return new; end $$;
            create trigger swallow before update on trading_accounts
                for each row execute function swallow()",
        )
        .await;
    let refused = store.cycle(&renewing("a", &tenures)).await;
    assert!(matches!(refused, Err(LeaseError::RenewedOthers { rows: 1, owned: 2 })), "{refused:?}");
}

#[tokio::test]
async fn cycle_that_timed_out_leaves_no_transaction_behind_and_the_next_one_counts() {
    let world = PostgresWorld::new().await;
    world.fill(3).await;
    let server = devstack::shared_postgres().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).await.unwrap();
    let url = through(&world.url, &proxy);
    let mut store = PostgresOwnership::new(&url, SHORT.query_limit).unwrap();
    let tenures = [key(1, 1), key(2, 1), key(3, 1)];
    store.cycle(&claiming("a", 5)).await.unwrap();
    let before = world
        .number("select sum(extract(epoch from lease_until) * 1e6)::bigint from trading_accounts")
        .await;

    // Fast enough to begin, too slow to end: 3 round trips of 300 ms in 800 ms.
    proxy.set_mode(FaultMode::Latency(Duration::from_millis(150))).await.unwrap();
    let error = store.cycle(&renewing("a", &tenures)).await.unwrap_err();
    assert!(matches!(error, LeaseError::Timeout { .. }), "{error:?}");
    proxy.set_mode(FaultMode::Pass).await.unwrap();

    eventually("the transaction is gone", async || {
        world
            .number(
                "select count(*) from pg_stat_activity
                 where datname = current_database() and application_name = 'lockstep-lease'",
            )
            .await
            == 0
    })
    .await;
    let after = world
        .number("select sum(extract(epoch from lease_until) * 1e6)::bigint from trading_accounts")
        .await;
    assert_eq!(before, after, "a renewal that was not confirmed was written");

    let reply = store.cycle(&renewing("a", &tenures)).await.unwrap();
    assert_eq!(reply.renewed.len(), 3);
    // What the node believes is what everybody else sees.
    let seen = world
        .number("select count(*) from trading_accounts where lease_until > now() + interval '50 s'")
        .await;
    assert_eq!(seen, 3);
}

#[tokio::test]
async fn caller_that_drops_a_cycle_drops_its_connection_with_it() {
    let world = PostgresWorld::new().await;
    world.fill(1).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    let request = renewing("a", &[key(1, 1)]);
    let mut holder = world.connection().await;
    let mut hold = holder.begin().await.unwrap();
    sqlx::query("lock table trading_accounts in access exclusive mode")
        .execute(&mut *hold)
        .await
        .unwrap();
    let waits = eventually("the cycle waits for the table", async || {
        let waiting = "select count(*) from pg_stat_activity
             where datname = current_database() and application_name = 'lockstep-lease'
                 and wait_event_type = 'Lock'";
        world.number(waiting).await == 1
    });
    tokio::select! {
        outcome = store.cycle(&request) => panic!("the table is locked: {outcome:?}"),
        () = waits => {}
    }
    hold.rollback().await.unwrap();
    eventually("the abandoned connection is gone", async || {
        world
            .number(
                "select count(*) from pg_stat_activity
                 where datname = current_database() and application_name = 'lockstep-lease'",
            )
            .await
            == 0
    })
    .await;
    assert_eq!(store.cycle(&request).await.unwrap().renewed, [account(1)]);
}

#[tokio::test]
async fn connection_that_the_server_ended_is_left_and_made_anew() {
    let world = PostgresWorld::new().await;
    world.fill(1).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    world
        .run(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and application_name = 'lockstep-lease'",
        )
        .await;
    let request = renewing("a", &[key(1, 1)]);
    let error = store.cycle(&request).await.unwrap_err();
    assert!(matches!(error, LeaseError::Query { .. }), "{error:?}");
    assert_eq!(store.cycle(&request).await.unwrap().renewed, [account(1)]);
}

#[tokio::test]
async fn renewals_stay_hot_and_small_and_read_no_table_from_end_to_end() {
    const ACCOUNTS: usize = 500;
    /// A renewed row: its lock, its new version, and its share of the commit. 120 is allowed.
    const WAL_BYTES_MAX: i64 = 120;
    const WARM_UP: i64 = 10;
    const CYCLES: i64 = 40;
    // A server of its own: an open transaction anywhere on a server, in another database as well,
    // keeps old row versions alive.
    let server = devstack::Postgres::start(&devstack::Tools::locate().unwrap()).await.unwrap();
    let world = PostgresWorld::on(&server).await;
    world.fill(ACCOUNTS as i64).await;
    let mut store = world.store();
    let claimed = store.cycle(&claiming("a", ACCOUNTS as u32)).await.unwrap();
    let tenures: Vec<TenureKey> = claimed.claimed.iter().map(|row| row.tenure).collect();
    assert_eq!(tenures.len(), ACCOUNTS);
    let request = renewing("a", &tenures);
    let mut counted = ACCOUNTS as i64;
    let (mut hot, mut wal, mut scans) = (Vec::new(), Vec::new(), Vec::new());
    // A page is written whole after a checkpoint: none comes while it is counted.
    world.run("checkpoint").await;
    for cycles in [WARM_UP, CYCLES] {
        for _ in 0..cycles {
            assert_eq!(store.cycle(&request).await.unwrap().renewed.len(), ACCOUNTS);
        }
        // A session hands its counts in when it ends.
        drop(store);
        counted += cycles * ACCOUNTS as i64;
        eventually("the server has counted", async || {
            let updates =
                "select n_tup_upd from pg_stat_user_tables where relname = 'trading_accounts'";
            world.number(updates).await >= counted
        })
        .await;
        let sql =
            "select n_tup_hot_upd from pg_stat_user_tables where relname = 'trading_accounts'";
        hot.push(world.number(sql).await);
        let sql = "select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint";
        wal.push(world.number(sql).await);
        let sql = "select seq_scan from pg_stat_user_tables where relname = 'trading_accounts'";
        scans.push(world.number(sql).await);
        store = world.store();
    }
    let (hot, renewed) = (hot[1] - hot[0], CYCLES * ACCOUNTS as i64);
    assert!(hot * 100 >= renewed * 95, "{hot} of {renewed} renewals were hot");
    let wal = (wal[1] - wal[0]) / renewed;
    assert!(wal <= WAL_BYTES_MAX, "{wal} bytes of WAL a row");
    assert_eq!(scans[0], scans[1], "a cycle read the accounts from end to end");
}

/// How the server would claim, or claims, for `node-0`.
async fn claim_plan(world: &PostgresWorld, how: &str) -> Vec<String> {
    let mut connection =
        session_options(&world.url, TIMING.query_limit).unwrap().connect().await.unwrap();
    sqlx::query(AssertSqlSafe(format!("{how} {CLAIM}")))
        .bind(vec!["paper".to_owned()])
        .bind("node-0")
        .bind(PgInterval { months: 0, days: 0, microseconds: 60_000_000 })
        .bind(50i64)
        .bind(2_000i64)
        .bind(true)
        .bind(Vec::<i64>::new())
        .bind(Vec::<String>::new())
        .bind(None::<time::OffsetDateTime>)
        .bind(None::<time::OffsetDateTime>)
        .bind(PgInterval { months: 0, days: 0, microseconds: 5_000_000 })
        .fetch_all(&mut connection)
        .await
        .unwrap()
        .iter()
        .map(|row| row.get::<String, _>(0))
        .collect()
}

#[tokio::test]
async fn claim_that_finds_nothing_reads_no_table_from_end_to_end() {
    let world = PostgresWorld::new().await;
    world.fill(4_000).await;
    world
        .run(
            "update trading_accounts set node_id = 'node-' || id % 4, lease_token = 1,
             lease_until = now() + interval '1 h'",
        )
        .await;
    world.run("vacuum (analyze) trading_accounts").await;
    let plan = claim_plan(&world, "explain (analyze)").await;
    let text = plan.join("\n");
    assert!(!text.contains("Seq Scan"), "{text}");
    let place = |name: &str| plan.iter().position(|line| line.trim() == format!("CTE {name}"));
    for (of_dead_owners, next) in [("expired_seen", "expired_near"), ("expired_rest", "picked")] {
        let part = &plan[place(of_dead_owners).unwrap()..place(next).unwrap()];
        let rows = part.iter().filter(|line| line.contains(" on trading_accounts "));
        let read = rows.filter(|line| !line.contains("never executed")).count();
        assert_eq!(read, 0, "rows of live owners were read: {text}");
    }
}

#[tokio::test]
async fn claim_that_looks_for_followers_of_its_masters_reads_no_table_from_end_to_end() {
    for linked in [0, 390] {
        let world = PostgresWorld::new().await;
        world.fill(400).await;
        sqlx::query(
            "insert into copy_links (master_id, follower_id, magic)
             select 1 + n % 4, 5 + n % 390, n from generate_series(1, $1) n",
        )
        .bind(linked)
        .execute(&world.admin)
        .await
        .unwrap();
        world.run("vacuum (analyze) trading_accounts").await;
        world.run("vacuum (analyze) copy_links").await;
        let text = claim_plan(&world, "explain (analyze)").await.join("\n");
        assert!(!text.contains("Seq Scan"), "{text}");
        // Masters are found by their number: a node may own very many accounts.
        assert!(!text.contains("trading_accounts_owned on trading_accounts m"), "{text}");
    }
}

#[tokio::test]
async fn released_account_is_claimed_by_the_other_node_at_once() {
    let world = PostgresWorld::new().await;
    world.fill(3).await;
    // Cycles are 20 s apart: only the announcement can be quicker.
    let a = Node::start("a", &world.url, TIMING, 10);
    a.owns(3).await;
    let b = Node::start("b", &world.url, TIMING, 10);
    eventually("b had a cycle", async || b.lease.state().borrow().cycle.get() > 0).await;
    listening(&world, 2).await;

    let released = a.held()[1];
    let asked = std::time::Instant::now();
    a.lease.commands().release(released, Duration::from_secs(60)).await.unwrap();
    b.owns(1).await;
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(b.may_send(released.account.get()));
    assert!(!a.may_send(released.account.get()));
    let state = Arc::clone(&b.lease.state().borrow());
    let tenure = &state.held[&released.account];
    assert!(tenure.clean);
    assert_eq!(tenure.token.get(), released.token.get() + 1);
    a.lease.shutdown().await;
    b.lease.shutdown().await;
}

#[tokio::test]
async fn node_that_ends_gives_back_what_is_drained_and_leaves_the_rest_to_expire() {
    let world = PostgresWorld::new().await;
    world.fill(3).await;
    let a = Node::start("a", &world.url, TIMING, 10);
    a.owns(3).await;
    let commands = a.lease.commands();
    commands.set_capacity(0).await.unwrap();
    let held = a.held();
    commands.drained(held[0]).await.unwrap();
    commands.drained(held[2]).await.unwrap();
    let (gate, clock) = (a.gate.clone(), a.clock.clone());
    a.lease.shutdown().await;
    let owners: Vec<Option<String>> = world.owners().await.into_values().collect();
    assert_eq!(owners, [None, Some("a".into()), None]);
    assert_eq!(gate.permitted(clock.now()), 0);
    assert!(commands.drained(held[1]).await.is_err());
}

#[tokio::test]
async fn node_cut_from_the_database_stops_by_its_own_deadline_and_never_later() {
    let world = PostgresWorld::new().await;
    world.fill(2).await;
    let server = devstack::shared_postgres().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).await.unwrap();
    let a = Node::start("a", &through(&world.url, &proxy), SHORT, 10);
    a.owns(2).await;
    eventually("a may send", async || a.may_send(1)).await;
    let first = a.gate.permission(account(1), a.clock.now()).unwrap().stretch;

    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    eventually("a stops", async || !a.may_send(1) && !a.may_send(2)).await;
    // The row still belongs to a, for about as long as the fence.
    let left_us = world
        .number(
            "select (extract(epoch from min(lease_until) - clock_timestamp()) * 1000000)::bigint
             from trading_accounts where node_id = 'a'",
        )
        .await;
    assert!(left_us > 0, "a stopped {left_us} us after its row could be claimed");

    let b = Node::start("b", &world.url, SHORT, 10);
    b.owns(2).await;
    assert!(!a.may_send(1) && !a.may_send(2));
    let state = Arc::clone(&b.lease.state().borrow());
    assert!(state.held.values().all(|tenure| !tenure.clean));
    assert!(state.held.values().all(|tenure| tenure.previous_owner.as_deref() == Some("a")));
    drop(state);

    proxy.set_mode(FaultMode::Pass).await.unwrap();
    a.owns(0).await;
    assert!(!a.may_send(1) && !a.may_send(2));

    // Given back by b, a starts a new stretch under a new token.
    b.lease.commands().set_capacity(0).await.unwrap();
    for tenure in b.held() {
        b.lease.commands().release(tenure, Duration::ZERO).await.unwrap();
    }
    a.owns(2).await;
    let again = a.gate.permission(account(1), a.clock.now()).unwrap();
    assert_ne!(again.stretch, first);
    assert_eq!(again.token, token(3));
    a.lease.shutdown().await;
    b.lease.shutdown().await;
}

#[tokio::test]
async fn accounts_of_a_node_that_vanished_are_claimed_when_their_lease_ends() {
    let world = PostgresWorld::new().await;
    world.fill(1).await;
    // The dead node's lease is 2 s, the cycles of the other are 20 s apart.
    let mut dead = claiming("dead", 5);
    dead.lease = Duration::from_secs(2);
    world.store().cycle(&dead).await.unwrap();
    let b = Node::start("b", &world.url, TIMING, 10);
    eventually("b had a cycle", async || b.lease.state().borrow().cycle.get() > 0).await;
    assert_eq!(b.held().len(), 0);
    let asked = std::time::Instant::now();
    b.owns(1).await;
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    b.lease.shutdown().await;
}

#[tokio::test]
async fn three_nodes_claim_a_dead_nodes_rows_within_a_second_of_their_expiry() {
    let world = PostgresWorld::new().await;
    world.fill(30).await;
    let mut dead = claiming("dead", 50);
    dead.lease = Duration::from_secs(3);
    world.store().cycle(&dead).await.unwrap();
    world.run("create table old as select id, lease_until from trading_accounts").await;
    // Cycles are 20 s apart: only the time of the expiry, read back, can be quicker.
    let nodes = ["b", "c", "d"].map(|name| Node::start(name, &world.url, TIMING, 100));
    eventually("every row has a new owner", async || {
        nodes.iter().map(|node| node.held().len()).sum::<usize>() == 30
    })
    .await;
    let (early, late) = sqlx::query_as::<_, (f64, f64)>(
        "select min(extract(epoch from a.tenure_since - o.lease_until))::float8,
                max(extract(epoch from a.tenure_since - o.lease_until))::float8
         from trading_accounts a join old o on o.id = a.id",
    )
    .fetch_one(&world.admin)
    .await
    .unwrap();
    assert!(early >= 0.0, "claimed {early} s after the expiry");
    assert!(late < 1.0, "claimed {late} s after the expiry");
    let cycles: u64 = nodes.iter().map(|node| node.lease.state().borrow().cycle.get()).sum();
    assert!(cycles < 3 * 10, "{cycles} cycles");
    for node in nodes {
        node.lease.shutdown().await;
    }
}

#[tokio::test]
async fn listener_that_was_cut_is_made_anew_and_what_it_may_have_missed_is_looked_for() {
    let world = PostgresWorld::new().await;
    let b = Node::start("b", &world.url, TIMING, 10);
    listening(&world, 1).await;
    // The one at the start, and the one after it began to listen.
    let cycles = || b.lease.state().borrow().cycle.get();
    eventually("b had its first cycles", async || cycles() >= 2).await;
    let before = cycles();
    world
        .run(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity
             where datname = current_database() and application_name = 'lockstep-listen'",
        )
        .await;
    let cut = std::time::Instant::now();
    eventually("another cycle", async || cycles() > before).await;
    // A regular one would come 18 s after the last.
    assert!(cut.elapsed() < Duration::from_secs(8), "{:?}", cut.elapsed());
    listening(&world, 1).await;
    b.lease.shutdown().await;
}

/// Waits until this many nodes listen for announcements.
async fn listening(world: &PostgresWorld, nodes: i64) {
    eventually("the nodes listen", async || {
        world
            .number(
                "select count(*) from pg_stat_activity
                 where datname = current_database() and application_name = 'lockstep-listen'
                   and state = 'idle' and query ilike 'listen%'",
            )
            .await
            == nodes
    })
    .await;
}

/// The same database, by way of the proxy.
fn through(url: &str, proxy: &FaultProxy) -> String {
    let (before, rest) = url.rsplit_once('@').unwrap_or(("", url));
    let (scheme, place) = match rest.split_once("://") {
        Some((scheme, place)) => (format!("{scheme}://"), place),
        None => (format!("{before}@"), rest),
    };
    let (_, database) = place.split_once('/').unwrap();
    format!("{scheme}{}/{database}", proxy.addr())
}
