use super::*;
use crate::clock::{ManualClock, NodeClock};
use proptest::prelude::*;
use schemas::Micros;

const TIMING: LeaseTiming = LeaseTiming {
    lease: Duration::from_secs(60),
    fence: Duration::from_secs(15),
    cycle: Duration::from_secs(20),
    retry: Duration::from_secs(2),
    query_limit: Duration::from_secs(5),
};

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn at(seconds: u64) -> NodeTime {
    NodeTime::after_start(s(seconds))
}

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

fn key(id: u64, token: u64) -> TenureKey {
    TenureKey { account: account(id), token: Token::new(token).unwrap() }
}

fn owned(id: u64, token: u64) -> OwnedRow {
    OwnedRow { tenure: key(id, token), platform: "paper".into(), enabled: true }
}

fn claimed(id: u64, token: u64, previous_owner: Option<&str>) -> ClaimedRow {
    ClaimedRow { tenure: key(id, token), previous_owner: previous_owner.map(str::to_owned) }
}

fn holdings(capacity: u32, claim_rows_max: u32) -> Holdings {
    let node = NodeId::new("paper-a-1").unwrap();
    Holdings::new(node, vec!["paper".into()], TIMING, capacity, claim_rows_max)
}

/// An answer of a database whose clock runs like ours.
fn reply(started: NodeTime) -> CycleReply {
    CycleReply {
        released: Vec::new(),
        renewed: Vec::new(),
        claimed: Vec::new(),
        owned: Vec::new(),
        next_expiry: None,
        unowned: 0,
        orphaned: 0,
        unowned_for: None,
        fleet: Fleet::default(),
        database: DatabaseMark {
            now: Micros(1_000_000).plus(started.since_start()),
            timeline: Some(1),
        },
    }
}

/// A node that claimed these at 0.
fn node_with(rows: &[(u64, u64, Option<&str>)]) -> Holdings {
    let mut node = holdings(100, 50);
    let request = node.request(at(0));
    let answer = CycleReply {
        claimed: rows.iter().map(|(id, token, owner)| claimed(*id, *token, *owner)).collect(),
        owned: rows.iter().map(|(id, token, _)| owned(*id, *token)).collect(),
        ..reply(at(0))
    };
    node.confirm(&request, at(0), at(0), &answer);
    node
}

#[test]
fn free_account_is_a_clean_gain_and_one_of_a_dead_owner_is_not() {
    let mut node = holdings(100, 50);
    let request = node.request(at(0));
    let answer = CycleReply {
        claimed: vec![claimed(1, 1, None), claimed(2, 6, Some("paper-b-2"))],
        owned: vec![owned(1, 1), owned(2, 6)],
        ..reply(at(0))
    };
    let outcome = node.confirm(&request, at(0), at(1), &answer);
    assert_eq!(
        outcome.steps,
        [
            LeaseStep::Gained { tenure: key(1, 1), clean: true, previous_owner: None },
            LeaseStep::Gained {
                tenure: key(2, 6),
                clean: false,
                previous_owner: Some("paper-b-2".into())
            },
        ]
    );
    assert_eq!((outcome.claimed_free, outcome.claimed_expired), (1, 1));
    let term = outcome.confirmation.accounts[&account(2)].term.unwrap();
    assert_eq!(term.deadline(), at(45));
}

#[test]
fn how_a_tenure_began_is_remembered_while_it_is_renewed() {
    let mut node = node_with(&[(2, 6, Some("paper-b-2"))]);
    let request = node.request(at(20));
    let answer =
        CycleReply { renewed: vec![account(2)], owned: vec![owned(2, 6)], ..reply(at(20)) };
    let outcome = node.confirm(&request, at(20), at(21), &answer);
    assert_eq!(outcome.steps, [LeaseStep::Kept { tenure: key(2, 6) }]);
    let tenure = &node.held()[&account(2)];
    assert!(!tenure.clean);
    assert_eq!(tenure.previous_owner.as_deref(), Some("paper-b-2"));
    assert_eq!(tenure.term.unwrap().deadline(), at(65));
    assert_eq!(outcome.margin, Some(s(25)));
}

