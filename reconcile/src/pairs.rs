//! Master tickets with a live pair.
//!
//! Decides: bind the pair to its copy, manage the copy, close second copies; and where there
//! is no copy, whether it ended, never came, or may still come.
//!
//! Invariants:
//! 1. A copy that ended is marked closed and never opened again (S5, case 8).
//! 2. An order that is nowhere to be found stays unresolved until it is older than the broker's
//!    longest answer, by a read and a history that would show it (H42).
//! 3. Of several copies the pair's stays, else the oldest; the others are closed (H55).

use crate::action::{AbsentFrom, CopyStep, EndedHow, FailReason, FoundBy, WaitReason};
use crate::pair::{Pair, PairState};
use crate::ticket::{Decided, MasterView, bind, manage};
use crate::world::{Found, World};
use schemas::planted::{self, Bug};
use schemas::{ClosedTrade, FollowerTicket};

/// Plans a ticket with a live pair; says what the plan rests on if that is an absence.
pub(crate) fn plan_pair(
    world: &World<'_>,
    pair: &Pair,
    decided: &mut Decided,
) -> Option<AbsentFrom> {
    let ticket = pair.master_ticket;
    let wanted = world.wanted(ticket);
    let Some((copy, others)) = world.copies(ticket).split_first() else {
        return plan_missing(world, pair, wanted, decided);
    };
    if !names(pair, copy) && has_ended(world, pair) {
        // The pair's copy is finished, so what else carries its tag is a second one.
        mark_closed(
            pair,
            wanted,
            pair.follower_ticket.unwrap_or(copy.item.copy.ticket),
            EndedHow::History,
            decided,
        );
        close_duplicates(world.copies(ticket), decided);
        return None;
    }
    let view = copy.item.copy;
    let base = world.base_of_pair(pair, &view, wanted);
    let facts = bind(pair, &view, copy.found_by, base, decided);
    manage(world.parts.rules, wanted, &facts, &view, &world.market, decided);
    close_duplicates(others, decided);
    (wanted.is_none() && pair.state != PairState::Closing).then_some(AbsentFrom::Master)
}

/// The copy was recognised by the pair's own ticket or its lineage, not by a tag alone.
fn names(pair: &Pair, copy: &Found<'_>) -> bool {
    match copy.found_by {
        FoundBy::Ticket | FoundBy::Lineage | FoundBy::Shape | FoundBy::Fill => true,
        FoundBy::Tag | FoundBy::UniqueMatch => pair.follower_ticket.is_none(),
    }
}

/// Closes or cancels copies that are one too many.
pub(crate) fn close_duplicates(others: &[Found<'_>], decided: &mut Decided) {
    for other in others {
        decided.step(CopyStep::CloseDuplicate {
            ticket: other.item.copy.ticket,
            is_pending: other.item.copy.pending.is_some(),
        });
    }
}

fn plan_missing(
    world: &World<'_>,
    pair: &Pair,
    wanted: Option<MasterView<'_>>,
    decided: &mut Decided,
) -> Option<AbsentFrom> {
    if pair.sent_at.is_some_and(|sent_at| world.parts.follower.at <= sent_at) {
        decided.wait(WaitReason::ReadOlderThanOrder);
        return None;
    }
    match pair.follower_ticket {
        Some(ticket) if pair.state != PairState::Sending => {
            plan_gone(world, pair, ticket, wanted, decided)
        }
        Some(_) | None => {
            plan_unanswered(world, pair, wanted, decided);
            None
        }
    }
}

fn plan_gone(
    world: &World<'_>,
    pair: &Pair,
    ticket: FollowerTicket,
    wanted: Option<MasterView<'_>>,
    decided: &mut Decided,
) -> Option<AbsentFrom> {
    if world.is_ambiguous(pair.master_ticket) {
        decided.wait(WaitReason::StrayMayBeCopy);
        return None;
    }
    let is_known = has_ended(world, pair);
    let how = if is_known { EndedHow::History } else { EndedHow::Absent };
    mark_closed(pair, wanted, ticket, how, decided);
    // A copy that we have asked the broker to close is expected to be gone.
    (!is_known && pair.state != PairState::Closing).then_some(AbsentFrom::Follower)
}

/// The history shows that nothing of the pair's copy is left.
fn has_ended(world: &World<'_>, pair: &Pair) -> bool {
    let Some(ticket) = pair.follower_ticket else { return false };
    let last = world.lineage.onward(ticket).last().copied().unwrap_or(ticket);
    let last_part = world.ended_parts(pair).into_iter().rfind(|t| t.ticket == last);
    last_part.is_some_and(|part| part.lots_left.is_none())
}

fn plan_unanswered(
    world: &World<'_>,
    pair: &Pair,
    wanted: Option<MasterView<'_>>,
    decided: &mut Decided,
) {
    if let Some(ended) = world.tagged_history(pair.master_ticket).last() {
        return mark_closed(pair, wanted, ended.ticket, EndedHow::History, decided);
    }
    if planted::is(Bug::P10) {
        // Nothing is waited for.
        return decided.step(CopyStep::MarkFailed { reason: FailReason::NeverArrived });
    }
    let Some(sent_at) = pair.sent_at else { return decided.wait(WaitReason::AnswerDue) };
    let limits = world.parts.limits;
    let age = world.parts.follower.at.since(sent_at);
    let may_arrive = world.parts.on_the_road.contains(&pair.master_ticket);
    if may_arrive || age <= limits.longest_delivery() {
        return decided.wait(WaitReason::AnswerDue);
    }
    if !world.history_reaches(sent_at) {
        return decided.wait(WaitReason::HistoryTooShort);
    }
    if world.may_have_stray(pair.master_ticket) {
        return decided.wait(WaitReason::StrayMayBeCopy);
    }
    match ended_untagged(world, pair) {
        Some(ended) => mark_closed(pair, wanted, ended.ticket, EndedHow::History, decided),
        None => decided.step(CopyStep::MarkFailed { reason: FailReason::NeverArrived }),
    }
}

/// The one finished trade that can have been this order, where its tag was overwritten.
fn ended_untagged<'a>(world: &World<'a>, pair: &Pair) -> Option<&'a ClosedTrade> {
    let sent_at = pair.sent_at?;
    let ended = world.loose_history(pair.master_ticket, &pair.symbol, pair.side, sent_at);
    match ended.as_slice() {
        [only] if Some(only.lots) == pair.lots_at_open && !world.is_open(only.ticket) => Some(only),
        _ => None,
    }
}

fn mark_closed(
    pair: &Pair,
    wanted: Option<MasterView<'_>>,
    ticket: FollowerTicket,
    how: EndedHow,
    decided: &mut Decided,
) {
    decided.step(CopyStep::MarkClosed {
        ticket,
        symbol: pair.symbol.clone(),
        side: pair.side,
        master_side: pair.master_side,
        master_lots: wanted.map_or(pair.master_lots_at_open, MasterView::lots),
        how,
    });
}
