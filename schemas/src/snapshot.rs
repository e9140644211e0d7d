//! Complete states of accounts. A failed or partial read never becomes one of these.

use crate::book::Book;
use crate::ids::{AccountId, Epoch, Micros, Seq};
use crate::position::{BrokerPending, BrokerPosition, Funds};
use crate::quantity::Money;
use rust_decimal::Decimal;

/// The complete state of a master at (epoch, seq), from its publisher's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasterSnapshot {
    /// The master.
    pub account: AccountId,
    /// Incarnation of the publisher.
    pub epoch: Epoch,
    /// Last event that is contained.
    pub seq: Seq,
    /// When it was taken (publisher's clock).
    pub at: Micros,
    /// Open trades and pending orders.
    pub book: Book,
    /// Money of the account, where the platform says it.
    pub funds: Option<Funds>,
}

/// The complete state of an account as its broker lists it, after the session's sync mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountSnapshot {
    /// The account.
    pub account: AccountId,
    /// Counts the changes that the session has seen; a plan is only good for the one it was made from.
    pub revision: u64,
    /// When the read was complete (node's clock).
    pub at: Micros,
    /// Open trades, ascending by ticket.
    pub positions: Vec<BrokerPosition>,
    /// Pending orders, ascending by ticket.
    pub pendings: Vec<BrokerPending>,
    /// Money of the account.
    pub funds: Option<Funds>,
}

impl AccountSnapshot {
    /// Margin that is in use although no trade is listed: then the list is not complete, whatever
    /// the broker says of it. The other way round, trades without margin, is possible where a
    /// broker asks none for hedged volume.
    pub fn margin_of_nothing(&self) -> Option<Money> {
        let used = self.funds.as_ref().and_then(|funds| funds.margin_used);
        used.filter(|used| self.positions.is_empty() && used.get() > Decimal::ZERO)
    }
}
