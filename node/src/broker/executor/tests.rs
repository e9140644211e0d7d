//! Calls that hold threads, with calls that the test ends itself.

use super::*;
use crate::clock::ManualClock;
use crate::gate::{Confirmation, Confirmed, Gate};
use crate::lease::{CycleNumber, LeaseTerm};
use parking_lot::Mutex;
use schemas::{FollowerTicket, OrderDone, Token};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// Longest wait for anything that must happen.
const LIMIT: Duration = Duration::from_secs(20);

fn account(id: u64) -> AccountId {
    AccountId::new(id).unwrap()
}

fn done(number: u64) -> Outcome {
    let ticket = FollowerTicket::new(number).unwrap();
    Outcome::Done(OrderDone { ticket, lots: None, price: None, remainder: None })
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::yield_now();
    }
}

/// A node with threads, and accounts that may send.
struct Node {
    executor: Executor,
    gate: Gate,
    clock: NodeClock,
    time: ManualClock,
}

impl Node {
    fn new(threads: usize) -> Node {
        let time = ManualClock::default();
        let clock = NodeClock::new(time.clone());
        let (gate, now) = (Gate::new(), clock.now());
        let term = LeaseTerm::confirmed(now, Duration::from_secs(60), Duration::from_secs(15));
        let confirmed = Confirmed { token: Token::MIN, term: Some(term) };
        let accounts: BTreeMap<_, _> = (1..=30).map(|id| (account(id), confirmed)).collect();
        let number = CycleNumber::NONE.next();
        gate.apply(&Confirmation { number, started: now, accounts }, now);
        Node { executor: Executor::start(threads, clock.clone()), gate, clock, time }
    }

    fn lane(&self, id: u64, cap: usize) -> Lane {
        self.executor.open(account(id), cap).unwrap()
    }

    fn permit(&self, id: u64) -> SendPermit {
        self.gate.permit(account(id), self.clock.now(), Duration::from_secs(2)).unwrap()
    }

    /// A call that begins and then waits to be told its outcome.
    fn held(&self, lane: &Lane, id: u64) -> (Answer, mpsc::Sender<Outcome>) {
        let (end, ends) = mpsc::channel();
        let (begun, begins) = mpsc::channel();
        let answer = lane.submit(self.permit(id), move |_, _| {
            begun.send(()).unwrap();
            ends.recv_timeout(LIMIT).unwrap()
        });
        begins.recv_timeout(LIMIT).unwrap();
        (answer, end)
    }
}

/// The outcome, within the limit of the test.
fn outcome(answer: Answer) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, answer).await.unwrap() })
}

fn no_call(_: SpentPermit, _: LeftAt) -> Outcome {
    panic!("this call must not begin")
}

#[test]
fn the_permit_is_looked_at_again_when_a_call_leaves_the_queue() {
    type End = fn(&Node);
    let ends: [(&str, End); 2] = [
        ("revoked", |node| node.gate.revoke(account(1))),
        ("over", |node| {
            // The permission ends while the call waits, and the call is not old yet.
            let number = CycleNumber::NONE.next().next();
            let accounts = BTreeMap::new();
            let now = node.clock.now();
            node.gate.apply(&Confirmation { number, started: now, accounts }, now);
        }),
    ];
    for (what, end_permission) in ends {
        let node = Node::new(2);
        let lane = node.lane(1, 1);
        let (first, end) = node.held(&lane, 1);
        let waits = lane.submit(node.permit(1), no_call);
        end_permission(&node);
        end.send(done(1)).unwrap();
        assert_eq!(outcome(first), done(1), "{what}: it had begun");
        assert_eq!(outcome(waits), Outcome::NotSent(NotSent::Gate), "{what}");
    }
}

#[test]
fn a_call_that_waited_too_long_for_its_thread_is_not_made() {
    let node = Node::new(1);
    let (lane, other) = (node.lane(1, 4), node.lane(2, 4));
    let (first, end) = node.held(&lane, 1);
    let old = other.submit(node.permit(2), no_call);
    node.time.advance(WAIT_MAX + Duration::from_millis(1));
    let young = other.submit(node.permit(2), |_, _| done(2));
    end.send(done(1)).unwrap();
    assert_eq!(outcome(first), done(1));
    assert_eq!(outcome(old), Outcome::NotSent(NotSent::Busy));
    assert_eq!(outcome(young), done(2));
}

