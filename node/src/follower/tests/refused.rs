//! What the broker refuses, for now or for good.

use super::world::{World, lots, price, seconds};
use crate::broker::{NotSent, Outcome};
use crate::follower::Input;
use reconcile::{EndReason, FailReason, PairState};
use schemas::RejectClass;
use std::time::Duration;

fn refuse(world: &mut World, action: &'static str, class: RejectClass, times: usize) {
    world.refusals.extend(std::iter::repeat_n((action, class), times));
}

#[test]
fn a_requoted_open_is_asked_for_again_and_opens() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Requote, 2);
    world.master_opens(1);
    world.calm(seconds(4));
    assert_eq!(world.actions(1), ["open"; 3]);
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn an_open_that_is_requoted_again_and_again_fails_after_a_bounded_number() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Requote, 100);
    world.master_opens(1);
    world.calm(seconds(90));
    assert_eq!(world.actions(1).len(), 4);
    let pair = world.pair(1).unwrap();
    assert_eq!(pair.reason, Some(EndReason::Failed(FailReason::RejectedRequote)));
    assert_eq!(world.restless, 0);
}

#[test]
fn a_requoted_open_that_the_master_closed_meanwhile_ends() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Requote, 1);
    world.master_opens(1);
    world.carry_out();
    world.master_closes(1);
    world.calm(seconds(20));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Failed), "no row says that an order is out");
}

#[test]
fn an_open_requoted_before_doubt_is_opened_by_the_reconcile_after_it() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Requote, 1);
    world.master_opens(1);
    world.carry_out();
    world.doubt();
    world.pass(seconds(2));
    world.snapshots();
    world.calm(seconds(12));
    assert_eq!(world.actions(1), ["open", "open"]);
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn an_open_in_a_closed_market_is_given_up_inside_the_late_rule() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Later, 100);
    world.master_opens(1);
    world.calm(seconds(5));
    assert_eq!(world.actions(1).len(), 4);
    let pair = world.pair(1).unwrap();
    assert_eq!(pair.reason, Some(EndReason::Failed(FailReason::RejectedLater)));
}

#[test]
fn a_close_in_a_closed_market_is_kept_and_asked_for_with_growing_waits() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    refuse(&mut world, "close", RejectClass::Later, 7);
    world.master_closes(1);
    world.calm(seconds(40));
    let tries = world.actions(1).len() - 1;
    assert!((4..=7).contains(&tries), "{tries} closes in 40 s");
    assert_eq!(world.state(1), Some(PairState::Closing));
    world.calm(seconds(120));
    assert!(world.positions().is_empty());
    assert_eq!(world.state(1), Some(PairState::Closed));
    assert_eq!(world.restless, 0);
}

#[test]
fn a_close_does_not_wait_for_a_change_that_was_refused_for_now() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    refuse(&mut world, "modify", RejectClass::Later, 5);
    world.master_stops(1, Some("1.09"));
    world.calm(seconds(8));
    world.master_closes(1);
    world.answer_everything();
    assert!(world.positions().is_empty());
}

#[test]
fn a_permanent_refusal_is_final() {
    for class in [RejectClass::NoMoney, RejectClass::Invalid, RejectClass::Disabled] {
        let mut world = World::copying();
        refuse(&mut world, "open", class, 1);
        world.master_opens(1);
        world.calm(seconds(1));
        world.snapshots();
        world.calm(seconds(70));
        assert_eq!(world.actions(1), ["open"], "{class:?}");
        assert_eq!(world.state(1), Some(PairState::Failed));
    }
}

#[test]
fn an_order_refused_for_its_old_token_leaves_no_final_word() {
    // The account is somebody else's by now: its trades are theirs to judge.
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::StaleToken, 1);
    world.master_opens(1);
    world.carry_out();
    assert!(world.rows.values().all(|row| row.state.is_live()));
}

#[test]
fn a_partial_close_refused_for_good_is_sent_again_when_the_target_changes() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    refuse(&mut world, "partial_close", RejectClass::Invalid, 1);
    world.master_reduces(1, "0.6");
    world.calm(seconds(30));
    assert_eq!((world.actions(1).len(), world.copy().lots), (2, lots("1")));
    world.master_reduces(1, "0.5");
    world.calm(seconds(1));
    assert_eq!(world.copy().lots, lots("0.5"));
}

#[test]
fn refused_stops_are_not_sent_again_until_they_change() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    refuse(&mut world, "modify", RejectClass::Invalid, 1);
    world.master_stops(1, Some("1.09"));
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open", "modify"]);
    world.master_stops(1, Some("1.08"));
    world.calm(seconds(1));
    assert_eq!(world.copy().stop_loss, Some(price("1.08")));
    assert_eq!(world.restless, 0);
}

#[test]
fn the_row_of_a_refused_order_says_that_it_was_not_sent_so_that_no_later_owner_waits() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Requote, 1);
    world.master_opens(1);
    world.carry_out();
    let row = world.pair(1).unwrap();
    assert_eq!((row.state, row.sent_at), (PairState::Sending, None));
    world.calm(seconds(4));
    let row = world.pair(1).unwrap();
    assert!(row.sent_at.is_some() && row.state == PairState::Open, "{row:?}");
}

