//! How often accounts are read, and which reads do not wait.

use super::world::{MASTER, World, seconds};
use crate::follower::state::{RECONCILE_WINDOW, RECONCILES_PER_WINDOW};
use schemas::Change;
use std::time::Duration;

fn assert_no_storm(times: &[Duration]) {
    for window in times.windows(RECONCILES_PER_WINDOW + 1) {
        let apart = window[RECONCILES_PER_WINDOW] - window[0];
        assert!(apart >= RECONCILE_WINDOW, "{window:?}");
    }
}

#[test]
fn a_feed_that_gives_a_snapshot_every_second_makes_no_storm() {
    let mut world = World::copying();
    for _ in 0..60 {
        world.snapshots();
        world.calm(seconds(1));
    }
    assert_no_storm(&world.read_times);
}

#[test]
fn looks_of_no_importance_leave_room_for_one_that_counts() {
    let mut world = World::copying();
    world.calm(seconds(20));
    // A plan that did something wants to be confirmed, and a stop too near waits for its price.
    world.unheard(MASTER, Change::PositionOpened(world.position(1)));
    world.snapshots();
    world.calm(seconds(5));
    let before = world.read_times.len();
    world.unheard(MASTER, Change::PositionOpened(world.position(2)));
    world.snapshots();
    world.answer_everything();
    assert_eq!(world.read_times.len(), before + 1);
    assert_eq!(world.actions(2), ["open"]);
    assert_no_storm(&world.read_times);
}

#[test]
fn an_outcome_that_stays_unknown_does_not_use_up_the_reads() {
    let mut world = World::copying();
    world.calm(seconds(20));
    world.master_opens(1);
    world.time_out(0);
    world.calm(seconds(5));
    world.unheard(MASTER, Change::PositionOpened(world.position(2)));
    world.snapshots();
    world.answer_everything();
    assert_eq!(world.actions(2), ["open"], "after {:?}", world.read_times);
    assert_no_storm(&world.read_times);
}

#[test]
fn the_end_of_the_settle_time_does_not_wait_behind_waiting_looks() {
    let setup = super::world::Setup { settle: Some(seconds(10)), ..Default::default() };
    let mut world = World::new(setup);
    world.master_has(1);
    world.open_session();
    world.snapshots();
    world.calm(seconds(6));
    world.master_opens(2);
    world.calm(Duration::from_millis(4_200));
    assert_eq!((world.actions(1), world.actions(2)), (vec!["open"], vec!["open"]));
    assert_no_storm(&world.read_times);
}

#[test]
fn the_second_look_at_a_held_plan_comes_in_time() {
    let mut world = World::copying();
    for ticket in 1..=6 {
        world.master_opens(ticket);
    }
    world.calm(seconds(12));
    world.unheard(MASTER, Change::PositionOpened(world.position(7)));
    world.snapshots();
    world.calm(seconds(2));
    world.master().book = schemas::Book::default();
    world.snapshots();
    world.answer_everything();
    assert!(world.plans.last().unwrap().2, "held");
    world.calm(seconds(10));
    assert!(world.positions().is_empty());
    assert_no_storm(&world.read_times);
}

#[test]
fn a_failed_read_is_repeated() {
    let mut world = World::copying();
    world.calm(seconds(20));
    world.snapshots();
    let (id, ..) = world.reads.remove(0);
    world.step(crate::follower::Input::Read { id, read: None });
    assert!(world.reads.is_empty());
    world.pass(seconds(1));
    assert_eq!(world.reads.len(), 1);
}

// L6, H38: one read runs, and whatever comes meanwhile waits as one.
#[test]
fn whatever_comes_during_a_read_makes_one_more() {
    let mut world = World::copying();
    world.pass(seconds(20));
    world.answer_reads();
    let before = world.read_times.len();
    world.snapshots();
    assert_eq!(world.read_times.len(), before + 1);
    for _ in 0..20 {
        world.snapshots();
        world.step(crate::follower::Input::LeaseRestored);
        world.pass(seconds(1) / 10);
    }
    assert_eq!(world.read_times.len(), before + 1, "one runs");
    world.answer_reads();
    assert_eq!(world.read_times.len(), before + 2, "and one was waiting");
    world.answer_reads();
    world.pass(seconds(1));
    assert_eq!(world.read_times.len(), before + 2);
}
