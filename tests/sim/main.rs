//! The simulation: real decision code in a simulated world, one thread and one seed a run.
//!
//! `./run sim --seeds 0..2000` runs them all and prints one verdict; `--seed N --trace` tells the
//! story of one. A failing seed is run again with ever fewer of its faults, and the shortest story
//! that still breaks the same law is printed.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the shell")]

mod broker;
mod bus;
mod db;
mod faults;
mod feed;
mod node;
mod oracle;
mod plan;
mod planting;
mod report;
mod rng;
mod session;
mod story;
mod world;
mod writer;

use clap::Parser;
use plan::Mode;
use std::process::ExitCode;

/// Simulates Lockstep under faults and checks its promises.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Seeds to run, as FROM..TO.
    #[arg(long, default_value = "0..200", value_parser = seeds)]
    seeds: (u64, u64),
    /// One seed only.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// What to check; without it every seed is run in the mode that its number says.
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Print everything that happens (with --seed).
    #[arg(long, requires = "seed")]
    trace: bool,
    /// The last line is one JSON object.
    #[arg(long)]
    json: bool,
    /// Threads.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=256))]
    threads: u64,
    /// Stop at the first violation.
    #[arg(long)]
    first: bool,
    /// Plant bugs in the code under test, all or some (P1,P7), and count the seeds until each is
    /// found.
    #[arg(long, conflicts_with_all = ["seed", "seeds", "first"])]
    planted: Option<String>,
}

fn seeds(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("must be FROM..TO with FROM below TO, got {text}");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let from = from.trim().parse().map_err(|_| wrong())?;
    let to = to.trim().parse().map_err(|_| wrong())?;
    if from < to { Ok((from, to)) } else { Err(wrong()) }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(seed) = args.seed {
        return report::one(&args, seed);
    }
    match &args.planted {
        Some(bugs) => planting::run(&args, bugs),
        None => report::many(&args),
    }
}

impl Args {
    /// Odd seeds heal at the end, even ones do not, unless the mode is given.
    fn mode_of(&self, seed: u64) -> Mode {
        self.mode.unwrap_or(if seed.is_multiple_of(2) { Mode::Safety } else { Mode::Liveness })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plan::{Plan, SECOND};

    #[test]
    fn arguments_that_would_be_ignored_are_refused_by_name() {
        for (words, mentions) in [
            ("--trace", "--seed"),
            ("--seed 1 --seeds 0..2", "--seeds"),
            ("--seed 1 --planted all", "--planted"),
            ("--threads 0", "--threads"),
            ("--seeds 5", "FROM..TO"),
            ("--seeds 5..5", "5..5"),
        ] {
            let words = ["sim"].into_iter().chain(words.split_whitespace());
            let error = Args::try_parse_from(words).unwrap_err().to_string();
            assert!(error.contains(mentions), "{error}");
        }
        assert!(Args::try_parse_from(["sim", "--seed", "1", "--trace"]).is_ok());
    }

    fn trace(seed: u64) -> Vec<String> {
        let mut plan = Plan::draw(seed, Mode::Safety);
        plan.ends = 150 * SECOND;
        let mut world = world::World::new(plan, true);
        world.run();
        assert!(world.oracle.violation.is_none(), "{:?}", world.oracle.violation);
        world.trace.expect("it was asked for")
    }

    #[test]
    fn one_seed_gives_the_same_trace_byte_for_byte() {
        for seed in [3, 8] {
            let (first, second) = (trace(seed), trace(seed));
            assert!(first.len() > 100, "seed {seed} tells nothing: {} lines", first.len());
            let differs = first.iter().zip(&second).find(|(one, other)| one != other);
            assert_eq!(differs, None, "seed {seed}");
            assert_eq!(first.len(), second.len(), "seed {seed}");
        }
    }

    #[test]
    fn another_seed_is_another_world() {
        assert_ne!(trace(3), trace(4));
    }

    #[test]
    fn a_plan_of_a_seed_is_always_the_same() {
        let plans = [1, 1].map(|seed| format!("{:?}", Plan::draw(seed, Mode::Liveness)));
        assert_eq!(plans[0], plans[1]);
    }
}
