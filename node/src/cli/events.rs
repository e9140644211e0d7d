//! `lockstep events tail`: what was copied, skipped or failed, as it is written down.
//!
//! In: rows of `copy_events`. Out: one line each, oldest first; with `--follow` also those that come,
//! with `--json` then one JSON object a line.
//!
//! A database that goes away does not end `--follow`: it is said on stderr, and looked for again.
//!
//! Not covered: events that their node has not written yet, or lost when it died.

use super::table::{TableRow, or_dash, render};
use super::watch::{LOOK_LIMIT, too_long, wait_after};
use super::{CliError, DatabaseArg, block_on, out};
use crate::causes::with_causes;
use crate::config::parse_duration;
use crate::directory;
use crate::story::{EVENT_COLUMNS, EventTold, event_told};
use clap::{Args, Subcommand};
use schemas::LinkId;
use serde::Serialize;
use sqlx::{PgConnection, Row};
use std::collections::BTreeSet;
use std::time::Duration;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// How often new rows are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// Rows of an earlier moment may be committed later: a writer's statement takes 5 s at most.
const LATE: Duration = Duration::from_secs(30);
/// An event is written after it happened; the clocks of its node and of the database may differ by so
/// much before `--since` misses it.
const CLOCKS_APART_MAX: time::Duration = time::Duration::hours(1);
/// How much older than its row an event of `--follow` may be: its node keeps it while the database is
/// away.
const KEPT_MAX: time::Duration = time::Duration::days(1);
/// Rows that one look takes; more follow in the next.
const ROWS_MAX: i64 = 10_000;

/// Arguments of `lockstep events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(subcommand)]
    verb: EventsVerb,
}

#[derive(Debug, Subcommand)]
enum EventsVerb {
    /// Print the last events, and with --follow those that come.
    ///
    /// OWN US is the own time of a copy in microseconds, from the master's event to the order call; `-` where
    /// a comparison led to it.
    Tail(TailArgs),
}

#[derive(Debug, Args)]
struct TailArgs {
    /// Go on with what comes, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
    /// Only this link.
    #[arg(long)]
    link: Option<LinkId>,
    /// Only this account, as master or follower: its name or number.
    #[arg(long)]
    account: Option<String>,
    /// Only since then: a time such as 2026-01-31T09:00:00Z, or so long ago, such as 10m.
    #[arg(long, value_parser = since, default_value = "24h")]
    since: Since,
    /// The last so many at most.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=ROWS_MAX))]
    limit: u32,
    /// Print JSON: an array, or with --follow one object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Since {
    Ago(Duration),
    At(OffsetDateTime),
}

fn since(text: &str) -> Result<Since, String> {
    if let Ok(at) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(Since::At(at));
    }
    parse_duration(text).map(Since::Ago).map_err(|_| {
        "must be a time like 2026-01-31T09:00:00Z, or 24h or less, like 10m".to_owned()
    })
}

/// An event and the link it is of.
#[derive(Debug, Serialize)]
struct Told {
    link: i64,
    master: String,
    follower: String,
    master_ticket: i64,
    symbol: Option<String>,
    #[serde(flatten)]
    event: EventTold,
}

impl TableRow for Told {
    const HEAD: &'static [&'static str] = &[
        "at", "link", "master", "follower", "ticket", "symbol", "step", "outcome", "lots",
        "own us", "meaning",
    ];
    fn cells(&self) -> Vec<String> {
        vec![
            self.event.at.clone(),
            self.link.to_string(),
            self.master.clone(),
            self.follower.clone(),
            self.master_ticket.to_string(),
            or_dash(self.symbol.clone()),
            self.event.action.clone(),
            self.event.outcome.clone(),
            or_dash(self.event.lots.clone()),
            or_dash(self.event.own_time_us),
            self.event.says.clone(),
        ]
    }
}

/// Runs `lockstep events`.
pub fn run(args: EventsArgs) -> Result<(), CliError> {
    let EventsVerb::Tail(tail) = args.verb;
    block_on(async {
        let mut db = args.database.connect().await?;
        let account = match &tail.account {
            Some(name) => Some(directory::account_id(&mut db, name).await?.as_i64()),
            None => None,
        };
        let filter = Filter { link: tail.link.map(LinkId::as_i64), account };
        let now: OffsetDateTime =
            sqlx::query_scalar("select clock_timestamp()").fetch_one(&mut db).await?;
        let since = match tail.since {
            Since::At(at) => at,
            Since::Ago(ago) => now - ago,
        };
        let (rows, mut seen) = filter.last(&mut db, since, i64::from(tail.limit)).await?;
        match (tail.json, tail.follow) {
            (true, true) => rows.iter().try_for_each(out::json_line)?,
            (true, false) => out::json(&rows)?,
            (false, _) => out::line(render(Told::HEAD, rows.iter().map(TableRow::cells)))?,
        }
        if !tail.follow {
            return Ok(());
        }
        let from = since.max(now);
        tokio::select! {
            ended = filter.follow(Some(db), &args.database, from, &mut seen, tail.json) => ended,
            stopped = tokio::signal::ctrl_c() => Ok(stopped?),
        }
    })?
}

