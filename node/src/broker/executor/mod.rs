//! Broker calls that hold a thread: their threads, and the way there.
//!
//! Decides: when such a call starts, and what its outcome is where it never does. In: an order's
//! permit and the call itself. Out: its [`Answer`]. The threads are [`crew`]'s, who is next is
//! [`queue`]'s.
//!
//! Invariants:
//! 1. The permit travels with the call and is spent on the thread, in the statement before the call
//!    begins (H9): a call that was held up by the queue is not made after its permission ended.
//! 2. A call waits at most [`WAIT_MAX`] for its thread; an older one is not made. The follower
//!    decides anew, from the states of that moment.
//! 3. A call that waits is cancelled at once by [`Lane::close`], by dropping its answer, and by
//!    giving it up. One that has begun cannot be: its outcome is its answer's, or unknown (H11).
//! 4. The count of calls falls before an answer is there.
//! 5. A call that panics is answered `Unknown`, and its thread goes on.
//! 6. No thread is made after [`Executor::start`].
//!
//! Not covered: a call that never returns keeps its thread, and its place in its account's cap,
//! until the session's connection ends; the caller gives it up after its own limit.

pub mod crew;
pub mod queue;

use super::{Answer, LeftAt, NotSent, Outcome};
use crate::account::metrics::names;
use crate::clock::{NodeClock, NodeTime};
use crate::gate::{SendPermit, SpentPermit};
use crew::{Crew, Work};
use queue::LaneKey;
use schemas::AccountId;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

/// Longest wait for a thread. Chosen: fifteen answers of 130 ms, and less than the age from which
/// an open counts as late; whoever judges the age of a lost order adds it (H42).
pub const WAIT_MAX: Duration = Duration::from_secs(2);

/// The threads for calls that hold one, and the way to them. Clones share them.
#[derive(Debug, Clone)]
pub struct Executor {
    crew: Crew<Box<Call>>,
    clock: NodeClock,
}

impl Executor {
    /// Makes all threads there will be; fewer than asked for if the system gives no more.
    pub fn start(threads: usize, clock: NodeClock) -> Self {
        let crew = Crew::start(threads);
        metrics::counter!(names::BROKER_THREADS).increment(crew.threads() as u64);
        Executor { crew, clock }
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.crew.threads()
    }

    /// How many of them have nothing to do.
    pub fn idle(&self) -> usize {
        self.crew.idle()
    }

    /// The way of one session, with at most `cap` calls at once; nothing on a node without threads.
    ///
    /// The lane of an earlier session of the account is closed by it.
    pub fn open(&self, account: AccountId, cap: usize) -> Option<Lane> {
        if self.threads() == 0 || cap == 0 {
            return None;
        }
        let key = self.crew.open(account, cap);
        let wanted = self.crew.open_lanes() * cap;
        if wanted > self.threads() {
            tracing::warn!(
                %account, wanted, threads = self.threads(),
                "fewer threads than calls of all sessions: some may wait for others' answers"
            );
        }
        Some(Lane { executor: self.clone(), account, key })
    }
}

/// One session's way to the threads; closed when it is dropped.
#[derive(Debug)]
pub struct Lane {
    executor: Executor,
    account: AccountId,
    key: LaneKey,
}

impl Lane {
    /// Hands a call over. It begins as soon as a thread and room in the lane are there, under the
    /// permit as it is then; the call is told what it may state, and when it began.
    pub fn submit(
        &self,
        permit: SendPermit,
        call: impl FnOnce(SpentPermit, LeftAt) -> Outcome + Send + 'static,
    ) -> Answer {
        let mut answers = self.submit_all(vec![(permit, Box::new(call))]);
        answers.pop().unwrap_or_else(busy)
    }

    /// Hands calls over together, each as [`Lane::submit`] does; their answers in the same order.
    pub fn submit_all(&self, calls: Vec<(SendPermit, BlockingCall)>) -> Vec<Answer> {
        let Executor { crew, clock } = &self.executor;
        let handed = clock.now();
        let (mut work, mut ends) = (Vec::new(), Vec::new());
        for (permit, call) in calls {
            let (answer, receiver) = oneshot::channel();
            let left = Arc::new(OnceLock::new());
            work.push(Box::new(Call {
                permit: Some(permit),
                call: Some(call),
                handed,
                clock: clock.clone(),
                left: Arc::clone(&left),
                outcome: Outcome::NotSent(NotSent::Session),
                answer,
            }));
            ends.push((receiver, left));
        }
        let answer = |(taken, (receiver, left)): (Result<u64, _>, _)| match taken {
            Ok(number) => Answer::called(CallAnswer {
                receiver,
                left,
                crew: crew.clone(),
                lane: self.key,
                number,
                answered: false,
            }),
            Err(_refused) => busy(),
        };
        crew.submit_all(self.key, work).into_iter().zip(ends).map(answer).collect()
    }