#[test]
fn account_that_came_back_under_another_token_is_lost_and_gained() {
    let mut node = node_with(&[(1, 1, None)]);
    let request = node.request(at(20));
    let answer = CycleReply {
        claimed: vec![claimed(1, 3, Some("paper-b-2"))],
        owned: vec![owned(1, 3)],
        ..reply(at(20))
    };
    let outcome = node.confirm(&request, at(20), at(21), &answer);
    assert_eq!(outcome.steps[0], LeaseStep::Lost { tenure: key(1, 1) });
    assert!(
        matches!(outcome.steps[1], LeaseStep::Gained { tenure, clean: false, .. } if tenure == key(1, 3))
    );
}

#[test]
fn locked_row_is_kept_without_a_longer_term_and_tried_again_soon() {
    let mut node = node_with(&[(1, 1, None), (2, 1, None)]);
    let request = node.request(at(20));
    let answer = CycleReply {
        renewed: vec![account(1)],
        owned: vec![owned(1, 1), owned(2, 1)],
        ..reply(at(20))
    };
    let outcome = node.confirm(&request, at(20), at(21), &answer);
    assert_eq!(outcome.locked, 1);
    assert_eq!(outcome.confirmation.accounts[&account(2)].term, None);
    assert_eq!(node.held()[&account(2)].term.unwrap().deadline(), at(45));
    assert_eq!(outcome.wish.due(&TIMING, 0.5), at(23));
}

#[test]
fn claim_whose_commit_was_never_answered_is_used_only_after_a_renewal() {
    let mut node = holdings(100, 50);
    let request = node.request(at(10));
    let outcome = node.confirm(
        &request,
        at(10),
        at(11),
        &CycleReply { owned: vec![owned(1, 4)], ..reply(at(10)) },
    );
    assert_eq!(outcome.confirmation.accounts[&account(1)].term, None);
    assert!(matches!(outcome.steps[0], LeaseStep::Gained { clean: false, .. }));
    assert!(outcome.wish.due(&TIMING, 1.0) <= at(11).plus(FOLLOW_UP));

    let request = node.request(at(12));
    assert_eq!(request.renew, [key(1, 4)]);
    let answer =
        CycleReply { renewed: vec![account(1)], owned: vec![owned(1, 4)], ..reply(at(12)) };
    let outcome = node.confirm(&request, at(12), at(13), &answer);
    assert_eq!(outcome.confirmation.accounts[&account(1)].term.unwrap().deadline(), at(57));
}

#[test]
fn tenure_handed_in_gets_no_permission_and_no_renewal_until_the_row_is_free() {
    let mut node = node_with(&[(1, 1, None), (2, 1, None)]);
    assert!(node.hand_in(key(1, 1), at(0)));
    assert!(!node.held().contains_key(&account(1)));
    let request = node.request(at(20));
    assert_eq!(
        (request.release.as_slice(), request.renew.as_slice()),
        (&[key(1, 1)][..], &[key(2, 1)][..])
    );

    // The row was locked: it is still ours by the database's word.
    let answer = CycleReply {
        renewed: vec![account(2)],
        owned: vec![owned(1, 1), owned(2, 1)],
        ..reply(at(20))
    };
    let outcome = node.confirm(&request, at(20), at(21), &answer);
    assert!(!outcome.confirmation.accounts.contains_key(&account(1)));
    assert_eq!(outcome.wish.due(&TIMING, 0.0), at(23));

    let request = node.request(at(23));
    assert_eq!(request.release, [key(1, 1)]);
    let answer = CycleReply {
        released: vec![account(1)],
        renewed: vec![account(2)],
        owned: vec![owned(2, 1)],
        ..reply(at(23))
    };
    let outcome = node.confirm(&request, at(23), at(24), &answer);
    assert_eq!(outcome.steps, [LeaseStep::Kept { tenure: key(2, 1) }]);
    assert!(!node.is_releasing());
}

#[test]
fn tenure_of_another_token_cannot_be_handed_in() {
    let mut node = node_with(&[(1, 5, None)]);
    assert!(!node.hand_in(key(1, 4), at(0)));
    assert!(!node.hand_in(key(2, 5), at(0)));
    assert!(node.held().contains_key(&account(1)));
}

/// The node hears that another has room, or that none has.
fn told_of_peer(node: &mut Holdings, lowest_peer: Option<u32>) {
    let request = node.request(at(1));
    let owned =
        node.held().iter().map(|(account, tenure)| owned(account.get(), tenure.token.get()));
    let fleet = Fleet { nodes: 2, accounts: 2, lowest_peer };
    let answer = CycleReply { owned: owned.collect(), fleet, ..reply(at(1)) };
    node.confirm(&request, at(1), at(1), &answer);
}

