//! What can be seen: accounts, links, nodes, pairs, events, and why a trade was copied or not.
//!
//! In: a filter and a place to go on from. Out: rows of the database, a bounded page at a time.
//!
//! Invariants:
//! 1. Every question is one statement with binds, and every list ends after [`PAGE_MAX`] rows.
//! 2. Of an account's connection only address and login are told: the rest may hold secrets (H76).
//! 3. Pages go by a key that does not change, so that nothing is told twice or left out while rows
//!    are written. The text of `next` means nothing to anybody else.
//!
//! Not covered: what has not been written yet; rows follow the orders by about 100 ms.

use super::ApiState;
use super::extract::{At, Filter, PAGE_MAX, page_size, place};
use super::given::{one_of, shown};
use super::problem::Problem;
use super::refusals::{ListRefusals, OneRefusals};
use crate::directory::{self, Mode};
use crate::lease;
use crate::story::{self, Story};
use crate::writer::states::live_states;
use axum::Json;
use axum::extract::State;
use reconcile::CopyStep;
use rust_decimal::Decimal;
use schemas::{AccountId, LinkId, MasterTicket};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgRow, Postgres};
use sqlx::{QueryBuilder, Row};
use std::sync::Arc;
use time::OffsetDateTime;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};
use uuid::Uuid;

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Page<T> {
    /// The rows.
    pub(super) items: Vec<T>,
    /// Where the next page begins, for `after`; null on the last one.
    pub(super) next: Option<String>,
}

impl<T> Page<T> {
    /// From one row more than the page holds.
    pub(super) fn of(mut items: Vec<T>, size: u16, key: impl Fn(&T) -> String) -> Page<T> {
        let is_last = items.len() <= usize::from(size);
        items.truncate(usize::from(size));
        let next = items.last().filter(|_| !is_last).map(key);
        Page { items, next }
    }
}

pub(super) type Answer<T> = Result<Json<T>, Problem>;

/// Which part of a list by number.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ByNumber {
    /// What comes after this number.
    #[param(value_type = Option<i64>, minimum = 0, maximum = 9223372036854775807_i64)]
    after: Option<u64>,
    /// So many rows at most; 100 if nobody says.
    #[param(value_type = Option<u16>, minimum = 1, maximum = 500)]
    pub(super) limit: Option<u64>,
}

impl ByNumber {
    pub(super) fn place(&self) -> Result<i64, Problem> {
        place(self.after)
    }
}

/// An account.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Account {
    /// Its number.
    pub(super) id: i64,
    /// What it is called.
    pub(super) name: String,
    /// The platform of its broker.
    pub(super) platform: String,
    /// Nodes may own it.
    pub(super) enabled: bool,
    /// What is allowed on all its links.
    pub(super) mode: Mode,
    /// Where its broker is.
    pub(super) address: Option<String>,
    /// Its number at the broker, where that is another one.
    pub(super) login: Option<String>,
    /// The node that has it.
    pub(super) owner: Option<String>,
    /// Seconds until the owner's lease ends, by the database's clock; negative when it is over.
    pub(super) lease_left_s: Option<f64>,
    /// What its session last said of itself.
    pub(super) session: Option<Session>,
}

/// What a session says of itself.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Session {
    /// `connecting`, `reconciling`, `copying`, `paused`, `leading`, `draining` or `unusable`.
    pub(super) state: String,
    /// Why.
    pub(super) detail: Option<String>,
    /// The node that says so.
    pub(super) node: String,
    /// The present owner says so, in this tenure.
    pub(super) is_current: bool,
    /// Money without open trades.
    pub(super) balance: Option<String>,
    /// Money with open trades.
    pub(super) equity: Option<String>,
    /// Of both.
    pub(super) currency: Option<String>,
    /// Open trades, whoever opened them.
    pub(super) positions_open: Option<i32>,
    /// Waiting orders, whoever placed them.
    pub(super) pendings_open: Option<i32>,
    /// When, by the node's clock.
    #[schema(format = DateTime)]
    pub(super) reported_at: String,
}

/// Accounts, by number.
#[utoipa::path(get, path = "/v1/accounts", tag = "see", params(ByNumber),
    responses((status = 200, description = "A page of accounts", body = Page<Account>), ListRefusals))]
