//! The laws that the nodes' own notes show.

use super::super::nodes::{NodeNote, Noted, PlanNote, SentNote};
use super::*;

fn note(planted: &mut Planted, seconds: f64, what: Noted) {
    let (at_us, node) = (at(seconds), OLD.to_owned());
    planted.0.notes.push(NodeNote { at_us, node, what });
}

fn applied(planted: &mut Planted, seconds: f64, seq: u64, ticket: Option<u64>) {
    let (account, master) = (account(2), account(1));
    let what = Noted::Applied { account, token: 3, master, epoch: 1, seq, ticket };
    note(planted, seconds, what);
}

fn planned(planted: &mut Planted, seconds: f64, plan: u64, seq: u64, held: bool) {
    let plan = PlanNote {
        account: account(2),
        token: 3,
        link: LinkId::new(1).unwrap(),
        plan,
        begun_us: at(seconds),
        reason: "feed".to_owned(),
        epoch: 1,
        seq,
        held,
        steps: Vec::new(),
    };
    note(planted, seconds, Noted::Planned(plan));
}

fn sent(planted: &mut Planted, seconds: f64, step: &str, plan: Option<u64>, seq: u64) {
    let sent = SentNote {
        account: account(2),
        token: 3,
        attempt: 0,
        link: LinkId::new(1).unwrap(),
        ticket: 7,
        step: step.to_owned(),
        reason: None,
        plan,
        epoch: 1,
        seq,
        doubtful: false,
    };
    note(planted, seconds, Noted::Sent(sent));
}

/// A session that is open and stands at seq 4.
fn working() -> Planted {
    let mut planted = Planted::new();
    note(&mut planted, 0.0, Noted::SessionOpened { account: account(2), token: 3 });
    applied(&mut planted, 0.1, 4, None);
    planted
}

#[test]
fn work_by_the_rules_is_clean() {
    let mut planted = working();
    planned(&mut planted, 0.2, 1, 4, false);
    sent(&mut planted, 0.3, "open_copy", Some(1), 4);
    planted.open(0.3, (OLD, 3), 1, "0.20");
    note(
        &mut planted,
        0.4,
        Noted::Answered { account: account(2), token: 3, attempt: 0, outcome: "done".to_owned() },
    );
    applied(&mut planted, 0.5, 5, Some(8));
    applied(&mut planted, 0.6, 9, None);
    planted.lease(1.0, (3, Some(OLD)), (3, None), None);
    let report = planted.check();
    assert!(report.findings.is_empty(), "{report:#?}");
}

#[test]
fn a_place_that_is_left_out_or_comes_twice_breaks_s11() {
    for (seq, ticket) in [(4, Some(8)), (6, Some(8)), (3, None)] {
        let mut planted = working();
        applied(&mut planted, 0.5, seq, ticket);
        planted.breaks(Law::S11);
    }
}

#[test]
fn a_stale_plan_breaks_s12() {
    let mut older = working();
    planned(&mut older, 0.2, 1, 3, false);
    older.breaks(Law::S12);
    let mut moved = working();
    planned(&mut moved, 0.2, 1, 4, false);
    applied(&mut moved, 0.3, 5, Some(7));
    sent(&mut moved, 0.4, "modify_copy", Some(1), 5);
    moved.breaks(Law::S12);
}

#[test]
fn an_order_of_no_plan_or_a_held_one_breaks_s12() {
    for (step, plan, held) in [
        ("close_orphan", None, false),
        ("close_duplicate", None, false),
        ("close_copy", Some(2), false),
        ("close_copy", Some(1), true),
    ] {
        let mut planted = working();
        planned(&mut planted, 0.2, 1, 4, held);
        sent(&mut planted, 0.3, step, plan, 4);
        planted.breaks(Law::S12);
    }
}

#[test]
fn an_order_before_a_list_was_complete_breaks_s13() {
    let mut planted = Planted::new();
    sent(&mut planted, 0.3, "close_copy", None, 4);
    planted.breaks(Law::S13);
}

#[test]
fn an_open_at_a_place_where_the_close_is_applied_breaks_s6() {
    let mut planted = working();
    planted.said(0.1, 1, 4, Said::Event("position_closed".into(), 7));
    sent(&mut planted, 0.3, "open_copy", None, 4);
    planted.breaks(Law::S6);
    let mut before = working();
    before.said(0.1, 1, 5, Said::Event("position_closed".into(), 7));
    sent(&mut before, 0.3, "open_copy", None, 4);
    assert!(before.check().findings.is_empty());
}

#[test]
fn an_order_without_noted_grounds_breaks_s7_unless_its_sender_was_killed() {
    let mut planted = working();
    planted.open(0.3, (OLD, 3), 1, "0.20");
    planted.breaks(Law::S7);
    let mut killed = working();
    killed.open(0.3, (OLD, 3), 1, "0.20");
    killed.0.spans.push(Span {
        kind: "kill_and_restart",
        node: Some("chaos-1".to_owned()),
        excuses_extra: false,
        from: at(0.4),
        until: at(3.4),
    });
    assert!(killed.check().findings.is_empty());
}

#[test]
fn a_release_with_an_order_out_breaks_s20() {
    let mut planted = working();
    sent(&mut planted, 0.3, "modify_copy", None, 4);
    planted.lease(1.0, (3, Some(OLD)), (3, None), None);
    planted.breaks(Law::S20);
}

#[test]
fn a_fourth_reconcile_within_the_window_breaks_l6() {
    let mut planted = working();
    for plan in 1..=3 {
        planned(&mut planted, plan as f64, plan, 4, false);
    }
    assert!(planted.0.check().findings.is_empty());
    planned(&mut planted, 4.0, 4, 4, false);
    planted.breaks(Law::L6);
}
