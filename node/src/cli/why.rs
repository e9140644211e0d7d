//! `lockstep why`: the story of one trade of a master on one link.

use super::pause::Target;
use super::table::{TableRow, or_dash, render};
use super::{CliError, DatabaseArg, block_on, out};
use crate::directory;
use crate::story::{self, EventTold, Story, Verdict};
use clap::Args;
use schemas::{LinkId, MasterTicket};
use sqlx::{PgConnection, Row};

/// Arguments of `lockstep why`.
#[derive(Debug, Args)]
pub struct WhyArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Number of the link, or name of an account, as follower or master, that has one with this ticket.
    #[arg(value_name = "LINK|ACCOUNT")]
    target: Target,
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
        let link = match &args.target {
            Target::Link(link) => *link,
            Target::Account(name) => link_of(&mut db, name, args.ticket).await?,
        };
        let story = story::read(&mut db, link, args.ticket).await?;
        let Some(story) = story else {
            return Err(CliError::No(format!("there is no link {link}")));
        };
        if args.json {
            out::json(&story)?;
        } else {
            print(&story)?;
        }
        match story.verdict {
            Verdict::UNKNOWN => Err(CliError::No(format!(
                "link {link} has no row of master ticket {}",
                args.ticket
            ))),
            _ => Ok(()),
        }
    })?
}

/// Links that are named where an account has several.
const NAMED_MAX: usize = 20;

/// The one link of this account that has rows of this ticket, or the only one that it has.
async fn link_of(
    db: &mut PgConnection,
    name: &str,
    ticket: MasterTicket,
) -> Result<LinkId, CliError> {
    let account = directory::account_id(db, name).await?;
    let rows = sqlx::query(
        "select l.id, format('%s (%s to %s)', l.id, m.name, f.name) as named, \
           (exists (select from pairs p where p.link_id = l.id and p.follower_id = l.follower_id \
               and p.master_ticket = $2) \
            or exists (select from copy_events e where e.link_id = l.id and e.master_ticket = $2)) as has_rows \
         from copy_links l join trading_accounts m on m.id = l.master_id \
         join trading_accounts f on f.id = l.follower_id \
         where $1 in (l.master_id, l.follower_id) order by l.id",
    )
    .bind(account.as_i64())
    .bind(ticket.as_i64())
    .fetch_all(db)
    .await?;
    let with_rows: Vec<_> = rows.iter().filter(|row| row.get("has_rows")).collect();
    let link = match (&with_rows[..], &rows[..]) {
        ([one], _) => one.get("id"),
        ([], [one]) => one.get("id"),
        ([], []) => return Err(CliError::No(format!("account {name} has no link"))),
        ([], all) => {
            return Err(CliError::No(format!(
                "none of the {} links of account {name} has a row of master ticket {ticket}: {}",
                all.len(),
                story::UNRECORDED_BECAUSE
            )));
        }
        (several, _) => {
            let named = several.iter().take(NAMED_MAX).map(|row| row.get::<String, _>("named"));
            let named = named.collect::<Vec<_>>().join(", ");
            let more = if several.len() > NAMED_MAX { " and more" } else { "" };
            return Err(CliError::Usage(format!(
                "master ticket {ticket} is on {} links of account {name}: give the number of one: \
                 {named}{more}",
                several.len()
            )));
        }
    };
    LinkId::from_i64(link).map_err(|error| CliError::missing("copy_links", error))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::tests::database_with;
    use crate::directory::{NewLink, add_link};
    use reconcile::Sizing;
    use rust_decimal::Decimal;

    #[tokio::test]
    async fn an_account_stands_for_its_link_that_has_the_ticket() {
        let names = [("boss", "external"), ("one", "paper"), ("two", "paper"), ("alone", "paper")];
        let (_url, mut db, accounts) = database_with("why-names", &names).await;
        let mut links = Vec::new();
        for follower in &accounts[1..3] {
            let plain = NewLink::plain(accounts[0], *follower, Sizing::Multiplier(Decimal::ONE));
            links.push(add_link(&mut db, &plain).await.unwrap());
        }
        for (link, ticket) in [(links[0], 7_i64), (links[0], 8), (links[1], 8)] {
            sqlx::query(
                "insert into copy_events (id, at, node_id, lease_token, link_id, follower_id, \
                 master_ticket, action, outcome) values (gen_random_uuid(), now(), 'n', 1, $1, 2, $2, \
                 'open_copy', 'skipped')",
            )
            .bind(link.as_i64())
            .bind(ticket)
            .execute(&mut db)
            .await
            .unwrap();
        }
        let ticket = |number: u64| MasterTicket::new(number).unwrap();
        // By its follower, and by its master where the ticket is on one link alone.
        assert_eq!(link_of(&mut db, "two", ticket(8)).await.unwrap(), links[1]);
        assert_eq!(link_of(&mut db, "boss", ticket(7)).await.unwrap(), links[0]);
        // The only link says by itself that it knows nothing.
        assert_eq!(link_of(&mut db, "two", ticket(7)).await.unwrap(), links[1]);
        let several = link_of(&mut db, "boss", ticket(8)).await.unwrap_err().to_string();
        assert!(
            several.contains("(boss to one), ") && several.contains("(boss to two)"),
            "{several}"
        );
        let none = link_of(&mut db, "boss", ticket(9)).await.unwrap_err().to_string();
        assert!(none.contains("none of the 2 links"), "{none}");
        assert!(none.contains("kill switch") && none.contains("has no owner"), "{none}");
        let unlinked = link_of(&mut db, "alone", ticket(9)).await.unwrap_err().to_string();
        assert!(unlinked.contains("has no link"), "{unlinked}");
        let stranger = link_of(&mut db, "nobody", ticket(9)).await.unwrap_err();
        assert!(matches!(stranger, CliError::Usage(_)), "{stranger}");
    }

    #[tokio::test]
    async fn times_of_a_story_are_utc_and_say_so_wherever_the_database_stands() {
        let names = [("boss", "external"), ("one", "paper")];
        let (_url, mut db, accounts) = database_with("why-zone", &names).await;
        let sizing = Sizing::Multiplier(Decimal::ONE);
        let plain = NewLink::plain(accounts[0], accounts[1], sizing);
        let link = add_link(&mut db, &plain).await.unwrap();
        sqlx::raw_sql(
            "set timezone = 'Asia/Tokyo'; \
             insert into copy_events (id, at, node_id, lease_token, link_id, follower_id, master_ticket, \
             action, outcome) select gen_random_uuid(), '2026-01-31T10:00:00.123456+01:00', 'n', 1, id, \
             follower_id, 7, 'open_copy', 'done' from copy_links",
        )
        .execute(&mut db)
        .await
        .unwrap();
        let story =
            story::read(&mut db, link, MasterTicket::new(7).unwrap()).await.unwrap().unwrap();
        assert_eq!(story.events[0].at, "2026-01-31T09:00:00.123Z");
        assert_eq!(story.events[0].cells()[0], "2026-01-31T09:00:00.123Z");
    }
}
