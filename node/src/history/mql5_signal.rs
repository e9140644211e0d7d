//! MQL5 signal histories: CSV with semicolons, in the two layouts of the site.
//!
//! In: the rows of the file, header first. Out: trades and deleted orders in the file's order.
//!
//! 1. Columns are found by the header; of two with one name the first belongs to the open.
//! 2. The files carry no tickets. Numbers 1..N are given to trades and orders together, by open
//!    time; among equal times the row further down is the older, as the files are newest first.
//!
//! Not covered: which order a trade came from; the files do not say.

use schemas::ids::MasterTicket;
use schemas::position::{PendingKind, Side};

use super::cell::{RowReader, TypeWord, parse_time, parse_type};
use super::error::HistoryError;
use super::mt4_statement::reason_in;
use super::table::TableRow;
use super::{BalanceRow, History, HistoryPending, HistoryTrade, PendingOutcome, TradeClose};

/// Cells a row needs in both layouts: up to the close price of the shorter one.
const CELLS_NEEDED: usize = 8;

/// Where the columns stand.
struct Columns {
    open_price: usize,
    second_volume: Option<usize>,
    stop: Option<usize>,
    target: Option<usize>,
    close_time: usize,
    close_price: usize,
    profit: Option<usize>,
    comment: Option<usize>,
}

const TIME: usize = 0;
const TYPE: usize = 1;
const VOLUME: usize = 2;
const SYMBOL: usize = 3;

/// Whether the first line is the header of a signal history.
pub(super) fn is_header(line: &str) -> bool {
    line.trim_end().starts_with("Time;Type;Volume;Symbol;Price;")
}

fn columns_of(reader: RowReader<'_>) -> Result<Columns, HistoryError> {
    let find = |name: &str, nth: usize| {
        let mut found = reader.row.cells.iter().enumerate().filter(|(_, c)| c.text == name);
        found.nth(nth).map(|(index, _)| index)
    };
    let need = |name: &str, nth: usize| {
        find(name, nth).ok_or_else(|| {
            reader.row_error(format!("the header has no column {name} number {}", nth + 1))
        })
    };
    Ok(Columns {
        open_price: need("Price", 0)?,
        second_volume: find("Volume", 1),
        stop: find("S/L", 0),
        target: find("T/P", 0),
        close_time: need("Time", 1)?,
        close_price: need("Price", 1)?,
        profit: find("Profit", 0),
        comment: find("Comment", 0),
    })
}

pub(super) fn parse(mut history: History, rows: &[TableRow]) -> Result<History, HistoryError> {
    let file = history.source.file.clone();
    let Some((header, data)) = rows.split_first() else { return Ok(history) };
    let columns = columns_of(RowReader { file: &file, row: header })?;
    if columns.stop.is_none() {
        history.unsaid.push("this layout of a signal history has no stops and targets".to_owned());
    }
    for row in data {
        let reader = RowReader { file: &file, row };
        match parse_type(reader.text(TYPE)) {
            Some(TypeWord::Trade(side)) => {
                let trade = read_trade(&mut history, reader, &columns, side)?;
                history.trades.push(trade);
            }
            Some(TypeWord::Pending(kind)) => {
                let pending = read_pending(&mut history, reader, &columns, kind)?;
                history.pendings.push(pending);
            }
            _ if is_money(reader.text(TYPE)) => read_balance(&mut history, reader, &columns),
            _ => return Err(reader.cell_error(TYPE, "Type", "is no kind of row of a signal")),
        }
    }
    number_by_open_time(&mut history);
    Ok(history)
}

fn is_money(word: &str) -> bool {
    let words = ["balance", "credit", "charge", "correction", "bonus", "commission"];
    words.iter().any(|known| word.eq_ignore_ascii_case(known))
}

fn level(
    reader: RowReader<'_>,
    column: Option<usize>,
    name: &'static str,
) -> Result<Option<schemas::quantity::Price>, HistoryError> {
    column.map_or(Ok(None), |index| reader.level(index, name))
}