pub(super) async fn accounts(
    State(api): State<Arc<ApiState>>,
    Filter(by): Filter<ByNumber>,
) -> Answer<Page<Account>> {
    let (size, after) = (page_size(by.limit)?, by.place()?);
    let mut db = api.database().await?;
    let rows = sqlx::query(
        "select a.id, a.name, a.platform, a.enabled, a.mode, a.connection ->> 'address' as address, \
         a.connection ->> 'login' as login, a.node_id, \
         extract(epoch from nullif(a.lease_until, '-infinity') - clock_timestamp())::float8 as left_s, \
         s.session, s.detail, s.node_id as says_node, s.balance, s.equity, s.currency, s.positions_open, \
         s.pendings_open, s.reported_at, s.lease_token = a.lease_token and a.node_id is not null as is_current \
         from trading_accounts a left join account_status s on s.account_id = a.id \
         where a.id > $1 order by a.id limit $2",
    )
    .bind(after)
    .bind(i64::from(size) + 1)
    .fetch_all(&mut *db)
    .await?;
    let items = rows.iter().map(account).collect::<Result<_, _>>()?;
    db.give_back();
    Ok(Json(Page::of(items, size, |account| account.id.to_string())))
}

fn account(row: &PgRow) -> Result<Account, Problem> {
    let owner: Option<String> = row.get("node_id");
    let state: Option<String> = row.get("session");
    let session = state.map(|state| Session {
        state,
        detail: row.get("detail"),
        node: row.get("says_node"),
        is_current: row.get("is_current"),
        balance: decimal(row, "balance"),
        equity: decimal(row, "equity"),
        currency: row.get("currency"),
        positions_open: row.get("positions_open"),
        pendings_open: row.get("pendings_open"),
        reported_at: at(row.get("reported_at")),
    });
    Ok(Account {
        id: row.get("id"),
        name: row.get("name"),
        platform: row.get("platform"),
        enabled: row.get("enabled"),
        mode: directory::mode(row, "trading_accounts", row.get("id"), "mode")?,
        address: row.get("address"),
        login: row.get("login"),
        lease_left_s: owner.as_ref().and_then(|_| row.get("left_s")),
        owner,
        session,
    })
}

/// A link from a master to a follower.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Link {
    /// Its number.
    pub(super) id: u64,
    /// Number of the master.
    pub(super) master: u64,
    /// Number of the follower.
    pub(super) follower: u64,
    /// The number that marks its orders at the follower's broker.
    pub(super) magic: u64,
    /// It is switched on.
    pub(super) enabled: bool,
    /// What is allowed on it.
    pub(super) mode: Mode,
    /// What comes of that with the modes of its accounts and the fleet, and `enabled`.
    pub(super) effective_mode: Mode,
    /// How volumes are computed.
    pub(super) sizing: String,
    /// The number that goes with it.
    pub(super) sizing_value: String,
    /// How far the price may have moved for a late copy, in points.
    pub(super) slippage_points: u32,
    /// Trades opened before this instant are not copied.
    #[schema(format = DateTime)]
    pub(super) copy_from: String,
    /// Since when it is known that the follower's broker keeps no tags.
    pub(super) untaggable_since: Option<String>,
    /// Every other rule that is not the default, as `lockstep link add` writes it.
    pub(super) options: Vec<String>,
}

/// Links that were not deleted, by number.
#[utoipa::path(get, path = "/v1/links", tag = "see", params(ByNumber),
    responses((status = 200, description = "A page of links", body = Page<Link>), ListRefusals))]
pub(super) async fn links(
    State(api): State<Arc<ApiState>>,
    Filter(by): Filter<ByNumber>,
) -> Answer<Page<Link>> {
    let (size, after) = (page_size(by.limit)?, by.place()?);
    let mut db = api.database().await?;
    let rows = directory::links_after(&mut db, after, i64::from(size) + 1).await?;
    db.give_back();
    let items = rows.into_iter().map(|row| Link {
        id: row.id.get(),
        master: row.master_id.get(),
        follower: row.follower_id.get(),
        magic: row.magic.get(),
        enabled: row.enabled,
        mode: row.mode,
        effective_mode: row.effective_mode,
        sizing: row.sizing,
        sizing_value: row.sizing_value.to_string(),
        slippage_points: row.slippage_points,
        copy_from: row.copy_from,
        untaggable_since: row.untaggable_since,
        options: row.options,
    });
    Ok(Json(Page::of(items.collect(), size, |link| link.id.to_string())))
}

