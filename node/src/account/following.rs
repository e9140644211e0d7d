//! The copying half of a session whose account is a follower: what its masters' feeds say.
//!
//! Does the I/O of taking messages up: quotes before a decision, notes of what was applied. The
//! follower decides; `executing` sends.
//!
//! Invariants:
//! 1. The messages of one feed are taken up in their order.
//! 2. A message that is of a whole book (a snapshot, a doubt) is taken up only when every order that
//!    left before it is written down: it is judged by the pairs.
//! 3. A turn is bounded in time and in messages; whoever floods does not keep the session from its
//!    broker and its clock.

use super::executing::OUTBOX_MAX;
use super::session::{AccountSession, Connection};
use crate::broker::BrokerSession;
use crate::follower::Input;
use crate::notes::Note;
use bus::FeedMessage;
use schemas::{AccountId, Symbol};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::mpsc;

/// So long after a first order its rows and counters may wait, so that the rest of a burst, and the
/// orders of the other followers, leave before them. Chosen: longer than a burst takes, and far below
/// the time between two flushes of the writer.
const SETTLE_AFTER: Duration = Duration::from_millis(2);
/// Messages that one turn of the feeds takes up at most.
const TURN_MESSAGES_MAX: usize = 256;

impl AccountSession {
    /// Takes in what the feeds told while no session was open, before the first read is made: closes
    /// leave at once, and the plan sees the masters as they are now. A read is answered before the
    /// queue is looked at again, so that it would open what the master has closed since.
    pub(super) fn catch_up(&mut self, connection: &mut Connection) {
        for (master, message) in told_meanwhile(&mut self.feeds) {
            self.take_up(connection, master, message);
            self.settle(connection);
        }
        self.quoted.clear();
    }

    /// Takes up what the feeds say now and within [`SETTLE_AFTER`], a bounded number of messages: the
    /// orders leave as they are decided, and what follows from them comes after.
    pub(super) async fn follow_feeds(
        &mut self,
        connection: &mut Connection,
        master: AccountId,
        message: FeedMessage,
    ) {
        let wait = tokio::time::sleep(SETTLE_AFTER);
        tokio::pin!(wait);
        let mut next = Some((master, Some(message)));
        let (mut has_sent, mut messages) = (false, 0);
        let waited = match &next {
            Some((_, Some(FeedMessage::Event { received, .. }))) => Some(received.elapsed()),
            _ => None,
        };
        while let Some((master, message)) = next {
            let Some(message) = message else {
                self.settle(connection);
                self.on_feed_ended(connection, master);
                break;
            };
            self.take_up(connection, master, message);
            messages += 1;
            while messages < TURN_MESSAGES_MAX
                && self.outbox.len() < OUTBOX_MAX
                && let Some((master, message)) = ready_message(&mut self.feeds)
            {
                self.take_up(connection, master, message);
                messages += 1;
            }
            has_sent |= self.submit(connection);
            let is_full = messages >= TURN_MESSAGES_MAX || self.outbox.len() >= OUTBOX_MAX;
            if !has_sent || is_full {
                break;
            }
            next = tokio::select! {
                biased;
                () = &mut wait => None,
                told = next_message(&mut self.feeds, false) => Some(told),
            };
        }
        self.quoted.clear();
        self.settle(connection);
        if let Some(waited) = waited {
            self.counters.waited_for_turn(waited);
        }
    }

    /// Steps the follower with one message; its orders and effects are kept.
    fn take_up(&mut self, connection: &mut Connection, master: AccountId, message: FeedMessage) {
        if !matches!(message, FeedMessage::Event { .. }) {
            // What it says of the whole book is judged by the pairs of all orders that left.
            self.settle(connection);
        }
        self.trace = self.context.stamps.taken(master, &message);
        let symbol = match &message {
            FeedMessage::Event { event, .. } => Some(event.change.symbol()),
            FeedMessage::Snapshot(..) | FeedMessage::Doubt(_) | FeedMessage::Funds(_) => None,
        };
        if let (Some(symbol), Some(follower)) = (symbol, &mut self.follower) {
            let is_known = |(of, quoted): &(AccountId, Symbol)| *of == master && quoted == symbol;
            if !self.quoted.iter().any(is_known) {
                for symbol in follower.copied_symbols(master, symbol) {
                    if let Some(quote) = connection.session.quote(&symbol) {
                        follower.set_quote(quote);
                    }
                }
                self.quoted.push((master, symbol.clone()));
            }
        }
        let ticket = match &message {
            FeedMessage::Event { event, .. } => Some(event.change.ticket()),
            FeedMessage::Snapshot(..) | FeedMessage::Doubt(_) | FeedMessage::Funds(_) => None,
        };
        let says_state = !matches!(message, FeedMessage::Doubt(_) | FeedMessage::Funds(_));
        let position = |session: &Self| session.follower.as_ref().and_then(|f| f.position(master));
        let before = position(self);
        let now = self.context.now();
        let Some(follower) = &mut self.follower else { return };
        let effects = follower.step(now, Input::Feed { master, message });
        if let Some(trace) = &mut self.trace {
            self.context.stamps.decided(trace);
        }
        // Before the orders that follow from it.
        if let Some((epoch, seq)) = position(self)
            && says_state
            && (ticket.is_none() || before != Some((epoch, seq)))
        {
            self.note(|account, token| Note::Applied {
                account,
                token,
                master,
                epoch,
                seq,
                ticket,
            });
        }
        self.put(effects);
        self.trace = None;
    }
}

