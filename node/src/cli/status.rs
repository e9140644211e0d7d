//! `lockstep status`: who owns what right now, and what was copied lately.

use super::table::{or_dash, render};
use super::watch::watch;
use super::{CliError, DatabaseArg, block_on, out};
use crate::directory;
use crate::uptime::store::{DegradedTime, NodeUptime, read_last_day};
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
    /// Nodes that own accounts.
    pub nodes: Vec<NodeStatus>,
    /// Accounts by how they stand.
    pub accounts: AccountCounts,
    /// What each node was in the last 24 hours, minute by minute.
    pub uptime: Vec<NodeUptime>,
    /// Owned accounts whose session does not work, and why.
    pub sessions_down: Vec<SessionDown>,
    /// Links whose follower's broker does not keep our tags: nothing is opened late on them.
    pub untaggable: Vec<Untaggable>,
    /// Copies of the last 24 hours.
    pub copies: CopyCounts,
    /// Why copies of the last 24 hours were skipped or failed, most frequent first.
    pub reasons: Vec<ReasonCount>,
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

/// Latest degraded times of a node in its line.
const LATEST_MAX: usize = 2;
/// Most accounts and reasons that are listed.
const LISTED_MAX: i64 = 20;

/// One node, seen from the database.
#[derive(Debug, Serialize)]
pub struct NodeStatus {
    /// The node process.
    pub node: String,
    /// Accounts it owns.
    pub accounts: i64,
    /// Shortest time until one of its leases ends, by the database's clock; below 0 when it has ended.
    pub lease_left_s: f64,
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
pub async fn read(db: &mut PgConnection) -> Result<Status, sqlx::Error> {
    let nodes = sqlx::query(
        "select a.node_id, count(*) as accounts, \
         extract(epoch from min(a.lease_until) - clock_timestamp())::float8 as left_s, \
         coalesce(sum((select count(*) from pairs p where p.follower_id = a.id \
           and p.state in ('sending', 'open', 'closing'))), 0)::bigint as copies_open \
         from trading_accounts a where a.node_id is not null group by a.node_id order by a.node_id",
    )
    .fetch_all(&mut *db)
    .await?
    .iter()
    .map(|row| NodeStatus {
        node: row.get("node_id"),
        accounts: row.get("accounts"),
        lease_left_s: row.get("left_s"),
        copies_open: row.get("copies_open"),
    })
    .collect();
    let row = sqlx::query(
        "select count(*) filter (where enabled) as enabled, \
         count(*) filter (where enabled and node_id is not null and lease_until > clock_timestamp()) as owned, \
         count(*) filter (where enabled and platform <> 'external' \
           and (node_id is null or lease_until <= clock_timestamp())) as unowned, \
         count(*) filter (where not enabled) as disabled from trading_accounts",
    )
    .fetch_one(&mut *db)
    .await?;
    let accounts = AccountCounts {
        enabled: row.get("enabled"),
        owned: row.get("owned"),
        unowned: row.get("unowned"),
        disabled: row.get("disabled"),
    };
    let row = sqlx::query(
        "select count(*) filter (where outcome = 'done') as done, \
         count(*) filter (where outcome = 'skipped') as skipped, \
         count(*) filter (where outcome not in ('done', 'skipped')) as failed, \
         percentile_disc(0.5) within group (order by own_time_us) as p50, \
         percentile_disc(0.95) within group (order by own_time_us) as p95 \
         from copy_events where at > clock_timestamp() - interval '24 hours'",
    )
    .fetch_one(&mut *db)
    .await?;
    let copies = CopyCounts {
        done: row.get("done"),
        skipped: row.get("skipped"),
        failed: row.get("failed"),
        own_time_p50_us: row.get("p50"),
        own_time_p95_us: row.get("p95"),
    };
    let uptime = read_last_day(db).await?;
    let sessions_down = sessions_down(db).await?;
    let untaggable = untaggable(db).await?;
    let reasons = reasons(db).await?;
    Ok(Status { nodes, accounts, uptime, sessions_down, untaggable, copies, reasons })
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

async fn sessions_down(db: &mut PgConnection) -> Result<Vec<SessionDown>, sqlx::Error> {
    let rows = sqlx::query(
        "select a.name, coalesce(s.session, 'silent') as session, s.detail \
         from trading_accounts a \
         left join account_status s on s.account_id = a.id and s.lease_token = a.lease_token \
         where a.node_id is not null and coalesce(s.session, 'silent') not in ('copying', 'leading', 'paused') \
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
    let rows = sqlx::query(
        "select action, outcome, coalesce(reason, '-') as reason, count(*) as count \
         from copy_events where at > clock_timestamp() - interval '24 hours' and outcome <> 'done' \
         group by 1, 2, 3 order by count(*) desc, 1, 2, 3 limit $1",
    )
    .bind(LISTED_MAX)
    .fetch_all(db)
    .await?;
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
        let mut db = args.database.connect().await?;
        let text = |status: &Status| format!("{}\n{}", as_text(status), details(status));
        if args.watch {
            return watch(async || Ok(text(&read(&mut db).await?))).await;
        }
        let status = read(&mut db).await?;
        if args.json { out::json(&status) } else { out::line(text(&status)) }
    })?
}

/// What does not work, and why things were not copied; nothing if there is nothing.
fn details(status: &Status) -> String {
    let mut text = String::new();
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

/// A node's minutes: share that was ok, numbers of the others, and when it was last degraded.
fn uptime_row(node: &NodeUptime) -> Vec<String> {
    let latest: Vec<String> = node.degraded.iter().take(LATEST_MAX).map(degraded_text).collect();
    vec![
        node.node.clone(),
        // Rounded down: what was not always ok is not 100 %.
        format!("{:.1} %", (node.ok_percent * 10.0).floor() / 10.0),
        format!("{} min", node.degraded_minutes),
        format!("{} min", node.missing_minutes),
        if latest.is_empty() { "-".into() } else { latest.join("; ") },
    ]
}

/// `2026-11-30 09:12, 3 min: database, broker`
fn degraded_text(time: &DegradedTime) -> String {
    let began = time.began.get(..16).unwrap_or(&time.began).replace('T', " ");
    format!("{began}, {} min: {}", time.minutes, time.reasons.join(", "))
}

/// The status as a person reads it.
pub fn as_text(status: &Status) -> String {
    let nodes = render(
        &["node", "accounts", "lease left", "open copies"],
        status.nodes.iter().map(|n| {
            vec![
                n.node.clone(),
                n.accounts.to_string(),
                format!("{:.1} s", n.lease_left_s),
                n.copies_open.to_string(),
            ]
        }),
    );
    let a = &status.accounts;
    let c = &status.copies;
    format!(
        "{nodes}\n\naccounts: {} enabled, {} owned, {} unowned, {} disabled\n\
         last 24 h: {} orders done, {} skipped, {} failed; own time p50 {} us, p95 {} us",
        a.enabled,
        a.owned,
        a.unowned,
        a.disabled,
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

    #[test]
    fn a_nodes_line_says_how_much_was_ok_what_is_unknown_and_when_it_was_degraded() {
        let time = |began: &str, minutes, reasons: &[&str]| DegradedTime {
            began: began.into(),
            minutes,
            reasons: reasons.iter().map(|reason| (*reason).into()).collect(),
        };
        let node = NodeUptime {
            node: "node-1".into(),
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
        let fine = NodeUptime { degraded: vec![], ok_percent: 100.0, ..node };
        assert_eq!(
            (&uptime_row(&fine)[1], &uptime_row(&fine)[4]),
            (&"100.0 %".into(), &"-".into())
        );
    }
}
