//! The ownership rows: one cycle is one transaction.
//!
//! Decides: nothing; it does what a [`CycleRequest`] says and reads back what is true.
//! In: [`CycleRequest`]. Out: [`CycleReply`], only after the commit was answered; [`LeaseError`].
//!
//! Invariants:
//! 1. The connection is not from a pool, and it is moved into the future of the cycle. When the
//!    limit passes, future and connection go together: the socket closes, the server rolls back,
//!    and no half-begun transaction waits for the next renewal to fall into it (M3, H2). The same
//!    holds if the caller drops the future, and after every error.
//! 2. What is written uses `clock_timestamp()`, what is compared uses `now()`, the earlier of the
//!    two: both err towards a longer lease (M2).
//! 3. Every statement names the platform or the node, and renew and release name the token
//!    (H15, B12, B21).
//! 4. A row that somebody else locks costs only itself (M4). Renewals are one plain update, which
//!    waits for such a row; after [`LOCK_WAIT_SHARE`] of the limit the cycle begins anew and locks its
//!    rows first, passing by what it cannot have, until it has them all again. To lock every row of
//!    every renewal took half of the cycle's time and a third of its WAL.
//! 5. A claim takes at most what it asked for (M1); more is an error and is rolled back.
//! 6. An answer from a transaction older than [`TRANSACTION_AGE_MAX`] is refused before commit.
//! 7. A server of a lower timeline than one that was seen or heard of is left before anything begins
//!    (H14).
//!
//! Renewal locks rows `FOR NO KEY UPDATE`, so that a writer that fences its rows with
//! `FOR KEY SHARE` does not cost a renewal; claim and release lock `FOR UPDATE`, so that they pass
//! by an account whose old owner's rows are just being committed (M6).
//!
//! Not covered: a server that loses committed renewals (`doubt.rs` freezes
//! claims after a change of timeline, which makes that unlikely and not impossible).

use super::claim::{claim_rows, owners};
use super::cycle::{CycleReply, CycleRequest, DatabaseMark, OwnedRow, TenureKey};
use super::share::{Fleet, good_after};
use super::{CHANNEL, LET_GO};
use crate::database::{self, DatabaseError};
use schemas::{AccountId, IdError, Micros, Token};
use sqlx::postgres::types::PgInterval;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection, Row as _};
use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;
use time::OffsetDateTime;

/// A cycle whose transaction is older than this when it reads back is refused (H2).
pub const TRANSACTION_AGE_MAX: Duration = Duration::from_secs(1);

/// How much of a cycle's limit is waited for one row lock: 100 ms by default.
const LOCK_WAIT_SHARE: f64 = 0.02;

/// Unowned accounts are counted up to this number, so that counting costs the same in any table.
const UNOWNED_COUNT_MAX: i64 = 1_000;

/// Where ownership is kept. One real and one in-memory version; both pass the same suite.
pub trait OwnershipStore: Send + 'static {
    /// Runs one cycle to its commit, within the limit the store was made with.
    ///
    /// Errors: [`LeaseError`]; nothing is known about the outcome then, and nothing may be taken
    /// as confirmed. The next cycle reads back what is true.
    fn cycle(
        &mut self,
        request: &CycleRequest,
    ) -> impl Future<Output = Result<CycleReply, LeaseError>> + Send;
}

