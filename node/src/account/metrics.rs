//! Metrics of accounts, followers and broker calls: one table, and the names for recording.

use super::manager::TENURE_KINDS;
use super::session::Ended;
use crate::broker::Outcome;
use crate::follower::Reason;
use crate::metrics::{Label, Metric};
use crate::writer::EventOutcome;
use metrics::{Counter, Histogram, Unit};
use reconcile::{CopyStep, SkipReason};
use schemas::OrderRequest;
use std::time::Duration;

/// Names of the metrics, for the places that record them.
pub mod names {
    /// Sessions open at brokers.
    pub const SESSIONS_OPEN: &str = "lockstep_broker_sessions_open";
    /// Sessions that could not be opened.
    pub const SESSION_OPEN_FAILURES: &str = "lockstep_broker_session_open_failures_total";
    /// Orders handed to brokers.
    pub const BROKER_CALLS_STARTED: &str = "lockstep_broker_calls_started_total";
    /// Orders answered.
    pub const BROKER_CALLS_FINISHED: &str = "lockstep_broker_calls_finished_total";
    /// Threads made for broker calls that hold one.
    pub const BROKER_THREADS: &str = "lockstep_broker_threads_started_total";
    /// Own time.
    pub const OWN_TIME: &str = "lockstep_copy_own_time_seconds";
    /// From a node to a follower's turn.
    pub const TURN_WAIT: &str = "lockstep_copy_turn_wait_seconds";
    /// From a session to a thread.
    pub const THREAD_WAIT: &str = "lockstep_broker_thread_wait_seconds";
    /// What was done for followers.
    pub const COPIES: &str = "lockstep_copy_actions_total";
    /// What was decided not to be copied.
    pub const SKIPS: &str = "lockstep_copy_skips_total";
    /// Reconciles.
    pub const RECONCILES: &str = "lockstep_reconciles_total";
    /// What they did.
    pub const RECONCILE_ACTIONS: &str = "lockstep_reconcile_actions_total";
    /// Plans held for a second look.
    pub const RECONCILE_HELD: &str = "lockstep_reconcile_held_total";
    /// Links whose plans do not come to rest.
    pub const RECONCILE_RESTLESS: &str = "lockstep_reconcile_restless_total";
    /// Links whose broker does not keep our tags.
    pub const LINKS_UNTAGGABLE: &str = "lockstep_links_untaggable";
    /// Links that are paused.
    pub const LINKS_PAUSED: &str = "lockstep_links_paused";
    /// Links that only close.
    pub const LINKS_CLOSE_ONLY: &str = "lockstep_links_close_only";
    /// Second copies found.
    pub const DUPLICATES_FOUND: &str = "lockstep_duplicates_found_total";
    /// Tenures begun.
    pub const TENURES: &str = "lockstep_tenures_begun_total";
    /// Tenures ended.
    pub const TENURES_ENDED: &str = "lockstep_tenures_ended_total";
}

/// Platforms that this program has, as they are in the accounts' rows.
const PLATFORMS: &[&str] = &[PAPER];
const PAPER: &str = "paper";

/// What an order asks for.
const ORDER_ACTION: Label = Label::new("action", &[OrderRequest::ACTIONS]);

/// Hand-offs inside a process: 20 us to 2 s.
const WAIT_BUCKETS: &[f64] = &[
    0.000_02, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5,
    2.0,
];

