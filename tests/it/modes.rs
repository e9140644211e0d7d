//! Links, accounts and the fleet, paused and resumed, on nodes that run.

use lockstep::directory::{self, Mode};
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, orders};
use lockstep_tests::world::{SOON, World, wall};
use paper::protocol::Style;
use schemas::{AccountId, Micros};

async fn orders_of(world: &World, account: AccountId) -> Vec<Micros> {
    let ledger = world.ledger().await;
    orders(&ledger).into_iter().filter(|o| o.account == account).map(|o| o.at).collect()
}

#[tokio::test]
async fn a_pause_holds_its_link_alone_and_the_kill_switch_every_follower_of_two_nodes() {
    let mut world = World::start("modes").await;
    let boss = world.add_external_account("boss").await;
    let (first, second) = (
        world.add_paper_account("first", Style::Mt5).await,
        world.add_paper_account("second", Style::Mt4).await,
    );
    for follower in [first, second] {
        world.add_link(boss, follower, 1).await;
    }
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    let _nodes = ["a", "b"].map(|name| world.node(name).setting("LOCKSTEP_CAPACITY", 1).start());
    world.until_copying().await;
    let owners = world.owners().await;
    assert_ne!(owners[&first].node, owners[&second].node, "one follower a node");
    let mut db = world.database().await;
    let before = master.open("0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    // One link. The master closes what is copied and opens more; the other link goes on.
    let link = world.links[0].link;
    directory::set_link_mode(&mut db, link, Mode::Paused).await.unwrap();
    world.until_session("paused", &[first]).await;
    master.close(before);
    let during = master.open_many(2, "0.20");
    let paused = world.links.remove(0);
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_eq!(orders_of(&world, first).await.len(), 1, "its copy of before, and no more");
    world.links.insert(0, paused);
    directory::set_link_mode(&mut db, link, Mode::Copy).await.unwrap();
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);

    // Everything. What the master closes meanwhile is closed afterwards; what it opened while the
    // fleet only closes is not copied at all.
    directory::set_fleet_mode(&mut db, Mode::Paused).await.unwrap();
    world.until_session("paused", &[first, second]).await;
    let held = [orders_of(&world, first).await.len(), orders_of(&world, second).await.len()];
    master.close(during[0]);
    let never = master.open("0.30");
    directory::set_fleet_mode(&mut db, Mode::CloseOnly).await.unwrap();
    let resumed_at = wall();
    world.until_session("copying", &[first, second]).await;
    let copied = State::of_book(&without(&master, never));
    let ledger = world.until_equal(SOON, |_| copied.clone()).await;
    assert_clean(&ledger);
    for (follower, before) in [first, second].into_iter().zip(held) {
        let all = orders_of(&world, follower).await;
        assert_eq!(all.len(), before + 1, "the close, and nothing else");
        assert!(all[before] >= resumed_at, "and that only when the pause had ended");
    }
}

fn without(master: &Master, ticket: schemas::MasterTicket) -> schemas::Book {
    let mut book = master.book.clone();
    book.positions.remove(&ticket);
    book
}
