//! What comes with a request, checked: body, query, path.
//!
//! Invariants:
//! 1. A field that nobody knows is refused by its name, in bodies and in queries: a misspelt one
//!    must not mean "everything".
//! 2. A body is read up to [`BODY_BYTES_MAX`]; only JSON is read.
//! 3. A refusal names the field and the value in words of this API, never in those of a library.

use super::given::{self, Given, Object, shown};
use super::problem::Problem;
use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, RawPathParams, Request};
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
        let Object(fields) = object(&bytes)?;
        given::read(fields).map(Body).map_err(|fault| Problem::invalid(format!("body: {fault}")))
    }
}

fn object(bytes: &[u8]) -> Result<Object, Problem> {
    serde_json::from_slice(bytes).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => {
            Problem::invalid("body: must be an object, such as {\"mode\": \"paused\"}")
        }
        serde_json::error::Category::Io
        | serde_json::error::Category::Syntax
        | serde_json::error::Category::Eof => Problem::malformed(format!(
            "body: it is no JSON, by its line {}, column {}",
            error.line(),
            error.column()
        )),
    })
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
        let told: Result<Query<Vec<(String, String)>>, _> = Query::try_from_uri(&parts.uri);
        // Any text is names and values of some kind.
        let Query(told) = told.map_err(|_| Problem::invalid("query: it cannot be read"))?;
        let fields = told.into_iter().map(|(name, text)| (name, Given::Query(text))).collect();
        given::read(fields).map(Filter).map_err(|fault| Problem::invalid(format!("query: {fault}")))
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
            Err(_) => {
                let given = RawPathParams::from_request_parts(parts, state).await.ok();
                Err(Problem::not_found(format!("path: {}", fault_of_path(given.as_ref()))))
            }
        }
    }
}

/// What is wrong with a path whose numbers could not be read.
fn fault_of_path(given: Option<&RawPathParams>) -> String {
    let is_number = |text: &str| text.parse().is_ok_and(|number: i64| number > 0);
    let wrong = given.and_then(|given| given.iter().find(|(_, text)| !is_number(text)));
    match wrong {
        Some((name, text)) => {
            format!("{name}: must be a whole number from 1 to {}, got {}", i64::MAX, shown(text))
        }
        None => "it is no UTF-8".to_owned(),
    }
}

/// How many are asked for, when nobody says.
pub(super) const PAGE_DEFAULT: u16 = 100;
/// How many one page holds at most.
pub(super) const PAGE_MAX: u16 = 500;

/// How many, of what a query may say.
pub(super) fn page_size(asked: Option<u64>) -> Result<u16, Problem> {
    limited(asked, PAGE_DEFAULT, PAGE_MAX)
}

/// How many, of what a query may say, where other pages than [`PAGE_MAX`] are meant.
pub(super) fn limited(asked: Option<u64>, default: u16, max: u16) -> Result<u16, Problem> {
    let Some(asked) = asked else { return Ok(default) };
    let size = u16::try_from(asked).ok().filter(|size| (1..=max).contains(size));
    size.ok_or_else(|| Problem::invalid(format!("query: limit: must be 1 to {max}, got {asked}")))
}

/// The number after which a page begins.
pub(super) fn place(after: Option<u64>) -> Result<i64, Problem> {
    let after = after.unwrap_or(0);
    let no_number = |_| format!("query: after: must be {} at most, got {after}", i64::MAX);
    i64::try_from(after).map_err(no_number).map_err(Problem::invalid)
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
