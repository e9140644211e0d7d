//! The writer's tables in Postgres.
//!
//! In: a batch of one kind. Out: one outcome a row, or one error for the whole batch, of which
//! then nothing is stored: a statement is its own transaction.
//!
//! Invariants:
//! 1. A live pair or a status is stored only if, at commit, the account names this node and the
//!    row's token. The account row is locked `FOR KEY SHARE` inside the statement, so a claim
//!    (`FOR UPDATE SKIP LOCKED`) passes it over until the statement has committed.
//! 2. Account rows are locked in the order of their ids, and a row that somebody holds is not
//!    waited for: its own pair rows are `Busy`.
//! 3. Among live rows of a pair the highest (token, version) stays; an ended row stays for good.
//! 4. An ended row that names its ticket always goes in: it ends the live row if that has the
//!    same ticket or is not of a later token, and stands beside it otherwise. One without a
//!    ticket ends a live row only under the fence.
//! 5. A connection lives inside the future of the operation that uses it. A future that is
//!    dropped, at its time limit or by its caller, closes the connection with it.
//! 6. A read gives everything or an error; many ended rows are read in pages, each with its limit.
//!
//! Not covered: a statement that timed out may still commit; it is fenced and versioned, so
//! sending its rows again changes nothing.

use super::batch::{Batch, Fault, classify};
use super::error::WriteError;
use super::load;
use super::rows::{AccountStatus, CopyEvent, PairRow, RowKind, bounded_text};
use super::states::{ended_states, live_states};
use super::{LoadedPairs, RowOutcome, RowSink};
use reconcile::{EndReason, Pair};
use schemas::{AccountId, FollowerTicket, Lots, NodeId, Price};
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Postgres, Row as _, postgres::PgArguments, query::Query};
use std::collections::BTreeSet;
use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use uuid::Uuid;

/// Longest wait for an answer, connecting included (the query limit).
pub const STATEMENT_LIMIT: Duration = Duration::from_secs(5);
/// The server gives up before the node does, so that nothing runs on after a connection closed.
pub const SERVER_STATEMENT_LIMIT_MS: u32 = 4_000;
/// Longest wait for one lock; only link rows and the rows of the pairs themselves are waited for.
pub const SERVER_LOCK_LIMIT_MS: u32 = 500;
/// Partitions of copy events that exist beyond this month.
pub const PARTITIONS_AHEAD: i32 = 2;

macro_rules! pair_input {
    () => {
        "input as materialized (
            select * from unnest(
                $1::bigint[], $2::uuid[], $3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
                $8::text[], $9::boolean[], $10::text[], $11::text[], $12::text[], $13::numeric[],
                $14::numeric[], $15::numeric[], $16::text[], $17::boolean[], $18::numeric[],
                $19::numeric[], $20::numeric[], $21::numeric[], $22::bigint[], $23::bigint[],
                $24::bigint[], $25::bigint[], $26::bigint[], $29::numeric[], $30::numeric[])
            as r (n, id, apart_id, link_id, follower_id, master_ticket, follower_ticket,
                state, is_pending, symbol, side, master_side, lots_at_open,
                master_lots_at_open, close_price, reason, rejected_stops, rejected_stop_loss,
                rejected_take_profit, rejected_pending_price, rejected_target, sent_us, opened_us,
                closed_us, version, lease_token, lots_step, lots_min)
        )"
    };
}

// The lock is what makes the fence hold until the commit (invariant 1).
macro_rules! owned {
    ($accounts:literal, $node:literal) => {
        concat!(
            "owned as materialized (
                select t.id, t.lease_token
                from trading_accounts t
                where t.id = any(",
            $accounts,
            "::bigint[]) and t.node_id = ",
            $node,
            "
                order by t.id
                for key share of t skip locked
            )"
        )
    };
}

macro_rules! instant {
    ($column:literal) => {
        concat!("timestamptz 'epoch' + ", $column, " * interval '1 microsecond'")
    };
}

// What an outcome is told from. Account and pair are looked at only for what was not written: a join
// would read the whole table of pairs where it is not large.
macro_rules! pair_outcomes_from {
    () => {
        "
    from input i
    left join written w on w.id = i.id
    left join owned o on o.id = i.follower_id and o.lease_token = i.lease_token
    left join lateral (
        select t.id from trading_accounts t
        where o.id is null and t.id = i.follower_id and t.lease_token = i.lease_token and t.node_id = $28
        limit 1
    ) t on true
    left join lateral (
        select p.state, p.follower_ticket from pairs p where w.id is null and p.id = i.id limit 1
    ) p on true"
    };
}

