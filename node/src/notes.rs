//! The event log: what sessions do and on what grounds, one JSON object a line, for checkers.
//!
//! Off unless `LOCKSTEP_EVENT_LOG` names a file. A note is put into a bounded channel and written
//! by a thread of its own, so that nothing on the way to an order waits for it.
//!
//! In: [`Note`]s. Out: lines with the instant, the node and the note, in the order of noting.
//!
//! Invariants:
//! 1. Noting never waits; what finds no room is dropped and counted, and the count is a line.
//! 2. An order's note comes before its answer's note.
//!
//! Not covered: the last notes of a process that is killed. What the log lacks proves nothing.

use crate::causes::with_causes;
use schemas::{AccountId, Epoch, LinkId, MasterTicket, Micros, NodeId, Seq, Token};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// Notes that wait for the file: several bursts of some thousand orders.
pub const NOTES_MAX: usize = 16_384;
/// Lines are in the file this long after their note at the latest.
const FLUSH_EVERY: Duration = Duration::from_millis(50);

/// One thing a session did or heard. Account and token are those of its tenure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Note {
    /// A tenure's session begins.
    TenureBegins {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
        /// The account was free before.
        clean: bool,
    },
    /// It has ended.
    TenureEnds {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
        /// How.
        how: &'static str,
    },
    /// The session at the broker is open and its lists are complete.
    SessionOpened {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
    },
    /// The session was given up: orders that are out have an unknown outcome from here on.
    SessionCut {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
    },
    /// The follower stands at another place of a master's feed.
    Applied {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
        /// Master.
        master: AccountId,
        /// Where it stands.
        epoch: Epoch,
        /// Where it stands.
        seq: Seq,
        /// The event's ticket; nothing for a snapshot.
        ticket: Option<MasterTicket>,
    },
    /// A plan was made from complete reads.
    Planned {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
        /// Link.
        link: LinkId,
        /// The read; one read may serve the plans of several links.
        plan: u64,
        /// When that read began.
        begun_us: Micros,
        /// Why.
        reason: &'static str,
        /// The place in the master's feed that it was made from.
        epoch: Epoch,
        /// The place in the master's feed that it was made from.
        seq: Seq,
        /// Held for a second look: nothing of it is done.
        held: bool,
        /// What it wants done.
        steps: Vec<&'static str>,
    },
    /// An order was handed to the broker's socket.
    Sent {
        /// Account.
        account: AccountId,
        /// Token of the tenure; the order's own is in the broker's ledger.
        token: Token,
        /// The order's number, which goes with it to the broker.
        attempt: u64,
        /// Link.
        link: LinkId,
        /// Master ticket.
        ticket: MasterTicket,
        /// What it is for.
        step: &'static str,
        /// Why, where there is more than one reason for such a step.
        reason: Option<&'static str>,
        /// The plan that wanted it; nothing if an event was followed at once.
        plan: Option<u64>,
        /// The place in the master's feed that is applied now.
        epoch: Epoch,
        /// The place in the master's feed that is applied now.
        seq: Seq,
        /// The feed is in doubt.
        doubtful: bool,
    },
    /// The order ended, or is given up as unknown.
    Answered {
        /// Account.
        account: AccountId,
        /// Token.
        token: Token,
        /// The order's number.
        attempt: u64,
        /// How.
        outcome: &'static str,
    },
}

/// Where notes go; cheap to clone, and nothing where no file was named.
#[derive(Debug, Clone, Default)]
pub struct Notes {
    log: Option<Log>,
}

#[derive(Debug, Clone)]
struct Log {
    items: SyncSender<Item>,
    dropped: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Item {
    Note(Micros, Note),
    /// Answered when everything before it is in the file.
    Flush(SyncSender<()>),
}

#[derive(Serialize)]
struct Line<'a, T> {
    at_us: Micros,
    node: &'a NodeId,
    #[serde(flatten)]
    note: &'a T,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename = "dropped")]
struct Dropped {
    count: u64,
}

impl Notes {
    /// Appends to a file, which is made if it is not there.
    pub fn to_file(path: &Path, node: NodeId) -> io::Result<Notes> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (items, waiting) = sync_channel(NOTES_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let writing = Writing { file: BufWriter::new(file), node, dropped: Arc::clone(&dropped) };
        std::thread::Builder::new()
            .name("lockstep-notes".to_owned())
            .spawn(move || writing.run(&waiting))?;
        Ok(Notes { log: Some(Log { items, dropped }) })
    }

