//! What the next owner of a follower must not do with what the last one left.

use super::world::{
    DELIVERY_MAX, LINK, MASTER, Setup, TICK, World, key, link, lots, price, rules, seconds,
};
use crate::follower::Input;
use paper::protocol::{OpenComment, Style};
use reconcile::{LinkMode, LinkRules, Pair, PairState, Pairs};
use schemas::{Change, MasterPosition, RejectClass};

fn without_tags(comments: OpenComment) -> World {
    World::copying_with(Setup { comments, style: Style::Mt5, ..Setup::default() })
}

fn plain() -> Vec<(LinkRules, Pairs)> {
    vec![(rules(LINK, MASTER), Pairs::default())]
}

fn untagged() -> LinkRules {
    LinkRules { mode: LinkMode::CopyUntagged, ..rules(LINK, MASTER) }
}

fn rows(world: &World) -> Pairs {
    Pairs::new(world.rows.values().cloned())
}

// H43, the trace as it is written there: opened at 44.0, stopped out at 44.5, both rows in the
// buffer of an owner that dies; the next one finds the master's trade open and the price near.
#[test]
fn a_copy_that_was_stopped_out_before_its_rows_were_written_is_not_opened_a_second_time() {
    for style in [Style::Mt5, Style::Mt4] {
        let mut world = World::copying_with(Setup { style, ..Setup::default() });
        let stop = price("1.09990");
        let position = MasterPosition { stop_loss: Some(stop), ..world.position(101) };
        world.change(Change::PositionOpened(position));
        world.carry_out();
        assert_eq!(world.actions(101), ["open"]);
        world.pass(seconds(1) / 2);
        world.quote("1.09989", "1.09991");
        assert_eq!(world.positions(), []);

        world.next_owner(plain());
        world.calm(seconds(60));
        assert_eq!(world.actions(101), ["open"]);
        // Where the broker wrote into the tag, it only holds the open back.
        let end = if style == Style::Mt5 { PairState::Closed } else { PairState::Skipped };
        assert_eq!(world.state(101), Some(end));
    }
}

// H53: the canary is the first copy.
#[test]
fn the_first_copy_that_comes_back_without_its_tag_makes_the_link_untaggable() {
    for comments in [OpenComment::Blank, OpenComment::Prefix("#4711 ".into())] {
        let mut world = without_tags(comments);
        world.master_opens(101);
        assert_eq!(world.untaggable, []);
        world.carry_out();
        assert_eq!(world.untaggable, [link(LINK)]);
        assert_eq!(world.follower.links_untaggable(), 1);
        // Said once; what comes in time is still copied, and ends with its master.
        world.master_opens(102);
        world.answer_everything();
        assert_eq!(world.untaggable, [link(LINK)]);
        assert_eq!(world.positions().len(), 2);
        world.master_closes(101);
        world.master_closes(102);
        world.answer_everything();
        world.calm(seconds(5));
        assert_eq!(world.positions(), []);
    }
}

#[test]
fn copies_that_keep_their_tag_leave_the_link_as_it_is() {
    for style in [Style::Mt4, Style::Mt5] {
        let mut world = World::copying_with(Setup { style, ..Setup::default() });
        world.master_opens(101);
        let order = world.pending(102);
        world.change(Change::PendingPlaced(order));
        world.answer_everything();
        world.master_reduces(101, "0.4");
        world.answer_everything();
        world.calm(seconds(5));
        assert_eq!(world.untaggable, []);
        assert_eq!(world.follower.links_untaggable(), 0);
    }
}

// H42, H12: the row's age is of wall clocks, where the next owner's clock, or that of the lost one, is wrong.
#[test]
fn an_open_that_a_predecessor_left_unanswered_is_not_given_up_by_the_age_of_its_row() {
    let mut world = World::copying();
    world.master_opens(1);
    world.time_out(0);
    let rows = rows(&world);
    world.set_forward = seconds(3_600);
    world.next_owner(vec![(rules(LINK, MASTER), rows)]);
    world.calm(DELIVERY_MAX - seconds(1));
    assert_eq!(world.state(1), Some(PairState::Sending));
    world.ghost_arrives(0);
    world.calm(seconds(20));
    assert_eq!(world.state(1), Some(PairState::Open));
    assert_eq!(world.actions(1), ["open"]);
}

// H53: what the first owner found is on the link's row, and its rows say which copy is whose.
#[test]
fn the_next_owner_of_an_untaggable_link_opens_nothing_late_and_knows_copies_by_their_rows() {
    let mut world = without_tags(OpenComment::Blank);
    world.master_opens(101);
    world.answer_everything();
    world.master_has(102);
    let rows = rows(&world);
    world.next_owner(vec![(untagged(), rows)]);
    world.calm(seconds(60));
    assert_eq!(world.actions(102), Vec::<&str>::new());
    assert_eq!(world.state(102), Some(PairState::Skipped));
    assert_eq!(world.state(101), Some(PairState::Open));
    world.master_closes(101);
    world.answer_everything();
    assert_eq!(world.positions(), []);
}

