//! The engine alone: no socket, times given by the test.

use crate::clock::Now;
use crate::engine::{Effects, Engine};
use crate::faults::Settings;
use crate::ledger::{Cause, TradeEventKind};
use crate::protocol::{
    AccountBook, AccountChange, AccountDecl, CloseComment, FeedQuote, Instruction, OpenComment,
    OrderMeta, OrderReply, Push, Style,
};
use proptest::prelude::*;
use rust_decimal::Decimal;
use schemas::{
    AccountId, BrokerPosition, CloseReason, ClosedTrade, FollowerTicket, Lots, Micros, OrderDone,
    PendingKind, Price, RejectClass, Side, Symbol, SymbolSpec, Token,
};

pub(crate) struct World {
    pub(crate) engine: Engine,
    settings: Settings,
    clock_us: u64,
    pub(crate) last: Effects,
}

pub(crate) fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

pub(crate) fn lots(text: &str) -> Lots {
    text.parse().unwrap()
}

pub(crate) fn price(text: &str) -> Price {
    text.parse().unwrap()
}

pub(crate) fn spec() -> SymbolSpec {
    SymbolSpec {
        symbol: "EURUSD".parse().unwrap(),
        digits: 5,
        lots_step: lots("0.01"),
        lots_min: lots("0.01"),
        lots_max: lots("50"),
        contract_size: Some(Decimal::from(100_000)),
        stops_level_points: 10,
    }
}

impl World {
    pub(crate) fn with(decl: AccountDecl) -> World {
        let mut engine = Engine::default();
        engine.declare_accounts(vec![decl]).unwrap();
        engine.declare_symbols(vec![spec()]).unwrap();
        let last = Effects::default();
        let mut world = World { engine, settings: Settings::default(), clock_us: 0, last };
        world.feed("1.10000", "1.10010");
        world
    }

    pub(crate) fn new(style: Style) -> World {
        World::with(AccountDecl::new(account(1), style))
    }

    pub(crate) fn now(&mut self) -> Now {
        self.clock_us += 1_000;
        let wall = Micros(1_700_000_000_000_000 + self.clock_us as i64);
        Now { mono_us: self.clock_us, wall }
    }

    pub(crate) fn feed(&mut self, bid: &str, ask: &str) {
        let symbol = spec().symbol;
        let quote = FeedQuote { symbol, bid: price(bid), ask: price(ask) };
        let now = self.now();
        self.last = Effects::default();
        self.engine.feed(now, &[quote], &mut self.last).unwrap();
    }

    pub(crate) fn ask(&mut self, instruction: &Instruction) -> OrderReply {
        let now = self.now();
        self.last = Effects::default();
        self.engine
            .order(now, account(1), None, instruction, self.settings, &mut self.last)
            .unwrap()
    }

    pub(crate) fn done(&mut self, instruction: &Instruction) -> OrderDone {
        match self.ask(instruction) {
            OrderReply::Done(done) => done,
            OrderReply::Rejected(rejection) => panic!("{instruction:?} refused: {rejection:?}"),
        }
    }

    pub(crate) fn refused(&mut self, instruction: &Instruction) -> RejectClass {
        let before = self.book();
        let reply = self.ask(instruction);
        assert_eq!(self.last, Effects::default(), "a refused order has effects");
        let after = self.book();
        assert_eq!((before.revision, before.positions), (after.revision, after.positions));
        match reply {
            OrderReply::Rejected(rejection) => rejection.class,
            OrderReply::Done(done) => panic!("{instruction:?} carried out: {done:?}"),
        }
    }

    pub(crate) fn book(&mut self) -> AccountBook {
        let now = self.now();
        self.engine.book(now, account(1)).unwrap()
    }

    pub(crate) fn only(&mut self) -> BrokerPosition {
        let mut positions = self.book().positions;
        assert_eq!(positions.len(), 1, "{positions:?}");
        positions.remove(0)
    }

    pub(crate) fn history(&self) -> Vec<ClosedTrade> {
        self.engine.history(account(1), Micros(0), 0).unwrap().trades
    }

