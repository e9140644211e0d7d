//! `./run timeline`: what the default settings come to in real time when a node loses the database.

use lockstep_tests::timeline;

fn main() -> std::process::ExitCode {
    timeline::main(&std::env::args().skip(1).collect::<Vec<_>>())
}
