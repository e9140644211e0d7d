//! `./run bench writer`: what the writer's flush costs beside a plain insert, and what it sustains.
//!
//! Inputs: a real Postgres, the node's own writer and statements. Outputs: the time of a flush of
//! [`BATCH_ROWS_MAX`] new pairs beside the plain `INSERT ... SELECT FROM UNNEST` of as many rows into
//! the same table; pair rows a second while a million and more changes wait; lease cycles meanwhile.
//!
//! Invariants:
//! 1. Flush and plain insert take turns on one table; a ratio is of one run.
//! 2. Every row of a flush must be answered `written`, or the run ends.
//! 3. The first turns are thrown away.
//!
//! Not covered: the way to a database elsewhere; it is on this machine's loopback.

use super::rounds::Percentiles;
use lockstep::causes::with_causes;
use lockstep::database;
use lockstep::lease::{CycleNumber, CycleRequest, OwnershipStore, PostgresOwnership, TenureKey};
use lockstep::writer::batch::{BATCH_ROWS_MAX, Batch, PAIRS_MAX};
use lockstep::writer::store::PgRows;
use lockstep::writer::{PairRow, Row, RowOutcome, RowSink, Writer, WriterConfig};
use reconcile::{CopyAction, CopyStep, Pair, Stops};
use rust_decimal::Decimal;
use schemas::{AccountId, LinkId, MasterTicket, Micros, NodeId, Side, Symbol, Token};
use serde::Serialize;
use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Followers, one link each.
const FOLLOWERS: u64 = 1_000;
/// Turns that are thrown away.
const WARM_UP: usize = 5;
/// Turns of flush and plain insert, each.
const TURNS: usize = 60;
/// Rows of the sustained part.
const SUSTAINED_ROWS: usize = 400_000;
/// Rows that wait at most while it runs: well below what the writer keeps.
const WAITING_MAX: usize = PAIRS_MAX / 4;
/// Between two lease cycles of the sustained part.
const CYCLE_EVERY: Duration = Duration::from_millis(200);
/// Longest time of a cycle: as by default.
const QUERY_LIMIT: Duration = Duration::from_secs(5);
/// Whose rows they are.
const NODE: &str = "bench";

/// The last line.
#[derive(Debug, Serialize)]
struct Report {
    flush: Percentiles,
    plain: Percentiles,
    ratio_p50: f64,
    ratio_p95: f64,
    rows_per_flush: usize,
    pair_rows_per_s: f64,
    sustained_rows: usize,
    /// A lease cycle of 1,000 accounts with nothing beside it, and while rows are written.
    cycle_alone: Percentiles,
    cycle_beside: Percentiles,
    machine: serde_json::Value,
}

/// Measures and prints.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "the verb's answer")]
pub fn run(json: bool) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match runtime.block_on(measure()) {
        Ok(report) => {
            let Report { flush, plain, cycle_alone, cycle_beside, .. } = &report;
            eprintln!(
                "flush of {} pairs: p50 {:.0} us, p95 {:.0} us; plain insert {:.0}, {:.0}: {:.2}, {:.2} times",
                report.rows_per_flush,
                flush.p50_us,
                flush.p95_us,
                plain.p50_us,
                plain.p95_us,
                report.ratio_p50,
                report.ratio_p95
            );
            eprintln!(
                "sustained: {:.0} pair rows/s; a lease cycle p95 {:.1} ms, alone {:.1} ms; longest {:.1} ms",
                report.pair_rows_per_s,
                cycle_beside.p95_us / 1e3,
                cycle_alone.p95_us / 1e3,
                cycle_beside.max_us / 1e3
            );
            if json {
                println!("{}", serde_json::to_string(&report).unwrap());
            }
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("writer: {why}");
            ExitCode::from(3)
        }
    }
}

fn text(error: impl std::error::Error + 'static) -> String {
    with_causes(&error)
}

/// The token under which the node has all accounts.
fn token() -> Token {
    Token::new(1).unwrap()
}

/// Makes pairs that nobody has seen.
struct Pairs {
    last: u64,
}

