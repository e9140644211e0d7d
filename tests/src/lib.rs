//! The world of the integration tests: every part in it is the real one.
//!
//! Decides nothing about trading. It starts a NATS server (or three), a database, a paper broker
//! and nodes as processes, plays masters, and holds what the broker's ledger says against what
//! the masters did.
//!
//! - [`world::World`]: servers, broker, accounts, links, nodes, and waits with a limit.
//! - [`master::Master`]: an external master that the test moves by hand.
//! - [`wire_master::WireMaster`]: the same with nothing but a NATS client and the wire contract.
//! - [`oracle`]: what an account holds and what a follower should hold, from the ledger alone.
//! - [`timeline`]: the default settings in real time, for `./run timeline`.
//! - [`chaos`]: faults from a seed, and a checker.
//! - [`bench`]: what it costs, beside what the machine allows.
//! - [`scrape`]: what a node's metrics page says.
//! - [`binary`]: where the program `lockstep` is.
//!
//! Invariants:
//! 1. Nothing is judged by a node's own opinion where the ledger can tell.
//! 2. Every wait has a limit and says what it waited for.
//! 3. At most [`world::WORLDS_MAX`] worlds run at once, so that times mean something on two cores.

#![allow(clippy::unwrap_used, reason = "a harness of tests: a panic is how it says no")]

pub mod bench;
pub mod binary;
pub mod chaos;
pub mod http;
pub mod master;
pub mod oracle;
pub mod scrape;
pub mod timeline;
pub mod wire_master;
pub mod world;
