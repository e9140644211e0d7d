//! A person closes a copy.

use super::world::*;
use crate::broker::NotSent;
use crate::follower::{CloseAnswer, Input, NotNow};
use reconcile::{CloseCause, EndReason, LinkRules, PairState, Pairs};
use schemas::{Change, RejectClass};

impl World {
    /// Asks; gives what was answered so far.
    fn ask(&mut self, ticket: u64, asker: u64) -> Vec<(u64, CloseAnswer)> {
        self.step(Input::Close { key: key(ticket), asker });
        std::mem::take(&mut self.close_answers)
    }

    fn told(&mut self) -> Vec<(u64, CloseAnswer)> {
        std::mem::take(&mut self.close_answers)
    }
}

fn is_done(answer: &CloseAnswer) -> bool {
    let by_request = Some(EndReason::Closed(CloseCause::UserRequest));
    matches!(answer, CloseAnswer::Done { copy: Some(_), reason } if *reason == by_request)
}

fn with_a_copy() -> World {
    let mut world = World::copying();
    world.master_opens(1);
    world.calm(seconds(1));
    assert_eq!(world.actions(1), ["open"]);
    world
}

#[test]
fn a_copy_closed_by_hand_ends_with_its_reason_and_is_not_opened_again() {
    let mut world = with_a_copy();
    assert_eq!(world.ask(1, 9), []);
    world.carry_out();
    let told = world.told();
    assert!(matches!(&told[..], [(9, answer)] if is_done(answer)), "{told:?}");
    assert_eq!(world.state(1), Some(PairState::Closed));
    // The master still has the trade, and changes it; plans are made.
    world.master_stops(1, Some("1.05000"));
    world.snapshots();
    world.calm(seconds(130));
    assert_eq!(world.actions(1), ["open", "close"]);
    let reason = world.pair(1).unwrap().reason;
    assert_eq!(reason, Some(EndReason::Closed(CloseCause::UserRequest)));
}

#[test]
fn asked_again_it_is_done_and_nothing_is_sent() {
    let mut world = with_a_copy();
    world.ask(1, 9);
    assert_eq!(world.ask(1, 10), [], "one order for both");
    world.carry_out();
    let told = world.told();
    assert_eq!(told.iter().map(|(asker, _)| *asker).collect::<Vec<_>>(), [9, 10]);
    assert!(told.iter().all(|(_, answer)| is_done(answer)), "{told:?}");
    let again = world.ask(1, 11);
    assert!(matches!(&again[..], [(11, answer)] if is_done(answer)), "{again:?}");
    assert_eq!(world.actions(1), ["open", "close"]);
}

#[test]
fn without_a_permit_it_is_told_and_not_sent_later() {
    let mut world = with_a_copy();
    world.permits = false;
    let told = world.ask(1, 9);
    assert_eq!(told, [(9, CloseAnswer::NotNow(NotNow::NotSent(NotSent::Gate)))]);
    world.permits = true;
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Open));
}

#[test]
fn what_was_never_copied_is_no_copy() {
    let mut world = with_a_copy();
    assert_eq!(world.ask(2, 9), [(9, CloseAnswer::NoSuchCopy)]);
    let elsewhere = crate::follower::TicketKey { link: link(99), ..key(1) };
    world.step(Input::Close { key: elsewhere, asker: 10 });
    assert_eq!(world.told(), [(10, CloseAnswer::NoSuchCopy)]);
    assert_eq!(world.sent.len(), 1);
}