impl Pairs {
    fn next(&mut self) -> PairRow {
        self.last += 1;
        let follower = 1 + self.last % FOLLOWERS;
        let lots = "0.10".parse().unwrap();
        let link = LinkId::new(follower).unwrap();
        let master_ticket = MasterTicket::new(1_000_000 + self.last).unwrap();
        let action = CopyAction { link, master_ticket, steps: Vec::new() };
        let step = CopyStep::OpenCopy {
            symbol: Symbol::new("EURUSD").unwrap(),
            side: Side::Buy,
            master_side: Side::Buy,
            lots,
            master_lots: lots,
            stops: Stops::default(),
            late: false,
        };
        let pair = Pair::on_sent(None, &action, &step, Micros(1_700_000_000_000_000)).unwrap();
        PairRow {
            pair,
            follower: AccountId::new(follower).unwrap(),
            token: token(),
            opened_at: None,
            closed_at: None,
            close_price: None,
            volumes: None,
        }
    }

    fn some(&mut self, count: usize) -> Vec<PairRow> {
        (0..count).map(|_| self.next()).collect()
    }
}

async fn measure() -> Result<Report, String> {
    let postgres = devstack::shared_postgres().await.map_err(text)?;
    let url = postgres.create_database("bench_writer").await.map_err(text)?;
    database::migrate(&url).await.map_err(text)?;
    let mut connection = database::connect(&url, "bench").await.map_err(text)?;
    fill(&mut connection).await.map_err(text)?;
    let options: PgConnectOptions = url.parse().map_err(text)?;
    let sink = Arc::new(PgRows::new(options, NodeId::new(NODE).unwrap()));
    let mut pairs = Pairs { last: 0 };
    let (mut flushes, mut plains) = (Vec::new(), Vec::new());
    for turn in 0..WARM_UP + TURNS {
        let flush = flush(&sink, pairs.some(BATCH_ROWS_MAX)).await?;
        let plain = plain(&mut connection, &pairs.some(BATCH_ROWS_MAX)).await.map_err(text)?;
        if turn >= WARM_UP {
            flushes.push(flush);
            plains.push(plain);
        }
    }
    let mut lease = Lease::new(&url)?;
    let mut alone = Vec::new();
    for _ in 0..TURNS {
        alone.push(lease.cycle().await?);
    }
    let (took, beside) = sustained(Arc::clone(&sink), &mut pairs, &mut lease).await?;
    let of = |samples| Percentiles::of_ns(samples).expect("there were turns");
    let (flush, plain) = (of(flushes), of(plains));
    Ok(Report {
        ratio_p50: flush.p50_us / plain.p50_us,
        ratio_p95: flush.p95_us / plain.p95_us,
        rows_per_flush: BATCH_ROWS_MAX,
        pair_rows_per_s: SUSTAINED_ROWS as f64 / took.as_secs_f64(),
        sustained_rows: SUSTAINED_ROWS,
        cycle_alone: of(alone),
        cycle_beside: of(beside),
        machine: super::machine(),
        flush,
        plain,
    })
}

async fn fill(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin().await?;
    sqlx::query(
        "insert into trading_accounts (id, platform, name, node_id, lease_until, lease_token)
         select n, 'paper', 'follower-' || n, $2, now() + interval '1 day', 1
         from generate_series(1, $1) n",
    )
    .bind(FOLLOWERS as i64)
    .bind(NODE)
    .execute(&mut *transaction)
    .await?;
    sqlx::query(
        "insert into trading_accounts (id, platform, name) values ($1, 'external', 'master')",
    )
    .bind(FOLLOWERS as i64 + 1)
    .execute(&mut *transaction)
    .await?;
    sqlx::query(
        "insert into copy_links (id, master_id, follower_id, magic)
         select n, $1 + 1, n, 7001 from generate_series(1, $1) n",
    )
    .bind(FOLLOWERS as i64)
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    sqlx::query("vacuum analyze").execute(connection).await?;
    Ok(())
}

/// One flush of the writer, as its task makes it.
async fn flush(sink: &PgRows, rows: Vec<PairRow>) -> Result<u64, String> {
    let batches = Batch::sorted(rows.into_iter().map(Row::Pair));
    let [batch] = batches.as_slice() else {
        return Err(format!("{} batches instead of one", batches.len()));
    };
    let begun = Instant::now();
    let outcomes = sink.persist(batch).await.map_err(text)?;
    let took = nanoseconds(begun.elapsed());
    match outcomes.iter().find(|outcome| **outcome != RowOutcome::Written) {
        Some(outcome) => Err(format!("a row was not written: {outcome:?}")),
        None => Ok(took),
    }
}

