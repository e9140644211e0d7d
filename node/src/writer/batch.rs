//! Decides what to write next, and what to do with what was refused.
//!
//! Pure: rows, errors and `now` go in, batches and decisions come out.
//!
//! Invariants:
//! 1. Per pair and ticket, per account's status, there is one row in the queue: the newest.
//! 2. An ended row is never replaced by a live one of its own or an earlier tenure.
//! 3. Ended pairs go before live pairs, pairs before status, status before events.
//! 4. A row leaves the count of its account when it is durable, refused, superseded or
//!    dropped, and at no other time.
//! 5. Pairs and events are bounded; what does not fit is handed back to be counted.
//! 6. A batch holds at most one row for each stored row.
//! 7. Only SQLSTATE classes 22 and 23 drop a row, and only a row that was sent alone.
//!
//! Not covered: whether the database keeps the same rules for rows of other nodes (`store`).

use super::error::WriteError;
use super::rows::{AccountStatus, CopyEvent, PairRow, Row, RowKind};
use reconcile::PairId;
use schemas::planted::{self, Bug};
use schemas::{AccountId, FollowerTicket};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Rows in one statement. Measured elsewhere: 100 rows take 1.3 ms, 1,000 take 7 to 11 ms; at
/// 500 a batch with one bad row is sorted out in about 20 statements, well inside a second.
pub const BATCH_ROWS_MAX: usize = 500;
/// Pair rows that wait. About 100 MB at worst; 200,000 pairs are 66 followers with 3,000 each.
pub const PAIRS_MAX: usize = 200_000;
/// Events that wait: five minutes at 300 a second.
pub const EVENTS_MAX: usize = 100_000;
/// First wait after the database did not take a batch.
pub const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest wait, of the writer for the database and of one row for its turn.
pub const RETRY_MAX: Duration = Duration::from_secs(5);

/// What a SQLSTATE says about the statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A value or a constraint: this row will never go in.
    Row,
    /// A missing table, column or right: no row goes in until somebody deploys.
    Deployment,
    /// A row that somebody else holds: the others need not wait for it.
    Locked,
    /// Connection, shutdown, deadlock, serialization, resources: the same again later.
    Passing,
    /// Anything else: keep the row, but do not let it hold up the others.
    Unexpected,
}

/// Sorts a SQLSTATE.
///
/// Shape: five characters in, one fault out. Source: the classes in Postgres' error code table.
/// Classes 22 (data) and 23 (integrity) are about one row's content and nothing else is.
pub fn classify(sqlstate: &str) -> Fault {
    let fault = match sqlstate {
        "55P03" => Fault::Locked,
        // A plan or a statement that the server no longer has: a new connection prepares it anew.
        "0A000" | "26000" => Fault::Passing,
        _ => match sqlstate.get(..2) {
            Some("22" | "23") => Fault::Row,
            Some("42" | "3D" | "3F" | "28") => Fault::Deployment,
            Some("08" | "25" | "40" | "53" | "55" | "57" | "58" | "XX") => Fault::Passing,
            _ => Fault::Unexpected,
        },
    };
    match fault {
        // Planted: the two are taken for each other.
        Fault::Row if planted::is(Bug::P21) => Fault::Passing,
        Fault::Passing if planted::is(Bug::P21) => Fault::Row,
        fault => fault,
    }
}

/// What to do with a batch that was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Send it in two halves: the rows that are good must not wait for the one that is not.
    SplitRows,
    /// Give this row up; log its content and count it.
    DropRow,
    /// Keep this row for a later turn; go on with the others.
    HoldRow,
    /// Keep everything and wait.
    RetryLater,
    /// Keep everything, wait, and call a person.
    KeepAndAlarm,
}

/// How long to wait after `attempts` failures in a row (0 for the first).
///
/// Doubles from [`RETRY_FIRST`] to [`RETRY_MAX`]; `jitter` from 0 to 1 takes away up to half.
pub fn retry_delay(attempts: u32, jitter: f64) -> Duration {
    let full = RETRY_FIRST.saturating_mul(1_u32 << attempts.min(16)).min(RETRY_MAX);
    full.mul_f64(1.0 - 0.5 * jitter.clamp(0.0, 1.0))
}

