//! What became of each copy, from the ledger and the recorded decisions.

use crate::master::Master;
use crate::world::World;
use paper::protocol::Instruction;
use schemas::{AccountId, Change, MasterTicket, Micros};
use std::collections::{BTreeMap, BTreeSet};

/// A copy that comes within this of the master's trade was copied at once.
const AT_ONCE_S: f64 = 2.0;
/// Within this after its first new copy a follower has decided on everything. That copy may be of an
/// event, one read before the first plan; then a read and two turns of sixteen orders are left. It is
/// less than the two seconds of a second look on purpose: a plan that is held here rests on nothing
/// but closes that the master told, which are no absences, and late copies would pay for it.
const EXECUTION_S: f64 = 1.5;

/// A trade of the master, in seconds since the last renewal.
#[derive(Debug, Clone, Copy)]
pub(super) struct MasterTrade {
    pub(super) ticket: MasterTicket,
    pub(super) opened: f64,
    pub(super) closed: Option<f64>,
}

/// An order that opened a copy.
#[derive(Debug, Clone)]
struct Open {
    at: f64,
    node: String,
}

/// What became of the copy of one trade on one follower.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fate {
    /// Opened by this node so long after the master's.
    Copied { by: String, at: f64, after: f64 },
    /// Decided not to be copied, for this reason.
    Skipped(String),
    /// The master had closed it before anybody could copy it.
    EndedBefore,
    /// None of these: it is missing.
    Missing,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Fates {
    pub(super) trades: Vec<MasterTrade>,
    pub(super) of: BTreeMap<(AccountId, MasterTicket), Fate>,
    /// Copies of which there was more than one.
    pub(super) duplicates: usize,
    /// When each node's orders arrived, by its name.
    pub(super) orders: Vec<(f64, String)>,
    /// Of these, the ones that open something.
    pub(super) opens: Vec<(f64, String, AccountId)>,
    /// Orders that broke S1 or S2.
    pub(super) violations: usize,
    /// What was left on the tightest permit.
    pub(super) margin_min_ms: i64,
}

impl Fates {
    /// Copies of trades that were opened in this span, and what became of them.
    pub(super) fn between(&self, from: f64, to: f64) -> impl Iterator<Item = &Fate> {
        let tickets: BTreeSet<MasterTicket> = self
            .trades
            .iter()
            .filter(|trade| trade.opened > from && trade.opened <= to)
            .map(|trade| trade.ticket)
            .collect();
        self.of
            .iter()
            .filter(move |((_, ticket), _)| tickets.contains(ticket))
            .map(|(_, fate)| fate)
    }

    /// How many of a span were copied at once by this node, how many there were, and the slowest.
    pub(super) fn at_once(&self, from: f64, to: f64, node: &str) -> (usize, usize, f64) {
        let (mut copied, mut all, mut slowest) = (0, 0, 0.0f64);
        for fate in self.between(from, to) {
            all += 1;
            if let Fate::Copied { by, after, .. } = fate
                && by.starts_with(node)
                && *after < AT_ONCE_S
            {
                copied += 1;
                slowest = slowest.max(*after);
            }
        }
        (copied, all, slowest)
    }

    /// The last order of this node at or before an instant, and how many came after it.
    pub(super) fn last_order(&self, node: &str, until: f64) -> (Option<f64>, usize) {
        let of_node = self.orders.iter().filter(|(_, by)| by.starts_with(node)).map(|(at, _)| *at);
        let (before, after): (Vec<f64>, Vec<f64>) = of_node.partition(|at| *at <= until);
        (before.into_iter().reduce(f64::max), after.len())
    }

    pub(super) fn first_order(&self, node: &str, from: f64) -> Option<f64> {
        let orders = self.orders.iter().filter(|(at, by)| *at > from && by.starts_with(node));
        orders.map(|(at, _)| *at).reduce(f64::min)
    }

    pub(super) fn first_open(&self, node: &str, from: f64) -> Option<f64> {
        let opens = self.opens.iter().filter(|(at, by, _)| *at > from && by.starts_with(node));
        opens.map(|(at, ..)| *at).reduce(f64::min)
    }

    /// When the first copy was opened on this follower after an instant.
    pub(super) fn first_open_on(&self, follower: AccountId, from: f64) -> Option<f64> {
        let opens = self.opens.iter().filter(|(at, _, on)| *at > from && *on == follower);
        opens.map(|(at, ..)| *at).reduce(f64::min)
    }

