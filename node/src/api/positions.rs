//! Open copies of an account's links, beside what the masters have open.
//!
//! In: an account. Out: its links, each with its trades and their differences ([`crate::positions`]), a bounded
//! page at a time.
//!
//! Invariants:
//! 1. Masters are asked by this node's own connection to the bus, a bounded number at once and for
//!    [`ASK_LIMIT`] at most; [`COMPARISONS_MAX`] requests do so at once, the others are refused.
//! 2. A master that does not answer is `unknown` in an answer that tells everything else. Only where nobody
//!    can be asked there is no answer.
//! 3. No database connection is held while masters are asked.

use super::ApiState;
use super::extract::{At, Filter, limited, place};
use super::problem::{Problem, RETRY_AFTER_S};
use super::read::{Answer, Page};
use super::refusals::PositionRefusals;
use crate::positions::{self, Line, LinkRow, MasterState, Which};
use async_nats::connection::State as Connection;
use axum::Json;
use axum::extract::State;
use schemas::AccountId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};

/// Requests that ask masters at once.
pub(super) const COMPARISONS_MAX: usize = 2;
/// Longest wait for the masters of a page, all together.
const ASK_LIMIT: Duration = Duration::from_secs(8);
/// Links of a page, at most and if nobody says.
const LINKS_MAX: u16 = 20;
/// A page ends with the link that makes it longer than this.
const LINES_MAX: usize = 2_000;

/// Which part of the list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LinkFilter {
    /// What comes after the link of this number.
    #[param(value_type = Option<i64>, minimum = 0, maximum = 9223372036854775807_i64)]
    after: Option<u64>,
    /// So many links at most; 20 if nobody says.
    #[param(value_type = Option<u16>, minimum = 1, maximum = 20)]
    limit: Option<u64>,
}

/// A link and its trades.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct LinkPositions {
    /// The link.
    link: i64,
    /// Number of the master.
    master: i64,
    /// Number of the follower.
    follower: i64,
    /// Seconds since the follower's owner last wrote its status; null where nobody does.
    rows_age_s: Option<f64>,
    /// What is known of the master.
    master_state: MasterState,
    /// The union of the master's trades and the copies, by the master's ticket.
    positions: Vec<Line>,
}

/// The open copies of an account's links, as master and as follower, each beside the master's trade, with
/// the difference; by link.
#[utoipa::path(get, path = "/v1/accounts/{account}/positions", tag = "see",
    params(("account" = i64, Path, description = "Number of the account", minimum = 1, maximum = 9223372036854775807_i64), LinkFilter),
    responses((status = 200, description = "A page of links with their trades", body = Page<LinkPositions>), PositionRefusals))]
pub(super) async fn positions(
    State(api): State<Arc<ApiState>>,
    At(account): At<AccountId>,
    Filter(part): Filter<LinkFilter>,
) -> Answer<Page<LinkPositions>> {
    let (size, after) = (limited(part.limit, LINKS_MAX, LINKS_MAX)?, place(part.after)?);
    let links = links_of(&api, account, after, size).await?;
    let Ok(_room) = api.comparisons.try_acquire() else {
        let detail = format!("{COMPARISONS_MAX} requests ask masters already");
        return Err(Problem::unavailable(Problem::BUSY, detail, RETRY_AFTER_S));
    };
    let bus = &api.context.bus;
    if bus.connection_state() != Connection::Connected {
        let detail = "this node is cut from the bus, and no master can be asked";
        return Err(Problem::unavailable("bus", detail, RETRY_AFTER_S));
    }
    let masters: BTreeSet<AccountId> =
        links.iter().take(usize::from(size)).map(|link| link.master).collect();
    let asked = positions::ask(bus, masters, ASK_LIMIT).await;
    let mut db = api.database().await?;
    let (mut told, mut lines) = (Vec::new(), 0);
    for link in links.iter().take(usize::from(size)) {
        let Some(asked) = asked.get(&link.master) else { continue };
        let (master_state, positions) = positions::differences(&mut db, link, asked).await?;
        lines += positions.len();
        told.push(link_positions(link, master_state, positions));
        if lines > LINES_MAX {
            break;
        }
    }
    db.give_back();
    let next = told.last().filter(|_| told.len() < links.len()).map(|last| last.link.to_string());
    Ok(Json(Page { items: told, next }))
}

/// One link more than the page holds.
async fn links_of(
    api: &ApiState,
    account: AccountId,
    after: i64,
    size: u16,
) -> Result<Vec<LinkRow>, Problem> {
    let mut db = api.database().await?;
    let links_max = i64::from(size) + 1;
    let which = Which { link: None, account: Some(account.as_i64()), after, links_max };
    let links = positions::links(&mut db, which).await?;
    let is_there = match links.is_empty() {
        true => {
            let sql = "select exists (select from trading_accounts where id = $1)";
            sqlx::query_scalar(sql).bind(account.as_i64()).fetch_one(&mut *db).await?
        }
        false => true,
    };
    db.give_back();
    match is_there {
        true => Ok(links),
        false => Err(Problem::not_found(format!("there is no account {account}"))),
    }
}

fn link_positions(
    link: &LinkRow,
    master_state: MasterState,
    positions: Vec<Line>,
) -> LinkPositions {
    LinkPositions {
        link: link.link,
        master: link.master.as_i64(),
        follower: link.follower,
        rows_age_s: link.rows_age_s,
        master_state,
        positions,
    }
}
