//! What a follower wants done, done: orders under permits, reads, rows.
//!
//! A permit is taken right before each order, and the order's own time is stamped there.

use super::metrics::names;
use super::reading::read;
use super::rows::{self, Owner};
use super::session::{AccountSession, Connection, LOAD_RETRY};
use crate::broker::{BrokerSession, NotSent, Outcome};
use crate::clock::NodeTime;
use crate::follower::{Attempt, Effect, Grounds, Input, Record, TicketKey};
use crate::gate::{Gate, SendPermit};
use crate::notes::Note;
use crate::writer::Row;
use schemas::{AccountId, Token};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

impl AccountSession {
    /// Does what the follower wants done; an answer that is there at once is handed back at once.
    pub(super) async fn execute(&mut self, connection: &mut Connection, effects: Vec<Effect>) {
        let mut todo = std::collections::VecDeque::from(effects);
        while let Some(effect) = todo.pop_front() {
            match effect {
                Effect::Send { key, attempt, request } => {
                    let more = self.send(connection, key, attempt, &request);
                    // What follows from an order comes before the next order of the list.
                    more.into_iter().rev().for_each(|effect| todo.push_front(effect));
                }
                Effect::Read { id, since, symbols } => {
                    connection.reads.push(read(
                        Arc::clone(&connection.session),
                        id,
                        since,
                        symbols,
                    ));
                }
                Effect::AskMaster { master, reason } => {
                    if let Some(feed) = self.context.feeds.get(master) {
                        feed.request_snapshot(self.owner.account, reason);
                    }
                }
                Effect::Persist(pair) => self.persist(*pair),
                Effect::Record(record) => self.record(*record),
                Effect::Planned {
                    link,
                    plan,
                    begun,
                    position,
                    reason,
                    steps,
                    held,
                    duplicates,
                } => {
                    self.note(|account, token| Note::Planned {
                        account,
                        token,
                        link,
                        plan,
                        begun_us: begun,
                        reason: reason.as_str(),
                        epoch: position.0,
                        seq: position.1,
                        held,
                        steps: steps.clone(),
                    });
                    count_plan(reason, &steps, held, duplicates);
                }
                Effect::Restless(link) => {
                    metrics::counter!(names::RECONCILE_RESTLESS).increment(1);
                    tracing::warn!(%link, "plans for this link do not come to rest");
                }
                Effect::Untaggable(link) => self.store_untaggable(link),
            }
        }
    }

    fn send(
        &mut self,
        connection: &mut Connection,
        key: TicketKey,
        attempt: Attempt,
        request: &schemas::OrderRequest,
    ) -> Vec<Effect> {
        let Some(follower) = &mut self.follower else { return Vec::new() };
        let context = &self.context;
        let stamps = &context.stamps;
        let turn = stamps.now();
        let reserve = context.config.send_reserve;
        // The instruction before the order call: own time ends here.
        let now = context.now();
        let permit =
            permit_of_stretch(&context.gate, self.owner.account, self.stretch, now.node, reserve);
        let Some(permit) = permit else {
            let outcome = Outcome::NotSent(NotSent::Gate);
            return follower.step(now, Input::Answer { key, attempt, outcome });
        };
        let called = stamps.now();
        let mut answer = connection.session.submit(permit, request, attempt);
        if let Some(trace) = &self.trace {
            stamps.sent(self.owner.account, trace, turn, called);
        }
        match ready(&mut answer) {
            Some(outcome @ Outcome::NotSent(_)) => {
                return follower.step(context.now(), Input::Answer { key, attempt, outcome });
            }
            // It left, and its end is known already: one more answer that comes after.
            Some(outcome) => answer = Box::pin(std::future::ready(outcome)),
            None => {}
        }
        metrics::counter!(names::BROKER_CALLS_STARTED, "action" => request.action()).increment(1);
        if let Some(grounds) = follower.grounds(key) {
            let Owner { account, token } = self.owner;
            context.notes.note(now.wall, || sent(account, token, key, attempt, grounds));
        }
        let effects = follower.submitted(key, attempt, now);
        if let Some(own_time) = follower.own_time(key) {
            metrics::histogram!(names::OWN_TIME, "platform" => "paper", "action" => request.action())
                .record(own_time.as_secs_f64());
        }
        let limit = context.config.broker_call_limit;
        connection.answers.push(Box::pin(async move {
            let outcome = tokio::time::timeout(limit, answer)
                .await
                .unwrap_or_else(|_| Outcome::Unknown("no answer within the call limit".into()));
            (key, attempt, outcome)
        }));
        effects
    }

