//! `./run bench own-time`: what a copy costs beside what the bus and the scheduler allow.
//!
//! Inputs: real servers, real node processes, the paper broker as a process. Outputs: for each shape
//! own time, the limit (see [`super::raw`]), their ratios and the stages, and for one node the same.
//!
//! Invariants:
//! 1. Limit and system take turns in one run, [`ROUNDS`] rounds each at least; medians of the
//!    rounds' percentiles are compared.
//! 2. A round whose own limit is noisy is measured again together with the system's turn.
//! 3. Stamps are taken on the hot path, kept in memory, and written when the nodes end.
//! 4. An order that is missing in the record is counted, and more than one in a hundred of them
//!    make the run worthless.
//! 5. The first rounds after the start are thrown away.
//!
//! The broker is a machine elsewhere in real life: here its process has the lowest priority, and
//! carries an order out after 60 ms. A master's burst is let go by a relay in one write.

mod scene;
pub(super) mod stages;

use super::raw::{FOLLOWERS, Limit};
use super::rounds::{Percentiles, REPEATS_MAX, ROUNDS, is_noisy};
use lockstep::config::PREFIX;
use scene::{BURST_EVERY, QUIET_EVERY, Scene, Stretch};
pub(super) use scene::{resident_kib, step_back};
use serde::Serialize;
use stages::{Copy, Recorded, Stage};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Events of a quiet round.
const QUIET_EVENTS: usize = 80;
/// Pairs of bursts (one opens, one closes) of a burst round.
const BURST_PAIRS: usize = 3;
/// Rounds that may be asked for: what the nodes' records have room for.
const ROUNDS_MAX: usize = 20;
/// The largest share of orders that may be missing in the record.
const MISSING_MAX: f64 = 0.01;

/// What `./run bench own-time` takes.
#[derive(Debug, Clone, clap::Args)]
pub struct OwnTimeArgs {
    /// Where master and followers are.
    #[arg(long, value_enum, default_value_t = Layouts::Both)]
    layout: Layouts,
    /// Rounds of limit and system, each; fewer than 7 say little.
    #[arg(long, default_value_t = ROUNDS, value_parser = rounds_of)]
    rounds: usize,
    /// A setting of the nodes, such as LOCKSTEP_BUSY_POLL=1; may be given several times.
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting_of)]
    settings: Vec<(String, String)>,
    /// New folder in which the nodes' records are kept, a folder a layout.
    #[arg(long, value_name = "FOLDER")]
    records: Option<PathBuf>,
}

fn setting_of(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(name, _)| name.starts_with(PREFIX));
    let (name, value) = parts.ok_or_else(|| format!("must be {PREFIX}NAME=VALUE, got {text:?}"))?;
    Ok((name.to_owned(), value.to_owned()))
}

fn rounds_of(text: &str) -> Result<usize, String> {
    let rounds = text.parse().ok().filter(|rounds| (1..=ROUNDS_MAX).contains(rounds));
    rounds.ok_or_else(|| format!("must be a whole number from 1 to {ROUNDS_MAX}, got {text:?}"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Layouts {
    Two,
    One,
    Both,
}

/// Where master and followers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// The master on one node, its followers on another: over NATS.
    TwoNodes,
    /// All on one node, whose followers hear their master without NATS. The limit goes over NATS.
    OneNode,
}

impl Layout {
    fn word(self) -> &'static str {
        match self {
            Layout::TwoNodes => "two",
            Layout::OneNode => "one",
        }
    }
}

/// What the master does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Quiet,
    Burst(usize),
}

const SHAPES: [Shape; 3] = [Shape::Quiet, Shape::Burst(12), Shape::Burst(27)];

impl Shape {
    fn word(self) -> String {
        match self {
            Shape::Quiet => "quiet".to_owned(),
            Shape::Burst(events) => format!("burst_{events}x{FOLLOWERS}"),
        }
    }
}

/// One turn of limit and system.
struct Turn {
    limit: Percentiles,
    floor: Percentiles,
    stretches: Vec<Stretch>,
}

/// What is said of one shape.
#[derive(Debug, Serialize)]
struct Answer {
    #[serde(flatten)]
    own: Percentiles,
    raw_p50_us: f64,
    raw_p95_us: f64,
    ratio_p50: f64,
    ratio_p95: f64,
    /// The limit with one write of an order's size in each task.
    floor_p50_us: f64,
    floor_p95_us: f64,
    rounds: usize,
    repeated: usize,
    missing: usize,
    ratio_p50_spread: [f64; 2],
    ratio_p95_spread: [f64; 2],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    parts: BTreeMap<&'static str, Stage>,
    stages: BTreeMap<&'static str, Stage>,
}

