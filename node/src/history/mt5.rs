//! MT5 reports: trade history (HTML, or the same saved as CSV) and strategy tester.
//!
//! In: the rows of the page. Out: trades, pending orders, deals and money rows.
//!
//! 1. A row with one text opens a section, the next row names its columns; columns are found by
//!    name, and of two with one name the first belongs to the open.
//! 2. Where there is a Positions section it says what the trades are. Rows with one position id
//!    are parts of one trade. Without the section the trades come from the deals
//!    ([`super::deals`]).
//! 3. A pending order's number is the ticket of the trade it became.
//! 4. Money cells and sections that hold no trades cannot stop the load.
//!
//! Not covered: stop limit orders; the wire has no such kind, so they are left out and counted.

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use schemas::event::CloseReason;
use schemas::ids::{MasterTicket, Symbol};
use schemas::position::{PendingKind, Side};
use schemas::quantity::{Lots, Price};
use time::PrimitiveDateTime;

use super::cell::{RowReader, TypeWord, lots_of, parse_time, parse_type, parse_whole};
use super::error::HistoryError;
use super::table::TableRow;
use super::{
    BalanceRow, DealDirection, History, HistoryDeal, HistoryKind, HistoryPending, HistoryTrade,
    MarginMode, PendingOutcome, TradeChange, TradeChangeKind, TradeClose, deals,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Section {
    Positions,
    OpenPositions,
    Orders,
    WorkingOrders,
    Deals,
}

/// Section by its title; `None` for the parts that hold no trades.
fn section_of(title: &str) -> Option<Section> {
    Some(match title {
        "Positions" => Section::Positions,
        "Open Positions" => Section::OpenPositions,
        "Orders" => Section::Orders,
        "Working Orders" => Section::WorkingOrders,
        "Deals" => Section::Deals,
        _ => return None,
    })
}

/// Which MT5 report the rows are, if they are one.
pub(super) fn kind_of(rows: &[TableRow]) -> Option<HistoryKind> {
    let titles = || rows.iter().filter_map(TableRow::lone_text);
    let sections = titles().filter_map(section_of);
    let known = sections.into_iter().any(|s| matches!(s, Section::Positions | Section::Deals));
    let tester = titles().any(|title| title == "Strategy Tester Report");
    known.then_some(if tester { HistoryKind::Mt5Tester } else { HistoryKind::Mt5History })
}

/// Stops and targets of an order, for the trade that it opened.
#[derive(Debug, Clone)]
pub(super) struct OrderLevels {
    pub(super) sl: Option<Price>,
    pub(super) tp: Option<Price>,
}

/// One row of Positions or Open Positions.
struct PositionRow {
    row: u64,
    ticket: MasterTicket,
    symbol: Symbol,
    side: Side,
    lots: Lots,
    opened_at: PrimitiveDateTime,
    open_price: Price,
    sl: Option<Price>,
    tp: Option<Price>,
    close: Option<(PrimitiveDateTime, Price)>,
    last_price: Option<Price>,
    comment: String,
}

/// What the sections hold, before trades are made of it.
#[derive(Default)]
struct Report {
    positions: Vec<PositionRow>,
    orders: BTreeMap<u64, OrderLevels>,
    stop_limits: usize,
    pendings: Vec<HistoryPending>,
    has_positions: bool,
}

pub(super) fn parse(mut history: History, rows: &[TableRow]) -> Result<History, HistoryError> {
    let file = history.source.file.clone();
    let mut report = Report::default();
    let mut section = None;
    let mut header: Option<&TableRow> = None;
    for row in rows {
        if let Some(title) = row.lone_text() {
            section = section_of(title);
            header = None;
            report.has_positions |= section == Some(Section::Positions);
            continue;
        }
        let reader = RowReader { file: &file, row };
        match (section, header) {
            (None, _) => read_head(&mut history, row),
            // Results follow the deals without a title in some reports; an empty row ends nothing.
            (Some(_), None) if row.text(0).ends_with("Time") => header = Some(row),
            (Some(_), None) => {}
            (Some(section), Some(header)) => {
                if is_total(row) {
                    continue;
                }
                let columns = Columns { reader, header };
                read_row(&mut history, &mut report, section, columns)?;
            }
        }
    }
    finish(history, report)
}

/// Sums stand below an empty first cell that is wide in HTML, or several of them in CSV.
fn is_total(row: &TableRow) -> bool {
    let wide = row.cells.first().is_none_or(|cell| cell.colspan > 1);
    row.text(0).is_empty() && (wide || row.text(1).is_empty())
}

fn read_head(history: &mut History, row: &TableRow) {
    let value = row.cells.iter().skip(1).map(|c| c.text.as_str()).find(|text| !text.is_empty());
    let Some(value) = value else { return };
    match row.text(0) {
        "Currency:" => history.source.currency = Some(value.to_owned()),
        "Account:" => {
            let inside = value.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')'));
            let Some((inside, _)) = inside else { return };
            let mut words = inside.split(',').map(str::trim);
            history.source.currency = words.next().filter(|w| !w.is_empty()).map(str::to_owned);
            history.source.margin_mode = words.find_map(|word| match word {
                "Hedge" => Some(MarginMode::Hedging),
                "Netting" => Some(MarginMode::Netting),
                _ => None,
            });
        }
        _ => {}
    }
}

