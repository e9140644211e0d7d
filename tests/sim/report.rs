//! Runs seeds and says what came of them.

use crate::Args;
use crate::oracle::Violation;
use crate::plan::{Mode, Plan, SECOND};
use crate::story;
use crate::world::World;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What must have happened at least so often in a run of a thousand seeds, or the net
/// has holes.
const MUST_REACH: [(&str, u64); 18] = [
    ("takeover_with_an_order_in_flight", 5),
    ("answer_after_the_deadline", 5),
    ("adopted_by_tag", 20),
    ("adopted_by_lineage", 5),
    ("mass_close_held", 5),
    ("snapshot_asked_again_because_stale", 20),
    ("event_dropped_as_applied", 20),
    ("came_by_the_bus_a_second_time", 20),
    ("epoch_raised", 20),
    ("row_left_out", 20),
    ("duplicate_found_and_closed", 1),
    ("decision_recorded", 20),
    ("renewal_refused_for_transaction_age", 5),
    ("claims_frozen", 5),
    ("close_before_open_merged", 20),
    ("frozen_at_a_point", 20),
    ("pause_ended_over_an_open", 20),
    ("pause_ended_over_an_end", 20),
];

#[derive(Default)]
struct Sum {
    seeds: u64,
    simulated_us: u64,
    orders: u64,
    opens: u64,
    excused_duplicates: u64,
    unpromised: u64,
    margin_min_us: Option<u64>,
    faults: BTreeMap<&'static str, u64>,
    reached: BTreeMap<&'static str, u64>,
    violations: Vec<(u64, Mode, Violation)>,
}

impl Sum {
    fn add(&mut self, seed: u64, mode: Mode, world: World) {
        self.seeds += 1;
        self.simulated_us += world.now;
        self.orders += world.oracle.orders;
        self.opens += world.oracle.opens;
        self.excused_duplicates += world.oracle.excused_duplicates;
        self.unpromised += world.oracle.unpromised;
        if let Some(margin) = world.oracle.margin_min_us {
            let least = self.margin_min_us.get_or_insert(margin);
            *least = (*least).min(margin);
        }
        for (what, count) in world.faults_begun {
            *self.faults.entry(what).or_default() += count;
        }
        for (what, count) in world.reached {
            *self.reached.entry(what).or_default() += count;
        }
        if let Some(violation) = world.oracle.violation {
            self.violations.push((seed, mode, violation));
        }
    }

    fn join(&mut self, other: Sum) {
        self.seeds += other.seeds;
        self.simulated_us += other.simulated_us;
        self.orders += other.orders;
        self.opens += other.opens;
        self.excused_duplicates += other.excused_duplicates;
        self.unpromised += other.unpromised;
        self.margin_min_us = [self.margin_min_us, other.margin_min_us].into_iter().flatten().min();
        for (what, count) in other.faults {
            *self.faults.entry(what).or_default() += count;
        }
        for (what, count) in other.reached {
            *self.reached.entry(what).or_default() += count;
        }
        self.violations.extend(other.violations);
    }

    fn missing(&self) -> Vec<&'static str> {
        // Of a few seeds nothing can be asked.
        let wanted = |least: u64| match self.seeds {
            0..100 => 0,
            100..200 => least * self.seeds / 1_000,
            _ => (least * self.seeds / 1_000).max(1),
        };
        MUST_REACH
            .iter()
            .filter(|(what, least)| self.reached.get(what).copied().unwrap_or(0) < wanted(*least))
            .map(|(what, _)| *what)
            .collect()
    }
}

pub(crate) fn run(seed: u64, mode: Mode, trace: bool) -> World {
    let mut world = World::new(Plan::draw(seed, mode), trace);
    world.run();
    world
}

