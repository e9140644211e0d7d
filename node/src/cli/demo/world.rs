//! The demo's world: a NATS server, a Postgres, a paper broker and nodes, each a process.

use super::DemoArgs;
use super::stack::Stack;
use crate::cli::CliError;
use crate::cli::paper::{LISTENS, drive, symbol_specs};
use crate::directory::{self, NewAccount, NewLink};
use crate::history::History;
use crate::{cli::demo::judge::JudgedFollower, cli::demo::judge::Volumes};
use devstack::{ManagedProcess, Nats, Postgres, ProcessSpec, StopSignal, Tools};
use paper::PaperDriver;
use reconcile::Sizing;
use rust_decimal::Decimal;
use schemas::{AccountId, Symbol, SymbolSpec};
use sqlx::{PgConnection, Row};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Shortened so that a takeover can be watched; a real node has 60, 20, 15 and 10 s.
pub const LEASE_SETTINGS: &[(&str, &str)] = &[
    ("LOCKSTEP_LEASE", "5s"),
    ("LOCKSTEP_CYCLE", "1s"),
    ("LOCKSTEP_FENCE", "2500ms"),
    ("LOCKSTEP_RETRY", "500ms"),
    ("LOCKSTEP_QUERY_LIMIT", "500ms"),
    ("LOCKSTEP_BROKER_CALL_LIMIT", "1s"),
    ("LOCKSTEP_SEND_RESERVE", "500ms"),
    ("LOCKSTEP_SETTLE", "1s"),
];

/// Settle time of [`LEASE_SETTINGS`], and what a new owner needs to connect and read.
pub const SETTLE_AND_READ: Duration = Duration::from_secs(3);

/// How long a part of the world may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The smallest account number of a follower; the master is account 1.
const FIRST_FOLLOWER: u64 = 2;

/// Every second follower trades twice the master's volume.
fn multiplier(index: u32) -> Decimal {
    if index.is_multiple_of(2) { Decimal::ONE } else { Decimal::TWO }
}

/// Everything that runs.
pub(super) struct World {
    /// Bus.
    pub(super) nats: Nats,
    /// Where the demo's database is.
    pub(super) database_url: String,
    /// Driver and auditor of the paper broker.
    pub(super) driver: PaperDriver,
    /// The nodes, with their names.
    pub(super) nodes: Vec<(String, ManagedProcess)>,
    /// The master.
    pub(super) master: AccountId,
    /// Its followers.
    pub(super) followers: Vec<JudgedFollower>,
    /// Volume limits by symbol.
    pub(super) volumes: BTreeMap<Symbol, Volumes>,
    stack: Option<Stack>,
    _postgres: Postgres,
    _paper: ManagedProcess,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("nodes", &self.nodes.len()).finish_non_exhaustive()
    }
}

fn missing(what: &str) -> impl FnOnce(devstack::DevstackError) -> CliError + '_ {
    move |error| CliError::missing(what, error)
}

impl World {
    /// Starts servers, broker and nodes, and waits until every follower is being copied to.
    pub(super) async fn start(
        args: &DemoArgs,
        history: &History,
        mut say: impl FnMut(&str),
    ) -> Result<World, CliError> {
        let tools = Tools::locate().map_err(missing("servers"))?;
        say("starting a NATS server");
        let nats = Nats::start(&tools).await.map_err(missing("NATS"))?;
        say("starting Postgres");
        let postgres = Postgres::start(&tools).await.map_err(missing("Postgres"))?;
        let database_url = postgres.create_database("demo").await.map_err(missing("Postgres"))?;
        say("starting the paper broker");
        let (paper, paper_address) = start_paper().await?;
        let driver = drive(&paper_address, "demo-driver").await?;
        let volumes = declare(&driver, history, args.followers).await?;
        let mut db = crate::database::connect_migrated(&database_url, "demo")
            .await
            .map_err(|error| CliError::missing("database", error))?;
        let (master, followers) = enter(&mut db, &paper_address, args.followers).await?;
        let stack = match &args.prometheus {
            Some(program) => {
                say("starting Prometheus");
                let rules = args.rules.as_deref();
                Some(Stack::start(program, rules, args.nodes, &mut db).await?)
            }
            None => None,
        };
        let mut world = World {
            nats,
            database_url,
            driver,
            nodes: Vec::new(),
            master,
            followers,
            volumes,
            stack,
            _postgres: postgres,
            _paper: paper,
        };
        say(&format!(
            "starting {} nodes for {} followers; their lease is shortened from 60 s to 5 s, so that \
             a takeover can be watched",
            args.nodes, args.followers
        ));
        for index in 0..args.nodes {
            world.start_node(index, args)?;
        }
        if let Some(stack) = &world.stack {
            say(&stack.addresses(&world.database_url, &world.nats.url()));
        }
        Ok(world)
    }

