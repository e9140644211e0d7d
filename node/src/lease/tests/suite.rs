//! What every store does, real or not.

use super::*;

/// Makes one test per store out of each case.
macro_rules! for_both_stores {
    ($($case:ident)*) => {
        mod memory {
            use super::World;
            $(#[tokio::test] async fn $case() { super::$case(super::MemoryWorld::new().await).await; })*
        }
        mod postgres {
            use super::World;
            $(#[tokio::test] async fn $case() { super::$case(super::PostgresWorld::new().await).await; })*
        }
    };
}

for_both_stores! {
    free_accounts_are_claimed_up_to_the_limit
    claim_counts_what_the_node_owns_by_the_tables_word
    followers_of_masters_that_the_node_leads_are_claimed_first
    account_of_a_live_owner_is_not_claimed
    account_of_a_dead_owner_is_claimed_under_a_higher_token_and_says_whose_it_was
    expired_rows_are_left_alone_when_the_databases_time_is_in_doubt
    rows_that_a_jump_made_run_out_are_not_claimed_in_the_very_cycle_that_meets_the_jump
    renewal_under_another_token_does_nothing
    two_processes_with_one_name_do_not_renew_for_each_other
    account_that_went_to_another_node_and_back_is_another_tenure
    renewal_passes_a_locked_row_by_and_renews_the_others
    claim_passes_a_locked_row_by
    claim_passes_more_locked_rows_by_than_it_looks_at_for_near_ones
    release_frees_the_row_and_the_next_owner_starts_clean
    release_under_another_token_does_nothing
    release_of_a_locked_row_waits_for_the_next_cycle
    renewal_that_arrives_after_the_release_owns_nothing
    claim_goes_by_the_stored_end_and_not_by_the_claimants_own_lease
    account_that_was_switched_off_is_still_owned_and_reported_but_never_claimed
    accounts_of_other_platforms_are_not_touched
    account_that_the_node_keeps_away_from_is_not_claimed
    account_that_nobody_else_takes_is_claimed_by_the_node_that_keeps_away_from_it
    next_expiry_is_that_of_the_others
    row_of_a_process_that_is_proven_dead_is_claimed_before_its_lease_runs_out
    row_of_another_process_than_the_proven_one_waits_for_its_lease
    account_that_ended_two_owners_in_a_row_is_left_alone_for_a_while_by_everybody
    five_good_minutes_and_an_orderly_release_take_the_suspicion_back
    server_of_a_lower_timeline_than_one_seen_before_renews_nothing
    fleet_is_everybody_alive_who_takes_accounts
    accounts_without_an_owner_are_counted_with_the_longest_wait
    row_that_its_living_owner_abandoned_is_claimed_when_it_has_run_out
    row_that_was_abandoned_is_its_owners_until_it_has_run_out
}

async fn free_accounts_are_claimed_up_to_the_limit(world: impl World) {
    for id in 1..=5 {
        world.set_account(id, "paper", true).await;
    }
    let mut store = world.store();
    let reply = store.cycle(&claiming("a", 3)).await.unwrap();
    assert_eq!(reply.claimed.len(), 3);
    assert_eq!(reply.owned.len(), 3);
    assert_eq!(reply.unowned, 2);
    for row in &reply.claimed {
        assert_eq!(row.previous_owner, None);
        assert_eq!(row.tenure.token, token(1));
    }
    let reply = store.cycle(&claiming("a", 3)).await.unwrap();
    assert_eq!((reply.claimed.len(), reply.owned.len(), reply.unowned), (2, 5, 0));
}

// They hear their masters without the way over the bus.
async fn followers_of_masters_that_the_node_leads_are_claimed_first(world: impl World) {
    for id in 1..=8 {
        world.set_account(id, "paper", true).await;
    }
    for (master, follower) in [(1, 5), (1, 7), (2, 3), (2, 4), (2, 6)] {
        world.link(master, follower).await;
    }
    let claimed = |reply: CycleReply| -> Vec<u64> {
        let mut all: Vec<u64> = reply.claimed.iter().map(|row| row.tenure.account.get()).collect();
        all.sort_unstable();
        all
    };
    let mut a = world.store();
    let mut b = world.store();
    assert_eq!(claimed(a.cycle(&claiming("a", 1)).await.unwrap()), [1]);
    assert_eq!(claimed(b.cycle(&claiming("b", 1)).await.unwrap()), [2]);
    assert_eq!(claimed(a.cycle(&claiming("a", 2)).await.unwrap()), [5, 7]);
    // Nothing is left for the sake of it: there are no more followers of account 1.
    assert_eq!(claimed(a.cycle(&claiming("a", 2)).await.unwrap()), [3, 4]);
    // The same for what a dead node leaves.
    world.expire(3).await;
    world.expire(4).await;
    for id in [1, 5, 7] {
        world.expire(id).await;
    }
    assert_eq!(claimed(b.cycle(&claiming("b", 1)).await.unwrap()), [6]);
    assert_eq!(claimed(b.cycle(&claiming("b", 1)).await.unwrap()), [8]);
    assert_eq!(claimed(b.cycle(&claiming("b", 2)).await.unwrap()), [3, 4]);
    assert_eq!(claimed(b.cycle(&claiming("b", 2)).await.unwrap()), [1, 5]);
}

async fn claim_counts_what_the_node_owns_by_the_tables_word(world: impl World) {
    for id in 1..=5 {
        world.set_account(id, "paper", true).await;
    }
    let mut store = world.store();
    store.cycle(&claiming("a", 2)).await.unwrap();
    // The node forgot the two: their commit was never answered.
    let mut request = claiming("a", 3);
    request.claim.as_mut().unwrap().capacity = 3;
    let reply = store.cycle(&request).await.unwrap();
    assert_eq!((reply.claimed.len(), reply.owned.len()), (1, 3));
}

async fn account_of_a_live_owner_is_not_claimed(world: impl World) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a", 5)).await.unwrap();
    let reply = world.store().cycle(&claiming("b", 5)).await.unwrap();
    assert_eq!((reply.claimed.len(), reply.owned.len()), (0, 0));
}

async fn account_of_a_dead_owner_is_claimed_under_a_higher_token_and_says_whose_it_was(
    world: impl World,
) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a", 5)).await.unwrap();
    world.expire(1).await;
    let reply = world.store().cycle(&claiming("b", 5)).await.unwrap();
    assert_eq!(reply.claimed[0].tenure, key(1, 2));
    assert_eq!(reply.claimed[0].previous_owner.as_deref(), Some("a"));
    assert_eq!(world.row(1).await, Row { node_id: Some("b".into()), token: token(2) });
}