    pub(crate) fn last_change(&self) -> AccountChange {
        match self.last.changes.last() {
            Some((_, Push::Change { change, .. })) => change.clone(),
            other => panic!("no change: {other:?}"),
        }
    }
}

pub(crate) fn open(
    side: Side,
    volume: &str,
    loss: Option<&str>,
    profit: Option<&str>,
) -> Instruction {
    Instruction::Open {
        symbol: spec().symbol,
        side,
        lots: lots(volume),
        stop_loss: loss.map(price),
        take_profit: profit.map(price),
        magic: 77,
        comment: "L1-T1001-aa".to_owned(),
    }
}

fn place(kind: PendingKind, at: &str, loss: Option<&str>) -> Instruction {
    Instruction::Place {
        symbol: spec().symbol,
        kind,
        lots: lots("0.10"),
        price: price(at),
        stop_loss: loss.map(price),
        take_profit: None,
        magic: 77,
        comment: "L1-T1001-aa".to_owned(),
    }
}

fn close(ticket: FollowerTicket, volume: Option<&str>) -> Instruction {
    Instruction::Close { ticket, lots: volume.map(lots) }
}

fn meta(token: u64) -> OrderMeta {
    OrderMeta {
        node: "n1".parse().unwrap(),
        token: Token::new(token).unwrap(),
        deadline_margin_us: 5_000_000,
        sent_at_us: Micros(1),
        client_ref: 0,
    }
}

#[test]
fn a_buy_opens_at_the_ask_and_closes_at_the_bid() {
    let mut world = World::new(Style::Mt5);
    let opened = world.done(&open(Side::Buy, "0.10", None, None));
    assert_eq!(opened.price, Some(price("1.10010")));
    world.feed("1.10110", "1.10120");
    assert_eq!(world.book().funds.equity, "10010".parse().unwrap());
    let closed = world.done(&close(opened.ticket, None));
    assert_eq!((closed.price, closed.lots), (Some(price("1.10110")), Some(lots("0.10"))));
    assert_eq!(world.book().funds.balance, "10010".parse().unwrap());
    assert_eq!(world.history()[0].lots_left, None);
    assert!(matches!(
        world.last_change(),
        AccountChange::PositionClosed { reason: CloseReason::Client, .. }
    ));
}

#[test]
fn a_sell_opens_at_the_bid_and_loses_when_the_ask_rises() {
    let mut world = World::new(Style::Mt5);
    let opened = world.done(&open(Side::Sell, "1", None, None));
    assert_eq!(opened.price, Some(price("1.1")));
    world.feed("1.10090", "1.10100");
    assert_eq!(world.book().funds.equity, "9900".parse().unwrap());
}

#[test]
fn mt5_partial_close_keeps_the_ticket_and_says_what_is_left() {
    let mut world = World::new(Style::Mt5);
    let opened = world.done(&open(Side::Buy, "1.00", None, Some("1.2")));
    let part = world.done(&close(opened.ticket, Some("0.70")));
    assert_eq!((part.ticket, part.remainder), (opened.ticket, None));
    let rest = world.only();
    assert_eq!((rest.ticket, rest.lots), (opened.ticket, lots("0.30")));
    assert_eq!((rest.magic, rest.comment.as_str()), (77, "L1-T1001-aa"));
    let entry = &world.history()[0];
    assert_eq!((entry.ticket, entry.lots), (opened.ticket, lots("0.70")));
    assert_eq!((entry.lots_left, entry.comment.as_str()), (Some(lots("0.30")), "L1-T1001-aa"));
}

