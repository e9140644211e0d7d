//! The broker over a real socket, as a node, a driver and a person with nc see it.
#![allow(clippy::unwrap_used, reason = "this whole file is a test")]

mod harness;

use harness::{Broker, Raw, account, change, config, done, ident, lots, meta, open, session, soon};
use lockstep_paper as paper;
use paper::client::SESSION_PUSHES_MAX;
use paper::faults::SettingsChange;
use paper::ledger::Fact;
use paper::protocol::{
    AccountChange, AccountDecl, FeedQuote, Instruction, LIST_ITEMS_MAX, LoginKind,
    PAGE_ACCOUNTS_MAX, PAGE_ROWS_MAX, Password, REQUEST_LINE_BYTES_MAX, Style,
};
use paper::{
    Ledger, NotSent, OrderOutcome, PaperClient, PaperDriver, PaperError, PaperServer, Violation,
};
use schemas::{Magic, Micros, OrderRequest, RejectClass, Side, Token};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

#[tokio::test(flavor = "multi_thread")]
async fn two_sessions_of_one_account_hear_the_same_changes() {
    let broker = Broker::quick().await;
    let ticket = broker.open_by_hand(1, "0.50").await;
    let (one, two) = (broker.client("n1").await, broker.client("n2").await);
    let (session_one, mut pushes_one, first) = session(&one, 1).await;
    let (_session_two, mut pushes_two, second) = session(&two, 1).await;
    assert_eq!((first.positions.len(), first.positions[0].ticket), (1, ticket));
    assert_eq!((first.revision, &first.positions), (second.revision, &second.positions));

    let opened = done(&session_one, &open("a")).await;
    let heard = change(&mut pushes_one).await;
    assert_eq!(heard, change(&mut pushes_two).await);
    assert_eq!(heard.0, first.revision + 1);
    assert!(
        matches!(heard.1, AccountChange::PositionOpened { position } if position.ticket == opened.ticket)
    );
    let snapshot = session_one.snapshot().await.unwrap();
    assert_eq!((snapshot.revision, snapshot.positions.len()), (heard.0, 2));
    let quote = session_one.quote(&"EURUSD".parse().unwrap()).unwrap();
    assert_eq!(quote.bid, "1.1".parse().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn partial_close_over_the_socket_renumbers_only_in_mt4_style() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    for (number, renumbers) in [(1, false), (2, true)] {
        let (session, mut pushes, _) = session(&client, number).await;
        let ticket = done(&session, &open("a")).await.ticket;
        change(&mut pushes).await;
        let close = OrderRequest::Close { ticket, lots: Some(lots("0.40")) };
        let part = done(&session, &close).await;
        let (_, heard) = change(&mut pushes).await;
        let AccountChange::PositionReduced { position, closed } = heard else {
            panic!("{heard:?}")
        };
        assert_eq!((closed.ticket, closed.lots), (ticket, lots("0.40")));
        assert_eq!(position.lots, lots("0.60"));
        assert_eq!(part.remainder, renumbers.then_some(position.ticket));
        assert_eq!(position.ticket != ticket, renumbers);
        assert_eq!(session.history(Micros(0)).await.unwrap(), vec![closed]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fed_price_triggers_stops_and_pending_orders_before_feed_returns() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, mut pushes, _) = session(&client, 1).await;
    let mut order = open("a");
    if let OrderRequest::Open { take_profit, .. } = &mut order {
        *take_profit = Some("1.11".parse().unwrap());
    }
    let opened = done(&session, &order).await;
    let place = OrderRequest::Place {
        symbol: "EURUSD".parse().unwrap(),
        kind: schemas::PendingKind::BuyStop,
        lots: lots("0.10"),
        price: "1.11".parse().unwrap(),
        stop_loss: None,
        take_profit: None,
        magic: Magic::new(77).unwrap(),
        comment: "b".to_owned(),
    };
    let placed = done(&session, &place).await;
    broker.feed("1.11000", "1.11010").await;
    let book = broker.driver.book(account(1)).await.unwrap();
    assert_eq!(book.positions.len(), 1);
    assert_eq!(book.positions[0].ticket, placed.ticket);
    assert!(book.pendings.is_empty());
    let closed = &session.history(Micros(0)).await.unwrap()[0];
    assert_eq!((closed.ticket, closed.close_price), (opened.ticket, "1.11".parse().unwrap()));
    for _ in 0..2 {
        change(&mut pushes).await;
    }
    let mut kinds = Vec::new();
    for _ in 0..2 {
        kinds.push(match change(&mut pushes).await.1 {
            AccountChange::PositionClosed { reason, .. } => format!("{reason:?}"),
            AccountChange::PendingFilled { .. } => "filled".to_owned(),
            other => panic!("{other:?}"),
        });
    }
    kinds.sort();
    assert_eq!(kinds, ["TakeProfit", "filled"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_come_in_pieces_and_the_sync_mark_comes_after_all_of_them() {
    let broker = Broker::quick().await;
    let count = LIST_ITEMS_MAX * 2 + 1;
    for _ in 0..count {
        broker.open_by_hand(1, "0.01").await;
    }
    let mut raw = broker.raw().await;
    let login = r#"{"id":1,"op":"login","account":1,"node":"nc","kind":"trader"}"#;
    assert_eq!(raw.ask(login).await, json!({"id": 1, "ok": {"style": "mt5"}}));
    assert!(raw.hear().await["push"]["quote"].is_object());
    let mut listed = Vec::new();
    let synced = loop {
        let push = raw.hear().await["push"].take();
        match push["list"]["positions"].as_array() {
            Some(piece) => listed.push(piece.len()),
            None => break push,
        }
    };
    assert_eq!(listed, [LIST_ITEMS_MAX, LIST_ITEMS_MAX, 1]);
    assert_eq!(synced["synced"]["positions"], count);

    let client = broker.client("n1").await;
    let (_session, _pushes, snapshot) = session(&client, 1).await;
    assert_eq!(snapshot.positions.len(), count);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_wait_their_delay_side_by_side_and_orders_do_not() {
    const DELAY: Duration = Duration::from_secs(1);
    let broker = Broker::start(config(None, DELAY.as_millis() as u64)).await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    let started = Instant::now();
    let answers: Vec<_> =
        (0..20).map(|n| session.submit(&open(&n.to_string()), meta(1, 1)).unwrap()).collect();
    let snapshot = session.snapshot().await.unwrap();
    assert_eq!(snapshot.positions.len(), 20, "carried out on arrival");
    assert!(started.elapsed() < DELAY, "a read waited behind the answers");
    let mut tickets = Vec::new();
    for answer in answers {
        match soon("an answer", answer).await {
            OrderOutcome::Done(done) => tickets.push(done.ticket),
            other => panic!("{other:?}"),
        }
        assert!(started.elapsed() >= DELAY);
    }
    assert!(started.elapsed() < DELAY * 5, "answers waited for each other");
    assert!(tickets.is_sorted(), "orders are carried out in the order they were sent");

    let change = SettingsChange { answer_delay_ms: Some(0), ..SettingsChange::default() };
    assert_eq!(broker.driver.settings(change).await.unwrap().answer_delay_ms, 0);
    let too_long = SettingsChange { answer_delay_ms: Some(60_001), ..SettingsChange::default() };
    match broker.driver.settings(too_long).await {
        Err(PaperError::Refused(error)) => assert_eq!(error.field, "answer_delay_ms"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_lines_are_answered_by_field_and_value_and_the_connection_goes_on() {
    let broker = Broker::quick().await;
    let mut raw = broker.raw().await;
    let too_long = "x".repeat(REQUEST_LINE_BYTES_MAX + 1);
    let cases = [
        ("not json", Value::Null, "line", "not json"),
        (too_long.as_str(), Value::Null, "line", ""),
        (r#"{"id":-1,"op":"ping"}"#, Value::Null, "id", "-1"),
        (r#"{"id":2,"op":"jump"}"#, json!(2), "op", "jump"),
        (r#"{"id":3,"op":"snapshot","account":"x"}"#, json!(3), "account", "\"x\""),
        (r#"{"id":4,"op":"snapshot","account":1}"#, json!(4), "account", "1"),
        (r#"{"id":5,"op":"feed","quotes":[]}"#, json!(5), "op", ""),
        (
            r#"{"id":6,"op":"login","account":99,"node":"nc","kind":"trader"}"#,
            json!(6),
            "account",
            "99",
        ),
        (r#"{"id":7,"op":"login","node":"nc","kind":"trader"}"#, json!(7), "account", ""),
        (r#"{"id":8,"op":"login","node":"a b","kind":"driver"}"#, json!(8), "node", "\"a b\""),
    ];
    for (line, id, field, value) in cases {
        let answer = raw.ask(line).await;
        let error = &answer["error"];
        assert_eq!((&answer["id"], &error["field"]), (&id, &json!(field)), "{answer}");
        assert_eq!(error["value"], json!(value), "{answer}");
        assert!(!error["text"].as_str().unwrap().is_empty());
    }
    assert_eq!(raw.ask(r#"{"id":9,"op":"ping"}"#).await, json!({"id": 9, "ok": {}}));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auditor_reads_and_cannot_trade() {
    let broker = Broker::quick().await;
    let auditor =
        PaperDriver::connect(&broker.addr, ident("audit"), LoginKind::Auditor).await.unwrap();
    assert_eq!(auditor.books().await.unwrap().len(), 2);
    let order = Instruction::open_by_hand("EURUSD".parse().unwrap(), Side::Buy, lots("1"));
    match auditor.manual(account(1), order).await {
        Err(PaperError::Refused(error)) => assert_eq!(error.field, "op"),
        other => panic!("{other:?}"),
    }
    let mut raw = broker.raw().await;
    raw.ask(r#"{"id":1,"op":"login","account":1,"node":"nc","kind":"auditor"}"#).await;
    raw.say(r#"{"id":2,"op":"order","account":1,"meta":{"node":"nc","token":1,"deadline_margin_us":1,"sent_at_us":1},"request":{"op":"cancel","ticket":1}}"#).await;
    let answer = loop {
        let line = raw.hear().await;
        if line["id"] == 2 {
            break line;
        }
    };
    assert_eq!(answer["error"]["field"], "account");
    assert_eq!(broker.driver.ledger().await.unwrap().orders().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ledger_file_holds_what_memory_holds_and_the_checks_find_what_was_planted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let broker = Broker::start(config(Some(path.clone()), 0)).await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 2).await;
    let opened = done(&session, &open("tag")).await;
    let close = OrderRequest::Close { ticket: opened.ticket, lots: Some(lots("0.50")) };
    done(&session, &close).await;
    broker.open_by_hand(2, "0.10").await;
    broker.open_by_hand(2, "0.10").await;
    assert_eq!(broker.driver.ledger().await.unwrap().violations(), vec![]);

    session.order(&open("late"), meta(4, -3)).await;
    session.order(&open("tag"), meta(3, 500)).await;
    let ledger = broker.driver.ledger().await.unwrap();
    let found = ledger.violations();
    assert!(matches!(&found[0], Violation::SentAfterDeadline { deadline_margin_us: -3, .. }));
    let Violation::TokenDecreased { token, highest, .. } = &found[1] else { panic!("{found:?}") };
    assert_eq!((token.get(), highest.get()), (3, 4));
    let Violation::DuplicateOpen { tickets, comment, .. } = &found[2] else { panic!("{found:?}") };
    assert_eq!((tickets.len(), tickets[0], comment.as_str()), (2, opened.ticket, "tag"));
    assert_eq!(found.len(), 3);
    assert_eq!(ledger.deadline_margin_min_us(), Some(-3));

    // The broker still runs: what it has answered is already in the file.
    assert_eq!(Ledger::read_file(&path).unwrap(), ledger);
    let (row, request, stated) = ledger.orders().next().unwrap();
    assert_eq!((stated.node.as_str(), stated.client_ref, request.account), ("n1", 9, account(2)));
    assert!(row.at_mono_us > 0 && row.at_us > Micros(0));
    assert!(
        ledger
            .rows()
            .iter()
            .any(|row| matches!(&row.fact, Fact::Login(l) if l.account == Some(account(2))))
    );

    broker.stop().await.unwrap();
    match PaperServer::bind(config(Some(path.clone()), 0)).await {
        Err(PaperError::Ledger { text, .. }) => assert!(text.contains("another run"), "{text}"),
        other => panic!("{other:?}"),
    }
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &text[..text.len() - 5]).unwrap();
    let cut = Ledger::read_file(&path).unwrap();
    assert_eq!(cut.rows(), &ledger.rows()[..ledger.rows().len() - 1], "a torn row is left out");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_token_is_refused_only_when_the_broker_is_told_to_check() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    let newer = session.order(&open("a"), meta(5, 1)).await;
    assert!(matches!(newer, OrderOutcome::Done(_)));
    let unchecked = session.order(&open("b"), meta(4, 1)).await;
    assert!(matches!(unchecked, OrderOutcome::Done(_)));
    let change = SettingsChange { check_tokens: Some(true), ..SettingsChange::default() };
    assert!(broker.driver.settings(change).await.unwrap().check_tokens);
    match session.order(&open("c"), meta(4, 1)).await {
        OrderOutcome::Rejected(rejection) => assert_eq!(rejection.class, RejectClass::StaleToken),
        other => panic!("{other:?}"),
    }
    assert_eq!(session.snapshot().await.unwrap().positions.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_accounts_fit_on_one_connection() {
    const COUNT: u64 = 10_000;
    let broker = Broker::quick().await;
    let numbers = 1_001..=1_000 + COUNT;
    let decls: Vec<_> = numbers.clone().map(|n| AccountDecl::new(account(n), Style::Mt5)).collect();
    for piece in decls.chunks(5_000) {
        broker.driver.declare_accounts(piece.to_vec()).await.unwrap();
    }
    let client = broker.client("n1").await;
    let mut sessions = Vec::new();
    for number in numbers {
        sessions.push(session(&client, number).await);
    }
    broker.feed("1.2", "1.3").await;
    let (session, pushes, _) = sessions.last_mut().unwrap();
    let ticket = done(session, &open("a")).await.ticket;
    assert_eq!(change(pushes).await.0, 1);
    assert_eq!(session.snapshot().await.unwrap().positions[0].ticket, ticket);
    assert_eq!(broker.driver.accounts().await.unwrap().len(), COUNT as usize + 2);
    let books = broker.driver.books().await.unwrap();
    assert!(books.len() > PAGE_ACCOUNTS_MAX && books.is_sorted_by_key(|b| b.account));
    assert_eq!(books.iter().map(|b| b.positions.len()).sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_longer_than_a_page_is_read_to_its_end() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    let count = PAGE_ROWS_MAX * 2 + 1;
    let mut tickets = Vec::new();
    for _ in 0..count {
        let ticket = broker.open_by_hand(1, "0.01").await;
        let close = Instruction::Close { ticket, lots: None };
        broker.driver.manual(account(1), close).await.unwrap();
        tickets.push(ticket);
    }
    let history = session.history(Micros(0)).await.unwrap();
    assert_eq!(history.iter().map(|t| t.ticket).collect::<Vec<_>>(), tickets);
    let since = history[count - 2].closed_at;
    let recent = session.history(since).await.unwrap();
    assert!(recent.len() >= 2 && recent.iter().all(|t| t.closed_at >= since));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_abort_nothing_is_sent_and_what_was_sent_is_unknown() {
    let broker = Broker::start(config(None, 5_000)).await;
    let client = broker.client("n1").await;
    let (session, mut pushes, _) = session(&client, 1).await;
    let in_flight = session.submit(&open("a"), meta(1, 1)).unwrap();
    change(&mut pushes).await;
    client.abort();
    match session.submit(&open("b"), meta(1, 1)) {
        Err(NotSent::Lost(reason)) => assert_eq!(reason, "aborted by this node"),
        other => panic!("{other:?}"),
    }
    let outcome = soon("the end of the order", in_flight).await;
    assert_eq!(outcome, OrderOutcome::Unknown("aborted by this node".to_owned()));
    assert_eq!(soon("the end of the pushes", pushes.recv()).await, None);
    assert_eq!(soon("the reason", client.lost()).await, "aborted by this node");
    assert_eq!(broker.driver.book(account(1)).await.unwrap().positions.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_goes_away_leaves_orders_unknown_and_sessions_over() {
    let broker = Broker::start(config(None, 5_000)).await;
    let client = broker.client("n1").await;
    let (session, mut pushes, _) = session(&client, 1).await;
    let in_flight = session.submit(&open("a"), meta(1, 1)).unwrap();
    change(&mut pushes).await;
    broker.stop().await.unwrap();
    let outcome = soon("the end of the order", in_flight).await;
    assert!(matches!(outcome, OrderOutcome::Unknown(_)), "{outcome:?}");
    assert_eq!(soon("the end of the pushes", pushes.recv()).await, None);
    assert!(!session.is_synced());
    assert!(matches!(session.snapshot().await, Err(PaperError::Lost { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_refused_until_the_broker_says_that_they_are_complete() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let client = PaperClient::connect(&addr, ident("n1")).await.unwrap();
    let mut raw = Raw { stream: BufReader::new(listener.accept().await.unwrap().0) };
    let token = Token::new(1).unwrap();
    let opening = tokio::spawn(async move {
        let (session, pushes) = client.open_account(account(1), token).await.unwrap();
        (client, session, pushes)
    });
    let id = raw.hear().await["id"].take();
    raw.say(&json!({"id": id, "ok": {}}).to_string()).await;
    let (client, session, mut pushes) = soon("the login", opening).await.unwrap();
    assert!(matches!(session.snapshot().await, Err(PaperError::NotSynced { .. })));
    assert!(matches!(session.history(Micros(0)).await, Err(PaperError::NotSynced { .. })));
    let again = client.open_account(account(1), token).await;
    assert!(matches!(again, Err(PaperError::AlreadyOpen { .. })));

    // One trade counted, none listed: the lists are not complete, whatever the mark says.
    let funds = json!({"balance": "1", "equity": "1", "currency": "USD", "at_us": 1});
    let synced = |positions: u64| {
        json!({"push": {"synced": {"account": 1, "revision": 3, "positions": positions,
            "pendings": 0, "funds": funds}}})
        .to_string()
    };
    raw.say(&synced(1)).await;
    assert_eq!(soon("the end of the session", pushes.recv()).await, None);
    assert!(session.lost_reason().unwrap().contains("listed"));
    assert!(!session.is_synced());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_does_not_take_its_pushes_ends_and_can_be_opened_again() {
    let broker = Broker::quick().await;
    let client = broker.client("n1").await;
    let (lazy, mut pushes, _) = session(&client, 1).await;
    let (other, _other_pushes, _) = session(&client, 2).await;
    for _ in 0..=SESSION_PUSHES_MAX {
        broker.driver.deposit(account(1), "1".parse().unwrap()).await.unwrap();
    }
    // A read on the same connection comes after all of these pushes.
    other.snapshot().await.unwrap();
    assert!(lazy.lost_reason().unwrap().contains("not taken in time"));
    assert!(matches!(lazy.submit(&open("a"), meta(1, 1)), Err(NotSent::Lost(_))));
    let mut taken = 0;
    while soon("the end of the pushes", pushes.recv()).await.is_some() {
        taken += 1;
    }
    assert_eq!(taken, SESSION_PUSHES_MAX, "what was queued is not lost");
    let (again, _pushes, snapshot) = session(&client, 1).await;
    assert_eq!(snapshot.revision, SESSION_PUSHES_MAX as u64 + 1);
    drop(lazy);
    done(&again, &open("b")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_does_not_read_is_cut_off_and_the_others_go_on() {
    let broker = Broker::quick().await;
    let mut deaf = broker.raw().await;
    deaf.ask(r#"{"id":1,"op":"login","account":1,"node":"nc","kind":"trader"}"#).await;
    let client = broker.client("n1").await;
    let (session, _pushes, _) = session(&client, 1).await;
    let quote = |bid: &str| FeedQuote {
        symbol: "EURUSD".parse().unwrap(),
        bid: bid.parse().unwrap(),
        ask: "2".parse().unwrap(),
    };
    let quotes: Vec<_> = ["1.1", "1.2"].iter().cycle().take(5_000).map(|b| quote(b)).collect();
    let cut_off = async {
        while deaf.stream.get_mut().write_all(b"\n").await.is_ok() {
            broker.driver.feed(quotes.clone()).await.unwrap();
            session.snapshot().await.unwrap();
        }
    };
    soon("the end of the deaf connection", cut_off).await;
    done(&session, &open("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delayed_answers_still_come_after_the_client_has_closed_its_sending_side() {
    let broker = Broker::start(config(None, 200)).await;
    let mut raw = broker.raw().await;
    raw.say(r#"{"id":1,"op":"login","account":1,"node":"nc","kind":"trader"}"#).await;
    raw.say(r#"{"id":2,"op":"order","account":1,"meta":{"node":"nc","token":1,"deadline_margin_us":1,"sent_at_us":1},"request":{"op":"open","symbol":"EURUSD","side":"buy","lots":"0.1","magic":7,"comment":"x"}}"#).await;
    raw.stream.get_mut().shutdown().await.unwrap();
    let answer = loop {
        let line = raw.hear().await;
        if line["id"] == 2 {
            break line;
        }
    };
    assert_eq!(answer["ok"]["done"]["price"], "1.1001");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_socket_refuses_orders_and_an_abort_throws_away_what_the_kernel_holds() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let client = PaperClient::connect(&addr, ident("n1")).await.unwrap();
    let mut raw = Raw { stream: BufReader::new(listener.accept().await.unwrap().0) };
    let opening = tokio::spawn(async move {
        let opened = client.open_account(account(1), Token::new(1).unwrap()).await.unwrap();
        (client, opened)
    });
    let id = raw.hear().await["id"].take();
    raw.say(&json!({"id": id, "ok": {}}).to_string()).await;
    let (client, (session, _pushes)) = soon("the login", opening).await.unwrap();

    // The other end does not read: the kernel's buffers fill, then orders are refused.
    let order = open(&"x".repeat(200));
    let mut in_flight = Vec::new();
    let refusal = loop {
        match session.submit(&order, meta(1, 1)) {
            Ok(answer) => in_flight.push(answer),
            Err(refusal) => break refusal,
        }
    };
    assert_eq!(refusal, NotSent::Busy);
    client.abort();
    let mut arrived = 0;
    let end = loop {
        let mut line = String::new();
        match soon("the reset", raw.stream.read_line(&mut line)).await {
            Ok(0) => panic!("closed in order, so the kernel delivered everything"),
            Ok(_) => arrived += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(arrived < in_flight.len(), "{arrived} of {}", in_flight.len());
    for answer in in_flight {
        let outcome = soon("the end of the order", answer).await;
        assert!(matches!(outcome, OrderOutcome::Unknown(_)), "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_line_of_the_readme_is_understood() {
    let server = PaperServer::bind(config(None, 0)).await.unwrap();
    let stream = TcpStream::connect(server.local_addr()).await.unwrap();
    tokio::spawn(server.serve(std::future::pending()));
    let mut raw = Raw { stream: BufReader::new(stream) };
    let lines = include_str!("../README.md").lines().filter_map(|line| line.strip_prefix("> "));
    let mut answers = Vec::new();
    for line in lines {
        raw.say(line).await;
        answers.push(loop {
            let heard = raw.hear().await;
            if heard["push"].is_null() {
                assert!(heard["error"].is_null(), "{line}: {heard}");
                break heard["ok"].clone();
            }
        });
    }
    assert_eq!(answers.len(), 17);
    assert_eq!(answers[12][0]["hits"], 0);
    assert_eq!(answers[15]["sessions"], 1);
    assert_eq!(answers[7]["done"]["remainder"], 1_000_003);
    assert_eq!(answers[8]["positions"].as_array().unwrap().len(), 2);
    assert_eq!(answers[9]["trades"][0]["comment"], "to #1000003");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_with_a_password_lets_in_who_knows_it_and_tells_it_to_nobody() {
    let broker = Broker::quick().await;
    let driver = &broker.driver;
    let password = || Some(Password::new("open-sesame-1"));
    let declared =
        AccountDecl { password: password(), ..AccountDecl::new(account(77), Style::Mt5) };
    driver.declare_accounts(vec![declared]).await.unwrap();
    let client = broker.client("n1").await;
    let token = Token::new(1).unwrap();
    for wrong in [None, Some(Password::new("open-sesame-2"))] {
        let refused = client.open_account_with(account(77), token, wrong).await;
        let Err(PaperError::Refused(error)) = refused else { panic!("{refused:?}") };
        assert_eq!((error.field.as_str(), error.value.as_str()), ("password", "***"));
    }
    let opened = client.open_account_with(account(77), token, password()).await;
    assert!(opened.is_ok(), "{opened:?}");
    // An account without one takes any.
    assert!(client.open_account_with(account(1), token, password()).await.is_ok());
    let told = serde_json::to_string(&driver.accounts().await.unwrap()).unwrap();
    let ledger = serde_json::to_string(driver.ledger().await.unwrap().rows()).unwrap();
    assert!(!format!("{told} {ledger} {:?}", password()).contains("sesame"));
}
