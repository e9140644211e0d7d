//! Master tickets without any pair.
//!
//! Decides: adopt a copy that is there; record one that was there and ended; else open, skip
//! or wait.
//!
//! Invariants:
//! 1. Nothing is opened before the follower's history was searched for a copy that ended
//!    already (H43), and only if the history reaches back to the master's open.
//! 2. Nothing is opened while an unexplained trade with our magic may be the copy (H53).

use crate::action::{AbsentFrom, CloseCause, CopyStep, EndedHow, SkipReason, WaitReason};
use crate::input::LinkMode;
use crate::orphans::plan_orphans;
use crate::pair::Rejected;
use crate::pairs::close_duplicates;
use crate::ticket::{
    Decided, Facts, MasterView, OpenDecision, adopt, copy_side, decide_open, gate, manage, skip,
    usable_spec,
};
use crate::world::{Found, World};
use schemas::MasterTicket;
use schemas::planted::{self, Bug};

/// Plans a ticket without a pair; says what the plan rests on if that is an absence.
pub(crate) fn plan_unpaired(
    world: &World<'_>,
    ticket: MasterTicket,
    decided: &mut Decided,
) -> Option<AbsentFrom> {
    let copies = world.copies(ticket);
    match (world.wanted(ticket), copies.split_first()) {
        (Some(view), Some((copy, others))) => {
            adopt_copy(world, view, copy, decided);
            close_duplicates(others, decided);
            None
        }
        (None, _) => plan_orphans(copies, CloseCause::OrphanMasterGone, decided)
            .then_some(AbsentFrom::Master),
        (Some(view), None) => {
            open_missing(world, ticket, view, decided);
            None
        }
    }
}

fn adopt_copy(world: &World<'_>, view: MasterView<'_>, copy: &Found<'_>, decided: &mut Decided) {
    let rules = world.parts.rules;
    let found = copy.item.copy;
    let base = world.base_of_copy(&found, view);
    // A copy in the direction that the rules do not give is of the trade before a reversal.
    let is_as_ruled = found.side == copy_side(rules, view.side());
    let master_side = if is_as_ruled { view.side() } else { view.side().opposite() };
    decided.step(adopt(&found, copy.found_by, master_side, base));
    let facts = Facts {
        is_closing: false,
        side: found.side,
        master_side,
        base,
        rejected: Rejected::default(),
    };
    manage(rules, Some(view), &facts, &found, &world.market, decided);
}

fn open_missing(
    world: &World<'_>,
    ticket: MasterTicket,
    view: MasterView<'_>,
    decided: &mut Decided,
) {
    let rules = world.parts.rules;
    if let Some(decision) = gate(rules, view) {
        // A link that only closes still has to find what it is to close.
        if rules.mode == LinkMode::CloseOnly && world.may_have_stray(ticket) {
            return decided.wait(WaitReason::StrayMayBeCopy);
        }
        return decision.put(rules, view, &world.market, decided);
    }
    let spec = match usable_spec(rules, view, &world.market) {
        Ok(spec) => spec,
        Err(reason) => return OpenDecision::Skip(reason).put(rules, view, &world.market, decided),
    };
    let looks_back = !planted::is(Bug::P11);
    if looks_back && let Some(ended) = world.tagged_history(ticket).last() {
        return decided.step(CopyStep::MarkClosed {
            ticket: ended.ticket,
            symbol: ended.symbol.clone(),
            side: ended.side,
            master_side: view.side(),
            master_lots: view.lots(),
            how: EndedHow::History,
        });
    }
    if looks_back && !world.history_reaches(view.opened_at()) {
        return decided.wait(WaitReason::HistoryTooShort);
    }
    if world.may_have_stray(ticket) {
        return decided.wait(WaitReason::StrayMayBeCopy);
    }
    let side = copy_side(rules, view.side());
    let ended = world.loose_history(ticket, &spec.symbol, side, view.opened_at());
    if looks_back && !ended.is_empty() {
        return decided.step(skip(rules, view, &world.market, SkipReason::EndedBeforeTakeover));
    }
    decide_open(rules, view, &world.market).put(rules, view, &world.market, decided);
}
