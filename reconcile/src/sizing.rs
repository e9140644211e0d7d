//! Volumes: what a copy opens with, and what it is reduced to.

use crate::action::SkipReason;
use crate::input::LinkRules;
use rust_decimal::Decimal;
use schemas::{Funds, Lots, Micros, SymbolSpec};
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
pub fn size_copy(rules: &LinkRules, input: &SizeInput<'_>) -> Result<Lots, SkipReason> {
    let _ = (rules, input);
    todo!("the next commit")
}

/// Volume that an open copy should have now.
pub fn target_lots(
    copy_at_open: Lots,
    master_at_open: Lots,
    master_now: Lots,
    spec: &SymbolSpec,
) -> Lots {
    let _ = (copy_at_open, master_at_open, master_now, spec);
    todo!("the next commit")
}
