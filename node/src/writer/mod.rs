//! Writes rows behind the orders: batched, fenced by the lease token, bounded.
//!
//! The order goes to the broker first; its rows are pushed here and reach Postgres about 100 ms
//! later. The database is a cache that may lag: losing a row costs a look at the broker's book,
//! holding up an order would cost money.
//!
//! In: [`Row`]s through [`Writer::push`]. Out: rows in `pairs`, `copy_events` and
//! `account_status`; counters; the log line of each row that was left out.
//!
//! Invariants:
//! 1. `push` never waits for the database, and the memory for what waits is bounded.
//! 2. A row is gone from the writer when it is durable or refused; a row that the database did
//!    not judge stays.
//! 3. One statement at a time: a newer version of a row never overtakes an older one.
//! 4. A row that is refused costs only itself; its content is logged and it is counted.
//! 5. At shutdown pairs go first, then status, then events.
//! 6. What was written in the last minutes is written again when a replica was promoted, which
//!    may lack it.
//!
//! Not covered: rows of a process that dies; the next owner finds what they said at the broker.
//!
//! Parts: `rows` is the data, `batch` and `recent` decide, `store` is the SQL, `memory` the same
//! without a database, `task` the loop.

pub mod batch;
mod error;
mod load;
pub mod memory;
pub mod metrics;
mod recent;
mod rows;
pub(crate) mod states;
pub mod store;
mod task;

#[cfg(test)]
mod tests;

pub use error::WriteError;
pub use rows::{AccountStatus, CopyEvent, EventOutcome, PairRow, Row, RowKind, TEXT_CHARS_MAX};
pub use task::{WriterConfig, WriterTask};

use batch::{Batch, Pushed, Queue};
use metrics::RowEnd;
use parking_lot::Mutex;
use reconcile::PairId;
use schemas::AccountId;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// What the database answered for one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowOutcome {
    /// It is stored.
    Written,
    /// It, or something newer of the same key, was stored before.
    Already,
    /// The account is not under this node and token; a live row or a status is left out.
    NotOwner,
    /// The pair has ended; a live row is left out.
    Ended,
    /// Somebody holds the account row at this moment; again later.
    Busy,
}

impl RowOutcome {
    /// All outcomes.
    pub const ALL: [RowOutcome; 5] = [
        RowOutcome::Written,
        RowOutcome::Already,
        RowOutcome::NotOwner,
        RowOutcome::Ended,
        RowOutcome::Busy,
    ];

    schemas::words! {
        /// The word used in the statements and as a label.
        pub fn as_str(self) in WORDS {
            RowOutcome::Written => "written",
            RowOutcome::Already => "already",
            RowOutcome::NotOwner => "not_owner",
            RowOutcome::Ended => "ended",
            RowOutcome::Busy => "busy",
        }
    }

    /// The outcome of a word.
    pub fn from_word(word: &str) -> Option<RowOutcome> {
        RowOutcome::ALL.into_iter().find(|outcome| outcome.as_str() == word)
    }
}

/// Everything that is stored of a follower's pairs. Made only by a complete, successful read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedPairs {
    /// Pairs that have not ended, by link and master ticket.
    pub live: Vec<PairRow>,
    /// Pairs that have ended, in the same order; a master ticket may be there more than once.
    pub ended: Vec<PairRow>,
}

/// Where rows go: Postgres, or memory in the simulation.
pub trait RowSink: Send + Sync + 'static {
    /// Stores a batch. On success there is one outcome a row, in order; on an error nothing of
    /// the batch is known to be stored, and sending it again does no harm.
    fn persist(
        &self,
        batch: &Batch,
    ) -> impl Future<Output = Result<Vec<RowOutcome>, WriteError>> + Send;

    /// Reads the pairs of a follower, for its new owner. An error is never an empty list.
    fn load_pairs(
        &self,
        follower: AccountId,
    ) -> impl Future<Output = Result<LoadedPairs, WriteError>> + Send;

    /// Timeline of the server that took the last batch; another one was promoted, and may lack
    /// what the one before had taken. Nothing where the server does not say.
    fn timeline(&self) -> Option<u32>;

    /// Makes room for what comes: partitions ahead of time.
    fn prepare(&self) -> impl Future<Output = Result<(), WriteError>> + Send;
}

