//! What can be asked of a broker, and what it can answer.

use crate::ids::{FollowerTicket, Magic, Symbol};
use crate::position::{PendingKind, Side};
use crate::quantity::{Lots, Price};
use serde::{Deserialize, Serialize};

/// One mutating request to a broker. A close always names its ticket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum OrderRequest {
    /// Open a trade at the market.
    Open {
        /// Symbol of the follower's broker.
        symbol: Symbol,
        /// Direction.
        side: Side,
        /// Volume.
        lots: Lots,
        /// Stop loss to set with it.
        stop_loss: Option<Price>,
        /// Take profit to set with it.
        take_profit: Option<Price>,
        /// The link's magic.
        magic: Magic,
        /// The tag.
        comment: String,
    },
    /// Close a trade, or a part of it.
    Close {
        /// Which trade.
        ticket: FollowerTicket,
        /// How much; absent means all of it.
        lots: Option<Lots>,
    },
    /// Set both stops of a trade; absent removes.
    Modify {
        /// Which trade.
        ticket: FollowerTicket,
        /// Stop loss.
        stop_loss: Option<Price>,
        /// Take profit.
        take_profit: Option<Price>,
    },
    /// Place a pending order.
    Place {
        /// Symbol of the follower's broker.
        symbol: Symbol,
        /// Limit or stop, and direction.
        kind: PendingKind,
        /// Volume.
        lots: Lots,
        /// Price at which it triggers.
        price: Price,
        /// Stop loss of the trade it becomes.
        stop_loss: Option<Price>,
        /// Take profit of the trade it becomes.
        take_profit: Option<Price>,
        /// The link's magic.
        magic: Magic,
        /// The tag.
        comment: String,
    },
    /// Change price and stops of a pending order.
    ModifyPending {
        /// Which order.
        ticket: FollowerTicket,
        /// Price at which it triggers.
        price: Price,
        /// Stop loss of the trade it becomes.
        stop_loss: Option<Price>,
        /// Take profit of the trade it becomes.
        take_profit: Option<Price>,
    },
    /// Delete a pending order.
    Cancel {
        /// Which order.
        ticket: FollowerTicket,
    },
}

impl OrderRequest {
    crate::words! {
        /// The word used in logs, metrics and the paper broker's ledger.
        pub fn action(&self) in ACTIONS {
            OrderRequest::Open { .. } => "open",
            OrderRequest::Close { lots: None, .. } => "close",
            OrderRequest::Close { lots: Some(_), .. } => "partial_close",
            OrderRequest::Modify { .. } => "modify",
            OrderRequest::Place { .. } => "place",
            OrderRequest::ModifyPending { .. } => "modify_pending",
            OrderRequest::Cancel { .. } => "cancel",
        }
    }
}

/// A request that the broker carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderDone {
    /// The trade or order that it was about; the new number for an open or a placed order.
    pub ticket: FollowerTicket,
    /// Volume filled or closed; absent where no volume was traded.
    #[serde(default)]
    pub lots: Option<Lots>,
    /// Price of the fill; absent where nothing was traded.
    #[serde(default)]
    pub price: Option<Price>,
    /// New number of what stays open, where the broker renumbers on a partial close.
    #[serde(default)]
    pub remainder: Option<FollowerTicket>,
}

/// Why a broker refused; nothing is open because of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// What to do about it.
    pub class: RejectClass,
    /// The broker's own words, shortened.
    pub text: String,
}

/// The kinds of refusal (CASES.md P8), by what the caller does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectClass {
    /// Price moved or requote: ask again inside the price limit.
    Requote,
    /// Market closed, too many requests, no connection to the venue: ask again later.
    Later,
    /// The request itself is wrong (volume, price, stops, filling): do not ask again unchanged.
    Invalid,
    /// Not enough money.
    NoMoney,
    /// The trade or order is already gone or already as asked.
    AlreadySo,
    /// Trading is disabled for this account or symbol: stop and alert.
    Disabled,
    /// The lease token was older than the broker has seen.
    StaleToken,
}

impl RejectClass {
    /// The word used in metrics and rows.
    pub fn as_str(self) -> &'static str {
        match self {
            RejectClass::Requote => "requote",
            RejectClass::Later => "later",
            RejectClass::Invalid => "invalid",
            RejectClass::NoMoney => "no_money",
            RejectClass::AlreadySo => "already_so",
            RejectClass::Disabled => "disabled",
            RejectClass::StaleToken => "stale_token",
        }
    }
}