/// Why a cycle was not confirmed. The caller keeps its old deadlines and tries again.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The cycle took longer than its limit; its connection is closed.
    #[error("the lease cycle was not answered within {limit:?}")]
    Timeout {
        /// The limit.
        limit: Duration,
    },
    /// No connection.
    #[error("the lease connection could not be made")]
    Connect(#[source] DatabaseError),
    /// A statement failed; its connection is closed.
    #[error("the lease cycle failed at {step}")]
    Query {
        /// Which statement.
        step: &'static str,
        /// What the server or the connection said.
        #[source]
        source: sqlx::Error,
    },
    /// The transaction was open for too long; it was rolled back.
    #[error("the lease transaction was {age:?} old, more than {TRANSACTION_AGE_MAX:?}")]
    TransactionTooOld {
        /// Its age when it read back.
        age: Duration,
    },
    /// More rows were claimed than asked for; rolled back. A bug, here or in the server's plan.
    #[error("the claim took {claimed} rows, {rows_max} were asked for")]
    ClaimedTooMuch {
        /// Rows claimed.
        claimed: usize,
        /// Rows asked for.
        rows_max: u32,
    },
    /// Not as many rows were renewed as are this node's when it reads back; rolled back. A bug, here
    /// or in the server's plan.
    #[error("{rows} rows were renewed, {owned} of those asked for are this node's")]
    RenewedOthers {
        /// Rows renewed.
        rows: u64,
        /// Rows asked for that are its own when it reads back.
        owned: usize,
    },
    /// A row holds a value that is no id.
    #[error("an account row cannot be read")]
    BadRow(#[from] IdError),
    /// The server has a lower timeline than one that was seen before: it was demoted, and what it
    /// commits holds nowhere else (H14). Rolled back; the connection is closed.
    #[error("the server is of timeline {timeline}, and {seen} was seen: it is not the primary")]
    OldTimeline {
        /// The server's.
        timeline: u32,
        /// The highest that was seen or heard of.
        seen: u32,
    },
    /// A connection pooler hands out server connections by transaction (B17): the lease needs a
    /// connection of its own. Give the node the database's own address.
    #[error("the database URL leads to a pooler in transaction mode")]
    Pooler,
}

impl LeaseError {
    schemas::words! {
        /// The word used in metrics.
        pub fn as_str(&self) in WORDS {
            LeaseError::Timeout { .. } => "timeout",
            LeaseError::Connect(_) => "unreachable",
            LeaseError::Query { .. } => "failed",
            LeaseError::TransactionTooOld { .. } => "too_old",
            LeaseError::ClaimedTooMuch { .. } => "claimed_too_much",
            LeaseError::RenewedOthers { .. } => "renewed_others",
            LeaseError::BadRow(_) => "bad_row",
            LeaseError::OldTimeline { .. } => "old_timeline",
            LeaseError::Pooler => "pooler",
        }
    }
}

/// Ownership in Postgres.
#[derive(Debug)]
pub struct PostgresOwnership {
    options: PgConnectOptions,
    query_limit: Duration,
    /// Present between two cycles that went well.
    session: Option<Session>,
    pooler_ruled_out: bool,
    /// Somebody held a row in the last cycle: it is passed by.
    passes_by: bool,
}

/// One connection to one server.
#[derive(Debug)]
struct Session {
    connection: PgConnection,
    /// Read once: a promotion ends the connection.
    timeline: Option<u32>,
}

impl PostgresOwnership {
    /// A store that connects at its first cycle. `query_limit` bounds a whole cycle.
    pub fn new(url: &str, query_limit: Duration) -> Result<Self, DatabaseError> {
        let options = session_options(url, query_limit)?;
        Ok(Self { options, query_limit, session: None, pooler_ruled_out: false, passes_by: false })
    }
}

/// What a lease connection asks of its server.
///
/// The server gives up before the node does, so that a statement which waits is rolled back by an
/// error and not by a closed socket; a row lock is waited for least of all. No statement here ever
/// wants a table from end to end: with fresh statistics the planner probes an owner's lease that
/// way all the same, because it expects to meet one of its rows soon.
pub(crate) fn session_options(
    url: &str,
    query_limit: Duration,
) -> Result<PgConnectOptions, DatabaseError> {
    Ok(database::options(url, "lease")?.options([
        ("statement_timeout", milliseconds(query_limit.mul_f64(0.8))),
        ("lock_timeout", milliseconds(query_limit.mul_f64(LOCK_WAIT_SHARE))),
        ("idle_in_transaction_session_timeout", milliseconds(query_limit)),
        ("enable_seqscan", "off".to_owned()),
    ]))
}

fn milliseconds(duration: Duration) -> String {
    format!("{}ms", duration.as_millis().max(1))
}

impl OwnershipStore for PostgresOwnership {
    async fn cycle(&mut self, request: &CycleRequest) -> Result<CycleReply, LeaseError> {
        let limit = self.query_limit;
        let session = self.session.take();
        let options = self.options.clone();
        let rule_pooler_out = !self.pooler_ruled_out;
        let passed_by = self.passes_by;
        // The session lives in this future and nowhere else: see invariant 1.
        let attempt = async move {
            let mut session = match session {
                Some(session) => session,
                None => open(&options, rule_pooler_out).await?,
            };
            if let (Some(timeline), Some(seen)) = (session.timeline, request.timeline_min)
                && timeline < seen
            {
                return Err(LeaseError::OldTimeline { timeline, seen });
            }
            let reply = match passed_by {
                true => None,
                false => run(&mut session, request, Way::WaitForRows).await?,
            };
            let passes_by = reply.is_none();
            let reply = match reply {
                Some(reply) => reply,
                None => run(&mut session, request, Way::PassRowsBy)
                    .await?
                    .expect("only the other way is given up"),
            };
            let passes_by = passes_by && reply.renewed.len() < request.renew.len();
            Ok::<_, LeaseError>((session, reply, passes_by))
        };
        let (session, reply, passes_by) = tokio::time::timeout(limit, attempt)
            .await
            .map_err(|_elapsed| LeaseError::Timeout { limit })??;
        self.session = Some(session);
        self.pooler_ruled_out = true;
        self.passes_by = passes_by;
        Ok(reply)
    }
}

pub(super) fn failed(step: &'static str) -> impl Fn(sqlx::Error) -> LeaseError {
    move |source| LeaseError::Query { step, source }
}

async fn open(options: &PgConnectOptions, rule_pooler_out: bool) -> Result<Session, LeaseError> {
    let unreachable = |error| LeaseError::Connect(DatabaseError::Connect(error));
    let mut connection = options.connect().await.map_err(unreachable)?;
    if rule_pooler_out {
        let mut other = options.connect().await.map_err(unreachable)?;
        if leads_to_pooler(&mut connection, &mut other).await? {
            return Err(LeaseError::Pooler);
        }
    }
    // A lease that the server may forget is no lease; a stricter setting is left alone.
    sqlx::query(
        "select set_config('synchronous_commit', 'on', false)
         where current_setting('synchronous_commit') = 'off'",
    )
    .execute(&mut connection)
    .await
    .map_err(failed("set up"))?;
    // Some managed servers do not offer these functions: then there is no timeline to watch.
    let timeline: Option<i32> = sqlx::query_scalar(
        "select ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int",
    )
    .fetch_one(&mut connection)
    .await
    .unwrap_or(None);
    Ok(Session { connection, timeline: timeline.and_then(|number| u32::try_from(number).ok()) })
}

/// Whether two connections of one URL share server processes: a pooler hands them out by transaction.
pub(crate) async fn leads_to_pooler(
    connection: &mut PgConnection,
    other: &mut PgConnection,
) -> Result<bool, LeaseError> {
    let pids =
        (backend_pid(connection).await?, backend_pid(other).await?, backend_pid(connection).await?);
    Ok(pids.0 == pids.1 || pids.0 != pids.2)
}

/// Asked without a prepared statement: through a pooler that would fail with an error that speaks
/// of the statement and not of the pooler.
async fn backend_pid(connection: &mut PgConnection) -> Result<i32, LeaseError> {
    let failed = failed("pooler probe");
    let row = sqlx::raw_sql("select pg_backend_pid()").fetch_one(connection).await;
    row.and_then(|row| row.try_get(0)).map_err(failed)
}

/// How rows that somebody else locks are renewed: invariant 4.
#[derive(Clone, Copy)]
enum Way {
    WaitForRows,
    PassRowsBy,
}

/// Runs the transaction; nothing, and nothing done, where a row of the renewal is held by somebody.
async fn run(
    session: &mut Session,
    request: &CycleRequest,
    way: Way,
) -> Result<Option<CycleReply>, LeaseError> {
    let mut transaction = session
        .connection
        .begin_with("begin isolation level read committed read write")
        .await
        .map_err(failed("begin"))?;
    let released = release(&mut transaction, request).await?;
    let Some(renewal) = renew(&mut transaction, request, way).await? else {
        transaction.rollback().await.map_err(failed("roll back"))?;
        return Ok(None);
    };
    let_go(&mut transaction, request).await?;
    let claimed = match &request.claim {
        Some(claim) => claim_rows(&mut transaction, request, claim, session.timeline).await?,
        None => Vec::new(),
    };
    let owned = read_back(&mut transaction, request).await?;
    let renewed = renewal.renewed(request, &owned)?;
    announce(&mut transaction, request, owned.len()).await?;
    let summary = summarise(&mut transaction, request).await?;
    if summary.age > TRANSACTION_AGE_MAX {
        return Err(LeaseError::TransactionTooOld { age: summary.age });
    }
    transaction.commit().await.map_err(failed("commit"))?;
    Ok(Some(CycleReply {
        released,
        renewed,
        claimed,
        owned,
        next_expiry: summary.next_expiry,
        unowned: summary.unowned,
        orphaned: summary.orphaned,
        unowned_for: summary.unowned_for,
        fleet: summary.fleet,
        database: DatabaseMark { now: summary.now, timeline: session.timeline },
    }))
}

const RELEASE: &str = "
with locked as materialized (
    select a.id
    from unnest($1::bigint[], $2::bigint[]) as mine (id, token)
    join trading_accounts a on a.id = mine.id and a.lease_token = mine.token
    where a.node_id = $3
    order by a.id
    for update of a skip locked
)
update trading_accounts a
set node_id = null, lease_until = '-infinity', starts = greatest(a.starts - 1, 0),
    free_since = clock_timestamp()
from locked
where a.id = locked.id
returning a.id";

async fn release(
    transaction: &mut PgConnection,
    request: &CycleRequest,
) -> Result<Vec<AccountId>, LeaseError> {
    if request.release.is_empty() {
        return Ok(Vec::new());
    }
    let (ids, tokens) = columns(&request.release);
    let rows: Vec<i64> = sqlx::query_scalar(RELEASE)
        .bind(ids)
        .bind(tokens)
        .bind(request.node.as_str())
        .fetch_all(transaction)
        .await
        .map_err(failed("release"))?;
    Ok(rows.into_iter().map(AccountId::from_i64).collect::<Result<_, _>>()?)
}

macro_rules! renewed {
    () => {
        "update trading_accounts a
        set lease_until = clock_timestamp() + $4,
            starts = case when a.tenure_since < clock_timestamp() - $5 then 0 else a.starts end"
    };
}

/// The node's rows are read in the table's order and looked up among the asked ones: to look up each
/// asked row in the table takes a third more, and to name 10,000 renewed ones again as much. `is true`
/// keeps the planner from turning it round.
const RENEW: &str = concat!(
    renewed!(),
    " where a.platform = any ($6) and a.node_id = $3
      and ((a.id, a.lease_token) in (select * from unnest($1::bigint[], $2::bigint[]))) is true"
);

const RENEW_PASSING_BY: &str = concat!(
    "with locked as materialized (
        select a.id
        from unnest($1::bigint[], $2::bigint[]) as mine (id, token)
        join trading_accounts a on a.id = mine.id and a.lease_token = mine.token
        where a.node_id = $3
        order by a.id
        for no key update of a skip locked
    ) ",
    renewed!(),
    " from locked
    where a.id = locked.id
    returning a.id"
);

