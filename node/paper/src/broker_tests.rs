//! The broker without a network: each fault, sessions, and the order of things.

use crate::broker::{Broker, KICKED, Output, Sent, TraderLogin};
use crate::clock::Now;
use crate::engine_tests::{account, lots, open, price, spec};
use crate::faults::{FaultKind, FaultSpec, Settings, Span, Withheld};
use crate::ledger::{Fact, Ledger, RequestFact, TradeEventKind, Violation};
use crate::protocol::{AccountDecl, FeedQuote, Instruction, OrderMeta, OrderReply, Push, Style};
use proptest::prelude::*;
use schemas::{BrokerPosition, Micros, RejectClass, Side, SymbolSpec, Token};
use std::time::Duration;

const ANSWER: Duration = Duration::from_millis(130);
const SECOND_US: u64 = 1_000_000;

struct Floor {
    broker: Broker,
    ledger: Ledger,
    out: Vec<Output>,
    at_us: u64,
    requests: u64,
    draws: Vec<u64>,
}

fn now(at_us: u64) -> Now {
    Now { mono_us: at_us, wall: Micros(1_700_000_000_000_000 + at_us as i64) }
}

fn ms(ms: u64) -> Span {
    Span::of(Duration::from_millis(ms))
}

fn buy(comment: &str) -> Instruction {
    let mut order = open(Side::Buy, "1.00", None, None);
    if let Instruction::Open { comment: sent, .. } = &mut order {
        *sent = comment.to_owned();
    }
    order
}

impl Floor {
    fn new() -> Floor {
        let mut broker = Broker::new(Settings::default());
        let decls = [(1, Style::Mt5), (2, Style::Mt4)];
        let decls = decls.map(|(number, style)| AccountDecl::new(account(number), style));
        broker.engine_mut().declare_accounts(decls.to_vec()).unwrap();
        broker.engine_mut().declare_symbols(vec![spec()]).unwrap();
        let quote = FeedQuote { symbol: spec().symbol, bid: price("1.1"), ask: price("1.1001") };
        broker.feed(now(1), &[quote], &mut Vec::new()).unwrap();
        let (ledger, out, draws) = (Ledger::default(), Vec::new(), Vec::new());
        Floor { broker, ledger, out, at_us: 10, requests: 0, draws }
    }

    fn with(kind: FaultKind) -> Floor {
        let mut floor = Floor::new();
        floor.fault(FaultSpec::new(kind));
        floor.login(1, 1, 1);
        floor
    }

    fn fault(&mut self, spec: FaultSpec) -> u64 {
        self.broker.set_fault(now(self.at_us), spec).unwrap().id
    }

    /// Keeps what was put out last, and the rows.
    fn took(&mut self, out: Vec<Output>) {
        for output in &out {
            if let Output::Write(fact) = output {
                self.ledger.append(now(self.at_us), fact.clone());
            }
        }
        self.out = out;
    }

    fn login(&mut self, connection: u64, number: u64, token: u64) -> Vec<Push> {
        let who = TraderLogin {
            connection,
            account: account(number),
            node: "n".parse().unwrap(),
            token: Some(Token::new(token).unwrap()),
        };
        let (at, mut out) = (now(self.at_us), Vec::new());
        let Self { broker, draws, .. } = self;
        let pushes = broker.login(at, who, &mut |n| draws.pop().unwrap_or(0).min(n - 1), &mut out);
        self.took(out);
        pushes.unwrap()
    }

    fn send(&mut self, connection: u64, number: u64, token: u64, instruction: Instruction) -> u64 {
        self.requests += 1;
        let meta = OrderMeta {
            node: "n".parse().unwrap(),
            token: Token::new(token).unwrap(),
            deadline_margin_us: 5,
            sent_at_us: Micros(1),
            client_ref: self.requests,
        };
        let (request, account) = (self.requests, account(number));
        let sent = Sent { connection, request, account, meta, instruction };
        let (at, mut out) = (now(self.at_us), Vec::new());
        let Self { broker, draws, .. } = self;
        broker.order(at, sent, &mut |n| draws.pop().unwrap_or(0).min(n - 1), &mut out).unwrap();
        self.took(out);
        request
    }

