//! The writer of a process: the real queue and the real decisions, one statement at a time.

use crate::plan::MS;
use crate::world::{Who, World};
use lockstep::writer::batch::{Batch, Entry, Next, Queue, retry_delay};
use lockstep::writer::{Row, RowOutcome, WriteError};
use std::time::Duration;
use tokio::time::Instant;

const FLUSH: u64 = 100 * MS;

#[derive(Default)]
pub(crate) struct WriterState {
    pub(crate) queue: Queue,
    /// Number of the statement that is on its way, or was last.
    pub(crate) statement: u64,
    parts: Vec<Batch>,
    flying: Option<Batch>,
    failures: u32,
    not_before: u64,
    ticks: bool,
    /// Since when something has been waiting without a pause.
    pub(crate) waiting_since: Option<u64>,
}

impl World {
    /// The writer's clock: it only measures waits.
    fn instant(&self) -> Instant {
        Instant::from_std(self.base + Duration::from_micros(self.now))
    }
}

pub(crate) fn push(w: &mut World, who: Who, row: Row) {
    let (at, now) = (w.instant(), w.now);
    let writer = &mut w.process(who).writer;
    let _pushed = writer.queue.push(row, at);
    writer.waiting_since.get_or_insert(now);
    begin_ticking(w, who);
}

fn begin_ticking(w: &mut World, who: Who) {
    let writer = &mut w.process(who).writer;
    if !writer.ticks {
        writer.ticks = true;
        w.after(FLUSH, Some(who), move |w| tick(w, who));
    }
}

fn tick(w: &mut World, who: Who) {
    pump(w, who);
    let writer = &mut w.process(who).writer;
    writer.ticks = writer.queue.pending_of_all() > 0;
    if !writer.ticks {
        writer.waiting_since = None;
    }
    if writer.ticks {
        w.after(FLUSH, Some(who), move |w| tick(w, who));
    }
}

fn pump(w: &mut World, who: Who) {
    let (at, now) = (w.instant(), w.now);
    let process = w.process(who);
    let node_id = process.id.clone();
    let writer = &mut process.writer;
    if writer.flying.is_some() || now < writer.not_before {
        return;
    }
    if writer.parts.is_empty() {
        writer.parts.extend(writer.queue.take(at));
    }
    let Some(batch) = writer.parts.pop() else { return };
    writer.flying = Some(batch.clone());
    writer.statement += 1;
    crate::db::send_batch(w, who, node_id, batch);
}

/// The answer to a statement, or its end without one.
pub(crate) fn answered(
    w: &mut World,
    who: Who,
    statement: u64,
    result: Result<Vec<RowOutcome>, WriteError>,
) {
    let (at, now) = (w.instant(), w.now);
    let jitter = w.rng.unit();
    let writer = &mut w.process(who).writer;
    if writer.statement != statement {
        return;
    }
    let Some(batch) = writer.flying.take() else { return };
    let next = result.as_ref().err().map(|error| batch.on_refused(error));
    let mut left_out = 0;
    let mut dropped = Vec::new();
    match (result, next) {
        (Ok(outcomes), _) => {
            writer.failures = 0;
            for (entry, outcome) in batch.entries.into_iter().zip(outcomes) {
                if outcome == RowOutcome::Busy {
                    writer.queue.hold(entry, at, jitter);
                    continue;
                }
                writer.queue.settle(&entry.row);
                if matches!(outcome, RowOutcome::NotOwner | RowOutcome::Ended) {
                    left_out += 1;
                }
            }
        }
        (Err(_), Some(Next::SplitRows)) => {
            let (first, second) = batch.halves();
            writer.parts.push(second);
            writer.parts.push(first);
        }
        (Err(error), Some(Next::DropRow)) => {
            for entry in batch.entries {
                writer.queue.settle(&entry.row);
                dropped.push((format!("{:?}", entry.row), error.to_string()));
            }
        }
        (Err(_), Some(Next::HoldRow)) => {
            for entry in batch.entries {
                writer.queue.hold(entry, at, jitter);
            }
        }
        (Err(_), _) => {
            let parts = std::mem::take(&mut writer.parts);
            let entries: Vec<Entry> =
                parts.into_iter().chain([batch]).flat_map(|part| part.entries).collect();
            for entry in entries {
                writer.queue.put_back(entry);
            }
            writer.not_before = now + retry_delay(writer.failures, jitter).as_micros() as u64;
            writer.failures = writer.failures.saturating_add(1);
        }
    }
    for _ in 0..left_out {
        w.reach("row_left_out");
    }
    for (row, error) in dropped {
        crate::oracle::row_dropped(w, &row, &error);
    }
    begin_ticking(w, who);
    pump(w, who);
}
