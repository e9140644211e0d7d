//! A broker that misbehaves, and nodes that must not.

use devstack::{FaultMode, FaultProxy, shared_postgres};
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, logins, orders};
use lockstep_tests::world::{EURUSD, SOON, TAKEOVER, World, run_lockstep, until};
use paper::Ledger;
use paper::ledger::Fact;
use paper::protocol::{Instruction, OrderReply, Style};
use schemas::{AccountId, Side, Symbol};
use sqlx::Row;
use std::time::{Duration, Instant};

/// `lockstep paper ctl` of this world's broker; what it answered.
async fn ctl(world: &World, words: &str) -> serde_json::Value {
    let address = world.paper_addr.to_string();
    let mut arguments = vec!["paper", "ctl", &address, "--json"];
    arguments.extend(words.split_whitespace());
    let output = run_lockstep(&arguments, &[]).await;
    assert_eq!(output.code, Some(0), "{words}: {output:?}");
    output.json()
}

/// The orders of nodes for an account, by their words.
fn sent(ledger: &Ledger, account: AccountId) -> Vec<&'static str> {
    let mine = ledger.orders().filter(|(_, request, _)| request.account == account);
    mine.map(|(_, request, _)| request.instruction.word()).collect()
}

#[tokio::test]
async fn order_executed_with_lost_answer_is_adopted_by_its_tag_and_never_sent_again() {
    let mut world = World::start("lost-answer").await;
    let account = world.add_external_account("master").await;
    let followers = world.add_followers(account, 3).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let _a = world.node("a").start();
    world.until_copying().await;
    for kind in ["lost_answer --orders open", "lost_answer --orders close"] {
        ctl(&world, &format!("fault set --kind {kind} --count 3")).await;
    }
    let first = followers[0];
    let ticket = master.open("0.10");
    let equal = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_eq!(equal.faults().get("lost_answer"), Some(&3), "each follower's answer was lost");
    let mut db = world.database().await;
    until("pairs that are open in their rows", SOON, async || {
        let row = sqlx::query("select count(*) as found from pairs where state = 'open'");
        let found: i64 = row.fetch_one(&mut db).await.unwrap().get("found");
        (found == 3).then_some(())
    })
    .await;
    master.close(ticket);
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    // Once more without faults: a follower that still waited would not copy it.
    assert_eq!(ctl(&world, "fault list").await, serde_json::json!([]), "they are used up");
    master.open("0.20");
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_eq!(sent(&ledger, first), ["open", "close", "open"]);
    assert_clean(&ledger);
}

