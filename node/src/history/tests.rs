//! Cases; the properties are in `properties.rs`, the real files in `shared_tests.rs`.

use std::collections::BTreeMap;

use schemas::event::{Change, CloseReason};
use schemas::ids::MasterTicket;
use schemas::position::{MasterPending, MasterPosition, PendingKind, Side};
use schemas::quantity::Price;

use super::*;

/// What an account holds after some steps.
#[derive(Debug, Default, Clone)]
pub(super) struct Book {
    pub(super) positions: BTreeMap<MasterTicket, MasterPosition>,
    pub(super) pendings: BTreeMap<MasterTicket, MasterPending>,
    pub(super) positions_max: usize,
}

impl Book {
    /// Applies a step; panics where the change does not fit what is there.
    pub(super) fn apply(&mut self, step: &Step) {
        let ticket = step.change.ticket();
        match &step.change {
            Change::PositionOpened(position) => {
                assert_eq!(position.lots, position.lots_at_open);
                assert!(self.positions.insert(ticket, position.clone()).is_none());
            }
            Change::PendingFilled(position) => {
                assert!(self.pendings.remove(&ticket).is_some());
                assert!(self.positions.insert(ticket, position.clone()).is_none());
            }
            Change::PositionModified(position) => {
                let before = self.positions.insert(ticket, position.clone()).unwrap();
                assert_eq!(before.lots, position.lots);
            }
            Change::VolumeChanged { position, previous_lots } => {
                let before = self.positions.insert(ticket, position.clone()).unwrap();
                assert_eq!(before.lots, *previous_lots);
                assert_ne!(before.lots, position.lots);
            }
            Change::PositionClosed { position, price, .. } => {
                let before = self.positions.remove(&ticket).unwrap();
                assert_eq!(&before, position);
                assert!(price.is_some());
            }
            Change::PendingPlaced(order) => {
                assert!(self.pendings.insert(ticket, order.clone()).is_none());
            }
            Change::PendingModified(order) => {
                assert!(self.pendings.insert(ticket, order.clone()).is_some());
            }
            Change::PendingCancelled(_) => assert!(self.pendings.remove(&ticket).is_some()),
        }
        self.positions_max = self.positions_max.max(self.positions.len());
    }
}

/// Plays steps from an empty account, checking the order of time as well.
pub(super) fn play(steps: &[Step]) -> Book {
    let mut book = Book::default();
    for pair in steps.windows(2) {
        assert!(pair[0].offset_us <= pair[1].offset_us);
        assert_eq!(pair[0].at == pair[1].at, pair[0].offset_us == pair[1].offset_us);
    }
    for step in steps {
        book.apply(step);
    }
    book
}

/// A level that a step's price reaches belongs to a trade that ends in that step or never had it.
pub(super) fn assert_no_stop_is_reached_early(steps: &[Step]) {
    let mut book = Book::default();
    for step in steps {
        let ends = matches!(step.change, Change::PositionClosed { .. });
        if ends {
            book.apply(step);
        }
        if let Some((symbol, price)) = &step.quote {
            for position in book.positions.values().filter(|p| &p.symbol == symbol) {
                // A volume change sets new levels at its own price.
                if position.ticket != step.change.ticket() {
                    assert!(!reached(position, *price), "{position:?} by {price} at {}", step.at);
                }
            }
        }
        if !ends {
            book.apply(step);
        }
        if let (Some((_, price)), Some(position)) =
            (&step.quote, book.positions.get(&step.change.ticket()))
        {
            assert!(!reached(position, *price), "{position:?} by its own {price} at {}", step.at);
        }
    }
}

fn reached(position: &MasterPosition, price: Price) -> bool {
    let (stop, target) = (position.stop_loss, position.take_profit);
    match position.side {
        Side::Buy => stop.is_some_and(|s| price <= s) || target.is_some_and(|t| price >= t),
        Side::Sell => stop.is_some_and(|s| price >= s) || target.is_some_and(|t| price <= t),
    }
}

