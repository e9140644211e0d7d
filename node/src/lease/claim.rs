//! The claim: which rows without a living owner a node takes, and how it finds them.
//!
//! Decides: nothing that `cycle` has not asked for; the order and the bounds of [`ClaimRequest`] are
//! carried out in one statement.
//! In: [`ClaimRequest`]. Out: what was taken, at most as much as was asked for.
//!
//! Invariants:
//! 1. A row that somebody locks is passed by (M4), and no row is locked beyond the limit (M1).
//! 2. It costs by what is free and by how many owners there are, not by the table.

use super::cycle::{AVOIDED_FREE_MAX, ClaimRequest, ClaimedRow, CycleRequest};
use super::store::{LeaseError, failed, interval, tenure, timestamp};
use schemas::NodeId;
use sqlx::postgres::PgConnection;

/// The owners of the platforms in `$1`: one index descent for each, whatever the table's size. Part of a
/// `with recursive`.
macro_rules! owners {
    () => {
        "owners (platform, node_id) as (
            select p.platform, (
                select min(a.node_id) from trading_accounts a
                where a.platform = p.platform and a.node_id is not null
            )
            from unnest($1::text[]) as p (platform)
            union all
            select o.platform, (
                select min(a.node_id) from trading_accounts a
                where a.platform = o.platform and a.node_id > o.node_id
            )
            from owners o
            where o.node_id is not null
        )"
    };
}
pub(super) use owners;

/// Whether this node owns a master of account `a`. The master is found by its number: the comparison
/// of its owner is one that no index serves, and a node may own very many.
macro_rules! leads_a_master {
    () => {
        "coalesce((
            select true
            from copy_links l, lateral (
                select 1 from trading_accounts m
                where m.id = l.master_id and m.node_id is not distinct from $2
                limit 1
            ) led
            where l.follower_id = a.id and l.deleted_at is null
            limit 1
        ), false)"
    };
}

/// Whether the lease of account `a` of a dead owner has run out, or its owner is proven dead.
macro_rules! has_run_out {
    () => {
        "(((select expired from believed) and a.lease_until + lockstep_claim_wait(a.starts, a.id, $3) < now())
               or (a.node_id = any ($8) and a.starts <= 1))"
    };
}