    fn ask(&mut self, instruction: Instruction) -> u64 {
        self.send(1, 1, 1, instruction)
    }

    fn pass(&mut self, us: u64) {
        self.at_us += us;
        let mut out = Vec::new();
        self.broker.run(now(self.at_us), &mut out);
        self.took(out);
    }

    fn answers(&self) -> Vec<(u64, OrderReply, Duration)> {
        let answer = |output: &Output| match output {
            Output::Answer { request, reply, after, .. } => Some((*request, reply.clone(), *after)),
            _ => None,
        };
        self.out.iter().filter_map(answer).collect()
    }

    fn refusal(&self) -> RejectClass {
        match self.answers().as_slice() {
            [(_, OrderReply::Rejected(rejection), _)] => rejection.class,
            other => panic!("{other:?}"),
        }
    }

    fn positions(&self) -> Vec<BrokerPosition> {
        self.broker.engine().book(now(self.at_us), account(1)).unwrap().positions
    }

    fn rows(&self) -> Vec<RequestFact> {
        self.ledger.arrivals().into_iter().map(|(_, request)| request.clone()).collect()
    }
}

#[test]
fn an_order_without_faults_is_carried_out_at_once_and_answered_after_the_delay() {
    let mut floor = Floor::new();
    floor.login(1, 1, 1);
    let request = floor.ask(buy("a"));
    let answers = floor.answers();
    assert!(matches!(answers[..], [(r, OrderReply::Done(_), ANSWER)] if r == request));
    assert_eq!(floor.positions().len(), 1);
    assert_eq!(floor.broker.next_due(), None);
    let row = &floor.rows()[0];
    assert_eq!((row.request, row.connection, row.arrival), (request, 1, 1));
    assert_eq!((row.sent_mono_us, row.arrived_mono_us), (10, 10));
    assert_eq!(row.answer_after_us, Some(130_000));
    let writes = floor.out.iter().take_while(|o| matches!(o, Output::Write(_))).count();
    assert_eq!(writes, 2, "request and trade are written before anything is told");
    assert!(matches!(floor.out.last(), Some(Output::Answer { .. })));
}

#[test]
fn an_order_is_refused_with_the_class_of_its_fault_and_changes_nothing() {
    let reject = |class| FaultKind::Reject { class };
    let cases = [
        (FaultKind::Requote {}, RejectClass::Requote),
        (FaultKind::MarketClosed {}, RejectClass::Later),
        (reject(RejectClass::NoMoney), RejectClass::NoMoney),
        (reject(RejectClass::Disabled), RejectClass::Disabled),
        (reject(RejectClass::AlreadySo), RejectClass::AlreadySo),
        (reject(RejectClass::StaleToken), RejectClass::StaleToken),
    ];
    for (kind, class) in cases {
        let word = kind.as_str();
        let mut floor = Floor::with(kind);
        floor.ask(buy("a"));
        assert_eq!(floor.refusal(), class);
        assert!(floor.positions().is_empty());
        assert_eq!(floor.rows()[0].faults, [word]);
        assert_eq!(floor.ledger.faults(), [(word, 1)].into());
    }
}

