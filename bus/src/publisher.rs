//! A master's voice on the bus: events, beacons and snapshot replies of one account.
//!
//! Inputs: complete states of the account as its session reads them, from any thread.
//! Outputs: messages with (epoch, seq), and a status for the owner of the account.
//! `core` decides (pure); the task here sends.
//!
//! Invariants:
//! 1. `observe` and `publish` never wait: (epoch, seq) are given under a short lock, and the queue
//!    is bounded; when it is full everything in it is dropped and the epoch raised (H35, M17).
//! 2. Every message, beacons and snapshot pages included, is sent only while `may_publish` says
//!    yes and the connection is the one the epoch began on (H26). After a disconnect or a lost
//!    permit the next message belongs to a new epoch (M15-M17).
//! 3. The epoch only grows. A higher one heard for the same account ends this publisher with
//!    `Superseded`; it never outbids (H28).
//! 4. Before the first complete state nothing is sent and no request answered: unknown is not
//!    empty.
//! 5. Beacons take their turn in the queue, so each speaks of exactly what was sent before it.
//!
//! Not covered: storing the epoch (the owner does, under its lease token, from the status), and
//! messages that the connection accepted and lost; beacons and snapshots repair those.

pub mod core;
mod task;

pub use self::core::EpochReason;

use self::core::PublisherCore;
use crate::clock::wall_now;
use crate::error::BusError;
use crate::snapshot::prove_subscriptions;
use async_nats::Client;
use futures_util::StreamExt;
use parking_lot::Mutex;
use schemas::planted::{self, Bug};
use schemas::subject::Subject;
use schemas::{
    AccountId, Book, Change, CloseReason, Epoch, Funds, MasterTicket, Micros, Price, Seq,
    TradeEvent, codec, subject,
};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

/// Time between two beacons (DESIGN §3): a lost last event shows after it at the latest.
pub const BEACON_INTERVAL: Duration = Duration::from_secs(2);

/// Shortest time between two snapshot replies of a master (L6); who asks meanwhile shares one.
pub const REPLY_SPACING: Duration = Duration::from_millis(250);

/// Events that wait for the connection. Several times the largest burst measured (5,000);
/// beyond it followers are better served by a snapshot.
pub const QUEUE_EVENTS_MAX: usize = 16_384;

/// Decides whether this process may speak for the account now: the permit of the master's lease.
/// Called for every message on the hot runtime, so it must only look, never wait.
pub type MayPublish = Arc<dyn Fn() -> bool + Send + Sync>;

/// Called with each event right after it was handed to the client, on the hot runtime.
pub type OnPublished = Arc<dyn Fn(&TradeEvent) + Send + Sync>;

/// What is known of the end of a trade beside that it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closing {
    /// Price of the close.
    pub price: Option<Price>,
    /// Why.
    pub reason: CloseReason,
}

/// Settings of a publisher.
#[derive(Clone)]
pub struct PublisherSettings {
    /// Time between beacons. Default `BEACON_INTERVAL`.
    pub beacon_interval: Duration,
    /// Shortest time between snapshot replies. Default `REPLY_SPACING`.
    pub reply_spacing: Duration,
    /// Events that wait for the connection. Default `QUEUE_EVENTS_MAX`.
    pub queue_events_max: usize,
    /// Sees each event that was handed to the client: the way to followers in the same process, and
    /// measurements. Default: none.
    pub on_published: Option<OnPublished>,
}

impl Default for PublisherSettings {
    fn default() -> Self {
        PublisherSettings {
            beacon_interval: BEACON_INTERVAL,
            reply_spacing: REPLY_SPACING,
            queue_events_max: QUEUE_EVENTS_MAX,
            on_published: None,
        }
    }
}

impl fmt::Debug for PublisherSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublisherSettings")
            .field("beacon_interval", &self.beacon_interval)
            .field("reply_spacing", &self.reply_spacing)
            .field("queue_events_max", &self.queue_events_max)
            .finish_non_exhaustive()
    }
}

