//! MT4 strategy tester reports.
//!
//! In: the rows of the page. Out: trades and pending orders, each with the changes that the report
//! records one by one.
//!
//! 1. The report is a list of events in their own order; `seq` of everything is the event's number.
//! 2. A pending order that fills comes back as `buy` or `sell` under the same order number.
//! 3. An order number that was never opened carries on the remainder of a partial close: the
//!    oldest remainder of that size. `unsaid` names each such match.
//!
//! Not covered: the account's currency, which the report does not print; seconds, where the test
//! ran on open prices only.

use std::collections::BTreeMap;

use schemas::event::CloseReason;
use schemas::ids::{MasterTicket, Symbol};
use schemas::position::{PendingKind, Side};
use schemas::quantity::Lots;
use time::PrimitiveDateTime;

use super::cell::{RowReader, TypeWord, parse_type};
use super::error::HistoryError;
use super::table::TableRow;
use super::{
    History, HistoryPending, HistoryTrade, PendingChange, PendingOutcome, TradeChange,
    TradeChangeKind, TradeClose,
};

const NUMBER: usize = 0;
const TIME: usize = 1;
const TYPE: usize = 2;
const ORDER: usize = 3;
const SIZE: usize = 4;
const PRICE: usize = 5;
const STOP: usize = 6;
const TARGET: usize = 7;
const CELLS_NEEDED: usize = 8;

/// Whether a row is the header of the list of events.
pub(super) fn is_header(row: &TableRow) -> bool {
    ["#", "Time", "Type", "Order"].into_iter().enumerate().all(|(i, name)| row.text(i) == name)
}

/// What an event of the report does.
enum Event {
    Open(Side),
    Place(PendingKind),
    Modify,
    Delete,
    Close(CloseReason),
}

fn event_of(word: &str) -> Option<Event> {
    match parse_type(word) {
        Some(TypeWord::Trade(side)) => return Some(Event::Open(side)),
        Some(TypeWord::Pending(kind)) => return Some(Event::Place(kind)),
        Some(TypeWord::StopLimit) => return None,
        None => {}
    }
    Some(match word.to_ascii_lowercase().as_str() {
        "modify" => Event::Modify,
        "delete" | "delete expired" | "expired" => Event::Delete,
        "close" => Event::Close(CloseReason::Client),
        // The test ended with the trade open; nobody decided to close it.
        "close at stop" => Event::Close(CloseReason::Unknown),
        "s/l" => Event::Close(CloseReason::StopLoss),
        "t/p" => Event::Close(CloseReason::TakeProfit),
        "stop out" | "so" => Event::Close(CloseReason::StopOut),
        _ => return None,
    })
}

/// Where an order number leads while the events are read.
struct Book {
    history: History,
    symbol: Symbol,
    /// Order number to index of its trade; aliases of remainders included.
    trades: BTreeMap<MasterTicket, usize>,
    pendings: BTreeMap<MasterTicket, usize>,
    /// Lots still open by index of the trade.
    open: BTreeMap<usize, Lots>,
    /// Time of the event above.
    last_at: Option<PrimitiveDateTime>,
}

pub(super) fn parse(history: History, rows: &[TableRow]) -> Result<History, HistoryError> {
    let file = history.source.file.clone();
    let Some(start) = rows.iter().position(is_header) else { return Ok(history) };
    let (head, events) = rows.split_at(start);
    let mut book = Book {
        symbol: symbol_of(&file, head)?,
        history,
        trades: BTreeMap::new(),
        pendings: BTreeMap::new(),
        open: BTreeMap::new(),
        last_at: None,
    };
    for row in events.iter().skip(1) {
        let cells = &row.cells;
        if cells.len() <= 1 || cells.iter().all(|cell| cell.text.is_empty()) {
            continue;
        }
        book.read_event(RowReader { file: &file, row })?;
    }
    let minutes = book.history.trades.iter().all(|t| t.opened_at.second() == 0);
    if minutes && !book.history.trades.is_empty() {
        book.history.unsaid.push(
            "no open time has seconds: events of one minute are kept together, in the report's order"
                .to_owned(),
        );
    }
    Ok(book.history)
}

