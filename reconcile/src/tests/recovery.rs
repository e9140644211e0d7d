//! Duplicates, gaps, recovery after a takeover, orders without an answer, absence.

use crate::action::{
    AbsentFrom, CloseCause, CopyStep, EndReason, EndedHow, FailReason, FoundBy, Note, SkipReason,
    StrayReason, WaitReason,
};
use crate::fixture::*;
use crate::input::LinkMode;
use crate::pair::{Pair, PairState, Pairs};
use schemas::MasterPosition;
use std::time::Duration;

fn waits(scene: &Scene, ticket: u64) -> Option<WaitReason> {
    scene.plan().notes.into_iter().find_map(|note| match note {
        Note::Waiting { ticket: of, why } if of == mt(ticket) => Some(why),
        Note::Waiting { .. } | Note::ReportOrphan { .. } => None,
    })
}

fn stray(scene: &Scene, ticket: u64) -> Option<StrayReason> {
    scene.plan().notes.into_iter().find_map(|note| match note {
        Note::ReportOrphan { ticket: of, why } if of == ft(ticket) => Some(why),
        Note::Waiting { .. } | Note::ReportOrphan { .. } => None,
    })
}

// Case 1.
#[test]
fn open_delivered_three_times_opens_once() {
    let mut scene = Scene::new().master_has(master_position(101));
    let opens: Vec<bool> = (0..3)
        .map(|_| {
            let action = scene.live(101).action;
            let plan = scene.plan();
            scene.execute(&plan, usize::MAX);
            action.is_some()
        })
        .collect();
    assert_eq!(opens, [true, false, false]);
    assert_eq!(scene.follower.positions.len(), 1);
}

// Cases 2, 3 and 31.
#[test]
fn copy_found_by_tag_is_adopted_not_opened_again() {
    let scene = Scene::new().master_has(master_position(101)).follower_has(copy_position(55, 101));
    let steps = scene.steps(101);
    assert!(
        matches!(&steps[..], [CopyStep::AdoptCopy { ticket, found_by: FoundBy::Tag, .. }] if *ticket == ft(55)),
        "{steps:?}"
    );
}

// Case 31: the answer to the open was lost.
#[test]
fn order_without_answer_is_adopted_once_its_tag_shows() {
    let scene = Scene::new().master_has(master_position(101)).follower_has(copy_position(55, 101));
    let scene = scene.clone().pair(scene.sending_pair(101, 120));
    let id = scene.pairs.main(mt(101)).unwrap().id;
    let mut after = scene.clone();
    after.execute(&scene.plan(), usize::MAX);
    let pair = after.pairs.main(mt(101)).unwrap();
    assert_eq!((pair.id, pair.state, pair.follower_ticket), (id, PairState::Open, Some(ft(55))));
    assert_eq!(after.pairs.rows().count(), 1);
}

// Case 6.
#[test]
fn trades_lost_in_a_gap_are_opened_and_no_others() {
    let mut scene = Scene::new();
    for ticket in 1..=5 {
        scene = scene.master_has(master_position(ticket));
    }
    for ticket in [1, 2, 5] {
        let pair = scene.open_pair(ticket, 50 + ticket);
        scene = scene.follower_has(copy_position(50 + ticket, ticket)).pair(pair);
    }
    let plan = scene.plan();
    let tickets: Vec<u64> = plan.actions.iter().map(|a| a.master_ticket.get()).collect();
    assert_eq!(tickets, [3, 4]);
    assert!(plan.actions.iter().all(|a| matches!(a.steps[..], [CopyStep::OpenCopy { .. }])));
}

// Case 8 and S5.
#[test]
fn copy_closed_by_hand_is_marked_closed_and_never_opened_again() {
    let mut scene = Scene::new().master_has(master_position(101));
    scene = scene.clone().pair(scene.open_pair(101, 55)).history_has(closed_trade(55, ""));
    let plan = scene.plan();
    assert!(matches!(
        plan.actions[0].steps[..],
        [CopyStep::MarkClosed { how: EndedHow::History, .. }]
    ));
    scene.execute(&plan, usize::MAX);
    assert_eq!(scene.plan().actions, []);
    assert_eq!(scene.live(101).action, None);
}

