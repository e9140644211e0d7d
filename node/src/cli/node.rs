//! `lockstep node`: wires a node together, and takes it apart in the right order.
//!
//! Threads and runtimes: the lease has its own thread and runtime; the hot runtime carries
//! bus, sessions and followers; the slow one the writer, reads of the directory and metrics; the API
//! has its own thread and runtime as well.
//! The end is the other way round: sessions drain, rows are written, leases are given back.

use super::on_bus::shown_urls;
use super::{CliError, block_on, out};
use crate::account::asking::OpenSessions;
use crate::account::manager::Manager;
use crate::account::modes::FleetWatch;
use crate::account::session::NodeContext;
use crate::account::{control, link_changes};
use crate::api;
use crate::broker::executor::Executor;
use crate::causes::with_causes;
use crate::clock::NodeClock;
use crate::config::{BlockingThreads, NodeConfig, ProcessVars};
use crate::credentials::Unopened;
use crate::database::{self, StartWait};
use crate::directory::{self, Directory};
use crate::exporter;
use crate::gate::Gate;
use crate::lease::predecessor::{self, Boot, Finding};
use crate::lease::{self, LeaseSettings, PermitWatch, PostgresOwnership};
use crate::notes::Notes;
use crate::open_files;
use crate::roles;
use crate::stamps::Stamps;
use crate::systemd::{self, Notifier, Watchdog};
use crate::tape::Tape;
use crate::uptime;
use crate::uptime::store::MinuteStore;
use crate::uptime::task::Sights;
use crate::writer::store::PgRows;
use crate::writer::{Writer, WriterConfig};
use bus::{ClientSettings, ConnectionWatch, FeedSettings, Feeds};
use clap::Args;
use schemas::NodeId;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Connections for reading accounts, links and epochs.
const DIRECTORY_CONNECTIONS_MAX: u32 = 4;
/// How long the sessions may take to drain at the end.
const DRAIN_LIMIT: Duration = Duration::from_secs(45);
/// How long the writer may take to write what is left.
const WRITER_LIMIT: Duration = Duration::from_secs(10);
/// How long the event log may take for its last lines.
const NOTES_LIMIT: Duration = Duration::from_secs(1);

/// Arguments of `lockstep node`. Settings come from variables `LOCKSTEP_*`.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// Print every setting with its default and meaning, and end.
    #[arg(long)]
    settings: bool,
}

