//! `lockstep status`: who owns what right now, and what was copied lately.

use super::lease;
use super::table::{or_dash, render};
use super::watch::watch;
use super::{CliError, DatabaseArg, block_on, out};
use crate::directory::{self, DirectoryError, Mode, Unowned, Waiting};
use crate::uptime::store::{self, DegradedTime, NodeUptime, read_last_day};
use crate::writer::states::live_states;
use clap::Args;
use serde::Serialize;
use sqlx::{PgConnection, Row};

/// Arguments of `lockstep status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Show it anew every second, until q or Ctrl-C.
    #[arg(long, conflicts_with = "json")]
    watch: bool,
}

/// Everything `lockstep status` says.
#[derive(Debug, Serialize)]
pub struct Status {
    /// What is allowed on every link there is: the kill switch.
    pub fleet_mode: Mode,
    /// Links that would be allowed more without it.
    pub fleet_holds: i64,
    /// Links by what comes of all modes that concern them.
    pub links: LinkCounts,
    /// Accounts and links that are paused by themselves, or only close.
    pub held: Vec<Held>,
    /// Nodes that are alive, or were in the last hour, or have accounts.
    pub nodes: Vec<NodeStatus>,
    /// Accounts by how they stand.
    pub accounts: AccountCounts,
    /// What each node was in the last 24 hours, minute by minute.
    pub uptime: Vec<NodeUptime>,
    /// Accounts that are switched off while copies of them are open.
    pub left_open: Vec<LeftOpen>,
    /// Owned accounts whose session does not work, and why.
    pub sessions_down: Vec<SessionDown>,
    /// Accounts that ended several owners in a row, and are left alone for a while.
    pub waiting: Vec<Waiting>,
    /// Other accounts that nobody owns, and why.
    pub unowned: Vec<Unowned>,
    /// Links whose follower's broker does not keep our tags: nothing is opened late on them.
    pub untaggable: Vec<Untaggable>,
    /// Copies of the last 24 hours.
    pub copies: CopyCounts,
    /// Why copies of the last 24 hours were skipped or failed, most frequent first.
    pub reasons: Vec<ReasonCount>,
}

/// Links by their effective mode.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkCounts {
    /// They open, change and close.
    pub copy: i64,
    /// They open nothing; those that are switched off are among them.
    pub close_only: i64,
    /// No order is sent for them.
    pub paused: i64,
}

/// An account or a link with a mode of its own that is not `copy`.
#[derive(Debug, Serialize)]
pub struct Held {
    /// `account NAME`, or `link N` with its accounts.
    pub what: String,
    /// Its own mode.
    pub mode: Mode,
    /// Links that it concerns.
    pub links: i64,
}

/// An account that is switched off while copies of it are open: nobody follows or closes them.
#[derive(Debug, Serialize)]
pub struct LeftOpen {
    /// Name of the account, which is their master or their follower.
    pub account: String,
    /// How many are open.
    pub copies_open: i64,
}

/// An owned account whose session at the broker neither copies nor leads.
#[derive(Debug, Serialize)]
pub struct SessionDown {
    /// Name of the account.
    pub account: String,
    /// What the session does, as it last said; `silent` if it has said nothing in this tenure.
    pub session: String,
    /// Why, if it said so.
    pub detail: Option<String>,
}

/// A link whose copies come back without their tag (H53).
#[derive(Debug, Serialize)]
pub struct Untaggable {
    /// Number of the link.
    pub link: i64,
    /// Name of the follower.
    pub follower: String,
    /// Since when it is known.
    pub since: String,
}

/// How often something was not copied for one reason.
#[derive(Debug, Serialize)]
pub struct ReasonCount {
    /// The step.
    pub action: String,
    /// `skipped`, `rejected`, `not_sent` or `unknown`.
    pub outcome: String,
    /// Why.
    pub reason: String,
    /// How often.
    pub count: i64,
}

/// The end of a statement about the events of the last 24 hours. An event is written after it happened,
/// by clocks that differ by an hour at most, and found by when it was written.
macro_rules! last_day {
    () => {
        "from copy_events where at > now() - interval '24 hours' \
         and written_at > now() - interval '25 hours'"
    };
}

