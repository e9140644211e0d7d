//! Real histories against what is known of them. The files are nobody's to publish, so they lie
//! beside the project, and these tests say that they were skipped where there are none.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use rust_decimal::Decimal;
use schemas::event::{Change, CloseReason};
use schemas::ids::MasterTicket;
use schemas::position::Side;
use serde_json::{Value, json};
use time::PrimitiveDateTime;

use super::*;

/// Folder of the histories: below `LOCKSTEP_SHARED`, or in a `shared` beside a parent folder.
fn folder() -> Option<PathBuf> {
    let inside = |shared: PathBuf| Some(shared.join("data/histories")).filter(|f| f.is_dir());
    if let Some(shared) = std::env::var_os("LOCKSTEP_SHARED") {
        let found = inside(PathBuf::from(&shared));
        assert!(found.is_some(), "LOCKSTEP_SHARED={shared:?} has no data/histories");
        return found;
    }
    let start = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    start.ancestors().find_map(|parent| inside(parent.join("shared")))
}

/// Runs a check on every file; says so where there are none.
fn for_each_file(check: impl Fn(&History, &Value)) {
    let Some(folder) = folder() else {
        // Straight to stderr: the harness keeps what a passing test prints.
        let line = "SKIPPED: no shared histories beside the project and no LOCKSTEP_SHARED";
        writeln!(std::io::stderr(), "{line}").unwrap();
        return;
    };
    let expected = std::fs::read_to_string(folder.join("expected.json")).unwrap();
    let expected: BTreeMap<String, Value> = serde_json::from_str(&expected).unwrap();
    assert_eq!(expected.len(), 10, "a file was added or lost; look at it before changing this");
    for (name, facts) in expected {
        println!("{name}");
        check(&load(folder.join(&name)).unwrap(), &facts);
    }
}

/// `2015.12.01 00:55:00`, to the length of the fact.
fn clock(at: PrimitiveDateTime, like: &str) -> String {
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second) = at.as_hms();
    let month = u8::from(month);
    let full = format!("{year}.{month:02}.{day:02} {hour:02}:{minute:02}:{second:02}");
    full.chars().take(like.len()).collect()
}

fn kind_name(kind: HistoryKind) -> &'static str {
    match kind {
        HistoryKind::Mt4Statement => "MT4 statement",
        HistoryKind::Mt4Tester => "MT4 tester",
        HistoryKind::Mt5History => "MT5 history",
        HistoryKind::Mt5Tester => "MT5 tester",
        HistoryKind::Mql5Signal => "MQL5 signal history",
        HistoryKind::Simple => "simple",
    }
}

fn most_at_once(times: impl Iterator<Item = PrimitiveDateTime>, like: &Value) -> Value {
    let mut counts = BTreeMap::new();
    for at in times {
        *counts.entry(at).or_insert(0_u64) += 1;
    }
    let most = counts.values().copied().max().unwrap();
    let (at, _) = counts.into_iter().find(|(_, count)| *count == most).unwrap();
    json!({ "count": most, "at": clock(at, like["at"].as_str().unwrap()) })
}

/// Most rows open at once, with opens or closes first within a second.
fn most_open(trades: &[HistoryTrade], opens_first: bool) -> u64 {
    let mut changes = Vec::new();
    for trade in trades {
        changes.push((trade.opened_at, !opens_first, 1_i64));
        changes.extend(trade.close.iter().map(|close| (close.at, opens_first, -1)));
    }
    changes.sort();
    let mut open = 0;
    let most = changes.iter().map(|(_, _, change)| {
        open += change;
        open
    });
    most.max().unwrap().try_into().unwrap()
}

fn on_both_sides(trades: &[HistoryTrade]) -> Vec<String> {
    let mut both = BTreeSet::new();
    for buy in trades.iter().filter(|t| t.side == Side::Buy) {
        for sell in trades.iter().filter(|t| t.side == Side::Sell && t.symbol == buy.symbol) {
            let ends_after = |a: &HistoryTrade, b: &HistoryTrade| {
                a.close.as_ref().is_none_or(|close| close.at > b.opened_at)
            };
            if ends_after(buy, sell) && ends_after(sell, buy) {
                both.insert(buy.symbol.to_string());
            }
        }
    }
    both.into_iter().collect()
}

