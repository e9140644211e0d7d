//! The chaos world: a cluster of NATS servers, a primary and its replica, the paper broker, three
//! nodes, and a proxy in front of every connection.
//!
//! ```text
//!            ┌─ database ──────────────────────────► Postgres ──► replica link ──► replica
//!   node ────┼─ bus (3) ───────────────────────────► NATS (3)
//!            └─ front ──► broker ──────────────────► paper broker
//! ```
//!
//! The harness itself (driver, audits, tap) goes past the proxies.

use super::front::Front;
use super::{Done, audit, schedule, timing};
use crate::binary;
use crate::oracle::Link;
use crate::world::{EURUSD, PRICE};
use devstack::{
    FaultMode, FaultProxy, ManagedProcess, NatsCluster, Postgres, ProcessSpec, StopSignal, Tools,
};
use lockstep::cli::paper::LISTENS;
use lockstep::directory::{self, NewAccount, NewLink};
use paper::ledger::Ledger;
use paper::protocol::{AccountDecl, FeedQuote, LoginKind, Style};
use paper::{Ident, PaperDriver};
use reconcile::Sizing;
use rust_decimal::Decimal;
use schemas::{AccountId, NodeId, Symbol, SymbolSpec};
use sqlx::{AssertSqlSafe, PgConnection};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Name of the database.
const DATABASE: &str = "chaos";
/// The nodes' role: no superuser, so that its rights can be taken.
pub(super) const ROLE: &str = "chaos_node";
/// A broker's answer when nothing is wrong.
pub(super) const ANSWER_DELAY_MS: u64 = 60;
/// A start of a part of the world may take so long.
const START_LIMIT: Duration = Duration::from_secs(60);
/// A quote is fresh for 3 s; said well within that.
const QUOTE_EVERY: Duration = Duration::from_millis(400);
/// A server in lame duck waits so long, and then closes a client a second.
const NATS_SETTINGS: &str = "lame_duck_duration: \"30s\"\nlame_duck_grace_period: \"500ms\"\n";

/// How the name of an event log ends.
pub(super) const NOTES_SUFFIX: &str = "events.jsonl";

/// A node and its ways to the rest.
#[derive(Debug)]
pub struct NodeSite {
    /// Its name, without the random part.
    pub name: String,
    /// The process.
    pub process: ManagedProcess,
    /// To the database.
    pub database: FaultProxy,
    /// To each NATS server.
    pub bus: Vec<FaultProxy>,
    /// To the broker.
    pub broker: Arc<FaultProxy>,
    spec: ProcessSpec,
}

impl NodeSite {
    /// Every way it has.
    pub fn ways(&self) -> impl Iterator<Item = &FaultProxy> {
        [&self.database, self.broker.as_ref()].into_iter().chain(&self.bus)
    }

    /// A second process of the same name.
    pub fn start_twin(&self, folder: &Path, number: usize) -> Done<ManagedProcess> {
        let name = format!("{}-twin-{number}", self.name);
        let notes = notes_path(folder, &name);
        Ok(self.spec.clone().named(name).env("LOCKSTEP_EVENT_LOG", notes).start()?)
    }
}

/// A master of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MasterSite {
    /// Its account.
    pub account: AccountId,
    /// A node publishes for it; otherwise the load does.
    pub is_leased: bool,
}

/// A link with its master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MasterLink {
    /// The master.
    pub master: AccountId,
    /// Number, follower, multiplier.
    pub link: Link,
}

/// The servers of the database.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) primary: Postgres,
    pub(super) replica: Option<(Postgres, FaultProxy)>,
    /// What was committed on primaries that are no more.
    pub(super) former_audits: Vec<Vec<audit::AuditRow>>,
}

/// Everything that runs.
#[derive(Debug)]
pub struct World {
    /// The bus.
    pub nats: NatsCluster,
    /// Moves the broker.
    pub driver: PaperDriver,
    /// The nodes.
    pub nodes: Vec<NodeSite>,
    /// The external masters' ways to the NATS servers.
    pub masters_bus: Vec<FaultProxy>,
    /// The masters.
    pub masters: Vec<MasterSite>,
    /// The links.
    pub links: Vec<MasterLink>,
    /// Where logs, ledger and dumps go.
    pub folder: PathBuf,
    pub(super) servers: tokio::sync::Mutex<Servers>,
    pub(super) tools: Tools,
    _paper: ManagedProcess,
    _front: Front,
    _quotes: JoinSet<()>,
}

