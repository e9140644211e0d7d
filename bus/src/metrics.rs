//! Every metric of this crate, in one table, and the handles that record them.
//!
//! Labels are reasons from closed lists; no account, ticket or text of an error is a label.
//! Handles are made once per feed or publisher, so that the hot path does no lookup.

use crate::client::EVENT_WORDS;
use crate::{BusError, DoubtReason, EpochReason, RequestReason};
use metrics::{Counter, Histogram, Unit};

/// Kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows; its name ends in `_total`.
    Counter,
    /// A level, or a moment as a timestamp.
    Gauge,
    /// A distribution with the listed buckets.
    Histogram,
}

/// One row of a metric table: what a dashboard may rely on.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Full name, with prefix and unit.
    pub name: &'static str,
    /// Kind.
    pub kind: MetricKind,
    /// Base unit, where there is one.
    pub unit: Option<Unit>,
    /// Labels; each has a closed list of values.
    pub labels: &'static [Label],
    /// One sentence for the reader of a dashboard.
    pub help: &'static str,
    /// Upper bounds of the buckets, in the base unit; empty unless a histogram.
    pub buckets: &'static [f64],
}

/// A label, and everything it can say.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// Its values, list by list: most come from one enum, some from two.
    pub words: &'static [&'static [&'static str]],
}

impl Label {
    /// A label with the words of these lists.
    pub const fn new(name: &'static str, words: &'static [&'static [&'static str]]) -> Label {
        Label { name, words }
    }

    /// Every value, in the order of the lists.
    pub fn values(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.words.iter().flat_map(|list| list.iter().copied())
    }
}

impl Metric {
    /// Every combination of the labels' values, as (name, value) pairs: one empty one without labels.
    pub fn series(&self) -> Vec<Vec<(&'static str, &'static str)>> {
        self.labels.iter().fold(vec![Vec::new()], |series, label| {
            let with = |before: &Vec<_>| {
                let before = before.clone();
                label.values().map(move |value| {
                    let mut one = before.clone();
                    one.push((label.name, value));
                    one
                })
            };
            series.iter().flat_map(with).collect()
        })
    }

    /// A row for a counter.
    pub const fn counter(
        name: &'static str,
        labels: &'static [Label],
        help: &'static str,
    ) -> Metric {
        Metric {
            name,
            kind: MetricKind::Counter,
            unit: Some(Unit::Count),
            labels,
            help,
            buckets: &[],
        }
    }

    /// A row for a gauge.
    pub const fn gauge(
        name: &'static str,
        unit: Unit,
        labels: &'static [Label],
        help: &'static str,
    ) -> Metric {
        Metric { name, kind: MetricKind::Gauge, unit: Some(unit), labels, help, buckets: &[] }
    }

    /// A row for a gauge that is 1 or 0 and has no unit.
    pub const fn flag(name: &'static str, help: &'static str) -> Metric {
        Metric { name, kind: MetricKind::Gauge, unit: None, labels: &[], help, buckets: &[] }
    }

    /// A row for a histogram of seconds.
    pub const fn seconds(
        name: &'static str,
        labels: &'static [Label],
        help: &'static str,
        buckets: &'static [f64],
    ) -> Metric {
        Metric {
            name,
            kind: MetricKind::Histogram,
            unit: Some(Unit::Seconds),
            labels,
            help,
            buckets,
        }
    }
}