#[test]
fn mt4_partial_close_gives_the_rest_a_new_ticket_and_both_lose_the_tag() {
    let mut world = World::new(Style::Mt4);
    let opened = world.done(&open(Side::Buy, "1.00", Some("1.05"), None));
    let before = world.only();
    let part = world.done(&close(opened.ticket, Some("0.70")));
    let rest = world.only();
    assert_eq!((part.ticket, part.remainder), (opened.ticket, Some(rest.ticket)));
    assert_ne!(rest.ticket, opened.ticket);
    let expected = BrokerPosition {
        ticket: rest.ticket,
        lots: lots("0.30"),
        comment: format!("from #{}", opened.ticket),
        ..before
    };
    assert_eq!(rest, expected, "price, magic, time and stops stay");
    let entry = &world.history()[0];
    assert_eq!((entry.ticket, entry.lots), (opened.ticket, lots("0.70")));
    assert_eq!(entry.comment, format!("to #{}", rest.ticket));
    assert_eq!(entry.lots_left, None, "this style does not say it");
    let fact = world.last.trades[0].clone();
    assert_eq!(
        (fact.event, fact.ticket, fact.new_ticket),
        (TradeEventKind::Reduced, opened.ticket, Some(rest.ticket))
    );
    assert_eq!(fact.comment, "L1-T1001-aa", "the ledger keeps the comment that was sent");

    let again = world.done(&close(rest.ticket, Some("0.10")));
    let last = world.only();
    assert_eq!(last.comment, format!("from #{}", rest.ticket));
    assert_eq!(again.remainder, Some(last.ticket));
    assert_eq!(world.last.trades[0].first_ticket, opened.ticket);
    assert_eq!(world.refused(&close(opened.ticket, None)), RejectClass::AlreadySo);
    world.feed("1.04990", "1.05000");
    assert!(world.book().positions.is_empty(), "the stop loss moved to the new ticket");
}

