//! `./run bench scale`: how it grows with the followers of one node.
//!
//! Inputs: real servers; a node that leads one master, and one node that follows with 30 to 10,000
//! accounts; the paper broker as a process. Outputs, for each number of followers: own time of single
//! events and of a burst of up to 27, how many orders of one event leave in a second, processor time and
//! memory of a follower, rows a second through the writer, and how long all followers take to know
//! where they stand after the bus was restarted.
//!
//! Invariants:
//! 1. Every figure is of one running node; what it used before there were accounts is taken off.
//! 2. The next event comes when every order of the last one has been answered: nothing of it is in the
//!    next one's time.
//! 3. Every order must be in the record, or the run is worthless.
//!
//! Each account has a connection of its own. What its session at the broker takes is measured with as
//! many bare sessions in a process without copier code, and taken off the memory of a follower.
//!
//! The broker has the lowest priority and answers at once: with 10,000 followers it has more to do than
//! all the rest, and the time it takes is not own time.

mod scene;
mod sessions;

use super::own_time::stages::{self, Copy, Recorded};
use super::rounds::{Percentiles, median};
use scene::{Scene, Span};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Instant;

pub use sessions::{SessionsArgs, run_sessions};

/// Events of a master one at a time; half of them open, half of them close.
const SINGLE_EVENTS: usize = 20;
/// The same where one event is more than a thousand orders.
const SINGLE_EVENTS_OF_MANY: usize = 8;
/// Events of the burst.
const BURST_EVENTS: usize = 27;
/// Orders of a burst at most: a broker on this machine that has 270,000 of them answers later than
/// the limit of a call, and then orders of unknown outcome are measured.
const BURST_ORDERS_MAX: usize = 27_000;
/// Sizes that may be asked for: what fits into the open files of one process.
const FOLLOWERS_MAX: u32 = 10_000;

/// What `./run bench scale` takes.
#[derive(Debug, Clone, clap::Args)]
pub struct ScaleArgs {
    /// Followers of one node; may be given several times.
    #[arg(long, default_values_t = [30, 100, 1_000, 10_000],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(FOLLOWERS_MAX)))]
    followers: Vec<u32>,
}

/// What is said of one size.
#[derive(Debug, Serialize)]
struct Answer {
    own_time_p50_us: f64,
    own_time_p99_us: f64,
    /// Orders of one event, from the first to the last, in a second; the median of the events.
    orders_per_s: f64,
    /// The same of as many tasks that only write an order's bytes each, in the same run.
    floor_orders_per_s: f64,
    /// Ours in parts of that.
    ratio_orders_per_s: f64,
    /// From the publication to the write of those tasks.
    floor_p50_us: f64,
    floor_p99_us: f64,
    /// The node's memory less what it had before there were accounts, by account.
    kib_per_follower: f64,
    /// Of which a bare session at the broker takes this.
    kib_per_session: f64,
    /// From the restart of the bus until every follower has made a plan from a new snapshot.
    reconcile_all_s: f64,
    /// Plans that this took; more than one a follower would be a storm (L6).
    reconciles: f64,
    /// Events of the burst.
    burst_events: usize,
    burst_own_time_p50_us: f64,
    burst_own_time_p99_us: f64,
    burst_orders_per_s: f64,
    /// Rows of pairs and events that were written in a second while the burst's were written.
    rows_per_s: f64,
    /// Processor time of the node for one copy, answers and rows included, less what it takes at rest.
    cpu_us_per_copy: f64,
    /// Share of one processor that the node takes at rest.
    idle_cpu: f64,
    /// From the accounts' rows until every follower copied.
    ready_s: f64,
    copies: usize,
}

/// Measures and prints.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "the verb's answer")]
pub fn run(args: &ScaleArgs, json: bool) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut all = serde_json::Map::new();
    for followers in &args.followers {
        eprintln!("scale: {followers} followers ...");
        match runtime.block_on(measure(*followers)) {
            Ok(answer) => {
                print(*followers, &answer);
                let name = format!("followers_{followers}");
                all.insert(name, serde_json::to_value(answer).unwrap());
            }
            Err(why) => {
                eprintln!("scale: {followers} followers: {why}");
                return ExitCode::from(3);
            }
        }
    }
    all.insert("machine".to_owned(), super::machine());
    if json {
        println!("{}", serde_json::Value::Object(all));
    }
    ExitCode::SUCCESS
}

