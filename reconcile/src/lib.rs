//! The pure reconcile: two states in, the actions that make them agree out.
//!
//! [`plan`] compares a master's snapshot with a follower's for one link. [`plan_ticket`]
//! decides about one ticket on the live path. Both use the same functions per ticket.
//! Nothing here waits, reads a clock or keeps anything.
//!
//! Inputs: complete reads only ([`ReconcileInput`]). Output: a [`Plan`].
//!
//! Invariants:
//! 1. Deterministic, and independent of the order of every input list (S14).
//! 2. Planning after a perfectly executed plan gives no action; planning after any part of it
//!    leads to the same end (S14).
//! 3. At most one action for a (link, master ticket) (S14).
//! 4. Total: no input panics (S14).
//! 5. At most one copy of a master ticket is opened, and none after a copy of it ended, failed
//!    or was skipped (S4, S5, S19).
//! 6. An open has its cause in the master's state; a late one also a fresh price inside the
//!    link's slippage (S6).
//! 7. A close names its reason; absence is believed only from complete lists, and much of it
//!    only twice (S7, S13, H41).
//! 8. A copy's volume never grows and is brought to a target, not reduced by a share (S8).
//! 9. A trade with a foreign magic is never touched; one with our magic alone is reported.
//! 10. For a paused link nothing is ordered and nothing refused; copies that are found, renumbered
//!     or gone are written down all the same.
//!
//! Not covered: sending, permits, rows, and whether the reads are still the newest when the
//! plan is executed. The caller compares [`Basis`] and checks each step's precondition again.

pub mod action;
mod hold;
pub mod input;
mod lineage;
mod orphans;
pub mod pair;
mod pairs;
mod pendings;
pub mod price_guard;
pub mod sizing;
mod stops;
pub mod tag;
pub mod ticket;
mod unpaired;
mod world;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use action::{
    AbsentFrom, Basis, CloseCause, CopyAction, CopyStep, EndReason, EndedHow, FailReason, FoundBy,
    HeldPlan, Note, Plan, SkipReason, StrayReason, WaitReason,
};
pub use input::{
    AboveMax, BelowMin, FollowerHistory, InputError, InputParts, Limits, LinkMode, LinkRules,
    ReconcileInput, Sizing, history_needed_since, quotes_needed,
};
pub use pair::{Pair, PairId, PairState, Pairs, Rejected, Stops};
pub use sizing::{SizeInput, Surplus, Volumes, size_copy, surplus, target_lots};
pub use ticket::{CopyView, Market, MasterView, TicketDecision, TicketInput, plan_ticket};

use crate::ticket::Decided;
use crate::world::World;
use schemas::MasterTicket;
use schemas::planted::{self, Bug};
use std::collections::BTreeSet;

/// What makes the follower agree with the master, by the link's rules.
///
/// Shape: complete reads of both sides in; at most one action per master ticket out, ascending.
/// Errors: none; what cannot be decided now is a [`Note`], what is not copied a recorded skip.
/// Source: DESIGN.md §6. Goes over the union of pairs, master trades and follower trades, never
/// over one list (B39).
pub fn plan(input: &ReconcileInput<'_>) -> Plan {
    let parts = input.parts;
    let world = World::new(parts);
    let basis = basis_of(&parts);
    let (mut actions, mut notes) = (Vec::new(), Vec::new());
    let mut absent = BTreeSet::new();
    let mut measured_by = 0;
    for ticket in world.tickets() {
        let is_live = parts.pairs.main(ticket).is_some_and(|pair| pair.state.is_live());
        let is_listed = || world.wanted(ticket).is_some() && !world.copies(ticket).is_empty();
        if planted::is(Bug::P22) && is_live && !is_listed() {
            continue; // only what both lists show is visited
        }
        if is_live || !world.copies(ticket).is_empty() {
            measured_by += 1;
        }
        let mut decided = Decided::default();
        let rests_on = plan_one(&world, ticket, &mut decided);
        let is_held_back = parts.rules.paused && decided.keep_facts();
        // What is not done rests on nothing: a pause must not hold what is only written down.
        absent.extend(rests_on.filter(|_| !is_held_back).map(|from| (ticket, from)));
        notes.extend(decided.waiting.map(|why| Note::Waiting { ticket, why }));
        if !decided.steps.is_empty() {
            let (link, steps) = (parts.rules.link, decided.steps);
            actions.push(CopyAction { link, master_ticket: ticket, steps });
        }
    }
    notes.extend(world.strays.iter().map(|(&ticket, &why)| Note::ReportOrphan { ticket, why }));
    let held = hold::hold(&parts, basis, absent, measured_by);
    if held.is_some() {
        actions.clear();
    }
    Plan { basis, actions, notes, held }
}

fn plan_one(world: &World<'_>, ticket: MasterTicket, decided: &mut Decided) -> Option<AbsentFrom> {
    if world.parts.busy.contains(&ticket) {
        decided.wait(WaitReason::SlotBusy);
        return None;
    }
    match world.parts.pairs.main(ticket) {
        Some(pair) if pair.state.is_live() => pairs::plan_pair(world, pair, decided),
        Some(_) => orphans::plan_ended(world, ticket, decided),
        None => unpaired::plan_unpaired(world, ticket, decided),
    }
}

fn basis_of(parts: &InputParts<'_>) -> Basis {
    Basis {
        epoch: parts.master.epoch,
        seq: parts.master.seq,
        master_at: parts.master.at,
        follower_revision: parts.follower.revision,
        follower_at: parts.follower.at,
        planned_at: parts.now,
    }
}
