//! Volumes: what a copy opens with, and what it is reduced to.
//!
//! The formula, in the follower's lots:
//!
//! ```text
//! full   = fixed lots
//!        | value x master lots at open
//!        | value x master lots at open x follower funds / master funds   (balance or equity)
//! full   x master contract size / follower contract size   if aligned; not for fixed lots
//! full   at most the broker's largest volume               (policy above_max)
//! volume = floor to step of  full x master lots now / master lots at open
//! ```
//!
//! and under the broker's smallest volume the policy below_min decides.
//!
//! Invariants (S8):
//! 1. Never above the largest volume, and a whole number of steps, or the smallest volume.
//! 2. Never rounded up, except to the smallest volume under [`BelowMin::UseMin`].
//! 3. Grows with the master's volume.
//! 4. A number that is not known is never taken as one: unknown funds, sizes and rates skip.
//!
//! Not covered: margin, leverage and currency rates. Where the two accounts have different
//! currencies a ratio is refused (`currency_differs`); put the rate into a multiplier instead.

use crate::action::SkipReason;
use crate::input::{AboveMax, BelowMin, LinkRules, Sizing};
use rust_decimal::Decimal;
use schemas::{Funds, Lots, Micros, Money, SymbolSpec};
use std::time::Duration;

/// What the volume of a copy depends on, besides the link's rules.
#[derive(Debug, Clone, Copy)]
pub struct SizeInput<'a> {
    /// The master's volume when it opened.
    pub master_lots_at_open: Lots,
    /// The master's volume now.
    pub master_lots: Lots,
    /// Units of the underlying in one lot of the master's symbol, if known.
    pub master_contract_size: Option<Decimal>,
    /// Money of the master, if known.
    pub master_funds: Option<&'a Funds>,
    /// Money of the follower, if known.
    pub follower_funds: Option<&'a Funds>,
    /// Step, smallest, largest volume and contract size of the follower's symbol.
    pub spec: &'a SymbolSpec,
    /// The instant.
    pub now: Micros,
    /// Oldest funds that a ratio may be computed from.
    pub funds_age_max: Duration,
}

/// Volume to open a copy with.
///
/// Shape: one master trade and one link in; one volume or one reason to skip out.
/// Units: lots of the follower's symbol; ratios have no unit; funds in the accounts' currency.
/// Errors: below_min, above_max, unknown_funds, no_funds, stale_equity, currency_differs,
/// unknown_contract_size, number_too_large.
/// Source: `copy_links` row, symbol spec of the follower's broker, funds of both sides.
/// Also what a judge expects of a copy: with the master's volume of that moment as both volumes.
pub fn size_copy(rules: &LinkRules, input: &SizeInput<'_>) -> Result<Lots, SkipReason> {
    let spec = input.spec;
    let mut full = full_volume(rules, input)?;
    if full.num <= Decimal::ZERO {
        return Err(SkipReason::BelowMin);
    }
    if full.is_above(spec.lots_max)? {
        match rules.above_max {
            AboveMax::Skip => return Err(SkipReason::AboveMax),
            AboveMax::Clamp => full = Fraction::whole(spec.lots_max.get()),
        }
    }
    let part = input.master_lots.min(input.master_lots_at_open);
    let now = full.times(part.get())?.over(input.master_lots_at_open.get())?;
    match Lots::floor_step(now.value()?, spec.lots_step) {
        Some(lots) if lots >= spec.lots_min => Ok(lots),
        Some(_) | None => match rules.below_min {
            BelowMin::UseMin if spec.lots_min <= spec.lots_max => Ok(spec.lots_min),
            BelowMin::UseMin | BelowMin::Skip => Err(SkipReason::BelowMin),
        },
    }
}

/// Volume that an open copy should have now: a target and not a share (H49), so a repeated or
/// lost answer changes nothing.
///
/// Shape: the two volumes at open and the master's now in; one volume out, never above
/// `copy_at_open`: a master that adds does not make its copy grow.
/// Policy for small rests (H50): while the master's trade is open its copy keeps at least the
/// broker's smallest volume; it ends when the master's does. A close of less than the smallest
/// volume is not sent (see `ticket`), as brokers refuse it.
pub fn target_lots(
    copy_at_open: Lots,
    master_at_open: Lots,
    master_now: Lots,
    volumes: impl Into<Volumes>,
) -> Lots {
    let volumes = volumes.into();
    if master_now >= master_at_open {
        return copy_at_open;
    }
    let share = Fraction::whole(copy_at_open.get())
        .times(master_now.get())
        .and_then(|product| product.over(master_at_open.get()))
        .and_then(|share| share.value())
        .expect("volumes are at most 10^6 with 8 digits, their product fits");
    let floor = Lots::floor_step(share, volumes.step).unwrap_or(volumes.min);
    floor.max(volumes.min).min(copy_at_open)
}