/// A node, by its own word.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Node {
    /// Its name, with the random part of its process.
    pub(super) node: String,
    /// Its name alone, as `/v1/uptime` has it.
    pub(super) name: String,
    /// Platforms that it serves.
    pub(super) platforms: Vec<String>,
    /// Accounts that it takes at most; 0 while it lets go of all.
    pub(super) capacity: i32,
    /// Accounts that it has.
    pub(super) owned: i32,
    /// It has said so lately.
    pub(super) is_alive: bool,
    /// This process, which answers.
    pub(super) is_this: bool,
}

/// The processes of the fleet, by name.
#[utoipa::path(get, path = "/v1/nodes", tag = "see",
    responses((status = 200, description = "At most 500 nodes", body = Vec<Node>), ListRefusals))]
pub(super) async fn nodes(
    State(api): State<Arc<ApiState>>,
    Filter(NoFilter {}): Filter<NoFilter>,
) -> Answer<Vec<Node>> {
    let mut db = api.database().await?;
    let rows = sqlx::query(
        "select node_id, platforms, capacity, owned, alive_until > clock_timestamp() as is_alive \
         from lease_nodes order by node_id limit $1",
    );
    let rows = rows.bind(i64::from(PAGE_MAX)).fetch_all(&mut *db).await?;
    db.give_back();
    let node = |row: &PgRow| Node {
        node: row.get("node_id"),
        name: lease::name_of(row.get("node_id")).to_owned(),
        platforms: row.get("platforms"),
        capacity: row.get("capacity"),
        owned: row.get("owned"),
        is_alive: row.get("is_alive"),
        is_this: row.get::<&str, _>("node_id") == api.context.node.as_str(),
    };
    Ok(Json(rows.iter().map(node).collect()))
}

/// What takes no filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoFilter {}

/// What is allowed on every link there is.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Fleet {
    /// It.
    pub(super) mode: Mode,
}

/// What is allowed on every link there is.
#[utoipa::path(get, path = "/v1/fleet", tag = "see",
    responses((status = 200, description = "The mode of the fleet", body = Fleet), ListRefusals))]
pub(super) async fn fleet(
    State(api): State<Arc<ApiState>>,
    Filter(NoFilter {}): Filter<NoFilter>,
) -> Answer<Fleet> {
    let mut db = api.database().await?;
    let mode = directory::fleet_mode(&mut db).await?;
    db.give_back();
    Ok(Json(Fleet { mode }))
}

/// How a pair stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum StateFilter {
    /// Any of the next three.
    Live,
    /// Its order may have gone out.
    Sending,
    /// Its copy is open.
    Open,
    /// Its close may have gone out.
    Closing,
    /// Its copy ended.
    Closed,
    /// Its order came to nothing.
    Failed,
    /// It was decided not to copy.
    Skipped,
}

impl StateFilter {
    fn words(self) -> &'static str {
        // Written out, so that the planner sees the condition of the index that belongs to it.
        match self {
            StateFilter::Live => concat!("state in ", live_states!()),
            StateFilter::Sending => "state = 'sending'",
            StateFilter::Open => "state = 'open'",
            StateFilter::Closing => "state = 'closing'",
            StateFilter::Closed => "state = 'closed'",
            StateFilter::Failed => "state = 'failed'",
            StateFilter::Skipped => "state = 'skipped'",
        }
    }
}

/// Which pairs.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PairFilter {
    /// Of this link.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    link: Option<LinkId>,
    /// Of this follower.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    follower: Option<AccountId>,
    /// That stand so; live ones if nobody says.
    #[param(inline)]
    state: Option<StateFilter>,
    /// The `next` of the page before.
    #[param(value_type = Option<String>, pattern = "^[0-9a-f]{64}$")]
    after: Option<PairCursor>,
    /// So many rows at most; 100 if nobody says.
    #[param(value_type = Option<u16>, minimum = 1, maximum = 500)]
    limit: Option<u64>,
}

