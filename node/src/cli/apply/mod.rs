//! `lockstep apply`: accounts and links as a file declares them.
//!
//! In: a file of `[[account]]` and `[[link]]` entries, whose keys are the options of `account add` and
//! `link add`. Out: the changes that make the database say the same, made in one transaction.
//!
//! Invariants:
//! 1. All or nothing: with any fault nothing is applied, and every fault is told with its place.
//! 2. A dry run writes nothing at all: numbers that it used up would be missed by accounts whose login
//!    is their number. What the database alone can refuse is therefore told only when it is applied.
//! 3. What the file does not name is left alone and listed; `--prune` removes links and switches
//!    accounts off.

mod diff;
mod file;
mod store;

use super::account::{explain as explain_account, refused};
use super::link::explain as explain_link;
use super::table::{TableRow, render};
use super::{CliError, DatabaseArg, block_on, out};
use clap::Args;
use diff::{Change, Plan, Step};
use file::{At, Declared, Fault};
use serde::Serialize;
use sqlx::{Acquire, PgConnection};
use std::path::PathBuf;

/// Arguments of `lockstep apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// The file, in TOML.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Show the changes, and make none.
    #[arg(long)]
    dry_run: bool,
    /// Also remove links and switch off accounts that the file does not name. No other verb removes a link;
    /// its open copies are followed to their end.
    #[arg(long)]
    prune: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Answer {
    applied: bool,
    changes: Vec<Told>,
    not_in_file: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Told {
    change: &'static str,
    what: &'static str,
    name: String,
    fields: Vec<diff::Field>,
}

impl Told {
    fn of(change: &Change) -> Told {
        let (word, what) = match change.step {
            Step::AddAccount(_) => ("add", "account"),
            Step::ChangeAccount { .. } => ("change", "account"),
            Step::SwitchAccountOff { .. } => ("switch off", "account"),
            Step::AddLink { .. } => ("add", "link"),
            Step::ChangeLink { .. } => ("change", "link"),
            Step::RemoveLink { .. } => ("remove", "link"),
        };
        Told { change: word, what, name: change.name.clone(), fields: change.fields.clone() }
    }
}

impl TableRow for Told {
    const HEAD: &'static [&'static str] = &["change", "what", "name", "how"];
    fn cells(&self) -> Vec<String> {
        let field = |field: &diff::Field| match &field.from {
            None => format!("{} {}", field.field, field.to),
            Some(from) => {
                let shown =
                    |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
                format!("{}: {} → {}", field.field, shown(from), shown(&field.to))
            }
        };
        let how = self.fields.iter().map(field).collect::<Vec<_>>().join(", ");
        vec![self.change.to_owned(), self.what.to_owned(), self.name.clone(), how]
    }
}

/// Runs `lockstep apply`.
pub fn run(args: ApplyArgs) -> Result<(), CliError> {
    let shown = args.file.display().to_string();
    let text = std::fs::read_to_string(&args.file)
        .map_err(|error| CliError::missing(format!("--file {shown}"), error))?;
    let wrong = |faults: Vec<Fault>| refusal(&shown, &faults);
    let (declared, faults) = file::parse(&text);
    if !faults.is_empty() {
        return Err(wrong(block_on(with_more(faults, &declared, &args))?));
    }
    let plan = block_on(async {
        let mut db = if args.dry_run {
            args.database.connect().await?
        } else {
            args.database.connect_to_write().await?
        };
        let mut all = db.begin().await?;
        let stored = store::read(&mut all).await?;
        let plan = diff::diff(&declared, &stored, args.prune).map_err(wrong)?;
        if !args.dry_run {
            let faults = make(&mut all, &plan).await?;
            if !faults.is_empty() {
                return Err(wrong(faults));
            }
            all.commit().await?;
        }
        Ok::<_, CliError>(plan)
    })??;
    show(&args, &plan)
}

/// These faults, and those that show when what could be read is compared with the database; without one
/// in reach, with nothing.
async fn with_more(mut faults: Vec<Fault>, declared: &Declared, args: &ApplyArgs) -> Vec<Fault> {
    let stored = async {
        let mut db = args.database.connect().await.ok()?;
        let mut all = db.begin().await.ok()?;
        store::read(&mut all).await.ok()
    };
    let more = match stored.await {
        Some(stored) => diff::diff(declared, &stored, args.prune).err().unwrap_or_default(),
        None => diff::faults_of_file(declared),
    };
    faults.extend(more);
    faults.sort();
    faults.dedup();
    faults
}

fn refusal(file: &str, faults: &[Fault]) -> CliError {
    let lines = faults.iter().map(|fault| format!("{file}:{}: {}", fault.at, fault.what));
    let count = match faults.len() {
        1 => "1 fault".to_owned(),
        count => format!("{count} faults"),
    };
    let lines: Vec<String> = lines.collect();
    CliError::Usage(format!("{count}, nothing was applied\n{}", lines.join("\n")))
}

/// Makes the changes; what the database refuses is told for all of them.
async fn make(all: &mut PgConnection, plan: &Plan) -> Result<Vec<Fault>, CliError> {
    // Magics that the file names come before those that the database chooses.
    let chooses = |change: &&Change| matches!(&change.step, Step::AddLink { link, .. } if link.magic.is_none());
    let named = plan.changes.iter().filter(|change| !chooses(change));
    let mut faults = Vec::new();
    for change in named.chain(plan.changes.iter().filter(chooses)) {
        let at = change.at.unwrap_or(At { line: 1, column: 1 });
        let mut one = all.begin().await?;
        let made = store::make(&mut one, &change.step).await;
        let explained = made.map_err(|error| match &change.step {
            Step::AddAccount(_) | Step::ChangeAccount { .. } | Step::SwitchAccountOff { .. } => {
                refused(error, |rule| explain_account(rule, &change.name))
            }
            Step::AddLink { link, .. } | Step::ChangeLink { to: link, .. } => {
                let between = format!("link {}", change.name);
                refused(error, |rule| explain_link(rule, &between, link.magic))
            }
            Step::RemoveLink { .. } => error.into(),
        });
        match explained {
            Ok(true) => one.commit().await?,
            Ok(false) => {
                let what = format!("{}: it has changed meanwhile, look at it again", change.name);
                faults.push(Fault { at, what });
                one.rollback().await?;
            }
            Err(CliError::Usage(what)) => {
                faults.push(Fault { at, what: what.replace("--", "") });
                one.rollback().await?;
            }
            Err(other) => return Err(other),
        }
    }
    faults.sort();
    Ok(faults)
}

fn show(args: &ApplyArgs, plan: &Plan) -> Result<(), CliError> {
    let changes: Vec<Told> = plan.changes.iter().map(Told::of).collect();
    let not_in_file = plan.not_in_file.clone();
    if args.json {
        return out::json(&Answer { applied: !args.dry_run, changes, not_in_file });
    }
    let mut text = String::new();
    if !changes.is_empty() {
        text += &format!("{}\n\n", render(Told::HEAD, changes.iter().map(TableRow::cells)));
    }
    if !not_in_file.is_empty() {
        text += &format!("not in the file and left alone: {}\n", not_in_file.join(", "));
    }
    let done = match (changes.len(), args.dry_run) {
        (0, _) => "nothing to change".to_owned(),
        (1, false) => "1 change applied".to_owned(),
        (count, false) => format!("{count} changes applied"),
        (1, true) => "1 change, not applied".to_owned(),
        (count, true) => format!("{count} changes, not applied"),
    };
    out::line(text + &done)
}
