//! The process `lockstep`: it leases accounts, copies trades, and shows how fast.
//!
//! Each module says what it decides, and which invariants it keeps.

pub mod account;
pub mod api;
pub mod broker;
pub mod causes;
pub mod cli;
pub mod clock;
pub mod config;
pub mod credentials;
pub mod database;
pub mod directory;
pub mod exporter;
pub mod follower;
pub mod gate;
pub mod history;
pub mod lease;
pub mod metrics;
pub mod notes;
pub mod open_files;
pub mod player;
pub mod positions;
pub mod roles;
pub mod secret;
pub mod stamps;
pub mod story;
pub mod systemd;
pub mod tape;
pub mod uptime;
pub mod writer;
