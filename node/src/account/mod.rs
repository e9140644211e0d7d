//! One leased account: its session at the broker, its publishing, its copying.

mod executing;
mod following;
pub mod lead;
mod leading;
pub mod link_changes;
pub mod manager;
pub mod metrics;
pub mod open_sessions;
mod reading;
pub mod rows;
pub mod session;
