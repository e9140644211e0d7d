//! A node that is started again on its machine, with and without proof that the one before is dead.

use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, orders};
use lockstep_tests::world::{Node, NodeSpec, Owner, SOON, TAKEOVER, World, owners, until, wall};
use paper::faults::SettingsChange;
use schemas::AccountId;
use sqlx::PgConnection;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The settings of these tests: the lease is as long as by default, fence and settle are short.
const LEASE: Duration = Duration::from_secs(60);
const FENCE: Duration = Duration::from_millis(2500);
const SETTLE: Duration = Duration::from_secs(1);
/// From the start of the process to the claim: migrations are looked at, NATS is connected.
const AT_ONCE: Duration = Duration::from_secs(8);

fn restarted(world: &World, folder: Option<&Path>) -> NodeSpec {
    let spec = world.node("a").setting("LOCKSTEP_LEASE", "60s").setting("LOCKSTEP_CYCLE", "5s");
    match folder {
        Some(folder) => spec.setting("LOCKSTEP_STATE_FOLDER", folder.display()),
        None => spec,
    }
}

/// The owner id of the process that owns these accounts, which must be one.
async fn owner_of(world: &World, node: &Node) -> (String, BTreeMap<AccountId, i64>) {
    let mine = |owner: &Owner| owner.node.as_ref().is_some_and(|name| node.is(name));
    let owned: BTreeMap<AccountId, Owner> =
        world.owners().await.into_iter().filter(|(_, owner)| mine(owner)).collect();
    let name = owned.values().next().unwrap().node.clone().unwrap();
    assert!(owned.values().all(|owner| owner.node.as_ref() == Some(&name)));
    (name, owned.into_iter().map(|(account, owner)| (account, owner.token)).collect())
}

/// Waits until all these accounts have a higher token, and says how long that took.
async fn until_taken(db: &mut PgConnection, tokens: &BTreeMap<AccountId, i64>) -> Duration {
    let since = Instant::now();
    until("a new tenure of every account", LEASE + TAKEOVER, async || {
        let now = owners(db).await;
        tokens.iter().all(|(account, token)| now[account].token > *token).then_some(())
    })
    .await;
    since.elapsed()
}

async fn left_s(db: &mut PgConnection) -> f64 {
    sqlx::query_scalar(
        "select extract(epoch from min(lease_until) - clock_timestamp())::float8
         from trading_accounts where node_id is not null",
    )
    .fetch_one(db)
    .await
    .unwrap()
}

#[tokio::test]
async fn restart_after_sigkill_resumes_its_accounts_at_once_by_lock_file() {
    let mut world = World::start("restart").await;
    let folder = TempDir::new().unwrap();
    let account = world.add_external_account("master").await;
    world.add_followers(account, 6).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let first = restarted(&world, Some(folder.path())).start();
    world.until_copying().await;
    let before = master.open_many(4, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let (old_name, tokens) = owner_of(&world, &first).await;
    assert_eq!(tokens.len(), 6);
    // Orders are on their way, and accepted only later, when the node dies (H8).
    let slow = SettingsChange { answer_delay_ms: Some(400), ..SettingsChange::default() };
    world.driver.settings(slow).await.unwrap();
    let known = orders(&world.ledger().await).len();
    master.open_many(20, "0.10");
    master.close(before[0]);
    until("an order of the burst", SOON, async || {
        (orders(&world.ledger().await).len() > known).then_some(())
    })
    .await;
    first.process.kill().unwrap();
    let killed_at = Instant::now();

    let mut db = world.database().await;
    let second = restarted(&world, Some(folder.path())).start();
    until_taken(&mut db, &tokens).await;
    let (claimed_at, took) = (wall(), killed_at.elapsed());
    assert!(took < AT_ONCE, "taken over {took:?} after the kill");
    println!("taken over {took:?} after the kill");
    assert!(left_s(&mut db).await > (LEASE - AT_ONCE).as_secs_f64());
    let (new_name, new_tokens) = owner_of(&world, &second).await;
    assert_ne!(old_name, new_name, "a restart is another owner");
    assert!(new_tokens.iter().all(|(account, token)| *token == tokens[account] + 1));

    // Closed at once, opened only after fence and settle time.
    master.close(before[1]);
    let opened_late = master.open("0.30");
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
    assert!(master.book.positions.contains_key(&opened_late));
    let of_second = orders(&ledger).into_iter().filter(|o| o.node.as_str() == new_name);
    let opens: Vec<_> = of_second.filter(|order| order.is_opening).collect();
    assert!(!opens.is_empty());
    // The claim was seen a little after it happened.
    let seen_late = Duration::from_millis(500);
    let first_open = opens[0].at.since(claimed_at) + seen_late;
    assert!(first_open >= FENCE + SETTLE, "first open {first_open:?} after the claim");
    assert!(killed_at.elapsed() < LEASE, "this took as long as a lease");
}

#[tokio::test]
async fn second_process_with_one_host_name_waits_like_everybody() {
    let mut world = World::start("second").await;
    let folder = TempDir::new().unwrap();
    let account = world.add_external_account("master").await;
    world.add_followers(account, 3).await;
    let _master = Master::start(vec![world.bus.url(0)], account).await;
    let short =
        |world: &World| world.node("a").setting("LOCKSTEP_STATE_FOLDER", folder.path().display());
    let first = short(&world).start();
    world.until_copying().await;
    let (old_name, tokens) = owner_of(&world, &first).await;
    let second = short(&world).start();
    let told = second.process.wait_for_line("lock_held", SOON).await.unwrap();
    assert!(told.contains("WARN"), "{told}");
    let mut db = world.database().await;
    until("the second process is known to the database", SOON, async || {
        let sql = "select count(*) from lease_nodes where node_id <> $1 and alive_until > now()";
        let others: i64 = sqlx::query_scalar(sql).bind(&old_name).fetch_one(&mut db).await.unwrap();
        (others == 1).then_some(())
    })
    .await;
    assert_eq!(owner_of(&world, &first).await, (old_name, tokens.clone()));

    // It waits for the lease of the first one, dead or not.
    first.process.kill().unwrap();
    let left = left_s(&mut db).await;
    let took = until_taken(&mut db, &tokens).await;
    assert!(took.as_secs_f64() > left - 0.2, "after {took:?}, {left} s were left");
    let (new_name, _) = owner_of(&world, &second).await;
    assert!(second.is(&new_name));
}

#[tokio::test]
async fn restart_without_a_state_folder_waits_for_its_own_old_lease() {
    let mut world = World::start("no-folder").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 3).await;
    let _master = Master::start(vec![world.bus.url(0)], account).await;
    let first = world.node("a").start();
    world.until_copying().await;
    let (_, tokens) = owner_of(&world, &first).await;
    first.process.kill().unwrap();
    let mut db = world.database().await;
    let left = left_s(&mut db).await;
    let _second = world.node("a").start();
    let took = until_taken(&mut db, &tokens).await;
    assert!(took.as_secs_f64() > left - 0.2, "after {took:?}, {left} s were left");
}
