//! What can be done: set modes, close a copy.
//!
//! In: who asks, what for. Out: what came of it.
//!
//! Invariants:
//! 1. Asked twice, everything here does the same once: a mode is a state, and a copy that has ended
//!    is closed. An `Idempotency-Key` gives the first answer again.
//! 2. Who did something is in the log, by the name of the token.
//! 3. A close goes to the session of this node or nowhere: nobody else's account is traded because
//!    a request came to the wrong node (H73).

use super::ApiState;
use super::extract::{At, Body, Filter};
use super::keys::{Begun, Fingerprint};
use super::problem::{Problem, RETRY_AFTER_S};
use super::read::NoFilter;
use super::refusals::{ChangeRefusals, CloseRefusals};
use super::tokens::Caller;
use crate::account::asking::NotAsked;
use crate::account::owner::{self, Owned};
use crate::directory::{self, Mode};
use crate::follower::{CloseAnswer, NotNow, TicketKey};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use schemas::{AccountId, LinkId, MasterTicket};
use serde::{Deserialize, Serialize};
use sqlx::Row;
use std::sync::Arc;
use std::time::Duration;
use utoipa::ToSchema;

/// So long a request waits for what becomes of its close: as long as a broker call may take by
/// default. What takes longer is answered with "under way".
const CLOSE_WAIT: Duration = Duration::from_secs(10);
/// When to ask again while another node takes an account over, or a session is opened anew.
const TAKEOVER_RETRY_S: u32 = 5;

/// A mode to be set.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewMode {
    /// It.
    mode: Mode,
}

/// A mode that was set.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ModeSet {
    /// It.
    mode: Mode,
    /// It was another one before.
    changed: bool,
}

/// Sets what is allowed on a link. The link's effective mode is the strictest of its own, its
/// accounts' and the fleet's; the nodes hear of the change at once.
#[utoipa::path(put, path = "/v1/links/{link}/mode", tag = "act", request_body = NewMode,
    params(("link" = i64, Path, description = "Number of the link", minimum = 1, maximum = 9223372036854775807_i64)),
    responses((status = 200, description = "It is so now", body = ModeSet), ChangeRefusals))]
pub(super) async fn link_mode(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    At(link): At<LinkId>,
    Filter(NoFilter {}): Filter<NoFilter>,
    Body(NewMode { mode }): Body<NewMode>,
) -> Result<Json<ModeSet>, Problem> {
    let mut db = api.database().await?;
    let changed = directory::set_link_mode(&mut db, link, mode).await?;
    db.give_back();
    tracing::info!(%link, %mode, changed, by = caller.name, "mode of a link set by API");
    Ok(Json(ModeSet { mode, changed }))
}

/// Sets what is allowed on all links of an account, as master and as follower.
#[utoipa::path(put, path = "/v1/accounts/{account}/mode", tag = "act", request_body = NewMode,
    params(("account" = i64, Path, description = "Number of the account", minimum = 1, maximum = 9223372036854775807_i64)),
    responses((status = 200, description = "It is so now", body = ModeSet), ChangeRefusals))]
pub(super) async fn account_mode(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    At(account): At<AccountId>,
    Filter(NoFilter {}): Filter<NoFilter>,
    Body(NewMode { mode }): Body<NewMode>,
) -> Result<Json<ModeSet>, Problem> {
    let mut db = api.database().await?;
    let changed = directory::set_account_mode(&mut db, account, mode).await?;
    db.give_back();
    tracing::info!(%account, %mode, changed, by = caller.name, "mode of an account set by API");
    Ok(Json(ModeSet { mode, changed }))
}

/// Sets what is allowed on every link there is: `paused` is the kill switch.
#[utoipa::path(put, path = "/v1/fleet/mode", tag = "act", request_body = NewMode,
    responses((status = 200, description = "It is so now", body = ModeSet), ChangeRefusals))]
