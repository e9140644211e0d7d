//! What can go wrong with a child process or a server, and what the caller does about it.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// Why a tool, a child process or a server could not be had.
///
/// None of these is worth a retry by the caller: what can be retried (a port taken by somebody
/// else) has been.
#[derive(Debug, thiserror::Error)]
pub enum DevstackError {
    /// A program is not installed. Tell the person; never skip because of it.
    #[error(
        "{tool} was not found (looked in: {looked_in}).\n\
         Ways to get it: `./run setup` in the project's folder (downloads a pinned copy into \
         .lockstep/tools); or install it, on Debian and Ubuntu with `apt-get install {package}`; \
         or set LOCKSTEP_TOOLS to a folder that holds `nats-server` and `postgres/bin/initdb`"
    )]
    ToolMissing {
        /// Name of the program.
        tool: &'static str,
        /// Name of its package on Debian and Ubuntu.
        package: &'static str,
        /// Every place that was tried.
        looked_in: String,
    },
    /// Postgres refuses to run as root and there is no other user to run it as.
    #[error(
        "Postgres does not run as root, and /etc/passwd has neither a user `postgres` nor \
         `nobody` to run it as: add one, or run as another user"
    )]
    NoUser,
    /// No folder for temporary files that the user Postgres runs as could enter.
    #[error("user {user} may not enter any of these temporary folders: {tried}")]
    NoTemporaryFolder {
        /// Name of the user.
        user: String,
        /// The folders tried.
        tried: String,
    },
    /// A file, folder or socket operation failed.
    #[error("{doing} failed")]
    Io {
        /// What was being done, with the path or address.
        doing: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The process that would clean up after us could not be started or has been killed.
    #[error("the guard that stops children after us is not there (/bin/sh)")]
    Guard(#[source] io::Error),
    /// The program could not be started.
    #[error("{name}: {} could not be started", program.display())]
    Spawn {
        /// Name of the process.
        name: String,
        /// The program.
        program: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The process ended while something was still expected of it.
    #[error("{name} ended ({status}) before {awaited}; its last lines:\n{log_tail}")]
    Ended {
        /// Name of the process.
        name: String,
        /// How it ended.
        status: ExitStatus,
        /// What was waited for.
        awaited: String,
        /// Last lines of its output.
        log_tail: String,
    },
    /// What was waited for did not come in time.
    #[error("{name}: no {awaited} within {limit:?}; its last lines:\n{log_tail}")]
    TimedOut {
        /// Name of the process.
        name: String,
        /// What was waited for.
        awaited: String,
        /// How long.
        limit: Duration,
        /// Last lines of its output.
        log_tail: String,
    },
    /// A signal was to be sent to a process that has ended.
    #[error("{name} does not run any more ({status}), so {signal} cannot reach it")]
    NotRunning {
        /// Name of the process.
        name: String,
        /// How it ended.
        status: ExitStatus,
        /// The signal.
        signal: &'static str,
    },
    /// A server said something this crate does not understand.
    #[error("{name}: {what}")]
    Protocol {
        /// Name of the process.
        name: String,
        /// What was wrong with the answer.
        what: String,
    },
    /// Postgres refused a statement.
    #[error("Postgres refused `{statement}`")]
    Sql {
        /// The statement.
        statement: String,
        /// Its answer.
        #[source]
        source: sqlx::Error,
    },
    /// The proxy is gone: its runtime has been shut down.
    #[error("the proxy at {addr} is not running any more")]
    ProxyGone {
        /// Where it listened.
        addr: SocketAddr,
    },
}
