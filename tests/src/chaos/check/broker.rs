//! S1, S2, S4 to S8, from the broker's ledger and what the masters did.

use super::{Evidence, Finding, LATE_SEND, Law, Report};
use crate::chaos::audit::{AuditFact, AuditRow};
use crate::chaos::books::late_copies;
use crate::chaos::timing;
use paper::ledger::{Fact, LedgerRow, RequestFact, TradeEventKind, TradeFact};
use paper::protocol::{Instruction, OrderMeta, OrderReply};
use rust_decimal::Decimal;
use schemas::{AccountId, FollowerTicket, LinkId, Micros, Side, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A copy of a trade that ended is opened so much later at most: the sender had not heard of the
/// end. Silence of a feed, a read, and the call on its way.
pub const STALE_OPEN_MAX: Duration = Duration::from_millis(
    timing::STALE.as_millis() as u64 + 2 * timing::CALL_LIMIT.as_millis() as u64,
);

/// An extra copy that a fault excuses is closed by us within this: the last look for duplicates
/// and the time to reconcile.
pub const EXTRA_CLOSED_WITHIN: Duration =
    Duration::from_millis(timing::AUDIT_LAST.as_millis() as u64 + 10_000);

/// Link and master ticket.
pub type Copy = (LinkId, u64);

#[derive(Debug, Default)]
struct Walk<'a> {
    /// Highest token of an account, and who holds each token.
    highest: BTreeMap<AccountId, Token>,
    holders: BTreeMap<(AccountId, Token), &'a str>,
    /// Claims that a promotion took back: their tokens are given again.
    taken_back: BTreeSet<Claim<'a>>,
    /// Those of them whose account somebody else has sent for since.
    over: BTreeSet<Claim<'a>>,
    /// What a ticket copies.
    copies: BTreeMap<(AccountId, FollowerTicket), Copy>,
    made: BTreeMap<Copy, Vec<Made<'a>>>,
    late: BTreeSet<Copy>,
}

/// An account, a token of it, and to whom it was given.
type Claim<'a> = (AccountId, Token, &'a str);

#[derive(Debug)]
struct Made<'a> {
    ticket: FollowerTicket,
    at: Micros,
    sender: Option<&'a str>,
    opened: Decimal,
    left: Decimal,
    closed_at: Option<Micros>,
}

pub(super) fn check(evidence: &Evidence, report: &mut Report) {
    let late = late_copies(evidence.ledger.rows());
    let mut walk = Walk { late, taken_back: taken_back(&evidence.audits), ..Walk::default() };
    let mut arrivals: Vec<_> = evidence.ledger.orders().collect();
    arrivals.sort_by_key(|(_, request, _)| request.arrival);
    for (row, request, meta) in arrivals {
        report.orders += 1;
        walk.tokens(evidence, report, arrived_at(row, request), request, meta);
    }
    let mut sender = None;
    for row in evidence.ledger.rows() {
        match &row.fact {
            Fact::Login(_) | Fact::Ended(_) | Fact::Lost(_) => {}
            Fact::Request(request) => {
                sender = request.meta.as_ref().map(|meta| meta.node.as_str());
                if request.meta.is_some() {
                    walk.causes(evidence, report, sent_at(row, request), request);
                }
            }
            Fact::Trade(trade) => walk.trade(evidence, report, row, trade, sender),
        }
    }
    report.margin_min_us = evidence.ledger.deadline_margin_min_us();
    walk.extras(evidence, report);
}

/// The claims that a primary committed and the next one lacks. Nobody renews them, so they end by
/// their owners' clocks; the next claim may carry the same token, or a lower one.
fn taken_back(audits: &[Vec<AuditRow>]) -> BTreeSet<Claim<'_>> {
    let mut lost = BTreeSet::new();
    for primaries in audits.windows(2) {
        let kept: BTreeSet<Claim<'_>> = primaries[1].iter().filter_map(claim_of).collect();
        lost.extend(primaries[0].iter().filter_map(claim_of).filter(|claim| !kept.contains(claim)));
    }
    lost
}

fn claim_of(row: &AuditRow) -> Option<Claim<'_>> {
    let AuditFact::Lease { account, before, after, .. } = &row.fact else { return None };
    let account = AccountId::from_i64(*account).ok()?;
    let token = Token::from_i64(after.token).ok()?;
    (after.token > before.token).then_some((account, token, after.node.as_deref()?))
}

/// When the broker read it from its socket. A row is written when an order is carried out, which
/// a fault may delay.
pub(crate) fn sent_at(row: &LedgerRow, request: &RequestFact) -> Micros {
    earlier(row, request.sent_mono_us)
}

fn arrived_at(row: &LedgerRow, request: &RequestFact) -> Micros {
    earlier(row, request.arrived_mono_us)
}

fn earlier(row: &LedgerRow, mono_us: u64) -> Micros {
    Micros(row.at_us.0 - row.at_mono_us.saturating_sub(mono_us) as i64)
}