/// A row on its way, with what the queue knows of it.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The row.
    pub row: Row,
    /// When it was pushed.
    pub pushed: Instant,
    /// When the oldest change that it stands for was pushed.
    pub since: Instant,
    /// How often it had to wait.
    pub attempts: u32,
    /// Its turn comes then.
    pub not_before: Option<Instant>,
}

impl Entry {
    fn new(row: Row, now: Instant) -> Self {
        Self { row, pushed: now, since: now, attempts: 0, not_before: None }
    }

    fn is_ready(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }
}

/// Rows of one kind that go in one statement, sorted by their key.
#[derive(Debug, Clone)]
pub struct Batch {
    kind: RowKind,
    /// The rows.
    pub entries: Vec<Entry>,
}

impl Batch {
    /// Batches of these rows, one a kind, in the order in which they are to be written.
    pub fn sorted(rows: impl IntoIterator<Item = Row>) -> Vec<Batch> {
        let now = Instant::now();
        let mut queue = Queue::default();
        for row in rows {
            queue.push(row, now);
        }
        std::iter::from_fn(|| queue.take(now)).collect()
    }

    /// The kind of every row in it.
    pub fn kind(&self) -> RowKind {
        self.kind
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nothing in it.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Its rows.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.entries.iter().map(|entry| &entry.row)
    }

    /// Its pairs; empty for another kind.
    pub fn pairs(&self) -> Vec<&PairRow> {
        self.rows()
            .filter_map(|row| if let Row::Pair(row) = row { Some(row) } else { None })
            .collect()
    }

    /// Its status rows; empty for another kind.
    pub fn statuses(&self) -> Vec<&AccountStatus> {
        self.rows()
            .filter_map(|row| if let Row::AccountStatus(row) = row { Some(row) } else { None })
            .collect()
    }

    /// Its events; empty for another kind.
    pub fn events(&self) -> Vec<&CopyEvent> {
        self.rows()
            .filter_map(|row| if let Row::CopyEvent(row) = row { Some(row) } else { None })
            .collect()
    }

    /// What to do after this batch was not written for this reason.
    pub fn on_refused(&self, error: &WriteError) -> Next {
        let alone = self.len() <= 1;
        match error {
            WriteError::Refused { sqlstate, .. } => match (classify(sqlstate), alone) {
                (Fault::Row | Fault::Locked | Fault::Unexpected, false) => Next::SplitRows,
                (Fault::Row, true) => Next::DropRow,
                (Fault::Locked | Fault::Unexpected, true) => Next::HoldRow,
                (Fault::Deployment, _) => Next::KeepAndAlarm,
                (Fault::Passing, _) => Next::RetryLater,
            },
            WriteError::Unreachable { .. } | WriteError::TimedOut { .. } => Next::RetryLater,
            WriteError::Unreadable { .. } => Next::KeepAndAlarm,
        }
    }

    /// Two halves, the first not smaller than the second.
    pub fn halves(mut self) -> (Batch, Batch) {
        let second = self.entries.split_off(self.entries.len().div_ceil(2));
        let kind = self.kind;
        (self, Batch { kind, entries: second })
    }
}

/// What became of a row that was given to the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pushed {
    /// It waits as a row of its own.
    Queued,
    /// It took the place of an older row, or a newer one made it needless.
    Coalesced,
    /// No room: here it is back, to be logged and counted.
    Full(Box<Row>),
}

/// Everything that waits to be written.
#[derive(Debug, Default)]
pub struct Queue {
    ended: BTreeMap<(PairId, AccountId, Option<FollowerTicket>), Entry>,
    live: BTreeMap<(PairId, AccountId), Entry>,
    statuses: BTreeMap<AccountId, Entry>,
    /// By order of arrival.
    events: BTreeMap<u64, Entry>,
    arrivals: u64,
    /// Rows that wait or are being written, per account; no entry means none.
    pending: BTreeMap<AccountId, usize>,
    /// The same of the rows of each pair.
    pending_pairs: BTreeMap<(AccountId, PairId), usize>,
}

