//! The sentences about what a history does not say.
//!
//! In: a parsed history. Out: the same, with [`History::unsaid`] complete.
//!
//! Parsers name what belongs to one row; this adds what follows from the layout or the whole file.

use super::timeline::build;
use super::{DealDirection, History, HistoryKind, MarginMode};

/// Adds the sentences that hold for the whole file.
pub(super) fn add(history: &mut History) {
    let mut sentences = vec![
        "the zone of the broker's clock is not stated: times are kept as printed".to_owned(),
        "contract sizes are not in the file: sizes that go with symbols are assumptions".to_owned(),
    ];
    if history.source.currency.is_none() {
        sentences.push("the account's currency is not stated".to_owned());
    }
    sentences.extend(of_layout(history).map(str::to_owned));
    if history.deals.iter().any(|deal| deal.direction != DealDirection::In)
        && history.kind == HistoryKind::Mt5Tester
    {
        sentences.push(of_deals(history).to_owned());
    }
    let open = history.trades.iter().filter(|trade| trade.close.is_none()).count();
    if open > 0 {
        sentences
            .push(format!("trades that are open at the end of the file and stay open: {open}"));
    }
    let built = build(history);
    if built.contradicted > 0 {
        sentences.push(format!(
            "trades or orders with a stop or target that is not played: {}; a price of the file \
             reaches it before their end, so it was set later than at the open, nobody knows when",
            built.contradicted
        ));
    }
    sentences.extend(built.refused_links);
    history.unsaid.append(&mut sentences);
}

fn of_layout(history: &History) -> impl Iterator<Item = &'static str> {
    let has_levels = history.trades.iter().any(|t| t.sl.is_some() || t.tp.is_some());
    let levels = "when stops and targets were moved is not recorded: the levels shown are final \
                  and are set at the open";
    let pending = "whether a trade came from a pending order is not recorded: all are played as \
                   opened at market";
    let none = "";
    let sentences = match history.kind {
        HistoryKind::Mt4Statement => [if has_levels { levels } else { none }, pending],
        HistoryKind::Mql5Signal => [
            if has_levels { levels } else { none },
            "signal files carry no tickets: numbers 1 to N were given in the order of open time; \
             whether a trade came from a pending order is not recorded",
        ],
        HistoryKind::Mt5History => [
            if has_levels { levels } else { none },
            if history.source.orders_by_state.is_empty() {
                "the report has no orders: pending orders are not known"
            } else {
                none
            },
        ],
        HistoryKind::Mt5Tester => [
            "when stops and targets were moved is not recorded: the levels are those of the \
             opening order",
            none,
        ],
        HistoryKind::Mt4Tester | HistoryKind::Simple => [none, none],
    };
    sentences.into_iter().filter(|sentence| !sentence.is_empty())
}

fn of_deals(history: &History) -> &'static str {
    match history.source.margin_mode {
        Some(MarginMode::Netting) => {
            "deals do not name positions: one position a symbol was assumed, as a deal turns one over"
        }
        Some(MarginMode::Hedging) | None => {
            "deals do not say which in an out closes: matched by symbol and opposite side to the \
             trade whose stop or target the comment names, else the same volume, else the oldest"
        }
    }
}
