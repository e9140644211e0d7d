//! `./run bench`: what Lockstep costs, beside what the machine allows, in one run.
//!
//! Limit and system take turns (limit, system, limit, system, ...), and the medians of the rounds'
//! percentiles are compared. A round whose own limit is far off the best one's met something else
//! on the machine and is repeated, not failed. Nothing is asserted of p99 and max.
//!
//! - [`rounds`]: percentiles, rounds, medians, ratios.
//! - [`raw`]: the limit of bus and scheduler; [`relay`]: lets a master's burst go, which `hand` makes.
//! - [`own_time`]: `./run bench own-time`; [`blocking`]: `./run bench blocking`; [`scale`]:
//!   `./run bench scale`; [`lease`]: `./run bench lease`; [`writer`]: `./run bench writer`.
//! - [`decisions`]: the pure parts, for `cargo bench` and for [`instructions`]: `./run bench instructions`.

pub mod blocking;
pub mod decisions;
mod hand;
pub mod instructions;
pub mod lease;
pub mod own_time;
pub mod raw;
pub mod relay;
pub mod rounds;
pub mod scale;
pub mod writer;

/// The machine's shape, for whoever reads the figures: virtual cores, memory in GiB.
pub fn machine() -> serde_json::Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = memory.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<f64>().ok()
    });
    let gib = kib.map(|kib| (kib / 1024.0 / 1024.0 * 10.0).round() / 10.0);
    serde_json::json!({ "cores": cores, "memory_gib": gib })
}
