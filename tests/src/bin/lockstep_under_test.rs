//! The program `lockstep`, built with the tests that start it.

fn main() -> std::process::ExitCode {
    lockstep::cli::main()
}
