//! What the bus loses.

use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, orders};
use lockstep_tests::wire_master::WireMaster;
use lockstep_tests::world::{Bus, SOON, World};
use schemas::MasterTicket;
use std::time::Duration;

/// L3: silence of 6 s, a snapshot, the orders.
const REPAIRED_WITHIN: Duration = Duration::from_secs(12);

#[tokio::test]
async fn a_lost_last_event_is_repaired_by_the_beacon_in_under_twelve_seconds() {
    let mut world = World::start("lost-event").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 3).await;
    let master = WireMaster::start(&world.bus.url(0), account).await;
    let _node = world.node("a").start();
    world.until_copying().await;
    master.open(1, "0.10").await;
    master.open(2, "0.10").await;
    world.until_equal(SOON, |_| State::of_book(&master.book())).await;

    let lost_at = master.close_unsaid(2);
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book())).await;
    let took = orders(&ledger).last().unwrap().at.since(lost_at);
    assert!(took < REPAIRED_WITHIN, "the lost close took {took:?}");

    let lost_at = master.open_unsaid(3, "0.20");
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book())).await;
    let took = orders(&ledger).last().unwrap().at.since(lost_at);
    assert!(took < REPAIRED_WITHIN, "the lost open took {took:?}");

    // One in the middle: the next event shows the gap at once.
    let lost_at = master.close_unsaid(1);
    master.open(4, "0.10").await;
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book())).await;
    let took = orders(&ledger).last().unwrap().at.since(lost_at);
    assert!(took < REPAIRED_WITHIN, "the gap took {took:?}");
    assert_clean(&ledger);
}

/// Who is connected to a server of the cluster.
async fn connected(world: &World, server: usize, name: &str) -> bool {
    let Bus::Cluster(cluster) = &world.bus else { panic!("one server is no cluster") };
    let page = cluster.server(server).monitor("/connz").await.unwrap();
    let connections = page["connections"].as_array().unwrap();
    connections.iter().any(|c| c["name"].as_str().is_some_and(|n| n.starts_with(name)))
}

#[tokio::test]
async fn a_nats_server_killed_in_a_cluster_of_three_loses_nothing_in_the_end() {
    let mut world = World::start_with_cluster("cluster", 3).await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 4).await;
    let mut master = Master::start(vec![world.bus.url(2)], account).await;
    let a = world.node("a").nats(world.bus.url(0)).setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    let b = world.node("b").nats(world.bus.url(1)).setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    world.until_copying().await;
    assert!(!world.owned_by(&a).await.is_empty() && !world.owned_by(&b).await.is_empty());
    let mut open = master.open_many(4, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let Bus::Cluster(cluster) = &world.bus else { panic!("one server is no cluster") };

    assert!(connected(&world, 0, "a-").await, "the node uses the server that is killed");
    cluster.server(0).kill().unwrap();
    go_on(&mut master, &mut open).await;
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    cluster.server(0).restart().await.unwrap();
    cluster.wait_for_routes().await.unwrap();

    assert!(connected(&world, 2, "test-master").await, "the master uses the server that is killed");
    cluster.server(2).kill().unwrap();
    go_on(&mut master, &mut open).await;
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}

/// Two seconds of trades.
async fn go_on(master: &mut Master, open: &mut Vec<MasterTicket>) {
    let mut every = tokio::time::interval(Duration::from_millis(200));
    for _ in 0..10 {
        every.tick().await;
        open.push(master.open("0.10"));
        master.close(open.remove(0));
    }
}
