//! Tags, magics, foreign trades, inputs that do not belong together.

use crate::action::{
    CloseCause, CopyStep, EndReason, EndedHow, FailReason, Note, SkipReason, StrayReason,
};
use crate::fixture::*;
use crate::input::{InputError, ReconcileInput};
use crate::tag;
use schemas::{AccountId, LinkId, Magic, MasterTicket};

fn link(id: u64) -> LinkId {
    LinkId::new(id).unwrap()
}

// Case 52.
#[test]
fn longest_tag_fits_the_shortest_comment_field() {
    let longest = tag::encode(link(36u64.pow(8) - 1), MasterTicket::MAX).unwrap();
    assert_eq!(longest.as_str().len(), tag::TAG_LEN);
    const { assert!(tag::TAG_LEN <= 24) };
    assert!(longest.as_str().bytes().all(|byte| byte.is_ascii_alphanumeric()));
}

#[test]
fn link_that_does_not_fit_into_a_tag_is_refused() {
    let too_large = link(36u64.pow(8));
    assert_eq!(tag::encode(too_large, mt(1)), Err(tag::TagError(too_large)));
    let mut scene = Scene::new().master_has(master_position(101));
    scene.rules.link = too_large;
    assert!(matches!(ReconcileInput::new(scene.parts()), Err(InputError::Tag(_))));
    assert!(matches!(
        scene.live(101).action.unwrap().steps[..],
        [CopyStep::SkipOpen { reason: SkipReason::Untaggable, .. }]
    ));
}

// The bytes at the broker outlive every version of this program.
#[test]
fn tag_of_a_known_ticket_is_the_same_for_ever() {
    assert_eq!(tag::encode(link(7), mt(101)).unwrap().as_str(), KNOWN_TAG);
    assert_eq!(tag::decode(KNOWN_TAG), Some((link(7), mt(101))));
}
const KNOWN_TAG: &str = "L00000007000000000002tmu";

// Case 54.
#[test]
fn comment_of_garbage_is_no_tag() {
    for comment in
        ["", "\"}", "L", "мастер", "🦀🦀🦀🦀🦀🦀", "mc101", &"L".repeat(24), &"0".repeat(24)]
    {
        assert_eq!(tag::decode(comment), None, "{comment}");
        assert_eq!(tag::remnant(comment), None, "{comment}");
    }
}

// H52, B8: one ticket's tag begins like another's.
#[test]
fn tag_matches_as_a_whole_and_not_by_prefix() {
    let tag = tag_of(1001);
    for changed in [
        format!("{tag}[sl]"),
        format!("{tag} "),
        format!(" {tag}"),
        tag[..tag.len() - 1].to_owned(),
        tag.to_uppercase(),
    ] {
        assert_eq!(tag::decode(&changed), None, "{changed}");
    }
    assert_eq!(tag::remnant(&format!("{tag}[sl]")), Some((link(LINK), mt(1001))));
    let scene =
        Scene::new().master_has(master_position(1001)).follower_has(copy_position(55, 10012));
    assert!(matches!(scene.steps(1001)[..], [CopyStep::OpenCopy { .. }]));
    let close = CloseCause::OrphanMasterGone;
    assert!(
        matches!(scene.steps(10012)[..], [CopyStep::CloseOrphan { cause, .. }] if cause == close)
    );
}

#[test]
fn tag_with_one_changed_character_or_two_exchanged_ones_is_no_tag() {
    let tag = tag_of(987_654_321);
    let bytes = tag.as_bytes();
    for place in 0..bytes.len() {
        for digit in b"0123456789abcdefghijklmnopqrstuvwxyz" {
            let mut changed = bytes.to_vec();
            changed[place] = *digit;
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(tag::decode(&changed).is_some(), changed == tag, "{changed}");
        }
        for other in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed.swap(place, other);
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(tag::decode(&changed).is_some(), changed == tag, "{changed}");
        }
    }
}

// Cases 56 and 66.
#[test]
fn trades_of_the_user_and_of_other_links_are_never_touched() {
    let mut manual = copy_position(77, 101);
    (manual.magic, manual.comment) = (0, "manual".to_owned());
    let mut other_link = copy_position(78, 101);
    other_link.magic = MAGIC as i64 + 1;
    let mut copied_comment = copy_position(79, 101);
    copied_comment.magic = 0;
    let scene =
        Scene::new().follower_has(manual).follower_has(other_link).follower_has(copied_comment);
    let plan = scene.plan();
    assert_eq!((plan.actions, plan.notes), (vec![], vec![]));
}

