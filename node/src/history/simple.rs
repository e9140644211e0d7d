//! Our own CSV layout, for histories that are written by hand.
//!
//! ```csv
//! ticket,open_time,side,lots,symbol,open_price,sl,tp,close_time,close_price,comment,kind
//! 1,2025.03.04 09:00:00,buy,0.30,EURUSD,1.05012,1.04800,,2025.03.04 10:00:00,1.05100,,trade
//! 1,,,0.10,,,,,2025.03.04 09:30:00,1.05050,,part
//! 1,,,,,,1.05012,1.05400,2025.03.04 09:40:00,,,modify
//! 2,2025.03.04 09:05:00,sell limit,0.10,EURUSD,1.05200,,,2025.03.04 09:50:00,,,pending
//! ```
//!
//! | kind | what the row is |
//! |---|---|
//! | `trade`, or empty, or no such column | a trade; `lots` and levels at the open; no `close_time`: open at the end |
//! | `part` | a partial close of the trade `ticket`: `lots` closed, `close_time`, `close_price` |
//! | `modify` | new levels of `ticket` at `close_time`; empty removes a level; `open_price` moves a pending order |
//! | `pending` | an order; `side` is `buy limit`, `sell limit`, `buy stop` or `sell stop`; `close_time` is when it was deleted. If a trade has the same ticket, the order became that trade at its open time |
//!
//! In: the rows, header first. Out: trades and pending orders in the file's order.
//!
//! 1. `part` and `modify` may stand before or after their trade; they take effect by time.
//! 2. Parts never close as much as the trade has; the `trade` row closes the rest.
//! 3. Times are `2025.03.04 09:00:00` or `2025-03-04T09:00:00`, with up to six digits of a second.
//!
//! Not covered: money.

use std::collections::BTreeMap;

use schemas::ids::MasterTicket;
use schemas::quantity::Lots;
use time::PrimitiveDateTime;

use super::cell::{RowReader, TypeWord, parse_type};
use super::error::HistoryError;
use super::mt4_statement::reason_in;
use super::table::TableRow;
use super::{
    History, HistoryPending, HistoryTrade, PendingChange, PendingOutcome, TradeChange,
    TradeChangeKind, TradeClose,
};

const TICKET: usize = 0;
const OPEN_TIME: usize = 1;
const SIDE: usize = 2;
const LOTS: usize = 3;
const SYMBOL: usize = 4;
const OPEN_PRICE: usize = 5;
const STOP: usize = 6;
const TARGET: usize = 7;
const CLOSE_TIME: usize = 8;
const CLOSE_PRICE: usize = 9;
const COMMENT: usize = 10;
const KIND: usize = 11;

/// Columns of the header, in this order; the last may be left out.
pub const COLUMNS: [&str; 12] = [
    "ticket",
    "open_time",
    "side",
    "lots",
    "symbol",
    "open_price",
    "sl",
    "tp",
    "close_time",
    "close_price",
    "comment",
    "kind",
];

/// Whether the first line is the header of our layout.
pub(super) fn is_header(line: &str) -> bool {
    line.starts_with("ticket,open_time,")
}

pub(super) fn parse(mut history: History, rows: &[TableRow]) -> Result<History, HistoryError> {
    let file = history.source.file.clone();
    let Some((header, data)) = rows.split_first() else { return Ok(history) };
    check_header(RowReader { file: &file, row: header })?;
    let mut later = Vec::new();
    for row in data {
        let reader = RowReader { file: &file, row };
        match reader.text(KIND) {
            "" | "trade" => {
                let trade = read_trade(&mut history, reader)?;
                history.trades.push(trade);
            }
            "pending" => {
                let pending = read_pending(&mut history, reader)?;
                history.pendings.push(pending);
            }
            "part" | "modify" => later.push(reader),
            _ => {
                let problem = "is none of trade, part, modify, pending";
                return Err(reader.cell_error(KIND, "kind", problem));
            }
        }
    }
    fill_pendings(&mut history, &file)?;
    // Changes are matched by ticket, so a doubled one must be found before.
    history.check_tickets()?;
    add_changes(&mut history, later)?;
    Ok(history)
}

