//! Slots: one order at a time for a (link, master ticket), a bounded number at once for a follower.
//!
//! Decides: whether an order for a ticket may start now, must wait for the ticket's own
//! answer, or must wait for room. Nothing here holds an order: what waits is only the key,
//! and what to do for it is decided anew, from the states of that moment, when its turn
//! comes. So an open that was overtaken by its close is never sent (H48).
//!
//! Invariants:
//! 1. At most one order is on its way for a key; a second wish is remembered as `again`.
//! 2. At most `cap` orders are on their way for the follower.
//! 3. A key waits at most once, first come first served; the queue is bounded by the number
//!    of tickets of the follower's links.
//! 4. An answer of an attempt that is no longer the slot's changes nothing.
//! 5. A slot whose outcome is unknown stays taken until it is resolved, but does not count
//!    against `cap`: twenty lost answers must not stop a follower.

use crate::clock::NodeTime;
use schemas::{LinkId, MasterTicket};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What an order is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketKey {
    /// The link.
    pub link: LinkId,
    /// The trade on its master.
    pub ticket: MasterTicket,
}

/// Number of one try at the broker, unique within the follower's tenure.
pub type Attempt = u64;

/// Whether an order may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Now, under this number.
    Now(Attempt),
    /// When the answer for this ticket is there.
    AfterAnswer,
    /// When another order of this follower has been answered.
    AfterRoom,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    attempt: Attempt,
    again: bool,
    unknown_since: Option<NodeTime>,
}

/// The slots of one follower.
#[derive(Debug)]
pub struct Slots {
    cap: usize,
    taken: BTreeMap<TicketKey, Slot>,
    on_their_way: usize,
    waiting: VecDeque<TicketKey>,
    waits: BTreeSet<TicketKey>,
    attempts: Attempt,
}

impl Slots {
    /// No order on its way; at most `cap` at once.
    pub fn new(cap: usize) -> Self {
        assert!(cap > 0, "a follower that may send nothing would wait for ever");
        Slots {
            cap,
            taken: BTreeMap::new(),
            on_their_way: 0,
            waiting: VecDeque::new(),
            waits: BTreeSet::new(),
            attempts: 0,
        }
    }

    /// Whether an order for this key could start now; notes the wish if it cannot.
    pub fn ask(&mut self, key: TicketKey) -> Turn {
        if let Some(slot) = self.taken.get_mut(&key) {
            slot.again = true;
            return Turn::AfterAnswer;
        }
        if self.on_their_way >= self.cap {
            if self.waits.insert(key) {
                self.waiting.push_back(key);
            }
            return Turn::AfterRoom;
        }
        Turn::Now(self.attempts + 1)
    }

    /// Takes the slot for the attempt that `ask` named.
    pub fn take(&mut self, key: TicketKey, attempt: Attempt) {
        assert!(attempt == self.attempts + 1, "an attempt is taken right after it was asked for");
        self.attempts = attempt;
        let slot = Slot { attempt, again: false, unknown_since: None };
        let before = self.taken.insert(key, slot);
        assert!(before.is_none(), "two orders at once for one ticket");
        self.on_their_way += 1;
    }

    /// An answer came: frees the slot, and says whether something was wished meanwhile.
    /// Nothing, if the answer is not of the slot's present attempt.
    pub fn answered(&mut self, key: TicketKey, attempt: Attempt) -> Option<bool> {
        let slot = self.taken.get(&key).filter(|slot| slot.attempt == attempt).copied()?;
        self.taken.remove(&key);
        if slot.unknown_since.is_none() {
            self.on_their_way -= 1;
        }
        Some(slot.again)
    }

    /// The outcome is unknown: the slot stays taken until `resolved`.
    /// False, if the slot belongs to another attempt.
    pub fn unknown(&mut self, key: TicketKey, attempt: Attempt, now: NodeTime) -> bool {
        match self.taken.get_mut(&key) {
            Some(slot) if slot.attempt == attempt && slot.unknown_since.is_none() => {
                slot.unknown_since = Some(now);
                self.on_their_way -= 1;
                true
            }
            _ => false,
        }
    }

    /// A complete read has settled what became of it; the slot is free.
    pub fn resolved(&mut self, key: TicketKey) {
        if self.is_unknown(key) {
            self.taken.remove(&key);
        }
    }

    /// Whether an order for this key is on its way, with its answer still to come.
    pub fn is_busy(&self, key: TicketKey) -> bool {
        self.taken.get(&key).is_some_and(|slot| slot.unknown_since.is_none())
    }

    /// Whether the outcome for this key is unknown.
    pub fn is_unknown(&self, key: TicketKey) -> bool {
        self.taken.get(&key).is_some_and(|slot| slot.unknown_since.is_some())
    }

