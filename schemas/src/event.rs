//! Trade events and beacons: what a master's session says on the bus.

use crate::book::Digest;
use crate::ids::{AccountId, Epoch, MasterTicket, Micros, Seq, Symbol};
use crate::position::{Funds, MasterPending, MasterPosition};
use crate::quantity::{Lots, Price};
use serde::{Deserialize, Serialize};

/// One change of a master's state, with its place in the master's sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TradeEvent {
    /// The master.
    pub account: AccountId,
    /// Incarnation of the publisher.
    pub epoch: Epoch,
    /// Place within the epoch, from 1.
    pub seq: Seq,
    /// When the broker's callback ran (publisher's clock).
    pub at: Micros,
    /// What changed; carries the state after it.
    pub change: Change,
}

/// The kinds of change. Each carries the state after the change, not only the difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A trade was opened.
    PositionOpened(MasterPosition),
    /// Stop loss or take profit changed.
    PositionModified(MasterPosition),
    /// The volume changed: partial close, add, or a new broker number with another volume.
    VolumeChanged {
        /// The trade after the change.
        position: MasterPosition,
        /// Its volume before.
        previous_lots: Lots,
    },
    /// A trade was closed; `position` is its last state.
    PositionClosed {
        /// The trade as it last was.
        position: MasterPosition,
        /// Price of the close, if known.
        price: Option<Price>,
        /// Why, if known.
        reason: CloseReason,
    },
    /// A pending order was placed.
    PendingPlaced(MasterPending),
    /// Price, stops or volume of a pending order changed.
    PendingModified(MasterPending),
    /// A pending order was deleted or expired; the order as it last was.
    PendingCancelled(MasterPending),
    /// A pending order became a trade of the same ticket.
    PendingFilled(MasterPosition),
}

/// Why a master's trade ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CloseReason {
    /// By a person or a program.
    Client,
    /// Stop loss.
    StopLoss,
    /// Take profit.
    TakeProfit,
    /// Margin ended.
    StopOut,
    /// The source does not say.
    Unknown,
}

impl Change {
    /// The trade or order that changed.
    pub fn ticket(&self) -> MasterTicket {
        match self {
            Change::PositionOpened(p) | Change::PositionModified(p) | Change::PendingFilled(p) => {
                p.ticket
            }
            Change::VolumeChanged { position, .. } | Change::PositionClosed { position, .. } => {
                position.ticket
            }
            Change::PendingPlaced(o) | Change::PendingModified(o) | Change::PendingCancelled(o) => {
                o.ticket
            }
        }
    }

    /// The symbol of that trade or order.
    pub fn symbol(&self) -> &Symbol {
        match self {
            Change::PositionOpened(p) | Change::PositionModified(p) | Change::PendingFilled(p) => {
                &p.symbol
            }
            Change::VolumeChanged { position, .. } | Change::PositionClosed { position, .. } => {
                &position.symbol
            }
            Change::PendingPlaced(o) | Change::PendingModified(o) | Change::PendingCancelled(o) => {
                &o.symbol
            }
        }
    }

    /// The word on the wire and in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Change::PositionOpened(_) => "position_opened",
            Change::PositionModified(_) => "position_modified",
            Change::VolumeChanged { .. } => "volume_changed",
            Change::PositionClosed { .. } => "position_closed",
            Change::PendingPlaced(_) => "pending_placed",
            Change::PendingModified(_) => "pending_modified",
            Change::PendingCancelled(_) => "pending_cancelled",
            Change::PendingFilled(_) => "pending_filled",
        }
    }

    /// The change takes something away from the master: it is safe to follow while a gap is open.
    pub fn is_ending(&self) -> bool {
        matches!(self, Change::PositionClosed { .. } | Change::PendingCancelled(_))
    }
}

/// The periodic sign of life of a master's session, sent even when nothing happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beacon {
    /// The master.
    pub account: AccountId,
    /// Incarnation of the publisher.
    pub epoch: Epoch,
    /// Last event published in this epoch; 0 before the first.
    pub seq: Seq,
    /// When it was sent (publisher's clock).
    pub at: Micros,
    /// How many trades are open.
    pub open_trades: u32,
    /// How many pending orders wait.
    pub open_pendings: u32,
    /// Digest of the state at (epoch, seq); README.md says how it is computed.
    pub digest: Digest,
    /// Money of the account, where the platform says it; sizing by ratio needs it.
    pub funds: Option<Funds>,
}
