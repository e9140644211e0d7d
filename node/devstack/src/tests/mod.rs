//! Real servers, real processes, real sockets.

mod process;
mod proxy;
mod servers;
mod tools;

use std::time::{Duration, Instant};

/// Nothing here takes a tenth of this; a build beside it may.
const LIMIT: Duration = Duration::from_secs(20);

/// Waits until `look` says so.
async fn eventually(what: &str, mut look: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !look().await {
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(crate::process::POLL).await;
    }
}

/// Whether a process is there and not only waiting to be collected.
fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit(") ").next().map(|rest| !rest.starts_with(['Z', 'X'])))
        .unwrap_or(false)
}