#[test]
fn a_partial_fill_is_rounded_down_to_the_step_and_never_nothing() {
    let cases =
        [("1.00", 37, "0.37"), ("0.10", 55, "0.05"), ("0.05", 99, "0.04"), ("0.01", 50, "0.01")];
    for (asked, percent, filled) in cases {
        let mut floor = Floor::with(FaultKind::PartialFill { percent });
        floor.ask(open(Side::Buy, asked, None, None));
        let [(_, OrderReply::Done(done), _)] = &floor.answers()[..] else { panic!() };
        assert_eq!(done.lots, Some(lots(filled)), "{asked} at {percent} %");
        assert_eq!(floor.positions()[0].lots, lots(filled));
    }
    let mut floor = Floor::with(FaultKind::PartialFill { percent: 40 });
    let large = SymbolSpec { symbol: "XAUUSD".parse().unwrap(), lots_min: lots("0.10"), ..spec() };
    floor.broker.engine_mut().declare_symbols(vec![large.clone()]).unwrap();
    let quote = FeedQuote { symbol: large.symbol.clone(), bid: price("2"), ask: price("2") };
    floor.broker.feed(now(11), &[quote], &mut Vec::new()).unwrap();
    floor.ask(Instruction::open_by_hand(large.symbol, Side::Buy, lots("0.15")));
    assert_eq!(floor.positions()[0].lots, lots("0.10"), "at least the smallest volume");

    let mut floor = Floor::new();
    floor.login(1, 1, 1);
    floor.ask(open(Side::Buy, "0.10", None, None));
    floor.fault(FaultSpec::new(FaultKind::PartialFill { percent: 30 }));
    let ticket = floor.positions()[0].ticket;
    floor.ask(Instruction::Close { ticket, lots: None });
    assert_eq!(floor.positions()[0].lots, lots("0.07"), "a close is filled in part as well");
    floor.ask(Instruction::Modify { ticket, stop_loss: Some(price("1.09")), take_profit: None });
    assert_eq!(floor.rows()[2].faults, [""; 0], "nothing is filled by a change of stops");
}

#[test]
fn a_lost_answer_is_carried_out_and_a_lost_request_is_not() {
    let mut floor = Floor::with(FaultKind::LostAnswer {});
    floor.ask(buy("a"));
    assert!(floor.answers().is_empty());
    assert_eq!(floor.positions().len(), 1);
    assert_eq!(floor.rows()[0].answer_after_us, None);

    let mut floor = Floor::with(FaultKind::LostRequest {});
    let request = floor.ask(buy("a"));
    assert!(floor.answers().is_empty() && floor.positions().is_empty() && floor.rows().is_empty());
    match &floor.out[..] {
        [Output::Write(Fact::Lost(lost))] => assert_eq!(lost.request, request),
        other => panic!("{other:?}"),
    }
    assert_eq!(floor.ledger.faults(), [("lost_request", 1)].into());
}

#[test]
fn a_delivery_delay_holds_up_everything_that_is_sent_after_it_and_nobody_else() {
    let mut floor = Floor::new();
    let span = ms(2_000);
    let delay = FaultKind::DeliveryDelay { span, dies_with_connection: false };
    floor.fault(FaultSpec::new(delay).account(account(1)).count(1));
    floor.login(1, 1, 1);
    floor.login(1, 2, 1);
    floor.ask(buy("first"));
    floor.pass(SECOND_US / 2);
    floor.ask(buy("second"));
    assert!(floor.positions().is_empty() && floor.answers().is_empty());
    floor.send(1, 2, 1, buy("other"));
    assert_eq!(floor.answers().len(), 1, "another account has another line");
    assert_eq!(floor.broker.next_due(), Some(10 + 2 * SECOND_US));
    floor.pass(SECOND_US * 3 / 2);
    assert_eq!(floor.answers().len(), 2);
    let comments: Vec<_> = floor.positions().into_iter().map(|p| p.comment).collect();
    assert_eq!(comments, ["first", "second"]);
    let rows = floor.rows();
    assert_eq!((rows[1].sent_mono_us, rows[1].arrived_mono_us), (10, 2 * SECOND_US + 10));
    assert_eq!(rows[2].sent_mono_us, 10 + SECOND_US / 2);
}

#[test]
fn an_accepted_order_that_waits_is_overtaken_by_a_later_one() {
    let mut floor = Floor::new();
    floor.fault(FaultSpec::new(FaultKind::AcceptanceDelay { span: ms(5_000) }).count(1));
    floor.login(1, 1, 1);
    let slow = floor.ask(buy("slow"));
    let quick = floor.ask(buy("quick"));
    assert_eq!(floor.positions()[0].comment, "quick");
    floor.pass(5 * SECOND_US);
    assert_eq!(floor.answers()[0].0, slow);
    let arrivals: Vec<_> = floor.rows().iter().map(|row| row.request).collect();
    assert_eq!(arrivals, [slow, quick], "they arrived in the order they were sent");
    assert_eq!(floor.rows()[0].arrived_mono_us, 10);
}

