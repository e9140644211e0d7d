//! `./run bench lease`: what one lease cycle costs, and what it grows with.
//!
//! Inputs: a real Postgres, the node's own store and statements, tables of 100 to 100,000 accounts.
//! Outputs: for each size of the table, of what the node holds and of the fleet, the time of a cycle
//! beside the floor, one statement that does nothing but renew; how much of the renewals is HOT, what
//! they cost in WAL, and whether anything was read from end to end.
//!
//! Invariants:
//! 1. All tables are there from the start, and their cycles take turns: a ratio is of one run.
//! 2. The common case is measured: the node has room, asks for free accounts and for those of dead
//!    owners, and there are none. Every cycle must give back what it holds, or the run ends.
//! 3. The first turns of every table are thrown away.
//! 4. Nodes of a fleet run their cycles at the same moment.
//!
//! Not covered: the way to a database elsewhere; it is on this machine's loopback.

use super::rounds::Percentiles;
use futures_util::future::try_join_all;
use lockstep::causes::with_causes;
use lockstep::database;
use lockstep::lease::{
    ClaimRequest, CycleNumber, CycleRequest, OwnershipStore, PostgresOwnership, TenureKey,
};
use schemas::{AccountId, NodeId, Token};
use serde::Serialize;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Row as _};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Turns of every table that are thrown away.
const WARM_UP: usize = 5;
/// Cycles over which HOT updates and WAL are counted.
const COUNTED: usize = 40;
/// Rows a node would take at once, as by default.
const CLAIM_ROWS: u32 = 50;
/// Longest time of a cycle.
const QUERY_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for the server's counters.
const COUNTERS_LIMIT: Duration = Duration::from_secs(20);
/// The table whose counters are read.
const TABLE: &str = "trading_accounts";

/// What `./run bench lease` takes.
#[derive(Debug, Clone, clap::Args)]
pub struct LeaseArgs {
    /// Turns of every table, after the first ones.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u16).range(10..=1_000))]
    turns: u16,
}

/// A table and who holds what of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Case {
    /// Accounts in the table.
    accounts: u32,
    /// Accounts that each measured node holds.
    held: u32,
    /// Nodes that run a cycle at the same moment.
    nodes: u32,
    /// Nodes that hold the rest.
    others: u32,
}

const fn case(accounts: u32, held: u32, nodes: u32, others: u32) -> Case {
    Case { accounts, held, nodes, others }
}

/// A cycle looks at one row of each owner: two tables are compared with as many owners.
const SMALL: Case = case(1_000, 500, 1, 7);
const LARGE: Case = case(100_000, 500, 1, 7);
const MANY: Case = case(100_000, 10_000, 1, 7);
const CASES: [Case; 10] = [
    case(100, 100, 1, 0),
    case(1_000, 100, 1, 7),
    case(10_000, 100, 1, 7),
    case(100_000, 100, 1, 7),
    SMALL,
    LARGE,
    MANY,
    case(100_000, 500, 1, 199),
    case(100_000, 500, 8, 7),
    case(100_000, 500, 32, 7),
];

/// What is said of one case.
#[derive(Debug, Clone, Serialize)]
struct Answer {
    #[serde(flatten)]
    case: Case,
    p50_ms: f64,
    p95_ms: f64,
    max_ms: f64,
    /// One statement that renews the same rows, and its commit.
    floor_p50_ms: f64,
    ratio_floor: f64,
    samples: usize,
}

/// The last line.
#[derive(Debug, Serialize)]
struct Report {
    cycle_ms: Vec<Answer>,
    /// A cycle at 100,000 accounts beside one at 1,000, 500 held in both: p50, p95.
    table_ratio_p50: f64,
    table_ratio_p95: f64,
    held_10000_p50_ms: f64,
    held_10000_p95_ms: f64,
    counted: Counted,
    machine: serde_json::Value,
}

/// Counters of the server over some cycles.
#[derive(Debug, Serialize)]
struct Counted {
    cycles: usize,
    renewed_rows: u64,
    hot_percent: f64,
    wal_bytes_per_row: f64,
    /// Tables that were read from end to end, and how often; none is wanted.
    sequential_scans: BTreeMap<String, i64>,
}

/// Measures and prints.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "the verb's answer")]
pub fn run(args: &LeaseArgs, json: bool) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match runtime.block_on(measure(args)) {
        Ok(report) => {
            print_table(&report);
            if json {
                println!("{}", serde_json::to_string(&report).unwrap());
            }
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("lease: {why}");
            ExitCode::from(3)
        }
    }
}

/// A case, ready to be measured.
struct Scene {
    case: Case,
    nodes: Vec<MeasuredNode>,
    floor: PgConnection,
    cycles_ns: Vec<u64>,
    floors_ns: Vec<u64>,
}

struct MeasuredNode {
    store: PostgresOwnership,
    request: CycleRequest,
}

fn text(error: impl std::error::Error + 'static) -> String {
    with_causes(&error)
}

