//! The open copies of links beside what their masters have open.
//!
//! Decides: how each copy stands to its master's trade ([`compare`], pure).
//! In: rows of `pairs`, and a master's snapshot from its publisher, asked for as a feed does. Out: one line a
//! trade.
//!
//! Invariants:
//! 1. A master that does not answer is unknown, never empty, and so is every difference to it.
//! 2. A volume is judged as a reconcile judges it ([`reconcile::target_lots`]), with the broker's own step.
//!    Where a row does not say that step, a volume that depends on it is unknown and not a fault.
//!
//! Not covered: what a broker really holds. Rows lag by a batch, the volume of a copy is what was opened less
//! what was closed in parts by Lockstep, and a copy closed by hand is found by its owner.

use crate::causes::with_causes;
use crate::writer::states::live_states;
use futures_util::stream::{self, StreamExt};
use reconcile::{Surplus, Volumes, surplus, target_lots};
use rust_decimal::Decimal;
use schemas::{AccountId, Lots, MasterSnapshot, MasterTicket};
use serde::Serialize;
use sqlx::{PgConnection, Row};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::Instant;
use utoipa::ToSchema;

/// Masters that are asked at once.
const ASKED_AT_ONCE: usize = 8;

/// Why the difference of a volume is unknown.
const NO_STEP: &str = "the broker's step of the volume is not on record";

/// How a copy stands to its master's trade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Difference {
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
    /// The master does not answer, or the step of the copy's volume is not on record.
    Unknown,
}

impl Difference {
    /// For a table.
    pub fn as_str(self) -> &'static str {
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

    /// Somebody has to look.
    pub fn is_fault(self) -> bool {
        matches!(self, Difference::Missing | Difference::Extra | Difference::Volume)
    }
}

/// One trade on one link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Line {
    /// The master's trade or order.
    pub master_ticket: i64,
    /// Symbol of the copy; of the master's trade where there is none.
    pub symbol: String,
    /// Direction of the copy; of the master's trade where there is none.
    pub side: String,
    /// A waiting order, not a trade.
    pub is_pending: bool,
    /// What the master has open.
    #[schema(value_type = Option<String>)]
    pub master_lots: Option<Decimal>,
    /// The copy.
    pub copy_ticket: Option<i64>,
    /// What the copy has.
    #[schema(value_type = Option<String>)]
    pub copy_lots: Option<Decimal>,
    /// What the copy's volume should be; nothing where that is unknown.
    #[schema(value_type = Option<String>)]
    pub expected_lots: Option<Decimal>,
    /// State of the copy's row; nothing where there is none.
    pub state: Option<String>,
    /// How it stands to the master's trade, where that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Difference>,
    /// Why it was not copied, or why the difference is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What is known of a master.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum MasterState {
    /// Its publisher answered.
    Known {
        /// Incarnation of the publisher.
        epoch: u64,
        /// Last event that it had published.
        seq: u64,
        /// Trades that it has open.
        trades: usize,
        /// Orders that wait.
        pendings: usize,
    },
    /// It did not.
    Unknown {
        /// Why.
        reason: String,
    },
}

/// A master's state, or why it is unknown.
pub type Asked = Result<MasterSnapshot, String>;

/// A link, as it is in the table.
#[derive(Debug, Clone)]
pub struct LinkRow {
    /// Its number.
    pub link: i64,
    /// The master.
    pub master: AccountId,
    /// What the master is called.
    pub master_name: String,
    /// The follower.
    pub follower: i64,
    /// What the follower is called.
    pub follower_name: String,
    /// Seconds since the follower's owner last wrote its status; nothing where nobody does.
    pub rows_age_s: Option<f64>,
    copies_pendings: bool,
}

/// Which links.
#[derive(Debug, Clone, Copy)]
pub struct Which {
    /// Only this one.
    pub link: Option<i64>,
    /// Only those of this account, as master or as follower.
    pub account: Option<i64>,
    /// Only those with a higher number.
    pub after: i64,
    /// At most so many.
    pub links_max: i64,
}

