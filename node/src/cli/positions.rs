//! `lockstep positions`: the open copies of each link, beside what its master has open.
//!
//! In: rows of `pairs`, and each master's snapshot from its publisher, asked for as a feed does. Out:
//! one line a trade with the difference. [`compare`] is pure.
//!
//! Invariants:
//! 1. A master that does not answer is unknown, never empty, and so is every difference to it.
//! 2. How old the rows of a follower are is said beside them.
//!
//! Not covered: what a broker really holds. Rows lag by a batch, the volume of a copy is what was
//! opened less what was closed in parts by Lockstep, and a copy closed by hand is found by its owner.
//! Volumes count as the same within [`LOTS_STEP`]: the rows do not know the broker's own step.

use super::on_bus::{BusArg, connected};
use super::pause::Target;
use super::table::{or_dash, render};
use super::{CliError, DatabaseArg, block_on, out};
use crate::causes::with_causes;
use crate::directory;
use clap::Args;
use rust_decimal::Decimal;
use schemas::{AccountId, MasterSnapshot, MasterTicket};
use serde::Serialize;
use sqlx::{PgConnection, Row};
use std::collections::{BTreeMap, BTreeSet};

/// The smallest step of volumes at nearly every broker.
const LOTS_STEP: Decimal = Decimal::from_parts(1, 0, 0, false, 2);
/// Masters that are asked at once.
const ASKED_AT_ONCE: usize = 8;

/// Arguments of `lockstep positions`.
#[derive(Debug, Args)]
pub struct PositionsArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(flatten)]
    bus: BusArg,
    /// Only this link, by its number, or the links of this account, by its name.
    #[arg(value_name = "LINK|ACCOUNT")]
    target: Option<Target>,
    /// Ask the masters, and show the difference. Exit code 1 where there is one, 3 where it is unknown.
    #[arg(long)]
    diff: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// How a copy stands to its master's trade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Difference {
    /// None.
    None,
    /// The master has it open, and nothing is known of a copy.
    Missing,
    /// The copy is open, and the master's trade is not.
    Extra,
    /// Both are open, and the volume is another one.
    Volume,
    /// An order is on its way, or not answered.
    Underway,
    /// The master has it open, and it is on record why there is no copy.
    NotCopied,
    /// The master does not answer.
    Unknown,
}

impl Difference {
    fn as_str(self) -> &'static str {
        match self {
            Difference::None => "-",
            Difference::Missing => "missing",
            Difference::Extra => "extra",
            Difference::Volume => "volume",
            Difference::Underway => "under way",
            Difference::NotCopied => "not copied",
            Difference::Unknown => "unknown",
        }
    }

    fn is_fault(self) -> bool {
        matches!(self, Difference::Missing | Difference::Extra | Difference::Volume)
    }
}

/// One trade on one link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Line {
    master_ticket: i64,
    symbol: String,
    side: String,
    /// A waiting order, not a trade.
    is_pending: bool,
    master_lots: Option<Decimal>,
    copy_ticket: Option<i64>,
    copy_lots: Option<Decimal>,
    /// What the copy's volume should be.
    expected_lots: Option<Decimal>,
    /// State of the copy's row; nothing where there is none.
    state: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    difference: Option<Difference>,
    /// Why it was not copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// One link and its trades.
#[derive(Debug, Serialize)]
struct LinkState {
    link: i64,
    master: String,
    follower: String,
    /// Seconds since the follower's owner last wrote its status; nothing where nobody does.
    rows_age_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    master_state: Option<MasterState>,
    positions: Vec<Line>,
}

/// What is known of a master.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum MasterState {
    /// Its publisher answered.
    Known { epoch: u64, seq: u64, trades: usize, pendings: usize },
    /// It did not.
    Unknown { reason: String },
}

/// The row of a copy.
#[derive(Debug, Clone)]
struct CopyRow {
    ticket: i64,
    copy_ticket: Option<i64>,
    state: String,
    symbol: String,
    side: String,
    is_pending: bool,
    lots_at_open: Option<Decimal>,
    master_lots_at_open: Decimal,
    /// What was closed of it in parts.
    reduced: Decimal,
    reason: Option<String>,
}

