//! `./run bench blocking`: calls that hold a thread for as long as the broker takes to answer.
//!
//! In one run, turn by turn: the floor (as many bare jobs, handed by one thread, those of a follower
//! together, to threads of the same kind as ours, no code of ours in them), followers that decide and
//! call nobody (what a machine whose cores are all busy adds to the floor), followers on our threads,
//! on 64 threads that grow on demand, and on tokio's own threads for what blocks, 512 and 1,024 of them
//! at most.
//!
//! Own time is from the master's callback to the instruction before the call. All callbacks of a
//! burst run in a row before anything else, so the floor's jobs count from the begin of the burst.
//! Calls that a follower makes when the event comes (`within_cap`) are told apart from those that
//! had to wait for an earlier answer (`queued`), which contain that answer's 130 ms.
//!
//! Every burst of every pool begins cold, except ours and the floor, whose threads are there: that
//! is what is compared. The runtime that the followers run on is new for each burst.

mod copying;
mod pools;
mod stamps;

use super::rounds::{Percentiles, REPEATS_MAX, ROUNDS, is_noisy};
use copying::{Seat, follower_account, opening, permission, told};
use lockstep::broker::executor::Executor;
use lockstep::clock::NodeClock;
use pools::{Bare, BareCrew, Growing, Nobody, Pool, Prestarted, SpawnBlocking};
use serde::Serialize;
use serde_json::{Value, json};
use stamps::Stamps;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

/// Followers of every burst.
const FOLLOWERS: usize = 30;
/// Workers of the followers' runtime, as on a node.
const HOT_THREADS: usize = 2;
/// Threads that the growing pool begins with.
const GROWING_BEGINS: usize = 64;
/// What tokio's own pool is raised to.
const RAISED: usize = 1_024;
/// Longest wait for a burst to end.
const BURST_LIMIT: Duration = Duration::from_secs(20);
/// Rest between two bursts, so that one does not meet the end of the other.
const REST: Duration = Duration::from_millis(60);
/// Bursts before the rounds, which are dropped: memory is touched, clocks are warm.
const WARM_UP: usize = 2;
/// Threads that the memory of an idle one is measured with.
const MEASURED_THREADS: usize = 1_024;

/// Number of opens in the burst, and calls that a follower has in flight at most.
#[derive(Debug, Clone, Copy)]
struct Shape {
    events: usize,
    cap: usize,
}

const SHAPES: [Shape; 3] =
    [Shape { events: 12, cap: 16 }, Shape { events: 27, cap: 16 }, Shape { events: 27, cap: 27 }];

impl Shape {
    fn name(self) -> String {
        format!("burst_{}x{FOLLOWERS}_cap_{}", self.events, self.cap)
    }

    /// Calls that may begin at once.
    fn within(self) -> usize {
        FOLLOWERS * self.events.min(self.cap)
    }

    fn calls(self) -> usize {
        FOLLOWERS * self.events
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Road {
    Floor,
    Deciding,
    Prestarted,
    Growing,
    SpawnBlocking,
    SpawnBlockingRaised,
}

const ROADS: [Road; 6] = [
    Road::Floor,
    Road::Deciding,
    Road::Prestarted,
    Road::Growing,
    Road::SpawnBlocking,
    Road::SpawnBlockingRaised,
];

impl Road {
    fn name(self) -> &'static str {
        match self {
            Road::Floor => "floor",
            Road::Deciding => "deciding",
            Road::Prestarted => "prestarted",
            Road::Growing => "growing_64",
            Road::SpawnBlocking => "spawn_blocking",
            Road::SpawnBlockingRaised => "spawn_blocking_1024",
        }
    }
}

/// One burst on one road.
struct Burst {
    within: Percentiles,
    queued: Option<Percentiles>,
    threads_created: usize,
    done: usize,
}

/// All rounds of one road in one shape.
#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    within: Percentiles,
    /// The most of any round.
    threads_created: usize,
    /// Lowest and highest p95 of a round.
    p95_us_spread: [f64; 2],
    /// Calls that waited for an answer of the broker; nothing where none did.
    queued: Option<Percentiles>,
    /// How many those were in one burst.
    waited_for_an_answer: usize,
}

