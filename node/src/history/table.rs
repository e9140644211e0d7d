//! Text into rows of cells, the same for HTML and CSV.
//!
//! In: the decoded text of a file. Out: rows with their number in the file and trimmed cells.
//!
//! 1. Every `<tr>` is a row, nested ones included, in the order of the document; numbered from 1.
//! 2. A CSV row carries the line on which it starts; a quoted field may hold the separator.
//! 3. White space (no-break spaces too) is collapsed and trimmed in every cell.
//! 4. HTML cells of the class `hidden` are no columns; their text is kept beside the row.
//!
//! Not covered: what a cell means.

use scraper::{ElementRef, Html, Node};

use super::error::HistoryError;

/// One cell.
#[derive(Debug, Clone, Default)]
pub(super) struct TableCell {
    pub(super) text: String,
    /// `title` of an HTML cell: where MT4 puts magic and comment.
    pub(super) title: String,
    pub(super) colspan: usize,
}

/// One row.
#[derive(Debug, Clone)]
pub(super) struct TableRow {
    pub(super) number: u64,
    pub(super) cells: Vec<TableCell>,
    /// Text of cells that the report hides.
    pub(super) hidden: String,
}

impl TableRow {
    /// Text of a cell; empty where the row is shorter.
    pub(super) fn text(&self, index: usize) -> &str {
        self.cells.get(index).map_or("", |cell| cell.text.as_str())
    }

    /// The text of the only cell that is not empty, if it is the first.
    pub(super) fn lone_text(&self) -> Option<&str> {
        let (first, rest) = self.cells.split_first()?;
        let alone = !first.text.is_empty() && rest.iter().all(|cell| cell.text.is_empty());
        alone.then_some(first.text.as_str())
    }
}

/// Collapses white space of every kind to single spaces and trims.
fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

/// Rows of all tables of an HTML document.
pub(super) fn html_rows(text: &str) -> Vec<TableRow> {
    let document = Html::parse_document(text);
    let mut rows = Vec::new();
    for node in document.tree.root().descendants() {
        if let Some(row) = ElementRef::wrap(node).filter(|element| element.value().name() == "tr") {
            rows.push(html_row(row, rows.len() as u64 + 1));
        }
    }
    rows
}

fn html_row(row: ElementRef<'_>, number: u64) -> TableRow {
    let mut cells = Vec::new();
    let mut hidden = String::new();
    for cell in row.child_elements().filter(|child| matches!(child.value().name(), "td" | "th")) {
        let text = tidy(&visible_text(cell));
        let classes = cell.value().attr("class").unwrap_or_default();
        if classes.split_whitespace().any(|class| class.eq_ignore_ascii_case("hidden")) {
            hidden = text;
            continue;
        }
        cells.push(TableCell {
            text,
            title: tidy(cell.value().attr("title").unwrap_or_default()),
            colspan: cell.value().attr("colspan").and_then(|n| n.trim().parse().ok()).unwrap_or(1),
        });
    }
    TableRow { number, cells, hidden }
}

/// Text below a cell, without that of a row nested in it, which is a row of its own.
fn visible_text(cell: ElementRef<'_>) -> String {
    let mut out = String::new();
    for node in cell.descendants() {
        let Node::Text(text) = node.value() else { continue };
        let nested = node
            .ancestors()
            .take_while(|ancestor| ancestor.id() != cell.id())
            .any(|ancestor| matches!(ancestor.value(), Node::Element(e) if e.name() == "tr"));
        if !nested {
            out.push_str(text);
        }
    }
    out
}

/// Rows of a CSV text; empty lines are skipped.
pub(super) fn csv_rows(
    file: &str,
    text: &str,
    separator: u8,
) -> Result<Vec<TableRow>, HistoryError> {
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(separator)
        .has_headers(false)
        .flexible(true)
        .from_reader(text.as_bytes());
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| HistoryError::Row {
            file: file.to_owned(),
            row: error.position().map_or(0, csv::Position::line),
            problem: error.to_string(),
        })?;
        let cells = record
            .iter()
            .map(|field| TableCell { text: tidy(field), title: String::new(), colspan: 1 })
            .collect();
        let number = record.position().map_or(0, csv::Position::line);
        rows.push(TableRow { number, cells, hidden: String::new() });
    }
    Ok(rows)
}