/// Place in the list of pairs: link, ticket and id, in hex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PairCursor {
    link: i64,
    ticket: i64,
    id: Uuid,
}

impl std::fmt::Display for PairCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}{:016x}{:032x}", self.link, self.ticket, self.id.as_u128())
    }
}

impl TryFrom<String> for PairCursor {
    type Error = NoCursor;

    fn try_from(text: String) -> Result<Self, NoCursor> {
        let [link, ticket, high, low] = hex_words(text)?;
        let id = Uuid::from_u64_pair(high, low);
        Ok(PairCursor { link: link.cast_signed(), ticket: ticket.cast_signed(), id })
    }
}

/// Text that is no place in a list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be the `next` of an earlier page, got {}", shown(.0))]
pub(super) struct NoCursor(String);

/// So many words of sixteen hex digits, and nothing else.
pub(super) fn hex_words<const N: usize>(text: String) -> Result<[u64; N], NoCursor> {
    let is_hex = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if text.len() != 16 * N || !is_hex {
        return Err(NoCursor(text));
    }
    let mut words = [0; N];
    for (place, word) in words.iter_mut().enumerate() {
        match u64::from_str_radix(&text[16 * place..16 * (place + 1)], 16) {
            Ok(read) => *word = read,
            Err(_) => return Err(NoCursor(text)),
        }
    }
    Ok(words)
}

macro_rules! deserialized_from_text {
    ($name:ident) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                $name::try_from(String::deserialize(from)?).map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(super) use deserialized_from_text;
deserialized_from_text!(PairCursor);
deserialized_from_text!(EventCursor);
deserialized_from_text!(Action);

/// One master's trade on one link, and its copy.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Pair {
    /// Its id.
    #[schema(format = Uuid)]
    pub(super) id: String,
    /// The link.
    pub(super) link: i64,
    /// The follower.
    pub(super) follower: i64,
    /// The master's trade or order.
    pub(super) master_ticket: i64,
    /// The copy.
    pub(super) follower_ticket: Option<i64>,
    /// `sending`, `open`, `closing`, `closed`, `failed` or `skipped`.
    pub(super) state: String,
    /// The copy waits as an order.
    pub(super) is_pending: bool,
    /// Symbol of the copy.
    pub(super) symbol: String,
    /// Direction of the copy.
    pub(super) side: String,
    /// Direction of the master's trade.
    pub(super) master_side: String,
    /// Volume of the copy when it was opened.
    pub(super) lots_at_open: Option<String>,
    /// The master's volume that it stands for.
    pub(super) master_lots_at_open: String,
    /// Why it ended.
    pub(super) reason: Option<String>,
    /// When its order left.
    pub(super) sent_at: Option<String>,
    /// When it ended.
    pub(super) closed_at: Option<String>,
    /// When this was written, by the database's clock.
    #[schema(format = DateTime)]
    pub(super) written_at: String,
    /// The node that says so.
    pub(super) node: String,
}

/// Pairs, by link and master ticket.
#[utoipa::path(get, path = "/v1/pairs", tag = "see", params(PairFilter),
    responses((status = 200, description = "A page of pairs", body = Page<Pair>), ListRefusals))]
