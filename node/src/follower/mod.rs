//! A follower: one account that copies, as a pure state machine.
//!
//! Decides: which order to send next, and what to remember of the answers. The machine takes
//! one [`Input`] at a time with `now` and gives back a list of [`Effect`]s; it reads no clock
//! and waits for nothing. One mailbox feeds it, so a reconcile and a live event can never act
//! on the same pair at once (H47).
//!
//! It works on wanted states, not on messages: an event changes what the master holds, and
//! then the one question for its ticket is what makes the copy agree. The reconcile asks the
//! same question for every ticket, with complete reads in hand.
//!
//! Invariants:
//! 1. At most one order is on its way for a (link, master ticket); what arrives meanwhile is
//!    merged into the wanted state and looked at when the answer is there (H48).
//! 2. Nothing is opened for a link before its first reconcile, while its feed is doubtful, or
//!    before the settle time after an unclean takeover has passed. Closes never wait for these.
//! 3. A late open only comes out of a reconcile, which has looked into the history (H43).
//! 4. A plan acts only on tickets that nothing has touched since its read began (S12).
//! 5. An open of unknown outcome is never sent again; its slot stays taken until a read or the
//!    session's word settles it (H42, H49).
//! 6. What the gate refused is dropped and counted; a reconcile finds it again.
//! 7. Only a plan, which can be held for a second look, closes a copy because a snapshot is
//!    without its trade; an event that tells the end is followed at once (H41).
//! 8. A partial close of unknown outcome is not sent again before its longest answer, unless no
//!    more than it leaves is there (H49).
//! 9. At most three reconciles of a link in ten seconds, one of them kept for reasons that
//!    cannot wait (L6).
//! 10. A pair is written down when its order has left, and never before: an order that was not
//!     sent leaves no trace that a later owner would wait for.
//! 11. Nothing leaves for a paused link, but what a person closes by hand. Its feed, its copies and
//!     its rows are followed all the same, and a reconcile repairs when it is not paused any more: what
//!     the master closed is closed, what it opened is late and judged as such.
//!
//! Not covered: an MT4 copy that is partly closed by hand before any answer named it keeps no
//! tag, so its pair waits for a person. The permit, the socket and the rows are the shell's:
//! `account::session`.

mod by_hand;
mod feed;
mod live;
pub mod queue;
mod reconciling;
mod state;
mod tagging;

#[cfg(test)]
mod tests;

pub use by_hand::{Asker, CloseAnswer, NotNow};
pub use queue::{Attempt, TicketKey};
pub use reconciling::Preview;
pub use state::{
    AccountRead, Cause, Effect, Follower, FollowerSettings, Grounds, Input, Now, Reason, Record,
};
