//! What a publisher promises to its caller, its owner and those who ask.

use crate::harness::*;
use bus::{HeardEpochs, PublisherStatus, hear_epoch, hear_epochs, start_epoch_now};
use devstack::{Nats, Tools};
use futures_util::StreamExt;
use schemas::{Book, Epoch, codec};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A call that takes longer waited for something; a busy machine alone does not need that long.
const CALL_MAX: Duration = Duration::from_millis(250);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishing_never_blocks_without_a_server_and_followers_agree_once_it_is_back() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, book_of([1, 2])).await;
    let epoch = master.epoch_spoken();
    let (_feed, mut follower) = Follower::join(&there);
    follower.until_joined().await;
    server.kill().unwrap();
    // More than the client's buffer of 2,048 (M17) and more than our own queue.
    let mut slowest = Duration::ZERO;
    for round in 0..20_000 {
        let begun = Instant::now();
        if round % 2 == 0 {
            master.open(3)
        } else {
            master.close(3)
        };
        slowest = slowest.max(begun.elapsed());
    }
    assert!(slowest < CALL_MAX, "{slowest:?}");
    master.open(4);
    server.restart().await.unwrap();
    follower.until_equal(Duration::from_secs(20), &master).await;
    assert!(master.epoch_spoken() > epoch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_never_reached_a_server_keeps_its_epoch_and_says_the_latest_state() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    server.kill().unwrap();
    let settings = bus::ClientSettings::new(vec![server.url()], "test");
    let here = bus::connect(&settings).await.unwrap();
    let epoch = start_epoch_now(None, None);
    let mut master = Master::start_at(&here, book_of([1]), epoch);
    assert_eq!(master.open(2), 0);
    assert_eq!(master.status(), PublisherStatus::Waiting { epoch });
    server.restart().await.unwrap();
    let (_feed, mut follower) = Follower::join(&client(&server.url()).await);
    follower.until_equal(Duration::from_secs(20), &master).await;
    assert_eq!(master.epoch_spoken(), Some(epoch));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_publishers_the_highest_epoch_wins_and_the_other_stops() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let mut old = Master::speaking(&one, book_of([1, 2])).await;
    let (_feed, mut follower) = Follower::join(&client(&server.url()).await);
    follower.until_equal(SOON, &old).await;
    let heard = hear_epoch(&two, MASTER, Duration::from_millis(2_500)).await.unwrap();
    assert_eq!(heard, old.epoch_spoken());
    let epoch = start_epoch_now(None, heard);
    let mut new = Master::start_at(&two, book_of([2, 3]), epoch);
    let stopped = PublisherStatus::Superseded { heard: epoch };
    eventually(SOON, "the old one stops", || old.status() == stopped).await;
    assert_eq!(old.open(9), 0);
    new.open(4);
    follower.until_equal(SOON, &new).await;
    assert_eq!(new.epoch_spoken(), Some(epoch));
}