macro_rules! pair_columns {
    () => {
        "(id, link_id, follower_id, master_ticket, follower_ticket, state, is_pending, symbol, side,
          master_side, lots_at_open, master_lots_at_open, close_price, reason, rejected_stops,
          rejected_stop_loss, rejected_take_profit, rejected_pending_price, rejected_target,
          sent_at, opened_at, closed_at, version, lease_token, node_id, lots_step, lots_min)"
    };
}

macro_rules! pair_values {
    ($id:literal) => {
        concat!(
            $id,
            ", i.link_id, i.follower_id, i.master_ticket, i.follower_ticket, i.state, i.is_pending,
            i.symbol, i.side, i.master_side, i.lots_at_open, i.master_lots_at_open, i.close_price,
            i.reason, i.rejected_stops, i.rejected_stop_loss, i.rejected_take_profit,
            i.rejected_pending_price, i.rejected_target, ",
            instant!("i.sent_us"),
            ", ",
            instant!("i.opened_us"),
            ", ",
            instant!("i.closed_us"),
            ", i.version, i.lease_token, $28, i.lots_step, i.lots_min"
        )
    };
}

const LIVE: &str = concat!(
    "with ", pair_input!(), ", ", owned!("$27", "$28"), ",
    written as (
        insert into pairs ", pair_columns!(), "
        select ", pair_values!("i.id"), "
        from input i join owned o on o.id = i.follower_id and o.lease_token = i.lease_token
        order by i.id
        on conflict (id) do update set
            follower_ticket = excluded.follower_ticket, state = excluded.state,
            is_pending = excluded.is_pending, symbol = excluded.symbol, side = excluded.side,
            master_side = excluded.master_side, rejected_stops = excluded.rejected_stops,
            rejected_stop_loss = excluded.rejected_stop_loss,
            rejected_take_profit = excluded.rejected_take_profit,
            rejected_pending_price = excluded.rejected_pending_price,
            rejected_target = excluded.rejected_target,
            lots_at_open = excluded.lots_at_open, master_lots_at_open = excluded.master_lots_at_open,
            reason = excluded.reason, sent_at = excluded.sent_at, opened_at = excluded.opened_at,
            closed_at = excluded.closed_at, close_price = excluded.close_price,
            version = excluded.version, lease_token = excluded.lease_token,
            node_id = excluded.node_id, written_at = clock_timestamp(),
            lots_step = coalesce(excluded.lots_step, pairs.lots_step),
            lots_min = coalesce(excluded.lots_min, pairs.lots_min)
        where pairs.state in ", live_states!(), "
          and (excluded.lease_token, excluded.version) > (pairs.lease_token, pairs.version)
        returning id
    )
    select i.n, case
        when w.id is not null then 'written'
        when o.id is null and t.id is not null then 'busy'
        when o.id is null then 'not_owner'
        when p.state in ", ended_states!(), " then 'ended'
        else 'already' end as outcome", pair_outcomes_from!()
);

// The end of a copy is a fact, whoever found it. What has no copy is a decision, and only the
// owner's counts: a late one would forbid the row of the copy that the next owner has opened.
const ENDED: &str = concat!(
    "with ",
    pair_input!(),
    ", ",
    owned!("$27", "$28"),
    ",
    written as (
        insert into pairs ",
    pair_columns!(),
    "
        select ",
    pair_values!("i.id"),
    "
        from input i left join owned o on o.id = i.follower_id and o.lease_token = i.lease_token
        where i.follower_ticket is not null or o.id is not null
        order by i.id
        on conflict (id) do update set
            follower_ticket = coalesce(excluded.follower_ticket, pairs.follower_ticket),
            state = excluded.state, is_pending = excluded.is_pending,
            lots_at_open = coalesce(excluded.lots_at_open, pairs.lots_at_open),
            reason = excluded.reason, sent_at = coalesce(excluded.sent_at, pairs.sent_at),
            opened_at = coalesce(excluded.opened_at, pairs.opened_at),
            closed_at = excluded.closed_at, close_price = excluded.close_price,
            version = greatest(excluded.version, pairs.version), lease_token = excluded.lease_token,
            node_id = excluded.node_id, written_at = clock_timestamp()
        where pairs.state in ",
    live_states!(),
    "
          and (excluded.follower_ticket is null
               or pairs.follower_ticket = excluded.follower_ticket
               or excluded.lease_token >= pairs.lease_token)
        returning id
    )
    select i.n, case
        when w.id is not null then 'written'
        when p.state in ",
    ended_states!(),
    "
             and (i.follower_ticket is null or i.follower_ticket = p.follower_ticket) then 'already'
        when i.follower_ticket is null and o.id is null and t.id is not null then 'busy'
        when i.follower_ticket is null and o.id is null then 'not_owner'
        else 'apart' end as outcome",
    pair_outcomes_from!()
);

