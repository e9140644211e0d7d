//! Metrics of the API: one table, and what counts.
//!
//! Decides: which series a request goes into. Out: [`METRICS`] for the page of metrics, and [`measured`]
//! around every route.
//!
//! Invariants:
//! 1. A route is counted by its template and never by its path: nobody makes series by asking.
//! 2. Counted is what was answered; who hangs up before an answer is not.
//! 3. Of a stream, the time until it begins is recorded, and not how long it stays open.
//!
//! Not covered: connections that end without a request; the listener counts none.

use super::problem::Problem;
use crate::metrics::{Label, Metric};
use axum::extract::{MatchedPath, Request};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use tokio::time::Instant;

/// Names of the metrics, for the places that record them.
pub mod names {
    /// Requests answered.
    pub const REQUESTS: &str = "lockstep_api_requests_total";
    /// How long they took.
    pub const REQUEST_SECONDS: &str = "lockstep_api_request_seconds";
    /// Requests that did not come to what they asked for.
    pub const REJECTED: &str = "lockstep_api_rejected_total";
}

/// Every route, as the description has it, those that are no part of it, and `none` for what there is not.
pub(super) const ROUTES: &[&str] = &[
    "/v1/accounts",
    "/v1/accounts/{account}/mode",
    "/v1/accounts/{account}/positions",
    "/v1/accounts/{account}/release",
    "/v1/events",
    "/v1/fleet",
    "/v1/fleet/mode",
    "/v1/links",
    "/v1/links/{link}/mode",
    "/v1/nodes",
    "/v1/pairs",
    "/v1/pairs/{link}/{ticket}/close",
    "/v1/stream",
    "/v1/tokens",
    "/v1/tokens/{token}",
    "/v1/uptime",
    "/v1/uptime/{node}",
    "/v1/why/{link}/{ticket}",
    "/livez",
    "/readyz",
    NO_ROUTE,
];

const NO_ROUTE: &str = "none";

/// What became of a request, by its status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Done,
    Refused,
    Unavailable,
}

impl Class {
    fn of(status: StatusCode) -> Class {
        match status.as_u16() {
            ..400 => Class::Done,
            400..500 => Class::Refused,
            500.. => Class::Unavailable,
        }
    }

    schemas::words! {
        /// The word in metrics.
        fn as_str(self) in WORDS {
            Class::Done => "2xx",
            Class::Refused => "4xx",
            Class::Unavailable => "5xx",
        }
    }
}

/// Why a request was turned away without a look at what it asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rejection {
    /// No good token.
    Auth,
    /// A token that may not do it.
    Scope,
    /// More than is read.
    BodyTooLarge,
    /// It took too long.
    Timeout,
    /// Too much was under way.
    Overload,
}

impl Rejection {
    schemas::words! {
        /// The word in metrics.
        fn as_str(self) in WORDS {
            Rejection::Auth => "auth",
            Rejection::Scope => "scope",
            Rejection::BodyTooLarge => "body_too_large",
            Rejection::Timeout => "timeout",
            Rejection::Overload => "overload",
        }
    }

    /// What a refusal with this status and reason is; nothing for those that answer what was asked.
    pub(super) fn of(status: StatusCode, reason: Option<&str>) -> Option<Rejection> {
        match (status, reason) {
            (StatusCode::UNAUTHORIZED, _) => Some(Rejection::Auth),
            (StatusCode::FORBIDDEN, _) => Some(Rejection::Scope),
            (StatusCode::PAYLOAD_TOO_LARGE, _) => Some(Rejection::BodyTooLarge),
            (StatusCode::SERVICE_UNAVAILABLE, Some(Problem::SLOW)) => Some(Rejection::Timeout),
            (StatusCode::SERVICE_UNAVAILABLE, Some(Problem::BUSY)) => Some(Rejection::Overload),
            _ => None,
        }
    }
}

/// The table.
pub const METRICS: &[Metric] = &[
    Metric::counter(
        names::REQUESTS,
        &[Label::new("route", &[ROUTES]), Label::new("class", &[Class::WORDS])],
        "Requests to the API that were answered, by route and class of status; none: there is no such route.",
    ),
    Metric::seconds(
        names::REQUEST_SECONDS,
        &[],
        "From the head of a request to the API to the head of its answer.",
        &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0],
    ),
    Metric::counter(
        names::REJECTED,
        &[Label::new("reason", &[Rejection::WORDS])],
        "Requests to the API that were turned away: no good token (auth), one that may not do it (scope), more than is read (body_too_large), not done in time (timeout), too much under way (overload).",
    ),
];

fn route_of(matched: Option<&MatchedPath>) -> &'static str {
    let matched = matched.map(MatchedPath::as_str);
    ROUTES.iter().copied().find(|route| Some(*route) == matched).unwrap_or(NO_ROUTE)
}

/// Counts a request once it is answered.
pub(super) async fn measured(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let route = route_of(request.extensions().get::<MatchedPath>());
    let response = next.run(request).await;
    metrics::histogram!(names::REQUEST_SECONDS).record(began.elapsed().as_secs_f64());
    let class = Class::of(response.status()).as_str();
    metrics::counter!(names::REQUESTS, "route" => route, "class" => class).increment(1);
    if let Some(rejection) = response.extensions().get::<Rejection>() {
        metrics::counter!(names::REJECTED, "reason" => rejection.as_str()).increment(1);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejection_is_told_from_a_refusal_of_what_was_asked() {
        let of = |status: u16, reason| Rejection::of(StatusCode::from_u16(status).unwrap(), reason);
        assert_eq!(of(401, None), Some(Rejection::Auth));
        assert_eq!(of(403, None), Some(Rejection::Scope));
        assert_eq!(of(413, None), Some(Rejection::BodyTooLarge));
        assert_eq!(of(503, Some("slow")), Some(Rejection::Timeout));
        assert_eq!(of(503, Some("busy")), Some(Rejection::Overload));
        for (status, reason) in [(404, None), (422, None), (503, Some("database")), (500, None)] {
            assert_eq!(of(status, reason), None, "{status}");
        }
    }
}