impl<'a> Walk<'a> {
    /// S1 and S2, in the order of arrival.
    fn tokens(
        &mut self,
        evidence: &Evidence,
        report: &mut Report,
        at: Micros,
        request: &RequestFact,
        meta: &'a OrderMeta,
    ) {
        let account = request.account;
        let node = meta.node.as_str();
        let find = |law, what| Finding { law, at, account: Some(account), copy: None, what };
        if self.over.contains(&(account, meta.token, node)) && !evidence.excuses(node, at) {
            let what = format!(
                "{node} sent under token {}, which a promotion took back, after the next owner",
                meta.token
            );
            report.findings.push(find(Law::S1, what));
        }
        let highest = self.highest.entry(account).or_insert(meta.token);
        let held = self.holders.get(&(account, *highest)).map(|by| (account, *highest, *by));
        let is_given_again = held.is_some_and(|claim| {
            claim.2 != node && meta.token <= claim.1 && self.taken_back.contains(&claim)
        });
        if let Some(claim) = held.filter(|_| is_given_again) {
            self.over.insert(claim);
            self.holders.insert((account, meta.token), node);
            *highest = meta.token;
        }
        if meta.token < *highest && !evidence.excuses(node, at) {
            let what = format!("{node} sent under token {} after token {highest}", meta.token);
            report.findings.push(find(Law::S1, what));
        }
        *highest = (*highest).max(meta.token);
        let holder = self.holders.entry((account, meta.token)).or_insert(node);
        if *holder != node {
            let what = format!("{node} and {holder} both sent under token {}", meta.token);
            report.findings.push(find(Law::S1, what));
        }
        if meta.deadline_margin_us < 0 && !evidence.excuses(node, at) {
            let late = -meta.deadline_margin_us;
            report
                .findings
                .push(find(Law::S2, format!("{node} sent {late} us after its deadline")));
        }
    }

    /// S5 to S7: an order has a cause.
    fn causes(&self, evidence: &Evidence, report: &mut Report, at: Micros, request: &RequestFact) {
        let account = Some(request.account);
        let sender = request.meta.as_ref().map(|meta| meta.node.as_str());
        let find = |law, copy, what: String| Finding { law, at, account, copy: Some(copy), what };
        match &request.instruction {
            Instruction::Open { comment, side, lots, .. } => {
                let Some((link, ticket)) = reconcile::tag::decode(comment) else {
                    let what = format!("an open without a tag: {comment:?}");
                    let law = Law::S6;
                    return report.findings.push(Finding { law, at, account, copy: None, what });
                };
                let copy = (link, ticket.get());
                if matches!(request.reply, OrderReply::Done(_))
                    && self.made.get(&copy).is_some_and(|made| {
                        made.iter().any(|m| m.closed_at.is_some_and(|closed| closed < at))
                    })
                {
                    report.findings.push(find(
                        Law::S5,
                        copy,
                        "opened again after it had ended".into(),
                    ));
                }
                if let Some(why) = no_cause_to_open(
                    evidence,
                    copy,
                    request.account,
                    (sender, at),
                    *side,
                    lots.get(),
                ) {
                    report.findings.push(find(Law::S6, copy, why));
                }
            }
            Instruction::Close { ticket, lots } => {
                let Some(copy) = self.copies.get(&(request.account, *ticket)) else {
                    // Gone already: the broker refuses it.
                    if matches!(request.reply, OrderReply::Done(_)) {
                        let what = format!("closed {ticket}, which is no copy");
                        let law = Law::S7;
                        report.findings.push(Finding { law, at, account, copy: None, what });
                    }
                    return;
                };
                if let Some(why) = self.no_cause_to_close(evidence, *copy, at, lots.is_some()) {
                    report.findings.push(find(Law::S7, *copy, why));
                }
            }
            Instruction::Modify { .. }
            | Instruction::Place { .. }
            | Instruction::ModifyPending { .. }
            | Instruction::Cancel { .. } => {}
        }
    }

    fn no_cause_to_close(
        &self,
        evidence: &Evidence,
        copy: Copy,
        at: Micros,
        is_part: bool,
    ) -> Option<String> {
        let life = evidence.life(copy.0, copy.1)?;
        let has_ended = life.closed_at.is_some_and(|closed| closed <= at);
        let is_smaller = life.volumes.iter().skip(1).any(|(since, _)| *since <= at);
        let is_doubled = self.made.get(&copy).is_some_and(|made| made.len() > 1);
        let is_late = self.late.contains(&copy);
        let has_cause = has_ended || is_doubled || is_late || (is_part && is_smaller);
        (!has_cause).then(|| {
            let what = if is_part { "a part was closed" } else { "closed" };
            format!("{what} while the master's trade was as it was opened, or still open")
        })
    }