/// What stays from burst to burst in one shape.
struct Bench {
    shape: Shape,
    clock: NodeClock,
    stamps: Arc<Stamps>,
    executor: Executor,
    bare: BareCrew,
}

/// Measures, prints, and says whether it could.
pub fn run(json: bool) -> ExitCode {
    // First of all: later the process has memory to give to new threads.
    let idle = idle_thread_kib();
    let mut shapes = serde_json::Map::new();
    let (mut repeats, mut main) = (0, serde_json::Map::new());
    for shape in SHAPES {
        let Some(measured) = Bench::new(shape).measure(&mut repeats) else {
            say(&format!("{}: too noisy, {repeats} rounds were repeated", shape.name()));
            return ExitCode::from(3);
        };
        let of = |road: Road| &measured[ROADS.iter().position(|r| *r == road).expect("listed")];
        let ratio = |a: Road, b: Road| of(a).within.p95_us / of(b).within.p95_us;
        table(shape, &measured);
        let mut object = serde_json::Map::new();
        for (road, figures) in ROADS.iter().zip(&measured) {
            object.insert(road.name().to_owned(), json!(figures));
        }
        if (shape.events, shape.cap) == (27, 16) {
            main = object.clone();
        }
        let more = [
            ("prestarted_over_floor_p95", ratio(Road::Prestarted, Road::Floor)),
            (
                "prestarted_over_floor_and_deciding_p95",
                of(Road::Prestarted).within.p95_us
                    / (of(Road::Floor).within.p95_us + of(Road::Deciding).within.p95_us),
            ),
            ("growing_64_over_prestarted_p95", ratio(Road::Growing, Road::Prestarted)),
        ];
        object.extend(more.map(|(name, value)| (name.to_owned(), json!(value))));
        shapes.insert(shape.name(), object.into());
    }
    say(&format!("an idle thread, in KiB: {idle}"));
    main.insert("shapes".into(), shapes.into());
    main.insert("idle_thread_kib".into(), idle);
    main.insert("rounds".into(), ROUNDS.into());
    main.insert("rounds_repeated".into(), repeats.into());
    main.insert("machine".into(), machine());
    if json {
        #[allow(clippy::print_stdout, reason = "the answer of the benchmark")]
        {
            println!("{}", Value::from(main));
        }
    }
    ExitCode::SUCCESS
}

impl Bench {
    fn new(shape: Shape) -> Self {
        let clock = NodeClock::system();
        Bench {
            shape,
            stamps: Arc::new(Stamps::new(FOLLOWERS, shape.events)),
            executor: Executor::start(FOLLOWERS * shape.cap, clock.clone()),
            bare: BareCrew::start(shape.within()),
            clock,
        }
    }

    /// All roads in turn, round by round; nothing if the machine is too noisy.
    fn measure(&self, repeats: &mut usize) -> Option<Vec<Figures>> {
        for _ in 0..WARM_UP {
            for road in ROADS {
                let _dropped: Burst = self.burst(road);
            }
        }
        let mut rounds: Vec<Vec<Burst>> = Vec::new();
        while rounds.len() < ROUNDS {
            rounds.push(ROADS.iter().map(|road| self.burst(*road)).collect());
            let floor = |round: &Vec<Burst>| round[0].within;
            let best = rounds.iter().map(|r| floor(r).p95_us).fold(f64::INFINITY, f64::min);
            let before = rounds.len();
            rounds.retain(|round| !is_noisy(&floor(round), best));
            *repeats += before - rounds.len();
            if *repeats > REPEATS_MAX {
                return None;
            }
        }
        let roads = 0..ROADS.len();
        Some(roads.map(|road| Figures::of(rounds.iter().map(|r| &r[road]).collect())).collect())
    }

