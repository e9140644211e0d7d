//! What nodes were, minute by minute.
//!
//! In: a node's name and a window. Out: every minute of it, a bounded page at a time, newest first.
//!
//! Invariants:
//! 1. A minute without a row is `unknown`, and never left out: that nobody wrote it is what there is to
//!    see of a node that did not run.
//! 2. Only minutes that have ended at least 20 s ago are told: an `unknown` is no row that is on its way,
//!    unless the database was away.
//!
//! Not covered: minutes older than a node keeps them ([`KEPT_MINUTES`]).

use super::ApiState;
use super::extract::{At, Filter, PAGE_MAX, page_size};
use super::given::shown;
use super::problem::Problem;
use super::read::{Answer, NoCursor, NoFilter, Page, deserialized_from_text, hex_words};
use super::refusals::{ListRefusals, OneRefusals};
use crate::directory;
use crate::uptime::state_word;
use crate::uptime::store::{
    self, KEPT_MINUTES, NodeUptime, WrittenMinute, minute_under_way, read_last_day,
};
use axum::Json;
use axum::extract::State;
use schemas::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, UtcOffset};
use utoipa::{IntoParams, ToSchema};

/// The window, where nobody says where it begins: a day.
const WINDOW_DEFAULT: i64 = 24 * 60;
/// The state of a minute that nobody wrote.
const UNKNOWN: &str = "unknown";

/// What each node was in the last 24 hours, by name.
#[utoipa::path(get, path = "/v1/uptime", tag = "see",
    responses((status = 200, description = "At most 500 nodes that have a minute in the last 24 hours", body = Vec<NodeUptime>), ListRefusals))]
pub(super) async fn uptime(
    State(api): State<Arc<ApiState>>,
    Filter(NoFilter {}): Filter<NoFilter>,
) -> Answer<Vec<NodeUptime>> {
    let mut db = api.database().await?;
    let mut nodes = read_last_day(&mut db).await?;
    db.give_back();
    nodes.truncate(usize::from(PAGE_MAX));
    Ok(Json(nodes))
}

/// Which minutes.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct MinuteFilter {
    /// That began at this instant or after it; a day before the end of the window if nobody says. What is
    /// older than 90 days is not kept, and not told.
    #[param(value_type = Option<String>, format = DateTime)]
    since: Option<Instant>,
    /// That began before this instant; all that have ended if nobody says.
    #[param(value_type = Option<String>, format = DateTime)]
    until: Option<Instant>,
    /// The `next` of the page before.
    #[param(value_type = Option<String>, pattern = "^[0-9a-f]{16}$")]
    after: Option<MinuteCursor>,
    /// So many minutes at most; 100 if nobody says.
    #[param(value_type = Option<u16>, minimum = 1, maximum = 500)]
    limit: Option<u64>,
}

impl MinuteFilter {
    /// A window that ends before it begins has no minute, whatever a node was.
    fn check_window(&self) -> Result<(), Problem> {
        let (Some(since), Some(until)) = (self.since, self.until) else { return Ok(()) };
        if until.0 >= since.0 {
            return Ok(());
        }
        let told = |at: Instant| directory::rfc3339(at.0.to_offset(UtcOffset::UTC));
        Err(Problem::invalid(format!(
            "query: until: must not be before since, {}, got {}",
            told(since),
            told(until)
        )))
    }
}

/// An instant, as RFC 3339 writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instant(OffsetDateTime);

impl Instant {
    /// The number of the first minute that begins now or later.
    fn first_minute(self) -> i64 {
        let seconds = self.0.unix_timestamp();
        let is_later = seconds.rem_euclid(60) > 0 || self.0.nanosecond() > 0;
        seconds.div_euclid(60) + i64::from(is_later)
    }
}

/// Text that is no instant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be an instant such as 2026-11-30T09:12:00Z, got {}", shown(.0))]
struct NoInstant(String);

impl TryFrom<String> for Instant {
    type Error = NoInstant;

    fn try_from(text: String) -> Result<Self, NoInstant> {
        OffsetDateTime::parse(&text, &Rfc3339).map(Instant).map_err(|_| NoInstant(text))
    }
}
deserialized_from_text!(Instant);

/// Place in the list of minutes: the last one that was told, in hex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MinuteCursor(i64);