    /// Ends the way: calls that wait are answered `NotSent` at once, and none begins any more.
    pub fn close(&self) {
        self.executor.crew.close(self.key);
    }

    /// Calls of this account that need a thread or have one.
    pub fn in_flight(&self) -> usize {
        self.executor.crew.in_flight(self.account)
    }

    /// Calls of this account that wait for one of these to end.
    pub fn waiting(&self) -> usize {
        self.executor.crew.waiting(self.account)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.close();
    }
}

/// What holds a thread until the broker has answered.
pub type BlockingCall = Box<dyn FnOnce(SpentPermit, LeftAt) -> Outcome + Send>;

fn busy() -> Answer {
    Answer::now(Outcome::NotSent(NotSent::Busy))
}

/// A call on its way to a thread, and on it.
struct Call {
    permit: Option<SendPermit>,
    call: Option<BlockingCall>,
    handed: NodeTime,
    clock: NodeClock,
    left: Arc<OnceLock<LeftAt>>,
    outcome: Outcome,
    answer: oneshot::Sender<Outcome>,
}

impl Work for Box<Call> {
    fn carry_out(&mut self) {
        let (Some(permit), Some(call)) = (self.permit.take(), self.call.take()) else { return };
        let now = self.clock.now();
        if now.since(self.handed) > WAIT_MAX {
            self.outcome = Outcome::NotSent(NotSent::Busy);
            return;
        }
        // Whatever happens from here on, it may have been sent.
        self.outcome = Outcome::Unknown("the call panicked".to_owned());
        let left = LeftAt { node: now, wall: self.clock.wall() };
        // The last check: between it and the call there is nothing.
        match permit.spend(now) {
            Ok(spent) => {
                let _only_once = self.left.set(left);
                self.outcome = call(spent, left);
            }
            Err(_) => self.outcome = Outcome::NotSent(NotSent::Gate),
        }
    }

    fn tell(self) {
        if let Some(left) = self.left.get() {
            let waited = left.node.since(self.handed);
            metrics::histogram!(names::THREAD_WAIT).record(waited.as_secs_f64());
        }
        // Nobody waits where the session was given up.
        let _nobody = self.answer.send(self.outcome);
    }
}

/// What comes of a call. Dropping it cancels the call if it waits.
#[derive(Debug)]
pub(crate) struct CallAnswer {
    receiver: oneshot::Receiver<Outcome>,
    left: Arc<OnceLock<LeftAt>>,
    crew: Crew<Box<Call>>,
    lane: LaneKey,
    number: u64,
    answered: bool,
}

impl CallAnswer {
    /// When the call began; nothing if it has not.
    pub(crate) fn left_at(&self) -> Option<LeftAt> {
        self.left.get().copied()
    }

    /// Takes the call back if it waits. Its outcome either way.
    pub(crate) fn give_up(&mut self) -> Outcome {
        if let Ok(outcome) = self.receiver.try_recv() {
            self.answered = true;
            return outcome;
        }
        match self.cancel() {
            true => Outcome::NotSent(NotSent::Busy),
            false => Outcome::Unknown("no answer within the call limit".to_owned()),
        }
    }

    fn cancel(&mut self) -> bool {
        let waits = !self.answered && self.left.get().is_none();
        self.answered = true;
        waits && self.crew.cancel(self.lane, self.number).is_some()
    }
}

impl Future for CallAnswer {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let outcome = std::task::ready!(Pin::new(&mut self.receiver).poll(cx));
        self.answered = true;
        // The threads end with the process: then nothing is known of a call that had begun.
        let gone = || Outcome::Unknown("the threads of broker calls are gone".to_owned());
        Poll::Ready(outcome.unwrap_or_else(|_| gone()))
    }
}

impl Drop for CallAnswer {
    fn drop(&mut self) {
        self.cancel();
    }
}

#[cfg(test)]
mod tests;
