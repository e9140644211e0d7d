//! A history as the ordered changes of an account.
//!
//! In: a [`History`]. Out: [`Step`]s with the events a master publishes.
//!
//! 1. Steps are in the order of time; the events of one ticket are in their own order, also within
//!    a second. Steps of one second have one offset: a burst stays a burst.
//! 2. Within a second closes and partial closes come first, then deletions and modifications, then
//!    opens and fills by ticket, then new orders. Files print a second and no order in it; with
//!    closes first an account never holds more than it did, and a close is never late. What opens
//!    and closes in one second opens first.
//!    Files with an order of their own are played in it: MT4 testers number their events, MT5
//!    deals carry the number of their execution.
//! 3. A trade that MT4 split is one ticket, the first; [`Step::broker_ticket`] is the number the
//!    remainder has at the broker.
//! 4. Trades and orders without an end in the file have none here.
//! 5. Where only the last stop and target are known ([`super::Levels::Final`]) they are set at the
//!    open, but for levels that a price of the file contradicts: one on the wrong side of the open
//!    price, or one that another step's price reaches while the trade is open. Such a level was set
//!    later, nobody knows when, and is left out. So feeding the prices of the steps triggers no
//!    stop before the master's own close.
//!
//! Not covered: when to play a step (the driver scales offsets), and spread.

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use schemas::event::Change;
use schemas::ids::{MasterTicket, Micros, Symbol};
use schemas::position::{MasterPending, MasterPosition, PendingKind, Side};
use schemas::quantity::{Lots, Price};
use time::PrimitiveDateTime;

use super::lineage::{Lineage, lineage};
use super::{History, HistoryPending, HistoryTrade, Levels, PendingOutcome, TradeChangeKind};

/// One change of the master's account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Microseconds since the first step; equal for all steps of a burst.
    pub offset_us: u64,
    /// Broker's clock.
    pub at: PrimitiveDateTime,
    /// What changed, with the state after it. `opened_at` and `placed_at` in it are the broker's
    /// clock read as if it were UTC, as no file states a zone; see [`Step::restamped`].
    pub change: Change,
    /// The broker's number now: another than the event's ticket after an MT4 partial close.
    pub broker_ticket: MasterTicket,
    /// A market price that the file shows at this moment, for a driver that feeds quotes.
    pub quote: Option<(Symbol, Price)>,
}

impl Step {
    /// The change with the times of its state translated, by the driver that plays it.
    pub fn restamped(&self, stamp: impl Fn(Micros) -> Micros) -> Change {
        let mut change = self.change.clone();
        match &mut change {
            Change::PositionOpened(position)
            | Change::PositionModified(position)
            | Change::PendingFilled(position)
            | Change::VolumeChanged { position, .. }
            | Change::PositionClosed { position, .. } => {
                position.opened_at = stamp(position.opened_at);
            }
            Change::PendingPlaced(order)
            | Change::PendingModified(order)
            | Change::PendingCancelled(order) => order.placed_at = stamp(order.placed_at),
        }
        change
    }
}

/// The ordered changes of the account.
pub fn timeline(history: &History) -> Vec<Step> {
    build(history).steps
}

/// A timeline and what was left out of it.
pub(super) struct Built {
    pub(super) steps: Vec<Step>,
    /// Trades and orders of which a level was left out (invariant 5).
    pub(super) contradicted: usize,
    /// Links between rows that were not taken.
    pub(super) refused_links: Vec<String>,
}