    /// Starts node number `index`.
    pub(super) fn start_node(&mut self, index: u32, args: &DemoArgs) -> Result<(), CliError> {
        let name = format!("demo-node-{}", index + 1);
        let mut spec = ProcessSpec::new(&name, own_binary()?)
            .arg("node")
            .stop_signal(StopSignal::Term)
            .env("LOCKSTEP_DATABASE_URL", &self.database_url)
            .env("LOCKSTEP_NATS_URLS", self.nats.url())
            .env("LOCKSTEP_NODE_NAME", &name)
            .env("LOCKSTEP_METRICS_LISTEN", self.metrics_listen(index))
            // The demo compresses time and not the broker's answers: orders of a whole day may
            // be on their way at once.
            .env("LOCKSTEP_PARALLEL_ORDERS", "128")
            // Room for everybody's followers when one node is left; claimed in small parts, so
            // that nodes which start together share.
            .env("LOCKSTEP_CAPACITY", (args.followers + 1).to_string())
            .env("LOCKSTEP_CLAIM_BATCH", args.followers.div_ceil(args.nodes * 4).max(1).to_string())
            .env("LOCKSTEP_LOG", "warn,lockstep=info");
        for (key, value) in LEASE_SETTINGS {
            spec = spec.env(key, value);
        }
        if let Some(stack) = &self.stack {
            spec = spec.env("LOCKSTEP_API_LISTEN", stack.api(index));
        }
        for foreign in ["LOCKSTEP_TOOLS", "LOCKSTEP_PROFILE", "LOCKSTEP_SHARED", "LOCKSTEP_BLESS"] {
            spec = spec.env_remove(foreign);
        }
        let process = spec.start().map_err(missing("node"))?;
        match self.nodes.get_mut(index as usize) {
            Some(place) => *place = (name, process),
            None => self.nodes.push((name, process)),
        }
        Ok(())
    }

    fn metrics_listen(&self, index: u32) -> String {
        self.stack.as_ref().map_or("127.0.0.1:0".to_owned(), |stack| stack.metrics(index))
    }

    /// A connection to the demo's database.
    pub(super) async fn database(&self) -> Result<PgConnection, CliError> {
        crate::database::connect(&self.database_url, "demo")
            .await
            .map_err(|error| CliError::missing("database", error))
    }

    /// Waits until every follower is owned and its session copies.
    pub(super) async fn wait_until_copying(&self) -> Result<(), CliError> {
        let mut db = self.database().await?;
        let wanted = self.followers.len() as i64;
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let row = sqlx::query(
                "select count(*) filter (where s.session = 'copying' and s.lease_token = a.lease_token) as copying \
                 from trading_accounts a join account_status s on s.account_id = a.id where a.node_id is not null",
            )
            .fetch_one(&mut db)
            .await?;
            let copying: i64 = row.get("copying");
            if copying >= wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                let logs: Vec<String> =
                    self.nodes.iter().map(|(_, node)| node.log_tail()).collect();
                return Err(CliError::No(format!(
                    "only {copying} of {wanted} followers were copied to after {} s\n{}",
                    START_LIMIT.as_secs(),
                    logs.join("\n")
                )));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Token and owner of every account, by the database.
    pub(super) async fn owners(
        db: &mut PgConnection,
    ) -> Result<BTreeMap<AccountId, (i64, Option<String>)>, CliError> {
        let rows = sqlx::query("select id, lease_token, node_id from trading_accounts")
            .fetch_all(db)
            .await?;
        Ok(rows
            .iter()
            .filter_map(|row| {
                let id = AccountId::from_i64(row.get("id")).ok()?;
                Some((id, (row.get("lease_token"), row.get("node_id"))))
            })
            .collect())
    }

    /// Ends the nodes in an orderly way.
    pub(super) async fn stop(&self) {
        for (_, node) in &self.nodes {
            // A node that was killed has nothing to end.
            let _killed_before = node.stop(Duration::from_secs(10)).await;
        }
    }
}

fn own_binary() -> Result<PathBuf, CliError> {
    Ok(std::env::current_exe()?)
}

async fn start_paper() -> Result<(ManagedProcess, String), CliError> {
    let process = ProcessSpec::new("paper-broker", own_binary()?)
        .args(["paper", "--listen", "127.0.0.1:0"])
        .start()
        .map_err(missing("paper broker"))?;
    let line =
        process.wait_for_line(LISTENS, START_LIMIT).await.map_err(missing("paper broker"))?;
    let address = line.trim_start_matches(LISTENS).trim().to_owned();
    Ok((process, address))
}

/// Declares followers and the symbols of the history; says their volume limits.
async fn declare(
    driver: &PaperDriver,
    history: &History,
    followers: u32,
) -> Result<BTreeMap<Symbol, Volumes>, CliError> {
    let specs = symbol_specs(history);
    let limits = |spec: &SymbolSpec| {
        let volumes = Volumes { min: spec.lots_min, step: spec.lots_step, max: spec.lots_max };
        (spec.symbol.clone(), volumes)
    };
    let volumes = specs.iter().map(limits).collect();
    let last = FIRST_FOLLOWER + u64::from(followers) - 1;
    crate::cli::paper::declare(driver, specs, Some((FIRST_FOLLOWER, last)), None).await?;
    Ok(volumes)
}

/// Enters the master, the followers and their links, as `lockstep account add` and `link add` do.
async fn enter(
    db: &mut PgConnection,
    address: &str,
    followers: u32,
) -> Result<(AccountId, Vec<JudgedFollower>), CliError> {
    let master = NewAccount {
        name: "demo-master".into(),
        platform: "external".into(),
        connection: serde_json::json!({}),
        enabled: true,
    };
    let master = directory::add_account(db, &master).await?;
    let mut judged = Vec::new();
    for index in 0..followers {
        let account = directory::add_account(
            db,
            &NewAccount {
                name: format!("demo-follower-{}", index + 1),
                platform: "paper".into(),
                connection: serde_json::json!({ "address": address }),
                enabled: true,
            },
        )
        .await?;
        let multiplier = multiplier(index);
        let new = NewLink::plain(master, account, Sizing::Multiplier(multiplier));
        let link = directory::add_link(db, &new).await?;
        judged.push(JudgedFollower { account, link, multiplier, unowned: Vec::new() });
    }
    Ok((master, judged))
}

/// Where a history comes from, for people.
pub(super) fn source_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "demo".into(), |name| name.to_string_lossy().into_owned())
}
