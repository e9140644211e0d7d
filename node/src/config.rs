//! What a node was told, checked as a whole.
//!
//! Decides: whether a node may start with these settings, and what they come to.
//! In: variables `LOCKSTEP_*` from a source of text ([`Vars`]). Out: [`NodeConfig`], or every
//! fault at once ([`ConfigError`]).
//!
//! Invariants:
//! 1. A duration has a unit in its text (`60s`, `250ms`, `1m`); a bare number is a fault, because
//!    nobody can tell seconds from milliseconds (H78).
//! 2. An unknown `LOCKSTEP_*` variable is a fault: `LOCKSTEP_FENSE=15s` must not mean the default
//!    (S17).
//! 3. Timing that can neither be safe nor live is a fault; the message shows both sides (H25).
//! 4. No secret is ever printed: [`NodeConfig::effective`] and `Debug` hide passwords.
//!
//! Not covered: whether the servers that the addresses name exist.

use crate::credentials::MasterKeys;
use crate::lease::{self, LeaseTiming};
use crate::secret::SecretUrl;
use schemas::NodeId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zeroize::Zeroizing;

/// Every variable of this program begins with this.
pub const PREFIX: &str = "LOCKSTEP_";

/// A failed cycle is not tried again sooner than this (H25): a failing database is not helped by
/// a hot loop.
pub const RETRY_MIN: Duration = Duration::from_millis(500);

/// What the fence must hold beside a broker call and the send reserve (H25).
pub const FENCE_SLACK: Duration = Duration::from_secs(1);

/// One setting, for the start-up check and for people.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Variable name.
    pub name: &'static str,
    /// What is taken when the variable is absent; `None` where a value must be given.
    pub default: Option<&'static str>,
    /// What it means, with its unit, and why the default is what it is.
    pub meaning: &'static str,
}

const fn setting(
    name: &'static str,
    default: Option<&'static str>,
    meaning: &'static str,
) -> Setting {
    Setting { name, default, meaning }
}

const DATABASE_URL: &str = "LOCKSTEP_DATABASE_URL";
const NATS_URLS: &str = "LOCKSTEP_NATS_URLS";
const NATS_ROOT_CERTIFICATES: &str = "LOCKSTEP_NATS_ROOT_CERTIFICATES";
const MASTER_KEY_FILE: &str = "LOCKSTEP_MASTER_KEY_FILE";
/// The setting whose value may come from elsewhere, see [`master_key_source`].
pub(crate) const MASTER_KEY: &str = "LOCKSTEP_MASTER_KEY";
const NODE_NAME: &str = "LOCKSTEP_NODE_NAME";
const STATE_FOLDER: &str = "LOCKSTEP_STATE_FOLDER";
const PLATFORMS: &str = "LOCKSTEP_PLATFORMS";
const CAPACITY: &str = "LOCKSTEP_CAPACITY";
const CLAIM_BATCH: &str = "LOCKSTEP_CLAIM_BATCH";
const LEASE: &str = "LOCKSTEP_LEASE";
const CYCLE: &str = "LOCKSTEP_CYCLE";
const FENCE: &str = "LOCKSTEP_FENCE";
const RETRY: &str = "LOCKSTEP_RETRY";
const QUERY_LIMIT: &str = "LOCKSTEP_QUERY_LIMIT";
const BROKER_CALL_LIMIT: &str = "LOCKSTEP_BROKER_CALL_LIMIT";
const SEND_RESERVE: &str = "LOCKSTEP_SEND_RESERVE";
const SETTLE: &str = "LOCKSTEP_SETTLE";
const AUDITS: &str = "LOCKSTEP_AUDITS";
const SESSION_DOWN: &str = "LOCKSTEP_SESSION_DOWN";
const SILENT_HERE: &str = "LOCKSTEP_SILENT_HERE";
const BEACON: &str = "LOCKSTEP_BEACON";
const LOCAL_PATH: &str = "LOCKSTEP_LOCAL_PATH";
const STALE: &str = "LOCKSTEP_STALE";
const WRITE_EVERY: &str = "LOCKSTEP_WRITE_EVERY";
const PARALLEL_ORDERS: &str = "LOCKSTEP_PARALLEL_ORDERS";
const HOT_THREADS: &str = "LOCKSTEP_HOT_THREADS";
const BUSY_POLL: &str = "LOCKSTEP_BUSY_POLL";
const BLOCKING_FOLLOWERS: &str = "LOCKSTEP_BLOCKING_FOLLOWERS";
const BLOCKING_THREADS_MAX: &str = "LOCKSTEP_BLOCKING_THREADS_MAX";
const METRICS_LISTEN: &str = "LOCKSTEP_METRICS_LISTEN";
const API_LISTEN: &str = "LOCKSTEP_API_LISTEN";
const LOG: &str = "LOCKSTEP_LOG";
const EVENT_LOG: &str = "LOCKSTEP_EVENT_LOG";
const OWN_TIME_LOG: &str = "LOCKSTEP_OWN_TIME_LOG";