async fn expired_rows_are_left_alone_when_the_databases_time_is_in_doubt(world: impl World) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a", 5)).await.unwrap();
    world.expire(1).await;
    world.set_account(2, "paper", true).await;
    let mut request = claiming("b", 5);
    request.claim.as_mut().unwrap().expired = false;
    let reply = world.store().cycle(&request).await.unwrap();
    assert_eq!(reply.claimed.len(), 1);
    assert_eq!(reply.claimed[0].tenure, key(2, 1));
}

// Found by the simulation: the freeze of H12 began only with the answer of the cycle that had
// already claimed the rows.
async fn rows_that_a_jump_made_run_out_are_not_claimed_in_the_very_cycle_that_meets_the_jump(
    world: impl World,
) {
    world.set_account(1, "paper", true).await;
    let mut owner = world.store();
    owner.cycle(&claiming("a", 1)).await.unwrap();
    world.expire(1).await;
    let mut store = world.store();
    let seen = store.cycle(&cycle_of("b")).await.unwrap().database;
    let asking = |least: i64, most: i64, timeline: Option<u32>| {
        let mut request = claiming("b", 1);
        request.claim.as_mut().unwrap().database = Some(DatabaseBounds {
            least: Micros(seen.now.0 + least),
            most: Micros(seen.now.0 + most),
            timeline,
        });
        request
    };
    let minute = 60_000_000;
    let later = asking(minute, 2 * minute, seen.timeline);
    assert_eq!(store.cycle(&later).await.unwrap().claimed, []);
    let earlier = asking(-2 * minute, -minute, seen.timeline);
    assert_eq!(store.cycle(&earlier).await.unwrap().claimed, []);
    let elsewhere = asking(-minute, minute, seen.timeline.map(|timeline| timeline + 1));
    assert_eq!(store.cycle(&elsewhere).await.unwrap().claimed, []);
    let as_expected = asking(-minute, minute, seen.timeline);
    assert_eq!(store.cycle(&as_expected).await.unwrap().claimed.len(), 1);
}