fn see_prices(
    history: &mut History,
    reader: RowReader<'_>,
    columns: &Columns,
) -> Result<schemas::ids::Symbol, HistoryError> {
    reader.need_cells(CELLS_NEEDED)?;
    let symbol = reader.symbol(SYMBOL, "Symbol")?;
    let prices =
        [Some(columns.open_price), columns.stop, columns.target, Some(columns.close_price)];
    for index in prices.into_iter().flatten() {
        history.saw_price(&symbol, reader.text(index));
    }
    Ok(symbol)
}

fn read_trade(
    history: &mut History,
    reader: RowReader<'_>,
    columns: &Columns,
    side: Side,
) -> Result<HistoryTrade, HistoryError> {
    let symbol = see_prices(history, reader, columns)?;
    let opened_at = reader.time(TIME, "Time")?;
    let comment = columns.comment.map_or("", |index| reader.text(index)).to_owned();
    let close = match reader.time_or_none(columns.close_time, "Time (close)")? {
        Some(at) => {
            reader.not_before(columns.close_time, "Time (close)", opened_at, at)?;
            let price = reader.price(columns.close_price, "Price (close)")?;
            Some(TradeClose { at, price, reason: reason_in(&comment), seq: None })
        }
        None => None,
    };
    let lots = reader.lots(VOLUME, "Volume")?;
    if let Some(second) = columns.second_volume.filter(|index| !reader.text(*index).is_empty()) {
        let closed = reader.lots(second, "Volume (close)")?;
        if closed != lots {
            history.unsaid.push(format!(
                "row {}: opened with {lots} lots and closed with {closed}; when the difference was \
                 closed is not recorded: the trade is played with {lots} to the end",
                reader.row.number
            ));
        }
    }
    Ok(HistoryTrade {
        row: reader.row.number,
        ticket: MasterTicket::MIN,
        side,
        lots,
        symbol,
        opened_at,
        opened_seq: None,
        open_price: reader.price(columns.open_price, "Price")?,
        sl: level(reader, columns.stop, "S/L")?,
        tp: level(reader, columns.target, "T/P")?,
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
    columns: &Columns,
    kind: PendingKind,
) -> Result<HistoryPending, HistoryError> {
    let symbol = see_prices(history, reader, columns)?;
    let placed_at = reader.time(TIME, "Time")?;
    let outcome = match reader.time_or_none(columns.close_time, "Time (close)")? {
        Some(at) => {
            reader.not_before(columns.close_time, "Time (close)", placed_at, at)?;
            let printed = !reader.text(columns.close_price).is_empty();
            let price = || reader.price(columns.close_price, "Price (close)");
            let market_price = if printed { Some(price()?) } else { None };
            PendingOutcome::Cancelled { at, market_price, seq: None }
        }
        None => PendingOutcome::Working,
    };
    Ok(HistoryPending {
        row: reader.row.number,
        ticket: MasterTicket::MIN,
        kind,
        lots: reader.lots(VOLUME, "Volume")?,
        symbol,
        placed_at,
        placed_seq: None,
        price: reader.price(columns.open_price, "Price")?,
        sl: level(reader, columns.stop, "S/L")?,
        tp: level(reader, columns.target, "T/P")?,
        changes: Vec::new(),
        outcome,
        magic: None,
        comment: columns.comment.map_or("", |index| reader.text(index)).to_owned(),
    })
}

fn read_balance(history: &mut History, reader: RowReader<'_>, columns: &Columns) {
    let amount = columns.profit.and_then(|i| reader.money(i, "Profit", &mut history.unsaid));
    history.balances.push(BalanceRow {
        row: reader.row.number,
        ticket: None,
        at: parse_time(reader.text(TIME)),
        amount,
        text: columns.comment.map_or("", |index| reader.text(index)).to_owned(),
    });
}

/// Gives the numbers 1..N by open time, older row first.
fn number_by_open_time(history: &mut History) {
    let trades = history.trades.iter_mut().map(|t| (t.opened_at, t.row, &mut t.ticket));
    let pendings = history.pendings.iter_mut().map(|p| (p.placed_at, p.row, &mut p.ticket));
    let mut all: Vec<_> = trades.chain(pendings).collect();
    all.sort_by_key(|(at, row, _)| (*at, std::cmp::Reverse(*row)));
    for (number, (_, _, ticket)) in (1..).zip(all) {
        *ticket = MasterTicket::new(number).expect("counted from 1 over the rows of a file");
    }
}
