//! Two nodes, a few accounts and their tables, in memory or in Postgres.

use lockstep::writer::memory::{MemoryDatabase, MemoryRows};
use lockstep::writer::store::PgRows;
use lockstep::writer::*;
use reconcile::{Pair, PairId, PairState};
use schemas::*;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection, Row as _};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use uuid::Uuid;

/// Longest that anything in these tests may take; only a fault comes near it.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Followers, each with a link of the same number from master 1.
pub(crate) const FOLLOWERS: std::ops::RangeInclusive<u64> = 11..=20;

/// S9, at the only instant that counts: at the commit, a live row carries the token under which
/// its node owns the account. A breach ends the transaction with an error that nothing retries
/// away, in every test of this folder (H44, H45, H46).
const AUDIT: &str = "
    create function audit_owner_at_commit() returns trigger language plpgsql as $$
    begin
        if new.state in ('sending', 'open', 'closing') and not exists (
            select from trading_accounts t where t.id = new.follower_id
                and t.node_id = new.node_id and t.lease_token = new.lease_token) then
            raise exception 'S9: pair % committed by % under token %, which is not the owner''s',
                new.id, new.node_id, new.lease_token
                using errcode = 'check_violation', constraint = 'audit_owner_at_commit';
        end if;
        return null;
    end
    $$;
    create constraint trigger audit_owner_at_commit after insert or update on pairs
        deferrable initially deferred for each row execute function audit_owner_at_commit();";

/// What the suite needs of a place where rows go.
pub(crate) trait World {
    type Rows: RowSink;

    /// The tables as this node writes them.
    fn rows(&self, node: &str) -> Self::Rows;
    async fn set_owner(&self, account: u64, node: &str, token: u64);
    async fn lock(&self, account: u64);
    async fn unlock(&self, account: u64);
    async fn set_away(&self);
    /// Session, token and number of positions of the stored status.
    async fn status(&self, account: u64) -> Option<(String, u64, Option<u32>)>;
    async fn count_events(&self) -> usize;

    /// Every stored pair of a follower; ended ones too.
    async fn pairs(&self, follower: u64) -> Vec<PairRow> {
        let loaded = self.rows("reader").load_pairs(account(follower)).await.unwrap();
        let mut rows = loaded.live;
        rows.extend(loaded.ended);
        rows.sort_by_key(|row| (row.pair.master_ticket, row.has_ended(), row.rank()));
        rows
    }

    /// A writer of this node, running.
    fn writer(&self, node: &str) -> Writer {
        let (writer, task) = Writer::new(WriterConfig::default());
        tokio::spawn(task.run(Arc::new(self.rows(node))));
        writer
    }

    /// Stores rows directly, and returns the outcome of each, by kind and key.
    async fn store(&self, node: &str, rows: impl IntoIterator<Item = Row>) -> Vec<RowOutcome> {
        let rows_of_node = self.rows(node);
        let mut outcomes = Vec::new();
        for batch in batch::Batch::sorted(rows) {
            outcomes.extend(rows_of_node.persist(&batch).await.unwrap());
        }
        outcomes
    }
}

pub(crate) struct MemoryWorld(MemoryDatabase);

impl MemoryWorld {
    pub(crate) async fn start() -> Self {
        let database = MemoryDatabase::default();
        for id in FOLLOWERS {
            database.add_link(link(id), account(id));
            database.set_owner(account(id), node("a"), token(1));
        }
        Self(database)
    }
}

impl World for MemoryWorld {
    type Rows = MemoryRows;

    fn rows(&self, name: &str) -> MemoryRows {
        MemoryRows::new(self.0.clone(), node(name))
    }

    async fn set_owner(&self, id: u64, name: &str, number: u64) {
        self.0.set_owner(account(id), node(name), token(number));
    }

    async fn lock(&self, id: u64) {
        self.0.set_locked(account(id), true);
    }

    async fn unlock(&self, id: u64) {
        self.0.set_locked(account(id), false);
    }

    async fn set_away(&self) {
        self.0.set_away(true);
    }

    async fn status(&self, id: u64) -> Option<(String, u64, Option<u32>)> {
        self.0.status(account(id)).map(|s| (s.session.to_owned(), s.token.get(), s.positions_open))
    }

    async fn count_events(&self) -> usize {
        self.0.events().len()
    }
}

pub(crate) struct PostgresWorld {
    pub(crate) url: String,
    /// Transactions that hold a lock on an account row.
    locks: Mutex<BTreeMap<u64, PgConnection>>,
}

impl PostgresWorld {
    pub(crate) async fn start() -> Self {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("writer").await.unwrap();
        let world = Self { url, locks: Mutex::default() };
        let mut admin = world.connect().await;
        let migrations = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");
        let migrator =
            sqlx::migrate::Migrator::new(std::path::Path::new(migrations)).await.unwrap();
        migrator.run(&mut admin).await.unwrap();
        sqlx::raw_sql(AUDIT).execute(&mut admin).await.unwrap();
        let accounts =
            "insert into trading_accounts (id, platform, name) values (1, 'paper', 'master')";
        sqlx::query(accounts).execute(&mut admin).await.unwrap();
        for id in FOLLOWERS {
            let account = "insert into trading_accounts (id, platform, name, node_id, lease_token, lease_until)
                values ($1, 'paper', 'follower-' || $1, 'a', 1, now() + interval '1 hour')";
            sqlx::query(account).bind(id as i64).execute(&mut admin).await.unwrap();
            let link =
                "insert into copy_links (id, master_id, follower_id, magic) values ($1, 1, $1, $1)";
            sqlx::query(link).bind(id as i64).execute(&mut admin).await.unwrap();
        }
        world
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    pub(crate) fn pg_rows(&self, name: &str) -> PgRows {
        PgRows::new(self.url.parse::<PgConnectOptions>().unwrap(), node(name))
    }

    pub(crate) async fn run(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(&mut self.connect().await).await.unwrap();
    }

    pub(crate) async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&mut self.connect().await).await.unwrap()
    }
}

