//! One test's world: a bus, a database, a paper broker, accounts with links, and nodes.
//!
//! Inputs: what the test adds. Outputs: processes to break, a driver to move, waits with a limit.
//!
//! Invariants:
//! 1. Nodes and broker are processes of the program that users run.
//! 2. The broker's prices stand still at [`PRICE`] and are said again and again, so that a copy
//!    that comes late is allowed and must be there.
//! 3. The database is the test's own; the Postgres is shared by the test program.

use crate::binary;
use crate::oracle::{Link, State, differences};
use devstack::{
    FaultProxy, ManagedProcess, Nats, NatsCluster, ProcessSpec, StopSignal, Tools, shared_postgres,
};
use lockstep::cli::demo::LEASE_SETTINGS;
use lockstep::cli::paper::LISTENS;
use lockstep::clock::NodeClock;
use lockstep::directory::{self, NewAccount, NewLink};
use paper::ledger::{Ledger, LedgerRow};
use paper::protocol::{AccountDecl, FeedQuote, LoginKind, Style};
use paper::{Ident, PaperDriver};
use parking_lot::Mutex;
use reconcile::Sizing;
use rust_decimal::Decimal;
use schemas::{AccountId, LinkId, Micros, NodeId, Symbol, SymbolSpec};
use sqlx::{PgConnection, Row};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinSet;

/// Worlds that run at once: more would make each other's times meaningless on two cores.
pub const WORLDS_MAX: usize = 2;
/// The symbol of every trade.
pub const EURUSD: &str = "EURUSD";
/// Its price, both ways.
pub const PRICE: &str = "1.10000";
/// Limit of waits for what should take a moment; generous, because machines build meanwhile.
pub const SOON: Duration = Duration::from_secs(30);
/// Limit of waits that include a takeover.
pub const TAKEOVER: Duration = Duration::from_secs(60);

/// A quote is fresh for 3 s; said well within that.
const QUOTE_EVERY: Duration = Duration::from_millis(500);
/// Time between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(20);

static TURNS: Semaphore = Semaphore::const_new(WORLDS_MAX);

/// This machine's wall clock.
pub fn wall() -> Micros {
    NodeClock::system().wall()
}

/// Looks until there is an answer; says what it waited for when there is none.
pub async fn until<T>(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The URL of a database for another role.
pub fn url_as(url: &str, role: &str) -> String {
    let (_, place) = url.rsplit_once('@').unwrap();
    format!("postgres://{role}@{place}")
}

/// The servers of the bus.
#[derive(Debug)]
pub enum Bus {
    /// One server.
    One(Box<Nats>),
    /// Servers that route to each other.
    Cluster(NatsCluster),
}

impl Bus {
    /// URL of one server.
    pub fn url(&self, number: usize) -> String {
        match self {
            Bus::One(nats) => nats.url(),
            Bus::Cluster(cluster) => cluster.server(number).url(),
        }
    }
}

/// What a node is started with.
#[derive(Debug)]
pub struct NodeSpec {
    name: String,
    database_url: String,
    nats_url: String,
    leases: &'static [(&'static str, &'static str)],
    settings: Vec<(String, String)>,
}

impl NodeSpec {
    /// Reaches the database by another way.
    #[must_use]
    pub fn database(mut self, url: String) -> Self {
        self.database_url = url;
        self
    }

    /// Uses another server of the bus.
    #[must_use]
    pub fn nats(mut self, url: String) -> Self {
        self.nats_url = url;
        self
    }

    /// Has the leases that a node has by itself, instead of the demo's short ones.
    #[must_use]
    pub fn default_leases(mut self) -> Self {
        self.leases = &[];
        self
    }

    /// One more setting; the last one of a name counts.
    #[must_use]
    pub fn setting(mut self, name: &str, value: impl ToString) -> Self {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// Starts the process.
    pub fn start(self) -> Node {
        let mut spec = ProcessSpec::new(&self.name, binary::lockstep())
            .arg("node")
            .stop_signal(StopSignal::Term);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("LOCKSTEP_")) {
            spec = spec.env_remove(name);
        }
        for (name, value) in self.leases {
            spec = spec.env(name, value);
        }
        spec = spec
            .env("LOCKSTEP_DATABASE_URL", &self.database_url)
            .env("LOCKSTEP_NATS_URLS", &self.nats_url)
            .env("LOCKSTEP_NODE_NAME", &self.name)
            .env("LOCKSTEP_METRICS_LISTEN", "127.0.0.1:0")
            .env("LOCKSTEP_LOG", "warn,lockstep=info");
        for (name, value) in &self.settings {
            spec = spec.env(name, value);
        }
        Node { name: self.name, process: spec.start().unwrap() }
    }
}

/// A node process; it is told to end when the value is dropped.
#[derive(Debug)]
pub struct Node {
    /// Its name; what owns accounts has a random part behind it.
    pub name: String,
    /// The process.
    pub process: ManagedProcess,
}

impl Node {
    /// Whether this owner's name is of this node.
    pub fn is(&self, owner: &str) -> bool {
        owner.strip_prefix(&self.name).is_some_and(|rest| rest.starts_with('-'))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "what a failed test leaves for its reader")]
            {
                eprintln!("--- {} ---\n{}", self.name, self.process.log_tail());
            }
        }
    }
}