fn marks(history: &History) -> BTreeMap<&'static str, u64> {
    let mut marks = BTreeMap::new();
    for trade in &history.trades {
        let reason = match trade.close.as_ref().map(|close| close.reason) {
            Some(CloseReason::StopLoss) => "sl",
            Some(CloseReason::TakeProfit) => "tp",
            Some(CloseReason::StopOut) => "so",
            _ => "",
        };
        for mark in [
            reason,
            if trade.split_to.is_some() { "to" } else { "" },
            if trade.split_from.is_some() { "from" } else { "" },
        ] {
            *marks.entry(mark).or_insert(0) += 1;
        }
    }
    marks.remove("");
    marks
}

fn number_of(history: &History, filter: impl Fn(&PendingOutcome) -> bool) -> usize {
    history.pendings.iter().filter(|pending| filter(&pending.outcome)).count()
}

fn tickets(history: &History) -> Vec<MasterTicket> {
    // A tester of MT5 has no positions; its facts name the deals.
    if history.kind == HistoryKind::Mt5Tester {
        return history.deals.iter().map(|deal| MasterTicket::new(deal.id).unwrap()).collect();
    }
    history.trades.iter().map(|trade| trade.ticket).collect()
}

/// The value that a fact of expected.json should have.
fn fact(history: &History, name: &str, like: &Value) -> Value {
    let trades = &history.trades;
    let closed = || trades.iter().filter_map(|trade| trade.close.as_ref());
    match name {
        "kind" => json!(kind_name(history.kind)),
        "encoding" => match history.source.encoding {
            "UTF-16LE" => json!("utf-16"),
            _ => json!("ascii"),
        },
        "bytes" => json!(std::fs::metadata(&history.source.file).unwrap().len()),
        "closed_trades" => json!(closed().count()),
        "open_trades" => json!(trades.len() - closed().count()),
        "lots_by_symbol" => {
            let mut lots: BTreeMap<String, Decimal> = BTreeMap::new();
            for trade in trades {
                *lots.entry(trade.symbol.to_string()).or_default() += trade.lots.get();
            }
            // Compared as numbers: the facts keep trailing zeros.
            let same = like.as_object().unwrap().iter().all(|(symbol, value)| {
                lots.remove(symbol) == Some(value.as_str().unwrap().parse().unwrap())
            });
            if same && lots.is_empty() { like.clone() } else { json!(format!("{lots:?} left")) }
        }
        "tickets" if like.is_null() => {
            let numbers: BTreeSet<u64> = trades
                .iter()
                .map(|trade| trade.ticket.get())
                .chain(history.pendings.iter().map(|pending| pending.ticket.get()))
                .collect();
            let given = (1..=numbers.len() as u64).collect::<BTreeSet<_>>() == numbers;
            if given { Value::Null } else { json!("not 1 to N") }
        }
        "tickets" => {
            let all = tickets(history);
            let text = |ticket: Option<&MasterTicket>| ticket.unwrap().to_string();
            json!({
                "first": text(all.first()), "last": text(all.last()),
                "min": text(all.iter().min()), "max": text(all.iter().max()),
            })
        }
        "first_open" => {
            json!(clock(trades.iter().map(|t| t.opened_at).min().unwrap(), like.as_str().unwrap()))
        }
        "last_close" => {
            json!(clock(closed().map(|c| c.at).max().unwrap(), like.as_str().unwrap()))
        }
        "max_open_closes_first" => json!(most_open(trades, false)),
        "max_open_opens_first" => json!(most_open(trades, true)),
        "max_open_in_row_order" => {
            let mut open = 0_i64;
            let most = history.deals.iter().map(|deal| {
                open += if deal.direction == DealDirection::In { 1 } else { -1 };
                open
            });
            json!(most.max().unwrap())
        }
        "most_closes_at_once" => most_at_once(closed().map(|close| close.at), like),
        "most_opens_at_once" => most_at_once(trades.iter().map(|trade| trade.opened_at), like),
        "symbols_open_on_both_sides" => json!(on_both_sides(trades)),
        "pending_removed" => {
            json!(number_of(history, |o| matches!(o, PendingOutcome::Cancelled { .. })))
        }
        "pending_working" => json!(number_of(history, |o| *o == PendingOutcome::Working)),
        "balance_rows" => json!(history.balances.len()),
        "marks" => json!(marks(history)),
        "trades_by_magic" => {
            let mut counts = BTreeMap::new();
            for trade in trades {
                let magic = trade.magic.map_or("none".to_owned(), |magic| magic.to_string());
                *counts.entry(magic).or_insert(0) += 1;
            }
            json!(counts)
        }
        "partial_close_links" => {
            let links = trades.iter().filter_map(|trade| {
                trade.split_to.map(|to| (trade.ticket.to_string(), to.to_string()))
            });
            let links: BTreeSet<_> = links.collect();
            let wanted: BTreeSet<(String, String)> = serde_json::from_value(like.clone()).unwrap();
            if links == wanted { like.clone() } else { json!(links) }
        }
        "deals_by_direction" => {
            let count =
                |direction| history.deals.iter().filter(|deal| deal.direction == direction).count();
            json!({
                "balance": history.balances.len(),
                "in": count(DealDirection::In), "out": count(DealDirection::Out),
            })
        }
        "orders_by_state" => json!(history.source.orders_by_state),
        "rows_by_type" => json!({
            "buy": trades.iter().filter(|trade| trade.side == Side::Buy).count(),
            "sell": trades.iter().filter(|trade| trade.side == Side::Sell).count(),
            "close": closed().filter(|close| close.reason == CloseReason::Client).count(),
            "close at stop": closed().filter(|c| c.reason == CloseReason::Unknown).count(),
        }),
        // Two working orders or two trades that look alike are both there.
        "identical_rows_kept" => {
            let mut seen = BTreeSet::new();
            let alike = trades.iter().filter(|trade| {
                let mut same = (*trade).clone();
                (same.row, same.ticket) = (0, MasterTicket::MIN);
                !seen.insert(format!("{same:?}"))
            });
            json!(alike.count())
        }
        other => panic!("a fact that nothing compares: {other}"),
    }
}

