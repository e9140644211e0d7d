use super::*;
use proptest::prelude::*;

const RESERVE: Duration = Duration::from_secs(2);
const LEASE: Duration = Duration::from_secs(60);
const FENCE: Duration = Duration::from_secs(15);

fn at(seconds: u64) -> NodeTime {
    NodeTime::after_start(Duration::from_secs(seconds))
}

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn number(count: u64) -> CycleNumber {
    (0..count).fold(CycleNumber::NONE, |number, _| number.next())
}

/// A cycle that renewed these (account, token) at `started`.
fn confirmed(count: u64, started: NodeTime, accounts: &[(u64, u64)]) -> Confirmation {
    let term = Some(LeaseTerm::confirmed(started, LEASE, FENCE));
    let accounts = accounts
        .iter()
        .map(|(id, number)| (account(*id), Confirmed { token: token(*number), term }))
        .collect();
    Confirmation { number: number(count), started, accounts }
}

fn open_gate(accounts: &[(u64, u64)]) -> Gate {
    let gate = Gate::new();
    gate.apply(&confirmed(1, at(0), accounts), at(0));
    gate
}

#[test]
fn gate_that_never_heard_of_an_account_permits_nothing() {
    let denied = Gate::new().permit(account(1), at(0), RESERVE).unwrap_err();
    assert_eq!(denied, Denied::NotLeased);
}

#[test]
fn permit_names_token_deadline_and_margin() {
    let permit = open_gate(&[(1, 7)]).permit(account(1), at(20), RESERVE).unwrap();
    assert_eq!(permit.account(), account(1));
    assert_eq!(permit.token(), token(7));
    assert_eq!(permit.deadline(), at(45));
    assert_eq!(permit.margin(), Duration::from_secs(25));
}

#[test]
fn master_is_spoken_for_until_the_deadline_and_under_the_own_token_only() {
    let gate = open_gate(&[(1, 7)]);
    assert!(gate.may_speak(account(1), token(7), at(44)));
    assert!(!gate.may_speak(account(1), token(7), at(45)));
    assert!(!gate.may_speak(account(1), token(6), at(44)));
    assert!(!gate.may_speak(account(2), token(7), at(44)));
}

#[test]
fn permit_needs_the_whole_reserve_until_the_deadline() {
    let gate = open_gate(&[(1, 7)]);
    assert!(gate.permit(account(1), at(43), RESERVE).is_ok());
    let late = at(43).plus(Duration::from_nanos(1));
    assert_eq!(gate.permit(account(1), late, RESERVE).unwrap_err(), Denied::TooLate);
    assert!(gate.may_publish(account(1), late).is_ok());
    assert_eq!(gate.may_publish(account(1), at(45)).unwrap_err(), Denied::TooLate);
}

#[test]
fn permit_that_waited_in_a_queue_past_the_reserve_is_refused_when_it_leaves() {
    let gate = open_gate(&[(1, 7)]);
    let permit = gate.permit(account(1), at(42), RESERVE).unwrap();
    assert!(permit.still_valid(at(43)));
    assert!(!permit.still_valid(at(44)));
    assert_eq!(permit.spend(at(62)).unwrap_err(), Denied::TooLate);
}

#[test]
fn permit_that_waited_in_a_queue_while_the_lease_was_renewed_is_good() {
    let gate = open_gate(&[(1, 7)]);
    let permit = gate.permit(account(1), at(20), RESERVE).unwrap();
    gate.apply(&confirmed(2, at(40), &[(1, 7)]), at(40));
    let spent = permit.spend(at(50)).unwrap();
    assert_eq!(spent.token, token(7));
    assert_eq!(spent.margin, Duration::from_secs(35));
}

#[test]
fn account_lost_in_a_cycle_is_closed_although_the_others_go_on() {
    let gate = open_gate(&[(1, 7), (2, 7), (3, 7)]);
    let permit = gate.permit(account(3), at(10), RESERVE).unwrap();
    let applied = gate.apply(&confirmed(2, at(20), &[(1, 7), (2, 7)]), at(20));
    assert_eq!(applied.removed, [account(3)]);
    assert_eq!(gate.permit(account(3), at(21), RESERVE).unwrap_err(), Denied::NotLeased);
    assert_eq!(permit.spend(at(21)).unwrap_err(), Denied::NotLeased);
    assert_eq!(gate.permit(account(1), at(21), RESERVE).unwrap().deadline(), at(65));
}

