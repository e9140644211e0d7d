//! Exact decimals: volumes, prices, money.
//!
//! Invariants:
//! 1. No float takes part, neither in memory nor on the wire; NaN and infinity cannot be written.
//! 2. The wire form is decimal text without exponent, thousands separator or plus sign.
//! 3. Two equal values have one canonical text (no trailing zeros), so digests agree.

use crate::ids::shorten;
use crate::text::from_text;
use rust_decimal::Decimal;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Why a text or number is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not plain decimal text.
    #[error("{kind} must be plain decimal text such as \"1.25\", got {value:?}")]
    NotDecimal {
        /// Which kind of quantity.
        kind: &'static str,
        /// What was given, shortened.
        value: String,
    },
    /// A decimal, but outside the range.
    #[error("{kind} must be {range}, got {value}")]
    OutOfRange {
        /// Which kind of quantity.
        kind: &'static str,
        /// The range in words.
        range: &'static str,
        /// What was given.
        value: Decimal,
    },
    /// More digits after the point than any platform has.
    #[error("{kind} has more than {max} digits after the point: {value}")]
    TooFine {
        /// Which kind of quantity.
        kind: &'static str,
        /// Most digits after the point.
        max: u32,
        /// What was given.
        value: Decimal,
    },
}

fn parse(kind: &'static str, text: &str) -> Result<Decimal, QuantityError> {
    let not_decimal = || QuantityError::NotDecimal { kind, value: shorten(text) };
    let digits = text.strip_prefix('-').unwrap_or(text);
    let plain = digits.starts_with(|c: char| c.is_ascii_digit())
        && digits.ends_with(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || c == '.')
        && text.len() <= 32;
    if !plain {
        return Err(not_decimal());
    }
    Decimal::from_str_exact(text).map_err(|_| not_decimal())
}

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $scale:literal, $range:literal, $ok:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Decimal);

        impl $name {
            /// Checks range and precision.
            pub fn new(value: Decimal) -> Result<Self, QuantityError> {
                let ok: fn(Decimal) -> bool = $ok;
                let value = value.normalize();
                if !ok(value) {
                    return Err(QuantityError::OutOfRange { kind: $kind, range: $range, value });
                }
                if value.scale() > $scale {
                    return Err(QuantityError::TooFine { kind: $kind, max: $scale, value });
                }
                Ok(Self(value))
            }

            /// The exact decimal.
            pub const fn get(self) -> Decimal {
                self.0
            }
        }

        impl FromStr for $name {
            type Err = QuantityError;
            fn from_str(text: &str) -> Result<Self, QuantityError> {
                Self::new(parse($kind, text)?)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                from_text(deserializer, concat!($kind, " as decimal text"))
            }
        }
    };
}

quantity!(
    /// A volume in lots of its symbol. Always above zero: no volume is said by leaving it out.
    Lots, "lots", 8, "above 0 and at most 1000000",
    |v| v > Decimal::ZERO && v <= Decimal::from(1_000_000)
);
quantity!(
    /// A price in the symbol's quote currency. Always above zero: no price is said by leaving it out.
    Price, "price", 10, "above 0 and at most 1000000000",
    |v| v > Decimal::ZERO && v <= Decimal::from(1_000_000_000)
);
quantity!(
    /// An amount in the account's currency; may be negative.
    Money, "money", 8, "between -10^15 and 10^15",
    |v| v.abs() <= Decimal::from(1_000_000_000_000_000_i64)
);

impl Lots {
    /// This volume rounded down to whole steps; nothing if less than one step is left.
    pub fn floor_step(value: Decimal, step: Lots) -> Option<Lots> {
        if value <= Decimal::ZERO {
            return None;
        }
        let steps = (value / step.get()).floor();
        Lots::new(steps * step.get()).ok()
    }

    /// What remains after taking `other` away; nothing if that is not above zero.
    pub fn minus(self, other: Lots) -> Option<Lots> {
        Lots::new(self.0 - other.0).ok()
    }
}

impl Price {
    /// This price rounded to a number of digits after the point (half away from zero).
    pub fn rounded(self, digits: u32) -> Price {
        let rounded = self
            .0
            .round_dp_with_strategy(digits, rust_decimal::RoundingStrategy::MidpointAwayFromZero);
        Price::new(rounded).unwrap_or(self)
    }
}
