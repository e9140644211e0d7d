//! `./run bench WHAT`: what Lockstep costs beside what the machine allows. `--json` prints one
//! object on the last line.
//!
//! Exit codes: 0 measured, 2 wrong usage, 3 the world could not be had, or is too noisy.

use clap::{Parser, Subcommand};
use lockstep_tests::bench::blocking;
use lockstep_tests::bench::instructions::{self, OnceArgs};
use lockstep_tests::bench::lease::{self, LeaseArgs};
use lockstep_tests::bench::own_time::{self, OwnTimeArgs};
use lockstep_tests::bench::raw::{self, RawArgs};
use lockstep_tests::bench::scale::{self, ScaleArgs, SessionsArgs};
use lockstep_tests::bench::writer;
use std::net::SocketAddr;
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
    OwnTime(OwnTimeArgs),
    /// A broker whose calls hold a thread.
    Blocking,
    /// How it grows with the followers of one node.
    Scale(ScaleArgs),
    /// What a lease cycle costs, and what it grows with.
    Lease(LeaseArgs),
    /// What the writer's flush costs, and what it sustains.
    Writer,
    /// How many instructions the decisions take; needs valgrind.
    Instructions,
    /// A part that is counted, started by `instructions`.
    #[command(hide = true)]
    InstructionsOnce(OnceArgs),
    /// Bare sessions at the broker, started by `scale`.
    #[command(hide = true)]
    BareSessions(SessionsArgs),
    /// A process of the limit, started by `own-time`.
    #[command(hide = true)]
    Raw(RawArgs),
    /// Takes what the limit's tasks write, started by `own-time`.
    #[command(hide = true)]
    RawSink {
        /// Where the bench listens for it.
        #[arg(long)]
        control: SocketAddr,
    },
}

fn main() -> ExitCode {
    let Args { what, json } = Args::parse();
    match what {
        What::OwnTime(args) => own_time::run(&args, json),
        What::Blocking => blocking::run(json),
        What::Scale(args) => scale::run(&args, json),
        What::Lease(args) => lease::run(&args, json),
        What::Writer => writer::run(json),
        What::Instructions => instructions::run(json),
        What::InstructionsOnce(args) => {
            instructions::run_once(args);
            ExitCode::SUCCESS
        }
        What::BareSessions(args) => {
            scale::run_sessions(&args);
            ExitCode::SUCCESS
        }
        What::Raw(raw) => {
            raw::run(raw);
            ExitCode::SUCCESS
        }
        What::RawSink { control } => {
            raw::run_sink(control);
            ExitCode::SUCCESS
        }
    }
}
