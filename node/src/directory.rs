//! Accounts and links as the database holds them: what the CLI writes and a session reads.
//!
//! Inputs: rows of `trading_accounts` and `copy_links`. Outputs: the same as checked values.
//! A row that does not make a valid value is an error that names its column; it is never
//! left out, because a link that silently disappears abandons its copies.
//!
//! Modes: what a person allows, on a link, an account and the fleet. The strictest of the four that
//! concern a link counts, and a link that is switched off or deleted counts as `close_only`
//! (`effective_mode`, the one place). Setting a mode moves no `copy_from`: a link that is resumed
//! catches up with what its master did meanwhile, by the rules of late copies.
//!
//! Not covered: ownership (see `lease`), pairs and events (see `writer`).

use crate::credentials::Sealed;
use crate::writer::states::live_states;
use reconcile::{AboveMax, BelowMin, LinkMode, LinkRules, Sizing};
use rust_decimal::Decimal;
use schemas::{AccountId, Epoch, LinkId, Lots, Magic, Micros, NodeId, Symbol, Token};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgPool, PgRow};
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use std::collections::BTreeMap;
use std::time::Duration;

/// So long a session still takes a deleted link although no row says that it has anything open: a former
/// owner may have opened a copy whose row is lost. Chosen: longer than an account is ever left alone.
const DELETED_LINK_KEPT: Duration = Duration::from_secs(1_800);
use time::OffsetDateTime;
use utoipa::ToSchema;

/// Why rows could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The database did not answer or refused: try again, nothing is known.
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    /// A row holds a value that cannot be: switch the row off and mend it.
    #[error("{table} {id}: column {column}: {problem}")]
    Row {
        /// Table of the row.
        table: &'static str,
        /// Id of the row.
        id: i64,
        /// Column with the wrong value.
        column: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// No account has this name.
    #[error("there is no account named {0:?}")]
    NoAccount(String),
    /// No link has this number.
    #[error("there is no link {0}")]
    NoLink(LinkId),
}

/// What a person allows; in the order of strictness.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Opens, changes and closes.
    #[default]
    Copy,
    /// Opens nothing; what is open is followed and closed. As a link that is switched off.
    CloseOnly,
    /// Sends no order at all. Everything is still followed; when it ends, a comparison repairs.
    Paused,
}

/// A word that is no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be copy, close_only or paused, got {0:?}")]
pub struct NoMode(String);

impl Mode {
    /// Every mode, in the order of strictness.
    pub const ALL: [Mode; 3] = [Mode::Copy, Mode::CloseOnly, Mode::Paused];

    /// The word in rows, and for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Copy => "copy",
            Mode::CloseOnly => "close_only",
            Mode::Paused => "paused",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Mode {
    type Err = NoMode;

    fn from_str(word: &str) -> Result<Mode, NoMode> {
        Mode::ALL.into_iter().find(|mode| mode.as_str() == word).ok_or_else(|| NoMode(word.into()))
    }
}

/// One account as lists show it.
#[derive(Debug, Clone, Serialize)]
pub struct AccountRow {
    /// Number.
    pub id: AccountId,
    /// Name, unique.
    pub name: String,
    /// Platform, such as `paper`.
    pub platform: String,
    /// Nodes may own it.
    pub enabled: bool,
    /// What is allowed on all its links, as master and as follower.
    pub mode: Mode,
    /// What comes of it with the fleet's mode.
    pub effective_mode: Mode,
    /// Settings of the broker session.
    pub connection: serde_json::Value,
    /// Owner, if any.
    pub node: Option<String>,
    /// Seconds until the lease ends by the database's clock; absent without owner.
    pub lease_left_s: Option<f64>,
    /// Fencing token of the current or last tenure.
    pub token: Token,
}

/// What to add as an account.
#[derive(Debug, Clone)]
pub struct NewAccount {
    /// Name, unique.
    pub name: String,
    /// Platform, such as `paper`.
    pub platform: String,
    /// Settings of the broker session.
    pub connection: serde_json::Value,
    /// Nodes may own it at once.
    pub enabled: bool,
}

/// One link as lists show it.
#[derive(Debug, Clone, Serialize)]
pub struct LinkRow {
    /// Number.
    pub id: LinkId,
    /// Number of the master.
    pub master_id: AccountId,
    /// Number of the follower.
    pub follower_id: AccountId,
    /// Name of the master.
    pub master: String,
    /// Name of the follower.
    pub follower: String,
    /// The number that marks its orders at the follower's broker.
    pub magic: Magic,
    /// Opens are copied; when off, what is open is still managed and closed.
    pub enabled: bool,
    /// What is allowed on this link.
    pub mode: Mode,
    /// What comes of it with the modes of its accounts and the fleet, and `enabled`.
    pub effective_mode: Mode,
    /// How volumes are computed.
    pub sizing: String,
    /// The number that goes with it.
    pub sizing_value: Decimal,
    /// How far the price may have moved for a late copy.
    pub slippage_points: u32,
    /// Trades opened before this instant are not copied.
    pub copy_from: String,
    /// Since when it is known that the follower's broker does not keep tags (H53): nothing is
    /// opened late. Absent where they came back, or nobody has seen a copy yet.
    pub untaggable_since: Option<String>,
    /// Every rule that is not the default, as `lockstep link add` writes it.
    pub options: Vec<String>,
}

/// What to add as a link. Magic: absent means the lowest one that is free on the follower.
#[derive(Debug, Clone)]
pub struct NewLink {
    /// The master.
    pub master: AccountId,
    /// The follower.
    pub follower: AccountId,
    /// The number that marks its orders.
    pub magic: Option<Magic>,
    /// Opens are copied.
    pub enabled: bool,
    /// How volumes are computed.
    pub sizing: Sizing,
    /// What to do below the smallest volume.
    pub below_min: BelowMin,
    /// What to do above the largest volume.
    pub above_max: AboveMax,
    /// Scale by contract sizes.
    pub align_contract: bool,
    /// How far the price may have moved for a late copy.
    pub slippage_points: u32,
    /// Copy stop loss and take profit.
    pub copy_stops: bool,
    /// Copy pending orders.
    pub copy_pendings: bool,
    /// Trade the other side.
    pub reverse: bool,
    /// Also copy what is already open.
    pub sync_existing: bool,
    /// Names of symbols at the follower, where they differ.
    pub symbol_map: BTreeMap<Symbol, Symbol>,
    /// What the follower's broker appends to every symbol.
    pub symbol_suffix: String,
}

impl NewLink {
    /// A link with the default rules of every column, and this sizing.
    pub fn plain(master: AccountId, follower: AccountId, sizing: Sizing) -> Self {
        NewLink {
            master,
            follower,
            magic: None,
            enabled: true,
            sizing,
            below_min: BelowMin::Skip,
            above_max: AboveMax::Clamp,
            align_contract: false,
            slippage_points: 20,
            copy_stops: true,
            copy_pendings: true,
            reverse: false,
            sync_existing: false,
            symbol_map: BTreeMap::new(),
            symbol_suffix: String::new(),
        }
    }