impl CopyRow {
    fn is_live(&self) -> bool {
        matches!(self.state.as_str(), "sending" | "open" | "closing")
    }

    fn lots(&self) -> Option<Decimal> {
        self.lots_at_open.map(|lots| (lots - self.reduced).max(Decimal::ZERO).normalize())
    }

    /// Its volume for this volume of the master, before it is rounded to the broker's step.
    fn expected(&self, master: Decimal) -> Option<Decimal> {
        let lots = self.lots_at_open?.checked_mul(master)?.checked_div(self.master_lots_at_open)?;
        Some(lots.round_dp(4).normalize())
    }

    fn line(&self, difference: Option<Difference>) -> Line {
        Line {
            master_ticket: self.ticket,
            symbol: self.symbol.clone(),
            side: self.side.clone(),
            is_pending: self.is_pending,
            master_lots: None,
            copy_ticket: self.copy_ticket,
            copy_lots: self.lots().filter(|_| self.is_live()),
            expected_lots: None,
            state: Some(self.state.clone()),
            difference,
            reason: self.reason.clone(),
        }
    }
}

/// A trade or a waiting order of a master.
struct Wanted {
    symbol: String,
    side: String,
    lots: Decimal,
    is_pending: bool,
}

fn wanted(master: &MasterSnapshot) -> BTreeMap<MasterTicket, Wanted> {
    let trades = master.book.positions.values().map(|p| {
        let side = p.side.as_str().to_owned();
        let symbol = p.symbol.to_string();
        (p.ticket, Wanted { symbol, side, lots: p.lots.get(), is_pending: false })
    });
    let pendings = master.book.pendings.values().map(|o| {
        let side = o.kind.side().as_str().to_owned();
        let symbol = o.symbol.to_string();
        (o.ticket, Wanted { symbol, side, lots: o.lots.get(), is_pending: true })
    });
    trades.chain(pendings).collect()
}

/// The trades of a link: those of the master, where it is known, and the copies.
fn compare(
    wanted: Option<&BTreeMap<MasterTicket, Wanted>>,
    rows: &[CopyRow],
    copies_pendings: bool,
) -> Vec<Line> {
    let live = rows.iter().filter(|row| row.is_live());
    let Some(wanted) = wanted else {
        return live.map(|row| row.line(Some(Difference::Unknown))).collect();
    };
    let has = |ticket: i64| wanted.keys().any(|wanted| wanted.as_i64() == ticket);
    let mut lines: Vec<Line> = live
        .filter(|row| !has(row.ticket))
        .map(|row| {
            let is_underway = row.state != "open";
            let difference = if is_underway { Difference::Underway } else { Difference::Extra };
            row.line(Some(difference))
        })
        .collect();
    for (ticket, wanted) in wanted {
        let of_ticket = || rows.iter().filter(|row| row.ticket == ticket.as_i64());
        let row = of_ticket().find(|row| row.is_live()).or_else(|| of_ticket().next_back());
        if row.is_none() && wanted.is_pending && !copies_pendings {
            continue;
        }
        lines.push(beside(*ticket, wanted, row));
    }
    lines.sort_by_key(|line| line.master_ticket);
    lines
}

fn beside(ticket: MasterTicket, wanted: &Wanted, row: Option<&CopyRow>) -> Line {
    let Some(row) = row else {
        return Line {
            master_ticket: ticket.as_i64(),
            symbol: wanted.symbol.clone(),
            side: wanted.side.clone(),
            is_pending: wanted.is_pending,
            master_lots: Some(wanted.lots.normalize()),
            copy_ticket: None,
            copy_lots: None,
            expected_lots: None,
            state: None,
            difference: Some(Difference::Missing),
            reason: None,
        };
    };
    let expected = row.expected(wanted.lots).filter(|_| row.is_live());
    let difference = match (row.state.as_str(), row.lots(), expected) {
        ("sending" | "closing", _, _) => Difference::Underway,
        ("open", Some(lots), Some(expected)) if (lots - expected).abs() >= LOTS_STEP => {
            Difference::Volume
        }
        ("open", _, _) => Difference::None,
        _ => Difference::NotCopied,
    };
    Line {
        master_lots: Some(wanted.lots.normalize()),
        expected_lots: expected,
        ..row.line(Some(difference))
    }
}

