//! S6, S7, S11, S12, S13, S20 and L6 of the reconciles, from what the nodes noted.
//!
//! The notes are the nodes' own words: good enough to show that a node broke its own rules, not
//! to show that it did not. Each order in the broker's ledger must have a note of its grounds,
//! and the grounds must agree with what was said on the bus and committed.

use super::broker::sent_at;
use super::{Evidence, Finding, Law, Report, is_of};
use crate::chaos::audit::AuditFact;
use crate::chaos::tap::Said;
use schemas::{AccountId, LinkId, Micros};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// L6: so many reconciles of a link in the window.
const RECONCILES_MAX: usize = 3;
/// L6: ten seconds from begin to begin, less what two clocks of one machine may differ by.
const RECONCILE_WINDOW: Duration = Duration::from_millis(9_900);
/// The last notes of a process that was killed are lost.
const LOST_AT_KILL: Duration = Duration::from_secs(1);

/// One note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeNote {
    /// When.
    pub at_us: Micros,
    /// The process, its random part included.
    pub node: String,
    /// What.
    #[serde(flatten)]
    pub what: Noted,
}

/// What was noted; `lockstep::notes` says what the fields mean.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the fields are those of lockstep::notes::Note")]
pub enum Noted {
    TenureBegins {
        account: AccountId,
        token: i64,
        clean: bool,
    },
    TenureEnds {
        account: AccountId,
        token: i64,
        how: String,
    },
    SessionOpened {
        account: AccountId,
        token: i64,
    },
    SessionCut {
        account: AccountId,
        token: i64,
    },
    Applied {
        account: AccountId,
        token: i64,
        master: AccountId,
        epoch: u64,
        seq: u64,
        ticket: Option<u64>,
    },
    Planned(PlanNote),
    Sent(SentNote),
    Answered {
        account: AccountId,
        token: i64,
        attempt: u64,
        outcome: String,
    },
    Dropped {
        count: u64,
    },
}

impl Noted {
    fn tenure(&self) -> Option<(AccountId, i64)> {
        match self {
            Noted::TenureBegins { account, token, .. }
            | Noted::TenureEnds { account, token, .. }
            | Noted::SessionOpened { account, token }
            | Noted::SessionCut { account, token }
            | Noted::Applied { account, token, .. }
            | Noted::Answered { account, token, .. } => Some((*account, *token)),
            Noted::Planned(plan) => Some((plan.account, plan.token)),
            Noted::Sent(sent) => Some((sent.account, sent.token)),
            Noted::Dropped { .. } => None,
        }
    }
}

/// A plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of lockstep::notes::Note")]
pub struct PlanNote {
    pub account: AccountId,
    pub token: i64,
    pub link: LinkId,
    pub plan: u64,
    pub begun_us: Micros,
    pub reason: String,
    pub epoch: u64,
    pub seq: u64,
    pub held: bool,
    pub steps: Vec<String>,
}

/// An order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of lockstep::notes::Note")]
pub struct SentNote {
    pub account: AccountId,
    pub token: i64,
    pub attempt: u64,
    pub link: LinkId,
    pub ticket: u64,
    pub step: String,
    pub reason: Option<String>,
    pub plan: Option<u64>,
    pub epoch: u64,
    pub seq: u64,
    pub doubtful: bool,
}

type Tenure<'a> = (&'a str, AccountId, i64);

/// What one tenure has noted so far.
#[derive(Debug, Default)]
struct Told<'a> {
    session_is_open: bool,
    applied: BTreeMap<AccountId, (u64, u64)>,
    plans: BTreeMap<(LinkId, u64), &'a PlanNote>,
    /// Tickets that an event has moved, and the place of that event.
    moved: BTreeMap<(AccountId, u64), (u64, u64)>,
    reconciles: BTreeMap<LinkId, VecDeque<Micros>>,
}