/// Measures and prints.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "the verb's answer")]
pub fn run(args: &OwnTimeArgs, json: bool) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let layouts: &[(Layout, &str)] = match args.layout {
        Layouts::Two => &[(Layout::TwoNodes, "")],
        Layouts::One => &[(Layout::OneNode, "local_")],
        Layouts::Both => &[(Layout::TwoNodes, ""), (Layout::OneNode, "local_")],
    };
    let mut all = serde_json::Map::new();
    let mut stages = serde_json::Map::new();
    for (layout, prefix) in layouts {
        eprintln!(
            "own-time: {layout:?}, {} rounds; the first round is thrown away ...",
            args.rounds
        );
        match runtime.block_on(measure(*layout, args)) {
            Ok(answers) => {
                for (shape, answer) in answers {
                    let name = format!("{prefix}{}", shape.word());
                    stages.insert(name.clone(), serde_json::to_value(&answer.stages).unwrap());
                    all.insert(name, serde_json::to_value(&answer).unwrap());
                }
            }
            Err(why) => {
                eprintln!("own-time: {why}");
                return ExitCode::from(3);
            }
        }
    }
    all.insert("stages".to_owned(), stages.into());
    all.insert("machine".to_owned(), super::machine());
    print_table(&all);
    if json {
        println!("{}", serde_json::Value::Object(all));
    }
    ExitCode::SUCCESS
}

async fn measure(layout: Layout, args: &OwnTimeArgs) -> Result<Vec<(Shape, Answer)>, String> {
    let rounds = args.rounds;
    let own = std::env::temp_dir().join(format!("lockstep-own-time-{}", std::process::id()));
    let folder = args.records.as_ref().unwrap_or(&own).join(layout.word());
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut scene = Scene::start(layout, &folder, &args.settings).await;
    let limit = Limit::start(&scene.nats(), layout == Layout::OneNode, FOLLOWERS).await;
    step_back(&limit.sink);
    for shape in SHAPES {
        turn(&mut scene, &limit, shape).await;
    }
    let mut kept: Vec<(Shape, Vec<Turn>, usize)> =
        SHAPES.iter().map(|shape| (*shape, Vec::new(), 0)).collect();
    while kept.iter().any(|(_, turns, _)| turns.len() < rounds) {
        for (shape, turns, repeated) in kept.iter_mut().filter(|(_, t, _)| t.len() < rounds) {
            turns.push(turn(&mut scene, &limit, *shape).await);
            // A better round may show that an earlier one was noisy.
            let best = turns.iter().map(|turn| turn.limit.p95_us).fold(f64::INFINITY, f64::min);
            let before = turns.len();
            turns.retain(|turn| !is_noisy(&turn.limit, best));
            *repeated += before - turns.len();
            if *repeated > REPEATS_MAX {
                return Err(format!(
                    "{} rounds were noisy: the machine does too much else",
                    repeated
                ));
            }
        }
    }
    drop(limit);
    let recorded = stages::read(&scene.end().await);
    if args.records.is_none() {
        // Only this run's files are in it.
        std::fs::remove_dir_all(&own).map_err(|e| format!("{}: {e}", own.display()))?;
    }
    let answer = |(shape, turns, repeated): (Shape, Vec<Turn>, usize)| {
        answer(&turns, repeated, &recorded)
            .map(|answer| (shape, answer))
            .map_err(|why| format!("{}: {why}", shape.word()))
    };
    kept.into_iter().map(answer).collect()
}

/// The limit, the floor, the system, one after the other.
async fn turn(scene: &mut Scene, limit: &Limit, shape: Shape) -> Turn {
    limit.write(false).await;
    let raw = limit_round(limit, shape).await;
    limit.write(true).await;
    let floor = limit_round(limit, shape).await;
    let stretches = match shape {
        Shape::Quiet => scene.quiet(QUIET_EVENTS).await,
        Shape::Burst(events) => scene.bursts(BURST_PAIRS, events).await,
    };
    Turn { limit: raw, floor, stretches }
}

async fn limit_round(limit: &Limit, shape: Shape) -> Percentiles {
    let (times, events, pause) = match shape {
        Shape::Quiet => (QUIET_EVENTS, 1, QUIET_EVERY),
        Shape::Burst(events) => (2 * BURST_PAIRS, events, BURST_EVERY / 2),
    };
    let mut every = tokio::time::interval(pause);
    every.tick().await;
    limit.take().await;
    for _ in 0..times {
        every.tick().await;
        limit.publish(events).await;
    }
    let wanted = times * events * FOLLOWERS;
    let mut samples = Vec::with_capacity(wanted);
    crate::world::until("every task of the limit", Duration::from_secs(5), async || {
        samples.extend(limit.take().await);
        (samples.len() >= wanted).then_some(())
    })
    .await;
    Percentiles::of_ns(samples).expect("tasks were woken")
}