/// Runs `lockstep positions`.
pub fn run(args: PositionsArgs) -> Result<(), CliError> {
    let links = block_on(read(&args))??;
    if args.json {
        out::json(&links)?;
    } else {
        show(&links, args.diff)?;
    }
    let all = || links.iter().flat_map(|link| &link.positions);
    let faults = all().filter(|line| line.difference.is_some_and(Difference::is_fault)).count();
    if faults > 0 {
        return Err(CliError::No(format!("{faults} trades differ")));
    }
    let unknown = links.iter().find_map(|link| match &link.master_state {
        Some(MasterState::Unknown { reason }) => Some((&link.master, reason.clone())),
        Some(MasterState::Known { .. }) | None => None,
    });
    match unknown {
        Some((master, reason)) => {
            Err(CliError::missing(format!("master {master} is unknown"), reason))
        }
        None => Ok(()),
    }
}

/// What is read of a link before its master is asked.
struct LinkRows {
    state: LinkState,
    master: AccountId,
    copies_pendings: bool,
}

async fn read(args: &PositionsArgs) -> Result<Vec<LinkState>, CliError> {
    let mut db = args.database.connect().await?;
    let links = links(&mut db, args.target.as_ref()).await?;
    let masters: BTreeSet<AccountId> = links.iter().map(|link| link.master).collect();
    let known = if args.diff { ask(args, masters).await? } else { BTreeMap::new() };
    let mut told = Vec::new();
    for LinkRows { mut state, master, copies_pendings } in links {
        if !args.diff {
            let rows = copies(&mut db, state.link, &[]).await?;
            state.positions = rows.iter().map(|row| row.line(None)).collect();
            told.push(state);
            continue;
        }
        let snapshot = known.get(&master);
        let wanted = snapshot.and_then(|known| known.as_ref().ok()).map(wanted);
        let tickets: Vec<i64> =
            wanted.iter().flatten().map(|(ticket, _)| ticket.as_i64()).collect();
        let rows = copies(&mut db, state.link, &tickets).await?;
        state.positions = compare(wanted.as_ref(), &rows, copies_pendings);
        state.master_state = snapshot.map(|known| match known {
            Ok(snapshot) => MasterState::Known {
                epoch: snapshot.epoch.get(),
                seq: snapshot.seq.get(),
                trades: snapshot.book.positions.len(),
                pendings: snapshot.book.pendings.len(),
            },
            Err(reason) => MasterState::Unknown { reason: reason.clone() },
        });
        told.push(state);
    }
    Ok(told)
}

/// Every master's state, or why it is unknown.
async fn ask(
    args: &PositionsArgs,
    masters: BTreeSet<AccountId>,
) -> Result<BTreeMap<AccountId, Result<MasterSnapshot, String>>, CliError> {
    use futures_util::stream::{self, StreamExt};
    let client = args.bus.connect("lockstep-positions").await?;
    if let Err(reason) = connected(&client).await {
        let unknown = Err(format!("bus at {}: {reason}", args.bus.shown()));
        return Ok(masters.into_iter().map(|master| (master, unknown.clone())).collect());
    }
    let asked = stream::iter(masters).map(|master| {
        let client = client.clone();
        async move {
            let answer = bus::snapshot::request(&client, master, None).await;
            (master, answer.map_err(|error| with_causes(&error)))
        }
    });
    Ok(asked.buffer_unordered(ASKED_AT_ONCE).collect().await)
}

