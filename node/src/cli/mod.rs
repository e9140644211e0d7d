//! The command line: one file a verb family, no decisions.
//!
//! Every list prints as a table, or with `--json` as one JSON array. Errors go to
//! stderr. Exit codes: 0 done, 1 the answer is no (a check failed), 2 wrong usage,
//! 3 something needed is not there (database, bus, broker, file).

pub mod account;
pub mod demo;
pub mod keys;
pub mod link;
pub mod nats;
pub mod node;
pub mod paper;
pub mod paper_ctl;
mod password;
pub mod publish;
pub mod roles;
pub mod status;
pub mod table;
pub mod why;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Copies trades of master accounts onto follower accounts: every trade, at once, exactly once.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run a node: lease accounts, publish masters, copy to followers.
    Node(node::NodeArgs),
    /// Play a recorded account history as a master.
    Publish(publish::PublishArgs),
    /// Run the paper broker, or change one that runs.
    Paper(Box<paper::PaperArgs>),
    /// Add, list and switch accounts.
    Account(account::AccountArgs),
    /// Add, list and switch links from a master to a follower.
    Link(link::LinkArgs),
    /// Make the configuration of a NATS cluster that knows who may say what, and its users.
    Nats(nats::NatsArgs),
    /// Make and change the master keys that brokers' passwords are sealed with.
    Keys(keys::KeysArgs),
    /// Make database roles with no more rights than their work needs.
    Roles(roles::RolesArgs),
    /// Who owns what, right now.
    Status(status::StatusArgs),
    /// Why a trade was copied, or was not: its story on one link.
    Why(why::WhyArgs),
    /// The whole thing on this machine: servers, nodes, a master, followers, and a node killed in the middle.
    Demo(demo::DemoArgs),
}

/// Why a verb did not do what it was asked; carries its exit code.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The words or values given are wrong.
    #[error("{0}")]
    Usage(String),
    /// A check failed: the answer is no.
    #[error("{0}")]
    No(String),
    /// Something that is needed is not there.
    #[error("{what}: {source}")]
    Missing {
        /// What was tried.
        what: String,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl CliError {
    /// Names what was tried when `source` went wrong.
    pub fn missing(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        CliError::Missing { what: what.into(), source: source.into() }
    }

    fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::No(_) => 1,
            CliError::Usage(_) => 2,
            CliError::Missing { .. } => 3,
        })
    }
}

impl From<sqlx::Error> for CliError {
    fn from(error: sqlx::Error) -> Self {
        CliError::missing("database", error)
    }
}

impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        CliError::missing("terminal", error)
    }
}

/// Runs the verb that the arguments name.
#[allow(
    clippy::print_stderr,
    reason = "the one place where an error reaches the person at the shell"
)]
pub fn main() -> ExitCode {
    let done = match Cli::parse().verb {
        Verb::Node(args) => node::run(args),
        Verb::Publish(args) => publish::run(args),
        Verb::Paper(args) => paper::run(*args),
        Verb::Account(args) => account::run(args),
        Verb::Link(args) => link::run(args),
        Verb::Nats(args) => nats::run(args),
        Verb::Keys(args) => keys::run(args),
        Verb::Roles(args) => roles::run(args),
        Verb::Status(args) => status::run(args),
        Verb::Why(args) => why::run(args),
        Verb::Demo(args) => demo::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep: {}", crate::causes::with_causes(&error));
            error.exit_code()
        }
    }
}

/// A small runtime for verbs that ask one question and end.
pub(crate) fn block_on<F: Future>(future: F) -> Result<F::Output, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

/// The database that a verb works on.
#[derive(Debug, clap::Args)]
pub struct DatabaseArg {
    /// Postgres URL, such as postgres://lockstep@127.0.0.1:5432/lockstep. Default: LOCKSTEP_DATABASE_URL.
    #[arg(long, value_name = "URL", global = true)]
    pub database: Option<String>,
}

impl DatabaseArg {
    /// The URL given or set in the environment.
    pub fn url(&self) -> Result<String, CliError> {
        self.database.clone().or_else(|| std::env::var("LOCKSTEP_DATABASE_URL").ok()).ok_or_else(
            || {
                CliError::Usage(
                    "no database: give --database URL or set LOCKSTEP_DATABASE_URL".into(),
                )
            },
        )
    }

    /// A connection with the schema brought up to date.
    pub async fn connect(&self) -> Result<sqlx::PgConnection, CliError> {
        let url = self.url()?;
        crate::database::connect_migrated(&url, "cli")
            .await
            .map_err(|e| CliError::missing("database", e))
    }
}
