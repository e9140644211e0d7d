//! What a person sees while the demo runs. Everything here goes to stderr; stdout is the verdict's.

use super::judge::Verdict;
use super::world::World;
use crate::cli::CliError;
use crate::cli::status;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sqlx::PgConnection;
use std::io::IsTerminal;
use std::sync::LazyLock;
use std::time::Duration;

/// How often the table is drawn.
pub(super) const EVERY: Duration = Duration::from_millis(1000);

static BAR: LazyLock<ProgressBar> = LazyLock::new(|| {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
        bar.set_style(style);
    }
    bar
});

/// One line about what happens now.
#[allow(clippy::print_stderr, reason = "progress for the person at the shell")]
pub(super) fn say(text: &str) {
    if std::io::stderr().is_terminal() {
        BAR.println(format!("· {text}"));
    } else {
        eprintln!("· {text}");
    }
}

/// The live table, on a terminal; a line now and then elsewhere.
pub(super) async fn show(
    db: &mut PgConnection,
    world: &World,
    at_step: usize,
    steps: usize,
    json: bool,
) -> Result<(), CliError> {
    if json && !std::io::stderr().is_terminal() {
        return Ok(());
    }
    let status = status::read(db).await?;
    let text = format!(
        "step {at_step} of {steps}, {} followers, node processes running: {}\n{}",
        world.followers.len(),
        world.nodes.iter().filter(|(_, node)| matches!(node.try_wait(), Ok(None))).count(),
        status::as_text(&status)
    );
    if std::io::stderr().is_terminal() {
        BAR.set_message(text);
        BAR.tick();
    } else if at_step > 0 {
        say(text.lines().next().unwrap_or_default());
    }
    Ok(())
}

/// The verdict as a person reads it.
pub(super) fn verdict_text(verdict: &Verdict, takeovers: u64, takeover_s: Option<f64>) -> String {
    BAR.finish_and_clear();
    let v = verdict;
    let took = takeover_s.map_or_else(String::new, |s| format!(" within {s:.1} s"));
    format!(
        "{} trades of the master, {} copies expected, {} made: {} missing, {} duplicates, \
         {} wrong volumes, {} left open.\n\
         {takeovers} followers were taken over{took}; {} more copies were not expected, because nobody owned \
         the follower when the trade was opened.",
        v.master_trades,
        v.expected_copies,
        v.copies,
        v.missing,
        v.duplicates,
        v.wrong_volume,
        v.left_open,
        v.excused_unowned,
    )
}
