//! Answers that do not come, and sessions that break.

use super::world::{DELIVERY_MAX, MASTER, World, lots, mt, seconds};
use crate::writer::EventOutcome;
use paper::protocol::Instruction;
use reconcile::{EndReason, FailReason, PairState};

#[test]
fn an_open_of_unknown_outcome_is_not_sent_again_and_adopted_when_it_appears() {
    let mut world = World::copying();
    world.master_opens(1);
    world.time_out(0);
    assert_eq!(world.records.last().unwrap().outcome, EventOutcome::Unknown);
    world.calm(seconds(5));
    assert_eq!(world.state(1), Some(PairState::Sending));
    world.ghost_arrives(0);
    world.calm(seconds(20));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Open));
    assert_eq!(world.pair(1).unwrap().follower_ticket, Some(world.copy_ticket()));
    assert_eq!(world.follower.unanswered(), 0);
}

#[test]
fn a_copy_of_unknown_outcome_that_appears_after_the_masters_close_is_closed_at_once() {
    let mut world = World::copying();
    world.master_opens(1);
    world.time_out(0);
    world.calm(seconds(4));
    world.master_closes(1);
    world.ghost_arrives(0);
    world.pass(seconds(1));
    assert_eq!(world.flying.len(), 1, "no ten seconds until the next read");
    world.carry_out();
    assert!(world.positions().is_empty());
}

#[test]
fn an_open_of_unknown_outcome_that_never_appears_fails_after_the_longest_delivery() {
    let mut world = World::copying();
    world.master_opens(1);
    world.time_out(0);
    world.calm(DELIVERY_MAX + seconds(1));
    assert_eq!(world.state(1), Some(PairState::Sending));
    world.calm(seconds(4));
    let pair = world.pair(1).unwrap();
    assert_eq!(pair.reason, Some(EndReason::Failed(FailReason::NeverArrived)));
    assert_eq!(world.follower.unanswered(), 0);
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open"]);
}

// The broker took it in time and carried it out later than any answer is waited for.
#[test]
fn an_open_that_is_carried_out_after_the_longest_answer_is_adopted_not_closed() {
    let mut world = World::copying();
    world.master_opens(1);
    world.time_out(0);
    world.calm(DELIVERY_MAX - seconds(2));
    world.ghost_arrives(0);
    world.calm(seconds(20));
    assert_eq!(world.state(1), Some(PairState::Open));
    assert_eq!(world.positions().len(), 1);
    assert_eq!(world.actions(1), ["open"]);
}

// H42, H12: the row's age is of the node's wall clock, which somebody sets forward by an hour.
#[test]
fn an_open_is_not_given_up_because_the_wall_clock_was_set_forward() {
    let mut world = World::copying();
    world.master_opens(1);
    world.time_out(0);
    world.calm(seconds(2));
    world.set_forward = seconds(3_600);
    world.calm(DELIVERY_MAX - seconds(4));
    assert_eq!(world.state(1), Some(PairState::Sending));
    world.ghost_arrives(0);
    world.calm(seconds(20));
    assert_eq!(world.state(1), Some(PairState::Open));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn an_open_that_is_unknown_before_it_was_noted_is_still_not_sent_again() {
    let mut world = World::copying();
    world.master_opens(1);
    let order = world.flying.remove(0);
    // The session may say so in the same breath in which it takes the order.
    let fresh = world.follower.own_time(order.key);
    assert!(fresh.is_some());
    world.ghosts.push(order.clone());
    let outcome = crate::broker::Outcome::Unknown("cut".into());
    world.step(crate::follower::Input::Answer { key: order.key, attempt: order.attempt, outcome });
    world.calm(seconds(5));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn a_close_of_unknown_outcome_is_settled_by_a_read() {
    for arrives in [true, false] {
        let mut world = World::copying();
        world.master_opens(1);
        world.carry_out();
        world.master_closes(1);
        if arrives {
            world.session = false;
            world.arrive(0);
            world.session = true;
        }
        world.time_out(0);
        world.calm(seconds(5));
        assert!(world.positions().is_empty(), "arrives: {arrives}");
        assert_eq!(world.state(1), Some(PairState::Closed));
        assert_eq!(world.follower.unanswered(), 0);
    }
}

#[test]
fn a_partial_close_of_unknown_outcome_is_not_applied_twice() {
    for arrives in [true, false] {
        let mut world = World::copying();
        world.master_opens(1);
        world.carry_out();
        world.master_reduces(1, "0.6");
        world.time_out(0);
        world.calm(seconds(5));
        assert_eq!(world.actions(1), ["open", "partial_close"], "it may still arrive");
        if arrives {
            world.ghost_arrives(0);
        } else {
            world.ghosts.clear();
        }
        world.calm(seconds(30));
        assert_eq!(world.copy().lots, lots("0.6"), "arrives: {arrives}");
        assert_eq!(world.follower.unanswered(), 0);
    }
}

// Its answer was waited for no longer than ten seconds; it was sent again and both were carried out.
#[test]
fn a_partial_close_that_arrives_later_than_any_answer_is_not_applied_twice() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.master_reduces(1, "0.6");
    world.time_out(0);
    world.calm(seconds(24));
    assert_eq!(world.actions(1), ["open", "partial_close"], "it may still arrive");
    world.ghost_arrives(0);
    world.calm(seconds(20));
    assert_eq!(world.copy().lots, lots("0.6"));
    assert_eq!(world.follower.unanswered(), 0);
}

#[test]
fn a_part_closed_by_hand_does_not_prove_that_a_lost_partial_close_was_carried_out() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.master_reduces(1, "0.6");
    world.time_out(0);
    let ticket = world.copy_ticket();
    world.by_hand(Instruction::Close { ticket, lots: Some(lots("0.01")) });
    world.calm(seconds(11));
    assert_eq!(world.actions(1), ["open", "partial_close"], "it may still arrive");
    world.ghosts.clear();
    world.calm(seconds(30));
    assert_eq!(world.copy().lots, lots("0.6"));
}

