//! Recorded account histories, and the timeline that a master plays from one.
//!
//! In: the bytes of a file that a trading platform wrote (or a CSV of our own layout).
//! Out: a [`History`] with exact decimals and the broker's clock, [`timeline`] with the ordered
//! changes of the account, [`symbols`] with what can be known about the symbols in it.
//!
//! | [`HistoryKind`] | file | found by |
//! |---|---|---|
//! | `Mt4Statement` | MT4 account statement, plain or detailed, HTML | a row `Closed Transactions:` |
//! | `Mt4Tester` | MT4 strategy tester report, HTML | a header `#`, `Time`, `Type`, `Order` |
//! | `Mt5History` | MT5 trade history report, HTML or saved as CSV | a row `Positions` or `Deals` |
//! | `Mt5Tester` | MT5 strategy tester report, HTML | the same, under `Strategy Tester Report` |
//! | `Mql5Signal` | MQL5 signal history, CSV with semicolons | its header line |
//! | `Simple` | CSV of our own, see [`simple`] | its header line |
//!
//! 1. Same bytes, same history, same timeline.
//! 2. What a file does not say is not made up: it stays `None`, and [`History::unsaid`] says so
//!    in a sentence. Where a choice was needed (numbers for trades without tickets, which deal
//!    closes which), the choice is named there too.
//! 3. A cell that moves a trade and cannot be read fails the load, with file, row and column. A
//!    damaged amount of money moves no trade and only leaves a note in `unsaid`.
//! 4. No input makes a parser panic.
//! 5. Every ticket is above zero and names one trade or pending order of the file.
//!
//! Not covered: reports in another language than English; the contract size of a symbol, which
//! no file prints; the time zone of the broker's clock; turning steps into wire events.

mod cell;
mod deals;
mod error;
mod lineage;
mod mql5_signal;
mod mt4_statement;
mod mt4_tester;
mod mt5;
pub mod simple;
mod symbols;
mod table;
mod timeline;
mod unsaid;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

use rust_decimal::Decimal;
use schemas::event::CloseReason;
use schemas::ids::{MasterTicket, Symbol};
use schemas::position::{PendingKind, Side};
use schemas::quantity::{Lots, Price};
use time::PrimitiveDateTime;

pub use error::HistoryError;
pub use symbols::{AssumedContract, SymbolHint, symbols};
pub use timeline::{Step, timeline};

use table::TableRow;

/// Largest file that is read. Chosen: a hundred times the largest statement we have seen.
pub const FILE_BYTES_MAX: u64 = 40 * 1024 * 1024;

/// A made-up history in our own layout: about 40 trades in five symbols over two hours, with bursts,
/// partial closes and two pending orders; flat at the end.
pub const DEMO: &str = include_str!("demo.csv");

/// Layout of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryKind {
    /// MT4 account statement.
    Mt4Statement,
    /// MT4 strategy tester report.
    Mt4Tester,
    /// MT5 trade history report.
    Mt5History,
    /// MT5 strategy tester report.
    Mt5Tester,
    /// MQL5 signal history.
    Mql5Signal,
    /// Our own CSV.
    Simple,
}

/// What the stops and targets of the trades are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// The last levels the trade had; when they were set is not recorded.
    Final,
    /// The levels at the open; later changes are recorded as far as the file has them.
    AtOpen,
}

/// Zone of the broker's clock. No known file states one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClockZone {
    /// The file does not say.
    NotStated,
}

/// Whether an account holds one position a symbol or many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarginMode {
    /// Each opening order makes a position of its own.
    Hedging,
    /// One position a symbol.
    Netting,
}

/// Facts about the file and the account, as printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFacts {
    /// Path as given to [`load`].
    pub file: String,
    /// Encoding the bytes were read in.
    pub encoding: &'static str,
    /// Account currency, where the head names it.
    pub currency: Option<String>,
    /// Zone of the times.
    pub clock_zone: ClockZone,
    /// Hedging or netting, where the head or the deals tell.
    pub margin_mode: Option<MarginMode>,
    /// What `sl` and `tp` of the trades are.
    pub levels: Levels,
    /// Orders by state, where the report has an Orders section.
    pub orders_by_state: BTreeMap<String, usize>,
}

/// End of a trade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TradeClose {
    /// Broker's clock.
    pub at: PrimitiveDateTime,
    /// Price of the close.
    pub price: Price,
    /// Why, as far as comment or event say it.
    pub reason: CloseReason,
    /// Place in the file's own order of events, where it has one.
    pub seq: Option<u64>,
}