/// One seed, with its story.
pub(crate) fn one(args: &Args, seed: u64) -> ExitCode {
    let mode = args.mode_of(seed);
    let world = run(seed, mode, args.trace);
    for line in world.trace.iter().flatten() {
        println!("{line}");
    }
    println!("seed {seed}, {mode:?}, {} s", world.now / SECOND);
    for (what, count) in &world.reached {
        println!("  {what:<44} {count}");
    }
    let found = &world.oracle.violation;
    match found {
        None => println!("seed {seed} ({mode:?}) breaks no law"),
        Some(violation) => print_story(seed, mode, violation),
    }
    if args.json {
        let object = serde_json::json!({
            "seed": seed,
            "mode": word(mode),
            "violations": usize::from(found.is_some()),
            "law": found.as_ref().map(|violation| violation.law),
            "what": found.as_ref().map(|violation| &violation.what),
            "reached": world.reached,
        });
        println!("{object}");
    }
    if found.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn print_story(seed: u64, mode: Mode, violation: &Violation) {
    println!("seed {seed} ({mode:?}) breaks {}: {}", violation.law, violation.what);
    let plan = story::shorten(seed, mode, violation);
    println!("  with {} of its {} faults:", plan.faults.len(), Plan::draw(seed, mode).faults.len());
    for line in story::tell(&plan) {
        println!("  {line}");
    }
    println!("  again: ./run sim --seed {seed} --mode {} --trace", word(mode));
}

fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Safety => "safety",
        Mode::Liveness => "liveness",
    }
}

/// Many seeds on all threads.
pub(crate) fn many(args: &Args) -> ExitCode {
    let started = now();
    let next = AtomicU64::new(args.seeds.0);
    let stop = AtomicBool::new(false);
    let mut sum = Sum::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut sum = Sum::default();
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= args.seeds.1 || stop.load(Ordering::Relaxed) {
                            return sum;
                        }
                        let mode = args.mode_of(seed);
                        let world = run(seed, mode, false);
                        if args.first && world.oracle.violation.is_some() {
                            stop.store(true, Ordering::Relaxed);
                        }
                        sum.add(seed, mode, world);
                    }
                })
            })
            .collect();
        for worker in workers {
            sum.join(worker.join().expect("a world does not panic"));
        }
    });
    sum.violations.sort_by_key(|(seed, _, _)| *seed);
    let elapsed = started.elapsed();
    print(args, &sum, elapsed.as_secs_f64());
    let is_well = sum.violations.is_empty() && sum.missing().is_empty();
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[allow(clippy::disallowed_methods, reason = "how long it took, for the person who waits")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

fn print(args: &Args, sum: &Sum, elapsed_s: f64) {
    let hours = sum.simulated_us as f64 / SECOND as f64 / 3600.0;
    let mut laws: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (seed, _, violation) in &sum.violations {
        laws.entry(violation.law).or_default().push(*seed);
    }
    for (seed, _, violation) in sum.violations.iter().take(20) {
        println!("seed {seed} breaks {}: {}", violation.law, violation.what);
    }
    for (law, seeds) in &laws {
        let shown: Vec<String> = seeds.iter().take(12).map(u64::to_string).collect();
        println!("{law}: {} seeds, among them {}", seeds.len(), shown.join(" "));
    }
    for (seed, mode, violation) in sum.violations.iter().take(1) {
        print_story(*seed, *mode, violation);
    }
    if !args.json {
        for (what, count) in sum.faults.iter().chain(&sum.reached) {
            println!("  {what:<44} {count}");
        }
    }
    let missing = sum.missing();
    println!(
        "{} seeds, {hours:.1} simulated hours in {elapsed_s:.1} s; {} orders, {} opens; {} excused duplicates, {} claims after an unseen jump; least margin {} ms; {} violations; not reached: {missing:?}",
        sum.seeds,
        sum.orders,
        sum.opens,
        sum.excused_duplicates,
        sum.unpromised,
        sum.margin_min_us.unwrap_or(0) / 1_000,
        sum.violations.len(),
    );
    if args.json {
        let object = serde_json::json!({
            "seeds": sum.seeds,
            "simulated_hours": (hours * 10.0).round() / 10.0,
            "violations": sum.violations.len(),
            "reachability_missing": missing,
            "elapsed_s": (elapsed_s * 10.0).round() / 10.0,
            "orders": sum.orders,
            "opens": sum.opens,
            "excused_duplicates": sum.excused_duplicates,
            "claims_after_unseen_jump": sum.unpromised,
            "margin_min_us": sum.margin_min_us,
            "faults": sum.faults,
            "reached": sum.reached,
        });
        println!("{object}");
    }
}