    /// Stored beside the work, so that every later owner knows it. Ends with the lease at the
    /// latest: then it changes nothing, and is no error any more.
    fn store_untaggable(&self, link: schemas::LinkId) {
        let (context, owner) = (Arc::clone(&self.context), self.owner);
        let task = self.context.slow.spawn(async move {
            loop {
                let stored =
                    context.directory.mark_untaggable(owner.account, owner.token, link).await;
                let Err(error) = stored else { return };
                tracing::warn!(account = %owner.account, %link, %error, "lost tags not stored");
                tokio::time::sleep(LOAD_RETRY).await;
            }
        });
        drop(task);
    }

    /// Writes down for the event log what this tenure did.
    pub(super) fn note(&self, note: impl FnOnce(AccountId, Token) -> Note) {
        let Owner { account, token } = self.owner;
        self.context.notes.note(self.context.clock.wall(), || note(account, token));
    }

    pub(super) fn persist(&self, pair: reconcile::Pair) {
        let row = rows::pair_row(self.owner, pair, self.context.clock.wall());
        self.context.writer.push(Row::Pair(row));
    }

    pub(super) fn record(&self, record: Record) {
        let outcome = record.outcome.as_str();
        metrics::counter!(names::COPIES, "action" => record.action, "outcome" => outcome)
            .increment(1);
        if let (crate::writer::EventOutcome::Skipped, Some(reason)) =
            (record.outcome, &record.reason)
            && let Some(reason) = reconcile::SkipReason::from_word(reason)
        {
            metrics::counter!(names::SKIPS, "reason" => reason.as_str()).increment(1);
        }
        let event = rows::copy_event(self.owner, record, self.context.clock.wall());
        self.context.writer.push(Row::CopyEvent(event));
    }
}

/// A permit for an order of this stretch of permission. One of a later stretch is for after the
/// reconcile that belongs to it, on a connection of its own (H4).
fn permit_of_stretch(
    gate: &Gate,
    account: AccountId,
    stretch: Option<u64>,
    now: NodeTime,
    reserve: Duration,
) -> Option<SendPermit> {
    let permit = gate.permit(account, now, reserve).ok()?;
    (Some(permit.stretch()) == stretch).then_some(permit)
}

fn sent(
    account: AccountId,
    token: Token,
    key: TicketKey,
    attempt: Attempt,
    grounds: Grounds,
) -> Note {
    Note::Sent {
        account,
        token,
        attempt,
        link: key.link,
        ticket: key.ticket,
        step: grounds.step,
        reason: grounds.reason,
        plan: grounds.plan,
        epoch: grounds.position.0,
        seq: grounds.position.1,
        doubtful: grounds.doubtful,
    }
}

/// The outcome, if it is there without waiting.
fn ready(answer: &mut crate::broker::Answer) -> Option<Outcome> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match answer.as_mut().poll(&mut cx) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}

fn count_plan(
    reason: crate::follower::Reason,
    steps: &[&'static str],
    held: bool,
    duplicates: usize,
) {
    metrics::counter!(names::RECONCILES, "reason" => reason.as_str()).increment(1);
    for step in steps {
        metrics::counter!(names::RECONCILE_ACTIONS, "action" => *step).increment(1);
    }
    if held {
        metrics::counter!(names::RECONCILE_HELD).increment(1);
    }
    if duplicates > 0 {
        metrics::counter!(names::DUPLICATES_FOUND).increment(duplicates as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{Confirmation, Confirmed};
    use crate::lease::{CycleNumber, LeaseTerm};

    const LEASE: Duration = Duration::from_secs(60);
    const FENCE: Duration = Duration::from_secs(15);

    fn at(seconds: u64) -> NodeTime {
        NodeTime::after_start(Duration::from_secs(seconds))
    }

    fn confirmed(number: CycleNumber, started: NodeTime) -> Confirmation {
        let term = Some(LeaseTerm::confirmed(started, LEASE, FENCE));
        let token = schemas::Token::MIN;
        let accounts = [(AccountId::MIN, Confirmed { token, term })].into();
        Confirmation { number, started, accounts }
    }

    // The permission ends and comes back between two looks at the clock: the connection and the
    // plans are still those of before the hole.
    #[test]
    fn an_order_decided_before_a_hole_in_the_permission_is_not_sent_after_it() {
        let gate = Gate::new();
        let first = CycleNumber::NONE.next();
        gate.apply(&confirmed(first, at(0)), at(0));
        let reserve = Duration::from_secs(2);
        let stretch = gate.permission(AccountId::MIN, at(1)).map(|p| p.stretch);
        let permit = |now| permit_of_stretch(&gate, AccountId::MIN, stretch, now, reserve);
        assert!(permit(at(1)).is_some());
        assert!(permit(at(50)).is_none(), "after its deadline");
        gate.apply(&confirmed(first.next(), at(50)), at(50));
        assert!(gate.permit(AccountId::MIN, at(51), reserve).is_ok(), "a permit there is");
        assert!(permit(at(51)).is_none(), "but not for this stretch");
    }
}
