//! The pure core of a publisher: gives positions, keeps the queue, raises the epoch.
//!
//! Public because the simulation drives it under its own clock; a process uses [`super::Publisher`].

use super::Closing;
use crate::error::BusError;
use schemas::planted::{self, Bug};
use schemas::{
    AccountId, Book, Change, Epoch, Funds, MasterSnapshot, MasterTicket, Micros, Seq, TradeEvent,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Why a running publisher began a new epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EpochReason {
    /// The connection was lost or made anew.
    Disconnected,
    /// The permit was taken back for a while.
    PermitLost,
    /// The queue was full and was dropped.
    QueueFull,
    /// The session did not know the state for a while.
    Suspended,
}

impl EpochReason {
    schemas::words! {
        /// The word in metrics.
        pub fn as_str(self) in WORDS {
            EpochReason::Disconnected => "disconnected",
            EpochReason::PermitLost => "permit_lost",
            EpochReason::QueueFull => "queue_full",
            EpochReason::Suspended => "suspended",
        }
    }
}

/// A complete state at a position; cheap to take, and turned into bytes outside the lock.
#[derive(Debug, Clone)]
pub struct StateAt {
    /// Incarnation.
    pub epoch: Epoch,
    /// Last event that is contained.
    pub seq: Seq,
    /// Publisher's clock.
    pub at: Micros,
    /// What is open.
    pub book: Arc<Book>,
    /// Money, if known.
    pub funds: Option<Funds>,
}

impl StateAt {
    /// As the message that answers a request.
    pub fn to_snapshot(&self, account: AccountId) -> MasterSnapshot {
        MasterSnapshot {
            account,
            epoch: self.epoch,
            seq: self.seq,
            at: self.at,
            book: (*self.book).clone(),
            funds: self.funds.clone(),
        }
    }
}

/// One message that waits for the connection.
#[derive(Debug)]
pub enum Outgoing {
    /// An event.
    Event {
        /// What happened.
        event: TradeEvent,
        /// Since when it waits.
        queued: Instant,
    },
    /// A beacon of this state.
    Beacon(StateAt),
}

/// The state of one publisher.
#[derive(Debug)]
pub struct PublisherCore {
    account: AccountId,
    epoch: Epoch,
    seq: Seq,
    /// Time of the last event: within an epoch `at` never decreases with seq.
    last_at: Micros,
    book: Arc<Book>,
    funds: Option<Funds>,
    /// A complete state was observed, and it still holds.
    observed: bool,
    /// The state was given up; the next one begins a new epoch.
    suspended: bool,
    /// Messages may be sent; while they may not, only the state is kept.
    online: bool,
    /// Something was queued under this epoch, so that it cannot be used for another state.
    spoke: bool,
    superseded: Option<Epoch>,
    queue: VecDeque<Outgoing>,
    queue_max: usize,
    raised: Vec<EpochReason>,
}

impl PublisherCore {
    /// A publisher that is offline and knows no state yet.
    pub fn new(account: AccountId, epoch: Epoch, queue_max: usize) -> Self {
        PublisherCore {
            account,
            epoch,
            seq: Seq::ZERO,
            last_at: Micros::default(),
            book: Arc::default(),
            funds: None,
            observed: false,
            suspended: false,
            online: false,
            spoke: false,
            superseded: None,
            queue: VecDeque::new(),
            queue_max: queue_max.max(1),
            raised: Vec::new(),
        }
    }

    /// Where the next event comes after.
    pub fn position(&self) -> (Epoch, Seq) {
        (self.epoch, self.seq)
    }

    /// The epoch of another publisher that was heard; this one is silent for good.
    pub fn superseded(&self) -> Option<Epoch> {
        self.superseded
    }

    /// Messages are being sent, or would be if there were any.
    pub fn speaks(&self) -> bool {
        self.online && self.observed && self.superseded.is_none()
    }

    /// Reasons of the epochs raised since the last call, for the counter.
    pub fn take_raised(&mut self) -> Vec<EpochReason> {
        std::mem::take(&mut self.raised)
    }

    /// The newest word about money; it goes with beacons and snapshots.
    pub fn set_funds(&mut self, funds: Funds) {
        self.funds = Some(funds);
    }

    /// The state is not known any more; the next complete one begins a new epoch.
    pub fn suspend(&mut self) {
        if self.observed {
            self.observed = false;
            self.suspended = true;
            self.queue.clear();
        }
    }

    /// Takes in a complete state. Output: how many events it made.
    pub fn observe(
        &mut self,
        at: Micros,
        next: Book,
        closings: &BTreeMap<MasterTicket, Closing>,
        now: Instant,
    ) -> usize {
        if !self.observed {
            self.observed = true;
            self.book = Arc::new(next);
            if std::mem::take(&mut self.suspended) {
                self.raise(at, EpochReason::Suspended);
            }
            self.push_beacon(at);
            return 0;
        }
        let mut changes = self.book.diff(&next);
        let mut reached = next;
        for change in &mut changes {
            if let Change::PositionClosed { position, price, reason } = change {
                // A side turned under one ticket: followers see the close alone, and so do we.
                reached.positions.remove(&position.ticket);
                if let Some(closing) = closings.get(&position.ticket) {
                    (*price, *reason) = (closing.price, closing.reason);
                }
            }
        }
        self.book = Arc::new(reached);
        self.enqueue(at, changes, now)
    }

    /// Takes in changes of the known state. Errors: no complete state was observed yet.
    pub fn publish(
        &mut self,
        at: Micros,
        changes: Vec<Change>,
        now: Instant,
    ) -> Result<usize, BusError> {
        if !self.observed {
            return Err(BusError::NotObserved { master: self.account });
        }
        let book = Arc::make_mut(&mut self.book);
        for change in &changes {
            book.apply(change);
        }
        Ok(self.enqueue(at, changes, now))
    }

    /// The state already contains the changes; they get their places and wait.
    fn enqueue(&mut self, at: Micros, changes: Vec<Change>, now: Instant) -> usize {
        if !self.online || self.superseded.is_some() {
            return 0;
        }
        if self.queue.len() + changes.len() > self.queue_max {
            self.raise(at, EpochReason::QueueFull);
            self.push_beacon(at);
            return 0;
        }
        let count = changes.len();
        for change in changes {
            self.seq = self.seq.next();
            self.last_at = self.last_at.max(at);
            self.spoke = true;
            let event = TradeEvent {
                account: self.account,
                epoch: self.epoch,
                seq: self.seq,
                at: self.last_at,
                change,
            };
            self.queue.push_back(Outgoing::Event { event, queued: now });
        }
        count
    }

    /// Begins a new epoch whose state is the current one, without any event yet.
    fn raise(&mut self, now: Micros, reason: EpochReason) {
        self.queue.clear();
        self.seq = Seq::ZERO;
        if self.spoke {
            self.epoch = super::start_epoch(now, Some(self.epoch), None);
            self.spoke = false;
            self.raised.push(reason);
        }
    }

    /// Messages cannot or must not be sent: what waits is dropped. Output: how many.
    pub fn go_offline(&mut self) -> usize {
        self.online = false;
        let dropped = self.queue.len();
        self.queue.clear();
        dropped
    }

    /// Messages may be sent again, on a connection or under a permit that is not the old one.
    pub fn go_online(&mut self, now: Micros, reason: EpochReason) {
        self.online = true;
        self.raise(now, reason);
        self.push_beacon(now);
    }

    /// Queues a beacon of the state that the events before it lead to.
    pub fn push_beacon(&mut self, now: Micros) {
        let waits = matches!(self.queue.back(), Some(Outgoing::Beacon(_)));
        if planted::is(Bug::P19) && self.spoke {
            return; // an epoch is announced, and no more
        }
        if let Some(state) = self.state(now)
            && self.online
            && !waits
        {
            self.spoke = true;
            self.queue.push_back(Outgoing::Beacon(state));
        }
    }

    /// The complete state, if there is one and this publisher may speak of it.
    pub fn state(&self, now: Micros) -> Option<StateAt> {
        (self.observed && self.superseded.is_none()).then(|| StateAt {
            epoch: self.epoch,
            seq: self.seq,
            at: now.max(self.last_at),
            book: Arc::clone(&self.book),
            funds: self.funds.clone(),
        })
    }

    /// Takes what waits longest, at most `max` messages.
    pub fn take(&mut self, max: usize) -> Vec<Outgoing> {
        let count = self.queue.len().min(max);
        self.queue.drain(..count).collect()
    }

    /// A position was heard for this account. Our own is never above the current one.
    pub fn hear(&mut self, epoch: Epoch, seq: Seq) {
        if (epoch, seq) > self.position() && self.superseded.is_none() {
            self.superseded = Some(epoch);
            self.queue.clear();
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