async fn renewal_under_another_token_does_nothing(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    world.expire(1).await;
    for wrong in [0, 2] {
        let reply = store.cycle(&renewing("a", &[key(1, wrong)])).await.unwrap();
        assert_eq!(reply.renewed, []);
    }
    // Still up for claim: nothing was made longer.
    let reply = world.store().cycle(&claiming("b", 5)).await.unwrap();
    assert_eq!(reply.claimed.len(), 1);
}

async fn two_processes_with_one_name_do_not_renew_for_each_other(world: impl World) {
    world.set_account(1, "paper", true).await;
    let (first, second) =
        (super::super::boot_node_id("host").unwrap(), super::super::boot_node_id("host").unwrap());
    let mut store = world.store();
    store.cycle(&claiming(first.as_str(), 5)).await.unwrap();
    let reply = store.cycle(&renewing(second.as_str(), &[key(1, 1)])).await.unwrap();
    assert_eq!((reply.renewed, reply.owned), (Vec::new(), Vec::new()));
}

async fn account_that_went_to_another_node_and_back_is_another_tenure(world: impl World) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a", 5)).await.unwrap();
    for name in ["b", "a"] {
        world.expire(1).await;
        world.store().cycle(&claiming(name, 5)).await.unwrap();
    }
    let stale = world.store().cycle(&renewing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(stale.renewed, []);
    assert_eq!(stale.owned[0].tenure, key(1, 3));
    let stale = world.store().cycle(&releasing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(stale.released, []);
    let current = world.store().cycle(&renewing("a", &[key(1, 3)])).await.unwrap();
    assert_eq!(current.renewed, [account(1)]);
}

async fn renewal_passes_a_locked_row_by_and_renews_the_others(world: impl World) {
    for id in 1..=10 {
        world.set_account(id, "paper", true).await;
    }
    let mut store = world.store();
    store.cycle(&claiming("a", 10)).await.unwrap();
    let tenures: Vec<TenureKey> = (1..=10).map(|id| key(id, 1)).collect();
    let request = renewing("a", &tenures);
    let reply = world.while_locked(7, store.cycle(&request)).await.unwrap();
    assert_eq!(reply.renewed.len(), 9);
    assert!(!reply.renewed.contains(&account(7)));
    assert_eq!(reply.owned.len(), 10);
    assert_eq!(store.cycle(&request).await.unwrap().renewed.len(), 10);
}

// H17: somebody's long transaction over many accounts.
async fn claim_passes_more_locked_rows_by_than_it_looks_at_for_near_ones(world: impl World) {
    for id in 1..=6 {
        world.set_account(id, "paper", true).await;
    }
    let mut store = world.store();
    let claimed = world
        .while_all_locked(&[1, 2, 3, 4, 5], async {
            store.cycle(&claiming("a", 1)).await.unwrap().claimed
        })
        .await;
    assert_eq!(claimed.iter().map(|row| row.tenure.account).collect::<Vec<_>>(), [account(6)]);
}

async fn claim_passes_a_locked_row_by(world: impl World) {
    for id in 1..=3 {
        world.set_account(id, "paper", true).await;
    }
    let mut store = world.store();
    let reply = world.while_locked(2, store.cycle(&claiming("a", 2))).await.unwrap();
    let ids: Vec<AccountId> = reply.owned.iter().map(|row| row.tenure.account).collect();
    assert_eq!(ids, [account(1), account(3)]);
}

async fn release_frees_the_row_and_the_next_owner_starts_clean(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    let reply = store.cycle(&releasing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!((reply.released, reply.owned.len()), (vec![account(1)], 0));
    assert_eq!(world.row(1).await, Row { node_id: None, token: token(1) });
    let reply = world.store().cycle(&claiming("b", 5)).await.unwrap();
    assert_eq!(reply.claimed[0].tenure, key(1, 2));
    assert_eq!(reply.claimed[0].previous_owner, None);
}

async fn release_under_another_token_does_nothing(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    for request in [releasing("a", &[key(1, 2)]), releasing("b", &[key(1, 1)])] {
        assert_eq!(store.cycle(&request).await.unwrap().released, []);
    }
    assert_eq!(world.row(1).await.node_id.as_deref(), Some("a"));
}

async fn renewal_that_arrives_after_the_release_owns_nothing(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    store.cycle(&releasing("a", &[key(1, 1)])).await.unwrap();
    // It was on its way when the node let go (B4).
    let late = world.store().cycle(&renewing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!((late.renewed, late.owned), (Vec::new(), Vec::new()));
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed.len(), 1);
    // And a release that is sent twice frees nobody else's tenure (B13).
    let again = world.store().cycle(&releasing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(again.released, []);
    assert_eq!(world.row(1).await.node_id.as_deref(), Some("b"));
}

async fn claim_goes_by_the_stored_end_and_not_by_the_claimants_own_lease(world: impl World) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a", 5)).await.unwrap();
    let mut hasty = claiming("b", 5);
    hasty.lease = Duration::ZERO;
    assert_eq!(world.store().cycle(&hasty).await.unwrap().claimed, []);
}

async fn release_of_a_locked_row_waits_for_the_next_cycle(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    let request = releasing("a", &[key(1, 1)]);
    let reply = world.while_locked(1, store.cycle(&request)).await.unwrap();
    assert_eq!((reply.released.len(), reply.owned.len()), (0, 1));
    assert_eq!(store.cycle(&request).await.unwrap().released, [account(1)]);
}

async fn account_that_was_switched_off_is_still_owned_and_reported_but_never_claimed(
    world: impl World,
) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    world.set_account(1, "paper", false).await;
    let reply = store.cycle(&renewing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(reply.renewed, [account(1)]);
    assert!(!reply.owned[0].enabled);
    world.expire(1).await;
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed, []);
    store.cycle(&releasing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed, []);
}

async fn accounts_of_other_platforms_are_not_touched(world: impl World) {
    world.set_account(1, "mt5", true).await;
    world.set_account(2, "fix44", true).await;
    let mut store = world.store();
    let reply = store.cycle(&claiming("a", 5)).await.unwrap();
    assert_eq!((reply.claimed.len(), reply.unowned), (0, 0));
    let mut both = claiming("a", 5);
    both.platforms = vec!["fix44".into(), "mt5".into(), "paper".into()];
    let reply = store.cycle(&both).await.unwrap();
    assert_eq!(reply.claimed.len(), 2);
    assert_eq!(reply.owned.iter().filter(|row| row.platform == "mt5").count(), 1);
}

async fn account_that_the_node_keeps_away_from_is_not_claimed(world: impl World) {
    for id in 1..=3 {
        world.set_account(id, "paper", true).await;
    }
    let mut other = claiming("b", 5);
    other.claim.as_mut().unwrap().avoid = vec![account(1), account(3)];
    world.store().cycle(&other).await.unwrap();
    world.expire(2).await;
    let mut request = claiming("a", 5);
    request.claim.as_mut().unwrap().avoid = vec![account(1), account(2)];
    let reply = world.store().cycle(&request).await.unwrap();
    assert_eq!(reply.claimed.len(), 1);
    assert_eq!(reply.claimed[0].tenure.account, account(3));
}

// Found by an operator: an account that was handed over twice within a minute had no owner for the rest
// of it, because both nodes kept away from it.
async fn account_that_nobody_else_takes_is_claimed_by_the_node_that_keeps_away_from_it(
    world: impl World,
) {
    world.set_account(1, "paper", true).await;
    let mut request = claiming("a", 5);
    request.claim.as_mut().unwrap().avoid = vec![account(1)];
    assert_eq!(world.store().cycle(&request).await.unwrap().claimed, []);
    world.set_free_for(1, AVOIDED_FREE_MAX + Duration::from_secs(1)).await;
    assert_eq!(world.store().cycle(&request).await.unwrap().claimed.len(), 1);
}

async fn next_expiry_is_that_of_the_others(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    let reply = store.cycle(&claiming("a", 5)).await.unwrap();
    assert_eq!(reply.next_expiry, None);
    let reply = world.store().cycle(&cycle_of("b")).await.unwrap();
    let left = reply.next_expiry.unwrap();
    assert!(left <= TIMING.lease && left > TIMING.lease - Duration::from_secs(20), "{left:?}");
    world.expire(1).await;
    let reply = world.store().cycle(&cycle_of("b")).await.unwrap();
    assert_eq!(reply.next_expiry, None);
}

async fn row_of_a_process_that_is_proven_dead_is_claimed_before_its_lease_runs_out(
    world: impl World,
) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a-1", 5)).await.unwrap();
    let mut request = claiming("a-2", 5);
    let claim = request.claim.as_mut().unwrap();
    claim.proven_dead = vec![node("a-1")];
    // The proof does not rest on anybody's clock.
    claim.expired = false;
    let reply = world.store().cycle(&request).await.unwrap();
    assert_eq!(reply.claimed.len(), 1);
    assert_eq!(reply.claimed[0].tenure, key(1, 2));
    assert_eq!(reply.claimed[0].previous_owner.as_deref(), Some("a-1"));
}

