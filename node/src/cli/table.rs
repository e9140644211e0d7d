//! One way to print a list: a table for people, JSON for programs.

use super::{CliError, out};
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

/// A row that can be shown both ways; the JSON form is the row's own serde form.
pub trait TableRow: Serialize {
    /// Column heads.
    const HEAD: &'static [&'static str];
    /// The cells of this row, one per column.
    fn cells(&self) -> Vec<String>;
}

/// Prints rows to stdout: as one JSON array, or as a table.
pub fn print_rows<R: TableRow>(rows: &[R], json: bool) -> Result<(), CliError> {
    if json {
        return out::json(rows);
    }
    out::line(render(R::HEAD, rows.iter().map(TableRow::cells)))
}

/// A table as text.
pub fn render(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().map(|h| h.to_uppercase()));
    for row in rows {
        table.add_row(row);
    }
    table.trim_fmt()
}

/// A dash where there is nothing to show.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}
