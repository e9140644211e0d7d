//! The suite that both stores pass, what only a real Postgres can show, and the safety property.

mod expiry;
mod pooler;
mod postgres;
mod suite;
mod trust;

use super::cycle::{
    AVOIDED_FREE_MAX, ClaimRequest, CycleReply, CycleRequest, DatabaseBounds, LeaseTiming,
    TenureKey,
};
use super::memory::{MemoryOwnership, MemoryTable};
use super::share::{Fleet, claim_wait};
use super::store::{OwnershipStore, PostgresOwnership};
use super::term::CycleNumber;
use crate::clock::{Clock as _, SystemClock};
use crate::database;
use schemas::{AccountId, Micros, NodeId, Token};
use sqlx::postgres::{PgConnection, PgPool};
use sqlx::{Connection, Executor};
use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

/// A test that waits longer than this for a condition has failed.
const PATIENCE: Duration = Duration::from_secs(20);

const TIMING: LeaseTiming = LeaseTiming {
    lease: Duration::from_secs(60),
    fence: Duration::from_secs(15),
    cycle: Duration::from_secs(20),
    retry: Duration::from_secs(2),
    query_limit: Duration::from_secs(5),
};

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn key(id: u64, number: u64) -> TenureKey {
    TenureKey { account: account(id), token: token(number) }
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

/// A cycle of a node that does nothing yet.
fn cycle_of(name: &str) -> CycleRequest {
    CycleRequest {
        number: CycleNumber::NONE.next(),
        node: node(name),
        platforms: vec!["paper".into()],
        lease: TIMING.lease,
        capacity: 1_000,
        timeline_min: None,
        release: Vec::new(),
        renew: Vec::new(),
        let_go: Vec::new(),
        claim: None,
    }
}

fn claim(rows_max: u32) -> Option<ClaimRequest> {
    Some(ClaimRequest {
        rows_max,
        capacity: 1_000,
        expired: true,
        database: None,
        avoid: Vec::new(),
        proven_dead: Vec::new(),
    })
}

fn claiming(name: &str, rows_max: u32) -> CycleRequest {
    CycleRequest { claim: claim(rows_max), ..cycle_of(name) }
}

fn renewing(name: &str, tenures: &[TenureKey]) -> CycleRequest {
    CycleRequest { renew: tenures.to_vec(), ..cycle_of(name) }
}

fn releasing(name: &str, tenures: &[TenureKey]) -> CycleRequest {
    CycleRequest { release: tenures.to_vec(), ..cycle_of(name) }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    node_id: Option<String>,
    token: Token,
}

/// What a test does to the table behind the nodes' backs.
trait World: Send + Sync {
    type Store: OwnershipStore;

    async fn new() -> Self;
    fn store(&self) -> Self::Store;
    async fn set_account(&self, id: u64, platform: &str, enabled: bool);
    async fn link(&self, master: u64, follower: u64);
    async fn expire(&self, id: u64);
    /// Lets a row have had no owner for so long.
    async fn set_free_for(&self, id: u64, time: Duration);
    /// Lets the lease of a row have run out a moment ago.
    async fn expire_just_now(&self, id: u64);
    async fn row(&self, id: u64) -> Row;
    /// Lets a row have been begun so often, its present tenure so long ago.
    async fn set_starts(&self, id: u64, starts: u32, began_ago: Duration);
    /// How often a row was begun since its last good tenure.
    async fn starts(&self, id: u64) -> u32;
    /// Runs `work` while somebody else holds a lock on the row.
    async fn while_locked<T>(&self, id: u64, work: impl Future<Output = T>) -> T {
        self.while_all_locked(&[id], work).await
    }
    /// The same with several rows.
    async fn while_all_locked<T>(&self, ids: &[u64], work: impl Future<Output = T>) -> T;
}

struct MemoryWorld {
    table: MemoryTable,
}

impl World for MemoryWorld {
    type Store = MemoryOwnership;

    async fn new() -> Self {
        Self { table: MemoryTable::new(SystemClock) }
    }

    fn store(&self) -> MemoryOwnership {
        MemoryOwnership::new(self.table.clone(), TIMING.query_limit)
    }

    async fn set_account(&self, id: u64, platform: &str, enabled: bool) {
        self.table.set_account(account(id), platform, enabled);
    }

    async fn link(&self, master: u64, follower: u64) {
        self.table.set_master(account(follower), account(master));
    }

    async fn expire(&self, id: u64) {
        self.table.expire(account(id));
    }

    async fn set_free_for(&self, id: u64, time: Duration) {
        let now = i64::try_from(SystemClock.read().wall.as_micros()).unwrap();
        let since = Micros(now - i64::try_from(time.as_micros()).unwrap());
        self.table.set_free_since(account(id), since);
    }

    async fn expire_just_now(&self, id: u64) {
        let now = i64::try_from(SystemClock.read().wall.as_micros()).unwrap();
        self.table.set_lease_until(account(id), Micros(now - 1_000));
    }

    async fn row(&self, id: u64) -> Row {
        let row = self.table.row(account(id)).unwrap();
        Row { node_id: row.node_id, token: row.token }
    }

    async fn set_starts(&self, id: u64, starts: u32, began_ago: Duration) {
        let now = Micros(i64::try_from(SystemClock.read().wall.as_micros()).unwrap());
        let began = Micros(now.0 - i64::try_from(began_ago.as_micros()).unwrap());
        self.table.set_starts(account(id), starts, began);
    }

    async fn starts(&self, id: u64) -> u32 {
        self.table.row(account(id)).unwrap().starts
    }

    async fn while_all_locked<T>(&self, ids: &[u64], work: impl Future<Output = T>) -> T {
        ids.iter().for_each(|id| self.table.set_locked(account(*id), true));
        let done = work.await;
        ids.iter().for_each(|id| self.table.set_locked(account(*id), false));
        done
    }
}

struct PostgresWorld {
    url: String,
    admin: PgPool,
}

impl World for PostgresWorld {
    type Store = PostgresOwnership;

    async fn new() -> Self {
        Self::on(devstack::shared_postgres().await.unwrap()).await
    }

    fn store(&self) -> PostgresOwnership {
        PostgresOwnership::new(&self.url, TIMING.query_limit).unwrap()
    }

    async fn set_account(&self, id: u64, platform: &str, enabled: bool) {
        sqlx::query(
            "insert into trading_accounts (id, platform, name, enabled)
             values ($1, $2, 'account-' || $1, $3)
             on conflict (id) do update set enabled = excluded.enabled",
        )
        .bind(account(id).as_i64())
        .bind(platform)
        .bind(enabled)
        .execute(&self.admin)
        .await
        .unwrap();
    }

    async fn link(&self, master: u64, follower: u64) {
        sqlx::query("insert into copy_links (master_id, follower_id, magic) values ($1, $2, $1)")
            .bind(account(master).as_i64())
            .bind(account(follower).as_i64())
            .execute(&self.admin)
            .await
            .unwrap();
    }

    async fn expire(&self, id: u64) {
        sqlx::query("update trading_accounts set lease_until = '-infinity' where id = $1")
            .bind(account(id).as_i64())
            .execute(&self.admin)
            .await
            .unwrap();
    }

    async fn set_free_for(&self, id: u64, time: Duration) {
        sqlx::query(
            "update trading_accounts
             set free_since = clock_timestamp() - make_interval(secs => $2) where id = $1",
        )
        .bind(account(id).as_i64())
        .bind(time.as_secs_f64())
        .execute(&self.admin)
        .await
        .unwrap();
    }

    async fn expire_just_now(&self, id: u64) {
        sqlx::query(
            "update trading_accounts set lease_until = clock_timestamp() - interval '1 ms'
             where id = $1",
        )
        .bind(account(id).as_i64())
        .execute(&self.admin)
        .await
        .unwrap();
    }

    async fn row(&self, id: u64) -> Row {
        let (node_id, token): (Option<String>, i64) =
            sqlx::query_as("select node_id, lease_token from trading_accounts where id = $1")
                .bind(account(id).as_i64())
                .fetch_one(&self.admin)
                .await
                .unwrap();
        Row { node_id, token: Token::from_i64(token).unwrap() }
    }

    async fn set_starts(&self, id: u64, starts: u32, began_ago: Duration) {
        sqlx::query(
            "update trading_accounts
             set starts = $2, tenure_since = clock_timestamp() - $3 * interval '1 ms'
             where id = $1",
        )
        .bind(account(id).as_i64())
        .bind(starts as i32)
        .bind(began_ago.as_millis() as i64)
        .execute(&self.admin)
        .await
        .unwrap();
    }

    async fn starts(&self, id: u64) -> u32 {
        let starts: i32 = sqlx::query_scalar("select starts from trading_accounts where id = $1")
            .bind(account(id).as_i64())
            .fetch_one(&self.admin)
            .await
            .unwrap();
        starts as u32
    }

    async fn while_all_locked<T>(&self, ids: &[u64], work: impl Future<Output = T>) -> T {
        let ids: Vec<i64> = ids.iter().map(|id| account(*id).as_i64()).collect();
        let mut other = self.admin.begin().await.unwrap();
        sqlx::query("select 1 from trading_accounts where id = any ($1) for update")
            .bind(ids)
            .execute(&mut *other)
            .await
            .unwrap();
        let done = work.await;
        other.rollback().await.unwrap();
        done
    }
}

impl PostgresWorld {
    async fn on(server: &devstack::Postgres) -> Self {
        let url = server.create_database("lease").await.unwrap();
        database::migrate(&url).await.unwrap();
        let admin = database::pool(&url, "test", 4).unwrap();
        Self { url, admin }
    }

    async fn connection(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    async fn run(&self, sql: &'static str) {
        self.admin.execute(sql).await.unwrap();
    }

    /// Adds accounts 1 to `count`.
    async fn fill(&self, count: i64) {
        sqlx::query(
            "insert into trading_accounts (id, platform, name)
             select n, 'paper', 'account-' || n from generate_series(1, $1) n",
        )
        .bind(count)
        .execute(&self.admin)
        .await
        .unwrap();
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.admin).await.unwrap()
    }

    /// Owner of every row.
    async fn owners(&self) -> BTreeMap<i64, Option<String>> {
        let rows: Vec<(i64, Option<String>)> =
            sqlx::query_as("select id, node_id from trading_accounts")
                .fetch_all(&self.admin)
                .await
                .unwrap();
        rows.into_iter().collect()
    }
}

/// Looks until the condition holds; a test that looks for longer than [`PATIENCE`] has failed.
async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let limit = tokio::time::Instant::now() + PATIENCE;
    while !holds().await {
        assert!(tokio::time::Instant::now() < limit, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