#[test]
fn an_order_that_arrives_after_a_newer_token_breaks_s1_and_one_that_is_only_slow_does_not() {
    let delay = FaultKind::DeliveryDelay { span: ms(9_000), dies_with_connection: false };
    for (kind, breaks) in [(delay, true), (FaultKind::AcceptanceDelay { span: ms(9_000) }, false)] {
        let mut floor = Floor::new();
        floor.fault(FaultSpec::new(kind).count(1));
        floor.login(1, 1, 1);
        floor.send(1, 1, 1, buy("a"));
        floor.pass(SECOND_US);
        floor.login(2, 1, 2);
        floor.send(2, 1, 2, buy("a"));
        floor.pass(9 * SECOND_US);
        assert_eq!(floor.positions().len(), 2, "no token is checked here");
        let found = floor.ledger.violations();
        let is_s1 = |v: &Violation| matches!(v, Violation::TokenDecreased { .. });
        assert_eq!(found.iter().any(is_s1), breaks);
        assert!(found.iter().any(|v| matches!(v, Violation::DuplicateOpen { .. })));
        assert_eq!(floor.ledger.overtaken().len(), 1, "both were overtaken by a takeover");
    }
}

#[test]
fn a_broker_that_checks_tokens_does_it_when_it_carries_out() {
    let mut floor = Floor::new();
    floor.broker.set_settings(Settings { check_tokens: true, ..Settings::default() });
    floor.fault(FaultSpec::new(FaultKind::AcceptanceDelay { span: ms(9_000) }).count(1));
    floor.login(1, 1, 1);
    floor.send(1, 1, 1, buy("a"));
    floor.login(2, 1, 2);
    floor.pass(9 * SECOND_US);
    assert_eq!(floor.refusal(), RejectClass::StaleToken);
    assert!(floor.ledger.overtaken().is_empty(), "nothing was carried out");

    floor.fault(FaultSpec::new(FaultKind::AcceptanceDelay { span: ms(9_000) }).count(1));
    floor.send(1, 1, 3, buy("newer"));
    floor.send(2, 1, 2, buy("b"));
    assert_eq!(floor.refusal(), RejectClass::StaleToken, "a token is seen on arrival");
}

#[test]
fn an_order_on_its_way_outlives_its_connection_unless_its_fault_says_otherwise() {
    for dies in [false, true] {
        let mut floor =
            Floor::with(FaultKind::DeliveryDelay { span: ms(1_000), dies_with_connection: dies });
        floor.ask(buy("a"));
        let mut out = Vec::new();
        floor.broker.disconnect(1, &mut out);
        floor.took(out);
        assert_eq!(matches!(floor.out[..], [Output::Write(Fact::Lost(_))]), dies);
        floor.pass(SECOND_US);
        assert_eq!(floor.positions().is_empty(), dies);
    }
}

#[test]
fn an_answer_delay_replaces_the_usual_one_and_the_longer_of_two_holds() {
    let mut floor = Floor::with(FaultKind::AnswerDelay { span: ms(20) });
    floor.ask(buy("a"));
    assert_eq!(floor.answers()[0].2, Duration::from_millis(20));
    floor.fault(FaultSpec::new(FaultKind::AnswerDelay { span: ms(12_000) }));
    floor.fault(FaultSpec::new(FaultKind::AnswerDelay { span: ms(5) }));
    floor.ask(buy("b"));
    assert_eq!(floor.answers()[0].2, Duration::from_secs(12));
    assert_eq!(floor.positions().len(), 2, "carried out at once all the same");
}

