//! The dealing desk: one order, one trigger, for one account at one instant.
//!
//! Decides price, ticket and refusal of an order, and what partial closes and comments look like
//! in the style of the account. Inputs: the account, the symbols with their prices. Outputs: the
//! reply, and the account's changes in `Effects`.
//!
//! Invariants:
//! 1. Everything is checked before anything is changed.
//! 2. A closing order names a trade that is open now; it never opens, adds or reverses.
//! 3. The lots in the history of a trade plus the lots still open are the lots that were opened
//!    under its ticket.
//! 4. A netting account holds at most one trade a symbol.

use crate::clock::Now;
use crate::engine::{
    Account, Effects, HELD_PER_ACCOUNT_MAX, Listed, OpenTrade, Symbols, WaitingOrder, add_money,
    profit,
};
use crate::faults::CommentFault;
use crate::ledger::{Cause, TradeEventKind, TradeFact};
use crate::protocol::{AccountChange, CloseComment, Instruction, OpenComment, Push, Style};
use rust_decimal::Decimal;
use schemas::{
    BrokerPending, BrokerPosition, CloseReason, ClosedTrade, FollowerTicket, Lots, OrderDone,
    PendingKind, Price, RejectClass, Rejection, Side, Symbol, SymbolSpec,
};

/// Longest comment that is looked at; the account's own limit cuts, this one refuses.
const COMMENT_SENT_CHARS_MAX: usize = 256;

pub(crate) struct Desk<'a> {
    pub(crate) account: &'a mut Account,
    pub(crate) symbols: &'a mut Symbols,
    pub(crate) last_ticket: &'a mut u64,
    pub(crate) now: Now,
    pub(crate) cause: Cause,
    pub(crate) effects: &'a mut Effects,
    /// A fault: this share of the volume is filled.
    pub(crate) fill_percent: Option<u32>,
    /// A fault: this becomes of the comment of a new order.
    pub(crate) comment_fault: Option<CommentFault>,
}

#[derive(Clone, Copy)]
struct Stops {
    loss: Option<Price>,
    profit: Option<Price>,
}

pub(crate) fn refuse<T>(class: RejectClass, text: impl Into<String>) -> Result<T, Rejection> {
    Err(Rejection { class, text: text.into() })
}

fn invalid<T>(text: impl Into<String>) -> Result<T, Rejection> {
    refuse(RejectClass::Invalid, text)
}

fn done(ticket: FollowerTicket) -> OrderDone {
    OrderDone { ticket, lots: None, price: None, remainder: None }
}

