//! Time as a node counts it: the most and the least that can have passed, and a detector for having
//! been frozen.
//!
//! Decides: how much time has passed on this node, and whether the process stood still.
//! In: `CLOCK_MONOTONIC`, `CLOCK_BOOTTIME` and the wall clock, behind the seam [`Clock`].
//! Out: [`NodeTime`], which only grows; [`Freeze`], from a ticker thread.
//!
//! The monotonic clock stops while a machine is suspended, and no clock but the wall clock moves
//! while a hypervisor holds a guest still (H6). Whoever trusts a lease by one of them trusts it
//! too long, so elapsed time is the largest of the three. A wait that must not end too early (for
//! what another node may still do) is the other way round: a wall clock that somebody sets forward
//! ends it at once, so such a wait counts by the boot clock alone ([`NodeTime::surely_since`]).
//!
//! Invariants:
//! 1. Elapsed time is never less than what any of the three clocks says, except that a wall clock
//!    set back is ignored.
//! 2. [`NodeTime`] never goes back, on any thread.
//! 3. A gap of more than [`FREEZE_GAP`] between two ticks is reported once, with its length.
//! 4. What has surely passed is never more than true time, whatever is done to the wall clock.
//!
//! A wall clock set forward makes node time jump: leases end early and a reconcile follows. That
//! is the price, and a safe one. A guest that its hypervisor held waits longer where it must not
//! wait too little.
//!
//! Not covered: a pause shorter than [`FREEZE_GAP`] between the last check and the socket write;
//! a pause that no clock shows, because the wall clock is set right again only later.
//!
//! This is the one module that may read raw clocks.

use parking_lot::{Mutex, RwLock};
use rustix::time::{ClockId, clock_gettime};
use schemas::Micros;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the ticker looks (chosen in H6: eight looks within [`FREEZE_GAP`]).
pub const TICK: Duration = Duration::from_millis(250);

/// A longer gap between two ticks counts as a freeze (chosen in H6: equal to the send reserve).
pub const FREEZE_GAP: Duration = Duration::from_secs(2);

/// The three clocks, read at nearly one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// `CLOCK_MONOTONIC`: stops in suspend.
    pub monotonic: Duration,
    /// `CLOCK_BOOTTIME`: goes on in suspend, stops while a hypervisor holds the guest.
    pub boottime: Duration,
    /// Since 1970-01-01 UTC; can be set by hand or by NTP, in both directions.
    pub wall: Duration,
}

impl Reading {
    /// Time passed since `earlier`: the largest of the three; a clock that went back counts zero.
    pub fn elapsed_since(&self, earlier: &Reading) -> Duration {
        let monotonic = self.monotonic.saturating_sub(earlier.monotonic);
        let boottime = self.boottime.saturating_sub(earlier.boottime);
        let wall = self.wall.saturating_sub(earlier.wall);
        monotonic.max(boottime).max(wall)
    }

    /// Time that has passed since `earlier` for certain: by the clock that nobody sets. A time service
    /// that slews may make it some percent fast.
    pub fn surely_since(&self, earlier: &Reading) -> Duration {
        self.boottime.saturating_sub(earlier.boottime)
    }
}

/// A source of [`Reading`]s.
pub trait Clock: Send + Sync + 'static {
    /// Reads all three clocks.
    fn read(&self) -> Reading;

    /// Reads what is enough between two ticks, cheaply: no clock in it is ahead of what
    /// [`Clock::read`] would say.
    fn read_quickly(&self) -> Reading {
        self.read()
    }

    /// Reads the wall clock alone.
    fn read_wall(&self) -> Duration {
        self.read().wall
    }
}

/// The clocks of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn read(&self) -> Reading {
        Reading {
            monotonic: since_zero(ClockId::Monotonic),
            boottime: since_zero(ClockId::Boottime),
            wall: since_zero(ClockId::Realtime),
        }
    }

    /// Since the last tick the boot clock has gone on at least as far as the monotonic one, which
    /// only lacks the time asleep; and a wall clock that is some milliseconds old (one timer
    /// interrupt) shows a jump soon enough. Together a third of the price.
    fn read_quickly(&self) -> Reading {
        Reading {
            monotonic: Duration::ZERO,
            boottime: since_zero(ClockId::Boottime),
            wall: since_zero(ClockId::RealtimeCoarse),
        }
    }

    fn read_wall(&self) -> Duration {
        since_zero(ClockId::Realtime)
    }
}

