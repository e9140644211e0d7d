//! `lockstep positions`: the open copies of each link, beside what its master has open.
//!
//! In: what [`crate::positions`] reads and judges. Out: one line a trade with the difference, and how old the
//! rows of a follower are.

use super::on_bus::{BusArg, connected};
use super::pause::Target;
use super::table::{or_dash, render};
use super::{CliError, DatabaseArg, block_on, out};
use crate::directory;
use crate::positions::{self, Asked, Difference, Line, LinkRow, MasterState, Which};
use clap::Args;
use schemas::AccountId;
use serde::Serialize;
use sqlx::PgConnection;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Longest wait for all masters together: hundreds that are silent take 2 s each, eight at a time.
const ASK_LIMIT: Duration = Duration::from_secs(120);

/// Arguments of `lockstep positions`.
#[derive(Debug, Args)]
pub struct PositionsArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(flatten)]
    bus: BusArg,
    /// Only this link, by its number, or the links of this account, by its name.
    #[arg(value_name = "LINK|ACCOUNT")]
    target: Option<Target>,
    /// Ask the masters, and show the difference. Exit code 1 where there is one, 3 where it is unknown.
    #[arg(long)]
    diff: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One link and its trades.
#[derive(Debug, Serialize)]
struct LinkState {
    link: i64,
    master: String,
    follower: String,
    /// Seconds since the follower's owner last wrote its status; nothing where nobody does.
    rows_age_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    master_state: Option<MasterState>,
    positions: Vec<Line>,
}

/// Runs `lockstep positions`.
pub fn run(args: PositionsArgs) -> Result<(), CliError> {
    let links = block_on(read(&args))??;
    if args.json {
        out::json(&links)?;
    } else {
        show(&links, args.diff)?;
    }
    let all = || links.iter().flat_map(|link| &link.positions);
    let faults = all().filter(|line| line.difference.is_some_and(Difference::is_fault)).count();
    if faults > 0 {
        return Err(CliError::No(format!("{faults} trades differ")));
    }
    let unknown = links.iter().find_map(|link| match &link.master_state {
        Some(MasterState::Unknown { reason }) => Some((&link.master, reason.clone())),
        Some(MasterState::Known { .. }) | None => None,
    });
    match unknown {
        Some((master, reason)) => {
            Err(CliError::missing(format!("master {master} is unknown"), reason))
        }
        None => match all().find(|line| line.difference == Some(Difference::Unknown)) {
            Some(line) => {
                let what = format!("the difference of ticket {}", line.master_ticket);
                Err(CliError::missing(what, line.reason.clone().unwrap_or_default()))
            }
            None => Ok(()),
        },
    }
}

async fn read(args: &PositionsArgs) -> Result<Vec<LinkState>, CliError> {
    let mut db = args.database.connect().await?;
    let links = links(&mut db, args.target.as_ref()).await?;
    let masters: BTreeSet<AccountId> = links.iter().map(|link| link.master).collect();
    let known = if args.diff { ask(args, masters).await? } else { BTreeMap::new() };
    let mut told = Vec::new();
    for link in links {
        let (master_state, positions) = match known.get(&link.master) {
            Some(asked) => {
                let (state, lines) = positions::differences(&mut db, &link, asked).await?;
                (Some(state), lines)
            }
            None => (None, positions::copies(&mut db, &link).await?),
        };
        told.push(LinkState {
            link: link.link,
            master: link.master_name,
            follower: link.follower_name,
            rows_age_s: link.rows_age_s,
            master_state,
            positions,
        });
    }
    Ok(told)
}

/// Every master's state, or why it is unknown.
async fn ask(
    args: &PositionsArgs,
    masters: BTreeSet<AccountId>,
) -> Result<BTreeMap<AccountId, Asked>, CliError> {
    let client = args.bus.connect("lockstep-positions").await?;
    if let Err(reason) = connected(&client).await {
        let unknown = Err(format!("bus at {}: {reason}", args.bus.shown()));
        return Ok(masters.into_iter().map(|master| (master, unknown.clone())).collect());
    }
    Ok(positions::ask(&client, masters, ASK_LIMIT).await)
}

async fn links(db: &mut PgConnection, target: Option<&Target>) -> Result<Vec<LinkRow>, CliError> {
    let (link, account) = match target {
        None => (None, None),
        Some(Target::Link(link)) => (Some(link.as_i64()), None),
        Some(Target::Account(name)) => {
            (None, Some(directory::account_id(db, name).await?.as_i64()))
        }
    };
    let which = Which { link, account, after: 0, links_max: i64::MAX };
    let links = positions::links(db, which).await?;
    if let (true, Some(target @ Target::Link(_))) = (links.is_empty(), target) {
        return Err(CliError::Usage(format!("there is no {target}")));
    }
    Ok(links)
}

const HEAD: &[&str] = &[
    "link",
    "master",
    "follower",
    "ticket",
    "symbol",
    "side",
    "master lots",
    "copy",
    "copy lots",
    "state",
    "difference",
    "why",
];

fn show(links: &[LinkState], diff: bool) -> Result<(), CliError> {
    let cells = |link: &LinkState, line: &Line| {
        let pending = if line.is_pending { " (waiting)" } else { "" };
        let difference = line.difference.map(|difference| match (difference, line.expected_lots) {
            (Difference::Volume, Some(expected)) => format!("volume, expected {expected}"),
            (other, _) => other.as_str().to_owned(),
        });
        vec![
            link.link.to_string(),
            link.master.clone(),
            link.follower.clone(),
            line.master_ticket.to_string(),
            line.symbol.clone(),
            format!("{}{pending}", line.side),
            line.master_lots
                .map_or_else(|| if diff { "-" } else { "" }.to_owned(), |l| l.to_string()),
            or_dash(line.copy_ticket),
            or_dash(line.copy_lots),
            or_dash(line.state.clone()),
            difference.unwrap_or_default(),
            line.reason.clone().unwrap_or_default(),
        ]
    };
    let rows =
        links.iter().flat_map(|link| link.positions.iter().map(move |line| cells(link, line)));
    out::line(render(HEAD, rows))?;
    let mut notes = String::new();
    for link in links {
        let age = link.rows_age_s.map_or_else(
            || "nobody owns the follower, or its owner has written nothing yet".to_owned(),
            |age| format!("rows as of {age:.0} s ago"),
        );
        let master = match &link.master_state {
            None => String::new(),
            Some(MasterState::Known { epoch, seq, trades, pendings }) => {
                format!("; master at {epoch}/{seq}: {trades} trades, {pendings} waiting orders")
            }
            Some(MasterState::Unknown { reason }) => format!("; master unknown: {reason}"),
        };
        notes +=
            &format!("\nlink {} ({} → {}): {age}{master}", link.link, link.master, link.follower);
    }
    out::line(notes)
}
