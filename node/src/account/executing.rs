//! What a follower wants done, done: orders under permits, reads, rows.
//!
//! Orders leave first: what was decided in one turn is submitted together, each order under a permit
//! that was taken right before, and own time is stamped there. Rows, counters and notes of these
//! orders follow in the order of the decisions, when the orders of everybody else have left as well.

use super::metrics::names;
use super::reading::read;
use super::rows::{self, Owner};
use super::session::{AccountSession, Answered, Connection, LOAD_RETRY};
use crate::broker::{Answer, BrokerSession, NotSent, Outcome, PermittedOrder};
use crate::causes::with_causes;
use crate::clock::NodeTime;
use crate::follower::{Attempt, Effect, Grounds, Input, Now, Record, TicketKey};
use crate::gate::{Gate, SendPermit};
use crate::notes::Note;
use crate::stamps::Trace;
use crate::writer::Row;
use schemas::{AccountId, Token};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Orders and effects that one turn of the feeds may leave to be done after its orders have left.
pub(super) const OUTBOX_MAX: usize = 256;

/// What was decided and is not done yet, in its order.
#[derive(Default)]
pub(super) struct Outbox {
    todo: VecDeque<Todo>,
    /// Orders in it that have not left.
    orders: usize,
}

enum Todo {
    /// An order that waits for its turn.
    Order(Decided),
    /// An order that left, or could not.
    Submitted { order: Decided, answer: Answer, at: Now },
    /// An order that got no permit.
    Denied { key: TicketKey, attempt: Attempt, at: Now },
    /// Anything else.
    Effect(Effect),
}

struct Decided {
    key: TicketKey,
    attempt: Attempt,
    request: schemas::OrderRequest,
    /// What it was decided from, if anybody reads it.
    grounds: Option<Grounds>,
    trace: Option<Trace>,
}

impl Outbox {
    /// How much is left to do.
    pub(super) fn len(&self) -> usize {
        self.todo.len()
    }

    fn put_first(&mut self, todo: Vec<Todo>) {
        self.orders += todo.iter().filter(|todo| matches!(todo, Todo::Order(_))).count();
        todo.into_iter().rev().for_each(|todo| self.todo.push_front(todo));
    }
}

impl AccountSession {
    /// Does what the follower wants done; an answer that is there at once is handed back at once.
    pub(super) fn execute(&mut self, connection: &mut Connection, effects: Vec<Effect>) {
        self.put(effects);
        self.settle(connection);
    }

    /// Keeps what the follower wants done, behind what is kept already.
    pub(super) fn put(&mut self, effects: Vec<Effect>) {
        let todo = self.todo_of(effects);
        let orders = todo.iter().filter(|todo| matches!(todo, Todo::Order(_))).count();
        self.outbox.orders += orders;
        self.outbox.todo.extend(todo);
    }

    fn todo_of(&self, effects: Vec<Effect>) -> Vec<Todo> {
        let is_read = self.context.notes.is_on();
        let todo = |effect| match effect {
            Effect::Send { key, attempt, request } => {
                let follower = self.follower.as_ref().filter(|_| is_read);
                let grounds = follower.and_then(|follower| follower.grounds(key));
                Todo::Order(Decided { key, attempt, request, grounds, trace: self.trace })
            }
            other => Todo::Effect(other),
        };
        effects.into_iter().map(todo).collect()
    }

    /// Hands every order that waits to the broker, each under a permit of its own, together. What
    /// follows from that is for [`AccountSession::settle`]: rows and counters can wait.
    /// False if none waits.
    pub(super) fn submit(&mut self, connection: &Connection) -> bool {
        if std::mem::take(&mut self.outbox.orders) == 0 {
            return false;
        }
        let (context, owner) = (&self.context, self.owner);
        let stamps = &context.stamps;
        let turn = stamps.now();
        let reserve = context.config.send_reserve;
        let at = context.now();
        let mut todo = std::mem::take(&mut self.outbox.todo);
        let mut orders = Vec::new();
        for item in &mut todo {
            let Todo::Order(Decided { key, attempt, .. }) = item else { continue };
            let (key, attempt, account) = (*key, *attempt, owner.account);
            let Some(permit) =
                permit_of_stretch(&context.gate, account, self.stretch, at.node, reserve)
            else {
                *item = Todo::Denied { key, attempt, at };
                continue;
            };
            let Todo::Order(Decided { request, .. }) = item else { continue };
            orders.push(PermittedOrder { permit, request, attempt });
        }
        // The instruction before the order call: own time ends here.
        let called = stamps.now();
        let mut answers = connection.session.submit_all(orders).into_iter();
        for item in todo {
            let item = match item {
                Todo::Order(order) => {
                    if let Some(trace) = &order.trace {
                        stamps.sent(owner.account, trace, turn, called);
                    }
                    let answer = answers.next().expect("every order has an answer");
                    Todo::Submitted { order, answer, at }
                }
                other => other,
            };
            self.outbox.todo.push_back(item);
        }
        true
    }

