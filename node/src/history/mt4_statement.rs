//! MT4 account statements, plain and detailed.
//!
//! In: the rows of the page. Out: trades, pending orders and balance rows in the file's order.
//!
//! 1. The section decides what a row is; the first cell of a data row is the ticket.
//! 2. Magic and comment come from the `title` of the ticket cell, or from the row without a ticket
//!    that may follow; a comment is never split at digits that are not a leading `#magic`.
//! 3. A trade printed with 0.00 lots was closed by an opposite one; it takes the size of that.
//!
//! Not covered: whether a trade came from a pending order; the statement does not say.

use rust_decimal::Decimal;
use schemas::event::CloseReason;
use schemas::ids::MasterTicket;
use schemas::quantity::Lots;

use super::cell::{RowReader, TypeWord, parse_decimal, parse_time, parse_type, parse_whole};
use super::error::HistoryError;
use super::table::TableRow;
use super::{BalanceRow, History, HistoryPending, HistoryTrade, PendingOutcome, TradeClose};

// Cells of a row, the same in all sections.
const TICKET: usize = 0;
const OPEN_TIME: usize = 1;
const TYPE: usize = 2;
const SIZE: usize = 3;
const ITEM: usize = 4;
const PRICE: usize = 5;
const STOP: usize = 6;
const TARGET: usize = 7;
const CLOSE_TIME: usize = 8;
const CLOSE_PRICE: usize = 9;
/// Where a deleted order has its reason and a working order its comment.
const REASON: usize = 10;
/// Cells that every trade and order has.
const CELLS_NEEDED: usize = 10;
/// Width of the blank first cell of the row that repeats magic and comment.
const COMMENT_ROW_BLANK: usize = 9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Section {
    Head,
    Closed,
    Open,
    Working,
    Summary,
}

/// Who the comment row after a data row belongs to.
#[derive(Debug, Clone, Copy)]
enum Last {
    Trade,
    Pending,
    Other,
}

pub(super) fn parse(mut history: History, rows: &[TableRow]) -> Result<History, HistoryError> {
    let mut section = Section::Head;
    let mut last = Last::Other;
    let mut zero_lots = Vec::new();
    for row in rows {
        if let Some(next) = section_of(row) {
            section = next;
            continue;
        }
        match section {
            Section::Head => read_head(&mut history, row),
            Section::Summary => {}
            Section::Closed | Section::Open | Section::Working => {
                if is_comment_row(row) {
                    add_comment(&mut history, row, last);
                } else if is_data_row(row) {
                    last = read_row(&mut history, row, section, &mut zero_lots)?;
                }
            }
        }
    }
    size_closed_by(&mut history, zero_lots)?;
    Ok(history)
}

fn section_of(row: &TableRow) -> Option<Section> {
    Some(match row.lone_text()? {
        "Closed Transactions:" => Section::Closed,
        "Open Trades:" => Section::Open,
        "Working Orders:" => Section::Working,
        "Summary:" | "Details:" => Section::Summary,
        _ => return None,
    })
}

fn read_head(history: &mut History, row: &TableRow) {
    for cell in &row.cells {
        if let Some(currency) = cell.text.strip_prefix("Currency:").map(str::trim) {
            history.source.currency = (!currency.is_empty()).then(|| currency.to_owned());
        }
    }
}

fn is_comment_row(row: &TableRow) -> bool {
    row.cells.len() == 3
        && row.cells.first().is_some_and(|c| c.text.is_empty() && c.colspan == COMMENT_ROW_BLANK)
}

/// Not a header, not a total, not `No transactions`: those have a wide, an empty or a named first
/// cell.
fn is_data_row(row: &TableRow) -> bool {
    row.cells
        .first()
        .is_some_and(|cell| cell.colspan == 1 && !matches!(cell.text.as_str(), "" | "Ticket"))
}

fn add_comment(history: &mut History, row: &TableRow, last: Last) {
    let (magic, comment) = match last {
        Last::Trade => match history.trades.last_mut() {
            Some(trade) => (&mut trade.magic, &mut trade.comment),
            None => return,
        },
        Last::Pending => match history.pendings.last_mut() {
            Some(pending) => (&mut pending.magic, &mut pending.comment),
            None => return,
        },
        Last::Other => return,
    };
    if magic.is_none() {
        *magic = parse_whole(row.text(1));
    }
    if comment.is_empty() {
        row.text(2).clone_into(comment);
    }
}

