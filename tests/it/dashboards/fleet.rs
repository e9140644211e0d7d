//! Two real nodes with followers, a recorded master, a paper master, and a node killed midway.

use bus::{ClientSettings, Publisher, PublisherHandle, PublisherSettings, start_epoch};
use devstack::free_address;
use devstack::{ManagedProcess, Nats, Postgres, ProcessSpec, StopSignal, Tools};
use lockstep::cli::paper::LISTENS;
use lockstep::clock::NodeClock;
use lockstep::directory::{self, NewAccount, NewLink};
use lockstep::history::{self, Step};
use lockstep::player::{self, Player};
use lockstep_tests::http::Client;
use paper::protocol::{AccountDecl, Instruction, LoginKind, Style};
use paper::{Ident, PaperDriver};
use reconcile::{AboveMax, BelowMin, Sizing};
use rust_decimal::Decimal;
use schemas::{
    AccountId, Change, Lots, MasterPosition, MasterTicket, NodeId, Seq, Side, Symbol, SymbolSpec,
    TradeEvent,
};
use sqlx::{PgConnection, Row};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Followers of the recorded master.
const FOLLOWERS: u64 = 6;
/// The recorded master; then its followers, and the master that trades at the paper broker.
const MASTER: u64 = 1;
const PAPER_MASTER: u64 = MASTER + FOLLOWERS + 1;
/// The follower whose broker calls hold a thread.
const BLOCKING: u64 = MASTER + 1;
/// Accounts that nodes own.
const LEASED: i64 = FOLLOWERS as i64 + 1;
/// How long the recorded history is made to last: long enough for a takeover in the middle.
const PLAY: Duration = Duration::from_secs(16);
/// How long a step of the set-up, or a takeover, may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How often a condition in the database is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A short lease, so that a takeover fits into the test.
const SETTINGS: &[(&str, &str)] = &[
    ("LOCKSTEP_LEASE", "5s"),
    ("LOCKSTEP_CYCLE", "1s"),
    ("LOCKSTEP_FENCE", "2500ms"),
    ("LOCKSTEP_RETRY", "500ms"),
    ("LOCKSTEP_QUERY_LIMIT", "500ms"),
    ("LOCKSTEP_BROKER_CALL_LIMIT", "1s"),
    ("LOCKSTEP_SEND_RESERVE", "500ms"),
    ("LOCKSTEP_SETTLE", "1s"),
    ("LOCKSTEP_CLAIM_BATCH", "1"),
    ("LOCKSTEP_BLOCKING_FOLLOWERS", "1"),
    ("LOCKSTEP_LOG", "warn,lockstep=info"),
];

struct Node {
    address: SocketAddr,
    api: Client,
    process: ManagedProcess,
}

/// Everything that runs.
pub(super) struct Fleet {
    nodes: Vec<Node>,
    master: AccountId,
    paper_master: AccountId,
    publisher: PublisherHandle,
    client: async_nats::Client,
    driver: PaperDriver,
    steps: Vec<Step>,
    clock: NodeClock,
    db: PgConnection,
    _paper: ManagedProcess,
    _postgres: Postgres,
    _nats: Nats,
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_lockstep-under-test"))
}

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

impl Fleet {
    /// Starts servers, broker and nodes, and waits until every leased account works.
    pub(super) async fn start() -> Fleet {
        let tools = Tools::locate().unwrap();
        let nats = Nats::start(&tools).await.unwrap();
        let postgres = Postgres::start(&tools).await.unwrap();
        let database_url = postgres.create_database("dashboards").await.unwrap();
        let paper = ProcessSpec::new("paper-broker", program())
            .args(["paper", "--listen", "127.0.0.1:0"])
            .start()
            .unwrap();
        let line = paper.wait_for_line(LISTENS, LIMIT).await.unwrap();
        let paper_address = line.trim_start_matches(LISTENS).trim().to_owned();
        let ident = Ident { node: NodeId::new("driver").unwrap() };
        let driver = PaperDriver::connect(&paper_address, ident, LoginKind::Driver).await.unwrap();
        let recorded = history::load_bytes("demo.csv", history::DEMO.as_bytes()).unwrap();
        declare(&driver, &recorded).await;
        let mut db = lockstep::database::connect_migrated(&database_url, "test").await.unwrap();
        enter(&mut db, &paper_address).await;
        let client =
            bus::connect(&ClientSettings::new(vec![nats.url()], "test-master")).await.unwrap();
        let clock = NodeClock::system();
        let publisher = Publisher::start(
            client.clone(),
            account(MASTER),
            start_epoch(clock.wall(), None, None),
            PublisherSettings::default(),
            Arc::new(|| true),
            &tokio::runtime::Handle::current(),
        );
        publisher.observe(clock.wall(), player::base(), &BTreeMap::new());
        let mut nodes = Vec::new();
        for name in ["node-a", "node-b"] {
            nodes.push(start_node(name, &database_url, &nats.url()).await);
        }
        let mut fleet = Fleet {
            nodes,
            master: account(MASTER),
            paper_master: account(PAPER_MASTER),
            publisher,
            client,
            driver,
            steps: history::timeline(&recorded),
            clock,
            db,
            _paper: paper,
            _postgres: postgres,
            _nats: nats,
        };
        fleet.wait_until_working("copying at first").await;
        fleet
    }

