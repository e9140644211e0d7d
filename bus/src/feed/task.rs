//! The shell of a feed: subscribes, decodes once, feeds the core and hands on what it says.

use super::state::{FeedOutput, FeedState, Recipients};
use super::{DoubtReason, FeedMessage, FeedSettings, FeedStatus, Follower, RequestReason};
use crate::clock::wall_now;
use crate::error::BusError;
use crate::metrics::{self as names, COMPLETE, DropReason, FeedMetrics, count, count_dropped};
use crate::offset::LeastDelay;
use crate::snapshot;
use async_nats::{Client, Message, Statistics, Subscriber};
use futures_util::StreamExt;
use parking_lot::Mutex;
use schemas::{AccountId, Epoch, MasterSnapshot, TradeEvent, codec, subject};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinHandle};

/// Longest time between two looks at the client's count of connections and at full queues.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Wait before subscribing anew after the client ended a subscription by itself.
const RESUBSCRIBE_DELAY: Duration = Duration::from_millis(250);

/// At most one line in the log per feed and this time about messages that cannot be read.
const LOG_SPACING: Duration = Duration::from_secs(10);

/// How often the gauges over all feeds are set.
const GAUGE_INTERVAL: Duration = Duration::from_secs(1);

/// Events that came without the bus and wait for the task. What does not fit comes by the bus; the
/// next one that does fit is a gap before that.
const LOCAL_EVENTS_MAX: usize = 4_096;

/// Opens feeds.
#[derive(Debug)]
pub struct Feed;

/// What a follower asked of the feed and the task has not seen yet; the last word counts.
#[derive(Debug, Default)]
struct Inbox {
    /// Sender to attach, or nothing to detach.
    followers: BTreeMap<Follower, Option<mpsc::Sender<FeedMessage>>>,
    requests: BTreeMap<Follower, RequestReason>,
}

#[derive(Debug)]
struct Shared {
    inbox: Mutex<Inbox>,
    wake: Notify,
    status: Mutex<LiveStatus>,
}

#[derive(Debug, Clone, Copy)]
struct LiveStatus {
    status: FeedStatus,
    beacon_at: Instant,
    /// See [`LeastDelay`].
    offset_us: Option<i64>,
}

/// A running feed. It ends, and unsubscribes, when the last clone of its handle is dropped.
#[derive(Debug, Clone)]
pub struct FeedHandle {
    shared: Arc<Shared>,
    local: mpsc::Sender<Arc<TradeEvent>>,
    _task: Arc<AbortOnDrop>,
    master: AccountId,
}

#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Feed {
    /// Opens the feed of a master on this connection and returns at once; the feed joins by itself
    /// and is doubtful (`Joining`) until its first snapshot.
    ///
    /// `runtime` is the hot one: nothing may run there that does not yield.
    pub fn open(
        client: Client,
        master: AccountId,
        settings: FeedSettings,
        runtime: &Handle,
    ) -> FeedHandle {
        let now = Instant::now();
        let status = FeedStatus {
            position: None,
            doubt: Some(DoubtReason::Joining),
            beacon_age: Duration::ZERO,
            beacon_heard: false,
            followers: 0,
        };
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            wake: Notify::new(),
            status: Mutex::new(LiveStatus { status, beacon_at: now, offset_us: None }),
        });
        let core = FeedState::new(master, settings, fastrand::u64(..), Duration::ZERO);
        let (reply_tx, reply_rx) = mpsc::channel(REPLIES_MAX);
        let (local_tx, local_rx) = mpsc::channel(LOCAL_EVENTS_MAX);
        let statistics = client.statistics();
        let connects = statistics.connects.load(Ordering::Relaxed);
        let task = FeedTask {
            client,
            statistics,
            master,
            core,
            start: now,
            shared: Arc::clone(&shared),
            followers: BTreeMap::new(),
            connects,
            replies: reply_tx,
            attempt: None,
            metrics: FeedMetrics::new(),
            offset: LeastDelay::default(),
            logged_at: None,
        };
        let task: JoinHandle<()> = runtime.spawn(task.run(reply_rx, local_rx));
        let task = Arc::new(AbortOnDrop(task.abort_handle()));
        FeedHandle { shared, local: local_tx, _task: task, master }
    }
}

