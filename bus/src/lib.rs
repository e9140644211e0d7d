//! The bus: a master's trade events over NATS, from its publisher to the followers of every node.
//!
//! Decides: whether what arrives is the next event or a reason to doubt (`gap`), when a feed may
//! be trusted again (`feed`), which epoch a publisher speaks with and when it must be silent
//! (`publisher`). It knows nothing of trading rules.
//!
//! Invariants:
//! 1. The positions (epoch, seq) a feed hands to a follower strictly increase; each event is the
//!    direct successor of the one before, and every jump is a snapshot. The one exception is a
//!    publisher that came back under its old epoch: its snapshot says `restarted`.
//! 2. While a feed is doubtful, only endings of known tickets pass.
//! 3. Unknown is not empty: no answer, a partial answer or an undecodable one is never a snapshot.
//! 4. Publishing never blocks the caller, and every message needs the permit of the master's lease.
//! 5. The connection's own events decide nothing; they are counted.
//!
//! Not covered: what a follower does with an event, prices, leases, and messages between
//! processes whose clocks disagree (`at` is only compared within one epoch of one publisher).

mod clock;
mod offset;

pub mod client;
pub mod connected;
pub mod connection;
pub mod error;
pub mod feed;
pub mod gap;
pub mod metrics;
pub mod publisher;
pub mod roles;
pub mod snapshot;

#[cfg(test)]
mod testing;

pub use client::{BusAuth, ClientSettings, connect};
pub use connected::{NotConnected, Refusal, connected};
pub use connection::{ConnectionChanges, ConnectionNews, ConnectionWatch, connection_changes};
pub use error::BusError;
pub use feed::{
    DoubtReason, Feed, FeedHandle, FeedMessage, FeedSettings, FeedState, FeedStatus, Feeds,
    RequestReason,
};
pub use gap::{GapDetector, Verdict};
pub use publisher::{
    Closing, EpochReason, HeardEpochs, MayPublish, OnPublished, Publisher, PublisherHandle,
    PublisherSettings, PublisherStatus, hear_epoch, hear_epochs, start_epoch, start_epoch_now,
};
pub use roles::{Role, Subjects, inbox_prefix, is_user_name};
