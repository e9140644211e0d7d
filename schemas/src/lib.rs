//! The words every part of Lockstep shares, and the wire contract of the bus.
//!
//! Nothing here waits: no network, no SQL, no clock. `README.md` beside this
//! crate is the contract for people who write a publisher in another language.
//!
//! Invariants:
//! 1. A value of a type in this crate is valid: it is checked where it is made,
//!    decoding included, and an error names the field and the value.
//! 2. Prices, volumes and money are exact decimals, on the wire as text.
//! 3. A snapshot type exists only for a complete read. There is no way to say
//!    "empty because we do not know".

pub mod book;
pub mod codec;
pub mod command;
pub mod control;
pub mod event;
pub mod ids;
pub mod planted;
pub mod position;
pub mod quantity;
pub mod snapshot;
pub mod subject;
mod text;
mod words;

pub use book::{Book, Digest};
pub use codec::DecodeError;
pub use command::{OrderDone, OrderRequest, RejectClass, Rejection};
pub use event::{Beacon, Change, CloseReason, TradeEvent};
pub use ids::{
    AccountId, Epoch, FollowerTicket, IdError, LinkId, Magic, MasterTicket, Micros, NodeId, Seq,
    Symbol, Token,
};
pub use position::{
    BrokerPending, BrokerPosition, ClosedTrade, Funds, MasterPending, MasterPosition, PendingKind,
    Quote, Side, SymbolSpec,
};
pub use quantity::{Lots, Money, Price, QuantityError};
pub use snapshot::{AccountSnapshot, MasterSnapshot};

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