impl FeedHandle {
    /// The master.
    pub fn master(&self) -> AccountId {
        self.master
    }

    /// Its task ended, by a bug or because the bus was closed: nothing comes any more.
    pub fn has_ended(&self) -> bool {
        self._task.0.is_finished()
    }

    /// Gives a follower its place in the stream. It receives a snapshot as soon as the feed is
    /// in order, and `Doubt` before that. Attaching again replaces the sender.
    ///
    /// When its queue is full, messages for it are dropped and it receives a snapshot with the
    /// reason `SlowConsumer` once half of the queue is free; the others do not wait.
    pub fn attach(&self, follower: AccountId, sender: mpsc::Sender<FeedMessage>) {
        self.shared.inbox.lock().followers.insert(follower, Some(sender));
        self.shared.wake.notify_one();
    }

    /// Ends a follower's stream.
    pub fn detach(&self, follower: AccountId) {
        let mut inbox = self.shared.inbox.lock();
        inbox.followers.insert(follower, None);
        inbox.requests.remove(&follower);
        drop(inbox);
        self.shared.wake.notify_one();
    }

    /// Asks the publisher for a fresh snapshot on behalf of a follower. Requests that come
    /// together share one; it comes with the reason `Requested`, or with that of a doubt.
    pub fn request_snapshot(&self, follower: AccountId, reason: RequestReason) {
        self.shared.inbox.lock().requests.insert(follower, reason);
        self.shared.wake.notify_one();
    }

    fn offset_us(&self) -> Option<i64> {
        self.shared.status.lock().offset_us
    }

    /// Takes an event from a publisher of this process, which has just handed it to the bus as
    /// well. Its place makes the one that arrives second a duplicate. Never waits: what does not
    /// fit comes by the bus.
    pub fn deliver(&self, event: Arc<TradeEvent>) {
        // A feed that has ended takes nothing.
        if let Err(mpsc::error::TrySendError::Full(_)) = self.local.try_send(event) {
            count_dropped(DropReason::LocalQueueFull);
        }
    }

    /// Where the feed stands.
    pub fn status(&self) -> FeedStatus {
        let live = *self.shared.status.lock();
        FeedStatus { beacon_age: live.beacon_at.elapsed(), ..live.status }
    }
}

/// Replies waiting for the task; there is one request at a time.
const REPLIES_MAX: usize = 1;

struct Attempt {
    sent: Instant,
    _task: AbortOnDrop,
}

struct Receiver {
    sender: mpsc::Sender<FeedMessage>,
    /// Its queue was full: it gets nothing but a snapshot, once there is room.
    lagging: bool,
}

struct FeedTask {
    client: Client,
    statistics: Arc<Statistics>,
    master: AccountId,
    core: FeedState,
    start: Instant,
    shared: Arc<Shared>,
    followers: BTreeMap<Follower, Receiver>,
    connects: u64,
    replies: mpsc::Sender<Result<MasterSnapshot, BusError>>,
    attempt: Option<Attempt>,
    metrics: FeedMetrics,
    offset: LeastDelay,
    logged_at: Option<Instant>,
}