/// A row together with the header of its section.
#[derive(Clone, Copy)]
struct Columns<'a> {
    reader: RowReader<'a>,
    header: &'a TableRow,
}

impl Columns<'_> {
    fn find(&self, name: &str, nth: usize) -> Option<usize> {
        let mut found = self.header.cells.iter().enumerate().filter(|(_, c)| c.text == name);
        found.nth(nth).map(|(index, _)| index)
    }

    /// Index of a column that the section must have.
    fn at(&self, name: &str, nth: usize) -> Result<usize, HistoryError> {
        self.find(name, nth).ok_or_else(|| {
            let header = RowReader { file: self.reader.file, row: self.header };
            header.row_error(format!("the section has no column {name} number {}", nth + 1))
        })
    }

    fn optional_text(&self, name: &str) -> String {
        self.find(name, 0).map_or("", |index| self.reader.text(index)).to_owned()
    }
}

fn read_row(
    history: &mut History,
    report: &mut Report,
    section: Section,
    columns: Columns<'_>,
) -> Result<(), HistoryError> {
    match section {
        Section::Positions | Section::OpenPositions => {
            let row = read_position(history, columns, section == Section::OpenPositions)?;
            report.positions.push(row);
        }
        Section::Orders | Section::WorkingOrders => read_order(history, report, columns)?,
        Section::Deals => read_deal(history, columns)?,
    }
    Ok(())
}

fn read_position(
    history: &mut History,
    columns: Columns<'_>,
    still_open: bool,
) -> Result<PositionRow, HistoryError> {
    let reader = columns.reader;
    let symbol = reader.symbol(columns.at("Symbol", 0)?, "Symbol")?;
    let kind = columns.at("Type", 0)?;
    let Some(TypeWord::Trade(side)) = parse_type(reader.text(kind)) else {
        return Err(reader.cell_error(kind, "Type", "is neither buy nor sell"));
    };
    let (price, stop, target) =
        (columns.at("Price", 0)?, columns.at("S / L", 0)?, columns.at("T / P", 0)?);
    for index in [price, stop, target] {
        history.saw_price(&symbol, reader.text(index));
    }
    let opened_at = reader.time(columns.at("Time", 0)?, "Time")?;
    let (mut close, mut last_price) = (None, None);
    if still_open {
        let market = columns.find("Market Price", 0).or(columns.find("Price", 1));
        if let Some(market) = market {
            last_price = Some(reader.price(market, "Market Price")?);
        }
    } else {
        let (at, close_price) = (columns.at("Time", 1)?, columns.at("Price", 1)?);
        history.saw_price(&symbol, reader.text(close_price));
        let closed_at = reader.time(at, "Time (close)")?;
        reader.not_before(at, "Time (close)", opened_at, closed_at)?;
        close = Some((closed_at, reader.price(close_price, "Price (close)")?));
    }
    Ok(PositionRow {
        row: reader.row.number,
        ticket: reader.ticket(columns.at("Position", 0)?, "Position")?,
        symbol,
        side,
        lots: reader.lots(columns.at("Volume", 0)?, "Volume")?,
        opened_at,
        open_price: reader.price(price, "Price")?,
        sl: reader.level(stop, "S / L")?,
        tp: reader.level(target, "T / P")?,
        close,
        last_price,
        comment: reader.row.hidden.clone(),
    })
}

/// `0.3 / 0` is wanted and filled; a lone number is wanted.
fn wanted_lots(columns: Columns<'_>) -> Result<Lots, HistoryError> {
    let index = columns.at("Volume", 0)?;
    let text = columns.reader.text(index);
    let wanted = text.split_once('/').map_or(text, |(wanted, _)| wanted);
    lots_of(wanted)
        .ok_or_else(|| columns.reader.cell_error(index, "Volume", "is not a volume above 0"))
}