    /// The word of the column.
    pub fn below_min_word(&self) -> &'static str {
        match self.below_min {
            BelowMin::Skip => "skip",
            BelowMin::UseMin => "use_min",
        }
    }

    /// The word of the column.
    pub fn above_max_word(&self) -> &'static str {
        match self.above_max {
            AboveMax::Skip => "skip",
            AboveMax::Clamp => "clamp",
        }
    }
}

/// Links that are switched on and do not copy, because a person said so of them, of one of their accounts
/// or of the fleet.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct HeldLinks {
    /// No order is sent for them.
    pub paused: u32,
    /// They open nothing.
    pub close_only: u32,
}

/// What a person said of an account itself and of each link that it follows by, without what comes of it
/// with everything else.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct OwnModes {
    /// Of the account.
    pub account: Mode,
    /// Of its links; one that is switched off or deleted is `close_only` at least.
    pub links: BTreeMap<LinkId, Mode>,
}

/// What is allowed on every link there is, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetMode {
    /// It.
    pub mode: Mode,
    /// Since when, by the database's clock.
    pub changed_at: OffsetDateTime,
}

/// What a session needs to know of its account.
#[derive(Debug, Clone)]
pub struct SessionAccount {
    /// Number.
    pub id: AccountId,
    /// Name, for logs.
    pub name: String,
    /// Platform.
    pub platform: String,
    /// Settings of the broker session.
    pub connection: serde_json::Value,
    /// Its password at the broker, if it has one.
    pub credential: Option<Sealed>,
    /// Highest epoch stored for it as a master.
    pub epoch_max: Option<Epoch>,
    /// Some link names it as master.
    pub is_master: bool,
    /// Links that name it as follower, switched-off ones included: their copies are still managed.
    pub links: Vec<LinkRules>,
    /// Names of the masters of these links, for people.
    pub master_names: BTreeMap<AccountId, String>,
    /// How many of these links are held.
    pub held: HeldLinks,
    /// What was said of it and of these links.
    pub modes: OwnModes,
    /// What was said of all; nothing where the row is gone that says it.
    pub fleet: Option<FleetMode>,
}

/// Adds an account.
pub async fn add_account(
    db: &mut PgConnection,
    new: &NewAccount,
) -> Result<AccountId, DirectoryError> {
    let row = sqlx::query(
        "insert into trading_accounts (name, platform, connection, enabled) values ($1, $2, $3, $4) returning id",
    )
    .bind(&new.name)
    .bind(&new.platform)
    .bind(&new.connection)
    .bind(new.enabled)
    .fetch_one(db)
    .await?;
    checked("trading_accounts", 0, "id", AccountId::from_i64(row.get("id")))
}

/// All accounts, by number.
pub async fn list_accounts(db: &mut PgConnection) -> Result<Vec<AccountRow>, DirectoryError> {
    let rows = sqlx::query(
        "select id, name, platform, enabled, mode, (select mode from fleet_mode) as fleet_mode, connection, node_id, lease_token, \
         extract(epoch from nullif(lease_until, '-infinity') - clock_timestamp())::float8 as left_s \
         from trading_accounts order by id",
    )
    .fetch_all(db)
    .await?;
    rows.iter().map(account_row).collect()
}

fn account_row(row: &PgRow) -> Result<AccountRow, DirectoryError> {
    let id: i64 = row.get("id");
    let table = "trading_accounts";
    let node: Option<String> = row.get("node_id");
    let own = mode(row, table, id, "mode")?;
    Ok(AccountRow {
        id: checked(table, id, "id", AccountId::from_i64(id))?,
        name: row.get("name"),
        platform: row.get("platform"),
        enabled: row.get("enabled"),
        mode: own,
        effective_mode: own.max(mode(row, table, id, "fleet_mode")?),
        connection: row.get("connection"),
        lease_left_s: node.as_ref().and_then(|_| row.get("left_s")),
        node,
        token: checked(table, id, "lease_token", Token::from_i64(row.get("lease_token")))?,
    })
}