async fn measure(followers: u32) -> Result<Answer, String> {
    let folder = std::env::temp_dir().join(format!("lockstep-scale-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut scene = Scene::start(&folder, followers).await;
    let events = if followers > 1_000 { SINGLE_EVENTS_OF_MANY } else { SINGLE_EVENTS };
    let floor = scene.floor(events).await;
    let ready_s = scene.add_followers().await.as_secs_f64();
    let kib_per_follower = scene.kib_of_followers() / f64::from(followers);
    let kib_per_session = scene.kib_per_session().await;
    // The first ones touch what is made once.
    scene.singles(2).await;
    let idle = scene.idle_cpu().await;
    let (cpu_before, begun) = (scene.cpu(), Instant::now());
    let singles = scene.singles(events).await;
    let cpu = scene.cpu() - cpu_before;
    let cpu = cpu.saturating_sub(begun.elapsed().mul_f64(idle));
    let (bursts, rows_per_s) = scene.bursts(burst_events(followers)).await;
    let (reconcile_all, reconciles) = scene.restart_bus().await;
    let recorded = stages::read(&scene.end().await);
    std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;

    let of_singles = copies(&recorded, &singles, followers)?;
    let of_bursts = copies(&recorded, &bursts, followers)?;
    let own = |copies: &[Copy]| {
        Percentiles::of_ns(copies.iter().map(|copy| copy.own_ns).collect()).expect("there are some")
    };
    let (single, burst) = (own(&of_singles), own(&of_bursts));
    let orders = orders_per_s(&recorded, &singles);
    let floor_orders =
        median(floor.iter().filter_map(|event| rate(event)).collect()).unwrap_or(f64::NAN);
    let floor = Percentiles::of_ns(floor.concat()).expect("there are some");
    Ok(Answer {
        own_time_p50_us: single.p50_us,
        own_time_p99_us: single.p99_us,
        orders_per_s: orders,
        floor_orders_per_s: floor_orders,
        ratio_orders_per_s: orders / floor_orders,
        floor_p50_us: floor.p50_us,
        floor_p99_us: floor.p99_us,
        kib_per_follower,
        kib_per_session,
        reconcile_all_s: reconcile_all.as_secs_f64(),
        reconciles,
        burst_events: burst_events(followers),
        burst_own_time_p50_us: burst.p50_us,
        burst_own_time_p99_us: burst.p99_us,
        burst_orders_per_s: orders_per_s(&recorded, &bursts),
        rows_per_s,
        idle_cpu: idle,
        cpu_us_per_copy: cpu.as_secs_f64() * 1e6 / of_singles.len() as f64,
        ready_s,
        copies: of_singles.len() + of_bursts.len(),
    })
}

/// Events of a burst for so many followers.
fn burst_events(followers: u32) -> usize {
    BURST_EVENTS.min(BURST_ORDERS_MAX / followers as usize)
}

/// Every order of these spans.
fn copies(recorded: &Recorded, spans: &[Span], followers: u32) -> Result<Vec<Copy>, String> {
    let copies: Vec<Copy> =
        spans.iter().flat_map(|span| recorded.copies_in(span.ns)).copied().collect();
    let wanted = spans.iter().map(|span| span.events).sum::<usize>() * followers as usize;
    if copies.len() == wanted {
        Ok(copies)
    } else {
        Err(format!("{} of {wanted} orders are recorded", copies.len()))
    }
}

/// Orders a second from the first to the last of a span; the median of the spans.
fn orders_per_s(recorded: &Recorded, spans: &[Span]) -> f64 {
    let of_span = |span: &Span| {
        let copies = recorded.copies_in(span.ns);
        let called: Vec<u64> =
            copies.iter().map(|copy| copy.called_back_ns + copy.own_ns).collect();
        rate(&called)
    };
    median(spans.iter().filter_map(of_span).collect()).unwrap_or(f64::NAN)
}

/// How many a second, from the first to the last of these instants.
fn rate(instants_ns: &[u64]) -> Option<f64> {
    let took = instants_ns.iter().max()? - instants_ns.iter().min()?;
    (took > 0).then(|| (instants_ns.len() - 1) as f64 * 1e9 / took as f64)
}

#[allow(clippy::print_stderr, reason = "the verb's answer for people")]
fn print(followers: u32, answer: &Answer) {
    let a = answer;
    eprintln!(
        "{followers:>6} followers: own time p50 {:.0} us, p99 {:.0} us, {:.0} orders/s (floor p50 {:.0} us, p99 {:.0} us, {:.0} orders/s); burst of {}: \
         p50 {:.0} us, p99 {:.0} us, {:.0} orders/s; {:.0} us of processor a copy, {:.1} % of one at rest; {:.1} KiB a follower, \
         {:.1} of them the broker's session; {:.0} rows/s; all reconciled {:.2} s after the bus was \
         restarted, with {} plans; ready after {:.1} s",
        a.own_time_p50_us,
        a.own_time_p99_us,
        a.orders_per_s,
        a.floor_p50_us,
        a.floor_p99_us,
        a.floor_orders_per_s,
        a.burst_events,
        a.burst_own_time_p50_us,
        a.burst_own_time_p99_us,
        a.burst_orders_per_s,
        a.cpu_us_per_copy,
        a.idle_cpu * 100.0,
        a.kib_per_follower,
        a.kib_per_session,
        a.rows_per_s,
        a.reconcile_all_s,
        a.reconciles,
        a.ready_s,
    );
}
