//! Doubt, snapshots, and plans that are held for a second look.

use super::world::{MASTER, World, key, seconds};
use crate::follower::Reason;
use paper::protocol::Instruction;
use reconcile::PairState;
use schemas::{Book, Change};

fn with_copies(count: u64) -> World {
    let mut world = World::copying();
    for ticket in 1..=count {
        world.master_opens(ticket);
    }
    world.answer_everything();
    world.calm(seconds(12));
    world
}

#[test]
fn during_doubt_endings_are_followed_and_nothing_else() {
    let mut world = with_copies(2);
    world.doubt();
    let closing = world.closing(MASTER, 1);
    let event = world.unheard(MASTER, closing);
    world.deliver(&event, true);
    assert_eq!(world.actions(1), ["open", "close"]);
    world.answer_everything();
    // A stop that was removed by hand waits: the master's may have changed meanwhile.
    let ticket = world.copy_ticket();
    let stop_loss = Some("1.08".parse().unwrap());
    world.by_hand(Instruction::Modify { ticket, stop_loss, take_profit: None });
    world.calm(seconds(3));
    assert_eq!(world.actions(2), ["open"]);
    world.snapshots();
    world.calm(seconds(12));
    assert_eq!(world.actions(2), ["open", "modify"]);
}

#[test]
fn a_planned_open_that_waits_for_room_is_not_sent_during_doubt() {
    let mut world =
        World::copying_with(super::world::Setup { parallel: 1, ..super::world::Setup::default() });
    for ticket in 1..=2 {
        world.master_has(ticket);
    }
    world.snapshots();
    world.answer_reads();
    assert_eq!(world.sent.len(), 1);
    world.doubt();
    world.carry_out();
    assert!(world.flying.is_empty());
    world.snapshots();
    world.calm(seconds(12));
    assert_eq!(world.actions(2), ["open"]);
}

#[test]
fn a_plans_action_is_dropped_when_its_ticket_was_touched_since_the_read_began() {
    let mut world = with_copies(1);
    let ticket = world.copy_ticket();
    world.snapshots();
    let reads = std::mem::take(&mut world.reads);
    let stale: Vec<_> = reads.into_iter().map(|(id, s, _)| (id, world.take_read(s))).collect();
    world.by_hand(Instruction::Close { ticket, lots: None });
    for (id, read) in stale {
        world.step(crate::follower::Input::Read { id, read: Some(read) });
    }
    assert!(world.flying.is_empty(), "the read still shows the copy that ended since");
    world.calm(seconds(20));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Closed));
}

#[test]
fn closes_of_many_copies_by_absence_get_a_second_look_and_then_run() {
    let mut world = with_copies(6);
    world.master().book = Book::default();
    world.snapshots();
    world.answer_reads();
    let (reason, steps, held, _) = world.plans.last().unwrap().clone();
    assert_eq!((reason, steps.len(), held), (Reason::Feed, 0, true));
    world.calm(seconds(5));
    assert!(world.positions().is_empty());
    assert_eq!(world.restless, 0);
}

#[test]
fn an_empty_state_that_was_a_mistake_closes_nothing() {
    let mut world = with_copies(6);
    world.snapshot_of(MASTER, Book::default());
    world.answer_reads();
    // The second look asks the publisher again, and sees the truth.
    world.calm(seconds(12));
    assert_eq!(world.positions().len(), 6);
    assert!(!world.sent.iter().any(|(_, request)| request.action() == "close"));
}

#[test]
fn a_held_plan_is_not_carried_out_ticket_by_ticket() {
    let mut world = with_copies(6);
    world.master_stops(1, Some("1.09"));
    assert_eq!(world.flying.len(), 1);
    world.snapshot_of(MASTER, Book::default());
    world.answer_reads();
    assert!(world.plans.last().unwrap().2, "held");
    // An answer, a stop moved by hand: neither says that the master closed anything.
    world.carry_out();
    let ticket = world.positions()[3].ticket;
    let stop_loss = Some("1.08".parse().unwrap());
    world.by_hand(Instruction::Modify { ticket, stop_loss, take_profit: None });
    assert!(world.flying.is_empty());
    world.calm(seconds(12));
    assert_eq!(world.positions().len(), 6);
}

#[test]
fn a_held_plan_does_not_stop_what_is_opened_and_closed_before_our_eyes() {
    let mut world = with_copies(6);
    world.master().book = Book::default();
    world.snapshots();
    world.answer_reads();
    assert!(world.plans.last().unwrap().2, "held");
    world.master_opens(7);
    world.carry_out();
    assert_eq!(world.opened[&key(7)], 1);
    world.master_closes(7);
    world.carry_out();
    assert_eq!(world.actions(7), ["open", "close"]);
}

#[test]
fn the_first_plan_of_a_tenure_may_be_held_and_fresh_trades_are_copied_meanwhile() {
    let mut world = with_copies(6);
    let pairs = reconcile::Pairs::new(world.rows.values().cloned());
    let mut next = World::new(super::world::Setup {
        links: vec![(super::world::rules(super::world::LINK, MASTER), pairs)],
        ..super::world::Setup::default()
    });
    next.broker = world.broker.clone();
    next.rows = world.rows.clone();
    next.master().seq = 20;
    world.master().book = Book::default();
    next.open_session();
    next.snapshots();
    next.answer_reads();
    assert!(next.plans.last().unwrap().2, "held");
    next.master_opens(9);
    assert_eq!(next.actions(9), ["open"]);
}

#[test]
fn a_snapshot_with_a_new_trade_copies_it() {
    let mut world = World::copying();
    world.unheard(MASTER, Change::PositionOpened(world.position(1)));
    world.doubt();
    world.snapshots();
    world.answer_everything();
    assert_eq!(world.actions(1), ["open"]);
}