#[test]
fn an_open_that_is_refused_for_its_stops_is_tried_once_without_them() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Invalid, 1);
    let mut position = world.position(1);
    position.stop_loss = Some(price("1.09000"));
    world.change(schemas::Change::PositionOpened(position));
    world.carry_out();
    world.carry_out();
    assert_eq!(world.copy().stop_loss, None);
    world.calm(seconds(4));
    assert_eq!(world.copy().stop_loss, Some(price("1.09000")), "set when the broker takes it");
    assert_eq!(world.actions(1), ["open", "open", "modify"]);
}

#[test]
fn what_is_remembered_of_a_trade_opened_without_its_stops_ends_with_the_trade() {
    let remembered =
        |world: &World| world.follower.links.values().map(|l| l.without_stops.len()).sum::<usize>();
    for told in [true, false] {
        let mut world = World::copying();
        refuse(&mut world, "open", RejectClass::Invalid, 1);
        let stop_loss = Some(price("1.09000"));
        let position = schemas::MasterPosition { stop_loss, ..world.position(1) };
        world.change(schemas::Change::PositionOpened(position));
        world.carry_out();
        world.carry_out();
        assert_eq!(remembered(&world), 1);
        if told {
            world.master_closes(1);
        } else {
            let unheard = world.closing(super::world::MASTER, 1);
            world.unheard(super::world::MASTER, unheard);
            world.snapshots();
        }
        assert_eq!(remembered(&world), 0, "told: {told}");
        world.calm(seconds(15));
        assert!(world.positions().is_empty());
    }
}

#[test]
fn an_open_without_stops_that_is_refused_is_not_tried_a_second_time() {
    let mut world = World::copying();
    refuse(&mut world, "open", RejectClass::Invalid, 9);
    world.master_opens(1);
    world.calm(seconds(30));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Failed));
}

#[test]
fn a_fill_that_came_while_its_order_was_being_refused_is_copied() {
    let mut world = World::copying();
    refuse(&mut world, "place", RejectClass::Invalid, 1);
    let pending = world.pending(1);
    world.change(schemas::Change::PendingPlaced(pending));
    let filled = world.position(1);
    world.change(schemas::Change::PendingFilled(filled));
    world.carry_out();
    world.carry_out();
    assert_eq!(world.actions(1), ["place", "open"]);
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn own_time_is_told_only_where_no_answer_was_waited_for() {
    let mut world = World::copying();
    world.master_opens(1);
    world.master_closes(1);
    world.calm(seconds(4));
    let told: Vec<bool> = world
        .records
        .iter()
        .filter(|record| ["open_copy", "close_copy"].contains(&record.action))
        .map(|record| record.own_time.is_some())
        .collect();
    assert_eq!(told, [true, false], "{:?}", world.records);
}

#[test]
fn a_close_refused_for_its_old_token_stays_a_close_with_a_newer_row_each_time() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    refuse(&mut world, "close", RejectClass::StaleToken, 2);
    world.master_closes(1);
    world.carry_out();
    assert_eq!(world.state(1), Some(PairState::Closing));
    world.calm(seconds(20));
    assert_eq!(world.state(1), Some(PairState::Closed));
    assert!(world.positions().is_empty());
}

#[test]
fn an_order_that_never_left_the_queue_of_its_thread_is_opened_again_by_a_reconcile() {
    let mut world = World::copying();
    world.master_opens(1);
    // It was handed over and noted; no thread was free for it in time.
    let order = world.flying.remove(0);
    assert_eq!(world.state(1), Some(PairState::Sending));
    let outcome = Outcome::NotSent(NotSent::Busy);
    world.step(Input::Answer { key: order.key, attempt: order.attempt, outcome });
    assert_eq!(world.records.last().unwrap().reason.as_deref(), Some("busy"));
    world.calm(seconds(3));
    assert_eq!(world.state(1), Some(PairState::Open));
    assert_eq!(world.actions(1), ["open", "open"]);
    assert_eq!(world.positions().len(), 1);
}

#[test]
fn an_order_that_never_left_and_is_not_wanted_any_more_leaves_an_ended_row() {
    let mut world = World::copying();
    world.master_opens(1);
    let order = world.flying.remove(0);
    world.master_closes(1);
    let outcome = Outcome::NotSent(NotSent::Busy);
    world.step(Input::Answer { key: order.key, attempt: order.attempt, outcome });
    world.calm(seconds(3));
    assert_eq!(world.actions(1), ["open"]);
    let rows: Vec<_> = world.rows.values().filter(|pair| pair.state.is_live()).collect();
    assert!(rows.is_empty(), "{rows:?}");
}

#[test]
fn times_of_an_order_that_waited_for_a_thread_count_from_when_it_left() {
    let mut world = World::copying();
    world.master_opens(1);
    world.pass(Duration::from_millis(300));
    let (left, key, attempt) = (world.now(), world.flying[0].key, world.flying[0].attempt);
    world.follower.left(key, attempt, left);
    assert_eq!(world.follower.own_time(key), Some(Duration::from_millis(300)));
    world.pass(Duration::from_millis(130));
    world.carry_out();
    let record = world.records.iter().find(|record| record.action == "open_copy").unwrap();
    let times = (record.own_time, record.broker_time);
    assert_eq!(times, (Some(Duration::from_millis(300)), Some(Duration::from_millis(130))));
}