/// The fixtures: made up, each with the quirks of its layout.
pub(super) const FIXTURES: [(&str, &[u8]); 9] = [
    ("mt4_statement.htm", include_bytes!("fixtures/mt4_statement.htm")),
    ("mt4_tester.htm", include_bytes!("fixtures/mt4_tester.htm")),
    ("mt5_history.csv", include_bytes!("fixtures/mt5_history.csv")),
    ("mt5_history_netting.htm", include_bytes!("fixtures/mt5_history_netting.htm")),
    ("mt5_tester.htm", include_bytes!("fixtures/mt5_tester.htm")),
    ("mql5_history.csv", include_bytes!("fixtures/mql5_history.csv")),
    ("mql5_positions.csv", include_bytes!("fixtures/mql5_positions.csv")),
    ("simple.csv", include_bytes!("fixtures/simple.csv")),
    ("demo.csv", DEMO.as_bytes()),
];

fn bytes_of(name: &str) -> &'static [u8] {
    FIXTURES.iter().find(|(known, _)| *known == name).unwrap().1
}

fn fixture(name: &str) -> History {
    load_bytes(name, bytes_of(name)).unwrap()
}

/// A fixture with one piece of its text replaced, which must be there.
fn damaged(name: &str, from: &str, to: &str) -> String {
    let text = std::str::from_utf8(bytes_of(name)).unwrap();
    assert!(text.contains(from), "{name} has no {from}");
    let changed = text.replacen(from, to, 1);
    load_bytes(name, changed.as_bytes()).unwrap_err().to_string()
}

fn ticket(number: u64) -> MasterTicket {
    MasterTicket::new(number).unwrap()
}

fn trade(history: &History, number: u64) -> &HistoryTrade {
    history.trades.iter().find(|trade| trade.ticket == ticket(number)).unwrap()
}

fn price(text: &str) -> Option<Price> {
    Some(text.parse().unwrap())
}

/// Steps in short: clock, ticket, kind, lots after.
fn short(steps: &[Step]) -> Vec<String> {
    let words = |step: &Step| {
        let lots = match &step.change {
            Change::PositionClosed { .. } | Change::PendingCancelled(_) => String::new(),
            Change::PositionOpened(p) | Change::PositionModified(p) | Change::PendingFilled(p) => {
                p.lots.to_string()
            }
            Change::VolumeChanged { position, .. } => position.lots.to_string(),
            Change::PendingPlaced(o) | Change::PendingModified(o) => o.lots.to_string(),
        };
        let (hour, minute, second) = step.at.as_hms();
        let ticket = step.change.ticket();
        format!("{hour:02}:{minute:02}:{second:02} {ticket} {} {lots}", step.change.kind())
    };
    steps.iter().map(|step| words(step).trim_end().to_owned()).collect()
}

#[test]
fn mt4_statement_gives_trades_orders_money_rows_and_comments() {
    let history = fixture("mt4_statement.htm");
    assert_eq!(history.kind, HistoryKind::Mt4Statement);
    assert_eq!(history.source.currency.as_deref(), Some("JPY"));
    assert_eq!(history.trades.len(), 7);
    assert_eq!(history.pendings.len(), 3);
    let texts: Vec<_> = history.balances.iter().map(|b| (b.text.as_str(), b.amount)).collect();
    assert_eq!(texts, [("Deposit", Some(200_000.into())), ("Interest", None)]);
    let scalp = trade(&history, 5004);
    assert_eq!(scalp.magic, Some(777));
    assert_eq!(scalp.comment, "5 Min Strategy[tp]");
    assert_eq!(scalp.close.as_ref().unwrap().reason, CloseReason::TakeProfit);
    assert_eq!(Some(scalp.open_price), price("29012"));
    assert_eq!(scalp.tp, None);
    let from_comment_row = trade(&history, 5005);
    assert_eq!(from_comment_row.magic, Some(434_343));
    assert_eq!(from_comment_row.comment, "[sl]");
    assert_eq!(trade(&history, 5006).magic, None);
    assert_eq!(trade(&history, 5010).close, None);
    assert_eq!(trade(&history, 5010).last_price, price("1.2011"));
    let working = history.pendings.last().unwrap();
    assert_eq!((working.ticket, working.magic), (ticket(5011), Some(777)));
    assert_eq!((working.comment.as_str(), &working.outcome), ("Daily", &PendingOutcome::Working));
}

