//! Plays a recorded history as a master, through the same publisher as every master.
//!
//! Inputs: the steps of a timeline, a speed, a publisher, and, where the followers are at a
//! paper broker, its driver, which is fed the prices of the steps. Outputs: events on the bus,
//! and each change with the instant at which it was handed over.
//!
//! Invariants:
//! 1. Steps come in the order of the timeline, at their offsets divided by the speed; steps of
//!    one offset are one burst, handed over without a wait in between.
//! 2. A trade's `opened_at` is the instant at which it is played: to its followers it is new.
//! 3. The price of a step is at the broker before its event is on the bus, or there is none.

use crate::history::Step;
use bus::{BusError, PublisherHandle};
use paper::protocol::FeedQuote;
use paper::{PaperDriver, PaperError};
use schemas::{Book, Change, Micros, Price, Symbol};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Most seconds without a step: longer pauses of a history are cut to it, after scaling.
pub const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Why a history cannot be played on.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    /// The bus does not take events: the publisher was superseded or has ended.
    #[error("bus")]
    Bus(#[from] BusError),
    /// The paper broker does not take quotes.
    #[error("paper broker")]
    Broker(#[from] PaperError),
}

/// Plays timelines.
pub struct Player<'a> {
    /// The master's publisher; its base state must have been observed.
    pub publisher: &'a PublisherHandle,
    /// Where prices are fed, if anywhere.
    pub driver: Option<&'a PaperDriver>,
    /// Seconds of the history in one second.
    pub speed: f64,
    /// The wall clock.
    pub now: &'a (dyn Fn() -> Micros + Sync),
}

impl std::fmt::Debug for Player<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Player").field("speed", &self.speed).finish_non_exhaustive()
    }
}

/// The instants of a timeline on the player's own clock, from its start.
pub fn schedule(steps: &[Step], speed: f64) -> Vec<Duration> {
    let mut at = Duration::ZERO;
    let mut last_us = 0;
    steps
        .iter()
        .map(|step| {
            let wait = (step.offset_us - last_us) as f64 / 1e6 / speed;
            last_us = step.offset_us;
            at += Duration::try_from_secs_f64(wait).unwrap_or(PAUSE_MAX).min(PAUSE_MAX);
            at
        })
        .collect()
}

impl Player<'_> {
    /// Plays a timeline from its first step to its last. `played` hears of every change as it is
    /// handed over.
    pub async fn play(
        &self,
        steps: &[Step],
        mut played: impl FnMut(usize, Micros, &Change) + Send,
    ) -> Result<(), PlayError> {
        let schedule = schedule(steps, self.speed);
        let start = Instant::now();
        let mut opened: BTreeMap<schemas::MasterTicket, Micros> = BTreeMap::new();
        let mut next = 0;
        while next < steps.len() {
            let end = burst_end(&schedule, next);
            tokio::time::sleep_until(start + schedule[next]).await;
            self.feed(&steps[next..end]).await?;
            let mut changes = Vec::new();
            let at = (self.now)();
            for step in &steps[next..end] {
                let ticket = step.change.ticket();
                let begins = matches!(
                    step.change,
                    Change::PositionOpened(_) | Change::PendingPlaced(_) | Change::PendingFilled(_)
                );
                let stamp = if begins { at } else { *opened.get(&ticket).unwrap_or(&at) };
                opened.insert(ticket, stamp);
                changes.push(step.restamped(|_| stamp));
            }
            self.publisher.publish(at, changes.clone())?;
            for (offset, change) in changes.iter().enumerate() {
                played(next + offset, at, change);
            }
            next = end;
        }
        Ok(())
    }

    async fn feed(&self, burst: &[Step]) -> Result<(), PlayError> {
        let Some(driver) = self.driver else { return Ok(()) };
        let mut quotes: BTreeMap<&Symbol, Price> = BTreeMap::new();
        for (symbol, price) in burst.iter().filter_map(|step| step.quote.as_ref()) {
            quotes.insert(symbol, *price);
        }
        if !quotes.is_empty() {
            let quotes = quotes
                .into_iter()
                .map(|(symbol, price)| FeedQuote { symbol: symbol.clone(), bid: price, ask: price })
                .collect();
            driver.feed(quotes).await?;
        }
        Ok(())
    }
}

/// The first step after the burst that begins at `next`.
fn burst_end(schedule: &[Duration], next: usize) -> usize {
    let burst = schedule[next..].iter().take_while(|at| **at == schedule[next]).count();
    next + burst
}

/// What a master holds before the first step: nothing.
pub fn base() -> Book {
    Book::default()
}
