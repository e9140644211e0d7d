//! Ownership without a server, for tests and simulation.
//!
//! Decides: the same as the SQL of `store.rs`, row by row, on a table in memory.
//! In: [`CycleRequest`], a clock that stands for the database's. Out: [`CycleReply`].
//!
//! Invariants: those of `store.rs`; both pass the suite in `tests.rs`.
//!
//! A [`Stage`] hook runs where a real cycle can be held up, so that a test can let time pass
//! there. Not covered: two cycles side by side; they run one after the other.

use super::LET_GO;
use super::cycle::{
    AVOIDED_FREE_MAX, ClaimRequest, ClaimedRow, CycleReply, CycleRequest, DatabaseMark, OwnedRow,
    TenureKey,
};
use super::share::{Fleet, claim_wait, good_after};
use super::store::{LeaseError, OwnershipStore, TRANSACTION_AGE_MAX};
use crate::clock::Clock;
use crate::database::DatabaseError;
use parking_lot::Mutex;
use schemas::{AccountId, Micros, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Before which part of a cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// The connection is made, or checked out.
    Connect,
    /// The transaction begins.
    Begin,
    /// Rows are written.
    Write,
    /// The transaction commits.
    Commit,
    /// The answer travels back.
    Answer,
}

/// One account row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRow {
    /// Platform word.
    pub platform: String,
    /// Whether it may be claimed.
    pub enabled: bool,
    /// Owner.
    pub node_id: Option<String>,
    /// End of the lease; absent for "long ago".
    pub lease_until: Option<Micros>,
    /// Fencing token.
    pub token: Token,
    /// When the present tenure began.
    pub tenure_since: Option<Micros>,
    /// Tenures begun since the last one that went well.
    pub starts: u32,
    /// Since when nobody owns it, where nobody does.
    pub free_since: Micros,
    /// The masters that it copies.
    pub masters: BTreeSet<AccountId>,
}

/// What a node said of itself in its last cycle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryNode {
    platforms: Vec<String>,
    capacity: u32,
    owned: u32,
    alive_until: Micros,
}

/// The table that all nodes of a test share. Clones share one content.
#[derive(Clone)]
pub struct MemoryTable {
    inner: Arc<Mutex<Inner>>,
    /// Held from the first read of a cycle to its commit.
    transactions: Arc<Mutex<()>>,
    clock: Arc<dyn Clock>,
}

#[derive(Default)]
struct Inner {
    rows: BTreeMap<AccountId, MemoryRow>,
    nodes: BTreeMap<String, MemoryNode>,
    timeline: u32,
    locked: BTreeSet<AccountId>,
    unreachable: bool,
}

impl fmt::Debug for MemoryTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTable").field("rows", &self.inner.lock().rows.len()).finish()
    }
}

impl MemoryTable {
    /// An empty table; `clock` is the database's.
    pub fn new(clock: impl Clock) -> Self {
        Self { inner: Arc::default(), transactions: Arc::default(), clock: Arc::new(clock) }
    }

    /// Adds an account, or switches it on or off.
    pub fn set_account(&self, account: AccountId, platform: &str, enabled: bool) {
        let now = self.now();
        let mut inner = self.inner.lock();
        let row = inner.rows.entry(account).or_insert_with(|| MemoryRow {
            platform: platform.to_owned(),
            enabled,
            node_id: None,
            lease_until: None,
            token: Token::MIN,
            tenure_since: None,
            starts: 0,
            free_since: now,
            masters: BTreeSet::new(),
        });
        if enabled && !row.enabled && row.node_id.is_none() {
            row.free_since = now;
        }
        row.enabled = enabled;
    }

    /// Lets an account copy a master.
    pub fn set_master(&self, follower: AccountId, master: AccountId) {
        if let Some(row) = self.inner.lock().rows.get_mut(&follower) {
            row.masters.insert(master);
        }
    }

    /// The present content of a row.
    pub fn row(&self, account: AccountId) -> Option<MemoryRow> {
        self.inner.lock().rows.get(&account).cloned()
    }