impl Desk<'_> {
    pub(crate) fn execute(&mut self, instruction: &Instruction) -> Result<OrderDone, Rejection> {
        let stops =
            |loss: &Option<Price>, profit: &Option<Price>| Stops { loss: *loss, profit: *profit };
        match instruction {
            Instruction::Open { symbol, side, lots, stop_loss, take_profit, magic, comment } => {
                let stops = stops(stop_loss, take_profit);
                self.open(symbol, *side, *lots, stops, *magic, comment)
            }
            Instruction::Close { ticket, lots } => self.close(*ticket, *lots),
            Instruction::Modify { ticket, stop_loss, take_profit } => {
                self.modify(*ticket, stops(stop_loss, take_profit))
            }
            Instruction::Place {
                symbol,
                kind,
                lots,
                price,
                stop_loss,
                take_profit,
                magic,
                comment,
            } => {
                let (base, listed) = self.listed(symbol)?;
                let stops = stops(stop_loss, take_profit);
                check_lots(&listed.spec, *lots)?;
                check_waiting_price(listed, *kind, *price)?;
                check_stops(&listed.spec, kind.side(), *price, stops)?;
                check_comment(comment)?;
                self.check_room()?;
                let pending = BrokerPending {
                    ticket: self.next_ticket(),
                    symbol: symbol.clone(),
                    kind: *kind,
                    lots: *lots,
                    price: *price,
                    stop_loss: stops.loss,
                    take_profit: stops.profit,
                    placed_at: self.now.wall,
                    magic: *magic,
                    comment: self.comment_shown(comment),
                };
                Ok(self.place(WaitingOrder { pending, base, comment_sent: comment.clone() }))
            }
            Instruction::ModifyPending { ticket, price, stop_loss, take_profit } => {
                self.modify_pending(*ticket, *price, stops(stop_loss, take_profit))
            }
            Instruction::Cancel { ticket } => self.cancel(*ticket),
        }
    }

    fn open(
        &mut self,
        symbol: &Symbol,
        side: Side,
        lots: Lots,
        stops: Stops,
        magic: i64,
        comment: &str,
    ) -> Result<OrderDone, Rejection> {
        let (base, listed) = self.listed(symbol)?;
        check_lots(&listed.spec, lots)?;
        let (price, reference) = (listed.opening_price(side), listed.closing_price(side));
        let (Some(price), Some(reference)) = (price, reference) else {
            return refuse(RejectClass::Later, format!("no price for {symbol}"));
        };
        check_stops(&listed.spec, side, reference, stops)?;
        check_comment(comment)?;
        self.check_room()?;
        let lots = self.filled(&listed.spec, lots).unwrap_or(listed.spec.lots_min).min(lots);
        self.check_margin(&listed.spec, &base, side, lots, price)?;
        let ticket = self.next_ticket();
        let position = BrokerPosition {
            ticket,
            symbol: symbol.clone(),
            side,
            lots,
            open_price: price,
            stop_loss: stops.loss,
            take_profit: stops.profit,
            opened_at: self.now.wall,
            magic,
            comment: self.comment_shown(comment),
        };
        let comment_sent = comment.to_owned();
        let trade = OpenTrade { position, base, first_ticket: ticket, comment_sent };
        let ticket = self.enter(trade, TradeEventKind::Opened);
        Ok(OrderDone { lots: Some(lots), price: Some(price), ..done(ticket) })
    }

    /// The volume that a fault leaves of an order, down to the step.
    fn filled(&self, spec: &SymbolSpec, lots: Lots) -> Option<Lots> {
        let Some(percent) = self.fill_percent else { return Some(lots) };
        let part = lots.get() * Decimal::from(percent) / Decimal::ONE_HUNDRED;
        Lots::floor_step(part, spec.lots_step).filter(|part| *part >= spec.lots_min)
    }

    fn close(
        &mut self,
        ticket: FollowerTicket,
        lots: Option<Lots>,
    ) -> Result<OrderDone, Rejection> {
        let trade = self.trade(ticket)?.clone();
        let all = trade.position.lots;
        let lots = lots.unwrap_or(all);
        if lots > all {
            return invalid(format!("lots {lots} above the {all} of trade {ticket}"));
        }
        let listed = &self.symbols[&trade.base];
        let Some(price) = listed.closing_price(trade.position.side) else {
            return refuse(RejectClass::Later, format!("no price for {}", trade.position.symbol));
        };
        let lots = self.filled(&listed.spec, lots).unwrap_or(listed.spec.lots_step).min(lots);
        match all.minus(lots) {
            None => {
                self.close_whole(trade, price);
                Ok(OrderDone { lots: Some(lots), price: Some(price), ..done(ticket) })
            }
            Some(rest) => {
                check_step(&listed.spec, lots)?;
                let remainder = self.close_part(trade, lots, rest, price);
                Ok(OrderDone { lots: Some(lots), price: Some(price), remainder, ..done(ticket) })
            }
        }
    }

    pub(crate) fn close_whole(&mut self, trade: OpenTrade, price: Price) {
        let lots = trade.position.lots;
        self.drop_trade(&trade);
        self.book_profit(&trade, lots, price);
        let comment = self.comment_when_closed(&trade.position.comment);
        let closed = self.record(&trade.position, lots, price, comment, None);
        self.note(TradeEventKind::Closed, &trade, lots, None, price);
        let reason = match self.cause {
            Cause::StopLoss => CloseReason::StopLoss,
            Cause::TakeProfit => CloseReason::TakeProfit,
            Cause::StopOut => CloseReason::StopOut,
            Cause::Order | Cause::Manual | Cause::Trigger => CloseReason::Client,
        };
        self.tell(AccountChange::PositionClosed { closed, reason });
    }

    /// Returns the new ticket of the rest, where the style renumbers.
    pub(crate) fn close_part(
        &mut self,
        mut trade: OpenTrade,
        lots: Lots,
        rest: Lots,
        price: Price,
    ) -> Option<FollowerTicket> {
        self.book_profit(&trade, lots, price);
        let before = trade.position.clone();
        trade.position.lots = rest;
        let (closed, remainder) = match self.account.decl.style {
            Style::Mt5 | Style::Mt5Netting => {
                let comment = before.comment.clone();
                (self.record(&before, lots, price, comment, Some(rest)), None)
            }
            Style::Mt4 => {
                let (old, new) = (before.ticket, self.next_ticket());
                self.drop_trade(&trade);
                trade.position.ticket = new;
                trade.position.comment = self.cut(&format!("from #{old}"));
                let comment = self.cut(&format!("to #{new}"));
                (self.record(&before, lots, price, comment, None), Some(new))
            }
        };
        self.note(TradeEventKind::Reduced, &trade, lots, Some(rest), price);
        if let Some(fact) = self.effects.trades.last_mut() {
            fact.ticket = before.ticket;
            fact.new_ticket = remainder;
        }
        self.hold(trade.clone());
        self.tell(AccountChange::PositionReduced { position: trade.position, closed });
        remainder
    }

    fn modify(&mut self, ticket: FollowerTicket, stops: Stops) -> Result<OrderDone, Rejection> {
        let mut trade = self.trade(ticket)?.clone();
        if (trade.position.stop_loss, trade.position.take_profit) == (stops.loss, stops.profit) {
            return refuse(RejectClass::AlreadySo, format!("stops of {ticket} are already so"));
        }
        let listed = &self.symbols[&trade.base];
        let Some(reference) = listed.closing_price(trade.position.side) else {
            return refuse(RejectClass::Later, format!("no price for {}", trade.position.symbol));
        };
        check_stops(&listed.spec, trade.position.side, reference, stops)?;
        trade.position.stop_loss = stops.loss;
        trade.position.take_profit = stops.profit;
        let (lots, price) = (trade.position.lots, trade.position.open_price);
        self.note(TradeEventKind::Modified, &trade, lots, Some(lots), price);
        self.hold(trade.clone());
        self.tell(AccountChange::PositionModified { position: trade.position });
        Ok(done(ticket))
    }

    fn place(&mut self, order: WaitingOrder) -> OrderDone {
        let ticket = order.pending.ticket;
        self.note_waiting(TradeEventKind::PendingPlaced, &order);
        self.hold_waiting(order.clone());
        self.tell(AccountChange::PendingPlaced { pending: order.pending });
        done(ticket)
    }

    fn modify_pending(
        &mut self,
        ticket: FollowerTicket,
        price: Price,
        stops: Stops,
    ) -> Result<OrderDone, Rejection> {
        let mut order = self.waiting(ticket)?.clone();
        let pending = &mut order.pending;
        let before = (pending.price, pending.stop_loss, pending.take_profit);
        if before == (price, stops.loss, stops.profit) {
            return refuse(RejectClass::AlreadySo, format!("order {ticket} is already so"));
        }
        let listed = &self.symbols[&order.base];
        if price != pending.price {
            check_waiting_price(listed, pending.kind, price)?;
        }
        check_stops(&listed.spec, pending.kind.side(), price, stops)?;
        pending.price = price;
        pending.stop_loss = stops.loss;
        pending.take_profit = stops.profit;
        self.note_waiting(TradeEventKind::PendingModified, &order);
        self.hold_waiting(order.clone());
        self.tell(AccountChange::PendingModified { pending: order.pending });
        Ok(done(ticket))
    }

    fn cancel(&mut self, ticket: FollowerTicket) -> Result<OrderDone, Rejection> {
        let order = self.waiting(ticket)?.clone();
        self.drop_waiting(&order);
        self.account.gone.insert(ticket);
        self.note_waiting(TradeEventKind::PendingCancelled, &order);
        self.tell(AccountChange::PendingCancelled { pending: order.pending });
        Ok(done(ticket))
    }

    /// Does what the current price of its symbol triggers for one trade or pending order.
    pub(crate) fn judge(&mut self, ticket: FollowerTicket) {
        if let Some(order) = self.account.waiting.get(&ticket).cloned() {
            let side = order.pending.kind.side();
            let price = self.symbols[&order.base].opening_price(side);
            if let Some(price) = price.filter(|price| is_reached(&order.pending, *price)) {
                self.fill(order, price);
            }
        } else if let Some(trade) = self.account.trades.get(&ticket).cloned() {
            let price = self.symbols[&trade.base].closing_price(trade.position.side);
            let Some(price) = price else { return };
            if let Some(cause) = stop_hit(&trade.position, price) {
                self.cause = cause;
                self.close_whole(trade, price);
            }
        }
    }

    fn fill(&mut self, order: WaitingOrder, price: Price) {
        self.drop_waiting(&order);
        let WaitingOrder { pending, base, comment_sent } = order;
        if self.netted(&base).is_some() {
            // Its number ends here: what it adds to, or takes from, has another one.
            self.account.gone.insert(pending.ticket);
            self.tell(AccountChange::PendingCancelled { pending: pending.clone() });
        }
        let position = BrokerPosition {
            ticket: pending.ticket,
            symbol: pending.symbol,
            side: pending.kind.side(),
            lots: pending.lots,
            open_price: price,
            stop_loss: pending.stop_loss,
            take_profit: pending.take_profit,
            opened_at: self.now.wall,
            magic: pending.magic,
            comment: pending.comment,
        };
        let trade = OpenTrade { position, base, first_ticket: pending.ticket, comment_sent };
        self.enter(trade, TradeEventKind::PendingFilled);
    }

    // What the account holds.

    fn listed(&self, symbol: &Symbol) -> Result<(Symbol, &Listed), Rejection> {
        let base = symbol.as_str().strip_suffix(self.account.decl.suffix.as_str());
        let base = base.and_then(|base| Symbol::new(base).ok());
        match base.as_ref().and_then(|base| self.symbols.get_key_value(base)) {
            Some((base, listed)) => Ok((base.clone(), listed)),
            None => invalid(format!("symbol {symbol} is not known here")),
        }
    }

    fn trade(&self, ticket: FollowerTicket) -> Result<&OpenTrade, Rejection> {
        match self.account.trades.get(&ticket) {
            Some(trade) => Ok(trade),
            None if self.account.gone.contains(&ticket) => {
                refuse(RejectClass::AlreadySo, format!("ticket {ticket} is already closed"))
            }
            None => invalid(format!("ticket {ticket} is not an open trade of this account")),
        }
    }

    fn waiting(&self, ticket: FollowerTicket) -> Result<&WaitingOrder, Rejection> {
        match self.account.waiting.get(&ticket) {
            Some(order) => Ok(order),
            None if self.account.gone.contains(&ticket)
                || self.account.trades.contains_key(&ticket) =>
            {
                refuse(RejectClass::AlreadySo, format!("order {ticket} is filled or deleted"))
            }
            None => invalid(format!("ticket {ticket} is not a pending order of this account")),
        }
    }

    fn check_room(&self) -> Result<(), Rejection> {
        if self.account.trades.len() + self.account.waiting.len() >= HELD_PER_ACCOUNT_MAX {
            return invalid(format!("the account holds {HELD_PER_ACCOUNT_MAX} trades and orders"));
        }
        Ok(())
    }

    pub(crate) fn next_ticket(&mut self) -> FollowerTicket {
        *self.last_ticket += 1;
        FollowerTicket::new(*self.last_ticket).expect("a broker does not make 2^63 tickets")
    }

    fn watch(&mut self, base: &Symbol, ticket: FollowerTicket, is_watched: bool) {
        let key = (self.account.decl.account, ticket);
        let Some(listed) = self.symbols.get_mut(base) else { return };
        if is_watched {
            listed.watched.insert(key);
        } else {
            listed.watched.remove(&key);
        }
    }

    pub(crate) fn hold(&mut self, trade: OpenTrade) {
        let position = &trade.position;
        let has_stops = position.stop_loss.is_some() || position.take_profit.is_some();
        self.watch(&trade.base, position.ticket, has_stops);
        self.account.trades.insert(position.ticket, trade);
    }

    fn drop_trade(&mut self, trade: &OpenTrade) {
        let ticket = trade.position.ticket;
        self.watch(&trade.base, ticket, false);
        self.account.trades.remove(&ticket);
        self.account.gone.insert(ticket);
    }

    fn hold_waiting(&mut self, order: WaitingOrder) {
        self.watch(&order.base, order.pending.ticket, true);
        self.account.waiting.insert(order.pending.ticket, order);
    }

    fn drop_waiting(&mut self, order: &WaitingOrder) {
        self.watch(&order.base, order.pending.ticket, false);
        self.account.waiting.remove(&order.pending.ticket);
    }

    pub(crate) fn book_profit(&mut self, trade: &OpenTrade, lots: Lots, price: Price) {
        let spec = &self.symbols[&trade.base].spec;
        let amount = profit(spec, &trade.position, lots.get(), price);
        self.account.balance = add_money(self.account.balance, amount);
    }

    pub(crate) fn record(
        &mut self,
        position: &BrokerPosition,
        lots: Lots,
        close_price: Price,
        comment: String,
        lots_left: Option<Lots>,
    ) -> ClosedTrade {
        let closed = ClosedTrade {
            ticket: position.ticket,
            symbol: position.symbol.clone(),
            side: position.side,
            lots,
            open_price: position.open_price,
            close_price,
            opened_at: position.opened_at,
            closed_at: self.now.wall,
            magic: position.magic,
            comment,
            lots_left,
        };
        self.account.history.push(closed.clone());
        closed
    }

    // What is told and written down.

    pub(crate) fn tell(&mut self, change: AccountChange) {
        self.account.revision += 1;
        let account = self.account.decl.account;
        let funds = self.account.funds(self.symbols, self.now);
        let revision = self.account.revision;
        self.effects.changes.push((account, Push::Change { account, revision, change, funds }));
    }

    pub(crate) fn note(
        &mut self,
        event: TradeEventKind,
        trade: &OpenTrade,
        lots: Lots,
        lots_left: Option<Lots>,
        price: Price,
    ) {
        let OpenTrade { position, first_ticket, comment_sent, .. } = trade;
        self.effects.trades.push(TradeFact {
            account: self.account.decl.account,
            event,
            cause: self.cause,
            ticket: position.ticket,
            first_ticket: *first_ticket,
            new_ticket: None,
            symbol: position.symbol.clone(),
            side: position.side,
            lots,
            lots_left,
            price: Some(price),
            stop_loss: position.stop_loss,
            take_profit: position.take_profit,
            magic: position.magic,
            comment: comment_sent.clone(),
        });
    }

    pub(crate) fn note_waiting(&mut self, event: TradeEventKind, order: &WaitingOrder) {
        let WaitingOrder { pending, comment_sent, .. } = order;
        self.effects.trades.push(TradeFact {
            account: self.account.decl.account,
            event,
            cause: self.cause,
            ticket: pending.ticket,
            first_ticket: pending.ticket,
            new_ticket: None,
            symbol: pending.symbol.clone(),
            side: pending.kind.side(),
            lots: pending.lots,
            lots_left: None,
            price: Some(pending.price),
            stop_loss: pending.stop_loss,
            take_profit: pending.take_profit,
            magic: pending.magic,
            comment: comment_sent.clone(),
        });
    }

    // Comments.

    fn cut(&self, comment: &str) -> String {
        comment.chars().take(self.account.decl.comment_limit()).collect()
    }

    fn comment_shown(&self, sent: &str) -> String {
        let rule = match &self.comment_fault {
            Some(CommentFault::Cut(chars)) => {
                let cut: String = sent.chars().take(*chars as usize).collect();
                return self.cut(&cut);
            }
            Some(CommentFault::As(rule)) => rule,
            None => &self.account.decl.comment_open,
        };
        match rule {
            OpenComment::Keep => self.cut(sent),
            OpenComment::Blank => String::new(),
            OpenComment::Prefix(prefix) => self.cut(&format!("{prefix}{sent}")),
        }
    }

    fn comment_when_closed(&self, shown: &str) -> String {
        let word = match self.cause {
            Cause::StopLoss => "[sl]",
            Cause::TakeProfit => "[tp]",
            Cause::StopOut => "[so]",
            Cause::Order | Cause::Manual | Cause::Trigger => return shown.to_owned(),
        };
        match self.account.decl.comment_at_stop() {
            CloseComment::Keep => shown.to_owned(),
            CloseComment::Replace => self.cut(word),
            CloseComment::Suffix => {
                let room = self.account.decl.comment_limit().saturating_sub(word.len());
                let kept: String = shown.chars().take(room).collect();
                self.cut(&format!("{kept}{word}"))
            }
        }
    }
}