#[test]
fn result_of_an_older_cycle_brings_no_account_back() {
    let gate = open_gate(&[(1, 7), (2, 7), (3, 7)]);
    gate.apply(&confirmed(3, at(22), &[(1, 7), (2, 7)]), at(22));
    let applied = gate.apply(&confirmed(2, at(20), &[(1, 7), (2, 7), (3, 7)]), at(24));
    assert!(applied.outdated);
    assert_eq!(gate.permit(account(3), at(24), RESERVE).unwrap_err(), Denied::NotLeased);
}

#[test]
fn lower_token_or_earlier_deadline_never_replaces_what_is_there() {
    let gate = open_gate(&[(1, 7)]);
    gate.apply(&confirmed(2, at(30), &[(1, 6)]), at(30));
    assert_eq!(gate.permission(account(1), at(31)).unwrap().token, token(7));
    assert_eq!(gate.permission(account(1), at(31)).unwrap().deadline, at(45));
    gate.apply(&confirmed(3, at(32), &[(1, 7)]), at(32));
    assert_eq!(gate.permission(account(1), at(33)).unwrap().deadline, at(77));
}

#[test]
fn permit_of_an_earlier_tenure_is_void_in_the_next() {
    let gate = open_gate(&[(1, 7)]);
    let permit = gate.permit(account(1), at(10), RESERVE).unwrap();
    gate.apply(&confirmed(2, at(20), &[(1, 9)]), at(20));
    assert_eq!(permit.spend(at(21)).unwrap_err(), Denied::Void);
}

#[test]
fn row_that_was_owned_but_not_renewed_keeps_its_old_deadline() {
    let gate = open_gate(&[(1, 7)]);
    let mut second = confirmed(2, at(20), &[(1, 7)]);
    second.accounts.get_mut(&account(1)).unwrap().term = None;
    gate.apply(&second, at(20));
    assert_eq!(gate.permission(account(1), at(21)).unwrap().deadline, at(45));
}

#[test]
fn tenure_that_was_never_renewed_gives_no_permission() {
    let gate = open_gate(&[(1, 7)]);
    let mut second = confirmed(2, at(20), &[(1, 9)]);
    second.accounts.get_mut(&account(1)).unwrap().term = None;
    gate.apply(&second, at(20));
    assert_eq!(gate.permit(account(1), at(21), RESERVE).unwrap_err(), Denied::NotLeased);
}

#[test]
fn answer_that_comes_after_its_own_deadline_opens_nothing() {
    let gate = open_gate(&[(1, 7)]);
    gate.apply(&confirmed(2, at(20), &[(1, 7)]), at(70));
    assert_eq!(gate.permit(account(1), at(70), RESERVE).unwrap_err(), Denied::TooLate);
}

#[test]
fn answer_that_comes_after_the_old_deadline_begins_a_new_stretch() {
    let gate = open_gate(&[(1, 7)]);
    let first = gate.permission(account(1), at(1)).unwrap().stretch;
    let permit = gate.permit(account(1), at(1), RESERVE).unwrap();
    // Started at 20, answered at 50: the gate was closed from 45 to 50.
    let applied = gate.apply(&confirmed(2, at(20), &[(1, 7)]), at(50));
    assert_eq!(applied.begun, [account(1)]);
    assert_ne!(gate.permission(account(1), at(51)).unwrap().stretch, first);
    assert_eq!(permit.spend(at(51)).unwrap_err(), Denied::Void);
}

#[test]
fn renewal_in_time_goes_on_in_the_same_stretch() {
    let gate = open_gate(&[(1, 7)]);
    let first = gate.permission(account(1), at(1)).unwrap().stretch;
    let applied = gate.apply(&confirmed(2, at(20), &[(1, 7)]), at(21));
    assert_eq!(applied, Applied::default());
    assert_eq!(gate.permission(account(1), at(22)).unwrap().stretch, first);
}

