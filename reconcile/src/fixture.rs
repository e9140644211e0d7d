//! A small world for tests: one link, both accounts, and a broker that carries out every step.

use crate::action::{CopyAction, CopyStep, HeldPlan, Plan, SkipReason};
use crate::input::{
    AboveMax, BelowMin, FollowerHistory, InputParts, Limits, LinkMode, LinkRules, ReconcileInput,
    Sizing,
};
use crate::pair::{Pair, Pairs};
use crate::tag;
use crate::ticket::{CopyView, Market, MasterView, TicketDecision, TicketInput, plan_ticket};
use rust_decimal::Decimal;
use schemas::{
    AccountId, AccountSnapshot, Book, BrokerPending, BrokerPosition, ClosedTrade, Epoch,
    FollowerTicket, Funds, LinkId, Lots, Magic, MasterPending, MasterPosition, MasterSnapshot,
    MasterTicket, Micros, OrderDone, OrderRequest, PendingKind, Price, Quote, Seq, Side, Symbol,
    SymbolSpec,
};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const NOW: Micros = Micros(1_700_000_000_000_000);
pub(crate) const LINK: u64 = 7;
pub(crate) const MAGIC: u64 = 770_001;

pub(crate) fn mt(ticket: u64) -> MasterTicket {
    MasterTicket::new(ticket).unwrap()
}

pub(crate) fn ft(ticket: u64) -> FollowerTicket {
    FollowerTicket::new(ticket).unwrap()
}

pub(crate) fn lots(text: &str) -> Lots {
    text.parse().unwrap()
}

pub(crate) fn price(text: &str) -> Price {
    text.parse().unwrap()
}

pub(crate) fn dec(text: &str) -> Decimal {
    text.parse().unwrap()
}

pub(crate) fn symbol(text: &str) -> Symbol {
    Symbol::new(text).unwrap()
}

pub(crate) fn seconds_ago(seconds: i64) -> Micros {
    Micros(NOW.0 - seconds * 1_000_000)
}

pub(crate) fn tag_of(ticket: u64) -> String {
    tag::encode(LinkId::new(LINK).unwrap(), mt(ticket)).unwrap().as_str().to_owned()
}

/// Step and smallest volume 0.01, largest 50, five digits, no stop level.
pub(crate) fn spec(name: &str) -> SymbolSpec {
    SymbolSpec {
        symbol: symbol(name),
        digits: 5,
        lots_step: lots("0.01"),
        lots_min: lots("0.01"),
        lots_max: lots("50"),
        contract_size: Some(dec("100000")),
        stops_level_points: 0,
    }
}

pub(crate) fn quote(name: &str, bid: &str, ask: &str) -> Quote {
    Quote { symbol: symbol(name), bid: price(bid), ask: price(ask), at: NOW }
}

pub(crate) fn funds(amount: &str, currency: &str, at: Micros) -> Funds {
    let amount: schemas::Money = amount.parse().unwrap();
    Funds { balance: amount, equity: amount, margin_used: None, currency: symbol(currency), at }
}

/// A buy of 1.00 EURUSD at 1.10000, opened a second ago.
pub(crate) fn master_position(ticket: u64) -> MasterPosition {
    MasterPosition {
        ticket: mt(ticket),
        symbol: symbol("EURUSD"),
        side: Side::Buy,
        lots: lots("1"),
        lots_at_open: lots("1"),
        open_price: Some(price("1.1")),
        stop_loss: None,
        take_profit: None,
        opened_at: seconds_ago(1),
        contract_size: Some(dec("100000")),
        is_copy: false,
    }
}

/// A buy limit of 1.00 EURUSD at 1.09000, placed a minute ago.
pub(crate) fn master_pending(ticket: u64) -> MasterPending {
    MasterPending {
        ticket: mt(ticket),
        symbol: symbol("EURUSD"),
        kind: PendingKind::BuyLimit,
        lots: lots("1"),
        price: price("1.09"),
        stop_loss: None,
        take_profit: None,
        placed_at: seconds_ago(60),
        contract_size: Some(dec("100000")),
        is_copy: false,
    }
}