#[test]
fn node_keeps_away_from_an_account_it_gave_up_for_as_long_as_it_said() {
    let mut node = node_with(&[(1, 1, None)]);
    node.hand_in(key(1, 1), at(30));
    assert_eq!(node.request(at(29)).claim.unwrap().avoid, [account(1)]);
    assert_eq!(node.request(at(30)).claim.unwrap().avoid, []);
}

#[test]
fn abandoned_tenure_runs_out_and_is_this_nodes_again_only_if_nobody_took_it() {
    let mut node = node_with(&[(1, 1, None), (2, 1, None)]);
    assert!(!node.abandon(key(1, 2), at(600)));
    assert!(node.abandon(key(1, 1), at(600)));
    let request = node.request(at(20));
    assert_eq!((request.release.as_slice(), request.renew.as_slice()), (&[][..], &[key(2, 1)][..]));
    assert_eq!(request.let_go, [key(1, 1)]);
    assert_eq!(request.claim.unwrap().avoid, [account(1)]);
    let mut answer = CycleReply {
        renewed: vec![account(2)],
        owned: vec![owned(1, 1), owned(2, 1)],
        ..reply(at(20))
    };
    let request = node.request(at(20));
    let outcome = node.confirm(&request, at(20), at(21), &answer);
    assert!(!outcome.confirmation.accounts.contains_key(&account(1)));
    assert_eq!(outcome.wish.due(&TIMING, 0.0), at(40), "nothing is hurried for it");

    // Nobody wanted it: from 600 on it is renewed under its old token, after a second cycle.
    let mut again = node.clone();
    let request = again.request(at(600));
    answer.database = reply(at(600)).database;
    again.confirm(&request, at(600), at(601), &answer);
    assert_eq!(again.request(at(602)).renew, [key(1, 1), key(2, 1)]);
    assert!(!again.held()[&account(1)].clean);

    // Somebody did: it is forgotten.
    let request = node.request(at(80));
    let gone = CycleReply { owned: vec![owned(2, 1)], ..reply(at(80)) };
    node.confirm(&request, at(80), at(81), &gone);
    let request = node.request(at(81));
    assert_eq!((request.renew, request.let_go), (vec![key(2, 1)], vec![]));
}

#[test]
fn node_that_pauses_claims_says_that_it_has_no_room_and_keeps_what_it_has() {
    let mut node = node_with(&[(1, 1, None)]);
    told_of_peer(&mut node, Some(0));
    node.pause_claims(at(100));
    let request = node.request(at(20));
    assert_eq!((request.claim, request.capacity), (None, 0));
    assert_eq!(request.renew, [key(1, 1)]);
    let request = node.request(at(100));
    assert_eq!((request.claim.is_some(), request.capacity), (true, 100));
}

#[test]
fn highest_timeline_that_was_seen_or_heard_of_is_asked_for() {
    let mut node = node_with(&[(1, 1, None)]);
    assert_eq!(node.request(at(20)).timeline_min, Some(1));
    assert!(!node.note_timeline(1));
    assert!(node.note_timeline(3), "what the present server confirms may hold nowhere else");
    assert!(!node.note_timeline(2));
    assert_eq!(node.request(at(20)).timeline_min, Some(3));
}

#[test]
fn first_timeline_that_is_heard_of_is_not_higher_than_another() {
    let mut node = holdings(100, 50);
    assert!(!node.note_timeline(5));
    assert_eq!(node.request(at(0)).timeline_min, Some(5));
}

#[test]
fn claim_takes_what_capacity_leaves_and_at_most_one_batch() {
    assert_eq!(holdings(100, 50).request(at(0)).claim.unwrap().rows_max, 50);
    let mut node = node_with(&[(1, 1, None), (2, 1, None)]);
    node.set_capacity(5);
    assert_eq!(node.request(at(1)).claim.unwrap().rows_max, 3);
    // What is not given back yet still counts.
    node.hand_in(key(1, 1), at(0));
    assert_eq!(node.request(at(1)).claim.unwrap().rows_max, 3);
    node.set_capacity(2);
    assert_eq!(node.request(at(1)).claim, None);
    node.set_capacity(0);
    assert_eq!(node.request(at(1)).claim, None);
}

