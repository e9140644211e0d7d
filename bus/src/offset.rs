//! How far a publisher's clock is from ours, as far as messages can tell. Pure.
//!
//! Every beacon says when it was made, by its publisher's clock; how much later it arrives, by ours,
//! is the difference of the two clocks and the time on the way. The least of many is the difference
//! and the shortest way: what a stage between two machines must be corrected by.
//!
//! Invariants:
//! 1. The least of the last one to two windows is told, so that a clock that was set right is
//!    forgotten.
//!
//! Not covered: the shortest way itself, which one direction alone cannot tell from an offset.

use std::time::Duration;

/// Time after which what was seen counts as old; 30 beacons.
pub(crate) const WINDOW: Duration = Duration::from_secs(60);

/// The least delay seen of late, in microseconds; negative where the publisher's clock is ahead.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LeastDelay {
    since: Duration,
    current: Option<i64>,
    previous: Option<i64>,
}

impl LeastDelay {
    /// A message arrived so much later than it was made.
    pub(crate) fn observe(&mut self, delay_us: i64, now: Duration) {
        if now.saturating_sub(self.since) >= WINDOW {
            self.previous = self.current.take();
            self.since = now;
        }
        self.current = Some(self.current.map_or(delay_us, |least| least.min(delay_us)));
    }

    /// The least; nothing before the first message.
    pub(crate) fn get(self) -> Option<i64> {
        self.current.into_iter().chain(self.previous).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_delay_is_told_and_forgotten_after_two_windows() {
        let mut least = LeastDelay::default();
        assert_eq!(least.get(), None);
        for (delay, at, told) in [(900, 1, 900), (-300, 2, -300), (500, 61, -300), (700, 62, -300)]
        {
            least.observe(delay, Duration::from_secs(at));
            assert_eq!(least.get(), Some(told), "at {at} s");
        }
        least.observe(800, Duration::from_secs(122));
        assert_eq!(least.get(), Some(500));
    }
}
