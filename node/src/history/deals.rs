//! MT5 deals into trades, for reports without positions.
//!
//! In: the deals of a report, the levels of its orders, hedging or netting. Out: trades with their
//! partial closes, and sentences for what had to be chosen.
//!
//! 1. Deals are taken by time and number; the number is the order of execution, whatever the
//!    order of the rows.
//! 2. Hedging (also where nothing is said): each `in` of a new order opens a trade whose ticket is
//!    the order's number. An `out` closes trades of the other side: the one whose stop or target
//!    the comment names, else one of the same volume, else the oldest.
//! 3. Netting: one trade a symbol; `in` adds to it at the average price, `in/out` closes it and
//!    opens the rest under the new order's number.
//!
//! Not covered: an `out` of more than is open; the surplus is left out and named.

use std::collections::BTreeMap;

use schemas::event::CloseReason;
use schemas::ids::{MasterTicket, Symbol};
use schemas::position::Side;
use schemas::quantity::{Lots, Price};
use time::PrimitiveDateTime;

use super::cell::price_of;
use super::error::HistoryError;
use super::mt5::OrderLevels;
use super::{
    DealDirection, History, HistoryDeal, HistoryTrade, MarginMode, TradeChange, TradeChangeKind,
    TradeClose,
};

/// Digits of an average open price: the most a price on the wire can have.
const AVERAGE_PRICE_DIGITS: u32 = 10;

/// When, what, which side and at what price a trade was closed.
pub(super) type CloseKey = (PrimitiveDateTime, Symbol, Side, Price);

/// Why trades were closed, by the comments of the deals that did it. Where deals that cannot be
/// told apart disagree, the reason is unknown.
pub(super) fn reasons_of_closes(deals: &[HistoryDeal]) -> BTreeMap<CloseKey, CloseReason> {
    let mut reasons = BTreeMap::new();
    for deal in deals.iter().filter(|deal| deal.direction != DealDirection::In) {
        let key = (deal.at, deal.symbol.clone(), deal.side.opposite(), deal.price);
        let reason = reason_of(&deal.comment);
        let known = reasons.entry(key).or_insert(reason);
        if *known != reason {
            *known = CloseReason::Unknown;
        }
    }
    reasons
}

/// `sl 1.31795`, `[tp 4142.96]`, `so -10.57%`: the server's words for why a deal was made.
fn reason_of(comment: &str) -> CloseReason {
    match comment.trim_start_matches('[').split(' ').next() {
        Some("sl") => CloseReason::StopLoss,
        Some("tp") => CloseReason::TakeProfit,
        Some("so") => CloseReason::StopOut,
        _ => CloseReason::Unknown,
    }
}

/// The level that a server comment names.
fn level_of(comment: &str) -> Option<Price> {
    let reason = reason_of(comment);
    if !matches!(reason, CloseReason::StopLoss | CloseReason::TakeProfit) {
        return None;
    }
    let level = comment.split(' ').nth(1)?;
    price_of(level.trim_end_matches(']'))
}

/// A trade that is open while the deals are read.
struct OpenTrade {
    index: usize,
    left: Lots,
}

struct Matcher<'a> {
    file: String,
    orders: &'a BTreeMap<u64, OrderLevels>,
    netting: bool,
    trades: Vec<HistoryTrade>,
    /// Open trades of a symbol and side, oldest first.
    open: BTreeMap<(Symbol, Side), Vec<OpenTrade>>,
    unsaid: Vec<String>,
}

/// Fills `history.trades` from `history.deals`.
pub(super) fn open_trades_from(
    history: &mut History,
    orders: &BTreeMap<u64, OrderLevels>,
) -> Result<(), HistoryError> {
    let mut deals: Vec<&HistoryDeal> = history.deals.iter().collect();
    deals.sort_by_key(|deal| (deal.at, deal.id));
    let mut matcher = Matcher {
        file: history.source.file.clone(),
        orders,
        netting: history.source.margin_mode == Some(MarginMode::Netting),
        trades: Vec::new(),
        open: BTreeMap::new(),
        unsaid: Vec::new(),
    };
    for deal in deals {
        match deal.direction {
            DealDirection::In => matcher.open(deal, deal.lots)?,
            DealDirection::Out | DealDirection::OutBy => {
                let surplus = matcher.close(deal);
                matcher.note_surplus(deal, surplus);
            }
            DealDirection::InOut => {
                if let Some(rest) = matcher.close(deal) {
                    matcher.open(deal, rest)?;
                }
            }
        }
    }
    history.trades = matcher.trades;
    history.unsaid.append(&mut matcher.unsaid);
    Ok(())
}

