//! The paper broker: a process of its own with a socket and a ledger.
//!
//! Decides what a broker decides: whether an order is carried out, at which price, and what the
//! account holds afterwards. Everybody who trades reaches it over its socket, so that what a node
//! believes and what really happened can differ, as they do outside.
//!
//! - `engine` is the market and its accounts: state, request and time in, effects out.
//! - `broker` is the whole broker without a network: sessions, faults and what is on its way.
//! - `server` is the socket around it; `ledger` what it remembers; `faults` how it misbehaves.
//! - `client` is the node's end, `driver` the end of tests and demos.
//!
//! `README.md` beside this crate is the protocol, and what is not modelled.

mod blocking;
pub mod broker;
#[cfg(test)]
mod broker_tests;
pub mod client;
pub mod clock;
mod core;
mod desk;
mod desk_margin;
mod desk_netting;
pub mod driver;
pub mod engine;
#[cfg(test)]
mod engine_tests;
pub mod error;
pub mod faults;
pub mod ledger;
mod ledger_file;
mod lines;
#[cfg(test)]
mod margin_tests;
#[cfg(test)]
mod netting_tests;
pub mod protocol;
pub mod server;
pub mod settings;
mod socket;
mod wire;

pub use client::{Ident, NotSent, OrderOutcome, PaperClient, PaperSession, PendingAnswer};
pub use client::{SendMeta, SessionPush};
pub use driver::PaperDriver;
pub use error::PaperError;
pub use ledger::{Ledger, Violation};
pub use server::{PaperConfig, PaperServer};