// H43: opened and stopped out by an owner whose rows were lost.
#[test]
fn copy_that_ended_before_the_takeover_is_recorded_not_opened() {
    let scene =
        Scene::new().master_has(master_position(101)).history_has(closed_trade(55, &tag_of(101)));
    let steps = scene.steps(101);
    assert!(
        matches!(&steps[..], [CopyStep::MarkClosed { ticket, how: EndedHow::History, .. }] if *ticket == ft(55)),
        "{steps:?}"
    );
}

// H43 with the comment overwritten at the stop (P3, B46).
#[test]
fn ended_trade_that_may_have_been_the_copy_holds_the_open_back_for_good() {
    for comment in ["[sl]", "", &format!("{}[sl]", tag_of(101))] {
        let mut ended = closed_trade(55, comment);
        ended.opened_at = seconds_ago(1);
        let scene = Scene::new().master_has(master_position(101)).history_has(ended);
        assert_eq!(scene.skip_reason(101), Some(SkipReason::EndedBeforeTakeover), "{comment:?}");
    }
}

#[test]
fn ended_trade_that_was_another_copy_holds_nothing_back() {
    let mut other = closed_trade(55, &format!("{}[sl]", tag_of(90)));
    other.opened_at = seconds_ago(1);
    let mut paired = closed_trade(56, "[sl]");
    paired.opened_at = seconds_ago(1);
    let scene = Scene::new().master_has(master_position(101));
    let ended = scene.open_pair(91, 56).on_ended(EndedHow::Reported);
    let scene = scene.history_has(other).history_has(paired).pair(ended);
    assert!(matches!(scene.steps(101)[..], [CopyStep::OpenCopy { .. }]));
}

// Invariant 3 of the assignment: what a row names in another symbol is not its copy, ended or not.
#[test]
fn ended_trade_holds_an_open_back_although_a_row_of_another_symbol_names_its_number() {
    let mut ended = closed_trade(56, "");
    ended.opened_at = seconds_ago(1);
    let scene = Scene::new().master_has(master_position(101)).history_has(ended);
    let mut pair = scene.open_pair(91, 56);
    assert!(matches!(scene.clone().pair(pair.clone()).steps(101)[..], [CopyStep::OpenCopy { .. }]));
    pair.symbol = symbol("XAUUSD");
    let steps = scene.pair(pair).steps(101);
    let reason = SkipReason::EndedBeforeTakeover;
    assert!(
        matches!(&steps[..], [CopyStep::SkipOpen { reason: r, .. }] if *r == reason),
        "{steps:?}"
    );
}

// Invariant 2 of the assignment: a row may name the copy of another ticket.
#[test]
fn pair_does_not_end_because_a_trade_with_another_tickets_tag_ended_under_its_number() {
    let scene = Scene::new().master_has(master_position(101)).follower_has(copy_position(57, 101));
    let scene = scene.clone().pair(scene.open_pair(101, 56));
    let rebind = CopyStep::RebindCopy { from: ft(56), to: ft(57), found_by: FoundBy::Tag };
    let of_another = scene.clone().history_has(closed_trade(56, &tag_of(91)));
    assert_eq!(of_another.steps(101), std::slice::from_ref(&rebind));
    // And went on under another number, which has no tag.
    let partly = of_another.history_has(closed_trade(58, "from #56"));
    assert_eq!(partly.steps(101), [rebind]);
    let ended = scene.history_has(closed_trade(56, &tag_of(101))).steps(101);
    assert!(matches!(ended[..], [CopyStep::MarkClosed { .. }, CopyStep::CloseDuplicate { .. }]));
}

// The same where the trade goes on under another number and without a tag.
#[test]
fn ended_pair_does_not_take_the_rest_of_a_trade_that_was_tagged_as_another_tickets() {
    let mut rest = copy_position(57, 101);
    rest.comment = "from #56".to_owned();
    let scene = Scene::new().master_has(master_position(101)).follower_has(rest);
    let scene = scene.history_has(closed_trade(56, &tag_of(101)));
    let ended = scene.open_pair(91, 56).on_ended(EndedHow::Reported);
    let scene = scene.pair(ended);
    assert!(
        matches!(scene.steps(101)[..], [CopyStep::AdoptCopy { ticket, .. }] if ticket == ft(57))
    );
    assert_eq!(scene.steps(91), []);
}

