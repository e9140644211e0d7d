//! Stop loss and take profit of a copy.
//!
//! Decides: which stops a copy should have, whether they differ from those it has, and which
//! of them the broker would take now.
//!
//! Invariants:
//! 1. Levels are compared after rounding to the follower's digits, with a tolerance of one
//!    point, so a broker that rounds does not cause an endless modify (H60).
//! 2. A reversed copy has the master's levels exchanged (case 35).
//! 3. A level nearer to the market than the broker allows is left out, never moved (case 24).
//!
//! Not covered: the freeze level; the broker's refusal is remembered instead.

use crate::pair::Stops;
use crate::price_guard::{is_fresh, point_of};
use crate::ticket::{Market, MasterView};
use rust_decimal::Decimal;
use schemas::{Price, Quote, Side, SymbolSpec};

/// The stops that a copy should have.
pub(crate) fn wanted_stops(view: MasterView<'_>, reversed: bool, spec: &SymbolSpec) -> Stops {
    let Stops { stop_loss, take_profit } = view.stops();
    let (stop_loss, take_profit) =
        if reversed { (take_profit, stop_loss) } else { (stop_loss, take_profit) };
    let rounded = |level: Option<Price>| level.map(|price| price.rounded(spec.digits));
    Stops { stop_loss: rounded(stop_loss), take_profit: rounded(take_profit) }
}

/// Two prices are more than a point apart.
pub(crate) fn prices_differ(a: Price, b: Price, point: Decimal) -> bool {
    (a.get() - b.get()).abs() > point
}

fn levels_differ(a: Option<Price>, b: Option<Price>, point: Decimal) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => prices_differ(a, b, point),
        (None, None) => false,
        (Some(_), None) | (None, Some(_)) => true,
    }
}

/// At least one of the levels is to be changed.
pub(crate) fn stops_differ(a: Stops, b: Stops, point: Decimal) -> bool {
    levels_differ(a.stop_loss, b.stop_loss, point)
        || levels_differ(a.take_profit, b.take_profit, point)
}

/// The price that a trade's stops are measured from: where it would be closed. Unknown without
/// a fresh quote; the broker judges then.
pub(crate) fn market_reference(
    side: Side,
    quote: Option<&Quote>,
    market: &Market<'_>,
) -> Option<Price> {
    let quote = quote.filter(|q| is_fresh(q, market.now, market.limits.quote_age_max))?;
    Some(match side {
        Side::Buy => quote.bid,
        Side::Sell => quote.ask,
    })
}

/// Of the wanted levels those that the broker would take now, and whether these are all.
/// A level that it would refuse stays as it is.
pub(crate) fn settable(
    wanted: Stops,
    current: Stops,
    side: Side,
    reference: Option<Price>,
    spec: &SymbolSpec,
) -> (Stops, bool) {
    let (Some(reference), Some(point)) = (reference, point_of(spec)) else {
        return (wanted, true);
    };
    let near = Decimal::from(spec.stops_level_points) * point;
    let below = |level: Price| reference.get() - level.get();
    let above = |level: Price| level.get() - reference.get();
    let is_far = |distance: Decimal| distance > Decimal::ZERO && distance >= near;
    let pick = |want: Option<Price>, has: Option<Price>, is_below: bool| match want {
        None => (None, true),
        Some(level) if !levels_differ(want, has, point) => (Some(has.unwrap_or(level)), true),
        Some(level) if is_far(if is_below { below(level) } else { above(level) }) => {
            (Some(level), true)
        }
        Some(_) => (has, false),
    };
    let is_buy = side == Side::Buy;
    let (stop_loss, loss_set) = pick(wanted.stop_loss, current.stop_loss, is_buy);
    let (take_profit, profit_set) = pick(wanted.take_profit, current.take_profit, !is_buy);
    (Stops { stop_loss, take_profit }, loss_set && profit_set)
}