#[test]
fn full_batch_is_followed_by_another_cycle_at_once() {
    let mut node = holdings(100, 2);
    let request = node.request(at(0));
    let answer = CycleReply {
        claimed: vec![claimed(1, 1, None), claimed(2, 1, None)],
        owned: vec![owned(1, 1), owned(2, 1)],
        ..reply(at(0))
    };
    let outcome = node.confirm(&request, at(0), at(1), &answer);
    assert!(outcome.wish.due(&TIMING, 1.0) <= at(1).plus(FOLLOW_UP));
}

#[test]
fn next_cycle_is_never_later_than_one_cycle_after_the_last_began() {
    let mut node = holdings(100, 2);
    let request = node.request(at(100));
    let outcome = node.confirm(&request, at(100), at(104), &reply(at(100)));
    assert_eq!(outcome.wish.due(&TIMING, 0.0), at(120));
    assert_eq!(outcome.wish.due(&TIMING, 1.0), at(118));
}

#[test]
fn node_with_room_wakes_when_the_next_lease_of_others_runs_out() {
    let expiring = CycleReply { next_expiry: Some(s(7)), ..reply(at(100)) };
    let mut node = holdings(1, 2);
    let request = node.request(at(100));
    let outcome = node.confirm(&request, at(100), at(101), &expiring);
    assert_eq!(outcome.wish.due(&TIMING, 0.0), at(108));
    assert!(outcome.wish.due(&TIMING, 1.0) <= at(108).plus(EXPIRY_JITTER_MAX));

    node.set_capacity(0);
    let request = node.request(at(100));
    let outcome = node.confirm(&request, at(100), at(101), &expiring);
    assert_eq!(outcome.wish.due(&TIMING, 0.0), at(120));
}

#[test]
fn last_request_gives_back_and_does_nothing_else() {
    let mut node = node_with(&[(1, 1, None), (2, 1, None)]);
    node.hand_in(key(1, 1), at(0));
    let request = node.last_request();
    assert_eq!(request.release, [key(1, 1)]);
    assert!(request.renew.is_empty() && request.claim.is_none());
}

fn mark(now_s: i64, timeline: u32) -> DatabaseMark {
    DatabaseMark { now: Micros(now_s * 1_000_000), timeline: Some(timeline) }
}

#[test]
fn database_clock_that_steps_freezes_claims_of_expired_rows_for_lease_and_fence() {
    for stepped in [-40, 40] {
        let mut guard = ClaimGuard::default();
        assert_eq!(guard.observe(mark(1_000, 1), at(0), at(1), s(75)), None);
        assert_eq!(guard.observe(mark(1_020, 1), at(20), at(21), s(75)), None);
        let doubt = guard.observe(mark(1_040 + stepped, 1), at(40), at(41), s(75));
        assert_eq!(doubt, Some(DatabaseDoubt::ClockStep), "{stepped}");
        assert!(!guard.expired_may_be_claimed(at(115)));
        assert!(guard.expired_may_be_claimed(at(116)));
        assert_eq!(guard.observe(mark(1_060 + stepped, 1), at(60), at(61), s(75)), None);
    }
}

// H12, found by the simulation (seed 9600387334): one wrong time source sets the database's clock
// and this node's forward, and not the owner's.
#[test]
fn database_clock_that_is_set_forward_together_with_ours_freezes_claims_all_the_same() {
    let ours = ManualClock::default();
    let clock = NodeClock::new(ours.clone());
    let mut guard = ClaimGuard::default();
    assert_eq!(guard.observe(mark(1_000, 1), clock.now(), clock.now(), s(75)), None);
    ours.advance(s(20));
    ours.hold_guest(s(40));
    let bounds = guard.bounds(clock.now(), s(5)).unwrap();
    assert!(!bounds.hold(Micros(1_060_000_000), Some(1)), "not in the cycle that meets it either");
    let doubt = guard.observe(mark(1_060, 1), clock.now(), clock.now(), s(75));
    assert_eq!(doubt, Some(DatabaseDoubt::OwnClock));
    assert!(!guard.expired_may_be_claimed(clock.now()));
}

