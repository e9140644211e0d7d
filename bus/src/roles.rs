//! Who may say and hear what on the bus, and nothing else (H74).
//!
//! Whoever may publish on a master's subject trades its followers; whoever may answer a snapshot
//! request can flatten them. A server that knows these roles refuses both.
//!
//! In: a role, the name of the user that has it. Out: the subjects for the server's configuration.
//!
//! Invariants:
//! 1. A publisher speaks for its own masters alone, and hears nobody else's trades.
//! 2. Nobody can publish into another user's inbox; a request is answered by leave of the request,
//!    to its own inbox and for as long as it can wait ([`Subjects::answers`]).
//! 3. A monitor says nothing.
//!
//! Not covered: a node trades for every master and is trusted with all of them.

use crate::snapshot::SNAPSHOT_LIMIT;
use schemas::AccountId;
use schemas::codec::SNAPSHOT_PAGES_MAX;
use schemas::subject::{self, PREFIX};
use std::collections::BTreeSet;
use std::time::Duration;

/// What the inboxes of every user begin with.
const INBOX: &str = "_INBOX";

/// What a user of the bus is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// A node: leads, follows, and hears of a promotion.
    Node,
    /// A publisher of these masters.
    Publisher(BTreeSet<AccountId>),
    /// Listens, and says nothing.
    Monitor,
}

/// Subjects that a user may use; everything else is denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subjects {
    /// It may publish here.
    pub publish: Vec<String>,
    /// It may subscribe to these.
    pub subscribe: Vec<String>,
    /// Most messages that answer one request, and the longest time they may take.
    pub answers: Option<(u32, Duration)>,
}

impl Role {
    /// What a user of this name and role may do.
    pub fn subjects(&self, user: &str) -> Subjects {
        let own_inbox = format!("{}.>", inbox_prefix(user));
        let answers = Some((SNAPSHOT_PAGES_MAX, SNAPSHOT_LIMIT));
        match self {
            Role::Node => Subjects {
                publish: vec![format!("{PREFIX}.>"), own_inbox.clone()],
                subscribe: vec![format!("{PREFIX}.>"), own_inbox],
                answers,
            },
            Role::Publisher(masters) => {
                let said = masters.iter().flat_map(|m| [subject::event(*m), subject::beacon(*m)]);
                let heard =
                    masters.iter().flat_map(|m| [subject::master_all(*m), subject::snapshot(*m)]);
                Subjects {
                    publish: said.chain([own_inbox.clone()]).collect(),
                    subscribe: heard.chain([own_inbox]).collect(),
                    answers,
                }
            }
            Role::Monitor => Subjects {
                publish: Vec::new(),
                subscribe: vec![format!("{PREFIX}.>")],
                answers: None,
            },
        }
    }
}

/// What the inboxes of a user begin with: its own, so that a server can keep others out.
pub fn inbox_prefix(user: &str) -> String {
    format!("{INBOX}.{user}")
}

/// A name that is one token of a subject: the inboxes of its user have it in theirs.
pub fn is_user_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_publisher_speaks_for_its_own_masters_alone() {
        let seven = AccountId::new(7).unwrap();
        let Subjects { publish, subscribe, .. } = Role::Publisher([seven].into()).subjects("alice");
        assert_eq!(
            publish,
            ["lockstep.v1.master.7.event", "lockstep.v1.master.7.beacon", "_INBOX.alice.>"]
        );
        assert_eq!(
            subscribe,
            ["lockstep.v1.master.7.*", "lockstep.v1.snapshot.7", "_INBOX.alice.>"]
        );
    }

    #[test]
    fn a_monitor_says_nothing() {
        let subjects = Role::Monitor.subjects("eve");
        assert_eq!((subjects.publish, subjects.answers), (vec![], None));
    }

    #[test]
    fn a_name_that_would_widen_a_subject_is_no_name() {
        for name in ["", "a.b", "*", ">", "a b", "Alice", &"x".repeat(65)] {
            assert!(!is_user_name(name), "{name:?}");
        }
        assert!(is_user_name("node-1"));
    }
}