/// How copies of the last 24 hours went.
const COPIES: &str = concat!(
    "select count(*) filter (where outcome = 'done') as done, \
     count(*) filter (where outcome = 'skipped') as skipped, \
     count(*) filter (where outcome not in ('done', 'skipped')) as failed, \
     percentile_disc(0.5) within group (order by own_time_us) as p50, \
     percentile_disc(0.95) within group (order by own_time_us) as p95 ",
    last_day!()
);

/// Why there were none.
const REASONS: &str = concat!(
    "select action, outcome, coalesce(reason, '-') as reason, count(*) as count ",
    last_day!(),
    " and outcome <> 'done' group by 1, 2, 3 order by count(*) desc, 1, 2, 3 limit $1"
);

/// Both, for whoever looks at their plans.
#[cfg(test)]
pub(super) fn of_events() -> (&'static str, &'static str) {
    (COPIES, REASONS)
}

/// Latest degraded times of a node in its line.
const LATEST_MAX: usize = 2;
/// Most accounts and reasons that are listed.
const LISTED_MAX: i64 = 20;

/// The state of a node that is there and takes no account.
const LETS_GO: &str = "lets_go";
/// The state of one that is not there.
const GONE: &str = "gone";

/// One node, seen from the database.
#[derive(Debug, Serialize)]
pub struct NodeStatus {
    /// The node process.
    pub node: String,
    /// It says that it is there.
    pub alive: bool,
    /// `alive`; `lets_go` while it takes nothing and gives its accounts back, `gone` without a sign of it.
    pub state: &'static str,
    /// Since when it does not, where it is known.
    pub gone_since: Option<String>,
    /// Accounts it owns, or that nobody has taken over yet.
    pub accounts: i64,
    /// How many it may own; 0 while it lets go of all.
    pub capacity: Option<i32>,
    /// Shortest time until one of its leases ends, by the database's clock; below 0 when it has ended.
    pub lease_left_s: Option<f64>,
    /// Copies that are open on its accounts.
    pub copies_open: i64,
}

/// Accounts by how they stand.
#[derive(Debug, Serialize)]
pub struct AccountCounts {
    /// Switched on, masters of other publishers included.
    pub enabled: i64,
    /// Switched on and owned under a lease that has not ended.
    pub owned: i64,
    /// Switched on, for a platform of nodes, and not owned.
    pub unowned: i64,
    /// Switched on, masters whose publisher is no node: nobody is to own them.
    pub external: i64,
    /// Switched off.
    pub disabled: i64,
}

/// What was done for followers in the last 24 hours.
#[derive(Debug, Serialize)]
pub struct CopyCounts {
    /// Orders carried out.
    pub done: i64,
    /// Decisions not to copy.
    pub skipped: i64,
    /// Orders refused, not sent or of unknown outcome.
    pub failed: i64,
    /// From the master's callback to the order call: median, microseconds.
    pub own_time_p50_us: Option<i64>,
    /// The same, 95th percentile.
    pub own_time_p95_us: Option<i64>,
}

/// Reads the status from the database.
pub async fn read(db: &mut PgConnection) -> Result<Status, CliError> {
    let fleet_mode = directory::fleet_mode(db).await?;
    let mut links = LinkCounts::default();
    let mut fleet_holds = 0;
    for of_mode in directory::links_by_mode(db).await? {
        match of_mode.effective {
            Mode::Copy => links.copy += of_mode.links,
            Mode::CloseOnly => links.close_only += of_mode.links,
            Mode::Paused => links.paused += of_mode.links,
        }
        if of_mode.without_fleet < of_mode.effective {
            fleet_holds += of_mode.links;
        }
    }
    let held = held(db).await?;
    let nodes = nodes(db).await?;
    let row = sqlx::query(
        "select count(*) filter (where enabled) as enabled, \
         count(*) filter (where enabled and node_id is not null and lease_until > clock_timestamp()) as owned, \
         count(*) filter (where enabled and platform <> 'external' \
           and (node_id is null or lease_until <= clock_timestamp())) as unowned, \
         count(*) filter (where enabled and platform = 'external') as external, \
         count(*) filter (where not enabled) as disabled from trading_accounts",
    )
    .fetch_one(&mut *db)
    .await?;
    let accounts = AccountCounts {
        enabled: row.get("enabled"),
        owned: row.get("owned"),
        unowned: row.get("unowned"),
        external: row.get("external"),
        disabled: row.get("disabled"),
    };
    let row = sqlx::query(COPIES).fetch_one(&mut *db).await?;
    let copies = CopyCounts {
        done: row.get("done"),
        skipped: row.get("skipped"),
        failed: row.get("failed"),
        own_time_p50_us: row.get("p50"),
        own_time_p95_us: row.get("p95"),
    };
    let uptime = read_last_day(db).await?;
    let left_open = left_open(db).await?;
    let sessions_down = sessions_down(db).await?;
    let length = lease::length()?;
    let waiting = directory::waiting_accounts(db, length).await?;
    let unowned = directory::unowned_accounts(db, length, LISTED_MAX).await?;
    let untaggable = untaggable(db).await?;
    let reasons = reasons(db).await?;
    Ok(Status {
        fleet_mode,
        fleet_holds,
        links,
        held,
        nodes,
        accounts,
        uptime,
        left_open,
        sessions_down,
        waiting,
        unowned,
        untaggable,
        copies,
        reasons,
    })
}

