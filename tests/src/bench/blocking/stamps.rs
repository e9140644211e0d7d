//! When each call began, and the broker that it waits for.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a call holds its thread.
pub(super) const ANSWER: Duration = Duration::from_millis(130);

const WAITED: u64 = 1 << 63;

/// The stamps of one burst: timestamps only, in memory that is there before it.
pub(super) struct Stamps {
    base: Instant,
    events: usize,
    /// When the master's callback ran, by event.
    called_ns: Vec<AtomicU64>,
    /// When the call began, by follower and event; 0 before.
    begun_ns: Vec<AtomicU64>,
    /// A broker that says nothing: a call reads until its time is over, as a vendor's call waits
    /// for its answer, and nobody else is at work meanwhile.
    silent: Vec<UdpSocket>,
}

/// Own times of a burst, in nanoseconds.
#[derive(Default)]
pub(super) struct OwnTimes {
    /// Calls that a follower made when the event came.
    pub(super) within: Vec<u64>,
    /// Calls that it made when an earlier one was answered: the broker's time is in them.
    pub(super) waited: Vec<u64>,
}

impl Stamps {
    pub(super) fn new(followers: usize, events: usize) -> Self {
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        let silent = || {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
            socket.set_read_timeout(Some(ANSWER)).expect("a limit");
            socket
        };
        Self {
            base: Instant::now(),
            events,
            called_ns: zeros(events),
            begun_ns: zeros(followers * events),
            silent: (0..followers * events).map(|_| silent()).collect(),
        }
    }

    /// Forgets the last burst.
    pub(super) fn clear(&self) {
        let all = self.called_ns.iter().chain(&self.begun_ns);
        all.for_each(|stamp| stamp.store(0, Ordering::Relaxed));
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.base.elapsed().as_nanos()).expect("a short time")
    }

    /// The master's callback runs.
    pub(super) fn called(&self, event: usize) {
        self.called_ns[event].store(self.now_ns(), Ordering::Relaxed);
    }

    /// The call is about to begin.
    pub(super) fn begins(&self, follower: usize, event: usize, waited: bool) {
        let stamp = self.now_ns() | if waited { WAITED } else { 0 };
        self.begun_ns[follower * self.events + event].store(stamp, Ordering::Release);
    }

    /// Holds the thread until the broker would have answered.
    pub(super) fn hold(&self, follower: usize, event: usize) {
        let socket = &self.silent[follower * self.events + event];
        let until = Instant::now() + ANSWER;
        loop {
            match socket.recv(&mut [0; 1]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // The kernel rounds a limit; it may be early by one tick of its clock.
                    if Instant::now() + Duration::from_millis(5) >= until {
                        return;
                    }
                }
                other => panic!("the silent broker said {other:?}"),
            }
        }
    }

    /// What the burst came to.
    pub(super) fn own_times(&self) -> OwnTimes {
        let mut times = OwnTimes::default();
        for (place, stamp) in self.begun_ns.iter().enumerate() {
            let stamp = stamp.load(Ordering::Acquire);
            if stamp == 0 {
                continue;
            }
            let called = self.called_ns[place % self.events].load(Ordering::Relaxed);
            let own = (stamp & !WAITED).saturating_sub(called);
            match stamp & WAITED {
                0 => times.within.push(own),
                _ => times.waited.push(own),
            }
        }
        times
    }
}