async fn row_of_another_process_than_the_proven_one_waits_for_its_lease(world: impl World) {
    for id in 1..=2 {
        world.set_account(id, "paper", true).await;
    }
    world.store().cycle(&claiming("a-1", 1)).await.unwrap();
    // A process with the same host name, and one whose name begins alike.
    world.store().cycle(&claiming("a-10", 1)).await.unwrap();
    let mut request = claiming("a-3", 5);
    request.claim.as_mut().unwrap().proven_dead = vec![node("a-1"), node("a-2")];
    let reply = world.store().cycle(&request).await.unwrap();
    assert_eq!(reply.claimed.iter().map(|row| row.tenure).collect::<Vec<_>>(), [key(1, 2)]);
    assert_eq!(world.row(2).await.node_id.as_deref(), Some("a-10"));
}

async fn account_that_ended_two_owners_in_a_row_is_left_alone_for_a_while_by_everybody(
    world: impl World,
) {
    world.set_account(1, "paper", true).await;
    world.store().cycle(&claiming("a", 5)).await.unwrap();
    world.expire(1).await;
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed.len(), 1);
    assert_eq!(world.starts(1).await, 2);
    world.expire_just_now(1).await;
    let mut request = claiming("c", 5);
    assert_eq!(world.store().cycle(&request).await.unwrap().claimed, []);
    // Nor does a process take it that could prove the last owner dead.
    request.claim.as_mut().unwrap().proven_dead = vec![node("b")];
    assert_eq!(world.store().cycle(&request).await.unwrap().claimed, []);
    world.expire(1).await;
    assert_eq!(world.store().cycle(&claiming("c", 5)).await.unwrap().claimed.len(), 1);
    assert_eq!(world.starts(1).await, 3);
}