#[test]
fn mt4_partial_closes_are_one_ticket_whose_broker_number_changes() {
    let steps = timeline(&fixture("mt4_statement.htm"));
    let chain: Vec<_> =
        steps.iter().filter(|step| step.change.ticket() == ticket(5001)).cloned().collect();
    assert_eq!(
        short(&chain),
        [
            "09:30:00 5001 position_opened 0.1",
            "10:00:00 5001 volume_changed 0.05",
            "12:00:00 5001 volume_changed 0.03",
            "00:00:00 5001 position_closed",
        ]
    );
    let numbers: Vec<_> = chain.iter().map(|step| step.broker_ticket.get()).collect();
    assert_eq!(numbers, [5001, 5002, 5003, 5003]);
    assert!(matches!(
        chain[3].change,
        Change::PositionClosed { reason: CloseReason::StopLoss, .. }
    ));
    // The stop came with the remainder; the first part had none.
    assert!(matches!(&chain[0].change, Change::PositionOpened(p) if p.stop_loss.is_none()));
    assert!(matches!(&chain[1].change, Change::VolumeChanged { position, .. }
        if position.stop_loss == price("1.209")));
}

#[test]
fn mt4_link_to_a_row_that_is_not_there_is_named_and_both_are_whole_trades() {
    let text = std::str::from_utf8(bytes_of("mt4_statement.htm")).unwrap();
    let cut = text.replace("to #5002", "to #6666").replace("to #5003", "");
    let cut = cut.replace("from #5002[sl/gap]", "");
    let history = load_bytes("cut.htm", cut.as_bytes()).unwrap();
    assert!(history.unsaid.iter().any(|s| s.contains("5001 was carried on by 6666")));
    // Three rows of their own from the old open time, and the three of one second.
    assert_eq!(play(&timeline(&history)).positions_max, 6);
    assert_eq!(play(&timeline(&fixture("mt4_statement.htm"))).positions_max, 4);
}

#[test]
fn one_of_the_two_split_comments_is_enough() {
    let text = std::str::from_utf8(bytes_of("mt4_statement.htm")).unwrap();
    let cut = text.replace("from #5002[sl/gap]", "[sl/gap]").replace("to #5002", "");
    let history = load_bytes("cut.htm", cut.as_bytes()).unwrap();
    assert!(trade(&history, 5003).split_from.is_none());
    let steps = timeline(&history);
    assert!(steps.iter().all(|step| step.change.ticket() != ticket(5003)));
    assert!(steps.iter().any(|step| step.change.ticket() == ticket(5001)));
}

#[test]
fn trade_closed_by_an_opposite_one_takes_its_size() {
    let text = std::str::from_utf8(bytes_of("mt4_statement.htm")).unwrap();
    let hedge =
        text.replace("<td>5006</td>", "<td title=\"close hedge by #5005\">5006</td>").replace(
            ">1.00</td><td class=mspt>usdjpy</td><td class=mspt>109.510",
            ">0.00</td><td class=mspt>usdjpy</td><td class=mspt>109.510",
        );
    let history = load_bytes("hedge.htm", hedge.as_bytes()).unwrap();
    assert_eq!(trade(&history, 5006).lots, trade(&history, 5005).lots);
    assert!(history.unsaid.iter().any(|s| s.contains("5006 was closed by an opposite trade")));
    let unknown = hedge.replace("close hedge by #5005", "close hedge by #1");
    let error = load_bytes("hedge.htm", unknown.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("names no trade of the file"), "{error}");
}

