//! A node that is cut off from the database alone.

use devstack::{FaultMode, FaultProxy, shared_postgres};
use lockstep::directory;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean, orders};
use lockstep_tests::world::{SOON, TAKEOVER, World, owners, until, wall};
use paper::protocol::Style;
use schemas::Micros;
use sqlx::PgConnection;
use sqlx::types::time::OffsetDateTime;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Lease less fence of the short settings: how long a node trusts its last renewal.
const TRUSTED: Duration = Duration::from_millis(2500);
/// Trades that the master keeps open while it goes on.
const OPEN_MAX: usize = 5;
const FOLLOWERS: usize = 6;

#[tokio::test]
async fn a_node_cut_from_the_database_stops_by_its_own_deadline_and_the_new_owner_ends_equal() {
    let mut world = World::start("isolation").await;
    let account = world.add_external_account("master").await;
    let followers = world.add_followers(account, FOLLOWERS as u32).await;
    // Switched off for now: later the only account that the node which was cut off can get.
    let spare = world.add_paper_account("spare", Style::Mt5).await;
    let mut db = world.database().await;
    directory::enable_account(&mut db, spare, false).await.unwrap();
    world.add_link(account, spare, 1).await;
    let spare_link = world.links.pop().unwrap();
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let proxy = FaultProxy::start(shared_postgres().await.unwrap().addr()).await.unwrap();
    let a = world.node("a").database(world.database_url_by(&proxy)).start();
    world.until_copying().await;
    let b = world.node("b").setting("LOCKSTEP_CAPACITY", FOLLOWERS).start();
    let mut open = VecDeque::from(master.open_many(3, "0.10"));
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let of_a = world.owned_by(&a).await;
    assert_eq!(of_a.keys().copied().collect::<Vec<_>>(), followers);

    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    let cut_at = wall();
    let deadline = Instant::now() + TAKEOVER;
    let mut every = tokio::time::interval(Duration::from_millis(100));
    loop {
        every.tick().await;
        open.push_back(master.open("0.10"));
        if open.len() > OPEN_MAX {
            master.close(open.pop_front().unwrap());
        }
        let now = owners(&mut db).await;
        if of_a.keys().all(|account| now[account].node.as_ref().is_some_and(|node| b.is(node))) {
            break;
        }
        assert!(Instant::now() < deadline, "no new owner within {TAKEOVER:?}: {now:?}");
    }
    let taken_at = database_time(&mut db).await;
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
    let orders_of_a: Vec<_> =
        orders(&ledger).into_iter().filter(|order| a.is(order.node.as_str())).collect();
    let after_cut: Vec<Micros> =
        orders_of_a.iter().map(|order| order.at).filter(|at| *at > cut_at).collect();
    assert!(!after_cut.is_empty(), "it goes on while its permission lasts");
    let last = after_cut.last().unwrap().since(cut_at);
    assert!(last < TRUSTED, "it sent {last:?} after it was cut off");

    // It comes back: what it still had to say to the database changes nothing, and it works again
    // for an account that it gets anew.
    let healed_at = database_time(&mut db).await;
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    directory::enable_account(&mut db, spare, true).await.unwrap();
    world.links.push(spare_link);
    until("the node that was cut off owns an account again", TAKEOVER, async || {
        let owner = owners(&mut db).await.remove(&spare).unwrap();
        owner.node.is_some_and(|node| a.is(&node)).then_some(())
    })
    .await;
    master.open_many(3, "0.20");
    master.close(open[0]);
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
    let old = orders(&ledger)
        .into_iter()
        .filter(|order| a.is(order.node.as_str()) && of_a.contains_key(&order.account));
    assert_eq!(old.count(), orders_of_a.len(), "orders under the old tokens after the return");
    let now = owners(&mut db).await;
    assert!(of_a.iter().all(|(account, token)| now[account].token > *token));

    // Its writer has said everything that it still had to say. Of that, ends went in, and what
    // claimed to be live did not (S9).
    let opened = orders_of_a.iter().filter(|order| order.is_opening).count() as i64;
    let of_a = format!("node_id like 'a-%' and follower_id <> {spare}");
    let told = format!(
        "select count(distinct (follower_id, master_ticket)) from copy_events \
         where {of_a} and at < $1 and action = 'open_copy' and outcome in ('done', 'unknown')"
    );
    until("an event for every copy of the old owner", SOON, async || {
        (count(&mut db, &told, healed_at).await == opened).then_some(())
    })
    .await;
    let ends =
        format!("select count(*) from pairs where {of_a} and state = 'closed' and written_at > $1");
    assert!(count(&mut db, &ends, healed_at).await > 0, "no end of the old owner went in");
    let live = format!(
        "select count(*) from pairs where {of_a} and state in ('sending', 'open', 'closing') \
         and written_at > $1"
    );
    assert_eq!(count(&mut db, &live, taken_at).await, 0, "live rows of the old owner went in");
}

async fn database_time(db: &mut PgConnection) -> OffsetDateTime {
    sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await.unwrap()
}

async fn count(db: &mut PgConnection, query: &str, at: OffsetDateTime) -> i64 {
    let query = sqlx::AssertSqlSafe(query.to_owned());
    sqlx::query_scalar(query).bind(at).fetch_one(db).await.unwrap()
}

// Reading links again once stopped a session's trading for as long as the database was slow.
#[tokio::test]
async fn links_that_take_long_to_read_again_do_not_hold_up_copying() {
    let mut world = World::start("slow-links").await;
    let account = world.add_external_account("master").await;
    let followers = world.add_followers(account, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], account).await;
    let _node = world.node("a").start();
    world.until_copying().await;
    let mut db = world.database().await;
    sqlx::raw_sql("begin; lock table copy_links in access exclusive mode")
        .execute(&mut db)
        .await
        .unwrap();
    let mut other = world.database().await;
    sqlx::query("select pg_notify('lockstep_links', $1)")
        .bind(followers[0].to_string())
        .execute(&mut other)
        .await
        .unwrap();
    until("the session's read waits", SOON, async || {
        let waits: i64 = sqlx::query_scalar(
            "select count(*) from pg_stat_activity where datname = current_database() \
             and wait_event_type = 'Lock' and query like '%copy_links%' \
             and application_name <> 'lockstep-writer'",
        )
        .fetch_one(&mut other)
        .await
        .unwrap();
        (waits > 0).then_some(())
    })
    .await;
    let ticket = master.open("0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    master.close(ticket);
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let held: i64 = sqlx::query_scalar(
        "select count(*) from pg_locks where relation = 'copy_links'::regclass and granted \
         and mode = 'AccessExclusiveLock' and pid = pg_backend_pid()",
    )
    .fetch_one(&mut db)
    .await
    .unwrap();
    assert_eq!(held, 1, "the table was locked all the time");
    sqlx::raw_sql("rollback").execute(&mut db).await.unwrap();
    assert_clean(&world.ledger().await);
}