#[test]
fn a_close_does_not_wait_for_a_partial_close_of_unknown_outcome() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.master_reduces(1, "0.6");
    world.time_out(0);
    world.answer_everything();
    world.master_closes(1);
    world.calm(seconds(2));
    assert!(world.positions().is_empty());
}

#[test]
fn an_outcome_that_becomes_unknown_during_a_read_is_not_settled_by_it() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.master_reduces(1, "0.6");
    world.snapshots();
    assert_eq!((world.reads.len(), world.flying.len()), (1, 1));
    world.time_out(0);
    world.answer_reads();
    assert_eq!(world.follower.unanswered(), 1);
}

#[test]
fn a_session_lost_with_orders_on_their_way_is_reopened_and_everything_settled() {
    let mut world = World::copying();
    for ticket in 1..=3 {
        world.master_opens(ticket);
    }
    world.arrive(0);
    world.answer(0);
    world.master_closes(1);
    // Of the rest one had arrived and was not answered, one never arrives.
    let place = world.flying.iter().position(|order| order.key.ticket == mt(2)).unwrap();
    world.arrive(place);
    world.lose_session();
    assert_eq!(world.follower.unanswered(), 3);
    world.ghosts.clear();
    world.pass(seconds(2));
    world.open_session();
    world.calm(DELIVERY_MAX + seconds(5));
    assert_eq!(world.follower.unanswered(), 0);
    assert_eq!(world.state(1), Some(PairState::Closed));
    assert_eq!(world.state(2), Some(PairState::Open));
    assert_eq!(world.state(3), Some(PairState::Failed));
    assert_eq!(world.positions().len(), 1);
    assert_eq!(world.restless, 0);
}

#[test]
fn after_a_lost_session_everything_is_reconciled_before_anything_is_opened() {
    let mut world = World::copying();
    world.lose_session();
    world.pass(seconds(1));
    world.open_session();
    world.master_opens(1);
    assert!(world.sent.is_empty());
    world.answer_reads();
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn what_waited_when_the_session_broke_is_decided_anew() {
    let mut world =
        World::copying_with(super::world::Setup { parallel: 1, ..super::world::Setup::default() });
    world.master_opens(1);
    world.master_opens(2);
    world.lose_session();
    world.ghosts.clear();
    let closing = world.closing(MASTER, 2);
    world.change(closing);
    world.open_session();
    world.calm(seconds(20));
    assert_eq!(world.actions(2), Vec::<&str>::new());
}

// What is let go waits for answers, and not for outcomes that no answer will tell.
#[test]
fn an_order_of_unknown_outcome_is_unanswered_and_no_answer_is_awaited() {
    let mut world = World::copying();
    world.master_opens(1);
    world.master_opens(2);
    assert_eq!((world.follower.awaited(), world.follower.unanswered()), (2, 2));
    world.time_out(0);
    world.step(crate::follower::Input::Drain);
    assert_eq!((world.follower.awaited(), world.follower.unanswered()), (1, 2));
    world.carry_out();
    assert_eq!((world.follower.awaited(), world.follower.unanswered()), (0, 1));
}
