//! The two clocks of the broker, read only here and handed on as values.
//!
//! Not covered: a suspended machine; this is a tool for tests and demos.

use schemas::Micros;
use std::time::Instant;

/// An instant at the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Microseconds since the broker started, by a clock that never goes back.
    pub mono_us: u64,
    /// Wall clock.
    pub wall: Micros,
}

/// Reads both clocks.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: Instant,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// Both clocks, one right after the other.
    pub fn now(&self) -> Now {
        let elapsed = self.started.elapsed().as_micros();
        Now { mono_us: u64::try_from(elapsed).unwrap_or(u64::MAX), wall: wall_now() }
    }
}

/// The wall clock.
#[allow(clippy::disallowed_methods, reason = "the one place of this crate that reads it")]
pub fn wall_now() -> Micros {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Micros(since.map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX)))
}