/// `#magic comment`, or only a comment.
fn split_title(title: &str) -> (Option<u64>, &str) {
    let Some(rest) = title.strip_prefix('#') else { return (None, title) };
    let (number, comment) = rest.split_once(' ').unwrap_or((rest, ""));
    match parse_whole(number) {
        Some(magic) => (Some(magic), comment),
        None => (None, title),
    }
}

/// The number after a word such as `to #`, wherever it stands in the comment.
fn linked_ticket(comment: &str, word: &str) -> Option<MasterTicket> {
    let at = comment.find(word)?;
    // `to #5` inside `into #5` is a person's text and no link.
    let starts_a_word = comment.get(..at)?.chars().next_back().is_none_or(|c| c == ' ' || c == ']');
    let digits: String =
        comment.get(at + word.len()..)?.chars().take_while(char::is_ascii_digit).collect();
    let ticket = parse_whole(&digits).and_then(|number| MasterTicket::new(number).ok());
    ticket.filter(|_| starts_a_word)
}

/// What the server's mark at the end (or start) of a comment says about a close.
pub(super) fn reason_in(comment: &str) -> CloseReason {
    let ends = |marks: [&str; 2]| marks.iter().any(|mark| comment.ends_with(mark));
    if ends(["[sl]", "[sl/gap]"]) {
        CloseReason::StopLoss
    } else if ends(["[tp]", "[tp/gap]"]) {
        CloseReason::TakeProfit
    } else if comment.starts_with("so:") {
        CloseReason::StopOut
    } else {
        CloseReason::Unknown
    }
}

fn read_row(
    history: &mut History,
    row: &TableRow,
    section: Section,
    zero_lots: &mut Vec<usize>,
) -> Result<Last, HistoryError> {
    let file = history.source.file.clone();
    let reader = RowReader { file: &file, row };
    match parse_type(reader.text(TYPE)) {
        Some(TypeWord::Trade(side)) if section != Section::Working => {
            reader.need_cells(CELLS_NEEDED)?;
            let trade = read_trade(history, reader, section, zero_lots)?;
            history.trades.push(HistoryTrade { side, ..trade });
            Ok(Last::Trade)
        }
        Some(TypeWord::Pending(kind)) if section != Section::Open => {
            reader.need_cells(CELLS_NEEDED)?;
            let pending = read_pending(history, reader, section)?;
            history.pendings.push(HistoryPending { kind, ..pending });
            Ok(Last::Pending)
        }
        _ if matches!(reader.text(TYPE), "balance" | "credit") => {
            read_balance(history, reader);
            Ok(Last::Other)
        }
        _ => Err(reader.cell_error(TYPE, "Type", "is no kind of row of this section")),
    }
}

fn read_trade(
    history: &mut History,
    reader: RowReader<'_>,
    section: Section,
    zero_lots: &mut Vec<usize>,
) -> Result<HistoryTrade, HistoryError> {
    let (magic, comment) = reader.row.cells.first().map_or((None, ""), |c| split_title(&c.title));
    let symbol = reader.symbol(ITEM, "Item")?;
    for column in [PRICE, STOP, TARGET, CLOSE_PRICE] {
        history.saw_price(&symbol, reader.text(column));
    }
    let opened_at = reader.time(OPEN_TIME, "Open Time")?;
    let last_price = reader.price(CLOSE_PRICE, "Price")?;
    let close = if section == Section::Closed {
        let at = reader.time(CLOSE_TIME, "Close Time")?;
        reader.not_before(CLOSE_TIME, "Close Time", opened_at, at)?;
        Some(TradeClose { at, price: last_price, reason: reason_in(comment), seq: None })
    } else {
        None
    };
    let lots = if is_zero(reader.text(SIZE)) && linked_ticket(comment, "close hedge by #").is_some()
    {
        zero_lots.push(history.trades.len());
        Lots::new(Decimal::ONE).expect("one lot is a volume; replaced in size_closed_by")
    } else {
        reader.lots(SIZE, "Size")?
    };
    Ok(HistoryTrade {
        row: reader.row.number,
        ticket: reader.ticket(TICKET, "Ticket")?,
        side: schemas::position::Side::Buy,
        lots,
        symbol,
        opened_at,
        opened_seq: None,
        open_price: reader.price(PRICE, "Price")?,
        sl: reader.level(STOP, "S / L")?,
        tp: reader.level(TARGET, "T / P")?,
        changes: Vec::new(),
        last_price: close.is_none().then_some(last_price),
        close,
        magic,
        split_to: linked_ticket(comment, "to #"),
        split_from: linked_ticket(comment, "from #"),
        comment: comment.to_owned(),
    })
}