#[test]
fn calls_that_wait_are_answered_at_once_when_their_session_ends() {
    let node = Node::new(1);
    let (lane, other) = (node.lane(1, 2), node.lane(2, 1));
    let (first, end) = node.held(&lane, 1);
    let for_a_thread = lane.submit(node.permit(1), no_call);
    let for_room = lane.submit(node.permit(1), no_call);
    let of_another = other.submit(node.permit(2), |_, _| done(2));
    lane.close();
    assert_eq!(outcome(for_a_thread), Outcome::NotSent(NotSent::Session));
    assert_eq!(outcome(for_room), Outcome::NotSent(NotSent::Session));
    let later = lane.submit(node.permit(1), no_call);
    assert_eq!(outcome(later), Outcome::NotSent(NotSent::Busy));
    end.send(done(1)).unwrap();
    assert_eq!(outcome(first), done(1), "what has begun is answered");
    assert_eq!(outcome(of_another), done(2), "others go on");
}

#[test]
fn dropping_an_answer_cancels_its_call_if_it_waits() {
    let node = Node::new(2);
    let lane = node.lane(1, 1);
    let (first, end) = node.held(&lane, 1);
    let dropped = lane.submit(node.permit(1), no_call);
    let kept = lane.submit(node.permit(1), |_, _| done(3));
    assert_eq!((lane.in_flight(), lane.waiting()), (1, 2));
    drop(dropped);
    assert_eq!((lane.in_flight(), lane.waiting()), (1, 1));
    drop(first);
    assert_eq!(lane.in_flight(), 1, "what has begun cannot be taken back");
    end.send(done(1)).unwrap();
    assert_eq!(outcome(kept), done(3));
}

#[tokio::test]
async fn a_call_given_up_was_not_sent_if_it_waited_and_is_unknown_if_it_had_begun() {
    let node = Node::new(2);
    let lane = node.lane(1, 1);
    let (begun, end) = node.held(&lane, 1);
    let waits = lane.submit(node.permit(1), no_call);
    let (given_up, left) = waits.within(Duration::from_millis(1)).await;
    assert_eq!((given_up, left), (Outcome::NotSent(NotSent::Busy), None));
    let (given_up, left) = begun.within(Duration::from_millis(1)).await;
    assert!(matches!(given_up, Outcome::Unknown(_)), "{given_up:?}");
    assert!(left.is_some());
    assert_eq!(lane.in_flight(), 1, "it holds its thread and its place until it returns");
    end.send(done(1)).unwrap();
    until("the thread is free", || lane.in_flight() == 0);
}

#[test]
fn past_the_cap_calls_begin_in_the_order_in_which_they_came() {
    let node = Node::new(4);
    let lane = node.lane(1, 2);
    let begun = Arc::new(Mutex::new(Vec::new()));
    let held = [node.held(&lane, 1), node.held(&lane, 1)];
    let answers: Vec<Answer> = (0..50)
        .map(|number| {
            let begun = Arc::clone(&begun);
            lane.submit(node.permit(1), move |_, _| {
                begun.lock().push(number);
                done(1)
            })
        })
        .collect();
    assert_eq!((lane.in_flight(), lane.waiting()), (2, 50));
    // One of the two goes on holding its place, so that the others begin one by one.
    let [(first, end), (second, end_last)] = held;
    end.send(done(1)).unwrap();
    assert_eq!(outcome(first), done(1));
    answers.into_iter().for_each(|answer| assert_eq!(outcome(answer), done(1)));
    assert_eq!(*begun.lock(), (0..50).collect::<Vec<_>>());
    end_last.send(done(1)).unwrap();
    assert_eq!(outcome(second), done(1));
}

#[test]
fn a_broker_that_does_not_answer_takes_no_thread_of_the_others() {
    let node = Node::new(4);
    let (silent, lane) = (node.lane(1, 2), node.lane(2, 2));
    let held = [node.held(&silent, 1), node.held(&silent, 1)];
    let stuck: Vec<Answer> = (0..20).map(|_| silent.submit(node.permit(1), no_call)).collect();
    // The connection is opened anew: what hangs of the old one still counts.
    let silent = node.lane(1, 2);
    let waits = silent.submit(node.permit(1), |_, _| done(7));
    for _ in 0..20 {
        assert_eq!(outcome(lane.submit(node.permit(2), |_, _| done(2))), done(2));
    }
    assert_eq!(silent.waiting(), 1);
    stuck.into_iter().for_each(|a| assert_eq!(outcome(a), Outcome::NotSent(NotSent::Session)));
    for (answer, end) in held {
        end.send(done(1)).unwrap();
        assert_eq!(outcome(answer), done(1));
    }
    assert_eq!(outcome(waits), done(7));
}

