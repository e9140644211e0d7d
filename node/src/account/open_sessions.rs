//! How many sessions of this node are open at their brokers.

use super::metrics::names;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The count. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct OpenSessions(Arc<AtomicUsize>);

/// One open session, until it is dropped: also by a panic.
#[derive(Debug)]
pub(super) struct OpenSession(OpenSessions);

impl OpenSessions {
    /// None yet, which is exported as well.
    pub fn new() -> Self {
        metrics::gauge!(names::SESSIONS_OPEN).set(0.0);
        OpenSessions::default()
    }

    /// Sessions that are open now.
    pub fn open(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// One more.
    pub(super) fn enter(&self) -> OpenSession {
        self.0.fetch_add(1, Ordering::Relaxed);
        metrics::gauge!(names::SESSIONS_OPEN).increment(1.0);
        OpenSession(self.clone())
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
        metrics::gauge!(names::SESSIONS_OPEN).decrement(1.0);
    }
}

#[test]
fn a_session_that_panics_is_not_open_any_more() {
    let sessions = OpenSessions::default();
    let (kept, shared) = (sessions.enter(), sessions.clone());
    let panicked = std::thread::spawn(move || {
        let _open = shared.enter();
        assert_eq!(shared.open(), 1, "a lie, to panic");
    });
    assert!(panicked.join().is_err());
    assert_eq!(sessions.open(), 1);
    drop(kept);
    assert_eq!(sessions.open(), 0);
}
