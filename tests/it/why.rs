//! `lockstep why`, asked about trades that real nodes decided.

use lockstep_tests::master::Master;
use lockstep_tests::oracle::State;
use lockstep_tests::world::{SOON, TAKEOVER, World, until};
use paper::faults::{FaultKind, FaultSpec};
use paper::protocol::Style;
use reconcile::Limits;
use schemas::{MasterTicket, RejectClass};

/// Waits until the story of a ticket has this verdict, and gives what it says.
async fn until_told(world: &World, ticket: MasterTicket, verdict: &str) -> String {
    let (link, ticket) = (world.links[0].link.to_string(), ticket.to_string());
    let words = ["why", &link, &ticket, "--json"];
    until(&format!("ticket {ticket} is {verdict}"), SOON, async || {
        let output = world.cli(&words).await;
        let story = output.json();
        assert_eq!(output.code == Some(1), story["verdict"] == "unknown", "{output:?}");
        // A pair's row may be there a moment before its event's.
        let last = story["events"].as_array().unwrap().last().cloned()?;
        let says = format!("{} | {}", story["says"].as_str().unwrap(), last["says"]);
        (story["verdict"] == verdict).then_some(says)
    })
    .await
}

fn assert_says(story: &str, parts: &[&str]) {
    for part in parts {
        assert!(story.contains(part), "{part:?} is not in {story:?}");
    }
}

#[tokio::test]
async fn why_tells_how_each_trade_came_to_be_copied_or_not() {
    let mut world = World::start("why").await;
    let boss = world.add_external_account("boss").await;
    let follower = world.add_paper_account("follower", Style::Mt5).await;
    world.add_link(boss, follower, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    let node = world.node("a").start();
    world.until_copying().await;

    let direct = master.open("0.10");
    assert_says(&until_told(&world, direct, "copied").await, &["as soon as", "opened"]);
    let small = master.open("0.001");
    assert_says(&until_told(&world, small, "skipped").await, &["under the broker's smallest"]);
    let foreign = master.open_in("NOWHERE", "0.10");
    assert_says(&until_told(&world, foreign, "skipped").await, &["no such symbol"]);
    let kind = FaultKind::Reject { class: RejectClass::NoMoney };
    world.driver.set_fault(FaultSpec::new(kind).account(follower).count(1)).await.unwrap();
    let refused = master.open("0.20");
    assert_says(&until_told(&world, refused, "failed").await, &["not enough money", "refused"]);
    master.close(direct);
    assert_says(&until_told(&world, direct, "closed").await, &["the master closed"]);

    // Nobody is there; then somebody comes late, to one trade whose price is near and one far off.
    node.process.terminate().unwrap();
    node.process.wait(TAKEOVER).await.unwrap();
    let late = master.open("0.30");
    let far = master.open_at("0.30", Some("1.00000"));
    // From this age on an open falls under the price rule.
    tokio::time::sleep(Limits::default().late_after).await;
    let _next = world.node("b").start();
    assert_says(&until_told(&world, late, "copied_late").await, &["late"]);
    assert_says(&until_told(&world, far, "skipped").await, &["slippage"]);
    let copies = State::of_copies(&world.ledger().await, &world.links[0]);
    assert_eq!(copies.trades.keys().copied().collect::<Vec<_>>(), [late.get()]);

    let table = world.cli(&["why", &world.links[0].link.to_string(), &late.to_string()]).await;
    assert_eq!(table.code, Some(0), "{table:?}");
    assert_says(&table.stdout, &["boss", "follower", "MEANING", "opened"]);
    let nothing = world.cli(&["why", &world.links[0].link.to_string(), "999999"]).await;
    assert_eq!(nothing.code, Some(1), "{nothing:?}");
    assert_says(&nothing.stdout, &["no node has recorded anything"]);
    let no_link = world.cli(&["why", "77", "1"]).await;
    assert_eq!(no_link.code, Some(1), "{no_link:?}");
    assert_says(&no_link.stderr, &["there is no link 77"]);
}
