//! Passwords from a person: never from the arguments, which every user of the machine can read.
//!
//! A terminal shows again what is typed once the question is over, also where Ctrl-C ends it.

use super::{CliError, told_to_end};
use crate::secret::Secret;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::time::Duration;
use zeroize::Zeroizing;

/// More than any password has; what is longer is refused by whoever takes it.
const INPUT_BYTES_MAX: u64 = 4_096;
/// Time between two looks for a line.
const LOOK: Duration = Duration::from_millis(50);

/// A password from a file, or from stdin: at a terminal it is asked for twice and not shown.
pub(super) async fn read(what: &str, file: Option<&Path>) -> Result<Secret, CliError> {
    let stdin = std::io::stdin();
    match file {
        Some(path) => of_file(path),
        None if stdin.is_terminal() => ask_twice(what).await,
        None => Ok(without_end(&all_of(stdin.lock())?)),
    }
}

/// A password from a file.
pub(super) fn of_file(path: &Path) -> Result<Secret, CliError> {
    let failed = |error| CliError::missing(path.display().to_string(), error);
    let text = all_of(std::fs::File::open(path).map_err(failed)?).map_err(failed)?;
    Ok(without_end(&text))
}

/// The end of the line is the file's, not the password's.
fn without_end(text: &str) -> Secret {
    let line = text.strip_suffix('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
    Secret::new(line.unwrap_or(text))
}

fn all_of(from: impl Read) -> std::io::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    from.take(INPUT_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

async fn ask_twice(what: &str) -> Result<Secret, CliError> {
    let first = ask(what).await?;
    let second = ask(&format!("{what}, once more")).await?;
    if first == second {
        Ok(first)
    } else {
        Err(CliError::Usage("the two are not the same".into()))
    }
}

async fn ask(what: &str) -> Result<Secret, CliError> {
    let mut prompt = std::io::stderr();
    write!(prompt, "{what}: ")?;
    prompt.flush()?;
    // A signal that ended the process by itself would leave the terminal as it is.
    let told_to_end = told_to_end()?;
    let hidden = Hidden::begin()?;
    let mut line = Zeroizing::new(String::new());
    let is_there = tokio::select! {
        biased;
        () = told_to_end => false,
        ready = line_is_there() => ready.map(|()| true)?,
    };
    if is_there {
        std::io::stdin().read_line(&mut line)?;
    }
    drop(hidden);
    writeln!(prompt)?;
    if !is_there {
        return Err(CliError::No(format!("{what}: not given, nothing was done")));
    }
    Ok(Secret::new(line.trim_end_matches(['\r', '\n'])))
}

/// Waits for a line, or the end of input: a terminal can be read once there is one, and a read takes one.
async fn line_is_there() -> std::io::Result<()> {
    let stdin = std::io::stdin();
    let at_once = Timespec::default();
    loop {
        let mut looked_at = [PollFd::new(&stdin, PollFlags::IN)];
        if poll(&mut looked_at, Some(&at_once))? > 0 {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The terminal shows nothing of what is typed while this lives.
struct Hidden(Termios);

impl Hidden {
    fn begin() -> std::io::Result<Self> {
        let before = tcgetattr(std::io::stdin())?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        tcsetattr(std::io::stdin(), OptionalActions::Flush, &quiet)?;
        Ok(Self(before))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // A terminal that is gone shows nothing either.
        let _gone = tcsetattr(std::io::stdin(), OptionalActions::Flush, &self.0);
    }
}
