//! What accounts hold and what they should hold, from the paper broker's ledger.
//!
//! Inputs: the ledger, the master's state, the links. Outputs: states by logical ticket and the
//! differences between them, in words. Computed here a second time, not with the code that is
//! judged, except the reading of tags.
//!
//! Invariants:
//! 1. A trade is followed by the ticket it was first opened under, through every new number.
//! 2. A copy is recognised by the comment that was *sent*, whatever the broker shows later.
//!
//! Not covered: sizing other than by a multiplier that keeps volumes on the step.

use paper::ledger::{Fact, Ledger, TradeEventKind, TradeFact};
use rust_decimal::Decimal;
use schemas::{AccountId, Book, LinkId, Micros, NodeId, Price, Side, Token};
use std::collections::BTreeMap;

/// An open trade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trade {
    /// Direction.
    pub side: Side,
    /// Volume now, in lots.
    pub lots: Decimal,
    /// Stop loss.
    pub stop_loss: Option<Price>,
    /// Take profit.
    pub take_profit: Option<Price>,
}

/// A pending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Direction of the trade that it becomes.
    pub side: Side,
    /// Volume, in lots.
    pub lots: Decimal,
    /// Price at which it triggers.
    pub price: Option<Price>,
    /// Stop loss.
    pub stop_loss: Option<Price>,
    /// Take profit.
    pub take_profit: Option<Price>,
}

/// What somebody holds, by the master's ticket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Open trades.
    pub trades: BTreeMap<u64, Trade>,
    /// Pending orders.
    pub waiting: BTreeMap<u64, Waiting>,
    /// A ticket of which there was more than one at once.
    pub doubled: Vec<u64>,
}

/// A follower of a master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub link: LinkId,
    /// The follower's account.
    pub follower: AccountId,
    /// Lots of the follower for one lot of the master.
    pub multiplier: Decimal,
}

impl State {
    /// The state that a book describes.
    pub fn of_book(book: &Book) -> State {
        let trade = |p: &schemas::MasterPosition| Trade {
            side: p.side,
            lots: p.lots.get(),
            stop_loss: p.stop_loss,
            take_profit: p.take_profit,
        };
        let waiting = |o: &schemas::MasterPending| Waiting {
            side: o.kind.side(),
            lots: o.lots.get(),
            price: Some(o.price),
            stop_loss: o.stop_loss,
            take_profit: o.take_profit,
        };
        State {
            trades: book.positions.values().map(|p| (p.ticket.get(), trade(p))).collect(),
            waiting: book.pendings.values().map(|o| (o.ticket.get(), waiting(o))).collect(),
            doubled: Vec::new(),
        }
    }

    /// What an account holds by hand, under the tickets that things were first opened with.
    pub fn of_account(ledger: &Ledger, account: AccountId) -> State {
        let facts = ledger.trades().map(|(_, fact)| fact).filter(|fact| fact.account == account);
        State::from_facts(facts.map(|fact| (fact.first_ticket.get(), fact)))
    }

    /// What a link has copied onto its follower, under the tickets of the master.
    pub fn of_copies(ledger: &Ledger, link: &Link) -> State {
        let facts = ledger.trades().map(|(_, fact)| fact);
        let facts = facts.filter(|fact| fact.account == link.follower);
        State::from_facts(facts.filter_map(|fact| {
            let (of, ticket) = reconcile::tag::decode(&fact.comment)?;
            (of == link.link).then_some((ticket.get(), fact))
        }))
    }

    fn from_facts<'a>(facts: impl Iterator<Item = (u64, &'a TradeFact)>) -> State {
        let mut state = State::default();
        for (ticket, fact) in facts {
            state.take(ticket, fact);
        }
        state
    }

    /// Takes a change of a trade in, under this ticket.
    pub fn take(&mut self, ticket: u64, fact: &TradeFact) {
        let trade = |lots: Decimal| Trade {
            side: fact.side,
            lots,
            stop_loss: fact.stop_loss,
            take_profit: fact.take_profit,
        };
        match fact.event {
            TradeEventKind::Opened | TradeEventKind::PendingFilled => {
                self.waiting.remove(&ticket);
                if self.trades.insert(ticket, trade(fact.lots.get())).is_some() {
                    self.doubled.push(ticket);
                }
            }
            TradeEventKind::Modified => {
                if let Some(known) = self.trades.get_mut(&ticket) {
                    *known = trade(known.lots);
                }
            }
            TradeEventKind::Added => {
                if let Some(known) = self.trades.get_mut(&ticket) {
                    *known = trade(known.lots + fact.lots.get());
                }
            }
            TradeEventKind::Reduced => {
                if let Some(known) = self.trades.get_mut(&ticket) {
                    *known = trade(known.lots - fact.lots.get());
                }
            }
            TradeEventKind::Closed => drop(self.trades.remove(&ticket)),
            TradeEventKind::PendingPlaced | TradeEventKind::PendingModified => {
                let waiting = Waiting {
                    side: fact.side,
                    lots: fact.lots.get(),
                    price: fact.price,
                    stop_loss: fact.stop_loss,
                    take_profit: fact.take_profit,
                };
                let before = self.waiting.insert(ticket, waiting);
                if fact.event == TradeEventKind::PendingPlaced && before.is_some() {
                    self.doubled.push(ticket);
                }
            }
            TradeEventKind::PendingCancelled => drop(self.waiting.remove(&ticket)),
        }
    }

    /// The state that a follower with this multiplier should have.
    pub fn times(&self, multiplier: Decimal) -> State {
        let mut state = self.clone();
        state.trades.values_mut().for_each(|trade| trade.lots *= multiplier);
        state.waiting.values_mut().for_each(|order| order.lots *= multiplier);
        state
    }
}

