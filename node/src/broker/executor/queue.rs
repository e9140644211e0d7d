//! Who may use a thread next. Pure: it holds work and never does any.
//!
//! Decides: whether a piece of work may start, waits for its lane or waits for a thread. In: work of
//! lanes, threads that are free, work that ended. Out: the work to do next.
//!
//! A lane is what one session sends. Work of a lane that has room is `ready` and needs nothing but a
//! thread; the rest waits in its lane.
//!
//! Invariants:
//! 1. At most `cap` pieces of a lane are ready or running, and those that a lost session of the same
//!    account left running count: a broker that never answers takes no thread of the others (L8).
//! 2. Within a lane work starts in the order in which it came; between lanes in the order in which it
//!    became ready.
//! 3. At most [`WAITING_MAX`] pieces of a lane wait; one more is refused.
//! 4. After [`Queue::close`] nothing of that lane starts.

use schemas::AccountId;
use std::collections::{BTreeMap, VecDeque};

/// Pieces of one lane that wait; past it they are refused. A follower keeps its own cap, so that
/// more than a few wait only while its broker does not answer at all.
pub const WAITING_MAX: usize = 1_024;

/// One session's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaneKey {
    account: AccountId,
    session: u64,
}

/// A piece of work that has left the queue, or was taken out of it.
#[derive(Debug)]
pub struct Entry<W> {
    /// Whose.
    pub lane: LaneKey,
    /// Its number, unique within the queue.
    pub number: u64,
    /// What to do.
    pub work: W,
}

#[derive(Debug)]
struct Lane<W> {
    session: u64,
    open: bool,
    cap: usize,
    /// Ready and running, those of earlier sessions included.
    taken: usize,
    waiting: VecDeque<Entry<W>>,
}

/// All lanes, and what is ready.
#[derive(Debug)]
pub struct Queue<W> {
    lanes: BTreeMap<AccountId, Lane<W>>,
    ready: VecDeque<Entry<W>>,
    last: u64,
}

impl<W> Default for Queue<W> {
    fn default() -> Self {
        Self { lanes: BTreeMap::new(), ready: VecDeque::new(), last: 0 }
    }
}

impl<W> Queue<W> {
    /// A lane for a new session of an account. What waits in the lane of an earlier one is given
    /// back; what runs goes on, and counts against the cap.
    pub fn open(&mut self, account: AccountId, cap: usize) -> (LaneKey, Vec<Entry<W>>) {
        let before =
            self.lanes.get(&account).map(|lane| LaneKey { account, session: lane.session });
        let left = before.map(|key| self.close(key)).unwrap_or_default();
        self.last += 1;
        let session = self.last;
        let taken = self.lanes.get(&account).map_or(0, |lane| lane.taken);
        let lane = Lane { session, open: true, cap, taken, waiting: VecDeque::new() };
        self.lanes.insert(account, lane);
        (LaneKey { account, session }, left)
    }

    /// Takes work; its number. Given back if the lane is closed or full.
    pub fn submit(&mut self, lane: LaneKey, work: W) -> Result<u64, W> {
        let Some(place) = self.lanes.get_mut(&lane.account) else { return Err(work) };
        if place.session != lane.session || !place.open || place.waiting.len() >= WAITING_MAX {
            return Err(work);
        }
        self.last += 1;
        let entry = Entry { lane, number: self.last, work };
        if place.taken < place.cap {
            place.taken += 1;
            self.ready.push_back(entry);
        } else {
            place.waiting.push_back(entry);
        }
        Ok(self.last)
    }

    /// The next work for a thread.
    pub fn take(&mut self) -> Option<Entry<W>> {
        self.ready.pop_front()
    }

    /// A piece of this lane has ended: the next one of its lane is ready.
    pub fn finish(&mut self, lane: LaneKey) {
        let place = self.lanes.get_mut(&lane.account).expect("a lane stays while work of it runs");
        place.taken -= 1;
        if place.taken < place.cap
            && let Some(next) = place.waiting.pop_front()
        {
            place.taken += 1;
            self.ready.push_back(next);
        }
        if !place.open && place.taken == 0 {
            self.lanes.remove(&lane.account);
        }
    }

