//! The short times of the chaos nodes, and the bounds that follow from them.
//!
//! A lease is a sixth of the default, and what depends on it is scaled with it, within the
//! relations that every node checks at its start (H25). Shorter would be possible on a machine of
//! one's own: while others build on the same two cores a renewal can take seconds, and a lease of
//! 6 s then spends its time changing hands. What is not a setting (the bus client's ping, the
//! window of reconciles) keeps its value and is part of the bounds as it is.

use std::time::Duration;

/// Lease.
pub const LEASE: Duration = Duration::from_millis(10_000);
/// From one renewal to the next.
pub const CYCLE: Duration = Duration::from_millis(1_000);
/// How much earlier than the lease's end an owner stops.
pub const FENCE: Duration = Duration::from_millis(4_000);
/// Longest renewal.
pub const QUERY_LIMIT: Duration = Duration::from_millis(4_000);
/// Longest order call.
pub const CALL_LIMIT: Duration = Duration::from_millis(2_000);
/// What must be left of a permit.
pub const SEND_RESERVE: Duration = Duration::from_millis(500);
/// Wait of a new owner before its first open.
pub const SETTLE: Duration = Duration::from_millis(2_500);
/// Time between two beacons.
pub const BEACON: Duration = Duration::from_millis(1_000);
/// Silence that puts a feed in doubt.
pub const STALE: Duration = Duration::from_millis(3_000);
/// The last look for duplicates after a takeover.
pub const AUDIT_LAST: Duration = Duration::from_secs(12);

/// Accounts a node owns at most: any two nodes carry all eleven, one alone does not.
pub const CAPACITY: u32 = 8;

/// An order that was not answered for so long is given up, if it is not at the broker (H42).
pub fn longest_answer() -> Duration {
    CALL_LIMIT + reconcile::Limits::default().clock_skew
}

/// L1: from the last renewal of the old owner to the first reconcile of the new one; the 5 s and
/// the 10 s to connect are for machines that do other things as well.
pub const TAKEOVER_MAX: Duration = Duration::from_millis(10_000 + 1_000 + 10_000 + 2_500 + 5_000);

/// L4: after everything is healed and the masters stay quiet. Not scaled with the lease: what the
/// bus client needs to find a server again and the window of reconciles are not, and a machine
/// that builds at the same time is slow. The verdict tells how long it took.
pub const SETTLED_MAX: Duration = Duration::from_secs(120);

/// The settings of a node, as its variables.
pub fn settings() -> Vec<(&'static str, String)> {
    let ms = |duration: Duration| format!("{}ms", duration.as_millis());
    vec![
        ("LOCKSTEP_LEASE", ms(LEASE)),
        ("LOCKSTEP_CYCLE", ms(CYCLE)),
        ("LOCKSTEP_FENCE", ms(FENCE)),
        ("LOCKSTEP_RETRY", "500ms".to_owned()),
        ("LOCKSTEP_QUERY_LIMIT", ms(QUERY_LIMIT)),
        ("LOCKSTEP_BROKER_CALL_LIMIT", ms(CALL_LIMIT)),
        ("LOCKSTEP_SEND_RESERVE", ms(SEND_RESERVE)),
        ("LOCKSTEP_SETTLE", ms(SETTLE)),
        ("LOCKSTEP_AUDITS", format!("1s,4s,{}", ms(AUDIT_LAST))),
        ("LOCKSTEP_BEACON", ms(BEACON)),
        ("LOCKSTEP_STALE", ms(STALE)),
        ("LOCKSTEP_CAPACITY", CAPACITY.to_string()),
        ("LOCKSTEP_CLAIM_BATCH", "3".to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep::config::NodeConfig;
    use std::collections::BTreeMap;

    #[test]
    fn a_node_accepts_the_short_times() {
        let mut vars: BTreeMap<String, String> =
            settings().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        vars.insert("LOCKSTEP_DATABASE_URL".to_owned(), "postgres://u@h/d".to_owned());
        let config = NodeConfig::from_vars(&vars).unwrap();
        assert_eq!((config.lease, config.fence, config.settle), (LEASE, FENCE, SETTLE));
    }
}
