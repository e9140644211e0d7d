//! Rows that were written not long ago, to be written again where the server has lost them.
//!
//! A replica that is promoted without the last of its primary's log lacks rows that the writer
//! knows as written. Nothing would tell: the follower holds them in memory, and the next owner
//! reads old states. So they are kept for a while, and when the server's timeline is another one
//! they go through the queue once more. Rows are versioned and events have ids of their own:
//! writing one that is there changes nothing.
//!
//! Pure: rows and `now` go in, rows come out.
//!
//! Not covered: a server that cannot say its timeline, a loss of more than [`RECENT_FOR`], rows of
//! a process that has ended since. The next owner finds what they said at the broker.

use super::rows::{Row, RowKind};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// How far back a promoted replica may be. Chosen: one that is two minutes behind is not promoted.
pub(super) const RECENT_FOR: Duration = Duration::from_secs(120);
/// Rows kept at most: two minutes at 160 rows a second, some 10 MB.
pub(super) const RECENT_ROWS_MAX: usize = 20_000;

/// What was written, oldest first.
#[derive(Debug, Default)]
pub(super) struct Recent {
    rows: VecDeque<(Instant, Row)>,
    timeline: Option<u32>,
}

impl Recent {
    /// A row is durable on the server that is there now.
    pub(super) fn keep(&mut self, row: Row, now: Instant) {
        // The next status comes within seconds.
        if row.kind() == RowKind::Status {
            return;
        }
        let is_old = |(written, _): &(Instant, Row)| now - *written > RECENT_FOR;
        while self.rows.front().is_some_and(is_old) || self.rows.len() >= RECENT_ROWS_MAX {
            self.rows.pop_front();
        }
        self.rows.push_back((now, row));
    }

    /// What may be lost, now that the server says this timeline; nothing if it is the same as
    /// before, or says none.
    pub(super) fn lost(&mut self, timeline: Option<u32>) -> Vec<Row> {
        let Some(timeline) = timeline else { return Vec::new() };
        let before = self.timeline.replace(timeline);
        if before.is_none_or(|before| before == timeline) {
            return Vec::new();
        }
        self.rows.drain(..).map(|(_, row)| row).collect()
    }
}