/// A message that is there now, of the feeds in their turn. That a feed has ended is left for
/// [`next_message`] to tell.
fn ready_message(
    feeds: &mut [(AccountId, mpsc::Receiver<FeedMessage>)],
) -> Option<(AccountId, FeedMessage)> {
    let ready =
        |(_, receiver): &mut (AccountId, mpsc::Receiver<FeedMessage>)| receiver.try_recv().ok();
    let (place, message) =
        feeds.iter_mut().enumerate().find_map(|(place, feed)| Some((place, ready(feed)?)))?;
    let master = feeds[place].0;
    feeds[place..].rotate_left(1);
    Some((master, message))
}

/// The next message of any of the feeds, each in its turn, or nothing from one that has ended;
/// waits for ever without feeds. With `others_first` whatever else is ready in the same `select!` goes
/// before it once.
pub(super) async fn next_message(
    feeds: &mut [(AccountId, mpsc::Receiver<FeedMessage>)],
    mut others_first: bool,
) -> (AccountId, Option<FeedMessage>) {
    std::future::poll_fn(|cx| {
        if std::mem::take(&mut others_first) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        for place in 0..feeds.len() {
            let (master, receiver) = &mut feeds[place];
            if let Poll::Ready(message) = receiver.poll_recv(cx) {
                let master = *master;
                // A master that floods takes its turn behind the others.
                feeds[place..].rotate_left(1);
                return Poll::Ready((master, message));
            }
        }
        Poll::Pending
    })
    .await
}

/// What waits in the feeds now, in each feed's order; at most [`FEED_MESSAGES_MAX`] of each. That a
/// feed has ended is left for [`next_message`] to tell.
pub(super) fn told_meanwhile(
    feeds: &mut [(AccountId, mpsc::Receiver<FeedMessage>)],
) -> Vec<(AccountId, FeedMessage)> {
    let mut told = Vec::new();
    for (master, receiver) in feeds {
        for _ in 0..receiver.len() {
            told.extend(receiver.try_recv().map(|message| (*master, message)));
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::super::session::TICK;
    use super::*;
    use bus::DoubtReason;

    #[tokio::test]
    async fn a_master_that_floods_takes_its_turn_behind_the_others() {
        let account = |id: u64| AccountId::new(id).unwrap();
        let mut feeds = Vec::new();
        let mut senders = Vec::new();
        for (id, messages) in [(1, 5), (2, 2), (3, 0)] {
            let (sender, receiver) = mpsc::channel(8);
            for _ in 0..messages {
                sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
            }
            senders.push(sender);
            feeds.push((account(id), receiver));
        }
        let mut order = Vec::new();
        for _ in 0..7 {
            order.push(next_message(&mut feeds, false).await.0.get());
        }
        assert_eq!(order, [1, 2, 1, 2, 1, 1, 1]);
    }

    #[tokio::test]
    async fn what_was_told_without_a_session_is_taken_in_order_and_no_end_of_a_feed_with_it() {
        let account = |id: u64| AccountId::new(id).unwrap();
        let mut feeds = Vec::new();
        for (id, reasons) in [
            (1, vec![DoubtReason::Gap, DoubtReason::Joining, DoubtReason::Gap]),
            (2, vec![]),
            (3, vec![DoubtReason::Joining]),
        ] {
            let (sender, receiver) = mpsc::channel(8);
            for reason in reasons {
                sender.send(FeedMessage::Doubt(reason)).await.unwrap();
            }
            feeds.push((account(id), receiver));
        }
        let told = told_meanwhile(&mut feeds);
        let told: Vec<_> = told
            .into_iter()
            .map(|(master, message)| match message {
                FeedMessage::Doubt(reason) => (master.get(), reason),
                other => panic!("{other:?}"),
            })
            .collect();
        let (gap, joining) = (DoubtReason::Gap, DoubtReason::Joining);
        assert_eq!(told, [(1, gap), (1, joining), (1, gap), (3, joining)]);
        assert!(told_meanwhile(&mut feeds).is_empty());
        assert!(next_message(&mut feeds, false).await.1.is_none());
    }

    #[tokio::test]
    async fn after_a_turn_of_the_feeds_others_that_are_ready_go_first_once() {
        let (sender, receiver) = mpsc::channel(8);
        let mut feeds = vec![(AccountId::MIN, receiver)];
        sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
        for others_first in [true, false] {
            let fed = tokio::select! {
                biased;
                _ = next_message(&mut feeds, others_first) => true,
                () = std::future::ready(()) => false,
            };
            assert_eq!(fed, !others_first);
        }
        sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
        let alone = next_message(&mut feeds, true);
        tokio::time::timeout(TICK * 100, alone).await.expect("nobody else was ready");
    }

    #[tokio::test]
    async fn a_feed_that_ended_is_told_after_its_last_message() {
        let (sender, receiver) = mpsc::channel(8);
        let mut feeds = vec![(AccountId::MIN, receiver)];
        sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
        drop(sender);
        assert!(next_message(&mut feeds, false).await.1.is_some());
        assert!(next_message(&mut feeds, false).await.1.is_none());
    }
}