    /// Copies that were forgotten: never opened, although somebody copied while the trade was open.
    ///
    /// What was opened from `from` on and closed within [`EXECUTION_S`] after the follower's first
    /// copy behind the gap may be over before anybody could copy it.
    pub(super) fn forgotten(&self, from: f64, gap: f64) -> Vec<String> {
        let is_forgotten = |follower: AccountId, trade: &MasterTrade, fate: &Fate| match fate {
            Fate::Missing => true,
            Fate::EndedBefore => {
                let again = self.first_open_on(follower, gap).map(|at| at + EXECUTION_S);
                trade.opened < from || again.is_none_or(|again| trade.closed > Some(again))
            }
            Fate::Copied { .. } | Fate::Skipped(_) => false,
        };
        self.of
            .iter()
            .filter_map(|((follower, ticket), fate)| {
                let trade = self.trades.iter().find(|trade| trade.ticket == *ticket)?;
                let MasterTrade { opened, closed, .. } = trade;
                is_forgotten(*follower, trade, fate).then(|| {
                    format!("{ticket} on {follower} ({opened:.1} to {:.1})", closed.unwrap_or(0.0))
                })
            })
            .collect()
    }
}

/// Reads everything once the story is over.
pub(super) async fn read(world: &World, master: &Master, zero: Micros) -> Fates {
    let since = |at: Micros| (at.0 - zero.0) as f64 / 1e6;
    let trades = master_trades(master, &since);
    let ledger = world.ledger().await;
    let mut opens: BTreeMap<(AccountId, MasterTicket), Vec<Open>> = BTreeMap::new();
    let (mut orders, mut opening) = (Vec::new(), Vec::new());
    for (row, request, meta) in ledger.orders() {
        let (at, node) = (since(row.at_us), meta.node.as_str().to_owned());
        orders.push((at, node.clone()));
        if let Instruction::Open { comment, .. } = &request.instruction {
            opening.push((at, node.clone(), request.account));
            let (_, ticket) = reconcile::tag::decode(comment).unwrap();
            opens.entry((request.account, ticket)).or_default().push(Open { at, node });
        }
    }
    let skips = skips(world).await;
    let mut of = BTreeMap::new();
    for link in &world.links {
        for trade in &trades {
            let key = (link.follower, trade.ticket);
            of.insert(key, fate(trade, opens.get(&key), skips.get(&key)));
        }
    }
    Fates {
        trades,
        of,
        duplicates: opens.values().filter(|opens| opens.len() > 1).count(),
        orders,
        opens: opening,
        violations: ledger.violations().len(),
        margin_min_ms: ledger.deadline_margin_min_us().unwrap_or(0) / 1000,
    }
}

fn fate(trade: &MasterTrade, opens: Option<&Vec<Open>>, skip: Option<&String>) -> Fate {
    match (opens.and_then(|opens| opens.first()), skip) {
        (Some(open), _) => {
            Fate::Copied { by: open.node.clone(), at: open.at, after: open.at - trade.opened }
        }
        (None, Some(reason)) => Fate::Skipped(reason.clone()),
        (None, None) if trade.closed.is_some() => Fate::EndedBefore,
        (None, None) => Fate::Missing,
    }
}

fn master_trades(master: &Master, since: &impl Fn(Micros) -> f64) -> Vec<MasterTrade> {
    let mut trades: BTreeMap<MasterTicket, MasterTrade> = BTreeMap::new();
    for (at, change) in &master.published {
        match change {
            Change::PositionOpened(position) => {
                let ticket = position.ticket;
                trades.insert(ticket, MasterTrade { ticket, opened: since(*at), closed: None });
            }
            Change::PositionClosed { position, .. } => {
                if let Some(trade) = trades.get_mut(&position.ticket) {
                    trade.closed = Some(since(*at));
                }
            }
            _ => {}
        }
    }
    trades.into_values().collect()
}

async fn skips(world: &World) -> BTreeMap<(AccountId, MasterTicket), String> {
    let rows: Vec<(i64, i64, String)> = sqlx::query_as(
        "select follower_id, master_ticket, coalesce(reason, '-') from copy_events
         where outcome = 'skipped' order by at desc",
    )
    .fetch_all(&mut world.database().await)
    .await
    .unwrap();
    rows.into_iter()
        .map(|(follower, ticket, reason)| {
            let follower = AccountId::from_i64(follower).unwrap();
            ((follower, MasterTicket::from_i64(ticket).unwrap()), reason)
        })
        .collect()
}