async fn links(db: &mut PgConnection, target: Option<&Target>) -> Result<Vec<LinkRows>, CliError> {
    let (link, account) = match target {
        None => (None, None),
        Some(Target::Link(link)) => (Some(link.as_i64()), None),
        Some(Target::Account(name)) => {
            (None, Some(directory::account_id(db, name).await?.as_i64()))
        }
    };
    let rows = sqlx::query(
        "select l.id, l.master_id, l.copy_pendings, m.name as master, f.name as follower, \
         extract(epoch from clock_timestamp() - s.written_at)::float8 as age \
         from copy_links l join trading_accounts m on m.id = l.master_id \
         join trading_accounts f on f.id = l.follower_id \
         left join account_status s on s.account_id = f.id and s.lease_token = f.lease_token \
             and f.node_id is not null \
         where ($1::bigint is null or l.id = $1) and ($2::bigint is null or $2 in (l.master_id, l.follower_id)) \
         and (l.deleted_at is null or exists (select 1 from pairs p where p.link_id = l.id \
             and p.state in ('sending', 'open', 'closing'))) order by l.id",
    )
    .bind(link)
    .bind(account)
    .fetch_all(db)
    .await?;
    if let (true, Some(target @ Target::Link(_))) = (rows.is_empty(), target) {
        return Err(CliError::Usage(format!("there is no {target}")));
    }
    rows.iter()
        .map(|row| {
            let master = AccountId::from_i64(row.get("master_id"))
                .map_err(|error| CliError::missing("copy_links", error))?;
            let state = LinkState {
                link: row.get("id"),
                master: row.get("master"),
                follower: row.get("follower"),
                rows_age_s: row.get("age"),
                master_state: None,
                positions: Vec::new(),
            };
            Ok(LinkRows { state, master, copies_pendings: row.get("copy_pendings") })
        })
        .collect()
}

/// The open copies of a link, and the last word on each of these tickets that has none.
async fn copies(
    db: &mut PgConnection,
    link: i64,
    tickets: &[i64],
) -> Result<Vec<CopyRow>, CliError> {
    let rows = sqlx::query(
        "select distinct on (p.master_ticket) p.master_ticket, p.follower_ticket, p.state, p.symbol, p.side, \
         p.is_pending, p.lots_at_open, p.master_lots_at_open, p.reason, \
         (select coalesce(sum(e.lots), 0) from copy_events e where e.link_id = p.link_id \
             and e.master_ticket = p.master_ticket and e.action = 'reduce_copy' and e.outcome = 'done' \
             and p.state in ('open', 'closing')) as reduced \
         from pairs p where p.link_id = $1 and p.follower_id = (select follower_id from copy_links where id = $1) \
         and (p.state in ('sending', 'open', 'closing') or p.master_ticket = any($2)) \
         order by p.master_ticket, p.state in ('sending', 'open', 'closing') desc, p.written_at desc",
    )
    .bind(link)
    .bind(tickets)
    .fetch_all(db)
    .await?;
    let copy = |row: &sqlx::postgres::PgRow| CopyRow {
        ticket: row.get("master_ticket"),
        copy_ticket: row.get("follower_ticket"),
        state: row.get("state"),
        symbol: row.get("symbol"),
        side: row.get("side"),
        is_pending: row.get("is_pending"),
        lots_at_open: row.get("lots_at_open"),
        master_lots_at_open: row.get("master_lots_at_open"),
        reduced: row.get("reduced"),
        reason: row.get("reason"),
    };
    Ok(rows.iter().map(copy).collect())
}

const HEAD: &[&str] = &[
    "link",
    "master",
    "follower",
    "ticket",
    "symbol",
    "side",
    "master lots",
    "copy",
    "copy lots",
    "state",
    "difference",
    "why",
];