/// The number of the account with this name, or with this number written out.
pub async fn account_id(db: &mut PgConnection, name: &str) -> Result<AccountId, DirectoryError> {
    let row = sqlx::query("select id from trading_accounts where name = $1 or id::text = $1 order by name = $1 desc limit 1")
        .bind(name)
        .fetch_optional(db)
        .await?
        .ok_or_else(|| DirectoryError::NoAccount(name.to_owned()))?;
    checked("trading_accounts", 0, "id", AccountId::from_i64(row.get("id")))
}

/// Switches an account on or off; says whether that changed anything.
pub async fn enable_account(
    db: &mut PgConnection,
    id: AccountId,
    enabled: bool,
) -> Result<bool, DirectoryError> {
    let done =
        sqlx::query("update trading_accounts set enabled = $2 where id = $1 and enabled <> $2")
            .bind(id.as_i64())
            .bind(enabled)
            .execute(db)
            .await?;
    Ok(done.rows_affected() > 0)
}

/// Open copies that nobody would follow or close while the account is off, as master or as follower.
pub async fn open_copies_of(db: &mut PgConnection, id: AccountId) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(concat!(
        "select count(*) from pairs p join copy_links l on l.id = p.link_id where p.state in ",
        live_states!(),
        " and $1 in (l.master_id, p.follower_id)",
    ))
    .bind(id.as_i64())
    .fetch_one(db)
    .await
}

/// Sets what is allowed on all links of an account; says whether that changed anything.
pub async fn set_account_mode(
    db: &mut PgConnection,
    id: AccountId,
    mode: Mode,
) -> Result<bool, DirectoryError> {
    let known = sqlx::query("select 1 from trading_accounts where id = $1").bind(id.as_i64());
    if known.fetch_optional(&mut *db).await?.is_none() {
        return Err(DirectoryError::NoAccount(id.to_string()));
    }
    let done = sqlx::query(
        "update trading_accounts set mode = $2::text where id = $1 and mode <> $2::text",
    )
    .bind(id.as_i64())
    .bind(mode.as_str())
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// What is allowed on every link there is.
pub async fn fleet_mode(db: &mut PgConnection) -> Result<Mode, DirectoryError> {
    let row = sqlx::query("select (select mode from fleet_mode) as fleet_mode");
    let row = row.fetch_one(db).await?;
    mode(&row, "fleet_mode", 0, "fleet_mode")
}

/// So many links whose modes come to the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinksByMode {
    /// The strictest of what concerns them but the fleet's mode.
    pub without_fleet: Mode,
    /// The strictest of all.
    pub effective: Mode,
    /// How many there are.
    pub links: i64,
}

/// All links that were not deleted, counted by their modes; the same modes may come more than once.
pub async fn links_by_mode(db: &mut PgConnection) -> Result<Vec<LinksByMode>, DirectoryError> {
    let rows = sqlx::query(
        "select l.enabled, l.mode, m.mode as master_mode, f.mode as follower_mode, \
         (select mode from fleet_mode) as fleet_mode, null::timestamptz as deleted_at, count(*) as links \
         from copy_links l join trading_accounts m on m.id = l.master_id \
         join trading_accounts f on f.id = l.follower_id \
         where l.deleted_at is null group by 1, 2, 3, 4",
    )
    .fetch_all(db)
    .await?;
    let counted = |row: &PgRow| {
        let [is_on, own, master, follower, fleet] = modes_of(row, 0)?;
        let without_fleet = is_on.max(own).max(master).max(follower);
        let effective = without_fleet.max(fleet);
        Ok(LinksByMode { without_fleet, effective, links: row.get("links") })
    };
    rows.iter().map(counted).collect()
}

/// Sets what is allowed on every link there is; says whether that changed anything. Every node
/// hears of it; one that is cut from the database hears of it when it is back, and until then sends
/// at most as long as its leases last.
pub async fn set_fleet_mode(db: &mut PgConnection, mode: Mode) -> Result<bool, DirectoryError> {
    let done = sqlx::query(
        "update fleet_mode set mode = $1::text, changed_at = clock_timestamp() where mode <> $1::text",
    )
    .bind(mode.as_str())
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// An account that ended several owners in a row, and is left alone for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// Its name.
    pub account: String,
    /// When others may take it over.
    pub until: String,
    /// Tenures in a row that ended early.
    pub early_ends: i32,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let until = self.until.get(..19).unwrap_or(&self.until).replace('T', " ");
        let ends = self.early_ends;
        write!(f, "waits until {until} UTC (its last {ends} tenures ended early)")
    }
}

/// Enabled accounts that nobody takes over yet, by number; for how long goes by the length of a
/// lease, which the nodes know.
pub async fn waiting_accounts(
    db: &mut PgConnection,
    lease: Duration,
) -> Result<Vec<Waiting>, DirectoryError> {
    let rows = sqlx::query(
        "select a.name, a.starts, w.until from trading_accounts a, lateral ( \
             select a.lease_until + lockstep_claim_wait(a.starts, a.id, $1) as until offset 0) w \
         where a.enabled and a.node_id is not null and a.starts >= 2 and a.lease_until <= clock_timestamp() \
           and w.until > clock_timestamp() order by a.id",
    )
    .bind(lease)
    .fetch_all(db)
    .await?;
    let waiting = |row: &PgRow| Waiting {
        account: row.get("name"),
        until: rfc3339(row.get("until")),
        early_ends: row.get("starts"),
    };
    Ok(rows.iter().map(waiting).collect())
}