#[allow(clippy::print_stderr, reason = "progress")]
async fn measure(args: &LeaseArgs) -> Result<Report, String> {
    let postgres = devstack::shared_postgres().await.map_err(text)?;
    let mut scenes = Vec::new();
    for case in CASES {
        eprintln!(
            "lease: {} accounts, {} held, {} nodes, {} others ...",
            case.accounts, case.held, case.nodes, case.others
        );
        let url = postgres.create_database("bench_lease").await.map_err(text)?;
        scenes.push(Scene::start(&url, case).await?);
    }
    for turn in 0..WARM_UP + usize::from(args.turns) {
        for scene in &mut scenes {
            scene.turn(turn >= WARM_UP).await?;
        }
    }
    let large = scenes.iter_mut().find(|scene| scene.case == LARGE).expect("it is a case");
    let counted = large.count().await?;
    let cycle_ms: Vec<Answer> = scenes.iter().map(Scene::answer).collect();
    let of = |case| cycle_ms.iter().find(|answer| answer.case == case).expect("it is a case");
    let (small, large, many) = (of(SMALL), of(LARGE), of(MANY));
    Ok(Report {
        table_ratio_p50: large.p50_ms / small.p50_ms,
        table_ratio_p95: large.p95_ms / small.p95_ms,
        held_10000_p50_ms: many.p50_ms,
        held_10000_p95_ms: many.p95_ms,
        counted,
        machine: super::machine(),
        cycle_ms,
    })
}

fn node_id(number: u32) -> NodeId {
    NodeId::new(format!("measured-{number}")).expect("a word of letters and digits")
}

impl Scene {
    async fn start(url: &str, case: Case) -> Result<Scene, String> {
        database::migrate(url).await.map_err(text)?;
        let mut floor = database::connect(url, "bench").await.map_err(text)?;
        // What no measured node holds belongs to others, whose leases go on.
        sqlx::query(
            "insert into trading_accounts (platform, name, node_id, lease_until, lease_token)
             select 'paper', 'account-' || n,
                    case when n <= $1 * $2 then 'measured-' || (n - 1) / $1 else 'other-' || n % $4 end,
                    now() + interval '1 day', 1
             from generate_series(1, $3) n",
        )
        .bind(case.held as i32)
        .bind(case.nodes as i32)
        .bind(case.accounts as i32)
        .bind(case.others.max(1) as i32)
        .execute(&mut floor)
        .await
        .map_err(text)?;
        floor.execute("vacuum analyze").await.map_err(text)?;
        let mut nodes = Vec::new();
        for number in 0..case.nodes {
            let node = node_id(number);
            let ids: Vec<i64> = sqlx::query_scalar(
                "select id from trading_accounts where node_id = $1 order by id",
            )
            .bind(node.as_str())
            .fetch_all(&mut floor)
            .await
            .map_err(text)?;
            let tenure = |id| {
                AccountId::from_i64(id)
                    .map(|account| TenureKey { account, token: Token::new(1).expect("it fits") })
            };
            let renew = ids.into_iter().map(tenure).collect::<Result<_, _>>().map_err(text)?;
            let store = PostgresOwnership::new(url, QUERY_LIMIT).map_err(text)?;
            nodes.push(MeasuredNode { store, request: request(node, case, renew) });
        }
        Ok(Scene { case, nodes, floor, cycles_ns: Vec::new(), floors_ns: Vec::new() })
    }

    /// One cycle of every node, and the floor.
    async fn turn(&mut self, is_kept: bool) -> Result<(), String> {
        let cycles = self.cycle().await?;
        let begun = Instant::now();
        let renewed = sqlx::query(
            "update trading_accounts set lease_until = clock_timestamp() + interval '60 seconds'
             where platform = 'paper' and node_id = $1",
        )
        .bind(node_id(0).as_str())
        .execute(&mut self.floor)
        .await
        .map_err(text)?;
        let floor = begun.elapsed();
        if renewed.rows_affected() != u64::from(self.case.held) {
            return Err(format!("{:?}: the floor renewed {renewed:?}", self.case));
        }
        if is_kept {
            self.cycles_ns.extend(cycles);
            self.floors_ns.push(nanoseconds(floor));
        }
        Ok(())
    }

    async fn cycle(&mut self) -> Result<Vec<u64>, String> {
        let (case, held) = (self.case, self.case.held as usize);
        let cycle = async |node: &mut MeasuredNode| {
            let begun = Instant::now();
            let reply = node.store.cycle(&node.request).await.map_err(text)?;
            let took = begun.elapsed();
            if reply.renewed.len() != held || reply.owned.len() != held || !reply.claimed.is_empty()
            {
                return Err(format!(
                    "{case:?}: {} renewed, {} claimed, {} owned",
                    reply.renewed.len(),
                    reply.claimed.len(),
                    reply.owned.len()
                ));
            }
            Ok(nanoseconds(took))
        };
        try_join_all(self.nodes.iter_mut().map(cycle)).await
    }

