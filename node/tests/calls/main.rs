//! No thread is made in a burst of orders whose calls hold one.
//!
//! Alone in its program, because it counts the threads of the process.

#![allow(clippy::unwrap_used, reason = "tests")]

use lockstep::broker::executor::Executor;
use lockstep::broker::paper::{PaperBrokerSession, PaperEvents, PaperSettings, open};
use lockstep::broker::{BrokerSession, Outcome};
use lockstep::clock::NodeClock;
use lockstep::gate::{Confirmation, Confirmed, Gate};
use lockstep::lease::{CycleNumber, LeaseTerm};
use paper::faults::Settings;
use paper::protocol::{AccountDecl, FeedQuote, LoginKind, Style};
use paper::{Ident, PaperConfig, PaperDriver, PaperServer};
use schemas::{AccountId, Magic, OrderRequest, Side, Symbol, Token};
use std::time::{Duration, Instant};

const FOLLOWERS: u64 = 10;
const ORDERS: u64 = 27;
const CAP: usize = 16;
/// Longest wait for anything that must happen.
const LIMIT: Duration = Duration::from_secs(30);

fn threads_of_this_process() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("Threads:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

fn eurusd() -> Symbol {
    Symbol::new("EURUSD").unwrap()
}

/// A paper broker with its accounts. It takes half a second to answer: long enough for all threads to be
/// at work.
async fn broker() -> String {
    let settings = Settings { answer_delay_ms: 500, ..Settings::default() };
    let listen = "127.0.0.1:0".parse().unwrap();
    let config = PaperConfig { listen, ledger_path: None, settings, seed: 1 };
    let server = PaperServer::bind(config).await.unwrap();
    let addr = server.local_addr().to_string();
    tokio::spawn(server.serve(std::future::pending()));
    let ident = Ident { node: "driver".parse().unwrap() };
    let driver = PaperDriver::connect(&addr, ident, LoginKind::Driver).await.unwrap();
    let spec = serde_json::json!({"symbol": "EURUSD", "digits": 5, "lots_step": "0.01",
        "lots_min": "0.01", "lots_max": "50", "contract_size": "100000"});
    driver.declare_symbols(vec![serde_json::from_value(spec).unwrap()]).await.unwrap();
    let decls = (1..=FOLLOWERS).map(|number| AccountDecl::new(account(number), Style::Mt5));
    driver.declare_accounts(decls.collect()).await.unwrap();
    let (bid, ask) = ("1.1".parse().unwrap(), "1.1001".parse().unwrap());
    driver.feed(vec![FeedQuote { symbol: eurusd(), bid, ask }]).await.unwrap();
    addr
}

fn permission(clock: &NodeClock) -> Gate {
    let (gate, now) = (Gate::new(), clock.now());
    let term = LeaseTerm::confirmed(now, Duration::from_secs(600), Duration::from_secs(15));
    let confirmed = Confirmed { token: Token::MIN, term: Some(term) };
    let accounts = (1..=FOLLOWERS).map(|number| (account(number), confirmed)).collect();
    gate.apply(&Confirmation { number: CycleNumber::NONE.next(), started: now, accounts }, now);
    gate
}

async fn session(
    addr: &str,
    number: u64,
    clock: &NodeClock,
    executor: &Executor,
) -> (PaperBrokerSession, PaperEvents) {
    let settings =
        PaperSettings { address: addr.to_owned(), login: account(number), blocking: true };
    let node = "node".parse().unwrap();
    let opened = open(account(number), &settings, None, &node, Token::MIN, clock.clone()).await;
    let (mut session, events, _) = opened.unwrap();
    session.hold_threads(executor, CAP).unwrap();
    (session, events)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_orders_makes_no_thread_and_uses_all_that_were_made_before() {
    let addr = broker().await;
    let clock = NodeClock::system();
    let gate = permission(&clock);
    let executor = Executor::start(FOLLOWERS as usize * CAP, clock.clone());
    let mut sessions = Vec::new();
    for number in 1..=FOLLOWERS {
        sessions.push(session(&addr, number, &clock, &executor).await);
    }
    let deadline = Instant::now() + LIMIT;
    while executor.idle() < executor.threads() {
        assert!(Instant::now() < deadline, "the threads are not ready");
        tokio::task::yield_now().await;
    }
    let before = threads_of_this_process();

    let mut answers = Vec::new();
    for order in 1..=ORDERS {
        for (number, (session, _)) in (1..).zip(&sessions) {
            let request = OrderRequest::Open {
                symbol: eurusd(),
                side: Side::Buy,
                lots: "1".parse().unwrap(),
                stop_loss: None,
                take_profit: None,
                magic: Magic::new(77).unwrap(),
                comment: order.to_string(),
            };
            let permit = gate.permit(account(number), clock.now(), Duration::from_secs(2));
            answers.push(session.submit(permit.unwrap(), &request, order));
        }
    }
    let deadline = Instant::now() + LIMIT;
    while executor.idle() > 0 {
        assert!(Instant::now() < deadline, "not all {} are at work at once", executor.threads());
        tokio::task::yield_now().await;
    }
    let mut during = threads_of_this_process();
    for answer in answers {
        during = during.max(threads_of_this_process());
        let (outcome, left) = answer.within(LIMIT).await;
        assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
        assert!(left.is_some());
    }
    let made = during.max(threads_of_this_process()) - before;
    assert_eq!(made, 0, "threads made in the burst");

    // The count would have told.
    let one_more = std::thread::spawn(std::thread::park);
    assert_eq!(threads_of_this_process(), before + 1);
    one_more.thread().unpark();
    one_more.join().unwrap();
}
