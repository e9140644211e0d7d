//! What is told of a connection to real servers.

use crate::harness::*;
use bus::{ClientSettings, ConnectionNews, ConnectionWatch, connection_changes};
use devstack::{Nats, Tools};
use std::time::Duration;

async fn watched(nats: &Nats) -> ConnectionWatch {
    let (changes, heard) = connection_changes();
    let url = nats.url().replace("nats://", "nats://u:hunter2@");
    let settings =
        ClientSettings { changes: Some(changes), ..ClientSettings::new(vec![url], "watched") };
    let client = bus::connect(&settings).await.unwrap();
    ConnectionWatch::new(client, &settings, heard)
}

async fn next(watch: &mut ConnectionWatch) -> ConnectionNews {
    let news = tokio::time::timeout(SOON, watch.next()).await.expect("no news").unwrap();
    assert!(!news.to_string().contains("hunter2"), "{news}");
    news
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_lost_and_one_that_is_back_are_told_with_the_servers_address() {
    let nats = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let server = nats.addr().to_string();
    let mut watch = watched(&nats).await;
    assert_eq!(next(&mut watch).await, ConnectionNews::There { server: server.clone() });
    for _ in 0..2 {
        nats.kill().unwrap();
        assert_eq!(next(&mut watch).await, ConnectionNews::Lost { server: server.clone() });
        nats.restart().await.unwrap();
        match next(&mut watch).await {
            ConnectionNews::Back { server: at, away: Some(away) } => {
                assert_eq!(at, server);
                assert!(away > Duration::ZERO);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_about_to_end_is_told_before_it_closes_the_connection() {
    let settings = "lame_duck_duration: \"30s\"\nlame_duck_grace_period: \"100ms\"";
    let nats = Nats::start_with_config(&Tools::locate().unwrap(), settings).await.unwrap();
    let server = nats.addr().to_string();
    let mut watch = watched(&nats).await;
    assert_eq!(next(&mut watch).await, ConnectionNews::There { server: server.clone() });
    nats.lame_duck().unwrap();
    assert_eq!(next(&mut watch).await, ConnectionNews::LameDuck { server: server.clone() });
    assert_eq!(next(&mut watch).await, ConnectionNews::Lost { server });
}
