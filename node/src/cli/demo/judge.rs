//! The demo's verdict: what the paper broker's ledger says against what the master did.
//!
//! Inputs: the changes that the master published with their instants, the followers with
//! their multiplier and the stretches in which nobody could own them, and the ledger. The
//! nodes' own opinion (rows, metrics, logs) takes no part, and volumes are computed here a
//! second time, not with the code that is judged.
//!
//! Rules:
//! 1. Every trade of the master has exactly one copy on every follower, in the right volume,
//!    and at the end it is as open or as gone as the master's.
//! 2. A copy may be absent only if nobody owned the follower when the trade was opened, or
//!    if the master closed it within `SHORT_LIFE` (an open that is overtaken by its close
//!    before it was sent is not sent). Both are counted and shown.
//! 3. A copy that the broker itself closed at a stop is gone for good and not missing.
//! 4. A pending order has at most one copy at a time; a trade that came from one counts once.

use paper::ledger::{Cause, Ledger, TradeEventKind, TradeFact};
use rust_decimal::Decimal;
use schemas::{AccountId, Change, FollowerTicket, LinkId, Lots, MasterTicket, Micros, Symbol};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// A trade that the master closed sooner than this may have no copy: an order waits at most
/// this long for room behind the follower's other orders (16 at once, 130 ms each, bursts of 100).
pub const SHORT_LIFE: Duration = Duration::from_secs(1);

/// One follower of the demo's master.
#[derive(Debug, Clone)]
pub struct JudgedFollower {
    /// Its account, as the broker knows it.
    pub account: AccountId,
    /// The link that copies onto it.
    pub link: LinkId,
    /// Lots of the follower for one lot of the master.
    pub multiplier: Decimal,
    /// Stretches in which nobody could own it.
    pub unowned: Vec<(Micros, Micros)>,
}

/// Smallest volume and step of a symbol.
#[derive(Debug, Clone, Copy)]
pub struct Volumes {
    /// Smallest volume.
    pub min: Lots,
    /// Step.
    pub step: Lots,
    /// Largest volume.
    pub max: Lots,
}

/// What the ledger says.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Trades that the master opened.
    pub master_trades: u64,
    /// Copies that there must be.
    pub expected_copies: u64,
    /// Copies that there are.
    pub copies: u64,
    /// Copies that there must be and are not.
    pub missing: u64,
    /// Copies beyond the first for one trade.
    pub duplicates: u64,
    /// Copies whose volume, at the open or at the end, is not what it must be.
    pub wrong_volume: u64,
    /// Copies that are open although the master's trade is gone.
    pub left_open: u64,
    /// Copies that are absent because nobody owned the follower when the trade was opened.
    pub excused_unowned: u64,
    /// Copies that are absent because the master closed the trade at once.
    pub excused_short: u64,
    /// Orders with a lower token than one before (S1), or sent after their own deadline (S2).
    pub fence_violations: u64,
    /// Copies that a stop at the broker closed.
    pub closed_by_stop: u64,
    /// The first few findings, in words.
    pub findings: Vec<String>,
    /// Which copies are missing.
    #[serde(skip)]
    pub missing_copies: Vec<(AccountId, MasterTicket, Micros)>,
}

impl Verdict {
    /// Nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.missing == 0
            && self.duplicates == 0
            && self.wrong_volume == 0
            && self.left_open == 0
            && self.fence_violations == 0
    }

    fn find(&mut self, finding: String) {
        const FINDINGS_MAX: usize = 20;
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }
}

#[derive(Debug)]
struct MasterLife {
    symbol: Symbol,
    lots_at_open: Lots,
    opened_at: Micros,
    volumes: Vec<Lots>,
    closed_at: Option<Micros>,
}

/// The lives of the master's trades, from what it published.
fn lives(published: &[(Micros, Change)]) -> BTreeMap<MasterTicket, MasterLife> {
    let mut lives: BTreeMap<MasterTicket, MasterLife> = BTreeMap::new();
    for (at, change) in published {
        match change {
            Change::PositionOpened(p) | Change::PendingFilled(p) => {
                lives.insert(
                    p.ticket,
                    MasterLife {
                        symbol: p.symbol.clone(),
                        lots_at_open: p.lots_at_open,
                        opened_at: *at,
                        volumes: vec![p.lots],
                        closed_at: None,
                    },
                );
            }
            Change::VolumeChanged { position, .. } => {
                if let Some(life) = lives.get_mut(&position.ticket) {
                    life.volumes.push(position.lots);
                }
            }
            Change::PositionClosed { position, .. } => {
                if let Some(life) = lives.get_mut(&position.ticket) {
                    life.closed_at = Some(*at);
                }
            }
            Change::PositionModified(_)
            | Change::PendingPlaced(_)
            | Change::PendingModified(_)
            | Change::PendingCancelled(_) => {}
        }
    }
    lives
}

/// One copy's life at the broker.
#[derive(Debug, Default)]
struct Copy {
    /// First tickets of what was made and not taken back as a pending order.
    made: Vec<FollowerTicket>,
    /// Volume of the first trade when it was opened; absent while only a pending order waits.
    opened: Option<Decimal>,
    /// Volume closed since.
    closed: Decimal,
    /// A stop at the broker closed it.
    stopped: bool,
}

fn copies(ledger: &Ledger) -> BTreeMap<(AccountId, LinkId, MasterTicket), Copy> {
    let mut copies: BTreeMap<_, Copy> = BTreeMap::new();
    for (_, fact) in ledger.trades() {
        let Some((link, ticket)) = reconcile::tag::decode(&fact.comment) else { continue };
        copies.entry((fact.account, link, ticket)).or_default().take(fact);
    }
    copies
}

