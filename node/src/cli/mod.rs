//! The command line: one file a verb family, no decisions.
//!
//! A verb answers with a table or a sentence, or with `--json` with one JSON value. Errors go to
//! stderr. Exit codes: 0 done, or nobody reads the answer any more; 1 the answer is no (a check
//! failed); 2 wrong usage; 3 something needed is not there (database, bus, broker, node, file).

pub mod account;
pub mod apply;
mod ask;
pub mod completions;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod events;
pub mod init;
pub mod keys;
pub mod lease;
pub mod link;
pub mod migrate;
pub mod nats;
pub mod node;
mod on_bus;
pub mod out;
pub mod paper;
pub mod paper_ctl;
mod password;
pub mod pause;
pub mod positions;
pub mod publish;
pub mod reconcile;
pub mod roles;
mod settings;
pub mod status;
pub mod table;
pub mod token;
mod watch;
pub mod why;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;
use std::sync::OnceLock;

/// Copies trades of master accounts onto follower accounts: every trade, at once, exactly once.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Write a file of settings, by questions or flags, and check it.
    Init(init::InitArgs),
    /// Check database, bus, clocks, rights and settings of a node, and say how to mend what is wrong.
    ///
    /// Run it with the settings of a node, its login in the database and its user of the bus. With those of
    /// a person it fails: they may not do what a node does, and shall not be given it.
    Doctor(doctor::DoctorArgs),
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
    /// Make accounts and links what a file declares.
    Apply(apply::ApplyArgs),
    /// Make the configuration of a NATS cluster that knows who may say what, and its users.
    Nats(nats::NatsArgs),
    /// Make and change the master keys that brokers' passwords are sealed with.
    Keys(keys::KeysArgs),
    /// Make database roles with no more rights than their work needs.
    Roles(roles::RolesArgs),
    /// Make, list and take back the tokens of those who may use the API.
    Token(token::TokenArgs),
    /// Who owns what, right now.
    Status(status::StatusArgs),
    /// The open copies of each link, and how they differ from their master's trades.
    Positions(positions::PositionsArgs),
    /// What was copied, skipped or failed, as it is written down.
    Events(events::EventsArgs),
    /// Have the owner compare a follower with its masters now, or say what that would do.
    Reconcile(reconcile::ReconcileArgs),
    /// Who owns which account, and handing one over to another node.
    Lease(lease::LeaseArgs),
    /// Stop copying on a link or on all links of an account.
    Pause(pause::PauseArgs),
    /// Copy again on a link, on all links of an account, or everywhere.
    Resume(pause::ResumeArgs),
    /// Stop copying everywhere.
    KillSwitch(pause::KillSwitchArgs),
    /// Why a trade was copied, or was not: its story on one link.
    Why(why::WhyArgs),
    /// Check or show the settings of a node.
    Config(config::ConfigArgs),
    /// Bring the schema of the database up to date, or say how it stands.
    Migrate(migrate::MigrateArgs),
    /// Print what a shell needs to complete the words of this program.
    Completions(completions::CompletionsArgs),
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
    /// Whoever read the answer is gone: no failure, and nothing more to say.
    #[error("nobody reads the answer any more")]
    NobodyReads,
}

impl CliError {
    /// Names what was tried when `source` went wrong.
    pub fn missing(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        CliError::Missing { what: what.into(), source: source.into() }
    }

    /// The same, with which database it was and as whom; anything else stays as it is.
    fn of_database(self, shown: Option<&String>) -> Self {
        match (self, shown) {
            (CliError::Missing { what, source }, Some(shown)) if what == DATABASE => {
                CliError::Missing { what: format!("{DATABASE} {shown}"), source }
            }
            (error, _) => error,
        }
    }

    fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::NobodyReads => 0,
            CliError::No(_) => 1,
            CliError::Usage(_) => 2,
            CliError::Missing { .. } => 3,
        })
    }
}

/// What went wrong where a database did.
const DATABASE: &str = "database";

/// The database that this process asks, for whoever reads what went wrong: a process has one. An error of
/// a statement says neither where it was asked nor as whom.
static ASKED: OnceLock<String> = OnceLock::new();

/// Has errors of the database say which one this is, without its password.
fn remember_database(url: &str) {
    if let Some(shown) = crate::database::shown(url) {
        // The first one stays: no verb asks two.
        let _known = ASKED.set(shown);
    }
}

impl From<sqlx::Error> for CliError {
    fn from(error: sqlx::Error) -> Self {
        CliError::missing(DATABASE, error)
    }
}

impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        CliError::missing("terminal", error)
    }
}