/// In which trades and orders the followers differ from the master, in words.
pub fn differences(master: &State, links: &[Link], ledger: &Ledger) -> Vec<String> {
    links
        .iter()
        .flat_map(|link| {
            let wanted = master.times(link.multiplier);
            let found = State::of_copies(ledger, link);
            differences_of(link, &wanted, &found)
        })
        .collect()
}

/// The same for what one link has copied, of all trades but these.
pub fn differences_but(
    master: &State,
    link: &Link,
    mut found: State,
    left_out: impl Fn(u64) -> bool,
) -> Vec<String> {
    let mut wanted = master.times(link.multiplier);
    for state in [&mut wanted, &mut found] {
        state.trades.retain(|ticket, _| !left_out(*ticket));
    }
    differences_of(link, &wanted, &found)
}

fn differences_of(link: &Link, wanted: &State, found: &State) -> Vec<String> {
    let mut words: Vec<String> =
        found.doubled.iter().map(|t| format!("{}: two copies of {t}", link.follower)).collect();
    words.extend(compare(link, "trade", &wanted.trades, &found.trades));
    words.extend(compare(link, "order", &wanted.waiting, &found.waiting));
    words
}

fn compare<T: PartialEq + std::fmt::Debug>(
    link: &Link,
    what: &str,
    wanted: &BTreeMap<u64, T>,
    found: &BTreeMap<u64, T>,
) -> Vec<String> {
    let tickets: std::collections::BTreeSet<_> = wanted.keys().chain(found.keys()).collect();
    let differs = tickets.into_iter().filter(|ticket| wanted.get(ticket) != found.get(ticket));
    differs
        .map(|ticket| {
            let (wanted, found) = (wanted.get(ticket), found.get(ticket));
            format!("{}: {what} {ticket}: wanted {wanted:?}, found {found:?}", link.follower)
        })
        .collect()
}

/// One order as it arrived at the broker.
#[derive(Debug, Clone)]
pub struct Order {
    /// When it arrived, by the broker's wall clock.
    pub at: Micros,
    /// For which account.
    pub account: AccountId,
    /// Who sent it.
    pub node: NodeId,
    /// Under which token.
    pub token: Token,
    /// What was left of its sender's permission, in microseconds.
    pub deadline_margin_us: i64,
    /// It opens or places something.
    pub is_opening: bool,
}

/// Every order of a node, in the order of arrival.
pub fn orders(ledger: &Ledger) -> Vec<Order> {
    use paper::protocol::Instruction;
    ledger
        .orders()
        .map(|(row, request, meta)| Order {
            at: row.at_us,
            account: request.account,
            node: meta.node.clone(),
            token: meta.token,
            deadline_margin_us: meta.deadline_margin_us,
            is_opening: matches!(
                request.instruction,
                Instruction::Open { .. } | Instruction::Place { .. }
            ),
        })
        .collect()
}

/// Every login of a node for an account, in the order of arrival: account, token, node.
pub fn logins(ledger: &Ledger) -> Vec<(AccountId, Token, NodeId)> {
    let logins = ledger.rows().iter().filter_map(|row| match &row.fact {
        Fact::Login(login) => Some(login),
        Fact::Ended(_) | Fact::Request(_) | Fact::Lost(_) | Fact::Trade(_) => None,
    });
    logins.filter_map(|login| Some((login.account?, login.token?, login.node.clone()))).collect()
}

/// S1, S2 and S4 hold, and orders there were.
pub fn assert_clean(ledger: &Ledger) {
    let violations = ledger.violations();
    assert!(violations.is_empty(), "{violations:#?}");
    let margin = ledger.deadline_margin_min_us();
    assert!(margin.is_some_and(|margin| margin >= 0), "smallest margin {margin:?} us");
}