/// What a publisher does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublisherStatus {
    /// Silent: no server, no permit, or no complete state yet. The epoch is the last one spoken.
    Waiting {
        /// Epoch.
        epoch: Epoch,
    },
    /// Speaking with this epoch; a leased owner stores it.
    Publishing {
        /// Epoch.
        epoch: Epoch,
    },
    /// Somebody speaks for the account with a higher position. This publisher is silent for good;
    /// the owner reads its lease again and starts a new one if the account is still its own.
    Superseded {
        /// The epoch that was heard.
        heard: Epoch,
    },
    /// Closed by its owner; everything queued was handed over.
    Stopped,
}

/// Starts publishers.
#[derive(Debug)]
pub struct Publisher;

pub(crate) struct Shared {
    pub(crate) core: Mutex<PublisherCore>,
    pub(crate) wake: Notify,
    pub(crate) closing: AtomicBool,
}

/// A running publisher; it ends when the last clone of its handle is dropped.
#[derive(Clone)]
pub struct PublisherHandle {
    account: AccountId,
    shared: Arc<Shared>,
    status: watch::Receiver<PublisherStatus>,
    _task: Arc<AbortOnDrop>,
}

impl fmt::Debug for PublisherHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublisherHandle")
            .field("account", &self.account)
            .field("status", &*self.status.borrow())
            .finish_non_exhaustive()
    }
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Publisher {
    /// Starts speaking for an account with a fresh epoch (`start_epoch`), on the hot runtime.
    ///
    /// Returns at once, with or without a server in reach. Silent until the first `observe`.
    pub fn start(
        client: Client,
        account: AccountId,
        epoch: Epoch,
        settings: PublisherSettings,
        may_publish: MayPublish,
        runtime: &Handle,
    ) -> PublisherHandle {
        let core = PublisherCore::new(account, epoch, settings.queue_events_max);
        let shared = Arc::new(Shared {
            core: Mutex::new(core),
            wake: Notify::new(),
            closing: AtomicBool::new(false),
        });
        let (status_tx, status) = watch::channel(PublisherStatus::Waiting { epoch });
        let task =
            task::PublisherTask::new(client, account, settings, may_publish, &shared, status_tx);
        let task = runtime.spawn(task.run());
        let task = Arc::new(AbortOnDrop(task.abort_handle()));
        PublisherHandle { account, shared, status, _task: task }
    }
}

impl PublisherHandle {
    /// The account.
    pub fn account(&self) -> AccountId {
        self.account
    }

    /// Takes a complete state of the account, and queues what changed since the last one.
    ///
    /// `at` is when the broker's callback ran; `closings` says more about trades that ended.
    /// The first state is the base: it is announced by a beacon, not as opens. Output: events
    /// queued; 0 also while silent, because followers then read the state from a snapshot.
    /// Callable from any thread; never waits for the bus.
    pub fn observe(
        &self,
        at: Micros,
        next: Book,
        closings: &BTreeMap<MasterTicket, Closing>,
    ) -> usize {
        let queued = self.shared.core.lock().observe(at, next, closings, Instant::now());
        self.shared.wake.notify_one();
        queued
    }

    /// Queues changes whose result the caller knows to be the account's state, in their order.
    ///
    /// Errors: `NotObserved` before the first `observe`: followers need a base to apply them to.
    pub fn publish(&self, at: Micros, changes: Vec<Change>) -> Result<usize, BusError> {
        let queued = self.shared.core.lock().publish(at, changes, Instant::now())?;
        self.shared.wake.notify_one();
        Ok(queued)
    }

    /// The session does not know the account's state any more: no beacons and no replies until
    /// the next `observe`, which begins a new epoch.
    pub fn suspend(&self) {
        self.shared.core.lock().suspend();
        self.shared.wake.notify_one();
    }

    /// Money of the account, for beacons and snapshots.
    pub fn set_funds(&self, funds: Funds) {
        self.shared.core.lock().set_funds(funds);
    }

    /// The position given last.
    pub fn position(&self) -> (Epoch, Seq) {
        self.shared.core.lock().position()
    }

    /// The status, and its changes.
    pub fn status(&self) -> watch::Receiver<PublisherStatus> {
        self.status.clone()
    }