impl Copy {
    fn take(&mut self, fact: &TradeFact) {
        match fact.event {
            TradeEventKind::Opened | TradeEventKind::Added => {
                self.made.push(fact.first_ticket);
                *self.opened.get_or_insert_default() += fact.lots.get();
            }
            TradeEventKind::PendingPlaced => self.made.push(fact.first_ticket),
            TradeEventKind::PendingFilled => {
                *self.opened.get_or_insert_default() += fact.lots.get();
            }
            TradeEventKind::PendingCancelled => {
                self.made.retain(|ticket| *ticket != fact.first_ticket);
            }
            TradeEventKind::Reduced | TradeEventKind::Closed => {
                self.closed += fact.lots.get();
                self.stopped |=
                    matches!(fact.cause, Cause::StopLoss | Cause::TakeProfit | Cause::StopOut);
            }
            TradeEventKind::Modified | TradeEventKind::PendingModified => {}
        }
    }
}

/// The volume that a follower must have for a master's volume; nothing below the smallest.
fn volume(master: Decimal, multiplier: Decimal, limits: Volumes) -> Option<Decimal> {
    let step = limits.step.get();
    let lots = (master * multiplier / step).floor() * step;
    (lots >= limits.min.get()).then(|| lots.min(limits.max.get()))
}

/// Holds the ledger against what the master did.
pub fn judge(
    published: &[(Micros, Change)],
    followers: &[JudgedFollower],
    volumes: &BTreeMap<Symbol, Volumes>,
    ledger: &Ledger,
) -> Verdict {
    let lives = lives(published);
    let copies = copies(ledger);
    let mut verdict = Verdict { master_trades: lives.len() as u64, ..Verdict::default() };
    for follower in followers {
        for (ticket, life) in &lives {
            let Some(limits) = volumes.get(&life.symbol) else { continue };
            let copy = copies.get(&(follower.account, follower.link, *ticket));
            judge_one(&mut verdict, follower, *ticket, life, *limits, copy);
        }
    }
    for violation in ledger.violations() {
        if !matches!(violation, paper::ledger::Violation::DuplicateOpen { .. }) {
            verdict.fence_violations += 1;
            verdict.find(format!("{violation:?}"));
        }
    }
    verdict
}

fn judge_one(
    verdict: &mut Verdict,
    follower: &JudgedFollower,
    ticket: MasterTicket,
    life: &MasterLife,
    limits: Volumes,
    copy: Option<&Copy>,
) {
    let wanted: Vec<Decimal> = life
        .volumes
        .iter()
        .filter_map(|lots| volume(lots.get(), follower.multiplier, limits))
        .collect();
    let whole = volume(life.lots_at_open.get(), follower.multiplier, limits);
    let made = copy.filter(|copy| copy.opened.is_some());
    let account = follower.account;
    let Some(copy) = made else {
        return judge_absent(verdict, follower, ticket, life, whole);
    };
    verdict.expected_copies += 1;
    verdict.copies += 1;
    if copy.made.len() > 1 {
        verdict.duplicates += copy.made.len() as u64 - 1;
        verdict.find(format!("account {account}, ticket {ticket}: made {:?}", copy.made));
    }
    let opened = copy.opened.unwrap_or_default();
    if copy.made.len() == 1 && !wanted.contains(&opened) {
        verdict.wrong_volume += 1;
        verdict.find(format!(
            "account {account}, ticket {ticket}: opened {opened}, not one of {wanted:?}"
        ));
    }
    judge_end(verdict, account, ticket, life, limits, copy, opened);
}

fn judge_absent(
    verdict: &mut Verdict,
    follower: &JudgedFollower,
    ticket: MasterTicket,
    life: &MasterLife,
    whole: Option<Decimal>,
) {
    let unowned = follower
        .unowned
        .iter()
        .any(|(from, until)| *from <= life.opened_at && life.opened_at <= *until);
    let short = life.closed_at.is_some_and(|closed| closed.since(life.opened_at) < SHORT_LIFE);
    if whole.is_none() {
        // Too small for this follower: no copy is right.
    } else if unowned {
        verdict.excused_unowned += 1;
    } else if short {
        verdict.excused_short += 1;
    } else {
        verdict.expected_copies += 1;
        verdict.missing += 1;
        verdict.missing_copies.push((follower.account, ticket, life.opened_at));
    }
}

fn judge_end(
    verdict: &mut Verdict,
    account: AccountId,
    ticket: MasterTicket,
    life: &MasterLife,
    limits: Volumes,
    copy: &Copy,
    opened: Decimal,
) {
    let left = opened - copy.closed;
    verdict.closed_by_stop += u64::from(copy.stopped);
    if life.closed_at.is_some() {
        if left != Decimal::ZERO {
            verdict.left_open += 1;
            verdict.find(format!("account {account}, ticket {ticket}: {left} lots are still open"));
        }
        return;
    }
    if copy.stopped {
        return;
    }
    // A copy that came late was opened from a later volume; its share counts from there.
    let now = life.volumes.last().map_or(life.lots_at_open, |lots| *lots).get();
    let step = limits.step.get();
    let right = life.volumes.iter().any(|from| {
        let target = (opened * now / from.get() / step).floor() * step;
        left == target.max(limits.min.get()).min(opened)
    });
    if left == Decimal::ZERO {
        verdict.missing += 1;
        verdict
            .find(format!("account {account}, ticket {ticket}: closed, but the master's is open"));
    } else if !right {
        verdict.wrong_volume += 1;
        verdict.find(format!("account {account}, ticket {ticket}: {left} lots left of {opened}"));
    }
}