pub(super) async fn pairs(
    State(api): State<Arc<ApiState>>,
    Filter(which): Filter<PairFilter>,
) -> Answer<Page<Pair>> {
    let size = page_size(which.limit)?;
    let mut query = QueryBuilder::<Postgres>::new(
        "select id, link_id, follower_id, master_ticket, follower_ticket, state, is_pending, symbol, \
         side, master_side, lots_at_open, master_lots_at_open, reason, sent_at, closed_at, written_at, \
         node_id from pairs where ",
    );
    query.push(which.state.unwrap_or(StateFilter::Live).words());
    if let Some(link) = which.link {
        let link = link.as_i64();
        query.push(" and link_id = ").push_bind(link);
        // The indexes begin with the follower.
        query.push(" and follower_id = (select follower_id from copy_links where id = ");
        query.push_bind(link).push(")");
    }
    if let Some(follower) = which.follower {
        query.push(" and follower_id = ").push_bind(follower.as_i64());
    }
    if let Some(PairCursor { link, ticket, id }) = which.after {
        query.push(" and (link_id, master_ticket, id) > (").push_bind(link);
        query.push(", ").push_bind(ticket).push(", ").push_bind(id).push(")");
    }
    query.push(" order by link_id, master_ticket, id limit ").push_bind(i64::from(size) + 1);
    let mut db = api.database().await?;
    let rows = query.build().fetch_all(&mut *db).await?;
    db.give_back();
    let items = rows.iter().map(|row| (cursor_of(row), pair(row))).collect();
    let page = Page::of(items, size, |(cursor, _): &(PairCursor, Pair)| cursor.to_string());
    let items = page.items.into_iter().map(|(_, pair)| pair).collect();
    Ok(Json(Page { items, next: page.next }))
}

fn cursor_of(row: &PgRow) -> PairCursor {
    PairCursor { link: row.get("link_id"), ticket: row.get("master_ticket"), id: row.get("id") }
}

fn pair(row: &PgRow) -> Pair {
    Pair {
        id: row.get::<Uuid, _>("id").to_string(),
        link: row.get("link_id"),
        follower: row.get("follower_id"),
        master_ticket: row.get("master_ticket"),
        follower_ticket: row.get("follower_ticket"),
        state: row.get("state"),
        is_pending: row.get("is_pending"),
        symbol: row.get("symbol"),
        side: row.get("side"),
        master_side: row.get("master_side"),
        lots_at_open: decimal(row, "lots_at_open"),
        master_lots_at_open: row.get::<Decimal, _>("master_lots_at_open").normalize().to_string(),
        reason: row.get("reason"),
        sent_at: row.get::<Option<_>, _>("sent_at").map(at),
        closed_at: row.get::<Option<_>, _>("closed_at").map(at),
        written_at: at(row.get("written_at")),
        node: row.get("node_id"),
    }
}

/// How something ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum OutcomeFilter {
    /// The broker did it.
    Done,
    /// It was decided not to.
    Skipped,
    /// The broker refused.
    Rejected,
    /// It did not reach the broker.
    NotSent,
    /// Nobody knows.
    Unknown,
}

impl OutcomeFilter {
    fn word(self) -> &'static str {
        match self {
            OutcomeFilter::Done => "done",
            OutcomeFilter::Skipped => "skipped",
            OutcomeFilter::Rejected => "rejected",
            OutcomeFilter::NotSent => "not_sent",
            OutcomeFilter::Unknown => "unknown",
        }
    }
}

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventFilter {
    /// Of this link.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    link: Option<LinkId>,
    /// Of this follower.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    follower: Option<AccountId>,
    /// Of this trade of the master.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 9223372036854775807_i64)]
    ticket: Option<MasterTicket>,
    /// Of this step.
    #[param(inline)]
    action: Option<Action>,
    /// That ended so.
    #[param(inline)]
    outcome: Option<OutcomeFilter>,
    /// The `next` of the page before.
    #[param(value_type = Option<String>, pattern = "^[0-9a-f]{48}$")]
    after: Option<EventCursor>,
    /// So many rows at most; 100 if nobody says.
    #[param(value_type = Option<u16>, minimum = 1, maximum = 500)]
    limit: Option<u64>,
}

/// The word of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Action(&'static str);

impl TryFrom<String> for Action {
    type Error = NoAction;

    fn try_from(text: String) -> Result<Self, NoAction> {
        let known = CopyStep::WORDS.iter().find(|word| **word == text);
        known.map(|word| Action(word)).ok_or(NoAction(text))
    }
}

impl PartialSchema for Action {
    fn schema() -> RefOr<Schema> {
        let words = CopyStep::WORDS.iter().copied();
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words)).into()
    }
}

impl ToSchema for Action {}

/// Text that is no word of a step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}, got {}", one_of(CopyStep::WORDS), shown(.0))]
pub(super) struct NoAction(String);

/// Place in the list of events: time in microseconds, and id, in hex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventCursor {
    at_us: i64,
    id: Uuid,
}

