//! Proof that the net has no holes: known bugs are planted, and must be found.

use crate::Args;
use std::process::ExitCode;

/// A bug that this many seeds do not find is not found.
#[cfg(feature = "planted")]
const SEEDS_MAX: u64 = 10_000;

/// Without the feature there is nothing to plant.
#[cfg(not(feature = "planted"))]
pub(crate) fn run(_args: &Args, _bugs: &str) -> ExitCode {
    eprintln!("planted bugs are not in this build; ./run sim --planted builds it with them");
    ExitCode::from(2)
}

/// Plants one bug after the other and runs seeds until a law is broken.
#[cfg(feature = "planted")]
pub(crate) fn run(args: &Args, bugs: &str) -> ExitCode {
    use schemas::planted::Bug;
    let wanted: Vec<Bug> = if bugs.eq_ignore_ascii_case("all") {
        Bug::ALL.to_vec()
    } else {
        let words = bugs.split(',').map(str::trim);
        match words.map(|word| Bug::from_word(word).ok_or(word)).collect() {
            Ok(bugs) => bugs,
            Err(word) => {
                eprintln!("--planted: {word} is none of P1 to P22, nor all");
                return ExitCode::from(2);
            }
        }
    };
    let started = crate::report::now();
    let mut needed = serde_json::Map::new();
    for bug in &wanted {
        match find(args, *bug) {
            Some((seeds, found)) => {
                println!("{:<4} {seeds:>5} seeds  {:<3} {}", bug.as_str(), found.law, bug.what());
                println!("                  {}", found.what);
                needed.insert(bug.as_str().into(), seeds.into());
            }
            None => println!("{:<4} not found in {SEEDS_MAX} seeds: {}", bug.as_str(), bug.what()),
        }
    }
    let found = needed.len();
    println!(
        "{found} of {} planted bugs found in {:.0} s",
        wanted.len(),
        started.elapsed().as_secs_f64()
    );
    if args.json {
        let object = serde_json::json!({
            "planted": wanted.len(),
            "found": found,
            "seeds_needed": needed,
            "elapsed_s": started.elapsed().as_secs(),
        });
        println!("{object}");
    }
    if found == wanted.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The first seed that finds it, counted from 1, and the law it breaks.
#[cfg(feature = "planted")]
fn find(args: &Args, bug: schemas::planted::Bug) -> Option<(u64, crate::oracle::Violation)> {
    use std::sync::atomic::{AtomicU64, Ordering};
    let next = AtomicU64::new(0);
    let end = AtomicU64::new(SEEDS_MAX);
    let found = parking_lot::Mutex::new(None::<(u64, crate::oracle::Violation)>);
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                schemas::planted::plant(Some(bug));
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end.load(Ordering::Relaxed) {
                        break;
                    }
                    let world = crate::report::run(seed, args.mode_of(seed), false);
                    let Some(violation) = world.oracle.violation else { continue };
                    end.fetch_min(seed, Ordering::Relaxed);
                    let mut found = found.lock();
                    if found.as_ref().is_none_or(|(first, _)| seed < *first) {
                        *found = Some((seed, violation));
                    }
                }
                schemas::planted::plant(None);
            });
        }
    });
    found.into_inner().map(|(seed, violation)| (seed + 1, violation))
}
