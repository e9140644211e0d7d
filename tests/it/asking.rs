//! What an operator asks of nodes that run.

use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{CliOutput, SOON, TAKEOVER, World, run_lockstep, until};
use paper::protocol::Style;
use schemas::MasterTicket;

/// Runs `lockstep` with this world's database and bus.
async fn operator(world: &World, arguments: &[&str]) -> CliOutput {
    let nats = world.bus.url(0);
    let variables =
        [("LOCKSTEP_DATABASE_URL", world.database_url.as_str()), ("LOCKSTEP_NATS_URLS", &nats)];
    run_lockstep(arguments, &variables).await
}

#[tokio::test]
async fn an_owner_says_what_a_comparison_would_do_and_makes_one_when_asked() {
    let mut world = World::start("asking-plan").await;
    let boss = world.add_external_account("boss").await;
    let one = world.add_paper_account("one", Style::Mt5).await;
    world.add_link(boss, one, 1).await;
    let unowned = operator(&world, &["reconcile", "one", "--dry-run"]).await;
    assert_eq!(unowned.code, Some(3), "{unowned:?}");
    assert!(unowned.stderr.contains("no node owns it"), "{unowned:?}");
    let _node = world.node("a").start();
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    world.until_copying().await;
    let old = master.open_many(2, "0.50");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    let plan = operator(&world, &["reconcile", "one", "--dry-run", "--json"]).await;
    assert_eq!(plan.code, Some(0), "{plan:?}");
    let plan = plan.json();
    assert_eq!(plan["begun"], false);
    assert_eq!(plan["plans"][0]["link"], 1, "{plan}");
    assert!(plan["plans"][0]["epoch"].is_number(), "{plan}");
    assert_eq!(plan["plans"][0]["steps"].as_array().unwrap().len(), 0, "{plan}");

    // What a paused link leaves undone is in the plan, and asking for it does nothing about it.
    assert_eq!(operator(&world, &["pause", "1"]).await.code, Some(0));
    let waits = async |ticket: MasterTicket| {
        let plan = operator(&world, &["reconcile", "1", "--dry-run", "--json"]).await.json();
        let waiting = plan["plans"][0]["waiting"].as_array().unwrap().clone();
        waiting.iter().any(|wait| wait["ticket"] == ticket.get() && wait["why"] == "link_paused")
    };
    until("an open waits for the end of the pause", SOON, async || {
        let held = master.open("0.20");
        waits(held).await.then_some(())
    })
    .await;
    master.close(old[0]);
    until("a close waits for the end of the pause", SOON, async || {
        waits(old[0]).await.then_some(())
    })
    .await;
    assert_eq!(operator(&world, &["resume", "1"]).await.code, Some(0));
    let done = operator(&world, &["reconcile", "1"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.stdout.contains("the owner compares and acts now"), "{done:?}");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    assert_eq!(operator(&world, &["reconcile", "99"]).await.code, Some(2));
    let external = operator(&world, &["reconcile", "boss"]).await;
    assert_eq!(external.code, Some(3), "{external:?}");
    assert_clean(&world.ledger().await);
}

#[tokio::test]
async fn an_account_is_handed_over_by_its_owner_when_there_is_another_one() {
    let mut world = World::start("asking-release").await;
    let boss = world.add_external_account("boss").await;
    let one = world.add_paper_account("one", Style::Mt5).await;
    world.add_link(boss, one, 1).await;
    let a = world.node("a").start();
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    world.until_copying().await;
    let listed = operator(&world, &["lease", "list", "--json"]).await.json();
    let row = &listed.as_array().unwrap()[1];
    assert!(a.is(row["node"].as_str().unwrap()) && row["session"] == "copying", "{listed}");
    let before = row["token"].as_i64().unwrap();
    let alone = operator(&world, &["lease", "release", "one"]).await;
    assert_eq!(alone.code, Some(3), "{alone:?}");
    assert!(alone.stderr.contains("no other node has room"), "{alone:?}");
    assert_eq!(world.owners().await[&one].token, before);

    let b = world.node("b").start();
    let released = until("the account is handed over", TAKEOVER, async || {
        let released = operator(&world, &["lease", "release", "one", "--json"]).await;
        (released.code == Some(0)).then(|| released.json())
    })
    .await;
    assert!(a.is(released["from"].as_str().unwrap()), "{released}");
    assert!(b.is(released["to"].as_str().unwrap()), "{released}");
    assert_eq!(released["token"], before + 1, "clean: nobody had it in between");
    master.open_many(2, "0.50");
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}