/// What accounts export.
pub const METRICS: &[Metric] = &[
    Metric::gauge(
        names::SESSIONS_OPEN,
        Unit::Count,
        &[],
        "Sessions of this node that are open and synced at their brokers.",
    ),
    Metric::counter(
        names::SESSION_OPEN_FAILURES,
        &[],
        "Times that a session at a broker could not be opened; each is tried again.",
    ),
    Metric::counter(names::BROKER_CALLS_STARTED, &[ORDER_ACTION], "Orders handed to brokers."),
    Metric::counter(
        names::BROKER_CALLS_FINISHED,
        &[Label::new("outcome", &[Outcome::WORDS])],
        "Orders answered, or given up as unknown.",
    ),
    Metric::counter(
        names::BROKER_THREADS,
        &[],
        "Threads made for broker calls that hold one: all of them at the start, none in a burst.",
    ),
    Metric::seconds(
        names::OWN_TIME,
        &[Label::new("platform", &[PLATFORMS]), ORDER_ACTION],
        "From the master's callback to the instruction before the follower's order call.",
        &[
            0.0001, 0.000_25, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1,
            0.25, 0.5, 1.0,
        ],
    ),
    Metric::seconds(
        names::TURN_WAIT,
        &[],
        "From the arrival of a master's event at a node to its follower's turn; of events that are taken up together, the first.",
        WAIT_BUCKETS,
    ),
    Metric::seconds(
        names::THREAD_WAIT,
        &[],
        "From handing over a broker call that holds a thread to its begin on one.",
        WAIT_BUCKETS,
    ),
    Metric::counter(
        names::COPIES,
        &[Label::new("action", &[CopyStep::WORDS]), Label::new("outcome", &[EventOutcome::WORDS])],
        "What was done for followers, by how it ended.",
    ),
    Metric::counter(
        names::SKIPS,
        &[Label::new("reason", &[SkipReason::WORDS])],
        "Trades that were decided not to be copied.",
    ),
    Metric::counter(
        names::RECONCILES,
        &[Label::new("reason", &[Reason::WORDS])],
        "Plans made from complete reads.",
    ),
    Metric::counter(
        names::RECONCILE_ACTIONS,
        &[Label::new("action", &[CopyStep::WORDS])],
        "Steps that plans decided.",
    ),
    Metric::counter(names::RECONCILE_HELD, &[], "Plans held for a second, fresh read."),
    Metric::counter(
        names::RECONCILE_RESTLESS,
        &[],
        "Times that the plans of a link did not come to rest within six rounds.",
    ),
    Metric::gauge(
        names::LINKS_UNTAGGABLE,
        Unit::Count,
        &[],
        "Links of this node's followers whose broker does not keep our tags: nothing is opened late on them.",
    ),
    Metric::gauge(
        names::LINKS_PAUSED,
        Unit::Count,
        &[],
        "Links of this node's followers that are switched on and paused, by themselves, an account or the kill switch: no order is sent for them.",
    ),
    Metric::gauge(
        names::LINKS_CLOSE_ONLY,
        Unit::Count,
        &[],
        "Links of this node's followers that are switched on and only close, by their own mode, an account's or the kill switch's.",
    ),
    Metric::counter(
        names::DUPLICATES_FOUND,
        &[],
        "Second copies of one trade that were found and closed.",
    ),
    Metric::counter(
        names::TENURES,
        &[Label::new("kind", &[TENURE_KINDS])],
        "Accounts taken over: free ones, from an owner whose lease ran out, and from one that is proven dead.",
    ),
    Metric::counter(
        names::TENURES_ENDED,
        &[Label::new("how", &[Ended::WORDS])],
        "Tenures that ended, by how.",
    ),
];

/// Handles of what a session records at every order: looking a series up by its labels costs more
/// than counting. Made at the first use of each.
#[derive(Debug, Default)]
pub(super) struct Counters {
    started: Handles<Counter>,
    finished: Handles<Counter>,
    copies: Handles<Counter>,
    own_time: Handles<Histogram>,
    turn_wait: Handles<Histogram>,
}

/// Handles by their labels; there are a handful.
#[derive(Debug)]
struct Handles<H>(Vec<([&'static str; 2], H)>);

impl<H> Default for Handles<H> {
    fn default() -> Self {
        Handles(Vec::new())
    }
}

impl<H> Handles<H> {
    fn of(&mut self, labels: [&'static str; 2], make: impl FnOnce() -> H) -> &H {
        let place = match self.0.iter().position(|(known, _)| *known == labels) {
            Some(place) => place,
            None => {
                self.0.push((labels, make()));
                self.0.len() - 1
            }
        };
        &self.0[place].1
    }
}

impl Counters {
    pub(super) fn started(&mut self, action: &'static str) -> &Counter {
        self.started
            .of([action, ""], || metrics::counter!(names::BROKER_CALLS_STARTED, "action" => action))
    }

    pub(super) fn finished(&mut self, outcome: &'static str) -> &Counter {
        self.finished.of(
            [outcome, ""],
            || metrics::counter!(names::BROKER_CALLS_FINISHED, "outcome" => outcome),
        )
    }

    pub(super) fn copies(&mut self, action: &'static str, outcome: &'static str) -> &Counter {
        self.copies.of(
            [action, outcome],
            || metrics::counter!(names::COPIES, "action" => action, "outcome" => outcome),
        )
    }

    /// After the orders of that turn have left.
    pub(super) fn waited_for_turn(&mut self, waited: Duration) {
        let wait = self.turn_wait.of([""; 2], || metrics::histogram!(names::TURN_WAIT));
        wait.record(waited.as_secs_f64());
    }

    pub(super) fn own_time(&mut self, action: &'static str) -> &Histogram {
        self.own_time.of(
            [action, ""],
            || metrics::histogram!(names::OWN_TIME, "platform" => PAPER, "action" => action),
        )
    }
}
