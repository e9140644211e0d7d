//! What holds for every order, and can be changed while the broker runs.

use crate::protocol::FieldError;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The delay that holds when nothing is said: a usual retail broker's answer time. Chosen.
pub const ANSWER_DELAY_DEFAULT: Duration = Duration::from_millis(130);
/// Longest delay that can be set.
pub const ANSWER_DELAY_MAX: Duration = Duration::from_secs(60);
/// What holds for every order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Time from carrying an order out to its answer.
    pub answer_delay_ms: u64,
    /// Whether an order with a lower token than the account has seen is refused.
    pub check_tokens: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let answer_delay_ms = ANSWER_DELAY_DEFAULT.as_millis() as u64;
        Self { answer_delay_ms, check_tokens: false }
    }
}

/// What to change; absent keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SettingsChange {
    /// New answer delay.
    pub answer_delay_ms: Option<u64>,
    /// New token check.
    pub check_tokens: Option<bool>,
}

impl Settings {
    /// The settings after a change.
    pub fn changed(self, change: SettingsChange) -> Result<Settings, FieldError> {
        let answer_delay_ms = change.answer_delay_ms.unwrap_or(self.answer_delay_ms);
        let check_tokens = change.check_tokens.unwrap_or(self.check_tokens);
        check_ms("answer_delay_ms", answer_delay_ms)?;
        Ok(Settings { answer_delay_ms, check_tokens })
    }

    /// Time from carrying out to answer.
    pub fn answer_delay(self) -> Duration {
        Duration::from_millis(self.answer_delay_ms)
    }
}

/// Refuses a time above the longest one.
pub(crate) fn check_ms(field: &str, ms: u64) -> Result<(), FieldError> {
    if u128::from(ms) > ANSWER_DELAY_MAX.as_millis() {
        let text = format!("must be at most {} ms", ANSWER_DELAY_MAX.as_millis());
        return Err(FieldError::new(field, ms, text));
    }
    Ok(())
}