/// What changed in an open trade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TradeChangeKind {
    /// Part of it was closed, or volume was added (netting).
    Volume {
        /// Lots after the change, above zero.
        lots: Lots,
        /// Price of the part.
        price: Price,
        /// Open price after the change; another one only where volume was added.
        open_price: Price,
    },
    /// Stop and target after the change.
    Levels {
        /// Stop; `None` is no stop.
        sl: Option<Price>,
        /// Target; `None` is no target.
        tp: Option<Price>,
    },
}

/// A change of an open trade that the file records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TradeChange {
    /// Broker's clock.
    pub at: PrimitiveDateTime,
    /// Place in the file's own order of events, where it has one.
    pub seq: Option<u64>,
    /// What changed.
    pub kind: TradeChangeKind,
}

/// One trade row. A trade that MT4 split is two rows, tied by `split_to` and `split_from`;
/// [`timeline`] makes one logical ticket of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryTrade {
    /// Row in the file, as [`HistoryError`] counts.
    pub row: u64,
    /// Ticket as printed, or the number it was given.
    pub ticket: MasterTicket,
    /// Buy or sell.
    pub side: Side,
    /// Lots of the row; where `changes` alter the volume, lots at the open.
    pub lots: Lots,
    /// Symbol as printed.
    pub symbol: Symbol,
    /// Broker's clock.
    pub opened_at: PrimitiveDateTime,
    /// Place of the open in the file's own order of events, where it has one.
    pub opened_seq: Option<u64>,
    /// Price of the open.
    pub open_price: Price,
    /// Stop; see [`SourceFacts::levels`].
    pub sl: Option<Price>,
    /// Target; see [`SourceFacts::levels`].
    pub tp: Option<Price>,
    /// Changes between open and close, in order.
    pub changes: Vec<TradeChange>,
    /// The end; `None` while open at the end of the file.
    pub close: Option<TradeClose>,
    /// Last price the file shows for a trade that is still open.
    pub last_price: Option<Price>,
    /// Magic number, where printed.
    pub magic: Option<u64>,
    /// Comment as printed, without the magic.
    pub comment: String,
    /// Ticket of the remainder, from `to #n`.
    pub split_to: Option<MasterTicket>,
    /// Ticket this is the remainder of, from `from #n`.
    pub split_from: Option<MasterTicket>,
}

/// What became of a pending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PendingOutcome {
    /// Still there at the end of the file.
    Working,
    /// Deleted, expired or refused.
    Cancelled {
        /// Broker's clock.
        at: PrimitiveDateTime,
        /// Market price then, where printed.
        market_price: Option<Price>,
        /// Place in the file's own order of events, where it has one.
        seq: Option<u64>,
    },
    /// Became the trade of the same ticket, at that trade's open time.
    Filled,
}

/// A change of a pending order that the file records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingChange {
    /// Broker's clock.
    pub at: PrimitiveDateTime,
    /// Place in the file's own order of events, where it has one.
    pub seq: Option<u64>,
    /// Price after the change.
    pub price: Price,
    /// Stop after the change.
    pub sl: Option<Price>,
    /// Target after the change.
    pub tp: Option<Price>,
}

/// One pending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryPending {
    /// Row in the file, as [`HistoryError`] counts.
    pub row: u64,
    /// Ticket as printed, or the number it was given.
    pub ticket: MasterTicket,
    /// What it waits for.
    pub kind: PendingKind,
    /// Lots asked for.
    pub lots: Lots,
    /// Symbol as printed.
    pub symbol: Symbol,
    /// Broker's clock.
    pub placed_at: PrimitiveDateTime,
    /// Place in the file's own order of events, where it has one.
    pub placed_seq: Option<u64>,
    /// Price it waits for.
    pub price: Price,
    /// Stop of the trade it would become.
    pub sl: Option<Price>,
    /// Target of the trade it would become.
    pub tp: Option<Price>,
    /// Changes, in order.
    pub changes: Vec<PendingChange>,
    /// What became of it.
    pub outcome: PendingOutcome,
    /// Magic number, where printed.
    pub magic: Option<u64>,
    /// Comment as printed, without the magic.
    pub comment: String,
}

/// Direction of an MT5 deal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DealDirection {
    /// Opens or adds.
    In,
    /// Closes or reduces.
    Out,
    /// Turns a netting position over.
    InOut,
    /// Closes by an opposite position.
    OutBy,
}