impl FeedTask {
    async fn run(
        mut self,
        mut replies: mpsc::Receiver<Result<MasterSnapshot, BusError>>,
        mut local: mpsc::Receiver<Arc<TradeEvent>>,
    ) {
        count(names::DOUBTS, "reason", DoubtReason::Joining.as_str());
        loop {
            match self.client.subscribe(subject::master_all(self.master)).await {
                Ok(mut messages) => self.follow(&mut messages, &mut replies, &mut local).await,
                Err(error) => {
                    // Only a closed client refuses; the followers see their streams end.
                    tracing::error!(master = %self.master, %error, "feed ends, the bus is closed");
                    return;
                }
            }
            tokio::time::sleep(RESUBSCRIBE_DELAY).await;
            // What was missed without a subscription is like what a reconnect loses.
            let outputs = self.core.observe_reconnect(self.now());
            self.act(outputs);
        }
    }

    /// Until the subscription ends.
    async fn follow(
        &mut self,
        messages: &mut Subscriber,
        replies: &mut mpsc::Receiver<Result<MasterSnapshot, BusError>>,
        local: &mut mpsc::Receiver<Arc<TradeEvent>>,
    ) {
        let shared = Arc::clone(&self.shared);
        let outputs = self.core.tick(self.now());
        self.act(outputs);
        let timer = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(timer);
        let mut armed = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                () = shared.wake.notified() => self.serve_inbox(),
                () = &mut timer => {
                    self.look();
                    armed = Duration::MAX;
                }
                Some(reply) = replies.recv() => self.take_reply(reply),
                Some(event) = local.recv() => self.take_local(event),
                message = messages.next() => match message {
                    Some(message) => self.take_message(&message),
                    None => return,
                },
            }
            // The timer is only moved when it must ring earlier: events are many, rings are few.
            let due = self.core.deadline().min(self.now() + LOOK_INTERVAL);
            if due < armed {
                armed = due;
                timer.as_mut().reset(tokio::time::Instant::from_std(self.start + due));
            }
            self.publish_status();
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time passed: the connection, full queues, and what the core waits for.
    fn look(&mut self) {
        self.check_connection();
        let lagging: Vec<Follower> =
            self.followers.iter().filter(|(_, r)| r.has_room_again()).map(|(f, _)| *f).collect();
        for follower in lagging {
            if let Some(output) = self.core.catch_up(follower) {
                self.act(vec![output]);
            }
        }
        if self.attempt.as_ref().is_some_and(|a| a.sent.elapsed() > snapshot::REQUEST_LIMIT) {
            let (master, waited) = (self.master, snapshot::REQUEST_LIMIT);
            self.take_reply(Err(BusError::SnapshotTimedOut { master, waited }));
        }
        let outputs = self.core.tick(self.now());
        self.act(outputs);
    }

    fn check_connection(&mut self) {
        let connects = self.statistics.connects.load(Ordering::Relaxed);
        if connects != self.connects {
            let first = self.connects == 0;
            self.connects = connects;
            if !first {
                let outputs = self.core.observe_reconnect(self.now());
                self.act(outputs);
            }
        }
    }

    fn serve_inbox(&mut self) {
        let inbox = std::mem::take(&mut *self.shared.inbox.lock());
        for (follower, sender) in inbox.followers {
            match sender {
                Some(sender) => {
                    self.followers.insert(follower, Receiver { sender, lagging: false });
                    let welcome = self.core.welcome(follower);
                    self.act(vec![welcome]);
                }
                None => {
                    self.followers.remove(&follower);
                    self.core.forget(follower);
                }
            }
        }
        for (follower, reason) in inbox.requests {
            if self.followers.contains_key(&follower) {
                count(names::SNAPSHOTS_WANTED, "reason", reason.as_str());
                let outputs = self.core.observe_request(follower, self.now());
                self.act(outputs);
            }
        }
    }

    /// An event of a publisher of this process. It is judged as one from the bus is.
    fn take_local(&mut self, event: Arc<TradeEvent>) {
        let received = Instant::now();
        self.check_connection();
        self.metrics.local.increment(1);
        let now = received.duration_since(self.start);
        let outputs = self.core.observe_local_event(event, received, now);
        self.act(outputs);
    }