#[test]
fn the_count_of_calls_has_fallen_when_an_answer_is_there() {
    let node = Node::new(2);
    let lane = node.lane(1, 2);
    for round in 0..2_000 {
        assert_eq!(outcome(lane.submit(node.permit(1), |_, _| done(1))), done(1));
        assert_eq!(lane.in_flight(), 0, "round {round}");
    }
}

#[test]
fn a_call_that_panics_is_unknown_and_its_thread_goes_on() {
    let node = Node::new(1);
    let lane = node.lane(1, 1);
    for _ in 0..3 {
        let answer = lane.submit(node.permit(1), |_, _| panic!("a vendor's library"));
        assert!(matches!(outcome(answer), Outcome::Unknown(_)));
        assert_eq!(lane.in_flight(), 0);
    }
    assert_eq!(outcome(lane.submit(node.permit(1), |_, _| done(1))), done(1));
}

#[test]
fn a_call_is_told_what_it_may_state_and_when_it_began() {
    let node = Node::new(1);
    let lane = node.lane(1, 1);
    node.time.advance(Duration::from_secs(1));
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    let mut answer = lane.submit(node.permit(1), move |spent, left| {
        *tell.lock() = Some((spent, left));
        done(1)
    });
    assert!(answer.leaves_by_itself());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(&mut answer), done(1));
    let (spent, left) = told.lock().unwrap();
    assert_eq!(answer.left_at(), Some(left));
    assert_eq!((left.node, left.wall), (node.clock.now(), node.clock.wall()));
    assert_eq!((spent.token, spent.margin), (Token::MIN, Duration::from_secs(44)));
}

#[test]
fn a_node_without_threads_opens_no_way_to_them() {
    let node = Node::new(0);
    assert!(node.executor.open(account(1), 16).is_none());
}

#[test]
fn the_end_of_the_executor_answers_what_has_not_begun_and_ends_the_threads() {
    let node = Node::new(1);
    let lane = node.lane(1, 4);
    let (first, end) = node.held(&lane, 1);
    let waits = lane.submit(node.permit(1), no_call);
    let shared = Arc::downgrade(node.executor.crew.shared_for_tests());
    drop((node, lane));
    // The answers have a hand on the threads as well, or they could not cancel.
    end.send(done(1)).unwrap();
    assert_eq!(outcome(first), done(1));
    assert_eq!(outcome(waits), Outcome::NotSent(NotSent::Session));
    until("the thread ends", || shared.strong_count() == 0);
}

/// Counts itself, and says when it is the last.
struct Counting {
    left: Arc<AtomicUsize>,
    hold: Duration,
}

impl Work for Counting {
    fn carry_out(&mut self) {
        let until = Instant::now() + self.hold;
        while Instant::now() < until {
            std::thread::yield_now();
        }
    }

    fn tell(self) {
        self.left.fetch_sub(1, Ordering::AcqRel);
    }
}

#[test]
fn no_work_is_left_lying_whoever_hands_it_over_and_however_it_comes() {
    let crew: Crew<Counting> = Crew::start(24);
    for round in 0..60_u64 {
        let left = Arc::new(AtomicUsize::new(3 * 40));
        std::thread::scope(|scope| {
            for lane in 1..=3 {
                let (crew, left) = (crew.clone(), Arc::clone(&left));
                scope.spawn(move || {
                    let key = crew.open(account(lane), 1 + (round % 9) as usize);
                    for number in 0..40_u64 {
                        let hold = Duration::from_micros((round * 7 + number * 13) % 90);
                        let work = Counting { left: Arc::clone(&left), hold };
                        assert!(crew.submit_all(key, vec![work]).iter().all(Result::is_ok));
                    }
                    until("everything is done", || left.load(Ordering::Acquire) == 0);
                });
            }
        });
        until("every thread sleeps", || crew.idle() == 24);
    }
}
