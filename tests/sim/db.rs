//! The database: committed rows, open transactions with their locks, its own clock and timeline.
//!
//! The statements are those of `lease::memory` and `writer::memory`, which pass the same suites as
//! the SQL; here they get what a server adds: transactions that stay open while the answer
//! travels, locks until the commit, commits whose answer is lost, and a copy that lags behind.

use crate::plan::{Fault, MASTERS, MS, Plan, SECOND};
use crate::world::{BEGIN, LinkFacts, Who, World, account};
use lockstep::database::DatabaseError;
use lockstep::lease::LeaseError;
use lockstep::lease::cycle::{CycleReply, CycleRequest};
use lockstep::lease::memory::{MemoryNode, MemoryRow, RowLocks, StatementTimes, run_statements};
use lockstep::lease::store::TRANSACTION_AGE_MAX;
use lockstep::writer::batch::Batch;
use lockstep::writer::memory::{Tables, live_write_locks_the_account_row};
use lockstep::writer::{LoadedPairs, RowKind, RowOutcome, WriteError};
use schemas::{AccountId, Epoch, LinkId, Micros, NodeId, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

/// A transaction whose client says nothing is ended by the server after this.
const IDLE_LIMIT: u64 = 5 * SECOND;
/// A lease cycle's limit; the server's own is a little shorter.
pub(crate) const QUERY_LIMIT: u64 = 5 * SECOND;
/// A writer's statement gives up after this.
const WRITE_LIMIT: u64 = 5 * SECOND;

/// What a failover may lose.
#[derive(Debug, Clone)]
pub(crate) struct Committed {
    pub(crate) rows: BTreeMap<AccountId, MemoryRow>,
    pub(crate) nodes: BTreeMap<String, MemoryNode>,
    pub(crate) epochs: BTreeMap<AccountId, Epoch>,
    /// Links whose broker does not keep tags.
    pub(crate) untaggable: BTreeSet<LinkId>,
    pub(crate) tables: Tables,
}

#[derive(Debug, Default)]
struct Locks {
    /// Account to the transaction that holds it for an update.
    exclusive: BTreeMap<AccountId, u64>,
    /// Account and transaction of fenced writes.
    shared: BTreeSet<(AccountId, u64)>,
}

struct LeaseTransaction {
    who: Who,
    request: CycleRequest,
    changed: BTreeMap<AccountId, MemoryRow>,
    node: Option<(String, MemoryNode)>,
    reply: Option<CycleReply>,
}

/// The database.
pub(crate) struct Db {
    pub(crate) committed: Committed,
    pub(crate) replica: Option<Committed>,
    locks: Locks,
    transactions: u64,
    open: BTreeMap<u64, LeaseTransaction>,
    pub(crate) clock_off: i64,
    pub(crate) timeline: u32,
    /// Raised when every connection is cut.
    pub(crate) server: u64,
    /// When its time or its history jumped last.
    pub(crate) jumped_at: Option<u64>,
    /// When commits were lost last.
    pub(crate) failed_over_at: Option<u64>,
}

impl Db {
    pub(crate) fn new(plan: &Plan, links: &BTreeMap<LinkId, LinkFacts>) -> Db {
        let ids = (1..=MASTERS).chain(plan.follower_ids());
        let row = MemoryRow {
            platform: "paper".into(),
            enabled: true,
            node_id: None,
            lease_until: None,
            token: Token::MIN,
            tenure_since: None,
            starts: 0,
            free_since: Micros(BEGIN),
            masters: BTreeSet::new(),
        };
        let masters = |follower: AccountId| {
            let of = links.values().filter(move |facts| facts.rules.follower == follower);
            of.map(|facts| facts.rules.master).collect()
        };
        let row_of = |id| (id, MemoryRow { masters: masters(id), ..row.clone() });
        let rows = ids.map(|id| row_of(account(id))).collect();
        let mut tables = Tables::default();
        for (id, facts) in links {
            tables.links.insert(*id, facts.rules.follower);
        }
        Db {
            committed: Committed {
                rows,
                nodes: BTreeMap::new(),
                epochs: BTreeMap::new(),
                untaggable: BTreeSet::new(),
                tables,
            },
            replica: None,
            locks: Locks::default(),
            transactions: 0,
            open: BTreeMap::new(),
            clock_off: 0,
            timeline: 1,
            server: 1,
            jumped_at: None,
            failed_over_at: None,
        }
    }

    fn number(&mut self) -> u64 {
        self.transactions += 1;
        self.transactions
    }

    /// What transaction `own` sees locked; the administrator's transaction has number 0.
    fn locks_seen_by(&self, own: u64) -> RowLocks {
        let exclusive = self.locks.exclusive.iter();
        let shared = self.locks.shared.iter();
        RowLocks {
            exclusive: exclusive.filter(|(_, by)| **by != own).map(|(id, _)| *id).collect(),
            shared: shared.filter(|(_, by)| *by != own).map(|(id, _)| *id).collect(),
        }
    }

    fn unlock(&mut self, transaction: u64) {
        self.locks.exclusive.retain(|_, by| *by != transaction);
        self.locks.shared.retain(|(_, by)| *by != transaction);
    }

    pub(crate) fn lock_by_hand(&mut self, id: AccountId) {
        self.locks.exclusive.entry(id).or_insert(0);
    }

    pub(crate) fn unlock_by_hand(&mut self) {
        self.unlock(0);
    }

    /// Every connection is cut, every open transaction is gone.
    pub(crate) fn restart(&mut self) {
        self.server += 1;
        self.open.clear();
        self.locks = Locks::default();
    }

    pub(crate) fn owner(&self, id: AccountId) -> Option<(&str, Token)> {
        let row = self.committed.rows.get(&id)?;
        Some((row.node_id.as_deref()?, row.token))
    }
}

/// How a way to the database is just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    /// Refused at once.
    Refused,
    /// Nothing comes back.
    Silent,
}

