//! The desk and new trades: held side by side, or netted into the one trade of their symbol.
//!
//! Invariant: a netting account holds at most one trade a symbol, under one ticket from its first
//! order to its end, through additions, reductions and turns.

use crate::desk::Desk;
use crate::engine::OpenTrade;
use crate::ledger::TradeEventKind;
use crate::protocol::AccountChange;
use schemas::{BrokerPosition, FollowerTicket, Lots, Price, Symbol};

impl Desk<'_> {
    /// The one trade of a symbol in a netting account.
    pub(crate) fn netted(&self, base: &Symbol) -> Option<&OpenTrade> {
        let mut trades = self.account.trades.values();
        trades.find(|trade| trade.base == *base && self.account.decl.style.is_netting())
    }

    /// A new trade comes into the account; returns the ticket that it is held under.
    pub(crate) fn enter(&mut self, trade: OpenTrade, event: TradeEventKind) -> FollowerTicket {
        let Some(held) = self.netted(&trade.base).cloned() else {
            let (ticket, price) = (trade.position.ticket, trade.position.open_price);
            let lots = trade.position.lots;
            self.note(event, &trade, lots, Some(lots), price);
            self.hold(trade.clone());
            let position = trade.position;
            self.tell(match event {
                TradeEventKind::PendingFilled => AccountChange::PendingFilled { position },
                _ => AccountChange::PositionOpened { position },
            });
            return ticket;
        };
        let ticket = held.position.ticket;
        let (lots, price) = (trade.position.lots, trade.position.open_price);
        if held.position.side == trade.position.side {
            self.add(held, trade);
        } else if held.position.lots == lots {
            self.close_whole(held, price);
        } else if let Some(rest) = held.position.lots.minus(lots) {
            self.close_part(held, lots, rest, price);
        } else {
            self.turn_over(held, trade);
        }
        ticket
    }

    /// Adds to a netted trade: average price; stops, magic and comment of the last order win.
    pub(crate) fn add(&mut self, held: OpenTrade, new: OpenTrade) {
        let digits = self.symbols[&held.base].spec.digits;
        let (old, add) = (&held.position, &new.position);
        let total = old.lots.get() + add.lots.get();
        let value = old.open_price.get() * old.lots.get() + add.open_price.get() * add.lots.get();
        let average = Price::new((value / total).round_dp(digits)).unwrap_or(old.open_price);
        let position = BrokerPosition {
            ticket: old.ticket,
            lots: Lots::new(total).unwrap_or(old.lots),
            open_price: average,
            stop_loss: add.stop_loss.or(old.stop_loss),
            take_profit: add.take_profit.or(old.take_profit),
            opened_at: old.opened_at,
            ..add.clone()
        };
        let (lots, price) = (add.lots, add.open_price);
        let trade = OpenTrade { position, first_ticket: held.first_ticket, ..new };
        self.note(TradeEventKind::Added, &trade, lots, Some(trade.position.lots), price);
        self.hold(trade.clone());
        self.tell(AccountChange::PositionModified { position: trade.position });
    }

    /// Ends a netted trade and goes on under its ticket on the other side, in one step.
    pub(crate) fn turn_over(&mut self, held: OpenTrade, new: OpenTrade) {
        let (lots, price) = (held.position.lots, new.position.open_price);
        let rest = new.position.lots.minus(lots).unwrap_or(new.position.lots);
        self.book_profit(&held, lots, price);
        let comment = held.position.comment.clone();
        let closed = self.record(&held.position, lots, price, comment, None);
        self.note(TradeEventKind::Closed, &held, lots, None, price);
        let ticket = held.position.ticket;
        let position = BrokerPosition { ticket, lots: rest, ..new.position };
        let trade = OpenTrade { position, first_ticket: held.first_ticket, ..new };
        self.note(TradeEventKind::Opened, &trade, rest, Some(rest), price);
        self.hold(trade.clone());
        self.tell(AccountChange::PositionReversed { position: trade.position, closed });
    }
}
