//! Passwords from a person: never from the arguments, which every user of the machine can read.

use super::CliError;
use crate::secret::Secret;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use zeroize::Zeroizing;

/// More than any password has; what is longer is refused by whoever takes it.
const INPUT_BYTES_MAX: u64 = 4_096;

/// A password from a file, or from stdin: at a terminal it is asked for twice and not shown.
pub(super) fn read(what: &str, file: Option<&Path>) -> Result<Secret, CliError> {
    let stdin = std::io::stdin();
    let text = match file {
        Some(path) => {
            let failed = |error| CliError::missing(path.display().to_string(), error);
            all_of(std::fs::File::open(path).map_err(failed)?).map_err(failed)?
        }
        None if stdin.is_terminal() => return ask_twice(what),
        None => all_of(stdin.lock())?,
    };
    // The end of the line is the file's, not the password's.
    Ok(Secret::new(
        text.strip_suffix('\n')
            .map_or(text.as_str(), |line| line.strip_suffix('\r').unwrap_or(line)),
    ))
}

fn all_of(from: impl Read) -> std::io::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    from.take(INPUT_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn ask_twice(what: &str) -> Result<Secret, CliError> {
    let first = ask(what)?;
    let second = ask(&format!("{what}, once more"))?;
    if first == second {
        Ok(first)
    } else {
        Err(CliError::Usage("the two are not the same".into()))
    }
}

fn ask(what: &str) -> Result<Secret, CliError> {
    let mut prompt = std::io::stderr();
    write!(prompt, "{what}: ")?;
    prompt.flush()?;
    let hidden = Hidden::begin()?;
    let mut line = Zeroizing::new(String::new());
    std::io::stdin().read_line(&mut line)?;
    drop(hidden);
    writeln!(prompt)?;
    Ok(Secret::new(line.trim_end_matches(['\r', '\n'])))
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
