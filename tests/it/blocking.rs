//! Accounts whose order calls hold a thread.

use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{Node, SOON, World, until};
use paper::protocol::{AccountDecl, Style};
use schemas::AccountId;

const TRADES: usize = 20;

/// Threads of the node, all of them, and those for calls.
fn threads(node: &Node) -> (usize, usize) {
    let pid = node.process.pid().unwrap();
    let names = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().filter_map(|task| {
        // One that has just ended has no name any more.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    let names: Vec<String> = names.collect();
    (names.len(), names.iter().filter(|name| name.trim() == "lockstep-call").count())
}

async fn until_trades(world: &World, accounts: &[AccountId], count: usize) {
    until("every copy is as it should be", SOON, async || {
        let ledger = world.ledger().await;
        let is = |account: &AccountId| State::of_account(&ledger, *account).trades.len() == count;
        accounts.iter().all(is).then_some(())
    })
    .await;
}

#[tokio::test]
async fn blocking_accounts_copy_a_burst_on_threads_that_were_made_at_the_start() {
    let mut world = World::start("blocking").await;
    let boss = world.add_external_account("boss").await;
    let address = world.paper_addr.to_string();
    let mut followers = Vec::new();
    for name in ["one", "two"] {
        let added = ["account", "add", name, "--address", &address, "--blocking"];
        let added = world.cli(&added).await;
        let number = added.stdout.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        let account = AccountId::new(number.unwrap_or_else(|| panic!("{added:?}"))).unwrap();
        world.driver.declare_accounts(vec![AccountDecl::new(account, Style::Mt5)]).await.unwrap();
        world.add_link(boss, account, 1).await;
        followers.push(account);
    }
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    let node = world
        .node("a")
        .setting("LOCKSTEP_BLOCKING_FOLLOWERS", 2)
        .setting("LOCKSTEP_PARALLEL_ORDERS", 16)
        .start();
    world.until_copying().await;
    // The first burst touches what is made once, such as the threads of the runtimes.
    let first = master.open_many(TRADES, "0.10");
    until_trades(&world, &followers, TRADES).await;
    master.close_many(&first);
    until_trades(&world, &followers, 0).await;

    let before = threads(&node);
    assert_eq!(before.1, 32, "followers times parallel orders");
    let tickets = master.open_many(TRADES, "0.10");
    let mut most = before;
    until("every trade is copied", SOON, async || {
        most = (most.0.max(threads(&node).0), most.1.max(threads(&node).1));
        let ledger = world.ledger().await;
        let is = |account: &AccountId| State::of_account(&ledger, *account).trades.len() == TRADES;
        followers.iter().all(is).then_some(())
    })
    .await;
    assert_eq!(most, before, "threads made in the burst");
    master.close_many(&tickets);
    until_trades(&world, &followers, 0).await;
    assert_clean(&world.ledger().await);
}

#[tokio::test]
async fn a_node_without_threads_says_why_it_cannot_serve_a_blocking_account() {
    let mut world = World::start("unblocked").await;
    let boss = world.add_external_account("boss").await;
    let address = world.paper_addr.to_string();
    world.cli(&["account", "add", "one", "--address", &address, "--blocking"]).await;
    let row = world.cli(&["account", "list", "--json"]).await.json();
    let one = row.as_array().unwrap().iter().find(|row| row["name"] == "one").unwrap();
    let one = AccountId::new(one["id"].as_u64().unwrap()).unwrap();
    world.driver.declare_accounts(vec![AccountDecl::new(one, Style::Mt5)]).await.unwrap();
    world.add_link(boss, one, 1).await;
    let _node = world.node("a").start();
    until("the reason is in the status", SOON, async || {
        let status = world.cli(&["status"]).await.stdout;
        status.contains("LOCKSTEP_BLOCKING_FOLLOWERS").then_some(())
    })
    .await;
}
