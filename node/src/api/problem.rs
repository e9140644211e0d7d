//! Answers that are no: problem details as RFC 9457 has them, for every refusal there is.
//!
//! In: why something was refused. Out: `application/problem+json`, with the headers that belong to
//! its status.
//!
//! Invariants:
//! 1. Whatever this API refuses, the refusals of its own library included, has this form.
//! 2. What is unavailable says when to ask again.
//! 3. No text comes from the database or from settings: they may hold what is nobody's business.

use super::metrics::Rejection;
use crate::database;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemas::AccountId;
use serde::Serialize;
use utoipa::ToSchema;

/// When to ask again where nothing better is known: a failed lease cycle is repeated after 2 s.
pub(super) const RETRY_AFTER_S: u32 = 2;

/// Why the API says no (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(example = json!({
    "type": "urn:lockstep:problem:not-found",
    "title": "There is no such thing",
    "status": 404,
    "detail": "there is no link 77"
}))]
pub(super) struct Problem {
    /// What kind of refusal it is; one of a closed list.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The kind in words.
    title: &'static str,
    /// The HTTP status again.
    status: u16,
    /// What it is about, this time.
    detail: String,
    /// Why it cannot be done now, as a word.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// The node that has the account.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    #[serde(skip)]
    retry_after_s: Option<u32>,
}

impl Problem {
    /// The reason where too much is under way.
    pub(super) const BUSY: &str = "busy";
    /// The reason where a node cannot do its work.
    pub(super) const NOT_READY: &str = "not_ready";
    /// The reason where it was not done in time.
    pub(super) const SLOW: &str = "slow";

    fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let (kind, title) = kind_of(status);
        let detail = detail.into();
        let status = status.as_u16();
        Problem { kind, title, status, detail, reason: None, owner: None, retry_after_s: None }
    }

    /// What was sent is no message at all (400).
    pub(super) fn malformed(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::BAD_REQUEST, detail)
    }

    /// No token, or none that is good (401).
    pub(super) fn unauthorized(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::UNAUTHORIZED, detail)
    }

    /// The token may not do this (403).
    pub(super) fn forbidden(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::FORBIDDEN, detail)
    }

    /// There is no such thing (404).
    pub(super) fn not_found(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::NOT_FOUND, detail)
    }

    /// The thing is there, and cannot be asked this way (405).
    pub(super) fn method(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
    }

    /// What is there does not allow it, and asking again would not help (409).
    pub(super) fn conflict(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::CONFLICT, detail)
    }

    /// More than is read (413).
    pub(super) fn too_large(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    }

    /// Not JSON (415).
    pub(super) fn media_type(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
    }

    /// Another node has the account (421).
    pub(super) fn misdirected(detail: impl Into<String>, owner: String) -> Self {
        Problem { owner: Some(owner), ..Problem::new(StatusCode::MISDIRECTED_REQUEST, detail) }
    }

    /// A message whose values cannot be (422).
    pub(super) fn invalid(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
    }

    /// Not now (503).
    pub(super) fn unavailable(
        reason: &'static str,
        detail: impl Into<String>,
        after_s: u32,
    ) -> Self {
        Problem {
            reason: Some(reason),
            retry_after_s: Some(after_s.max(1)),
            ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
        }
    }

    /// No node has the account: not now, or, where it is switched off, not before somebody changes that.
    pub(super) fn ownerless(account: AccountId, is_enabled: bool, after_s: u32) -> Self {
        if is_enabled {
            let detail = format!("no node has account {account} just now");
            return Problem::unavailable("no_owner", detail, after_s);
        }
        Problem::conflict(format!(
            "account {account} is switched off, so that no node has it, and nobody follows or closes its \
             copies: `lockstep account enable` switches it on"
        ))
    }

    /// A fault of this program, or of a row (500).
    pub(super) fn fault(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// Its status.
    #[cfg(test)]
    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// The database is away, takes too long, or allows the node less than the API does.
    pub(super) fn database(error: &sqlx::Error) -> Self {
        tracing::warn!(
            error = crate::causes::with_causes(error),
            "the API got no answer from the database"
        );
        if database::is_not_allowed(error) {
            return Problem::unavailable(
                "database_rights",
                "the node's role in the database lacks a right that the API needs; it has to be a \
                 member of lockstep_api as well as of lockstep_node",
                RETRY_AFTER_S,
            );
        }
        let is_slow =
            error.as_database_error().is_some_and(|e| e.code().as_deref() == Some("57014"));
        match is_slow {
            true => Problem::unavailable(
                "database_slow",
                "the database takes too long for this question; ask for less",
                RETRY_AFTER_S,
            ),
            false => {
                Problem::unavailable("database", "the database does not answer", RETRY_AFTER_S)
            }
        }
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        Problem::database(&error)
    }
}