fn check_comment(comment: &str) -> Result<(), Rejection> {
    if comment.chars().count() > COMMENT_SENT_CHARS_MAX {
        return invalid(format!("comment above {COMMENT_SENT_CHARS_MAX} characters"));
    }
    Ok(())
}

fn check_lots(spec: &SymbolSpec, lots: Lots) -> Result<(), Rejection> {
    if lots < spec.lots_min || lots > spec.lots_max {
        let (min, max) = (spec.lots_min, spec.lots_max);
        return invalid(format!("lots {lots} outside {min} to {max}"));
    }
    check_step(spec, lots)
}

fn check_step(spec: &SymbolSpec, lots: Lots) -> Result<(), Rejection> {
    if lots.get() % spec.lots_step.get() != Decimal::ZERO {
        return invalid(format!("lots {lots} not a multiple of {}", spec.lots_step));
    }
    Ok(())
}

fn check_digits(spec: &SymbolSpec, name: &str, price: Price) -> Result<(), Rejection> {
    if price.get().scale() > spec.digits {
        return invalid(format!("{name} {price} has more than {} digits", spec.digits));
    }
    Ok(())
}

/// A level must lie beyond the reference by more than nothing and at least the stops level.
fn check_distance(
    spec: &SymbolSpec,
    name: &str,
    price: Price,
    distance: Decimal,
) -> Result<(), Rejection> {
    check_digits(spec, name, price)?;
    let level = spec.point() * Decimal::from(spec.stops_level_points);
    if distance <= Decimal::ZERO || distance < level {
        return invalid(format!("{name} {price} on the wrong side or nearer than {level}"));
    }
    Ok(())
}

