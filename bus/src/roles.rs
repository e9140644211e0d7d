//! Who may say and hear what on the bus, and nothing else (H74).
//!
//! Whoever may publish on a master's subject trades its followers; whoever may answer a snapshot
//! request can flatten them. A server that knows these roles refuses both.
//!
//! In: a role, the name of the user that has it. Out: the subjects for the server's configuration.
//!
//! Invariants:
//! 1. A publisher speaks and answers for its own masters alone, and hears nobody else's trades.
//! 2. Nobody publishes into another user's inbox, and no leave comes with a message (NATS'
//!    `allow_responses`): who may send one to himself could name any subject for the answer.
//! 3. A monitor says nothing, and stands in for nobody who would be asked.
//! 4. An operator asks the owners of accounts and hears what they answer to it; it hears no trade, says
//!    nothing in a master's name, and cannot speak of databases. It asks no master for a snapshot either:
//!    such a request can tell of a later epoch, at which a publisher falls silent (H28), and a server
//!    cannot look into it.
//!
//! Not covered: a node trades for every master and is trusted with all of them.

use schemas::AccountId;
use schemas::subject::{self, PREFIX, REPLY_PREFIX};
use std::collections::BTreeSet;

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
    /// Asks the owners of accounts for something, and hears their answers to it alone.
    Operator,
}

/// Subjects that a user may use; everything else is denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subjects {
    /// It may publish here.
    pub publish: Vec<String>,
    /// It may subscribe to these.
    pub subscribe: Vec<String>,
}

impl Role {
    /// What a user of this name and role may do.
    pub fn subjects(&self, user: &str) -> Subjects {
        let own_inbox = format!("{}.>", inbox_prefix(user));
        match self {
            Role::Node => {
                let all = vec![format!("{PREFIX}.>"), format!("{REPLY_PREFIX}.>"), own_inbox];
                Subjects { publish: all.clone(), subscribe: all }
            }
            Role::Publisher(masters) => {
                let said = masters
                    .iter()
                    .flat_map(|m| [subject::event(*m), subject::beacon(*m), subject::replies(*m)]);
                let heard =
                    masters.iter().flat_map(|m| [subject::master_all(*m), subject::snapshot(*m)]);
                Subjects {
                    publish: said.chain([own_inbox.clone()]).collect(),
                    subscribe: heard.chain([own_inbox]).collect(),
                }
            }
            // Not the requests: a server would believe that somebody is there to answer them.
            Role::Monitor => Subjects {
                publish: Vec::new(),
                subscribe: vec![format!("{PREFIX}.master.>"), format!("{PREFIX}.control.>")],
            },
            // Not all of control: with a database's timeline nodes can be stopped. Where its answers go
            // it speaks as well, to prove that it hears.
            Role::Operator => {
                let answers = subject::control_replies(user);
                Subjects {
                    publish: vec![subject::control_accounts(), answers.clone()],
                    subscribe: vec![answers],
                }
            }
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
        let Subjects { publish, subscribe } = Role::Publisher([seven].into()).subjects("alice");
        assert_eq!(
            publish,
            [
                "lockstep.v1.master.7.event",
                "lockstep.v1.master.7.beacon",
                "lockstep-reply.v1.7.>",
                "_INBOX.alice.>"
            ]
        );
        assert_eq!(
            subscribe,
            ["lockstep.v1.master.7.*", "lockstep.v1.snapshot.7", "_INBOX.alice.>"]
        );
    }

    #[test]
    fn a_monitor_says_nothing() {
        assert!(Role::Monitor.subjects("eve").publish.is_empty());
    }

    #[test]
    fn an_operator_asks_owners_and_hears_its_own_answers() {
        let Subjects { publish, subscribe } = Role::Operator.subjects("olga");
        let answers = "lockstep-reply.v1.control.olga.>";
        assert_eq!(publish, ["lockstep.v1.control.account.*", answers]);
        assert_eq!(subscribe, [answers]);
    }

    #[test]
    fn a_name_that_would_widen_a_subject_is_no_name() {
        for name in ["", "a.b", "*", ">", "a b", "Alice", &"x".repeat(65)] {
            assert!(!is_user_name(name), "{name:?}");
        }
        assert!(is_user_name("node-1"));
    }
}
