//! How long a confirmed lease may be trusted. Pure.
//!
//! Decides: from which instant, and until which one, a node may act for an account.
//! In: the instant read *before* the attempt touched its connection, the lease, the fence.
//! Out: [`LeaseTerm`].
//!
//! Invariants:
//! 1. The term counts from the instant before the attempt, never from the answer (H3, H4): the
//!    row's end is written later than that, so it lies at least one fence after the term's end.
//! 2. No clock of another machine takes part. The database says whose row it is; for how long it
//!    is trusted, the node measures by itself.
//!
//! Not covered: a process that is frozen between its last check and the socket write for longer
//! than the fence. What the next owner does about that is in `lease/mod.rs`.

use crate::clock::NodeTime;
use std::fmt;
use std::time::Duration;

/// Number of a lease cycle within one process, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CycleNumber(u64);

impl CycleNumber {
    /// Before the first cycle.
    pub const NONE: CycleNumber = CycleNumber(0);

    /// The number after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The plain number.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for CycleNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The time for which one confirmation may be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTerm {
    deadline: NodeTime,
}

/// How long a confirmation is trusted, from the start of its attempt.
pub fn trusted(lease: Duration, fence: Duration) -> Duration {
    lease.saturating_sub(fence)
}

impl LeaseTerm {
    /// The term of a lease that was confirmed by an attempt.
    ///
    /// Shape: the start of the attempt and two settings in, one term out.
    /// Units: `attempt_started` is node time (see `clock.rs`), read before anything else was done.
    /// Invariants: ends at `attempt_started + lease - fence`; with a fence as long as the lease it
    /// has ended before it began.
    pub fn confirmed(attempt_started: NodeTime, lease: Duration, fence: Duration) -> Self {
        Self { deadline: attempt_started.plus(trusted(lease, fence)) }
    }

    /// The first instant at which the lease is no longer trusted.
    pub fn deadline(self) -> NodeTime {
        self.deadline
    }

    /// Whether the node may still act.
    pub fn is_trusted(self, now: NodeTime) -> bool {
        now < self.deadline
    }

    /// How much of the term is left; zero when it has ended.
    pub fn left(self, now: NodeTime) -> Duration {
        self.deadline.left(now)
    }
}