    fn burst(&self, road: Road) -> Burst {
        rest(REST);
        until("every thread is back", || {
            self.executor.idle() == self.executor.threads()
                && self.bare.idle() == self.bare.threads()
        });
        self.stamps.clear();
        let burst = match road {
            Road::Floor => self.bare_burst(),
            Road::Deciding => {
                let pool = Nobody { clock: self.clock.clone() };
                self.copied_burst(&runtime(None), Arc::new(pool))
            }
            Road::Prestarted => {
                let accounts: Vec<_> = (0..FOLLOWERS).map(follower_account).collect();
                let pool = Prestarted::new(&self.executor, &accounts, self.shape.cap);
                self.copied_burst(&runtime(None), Arc::new(pool))
            }
            Road::Growing => {
                let pool = Growing::new(GROWING_BEGINS, self.clock.clone());
                self.copied_burst(&runtime(None), Arc::new(pool))
            }
            Road::SpawnBlocking => self.on_tokio(runtime(None)),
            Road::SpawnBlockingRaised => self.on_tokio(runtime(Some(RAISED))),
        };
        assert_eq!(burst.done, if road == Road::Floor { 0 } else { self.shape.calls() });
        burst
    }

    fn on_tokio(&self, runtime: Runtime) -> Burst {
        let pool = SpawnBlocking { runtime: runtime.handle().clone(), clock: self.clock.clone() };
        self.copied_burst(&runtime, Arc::new(pool))
    }

    /// As many jobs as there are calls within the cap, from one thread, a follower's together.
    fn bare_burst(&self) -> Burst {
        let lane = self.bare.open(copying::account(1), self.shape.within());
        let before = threads();
        // All callbacks of a burst run before anything else.
        (0..self.shape.events).for_each(|event| self.stamps.called(event));
        for follower in 0..FOLLOWERS {
            let job = |event| {
                let stamps = Arc::clone(&self.stamps);
                Bare(Some(Box::new(move || {
                    stamps.begins(follower, event, false);
                    stamps.hold(follower, event);
                })))
            };
            let jobs = (0..self.shape.events.min(self.shape.cap)).map(job).collect();
            let taken = self.bare.submit_all(lane, jobs);
            assert!(taken.iter().all(Result::is_ok), "the lane has room for all");
        }
        let account = copying::account(1);
        until("the bare jobs are done", || self.bare.in_flight(account) == 0);
        let threads_created = threads().saturating_sub(before);
        self.bare.close(lane);
        self.came_to(threads_created, 0)
    }

    /// The burst through followers, their gate and this pool.
    fn copied_burst(&self, runtime: &Runtime, pool: Arc<dyn Pool>) -> Burst {
        let gate = permission(FOLLOWERS, &self.clock);
        let events = self.shape.events;
        let (mut feeds, mut tasks) = (Vec::new(), Vec::new());
        for number in 0..FOLLOWERS {
            let seat = Seat::new(number, self.shape.cap, &self.clock, &gate, &pool, &self.stamps);
            let (feed, receiver) = mpsc::unbounded_channel();
            feeds.push(feed);
            tasks.push(runtime.spawn(seat.run(receiver, events)));
        }
        let opened: Vec<_> = (0..events).map(|e| opening(e, self.clock.wall())).collect();
        // The tasks have run once, and wait.
        rest(REST);
        let before = threads();
        for (event, opened) in opened.iter().enumerate() {
            self.stamps.called(event);
            for feed in &feeds {
                assert!(feed.send(told(opened)).is_ok(), "every follower listens");
            }
        }
        let all = async {
            let mut done = 0;
            for task in tasks {
                done += task.await.expect("a follower does not panic");
            }
            done
        };
        let done = runtime.block_on(async { tokio::time::timeout(BURST_LIMIT, all).await });
        let threads_created = threads().saturating_sub(before);
        self.came_to(threads_created, done.expect("the burst ends"))
    }

