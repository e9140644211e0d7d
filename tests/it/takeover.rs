//! Owners that end, in an orderly way and not.

use devstack::{FaultMode, FaultProxy};
use lockstep::cli::demo::SETTLE_AND_READ;
use lockstep::cli::demo::judge::{JudgedFollower, Volumes, judge};
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, orders};
use lockstep_tests::world::{EURUSD, SOON, TAKEOVER, World, owners, until, wall};
use paper::faults::SettingsChange;
use paper::protocol::{Instruction, Style};
use schemas::{Lots, Micros, Symbol};
use sqlx::Row;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Before a node is killed, events may already have been on their way to it.
const BEFORE_KILL: Duration = Duration::from_secs(1);

fn volumes() -> BTreeMap<Symbol, Volumes> {
    let step: Lots = "0.01".parse().unwrap();
    let limits = Volumes { min: step, step, max: "100".parse().unwrap() };
    BTreeMap::from([(Symbol::new(EURUSD).unwrap(), limits)])
}

/// The demo's judge over everything that the master published.
pub(crate) fn judged(
    world: &World,
    master: &Master,
    ledger: &paper::Ledger,
    unowned: &[(schemas::AccountId, Micros, Micros)],
) {
    let followers: Vec<JudgedFollower> = world
        .links
        .iter()
        .map(|link| JudgedFollower {
            account: link.follower,
            link: link.link,
            multiplier: link.multiplier,
            unowned: unowned
                .iter()
                .filter(|(account, ..)| *account == link.follower)
                .map(|(_, from, until)| (*from, *until))
                .collect(),
        })
        .collect();
    let verdict = judge(&master.published, &followers, &volumes(), ledger);
    assert!(verdict.is_clean(), "{verdict:#?}");
    assert!(verdict.copies > 0);
}

#[tokio::test]
async fn a_killed_nodes_followers_are_taken_over_and_no_trade_is_copied_twice() {
    let mut world = World::start("killed").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 6).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let a = world.node("a").setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    let _b = world.node("b").setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    world.until_copying().await;
    // Answers take long, so that orders are in flight when the node dies.
    let slow = SettingsChange { answer_delay_ms: Some(400), ..SettingsChange::default() };
    world.driver.settings(slow).await.unwrap();

    let before = master.open_many(4, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let of_a = world.owned_by(&a).await;
    assert!(!of_a.is_empty() && of_a.len() < 6, "both nodes own followers, a owns {of_a:?}");

    let known = orders(&world.ledger().await).len();
    let burst = master.open_many(40, "0.10");
    master.close_many(&before[..2]);
    let sent = until("orders of the burst by the node", SOON, async || {
        let orders = orders(&world.ledger().await);
        let sent = orders[known..].iter().filter(|order| a.is(order.node.as_str())).count();
        (sent > 0).then_some(sent)
    })
    .await;
    a.process.kill().unwrap();
    let killed_at = wall();
    // 16 orders a follower at once, each answered after 400 ms: the rest was not sent yet.
    assert!(sent < 42 * of_a.len(), "{sent} orders were sent: the burst was over");
    let during = master.open_many(3, "0.20");
    master.close(before[2]);
    master.close_many(&burst[..5]);
    master.reduce(burst[10], "0.04");

    let mut db = world.database().await;
    let mut taken = BTreeMap::new();
    until("a new owner for every follower", TAKEOVER, async || {
        for (account, owner) in owners(&mut db).await {
            let is_new = of_a.get(&account).is_some_and(|old| owner.token > *old);
            if is_new && owner.node.is_some() {
                taken.entry(account).or_insert_with(wall);
            }
        }
        (taken.len() == of_a.len()).then_some(())
    })
    .await;
    master.open_many(3, "0.10");
    master.close(during[0]);
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;

    assert_clean(&ledger);
    let unowned: Vec<_> = taken
        .iter()
        .map(|(account, at)| {
            let from = Micros(killed_at.0 - BEFORE_KILL.as_micros() as i64);
            (*account, from, at.plus(SETTLE_AND_READ))
        })
        .collect();
    judged(&world, &master, &ledger, &unowned);
}

