//! What a broker does to orders and copies besides refusing them.

use super::world::{Setup, World, lots, seconds};
use paper::protocol::Style;
use reconcile::{EndReason, EndedHow, FailReason, PairState};
use schemas::RejectClass;

fn copying_in(style: Style) -> World {
    World::copying_with(Setup { style, ..Setup::default() })
}

#[test]
fn partial_fill_is_the_copys_volume_at_open() {
    let mut world = World::copying();
    world.fills.push(("open", 40));
    world.master_opens(1);
    world.carry_out();
    assert_eq!(world.pair(1).unwrap().lots_at_open, Some(lots("0.4")));
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open"], "what was not filled is not asked for again");
    world.master_reduces(1, "0.5");
    world.calm(seconds(1));
    assert_eq!(world.copy().lots, lots("0.2"), "half of what was filled");
    world.master_closes(1);
    world.calm(seconds(1));
    assert!(world.positions().is_empty());
    assert_eq!(world.restless, 0);
}

#[test]
fn a_partial_fill_whose_answer_is_lost_is_adopted_with_what_was_filled() {
    let mut world = World::copying();
    world.fills.push(("open", 40));
    world.master_opens(1);
    world.arrive(0);
    world.lose_session();
    world.pass(seconds(1));
    world.open_session();
    world.snapshots();
    world.calm(seconds(2));
    assert_eq!(world.actions(1), ["open"]);
    let pair = world.pair(1).unwrap();
    assert_eq!((pair.state, pair.lots_at_open), (PairState::Open, Some(lots("0.4"))));
}

#[test]
fn a_close_that_is_filled_in_part_goes_on_until_nothing_is_left() {
    for style in [Style::Mt5, Style::Mt4] {
        let mut world = copying_in(style);
        world.master_opens(1);
        world.carry_out();
        world.fills.extend([("close", 30), ("close", 50)]);
        world.master_closes(1);
        world.carry_out();
        assert_eq!(world.copy().lots, lots("0.7"), "{style:?}");
        let pair = world.pair(1).unwrap();
        assert_eq!(pair.state, PairState::Closing, "{style:?}: it is not over");
        assert_eq!(pair.follower_ticket, Some(world.copy_ticket()), "{style:?}");
        world.calm(seconds(2));
        assert!(world.positions().is_empty(), "{style:?}");
        assert_eq!(world.actions(1), ["open", "close", "close", "close"], "{style:?}");
        assert_eq!(world.state(1), Some(PairState::Closed));
        world.calm(seconds(70));
        assert_eq!(world.restless, 0);
    }
}

#[test]
fn a_reduction_that_is_filled_in_part_goes_on_to_its_target() {
    for style in [Style::Mt5, Style::Mt4] {
        let mut world = copying_in(style);
        world.master_opens(1);
        world.carry_out();
        world.fills.push(("partial_close", 50));
        world.master_reduces(1, "0.6");
        world.calm(seconds(2));
        assert_eq!(world.copy().lots, lots("0.6"), "{style:?}");
        assert_eq!(world.actions(1), ["open", "partial_close", "partial_close"], "{style:?}");
    }
}

#[test]
fn stop_out_ends_the_pair_and_is_never_reopened() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.stop_out();
    let pair = world.pair(1).unwrap();
    assert_eq!(pair.state, PairState::Closed);
    assert_eq!(pair.reason, Some(EndReason::Ended(EndedHow::Reported)));
    world.doubt();
    world.calm(seconds(200));
    world.snapshots();
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open"]);
}

#[test]
fn stop_out_while_nobody_listens_is_found_in_the_history_and_never_reopened() {
    let mut world = World::copying();
    world.master_opens(1);
    world.carry_out();
    world.lose_session();
    world.stop_out();
    world.pass(seconds(1));
    world.open_session();
    world.snapshots();
    world.calm(seconds(70));
    assert_eq!(world.actions(1), ["open"]);
    assert_eq!(world.state(1), Some(PairState::Closed));
}

#[test]
fn market_closed_is_tried_again_only_inside_the_late_open_rule() {
    let mut world = World::copying();
    world.refusals.extend(std::iter::repeat_n(("open", RejectClass::Later), 100));
    world.master_opens(1);
    world.calm(seconds(10));
    let tried = world.actions(1).len();
    world.refusals.clear();
    world.doubt();
    world.calm(seconds(130));
    world.snapshots();
    world.calm(seconds(70));
    assert_eq!(world.actions(1).len(), tried, "not when the market opens again, hours later");
    let reason = world.pair(1).unwrap().reason;
    assert_eq!(reason, Some(EndReason::Failed(FailReason::RejectedLater)));
}

#[test]
fn market_closed_for_a_moment_is_opened_late_only_near_the_masters_price() {
    for (bid, ask, opens) in [("1.10000", "1.10002", true), ("1.10060", "1.10062", false)] {
        let mut world = World::copying();
        world.refusals.push(("open", RejectClass::Later));
        world.master_opens(1);
        world.carry_out();
        // Six seconds of doubt: by then it is a late open.
        world.doubt();
        world.pass(seconds(6));
        world.quote(bid, ask);
        world.snapshots();
        world.answer_reads();
        while !world.flying.is_empty() {
            world.carry_out();
        }
        assert_eq!(world.positions().len(), usize::from(opens), "{bid}");
        let expected = if opens { PairState::Open } else { PairState::Skipped };
        assert_eq!(world.state(1), Some(expected), "{bid}");
    }
}