impl World {
    pub(crate) fn db_clock(&self) -> Micros {
        Micros(BEGIN + self.now as i64 + self.db.clock_off)
    }

    fn way_to_db(&mut self, node: usize) -> Way {
        let cut = self.active.values().any(|f| {
            matches!(f, Fault::DbCut { node: n } | Fault::LateRoad { node: n, .. } if *n == node)
        });
        if cut {
            return Way::Silent;
        }
        if self.active.values().any(|f| matches!(f, Fault::DbAway)) {
            return if self.rng.chance(0.7) { Way::Refused } else { Way::Silent };
        }
        Way::Open
    }

    fn db_latency(&mut self) -> u64 {
        let slow = self.active.values().find_map(|f| match f {
            Fault::DbSlow { latency } => Some(*latency),
            _ => None,
        });
        let mean = slow.unwrap_or(self.plan.latencies[1]);
        self.rng.latency(mean)
    }

    /// When the server does what reached it; it may stand still.
    fn db_works_at(&self, at: u64) -> u64 {
        let stalls = self.active.iter().filter(|(_, f)| matches!(f, Fault::DbStall));
        let ends = stalls.map(|(place, _)| {
            let scheduled = &self.plan.faults[*place];
            scheduled.at + scheduled.lasts
        });
        ends.max().map_or(at, |end| at.max(end))
    }

    fn loses_ack(&mut self) -> bool {
        let share = self.active.values().find_map(|f| match f {
            Fault::DbLoseAcks { share } => Some(*share),
            _ => None,
        });
        share.is_some_and(|share| self.rng.chance(share))
    }
}

fn connect_error() -> LeaseError {
    let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
    LeaseError::Connect(DatabaseError::Connect(refused.into()))
}

fn query_error(step: &'static str) -> LeaseError {
    LeaseError::Query { step, source: io::Error::from(io::ErrorKind::ConnectionReset).into() }
}

