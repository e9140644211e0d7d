//! Copies that nothing justifies.
//!
//! Decides: a copy that is ours by exact tag, by pair ticket or by their lineage, and whose
//! pair has ended or whose master trade does not exist, is closed. A trade that only has our
//! magic is reported and left alone: another program may use the same number (H56).
//!
//! Invariants:
//! 1. Closing needs a tag or ticket of ours and, by the type of the input, complete lists.
//! 2. Every orphan counts as an absence, so that a truncated list cannot close many (H41).
//!
//! Not covered: trades with a foreign magic or none (cases 56, 66). They are not even seen.

use crate::action::{AbsentFrom, CloseCause, CopyStep};
use crate::ticket::Decided;
use crate::world::{Found, World};
use schemas::MasterTicket;

/// Closes every copy; says whether there was one.
pub(crate) fn plan_orphans(copies: &[Found<'_>], cause: CloseCause, decided: &mut Decided) -> bool {
    for found in copies {
        let (ticket, is_pending) = (found.item.copy.ticket, found.item.copy.pending.is_some());
        decided.step(CopyStep::CloseOrphan { ticket, is_pending, cause });
    }
    !copies.is_empty()
}

/// Plans a ticket whose pair has ended: what is still open of it is closed (S5).
pub(crate) fn plan_ended(
    world: &World<'_>,
    ticket: MasterTicket,
    decided: &mut Decided,
) -> Option<AbsentFrom> {
    plan_orphans(world.copies(ticket), CloseCause::OrphanPairEnded, decided)
        .then_some(AbsentFrom::Pairs)
}