async fn nodes(db: &mut PgConnection) -> Result<Vec<NodeStatus>, sqlx::Error> {
    // A node's own word of what it owns is a lease cycle old; the accounts are not.
    let rows = sqlx::query(concat!(
        "with owners as (select a.node_id, count(*) as accounts, min(a.lease_until) as lease_until, \
           coalesce(sum((select count(*) from pairs p where p.follower_id = a.id \
             and p.state in ",
        live_states!(),
        ")), 0)::bigint as copies_open \
           from trading_accounts a where a.node_id is not null group by a.node_id) \
         select node_id, coalesce(n.alive_until > clock_timestamp(), false) as alive, \
           case when n.alive_until <= clock_timestamp() then n.alive_until end as gone_since, \
           coalesce(o.accounts, 0) as accounts, n.capacity, coalesce(o.copies_open, 0) as copies_open, \
           extract(epoch from o.lease_until - clock_timestamp())::float8 as left_s \
         from lease_nodes n full join owners o using (node_id) \
         order by coalesce(n.alive_until > clock_timestamp(), false) desc, node_id",
    ))
    .fetch_all(db)
    .await?;
    let node = |row: &sqlx::postgres::PgRow| NodeStatus {
        node: row.get("node_id"),
        alive: row.get("alive"),
        state: match (row.get("alive"), row.get("capacity")) {
            (true, Some(0_i32)) => LETS_GO,
            (true, _) => store::ALIVE,
            (false, _) => GONE,
        },
        gone_since: row.get::<Option<_>, _>("gone_since").map(directory::rfc3339),
        accounts: row.get("accounts"),
        capacity: row.get("capacity"),
        lease_left_s: row.get("left_s"),
        copies_open: row.get("copies_open"),
    };
    Ok(rows.iter().map(node).collect())
}

async fn held(db: &mut PgConnection) -> Result<Vec<Held>, DirectoryError> {
    let rows = sqlx::query(
        "(select 'account ' || a.name as what, a.mode::text as mode, \
           (select count(*) from copy_links l where l.deleted_at is null \
             and a.id in (l.master_id, l.follower_id)) as links, 0 as part, a.id as id \
         from trading_accounts a where a.mode <> 'copy' order by a.id limit $1) \
         union all \
         (select format('link %s, %s to %s', l.id, m.name, f.name), l.mode::text, 1, 1, l.id from copy_links l \
         join trading_accounts m on m.id = l.master_id join trading_accounts f on f.id = l.follower_id \
         where l.deleted_at is null and l.mode <> 'copy' order by l.id limit $1) order by part, id limit $1",
    )
    .bind(LISTED_MAX)
    .fetch_all(db)
    .await?;
    let is_held = |row: &sqlx::postgres::PgRow| {
        let mode = directory::mode(row, "trading_accounts or copy_links", row.get("id"), "mode")?;
        Ok(Held { what: row.get("what"), mode, links: row.get("links") })
    };
    rows.iter().map(is_held).collect()
}

async fn untaggable(db: &mut PgConnection) -> Result<Vec<Untaggable>, sqlx::Error> {
    let rows = sqlx::query(
        "select l.id, a.name, l.untaggable_since from copy_links l \
         join trading_accounts a on a.id = l.follower_id \
         where l.untaggable_since is not null and l.deleted_at is null order by l.id limit $1",
    )
    .bind(LISTED_MAX)
    .fetch_all(db)
    .await?;
    let known = |row: &sqlx::postgres::PgRow| Untaggable {
        link: row.get("id"),
        follower: row.get("name"),
        since: directory::rfc3339(row.get("untaggable_since")),
    };
    Ok(rows.iter().map(known).collect())
}