/// Runs the verb that the arguments name.
pub fn main() -> ExitCode {
    let done = match Cli::parse().verb {
        Verb::Init(args) => init::run(args),
        Verb::Doctor(args) => doctor::run(args),
        Verb::Node(args) => node::run(args),
        Verb::Publish(args) => publish::run(args),
        Verb::Paper(args) => paper::run(*args),
        Verb::Account(args) => account::run(args),
        Verb::Link(args) => link::run(args),
        Verb::Apply(args) => apply::run(args),
        Verb::Nats(args) => nats::run(args),
        Verb::Keys(args) => keys::run(args),
        Verb::Roles(args) => roles::run(args),
        Verb::Token(args) => token::run(args),
        Verb::Status(args) => status::run(args),
        Verb::Positions(args) => positions::run(args),
        Verb::Events(args) => events::run(args),
        Verb::Reconcile(args) => reconcile::run(args),
        Verb::Lease(args) => lease::run(args),
        Verb::Pause(args) => pause::pause(args),
        Verb::Resume(args) => pause::resume(args),
        Verb::KillSwitch(args) => pause::kill_switch(args),
        Verb::Why(args) => why::run(args),
        Verb::Config(args) => config::run(args),
        Verb::Migrate(args) => migrate::run(args),
        Verb::Completions(args) => completions::run(args),
        Verb::Demo(args) => demo::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error = error.of_database(ASKED.get());
            if !matches!(error, CliError::NobodyReads) {
                let text = format!("lockstep: {}\n", crate::causes::with_causes(&error));
                // Where nobody hears it, the exit code is left.
                let _unheard = std::io::stderr().write_all(text.as_bytes());
            }
            error.exit_code()
        }
    }
}

/// Asks the person at the terminal; `what` says what would come of it, `kept` that nothing did.
fn confirm(what: &str, kept: &str) -> Result<(), CliError> {
    use std::io::{BufRead, IsTerminal};
    if !std::io::stdin().is_terminal() {
        return Err(CliError::Usage(format!("--yes is needed where nobody can be asked: {what}")));
    }
    out::ask(format_args!("{what}. Type yes: "))?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    match answer.trim() {
        "yes" => Ok(()),
        _ => Err(CliError::No(kept.to_owned())),
    }
}

/// A small runtime for verbs that ask one question and end.
pub(crate) fn block_on<F: Future>(future: F) -> Result<F::Output, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

/// Ends when this process is told to end, so that it can put a terminal right before it does. From the
/// call on, not only while it is waited for, a signal does not end the process by itself.
pub(crate) fn told_to_end() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    })
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
        const VARIABLE: &str = "LOCKSTEP_DATABASE_URL";
        let set = || std::env::var(VARIABLE).ok().filter(|url| !url.trim().is_empty());
        let given = self.database.clone().map(|url| ("--database", url));
        let Some((name, url)) = given.or_else(|| Some((VARIABLE, set()?))) else {
            return Err(CliError::Usage(format!(
                "no database: give --database URL or set {VARIABLE}"
            )));
        };
        let wrong = |what| CliError::Usage(format!("{name} {what}"));
        crate::config::check_database_url(&url).map_err(wrong)?;
        remember_database(&url);
        Ok(url)
    }

    /// A connection that only reads. Nothing is migrated: a schema that is not this program's is told.
    pub async fn connect(&self) -> Result<sqlx::PgConnection, CliError> {
        let connection = crate::database::connect_to_read(&self.url()?, "cli").await;
        connection.map_err(|e| CliError::missing(DATABASE, e))
    }

    /// A connection with the schema brought up to date, for a verb that changes something.
    pub async fn connect_to_write(&self) -> Result<sqlx::PgConnection, CliError> {
        let connection = crate::database::connect_migrated(&self.url()?, "cli").await;
        connection.map_err(|e| CliError::missing(DATABASE, e))
    }
}

/// What tests of several verbs share.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::causes::with_causes;

    #[test]
    fn what_goes_wrong_with_a_database_names_it_and_the_role_and_no_password() {
        let away = || CliError::from(sqlx::Error::Io(std::io::ErrorKind::ConnectionRefused.into()));
        for (url, place) in [
            (
                "postgres://alice:hunter2@db.example:5433/fleet",
                "fleet at db.example:5433, role alice",
            ),
            (
                "postgres://alice@db.example/fleet?password=hunter2",
                "fleet at db.example:5432, role alice",
            ),
            ("postgres://alice@%2Frun%2Fpg/fleet", "fleet at /run/pg:5432, role alice"),
        ] {
            let told = with_causes(&away().of_database(crate::database::shown(url).as_ref()));
            assert!(told.starts_with(&format!("database {place}: ")), "{told}");
            assert!(told.contains("refused") && !told.contains("hunter2"), "{told}");
        }
        assert!(with_causes(&away().of_database(None)).starts_with("database: "));
        let other = CliError::missing("bus at x", "gone").of_database(Some(&"y".to_owned()));
        assert_eq!(other.to_string(), "bus at x: gone");
    }

    /// Writes a copy of this ticket of the link's master that is open.
    pub(super) async fn insert_open_pair(
        db: &mut sqlx::PgConnection,
        link: schemas::LinkId,
        ticket: i64,
    ) {
        let row = "insert into pairs (id, link_id, follower_id, master_ticket, follower_ticket, state, \
             symbol, side, master_side, master_lots_at_open, version, lease_token, node_id) \
             select gen_random_uuid(), id, follower_id, $2, $2, 'open', 'EURUSD', 'buy', 'buy', 1, 0, 0, \
             'n' from copy_links where id = $1";
        sqlx::query(row).bind(link.as_i64()).bind(ticket).execute(db).await.unwrap();
    }
}
