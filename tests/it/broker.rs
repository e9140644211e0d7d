//! A connection to the broker that breaks.

use devstack::{FaultMode, FaultProxy};
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, orders};
use lockstep_tests::world::{SOON, World, until};
use paper::faults::SettingsChange;
use paper::protocol::Style;
use sqlx::Row;

#[tokio::test]
async fn a_broken_broker_connection_is_restored_and_reconciled_to_equal() {
    let mut world = World::start("broker").await;
    let account = world.add_external_account("master").await;
    let proxy = FaultProxy::start(world.paper_addr).await.unwrap();
    for (name, style, multiplier) in [("mt5", Style::Mt5, 1), ("mt4", Style::Mt4, 2)] {
        let follower = world.add_paper_account_at(name, style, proxy.addr()).await;
        world.add_link(account, follower, multiplier).await;
    }
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let _node = world.node("a").start();
    world.until_copying().await;
    let before = master.open_many(4, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    // Orders have arrived and their answers are lost: nobody may send them again.
    let slow = SettingsChange { answer_delay_ms: Some(700), ..SettingsChange::default() };
    world.driver.settings(slow).await.unwrap();
    let known = orders(&world.ledger().await).len();
    master.open_many(12, "0.10");
    master.close(before[0]);
    until("orders of the burst", SOON, async || {
        (orders(&world.ledger().await).len() >= known + 10).then_some(())
    })
    .await;
    proxy.reset_connections().await.unwrap();
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let unknown: i64 = until("orders whose answers were lost", SOON, async || {
        let row = sqlx::query("select count(*) as n from copy_events where outcome = 'unknown'");
        let count: i64 = row.fetch_one(&mut world.database().await).await.unwrap().get("n");
        (count > 0).then_some(count)
    })
    .await;
    assert!(unknown >= 10, "{unknown}");

    // The broker is away while the master goes on.
    proxy.set_mode(FaultMode::Refuse).await.unwrap();
    world.until_session("connecting", &[world.links[0].follower, world.links[1].follower]).await;
    master.close(before[1]);
    master.reduce(before[2], "0.05");
    master.modify(before[3], "1.05000", "1.15000");
    master.open("0.30");
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}