/// Where systemd puts the credentials of a unit.
const CREDENTIALS_DIRECTORY: &str = "CREDENTIALS_DIRECTORY";
/// The one of them that holds master keys.
const MASTER_KEY_CREDENTIAL: &str = "lockstep-master-key";

/// Every setting there is.
pub const SETTINGS: &[Setting] = &[
    setting(
        DATABASE_URL,
        None,
        "Postgres that keeps accounts, links, leases and pairs; the server itself, not a pooler",
    ),
    setting(
        NATS_URLS,
        Some("nats://127.0.0.1:4222"),
        "NATS servers, separated by commas; the port is the one NATS uses by itself",
    ),
    setting(
        NATS_ROOT_CERTIFICATES,
        Some(""),
        "file with the certificates that the NATS servers' own are checked by (PEM); empty means the \
         system's. With tls:// in the addresses nothing is said before that check",
    ),
    setting(
        MASTER_KEY_FILE,
        Some(""),
        "file with the master keys that passwords of accounts at their brokers are sealed with, as \
         `lockstep keys init` writes it, the present one first; empty means LOCKSTEP_MASTER_KEY, or \
         lockstep-master-key among the credentials of a systemd unit. Without a key, accounts that \
         have a password cannot log in here",
    ),
    setting(
        MASTER_KEY,
        Some(""),
        "the content of such a file, for whoever cannot give the node a file; the file is safer, \
         because a process hands its variables on to those that it starts",
    ),
    setting(
        NODE_NAME,
        Some(""),
        "name of the node in rows and logs; empty means first platform and host name. A random \
         part is added at every start, so that two nodes of one name stay two owners",
    ),
    setting(
        STATE_FOLDER,
        Some(""),
        "folder on a local disk for the lock file by which a node that was started again proves that \
         the one before it is dead, and takes its accounts at once; empty means that it waits for \
         the leases to run out",
    ),
    setting(
        PLATFORMS,
        Some("paper"),
        "platforms whose accounts this node serves, separated by commas; the paper broker needs \
         no account anywhere",
    ),
    setting(
        CAPACITY,
        Some("100"),
        "accounts this node owns at most; chosen so that three nodes carry two hundred when one fails",
    ),
    setting(
        CLAIM_BATCH,
        Some("50"),
        "accounts claimed at most in one cycle; more follow 200 ms later, so that nodes which \
         start together share what is free",
    ),
    setting(LEASE, Some("60s"), "how long an account stays ours without a renewal"),
    setting(CYCLE, Some("20s"), "from one renewal to the next; two may fail within lease - fence"),
    setting(
        FENCE,
        Some("15s"),
        "how much earlier than the lease's end we stop; holds a broker call, the send reserve and 1s",
    ),
    setting(RETRY, Some("2s"), "pause after a failed renewal; at least 500ms"),
    setting(QUERY_LIMIT, Some("5s"), "the longest a renewal may take, connecting included"),
    setting(
        BROKER_CALL_LIMIT,
        Some("10s"),
        "the longest an order call may take; most brokers answer or give up within that",
    ),
    setting(
        SEND_RESERVE,
        Some("2s"),
        "what must be left of a permit for an order to be sent; equal to the gap that counts as a freeze",
    ),
    setting(
        SETTLE,
        Some("10s"),
        "how long a new owner waits before its first open after the old one vanished; the longest \
         broker answer",
    ),
    setting(
        AUDITS,
        Some("5s,30s,120s"),
        "when after a takeover the book is searched for duplicates, separated by commas, rising",
    ),
    setting(
        SESSION_DOWN,
        Some("3m"),
        "an account whose session at the broker is down for so long is let go, if another node has room",
    ),
    setting(
        SILENT_HERE,
        Some("30s"),
        "an account whose master is silent here for so long, and heard by another node with room, is \
         let go",
    ),
    setting(BEACON, Some("2s"), "how often a master's session says where it stands"),
    setting(
        LOCAL_PATH,
        Some("on"),
        "on or off; whether followers hear a master of their own node without the way over NATS, \
         where its events go at the same time. While the bus is away they hear nothing either",
    ),
    setting(
        STALE,
        Some("6s"),
        "a master's feed that is silent for so long is in doubt: three beacons lost",
    ),
    setting(
        WRITE_EVERY,
        Some("100ms"),
        "how often collected rows are written; a batch is 50 times cheaper than its rows alone",
    ),
    setting(
        PARALLEL_ORDERS,
        Some("16"),
        "orders of different tickets in flight at once for one follower",
    ),
    setting(HOT_THREADS, Some("2"), "threads for bus and sessions"),
    setting(
        BUSY_POLL,
        Some("0"),
        "how many of these threads never sleep: each takes a core for itself, and saves the wake-up \
         of a sleeping one before an order; for whoever owns the machine",
    ),
    setting(
        BLOCKING_FOLLOWERS,
        Some("0"),
        "accounts of this node at most whose order calls hold a thread until they are answered; each \
         has LOCKSTEP_PARALLEL_ORDERS threads, made at the start, about 30 KiB each. 0: this node \
         cannot serve such accounts, because most platforms need no threads",
    ),
    setting(
        BLOCKING_THREADS_MAX,
        Some("4096"),
        "threads made for these at most; where fewer are made than the accounts may use at once, the \
         node warns at its start, and calls may wait for the answers of others. 4096 are a follower \
         number of 256, and about 120 MiB",
    ),
    setting(
        METRICS_LISTEN,
        Some("127.0.0.1:9464"),
        "address for /metrics; local only unless you say otherwise",
    ),
    setting(
        API_LISTEN,
        Some(""),
        "address for the API, and for /livez and /readyz; empty means none. It speaks plain HTTP: a \
         local address, or one behind a proxy that has a certificate",
    ),
    setting(
        EVENT_LOG,
        Some(""),
        "file to which every applied event, plan, order and answer is appended, one JSON object a \
         line, for checkers; empty means none. Sessions never wait for it",
    ),
    setting(
        OWN_TIME_LOG,
        Some(""),
        "new file to which the stages of every copy's own time are written when the node ends, one \
         JSON object a line, for measurements; empty means none. Costs 50 MB of memory",
    ),
    setting(
        LOG,
        Some("info,async_nats=warn,sqlx=warn"),
        "which log lines are written, as tracing's env filter reads it. At info the bus client would write \
         a line at every try to connect. One that a server refuses, as with a wrong secret, it logs as an \
         error all the same, every 1 to 2 s",
    ),
];

