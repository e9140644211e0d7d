//! The table `node_minutes`: writing this node's minutes, and reading those of all nodes.

use super::Minute;
use crate::database::{self, DatabaseError};
use crate::directory::rfc3339;
use serde::Serialize;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Row};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// Minutes that one statement writes: a day.
pub const ROWS_MAX: usize = 24 * 60;

/// How long connecting, a question or a statement may take.
const LIMIT: Duration = Duration::from_secs(4);

/// The same for the server, which ends a statement that nobody waits for any more.
const SERVER_LIMIT_MS: u64 = 4_000;

/// How long a node keeps its own minutes (chosen: a quarter of a year, 130,000 rows).
pub const KEPT_MINUTES: i64 = 90 * 24 * 60;
const KEEP_S: i64 = KEPT_MINUTES * 60;

/// A node that wrote no minute for so long, and renews no lease, has ended (chosen: a minute is written
/// within 20 s of its end, and one may be lost).
const ENDED_AFTER: Duration = Duration::from_secs(180);

/// Runs of degraded minutes that are read back, of each node.
const RUNS_MAX: usize = 5;

/// Why nothing was written; the caller keeps its minutes and tries again.
#[derive(Debug, thiserror::Error)]
pub enum UptimeError {
    /// The URL is not one of Postgres.
    #[error("the database cannot be used")]
    Url(#[from] DatabaseError),
    /// No connection, or it failed.
    #[error("the database said no")]
    Failed(#[from] sqlx::Error),
    /// No answer.
    #[error("the database did not answer within {LIMIT:?}")]
    Silent,
    /// It answers and takes no rows.
    #[error("the database is read-only")]
    ReadOnly,
}

/// Where a node writes its minutes: a connection of its own, made when it is needed.
#[derive(Debug)]
pub struct MinuteStore {
    options: PgConnectOptions,
    node: String,
    connection: Option<PgConnection>,
}

impl MinuteStore {
    /// Nothing is connected yet. `node`: the name, without the part that is drawn at every start.
    pub fn new(url: &str, node: &str) -> Result<Self, UptimeError> {
        let options = database::options(url, "uptime")?
            .options([("statement_timeout", SERVER_LIMIT_MS.to_string())]);
        Ok(MinuteStore { options, node: node.to_owned(), connection: None })
    }

    /// Whether the database answers, and takes rows.
    pub async fn ask(&mut self) -> Result<(), UptimeError> {
        let asked = async |db: &mut PgConnection, _: &str| {
            let sql =
                "select pg_is_in_recovery() or current_setting('transaction_read_only')::bool";
            sqlx::query_scalar(sql).fetch_one(db).await
        };
        if self.on_connection(asked).await? { Err(UptimeError::ReadOnly) } else { Ok(()) }
    }

    /// Writes minutes that are not there yet, and drops this node's oldest.
    pub async fn write(&mut self, minutes: &[Minute]) -> Result<(), UptimeError> {
        let at = minutes.iter().map(|minute| minute.began.0).collect::<Vec<i64>>();
        let words = |minute: &Minute| {
            minute.reasons.iter().map(|reason| reason.as_str()).collect::<Vec<_>>().join(",")
        };
        let reasons: Vec<String> = minutes.iter().map(words).collect();
        // By the minutes' own clock: a database whose clock jumps drops nothing.
        let kept_from_s = at.iter().max().map_or(0, |at| at / 1_000_000 - KEEP_S);
        self.on_connection(async |db, node| {
            sqlx::query(
                "with dropped as (delete from node_minutes where node = $1 \
                   and minute < to_timestamp($4)) \
                 insert into node_minutes (node, minute, reasons) \
                 select $1, to_timestamp(m.at_us / 60000000 * 60), string_to_array(m.reasons, ',') \
                 from unnest($2::bigint[], $3::text[]) m (at_us, reasons) \
                 on conflict on constraint node_minutes_one_per_node_and_minute do nothing",
            )
            .bind(node)
            .bind(&at)
            .bind(&reasons)
            .bind(kept_from_s)
            .execute(db)
            .await
            .map(|_rows| ())
        })
        .await
    }

    /// A connection that failed or did not answer is closed: the next call makes another one.
    async fn on_connection<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut PgConnection, &str) -> Result<T, sqlx::Error>,
    ) -> Result<T, UptimeError> {
        let (options, node) = (&self.options, &self.node);
        let before = self.connection.take();
        let all = async {
            let mut connection = match before {
                Some(connection) => connection,
                None => options.connect().await?,
            };
            let done = work(&mut connection, node).await?;
            Ok::<_, sqlx::Error>((done, connection))
        };
        let (done, connection) =
            tokio::time::timeout(LIMIT, all).await.map_err(|_elapsed| UptimeError::Silent)??;
        self.connection = Some(connection);
        Ok(done)
    }
}

/// The state of a node of which a process is there.
pub const ALIVE: &str = "alive";
/// The state of one that has none any more.
pub const ENDED: &str = "ended";

/// What one node was in the last 24 hours.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct NodeUptime {
    /// Its name.
    pub node: String,
    /// `alive`, or `ended` where no process of the name is there any more.
    pub state: &'static str,
    /// When the latest minute that it wrote began, RFC 3339.
    #[schema(format = DateTime)]
    pub last_minute: String,
    /// Minutes that were ok, in percent of all since the node's first one, at most of 24 hours.
    pub ok_percent: f64,
    /// Minutes in which all was well.
    pub ok_minutes: i64,
    /// Minutes in which something was missing.
    pub degraded_minutes: i64,
    /// Minutes of which nobody knows anything: the node did not run, or its rows were lost.
    pub missing_minutes: i64,
    /// The latest degraded times, latest first.
    pub degraded: Vec<DegradedTime>,
}

