//! Accounts that move although nobody's lease ran out: what cannot be served here, what a node has
//! too much of, and what a demoted primary still says.

use devstack::{FaultMode, FaultProxy};
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, logins};
use lockstep_tests::scrape::MetricsPage;
use lockstep_tests::world::{Node, SOON, TAKEOVER, World, owners, until};
use paper::protocol::Style;
use schemas::{AccountId, MasterTicket};
use sqlx::PgConnection;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

async fn until_owned_by(db: &mut PgConnection, account: AccountId, node: &Node) -> i64 {
    until(&format!("{account} is owned by {}", node.name), TAKEOVER, async || {
        let owner = owners(db).await.remove(&account).unwrap();
        owner.node.is_some_and(|name| node.is(&name)).then_some(owner.token)
    })
    .await
}

async fn until_time_has_passed(db: &mut PgConnection, seconds: f64) {
    let now = "select extract(epoch from clock_timestamp())::float8";
    let start: f64 = sqlx::query_scalar(now).fetch_one(&mut *db).await.unwrap();
    until("time has passed", SOON, async || {
        let at: f64 = sqlx::query_scalar(now).fetch_one(&mut *db).await.unwrap();
        (at - start > seconds).then_some(())
    })
    .await;
}

#[tokio::test]
async fn account_whose_session_stays_down_is_tried_by_another_node_and_kept_where_there_is_none() {
    let mut world = World::start("session-down").await;
    let account = world.add_external_account("master").await;
    let broker = FaultProxy::start(world.paper_addr).await.unwrap();
    let follower = world.add_paper_account_at("follower", Style::Mt5, broker.addr()).await;
    world.add_link(account, follower, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let start = |name: &str| world.node(name).setting("LOCKSTEP_SESSION_DOWN", "3s").start();
    let a = start("a");
    world.until_copying().await;
    let mut db = world.database().await;
    let first = until_owned_by(&mut db, follower, &a).await;

    broker.set_mode(FaultMode::Refuse).await.unwrap();
    master.open("0.10");
    until_time_has_passed(&mut db, 7.0).await;
    assert_eq!(until_owned_by(&mut db, follower, &a).await, first, "there is nobody else");

    let b = start("b");
    let second = until_owned_by(&mut db, follower, &b).await;
    assert_eq!(second, first + 1);
    // b cannot reach the broker either: the account goes round, and always has an owner soon.
    let third = until_owned_by(&mut db, follower, &a).await;
    assert!(third > second);

    broker.set_mode(FaultMode::Pass).await.unwrap();
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}

#[tokio::test]
async fn followers_of_a_node_that_does_not_hear_the_bus_move_to_one_that_does() {
    let mut world = World::start("deaf").await;
    let account = world.add_external_account("master").await;
    let followers = world.add_followers(account, 4).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let bus: SocketAddr = world.bus.url(0).trim_start_matches("nats://").parse().unwrap();
    let ear = FaultProxy::start(bus).await.unwrap();
    let start = |name: &str, url: String| {
        let spec = world.node(name).nats(url).setting("LOCKSTEP_SILENT_HERE", "7s");
        spec.setting("LOCKSTEP_CLAIM_BATCH", 1).start()
    };
    let a = start("a", format!("nats://{}", ear.addr()));
    let b = start("b", world.bus.url(0));
    world.until_copying().await;
    let of_a = world.owned_by(&a).await;
    assert!(!of_a.is_empty() && of_a.len() < 4, "both own followers: {of_a:?}");

    ear.set_mode(FaultMode::BlackHole).await.unwrap();
    let opened = master.open_many(3, "0.10");
    let mut db = world.database().await;
    for (follower, token) in &of_a {
        let taken = until_owned_by(&mut db, *follower, &b).await;
        assert_eq!(taken, token + 1, "released, not expired");
    }
    master.close(opened[0]);
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);

    // Silent everywhere: nobody is any better, and everything stays where it is.
    drop(master);
    until_time_has_passed(&mut db, 16.0).await;
    let tokens = |owned: BTreeMap<AccountId, i64>| owned.into_keys().collect::<BTreeSet<_>>();
    assert_eq!(tokens(world.owned_by(&b).await), followers.into_iter().collect());
}

