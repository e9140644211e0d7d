//! Cells into values: decimals, times, tickets, sides.
//!
//! In: one cell and where it stands. Out: a value, or [`HistoryError::Cell`] with file, row,
//! column and the text.
//!
//! 1. Decimals are exact; nothing passes through a float.
//! 2. A space groups thousands only where groups of three follow it: `1 234.5` is a number and
//!    `5 0812.9` is damaged. A sign may be followed by a space (`- 0.08`).
//! 3. Times are the broker's clock, as printed, with no zone.

use rust_decimal::Decimal;
use schemas::ids::{MasterTicket, Symbol};
use schemas::position::{PendingKind, Side};
use schemas::quantity::{Lots, Price};
use time::{Date, Month, PrimitiveDateTime, Time};

use super::error::{HistoryError, shown};
use super::table::TableRow;

/// What a type cell of a report says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TypeWord {
    Trade(Side),
    Pending(PendingKind),
    /// A stop that places a limit (MT5): the wire has no such kind.
    StopLimit,
}

/// A row and the file it stands in: reads cells and names them in errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowReader<'a> {
    pub(super) file: &'a str,
    pub(super) row: &'a TableRow,
}

impl<'a> RowReader<'a> {
    pub(super) fn text(&self, index: usize) -> &'a str {
        self.row.text(index)
    }

    /// An error about this row as a whole.
    pub(super) fn row_error(&self, problem: impl Into<String>) -> HistoryError {
        HistoryError::Row {
            file: self.file.to_owned(),
            row: self.row.number,
            problem: problem.into(),
        }
    }

    /// An error about one cell.
    pub(super) fn cell_error(
        &self,
        index: usize,
        column: &'static str,
        problem: &'static str,
    ) -> HistoryError {
        HistoryError::Cell {
            file: self.file.to_owned(),
            row: self.row.number,
            column,
            value: shown(self.text(index)),
            problem,
        }
    }

    pub(super) fn ticket(
        &self,
        index: usize,
        column: &'static str,
    ) -> Result<MasterTicket, HistoryError> {
        parse_whole(self.text(index))
            .and_then(|number| MasterTicket::new(number).ok())
            .ok_or_else(|| self.cell_error(index, column, "is not a ticket number above 0"))
    }

    /// A number of the file that is no ticket of ours, such as a deal's.
    pub(super) fn number(&self, index: usize, column: &'static str) -> Result<u64, HistoryError> {
        parse_whole(self.text(index))
            .ok_or_else(|| self.cell_error(index, column, "is not a whole number"))
    }

    pub(super) fn time(
        &self,
        index: usize,
        column: &'static str,
    ) -> Result<PrimitiveDateTime, HistoryError> {
        parse_time(self.text(index)).ok_or_else(|| {
            self.cell_error(index, column, "is not a time such as 2025.01.31 23:59:59")
        })
    }

    pub(super) fn time_or_none(
        &self,
        index: usize,
        column: &'static str,
    ) -> Result<Option<PrimitiveDateTime>, HistoryError> {
        if self.text(index).is_empty() { Ok(None) } else { self.time(index, column).map(Some) }
    }

    pub(super) fn lots(&self, index: usize, column: &'static str) -> Result<Lots, HistoryError> {
        lots_of(self.text(index))
            .ok_or_else(|| self.cell_error(index, column, "is not a volume above 0"))
    }

    pub(super) fn price(&self, index: usize, column: &'static str) -> Result<Price, HistoryError> {
        price_of(self.text(index))
            .ok_or_else(|| self.cell_error(index, column, "is not a price above 0"))
    }

    /// A stop or target: empty and zero mean none.
    pub(super) fn level(
        &self,
        index: usize,
        column: &'static str,
    ) -> Result<Option<Price>, HistoryError> {
        let text = self.text(index);
        if text.is_empty() || parse_decimal(text).is_some_and(|level| level.is_zero()) {
            return Ok(None);
        }
        let level =
            price_of(text).ok_or_else(|| self.cell_error(index, column, "is not a price level"))?;
        Ok(Some(level))
    }

    pub(super) fn symbol(
        &self,
        index: usize,
        column: &'static str,
    ) -> Result<Symbol, HistoryError> {
        Symbol::new(self.text(index))
            .map_err(|_| self.cell_error(index, column, "is not the name of a symbol"))
    }

    /// Fails when the row has fewer cells than the layout needs.
    pub(super) fn need_cells(&self, count: usize) -> Result<(), HistoryError> {
        let found = self.row.cells.len();
        if found >= count {
            return Ok(());
        }
        Err(self.row_error(format!("{found} cells where the layout has at least {count}")))
    }

    /// A closing time that is not before the opening.
    pub(super) fn not_before(
        &self,
        index: usize,
        column: &'static str,
        opened: PrimitiveDateTime,
        closed: PrimitiveDateTime,
    ) -> Result<(), HistoryError> {
        if closed >= opened {
            return Ok(());
        }
        Err(self.cell_error(index, column, "is before the open time of its row"))
    }

    /// A money cell that concerns no trade: `None` and a note when it is damaged.
    pub(super) fn money(
        &self,
        index: usize,
        column: &'static str,
        notes: &mut Vec<String>,
    ) -> Option<Decimal> {
        let text = self.text(index);
        if text.is_empty() {
            return None;
        }
        let amount = parse_decimal(text);
        if amount.is_none() {
            notes.push(format!(
                "row {}, column {column}: `{}` is not an amount; it moves no trade and was passed over",
                self.row.number,
                shown(text)
            ));
        }
        amount
    }
}

