//! What the broker does to its answers: the settings of its misbehaviour, in one place.
//!
//! Now: the answer delay and the token check. Comment limits and rewriting belong to an account
//! and stand in its declaration (`AccountDecl`).
//!
//! To come, each as one more field of `Settings` and one decision here: requotes, rejections by
//! class, a closed market, partial fills, an outcome that is never told, delay before delivery and
//! before acceptance, lists that are empty or partial after a login, and kicked sessions.

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
    /// Time from the arrival of an order to its answer. The order itself is carried out on arrival.
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
        if u128::from(answer_delay_ms) > ANSWER_DELAY_MAX.as_millis() {
            let text = format!("must be at most {} ms", ANSWER_DELAY_MAX.as_millis());
            return Err(FieldError::new("answer_delay_ms", answer_delay_ms, text));
        }
        Ok(Settings { answer_delay_ms, check_tokens })
    }

    /// Time from arrival to answer.
    pub fn answer_delay(self) -> Duration {
        Duration::from_millis(self.answer_delay_ms)
    }
}