/// Links that are not deleted, or still have a live copy; by number.
pub async fn links(db: &mut PgConnection, which: Which) -> Result<Vec<LinkRow>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "select l.id, l.master_id, l.follower_id, l.copy_pendings, m.name as master, f.name as follower, \
         extract(epoch from clock_timestamp() - s.written_at)::float8 as age \
         from copy_links l join trading_accounts m on m.id = l.master_id \
         join trading_accounts f on f.id = l.follower_id \
         left join account_status s on s.account_id = f.id and s.lease_token = f.lease_token \
             and f.node_id is not null \
         where ($1::bigint is null or l.id = $1) and ($2::bigint is null or $2 in (l.master_id, l.follower_id)) \
         and (l.deleted_at is null or exists (select 1 from pairs p where p.link_id = l.id \
             and p.state in ",
        live_states!(),
        ")) and l.id > $3 order by l.id limit $4",
    ))
    .bind(which.link)
    .bind(which.account)
    .bind(which.after)
    .bind(which.links_max)
    .fetch_all(db)
    .await?;
    let link = |row: &sqlx::postgres::PgRow| {
        let master = AccountId::from_i64(row.get("master_id"));
        Ok(LinkRow {
            link: row.get("id"),
            master: master.map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
            master_name: row.get("master"),
            follower: row.get("follower_id"),
            follower_name: row.get("follower"),
            rows_age_s: row.get("age"),
            copies_pendings: row.get("copy_pendings"),
        })
    };
    rows.iter().map(link).collect()
}

/// Every master's state. Who has not answered within `limit`, all of them together, is unknown.
pub async fn ask(
    client: &async_nats::Client,
    masters: BTreeSet<AccountId>,
    limit: Duration,
) -> BTreeMap<AccountId, Asked> {
    let deadline = Instant::now() + limit;
    let asked = stream::iter(masters).map(|master| async move {
        let answer = bus::snapshot::request(client, master, None);
        let answer = match tokio::time::timeout_at(deadline, answer).await {
            Ok(answer) => answer.map_err(|error| with_causes(&error)),
            Err(_) => Err(format!("no answer within {limit:?}")),
        };
        (master, answer)
    });
    asked.buffer_unordered(ASKED_AT_ONCE).collect().await
}

/// The copies of a link, without a master.
pub async fn copies(db: &mut PgConnection, link: &LinkRow) -> Result<Vec<Line>, sqlx::Error> {
    Ok(rows(db, link.link, &[]).await?.iter().map(|row| row.line(None)).collect())
}

/// The trades of a link beside its master's, and what is known of that.
pub async fn differences(
    db: &mut PgConnection,
    link: &LinkRow,
    asked: &Asked,
) -> Result<(MasterState, Vec<Line>), sqlx::Error> {
    let wanted = asked.as_ref().ok().map(wanted);
    let tickets: Vec<i64> = wanted.iter().flatten().map(|(ticket, _)| ticket.as_i64()).collect();
    let rows = rows(db, link.link, &tickets).await?;
    let state = match asked {
        Ok(snapshot) => MasterState::Known {
            epoch: snapshot.epoch.get(),
            seq: snapshot.seq.get(),
            trades: snapshot.book.positions.len(),
            pendings: snapshot.book.pendings.len(),
        },
        Err(reason) => MasterState::Unknown { reason: reason.clone() },
    };
    Ok((state, compare(wanted.as_ref(), &rows, link.copies_pendings)))
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
    /// What its broker takes as a volume.
    volumes: Option<Volumes>,
    reason: Option<String>,
}

/// What the volume of a copy should be, and whether it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Judged {
    Fits(Decimal),
    Differs(Decimal),
    /// Nobody knows what it is rounded to.
    Unknown,
}

impl CopyRow {
    fn is_live(&self) -> bool {
        matches!(self.state.as_str(), "sending" | "open" | "closing")
    }

    fn lots(&self) -> Option<Decimal> {
        self.lots_at_open.map(|lots| (lots - self.reduced).max(Decimal::ZERO).normalize())
    }

