//! `lockstep reconcile`: has the owner of a follower compare it with its masters now.
//!
//! The answer is the plan that the owner made of a fresh read. With `--dry-run` nothing is done;
//! otherwise the owner then makes its own, from another read, and carries that out.

use super::ask::{ask, concerned};
use super::on_bus::BusArg;
use super::pause::Target;
use super::table::{or_dash, render};
use super::{CliError, DatabaseArg, block_on, out};
use clap::Args;
use schemas::codec::VERSION;
use schemas::control::{ControlReply, ControlRequest, ControlVerb, LinkPlan};
use serde::Serialize;

/// Arguments of `lockstep reconcile`.
#[derive(Debug, Args)]
pub struct ReconcileArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(flatten)]
    bus: BusArg,
    /// Number of a link, or name of a follower: all links onto it.
    #[arg(value_name = "LINK|ACCOUNT")]
    target: Target,
    /// Only say what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Told<'a> {
    account: &'a str,
    node: String,
    /// The owner compares now; with `--dry-run` it does not.
    begun: bool,
    plans: &'a [LinkPlan],
}

/// Runs `lockstep reconcile`.
pub fn run(args: ReconcileArgs) -> Result<(), CliError> {
    let (name, reply) = block_on(async {
        let (owned, _) = concerned(&args.database, &args.target).await?;
        let link = match &args.target {
            Target::Link(link) => Some(*link),
            Target::Account(_) => None,
        };
        let verb = if args.dry_run { ControlVerb::Plan } else { ControlVerb::Reconcile };
        let request = ControlRequest { v: VERSION, account: owned.account, verb, link };
        let reply = ask(&args.bus, &owned, &request).await?;
        Ok::<_, CliError>((owned.name, reply))
    })??;
    if args.json {
        let node = reply.node.to_string();
        out::json(&Told { account: &name, node, begun: !args.dry_run, plans: &reply.plans })?;
    } else {
        show(&args, &name, &reply)?;
    }
    let unknown = reply.plans.iter().find_map(|plan| Some((plan.link, plan.unknown.clone()?)));
    match unknown {
        Some((link, reason)) => Err(CliError::missing(format!("link {link}"), reason)),
        None => Ok(()),
    }
}

fn show(args: &ReconcileArgs, name: &str, reply: &ControlReply) -> Result<(), CliError> {
    let steps = reply.plans.iter().flat_map(|plan| plan.steps.iter().map(move |step| (plan, step)));
    let rows = steps.map(|(plan, step)| {
        vec![
            plan.link.to_string(),
            step.ticket.to_string(),
            step.step.clone(),
            or_dash(step.copy),
            or_dash(step.symbol.clone()),
            or_dash(step.side.map(|side| side.as_str())),
            or_dash(step.lots),
            or_dash(step.reason.clone()),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let mut text = String::new();
    if !rows.is_empty() {
        let head = ["link", "ticket", "step", "copy", "symbol", "side", "lots", "why"];
        text += &format!("{}\n\n", render(&head, rows.iter().cloned()));
    }
    for plan in &reply.plans {
        if plan.held {
            text += &format!(
                "link {}: so much is absent that the plan waits for a second look; nothing is done yet\n",
                plan.link
            );
        }
        for wait in &plan.waiting {
            let why = wait.why.replace('_', " ");
            text += &format!("link {}: ticket {} waits: {why}\n", plan.link, wait.ticket);
        }
        if plan.left_out > 0 {
            text += &format!("link {}: {} more are not shown\n", plan.link, plan.left_out);
        }
    }
    let found = match rows.len() {
        0 => "nothing to do".to_owned(),
        1 => "1 step".to_owned(),
        count => format!("{count} steps"),
    };
    let done = if args.dry_run { "nothing was done" } else { "the owner compares and acts now" };
    out::line(format_args!("{text}{name}, owned by {}: {found}; {done}", reply.node))
}
