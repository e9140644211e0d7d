//! The executors that are compared: what each does with a call that holds its thread.

use super::stamps::ANSWER;
use lockstep::broker::executor::crew::{Crew, Work};
use lockstep::broker::executor::{BlockingCall, Executor, Lane};
use lockstep::broker::{Answer, LeftAt, NotSent, Outcome};
use lockstep::clock::NodeClock;
use lockstep::gate::SendPermit;
use parking_lot::{Condvar, Mutex};
use schemas::AccountId;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Takes calls of followers, each under its permit.
pub(super) trait Pool: Send + Sync {
    /// Hands those of one follower over that were decided together; never waits.
    fn submit_all(&self, follower: usize, calls: Vec<(SendPermit, BlockingCall)>) -> Vec<Answer>;
    /// Whether a call may hold the thread on which it runs.
    fn has_threads(&self) -> bool {
        true
    }
}

/// Ours: threads made before the burst, a lane a follower.
pub(super) struct Prestarted {
    lanes: Vec<Lane>,
}

impl Prestarted {
    pub(super) fn new(executor: &Executor, accounts: &[AccountId], cap: usize) -> Self {
        let open = |account: &AccountId| executor.open(*account, cap).expect("it has threads");
        Self { lanes: accounts.iter().map(open).collect() }
    }
}

impl Pool for Prestarted {
    fn submit_all(&self, follower: usize, calls: Vec<(SendPermit, BlockingCall)>) -> Vec<Answer> {
        self.lanes[follower].submit_all(calls)
    }
}

/// What every other pool does on its thread: the same checks and the same call.
fn carry_out(clock: &NodeClock, permit: SendPermit, call: BlockingCall) -> Outcome {
    let now = clock.now();
    let left = LeftAt { node: now, wall: clock.wall() };
    match permit.spend(now) {
        Ok(spent) => call(spent, left),
        Err(_) => Outcome::NotSent(NotSent::Gate),
    }
}

fn lost() -> Outcome {
    Outcome::Unknown("the call ended without an answer".to_owned())
}

/// No thread: a call runs where it was decided, holds nothing, and is answered when a broker would
/// have. What is left is the time of the decisions.
pub(super) struct Nobody {
    pub(super) clock: NodeClock,
}

impl Pool for Nobody {
    fn submit_all(&self, _follower: usize, calls: Vec<(SendPermit, BlockingCall)>) -> Vec<Answer> {
        let run = |(permit, call)| {
            let outcome = carry_out(&self.clock, permit, call);
            Answer::later(async {
                tokio::time::sleep(ANSWER).await;
                outcome
            })
        };
        calls.into_iter().map(run).collect()
    }

    fn has_threads(&self) -> bool {
        false
    }
}

/// Tokio's own threads for what blocks, as many as its runtime allows; they begin with none.
pub(super) struct SpawnBlocking {
    pub(super) runtime: Handle,
    pub(super) clock: NodeClock,
}

impl Pool for SpawnBlocking {
    fn submit_all(&self, _follower: usize, calls: Vec<(SendPermit, BlockingCall)>) -> Vec<Answer> {
        calls.into_iter().map(|(permit, call)| self.submit(permit, call)).collect()
    }
}

impl SpawnBlocking {
    fn submit(&self, permit: SendPermit, call: BlockingCall) -> Answer {
        let clock = self.clock.clone();
        let answer = self.runtime.spawn_blocking(move || carry_out(&clock, permit, call));
        Answer::later(async move { answer.await.unwrap_or_else(|_| lost()) })
    }
}

/// Threads made as they are needed, beyond those that it begins with.
pub(super) struct Growing {
    shared: Arc<GrowingShared>,
    clock: NodeClock,
}

struct GrowingShared {
    state: Mutex<GrowingState>,
    work: Condvar,
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct GrowingState {
    jobs: VecDeque<Job>,
    idle: usize,
    ended: bool,
}

impl Growing {
    /// With so many threads, all of them waiting.
    pub(super) fn new(threads: usize, clock: NodeClock) -> Self {
        let shared = Arc::new(GrowingShared { state: Mutex::default(), work: Condvar::new() });
        (0..threads).for_each(|_| GrowingShared::grow(&shared));
        while shared.state.lock().idle < threads {
            std::thread::yield_now();
        }
        Self { shared, clock }
    }
}

impl GrowingShared {
    fn grow(shared: &Arc<Self>) {
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("growing".into());
        thread.spawn(move || shared.run()).expect("a benchmark needs its threads");
    }

    fn run(&self) {
        loop {
            let job = {
                let mut state = self.state.lock();
                loop {
                    if let Some(job) = state.jobs.pop_front() {
                        break job;
                    }
                    if state.ended {
                        return;
                    }
                    state.idle += 1;
                    self.work.wait(&mut state);
                    state.idle -= 1;
                }
            };
            job();
        }
    }
}

impl Pool for Growing {
    fn submit_all(&self, _follower: usize, calls: Vec<(SendPermit, BlockingCall)>) -> Vec<Answer> {
        calls.into_iter().map(|(permit, call)| self.submit(permit, call)).collect()
    }
}

impl Growing {
    fn submit(&self, permit: SendPermit, call: BlockingCall) -> Answer {
        let (sender, answer) = oneshot::channel();
        let clock = self.clock.clone();
        let job = move || {
            let _nobody = sender.send(carry_out(&clock, permit, call));
        };
        let grows = {
            let mut state = self.shared.state.lock();
            state.jobs.push_back(Box::new(job));
            state.jobs.len() > state.idle
        };
        match grows {
            true => GrowingShared::grow(&self.shared),
            false => drop(self.shared.work.notify_one()),
        }
        Answer::later(async move { answer.await.unwrap_or_else(|_| lost()) })
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.work.notify_all();
    }
}

/// A job with nothing of ours in it: the floor.
pub(super) struct Bare(pub(super) Option<Box<dyn FnOnce() + Send>>);

impl Work for Bare {
    fn carry_out(&mut self) {
        if let Some(job) = self.0.take() {
            job();
        }
    }

    fn tell(self) {}
}

/// Threads of the same kind as ours, for bare jobs.
pub(super) type BareCrew = Crew<Bare>;
