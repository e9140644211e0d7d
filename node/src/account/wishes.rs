//! What people want of an account that is at work: a copy closed, a comparison shown or made.
//!
//! In: a [`Wish`]. Out: the answer, by the follower's own rules.

use super::asking::Wish;
use super::control::{self, Ask};
use super::reading::read;
use super::session::{AccountSession, Connection};
use crate::follower::{AccountRead, Asker, CloseAnswer, Input, Now, TicketKey};
use schemas::control::ControlVerb;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Reads of an account that operators may wait for at once.
const ASKED_MAX: usize = 4;

impl AccountSession {
    /// Somebody wants something of the account.
    pub(super) fn on_wish(&mut self, connection: &mut Connection, wish: Wish) {
        match wish {
            Wish::Close { key, answer } => self.on_close_wish(connection, key, answer),
            Wish::Compare(ask) => self.on_ask(connection, ask),
        }
    }

    /// Somebody wants a copy closed.
    pub(super) fn on_close_wish(
        &mut self,
        connection: &mut Connection,
        key: TicketKey,
        answer: oneshot::Sender<CloseAnswer>,
    ) {
        if self.follower.is_none() {
            // A master that copies nothing has no copies.
            return self.answer_wish(answer, CloseAnswer::NoSuchCopy);
        }
        self.last_asker += 1;
        let asker = self.last_asker;
        self.askers.insert(asker, answer);
        self.step(connection, Input::Close { key, asker });
    }

    /// What became of a wish.
    pub(super) fn answer_asker(&mut self, asker: Asker, answer: CloseAnswer) {
        if let Some(waiting) = self.askers.remove(&asker) {
            self.answer_wish(waiting, answer);
        }
    }

    pub(super) fn answer_wish(&self, waiting: oneshot::Sender<CloseAnswer>, answer: CloseAnswer) {
        if waiting.send(answer).is_err() {
            tracing::debug!(account = %self.owner.account, "who wanted a copy closed has gone");
        }
    }

    /// Reads the account for an operator who asks what a comparison would do.
    pub(super) fn on_ask(&mut self, connection: &mut Connection, ask: Ask) {
        let now = self.context.now();
        let only = ask.request.link;
        let Some(follower) = self.follower.as_ref().filter(|_| !self.cannot_follow) else {
            return ask.answer(Err("it copies nothing: there is nothing to compare".to_owned()));
        };
        if only.is_some_and(|link| !follower.has_link(link)) {
            return ask.answer(Err("its owner does not know the link yet".to_owned()));
        }
        let Some((since, symbols)) = follower.preview_needs(now, only) else {
            return ask.answer(Err("its session at the broker is not open".to_owned()));
        };
        if connection.asked.len() >= ASKED_MAX {
            return ask.answer(Err("others are asking for the same".to_owned()));
        }
        // The follower counts its own reads up from nothing, and these down from the end.
        let id = connection.asked.keys().next().map_or(u64::MAX, |lowest| lowest - 1);
        connection.asked.insert(id, (ask, now));
        connection.reads.push(read(Arc::clone(&connection.session), id, since, symbols));
    }

    /// Says what a comparison would do, and has one made if that is wanted.
    pub(super) fn answer(&mut self, ask: Ask, begun: Now, read: Option<AccountRead>) {
        let now = self.context.now();
        let (Some(follower), Some(read)) = (&mut self.follower, read) else {
            return ask.answer(Err("its account could not be read at the broker".to_owned()));
        };
        let only = ask.request.link;
        let previews = follower.preview(now, begun.node, &read, only);
        if ask.request.verb == ControlVerb::Reconcile {
            follower.compare_now(now, only);
        }
        ask.answer(Ok(control::told(previews, begun.wall)));
    }
}
