//! Where every answer of a verb goes: stdout, in one way.
//!
//! Invariant: a reader that goes away (`lockstep status | head`) ends the verb quietly, wherever it
//! is: [`CliError::NobodyReads`] says nothing and is no failure.
//!
//! Not covered: progress and errors, which go to stderr.

use super::CliError;
use serde::Serialize;
use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Writes a text and a line's end.
pub fn line(text: impl Display) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    written.map_err(failed)
}

/// Writes one JSON value.
pub fn json<T: Serialize + ?Sized>(value: &T) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CliError::missing("answer as JSON", error))?;
    line(text)
}

/// Writes one JSON value on a line of its own, for answers that do not end.
pub fn json_line<T: Serialize>(value: &T) -> Result<(), CliError> {
    let text =
        serde_json::to_string(value).map_err(|error| CliError::missing("answer as JSON", error))?;
    line(text)
}

/// Writes a text as it is.
pub fn raw(text: &[u8]) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(failed)
}

/// Asks a person: on stderr, so that stdout holds the answer of the verb alone.
pub fn ask(text: impl Display) -> Result<(), CliError> {
    let mut err = std::io::stderr().lock();
    write!(err, "{text}").and_then(|()| err.flush()).map_err(failed)
}

fn failed(error: std::io::Error) -> CliError {
    if error.kind() == ErrorKind::BrokenPipe {
        CliError::NobodyReads
    } else {
        CliError::missing("stdout", error)
    }
}