    /// Counters over cycles alone, without the floor.
    async fn count(&mut self) -> Result<Counted, String> {
        let rows = COUNTED as i64 * i64::from(self.case.held);
        let before = counters(&mut self.floor, 0).await?;
        for _ in 0..COUNTED {
            self.cycle().await?;
        }
        let after = counters(&mut self.floor, before.updates + rows).await?;
        let (updates, hot) = (after.updates - before.updates, after.hot - before.hot);
        Ok(Counted {
            cycles: COUNTED,
            renewed_rows: updates.unsigned_abs(),
            hot_percent: 100.0 * hot as f64 / updates as f64,
            wal_bytes_per_row: (after.wal_bytes - before.wal_bytes) as f64 / updates as f64,
            sequential_scans: after
                .scans
                .into_iter()
                .map(|(table, scans)| {
                    let before = before.scans.get(&table).copied().unwrap_or_default();
                    (table, scans - before)
                })
                .filter(|(_, scans)| *scans > 0)
                .collect(),
        })
    }

    fn answer(&self) -> Answer {
        let of = |samples: &[u64]| Percentiles::of_ns(samples.to_vec()).expect("there are turns");
        let (cycles, floors) = (of(&self.cycles_ns), of(&self.floors_ns));
        Answer {
            case: self.case,
            p50_ms: cycles.p50_us / 1e3,
            p95_ms: cycles.p95_us / 1e3,
            max_ms: cycles.max_us / 1e3,
            floor_p50_ms: floors.p50_us / 1e3,
            ratio_floor: cycles.p50_us / floors.p50_us,
            samples: cycles.samples,
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn request(node: NodeId, case: Case, renew: Vec<TenureKey>) -> CycleRequest {
    let capacity = case.held + CLAIM_ROWS;
    CycleRequest {
        number: CycleNumber::NONE.next(),
        node,
        platforms: vec!["paper".to_owned()],
        lease: Duration::from_secs(60),
        capacity,
        timeline_min: None,
        release: Vec::new(),
        renew,
        let_go: Vec::new(),
        claim: Some(ClaimRequest {
            rows_max: CLAIM_ROWS,
            capacity,
            expired: true,
            database: None,
            avoid: Vec::new(),
            proven_dead: Vec::new(),
        }),
    }
}

struct Counters {
    updates: i64,
    hot: i64,
    scans: BTreeMap<String, i64>,
    wal_bytes: i64,
}

/// The server's counters, once they have at least so many updates: each session adds its own up about
/// a second late.
async fn counters(connection: &mut PgConnection, updates_min: i64) -> Result<Counters, String> {
    let deadline = Instant::now() + COUNTERS_LIMIT;
    // The sessions add up what they did before when they are idle or ask again.
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    loop {
        let mut transaction = connection.begin().await.map_err(text)?;
        let row = sqlx::query(
            "select n_tup_upd, n_tup_hot_upd,
                    (select json_object_agg(relname, coalesce(seq_scan, 0))::text
                     from pg_stat_user_tables) as scans,
                    pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint as wal
             from pg_stat_user_tables where relname = $1",
        )
        .bind(TABLE)
        .fetch_one(&mut *transaction)
        .await
        .map_err(text)?;
        transaction.commit().await.map_err(text)?;
        let of = |name| row.try_get::<i64, _>(name).map_err(text);
        let counters = Counters {
            updates: of("n_tup_upd")?,
            hot: of("n_tup_hot_upd")?,
            scans: serde_json::from_str(&row.try_get::<String, _>("scans").map_err(text)?)
                .map_err(text)?,
            wal_bytes: of("wal")?,
        };
        if counters.updates >= updates_min {
            return Ok(counters);
        }
        if Instant::now() >= deadline {
            return Err(format!("{} of {updates_min} updates were counted", counters.updates));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[allow(clippy::print_stderr, reason = "the verb's answer for people")]
fn print_table(report: &Report) {
    eprintln!(
        "{:>9}{:>8}{:>7}{:>8}{:>9}{:>9}{:>9}{:>10}{:>8}  (ms)",
        "accounts", "held", "nodes", "others", "p50", "p95", "max", "floor p50", "x floor"
    );
    for answer in &report.cycle_ms {
        let Case { accounts, held, nodes, others } = answer.case;
        eprintln!(
            "{accounts:>9}{held:>8}{nodes:>7}{others:>8}{:>9.2}{:>9.2}{:>9.2}{:>10.2}{:>8.2}",
            answer.p50_ms, answer.p95_ms, answer.max_ms, answer.floor_p50_ms, answer.ratio_floor
        );
    }
    let Counted { hot_percent, wal_bytes_per_row, sequential_scans, .. } = &report.counted;
    eprintln!(
        "100,000 beside 1,000 accounts, 500 held: {:.2} times at p50, {:.2} at p95; {hot_percent:.1} % HOT, \
         {wal_bytes_per_row:.0} bytes of WAL a row, sequential scans: {sequential_scans:?}",
        report.table_ratio_p50, report.table_ratio_p95
    );
}