    /// Whether anybody reads what is noted.
    pub fn is_on(&self) -> bool {
        self.log.is_some()
    }

    /// Notes, if anybody reads it; `note` is made only then.
    pub fn note(&self, at: Micros, note: impl FnOnce() -> Note) {
        if let Some(log) = &self.log
            && log.items.try_send(Item::Note(at, note())).is_err()
        {
            log.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until what was noted so far is in the file, at the end of a process.
    pub fn flush(&self, limit: Duration) {
        let Some(log) = &self.log else { return };
        let (done, is_done) = sync_channel(1);
        if log.items.try_send(Item::Flush(done)).is_ok() {
            // Past the limit the rest is lost, as at a kill.
            let _late = is_done.recv_timeout(limit);
        }
    }
}

struct Writing {
    file: BufWriter<File>,
    node: NodeId,
    dropped: Arc<AtomicU64>,
}

impl Writing {
    fn run(mut self, waiting: &Receiver<Item>) {
        let mut told = 0;
        let mut last = Micros(0);
        loop {
            let written = match waiting.recv_timeout(FLUSH_EVERY) {
                Ok(Item::Note(at, note)) => {
                    last = at;
                    self.line(at, &note)
                }
                Ok(Item::Flush(done)) => {
                    let flushed = self.file.flush();
                    // Who asked may have given up.
                    let _gone = done.try_send(());
                    flushed
                }
                Err(RecvTimeoutError::Timeout) => self.file.flush(),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let count = self.dropped.load(Ordering::Relaxed);
            let told_now = match count == told {
                true => Ok(()),
                false => self.line(last, &Dropped { count }),
            };
            told = count;
            if let Err(error) = written.and(told_now) {
                tracing::warn!(error = %with_causes(&error), "event log ends, its file cannot be written");
                return;
            }
        }
    }

    fn line(&mut self, at_us: Micros, note: &impl Serialize) -> io::Result<()> {
        let line = Line { at_us, node: &self.node, note };
        serde_json::to_writer(&mut self.file, &line)?;
        self.file.write_all(b"\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(number: i64) -> (Micros, Note) {
        let (account, token) = (AccountId::new(7).unwrap(), Token::new(3).unwrap());
        (Micros(number), Note::TenureEnds { account, token, how: "stopped" })
    }

    fn lines_of(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_note_is_a_line_with_its_instant_and_node() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let notes = Notes::to_file(&path, NodeId::new("a-1").unwrap()).unwrap();
        for number in [5, 6] {
            let (at, note) = ends(number);
            notes.note(at, || note);
        }
        notes.flush(Duration::from_secs(10));
        let lines = lines_of(&path);
        assert_eq!(
            lines[0].to_string(),
            r#"{"account":7,"at_us":5,"how":"stopped","kind":"tenure_ends","node":"a-1","token":3}"#
        );
        assert_eq!(lines[1]["at_us"], 6);
    }

    #[test]
    fn what_finds_no_room_is_counted_and_nobody_waits() {
        let (items, waiting) = sync_channel(1);
        let dropped = Arc::new(AtomicU64::new(0));
        let log = Notes { log: Some(Log { items, dropped: Arc::clone(&dropped) }) };
        for number in 0..5 {
            let (at, note) = ends(number);
            log.note(at, || note);
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 4);
        drop(log);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let file = BufWriter::new(File::create(&path).unwrap());
        Writing { file, node: NodeId::new("a-1").unwrap(), dropped }.run(&waiting);
        let lines = lines_of(&path);
        assert_eq!((&lines[1]["kind"], &lines[1]["count"]), (&"dropped".into(), &4.into()));
    }

    #[test]
    fn without_a_file_no_note_is_made() {
        Notes::default().note(Micros(1), || unreachable!("nobody reads it"));
    }
}