async fn left_open(db: &mut PgConnection) -> Result<Vec<LeftOpen>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "select a.name, count(*) as copies_open from pairs p \
         join copy_links l on l.id = p.link_id \
         join trading_accounts a on a.id in (l.master_id, p.follower_id) \
         where not a.enabled and p.state in ",
        live_states!(),
        " group by a.id, a.name order by a.id limit $1",
    ))
    .bind(LISTED_MAX)
    .fetch_all(db)
    .await?;
    let left = |row: &sqlx::postgres::PgRow| LeftOpen {
        account: row.get("name"),
        copies_open: row.get("copies_open"),
    };
    Ok(rows.iter().map(left).collect())
}

async fn sessions_down(db: &mut PgConnection) -> Result<Vec<SessionDown>, sqlx::Error> {
    let rows = sqlx::query(
        "select a.name, coalesce(s.session, 'silent') as session, s.detail \
         from trading_accounts a \
         left join account_status s on s.account_id = a.id and s.lease_token = a.lease_token \
         where a.node_id is not null and a.lease_until > clock_timestamp() \
           and coalesce(s.session, 'silent') not in ('copying', 'leading', 'paused') \
         order by a.id limit $1",
    )
    .bind(LISTED_MAX)
    .fetch_all(db)
    .await?;
    let down = |row: &sqlx::postgres::PgRow| SessionDown {
        account: row.get("name"),
        session: row.get("session"),
        detail: row.get("detail"),
    };
    Ok(rows.iter().map(down).collect())
}

async fn reasons(db: &mut PgConnection) -> Result<Vec<ReasonCount>, sqlx::Error> {
    let rows = sqlx::query(REASONS).bind(LISTED_MAX).fetch_all(db).await?;
    let counted = |row: &sqlx::postgres::PgRow| ReasonCount {
        action: row.get("action"),
        outcome: row.get("outcome"),
        reason: row.get("reason"),
        count: row.get("count"),
    };
    Ok(rows.iter().map(counted).collect())
}

/// Runs `lockstep status`.
pub fn run(args: StatusArgs) -> Result<(), CliError> {
    block_on(async {
        // What is away from the start is told at once.
        let mut db = Some(args.database.connect().await?);
        let text = |status: &Status| format!("{}\n{}", as_text(status), details(status));
        if args.watch {
            return watch(async || Ok(text(&look(&mut db, &args.database).await?))).await;
        }
        let status = look(&mut db, &args.database).await?;
        if args.json { out::json(&status) } else { out::line(text(&status)) }
    })?
}

/// Reads the status, over a connection that is kept only if that went well.
async fn look(kept: &mut Option<PgConnection>, database: &DatabaseArg) -> Result<Status, CliError> {
    let mut db = match kept.take() {
        Some(db) => db,
        None => database.connect().await?,
    };
    let status = read(&mut db).await?;
    *kept = Some(db);
    Ok(status)
}

/// What does not work, and why things were not copied; nothing if there is nothing.
fn details(status: &Status) -> String {
    let mut text = String::new();
    if !status.held.is_empty() {
        let rows = status.held.iter();
        let rows = rows.map(|h| vec![h.what.clone(), h.mode.to_string(), h.links.to_string()]);
        text += &format!("\n{}\n", render(&["paused by itself", "mode", "links"], rows));
    }
    if !status.left_open.is_empty() {
        let rows = status.left_open.iter();
        let rows = rows.map(|l| vec![l.account.clone(), l.copies_open.to_string()]);
        let head = ["switched off", "open copies that nobody follows or closes"];
        text += &format!("\n{}\n", render(&head, rows));
    }
    if !status.uptime.is_empty() {
        let rows = status.uptime.iter().map(uptime_row);
        let head = ["node, last 24 h", "ok", "degraded", "missing", "latest degraded (UTC)"];
        text += &format!("\n{}\n", render(&head, rows));
    }
    if !status.sessions_down.is_empty() {
        let rows = status.sessions_down.iter();
        let rows =
            rows.map(|s| vec![s.account.clone(), s.session.clone(), or_dash(s.detail.clone())]);
        text += &format!("\n{}\n", render(&["session not open", "state", "why"], rows));
    }
    if !status.waiting.is_empty() {
        let listed = status.waiting.iter().take(LISTED_MAX as usize);
        let rows = listed.map(|waiting| vec![waiting.account.clone(), waiting.to_string()]);
        text += &format!("\n{}\n", render(&["nobody takes it over yet", "why"], rows));
    }
    if !status.unowned.is_empty() {
        let rows = status.unowned.iter();
        let rows = rows.map(|u| vec![u.account.clone(), since(u), u.why.clone()]);
        text += &format!("\n{}\n", render(&["without an owner", "since (UTC)", "why"], rows));
        let more =
            status.accounts.unowned - count(status.waiting.len()) - count(status.unowned.len());
        if more > 0 {
            text += &format!("and {more} more\n");
        }
    }
    if !status.untaggable.is_empty() {
        let rows = status.untaggable.iter();
        let rows = rows.map(|u| vec![u.link.to_string(), u.follower.clone(), u.since.clone()]);
        text += &format!("\n{}\n", render(&["tags not kept: link", "follower", "since"], rows));
    }
    if !status.reasons.is_empty() {
        let rows = status.reasons.iter().map(|r| {
            vec![r.count.to_string(), r.action.clone(), r.outcome.clone(), r.reason.clone()]
        });
        text += &format!("\n{}\n", render(&["times", "action", "outcome", "why"], rows));
    }
    text
}