    /// Lets the lease of a row end now.
    pub fn expire(&self, account: AccountId) {
        if let Some(row) = self.inner.lock().rows.get_mut(&account) {
            row.lease_until = None;
        }
    }

    /// Lets a row have had no owner since this time.
    pub fn set_free_since(&self, account: AccountId, since: Micros) {
        if let Some(row) = self.inner.lock().rows.get_mut(&account) {
            row.free_since = since;
        }
    }

    /// Lets the lease of a row end at this time.
    pub fn set_lease_until(&self, account: AccountId, until: Micros) {
        if let Some(row) = self.inner.lock().rows.get_mut(&account) {
            row.lease_until = Some(until);
        }
    }

    /// Lets a row have been begun so often, its present tenure at this time.
    pub fn set_starts(&self, account: AccountId, starts: u32, tenure_since: Micros) {
        if let Some(row) = self.inner.lock().rows.get_mut(&account) {
            row.starts = starts;
            row.tenure_since = Some(tenure_since);
        }
    }

    /// Locks a row, as an administrator's open transaction would, or frees it.
    pub fn set_locked(&self, account: AccountId, locked: bool) {
        let mut inner = self.inner.lock();
        if locked {
            inner.locked.insert(account);
        } else {
            inner.locked.remove(&account);
        }
    }

    /// From now on the server answers under this timeline; 0, where it starts, stands for 1.
    pub fn set_timeline(&self, timeline: u32) {
        self.inner.lock().timeline = timeline;
    }

    /// Whether nodes get through.
    pub fn set_reachable(&self, reachable: bool) {
        self.inner.lock().unreachable = !reachable;
    }

    fn now(&self) -> Micros {
        Micros(i64::try_from(self.clock.read().wall.as_micros()).unwrap_or(i64::MAX))
    }
}

type Hook = Box<dyn FnMut(Stage) + Send>;

/// One node's access to a [`MemoryTable`].
pub struct MemoryOwnership {
    table: MemoryTable,
    query_limit: Duration,
    hook: Hook,
}

impl fmt::Debug for MemoryOwnership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryOwnership").field("table", &self.table).finish()
    }
}

impl MemoryOwnership {
    /// A node's access; `query_limit` bounds a cycle by the table's clock.
    pub fn new(table: MemoryTable, query_limit: Duration) -> Self {
        Self { table, query_limit, hook: Box::new(|_| {}) }
    }

    /// Runs `hook` before each part of every cycle.
    pub fn with_hook(mut self, hook: impl FnMut(Stage) + Send + 'static) -> Self {
        self.hook = Box::new(hook);
        self
    }

    fn run(&mut self, request: &CycleRequest) -> Result<CycleReply, LeaseError> {
        let asked_at = self.table.now();
        (self.hook)(Stage::Connect);
        if self.table.inner.lock().unreachable {
            let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
            return Err(LeaseError::Connect(DatabaseError::Connect(refused.into())));
        }
        (self.hook)(Stage::Begin);
        let begun_at = self.table.now();
        (self.hook)(Stage::Write);
        let transactions = Arc::clone(&self.table.transactions);
        let _one_at_a_time = transactions.lock();
        let (before, mut nodes, locked, timeline) = {
            let inner = self.table.inner.lock();
            let timeline = inner.timeline.max(1);
            (inner.rows.clone(), inner.nodes.clone(), inner.locked.clone(), timeline)
        };
        if let Some(seen) = request.timeline_min.filter(|seen| timeline < *seen) {
            return Err(LeaseError::OldTimeline { timeline, seen });
        }
        let mut rows = before.clone();
        let locks = RowLocks { exclusive: locked, shared: BTreeSet::new() };
        let times = StatementTimes { begun_at, written_at: self.table.now(), timeline };
        let reply = run_statements(&mut rows, &mut nodes, &locks, request, times);
        let age = self.table.now().since(begun_at);
        if age > TRANSACTION_AGE_MAX {
            return Err(LeaseError::TransactionTooOld { age });
        }
        (self.hook)(Stage::Commit);
        let mut inner = self.table.inner.lock();
        inner.nodes = nodes;
        for (account, row) in rows.iter().filter(|(account, row)| before.get(account) != Some(row))
        {
            if let Some(present) = inner.rows.get_mut(account) {
                // Whether it is enabled may have been changed meanwhile, by whoever that is for.
                *present = MemoryRow { enabled: present.enabled, ..row.clone() };
            }
        }
        drop(inner);
        (self.hook)(Stage::Answer);
        if self.table.now().since(asked_at) > self.query_limit {
            return Err(LeaseError::Timeout { limit: self.query_limit });
        }
        Ok(reply)
    }
}