impl World for PostgresWorld {
    type Rows = PgRows;

    fn rows(&self, name: &str) -> PgRows {
        self.pg_rows(name)
    }

    async fn set_owner(&self, id: u64, name: &str, number: u64) {
        let sql = "update trading_accounts set node_id = $2, lease_token = $3 where id = $1";
        let query = sqlx::query(sql).bind(id as i64).bind(name).bind(number as i64);
        query.execute(&mut self.connect().await).await.unwrap();
    }

    async fn lock(&self, id: u64) {
        let mut connection = self.connect().await;
        sqlx::query("begin").execute(&mut connection).await.unwrap();
        let sql = "select 1 from trading_accounts where id = $1 for update";
        sqlx::query(sql).bind(id as i64).execute(&mut connection).await.unwrap();
        self.locks.lock().await.insert(id, connection);
    }

    async fn unlock(&self, id: u64) {
        let mut connection = self.locks.lock().await.remove(&id).unwrap();
        sqlx::query("rollback").execute(&mut connection).await.unwrap();
    }

    async fn set_away(&self) {
        self.run("alter table pairs rename to pairs_away").await;
    }

    async fn status(&self, id: u64) -> Option<(String, u64, Option<u32>)> {
        let sql =
            "select session, lease_token, positions_open from account_status where account_id = $1";
        let query = sqlx::query(sql).bind(id as i64);
        let row = query.fetch_optional(&mut self.connect().await).await.unwrap()?;
        let token: i64 = row.get("lease_token");
        let positions: Option<i32> = row.get("positions_open");
        Some((row.get("session"), token as u64, positions.map(|n| n as u32)))
    }

    async fn count_events(&self) -> usize {
        self.number("select count(*) from copy_events").await as usize
    }
}

pub(crate) fn account(id: u64) -> AccountId {
    AccountId::new(id).unwrap()
}

pub(crate) fn link(id: u64) -> LinkId {
    LinkId::new(id).unwrap()
}

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(crate) fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

pub(crate) fn ticket(number: u64) -> FollowerTicket {
    FollowerTicket::new(number).unwrap()
}

/// A pair of a follower and its link, version 1 under token 1.
pub(crate) fn pair(
    follower: u64,
    master_ticket: u64,
    state: PairState,
    copy: Option<u64>,
) -> PairRow {
    let master_ticket = MasterTicket::new(master_ticket).unwrap();
    let pair = Pair {
        id: PairId::new(link(follower), master_ticket, None),
        link: link(follower),
        master_ticket,
        state,
        is_pending: false,
        follower_ticket: copy.map(ticket),
        symbol: Symbol::new("EURUSD").unwrap(),
        side: Side::Buy,
        master_side: Side::Buy,
        lots_at_open: None,
        master_lots_at_open: "1.5".parse().unwrap(),
        sent_at: None,
        reason: None,
        rejected: Default::default(),
        version: 1,
    };
    PairRow {
        pair,
        follower: account(follower),
        token: token(1),
        opened_at: None,
        closed_at: None,
        close_price: None,
        volumes: None,
    }
}

pub(crate) fn versioned(row: PairRow, number: u64, version: u64) -> PairRow {
    PairRow { token: token(number), pair: Pair { version, ..row.pair }, ..row }
}

pub(crate) fn event(follower: u64) -> CopyEvent {
    CopyEvent {
        id: Uuid::new_v4(),
        at: Micros(1_790_000_000_000_001),
        token: token(1),
        link: link(follower),
        follower: account(follower),
        master_ticket: MasterTicket::new(5).unwrap(),
        follower_ticket: Some(ticket(7)),
        action: "partial_close",
        outcome: EventOutcome::Rejected,
        reason: Some("requote\u{0}".to_owned()),
        symbol: Some(Symbol::new("EURUSD").unwrap()),
        lots: Some("0.01".parse().unwrap()),
        price: Some("1.08765".parse().unwrap()),
        own_time: Some(Duration::from_micros(180)),
        broker_time: Some(Duration::from_millis(130)),
    }
}

pub(crate) fn status(id: u64, session: &'static str, number: u64) -> AccountStatus {
    AccountStatus {
        account: account(id),
        token: token(number),
        session,
        detail: None,
        funds: None,
        positions_open: Some(3),
        pendings_open: None,
        at: Micros(1_790_000_000_000_000),
    }
}

/// Waits until no row of the account is pending.
pub(crate) async fn flush(writer: &Writer, id: u64) {
    tokio::time::timeout(LIMIT, writer.flush_account(account(id))).await.unwrap().unwrap();
}