#[test]
fn deleted_order_whose_price_was_reached_gives_no_quote() {
    let steps = timeline(&fixture("mt4_statement.htm"));
    let cancelled = |number| {
        steps.iter().find(|s| s.change.ticket() == ticket(number) && s.change.is_ending()).unwrap()
    };
    assert_eq!(cancelled(5007).quote, None);
    assert_eq!(cancelled(5008).quote.as_ref().map(|(_, price)| *price), price("109.399"));
}

#[test]
fn stop_beyond_the_open_price_was_set_later_and_is_not_played_at_the_open() {
    let history = fixture("mt4_statement.htm");
    assert_eq!(trade(&history, 5005).sl, price("109.7"));
    let steps = timeline(&history);
    let opened = steps.iter().find(|s| s.change.ticket() == ticket(5005)).unwrap();
    assert!(matches!(&opened.change, Change::PositionOpened(p) if p.stop_loss.is_none()));
    assert_no_stop_is_reached_early(&steps);
    assert!(history.unsaid.iter().any(|s| s.contains("not played")));
}

#[test]
fn within_a_second_closes_go_first_but_a_scalp_opens_before_it_closes() {
    let steps = timeline(&fixture("mt4_statement.htm"));
    let at_the_second: Vec<_> =
        short(&steps).into_iter().filter(|step| step.starts_with("09:31:07")).collect();
    assert_eq!(
        at_the_second,
        [
            "09:31:07 5004 position_opened 0.1",
            "09:31:07 5005 position_opened 1",
            "09:31:07 5006 position_opened 1",
            "09:31:07 5004 position_closed",
        ]
    );
    let mql5 = short(&timeline(&fixture("mql5_history.csv")));
    let at_eleven: Vec<_> = mql5.iter().filter(|step| step.starts_with("11:00:00")).collect();
    assert_eq!(at_eleven, ["11:00:00 2 position_closed", "11:00:00 3 position_opened 0.01"]);
}

#[test]
fn mt4_tester_is_played_event_by_event_in_its_own_order() {
    let history = fixture("mt4_tester.htm");
    assert_eq!(history.kind, HistoryKind::Mt4Tester);
    assert!(history.unsaid.iter().any(|s| s.contains("order 3 was never opened")));
    assert_eq!(
        short(&timeline(&history)),
        [
            "09:00:00 1 position_opened 0.3",
            "09:00:00 2 pending_placed 0.1",
            "09:05:00 1 position_modified 0.3",
            "09:06:00 2 pending_modified 0.1",
            "09:10:00 2 pending_filled 0.1",
            "09:10:00 1 volume_changed 0.2",
            "09:12:00 4 pending_placed 0.1",
            "09:12:00 4 pending_cancelled",
            "09:20:00 1 position_closed",
            "09:30:00 2 position_closed",
        ]
    );
    let steps = timeline(&history);
    assert!(matches!(&steps[8].change,
        Change::PositionClosed { reason: CloseReason::StopLoss, position, .. }
        if position.stop_loss == price("1.297")));
}

#[test]
fn mt5_history_joins_the_rows_of_a_position_and_knows_its_pending_order() {
    let history = fixture("mt5_history.csv");
    assert_eq!(history.kind, HistoryKind::Mt5History);
    assert_eq!(history.source.currency.as_deref(), Some("EUR"));
    assert_eq!(history.source.margin_mode, Some(MarginMode::Hedging));
    assert_eq!(history.balances[0].text, "Deposit, first");
    assert!(history.unsaid.iter().any(|s| s.contains("column Balance: `5 0812.9`")));
    assert_eq!(
        short(&timeline(&history)),
        [
            "09:50:00 900001 pending_placed 0.03",
            "10:00:00 900001 pending_filled 0.03",
            "10:05:00 900002 position_opened 0.05",
            "10:10:00 900003 pending_placed 0.03",
            "10:30:00 900001 volume_changed 0.01",
            "10:40:00 900003 pending_cancelled",
            "11:00:00 900001 position_closed",
            "11:00:00 900002 position_closed",
        ]
    );
    let reason = |number| trade(&history, number).close.as_ref().unwrap().reason;
    assert_eq!(reason(900_001), CloseReason::TakeProfit);
    assert_eq!(reason(900_002), CloseReason::Unknown);
}

