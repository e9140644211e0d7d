//! What a service manager hears of a node.

use devstack::{FaultMode, FaultProxy, shared_postgres};
use lockstep_tests::world::{SOON, World};
use paper::protocol::Style;
use std::time::Duration;
use tokio::net::UnixDatagram;

/// The watchdog's time, as the manager tells it.
const WATCHDOG: Duration = Duration::from_secs(3);
/// Lease less fence of the short settings, and a watchdog's time: a node that hangs is not fed for longer.
const DEAD_AFTER: Duration = Duration::from_millis(2_500 + 3_000);

/// What the node says next.
async fn heard(manager: &UnixDatagram) -> String {
    let mut words = [0; 256];
    let length = tokio::time::timeout(SOON, manager.recv(&mut words)).await.unwrap().unwrap();
    String::from_utf8(words[..length].to_vec()).unwrap()
}

/// What it says next beside that it lives.
async fn heard_beside_life(manager: &UnixDatagram) -> String {
    let words = async {
        loop {
            let words = heard(manager).await;
            if words != "WATCHDOG=1" {
                return words;
            }
        }
    };
    tokio::time::timeout(SOON, words).await.expect("more than that it lives")
}

#[tokio::test]
async fn a_manager_hears_ready_and_alive_while_the_database_is_away_and_stopping() {
    let world = World::start("systemd").await;
    let account = world.add_paper_account("account", Style::Mt5).await;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    let proxy = FaultProxy::start(shared_postgres().await.unwrap().addr()).await.unwrap();
    let node = world
        .node("a")
        .database(world.database_url_by(&proxy))
        .setting("NOTIFY_SOCKET", socket.display())
        .setting("WATCHDOG_USEC", WATCHDOG.as_micros())
        .start();
    let words = heard_beside_life(&manager).await;
    assert!(words.starts_with("READY=1\n"), "{words}");
    assert!(world.owners().await[&account].node.as_ref().is_some_and(|owner| node.is(owner)));

    // A node that cannot renew is not one that hangs.
    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    let until = tokio::time::Instant::now() + DEAD_AFTER + WATCHDOG;
    while tokio::time::Instant::now() < until {
        let words = tokio::time::timeout(WATCHDOG, heard(&manager)).await;
        assert_eq!(words.expect("fed in time"), "WATCHDOG=1");
    }
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    node.process.terminate().unwrap();
    let words = heard_beside_life(&manager).await;
    assert!(words.starts_with("STOPPING=1\n"), "{words}");
    assert!(node.process.wait(SOON).await.unwrap().success());
}
