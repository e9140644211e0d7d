//! When what of a copy's own time passed, for measurements (`LOCKSTEP_OWN_TIME_LOG`).
//!
//! Decides: nothing. In: stamps of the hot path. Out: one JSON object a line, written when the
//! node ends: what an event's callback, its publication, and each order that followed from it saw.
//!
//! Own time is from the master's callback to the instruction before the follower's order call. The
//! two may be in two processes: `bus` connects them by (master, epoch, seq). All stamps are
//! nanoseconds of `CLOCK_MONOTONIC`, which processes of one machine share.
//!
//! Invariants:
//! 1. Without a file a stamp costs one branch, and no clock is read.
//! 2. Stamping takes no lock and no memory: rows go into a ring that is there from the start, and
//!    every page of it has been touched. The oldest rows are lost when it is full.
//! 3. An order is recorded only if it was decided while its event was taken in: one that had to
//!    wait for an earlier answer of the broker has the broker's time in it.
//!
//! Not covered: a process that is killed writes nothing.

use crate::causes::with_causes;
use crate::clock::monotonic_ns;
use bus::{FeedMessage, OnPublished, PublisherHandle};
use schemas::{AccountId, Epoch, Seq};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Rows that are kept: two hours of bursts, 100 MB.
const ROWS_MAX: usize = 1 << 20;
/// Readings of the clock that the anchor is the best of.
const ANCHOR_READINGS: usize = 16;
/// Numbers of a row.
const WORDS: usize = 12;

/// Where stamps go. Clones share one ring.
#[derive(Debug, Clone, Default)]
pub struct Stamps {
    ring: Option<Arc<Ring>>,
}

/// The event whose orders are being decided.
#[derive(Debug, Clone, Copy)]
pub struct Trace {
    master: AccountId,
    epoch: Epoch,
    seq: Seq,
    /// The feed had the message.
    received_ns: u64,
    /// The follower took it up.
    taken_ns: u64,
    /// The follower knew what to do.
    decided_ns: u64,
}

/// One line of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// A callback of the master's broker became an event.
    CalledBack {
        /// Master.
        master: u64,
        /// Place of the event.
        epoch: u64,
        /// Place of the event.
        seq: u64,
        /// The callback ran.
        called_back_ns: u64,
        /// The event was queued for publication.
        queued_ns: u64,
    },
    /// The event was handed to the bus client.
    Published {
        /// Master.
        master: u64,
        /// Place of the event.
        epoch: u64,
        /// Place of the event.
        seq: u64,
        /// When.
        published_ns: u64,
    },
    /// An order that followed from the event was handed to the broker.
    Sent {
        /// Follower.
        account: u64,
        /// Master.
        master: u64,
        /// Place of the event.
        epoch: u64,
        /// Place of the event.
        seq: u64,
        /// The feed had the message.
        received_ns: u64,
        /// The follower took it up.
        taken_ns: u64,
        /// It knew what to do.
        decided_ns: u64,
        /// The order had its turn, and asked for its permit.
        turn_ns: u64,
        /// The instruction before the order call: own time ends here.
        called_ns: u64,
        /// The call had handed the order to the socket.
        sent_ns: u64,
    },
}

#[derive(Debug)]
struct Ring {
    path: PathBuf,
    words: Box<[AtomicU64]>,
    next: AtomicU64,
    /// One instant by both ways of reading the clock.
    anchor: (Instant, u64),
}

impl Stamps {
    /// Stamps that are written to a new file at the end. Errors: the file cannot be made.
    pub fn to_file(path: &Path) -> io::Result<Stamps> {
        drop(File::create_new(path)?);
        Ok(Stamps { ring: Some(Arc::new(Ring::new(path.to_owned(), ROWS_MAX))) })
    }

    /// Now, or 0 if nobody records.
    pub fn now(&self) -> u64 {
        if self.ring.is_some() { monotonic_ns() } else { 0 }
    }

