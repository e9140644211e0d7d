//! The end of a tenure: no new order, the last answers, the last rows.
//!
//! Decides: whether the account may be given back, or its lease has to run out (S20).

use super::session::{AccountSession, Connection, Ended, TICK, Wanted};
use crate::broker::SessionEvent;
use crate::follower::{Follower, Input};
use futures_util::stream::StreamExt;
use schemas::planted::{self, Bug};
use std::time::Duration;

/// How long a draining account waits for its last answers.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// How long a draining account waits until its rows are written.
const FLUSH_LIMIT: Duration = Duration::from_secs(10);
/// How long a draining master's last events may take to leave.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Whether a tenure that ends may be given back: no order of it is unanswered, and no row of it is
/// unwritten (S20). Otherwise its lease is left to run out.
pub fn may_be_handed_in(unanswered: usize, unwritten_rows: usize) -> bool {
    (unanswered == 0 && unwritten_rows == 0) || planted::is(Bug::P17)
}

impl AccountSession {
    /// Lets go: no new order, the last answers, the last rows.
    pub(super) async fn drain(&mut self, mut connection: Connection) -> Ended {
        self.status("draining", None, true);
        self.step(&mut connection, Input::Drain);
        let drained = tokio::time::timeout(DRAIN_LIMIT, self.last_answers(&mut connection)).await;
        if let Some(leading) = &connection.lead {
            leading.publisher.close(CLOSE_LIMIT).await;
        }
        if drained != Ok(true) {
            self.cut(&mut connection);
            return Ended::NotDrained;
        }
        drop(connection);
        self.flushed().await
    }

    /// True when no order is unanswered; false when that will not be.
    pub(super) async fn last_answers(&mut self, connection: &mut Connection) -> bool {
        loop {
            let awaited = self.follower.as_ref().map_or(0, Follower::awaited);
            if awaited == 0 || may_be_handed_in(self.unanswered(), 0) {
                // An outcome that stays unknown is for the next owner: no answer will come.
                return may_be_handed_in(self.unanswered(), 0);
            }
            if *self.control.wanted.borrow() == Wanted::Stop {
                return false;
            }
            tokio::select! {
                biased;
                event = connection.events.next() => {
                    if matches!(event, SessionEvent::Lost(_)) {
                        return false;
                    }
                    self.on_event(connection, event);
                }
                Some(answered) = connection.answers.next() => {
                    self.on_answered(connection, answered);
                }
                () = tokio::time::sleep(TICK) => {
                    if self.permission().is_none() {
                        return false;
                    }
                }
            }
        }
    }

    pub(super) fn unanswered(&self) -> usize {
        self.follower.as_ref().map_or(0, Follower::unanswered)
    }

    pub(super) async fn flushed(&mut self) -> Ended {
        let account = self.owner.account;
        if may_be_handed_in(0, self.context.writer.pending(account)) {
            return Ended::Drained;
        }
        let flush = self.context.writer.flush_account(account);
        match tokio::time::timeout(FLUSH_LIMIT, flush).await {
            Ok(Ok(())) => Ended::Drained,
            Ok(Err(_)) | Err(_) => Ended::NotDrained,
        }
    }

    /// The end of a tenure that has no session: nothing is in flight, but rows may wait.
    pub(super) async fn end_unconnected(&mut self, wanted: Wanted) -> Ended {
        match wanted {
            Wanted::Drain | Wanted::Move if may_be_handed_in(self.unanswered(), 0) => {
                self.flushed().await
            }
            Wanted::Drain | Wanted::Move => Ended::NotDrained,
            Wanted::Run | Wanted::Stop => Ended::Stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenure_is_handed_in_only_with_everything_answered_and_written() {
        assert!(may_be_handed_in(0, 0));
        assert!(!may_be_handed_in(1, 0));
        assert!(!may_be_handed_in(0, 1));
    }
}
