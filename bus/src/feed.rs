//! One master's feed on this node: one subscription, shared by all its followers here.
//!
//! Decides (in `state`, pure): what may be passed on, when the feed is doubtful and why, when a
//! snapshot is asked for, and whether it may be used. `task` does what was decided.
//!
//! What a follower receives is one serial stream: a snapshot valid at (epoch, seq), then the
//! events seq+1, seq+2, … On a doubt it first receives `Doubt` (no opens, no modifications), then
//! endings at most, then the next snapshot, from which the serial stream goes on.
//!
//! Invariants:
//! 1. S11: the positions a follower receives strictly increase; every jump is a snapshot. (A
//!    snapshot with the reason `Restarted` starts the count anew.)
//! 2. A snapshot handed on is valid at the position the feed has reached, never at an older one:
//!    what arrived while it was asked for is already in it (H31-H33).
//! 3. A message of a lower epoch than heard changes nothing (H28, H32).
//! 4. One snapshot request at a time, at most one per `SNAPSHOT_SPACING` (L6).
//! 5. A lost last event is found by the next beacon, and silence by `SILENT_AFTER` (H29, L3).
//!
//! Not covered: the age of an event. A late open is the follower's decision (H32).

mod state;
mod task;

pub use state::{FeedOutput, FeedState, Recipients};
pub use task::{Feed, FeedHandle, Feeds};

use schemas::{AccountId, Epoch, Funds, MasterSnapshot, Seq, TradeEvent};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Silence of a master's beacons after which its feed is doubtful: three beacons (DESIGN §3).
pub const SILENT_AFTER: Duration = Duration::from_secs(6);

/// Shortest time between two snapshot requests of a feed (L6).
pub const SNAPSHOT_SPACING: Duration = Duration::from_millis(250);

/// Snapshot tries in quick succession before a feed slows down and counts an alarm (H33).
pub const QUICK_TRIES: u32 = 5;

/// Time between tries after the quick ones. Chosen so that a feed is whole again well within
/// 12 s after the bus heals (L3).
pub const SLOW_SPACING: Duration = Duration::from_secs(2);

/// Random wait before a request whose cause hits all feeds at once: reconnect, silence.
pub const MASS_JITTER_MAX: Duration = Duration::from_millis(200);

/// Events kept while a snapshot is on its way; as many as the subscription holds. When it
/// overflows, everything is dropped and the snapshot asked for again.
pub const BUFFER_EVENTS_MAX: usize = 65_536;

/// Settings of a feed. The defaults are the constants above, and what the tests shorten.
#[derive(Debug, Clone)]
pub struct FeedSettings {
    /// Silence after which the feed is doubtful. Default `SILENT_AFTER`.
    pub silent_after: Duration,
    /// Shortest time between two snapshot requests. Default `SNAPSHOT_SPACING`.
    pub snapshot_spacing: Duration,
    /// Time between requests after the quick tries. Default `SLOW_SPACING`.
    pub slow_spacing: Duration,
    /// Random wait on mass causes. Default `MASS_JITTER_MAX`.
    pub mass_jitter_max: Duration,
    /// Events kept while a snapshot is on its way. Default `BUFFER_EVENTS_MAX`.
    pub buffer_events_max: usize,
}

impl Default for FeedSettings {
    fn default() -> Self {
        FeedSettings {
            silent_after: SILENT_AFTER,
            snapshot_spacing: SNAPSHOT_SPACING,
            slow_spacing: SLOW_SPACING,
            mass_jitter_max: MASS_JITTER_MAX,
            buffer_events_max: BUFFER_EVENTS_MAX,
        }
    }
}

/// Why a feed cannot be trusted until the next snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DoubtReason {
    /// The feed was just opened, or the follower just attached to it.
    Joining,
    /// An event is missing.
    Gap,
    /// The publisher has a new incarnation.
    NewEpoch,
    /// The publisher came back under its old epoch: positions count anew.
    Restarted,
    /// A beacon speaks of events that did not come.
    BeaconAhead,
    /// The publisher's state is not the one its events led to.
    DigestDiffers,
    /// No beacon for `SILENT_AFTER`.
    Silent,
    /// A message could not be read, or has a version this build does not speak (H40).
    Undecodable,
    /// This follower's queue was full and messages for it were dropped.
    SlowConsumer,
    /// The connection to the bus was made anew.
    Reconnected,
    /// Not a doubt: a follower asked for a fresh snapshot.
    Requested,
}

impl DoubtReason {
    schemas::words! {
        /// The word in metrics and logs.
        pub fn as_str(self) in WORDS {
            DoubtReason::Joining => "joining",
            DoubtReason::Gap => "gap",
            DoubtReason::NewEpoch => "new_epoch",
            DoubtReason::Restarted => "restarted",
            DoubtReason::BeaconAhead => "beacon_ahead",
            DoubtReason::DigestDiffers => "digest_differs",
            DoubtReason::Silent => "silent",
            DoubtReason::Undecodable => "undecodable",
            DoubtReason::SlowConsumer => "slow_consumer",
            DoubtReason::Reconnected => "reconnected",
            DoubtReason::Requested => "requested",
        }
    }

    /// The cause hits all feeds of all nodes in one instant: requests are spread.
    pub(crate) fn is_mass_cause(self) -> bool {
        matches!(self, DoubtReason::Silent | DoubtReason::Reconnected)
    }
}

/// Why a follower asks for a fresh snapshot although its feed is in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestReason {
    /// Its lease was confirmed again after a time without.
    LeaseRestored,
    /// It was taken over from another node.
    Takeover,
    /// A plan was held for a second, fresh read (H41).
    HeldPlan,
    /// A planned check.
    Audit,
    /// A person asked.
    Operator,
}

impl RequestReason {
    schemas::words! {
        /// The word in metrics.
        pub fn as_str(self) in WORDS {
            RequestReason::LeaseRestored => "lease_restored",
            RequestReason::Takeover => "takeover",
            RequestReason::HeldPlan => "held_plan",
            RequestReason::Audit => "audit",
            RequestReason::Operator => "operator",
        }
    }
}

/// What a follower receives from its master's feed.
#[derive(Debug, Clone)]
pub enum FeedMessage {
    /// A trade event.
    Event {
        /// The event, decoded once for all followers.
        event: Arc<TradeEvent>,
        /// The feed is in doubt: this is an ending of a known ticket that does not wait for the
        /// snapshot (H39). It is not the successor of what was received before.
        doubtful: bool,
        /// When this process received it.
        received: Instant,
    },
    /// The master's complete state at the feed's position; ends a doubt. Events go on from here.
    Snapshot(Arc<MasterSnapshot>, DoubtReason),
    /// From here on only endings come until the next snapshot.
    Doubt(DoubtReason),
    /// The master's money, from a beacon.
    Funds(Funds),
}

/// Where a feed stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeedStatus {
    /// Position that was applied last; nothing before the first snapshot.
    pub position: Option<(Epoch, Seq)>,
    /// Why the feed is doubtful now.
    pub doubt: Option<DoubtReason>,
    /// Time since the last beacon, or since the feed was opened if none was heard.
    pub beacon_age: Duration,
    /// A beacon was heard since the feed was opened.
    pub beacon_heard: bool,
    /// Followers attached.
    pub followers: usize,
}

/// Who receives a message.
pub(crate) type Follower = AccountId;
