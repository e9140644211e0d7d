//! What can go wrong between a row and its table.

use std::time::Duration;

/// Why a statement did not give its answer.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Postgres refused the statement. What to do depends on the class: see `batch::classify`.
    #[error("database refused with {sqlstate}{}: {message}", constraint.as_ref().map(|c| format!(" ({c})")).unwrap_or_default())]
    Refused {
        /// Five characters.
        sqlstate: String,
        /// The constraint that was broken, if one was.
        constraint: Option<String>,
        /// The server's words.
        message: String,
    },
    /// No connection, or it broke: nothing is known of the statement. Send it again later.
    #[error("database not reached: {message}")]
    Unreachable {
        /// What the driver said.
        message: String,
    },
    /// No answer in time; the connection was closed. The statement may still commit. Send it again later.
    #[error("no answer from the database within {limit:?}")]
    TimedOut {
        /// How long it was waited for.
        limit: Duration,
    },
    /// A stored row that this node cannot read. Do not go on as if it were not there.
    #[error("stored row of {table} is not readable: {column} {problem}")]
    Unreadable {
        /// Which table.
        table: &'static str,
        /// Which column.
        column: &'static str,
        /// What is wrong, with the value.
        problem: String,
    },
}

impl WriteError {
    /// The SQLSTATE, where the database gave one.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            WriteError::Refused { sqlstate, .. } => Some(sqlstate),
            WriteError::Unreachable { .. }
            | WriteError::TimedOut { .. }
            | WriteError::Unreadable { .. } => None,
        }
    }
}
