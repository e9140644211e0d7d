//! Each fault over a real socket, as a node meets it.
#![allow(clippy::unwrap_used, reason = "this whole file is a test")]

mod harness;

use harness::{Broker, Raw, account, change, config, done, ident, lots, meta, open, session, soon};
use lockstep_paper as paper;
use paper::broker::KICKED;
use paper::faults::{FaultKind, FaultSpec, Span, Withheld};
use paper::ledger::Fact;
use paper::protocol::AccountChange;
use paper::{Ledger, OrderOutcome, PaperClient, PaperError, SessionPush};
use schemas::{CloseReason, OrderRequest, RejectClass, Token};
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::io::BufReader;
use tokio::net::TcpListener;

fn ms(ms: u64) -> Span {
    Span::of(Duration::from_millis(ms))
}

impl Broker {
    async fn fault(&self, kind: FaultKind) {
        self.driver.set_fault(FaultSpec::new(kind).count(1)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_the_node_with_its_class() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    let reject = FaultKind::Reject { class: RejectClass::NoMoney };
    for (kind, class) in [
        (FaultKind::Requote {}, RejectClass::Requote),
        (FaultKind::MarketClosed {}, RejectClass::Later),
        (reject, RejectClass::NoMoney),
    ] {
        broker.fault(kind).await;
        match soon("an answer", session.order(&open("a"), meta(1, 1))).await {
            OrderOutcome::Rejected(rejection) => assert_eq!(rejection.class, class),
            other => panic!("{other:?}"),
        }
    }
    done(&session, &open("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_never_given_and_the_trade_is_pushed() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, mut pushes, _) = session(&client, 1).await;
    broker.fault(FaultKind::LostAnswer {}).await;
    let answer = session.submit(&open("a"), meta(1, 1)).unwrap();
    assert!(matches!(change(&mut pushes).await.1, AccountChange::PositionOpened { .. }));
    done(&session, &open("b")).await;
    client.abort();
    let outcome = soon("the end of the order", answer).await;
    assert!(matches!(outcome, OrderOutcome::Unknown(_)), "{outcome:?}");
    let ledger = broker.driver.ledger().await.unwrap();
    let answered: Vec<_> = ledger.orders().map(|(_, r, _)| r.answer_after_us).collect();
    assert_eq!(answered, [None, Some(0)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partial_fill_says_what_was_filled() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    broker.fault(FaultKind::PartialFill { percent: 40 }).await;
    assert_eq!(done(&session, &open("a")).await.lots, Some(lots("0.4")));
    assert_eq!(session.snapshot().await.unwrap().positions[0].lots, lots("0.4"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_delivery_is_carried_out_late_though_its_connection_is_gone() {
    const DELAY: u64 = 1_200;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let broker = Broker::start(config(Some(path.clone()), 0)).await;
    let client = broker.client("n1").await;
    let (session_one, _pushes, _) = session(&client, 1).await;
    broker.fault(FaultKind::DeliveryDelay { span: ms(DELAY), dies_with_connection: false }).await;
    let started = Instant::now();
    let first = session_one.submit(&open("first"), meta(1, 900)).unwrap();
    let second = session_one.submit(&open("second"), meta(1, 800)).unwrap();
    // Reads are answered meanwhile, and show that nothing happened yet.
    assert!(session_one.snapshot().await.unwrap().positions.is_empty());
    client.abort();
    for answer in [first, second] {
        let outcome = soon("the end of the order", answer).await;
        assert!(matches!(outcome, OrderOutcome::Unknown(_)), "{outcome:?}");
    }
    let newer = broker.client("n2").await;
    let opened = newer.open_account(account(1), Token::new(2).unwrap()).await.unwrap();
    let (_session_two, mut pushes) = opened;
    let synced = soon("the sync mark", pushes.recv()).await;
    assert!(matches!(synced, Some(SessionPush::Synced(s)) if s.positions.is_empty()));
    for comment in ["first", "second"] {
        match change(&mut pushes).await.1 {
            AccountChange::PositionOpened { position } => assert_eq!(position.comment, comment),
            other => panic!("{other:?}"),
        }
    }
    assert!(started.elapsed() >= Duration::from_millis(DELAY), "{:?}", started.elapsed());
    let ledger = broker.driver.ledger().await.unwrap();
    let (row, request, stated) = ledger.orders().next().unwrap();
    assert!(request.arrived_mono_us >= request.sent_mono_us + DELAY * 1_000);
    assert_eq!((row.at_mono_us, request.arrival), (request.arrived_mono_us, 1));
    assert_eq!((stated.deadline_margin_us, stated.token.get()), (900, 1));
    assert_eq!(Ledger::read_file(&path).unwrap(), ledger);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_acceptance_is_overtaken_and_answered_when_it_is_done() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    broker.fault(FaultKind::AcceptanceDelay { span: ms(600) }).await;
    let started = Instant::now();
    let slow = session.submit(&open("slow"), meta(1, 1)).unwrap();
    let quick = done(&session, &open("quick")).await;
    let OrderOutcome::Done(slow) = soon("the slow answer", slow).await else { panic!() };
    assert!(started.elapsed() >= Duration::from_millis(600));
    assert!(slow.ticket > quick.ticket, "carried out after the one that was sent later");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_hears_nothing_of_its_account_before_the_lists_are_whole() {
    let broker = Broker::quick().await;
    for _ in 0..4 {
        broker.open_by_hand(1, "0.10").await;
    }
    let client = broker.client("n1").await;
    let span = ms(800);
    broker.fault(FaultKind::Unsynced { lists: Withheld::Half, span, claims_complete: false }).await;
    let started = Instant::now();
    let (session, mut pushes) =
        client.open_account(account(1), Token::new(1).unwrap()).await.unwrap();
    assert!(!session.is_synced());
    let early = session.snapshot().await;
    assert!(matches!(early, Err(PaperError::NotSynced { .. })), "{early:?}");
    broker.open_by_hand(1, "0.20").await;
    match soon("the sync mark", pushes.recv()).await {
        Some(SessionPush::Synced(snapshot)) => assert_eq!(snapshot.positions.len(), 5),
        other => panic!("the first push must be the whole account, got {other:?}"),
    }
    assert!(started.elapsed() >= Duration::from_millis(800));
    assert_eq!(session.snapshot().await.unwrap().positions.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_session_ends_the_first_and_its_orders_are_refused() {
    let broker = Broker::quick().await;
    let kicks = FaultSpec::new(FaultKind::SecondSessionKicks {}).account(account(1));
    broker.driver.set_fault(kicks).await.unwrap();
    let (one, two) = (broker.client("n1").await, broker.client("n2").await);
    let (first, mut pushes, _) = session(&one, 1).await;
    let (other, _other_pushes, _) = session(&one, 2).await;
    let (second, _second_pushes, _) = session(&two, 1).await;
    assert_eq!(soon("the end of the first", pushes.recv()).await, None);
    assert_eq!(first.lost_reason().as_deref(), Some(KICKED));
    first.submit(&open("a"), meta(1, 1)).unwrap_err();
    done(&second, &open("a")).await;
    done(&other, &open("b")).await;
    let ledger = broker.driver.ledger().await.unwrap();
    assert_eq!(ledger.rows().iter().filter(|r| matches!(r.fact, Fact::Ended(_))).count(), 1);
    assert_eq!(broker.driver.kick(account(1)).await.unwrap(), 1);
    assert_eq!(broker.driver.kick(account(1)).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_out_is_pushed_with_its_reason() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, mut pushes, _) = session(&client, 1).await;
    let ticket = done(&session, &open("a")).await.ticket;
    change(&mut pushes).await;
    broker.driver.set_stop_out(account(1), Some(50)).await.unwrap();
    broker.feed("1.00500", "1.00510").await;
    match change(&mut pushes).await.1 {
        AccountChange::PositionClosed { closed, reason } => {
            assert_eq!((closed.ticket, reason), (ticket, CloseReason::StopOut));
        }
        other => panic!("{other:?}"),
    }
    broker.driver.set_stop_out(account(1), None).await.unwrap();
    let again = done(&session, &open("b")).await.ticket;
    assert_eq!(broker.driver.stop_out(account(1)).await.unwrap(), again);
    let close = OrderRequest::Close { ticket: again, lots: None };
    match soon("an answer", session.order(&close, meta(1, 1))).await {
        OrderOutcome::Rejected(rejection) => assert_eq!(rejection.class, RejectClass::AlreadySo),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_are_listed_and_cleared_and_a_wrong_one_names_its_field() {
    let broker = Broker::quick().await;
    let set = |spec: FaultSpec| broker.driver.set_fault(spec);
    let timed = FaultSpec { for_ms: Some(60_000), ..FaultSpec::new(FaultKind::Requote {}) };
    let first = set(timed.account(account(1))).await.unwrap();
    let second = set(FaultSpec::new(FaultKind::CommentBlank {})).await.unwrap();
    let listed = broker.driver.faults().await.unwrap();
    assert_eq!(listed.iter().map(|f| f.id).collect::<Vec<_>>(), [first.id, second.id]);
    assert!(listed[0].left_ms.is_some_and(|ms| ms > 0 && ms <= 60_000));
    let of_account = broker.driver.clear_faults(None, Some(account(1))).await.unwrap();
    assert_eq!(of_account.len(), 1);
    assert_eq!(broker.driver.clear_faults(Some(second.id), None).await.unwrap().len(), 1);
    assert!(broker.driver.faults().await.unwrap().is_empty());
    match set(FaultSpec::new(FaultKind::PartialFill { percent: 0 })).await {
        Err(PaperError::Refused(error)) => assert_eq!(error.field, "fault.kind.percent"),
        other => panic!("{other:?}"),
    }
}

/// Plays the broker: it has ended the session already, and the client does not know it yet.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_for_a_session_that_has_just_ended_was_not_sent_rather_than_wrong() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let client = PaperClient::connect(&addr, ident("n1")).await.unwrap();
    let mut raw = Raw { stream: BufReader::new(listener.accept().await.unwrap().0) };
    let opening = tokio::spawn(async move {
        client.open_account(account(1), Token::new(1).unwrap()).await.unwrap()
    });
    let id = raw.hear().await["id"].take();
    raw.say(&json!({"id": id, "ok": {}}).to_string()).await;
    let (session, _pushes) = soon("the login", opening).await.unwrap();
    for (field, was_refused) in [("account", false), ("request.lots", true)] {
        let answer = session.submit(&open("a"), meta(1, 1)).unwrap();
        let id = raw.hear().await["id"].take();
        let error = json!({"field": field, "value": "1", "text": "no"});
        raw.say(&json!({"id": id, "error": error}).to_string()).await;
        let outcome = soon("the answer", answer).await;
        assert_eq!(matches!(outcome, OrderOutcome::Rejected(_)), was_refused, "{outcome:?}");
        assert_eq!(matches!(outcome, OrderOutcome::NotSent(_)), !was_refused, "{outcome:?}");
    }
}