#[tokio::test]
async fn an_account_with_an_unanswered_order_is_left_to_expire_at_a_shutdown() {
    let mut world = World::start("unanswered").await;
    let account = world.add_external_account("master").await;
    let broker = FaultProxy::start(world.paper_addr).await.unwrap();
    let stuck = world.add_paper_account_at("stuck", Style::Mt5, broker.addr()).await;
    let calm = world.add_paper_account("calm", Style::Mt5).await;
    world.add_link(account, stuck, 1).await;
    world.add_link(account, calm, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let a = world.node("a").start();
    world.until_copying().await;
    let of_a = world.owned_by(&a).await;
    broker.set_mode(FaultMode::BlackHole).await.unwrap();
    master.open("0.10");
    until("the order of the one that gets through", SOON, async || {
        (!orders(&world.ledger().await).is_empty()).then_some(())
    })
    .await;
    a.process.terminate().unwrap();
    let mut db = world.database().await;
    until("the calm one is given back", SOON, async || {
        owners(&mut db).await[&calm].node.is_none().then_some(())
    })
    .await;
    a.process.wait(TAKEOVER).await.unwrap();
    let left = &owners(&mut db).await[&stuck];
    assert!(
        left.node.as_ref().is_some_and(|node| a.is(node)),
        "given back with an order on its way"
    );

    // The next owner takes it as after a crash; what was not answered is looked for and not sent
    // again, whether it arrived or not.
    broker.set_mode(FaultMode::Pass).await.unwrap();
    let _b = world.node("b").start();
    let second = master.open("0.20");
    let ledger = until("both copy the next trade", TAKEOVER, async || {
        let ledger = world.ledger().await;
        let has = |link| State::of_copies(&ledger, link).trades.contains_key(&second.get());
        world.links.iter().all(has).then_some(ledger)
    })
    .await;
    assert_clean(&ledger);
    let opens = orders(&ledger).into_iter().filter(|o| o.account == stuck && o.is_opening).count();
    assert!(opens <= 2, "the unanswered open was sent again");
    let now = owners(&mut db).await;
    assert!(of_a.iter().all(|(account, token)| now[account].token == *token + 1));
}

#[tokio::test]
async fn a_clean_shutdown_hands_every_account_over_in_under_two_seconds() {
    let mut world = World::start("shutdown").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 10).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let a = world.node("a").start();
    world.until_copying().await;
    let b = world.node("b").start();
    b.process.wait_for_line("node starts", SOON).await.unwrap();
    let opened = master.open_many(5, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let of_a = world.owned_by(&a).await;
    assert_eq!(of_a.len(), 10);
    // Orders are in flight when the signal comes.
    let known = orders(&world.ledger().await).len();
    let last = master.open("0.30");
    master.close(opened[0]);
    until("an order of the last burst", SOON, async || {
        (orders(&world.ledger().await).len() > known).then_some(())
    })
    .await;

    let mut db = world.database().await;
    let signalled = Instant::now();
    a.process.terminate().unwrap();
    until("a new owner for every account", SOON, async || {
        let now = owners(&mut db).await;
        let is_handed_over = |(account, token): (_, &i64)| {
            let owner: &lockstep_tests::world::Owner = &now[account];
            owner.token > *token && owner.node.as_ref().is_some_and(|node| b.is(node))
        };
        of_a.iter().all(is_handed_over).then_some(())
    })
    .await;
    let took = signalled.elapsed();
    let status = a.process.wait(SOON).await.unwrap();
    assert!(status.success(), "{status}\n{}", a.process.log_tail());
    assert!(took < Duration::from_secs(2), "handed over after {took:?}");

    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
    assert!(master.book.positions.contains_key(&last));
    // Every copy that the first owner made was written by it, before it let go. The one trade that
    // was closed meanwhile may have been written again by the new owner.
    let made = ledger.orders().filter(|(_, request, meta)| {
        matches!(&request.instruction, Instruction::Open { comment, .. }
            if reconcile::tag::decode(comment).is_some_and(|(_, ticket)| ticket != opened[0]))
            && a.is(meta.node.as_str())
    });
    let made = made.count() as i64;
    let written: i64 = sqlx::query(
        "select count(*) as found from pairs where node_id like 'a-%' and master_ticket <> $1 \
         and state = 'open' and follower_ticket is not null",
    )
    .bind(opened[0].as_i64())
    .fetch_one(&mut db)
    .await
    .unwrap()
    .get("found");
    assert!(made >= 40, "{made}");
    assert_eq!(written, made);
    let unfinished: i64 =
        sqlx::query("select count(*) as found from copy_events where node_id like 'a-%' and outcome = 'unknown'")
            .fetch_one(&mut db)
            .await
            .unwrap()
            .get("found");
    assert_eq!(unfinished, 0, "orders of the first owner without an answer");
}

// An answer that does not come within the call limit leaves an outcome that nobody here can wait for.
#[tokio::test]
async fn a_node_told_to_end_does_not_wait_for_an_answer_that_was_given_up() {
    let mut world = World::start("given-up").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let a = world.node("a").start();
    world.until_copying().await;
    // The call limit of the short settings is one second.
    let mute = SettingsChange { answer_delay_ms: Some(60_000), ..SettingsChange::default() };
    world.driver.settings(mute).await.unwrap();
    master.open("0.10");
    until("the order is at the broker", SOON, async || {
        (orders(&world.ledger().await).len() == 1).then_some(())
    })
    .await;
    let signalled = Instant::now();
    a.process.terminate().unwrap();
    a.process.wait(SOON).await.unwrap();
    let took = signalled.elapsed();
    assert!(took < Duration::from_secs(15), "ended after {took:?}");

    let prompt = SettingsChange { answer_delay_ms: Some(0), ..SettingsChange::default() };
    world.driver.settings(prompt).await.unwrap();
    let _b = world.node("b").start();
    world.until_copying().await;
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}