#[test]
fn history_that_does_not_reach_back_opens_nothing_and_decides_nothing() {
    let mut scene = Scene::new().master_has(master_position(101));
    scene.history.since = seconds_ago(2);
    assert_eq!(scene.steps(101), []);
    assert_eq!(waits(&scene, 101), Some(WaitReason::HistoryTooShort));
    scene.history.since =
        crate::history_needed_since(&scene.rules, &scene.master, &scene.pairs, NOW, &scene.limits);
    assert!(matches!(scene.steps(101)[..], [CopyStep::OpenCopy { .. }]));
}

// H42.
#[test]
fn order_in_flight_stays_unresolved_as_long_as_it_may_still_be_carried_out() {
    let base = Scene::new().master_has(master_position(101));
    let young = base.clone().pair(base.sending_pair(101, 26));
    assert_eq!(young.steps(101), []);
    assert_eq!(waits(&young, 101), Some(WaitReason::AnswerDue));
    let old = base.clone().pair(base.sending_pair(101, 28));
    assert_eq!(old.steps(101), [CopyStep::MarkFailed { reason: FailReason::NeverArrived }]);
}

// H42: the row's age is of a wall clock, and somebody may have set it.
#[test]
fn order_that_the_caller_knows_to_be_on_the_road_is_not_given_up_for_the_age_of_its_row() {
    let scene = Scene::new().master_has(master_position(101));
    let mut scene = scene.clone().pair(scene.sending_pair(101, 3_600));
    scene.on_the_road.insert(mt(101));
    assert_eq!(scene.steps(101), []);
    assert_eq!(waits(&scene, 101), Some(WaitReason::AnswerDue));
}

// H42: the age is that of the read, not of the wall clock.
#[test]
fn old_order_is_not_given_up_by_a_read_that_is_older_than_its_answer() {
    let base = Scene::new().master_has(master_position(101));
    let mut scene = base.clone().pair(base.sending_pair(101, 60));
    scene.follower.at = seconds_ago(55);
    assert_eq!(waits(&scene, 101), Some(WaitReason::AnswerDue));
    scene.follower.at = seconds_ago(61);
    assert_eq!(waits(&scene, 101), Some(WaitReason::ReadOlderThanOrder));
    assert_eq!(scene.steps(101), []);
}

#[test]
fn order_that_arrived_and_ended_is_closed_not_failed() {
    for comment in [tag_of(101), "[sl]".to_owned()] {
        let base = Scene::new().master_has(master_position(101));
        let scene = base.clone().pair(base.sending_pair(101, 60));
        let mut scene = scene.history_has(closed_trade(55, &comment));
        assert!(
            matches!(scene.steps(101)[..], [CopyStep::MarkClosed { how: EndedHow::History, .. }]),
            "{comment}"
        );
        scene.execute(&scene.plan(), usize::MAX);
        let pair = scene.pairs.main(mt(101)).unwrap();
        assert_eq!((pair.state, pair.follower_ticket), (PairState::Closed, Some(ft(55))));
    }
}

// Never send an unknown open again; failed is final.
#[test]
fn failed_order_is_never_sent_again() {
    let base = Scene::new().master_has(master_position(101));
    let mut scene = base.clone().pair(base.sending_pair(101, 60));
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    let pair = scene.pairs.main(mt(101)).unwrap();
    assert_eq!(pair.reason, Some(EndReason::Failed(FailReason::NeverArrived)));
    assert_eq!(scene.plan().actions, []);
    assert_eq!(scene.live(101).action, None);
}

// S4: it did arrive, after it was given up.
#[test]
fn copy_that_arrives_after_it_was_given_up_is_closed() {
    let base = Scene::new().master_has(master_position(101));
    let mut scene = base.clone().pair(base.sending_pair(101, 60));
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    let scene = scene.follower_has(copy_position(55, 101));
    assert_eq!(
        scene.steps(101),
        [CopyStep::CloseOrphan {
            ticket: ft(55),
            is_pending: false,
            cause: CloseCause::OrphanPairEnded
        }]
    );
}

// H47, B41.
#[test]
fn ticket_with_an_order_in_flight_is_left_to_its_slot() {
    let mut scene = Scene::new().master_has(master_position(101));
    scene.busy.insert(mt(101));
    assert_eq!(scene.steps(101), []);
    assert_eq!(waits(&scene, 101), Some(WaitReason::SlotBusy));
}

