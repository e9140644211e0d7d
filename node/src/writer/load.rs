//! Pair rows as they are read: what a new owner knows of its follower's copies.
//!
//! In: an account. Out: every row of it, or an error that names table and column.
//!
//! Invariants:
//! 1. Live rows are read first: a row only ever goes from live to ended, so none is missed.
//! 2. Ended rows come in pages, so that no number of them takes longer than one read may.
//! 3. A value that cannot be is an error, never a row that is left out.
//!
//! Not covered: how many ended rows are kept. They are what keeps a finished ticket from being
//! opened again, so `migrations/README.md` says when they may be deleted.

use super::LoadedPairs;
use super::error::WriteError;
use super::rows::PairRow;
use super::states::{ended_states, live_states};
use super::store::fault;
use reconcile::{EndReason, Pair, PairId, PairState, Rejected, Stops, Volumes};
use rust_decimal::Decimal;
use schemas::{
    AccountId, FollowerTicket, LinkId, Lots, MasterTicket, Micros, Price, Side, Symbol, Token,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Postgres, Row as _};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Ended rows that are read at once: no number of them makes a read too long for its limit. 20,000
/// took 0.25 s, 200,000 took 3 to 4 s (debug build, busy machine).
pub(super) const LOAD_ROWS_MAX: usize = 20_000;

macro_rules! load {
    ($($condition:expr),+) => {
        concat!(
            "select id, link_id, follower_id, master_ticket, follower_ticket, state, is_pending, symbol, side,
                master_side, lots_at_open, master_lots_at_open, close_price, reason, rejected_stops,
                rejected_stop_loss, rejected_take_profit, rejected_pending_price, rejected_target,
                version, lease_token, lots_step, lots_min,
                (extract(epoch from sent_at) * 1000000)::bigint as sent_us,
                (extract(epoch from opened_at) * 1000000)::bigint as opened_us,
                (extract(epoch from closed_at) * 1000000)::bigint as closed_us
            from pairs where follower_id = $1 and ",
            $($condition,)+
            " order by link_id, master_ticket, id"
        )
    };
}

// The two lists of states are those of the two partial indexes.
const LOAD_LIVE: &str = load!("state in ", live_states!());

// A page after ($2, $3, $4).
const LOAD_ENDED: &str = concat!(
    load!(
        "state in ",
        ended_states!(),
        " and (link_id, master_ticket) >= ($2, $3)
         and (link_id, master_ticket, id) > ($2, $3, $4)"
    ),
    " limit $5"
);

pub(super) async fn live(
    connection: &mut PgConnection,
    follower: AccountId,
) -> Result<Vec<PairRow>, WriteError> {
    let rows = sqlx::query(LOAD_LIVE).bind(follower.as_i64());
    rows.fetch_all(connection).await.map_err(fault)?.iter().map(read_row).collect()
}

pub(super) async fn ended(
    connection: &mut PgConnection,
    follower: AccountId,
    after: Option<&PairRow>,
) -> Result<Vec<PairRow>, WriteError> {
    let (link, ticket, id) = after.map_or((0, 0, Uuid::nil()), |row| {
        let pair = &row.pair;
        (pair.link.as_i64(), pair.master_ticket.as_i64(), Uuid::from_u128(pair.id.0))
    });
    let query = sqlx::query(LOAD_ENDED)
        .bind(follower.as_i64())
        .bind(link)
        .bind(ticket)
        .bind(id)
        .bind(LOAD_ROWS_MAX as i64);
    query.fetch_all(connection).await.map_err(fault)?.iter().map(read_row).collect()
}

/// What was read live and has ended by the time that the ended rows were read is ended.
pub(super) fn joined(mut live: Vec<PairRow>, ended: Vec<PairRow>) -> LoadedPairs {
    let over: BTreeSet<PairId> = ended.iter().map(|row| row.pair.id).collect();
    live.retain(|row| !over.contains(&row.pair.id));
    LoadedPairs { live, ended }
}

