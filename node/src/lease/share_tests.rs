use super::*;

const LEASE: Duration = Duration::from_secs(60);

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

fn fleet(nodes: u32, accounts: u32, lowest_peer: Option<u32>) -> Fleet {
    Fleet { nodes, accounts, lowest_peer }
}

#[test]
fn node_that_is_alone_has_no_share_to_keep_to() {
    assert_eq!(fleet(1, 100, None).share(), u32::MAX);
    assert_eq!(Fleet::default().share(), u32::MAX);
}

#[test]
fn share_is_an_even_part_rounded_up_and_a_tenth_more() {
    assert_eq!(fleet(3, 200, None).share(), 67 + 7);
    assert_eq!(fleet(2, 3, None).share(), 2 + 1);
    assert_eq!(fleet(2, 0, None).share(), 1);
}

#[test]
fn account_is_given_away_only_to_a_node_below_its_even_part() {
    assert!(fleet(2, 20, Some(0)).is_above_share(20));
    assert!(!fleet(2, 20, Some(10)).is_above_share(20));
    assert!(!fleet(2, 20, None).is_above_share(20));
    assert!(!fleet(2, 20, Some(0)).is_above_share(11));
    assert!(!fleet(1, 20, None).is_above_share(20));
}

/// Every mix of loads comes to rest, and by no more moves than were needed.
#[test]
fn giving_accounts_away_one_by_one_comes_to_rest_and_never_goes_back() {
    fastrand::seed(7);
    for _ in 0..2_000 {
        let mut owned: Vec<u32> =
            (0..fastrand::usize(2..6)).map(|_| fastrand::u32(0..60)).collect();
        let accounts: u32 = owned.iter().sum();
        let nodes = owned.len() as u32;
        let even = accounts.div_ceil(nodes);
        let needed: u32 = owned.iter().map(|n| n.saturating_sub(even)).sum();
        let mut moves = 0;
        loop {
            let lowest = |giver: usize, owned: &[u32]| {
                let others = owned.iter().enumerate().filter(|(n, _)| *n != giver);
                others.min_by_key(|(_, n)| **n).map(|(n, count)| (n, *count)).unwrap()
            };
            let giver = (0..owned.len()).find(|n| {
                fleet(nodes, accounts, Some(lowest(*n, &owned).1)).is_above_share(owned[*n])
            });
            let Some(giver) = giver else { break };
            let (taker, before) = lowest(giver, &owned);
            assert!(before < fleet(nodes, accounts, None).share(), "the taker has room");
            owned[giver] -= 1;
            owned[taker] += 1;
            moves += 1;
            assert!(moves <= needed, "{owned:?} moved {moves} times");
        }
    }
}

#[test]
fn account_waits_longer_after_each_start_that_did_not_go_well() {
    let seconds = |starts| claim_wait(starts, account(7), LEASE).as_secs_f64();
    assert_eq!((seconds(0), seconds(1)), (0.0, 0.0));
    assert!(seconds(2) >= 15.0 && seconds(2) <= 45.0, "{}", seconds(2));
    assert_eq!(seconds(3), 2.0 * seconds(2));
    assert!(seconds(40) >= 450.0 && seconds(40) <= 1350.0);
}

#[test]
fn accounts_of_one_dead_owner_come_back_at_different_times() {
    let waits: std::collections::BTreeSet<Duration> =
        (1..=100).map(|id| claim_wait(2, account(id), LEASE)).collect();
    assert!(waits.len() > 90, "{}", waits.len());
    let spread = *waits.last().unwrap() - *waits.first().unwrap();
    assert!(spread > Duration::from_secs(20), "{spread:?}");
}

fn balance() -> Balance {
    Balance::new(LEASE, Duration::from_secs(20))
}

fn at(seconds: u64) -> NodeTime {
    NodeTime::after_start(Duration::from_secs(seconds))
}

#[test]
fn account_is_given_away_only_in_a_fleet_that_has_long_been_the_same_and_one_at_a_time() {
    let (mut balance, uneven) = (balance(), fleet(2, 20, Some(0)));
    assert!(!balance.wants_to_give(at(0), 20, &uneven, 0));
    assert!(!balance.wants_to_give(at(119), 20, &uneven, 0));
    assert!(balance.wants_to_give(at(120), 20, &uneven, 0));
    balance.gives(at(120), account(1));
    assert!(!balance.wants_to_give(at(139), 19, &uneven, 0));
    assert!(balance.wants_to_give(at(140), 19, &uneven, 0));
    // A third node came, or an account has no owner: everything begins anew.
    assert!(!balance.wants_to_give(at(160), 19, &fleet(3, 20, Some(0)), 0));
    assert!(!balance.wants_to_give(at(279), 19, &fleet(3, 20, Some(0)), 0));
    assert!(!balance.wants_to_give(at(280), 19, &fleet(3, 20, Some(0)), 1));
    assert!(!balance.wants_to_give(at(399), 19, &fleet(3, 20, Some(0)), 0));
    assert!(balance.wants_to_give(at(400), 19, &fleet(3, 20, Some(0)), 0));
}

#[test]
fn account_that_came_back_stops_the_giving_for_an_hour() {
    let (mut balance, uneven) = (balance(), fleet(2, 20, Some(0)));
    balance.wants_to_give(at(0), 20, &uneven, 0);
    balance.gives(at(120), account(1));
    balance.gains(at(150), account(2));
    assert!(balance.wants_to_give(at(160), 19, &uneven, 0), "account 2 was never given away");
    balance.gains(at(170), account(1));
    assert!(!balance.wants_to_give(at(170 + 3_599), 20, &uneven, 0));
    assert!(balance.wants_to_give(at(170 + 3_600), 20, &uneven, 0));
}