/// Runs `lockstep node` until it is told to end.
pub fn run(args: NodeArgs) -> Result<(), CliError> {
    if args.settings {
        return print_settings();
    }
    let config =
        NodeConfig::from_vars(&ProcessVars).map_err(|error| CliError::Usage(error.to_string()))?;
    let unusable = unusable(&config);
    if !unusable.is_empty() {
        return Err(CliError::Usage(unusable.join("\n")));
    }
    start_log(&config.log)?;
    let node = lease::boot_node_id(&config.node_name)
        .map_err(|error| CliError::Usage(format!("LOCKSTEP_NODE_NAME: {error}")))?;
    tracing::info!(%node, "node starts");
    raise_open_files(&config);
    let proven_dead = take_state_lock(&config, &node)?;
    for (name, value) in config.effective() {
        tracing::info!(setting = name, value);
    }
    super::remember_database(config.database_url.expose());
    // Several nodes of one fleet may start at once; the migrator takes a lock.
    let wait = StartWait::USUAL;
    block_on(database::migrate_when_there(config.database_url.expose(), wait))?
        .map_err(|error| CliError::missing("database", error))?;
    block_on(tell_unopened(&config))?;
    if let Some(listen) = config.api_listen {
        block_on(may_serve_api(config.database_url.expose(), listen))??;
    }
    let hot = runtime("lockstep-hot", config.hot_threads as usize)?;
    for _ in 0..config.busy_poll {
        hot.spawn(stay_awake());
    }
    let slow = runtime("lockstep-slow", 1)?;
    let result = run_on(&hot, &slow, config, node, proven_dead);
    slow.shutdown_timeout(Duration::from_secs(1));
    hot.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Warns of passwords that cannot be opened here: the node takes those accounts all the same, and gives
/// each of them back once it could not log in.
async fn tell_unopened(config: &NodeConfig) {
    let counted = async {
        let url = config.database_url.expose();
        let connected = database::connect(url, "keys").await;
        let mut db = connected.map_err(|error| CliError::missing("database", error))?;
        Ok::<_, CliError>(directory::count_wrapped(&mut db).await?)
    };
    match counted.await {
        Ok(wrapped) => {
            if let Some(unopened) = Unopened::among(&wrapped, config.master_keys.as_ref()) {
                tracing::warn!(setting = "LOCKSTEP_MASTER_KEY_FILE", "master key: {unopened}");
            }
        }
        Err(error) => {
            let error = with_causes(&error);
            tracing::warn!(error, "whether the stored passwords can be opened here is not known");
        }
    }
}

/// Whether the role of the database may do what the API does: without that every answer would be 503.
async fn may_serve_api(url: &str, listen: SocketAddr) -> Result<(), CliError> {
    let missing = |error| CliError::missing("database", error);
    let mut db = database::connect(url, "rights").await.map_err(missing)?;
    let lacking = roles::lacking(&mut db, "lockstep_api").await?;
    if lacking.is_empty() {
        return Ok(());
    }
    let role: String = sqlx::query_scalar("select current_user::text").fetch_one(&mut db).await?;
    Err(CliError::missing(
        format!("LOCKSTEP_API_LISTEN {listen}"),
        format!(
            "role {role} of the database may not do what the API does: {}. Make it a member of \
             lockstep_api as well (`grant lockstep_api to {role}`, after `lockstep roles apply`), or \
             leave the API out",
            lacking.join(", ")
        ),
    ))
}

/// What is wrong with valid settings for this program.
pub(super) fn unusable(config: &NodeConfig) -> Vec<String> {
    let others = config.platforms.iter().filter(|platform| *platform != "paper");
    let mut faults: Vec<String> = others
        .map(|other| {
            format!("LOCKSTEP_PLATFORMS {other:?}: this program has only the platform paper")
        })
        .collect();
    faults.extend(log_filter(&config.log).err());
    faults
}

fn log_filter(filter: &str) -> Result<tracing_subscriber::EnvFilter, String> {
    tracing_subscriber::EnvFilter::try_new(filter)
        .map_err(|error| format!("LOCKSTEP_LOG {filter:?}: {error}"))
}

fn runtime(name: &str, threads: usize) -> Result<Runtime, CliError> {
    Ok(Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .build()?)
}

/// Each account has a connection at its broker.
fn raise_open_files(config: &NodeConfig) {
    let needed = u64::from(config.capacity) + open_files::OTHER_FILES;
    match open_files::raise() {
        Some(granted) if granted < needed => tracing::warn!(
            granted,
            needed,
            "fewer open files are allowed than LOCKSTEP_CAPACITY needs: some accounts will not reach \
             their brokers; raise the limit (LimitNOFILE, ulimit -n) or lower the capacity"
        ),
        granted => tracing::info!(granted, needed, "open files"),
    }
}

/// Keeps one thread of its runtime from sleeping: it looks for work again and again, and at the
/// sockets whenever there is none.
async fn stay_awake() {
    loop {
        tokio::task::yield_now().await;
    }
}

/// Whose rows this process may take at once; it is known to those that come after it from now on.
fn take_state_lock(config: &NodeConfig, node: &NodeId) -> Result<Vec<NodeId>, CliError> {
    let Some(folder) = &config.state_folder else { return Ok(Vec::new()) };
    let missing = |error| CliError::missing("LOCKSTEP_STATE_FOLDER", error);
    let lock = block_on(async {
        predecessor::take(folder, &config.node_name, node, &Boot::read()?).await
    })?
    .map_err(missing)?;
    let proven_dead = lock.proven_dead().to_vec();
    let finding = lock.finding();
    let (word, proven) = (finding.as_str(), proven_dead.len());
    if finding == Finding::LockHeld {
        tracing::warn!(
            finding = word,
            name = config.node_name,
            folder = %folder.display(),
            "another process of this LOCKSTEP_NODE_NAME runs with this state folder: both work, as two \
             owners, and their minutes count as one node's; give each a name of its own"
        );
    } else {
        tracing::info!(finding = word, proven, "state lock");
    }
    // Nothing but the end of the process may give it up.
    std::mem::forget(lock);
    Ok(proven_dead)
}

fn run_on(
    hot: &Runtime,
    slow: &Runtime,
    config: NodeConfig,
    node: NodeId,
    proven_dead: Vec<NodeId>,
) -> Result<(), CliError> {
    let url = config.database_url.expose().to_owned();
    exporter::install(config.metrics_listen, slow.handle()).map_err(|error| {
        CliError::missing(format!("LOCKSTEP_METRICS_LISTEN {}", config.metrics_listen), error)
    })?;
    let urls = config.nats_urls.iter().map(|url| url.expose().to_owned()).collect();
    let bus = ClientSettings {
        root_certificates: config.nats_root_certificates.clone(),
        ..ClientSettings::new(urls, node.as_str())
    };
    let bus = hot.block_on(connect_to_bus(bus))?;
    let clock = NodeClock::system();
    // Before anything can ask for one: no thread is made in a burst.
    let executor = call_threads(&config, &clock);
    let gate = Gate::new();
    let store = PostgresOwnership::new(&url, config.query_limit)
        .map_err(|e| CliError::missing("database", e))?;
    let lease = lease::start(
        LeaseSettings {
            node: node.clone(),
            platforms: config.platforms.clone(),
            timing: config.lease_timing(),
            capacity: config.capacity,
            claim_rows_max: config.claim_batch,
            listen_url: Some(url.clone()),
            proven_dead,
        },
        store,
        gate.clone(),
        clock.clone(),
    )?;
    let ending = Arc::new(AtomicBool::new(false));
    let notifier = Notifier::from_env()
        .map_err(|error| CliError::missing("NOTIFY_SOCKET", error))?
        .map(Arc::new);
    let trusted = lease::trusted(config.lease, config.fence);
    let mut watchdog = notifier.clone().zip(systemd::watchdog_time()).map(|(notifier, time)| {
        let pulses = [hot, slow].map(|runtime| systemd::pulse(runtime.handle()));
        Watchdog::new(notifier, time, trusted, lease.state(), pulses, Arc::clone(&ending))
    });
    let mut permits = PermitWatch::new(lease.state(), trusted);
    let ticker = lease::watch_for_freezes(clock.clone(), gate.clone(), lease.wake(), move |now| {
        permits.look(now);
        if let Some(watchdog) = &mut watchdog {
            watchdog.look(now);
        }
    })?;
    if let Some(notifier) = notifier.clone() {
        slow.spawn(systemd::tell_when_ready(notifier, lease.state()));
    }
    let options =
        database::options(&url, "writer").map_err(|e| CliError::missing("database", e))?;
    let rows = Arc::new(PgRows::new(options, node.clone()));
    let (writer, writer_task) = Writer::new(WriterConfig { flush_every: config.write_every });
    slow.spawn(writer_task.run(Arc::clone(&rows)));
    slow.spawn(lease::timelines::spread(bus.clone(), url.clone(), lease.state(), lease.commands()));
    let pool = slow
        .block_on(async { database::pool(&url, "directory", DIRECTORY_CONNECTIONS_MAX) })
        .map_err(|e| CliError::missing("database", e))?;
    let feed_settings = FeedSettings { silent_after: config.stale, ..FeedSettings::default() };
    let notes = match &config.event_log {
        Some(path) => Notes::to_file(path, node.clone()).map_err(|error| {
            CliError::missing(format!("LOCKSTEP_EVENT_LOG {}", path.display()), error)
        })?,
        None => Notes::default(),
    };
    let stamps = match &config.own_time_log {
        Some(path) => Stamps::to_file(path).map_err(|error| {
            CliError::missing(format!("LOCKSTEP_OWN_TIME_LOG {}", path.display()), error)
        })?,
        None => Stamps::default(),
    };
    let api_listen = config.api_listen;
    let feeds = Feeds::new(bus.clone(), feed_settings, hot.handle().clone());
    let (last_notes, last_stamps) = (notes.clone(), stamps.clone());
    let open_sessions = OpenSessions::new();
    let minutes =
        MinuteStore::new(&url, &config.node_name).map_err(|e| CliError::missing("database", e))?;
    let sights = Sights {
        clock: clock.clone(),
        lease: lease.state(),
        bus: bus.clone(),
        sessions: open_sessions.clone(),
    };
    slow.spawn(uptime::task::run(sights, minutes, uptime::Record::new(config.cycle)));
    let context = Arc::new(NodeContext {
        node,
        config,
        clock,
        gate,
        feeds,
        bus,
        writer: writer.clone(),
        notes,
        stamps,
        rows,
        directory: Directory::new(pool),
        executor,
        open_sessions,
        fleet_mode: FleetWatch::default(),
        tape: if api_listen.is_some() { Tape::on() } else { Tape::default() },
        slow: slow.handle().clone(),
        hot: hot.handle().clone(),
    });
    let (links_raised, links) = watch::channel(0);
    slow.spawn(link_changes::listen(url, links_raised));
    let api = match api_listen {
        Some(listen) => Some(
            api::start(listen, Arc::clone(&context), lease.state())
                .map_err(|e| CliError::missing(format!("LOCKSTEP_API_LISTEN {listen}"), e))?,
        ),
        None => None,
    };
    let (stop, stopping) = watch::channel(false);
    let (asked, asks) = mpsc::channel(control::ASKS_MAX);
    slow.spawn(control::listen(Arc::clone(&context), asked));
    let manager = Manager::new(context, lease.commands(), lease.state(), links, asks);
    let managed = slow.spawn(manager.run(stopping, DRAIN_LIMIT));
    slow.block_on(async {
        wait_for_stop().await?;
        tracing::info!("node ends: sessions drain");
        ending.store(true, Ordering::Relaxed);
        if let Some(notifier) = &notifier {
            notifier.stopping();
        }
        let commands = lease.commands();
        let _ended_already = commands.set_capacity(0).await;
        stop.send_replace(true);
        let _panic_was_logged = managed.await;
        let left = writer.shutdown(WRITER_LIMIT).await;
        tracing::info!(?left, "writer ended");
        lease.shutdown().await;
        Ok::<(), CliError>(())
    })?;
    drop(api);
    drop(ticker);
    last_notes.flush(NOTES_LIMIT);
    last_stamps.write();
    tracing::info!("node ended");
    Ok(())
}

/// The bus, there or not; what keeps it away is logged.
async fn connect_to_bus(settings: ClientSettings) -> Result<async_nats::Client, CliError> {
    let (changes, heard) = bus::connection_changes();
    let settings = ClientSettings { changes: Some(changes), ..settings };
    let shown = shown_urls(&settings.urls);
    let missing = |error| CliError::missing(format!("bus at {shown}"), error);
    let client = bus::connect(&settings).await.map_err(missing)?;
    let looked_at = client.clone();
    let mut watch = ConnectionWatch::new(client.clone(), &settings, heard);
    tokio::spawn(async move {
        while let Some(news) = watch.next().await {
            news.log();
        }
    });
    // The client tries on by itself, and says why it fails nowhere.
    tokio::spawn(async move {
        if let Err(refused) = bus::connected(&looked_at, &settings).await {
            tracing::warn!(%refused, "the bus is not there; trying on");
        }
    });
    Ok(client)
}

/// The threads for broker calls that hold one. Says what was granted, and warns where calls may have
/// to wait for each other.
fn call_threads(config: &NodeConfig, clock: &NodeClock) -> Executor {
    let BlockingThreads { wanted, allowed } = config.blocking_threads();
    let executor = Executor::start(allowed, clock.clone());
    let granted = executor.threads();
    if wanted > 0 {
        tracing::info!(wanted, allowed, granted, "threads for broker calls");
    }
    if granted < wanted {
        tracing::warn!(
            wanted,
            granted,
            "fewer threads than broker calls at once: in a burst calls wait for the answers of \
             others; raise LOCKSTEP_BLOCKING_THREADS_MAX, or what the system allows"
        );
    }
    executor
}

async fn wait_for_stop() -> Result<(), CliError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// At its most talkative the bus client writes its login line. It hides what is secret there by itself;
/// whatever filter is asked for, nothing rests on that.
fn tells_no_secret(metadata: &tracing::Metadata<'_>) -> bool {
    *metadata.level() != tracing::Level::TRACE || !metadata.target().starts_with("async_nats")
}

pub(crate) fn start_log(filter: &str) -> Result<(), CliError> {
    let filter = log_filter(filter).map_err(CliError::Usage)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .finish()
        .with(filter_fn(tells_no_secret))
        .try_init()
        .map_err(|error| CliError::missing("log", error))
}

fn print_settings() -> Result<(), CliError> {
    for setting in crate::config::SETTINGS {
        let default = setting.default.map_or("must be given".into(), |d| format!("default {d:?}"));
        out::line(format_args!("{} ({default})\n    {}", setting.name, setting.meaning))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::{Holder, MasterKey, MasterKeys, seal};
    use crate::directory::store_credential;
    use crate::directory::tests::database_with;
    use crate::secret::Secret;
    use parking_lot::Mutex;
    use std::collections::BTreeMap;
    use std::io;

    /// What the log says.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What a node with this key is told of the passwords in this database.
    async fn told(url: &str, key: Option<&MasterKey>) -> String {
        let mut vars: BTreeMap<String, String> = [
            ("LOCKSTEP_NODE_NAME", "n"),
            ("LOCKSTEP_DATABASE_URL", url),
            ("LOCKSTEP_NATS_URLS", "nats://n"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        vars.extend(key.map(|key| ("LOCKSTEP_MASTER_KEY".to_owned(), key.to_line().to_string())));
        let config = NodeConfig::from_vars(&vars).unwrap();
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        let logged = tracing::subscriber::set_default(log);
        tell_unopened(&config).await;
        drop(logged);
        let bytes = lines.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    // Nothing but the log has it: without this line, accounts that cannot log in are all there is to see.
    #[tokio::test]
    async fn a_node_that_starts_without_the_key_of_the_stored_passwords_says_so() {
        let names = [("one", "paper")];
        let (url, mut db, accounts) = database_with("node-unopened", &names).await;
        let (right, other) = (MasterKey::random().unwrap(), MasterKey::random().unwrap());
        assert_eq!(told(&url, None).await, "", "nothing is stored");
        let account = accounts[0];
        let keys = MasterKeys::parse(&right.to_line()).unwrap();
        let holder = Holder { account, platform: "paper" };
        let sealed = seal(Some(&keys), holder, &Secret::new("open-sesame")).unwrap();
        store_credential(&mut db, account, &sealed).await.unwrap();

        assert_eq!(told(&url, Some(&right)).await, "");
        for (key, says) in [
            (None, "master key: none, and passwords are stored for 1 accounts"),
            (Some(&other), "master key: none of the keys here opens 1 of 1 stored passwords"),
        ] {
            let told = told(&url, key).await;
            assert!(told.contains("WARN") && told.contains(says), "{says}: {told:?}");
            assert!(told.contains("LOCKSTEP_MASTER_KEY_FILE"), "{told:?}");
        }
    }
}
