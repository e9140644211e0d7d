//! `lockstep why`: the story of one trade of a master on one link.

use super::table::{TableRow, or_dash, render};
use super::{CliError, DatabaseArg, block_on, out};
use crate::story::{self, EventTold, Story, Verdict};
use clap::Args;
use schemas::{LinkId, MasterTicket};

/// Arguments of `lockstep why`.
#[derive(Debug, Args)]
pub struct WhyArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// The link; `lockstep link list` shows its number.
    link: LinkId,
    /// The master's ticket.
    ticket: MasterTicket,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl TableRow for EventTold {
    const HEAD: &'static [&'static str] = &[
        "at",
        "node",
        "step",
        "outcome",
        "copy",
        "lots",
        "price",
        "own us",
        "broker us",
        "meaning",
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.at.clone(),
            self.node.clone(),
            self.action.clone(),
            self.outcome.clone(),
            or_dash(self.follower_ticket),
            or_dash(self.lots.clone()),
            or_dash(self.price.clone()),
            or_dash(self.own_time_us),
            or_dash(self.broker_time_us),
            self.says.clone(),
        ]
    }
}

/// Runs the verb.
pub fn run(args: WhyArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = args.database.connect().await?;
        let story = story::read(&mut db, args.link, args.ticket).await?;
        let Some(story) = story else {
            return Err(CliError::No(format!("there is no link {}", args.link)));
        };
        if args.json {
            out::json(&story)?;
        } else {
            print(&story)?;
        }
        match story.verdict {
            Verdict::UNKNOWN => Err(CliError::No(format!(
                "link {} has no row of master ticket {}",
                args.link, args.ticket
            ))),
            _ => Ok(()),
        }
    })?
}

fn print(story: &Story) -> Result<(), CliError> {
    out::line(format_args!(
        "ticket {} of {} on {} (link {}): {}",
        story.master_ticket, story.master, story.follower, story.link, story.says
    ))?;
    if story.events.is_empty() {
        return Ok(());
    }
    let events = story.events.iter().map(TableRow::cells);
    out::line(format_args!("\n{}", render(EventTold::HEAD, events)))
}
