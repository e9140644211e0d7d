//! `lockstep paper`: runs the paper broker.

use super::{CliError, block_on};
use clap::Args;
use paper::faults::Settings;
use paper::server::{self, PaperConfig};
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// Arguments of `lockstep paper`.
#[derive(Debug, Args)]
pub struct PaperArgs {
    /// Where to listen; port 0 takes a free one, which is printed.
    #[arg(long, default_value = "127.0.0.1:4100")]
    listen: SocketAddr,
    /// Time from carrying an order out to answering it, in milliseconds.
    #[arg(long, default_value_t = 130)]
    answer_delay_ms: u64,
    /// Refuse orders whose lease token is older than the highest one seen for the account.
    #[arg(long)]
    check_tokens: bool,
    /// New file that the ledger is written to, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    ledger: Option<PathBuf>,
}

/// What is printed once it listens; the address follows.
pub const LISTENS: &str = "paper broker listens on ";

/// Runs `lockstep paper` until it is told to end.
#[allow(clippy::print_stdout, reason = "whoever starts it on port 0 reads the port here")]
pub fn run(args: PaperArgs) -> Result<(), CliError> {
    super::node::start_log("warn")?;
    let settings =
        Settings { answer_delay_ms: args.answer_delay_ms, check_tokens: args.check_tokens };
    let config = PaperConfig { listen: args.listen, ledger_path: args.ledger, settings };
    block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let shutdown = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        };
        server::run(config, |addr| println!("{LISTENS}{addr}"), shutdown)
            .await
            .map_err(|error| CliError::missing("paper broker", error))
    })?
}
