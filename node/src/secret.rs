//! A text that nobody may see.
//!
//! Invariants:
//! 1. It cannot be printed, logged or serialised: `Debug` shows stars, and there is no `Display`.
//! 2. Its memory is overwritten when it is dropped.
//!
//! Not covered: what [`Secret::expose`] hands out, and copies that a library makes of it.

use std::fmt;
use zeroize::Zeroizing;

/// A password or the like.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Keeps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// The text, for whoever has to say it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
