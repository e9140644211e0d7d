//! A link that is paused or only closes, and what is repaired when it is not any more.

use super::world::*;
use crate::follower::Input;
use crate::follower::state::Planned;
use reconcile::{
    CloseCause, CopyAction, CopyStep, EndReason, LinkMode, LinkRules, PairState, Pairs, SkipReason,
};

fn paused(paused: bool) -> LinkRules {
    LinkRules { paused, ..rules(LINK, MASTER) }
}

fn set(world: &mut World, is_paused: bool) {
    world.step(Input::Links(vec![(paused(is_paused), Pairs::default())]));
    world.calm(seconds(1));
}

/// A link that copied ticket 1 and is paused.
fn paused_world() -> World {
    let mut world = World::copying();
    world.master_opens(1);
    world.calm(seconds(1));
    set(&mut world, true);
    world
}

#[test]
fn a_paused_link_sends_nothing_and_is_repaired_when_it_is_resumed() {
    let mut world = paused_world();
    world.master_stops(1, Some("1.05000"));
    world.master_opens(2);
    world.calm(seconds(20));
    world.master_closes(1);
    world.calm(seconds(100));
    assert_eq!(world.actions(1), ["open"], "neither live nor by a plan");
    assert!(world.actions(2).is_empty());
    assert_eq!(world.restless, 0);
    set(&mut world, false);
    world.calm(seconds(2));
    assert_eq!(world.actions(1), ["open", "close"]);
    // Late, and the price has not moved.
    assert_eq!(world.actions(2), ["open"]);
    assert_eq!(world.state(2), Some(PairState::Open));
}

#[test]
fn what_the_master_opened_during_a_pause_is_skipped_when_its_price_has_moved() {
    let mut world = paused_world();
    world.master_opens(2);
    world.calm(seconds(20));
    world.quote("1.20000", "1.20002");
    world.step(Input::Links(vec![(paused(false), Pairs::default())]));
    world.quote("1.20000", "1.20002");
    world.answer_everything();
    assert!(world.actions(2).is_empty());
    let skipped = EndReason::Skipped(SkipReason::LateOpenPriceMoved);
    assert_eq!(world.pair(2).unwrap().reason, Some(skipped));
}

#[test]
fn a_trade_that_came_and_went_during_a_pause_leaves_no_trace() {
    let mut world = paused_world();
    world.master_opens(2);
    world.calm(seconds(5));
    world.master_closes(2);
    set(&mut world, false);
    world.calm(seconds(5));
    assert!(world.actions(2).is_empty());
    assert!(world.pair(2).is_none());
}

#[test]
fn a_copy_that_is_stopped_out_during_a_pause_is_written_down() {
    let mut world = paused_world();
    world.stop_out();
    world.calm(seconds(2));
    assert_eq!(world.state(1), Some(PairState::Closed));
    set(&mut world, false);
    world.calm(seconds(5));
    assert_eq!(world.actions(1), ["open"], "never opened again");
}

#[test]
fn the_other_link_of_a_follower_goes_on() {
    let mut world = World::copying_with(Setup {
        links: vec![
            (rules(LINK, MASTER), Pairs::default()),
            (rules(OTHER_LINK, OTHER_MASTER), Pairs::default()),
        ],
        ..Setup::default()
    });
    let others = || (rules(OTHER_LINK, OTHER_MASTER), Pairs::default());
    world.step(Input::Links(vec![(paused(true), Pairs::default()), others()]));
    world.master_opens(1);
    let opened = schemas::Change::PositionOpened(world.position(5));
    world.change_of(OTHER_MASTER, opened);
    world.calm(seconds(10));
    assert!(world.actions(1).is_empty());
    assert_eq!(world.actions(5), ["open"]);
}

#[test]
fn an_order_that_waits_for_room_when_its_link_is_paused_never_leaves() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    world.master_opens(1);
    world.master_opens(2);
    assert_eq!(world.flying.len(), 1);
    world.step(Input::Links(vec![(paused(true), Pairs::default())]));
    world.calm(seconds(10));
    assert_eq!(world.actions(1), ["open"], "it had left");
    assert_eq!(world.state(1), Some(PairState::Open), "and is known");
    assert!(world.actions(2).is_empty());
}

#[test]
fn what_a_plan_wanted_before_the_pause_does_not_leave_after_it() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    world.doubt();
    for ticket in [1, 2] {
        world.master_has(ticket);
    }
    world.snapshots();
    world.answer_reads();
    assert_eq!(world.flying.len(), 1, "one is planned and waits for room");
    world.step(Input::Links(vec![(paused(true), Pairs::default())]));
    world.carry_out();
    world.calm(seconds(10));
    assert_eq!(world.sent.len(), 1);
}

#[test]
fn a_close_that_the_broker_put_off_is_not_asked_for_again_while_the_link_is_paused() {
    let mut world = World::copying();
    world.master_opens(1);
    world.calm(seconds(1));
    world.refusals.push(("close", schemas::RejectClass::Later));
    world.master_closes(1);
    world.carry_out();
    set(&mut world, true);
    world.calm(seconds(60));
    assert_eq!(world.actions(1), ["open", "close"]);
    set(&mut world, false);
    world.calm(seconds(2));
    assert_eq!(world.actions(1), ["open", "close", "close"]);
    assert_eq!(world.state(1), Some(PairState::Closed));
}

// It was decided by a plan of before, and only waits for its turn.
#[test]
fn an_open_that_waits_for_room_when_its_link_only_closes_from_then_on_never_leaves() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    world.doubt();
    for ticket in [1, 2] {
        world.master_has(ticket);
    }
    world.snapshots();
    world.answer_reads();
    assert_eq!(world.flying.len(), 1, "one is planned and waits for room");
    let closes = LinkRules { mode: LinkMode::CloseOnly, ..rules(LINK, MASTER) };
    world.step(Input::Links(vec![(closes, Pairs::default())]));
    world.carry_out();
    world.calm(seconds(10));
    assert_eq!(world.sent.len(), 1);
    let reasons = [1, 2].map(|ticket| world.pair(ticket).unwrap().reason);
    let skipped = EndReason::Skipped(SkipReason::CloseOnly);
    assert!(reasons.contains(&Some(skipped)), "{reasons:?}");
}

// Plans, live decisions and new rules all leave it out before; this is the last line.
#[test]
fn an_order_that_was_decided_all_the_same_does_not_leave_for_a_paused_link() {
    let mut world = paused_world();
    let ticket = world.copy_ticket();
    let close = CopyStep::CloseCopy { ticket, cause: CloseCause::MasterClosed };
    let action = CopyAction { link: link(LINK), master_ticket: mt(1), steps: vec![close] };
    let planned = Planned { action, plan: None, at: world.now().node };
    world.follower.planned.insert(key(1), planned);
    let (now, mut effects) = (world.now(), Vec::new());
    world.follower.wake(now, key(1), None, &mut effects);
    assert!(world.follower.planned.is_empty(), "it had its turn");
    assert!(effects.is_empty(), "{effects:?}");
}
