//! The wall clock of this process: what `at` is stamped with. Decisions never read it;
//! they take `now` from the monotonic clock as a parameter.

use schemas::Micros;
use std::time::UNIX_EPOCH;

/// Microseconds since 1970-01-01 UTC, by this machine.
#[allow(
    clippy::disallowed_methods,
    reason = "stamps of messages and start epochs need the wall clock, and only they"
)]
pub(crate) fn wall_now() -> Micros {
    let since_epoch = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Micros(i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX))
}