/// Who owns an account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Token of the current or last tenure.
    pub token: i64,
    /// The node, if there is one.
    pub node: Option<String>,
}

/// What came of a command line.
#[derive(Debug)]
pub struct CliOutput {
    /// Exit code.
    pub code: Option<i32>,
    /// What it answered.
    pub stdout: String,
    /// What it complained of.
    pub stderr: String,
}

impl CliOutput {
    /// The answer, which must be JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }
}

/// Runs `lockstep` with these arguments and variables, to its end.
pub async fn run_lockstep(arguments: &[&str], variables: &[(&str, &str)]) -> CliOutput {
    let mut command = tokio::process::Command::new(binary::lockstep());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("LOCKSTEP_")) {
        command.env_remove(name);
    }
    command.args(arguments).envs(variables.iter().copied()).kill_on_drop(true);
    let done = tokio::time::timeout(SOON, command.output());
    let done = done.await.unwrap_or_else(|_| panic!("{arguments:?} does not end")).unwrap();
    CliOutput {
        code: done.status.code(),
        stdout: String::from_utf8(done.stdout).unwrap(),
        stderr: String::from_utf8(done.stderr).unwrap(),
    }
}

/// The world.
#[derive(Debug)]
pub struct World {
    /// The bus.
    pub bus: Bus,
    /// Moves the broker.
    pub driver: PaperDriver,
    /// Where the broker is.
    pub paper_addr: SocketAddr,
    /// The database.
    pub database_url: String,
    /// Every link, in the order of adding.
    pub links: Vec<Link>,
    ledger: Mutex<Vec<LedgerRow>>,
    paper: ManagedProcess,
    quotes: JoinSet<()>,
    _turn: SemaphorePermit<'static>,
}

impl World {
    /// A world with one NATS server.
    pub async fn start(name: &str) -> World {
        let turn = TURNS.acquire().await.unwrap();
        let nats = Nats::start(&Tools::locate().unwrap()).await.unwrap();
        World::start_on(name, Bus::One(Box::new(nats)), turn).await
    }

    /// A world with a cluster of NATS servers.
    pub async fn start_with_cluster(name: &str, servers: usize) -> World {
        let turn = TURNS.acquire().await.unwrap();
        let cluster = NatsCluster::start(&Tools::locate().unwrap(), servers).await.unwrap();
        World::start_on(name, Bus::Cluster(cluster), turn).await
    }

    async fn start_on(name: &str, bus: Bus, turn: SemaphorePermit<'static>) -> World {
        let database_url = shared_postgres().await.unwrap().create_database(name).await.unwrap();
        lockstep::database::migrate(&database_url).await.unwrap();
        let paper = ProcessSpec::new("paper-broker", binary::lockstep())
            .args(["paper", "--listen", "127.0.0.1:0"])
            .start()
            .unwrap();
        let line = paper.wait_for_line(LISTENS, SOON).await.unwrap();
        let paper_addr: SocketAddr = line.trim_start_matches(LISTENS).trim().parse().unwrap();
        let node = NodeId::new("test-driver").unwrap();
        let ident = Ident { node };
        let address = paper_addr.to_string();
        let driver = PaperDriver::connect(&address, ident, LoginKind::Driver).await.unwrap();
        driver.declare_symbols(vec![symbol()]).await.unwrap();
        let mut quotes = JoinSet::new();
        feed(&driver).await;
        let feeder = driver.clone();
        quotes.spawn(async move {
            let mut every = tokio::time::interval(QUOTE_EVERY);
            loop {
                every.tick().await;
                feed(&feeder).await;
            }
        });
        World {
            bus,
            driver,
            paper_addr,
            database_url,
            links: Vec::new(),
            ledger: Mutex::default(),
            paper,
            quotes,
            _turn: turn,
        }
    }