impl OwnershipStore for MemoryOwnership {
    async fn cycle(&mut self, request: &CycleRequest) -> Result<CycleReply, LeaseError> {
        self.run(request)
    }
}

/// Rows that other transactions hold locked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowLocks {
    /// For an update: nobody else touches the row.
    pub exclusive: BTreeSet<AccountId>,
    /// For a fenced write (`FOR KEY SHARE`): a renewal passes, a claim or a release does not.
    pub shared: BTreeSet<AccountId>,
}

/// The database's clock and history, as one transaction sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatementTimes {
    /// `now()`: when the transaction began.
    pub begun_at: Micros,
    /// `clock_timestamp()`: when the rows are written.
    pub written_at: Micros,
    /// Timeline of the server.
    pub timeline: u32,
}

/// The statements of one cycle on a table of rows, up to the commit.
///
/// Shape: the rows as they are committed, what the nodes said of themselves, what others hold
/// locked, and the request in; both as they will be, and the reply out.
pub fn run_statements(
    rows: &mut BTreeMap<AccountId, MemoryRow>,
    nodes: &mut BTreeMap<String, MemoryNode>,
    locks: &RowLocks,
    request: &CycleRequest,
    times: StatementTimes,
) -> CycleReply {
    let StatementTimes { begun_at, written_at, timeline } = times;
    Transaction { rows, nodes, locks, request, begun_at, written_at, timeline }.run()
}

struct Transaction<'a> {
    rows: &'a mut BTreeMap<AccountId, MemoryRow>,
    nodes: &'a mut BTreeMap<String, MemoryNode>,
    locks: &'a RowLocks,
    request: &'a CycleRequest,
    begun_at: Micros,
    written_at: Micros,
    timeline: u32,
}

/// Platform and owner, and the end of the lease of the row that stands for all of this owner's.
type Probes<'a> = BTreeMap<(&'a str, &'a str), Option<Micros>>;