impl Queue {
    /// Takes a row.
    pub fn push(&mut self, row: Row, now: Instant) -> Pushed {
        let full = match row.kind() {
            RowKind::PairEnded | RowKind::PairLive => {
                self.ended.len() + self.live.len() >= PAIRS_MAX
            }
            RowKind::Event => self.events.len() >= EVENTS_MAX,
            RowKind::Status => false,
        };
        self.insert(Entry::new(row, now), full)
    }

    /// The next batch: the first kind that has rows whose turn has come.
    pub fn take(&mut self, now: Instant) -> Option<Batch> {
        RowKind::ALL.into_iter().find_map(|kind| {
            let entries = match kind {
                RowKind::PairEnded => take_ready(&mut self.ended, now, |key| key.0),
                RowKind::PairLive => take_ready(&mut self.live, now, |key| key.0),
                RowKind::Status => take_ready(&mut self.statuses, now, |key| *key),
                RowKind::Event => take_ready(&mut self.events, now, |key| *key),
            };
            (!entries.is_empty()).then_some(Batch { kind, entries })
        })
    }

    /// Takes a row back that was not written through no fault of its own.
    pub fn put_back(&mut self, entry: Entry) {
        let key = PendingKey::of(&entry.row);
        self.insert(entry, false);
        // It was counted all the time that it was away.
        self.uncount(key);
    }

    /// Takes a row back that cannot be written just now; each time it waits longer.
    pub fn hold(&mut self, mut entry: Entry, now: Instant, jitter: f64) {
        entry.not_before = Some(now + retry_delay(entry.attempts, jitter));
        entry.attempts = entry.attempts.saturating_add(1);
        self.put_back(entry);
    }

    /// This row needs nothing more.
    pub fn settle(&mut self, row: &Row) {
        self.uncount(PendingKey::of(row));
    }

    fn uncount(&mut self, key: PendingKey) {
        count_down(&mut self.pending, &key.account);
        if let Some(pair) = key.pair {
            count_down(&mut self.pending_pairs, &(key.account, pair));
        }
    }

    /// Rows of this account that are not settled, those being written included.
    pub fn pending(&self, account: AccountId) -> usize {
        self.pending.get(&account).copied().unwrap_or(0)
    }

    /// A row of this pair of an account is not settled.
    pub fn is_pair_pending(&self, account: AccountId, pair: PairId) -> bool {
        self.pending_pairs.contains_key(&(account, pair))
    }

    /// Pairs of this account of which a row is not settled.
    pub fn pairs_pending(&self, account: AccountId) -> usize {
        let (first, last) = (PairId(u128::MIN), PairId(u128::MAX));
        self.pending_pairs.range((account, first)..=(account, last)).count()
    }

    /// Rows of all accounts that are not settled.
    pub fn pending_of_all(&self) -> usize {
        self.pending.values().sum()
    }

    /// Rows of one kind that wait, those being written not included.
    pub fn waiting(&self, kind: RowKind) -> usize {
        match kind {
            RowKind::PairEnded => self.ended.len(),
            RowKind::PairLive => self.live.len(),
            RowKind::Status => self.statuses.len(),
            RowKind::Event => self.events.len(),
        }
    }

