//! What a service manager is told of the node: ready, stopping, alive (`sd_notify`).
//!
//! Decides: whether the node is alive enough for the watchdog to be fed.
//! In: `NOTIFY_SOCKET` and `WATCHDOG_USEC` of the environment; marks of the parts that have to move.
//! Out: datagrams. Without that environment nothing is sent.
//!
//! The watchdog ends a node that hangs, so that another one, or its own next start, takes its accounts.
//! It must not end a node that merely waits: a database that is away is no reason, because the node
//! copies on until its permits end, and a new process would not even get as far.
//!
//! | part | its mark moves | so the node is dead if it stands still for |
//! |---|---|---|
//! | lease thread | with every cycle, confirmed or failed | lease - fence: no permit outlives that, so a node that ends then loses nothing |
//! | hot runtime, slow runtime | once a second, by a task | the same |
//! | ticker | it is the one who looks | the watchdog's own time |
//!
//! Invariants:
//! 1. Looking never waits, takes no lock for long, and allocates nothing: the ticker also closes the gate.
//! 2. While the node ends, only the ticker has to live: sessions drain, and the manager has a limit for
//!    that of its own.
//! 3. A machine that stood still is not taken for a part that did: standing still is counted in looks as well
//!    as in time.
//!
//! Not covered: one hot thread of several that hangs alone; a session that does, which
//! `lockstep_broker_sessions_open` and `lockstep status` show.

use crate::causes::with_causes;
use crate::clock::NodeTime;
use crate::lease::LeaseState;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// How often a runtime shows that it runs.
const PULSE_EVERY: Duration = Duration::from_secs(1);
/// The watchdog is fed so many times in its time: two datagrams may get lost.
const FEEDS_PER_WATCHDOG: u32 = 3;
/// Looks between two movements of a mark, at least, before its part counts as dead: one second of them.
const LOOKS_MIN: u32 = 4;

/// The way to the service manager.
#[derive(Debug)]
pub struct Notifier {
    socket: UnixDatagram,
    manager: SocketAddr,
}

impl Notifier {
    /// The way that the manager has named for this process, if it has.
    ///
    /// Errors: it named one that cannot be used.
    pub fn from_env() -> std::io::Result<Option<Self>> {
        match std::env::var_os("NOTIFY_SOCKET") {
            Some(name) => Self::to(name.as_encoded_bytes()).map(Some),
            None => Ok(None),
        }
    }

