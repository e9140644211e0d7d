//! Whether the database's time, and the database itself, is the one it was. Pure.
//!
//! Decides: when expired rows are left alone because the clock that made them run out jumped, or
//! because another server answers that may lack the last renewals.
//! In: the database's mark of each confirmed cycle, with the node's own instants around it.
//! Out: [`DatabaseDoubt`], and until when claims are frozen.
//!
//! Invariants:
//! 1. A step is what lies outside of what may have passed here, by more than one second (H12).
//! 2. What has passed here is counted by the clock that nobody sets: one wrong time source sets the
//!    database's clock and this machine's together. The freeze is counted by it too.
//! 3. A change of timeline is always a doubt (H13).
//!
//! Not covered: a node that had its first answer after the step has nothing to compare with.

use crate::clock::NodeTime;
use schemas::Micros;
use std::time::Duration;

/// A difference between the database's clock and ours beyond this is a step (H12).
pub const DATABASE_STEP_MAX: Duration = Duration::from_secs(1);

/// The database's own idea of time, to notice when it jumps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatabaseMark {
    /// Its clock at the start of the transaction.
    pub now: Micros,
    /// Timeline of its write-ahead log, where it can be read; a promotion changes it.
    pub timeline: Option<u32>,
}

/// Why the database's time is in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatabaseDoubt {
    /// Its clock moved by more than time has passed here, or by less.
    ClockStep,
    /// Its clock and this machine's wall clock agree that more time has passed than this machine
    /// counted: a hypervisor held this machine, or both clocks were set. From here they look alike.
    OwnClock,
    /// Another server answers, and it may lack the last renewals of others.
    Timeline,
}

impl DatabaseDoubt {
    schemas::words! {
        /// The word used in metrics.
        pub fn as_str(self) in WORDS {
            DatabaseDoubt::ClockStep => "clock",
            DatabaseDoubt::OwnClock => "own_clock",
            DatabaseDoubt::Timeline => "timeline",
        }
    }
}

/// Between which instants a database without a jump begins the next transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatabaseBounds {
    /// Not before.
    pub least: Micros,
    /// Not after.
    pub most: Micros,
    /// Timeline of the server that was last asked, where it can be read.
    pub timeline: Option<u32>,
}

impl DatabaseBounds {
    /// Whether this server goes on where the last one stopped.
    pub fn is_same_history(&self, timeline: Option<u32>) -> bool {
        !matches!((self.timeline, timeline), (Some(before), Some(now)) if before != now)
    }

    /// Whether a transaction that began at `now` on this timeline saw no jump.
    pub fn hold(&self, now: Micros, timeline: Option<u32>) -> bool {
        self.is_same_history(timeline) && (self.least..=self.most).contains(&now)
    }
}

/// Compares the database's clock with ours from cycle to cycle (H12), and its timeline (H13).
#[derive(Debug, Clone, Default)]
pub struct ClaimGuard {
    last: Option<(DatabaseMark, NodeTime, NodeTime)>,
    frozen_until: NodeTime,
    history_lost_until: NodeTime,
}

impl ClaimGuard {
    /// Looks at one confirmed cycle that ran from `started` to `finished`.
    ///
    /// The database read its clock somewhere between the two, so the time that passed here since
    /// the last cycle is known only within bounds; a step is what lies outside of them by more
    /// than [`DATABASE_STEP_MAX`].
    pub fn observe(
        &mut self,
        mark: DatabaseMark,
        started: NodeTime,
        finished: NodeTime,
        freeze: Duration,
    ) -> Option<DatabaseDoubt> {
        let before = self.last.replace((mark, started, finished));
        let doubt = before.and_then(|(mark_before, started_before, finished_before)| {
            let least = started.surely_since(finished_before).saturating_sub(DATABASE_STEP_MAX);
            let most = finished.surely_since(started_before) + DATABASE_STEP_MAX;
            let most_by_wall = finished.since(started_before) + DATABASE_STEP_MAX;
            let passed_us = i128::from(mark.now.0) - i128::from(mark_before.now.0);
            let timeline_changed = matches!(
                (mark_before.timeline, mark.timeline), (Some(before), Some(now)) if before != now
            );
            if timeline_changed {
                Some(DatabaseDoubt::Timeline)
            } else if (micros(least)..=micros(most)).contains(&passed_us) {
                None
            } else if (micros(most)..=micros(most_by_wall)).contains(&passed_us) {
                Some(DatabaseDoubt::OwnClock)
            } else {
                Some(DatabaseDoubt::ClockStep)
            }
        });
        if doubt.is_some() {
            self.frozen_until = self.frozen_until.max(finished.plus(freeze));
        }
        if doubt == Some(DatabaseDoubt::Timeline) {
            self.history_lost_until = self.history_lost_until.max(finished.plus(freeze));
        }
        doubt
    }

    /// Whether a claim that another server committed may be missing here: then a row that looks
    /// free, or like ours, may be another node's, which still trusts its lease.
    pub fn history_is_lost(&self, now: NodeTime) -> bool {
        !now.is_surely_at(self.history_lost_until)
    }

    /// What the database's time must say in the cycle that starts now, for rows that look expired
    /// to be so: a jump is noticed in that cycle's own statement, and not only by its answer.
    ///
    /// Shape: the start of the cycle and the longest it may take in; nothing before the first
    /// answer, as there is nothing to compare with.
    pub fn bounds(&self, started: NodeTime, limit: Duration) -> Option<DatabaseBounds> {
        let (mark, started_before, finished_before) = self.last?;
        let least = started.surely_since(finished_before);
        let most = started.surely_since(started_before) + limit + DATABASE_STEP_MAX;
        let step = i64::try_from(DATABASE_STEP_MAX.as_micros()).unwrap_or(i64::MAX);
        let least = Micros(mark.now.plus(least).0.saturating_sub(step));
        Some(DatabaseBounds { least, most: mark.now.plus(most), timeline: mark.timeline })
    }

    /// Whether rows of owners whose lease ran out may be claimed.
    pub fn expired_may_be_claimed(&self, now: NodeTime) -> bool {
        now.is_surely_at(self.frozen_until)
    }

    /// Until when they are left alone; in the past where they are not.
    pub fn frozen_until(&self) -> NodeTime {
        self.frozen_until
    }
}

fn micros(duration: Duration) -> i128 {
    i128::try_from(duration.as_micros()).unwrap_or(i128::MAX)
}
