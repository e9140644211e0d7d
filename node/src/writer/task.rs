//! The writer's loop: takes batches, sends them, does what `batch` decides.
//!
//! One task, on the runtime for slow work; one statement at a time. A batch that is being sent
//! belongs to the loop and goes back into the queue unless the database judged it.

use super::batch::{Batch, Entry, Next, Pushed, retry_delay};
use super::error::WriteError;
use super::metrics::{self, RowEnd};
use super::recent::Recent;
use super::rows::RowKind;
use super::{RowOutcome, RowSink, Shared};
use crate::causes::with_causes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

/// Batches sent between two looks at the clock and the shutdown: 5,000 rows.
const BATCHES_PER_ROUND_MAX: usize = 10;
/// How often partitions are made ahead.
const PREPARE_EVERY: Duration = Duration::from_secs(12 * 3600);
/// After a failure to make them; until then the default partition takes the rows.
const PREPARE_RETRY: Duration = Duration::from_secs(60);

/// Settings of the writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriterConfig {
    /// Time between two flushes. Default 100 ms: long enough to make batches, short enough for
    /// an operator who looks at a table.
    pub flush_every: Duration,
}

impl Default for WriterConfig {
    fn default() -> Self {
        Self { flush_every: Duration::from_millis(100) }
    }
}

/// The part of a writer that writes.
#[derive(Debug)]
pub struct WriterTask {
    shared: Arc<Shared>,
    progress: watch::Sender<u64>,
    shutdown: watch::Receiver<Option<Instant>>,
    config: WriterConfig,
    /// Failures in a row of the database as a whole.
    failures: u32,
    not_before: Instant,
    has_deployment_fault: bool,
    recent: Recent,
}

impl WriterTask {
    pub(super) fn new(
        shared: Arc<Shared>,
        progress: watch::Sender<u64>,
        shutdown: watch::Receiver<Option<Instant>>,
        config: WriterConfig,
    ) -> Self {
        let not_before = Instant::now();
        Self {
            shared,
            progress,
            shutdown,
            config,
            failures: 0,
            not_before,
            has_deployment_fault: false,
            recent: Recent::default(),
        }
    }