/// The symbol row reads `EURUSD (Euro vs US Dollar)`.
fn symbol_of(file: &str, head: &[TableRow]) -> Result<Symbol, HistoryError> {
    let row = head.iter().find(|row| row.text(0) == "Symbol" && row.cells.len() == 2);
    let Some(row) = row else {
        let problem = "no row names the symbol of the test".to_owned();
        return Err(HistoryError::Row { file: file.to_owned(), row: 1, problem });
    };
    let text = row.text(1);
    let name = text.split_once(" (").map_or(text, |(name, _)| name);
    Symbol::new(name)
        .map_err(|_| RowReader { file, row }.cell_error(1, "Symbol", "is not the name of a symbol"))
}

impl Book {
    fn read_event(&mut self, reader: RowReader<'_>) -> Result<(), HistoryError> {
        reader.need_cells(CELLS_NEEDED)?;
        let seq = reader.number(NUMBER, "#")?;
        let at = reader.time(TIME, "Time")?;
        if self.last_at.is_some_and(|last| at < last) {
            return Err(reader.cell_error(TIME, "Time", "is before the event above it"));
        }
        self.last_at = Some(at);
        let order = reader.ticket(ORDER, "Order")?;
        for column in [PRICE, STOP, TARGET] {
            self.history.saw_price(&self.symbol, reader.text(column));
        }
        match event_of(reader.text(TYPE)) {
            Some(Event::Open(side)) => self.open_trade(reader, seq, at, order, side),
            Some(Event::Place(kind)) => self.place(reader, seq, at, order, kind),
            Some(Event::Modify) => self.modify(reader, seq, at, order),
            Some(Event::Delete) => self.delete(reader, seq, at, order),
            Some(Event::Close(reason)) => self.close(reader, seq, at, order, reason),
            None => Err(reader.cell_error(TYPE, "Type", "is no event of a tester report")),
        }
    }

    fn open_trade(
        &mut self,
        reader: RowReader<'_>,
        seq: u64,
        at: PrimitiveDateTime,
        order: MasterTicket,
        side: Side,
    ) -> Result<(), HistoryError> {
        let index = self.history.trades.len();
        if self.trades.insert(order, index).is_some() {
            return Err(reader.cell_error(ORDER, "Order", "was opened before"));
        }
        if let Some(pending) = self.pending_mut(order) {
            pending.outcome = PendingOutcome::Filled;
        }
        let lots = reader.lots(SIZE, "Size")?;
        self.open.insert(index, lots);
        self.history.trades.push(HistoryTrade {
            row: reader.row.number,
            ticket: order,
            side,
            lots,
            symbol: self.symbol.clone(),
            opened_at: at,
            opened_seq: Some(seq),
            open_price: reader.price(PRICE, "Price")?,
            sl: reader.level(STOP, "S / L")?,
            tp: reader.level(TARGET, "T / P")?,
            changes: Vec::new(),
            close: None,
            last_price: None,
            magic: None,
            comment: String::new(),
            split_to: None,
            split_from: None,
        });
        Ok(())
    }

    fn place(
        &mut self,
        reader: RowReader<'_>,
        seq: u64,
        at: PrimitiveDateTime,
        order: MasterTicket,
        kind: PendingKind,
    ) -> Result<(), HistoryError> {
        let index = self.history.pendings.len();
        if self.pendings.insert(order, index).is_some() || self.trades.contains_key(&order) {
            return Err(reader.cell_error(ORDER, "Order", "was placed or opened before"));
        }
        self.history.pendings.push(HistoryPending {
            row: reader.row.number,
            ticket: order,
            kind,
            lots: reader.lots(SIZE, "Size")?,
            symbol: self.symbol.clone(),
            placed_at: at,
            placed_seq: Some(seq),
            price: reader.price(PRICE, "Price")?,
            sl: reader.level(STOP, "S / L")?,
            tp: reader.level(TARGET, "T / P")?,
            changes: Vec::new(),
            outcome: PendingOutcome::Working,
            magic: None,
            comment: String::new(),
        });
        Ok(())
    }

