//! What a feed promises to its followers, over one server.

use crate::harness::*;
use bus::{
    DoubtReason, FeedSettings, Feeds, OnPublished, PublisherSettings, RequestReason,
    start_epoch_now,
};
use devstack::{FaultMode, FaultProxy, Nats, Tools};
use futures_util::StreamExt;
use schemas::{Beacon, Book, MasterSnapshot, Seq, codec, subject};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// L3: a divergence is gone this long after the event.
const REPAIRED_WITHIN: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_last_event_is_repaired_by_the_beacon() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    // A publisher by hand, as somebody else's bridge would be; the wire loses its event 1.
    let mut requests = here.subscribe(subject::snapshot(MASTER)).await.unwrap();
    let (seq_tx, seq) = tokio::sync::watch::channel(0u64);
    let state = move || {
        let book = if *seq.borrow() == 0 { book_of([1, 2]) } else { book_of([2]) };
        let (epoch, seq) = (schemas::Epoch::MIN, Seq::new(*seq.borrow()).unwrap());
        MasterSnapshot { account: MASTER, epoch, seq, at: wall(), book, funds: None }
    };
    let publisher = tokio::spawn(async move {
        let mut beacons = tokio::time::interval(bus::publisher::BEACON_INTERVAL);
        loop {
            tokio::select! {
                _ = beacons.tick() => {
                    let beacon = codec::encode_beacon(&beacon_of(&state()));
                    here.publish(subject::beacon(MASTER), beacon.into()).await.unwrap();
                }
                Some(request) = requests.next() => {
                    for page in codec::encode_snapshot(&state()) {
                        here.publish(request.reply.clone().unwrap(), page.into()).await.unwrap();
                    }
                }
            }
        }
    });
    let (_feed, mut follower) = Follower::join(&there);
    follower.until(SOON, "both trades", |f| f.book == book_of([1, 2])).await;
    let lost_at = Instant::now();
    seq_tx.send(1).unwrap();
    follower.until(REPAIRED_WITHIN, "the close", |f| f.book == book_of([2])).await;
    assert!(lost_at.elapsed() < REPAIRED_WITHIN);
    assert!(follower.doubts.contains(&DoubtReason::BeaconAhead), "{:?}", follower.doubts);
    publisher.abort();
}