/// As many rows of the same kind into the same table, without a fence and without an answer for each.
async fn plain(connection: &mut PgConnection, rows: &[PairRow]) -> Result<u64, sqlx::Error> {
    let ids: Vec<uuid::Uuid> = rows.iter().map(|r| uuid::Uuid::from_u128(r.pair.id.0)).collect();
    let links: Vec<i64> = rows.iter().map(|row| row.pair.link.as_i64()).collect();
    let followers: Vec<i64> = rows.iter().map(|row| row.follower.as_i64()).collect();
    let tickets: Vec<i64> = rows.iter().map(|row| row.pair.master_ticket.as_i64()).collect();
    let symbols: Vec<&str> = rows.iter().map(|row| row.pair.symbol.as_str()).collect();
    let of = |lots: Option<schemas::Lots>| lots.map(|lots| lots.get());
    let lots: Vec<Option<Decimal>> = rows.iter().map(|row| of(row.pair.lots_at_open)).collect();
    let masters: Vec<Decimal> = rows.iter().map(|row| row.pair.master_lots_at_open.get()).collect();
    let sent: Vec<Option<i64>> = rows.iter().map(|row| row.pair.sent_at.map(|at| at.0)).collect();
    let versions: Vec<i64> = rows.iter().map(|row| row.pair.version as i64).collect();
    let begun = Instant::now();
    sqlx::query(
        "insert into pairs (id, link_id, follower_id, master_ticket, state, symbol, side, master_side,
             lots_at_open, master_lots_at_open, sent_at, version, lease_token, node_id)
         select id, link_id, follower_id, ticket, 'sending', symbol, 'buy', 'buy', lots, master_lots,
             to_timestamp(sent_us / 1000000.0), version, 1, $10
         from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::numeric[],
             $7::numeric[], $8::bigint[], $9::bigint[])
         as r (id, link_id, follower_id, ticket, symbol, lots, master_lots, sent_us, version)",
    )
    .bind(ids)
    .bind(links)
    .bind(followers)
    .bind(tickets)
    .bind(symbols)
    .bind(lots)
    .bind(masters)
    .bind(sent)
    .bind(versions)
    .bind(NODE)
    .execute(connection)
    .await?;
    Ok(nanoseconds(begun.elapsed()))
}

/// The node's lease of all followers.
struct Lease {
    store: PostgresOwnership,
    request: CycleRequest,
}

impl Lease {
    fn new(url: &str) -> Result<Self, String> {
        let tenure = |id| TenureKey { account: AccountId::new(id).unwrap(), token: token() };
        let request = CycleRequest {
            number: CycleNumber::NONE.next(),
            node: NodeId::new(NODE).unwrap(),
            platforms: vec!["paper".to_owned()],
            lease: Duration::from_secs(3_600),
            capacity: FOLLOWERS as u32,
            timeline_min: None,
            release: Vec::new(),
            renew: (1..=FOLLOWERS).map(tenure).collect(),
            let_go: Vec::new(),
            claim: None,
        };
        Ok(Lease { store: PostgresOwnership::new(url, QUERY_LIMIT).map_err(text)?, request })
    }

    async fn cycle(&mut self) -> Result<u64, String> {
        let begun = Instant::now();
        let reply = self.store.cycle(&self.request).await.map_err(text)?;
        if reply.renewed.len() as u64 != FOLLOWERS {
            return Err(format!("{} of {FOLLOWERS} rows were renewed", reply.renewed.len()));
        }
        Ok(nanoseconds(begun.elapsed()))
    }
}

/// Keeps the writer's queue full until enough was written; how long that took, and lease cycles
/// meanwhile.
async fn sustained(
    sink: Arc<PgRows>,
    pairs: &mut Pairs,
    lease: &mut Lease,
) -> Result<(Duration, Vec<u64>), String> {
    let (writer, task) = Writer::new(WriterConfig::default());
    let running = tokio::spawn(task.run(sink));
    let begun = Instant::now();
    let mut cycles = Vec::new();
    let mut every = tokio::time::interval(CYCLE_EVERY);
    let mut pushed = 0;
    loop {
        while pushed < SUSTAINED_ROWS && writer.waiting() < WAITING_MAX {
            pairs.some(BATCH_ROWS_MAX).into_iter().for_each(|row| writer.push(Row::Pair(row)));
            pushed += BATCH_ROWS_MAX;
            tokio::task::yield_now().await;
        }
        if pushed >= SUSTAINED_ROWS && writer.waiting() == 0 {
            break;
        }
        every.tick().await;
        cycles.push(lease.cycle().await?);
    }
    let took = begun.elapsed();
    writer.shutdown(QUERY_LIMIT).await;
    running.await.map_err(text)?;
    Ok((took, cycles))
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