/// Variables of the `run` script and the tests. They are no settings of a node, but a node that is
/// started by those finds them in its environment.
pub const NOT_FOR_NODES: &[&str] = &["LOCKSTEP_TOOLS", "LOCKSTEP_PROFILE", "LOCKSTEP_BLESS"];

/// Where the text of variables comes from: the process, or a map in a test.
pub trait Vars {
    /// The text of one variable.
    fn get(&self, name: &str) -> Option<String>;
    /// The names of all variables that begin with [`PREFIX`].
    fn names(&self) -> Vec<String>;
}

/// The variables of this process. Text that is not UTF-8 is read with replacement characters,
/// which no setting accepts.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessVars;

impl Vars for ProcessVars {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
    }

    fn names(&self) -> Vec<String> {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(PREFIX)).collect()
    }
}

impl Vars for BTreeMap<String, String> {
    fn get(&self, name: &str) -> Option<String> {
        BTreeMap::get(self, name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.keys().filter(|name| name.starts_with(PREFIX)).cloned().collect()
    }
}

/// Whether a Postgres URL can be used.
///
/// Errors: what is wrong, with the value and without its secrets; for a sentence that begins with the
/// name of the setting.
pub(crate) fn check_database_url(text: &str) -> Result<(), String> {
    let wrong = |why: &str| {
        let shown = SecretUrl::new(text);
        format!("must look like postgres://user:password@host:5432/database, got {shown}{why}")
    };
    if !(text.starts_with("postgres://") || text.starts_with("postgresql://")) {
        return Err(wrong(""));
    }
    match crate::database::options(text, "config") {
        Ok(_) => Ok(()),
        Err(crate::database::DatabaseError::Url(why)) => Err(wrong(&format!(": {why}"))),
        Err(_) => Err(wrong("")),
    }
}

/// Whether the address of one NATS server can be used; errors as those of [`check_database_url`].
pub(crate) fn check_nats_url(text: &str) -> Result<(), String> {
    let is_ours = ["nats://", "tls://"]
        .iter()
        .any(|scheme| text.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty()));
    if is_ours && text.parse::<async_nats::ServerAddr>().is_ok() {
        return Ok(());
    }
    let shown = SecretUrl::new(text);
    Err(format!("must be addresses like nats://host:4222, separated by commas, got {shown}"))
}

/// Whether a text may be a file of certificates.
pub(crate) fn holds_certificate(text: &str) -> bool {
    text.contains("-----BEGIN CERTIFICATE-----")
}

