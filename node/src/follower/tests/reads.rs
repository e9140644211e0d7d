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

#[test]
fn a_preview_says_what_a_reconcile_would_do_and_does_nothing() {
    let mut world = World::copying();
    world.calm(seconds(20));
    world.unheard(MASTER, Change::PositionOpened(world.position(1)));
    world.snapshots();
    let now = world.now();
    let (since, _) = world.follower.preview_needs(now, None).unwrap();
    let read = world.take_read(since);
    let steps = |world: &mut World, read| {
        let previews = world.follower.preview(now, now.node, read, None);
        let plan = previews.into_iter().next().unwrap().plan;
        plan.map(|plan| plan.actions.iter().map(|action| action.steps[0].as_str()).collect())
    };
    let opens: Result<Vec<&str>, String> = Ok(vec!["open_copy"]);
    assert_eq!(steps(&mut world, &read), opens);
    // Twice the same: the first has changed nothing, and nothing is on its way.
    assert_eq!(steps(&mut world, &read), opens);
    assert_eq!(world.actions(1), [""; 0]);
    world.doubt();
    assert!(steps(&mut world, &read).unwrap_err().contains("doubt"));
}

#[test]
fn a_reconcile_that_somebody_asks_for_is_made_at_once_and_no_storm_comes_of_many() {
    let mut world = World::copying();
    world.calm(seconds(20));
    let before = world.read_times.len();
    for _ in 0..20 {
        let now = world.now();
        world.follower.compare_now(now, None);
        world.calm(Duration::from_millis(500));
    }
    assert!(world.read_times.len() >= before + 2, "{:?}", world.read_times);
    assert_no_storm(&world.read_times);
}