    /// The events that the last callback became: the publisher's last `queued` ones.
    pub fn called_back(&self, publisher: &PublisherHandle, queued: usize, received: Instant) {
        let Some(ring) = &self.ring else { return };
        let (epoch, last) = publisher.position();
        let called_back = ring.ns_of(received);
        for back in 0..queued as u64 {
            let Some(seq) = last.get().checked_sub(back) else { return };
            let place = [publisher.account().get(), epoch.get(), seq];
            ring.put(1, 0, place, &[called_back, monotonic_ns()]);
        }
    }

    /// For a publisher: stamps what it hands to the bus.
    pub fn on_published(&self) -> Option<OnPublished> {
        let ring = Arc::clone(self.ring.as_ref()?);
        Some(Arc::new(move |event| {
            let place = [event.account.get(), event.epoch.get(), event.seq.get()];
            ring.put(2, 0, place, &[monotonic_ns()]);
        }))
    }

    /// A follower takes up a message of its master.
    pub fn taken(&self, master: AccountId, message: &FeedMessage) -> Option<Trace> {
        let ring = self.ring.as_ref()?;
        let FeedMessage::Event { event, received, .. } = message else { return None };
        let (epoch, seq) = (event.epoch, event.seq);
        let (received_ns, taken_ns) = (ring.ns_of(*received), monotonic_ns());
        Some(Trace { master, epoch, seq, received_ns, taken_ns, decided_ns: taken_ns })
    }

    /// The follower knows what to do.
    pub fn decided(&self, trace: &mut Trace) {
        trace.decided_ns = self.now();
    }

    /// An order was handed to the broker, in a call that began at `called_ns`.
    pub fn sent(&self, follower: AccountId, trace: &Trace, turn_ns: u64, called_ns: u64) {
        let Some(ring) = &self.ring else { return };
        let Trace { master, epoch, seq, received_ns, taken_ns, decided_ns } = *trace;
        let place = [master.get(), epoch.get(), seq.get()];
        let stamps = [received_ns, taken_ns, decided_ns, turn_ns, called_ns, monotonic_ns()];
        ring.put(3, follower.get(), place, &stamps);
    }

    /// Writes everything that is kept, at the end of the process.
    pub fn write(&self) {
        let Some(ring) = &self.ring else { return };
        if let Err(error) = ring.write() {
            tracing::error!(error = %with_causes(&error), path = %ring.path.display(), "own times not written");
        }
    }
}

impl Ring {
    fn new(path: PathBuf, rows: usize) -> Ring {
        // Not zero: zeroed memory is first made at the first touch, and that is on the hot path.
        let words = (0..rows * WORDS).map(|_| AtomicU64::new(u64::MAX)).collect();
        Ring { path, words, next: AtomicU64::new(0), anchor: anchor() }
    }

    fn ns_of(&self, instant: Instant) -> u64 {
        let (zero, zero_ns) = self.anchor;
        match instant.checked_duration_since(zero) {
            Some(passed) => zero_ns + passed.as_nanos() as u64,
            None => zero_ns.saturating_sub(zero.duration_since(instant).as_nanos() as u64),
        }
    }

    fn put(&self, kind: u64, account: u64, place: [u64; 3], stamps: &[u64]) {
        let rows = self.words.len() / WORDS;
        let row = self.next.fetch_add(1, Ordering::Relaxed) as usize % rows;
        let values = [kind, account].into_iter().chain(place).chain(stamps.iter().copied());
        for (word, value) in self.words[row * WORDS..][..WORDS].iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// What is kept, oldest first.
    fn lines(&self) -> impl Iterator<Item = Line> + '_ {
        let rows = self.words.len() / WORDS;
        let next = self.next.load(Ordering::Acquire) as usize;
        (next.saturating_sub(rows)..next).filter_map(move |row| self.line(row % rows))
    }

    fn line(&self, row: usize) -> Option<Line> {
        let words = &self.words[row * WORDS..][..WORDS];
        let word = |place: usize| words[place].load(Ordering::Relaxed);
        let (account, master, epoch, seq) = (word(1), word(2), word(3), word(4));
        match word(0) {
            1 => Some(Line::CalledBack {
                master,
                epoch,
                seq,
                called_back_ns: word(5),
                queued_ns: word(6),
            }),
            2 => Some(Line::Published { master, epoch, seq, published_ns: word(5) }),
            3 => Some(Line::Sent {
                account,
                master,
                epoch,
                seq,
                received_ns: word(5),
                taken_ns: word(6),
                decided_ns: word(7),
                turn_ns: word(8),
                called_ns: word(9),
                sent_ns: word(10),
            }),
            _ => None,
        }
    }