    /// Hands over what is queued and ends. False if `limit` passed first; dropping the handle
    /// ends it then without the rest.
    pub async fn close(&self, limit: Duration) -> bool {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.wake.notify_one();
        let mut status = self.status.clone();
        let ended = status.wait_for(|status| {
            matches!(status, PublisherStatus::Stopped | PublisherStatus::Superseded { .. })
        });
        tokio::time::timeout(limit, ended).await.is_ok_and(|ended| ended.is_ok())
    }
}

/// The epoch a session starts with: above everything stored or heard, and not below the clock.
///
/// Units: microseconds, though only the order matters. `stored` is the account row's, `heard` the
/// bus's; a publisher without Postgres passes what `hear_epoch` returned.
pub fn start_epoch(now: Micros, stored: Option<Epoch>, heard: Option<Epoch>) -> Epoch {
    if planted::is(Bug::P12)
        && let Some(stored) = stored
    {
        return stored; // and its seq begins anew
    }
    let clock = Epoch::new(u64::try_from(now.0).unwrap_or(0).max(1)).unwrap_or(Epoch::MIN);
    let above = |known: Option<Epoch>| known.map_or(Epoch::MIN, Epoch::next);
    clock.max(above(stored)).max(above(heard))
}

/// `start_epoch` by this machine's clock.
pub fn start_epoch_now(stored: Option<Epoch>, heard: Option<Epoch>) -> Epoch {
    start_epoch(wall_now(), stored, heard)
}

/// The highest epochs of a master that were heard on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeardEpochs {
    /// Of a publisher that speaks now.
    pub said: Option<Epoch>,
    /// Of any publisher ever, as those who ask for a snapshot remember it: they are deaf to lower
    /// ones (H28).
    pub remembered: Option<Epoch>,
}

impl HeardEpochs {
    /// What a new publisher has to be above.
    pub fn highest(self) -> Option<Epoch> {
        self.said.max(self.remembered)
    }

    fn take(&mut self, message: &async_nats::Message) {
        let payload = &message.payload;
        match subject::parse(&message.subject) {
            Some(Subject::Event(_)) => {
                self.said = self.said.max(codec::decode_event(payload).ok().map(|e| e.epoch));
            }
            Some(Subject::Beacon(_)) => {
                self.said = self.said.max(codec::decode_beacon(payload).ok().map(|b| b.epoch));
            }
            Some(Subject::Snapshot(_)) => {
                let heard = codec::decode_snapshot_request(payload).ok().and_then(|r| r.heard);
                self.remembered = self.remembered.max(heard);
            }
            None => {}
        }
    }
}

/// Listens for a publisher of this account, and to those who ask for its snapshot.
///
/// `listen_for` should be longer than `BEACON_INTERVAL`, or a living publisher may go unheard.
/// Errors: anything that makes silence meaningless (`NoEcho`, `Reconnected`, `Closed`).
pub async fn hear_epochs(
    client: &Client,
    account: AccountId,
    listen_for: Duration,
) -> Result<HeardEpochs, BusError> {
    let statistics = client.statistics();
    let connects = statistics.connects.load(Ordering::Relaxed);
    let said =
        client.subscribe(subject::master_all(account)).await.map_err(|_| BusError::Closed)?;
    let asked = client.subscribe(subject::snapshot(account)).await.map_err(|_| BusError::Closed)?;
    let mut messages = futures_util::stream::select(said, asked);
    prove_subscriptions(client, &client.new_inbox()).await?;
    let mut heard = HeardEpochs::default();
    let listening = async {
        while let Some(message) = messages.next().await {
            heard.take(&message);
        }
    };
    if tokio::time::timeout(listen_for, listening).await.is_ok() {
        return Err(BusError::Closed);
    }
    let same = statistics.connects.load(Ordering::Relaxed) == connects.max(1);
    if same { Ok(heard) } else { Err(BusError::Reconnected) }
}

/// Listens for a publisher of this account and returns the highest epoch said, if any; see
/// [`hear_epochs`].
pub async fn hear_epoch(
    client: &Client,
    account: AccountId,
    listen_for: Duration,
) -> Result<Option<Epoch>, BusError> {
    hear_epochs(client, account, listen_for).await.map(|heard| heard.said)
}

/// The pure core, for the properties of the feed.
#[cfg(test)]
pub(crate) mod testing {
    pub(crate) use super::core::{Outgoing, PublisherCore};
}