pub(super) fn build(history: &History) -> Built {
    let lineage = lineage(history);
    let filled: BTreeMap<MasterTicket, &HistoryPending> = history
        .pendings
        .iter()
        .filter(|pending| pending.outcome == PendingOutcome::Filled)
        .map(|pending| (pending.ticket, pending))
        .collect();
    let mut drafts = Vec::new();
    for trade in history.trades.iter().filter(|t| !lineage.remainders.contains(&t.ticket)) {
        let mut own = Vec::new();
        let pending = filled.get(&trade.ticket);
        if let Some(pending) = pending {
            draft_pending(pending, &mut own);
        }
        draft_trade(history, &lineage, trade, pending.is_some(), &mut own);
        keep_own_order(&mut own);
        drafts.append(&mut own);
    }
    for pending in history.pendings.iter().filter(|p| p.outcome != PendingOutcome::Filled) {
        let mut own = Vec::new();
        draft_pending(pending, &mut own);
        keep_own_order(&mut own);
        drafts.append(&mut own);
    }
    drafts.sort_by_key(|draft| (draft.at, draft.group, draft.tie, draft.ticket, draft.causal));
    let contradicted = match history.source.levels {
        Levels::Final => leave_out_contradicted(&mut drafts),
        Levels::AtOpen => 0,
    };
    let start = drafts.first().map(|draft| draft.at);
    let steps = drafts
        .into_iter()
        .map(|draft| Step {
            offset_us: start.map_or(0, |start| micros_between(start, draft.at)),
            at: draft.at,
            change: draft.change,
            broker_ticket: draft.broker_ticket,
            quote: draft.quote,
        })
        .collect();
    Built { steps, contradicted, refused_links: lineage.refused }
}

fn micros_between(start: PrimitiveDateTime, at: PrimitiveDateTime) -> u64 {
    u64::try_from((at - start).whole_microseconds()).unwrap_or(0)
}

fn micros_of(at: PrimitiveDateTime) -> Micros {
    Micros(i64::try_from(at.assume_utc().unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX))
}

// Places within a second; see invariant 2.
const ENDINGS: u32 = 0;
const ALTERATIONS: u32 = 1;
const OPENINGS: u32 = 2;
const PLACEMENTS: u32 = 3;

/// A step that is not in its place yet.
struct Draft {
    at: PrimitiveDateTime,
    group: u32,
    /// The file's own number of the event, else the ticket.
    tie: u64,
    has_seq: bool,
    ticket: MasterTicket,
    /// Place among the events of the ticket.
    causal: usize,
    change: Change,
    broker_ticket: MasterTicket,
    quote: Option<(Symbol, Price)>,
}

/// When something happened, in the file's words.
#[derive(Clone, Copy)]
struct When {
    at: PrimitiveDateTime,
    seq: Option<u64>,
    broker_ticket: MasterTicket,
}

fn push(
    own: &mut Vec<Draft>,
    when: When,
    group: u32,
    change: Change,
    quote: Option<(Symbol, Price)>,
) {
    let ticket = change.ticket();
    own.push(Draft {
        at: when.at,
        // What the file numbers is played in that order, whatever it is.
        group: if when.seq.is_some() { OPENINGS } else { group },
        tie: when.seq.unwrap_or(ticket.get()),
        has_seq: when.seq.is_some(),
        ticket,
        causal: own.len(),
        change,
        broker_ticket: when.broker_ticket,
        quote,
    });
}