fn is_zero(text: &str) -> bool {
    parse_decimal(text).is_some_and(|number| number.is_zero())
}

/// Gives the trades that were closed by an opposite one the size of that.
fn size_closed_by(history: &mut History, zero_lots: Vec<usize>) -> Result<(), HistoryError> {
    for index in zero_lots {
        let Some(trade) = history.trades.get(index) else { continue };
        let other = linked_ticket(&trade.comment, "close hedge by #");
        let size = history.trades.iter().find(|t| Some(t.ticket) == other).map(|t| t.lots);
        let Some(size) = size else {
            return Err(HistoryError::Row {
                file: history.source.file.clone(),
                row: trade.row,
                problem: format!("0 lots, and `{}` names no trade of the file", trade.comment),
            });
        };
        let ticket = trade.ticket;
        if let Some(trade) = history.trades.get_mut(index) {
            trade.lots = size;
        }
        history.unsaid.push(format!(
            "trade {ticket} was closed by an opposite trade and its size is printed as 0: \
             the size of the other, {size}, is played"
        ));
    }
    Ok(())
}

fn read_pending(
    history: &mut History,
    reader: RowReader<'_>,
    section: Section,
) -> Result<HistoryPending, HistoryError> {
    let (magic, comment) = reader.row.cells.first().map_or((None, ""), |c| split_title(&c.title));
    let symbol = reader.symbol(ITEM, "Item")?;
    for column in [PRICE, STOP, TARGET, CLOSE_PRICE] {
        history.saw_price(&symbol, reader.text(column));
    }
    let placed_at = reader.time(OPEN_TIME, "Open Time")?;
    let outcome = if section == Section::Closed {
        let at = reader.time(CLOSE_TIME, "Close Time")?;
        reader.not_before(CLOSE_TIME, "Close Time", placed_at, at)?;
        let market_price = Some(reader.price(CLOSE_PRICE, "Price")?);
        PendingOutcome::Cancelled { at, market_price, seq: None }
    } else {
        PendingOutcome::Working
    };
    let comment = if comment.is_empty() { reader.text(REASON) } else { comment };
    Ok(HistoryPending {
        row: reader.row.number,
        ticket: reader.ticket(TICKET, "Ticket")?,
        kind: schemas::position::PendingKind::BuyLimit,
        lots: reader.lots(SIZE, "Size")?,
        symbol,
        placed_at,
        placed_seq: None,
        price: reader.price(PRICE, "Price")?,
        sl: reader.level(STOP, "S / L")?,
        tp: reader.level(TARGET, "T / P")?,
        changes: Vec::new(),
        outcome,
        magic,
        comment: comment.to_owned(),
    })
}

/// A balance row moves no trade: what is damaged in it is noted and does not stop the load.
fn read_balance(history: &mut History, reader: RowReader<'_>) {
    let last = reader.row.cells.len().saturating_sub(1);
    let at = parse_time(reader.text(OPEN_TIME));
    if at.is_none() {
        history.unsaid.push(format!(
            "row {}, column Open Time: the time of a balance row cannot be read; it moves no trade \
             and was passed over",
            reader.row.number
        ));
    }
    history.balances.push(BalanceRow {
        row: reader.row.number,
        ticket: parse_whole(reader.text(TICKET)),
        at,
        amount: reader.money(last, "Profit", &mut history.unsaid),
        text: reader.text(SIZE).to_owned(),
    });
}
