//! `lockstep publish`: plays a recorded account history as a master.

use super::on_bus::BusArg;
use super::{CliError, block_on, out};
use crate::clock::NodeClock;
use crate::history::{self, History, Step};
use crate::player::{self, Player};
use bus::{Publisher, PublisherSettings, hear_epochs, start_epoch};
use clap::Args;
use schemas::{AccountId, subject};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Longer than the time between two beacons, so that a living publisher is heard.
const LISTEN_FOR: Duration = Duration::from_secs(3);

/// Arguments of `lockstep publish`.
#[derive(Debug, Args)]
pub struct PublishArgs {
    /// History file: an MT4 statement, an MT5 report (HTML or CSV), an MQL5 signal or our own CSV.
    /// `demo` is the history that comes with Lockstep.
    #[arg(long, value_name = "FILE")]
    history: PathBuf,
    /// Number of the master's account; add it with `lockstep account add NAME --platform external`.
    #[arg(long, required_unless_present = "dry_run")]
    account: Option<AccountId>,
    /// Seconds of the history in one second.
    #[arg(long, default_value_t = 60.0, value_parser = speed)]
    speed: f64,
    #[command(flatten)]
    bus: BusArg,
    /// Speak for this master although somebody else does; its followers then close what this
    /// history does not hold.
    #[arg(long)]
    take_over: bool,
    /// Paper broker that is fed the prices of the history.
    #[arg(long, value_name = "HOST:PORT")]
    paper: Option<String>,
    /// Only say what would be played, and what the file does not say.
    #[arg(long)]
    dry_run: bool,
    /// End after the last step, instead of staying and answering snapshot requests.
    #[arg(long)]
    once: bool,
}

/// A speed above zero.
pub(super) fn speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| format!("must be a number, got {text:?}"))?;
    if speed.is_finite() && speed > 0.0 && speed <= 1e9 {
        Ok(speed)
    } else {
        Err(format!("must be above 0 and at most 1000000000, got {text}"))
    }
}

/// Reads a history; `demo` is the one that comes with the program.
pub(super) fn load(path: &std::path::Path) -> Result<History, CliError> {
    let loaded = if path.as_os_str() == "demo" {
        history::load_bytes("demo.csv", history::DEMO.as_bytes())
    } else {
        history::load(path)
    };
    loaded.map_err(|error| CliError::Usage(error.to_string()))
}

/// Runs `lockstep publish`.
pub fn run(args: PublishArgs) -> Result<(), CliError> {
    let history = load(&args.history)?;
    let steps = history::timeline(&history);
    describe(&history, &steps, args.speed)?;
    let Some(account) = args.account.filter(|_| !args.dry_run) else { return Ok(()) };
    super::node::start_log("warn,lockstep=info")?;
    block_on(play(&args, account, &steps))?
}

fn describe(history: &History, steps: &[Step], speed: f64) -> Result<(), CliError> {
    let length = player::schedule(steps, speed).last().copied().unwrap_or_default();
    out::line(format_args!(
        "{}: {} trades, {} pending orders, {} steps, {:.0} s at speed {speed}",
        history.source.file,
        history.trades.len(),
        history.pendings.len(),
        steps.len(),
        length.as_secs_f64()
    ))?;
    for sentence in &history.unsaid {
        out::line(format_args!("not in the file: {sentence}"))?;
    }
    Ok(())
}

async fn play(args: &PublishArgs, account: AccountId, steps: &[Step]) -> Result<(), CliError> {
    let name = format!("publish-{account}");
    let (tell, mut refusals) = watch::channel(None);
    let client = args.bus.connected_and_tell(&name, tell).await?;
    let clock = NodeClock::system();
    let heard = hear_epochs(&client, account, LISTEN_FOR).await;
    let heard = heard.map_err(|error| args.bus.missing(error))?;
    if heard.said.is_some() && !args.take_over {
        return Err(CliError::No(format!(
            "--account {account}: somebody publishes for this master right now; with --take-over \
             its followers would obey this history instead"
        )));
    }
    let publisher = Publisher::start(
        client,
        account,
        start_epoch(clock.wall(), None, heard.highest()),
        PublisherSettings::default(),
        // An external publisher has no lease; the highest epoch wins.
        Arc::new(|| true),
        &tokio::runtime::Handle::current(),
    );
    publisher.observe(clock.wall(), player::base(), &BTreeMap::new());
    let driver = match &args.paper {
        Some(address) => Some(super::paper::drive(address, &name).await?),
        None => None,
    };
    let now = || clock.wall();
    let player =
        Player { publisher: &publisher, driver: driver.as_ref(), speed: args.speed, now: &now };
    let total = steps.len();
    let played = player.play(steps, |index, _, change| {
        tracing::info!(step = index + 1, total, kind = change.kind(), ticket = %change.ticket());
    });
    tokio::select! {
        played = played => played.map_err(|error| CliError::missing("history", error))?,
        stopped = tokio::signal::ctrl_c() => stopped?,
        refusal = speaking_refused(&mut refusals, account) => {
            return Err(refused(account, refusal, &args.bus.shown()));
        }
    }
    if !args.once {
        out::line("played; still answering snapshot requests, Ctrl-C ends it")?;
        tokio::select! {
            stopped = tokio::signal::ctrl_c() => stopped?,
            refusal = speaking_refused(&mut refusals, account) => {
                return Err(refused(account, refusal, &args.bus.shown()));
            }
        }
    }
    publisher.close(Duration::from_secs(2)).await;
    Ok(())
}

/// The first refusal to let us speak for this master, in the server's words; it never ends without one.
async fn speaking_refused(
    refusals: &mut watch::Receiver<Option<String>>,
    account: AccountId,
) -> String {
    let said = refusals.wait_for(|said| said.as_ref().is_some_and(|said| is_about(said, account)));
    match said.await {
        Ok(said) => said.clone().unwrap_or_default(),
        // The connection is gone for good, and with it whoever could refuse.
        Err(_) => std::future::pending().await,
    }
}

/// Whether a server refused an event or a beacon of this master.
fn is_about(refusal: &str, account: AccountId) -> bool {
    let refused = [subject::event(account), subject::beacon(account)]
        .map(|subject| format!("publish to \"{subject}\""));
    refused.iter().any(|refused| refusal.to_ascii_lowercase().contains(refused))
}

fn refused(account: AccountId, refusal: String, bus: &str) -> CliError {
    CliError::missing(
        format!("bus at {bus}: this user may not speak for account {account}"),
        format!(
            "{refusal}. Use the user of its publisher (`lockstep nats add FOLDER --publisher \
             NAME={account}`), or reload the servers if that was just added"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_to_speak_for_the_own_master_ends_it() {
        let seven = AccountId::new(7).unwrap();
        let is_about = |subject: &str, verb: &str| {
            is_about(&format!("nats: Permissions Violation for {verb} \"{subject}\""), seven)
        };
        assert!(is_about("lockstep.v1.master.7.event", "Publish to"));
        assert!(is_about("lockstep.v1.master.7.beacon", "Publish to"));
        assert!(!is_about("lockstep.v1.master.77.event", "Publish to"));
        assert!(!is_about("lockstep.v1.master.7.event", "Subscription to"));
        assert!(!is_about("lockstep.v1.snapshot.7", "Publish to"));
    }
}