#[test]
fn freeze_closes_the_gate_until_a_cycle_that_started_after_it_is_confirmed() {
    let gate = open_gate(&[(1, 7)]);
    let permit = gate.permit(account(1), at(20), RESERVE).unwrap();
    gate.revoke_all(at(30), RevokeReason::Freeze);
    assert_eq!(gate.permit(account(1), at(30), RESERVE).unwrap_err(), Denied::Revoked);

    gate.apply(&confirmed(2, at(29), &[(1, 7)]), at(31));
    assert_eq!(gate.permit(account(1), at(31), RESERVE).unwrap_err(), Denied::Revoked);

    gate.apply(&confirmed(3, at(31), &[(1, 7)]), at(32));
    assert!(gate.permit(account(1), at(32), RESERVE).is_ok());
    assert_eq!(permit.spend(at(32)).unwrap_err(), Denied::Void);
}

#[test]
fn gate_is_closed_while_the_ticker_is_late_even_if_nobody_noticed_yet() {
    let gate = open_gate(&[(1, 7)]);
    gate.beat(at(10));
    assert!(gate.permit(account(1), at(12), RESERVE).is_ok());
    let woken = at(12).plus(Duration::from_millis(1));
    assert_eq!(gate.permit(account(1), woken, RESERVE).unwrap_err(), Denied::Frozen);
    gate.beat(woken);
    assert!(gate.permit(account(1), woken, RESERVE).is_ok());
}

#[test]
fn revoked_account_is_closed_and_the_others_are_not() {
    let gate = open_gate(&[(1, 7), (2, 7)]);
    gate.revoke(account(1));
    assert_eq!(gate.permit(account(1), at(1), RESERVE).unwrap_err(), Denied::NotLeased);
    assert!(gate.permit(account(2), at(1), RESERVE).is_ok());
    assert_eq!(gate.permitted(at(1)), 1);
}

/// What happens to one account of a node, as the database sees it.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// A cycle of this number of seconds that keeps the account.
    Renewed(u64),
    /// A cycle in which somebody else had claimed the account.
    Lost,
    /// Claimed again, under a higher token.
    Regained,
    Freeze,
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (0..70u64).prop_map(Event::Renewed),
        1 => Just(Event::Lost),
        1 => Just(Event::Regained),
        1 => Just(Event::Freeze),
        3 => (0..40u64).prop_map(Event::Wait),
    ]
}

proptest! {
    #[test]
    fn permit_is_given_only_under_the_last_confirmed_tenure_and_before_its_end(
        events in prop::collection::vec(event(), 1..40),
    ) {
        let gate = Gate::new();
        let (mut now, mut count, mut current) = (1u64, 0u64, 1u64);
        // The model: token and deadline of what may be used, or nothing.
        let mut model: Option<(u64, u64)> = None;
        for event in events {
            match event {
                Event::Renewed(took) => {
                    let started = now;
                    now += took;
                    count += 1;
                    gate.apply(&confirmed(count, at(started), &[(1, current)]), at(now));
                    if now < started + 45 {
                        model = Some((current, started + 45));
                    }
                }
                Event::Lost => {
                    count += 1;
                    gate.apply(&confirmed(count, at(now), &[]), at(now));
                    model = None;
                }
                Event::Regained => {
                    current += 1;
                    count += 1;
                    gate.apply(&confirmed(count, at(now), &[(1, current)]), at(now));
                    model = Some((current, now + 45));
                }
                Event::Freeze => {
                    gate.revoke_all(at(now), RevokeReason::Freeze);
                    model = None;
                    now += 1;
                }
                Event::Wait(seconds) => now += seconds,
            }
            let given = gate.permit(account(1), at(now), RESERVE).ok();
            let given = given.map(|permit| (permit.token().get(), permit.deadline()));
            let wanted = model
                .filter(|(_, deadline)| now + 2 <= *deadline)
                .map(|(token, deadline)| (token, at(deadline)));
            prop_assert_eq!(given, wanted);
        }
    }
}
