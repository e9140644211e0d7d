//! Identities: newtypes, so that two numbers of different meaning cannot be mixed up.
//!
//! Invariant: every id fits a signed 64-bit column and is not zero where zero
//! has a meaning of its own at some broker (ticket 0 closes somebody else's order).

use crate::text::from_text;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::sync::Arc;

/// Why a number or text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The number is outside the range of this kind of id.
    #[error("{kind} must be between {min} and {max}, got {value}")]
    OutOfRange {
        /// Which kind of id.
        kind: &'static str,
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
        /// What was given.
        value: String,
    },
    /// The text has a wrong length or a character that is not allowed.
    #[error("{kind} must be {rule}, got {value:?}")]
    BadText {
        /// Which kind of id.
        kind: &'static str,
        /// What is allowed.
        rule: &'static str,
        /// What was given, shortened.
        value: String,
    },
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident, $repr:ty, $kind:literal, $min:expr, $max:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "u64", into = "u64")]
        pub struct $name($repr);

        impl $name {
            /// Smallest valid value.
            pub const MIN: $name = $name($min);
            /// Largest valid value.
            pub const MAX: $name = $name($max);

            /// Checks the range.
            pub fn new(value: u64) -> Result<Self, IdError> {
                #[allow(clippy::absurd_extreme_comparisons, unused_comparisons, reason = "one macro for ids with and without zero")]
                if value < $min as u64 || value > $max as u64 {
                    return Err(IdError::OutOfRange {
                        kind: $kind,
                        min: $min as u64,
                        max: $max as u64,
                        value: value.to_string(),
                    });
                }
                Ok(Self(value as $repr))
            }

            /// Checks a number as Postgres gives it.
            pub fn from_i64(value: i64) -> Result<Self, IdError> {
                let unsigned = u64::try_from(value).map_err(|_| IdError::OutOfRange {
                    kind: $kind,
                    min: $min as u64,
                    max: $max as u64,
                    value: value.to_string(),
                })?;
                Self::new(unsigned)
            }

            /// The plain number.
            pub const fn get(self) -> u64 {
                self.0 as u64
            }

            /// The number as Postgres stores it.
            pub const fn as_i64(self) -> i64 {
                self.0 as i64
            }
        }

        impl TryFrom<u64> for $name {
            type Error = IdError;
            fn try_from(value: u64) -> Result<Self, IdError> {
                Self::new(value)
            }
        }

        impl From<$name> for u64 {
            fn from(id: $name) -> u64 {
                id.get()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                let value: u64 = text.parse().map_err(|_| IdError::OutOfRange {
                    kind: $kind,
                    min: $min as u64,
                    max: $max as u64,
                    value: shorten(text),
                })?;
                Self::new(value)
            }
        }
    };
}

number_id!(
    /// One login at one broker on one platform.
    AccountId, u64, "account", 1, i64::MAX as u64
);
number_id!(
    /// A copy relation from a master to a follower.
    LinkId, u64, "link", 1, i64::MAX as u64
);
number_id!(
    /// The logical id of a trade on the master; the adapter keeps it across renumbering.
    MasterTicket, u64, "master ticket", 1, i64::MAX as u64
);
number_id!(
    /// The broker's id of a trade on the follower's account.
    FollowerTicket, u64, "follower ticket", 1, i64::MAX as u64
);
number_id!(
    /// The number that marks a link's orders at the broker; fits MT4's 32-bit field.
    Magic, u32, "magic", 1, i32::MAX as u32
);
number_id!(
    /// Incarnation of a master's publisher; the highest wins.
    Epoch, u64, "epoch", 1, i64::MAX as u64
);
number_id!(
    /// Number of an event within its epoch; 0 means that nothing was published yet.
    Seq, u64, "seq", 0, i64::MAX as u64
);
number_id!(
    /// Fencing token of a lease: raised at every new tenure, 0 before the first.
    Token, u64, "lease token", 0, i64::MAX as u64
);

impl Seq {
    /// Nothing published yet.
    pub const ZERO: Seq = Seq(0);

    /// The next number. No epoch holds 2^63 events, but a message may claim it: the last number
    /// has no next one, and is its own.
    pub fn next(self) -> Seq {
        if self < Seq::MAX { Seq(self.0 + 1) } else { Seq::MAX }
    }
}

impl Epoch {
    /// The lowest epoch above this one. Microseconds do not reach 2^63, but a message may claim
    /// it: the last epoch has none above it, and is its own.
    pub fn next(self) -> Epoch {
        if self < Epoch::MAX { Epoch(self.0 + 1) } else { Epoch::MAX }
    }
}

/// An instant: microseconds since 1970-01-01 UTC.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Micros(pub i64);

impl Micros {
    /// How much later this instant is than `earlier`; zero if it is not later.
    pub fn since(self, earlier: Micros) -> std::time::Duration {
        let micros = self.0.saturating_sub(earlier.0).max(0);
        std::time::Duration::from_micros(micros as u64)
    }

    /// This instant moved by a duration.
    pub fn plus(self, by: std::time::Duration) -> Micros {
        Micros(self.0.saturating_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $max:literal, $rule:literal, $allowed:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks length and characters.
            pub fn new(text: impl AsRef<str>) -> Result<Self, IdError> {
                let text = text.as_ref();
                let allowed: fn(char) -> bool = $allowed;
                if text.is_empty() || text.len() > $max || !text.chars().all(allowed) || text.trim() != text {
                    return Err(IdError::BadText { kind: $kind, rule: $rule, value: shorten(text) });
                }
                Ok(Self(text.into()))
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0.as_ref().to_owned()
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                from_text(deserializer, "a string")
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::new(text)
            }
        }
    };
}

text_id!(
    /// A node process: its name plus a random part drawn at its start.
    NodeId, "node", 128, "1 to 128 characters of a-z, A-Z, 0-9, '.', '_' and '-'",
    |c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
);
text_id!(
    /// A symbol as its broker prints it. It never becomes part of a subject or of SQL text.
    Symbol, "symbol", 64, "1 to 64 printable ASCII characters without quotes, backslash, '*', '>' and ';'",
    |c| (c.is_ascii_graphic() || c == ' ') && !matches!(c, '"' | '\'' | '`' | '\\' | '*' | '>' | '<' | ';' | '|')
);

/// At most 40 characters of a foreign text, for an error message.
pub(crate) fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