fn beacon_of(state: &MasterSnapshot) -> Beacon {
    Beacon {
        account: state.account,
        epoch: state.epoch,
        seq: state.seq,
        at: state.at,
        open_trades: state.book.positions.len() as u32,
        open_pendings: 0,
        digest: state.book.digest(),
        funds: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_of_the_same_process_does_not_wait_for_the_bus_and_is_taken_once() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).await.unwrap();
    let here = client(&server.url()).await;
    let there = client(&format!("nats://{}", proxy.addr())).await;
    let feeds = Arc::new(Feeds::new(there, FeedSettings::default(), Handle::current()));
    let (sender, mut follower) = Follower::new(1_000);
    feeds.attach(MASTER, account(100), sender);
    let on_published: OnPublished = Arc::new(move |event| feeds.deliver(event));
    let settings =
        PublisherSettings { on_published: Some(on_published), ..PublisherSettings::default() };
    let epoch = start_epoch_now(None, None);
    let mut master = Master::start_with(&here, book_of([1]), epoch, settings);
    follower.until_equal(SOON, &master).await;

    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    master.open(2);
    master.close(1);
    follower.until_equal(SOON, &master).await;
    // What was held comes now: the same two events.
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    master.open(3);
    follower.until_equal(SOON, &master).await;
    assert_eq!((follower.events, &follower.doubts[..]), (3, &[DoubtReason::Joining][..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_larger_than_the_buffers_ends_consistent() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let here = client(&server.url()).await;
    let small = async_nats::ConnectOptions::new().subscription_capacity(64);
    let there = small.connect(server.url()).await.unwrap();
    let mut master = Master::speaking(&here, Book::default()).await;
    let (_feed, mut follower) = Follower::join(&there);
    follower.until_joined().await;
    master.book = book_of(1..=5_000);
    assert_eq!(master.observe(), 5_000);
    master.book = book_of(2_500..=5_000);
    assert_eq!(master.observe(), 2_499);
    follower.until_equal(REPAIRED_WITHIN, &master).await;
    let losses = [DoubtReason::Gap, DoubtReason::BeaconAhead];
    assert!(follower.doubts.iter().any(|d| losses.contains(d)), "nothing was lost: no test");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_with_a_full_queue_gets_a_snapshot_and_the_others_do_not_wait() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, Book::default()).await;
    let (feed, mut quick) = Follower::join(&there);
    let mut slow = Follower::attach(&feed, 200, 16);
    quick.until_joined().await;
    slow.until_joined().await;
    for n in 1..=1_000 {
        master.open(n);
    }
    quick.until_equal(SOON, &master).await;
    assert_eq!(quick.events, 1_000);
    slow.until_equal(SOON, &master).await;
    assert!(slow.snapshots.contains(&DoubtReason::SlowConsumer), "{:?}", slow.snapshots);
    assert_eq!(quick.doubts, [DoubtReason::Joining]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thirty_followers_share_one_subscription_that_ends_with_the_last() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, book_of([1])).await;
    let feeds = Feeds::new(there, FeedSettings::default(), Handle::current());
    let mut followers = Vec::new();
    for n in 0..30 {
        let (sender, follower) = Follower::new(1_000);
        feeds.attach(MASTER, account(100 + n), sender);
        followers.push(follower);
    }
    master.open(2);
    for follower in &mut followers {
        follower.until_equal(SOON, &master).await;
    }
    // One is the publisher's, which listens for others that speak for its account.
    assert_eq!(subscriptions(&server).await, 1 + 1);
    assert_eq!(feeds.statuses().len(), 1);
    for n in 0..30 {
        feeds.detach(MASTER, account(100 + n));
    }
    assert!(feeds.get(MASTER).is_none());
    let deadline = Instant::now() + SOON;
    while subscriptions(&server).await > 1 {
        assert!(Instant::now() < deadline, "still subscribed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Subscriptions to the master's feed that the server knows.
async fn subscriptions(server: &Nats) -> usize {
    let page = server.monitor("/connz?subs=1").await.unwrap();
    let connections = page["connections"].as_array().unwrap();
    let of = |c: &serde_json::Value| {
        let subjects = c["subscriptions_list"].as_array().cloned().unwrap_or_default();
        let feed = subject::master_all(MASTER);
        subjects.iter().filter(|s| s.as_str() == Some(feed.as_str())).count()
    };
    connections.iter().map(of).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_snapshot_comes_to_who_asked_and_nobody_doubts() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let master = Master::speaking(&here, book_of([1])).await;
    let (feed, mut asker) = Follower::join(&there);
    let mut other = Follower::attach(&feed, 200, 1_000);
    asker.until_equal(SOON, &master).await;
    other.until_equal(SOON, &master).await;
    feed.request_snapshot(account(100), RequestReason::Takeover);
    asker.until(SOON, "the answer", |f| f.snapshots.contains(&DoubtReason::Requested)).await;
    assert_eq!(feed.status().doubt, None);
    assert_eq!((other.snapshots.len(), other.doubts.len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_falls_silent_is_doubted_and_nothing_is_taken_for_empty() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let master = Master::speaking(&here, book_of([1, 2])).await;
    let (feed, mut follower) = Follower::join(&there);
    follower.until_equal(SOON, &master).await;
    drop(master);
    let limit = Duration::from_secs(9);
    follower.until(limit, "doubt", |f| f.doubts.contains(&DoubtReason::Silent)).await;
    // Long enough for several tries that nobody answers.
    eventually(SOON, "old beacon", || feed.status().beacon_age > Duration::from_secs(9)).await;
    assert_eq!(feed.status().doubt, Some(DoubtReason::Silent));
    assert_eq!(follower.book, book_of([1, 2]));
    let back = Master::speaking(&here, book_of([2])).await;
    follower.until_equal(REPAIRED_WITHIN, &back).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_message_is_a_doubt_and_is_repaired() {
    let server = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let (here, there) = (client(&server.url()).await, client(&server.url()).await);
    let mut master = Master::speaking(&here, book_of([1])).await;
    let (_feed, mut follower) = Follower::join(&there);
    follower.until_joined().await;
    here.publish(subject::event(MASTER), "\u{0}nonsense".into()).await.unwrap();
    follower.until(SOON, "doubt", |f| f.doubts.contains(&DoubtReason::Undecodable)).await;
    master.open(2);
    follower.until_equal(REPAIRED_WITHIN, &master).await;
    // The state is trusted again: what comes next is an event, not a snapshot.
    let before = follower.events;
    master.open(3);
    follower.until_equal(SOON, &master).await;
    assert_eq!(follower.events, before + 1);
}
