//! What is printed: a row for each moment, with what was expected and what was seen.

use serde_json::json;

/// One moment.
#[derive(Debug)]
pub(super) struct Row {
    /// Seconds since the last renewal, or a word.
    pub(super) at: String,
    /// What happens there.
    pub(super) what: &'static str,
    pub(super) expected: String,
    pub(super) seen: String,
    pub(super) ok: bool,
}

/// One ending.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) title: &'static str,
    pub(super) word: &'static str,
    pub(super) rows: Vec<Row>,
}

impl Told {
    /// As a table that a README can hold.
    pub(super) fn table(&self) -> String {
        let mut text = format!("**{}**\n\n", self.title);
        text.push_str("| at | what | expected | seen | |\n|---|---|---|---|---|\n");
        for row in &self.rows {
            let mark = if row.ok { "ok" } else { "NOT AS EXPECTED" };
            text.push_str(&format!(
                "| {} | {} | {} | {} | {mark} |\n",
                row.at, row.what, row.expected, row.seen
            ));
        }
        text
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "at": row.at, "what": row.what, "expected": row.expected, "seen": row.seen,
                    "as_expected": row.ok,
                })
            })
            .collect();
        json!({ "ending": self.word, "rows": rows })
    }
}

/// `12.3 s`.
pub(super) fn seconds(value: f64) -> String {
    format!("{value:.1} s")
}
