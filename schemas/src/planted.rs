//! Planted bugs: named ways to break a rule, for proving that the simulation would notice.
//!
//! Each [`Bug`] takes away one guard of the decision code. The place of the guard asks [`is`], and
//! what is missing then is said there. A bug is planted at run time, for the calling thread, so a
//! test program can plant each in turn.
//!
//! Inputs: [`plant`] by a test. Output: [`is`] to the guard.
//!
//! Invariants:
//! 1. Without the feature `planted`, [`is`] is constantly false and `plant` does not exist: every
//!    bug is compiled out.
//! 2. A build without debug assertions, a release for one, cannot have the feature.
//! 3. With the feature, nothing is planted until [`plant`] is called on the same thread.
//!
//! Not covered: what finds the bugs; that is the simulation's.

#[cfg(all(feature = "planted", not(debug_assertions)))]
compile_error!("planted bugs are for the simulation, which is built with debug assertions");

#[cfg(feature = "planted")]
use std::{cell::Cell, time::Duration};

macro_rules! bugs {
    ($($bug:ident: $what:literal,)*) => {
        /// A bug that can be planted; the names are those of the list of hazards.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Bug {
            $(#[doc = $what] $bug,)*
        }

        impl Bug {
            /// Every bug, in order.
            pub const ALL: &[Self] = &[$(Self::$bug),*];

            /// Its name: `P1` to `P22`.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$bug => stringify!($bug),)* }
            }

            /// What is wrong while it is planted, in a sentence.
            pub const fn what(self) -> &'static str {
                match self { $(Self::$bug => $what,)* }
            }
        }
    };
}

bugs! {
    P1: "A lease's deadline counts from the answer of its cycle, not from before the transaction.",
    P2: "A lease's deadline counts from an instant read after the transaction began.",
    P3: "One account's permission counts for every account the node ever held.",
    P4: "A permit is checked before the queue and not again right before the send.",
    P5: "A live row is fenced by the node that holds the account, whatever the token.",
    P6: "A live row is fenced without locking the account's row.",
    P7: "An ended row ends the live pair of its (link, master ticket), whatever copy that has.",
    P8: "What only begins like the tag of a ticket counts as its tag.",
    P9: "A read that failed or is not complete yet counts as an empty account.",
    P10: "An open without an answer that the broker does not show counts as failed at once.",
    P11: "The follower's history is not asked before a late open.",
    P12: "A publisher starts and goes on under the epoch it had.",
    P13: "A feed accepts messages of a lower epoch.",
    P14: "A plan is executed although what it was made from has changed since.",
    P15: "A partial close reduces the copy by the master's share, not to its target volume.",
    P16: "A reconcile follows a claim only, not a lost and restored session or lease.",
    P17: "An account is handed in with orders unanswered or rows unwritten.",
    P18: "A master is published without the account's permission.",
    P19: "An epoch is announced by its first beacon, no other follows, and nobody notices.",
    P20: "An open of unknown outcome is sent again.",
    P21: "A row that the database refuses is retried, and one it could not take is dropped.",
    P22: "A reconcile visits only what the brokers list, not the pairs they do not.",
}

impl Bug {
    /// The bug of this name, in either case.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|bug| bug.as_str().eq_ignore_ascii_case(word))
    }
}

#[cfg(feature = "planted")]
thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    static BEGUN: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Plants one bug for the calling thread, or with `None` takes it out again.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
    BEGUN.set(None);
}

/// Whether this bug is planted for the calling thread.
#[cfg(feature = "planted")]
#[inline]
pub fn is(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Whether this bug is planted: never, in a build without the feature `planted`.
#[cfg(not(feature = "planted"))]
#[inline]
pub const fn is(_bug: Bug) -> bool {
    false
}

/// Notes the node's time, since its start, at which a store began its transaction: for [`Bug::P2`].
///
/// The last note of the thread counts when the answer is taken in, so a store of several nodes
/// notes it together with its answer. A note from outside of the cycle is ignored.
#[cfg(feature = "planted")]
pub fn note_begun(at: Duration) {
    BEGUN.set(Some(at));
}

/// The node's time last noted by [`note_begun`] on this thread since the last [`plant`].
#[cfg(feature = "planted")]
pub fn begun() -> Option<Duration> {
    BEGUN.get()
}

/// No store notes a time, in a build without the feature `planted`.
#[cfg(not(feature = "planted"))]
pub const fn begun() -> Option<std::time::Duration> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_is_found_by_its_name_in_either_case() {
        for &bug in Bug::ALL {
            assert_eq!(Bug::from_word(bug.as_str()), Some(bug));
            assert_eq!(Bug::from_word(&bug.as_str().to_lowercase()), Some(bug));
        }
        assert_eq!((Bug::ALL.len(), Bug::from_word("P23")), (22, None));
    }

    #[test]
    fn no_bug_is_there_unless_planted() {
        assert!(Bug::ALL.iter().all(|&bug| !is(bug)));
    }

    #[cfg(feature = "planted")]
    #[test]
    fn a_bug_is_planted_alone_and_for_its_thread_alone() {
        plant(Some(Bug::P9));
        assert!(Bug::ALL.iter().all(|&bug| is(bug) == (bug == Bug::P9)));
        let elsewhere = std::thread::spawn(|| Bug::ALL.iter().any(|&bug| is(bug)));
        assert!(!elsewhere.join().expect("the other thread only looks"));
        note_begun(Duration::from_secs(1));
        assert_eq!(begun(), Some(Duration::from_secs(1)));
        plant(None);
        assert!(!is(Bug::P9) && begun().is_none());
    }
}