/// An enabled account that nobody owns, and that is not left alone for its early ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unowned {
    /// Its name.
    pub account: String,
    /// Since when, where that is known.
    pub since: Option<String>,
    /// Nodes that are there and serve its platform.
    pub nodes: i64,
    /// Accounts that those of them take that take any.
    pub places: i64,
    /// How many of these places are taken.
    pub taken: i64,
    /// How many of them are free.
    pub free: i64,
    /// All of it in words.
    pub why: String,
}

impl Unowned {
    fn why(platform: &str, nodes: i64, places: i64, taken: i64, free: i64) -> String {
        match (nodes, places, free) {
            (0, ..) => format!("no node is there for platform {platform}"),
            (_, 0, _) => format!(
                "no node takes accounts: {nodes} of {nodes} let go of theirs or claim none now"
            ),
            (.., 0) => format!("no node has room: {taken} of {places} places taken"),
            (.., 1) => "not taken over yet: 1 place is free".to_owned(),
            (..) => format!("not taken over yet: {free} places are free"),
        }
    }
}

/// At most so many enabled accounts of nodes without an owner under a lease that lasts, by number; those
/// of [`waiting_accounts`] are not among them.
///
/// What a node has is counted in the accounts, which are newer than its own word.
pub async fn unowned_accounts(
    db: &mut PgConnection,
    lease: Duration,
    limit: i64,
) -> Result<Vec<Unowned>, DirectoryError> {
    let rows = sqlx::query(
        "with alive as (select n.platforms, n.capacity, (select count(*) from trading_accounts o \
             where o.platform = any (n.platforms) and o.node_id = n.node_id) as owned \
           from lease_nodes n where n.alive_until > clock_timestamp()), \
         unowned as materialized (select a.id, a.name, a.platform, nullif(case when a.node_id is null then a.free_since \
             else a.lease_until end, '-infinity') as since \
           from trading_accounts a where a.enabled and a.platform <> 'external' \
             and (a.node_id is null or a.lease_until <= clock_timestamp() and (a.starts < 2 \
               or a.lease_until + lockstep_claim_wait(a.starts, a.id, $1) <= clock_timestamp())) \
           order by a.id limit $2), \
         rooms as (select p.platform, count(*) as nodes, \
             coalesce(sum(n.capacity), 0)::bigint as places, \
             coalesce(sum(n.owned) filter (where n.capacity > 0), 0)::bigint as taken, \
             coalesce(sum(greatest(n.capacity - n.owned, 0)), 0)::bigint as free \
           from (select distinct platform from unowned) p join alive n on p.platform = any (n.platforms) \
           group by p.platform) \
         select u.name, u.platform, u.since, coalesce(r.nodes, 0) as nodes, coalesce(r.places, 0) as places, \
           coalesce(r.taken, 0) as taken, coalesce(r.free, 0) as free \
         from unowned u left join rooms r using (platform) order by u.id",
    )
    .bind(lease)
    .bind(limit)
    .fetch_all(db)
    .await?;
    let unowned = |row: &PgRow| {
        let (nodes, places) = (row.get("nodes"), row.get("places"));
        let (taken, free) = (row.get("taken"), row.get("free"));
        Unowned {
            account: row.get("name"),
            since: row.get::<Option<_>, _>("since").map(rfc3339),
            nodes,
            places,
            taken,
            free,
            why: Unowned::why(row.get("platform"), nodes, places, taken, free),
        }
    };
    Ok(rows.iter().map(unowned).collect())
}

/// Adds a link. Trades count from now on, unless `sync_existing` says otherwise.
pub async fn add_link(db: &mut PgConnection, new: &NewLink) -> Result<LinkId, DirectoryError> {
    let (sizing, value) = sizing_columns(&new.sizing);
    let row = sqlx::query(
        "insert into copy_links (master_id, follower_id, magic, sizing, sizing_value, below_min, above_max, \
         align_contract, slippage_points, copy_stops, copy_pendings, reverse, sync_existing, symbol_map, symbol_suffix, enabled) \
         values ($1, $2, coalesce($3, (select coalesce(max(magic), 7000) + 1 from copy_links where follower_id = $2)), \
         $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16) returning id",
    )
    .bind(new.master.as_i64())
    .bind(new.follower.as_i64())
    .bind(new.magic.map(|m| m.get() as i32))
    .bind(sizing)
    .bind(value)
    .bind(new.below_min_word())
    .bind(new.above_max_word())
    .bind(new.align_contract)
    .bind(i32::try_from(new.slippage_points).unwrap_or(i32::MAX))
    .bind(new.copy_stops)
    .bind(new.copy_pendings)
    .bind(new.reverse)
    .bind(new.sync_existing)
    .bind(Json(&new.symbol_map))
    .bind(&new.symbol_suffix)
    .bind(new.enabled)
    .fetch_one(db)
    .await?;
    checked("copy_links", 0, "id", LinkId::from_i64(row.get("id")))
}