/// Losses that a feed found, by how they showed.
pub const GAPS: &str = "lockstep_bus_gaps_total";
/// Times a feed became doubtful, by its first reason.
pub const DOUBTS: &str = "lockstep_bus_doubts_total";
/// Trade events received.
pub const EVENTS_RECEIVED: &str = "lockstep_bus_events_received_total";
/// Trade events that came without the bus.
pub const EVENTS_LOCAL: &str = "lockstep_bus_events_local_total";
/// Trade events handed to the client.
pub const EVENTS_PUBLISHED: &str = "lockstep_bus_events_published_total";
/// Beacons received.
pub const BEACONS_RECEIVED: &str = "lockstep_bus_beacons_received_total";
/// Beacons handed to the client.
pub const BEACONS_PUBLISHED: &str = "lockstep_bus_beacons_published_total";
/// Messages that were not used or not sent, by reason.
pub const DROPPED: &str = "lockstep_bus_messages_dropped_total";
/// New epochs of running publishers, by reason.
pub const EPOCHS_RAISED: &str = "lockstep_bus_epochs_raised_total";
/// Publishers that stopped because a higher epoch was heard.
pub const SUPERSEDED: &str = "lockstep_bus_publishers_superseded_total";
/// Times that two publishers were heard in turns for one master.
pub const TWO_PUBLISHERS: &str = "lockstep_bus_two_publishers_total";
/// Snapshot requests started.
pub const SNAPSHOTS_STARTED: &str = "lockstep_bus_snapshots_started_total";
/// Snapshot requests finished, by outcome.
pub const SNAPSHOTS_FINISHED: &str = "lockstep_bus_snapshots_finished_total";
/// Snapshot replies sent by publishers.
pub const SNAPSHOTS_ANSWERED: &str = "lockstep_bus_snapshots_answered_total";
/// Snapshots asked for by followers and operators, by reason.
pub const SNAPSHOTS_WANTED: &str = "lockstep_bus_snapshots_wanted_total";
/// Rounds of quick snapshot tries that did not settle a doubt: the alarm of the joining order.
pub const TRIES_EXHAUSTED: &str = "lockstep_bus_snapshot_tries_exhausted_total";
/// Time from a snapshot request to the complete answer.
pub const SNAPSHOT_SECONDS: &str = "lockstep_bus_snapshot_seconds";
/// Time from enqueueing an event to handing it to the client.
pub const PUBLISH_WAIT_SECONDS: &str = "lockstep_bus_publish_wait_seconds";
/// Time a feed stayed doubtful.
pub const DOUBT_SECONDS: &str = "lockstep_bus_doubt_seconds";
/// Feeds that are open.
pub const FEEDS: &str = "lockstep_bus_feeds";
/// Feeds that are doubtful now.
pub const FEEDS_DOUBTFUL: &str = "lockstep_bus_feeds_doubtful";
/// When the feed that waits longest heard its last beacon.
pub const BEACON_OLDEST: &str = "lockstep_bus_feed_beacon_oldest_timestamp_seconds";
/// Difference between the clocks of publishers and ours.
pub const CLOCK_OFFSET: &str = "lockstep_bus_clock_offset_seconds";
/// What the client reported of its connection, by event.
pub const CONNECTION_EVENTS: &str = "lockstep_bus_connection_events_total";

/// Queues and hand-offs inside a process: 20 µs to 1 s.
const WAIT_BUCKETS: &[f64] =
    &[0.000_02, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0];

/// Exchanges over the bus and doubts: 1 ms to 2 minutes.
const EXCHANGE_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 6.0, 12.0, 30.0, 120.0];

/// All metrics of this crate.
pub const METRICS: &[Metric] = &[
    Metric::counter(
        GAPS,
        &[Label::new("kind", &[DoubtReason::WORDS])],
        "Losses that a feed found, by how they showed.",
    ),
    Metric::counter(
        DOUBTS,
        &[Label::new("reason", &[DoubtReason::WORDS])],
        "Times a feed became doubtful, by its first reason.",
    ),
    Metric::counter(EVENTS_RECEIVED, &[], "Trade events received and decoded."),
    Metric::counter(
        EVENTS_LOCAL,
        &[],
        "Trade events of this node's own publishers that reached a feed without the bus.",
    ),
    Metric::counter(EVENTS_PUBLISHED, &[], "Trade events handed to the client."),
    Metric::counter(BEACONS_RECEIVED, &[], "Beacons received and decoded."),
    Metric::counter(BEACONS_PUBLISHED, &[], "Beacons handed to the client."),
    Metric::counter(
        DROPPED,
        &[Label::new("reason", &[DropReason::WORDS, EpochReason::WORDS])],
        "Messages that were not used or not sent.",
    ),
    Metric::counter(
        EPOCHS_RAISED,
        &[Label::new("reason", &[EpochReason::WORDS])],
        "New epochs of publishers that were running.",
    ),
    Metric::counter(SUPERSEDED, &[], "Publishers that stopped because a higher epoch was heard."),
    Metric::counter(
        TWO_PUBLISHERS,
        &[],
        "Times that a feed heard two publishers in turns for one master; said again while it lasts.",
    ),
    Metric::counter(SNAPSHOTS_STARTED, &[], "Snapshot requests started."),
    Metric::counter(
        SNAPSHOTS_FINISHED,
        &[Label::new("outcome", &[&[COMPLETE], BusError::WORDS])],
        "Snapshot requests finished, by outcome.",
    ),
    Metric::counter(SNAPSHOTS_ANSWERED, &[], "Snapshot replies sent by publishers."),
    Metric::counter(
        SNAPSHOTS_WANTED,
        &[Label::new("reason", &[RequestReason::WORDS])],
        "Fresh snapshots asked for by followers.",
    ),
    Metric::counter(TRIES_EXHAUSTED, &[], "Rounds of quick snapshot tries that settled nothing."),
    Metric::seconds(
        SNAPSHOT_SECONDS,
        &[],
        "From a snapshot request to the complete answer.",
        EXCHANGE_BUCKETS,
    ),
    Metric::seconds(
        PUBLISH_WAIT_SECONDS,
        &[],
        "From enqueueing an event to handing it to the client.",
        WAIT_BUCKETS,
    ),
    Metric::seconds(DOUBT_SECONDS, &[], "How long a feed stayed doubtful.", EXCHANGE_BUCKETS),
    Metric::gauge(FEEDS, Unit::Count, &[], "Feeds that are open."),
    Metric::gauge(FEEDS_DOUBTFUL, Unit::Count, &[], "Feeds that are doubtful now."),
    Metric::gauge(
        BEACON_OLDEST,
        Unit::Seconds,
        &[],
        "When the feed that waits longest heard its last beacon, or was opened; now without feeds.",
    ),
    Metric::gauge(
        CLOCK_OFFSET,
        Unit::Seconds,
        &[],
        "Least time from a beacon's stamp to its arrival in the last minute or two, of the feed where it is furthest from 0: the offset of the publisher's clock and the shortest way; negative where that clock is ahead, 0 without feeds.",
    ),
    Metric::counter(
        CONNECTION_EVENTS,
        &[Label::new("event", &[EVENT_WORDS])],
        "What the client said of its connection.",
    ),
];