async fn five_good_minutes_and_an_orderly_release_take_the_suspicion_back(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    store.cycle(&claiming("a", 5)).await.unwrap();
    let renewal = renewing("a", &[key(1, 1)]);
    world.set_starts(1, 3, Duration::from_secs(290)).await;
    store.cycle(&renewal).await.unwrap();
    assert_eq!(world.starts(1).await, 3);
    world.set_starts(1, 3, Duration::from_secs(310)).await;
    store.cycle(&renewal).await.unwrap();
    assert_eq!(world.starts(1).await, 0);
    // An owner that gives back was not ended by the account.
    world.set_starts(1, 3, Duration::ZERO).await;
    store.cycle(&releasing("a", &[key(1, 1)])).await.unwrap();
    assert_eq!(world.starts(1).await, 2);
}

async fn server_of_a_lower_timeline_than_one_seen_before_renews_nothing(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut store = world.store();
    let reply = store.cycle(&claiming("a", 5)).await.unwrap();
    let seen = reply.database.timeline.unwrap();
    let mut request = renewing("a", &[key(1, 1)]);
    request.timeline_min = Some(seen);
    assert_eq!(store.cycle(&request).await.unwrap().renewed.len(), 1);
    world.expire(1).await;
    request.timeline_min = Some(seen + 1);
    let error = store.cycle(&request).await.unwrap_err();
    assert_eq!(error.as_str(), "old_timeline");
    // Nothing was made longer: somebody else may take it.
    assert_eq!(world.store().cycle(&claiming("b", 5)).await.unwrap().claimed.len(), 1);
}

