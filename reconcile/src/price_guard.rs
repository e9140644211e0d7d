//! The price rule of late opens.
//!
//! Decides: whether a trade that the master opened a while ago may still be copied.
//!
//! Invariants (S6, H58):
//! 1. Unknown is no: no open price, no quote, an old quote, a spec without usable digits.
//! 2. A buy is judged by the ask, a sell by the bid, of the follower's own broker.
//! 3. The distance is measured in the follower's points, in both directions: a price that
//!    moved in our favour is another trade as well.

use crate::action::SkipReason;
use rust_decimal::Decimal;
use schemas::{Micros, Price, Quote, Side, SymbolSpec};
use std::time::Duration;

/// Most digits of a price; the size of a point needs them.
const DIGITS_MAX: u32 = 10;

/// What is known about the price of a late open.
#[derive(Debug, Clone, Copy)]
pub struct LateOpen<'a> {
    /// Direction of the copy.
    pub side: Side,
    /// At which price the master opened, if known.
    pub open_price: Option<Price>,
    /// Latest quote of the follower's broker, if there is one.
    pub quote: Option<&'a Quote>,
    /// The follower's symbol.
    pub spec: &'a SymbolSpec,
    /// Largest distance, in the follower's points.
    pub slippage_points: u32,
    /// The instant.
    pub now: Micros,
    /// Oldest quote that may be used.
    pub quote_age_max: Duration,
}

/// Whether a late open is inside the link's slippage; otherwise why not.
pub fn check_late_open(late: &LateOpen<'_>) -> Result<(), SkipReason> {
    let open = late.open_price.ok_or(SkipReason::UnknownOpenPrice)?;
    let point = point_of(late.spec).ok_or(SkipReason::BadSymbolSpec)?;
    let quote = late.quote.ok_or(SkipReason::NoQuote)?;
    if !is_fresh(quote, late.now, late.quote_age_max) {
        return Err(SkipReason::StaleQuote);
    }
    let price = match late.side {
        Side::Buy => quote.ask,
        Side::Sell => quote.bid,
    };
    let distance = (price.get() - open.get()).abs();
    if distance > Decimal::from(late.slippage_points) * point {
        return Err(SkipReason::LateOpenPriceMoved);
    }
    Ok(())
}

/// The quote is young enough to judge by.
pub(crate) fn is_fresh(quote: &Quote, now: Micros, age_max: Duration) -> bool {
    now.since(quote.at) <= age_max
}

/// The size of a point, if the digits are those of a price.
pub(crate) fn point_of(spec: &SymbolSpec) -> Option<Decimal> {
    (spec.digits <= DIGITS_MAX).then(|| spec.point())
}