impl World {
    /// Starts everything but the nodes' copying, which takes a moment more.
    pub async fn start(folder: &Path, mut say: impl FnMut(&str)) -> Done<World> {
        let tools = Tools::locate()?;
        say("starting three NATS servers, Postgres and its replica, the paper broker");
        let nats =
            NatsCluster::start_unadvertised(&tools, schedule::SERVERS, NATS_SETTINGS).await?;
        let primary = Postgres::start(&tools).await?;
        make_database(&primary).await?;
        let (paper, paper_addr) = start_paper(folder).await?;
        let driver = drive(paper_addr).await?;
        let mut brokers = Vec::new();
        for number in 0..schedule::NODES {
            brokers.push((node_name(number), Arc::new(FaultProxy::start(paper_addr).await?)));
        }
        let front = Front::start(brokers.clone()).await?;
        let (masters, links) =
            enter(&primary.url(DATABASE), &driver, &front.addr().to_string()).await?;
        let link = FaultProxy::start(primary.addr()).await?;
        let replica = primary.start_replica(&tools, link.addr()).await?;
        let servers =
            Servers { primary, replica: Some((replica, link)), former_audits: Vec::new() };
        let mut quotes = JoinSet::new();
        let feeder = driver.clone();
        quotes.spawn(async move {
            let mut every = tokio::time::interval(QUOTE_EVERY);
            every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                every.tick().await;
                feed(&feeder).await;
            }
        });
        let mut nodes = Vec::new();
        for (name, broker) in brokers {
            nodes.push(start_node(name, broker, servers.primary.addr(), &nats, folder).await?);
        }
        Ok(World {
            masters_bus: ways_to(&nats).await?,
            nats,
            driver,
            nodes,
            masters,
            links,
            folder: folder.to_owned(),
            servers: tokio::sync::Mutex::new(servers),
            tools,
            _paper: paper,
            _front: front,
            _quotes: quotes,
        })
    }

    /// A connection to the primary that is one now, as its superuser.
    pub async fn database(&self) -> Done<PgConnection> {
        let url = self.servers.lock().await.primary.url(DATABASE);
        Ok(lockstep::database::connect(&url, "chaos").await?)
    }

    /// The whole ledger up to now.
    pub async fn ledger(&self) -> Done<Ledger> {
        Ok(self.driver.ledger().await?)
    }

    /// What was committed, one list for each primary there was.
    pub async fn audits(&self) -> Done<Vec<Vec<audit::AuditRow>>> {
        let mut audits = self.servers.lock().await.former_audits.clone();
        audits.push(audit::read(&mut self.database().await?).await?);
        Ok(audits)
    }

    /// Every way of the world lets everything through, every node runs, and there is a replica.
    pub async fn heal(&self) -> Done {
        for node in &self.nodes {
            // One that was started while the database was away has ended; whoever runs nodes for
            // real starts them again.
            if node.process.try_wait()?.is_some() {
                node.process.restart()?;
            }
        }
        let ways = self.nodes.iter().flat_map(NodeSite::ways);
        for way in ways.chain(&self.masters_bus) {
            way.set_mode(FaultMode::Pass).await?;
        }
        let mut servers = self.servers.lock().await;
        if servers.replica.is_none() {
            let link = FaultProxy::start(servers.primary.addr()).await?;
            let replica = servers.primary.start_replica(&self.tools, link.addr()).await?;
            servers.replica = Some((replica, link));
        }
        Ok(())
    }
}

/// The event log of a node.
fn notes_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.{NOTES_SUFFIX}"))
}

fn node_name(number: usize) -> String {
    format!("chaos-{}", number + 1)
}

/// The database with its role, tables and audit.
async fn make_database(primary: &Postgres) -> Done {
    let mut admin = lockstep::database::connect(&primary.url("postgres"), "chaos").await?;
    for statement in
        [format!("create role {ROLE} login"), format!("create database {DATABASE} owner {ROLE}")]
    {
        // Safe: made of constants.
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut admin).await?;
    }
    lockstep::database::migrate(&node_url(primary.addr())).await?;
    let mut db = lockstep::database::connect(&primary.url(DATABASE), "chaos").await?;
    Ok(audit::install(&mut db).await?)
}

fn node_url(addr: SocketAddr) -> String {
    format!("postgres://{ROLE}@{addr}/{DATABASE}")
}

async fn start_paper(folder: &Path) -> Done<(ManagedProcess, SocketAddr)> {
    let paper = ProcessSpec::new("paper-broker", binary::lockstep())
        .args(["paper", "--listen", "127.0.0.1:0", "--answer-delay-ms"])
        .arg(ANSWER_DELAY_MS.to_string())
        .arg("--ledger")
        .arg(folder.join("ledger.jsonl"))
        .log_folder(folder)
        .start()?;
    let line = paper.wait_for_line(LISTENS, START_LIMIT).await?;
    let addr = line.trim_start_matches(LISTENS).trim().parse()?;
    Ok((paper, addr))
}