impl From<crate::directory::DirectoryError> for Problem {
    fn from(error: crate::directory::DirectoryError) -> Self {
        use crate::directory::DirectoryError as E;
        match error {
            E::Database(error) => Problem::database(&error),
            E::NoAccount(_) | E::NoLink(_) => Problem::not_found(error.to_string()),
            E::Row { table, id, column, problem } => {
                tracing::error!(table, id, column, problem, "a row that cannot be");
                Problem::fault(format!(
                    "{table} {id}: column {column} holds a value that cannot be"
                ))
            }
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after = self.retry_after_s;
        let rejection = Rejection::of(status, self.reason);
        let mut response = (status, Json(self)).into_response();
        let headers = response.headers_mut();
        let json = HeaderValue::from_static("application/problem+json");
        headers.insert(header::CONTENT_TYPE, json);
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"lockstep\"");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        if let Some(rejection) = rejection {
            response.extensions_mut().insert(rejection);
        }
        response
    }
}

fn kind_of(status: StatusCode) -> (&'static str, &'static str) {
    match status {
        StatusCode::BAD_REQUEST => ("urn:lockstep:problem:malformed", "This cannot be read"),
        StatusCode::UNAUTHORIZED => ("urn:lockstep:problem:unauthorized", "Say who you are"),
        StatusCode::FORBIDDEN => ("urn:lockstep:problem:forbidden", "The token may not do this"),
        StatusCode::NOT_FOUND => ("urn:lockstep:problem:not-found", "There is no such thing"),
        StatusCode::METHOD_NOT_ALLOWED => {
            ("urn:lockstep:problem:method-not-allowed", "It cannot be asked this way")
        }
        StatusCode::CONFLICT => {
            ("urn:lockstep:problem:conflict", "As things stand, it cannot be done")
        }
        StatusCode::PAYLOAD_TOO_LARGE => ("urn:lockstep:problem:too-large", "This is too much"),
        StatusCode::UNSUPPORTED_MEDIA_TYPE => {
            ("urn:lockstep:problem:unsupported-media-type", "Only JSON is read")
        }
        StatusCode::MISDIRECTED_REQUEST => {
            ("urn:lockstep:problem:misdirected", "Another node has the account")
        }
        StatusCode::UNPROCESSABLE_ENTITY => ("urn:lockstep:problem:invalid", "A value is wrong"),
        StatusCode::SERVICE_UNAVAILABLE => {
            ("urn:lockstep:problem:unavailable", "It cannot be done now")
        }
        _ => ("urn:lockstep:problem:fault", "This is a fault of the program"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causes::fake::refusal;

    #[test]
    fn an_account_that_is_switched_off_is_no_reason_to_ask_again_soon() {
        let account = AccountId::new(2).unwrap();
        let off = Problem::ownerless(account, false, 5);
        assert_eq!((off.status(), off.retry_after_s), (409, None));
        assert!(off.detail.contains("switched off"), "{off:?}");
        let waits = Problem::ownerless(account, true, 5);
        assert_eq!(
            (waits.status(), waits.reason, waits.retry_after_s),
            (503, Some("no_owner"), Some(5))
        );
    }

    #[tokio::test]
    async fn a_right_that_is_lacking_is_told_from_a_database_that_is_away() {
        for (state, reason) in
            [("42501", "database_rights"), ("57014", "database_slow"), ("57P03", "database")]
        {
            let problem = Problem::database(&refusal(state).await);
            assert_eq!((problem.status(), problem.reason), (503, Some(reason)), "{state}");
            assert!(
                !problem.detail.contains("it may not be"),
                "{problem:?} tells the database's words"
            );
        }
    }
}
