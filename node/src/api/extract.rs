//! What comes with a request, checked: body, query, path.
//!
//! Invariants:
//! 1. A field that nobody knows is refused by its name, in bodies and in queries: a misspelt one
//!    must not mean "everything".
//! 2. A body is read up to [`BODY_BYTES_MAX`]; only JSON is read.

use super::problem::Problem;
use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use serde::de::DeserializeOwned;

/// The largest body; the largest there is has some thirty bytes.
pub(super) const BODY_BYTES_MAX: usize = 16 * 1024;

/// A JSON body.
#[derive(Debug)]
pub(super) struct Body<T>(pub(super) T);

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        if !is_json(request.headers()) {
            return Err(Problem::media_type("the body must be application/json"));
        }
        let bytes = read(request).await?;
        serde_json::from_slice(&bytes).map(Body).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => Problem::invalid(format!("body: {error}")),
            serde_json::error::Category::Io
            | serde_json::error::Category::Syntax
            | serde_json::error::Category::Eof => Problem::malformed(format!("body: {error}")),
        })
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let stated = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = stated.and_then(|stated| stated.split(';').next()).map(str::trim);
    essence.is_some_and(|essence| essence.eq_ignore_ascii_case("application/json"))
}

async fn read(request: Request) -> Result<Bytes, Problem> {
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared = declared.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let too_large = || Problem::too_large(format!("a body has {BODY_BYTES_MAX} bytes at most"));
    if declared.is_some_and(|bytes| bytes > BODY_BYTES_MAX as u64) {
        return Err(too_large());
    }
    // One that is longer than it said is cut off by the reader, and one that breaks off is no JSON.
    to_bytes(request.into_body(), BODY_BYTES_MAX).await.map_err(|_| too_large())
}

/// The fields behind the question mark.
#[derive(Debug)]
pub(super) struct Filter<T>(pub(super) T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Filter<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(filter)) => Ok(Filter(filter)),
            Err(rejection) => Err(Problem::invalid(format!("query: {}", rejection.body_text()))),
        }
    }
}

/// The numbers in the path. One that cannot be is of nothing that exists.
#[derive(Debug)]
pub(super) struct At<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for At<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(at)) => Ok(At(at)),
            Err(rejection) => Err(Problem::not_found(format!("path: {}", rejection.body_text()))),
        }
    }
}

/// How many are asked for, when nobody says.
pub(super) const PAGE_DEFAULT: u16 = 100;
/// How many one page holds at most.
pub(super) const PAGE_MAX: u16 = 500;

/// How many, of what a query may say.
pub(super) fn page_size(asked: Option<u16>) -> Result<u16, Problem> {
    match asked {
        None => Ok(PAGE_DEFAULT),
        Some(1..=PAGE_MAX) => Ok(asked.unwrap_or(PAGE_DEFAULT)),
        Some(other) => {
            Err(Problem::invalid(format!("query: limit: must be 1 to {PAGE_MAX}, got {other}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream::{self, StreamExt};
    use std::convert::Infallible;

    #[tokio::test]
    async fn a_body_that_does_not_say_its_length_is_read_up_to_the_limit_and_no_further() {
        let blanks = || Ok::<_, Infallible>(Bytes::from_static(&[b' '; 1024]));
        let endless = stream::repeat_with(blanks).take(8 * BODY_BYTES_MAX / 1024);
        let body = axum::body::Body::from_stream(endless);
        let request = Request::builder().header(header::CONTENT_TYPE, "application/json");
        let read = Body::<bool>::from_request(request.body(body).unwrap(), &()).await;
        assert_eq!(read.unwrap_err().status(), 413);
    }
}