fn show(links: &[LinkState], diff: bool) -> Result<(), CliError> {
    let cells = |link: &LinkState, line: &Line| {
        let pending = if line.is_pending { " (waiting)" } else { "" };
        let difference = line.difference.map(|difference| match (difference, line.expected_lots) {
            (Difference::Volume, Some(expected)) => format!("volume, expected {expected}"),
            (other, _) => other.as_str().to_owned(),
        });
        vec![
            link.link.to_string(),
            link.master.clone(),
            link.follower.clone(),
            line.master_ticket.to_string(),
            line.symbol.clone(),
            format!("{}{pending}", line.side),
            line.master_lots
                .map_or_else(|| if diff { "-" } else { "" }.to_owned(), |l| l.to_string()),
            or_dash(line.copy_ticket),
            or_dash(line.copy_lots),
            or_dash(line.state.clone()),
            difference.unwrap_or_default(),
            line.reason.clone().unwrap_or_default(),
        ]
    };
    let rows =
        links.iter().flat_map(|link| link.positions.iter().map(move |line| cells(link, line)));
    out::line(render(HEAD, rows))?;
    let mut notes = String::new();
    for link in links {
        let age = link.rows_age_s.map_or_else(
            || "nobody owns the follower, or its owner has written nothing yet".to_owned(),
            |age| format!("rows as of {age:.0} s ago"),
        );
        let master = match &link.master_state {
            None => String::new(),
            Some(MasterState::Known { epoch, seq, trades, pendings }) => {
                format!("; master at {epoch}/{seq}: {trades} trades, {pendings} waiting orders")
            }
            Some(MasterState::Unknown { reason }) => format!("; master unknown: {reason}"),
        };
        notes +=
            &format!("\nlink {} ({} → {}): {age}{master}", link.link, link.master, link.follower);
    }
    out::line(notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ticket: i64, state: &str, lots: &str) -> CopyRow {
        CopyRow {
            ticket,
            copy_ticket: Some(ticket + 1000),
            state: state.to_owned(),
            symbol: "EURUSD".to_owned(),
            side: "buy".to_owned(),
            is_pending: false,
            lots_at_open: Some(lots.parse().unwrap()),
            master_lots_at_open: "1.00".parse().unwrap(),
            reduced: Decimal::ZERO,
            reason: None,
        }
    }

    fn master(trades: &[(u64, &str)]) -> BTreeMap<MasterTicket, Wanted> {
        let wanted = |lots: &str| Wanted {
            symbol: "EURUSD".to_owned(),
            side: "buy".to_owned(),
            lots: lots.parse().unwrap(),
            is_pending: false,
        };
        trades.iter().map(|(t, lots)| (MasterTicket::new(*t).unwrap(), wanted(lots))).collect()
    }

    fn differences(lines: &[Line]) -> Vec<(i64, Difference)> {
        lines.iter().map(|line| (line.master_ticket, line.difference.unwrap())).collect()
    }

    #[test]
    fn each_trade_of_the_union_has_its_difference() {
        let master = master(&[(1, "1"), (2, "1"), (3, "0.5"), (4, "1"), (5, "1"), (6, "0.5")]);
        let mut reduced = row(6, "open", "0.5");
        reduced.reduced = "0.25".parse().unwrap();
        let rows = [
            row(1, "open", "0.5"),
            row(3, "open", "0.5"),
            row(4, "sending", "0.5"),
            row(5, "skipped", "0.5"),
            reduced,
            row(8, "open", "0.5"),
            row(9, "closing", "0.5"),
            row(10, "closed", "0.5"),
        ];
        let lines = compare(Some(&master), &rows, true);
        let expected = [
            (1, Difference::None),
            (2, Difference::Missing),
            (3, Difference::Volume),
            (4, Difference::Underway),
            (5, Difference::NotCopied),
            (6, Difference::None),
            (8, Difference::Extra),
            (9, Difference::Underway),
        ];
        assert_eq!(differences(&lines), expected);
        assert_eq!(lines[2].expected_lots, Some("0.25".parse().unwrap()));
    }

    #[test]
    fn a_master_that_does_not_answer_is_unknown_and_not_flat() {
        let rows = [row(1, "open", "0.5"), row(2, "closed", "0.5")];
        assert_eq!(differences(&compare(None, &rows, true)), [(1, Difference::Unknown)]);
        let flat = compare(Some(&BTreeMap::new()), &rows, true);
        assert_eq!(differences(&flat), [(1, Difference::Extra)]);
    }

    #[test]
    fn a_waiting_order_is_missing_only_where_the_link_copies_them() {
        let mut waiting = master(&[(1, "1")]);
        waiting.values_mut().for_each(|wanted| wanted.is_pending = true);
        assert!(compare(Some(&waiting), &[], false).is_empty());
        assert_eq!(differences(&compare(Some(&waiting), &[], true)), [(1, Difference::Missing)]);
    }

    #[test]
    fn what_rounding_leaves_is_no_difference() {
        let master = master(&[(1, "0.33")]);
        let mut copy = row(1, "open", "0.50");
        copy.reduced = "0.34".parse().unwrap();
        // 0.165 is wanted, and 0.16 is what a step of 0.01 allows.
        assert_eq!(differences(&compare(Some(&master), &[copy], true)), [(1, Difference::None)]);
    }
}
