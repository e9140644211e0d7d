//! `lockstep paper`: runs the paper broker; `paper_ctl` changes one that runs.

use super::{CliError, block_on, out, paper_ctl, password};
use crate::history::{self, History};
use clap::{Args, Subcommand};
use paper::faults::Settings;
use paper::protocol::{AccountDecl, LoginKind, Password, Style};
use paper::server::{PaperConfig, PaperServer};
use paper::{Ident, PaperDriver};
use rust_decimal::Decimal;
use schemas::{AccountId, Lots, NodeId, SymbolSpec};
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// Arguments of `lockstep paper`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct PaperArgs {
    #[command(subcommand)]
    verb: Option<PaperVerb>,
    /// Where to listen; port 0 takes a free one, which is printed.
    #[arg(long, default_value = "127.0.0.1:4100")]
    listen: SocketAddr,
    /// Time from carrying an order out to answering it, in milliseconds.
    #[arg(long, default_value_t = 130)]
    answer_delay_ms: u64,
    /// Refuse orders whose lease token is older than the highest one seen for the account.
    #[arg(long)]
    check_tokens: bool,
    /// What the shares and spans of faults are drawn from: the same seed draws the same.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// New file that the ledger is written to, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    ledger: Option<PathBuf>,
    /// Accounts that there are from the start: FROM-TO, each with 10000 USD.
    #[arg(long, value_name = "FROM-TO", value_parser = account_range)]
    accounts: Option<(u64, u64)>,
    /// File with the password of all these accounts, which a node then has to know
    /// (`lockstep account password`).
    #[arg(long, value_name = "FILE", requires = "accounts")]
    password_file: Option<PathBuf>,
    /// Symbols that there are from the start: those of this history file (`demo`: the one that
    /// comes with Lockstep).
    #[arg(long, value_name = "FILE")]
    symbols_of: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum PaperVerb {
    /// Change how a running paper broker behaves: faults, sessions, settings, stop-outs.
    Ctl(Box<paper_ctl::CtlArgs>),
}

/// Most accounts that one start declares.
const ACCOUNTS_MAX: u64 = 5000;

/// What is printed once it listens; the address follows.
pub const LISTENS: &str = "paper broker listens on ";

/// Runs `lockstep paper` until it is told to end.
pub fn run(args: PaperArgs) -> Result<(), CliError> {
    if let Some(PaperVerb::Ctl(args)) = args.verb {
        return paper_ctl::run(*args);
    }
    super::node::start_log("warn")?;
    crate::open_files::raise();
    let specs = match &args.symbols_of {
        Some(path) => symbol_specs(&super::publish::load(path)?),
        None => Vec::new(),
    };
    let password = match &args.password_file {
        Some(path) => Some(Password::new(password::of_file(path)?.expose())),
        None => None,
    };
    let settings =
        Settings { answer_delay_ms: args.answer_delay_ms, check_tokens: args.check_tokens };
    let config =
        PaperConfig { listen: args.listen, ledger_path: args.ledger, settings, seed: args.seed };
    let failed = |error| CliError::missing("paper broker", error);
    block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let shutdown = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        };
        let server = PaperServer::bind(config).await.map_err(failed)?;
        let addr = server.local_addr();
        let mut serving = std::pin::pin!(server.serve(shutdown));
        let declaring = async {
            let driver = drive(&addr.to_string(), "paper").await?;
            declare(&driver, specs, args.accounts, password).await
        };
        tokio::select! {
            served = &mut serving => return served.map_err(failed),
            declared = declaring => declared?,
        }
        // Whoever starts it on port 0 reads the port here.
        out::line(format_args!("{LISTENS}{addr}"))?;
        serving.await.map_err(failed)
    })?
}

/// Account numbers `FROM-TO`, or one number.
fn account_range(text: &str) -> Result<(u64, u64), String> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let number = |part: &str| part.parse::<AccountId>().map(AccountId::get);
    match (number(from), number(to)) {
        (Ok(from), Ok(to)) if from <= to && to - from < ACCOUNTS_MAX => Ok((from, to)),
        _ => Err(format!("must be FROM-TO, 1 to {ACCOUNTS_MAX} account numbers, got {text:?}")),
    }
}

/// A driver of the broker at this address.
pub(super) async fn drive(address: &str, name: &str) -> Result<PaperDriver, CliError> {
    let node = NodeId::new(name).map_err(|error| CliError::Usage(error.to_string()))?;
    PaperDriver::connect(address, Ident { node }, LoginKind::Driver)
        .await
        .map_err(|error| CliError::missing("paper broker", error))
}

/// The symbols of a history, with room for ten times its largest volume.
pub(super) fn symbol_specs(history: &History) -> Vec<SymbolSpec> {
    let spec = |hint: history::SymbolHint| SymbolSpec {
        symbol: hint.symbol,
        digits: hint.digits,
        lots_step: hint.lots_step,
        lots_min: hint.lots_step,
        lots_max: Lots::new(hint.lots_max.get() * Decimal::TEN).unwrap_or(hint.lots_max),
        contract_size: hint.assumed_contract.map(|contract| contract.size),
        stops_level_points: 0,
    };
    history::symbols(history).into_iter().map(spec).collect()
}

/// Declares symbols, and accounts of which every third closes parts as MT4 does: the rest gets a
/// new ticket and loses its tag.
pub(super) async fn declare(
    driver: &PaperDriver,
    symbols: Vec<SymbolSpec>,
    accounts: Option<(u64, u64)>,
    password: Option<Password>,
) -> Result<(), CliError> {
    let failed = |error| CliError::missing("paper broker", error);
    if !symbols.is_empty() {
        driver.declare_symbols(symbols).await.map_err(failed)?;
    }
    let (from, to) = accounts.unwrap_or((1, 0));
    let accounts: Vec<AccountDecl> = (from..=to)
        .filter_map(|number| AccountId::new(number).ok())
        .map(|account| {
            let style = if account.get().is_multiple_of(3) { Style::Mt4 } else { Style::Mt5 };
            AccountDecl { password: password.clone(), ..AccountDecl::new(account, style) }
        })
        .collect();
    if !accounts.is_empty() {
        driver.declare_accounts(accounts).await.map_err(failed)?;
    }
    Ok(())
}