#[test]
fn mt5_netting_deals_add_reduce_and_turn_over() {
    let history = fixture("mt5_history_netting.htm");
    assert_eq!(history.source.margin_mode, Some(MarginMode::Netting));
    assert_eq!(history.source.currency.as_deref(), Some("GBP"));
    let steps = timeline(&history);
    assert_eq!(
        short(&steps),
        [
            "10:00:00 11 position_opened 1",
            "10:05:00 11 volume_changed 2",
            "10:10:00 11 volume_changed 1.5",
            "10:20:00 11 position_closed",
            "10:20:00 14 position_opened 1",
            "10:30:00 14 position_closed",
        ]
    );
    assert!(matches!(&steps[1].change, Change::VolumeChanged { position, .. }
        if position.open_price == price("1.101")));
    assert!(matches!(&steps[4].change, Change::PositionOpened(p) if p.side == Side::Sell));
}

#[test]
fn mt5_tester_deals_go_by_their_number_and_match_by_volume() {
    let history = fixture("mt5_tester.htm");
    assert_eq!(history.kind, HistoryKind::Mt5Tester);
    assert_eq!(history.source.encoding, "UTF-16LE");
    assert_eq!(history.source.orders_by_state["filled"], 7);
    assert!(history.unsaid.iter().any(|s| s.starts_with("stop limit orders left out: 1")));
    assert_eq!(
        short(&timeline(&history)),
        [
            "10:00:00 2 position_opened 0.1",
            "10:00:00 3 pending_placed 0.3",
            // Deal 4 stands above deal 3 in the file: the stop went first all the same.
            "11:00:00 2 position_closed",
            "11:00:00 3 pending_filled 0.3",
            "11:30:00 3 volume_changed 0.2",
            "11:40:00 6 position_opened 0.2",
            "11:45:00 8 pending_placed 0.3",
            "12:00:00 8 pending_cancelled",
            // Both have 0.2 left; the comment names the target of 3.
            "12:00:00 3 position_closed",
            "09:00:00 6 position_closed",
        ]
    );
    let last = trade(&history, 6).close.as_ref().unwrap();
    assert_eq!(last.reason, CloseReason::StopOut);
}

#[test]
fn deal_that_closes_more_than_is_open_is_named() {
    let text = std::str::from_utf8(bytes_of("mt5_history_netting.htm")).unwrap();
    let more = text.replace("<td>out</td><td>1.0</td>", "<td>out</td><td>1.5</td>");
    let history = load_bytes("more.htm", more.as_bytes()).unwrap();
    assert!(history.unsaid.iter().any(|s| s.starts_with("deal 5 closes 0.5 lots of EURUSD")));
    assert!(play(&timeline(&history)).positions.is_empty());
}

#[test]
fn signal_trades_are_numbered_by_open_time_with_the_lower_row_first() {
    let history = fixture("mql5_history.csv");
    let numbers: Vec<_> = history.trades.iter().map(|t| (t.row, t.ticket.get())).collect();
    assert_eq!(numbers, [(3, 3), (4, 2), (5, 1)]);
    assert_eq!(history.pendings[0].ticket, ticket(4));
    assert_eq!(history.pendings[0].kind, PendingKind::BuyStop);
    assert!(history.unsaid.iter().any(|s| s.contains("carry no tickets")));
    let other = fixture("mql5_positions.csv");
    assert_eq!(Some(other.trades[0].close.as_ref().unwrap().price), price("16560"));
    assert!(other.unsaid.iter().any(|s| s.contains("opened with 0.02 lots and closed with 0.01")));
    assert!(other.unsaid.iter().any(|s| s.contains("no stops and targets")));
}

