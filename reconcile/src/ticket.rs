//! What is to be done about one master ticket: the live path, and the core of every plan.
//!
//! Decides: open or skip, change, reduce, close. [`crate::plan`] calls the same functions for
//! each ticket, so a live copy and a reconcile cannot disagree.

use crate::action::{CopyAction, WaitReason};
use crate::input::{Limits, LinkRules};
use crate::pair::{Pair, Stops};
use rust_decimal::Decimal;
use schemas::{
    BrokerPending, BrokerPosition, FollowerTicket, Funds, Lots, MasterPending, MasterPosition,
    MasterTicket, Micros, PendingKind, Price, Quote, Side, Symbol, SymbolSpec,
};
use std::collections::BTreeMap;

/// A master's trade or pending order, as an event or a snapshot carries it.
#[derive(Debug, Clone, Copy)]
pub enum MasterView<'a> {
    /// An open trade.
    Position(&'a MasterPosition),
    /// A waiting order.
    Pending(&'a MasterPending),
}

impl<'a> MasterView<'a> {
    /// Its logical id.
    pub fn ticket(self) -> MasterTicket {
        match self {
            MasterView::Position(p) => p.ticket,
            MasterView::Pending(o) => o.ticket,
        }
    }

    /// Symbol as the master's broker prints it.
    pub fn symbol(self) -> &'a Symbol {
        match self {
            MasterView::Position(p) => &p.symbol,
            MasterView::Pending(o) => &o.symbol,
        }
    }

    /// Direction.
    pub fn side(self) -> Side {
        match self {
            MasterView::Position(p) => p.side,
            MasterView::Pending(o) => o.kind.side(),
        }
    }

    /// Volume now.
    pub fn lots(self) -> Lots {
        match self {
            MasterView::Position(p) => p.lots,
            MasterView::Pending(o) => o.lots,
        }
    }

    /// Volume when it was opened or placed.
    pub fn lots_at_open(self) -> Lots {
        match self {
            MasterView::Position(p) => p.lots_at_open,
            MasterView::Pending(o) => o.lots,
        }
    }

    /// Both stops.
    pub fn stops(self) -> Stops {
        match self {
            MasterView::Position(p) => Stops { stop_loss: p.stop_loss, take_profit: p.take_profit },
            MasterView::Pending(o) => Stops { stop_loss: o.stop_loss, take_profit: o.take_profit },
        }
    }

    /// When it was opened or placed.
    pub fn opened_at(self) -> Micros {
        match self {
            MasterView::Position(p) => p.opened_at,
            MasterView::Pending(o) => o.placed_at,
        }
    }

    /// Units of the underlying in one lot, if known.
    pub fn contract_size(self) -> Option<Decimal> {
        match self {
            MasterView::Position(p) => p.contract_size,
            MasterView::Pending(o) => o.contract_size,
        }
    }

    /// It is itself a copy.
    pub fn is_copy(self) -> bool {
        match self {
            MasterView::Position(p) => p.is_copy,
            MasterView::Pending(o) => o.is_copy,
        }
    }
}

/// The follower's copy as it is now: from a read, or from what the session reported since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyView<'a> {
    /// Its number at the broker.
    pub ticket: FollowerTicket,
    /// Symbol as the follower's broker prints it.
    pub symbol: &'a Symbol,
    /// Direction.
    pub side: Side,
    /// Volume.
    pub lots: Lots,
    /// Both stops.
    pub stops: Stops,
    /// Open price of a trade, trigger price of an order.
    pub price: Price,
    /// The order's kind; none for a trade.
    pub pending: Option<PendingKind>,
}

impl<'a> From<&'a BrokerPosition> for CopyView<'a> {
    fn from(p: &'a BrokerPosition) -> Self {
        CopyView {
            ticket: p.ticket,
            symbol: &p.symbol,
            side: p.side,
            lots: p.lots,
            stops: Stops { stop_loss: p.stop_loss, take_profit: p.take_profit },
            price: p.open_price,
            pending: None,
        }
    }
}

impl<'a> From<&'a BrokerPending> for CopyView<'a> {
    fn from(o: &'a BrokerPending) -> Self {
        CopyView {
            ticket: o.ticket,
            symbol: &o.symbol,
            side: o.kind.side(),
            lots: o.lots,
            stops: Stops { stop_loss: o.stop_loss, take_profit: o.take_profit },
            price: o.price,
            pending: Some(o.kind),
        }
    }
}

/// What the follower's broker and both accounts say besides trades.
#[derive(Debug, Clone, Copy)]
pub struct Market<'a> {
    /// Every symbol of the follower's broker.
    pub symbols: &'a BTreeMap<Symbol, SymbolSpec>,
    /// Latest quotes of the follower's broker.
    pub quotes: &'a BTreeMap<Symbol, Quote>,
    /// Money of the master, if known.
    pub master_funds: Option<&'a Funds>,
    /// Money of the follower, if known.
    pub follower_funds: Option<&'a Funds>,
    /// The instant.
    pub now: Micros,
    /// Waits and ages.
    pub limits: &'a Limits,
}

/// Everything that the decision about one ticket looks at.
#[derive(Debug, Clone, Copy)]
pub struct TicketInput<'a> {
    /// How the link copies.
    pub rules: &'a LinkRules,
    /// The master's ticket.
    pub ticket: MasterTicket,
    /// What the master has under this ticket now; none if it is known to be gone.
    pub wanted: Option<MasterView<'a>>,
    /// The deciding pair of the ticket.
    pub pair: Option<&'a Pair>,
    /// The copy as it is now, if that is known. None is "not known", never "gone".
    pub copy: Option<CopyView<'a>>,
    /// Symbols, quotes, funds, instant.
    pub market: Market<'a>,
}

/// What is to be done about one ticket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TicketDecision {
    /// The action, if there is one.
    pub action: Option<CopyAction>,
    /// Why nothing, or not everything, is done now.
    pub waiting: Option<WaitReason>,
}

/// The decision about one ticket, on the live path.
///
/// Shape: one ticket in; one action or none out. Reads nothing, waits for nothing.
/// Source: the event (or what was merged in the ticket's slot), the follower's own state.
/// Invariants: with no pair and an open younger than `late_after` it opens without a look at
/// quotes; a terminal pair never gets an action; a copy that is not known is only ever closed.
/// Not covered: history, duplicates, orphans. Those need complete reads: [`crate::plan`].
pub fn plan_ticket(input: &TicketInput<'_>) -> TicketDecision {
    let _ = input;
    todo!("the next commit")
}