#[test]
fn freeze_of_claims_is_not_over_because_our_wall_clock_was_set_forward() {
    let ours = ManualClock::default();
    let clock = NodeClock::new(ours.clone());
    let mut guard = ClaimGuard::default();
    guard.observe(mark(1_000, 1), clock.now(), clock.now(), s(75));
    ours.advance(s(20));
    let doubt = guard.observe(mark(1_060, 2), clock.now(), clock.now(), s(75));
    assert_eq!(doubt, Some(DatabaseDoubt::Timeline));
    ours.advance(s(74));
    ours.hold_guest(s(3_600));
    assert!(!guard.expired_may_be_claimed(clock.now()) && guard.history_is_lost(clock.now()));
    ours.advance(s(1));
    assert!(guard.expired_may_be_claimed(clock.now()) && !guard.history_is_lost(clock.now()));
}

// It would ask the database five times a second until the freeze ends.
#[test]
fn end_of_a_freeze_is_waited_for_although_our_wall_clock_was_set_forward() {
    let ours = ManualClock::default();
    let clock = NodeClock::new(ours.clone());
    let mut node = holdings(100, 50);
    // The database's clock goes on alone: what is set forward here is no new doubt.
    let mut cycle = |database| {
        let started = clock.now();
        let request = node.request(started);
        let answer = CycleReply { orphaned: 3, database, ..reply(started) };
        node.confirm(&request, started, started, &answer).wish.due(&TIMING, 0.0)
    };
    cycle(mark(1_000, 1));
    ours.advance(s(5));
    cycle(mark(1_005, 2));
    ours.hold_guest(s(3_600));
    ours.advance(s(1));
    let due = cycle(mark(1_006, 2));
    assert_eq!(due, clock.now().plus(TIMING.cycle));
}

#[test]
fn our_wall_clock_that_is_set_forward_alone_is_no_step_of_the_database() {
    let ours = ManualClock::default();
    let clock = NodeClock::new(ours.clone());
    let mut guard = ClaimGuard::default();
    guard.observe(mark(1_000, 1), clock.now(), clock.now(), s(75));
    ours.advance(s(20));
    ours.hold_guest(s(40));
    assert_eq!(guard.observe(mark(1_020, 1), clock.now(), clock.now(), s(75)), None);
}

#[test]
fn request_says_between_which_instants_a_database_without_a_jump_begins() {
    let mut node = holdings(100, 50);
    let request = node.request(at(0));
    assert_eq!(request.claim.as_ref().unwrap().database, None);
    node.confirm(&request, at(0), at(1), &reply(at(0)));
    let bounds = node.request(at(20)).claim.unwrap().database.unwrap();
    let begun = reply(at(0)).database.now;
    let after = |seconds: u64| begun.plus(s(seconds));
    // It began between 0 and 1; the next begins between 20 and 25; a second is for drift.
    assert_eq!((bounds.least, bounds.most), (after(18), after(26)));
    assert!(bounds.hold(after(20), Some(1)) && !bounds.hold(after(20), Some(2)));
    assert!(!bounds.hold(after(17), Some(1)) && !bounds.hold(after(60), Some(1)));
}

#[test]
fn slow_answers_and_half_a_second_of_drift_are_no_step() {
    let mut guard = ClaimGuard::default();
    guard.observe(mark(1_000, 1), at(0), at(0), s(75));
    // Asked at 20, the database began at 24, the answer came at 25.
    assert_eq!(guard.observe(mark(1_024, 1), at(20), at(25), s(75)), None);
    // Asked at 40, began at once.
    assert_eq!(guard.observe(mark(1_040, 1), at(40), at(40), s(75)), None);
}

#[test]
fn other_timeline_freezes_all_claims_as_a_free_row_may_have_been_claimed_before_it() {
    let mut node = holdings(100, 50);
    let request = node.request(at(0));
    node.confirm(&request, at(0), at(0), &reply(at(0)));
    let request = node.request(at(20));
    assert!(request.claim.as_ref().unwrap().expired);
    let mut promoted = reply(at(20));
    promoted.database.timeline = Some(2);
    let outcome = node.confirm(&request, at(20), at(20), &promoted);
    assert_eq!(outcome.doubt, Some(DatabaseDoubt::Timeline));
    assert!(node.claims_are_frozen(at(94)));
    assert_eq!(node.request(at(94)).claim, None);
    assert!(node.request(at(95)).claim.unwrap().expired);
}

