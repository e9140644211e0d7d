//! Sessions at a real paper broker that misbehaves.

use super::*;
use crate::gate::{Confirmation, Confirmed, Gate};
use crate::lease::{CycleNumber, LeaseTerm};
use ::paper::faults::{FaultKind, FaultSpec, Settings, Span, Withheld};
use ::paper::protocol::{AccountDecl, FeedQuote, Instruction, LoginKind, OrderReply, Style};
use ::paper::{PaperConfig, PaperDriver, PaperServer};
use schemas::{Magic, Side};
use serde_json::json;
use std::collections::BTreeMap;

/// Longest wait for anything that must happen.
const LIMIT: Duration = Duration::from_secs(20);

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

struct Broker {
    addr: String,
    driver: PaperDriver,
}

/// A broker with account 1, which holds a trade, and account 2, which nets.
async fn broker() -> Broker {
    let settings = Settings { answer_delay_ms: 0, ..Settings::default() };
    let listen = "127.0.0.1:0".parse().unwrap();
    let config = PaperConfig { listen, ledger_path: None, settings, seed: 1 };
    let server = PaperServer::bind(config).await.unwrap();
    let addr = server.local_addr().to_string();
    tokio::spawn(server.serve(std::future::pending()));
    let ident = Ident { node: "driver".parse().unwrap() };
    let driver = PaperDriver::connect(&addr, ident, LoginKind::Driver).await.unwrap();
    let spec = json!({"symbol": "EURUSD", "digits": 5, "lots_step": "0.01", "lots_min": "0.01",
        "lots_max": "50", "contract_size": "100000"});
    driver.declare_symbols(vec![serde_json::from_value(spec).unwrap()]).await.unwrap();
    let decls = [(1, Style::Mt5), (2, Style::Mt5Netting)];
    let decls = decls.map(|(number, style)| AccountDecl::new(account(number), style));
    driver.declare_accounts(decls.to_vec()).await.unwrap();
    let (bid, ask) = ("1.1".parse().unwrap(), "1.1001".parse().unwrap());
    driver.feed(vec![FeedQuote { symbol: eurusd(), bid, ask }]).await.unwrap();
    let by_hand = Instruction::open_by_hand(eurusd(), Side::Buy, "0.10".parse().unwrap());
    let opened = driver.manual(account(1), by_hand).await.unwrap();
    assert!(matches!(opened, OrderReply::Done(_)));
    Broker { addr, driver }
}

fn eurusd() -> Symbol {
    Symbol::new("EURUSD").unwrap()
}

impl Broker {
    async fn fault(&self, spec: FaultSpec) {
        self.driver.set_fault(spec).await.unwrap();
    }

    async fn open(
        &self,
        number: u64,
    ) -> Result<(PaperBrokerSession, PaperEvents, AccountSnapshot), BrokerError> {
        let (address, login) = (self.addr.clone(), account(number));
        let settings = PaperSettings { address, login, blocking: false };
        let node = "node".parse().unwrap();
        let token = Token::new(1).unwrap();
        let opening = open(account(number), &settings, None, &node, token, NodeClock::system());
        tokio::time::timeout(LIMIT, opening).await.unwrap()
    }
}

/// Permission that holds for a while.
fn gate(clock: &NodeClock) -> Gate {
    let (gate, now) = (Gate::new(), clock.now());
    let term = LeaseTerm::confirmed(now, Duration::from_secs(60), Duration::from_secs(15));
    let confirmed = Confirmed { token: Token::new(1).unwrap(), term: Some(term) };
    let accounts = BTreeMap::from([(account(1), confirmed)]);
    let number = CycleNumber::NONE.next();
    gate.apply(&Confirmation { number, started: now, accounts }, now);
    gate
}

/// A permit that holds for a while.
fn permit(clock: &NodeClock) -> SendPermit {
    gate(clock).permit(account(1), clock.now(), Duration::ZERO).unwrap()
}

fn buy() -> OrderRequest {
    OrderRequest::Open {
        symbol: eurusd(),
        side: Side::Buy,
        lots: "1".parse().unwrap(),
        stop_loss: None,
        take_profit: None,
        magic: Magic::new(77).unwrap(),
        comment: "tag".to_owned(),
    }
}