/// Sends one lease cycle; its answer is given to `node::lease_answered`.
pub(crate) fn send_cycle(w: &mut World, who: Who, request: CycleRequest) {
    let number = request.number;
    w.after(QUERY_LIMIT, Some(who), move |w| {
        let limit = Duration::from_micros(QUERY_LIMIT);
        crate::node::lease_answered(w, who, number, Err(LeaseError::Timeout { limit }));
    });
    let connection = w.process(who).db_connection;
    let broken = connection.is_some_and(|(server, _)| server != w.db.server);
    match w.way_to_db(who.node) {
        Way::Silent => return,
        Way::Open if !broken => {}
        Way::Open | Way::Refused => {
            let back = w.db_latency();
            let error = if broken { query_error("begin") } else { connect_error() };
            w.after(back, Some(who), move |w| {
                crate::node::lease_answered(w, who, number, Err(error));
            });
            return;
        }
    }
    let trips = if connection.is_some() { 1 } else { 3 };
    let mut at = w.now;
    for _ in 0..trips {
        at += w.db_latency();
    }
    let at = w.db_works_at(at);
    w.at(at, None, move |w| begin_cycle(w, who, request));
}

fn begin_cycle(w: &mut World, who: Who, request: CycleRequest) {
    let begun_at = w.db_clock();
    let begun_true = w.now;
    let transaction = w.db.number();
    let server = w.db.server;
    let timeline = match w.machines[who.node].process.as_ref().map(|p| p.db_connection) {
        Some(Some((connected, timeline))) if connected == server => timeline,
        _ => w.db.timeline,
    };
    if w.is_alive(who) {
        w.refresh_clock(who);
        let process = w.process(who);
        process.db_connection = Some((server, timeline));
        process.note_begun();
    }
    let open = LeaseTransaction { who, request, changed: BTreeMap::new(), node: None, reply: None };
    w.db.open.insert(transaction, open);
    w.after(IDLE_LIMIT, None, move |w| roll_back(w, transaction));
    // Statements come one after the other; a slow server or a slow line lies between.
    let work = w.rng.latency(2 * MS) + if w.rng.chance(0.02) { w.db_latency() } else { 0 };
    let at = w.db_works_at(w.now + work);
    w.at(at, None, move |w| run_cycle(w, transaction, begun_at, begun_true, timeline));
}

fn roll_back(w: &mut World, transaction: u64) {
    if w.db.open.remove(&transaction).is_some() {
        w.db.unlock(transaction);
    }
}

fn run_cycle(w: &mut World, transaction: u64, begun_at: Micros, begun_true: u64, timeline: u32) {
    let locks = w.db.locks_seen_by(transaction);
    let written_at = w.db_clock();
    let Some(open) = w.db.open.get_mut(&transaction) else { return };
    let mut rows = w.db.committed.rows.clone();
    let times = StatementTimes { begun_at, written_at, timeline };
    let seen = open.request.timeline_min.filter(|seen| timeline < *seen);
    if let Some(seen) = seen {
        let (who, number) = (open.who, open.request.number);
        roll_back(w, transaction);
        w.reach("server_of_an_older_timeline_refused");
        let back = w.db_latency();
        w.after(back, Some(who), move |w| {
            let error = LeaseError::OldTimeline { timeline, seen };
            crate::node::lease_answered(w, who, number, Err(error));
        });
        return;
    }
    let mut nodes = w.db.committed.nodes.clone();
    let reply = run_statements(&mut rows, &mut nodes, &locks, &open.request, times);
    let name = open.request.node.as_str().to_owned();
    open.node = nodes.remove(&name).map(|node| (name, node));
    rows.retain(|id, row| w.db.committed.rows.get(id) != Some(row));
    let ids: Vec<AccountId> = rows.keys().copied().collect();
    open.changed = rows;
    open.reply = Some(reply);
    let (who, number) = (open.who, open.request.number);
    for id in ids {
        w.db.locks.exclusive.entry(id).or_insert(transaction);
    }
    // The summary is a statement of its own, after all others.
    let age = Duration::from_micros(w.now - begun_true);
    let back = w.db_latency();
    w.after(back, Some(who), move |w| {
        if age > TRANSACTION_AGE_MAX {
            w.reach("renewal_refused_for_transaction_age");
            crate::node::lease_answered(w, who, number, Err(LeaseError::TransactionTooOld { age }));
            w.after(1, None, move |w| roll_back(w, transaction));
            return;
        }
        if !crate::node::lease_waits(w, who, number) {
            // The client has given up: its socket is closed, the server rolls back.
            w.after(1, None, move |w| roll_back(w, transaction));
            return;
        }
        if w.caught(who, crate::plan::Point::BeforeCommit) {
            w.after(0, Some(who), move |w| send_commit(w, who, number, transaction));
        } else {
            send_commit(w, who, number, transaction);
        }
    });
}

