//! Pending orders and their copies.
//!
//! Decides: whether an order is placed for a master's order, and how a placed one is kept
//! like it. The copy of an order and the trade it becomes are one pair.
//!
//! Invariants:
//! 1. A copy that filled earlier or later than the master's order is kept: it follows the
//!    master's ticket, whatever the two are at the moment, and ends with it.
//! 2. An order that cannot be placed now is not placed and gets no final answer, as long as
//!    its fill can still be copied as a trade.
//!
//! Not covered: a changed volume of an order. Brokers cannot change it; after the fill the
//! copy is brought to its target like any other.

use crate::action::{CopyStep, SkipReason, WaitReason};
use crate::input::{LinkMode, LinkRules};
use crate::pair::Stops;
use crate::price_guard::{is_fresh, point_of};
use crate::stops::{prices_differ, settable, stops_differ, wanted_stops};
use crate::ticket::{
    CopyView, Decided, Facts, Market, MasterView, OpenDecision, is_late, size_of, usable_spec,
};
use rust_decimal::Decimal;
use schemas::{MasterPending, PendingKind, Price, Quote, SymbolSpec};

/// The kind of order that copies an order of this kind: reversed, the same price is waited for
/// from the same side of the market, for the other direction.
pub(crate) fn copy_kind(rules: &LinkRules, kind: PendingKind) -> PendingKind {
    if !rules.reverse {
        return kind;
    }
    match kind {
        PendingKind::BuyLimit => PendingKind::SellStop,
        PendingKind::SellLimit => PendingKind::BuyStop,
        PendingKind::BuyStop => PendingKind::SellLimit,
        PendingKind::SellStop => PendingKind::BuyLimit,
    }
}

/// Place a copy of an order, skip it for good, or leave it for now.
pub(crate) fn place_pending(
    rules: &LinkRules,
    order: &MasterPending,
    market: &Market<'_>,
) -> Result<OpenDecision, SkipReason> {
    let view = MasterView::Pending(order);
    let spec = usable_spec(rules, view, market)?;
    if rules.mode == LinkMode::CopyUntagged && is_late(order.placed_at, market) {
        // A copy of it may wait unseen, and would fill beside one that is opened for its fill.
        return Err(SkipReason::Untaggable);
    }
    let lots = size_of(rules, view, spec, market)?;
    let kind = copy_kind(rules, order.kind);
    let price = order.price.rounded(spec.digits);
    let quote = market.quotes.get(&spec.symbol);
    let quote = quote.filter(|q| is_fresh(q, market.now, market.limits.quote_age_max));
    if quote.is_some_and(|quote| !is_ahead(kind, price, quote, spec)) {
        return Ok(OpenDecision::Wait(WaitReason::PendingPricePassed));
    }
    let stops = if rules.copy_stops {
        let wanted = wanted_stops(view, rules.reverse, spec);
        settable(wanted, Stops::default(), kind.side(), Some(price), spec).0
    } else {
        Stops::default()
    };
    Ok(OpenDecision::Open(CopyStep::PlacePending {
        symbol: spec.symbol.clone(),
        kind,
        master_side: order.kind.side(),
        lots,
        master_lots: order.lots,
        price,
        stops,
    }))
}

/// The market has not reached the trigger price, and is as far from it as the broker wants.
fn is_ahead(kind: PendingKind, price: Price, quote: &Quote, spec: &SymbolSpec) -> bool {
    let (bid, ask, price) = (quote.bid.get(), quote.ask.get(), price.get());
    let distance = match kind {
        PendingKind::BuyLimit => ask - price,
        PendingKind::SellLimit => price - bid,
        PendingKind::BuyStop => price - ask,
        PendingKind::SellStop => bid - price,
    };
    let near = point_of(spec).map_or(Decimal::ZERO, |p| p * Decimal::from(spec.stops_level_points));
    distance > Decimal::ZERO && distance >= near
}

/// A waiting copy: bring price and stops to the master's.
pub(crate) fn manage_pending(
    rules: &LinkRules,
    view: MasterView<'_>,
    facts: &Facts,
    copy: &CopyView<'_>,
    spec: &SymbolSpec,
    decided: &mut Decided,
) {
    let Some(point) = point_of(spec) else { return decided.wait(WaitReason::SpecUnknown) };
    let price = match view {
        MasterView::Pending(order) => order.price.rounded(spec.digits),
        // The master's order filled first; ours still waits at its own price.
        MasterView::Position(_) => copy.price,
    };
    let price = if prices_differ(price, copy.price, point) { price } else { copy.price };
    let (stops, is_all) = if rules.copy_stops {
        let wanted = wanted_stops(view, facts.side != facts.master_side, spec);
        settable(wanted, copy.stops, copy.side, Some(price), spec)
    } else {
        (copy.stops, true)
    };
    if !is_all {
        decided.wait(WaitReason::StopsTooClose);
    }
    if price == copy.price && !stops_differ(stops, copy.stops, point) {
        return;
    }
    if facts.rejected.pending_price == Some(price) && facts.rejected.stops == Some(stops) {
        return decided.wait(WaitReason::StopsRefused);
    }
    decided.step(CopyStep::ModifyPending { ticket: copy.ticket, price, stops });
}
