//! What can go wrong at the boundary to the bus.

use schemas::AccountId;
use std::time::Duration;

/// Why a call to the bus failed. Running feeds and publishers repair themselves and report
/// through their status; these errors concern starting and asking.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// A setting is outside its range. The caller stops: the configuration is wrong.
    #[error("bus setting {field}: {problem}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// What is wrong, with the value unless it may hold a password.
        problem: String,
    },
    /// The first connection failed for a reason that waiting does not cure.
    #[error("cannot connect to the bus: {0}")]
    Connect(#[source] async_nats::ConnectError),
    /// The client was closed. The caller stops or connects anew.
    #[error("the connection to the bus is closed")]
    Closed,
    /// The server did not return our own message in time: nothing that was (not) heard counts.
    /// The caller tries again.
    #[error(
        "the bus did not return an echo within {waited:?}: it is too busy, or our user may not ask \
         there (`lockstep nats list` says who may what)"
    )]
    NoEcho {
        /// How long we waited.
        waited: Duration,
    },
    /// The connection was made anew while the call ran: what was heard may have holes.
    /// The caller tries again.
    #[error("the connection to the bus changed during the call")]
    Reconnected,
    /// Nobody answers for this master. That says nothing about its trades; the caller holds.
    #[error("no publisher answers for master {master}")]
    NoResponders {
        /// The master.
        master: AccountId,
    },
    /// A publisher may be there, but its answer was not complete in time. The caller tries again.
    #[error("master {master}: no complete snapshot within {waited:?}")]
    SnapshotTimedOut {
        /// The master.
        master: AccountId,
        /// How long we waited.
        waited: Duration,
    },
    /// The answer cannot be read. The caller keeps what it has and tries again.
    #[error("master {master}: snapshot is not readable: {source}")]
    SnapshotUndecodable {
        /// The master.
        master: AccountId,
        /// Field and problem.
        source: schemas::DecodeError,
    },
    /// Changes were published before the first complete state was given with `observe`.
    /// The caller observes first: followers could not tell unknown from empty.
    #[error("master {master}: no complete state was observed yet")]
    NotObserved {
        /// The master.
        master: AccountId,
    },
}

impl BusError {
    schemas::words! {
        /// The word in metrics.
        pub fn as_str(&self) in WORDS {
            BusError::Setting { .. } => "setting",
            BusError::Connect(_) => "connect",
            BusError::Closed => "closed",
            BusError::NoEcho { .. } => "no_echo",
            BusError::Reconnected => "reconnected",
            BusError::NoResponders { .. } => "no_responders",
            BusError::SnapshotTimedOut { .. } => "timed_out",
            BusError::SnapshotUndecodable { .. } => "undecodable",
            BusError::NotObserved { .. } => "not_observed",
        }
    }
}