fn count(items: usize) -> i64 {
    i64::try_from(items).unwrap_or(i64::MAX)
}

/// Since when an account has no owner.
fn since(unowned: &Unowned) -> String {
    or_dash(unowned.since.as_deref().map(seconds_of))
}

/// A node's line; how long its leases still last is said while it can renew them.
fn node_row(node: &NodeStatus) -> Vec<String> {
    let state = match &node.gone_since {
        Some(since) => format!("{} since {} UTC", node.state, seconds_of(since)),
        None => node.state.replace('_', " "),
    };
    vec![
        node.node.clone(),
        state,
        node.accounts.to_string(),
        or_dash(node.capacity),
        or_dash(node.lease_left_s.filter(|_| node.alive).map(|left| format!("{left:.1} s"))),
        node.copies_open.to_string(),
    ]
}

/// `2026-11-30 09:12:05` of a time in words for programs.
fn seconds_of(time: &str) -> String {
    time.get(..19).unwrap_or(time).replace('T', " ")
}

/// A node's minutes: share that was ok, numbers of the others, and when it was last degraded.
fn uptime_row(node: &NodeUptime) -> Vec<String> {
    let latest: Vec<String> = node.degraded.iter().take(LATEST_MAX).map(degraded_text).collect();
    let ended = || format!("{} (ended, last seen {})", node.node, minute_of(&node.last_minute));
    vec![
        if node.state == store::ENDED { ended() } else { node.node.clone() },
        // Rounded down: what was not always ok is not 100 %.
        format!("{:.1} %", (node.ok_percent * 10.0).floor() / 10.0),
        format!("{} min", node.degraded_minutes),
        format!("{} min", node.missing_minutes),
        if latest.is_empty() { "-".into() } else { latest.join("; ") },
    ]
}

/// `2026-11-30 09:12, 3 min: database, broker`
fn degraded_text(time: &DegradedTime) -> String {
    format!("{}, {} min: {}", minute_of(&time.began), time.minutes, time.reasons.join(", "))
}

/// `2026-11-30 09:12` of a time in words for programs.
fn minute_of(time: &str) -> String {
    time.get(..16).unwrap_or(time).replace('T', " ")
}

/// What the kill switch does, with a line's end; nothing while it does nothing.
fn fleet_line(status: &Status) -> String {
    if status.fleet_mode == Mode::Copy {
        return String::new();
    }
    let links = &status.links;
    format!(
        "fleet: {}, which stops {} of {} links (`lockstep resume --all` ends it)\n\n",
        status.fleet_mode,
        status.fleet_holds,
        links.copy + links.close_only + links.paused
    )
}

/// The links by what comes of all modes; nothing where all copy.
fn links_line(links: &LinkCounts) -> String {
    if links.close_only + links.paused == 0 {
        return String::new();
    }
    let LinkCounts { copy, close_only, paused } = links;
    format!("links: {copy} copy, {close_only} close only or are off, {paused} paused\n")
}

