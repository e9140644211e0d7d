//! What a history shows about its symbols, for whoever declares them at a paper broker.
//!
//! In: a [`History`]. Out: one [`SymbolHint`] a symbol, in the order of names.
//!
//! 1. Digits, lots and step are what the file shows: a broker may allow more.
//! 2. The contract size is in no file. [`AssumedContract`] is a habit of brokers, marked as such.
//!
//! Not covered: stop levels, spreads, currencies of profit.

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use schemas::ids::Symbol;
use schemas::quantity::Lots;

use super::{History, TradeChangeKind};

/// A contract size that no file states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssumedContract {
    /// Units of the underlying in one lot.
    pub size: Decimal,
    /// Why this size.
    pub because: &'static str,
}

/// What a history shows about one symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SymbolHint {
    /// Symbol as printed.
    pub symbol: Symbol,
    /// Most digits after the point of any printed price.
    pub digits: u32,
    /// Largest volume of which all volumes of the file are whole multiples.
    pub lots_step: Lots,
    /// Smallest volume of an order, a part or a remainder.
    pub lots_min: Lots,
    /// Largest volume of an order or trade.
    pub lots_max: Lots,
    /// An assumption, not a fact of the file; `None` where there is no habit to go by.
    pub assumed_contract: Option<AssumedContract>,
}

/// Hints for every symbol that a trade or pending order of the history has.
pub fn symbols(history: &History) -> Vec<SymbolHint> {
    let mut volumes: BTreeMap<&Symbol, Vec<Lots>> = BTreeMap::new();
    for trade in &history.trades {
        let seen = volumes.entry(&trade.symbol).or_default();
        seen.push(trade.lots);
        seen.extend(trade.changes.iter().filter_map(|change| match change.kind {
            TradeChangeKind::Volume { lots, .. } => Some(lots),
            TradeChangeKind::Levels { .. } => None,
        }));
    }
    for pending in &history.pendings {
        volumes.entry(&pending.symbol).or_default().push(pending.lots);
    }
    let hint = |(symbol, seen): (&Symbol, Vec<Lots>)| {
        Some(SymbolHint {
            symbol: symbol.clone(),
            digits: history.price_digits.get(symbol).copied().unwrap_or(0),
            lots_step: common_step(&seen)?,
            lots_min: seen.iter().copied().min()?,
            lots_max: seen.iter().copied().max()?,
            assumed_contract: assumed_contract(symbol.as_str()),
        })
    };
    volumes.into_iter().filter_map(hint).collect()
}

/// The greatest common divisor of volumes.
fn common_step(seen: &[Lots]) -> Option<Lots> {
    let scale = seen.iter().map(|lots| lots.get().scale()).max()?;
    let units = seen.iter().map(|lots| {
        let value = lots.get();
        // A volume has at most 8 digits after the point and is at most a million.
        value.mantissa() * 10_i128.pow(scale.saturating_sub(value.scale()))
    });
    let step = units.fold(0, greatest_common_divisor);
    Lots::new(Decimal::try_from_i128_with_scale(step, scale).ok()?).ok()
}

fn greatest_common_divisor(a: i128, b: i128) -> i128 {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Currencies that brokers quote pairs of.
const CURRENCIES: [&str; 24] = [
    "AUD", "CAD", "CHF", "CNH", "CZK", "DKK", "EUR", "GBP", "HKD", "HUF", "ILS", "JPY", "MXN",
    "NOK", "NZD", "PLN", "RON", "RUB", "SEK", "SGD", "THB", "TRY", "USD", "ZAR",
];

/// Starts of names, longest first where one is the start of another.
const HABITS: [(&[&str], u32, &str); 5] = [
    (&["XAU", "GOLD"], 100, "gold is mostly quoted in lots of 100 ounces"),
    (&["XAG", "SILVER"], 5000, "silver is mostly quoted in lots of 5000 ounces"),
    (&["BTC", "ETH", "LTC", "XRP"], 1, "a lot of a coin is mostly one coin"),
    (
        &["XTI", "XBR", "WTI", "USOIL", "UKO", "BRENT"],
        100,
        "a lot of oil is 100 or 1000 barrels; the smaller is taken",
    ),
    (
        &["GER", "DE40", "DAX", "US30", "US500", "SPX", "NDX", "NAS", "UK100", "JP225", "FRA40"],
        1,
        "a lot of an index is mostly one unit a point",
    ),
];

fn assumed_contract(symbol: &str) -> Option<AssumedContract> {
    let name: String = symbol
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|letter| letter.to_ascii_uppercase())
        .collect();
    for (starts, size, because) in HABITS {
        if starts.iter().any(|start| name.starts_with(start)) {
            return Some(AssumedContract { size: Decimal::from(size), because });
        }
    }
    let pair = (name.get(..3)?, name.get(3..6)?);
    let known = CURRENCIES.contains(&pair.0) && CURRENCIES.contains(&pair.1);
    known.then(|| AssumedContract {
        size: Decimal::from(100_000),
        because: "a lot of a currency pair is mostly 100000 of the first currency",
    })
}