// H13, found by the simulation (seeds 570, 843): the promoted server lacks the claim of another
// node, and shows the row as it was before, as that of the owner who had lost it.
#[test]
fn tenure_that_had_run_out_is_not_trusted_again_on_a_server_that_may_lack_its_end() {
    let mut node = holdings(100, 50);
    let request = node.request(at(0));
    let mut claimed = reply(at(0));
    claimed.claimed = vec![ClaimedRow { tenure: key(1, 1), previous_owner: None }];
    claimed.owned = vec![owned(1, 1)];
    node.confirm(&request, at(0), at(0), &claimed);
    // Cut off for longer than the lease; then another server answers, and renews.
    let request = node.request(at(70));
    let mut promoted = reply(at(70));
    promoted.database.timeline = Some(2);
    promoted.renewed = vec![key(1, 1).account];
    promoted.owned = vec![owned(1, 1)];
    let outcome = node.confirm(&request, at(70), at(70), &promoted);
    assert_eq!(outcome.confirmation.accounts[&key(1, 1).account].term, None);
    // When every lease of the other server has run out, it is.
    let request = node.request(at(150));
    let mut later = reply(at(150));
    later.database.timeline = Some(2);
    later.renewed = vec![key(1, 1).account];
    later.owned = vec![owned(1, 1)];
    let outcome = node.confirm(&request, at(150), at(150), &later);
    assert!(outcome.confirmation.accounts[&key(1, 1).account].term.is_some());
}

proptest! {
    #[test]
    fn diff_explains_every_account_of_both_sides_once(
        before in prop::collection::btree_map(1u64..12, 1u64..4, 0..10),
        after in prop::collection::btree_map(1u64..12, 1u64..4, 0..10),
    ) {
        let tenures = |map: &BTreeMap<u64, u64>| -> BTreeMap<AccountId, Tenure> {
            map.iter().map(|(id, token)| (account(*id), Tenure {
                token: Token::new(*token).unwrap(),
                platform: "paper".into(),
                enabled: true,
                clean: true,
                previous_owner: None,
                hastened: false,
                term: None,
            })).collect()
        };
        let steps = diff(&tenures(&before), &tenures(&after));
        // Playing the steps on what was before gives what is after, and losses come first.
        let mut played: BTreeMap<u64, u64> = before.clone();
        let mut rank_before = 0;
        for step in steps {
            let rank = match step {
                LeaseStep::Lost { tenure } => {
                    prop_assert_eq!(played.remove(&tenure.account.get()), Some(tenure.token.get()));
                    0
                }
                LeaseStep::Kept { tenure } => {
                    prop_assert_eq!(after.get(&tenure.account.get()), Some(&tenure.token.get()));
                    prop_assert_eq!(before.get(&tenure.account.get()), Some(&tenure.token.get()));
                    1
                }
                LeaseStep::Gained { tenure, .. } => {
                    prop_assert_eq!(played.insert(tenure.account.get(), tenure.token.get()), None);
                    2
                }
            };
            prop_assert!(rank >= rank_before);
            rank_before = rank;
        }
        prop_assert_eq!(played, after);
    }
}

#[cfg(feature = "planted")]
#[test]
fn planted_a_term_counts_from_where_the_bug_says_and_the_confirmation_does_not() {
    use schemas::planted::{self, Bug};
    let deadline = |bug, begun: u64| {
        planted::plant(bug);
        planted::note_begun(s(begun));
        let mut node = node_with(&[(1, 7, None)]);
        let request = node.request(at(20));
        let renewed =
            CycleReply { renewed: vec![account(1)], owned: vec![owned(1, 7)], ..reply(at(20)) };
        let outcome = node.confirm(&request, at(20), at(24), &renewed);
        planted::plant(None);
        assert_eq!(outcome.confirmation.started, at(20));
        outcome.confirmation.accounts[&account(1)].term.map(LeaseTerm::deadline)
    };
    assert_eq!(deadline(None, 22), Some(at(65)));
    assert_eq!(deadline(Some(Bug::P1), 22), Some(at(69)));
    assert_eq!(deadline(Some(Bug::P2), 22), Some(at(67)));
    // A note of another cycle, or of another node on this thread.
    assert_eq!(deadline(Some(Bug::P2), 19), Some(at(65)));
}