/// The status as a person reads it.
pub fn as_text(status: &Status) -> String {
    let nodes = render(
        &["node", "state", "owned", "of", "lease left", "open copies"],
        status.nodes.iter().map(node_row),
    );
    let a = &status.accounts;
    let c = &status.copies;
    format!(
        "{}{nodes}\n\naccounts: {} enabled ({} owned, {} unowned, {} external), {} disabled\n{}\
         last 24 h: {} orders done, {} skipped, {} failed; own time p50 {} us, p95 {} us",
        fleet_line(status),
        a.enabled,
        a.owned,
        a.unowned,
        a.external,
        a.disabled,
        links_line(&status.links),
        c.done,
        c.skipped,
        c.failed,
        or_dash(c.own_time_p50_us),
        or_dash(c.own_time_p95_us)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::tests::database_with;
    use crate::directory::{NewLink, add_link, enable_link};
    use reconcile::Sizing;
    use rust_decimal::Decimal;
    use schemas::LinkId;

    /// A database with accounts of these names, and a link from the first to each of the others.
    async fn linked(names: &[&str]) -> (PgConnection, Vec<LinkId>) {
        let platform = |place| if place == 0 { "external" } else { "paper" };
        let names: Vec<(&str, &str)> =
            names.iter().enumerate().map(|(place, name)| (*name, platform(place))).collect();
        let (_url, mut db, accounts) = database_with("status", &names).await;
        let mut links = Vec::new();
        for follower in &accounts[1..] {
            let plain = NewLink::plain(accounts[0], *follower, Sizing::Multiplier(Decimal::ONE));
            links.push(add_link(&mut db, &plain).await.unwrap());
        }
        (db, links)
    }

    #[tokio::test]
    async fn a_connection_that_broke_is_made_anew_at_the_next_look() {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("status-watch").await.unwrap();
        let mut other = crate::database::connect_migrated(&url, "test").await.unwrap();
        let database = DatabaseArg { database: Some(url) };
        let mut db = None;
        look(&mut db, &database).await.unwrap();
        let pid: i32 = sqlx::query_scalar("select pg_backend_pid()")
            .fetch_one(db.as_mut().unwrap())
            .await
            .unwrap();
        sqlx::query("select pg_terminate_backend($1, 5000)")
            .bind(pid)
            .execute(&mut other)
            .await
            .unwrap();
        let gone = look(&mut db, &database).await;
        assert!(matches!(gone, Err(CliError::Missing { .. })), "{gone:?}");
        look(&mut db, &database).await.unwrap();
    }

    #[tokio::test]
    async fn the_kill_switch_is_the_first_line_and_says_how_many_links_it_stops() {
        let (mut db, links) = linked(&["boss", "one", "two", "three"]).await;
        enable_link(&mut db, links[0], false).await.unwrap();
        directory::set_link_mode(&mut db, links[1], Mode::Paused).await.unwrap();
        let before = read(&mut db).await.unwrap();
        assert!(!as_text(&before).contains("fleet:"), "{}", as_text(&before));
        directory::set_fleet_mode(&mut db, Mode::CloseOnly).await.unwrap();
        let closing = read(&mut db).await.unwrap();
        let text = as_text(&closing);
        assert!(text.starts_with("fleet: close_only, which stops 1 of 3 links"), "{text}");
        directory::set_fleet_mode(&mut db, Mode::Paused).await.unwrap();
        let paused = read(&mut db).await.unwrap();
        let text = as_text(&paused);
        assert!(text.starts_with("fleet: paused, which stops 2 of 3 links"), "{text}");
        assert_eq!(paused.links, LinkCounts { copy: 0, close_only: 0, paused: 3 });
        assert_eq!(serde_json::to_value(&paused).unwrap()["fleet_mode"], "paused");
    }

    #[tokio::test]
    async fn a_node_without_accounts_is_listed_and_a_dead_one_with_when_it_went() {
        let (mut db, _) = linked(&["boss", "one", "two"]).await;
        sqlx::raw_sql(
            "insert into lease_nodes (node_id, platforms, capacity, owned, alive_until) values \
             ('node-a', '{paper}', 300, 0, clock_timestamp() + interval '60 s'), \
             ('node-b', '{paper}', 200, 1, '2026-01-02 03:04:05Z'); \
             update trading_accounts set node_id = 'node-b', lease_until = '2026-01-02 03:04:05Z' \
             where name = 'one'; \
             update trading_accounts set node_id = 'node-c', lease_until = '2026-01-02 03:04:05Z' \
             where name = 'two'",
        )
        .execute(&mut db)
        .await
        .unwrap();
        let status = read(&mut db).await.unwrap();
        let rows: Vec<_> = status.nodes.iter().map(node_row).collect();
        assert_eq!(
            rows,
            [
                ["node-a", "alive", "0", "300", "-", "0"],
                ["node-b", "gone since 2026-01-02 03:04:05 UTC", "1", "200", "-", "0"],
                ["node-c", "gone", "1", "-", "-", "0"],
            ]
        );
        let states: Vec<_> = status.nodes.iter().map(|node| node.state).collect();
        assert_eq!(states, ["alive", "gone", "gone"]);
    }

    #[tokio::test]
    async fn the_accounts_that_are_on_are_owned_or_unowned_or_external() {
        let (mut db, _) = linked(&["boss", "one", "two"]).await;
        let status = read(&mut db).await.unwrap();
        let text = as_text(&status);
        assert!(text.contains("3 enabled (0 owned, 2 unowned, 1 external), 0 disabled"), "{text}");
    }

    #[tokio::test]
    async fn an_account_whose_lease_ran_out_has_no_session_and_is_said_to_wait() {
        let (mut db, _) = linked(&["boss", "one"]).await;
        let owned_until = |time: &str| {
            format!(
                "update trading_accounts set node_id = 'node-a', starts = 9, \
                 lease_until = clock_timestamp() {time} where name = 'one'"
            )
        };
        sqlx::query(sqlx::AssertSqlSafe(owned_until("+ interval '60 s'")))
            .execute(&mut db)
            .await
            .unwrap();
        let owned = read(&mut db).await.unwrap();
        assert_eq!((owned.sessions_down.len(), owned.waiting.len()), (1, 0));
        sqlx::query(sqlx::AssertSqlSafe(owned_until("- interval '22 s'")))
            .execute(&mut db)
            .await
            .unwrap();
        let left = read(&mut db).await.unwrap();
        assert_eq!((left.sessions_down.len(), left.waiting.len()), (0, 1));
        assert!(left.unowned.is_empty(), "{:?}", left.unowned);
        assert!(details(&left).contains("(its last 9 tenures ended early)"), "{}", details(&left));
    }

    #[tokio::test]
    async fn an_account_without_an_owner_is_named_and_why_nobody_takes_it() {
        let (mut db, _) = linked(&["boss", "one", "two", "three"]).await;
        let why = async |db: &mut PgConnection, change: &str| {
            let change = sqlx::AssertSqlSafe(change.to_owned());
            sqlx::raw_sql(change).execute(&mut *db).await.unwrap();
            let status = read(db).await.unwrap();
            for unowned in &status.unowned {
                assert!(details(&status).contains(&unowned.why), "{}", details(&status));
            }
            let unowned = status.unowned.into_iter();
            unowned.map(|u| format!("{}: {}", u.account, u.why)).collect::<Vec<_>>()
        };
        let nobody = "no node is there for platform paper";
        assert_eq!(
            why(&mut db, "").await,
            ["one", "two", "three"].map(|name| format!("{name}: {nobody}"))
        );
        let dead_and_other = "insert into lease_nodes (node_id, platforms, capacity, owned, alive_until) values \
             ('node-a', '{paper}', 9, 0, clock_timestamp() - interval '1 s'), \
             ('node-b', '{mt5}', 9, 0, clock_timestamp() + interval '60 s')";
        assert_eq!(why(&mut db, dead_and_other).await.len(), 3);
        let full = "insert into lease_nodes (node_id, platforms, capacity, owned, alive_until) values \
             ('node-c', '{paper}', 2, 2, clock_timestamp() + interval '60 s'); \
             update trading_accounts set node_id = 'node-c', lease_until = clock_timestamp() + interval '60 s' \
             where name in ('one', 'two')";
        let expected = ["three: no node has room: 2 of 2 places taken"];
        assert_eq!(why(&mut db, full).await, expected);
        let ending = "insert into lease_nodes (node_id, platforms, capacity, owned, alive_until) values \
             ('node-d', '{paper}', 0, 0, clock_timestamp() + interval '60 s')";
        assert_eq!(why(&mut db, ending).await, expected);
        let room = "update lease_nodes set capacity = 3 where node_id = 'node-c'";
        assert_eq!(why(&mut db, room).await, ["three: not taken over yet: 1 place is free"]);
        let all_end = "update lease_nodes set capacity = 0 where node_id = 'node-c'";
        let said = why(&mut db, all_end).await;
        assert_eq!(
            said,
            ["three: no node takes accounts: 2 of 2 let go of theirs or claim none now"]
        );
        let off = "update trading_accounts set enabled = false where name = 'three'";
        assert!(why(&mut db, off).await.is_empty());
    }

    #[tokio::test]
    async fn an_account_that_is_off_is_named_while_copies_of_it_are_open() {
        let (mut db, links) = linked(&["boss", "one", "two"]).await;
        let one = directory::account_id(&mut db, "one").await.unwrap();
        crate::cli::tests::insert_open_pair(&mut db, links[0], 7).await;
        assert!(read(&mut db).await.unwrap().left_open.is_empty());
        directory::enable_account(&mut db, one, false).await.unwrap();
        let status = read(&mut db).await.unwrap();
        let left: Vec<_> = status.left_open.iter().map(|l| (&*l.account, l.copies_open)).collect();
        assert_eq!(left, [("one", 1)]);
        assert!(details(&status).contains("SWITCHED OFF"), "{}", details(&status));
    }

    #[tokio::test]
    async fn what_is_paused_by_itself_is_listed_with_the_links_it_concerns() {
        let (mut db, links) = linked(&["boss", "one", "two"]).await;
        let fine = read(&mut db).await.unwrap();
        assert!(!as_text(&fine).contains("paused") && !details(&fine).contains("PAUSED"));
        let boss = directory::account_id(&mut db, "boss").await.unwrap();
        directory::set_account_mode(&mut db, boss, Mode::CloseOnly).await.unwrap();
        directory::set_link_mode(&mut db, links[1], Mode::Paused).await.unwrap();
        let status = read(&mut db).await.unwrap();
        let held: Vec<_> = status.held.iter().map(|h| (&*h.what, h.mode, h.links)).collect();
        let link = format!("link {}, boss to two", links[1]);
        assert_eq!(held, [("account boss", Mode::CloseOnly, 2), (&*link, Mode::Paused, 1)]);
        assert!(as_text(&status).contains("links: 0 copy, 1 close only or are off, 1 paused"));
        assert!(details(&status).contains("PAUSED BY ITSELF"), "{}", details(&status));
        let accounts = directory::list_accounts(&mut db).await.unwrap();
        assert_eq!(accounts[0].effective_mode, Mode::CloseOnly);
        directory::set_fleet_mode(&mut db, Mode::Paused).await.unwrap();
        let accounts = directory::list_accounts(&mut db).await.unwrap();
        assert_eq!((accounts[0].mode, accounts[0].effective_mode), (Mode::CloseOnly, Mode::Paused));
    }

    #[test]
    fn a_nodes_line_says_how_much_was_ok_what_is_unknown_and_when_it_was_degraded() {
        let time = |began: &str, minutes, reasons: &[&str]| DegradedTime {
            began: began.into(),
            minutes,
            reasons: reasons.iter().map(|reason| (*reason).into()).collect(),
        };
        let node = NodeUptime {
            node: "node-1".into(),
            state: store::ALIVE,
            last_minute: "2026-11-30T10:00:00Z".into(),
            ok_percent: 99.96,
            ok_minutes: 1439,
            degraded_minutes: 3,
            missing_minutes: 2,
            degraded: vec![
                time("2026-11-30T09:12:00Z", 2, &["no account lease", "database"]),
                time("2026-11-30T08:00:00Z", 1, &["bus"]),
                time("2026-11-30T07:00:00Z", 1, &["broker"]),
            ],
        };
        assert_eq!(
            uptime_row(&node),
            [
                "node-1",
                "99.9 %",
                "3 min",
                "2 min",
                "2026-11-30 09:12, 2 min: no account lease, database; 2026-11-30 08:00, 1 min: bus"
            ]
        );
        let ended = NodeUptime { state: store::ENDED, ..node.clone() };
        assert_eq!(uptime_row(&ended)[0], "node-1 (ended, last seen 2026-11-30 10:00)");
        let fine = NodeUptime { degraded: vec![], ok_percent: 100.0, ..node };
        assert_eq!(
            (&uptime_row(&fine)[1], &uptime_row(&fine)[4]),
            (&"100.0 %".into(), &"-".into())
        );
    }
}