async fn drive(addr: SocketAddr) -> Done<PaperDriver> {
    let ident = Ident { node: NodeId::new("chaos-driver")? };
    let driver = PaperDriver::connect(&addr.to_string(), ident, LoginKind::Driver).await?;
    let symbol = SymbolSpec {
        symbol: Symbol::new(EURUSD)?,
        digits: 5,
        lots_step: "0.01".parse()?,
        lots_min: "0.01".parse()?,
        lots_max: "100".parse()?,
        contract_size: Some(Decimal::from(100_000)),
        stops_level_points: 0,
    };
    driver.declare_symbols(vec![symbol]).await?;
    feed(&driver).await;
    Ok(driver)
}

async fn feed(driver: &PaperDriver) {
    let price: schemas::Price = PRICE.parse().expect("a constant that is a price");
    let symbol = Symbol::new(EURUSD).expect("a constant that is a symbol");
    // The broker may end before the one who feeds it.
    let _broker_ended = driver.feed(vec![FeedQuote { symbol, bid: price, ask: price }]).await;
}

/// Two external masters, one leased, and ten followers: four of the first, two of the second,
/// three of the leased one, one of all three. Every third closes parts as MT4 does.
async fn enter(
    url: &str,
    driver: &PaperDriver,
    address: &str,
) -> Done<(Vec<MasterSite>, Vec<MasterLink>)> {
    let mut db = lockstep::database::connect(url, "chaos").await?;
    let mut masters = Vec::new();
    for (name, is_leased) in [("external-1", false), ("external-2", false), ("leased", true)] {
        let account = match is_leased {
            true => add_paper(&mut db, driver, name, Style::Mt4, address).await?,
            false => add(&mut db, name, "external", serde_json::json!({})).await?,
        };
        masters.push(MasterSite { account, is_leased });
    }
    const COPIES: &[&[usize]] = &[&[0], &[0], &[0], &[0], &[1], &[1], &[2], &[2], &[2], &[0, 1, 2]];
    let mut links = Vec::new();
    for (index, copied) in COPIES.iter().enumerate() {
        let style = if index % 3 == 2 { Style::Mt4 } else { Style::Mt5 };
        let name = format!("follower-{}", index + 1);
        let follower = add_paper(&mut db, driver, &name, style, address).await?;
        for master in copied.iter().map(|number| masters[*number].account) {
            let multiplier = Decimal::from(1 + index % 2);
            let new = NewLink::plain(master, follower, Sizing::Multiplier(multiplier));
            let link = directory::add_link(&mut db, &new).await?;
            links.push(MasterLink { master, link: Link { link, follower, multiplier } });
        }
    }
    Ok((masters, links))
}

async fn add_paper(
    db: &mut PgConnection,
    driver: &PaperDriver,
    name: &str,
    style: Style,
    address: &str,
) -> Done<AccountId> {
    let account = add(db, name, "paper", serde_json::json!({ "address": address })).await?;
    driver.declare_accounts(vec![AccountDecl::new(account, style)]).await?;
    Ok(account)
}

async fn add(
    db: &mut PgConnection,
    name: &str,
    platform: &str,
    connection: serde_json::Value,
) -> Done<AccountId> {
    let (name, platform) = (name.to_owned(), platform.to_owned());
    let new = NewAccount { name, platform, connection, enabled: true };
    Ok(directory::add_account(db, &new).await?)
}

async fn ways_to(nats: &NatsCluster) -> Done<Vec<FaultProxy>> {
    let mut ways = Vec::new();
    for server in nats.servers() {
        ways.push(FaultProxy::start(server.addr()).await?);
    }
    Ok(ways)
}

/// URLs of the bus by these ways.
pub(super) fn bus_urls(ways: &[FaultProxy]) -> Vec<String> {
    ways.iter().map(|way| format!("nats://{}", way.addr())).collect()
}

async fn start_node(
    name: String,
    broker: Arc<FaultProxy>,
    primary: SocketAddr,
    nats: &NatsCluster,
    folder: &Path,
) -> Done<NodeSite> {
    let database = FaultProxy::start(primary).await?;
    let bus = ways_to(nats).await?;
    let mut spec = ProcessSpec::new(&name, binary::lockstep())
        .arg("node")
        .log_folder(folder)
        .stop_signal(StopSignal::Term);
    for (variable, _) in std::env::vars().filter(|(name, _)| name.starts_with("LOCKSTEP_")) {
        spec = spec.env_remove(variable);
    }
    for (variable, value) in timing::settings() {
        spec = spec.env(variable, value);
    }
    spec = spec
        .env("LOCKSTEP_DATABASE_URL", node_url(database.addr()))
        .env("LOCKSTEP_NATS_URLS", bus_urls(&bus).join(","))
        .env("LOCKSTEP_NODE_NAME", &name)
        .env("LOCKSTEP_METRICS_LISTEN", "127.0.0.1:0")
        .env("LOCKSTEP_EVENT_LOG", notes_path(folder, &name))
        .env("LOCKSTEP_LOG", "info,async_nats=warn,sqlx=error");
    let process = spec.clone().start()?;
    Ok(NodeSite { name, process, database, bus, broker, spec })
}