impl std::fmt::Display for EventCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}{:032x}", self.at_us, self.id.as_u128())
    }
}

impl TryFrom<String> for EventCursor {
    type Error = NoCursor;

    fn try_from(text: String) -> Result<Self, NoCursor> {
        let [at_us, high, low] = hex_words(text)?;
        Ok(EventCursor { at_us: at_us.cast_signed(), id: Uuid::from_u64_pair(high, low) })
    }
}

impl EventCursor {
    /// The instant; one that no calendar has is the nearest that has been.
    fn at(self) -> OffsetDateTime {
        let nanos = i128::from(self.at_us) * 1_000;
        let instant = OffsetDateTime::from_unix_timestamp_nanos(nanos);
        instant
            .ok()
            .filter(|at| (1970..=9998).contains(&at.year()))
            .unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }
}

/// Something that a follower did or decided.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Event {
    /// Its id.
    #[schema(format = Uuid)]
    pub(super) id: String,
    /// When, by the node's clock.
    #[schema(format = DateTime)]
    pub(super) at: String,
    /// The node.
    pub(super) node: String,
    /// The link.
    pub(super) link: i64,
    /// The follower.
    pub(super) follower: i64,
    /// The master's trade or order.
    pub(super) master_ticket: i64,
    /// The copy.
    pub(super) follower_ticket: Option<i64>,
    /// The step.
    pub(super) action: String,
    /// `done`, `skipped`, `rejected`, `not_sent` or `unknown`.
    pub(super) outcome: String,
    /// Why, as a word or in the broker's words.
    pub(super) reason: Option<String>,
    /// All that in a sentence.
    pub(super) says: String,
    /// Symbol of the copy.
    pub(super) symbol: Option<String>,
    /// Volume.
    pub(super) lots: Option<String>,
    /// Price of the fill.
    pub(super) price: Option<String>,
    /// From the master's callback to the order call, where an event led to it directly.
    pub(super) own_time_us: Option<i64>,
    /// From the order call to the broker's answer.
    pub(super) broker_time_us: Option<i64>,
}

/// Events, newest first; without a link or a follower those of the hour before the first of them.
#[utoipa::path(get, path = "/v1/events", tag = "see", params(EventFilter),
    responses((status = 200, description = "A page of events", body = Page<Event>), ListRefusals))]
pub(super) async fn events(
    State(api): State<Arc<ApiState>>,
    Filter(which): Filter<EventFilter>,
) -> Answer<Page<Event>> {
    let size = page_size(which.limit)?;
    let mut query = QueryBuilder::<Postgres>::new(
        "select id, at, node_id, link_id, follower_id, master_ticket, follower_ticket, action, outcome, \
         reason, symbol, lots, price, own_time_us, broker_time_us from copy_events where true",
    );
    let numbers = [
        (" and link_id = ", which.link.map(LinkId::as_i64)),
        (" and follower_id = ", which.follower.map(AccountId::as_i64)),
        (" and master_ticket = ", which.ticket.map(MasterTicket::as_i64)),
    ];
    for (column, number) in numbers {
        if let Some(number) = number {
            query.push(column).push_bind(number);
        }
    }
    if let Some(action) = which.action {
        query.push(" and action = ").push_bind(action.0);
    }
    if let Some(outcome) = which.outcome {
        query.push(" and outcome = ").push_bind(outcome.word());
    }
    if let Some(cursor) = which.after {
        query.push(" and (at, id) < (").push_bind(cursor.at()).push(", ");
        query.push_bind(cursor.id).push(")");
    }
    if which.link.is_none() && which.follower.is_none() {
        // No index gives the newest of all: a bounded time is read instead.
        query.push(" and at > coalesce(").push_bind(which.after.map(EventCursor::at));
        query.push(", clock_timestamp()) - interval '1 hour'");
    }
    query.push(" order by at desc, id desc limit ").push_bind(i64::from(size) + 1);
    let mut db = api.database().await?;
    let rows = query.build().fetch_all(&mut *db).await?;
    db.give_back();
    let items = rows.iter().map(|row| (event_cursor(row), event(row))).collect();
    let page = Page::of(items, size, |(cursor, _): &(EventCursor, Event)| cursor.to_string());
    let items = page.items.into_iter().map(|(_, event)| event).collect();
    Ok(Json(Page { items, next: page.next }))
}

