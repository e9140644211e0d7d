//! `./run bench`: what Lockstep costs, beside what the machine allows, in one run.
//!
//! Limit and system take turns (limit, system, limit, system, ...), and the medians of the rounds'
//! percentiles are compared. A round whose own limit is far off the best one's met something else
//! on the machine and is repeated, not failed. Nothing is asserted of p99 and max.
//!
//! - [`rounds`]: percentiles, rounds, medians, ratios.

pub mod rounds;
