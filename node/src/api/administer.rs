//! What more than operating: who may use the API, and which node has an account.
//!
//! In: who asks, with a token of scope `admin`. Out: tokens without their secrets; what became of the wish.
//!
//! Invariants:
//! 1. No token is made here: its secret would go over plain HTTP. `lockstep token add` makes one.
//! 2. A token does not take itself back: a client that goes wrong must not lock everybody out.
//! 3. An account is given back by its owner alone, when nothing of it is in flight and nothing unwritten:
//!    this asks the owner, and never writes the columns of the lease.
//!
//! Not covered: when an account has left its owner, which may take a minute; `/v1/accounts` tells.

use super::ApiState;
use super::extract::{At, Filter, page_size};
use super::problem::{Problem, RETRY_AFTER_S};
use super::read::{Answer, ByNumber, NoFilter, Page};
use super::refusals::{ListRefusals, ReleaseRefusals, RevokeRefusals};
use super::tokens::{self, Caller, TokenError, TokenRow};
use crate::account::owner::{self, AskError};
use crate::causes::with_causes;
use async_nats::connection::State as Connection;
use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use schemas::AccountId;
use schemas::codec::VERSION;
use schemas::control::{ControlRequest, ControlVerb};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// When to ask again where an owner is missing or silent: a takeover takes longer than a cycle.
const OWNER_RETRY_S: u32 = 5;

impl From<TokenError> for Problem {
    fn from(error: TokenError) -> Self {
        match error {
            TokenError::Database(error) => Problem::database(&error),
            TokenError::Random(_)
            | TokenError::NameTaken(_)
            | TokenError::BadName(_)
            | TokenError::Scope { .. } => {
                tracing::error!(error = %with_causes(&error), "a token could not be read");
                Problem::fault("the token's row holds a value that cannot be")
            }
        }
    }
}

/// Tokens, by number; those that were taken back or have expired are among them.
#[utoipa::path(get, path = "/v1/tokens", tag = "administer", params(ByNumber),
    responses((status = 200, description = "A page of tokens, without their secrets", body = Page<TokenRow>), ListRefusals))]
pub(super) async fn list(
    State(api): State<Arc<ApiState>>,
    Filter(by): Filter<ByNumber>,
) -> Answer<Page<TokenRow>> {
    let (size, after) = (page_size(by.limit)?, by.place()?);
    let mut db = api.database().await?;
    let rows = tokens::list(&mut db, after, i64::from(size) + 1).await?;
    db.give_back();
    Ok(Json(Page::of(rows, size, |token| token.id.to_string())))
}

/// A token that was taken back.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Revoked {
    /// Its number.
    id: i64,
    /// What it is called.
    name: String,
    /// It was good before.
    changed: bool,
}

/// Takes a token back: it is refused from now on, by every node. Its streams go on for ten minutes at most.
#[utoipa::path(delete, path = "/v1/tokens/{token}", tag = "administer",
    params(("token" = i64, Path, description = "Number of the token", minimum = 1, maximum = 9223372036854775807_i64)),
    responses((status = 200, description = "It is refused now", body = Revoked), RevokeRefusals))]
pub(super) async fn revoke(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    At(token): At<i64>,
    Filter(NoFilter {}): Filter<NoFilter>,
) -> Answer<Revoked> {
    if token == caller.token {
        return Err(Problem::conflict(
            "this is the token that asks; another one has to take it back, or `lockstep token revoke`",
        ));
    }
    let mut db = api.database().await?;
    let revoked = tokens::revoke_number(&mut db, token).await?;
    db.give_back();
    let no_such = || Problem::not_found(format!("there is no token {token}"));
    let (name, changed) = revoked.ok_or_else(no_such)?;
    tracing::warn!(token, name, changed, by = caller.name, "token revoked by API");
    Ok(Json(Revoked { id: token, name, changed }))
}

/// An account that its owner hands over.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Leaving {
    /// The account.
    account: i64,
    /// The owner, which gives it back as soon as nothing of it is in flight.
    node: String,
}

/// Has the owner of an account hand it over to another node, cleanly. Any node may be asked.
#[utoipa::path(post, path = "/v1/accounts/{account}/release", tag = "administer",
    params(("account" = i64, Path, description = "Number of the account", minimum = 1, maximum = 9223372036854775807_i64)),
    responses((status = 202, description = "Its owner will; `/v1/accounts` tells who has it", body = Leaving), ReleaseRefusals))]
pub(super) async fn release(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    At(account): At<AccountId>,
    Filter(NoFilter {}): Filter<NoFilter>,
) -> Result<(StatusCode, Json<Leaving>), Problem> {
    let node = owner_of(&api, account).await?;
    if api.context.bus.connection_state() != Connection::Connected {
        return Err(cut_from_bus());
    }
    tracing::info!(%account, node, by = caller.name, "hand-over of an account asked for by API");
    let request = ControlRequest { v: VERSION, account, verb: ControlVerb::Release, link: None };
    match owner::ask(&api.context.bus, &node, &request).await {
        Ok(_) => Ok((StatusCode::ACCEPTED, Json(Leaving { account: account.as_i64(), node }))),
        Err(error) => Err(not_released(&error)),
    }
}

async fn owner_of(api: &ApiState, account: AccountId) -> Result<String, Problem> {
    let mut db = api.database().await?;
    let owned = owner::of(&mut db, account).await?;
    db.give_back();
    let no_such = || Problem::not_found(format!("there is no account {account}"));
    let owned = owned.ok_or_else(no_such)?;
    let node = owned.owner().map(str::to_owned);
    node.ok_or_else(|| Problem::ownerless(account, owned.is_enabled, OWNER_RETRY_S))
}

fn cut_from_bus() -> Problem {
    Problem::unavailable("bus", "this node is cut from the bus", RETRY_AFTER_S)
}

fn not_released(error: &AskError) -> Problem {
    match error {
        AskError::Refused { .. } => Problem::conflict(error.to_string()),
        AskError::Bus(_) | AskError::Publish(_) => {
            tracing::warn!(error = with_causes(error), "an account's owner could not be asked");
            cut_from_bus()
        }
        AskError::Silent { .. } | AskError::NobodyHears | AskError::Ended => {
            Problem::unavailable("no_answer", error.to_string(), OWNER_RETRY_S)
        }
    }
}