    /// Takes out what has not started; nothing if it has.
    pub fn cancel(&mut self, lane: LaneKey, number: u64) -> Option<Entry<W>> {
        let place = self.lanes.get_mut(&lane.account)?;
        // Both are in the order of their numbers within a lane, and short.
        if let Some(at) = place.waiting.iter().position(|entry| entry.number == number) {
            return place.waiting.remove(at);
        }
        let at = self.ready.iter().position(|entry| entry.number == number)?;
        let entry = self.ready.remove(at);
        self.finish(lane);
        entry
    }

    /// The session has ended: what has not started is given back, in its order.
    pub fn close(&mut self, lane: LaneKey) -> Vec<Entry<W>> {
        let Some(place) = self.lanes.get_mut(&lane.account) else { return Vec::new() };
        if place.session != lane.session {
            return Vec::new();
        }
        place.open = false;
        let waiting = std::mem::take(&mut place.waiting);
        let (mut left, ready) = std::mem::take(&mut self.ready)
            .into_iter()
            .partition::<Vec<_>, _>(|entry| entry.lane == lane);
        self.ready = ready.into();
        place.taken -= left.len();
        if place.taken == 0 {
            self.lanes.remove(&lane.account);
        }
        left.extend(waiting);
        left
    }

    /// How many need nothing but a thread.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// How many of an account are ready or running.
    pub fn taken(&self, account: AccountId) -> usize {
        self.lanes.get(&account).map_or(0, |lane| lane.taken)
    }

    /// How many of an account wait for room in their lane.
    pub fn waiting(&self, account: AccountId) -> usize {
        self.lanes.get(&account).map_or(0, |lane| lane.waiting.len())
    }

    /// Lanes that are open.
    pub fn open_lanes(&self) -> usize {
        self.lanes.values().filter(|lane| lane.open).count()
    }