struct Filter {
    link: Option<i64>,
    account: Option<i64>,
}

impl Filter {
    fn query(&self, rest: &str) -> String {
        // The account's links as follower have an index of their own; a master has few links.
        let link = self.link.map_or_else(String::new, |link| format!(" and e.link_id = {link}"));
        let account = self.account.map_or_else(String::new, |account| {
            format!(
                " and (e.follower_id = {account} or e.link_id in \
                 (select id from copy_links where master_id = {account}))"
            )
        });
        format!(
            "select e.id, e.link_id, e.master_ticket, e.symbol, e.at as happened, e.written_at, {EVENT_COLUMNS}, \
             coalesce(m.name, '-') as master, coalesce(f.name, '-') as follower from copy_events e \
             left join copy_links l on l.id = e.link_id \
             left join trading_accounts m on m.id = l.master_id \
             left join trading_accounts f on f.id = e.follower_id where e.at >= $1{link}{account} {rest}"
        )
    }

    /// Both are found by when they were written, which has an index; the time of the event leaves out the
    /// months before.
    fn last_query(&self) -> String {
        self.query("and e.written_at >= $2 order by e.at desc, e.written_at desc limit $3")
    }

    fn new_query(&self) -> String {
        self.query("and e.written_at >= $2 order by e.written_at limit $3")
    }

    /// The last events, oldest first, and which they are.
    async fn last(
        &self,
        db: &mut PgConnection,
        since: OffsetDateTime,
        limit: i64,
    ) -> Result<(Vec<Told>, BTreeSet<(OffsetDateTime, Uuid)>), CliError> {
        let query = self.last_query();
        let written_from = since - CLOCKS_APART_MAX;
        let query =
            sqlx::query(sqlx::AssertSqlSafe(query)).bind(since).bind(written_from).bind(limit);
        let mut rows = query.fetch_all(db).await?;
        rows.reverse();
        let ids = rows.iter().map(|row| (row.get("written_at"), row.get("id"))).collect();
        Ok((rows.iter().map(told).collect(), ids))
    }

    /// Prints what comes, for ever. Nothing is printed twice, and what is committed late is not lost.
    async fn follow(
        &self,
        mut kept: Option<PgConnection>,
        database: &DatabaseArg,
        from: OffsetDateTime,
        seen: &mut BTreeSet<(OffsetDateTime, Uuid)>,
        json: bool,
    ) -> Result<(), CliError> {
        let mut written_from = from;
        let mut failures = 0;
        loop {
            tokio::time::sleep(if failures == 0 { LOOK } else { wait_after(failures) }).await;
            let look = self.written_since(&mut kept, database, written_from);
            let looked = tokio::time::timeout(LOOK_LIMIT, look).await;
            let rows = match looked.unwrap_or_else(|_| Err(too_long())) {
                Ok(rows) => rows,
                Err(error @ CliError::Missing { .. }) => {
                    failures += 1;
                    let again = wait_after(failures);
                    let why = with_causes(&error);
                    out::ask(format_args!("lockstep: {why}; looking again in {again:?}\n"))?;
                    continue;
                }
                Err(other) => return Err(other),
            };
            failures = 0;
            for row in rows {
                let written: OffsetDateTime = row.get("written_at");
                if !seen.insert((written, row.get("id"))) {
                    continue;
                }
                written_from = written_from.max(written - LATE).max(from);
                let told = told(&row);
                if json {
                    out::json_line(&told)?;
                } else {
                    out::line(told.cells().join("  "))?;
                }
            }
            // What the next look cannot see again need not be known.
            *seen = seen.split_off(&(written_from, Uuid::nil()));
        }
    }

    /// The rows written since then, over a connection that is kept only if that went well.
    async fn written_since(
        &self,
        kept: &mut Option<PgConnection>,
        database: &DatabaseArg,
        written_from: OffsetDateTime,
    ) -> Result<Vec<sqlx::postgres::PgRow>, CliError> {
        let mut db = match kept.take() {
            Some(db) => db,
            None => database.connect().await?,
        };
        let query = sqlx::query(sqlx::AssertSqlSafe(self.new_query()))
            .bind(written_from - KEPT_MAX)
            .bind(written_from)
            .bind(ROWS_MAX);
        let rows = query.fetch_all(&mut db).await?;
        *kept = Some(db);
        Ok(rows)
    }
}