    /// Judges its volume for this volume of the master, as a reconcile does. Nothing where the row does
    /// not say what was opened.
    fn judge(&self, master_now: Decimal) -> Option<Judged> {
        let (at_open, now) = (Lots::new(self.lots_at_open?).ok()?, self.lots()?);
        let master_at_open = Lots::new(self.master_lots_at_open).ok()?;
        let master_now = Lots::new(master_now).ok()?;
        let Some(volumes) = self.volumes else {
            // A copy does not grow with its master: no step is in that.
            let is_whole = master_now >= master_at_open;
            return Some(match is_whole {
                true if now == at_open.get() => Judged::Fits(now),
                true => Judged::Differs(at_open.get()),
                false => Judged::Unknown,
            });
        };
        let target = target_lots(at_open, master_at_open, master_now, volumes);
        let fits = Lots::new(now).is_ok_and(|now| {
            now >= target && !matches!(surplus(now, target, volumes), Surplus::Close(_))
        });
        Some(if fits { Judged::Fits(target.get()) } else { Judged::Differs(target.get()) })
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
#[derive(Debug, Clone)]
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
    // A live row is the word on its ticket; else the last one that was read.
    let mut words: BTreeMap<i64, &CopyRow> = BTreeMap::new();
    for row in rows {
        let word = words.entry(row.ticket).or_insert(row);
        if row.is_live() || !word.is_live() {
            *word = row;
        }
    }
    let mut lines: Vec<Line> = Vec::new();
    for (ticket, wanted) in wanted {
        let row = words.remove(&ticket.as_i64());
        if row.is_none() && wanted.is_pending && !copies_pendings {
            continue;
        }
        lines.push(beside(*ticket, wanted, row));
    }
    let without_master = words.into_values().filter(|row| row.is_live());
    lines.extend(without_master.map(|row| {
        let is_open = row.state == "open";
        row.line(Some(if is_open { Difference::Extra } else { Difference::Underway }))
    }));
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
    let judged = row.judge(wanted.lots).filter(|_| row.is_live());
    let expected = match judged {
        Some(Judged::Fits(lots) | Judged::Differs(lots)) => Some(lots.normalize()),
        Some(Judged::Unknown) | None => None,
    };
    let difference = match (row.state.as_str(), judged) {
        ("sending" | "closing", _) => Difference::Underway,
        ("open", Some(Judged::Differs(_))) => Difference::Volume,
        ("open", Some(Judged::Unknown)) => Difference::Unknown,
        ("open", Some(Judged::Fits(_)) | None) => Difference::None,
        _ => Difference::NotCopied,
    };
    let why = (difference == Difference::Unknown).then(|| NO_STEP.to_owned());
    Line {
        master_lots: Some(wanted.lots.normalize()),
        expected_lots: expected,
        reason: why.or_else(|| row.reason.clone()),
        ..row.line(Some(difference))
    }
}

/// The open copies of a link, and the last word on each of these tickets that has none.
async fn rows(
    db: &mut PgConnection,
    link: i64,
    tickets: &[i64],
) -> Result<Vec<CopyRow>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "select distinct on (p.master_ticket) p.master_ticket, p.follower_ticket, p.state, p.symbol, p.side, \
         p.is_pending, p.lots_at_open, p.master_lots_at_open, p.lots_step, p.lots_min, p.reason, \
         (select coalesce(sum(e.lots), 0) from copy_events e where e.link_id = p.link_id \
             and e.master_ticket = p.master_ticket and e.action = 'reduce_copy' and e.outcome = 'done' \
             and p.state in ('open', 'closing')) as reduced \
         from pairs p where p.link_id = $1 and p.follower_id = (select follower_id from copy_links where id = $1) \
         and (p.state in ",
        live_states!(),
        " or p.master_ticket = any($2)) order by p.master_ticket, p.state in ",
        live_states!(),
        " desc, p.written_at desc",
    ))
    .bind(link)
    .bind(tickets)
    .fetch_all(db)
    .await?;
    let lots = |row: &sqlx::postgres::PgRow, column| {
        row.get::<Option<Decimal>, _>(column).and_then(|lots| Lots::new(lots).ok())
    };
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
        volumes: lots(row, "lots_step")
            .zip(lots(row, "lots_min"))
            .map(|(step, min)| Volumes { step, min }),
        reason: row.get("reason"),
    };
    Ok(rows.iter().map(copy).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volumes(step: &str, min: &str) -> Option<Volumes> {
        Some(Volumes { step: step.parse().unwrap(), min: min.parse().unwrap() })
    }

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
            volumes: volumes("0.01", "0.01"),
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

    /// One open copy of which a part was closed, for one trade of the master.
    fn judged(copy: CopyRow, reduced: &str, master_lots: &str) -> (Difference, Option<String>) {
        let copy = CopyRow { reduced: reduced.parse().unwrap(), ..copy };
        let lines = compare(Some(&master(&[(1, master_lots)])), &[copy], true);
        let expected = lines[0].expected_lots.map(|lots| lots.to_string());
        (lines[0].difference.unwrap(), expected)
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
    fn a_live_row_is_the_word_on_its_ticket_whatever_ended_before_or_after() {
        let master = master(&[(1, "1")]);
        for rows in [
            [row(1, "closed", "0.5"), row(1, "open", "0.5")],
            [row(1, "open", "0.5"), row(1, "closed", "0.5")],
        ] {
            assert_eq!(differences(&compare(Some(&master), &rows, true)), [(1, Difference::None)]);
        }
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
        // 0.165 is wanted, and 0.16 is what a step of 0.01 allows.
        assert_eq!(
            judged(row(1, "open", "0.50"), "0.34", "0.33"),
            (Difference::None, Some("0.16".into()))
        );
        // The same copy at a broker with a finer step has to be brought to 0.165, and at one with a
        // coarser one 0.2 is the target.
        let finer = CopyRow { volumes: volumes("0.001", "0.001"), ..row(1, "open", "0.50") };
        assert_eq!(
            judged(finer.clone(), "0.33", "0.33"),
            (Difference::Volume, Some("0.165".into()))
        );
        assert_eq!(judged(finer, "0.335", "0.33"), (Difference::None, Some("0.165".into())));
        let coarser = CopyRow { volumes: volumes("0.1", "0.1"), ..row(1, "open", "0.5") };
        assert_eq!(judged(coarser, "0.3", "0.45"), (Difference::None, Some("0.2".into())));
    }

    #[test]
    fn a_difference_that_is_one_step_of_a_fine_broker_is_one() {
        let fine = CopyRow { volumes: volumes("0.001", "0.001"), ..row(1, "open", "0.500") };
        assert_eq!(judged(fine, "0.249", "0.5"), (Difference::Volume, Some("0.25".into())));
    }

    #[test]
    fn a_copy_keeps_the_smallest_volume_and_does_not_grow_with_its_master() {
        assert_eq!(
            judged(row(1, "open", "0.10"), "0.09", "0.01"),
            (Difference::None, Some("0.01".into()))
        );
        assert_eq!(
            judged(row(1, "open", "0.50"), "0", "3"),
            (Difference::None, Some("0.5".into()))
        );
        // A close of less than the smallest volume is not sent.
        let large_min = CopyRow { volumes: volumes("0.01", "0.10"), ..row(1, "open", "0.50") };
        assert_eq!(judged(large_min, "0", "0.9"), (Difference::None, Some("0.45".into())));
    }

    #[test]
    fn without_the_brokers_step_a_volume_that_depends_on_it_is_unknown() {
        let stepless = || CopyRow { volumes: None, ..row(1, "open", "0.50") };
        assert_eq!(judged(stepless(), "0.34", "0.33"), (Difference::Unknown, None));
        assert_eq!(judged(stepless(), "0", "1"), (Difference::None, Some("0.5".into())));
        assert_eq!(judged(stepless(), "0.1", "1"), (Difference::Volume, Some("0.5".into())));
        let lines = compare(Some(&master(&[(1, "0.33")])), &[stepless()], true);
        assert_eq!(lines[0].reason.as_deref(), Some(NO_STEP));
    }
}