// Case 12 and H41b: eight positions, then an empty list.
#[test]
fn master_that_dropped_to_nothing_closes_nothing_at_the_first_look() {
    let mut scene = Scene::new();
    for ticket in 1..=8 {
        let pair = scene.open_pair(ticket, 50 + ticket);
        scene = scene.follower_has(copy_position(50 + ticket, ticket)).pair(pair);
    }
    let first = scene.plan();
    assert_eq!(first.actions, []);
    let held = first.held.unwrap();
    assert_eq!((held.absent.len(), held.of), (8, 8));

    // The same reads again confirm nothing.
    scene.confirmed = Some(held.clone());
    assert_eq!(scene.plan().held, Some(held));

    let later = Duration::from_secs(3);
    for at in [&mut scene.now, &mut scene.master.at, &mut scene.follower.at] {
        *at = at.plus(later);
    }
    let second = scene.plan();
    assert_eq!((second.held, second.actions.len()), (None, 8));
}

// H41a: the follower's list is not there yet.
#[test]
fn follower_list_without_its_copies_marks_nothing_closed_at_the_first_look() {
    let mut scene = Scene::new();
    for ticket in 1..=8 {
        let pair = scene.open_pair(ticket, 50 + ticket);
        scene = scene.master_has(master_position(ticket)).pair(pair);
    }
    let held = scene.plan().held.unwrap();
    assert!(held.absent.contains(&(mt(1), AbsentFrom::Follower)));
    // What the history confirms is no absence.
    for ticket in 1..=8 {
        scene = scene.history_has(closed_trade(50 + ticket, ""));
    }
    assert_eq!((scene.plan().held, scene.plan().actions.len()), (None, 8));
}

#[test]
fn three_absences_are_believed_at_once_and_four_of_five_are_not() {
    let with = |absent: u64| {
        let mut scene = Scene::new();
        for ticket in 1..=5 {
            let pair = scene.open_pair(ticket, 50 + ticket);
            scene = scene.follower_has(copy_position(50 + ticket, ticket)).pair(pair);
            if ticket > absent {
                scene = scene.master_has(master_position(ticket));
            }
        }
        scene.plan()
    };
    assert_eq!((with(3).held, with(3).actions.len()), (None, 3));
    assert!(with(4).held.is_some());
}

#[test]
fn second_look_confirms_only_what_the_first_one_saw() {
    let mut scene = Scene::new();
    for ticket in 1..=20 {
        let pair = scene.open_pair(ticket, 50 + ticket);
        scene = scene.follower_has(copy_position(50 + ticket, ticket)).pair(pair);
        if ticket > 8 {
            scene = scene.master_has(master_position(ticket));
        }
    }
    scene.confirmed = scene.plan().held;
    assert_eq!(scene.confirmed.as_ref().unwrap().absent.len(), 8);
    scene.master.book.positions.clear();
    for at in [&mut scene.now, &mut scene.master.at, &mut scene.follower.at] {
        *at = at.plus(Duration::from_secs(3));
    }
    let second = scene.plan();
    assert_eq!(second.held.unwrap().absent.len(), 20);
    assert_eq!(second.actions, []);
}

// Case 23: the master closed three, events say so; nothing may hold a close back.
#[test]
fn every_close_of_the_master_is_copied_whether_it_lost_or_won() {
    let mut scene = Scene::new();
    for ticket in 1..=3 {
        let mut copy = copy_position(50 + ticket, ticket);
        copy.open_price = price(if ticket == 1 { "1.05" } else { "1.2" });
        scene = scene.clone().follower_has(copy).pair(scene.open_pair(ticket, 50 + ticket));
    }
    for ticket in 1..=3 {
        let steps = scene.live(ticket).action.unwrap().steps;
        let close =
            CopyStep::CloseCopy { ticket: ft(50 + ticket), cause: CloseCause::MasterClosed };
        assert_eq!((&steps, &scene.steps(ticket)), (&vec![close.clone()], &vec![close]));
    }
}