    /// Runs until the shutdown, or until every handle is dropped and nothing waits.
    pub async fn run<S: RowSink>(mut self, sink: Arc<S>) {
        let mut tick = tokio::time::interval(self.config.flush_every.max(Duration::from_millis(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut prepare_at = Instant::now();
        while !self.is_done() {
            let mut shutdown = self.shutdown.clone();
            tokio::select! {
                biased;
                () = self.shared.wake.notified() => {}
                _ = tick.tick() => {}
                // Seen, it is looked at by `is_done`; with no handle left the tick goes on alone.
                Ok(()) = shutdown.changed() => { self.shutdown.mark_unchanged(); }
            }
            if Instant::now() < self.not_before {
                continue;
            }
            if self.round(&*sink).await && prepare_at <= Instant::now() && !self.is_stopping() {
                let mut shutdown = self.shutdown.clone();
                let wait = tokio::select! {
                    wait = prepare(&*sink) => wait,
                    Ok(()) = shutdown.changed() => PREPARE_RETRY,
                };
                prepare_at = Instant::now() + wait;
            }
        }
        self.report_end();
    }

    fn is_stopping(&self) -> bool {
        self.shutdown.borrow().is_some() || self.shutdown.has_changed().is_err()
    }

    fn is_done(&self) -> bool {
        let is_late = self.shutdown.borrow().is_some_and(|deadline| deadline <= Instant::now());
        is_late || (self.is_stopping() && self.shared.queue.lock().pending_of_all() == 0)
    }

    /// Sends what waits; false if the database could not be used.
    async fn round<S: RowSink>(&mut self, sink: &S) -> bool {
        let mut is_well = true;
        for _ in 0..BATCHES_PER_ROUND_MAX {
            let batch = self.shared.queue.lock().take(Instant::now());
            let Some(batch) = batch else { break };
            is_well = self.write(sink, batch).await;
            self.progress.send_modify(|rounds| *rounds += 1);
            if !is_well {
                break;
            }
        }
        let queue = self.shared.queue.lock();
        for kind in RowKind::ALL {
            metrics::backlog(kind, queue.waiting(kind));
        }
        is_well
    }

    /// Sends one batch, in parts if it has to be; false if the database could not be used.
    async fn write<S: RowSink>(&mut self, sink: &S, batch: Batch) -> bool {
        let mut parts = vec![batch];
        while let Some(part) = parts.pop() {
            let (result, took) = self.send(sink, &part).await;
            let next = result.as_ref().err().map(|error| part.on_refused(error));
            metrics::statement_finished(part.kind(), word(next), took);
            match (result, next) {
                (Ok(outcomes), _) => {
                    self.is_well_again();
                    self.write_again(sink.timeline());
                    self.settle(part, outcomes);
                }
                (Err(_), Some(Next::SplitRows)) => {
                    let (first, second) = part.halves();
                    parts.push(second);
                    parts.push(first);
                }
                (Err(error), Some(Next::DropRow)) => self.drop_rows(part, &error),
                (Err(error), Some(Next::HoldRow)) => self.hold_rows(part, &error),
                (Err(error), next) => {
                    parts.push(part);
                    self.back_off(parts, &error, next == Some(Next::KeepAndAlarm));
                    return false;
                }
            }
        }
        true
    }

    async fn send<S: RowSink>(
        &self,
        sink: &S,
        batch: &Batch,
    ) -> (Result<Vec<RowOutcome>, WriteError>, Duration) {
        metrics::statement_started(batch.kind());
        let started = Instant::now();
        let result = tokio::select! {
            biased;
            result = sink.persist(batch) => result,
            () = deadline_of(self.shutdown.clone()) => {
                Err(WriteError::TimedOut { limit: started.elapsed() })
            }
        };
        (result, started.elapsed())
    }

    /// Puts back what the server may have lost with its predecessor.
    fn write_again(&mut self, timeline: Option<u32>) {
        let lost = self.recent.lost(timeline);
        if lost.is_empty() {
            return;
        }
        tracing::warn!(
            ?timeline,
            rows = lost.len(),
            "another database server: recent rows are written again"
        );
        let now = Instant::now();
        let mut queue = self.shared.queue.lock();
        for row in lost {
            if let Pushed::Full(row) = queue.push(row, now) {
                metrics::row(row.kind(), RowEnd::Full);
            }
        }
    }

    fn settle(&mut self, batch: Batch, outcomes: Vec<RowOutcome>) {
        let kind = batch.kind();
        assert_eq!(batch.len(), outcomes.len(), "a sink answers for every row");
        let now = Instant::now();
        let mut queue = self.shared.queue.lock();
        let mut left_out = Vec::new();
        for (entry, outcome) in batch.entries.into_iter().zip(outcomes) {
            if outcome == RowOutcome::Busy {
                queue.hold(entry, now, fastrand::f64());
                continue;
            }
            queue.settle(&entry.row);
            metrics::row(kind, RowEnd::Answered(outcome));
            metrics::row_waited(kind, now - entry.since);
            if matches!(outcome, RowOutcome::NotOwner | RowOutcome::Ended) {
                left_out.push((entry, outcome));
            } else {
                self.recent.keep(entry.row, now);
            }
        }
        drop(queue);
        for (Entry { row, .. }, outcome) in left_out {
            tracing::warn!(?row, outcome = outcome.as_str(), "row is left out");
        }
    }

    fn drop_rows(&self, batch: Batch, error: &WriteError) {
        let kind = batch.kind();
        for entry in batch.entries {
            tracing::error!(row = ?entry.row, error = %with_causes(error), "row is refused and dropped");
            metrics::row(kind, RowEnd::Refused);
            self.shared.queue.lock().settle(&entry.row);
        }
    }

    fn hold_rows(&self, batch: Batch, error: &WriteError) {
        for entry in batch.entries {
            tracing::warn!(row = ?entry.row, error = %with_causes(error), attempts = entry.attempts, "row has to wait");
            self.shared.queue.lock().hold(entry, Instant::now(), fastrand::f64());
        }
    }

    fn back_off(&mut self, parts: Vec<Batch>, error: &WriteError, is_deployment: bool) {
        let mut queue = self.shared.queue.lock();
        for entry in parts.into_iter().flat_map(|part| part.entries) {
            queue.put_back(entry);
        }
        let rows = queue.pending_of_all();
        drop(queue);
        if is_deployment && !self.has_deployment_fault {
            tracing::error!(error = %with_causes(error), rows, "database does not fit this program, rows are kept");
        } else if self.failures == 0 {
            tracing::warn!(error = %with_causes(error), rows, "database takes no rows, they are kept");
        }
        self.has_deployment_fault = is_deployment;
        metrics::deployment_fault(is_deployment);
        self.not_before = Instant::now() + retry_delay(self.failures, fastrand::f64());
        self.failures = self.failures.saturating_add(1);
    }

    fn is_well_again(&mut self) {
        if self.failures > 0 {
            tracing::info!(failures = self.failures, "database takes rows again");
        }
        metrics::deployment_fault(false);
        self.failures = 0;
        self.has_deployment_fault = false;
    }

    fn report_end(&self) {
        let rows = self.shared.queue.lock().pending_of_all();
        if rows > 0 {
            tracing::error!(rows, "writer ends with rows that were not written");
        }
    }
}

/// How long to wait before the next time.
async fn prepare<S: RowSink>(sink: &S) -> Duration {
    match sink.prepare().await {
        Ok(()) => PREPARE_EVERY,
        Err(error) => {
            tracing::warn!(error = %with_causes(&error), "partitions of copy events are not made ahead");
            PREPARE_RETRY
        }
    }
}

schemas::words! {
    /// The label of a statement's end.
    pub(super) fn word(next: Option<Next>) in NEXT_WORDS {
        None => "done",
        Some(Next::SplitRows) => "split",
        Some(Next::DropRow) => "drop",
        Some(Next::HoldRow) => "hold",
        Some(Next::RetryLater) => "retry",
        Some(Next::KeepAndAlarm) => "alarm",
    }
}

/// Ends when a shutdown was asked for and its time is over.
async fn deadline_of(mut shutdown: watch::Receiver<Option<Instant>>) {
    let deadline = match shutdown.wait_for(Option::is_some).await {
        Ok(set) => *set,
        Err(_) => None,
    };
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
