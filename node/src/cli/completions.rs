//! `lockstep completions`: what a shell needs to complete the words of this program.

use super::{Cli, CliError, out};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

/// Arguments of `lockstep completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs `lockstep completions`.
pub fn run(args: CompletionsArgs) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "lockstep", &mut script);
    out::raw(&script)
}