// Case 57, H54: the magic is ours and the tag is another link's.
#[test]
fn copy_with_the_tag_of_another_link_is_reported_not_adopted() {
    let mut foreign = copy_position(55, 101);
    foreign.comment = tag::encode(link(LINK + 1), mt(101)).unwrap().as_str().to_owned();
    let scene = Scene::new().master_has(master_position(101)).follower_has(foreign);
    assert!(matches!(scene.steps(101)[..], [CopyStep::OpenCopy { .. }]));
    let note = Note::ReportOrphan { ticket: ft(55), why: StrayReason::OtherLinksTag };
    assert!(scene.plan().notes.contains(&note));
}

// Case 57, H54.
#[test]
fn magic_of_a_second_link_makes_no_input() {
    let mut scene = Scene::new();
    scene.other_magics.insert(Magic::new(MAGIC).unwrap());
    let error = ReconcileInput::new(scene.parts()).unwrap_err();
    assert_eq!(error, InputError::MagicShared(scene.rules.magic));
    assert!(error.to_string().contains("770001"));
}

#[test]
fn parts_of_different_accounts_or_links_make_no_input() {
    let mut scene = Scene::new();
    scene.master.account = AccountId::new(9).unwrap();
    let error = ReconcileInput::new(scene.parts()).unwrap_err();
    assert_eq!(error.to_string(), "master is of account 9, the link's master is account 1");

    let scene = Scene::new();
    let mut foreign = scene.open_pair(101, 55);
    foreign.link = link(LINK + 1);
    let scene = scene.pair(foreign);
    assert!(matches!(ReconcileInput::new(scene.parts()), Err(InputError::WrongLink { .. })));
}

// Case 12: a list that was put together from two reads.
#[test]
fn list_that_names_a_ticket_twice_makes_no_input() {
    let scene =
        Scene::new().follower_has(copy_position(55, 101)).follower_has(copy_position(55, 102));
    let error = ReconcileInput::new(scene.parts()).unwrap_err();
    assert_eq!(error, InputError::TicketTwice { list: "positions", ticket: ft(55) });
}

// B44: a pair and a tag that disagree about one trade.
#[test]
fn tag_of_one_ticket_is_never_taken_for_another_tickets_copy() {
    let scene = Scene::new()
        .master_has(master_position(101))
        .master_has(master_position(102))
        .follower_has(copy_position(55, 102));
    let scene = scene.clone().pair(scene.open_pair(101, 55));
    assert!(matches!(scene.steps(101)[..], [CopyStep::MarkClosed { how: EndedHow::Absent, .. }]));
    assert!(matches!(scene.steps(102)[..], [CopyStep::AdoptCopy { .. }]));
}

#[test]
fn words_of_reasons_are_distinct_and_read_back() {
    let mut words = Vec::new();
    let reasons = SkipReason::ALL
        .iter()
        .map(|r| EndReason::Skipped(*r))
        .chain(FailReason::ALL.iter().map(|r| EndReason::Failed(*r)))
        .chain(CloseCause::ALL.iter().map(|r| EndReason::Closed(*r)))
        .chain(EndedHow::ALL.iter().map(|r| EndReason::Ended(*r)));
    for reason in reasons {
        assert_eq!(EndReason::from_word(reason.as_str()), Some(reason));
        assert!(!words.contains(&reason.as_str()), "{}", reason.as_str());
        words.push(reason.as_str());
    }
}

// Case 21: no order without a ticket, and the order says all that the broker needs.
#[test]
fn requests_name_their_ticket_and_carry_tag_and_magic() {
    let scene = Scene::new().master_has(master_position(101));
    let request = scene.steps(101)[0].request(&scene.rules, mt(101)).unwrap().unwrap();
    let schemas::OrderRequest::Open { magic, comment, .. } = &request else {
        panic!("{request:?}");
    };
    assert_eq!((*magic, comment.as_str()), (scene.rules.magic, tag_of(101).as_str()));
    let scene = scene.clone().pair(scene.open_pair(90, 55)).follower_has(copy_position(55, 90));
    let request = scene.steps(90)[0].request(&scene.rules, mt(90)).unwrap().unwrap();
    assert_eq!(request, schemas::OrderRequest::Close { ticket: ft(55), lots: None });
}