/// Everything that is wrong with the settings; the process ends before its first claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} {}:\n  {}", faults.len(), if faults.len() == 1 { "setting is wrong" } else { "settings are wrong" }, faults.join("\n  "))]
pub struct ConfigError {
    /// One line each, with the variable and the value.
    pub faults: Vec<String>,
}

/// The settings of one node. [`SETTINGS`] says what each means and why its default is what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// `LOCKSTEP_DATABASE_URL`
    pub database_url: SecretUrl,
    /// `LOCKSTEP_NATS_URLS`
    pub nats_urls: Vec<SecretUrl>,
    /// `LOCKSTEP_NATS_ROOT_CERTIFICATES`, if it is set.
    pub nats_root_certificates: Option<PathBuf>,
    /// `LOCKSTEP_MASTER_KEY_FILE`, if it is set.
    pub master_key_file: Option<PathBuf>,
    /// The master keys, from wherever they were given.
    pub master_keys: Option<MasterKeys>,
    /// `LOCKSTEP_NODE_NAME`, or first platform and host name.
    pub node_name: String,
    /// `LOCKSTEP_STATE_FOLDER`, if there is one.
    pub state_folder: Option<PathBuf>,
    /// `LOCKSTEP_PLATFORMS`
    pub platforms: Vec<String>,
    /// `LOCKSTEP_CAPACITY`
    pub capacity: u32,
    /// `LOCKSTEP_CLAIM_BATCH`
    pub claim_batch: u32,
    /// `LOCKSTEP_LEASE`
    pub lease: Duration,
    /// `LOCKSTEP_CYCLE`
    pub cycle: Duration,
    /// `LOCKSTEP_FENCE`
    pub fence: Duration,
    /// `LOCKSTEP_RETRY`
    pub retry: Duration,
    /// `LOCKSTEP_QUERY_LIMIT`
    pub query_limit: Duration,
    /// `LOCKSTEP_BROKER_CALL_LIMIT`
    pub broker_call_limit: Duration,
    /// `LOCKSTEP_SEND_RESERVE`
    pub send_reserve: Duration,
    /// `LOCKSTEP_SETTLE`
    pub settle: Duration,
    /// `LOCKSTEP_AUDITS`, rising.
    pub audits: Vec<Duration>,
    /// `LOCKSTEP_SESSION_DOWN`
    pub session_down: Duration,
    /// `LOCKSTEP_SILENT_HERE`
    pub silent_here: Duration,
    /// `LOCKSTEP_BEACON`
    pub beacon: Duration,
    /// `LOCKSTEP_LOCAL_PATH`
    pub local_path: bool,
    /// `LOCKSTEP_STALE`
    pub stale: Duration,
    /// `LOCKSTEP_WRITE_EVERY`
    pub write_every: Duration,
    /// `LOCKSTEP_PARALLEL_ORDERS`
    pub parallel_orders: u32,
    /// `LOCKSTEP_HOT_THREADS`
    pub hot_threads: u32,
    /// `LOCKSTEP_BUSY_POLL`
    pub busy_poll: u32,
    /// `LOCKSTEP_BLOCKING_FOLLOWERS`
    pub blocking_followers: u32,
    /// `LOCKSTEP_BLOCKING_THREADS_MAX`
    pub blocking_threads_max: u32,
    /// `LOCKSTEP_METRICS_LISTEN`
    pub metrics_listen: SocketAddr,
    /// `LOCKSTEP_API_LISTEN`; nothing where it is empty.
    pub api_listen: Option<SocketAddr>,
    /// `LOCKSTEP_EVENT_LOG`; nothing where it is empty.
    pub event_log: Option<PathBuf>,
    /// `LOCKSTEP_OWN_TIME_LOG`; nothing where it is empty.
    pub own_time_log: Option<PathBuf>,
    /// `LOCKSTEP_LOG`
    pub log: String,
}

