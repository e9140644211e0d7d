//! Showing something again and again, until somebody has seen enough.
//!
//! On a terminal the screen is drawn anew every second, and `q` or Ctrl-C ends it; the terminal is as
//! before afterwards, whatever happened. Elsewhere the text is printed every second until the reader
//! goes away or Ctrl-C.

use super::{CliError, out};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};
use std::io::IsTerminal;
use std::time::Duration;

/// Time between two pictures.
const EVERY: Duration = Duration::from_secs(1);
/// Time between two looks at the keyboard.
const KEYS_EVERY: Duration = Duration::from_millis(50);

/// Keys without echo and without waiting for the end of a line, until it is dropped.
struct Keys {
    before: Termios,
}

impl Keys {
    /// Nothing where stdin is no terminal.
    fn open() -> Option<Keys> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).ok()?;
        let mut now = before.clone();
        now.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        // A read takes what is there and never waits.
        now.special_codes[SpecialCodeIndex::VMIN] = 0;
        now.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(&stdin, OptionalActions::Now, &now).ok()?;
        Some(Keys { before })
    }

    fn wants_end(&self) -> bool {
        let mut pressed = [0; 16];
        let read = rustix::io::read(std::io::stdin(), &mut pressed).unwrap_or(0);
        pressed[..read].iter().any(|key| matches!(key, b'q' | b'Q'))
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // Nobody can do anything about a terminal that is gone.
        let _gone = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Takes the whole screen, and gives it back when it is dropped.
struct Screen;

impl Screen {
    fn open() -> Result<Screen, CliError> {
        out::raw(b"\x1b[?1049h\x1b[?25l")?;
        Ok(Screen)
    }

    /// Every line is cleared behind its end, and what was below: nothing flickers.
    fn draw(&self, text: &str, rows: usize) -> Result<(), CliError> {
        let lines: Vec<&str> = text.lines().take(rows.max(1)).collect();
        out::raw(format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n")).as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _gone = out::raw(b"\x1b[?25h\x1b[?1049l");
    }
}

fn rows() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    // Some terminals do not say, or say nothing.
    size.map(|size| usize::from(size.ws_row)).ok().filter(|rows| *rows > 0).unwrap_or(24)
}

/// Shows what `look` says until it is enough.
pub(super) async fn watch(
    mut look: impl AsyncFnMut() -> Result<String, CliError>,
) -> Result<(), CliError> {
    let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
    let screen = std::io::stdout().is_terminal().then(Screen::open).transpose()?;
    let keys = screen.as_ref().and_then(|_| Keys::open());
    let mut every = tokio::time::interval(EVERY);
    let mut key_look = tokio::time::interval(KEYS_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    key_look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            stopped = &mut interrupted => return Ok(stopped?),
            _ = key_look.tick(), if keys.is_some() => {
                if keys.as_ref().is_some_and(Keys::wants_end) {
                    return Ok(());
                }
            }
            _ = every.tick() => {
                let text = look().await?;
                match &screen {
                    Some(screen) => screen.draw(&format!("{text}\n\nq ends it"), rows())?,
                    None => out::line(text)?,
                }
            }
        }
    }
}
