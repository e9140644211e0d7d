//! One leased account: its session at the broker, its publishing, its copying.

pub mod lead;
pub mod manager;
pub mod metrics;
pub mod rows;
pub mod session;
pub mod view;