// H53: the same, and the rows are lost as well. Churn is what must not be.
#[test]
fn an_untaggable_copy_without_a_row_is_left_alone_and_nothing_is_opened_beside_it() {
    let mut world = without_tags(OpenComment::Blank);
    world.master_opens(101);
    world.answer_everything();
    world.next_owner(vec![(untagged(), Pairs::default())]);
    world.calm(seconds(60));
    assert_eq!(world.actions(101), ["open"]);
    assert_eq!(world.positions().len(), 1);
}

// H53 with a fill: two orders alike and both rows lost, so that neither copy is known by anything.
#[test]
fn the_fill_of_an_order_whose_copy_may_be_waiting_unexplained_opens_nothing() {
    for links in [untagged(), rules(LINK, MASTER)] {
        let mut world = without_tags(OpenComment::Blank);
        for ticket in [101, 102] {
            let order = world.pending(ticket);
            world.change(Change::PendingPlaced(order));
            world.answer_everything();
        }
        world.next_owner(vec![(links, Pairs::default())]);
        world.calm(seconds(30));
        assert!(world.follower.is_copying());
        assert_eq!((world.pendings().len(), world.pair(101)), (2, None));

        let position = MasterPosition { open_price: Some(price("1.09")), ..world.position(101) };
        world.change(Change::PendingFilled(position));
        world.answer_everything();
        // The market is near the fill, so that nothing but the doubt holds the next plans back.
        for _ in 0..150 {
            world.quote("1.09003", "1.09005");
            world.pass(TICK);
            world.answer_everything();
        }
        assert_eq!(world.actions(101), ["place"]);
        assert_eq!((world.pendings().len(), world.positions().len()), (2, 0));
    }
}

// The row of the link may be read before the finding is in it.
#[test]
fn rules_read_before_the_finding_was_stored_do_not_undo_it_and_a_later_word_does() {
    let mut world = without_tags(OpenComment::Blank);
    world.master_opens(101);
    world.answer_everything();
    let read_before = LinkRules { slippage_points: 51, ..rules(LINK, MASTER) };
    world.step(Input::Links(vec![(read_before, Pairs::default())]));
    assert_eq!(world.follower.links_untaggable(), 1);
    world.step(Input::Links(vec![(untagged(), Pairs::default())]));
    assert_eq!(world.follower.links_untaggable(), 1);
    world.step(Input::Links(plain()));
    assert_eq!(world.follower.links_untaggable(), 0);
    assert!(world.pair(101).is_some_and(|pair| pair.link == key(101).link));
}

// The former owner's partial close was on its way when the lease ran out. Orders that close do not
// wait for the settle time, and this one cannot be taken back.
#[test]
fn a_copy_is_not_reduced_while_a_partial_close_of_the_former_owner_may_still_arrive() {
    for arrives in [true, false] {
        let mut world = World::copying();
        world.master_opens(1);
        world.carry_out();
        world.master_reduces(1, "0.6");
        assert_eq!(world.flying.len(), 1);
        let rows = Pairs::new(world.rows.values().cloned());
        // A fence lies between the last order and the claim.
        world.pass(seconds(15));
        world.next_owner(vec![(rules(LINK, MASTER), rows)]);
        world.calm(seconds(5));
        world.master_reduces(1, "0.5");
        world.calm(seconds(4));
        assert_eq!(world.actions(1), ["open", "partial_close"], "it may still arrive");
        if arrives {
            world.ghost_arrives(0);
        } else {
            world.ghosts.clear();
        }
        world.calm(seconds(20));
        assert_eq!(world.copy().lots, lots("0.5"), "arrives: {arrives}");
    }
}

// Found by an operator: a waiting order was refused in the moment in which its account was handed over,
// and its row said for ever that it was on its way.
#[test]
fn the_row_of_an_order_that_an_earlier_owner_took_back_ends_with_the_masters_trade_or_is_tried_again()
 {
    for is_cancelled in [true, false] {
        let mut world = World::copying();
        world.refusals.push(("place", RejectClass::Invalid));
        let pending = world.pending(1);
        world.change(Change::PendingPlaced(pending.clone()));
        world.calm(seconds(1));
        let rows = Pairs::new(world.rows.values().cloned());
        let unsent = |pair: &Pair| pair.state == PairState::Sending && pair.sent_at.is_none();
        assert!(rows.rows().all(unsent), "{rows:?}");
        world.next_owner(vec![(rules(LINK, MASTER), rows)]);
        world.calm(seconds(1));
        if is_cancelled {
            world.change(Change::PendingCancelled(pending));
        }
        world.calm(seconds(40));
        let row = world.rows.values().next().unwrap();
        let wanted = if is_cancelled { PairState::Failed } else { PairState::Open };
        assert_eq!((world.rows.len(), row.state), (1, wanted), "{row:?}");
    }
}
