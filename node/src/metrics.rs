//! Every metric the node records, in one table.
//!
//! Decides: names, units, labels, help and buckets; `describe` and the README are made from it.
//! In: nothing. Out: [`METRICS`], [`describe`], and [`names`] for the places that record.
//!
//! Invariants:
//! 1. A name is recorded only if it is in the table.
//! 2. Labels come from closed enums; no account, link, ticket, symbol or error text.
//! 3. Every histogram has buckets.

pub use bus::metrics::{Metric, MetricKind};

/// Names of the metrics, for the places that record them.
pub mod names {
    /// See [`super::METRICS`].
    pub const GATE_DROPPED: &str = "lockstep_gate_dropped_total";
    /// See [`super::METRICS`].
    pub const GATE_REVOCATIONS: &str = "lockstep_gate_revocations_total";
    /// See [`super::METRICS`].
    pub const LEASE_CYCLES: &str = "lockstep_lease_cycles_total";
    /// See [`super::METRICS`].
    pub const LEASE_CYCLE_DURATION: &str = "lockstep_lease_cycle_duration_seconds";
    /// See [`super::METRICS`].
    pub const LEASE_MARGIN: &str = "lockstep_lease_margin_seconds";
    /// See [`super::METRICS`].
    pub const LEASE_CONFIRMED: &str = "lockstep_lease_confirmed_timestamp_seconds";
    /// See [`super::METRICS`].
    pub const LEASE_OWNED: &str = "lockstep_lease_owned_accounts";
    /// See [`super::METRICS`].
    pub const LEASE_UNOWNED: &str = "lockstep_lease_unowned_accounts";
    /// See [`super::METRICS`].
    pub const LEASE_CLAIMS: &str = "lockstep_lease_claims_total";
    /// See [`super::METRICS`].
    pub const LEASE_LOSSES: &str = "lockstep_lease_losses_total";
    /// See [`super::METRICS`].
    pub const LEASE_RELEASES: &str = "lockstep_lease_releases_total";
    /// See [`super::METRICS`].
    pub const LEASE_ROWS_LOCKED: &str = "lockstep_lease_rows_locked_total";
    /// See [`super::METRICS`].
    pub const LEASE_CLAIMS_FROZEN: &str = "lockstep_lease_claims_frozen";
    /// See [`super::METRICS`].
    pub const LEASE_DATABASE_STEPS: &str = "lockstep_lease_database_steps_total";
}

use MetricKind::{Counter, Gauge, Histogram};
use metrics::Unit::{Count, Seconds};

/// The table.
pub const METRICS: &[Metric] = &[
    Metric {
        name: names::GATE_DROPPED,
        kind: Counter,
        unit: Some(Count),
        labels: &["reason"],
        help: "Orders and events that were not sent because the gate was closed.",
        buckets: &[],
    },
    Metric {
        name: names::GATE_REVOCATIONS,
        kind: Counter,
        unit: Some(Count),
        labels: &["reason"],
        help: "Times that all permissions of the node were taken back at once.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_CYCLES,
        kind: Counter,
        unit: Some(Count),
        labels: &["outcome"],
        help: "Lease cycles by how they ended.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_CYCLE_DURATION,
        kind: Histogram,
        unit: Some(Seconds),
        labels: &[],
        help: "Time from the clock reading before a lease cycle to its commit.",
        buckets: &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0],
    },
    Metric {
        name: names::LEASE_MARGIN,
        kind: Gauge,
        unit: Some(Seconds),
        labels: &[],
        help: "Time that was left on the oldest held lease when the last cycle confirmed it.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_CONFIRMED,
        kind: Gauge,
        unit: Some(Seconds),
        labels: &[],
        help: "When the last lease cycle was confirmed, in seconds since 1970.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_OWNED,
        kind: Gauge,
        unit: Some(Count),
        labels: &[],
        help: "Accounts this node owns.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_UNOWNED,
        kind: Gauge,
        unit: Some(Count),
        labels: &[],
        help: "Enabled accounts of this node's platforms that nobody owns, counted up to 1000.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_CLAIMS,
        kind: Counter,
        unit: Some(Count),
        labels: &["kind"],
        help: "Accounts claimed: free ones, and those of an owner whose lease ran out.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_LOSSES,
        kind: Counter,
        unit: Some(Count),
        labels: &[],
        help: "Accounts that were lost without having been released.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_RELEASES,
        kind: Counter,
        unit: Some(Count),
        labels: &[],
        help: "Accounts released after they were drained.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_ROWS_LOCKED,
        kind: Counter,
        unit: Some(Count),
        labels: &[],
        help: "Rows that a renewal skipped because somebody else held a lock on them.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_CLAIMS_FROZEN,
        kind: Gauge,
        unit: None,
        labels: &[],
        help: "1 while this node claims no expired rows because the database's time is in doubt.",
        buckets: &[],
    },
    Metric {
        name: names::LEASE_DATABASE_STEPS,
        kind: Counter,
        unit: Some(Count),
        labels: &["kind"],
        help: "Times that the database stepped its clock or changed its timeline.",
        buckets: &[],
    },
];

/// Registers unit and help of every metric with the recorder.
pub fn describe() {
    for metric in METRICS {
        match (metric.kind, metric.unit) {
            (Counter, Some(unit)) => metrics::describe_counter!(metric.name, unit, metric.help),
            (Counter, None) => metrics::describe_counter!(metric.name, metric.help),
            (Gauge, Some(unit)) => metrics::describe_gauge!(metric.name, unit, metric.help),
            (Gauge, None) => metrics::describe_gauge!(metric.name, metric.help),
            (Histogram, Some(unit)) => metrics::describe_histogram!(metric.name, unit, metric.help),
            (Histogram, None) => metrics::describe_histogram!(metric.name, metric.help),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_follow_the_rules_and_are_there_once() {
        let mut seen = BTreeSet::new();
        for metric in METRICS {
            assert!(metric.name.starts_with("lockstep_"), "{}", metric.name);
            assert!(seen.insert(metric.name), "{} is there twice", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Counter, "{}", metric.name);
            assert_eq!(metric.buckets.is_empty(), metric.kind != Histogram, "{}", metric.name);
            assert!(metric.buckets.is_sorted(), "{}", metric.name);
            assert!(metric.help.ends_with('.'), "{}", metric.name);
        }
    }
}
