//! Copy events as they happen on this node, as server-sent events.
//!
//! In: the node's tape, and where a client left off. Out: an endless answer, up to a bound.
//!
//! Invariants:
//! 1. At most [`STREAMS_MAX`] are open, each for [`STREAM_LIMIT`] at most: a token that was revoked
//!    is asked for again then.
//! 2. A client that does not keep up is told `missed`, and its stream ends: nothing waits for it.
//!    One whose connection takes no more bytes is dropped by the listener.

use super::ApiState;
use super::extract::Filter;
use super::problem::{Problem, RETRY_AFTER_S};
use super::read::Event;
use super::refusals::ListRefusals;
use crate::directory;
use crate::story;
use crate::tape::{Missed, Reader};
use crate::writer::CopyEvent;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream::{self, StreamExt};
use schemas::{AccountId, LinkId};
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use utoipa::IntoParams;

/// Streams that are open at once.
pub const STREAMS_MAX: usize = 16;
/// The longest that one stays open; its client comes back with `Last-Event-ID`.
pub const STREAM_LIMIT: Duration = Duration::from_secs(600);
/// Without an event for so long, a comment is sent, so that whoever is between sees life.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StreamFilter {
    /// Of this link.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    link: Option<LinkId>,
    /// Of this follower.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    follower: Option<AccountId>,
}

impl StreamFilter {
    fn takes(&self, event: &CopyEvent) -> bool {
        self.link.is_none_or(|link| link == event.link)
            && self.follower.is_none_or(|follower| follower == event.follower)
    }
}

/// Copy events of this node as they happen (server-sent events). Each is `event: copy`, with the JSON
/// of an event as its data. `event: missed` says that some are not told here: `/v1/events` has them.
/// A client that comes back says with `Last-Event-ID` where it was.
#[utoipa::path(get, path = "/v1/stream", tag = "see",
    params(StreamFilter, ("Last-Event-ID" = Option<String>, Header, description = "The id of the last event that was heard")),
    responses((status = 200, description = "Events, for ten minutes", content_type = "text/event-stream", body = String), ListRefusals))]
pub(super) async fn stream(
    State(api): State<Arc<ApiState>>,
    Filter(which): Filter<StreamFilter>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Problem> {
    let permit = Arc::clone(&api.streams).try_acquire_owned().map_err(|_| {
        let detail = format!("{STREAMS_MAX} streams are open already");
        Problem::unavailable(Problem::BUSY, detail, RETRY_AFTER_S)
    })?;
    let last = headers.get("last-event-id").map(|id| id.to_str().unwrap_or_default());
    let begin = last.map_or(Begin::Now, |id| number_of(&api, id));
    let reader = match begin {
        Begin::Now | Begin::Elsewhere => api.context.tape.read(None),
        Begin::After(number) => api.context.tape.read(Some(number)),
    };
    let missed_before = matches!(begin, Begin::Elsewhere).then(missed);
    let until = Instant::now() + STREAM_LIMIT;
    let watch = Watch { api, which, reader, until, is_over: false, _permit: permit };
    let events =
        stream::iter(missed_before).chain(stream::unfold(watch, next).flat_map(stream::iter));
    Ok(Sse::new(events.map(Ok)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

enum Begin {
    Now,
    After(u64),
    /// The id is of another process, whose numbers mean nothing here.
    Elsewhere,
}

fn number_of(api: &ApiState, id: &str) -> Begin {
    let of_this = id.rsplit_once('.').filter(|(node, _)| *node == api.context.node.as_str());
    let number = of_this.and_then(|(_, number)| number.parse().ok());
    number.map_or(Begin::Elsewhere, Begin::After)
}

struct Watch {
    api: Arc<ApiState>,
    which: StreamFilter,
    reader: Reader,
    until: Instant,
    is_over: bool,
    _permit: OwnedSemaphorePermit,
}

async fn next(mut watch: Watch) -> Option<(Vec<sse::Event>, Watch)> {
    if watch.is_over {
        return None;
    }
    let read = tokio::time::timeout_at(watch.until, watch.reader.next()).await.ok()?;
    let events = match read {
        Ok(events) => {
            let of_interest = events.into_iter().filter(|(_, event)| watch.which.takes(event));
            let node = watch.api.context.node.as_str();
            of_interest.map(|(number, event)| told(node, number, &event)).collect()
        }
        Err(Missed) => {
            watch.is_over = true;
            vec![missed()]
        }
    };
    Some((events, watch))
}

fn told(node: &str, number: u64, event: &CopyEvent) -> sse::Event {
    let data = serde_json::to_string(&event_of(node, event)).unwrap_or_default();
    sse::Event::default().event("copy").id(format!("{node}.{number}")).data(data)
}

fn missed() -> sse::Event {
    sse::Event::default().event("missed").data("{}")
}

fn event_of(node: &str, event: &CopyEvent) -> Event {
    let nanos = i128::from(event.at.0) * 1_000;
    let at = OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    Event {
        id: event.id.to_string(),
        at: directory::rfc3339(at),
        node: node.to_owned(),
        link: event.link.as_i64(),
        follower: event.follower.as_i64(),
        master_ticket: event.master_ticket.as_i64(),
        follower_ticket: event.follower_ticket.map(|ticket| ticket.as_i64()),
        action: event.action.to_owned(),
        outcome: event.outcome.as_str().to_owned(),
        reason: event.reason.clone(),
        says: story::says(event.action, event.outcome.as_str(), event.reason.as_deref()),
        symbol: event.symbol.as_ref().map(ToString::to_string),
        lots: event.lots.map(|lots| lots.to_string()),
        price: event.price.map(|price| price.to_string()),
        own_time_us: event.own_time.map(micros),
        broker_time_us: event.broker_time.map(micros),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::tests::event;

    #[test]
    fn a_stream_of_one_link_or_follower_is_told_of_no_other() {
        let other = (LinkId::new(9).unwrap(), AccountId::new(9).unwrap());
        let event = event(1);
        for (link, follower, takes) in [
            (None, None, true),
            (Some(event.link), Some(event.follower), true),
            (Some(other.0), None, false),
            (None, Some(other.1), false),
            (Some(event.link), Some(other.1), false),
        ] {
            let which = StreamFilter { link, follower };
            assert_eq!(which.takes(&event), takes, "{which:?}");
        }
    }
}
