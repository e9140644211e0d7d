//! Showing something again and again, until somebody has seen enough.
//!
//! On a terminal the screen is drawn anew every second, and `q` or Ctrl-C ends it; the terminal is as
//! before afterwards, whatever happened. Elsewhere the text is printed every second until the reader
//! goes away or Ctrl-C.
//!
//! What cannot be seen for a while is no end of it: the screen says so, keeps the last picture with its
//! age, and looks again after [`wait_after`]. [`Picture`] is pure.

use super::{CliError, out, told_to_end};
use crate::causes::with_causes;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};
use std::io::{ErrorKind, IsTerminal};
use std::time::Duration;
use tokio::time::Instant;

/// Time between two pictures.
const EVERY: Duration = Duration::from_secs(1);
/// Time between two looks at the keyboard.
const KEYS_EVERY: Duration = Duration::from_millis(50);
/// Longest look; what takes longer has failed.
pub(super) const LOOK_LIMIT: Duration = Duration::from_secs(15);
/// Longest wait after looks that failed.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// How long to wait after so many looks in a row that failed: 1 s, doubling up to 10 s.
pub(super) fn wait_after(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(10);
    (EVERY * 2_u32.pow(doublings)).min(WAIT_MAX)
}

/// What a look that took too long has come to.
pub(super) fn too_long() -> CliError {
    let what = format!("no answer within {LOOK_LIMIT:?}");
    CliError::missing("database", std::io::Error::new(ErrorKind::TimedOut, what))
}

/// What the screen shows.
#[derive(Debug, Default)]
struct Picture {
    last: Option<(String, Instant)>,
    away: Option<Away>,
}

#[derive(Debug)]
struct Away {
    since: Instant,
    failures: u32,
    why: String,
    next: Instant,
}

impl Picture {
    /// Takes what a look came to; when to look again.
    ///
    /// Errors: what looking again does not cure.
    fn take(
        &mut self,
        looked: Result<String, CliError>,
        now: Instant,
    ) -> Result<Instant, CliError> {
        match looked {
            Ok(text) => {
                self.last = Some((text, now));
                self.away = None;
                Ok(now + EVERY)
            }
            Err(error @ CliError::Missing { .. }) => {
                let (since, failures) =
                    self.away.as_ref().map_or((now, 0), |away| (away.since, away.failures));
                let next = now + wait_after(failures + 1);
                let why = with_causes(&error);
                self.away = Some(Away { since, failures: failures + 1, why, next });
                Ok(next)
            }
            Err(other) => Err(other),
        }
    }

    /// What is wrong now; nothing while nothing is.
    fn banner(&self, now: Instant) -> Option<String> {
        let Away { since, why, next, .. } = self.away.as_ref()?;
        let for_s = now.duration_since(*since).as_secs();
        let again = next.saturating_duration_since(now).as_secs_f64().ceil();
        Some(format!("{why}; away for {for_s} s, looking again in {again:.0} s"))
    }

    fn text(&self, now: Instant) -> String {
        let Some(banner) = self.banner(now) else {
            return self.last.as_ref().map_or_else(String::new, |(text, _)| text.clone());
        };
        let Some((text, at)) = &self.last else { return banner };
        let age = now.duration_since(*at).as_secs();
        format!("{banner}\nOLD, as it was {age} s ago:\n\n{text}")
    }
}

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

/// Ends when somebody has seen enough: a key, or a signal.
async fn enough(told_to_end: impl Future<Output = ()>, keys: Option<&Keys>) {
    let pressed = async {
        let Some(keys) = keys else { return std::future::pending().await };
        let mut every = tokio::time::interval(KEYS_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            if keys.wants_end() {
                return;
            }
        }
    };
    tokio::select! {
        () = told_to_end => {}
        () = pressed => {}
    }
}

/// Shows what `look` says until it is enough.
pub(super) async fn watch(
    look: impl AsyncFnMut() -> Result<String, CliError>,
) -> Result<(), CliError> {
    let told_to_end = told_to_end()?;
    let screen = std::io::stdout().is_terminal().then(Screen::open).transpose()?;
    let keys = screen.as_ref().and_then(|_| Keys::open());
    let draw = |picture: &Picture, now: Instant, is_new: bool| match &screen {
        Some(screen) => screen.draw(&format!("{}\n\nq ends it", picture.text(now)), rows()),
        // An old picture is not printed again.
        None if is_new => out::line(picture.banner(now).unwrap_or_else(|| picture.text(now))),
        None => Ok(()),
    };
    tokio::select! {
        biased;
        () = enough(told_to_end, keys.as_ref()) => Ok(()),
        failed = look_on(look, draw) => failed,
    }
}

/// Looks and draws for ever; `draw` also hears whether the picture is a new one.
async fn look_on(
    mut look: impl AsyncFnMut() -> Result<String, CliError>,
    draw: impl Fn(&Picture, Instant, bool) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let mut picture = Picture::default();
    loop {
        let looked = tokio::time::timeout(LOOK_LIMIT, look()).await;
        let next = picture.take(looked.unwrap_or_else(|_| Err(too_long())), Instant::now())?;
        draw(&picture, Instant::now(), true)?;
        while Instant::now() + EVERY < next {
            tokio::time::sleep(EVERY).await;
            draw(&picture, Instant::now(), false)?;
        }
        tokio::time::sleep_until(next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    fn gone() -> CliError {
        CliError::missing("database", std::io::Error::from(ErrorKind::ConnectionRefused))
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_fails_keeps_the_last_picture_as_old_until_one_succeeds() {
        let looks = Cell::new(0);
        let drawn = RefCell::new(Vec::new());
        let look = async || {
            looks.set(looks.get() + 1);
            match looks.get() {
                1 => Ok("the first table".to_owned()),
                2 => Err(gone()),
                // A server that is there and says nothing.
                3 => std::future::pending().await,
                4 => Err(gone()),
                _ => Ok("the second table".to_owned()),
            }
        };
        let ended = look_on(look, |picture, now, _| {
            drawn.borrow_mut().push(picture.text(now));
            let is_back = drawn.borrow().last().is_some_and(|text| text == "the second table");
            if is_back { Err(CliError::NobodyReads) } else { Ok(()) }
        });
        assert!(matches!(ended.await, Err(CliError::NobodyReads)));
        let drawn = drawn.into_inner();
        assert_eq!(drawn[0], "the first table");
        for text in &drawn[1..drawn.len() - 1] {
            assert!(text.starts_with("database: "), "{text}");
            assert!(
                text.contains("OLD, as it was ") && text.ends_with("the first table"),
                "{text}"
            );
        }
        let last = &drawn[drawn.len() - 2];
        // One second, the look that took too long, two more, and four until the next.
        assert!(last.contains("as it was 22 s ago") && last.contains("again in 1 s"), "{last}");
        assert!(drawn.iter().any(|text| text.contains("no answer within 15s")), "{drawn:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_looking_again_does_not_cure_ends_it() {
        let look = async || Err(CliError::Usage("LOCKSTEP_LEASE=60 needs a unit".into()));
        assert!(matches!(look_on(look, |_, _, _| Ok(())).await, Err(CliError::Usage(_))));
    }

    #[test]
    fn the_wait_between_looks_that_fail_is_bounded() {
        let waits: Vec<u64> = (1..=6).map(|failures| wait_after(failures).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 10, 10]);
        assert_eq!(wait_after(u32::MAX), WAIT_MAX);
    }
}