    fn insert(&mut self, entry: Entry, full: bool) -> Pushed {
        let counted = PendingKey::of(&entry.row);
        let account = counted.account;
        let pushed = match &entry.row {
            Row::Pair(row) if row.has_ended() => {
                let key = (row.pair.id, account, row.pair.follower_ticket);
                let covered =
                    self.live.get(&(row.pair.id, account)).is_some_and(|live| ends(row, &live.row));
                let pushed = place(&mut self.ended, key, entry, full && !covered);
                if covered {
                    self.live.remove(&(key.0, account));
                    // Its place in the count goes over to the ended row, or is free.
                    if pushed == Pushed::Queued {
                        return Pushed::Coalesced;
                    }
                    self.uncount(counted);
                }
                pushed
            }
            Row::Pair(row) => {
                let id = row.pair.id;
                let of_pair = (id, account, None)..=(id, account, Some(FollowerTicket::MAX));
                if self.ended.range(of_pair).any(|(_, ended)| is_ended_by(&entry.row, &ended.row)) {
                    Pushed::Coalesced
                } else {
                    place(&mut self.live, (id, account), entry, full)
                }
            }
            Row::AccountStatus(row) => place(&mut self.statuses, row.account, entry, full),
            Row::CopyEvent(_) => {
                self.arrivals += 1;
                place(&mut self.events, self.arrivals, entry, full)
            }
        };
        if pushed == Pushed::Queued {
            *self.pending.entry(account).or_insert(0) += 1;
            if let Some(pair) = counted.pair {
                *self.pending_pairs.entry((account, pair)).or_insert(0) += 1;
            }
        }
        pushed
    }
}

/// What a row is counted under until it is settled.
#[derive(Debug, Clone, Copy)]
struct PendingKey {
    account: AccountId,
    pair: Option<PairId>,
}

impl PendingKey {
    fn of(row: &Row) -> PendingKey {
        let pair = if let Row::Pair(row) = row { Some(row.pair.id) } else { None };
        PendingKey { account: row.account(), pair }
    }
}

fn count_down<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    let count = counts.get_mut(key);
    let count = count.expect("a row is settled once, and was counted when it was pushed");
    *count -= 1;
    if *count == 0 {
        counts.remove(key);
    }
}

/// Puts an entry at its key; of two rows with one key the newer stays, with the older's age.
fn place<K: Ord>(map: &mut BTreeMap<K, Entry>, key: K, entry: Entry, full: bool) -> Pushed {
    match map.get_mut(&key) {
        Some(held) => {
            let since = held.since.min(entry.since);
            if is_newer(&entry, held) {
                *held = entry;
            }
            held.since = since;
            Pushed::Coalesced
        }
        None if full => Pushed::Full(Box::new(entry.row)),
        None => {
            map.insert(key, entry);
            Pushed::Queued
        }
    }
}

/// Pairs say their own order. Status has none but that of its pushes: the node's clock, which it
/// carries, may have been set back.
fn is_newer(entry: &Entry, held: &Entry) -> bool {
    match (&entry.row, &held.row) {
        (Row::Pair(row), Row::Pair(held)) => row.rank() > held.rank(),
        (Row::AccountStatus(row), Row::AccountStatus(held_row)) => {
            (row.token, entry.pushed) >= (held_row.token, held.pushed)
        }
        _ => false,
    }
}

fn ends(ended: &PairRow, live: &Row) -> bool {
    let Row::Pair(live) = live else { return false };
    let same_ticket = live.pair.follower_ticket.is_some()
        && live.pair.follower_ticket == ended.pair.follower_ticket;
    same_ticket || live.token <= ended.token
}

fn is_ended_by(live: &Row, ended: &Row) -> bool {
    matches!(ended, Row::Pair(ended) if ends(ended, live))
}

/// The first rows whose turn has come, at most one of each `target`: a statement cannot write
/// one stored row twice. The keys of one target are neighbours.
fn take_ready<K: Ord + Copy, T: PartialEq>(
    map: &mut BTreeMap<K, Entry>,
    now: Instant,
    target: impl Fn(&K) -> T,
) -> Vec<Entry> {
    let mut keys: Vec<K> = Vec::new();
    for (key, entry) in map.iter() {
        if keys.len() == BATCH_ROWS_MAX {
            break;
        }
        let is_other = keys.last().is_none_or(|last| target(last) != target(key));
        if entry.is_ready(now) && is_other {
            keys.push(*key);
        }
    }
    keys.into_iter().filter_map(|key| map.remove(&key)).collect()
}
