//! What can go wrong between a client and the broker, and what the caller does about it.

use crate::protocol::FieldError;
use schemas::AccountId;
use std::path::PathBuf;

/// A failed call that changes nothing at the broker, or a broker that cannot run.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// No connection: try again later.
    #[error("cannot connect to the paper broker at {addr}")]
    Connect {
        /// Where.
        addr: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The connection ended: connect again and open the accounts again.
    #[error("connection to the paper broker lost: {reason}")]
    Lost {
        /// Why.
        reason: String,
    },
    /// The broker refused the request: correct the named field.
    #[error("the paper broker refused the request: {0}")]
    Refused(FieldError),
    /// No answer in time: the connection may be dead; reads may be repeated.
    #[error("no answer from the paper broker to {op:?} within {limit_s} s")]
    Timeout {
        /// Which request.
        op: &'static str,
        /// How long was waited.
        limit_s: u64,
    },
    /// The answer was not understood: a bug or another version.
    #[error("answer of the paper broker to {op:?} not understood: {text}")]
    Answer {
        /// Which request.
        op: &'static str,
        /// What was wrong.
        text: String,
    },
    /// The broker has not yet said that its lists are complete: wait for `SessionPush::Synced`.
    #[error("account {account} is not synced yet, its lists are not complete")]
    NotSynced {
        /// Which account.
        account: AccountId,
    },
    /// This connection already has a session for the account: use that one.
    #[error("account {account} is already open on this connection")]
    AlreadyOpen {
        /// Which account.
        account: AccountId,
    },
    /// The broker cannot listen there: stop.
    #[error("the paper broker cannot listen at {addr}")]
    Listen {
        /// Where.
        addr: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A setting is outside its range: stop and correct it.
    #[error("paper broker configuration: {0}")]
    Config(FieldError),
    /// The ledger file failed: stop, a ledger with holes proves nothing.
    #[error("ledger file {path}: {text}", path = path.display())]
    Ledger {
        /// Which file.
        path: PathBuf,
        /// What happened.
        text: String,
    },
}
