//! Ticket lineage on the follower's account: which trade continues which.
//!
//! MT4 gives what a partial close leaves a new ticket with the comment `from #n`, writes
//! `to #n` on the closed part, and drops our comment on both (CASES.md P2). Before a copy is
//! called gone, its ticket is followed to the trade that it is now (H51, case 16).
//!
//! Invariants:
//! 1. Only trades with the link's magic have lineage: a comment alone moves nothing.
//! 2. Two trades that claim the same predecessor, or a circle, lead nowhere.
//! 3. What is still open has no heir: a list that shows both was not read in one piece, and
//!    closing one of them as a second copy would end the copy itself.
//! 4. A comment is untrusted: it is a link only if all of it is.
//!
//! Not covered: the master's side; its adapter keeps the logical ticket. Brokers that write
//! nothing at all: `world` matches by shape then.

use schemas::{AccountSnapshot, ClosedTrade, FollowerTicket, Magic};
use std::collections::{BTreeMap, BTreeSet};

/// Words that a broker writes on what continues a trade; the closed ticket follows.
const FROM: [&str; 2] = ["from #", "split from #"];
/// What a broker writes on the closed part; the continuing ticket follows.
const TO: &str = "to #";

/// Who continues whom.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    heirs: BTreeMap<FollowerTicket, FollowerTicket>,
    parents: BTreeMap<FollowerTicket, FollowerTicket>,
}

impl Lineage {
    /// Reads the comments of open and finished trades.
    pub(crate) fn read(
        follower: &AccountSnapshot,
        history: &[ClosedTrade],
        magic: Magic,
    ) -> Lineage {
        let is_ours = |value: i64| value == magic.as_i64();
        let mut edges: BTreeSet<(FollowerTicket, FollowerTicket)> = BTreeSet::new();
        for p in follower.positions.iter().filter(|p| is_ours(p.magic)) {
            edges.extend(predecessor(&p.comment).map(|parent| (parent, p.ticket)));
        }
        for t in history.iter().filter(|t| is_ours(t.magic)) {
            edges.extend(predecessor(&t.comment).map(|parent| (parent, t.ticket)));
            edges.extend(number_after(&t.comment, TO).map(|heir| (t.ticket, heir)));
        }
        let positions = follower.positions.iter().map(|p| p.ticket);
        let pendings = follower.pendings.iter().map(|o| o.ticket);
        let open: BTreeSet<FollowerTicket> = positions.chain(pendings).collect();
        edges.retain(|(parent, heir)| parent != heir && !open.contains(parent));
        let mut lineage = Lineage::default();
        let (mut forked, mut merged) = (BTreeSet::new(), BTreeSet::new());
        for (parent, heir) in edges {
            if lineage.heirs.insert(parent, heir).is_some_and(|other| other != heir) {
                forked.insert(parent);
            }
            if lineage.parents.insert(heir, parent).is_some_and(|other| other != parent) {
                merged.insert(heir);
            }
        }
        lineage.heirs.retain(|parent, heir| !forked.contains(parent) && !merged.contains(heir));
        lineage.parents.retain(|heir, parent| !forked.contains(parent) && !merged.contains(heir));
        lineage
    }

    /// The tickets that a trade had and has from this one on, this one first; of a circle only
    /// this one.
    pub(crate) fn onward(&self, from: FollowerTicket) -> Vec<FollowerTicket> {
        walk(&self.heirs, from)
    }

    /// The tickets that a trade had up to this one, this one first.
    pub(crate) fn back(&self, from: FollowerTicket) -> Vec<FollowerTicket> {
        walk(&self.parents, from)
    }
}

fn walk(
    edges: &BTreeMap<FollowerTicket, FollowerTicket>,
    from: FollowerTicket,
) -> Vec<FollowerTicket> {
    let mut path = vec![from];
    let mut at = from;
    while let Some(next) = edges.get(&at) {
        // Every ticket has one successor at most, so a path longer than the edges is a circle.
        if path.len() > edges.len() {
            return vec![from];
        }
        path.push(*next);
        at = *next;
    }
    path
}

fn predecessor(comment: &str) -> Option<FollowerTicket> {
    FROM.iter().find_map(|word| number_after(comment, word))
}

fn number_after(comment: &str, word: &str) -> Option<FollowerTicket> {
    let digits = comment.trim().strip_prefix(word)?;
    let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_plain { digits.parse().ok() } else { None }
}