pub(super) fn check(evidence: &Evidence, report: &mut Report) {
    let mut tenures: BTreeMap<Tenure<'_>, Told<'_>> = BTreeMap::new();
    let closed = closed_at_places(evidence);
    for note in &evidence.notes {
        let Some((account, token)) = note.what.tenure() else {
            if let Noted::Dropped { count } = &note.what {
                report.notes_dropped = report.notes_dropped.max(*count);
            }
            continue;
        };
        let told = tenures.entry((&note.node, account, token)).or_default();
        match &note.what {
            Noted::TenureBegins { .. }
            | Noted::TenureEnds { .. }
            | Noted::Answered { .. }
            | Noted::Dropped { .. } => {}
            Noted::SessionOpened { .. } => told.session_is_open = true,
            Noted::SessionCut { .. } => told.session_is_open = false,
            Noted::Applied { master, epoch, seq, ticket, .. } => {
                let wrong = told.apply(*master, (*epoch, *seq), *ticket);
                find(report, Law::S11, note, account, None, wrong);
            }
            Noted::Planned(plan) => {
                let stale = told.plan(evidence, plan);
                find(report, Law::S12, note, account, None, stale);
                let storm = told.reconcile(plan.link, plan.begun_us);
                find(report, Law::L6, note, account, None, storm);
            }
            Noted::Sent(sent) => {
                let copy = Some((sent.link, sent.ticket));
                for (law, wrong) in told.send(evidence, sent, &closed) {
                    find(report, law, note, account, copy, Some(wrong));
                }
            }
        }
    }
    orders_without_grounds(evidence, report);
    releases_with_orders_out(evidence, report);
}

fn find(
    report: &mut Report,
    law: Law,
    note: &NodeNote,
    account: AccountId,
    copy: Option<(LinkId, u64)>,
    wrong: Option<String>,
) {
    let Some(wrong) = wrong else { return };
    let what = format!("{}: {wrong}", note.node);
    report.findings.push(Finding { law, at: note.at_us, account: Some(account), copy, what });
}

/// Where on the bus a master's trade was said to be closed: by master, ticket and epoch.
type Closed = BTreeMap<(AccountId, u64, u64), u64>;

fn closed_at_places(evidence: &Evidence) -> Closed {
    let mut closed = Closed::new();
    for record in &evidence.bus {
        if let Said::Event(kind, ticket) = &record.what
            && kind == "position_closed"
        {
            closed.insert((record.master, *ticket, record.epoch.get()), record.seq.get());
        }
    }
    closed
}

impl<'a> Told<'a> {
    /// S11: places strictly increase, an event is the direct successor of what was applied.
    fn apply(
        &mut self,
        master: AccountId,
        place: (u64, u64),
        ticket: Option<u64>,
    ) -> Option<String> {
        let before = self.applied.insert(master, place);
        if let Some(ticket) = ticket {
            self.moved.insert((master, ticket), place);
        }
        let before = before?;
        match ticket {
            Some(_) if place != (before.0, before.1 + 1) => {
                Some(format!("applied the event at {place:?} after {before:?}"))
            }
            None if place < before => {
                Some(format!("applied a snapshot of {place:?} after {before:?}"))
            }
            _ => None,
        }
    }

    /// S12: a plan is made from the place that is applied.
    fn plan(&mut self, evidence: &Evidence, plan: &'a PlanNote) -> Option<String> {
        self.plans.insert((plan.link, plan.plan), plan);
        let master = evidence.master_of(plan.link)?.master;
        let applied = *self.applied.get(&master)?;
        let place = (plan.epoch, plan.seq);
        (place != applied)
            .then(|| format!("plan {} of {place:?}, applied is {applied:?}", plan.plan))
    }

    fn reconcile(&mut self, link: LinkId, at: Micros) -> Option<String> {
        let recent = self.reconciles.entry(link).or_default();
        recent.push_back(at);
        while recent.front().is_some_and(|first| at.since(*first) > RECONCILE_WINDOW) {
            recent.pop_front();
        }
        let count = recent.len();
        (count > RECONCILES_MAX)
            .then(|| format!("{count} reconciles of link {link} in {RECONCILE_WINDOW:?}"))
    }

    fn send(
        &mut self,
        evidence: &Evidence,
        sent: &SentNote,
        closed: &Closed,
    ) -> Vec<(Law, String)> {
        let mut wrong = Vec::new();
        if !self.session_is_open {
            wrong.push((Law::S13, format!("{} before any list was complete", sent.step)));
        }
        let Some(master) = evidence.master_of(sent.link).map(|link| link.master) else {
            return wrong;
        };
        let only_planned = matches!(sent.step.as_str(), "close_duplicate" | "close_orphan");
        match sent.plan.map(|plan| self.plans.get(&(sent.link, plan))) {
            None if only_planned => wrong.push((Law::S12, format!("{} without a plan", sent.step))),
            Some(None) => wrong.push((Law::S12, format!("{} of an unknown plan", sent.step))),
            Some(Some(plan)) => {
                if plan.held {
                    wrong.push((Law::S12, format!("{} of a held plan", sent.step)));
                }
                let moved = self.moved.get(&(master, sent.ticket));
                if let Some(place) = moved.filter(|place| **place > (plan.epoch, plan.seq)) {
                    let what = format!(
                        "{} of plan {} at {:?}, but an event at {place:?} moved the ticket",
                        sent.step,
                        plan.plan,
                        (plan.epoch, plan.seq)
                    );
                    wrong.push((Law::S12, what));
                }
            }
            None => {}
        }
        if sent.step == "open_copy"
            && let Some(seq) = closed.get(&(master, sent.ticket, sent.epoch))
            && *seq <= sent.seq
        {
            let place = (sent.epoch, sent.seq);
            let what = format!("opened at {place:?}, where the close of seq {seq} is applied");
            wrong.push((Law::S6, what));
        }
        wrong
    }
}