    /// Everything that has not started; no lane is open after it.
    pub fn close_all(&mut self) -> Vec<Entry<W>> {
        let account = |(account, lane): (&AccountId, &Lane<W>)| LaneKey {
            account: *account,
            session: lane.session,
        };
        let lanes: Vec<LaneKey> = self.lanes.iter().map(account).collect();
        lanes.into_iter().flat_map(|lane| self.close(lane)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn account(id: u64) -> AccountId {
        AccountId::new(id).unwrap()
    }

    fn works(entries: Vec<Entry<u32>>) -> Vec<u32> {
        entries.into_iter().map(|entry| entry.work).collect()
    }

    #[test]
    fn work_past_the_cap_of_its_lane_waits_in_its_order_and_holds_up_nobody_else() {
        let mut queue = Queue::default();
        let (first, _) = queue.open(account(1), 2);
        let (other, _) = queue.open(account(2), 2);
        for work in 1..=4 {
            queue.submit(first, work).unwrap();
        }
        queue.submit(other, 10).unwrap();
        let taken: Vec<Entry<u32>> = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!(taken.iter().map(|entry| entry.work).collect::<Vec<_>>(), [1, 2, 10]);
        assert_eq!((queue.taken(account(1)), queue.waiting(account(1))), (2, 2));
        queue.finish(first);
        queue.finish(first);
        assert_eq!(queue.take().unwrap().work, 3);
        assert_eq!(queue.take().unwrap().work, 4);
        assert!(queue.take().is_none());
    }

    #[test]
    fn what_has_not_started_can_be_cancelled_and_makes_room() {
        let mut queue = Queue::default();
        let (lane, _) = queue.open(account(1), 2);
        let numbers: Vec<u64> = (1..=4).map(|work| queue.submit(lane, work).unwrap()).collect();
        let runs = queue.take().unwrap();
        assert!(queue.cancel(lane, runs.number).is_none(), "it has started");
        assert_eq!(queue.cancel(lane, numbers[2]).unwrap().work, 3, "waited for room");
        assert_eq!(queue.cancel(lane, numbers[1]).unwrap().work, 2, "waited for a thread");
        assert_eq!(queue.take().unwrap().work, 4, "has the room of the second");
        assert_eq!(queue.taken(account(1)), 2);
    }

    #[test]
    fn calls_of_a_lost_session_that_run_on_count_against_the_next_one() {
        let mut queue = Queue::default();
        let (lost, _) = queue.open(account(1), 2);
        for work in 1..=4 {
            queue.submit(lost, work).unwrap();
        }
        queue.take().unwrap();
        let (next, left) = queue.open(account(1), 2);
        assert_eq!(works(left), [2, 3, 4], "nothing of the lost one starts");
        assert_eq!(queue.submit(lost, 5), Err(5));
        queue.submit(next, 6).unwrap();
        queue.submit(next, 7).unwrap();
        assert_eq!(queue.take().unwrap().work, 6);
        assert!(queue.take().is_none(), "one of the lost session still runs");
        assert!(queue.close(lost).is_empty(), "it does not close what came after it");
        queue.finish(lost);
        assert_eq!(queue.take().unwrap().work, 7);
        queue.close(next);
        queue.finish(next);
        queue.finish(next);
        assert_eq!(queue.lanes.len(), 0, "a lane is forgotten with its last call");
    }

    #[test]
    fn one_more_than_may_wait_is_refused() {
        let mut queue = Queue::default();
        let (lane, _) = queue.open(account(1), 1);
        for work in 0..=WAITING_MAX {
            queue.submit(lane, work).unwrap();
        }
        assert_eq!(queue.submit(lane, 0), Err(0));
    }

    proptest! {
        #[test]
        fn no_lane_is_over_its_cap_and_nothing_is_lost_or_done_twice(
            steps in proptest::collection::vec((0..6_u8, 0..3_u64, 0..40_usize), 1..300),
        ) {
            let mut queue = Queue::default();
            let mut lanes: Vec<LaneKey> =
                (1..=3).map(|id| queue.open(account(id), 2).0).collect();
            let (mut running, mut numbers) = (Vec::new(), Vec::new());
            let (mut came, mut went) = (0_usize, 0_usize);
            let mut last_of_lane = [0_u64; 3];
            for (step, lane, pick) in steps {
                let at = lane as usize;
                match step {
                    0 | 1 => if let Ok(number) = queue.submit(lanes[at], came) {
                        came += 1;
                        numbers.push((lanes[at], number));
                    },
                    2 => if let Some(entry) = queue.take() {
                        let of = usize::try_from(entry.lane.account.get()).unwrap() - 1;
                        prop_assert!(entry.number > last_of_lane[of], "out of order");
                        last_of_lane[of] = entry.number;
                        running.push(entry.lane);
                    },
                    3 if !running.is_empty() => {
                        let ended = running.swap_remove(pick % running.len());
                        queue.finish(ended);
                        went += 1;
                    }
                    4 if !numbers.is_empty() => {
                        let (lane, number) = numbers[pick % numbers.len()];
                        went += usize::from(queue.cancel(lane, number).is_some());
                    }
                    5 if pick < 3 => {
                        let (next, left) = queue.open(account(lane + 1), 2);
                        went += left.len();
                        lanes[at] = next;
                    }
                    _ => {}
                }
                let mut there = running.len() + queue.ready();
                for id in 1..=3 {
                    prop_assert!(queue.taken(account(id)) <= 2);
                    there += queue.waiting(account(id));
                }
                prop_assert_eq!(came, went + there);
                prop_assert!(
                    (1..=3).all(|id| queue.waiting(account(id)) == 0 || queue.taken(account(id)) == 2),
                    "somebody waits beside room"
                );
            }
        }
    }
}