impl Transaction<'_> {
    fn run(&mut self) -> CycleReply {
        let released = self.release();
        let renewed = self.renew();
        self.let_go();
        let claimed = self.claim();
        let mine = |row: &MemoryRow| row.node_id.as_deref() == Some(self.request.node.as_str());
        let served = |row: &MemoryRow| self.request.platforms.contains(&row.platform);
        let owned: Vec<OwnedRow> = self
            .rows
            .iter()
            .filter(|(_, row)| mine(row) && served(row))
            .map(|(account, row)| OwnedRow {
                tenure: TenureKey { account: *account, token: row.token },
                platform: row.platform.clone(),
                enabled: row.enabled,
            })
            .collect();
        let probes = self.probes();
        let next_expiry = probes
            .iter()
            .filter(|((platform, owner), _)| {
                *owner != self.request.node.as_str()
                    && self.request.platforms.iter().any(|word| word == platform)
            })
            .filter_map(|(_, until)| until.filter(|until| *until >= self.begun_at))
            .min()
            .map(|until| until.since(self.begun_at));
        let enabled = || self.rows.values().filter(|row| served(row) && row.enabled);
        let unowned: Vec<Micros> =
            enabled().filter(|row| row.node_id.is_none()).map(|row| row.free_since).collect();
        let orphaned: Vec<Micros> = enabled()
            .filter(|row| !mine(row) && self.is_seen_to_run_out(row, &probes))
            .map(|row| row.lease_until.unwrap_or(Micros(0)))
            .collect();
        let since = unowned.iter().chain(&orphaned).min().copied();
        let count = |rows: &[Micros]| u32::try_from(rows.len()).unwrap_or(u32::MAX);
        let (unowned, orphaned) = (count(&unowned), count(&orphaned));
        let owned_count = u32::try_from(owned.len()).unwrap_or(u32::MAX);
        let fleet = self.announce(owned_count, unowned.saturating_add(orphaned));
        CycleReply {
            released,
            renewed,
            claimed,
            owned,
            next_expiry,
            unowned,
            orphaned,
            unowned_for: since.map(|since| self.written_at.since(since)),
            fleet,
            database: DatabaseMark { now: self.begun_at, timeline: Some(self.timeline) },
        }
    }

    fn until(&self) -> Micros {
        self.written_at.plus(self.request.lease)
    }

    fn has_run_out(&self, row: &MemoryRow) -> bool {
        row.lease_until.is_none_or(|until| until < self.begun_at)
    }

    /// Says that this node is alive, and looks who else is.
    fn announce(&mut self, owned: u32, unowned: u32) -> Fleet {
        let request = self.request;
        let node = MemoryNode {
            platforms: request.platforms.clone(),
            capacity: request.capacity,
            owned,
            alive_until: self.until(),
        };
        self.nodes.insert(request.node.as_str().to_owned(), node);
        let alive = || {
            self.nodes.iter().filter(|(_, node)| {
                node.capacity > 0
                    && node.alive_until >= self.begun_at
                    && node.platforms.iter().any(|word| request.platforms.contains(word))
            })
        };
        let others = alive().filter(|(name, _)| name.as_str() != request.node.as_str());
        let with_room = others.filter(|(_, node)| node.owned < node.capacity);
        Fleet {
            nodes: u32::try_from(alive().count()).unwrap_or(u32::MAX),
            accounts: alive().map(|(_, node)| node.owned).sum::<u32>() + unowned,
            lowest_peer: with_room.map(|(_, node)| node.owned).min(),
        }
    }

    fn mine(&mut self, key: &TenureKey) -> Option<&mut MemoryRow> {
        if self.locks.exclusive.contains(&key.account) {
            return None;
        }
        let node = self.request.node.as_str();
        self.rows
            .get_mut(&key.account)
            .filter(|row| row.node_id.as_deref() == Some(node) && row.token == key.token)
    }

    fn release(&mut self) -> Vec<AccountId> {
        let (mut released, now) = (Vec::new(), self.written_at);
        for key in &self.request.release {
            if self.locks.shared.contains(&key.account) {
                continue;
            }
            if let Some(row) = self.mine(key) {
                row.node_id = None;
                row.lease_until = None;
                row.starts = row.starts.saturating_sub(1);
                row.free_since = now;
                released.push(key.account);
            }
        }
        released
    }

    fn renew(&mut self) -> Vec<AccountId> {
        let (until, now) = (self.until(), self.written_at);
        let good = good_after(self.request.lease);
        let mut renewed = Vec::new();
        for key in &self.request.renew {
            if let Some(row) = self.mine(key) {
                row.lease_until = Some(until);
                if row.tenure_since.is_none_or(|since| now.since(since) > good) {
                    row.starts = 0;
                }
                renewed.push(key.account);
            }
        }
        renewed
    }

    fn let_go(&mut self) {
        let run_out: Vec<&TenureKey> = self
            .request
            .let_go
            .iter()
            .filter(|key| !self.locks.shared.contains(&key.account))
            .filter(|key| self.rows.get(&key.account).is_some_and(|row| self.has_run_out(row)))
            .collect();
        for key in run_out {
            if let Some(owner) = self.mine(key).and_then(|row| row.node_id.as_mut()) {
                owner.push_str(LET_GO);
            }
        }
    }

    /// The end of the lease of one row of each owner, which stands for all of them.
    fn probes(&self) -> Probes<'_> {
        let mut probes = BTreeMap::new();
        for row in self.rows.values() {
            if let Some(owner) = &row.node_id {
                probes.entry((row.platform.as_str(), owner.as_str())).or_insert(row.lease_until);
            }
        }
        probes
    }

    /// The owner's one row that is looked at has run out, and so has this one.
    fn is_seen_to_run_out(&self, row: &MemoryRow, probes: &Probes<'_>) -> bool {
        let Some(owner) = &row.node_id else { return false };
        let probe = probes.get(&(row.platform.as_str(), owner.as_str())).copied().flatten();
        probe.is_none_or(|until| until < self.begun_at) && self.has_run_out(row)
    }

    fn claim(&mut self) -> Vec<ClaimedRow> {
        let Some(claim) = &self.request.claim else { return Vec::new() };
        let timeline = Some(self.timeline);
        if claim.database.is_some_and(|bounds| !bounds.is_same_history(timeline)) {
            return Vec::new();
        }
        let node = self.request.node.as_str();
        let owned = self.rows.values().filter(|row| row.node_id.as_deref() == Some(node)).count();
        let room = (claim.capacity as usize).saturating_sub(owned).min(claim.rows_max as usize);
        let free = self.claimable(claim, |_, row| row.node_id.is_none());
        let believed = claim.database.is_none_or(|bounds| bounds.hold(self.begun_at, timeline));
        let is_dead = |owner: &str| claim.proven_dead.iter().any(|dead| dead.as_str() == owner);
        let probes = self.probes();
        let expired = self.claimable(claim, |account, row| {
            let Some(owner) = row.node_id.as_deref().filter(|owner| *owner != node) else {
                return false;
            };
            let wait = claim_wait(row.starts, *account, self.request.lease);
            let has_run_out = self.is_seen_to_run_out(row, &probes)
                && row.lease_until.is_none_or(|until| until.plus(wait) < self.begun_at);
            (is_dead(owner) && row.starts <= 1) || (claim.expired && believed && has_run_out)
        });
        let near_first = |rows: Vec<AccountId>| self.near_first(rows, 4 * room);
        let picked = near_first(free).into_iter().chain(near_first(expired));
        let picked: Vec<AccountId> =
            picked.filter(|account| !self.is_locked(account)).take(room).collect();
        let (until, now) = (self.until(), self.written_at);
        let mut claimed = Vec::new();
        for account in picked {
            let Some(row) = self.rows.get_mut(&account) else { continue };
            let token = Token::new(row.token.get() + 1).expect("a token does not reach 2^63");
            let previous_owner = row.node_id.replace(node.to_owned());
            row.token = token;
            row.lease_until = Some(until);
            row.tenure_since = Some(now);
            row.starts = row.starts.saturating_add(1);
            claimed.push(ClaimedRow { tenure: TenureKey { account, token }, previous_owner });
        }
        claimed
    }

    /// Of the first ones that are seen, followers of masters that this node leads come first.
    fn near_first(&self, rows: Vec<AccountId>, seen_max: usize) -> Vec<AccountId> {
        let node = Some(self.request.node.as_str());
        let leads =
            |master| self.rows.get(master).is_some_and(|row| row.node_id.as_deref() == node);
        let is_near = |account: &AccountId| {
            self.rows.get(account).is_some_and(|row| row.masters.iter().any(leads))
        };
        let near: BTreeSet<AccountId> =
            rows.iter().take(seen_max).copied().filter(|account| is_near(account)).collect();
        let rest = rows.into_iter().filter(|account| !near.contains(account));
        near.iter().copied().chain(rest).collect()
    }

    fn is_left_by_all(&self, row: &MemoryRow) -> bool {
        row.node_id.is_none() && self.begun_at.since(row.free_since) > AVOIDED_FREE_MAX
    }

    fn is_locked(&self, account: &AccountId) -> bool {
        self.locks.exclusive.contains(account) || self.locks.shared.contains(account)
    }

    fn claimable(
        &self,
        claim: &ClaimRequest,
        fits: impl Fn(&AccountId, &MemoryRow) -> bool,
    ) -> Vec<AccountId> {
        let open = |account: &AccountId, row: &MemoryRow| {
            row.enabled
                && self.request.platforms.contains(&row.platform)
                && (!claim.avoid.contains(account) || self.is_left_by_all(row))
        };
        let rows =
            self.rows.iter().filter(|(account, row)| open(account, row) && fits(account, row));
        rows.map(|(account, _)| *account).collect()
    }
}
