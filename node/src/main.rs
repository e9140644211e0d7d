//! The `lockstep` process: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    lockstep::cli::main()
}