#[test]
fn simple_layout_has_parts_modifications_and_a_filled_order() {
    let history = fixture("simple.csv");
    assert_eq!(trade(&history, 1).comment, "mine, all");
    let steps = timeline(&history);
    assert_eq!(
        short(&steps),
        [
            "09:00:00 1 position_opened 0.3",
            "09:05:00 2 pending_placed 0.1",
            "09:10:00 3 pending_placed 0.1",
            "09:15:00 3 pending_modified 0.1",
            "09:20:00 3 pending_filled 0.1",
            "09:30:00 1 volume_changed 0.2",
            "09:40:00 1 position_modified 0.2",
            "09:50:00 2 pending_cancelled",
            "10:00:00 1 position_closed",
        ]
    );
    assert_eq!(steps[0].quote, Some(("EURUSD".parse().unwrap(), "1.05012".parse().unwrap())));
    assert_eq!(steps[4].offset_us, 20 * 60 * 1_000_000);
    assert_eq!(play(&steps).positions.len(), 1);
}

#[test]
fn times_of_a_step_are_translated_by_the_driver() {
    let steps = timeline(&fixture("simple.csv"));
    let now = schemas::ids::Micros(7);
    for step in &steps {
        let stamped = match step.restamped(|_| now) {
            Change::PositionOpened(p) | Change::PositionModified(p) | Change::PendingFilled(p) => {
                p.opened_at
            }
            Change::VolumeChanged { position, .. } | Change::PositionClosed { position, .. } => {
                position.opened_at
            }
            Change::PendingPlaced(o) | Change::PendingModified(o) | Change::PendingCancelled(o) => {
                o.placed_at
            }
        };
        assert_eq!(stamped, now);
    }
}

#[test]
fn demo_has_the_bursts_and_ends_flat() {
    let history = fixture("demo.csv");
    assert!((38..=45).contains(&history.trades.len()));
    let hints = symbols(&history);
    let names: Vec<_> = hints.iter().map(|hint| hint.symbol.as_str()).collect();
    assert_eq!(names, ["EURUSD", "GBPUSD", "GER40", "USDJPY", "XAUUSD"]);
    let digits: Vec<_> = hints.iter().map(|hint| hint.digits).collect();
    assert_eq!(digits, [5, 5, 1, 3, 2]);
    let steps = timeline(&history);
    let book = play(&steps);
    assert!(book.positions.is_empty() && book.pendings.is_empty());
    assert_no_stop_is_reached_early(&steps);
    let count = |kind: &str| steps.iter().filter(|step| step.change.kind() == kind).count();
    assert!(count("volume_changed") >= 4);
    assert_eq!((count("pending_filled"), count("pending_cancelled")), (1, 1));
    let mut bursts = steps.chunk_by(|a, b| a.offset_us == b.offset_us);
    assert!(bursts.any(|burst| burst.iter().filter(|s| s.change.is_ending()).count() == 12));
    let scalp = history.trades.iter().find(|t| t.close.as_ref().unwrap().at == t.opened_at);
    assert!(scalp.is_some());
    let length_s = steps.last().unwrap().offset_us / 1_000_000;
    assert!((6_600..=7_800).contains(&length_s), "{length_s}");
}

#[test]
fn demo_prices_fill_no_order_that_the_file_does_not_fill() {
    let mut book = Book::default();
    for step in timeline(&fixture("demo.csv")) {
        book.apply(&step);
        let Some((symbol, price)) = &step.quote else { continue };
        for order in book.pendings.values().filter(|order| &order.symbol == symbol) {
            assert!(!timeline::reaches_order(order.kind, order.price, *price), "{order:?}");
        }
    }
}