async fn fleet_is_everybody_alive_who_takes_accounts(world: impl World) {
    for id in 1..=5 {
        world.set_account(id, "paper", true).await;
    }
    let reply = world.store().cycle(&claiming("a", 3)).await.unwrap();
    assert_eq!(reply.fleet, Fleet { nodes: 1, accounts: 5, lowest_peer: None });
    let mut full = claiming("b", 1);
    full.capacity = 1;
    let reply = world.store().cycle(&full).await.unwrap();
    assert_eq!(reply.fleet, Fleet { nodes: 2, accounts: 5, lowest_peer: Some(3) });
    // b has no room, c serves something else, d lets go, e is dead.
    let mut elsewhere = claiming("c", 5);
    elsewhere.platforms = vec!["mt5".into()];
    world.store().cycle(&elsewhere).await.unwrap();
    let mut ending = cycle_of("d");
    ending.capacity = 0;
    world.store().cycle(&ending).await.unwrap();
    let mut dead = cycle_of("e");
    dead.lease = Duration::ZERO;
    world.store().cycle(&dead).await.unwrap();
    let reply = world.store().cycle(&cycle_of("a")).await.unwrap();
    assert_eq!(reply.fleet, Fleet { nodes: 2, accounts: 5, lowest_peer: None });
}

async fn accounts_without_an_owner_are_counted_with_the_longest_wait(world: impl World) {
    let reply = world.store().cycle(&cycle_of("b")).await.unwrap();
    assert_eq!((reply.unowned, reply.orphaned, reply.unowned_for), (0, 0, None));
    for id in 1..=3 {
        world.set_account(id, "paper", true).await;
    }
    // Switched off, it waits for nobody.
    world.set_account(3, "paper", false).await;
    let reply = world.store().cycle(&cycle_of("b")).await.unwrap();
    assert_eq!((reply.unowned, reply.orphaned), (2, 0));
    assert!(reply.unowned_for.unwrap() < Duration::from_secs(60), "{:?}", reply.unowned_for);
    world.store().cycle(&claiming("a", 1)).await.unwrap();
    world.expire_just_now(1).await;
    let reply = world.store().cycle(&cycle_of("b")).await.unwrap();
    assert_eq!((reply.unowned, reply.orphaned), (1, 1));
    world.store().cycle(&claiming("b", 5)).await.unwrap();
    let reply = world.store().cycle(&cycle_of("b")).await.unwrap();
    assert_eq!((reply.unowned, reply.orphaned, reply.unowned_for), (0, 0, None));
}

// A claim looks at one row of each owner. An owner that lives renews its other rows, and which of
// them is looked at is the server's choice.
async fn row_that_its_living_owner_abandoned_is_claimed_when_it_has_run_out(world: impl World) {
    for id in 1..=3 {
        world.set_account(id, "paper", true).await;
    }
    let mut owner = world.store();
    owner.cycle(&claiming("a-1", 3)).await.unwrap();
    let mut others = world.store();
    for (id, renewed) in [(3, vec![1, 2]), (1, vec![2]), (2, vec![])] {
        world.expire(id).await;
        let renewed: Vec<TenureKey> = renewed.into_iter().map(|id| key(id, 1)).collect();
        let mut request = renewing("a-1", &renewed);
        request.let_go = vec![key(id, 1)];
        let left = owner.cycle(&request).await.unwrap();
        let reply = others.cycle(&cycle_of("b-1")).await.unwrap();
        assert_eq!(reply.orphaned, 1, "everybody sees that account {id} has no owner");
        let reply = others.cycle(&claiming("b-1", 5)).await.unwrap();
        let claimed: Vec<TenureKey> = reply.claimed.iter().map(|row| row.tenure).collect();
        assert_eq!(claimed, [key(id, 2)]);
        assert_eq!(reply.claimed[0].previous_owner.as_deref(), Some("a-1.gone"));
        assert_eq!(left.owned.len(), renewed.len(), "it was not its owner's any more");
    }
}

async fn row_that_was_abandoned_is_its_owners_until_it_has_run_out(world: impl World) {
    world.set_account(1, "paper", true).await;
    let mut owner = world.store();
    owner.cycle(&claiming("a-1", 1)).await.unwrap();
    let request = CycleRequest { let_go: vec![key(1, 1)], ..cycle_of("a-1") };
    owner.cycle(&request).await.unwrap();
    assert_eq!(world.row(1).await.node_id.as_deref(), Some("a-1"), "its rows may still be written");
    let of_another = CycleRequest { let_go: vec![key(1, 1)], ..cycle_of("b-1") };
    world.expire(1).await;
    owner.cycle(&of_another).await.unwrap();
    assert_eq!(world.row(1).await.node_id.as_deref(), Some("a-1"), "it is no business of others");
    owner.cycle(&request).await.unwrap();
    assert_eq!(world.row(1).await.node_id.as_deref(), Some("a-1.gone"));
}