impl NodeConfig {
    /// Reads and checks all settings.
    ///
    /// Errors: [`ConfigError`] with every fault there is: unknown names, texts that cannot be
    /// read, values outside their range, and relations that do not hold.
    pub fn from_vars(vars: &dyn Vars) -> Result<Self, ConfigError> {
        let mut reader = Reader { vars, faults: unknown_names(vars) };
        let platforms =
            reader.words(PLATFORMS, is_platform_word, "2 to 16 of a-z and 0-9, a letter first");
        let config = Self {
            database_url: reader.database_url(),
            nats_urls: reader.nats_urls(),
            nats_root_certificates: reader.certificates(NATS_ROOT_CERTIFICATES),
            master_key_file: reader.file(MASTER_KEY_FILE),
            master_keys: reader.master_keys(),
            node_name: reader.node_name(&platforms),
            state_folder: reader.folder(STATE_FOLDER),
            platforms,
            capacity: reader.number(CAPACITY, 1, 10_000),
            claim_batch: reader.number(CLAIM_BATCH, 1, 10_000),
            lease: reader.duration(LEASE),
            cycle: reader.duration(CYCLE),
            fence: reader.duration(FENCE),
            retry: reader.duration(RETRY),
            query_limit: reader.duration(QUERY_LIMIT),
            broker_call_limit: reader.duration(BROKER_CALL_LIMIT),
            send_reserve: reader.duration(SEND_RESERVE),
            settle: reader.duration_or_zero(SETTLE),
            audits: reader.durations(AUDITS),
            session_down: reader.duration(SESSION_DOWN),
            silent_here: reader.duration(SILENT_HERE),
            beacon: reader.duration(BEACON),
            local_path: reader.on_or_off(LOCAL_PATH),
            stale: reader.duration(STALE),
            write_every: reader.duration(WRITE_EVERY),
            parallel_orders: reader.number(PARALLEL_ORDERS, 1, 256),
            hot_threads: reader.number(HOT_THREADS, 1, 64),
            busy_poll: reader.number(BUSY_POLL, 0, 64),
            blocking_followers: reader.number(BLOCKING_FOLLOWERS, 0, 10_000),
            blocking_threads_max: reader.number(BLOCKING_THREADS_MAX, 1, 32_768),
            metrics_listen: reader.address(METRICS_LISTEN),
            api_listen: reader.maybe_address(API_LISTEN),
            event_log: reader.file(EVENT_LOG),
            own_time_log: reader.file(OWN_TIME_LOG),
            log: reader.text(LOG),
        };
        // A value that could not be read has a stand-in: relations would then blame the wrong one.
        if reader.faults.is_empty() {
            reader.faults = config.broken_relations();
        }
        if reader.faults.is_empty() {
            Ok(config)
        } else {
            Err(ConfigError { faults: reader.faults })
        }
    }

    /// The times the lease works with.
    pub fn lease_timing(&self) -> LeaseTiming {
        LeaseTiming {
            lease: self.lease,
            fence: self.fence,
            cycle: self.cycle,
            retry: self.retry,
            query_limit: self.query_limit,
        }
    }

    /// Threads for broker calls that hold one: what the accounts may use at once, and what of it
    /// is allowed.
    pub fn blocking_threads(&self) -> BlockingThreads {
        let wanted = self.blocking_followers as usize * self.parallel_orders as usize;
        BlockingThreads { wanted, allowed: wanted.min(self.blocking_threads_max as usize) }
    }

    /// What the node runs with, as text, secrets hidden; printed at its start.
    pub fn effective(&self) -> Vec<(&'static str, String)> {
        let span = |duration: &Duration| format!("{duration:?}");
        let list = |texts: Vec<String>| texts.join(",");
        let path =
            |path: Option<&PathBuf>| path.map(|p| p.display().to_string()).unwrap_or_default();
        vec![
            (DATABASE_URL, self.database_url.to_string()),
            (NATS_URLS, list(self.nats_urls.iter().map(SecretUrl::to_string).collect())),
            (NATS_ROOT_CERTIFICATES, path(self.nats_root_certificates.as_ref())),
            (MASTER_KEY_FILE, path(self.master_key_file.as_ref())),
            // What names them says nothing of them.
            (
                MASTER_KEY,
                list(
                    self.master_keys.iter().flat_map(MasterKeys::ids).map(str::to_owned).collect(),
                ),
            ),
            (NODE_NAME, self.node_name.clone()),
            (STATE_FOLDER, path(self.state_folder.as_ref())),
            (PLATFORMS, self.platforms.join(",")),
            (CAPACITY, self.capacity.to_string()),
            (CLAIM_BATCH, self.claim_batch.to_string()),
            (LEASE, span(&self.lease)),
            (CYCLE, span(&self.cycle)),
            (FENCE, span(&self.fence)),
            (RETRY, span(&self.retry)),
            (QUERY_LIMIT, span(&self.query_limit)),
            (BROKER_CALL_LIMIT, span(&self.broker_call_limit)),
            (SEND_RESERVE, span(&self.send_reserve)),
            (SETTLE, span(&self.settle)),
            (AUDITS, list(self.audits.iter().map(span).collect())),
            (SESSION_DOWN, span(&self.session_down)),
            (SILENT_HERE, span(&self.silent_here)),
            (BEACON, span(&self.beacon)),
            (LOCAL_PATH, if self.local_path { "on" } else { "off" }.to_owned()),
            (STALE, span(&self.stale)),
            (WRITE_EVERY, span(&self.write_every)),
            (PARALLEL_ORDERS, self.parallel_orders.to_string()),
            (HOT_THREADS, self.hot_threads.to_string()),
            (BUSY_POLL, self.busy_poll.to_string()),
            (BLOCKING_FOLLOWERS, self.blocking_followers.to_string()),
            (BLOCKING_THREADS_MAX, self.blocking_threads_max.to_string()),
            (METRICS_LISTEN, self.metrics_listen.to_string()),
            (API_LISTEN, self.api_listen.map(|listen| listen.to_string()).unwrap_or_default()),
            (EVENT_LOG, path(self.event_log.as_ref())),
            (OWN_TIME_LOG, path(self.own_time_log.as_ref())),
            (LOG, self.log.clone()),
        ]
    }