#[test]
fn symbol_hints_show_what_is_printed_and_mark_the_contract_as_assumed() {
    let hints = symbols(&fixture("mt4_statement.htm"));
    let names: Vec<_> = hints.iter().map(|hint| hint.symbol.as_str()).collect();
    assert_eq!(names, ["eurusd.", "jp225", "usdjpy"]);
    let (euro, index) = (&hints[0], &hints[1]);
    assert_eq!((euro.digits, index.digits), (5, 0));
    assert_eq!(euro.lots_step.to_string(), "0.01");
    assert_eq!(
        (euro.lots_min.to_string(), euro.lots_max.to_string()),
        ("0.02".into(), "0.07".into())
    );
    assert_eq!(euro.assumed_contract.as_ref().unwrap().size, 100_000.into());
    assert_eq!(index.assumed_contract.as_ref().unwrap().size, 1.into());
    let unknown = "ticket,open_time,side,lots,symbol,open_price,sl,tp,close_time,close_price,comment\n\
                   1,2025.03.04 09:00,buy,0.25,PORK_BELLIES,10,,,,,\n\
                   2,2025.03.04 09:00,buy,0.40,PORK_BELLIES,10,,,,,\n";
    let hints = symbols(&load_bytes("u.csv", unknown.as_bytes()).unwrap());
    assert_eq!(hints[0].assumed_contract, None);
    assert_eq!(hints[0].lots_step.to_string(), "0.05");
}

#[test]
fn damaged_cell_that_matters_is_an_error_with_file_row_and_column() {
    let cases = [
        (
            "mt4_statement.htm",
            ">0.10</td><td class=mspt>jp225",
            ">0,10</td><td class=mspt>jp225",
            "mt4_statement.htm: row 8, column Size: `0,10` is not a volume above 0",
        ),
        (
            "mt4_statement.htm",
            "2021.05.03 15:00:00",
            "2021.05.03 25:00:00",
            "mt4_statement.htm: row 10, column Close Time: `2021.05.03 25:00:00` is not a time such as 2025.01.31 23:59:59",
        ),
        (
            "mt4_statement.htm",
            "2021.05.03 15:00:00",
            "2021.05.03 05:00:00",
            "mt4_statement.htm: row 10, column Close Time: `2021.05.03 05:00:00` is before the open time of its row",
        ),
        (
            "mt4_statement.htm",
            "29 012",
            "2 9012",
            "mt4_statement.htm: row 8, column Price: `2 9012` is not a price above 0",
        ),
        (
            "mt4_statement.htm",
            "<td>sell stop</td>",
            "<td>sell flop</td>",
            "mt4_statement.htm: row 13, column Type: `sell flop` is no kind of row of this section",
        ),
        (
            "mt4_statement.htm",
            ">5005</td>",
            ">5004</td>",
            "mt4_statement.htm: row 10: ticket 5004 stands in the file twice",
        ),
        (
            "mt4_tester.htm",
            "<td>s/l</td>",
            "<td>sl?</td>",
            "mt4_tester.htm: row 13, column Type: `sl?` is no event of a tester report",
        ),
        (
            "mt4_tester.htm",
            "<td>0.20</td>",
            "<td>0.90</td>",
            "mt4_tester.htm: row 13, column Order: `3` names no trade that is open",
        ),
        (
            "mt5_history.csv",
            "2 350.20",
            "2 35O.20",
            "mt5_history.csv: row 6, column Price (close): `2 35O.20` is not a price above 0",
        ),
        (
            "mt5_history.csv",
            "900003,XAUUSD",
            "9e3,XAUUSD",
            "mt5_history.csv: row 12, column Order: `9e3` is not a ticket number above 0",
        ),
        (
            "mt5_history.csv",
            "800002,XAUUSD,sell,in,",
            "800002,XAUUSD,sell,sideways,",
            "mt5_history.csv: row 18, column Direction: `sideways` is none of in, out, in/out, out by",
        ),
        (
            "mql5_history.csv",
            "2 065.99",
            "2 065.9x",
            "mql5_history.csv: row 3, column S/L: `2 065.9x` is not a price level",
        ),
        (
            "simple.csv",
            "0.30,EURUSD",
            "-0.30,EURUSD",
            "simple.csv: row 2, column lots: `-0.30` is not a volume above 0",
        ),
        (
            "simple.csv",
            "1,,,0.10",
            "1,,,0.30",
            "simple.csv: row 3, column lots: `0.30` leaves nothing; the trade row closes the rest",
        ),
        (
            "simple.csv",
            "1,,,0.10",
            "8,,,0.10",
            "simple.csv: row 3, column ticket: `8` names no trade or order that is there at that time",
        ),
        (
            "simple.csv",
            "open_price,sl",
            "price,sl",
            "simple.csv: row 1, column open_price: `price` stands where this column belongs",
        ),
    ];
    for (name, from, to, message) in cases {
        assert_eq!(damaged(name, from, to), message);
    }
}

