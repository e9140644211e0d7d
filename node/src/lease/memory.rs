//! Ownership without a server, for tests and simulation.
//!
//! Decides: the same as the SQL of `store.rs`, row by row, on a table in memory.
//! In: [`CycleRequest`], a clock that stands for the database's. Out: [`CycleReply`].
//!
//! Invariants: those of `store.rs`; both pass the suite in `tests.rs`.
//!
//! A [`Stage`] hook runs where a real cycle can be held up, so that a test can let time pass
//! there. Not covered: two cycles side by side; they run one after the other.

use super::cycle::{
    ClaimRequest, ClaimedRow, CycleReply, CycleRequest, DatabaseMark, OwnedRow, TenureKey,
};
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
        let mut inner = self.inner.lock();
        let row = inner.rows.entry(account).or_insert_with(|| MemoryRow {
            platform: platform.to_owned(),
            enabled,
            node_id: None,
            lease_until: None,
            token: Token::MIN,
        });
        row.enabled = enabled;
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

    /// Locks a row, as an administrator's open transaction would, or frees it.
    pub fn set_locked(&self, account: AccountId, locked: bool) {
        let mut inner = self.inner.lock();
        if locked {
            inner.locked.insert(account);
        } else {
            inner.locked.remove(&account);
        }
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
        let (before, locked) = {
            let inner = self.table.inner.lock();
            (inner.rows.clone(), inner.locked.clone())
        };
        let mut rows = before.clone();
        let mut work = Transaction {
            rows: &mut rows,
            locked: &locked,
            request,
            begun_at,
            until: self.table.now().plus(request.lease),
        };
        let reply = work.run();
        let age = self.table.now().since(begun_at);
        if age > TRANSACTION_AGE_MAX {
            return Err(LeaseError::TransactionTooOld { age });
        }
        (self.hook)(Stage::Commit);
        let mut inner = self.table.inner.lock();
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

struct Transaction<'a> {
    rows: &'a mut BTreeMap<AccountId, MemoryRow>,
    locked: &'a BTreeSet<AccountId>,
    request: &'a CycleRequest,
    begun_at: Micros,
    until: Micros,
}

impl Transaction<'_> {
    fn run(&mut self) -> CycleReply {
        let released = self.release();
        let renewed = self.renew();
        let claimed = self.claim();
        let mine = |row: &MemoryRow| row.node_id.as_deref() == Some(self.request.node.as_str());
        let served = |row: &MemoryRow| self.request.platforms.contains(&row.platform);
        let owned = self
            .rows
            .iter()
            .filter(|(_, row)| mine(row) && served(row))
            .map(|(account, row)| OwnedRow {
                tenure: TenureKey { account: *account, token: row.token },
                platform: row.platform.clone(),
                enabled: row.enabled,
            })
            .collect();
        let next_expiry = self
            .rows
            .values()
            .filter(|row| served(row) && row.node_id.is_some() && !mine(row))
            .filter_map(|row| row.lease_until.filter(|until| *until >= self.begun_at))
            .min()
            .map(|until| until.since(self.begun_at));
        let unowned =
            self.rows.values().filter(|row| served(row) && row.enabled && row.node_id.is_none());
        CycleReply {
            released,
            renewed,
            claimed,
            owned,
            next_expiry,
            unowned: u32::try_from(unowned.count()).unwrap_or(u32::MAX),
            database: DatabaseMark { now: self.begun_at, timeline: Some(1) },
        }
    }

    fn mine(&mut self, key: &TenureKey) -> Option<&mut MemoryRow> {
        if self.locked.contains(&key.account) {
            return None;
        }
        let node = self.request.node.as_str();
        self.rows
            .get_mut(&key.account)
            .filter(|row| row.node_id.as_deref() == Some(node) && row.token == key.token)
    }

    fn release(&mut self) -> Vec<AccountId> {
        let mut released = Vec::new();
        for key in &self.request.release {
            if let Some(row) = self.mine(key) {
                row.node_id = None;
                row.lease_until = None;
                released.push(key.account);
            }
        }
        released
    }

    fn renew(&mut self) -> Vec<AccountId> {
        let until = self.until;
        let mut renewed = Vec::new();
        for key in &self.request.renew {
            if let Some(row) = self.mine(key) {
                row.lease_until = Some(until);
                renewed.push(key.account);
            }
        }
        renewed
    }

    fn claim(&mut self) -> Vec<ClaimedRow> {
        let Some(claim) = &self.request.claim else { return Vec::new() };
        let node = self.request.node.as_str();
        let owned = self.rows.values().filter(|row| row.node_id.as_deref() == Some(node)).count();
        let room = (claim.capacity as usize).saturating_sub(owned).min(claim.rows_max as usize);
        let free = self.claimable(claim, |row| row.node_id.is_none());
        let expired = self.claimable(claim, |row| {
            claim.expired
                && row.node_id.as_deref().is_some_and(|owner| owner != node)
                && row.lease_until.is_none_or(|until| until < self.begun_at)
        });
        let picked: Vec<AccountId> = free.into_iter().chain(expired).take(room).collect();
        let mut claimed = Vec::new();
        for account in picked {
            let Some(row) = self.rows.get_mut(&account) else { continue };
            let token = Token::new(row.token.get() + 1).expect("a token does not reach 2^63");
            let previous_owner = row.node_id.replace(node.to_owned());
            row.token = token;
            row.lease_until = Some(self.until);
            claimed.push(ClaimedRow { tenure: TenureKey { account, token }, previous_owner });
        }
        claimed
    }

    fn claimable(&self, claim: &ClaimRequest, fits: impl Fn(&MemoryRow) -> bool) -> Vec<AccountId> {
        let open = |account: &AccountId, row: &MemoryRow| {
            row.enabled
                && self.request.platforms.contains(&row.platform)
                && !claim.avoid.contains(account)
                && !self.locked.contains(account)
        };
        let rows = self.rows.iter().filter(|(account, row)| open(account, row) && fits(row));
        rows.map(|(account, _)| *account).collect()
    }
}