impl Matcher<'_> {
    fn row_error(&self, deal: &HistoryDeal, problem: String) -> HistoryError {
        HistoryError::Row { file: self.file.clone(), row: deal.row, problem }
    }

    fn open(&mut self, deal: &HistoryDeal, lots: Lots) -> Result<(), HistoryError> {
        let ticket = MasterTicket::new(deal.order)
            .map_err(|error| self.row_error(deal, error.to_string()))?;
        let side_open = self.open.entry((deal.symbol.clone(), deal.side)).or_default();
        let same = |open: &&mut OpenTrade| {
            let known = self.trades.get(open.index);
            self.netting || known.is_some_and(|trade| trade.ticket == ticket)
        };
        if let Some(open) = side_open.iter_mut().find(same) {
            let trade = self.trades.get_mut(open.index);
            let total = trade.and_then(|trade| add_to(trade, open.left, deal, lots));
            return match total {
                Some(total) => {
                    open.left = total;
                    Ok(())
                }
                None => Err(self.row_error(deal, "adds up to too many lots".to_owned())),
            };
        }
        side_open.push(OpenTrade { index: self.trades.len(), left: lots });
        let levels = self.orders.get(&deal.order);
        self.trades.push(HistoryTrade {
            row: deal.row,
            ticket,
            side: deal.side,
            lots,
            symbol: deal.symbol.clone(),
            opened_at: deal.at,
            opened_seq: Some(deal.id),
            open_price: deal.price,
            sl: levels.and_then(|levels| levels.sl),
            tp: levels.and_then(|levels| levels.tp),
            changes: Vec::new(),
            close: None,
            last_price: None,
            magic: None,
            comment: deal.comment.clone(),
            split_to: None,
            split_from: None,
        });
        Ok(())
    }

    /// Closes trades with the deal's volume; what is left of the volume comes back.
    fn close(&mut self, deal: &HistoryDeal) -> Option<Lots> {
        let key = (deal.symbol.clone(), deal.side.opposite());
        let reason = reason_of(&deal.comment);
        let mut volume = Some(deal.lots);
        while let Some(wanted) = volume {
            let Some(open) = self.open.get_mut(&key).filter(|open| !open.is_empty()) else {
                return volume;
            };
            let chosen = choose(open, &self.trades, wanted, level_of(&deal.comment));
            let candidate = open.remove(chosen);
            let Some(trade) = self.trades.get_mut(candidate.index) else { return volume };
            volume = wanted.minus(candidate.left);
            let Some(left) = candidate.left.minus(wanted) else {
                let (at, price, seq) = (deal.at, deal.price, Some(deal.id));
                trade.close = Some(TradeClose { at, price, reason, seq });
                continue;
            };
            let open_price = open_price_now(trade);
            let kind = TradeChangeKind::Volume { lots: left, price: deal.price, open_price };
            trade.changes.push(TradeChange { at: deal.at, seq: Some(deal.id), kind });
            open.insert(chosen, OpenTrade { index: candidate.index, left });
        }
        None
    }

    fn note_surplus(&mut self, deal: &HistoryDeal, surplus: Option<Lots>) {
        if let Some(surplus) = surplus {
            self.unsaid.push(format!(
                "deal {} closes {surplus} lots of {} that no deal of the file opened: left out",
                deal.id, deal.symbol
            ));
        }
    }
}

/// Open price after what happened so far.
fn open_price_now(trade: &HistoryTrade) -> Price {
    let changed = trade.changes.iter().rev().find_map(|change| match change.kind {
        TradeChangeKind::Volume { open_price, .. } => Some(open_price),
        TradeChangeKind::Levels { .. } => None,
    });
    changed.unwrap_or(trade.open_price)
}

/// Adds volume to a trade; the lots after it, or `None` if no volume can be that large.
fn add_to(trade: &mut HistoryTrade, left: Lots, deal: &HistoryDeal, lots: Lots) -> Option<Lots> {
    let total = Lots::new(left.get() + lots.get()).ok()?;
    let cost = open_price_now(trade).get().checked_mul(left.get())?;
    let cost = cost.checked_add(deal.price.get().checked_mul(lots.get())?)?;
    let average = cost.checked_div(total.get())?.round_dp(AVERAGE_PRICE_DIGITS);
    let open_price = Price::new(average).ok()?;
    let kind = TradeChangeKind::Volume { lots: total, price: deal.price, open_price };
    trade.changes.push(TradeChange { at: deal.at, seq: Some(deal.id), kind });
    Some(total)
}

/// Which open trade an `out` closes.
fn choose(
    open: &[OpenTrade],
    trades: &[HistoryTrade],
    volume: Lots,
    level: Option<Price>,
) -> usize {
    let fits = |candidate: &OpenTrade| {
        let named = trades
            .get(candidate.index)
            .is_some_and(|t| level.is_some() && (t.sl == level || t.tp == level));
        (named, candidate.left == volume)
    };
    // `max_by_key` takes the last of equals; reversed, that is the oldest.
    let best = open.iter().enumerate().rev().max_by_key(|(_, candidate)| fits(candidate));
    best.map_or(0, |(index, _)| index)
}