    /// H25, and what follows from the meaning of two settings.
    fn broken_relations(&self) -> Vec<String> {
        let trusted = lease::trusted(self.lease, self.fence);
        let mut broken = Vec::new();
        let mut require = |holds: bool, text: String| {
            if !holds {
                broken.push(text);
            }
        };
        require(
            trusted >= self.cycle * 2 + self.query_limit,
            format!(
                "{LEASE} - {FENCE} must be at least 2 x {CYCLE} + {QUERY_LIMIT}, so that one renewal \
                 may fail: {:?} - {:?} is less than 2 x {:?} + {:?}",
                self.lease, self.fence, self.cycle, self.query_limit
            ),
        );
        require(
            self.fence >= self.broker_call_limit + self.send_reserve + FENCE_SLACK,
            format!(
                "{FENCE} must be at least {BROKER_CALL_LIMIT} + {SEND_RESERVE} + {FENCE_SLACK:?}, so \
                 that an order in flight ends before the lease: {:?} is less than {:?} + {:?} + \
                 {FENCE_SLACK:?}",
                self.fence, self.broker_call_limit, self.send_reserve
            ),
        );
        require(
            self.retry >= RETRY_MIN,
            format!("{RETRY} must be at least {RETRY_MIN:?}, got {:?}", self.retry),
        );
        require(
            self.retry < self.cycle,
            format!(
                "{RETRY} must be shorter than {CYCLE}: {:?} is not less than {:?}",
                self.retry, self.cycle
            ),
        );
        require(
            self.silent_here > self.stale,
            format!(
                "{SILENT_HERE} must be longer than {STALE}: {:?} is not more than {:?}",
                self.silent_here, self.stale
            ),
        );
        require(
            self.busy_poll <= self.hot_threads,
            format!(
                "{BUSY_POLL} must be at most {HOT_THREADS}: {} is more than {}",
                self.busy_poll, self.hot_threads
            ),
        );
        require(
            self.stale > self.beacon,
            format!(
                "{STALE} must be longer than {BEACON}: {:?} is not more than {:?}",
                self.stale, self.beacon
            ),
        );
        require(
            self.blocking_followers <= self.capacity,
            format!(
                "{BLOCKING_FOLLOWERS} must be at most {CAPACITY}: {} is more than {}",
                self.blocking_followers, self.capacity
            ),
        );
        broken
    }
}

/// How many threads a node makes for broker calls that hold one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockingThreads {
    /// Followers times parallel orders: with so many no call waits for another one's answer.
    pub wanted: usize,
    /// At most so many are made.
    pub allowed: usize,
}

/// The master keys that these variables lead to, if they lead to any.
///
/// Errors: every fault, without a word of a key.
pub fn master_keys(vars: &dyn Vars) -> Result<Option<MasterKeys>, Vec<String>> {
    let mut reader = Reader { vars, faults: Vec::new() };
    let keys = reader.master_keys();
    if reader.faults.is_empty() { Ok(keys) } else { Err(reader.faults) }
}

/// Where master keys come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MasterKeySource {
    /// The file that `LOCKSTEP_MASTER_KEY_FILE` names.
    File(PathBuf),
    /// The text of `LOCKSTEP_MASTER_KEY`.
    Variable,
    /// A credential of a systemd unit.
    Credential(PathBuf),
}

/// Where master keys would be read from; nothing where there are none.
pub fn master_key_source(vars: &dyn Vars) -> Option<MasterKeySource> {
    Reader { vars, faults: Vec::new() }.master_key_source()
}

/// The name a node has if nobody gives it one.
pub fn default_node_name(platform: &str) -> String {
    let uname = rustix::system::uname();
    let host: String = uname
        .nodename()
        .to_string_lossy()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' })
        .collect();
    format!("{platform}-{}", if host.is_empty() { "host" } else { &host })
}

