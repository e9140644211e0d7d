//! The process `lockstep`: it leases accounts, copies trades, and shows how fast.
//!
//! Each module says what it decides, and which invariants it keeps.

pub mod clock;
pub mod config;
pub mod database;
pub mod gate;
pub mod history;
pub mod lease;
pub mod metrics;
pub mod writer;
