//! `./run bench instructions`: how many instructions the pure parts of a copy take.
//!
//! In: valgrind, which counts them. Out: instructions of one plan, one decision, one event. A count says
//! the same on a busy machine as on an idle one, so that two versions can be compared.
//!
//! This program runs itself under valgrind, twice for each part: once with it done [`FEW`] times, once
//! [`MANY`] times. The difference is free of everything that is made once.
//!
//! Not covered: how long an instruction takes.

use super::decisions::{Decision, SOME_PAIRS};
use clap::ValueEnum;
use serde_json::{Map, Value, json};
use std::process::{Command, ExitCode};

const FEW: u64 = 2;
const MANY: u64 = 12;
/// Pairs of the links that are planned.
const SIZES: [u64; 4] = [10, 100, 1_000, 10_000];

/// What the program is told when it runs itself.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct OnceArgs {
    #[arg(long)]
    part: Decision,
    #[arg(long)]
    pairs: u64,
    #[arg(long)]
    times: u64,
}

/// Does one part so many times.
pub fn run_once(args: OnceArgs) {
    let mut part = args.part.ready(args.pairs);
    (0..args.times).for_each(|_| part());
}

/// Counts and prints.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "the verb's answer")]
pub fn run(json: bool) -> ExitCode {
    let mut all = Map::new();
    for part in Decision::value_variants() {
        let is_plan = matches!(part, Decision::PlanAtRest | Decision::PlanWithoutRows);
        let sizes: &[u64] = if is_plan { &SIZES } else { &[SOME_PAIRS] };
        for pairs in sizes {
            let name = name(*part);
            let count = match count(*part, *pairs) {
                Ok(count) => count,
                Err(why) => {
                    eprintln!("instructions: {name}: {why}");
                    return ExitCode::from(3);
                }
            };
            if is_plan {
                eprintln!(
                    "{name:>18} {pairs:>6} pairs {count:>12} {:>8.0} a pair",
                    count as f64 / *pairs as f64
                );
                let of_part = all.entry(name).or_insert_with(|| json!({}));
                of_part[pairs.to_string()] = json!(count);
            } else {
                eprintln!("{name:>18} {count:>25}");
                all.insert(name, json!(count));
            }
        }
    }
    if json {
        println!("{}", Value::Object(all));
    }
    ExitCode::SUCCESS
}

fn name(part: Decision) -> String {
    let word = part.to_possible_value().expect("no part is hidden");
    word.get_name().replace('-', "_")
}

/// Instructions of doing a part once.
fn count(part: Decision, pairs: u64) -> Result<u64, String> {
    let few = counted(part, pairs, FEW)?;
    let many = counted(part, pairs, MANY)?;
    Ok(many.saturating_sub(few) / (MANY - FEW))
}

fn counted(part: Decision, pairs: u64, times: u64) -> Result<u64, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let part = part.to_possible_value().expect("no part is hidden");
    let ran = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"])
        .arg(program)
        .args(["instructions-once", "--part", part.get_name()])
        .args(["--pairs", &pairs.to_string(), "--times", &times.to_string()])
        .output()
        .map_err(|e| format!("valgrind counts them, and it cannot be run: {e}"))?;
    let said = String::from_utf8_lossy(&ran.stderr);
    let line =
        said.lines().find_map(|line| line.split_once("I   refs:").or(line.split_once("I refs:")));
    let count = line.and_then(|(_, count)| count.trim().replace(',', "").parse().ok());
    count.ok_or_else(|| format!("valgrind said ({}): {said}", ran.status))
}