    fn take_message(&mut self, message: &Message) {
        let received = Instant::now();
        self.check_connection();
        let now = received.duration_since(self.start);
        let outputs = match subject::parse(&message.subject) {
            Some(subject::Subject::Event(_)) => match codec::decode_event(&message.payload) {
                Ok(event) => {
                    self.metrics.events.increment(1);
                    self.core.observe_event(Arc::new(event), received, now)
                }
                Err(error) => self.undecodable("event", &error, now),
            },
            Some(subject::Subject::Beacon(_)) => match codec::decode_beacon(&message.payload) {
                Ok(beacon) => {
                    self.metrics.beacons.increment(1);
                    self.offset.observe(wall_now().0.saturating_sub(beacon.at.0), now);
                    self.core.observe_beacon(&beacon, now)
                }
                Err(error) => self.undecodable("beacon", &error, now),
            },
            // Another word under the master's subject is a later version's, not a loss.
            Some(subject::Subject::Snapshot(_)) | None => {
                vec![FeedOutput::CountDropped(DropReason::UnknownSubject)]
            }
        };
        self.act(outputs);
    }

    fn undecodable(
        &mut self,
        what: &str,
        error: &schemas::DecodeError,
        now: Duration,
    ) -> Vec<FeedOutput> {
        if self.logged_at.is_none_or(|at| at.elapsed() >= LOG_SPACING) {
            self.logged_at = Some(Instant::now());
            tracing::warn!(master = %self.master, what, %error, "message of the master is not readable");
        }
        self.core.observe_undecodable(now)
    }

    fn take_reply(&mut self, reply: Result<MasterSnapshot, BusError>) {
        self.check_connection();
        let outcome = reply.as_ref().map_or_else(BusError::as_str, |_| COMPLETE);
        count(names::SNAPSHOTS_FINISHED, "outcome", outcome);
        if let Some(attempt) = self.attempt.take() {
            self.metrics.snapshot_seconds.record(attempt.sent.elapsed());
        }
        if let Err(error) = &reply {
            tracing::debug!(master = %self.master, %error, "no snapshot; the feed holds");
        }
        let outputs = self.core.observe_reply(reply.ok(), self.now());
        self.act(outputs);
    }

    fn act(&mut self, outputs: Vec<FeedOutput>) {
        for output in outputs {
            match output {
                FeedOutput::Send { to: Recipients::All, message } => self.send_all(&message),
                FeedOutput::Send { to: Recipients::One(follower), message } => {
                    if let Entry::Occupied(mut receiver) = self.followers.entry(follower)
                        && !receiver.get_mut().offer(message)
                    {
                        receiver.remove();
                    }
                }
                FeedOutput::RequestSnapshot { heard } => self.request_snapshot(heard),
                FeedOutput::CountGap(reason) => count(names::GAPS, "kind", reason.as_str()),
                FeedOutput::CountDropped(reason) => count_dropped(reason),
                FeedOutput::CountTriesExhausted => {
                    metrics::counter!(names::TRIES_EXHAUSTED).increment(1);
                    tracing::warn!(
                        master = %self.master,
                        doubt = self.core.doubt().map(DoubtReason::as_str),
                        "quick snapshot tries settled nothing; going on slower"
                    );
                }
                FeedOutput::TwoPublishers { followed, ignored } => {
                    metrics::counter!(names::TWO_PUBLISHERS).increment(1);
                    tracing::error!(
                        master = %self.master, %followed, %ignored,
                        "two publishers speak for this master: end one of them"
                    );
                }
                FeedOutput::DoubtEnded(lasted) => self.metrics.doubt_seconds.record(lasted),
            }
        }
    }

    fn send_all(&mut self, message: &FeedMessage) {
        if let FeedMessage::Doubt(reason) = message {
            count(names::DOUBTS, "reason", reason.as_str());
        }
        self.followers.retain(|_, receiver| receiver.offer(message.clone()));
    }