fn read_order(
    history: &mut History,
    report: &mut Report,
    columns: Columns<'_>,
) -> Result<(), HistoryError> {
    let reader = columns.reader;
    let number = columns.at("Order", 0)?;
    let ticket = reader.ticket(number, "Order")?;
    let symbol = reader.symbol(columns.at("Symbol", 0)?, "Symbol")?;
    let sl = reader.level(columns.at("S / L", 0)?, "S / L")?;
    let tp = reader.level(columns.at("T / P", 0)?, "T / P")?;
    let state = columns.optional_text("State");
    *history.source.orders_by_state.entry(state.clone()).or_insert(0) += 1;
    if report.orders.insert(ticket.get(), OrderLevels { sl, tp }).is_some() {
        return Err(reader.cell_error(number, "Order", "stands in the file twice"));
    }
    let kind_at = columns.at("Type", 0)?;
    let kind = match parse_type(reader.text(kind_at)) {
        // Market orders are known by their deals, `close by` orders too.
        Some(TypeWord::Trade(_)) => return Ok(()),
        None if reader.text(kind_at).eq_ignore_ascii_case("close by") => return Ok(()),
        Some(TypeWord::StopLimit) => {
            report.stop_limits += 1;
            return Ok(());
        }
        Some(TypeWord::Pending(kind)) => kind,
        None => return Err(reader.cell_error(kind_at, "Type", "is no kind of order")),
    };
    let price_at = columns.at("Price", 0)?;
    for index in [price_at, columns.at("S / L", 0)?, columns.at("T / P", 0)?] {
        history.saw_price(&symbol, reader.text(index));
    }
    let pending = read_pending(columns, ticket, symbol, kind, &state, OrderLevels { sl, tp })?;
    report.pendings.push(pending);
    Ok(())
}

fn read_pending(
    columns: Columns<'_>,
    ticket: MasterTicket,
    symbol: Symbol,
    kind: PendingKind,
    state: &str,
    levels: OrderLevels,
) -> Result<HistoryPending, HistoryError> {
    let reader = columns.reader;
    let placed_at = reader.time(columns.at("Open Time", 0)?, "Open Time")?;
    // A working order has no time of its end, or no such column at all.
    let ended = match columns.find("Time", 0) {
        Some(index) if !matches!(state, "placed" | "started") => {
            let at = reader.time_or_none(index, "Time")?;
            at.map(|at| reader.not_before(index, "Time", placed_at, at).map(|()| at)).transpose()?
        }
        _ => None,
    };
    let outcome = match ended {
        Some(at) => PendingOutcome::Cancelled { at, market_price: None, seq: None },
        None => PendingOutcome::Working,
    };
    Ok(HistoryPending {
        row: reader.row.number,
        ticket,
        kind,
        lots: wanted_lots(columns)?,
        symbol,
        placed_at,
        placed_seq: None,
        price: reader.price(columns.at("Price", 0)?, "Price")?,
        sl: levels.sl,
        tp: levels.tp,
        changes: Vec::new(),
        outcome,
        magic: None,
        comment: columns.optional_text("Comment"),
    })
}

fn read_deal(history: &mut History, columns: Columns<'_>) -> Result<(), HistoryError> {
    let reader = columns.reader;
    let kind = columns.at("Type", 0)?;
    let direction = columns.at("Direction", 0)?;
    let side = match parse_type(reader.text(kind)) {
        Some(TypeWord::Trade(side)) => side,
        _ if reader.text(direction).is_empty() && !reader.text(kind).is_empty() => {
            read_balance(history, columns);
            return Ok(());
        }
        _ => return Err(reader.cell_error(kind, "Type", "is no kind of deal")),
    };
    let direction = match reader.text(direction) {
        "in" => DealDirection::In,
        "out" => DealDirection::Out,
        "in/out" | "inout" => DealDirection::InOut,
        "out by" => DealDirection::OutBy,
        _ => {
            return Err(reader.cell_error(
                direction,
                "Direction",
                "is none of in, out, in/out, out by",
            ));
        }
    };
    let symbol = reader.symbol(columns.at("Symbol", 0)?, "Symbol")?;
    let price = columns.at("Price", 0)?;
    history.saw_price(&symbol, reader.text(price));
    if let Some(balance) = columns.find("Balance", 0) {
        reader.money(balance, "Balance", &mut history.unsaid);
    }
    history.deals.push(HistoryDeal {
        row: reader.row.number,
        id: reader.number(columns.at("Deal", 0)?, "Deal")?,
        at: reader.time(columns.at("Time", 0)?, "Time")?,
        symbol,
        side,
        direction,
        lots: reader.lots(columns.at("Volume", 0)?, "Volume")?,
        price: reader.price(price, "Price")?,
        order: reader.ticket(columns.at("Order", 0)?, "Order")?.get(),
        comment: columns.optional_text("Comment"),
    });
    Ok(())
}

fn read_balance(history: &mut History, columns: Columns<'_>) {
    let reader = columns.reader;
    let text = |name| columns.find(name, 0).map_or("", |index| reader.text(index));
    let amount = columns.find("Profit", 0);
    history.balances.push(BalanceRow {
        row: reader.row.number,
        ticket: parse_whole(text("Deal")),
        at: parse_time(text("Time")),
        amount: amount.and_then(|index| reader.money(index, "Profit", &mut history.unsaid)),
        text: columns.optional_text("Comment"),
    });
}