/// For rows whose pair's own row belongs to something else: same facts, an id of their own.
const ENDED_APART: &str = concat!(
    "with ",
    pair_input!(),
    ",
    written as (
        insert into pairs ",
    pair_columns!(),
    "
        select ",
    pair_values!("i.apart_id"),
    "
        from input i
        where $27::bigint[] is not null
        on conflict (id) do nothing
        returning id
    )
    select i.n, case when w.id is not null then 'written' else 'already' end as outcome
    from input i left join written w on w.id = i.apart_id"
);

const STATUS: &str = concat!(
    "with input as materialized (
        select * from unnest(
            $1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::numeric[], $7::numeric[],
            $8::text[], $9::integer[], $10::integer[], $11::bigint[])
        as r (n, account_id, lease_token, session, detail, balance, equity,
            currency, positions_open, pendings_open, reported_us)
    ), ", owned!("$2", "$12"), ",
    written as (
        insert into account_status (account_id, lease_token, node_id, session, detail, balance, equity,
            currency, positions_open, pendings_open, reported_at)
        select i.account_id, i.lease_token, $12, i.session, i.detail, i.balance, i.equity,
            i.currency, i.positions_open, i.pendings_open, ", instant!("i.reported_us"), "
        from input i join owned o on o.id = i.account_id and o.lease_token = i.lease_token
        on conflict (account_id) do update set
            lease_token = excluded.lease_token, node_id = excluded.node_id, session = excluded.session,
            detail = excluded.detail, balance = excluded.balance, equity = excluded.equity,
            currency = excluded.currency, positions_open = excluded.positions_open,
            pendings_open = excluded.pendings_open, reported_at = excluded.reported_at,
            written_at = clock_timestamp()
        where excluded.lease_token >= account_status.lease_token
        returning account_id
    )
    select i.n, case
        when w.account_id is not null then 'written'
        when o.id is null and t.id is not null then 'busy'
        when o.id is null then 'not_owner'
        else 'already' end as outcome
    from input i
    left join written w on w.account_id = i.account_id
    left join owned o on o.id = i.account_id and o.lease_token = i.lease_token
    left join lateral (
        select t.id from trading_accounts t
        where o.id is null and t.id = i.account_id and t.lease_token = i.lease_token and t.node_id = $12
        limit 1
    ) t on true"
);

const EVENTS: &str = concat!(
    "with input as materialized (
        select n, id, ", instant!("at_us"), " as at, lease_token, link_id, follower_id, master_ticket,
            follower_ticket, action, outcome, reason, symbol, lots, price, own_time_us, broker_time_us
        from unnest(
            $1::bigint[], $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
            $8::bigint[], $9::text[], $10::text[], $11::text[], $12::text[], $13::numeric[], $14::numeric[],
            $15::bigint[], $16::bigint[])
        as r (n, id, at_us, lease_token, link_id, follower_id, master_ticket,
            follower_ticket, action, outcome, reason, symbol, lots, price,
            own_time_us, broker_time_us)
    ),
    written as (
        insert into copy_events (id, at, node_id, lease_token, link_id, follower_id, master_ticket,
            follower_ticket, action, outcome, reason, symbol, lots, price, own_time_us, broker_time_us)
        select i.id, i.at, $17, i.lease_token, i.link_id, i.follower_id, i.master_ticket,
            i.follower_ticket, i.action, i.outcome, i.reason, i.symbol, i.lots, i.price,
            i.own_time_us, i.broker_time_us
        from input i
        on conflict (id, at) do nothing
        returning id
    )
    select i.n, case when w.id is not null then 'written' else 'already' end as outcome
    from input i left join written w on w.id = i.id"
);