    /// To a socket with this path, or after an `@` with this abstract name.
    fn to(name: &[u8]) -> std::io::Result<Self> {
        let manager = match name {
            [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
            path => {
                let path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path);
                SocketAddr::from_pathname(path)?
            }
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not hold the ticker up.
        socket.set_nonblocking(true)?;
        Ok(Self { socket, manager })
    }

    fn say(&self, words: &str) {
        if let Err(error) = self.socket.send_to_addr(words.as_bytes(), &self.manager) {
            tracing::debug!(error = %with_causes(&error), words, "the service manager was not told");
        }
    }

    /// Leases are confirmed: the node does its work.
    pub fn ready(&self) {
        self.say("READY=1\nSTATUS=leases are confirmed");
    }

    /// The node ends in an orderly way.
    pub fn stopping(&self) {
        self.say("STOPPING=1\nSTATUS=sessions drain");
    }

    fn alive(&self) {
        self.say("WATCHDOG=1");
    }
}

/// How long the manager waits for a sign of life, if it does.
pub fn watchdog_time() -> Option<Duration> {
    // Where it names a process, it means that one alone.
    let meant = std::env::var("WATCHDOG_PID").ok();
    if meant.is_some_and(|pid| pid != std::process::id().to_string()) {
        return None;
    }
    let micros =
        std::env::var("WATCHDOG_USEC").ok()?.parse::<u64>().ok().filter(|micros| *micros > 0)?;
    Some(Duration::from_micros(micros))
}

/// Tells the manager that the node is ready, once a cycle is confirmed.
pub async fn tell_when_ready(notifier: Arc<Notifier>, mut lease: watch::Receiver<Arc<LeaseState>>) {
    // The loop may end before it has confirmed anything; then it was never ready.
    if lease.wait_for(|state| state.confirmed_at.is_some()).await.is_ok() {
        notifier.ready();
    }
}

/// Counts as long as a runtime runs its tasks.
pub fn pulse(of: &Handle) -> Arc<AtomicU64> {
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    of.spawn(async move {
        let mut every = tokio::time::interval(PULSE_EVERY);
        loop {
            every.tick().await;
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    count
}

/// When the mark of a part last moved.
#[derive(Debug, Clone, Copy)]
struct Seen {
    mark: u64,
    at: NodeTime,
    looks: u32,
}

/// Whether every part has moved lately.
#[derive(Debug)]
struct Liveness<const PARTS: usize> {
    limit: Duration,
    parts: [Option<Seen>; PARTS],
}

impl<const PARTS: usize> Liveness<PARTS> {
    fn new(limit: Duration) -> Self {
        Self { limit, parts: [None; PARTS] }
    }

    /// Looks at the marks, and says whether all parts live.
    fn look(&mut self, now: NodeTime, marks: [u64; PARTS]) -> bool {
        let mut all_live = true;
        for (part, mark) in self.parts.iter_mut().zip(marks) {
            match part {
                Some(seen) if seen.mark == mark => {
                    seen.looks = seen.looks.saturating_add(1);
                    all_live &= now.surely_since(seen.at) < self.limit || seen.looks < LOOKS_MIN;
                }
                Some(_) | None => *part = Some(Seen { mark, at: now, looks: 0 }),
            }
        }
        all_live
    }
}

/// Feeds the watchdog, from the ticker.
#[derive(Debug)]
pub struct Watchdog {
    notifier: Arc<Notifier>,
    every: Duration,
    fed_at: Option<NodeTime>,
    liveness: Liveness<3>,
    lease: watch::Receiver<Arc<LeaseState>>,
    pulses: [Arc<AtomicU64>; 2],
    ending: Arc<AtomicBool>,
    was_alive: bool,
}

impl Watchdog {
    /// Feeds a watchdog of this time, while no part stands still for `limit`. `ending` says that the
    /// node ends.
    pub fn new(
        notifier: Arc<Notifier>,
        time: Duration,
        limit: Duration,
        lease: watch::Receiver<Arc<LeaseState>>,
        pulses: [Arc<AtomicU64>; 2],
        ending: Arc<AtomicBool>,
    ) -> Self {
        Self {
            notifier,
            every: time / FEEDS_PER_WATCHDOG,
            fed_at: None,
            liveness: Liveness::new(limit),
            lease,
            pulses,
            ending,
            was_alive: true,
        }
    }

    /// One look; called at every tick.
    pub fn look(&mut self, now: NodeTime) {
        let lease = lease_mark(&self.lease.borrow());
        let [hot, slow] = [0, 1].map(|index: usize| self.pulses[index].load(Ordering::Relaxed));
        let alive =
            self.liveness.look(now, [lease, hot, slow]) || self.ending.load(Ordering::Relaxed);
        if !alive && self.was_alive {
            tracing::error!(
                lease,
                hot,
                slow,
                "a part of the node stands still; the watchdog is fed no more"
            );
        }
        self.was_alive = alive;
        let is_due = self.fed_at.is_none_or(|fed| now.since(fed) >= self.every);
        if alive && is_due {
            self.fed_at = Some(now);
            self.notifier.alive();
        }
    }
}

/// Moves with every cycle, confirmed or not.
fn lease_mark(state: &LeaseState) -> u64 {
    state.cycle.get().wrapping_shl(32).wrapping_add(u64::from(state.failures))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Waker};

    const LIMIT: Duration = Duration::from_secs(45);

    fn at(seconds: u64) -> NodeTime {
        NodeTime::after_start(Duration::from_secs(seconds))
    }

    #[test]
    fn a_part_that_stands_still_for_the_limit_is_dead_and_lives_again_when_it_moves() {
        let mut liveness = Liveness::new(LIMIT);
        for second in 0..45 {
            assert!(liveness.look(at(second), [7, second]), "after {second} s");
        }
        assert!(!liveness.look(at(45), [7, 45]));
        for second in 46..91 {
            assert!(liveness.look(at(second), [8, second]), "after {second} s");
        }
        assert!(!liveness.look(at(91), [8, 91]));
    }

    #[test]
    fn a_machine_that_stood_still_is_not_a_part_that_did() {
        let mut liveness = Liveness::new(LIMIT);
        assert!(liveness.look(at(0), [1, 1]));
        // Nothing could move meanwhile.
        assert!(liveness.look(at(600), [1, 1]));
        assert!(liveness.look(at(601), [2, 1]));
        assert!(liveness.look(at(602), [3, 1]));
        // The second part had its second and did not move.
        assert!(!liveness.look(at(603), [4, 1]));
    }

    /// A manager that can be asked what it heard, and the way to it.
    fn manager() -> (UnixDatagram, Arc<Notifier>, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let notifier = Notifier::to(path.as_os_str().as_encoded_bytes()).unwrap();
        (manager, Arc::new(notifier), folder)
    }

    /// What the manager heard since the last time.
    fn heard(manager: &UnixDatagram) -> Vec<String> {
        let mut words = [0; 64];
        let next = || manager.recv(&mut words).ok().map(|length| words[..length].to_vec());
        std::iter::from_fn(next).map(|words| String::from_utf8(words).unwrap()).collect()
    }

    #[test]
    fn a_node_with_a_part_that_stands_still_is_fed_no_more_unless_it_ends() {
        let (manager, notifier, _folder) = manager();
        let (_lease, state) = watch::channel(Arc::new(LeaseState::default()));
        let pulses = [0, 0].map(|count| Arc::new(AtomicU64::new(count)));
        let ending = Arc::new(AtomicBool::new(false));
        let time = Duration::from_secs(30);
        let mut watchdog =
            Watchdog::new(notifier, time, LIMIT, state, pulses.clone(), Arc::clone(&ending));
        let mut look = |second: u64| {
            for pulse in &pulses {
                pulse.fetch_add(1, Ordering::Relaxed);
            }
            watchdog.look(at(second));
        };
        (0..45).for_each(&mut look);
        assert_eq!(heard(&manager), ["WATCHDOG=1"; 5], "three times in its time");
        // No lease cycle for so long, while both runtimes run.
        (45..90).for_each(&mut look);
        assert_eq!(heard(&manager), [""; 0]);
        ending.store(true, Ordering::Relaxed);
        look(90);
        assert_eq!(heard(&manager), ["WATCHDOG=1"], "sessions drain");
    }

    #[tokio::test]
    async fn a_node_is_ready_once_a_cycle_is_confirmed_and_not_before() {
        let (manager, notifier, _folder) = manager();
        let (lease, state) = watch::channel(Arc::new(LeaseState::default()));
        let mut telling = Box::pin(tell_when_ready(notifier, state));
        lease.send_replace(Arc::new(LeaseState { failures: 1, ..LeaseState::default() }));
        let mut context = Context::from_waker(Waker::noop());
        assert!(telling.as_mut().poll(&mut context).is_pending());
        assert_eq!(heard(&manager), [""; 0]);
        let confirmed_at = Some(at(1));
        lease.send_replace(Arc::new(LeaseState { confirmed_at, ..LeaseState::default() }));
        telling.await;
        assert!(heard(&manager)[0].starts_with("READY=1\n"));
    }

    #[test]
    fn failed_cycles_move_the_mark_of_the_lease_like_confirmed_ones() {
        let mut state = LeaseState::default();
        let mut marks = vec![lease_mark(&state)];
        state.failures = 1;
        marks.push(lease_mark(&state));
        state.failures = 2;
        marks.push(lease_mark(&state));
        marks.sort_unstable();
        marks.dedup();
        assert_eq!(marks.len(), 3);
    }

    #[test]
    fn the_manager_hears_by_path_and_by_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("lockstep-{}-{:08x}", std::process::id(), fastrand::u32(..));
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let by_name = UnixDatagram::bind_addr(&address).unwrap();
        for (named, manager) in
            [(path.display().to_string(), by_path), (format!("@{name}"), by_name)]
        {
            Notifier::to(named.as_bytes()).unwrap().stopping();
            let mut words = [0; 64];
            let length = manager.recv(&mut words).unwrap();
            assert_eq!(&words[..length], b"STOPPING=1\nSTATUS=sessions drain");
        }
    }
}
