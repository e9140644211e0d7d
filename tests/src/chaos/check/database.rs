//! S9, S10, S16, S20 and L1 from what was committed; S1 to S3 once more, from the leases.

use super::broker::sent_at;
use super::{Evidence, Finding, Law, Report};
use crate::chaos::audit::{AuditFact, AuditRow, PairWrite};
use crate::chaos::timing;
use lockstep::lease::share::good_after;
use schemas::{AccountId, LinkId, Micros};
use std::collections::BTreeMap;
use std::time::Duration;
use uuid::Uuid;

/// A request may arrive so long after it was sent: half of the fence, which is there for it. Two
/// processes and two proxies on a machine that builds at the same time need more than a second.
const ON_THE_WAY: Duration = Duration::from_millis(timing::FENCE.as_millis() as u64 / 2);

/// When a renewal was committed, and until when it leased.
type Renewal = (Micros, Micros);

pub(super) fn check(evidence: &Evidence, report: &mut Report) {
    for rows in &evidence.audits {
        pairs(rows, report);
        leases(rows, report);
        takeovers(evidence, rows, report);
    }
    arrivals(evidence, report);
    releases(evidence, report);
}

fn account(id: i64) -> Option<AccountId> {
    AccountId::from_i64(id).ok()
}

/// S9 and S10.
fn pairs(rows: &[AuditRow], report: &mut Report) {
    let mut last: BTreeMap<Uuid, &PairWrite> = BTreeMap::new();
    for row in rows {
        match &row.fact {
            AuditFact::Pair(pair) => {
                let copy = LinkId::from_i64(pair.link).ok().map(|l| (l, pair.master_ticket as u64));
                let mut find = |law, what| {
                    let account = account(pair.follower);
                    report.findings.push(Finding { law, at: row.at, account, copy, what });
                };
                if pair.is_live() && pair.writer.token != pair.now.token {
                    let (writer, now) = (&pair.writer, &pair.now);
                    find(Law::S9, format!("a live pair of {writer:?} committed under {now:?}"));
                }
                if pair.live > 1 {
                    find(Law::S10, format!("{} live pairs of one ticket", pair.live));
                }
                if let Some(before) = last.insert(pair.id, pair)
                    && let Some(what) = wrong_step(before, pair)
                {
                    find(Law::S10, what);
                }
            }
            AuditFact::Status { account: id, writer, now, session } => {
                if writer.token != now.token {
                    let what = format!("status {session:?} of {writer:?} committed under {now:?}");
                    let (law, at, account, copy) = (Law::S9, row.at, account(*id), None);
                    report.findings.push(Finding { law, at, account, copy, what });
                }
            }
            AuditFact::Lease { .. } => {}
        }
    }
}

fn wrong_step(before: &PairWrite, after: &PairWrite) -> Option<String> {
    let rank = |pair: &PairWrite| match pair.state.as_str() {
        "sending" => 0,
        "open" => 1,
        "closing" => 2,
        _ => 3,
    };
    let key = |pair: &PairWrite| (pair.link, pair.master_ticket, pair.follower);
    if key(before) != key(after) {
        return Some(format!("a pair's id changed its meaning: {before:?}, then {after:?}"));
    }
    if !before.is_live() && before != after {
        return Some(format!("a row that had ended changed: {before:?}, then {after:?}"));
    }
    // A refused close goes back from closing to open, under a higher version.
    let goes_back =
        rank(after) < rank(before) && !(after.state == "open" && before.state == "closing");
    if goes_back {
        return Some(format!("{} after {}", after.state, before.state));
    }
    let position = |pair: &PairWrite| (pair.writer.token, pair.version);
    (position(after) < position(before))
        .then(|| format!("version {:?} after version {:?}", position(after), position(before)))
}

/// S3 and S16.
fn leases(rows: &[AuditRow], report: &mut Report) {
    for row in rows {
        let AuditFact::Lease { account: id, before, after, until_before, owned, .. } = &row.fact
        else {
            continue;
        };
        let mut find = |law, what| {
            let (at, account) = (row.at, account(*id));
            report.findings.push(Finding { law, at, account, copy: None, what });
        };
        let is_new = after.node.is_some() && after.token != before.token;
        if is_new && before.node.is_some() && until_before.is_some_and(|until| until > row.at) {
            find(Law::S3, format!("{after:?} claimed it before the lease of {before:?} had ended"));
        }
        if after.token < before.token {
            find(Law::S3, format!("the token fell from {} to {}", before.token, after.token));
        }
        if after.node.is_some() && *owned > i64::from(timing::CAPACITY) {
            find(Law::S16, format!("{:?} owns {owned} accounts", after.node));
        }
    }
}