#[test]
fn a_comment_is_cut_blanked_or_prefixed_and_the_ledger_keeps_what_was_sent() {
    let prefix = FaultKind::CommentPrefix { text: "web:".to_owned() };
    let cases = [
        (FaultKind::CommentCut { chars: 3 }, "L1-"),
        (FaultKind::CommentBlank {}, ""),
        (prefix, "web:L1-T1001-aa"),
    ];
    for (kind, shown) in cases {
        let mut floor = Floor::with(kind);
        floor.ask(buy("L1-T1001-aa"));
        assert_eq!(floor.positions()[0].comment, shown);
        let trade = floor.ledger.trades().next().unwrap().1.clone();
        assert_eq!((trade.event, trade.comment.as_str()), (TradeEventKind::Opened, "L1-T1001-aa"));
    }
}

#[test]
fn a_fault_hits_its_account_its_orders_its_share_its_count_and_its_time() {
    let mut floor = Floor::new();
    floor.login(1, 1, 1);
    floor.login(1, 2, 1);
    floor.fault(FaultSpec::new(FaultKind::Requote {}).account(account(2)));
    floor.ask(buy("other account"));
    assert_eq!(floor.positions().len(), 1);
    let ticket = floor.positions()[0].ticket;

    floor.fault(FaultSpec::new(FaultKind::Requote {}).orders(&["close"]).count(2));
    floor.ask(buy("another kind"));
    assert_eq!(floor.positions().len(), 2);
    for _ in 0..2 {
        floor.ask(Instruction::Close { ticket, lots: None });
        assert_eq!(floor.refusal(), RejectClass::Requote);
    }
    floor.ask(Instruction::Close { ticket, lots: None });
    assert_eq!(floor.positions().len(), 1, "the third is not hit");

    floor.fault(FaultSpec::new(FaultKind::Requote {}).account(account(1)).share_permille(300));
    floor.draws = vec![299, 300];
    floor.ask(buy("not drawn"));
    assert_eq!(floor.positions().len(), 2);
    floor.ask(buy("drawn"));
    assert_eq!(floor.refusal(), RejectClass::Requote);
    floor.broker.clear_faults(None, Some(account(1))).unwrap();

    let spec = FaultSpec { for_ms: Some(1_000), ..FaultSpec::new(FaultKind::Requote {}) };
    floor.fault(spec.account(account(1)));
    floor.ask(buy("in time"));
    assert_eq!(floor.refusal(), RejectClass::Requote);
    floor.pass(SECOND_US);
    floor.ask(buy("after it"));
    assert_eq!(floor.positions().len(), 3);
    let left = floor.broker.faults(now(floor.at_us));
    assert_eq!(left.len(), 1, "what is over is not listed: {left:?}");
}

#[test]
fn a_span_is_drawn_between_its_ends() {
    let span = Span { min_ms: 100, max_ms: 200 };
    for (drawn, expected) in [(0, 100), (37, 137), (u64::MAX, 200)] {
        let mut floor = Floor::with(FaultKind::AnswerDelay { span });
        floor.draws = vec![drawn];
        floor.ask(buy("a"));
        assert_eq!(floor.answers()[0].2, Duration::from_millis(expected));
    }
}