impl std::fmt::Display for MinuteCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl TryFrom<String> for MinuteCursor {
    type Error = NoCursor;

    fn try_from(text: String) -> Result<Self, NoCursor> {
        let [number] = hex_words(text)?;
        Ok(MinuteCursor(number.cast_signed()))
    }
}
deserialized_from_text!(MinuteCursor);

/// One minute of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct NodeMinute {
    /// When it began.
    #[schema(format = DateTime)]
    began: String,
    /// `ok`, `degraded`, or `unknown` where nobody wrote it: the node did not run, or its row is lost.
    state: &'static str,
    /// What was missing: `no account lease`, `bus`, `database`, `broker`.
    reasons: Vec<String>,
    /// When it was written; later than usual where the database was away.
    written_at: Option<String>,
}

/// The minutes of a node, by its name without the part that is drawn at every start; newest first.
#[utoipa::path(get, path = "/v1/uptime/{node}", tag = "see",
    params(("node" = String, Path, description = "Name of the node, as `/v1/uptime` has it", pattern = "^[0-9A-Za-z._-]{1,100}$"), MinuteFilter),
    responses((status = 200, description = "A page of minutes, each whether it was written or not", body = Page<NodeMinute>), OneRefusals))]
pub(super) async fn minutes(
    State(api): State<Arc<ApiState>>,
    At(node): At<String>,
    Filter(which): Filter<MinuteFilter>,
) -> Answer<Page<NodeMinute>> {
    let size = page_size(which.limit)?;
    which.check_window()?;
    // What cannot be a name never comes near the database.
    let node = NodeId::new(node).map_err(|error| Problem::not_found(format!("path: {error}")))?;
    let mut db = api.database().await?;
    let Some(under_way) = minute_under_way(&mut db, node.as_str()).await? else {
        db.give_back();
        let detail = format!("no node of the name {node} has ever recorded a minute");
        return Err(Problem::not_found(detail));
    };
    let numbers = page_of(&which, under_way, size);
    let rows = match numbers.is_empty() {
        true => Vec::new(),
        false => store::read_minutes(&mut db, node.as_str(), numbers.clone()).await?,
    };
    db.give_back();
    let page = Page::of(told(numbers, rows), size, |(number, _)| MinuteCursor(*number).to_string());
    let items = page.items.into_iter().map(|(_, minute)| minute).collect();
    Ok(Json(Page { items, next: page.next }))
}

/// The numbers of a page's minutes, and of one more where the window goes on.
fn page_of(which: &MinuteFilter, under_way: i64, size: u16) -> RangeInclusive<i64> {
    let until = which.until.map_or(under_way, |until| until.first_minute().min(under_way));
    let since = which.since.map_or(until - WINDOW_DEFAULT, Instant::first_minute);
    let newest =
        which.after.map_or(until, |MinuteCursor(after)| after.min(until)).saturating_sub(1);
    let oldest = since.max(under_way - KEPT_MINUTES).max(newest.saturating_sub(i64::from(size)));
    oldest..=newest
}