/// One MT5 deal, as printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryDeal {
    /// Row in the file, as [`HistoryError`] counts.
    pub row: u64,
    /// Number of the deal; they are given out in the order of execution.
    pub id: u64,
    /// Broker's clock.
    pub at: PrimitiveDateTime,
    /// Symbol as printed.
    pub symbol: Symbol,
    /// Side of the deal: a `sell` `out` closes a buy.
    pub side: Side,
    /// What it does.
    pub direction: DealDirection,
    /// Lots.
    pub lots: Lots,
    /// Price.
    pub price: Price,
    /// Order that made it.
    pub order: u64,
    /// Comment as printed.
    pub comment: String,
}

/// A row that moves money only: deposit, interest, correction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceRow {
    /// Row in the file, as [`HistoryError`] counts.
    pub row: u64,
    /// Number of the row's own, where printed.
    pub ticket: Option<u64>,
    /// Broker's clock; `None` if damaged.
    pub at: Option<PrimitiveDateTime>,
    /// Amount in the account's currency; `None` if damaged.
    pub amount: Option<Decimal>,
    /// What the row says it is.
    pub text: String,
}

/// A loaded history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// Layout of the file.
    pub kind: HistoryKind,
    /// Facts about file and account.
    pub source: SourceFacts,
    /// Trades in the order of the file.
    pub trades: Vec<HistoryTrade>,
    /// Pending orders in the order of the file.
    pub pendings: Vec<HistoryPending>,
    /// Deals in the order of the file (MT5).
    pub deals: Vec<HistoryDeal>,
    /// Money rows in the order of the file.
    pub balances: Vec<BalanceRow>,
    /// Most digits after the point that a price of the symbol is printed with.
    pub price_digits: BTreeMap<Symbol, u32>,
    /// What the file does not say, and what was chosen instead; sentences for a person.
    pub unsaid: Vec<String>,
}

impl History {
    /// An empty history of a kind, for a parser to fill.
    fn new(kind: HistoryKind, file: &str, encoding: &'static str) -> Self {
        let levels = match kind {
            HistoryKind::Mt4Statement | HistoryKind::Mt5History | HistoryKind::Mql5Signal => {
                Levels::Final
            }
            HistoryKind::Mt4Tester | HistoryKind::Mt5Tester | HistoryKind::Simple => Levels::AtOpen,
        };
        Self {
            kind,
            source: SourceFacts {
                file: file.to_owned(),
                encoding,
                currency: None,
                clock_zone: ClockZone::NotStated,
                margin_mode: None,
                levels,
                orders_by_state: BTreeMap::new(),
            },
            trades: Vec::new(),
            pendings: Vec::new(),
            deals: Vec::new(),
            balances: Vec::new(),
            price_digits: BTreeMap::new(),
            unsaid: Vec::new(),
        }
    }

    /// Takes note of the digits of a printed price.
    fn saw_price(&mut self, symbol: &Symbol, text: &str) {
        let digits = cell::digits_after_point(text);
        let most = self.price_digits.entry(symbol.clone()).or_insert(0);
        *most = (*most).max(digits);
    }

    /// Refuses a ticket that names two things. A filled order and its trade share theirs.
    fn check_tickets(&self) -> Result<(), HistoryError> {
        let twice = |row, ticket: MasterTicket| HistoryError::Row {
            file: self.source.file.clone(),
            row,
            problem: format!("ticket {ticket} stands in the file twice"),
        };
        let mut trades = BTreeSet::new();
        for trade in &self.trades {
            if !trades.insert(trade.ticket) {
                return Err(twice(trade.row, trade.ticket));
            }
        }
        let mut pendings = BTreeSet::new();
        for pending in &self.pendings {
            let filled = pending.outcome == PendingOutcome::Filled;
            if !pendings.insert(pending.ticket) || (!filled && trades.contains(&pending.ticket)) {
                return Err(twice(pending.row, pending.ticket));
            }
        }
        Ok(())
    }
}

/// Reads a history file.
///
/// # Errors
/// [`HistoryError`]: the file cannot be read, is not a known layout, or has a damaged cell that
/// matters to a trade.
pub fn load(path: impl AsRef<Path>) -> Result<History, HistoryError> {
    let path = path.as_ref();
    let file = path.display().to_string();
    let unreadable = |source| HistoryError::Unreadable { file: file.clone(), source };
    let opened = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file that grew or has no length, such as a pipe.
    opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    load_bytes(&file, &bytes)
}