// H28: the former publisher had a clock that was ahead, is gone, and the database that knew its
// epoch came back from a backup.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_epoch_that_went_backwards_is_learnt_from_those_who_are_deaf_to_it() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let ahead = Epoch::new(start_epoch_now(None, None).get() + 3_600_000_000).unwrap();
    let old = Master::start_at(&one, book_of([1, 2]), ahead);
    let (_feed, mut follower) = Follower::join(&client(&server.url()).await);
    follower.until_equal(SOON, &old).await;
    drop(old);
    let deaf = Master::start(&two, book_of([2, 3]));
    let stopped = PublisherStatus::Superseded { heard: ahead };
    eventually(SOON, "it is told", || deaf.status() == stopped).await;
    drop(deaf);
    // Whoever starts without a database hears it from them beforehand.
    let listen_for = Duration::from_secs(5);
    let heard = hear_epochs(&two, MASTER, listen_for).await.unwrap();
    assert_eq!(heard, HeardEpochs { said: None, remembered: Some(ahead) });
    let new = Master::start_at(&two, book_of([2, 3]), start_epoch_now(None, heard.highest()));
    follower.until_equal(SOON, &new).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_heard_where_nobody_speaks() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let here = client(&server.url()).await;
    let heard = hear_epoch(&here, MASTER, Duration::from_millis(200)).await.unwrap();
    assert_eq!(heard, None::<Epoch>);
    server.kill().unwrap();
    let unknown = hear_epoch(&here, MASTER, Duration::from_millis(200)).await;
    assert!(unknown.is_err(), "silence of a dead server was taken for silence of the master");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_permit_no_message_leaves_and_with_it_a_new_epoch_begins() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, book_of([1])).await;
    let epoch = master.epoch_spoken().unwrap();
    let (_feed, mut follower) = Follower::join(&there);
    follower.until_joined().await;
    master.permit.store(false, Ordering::Relaxed);
    let mut overheard = eavesdrop(&there).await;
    eventually(SOON, "silence", || master.epoch_spoken().is_none()).await;
    let mut replies = ask(&there).await;
    // Longer than a beacon interval.
    let quiet = Duration::from_millis(2_500);
    let until = Instant::now() + quiet;
    let mut n = 100;
    while Instant::now() < until {
        n += 1;
        assert_eq!(master.open(n), 0);
        let said = tokio::time::timeout(Duration::from_millis(50), overheard.next()).await;
        assert!(said.is_err(), "spoke without a permit: {said:?}");
    }
    assert!(tokio::time::timeout(Duration::from_millis(1), replies.next()).await.is_err());
    master.permit.store(true, Ordering::Relaxed);
    follower.until_equal(SOON, &master).await;
    assert!(master.epoch_spoken() > Some(epoch));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_first_state_nobody_is_answered() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let silent = bus::Publisher::start(
        here,
        MASTER,
        start_epoch_now(None, None),
        bus::PublisherSettings::default(),
        std::sync::Arc::new(|| true),
        &tokio::runtime::Handle::current(),
    );
    // Once it listens, a request is not answered by "no responders" any more.
    let deadline = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < deadline, "the publisher never listened");
        let mut replies = ask(&there).await;
        let reply = tokio::time::timeout(Duration::from_millis(300), replies.next());
        match reply.await {
            Ok(Some(message)) => {
                assert_eq!(message.status, Some(async_nats::StatusCode::NO_RESPONDERS))
            }
            Ok(None) => panic!("closed"),
            Err(_) => break,
        }
    }
    silent.observe(wall(), Book::default(), &std::collections::BTreeMap::new());
    let reply = tokio::time::timeout(SOON, ask(&there).await.next()).await.unwrap().unwrap();
    assert!(codec::decode_snapshot_page(&reply.payload).unwrap().positions.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_ask_together_share_one_snapshot_every_250_ms() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, book_of([1])).await;
    let begun = Instant::now();
    let mut waiting = Vec::new();
    for n in 0..40 {
        master.open(10 + n);
        waiting.push(ask(&there).await);
    }
    let mut taken = BTreeSet::new();
    for replies in &mut waiting {
        let reply = tokio::time::timeout(SOON, replies.next()).await.unwrap().unwrap();
        taken.insert(codec::decode_snapshot_page(&reply.payload).unwrap().at_us);
    }
    let allowed = begun.elapsed().as_millis() / 250 + 1;
    assert!(taken.len() as u128 <= allowed, "{} snapshots in {:?}", taken.len(), begun.elapsed());
    let taken: Vec<_> = taken.into_iter().collect();
    let spaced = |pair: &[schemas::Micros]| pair[1].since(pair[0]) >= Duration::from_millis(249);
    assert!(taken.windows(2).all(spaced), "{taken:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_a_quiet_master_is_as_new_as_its_request() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let _master = Master::speaking(&here, book_of([1])).await;
    for _ in 0..2 {
        let asked_at = wall();
        let mut replies = ask(&there).await;
        let reply = tokio::time::timeout(SOON, replies.next()).await.unwrap().unwrap();
        assert!(codec::decode_snapshot_page(&reply.payload).unwrap().at_us >= asked_at);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_positions_arrive_in_pages() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, book_of(1..=10_000)).await;
    let (_feed, mut follower) = Follower::join(&there);
    follower.until_equal(SOON, &master).await;
    assert_eq!(follower.book.positions.len(), 10_000);
    let mut replies = ask(&there).await;
    let page = tokio::time::timeout(SOON, replies.next()).await.unwrap().unwrap();
    assert_eq!(codec::decode_snapshot_page(&page.payload).unwrap().pages, 10);
    master.close(5_000);
    follower.until_equal(SOON, &master).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_hands_over_what_was_queued() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, Book::default()).await;
    let (_feed, mut follower) = Follower::join(&there);
    follower.until_joined().await;
    for n in 1..=500 {
        assert_eq!(master.open(n), 1);
    }
    assert!(master.handle.close(SOON).await);
    assert_eq!(master.status(), PublisherStatus::Stopped);
    follower.until(SOON, "all 500", |f| f.book.positions.len() == 500).await;
    assert_eq!(follower.events, 500);
}
