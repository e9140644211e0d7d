//! Does the broker keep what our orders carry? (H53)
//!
//! Decides: whether a link's copies can be told from their tags. Every copy that is confirmed is
//! looked at, the first one of a link included: if it came back without the tag or the magic
//! of its order, the link copies on without relying on either (`LinkMode::CopyUntagged`).
//!
//! Invariants:
//! 1. Only the copy under the ticket of the answer is evidence; one that ended or was renumbered
//!    before its answer says nothing.
//! 2. Rules that were read before the finding was stored do not undo it; a later word of the
//!    operator does.
//!
//! Not covered: a copy whose row is lost before the finding is stored. Where the magic came back
//! the trade is reported, and nothing is opened that it may be the copy of; where it did not, the
//! next owner cannot know of it.

use super::queue::TicketKey;
use super::state::{Effect, Follower, Link};
use reconcile::{LinkMode, LinkRules, tag};
use schemas::FollowerTicket;

impl Follower {
    /// A copy was confirmed: did it keep its tag and its magic?
    pub(super) fn look_at_tag(
        &mut self,
        key: TicketKey,
        copy: FollowerTicket,
        effects: &mut Vec<Effect>,
    ) {
        let Some(view) = &self.view else { return };
        let position = view.positions.get(&copy).map(|p| (p.magic, p.comment.as_str()));
        let pending = view.pendings.get(&copy).map(|o| (o.magic, o.comment.as_str()));
        let Some((magic, comment)) = position.or(pending) else { return };
        let Some(link) = self.links.get_mut(&key.link) else { return };
        let is_kept = magic == link.rules.magic.as_i64()
            && tag::decode(comment) == Some((key.link, key.ticket));
        if is_kept || link.rules.mode != LinkMode::Copy {
            return;
        }
        link.rules.mode = LinkMode::CopyUntagged;
        link.found_untaggable = true;
        tracing::warn!(link = %key.link, ticket = %copy, magic, comment, "the broker does not keep our tags");
        effects.push(Effect::Untaggable(key.link));
    }
}

impl Link {
    /// Rules as they are stored, which may not contain yet what was found in this tenure.
    pub(super) fn keep_untagged(&mut self, rules: &mut LinkRules) {
        match rules.mode {
            LinkMode::CopyUntagged => self.found_untaggable = false,
            LinkMode::Copy if self.found_untaggable => rules.mode = LinkMode::CopyUntagged,
            LinkMode::Copy | LinkMode::CloseOnly => {}
        }
    }
}