/// S7: every order at the broker has grounds that its sender noted.
fn orders_without_grounds(evidence: &Evidence, report: &mut Report) {
    if evidence.notes.is_empty() || report.notes_dropped > 0 {
        return;
    }
    let mut noted: BTreeMap<(&str, AccountId, i64, u64), &SentNote> = BTreeMap::new();
    for note in &evidence.notes {
        if let Noted::Sent(sent) = &note.what {
            noted.insert((&note.node, sent.account, sent.token, sent.attempt), sent);
        }
    }
    for (row, request, meta) in evidence.ledger.orders() {
        let node = meta.node.as_str();
        let key = (node, request.account, meta.token.as_i64(), meta.client_ref);
        if noted.contains_key(&key) || was_killed(evidence, node, sent_at(row, request)) {
            continue;
        }
        let what = format!("{node} noted no grounds for its order {}", meta.client_ref);
        let (law, at, account) = (Law::S7, row.at_us, Some(request.account));
        report.findings.push(Finding { law, at, account, copy: None, what });
    }
}

/// The node's process, or one of its name, was killed soon after.
fn was_killed(evidence: &Evidence, node: &str, at: Micros) -> bool {
    const KILLING: &[&str] =
        &["kill_and_restart", "burst_in_takeover", "same_name_twice", "hand_over"];
    evidence.spans.iter().any(|span| {
        KILLING.contains(&span.kind)
            && span.node.as_ref().is_some_and(|name| is_of(node, name))
            && span.from <= at.plus(LOST_AT_KILL)
            && at <= span.until
    })
}

/// S20: at a release every order of the tenure was answered.
fn releases_with_orders_out(evidence: &Evidence, report: &mut Report) {
    let mut orders: BTreeMap<Tenure<'_>, BTreeMap<u64, (Micros, Option<Micros>)>> = BTreeMap::new();
    for note in &evidence.notes {
        match &note.what {
            Noted::Sent(sent) => {
                let of_tenure = orders.entry((&note.node, sent.account, sent.token)).or_default();
                of_tenure.insert(sent.attempt, (note.at_us, None));
            }
            // What was out is looked for from then on, and settled before a release.
            Noted::SessionCut { account, token } => {
                let of_tenure = orders.entry((&note.node, *account, *token)).or_default();
                for (_, answered) in of_tenure.values_mut() {
                    answered.get_or_insert(note.at_us);
                }
            }
            Noted::Answered { account, token, attempt, .. } => {
                let of_tenure = orders.entry((&note.node, *account, *token)).or_default();
                if let Some((_, answered)) = of_tenure.get_mut(attempt) {
                    *answered = Some(note.at_us);
                }
            }
            _ => {}
        }
    }
    for row in evidence.audits.iter().flatten() {
        let AuditFact::Lease { account: id, before, after, .. } = &row.fact else { continue };
        let (Some(node), None) = (&before.node, &after.node) else { continue };
        let Ok(account) = AccountId::from_i64(*id) else { continue };
        let Some(of_tenure) = orders.get(&(node.as_str(), account, before.token)) else { continue };
        let out = of_tenure.iter().filter(|(_, (sent, answered))| {
            *sent <= row.at && answered.is_none_or(|answered| answered > row.at)
        });
        let out: Vec<u64> = out.map(|(attempt, _)| *attempt).collect();
        if !out.is_empty() {
            let what = format!("{node} released token {} with orders {out:?} out", before.token);
            let (law, at, account) = (Law::S20, row.at, Some(account));
            report.findings.push(Finding { law, at, account, copy: None, what });
        }
    }
}