fn told(row: &sqlx::postgres::PgRow) -> Told {
    Told {
        link: row.get("link_id"),
        master: row.get("master"),
        follower: row.get("follower"),
        master_ticket: row.get("master_ticket"),
        symbol: row.get("symbol"),
        event: event_told(row),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_is_a_time_or_a_while_ago() {
        assert_eq!(since("10m"), Ok(Since::Ago(Duration::from_secs(600))));
        let at = OffsetDateTime::parse("2026-01-31T09:00:00Z", &Rfc3339).unwrap();
        assert_eq!(since("2026-01-31T10:00:00+01:00"), Ok(Since::At(at)));
        for wrong in ["10", "yesterday", "", "25h"] {
            assert!(since(wrong).is_err(), "{wrong}");
        }
    }

    /// A database with 20,000 events of the last 40 days and the next 40.
    async fn with_events(name: &str) -> (String, PgConnection) {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database(name).await.unwrap();
        let mut db = crate::database::connect_migrated(&url, "test").await.unwrap();
        sqlx::raw_sql(
            "insert into copy_events (id, at, node_id, lease_token, link_id, follower_id, master_ticket, \
             action, outcome, written_at) select gen_random_uuid(), now() + made, 'node', 1, 1, 2, n, \
             'open_copy', 'done', now() - abs(n - 10000) * interval '345.6 s' \
             from (select n, (n - 10000) * interval '345.6 s' as made from generate_series(1, 20000) n) e; \
             analyze copy_events",
        )
        .execute(&mut db)
        .await
        .unwrap();
        (url, db)
    }

    /// The months that hold events.
    async fn months(db: &mut PgConnection) -> Vec<String> {
        sqlx::query_scalar("select distinct tableoid::regclass::text from copy_events")
            .fetch_all(db)
            .await
            .unwrap()
    }

    async fn plan(db: &mut PgConnection, query: &str, values: &str) -> String {
        let sql = format!("prepare looked_at as {query}; explain execute looked_at {values}");
        let mut lines = Vec::new();
        for statement in sql.split("; ") {
            let rows = sqlx::raw_sql(sqlx::AssertSqlSafe(statement.to_owned()));
            let rows = rows.fetch_all(&mut *db).await.unwrap();
            lines.extend(rows.iter().map(|row| row.get::<String, _>(0)));
        }
        sqlx::raw_sql("deallocate looked_at").execute(db).await.unwrap();
        lines.join("\n")
    }

    #[tokio::test]
    async fn nobody_who_follows_or_counts_events_reads_a_month_of_them() {
        let (_, mut db) = with_events("events-plan").await;
        let months = months(&mut db).await;
        assert!(months.len() >= 2, "{months:?}");
        let all = Filter { link: None, account: None };
        let recent = "now() - interval '1 day', now() - interval '30 s', 100";
        let (copies, reasons) = crate::cli::status::of_events();
        for (query, values) in [
            (all.new_query(), format!("({recent})")),
            (all.last_query(), format!("({recent})")),
            (copies.to_owned(), String::new()),
            (reasons.to_owned(), "(20)".to_owned()),
        ] {
            // As it is planned for these values, and as for any.
            for mode in ["force_custom_plan", "force_generic_plan"] {
                let set = format!("set plan_cache_mode = {mode}");
                sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&mut db).await.unwrap();
                let plan = plan(&mut db, &query, &values).await;
                for month in &months {
                    assert!(!plan.contains(&format!("Seq Scan on {month} ")), "{query}\n{plan}");
                }
            }
        }
    }

    #[tokio::test]
    async fn events_are_followed_on_after_the_connection_broke() {
        let (url, mut db) = with_events("events-broke").await;
        let database = DatabaseArg { database: Some(url) };
        let all = Filter { link: None, account: None };
        let from = OffsetDateTime::now_utc() - Duration::from_secs(3_600);
        let mut kept = None;
        let before = all.written_since(&mut kept, &database, from).await.unwrap();
        let pid: i32 = sqlx::query_scalar("select pg_backend_pid()")
            .fetch_one(kept.as_mut().unwrap())
            .await
            .unwrap();
        let end = sqlx::query("select pg_terminate_backend($1, 5000)").bind(pid);
        end.execute(&mut db).await.unwrap();
        let gone = all.written_since(&mut kept, &database, from).await;
        assert!(matches!(gone, Err(CliError::Missing { .. })), "{gone:?}");
        let after = all.written_since(&mut kept, &database, from).await.unwrap();
        assert_eq!(after.len(), before.len());
    }
}