    /// Does everything that is kept, in its order; what follows from an order comes before the next
    /// item of the list.
    pub(super) fn settle(&mut self, connection: &mut Connection) {
        loop {
            self.submit(connection);
            let Some(item) = self.outbox.todo.pop_front() else { return };
            let effects = match item {
                Todo::Effect(effect) => {
                    self.perform(connection, effect);
                    continue;
                }
                Todo::Denied { key, attempt, at } => {
                    let outcome = Outcome::NotSent(NotSent::Gate);
                    self.answered_at_once(key, attempt, outcome, at)
                }
                Todo::Submitted { order, answer, at } => {
                    self.submitted(connection, order, answer, at)
                }
                Todo::Order(_) => unreachable!("every order was submitted"),
            };
            let more = self.todo_of(effects);
            self.outbox.put_first(more);
        }
    }

    fn answered_at_once(
        &mut self,
        key: TicketKey,
        attempt: Attempt,
        outcome: Outcome,
        at: Now,
    ) -> Vec<Effect> {
        let Some(follower) = &mut self.follower else { return Vec::new() };
        follower.step(at, Input::Answer { key, attempt, outcome })
    }

    /// What follows from an order call.
    fn submitted(
        &mut self,
        connection: &mut Connection,
        order: Decided,
        mut answer: Answer,
        at: Now,
    ) -> Vec<Effect> {
        let Decided { key, attempt, request, grounds, .. } = order;
        match ready(&mut answer) {
            Some(outcome @ Outcome::NotSent(_)) => {
                return self.answered_at_once(key, attempt, outcome, at);
            }
            // It left, and its end is known already: one more answer that comes after.
            Some(outcome) => answer = Answer::now(outcome),
            None => {}
        }
        let Some(follower) = &mut self.follower else { return Vec::new() };
        let context = &self.context;
        let action = request.action();
        self.counters.started(action).increment(1);
        if let Some(grounds) = grounds {
            let Owner { account, token } = self.owner;
            context.notes.note(at.wall, || sent(account, token, key, attempt, grounds));
        }
        let effects = follower.submitted(key, attempt, at);
        let limit = context.config.broker_call_limit;
        // Where it leaves on another thread, its own time is known with its answer.
        if !answer.leaves_by_itself() {
            self.count_own_time(key, action);
        }
        connection.answers.push(Box::pin(async move {
            let (outcome, left) = answer.within(limit).await;
            Answered { key, attempt, action, outcome, left }
        }));
        effects
    }

    /// Counts the own time of an order that has left, where it has one.
    pub(super) fn count_own_time(&mut self, key: TicketKey, action: &'static str) {
        let own_time = self.follower.as_ref().and_then(|follower| follower.own_time(key));
        if let Some(own_time) = own_time {
            self.counters.own_time(action).record(own_time.as_secs_f64());
        }
    }

    fn perform(&mut self, connection: &mut Connection, effect: Effect) {
        match effect {
            Effect::Send { .. } => unreachable!("orders are submitted"),
            Effect::Read { id, since, symbols } => {
                let session = Arc::clone(&connection.session);
                connection.reads.push(read(session, id, since, symbols));
            }
            Effect::AskMaster { master, reason } => {
                if let Some(feed) = self.context.feeds.get(master) {
                    feed.request_snapshot(self.owner.account, reason);
                }
            }
            Effect::Persist(pair) => self.persist(*pair),
            Effect::Record(record) => self.record(*record),
            Effect::Planned { link, plan, begun, position, reason, steps, held, duplicates } => {
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
            Effect::CloseAnswered { asker, answer } => self.answer_asker(asker, answer),
            Effect::Untaggable(link) => self.store_untaggable(link),
        }
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
                tracing::warn!(account = %owner.account, %link, error = %with_causes(&error), "lost tags not stored");
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
        let view = self.follower.as_ref().and_then(|follower| follower.view());
        let volumes = view.and_then(|view| view.symbols.get(&pair.symbol)).map(Into::into);
        let row = rows::pair_row(self.owner, pair, volumes, self.context.clock.wall());
        self.context.writer.push(Row::Pair(row));
    }

    pub(super) fn record(&mut self, record: Record) {
        self.counters.copies(record.action, record.outcome.as_str()).increment(1);
        if let (crate::writer::EventOutcome::Skipped, Some(reason)) =
            (record.outcome, &record.reason)
            && let Some(reason) = reconcile::SkipReason::from_word(reason)
        {
            metrics::counter!(names::SKIPS, "reason" => reason.as_str()).increment(1);
        }
        let event = rows::copy_event(self.owner, record, self.context.clock.wall());
        self.context.tape.put(&event);
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
fn ready(answer: &mut Answer) -> Option<Outcome> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match Pin::new(answer).poll(&mut cx) {
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