#[tokio::test]
async fn a_full_node_gives_a_new_one_its_share_one_by_one_and_then_all_stay_where_they_are() {
    let mut world = World::start("share").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 10).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let start = |name: &str| {
        // A query may take longer than elsewhere: cycles that fail would only prolong the test.
        let spec = world.node(name).setting("LOCKSTEP_LEASE", "6s");
        spec.setting("LOCKSTEP_QUERY_LIMIT", "1s").start()
    };
    let a = start("a");
    world.until_copying().await;
    master.open_many(5, "0.10");
    let before = world.owned_by(&a).await;
    assert_eq!(before.len(), 10);
    let b = start("b");
    let mut traded = Instant::now();
    until("the new node has its share", TAKEOVER * 2, async || {
        if traded.elapsed() > Duration::from_millis(300) {
            traded = Instant::now();
            let opened = master.open("0.10");
            master.close(opened);
        }
        (world.owned_by(&b).await.len() >= 4).then_some(())
    })
    .await;
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);

    let mut db = world.database().await;
    // Ten cycles, and as many occasions to give more away.
    until_time_has_passed(&mut db, 12.0).await;
    let (of_a, of_b) = (world.owned_by(&a).await, world.owned_by(&b).await);
    assert_eq!((of_a.len(), of_b.len()), (6, 4), "an even part of 5, and one more");
    assert!(of_a.iter().all(|(account, token)| before[account] == *token), "moved and came back");
    assert!(of_b.iter().all(|(account, token)| before[account] + 1 == *token), "moved twice");
    // Once it has its new owner, nobody logs in under the old tenure again.
    let logins = logins(&world.ledger().await);
    for account in of_b.keys() {
        let tokens = logins.iter().filter(|(a, ..)| a == account).map(|(_, token, _)| *token);
        assert!(tokens.is_sorted(), "sessions of {account}: {logins:?}");
    }
}

/// A hand-over that fails because somebody locks the table of pairs, which is then still locked: the
/// account stays with its owner, where a new session begins in the same tenure.
struct FailedHandOver {
    world: World,
    master: Master,
    opened: Vec<MasterTicket>,
    page: MetricsPage,
    maintenance: PgConnection,
    nodes: [Node; 2],
}

impl FailedHandOver {
    async fn start(name: &str, lease: &str) -> FailedHandOver {
        let mut world = World::start(name).await;
        let account = world.add_external_account("master").await;
        let follower = world.add_paper_account("one", Style::Mt5).await;
        world.add_link(account, follower, 1).await;
        let mut master = Master::start(vec![world.bus.url(0)], account).await;
        let page = MetricsPage::free().await;
        let start = |name: &str| world.node(name).setting("LOCKSTEP_LEASE", lease);
        let a = start("a").setting("LOCKSTEP_METRICS_LISTEN", page.address()).start();
        let mut db = world.database().await;
        until_owned_by(&mut db, follower, &a).await;
        let b = start("b").start();
        world.until_copying().await;
        let mut maintenance = world.database().await;
        let lock = "begin; lock table pairs in share mode";
        sqlx::raw_sql(lock).execute(&mut maintenance).await.unwrap();
        let opened = master.open_many(2, "0.10");
        world.until_equal(SOON, |_| State::of_book(&master.book)).await;
        // Asked until the other node is known to have room; then it waits for the new owner in vain.
        let asks = async {
            loop {
                world.cli(&["lease", "release", "one"]).await;
            }
        };
        let not_drained = |line: &str| line.contains("not_drained");
        let fails = until("the hand-over fails", TAKEOVER, async || {
            let failed = page.sum_where("lockstep_tenures_ended_total", not_drained).await;
            (failed > 0.0).then_some(())
        });
        tokio::select! { () = fails => {}, () = asks => {} }
        FailedHandOver { world, master, opened, page, maintenance, nodes: [a, b] }
    }

