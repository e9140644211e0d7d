//! What an account holds, kept up to date by its session's events.
//!
//! A view begins with a complete read after the broker's sync mark and then follows the
//! session's events; when the connection is lost the view is thrown away. So there is no
//! view that is empty because nothing is known.
//!
//! Invariants:
//! 1. The revision grows with every change that the broker tells of.
//! 2. A trade that was told closed does not come back by an older message: a complete read
//!    or its own later appearance under a new number is needed.
//! 3. What is remembered of closed trades is bounded by `CLOSED_MAX`.

use crate::broker::SessionEvent;
use schemas::{
    AccountSnapshot, BrokerPending, BrokerPosition, ClosedTrade, FollowerTicket, Funds, Symbol,
    SymbolSpec,
};
use std::collections::{BTreeMap, VecDeque};

/// Closed trades remembered for late answers; more than any burst within a broker's answer time.
const CLOSED_MAX: usize = 4096;

/// The state of an account as far as its session knows it.
#[derive(Debug)]
pub struct AccountView {
    /// Open trades.
    pub positions: BTreeMap<FollowerTicket, BrokerPosition>,
    /// Pending orders.
    pub pendings: BTreeMap<FollowerTicket, BrokerPending>,
    /// Money.
    pub funds: Option<Funds>,
    /// What the broker says of each symbol.
    pub symbols: BTreeMap<Symbol, SymbolSpec>,
    revision: u64,
    closed: BTreeMap<FollowerTicket, ClosedTrade>,
    closed_order: VecDeque<FollowerTicket>,
}

/// What an event changed in a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViewChange {
    /// A trade or pending order with this number appeared, changed or ended.
    Ticket(FollowerTicket),
    /// Money, or nothing.
    Other,
}

impl AccountView {
    /// Starts from a complete read.
    pub fn new(snapshot: &AccountSnapshot, symbols: Vec<SymbolSpec>) -> Self {
        let mut view = AccountView {
            positions: BTreeMap::new(),
            pendings: BTreeMap::new(),
            funds: None,
            symbols: symbols.into_iter().map(|spec| (spec.symbol.clone(), spec)).collect(),
            revision: 0,
            closed: BTreeMap::new(),
            closed_order: VecDeque::new(),
        };
        view.replace(snapshot);
        view
    }

    /// Takes over a later complete read.
    pub fn replace(&mut self, snapshot: &AccountSnapshot) {
        self.positions = snapshot.positions.iter().map(|p| (p.ticket, p.clone())).collect();
        self.pendings = snapshot.pendings.iter().map(|o| (o.ticket, o.clone())).collect();
        self.funds = snapshot.funds.clone().or(self.funds.take());
        self.revision += 1;
    }

    /// Takes over one event of the session.
    pub fn apply(&mut self, event: &SessionEvent) -> ViewChange {
        let ticket = match event {
            SessionEvent::Position(position) => {
                self.positions.insert(position.ticket, position.clone());
                position.ticket
            }
            SessionEvent::PendingFilled(position) => {
                self.pendings.remove(&position.ticket);
                self.positions.insert(position.ticket, position.clone());
                position.ticket
            }
            SessionEvent::Reduced { position, closed } => {
                if position.ticket != closed.ticket {
                    self.positions.remove(&closed.ticket);
                }
                self.positions.insert(position.ticket, position.clone());
                closed.ticket
            }
            SessionEvent::Closed { closed, .. } => {
                self.positions.remove(&closed.ticket);
                self.remember(closed);
                closed.ticket
            }
            SessionEvent::Pending(pending) => {
                self.pendings.insert(pending.ticket, pending.clone());
                pending.ticket
            }
            SessionEvent::PendingGone(ticket) => {
                self.pendings.remove(ticket);
                *ticket
            }
            SessionEvent::Funds(funds) => {
                self.funds = Some(funds.clone());
                return ViewChange::Other;
            }
            SessionEvent::Lost(_) => return ViewChange::Other,
        };
        self.revision += 1;
        ViewChange::Ticket(ticket)
    }

    fn remember(&mut self, closed: &ClosedTrade) {
        if self.closed.insert(closed.ticket, closed.clone()).is_none() {
            self.closed_order.push_back(closed.ticket);
        }
        while self.closed_order.len() > CLOSED_MAX {
            if let Some(oldest) = self.closed_order.pop_front() {
                self.closed.remove(&oldest);
            }
        }
    }

    /// How a trade ended, if the session told so.
    pub fn closed(&self, ticket: FollowerTicket) -> Option<&ClosedTrade> {
        self.closed.get(&ticket)
    }

    /// Counts the changes of trades and orders.
    pub fn revision(&self) -> u64 {
        self.revision
    }
}
