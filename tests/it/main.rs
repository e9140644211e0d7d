//! Lockstep as its users run it: real servers, a real broker process, real node processes.
//!
//! One program, so that the servers are started once. README.md says what is tested with what.

#![allow(clippy::unwrap_used, reason = "tests")]

mod api;
mod asking;
mod blocking;
mod broker;
mod bus;
mod command_line;
mod credentials;
mod dashboards;
mod database_tls;
mod faults;
mod identities;
mod isolation;
mod leading;
mod letting_go;
mod modes;
mod operating;
mod publishing;
mod racing;
mod restart;
mod roles;
mod rolling;
mod secrets;
mod systemd;
mod takeover;
mod untaggable;
mod why;