pub(super) async fn fleet_mode(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    Filter(NoFilter {}): Filter<NoFilter>,
    Body(NewMode { mode }): Body<NewMode>,
) -> Result<Json<ModeSet>, Problem> {
    let mut db = api.database().await?;
    let changed = directory::set_fleet_mode(&mut db, mode).await?;
    db.give_back();
    tracing::warn!(%mode, changed, by = caller.name, "mode of the fleet set by API");
    Ok(Json(ModeSet { mode, changed }))
}

/// What became of a close.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Closed {
    /// `closed`, or `closing` while the broker has not confirmed it.
    state: &'static str,
    /// The copy.
    follower_ticket: Option<u64>,
    /// Why it ended; `user_request` where this or an earlier request closed it.
    reason: Option<&'static str>,
    /// What the close waits for.
    waits_for: Option<String>,
}

/// Closes the copy of one trade, or cancels the order that waits for it. It is not opened again.
/// A paused link's copies can be closed as well.
#[utoipa::path(post, path = "/v1/pairs/{link}/{ticket}/close", tag = "act",
    params(
        ("link" = i64, Path, description = "Number of the link", minimum = 1, maximum = 9223372036854775807_i64),
        ("ticket" = i64, Path, description = "The master's ticket", minimum = 1, maximum = 9223372036854775807_i64),
        ("Idempotency-Key" = Option<String>, Header, description = "The first answer is given again to a later request of this key, while this process lives", pattern = "^[!-~]{1,128}$"),
    ),
    responses(
        (status = 200, description = "It is closed", body = Closed),
        (status = 202, description = "It was sent, and the broker has not confirmed it: it goes on; `/v1/why` tells what came of it", body = Closed),
        CloseRefusals))]
pub(super) async fn close(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    At((link, ticket)): At<(LinkId, MasterTicket)>,
    Filter(NoFilter {}): Filter<NoFilter>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let Some(key) = headers.get("idempotency-key") else {
        return Ok(close_once(&api, &caller, link, ticket).await?.into_response());
    };
    let key = key.to_str().ok().filter(|key| (1..=128).contains(&key.len()));
    let key = key.ok_or_else(|| {
        Problem::invalid("Idempotency-Key: must be 1 to 128 characters of ASCII that can be seen")
    })?;
    let asked = Fingerprint { token: caller.token, link, ticket };
    match api.keys.begin(key, asked)? {
        Begun::Before(answer) => {
            let mut response = (StatusCode::OK, Json(answer)).into_response();
            let replayed = HeaderValue::from_static("true");
            response.headers_mut().insert("idempotency-replayed", replayed);
            Ok(response)
        }
        Begun::Now(under_way) => {
            let (status, Json(answer)) = close_once(&api, &caller, link, ticket).await?;
            if status == StatusCode::OK {
                under_way.done(answer.clone());
            }
            Ok((status, Json(answer)).into_response())
        }
    }
}

async fn close_once(
    api: &ApiState,
    caller: &Caller,
    link: LinkId,
    ticket: MasterTicket,
) -> Result<(StatusCode, Json<Closed>), Problem> {
    let mut db = api.database().await?;
    let row = sqlx::query("select follower_id from copy_links where id = $1").bind(link.as_i64());
    let follower: Option<i64> = row.fetch_optional(&mut *db).await?.map(|row| row.get(0));
    db.give_back();
    let follower = follower.and_then(|id| AccountId::from_i64(id).ok());
    let follower =
        follower.ok_or_else(|| Problem::not_found(format!("there is no link {link}")))?;
    tracing::info!(%link, %ticket, by = caller.name, "close asked for by API");
    let asked = api.context.open_sessions.close(follower, TicketKey { link, ticket });
    let answered = match asked {
        Ok(answered) => answered,
        Err(NotAsked::Full) => {
            let detail = NotAsked::Full.to_string();
            return Err(Problem::unavailable(Problem::BUSY, detail, RETRY_AFTER_S));
        }
        Err(NotAsked::NoSession) => return Err(elsewhere(api, follower).await?),
    };
    match tokio::time::timeout(CLOSE_WAIT, answered).await {
        Ok(Ok(answer)) => told(api, follower, answer),
        Ok(Err(_session_ended)) => Err(Problem::unavailable(
            "no_session",
            "the session of the account ended before the answer; what came of it is in `/v1/why`",
            TAKEOVER_RETRY_S,
        )),
        Err(_elapsed) => Ok(closing("the broker's answer".into())),
    }
}