/// The SQLSTATE of a lock that was not had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// What a renewal said of itself.
enum Renewal {
    /// Every asked row that is still this node's under its token was renewed; so many.
    All(u64),
    /// These were; others are held by somebody.
    Some(Vec<AccountId>),
}

impl Renewal {
    /// The accounts, once it is read back who owns what.
    fn renewed(
        self,
        request: &CycleRequest,
        owned: &[OwnedRow],
    ) -> Result<Vec<AccountId>, LeaseError> {
        let rows = match self {
            Renewal::Some(accounts) => return Ok(accounts),
            Renewal::All(rows) => rows,
        };
        let asked: BTreeSet<TenureKey> = request.renew.iter().copied().collect();
        let is_asked = |row: &&OwnedRow| asked.contains(&row.tenure);
        let renewed: Vec<AccountId> =
            owned.iter().filter(is_asked).map(|row| row.tenure.account).collect();
        if renewed.len() as u64 != rows {
            return Err(LeaseError::RenewedOthers { rows, owned: renewed.len() });
        }
        Ok(renewed)
    }
}

/// Renews; nothing where a row is held by somebody, and the transaction is void.
async fn renew(
    transaction: &mut PgConnection,
    request: &CycleRequest,
    way: Way,
) -> Result<Option<Renewal>, LeaseError> {
    if request.renew.is_empty() {
        return Ok(Some(Renewal::Some(Vec::new())));
    }
    let (ids, tokens) = columns(&request.renew);
    let (node, lease) = (request.node.as_str(), interval(request.lease));
    let good_after = interval(good_after(request.lease));
    match way {
        Way::WaitForRows => {
            let query = sqlx::query(RENEW).bind(ids).bind(tokens).bind(node).bind(lease);
            let query = query.bind(good_after).bind(&request.platforms);
            match query.execute(transaction).await {
                Ok(done) => Ok(Some(Renewal::All(done.rows_affected()))),
                Err(sqlx::Error::Database(error))
                    if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) =>
                {
                    Ok(None)
                }
                Err(error) => Err(failed("renew")(error)),
            }
        }
        // It waits for no row: a lock that is not had is the table's.
        Way::PassRowsBy => {
            let query = sqlx::query_scalar(RENEW_PASSING_BY).bind(ids).bind(tokens).bind(node);
            let rows: Result<Vec<i64>, _> =
                query.bind(lease).bind(good_after).fetch_all(transaction).await;
            let accounts = rows.map_err(failed("renew"))?.into_iter().map(AccountId::from_i64);
            Ok(Some(Renewal::Some(accounts.collect::<Result<_, _>>()?)))
        }
    }
}

