//! Metrics of gate, lease and uptime: one table, and the names for recording.
//!
//! Decides: names, units, labels, help and buckets of what these record.
//! In: nothing. Out: [`METRICS`], and [`names`] for the places that record. Descriptions, checks and
//! the page for people are made in [`crate::exporter`], from all tables.
//!
//! Invariants:
//! 1. A name is recorded only if it is in the table.
//! 2. Labels come from closed enums; no account, link, ticket, symbol or error text.
//! 3. Every histogram has buckets.

pub use bus::metrics::{Label, Metric, MetricKind};

use crate::gate::{Denied, RevokeReason};
use crate::lease::doubt::DatabaseDoubt;
use crate::lease::store::LeaseError;
use crate::lease::task::{CLAIM_KINDS, CONFIRMED};

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
    pub const LEASE_TRUST: &str = "lockstep_lease_trust_seconds";
    /// See [`super::METRICS`].
    pub const LEASE_CONFIRMED: &str = "lockstep_lease_confirmed_timestamp_seconds";
    /// See [`super::METRICS`].
    pub const LEASE_OWNED: &str = "lockstep_lease_owned_accounts";
    /// See [`super::METRICS`].
    pub const LEASE_UNOWNED: &str = "lockstep_lease_unowned_accounts";
    /// See [`super::METRICS`].
    pub const LEASE_UNOWNED_OLDEST: &str = "lockstep_lease_unowned_oldest_timestamp_seconds";
    /// See [`super::METRICS`].
    pub const LEASE_NODES: &str = "lockstep_lease_nodes";
    /// See [`super::METRICS`].
    pub const LEASE_ABANDONED: &str = "lockstep_lease_abandoned_total";
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
    pub const UPTIME_RECORDED: &str = "lockstep_uptime_recorded_total";
    /// See [`super::METRICS`].
    pub const UPTIME_DEGRADED: &str = "lockstep_uptime_degraded_total";
    /// See [`super::METRICS`].
    pub const LEASE_DATABASE_STEPS: &str = "lockstep_lease_database_steps_total";
}

use metrics::Unit;

/// The table.
pub const METRICS: &[Metric] = &[
    Metric::counter(
        names::UPTIME_RECORDED,
        &[Label::new("state", &[crate::uptime::STATES])],
        "Minutes of this process that were seen from end to end, or in which something was missing.",
    ),
    Metric::counter(
        names::UPTIME_DEGRADED,
        &[Label::new("reason", &[crate::uptime::Reason::WORDS])],
        "Degraded minutes by what was missing; one minute may have several reasons.",
    ),
    Metric::counter(
        names::GATE_DROPPED,
        &[Label::new("reason", &[Denied::WORDS])],
        "Orders and events that were not sent because the gate was closed.",
    ),
    Metric::counter(
        names::GATE_REVOCATIONS,
        &[Label::new("reason", &[RevokeReason::WORDS])],
        "Times that all permissions of the node were taken back at once.",
    ),
    Metric::counter(
        names::LEASE_CYCLES,
        &[Label::new("outcome", &[&[CONFIRMED], LeaseError::WORDS])],
        "Lease cycles by how they ended.",
    ),
    Metric::seconds(
        names::LEASE_CYCLE_DURATION,
        &[],
        "Time from the clock reading before a lease cycle to its commit.",
        &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0],
    ),
    Metric::gauge(
        names::LEASE_MARGIN,
        Unit::Seconds,
        &[],
        "Time that was left on the oldest held lease when the last cycle confirmed it.",
    ),
    Metric::gauge(
        names::LEASE_TRUST,
        Unit::Seconds,
        &[],
        "How long after the beginning of a confirmed lease cycle its leases are trusted: lease minus fence, as the node is set.",
    ),
    Metric::gauge(
        names::LEASE_CONFIRMED,
        Unit::Seconds,
        &[],
        "When the last lease cycle was confirmed, in seconds since 1970.",
    ),
    Metric::gauge(names::LEASE_OWNED, Unit::Count, &[], "Accounts this node owns."),
    Metric::gauge(
        names::LEASE_UNOWNED,
        Unit::Count,
        &[],
        "Enabled accounts of this node's platforms that nobody owns, or whose owner's lease ran out, counted up to 1000.",
    ),
    Metric::gauge(
        names::LEASE_UNOWNED_OLDEST,
        Unit::Seconds,
        &[],
        "Since when the one of these accounts that waits longest has had no owner; now where all have one.",
    ),
    Metric::gauge(
        names::LEASE_NODES,
        Unit::Count,
        &[],
        "Nodes that are alive and take accounts of this node's platforms, itself included.",
    ),
    Metric::counter(
        names::LEASE_ABANDONED,
        &[],
        "Accounts left to run out, because their session could not be kept or drained here.",
    ),
    Metric::counter(
        names::LEASE_CLAIMS,
        &[Label::new("kind", &[CLAIM_KINDS])],
        "Accounts claimed: free ones, and those of an owner whose lease ran out.",
    ),
    Metric::counter(
        names::LEASE_LOSSES,
        &[],
        "Accounts that were lost without having been released.",
    ),
    Metric::counter(names::LEASE_RELEASES, &[], "Accounts released after they were drained."),
    Metric::counter(
        names::LEASE_ROWS_LOCKED,
        &[],
        "Rows that a renewal skipped because somebody else held a lock on them.",
    ),
    Metric::flag(
        names::LEASE_CLAIMS_FROZEN,
        "1 while this node claims no expired rows because the database's time is in doubt.",
    ),
    Metric::counter(
        names::LEASE_DATABASE_STEPS,
        &[Label::new("kind", &[DatabaseDoubt::WORDS])],
        "Times that the database's time came in doubt: it stepped its clock (clock), another server answered (timeline), or this machine was held or set its clock together with it (own_clock).",
    ),
];