fn read_row(row: &PgRow) -> Result<PairRow, WriteError> {
    Ok(PairRow {
        pair: read_pair(row)?,
        follower: checked("follower_id", AccountId::from_i64(get(row, "follower_id")?))?,
        token: checked("lease_token", Token::from_i64(get(row, "lease_token")?))?,
        opened_at: read_instant(row, "opened_us")?,
        closed_at: read_instant(row, "closed_us")?,
        close_price: read_price(row, "close_price")?,
        volumes: read_volumes(row)?,
    })
}

fn read_volumes(row: &PgRow) -> Result<Option<Volumes>, WriteError> {
    let both = read_lots(row, "lots_step")?.zip(read_lots(row, "lots_min")?);
    Ok(both.map(|(step, min)| Volumes { step, min }))
}

fn read_pair(row: &PgRow) -> Result<Pair, WriteError> {
    let state: String = get(row, "state")?;
    let ticket: Option<i64> = get(row, "follower_ticket")?;
    let master_lots: Decimal = get(row, "master_lots_at_open")?;
    Ok(Pair {
        id: PairId(get::<Uuid>(row, "id")?.as_u128()),
        link: checked("link_id", LinkId::from_i64(get(row, "link_id")?))?,
        master_ticket: checked(
            "master_ticket",
            MasterTicket::from_i64(get(row, "master_ticket")?),
        )?,
        state: PairState::from_word(&state).ok_or_else(|| unreadable("state", state))?,
        is_pending: get(row, "is_pending")?,
        follower_ticket: checked(
            "follower_ticket",
            ticket.map(FollowerTicket::from_i64).transpose(),
        )?,
        symbol: checked("symbol", Symbol::new(get::<String>(row, "symbol")?))?,
        side: read_side(row, "side")?,
        master_side: read_side(row, "master_side")?,
        lots_at_open: read_lots(row, "lots_at_open")?,
        master_lots_at_open: checked("master_lots_at_open", Lots::new(master_lots))?,
        sent_at: read_instant(row, "sent_us")?,
        reason: read_reason(row)?,
        rejected: read_rejected(row)?,
        version: checked("version", u64::try_from(get::<i64>(row, "version")?))?,
    })
}

fn read_rejected(row: &PgRow) -> Result<Rejected, WriteError> {
    let stops = Stops {
        stop_loss: read_price(row, "rejected_stop_loss")?,
        take_profit: read_price(row, "rejected_take_profit")?,
    };
    Ok(Rejected {
        stops: get::<bool>(row, "rejected_stops")?.then_some(stops),
        pending_price: read_price(row, "rejected_pending_price")?,
        target: read_lots(row, "rejected_target")?,
    })
}

fn read_reason(row: &PgRow) -> Result<Option<EndReason>, WriteError> {
    let Some(word) = get::<Option<String>>(row, "reason")? else { return Ok(None) };
    EndReason::from_word(&word).map(Some).ok_or_else(|| unreadable("reason", word))
}

fn read_side(row: &PgRow, column: &'static str) -> Result<Side, WriteError> {
    let word: String = get(row, column)?;
    let side = [Side::Buy, Side::Sell].into_iter().find(|side| side.as_str() == word);
    side.ok_or_else(|| unreadable(column, word))
}

fn read_instant(row: &PgRow, column: &'static str) -> Result<Option<Micros>, WriteError> {
    Ok(get::<Option<i64>>(row, column)?.map(Micros))
}

fn read_price(row: &PgRow, column: &'static str) -> Result<Option<Price>, WriteError> {
    checked(column, get::<Option<Decimal>>(row, column)?.map(Price::new).transpose())
}

fn read_lots(row: &PgRow, column: &'static str) -> Result<Option<Lots>, WriteError> {
    checked(column, get::<Option<Decimal>>(row, column)?.map(Lots::new).transpose())
}

fn get<'r, T>(row: &'r PgRow, column: &'static str) -> Result<T, WriteError>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(column).map_err(|error| unreadable(column, error))
}

fn checked<T, E: std::fmt::Display>(
    column: &'static str,
    value: Result<T, E>,
) -> Result<T, WriteError> {
    value.map_err(|error| unreadable(column, error))
}

fn unreadable(column: &'static str, problem: impl std::fmt::Display) -> WriteError {
    WriteError::Unreadable { table: "pairs", column, problem: problem.to_string() }
}
