//! Joins the evidence of a run and finds what broke a promise.
//!
//! Inputs ([`Evidence`]): the broker's ledger, what the masters did, what was committed, what was
//! said on the bus, what the nodes noted, and when which fault held. Outputs ([`Report`]):
//! findings, each with its law, its instant and its ticket, and the numbers of the verdict. Pure.
//!
//! | file | laws | believes |
//! |---|---|---|
//! | `broker` | S1, S2, S4, S5, S6, S7, S8 | the broker and the masters; of a node only the margin it states |
//! | `database` | S2 and S1 by the leases, S3, S9, S10, S16, S20, L1 | the database |
//! | `bus` | S11 of publishers, L6 of snapshots | what was heard |
//! | `nodes` | S7, S11, S12, S13, L6 of reconciles | the nodes' notes, joined with the rest |
//!
//! Invariants:
//! 1. What is absent from the evidence proves nothing, except in the ledger and the audits, which
//!    are complete by construction.
//! 2. A fault excuses only what its span says, and what it excuses is counted.

pub mod broker;
mod bus;
mod database;
pub mod nodes;
mod story;

#[cfg(test)]
mod tests;

use super::audit::AuditRow;
use super::faults::Span;
use super::load::Truth;
use super::tap::BusRecord;
use super::world::{MasterLink, MasterSite};
use nodes::NodeNote;
use paper::ledger::{Ledger, TradeEventKind};
use rust_decimal::Decimal;
use schemas::{AccountId, Change, LinkId, Micros, Side};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// Everything that is known of a run.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// Masters.
    pub masters: Vec<MasterSite>,
    /// Links.
    pub links: Vec<MasterLink>,
    /// What arrived at the broker.
    pub ledger: Ledger,
    /// What each master's trades went through.
    pub lives: Lives,
    /// What was committed, by primary.
    pub audits: Vec<Vec<AuditRow>>,
    /// What was said on the bus.
    pub bus: Vec<BusRecord>,
    /// What the nodes noted.
    pub notes: Vec<NodeNote>,
    /// Faults.
    pub spans: Vec<Span>,
}

/// The life of a master's trade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    /// Direction.
    pub side: Side,
    /// Opened.
    pub opened_at: Micros,
    /// Its volumes, each since when.
    pub volumes: Vec<(Micros, Decimal)>,
    /// Closed.
    pub closed_at: Option<Micros>,
}

/// Lives by master and the ticket they began under.
pub type Lives = BTreeMap<(AccountId, u64), Life>;

/// A broken promise's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[allow(missing_docs, reason = "they are the names of the laws")]
pub enum Law {
    S1,
    S2,
    S3,
    S4,
    S5,
    S6,
    S7,
    S8,
    S9,
    S10,
    S11,
    S12,
    S13,
    S16,
    S20,
    L1,
    L4,
    L6,
}

