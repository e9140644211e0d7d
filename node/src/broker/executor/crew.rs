//! Threads that exist before there is work, and stay.
//!
//! Decides which thread is woken, and when. In: work of lanes (see [`super::queue`]). Out: the work
//! done, each piece on a thread of its own for as long as it likes to hold it.
//!
//! All threads sleep on one word. Work wakes a thread at once only while fewer than [`CALLED_MAX`]
//! have been called and are not there yet; a thread that comes calls up to [`CALLS_EACH`] more, with
//! one system call, for what else is ready; one that has finished takes the next work itself. So a
//! burst does not make hundreds of threads run for one lock, and whoever hands work over, which is
//! the hot runtime, spends its time on the next order. `node/README.md` has the measurements of the
//! ways that were tried.
//!
//! Invariants:
//! 1. No thread is made after [`Crew::start`], and none ends before the last handle is gone.
//! 2. Work that is ready has a thread called for it, or every thread is busy: a thread that was
//!    called looks at the queue when it comes, and calls more as long as more is ready.
//! 3. The count of a lane falls before [`Work::tell`] is called.
//! 4. A panic in [`Work::carry_out`] costs neither the thread nor [`Work::tell`].

use super::queue::{Entry, LaneKey, Queue};
use crate::causes::with_causes;
use parking_lot::Mutex;
use rustix::thread::futex;
use schemas::AccountId;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Threads that were called and are not there yet, past which new work wakes no more of them. Measured
/// in bursts of 480 and 810 calls of 30 followers on two cores: with 1 or 2 of them the threads come
/// too slowly for whoever hands over, and without a bound they run for one lock.
pub const CALLED_MAX: usize = 16;
/// How many more a thread calls that has come. Measured: with 1 the chain is too slow, and with 8 the
/// bound of [`CALLED_MAX`] is no bound.
pub const CALLS_EACH: usize = 4;

/// A piece of work that may hold its thread.
pub trait Work: Send + 'static {
    /// Does it.
    fn carry_out(&mut self);
    /// Says what came of it; called once, after `carry_out` has returned or panicked, or instead of
    /// it where the work never started.
    fn tell(self);
}

/// The threads. Clones share them; they end when the last clone is gone.
pub struct Crew<W: Work> {
    shared: Arc<Shared<W>>,
    threads: usize,
    _end: Arc<EndWithLast<W>>,
}

impl<W: Work> Clone for Crew<W> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            threads: self.threads,
            _end: Arc::clone(&self._end),
        }
    }
}

impl<W: Work> std::fmt::Debug for Crew<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("threads", &self.threads).finish_non_exhaustive()
    }
}

struct EndWithLast<W: Work>(Arc<Shared<W>>);

impl<W: Work> Drop for EndWithLast<W> {
    fn drop(&mut self) {
        let left = {
            let mut state = self.0.state.lock();
            state.ended = true;
            self.0.word.fetch_add(1, Ordering::Relaxed);
            state.queue.close_all()
        };
        self.0.wake(u32::MAX >> 1);
        left.into_iter().for_each(|entry| entry.work.tell());
    }
}

struct Shared<W> {
    state: Mutex<State<W>>,
    /// Changes, under the lock of `state`, whenever threads are called.
    word: AtomicU32,
}

struct State<W> {
    queue: Queue<W>,
    /// Threads that sleep, or are about to, and were not called.
    idle: usize,
    /// Threads that were called and have not looked at the queue since.
    called: usize,
    ended: bool,
}

/// What a thread does next.
enum Turn<W> {
    Work(Entry<W>),
    Sleep { seen: u32 },
    End,
}

