//! `lockstep lease`: who owns which account, and handing one over.
//!
//! Invariant: a lease is given back by its owner alone, when nothing of it is in flight and nothing
//! unwritten. This asks the owner, and never writes the columns of the lease.

use super::ask::{ask, owner};
use super::on_bus::BusArg;
use super::table::{TableRow, or_dash, print_rows};
use super::{CliError, DatabaseArg, block_on, out};
use crate::account::owner::Owned;
use crate::directory::{self, DirectoryError, Waiting};
use clap::{Args, Subcommand};
use schemas::codec::VERSION;
use schemas::control::{ControlRequest, ControlVerb};
use serde::Serialize;
use sqlx::{PgConnection, Row};
use std::time::Duration;

/// Longest wait until an account has left its owner: so long it looks for a moment without an order on
/// its way (30 s), then for the last answers (30 s) and rows (10 s).
const HANDED_OVER_WITHIN: Duration = Duration::from_secs(75);
/// Longest wait for the next owner after that; others are told of a free account at once.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(200);

/// The setting of the nodes that says how long a lease is.
const LENGTH: &str = "LOCKSTEP_LEASE";
/// What it is where nobody sets it; the node's own default.
const USUAL_LENGTH: Duration = Duration::from_secs(60);

/// Arguments of `lockstep lease`.
#[derive(Debug, Args)]
pub struct LeaseArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: LeaseVerb,
}

#[derive(Debug, Subcommand)]
enum LeaseVerb {
    /// List every account with its lease.
    ///
    /// TOKEN is the number of the tenure: it grows with every claim, and brokers that check it refuse orders
    /// of an older one. STARTS counts the claims since a tenure last went well for five leases; from 2 on,
    /// others leave the account alone for a while after a crash. SINCE is the age of the tenure.
    List,
    /// Have the owner hand an account over to another node, as it does when it is stopped.
    Release(ReleaseArgs),
}

#[derive(Debug, Args)]
struct ReleaseArgs {
    /// Name or number of the account.
    account: String,
    #[command(flatten)]
    bus: BusArg,
}

/// The lease of an account.
#[derive(Debug, Serialize)]
struct Lease {
    account: String,
    platform: String,
    enabled: bool,
    node: Option<String>,
    /// Seconds until it ends by the database's clock; below 0 when it has ended.
    lease_left_s: Option<f64>,
    token: i64,
    /// Seconds since the tenure began; without an owner since it has none. Nothing of an external
    /// master, which nobody is to own.
    since_s: Option<f64>,
    /// Tenures begun since the last one that went well for five minutes.
    starts: i32,
    /// What its session last said in this tenure, while the lease lasts.
    session: Option<String>,
    /// Until when others leave it alone, because its owners ended early.
    waits_until: Option<String>,
    /// Why nobody owns it, where that is not because it waits.
    unowned: Option<String>,
    #[serde(skip)]
    waiting: Option<Waiting>,
}

impl TableRow for Lease {
    const HEAD: &'static [&'static str] = &[
        "account",
        "platform",
        "enabled",
        "node",
        "lease left",
        "token",
        "since",
        "starts",
        "session",
    ];
    fn cells(&self) -> Vec<String> {
        vec![
            self.account.clone(),
            self.platform.clone(),
            if self.enabled { "yes" } else { "no" }.into(),
            or_dash(self.node.clone()),
            or_dash(self.lease_left_s.map(lease_left)),
            self.token.to_string(),
            or_dash(self.since_s.map(|s| format!("{s:.0} s"))),
            self.starts.to_string(),
            or_dash(self.session_or_why()),
        ]
    }
}

impl Lease {
    /// What its session does; without an owner, why it has none.
    fn session_or_why(&self) -> Option<String> {
        let waiting = self.waiting.as_ref().map(Waiting::to_string);
        waiting.or_else(|| self.unowned.clone()).or_else(|| self.session.clone())
    }
}

/// `41.2 s`, or since when there is none.
fn lease_left(seconds: f64) -> String {
    if seconds < 0.0 { format!("ended {:.0} s ago", -seconds) } else { format!("{seconds:.1} s") }
}

/// The length of a lease as the nodes have it, if this runs with their settings.
pub(super) fn length() -> Result<Duration, CliError> {
    let text = std::env::var(LENGTH).unwrap_or_default();
    if text.trim().is_empty() {
        return Ok(USUAL_LENGTH);
    }
    let length = crate::config::parse_duration(text.trim());
    length.map_err(|problem| CliError::Usage(format!("{LENGTH}={text} {problem}")))
}

async fn list(db: &mut PgConnection, length: Duration) -> Result<Vec<Lease>, DirectoryError> {
    // In the same order as all accounts below.
    let mut waiting = directory::waiting_accounts(db, length).await?.into_iter().peekable();
    let unowned = directory::unowned_accounts(db, length, i64::MAX).await?;
    let mut unowned = unowned.into_iter().peekable();
    let rows = sqlx::query(
        "select a.name, a.platform, a.enabled, a.node_id, a.lease_token, a.starts, s.session, \
         extract(epoch from nullif(a.lease_until, '-infinity') - clock_timestamp())::float8 as left_s, \
         extract(epoch from clock_timestamp() - nullif(case when a.platform = 'external' then null when a.node_id is null then a.free_since \
             else a.tenure_since end, '-infinity'))::float8 as since_s \
         from trading_accounts a left join account_status s on s.account_id = a.id \
             and s.lease_token = a.lease_token and a.node_id is not null \
             and a.lease_until > clock_timestamp() order by a.id",
    )
    .fetch_all(db)
    .await?;
    let lease = |row: &sqlx::postgres::PgRow| {
        let node: Option<String> = row.get("node_id");
        let account: String = row.get("name");
        let waiting = waiting.next_if(|waiting| waiting.account == account);
        let unowned = unowned.next_if(|unowned| unowned.account == account);
        Lease {
            account,
            platform: row.get("platform"),
            enabled: row.get("enabled"),
            lease_left_s: node.as_ref().and_then(|_| row.get("left_s")),
            node,
            token: row.get("lease_token"),
            since_s: row.get("since_s"),
            starts: row.get("starts"),
            session: row.get("session"),
            waits_until: waiting.as_ref().map(|waiting| waiting.until.clone()),
            unowned: unowned.map(|unowned| unowned.why),
            waiting,
        }
    };
    Ok(rows.iter().map(lease).collect())
}

