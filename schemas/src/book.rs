//! The state of a master: its open trades and pending orders.
//!
//! Decides: which events lead from one state to the next (`diff`), what state an
//! event leads to (`apply`), and the digest that beacons carry.
//!
//! Invariants:
//! 1. For all states a and b: applying `diff(a, b)` to a gives b, except that a trade
//!    whose side changed under one ticket only closes (its adapter must give the
//!    reversed trade a new ticket).
//! 2. `diff(a, a)` is empty.
//! 3. Closes and cancellations come before opens in a diff; within a kind, ascending ticket.
//! 4. The digest depends on the state alone, not on the order in which it came about.

use crate::event::{Change, CloseReason};
use crate::ids::MasterTicket;
use crate::position::{MasterPending, MasterPosition};
use crate::quantity::Price;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

/// Open trades and pending orders of one master, by ticket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Book {
    /// Open trades.
    pub positions: BTreeMap<MasterTicket, MasterPosition>,
    /// Pending orders.
    pub pendings: BTreeMap<MasterTicket, MasterPending>,
}

/// 64-bit FNV-1a of the canonical lines of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(pub u64);

impl Book {
    /// The state with one change applied.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::PositionOpened(p) | Change::PositionModified(p) => self.put(p),
            Change::VolumeChanged { position, .. } => self.put(position),
            Change::PositionClosed { position, .. } => {
                self.positions.remove(&position.ticket);
            }
            Change::PendingPlaced(o) | Change::PendingModified(o) => {
                self.pendings.insert(o.ticket, o.clone());
            }
            Change::PendingCancelled(o) => {
                self.pendings.remove(&o.ticket);
            }
            Change::PendingFilled(p) => {
                self.pendings.remove(&p.ticket);
                self.put(p);
            }
        }
    }

    fn put(&mut self, position: &MasterPosition) {
        self.positions.insert(position.ticket, position.clone());
    }

    /// The changes that lead from this state to `next`.
    ///
    /// A broker's callbacks are hints; this difference of two read states is what is published.
    pub fn diff(&self, next: &Book) -> Vec<Change> {
        let mut changes = Vec::new();
        self.endings(next, &mut changes);
        self.position_changes(next, &mut changes);
        self.pending_changes(next, &mut changes);
        changes
    }

    fn endings(&self, next: &Book, changes: &mut Vec<Change>) {
        for (ticket, old) in &self.positions {
            if next.positions.get(ticket).is_none_or(|new| new.side != old.side) {
                changes.push(Change::PositionClosed {
                    position: old.clone(),
                    price: None,
                    reason: CloseReason::Unknown,
                });
            }
        }
        for (ticket, old) in &self.pendings {
            if !next.pendings.contains_key(ticket) && !next.positions.contains_key(ticket) {
                changes.push(Change::PendingCancelled(old.clone()));
            }
        }
    }

    fn position_changes(&self, next: &Book, changes: &mut Vec<Change>) {
        for (ticket, new) in &next.positions {
            match self.positions.get(ticket) {
                None if self.pendings.contains_key(ticket) => {
                    changes.push(Change::PendingFilled(new.clone()));
                }
                None => changes.push(Change::PositionOpened(new.clone())),
                Some(old) if old.side != new.side || old == new => {}
                Some(old) if old.lots != new.lots => changes
                    .push(Change::VolumeChanged { position: new.clone(), previous_lots: old.lots }),
                Some(_) => changes.push(Change::PositionModified(new.clone())),
            }
        }
    }

    fn pending_changes(&self, next: &Book, changes: &mut Vec<Change>) {
        for (ticket, new) in &next.pendings {
            match self.pendings.get(ticket) {
                None => changes.push(Change::PendingPlaced(new.clone())),
                Some(old) if old != new => changes.push(Change::PendingModified(new.clone())),
                Some(_) => {}
            }
        }
    }

    /// The digest of this state. README.md gives the lines and a worked example.
    pub fn digest(&self) -> Digest {
        let mut hash = Fnv1a::default();
        for p in self.positions.values() {
            hash.line(format_args!(
                "p|{}|{}|{}|{}|{}|{}",
                p.ticket,
                p.symbol,
                p.side.as_str(),
                p.lots,
                Level(p.stop_loss),
                Level(p.take_profit)
            ));
        }
        for o in self.pendings.values() {
            hash.line(format_args!(
                "o|{}|{}|{}|{}|{}|{}|{}",
                o.ticket,
                o.symbol,
                o.kind.as_str(),
                o.lots,
                o.price,
                Level(o.stop_loss),
                Level(o.take_profit)
            ));
        }
        Digest(hash.0)
    }
}

/// A stop as the digest writes it: its text, or `-` where there is none.
struct Level(Option<Price>);

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(price) => price.fmt(f),
            None => f.write_str("-"),
        }
    }
}

/// FNV-1a with the published 64-bit offset basis and prime: ten lines in any language.
struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    fn line(&mut self, line: fmt::Arguments<'_>) {
        self.write_fmt(line).expect("hashing text cannot fail");
        self.write_str("\n").expect("hashing text cannot fail");
    }
}

impl fmt::Write for Fnv1a {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}
