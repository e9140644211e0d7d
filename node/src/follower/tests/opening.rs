//! Opens: when one is sent, and when not.

use super::world::{
    LINK, MASTER, OTHER_LINK, OTHER_MASTER, Setup, World, key, link, lots, mt, rules, seconds,
};
use crate::broker::NotSent;
use crate::follower::Reason;
use crate::writer::EventOutcome;
use reconcile::{PairState, Pairs};
use schemas::Change;

#[test]
fn a_trade_of_the_master_is_opened_and_its_close_closes_it() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    assert_eq!((world.copy().lots, world.state(1)), (lots("1"), Some(PairState::Open)));
    world.master_closes(1);
    world.carry_out();
    assert!(world.positions().is_empty());
    assert_eq!(world.state(1), Some(PairState::Closed));
    assert_eq!(world.actions(1), ["open", "close"]);
}

#[test]
fn an_event_delivered_three_times_opens_once() {
    let mut world = World::copying();
    let event = world.unheard(MASTER, Change::PositionOpened(world.position(1)));
    world.deliver(&event, false);
    world.deliver(&event, false);
    world.carry_out();
    world.deliver(&event, false);
    world.calm(seconds(20));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn an_event_that_is_older_than_the_snapshot_changes_nothing() {
    let mut world = World::copying();
    let opened = world.unheard(MASTER, Change::PositionOpened(world.position(1)));
    let closing = world.closing(MASTER, 1);
    world.unheard(MASTER, closing);
    world.snapshots();
    world.deliver(&opened, false);
    assert!(world.flying.is_empty());
    world.masters.get_mut(&MASTER).unwrap().told.positions.clear();
    world.calm(seconds(20));
    assert_eq!(world.actions(1), Vec::<&str>::new());
}

#[test]
fn closed_before_the_open_is_answered_is_closed_when_its_ticket_is_known() {
    let mut world = World::copying();
    world.master_opens(1);
    world.master_closes(1);
    assert_eq!(world.flying.len(), 1);
    world.carry_out();
    assert_eq!(world.flying.len(), 1);
    world.carry_out();
    assert_eq!(world.actions(1), ["open", "close"]);
    assert!(world.positions().is_empty());
}

#[test]
fn an_open_that_waits_for_room_and_is_closed_meanwhile_is_never_sent() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    world.master_opens(1);
    world.master_opens(2);
    world.master_closes(2);
    world.calm(seconds(20));
    assert_eq!(world.actions(2), Vec::<&str>::new());
    assert_eq!(world.positions().len(), 1);
}

#[test]
fn parallel_orders_stop_at_the_cap_and_go_on_in_order() {
    let mut world = World::copying_with(Setup { parallel: 2, ..Setup::default() });
    for ticket in 1..=5 {
        world.master_opens(ticket);
    }
    assert_eq!(world.flying.len(), 2);
    while !world.flying.is_empty() {
        assert!(world.flying.len() <= 2);
        world.carry_out();
    }
    let order: Vec<u64> = world.sent.iter().map(|(key, _)| key.ticket.get()).collect();
    assert_eq!(order, [1, 2, 3, 4, 5]);
}

#[test]
fn changes_before_the_open_is_answered_reach_the_copy_after_it() {
    let mut world = World::copying();
    world.master_opens(1);
    world.master_stops(1, Some("1.09"));
    world.master_reduces(1, "0.4");
    assert_eq!(world.flying.len(), 1);
    world.answer_everything();
    let copy = world.copy();
    assert_eq!((copy.lots, copy.stop_loss), (lots("0.4"), Some("1.09".parse().unwrap())));
    assert_eq!(world.actions(1), ["open", "modify", "partial_close"]);
}

#[test]
fn a_close_that_overtakes_an_action_of_several_orders_comes_next() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    let mut position = world.master().book.positions[&mt(1)].clone();
    position.stop_loss = Some("1.09".parse().unwrap());
    let previous_lots = position.lots;
    position.lots = lots("0.4");
    world.change(Change::VolumeChanged { position, previous_lots });
    world.master_closes(1);
    world.answer_everything();
    assert_eq!(world.actions(1), ["open", "modify", "close"]);
}