    fn came_to(&self, threads_created: usize, done: usize) -> Burst {
        let times = self.stamps.own_times();
        Burst {
            within: Percentiles::of_ns(times.within).expect("calls were made"),
            queued: Percentiles::of_ns(times.waited),
            threads_created,
            done,
        }
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + BURST_LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        rest(Duration::from_millis(1));
    }
}

impl Figures {
    fn of(rounds: Vec<&Burst>) -> Self {
        let within: Vec<Percentiles> = rounds.iter().map(|burst| burst.within).collect();
        let queued: Vec<Percentiles> = rounds.iter().filter_map(|burst| burst.queued).collect();
        let p95 = |pick: fn(f64, f64) -> f64, begin: f64| {
            within.iter().map(|round| round.p95_us).fold(begin, pick)
        };
        let waited = queued.iter().map(|round| round.samples).max().unwrap_or(0);
        Figures {
            threads_created: rounds.iter().map(|burst| burst.threads_created).max().unwrap_or(0),
            p95_us_spread: [p95(f64::min, f64::INFINITY), p95(f64::max, 0.0)],
            queued: Percentiles::median(&queued),
            waited_for_an_answer: waited,
            within: Percentiles::median(&within).expect("there are rounds"),
        }
    }
}

/// A runtime as a node's hot one; with so many threads for what blocks, if not tokio's default.
fn runtime(blocking_max: Option<usize>) -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(HOT_THREADS).enable_all();
    if let Some(threads) = blocking_max {
        builder.max_blocking_threads(threads);
    }
    builder.build().expect("a benchmark needs its runtime")
}

/// Lets the machine come to rest.
fn rest(time: Duration) {
    let until = Instant::now() + time;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|t| !t.is_zero()) {
        std::thread::park_timeout(left);
    }
}

/// A number of `/proc/self/status`.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let word = line.and_then(|line| line.split_whitespace().next()).expect("it is there");
    word.parse().expect("a number")
}

fn threads() -> usize {
    status("Threads")
}

/// What a thread of ours costs while it has nothing to do: resident memory of the process, and the
/// kernel's stack for it, which is not in that.
fn idle_thread_kib() -> Value {
    let kernel = || {
        let info = std::fs::read_to_string("/proc/meminfo").expect("Linux");
        let line = info.lines().find_map(|line| line.strip_prefix("KernelStack:"));
        let word = line.and_then(|line| line.split_whitespace().next()).expect("it is there");
        word.parse::<usize>().expect("a number")
    };
    let before = (status("VmRSS"), kernel(), threads());
    let crew = BareCrew::start(MEASURED_THREADS);
    until("every thread sleeps", || crew.idle() == crew.threads());
    let per =
        |now: usize, before: usize| (now as f64 - before as f64) / crew.threads().max(1) as f64;
    let idle = json!({
        "resident": per(status("VmRSS"), before.0),
        "kernel_stack": per(kernel(), before.1),
        "threads": crew.threads(),
    });
    drop(crew);
    until("the threads have ended", || threads() == before.2);
    idle
}

fn machine() -> Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = std::fs::read_to_string("/proc/meminfo").expect("Linux");
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    json!({ "cores": cores, "memory_gib": kib.map(|kib| kib / 1_048_576) })
}

fn table(shape: Shape, measured: &[Figures]) {
    say(&format!("{}: own time in us, within the cap | queued behind it", shape.name()));
    for (road, figures) in ROADS.iter().zip(measured) {
        let of = |p: &Percentiles| {
            format!("{:>8.0} {:>8.0} {:>8.0} {:>8.0}", p.p50_us, p.p95_us, p.p99_us, p.max_us)
        };
        say(&format!(
            "  {:<20} {} | {} | threads made {:>3}, p95 of rounds {:.0} to {:.0}",
            road.name(),
            of(&figures.within),
            figures.queued.as_ref().map_or_else(|| "-".to_owned(), of),
            figures.threads_created,
            figures.p95_us_spread[0],
            figures.p95_us_spread[1],
        ));
    }
}

#[allow(clippy::print_stderr, reason = "progress of a benchmark")]
fn say(line: &str) {
    eprintln!("{line}");
}
