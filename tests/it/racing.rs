//! Many accounts, two nodes, one start.

use lockstep_tests::oracle::logins;
use lockstep_tests::world::{SOON, TAKEOVER, World, owners, until};
use paper::protocol::{AccountDecl, Style};
use schemas::AccountId;
use std::collections::{BTreeMap, BTreeSet};

const ACCOUNTS: u64 = 200;

#[tokio::test]
async fn two_nodes_racing_for_two_hundred_accounts_never_share_one_and_own_them_all() {
    let world = World::start("racing").await;
    let mut db = world.database().await;
    sqlx::query(
        "insert into trading_accounts (name, platform, connection) \
         select 'account-' || n, 'paper', jsonb_build_object('address', $2::text) from generate_series(1, $1) n",
    )
    .bind(ACCOUNTS as i64)
    .bind(world.paper_addr.to_string())
    .execute(&mut db)
    .await
    .unwrap();
    let accounts: Vec<AccountId> = owners(&mut db).await.into_keys().collect();
    let declared = accounts.iter().map(|account| AccountDecl::new(*account, Style::Mt5));
    world.driver.declare_accounts(declared.collect()).await.unwrap();
    // Long leases: the race is for free accounts, and nobody is late with a renewal.
    let start = |name: &str| {
        world
            .node(name)
            .setting("LOCKSTEP_LEASE", "60s")
            .setting("LOCKSTEP_CYCLE", "5s")
            .setting("LOCKSTEP_QUERY_LIMIT", "5s")
            .setting("LOCKSTEP_CAPACITY", ACCOUNTS)
            .setting("LOCKSTEP_CLAIM_BATCH", 10)
            .start()
    };
    let nodes = [start("a"), start("b")];

    let mut first_owner: BTreeMap<AccountId, String> = BTreeMap::new();
    until("an owner for every account", TAKEOVER, async || {
        let mut owned = 0;
        for (account, owner) in owners(&mut db).await {
            let Some(node) = owner.node else { continue };
            owned += 1;
            assert_eq!(owner.token, 1, "{account} was claimed twice");
            assert_eq!(*first_owner.entry(account).or_insert_with(|| node.clone()), node);
        }
        (owned == ACCOUNTS).then_some(())
    })
    .await;
    let shares = nodes.iter().map(|node| first_owner.values().filter(|o| node.is(o)).count());
    let shares: Vec<usize> = shares.collect();
    assert!(shares.iter().all(|share| *share > 0), "no race: {shares:?}");
    assert_eq!(shares.iter().sum::<usize>(), accounts.len());

    // The broker has seen one node for each account, the one that the database names.
    let ledger = until("a login for every account", SOON, async || {
        let ledger = world.ledger().await;
        let seen: BTreeSet<AccountId> = logins(&ledger).iter().map(|(a, ..)| *a).collect();
        (seen.len() == accounts.len()).then_some(ledger)
    })
    .await;
    for (account, token, node) in logins(&ledger) {
        assert_eq!((token.get(), node.as_str()), (1, first_owner[&account].as_str()));
    }
}