/// Rows that their owner has abandoned get an owner of their own once they have run out: a claim
/// looks at one row of each owner, and one that is renewed would hide them.
const LET_GO_ROWS: &str = "
with locked as materialized (
    select a.id
    from unnest($1::bigint[], $2::bigint[]) as mine (id, token)
    join trading_accounts a on a.id = mine.id and a.lease_token = mine.token
    where a.node_id = $3 and a.lease_until < now()
    order by a.id
    for update of a skip locked
), gone as (
    update trading_accounts a set node_id = a.node_id || $4
    from locked
    where a.id = locked.id
    returning a.platform
)
select count(pg_notify($5, platform)) from (select distinct platform from gone) of_platforms";

async fn let_go(transaction: &mut PgConnection, request: &CycleRequest) -> Result<(), LeaseError> {
    if request.let_go.is_empty() {
        return Ok(());
    }
    let (ids, tokens) = columns(&request.let_go);
    sqlx::query(LET_GO_ROWS)
        .bind(ids)
        .bind(tokens)
        .bind(request.node.as_str())
        .bind(LET_GO)
        .bind(CHANNEL)
        .execute(transaction)
        .await
        .map_err(failed("let go"))?;
    Ok(())
}

async fn read_back(
    transaction: &mut PgConnection,
    request: &CycleRequest,
) -> Result<Vec<OwnedRow>, LeaseError> {
    let rows: Vec<(i64, i64, String, bool)> = sqlx::query_as(
        "select a.id, a.lease_token, a.platform, a.enabled
         from trading_accounts a
         where a.platform = any ($1) and a.node_id = $2",
    )
    .bind(&request.platforms)
    .bind(request.node.as_str())
    .fetch_all(transaction)
    .await
    .map_err(failed("read back"))?;
    rows.into_iter()
        .map(|(id, token, platform, enabled)| {
            Ok(OwnedRow { tenure: tenure(id, token)?, platform, enabled })
        })
        .collect()
}

