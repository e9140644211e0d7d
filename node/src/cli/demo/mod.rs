//! `lockstep demo`: the whole thing on one machine, judged from the broker's ledger.
//!
//! A master plays a history; followers on several nodes copy it; in the middle one node is
//! killed. With `--once` it plays the history one time and ends with a verdict; without, it
//! plays on and shows a table until it is stopped.

pub mod judge;
mod live;
mod stack;
mod world;

use super::{CliError, out};
use crate::clock::NodeClock;
use crate::history::{self, History, Step};
use crate::player::{self, Player};
use bus::{ClientSettings, Publisher, PublisherHandle, PublisherSettings, start_epoch};
use clap::Args;
use judge::Verdict;
use schemas::{AccountId, Change, Funds, MasterTicket, Micros, Symbol};
use serde::Serialize;
use sqlx::Row;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use world::World;
pub use world::{LEASE_SETTINGS, SETTLE_AND_READ};

/// Tickets of one pass differ from those of another by this: no ticket is used twice.
const PASS_TICKETS: u64 = 1_000_000_000_000_000;
/// How long the followers may take to come to rest after the last step.
const REST_LIMIT: Duration = Duration::from_secs(60);
/// From this own time on a verdict speaks of the machine, not of the copier.
const TOO_SLOW_US: i64 = 500_000;
/// Before the kill, events may already have been on their way to the node.
const BEFORE_KILL: Duration = Duration::from_secs(1);

/// Arguments of `lockstep demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Play the history once, print the verdict and end.
    #[arg(long)]
    once: bool,
    /// Print the verdict as one JSON object on the last line.
    #[arg(long)]
    json: bool,
    /// History file; default: the one that comes with Lockstep.
    #[arg(long, value_name = "FILE", default_value = "demo")]
    history: PathBuf,
    /// Seconds of the history in one second; default: so that it lasts about 40 seconds.
    #[arg(long, value_parser = super::publish::speed)]
    speed: Option<f64>,
    /// How many followers.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1000))]
    followers: u32,
    /// How many nodes; with one node nothing is killed.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    nodes: u32,
    /// Start this Prometheus beside it, and the nodes' API, and say where they are.
    #[arg(long, value_name = "PROGRAM")]
    prometheus: Option<PathBuf>,
    /// Rules of alerts for that Prometheus.
    #[arg(long, value_name = "FILE", requires = "prometheus")]
    rules: Option<PathBuf>,
}

/// How long a history lasts if no speed is given.
const LENGTH_DEFAULT_S: f64 = 40.0;

/// What the demo ends with.
#[derive(Debug, Serialize)]
struct Report {
    masters: u32,
    followers: u32,
    nodes: u32,
    history: String,
    speed: f64,
    #[serde(flatten)]
    verdict: Verdict,
    takeovers: u64,
    takeover_s: Option<f64>,
    deadline_margin_min_ms: Option<i64>,
    own_time_us: OwnTime,
    orders: u64,
    elapsed_s: f64,
    /// Somebody ended the one pass that was asked for.
    stopped_early: bool,
}

/// From the master's callback to the order call, in microseconds, of orders that an event caused.
#[derive(Debug, Default, Serialize)]
struct OwnTime {
    p50: Option<i64>,
    p95: Option<i64>,
    p99: Option<i64>,
    max: Option<i64>,
    samples: i64,
}

/// What was seen of the killed node's accounts.
#[derive(Debug)]
struct Kill {
    at: Micros,
    accounts: BTreeMap<AccountId, i64>,
    taken: BTreeMap<AccountId, Micros>,
}