#[test]
fn a_wrong_fault_is_refused_by_field_and_value() {
    let unsynced =
        FaultKind::Unsynced { lists: Withheld::Half, span: ms(1), claims_complete: true };
    let backwards = FaultKind::AnswerDelay { span: Span { min_ms: 5, max_ms: 4 } };
    let cases = [
        (FaultSpec::new(FaultKind::Requote {}).share_permille(0), "fault.share_permille", "0"),
        (FaultSpec::new(FaultKind::Requote {}).count(0), "fault.count", "0"),
        (FaultSpec::new(FaultKind::Requote {}).orders(&["jump"]), "fault.orders", "jump"),
        (FaultSpec::new(FaultKind::PartialFill { percent: 100 }), "fault.kind.percent", "100"),
        (FaultSpec::new(unsynced), "fault.kind.claims_complete", "true"),
        (FaultSpec::new(backwards), "fault.kind.span.min_ms", "5"),
        (
            FaultSpec::new(FaultKind::AnswerDelay { span: ms(60_001) }),
            "fault.kind.span.max_ms",
            "60001",
        ),
        (
            FaultSpec::new(FaultKind::SecondSessionKicks {}).orders(&["open"]),
            "fault.orders",
            "open",
        ),
        (FaultSpec::new(FaultKind::Requote {}).account(account(9)), "account", "9"),
    ];
    for (spec, field, value) in cases {
        let error = Floor::new().broker.set_fault(now(1), spec).unwrap_err();
        assert_eq!((error.field.as_str(), error.value.as_str()), (field, value));
    }
    let error = Floor::new().broker.clear_faults(Some(7), None).unwrap_err();
    assert_eq!((error.field.as_str(), error.value.as_str()), ("fault", "7"));
}

fn listed(pushes: &[Push]) -> (usize, bool) {
    let mut count = 0;
    for push in pushes {
        match push {
            Push::List { positions, anew, .. } if *anew => count = positions.len(),
            Push::List { positions, .. } => count += positions.len(),
            Push::Synced { positions, .. } => {
                assert_eq!(*positions, count, "the mark counts what was listed");
                return (count, true);
            }
            other => panic!("{other:?}"),
        }
    }
    (count, false)
}

