//! What a master's account looks like to its followers.
//!
//! Decides: the book that is published, from what the broker lists now and the parts of
//! trades that were closed. Inputs are states; the events between two books are computed by
//! `schemas::Book::diff`, because a broker's callbacks come unordered and get lost.
//!
//! Invariants:
//! 1. A trade keeps its logical ticket through every partial close, also where the broker
//!    gives the rest a new number (MT4: `to #n` on the closed part, `from #n` on the rest).
//! 2. The volume at open is what is open plus everything closed in parts.
//! 3. What Lockstep opened on this account is marked as a copy and is not copied on.
//! 4. A trade that a netting account turned over is a new trade with a ticket of its own, the same
//!    one for every owner that asks (H64): it is made from the number and the instant.
//!
//! Not covered: MT4's "close by" that leaves a rest without any link; that rest is a new trade.

use crate::broker::SessionEvent;
use crate::broker::view::AccountView;
use reconcile::tag;
use rust_decimal::Decimal;
use schemas::{
    Book, BrokerPending, BrokerPosition, Change, ClosedTrade, FollowerTicket, Lots, Magic,
    MasterPending, MasterPosition, MasterTicket, Micros, Side, Symbol, SymbolSpec,
};
use std::collections::{BTreeMap, BTreeSet};

/// Longest chain of partial closes that is followed; a trade of 1000 steps has no more parts.
const PARTS_MAX: usize = 1000;
/// Tickets of trades that were turned over begin here: no broker counts so far.
const TURNED_OVER_FROM: u64 = 1 << 62;

/// The parts of trades that were closed, and which number continues which.
#[derive(Debug, Default)]
pub struct ClosedParts {
    parent: BTreeMap<FollowerTicket, FollowerTicket>,
    parts: BTreeMap<FollowerTicket, BTreeMap<Micros, Part>>,
}

/// What was closed of a trade at one instant.
#[derive(Debug, Clone, Copy)]
struct Part {
    lots: Decimal,
    side: Side,
}

/// One life of a trade: from its opening, or from where it was turned over.
#[derive(Debug, Clone, Copy)]
struct Life {
    ticket: FollowerTicket,
    side: Side,
    opened_at: Micros,
}

impl From<&BrokerPosition> for Life {
    fn from(position: &BrokerPosition) -> Self {
        let BrokerPosition { ticket, side, opened_at, .. } = *position;
        Life { ticket, side, opened_at }
    }
}

impl From<&ClosedTrade> for Life {
    fn from(closed: &ClosedTrade) -> Self {
        let ClosedTrade { ticket, side, opened_at, .. } = *closed;
        Life { ticket, side, opened_at }
    }
}

impl ClosedParts {
    /// Takes over one line of the history. The same line twice counts once.
    pub fn learn(&mut self, closed: &ClosedTrade) {
        if let Some(rest) = number_after(&closed.comment, "to #") {
            self.parent.insert(rest, closed.ticket);
        }
        let part = Part { lots: closed.lots.get(), side: closed.side };
        self.parts.entry(closed.ticket).or_default().insert(closed.closed_at, part);
    }

    fn learn_position(&mut self, position: &BrokerPosition) {
        if let Some(old) = number_after(&position.comment, "from #") {
            self.parent.entry(position.ticket).or_insert(old);
        }
    }

    /// The number under which the trade was first opened, and what was closed of this life since.
    fn origin(&self, life: Life) -> (FollowerTicket, Decimal) {
        let mut root = life.ticket;
        let mut closed = self.closed_of(root, life);
        for _ in 0..PARTS_MAX {
            match self.parent.get(&root) {
                Some(parent) if *parent != root => root = *parent,
                _ => break,
            }
            closed += self.closed_of(root, life);
        }
        (root, closed)
    }

    fn closed_of(&self, ticket: FollowerTicket, life: Life) -> Decimal {
        let parts = self.parts.get(&ticket).into_iter().flatten();
        let of_life = parts.filter(|(at, part)| part.side == life.side && **at >= life.opened_at);
        of_life.map(|(_, part)| part.lots).sum()
    }

