//! What a node was, minute by minute.
//!
//! Decides: what is recorded of a minute, and what is kept until it is written. In: [`Look`]s at what the
//! node needs, some a minute. Out: [`Minute`]s, each once.
//!
//! Invariants:
//! 1. A minute is `ok` only if it was looked at from end to end and nothing was missing. What was not
//!    seen has no row: unknown is not ok.
//! 2. A minute without a confirmed lease cycle is degraded: `no account lease`.
//! 3. Anything else is missing when two looks in a row, at least one pause apart, did not find it: a
//!    session that opens and a server that hands over take a moment.
//! 4. A minute has one row. A wall clock that is set back changes none of those before.
//! 5. At most [`WAITING_MAX`] minutes wait for the database; then the oldest is given up.
//!
//! Not covered: a node that ends loses what waits, and the minute under way; what is away for less than
//! the pause between two looks may be seen by nobody; sessions are counted, so that one which is about to end
//! may hide another that is not open yet.

pub mod store;
pub mod task;

use schemas::Micros;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Pause between two looks (chosen: twelve a minute, and little enough for the database).
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A longer hole between two looks leaves a minute unseen (chosen: two looks may be late or lost).
const HOLE_MAX: Duration = Duration::from_secs(15);

/// Minutes that wait to be written: a week, some hundred kilobytes.
pub const WAITING_MAX: usize = 7 * 24 * 60;

const MINUTE: Duration = Duration::from_secs(60);
const MINUTE_US: i64 = 60_000_000;

/// Why a minute is degraded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// No lease cycle was confirmed: the node had to stop sending, or was about to.
    NoAccountLease,
    /// The bus was not connected.
    Bus,
    /// The database did not answer, or takes no rows.
    Database,
    /// An owned account had no open session at its broker.
    Broker,
}

impl Reason {
    schemas::words! {
        /// The word in the table and in metrics.
        pub fn as_str(self) in WORDS {
            Reason::NoAccountLease => "no account lease",
            Reason::Bus => "bus",
            Reason::Database => "database",
            Reason::Broker => "broker",
        }
    }
}

schemas::words! {
    /// What a minute counts as in metrics, of whether nothing was missing.
    pub(crate) fn state_word(is_ok: bool) in STATES {
        true => "ok",
        false => "degraded",
    }
}

/// What was missing; empty where all was well.
pub type Reasons = BTreeSet<Reason>;

/// What was seen at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// When.
    pub at: Micros,
    /// When the last confirmed lease cycle began, by the same clock; absent before the first.
    pub lease_confirmed: Option<Micros>,
    /// What is not there now; the lease is judged by `lease_confirmed` alone.
    pub missing: Reasons,
}

/// One minute, as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Minute {
    /// When it began; a whole minute.
    pub began: Micros,
    /// What was missing.
    pub reasons: Reasons,
}

/// The minute under way.
#[derive(Debug)]
struct Open {
    /// Minutes since 1970.
    number: i64,
    /// It was looked at since its beginning without a hole.
    seen: bool,
    leased: bool,
    reasons: Reasons,
}

/// Collects looks into minutes, and keeps them until they are written.
#[derive(Debug)]
pub struct Record {
    /// A cycle that was confirmed so long before a minute's end is its own: the minute, or two cycles
    /// where those are longer.
    lease_window_us: i64,
    open: Option<Open>,
    last: Option<Look>,
    waiting: BTreeMap<i64, Reasons>,
    /// The latest minute that was decided; none before it is decided again.
    decided: Option<i64>,
}

impl Record {
    /// Nothing seen yet. `cycle`: the pause between two lease cycles.
    pub fn new(cycle: Duration) -> Self {
        let window = MINUTE.max(cycle * 2);
        Record {
            lease_window_us: window.as_micros().try_into().unwrap_or(i64::MAX),
            open: None,
            last: None,
            waiting: BTreeMap::new(),
            decided: None,
        }
    }

    /// Takes in a look. A minute that ended before it is kept for writing, and answered.
    pub fn see(&mut self, look: Look) -> Option<Minute> {
        let number = look.at.0.div_euclid(MINUTE_US);
        let ended = match &self.open {
            Some(open) if open.number != number => self.end_minute(&look),
            _ => None,
        };
        let since_last = self.last.as_ref().map(|last| look.at.0.saturating_sub(last.at.0));
        let hole = HOLE_MAX.as_micros() as i64;
        let in_time = since_last.is_some_and(|passed| (0..=hole).contains(&passed));
        let open = self.open.get_or_insert_with(|| Open {
            number,
            // The first one need not follow another: the node may just have started.
            seen: look.at.0.rem_euclid(MINUTE_US) <= hole,
            leased: false,
            reasons: Reasons::new(),
        });
        if self.last.as_ref().is_some_and(|last| last.at.0.div_euclid(MINUTE_US) == number) {
            open.seen &= in_time;
        }
        open.leased |= is_leased(number, &look, self.lease_window_us);
        if let Some(last) = self.last.as_ref().filter(|_| in_time) {
            open.reasons.extend(last.missing.intersection(&look.missing));
        }
        self.last = Some(look);
        ended
    }

    /// What is to be written, oldest first, at most `rows_max` of it.
    pub fn waiting(&self, rows_max: usize) -> Vec<Minute> {
        let minute = |(number, reasons): (&i64, &Reasons)| Minute {
            began: Micros(number * MINUTE_US),
            reasons: reasons.clone(),
        };
        self.waiting.iter().take(rows_max).map(minute).collect()
    }

    /// The database has these.
    pub fn written(&mut self, minutes: &[Minute]) {
        for minute in minutes {
            self.waiting.remove(&minute.began.0.div_euclid(MINUTE_US));
        }
    }

    /// Decides the minute under way; `look` is the first one after it.
    fn end_minute(&mut self, look: &Look) -> Option<Minute> {
        let mut open = self.open.take()?;
        if self.decided.is_some_and(|decided| open.number <= decided) {
            return None;
        }
        let end = (open.number + 1) * MINUTE_US;
        let seen_until = self.last.as_ref().map_or(i64::MIN, |last| last.at.0);
        open.seen &= end.saturating_sub(seen_until) <= HOLE_MAX.as_micros() as i64;
        // One that was confirmed after the last look.
        open.leased |= is_leased(open.number, look, self.lease_window_us);
        if open.seen && !open.leased {
            open.reasons.insert(Reason::NoAccountLease);
        }
        if !open.seen && open.reasons.is_empty() {
            return None;
        }
        self.decided = Some(open.number);
        self.waiting.insert(open.number, open.reasons.clone());
        if self.waiting.len() > WAITING_MAX {
            self.waiting.pop_first();
        }
        Some(Minute { began: Micros(open.number * MINUTE_US), reasons: open.reasons })
    }
}

/// Whether the look's confirmed cycle is one of this minute.
fn is_leased(number: i64, look: &Look, window_us: i64) -> bool {
    let end = (number + 1) * MINUTE_US;
    look.lease_confirmed.is_some_and(|at| at.0 < end && end - at.0 <= window_us)
}

#[cfg(test)]
mod tests;
