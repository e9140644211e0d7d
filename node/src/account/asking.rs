//! The sessions that are open: how many there are, and for those who want something of one.
//!
//! Does: counts them; carries the wish to close a copy, or to compare the account with its masters, to
//! the session of the account, and the answer back.
//!
//! Invariants:
//! 1. A session is found here exactly as long as it works on a connection to its broker: a wish
//!    never waits for a connection.
//! 2. Nobody waits to hand a wish over, and at most [`WISHES_MAX`] of one account wait.
//! 3. A wish whose session ends before it answers is dropped, which its asker sees.
//!
//! Not covered: whether an order may be sent; that is the gate's, when the order leaves.

use super::control::Ask;
use super::metrics::names;
use crate::follower::{CloseAnswer, TicketKey};
use parking_lot::Mutex;
use schemas::AccountId;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Wishes that may wait for one session.
pub const WISHES_MAX: usize = 64;

/// What somebody wants of a session.
#[derive(Debug)]
pub(super) enum Wish {
    /// The copy of one (link, master ticket) closed.
    Close { key: TicketKey, answer: oneshot::Sender<CloseAnswer> },
    /// The account compared, or what that would come to.
    Compare(Ask),
}

/// Why a session could not be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAsked {
    /// No session of this account is open here.
    #[error("no session of the account is open on this node")]
    NoSession,
    /// Too many wait for it.
    #[error("too many requests wait for the account's session")]
    Full,
}

/// The open sessions of this node. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct OpenSessions {
    open: Arc<Mutex<BTreeMap<AccountId, mpsc::Sender<Wish>>>>,
}

impl OpenSessions {
    /// None yet, which is exported as well.
    pub fn new() -> Self {
        metrics::gauge!(names::SESSIONS_OPEN).set(0.0);
        OpenSessions::default()
    }

    /// Sessions that are open now.
    pub fn open(&self) -> usize {
        self.open.lock().len()
    }

    /// Asks the session of an account to close a copy; the answer comes as soon as it is known what
    /// became of it, or never if the session ends.
    pub fn close(
        &self,
        account: AccountId,
        key: TicketKey,
    ) -> Result<oneshot::Receiver<CloseAnswer>, NotAsked> {
        let (answer, answered) = oneshot::channel();
        self.ask(account, Wish::Close { key, answer }).map_err(|(reason, _)| reason)?;
        Ok(answered)
    }

    /// Asks the session of an account; the wish comes back where it cannot be asked.
    pub(super) fn ask(&self, account: AccountId, wish: Wish) -> Result<(), (NotAsked, Wish)> {
        let Some(session) = self.open.lock().get(&account).cloned() else {
            return Err((NotAsked::NoSession, wish));
        };
        session.try_send(wish).map_err(|error| match error {
            mpsc::error::TrySendError::Full(wish) => (NotAsked::Full, wish),
            mpsc::error::TrySendError::Closed(wish) => (NotAsked::NoSession, wish),
        })
    }

    /// From now on the session of this account is open, until the guard is dropped.
    pub(super) fn enter(&self, account: AccountId) -> (Entered, mpsc::Receiver<Wish>) {
        let (sender, wishes) = mpsc::channel(WISHES_MAX);
        self.open.lock().insert(account, sender);
        metrics::gauge!(names::SESSIONS_OPEN).increment(1.0);
        (Entered { sessions: self.clone(), account }, wishes)
    }

    /// A session that is open as long as this is there, for tests of what counts them.
    #[cfg(test)]
    pub(crate) fn open_for_tests(&self, account: AccountId) -> impl Sized + use<> {
        self.enter(account)
    }
}

/// A session is open as long as this is there, also if it panics. An account has one at a time.
#[derive(Debug)]
pub(super) struct Entered {
    sessions: OpenSessions,
    account: AccountId,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.sessions.open.lock().remove(&self.account);
        metrics::gauge!(names::SESSIONS_OPEN).decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemas::{LinkId, MasterTicket};

    const KEY: TicketKey = TicketKey { link: LinkId::MIN, ticket: MasterTicket::MIN };

    #[tokio::test]
    async fn a_wish_reaches_the_open_session_and_nobody_else() {
        let sessions = OpenSessions::default();
        let ask = || sessions.close(AccountId::MIN, KEY);
        assert_eq!(ask().unwrap_err(), NotAsked::NoSession);
        let (entered, mut wishes) = sessions.enter(AccountId::MIN);
        let answered = ask().unwrap();
        let wish = wishes.recv().await.unwrap();
        let Wish::Close { answer, .. } = wish else { panic!("{wish:?}") };
        answer.send(CloseAnswer::NoSuchCopy).unwrap();
        assert_eq!(answered.await.unwrap(), CloseAnswer::NoSuchCopy);
        let unanswered = ask().unwrap();
        drop((entered, wishes));
        assert!(unanswered.await.is_err(), "its session has ended");
        assert_eq!(ask().unwrap_err(), NotAsked::NoSession);
    }

    #[test]
    fn a_session_that_panics_is_not_open_any_more() {
        let sessions = OpenSessions::default();
        let shared = sessions.clone();
        let panicked = std::thread::spawn(move || {
            let _open = shared.enter(AccountId::MIN);
            assert_eq!(shared.open(), 0, "a lie, to panic");
        });
        assert!(panicked.join().is_err());
        assert_eq!(sessions.open(), 0);
    }

    #[tokio::test]
    async fn more_wishes_than_one_session_takes_are_refused_and_do_not_wait() {
        let sessions = OpenSessions::default();
        let (_entered, _wishes) = sessions.enter(AccountId::MIN);
        let waiting: Vec<_> =
            (0..WISHES_MAX).map(|_| sessions.close(AccountId::MIN, KEY).unwrap()).collect();
        assert_eq!(sessions.close(AccountId::MIN, KEY).unwrap_err(), NotAsked::Full);
        drop(waiting);
    }
}