#[test]
fn without_a_session_and_before_the_open_is_answered_nothing_is_promised() {
    let mut world = World::copying();
    world.master_opens(1);
    assert_eq!(world.ask(1, 9), [(9, CloseAnswer::NotNow(NotNow::Opening))]);
    world.carry_out();
    world.lose_session();
    assert_eq!(world.ask(1, 10), [(10, CloseAnswer::NotNow(NotNow::NoSession))]);
    world.open_session();
    world.calm(seconds(5));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn an_account_that_is_let_go_takes_no_wish_and_forgets_those_that_wait() {
    let mut world = World::copying_with(Setup { parallel: 1, ..Setup::default() });
    for ticket in [1, 2] {
        world.master_opens(ticket);
        world.calm(seconds(1));
    }
    assert_eq!(world.ask(1, 9), []);
    assert_eq!(world.ask(2, 10), [], "it waits for room");
    world.step(Input::Drain);
    assert_eq!(world.told(), [(10, CloseAnswer::NotNow(NotNow::Draining))]);
    assert_eq!(world.ask(2, 11), [(11, CloseAnswer::NotNow(NotNow::Draining))]);
    world.carry_out();
    assert!(is_done(&world.told()[0].1));
    assert_eq!(world.actions(2), ["open"]);
}

fn pause(world: &mut World) {
    let paused = LinkRules { paused: true, ..rules(LINK, MASTER) };
    world.step(Input::Links(vec![(paused, Pairs::default())]));
    world.calm(seconds(1));
}

#[test]
fn a_person_closes_copies_of_a_paused_link_and_a_broker_that_puts_it_off_is_asked_again() {
    let mut world = with_a_copy();
    pause(&mut world);
    world.refusals.push(("close", RejectClass::Later));
    world.refusals.push(("close", RejectClass::Later));
    world.ask(1, 9);
    world.carry_out();
    let told = world.told();
    assert!(
        matches!(&told[..], [(9, CloseAnswer::Underway(why))] if why.contains("later")),
        "{told:?}"
    );
    let told = world.ask(1, 10);
    assert!(matches!(&told[..], [(10, CloseAnswer::Underway(_))]), "{told:?}");
    world.calm(seconds(10));
    assert_eq!(world.actions(1), ["open", "close", "close", "close"]);
    let reason = world.pair(1).unwrap().reason;
    assert_eq!(reason, Some(EndReason::Closed(CloseCause::UserRequest)));
}

#[test]
fn a_close_whose_answer_is_lost_goes_on() {
    for arrives in [true, false] {
        let mut world = with_a_copy();
        pause(&mut world);
        world.ask(1, 9);
        if arrives {
            world.arrive(0);
        }
        world.time_out(0);
        let told = world.told();
        assert!(matches!(&told[..], [(9, CloseAnswer::Underway(_))]), "{told:?}");
        world.calm(seconds(40));
        assert_eq!(world.state(1), Some(PairState::Closed), "arrives: {arrives}");
        assert!(world.positions().is_empty());
    }
}

#[test]
fn a_close_asked_for_while_another_order_is_on_its_way_follows_it() {
    let mut world = with_a_copy();
    world.master_stops(1, Some("1.05000"));
    assert_eq!(world.ask(1, 9), []);
    world.carry_out();
    world.carry_out();
    assert!(is_done(&world.told()[0].1));
    assert_eq!(world.actions(1), ["open", "modify", "close"]);
}

#[test]
fn a_close_in_doubt_and_before_the_settle_time_leaves_at_once() {
    let mut world = with_a_copy();
    world.doubt();
    world.ask(1, 9);
    assert_eq!(world.actions(1), ["open", "close"]);
}

#[test]
fn a_waiting_order_is_cancelled_by_hand() {
    let mut world = World::copying();
    let order = world.pending(3);
    world.change(Change::PendingPlaced(order));
    world.calm(seconds(1));
    world.ask(3, 9);
    world.carry_out();
    assert!(is_done(&world.told()[0].1));
    assert!(world.pendings().is_empty());
    world.calm(seconds(70));
    assert_eq!(world.actions(3).len(), 2, "not placed again: {:?}", world.actions(3));
}

#[test]
fn a_copy_that_its_stop_closes_first_is_done_as_well() {
    let mut world = with_a_copy();
    world.ask(1, 9);
    world.stop_out();
    world.carry_out();
    world.calm(seconds(5));
    let told = world.told();
    assert_eq!(told.len(), 1);
    assert_eq!(world.state(1), Some(PairState::Closed));
}

#[test]
fn more_who_wait_for_one_close_than_are_kept_are_told_at_once_that_it_is_under_way() {
    let mut world = with_a_copy();
    for asker in 0..32 {
        assert_eq!(world.ask(1, asker), [], "{asker}");
    }
    let told = world.ask(1, 32);
    assert!(matches!(&told[..], [(32, CloseAnswer::Underway(_))]), "{told:?}");
    world.carry_out();
    assert_eq!(world.told().len(), 32);
    assert_eq!(world.actions(1), ["open", "close"]);
}
