//! The ledger on disk: one JSON row a line, written before the request is answered.
//!
//! A row is handed to the kernel in the call that decides the request, so it survives a killed
//! broker (not a power cut; nothing is fsynced). There is no queue between memory and file, so
//! the file never lags. A file that is not empty is refused: two runs in one file prove nothing.

use crate::error::PaperError;
use crate::ledger::LedgerRow;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) struct LedgerFile {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
}

impl LedgerFile {
    pub(crate) fn create(path: &Path) -> Result<Self, PaperError> {
        let failed = |text: String| PaperError::Ledger { path: path.to_owned(), text };
        let mut options = OpenOptions::new();
        let file =
            options.create(true).append(true).open(path).map_err(|e| failed(e.to_string()))?;
        let length = file.metadata().map_err(|e| failed(e.to_string()))?.len();
        if length > 0 {
            let text = format!("holds {length} bytes of another run; name a new file");
            return Err(failed(text));
        }
        Ok(Self { path: path.to_owned(), file, buffer: Vec::new() })
    }

    /// Collects a row for the next `write`.
    pub(crate) fn add(&mut self, row: &LedgerRow) {
        serde_json::to_writer(&mut self.buffer, row)
            .expect("rows have text keys, and a vector takes every byte");
        self.buffer.push(b'\n');
    }

    /// Hands the collected rows to the kernel in one call.
    pub(crate) fn write(&mut self) -> Result<(), PaperError> {
        let written = self.file.write_all(&self.buffer);
        self.buffer.clear();
        written.map_err(|e| PaperError::Ledger { path: self.path.clone(), text: e.to_string() })
    }
}
