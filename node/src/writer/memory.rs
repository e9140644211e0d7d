//! The writer's tables in memory, with the rules of the SQL and none of its waiting.
//!
//! For the simulation and for tests of parts that push rows. It passes the same suite as the
//! Postgres version. One [`MemoryDatabase`] is shared by the [`MemoryRows`] of several nodes.

use super::batch::Batch;
use super::error::WriteError;
use super::rows::{AccountStatus, CopyEvent, PairRow, RowKind};
use super::{LoadedPairs, RowOutcome, RowSink};
use parking_lot::Mutex;
use reconcile::{Pair, PairId};
use schemas::planted::{self, Bug};
use schemas::{AccountId, LinkId, NodeId, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Whether a live write locks the account's row until it commits, so that a claim passes it over
/// (invariant 1 of `store`). A database that knows transactions asks this.
pub fn live_write_locks_the_account_row() -> bool {
    !planted::is(Bug::P6)
}

/// Ownership and rows, as several nodes see them.
#[derive(Debug, Clone, Default)]
pub struct MemoryDatabase {
    tables: Arc<Mutex<Tables>>,
}

/// The rules of the tables, without anybody who shares them.
#[derive(Debug, Clone, Default)]
pub struct Tables {
    /// Owner and token of each account row.
    pub owners: BTreeMap<AccountId, (NodeId, Token)>,
    /// Account rows that somebody holds for an update.
    pub locked: BTreeSet<AccountId>,
    /// The follower of each link.
    pub links: BTreeMap<LinkId, AccountId>,
    /// Stored pairs.
    pub pairs: BTreeMap<PairId, PairRow>,
    /// Stored status rows.
    pub statuses: BTreeMap<AccountId, AccountStatus>,
    events: BTreeMap<uuid::Uuid, CopyEvent>,
    is_away: bool,
    timeline: u32,
}

impl MemoryDatabase {
    /// Makes a node the owner of an account.
    pub fn set_owner(&self, account: AccountId, node: NodeId, token: Token) {
        self.tables.lock().owners.insert(account, (node, token));
    }

    /// Makes a link known.
    pub fn add_link(&self, link: LinkId, follower: AccountId) {
        self.tables.lock().links.insert(link, follower);
    }

    /// Locks or unlocks an account row, as an administrator's transaction would.
    pub fn set_locked(&self, account: AccountId, is_locked: bool) {
        let mut tables = self.tables.lock();
        if is_locked {
            tables.locked.insert(account);
        } else {
            tables.locked.remove(&account);
        }
    }

    /// Takes the database away, or gives it back.
    pub fn set_away(&self, is_away: bool) {
        self.tables.lock().is_away = is_away;
    }

    /// What a replica has that hears nothing from now on.
    pub fn replica(&self) -> MemoryDatabase {
        MemoryDatabase { tables: Arc::new(Mutex::new(self.tables.lock().clone())) }
    }

    /// A replica takes the place of this server, on a timeline of its own.
    pub fn promote(&self, replica: &MemoryDatabase) {
        let replica = replica.tables.lock().clone();
        let mut tables = self.tables.lock();
        let timeline = tables.timeline + 1;
        *tables = Tables { timeline, ..replica };
    }

    /// Every stored pair, by id.
    pub fn pairs(&self) -> Vec<PairRow> {
        self.tables.lock().pairs.values().cloned().collect()
    }

    /// Every stored event, by id.
    pub fn events(&self) -> Vec<CopyEvent> {
        self.tables.lock().events.values().cloned().collect()
    }

    /// The stored status of an account.
    pub fn status(&self, account: AccountId) -> Option<AccountStatus> {
        self.tables.lock().statuses.get(&account).cloned()
    }
}

/// The tables as one node writes them.
#[derive(Debug, Clone)]
pub struct MemoryRows {
    database: MemoryDatabase,
    node: NodeId,
}

impl MemoryRows {
    /// Rows in `database`, written in the name of `node`.
    pub fn new(database: MemoryDatabase, node: NodeId) -> Self {
        Self { database, node }
    }
}

impl RowSink for MemoryRows {
    async fn persist(&self, batch: &Batch) -> Result<Vec<RowOutcome>, WriteError> {
        let mut tables = self.database.tables.lock();
        tables.check_reached()?;
        tables.persist(&self.node, batch)
    }

    async fn load_pairs(&self, follower: AccountId) -> Result<LoadedPairs, WriteError> {
        let tables = self.database.tables.lock();
        tables.check_reached()?;
        Ok(tables.load_pairs(follower))
    }

    fn timeline(&self) -> Option<u32> {
        Some(self.database.tables.lock().timeline)
    }

    async fn prepare(&self) -> Result<(), WriteError> {
        self.database.tables.lock().check_reached()
    }
}

/// What a write changed, to take it back if the batch fails.
type Undo = (PairId, Option<PairRow>);

impl Tables {
    /// Stores a batch in the name of a node: all of its pairs or none.
    pub fn persist(&mut self, node: &NodeId, batch: &Batch) -> Result<Vec<RowOutcome>, WriteError> {
        match batch.kind() {
            RowKind::PairLive => self.write_pairs(&batch.pairs(), |t, row| t.write_live(node, row)),
            RowKind::PairEnded => {
                self.write_pairs(&batch.pairs(), |t, row| t.write_ended(node, row))
            }
            RowKind::Status => {
                Ok(batch.statuses().into_iter().map(|row| self.write_status(node, row)).collect())
            }
            RowKind::Event => {
                Ok(batch.events().into_iter().map(|row| self.write_event(row)).collect())
            }
        }
    }

    /// Every pair of a follower, by link and master ticket.
    pub fn load_pairs(&self, follower: AccountId) -> LoadedPairs {
        let mut rows: Vec<PairRow> =
            self.pairs.values().filter(|row| row.follower == follower).cloned().collect();
        rows.sort_by_key(|row| (row.pair.link, row.pair.master_ticket, row.pair.id));
        let (ended, live) = rows.into_iter().partition(PairRow::has_ended);
        LoadedPairs { live, ended }
    }

    fn check_reached(&self) -> Result<(), WriteError> {
        if self.is_away {
            return Err(WriteError::Unreachable { message: "the database is away".to_owned() });
        }
        Ok(())
    }

    /// All rows or none.
    fn write_pairs(
        &mut self,
        rows: &[&PairRow],
        write: impl Fn(&mut Tables, &PairRow) -> Result<(RowOutcome, Option<Undo>), WriteError>,
    ) -> Result<Vec<RowOutcome>, WriteError> {
        let mut outcomes = Vec::with_capacity(rows.len());
        let mut undo = Vec::new();
        for row in rows {
            match write(self, row) {
                Ok((outcome, change)) => {
                    outcomes.push(outcome);
                    undo.extend(change);
                }
                Err(error) => {
                    for (id, before) in undo.into_iter().rev() {
                        self.put(id, before);
                    }
                    return Err(error);
                }
            }
        }
        Ok(outcomes)
    }

    fn put(&mut self, id: PairId, pair: Option<PairRow>) {
        match pair {
            Some(pair) => self.pairs.insert(id, pair),
            None => self.pairs.remove(&id),
        };
    }

    fn write_live(
        &mut self,
        node: &NodeId,
        row: &PairRow,
    ) -> Result<(RowOutcome, Option<Undo>), WriteError> {
        if let Some(outcome) = self.fence(node, row.follower, row.token) {
            return Ok((outcome, None));
        }
        match self.pairs.get(&row.pair.id) {
            Some(held) if held.has_ended() => Ok((RowOutcome::Ended, None)),
            Some(held) if held.rank() >= row.rank() => Ok((RowOutcome::Already, None)),
            held => {
                let known = held.and_then(|held| held.volumes);
                let volumes = row.volumes.or(known);
                self.store(row.pair.id, PairRow { volumes, ..row.clone() })
            }
        }
    }

    fn write_ended(
        &mut self,
        node: &NodeId,
        row: &PairRow,
    ) -> Result<(RowOutcome, Option<Undo>), WriteError> {
        let key = |row: &PairRow| (row.pair.link, row.pair.master_ticket);
        let is_live = |held: &&PairRow| !held.has_ended() && key(held) == key(row);
        if planted::is(Bug::P7)
            && let Some(held) = self.pairs.values().find(is_live)
        {
            // Whatever copy it has.
            return self.store(held.pair.id, end_of(held, row));
        }
        let held = self.pairs.get(&row.pair.id);
        let adds_nothing = row.pair.follower_ticket.is_none()
            || held.is_some_and(|held| held.pair.follower_ticket == row.pair.follower_ticket);
        if held.is_some_and(PairRow::has_ended) && adds_nothing {
            return Ok((RowOutcome::Already, None));
        }
        // The end of a copy is a fact; what has no copy is a decision, and only the owner's counts.
        if row.pair.follower_ticket.is_none()
            && let Some(outcome) = self.fence(node, row.follower, row.token)
        {
            return Ok((outcome, None));
        }
        match held {
            None => return self.store(row.pair.id, row.clone()),
            Some(held) if !held.has_ended() && (adds_nothing || row.token >= held.token) => {
                return self.store(row.pair.id, end_of(held, row));
            }
            Some(_) => {}
        }
        let apart = row.apart_id();
        if self.pairs.contains_key(&apart) {
            return Ok((RowOutcome::Already, None));
        }
        self.store(apart, PairRow { pair: Pair { id: apart, ..row.pair.clone() }, ..row.clone() })
    }

    fn store(
        &mut self,
        id: PairId,
        row: PairRow,
    ) -> Result<(RowOutcome, Option<Undo>), WriteError> {
        if self.links.get(&row.pair.link) != Some(&row.follower) {
            return Err(refused("23503", "pairs_link_and_follower_exist"));
        }
        if !row.pair.knows_its_copy() {
            return Err(refused("23514", "pairs_ticket_known_once_open"));
        }
        let key = |row: &PairRow| (row.pair.link, row.pair.master_ticket);
        let is_second =
            |pair: &PairRow| pair.pair.id != id && !pair.has_ended() && key(pair) == key(&row);
        if !row.has_ended() && self.pairs.values().any(is_second) {
            return Err(refused("23505", "pairs_one_live_per_link_and_ticket"));
        }
        let before = self.pairs.insert(id, row);
        Ok((RowOutcome::Written, Some((id, before))))
    }

    fn write_status(&mut self, node: &NodeId, row: &AccountStatus) -> RowOutcome {
        if let Some(outcome) = self.fence(node, row.account, row.token) {
            return outcome;
        }
        if self.statuses.get(&row.account).is_some_and(|held| held.token > row.token) {
            return RowOutcome::Already;
        }
        self.statuses.insert(row.account, row.clone());
        RowOutcome::Written
    }

    fn write_event(&mut self, row: &CopyEvent) -> RowOutcome {
        if self.events.contains_key(&row.id) {
            return RowOutcome::Already;
        }
        self.events.insert(row.id, row.clone());
        RowOutcome::Written
    }

    /// Nothing if the row may be written.
    fn fence(&self, node: &NodeId, account: AccountId, token: Token) -> Option<RowOutcome> {
        // Planted: one tenure of this node is as good as another.
        let same = |held: &Token| *held == token || planted::is(Bug::P5);
        let is_owner =
            self.owners.get(&account).is_some_and(|held| held.0 == *node && same(&held.1));
        let is_locked = live_write_locks_the_account_row() && self.locked.contains(&account);
        match (is_owner, is_locked) {
            (false, _) => Some(RowOutcome::NotOwner),
            (true, true) => Some(RowOutcome::Busy),
            (true, false) => None,
        }
    }
}

fn end_of(held: &PairRow, row: &PairRow) -> PairRow {
    let pair = Pair {
        follower_ticket: row.pair.follower_ticket.or(held.pair.follower_ticket),
        lots_at_open: row.pair.lots_at_open.or(held.pair.lots_at_open),
        sent_at: row.pair.sent_at.or(held.pair.sent_at),
        state: row.pair.state,
        is_pending: row.pair.is_pending,
        reason: row.pair.reason,
        version: row.pair.version.max(held.pair.version),
        ..held.pair.clone()
    };
    PairRow {
        pair,
        follower: held.follower,
        token: row.token,
        opened_at: row.opened_at.or(held.opened_at),
        closed_at: row.closed_at,
        close_price: row.close_price,
        volumes: held.volumes,
    }
}

fn refused(sqlstate: &str, constraint: &str) -> WriteError {
    WriteError::Refused {
        sqlstate: sqlstate.to_owned(),
        constraint: Some(constraint.to_owned()),
        message: "refused by the rules of the table".to_owned(),
    }
}