    /// An earlier life of the same number ended when, or before, this one began.
    fn is_turned_over(&self, root: FollowerTicket, life: Life) -> bool {
        let mut parts = self.parts.get(&root).into_iter().flatten();
        parts.any(|(at, part)| {
            *at < life.opened_at || (*at == life.opened_at && part.side != life.side)
        })
    }

    /// The logical ticket of a life, and what was closed of it since.
    fn logical(&self, life: Life) -> (MasterTicket, Decimal) {
        let (root, closed) = self.origin(life);
        let ticket =
            if self.is_turned_over(root, life) { turned_over(root, life) } else { logical(root) };
        (ticket, closed)
    }
}

/// A ticket above all that brokers give, the same for the same number and instant (FNV-1a).
fn turned_over(root: FollowerTicket, life: Life) -> MasterTicket {
    let words = [root.get().to_le_bytes(), life.opened_at.0.to_le_bytes()];
    let hash = words.concat().into_iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    MasterTicket::new(hash % TURNED_OVER_FROM + TURNED_OVER_FROM)
        .expect("the upper half of the range of tickets")
}

/// The ticket that follows a marker in a comment, if it is written exactly so.
fn number_after(comment: &str, marker: &str) -> Option<FollowerTicket> {
    let digits = comment.trim().strip_prefix(marker)?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// Makes books of one master account.
#[derive(Debug, Default)]
pub struct Lead {
    parts: ClosedParts,
    own_magics: BTreeSet<i64>,
}

impl Lead {
    /// `own_magics`: those of the links that copy *onto* this account.
    pub fn new(own_magics: impl IntoIterator<Item = Magic>, history: &[ClosedTrade]) -> Self {
        let mut lead = Lead::default();
        lead.set_magics(own_magics);
        history.iter().for_each(|closed| lead.parts.learn(closed));
        lead
    }

    /// The links that copy onto this account changed.
    pub fn set_magics(&mut self, own_magics: impl IntoIterator<Item = Magic>) {
        self.own_magics = own_magics.into_iter().map(Magic::as_i64).collect();
    }

    /// Takes over a line of the history as it comes.
    pub fn learn(&mut self, closed: &ClosedTrade) {
        self.parts.learn(closed);
    }

    /// The logical ticket of a trade that ended, by any number it had.
    pub fn ticket_of(&self, closed: &ClosedTrade) -> MasterTicket {
        self.parts.logical(Life::from(closed)).0
    }

    /// The book for what the broker lists now.
    pub fn book(
        &mut self,
        positions: &BTreeMap<FollowerTicket, BrokerPosition>,
        pendings: &BTreeMap<FollowerTicket, BrokerPending>,
        symbols: &BTreeMap<Symbol, SymbolSpec>,
    ) -> Book {
        positions.values().for_each(|p| self.parts.learn_position(p));
        let mut book = Book::default();
        for position in positions.values() {
            let trade = self.trade(position, symbols);
            book.positions.insert(trade.ticket, trade);
        }
        for pending in pendings.values() {
            let order = self.order(pending, symbols);
            book.pendings.insert(order.ticket, order);
        }
        book
    }

    /// What an event of one trade changes in the book, where no other trade can change with it.
    ///
    /// Shape: the book as it was, which is brought up to date, the event, and the view that knows it
    /// already; the changes out, as the difference of two whole books would have them.
    /// Nothing where that cannot be told from this trade alone: where numbers continue each other, a
    /// side turned, or the event is of another kind. The book is of no use then.
    pub fn change_alone(
        &self,
        book: &mut Book,
        event: &SessionEvent,
        view: &AccountView,
    ) -> Option<Vec<Change>> {
        if !self.parts.parent.is_empty() {
            return None;
        }
        match event {
            SessionEvent::Position(position) => {
                let is_rest = number_after(&position.comment, "from #").is_some();
                let trade = (!is_rest).then(|| self.trade(position, &view.symbols))?;
                let ticket = trade.ticket;
                let old = book.positions.get(&ticket);
                let has_turned = old.is_some_and(|old| old.side != trade.side);
                if has_turned || book.pendings.contains_key(&ticket) {
                    return None;
                }
                let alone = |trade| {
                    let positions = BTreeMap::from([(ticket, trade)]);
                    Book { positions, ..Book::default() }
                };
                let changes =
                    old.cloned().map(alone).unwrap_or_default().diff(&alone(trade.clone()));
                book.positions.insert(ticket, trade);
                Some(changes)
            }
            SessionEvent::Closed { closed, reason }
                if !view.positions.contains_key(&closed.ticket) =>
            {
                let position = book.positions.remove(&self.ticket_of(closed))?;
                let (price, reason) = (Some(closed.close_price), *reason);
                Some(vec![Change::PositionClosed { position, price, reason }])
            }
            _ => None,
        }
    }

    fn trade(
        &self,
        position: &BrokerPosition,
        symbols: &BTreeMap<Symbol, SymbolSpec>,
    ) -> MasterPosition {
        let (ticket, closed) = self.parts.logical(Life::from(position));
        MasterPosition {
            ticket,
            symbol: position.symbol.clone(),
            side: position.side,
            lots: position.lots,
            lots_at_open: Lots::new(position.lots.get() + closed).unwrap_or(position.lots),
            open_price: Some(position.open_price),
            stop_loss: position.stop_loss,
            take_profit: position.take_profit,
            opened_at: position.opened_at,
            contract_size: symbols.get(&position.symbol).and_then(|spec| spec.contract_size),
            is_copy: self.is_copy(position.magic, &position.comment),
        }
    }

    fn order(
        &self,
        pending: &BrokerPending,
        symbols: &BTreeMap<Symbol, SymbolSpec>,
    ) -> MasterPending {
        MasterPending {
            ticket: logical(pending.ticket),
            symbol: pending.symbol.clone(),
            kind: pending.kind,
            lots: pending.lots,
            price: pending.price,
            stop_loss: pending.stop_loss,
            take_profit: pending.take_profit,
            placed_at: pending.placed_at,
            contract_size: symbols.get(&pending.symbol).and_then(|spec| spec.contract_size),
            is_copy: self.is_copy(pending.magic, &pending.comment),
        }
    }

    fn is_copy(&self, magic: i64, comment: &str) -> bool {
        self.own_magics.contains(&magic) || tag::decode(comment).is_some()
    }
}

fn logical(ticket: FollowerTicket) -> MasterTicket {
    MasterTicket::new(ticket.get()).expect("both kinds of ticket have one range")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use schemas::{AccountSnapshot, CloseReason};

    fn ticket(n: u64) -> FollowerTicket {
        FollowerTicket::new(n).unwrap()
    }

    fn position(n: u64, lots: &str, comment: &str) -> BrokerPosition {
        BrokerPosition {
            ticket: ticket(n),
            symbol: Symbol::new("EURUSD").unwrap(),
            side: Side::Buy,
            lots: lots.parse().unwrap(),
            open_price: "1.1".parse().unwrap(),
            stop_loss: None,
            take_profit: None,
            opened_at: Micros(1),
            magic: 0,
            comment: comment.into(),
        }
    }

    fn closed(n: u64, lots: &str, left: Option<&str>, comment: &str, at: i64) -> ClosedTrade {
        ClosedTrade {
            ticket: ticket(n),
            symbol: Symbol::new("EURUSD").unwrap(),
            side: Side::Buy,
            lots: lots.parse().unwrap(),
            open_price: "1.1".parse().unwrap(),
            close_price: "1.2".parse().unwrap(),
            opened_at: Micros(1),
            closed_at: Micros(at),
            magic: 0,
            comment: comment.into(),
            lots_left: left.map(|l| l.parse().unwrap()),
        }
    }

    fn book(lead: &mut Lead, positions: &[BrokerPosition]) -> Book {
        let positions = positions.iter().map(|p| (p.ticket, p.clone())).collect();
        lead.book(&positions, &BTreeMap::new(), &BTreeMap::new())
    }

    #[test]
    fn a_renumbered_rest_is_the_same_trade_with_less_volume() {
        let mut lead = Lead::default();
        let before = book(&mut lead, &[position(1, "1", "")]);
        lead.learn(&closed(1, "0.7", None, "to #2", 10));
        let after = book(&mut lead, &[position(2, "0.3", "from #1")]);
        match before.diff(&after).as_slice() {
            [Change::VolumeChanged { position, previous_lots }] => {
                assert_eq!(position.ticket.get(), 1);
                assert_eq!(position.lots.to_string(), "0.3");
                assert_eq!(position.lots_at_open.to_string(), "1");
                assert_eq!(previous_lots.to_string(), "1");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_chain_of_partial_closes_is_followed_to_its_first_number() {
        let history = [closed(1, "0.5", None, "to #2", 10), closed(2, "0.3", None, "to #3", 20)];
        let mut lead = Lead::new([], &history);
        let book = book(&mut lead, &[position(3, "0.2", "from #2")]);
        let trade = book.positions.values().next().unwrap();
        assert_eq!((trade.ticket.get(), trade.lots_at_open.to_string().as_str()), (1, "1"));
    }

    #[test]
    fn a_partial_close_that_keeps_its_number_keeps_the_volume_at_open() {
        let mut lead = Lead::default();
        let part = closed(5, "0.4", Some("0.6"), "", 10);
        lead.learn(&part);
        lead.learn(&part);
        let book = book(&mut lead, &[position(5, "0.6", "")]);
        assert_eq!(book.positions.values().next().unwrap().lots_at_open.to_string(), "1");
    }

    /// The trade as it is after it was turned over at `at`.
    fn turned(n: u64, side: Side, lots: &str, at: i64) -> BrokerPosition {
        BrokerPosition { side, opened_at: Micros(at), ..position(n, lots, "") }
    }

    #[test]
    fn a_trade_that_is_turned_over_closes_and_opens_as_a_new_trade() {
        let mut lead = Lead::default();
        let before = book(&mut lead, &[position(9, "1", "")]);
        let first = closed(9, "1", None, "", 50);
        lead.learn(&first);
        let after = book(&mut lead, &[turned(9, Side::Sell, "0.5", 50)]);
        let trade = after.positions.values().next().unwrap().clone();
        assert_ne!(trade.ticket.get(), 9);
        assert_eq!((trade.side, trade.lots_at_open.to_string().as_str()), (Side::Sell, "0.5"));
        match before.diff(&after).as_slice() {
            [Change::PositionClosed { position, .. }, Change::PositionOpened(opened)] => {
                assert_eq!((position.ticket.get(), opened), (9, &trade));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(lead.ticket_of(&first).get(), 9, "the first life keeps its number");
    }

    #[test]
    fn every_owner_gives_a_turned_over_trade_the_same_ticket_and_each_life_its_own() {
        let sell = |lots: &str, at: i64| {
            let side = Side::Sell;
            ClosedTrade { side, opened_at: Micros(50), ..closed(9, lots, None, "", at) }
        };
        let mut lead = Lead::new([], &[closed(9, "1", None, "", 50)]);
        let second = book(&mut lead, &[turned(9, Side::Sell, "0.5", 50)]);
        lead.learn(&sell("0.5", 80));
        let third = book(&mut lead, &[turned(9, Side::Buy, "0.2", 80)]);
        let ticket = |book: &Book| *book.positions.keys().next().unwrap();
        assert!(ticket(&second) != ticket(&third) && ticket(&third).get() != 9);
        // A later owner reads the history since this life began, and no more.
        let mut later = Lead::new([], &[sell("0.5", 80)]);
        assert_eq!(book(&mut later, &[turned(9, Side::Buy, "0.2", 80)]), third);
        assert_eq!(third.positions.values().next().unwrap().lots_at_open.to_string(), "0.2");
    }

    #[test]
    fn comments_that_name_each_other_in_a_circle_do_not_hang() {
        let history = [closed(1, "0.1", None, "to #2", 1), closed(2, "0.1", None, "to #1", 2)];
        let mut lead = Lead::new([], &history);
        assert_eq!(book(&mut lead, &[position(2, "0.2", "from #1")]).positions.len(), 1);
    }

    #[test]
    fn what_lockstep_opened_here_is_marked_as_a_copy() {
        let magic = Magic::new(7001).unwrap();
        let mut lead = Lead::new([magic], &[]);
        let mut copy = position(1, "1", "");
        copy.magic = 7001;
        let book = book(&mut lead, &[copy, position(2, "1", "my own trade")]);
        let marks: Vec<bool> = book.positions.values().map(|p| p.is_copy).collect();
        assert_eq!(marks, [true, false]);
    }

    /// What a broker tells of one of four numbers: it opens or changes, ends, or ends in part, at MT4
    /// with a new number for the rest.
    fn told(view: &AccountView, kind: u8, number: u64, lots: u8, at: i64) -> SessionEvent {
        let lots = format!("0.{}", 1 + lots % 9);
        let known = view.positions.get(&ticket(number));
        let closed = |left, comment: &str| ClosedTrade {
            side: known.map_or(Side::Buy, |p| p.side),
            opened_at: known.map_or(Micros(1), |p| p.opened_at),
            ..closed(number, &lots, left, comment, at)
        };
        match (kind % 8, known) {
            (0..=3, None) => {
                let opened_at = Micros(at);
                SessionEvent::Position(BrokerPosition { opened_at, ..position(number, &lots, "") })
            }
            (0 | 1, Some(known)) => {
                let stop_loss = Some("1.0".parse().unwrap());
                SessionEvent::Position(BrokerPosition { stop_loss, ..known.clone() })
            }
            (2, Some(known)) => SessionEvent::Position(BrokerPosition {
                side: known.side.opposite(),
                ..known.clone()
            }),
            (3..=5, Some(_)) => {
                let reason = CloseReason::Client;
                SessionEvent::Closed { closed: closed(None, ""), reason }
            }
            (6, Some(known)) => {
                SessionEvent::Reduced { position: known.clone(), closed: closed(Some("0.1"), "") }
            }
            (_, Some(_)) => SessionEvent::Reduced {
                position: position(number + 10, &lots, &format!("from #{number}")),
                closed: closed(None, &format!("to #{}", number + 10)),
            },
            (_, None) => SessionEvent::PendingGone(ticket(number)),
        }
    }

    proptest! {
        #[test]
        fn a_change_that_is_told_alone_is_the_difference_of_the_whole_books(
            steps in proptest::collection::vec((0u8..8, 1u64..5, 0u8..9), 1..40)
        ) {
            let snapshot = AccountSnapshot {
                account: schemas::AccountId::MIN,
                revision: 0,
                at: Micros(0),
                positions: Vec::new(),
                pendings: Vec::new(),
                funds: None,
            };
            let mut view = AccountView::new(&snapshot, Vec::new());
            let mut lead = Lead::default();
            let mut whole = Book::default();
            for (step, (kind, number, lots)) in steps.into_iter().enumerate() {
                let event = told(&view, kind, number, lots, 100 + step as i64);
                view.apply(&event);
                if let SessionEvent::Reduced { closed, .. } | SessionEvent::Closed { closed, .. } =
                    &event
                {
                    lead.learn(closed);
                }
                let mut alone = whole.clone();
                let told = lead.change_alone(&mut alone, &event, &view);
                let next = lead.book(&view.positions, &view.pendings, &view.symbols);
                if let Some(told) = told {
                    let mut wanted = whole.diff(&next);
                    for change in &mut wanted {
                        if let (
                            Change::PositionClosed { price, reason, .. },
                            SessionEvent::Closed { closed, reason: why },
                        ) = (change, &event)
                        {
                            (*price, *reason) = (Some(closed.close_price), *why);
                        }
                    }
                    prop_assert_eq!(&told, &wanted);
                    prop_assert_eq!(&alone, &next);
                }
                whole = next;
            }
        }
    }
}
