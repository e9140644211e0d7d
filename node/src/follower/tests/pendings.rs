//! Pending orders: placed, changed, filled on either side first, cancelled, refused.

use super::world::{World, price, seconds};
use paper::protocol::Instruction;
use reconcile::PairState;
use schemas::{Change, RejectClass};

fn placed() -> World {
    let mut world = World::copying();
    world.change(Change::PendingPlaced(world.pending(1)));
    world.answer_everything();
    assert_eq!((world.pendings().len(), world.state(1)), (1, Some(PairState::Open)));
    world
}

fn fill(world: &mut World) {
    let mut position = world.position(1);
    position.open_price = Some(price("1.09"));
    world.change(Change::PendingFilled(position));
}

#[test]
fn a_pending_order_is_placed_changed_and_cancelled_with_its_master() {
    let mut world = placed();
    let mut changed = world.pending(1);
    changed.price = price("1.08");
    world.change(Change::PendingModified(changed.clone()));
    world.answer_everything();
    assert_eq!(world.pendings()[0].price, price("1.08"));
    world.change(Change::PendingCancelled(changed));
    world.calm(seconds(20));
    assert!(world.pendings().is_empty());
    assert_eq!(world.actions(1), ["place", "modify_pending", "cancel"]);
    assert_eq!(world.state(1), Some(PairState::Closed));
}

#[test]
fn a_copy_that_filled_first_is_kept_and_closed_with_its_master() {
    let mut world = placed();
    world.quote("1.08990", "1.08992");
    assert_eq!((world.positions().len(), world.pendings().len()), (1, 0));
    assert!(!world.pair(1).unwrap().is_pending);
    world.calm(seconds(5));
    fill(&mut world);
    world.calm(seconds(5));
    assert_eq!(world.positions().len(), 1);
    world.master_closes(1);
    world.calm(seconds(5));
    assert!(world.positions().is_empty());
    assert_eq!(world.actions(1), ["place", "close"]);
}

#[test]
fn a_copy_that_filled_first_is_closed_when_the_master_cancels() {
    let mut world = placed();
    world.quote("1.08990", "1.08992");
    let pending = world.pending(1);
    world.change(Change::PendingCancelled(pending));
    world.calm(seconds(5));
    assert!(world.positions().is_empty());
    assert_eq!(world.state(1), Some(PairState::Closed));
}

#[test]
fn a_master_that_filled_first_leaves_its_copy_waiting_at_its_price() {
    let mut world = placed();
    fill(&mut world);
    world.calm(seconds(5));
    assert_eq!(world.pendings().len(), 1);
    world.quote("1.08990", "1.08992");
    world.calm(seconds(5));
    assert_eq!(world.positions().len(), 1);
    assert_eq!(world.opened.values().sum::<usize>(), 1);
}

#[test]
fn a_master_that_filled_and_closed_first_cancels_its_copy() {
    let mut world = placed();
    fill(&mut world);
    world.master_closes(1);
    world.calm(seconds(5));
    assert!(world.pendings().is_empty());
    assert_eq!(world.actions(1), ["place", "cancel"]);
}

#[test]
fn an_order_deleted_by_hand_ends_its_pair() {
    let mut world = placed();
    let ticket = world.pendings()[0].ticket;
    world.by_hand(Instruction::Cancel { ticket });
    world.calm(seconds(20));
    assert_eq!(world.state(1), Some(PairState::Closed));
    fill(&mut world);
    world.calm(seconds(5));
    assert_eq!(world.actions(1), ["place"]);
}

#[test]
fn our_own_cancellation_needs_no_reconcile() {
    let mut world = placed();
    world.calm(seconds(12));
    let before = world.read_times.len();
    let pending = world.pending(1);
    world.change(Change::PendingCancelled(pending));
    world.answer_everything();
    assert_eq!(world.read_times.len(), before);
}

#[test]
fn the_fill_of_a_refused_order_is_copied() {
    let mut world = World::copying();
    world.refusals.push(("place", RejectClass::Invalid));
    world.change(Change::PendingPlaced(world.pending(1)));
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["place"], "the same order is not tried again");
    fill(&mut world);
    world.calm(seconds(5));
    assert_eq!(world.actions(1), ["place", "open"]);
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn a_refused_order_that_changes_is_placed_again() {
    let mut world = World::copying();
    world.refusals.push(("place", RejectClass::Invalid));
    world.change(Change::PendingPlaced(world.pending(1)));
    world.calm(seconds(2));
    let mut changed = world.pending(1);
    changed.price = price("1.08");
    world.change(Change::PendingModified(changed));
    world.calm(seconds(2));
    assert_eq!(world.pendings().len(), 1);
}

#[test]
fn a_refused_order_that_the_master_cancels_ends() {
    let mut world = World::copying();
    world.refusals.push(("place", RejectClass::Invalid));
    world.change(Change::PendingPlaced(world.pending(1)));
    world.calm(seconds(2));
    let pending = world.pending(1);
    world.change(Change::PendingCancelled(pending));
    world.calm(seconds(20));
    assert_eq!(world.state(1), Some(PairState::Failed));
}
