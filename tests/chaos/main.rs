//! `./run chaos`: real processes, faults from a seed, and a verdict.
//!
//! Exit codes: 0 nothing is wrong, 1 a promise was broken or a copy is missing, 2 wrong usage,
//! 3 the world itself could not be had.

use clap::Parser;
use lockstep_tests::chaos::run::{Settings, run};
use lockstep_tests::chaos::schedule::{KINDS, Kind, ROUNDS_FOR_EVERY_KIND};
use lockstep_tests::world::wall;
use std::process::ExitCode;
use std::time::Duration;

/// Breaks servers, connections and nodes under load, and checks what Lockstep promises.
#[derive(Debug, Parser)]
#[command(name = "chaos", max_term_width = 100)]
struct Args {
    /// How long, in minutes; every kind of fault comes within ten.
    #[arg(long, default_value_t = 2)]
    minutes: u64,
    /// The same seed gives the same faults; without it, one that is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Only these kinds of fault; `--kinds` lists them.
    #[arg(long, value_delimiter = ',', value_parser = kind)]
    only: Vec<Kind>,
    /// Print the verdict as one JSON object, on the last line.
    #[arg(long)]
    json: bool,
    /// Keep ledger, logs and tables even if nothing is wrong.
    #[arg(long)]
    keep: bool,
    /// List the kinds of fault, and end.
    #[arg(long)]
    kinds: bool,
}

fn kind(word: &str) -> Result<Kind, String> {
    KINDS.iter().copied().find(|kind| kind.word() == word).ok_or_else(|| {
        let words: Vec<&str> = KINDS.iter().map(|kind| kind.word()).collect();
        format!("must be one of {}", words.join(", "))
    })
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a program answers on stdout")]
fn main() -> ExitCode {
    let args = Args::parse();
    if args.kinds {
        for kind in KINDS {
            println!("{:<18} {}", kind.word(), kind.meaning());
        }
        println!("each comes once in {ROUNDS_FOR_EVERY_KIND} rounds at the latest");
        return ExitCode::SUCCESS;
    }
    if args.minutes == 0 {
        eprintln!("error: --minutes 0: must be at least 1");
        return ExitCode::from(2);
    }
    let seed = args.seed.unwrap_or_else(|| wall().0.unsigned_abs() % 1_000_000);
    let name = format!("lockstep-chaos-{seed}-{}", std::process::id());
    let settings = Settings {
        lasts: Duration::from_secs(args.minutes * 60),
        seed,
        only: args.only,
        folder: std::env::temp_dir().join(name),
        keep: args.keep,
    };
    eprintln!("· seed {seed}");
    let folder = settings.folder.clone();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let verdict = runtime
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(run(settings, |line| eprintln!("· {line}"))));
    match verdict {
        Ok(verdict) => {
            if !verdict.story.is_empty() {
                eprintln!("{}", verdict.story.join("\n    "));
            }
            if let Some(folder) = &verdict.evidence {
                eprintln!("· ledger, logs and tables are in {}", folder.display());
            }
            if args.json {
                match serde_json::to_string(&verdict) {
                    Ok(text) => println!("{text}"),
                    Err(error) => eprintln!("error: {error}"),
                }
            } else {
                print!("{}", verdict.table());
            }
            if verdict.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(1) }
        }
        Err(error) => {
            eprintln!("error: {error}\nlogs are in {}", folder.display());
            ExitCode::from(3)
        }
    }
}
