//! The feeds of a process: `bus::FeedState` between the bus and the followers.

use crate::bus::Message;
use crate::plan::MS;
use crate::world::{Who, World};
use bus::feed::{FeedOutput, FeedState, Recipients};
use bus::metrics::DropReason;
use bus::{DoubtReason, FeedMessage, FeedSettings};
use schemas::{AccountId, MasterSnapshot, TradeEvent};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// One feed of one process.
pub(crate) struct Feed {
    pub(crate) core: FeedState,
    pub(crate) followers: BTreeSet<AccountId>,
    requests: u64,
    connection: u64,
}

pub(crate) fn attach(w: &mut World, who: Who, master: AccountId, follower: AccountId) {
    let now = elapsed(w, who);
    let seed = w.rng.range(0, u64::MAX);
    let process = w.process(who);
    let connection = process.bus.number;
    let is_new = !process.feeds.contains_key(&master);
    let feed = process.feeds.entry(master).or_insert_with(|| Feed {
        core: FeedState::new(master, FeedSettings::default(), seed, now),
        followers: BTreeSet::new(),
        requests: 0,
        connection,
    });
    feed.followers.insert(follower);
    let welcome = feed.core.welcome(follower);
    act(w, who, master, vec![welcome]);
    if is_new {
        crate::bus::subscribe(w, who, master);
        w.after(MS, Some(who), move |w| look(w, who, master));
    }
}

pub(crate) fn detach(w: &mut World, who: Who, master: AccountId, follower: AccountId) {
    let process = w.process(who);
    let Some(feed) = process.feeds.get_mut(&master) else { return };
    feed.followers.remove(&follower);
    feed.core.forget(follower);
    if feed.followers.is_empty() {
        process.feeds.remove(&master);
        crate::bus::unsubscribe(w, who, master);
    }
}

fn elapsed(w: &mut World, who: Who) -> Duration {
    w.refresh_clock(who);
    w.process(who).clock.now().since_start()
}

/// Time passed: the connection, and what the core waits for.
fn look(w: &mut World, who: Who, master: AccountId) {
    let now = elapsed(w, who);
    check_connection(w, who, master);
    let Some(feed) = w.process(who).feeds.get_mut(&master) else { return };
    let outputs = feed.core.tick(now);
    act(w, who, master, outputs);
    w.after(250 * MS, Some(who), move |w| look(w, who, master));
}

fn check_connection(w: &mut World, who: Who, master: AccountId) {
    let now = elapsed(w, who);
    let process = w.process(who);
    let number = process.bus.number;
    let Some(feed) = process.feeds.get_mut(&master) else { return };
    if feed.connection != number {
        let first = feed.connection == 0;
        feed.connection = number;
        if !first {
            let outputs = feed.core.observe_reconnect(now);
            act(w, who, master, outputs);
        }
    }
}

/// A message of the bus arrived.
/// An event of a publisher of the same process.
pub(crate) fn hear_here(w: &mut World, who: Who, master: AccountId, event: Arc<TradeEvent>) {
    check_connection(w, who, master);
    let now = elapsed(w, who);
    let received = w.base;
    let Some(feed) = w.process(who).feeds.get_mut(&master) else { return };
    let outputs = feed.core.observe_local_event(event, received, now);
    w.reach("event_heard_here");
    act(w, who, master, outputs);
}

pub(crate) fn hear(w: &mut World, who: Who, master: AccountId, message: Message) {
    check_connection(w, who, master);
    let now = elapsed(w, who);
    let received = w.base;
    let Some(feed) = w.process(who).feeds.get_mut(&master) else { return };
    let outputs = match message {
        Message::Event(event) => feed.core.observe_event(event, received, now),
        Message::Beacon(beacon) => feed.core.observe_beacon(&beacon, now),
        Message::Garbage => feed.core.observe_undecodable(now),
    };
    act(w, who, master, outputs);
}

/// A snapshot request ended.
pub(crate) fn answered(
    w: &mut World,
    who: Who,
    master: AccountId,
    number: u64,
    reply: Option<MasterSnapshot>,
) {
    check_connection(w, who, master);
    let now = elapsed(w, who);
    let Some(feed) = w.process(who).feeds.get_mut(&master) else { return };
    if feed.requests != number {
        return;
    }
    // One answer a request.
    feed.requests += 1;
    let had_reply = reply.is_some();
    let place = reply.as_ref().map(|snapshot| (snapshot.epoch, snapshot.seq));
    let outputs = feed.core.observe_reply(reply, now);
    if had_reply && feed.core.doubt().is_some() {
        w.reach("snapshot_asked_again_because_stale");
    }
    w.note(|| format!("feed of {master} on node {}: answer {place:?}", who.node));
    act(w, who, master, outputs);
}

/// A follower asks for a fresh snapshot.
pub(crate) fn request(w: &mut World, who: Who, master: AccountId, follower: AccountId) {
    let now = elapsed(w, who);
    let Some(feed) = w.process(who).feeds.get_mut(&master) else { return };
    let outputs = feed.core.observe_request(follower, now);
    act(w, who, master, outputs);
}

fn act(w: &mut World, who: Who, master: AccountId, outputs: Vec<FeedOutput>) {
    for output in outputs {
        match output {
            FeedOutput::Send { to, message } => {
                let followers: Vec<AccountId> = match to {
                    Recipients::All => {
                        let feed = w.process(who).feeds.get(&master);
                        feed.map(|f| f.followers.iter().copied().collect()).unwrap_or_default()
                    }
                    Recipients::One(follower) => vec![follower],
                };
                if let FeedMessage::Doubt(reason) = &message
                    && *reason == DoubtReason::DigestDiffers
                {
                    w.reach("digest_differs");
                }
                match &message {
                    FeedMessage::Doubt(reason) => {
                        let reason = *reason;
                        w.note(|| {
                            format!("feed of {master} on node {}: doubt {reason:?}", who.node)
                        });
                    }
                    FeedMessage::Snapshot(snapshot, reason) => {
                        let (place, reason) = ((snapshot.epoch, snapshot.seq), *reason);
                        w.note(|| {
                            format!(
                                "feed of {master} on node {}: snapshot {place:?} {reason:?}",
                                who.node
                            )
                        });
                    }
                    FeedMessage::Event { .. } | FeedMessage::Funds(_) => {}
                }
                for follower in followers {
                    crate::session::feed_says(w, who, follower, master, message.clone());
                }
            }
            FeedOutput::RequestSnapshot { heard } => {
                let Some(feed) = w.process(who).feeds.get_mut(&master) else { return };
                feed.requests += 1;
                let number = feed.requests;
                w.note(|| format!("feed of {master} on node {}: asks, heard {heard:?}", who.node));
                crate::bus::request_snapshot(w, who, master, heard, number);
            }
            FeedOutput::CountDropped(reason) => match reason {
                DropReason::Duplicate => w.reach("event_dropped_as_applied"),
                DropReason::CameLocally => w.reach("came_by_the_bus_a_second_time"),
                DropReason::OldEpoch | DropReason::OldEpochBeacon => w.reach("old_epoch_dropped"),
                _ => {}
            },
            FeedOutput::CountGap(_) => w.reach("gap"),
            FeedOutput::TwoPublishers { .. } => w.reach("two_publishers"),
            FeedOutput::CountTriesExhausted | FeedOutput::DoubtEnded(_) => {}
        }
    }
}