    /// Where the nodes serve their metrics.
    pub(super) fn metrics_addresses(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.address).collect()
    }

    /// Plays the history, kills a node in the middle and starts it again; then trades at the
    /// paper broker, breaks the master's sequence, and switches an account off.
    pub(super) async fn trade_through_a_kill(&mut self) {
        let length_s = self.steps.last().unwrap().offset_us as f64 / 1e6;
        let speed = (length_s / PLAY.as_secs_f64()).max(1.0);
        let (publisher, driver) = (self.publisher.clone(), self.driver.clone());
        let (clock, steps) = (self.clock.clone(), self.steps.clone());
        let (played, mut playing) = tokio::sync::watch::channel(0);
        let play = tokio::spawn(async move {
            let now = move || clock.wall();
            let player = Player { publisher: &publisher, driver: Some(&driver), speed, now: &now };
            player
                .play(&steps, |index, _, _| {
                    played.send_replace(index);
                })
                .await
        });
        let middle = self.steps.len() / 2;
        playing.wait_for(|index| *index >= middle).await.unwrap();
        self.nodes[0].process.kill().unwrap();
        self.wait_until_working("a takeover").await;
        self.nodes[0].process.restart().unwrap();
        play.await.unwrap().unwrap();
        self.trade_at_the_paper_master().await;
        self.skip_a_number().await;
        self.give_one_back().await;
    }

    /// Asks each node's API for what needs no token, and for something that does.
    pub(super) async fn ask_the_api(&self) {
        for node in &self.nodes {
            assert_eq!(node.api.get("/livez").await.status, 200);
            assert_eq!(node.api.get("/v1/accounts").await.status, 401);
        }
    }

    /// Ends the nodes in an orderly way.
    pub(super) async fn stop(self) {
        for node in &self.nodes {
            let status = node.process.stop(LIMIT).await.unwrap();
            assert!(status.success(), "{status}\n{}", node.process.log_tail());
        }
    }

    async fn trade_at_the_paper_master(&self) {
        let symbol = self.steps.iter().find_map(|step| step.quote.as_ref()).unwrap().0.clone();
        let lots: Lots = "1".parse().unwrap();
        let by_hand = Instruction::open_by_hand(symbol, Side::Buy, lots);
        self.driver.manual(self.paper_master, by_hand).await.unwrap();
    }

    /// Breaks the master's sequence: an event that says one before it is lost. The events after
    /// it pass its number, so that a snapshot settles the doubt.
    async fn skip_a_number(&self) {
        let (epoch, seq) = self.publisher.position();
        let opened = self.one_more_trade();
        let event = TradeEvent {
            account: self.master,
            epoch,
            seq: Seq::new(seq.get() + 2).unwrap(),
            at: self.clock.wall(),
            change: Change::PositionModified(opened.clone()),
        };
        let payload = schemas::codec::encode_event(&event);
        let subject = schemas::subject::event(self.master);
        self.client.publish(subject, payload.into()).await.unwrap();
        self.client.flush().await.unwrap();
        let changes = vec![
            Change::PositionOpened(opened.clone()),
            Change::PositionModified(opened.clone()),
            Change::PositionModified(opened),
        ];
        self.publisher.publish(self.clock.wall(), changes).unwrap();
    }

    /// The first trade of the history once more, under a ticket that was never used.
    fn one_more_trade(&self) -> MasterPosition {
        let first = self.steps.iter().find_map(|step| match &step.change {
            Change::PositionOpened(position) => Some(position.clone()),
            _ => None,
        });
        let mut position = first.unwrap();
        position.ticket = MasterTicket::new(position.ticket.get() + 1_000_000_000).unwrap();
        position.opened_at = self.clock.wall();
        position
    }

    /// Switches an account off: its owner drains it and gives it back.
    async fn give_one_back(&mut self) {
        let last = account(MASTER + FOLLOWERS);
        assert!(directory::enable_account(&mut self.db, last, false).await.unwrap());
    }

    /// Waits until every leased account has an owner whose session works under its token.
    async fn wait_until_working(&mut self, awaited: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let row = sqlx::query(
                "select count(*) as working from trading_accounts a \
                 join account_status s on s.account_id = a.id \
                 where a.node_id is not null and a.lease_until > clock_timestamp() \
                 and s.lease_token = a.lease_token and s.session in ('copying', 'leading')",
            )
            .fetch_one(&mut self.db)
            .await
            .unwrap();
            let working: i64 = row.get("working");
            if working >= LEASED {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{awaited}: {working} of {LEASED} accounts work\n{}\n{}",
                self.nodes[0].process.log_tail(),
                self.nodes[1].process.log_tail()
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

async fn start_node(name: &str, database_url: &str, nats_url: &str) -> Node {
    let address = free_address().unwrap();
    let api = Client::free().await;
    let mut spec = ProcessSpec::new(name, program())
        .arg("node")
        .stop_signal(StopSignal::Term)
        .env("LOCKSTEP_DATABASE_URL", database_url)
        .env("LOCKSTEP_NATS_URLS", nats_url)
        .env("LOCKSTEP_NODE_NAME", name)
        .env("LOCKSTEP_METRICS_LISTEN", address.to_string())
        .env("LOCKSTEP_API_LISTEN", api.address())
        .env("LOCKSTEP_CAPACITY", LEASED.to_string());
    for (key, value) in SETTINGS {
        spec = spec.env(key, value);
    }
    for foreign in ["LOCKSTEP_TOOLS", "LOCKSTEP_PROMETHEUS", "LOCKSTEP_PROMTOOL"] {
        spec = spec.env_remove(foreign);
    }
    Node { address, api, process: spec.start().unwrap() }
}

/// Symbols of the history with room for every volume, and the accounts at the paper broker.
async fn declare(driver: &PaperDriver, recorded: &history::History) {
    let symbols = history::symbols(recorded)
        .into_iter()
        .map(|hint| SymbolSpec {
            symbol: hint.symbol,
            digits: hint.digits,
            lots_step: hint.lots_step,
            lots_min: hint.lots_step,
            lots_max: Lots::new(hint.lots_max.get() * Decimal::from(1000)).unwrap(),
            contract_size: hint.assumed_contract.map(|contract| contract.size),
            stops_level_points: 0,
        })
        .collect();
    driver.declare_symbols(symbols).await.unwrap();
    let declared = (MASTER + 1..=PAPER_MASTER)
        .map(|number| {
            let style = if number.is_multiple_of(3) { Style::Mt4 } else { Style::Mt5 };
            AccountDecl::new(account(number), style)
        })
        .collect();
    driver.declare_accounts(declared).await.unwrap();
}

/// Accounts and links. The last follower takes a thousandth, which is less than any smallest lot.
async fn enter(db: &mut PgConnection, paper_address: &str) {
    for number in MASTER..=PAPER_MASTER {
        let is_external = number == MASTER;
        let added = NewAccount {
            name: format!("account-{number}"),
            platform: if is_external { "external" } else { "paper" }.into(),
            connection: if is_external {
                serde_json::json!({})
            } else {
                // One whose calls hold a thread.
                serde_json::json!({ "address": paper_address, "blocking": number == BLOCKING })
            },
            enabled: true,
        };
        assert_eq!(directory::add_account(db, &added).await.unwrap(), account(number));
    }
    let links = (1..=FOLLOWERS)
        .map(|index| (MASTER, MASTER + index, if index == FOLLOWERS { "0.001" } else { "1" }))
        .chain([(PAPER_MASTER, MASTER + 1, "1")]);
    for (master, follower, multiplier) in links {
        let link = NewLink {
            master: account(master),
            follower: account(follower),
            magic: None,
            enabled: true,
            sizing: Sizing::Multiplier(multiplier.parse().unwrap()),
            below_min: BelowMin::Skip,
            above_max: AboveMax::Clamp,
            align_contract: false,
            slippage_points: 20,
            copy_stops: true,
            copy_pendings: true,
            reverse: false,
            sync_existing: false,
            symbol_map: BTreeMap::<Symbol, Symbol>::new(),
            symbol_suffix: String::new(),
        };
        directory::add_link(db, &link).await.unwrap();
    }
}