    async fn unlock(&mut self) {
        sqlx::raw_sql("commit").execute(&mut self.maintenance).await.unwrap();
    }

    /// Nobody took anything over, and the account is where it was.
    async fn assert_same_tenure(&self) {
        let begun = self.page.sum("lockstep_tenures_begun_total").await;
        let owned = self.world.owned_by(&self.nodes[0]).await;
        assert_eq!((begun, owned.len()), (1.0, 1), "{owned:?}");
    }
}

// What it reads must not be older than what the session before it did.
#[tokio::test]
async fn session_that_follows_another_of_its_tenure_begins_when_the_rows_of_that_one_are_written() {
    let mut scene = FailedHandOver::start("move-unwritten", "10s").await;
    let mut db = scene.world.database().await;
    until_time_has_passed(&mut db, 2.0).await;
    scene.unlock().await;
    scene.world.until_copying().await;
    scene.assert_same_tenure().await;

    scene.master.close_many(&scene.opened);
    let ledger = scene.world.until_equal(SOON, |_| State::of_book(&scene.master.book)).await;
    assert_clean(&ledger);
    until("every pair has ended", SOON, async || {
        let states: Vec<String> =
            sqlx::query_scalar("select state from pairs order by master_ticket")
                .fetch_all(&mut db)
                .await
                .unwrap();
        (states == ["closed", "closed"]).then_some(())
    })
    .await;
}

// A node that keeps its lease and cannot write has faulty rows, and the copies count more.
#[tokio::test]
async fn session_that_follows_another_of_its_tenure_waits_for_rows_no_longer_than_a_lease() {
    let mut scene = FailedHandOver::start("move-unwritable", "5s").await;
    scene.master.open("0.10");
    scene.master.close(scene.opened[0]);
    let ledger = scene.world.until_equal(TAKEOVER, |_| State::of_book(&scene.master.book)).await;
    assert_clean(&ledger);
    scene.assert_same_tenure().await;
    scene.unlock().await;
}

#[tokio::test]
async fn a_node_that_hears_of_a_newer_primary_does_not_renew_on_the_old_one() {
    let mut world = World::start("newer-primary").await;
    let account = world.add_external_account("master").await;
    let followers = world.add_followers(account, 2).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let a = world.node("a").start();
    world.until_copying().await;
    master.open("0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let mut db = world.database().await;
    let (system, timeline): (i64, i32) = sqlx::query_as(
        "select s.system_identifier, c.timeline_id from pg_control_system() s, pg_control_checkpoint() c",
    )
    .fetch_one(&mut db)
    .await
    .unwrap();
    let bus = async_nats::connect(world.bus.url(0)).await.unwrap();
    // What another node says that has seen the promotion.
    let subject = schemas::subject::timeline(system.cast_unsigned());
    bus.publish(subject, (timeline + 1).to_string().into()).await.unwrap();
    bus.flush().await.unwrap();
    a.process.wait_for_line("another node has seen a newer primary", SOON).await.unwrap();

    // The leases run out, as nothing is renewed; nothing that the master does reaches the broker.
    let sent = lockstep_tests::oracle::orders(&world.ledger().await).len();
    master.open("0.20");
    until("the leases ran out", SOON, async || {
        let left: bool = sqlx::query_scalar(
            "select bool_or(lease_until > clock_timestamp()) from trading_accounts where id = any ($1)",
        )
        .bind(followers.iter().map(|account| account.as_i64()).collect::<Vec<_>>())
        .fetch_one(&mut db)
        .await
        .unwrap();
        (!left).then_some(())
    })
    .await;
    assert_eq!(lockstep_tests::oracle::orders(&world.ledger().await).len(), sent);
    assert!(a.process.try_wait().unwrap().is_none(), "the node lives and waits");
}