/// Why a message was not used or not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// It could not be read, or speaks of another master.
    Undecodable,
    /// Its subject is none of ours.
    UnknownSubject,
    /// It was there already.
    Duplicate,
    /// The second arrival of an event that came without the bus: no fault.
    CameLocally,
    /// An event of an incarnation that was replaced.
    OldEpoch,
    /// A beacon of one.
    OldEpochBeacon,
    /// A beacon that came after a later event.
    LateBeacon,
    /// A snapshot of one.
    OldEpochSnapshot,
    /// More came during a doubt than is kept.
    BufferFull,
    /// A follower did not keep up.
    FollowerQueueFull,
    /// The feed did not keep up with a publisher of its own process.
    LocalQueueFull,
    /// A request for a snapshot that cannot be answered to anybody, or one too many.
    BadRequest,
    /// A request for a snapshot while nobody knows the state.
    RequestWhileSilent,
    /// A reply that was not finished, because the connection or the permit was lost.
    ReplyCut,
}

impl DropReason {
    schemas::words! {
        /// The word in metrics.
        pub fn as_str(self) in WORDS {
            DropReason::Undecodable => "undecodable",
            DropReason::UnknownSubject => "unknown_subject",
            DropReason::Duplicate => "duplicate",
            DropReason::CameLocally => "came_locally",
            DropReason::OldEpoch => "old_epoch",
            DropReason::OldEpochBeacon => "old_epoch_beacon",
            DropReason::LateBeacon => "late_beacon",
            DropReason::OldEpochSnapshot => "old_epoch_snapshot",
            DropReason::BufferFull => "buffer_full",
            DropReason::FollowerQueueFull => "follower_queue_full",
            DropReason::LocalQueueFull => "local_queue_full",
            DropReason::BadRequest => "bad_request",
            DropReason::RequestWhileSilent => "request_while_silent",
            DropReason::ReplyCut => "reply_cut",
        }
    }
}

/// Outcome of a snapshot request that was answered in full; the others are [`BusError::WORDS`].
pub(crate) const COMPLETE: &str = "complete";

pub(crate) fn count_dropped(reason: DropReason) {
    count(DROPPED, "reason", reason.as_str());
}

/// Counts one with a reason; not for the hot path, it looks the series up.
pub(crate) fn count(name: &'static str, label: &'static str, value: &'static str) {
    metrics::counter!(name, label => value).increment(1);
}

/// Handles of what a feed records at the rate of events.
pub(crate) struct FeedMetrics {
    pub(crate) events: Counter,
    pub(crate) local: Counter,
    pub(crate) beacons: Counter,
    pub(crate) snapshot_seconds: Histogram,
    pub(crate) doubt_seconds: Histogram,
}

impl FeedMetrics {
    pub(crate) fn new() -> Self {
        FeedMetrics {
            events: metrics::counter!(EVENTS_RECEIVED),
            local: metrics::counter!(EVENTS_LOCAL),
            beacons: metrics::counter!(BEACONS_RECEIVED),
            snapshot_seconds: metrics::histogram!(SNAPSHOT_SECONDS),
            doubt_seconds: metrics::histogram!(DOUBT_SECONDS),
        }
    }
}

/// Handles of what a publisher records at the rate of events.
pub(crate) struct PublisherMetrics {
    pub(crate) events: Counter,
    pub(crate) beacons: Counter,
    pub(crate) answered: Counter,
    pub(crate) wait_seconds: Histogram,
}

impl PublisherMetrics {
    pub(crate) fn new() -> Self {
        PublisherMetrics {
            events: metrics::counter!(EVENTS_PUBLISHED),
            beacons: metrics::counter!(BEACONS_PUBLISHED),
            answered: metrics::counter!(SNAPSHOTS_ANSWERED),
            wait_seconds: metrics::histogram!(PUBLISH_WAIT_SECONDS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_readme_names_every_metric_and_no_other() {
        let readme = include_str!("../README.md");
        let named: BTreeSet<&str> =
            readme.split('`').filter(|word| word.starts_with("lockstep_bus_")).collect();
        assert_eq!(named, METRICS.iter().map(|m| m.name).collect());
    }
}
