//! What happens to a copy: by us, by hand, and where the broker renumbers.

use super::world::{MASTER, ROW_WAIT_MAX, Setup, World, key, lots, price, seconds};
use paper::protocol::{Instruction, Style};
use reconcile::{EndReason, EndedHow, PairState};

fn mt4() -> World {
    World::copying_with(Setup { style: Style::Mt4, ..Setup::default() })
}

fn opened(mut world: World) -> World {
    world.master_opens(1);
    world.answer_everything();
    assert_eq!(world.state(1), Some(PairState::Open));
    world
}

#[test]
fn a_copy_closed_by_hand_is_marked_closed_and_never_opened_again() {
    let mut world = opened(World::copying());
    let ticket = world.copy_ticket();
    world.by_hand(Instruction::Close { ticket, lots: None });
    assert_eq!(world.pair(1).unwrap().reason, Some(EndReason::Ended(EndedHow::Reported)));
    world.master_stops(1, Some("1.09"));
    world.snapshots();
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn a_copy_closed_by_hand_while_the_session_was_lost_is_marked_closed() {
    let mut world = opened(World::copying());
    let ticket = world.copy_ticket();
    world.lose_session();
    world.by_hand(Instruction::Close { ticket, lots: None });
    world.open_session();
    world.calm(seconds(20));
    assert_eq!(world.pair(1).unwrap().reason, Some(EndReason::Ended(EndedHow::History)));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn stops_changed_by_hand_on_the_copy_are_set_back() {
    let mut world = opened(World::copying());
    world.master_stops(1, Some("1.09"));
    world.answer_everything();
    let ticket = world.copy_ticket();
    for by_hand in [None, Some(price("1.08"))] {
        let modify = Instruction::Modify { ticket, stop_loss: by_hand, take_profit: None };
        world.by_hand(modify);
        world.calm(seconds(1));
        assert_eq!(world.copy().stop_loss, Some(price("1.09")));
    }
    assert_eq!(world.restless, 0);
}

#[test]
fn stops_that_the_broker_calls_already_so_are_set_again_when_somebody_changes_them() {
    let mut world = opened(World::copying());
    world.refusals.push(("modify", schemas::RejectClass::AlreadySo));
    world.master_stops(1, Some("1.09"));
    world.calm(seconds(5));
    world.calm(seconds(70));
    assert_eq!(world.copy().stop_loss, Some(price("1.09")));
}

#[test]
fn a_renumbered_rest_stays_the_copy_of_its_ticket() {
    let mut world = opened(mt4());
    let before = world.copy_ticket();
    world.master_reduces(1, "0.6");
    world.answer_everything();
    let copy = world.copy();
    assert_ne!(copy.ticket, before);
    assert_eq!(
        (copy.lots, world.pair(1).unwrap().follower_ticket),
        (lots("0.6"), Some(copy.ticket))
    );
    world.master_closes(1);
    world.calm(seconds(20));
    assert!(world.positions().is_empty());
    assert_eq!(world.actions(1), ["open", "partial_close", "close"]);
}

// H51: the row is what a next owner knows the rest by.
#[test]
fn a_copy_whose_rest_would_lose_its_tag_is_reduced_only_when_its_row_is_stored() {
    let mut world = mt4();
    world.database_away = true;
    world.master_opens(1);
    world.answer_everything();
    world.master_reduces(1, "0.6");
    world.calm(seconds(20));
    assert_eq!(world.copy().lots, lots("1"), "nobody else could know whose the rest is");
    assert_eq!(world.restless, 0);
    world.database_returns();
    world.answer_everything();
    assert_eq!(world.copy().lots, lots("0.6"));
    // From the stored number the history leads to the next one.
    world.database_away = true;
    world.master_reduces(1, "0.3");
    world.answer_everything();
    assert_eq!(world.copy().lots, lots("0.3"));
    assert_eq!(world.actions(1), ["open", "partial_close", "partial_close"]);
}

#[test]
fn a_copy_without_a_stored_row_is_closed_in_full_at_once() {
    let mut world = mt4();
    world.database_away = true;
    world.master_opens(1);
    world.answer_everything();
    world.master_reduces(1, "0.6");
    world.answer_everything();
    world.master_closes(1);
    world.answer_everything();
    assert!(world.positions().is_empty());
    assert_eq!(world.actions(1), ["open", "close"]);
}

#[test]
fn a_partial_close_does_not_wait_for_ever_for_a_row_that_nobody_stores() {
    let mut world = mt4();
    world.database_away = true;
    world.master_opens(1);
    world.answer_everything();
    world.master_reduces(1, "0.6");
    world.calm(ROW_WAIT_MAX - seconds(1));
    assert_eq!(world.copy().lots, lots("1"));
    world.calm(seconds(2));
    assert_eq!(world.copy().lots, lots("0.6"));
}

#[test]
fn a_copy_whose_rest_keeps_its_tag_is_reduced_before_its_row_is_stored() {
    let mut world = World::copying();
    world.database_away = true;
    world.master_opens(1);
    world.answer_everything();
    world.master_reduces(1, "0.6");
    world.answer_everything();
    assert_eq!(world.copy().lots, lots("0.6"));
}

// The late open's answer was lost; the plan adopts the copy and reduces it in one action.
#[test]
fn a_copy_that_a_plan_adopts_is_reduced_only_when_its_row_is_stored() {
    let mut world = mt4();
    world.database_away = true;
    world.master_opens(1);
    world.time_out(0);
    world.ghost_arrives(0);
    world.master_reduces(1, "0.6");
    world.calm(seconds(20));
    assert_eq!(world.pair(1).unwrap().follower_ticket, Some(world.copy_ticket()));
    assert_eq!(world.copy().lots, lots("1"));
    world.database_returns();
    world.calm(seconds(5));
    assert_eq!(world.copy().lots, lots("0.6"));
}

#[test]
fn a_rest_renumbered_by_hand_is_followed_and_closed_with_its_master() {
    let mut world = opened(mt4());
    let ticket = world.copy_ticket();
    world.by_hand(Instruction::Close { ticket, lots: Some(lots("0.3")) });
    assert_eq!(world.pair(1).unwrap().follower_ticket, Some(world.copy_ticket()));
    world.calm(seconds(20));
    world.master_closes(1);
    world.calm(seconds(20));
    assert!(world.positions().is_empty());
    assert_eq!(world.actions(1), ["open", "close"]);
}

#[test]
fn a_rest_renumbered_by_hand_in_a_lost_session_is_found_by_its_lineage() {
    let mut world = opened(mt4());
    let ticket = world.copy_ticket();
    world.lose_session();
    world.by_hand(Instruction::Close { ticket, lots: Some(lots("0.3")) });
    world.open_session();
    world.calm(seconds(20));
    assert_eq!(world.pair(1).unwrap().follower_ticket, Some(world.copy_ticket()));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn a_rest_renumbered_by_a_lost_partial_close_is_found() {
    let mut world = opened(mt4());
    world.master_reduces(1, "0.6");
    world.time_out(0);
    world.ghost_arrives(0);
    world.calm(seconds(20));
    assert_eq!(world.copy().lots, lots("0.6"));
    assert_eq!(world.pair(1).unwrap().follower_ticket, Some(world.copy_ticket()));
    assert_eq!(world.actions(1), ["open", "partial_close"]);
}

#[test]
fn a_rest_renumbered_by_hand_while_a_change_is_on_its_way_is_found() {
    let mut world = opened(mt4());
    world.master_stops(1, Some("1.09"));
    let ticket = world.copy_ticket();
    world.by_hand(Instruction::Close { ticket, lots: Some(lots("0.3")) });
    world.calm(seconds(20));
    let copy = world.copy();
    assert_eq!((copy.stop_loss, world.state(1)), (Some(price("1.09")), Some(PairState::Open)));
    assert_eq!(world.pair(1).unwrap().follower_ticket, Some(copy.ticket));
}

#[test]
fn a_second_copy_is_closed_and_counted() {
    let mut world = opened(World::copying());
    let kept = world.copy_ticket();
    world.foreign_copy(1);
    world.calm(seconds(5));
    assert_eq!(world.copy_ticket(), kept);
    assert_eq!(world.plans.iter().map(|(.., duplicates)| duplicates).sum::<usize>(), 1);
}

#[test]
fn a_copy_whose_master_closed_in_the_gap_is_closed_by_the_snapshot() {
    let mut world = opened(World::copying());
    let closing = world.closing(MASTER, 1);
    world.unheard(MASTER, closing);
    world.doubt();
    world.snapshots();
    world.answer_everything();
    assert!(world.positions().is_empty());
    assert_eq!(world.opened[&key(1)], 1);
}
