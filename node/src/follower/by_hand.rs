//! Copies that a person wants closed.
//!
//! Decides: what becomes of the wish to close the copy of one (link, master ticket).
//! In: [`Input::Close`](super::Input::Close), and what happens to the ticket's orders and pair.
//! Out: the order, under a permit like any other, and one [`CloseAnswer`] a wish.
//!
//! Invariants:
//! 1. "Done" is said only of a pair that has ended, so a wish that is repeated sends nothing.
//! 2. A wish whose order could not leave is forgotten and told so: nothing leaves later that nobody
//!    expects any more.
//! 3. Once its order has left, the pair is closing and the close is carried out to its end like any
//!    other, by the next owner as well.
//! 4. It is the one order that leaves for a paused link: a pause holds what decides by itself, and
//!    not a person.
//! 5. It waits neither for the settle time, nor for the end of a doubt, nor for a reconcile.
//!
//! Not covered: a close that a broker put off, of a paused link whose owner changes meanwhile: it
//! waits for the end of the pause, or for a new wish.

use super::queue::TicketKey;
use super::state::{Effect, Follower, Now};
use crate::broker::NotSent;
use reconcile::{CloseCause, CopyAction, CopyStep, EndReason, Pair, PairState};
use schemas::{FollowerTicket, LinkId};

/// Number of one wish, unique within the follower's tenure; the asker's own.
pub type Asker = u64;

/// Who wait for an answer about one ticket at most; what is more is told at once that the close is
/// under way.
const ASKERS_MAX: usize = 32;

/// What became of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloseAnswer {
    /// The copy is closed, by this wish or before it.
    Done {
        /// The copy, where it is known.
        copy: Option<FollowerTicket>,
        /// Why it ended.
        reason: Option<EndReason>,
    },
    /// Nothing was ever copied under this ticket of this link.
    NoSuchCopy,
    /// No order could leave, and none will: ask again.
    NotNow(NotNow),
    /// It was sent and is not confirmed: the broker put it off, or did not answer. It goes on.
    Underway(String),
}

/// Why no order could leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotNow {
    /// The order did not reach the broker.
    NotSent(NotSent),
    /// There is no session at the broker.
    NoSession,
    /// The account is on its way to another owner.
    Draining,
    /// Its open is not answered yet, so that nobody knows what to close.
    Opening,
}

impl NotNow {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            NotNow::NotSent(NotSent::Gate) => "no_permit",
            NotNow::NotSent(NotSent::Session) | NotNow::NoSession => "no_session",
            NotNow::NotSent(NotSent::Busy) => "no_thread",
            NotNow::Draining => "draining",
            NotNow::Opening => "opening",
        }
    }
}

impl Follower {
    /// Somebody wants a copy closed.
    pub(super) fn on_close(
        &mut self,
        now: Now,
        key: TicketKey,
        asker: Asker,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(answer) = self.answer_at_once(key) {
            return effects.push(Effect::CloseAnswered { asker, answer });
        }
        let askers = self.wishes.entry(key).or_default();
        if askers.len() >= ASKERS_MAX {
            let answer = CloseAnswer::Underway("others wait for it as well".into());
            return effects.push(Effect::CloseAnswered { asker, answer });
        }
        askers.push(asker);
        self.wake(now, key, None, effects);
        if self.retries.get(&key).is_some_and(|retry| now.node < retry.at) {
            self.tell(key, &CloseAnswer::Underway("the broker put it off".into()), effects);
        }
    }

    fn answer_at_once(&self, key: TicketKey) -> Option<CloseAnswer> {
        let pair = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket));
        let Some(pair) = pair else { return Some(CloseAnswer::NoSuchCopy) };
        if pair.state.is_terminal() {
            return Some(ended(pair));
        }
        let why = if self.draining {
            NotNow::Draining
        } else if self.view.is_none() {
            NotNow::NoSession
        } else if pair.follower_ticket.is_none() {
            NotNow::Opening
        } else {
            return None;
        };
        Some(CloseAnswer::NotNow(why))
    }

    /// The order that a wish comes to; nothing without a wish.
    pub(super) fn wished(&self, key: TicketKey) -> Option<CopyAction> {
        if !self.wishes.contains_key(&key) {
            return None;
        }
        let pair = self.links.get(&key.link)?.pairs.main(key.ticket)?;
        let ticket = pair.follower_ticket.filter(|_| pair.state.is_live())?;
        let view = self.view.as_ref()?;
        let is_pending = match view.positions.contains_key(&ticket) {
            true => false,
            false => view.pendings.contains_key(&ticket) || pair.is_pending,
        };
        let cause = CloseCause::UserRequest;
        let step = match is_pending {
            true => CopyStep::CancelPending { ticket, cause },
            false => CopyStep::CloseCopy { ticket, cause },
        };
        Some(CopyAction { link: key.link, master_ticket: key.ticket, steps: vec![step] })
    }

    /// A plan has looked at the link: what is wished and not on its way has its turn.
    pub(super) fn wake_wishes(&mut self, now: Now, link: LinkId, effects: &mut Vec<Effect>) {
        let of_link = self.wishes.keys().filter(|key| key.link == link);
        let free: Vec<TicketKey> =
            of_link.filter(|key| !self.slots.is_busy(**key)).copied().collect();
        for key in free {
            self.wake(now, key, None, effects);
        }
    }

    /// The pair has a new version: if it has ended, so has the wish.
    pub(super) fn end_wish(&mut self, pair: &Pair, effects: &mut Vec<Effect>) {
        if pair.state.is_terminal() {
            let key = TicketKey { link: pair.link, ticket: pair.master_ticket };
            self.forget_wish(key, &ended(pair), effects);
        }
    }

    /// Nothing will leave for this wish.
    pub(super) fn forget_wish(
        &mut self,
        key: TicketKey,
        answer: &CloseAnswer,
        effects: &mut Vec<Effect>,
    ) {
        self.tell(key, answer, effects);
        self.wishes.remove(&key);
    }

    /// Nothing will leave for the wishes whose order has not left.
    pub(super) fn forget_waiting_wishes(&mut self, why: NotNow, effects: &mut Vec<Effect>) {
        let has_left = |key: &TicketKey| {
            let pair = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket));
            pair.is_some_and(|pair| pair.state == PairState::Closing)
        };
        let waiting: Vec<TicketKey> =
            self.wishes.keys().filter(|key| !has_left(key)).copied().collect();
        for key in waiting {
            self.forget_wish(key, &CloseAnswer::NotNow(why), effects);
        }
    }

    /// Answers those who wait; the wish stays.
    pub(super) fn tell(&mut self, key: TicketKey, answer: &CloseAnswer, effects: &mut Vec<Effect>) {
        let Some(askers) = self.wishes.get_mut(&key) else { return };
        let told = |asker| Effect::CloseAnswered { asker, answer: answer.clone() };
        effects.extend(askers.drain(..).map(told));
    }
}

/// What is said of a pair that has ended.
fn ended(pair: &Pair) -> CloseAnswer {
    match pair.state {
        PairState::Closed => CloseAnswer::Done { copy: pair.follower_ticket, reason: pair.reason },
        PairState::Sending
        | PairState::Open
        | PairState::Closing
        | PairState::Failed
        | PairState::Skipped => CloseAnswer::NoSuchCopy,
    }
}