    /// The keys whose outcome is unknown, with the instant since when.
    pub fn unknowns(&self) -> impl Iterator<Item = (TicketKey, NodeTime)> + '_ {
        self.taken.iter().filter_map(|(key, slot)| slot.unknown_since.map(|since| (*key, since)))
    }

    /// The next key whose turn it is, if there is room.
    pub fn next_waiting(&mut self) -> Option<TicketKey> {
        if self.on_their_way >= self.cap {
            return None;
        }
        let key = self.waiting.pop_front()?;
        self.waits.remove(&key);
        Some(key)
    }

    /// Orders on their way, without those of unknown outcome.
    pub fn on_their_way(&self) -> usize {
        self.on_their_way
    }

    /// Keys that wait for room.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The keys that wait for room.
    pub fn waiting_keys(&self) -> impl Iterator<Item = TicketKey> + '_ {
        self.waits.iter().copied()
    }

    /// Forgets what waits; the next reconcile finds it again.
    pub fn drop_waiting(&mut self) -> usize {
        self.waits.clear();
        let dropped = self.waiting.len();
        self.waiting.clear();
        dropped
    }

    /// Number of the last attempt.
    pub fn last_attempt(&self) -> Attempt {
        self.attempts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u64) -> TicketKey {
        TicketKey { link: LinkId::MIN, ticket: MasterTicket::new(n).unwrap() }
    }

    fn start(slots: &mut Slots, n: u64) -> Attempt {
        match slots.ask(key(n)) {
            Turn::Now(attempt) => {
                slots.take(key(n), attempt);
                attempt
            }
            other => panic!("ticket {n} should start: {other:?}"),
        }
    }

    #[test]
    fn a_second_wish_for_a_ticket_waits_for_the_answer_of_the_first() {
        let mut slots = Slots::new(2);
        let attempt = start(&mut slots, 1);
        assert_eq!(slots.ask(key(1)), Turn::AfterAnswer);
        assert_eq!(slots.answered(key(1), attempt), Some(true));
        assert_eq!(slots.on_their_way(), 0);
    }

    #[test]
    fn an_answer_of_an_older_attempt_does_not_free_the_slot() {
        let mut slots = Slots::new(2);
        let old = start(&mut slots, 1);
        assert_eq!(slots.answered(key(1), old), Some(false));
        start(&mut slots, 1);
        assert_eq!(slots.answered(key(1), old), None);
        assert!(slots.is_busy(key(1)));
    }

    #[test]
    fn an_unknown_outcome_keeps_its_ticket_but_not_the_room() {
        let mut slots = Slots::new(1);
        let attempt = start(&mut slots, 1);
        assert!(slots.unknown(key(1), attempt, NodeTime::START));
        assert_eq!(slots.ask(key(1)), Turn::AfterAnswer);
        start(&mut slots, 2);
        slots.resolved(key(1));
        assert_eq!(slots.ask(key(1)), Turn::AfterRoom);
    }

    #[test]
    fn what_waits_for_room_comes_in_the_order_of_its_first_wish() {
        let mut slots = Slots::new(1);
        let attempt = start(&mut slots, 1);
        for n in [2, 3, 2, 3] {
            assert_eq!(slots.ask(key(n)), Turn::AfterRoom);
        }
        assert_eq!(slots.next_waiting(), None);
        slots.answered(key(1), attempt);
        assert_eq!(slots.next_waiting(), Some(key(2)));
        assert_eq!(slots.next_waiting(), Some(key(3)));
        assert_eq!(slots.next_waiting(), None);
    }

    proptest! {
        #[test]
        fn never_two_orders_for_a_ticket_and_never_more_than_the_cap(
            cap in 1_usize..4, steps in proptest::collection::vec((0_u8..4, 1_u64..5), 0..80)
        ) {
            let mut slots = Slots::new(cap);
            let mut on_their_way: BTreeMap<TicketKey, Attempt> = BTreeMap::new();
            for (step, n) in steps {
                match step {
                    0 | 1 => if let Turn::Now(attempt) = slots.ask(key(n)) {
                        slots.take(key(n), attempt);
                        prop_assert!(on_their_way.insert(key(n), attempt).is_none());
                    },
                    2 => if let Some(attempt) = on_their_way.remove(&key(n)) {
                        prop_assert!(slots.answered(key(n), attempt).is_some());
                    },
                    _ => if let Some(attempt) = on_their_way.remove(&key(n)) {
                        prop_assert!(slots.unknown(key(n), attempt, NodeTime::START));
                        slots.resolved(key(n));
                    },
                }
                prop_assert!(on_their_way.len() <= cap);
                prop_assert_eq!(on_their_way.len(), slots.on_their_way());
            }
        }
    }
}