/// A copy of 0.50 with our magic and the tag of the ticket, opened a minute ago.
pub(crate) fn copy_position(ticket: u64, of: u64) -> BrokerPosition {
    BrokerPosition {
        ticket: ft(ticket),
        symbol: symbol("EURUSD"),
        side: Side::Buy,
        lots: lots("0.5"),
        open_price: price("1.1"),
        stop_loss: None,
        take_profit: None,
        opened_at: seconds_ago(60),
        magic: MAGIC as i64,
        comment: tag_of(of),
    }
}

/// The waiting copy of [`master_pending`].
pub(crate) fn copy_pending(ticket: u64, of: u64) -> BrokerPending {
    BrokerPending {
        ticket: ft(ticket),
        symbol: symbol("EURUSD"),
        kind: PendingKind::BuyLimit,
        lots: lots("0.5"),
        price: price("1.09"),
        stop_loss: None,
        take_profit: None,
        placed_at: seconds_ago(60),
        magic: MAGIC as i64,
        comment: tag_of(of),
    }
}

/// The end of a trade of 0.50, half a minute ago.
pub(crate) fn closed_trade(ticket: u64, comment: &str) -> ClosedTrade {
    ClosedTrade {
        ticket: ft(ticket),
        symbol: symbol("EURUSD"),
        side: Side::Buy,
        lots: lots("0.5"),
        open_price: price("1.1"),
        close_price: price("1.09"),
        opened_at: seconds_ago(60),
        closed_at: seconds_ago(30),
        magic: MAGIC as i64,
        comment: comment.to_owned(),
        lots_left: None,
    }
}

/// How the broker of a [`Scene`] closes a part of a trade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Partial {
    /// The ticket and the comment stay.
    KeepsTicket,
    /// The rest has a new ticket, `from #n`, and no tag.
    Renumbers,
}

/// One link with everything that a plan looks at.
#[derive(Debug, Clone)]
pub(crate) struct Scene {
    pub(crate) rules: LinkRules,
    pub(crate) master: MasterSnapshot,
    pub(crate) follower: AccountSnapshot,
    pub(crate) history: FollowerHistory,
    pub(crate) pairs: Pairs,
    pub(crate) symbols: BTreeMap<Symbol, SymbolSpec>,
    pub(crate) quotes: BTreeMap<Symbol, Quote>,
    pub(crate) other_magics: BTreeSet<Magic>,
    pub(crate) busy: BTreeSet<MasterTicket>,
    pub(crate) on_the_road: BTreeSet<MasterTicket>,
    pub(crate) confirmed: Option<HeldPlan>,
    pub(crate) now: Micros,
    pub(crate) limits: Limits,
    pub(crate) partial: Partial,
    /// The comments of everything that was ever opened or placed here.
    pub(crate) opened: Vec<String>,
}