/// What a shutdown could not write before its deadline; it was in memory only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftBehind {
    /// Pairs, live and ended.
    pub pairs: usize,
    /// Account status.
    pub statuses: usize,
    /// Events.
    pub events: usize,
}

/// The writer's task has ended, so nothing will be written any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the writer has stopped")]
pub struct WriterStopped;

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Notify,
}

/// The handle that everybody pushes rows to.
#[derive(Debug, Clone)]
pub struct Writer {
    shared: Arc<Shared>,
    progress: watch::Receiver<u64>,
    shutdown: Arc<watch::Sender<Option<Instant>>>,
}

impl Writer {
    /// A writer and its task; nothing is written until the task runs.
    pub fn new(config: WriterConfig) -> (Writer, WriterTask) {
        let shared = Arc::new(Shared { queue: Mutex::new(Queue::default()), wake: Notify::new() });
        let (progress_sender, progress) = watch::channel(0);
        let (shutdown_sender, shutdown) = watch::channel(None);
        let task = WriterTask::new(Arc::clone(&shared), progress_sender, shutdown, config);
        (Writer { shared, progress, shutdown: Arc::new(shutdown_sender) }, task)
    }

    /// Takes a row. Never waits; what cannot be kept is counted, and logged unless it is an event.
    pub fn push(&self, row: Row) {
        let kind = row.kind();
        if self.shutdown.borrow().is_some() {
            tracing::warn!(?row, "row came after the writer's shutdown and is lost");
            metrics::row(kind, RowEnd::Late);
            return;
        }
        let pushed = self.shared.queue.lock().push(row, Instant::now());
        match pushed {
            Pushed::Queued => {}
            Pushed::Coalesced => metrics::row(kind, RowEnd::Coalesced),
            Pushed::Full(row) => {
                if kind != RowKind::Event {
                    tracing::error!(?row, "writer is full, row is lost");
                }
                metrics::row(kind, RowEnd::Full);
            }
        }
    }

    /// Rows of this account that are neither durable nor refused.
    pub fn pending(&self, account: AccountId) -> usize {
        self.shared.queue.lock().pending(account)
    }

    /// Rows of all accounts that are neither durable nor refused.
    pub fn waiting(&self) -> usize {
        self.shared.queue.lock().pending_of_all()
    }

    /// A row of this pair of an account is neither durable nor refused.
    pub fn is_pair_pending(&self, account: AccountId, pair: PairId) -> bool {
        self.shared.queue.lock().is_pair_pending(account, pair)
    }

    /// Pairs of this account of which a row is neither durable nor refused: what is stored of them is old.
    pub fn pairs_pending(&self, account: AccountId) -> usize {
        self.shared.queue.lock().pairs_pending(account)
    }

    /// Waits until no row of this account is pending, without waiting for the next flush.
    ///
    /// For a clean release: stop the account's intake first, or new rows prolong the wait. While
    /// the database is away it does not end; the caller sets the limit. Dropping it is harmless.
    pub async fn flush_account(&self, account: AccountId) -> Result<(), WriterStopped> {
        self.shared.wake.notify_one();
        let mut progress = self.progress.clone();
        let settled = progress.wait_for(|_| self.pending(account) == 0).await;
        settled.map(|_| ()).map_err(|_| WriterStopped)
    }

    /// Takes no more rows, writes what waits for at most `within`, and ends the task.
    ///
    /// Stop the intake first: a row that is pushed at the same moment may be in neither count.
    pub async fn shutdown(&self, within: Duration) -> LeftBehind {
        let deadline = Instant::now() + within;
        self.shutdown.send_modify(|set| {
            set.get_or_insert(deadline);
        });
        let mut progress = self.progress.clone();
        // The task keeps its deadline; it ends by dropping its end of the channel.
        while progress.changed().await.is_ok() {}
        let queue = self.shared.queue.lock();
        LeftBehind {
            pairs: queue.waiting(RowKind::PairEnded) + queue.waiting(RowKind::PairLive),
            statuses: queue.waiting(RowKind::Status),
            events: queue.waiting(RowKind::Event),
        }
    }
}