fn check_header(reader: RowReader<'_>) -> Result<(), HistoryError> {
    let found = reader.row.cells.len();
    if !(KIND..=COLUMNS.len()).contains(&found) {
        return Err(reader.row_error(format!("{found} columns; the layout has 11 or 12")));
    }
    for (index, name) in COLUMNS.iter().enumerate().take(found) {
        if reader.text(index) != *name {
            return Err(reader.cell_error(index, name, "stands where this column belongs"));
        }
    }
    Ok(())
}

fn read_trade(history: &mut History, reader: RowReader<'_>) -> Result<HistoryTrade, HistoryError> {
    let side = match parse_type(reader.text(SIDE)) {
        Some(TypeWord::Trade(side)) => side,
        _ => return Err(reader.cell_error(SIDE, "side", "is neither buy nor sell")),
    };
    let symbol = reader.symbol(SYMBOL, "symbol")?;
    for column in [OPEN_PRICE, STOP, TARGET, CLOSE_PRICE] {
        history.saw_price(&symbol, reader.text(column));
    }
    let opened_at = reader.time(OPEN_TIME, "open_time")?;
    let comment = reader.text(COMMENT).to_owned();
    let close = match reader.time_or_none(CLOSE_TIME, "close_time")? {
        Some(at) => {
            reader.not_before(CLOSE_TIME, "close_time", opened_at, at)?;
            let price = reader.price(CLOSE_PRICE, "close_price")?;
            Some(TradeClose { at, price, reason: reason_in(&comment), seq: None })
        }
        None => None,
    };
    Ok(HistoryTrade {
        row: reader.row.number,
        ticket: reader.ticket(TICKET, "ticket")?,
        side,
        lots: reader.lots(LOTS, "lots")?,
        symbol,
        opened_at,
        opened_seq: None,
        open_price: reader.price(OPEN_PRICE, "open_price")?,
        sl: reader.level(STOP, "sl")?,
        tp: reader.level(TARGET, "tp")?,
        changes: Vec::new(),
        close,
        last_price: None,
        magic: None,
        comment,
        split_to: None,
        split_from: None,
    })
}

fn read_pending(
    history: &mut History,
    reader: RowReader<'_>,
) -> Result<HistoryPending, HistoryError> {
    let kind = match parse_type(reader.text(SIDE)) {
        Some(TypeWord::Pending(kind)) => kind,
        _ => return Err(reader.cell_error(SIDE, "side", "is no kind of pending order")),
    };
    let symbol = reader.symbol(SYMBOL, "symbol")?;
    for column in [OPEN_PRICE, STOP, TARGET] {
        history.saw_price(&symbol, reader.text(column));
    }
    let placed_at = reader.time(OPEN_TIME, "open_time")?;
    let outcome = match reader.time_or_none(CLOSE_TIME, "close_time")? {
        Some(at) => {
            reader.not_before(CLOSE_TIME, "close_time", placed_at, at)?;
            let printed = !reader.text(CLOSE_PRICE).is_empty();
            let price = || reader.price(CLOSE_PRICE, "close_price");
            let market_price = if printed { Some(price()?) } else { None };
            PendingOutcome::Cancelled { at, market_price, seq: None }
        }
        None => PendingOutcome::Working,
    };
    Ok(HistoryPending {
        row: reader.row.number,
        ticket: reader.ticket(TICKET, "ticket")?,
        kind,
        lots: reader.lots(LOTS, "lots")?,
        symbol,
        placed_at,
        placed_seq: None,
        price: reader.price(OPEN_PRICE, "open_price")?,
        sl: reader.level(STOP, "sl")?,
        tp: reader.level(TARGET, "tp")?,
        changes: Vec::new(),
        outcome,
        magic: None,
        comment: reader.text(COMMENT).to_owned(),
    })
}

/// An order whose ticket a trade has became that trade.
fn fill_pendings(history: &mut History, file: &str) -> Result<(), HistoryError> {
    let opened: BTreeMap<MasterTicket, PrimitiveDateTime> =
        history.trades.iter().map(|t| (t.ticket, t.opened_at)).collect();
    for pending in &mut history.pendings {
        let Some(filled_at) = opened.get(&pending.ticket) else { continue };
        let problem = match pending.outcome {
            _ if *filled_at < pending.placed_at => "its trade opens before the order is placed",
            PendingOutcome::Cancelled { .. } => "it is deleted, yet a trade has its ticket",
            PendingOutcome::Working | PendingOutcome::Filled => {
                pending.outcome = PendingOutcome::Filled;
                continue;
            }
        };
        return Err(HistoryError::Row {
            file: file.to_owned(),
            row: pending.row,
            problem: format!("order {}: {problem}", pending.ticket),
        });
    }
    Ok(())
}