#[test]
fn every_known_fact_of_the_real_histories_is_found() {
    for_each_file(|history, facts| {
        for (name, expected) in facts.as_object().unwrap() {
            assert_eq!(&fact(history, name, expected), expected, "{name}");
        }
    });
}

#[test]
fn timelines_of_the_real_histories_end_with_what_is_open_in_the_file() {
    for_each_file(|history, _| {
        let book = super::tests::play(&timeline(history));
        let open: Decimal = history
            .trades
            .iter()
            .filter(|trade| trade.close.is_none())
            .map(|trade| trade.lots.get())
            .sum();
        let left: Decimal = book.positions.values().map(|position| position.lots.get()).sum();
        assert_eq!(left, open);
        let working = number_of(history, |outcome| *outcome == PendingOutcome::Working);
        assert_eq!(book.pendings.len(), working);
    });
}

#[test]
fn prices_of_the_steps_trigger_no_stop_before_the_close_that_was_recorded() {
    for_each_file(|history, _| {
        super::tests::assert_no_stop_is_reached_early(&timeline(history));
    });
}

#[test]
fn a_split_trade_of_a_real_statement_is_one_ticket_with_a_volume_change() {
    for_each_file(|history, facts| {
        let Some(links) = facts["partial_close_links"].as_array() else { return };
        let steps = timeline(history);
        for link in links {
            let ticket = |at: usize| link[at].as_str().unwrap().parse::<MasterTicket>().unwrap();
            let of_first: Vec<_> =
                steps.iter().filter(|step| step.change.ticket() == ticket(0)).collect();
            assert!(matches!(of_first[0].change, Change::PositionOpened(_)));
            assert!(matches!(of_first[1].change, Change::VolumeChanged { .. }));
            assert!(matches!(of_first[2].change, Change::PositionClosed { .. }));
            assert_eq!(of_first[1].broker_ticket, ticket(1));
            assert!(steps.iter().all(|step| step.change.ticket() != ticket(1)));
        }
    });
}

#[test]
fn damaged_balances_of_a_real_report_are_named_and_passed_over() {
    for_each_file(|history, _| {
        if history.kind == HistoryKind::Mt5History {
            assert!(history.unsaid.iter().any(|s| s.contains("5 0812.9")), "{:?}", history.unsaid);
        }
    });
}
