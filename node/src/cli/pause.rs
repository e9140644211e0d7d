//! `lockstep pause`, `resume` and `kill-switch`: what is allowed on a link, an account, everything.
//!
//! Decides nothing: it sets modes, which their owners hear of at once. The strictest of a link's, its
//! two accounts' and the fleet's counts.

use super::{CliError, DatabaseArg, block_on, out};
use crate::directory::{self, LinkRow, Mode};
use clap::Args;
use schemas::{AccountId, LinkId};
use serde::Serialize;
use sqlx::PgConnection;

/// A link by its number, or an account by its name: no name is digits alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// The link of this number.
    Link(LinkId),
    /// The account of this name.
    Account(String),
}

impl std::str::FromStr for Target {
    type Err = String;

    fn from_str(word: &str) -> Result<Target, String> {
        if !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()) {
            return word
                .parse()
                .map(Target::Link)
                .map_err(|error: schemas::IdError| error.to_string());
        }
        match word {
            "" => Err("must be the number of a link or the name of an account".to_owned()),
            name => Ok(Target::Account(name.to_owned())),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Link(link) => write!(f, "link {link}"),
            Target::Account(name) => write!(f, "account {name}"),
        }
    }
}

/// Arguments of `lockstep pause`.
#[derive(Debug, Args)]
pub struct PauseArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Number of a link, or name of an account: all its links, as master and as follower.
    #[arg(value_name = "LINK|ACCOUNT")]
    target: Target,
    /// Open nothing, and still follow and close what is open.
    #[arg(long)]
    close_only: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `lockstep resume`.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Number of a link, or name of an account.
    #[arg(value_name = "LINK|ACCOUNT", required_unless_present = "all")]
    target: Option<Target>,
    /// End the kill switch; links and accounts that were paused by themselves stay so.
    #[arg(long, conflicts_with = "target")]
    all: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `lockstep kill-switch`.
#[derive(Debug, Args)]
pub struct KillSwitchArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Open nothing, and still follow and close what is open.
    #[arg(long)]
    close_only: bool,
    /// Do not ask. Without a terminal, as in a script, nothing is stopped unless this is given.
    #[arg(long)]
    yes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Set {
    target: String,
    mode: Mode,
    /// It was not so before.
    changed: bool,
    /// Links that do not copy now, for this reason or another.
    links_not_copying: usize,
    /// All links.
    links: usize,
}

/// Runs `lockstep pause`.
pub fn pause(args: PauseArgs) -> Result<(), CliError> {
    let mode = stopped(args.close_only);
    block_on(async {
        let mut db = args.database.connect_to_write().await?;
        set(&mut db, Some(&args.target), mode, args.json).await
    })?
}

/// Runs `lockstep resume`.
pub fn resume(args: ResumeArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = args.database.connect_to_write().await?;
        set(&mut db, args.target.as_ref(), Mode::Copy, args.json).await
    })?
}

/// Runs `lockstep kill-switch`.
pub fn kill_switch(args: KillSwitchArgs) -> Result<(), CliError> {
    let mode = stopped(args.close_only);
    block_on(async {
        let mut db = args.database.connect_to_write().await?;
        let links = directory::list_links(&mut db).await?;
        let stops = links.iter().filter(|link| link.effective_mode < mode).count();
        if !args.yes {
            let stops =
                format!("it stops {stops} of {} links: {}", links.len(), meaning(mode, true));
            super::confirm(&stops, "nothing was stopped")?;
        }
        set(&mut db, None, mode, args.json).await
    })?
}

fn stopped(close_only: bool) -> Mode {
    if close_only { Mode::CloseOnly } else { Mode::Paused }
}

/// What a mode means; `is_all` where no other mode holds a link.
fn meaning(mode: Mode, is_all: bool) -> &'static str {
    match mode {
        Mode::Copy if is_all => "everything is copied",
        Mode::Copy => "it stops nothing by itself any more",
        Mode::CloseOnly => "nothing is opened, and what is open is followed and closed",
        Mode::Paused => "no order is sent, not even to close what the master closes",
    }
}

async fn set(
    db: &mut PgConnection,
    target: Option<&Target>,
    mode: Mode,
    json: bool,
) -> Result<(), CliError> {
    let mut account = None;
    let changed = match target {
        None => directory::set_fleet_mode(db, mode).await?,
        Some(Target::Link(link)) => directory::set_link_mode(db, *link, mode).await?,
        Some(Target::Account(name)) => {
            let id: AccountId = directory::account_id(db, name).await?;
            account = Some(name.as_str());
            directory::set_account_mode(db, id, mode).await?
        }
    };
    let links = directory::list_links(db).await?;
    let concerns = |link: &&LinkRow| match target {
        None => true,
        Some(Target::Link(id)) => link.id == *id,
        Some(Target::Account(_)) => {
            account.is_some_and(|name| link.master == name || link.follower == name)
        }
    };
    let concerned: Vec<&LinkRow> = links.iter().filter(concerns).collect();
    let held = concerned.iter().filter(|link| link.effective_mode != Mode::Copy).count();
    if json {
        let target = target.map_or_else(|| "everything".to_owned(), Target::to_string);
        let links = concerned.len();
        return out::json(&Set { target, mode, changed, links_not_copying: held, links });
    }
    let what = named(target, &concerned);
    let was = if changed { "" } else { "was already " };
    out::line(format_args!("{what} {was}{mode}: {}", meaning(mode, held == 0)))?;
    if mode == Mode::Copy && held > 0 {
        let still = "do not copy, for a mode of their own, of an account or of the fleet, or because \
                     they are off (`lockstep link list`)";
        return out::line(format_args!("{held} of {} links still {still}", concerned.len()));
    }
    Ok(())
}

/// What was set, a link with its accounts: a number alone could be taken for that of an account.
fn named(target: Option<&Target>, concerned: &[&LinkRow]) -> String {
    match (target, concerned) {
        (None, _) => "everything".to_owned(),
        (Some(target @ Target::Link(_)), [link]) => {
            format!("{target} ({} to {})", link.master, link.follower)
        }
        (Some(target), _) => target.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resume_that_leaves_links_stopped_does_not_say_that_everything_is_copied() {
        assert_eq!(meaning(Mode::Copy, true), "everything is copied");
        assert!(!meaning(Mode::Copy, false).contains("copied"));
    }

    #[test]
    fn digits_are_a_link_and_anything_else_an_account() {
        let target = |word: &str| word.parse::<Target>();
        assert_eq!(target("7"), Ok(Target::Link(LinkId::new(7).unwrap())));
        assert_eq!(target("7a"), Ok(Target::Account("7a".to_owned())));
        assert!(target("0").is_err());
        assert!(target("").is_err());
    }
}