impl Scene {
    /// Copies half the volume of account 1 onto account 2; nothing is open.
    pub(crate) fn new() -> Scene {
        let (master, follower) = (AccountId::new(1).unwrap(), AccountId::new(2).unwrap());
        Scene {
            rules: LinkRules {
                link: LinkId::new(LINK).unwrap(),
                master,
                follower,
                magic: Magic::new(MAGIC).unwrap(),
                copy_from: seconds_ago(86_400),
                sync_existing: false,
                mode: LinkMode::Copy,
                paused: false,
                sizing: Sizing::Multiplier(dec("0.5")),
                below_min: BelowMin::Skip,
                above_max: AboveMax::Clamp,
                align_contract: false,
                slippage_points: 20,
                copy_stops: true,
                copy_pendings: true,
                reverse: false,
                symbol_map: BTreeMap::new(),
                symbol_suffix: String::new(),
            },
            master: MasterSnapshot {
                account: master,
                epoch: Epoch::new(10).unwrap(),
                seq: Seq::new(100).unwrap(),
                at: NOW,
                book: Book::default(),
                funds: None,
            },
            follower: AccountSnapshot {
                account: follower,
                revision: 1,
                at: NOW,
                positions: Vec::new(),
                pendings: Vec::new(),
                funds: None,
            },
            history: FollowerHistory { since: seconds_ago(172_800), trades: Vec::new() },
            pairs: Pairs::default(),
            symbols: ["EURUSD", "XAUUSD"].map(|s| (symbol(s), spec(s))).into(),
            quotes: [(symbol("EURUSD"), quote("EURUSD", "1.1", "1.1"))].into(),
            other_magics: BTreeSet::new(),
            busy: BTreeSet::new(),
            on_the_road: BTreeSet::new(),
            confirmed: None,
            now: NOW,
            limits: Limits::default(),
            partial: Partial::KeepsTicket,
            opened: Vec::new(),
        }
    }

    pub(crate) fn master_has(mut self, position: MasterPosition) -> Self {
        self.master.book.positions.insert(position.ticket, position);
        self
    }

    pub(crate) fn master_waits(mut self, order: MasterPending) -> Self {
        self.master.book.pendings.insert(order.ticket, order);
        self
    }

    pub(crate) fn follower_has(mut self, position: BrokerPosition) -> Self {
        self.follower.positions.push(position);
        self
    }

    pub(crate) fn follower_waits(mut self, order: BrokerPending) -> Self {
        self.follower.pendings.push(order);
        self
    }

    pub(crate) fn history_has(mut self, trade: ClosedTrade) -> Self {
        self.history.trades.push(trade);
        self
    }

    pub(crate) fn pair(mut self, pair: Pair) -> Self {
        self.pairs.put(pair);
        self
    }

    /// An open pair m->f of 1.00 to 0.50, made a minute ago.
    pub(crate) fn open_pair(&self, m: u64, f: u64) -> Pair {
        let position = copy_position(f, m);
        let action = CopyAction { link: self.rules.link, master_ticket: mt(m), steps: Vec::new() };
        let step = CopyStep::AdoptCopy {
            ticket: position.ticket,
            found_by: crate::action::FoundBy::Tag,
            symbol: position.symbol,
            side: position.side,
            master_side: Side::Buy,
            lots_at_open: position.lots,
            master_lots_at_open: lots("1"),
            is_pending: false,
            opened_at: seconds_ago(60),
        };
        Pair::on_sent(None, &action, &step, NOW).unwrap()
    }

    /// A pair whose open order went out so long ago and has no answer.
    pub(crate) fn sending_pair(&self, m: u64, seconds: i64) -> Pair {
        let action = CopyAction { link: self.rules.link, master_ticket: mt(m), steps: Vec::new() };
        let step = CopyStep::OpenCopy {
            symbol: symbol("EURUSD"),
            side: Side::Buy,
            master_side: Side::Buy,
            lots: lots("0.5"),
            master_lots: lots("1"),
            stops: crate::pair::Stops::default(),
            late: false,
        };
        Pair::on_sent(None, &action, &step, seconds_ago(seconds)).unwrap()
    }