fn send_commit(w: &mut World, who: Who, number: lockstep::lease::CycleNumber, transaction: u64) {
    if !crate::node::lease_waits(w, who, number) {
        w.after(1, None, move |w| roll_back(w, transaction));
        return;
    }
    if w.way_to_db(who.node) != Way::Open {
        return;
    }
    let at = w.now + w.db_latency();
    let at = w.db_works_at(at);
    w.at(at, None, move |w| commit_cycle(w, transaction));
}

fn commit_cycle(w: &mut World, transaction: u64) {
    let Some(open) = w.db.open.remove(&transaction) else { return };
    w.db.unlock(transaction);
    let (who, number) = (open.who, open.request.number);
    w.db.committed.nodes.extend(open.node);
    for (id, row) in open.changed {
        let before = w.db.committed.rows[&id].clone();
        let row = MemoryRow { enabled: before.enabled, ..row };
        crate::oracle::ownership_committed(w, id, &before, &row, who);
        w.db.committed.rows.insert(id, row.clone());
        if row.node_id.is_none() && before.node_id.is_some() {
            announce(w, who);
        }
    }
    crate::oracle::capacity(w, who);
    if w.loses_ack() {
        w.note(|| format!("node {}'s commit is not answered", who.node));
        w.reach("commit_not_answered");
        return;
    }
    let reply = open.reply.expect("the statements ran before the commit");
    let back = w.db_latency();
    w.after(back, Some(who), move |w| {
        crate::node::lease_answered(w, who, number, Ok(reply));
    });
}

/// `NOTIFY`: everybody who listens, and whom it reaches.
fn announce(w: &mut World, from: Who) {
    for node in 0..w.machines.len() {
        let Some(who) = w.who(node).filter(|who| *who != from) else { continue };
        if w.way_to_db(node) == Way::Open {
            let wait = w.db_latency();
            w.after(wait, Some(who), move |w| crate::node::notified(w, who));
        }
    }
}

/// What a session reads before it begins, or nothing.
pub(crate) fn load(
    w: &mut World,
    who: Who,
    follower: AccountId,
    then: impl FnOnce(&mut World, Option<(LoadedPairs, Option<Epoch>)>) + 'static,
) {
    let read = move |w: &mut World| {
        let loaded = w.db.committed.tables.load_pairs(follower);
        (loaded, w.db.committed.epochs.get(&follower).copied())
    };
    ask(w, who, read, then);
}

/// One statement there and its answer back; nothing where the database is not reached.
fn ask<T: 'static>(
    w: &mut World,
    who: Who,
    statement: impl FnOnce(&mut World) -> T + 'static,
    then: impl FnOnce(&mut World, Option<T>) + 'static,
) {
    if w.way_to_db(who.node) != Way::Open {
        let wait = w.rng.range(10 * MS, 5 * SECOND);
        w.after(wait, Some(who), move |w| then(w, None));
        return;
    }
    let at = w.now + w.db_latency();
    let at = w.db_works_at(at);
    w.at(at, None, move |w| {
        let answer = statement(w);
        let back = w.db_latency();
        w.after(back, Some(who), move |w| then(w, Some(answer)));
    });
}

/// Stores an epoch under a lease token: true if it is stored, false if the lease is another's,
/// nothing if there is no answer.
pub(crate) fn store_epoch(
    w: &mut World,
    who: Who,
    id: AccountId,
    token: Token,
    epoch: Epoch,
    then: impl FnOnce(&mut World, Option<bool>) + 'static,
) {
    let store = move |w: &mut World| {
        let stored = w.db.owner(id).is_some_and(|(_, held)| held == token);
        if stored {
            let kept = w.db.committed.epochs.entry(id).or_insert(epoch);
            *kept = (*kept).max(epoch);
        }
        stored
    };
    ask(w, who, store, then);
}