    fn write(&self) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(&self.path)?);
        for line in self.lines() {
            serde_json::to_writer(&mut file, &line)?;
            file.write_all(b"\n")?;
        }
        file.flush()
    }
}

/// One instant by both ways of reading the clock: the closest of some readings. An instant is never
/// said to be later than it was.
fn anchor() -> (Instant, u64) {
    let readings = (0..ANCHOR_READINGS).map(|_| {
        let before = monotonic_ns();
        let instant = Instant::now();
        (monotonic_ns() - before, (instant, before))
    });
    readings.min_by_key(|(width, _)| *width).expect("there are readings").1
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemas::{Change, Micros, TradeEvent};

    fn place(seq: u64) -> [u64; 3] {
        [7, 3, seq]
    }

    #[test]
    fn a_full_ring_keeps_the_newest_rows_in_order() {
        let ring = Ring::new(PathBuf::new(), 4);
        for seq in 1..=6 {
            ring.put(2, 0, place(seq), &[seq * 10]);
        }
        let published = |seq| Line::Published { master: 7, epoch: 3, seq, published_ns: seq * 10 };
        assert_eq!(ring.lines().collect::<Vec<_>>(), [3, 4, 5, 6].map(published));
    }

    #[test]
    fn an_instant_before_the_ring_was_made_is_before_its_clock_reading() {
        let before = Instant::now();
        let ring = Ring::new(PathBuf::new(), 1);
        let after = Instant::now();
        assert!(ring.ns_of(before) <= ring.anchor.1 && ring.anchor.1 <= ring.ns_of(after));
        assert!(ring.ns_of(after) <= monotonic_ns());
    }

    #[test]
    fn an_order_is_a_line_with_every_stage_in_its_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own-time.jsonl");
        let stamps = Stamps::to_file(&path).unwrap();
        let master = AccountId::new(7).unwrap();
        let event = TradeEvent {
            account: master,
            epoch: Epoch::new(3).unwrap(),
            seq: Seq::new(9).unwrap(),
            at: Micros(1),
            change: Change::PendingCancelled(schemas::MasterPending {
                ticket: schemas::MasterTicket::new(5).unwrap(),
                symbol: schemas::Symbol::new("EURUSD").unwrap(),
                kind: schemas::PendingKind::BuyLimit,
                lots: "1".parse().unwrap(),
                price: "1".parse().unwrap(),
                stop_loss: None,
                take_profit: None,
                placed_at: Micros(1),
                contract_size: None,
                is_copy: false,
            }),
        };
        let message = FeedMessage::Event {
            event: Arc::new(event),
            doubtful: false,
            received: Instant::now(),
        };
        let mut trace = stamps.taken(master, &message).unwrap();
        stamps.decided(&mut trace);
        let (turn, called) = (stamps.now(), stamps.now());
        stamps.sent(AccountId::new(11).unwrap(), &trace, turn, called);
        stamps.write();
        let text = std::fs::read_to_string(&path).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!(
            (&line["kind"], &line["account"], &line["seq"]),
            (&"sent".into(), &11.into(), &9.into())
        );
        let of = |name: &str| line[name].as_u64().unwrap();
        let names = ["received_ns", "taken_ns", "decided_ns", "turn_ns", "called_ns", "sent_ns"];
        assert!(names.map(of).is_sorted() && of("received_ns") > 0, "{line}");
    }

    #[test]
    fn without_a_file_nothing_is_stamped() {
        let stamps = Stamps::default();
        assert_eq!(stamps.now(), 0);
        assert!(stamps.on_published().is_none());
    }

    #[test]
    fn a_file_that_is_there_already_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Stamps::to_file(file.path()).is_err());
    }
}