fn check_stops(
    spec: &SymbolSpec,
    side: Side,
    reference: Price,
    stops: Stops,
) -> Result<(), Rejection> {
    let toward_profit = |price: Price| match side {
        Side::Buy => price.get() - reference.get(),
        Side::Sell => reference.get() - price.get(),
    };
    if let Some(price) = stops.loss {
        check_distance(spec, "stop_loss", price, -toward_profit(price))?;
    }
    if let Some(price) = stops.profit {
        check_distance(spec, "take_profit", price, toward_profit(price))?;
    }
    Ok(())
}

fn check_waiting_price(listed: &Listed, kind: PendingKind, price: Price) -> Result<(), Rejection> {
    let Some(market) = listed.opening_price(kind.side()) else {
        return refuse(RejectClass::Later, format!("no price for {}", listed.spec.symbol));
    };
    let distance = match kind {
        PendingKind::BuyLimit | PendingKind::SellStop => market.get() - price.get(),
        PendingKind::SellLimit | PendingKind::BuyStop => price.get() - market.get(),
    };
    check_distance(&listed.spec, "price", price, distance)
}

fn is_reached(pending: &BrokerPending, market: Price) -> bool {
    match pending.kind {
        PendingKind::BuyLimit | PendingKind::SellStop => market <= pending.price,
        PendingKind::SellLimit | PendingKind::BuyStop => market >= pending.price,
    }
}

/// The stop loss comes first if one price reaches both, which only a gap can do.
fn stop_hit(position: &BrokerPosition, market: Price) -> Option<Cause> {
    let is_at_or_below = |level: Option<Price>| level.is_some_and(|level| market <= level);
    let is_at_or_above = |level: Option<Price>| level.is_some_and(|level| market >= level);
    let (loss, profit) = (position.stop_loss, position.take_profit);
    let (lost, won) = match position.side {
        Side::Buy => (is_at_or_below(loss), is_at_or_above(profit)),
        Side::Sell => (is_at_or_above(loss), is_at_or_below(profit)),
    };
    match (lost, won) {
        (true, _) => Some(Cause::StopLoss),
        (false, true) => Some(Cause::TakeProfit),
        (false, false) => None,
    }
}