/// S1 and S2 by the leases: a request under a token arrives while the database says that the
/// token's lease goes on for at least the fence.
fn arrivals(evidence: &Evidence, report: &mut Report) {
    let mut leases: BTreeMap<(i64, i64, &str), Vec<Renewal>> = BTreeMap::new();
    for row in evidence.audits.iter().flatten() {
        if let AuditFact::Lease { account, after, until: Some(until), .. } = &row.fact
            && let Some(node) = &after.node
        {
            let key = (*account, after.token, node.as_str());
            leases.entry(key).or_default().push((row.at, *until));
        }
    }
    let fence = timing::FENCE;
    for (row, request, meta) in evidence.ledger.orders() {
        let at = sent_at(row, request);
        let node = meta.node.as_str();
        let key = (request.account.as_i64(), meta.token.as_i64(), node);
        let Some(known) = leases.get(&key) else {
            let what = format!("{node} never had token {} by the database", meta.token);
            let (law, account) = (Law::S1, Some(request.account));
            report.findings.push(Finding { law, at, account, copy: None, what });
            continue;
        };
        // A renewal counts for its owner once it is committed, which is after its audit.
        let until =
            known.iter().filter(|(committed, _)| *committed <= at).map(|(_, until)| *until).max();
        let end = until.map_or(Micros(0), |until| Micros(until.0 - fence.as_micros() as i64));
        let allowed = end.plus(ON_THE_WAY);
        if at > allowed && !evidence.is_delayed(node, at, ON_THE_WAY) {
            let late = at.since(end);
            let what = format!(
                "{node} under token {}: arrived {late:?} after its trust in the lease must have ended",
                meta.token
            );
            let (law, account) = (Law::S2, Some(request.account));
            report.findings.push(Finding { law, at, account, copy: None, what });
        }
    }
}

/// S20: after a release nothing arrives under its token.
fn releases(evidence: &Evidence, report: &mut Report) {
    let mut released: BTreeMap<(i64, i64), Micros> = BTreeMap::new();
    for row in evidence.audits.iter().flatten() {
        if let AuditFact::Lease { account, before, after, .. } = &row.fact
            && before.node.is_some()
            && after.node.is_none()
        {
            released.entry((*account, before.token)).or_insert(row.at);
        }
    }
    for (row, request, meta) in evidence.ledger.orders() {
        let sent = sent_at(row, request);
        let key = (request.account.as_i64(), meta.token.as_i64());
        if let Some(at) = released.get(&key).filter(|at| sent > **at) {
            let after = sent.since(*at);
            let what =
                format!("{} sent {after:?} after it had released token {}", meta.node, meta.token);
            let (law, at, account) = (Law::S20, sent, Some(request.account));
            report.findings.push(Finding { law, at, account, copy: None, what });
        }
    }
}

/// When the lease that ends then was renewed for the last time.
fn renewed_at(until: Micros) -> Micros {
    Micros(until.0 - timing::LEASE.as_micros() as i64)
}

/// Tenures of an account that began since the last one that went well, and the present one's begin.
#[derive(Debug, Clone, Copy)]
struct Starts {
    count: u32,
    begun: Micros,
}

/// When accounts waited longer for their next owner because tenures ended early (H19), by account:
/// from the end of the lease to the claim.
fn waits(rows: &[AuditRow]) -> BTreeMap<i64, Vec<(Micros, Micros)>> {
    let mut waits: BTreeMap<i64, Vec<(Micros, Micros)>> = BTreeMap::new();
    let mut known: BTreeMap<i64, Starts> = BTreeMap::new();
    for row in rows {
        let AuditFact::Lease { account, before, after, until_before, .. } = &row.fact else {
            continue;
        };
        let starts = known.entry(*account).or_insert(Starts { count: 0, begun: row.at });
        let renewed = until_before.map_or(row.at, renewed_at);
        if before.node.is_some() && renewed.since(starts.begun) > good_after(timing::LEASE) {
            starts.count = 0;
        }
        if after.node.is_none() {
            starts.count = starts.count.saturating_sub(1);
        } else if after.token != before.token {
            if let (Some(until), 2..) =
                (until_before.filter(|_| before.node.is_some()), starts.count)
            {
                waits.entry(*account).or_default().push((until, row.at));
            }
            *starts = Starts { count: starts.count + 1, begun: row.at };
        }
    }
    waits
}

/// L1, and how long takeovers took. It is not promised for an account that waits longer because its
/// tenures ended early, nor while the master of its links does.
fn takeovers(evidence: &Evidence, rows: &[AuditRow], report: &mut Report) {
    let mut open: BTreeMap<i64, (i64, Micros)> = BTreeMap::new();
    let waits = waits(rows);
    let waited = |id: i64, from: Micros, until: Micros| {
        let followed = evidence.links.iter().filter(|l| l.link.follower.as_i64() == id);
        let masters = followed.map(|link| link.master.as_i64());
        let mut all = masters.chain([id]).filter_map(|id| waits.get(&id)).flatten();
        all.any(|(ended, claimed)| *ended <= until && from <= *claimed)
    };
    for row in rows {
        match &row.fact {
            AuditFact::Lease { account, before, after, until_before, .. } => {
                let is_new = after.node.is_some() && after.token != before.token;
                let ended = until_before.filter(|_| before.node.is_some());
                if let (true, Some(until)) = (is_new, ended) {
                    open.insert(*account, (after.token, renewed_at(until)));
                }
            }
            AuditFact::Status { account: id, writer, session, .. } => {
                let is_at_work = matches!(session.as_str(), "copying" | "leading");
                let Some((token, renewed)) = open.get(id).copied() else { continue };
                if !is_at_work || writer.token != token {
                    continue;
                }
                open.remove(id);
                let took = row.at.since(renewed);
                report.takeovers.push(took);
                // Something was broken when it was due, or the account had to wait.
                let due = renewed.plus(timing::LEASE);
                let excused = evidence.disturbed(Micros(due.0 - 1_000_000), row.at)
                    || evidence.lagged(renewed, row.at)
                    || waited(*id, renewed, row.at);
                if took > timing::TAKEOVER_MAX && !excused {
                    let what =
                        format!("taken over {took:?} after the last renewal of its old owner");
                    let (law, at, account) = (Law::L1, row.at, account(*id));
                    report.findings.push(Finding { law, at, account, copy: None, what });
                }
            }
            AuditFact::Pair(_) => {}
        }
    }
}