fn since_zero(id: ClockId) -> Duration {
    let time = clock_gettime(id);
    // A wall clock before 1970 reads as zero: it then never leads the other two.
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanoseconds)
}

/// Nanoseconds of `CLOCK_MONOTONIC`: for measurements only. One number for all processes of a
/// machine, and of no meaning on another one.
pub fn monotonic_ns() -> u64 {
    nanoseconds(since_zero(ClockId::Monotonic))
}

/// Clocks that move only when told to, for tests and simulation. Clones share one time.
#[derive(Debug, Clone)]
pub struct ManualClock {
    reading: Arc<Mutex<Reading>>,
}

impl Default for ManualClock {
    fn default() -> Self {
        let reading = Reading {
            monotonic: Duration::from_secs(1_000),
            boottime: Duration::from_secs(2_000),
            wall: Duration::from_secs(1_700_000_000),
        };
        Self { reading: Arc::new(Mutex::new(reading)) }
    }
}

impl ManualClock {
    /// Time passes as it should.
    pub fn advance(&self, by: Duration) {
        let mut reading = self.reading.lock();
        reading.monotonic += by;
        reading.boottime += by;
        reading.wall += by;
    }

    /// The machine sleeps: the monotonic clock stands still.
    pub fn suspend(&self, by: Duration) {
        let mut reading = self.reading.lock();
        reading.boottime += by;
        reading.wall += by;
    }

    /// A hypervisor holds the guest: only the wall clock shows it afterwards. Somebody who sets the
    /// wall clock forward leaves the same trace.
    pub fn hold_guest(&self, by: Duration) {
        self.reading.lock().wall += by;
    }

    /// Somebody sets the wall clock back.
    pub fn set_wall_back(&self, by: Duration) {
        let mut reading = self.reading.lock();
        reading.wall = reading.wall.saturating_sub(by);
    }
}

impl Clock for ManualClock {
    fn read(&self) -> Reading {
        *self.reading.lock()
    }
}

/// An instant on this node: time passed since the process started. Never leaves the process.
///
/// Instants are compared by the fastest clock, which is right for everything that must not happen
/// too late. What must not happen too early asks [`NodeTime::is_surely_at`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NodeTime {
    /// By the fastest of the three clocks.
    since_start_ns: u64,
    /// By the boot clock.
    surely_ns: u64,
}

impl NodeTime {
    /// The start of the process.
    pub const START: NodeTime = NodeTime { since_start_ns: 0, surely_ns: 0 };
    /// Later than every instant that will be reached.
    pub const NEVER: NodeTime = NodeTime { since_start_ns: u64::MAX, surely_ns: u64::MAX };

    /// The instant this long after the start, if no clock was set and nothing was held.
    pub fn after_start(passed: Duration) -> Self {
        Self::START.plus(passed)
    }

    /// Time since the start.
    pub fn since_start(self) -> Duration {
        Duration::from_nanos(self.since_start_ns)
    }

    /// How much later this is than `earlier`; zero if it is not later.
    pub fn since(self, earlier: NodeTime) -> Duration {
        Duration::from_nanos(self.since_start_ns.saturating_sub(earlier.since_start_ns))
    }

    /// The part of [`NodeTime::since`] that has passed for certain: all of it, unless the wall
    /// clock was set forward or a hypervisor held the guest.
    pub fn surely_since(self, earlier: NodeTime) -> Duration {
        Duration::from_nanos(self.surely_ns.saturating_sub(earlier.surely_ns))
    }

    /// Whether this instant is not before `due`, whatever was done to the wall clock.
    pub fn is_surely_at(self, due: NodeTime) -> bool {
        self.surely_ns >= due.surely_ns
    }

    /// How much time is left from `now` until this instant; zero if it has passed.
    pub fn left(self, now: NodeTime) -> Duration {
        self.since(now)
    }

    /// This instant moved into the future.
    pub fn plus(self, by: Duration) -> Self {
        self.moved(by, u64::saturating_add)
    }

    /// This instant moved into the past, at most to the start.
    pub fn minus(self, by: Duration) -> Self {
        self.moved(by, u64::saturating_sub)
    }

    fn moved(self, by: Duration, way: fn(u64, u64) -> u64) -> Self {
        let by = nanoseconds(by);
        Self { since_start_ns: way(self.since_start_ns, by), surely_ns: way(self.surely_ns, by) }
    }

