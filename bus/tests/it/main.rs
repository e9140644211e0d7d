//! Feeds and publishers over real nats-servers, alone and in a cluster of three.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

extern crate lockstep_bus as bus;

mod cluster;
mod connection;
mod feed;
mod harness;
mod publisher;