/// The two columns of a sizing.
pub(crate) fn sizing_columns(sizing: &Sizing) -> (&'static str, Decimal) {
    match sizing {
        Sizing::Multiplier(value) => ("multiplier", *value),
        Sizing::FixedLots(lots) => ("fixed_lots", lots.get()),
        Sizing::BalanceRatio(value) => ("balance_ratio", *value),
        Sizing::EquityRatio(value) => ("equity_ratio", *value),
    }
}

/// A sizing from its two columns.
pub fn sizing_from(word: &str, value: Decimal) -> Result<Sizing, String> {
    if value <= Decimal::ZERO {
        return Err(format!("must be above 0, got {value}"));
    }
    match word {
        "multiplier" => Ok(Sizing::Multiplier(value)),
        "fixed_lots" => Lots::new(value).map(Sizing::FixedLots).map_err(|e| e.to_string()),
        "balance_ratio" => Ok(Sizing::BalanceRatio(value)),
        "equity_ratio" => Ok(Sizing::EquityRatio(value)),
        other => Err(format!(
            "must be multiplier, fixed_lots, balance_ratio or equity_ratio, got {other:?}"
        )),
    }
}

/// All links that were not deleted, by number.
pub async fn list_links(db: &mut PgConnection) -> Result<Vec<LinkRow>, DirectoryError> {
    links_after(db, 0, i64::MAX).await
}

/// So many links that were not deleted, by number, from the one after this number on.
pub async fn links_after(
    db: &mut PgConnection,
    after: i64,
    limit: i64,
) -> Result<Vec<LinkRow>, DirectoryError> {
    let rows = sqlx::query(
        "select l.id, l.master_id, l.follower_id, m.name as master, f.name as follower, l.magic, l.enabled, l.sizing, l.sizing_value, l.mode, \
         l.deleted_at, m.mode as master_mode, f.mode as follower_mode, (select mode from fleet_mode) as fleet_mode, \
         l.slippage_points, l.copy_from, l.below_min, l.above_max, l.align_contract, l.copy_stops, \
         l.copy_pendings, l.reverse, l.sync_existing, l.symbol_map, l.symbol_suffix, l.untaggable_since from copy_links l \
         join trading_accounts m on m.id = l.master_id join trading_accounts f on f.id = l.follower_id \
         where l.deleted_at is null and l.id > $1 order by l.id limit $2",
    )
    .bind(after)
    .bind(limit)
    .fetch_all(db)
    .await?;
    rows.iter()
        .map(|row| {
            let id: i64 = row.get("id");
            Ok(LinkRow {
                id: checked("copy_links", id, "id", LinkId::from_i64(id))?,
                master_id: account_of(row, id, "master_id")?,
                follower_id: account_of(row, id, "follower_id")?,
                master: row.get("master"),
                follower: row.get("follower"),
                magic: magic(row, id)?,
                enabled: row.get("enabled"),
                mode: mode(row, "copy_links", id, "mode")?,
                effective_mode: effective_mode(row, id)?,
                sizing: row.get("sizing"),
                sizing_value: row.get::<Decimal, _>("sizing_value").normalize(),
                slippage_points: row.get::<i32, _>("slippage_points").unsigned_abs(),
                copy_from: rfc3339(row.get("copy_from")),
                untaggable_since: row.get::<Option<_>, _>("untaggable_since").map(rfc3339),
                options: link_options(row),
            })
        })
        .collect()
}

fn link_options(row: &PgRow) -> Vec<String> {
    let flag = |column: &str, unusual: bool, word: &str| {
        (row.get::<bool, _>(column) == unusual).then(|| word.to_owned())
    };
    let mut options: Vec<String> = [
        flag("align_contract", true, "--align-contract"),
        flag("copy_stops", false, "--no-stops"),
        flag("copy_pendings", false, "--no-pendings"),
        flag("reverse", true, "--reverse"),
        flag("sync_existing", true, "--sync-existing"),
        (row.get::<&str, _>("below_min") == "use_min").then(|| "--below-min use-min".into()),
        (row.get::<&str, _>("above_max") == "skip").then(|| "--above-max skip".into()),
    ]
    .into_iter()
    .flatten()
    .collect();
    let suffix: &str = row.get("symbol_suffix");
    if !suffix.is_empty() {
        options.push(format!("--symbol-suffix {suffix}"));
    }
    if let Some(names) = row.get::<serde_json::Value, _>("symbol_map").as_object() {
        let name = |(master, follower): (&String, &serde_json::Value)| {
            format!("--symbol {master}={}", follower.as_str().unwrap_or("?"))
        };
        options.extend(names.iter().map(name));
    }
    options
}