    /// The price is said no more: what is copied late from now on finds none that is fresh.
    pub fn stop_quotes(&mut self) {
        self.quotes.abort_all();
    }

    /// The broker's process.
    pub fn paper(&self) -> &ManagedProcess {
        &self.paper
    }

    /// A node with the demo's short leases, to be changed and started.
    pub fn node(&self, name: &str) -> NodeSpec {
        NodeSpec {
            name: name.to_owned(),
            database_url: self.database_url.clone(),
            nats_url: self.bus.url(0),
            leases: LEASE_SETTINGS,
            settings: Vec::new(),
        }
    }

    /// The database's URL by way of a proxy.
    pub fn database_url_by(&self, proxy: &FaultProxy) -> String {
        let (before, after) = self.database_url.rsplit_once('@').unwrap();
        let (_, database) = after.split_once('/').unwrap();
        format!("{before}@{}/{database}", proxy.addr())
    }

    /// A connection to the database.
    pub async fn database(&self) -> PgConnection {
        lockstep::database::connect(&self.database_url, "test").await.unwrap()
    }

    /// An account whose publisher is not a node.
    pub async fn add_external_account(&self, name: &str) -> AccountId {
        self.add_account(name, "external", serde_json::json!({})).await
    }

    /// An account at the paper broker.
    pub async fn add_paper_account(&self, name: &str, style: Style) -> AccountId {
        self.add_paper_account_at(name, style, self.paper_addr).await
    }

    /// An account at the paper broker, which nodes reach at this address.
    pub async fn add_paper_account_at(
        &self,
        name: &str,
        style: Style,
        addr: SocketAddr,
    ) -> AccountId {
        self.add_declared_account(name, addr, |account| AccountDecl::new(account, style)).await
    }

    /// An account with ways of its own at the paper broker, which nodes reach at this address.
    pub async fn add_declared_account(
        &self,
        name: &str,
        addr: SocketAddr,
        declare: impl FnOnce(AccountId) -> AccountDecl,
    ) -> AccountId {
        let connection = serde_json::json!({ "address": addr.to_string() });
        let account = self.add_account(name, "paper", connection).await;
        self.driver.declare_accounts(vec![declare(account)]).await.unwrap();
        account
    }

    async fn add_account(
        &self,
        name: &str,
        platform: &str,
        connection: serde_json::Value,
    ) -> AccountId {
        let new = NewAccount {
            name: name.to_owned(),
            platform: platform.to_owned(),
            connection,
            enabled: true,
        };
        directory::add_account(&mut self.database().await, &new).await.unwrap()
    }

    /// A link that copies everything from now on, times a whole number.
    pub async fn add_link(
        &mut self,
        master: AccountId,
        follower: AccountId,
        multiplier: u32,
    ) -> LinkId {
        let multiplier = Decimal::from(multiplier);
        let new = NewLink::plain(master, follower, Sizing::Multiplier(multiplier));
        let link = directory::add_link(&mut self.database().await, &new).await.unwrap();
        self.links.push(Link { link, follower, multiplier });
        link
    }

    /// Followers of a master, every third in MT4 style, every second with twice its volume.
    pub async fn add_followers(&mut self, master: AccountId, count: u32) -> Vec<AccountId> {
        let mut followers = Vec::new();
        for index in 0..count {
            let style = if index % 3 == 2 { Style::Mt4 } else { Style::Mt5 };
            let follower = self.add_paper_account(&format!("follower-{index}"), style).await;
            self.add_link(master, follower, 1 + index % 2).await;
            followers.push(follower);
        }
        followers
    }

    /// The ledger up to now.
    pub async fn ledger(&self) -> Ledger {
        loop {
            let from = self.ledger.lock().len() as u64;
            let page = self.driver.ledger_page(from).await.unwrap();
            let mut rows = self.ledger.lock();
            // Another task may have read the same page meanwhile.
            let known = rows.len() as u64;
            rows.extend(page.rows.into_iter().filter(|row| row.row >= known));
            if page.next.is_none() {
                return Ledger::from_rows(rows.clone());
            }
        }
    }

    /// Owners of all accounts, by the database.
    pub async fn owners(&self) -> BTreeMap<AccountId, Owner> {
        owners(&mut self.database().await).await
    }