impl<W: Work> Crew<W> {
    /// Makes the threads, as many as asked for or as the system gives; none later.
    pub fn start(asked: usize) -> Self {
        let queue = Queue::default();
        let state = Mutex::new(State { queue, idle: 0, called: 0, ended: false });
        let shared = Arc::new(Shared { state, word: AtomicU32::new(0) });
        let mut threads = 0;
        while threads < asked {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("lockstep-call".into());
            if let Err(error) = thread.spawn(move || shared.work()) {
                tracing::warn!(error = %with_causes(&error), asked, got = threads, "no more threads for broker calls");
                break;
            }
            threads += 1;
        }
        let end = Arc::new(EndWithLast(Arc::clone(&shared)));
        Crew { shared, threads, _end: end }
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// How many of them have nothing to do.
    pub fn idle(&self) -> usize {
        self.shared.state.lock().idle
    }

    /// A lane for a new session of an account; see [`Queue::open`].
    pub fn open(&self, account: AccountId, cap: usize) -> LaneKey {
        let (lane, left) = self.shared.state.lock().queue.open(account, cap);
        left.into_iter().for_each(|entry| entry.work.tell());
        lane
    }

    /// Lanes that are open.
    pub fn open_lanes(&self) -> usize {
        self.shared.state.lock().queue.open_lanes()
    }

    /// Hands work over, all of it with one look at the queue: for each piece its number, or the
    /// piece itself where the lane is closed or full.
    ///
    /// Never waits.
    pub fn submit_all(&self, lane: LaneKey, work: Vec<W>) -> Vec<Result<u64, W>> {
        let (taken, calls) = {
            let mut state = self.shared.state.lock();
            let may_call = work.len().min(CALLED_MAX.saturating_sub(state.called));
            let taken = work.into_iter().map(|piece| state.queue.submit(lane, piece)).collect();
            (taken, state.call(may_call, &self.shared.word))
        };
        self.shared.wake(calls);
        taken
    }

    /// Takes out what has not started; nothing if it has.
    pub fn cancel(&self, lane: LaneKey, number: u64) -> Option<W> {
        let (entry, calls) = {
            let mut state = self.shared.state.lock();
            let entry = state.queue.cancel(lane, number);
            (entry, state.call(1, &self.shared.word))
        };
        self.shared.wake(calls);
        entry.map(|entry| entry.work)
    }

    /// The session has ended: what has not started is told so.
    pub fn close(&self, lane: LaneKey) {
        let left = self.shared.state.lock().queue.close(lane);
        left.into_iter().for_each(|entry| entry.work.tell());
    }

    /// How many pieces of an account need a thread or have one.
    pub fn in_flight(&self, account: AccountId) -> usize {
        self.shared.state.lock().queue.taken(account)
    }

    /// How many pieces of an account wait for room in their lane.
    pub fn waiting(&self, account: AccountId) -> usize {
        self.shared.state.lock().queue.waiting(account)
    }
}

#[cfg(test)]
impl<W: Work> Crew<W> {
    pub(super) fn shared_for_tests(&self) -> &Arc<impl Sized + use<W>> {
        &self.shared
    }
}

impl<W> State<W> {
    /// Calls up to so many threads for what is ready and has none called yet; how many to wake.
    fn call(&mut self, most: usize, word: &AtomicU32) -> u32 {
        let calls = self.queue.ready().saturating_sub(self.called).min(most).min(self.idle);
        if calls > 0 {
            self.idle -= calls;
            self.called += calls;
            // One that has looked and does not sleep yet will not: the word is another.
            word.fetch_add(1, Ordering::Relaxed);
        }
        u32::try_from(calls).unwrap_or(u32::MAX >> 1)
    }

    /// A thread is back: one of those called, whichever it is, or one that woke for no reason.
    fn arrive(&mut self) {
        if self.called > 0 {
            self.called -= 1;
        } else {
            self.idle -= 1;
        }
    }
}

impl<W: Work> Shared<W> {
    fn wake(&self, calls: u32) {
        if calls > 0 {
            // It cannot fail: the word is there.
            let _woken = futex::wake(&self.word, futex::Flags::PRIVATE, calls);
        }
    }

    fn work(&self) {
        let (mut finished, mut slept) = (None, false);
        loop {
            let (turn, calls) = self.next_turn(finished.as_ref().map(|e: &Entry<W>| e.lane), slept);
            // Its count has fallen: now it may be seen.
            if let Some(entry) = finished.take() {
                entry.work.tell();
            }
            self.wake(calls);
            slept = false;
            match turn {
                Turn::Work(mut entry) => {
                    // What it was about to say stays unsaid; it knows that it has no answer.
                    let _panicked = catch_unwind(AssertUnwindSafe(|| entry.work.carry_out()));
                    finished = Some(entry);
                }
                Turn::Sleep { seen } => {
                    // Woken, or the word changed meanwhile, or a signal: all lead to a look.
                    let _why = futex::wait(&self.word, futex::Flags::PRIVATE, seen, None);
                    slept = true;
                }
                Turn::End => return,
            }
        }
    }

    fn next_turn(&self, finished: Option<LaneKey>, slept: bool) -> (Turn<W>, u32) {
        let mut state = self.state.lock();
        if slept {
            state.arrive();
        }
        if let Some(lane) = finished {
            state.queue.finish(lane);
        }
        match state.queue.take() {
            Some(entry) => {
                let calls = state.call(CALLS_EACH, &self.word);
                (Turn::Work(entry), calls)
            }
            None if state.ended => (Turn::End, 0),
            None => {
                state.idle += 1;
                (Turn::Sleep { seen: self.word.load(Ordering::Relaxed) }, 0)
            }
        }
    }
}