/// The tables in a Postgres, as one node sees them.
///
/// It holds two connections of its own, made when they are needed: one that writes, used by one
/// operation at a time, and one that reads, for which readers queue.
#[derive(Debug)]
pub struct PgRows {
    options: PgConnectOptions,
    node: NodeId,
    writing: tokio::sync::Mutex<Option<PgConnection>>,
    reading: tokio::sync::Mutex<Option<PgConnection>>,
    /// Of the server behind `writing`; 0 where it does not say.
    timeline: AtomicU32,
}

impl PgRows {
    /// Rows in the database of `options`, written in the name of `node`.
    pub fn new(options: PgConnectOptions, node: NodeId) -> Self {
        let options = options
            .application_name("lockstep-writer")
            .options([
                ("statement_timeout", SERVER_STATEMENT_LIMIT_MS.to_string()),
                ("lock_timeout", SERVER_LOCK_LIMIT_MS.to_string()),
            ])
            .disable_statement_logging();
        let (writing, reading, timeline) = Default::default();
        Self { options, node, writing, reading, timeline }
    }

    /// Runs one operation on the connection of a slot.
    ///
    /// The connection leaves the slot and goes back only after an answer that leaves it clean.
    async fn on<T, F>(
        &self,
        slot: &tokio::sync::Mutex<Option<PgConnection>>,
        operation: impl FnOnce(PgConnection) -> F,
    ) -> Result<T, WriteError>
    where
        F: Future<Output = (PgConnection, Result<T, WriteError>)>,
    {
        let mut slot = slot.lock().await;
        let held = slot.take();
        let attempt = async {
            let connection = match held {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            Ok(operation(connection).await)
        };
        let answer = tokio::time::timeout(STATEMENT_LIMIT, attempt).await;
        let (connection, result) =
            answer.map_err(|_| WriteError::TimedOut { limit: STATEMENT_LIMIT })??;
        if is_clean(&result) {
            *slot = Some(connection);
        }
        result
    }
}

impl PgRows {
    async fn connect(&self) -> Result<PgConnection, WriteError> {
        let mut connection = self.options.connect().await.map_err(fault)?;
        // Some managed servers do not offer these functions: then there is no timeline to watch.
        let timeline: Option<i32> = sqlx::query_scalar(
            "select ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap_or(None);
        let timeline = timeline.and_then(|number| u32::try_from(number).ok()).unwrap_or(0);
        self.timeline.store(timeline, Ordering::Relaxed);
        Ok(connection)
    }
}

/// After these the server is known to be well and outside a transaction.
fn is_clean<T>(result: &Result<T, WriteError>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => error.sqlstate().is_some_and(|state| classify(state) == Fault::Row),
    }
}

impl RowSink for PgRows {
    async fn persist(&self, batch: &Batch) -> Result<Vec<RowOutcome>, WriteError> {
        self.on(&self.writing, async |mut connection| {
            let result = persist_on(&mut connection, &self.node, batch).await;
            (connection, result)
        })
        .await
    }

    async fn load_pairs(&self, follower: AccountId) -> Result<LoadedPairs, WriteError> {
        // Live rows first: a row only ever goes from live to ended, so none is missed.
        let live = self.on(&self.reading, async |mut connection| {
            let result = load::live(&mut connection, follower).await;
            (connection, result)
        });
        let live = live.await?;
        let mut ended: Vec<PairRow> = Vec::new();
        loop {
            let after = ended.last();
            let page = self.on(&self.reading, async |mut connection| {
                let result = load::ended(&mut connection, follower, after).await;
                (connection, result)
            });
            let page = page.await?;
            let is_last = page.len() < load::LOAD_ROWS_MAX;
            ended.extend(page);
            if is_last {
                return Ok(load::joined(live, ended));
            }
        }
    }

    fn timeline(&self) -> Option<u32> {
        Some(self.timeline.load(Ordering::Relaxed)).filter(|timeline| *timeline > 0)
    }