/// Switches a link on or off. Switching on starts a new `copy_from`: what the master opened
/// meanwhile is not copied, unless the link says `sync_existing`. It also looks anew whether the
/// broker keeps tags, on a link that is on already as well.
pub async fn enable_link(
    db: &mut PgConnection,
    id: LinkId,
    enabled: bool,
) -> Result<bool, DirectoryError> {
    known_link(db, id).await?;
    let done = sqlx::query(
        "update copy_links set enabled = $2, untaggable_since = case when $2 then null else untaggable_since end, \
         copy_from = case when $2 and not enabled then clock_timestamp() else copy_from end \
         where id = $1 and (enabled <> $2 or $2 and untaggable_since is not null)",
    )
    .bind(id.as_i64())
    .bind(enabled)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Sets what is allowed on a link; says whether that changed anything. Unlike [`enable_link`] it
/// leaves `copy_from` alone: what the master opened meanwhile is late, and judged as such.
pub async fn set_link_mode(
    db: &mut PgConnection,
    id: LinkId,
    mode: Mode,
) -> Result<bool, DirectoryError> {
    known_link(db, id).await?;
    let done =
        sqlx::query("update copy_links set mode = $2::text where id = $1 and mode <> $2::text")
            .bind(id.as_i64())
            .bind(mode.as_str())
            .execute(db)
            .await?;
    Ok(done.rows_affected() > 0)
}

async fn known_link(db: &mut PgConnection, id: LinkId) -> Result<(), DirectoryError> {
    let known = sqlx::query("select 1 from copy_links where id = $1 and deleted_at is null")
        .bind(id.as_i64())
        .fetch_optional(db)
        .await?;
    known.map(|_| ()).ok_or(DirectoryError::NoLink(id))
}

/// What a session needs to know of its account.
pub async fn load_session_account(
    db: &mut PgConnection,
    id: AccountId,
) -> Result<SessionAccount, DirectoryError> {
    let row = sqlx::query(
        "select name, platform, connection, epoch_max, a.mode, f.mode as fleet_mode, f.changed_at as fleet_changed_at, \
         exists (select 1 from copy_links l \
         where l.master_id = a.id and l.deleted_at is null) as is_master \
         from trading_accounts a left join fleet_mode f on true where id = $1",
    )
    .bind(id.as_i64())
    .fetch_optional(&mut *db)
    .await?
    .ok_or_else(|| DirectoryError::NoAccount(id.to_string()))?;
    let epoch_max: i64 = row.get("epoch_max");
    let mut link_rows = link_rows(db, id).await?;
    link_rows.retain(|row| !row.get::<bool, _>("is_over"));
    let named = |row: &PgRow| Ok((account_of(row, row.get("id"), "master_id")?, row.get("master")));
    Ok(SessionAccount {
        id,
        name: row.get("name"),
        platform: row.get("platform"),
        connection: row.get("connection"),
        credential: load_credential(db, id).await?,
        epoch_max: Epoch::from_i64(epoch_max).ok(),
        is_master: row.get("is_master"),
        held: held_links(&link_rows)?,
        master_names: link_rows.iter().map(named).collect::<Result<_, DirectoryError>>()?,
        modes: OwnModes {
            account: mode(&row, "trading_accounts", id.as_i64(), "mode")?,
            links: link_rows.iter().map(own_mode).collect::<Result<_, _>>()?,
        },
        fleet: match row.get("fleet_changed_at") {
            Some(changed_at) => {
                Some(FleetMode { mode: mode(&row, "fleet_mode", 0, "fleet_mode")?, changed_at })
            }
            None => None,
        },
        links: link_rows.iter().map(link_rules).collect::<Result<_, _>>()?,
    })
}

/// What was said of a link itself.
fn own_mode(row: &PgRow) -> Result<(LinkId, Mode), DirectoryError> {
    let id: i64 = row.get("id");
    let [is_on, own, ..] = modes_of(row, id)?;
    Ok((checked("copy_links", id, "id", LinkId::from_i64(id))?, is_on.max(own)))
}

/// The sealed password of an account, if it has one.
pub async fn load_credential(
    db: &mut PgConnection,
    id: AccountId,
) -> Result<Option<Sealed>, DirectoryError> {
    let row = sqlx::query(
        "select key_id, wrapped_key, sealed from account_credentials where account_id = $1",
    )
    .bind(id.as_i64())
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| Sealed {
        key_id: row.get("key_id"),
        wrapped_key: row.get("wrapped_key"),
        sealed: row.get("sealed"),
    }))
}

/// Stores the sealed password of an account in place of the one it had. What is stored is not read,
/// so that whoever stores passwords need not be able to read them.
pub async fn store_credential(
    db: &mut PgConnection,
    id: AccountId,
    sealed: &Sealed,
) -> Result<(), DirectoryError> {
    let replace = "update account_credentials \
         set key_id = $2, wrapped_key = $3, sealed = $4, changed_at = clock_timestamp() where account_id = $1";
    let add = "insert into account_credentials (account_id, key_id, wrapped_key, sealed) values ($1, $2, $3, $4)";
    for statement in [replace, add] {
        let done = sqlx::query(statement)
            .bind(id.as_i64())
            .bind(&sealed.key_id)
            .bind(&sealed.wrapped_key)
            .bind(&sealed.sealed)
            .execute(&mut *db)
            .await?;
        if done.rows_affected() > 0 {
            break;
        }
    }
    Ok(())
}