/// `60s`, `250ms`, `2m`, `1h`: a whole number and a unit.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let number: u64 = digits
        .parse()
        .map_err(|_| "must be a whole number and a unit, like 60s or 250ms".to_owned())?;
    let milliseconds_each: u64 = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "" => return Err(format!("needs a unit: {number}ms, {number}s, {number}m or {number}h")),
        _ => return Err(format!("has the unknown unit {unit:?}; use ms, s, m or h")),
    };
    let milliseconds = number.checked_mul(milliseconds_each).filter(|ms| *ms <= DURATION_MAX_MS);
    milliseconds.map(Duration::from_millis).ok_or_else(|| "must be at most 24h".to_owned())
}

const DURATION_MAX_MS: u64 = 24 * 3_600_000;

fn is_platform_word(word: &str) -> bool {
    (2..=16).contains(&word.len())
        && word.starts_with(|c: char| c.is_ascii_lowercase())
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
}

fn unknown_names(vars: &dyn Vars) -> Vec<String> {
    let known = |name: &String| {
        SETTINGS.iter().any(|setting| setting.name == name)
            || NOT_FOR_NODES.contains(&name.as_str())
    };
    let mut unknown: Vec<String> = vars.names().into_iter().filter(|name| !known(name)).collect();
    unknown.sort();
    unknown
        .iter()
        .map(|name| {
            let near = SETTINGS
                .iter()
                .map(|setting| setting.name)
                .min_by_key(|known| distance(name, known));
            match near.filter(|known| distance(name, known) <= 3) {
                Some(known) => format!("{name} is no setting; did you mean {known}?"),
                None => format!("{name} is no setting"),
            }
        })
        .collect()
}

/// How many letters differ (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let change = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Reads one value after the other, and collects what is wrong with them.
struct Reader<'a> {
    vars: &'a dyn Vars,
    faults: Vec<String>,
}