    /// The accounts that this node owns now, with their tokens.
    pub async fn owned_by(&self, node: &Node) -> BTreeMap<AccountId, i64> {
        let owners = self.owners().await.into_iter();
        let owned = owners.filter(|(_, o)| o.node.as_ref().is_some_and(|owner| node.is(owner)));
        owned.map(|(account, owner)| (account, owner.token)).collect()
    }

    /// Waits until these accounts are owned by somebody whose session says this word of itself.
    pub async fn until_session(&self, word: &str, accounts: &[AccountId]) {
        let ids: Vec<i64> = accounts.iter().map(|account| account.as_i64()).collect();
        let mut db = self.database().await;
        until(&format!("{word}: {accounts:?}"), SOON, async || {
            let row = sqlx::query(
                "select count(*) as found from trading_accounts a join account_status s on s.account_id = a.id \
                 where a.node_id is not null and s.lease_token = a.lease_token and s.session = $1 and a.id = any($2)",
            )
            .bind(word)
            .bind(&ids)
            .fetch_one(&mut db)
            .await
            .unwrap();
            (row.get::<i64, _>("found") == ids.len() as i64).then_some(())
        })
        .await;
    }

    /// Waits until every follower copies.
    pub async fn until_copying(&self) {
        let followers: Vec<AccountId> = self.links.iter().map(|link| link.follower).collect();
        self.until_session("copying", &followers).await;
    }

    /// Waits until every follower holds what it should for this state of the master, and returns
    /// the ledger that says so.
    pub async fn until_equal(&self, limit: Duration, master: impl Fn(&Ledger) -> State) -> Ledger {
        let deadline = Instant::now() + limit;
        loop {
            let ledger = self.ledger().await;
            let differs = differences(&master(&ledger), &self.links, &ledger);
            if differs.is_empty() {
                return ledger;
            }
            if Instant::now() >= deadline {
                let recorded = self.recorded().await;
                panic!("not equal within {limit:?}:\n{}\n{recorded}", differs.join("\n"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The last events that the nodes have recorded, for whoever looks for a reason.
    async fn recorded(&self) -> String {
        let rows = sqlx::query(
            "select follower_id, master_ticket, action, outcome, coalesce(reason, '-') as reason, node_id \
             from copy_events where outcome <> 'done' order by at desc limit 40",
        )
        .fetch_all(&mut self.database().await)
        .await
        .unwrap();
        let lines = rows.iter().map(|row| {
            let (follower, ticket): (i64, i64) = (row.get("follower_id"), row.get("master_ticket"));
            let word = |column: &str| row.get::<String, _>(column);
            let (action, outcome) = (word("action"), word("outcome"));
            format!("{follower} {ticket} {action} {outcome} {} {}", word("reason"), word("node_id"))
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Runs `lockstep` against this world's database and bus.
    pub async fn cli(&self, arguments: &[&str]) -> CliOutput {
        let nats = self.bus.url(0);
        let variables =
            [("LOCKSTEP_DATABASE_URL", self.database_url.as_str()), ("LOCKSTEP_NATS_URLS", &nats)];
        run_lockstep(arguments, &variables).await
    }
}

/// Owners of all accounts, by the database.
pub async fn owners(db: &mut PgConnection) -> BTreeMap<AccountId, Owner> {
    let rows = sqlx::query("select id, lease_token, node_id from trading_accounts");
    let rows = rows.fetch_all(db).await.unwrap();
    rows.iter()
        .map(|row| {
            let account = AccountId::from_i64(row.get("id")).unwrap();
            (account, Owner { token: row.get("lease_token"), node: row.get("node_id") })
        })
        .collect()
}

fn symbol() -> SymbolSpec {
    SymbolSpec {
        symbol: Symbol::new(EURUSD).unwrap(),
        digits: 5,
        lots_step: "0.01".parse().unwrap(),
        lots_min: "0.01".parse().unwrap(),
        lots_max: "100".parse().unwrap(),
        contract_size: Some(Decimal::from(100_000)),
        stops_level_points: 0,
    }
}

async fn feed(driver: &PaperDriver) {
    let price: schemas::Price = PRICE.parse().unwrap();
    let quote = FeedQuote { symbol: Symbol::new(EURUSD).unwrap(), bid: price, ask: price };
    // The broker may end before the one who feeds it.
    let _broker_ended = driver.feed(vec![quote]).await;
}