/// Reads a history from memory; `file` is the name that errors show.
///
/// # Errors
/// As [`load`], but for reading the file.
pub fn load_bytes(file: &str, bytes: &[u8]) -> Result<History, HistoryError> {
    let size = bytes.len() as u64;
    if size > FILE_BYTES_MAX {
        return Err(HistoryError::TooLarge {
            file: file.to_owned(),
            bytes: size,
            max: FILE_BYTES_MAX,
        });
    }
    let (text, encoding) = decode(file, bytes)?;
    let mut history = match split(file, &text)? {
        Content::Mt4Statement(rows) => {
            mt4_statement::parse(History::new(HistoryKind::Mt4Statement, file, encoding), &rows)
        }
        Content::Mt4Tester(rows) => {
            mt4_tester::parse(History::new(HistoryKind::Mt4Tester, file, encoding), &rows)
        }
        Content::Mt5(kind, rows) => mt5::parse(History::new(kind, file, encoding), &rows),
        Content::Mql5Signal(rows) => {
            mql5_signal::parse(History::new(HistoryKind::Mql5Signal, file, encoding), &rows)
        }
        Content::Simple(rows) => {
            simple::parse(History::new(HistoryKind::Simple, file, encoding), &rows)
        }
    }?;
    history.check_tickets()?;
    unsaid::add(&mut history);
    Ok(history)
}

/// Decodes by byte order mark; without one the text must be UTF-8, or else is Windows-1252,
/// which MT4 writes on western systems and in which every byte is a character.
fn decode(file: &str, bytes: &[u8]) -> Result<(String, &'static str), HistoryError> {
    let (encoding, mark) = encoding_rs::Encoding::for_bom(bytes).unwrap_or_else(|| {
        let utf8 = std::str::from_utf8(bytes).is_ok();
        (if utf8 { encoding_rs::UTF_8 } else { encoding_rs::WINDOWS_1252 }, 0)
    });
    let body = bytes.get(mark..).unwrap_or_default();
    match encoding.decode_without_bom_handling_and_without_replacement(body) {
        Some(text) => Ok((text.into_owned(), encoding.name())),
        None => Err(HistoryError::NotText {
            file: file.to_owned(),
            encoding: encoding.name(),
            offset: mark + first_bad_byte(encoding, body),
        }),
    }
}

/// Offset of the first byte that the encoding refuses.
fn first_bad_byte(encoding: &'static encoding_rs::Encoding, body: &[u8]) -> usize {
    let mut decoder = encoding.new_decoder_without_bom_handling();
    let mut out = String::with_capacity(body.len().saturating_mul(3).saturating_add(16));
    let (_, read) = decoder.decode_to_string_without_replacement(body, &mut out, true);
    read.saturating_sub(1)
}

/// The rows of a file whose layout is known.
enum Content {
    Mt4Statement(Vec<TableRow>),
    Mt4Tester(Vec<TableRow>),
    Mt5(HistoryKind, Vec<TableRow>),
    Mql5Signal(Vec<TableRow>),
    Simple(Vec<TableRow>),
}

fn split(file: &str, text: &str) -> Result<Content, HistoryError> {
    let start = text.trim_start();
    if start.starts_with('<') { split_html(file, text) } else { split_csv(file, text) }
}

fn split_html(file: &str, text: &str) -> Result<Content, HistoryError> {
    let rows = table::html_rows(text);
    if rows.iter().any(|row| row.lone_text() == Some("Closed Transactions:")) {
        return Ok(Content::Mt4Statement(rows));
    }
    if rows.iter().any(mt4_tester::is_header) {
        return Ok(Content::Mt4Tester(rows));
    }
    if let Some(kind) = mt5::kind_of(&rows) {
        return Ok(Content::Mt5(kind, rows));
    }
    Err(HistoryError::UnknownKind {
        file: file.to_owned(),
        seen: format!("HTML with {} table rows, none of which opens a section we know", rows.len()),
    })
}

fn split_csv(file: &str, text: &str) -> Result<Content, HistoryError> {
    let head = text.trim_start().lines().next().unwrap_or_default();
    if mql5_signal::is_header(head) {
        return Ok(Content::Mql5Signal(table::csv_rows(file, text, b';')?));
    }
    if simple::is_header(head) {
        return Ok(Content::Simple(table::csv_rows(file, text, b',')?));
    }
    // Only a report of MT5 has a head of its own; its sections are looked for in all lines.
    let rows = table::csv_rows(file, text, b',')?;
    match mt5::kind_of(&rows) {
        Some(kind) => Ok(Content::Mt5(kind, rows)),
        None => Err(HistoryError::UnknownKind {
            file: file.to_owned(),
            seen: format!("text that starts with `{}`", error::shown(head)),
        }),
    }
}
