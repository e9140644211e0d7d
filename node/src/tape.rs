//! The last copy events of this node, for those who watch.
//!
//! In: events, as they are recorded. Out: the same, in their order, to any number of readers.
//!
//! Invariants:
//! 1. Who records never waits for who reads: a reader copies out what it has not read, and one that
//!    is more than [`EVENTS_MAX`] behind has missed some, and is told so.
//! 2. A tape that is off costs nothing.
//!
//! Not covered: events of before this process, and of other nodes; those are rows.

use crate::writer::CopyEvent;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::watch;

/// Events that are kept (chosen: some seconds of a busy node, about half a megabyte).
pub const EVENTS_MAX: usize = 1_024;
/// Events that are read at once.
const READ_MAX: usize = 64;

/// Events with their numbers, in their order.
pub type Numbered = Vec<(u64, Arc<CopyEvent>)>;

/// The tape. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Tape {
    shared: Option<Arc<Shared>>,
}

#[derive(Debug)]
struct Shared {
    roll: Mutex<Roll>,
    /// Number of the next event.
    next: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Roll {
    events: VecDeque<Arc<CopyEvent>>,
    /// Number of the next event.
    next: u64,
}

impl Roll {
    fn first(&self) -> u64 {
        self.next - self.events.len() as u64
    }
}

/// A reader was too slow, or asks for what is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("events were missed")]
pub struct Missed;

impl Tape {
    /// A tape that keeps what it is given. The default one is off.
    pub fn on() -> Self {
        let (next, _) = watch::channel(0);
        Tape { shared: Some(Arc::new(Shared { roll: Mutex::default(), next })) }
    }

    /// Keeps an event.
    pub fn put(&self, event: &CopyEvent) {
        let Some(shared) = &self.shared else { return };
        let event = Arc::new(event.clone());
        let next = {
            let mut roll = shared.roll.lock();
            if roll.events.len() >= EVENTS_MAX {
                roll.events.pop_front();
            }
            roll.events.push_back(event);
            roll.next += 1;
            roll.next
        };
        shared.next.send_replace(next);
    }

    /// Reads what comes after the event of this number, or from now on.
    pub fn read(&self, after: Option<u64>) -> Reader {
        let changed = self.shared.as_ref().map(|shared| shared.next.subscribe());
        let now = self.shared.as_ref().map_or(0, |shared| shared.roll.lock().next);
        let next = after.map_or(now, |number| number.saturating_add(1));
        Reader { shared: self.shared.clone(), changed, next }
    }
}

/// One who reads.
#[derive(Debug)]
pub struct Reader {
    shared: Option<Arc<Shared>>,
    changed: Option<watch::Receiver<u64>>,
    next: u64,
}

impl Reader {
    /// The next events with their numbers, when there are some; waits for ever on a tape that is off.
    pub async fn next(&mut self) -> Result<Numbered, Missed> {
        loop {
            if let Some(events) = self.ready()? {
                return Ok(events);
            }
            let changed = match &mut self.changed {
                Some(changed) => changed.changed().await,
                None => std::future::pending().await,
            };
            if changed.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn ready(&mut self) -> Result<Option<Numbered>, Missed> {
        let Some(shared) = &self.shared else { return Ok(None) };
        let roll = shared.roll.lock();
        if self.next < roll.first() || self.next > roll.next {
            return Err(Missed);
        }
        let skip = (self.next - roll.first()) as usize;
        let events: Numbered =
            (self.next..).zip(roll.events.iter().skip(skip).take(READ_MAX).cloned()).collect();
        self.next += events.len() as u64;
        Ok((!events.is_empty()).then_some(events))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::writer::EventOutcome;
    use schemas::{AccountId, LinkId, MasterTicket, Micros, Token};
    use uuid::Uuid;

    pub(crate) fn event(ticket: u64) -> CopyEvent {
        CopyEvent {
            id: Uuid::nil(),
            at: Micros(0),
            token: Token::MIN,
            link: LinkId::MIN,
            follower: AccountId::MIN,
            master_ticket: MasterTicket::new(ticket).unwrap(),
            follower_ticket: None,
            action: "open_copy",
            outcome: EventOutcome::Done,
            reason: None,
            symbol: None,
            lots: None,
            price: None,
            own_time: None,
            broker_time: None,
        }
    }

    fn tickets(read: &[(u64, Arc<CopyEvent>)]) -> Vec<(u64, u64)> {
        read.iter().map(|(number, event)| (*number, event.master_ticket.get())).collect()
    }

    #[tokio::test]
    async fn who_watches_gets_what_comes_and_who_comes_back_what_came_meanwhile() {
        let tape = Tape::on();
        tape.put(&event(1));
        let mut reader = tape.read(None);
        tape.put(&event(2));
        assert_eq!(tickets(&reader.next().await.unwrap()), [(1, 2)]);
        let mut back = tape.read(Some(0));
        assert_eq!(tickets(&back.next().await.unwrap()), [(1, 2)]);
        let waits = tokio::spawn(async move { reader.next().await.unwrap() });
        tape.put(&event(3));
        assert_eq!(tickets(&waits.await.unwrap()), [(2, 3)]);
    }

    #[tokio::test]
    async fn a_reader_that_is_too_slow_is_told_and_nobody_waits_for_it() {
        let tape = Tape::on();
        let mut slow = tape.read(None);
        for n in 1..=EVENTS_MAX as u64 + 1 {
            tape.put(&event(n));
        }
        assert_eq!(slow.next().await.unwrap_err(), Missed);
        let mut from_elsewhere = tape.read(Some(1_000_000));
        assert_eq!(from_elsewhere.next().await.unwrap_err(), Missed, "another process' number");
        let mut late = tape.read(Some(EVENTS_MAX as u64 - 1));
        assert_eq!(tickets(&late.next().await.unwrap()).len(), 1);
    }

    #[test]
    fn a_tape_that_is_off_keeps_nothing() {
        let tape = Tape::default();
        tape.put(&event(1));
        assert!(tape.read(Some(0)).ready().unwrap().is_none());
    }
}