/// Runs `lockstep demo`.
pub fn run(args: DemoArgs) -> Result<(), CliError> {
    let history = super::publish::load(&args.history)?;
    let steps = history::timeline(&history);
    if steps.is_empty() {
        return Err(CliError::Usage(format!("{}: nothing to play", args.history.display())));
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = runtime.block_on(async {
        let mut stop = Stop::new()?;
        let demo = Demo::start(&args, &history, &steps, &mut stop).await?;
        demo.run(&mut stop).await
    });
    runtime.shutdown_timeout(Duration::from_secs(2));
    finish(&args, report?)
}

fn finish(args: &DemoArgs, report: Report) -> Result<(), CliError> {
    if args.json {
        let text = serde_json::to_string(&report).map_err(std::io::Error::other)?;
        out::line(text)?;
    } else {
        out::line(live::verdict_text(&report.verdict, report.takeovers, report.takeover_s))?;
    }
    if report.verdict.is_clean() && report.stopped_early {
        return Err(CliError::No("stopped before the history was played to its end".into()));
    }
    if report.verdict.is_clean() {
        return Ok(());
    }
    let slow = report.own_time_us.p95.is_some_and(|p95| p95 > TOO_SLOW_US);
    let hint = if slow {
        "\n  this machine was too slow for this speed: take a lower --speed, or LOCKSTEP_PROFILE=release"
    } else {
        ""
    };
    Err(CliError::No(format!("not clean:\n  {}{hint}", report.verdict.findings.join("\n  "))))
}

/// Ctrl-C or a SIGTERM: both end the demo in an orderly way.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> Result<Self, CliError> {
        Ok(Stop {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn raised(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

struct Demo<'a> {
    args: &'a DemoArgs,
    steps: &'a [Step],
    speed: f64,
    world: World,
    clock: NodeClock,
    publisher: PublisherHandle,
    started: Instant,
    published: Vec<(Micros, Change)>,
    kills: Vec<Kill>,
}

impl<'a> Demo<'a> {
    async fn start(
        args: &'a DemoArgs,
        history: &History,
        steps: &'a [Step],
        stop: &mut Stop,
    ) -> Result<Self, CliError> {
        let started = Instant::now();
        let world = tokio::select! {
            world = World::start(args, history, live::say) => world?,
            () = stop.raised() => return Err(CliError::No("stopped while starting".into())),
        };
        let clock = NodeClock::system();
        let client = bus::connect(&ClientSettings::new(vec![world.nats.url()], "demo-master"))
            .await
            .map_err(|error| CliError::missing("bus", error))?;
        let publisher = Publisher::start(
            client,
            world.master,
            start_epoch(clock.wall(), None, None),
            PublisherSettings::default(),
            Arc::new(|| true),
            &tokio::runtime::Handle::current(),
        );
        publisher.set_funds(funds(clock.wall()));
        publisher.observe(clock.wall(), player::base(), &BTreeMap::new());
        live::say("waiting until every follower is owned and in step");
        tokio::select! {
            ready = world.wait_until_copying() => ready?,
            () = stop.raised() => return Err(CliError::No("stopped while starting".into())),
        }
        let speed = args.speed.unwrap_or_else(|| default_speed(steps));
        Ok(Demo {
            args,
            steps,
            speed,
            world,
            clock,
            publisher,
            started,
            published: Vec::new(),
            kills: Vec::new(),
        })
    }

    async fn run(mut self, stop: &mut Stop) -> Result<Report, CliError> {
        let mut pass = 0;
        let stopped_early = loop {
            live::say(&format!(
                "the master plays {} at speed {:.0}: {} steps",
                world::source_name(&self.args.history),
                self.speed,
                self.steps.len()
            ));
            let stopped = self.pass(pass, stop).await?;
            if stopped || self.args.once {
                break stopped && self.args.once;
            }
            pass += 1;
            self.restart_killed(pass)?;
        };
        live::say("waiting until the followers are at rest");
        self.rest().await?;
        let report = Report { stopped_early, ..self.report().await? };
        live::say("ending nodes and servers");
        self.publisher.close(Duration::from_secs(1)).await;
        self.world.stop().await;
        Ok(report)
    }

    /// Plays the history once; true if somebody stopped it.
    async fn pass(&mut self, pass: u64, stop: &mut Stop) -> Result<bool, CliError> {
        let steps: Vec<Step> = self.steps.iter().map(|step| shifted(step, pass)).collect();
        let middle = steps.len() / 2;
        let publisher = self.publisher.clone();
        let clock = self.clock.clone();
        let now = move || clock.wall();
        let (changes, mut played) = tokio::sync::mpsc::unbounded_channel();
        let driver = self.world.driver.clone();
        let speed = self.speed;
        let playing = tokio::spawn(async move {
            let player = Player { publisher: &publisher, driver: Some(&driver), speed, now: &now };
            player
                .play(&steps, |index, at, change| {
                    // The receiver lives as long as the pass.
                    let _pass_ended = changes.send((index, at, change.clone()));
                })
                .await
        });
        let mut show = tokio::time::interval(live::EVERY);
        let mut watch = tokio::time::interval(Duration::from_millis(50));
        let mut db = self.world.database().await?;
        let total = self.steps.len();
        let mut at_step = 0;
        let mut stopped = false;
        loop {
            tokio::select! {
                biased;
                () = stop.raised() => { stopped = true; playing.abort(); break; }
                Some((index, at, change)) = played.recv() => {
                    self.published.push((at, change));
                    at_step = index + 1;
                    if index == middle && self.args.nodes > 1 {
                        self.kill_one(&mut db, pass).await?;
                    }
                    if at_step == total { break; }
                }
                _ = watch.tick() => self.watch_takeover(&mut db).await?,
                _ = show.tick() => live::show(&mut db, &self.world, at_step, total, self.args.json).await?,
            }
        }
        match playing.await {
            Ok(done) => done.map_err(|error| CliError::missing("history", error))?,
            Err(_aborted) => {}
        }
        while let Ok((_, at, change)) = played.try_recv() {
            self.published.push((at, change));
        }
        Ok(stopped)
    }

    /// Kills the node that owns the most followers, without a word of warning.
    async fn kill_one(&mut self, db: &mut sqlx::PgConnection, pass: u64) -> Result<(), CliError> {
        let owners = World::owners(db).await?;
        let index = (pass % u64::from(self.args.nodes)) as usize;
        let Some((name, node)) = self.world.nodes.get(index) else { return Ok(()) };
        let prefix = format!("{name}-");
        let accounts: BTreeMap<AccountId, i64> = owners
            .into_iter()
            .filter(|(_, (_, owner))| {
                owner.as_ref().is_some_and(|owner| owner.starts_with(&prefix))
            })
            .map(|(account, (token, _))| (account, token))
            .collect();
        node.kill().map_err(|error| CliError::missing("kill", error))?;
        let start = self.published.first().map_or(Micros(0), |(at, _)| *at);
        live::say(&format!(
            "SIGKILL to {name} after {:.1} s; it owns {} followers",
            self.clock.wall().since(start).as_secs_f64(),
            accounts.len()
        ));
        self.kills.push(Kill { at: self.clock.wall(), accounts, taken: BTreeMap::new() });
        Ok(())
    }

    async fn watch_takeover(&mut self, db: &mut sqlx::PgConnection) -> Result<(), CliError> {
        let now = self.clock.wall();
        let Some(kill) = self.kills.last_mut() else { return Ok(()) };
        if kill.taken.len() == kill.accounts.len() {
            return Ok(());
        }
        for (account, (token, owner)) in World::owners(db).await? {
            let changed = kill.accounts.get(&account).is_some_and(|old| token > *old);
            if changed && owner.is_some() {
                kill.taken.entry(account).or_insert(now);
            }
        }
        if kill.taken.len() == kill.accounts.len() {
            let took = now.since(kill.at).as_secs_f64();
            live::say(&format!(
                "all {} followers have a new owner after {took:.1} s",
                kill.taken.len()
            ));
        }
        Ok(())
    }

    fn restart_killed(&mut self, pass: u64) -> Result<(), CliError> {
        if self.args.nodes > 1 {
            let index = ((pass - 1) % u64::from(self.args.nodes)) as u32;
            self.world.start_node(index, self.args)?;
            live::say(&format!("demo-node-{} is started again", index + 1));
        }
        Ok(())
    }

    /// Waits until every follower holds just what the master holds, or the limit has passed.
    async fn rest(&mut self) -> Result<(), CliError> {
        let mut db = self.world.database().await?;
        let deadline = Instant::now() + REST_LIMIT;
        while Instant::now() < deadline {
            self.watch_takeover(&mut db).await?;
            let owned = self.kills.iter().all(|kill| kill.taken.len() == kill.accounts.len());
            if owned && self.is_at_rest().await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    async fn is_at_rest(&self) -> Result<bool, CliError> {
        let mut open: BTreeSet<MasterTicket> = BTreeSet::new();
        for (_, change) in &self.published {
            match change {
                Change::PositionClosed { .. } | Change::PendingCancelled(_) => {
                    open.remove(&change.ticket());
                }
                _ => {
                    open.insert(change.ticket());
                }
            }
        }
        let books = self
            .world
            .driver
            .books()
            .await
            .map_err(|error| CliError::missing("paper broker", error))?;
        let comments = books.iter().flat_map(|book| {
            let positions = book.positions.iter().map(|p| (p.magic, &p.comment));
            positions.chain(book.pendings.iter().map(|o| (o.magic, &o.comment)))
        });
        Ok(comments.filter(|(magic, _)| *magic != 0).all(|(_, comment)| {
            // A renumbered rest has lost its tag; the verdict looks at its volume.
            reconcile::tag::decode(comment).is_none_or(|(_, ticket)| open.contains(&ticket))
                && (reconcile::tag::decode(comment).is_some() || !open.is_empty())
        }))
    }

    async fn report(&mut self) -> Result<Report, CliError> {
        let mut takeovers = 0;
        let mut longest: Option<Duration> = None;
        for kill in &self.kills {
            for account in kill.accounts.keys() {
                let taken = kill.taken.get(account).copied();
                takeovers += u64::from(taken.is_some());
                longest = longest.max(taken.map(|at| at.since(kill.at)));
                let until = taken.unwrap_or(Micros(i64::MAX)).plus(world::SETTLE_AND_READ);
                let from = Micros(kill.at.0 - BEFORE_KILL.as_micros() as i64);
                let followers = self.world.followers.iter_mut();
                for follower in followers.filter(|f| f.account == *account) {
                    follower.unowned.push((from, until));
                }
            }
        }
        let ledger = self
            .world
            .driver
            .ledger()
            .await
            .map_err(|error| CliError::missing("paper broker", error))?;
        let mut verdict =
            judge::judge(&self.published, &self.world.followers, &self.world.volumes, &ledger);
        self.explain_missing(&mut verdict).await?;
        Ok(Report {
            masters: 1,
            followers: self.args.followers,
            nodes: self.args.nodes,
            history: world::source_name(&self.args.history),
            speed: self.speed,
            verdict,
            takeovers,
            takeover_s: longest.map(|d| d.as_secs_f64()),
            deadline_margin_min_ms: ledger.deadline_margin_min_us().map(|us| us / 1000),
            own_time_us: self.own_time().await?,
            orders: ledger.orders().count() as u64,
            elapsed_s: self.started.elapsed().as_secs_f64(),
            stopped_early: false,
        })
    }

    /// What the nodes recorded about copies that are not there, for whoever looks for the reason.
    async fn explain_missing(&self, verdict: &mut Verdict) -> Result<(), CliError> {
        const EXPLAINED_MAX: usize = 20;
        let mut db = self.world.database().await?;
        let start = self.published.first().map_or(Micros(0), |(at, _)| *at);
        for (account, ticket, opened_at) in verdict.missing_copies.iter().take(EXPLAINED_MAX) {
            let rows = sqlx::query(
                "select action, outcome, coalesce(reason, '-') as reason from copy_events \
                 where follower_id = $1 and master_ticket = $2 order by at",
            )
            .bind(account.as_i64())
            .bind(ticket.as_i64())
            .fetch_all(&mut db)
            .await?;
            let recorded: Vec<String> = rows
                .iter()
                .map(|row| {
                    let word = |name: &str| row.get::<String, _>(name);
                    format!("{} {} {}", word("action"), word("outcome"), word("reason"))
                })
                .collect();
            verdict.findings.push(format!(
                "account {account}, ticket {ticket}, opened {:.1} s after the start: no copy; recorded: [{}]",
                opened_at.since(start).as_secs_f64(),
                recorded.join("; ")
            ));
        }
        Ok(())
    }

    async fn own_time(&self) -> Result<OwnTime, CliError> {
        let mut db = self.world.database().await?;
        let row = sqlx::query(
            "select percentile_disc(0.5) within group (order by own_time_us) as p50, \
             percentile_disc(0.95) within group (order by own_time_us) as p95, \
             percentile_disc(0.99) within group (order by own_time_us) as p99, \
             max(own_time_us) as max, count(own_time_us) as samples from copy_events",
        )
        .fetch_one(&mut db)
        .await?;
        Ok(OwnTime {
            p50: row.get("p50"),
            p95: row.get("p95"),
            p99: row.get("p99"),
            max: row.get("max"),
            samples: row.get("samples"),
        })
    }
}

fn default_speed(steps: &[Step]) -> f64 {
    let length_s = steps.last().map_or(0, |step| step.offset_us) as f64 / 1e6;
    (length_s / LENGTH_DEFAULT_S).max(1.0)
}

fn funds(at: Micros) -> Funds {
    Funds {
        balance: "10000".parse().expect("a constant that is money"),
        equity: "10000".parse().expect("a constant that is money"),
        margin_used: None,
        currency: Symbol::new("USD").expect("a constant that is a currency"),
        at,
    }
}

/// A step of a later pass: the same, under tickets that were never used.
fn shifted(step: &Step, pass: u64) -> Step {
    let mut step = step.clone();
    let shift = |ticket: &mut MasterTicket| {
        if let Ok(moved) = MasterTicket::new(ticket.get() + pass * PASS_TICKETS) {
            *ticket = moved;
        }
    };
    match &mut step.change {
        Change::PositionOpened(p)
        | Change::PositionModified(p)
        | Change::PendingFilled(p)
        | Change::VolumeChanged { position: p, .. }
        | Change::PositionClosed { position: p, .. } => shift(&mut p.ticket),
        Change::PendingPlaced(o) | Change::PendingModified(o) | Change::PendingCancelled(o) => {
            shift(&mut o.ticket);
        }
    }
    step
}