fn event_cursor(row: &PgRow) -> EventCursor {
    EventCursor { at_us: directory::micros(row.get("at")).0, id: row.get("id") }
}

fn event(row: &PgRow) -> Event {
    let (action, outcome): (String, String) = (row.get("action"), row.get("outcome"));
    let reason: Option<String> = row.get("reason");
    Event {
        id: row.get::<Uuid, _>("id").to_string(),
        at: at(row.get("at")),
        node: row.get("node_id"),
        link: row.get("link_id"),
        follower: row.get("follower_id"),
        master_ticket: row.get("master_ticket"),
        follower_ticket: row.get("follower_ticket"),
        says: story::says(&action, &outcome, reason.as_deref()),
        action,
        outcome,
        reason,
        symbol: row.get("symbol"),
        lots: decimal(row, "lots"),
        price: decimal(row, "price"),
        own_time_us: row.get("own_time_us"),
        broker_time_us: row.get("broker_time_us"),
    }
}

/// Why a trade of a master was copied on a link, or was not: its story, from its rows.
#[utoipa::path(get, path = "/v1/why/{link}/{ticket}", tag = "see",
    params(
        ("link" = i64, Path, description = "Number of the link", minimum = 1, maximum = 9223372036854775807_i64),
        ("ticket" = i64, Path, description = "The master's ticket", minimum = 1, maximum = 9223372036854775807_i64),
    ),
    responses((status = 200, description = "Its story", body = Story), OneRefusals))]
pub(super) async fn why(
    State(api): State<Arc<ApiState>>,
    At((link, ticket)): At<(LinkId, MasterTicket)>,
    Filter(NoFilter {}): Filter<NoFilter>,
) -> Answer<Story> {
    let mut db = api.database().await?;
    let story = story::read(&mut db, link, ticket).await?;
    db.give_back();
    story.map(Json).ok_or_else(|| Problem::not_found(format!("there is no link {link}")))
}

fn decimal(row: &PgRow, column: &str) -> Option<String> {
    row.get::<Option<Decimal>, _>(column).map(|value| value.normalize().to_string())
}

fn at(at: OffsetDateTime) -> String {
    directory::rfc3339(at.to_offset(time::UtcOffset::UTC))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_a_list_is_read_back_as_it_was_told() {
        let pair = PairCursor { link: 7, ticket: i64::MAX, id: Uuid::from_u128(5 << 64 | 9) };
        assert_eq!(PairCursor::try_from(pair.to_string()), Ok(pair));
        let event = EventCursor { at_us: -1, id: Uuid::from_u128(u128::MAX) };
        assert_eq!(EventCursor::try_from(event.to_string()), Ok(event));
        assert_eq!(event.at(), OffsetDateTime::UNIX_EPOCH);
        for odd in ["", "0", &"g".repeat(64), &"F".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert_eq!(
                PairCursor::try_from(odd.to_owned()),
                Err(NoCursor(odd.to_owned())),
                "{odd}"
            );
        }
    }

    #[test]
    fn a_word_that_is_no_step_is_refused_with_those_that_are() {
        for word in CopyStep::WORDS {
            assert_eq!(Action::try_from((*word).to_owned()), Ok(Action(word)));
        }
        for odd in ["", "open", "Open_copy", "opened_copy"] {
            let refused = Action::try_from(odd.to_owned()).unwrap_err().to_string();
            assert!(refused.contains("skip_open, close_duplicate, "), "{refused}");
            assert!(refused.ends_with(&format!(", got {odd:?}")), "{refused}");
        }
    }

    #[test]
    fn a_page_tells_where_the_next_begins_only_if_there_is_one() {
        let page = |rows: Vec<u32>| Page::of(rows, 2, u32::to_string);
        assert_eq!(page(vec![1, 2]).next, None);
        let more = page(vec![1, 2, 3]);
        assert_eq!((more.items, more.next.as_deref()), (vec![1, 2], Some("2")));
    }
}
