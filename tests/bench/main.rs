//! `./run bench WHAT`: what Lockstep costs beside what the machine allows. `--json` prints one
//! object on the last line.
//!
//! Exit codes: 0 measured, 2 wrong usage, 3 the world could not be had, or is too noisy.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Measures Lockstep beside the limit of the machine, in one run.
#[derive(Debug, Parser)]
#[command(name = "bench", max_term_width = 100)]
struct Args {
    #[command(subcommand)]
    what: What,
    /// The last line is one JSON object.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// From the master's callback to the instruction before the order call.
    OwnTime,
    /// A broker whose calls hold a thread.
    Blocking,
    /// How it grows with the followers of one node.
    Scale,
    /// What a lease cycle costs.
    Lease,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match args.what {
        What::OwnTime | What::Blocking | What::Scale | What::Lease => todo!("{}", args.json),
    }
}