#[test]
fn stops_close_at_the_quote_that_reaches_them_and_not_before() {
    let cases = [
        (Side::Buy, "1.09000", "1.09001", Cause::StopLoss, CloseReason::StopLoss),
        (Side::Buy, "1.12000", "1.12001", Cause::TakeProfit, CloseReason::TakeProfit),
        (Side::Sell, "1.11999", "1.12000", Cause::StopLoss, CloseReason::StopLoss),
        (Side::Sell, "1.08999", "1.09000", Cause::TakeProfit, CloseReason::TakeProfit),
    ];
    for (side, bid, ask, cause, reason) in cases {
        let mut world = World::new(Style::Mt5);
        let (low, high) = (Some("1.09000"), Some("1.12000"));
        let (loss, profit) = if side == Side::Buy { (low, high) } else { (high, low) };
        world.done(&open(side, "0.10", loss, profit));
        world.feed("1.09010", "1.11990");
        assert_eq!(world.book().positions.len(), 1, "{side:?} {bid}");
        world.feed(bid, ask);
        assert!(world.book().positions.is_empty(), "{side:?} {bid}");
        assert_eq!(world.last.trades[0].cause, cause);
        let expected = if side == Side::Buy { bid } else { ask };
        assert_eq!(world.history()[0].close_price, price(expected));
        match world.last_change() {
            AccountChange::PositionClosed { reason: got, .. } => assert_eq!(got, reason),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_pending_order_becomes_a_trade_with_its_ticket_magic_and_comment() {
    let cases = [
        (PendingKind::BuyLimit, "1.09000", "1.08990", "1.09000", "1.09000"),
        (PendingKind::BuyStop, "1.11000", "1.11000", "1.11010", "1.11010"),
        (PendingKind::SellLimit, "1.11000", "1.11000", "1.11010", "1.11000"),
        (PendingKind::SellStop, "1.09000", "1.08990", "1.09000", "1.0899"),
    ];
    for (kind, at, bid, ask, filled_at) in cases {
        let mut world = World::new(Style::Mt4);
        let placed = world.done(&place(kind, at, None));
        world.feed("1.09001", "1.10999");
        assert_eq!(world.book().pendings.len(), 1, "{kind:?} waits");
        world.feed(bid, ask);
        let position = world.only();
        assert!(world.book().pendings.is_empty());
        assert_eq!((position.ticket, position.side), (placed.ticket, kind.side()));
        assert_eq!((position.magic, position.comment.as_str()), (77, "L1-T1001-aa"));
        assert_eq!(position.open_price, price(filled_at), "{kind:?}");
        let cancel = Instruction::Cancel { ticket: placed.ticket };
        assert_eq!(world.refused(&cancel), RejectClass::AlreadySo);
    }
}

#[test]
fn a_filled_pending_order_keeps_its_stop_loss() {
    let mut world = World::new(Style::Mt5);
    world.done(&place(PendingKind::BuyStop, "1.11000", Some("1.10000")));
    world.feed("1.10990", "1.11000");
    assert_eq!(world.only().stop_loss, Some(price("1.1")));
    world.feed("1.09990", "1.10000");
    assert!(world.book().positions.is_empty());
}

#[test]
fn a_pending_order_can_be_changed_and_deleted() {
    let mut world = World::new(Style::Mt5);
    let ticket = world.done(&place(PendingKind::BuyLimit, "1.09000", None)).ticket;
    let change = |at: &str| Instruction::ModifyPending {
        ticket,
        price: price(at),
        stop_loss: None,
        take_profit: None,
    };
    world.done(&change("1.08000"));
    assert_eq!(world.book().pendings[0].price, price("1.08"));
    assert_eq!(world.refused(&change("1.08000")), RejectClass::AlreadySo);
    assert_eq!(world.refused(&change("1.2")), RejectClass::Invalid);
    world.done(&Instruction::Cancel { ticket });
    assert!(world.book().pendings.is_empty());
    assert_eq!(world.refused(&change("1.07")), RejectClass::AlreadySo);
    world.feed("1.06", "1.07");
    assert!(world.book().positions.is_empty(), "a deleted order does not fill");
}

#[test]
fn a_wrong_order_is_refused_by_class_and_changes_nothing() {
    let mut world = World::new(Style::Mt5);
    let ticket = world.done(&open(Side::Buy, "1.00", None, None)).ticket;
    let unknown = FollowerTicket::new(5).unwrap();
    let modify = |ticket, loss: Option<&str>, profit: Option<&str>| Instruction::Modify {
        ticket,
        stop_loss: loss.map(price),
        take_profit: profit.map(price),
    };
    let mut elsewhere = open(Side::Buy, "0.1", None, None);
    if let Instruction::Open { symbol, .. } = &mut elsewhere {
        *symbol = "GBPUSD".parse().unwrap();
    }
    let cases = [
        (open(Side::Buy, "0.005", None, None), RejectClass::Invalid),
        (open(Side::Buy, "0.015", None, None), RejectClass::Invalid),
        (open(Side::Buy, "50.01", None, None), RejectClass::Invalid),
        (open(Side::Buy, "0.1", Some("1.10000"), None), RejectClass::Invalid),
        (open(Side::Buy, "0.1", Some("1.09991"), None), RejectClass::Invalid),
        (open(Side::Buy, "0.1", Some("1.090001"), None), RejectClass::Invalid),
        (open(Side::Buy, "0.1", None, Some("1.09")), RejectClass::Invalid),
        (open(Side::Sell, "0.1", Some("1.09"), None), RejectClass::Invalid),
        (open(Side::Sell, "0.1", None, Some("1.11")), RejectClass::Invalid),
        (place(PendingKind::BuyLimit, "1.11", None), RejectClass::Invalid),
        (place(PendingKind::BuyStop, "1.09", None), RejectClass::Invalid),
        (place(PendingKind::SellLimit, "1.09", None), RejectClass::Invalid),
        (place(PendingKind::SellStop, "1.11", None), RejectClass::Invalid),
        (place(PendingKind::BuyLimit, "1.09", Some("1.095")), RejectClass::Invalid),
        (elsewhere, RejectClass::Invalid),
        (close(ticket, Some("1.01")), RejectClass::Invalid),
        (close(ticket, Some("0.005")), RejectClass::Invalid),
        (close(unknown, None), RejectClass::Invalid),
        (modify(ticket, None, None), RejectClass::AlreadySo),
        (modify(ticket, Some("1.2"), None), RejectClass::Invalid),
        (modify(unknown, Some("1.0"), None), RejectClass::Invalid),
        (Instruction::Cancel { ticket }, RejectClass::AlreadySo),
        (Instruction::Cancel { ticket: unknown }, RejectClass::Invalid),
    ];
    for (instruction, class) in cases {
        assert_eq!(world.refused(&instruction), class, "{instruction:?}");
    }
    world.done(&close(ticket, None));
    assert_eq!(world.refused(&close(ticket, None)), RejectClass::AlreadySo);
}

#[test]
fn without_a_price_an_order_is_to_be_tried_later() {
    let mut world = World::new(Style::Mt5);
    let other = SymbolSpec { symbol: "GBPUSD".parse().unwrap(), ..spec() };
    world.engine.declare_symbols(vec![other.clone()]).unwrap();
    let order = Instruction::open_by_hand(other.symbol, Side::Buy, lots("0.1"));
    assert_eq!(world.refused(&order), RejectClass::Later);
}

#[test]
fn comments_are_cut_blanked_or_prefixed_as_the_account_says() {
    let sent = "L1-T1001-aa";
    let cases = [
        (Some(5), OpenComment::Keep, "L1-T1"),
        (None, OpenComment::Keep, sent),
        (None, OpenComment::Blank, ""),
        (Some(8), OpenComment::Prefix("web:".to_owned()), "web:L1-T"),
    ];
    for (comment_max, comment_open, shown) in cases {
        let decl = AccountDecl::new(account(1), Style::Mt5);
        let mut world = World::with(AccountDecl { comment_max, comment_open, ..decl });
        world.done(&open(Side::Buy, "0.1", None, None));
        assert_eq!(world.only().comment, shown);
        assert_eq!(world.last.trades[0].comment, sent);
    }
}

#[test]
fn the_comment_of_a_stopped_trade_is_rewritten_as_the_account_says() {
    let cases = [
        (Style::Mt5, None, None, "L1-T1001-aa"),
        (Style::Mt4, None, None, "L1-T1001-aa[sl]"),
        (Style::Mt4, Some(10), None, "L1-T10[sl]"),
        (Style::Mt4, None, Some(CloseComment::Replace), "[sl]"),
        (Style::Mt4, None, Some(CloseComment::Keep), "L1-T1001-aa"),
    ];
    for (style, comment_max, comment_close, shown) in cases {
        let decl = AccountDecl::new(account(1), style);
        let mut world = World::with(AccountDecl { comment_max, comment_close, ..decl });
        world.done(&open(Side::Buy, "0.1", Some("1.09"), None));
        world.feed("1.08", "1.09");
        assert_eq!(world.history()[0].comment, shown);
    }
}

#[test]
fn symbols_carry_the_suffix_of_the_account() {
    let decl = AccountDecl::new(account(1), Style::Mt5);
    let mut world = World::with(AccountDecl { suffix: ".m".to_owned(), ..decl });
    assert_eq!(world.refused(&open(Side::Buy, "0.1", None, None)), RejectClass::Invalid);
    let symbol: Symbol = "EURUSD.m".parse().unwrap();
    world.done(&Instruction::open_by_hand(symbol.clone(), Side::Buy, lots("0.1")));
    assert_eq!(world.only().symbol, symbol);
    assert_eq!(world.engine.symbols(account(1)).unwrap()[0].symbol, symbol);
    assert_eq!(world.engine.quotes(account(1)).unwrap()[0].symbol, symbol);
}

#[test]
fn tokens_are_checked_only_when_told_to() {
    let mut world = World::new(Style::Mt5);
    let send = |world: &mut World, token: u64| {
        let now = world.now();
        let (order, settings) = (open(Side::Buy, "0.1", None, None), world.settings);
        let meta = meta(token);
        world.engine.order(now, account(1), Some(&meta), &order, settings, &mut world.last).unwrap()
    };
    let is_stale = |reply: &OrderReply| matches!(reply, OrderReply::Rejected(r) if r.class == RejectClass::StaleToken);
    assert!(!is_stale(&send(&mut world, 7)));
    assert!(!is_stale(&send(&mut world, 6)));
    world.settings.check_tokens = true;
    assert!(is_stale(&send(&mut world, 6)));
    assert!(!is_stale(&send(&mut world, 7)));
    world.engine.login(account(1), Some(Token::new(9).unwrap()), world.settings).unwrap();
    assert!(is_stale(&send(&mut world, 8)), "a login shows the token as well");
    let late = world.engine.login(account(1), Some(Token::new(8).unwrap()), world.settings);
    assert_eq!(late.unwrap_err().field, "token");
}

#[test]
fn a_wrong_price_or_declaration_names_its_field_and_takes_none_of_the_list() {
    let mut world = World::new(Style::Mt5);
    let now = world.now();
    let quote = |symbol: &str, bid: &str, ask: &str| FeedQuote {
        symbol: symbol.parse().unwrap(),
        bid: price(bid),
        ask: price(ask),
    };
    for (bad, field) in [
        (quote("EURUSD", "1.2", "1.1"), "quotes[1].ask"),
        (quote("EURUSD", "1.000001", "1.1"), "quotes[1].bid"),
        (quote("XAUUSD", "1.0", "1.1"), "quotes[1].symbol"),
    ] {
        let mut effects = Effects::default();
        let list = [quote("EURUSD", "1.3", "1.4"), bad];
        let error = world.engine.feed(now, &list, &mut effects).unwrap_err();
        assert_eq!(error.field, field);
        assert_eq!(effects, Effects::default());
    }
    let other = AccountDecl { suffix: ".x".to_owned(), ..AccountDecl::new(account(1), Style::Mt5) };
    let error = world.engine.declare_accounts(vec![other]).unwrap_err();
    assert_eq!(error.field, "accounts[0].account");
    let long = AccountDecl { suffix: "x".repeat(17), ..AccountDecl::new(account(2), Style::Mt5) };
    let error = world.engine.declare_accounts(vec![long]).unwrap_err();
    assert_eq!(error.field, "accounts[0].suffix");
}

fn any_step() -> impl Strategy<Value = (u8, u32, u32)> {
    (0..6_u8, 1..300_u32, 0..40_u32)
}

proptest! {
    /// Whatever is asked: volumes add up, revisions have no holes, equal requests give equal books.
    #[test]
    fn volumes_add_up_and_revisions_have_no_holes(
        is_mt4 in any::<bool>(),
        steps in proptest::collection::vec(any_step(), 1..60),
    ) {
        let play = || {
            let mut world = World::new(if is_mt4 { Style::Mt4 } else { Style::Mt5 });
            let (mut opened, mut revision) = (Decimal::ZERO, 0);
            for (kind, volume, pick) in &steps {
                let volume = Lots::new(Decimal::new(i64::from(*volume), 2)).unwrap();
                let positions = world.book().positions;
                let ticket = positions.get(*pick as usize % positions.len().max(1)).map(|p| p.ticket);
                match (kind, ticket) {
                    (0 | 1, _) => {
                        let stop = (*kind == 1).then_some("1.09");
                        let mut order = open(Side::Buy, "1", stop, None);
                        if let Instruction::Open { lots, .. } = &mut order { *lots = volume; }
                        if let OrderReply::Done(done) = world.ask(&order) {
                            opened += done.lots.unwrap().get();
                        }
                    }
                    (2, Some(ticket)) => { world.ask(&Instruction::Close { ticket, lots: None }); }
                    (3, Some(ticket)) => { world.ask(&Instruction::Close { ticket, lots: Some(volume) }); }
                    (4, _) => { world.feed("1.08", "1.09"); }
                    _ => { world.feed("1.1", "1.1001"); }
                }
                for (_, push) in &world.last.changes {
                    let Push::Change { revision: got, .. } = push else { panic!("{push:?}") };
                    revision += 1;
                    assert_eq!(*got, revision);
                }
            }
            (world.book(), world.history(), opened)
        };
        let (book, history, opened) = play();
        let held: Decimal = book.positions.iter().map(|p| p.lots.get()).sum();
        let closed: Decimal = history.iter().map(|c| c.lots.get()).sum();
        prop_assert_eq!(held + closed, opened);
        prop_assert_eq!(play(), (book, history, opened));
    }
}