/// Degraded minutes one after the other, for the same reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct DegradedTime {
    /// When the first one began, RFC 3339.
    #[schema(format = DateTime)]
    pub began: String,
    /// How many.
    pub minutes: i64,
    /// What was missing: words of [`super::Reason`].
    pub reasons: Vec<String>,
}

/// Nodes that have a minute in the last 24 hours, by name.
///
/// The latest minutes may not be written yet, and count from 20 s after their end.
pub async fn read_last_day(db: &mut PgConnection) -> Result<Vec<NodeUptime>, sqlx::Error> {
    let counts = sqlx::query(
        "with bounds as (select date_trunc('minute', now() - interval '20 s') as until), \
         days as (select until - interval '24 hours' as since, until from bounds), \
         living as (select distinct regexp_replace(node_id, '-[^-]*$', '') as node from lease_nodes \
           where alive_until > now()), \
         seen as (select m.node, min(m.minute) as first, max(m.minute) as last, \
             count(*) filter (where m.state = 'ok') as ok, \
             count(*) filter (where m.state <> 'ok') as degraded \
           from node_minutes m, days d where m.minute >= d.since and m.minute < d.until group by m.node) \
         select s.node, s.ok, s.degraded, s.last, \
           s.last >= d.until - $1 or s.node in (select node from living) as is_alive, (extract(epoch from d.until - case \
             when exists (select from node_minutes o where o.node = s.node and o.minute < d.since) \
             then d.since else s.first end) / 60)::bigint as minutes \
         from seen s, days d order by s.node",
    )
    .bind(ENDED_AFTER)
    .fetch_all(&mut *db)
    .await?;
    let rows = sqlx::query(
        "select node, minute, reasons from node_minutes where state <> 'ok' \
         and minute >= date_trunc('minute', now()) - interval '24 hours' \
         order by node, minute",
    )
    .fetch_all(&mut *db)
    .await?;
    let mut degraded: BTreeMap<String, Vec<Run>> = BTreeMap::new();
    for row in &rows {
        let (minute, reasons) = (row.get("minute"), row.get("reasons"));
        append(degraded.entry(row.get("node")).or_default(), minute, reasons);
    }
    let uptime = |row: &sqlx::postgres::PgRow| {
        let node: String = row.get("node");
        let (ok_minutes, degraded_minutes): (i64, i64) = (row.get("ok"), row.get("degraded"));
        let minutes: i64 = row.get("minutes");
        let runs = degraded.remove(&node).unwrap_or_default();
        let degraded = runs.into_iter().rev().take(RUNS_MAX).map(DegradedTime::from).collect();
        NodeUptime {
            ok_percent: 100.0 * ok_minutes as f64 / minutes.max(1) as f64,
            missing_minutes: (minutes - ok_minutes - degraded_minutes).max(0),
            node,
            state: if row.get("is_alive") { ALIVE } else { ENDED },
            last_minute: rfc3339(row.get("last")),
            ok_minutes,
            degraded_minutes,
            degraded,
        }
    };
    Ok(counts.iter().map(uptime).collect())
}

/// One minute of a node, as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenMinute {
    /// Minutes since 1970.
    pub number: i64,
    /// What was missing: words of [`super::Reason`].
    pub reasons: Vec<String>,
    /// When it was written.
    pub written_at: OffsetDateTime,
}

/// The minute under way, as of 20 s ago: all before it have ended, and were written if their node could.
/// Nothing where no node of this name ever wrote a minute.
pub async fn minute_under_way(
    db: &mut PgConnection,
    node: &str,
) -> Result<Option<i64>, sqlx::Error> {
    let sql = "select floor(extract(epoch from clock_timestamp() - interval '20 s') / 60)::bigint \
               where exists (select from node_minutes where node = $1)";
    sqlx::query_scalar(sql).bind(node).fetch_optional(db).await
}

/// The minutes of a node that have a row, from one number up to another one, both included.
pub async fn read_minutes(
    db: &mut PgConnection,
    node: &str,
    numbers: RangeInclusive<i64>,
) -> Result<Vec<WrittenMinute>, sqlx::Error> {
    let rows = sqlx::query(
        "select (extract(epoch from minute) / 60)::bigint as number, reasons, written_at \
         from node_minutes where node = $1 \
         and minute between to_timestamp($2::bigint * 60) and to_timestamp($3::bigint * 60)",
    )
    .bind(node)
    .bind(numbers.start())
    .bind(numbers.end())
    .fetch_all(db)
    .await?;
    let minute = |row: &sqlx::postgres::PgRow| WrittenMinute {
        number: row.get("number"),
        reasons: row.get("reasons"),
        written_at: row.get("written_at"),
    };
    Ok(rows.iter().map(minute).collect())
}

/// A [`DegradedTime`] that may go on.
#[derive(Debug)]
struct Run {
    began: OffsetDateTime,
    minutes: i64,
    reasons: Vec<String>,
}

impl From<Run> for DegradedTime {
    fn from(run: Run) -> Self {
        DegradedTime { began: rfc3339(run.began), minutes: run.minutes, reasons: run.reasons }
    }
}

/// One more degraded minute, later than those before.
fn append(runs: &mut Vec<Run>, minute: OffsetDateTime, reasons: Vec<String>) {
    match runs.last_mut() {
        Some(last)
            if last.reasons == reasons
                && last.began + time::Duration::minutes(last.minutes) == minute =>
        {
            last.minutes += 1;
        }
        _ => runs.push(Run { began: minute, minutes: 1, reasons }),
    }
}