impl Reader<'_> {
    fn text(&mut self, name: &'static str) -> String {
        let given = self.vars.get(name).map(|text| text.trim().to_owned());
        let default = SETTINGS.iter().find(|setting| setting.name == name).and_then(|s| s.default);
        match (given.filter(|text| !text.is_empty()), default) {
            (Some(text), _) => text,
            (None, Some(default)) => default.to_owned(),
            (None, None) => {
                self.faults.push(format!("{name} is missing"));
                String::new()
            }
        }
    }

    fn fault(&mut self, name: &str, text: &str, what: &str) {
        self.faults.push(format!("{name} {what}, got {text:?}"));
    }

    fn duration_or_zero(&mut self, name: &'static str) -> Duration {
        let text = self.text(name);
        parse_duration(&text).unwrap_or_else(|what| {
            self.fault(name, &text, &what);
            Duration::ZERO
        })
    }

    fn duration(&mut self, name: &'static str) -> Duration {
        let faults_before = self.faults.len();
        let duration = self.duration_or_zero(name);
        if duration.is_zero() && self.faults.len() == faults_before {
            self.faults.push(format!("{name} must be more than zero"));
        }
        duration
    }

    fn durations(&mut self, name: &'static str) -> Vec<Duration> {
        let text = self.text(name);
        let parts: Result<Vec<Duration>, String> =
            text.split(',').map(|part| parse_duration(part.trim())).collect();
        match parts {
            Ok(parts) if parts.is_sorted() => parts,
            Ok(_) => {
                self.fault(name, &text, "must rise");
                Vec::new()
            }
            Err(what) => {
                self.fault(name, &text, &what);
                Vec::new()
            }
        }
    }

    fn on_or_off(&mut self, name: &'static str) -> bool {
        let text = self.text(name);
        match text.as_str() {
            "on" => true,
            "off" => false,
            _ => {
                self.fault(name, &text, "must be on or off");
                false
            }
        }
    }

    fn number(&mut self, name: &'static str, min: u32, max: u32) -> u32 {
        let text = self.text(name);
        match text.parse::<u32>() {
            Ok(number) if (min..=max).contains(&number) => number,
            Ok(_) | Err(_) => {
                self.fault(name, &text, &format!("must be a whole number from {min} to {max}"));
                min
            }
        }
    }

    fn words(&mut self, name: &'static str, fits: fn(&str) -> bool, rule: &str) -> Vec<String> {
        let text = self.text(name);
        let mut words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
        if let Some(word) = words.iter().find(|word| !fits(word)).cloned() {
            self.fault(name, &word, &format!("must be words of {rule}"));
        }
        let first = words.first().cloned();
        words.sort();
        words.dedup();
        // The first one named stays first: it is in the node's name.
        if let Some(at) = words.iter().position(|word| Some(word) == first.as_ref()) {
            words[..=at].rotate_right(1);
        }
        words
    }

    fn database_url(&mut self) -> SecretUrl {
        let text = self.text(DATABASE_URL);
        if !text.is_empty()
            && let Err(what) = check_database_url(&text)
        {
            self.faults.push(format!("{DATABASE_URL} {what}"));
        }
        SecretUrl::new(text)
    }

    fn nats_urls(&mut self) -> Vec<SecretUrl> {
        let text = self.text(NATS_URLS);
        let urls: Vec<SecretUrl> = text.split(',').map(|url| SecretUrl::new(url.trim())).collect();
        let wrong = urls.iter().filter_map(|url| check_nats_url(url.expose()).err());
        self.faults.extend(wrong.map(|what| format!("{NATS_URLS} {what}")));
        urls
    }

    fn file(&mut self, name: &'static str) -> Option<PathBuf> {
        Some(self.text(name)).filter(|text| !text.is_empty()).map(PathBuf::from)
    }

    /// A file of certificates that can be read: the bus client would try for ever in silence.
    fn certificates(&mut self, name: &'static str) -> Option<PathBuf> {
        let path = self.file(name)?;
        let shown = path.display().to_string();
        match std::fs::read_to_string(&path) {
            Err(error) => self.fault(name, &shown, &format!("must be a file to read: {error}")),
            Ok(text) if !holds_certificate(&text) => {
                self.fault(name, &shown, "must hold a certificate in PEM");
            }
            Ok(_) => {}
        }
        Some(path)
    }

    fn master_keys(&mut self) -> Option<MasterKeys> {
        let text = Zeroizing::new(self.text(MASTER_KEY));
        match self.master_key_source()? {
            MasterKeySource::File(file) => {
                if !text.is_empty() {
                    self.faults.push(format!(
                        "{MASTER_KEY} and {MASTER_KEY_FILE} are both set; one is enough"
                    ));
                }
                self.keys_of(&file)
            }
            MasterKeySource::Variable => {
                let keys = MasterKeys::parse(&text);
                keys.map_err(|error| self.faults.push(format!("{MASTER_KEY}: {error}"))).ok()
            }
            MasterKeySource::Credential(file) => self.keys_of(&file),
        }
    }

    fn master_key_source(&mut self) -> Option<MasterKeySource> {
        if let Some(file) = self.file(MASTER_KEY_FILE) {
            return Some(MasterKeySource::File(file));
        }
        if !self.text(MASTER_KEY).is_empty() {
            return Some(MasterKeySource::Variable);
        }
        let credentials = self.vars.get(CREDENTIALS_DIRECTORY).map(PathBuf::from)?;
        let credential = credentials.join(MASTER_KEY_CREDENTIAL);
        // A unit may have credentials for something else.
        credential.exists().then_some(MasterKeySource::Credential(credential))
    }

    /// The master keys of a file. What it holds is in no fault.
    fn keys_of(&mut self, file: &Path) -> Option<MasterKeys> {
        let text = std::fs::read_to_string(file).map(Zeroizing::new);
        let keys = match text {
            Ok(text) => MasterKeys::parse(&text).map_err(|error| error.to_string()),
            Err(error) => Err(format!("must be a file to read: {error}")),
        };
        keys.map_err(|what| {
            self.faults.push(format!("{MASTER_KEY_FILE} {}: {what}", file.display()));
        })
        .ok()
    }

    fn folder(&mut self, name: &'static str) -> Option<PathBuf> {
        let text = self.text(name);
        if text.is_empty() {
            return None;
        }
        let folder = PathBuf::from(&text);
        if !folder.is_absolute() {
            self.fault(name, &text, "must be an absolute path");
        }
        Some(folder)
    }

    fn node_name(&mut self, platforms: &[String]) -> String {
        let given = self.text(NODE_NAME);
        let name = if given.is_empty() {
            default_node_name(platforms.first().map_or("node", String::as_str))
        } else {
            given
        };
        // 9 characters are added at the start of the process.
        if name.len() > 100 || NodeId::new(name.clone()).is_err() {
            self.fault(
                NODE_NAME,
                &name,
                "must be 1 to 100 characters of a-z, A-Z, 0-9, '.', '_' and '-'",
            );
        }
        name
    }

    fn maybe_address(&mut self, name: &'static str) -> Option<SocketAddr> {
        let text = self.text(name);
        if text.is_empty() {
            return None;
        }
        let address = text.parse().ok();
        if address.is_none() {
            self.fault(name, &text, "must be an address and a port, like 127.0.0.1:9470");
        }
        address
    }

    fn address(&mut self, name: &'static str) -> SocketAddr {
        let text = self.text(name);
        text.parse().unwrap_or_else(|_| {
            self.fault(name, &text, "must be an address and a port, like 127.0.0.1:9464");
            SocketAddr::from(([127, 0, 0, 1], 0))
        })
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