#[test]
fn nothing_is_opened_before_the_first_reconcile() {
    let mut world = World::new(Setup::default());
    world.open_session();
    world.snapshots();
    world.master_opens(1);
    assert!(world.sent.is_empty());
    world.answer_reads();
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn a_live_event_and_a_reconcile_for_the_same_ticket_make_one_order() {
    let mut world = World::copying();
    let event = world.unheard(MASTER, Change::PositionOpened(world.position(1)));
    world.snapshots();
    assert_eq!(world.reads.len(), 1, "a reconcile reads");
    // The read shows nothing, the event opens, and then the plan wants to open as well.
    let reads = std::mem::take(&mut world.reads);
    let stale: Vec<_> = reads.into_iter().map(|(id, s, _)| (id, world.take_read(s))).collect();
    world.masters.get_mut(&MASTER).unwrap().seq += 1;
    let again = world.unheard(MASTER, Change::PositionModified(world.position(1)));
    world.deliver(&event, false);
    world.deliver(&again, false);
    world.carry_out();
    for (id, read) in stale {
        world.step(crate::follower::Input::Read { id, read: Some(read) });
    }
    world.calm(seconds(20));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn settling_holds_opens_and_skips_back_and_no_close() {
    let mut world = World::new(Setup { settle: Some(seconds(10)), ..Setup::default() });
    world.master_has(1);
    let mut far = world.position(2);
    far.open_price = Some("1.2".parse().unwrap());
    far.opened_at.0 -= 60_000_000;
    world.master_has_position(far);
    world.foreign_copy(3);
    world.open_session();
    world.snapshots();
    world.calm(seconds(9));
    assert_eq!(world.actions(3), ["close"]);
    assert_eq!((world.state(1), world.state(2)), (None, None));
    world.master_opens(4);
    assert_eq!(world.actions(4), Vec::<&str>::new());
    world.calm(seconds(2));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.actions(4), ["open"]);
    assert_eq!(world.state(2), Some(PairState::Skipped));
}

// H12: what the former owner sent is still on its way, whatever our wall clock says.
#[test]
fn settling_is_not_over_because_the_wall_clock_was_set_forward() {
    let mut world = World::new(Setup { settle: Some(seconds(10)), ..Setup::default() });
    world.master_has(1);
    world.open_session();
    world.snapshots();
    world.set_forward = seconds(3);
    world.calm(seconds(9));
    assert_eq!(world.actions(1), Vec::<&str>::new());
    world.calm(seconds(2));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn the_former_owners_order_that_appears_while_settling_is_adopted() {
    let mut world = World::new(Setup { settle: Some(seconds(10)), ..Setup::default() });
    world.master_has(1);
    world.open_session();
    world.snapshots();
    world.calm(seconds(5));
    world.foreign_copy(1);
    world.calm(seconds(20));
    assert_eq!(world.actions(1), Vec::<&str>::new());
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn a_late_open_comes_only_out_of_a_reconcile_that_saw_the_history() {
    let mut world = World::copying();
    let mut late = world.position(1);
    late.opened_at.0 -= 6_000_000;
    world.change(Change::PositionOpened(late));
    assert!(world.sent.is_empty());
    assert_eq!(world.reads.len(), 1);
    world.answer_reads();
    assert_eq!(world.actions(1), ["open"]);
}

// A skip is for good: one moment without a tick once cost a trade whose price had not moved.
#[test]
fn a_late_open_waits_for_a_price_before_it_is_skipped_for_want_of_one() {
    for tick_comes in [true, false] {
        let mut world = World::copying();
        let mut late = world.position(1);
        late.opened_at.0 -= 6_000_000;
        world.pass(seconds(4));
        world.change(Change::PositionOpened(late));
        world.answer_reads();
        assert_eq!((world.actions(1), world.state(1)), (vec![], None));
        for _ in 0..20 {
            world.pass(seconds(1));
            if tick_comes {
                world.quote("1.10000", "1.10002");
            }
            world.answer_reads();
        }
        let opened = if tick_comes { vec!["open"] } else { vec![] };
        assert_eq!(world.actions(1), opened, "a tick comes: {tick_comes}");
        assert_eq!(world.state(1) == Some(PairState::Skipped), !tick_comes);
    }
}

#[test]
fn a_late_open_whose_copy_ended_already_is_marked_closed() {
    let mut world = World::copying();
    world.foreign_copy(1);
    let ticket = world.copy_ticket();
    world.by_hand(paper::protocol::Instruction::Close { ticket, lots: None });
    let mut late = world.position(1);
    late.opened_at.0 -= 6_000_000;
    world.change(Change::PositionOpened(late));
    world.calm(seconds(20));
    assert_eq!(world.actions(1), Vec::<&str>::new());
    assert_eq!(world.state(1), Some(PairState::Closed));
}

#[test]
fn a_plans_open_that_waited_too_long_for_room_is_judged_again() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    for ticket in 1..=2 {
        let mut late = world.position(ticket);
        late.opened_at.0 -= 6_000_000;
        world.master_has_position(late);
    }
    world.snapshots();
    world.answer_reads();
    assert_eq!(world.flying.len(), 1);
    world.pass(seconds(4));
    world.quote("1.20000", "1.20002");
    world.carry_out();
    assert!(world.flying.is_empty(), "the price was looked at four seconds ago");
    world.answer_reads();
    world.pass(seconds(10));
    world.answer_reads();
    assert_eq!(world.state(2), Some(PairState::Skipped));
}

#[test]
fn what_the_gate_refused_leaves_no_pair_and_is_copied_after_the_hole() {
    let mut world = World::copying();
    world.permits = false;
    world.master_opens(1);
    assert_eq!((world.pair(1), world.flying.len()), (None, 0));
    let record = world.records.last().unwrap();
    assert_eq!(record.outcome, EventOutcome::NotSent);
    assert_eq!(record.reason.as_deref(), Some(NotSent::Gate.as_str()));
    world.permits = true;
    world.step(crate::follower::Input::LeaseRestored);
    world.answer_reads();
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn an_open_that_became_late_in_the_hole_falls_under_the_price_rule() {
    let mut world = World::copying();
    world.permits = false;
    world.master_opens(1);
    world.pass(seconds(6));
    world.permits = true;
    world.step(crate::follower::Input::LeaseRestored);
    world.pass(seconds(10));
    world.quote("1.20000", "1.20002");
    world.answer_reads();
    assert_eq!(world.actions(1), Vec::<&str>::new());
    assert_eq!(world.state(1), Some(PairState::Skipped));
}

#[test]
fn a_close_that_the_gate_refused_is_sent_soon_after_without_a_word_of_the_lease() {
    // A permit can be refused in the last seconds of a permission that is then renewed in time.
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.permits = false;
    world.master_closes(1);
    world.permits = true;
    world.calm(seconds(3));
    assert_eq!(world.actions(1), ["open", "close"]);
    assert!(world.positions().is_empty());
}

#[test]
fn draining_sends_nothing_new_and_finishes() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    world.master_opens(1);
    world.carry_out();
    let mut position = world.master().book.positions[&mt(1)].clone();
    position.stop_loss = Some("1.09".parse().unwrap());
    let previous_lots = position.lots;
    position.lots = lots("0.4");
    world.change(Change::VolumeChanged { position, previous_lots });
    world.master_opens(2);
    assert_eq!(world.flying.len(), 1);
    world.step(crate::follower::Input::Drain);
    world.carry_out();
    world.master_opens(3);
    world.pass(seconds(5));
    assert_eq!((world.flying.len(), world.follower.unanswered()), (0, 0));
    assert_eq!(world.sent.len(), 2);
}

#[test]
fn two_links_with_the_same_ticket_numbers_do_not_mix() {
    let mut world = World::copying_with(Setup {
        links: vec![
            (rules(LINK, MASTER), Pairs::default()),
            (rules(OTHER_LINK, OTHER_MASTER), Pairs::default()),
        ],
        ..Setup::default()
    });
    let other = world.position(1);
    world.change_of(OTHER_MASTER, Change::PositionOpened(other));
    world.master_opens(1);
    world.answer_everything();
    assert_eq!(world.positions().len(), 2);
    world.master_closes(1);
    world.calm(seconds(20));
    let copy = world.copy();
    assert_eq!(copy.magic, rules(OTHER_LINK, OTHER_MASTER).magic.as_i64());
    let live: Vec<_> = world.rows.values().filter(|row| row.state.is_live()).collect();
    assert_eq!(live.len(), 1);
    assert_eq!(live[0].link, link(OTHER_LINK));
    assert_eq!(world.opened[&key(1)], 1);
}

#[test]
fn a_new_link_with_ended_pairs_does_not_open_them_again() {
    let mut world = World::copying();
    world.master_opens(1);
    world.answer_everything();
    let ticket = world.copy_ticket();
    world.by_hand(paper::protocol::Instruction::Close { ticket, lots: None });
    let mut pairs = Pairs::default();
    let mut ended = world.pair(1).unwrap().clone();
    ended.link = link(OTHER_LINK);
    pairs.put(ended);
    let sim = super::world::MasterSim {
        epoch: 1,
        seq: 0,
        book: world.master().book.clone(),
        told: world.master().book.clone(),
    };
    world.masters.insert(OTHER_MASTER, sim);
    let links =
        vec![(rules(LINK, MASTER), Pairs::default()), (rules(OTHER_LINK, OTHER_MASTER), pairs)];
    world.step(crate::follower::Input::Links(links));
    world.snapshots();
    world.calm(seconds(20));
    assert_eq!(world.actions(1), ["open"]);
    assert!(world.plans.iter().any(|(reason, ..)| *reason == Reason::Feed));
}

// The return after a hole: more closes are told than may be on their way at once. They are no
// absences, so nothing is held, and what the master opened meanwhile is decided by the first plan.
#[test]
fn closes_that_wait_for_room_do_not_hold_what_was_opened_while_the_permission_was_gone() {
    let mut world = World::copying_with(Setup { parallel: 2, ..Setup::default() });
    for ticket in 1..=8 {
        world.master_opens(ticket);
        world.answer_everything();
    }
    world.calm(seconds(20));
    world.lose_session();
    let closes: Vec<_> = (1..=8).map(|ticket| world.closing(MASTER, ticket)).collect();
    let mut heard: Vec<_> = closes.into_iter().map(|close| world.unheard(MASTER, close)).collect();
    let opened = Change::PositionOpened(world.position(9));
    heard.push(world.unheard(MASTER, opened));
    world.pass(seconds(10));
    world.quote("1.10000", "1.10002");
    let plans = world.plans.len();
    world.step(crate::follower::Input::LeaseRestored);
    world.open_session();
    heard.iter().for_each(|event| world.deliver(event, false));
    assert_eq!((world.flying.len(), world.reads.len()), (2, 1));
    world.answer_reads();
    assert!(world.plans[plans..].iter().all(|(_, _, held, _)| !held), "{:?}", world.plans);
    world.answer_everything();
    assert_eq!(world.actions(9), ["open"]);
    assert_eq!(world.positions().len(), 1);
}