/// What became of a release.
#[derive(Debug, Serialize)]
struct Released {
    account: String,
    from: String,
    /// The next owner; nothing if nobody had taken it yet.
    to: Option<String>,
    token: i64,
}

/// Runs `lockstep lease`.
pub fn run(args: LeaseArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = args.database.connect().await?;
        match args.verb {
            LeaseVerb::List => print_rows(&list(&mut db, length()?).await?, args.json),
            LeaseVerb::Release(release) => {
                let released = self::release(&mut db, &release).await?;
                if args.json {
                    return out::json(&released);
                }
                let Released { account, from, to, token } = released;
                let to = to.unwrap_or_else(|| "nobody yet: the others look again soon".to_owned());
                out::line(format_args!(
                    "account {account} left {from}, now owned by {to} (token {token})"
                ))
            }
        }
    })?
}

async fn release(db: &mut PgConnection, args: &ReleaseArgs) -> Result<Released, CliError> {
    let before = owner(db, &args.account).await?;
    let account = before.account;
    let request = ControlRequest { v: VERSION, account, verb: ControlVerb::Release, link: None };
    let from = ask(&args.bus, &before, &request).await?.node.to_string();
    let left = until(db, &args.account, HANDED_OVER_WITHIN, |now| {
        now.owner() != Some(from.as_str()) || now.token != before.token
    });
    if left.await?.is_none() {
        return Err(CliError::No(format!(
            "account {}: {from} still has it after {HANDED_OVER_WITHIN:?}: an order was always on its \
             way, or its last answers and rows did not come",
            before.name
        )));
    }
    let taken = until(db, &args.account, TAKEN_WITHIN, |now| {
        now.owner().is_some() && now.token != before.token
    });
    let to = taken.await?;
    let token = to.as_ref().map_or(before.token, |now| now.token);
    Ok(Released {
        account: before.name,
        from,
        to: to.and_then(|now| now.owner().map(str::to_owned)),
        token,
    })
}

/// Looks until it is so; nothing if it is not within the limit.
async fn until(
    db: &mut PgConnection,
    account: &str,
    limit: Duration,
    is_so: impl Fn(&Owned) -> bool,
) -> Result<Option<Owned>, CliError> {
    let looking = async {
        loop {
            let now = owner(db, account).await?;
            if is_so(&now) {
                return Ok(now);
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(limit, looking).await.ok().transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::tests::database_with;

    #[tokio::test]
    async fn an_account_whose_owners_ended_early_is_shown_to_wait_and_an_external_one_since_nothing()
     {
        let names = [("boss", "external"), ("one", "paper"), ("two", "paper")];
        let (_url, mut db, _ids) = database_with("lease_list", &names).await;
        // The wait is at least half of 15 leases, whatever the number of the account is.
        sqlx::raw_sql(
            "update trading_accounts set node_id = 'node-a', starts = case name when 'one' then 9 else 1 end, \
             lease_until = clock_timestamp() - interval '22 s' where name in ('one', 'two'); \
             insert into account_status (account_id, lease_token, node_id, session, reported_at) \
             select id, lease_token, 'node-a', 'copying', now() from trading_accounts where node_id = 'node-a'",
        )
        .execute(&mut db)
        .await
        .unwrap();
        let leases = list(&mut db, USUAL_LENGTH).await.unwrap();
        let [boss, one, two] = &leases[..] else { panic!("{leases:?}") };
        assert_eq!(boss.since_s, None);
        let cells = one.cells();
        let said = cells.last().unwrap();
        assert!(
            said.starts_with("waits until 2") && said.ends_with("(its last 9 tenures ended early)"),
            "{said}"
        );
        assert!(cells[4].starts_with("ended 2"), "{cells:?}");
        assert!(one.waits_until.is_some());
        let nobody = "no node is there for platform paper";
        assert_eq!((two.cells().last().unwrap().as_str(), &two.waits_until), (nobody, &None));
        assert_eq!((one.unowned.as_deref(), two.unowned.as_deref()), (None, Some(nobody)));
        assert_eq!(boss.cells().last().unwrap(), "-");
    }

    #[tokio::test]
    async fn a_release_of_an_external_account_says_that_no_node_ever_owns_it() {
        #[derive(clap::Parser)]
        struct Words {
            #[command(flatten)]
            release: ReleaseArgs,
        }
        let names = [("boss", "external"), ("one", "paper")];
        let (_url, mut db, _ids) = database_with("lease_release", &names).await;
        let mut refusal = async |account: &str| {
            let words = <Words as clap::Parser>::parse_from(["release", account]);
            let released = release(&mut db, &words.release).await;
            crate::causes::with_causes(&released.unwrap_err())
        };
        let external = refusal("boss").await;
        assert!(external.contains("account boss is external: its own publisher"), "{external}");
        assert_eq!(refusal("one").await, "account one: no node owns it right now");
    }
}