/// Takes the password of an account away; says whether it had one.
pub async fn remove_credential(
    db: &mut PgConnection,
    id: AccountId,
) -> Result<bool, DirectoryError> {
    let done = sqlx::query("delete from account_credentials where account_id = $1")
        .bind(id.as_i64())
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// The platform of an account, which its password is bound to.
pub async fn account_platform(
    db: &mut PgConnection,
    id: AccountId,
) -> Result<String, DirectoryError> {
    Ok(sqlx::query_scalar("select platform from trading_accounts where id = $1")
        .bind(id.as_i64())
        .fetch_one(db)
        .await?)
}

/// How a row of passwords is wrapped, without the password.
#[derive(Debug, Clone)]
pub struct WrappedRow {
    /// The account.
    pub account: AccountId,
    /// Its platform.
    pub platform: String,
    /// Key and wrapping; `sealed` is empty.
    pub wrapped: Sealed,
}

/// The first account after this one whose password is wrapped with another master key.
pub async fn next_wrapped_by_others(
    db: &mut PgConnection,
    key_id: &str,
    after: Option<AccountId>,
) -> Result<Option<WrappedRow>, DirectoryError> {
    let row = sqlx::query(
        "select a.id, a.platform::text as platform, c.key_id, c.wrapped_key \
         from account_credentials c join trading_accounts a on a.id = c.account_id \
         where c.key_id <> $1 and c.account_id > $2 order by c.account_id limit 1",
    )
    .bind(key_id)
    .bind(after.map_or(0, AccountId::as_i64))
    .fetch_optional(db)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let account = AccountId::from_i64(row.get("id"));
    Ok(Some(WrappedRow {
        account: checked("account_credentials", row.get("id"), "account_id", account)?,
        platform: row.get("platform"),
        wrapped: Sealed {
            key_id: row.get("key_id"),
            wrapped_key: row.get("wrapped_key"),
            sealed: Vec::new(),
        },
    }))
}

/// Stores the new wrapping of a password's key; nothing changes if the row is not as it was read.
pub async fn replace_wrapped(
    db: &mut PgConnection,
    id: AccountId,
    was: &Sealed,
    fresh: &Sealed,
) -> Result<bool, DirectoryError> {
    let done = sqlx::query(
        "update account_credentials set key_id = $4, wrapped_key = $5 \
         where account_id = $1 and key_id = $2 and wrapped_key = $3",
    )
    .bind(id.as_i64())
    .bind(&was.key_id)
    .bind(&was.wrapped_key)
    .bind(&fresh.key_id)
    .bind(&fresh.wrapped_key)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// How many passwords each master key has wrapped.
pub async fn count_wrapped(db: &mut PgConnection) -> Result<Vec<(String, i64)>, sqlx::Error> {
    sqlx::query_as("select key_id, count(*) from account_credentials group by key_id")
        .fetch_all(db)
        .await
}

/// The rules of every link of a follower; a deleted link closes what it has open and opens nothing, and
/// keeps its magic for ever.
pub async fn load_links(
    db: &mut PgConnection,
    follower: AccountId,
) -> Result<Vec<LinkRules>, DirectoryError> {
    link_rows(db, follower).await?.iter().map(link_rules).collect()
}

fn held_links(link_rows: &[PgRow]) -> Result<HeldLinks, DirectoryError> {
    let mut held = HeldLinks::default();
    for row in link_rows {
        let [is_on, said @ ..] = modes_of(row, row.get("id"))?;
        if is_on != Mode::Copy {
            continue;
        }
        match said.into_iter().fold(Mode::Copy, Mode::max) {
            Mode::Copy => {}
            Mode::CloseOnly => held.close_only += 1,
            Mode::Paused => held.paused += 1,
        }
    }
    Ok(held)
}

async fn link_rows(db: &mut PgConnection, follower: AccountId) -> Result<Vec<PgRow>, sqlx::Error> {
    sqlx::query(concat!(
        "select l.*, m.name as master, m.mode as master_mode, f.mode as follower_mode, (select mode from fleet_mode) as fleet_mode, \
         coalesce(l.deleted_at <= now() - $2, false) and not exists ( \
             select 1 from pairs p where p.follower_id = l.follower_id and p.link_id = l.id \
             and p.state in ",
        live_states!(),
        ") as is_over \
         from copy_links l join trading_accounts m on m.id = l.master_id \
         join trading_accounts f on f.id = l.follower_id where l.follower_id = $1 order by l.id",
    ))
    .bind(follower.as_i64())
    .bind(DELETED_LINK_KEPT)
    .fetch_all(db)
    .await
}

fn link_rules(row: &PgRow) -> Result<LinkRules, DirectoryError> {
    let id: i64 = row.get("id");
    let table = "copy_links";
    let wrong =
        |column: &'static str, problem: String| DirectoryError::Row { table, id, column, problem };
    let untaggable: Option<OffsetDateTime> = row.get("untaggable_since");
    let modes = modes_of(row, id)?;
    Ok(LinkRules {
        link: checked(table, id, "id", LinkId::from_i64(id))?,
        master: account_of(row, id, "master_id")?,
        follower: account_of(row, id, "follower_id")?,
        magic: magic(row, id)?,
        copy_from: micros(row.get("copy_from")),
        sync_existing: row.get("sync_existing"),
        mode: match (modes.contains(&Mode::CloseOnly), untaggable.is_some()) {
            (true, _) => LinkMode::CloseOnly,
            (false, true) => LinkMode::CopyUntagged,
            (false, false) => LinkMode::Copy,
        },
        paused: modes.contains(&Mode::Paused),
        sizing: sizing_from(row.get("sizing"), row.get("sizing_value"))
            .map_err(|problem| wrong("sizing", problem))?,
        below_min: match row.get::<&str, _>("below_min") {
            "use_min" => BelowMin::UseMin,
            _ => BelowMin::Skip,
        },
        above_max: match row.get::<&str, _>("above_max") {
            "skip" => AboveMax::Skip,
            _ => AboveMax::Clamp,
        },
        align_contract: row.get("align_contract"),
        slippage_points: row.get::<i32, _>("slippage_points").unsigned_abs(),
        copy_stops: row.get("copy_stops"),
        copy_pendings: row.get("copy_pendings"),
        reverse: row.get("reverse"),
        symbol_map: row
            .try_get::<Json<BTreeMap<Symbol, Symbol>>, _>("symbol_map")
            .map_err(|e| wrong("symbol_map", e.to_string()))?
            .0,
        symbol_suffix: row.get("symbol_suffix"),
    })
}

/// What concerns a link: whether it is on, its own mode, its accounts' and the fleet's.
fn modes_of(row: &PgRow, id: i64) -> Result<[Mode; 5], DirectoryError> {
    let deleted: Option<OffsetDateTime> = row.get("deleted_at");
    let is_on = row.get::<bool, _>("enabled") && deleted.is_none();
    let said = |column| mode(row, "copy_links", id, column);
    Ok([
        if is_on { Mode::Copy } else { Mode::CloseOnly },
        said("mode")?,
        said("master_mode")?,
        said("follower_mode")?,
        said("fleet_mode")?,
    ])
}

/// The strictest of what concerns a link.
fn effective_mode(row: &PgRow, id: i64) -> Result<Mode, DirectoryError> {
    let [first, rest @ ..] = modes_of(row, id)?;
    Ok(rest.into_iter().fold(first, Mode::max))
}

/// A mode, whose row has to be there.
pub(crate) fn mode(
    row: &PgRow,
    table: &'static str,
    id: i64,
    column: &'static str,
) -> Result<Mode, DirectoryError> {
    let wrong = |problem: String| DirectoryError::Row { table, id, column, problem };
    let word: Option<&str> = row.get(column);
    let word = word.ok_or_else(|| wrong("there is no row that says it".to_owned()))?;
    word.parse().map_err(|error: NoMode| wrong(error.to_string()))
}

fn account_of(row: &PgRow, id: i64, column: &'static str) -> Result<AccountId, DirectoryError> {
    checked("copy_links", id, column, AccountId::from_i64(row.get(column)))
}

fn magic(row: &PgRow, id: i64) -> Result<Magic, DirectoryError> {
    checked("copy_links", id, "magic", Magic::from_i64(i64::from(row.get::<i32, _>("magic"))))
}

fn checked<T>(
    table: &'static str,
    id: i64,
    column: &'static str,
    value: Result<T, schemas::IdError>,
) -> Result<T, DirectoryError> {
    value.map_err(|e| DirectoryError::Row { table, id, column, problem: e.to_string() })
}

/// Microseconds of a database time.
pub fn micros(at: OffsetDateTime) -> Micros {
    Micros((at.unix_timestamp_nanos() / 1000) as i64)
}

/// A database time as text.
pub(crate) fn rfc3339(at: OffsetDateTime) -> String {
    at.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}

/// Accounts and links for the sessions of a node, over a small pool of its own.
#[derive(Debug, Clone)]
pub struct Directory {
    pool: PgPool,
}

impl Directory {
    /// Reads through this pool.
    pub fn new(pool: PgPool) -> Self {
        Directory { pool }
    }

    /// What a session needs to know of its account.
    pub async fn session_account(&self, id: AccountId) -> Result<SessionAccount, DirectoryError> {
        load_session_account(&mut *self.pool.acquire().await?, id).await
    }

    /// The sealed password of an account, if it has one.
    pub async fn credential(&self, id: AccountId) -> Result<Option<Sealed>, DirectoryError> {
        load_credential(&mut *self.pool.acquire().await?, id).await
    }

    /// Whether another node copies one of these masters right now, by the word of its sessions.
    ///
    /// Only a follower counts: the master's own session says that it speaks, and not that the bus
    /// carries it.
    pub async fn is_heard_elsewhere(
        &self,
        masters: &[AccountId],
        node: &NodeId,
    ) -> Result<bool, DirectoryError> {
        let masters: Vec<i64> = masters.iter().map(|master| master.as_i64()).collect();
        let heard = sqlx::query_scalar(
            "select exists (
                 select 1 from copy_links l
                 join account_status s on s.account_id = l.follower_id
                 join trading_accounts a on a.id = s.account_id
                     and a.node_id = s.node_id and a.lease_token = s.lease_token
                 where l.master_id = any ($1) and l.enabled and l.deleted_at is null
                   and s.node_id <> $2 and s.session = 'copying'
                   and s.written_at > clock_timestamp() - interval '15 s')",
        )
        .bind(masters)
        .bind(node.as_str())
        .fetch_one(&self.pool)
        .await?;
        Ok(heard)
    }

    /// Stores the epoch that a master's session is about to use; false if the lease is lost.
    pub async fn store_epoch(
        &self,
        id: AccountId,
        token: Token,
        epoch: Epoch,
    ) -> Result<bool, DirectoryError> {
        let done = sqlx::query(
            "update trading_accounts set epoch_max = greatest(epoch_max, $3) \
             where id = $1 and lease_token = $2 and node_id is not null",
        )
        .bind(id.as_i64())
        .bind(token.as_i64())
        .bind(epoch.as_i64())
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Stores that the follower's broker does not keep the tags of this link; nothing changes if
    /// that is known, or if the lease is lost.
    pub async fn mark_untaggable(
        &self,
        follower: AccountId,
        token: Token,
        link: LinkId,
    ) -> Result<(), DirectoryError> {
        sqlx::query(
            "update copy_links l set untaggable_since = clock_timestamp() from trading_accounts a \
             where l.id = $3 and l.follower_id = a.id and l.untaggable_since is null \
             and a.id = $1 and a.lease_token = $2 and a.node_id is not null",
        )
        .bind(follower.as_i64())
        .bind(token.as_i64())
        .bind(link.as_i64())
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
pub(crate) mod tests;