    /// The instant at which the clocks say `now`, where they said `earlier` at this one.
    fn later(self, now: &Reading, earlier: &Reading) -> Self {
        let fastest = nanoseconds(now.elapsed_since(earlier));
        let surely = nanoseconds(now.surely_since(earlier));
        Self {
            since_start_ns: self.since_start_ns.saturating_add(fastest),
            surely_ns: self.surely_ns.saturating_add(surely),
        }
    }
}

impl fmt::Debug for NodeTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node+{:.6}s", self.since_start().as_secs_f64())
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The node stood still for this long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Freeze {
    /// Between the two ticks around it, by the fastest clock.
    pub gap: Duration,
}

/// Turns [`Reading`]s into [`NodeTime`]. Clones share one time.
///
/// Reading costs two clock reads without a system call, a read lock nobody holds for long and one
/// atomic maximum: 76 to 94 ns of processor time, optimised, two busy cores, mean of two million; cheap
/// enough before every order.
#[derive(Clone)]
pub struct NodeClock {
    inner: Arc<Inner>,
}

struct Inner {
    clock: Box<dyn Clock>,
    anchor: RwLock<Anchor>,
    latest_ns: AtomicU64,
}

/// Where time is counted from. It moves at every tick, so that a wall clock set back hides a
/// later pause for one tick at most, and so that the small differences between the three reads
/// are added up four times a second and not at every order.
#[derive(Clone, Copy)]
struct Anchor {
    reading: Reading,
    time: NodeTime,
}

impl fmt::Debug for NodeClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeClock").field("now", &self.now()).finish()
    }
}

impl NodeClock {
    /// Counts from this moment on the given clocks.
    pub fn new(clock: impl Clock) -> Self {
        let anchor = Anchor { reading: clock.read(), time: NodeTime::START };
        let inner = Inner {
            clock: Box::new(clock),
            anchor: RwLock::new(anchor),
            latest_ns: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Counts from this moment on this machine's clocks.
    pub fn system() -> Self {
        Self::new(SystemClock)
    }

    /// Time passed since the start.
    pub fn now(&self) -> NodeTime {
        let anchor = *self.inner.anchor.read();
        let reading = self.inner.clock.read_quickly();
        self.never_back(anchor.time.later(&reading, &anchor.reading))
    }

    /// The wall clock, for stamps on events and rows; never for a decision about a lease.
    pub fn wall(&self) -> Micros {
        let wall = self.inner.clock.read_wall();
        Micros(i64::try_from(wall.as_micros()).unwrap_or(i64::MAX))
    }

    /// What the wall clock said at an instant of a moment ago.
    pub fn wall_at(&self, instant: Instant) -> Micros {
        let passed = i64::try_from(instant.elapsed().as_micros()).unwrap_or(i64::MAX);
        Micros(self.wall().0.saturating_sub(passed))
    }

    /// Moves the anchor to now, and says whether the node stood still since the last tick.
    ///
    /// Called by one thread, every [`TICK`].
    pub fn tick(&self) -> (NodeTime, Option<Freeze>) {
        let mut anchor = self.inner.anchor.write();
        let reading = self.inner.clock.read();
        let gap = reading.elapsed_since(&anchor.reading);
        let time = self.never_back(anchor.time.later(&reading, &anchor.reading));
        *anchor = Anchor { reading, time };
        (time, (gap > FREEZE_GAP).then_some(Freeze { gap }))
    }

    /// The boot clock cannot go back; the fastest of three can, where its leader is set back.
    fn never_back(&self, time: NodeTime) -> NodeTime {
        let before = self.inner.latest_ns.fetch_max(time.since_start_ns, Ordering::AcqRel);
        NodeTime { since_start_ns: before.max(time.since_start_ns), ..time }
    }
}

/// The thread that ticks a [`NodeClock`]; it ends when this value is dropped.
#[derive(Debug)]
pub struct Ticker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts the thread; `on_tick` runs on it at every tick and must not wait.
    pub fn start(
        clock: NodeClock,
        mut on_tick: impl FnMut(NodeTime, Option<Freeze>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("lockstep-tick".into()).spawn(move || {
            // What passed before there was a ticker is no freeze.
            clock.tick();
            while !stopped.load(Ordering::Acquire) {
                let (now, freeze) = clock.tick();
                on_tick(now, freeze);
                std::thread::park_timeout(TICK);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there was already printed; the node must not fall over it a second time.
            let _ended = thread.join();
        }
    }
}

#[cfg(test)]
#[path = "clock_tests.rs"]
mod tests;