    pub(crate) fn parts(&self) -> InputParts<'_> {
        InputParts {
            rules: &self.rules,
            master: &self.master,
            follower: &self.follower,
            history: &self.history,
            pairs: &self.pairs,
            symbols: &self.symbols,
            quotes: &self.quotes,
            other_magics: &self.other_magics,
            busy: &self.busy,
            on_the_road: &self.on_the_road,
            confirmed: self.confirmed.as_ref(),
            now: self.now,
            limits: &self.limits,
        }
    }

    pub(crate) fn plan(&self) -> Plan {
        crate::plan(&ReconcileInput::new(self.parts()).expect("the scene's parts belong together"))
    }

    /// The steps for one ticket.
    pub(crate) fn steps(&self, ticket: u64) -> Vec<CopyStep> {
        let actions = self.plan().actions;
        let action = actions.into_iter().find(|action| action.master_ticket == mt(ticket));
        action.map_or(Vec::new(), |action| action.steps)
    }

    pub(crate) fn skip_reason(&self, ticket: u64) -> Option<SkipReason> {
        match self.steps(ticket).as_slice() {
            [CopyStep::SkipOpen { reason, .. }] => Some(*reason),
            _ => None,
        }
    }

    /// The decision of the live path about one ticket.
    pub(crate) fn live(&self, ticket: u64) -> TicketDecision {
        let ticket = mt(ticket);
        let book = &self.master.book;
        let position = book.positions.get(&ticket).map(MasterView::Position);
        let wanted = position.or_else(|| book.pendings.get(&ticket).map(MasterView::Pending));
        let pair = self.pairs.main(ticket);
        let named = pair.and_then(|pair| pair.follower_ticket);
        let positions = self.follower.positions.iter().map(CopyView::from);
        let mut copies = positions.chain(self.follower.pendings.iter().map(CopyView::from));
        plan_ticket(&TicketInput {
            rules: &self.rules,
            ticket,
            wanted,
            pair,
            copy: named.and_then(|named| copies.find(|copy| copy.ticket == named)),
            market: Market {
                symbols: &self.symbols,
                quotes: &self.quotes,
                master_funds: self.master.funds.as_ref(),
                follower_funds: self.follower.funds.as_ref(),
                now: self.now,
                limits: &self.limits,
            },
        })
    }

    /// Carries out the first `count` steps of a plan as a broker without faults would.
    pub(crate) fn execute(&mut self, plan: &Plan, count: usize) {
        self.execute_answering(plan, count, true);
    }

    /// The same, and the answers to the orders may be lost.
    pub(crate) fn execute_answering(&mut self, plan: &Plan, count: usize, answers: bool) {
        let steps = plan.actions.iter().flat_map(|a| a.steps.iter().map(move |s| (a, s)));
        for (action, step) in steps.take(count) {
            let current = self.pairs.main(action.master_ticket);
            let sent = Pair::on_sent(current, action, step, self.now);
            if let Some(pair) = sent {
                assert!(pair.knows_its_copy(), "{pair:?}");
                self.pairs.put(pair);
            }
            let request = step.request(&self.rules, action.master_ticket).unwrap();
            if let Some(request) = request {
                let done = self.carry_out(request);
                let pair = self.pairs.main(action.master_ticket).filter(|_| answers);
                if let Some(pair) = pair {
                    let next = pair.on_done(step, &done);
                    assert!(next.knows_its_copy(), "{next:?}");
                    self.pairs.put(next);
                }
            }
        }
        self.follower.revision += 1;
    }

    fn next_ticket(&self) -> FollowerTicket {
        let positions = self.follower.positions.iter().map(|p| p.ticket);
        let pendings = self.follower.pendings.iter().map(|o| o.ticket);
        let closed = self.history.trades.iter().map(|t| t.ticket);
        let last = positions.chain(pendings).chain(closed).max().map_or(1_000_000, |t| t.get());
        ft(last.max(1_000_000) + 1)
    }

    fn carry_out(&mut self, request: OrderRequest) -> OrderDone {
        if let OrderRequest::Open { comment, .. } | OrderRequest::Place { comment, .. } = &request {
            self.opened.push(comment.clone());
        }
        match request {
            OrderRequest::Open { symbol, side, lots, stop_loss, take_profit, magic, comment } => {
                let ticket = self.next_ticket();
                let quoted = self.quotes.get(&symbol).map(|q| match side {
                    Side::Buy => q.ask,
                    Side::Sell => q.bid,
                });
                self.follower.positions.push(BrokerPosition {
                    ticket,
                    symbol,
                    side,
                    lots,
                    open_price: quoted.unwrap_or(price("1.1")),
                    stop_loss,
                    take_profit,
                    opened_at: self.now,
                    magic: magic.as_i64(),
                    comment,
                });
                OrderDone { ticket, lots: Some(lots), price: None, remainder: None }
            }
            OrderRequest::Close { ticket, lots } => self.close(ticket, lots),
            OrderRequest::Modify { ticket, stop_loss, take_profit } => {
                let position = self.follower.positions.iter_mut().find(|p| p.ticket == ticket);
                let position = position.expect("a modify names an open trade");
                (position.stop_loss, position.take_profit) = (stop_loss, take_profit);
                OrderDone { ticket, lots: None, price: None, remainder: None }
            }
            OrderRequest::Place {
                symbol,
                kind,
                lots,
                price,
                stop_loss,
                take_profit,
                magic,
                comment,
            } => {
                let ticket = self.next_ticket();
                self.follower.pendings.push(BrokerPending {
                    ticket,
                    symbol,
                    kind,
                    lots,
                    price,
                    stop_loss,
                    take_profit,
                    placed_at: self.now,
                    magic: magic.as_i64(),
                    comment,
                });
                OrderDone { ticket, lots: None, price: None, remainder: None }
            }
            OrderRequest::ModifyPending { ticket, price, stop_loss, take_profit } => {
                let order = self.follower.pendings.iter_mut().find(|o| o.ticket == ticket);
                let order = order.expect("a modify names a waiting order");
                (order.price, order.stop_loss, order.take_profit) = (price, stop_loss, take_profit);
                OrderDone { ticket, lots: None, price: None, remainder: None }
            }
            OrderRequest::Cancel { ticket } => {
                let before = self.follower.pendings.len();
                self.follower.pendings.retain(|o| o.ticket != ticket);
                assert_ne!(before, self.follower.pendings.len(), "cancelled {ticket} is waiting");
                OrderDone { ticket, lots: None, price: None, remainder: None }
            }
        }
    }

    fn close(&mut self, ticket: FollowerTicket, part: Option<Lots>) -> OrderDone {
        let index = self.follower.positions.iter().position(|p| p.ticket == ticket);
        let mut position =
            self.follower.positions.remove(index.expect("a close names an open trade"));
        let closed = part.unwrap_or(position.lots);
        assert!(closed <= position.lots, "a close is never larger than the trade");
        let rest = position.lots.minus(closed);
        let new_ticket = self.next_ticket();
        let renumbers = rest.is_some() && self.partial == Partial::Renumbers;
        self.history.trades.push(ClosedTrade {
            ticket,
            symbol: position.symbol.clone(),
            side: position.side,
            lots: closed,
            open_price: position.open_price,
            close_price: position.open_price,
            opened_at: position.opened_at,
            closed_at: self.now,
            magic: position.magic,
            comment: if renumbers {
                format!("to #{new_ticket}")
            } else if position.comment.starts_with("to #") {
                // Only a broker writes this, and only on a part that has a rest.
                String::new()
            } else {
                position.comment.clone()
            },
            lots_left: rest.filter(|_| !renumbers),
        });
        let mut done = OrderDone { ticket, lots: Some(closed), price: None, remainder: None };
        if let Some(rest) = rest {
            position.lots = rest;
            if renumbers {
                position.ticket = new_ticket;
                position.comment = format!("from #{ticket}");
                done.remainder = Some(new_ticket);
            }
            self.follower.positions.push(position);
        }
        done
    }
}

impl Scene {
    /// The pair's ticket is open, and nothing about it needs binding first.
    pub(crate) fn live_copy_is_whole(&self, pair: &Pair) -> bool {
        let named = pair.follower_ticket;
        self.follower.positions.iter().any(|p| {
            Some(p.ticket) == named
                && p.symbol == pair.symbol
                && p.side == pair.side
                && tag::decode(&p.comment) == Some((pair.link, pair.master_ticket))
                && p.magic == self.rules.magic.as_i64()
        })
    }
}