#[test]
fn close_that_the_broker_refused_is_planned_again_without_a_second_look() {
    let mut scene = Scene::new();
    for ticket in 1..=8 {
        let mut pair = scene.open_pair(ticket, 50 + ticket);
        pair.state = PairState::Closing;
        scene = scene.follower_has(copy_position(50 + ticket, ticket)).pair(pair);
    }
    let plan = scene.plan();
    assert_eq!((plan.held, plan.actions.len()), (None, 8));
}

// H55.
#[test]
fn of_several_copies_the_pairs_stays_else_the_oldest() {
    let mut old = copy_position(57, 101);
    old.opened_at = seconds_ago(90);
    let scene = Scene::new()
        .master_has(master_position(101))
        .follower_has(copy_position(55, 101))
        .follower_has(copy_position(56, 101))
        .follower_has(old);
    let closes = |steps: Vec<CopyStep>| -> Vec<u64> {
        let tickets = steps.iter().filter_map(|step| match step {
            CopyStep::CloseDuplicate { ticket, .. } => Some(ticket.get()),
            _ => None,
        });
        tickets.collect()
    };
    assert_eq!(closes(scene.steps(101)), [55, 56], "without a pair 57 is the oldest");
    let scene = scene.clone().pair(scene.open_pair(101, 56));
    assert_eq!(closes(scene.steps(101)), [57, 55]);
}

#[test]
fn second_copy_does_not_take_the_place_of_a_copy_that_ended() {
    let base = Scene::new().master_has(master_position(101)).follower_has(copy_position(56, 101));
    let mut scene =
        base.clone().pair(base.open_pair(101, 55)).history_has(closed_trade(55, &tag_of(101)));
    let steps = scene.steps(101);
    assert!(
        matches!(
            steps[..],
            [CopyStep::MarkClosed { how: EndedHow::History, .. }, CopyStep::CloseDuplicate { .. }]
        ),
        "{steps:?}"
    );
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    assert_eq!(scene.plan().actions, []);
    assert_eq!(scene.follower.positions, []);
}

// H56.
#[test]
fn tagged_copy_of_a_trade_that_the_master_does_not_have_is_closed() {
    let scene = Scene::new().follower_has(copy_position(55, 101));
    assert_eq!(
        scene.steps(101),
        [CopyStep::CloseOrphan {
            ticket: ft(55),
            is_pending: false,
            cause: CloseCause::OrphanMasterGone
        }]
    );
}

// H56, H41: pair rows and master list both missing.
#[test]
fn orphans_count_as_absences() {
    let mut scene = Scene::new();
    for ticket in 1..=8 {
        scene = scene.follower_has(copy_position(50 + ticket, ticket));
    }
    assert!(scene.plan().held.is_some());
}

// H56: another program uses our magic.
#[test]
fn trade_with_our_magic_alone_is_reported_and_left_alone() {
    let mut foreign = copy_position(77, 101);
    foreign.comment = "grid v2".to_owned();
    let scene = Scene::new().follower_has(foreign);
    assert_eq!(scene.plan().actions, []);
    assert_eq!(stray(&scene, 77), Some(StrayReason::MagicOnly));
}

// H53: the broker blanks comments.
#[test]
fn copy_without_comment_is_adopted_if_it_is_the_only_one_that_fits() {
    let mut blank = copy_position(55, 101);
    blank.comment = String::new();
    blank.opened_at = seconds_ago(1);
    blank.open_price = price("1.10005");
    let scene = Scene::new().master_has(master_position(101)).follower_has(blank.clone());
    assert!(matches!(
        scene.steps(101)[..],
        [CopyStep::AdoptCopy { found_by: FoundBy::UniqueMatch, .. }]
    ));
    // Two that fit: neither is taken, and no third is opened.
    blank.ticket = ft(56);
    let scene = scene.follower_has(blank);
    assert_eq!(scene.steps(101), []);
    assert_eq!(waits(&scene, 101), Some(WaitReason::StrayMayBeCopy));
    assert_eq!(stray(&scene, 55), Some(StrayReason::MagicOnly));
}

