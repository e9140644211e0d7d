//! What the quick ways to a new owner take with the default settings: a restart that can prove its
//! predecessor's death, and an orderly stop.

use super::rows::{Row, Told, seconds};
use crate::master::Master;
use crate::oracle::{State, orders};
use crate::world::{Node, SOON, TAKEOVER, World, owners, until, wall};
use schemas::{AccountId, Micros};
use std::collections::BTreeMap;

const FOLLOWERS: u32 = 3;
/// Fence and settle time: so long nothing is opened after a takeover that did not wait for a lease.
const QUIET: f64 = 25.0;

/// Plays both, one after the other.
pub(super) async fn play() -> Told {
    let mut world = World::start("paths").await;
    let folder = std::env::temp_dir().join(format!("lockstep-state-{}", std::process::id()));
    let account = world.add_external_account("master").await;
    world.add_followers(account, FOLLOWERS).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let start = |name: &str| {
        let spec = world.node(name).default_leases();
        spec.setting("LOCKSTEP_STATE_FOLDER", folder.display()).start()
    };
    let a = start("a");
    world.until_copying().await;
    let opened = master.open_many(3, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    let before = world.owned_by(&a).await;
    let killed = wall();
    a.process.kill().unwrap();
    master.close(opened[0]);
    let again = start("a");
    let by_lock = taken(&world, &again, &before, killed).await;
    master.open("0.10");
    world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    let lock = row_of_lock(&world, by_lock, killed).await;

    let b = start("b");
    until("b is known", SOON, async || {
        let nodes = "select count(*) from lease_nodes where capacity > 0 and node_id like 'b-%'";
        let found: i64 =
            sqlx::query_scalar(nodes).fetch_one(&mut world.database().await).await.unwrap();
        (found == 1).then_some(())
    })
    .await;
    let before = world.owned_by(&again).await;
    let stopped = wall();
    again.process.terminate().unwrap();
    let by_notify = taken(&world, &b, &before, stopped).await;
    master.open("0.10");
    world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    let notify = row_of_notify(&world, by_notify, stopped).await;
    // Nobody needs it any more; it lies in the folder for temporary files otherwise.
    let _gone_or_not = std::fs::remove_dir_all(&folder);
    Told { title: "the quick paths", word: "paths", rows: vec![lock, notify] }
}

/// Seconds from an instant until this node owns all of these under new tokens.
async fn taken(world: &World, by: &Node, before: &BTreeMap<AccountId, i64>, since: Micros) -> f64 {
    let mut db = world.database().await;
    until("a new owner for every account", TAKEOVER * 2, async || {
        let now = owners(&mut db).await;
        let is_taken = |(account, token): (_, &i64)| {
            let owner: &crate::world::Owner = &now[account];
            owner.token > *token && owner.node.as_ref().is_some_and(|node| by.is(node))
        };
        before.iter().all(is_taken).then_some(())
    })
    .await;
    passed(since, wall())
}

fn passed(from: Micros, to: Micros) -> f64 {
    (to.0 - from.0) as f64 / 1e6
}

/// First order, and first one that opens something, after an instant.
async fn first_orders(world: &World, since: Micros) -> (f64, f64) {
    let ledger = world.ledger().await;
    let after: Vec<_> = orders(&ledger).into_iter().filter(|order| order.at > since).collect();
    let at = |order: Option<&crate::oracle::Order>| {
        order.map_or(f64::NAN, |order| passed(since, order.at))
    };
    (at(after.first()), at(after.iter().find(|order| order.is_opening)))
}

async fn row_of_lock(world: &World, claimed: f64, killed: Micros) -> Row {
    let (first, opened) = first_orders(world, killed).await;
    Row {
        at: seconds(claimed),
        what: "SIGKILL, started again with a state folder",
        expected: "claimed within 5 s, closes at once, opens after fence and settle time (25 s)"
            .into(),
        seen: format!(
            "claimed after {claimed:.2} s, first close after {first:.2} s, first open after {}",
            seconds(opened)
        ),
        ok: claimed < 5.0
            && first < 10.0
            && opened > claimed + QUIET - 1.0
            && opened < QUIET + 10.0,
    }
}

async fn row_of_notify(world: &World, claimed: f64, stopped: Micros) -> Row {
    let (first, opened) = first_orders(world, stopped).await;
    Row {
        at: seconds(claimed),
        what: "SIGTERM, another node is there",
        expected: "claimed within 2 s, and copied at once: nothing has to settle".into(),
        seen: format!("claimed after {claimed:.2} s, first open after {opened:.2} s"),
        ok: claimed < 2.0 && first < 5.0 && opened < 5.0,
    }
}
