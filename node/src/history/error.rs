//! What can be wrong with a recorded history.

use thiserror::Error;

/// Characters of a bad value that an error shows; the rest is cut so that a log line stays a line.
const SHOWN_VALUE_CHARS: usize = 80;

/// Why a history was not loaded. None of these go away by trying again: the file must change.
#[derive(Debug, Error)]
pub enum HistoryError {
    /// The file could not be read from disk.
    #[error("{file}: cannot be read")]
    Unreadable {
        /// Path as given.
        file: String,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is larger than [`super::FILE_BYTES_MAX`].
    #[error("{file}: {bytes} bytes, more than the {max} that are read")]
    TooLarge {
        /// Path as given.
        file: String,
        /// Size of the file.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// The bytes are not text in the encoding that their mark (or its absence) names.
    #[error("{file}: byte {offset} is not {encoding}")]
    NotText {
        /// Path as given.
        file: String,
        /// Encoding that was tried.
        encoding: &'static str,
        /// Offset of the first byte that does not fit, counted from 0.
        offset: usize,
    },
    /// The content is none of the layouts that are known.
    #[error("{file}: not a known history: {seen}")]
    UnknownKind {
        /// Path as given.
        file: String,
        /// What was found instead.
        seen: String,
    },
    /// A row has the wrong shape, or contradicts another row.
    #[error("{file}: row {row}: {problem}")]
    Row {
        /// Path as given.
        file: String,
        /// Line of a CSV file, or `<tr>` of an HTML file, counted from 1.
        row: u64,
        /// What is wrong.
        problem: String,
    },
    /// A cell that matters does not say what its column promises.
    #[error("{file}: row {row}, column {column}: `{value}` {problem}")]
    Cell {
        /// Path as given.
        file: String,
        /// Line of a CSV file, or `<tr>` of an HTML file, counted from 1.
        row: u64,
        /// Name of the column as the layout calls it.
        column: &'static str,
        /// The text of the cell, cut to 80 characters.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// The first characters of a cell, for an error.
pub(super) fn shown(value: &str) -> String {
    let mut cut: String = value.chars().take(SHOWN_VALUE_CHARS).collect();
    if value.chars().nth(SHOWN_VALUE_CHARS).is_some() {
        cut.push('…');
    }
    cut
}