fn answer(turns: &[Turn], repeated: usize, recorded: &Recorded) -> Result<Answer, String> {
    let copies = |turn: &Turn, wanted: Option<bool>| -> Vec<Copy> {
        let of = turn.stretches.iter().filter(|s| wanted.is_none() || s.opens == wanted);
        of.flat_map(|stretch| recorded.copies_in(stretch.ns)).copied().collect()
    };
    let own = |turn: &Turn, wanted: Option<bool>| {
        Percentiles::of_ns(copies(turn, wanted).iter().map(|copy| copy.own_ns).collect())
    };
    let each: Vec<Percentiles> = turns.iter().filter_map(|turn| own(turn, None)).collect();
    let stretches = || turns.iter().flat_map(|turn| &turn.stretches);
    let events: usize = stretches().map(|stretch| stretch.events).sum();
    let seen: usize = stretches().map(|stretch| recorded.events_in(stretch.ns)).sum();
    if seen != events || each.len() != turns.len() {
        return Err(format!("{seen} of {events} events were recorded"));
    }
    let all = Percentiles::median(&each).ok_or("nothing was measured")?;
    let missing = (events * FOLLOWERS).saturating_sub(all.samples);
    if missing as f64 > MISSING_MAX * (events * FOLLOWERS) as f64 {
        return Err(format!("{missing} of {} orders are not recorded", events * FOLLOWERS));
    }
    let of = |pick: fn(&Turn) -> Percentiles| {
        Percentiles::median(&turns.iter().map(pick).collect::<Vec<_>>()).expect("there are turns")
    };
    let (raw, floor) = (of(|turn| turn.limit), of(|turn| turn.floor));
    let spread = |pick: fn(&Percentiles) -> f64| {
        let ratios = turns.iter().zip(&each).map(|(turn, own)| pick(own) / pick(&turn.limit));
        ratios.fold([f64::INFINITY, 0.0], |[low, high], r| [low.min(r), high.max(r)])
    };
    let part = |name: &'static str, wanted: bool| {
        let rounds: Vec<_> = turns.iter().filter_map(|turn| own(turn, Some(wanted))).collect();
        let Percentiles { p50_us, p95_us, .. } = Percentiles::median(&rounds)?;
        Some((name, Stage { p50_us, p95_us }))
    };
    let everything: Vec<Copy> = turns.iter().flat_map(|turn| copies(turn, None)).collect();
    Ok(Answer {
        own: all,
        raw_p50_us: raw.p50_us,
        raw_p95_us: raw.p95_us,
        ratio_p50: all.p50_us / raw.p50_us,
        ratio_p95: all.p95_us / raw.p95_us,
        floor_p50_us: floor.p50_us,
        floor_p95_us: floor.p95_us,
        rounds: turns.len(),
        repeated,
        missing,
        ratio_p50_spread: spread(|p| p.p50_us),
        ratio_p95_spread: spread(|p| p.p95_us),
        parts: [part("opens", true), part("closes", false)].into_iter().flatten().collect(),
        stages: stages::of_copies(&everything),
    })
}

#[allow(clippy::print_stderr, reason = "the verb's answer for people")]
fn print_table(all: &serde_json::Map<String, serde_json::Value>) {
    eprintln!(
        "{:<24}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>7}{:>7}{:>9}{:>9}  (us)",
        "",
        "p50",
        "p95",
        "p99",
        "max",
        "raw p50",
        "raw p95",
        "x p50",
        "x p95",
        "floor50",
        "floor95"
    );
    for (shape, answer) in all.iter().filter(|(_, answer)| answer.get("p50_us").is_some()) {
        let of = |name: &str| answer[name].as_f64().unwrap_or(f64::NAN);
        eprintln!(
            "{shape:<24}{:>8.0}{:>8.0}{:>8.0}{:>9.0}{:>9.0}{:>9.0}{:>7.2}{:>7.2}{:>9.0}{:>9.0}",
            of("p50_us"),
            of("p95_us"),
            of("p99_us"),
            of("max_us"),
            of("raw_p50_us"),
            of("raw_p95_us"),
            of("ratio_p50"),
            of("ratio_p95"),
            of("floor_p50_us"),
            of("floor_p95_us"),
        );
        for name in stages::STAGES {
            let stage = &answer["stages"][name];
            let of = |what: &str| stage[what].as_f64().unwrap_or(f64::NAN);
            eprintln!("  {name:<22}{:>8.0}{:>8.0}", of("p50_us"), of("p95_us"));
        }
    }
}