    /// The order if it is still waiting.
    fn pending_mut(&mut self, order: MasterTicket) -> Option<&mut HistoryPending> {
        let index = *self.pendings.get(&order)?;
        let pending = self.history.pendings.get_mut(index)?;
        (pending.outcome == PendingOutcome::Working).then_some(pending)
    }

    fn modify(
        &mut self,
        reader: RowReader<'_>,
        seq: u64,
        at: PrimitiveDateTime,
        order: MasterTicket,
    ) -> Result<(), HistoryError> {
        let sl = reader.level(STOP, "S / L")?;
        let tp = reader.level(TARGET, "T / P")?;
        if let Some(pending) = self.pending_mut(order) {
            let price = reader.price(PRICE, "Price")?;
            pending.changes.push(PendingChange { at, seq: Some(seq), price, sl, tp });
            return Ok(());
        }
        let index = self.open_index(reader, order)?;
        let kind = TradeChangeKind::Levels { sl, tp };
        if let Some(trade) = self.history.trades.get_mut(index) {
            trade.changes.push(TradeChange { at, seq: Some(seq), kind });
        }
        Ok(())
    }

    fn delete(
        &mut self,
        reader: RowReader<'_>,
        seq: u64,
        at: PrimitiveDateTime,
        order: MasterTicket,
    ) -> Result<(), HistoryError> {
        let Some(pending) = self.pending_mut(order) else {
            return Err(reader.cell_error(ORDER, "Order", "deletes an order that does not wait"));
        };
        pending.outcome = PendingOutcome::Cancelled { at, market_price: None, seq: Some(seq) };
        Ok(())
    }

    /// Index of the open trade that an order number means.
    fn open_index(
        &mut self,
        reader: RowReader<'_>,
        order: MasterTicket,
    ) -> Result<usize, HistoryError> {
        let known = self.trades.get(&order).copied();
        if let Some(index) = known.filter(|index| self.open.contains_key(index)) {
            return Ok(index);
        }
        let unknown = || reader.cell_error(ORDER, "Order", "names no trade that is open");
        if known.is_some() {
            return Err(unknown());
        }
        let lots = reader.lots(SIZE, "Size")?;
        let (index, ticket) = self.remainder_of(lots).ok_or_else(unknown)?;
        self.trades.insert(order, index);
        self.history.unsaid.push(format!(
            "order {order} was never opened: taken as the remainder of {lots} lots of {ticket}, \
             the oldest of that size"
        ));
        Ok(index)
    }

    /// The oldest trade that was closed in part and has this volume left.
    fn remainder_of(&self, lots: Lots) -> Option<(usize, MasterTicket)> {
        self.open.iter().find_map(|(index, left)| {
            let trade = self.history.trades.get(*index)?;
            (*left == lots && trade.lots != lots).then_some((*index, trade.ticket))
        })
    }

    fn close(
        &mut self,
        reader: RowReader<'_>,
        seq: u64,
        at: PrimitiveDateTime,
        order: MasterTicket,
        reason: CloseReason,
    ) -> Result<(), HistoryError> {
        let index = self.open_index(reader, order)?;
        let lots = reader.lots(SIZE, "Size")?;
        let price = reader.price(PRICE, "Price")?;
        let open = self.open.remove(&index);
        let (Some(open), Some(trade)) = (open, self.history.trades.get_mut(index)) else {
            return Err(reader.cell_error(ORDER, "Order", "names no trade that is open"));
        };
        if lots > open {
            return Err(reader.cell_error(SIZE, "Size", "is more than the trade has left"));
        }
        let Some(left) = open.minus(lots) else {
            trade.close = Some(TradeClose { at, price, reason, seq: Some(seq) });
            return Ok(());
        };
        self.open.insert(index, left);
        let kind = TradeChangeKind::Volume { lots: left, price, open_price: trade.open_price };
        trade.changes.push(TradeChange { at, seq: Some(seq), kind });
        Ok(())
    }
}