/// What this node owns is counted only where something is to be had: it may own very many.
/// Free rows come from the partial index; one that this node keeps away from only until nobody else has
/// taken it for [`AVOIDED_FREE_MAX`]. Expired rows are found by owner: one index descent for
/// each distinct owner, one probe of its lease, and rows only of owners whose probe has run out.
/// Of each kind four times as many are looked at as may be taken, for followers of masters that this
/// node leads: they come first, as they need not hear them over the bus. The rest is taken as it
/// comes, however many rows others have locked.
/// The LATERAL forms keep the plan on its indexes whatever the statistics say, and every CTE that
/// locks is materialised: otherwise it would run again and lock more than its limit (M1).
pub(crate) const CLAIM: &str = concat!("
with recursive believed as materialized (
    select $6 and now() between coalesce($9, '-infinity') and coalesce($10, 'infinity') as expired
), ", owners!(), ", dead as materialized (
    select o.platform, o.node_id
    from owners o, lateral (
        select a.lease_until from trading_accounts a
        where a.platform = o.platform and a.node_id = o.node_id
        limit 1
    ) probe
    where o.node_id <> $2 and (((select expired from believed) and probe.lease_until < now()) or o.node_id = any ($8))
), room as materialized (
    select case when exists (select from dead) or exists (
        select from unnest($1::text[]) as p (platform), lateral (
            select from trading_accounts a
            where a.platform = p.platform and a.enabled and a.node_id is null
            limit 1
        ) r
    ) then greatest(0, least($4, $5 - (
        select count(*) from trading_accounts a where a.platform = any ($1) and a.node_id = $2
    ))) else 0 end as rows_max
), free_seen as materialized (
    select r.id, r.is_near
    from unnest($1::text[]) as p (platform), lateral (
        select a.id, ", leads_a_master!(), " as is_near from trading_accounts a
        where a.platform = p.platform and a.enabled and a.node_id is null
          and (a.id <> all ($7) or a.free_since < now() - $11)
        order by a.id
        limit (select 4 * rows_max from room)
    ) r
), free_near as materialized (
    select r.id, null::text as previous_owner
    from (select id from free_seen where is_near order by id) s, lateral (
        select a.id from trading_accounts a
        where a.id = s.id and a.enabled and a.node_id is null
        limit 1
        for update skip locked
    ) r
    limit (select rows_max from room)
), free_rest as materialized (
    select r.id, null::text as previous_owner
    from unnest($1::text[]) as p (platform), lateral (
        select a.id from trading_accounts a
        where a.platform = p.platform and a.enabled and a.node_id is null
          and (a.id <> all ($7) or a.free_since < now() - $11)
          and a.id not in (select id from free_near)
        order by a.id
        limit (select rows_max from room) - (select count(*) from free_near)
        for update skip locked
    ) r
), expired_seen as materialized (
    select r.id, d.node_id, r.is_near
    from dead d, lateral (
        select a.id, ", leads_a_master!(), " as is_near from trading_accounts a
        where a.platform = d.platform and a.node_id = d.node_id
          and a.enabled and a.id <> all ($7)
          and ", has_run_out!(), "
        limit (select 4 * rows_max from room)
    ) r
), expired_near as materialized (
    select r.id, s.node_id as previous_owner
    from (select id, node_id from expired_seen where is_near order by id) s, lateral (
        select a.id from trading_accounts a
        where a.id = s.id and a.node_id = s.node_id and a.enabled and ", has_run_out!(), "
        limit 1
        for update skip locked
    ) r
    limit (select rows_max from room)
), expired_rest as materialized (
    select r.id, d.node_id as previous_owner
    from dead d, lateral (
        select a.id from trading_accounts a
        where a.platform = d.platform and a.node_id = d.node_id
          and a.enabled and a.id <> all ($7)
          and a.id not in (select id from expired_near)
          and ", has_run_out!(), "
        limit (select rows_max from room) - (select count(*) from expired_near)
        for update skip locked
    ) r
), picked as materialized (
    select id, previous_owner from free_near
    union all
    select id, previous_owner from free_rest
    union all
    select id, previous_owner from expired_near
    union all
    select id, previous_owner from expired_rest
    limit (select rows_max from room)
)
update trading_accounts a
set node_id = $2, lease_token = a.lease_token + 1, lease_until = clock_timestamp() + $3,
    tenure_since = clock_timestamp(), starts = a.starts + 1
from picked
where a.id = picked.id
returning a.id, a.lease_token, picked.previous_owner");

/// Takes what it may of what is free, or left by a dead owner.
pub(super) async fn claim_rows(
    transaction: &mut PgConnection,
    request: &CycleRequest,
    claim: &ClaimRequest,
    timeline: Option<u32>,
) -> Result<Vec<ClaimedRow>, LeaseError> {
    let dead: Vec<&str> = claim.proven_dead.iter().map(NodeId::as_str).collect();
    let bounds = claim.database;
    if bounds.is_some_and(|bounds| !bounds.is_same_history(timeline)) {
        // What looks free may have been claimed on the server before this one.
        return Ok(Vec::new());
    }
    let avoid: Vec<i64> = claim.avoid.iter().map(|account| account.as_i64()).collect();
    let rows: Vec<(i64, i64, Option<String>)> = sqlx::query_as(CLAIM)
        .bind(&request.platforms)
        .bind(request.node.as_str())
        .bind(interval(request.lease))
        .bind(i64::from(claim.rows_max))
        .bind(i64::from(claim.capacity))
        .bind(claim.expired)
        .bind(avoid)
        .bind(dead)
        .bind(bounds.map(|bounds| timestamp(bounds.least)))
        .bind(bounds.map(|bounds| timestamp(bounds.most)))
        .bind(interval(AVOIDED_FREE_MAX))
        .fetch_all(transaction)
        .await
        .map_err(failed("claim"))?;
    if rows.len() > claim.rows_max as usize {
        return Err(LeaseError::ClaimedTooMuch { claimed: rows.len(), rows_max: claim.rows_max });
    }
    rows.into_iter()
        .map(|(id, token, previous_owner)| {
            Ok(ClaimedRow { tenure: tenure(id, token)?, previous_owner })
        })
        .collect()
}