    async fn prepare(&self) -> Result<(), WriteError> {
        self.on(&self.writing, async |mut connection| {
            let made: Result<i32, _> = sqlx::query_scalar("select copy_events_make_partitions($1)")
                .bind(PARTITIONS_AHEAD)
                .fetch_one(&mut connection)
                .await;
            (connection, made.map(|_| ()).map_err(fault))
        })
        .await
    }
}

/// Writes a batch on a connection of the caller's, inside the caller's transaction if there is one.
pub async fn persist_on(
    connection: &mut PgConnection,
    node: &NodeId,
    batch: &Batch,
) -> Result<Vec<RowOutcome>, WriteError> {
    if batch.is_empty() {
        return Ok(Vec::new());
    }
    match batch.kind() {
        RowKind::PairLive => {
            let query = bind_pairs(LIVE, &batch.pairs(), node);
            outcomes(connection, query, batch.len()).await.map(plain)
        }
        RowKind::PairEnded => persist_ended(connection, node, &batch.pairs()).await,
        RowKind::Status => {
            let query = bind_statuses(&batch.statuses(), node);
            outcomes(connection, query, batch.len()).await.map(plain)
        }
        RowKind::Event => {
            let query = bind_events(&batch.events(), node);
            outcomes(connection, query, batch.len()).await.map(plain)
        }
    }
}

async fn persist_ended(
    connection: &mut PgConnection,
    node: &NodeId,
    rows: &[&PairRow],
) -> Result<Vec<RowOutcome>, WriteError> {
    let mut answers = outcomes(connection, bind_pairs(ENDED, rows, node), rows.len()).await?;
    let apart: Vec<usize> = (0..rows.len()).filter(|n| answers[*n] == Answer::Apart).collect();
    if !apart.is_empty() {
        let others: Vec<&PairRow> = apart.iter().map(|n| rows[*n]).collect();
        let query = bind_pairs(ENDED_APART, &others, node);
        for (n, answer) in apart.iter().zip(outcomes(connection, query, others.len()).await?) {
            answers[*n] = answer;
        }
    }
    Ok(plain(answers))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Row(RowOutcome),
    Apart,
}

fn plain(answers: Vec<Answer>) -> Vec<RowOutcome> {
    let plain = |answer| match answer {
        Answer::Row(outcome) => outcome,
        Answer::Apart => RowOutcome::Already,
    };
    answers.into_iter().map(plain).collect()
}

type PgQuery = Query<'static, Postgres, PgArguments>;

/// Runs the query and puts the answers in the order of the input.
async fn outcomes(
    connection: &mut PgConnection,
    query: PgQuery,
    count: usize,
) -> Result<Vec<Answer>, WriteError> {
    let rows = query.fetch_all(connection).await.map_err(fault)?;
    let mut answers = vec![None; count];
    for row in &rows {
        let n: i64 = row.try_get("n").map_err(fault)?;
        let word: &str = row.try_get("outcome").map_err(fault)?;
        let place = usize::try_from(n).ok().and_then(|n| answers.get_mut(n));
        *place.expect("the query returns the numbers that were sent") = Some(match word {
            "apart" => Answer::Apart,
            word => Answer::Row(
                RowOutcome::from_word(word).expect("the query names outcomes of the list"),
            ),
        });
    }
    let answers: Option<Vec<Answer>> = answers.into_iter().collect();
    Ok(answers.expect("the query returns one row for each row that was sent"))
}

fn column<R, T>(rows: &[&R], value: impl Fn(&R) -> T) -> Vec<T> {
    rows.iter().map(|row| value(row)).collect()
}

fn numbers(count: usize) -> Vec<i64> {
    (0..).take(count).collect()
}

/// Binds $1 to $26, $29 and $30 with the rows, $27 with their accounts and $28 with the node.
fn bind_pairs(sql: &'static str, rows: &[&PairRow], node: &NodeId) -> PgQuery {
    let accounts: BTreeSet<i64> = rows.iter().map(|row| row.follower.as_i64()).collect();
    let pairs: Vec<&Pair> = rows.iter().map(|row| &row.pair).collect();
    let stops = |p: &Pair| p.rejected.stops.unwrap_or_default();
    sqlx::query(sql)
        .bind(numbers(rows.len()))
        .bind(column(&pairs, |p| Uuid::from_u128(p.id.0)))
        .bind(column(rows, |r| Uuid::from_u128(r.apart_id().0)))
        .bind(column(&pairs, |p| p.link.as_i64()))
        .bind(column(rows, |r| r.follower.as_i64()))
        .bind(column(&pairs, |p| p.master_ticket.as_i64()))
        .bind(column(&pairs, |p| p.follower_ticket.map(FollowerTicket::as_i64)))
        .bind(column(&pairs, |p| p.state.as_str()))
        .bind(column(&pairs, |p| p.is_pending))
        .bind(column(&pairs, |p| p.symbol.as_str().to_owned()))
        .bind(column(&pairs, |p| p.side.as_str()))
        .bind(column(&pairs, |p| p.master_side.as_str()))
        .bind(column(&pairs, |p| p.lots_at_open.map(Lots::get)))
        .bind(column(&pairs, |p| p.master_lots_at_open.get()))
        .bind(column(rows, |r| r.close_price.map(Price::get)))
        .bind(column(&pairs, |p| p.reason.map(EndReason::as_str)))
        .bind(column(&pairs, |p| p.rejected.stops.is_some()))
        .bind(column(&pairs, |p| stops(p).stop_loss.map(Price::get)))
        .bind(column(&pairs, |p| stops(p).take_profit.map(Price::get)))
        .bind(column(&pairs, |p| p.rejected.pending_price.map(Price::get)))
        .bind(column(&pairs, |p| p.rejected.target.map(Lots::get)))
        .bind(column(&pairs, |p| p.sent_at.map(|at| at.0)))
        .bind(column(rows, |r| r.opened_at.map(|at| at.0)))
        .bind(column(rows, |r| r.closed_at.map(|at| at.0)))
        .bind(column(&pairs, |p| stored_version(p.version)))
        .bind(column(rows, |r| r.token.as_i64()))
        .bind(accounts.into_iter().collect::<Vec<i64>>())
        .bind(node.as_str().to_owned())
        .bind(column(rows, |r| r.volumes.map(|volumes| volumes.step.get())))
        .bind(column(rows, |r| r.volumes.map(|volumes| volumes.min.get())))
}

/// Versions count changes of one pair under one token and never come near the limit.
fn stored_version(version: u64) -> i64 {
    i64::try_from(version).unwrap_or(i64::MAX)
}

fn bind_statuses(rows: &[&AccountStatus], node: &NodeId) -> PgQuery {
    let count = |count: Option<u32>| count.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
    sqlx::query(STATUS)
        .bind(numbers(rows.len()))
        .bind(column(rows, |r| r.account.as_i64()))
        .bind(column(rows, |r| r.token.as_i64()))
        .bind(column(rows, |r| r.session))
        .bind(column(rows, |r| r.detail.as_deref().map(bounded_text)))
        .bind(column(rows, |r| r.funds.as_ref().map(|f| f.balance.get())))
        .bind(column(rows, |r| r.funds.as_ref().map(|f| f.equity.get())))
        .bind(column(rows, |r| r.funds.as_ref().map(|f| f.currency.as_str().to_owned())))
        .bind(column(rows, |r| count(r.positions_open)))
        .bind(column(rows, |r| count(r.pendings_open)))
        .bind(column(rows, |r| r.at.0))
        .bind(node.as_str().to_owned())
}

fn bind_events(rows: &[&CopyEvent], node: &NodeId) -> PgQuery {
    let micros =
        |time: Option<Duration>| time.map(|t| i64::try_from(t.as_micros()).unwrap_or(i64::MAX));
    sqlx::query(EVENTS)
        .bind(numbers(rows.len()))
        .bind(column(rows, |r| r.id))
        .bind(column(rows, |r| r.at.0))
        .bind(column(rows, |r| r.token.as_i64()))
        .bind(column(rows, |r| r.link.as_i64()))
        .bind(column(rows, |r| r.follower.as_i64()))
        .bind(column(rows, |r| r.master_ticket.as_i64()))
        .bind(column(rows, |r| r.follower_ticket.map(FollowerTicket::as_i64)))
        .bind(column(rows, |r| r.action))
        .bind(column(rows, |r| r.outcome.as_str()))
        .bind(column(rows, |r| r.reason.as_deref().map(bounded_text)))
        .bind(column(rows, |r| r.symbol.as_ref().map(|s| s.as_str().to_owned())))
        .bind(column(rows, |r| r.lots.map(Lots::get)))
        .bind(column(rows, |r| r.price.map(Price::get)))
        .bind(column(rows, |r| micros(r.own_time)))
        .bind(column(rows, |r| micros(r.broker_time)))
        .bind(node.as_str().to_owned())
}

pub(super) fn fault(error: sqlx::Error) -> WriteError {
    match error {
        sqlx::Error::Database(error) => WriteError::Refused {
            sqlstate: error.code().unwrap_or_default().into_owned(),
            constraint: error.constraint().map(str::to_owned),
            message: error.message().to_owned(),
        },
        other => WriteError::Unreachable { message: other.to_string() },
    }
}