/// Every minute of these, newest first, whether it has a row or not.
fn told(numbers: RangeInclusive<i64>, rows: Vec<WrittenMinute>) -> Vec<(i64, NodeMinute)> {
    let mut written: BTreeMap<i64, WrittenMinute> =
        rows.into_iter().map(|row| (row.number, row)).collect();
    let minute = |number: i64| {
        let began = OffsetDateTime::from_unix_timestamp(number.saturating_mul(60));
        let began = directory::rfc3339(began.unwrap_or(OffsetDateTime::UNIX_EPOCH));
        let minute = match written.remove(&number) {
            Some(WrittenMinute { reasons, written_at, .. }) => NodeMinute {
                began,
                state: state_word(reasons.is_empty()),
                reasons,
                written_at: Some(directory::rfc3339(written_at)),
            },
            None => NodeMinute { began, state: UNKNOWN, reasons: Vec::new(), written_at: None },
        };
        (number, minute)
    };
    numbers.rev().map(minute).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 29_000_000;

    fn instant(text: &str) -> Instant {
        Instant::try_from(text.to_owned()).unwrap()
    }

    fn filter() -> MinuteFilter {
        MinuteFilter { since: None, until: None, after: None, limit: None }
    }

    fn row(number: i64, reasons: &[&str]) -> WrittenMinute {
        let reasons = reasons.iter().map(|reason| (*reason).to_owned()).collect();
        WrittenMinute { number, reasons, written_at: OffsetDateTime::UNIX_EPOCH }
    }

    #[test]
    fn a_minute_that_nobody_wrote_is_unknown_and_never_ok_or_left_out() {
        let rows = vec![row(7, &[]), row(9, &["bus", "broker"])];
        let told = told(6..=10, rows);
        let seen: Vec<(i64, &str)> = told.iter().map(|(n, minute)| (*n, minute.state)).collect();
        let expected =
            [(10, "unknown"), (9, "degraded"), (8, "unknown"), (7, "ok"), (6, "unknown")];
        assert_eq!(seen, expected);
        assert_eq!(told[1].1.reasons, ["bus", "broker"]);
        assert_eq!(told[3].1.began, "1970-01-01T00:07:00Z");
        assert_eq!(told[4].1.written_at, None);
    }

    #[test]
    fn a_page_ends_before_the_minute_under_way_and_begins_with_the_window() {
        // A day, and one more than the page holds.
        assert_eq!(page_of(&filter(), NOW, 100), NOW - 101..=NOW - 1);
        let short = MinuteFilter { since: Some(instant("2025-02-19T21:10:01Z")), ..filter() };
        assert_eq!(NOW * 60, instant("2025-02-19T21:20:00Z").0.unix_timestamp());
        assert_eq!(page_of(&short, NOW, 100), NOW - 9..=NOW - 1, "the first whole minute");
        let early = MinuteFilter { until: Some(instant("2025-02-19T21:10:00Z")), ..filter() };
        assert_eq!(page_of(&early, NOW, 500).end(), &(NOW - 11));
        let ahead = MinuteFilter { until: Some(instant("2199-01-01T00:00:00+01:00")), ..filter() };
        assert_eq!(page_of(&ahead, NOW, 1), NOW - 2..=NOW - 1, "nothing of the future");
    }

    #[test]
    fn a_window_that_ends_before_it_begins_is_refused() {
        let window = |since, until| MinuteFilter {
            since: Some(instant(since)),
            until: Some(instant(until)),
            ..filter()
        };
        let refused = window("2026-11-30T09:12:00Z", "2026-11-30T10:11:00+01:00").check_window();
        let refused = serde_json::to_value(refused.unwrap_err()).unwrap();
        assert_eq!(refused["status"], 422);
        assert_eq!(
            refused["detail"],
            "query: until: must not be before since, 2026-11-30T09:12:00Z, got 2026-11-30T09:11:00Z"
        );
        // The same instant, in two zones.
        assert!(window("2026-11-30T09:12:00Z", "2026-11-30T10:12:00+01:00").check_window().is_ok());
    }

    #[test]
    fn pages_follow_each_other_and_end_with_what_a_node_keeps() {
        let after = |number| Some(MinuteCursor(number));
        let next = MinuteFilter { after: after(NOW - 50), ..filter() };
        assert_eq!(page_of(&next, NOW, 10), NOW - 61..=NOW - 51);
        let all = Some(instant("0001-01-01T00:00:00Z"));
        let last = MinuteFilter { since: all, after: after(NOW - KEPT_MINUTES + 3), ..filter() };
        assert_eq!(page_of(&last, NOW, 100), NOW - KEPT_MINUTES..=NOW - KEPT_MINUTES + 2);
        for odd in [i64::MIN, i64::MAX] {
            let odd = MinuteFilter { after: after(odd), ..filter() };
            assert!(page_of(&odd, NOW, 500).count() <= 501);
        }
    }

    #[test]
    fn a_place_in_the_minutes_is_read_back_as_it_was_told() {
        let cursor = MinuteCursor(29_000_000);
        assert_eq!(MinuteCursor::try_from(cursor.to_string()), Ok(cursor));
        assert!(MinuteCursor::try_from("29000000".to_owned()).is_err());
        for odd in ["", "now", "2026-11-30", "2026-11-30T09:12:00"] {
            assert_eq!(Instant::try_from(odd.to_owned()), Err(NoInstant(odd.to_owned())), "{odd}");
        }
    }
}