fn finish(mut history: History, report: Report) -> Result<History, HistoryError> {
    if history.source.margin_mode.is_none()
        && history.deals.iter().any(|deal| deal.direction == DealDirection::InOut)
    {
        history.source.margin_mode = Some(MarginMode::Netting);
    }
    if report.has_positions || !report.positions.is_empty() {
        history.trades = join_positions(&mut history, report.positions)?;
    } else {
        deals::open_trades_from(&mut history, &report.orders)?;
    }
    if report.stop_limits > 0 {
        history.unsaid.push(format!(
            "stop limit orders left out: {}; there is no event for them, and a trade that came \
             from one is played as opened at market",
            report.stop_limits
        ));
    }
    history.pendings = report.pendings;
    settle_pendings(&mut history);
    Ok(history)
}

/// Rows of one position id become one trade with partial closes.
fn join_positions(
    history: &mut History,
    rows: Vec<PositionRow>,
) -> Result<Vec<HistoryTrade>, HistoryError> {
    let reasons = deals::reasons_of_closes(&history.deals);
    let mut order = Vec::new();
    let mut parts: BTreeMap<MasterTicket, Vec<PositionRow>> = BTreeMap::new();
    for row in rows {
        let group = parts.entry(row.ticket).or_default();
        if group.is_empty() {
            order.push(row.ticket);
        }
        group.push(row);
    }
    let mut trades = Vec::with_capacity(order.len());
    for ticket in order {
        let mut group = parts.remove(&ticket).unwrap_or_default();
        // Open at the end of the file comes after every close.
        group.sort_by_key(|part| (part.close.is_none(), part.close.map(|(at, _)| at), part.row));
        if group.len() > 1 {
            history.unsaid.push(format!(
                "position {ticket} stands in {} rows: they are played as partial closes of one trade",
                group.len()
            ));
        }
        trades.push(join_parts(&history.source.file, group, &reasons)?);
    }
    Ok(trades)
}

fn join_parts(
    file: &str,
    group: Vec<PositionRow>,
    reasons: &BTreeMap<deals::CloseKey, CloseReason>,
) -> Result<HistoryTrade, HistoryError> {
    let total: Decimal = group.iter().map(|part| part.lots.get()).sum();
    let (first, last) = match (group.first(), group.last()) {
        (Some(first), Some(last)) => (first, last),
        _ => unreachable!("a group is made with its first row"),
    };
    let row_error = |row: u64, problem: &str| HistoryError::Row {
        file: file.to_owned(),
        row,
        problem: format!("position {}: {problem}", first.ticket),
    };
    let lots =
        Lots::new(total).map_err(|_| row_error(first.row, "its rows add up to too many lots"))?;
    let mut left = lots;
    let mut changes = Vec::new();
    for pair in group.windows(2) {
        let [part, next] = pair else { continue };
        if (&part.symbol, part.side) != (&next.symbol, next.side) {
            return Err(row_error(next.row, "another symbol or side than its other rows"));
        }
        let (Some((at, price)), Some(rest)) = (part.close, left.minus(part.lots)) else {
            return Err(row_error(next.row, "stands twice among the open positions"));
        };
        left = rest;
        let kind = TradeChangeKind::Volume { lots: left, price, open_price: first.open_price };
        changes.push(TradeChange { at, seq: None, kind });
    }
    let close = last.close.map(|(at, price)| {
        let key = (at, last.symbol.clone(), last.side, price);
        let reason = reasons.get(&key).copied().unwrap_or(CloseReason::Unknown);
        TradeClose { at, price, reason, seq: None }
    });
    Ok(HistoryTrade {
        row: first.row,
        ticket: first.ticket,
        side: first.side,
        lots,
        symbol: first.symbol.clone(),
        opened_at: first.opened_at,
        opened_seq: None,
        open_price: first.open_price,
        sl: last.sl,
        tp: last.tp,
        changes,
        close,
        last_price: last.last_price,
        magic: None,
        comment: first.comment.clone(),
        split_to: None,
        split_from: None,
    })
}

/// Orders whose number a trade has were filled. Another that the report calls filled added to
/// (or closed) a position that was there, and is gone at that time like a deleted one.
fn settle_pendings(history: &mut History) {
    let tickets: BTreeMap<MasterTicket, PrimitiveDateTime> =
        history.trades.iter().map(|t| (t.ticket, t.opened_at)).collect();
    for pending in &mut history.pendings {
        if tickets.get(&pending.ticket).is_some_and(|opened| *opened >= pending.placed_at) {
            pending.outcome = PendingOutcome::Filled;
        }
    }
}