#[test]
fn what_is_no_history_is_refused_by_name() {
    let kinds = [
        (&b"<html><table><tr><td>Hello</td></tr></table></html>"[..], "HTML with 1 table rows"),
        (b"a,b,c\n1,2,3\n", "text that starts with `a,b,c`"),
        (b"", "text that starts with ``"),
    ];
    for (bytes, seen) in kinds {
        let error = load_bytes("x.dat", bytes).unwrap_err().to_string();
        assert!(error.starts_with("x.dat: not a known history") && error.contains(seen), "{error}");
    }
    let half = load_bytes("x.htm", b"\xff\xfe<\0h\0t").unwrap_err().to_string();
    assert!(half.contains("is not UTF-16LE"), "{half}");
    let missing = load("no/such/file.csv").unwrap_err();
    assert_eq!(missing.to_string(), "no/such/file.csv: cannot be read");
}

#[test]
fn file_on_disk_is_loaded_like_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("simple.csv");
    std::fs::write(&path, bytes_of("simple.csv")).unwrap();
    let mut history = load(&path).unwrap();
    assert!(history.source.file.ends_with("simple.csv"));
    history.source.file = "simple.csv".to_owned();
    assert_eq!(history, fixture("simple.csv"));
}

#[test]
fn numbers_are_read_as_platforms_print_them() {
    let good = [
        ("1 234.56", "1234.56"),
        ("- 0.08", "-0.08"),
        ("-1 234", "-1234"),
        ("4\u{a0}182.78", "4182.78"),
        ("0.00000", "0"),
        ("+3", "3"),
        ("1234567.5", "1234567.5"),
    ];
    for (text, value) in good {
        let expected: Decimal = value.parse().unwrap();
        assert_eq!(cell::parse_decimal(text), Some(expected), "{text}");
    }
    let bad = [
        "",
        "-",
        "5 0812.9",
        "1,5",
        "1.",
        ".5",
        "1e5",
        "12 34",
        "1  234",
        "1.2.3",
        "--1",
        "NaN",
        "99999999999999999999999999999999",
    ];
    for text in bad {
        assert_eq!(cell::parse_decimal(text), None, "{text}");
    }
}

#[test]
fn times_are_read_as_platforms_print_them() {
    let full = cell::parse_time("2025.01.31 23:59:58").unwrap();
    assert_eq!(cell::parse_time("2025-01-31T23:59:58"), Some(full));
    assert_eq!(cell::parse_time("2025.01.31 23:59").unwrap().as_hms(), (23, 59, 0));
    let fine = cell::parse_time("2025.01.31 23:59:58.25").unwrap();
    assert_eq!((fine - full).whole_microseconds(), 250_000);
    for text in [
        "",
        "2025.01.31",
        "2025.02.30 00:00",
        "2025.1.31 00:00",
        "2025.01.31 24:00:00",
        "2025.01.31 23:59:58.",
        "25.01.31 00:00",
        "2025.01.31 00:00:00:00",
    ] {
        assert_eq!(cell::parse_time(text), None, "{text}");
    }
}
