//! Which trade rows of an MT4 statement are one trade that was closed in parts.
//!
//! In: the trades with `split_to` and `split_from`. Out: for each trade the row that carries it on.
//!
//! 1. A link needs both rows in the file, the same symbol and side, and a remainder that has the
//!    higher ticket and does not end before the part; one of the two comments is enough.
//! 2. A trade has at most one remainder and is the remainder of at most one, so rows form chains.
//! 3. A link that is not taken is reported in a sentence; both rows are then trades of their own.

use std::collections::{BTreeMap, BTreeSet};

use schemas::ids::MasterTicket;

use super::{History, HistoryTrade};

/// The chains of a history.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    /// Ticket of a part to the index of the trade that carries on.
    pub(super) next: BTreeMap<MasterTicket, usize>,
    /// Tickets that carry another trade on.
    pub(super) remainders: BTreeSet<MasterTicket>,
    /// Links that were not taken.
    pub(super) refused: Vec<String>,
}

pub(super) fn lineage(history: &History) -> Lineage {
    let by_ticket: BTreeMap<MasterTicket, (usize, &HistoryTrade)> =
        history.trades.iter().enumerate().map(|(i, t)| (t.ticket, (i, t))).collect();
    let mut links = BTreeSet::new();
    for trade in &history.trades {
        links.extend(trade.split_to.map(|to| (trade.ticket, to)));
        links.extend(trade.split_from.map(|from| (from, trade.ticket)));
    }
    let mut found = Lineage::default();
    for (part, rest) in links {
        let problem = match (by_ticket.get(&part), by_ticket.get(&rest)) {
            (Some((_, part_row)), Some((index, rest_row))) => {
                let problem = refusal(part_row, rest_row);
                let free = !found.next.contains_key(&part) && !found.remainders.contains(&rest);
                if problem.is_none() && free {
                    found.next.insert(part, *index);
                    found.remainders.insert(rest);
                    continue;
                }
                problem.unwrap_or("one of the two is tied to another row already")
            }
            _ => "only one of the two is in the file",
        };
        found.refused.push(format!(
            "a comment says that trade {part} was carried on by {rest}, but {problem}: \
             they are played as trades of their own"
        ));
    }
    found
}

fn refusal(part: &HistoryTrade, rest: &HistoryTrade) -> Option<&'static str> {
    let Some(part_end) = &part.close else { return Some("the part is still open") };
    if (&part.symbol, part.side) != (&rest.symbol, rest.side) {
        return Some("symbol or side differ");
    }
    // The broker gives the remainder a new number; this also keeps a chain from biting its tail.
    if rest.ticket <= part.ticket {
        return Some("the remainder has the lower number");
    }
    let ends_before = rest.close.as_ref().is_some_and(|end| end.at < part_end.at);
    ends_before.then_some("the remainder ends before the part")
}