fn draft_trade(
    history: &History,
    lineage: &Lineage,
    head: &HistoryTrade,
    from_pending: bool,
    own: &mut Vec<Draft>,
) {
    let mut legs = vec![head];
    while let Some(next) = legs.last().and_then(|leg| lineage.next.get(&leg.ticket)) {
        legs.extend(history.trades.get(*next));
    }
    let total = sum_of(&legs).unwrap_or(head.lots);
    let mut state = MasterPosition {
        ticket: head.ticket,
        symbol: head.symbol.clone(),
        side: head.side,
        lots: total,
        lots_at_open: total,
        open_price: Some(head.open_price),
        stop_loss: head.sl,
        take_profit: head.tp,
        opened_at: micros_of(head.opened_at),
        contract_size: None,
        is_copy: false,
    };
    let quote = |price: Price| Some((head.symbol.clone(), price));
    let opened = match from_pending {
        true => Change::PendingFilled(state.clone()),
        false => Change::PositionOpened(state.clone()),
    };
    let when = When { at: head.opened_at, seq: head.opened_seq, broker_ticket: head.ticket };
    push(own, when, OPENINGS, opened, quote(head.open_price));
    for (index, leg) in legs.iter().enumerate() {
        let later = legs.get(index + 1..).unwrap_or_default();
        for change in &leg.changes {
            let when = When { at: change.at, seq: change.seq, broker_ticket: leg.ticket };
            match &change.kind {
                TradeChangeKind::Levels { sl, tp } => {
                    (state.stop_loss, state.take_profit) = (*sl, *tp);
                    push(own, when, ALTERATIONS, Change::PositionModified(state.clone()), None);
                }
                TradeChangeKind::Volume { lots, price, open_price } => {
                    let previous_lots = state.lots;
                    let rest = sum_of(later).map_or(lots.get(), |later| later.get() + lots.get());
                    state.lots = Lots::new(rest).unwrap_or(*lots);
                    state.open_price = Some(*open_price);
                    let group = if state.lots < previous_lots { ENDINGS } else { OPENINGS };
                    let position = state.clone();
                    let change = Change::VolumeChanged { position, previous_lots };
                    push(own, when, group, change, quote(*price));
                }
            }
        }
        let Some(close) = &leg.close else { continue };
        let when = When { at: close.at, seq: close.seq, broker_ticket: leg.ticket };
        match later.first() {
            None => {
                let (price, reason) = (Some(close.price), close.reason);
                let change = Change::PositionClosed { position: state.clone(), price, reason };
                push(own, when, ENDINGS, change, quote(close.price));
            }
            Some(next) => {
                let previous_lots = state.lots;
                state.lots = sum_of(later).unwrap_or(next.lots);
                (state.stop_loss, state.take_profit) = (next.sl, next.tp);
                let when = When { broker_ticket: next.ticket, ..when };
                let change = Change::VolumeChanged { position: state.clone(), previous_lots };
                push(own, when, ENDINGS, change, quote(close.price));
            }
        }
    }
}

fn sum_of(legs: &[&HistoryTrade]) -> Option<Lots> {
    let total: Decimal = legs.iter().map(|leg| leg.lots.get()).sum();
    Lots::new(total).ok()
}

fn draft_pending(pending: &HistoryPending, own: &mut Vec<Draft>) {
    let mut state = MasterPending {
        ticket: pending.ticket,
        symbol: pending.symbol.clone(),
        kind: pending.kind,
        lots: pending.lots,
        price: pending.price,
        stop_loss: pending.sl,
        take_profit: pending.tp,
        placed_at: micros_of(pending.placed_at),
        contract_size: None,
        is_copy: false,
    };
    let when =
        When { at: pending.placed_at, seq: pending.placed_seq, broker_ticket: pending.ticket };
    push(own, when, PLACEMENTS, Change::PendingPlaced(state.clone()), None);
    for change in &pending.changes {
        state.price = change.price;
        (state.stop_loss, state.take_profit) = (change.sl, change.tp);
        let when = When { at: change.at, seq: change.seq, ..when };
        push(own, when, ALTERATIONS, Change::PendingModified(state.clone()), None);
    }
    if let PendingOutcome::Cancelled { at, market_price, seq } = &pending.outcome {
        // An order can be deleted because its trigger failed (no money): a price that reaches it
        // would fill the copies of it just before they are deleted.
        let quote = market_price
            .filter(|market| !reaches_order(state.kind, state.price, *market))
            .map(|market| (pending.symbol.clone(), market));
        let when = When { at: *at, seq: *seq, ..when };
        push(own, when, ALTERATIONS, Change::PendingCancelled(state), quote);
    }
}

/// Whether a market price triggers an order.
pub(super) fn reaches_order(kind: PendingKind, price: Price, market: Price) -> bool {
    match kind {
        PendingKind::BuyLimit | PendingKind::SellStop => market <= price,
        PendingKind::SellLimit | PendingKind::BuyStop => market >= price,
    }
}

