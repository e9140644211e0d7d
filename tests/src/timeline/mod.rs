//! The default timeline in real time: a node is cut from the database and keeps broker and bus.
//!
//! Inputs: nothing but the program and its defaults. Outputs: one table for each ending (another
//! node takes the accounts; nobody can) and one for the quick paths to a new owner, with what was expected and what was seen; as JSON too.
//!
//! Invariants:
//! 1. The lease, its cycle, fence, retry, settle time and limits are the defaults of the program.
//! 2. 0 is the instant of the cut node's last renewal, as the database wrote it; database, broker
//!    and nodes share one machine's wall clock.
//! 3. What became of a copy is judged from the broker's ledger; reasons come from the rows.
//!
//! Not covered: more than one fault at once; the tests and the simulation do that.

mod fates;
mod paths;
mod rows;
mod scene;

use crate::world::WORLDS_MAX;
use rows::Told;
use std::process::ExitCode;

/// How the story ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Another node takes the accounts over.
    Taken,
    /// There is no other node.
    Nobody,
}

impl Ending {
    fn title(self) -> &'static str {
        match self {
            Ending::Taken => "B takes the accounts over",
            Ending::Nobody => "nobody else is there",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Ending::Taken => "taken",
            Ending::Nobody => "nobody",
        }
    }
}

/// Plays both endings at once and prints what came of them.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "the verb's answer and its usage")]
pub fn main(arguments: &[String]) -> ExitCode {
    let json = match arguments {
        [] => false,
        [flag] if flag == "--json" => true,
        _ => {
            eprintln!("usage: ./run timeline [--json]; got {:?}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    const { assert!(WORLDS_MAX >= 2, "both endings run side by side") };
    eprintln!("timeline: three and a half minutes, in real time, with the default settings ...");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let told = runtime.block_on(async {
        let endings = tokio::join!(scene::play(Ending::Taken), scene::play(Ending::Nobody));
        [endings.0, endings.1, paths::play().await]
    });
    runtime.shutdown_background();
    let as_expected = told.iter().flat_map(|told| &told.rows).all(|row| row.ok);
    for told in &told {
        println!("{}", told.table());
    }
    if json {
        let endings: Vec<serde_json::Value> = told.iter().map(Told::json).collect();
        println!("{}", serde_json::json!({ "as_expected": as_expected, "endings": endings }));
    }
    if as_expected { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