/// What a broker takes as a volume of one symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Volumes {
    /// Smallest change, in lots.
    pub step: Lots,
    /// Smallest volume, in lots.
    pub min: Lots,
}

impl From<&SymbolSpec> for Volumes {
    fn from(spec: &SymbolSpec) -> Self {
        Volumes { step: spec.lots_step, min: spec.lots_min }
    }
}

/// How the volume of an open copy stands to its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surplus {
    /// It has no more than its target, or less than one step more.
    None,
    /// It has more, and the broker closes no part as small as that (H50).
    TooSmall,
    /// So much is to be closed.
    Close(Lots),
}

/// What is to be closed of a copy that has `copy_now`: whole steps, unless the broker changed its step
/// under an open trade.
pub fn surplus(copy_now: Lots, target: Lots, volumes: impl Into<Volumes>) -> Surplus {
    let volumes = volumes.into();
    let more = copy_now.minus(target);
    match more.and_then(|more| Lots::floor_step(more.get(), volumes.step)) {
        None => Surplus::None,
        Some(lots) if lots < volumes.min => Surplus::TooSmall,
        Some(lots) => Surplus::Close(lots),
    }
}

/// A volume before rounding, divided only at the end so that exact results stay exact.
#[derive(Clone, Copy)]
struct Fraction {
    num: Decimal,
    den: Decimal,
}

impl Fraction {
    fn whole(num: Decimal) -> Fraction {
        Fraction { num, den: Decimal::ONE }
    }

    fn times(self, by: Decimal) -> Result<Fraction, SkipReason> {
        let num = self.num.checked_mul(by).ok_or(SkipReason::NumberTooLarge)?;
        Ok(Fraction { num, ..self })
    }

    fn over(self, by: Decimal) -> Result<Fraction, SkipReason> {
        let den = self.den.checked_mul(by).ok_or(SkipReason::NumberTooLarge)?;
        Ok(Fraction { den, ..self })
    }

    fn value(self) -> Result<Decimal, SkipReason> {
        self.num.checked_div(self.den).ok_or(SkipReason::NumberTooLarge)
    }

    fn is_above(self, lots: Lots) -> Result<bool, SkipReason> {
        let limit = lots.get().checked_mul(self.den).ok_or(SkipReason::NumberTooLarge)?;
        Ok(self.num > limit)
    }
}

fn full_volume(rules: &LinkRules, input: &SizeInput<'_>) -> Result<Fraction, SkipReason> {
    let master = input.master_lots_at_open.get();
    let scaled = match rules.sizing {
        Sizing::FixedLots(lots) => return Ok(Fraction::whole(lots.get())),
        Sizing::Multiplier(value) => Fraction::whole(master).times(value)?,
        Sizing::BalanceRatio(value) => {
            let (follower, master_funds) = both_funds(input, |funds| funds.balance)?;
            Fraction::whole(master).times(value)?.times(follower)?.over(master_funds)?
        }
        Sizing::EquityRatio(value) => {
            let (follower, master_funds) = both_funds(input, |funds| funds.equity)?;
            Fraction::whole(master).times(value)?.times(follower)?.over(master_funds)?
        }
    };
    if !rules.align_contract {
        return Ok(scaled);
    }
    match (input.master_contract_size, input.spec.contract_size) {
        (Some(of_master), Some(of_follower))
            if of_master > Decimal::ZERO && of_follower > Decimal::ZERO =>
        {
            scaled.times(of_master)?.over(of_follower)
        }
        _ => Err(SkipReason::UnknownContractSize),
    }
}

fn both_funds(
    input: &SizeInput<'_>,
    pick: fn(&Funds) -> Money,
) -> Result<(Decimal, Decimal), SkipReason> {
    let (Some(master), Some(follower)) = (input.master_funds, input.follower_funds) else {
        return Err(SkipReason::UnknownFunds);
    };
    let is_stale = |funds: &Funds| input.now.since(funds.at) > input.funds_age_max;
    if is_stale(master) || is_stale(follower) {
        return Err(SkipReason::StaleEquity);
    }
    if master.currency != follower.currency {
        return Err(SkipReason::CurrencyDiffers);
    }
    let (of_master, of_follower) = (pick(master).get(), pick(follower).get());
    if of_master <= Decimal::ZERO || of_follower <= Decimal::ZERO {
        return Err(SkipReason::NoFunds);
    }
    Ok((of_follower, of_master))
}
