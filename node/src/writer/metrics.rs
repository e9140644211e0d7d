//! Metrics of the writer: one table, and the calls that record them.

use super::RowOutcome;
use super::rows::RowKind;
use super::task::NEXT_WORDS;
use crate::metrics::{Label, Metric};
use metrics::Unit;
use std::time::Duration;

/// Rows that wait to be written.
pub const BACKLOG: &str = "lockstep_writer_backlog_rows";
/// Rows by what became of them.
pub const ROWS: &str = "lockstep_writer_rows_total";
/// From push to answer.
pub const ROW_WAIT: &str = "lockstep_writer_row_wait_seconds";
/// Statements sent.
pub const STATEMENTS_STARTED: &str = "lockstep_writer_statements_started_total";
/// Statements that ended.
pub const STATEMENTS_FINISHED: &str = "lockstep_writer_statements_finished_total";
/// Length of a statement.
pub const STATEMENT: &str = "lockstep_writer_statement_seconds";
/// 1 while the schema does not fit.
pub const DEPLOYMENT_FAULT: &str = "lockstep_writer_deployment_fault";

/// Which rows.
const KIND: Label = Label::new("kind", &[RowKind::WORDS]);

/// What the writer exports.
pub const METRICS: &[Metric] = &[
    Metric::gauge(
        BACKLOG,
        Unit::Count,
        &[KIND],
        "Rows that wait to be written, after the last round.",
    ),
    Metric::counter(
        ROWS,
        &[KIND, Label::new("outcome", &[RowEnd::WORDS])],
        "Rows that left the writer, by what became of them.",
    ),
    Metric::seconds(
        ROW_WAIT,
        &[KIND],
        "From the oldest change that a row stands for to the database's answer.",
        &[0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0],
    ),
    Metric::counter(STATEMENTS_STARTED, &[KIND], "Statements that the writer sent."),
    Metric::counter(
        STATEMENTS_FINISHED,
        &[KIND, Label::new("outcome", &[NEXT_WORDS])],
        "Statements that ended, by what the writer did next.",
    ),
    Metric::seconds(
        STATEMENT,
        &[KIND],
        "Length of a statement, connecting included.",
        &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0],
    ),
    Metric::flag(
        DEPLOYMENT_FAULT,
        "1 while the database refuses every row for a missing table, column or right.",
    ),
];

/// What became of a row; the values of the label `outcome` of [`ROWS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowEnd {
    /// The database answered with this.
    Answered(RowOutcome),
    /// A newer row made it needless.
    Coalesced,
    /// The database will never take it.
    Refused,
    /// There was no room.
    Full,
    /// It came after the shutdown.
    Late,
}

impl RowEnd {
    schemas::words! {
        /// The word used as a label.
        fn as_str(self) in WORDS {
            RowEnd::Answered(RowOutcome::Written) => "written",
            RowEnd::Answered(RowOutcome::Already) => "already",
            RowEnd::Answered(RowOutcome::NotOwner) => "not_owner",
            RowEnd::Answered(RowOutcome::Ended) => "ended",
            RowEnd::Answered(RowOutcome::Busy) => "busy",
            RowEnd::Coalesced => "coalesced",
            RowEnd::Refused => "refused",
            RowEnd::Full => "full",
            RowEnd::Late => "late",
        }
    }
}

pub(crate) fn row(kind: RowKind, end: RowEnd) {
    metrics::counter!(ROWS, "kind" => kind.as_str(), "outcome" => end.as_str()).increment(1);
}

pub(crate) fn row_waited(kind: RowKind, waited: Duration) {
    metrics::histogram!(ROW_WAIT, "kind" => kind.as_str()).record(waited.as_secs_f64());
}

pub(crate) fn backlog(kind: RowKind, rows: usize) {
    metrics::gauge!(BACKLOG, "kind" => kind.as_str()).set(rows as f64);
}

pub(crate) fn statement_started(kind: RowKind) {
    metrics::counter!(STATEMENTS_STARTED, "kind" => kind.as_str()).increment(1);
}

pub(crate) fn statement_finished(kind: RowKind, outcome: &'static str, took: Duration) {
    metrics::counter!(STATEMENTS_FINISHED, "kind" => kind.as_str(), "outcome" => outcome)
        .increment(1);
    metrics::histogram!(STATEMENT, "kind" => kind.as_str()).record(took.as_secs_f64());
}

pub(crate) fn deployment_fault(is_on: bool) {
    metrics::gauge!(DEPLOYMENT_FAULT).set(if is_on { 1.0 } else { 0.0 });
}