/// One broken promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which.
    pub law: Law,
    /// When.
    pub at: Micros,
    /// The account, if one.
    pub account: Option<AccountId>,
    /// Link and master ticket, if one.
    pub copy: Option<(LinkId, u64)>,
    /// What happened.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}", self.law, self.at.0)?;
        if let Some(account) = self.account {
            write!(f, ", account {account}")?;
        }
        if let Some((link, ticket)) = self.copy {
            write!(f, ", link {link}, ticket {ticket}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// What came of checking.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Broken promises, by time.
    pub findings: Vec<Finding>,
    /// Requests of nodes that arrived at the broker.
    pub orders: u64,
    /// Copies that were opened or placed.
    pub opens: u64,
    /// Copies beyond the first for one ticket.
    pub duplicates: u64,
    /// Of those, what a fault excuses.
    pub excused_extras: u64,
    /// The smallest stated margin.
    pub margin_min_us: Option<i64>,
    /// From the last renewal of an owner that vanished to the next owner's claim and first
    /// reconcile.
    pub takeovers: Vec<Duration>,
    /// Notes that nodes had no room for.
    pub notes_dropped: u64,
}

impl Evidence {
    /// Finds everything there is to find.
    pub fn check(&self) -> Report {
        let mut report = Report::default();
        broker::check(self, &mut report);
        database::check(self, &mut report);
        bus::check(self, &mut report);
        nodes::check(self, &mut report);
        // What was committed before a promotion is in both audits.
        report.findings.sort_by(|a, b| (a.at, a.law, &a.what).cmp(&(b.at, b.law, &b.what)));
        report.findings.dedup();
        report
    }

    /// The records of what a finding is about, in the order of time.
    pub fn story(&self, finding: &Finding) -> Vec<String> {
        story::tell(self, finding)
    }

    fn master_of(&self, link: LinkId) -> Option<&MasterLink> {
        self.links.iter().find(|known| known.link.link == link)
    }

    fn life(&self, link: LinkId, ticket: u64) -> Option<&Life> {
        self.lives.get(&(self.master_of(link)?.master, ticket))
    }

    /// A fault that may have held a node between its last check and the write, or its orders on
    /// their way, was active so shortly before.
    fn excuses(&self, node: &str, at: Micros) -> bool {
        self.spans.iter().any(|span| {
            span.excuses_extra
                && span.node.as_ref().is_none_or(|name| is_of(node, name))
                && span.from <= at
                && at <= span.until.plus(LATE_SEND)
        })
    }

    /// The machine was too busy to run everybody at once.
    fn lagged(&self, from: Micros, until: Micros) -> bool {
        let lags = self.spans.iter().filter(|span| span.kind == MACHINE_LAG);
        lags.into_iter().any(|span| span.from <= until && from <= span.until)
    }

    /// Something stood between this node and the broker, or the node itself stood still.
    fn is_delayed(&self, node: &str, at: Micros, allowed: Duration) -> bool {
        const DELAYING: &[&str] =
            &["latency", "black_hole", "half_open", "cut_broker", "freeze_short", "freeze_long"];
        self.spans.iter().any(|span| {
            DELAYING.contains(&span.kind)
                && span.node.as_ref().is_some_and(|name| is_of(node, name))
                && span.from <= at
                && at <= span.until.plus(allowed)
        })
    }

    /// Whether a fault held at a time, at a node or anywhere.
    fn disturbed(&self, from: Micros, until: Micros) -> bool {
        self.spans.iter().any(|span| span.from <= until && from <= span.until)
    }
}

/// The word of a span in which the harness itself was woken late.
pub const MACHINE_LAG: &str = "machine_lag";

/// So long after a node goes on, what it had checked before is on the wire.
const LATE_SEND: Duration = Duration::from_secs(2);

/// Whether an owner's name with its random part is of this node.
pub fn is_of(owner: &str, name: &str) -> bool {
    owner.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
}

/// The lives of all masters' trades.
pub fn lives(masters: &[MasterSite], truth: &Truth, ledger: &Ledger) -> Lives {
    let mut lives = Lives::new();
    for (account, published) in &truth.published {
        for (at, change) in published {
            take_change(&mut lives, *account, *at, change);
        }
    }
    let leased: BTreeSet<AccountId> =
        masters.iter().filter(|master| master.is_leased).map(|master| master.account).collect();
    for (row, fact) in ledger.trades().filter(|(_, fact)| leased.contains(&fact.account)) {
        let key = (fact.account, fact.first_ticket.get());
        match fact.event {
            TradeEventKind::Opened | TradeEventKind::PendingFilled => {
                lives.insert(key, life(row.at_us, fact.side, fact.lots.get()));
            }
            TradeEventKind::Reduced => {
                if let (Some(life), Some(left)) = (lives.get_mut(&key), fact.lots_left) {
                    life.volumes.push((row.at_us, left.get()));
                }
            }
            TradeEventKind::Closed => {
                if let Some(life) = lives.get_mut(&key) {
                    life.closed_at = Some(row.at_us);
                }
            }
            TradeEventKind::Modified
            | TradeEventKind::Added
            | TradeEventKind::PendingPlaced
            | TradeEventKind::PendingModified
            | TradeEventKind::PendingCancelled => {}
        }
    }
    lives
}

fn life(at: Micros, side: Side, lots: Decimal) -> Life {
    Life { side, opened_at: at, volumes: vec![(at, lots)], closed_at: None }
}

fn take_change(lives: &mut Lives, account: AccountId, at: Micros, change: &Change) {
    let key = (account, change.ticket().get());
    match change {
        Change::PositionOpened(p) | Change::PendingFilled(p) => {
            lives.insert(key, life(at, p.side, p.lots.get()));
        }
        Change::VolumeChanged { position, .. } => {
            if let Some(life) = lives.get_mut(&key) {
                life.volumes.push((at, position.lots.get()));
            }
        }
        Change::PositionClosed { .. } => {
            if let Some(life) = lives.get_mut(&key) {
                life.closed_at = Some(at);
            }
        }
        Change::PositionModified(_)
        | Change::PendingPlaced(_)
        | Change::PendingModified(_)
        | Change::PendingCancelled(_) => {}
    }
}

impl Life {
    fn had_volume(&self, until: Micros, wanted: impl Fn(Decimal) -> bool) -> bool {
        self.volumes.iter().any(|(at, lots)| *at <= until && wanted(*lots))
    }
}
