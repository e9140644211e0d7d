//! Whether what was heard is the next event of a master, an old one, or proof of a loss.
//!
//! Inputs: (epoch, seq, publisher's time) of events and beacons, and of accepted snapshots.
//! Output: a `Verdict`.
//!
//! Invariants:
//! 1. Only `InOrder` events, and snapshots, move the applied position, and events move it by
//!    exactly one: any hole is reported.
//! 2. The applied position strictly increases, except by the snapshot of a publisher that came
//!    back under its old epoch (`Restarted`).
//! 3. A low seq is dropped as `Duplicate` only if its time says that it is from before what was
//!    applied; a later one is an incarnation we do not know (H27).
//! 4. The highest epoch heard wins; lower ones are `OldEpoch` for ever.
//!
//! Does not cover: a publisher that came back under its old epoch with a slower clock *and*
//! passed the old seq unheard. The digest of its next beacon shows that.

use schemas::planted::{self, Bug};
use schemas::{Epoch, Micros, Seq};

/// What one heard position means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// An event: the direct successor, now applied. A beacon: agrees with what was applied.
    InOrder,
    /// Already applied; drop it.
    Duplicate,
    /// Something between was lost.
    Gap {
        /// The seq that should have come (for a beacon: the seq that was applied last).
        expected: Seq,
        /// The seq that came.
        got: Seq,
    },
    /// A higher epoch than heard so far, or the first: its state is unknown until a snapshot.
    NewEpoch,
    /// From an incarnation that was replaced; drop it.
    OldEpoch,
    /// A low seq, later than what was applied: another incarnation under the same epoch.
    Restarted,
}

/// The position that was applied last, with the publisher's time of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Applied {
    epoch: Epoch,
    seq: Seq,
    at: Micros,
}

/// Judges a master's positions. Pure; one per feed.
#[derive(Debug, Clone, Default)]
pub struct GapDetector {
    applied: Option<Applied>,
    highest: Option<Epoch>,
}

impl GapDetector {
    /// Knows nothing yet: everything is a new epoch until a snapshot is accepted.
    pub fn new() -> Self {
        Self::default()
    }

    /// The applied position, if a snapshot was ever accepted.
    pub fn position(&self) -> Option<(Epoch, Seq)> {
        self.applied.map(|a| (a.epoch, a.seq))
    }

    /// Publisher's time of the applied position.
    pub fn applied_at(&self) -> Option<Micros> {
        self.applied.map(|a| a.at)
    }

    /// The highest epoch heard in any message.
    pub fn highest_epoch(&self) -> Option<Epoch> {
        self.highest
    }

    /// Judges an event, and applies it if it is the direct successor.
    pub fn observe_event(&mut self, epoch: Epoch, seq: Seq, at: Micros) -> Verdict {
        let verdict = match self.judge_epoch(epoch) {
            Ok(applied) if seq == applied.seq.next() => Verdict::InOrder,
            Ok(applied) if seq > applied.seq => {
                Verdict::Gap { expected: applied.seq.next(), got: seq }
            }
            Ok(applied) if at > applied.at => Verdict::Restarted,
            Ok(_) => Verdict::Duplicate,
            Err(Verdict::OldEpoch) if planted::is(Bug::P13) => Verdict::InOrder,
            Err(verdict) => verdict,
        };
        if verdict == Verdict::InOrder {
            let before = self.applied.map_or(at, |a| a.at);
            self.applied = Some(Applied { epoch, seq, at: at.max(before) });
        }
        verdict
    }

    /// Judges a beacon; its seq is the last one published before it.
    pub fn observe_beacon(&mut self, epoch: Epoch, seq: Seq, at: Micros) -> Verdict {
        match self.judge_epoch(epoch) {
            Ok(applied) if seq == applied.seq => Verdict::InOrder,
            Ok(applied) if seq > applied.seq => Verdict::Gap { expected: applied.seq, got: seq },
            Ok(applied) if at > applied.at => Verdict::Restarted,
            Ok(_) => Verdict::Duplicate,
            Err(Verdict::OldEpoch) if planted::is(Bug::P13) => Verdict::InOrder,
            Err(verdict) => verdict,
        }
    }

    /// A snapshot valid at (epoch, seq) was applied. The caller has checked that it may be.
    pub fn accept_snapshot(&mut self, epoch: Epoch, seq: Seq, at: Micros) {
        self.hear(epoch);
        self.applied = Some(Applied { epoch, seq, at });
    }

    /// Remembers an epoch heard outside an event or beacon.
    pub fn hear(&mut self, epoch: Epoch) {
        self.highest = self.highest.max(Some(epoch));
    }

    /// The applied position if it is of this epoch and no higher one was heard.
    fn judge_epoch(&mut self, epoch: Epoch) -> Result<Applied, Verdict> {
        if self.highest.is_some_and(|highest| epoch < highest) {
            return Err(Verdict::OldEpoch);
        }
        self.hear(epoch);
        match self.applied {
            Some(applied) if applied.epoch == epoch => Ok(applied),
            Some(_) | None => Err(Verdict::NewEpoch),
        }
    }
}

#[cfg(test)]
#[path = "gap/tests.rs"]
mod tests;