fn unsynced(lists: Withheld, ms: u64, claims_complete: bool) -> FaultSpec {
    let span = Span::of(Duration::from_millis(ms));
    FaultSpec::new(FaultKind::Unsynced { lists, span, claims_complete })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_opens_with_the_whole_account_however_late_its_lists_are_whole() {
    let broker = broker().await;
    for lists in [Withheld::All, Withheld::Half] {
        broker.fault(unsynced(lists, 700, false).count(1)).await;
        let started = std::time::Instant::now();
        let (session, _events, snapshot) = broker.open(1).await.unwrap();
        assert_eq!(snapshot.positions.len(), 1, "{lists:?}");
        assert!(started.elapsed() >= Duration::from_millis(700), "it waits for the mark");
        assert_eq!(session.snapshot().await.unwrap().positions.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_list_with_margin_in_use_opens_no_session() {
    let broker = broker().await;
    broker.fault(unsynced(Withheld::All, 30_000, true).count(1)).await;
    let error = broker.open(1).await.unwrap_err();
    assert!(
        matches!(&error, BrokerError::Incomplete(text) if text.contains("margin of")),
        "{error}"
    );
    let (_, _, snapshot) = broker.open(1).await.unwrap();
    assert_eq!(snapshot.positions.len(), 1, "a login later it is whole");
    broker.fault(unsynced(Withheld::All, 30_000, true)).await;
    let (_, _, flat) = broker.open(2).await.unwrap();
    assert!(flat.positions.is_empty(), "a flat account is flat");
}

#[tokio::test(flavor = "multi_thread")]
async fn kicked_session_sends_nothing_more() {
    let broker = broker().await;
    broker.fault(FaultSpec::new(FaultKind::SecondSessionKicks {})).await;
    let (session, mut events, _) = broker.open(1).await.unwrap();
    let (_second, _events, _) = broker.open(1).await.unwrap();
    let lost = tokio::time::timeout(LIMIT, async {
        loop {
            if let SessionEvent::Lost(reason) = events.next().await {
                return reason;
            }
        }
    });
    let reason = lost.await.unwrap();
    assert_eq!(reason, ::paper::broker::KICKED);
    let outcome = session.submit(permit(&session.clock), &buy(), 1).await;
    assert_eq!(outcome, Outcome::NotSent(NotSent::Session));
    session.snapshot().await.unwrap_err();
    assert_eq!(broker.driver.book(account(1)).await.unwrap().positions.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_says_whether_its_account_nets() {
    let broker = broker().await;
    assert!(!broker.open(1).await.unwrap().0.is_netting());
    assert!(broker.open(2).await.unwrap().0.is_netting());
}

#[test]
fn settings_with_a_wrong_or_unknown_key_are_refused_by_name() {
    let account = AccountId::new(7).unwrap();
    for (settings, mention) in [
        (json!({}), "address: must be HOST:PORT"),
        (json!({"address": 5}), "address: must be HOST:PORT"),
        (json!({"address": "a:1", "login": -1}), "login: must be a number above 0, got -1"),
        (json!({"address": "a:1", "adress": "b:2"}), "adress: not a setting"),
        (json!({"address": "a:1", "blocking": "yes"}), "blocking: must be true or false, got"),
        (json!("a:1"), "must be a JSON object"),
    ] {
        let error = PaperSettings::from_json(account, &settings).unwrap_err().to_string();
        assert!(error.contains(mention), "{settings}: {error}");
    }
    let settings = PaperSettings::from_json(account, &json!({"address": "a:1"})).unwrap();
    assert_eq!((settings.login, settings.blocking), (account, false));
    let blocking = json!({"address": "a:1", "blocking": true});
    assert!(PaperSettings::from_json(account, &blocking).unwrap().blocking);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_orders_that_leave_together_only_the_one_without_a_permit_stays() {
    let broker = broker().await;
    let (session, mut events, _) = broker.open(1).await.unwrap();
    let void = || {
        let gate = Gate::new();
        let now = session.clock.now();
        let term = LeaseTerm::confirmed(now, Duration::from_secs(60), Duration::from_secs(15));
        let confirmed = Confirmed { token: Token::new(1).unwrap(), term: Some(term) };
        let accounts = BTreeMap::from([(account(1), confirmed)]);
        let number = CycleNumber::NONE.next();
        gate.apply(&Confirmation { number, started: now, accounts }, now);
        let permit = gate.permit(account(1), now, Duration::ZERO).unwrap();
        gate.revoke_all(now, crate::gate::RevokeReason::Operator);
        permit
    };
    let requests: Vec<OrderRequest> = ["a", "b", "c"]
        .into_iter()
        .map(|tag| match buy() {
            OrderRequest::Open { symbol, side, lots, stop_loss, take_profit, magic, .. } => {
                let comment = tag.to_owned();
                OrderRequest::Open { symbol, side, lots, stop_loss, take_profit, magic, comment }
            }
            other => other,
        })
        .collect();
    let permits = [permit(&session.clock), void(), permit(&session.clock)];
    let orders = permits.into_iter().zip(&requests).zip(1..);
    let orders =
        orders.map(|((permit, request), attempt)| PermittedOrder { permit, request, attempt });
    let mut answers = session.submit_all(orders.collect()).into_iter();
    let mut next = async || {
        let answer = answers.next().expect("an answer for each order");
        tokio::time::timeout(LIMIT, answer).await.unwrap()
    };
    assert!(matches!(next().await, Outcome::Done(_)));
    assert_eq!(next().await, Outcome::NotSent(NotSent::Gate));
    assert!(matches!(next().await, Outcome::Done(_)));
    let mut tags = Vec::new();
    while tags.len() < 2 {
        let event = tokio::time::timeout(LIMIT, events.next()).await.unwrap();
        if let SessionEvent::Position(position) = event {
            tags.push(position.comment);
        }
    }
    assert_eq!(tags, ["a", "c"], "in their order");
}
#[path = "paper_blocking_tests.rs"]
mod blocking;