/// Remembers under the lease token that a link's broker keeps no tags.
pub(crate) fn store_untaggable(w: &mut World, who: Who, id: AccountId, token: Token, link: LinkId) {
    if w.way_to_db(who.node) != Way::Open {
        return;
    }
    let at = w.now + w.db_latency();
    let at = w.db_works_at(at);
    w.at(at, None, move |w| {
        if w.db.owner(id).is_some_and(|(_, held)| held == token) {
            w.db.committed.untaggable.insert(link);
        }
    });
}

/// Sends one batch of rows; its answer is given to `writer::answered`.
pub(crate) fn send_batch(w: &mut World, who: Who, node_id: NodeId, batch: Batch) {
    let sent = w.process(who).writer.statement;
    let limit = Duration::from_micros(WRITE_LIMIT);
    w.after(WRITE_LIMIT, Some(who), move |w| {
        crate::writer::answered(w, who, sent, Err(WriteError::TimedOut { limit }));
    });
    match w.way_to_db(who.node) {
        Way::Silent => return,
        Way::Refused => {
            let error = WriteError::Unreachable { message: "connection refused".into() };
            w.after(MS, Some(who), move |w| crate::writer::answered(w, who, sent, Err(error)));
            return;
        }
        Way::Open => {}
    }
    let at = w.now + w.db_latency();
    let at = w.db_works_at(at);
    w.at(at, None, move |w| fence_batch(w, who, sent, node_id, batch));
}

/// The statement begins: the fence is judged, and the account rows are held until the commit.
fn fence_batch(w: &mut World, who: Who, sent: u64, node_id: NodeId, batch: Batch) {
    let transaction = w.db.number();
    let accounts: BTreeSet<AccountId> = batch.rows().map(lockstep::writer::Row::account).collect();
    let locked = w.db.locks_seen_by(transaction).exclusive;
    let mut owners = BTreeMap::new();
    for id in &accounts {
        let Some((owner, token)) = w.db.owner(*id) else { continue };
        let Ok(owner) = NodeId::new(owner) else { continue };
        if batch.kind() != RowKind::Event && live_write_locks_the_account_row() {
            w.db.locks.shared.insert((*id, transaction));
        }
        owners.insert(*id, (owner, token));
    }
    let work = w.rng.latency(MS) + if w.rng.chance(0.1) { w.db_latency() } else { 0 };
    let at = w.db_works_at(w.now + work);
    w.at(at, None, move |w| {
        commit_batch(w, who, sent, &node_id, batch, owners, locked, transaction)
    });
}

#[allow(
    clippy::too_many_arguments,
    reason = "what one statement carries from its begin to its commit"
)]
fn commit_batch(
    w: &mut World,
    who: Who,
    sent: u64,
    node_id: &NodeId,
    batch: Batch,
    owners: BTreeMap<AccountId, (NodeId, Token)>,
    locked: BTreeSet<AccountId>,
    transaction: u64,
) {
    w.db.unlock(transaction);
    let bad = w.active.values().find_map(|f| match f {
        Fault::BadRows { share } => Some(*share),
        _ => None,
    });
    let result =
        if bad.is_some_and(|share| w.rng.chance(share)) && batch.kind() != RowKind::PairEnded {
            refuse(w)
        } else {
            let before = crate::oracle::stored_before(w, &batch);
            let tables = &mut w.db.committed.tables;
            tables.owners = owners;
            tables.locked = locked;
            let result = tables.persist(node_id, &batch);
            if let Ok(outcomes) = &result {
                crate::oracle::rows_committed(w, &batch, outcomes, &before);
            }
            result
        };
    if w.loses_ack() {
        w.reach("rows_committed_not_answered");
        return;
    }
    let back = w.db_latency();
    w.after(back, Some(who), move |w| crate::writer::answered(w, who, sent, result));
}

/// A refusal that may pass: a deadlock, a server that shuts down, or a lock.
fn refuse(w: &mut World) -> Result<Vec<RowOutcome>, WriteError> {
    let sqlstate = *w.rng.pick(&["40P01", "57P01", "55P03", "40001"]);
    Err(WriteError::Refused {
        sqlstate: sqlstate.to_owned(),
        constraint: None,
        message: "by the world".to_owned(),
    })
}