    fn request_snapshot(&mut self, heard: Option<Epoch>) {
        metrics::counter!(names::SNAPSHOTS_STARTED).increment(1);
        let (client, master, replies) = (self.client.clone(), self.master, self.replies.clone());
        let task = tokio::spawn(async move {
            let reply = snapshot::request(&client, master, heard).await;
            // The feed is gone if this fails, and with it the need for the reply.
            let _ = replies.send(reply).await;
        });
        let task = AbortOnDrop(task.abort_handle());
        self.attempt = Some(Attempt { sent: Instant::now(), _task: task });
    }

    fn publish_status(&self) {
        let (beacon, beacon_heard) = self.core.last_beacon();
        *self.shared.status.lock() = LiveStatus {
            status: FeedStatus {
                position: self.core.position(),
                doubt: self.core.doubt(),
                beacon_age: Duration::ZERO,
                beacon_heard,
                followers: self.followers.len(),
            },
            beacon_at: self.start + beacon,
            offset_us: self.offset.get(),
        };
    }
}

impl Receiver {
    /// Puts a message into the follower's queue; false if the follower is gone.
    fn offer(&mut self, message: FeedMessage) -> bool {
        // A snapshot starts the stream anew, so it may also end a lag.
        let ends_lag = matches!(message, FeedMessage::Snapshot(..));
        if self.lagging && !(ends_lag && self.has_room_again()) {
            return !self.sender.is_closed();
        }
        match self.sender.try_send(message) {
            Ok(()) => {
                self.lagging = false;
                true
            }
            Err(mpsc::error::TrySendError::Full(_)) => {
                count_dropped(DropReason::FollowerQueueFull);
                if !self.lagging {
                    count(names::DOUBTS, "reason", DoubtReason::SlowConsumer.as_str());
                }
                self.lagging = true;
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }

    fn has_room_again(&self) -> bool {
        self.lagging && self.sender.capacity() * 2 >= self.sender.max_capacity()
    }
}

/// All feeds of this node: one per master, open while somebody follows it.
#[derive(Debug)]
pub struct Feeds {
    inner: Arc<FeedsInner>,
    _gauges: AbortOnDrop,
}

#[derive(Debug)]
struct FeedsInner {
    client: Client,
    settings: FeedSettings,
    runtime: Handle,
    open: Mutex<BTreeMap<AccountId, OpenFeed>>,
}

#[derive(Debug)]
struct OpenFeed {
    handle: FeedHandle,
    followers: std::collections::BTreeSet<Follower>,
}

impl Feeds {
    /// No feed yet; they will run on `runtime`, over this connection.
    pub fn new(client: Client, settings: FeedSettings, runtime: Handle) -> Self {
        let inner = Arc::new(FeedsInner {
            client,
            settings,
            runtime: runtime.clone(),
            open: Mutex::default(),
        });
        let gauges = runtime.spawn(record_gauges(Arc::downgrade(&inner)));
        Feeds { inner, _gauges: AbortOnDrop(gauges.abort_handle()) }
    }

    /// Attaches a follower to its master, and opens the feed with the first one.
    pub fn attach(
        &self,
        master: AccountId,
        follower: AccountId,
        sender: mpsc::Sender<FeedMessage>,
    ) -> FeedHandle {
        let inner = &self.inner;
        let mut open = inner.open.lock();
        if open.get(&master).is_some_and(|feed| feed.handle.has_ended()) {
            // Its followers saw their streams end, and attach anew as this one does.
            open.remove(&master);
        }
        let feed = open.entry(master).or_insert_with(|| OpenFeed {
            handle: Feed::open(
                inner.client.clone(),
                master,
                inner.settings.clone(),
                &inner.runtime,
            ),
            followers: std::collections::BTreeSet::new(),
        });
        feed.followers.insert(follower);
        feed.handle.attach(follower, sender);
        feed.handle.clone()
    }

    /// Detaches a follower, and closes the feed with the last one (once the handles that
    /// `attach` gave out are dropped).
    pub fn detach(&self, master: AccountId, follower: AccountId) {
        if let Entry::Occupied(mut feed) = self.inner.open.lock().entry(master) {
            feed.get_mut().handle.detach(follower);
            feed.get_mut().followers.remove(&follower);
            if feed.get().followers.is_empty() {
                feed.remove();
            }
        }
    }

    /// The feed of a master, if somebody follows it here.
    pub fn get(&self, master: AccountId) -> Option<FeedHandle> {
        self.inner.open.lock().get(&master).map(|feed| feed.handle.clone())
    }

    /// Hands an event of a publisher of this process to the feed of its master, if somebody follows
    /// it here. See [`FeedHandle::deliver`].
    pub fn deliver(&self, event: &TradeEvent) {
        if let Some(feed) = self.inner.open.lock().get(&event.account) {
            feed.handle.deliver(Arc::new(event.clone()));
        }
    }

    /// Where every feed stands, by master.
    pub fn statuses(&self) -> Vec<(AccountId, FeedStatus)> {
        self.inner.statuses()
    }
}

impl FeedsInner {
    fn statuses(&self) -> Vec<(AccountId, FeedStatus)> {
        self.open.lock().iter().map(|(master, feed)| (*master, feed.handle.status())).collect()
    }
}

impl FeedsInner {
    fn furthest_offset_us(&self) -> i64 {
        let open = self.open.lock();
        let offsets = open.values().filter_map(|feed| feed.handle.offset_us());
        offsets.max_by_key(|offset| offset.unsigned_abs()).unwrap_or_default()
    }
}

async fn record_gauges(feeds: Weak<FeedsInner>) {
    let (open, doubtful) = (metrics::gauge!(names::FEEDS), metrics::gauge!(names::FEEDS_DOUBTFUL));
    let oldest = metrics::gauge!(names::BEACON_OLDEST);
    let offset = metrics::gauge!(names::CLOCK_OFFSET);
    let mut ticks = tokio::time::interval(GAUGE_INTERVAL);
    loop {
        ticks.tick().await;
        let Some(feeds) = feeds.upgrade() else { return };
        let statuses = feeds.statuses();
        open.set(statuses.len() as f64);
        doubtful.set(statuses.iter().filter(|(_, s)| s.doubt.is_some()).count() as f64);
        let age = statuses.iter().map(|(_, s)| s.beacon_age).max().unwrap_or_default();
        offset.set(feeds.furthest_offset_us() as f64 / 1e6);
        oldest.set(wall_now().0 as f64 / 1e6 - age.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn next(receiver: &mut mpsc::Receiver<FeedMessage>) -> Option<FeedMessage> {
        tokio::time::timeout(Duration::from_secs(10), receiver.recv()).await.expect("in time")
    }

    // No server is needed: the feed says at once that it is in doubt.
    #[tokio::test]
    async fn a_feed_whose_task_is_gone_is_opened_anew_by_the_next_who_attaches() {
        let never = async_nats::ConnectOptions::new().retry_on_initial_connect();
        let client = never.connect("nats://127.0.0.1:9").await.unwrap();
        let feeds = Feeds::new(client, FeedSettings::default(), Handle::current());
        let (sender, mut receiver) = mpsc::channel(8);
        let handle = feeds.attach(AccountId::MIN, AccountId::MAX, sender);
        let joining = |message| matches!(message, Some(FeedMessage::Doubt(DoubtReason::Joining)));
        assert!(joining(next(&mut receiver).await));
        handle._task.0.abort();
        assert!(next(&mut receiver).await.is_none(), "its end is seen");
        let (sender, mut receiver) = mpsc::channel(8);
        feeds.attach(AccountId::MIN, AccountId::MAX, sender);
        assert!(joining(next(&mut receiver).await));
    }
}