    /// S4, S8, and what a ticket copies.
    fn trade(
        &mut self,
        evidence: &Evidence,
        report: &mut Report,
        row: &LedgerRow,
        trade: &TradeFact,
        sender: Option<&'a str>,
    ) {
        if trade.magic == 0 {
            return;
        }
        let known = self.copies.get(&(trade.account, trade.ticket)).copied();
        let tagged = || reconcile::tag::decode(&trade.comment).map(|(link, t)| (link, t.get()));
        let Some(copy) = known.or_else(tagged) else { return };
        let at = row.at_us;
        self.copies.insert((trade.account, trade.new_ticket.unwrap_or(trade.ticket)), copy);
        let made = self.made.entry(copy).or_default();
        match trade.event {
            TradeEventKind::Opened => {
                report.opens += 1;
                let lots = trade.lots.get();
                let (ticket, opened, left) = (trade.first_ticket, lots, lots);
                made.push(Made { ticket, at, sender, opened, left, closed_at: None });
            }
            TradeEventKind::Reduced | TradeEventKind::Closed => {
                let Some(one) = made.iter_mut().find(|one| one.ticket == trade.first_ticket) else {
                    return;
                };
                one.left -= trade.lots.get();
                if trade.event == TradeEventKind::Closed {
                    one.closed_at = Some(at);
                }
                if !self.late.contains(&copy)
                    && let Some(what) = wrong_rest(evidence, copy, at, one, trade.event)
                {
                    let account = Some(trade.account);
                    report.findings.push(Finding {
                        law: Law::S8,
                        at,
                        account,
                        copy: Some(copy),
                        what,
                    });
                }
            }
            TradeEventKind::Modified
            | TradeEventKind::Added
            | TradeEventKind::PendingPlaced
            | TradeEventKind::PendingModified
            | TradeEventKind::PendingCancelled
            | TradeEventKind::PendingFilled => {}
        }
    }

    /// S4: more than one copy of one ticket.
    fn extras(&self, evidence: &Evidence, report: &mut Report) {
        for (copy, made) in &self.made {
            for (place, extra) in made.iter().enumerate().skip(1) {
                report.duplicates += 1;
                let is_excused = made[..=place]
                    .iter()
                    .any(|one| one.sender.is_some_and(|sender| evidence.excuses(sender, extra.at)));
                let bound = extra.at.plus(EXTRA_CLOSED_WITHIN);
                let is_closed = made.iter().any(|one| {
                    one.closed_at.is_some_and(|closed| extra.at <= closed && closed <= bound)
                });
                if is_excused && is_closed && made.len() == 2 {
                    report.excused_extras += 1;
                    continue;
                }
                let what = format!("copy number {} of one trade: {made:?}", place + 1);
                let account = evidence.master_of(copy.0).map(|link| link.link.follower);
                let (law, at, copy) = (Law::S4, extra.at, Some(*copy));
                report.findings.push(Finding { law, at, account, copy, what });
            }
        }
    }
}

fn no_cause_to_open(
    evidence: &Evidence,
    (link, ticket): Copy,
    account: AccountId,
    (sender, at): (Option<&str>, Micros),
    side: Side,
    lots: Decimal,
) -> Option<String> {
    let Some(known) = evidence.master_of(link) else { return Some("there is no such link".into()) };
    if known.link.follower != account {
        return Some(format!("the link's follower is {}", known.link.follower));
    }
    let Some(life) = evidence.life(link, ticket).filter(|life| life.opened_at <= at) else {
        return Some("the master has opened no such trade".into());
    };
    if life.side != side {
        return Some(format!("{side:?}, the master's is {:?}", life.side));
    }
    let multiplier = known.link.multiplier;
    if !life.had_volume(at, |volume| volume * multiplier == lots) {
        return Some(format!("{lots} lots are {multiplier} times no volume of the master's trade"));
    }
    let closed = life.closed_at.filter(|closed| at > *closed)?;
    let late = at.since(closed);
    let is_delayed = sender.is_some_and(|node| evidence.is_delayed(node, at, LATE_SEND));
    (late > STALE_OPEN_MAX && !is_delayed)
        .then(|| format!("the master's trade had ended {late:?} before"))
}

/// S8: what is left is what the master's volume asks for, or nothing.
fn wrong_rest(
    evidence: &Evidence,
    (link, ticket): Copy,
    at: Micros,
    one: &Made<'_>,
    event: TradeEventKind,
) -> Option<String> {
    let (opened, left) = (one.opened, one.left);
    if event == TradeEventKind::Closed {
        return (left != Decimal::ZERO).then(|| format!("{left} of {opened} lots left at its end"));
    }
    let multiplier = evidence.master_of(link)?.link.multiplier;
    let life = evidence.life(link, ticket)?;
    let is_right =
        left > Decimal::ZERO && life.had_volume(at, |volume| volume * multiplier == left);
    (!is_right).then(|| format!("{left} of {opened} lots left, which is no volume of the master's"))
}
