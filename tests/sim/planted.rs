//! What the planted bugs change in the parts of the world that stand for SQL and for shells.

/// A fenced write holds the account row until its commit (M6).
pub(crate) fn fence_locks_the_row() -> bool {
    true
}

/// A session waits for the broker's sync mark (H41).
pub(crate) fn session_waits_for_the_sync_mark() -> bool {
    true
}

/// The transaction of a cycle begins now, by the node's clock.
pub(crate) fn note_begun(_since_start: std::time::Duration) {}

/// A tenure may be given back: no order is unanswered, no row unwritten (S20).
pub(crate) fn may_be_handed_in(unanswered: usize, unwritten: usize) -> bool {
    unanswered == 0 && unwritten == 0
}

/// A publisher may speak: it has the permission of its master's lease (H26).
pub(crate) fn may_speak(
    gate: &lockstep::gate::Gate,
    account: schemas::AccountId,
    token: schemas::Token,
    now: lockstep::clock::NodeTime,
) -> bool {
    gate.permission(account, now).is_some_and(|permission| permission.token == token)
}