/// Moves an event behind its predecessor of the same ticket where both fall in one second.
fn keep_own_order(own: &mut [Draft]) {
    // An order that is placed and filled in one second goes before the numbered deals.
    for index in 1..own.len() {
        let Some([first, next]) = own.get_mut(index - 1..=index) else { continue };
        if first.at == next.at && !first.has_seq && next.has_seq && first.group == PLACEMENTS {
            first.group = ALTERATIONS;
        }
    }
    for index in 1..own.len() {
        let Some([before, event]) = own.get_mut(index - 1..=index) else { continue };
        let in_order = (before.group, before.tie) < (event.group, event.tie);
        if before.at == event.at && !in_order {
            event.group = before.group + 1;
        }
    }
}

/// Whether a price would trigger a stop or a target.
fn reaches(side: Side, stop: Option<Price>, target: Option<Price>, market: Price) -> (bool, bool) {
    let (above, below) = match side {
        Side::Buy => (target, stop),
        Side::Sell => (stop, target),
    };
    let reached_above = above.is_some_and(|level| market >= level);
    let reached_below = below.is_some_and(|level| market <= level);
    match side {
        Side::Buy => (reached_below, reached_above),
        Side::Sell => (reached_above, reached_below),
    }
}

/// Invariant 5; returns how many trades and orders lost a level.
fn leave_out_contradicted(drafts: &mut [Draft]) -> usize {
    let mut prices: BTreeMap<Symbol, Vec<(usize, Price)>> = BTreeMap::new();
    let mut of_ticket: BTreeMap<MasterTicket, Vec<usize>> = BTreeMap::new();
    for (index, draft) in drafts.iter().enumerate() {
        if let Some((symbol, price)) = &draft.quote {
            prices.entry(symbol.clone()).or_default().push((index, *price));
        }
        of_ticket.entry(draft.ticket).or_default().push(index);
    }
    let mut contradicted = 0;
    for indexes in of_ticket.values() {
        let mut lost = false;
        let mut levels = None;
        for (place, index) in indexes.iter().enumerate() {
            let until = indexes.get(place + 1).copied().unwrap_or(usize::MAX);
            let Some(draft) = drafts.get_mut(*index) else { continue };
            match &mut draft.change {
                Change::PositionClosed { position, .. } => {
                    (position.stop_loss, position.take_profit) =
                        levels.unwrap_or((position.stop_loss, position.take_profit));
                }
                Change::PositionOpened(position)
                | Change::PositionModified(position)
                | Change::PendingFilled(position)
                | Change::VolumeChanged { position, .. } => {
                    let known = prices.get(&position.symbol).map_or(&[][..], Vec::as_slice);
                    // The step's own price counts: a level must be valid when it is set.
                    let from = known.partition_point(|(at, _)| at < index);
                    let seen = known.get(from..).unwrap_or_default().iter();
                    let seen = seen.take_while(|(at, _)| *at < until).map(|(_, price)| *price);
                    lost |= clear_levels(
                        position.side,
                        &mut position.stop_loss,
                        &mut position.take_profit,
                        seen,
                    );
                    levels = Some((position.stop_loss, position.take_profit));
                }
                Change::PendingPlaced(order)
                | Change::PendingModified(order)
                | Change::PendingCancelled(order) => {
                    let (side, price) = (order.kind.side(), order.price);
                    let (stop, target) = (&mut order.stop_loss, &mut order.take_profit);
                    lost |= clear_levels(side, stop, target, std::iter::once(price));
                }
            }
        }
        contradicted += usize::from(lost);
    }
    contradicted
}

/// Removes the levels that one of the prices reaches; true if there was one.
fn clear_levels(
    side: Side,
    stop: &mut Option<Price>,
    target: &mut Option<Price>,
    prices: impl Iterator<Item = Price>,
) -> bool {
    let mut lost = false;
    for price in prices {
        if stop.is_none() && target.is_none() {
            break;
        }
        let (stop_reached, target_reached) = reaches(side, *stop, *target, price);
        if stop_reached {
            *stop = None;
        }
        if target_reached {
            *target = None;
        }
        lost |= stop_reached || target_reached;
    }
    lost
}
