//! One leased account: its session at the broker, its publishing, its copying.

pub mod asking;
pub mod control;
pub mod ending;
mod executing;
mod following;
pub mod lead;
mod leading;
pub mod link_changes;
pub mod manager;
pub mod metrics;
pub mod modes;
mod opening;
pub mod owner;
mod reading;
pub mod rows;
pub mod session;
mod telling;
mod wishes;
