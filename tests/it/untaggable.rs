//! A broker that does not keep what orders carry (H53).

use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{SOON, TAKEOVER, World, until, wall};
use paper::protocol::{AccountDecl, OpenComment, Style};
use reconcile::Limits;
use schemas::AccountId;
use std::time::Duration;

async fn trades(world: &World, account: AccountId) -> usize {
    State::of_account(&world.ledger().await, account).trades.len()
}

async fn until_trades(world: &World, account: AccountId, count: usize, what: &str) {
    until(what, SOON, async || (trades(world, account).await == count).then_some(())).await;
}

#[tokio::test]
async fn a_broker_that_blanks_comments_is_noticed_and_the_next_owner_opens_nothing_late() {
    let mut world = World::start("untaggable").await;
    let boss = world.add_external_account("boss").await;
    let blank = |account| AccountDecl {
        comment_open: OpenComment::Blank,
        ..AccountDecl::new(account, Style::Mt5)
    };
    let one = world.add_declared_account("one", world.paper_addr, blank).await;
    world.add_link(boss, one, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    let a = world.node("a").start();
    world.until_copying().await;
    let first = master.open("0.50");
    until_trades(&world, one, 1, "the first copy").await;
    until("the link is known to be untaggable", SOON, async || {
        let links = world.cli(&["link", "list", "--json"]).await.json();
        links[0]["untaggable_since"].as_str().map(drop)
    })
    .await;
    let status = world.cli(&["status"]).await.stdout;
    assert!(status.contains("TAGS NOT KEPT") && status.contains("one"), "{status}");
    let second = master.open("0.20");
    until_trades(&world, one, 2, "what comes in time is copied").await;

    drop(a);
    let late = master.open("0.30");
    let opened = wall();
    let too_old = Limits::default().late_after + Duration::from_secs(1);
    until("the trade is late", SOON, async || (wall().since(opened) > too_old).then_some(())).await;
    let _b = world.node("b").start();
    until("the trade opened meanwhile is skipped for good", TAKEOVER, async || {
        let status = world.cli(&["status", "--json"]).await.json();
        let reasons = status["reasons"].as_array().unwrap();
        reasons.iter().any(|reason| reason["reason"] == "untaggable").then_some(())
    })
    .await;
    assert_eq!(trades(&world, one).await, 2);
    for ticket in [first, second, late] {
        master.close(ticket);
    }
    until_trades(&world, one, 0, "both copies end with their trades").await;
    assert_clean(&world.ledger().await);
}
