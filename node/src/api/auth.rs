//! Lets in who shows a good token that allows what is asked.

use super::ApiState;
use super::problem::Problem;
use super::tokens::{self, Caller, Presented, Scope};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// What more than operating; all of it, whatever the method.
pub(super) const FOR_ADMINS: &[&str] =
    &["/v1/accounts/{account}/release", "/v1/tokens", "/v1/tokens/{token}"];

/// Looking needs less than doing. By the method, so that no new path can be without a scope.
fn scope_of(method: &Method, route: Option<&MatchedPath>) -> Scope {
    if route.is_some_and(|route| FOR_ADMINS.contains(&route.as_str())) {
        return Scope::Admin;
    }
    match *method {
        Method::GET | Method::HEAD => Scope::Read,
        _ => Scope::Operate,
    }
}

pub(super) async fn authorize(
    State(api): State<Arc<ApiState>>,
    mut request: Request,
    next: Next,
) -> Response {
    let needed = scope_of(request.method(), request.extensions().get::<MatchedPath>());
    match caller_of(&api, request.headers(), needed).await {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    }
}

async fn caller_of(api: &ApiState, headers: &HeaderMap, needed: Scope) -> Result<Caller, Problem> {
    let text = bearer(headers)
        .ok_or_else(|| Problem::unauthorized("there is no `Authorization: Bearer` with a token"))?;
    // Whatever cannot be a token is refused without asking the database.
    let presented = Presented::from_text(text)
        .ok_or_else(|| Problem::unauthorized(tokens::Refused::Unknown.to_string()))?;
    let mut db = api.database().await?;
    let checked = tokens::check(&mut db, &presented).await;
    db.give_back();
    let caller = match checked {
        Ok(Ok(caller)) => caller,
        Ok(Err(refused)) => return Err(Problem::unauthorized(refused.to_string())),
        Err(error) => return Err(error.into()),
    };
    if caller.scope < needed {
        return Err(Problem::forbidden(format!(
            "this needs a token of scope {}, and {:?} is of scope {}",
            needed.as_str(),
            caller.name,
            caller.scope.as_str()
        )));
    }
    Ok(caller)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let stated = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = stated.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
