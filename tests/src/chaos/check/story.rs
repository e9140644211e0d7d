//! The records of one copy, or of one account around an instant, in the order of time.

use super::{Evidence, Finding};
use crate::chaos::audit::AuditFact;
use paper::ledger::{Fact, LedgerRow};
use paper::protocol::Instruction;
use schemas::{AccountId, FollowerTicket, LinkId, Micros};
use std::collections::BTreeSet;

/// Records of an account around an instant, where no ticket is known: so many microseconds each
/// way.
const AROUND_US: i64 = 4_000_000;
/// Longest story.
const LINES_MAX: usize = 60;

pub(super) fn tell(evidence: &Evidence, finding: &Finding) -> Vec<String> {
    let mut lines = match finding.copy {
        Some((link, ticket)) => of_copy(evidence, link, ticket),
        None => finding.account.map(|a| of_account(evidence, a, finding.at)).unwrap_or_default(),
    };
    for span in &evidence.spans {
        let (node, kind) = (span.node.as_deref().unwrap_or("-"), span.kind);
        if (finding.at.0 - span.until.0).abs() < 60_000_000 || span.until >= finding.at {
            lines.push((span.from, format!("fault {kind} of {node} begins")));
            lines.push((span.until, format!("fault {kind} of {node} is mended")));
        }
    }
    lines.sort();
    let skip = lines.len().saturating_sub(LINES_MAX);
    lines.into_iter().skip(skip).map(|(at, line)| format!("{} {line}", at.0)).collect()
}

fn of_copy(evidence: &Evidence, link: LinkId, ticket: u64) -> Vec<(Micros, String)> {
    let mut lines = Vec::new();
    if let Some(life) = evidence.life(link, ticket) {
        lines.push((life.opened_at, format!("master: {ticket} opened {:?}", life.side)));
        let volumes = life.volumes.iter();
        lines.extend(volumes.map(|(at, lots)| (*at, format!("master: {ticket} has {lots} lots"))));
        lines.extend(life.closed_at.map(|at| (at, format!("master: {ticket} closed"))));
    }
    let mut tickets: BTreeSet<(AccountId, FollowerTicket)> = BTreeSet::new();
    for row in evidence.ledger.rows() {
        if concerns(row, link, ticket, &mut tickets) {
            lines.push((row.at_us, format!("broker: {}", json(&row.fact))));
        }
    }
    for row in evidence.audits.iter().flatten() {
        if let AuditFact::Pair(pair) = &row.fact
            && pair.link == link.as_i64()
            && pair.master_ticket as u64 == ticket
        {
            lines.push((row.at, format!("database: {}", json(&row.fact))));
        }
    }
    let follower = evidence.master_of(link).map(|known| known.link.follower);
    if let Some(follower) = follower {
        lines.extend(tenures(evidence, follower));
    }
    lines
}

/// The row is about a copy of this trade; learns the copy's tickets on the way.
fn concerns(
    row: &LedgerRow,
    link: LinkId,
    ticket: u64,
    tickets: &mut BTreeSet<(AccountId, FollowerTicket)>,
) -> bool {
    let is_tag = |comment: &str| {
        reconcile::tag::decode(comment).is_some_and(|(l, t)| (l, t.get()) == (link, ticket))
    };
    match &row.fact {
        Fact::Login(_) | Fact::Ended(_) | Fact::Lost(_) => false,
        Fact::Request(request) => match &request.instruction {
            Instruction::Open { comment, .. } | Instruction::Place { comment, .. } => {
                is_tag(comment)
            }
            Instruction::Close { ticket, .. }
            | Instruction::Modify { ticket, .. }
            | Instruction::ModifyPending { ticket, .. }
            | Instruction::Cancel { ticket } => tickets.contains(&(request.account, *ticket)),
        },
        Fact::Trade(trade) => {
            let ours = is_tag(&trade.comment);
            if ours {
                tickets.insert((trade.account, trade.new_ticket.unwrap_or(trade.ticket)));
            }
            ours
        }
    }
}

fn tenures(evidence: &Evidence, account: AccountId) -> Vec<(Micros, String)> {
    let rows = evidence.audits.iter().flatten();
    rows.filter_map(|row| match &row.fact {
        AuditFact::Lease { account: id, before, after, .. }
            if *id == account.as_i64() && before != after =>
        {
            let node = after.node.as_deref().unwrap_or("nobody");
            Some((row.at, format!("lease: {node}, token {}", after.token)))
        }
        _ => None,
    })
    .collect()
}

fn of_account(evidence: &Evidence, account: AccountId, at: Micros) -> Vec<(Micros, String)> {
    let is_near = |when: Micros| (when.0 - at.0).abs() <= AROUND_US;
    let mut lines = tenures(evidence, account);
    for row in evidence.ledger.rows().iter().filter(|row| is_near(row.at_us)) {
        let whose = match &row.fact {
            Fact::Login(login) => login.account,
            Fact::Ended(ended) => Some(ended.account),
            Fact::Lost(lost) => Some(lost.account),
            Fact::Request(request) => Some(request.account),
            Fact::Trade(trade) => Some(trade.account),
        };
        if whose == Some(account) {
            lines.push((row.at_us, format!("broker: {}", json(&row.fact))));
        }
    }
    for record in evidence.bus.iter().filter(|r| r.master == account && is_near(r.at)) {
        lines.push((record.at, format!("bus: {}", json(record))));
    }
    for row in evidence.audits.iter().flatten().filter(|row| is_near(row.at)) {
        let (AuditFact::Lease { account: id, .. } | AuditFact::Status { account: id, .. }) =
            &row.fact
        else {
            continue;
        };
        if *id == account.as_i64() {
            lines.push((row.at, format!("database: {}", json(&row.fact))));
        }
    }
    lines
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| error.to_string())
}