/// Applies `part` and `modify` rows in the order of their times.
fn add_changes(history: &mut History, rows: Vec<RowReader<'_>>) -> Result<(), HistoryError> {
    let mut timed = Vec::with_capacity(rows.len());
    for reader in rows {
        timed.push((reader.time(CLOSE_TIME, "close_time")?, reader));
    }
    timed.sort_by_key(|(at, reader)| (*at, reader.row.number));
    let mut trades = BTreeMap::new();
    for (index, trade) in history.trades.iter().enumerate() {
        trades.insert(trade.ticket, (index, trade.lots));
    }
    let mut pendings = BTreeMap::new();
    for (index, pending) in history.pendings.iter().enumerate() {
        pendings.insert(pending.ticket, index);
    }
    for (at, reader) in timed {
        let ticket = reader.ticket(TICKET, "ticket")?;
        let trade = trades.get_mut(&ticket);
        let opened_at =
            trade.as_ref().and_then(|(index, _)| history.trades.get(*index)).map(|t| t.opened_at);
        let pending = pendings.get(&ticket).and_then(|index| history.pendings.get_mut(*index));
        let is_part = reader.text(KIND) == "part";
        match (trade, pending) {
            (_, Some(pending)) if !is_part && waits(pending, opened_at, at) => {
                modify_pending(pending, reader, at)?;
            }
            (Some((index, left)), _) => change_trade(history, *index, left, reader, at)?,
            _ => {
                let problem = "names no trade or order that is there at that time";
                return Err(reader.cell_error(TICKET, "ticket", problem));
            }
        }
    }
    Ok(())
}

/// Whether an order is still waiting at a time.
fn waits(
    pending: &HistoryPending,
    filled_at: Option<PrimitiveDateTime>,
    at: PrimitiveDateTime,
) -> bool {
    match pending.outcome {
        PendingOutcome::Working => true,
        PendingOutcome::Filled => filled_at.is_none_or(|filled| at < filled),
        PendingOutcome::Cancelled { at: end, .. } => at <= end,
    }
}

fn modify_pending(
    pending: &mut HistoryPending,
    reader: RowReader<'_>,
    at: PrimitiveDateTime,
) -> Result<(), HistoryError> {
    reader.not_before(CLOSE_TIME, "close_time", pending.placed_at, at)?;
    let price = if reader.text(OPEN_PRICE).is_empty() {
        pending.changes.last().map_or(pending.price, |change| change.price)
    } else {
        reader.price(OPEN_PRICE, "open_price")?
    };
    let (sl, tp) = (reader.level(STOP, "sl")?, reader.level(TARGET, "tp")?);
    pending.changes.push(PendingChange { at, seq: None, price, sl, tp });
    Ok(())
}

fn change_trade(
    history: &mut History,
    index: usize,
    left: &mut Lots,
    reader: RowReader<'_>,
    at: PrimitiveDateTime,
) -> Result<(), HistoryError> {
    let Some(trade) = history.trades.get_mut(index) else { return Ok(()) };
    reader.not_before(CLOSE_TIME, "close_time", trade.opened_at, at)?;
    if trade.close.as_ref().is_some_and(|close| close.at < at) {
        return Err(reader.cell_error(CLOSE_TIME, "close_time", "is after the trade's close"));
    }
    let kind = if reader.text(KIND) == "part" {
        let rest = left.minus(reader.lots(LOTS, "lots")?);
        *left = rest.ok_or_else(|| {
            reader.cell_error(LOTS, "lots", "leaves nothing; the trade row closes the rest")
        })?;
        let price = reader.price(CLOSE_PRICE, "close_price")?;
        TradeChangeKind::Volume { lots: *left, price, open_price: trade.open_price }
    } else {
        TradeChangeKind::Levels { sl: reader.level(STOP, "sl")?, tp: reader.level(TARGET, "tp")? }
    };
    trade.changes.push(TradeChange { at, seq: None, kind });
    let symbol = trade.symbol.clone();
    for column in [STOP, TARGET, CLOSE_PRICE] {
        history.saw_price(&symbol, reader.text(column));
    }
    Ok(())
}