#[test]
fn lists_that_are_not_synced_carry_no_mark_until_they_are_whole() {
    for (lists, shown) in [(Withheld::All, 0), (Withheld::Half, 2)] {
        let mut floor = Floor::new();
        floor.login(1, 1, 1);
        for _ in 0..4 {
            floor.ask(buy("a"));
        }
        floor.fault(FaultSpec::new(FaultKind::Unsynced {
            lists,
            span: ms(8_000),
            claims_complete: false,
        }));
        assert_eq!(listed(&floor.login(2, 1, 1)), (shown, false));
        let book = floor.broker.book(now(floor.at_us), 2, account(1)).unwrap();
        assert_eq!((book.positions.len(), book.complete), (shown, false));
        let other = floor.broker.book(now(floor.at_us), 1, account(1)).unwrap();
        assert_eq!((other.positions.len(), other.complete), (4, true), "an older session");
        floor.broker.history(2, account(1), Micros(0), 0).unwrap_err();
        floor.pass(8 * SECOND_US - 1);
        assert!(floor.out.is_empty());
        floor.pass(1);
        let mut pushes: Vec<Push> = Vec::new();
        for output in floor.out.clone() {
            match output {
                Output::Push { connection: 2, push } => pushes.push(push),
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(pushes[0], Push::List { anew: true, .. }));
        assert_eq!(listed(&pushes), (4, true));
        let book = floor.broker.book(now(floor.at_us), 2, account(1)).unwrap();
        assert_eq!((book.positions.len(), book.complete), (4, true));
        floor.broker.history(2, account(1), Micros(0), 0).unwrap();
    }
}

#[test]
fn a_false_claim_of_a_flat_account_is_contradicted_by_its_margin() {
    let mut floor = Floor::new();
    floor.login(1, 1, 1);
    floor.ask(buy("a"));
    let kind = FaultKind::Unsynced { lists: Withheld::All, span: ms(8_000), claims_complete: true };
    floor.fault(FaultSpec::new(kind).count(1));
    let pushes = floor.login(2, 1, 1);
    assert_eq!(listed(&pushes), (0, true));
    let [Push::Synced { funds, .. }] = &pushes[..] else { panic!("{pushes:?}") };
    assert!(funds.margin_used.unwrap() > "0".parse().unwrap());
    floor.pass(8 * SECOND_US);
    let book = floor.broker.book(now(floor.at_us), 2, account(1)).unwrap();
    assert_eq!(book.positions.len(), 1);
}

#[test]
fn a_second_session_ends_the_first_and_what_is_on_its_way_from_it() {
    let mut floor = Floor::new();
    floor.fault(FaultSpec::new(FaultKind::SecondSessionKicks {}).account(account(1)));
    let delay = FaultKind::DeliveryDelay { span: ms(3_000), dies_with_connection: false };
    floor.fault(FaultSpec::new(delay).count(1));
    floor.login(1, 1, 1);
    floor.login(1, 2, 1);
    floor.ask(buy("late"));
    floor.login(2, 1, 1);
    let ended: Vec<_> = floor
        .out
        .iter()
        .filter_map(|output| match output {
            Output::Push { connection, push: Push::Ended { account, reason } } => {
                Some((*connection, account.get(), reason.as_str()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(ended, [(1, 1, KICKED)]);
    assert!(!floor.broker.has_session(1, account(1)) && floor.broker.has_session(2, account(1)));
    assert!(floor.broker.has_session(1, account(2)), "the other account's session goes on");
    floor.pass(3 * SECOND_US);
    assert_eq!(floor.refusal(), RejectClass::Disabled);
    assert!(floor.positions().is_empty());
}

#[test]
fn without_the_fault_a_second_session_ends_nobody_and_a_driver_can_end_all() {
    let mut floor = Floor::new();
    floor.login(1, 1, 1);
    floor.login(2, 1, 1);
    assert!(floor.broker.has_session(1, account(1)) && floor.broker.has_session(2, account(1)));
    let mut out = Vec::new();
    assert_eq!(floor.broker.kick(account(1), None, "ended", &mut out), 2);
    assert_eq!(floor.broker.kick(account(1), None, "ended", &mut out), 0);
}

fn any_kind() -> impl Strategy<Value = FaultKind> {
    let span = (0..3_000_u64, 0..3_000_u64)
        .prop_map(|(min_ms, more)| Span { min_ms, max_ms: min_ms + more });
    prop_oneof![
        Just(FaultKind::Requote {}),
        Just(FaultKind::LostAnswer {}),
        Just(FaultKind::LostRequest {}),
        (1..100_u32).prop_map(|percent| FaultKind::PartialFill { percent }),
        (span.clone(), any::<bool>()).prop_map(|(span, dies_with_connection)| {
            FaultKind::DeliveryDelay { span, dies_with_connection }
        }),
        span.prop_map(|span| FaultKind::AcceptanceDelay { span }),
    ]
}

proptest! {
    /// Every order ends in exactly one row; arrivals of a session keep their order; two runs, and
    /// a run that goes on from a clone, put out the same.
    #[test]
    fn every_order_is_accounted_for_once_and_runs_are_repeatable(
        kinds in proptest::collection::vec((any_kind(), 1..1_001_u32), 0..5),
        waits in proptest::collection::vec(0..2_000_000_u64, 1..40),
        seed in any::<u64>(),
    ) {
        let play = |clones: bool| {
            let mut floor = Floor::new();
            let mut rng = fastrand::Rng::with_seed(seed);
            for (kind, share) in &kinds {
                floor.fault(FaultSpec::new(kind.clone()).share_permille(*share));
            }
            floor.login(1, 1, 1);
            for wait in &waits {
                floor.draws = (0..16).map(|_| rng.u64(0..3_000)).collect();
                floor.ask(buy("a"));
                floor.pass(*wait);
                if clones {
                    floor.broker = floor.broker.clone();
                }
            }
            floor.pass(600 * SECOND_US);
            assert_eq!(floor.broker.next_due(), None);
            floor.ledger
        };
        let ledger = play(false);
        prop_assert_eq!(&ledger, &play(true));
        let is_lost = |fact: &Fact| matches!(fact, Fact::Lost(_));
        let lost = ledger.rows().iter().filter(|row| is_lost(&row.fact)).count();
        prop_assert_eq!(ledger.arrivals().len() + lost, waits.len());
        let sent: Vec<u64> = ledger.arrivals().iter().map(|(_, r)| r.request).collect();
        prop_assert!(sent.is_sorted(), "one session, one line: {sent:?}");
    }
}