/// What is said where no session of the account is open here.
async fn elsewhere(api: &ApiState, follower: AccountId) -> Result<Problem, Problem> {
    let me = &api.context;
    let is_mine = me.gate.permission(follower, me.clock.now()).is_some();
    let mut db = api.database().await?;
    let owned = owner::of(&mut db, follower).await?;
    db.give_back();
    let no_such = || Problem::not_found(format!("there is no account {follower}"));
    let Owned { last_node, is_leased, is_enabled, .. } = owned.ok_or_else(no_such)?;
    let after = TAKEOVER_RETRY_S;
    Ok(match last_node {
        Some(owner) if owner == me.node.as_str() && is_mine => Problem::unavailable(
            "no_session",
            "this node has the account, and no session of it at the broker is open",
            after,
        ),
        Some(owner) if owner == me.node.as_str() => Problem::unavailable(
            "lease_not_confirmed",
            "this node has the account, and its lease is not confirmed",
            after,
        ),
        Some(owner) if is_leased => {
            Problem::misdirected(format!("account {follower} is at another node"), owner)
        }
        Some(_) | None => Problem::ownerless(follower, is_enabled, after),
    })
}

fn told(
    api: &ApiState,
    follower: AccountId,
    answer: CloseAnswer,
) -> Result<(StatusCode, Json<Closed>), Problem> {
    match answer {
        CloseAnswer::Done { copy, reason } => {
            let closed = Closed {
                state: "closed",
                follower_ticket: copy.map(|ticket| ticket.get()),
                reason: reason.map(|reason| reason.as_str()),
                waits_for: None,
            };
            Ok((StatusCode::OK, Json(closed)))
        }
        CloseAnswer::NoSuchCopy => {
            Err(Problem::not_found("nothing was ever copied under this ticket of this link"))
        }
        CloseAnswer::Underway(why) => Ok(closing(why)),
        CloseAnswer::NotNow(why) => Err(not_now(api, follower, why)),
    }
}

fn closing(waits_for: String) -> (StatusCode, Json<Closed>) {
    let waits_for = Some(waits_for);
    let closing = Closed { state: "closing", follower_ticket: None, reason: None, waits_for };
    (StatusCode::ACCEPTED, Json(closing))
}

fn not_now(api: &ApiState, follower: AccountId, why: NotNow) -> Problem {
    use crate::broker::NotSent;
    let context = &api.context;
    match why {
        NotNow::NotSent(NotSent::Gate) => {
            let reserve = context.config.send_reserve;
            let denied = context.gate.denied(follower, context.clock.now(), reserve);
            let detail = denied.map_or_else(
                || "the lease was not confirmed when the order was to leave".to_owned(),
                |denied| denied.to_string(),
            );
            let after = u32::try_from(context.config.retry.as_secs()).unwrap_or(RETRY_AFTER_S);
            Problem::unavailable("lease_not_confirmed", detail, after)
        }
        NotNow::NotSent(NotSent::Session) | NotNow::NoSession => Problem::unavailable(
            why.as_str(),
            "no session of the account at its broker is open",
            TAKEOVER_RETRY_S,
        ),
        NotNow::NotSent(NotSent::Busy) => {
            Problem::unavailable(why.as_str(), "no thread was free for the order", RETRY_AFTER_S)
        }
        NotNow::Draining => Problem::unavailable(
            why.as_str(),
            "the account is on its way to another node",
            TAKEOVER_RETRY_S,
        ),
        NotNow::Opening => Problem::unavailable(
            why.as_str(),
            "the open is not answered yet, so that nobody knows what to close",
            RETRY_AFTER_S,
        ),
    }
}

/// An answer, for tests of what keeps answers.
#[cfg(test)]
pub(super) fn closed_for_tests() -> Closed {
    Closed { state: "closed", follower_ticket: None, reason: None, waits_for: None }
}