/// One row per process; those of processes that are long gone go with it.
const ANNOUNCE: &str = "
with gone as (
    delete from lease_nodes
    where node_id in (
        select n.node_id from lease_nodes n
        where n.alive_until < now() - interval '1 hour' and n.node_id <> $1
        for update skip locked
    )
)
insert into lease_nodes (node_id, platforms, capacity, owned, alive_until)
values ($1, $2, $3, $4, clock_timestamp() + $5)
on conflict (node_id) do update
set platforms = excluded.platforms, capacity = excluded.capacity, owned = excluded.owned,
    alive_until = excluded.alive_until";

async fn announce(
    transaction: &mut PgConnection,
    request: &CycleRequest,
    owned: usize,
) -> Result<(), LeaseError> {
    sqlx::query(ANNOUNCE)
        .bind(request.node.as_str())
        .bind(&request.platforms)
        .bind(i32::try_from(request.capacity).unwrap_or(i32::MAX))
        .bind(i32::try_from(owned).unwrap_or(i32::MAX))
        .bind(interval(request.lease))
        .execute(transaction)
        .await
        .map_err(failed("announce"))?;
    Ok(())
}

struct Summary {
    age: Duration,
    now: Micros,
    next_expiry: Option<Duration>,
    unowned: u32,
    orphaned: u32,
    unowned_for: Option<Duration>,
    fleet: Fleet,
}