/// Lots above zero, or `None`.
pub(super) fn lots_of(text: &str) -> Option<Lots> {
    parse_decimal(text).and_then(|lots| Lots::new(lots).ok())
}

/// A price above zero, or `None`.
pub(super) fn price_of(text: &str) -> Option<Price> {
    parse_decimal(text).and_then(|price| Price::new(price).ok())
}

/// Digits after the point as printed, trailing zeros included.
pub(super) fn digits_after_point(text: &str) -> u32 {
    let fraction = text.rsplit_once('.').map_or("", |(_, fraction)| fraction);
    u32::try_from(fraction.len()).unwrap_or(0)
}

/// Digits only.
pub(super) fn parse_whole(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

/// An exact decimal with an optional sign and spaces between thousands.
pub(super) fn parse_decimal(text: &str) -> Option<Decimal> {
    let text = text.trim();
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, text.get(1..)?.trim_start()),
        b'+' => (false, text.get(1..)?.trim_start()),
        _ => (false, text),
    };
    let (whole, fraction) = match unsigned.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (unsigned, None),
    };
    let plain = join_thousands(whole)?;
    let mut number = plain;
    if let Some(fraction) = fraction {
        if fraction.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        number.push('.');
        number.push_str(fraction);
    }
    // `from_str_exact` refuses what does not fit instead of rounding it.
    let value = Decimal::from_str_exact(&number).ok()?;
    Some(if negative { -value } else { value })
}

/// Digits, or groups of digits in which every group after the first has three.
fn join_thousands(whole: &str) -> Option<String> {
    let mut out = String::with_capacity(whole.len());
    for (position, group) in whole.split([' ', '\u{a0}', '\u{202f}']).enumerate() {
        let grouped = whole.len() != group.len();
        let fits = match (grouped, position) {
            (false, _) => !group.is_empty(),
            (true, 0) => (1..=3).contains(&group.len()),
            (true, _) => group.len() == 3,
        };
        if !fits || !group.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        out.push_str(group);
    }
    Some(out)
}

/// `2025.01.31 23:59`, with optional seconds and fraction; dashes and a `T` are accepted too.
pub(super) fn parse_time(text: &str) -> Option<PrimitiveDateTime> {
    let (date, clock) = text.split_once([' ', 'T'])?;
    let separator = if date.contains('-') { '-' } else { '.' };
    let mut parts = date.split(separator);
    let year = digits(parts.next()?, 4)?;
    let month = Month::try_from(u8::try_from(digits(parts.next()?, 2)?).ok()?).ok()?;
    let day = u8::try_from(digits(parts.next()?, 2)?).ok()?;
    if parts.next().is_some() {
        return None;
    }
    let date = Date::from_calendar_date(i32::try_from(year).ok()?, month, day).ok()?;
    Some(PrimitiveDateTime::new(date, parse_clock(clock)?))
}

fn parse_clock(clock: &str) -> Option<Time> {
    let (whole, micros) = match clock.split_once('.') {
        Some((whole, fraction)) => (whole, fraction_micros(fraction)?),
        None => (clock, 0),
    };
    let mut parts = whole.split(':');
    let hour = u8::try_from(digits(parts.next()?, 2)?).ok()?;
    let minute = u8::try_from(digits(parts.next()?, 2)?).ok()?;
    let second = match parts.next() {
        Some(second) => u8::try_from(digits(second, 2)?).ok()?,
        None => 0,
    };
    if parts.next().is_some() {
        return None;
    }
    Time::from_hms_micro(hour, minute, second, micros).ok()
}

/// One to six digits after the point, as microseconds.
fn fraction_micros(fraction: &str) -> Option<u32> {
    let length = fraction.len();
    if !(1..=6).contains(&length) {
        return None;
    }
    let value = digits(fraction, length)?;
    Some(value * 10_u32.pow(u32::try_from(6 - length).ok()?))
}

fn digits(text: &str, length: usize) -> Option<u32> {
    let fits = text.len() == length && text.bytes().all(|byte| byte.is_ascii_digit());
    if fits { text.parse().ok() } else { None }
}

/// `buy`, `Sell Stop`, in any case; `None` for every other word.
pub(super) fn parse_type(text: &str) -> Option<TypeWord> {
    let word = text.to_ascii_lowercase();
    Some(match word.as_str() {
        "buy" => TypeWord::Trade(Side::Buy),
        "sell" => TypeWord::Trade(Side::Sell),
        "buy limit" => TypeWord::Pending(PendingKind::BuyLimit),
        "sell limit" => TypeWord::Pending(PendingKind::SellLimit),
        "buy stop" => TypeWord::Pending(PendingKind::BuyStop),
        "sell stop" => TypeWord::Pending(PendingKind::SellStop),
        "buy stop limit" | "sell stop limit" => TypeWord::StopLimit,
        _ => return None,
    })
}