// H42 with H53, found by the simulation: the answer was lost, the broker blanks comments, and the
// master has closed meanwhile, so that there is no price to compare with.
#[test]
fn untagged_copy_of_an_unanswered_order_is_found_by_its_time_when_the_master_is_gone() {
    let mut blank = copy_position(55, 101);
    blank.comment = String::new();
    blank.opened_at = seconds_ago(4);
    let scene = Scene::new();
    let scene = scene.clone().pair(scene.sending_pair(101, 5));
    let found = scene.clone().follower_has(blank.clone());
    assert!(matches!(
        found.steps(101)[..],
        [CopyStep::AdoptCopy { found_by: FoundBy::UniqueMatch, .. }, ..]
    ));
    // One that opened before the order was sent is somebody else's.
    let mut older = blank.clone();
    older.opened_at = seconds_ago(60);
    assert_eq!(scene.clone().follower_has(older).steps(101), []);
    // Two that fit: neither is taken.
    blank.ticket = ft(56);
    assert_eq!(found.follower_has(blank).steps(101), []);
}

// H53, found by the simulation: a former owner could not write its rows. One of them would have said
// that the order in flight was answered and its copy closed, another whose copy this is.
#[test]
fn untagged_copy_that_may_be_of_a_trade_without_a_row_is_no_other_orders() {
    let mut blank = copy_position(55, 102);
    blank.comment = String::new();
    blank.opened_at = seconds_ago(4);
    let mut scene = Scene::new();
    scene.rules.mode = LinkMode::CopyUntagged;
    let scene = scene.clone().pair(scene.sending_pair(101, 5)).follower_has(blank);
    assert!(matches!(
        scene.steps(101)[..],
        [CopyStep::AdoptCopy { found_by: FoundBy::UniqueMatch, .. }, ..]
    ));
    let opened = MasterPosition { opened_at: seconds_ago(5), ..master_position(102) };
    let scene = scene.master_has(opened);
    assert_eq!(scene.steps(101), []);
    assert_eq!(scene.steps(102), []);
    assert_eq!(stray(&scene, 55), Some(StrayReason::MagicOnly));
}

// B39: planned over the union, not over one list.
#[test]
fn pair_that_neither_list_shows_is_ended() {
    let scene = Scene::new();
    let scene = scene.clone().pair(scene.open_pair(101, 55));
    assert!(matches!(scene.steps(101)[..], [CopyStep::MarkClosed { how: EndedHow::Absent, .. }]));
}

// S10.
#[test]
fn states_only_go_forward_and_terminal_ones_never_change() {
    for from in PairState::ALL {
        for to in PairState::ALL {
            assert!(!(from.is_terminal() && from.may_become(to)), "{from:?} {to:?}");
            assert!(!(from.may_become(to) && to < from && !to.is_terminal()), "{from:?} {to:?}");
        }
        assert_eq!(PairState::from_word(from.as_str()), Some(from));
    }
    assert!(PairState::Sending.may_become(PairState::Closed));
    let scene = Scene::new();
    let closed = scene.open_pair(101, 55).on_ended(EndedHow::Reported);
    assert_eq!(closed.on_ended(EndedHow::Absent), closed);
}

// H70, and rows read twice.
#[test]
fn of_two_rows_of_a_pair_the_terminal_one_counts() {
    let scene = Scene::new();
    let open = scene.open_pair(101, 55);
    let mut newer = open.clone();
    newer.version = 9;
    let closed = open.on_ended(EndedHow::History);
    for rows in [vec![newer.clone(), closed.clone()], vec![closed.clone(), newer]] {
        assert_eq!(Pairs::new(rows).main(mt(101)), Some(&closed));
    }
}

// B43.
#[test]
fn pair_ids_depend_on_link_ticket_and_first_follower_ticket_alone() {
    let scene = Scene::new();
    let id = |first| crate::pair::PairId::new(scene.rules.link, mt(101), first);
    assert_eq!(id(None), scene.sending_pair(101, 5).id);
    assert_eq!(id(Some(ft(55))), scene.open_pair(101, 55).id);
    assert_ne!(id(None), id(Some(ft(55))));
    assert_ne!(id(Some(ft(55))), id(Some(ft(56))));
    // Rows of all nodes and versions have to agree: the value is part of the contract.
    assert_eq!(id(Some(ft(55))).to_string(), "5ed3a070-9a4a-5b0b-84c6-088fb5baaa06");
    assert_eq!(Pair::on_ended(&scene.open_pair(101, 55), EndedHow::History).id, id(Some(ft(55))));
}