/// Microseconds are counted in the database: a floating number of seconds would lose them.
const SUMMARY: &str = concat!("
with recursive ", owners!(), ", probes as materialized (
    select o.platform, o.node_id, probe.lease_until
    from owners o, lateral (
        select a.lease_until from trading_accounts a
        where a.platform = o.platform and a.node_id = o.node_id
        limit 1
    ) probe
    where o.node_id <> $2
), next_expiry as (
    select min(lease_until) as at from probes where lease_until >= now()
), unowned as (
    select count(*) as rows, min(since) as since
    from (
        select a.free_since as since from trading_accounts a
        where a.platform = any ($1) and a.enabled and a.node_id is null
        limit $3
    ) some_rows
), orphaned as (
    select count(*) as rows, min(since) as since
    from (
        select of_dead.since
        from probes p, lateral (
            select a.lease_until as since from trading_accounts a
            where a.platform = p.platform and a.node_id = p.node_id
              and a.enabled and a.lease_until < now()
            limit $3
        ) of_dead
        where p.lease_until < now()
        limit $3
    ) some_rows
), fleet as (
    select count(*) as nodes, coalesce(sum(n.owned), 0)::bigint as accounts,
        min(n.owned) filter (where n.node_id <> $2 and n.owned < n.capacity) as lowest_peer
    from lease_nodes n
    where n.platforms && $1 and n.capacity > 0 and n.alive_until >= now()
)
select
    (extract(epoch from clock_timestamp() - transaction_timestamp()) * 1000000)::bigint as age_us,
    (extract(epoch from transaction_timestamp()) * 1000000)::bigint as now_us,
    (extract(epoch from next_expiry.at - clock_timestamp()) * 1000000)::bigint as next_expiry_us,
    unowned.rows as unowned, orphaned.rows as orphaned,
    (extract(epoch from clock_timestamp() - nullif(least(unowned.since, orphaned.since), '-infinity'))
        * 1000000)::bigint as unowned_us,
    fleet.nodes, fleet.accounts, fleet.lowest_peer
from next_expiry, unowned, orphaned, fleet");

async fn summarise(
    transaction: &mut PgConnection,
    request: &CycleRequest,
) -> Result<Summary, LeaseError> {
    let row = sqlx::query(SUMMARY)
        .bind(&request.platforms)
        .bind(request.node.as_str())
        .bind(UNOWNED_COUNT_MAX)
        .fetch_one(transaction)
        .await
        .map_err(failed("summary"))?;
    let number = |column: &str| row.try_get::<i64, _>(column).map_err(failed("summary"));
    let maybe = |column: &str| row.try_get::<Option<i64>, _>(column).map_err(failed("summary"));
    let count = |number: i64| u32::try_from(number).unwrap_or(u32::MAX);
    // A clock that went back within the transaction shows as a negative age; that is no age at
    // all, and the next cycle notices the step.
    let positive = |us: i64| Duration::from_micros(u64::try_from(us).unwrap_or(0));
    let (unowned, orphaned) = (count(number("unowned")?), count(number("orphaned")?));
    let lowest_peer: Option<i32> = row.try_get("lowest_peer").map_err(failed("summary"))?;
    Ok(Summary {
        age: positive(number("age_us")?),
        now: Micros(number("now_us")?),
        next_expiry: maybe("next_expiry_us")?.map(positive),
        unowned,
        orphaned,
        unowned_for: maybe("unowned_us")?.map(positive),
        fleet: Fleet {
            nodes: count(number("nodes")?),
            accounts: count(number("accounts")?).saturating_add(unowned).saturating_add(orphaned),
            lowest_peer: lowest_peer.map(|owned| u32::try_from(owned).unwrap_or(0)),
        },
    })
}

pub(super) fn tenure(id: i64, token: i64) -> Result<TenureKey, IdError> {
    Ok(TenureKey { account: AccountId::from_i64(id)?, token: Token::from_i64(token)? })
}

fn columns(tenures: &[TenureKey]) -> (Vec<i64>, Vec<i64>) {
    tenures.iter().map(|key| (key.account.as_i64(), key.token.as_i64())).unzip()
}

pub(super) fn timestamp(at: Micros) -> OffsetDateTime {
    let nanoseconds = i128::from(at.0) * 1_000;
    OffsetDateTime::from_unix_timestamp_nanos(nanoseconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

pub(super) fn interval(duration: Duration) -> PgInterval {
    let microseconds = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    PgInterval { months: 0, days: 0, microseconds }
}