#[tokio::test]
async fn kicked_session_sends_nothing_more_and_reconnects_under_its_lease_only() {
    let mut world = World::start("kicked").await;
    let account = world.add_external_account("master").await;
    let follower = world.add_followers(account, 1).await[0];
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let proxy = FaultProxy::start(shared_postgres().await.unwrap().addr()).await.unwrap();
    let _a = world.node("a").database(world.database_url_by(&proxy)).start();
    world.until_copying().await;
    master.open("0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    // With its lease it is back, and what happened meanwhile is copied once.
    let before = logins(&world.ledger().await).len();
    assert_eq!(ctl(&world, &format!("kick {follower}")).await[0]["sessions_ended"], 1);
    master.open("0.20");
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let all = logins(&ledger);
    assert!(all.len() > before, "it logged in again");
    assert!(all.iter().all(|(_, token, _)| *token == all[0].1), "under the same token: {all:?}");

    // Without it, it is not: its session ends at its own deadline, and there is no other.
    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    // Kicked again and again it logs in until its deadline, with waits below two seconds by then.
    let (mut since, mut known) = (Instant::now(), logins(&world.ledger().await).len());
    until("two seconds without a session", TAKEOVER, async || {
        let kicked = ctl(&world, &format!("kick {follower}")).await;
        let now = logins(&world.ledger().await).len();
        if kicked[0]["sessions_ended"] != 0 || now != known {
            (since, known) = (Instant::now(), now);
        }
        (since.elapsed() >= Duration::from_secs(2)).then_some(())
    })
    .await;
    let sent_before = orders(&world.ledger().await).len();
    master.open("0.30");
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    assert_eq!(orders(&ledger).len(), sent_before + 1, "one order, after the lease came back");
    assert_clean(&ledger);
}

#[tokio::test]
async fn copy_lists_that_are_not_synced_close_nothing() {
    let mut world = World::start("unsynced").await;
    let account = world.add_external_account("master").await;
    let followers = world.add_followers(account, 3).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let _a = world.node("a").start();
    world.until_copying().await;
    // So few that the guard against mass closes would not hold a plan without them.
    master.open_many(2, "0.10");
    let before = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let faults = [
        "fault set --kind unsynced --lists half --delay 500ms-2s --count 3",
        "fault set --kind unsynced --lists all --delay 1s-3s --count 3",
        "fault set --kind unsynced --lists all --delay 6s --claims-complete --count 3",
    ];
    for fault in faults {
        ctl(&world, fault).await;
        for follower in &followers {
            ctl(&world, &format!("kick {follower}")).await;
        }
        until("the fault to be used up", SOON, async || {
            (ctl(&world, "fault list").await == serde_json::json!([])).then_some(())
        })
        .await;
        world.until_copying().await;
    }
    master.open("0.20");
    let after = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_eq!(orders(&after).len(), orders(&before).len() + 3, "only the new trade was copied");
    assert!(followers.iter().all(|follower| !sent(&after, *follower).contains(&"close")));
    assert_eq!(after.faults().get("unsynced"), Some(&9));
    assert_clean(&after);
}

#[tokio::test]
async fn a_netting_account_leads_through_a_reversal_and_is_refused_as_a_follower() {
    let mut world = World::start("netting").await;
    let netting = world.add_paper_account("netting", Style::Mt5Netting).await;
    let follower = world.add_paper_account("follower", Style::Mt5).await;
    world.add_link(netting, follower, 1).await;
    let refused = world.add_paper_account("refused", Style::Mt5Netting).await;
    let source = world.add_paper_account("source", Style::Mt5).await;
    // Of no interest to the waits for copies: there must be none.
    world.add_link(source, refused, 1).await;
    world.links.pop();
    let _a = world.node("a").start();
    world.until_copying().await;
    world.until_session("unusable", &[refused]).await;
    let symbol = Symbol::new(EURUSD).unwrap();
    let by_hand = async |account: AccountId, side: Side, lots: &str| {
        let order = Instruction::open_by_hand(symbol.clone(), side, lots.parse().unwrap());
        let reply = world.driver.manual(account, order).await.unwrap();
        assert!(matches!(reply, OrderReply::Done(_)), "{reply:?}");
    };
    by_hand(source, Side::Buy, "0.10").await;

    let held = async |what: &str, side: Side, lots: &str| {
        until(what, SOON, async || {
            let book = world.driver.book(follower).await.unwrap();
            let held: Vec<_> = book.positions.iter().map(|p| (p.side, p.lots)).collect();
            (held == [(side, lots.parse().unwrap())]).then(|| book.positions[0].ticket)
        })
        .await
    };
    by_hand(netting, Side::Buy, "1.00").await;
    let bought = held("the copy of the buy", Side::Buy, "1.00").await;
    by_hand(netting, Side::Sell, "0.40").await;
    assert_eq!(held("the reduced copy", Side::Buy, "0.60").await, bought);
    by_hand(netting, Side::Sell, "1.10").await;
    let sold = held("the copy of the other side", Side::Sell, "0.50").await;
    assert_ne!(sold, bought, "closed and opened as a new trade");
    by_hand(netting, Side::Buy, "0.20").await;
    assert_eq!(held("the reduced sell", Side::Sell, "0.30").await, sold);

    let ledger = world.ledger().await;
    // The close of one side and the open of the other are of two trades, and wait for nobody.
    let mut words = sent(&ledger, follower);
    words.sort_unstable();
    assert_eq!(words, ["close", "close", "close", "open", "open"]);
    assert!(sent(&ledger, refused).is_empty(), "a netting follower was sent an order");
    let mut db = world.database().await;
    let row = sqlx::query("select detail from account_status where account_id = $1");
    let row = row.bind(refused.as_i64()).fetch_one(&mut db).await.unwrap();
    assert!(row.get::<String, _>("detail").contains("netting account"));
    assert_clean(&ledger);
    assert!(!ledger.rows().iter().any(|row| matches!(row.fact, Fact::Lost(_))));
}
