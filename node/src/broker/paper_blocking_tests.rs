//! Order calls that hold a thread, at a real paper broker.

use super::*;
use crate::broker::executor::Executor;
use ::paper::faults::SettingsChange;
use ::paper::ledger::Fact;

/// A session of account 1 whose calls hold threads.
struct Blocking {
    broker: Broker,
    executor: Executor,
    session: PaperBrokerSession,
    events: PaperEvents,
    gate: Gate,
}

impl Blocking {
    async fn open(threads: usize, cap: usize, answer_delay_ms: u64) -> Blocking {
        let broker = broker().await;
        let change =
            SettingsChange { answer_delay_ms: Some(answer_delay_ms), ..SettingsChange::default() };
        broker.driver.settings(change).await.unwrap();
        let (mut session, events, _) = broker.open(1).await.unwrap();
        let executor = Executor::start(threads, session.clock.clone());
        session.hold_threads(&executor, cap).unwrap();
        let gate = gate(&session.clock);
        Blocking { broker, executor, session, events, gate }
    }

    fn submit(&self, attempt: u64) -> Answer {
        let permit = self.gate.permit(account(1), self.session.clock.now(), Duration::ZERO);
        self.session.submit(permit.unwrap(), &buy(), attempt)
    }

    fn lane(&self) -> &Lane {
        self.session.lane.as_ref().unwrap()
    }

    /// Numbers of the orders that reached the broker, in the order in which they did.
    async fn arrived(&self) -> Vec<u64> {
        let ledger = self.broker.driver.ledger().await.unwrap();
        let requests = ledger.rows().iter().filter_map(|row| match &row.fact {
            Fact::Request(request) => request.meta.as_ref().map(|meta| meta.client_ref),
            Fact::Login(_) | Fact::Ended(_) | Fact::Lost(_) | Fact::Trade(_) => None,
        });
        requests.collect()
    }

    async fn until_arrived(&self, count: usize) {
        let arrived = async { while self.arrived().await.len() < count {} };
        tokio::time::timeout(LIMIT, arrived).await.unwrap();
    }
}

async fn outcome(answer: Answer) -> Outcome {
    tokio::time::timeout(LIMIT, answer).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocking_call_holds_a_thread_until_it_is_answered_and_tells_its_trade_first() {
    let mut world = Blocking::open(4, 2, 200).await;
    let started = std::time::Instant::now();
    let answers = [world.submit(1), world.submit(2)];
    let event = tokio::time::timeout(LIMIT, world.events.next()).await.unwrap();
    assert!(matches!(event, SessionEvent::Position(_)), "{event:?}");
    assert_eq!((world.lane().in_flight(), world.executor.idle()), (2, 2));
    for answer in answers {
        let (outcome, left) = answer.within(LIMIT).await;
        assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
        assert!(left.is_some_and(|left| left.node <= world.session.clock.now()));
    }
    assert!(started.elapsed() >= Duration::from_millis(200));
    assert_eq!(world.lane().in_flight(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_past_the_cap_reach_the_broker_one_by_one_in_their_order() {
    let world = Blocking::open(8, 1, 20).await;
    let answers: Vec<Answer> = (1..=6).map(|attempt| world.submit(attempt)).collect();
    assert_eq!((world.lane().in_flight(), world.lane().waiting()), (1, 5));
    for answer in answers {
        assert!(matches!(outcome(answer).await, Outcome::Done(_)));
    }
    assert_eq!(world.arrived().await, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_whose_permission_ended_while_it_waited_never_reaches_the_broker() {
    let world = Blocking::open(4, 1, 300).await;
    let (first, waits) = (world.submit(1), world.submit(2));
    world.until_arrived(1).await;
    world.gate.revoke(account(1));
    assert_eq!(outcome(waits).await, Outcome::NotSent(NotSent::Gate));
    assert!(matches!(outcome(first).await, Outcome::Done(_)));
    assert_eq!(world.arrived().await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn cutting_a_session_off_cancels_what_waits_and_leaves_unknown_what_was_sent() {
    let world = Blocking::open(4, 1, 20_000).await;
    let (sent, waits) = (world.submit(1), world.submit(2));
    world.until_arrived(1).await;
    world.session.abort();
    assert_eq!(outcome(waits).await, Outcome::NotSent(NotSent::Session));
    let outcome_of_sent = outcome(sent).await;
    assert!(matches!(outcome_of_sent, Outcome::Unknown(_)), "{outcome_of_sent:?}");
    assert_eq!(world.lane().in_flight(), 0, "its thread is free again");
    let refused = outcome(world.submit(3)).await;
    assert!(matches!(refused, Outcome::NotSent(_)), "{refused:?}");
    assert_eq!(world.arrived().await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_frees_its_threads_and_leaves_their_orders_unknown() {
    let mut world = Blocking::open(4, 4, 20_000).await;
    let answers = [world.submit(1), world.submit(2)];
    world.until_arrived(2).await;
    // The broker goes on; only this connection is gone.
    world.session.client.abort();
    for answer in answers {
        let outcome = outcome(answer).await;
        assert!(matches!(outcome, Outcome::Unknown(_)), "{outcome:?}");
    }
    assert_eq!((world.lane().in_flight(), world.executor.idle()), (0, 4));
    let lost = tokio::time::timeout(LIMIT, async {
        while !matches!(world.events.next().await, SessionEvent::Lost(_)) {}
    });
    lost.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_threads_refuses_a_blocking_account_and_says_which_setting() {
    let broker = broker().await;
    let (mut session, _events, _) = broker.open(1).await.unwrap();
    let executor = Executor::start(0, session.clock.clone());
    let error = session.hold_threads(&executor, 16).unwrap_err().to_string();
    assert!(error.contains("LOCKSTEP_BLOCKING_FOLLOWERS"), "{error}");
}
