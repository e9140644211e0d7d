//! Both accounts with every trade of the follower assigned to the ticket that explains it.
//!
//! Decides: which trades and orders of the follower are copies of which master ticket, which
//! look like ours and are not explained, and which are none of our business.
//!
//! Ways to recognise a copy, the surest first; a trade is assigned once:
//! pair ticket, lineage of the pair ticket, exact tag and magic, tag of a predecessor,
//! shape of an ended part, unique match with a trade that has no copy.
//!
//! Invariants:
//! 1. A trade with a foreign magic is never assigned; one without a magic only by pair ticket.
//! 2. A trade whose comment is, or begins with, the tag of one ticket is never assigned to
//!    another.
//! 3. A trade without a tag is a pair's copy only in the pair's symbol and direction: what
//!    stands under an old ticket may be somebody else's by now (H66).
//! 4. Everything is kept in maps and sorted lists: the order of the inputs does not show.

use crate::action::{FoundBy, StrayReason};
use crate::input::{InputParts, LinkMode, LinkRules};
use crate::lineage::Lineage;
use crate::pair::{Pair, PairState};
use crate::pendings::copy_kind;
use crate::price_guard::point_of;
use crate::stops::prices_differ;
use crate::tag;
use crate::ticket::{Base, CopyView, Market, MasterView, copy_side, gate, size_of, usable_spec};
use rust_decimal::Decimal;
use schemas::planted::{self, Bug};
use schemas::{
    ClosedTrade, FollowerTicket, LinkId, Lots, MasterTicket, Micros, PendingKind, Price, Side,
    Symbol,
};
use std::collections::{BTreeMap, BTreeSet};

/// Most digits of a volume.
const LOTS_DIGITS: u32 = 8;

/// A trade or order of the follower.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Item<'a> {
    pub(crate) copy: CopyView<'a>,
    magic: i64,
    tag: Option<(LinkId, MasterTicket)>,
    /// The tag that the comment begins with; it may only exclude other tickets.
    hint: Option<(LinkId, MasterTicket)>,
}

/// A copy, and how it was recognised.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found<'a> {
    pub(crate) item: Item<'a>,
    pub(crate) found_by: FoundBy,
    /// The deciding pair names it, so it is the one that stays (H55).
    is_pairs: bool,
}

/// The input, sorted by what explains what.
pub(crate) struct World<'a> {
    pub(crate) parts: InputParts<'a>,
    pub(crate) market: Market<'a>,
    pub(crate) lineage: Lineage,
    /// Copies by master ticket; the one that stays first.
    copies: BTreeMap<MasterTicket, Vec<Found<'a>>>,
    /// Looks like ours and is not explained.
    pub(crate) strays: BTreeMap<FollowerTicket, StrayReason>,
    stray_items: BTreeMap<FollowerTicket, Item<'a>>,
    /// Every number in the follower's lists.
    open: BTreeSet<FollowerTicket>,
    /// Finished trades by ticket, oldest first.
    history: BTreeMap<FollowerTicket, Vec<&'a ClosedTrade>>,
    /// Finished trades with our magic and the exact tag of a ticket of this link.
    tagged: BTreeMap<MasterTicket, Vec<&'a ClosedTrade>>,
    /// The same with whatever is left of a tag, on the trade or on another part of it.
    tagged_loosely: BTreeMap<MasterTicket, Vec<&'a ClosedTrade>>,
    /// Finished trades with our magic that no tag speaks of.
    untagged_ended: Vec<&'a ClosedTrade>,
    /// Tickets whose finished parts are explained by a pair or a copy.
    explained: BTreeSet<FollowerTicket>,
    /// Pairs whose ended copy may continue in one of several unexplained trades.
    ambiguous: BTreeSet<MasterTicket>,
}

impl<'a> World<'a> {
    /// Assigns everything that can be assigned.
    pub(crate) fn new(parts: InputParts<'a>) -> World<'a> {
        let market = Market {
            symbols: parts.symbols,
            quotes: parts.quotes,
            master_funds: parts.master.funds.as_ref(),
            follower_funds: parts.follower.funds.as_ref(),
            now: parts.now,
            limits: parts.limits,
        };
        let lineage = Lineage::read(parts.follower, &parts.history.trades, parts.rules.magic);
        let mut world = World {
            parts,
            market,
            lineage,
            copies: BTreeMap::new(),
            strays: BTreeMap::new(),
            stray_items: BTreeMap::new(),
            open: BTreeSet::new(),
            history: sorted_history(&parts.history.trades),
            tagged: BTreeMap::new(),
            tagged_loosely: BTreeMap::new(),
            untagged_ended: Vec::new(),
            explained: BTreeSet::new(),
            ambiguous: BTreeSet::new(),
        };
        world.sort_ended_by_tag();
        let mut items = world.items();
        world.open = items.keys().copied().collect();
        world.take_by_pair(&mut items);
        world.take_by_tag(&mut items);
        world.set_strays_aside(items);
        world.take_by_shape();
        world.take_by_unique_match();
        world.order_copies();
        world.explain_history();
        world
    }

    /// The union that is planned over: pairs, master trades and orders, copies (B39).
    pub(crate) fn tickets(&self) -> BTreeSet<MasterTicket> {
        let book = &self.parts.master.book;
        let master = book.positions.keys().chain(book.pendings.keys());
        master.chain(self.copies.keys()).copied().chain(self.parts.pairs.tickets()).collect()
    }

    /// What the master has under a ticket.
    pub(crate) fn wanted(&self, ticket: MasterTicket) -> Option<MasterView<'a>> {
        let book = &self.parts.master.book;
        let position = book.positions.get(&ticket).map(MasterView::Position);
        position.or_else(|| book.pendings.get(&ticket).map(MasterView::Pending))
    }

    /// The copies of a ticket; the one that stays first.
    pub(crate) fn copies(&self, ticket: MasterTicket) -> &[Found<'a>] {
        self.copies.get(&ticket).map_or(&[], Vec::as_slice)
    }

    /// Several unexplained trades may continue the pair's ended copy.
    pub(crate) fn is_ambiguous(&self, ticket: MasterTicket) -> bool {
        self.ambiguous.contains(&ticket)
    }

    fn items(&self) -> BTreeMap<FollowerTicket, Item<'a>> {
        let follower = self.parts.follower;
        let pendings = follower.pendings.iter().map(|o| Item {
            copy: CopyView::from(o),
            magic: o.magic,
            tag: tag::decode(&o.comment),
            hint: tag::remnant(&o.comment),
        });
        let positions = follower.positions.iter().map(|p| Item {
            copy: CopyView::from(p),
            magic: p.magic,
            tag: tag::decode(&p.comment),
            hint: tag::remnant(&p.comment),
        });
        // An order that filled between the two reads is in both lists: the trade counts (H63).
        pendings.chain(positions).map(|item| (item.copy.ticket, item)).collect()
    }

    fn is_ours(&self, magic: i64) -> bool {
        magic == self.parts.rules.magic.as_i64()
    }

    /// An item that can be a pair's copy: invariants 1 to 3.
    fn fits(&self, pair: &Pair, item: &Item<'_>) -> bool {
        match item.tag {
            Some(tag) => tag == (pair.link, pair.master_ticket) && self.is_ours(item.magic),
            None => {
                (self.is_ours(item.magic) || item.magic == 0)
                    && item.hint.is_none_or(|hint| hint == (pair.link, pair.master_ticket))
                    && self
                        .predecessors_tag(item.copy.ticket)
                        .is_none_or(|(ticket, _)| ticket == pair.master_ticket)
                    && *item.copy.symbol == pair.symbol
                    && item.copy.side == pair.side
            }
        }
    }

    fn take_by_pair(&mut self, items: &mut BTreeMap<FollowerTicket, Item<'a>>) {
        let pairs = self.parts.pairs;
        // Live rows first, and a ticket before a lineage: neither an ended row nor the lineage
        // of another ticket may take a copy away.
        for (is_live, by_ticket) in [(true, true), (true, false), (false, true), (false, false)] {
            for pair in pairs.rows().filter(|pair| pair.state.is_live() == is_live) {
                let Some(named) = pair.follower_ticket else { continue };
                for ticket in self.lineage.onward(named) {
                    if (ticket == named) != by_ticket {
                        continue;
                    }
                    let may = |item: &Item<'_>| {
                        self.fits(pair, item) && (by_ticket || self.is_ours(item.magic))
                    };
                    if !items.get(&ticket).is_some_and(may) {
                        continue;
                    }
                    let Some(item) = items.remove(&ticket) else { continue };
                    let found_by = if by_ticket { FoundBy::Ticket } else { FoundBy::Lineage };
                    let is_pairs = pairs.main(pair.master_ticket) == Some(pair);
                    self.give(pair.master_ticket, Found { item, found_by, is_pairs });
                }
            }
        }
    }

    fn take_by_tag(&mut self, items: &mut BTreeMap<FollowerTicket, Item<'a>>) {
        let ours: Vec<Item<'a>> =
            items.values().filter(|item| self.is_ours(item.magic)).copied().collect();
        for item in ours {
            let own = item.tag.filter(|(link, _)| *link == self.parts.rules.link);
            let tagged = match (item.tag, own) {
                (_, Some((_, ticket))) => Some((ticket, FoundBy::Tag)),
                (None, None) => self.predecessors_tag(item.copy.ticket),
                (Some(_), None) => None,
            };
            let Some((mut ticket, found_by)) = tagged else { continue };
            if planted::is(Bug::P8) {
                // The first ticket whose tag begins like this one takes the copy.
                ticket = self
                    .tickets()
                    .into_iter()
                    .find(|t| tag::begin_alike(*t, ticket))
                    .unwrap_or(ticket);
            }
            items.remove(&item.copy.ticket);
            self.give(ticket, Found { item, found_by, is_pairs: false });
        }
    }

    /// The tag that the history still shows on an ended part of this trade, under the ticket
    /// that it has or one that it had.
    fn predecessors_tag(&self, ticket: FollowerTicket) -> Option<(MasterTicket, FoundBy)> {
        let link = self.parts.rules.link;
        self.lineage.back(ticket).into_iter().find_map(|earlier| {
            let ended = self.history_of(earlier).iter().filter(|t| self.is_ours(t.magic));
            let tagged = ended.filter_map(|t| tag::decode(&t.comment)).next_back();
            tagged.filter(|(of, _)| *of == link).map(|(_, ticket)| (ticket, FoundBy::Lineage))
        })
    }

    fn give(&mut self, ticket: MasterTicket, found: Found<'a>) {
        self.copies.entry(ticket).or_default().push(found);
    }

    fn set_strays_aside(&mut self, items: BTreeMap<FollowerTicket, Item<'a>>) {
        let magic = self.parts.rules.magic.as_i64();
        for (ticket, item) in items.into_iter().filter(|(_, item)| item.magic == magic) {
            let why = match item.tag {
                None => StrayReason::MagicOnly,
                Some(_) => StrayReason::OtherLinksTag,
            };
            self.strays.insert(ticket, why);
            self.stray_items.insert(ticket, item);
        }
    }

    /// Strays without any tag: what may still be a copy.
    fn untagged(&self) -> impl Iterator<Item = &Item<'a>> {
        self.stray_items.values().filter(|item| item.tag.is_none())
    }

    /// A live pair's ended part and one unexplained trade that continues it: same symbol, side
    /// and open price, and the volumes add up (H51). Not the open time: brokers disagree on it.
    fn take_by_shape(&mut self) {
        let mut matches = Vec::new();
        for pair in self.pairs_without_copy() {
            let Some((open_price, left)) = self.expected_rest(pair) else { continue };
            let fits = |item: &&Item<'_>| {
                item.copy.pending.is_none()
                    && self.fits(pair, item)
                    && item.copy.price == open_price
                    && item.copy.lots == left
            };
            let rest: Vec<_> = self.untagged().filter(fits).map(|i| i.copy.ticket).collect();
            matches.push((pair.master_ticket, rest));
        }
        let ambiguous = self.take_unique(matches, &[], FoundBy::Shape);
        self.ambiguous.extend(ambiguous);
    }

    fn pairs_without_copy(&self) -> impl Iterator<Item = &'a Pair> {
        let pairs = self.parts.pairs;
        pairs
            .tickets()
            .filter_map(move |ticket| pairs.main(ticket))
            .filter(|pair| pair.state.is_live() && !self.copies.contains_key(&pair.master_ticket))
    }

    /// Open price and volume of what an ended part of the pair's copy must have left.
    fn expected_rest(&self, pair: &Pair) -> Option<(Price, Lots)> {
        let parts = self.ended_parts(pair);
        let last = parts.last()?;
        let left = match last.lots_left {
            Some(left) => left,
            None => {
                let closed: Decimal = parts.iter().map(|t| t.lots.get()).sum();
                Lots::new(pair.lots_at_open?.get() - closed).ok()?
            }
        };
        Some((last.open_price, left))
    }

    /// The finished parts of a pair's copy, under all tickets that it had, oldest first.
    pub(crate) fn ended_parts(&self, pair: &Pair) -> Vec<&'a ClosedTrade> {
        let Some(named) = pair.follower_ticket else { return Vec::new() };
        let mut parts = self.parts_under(named, pair.master_ticket, &pair.symbol, pair.side);
        parts.sort_by(|a, b| age_order(a, b));
        parts
    }

    /// The same for any copy: none of another symbol or direction, and none that is tagged as
    /// another ticket's (invariants 2 and 3).
    fn parts_under(
        &self,
        named: FollowerTicket,
        of: MasterTicket,
        symbol: &Symbol,
        side: Side,
    ) -> Vec<&'a ClosedTrade> {
        let of = (self.parts.rules.link, of);
        let mut tickets: BTreeSet<FollowerTicket> = self.lineage.back(named).into_iter().collect();
        tickets.extend(self.lineage.onward(named));
        let parts = tickets.into_iter().flat_map(|ticket| self.history_of(ticket));
        let parts = parts.filter(|t| t.symbol == *symbol && t.side == side);
        parts.filter(|t| self.history_tag(t).is_none_or(|tag| tag == of)).copied().collect()
    }

    /// Finished parts of one ticket, oldest first.
    pub(crate) fn history_of(&self, ticket: FollowerTicket) -> &[&'a ClosedTrade] {
        self.history.get(&ticket).map_or(&[], Vec::as_slice)
    }

    /// Trades of the master without any copy, and orders in flight without a ticket, against
    /// what is left unexplained (H56). Only a match that is the only one on both sides counts.
    fn take_by_unique_match(&mut self) {
        let mut matches = Vec::new();
        let mut rivals = Vec::new();
        for ticket in self.tickets() {
            if !self.copies(ticket).is_empty() {
                continue;
            }
            let Some(shape) = self.shape_of(ticket) else { continue };
            // Where no copy carries a tag, a likeness proves nothing: rows alone count (H53). It may
            // all the same be the copy of a trade whose row was lost.
            let needs_row = self.parts.rules.mode == LinkMode::CopyUntagged;
            if needs_row && self.parts.pairs.main(ticket).is_none() {
                let may_be = self.untagged().filter(|item| shape.may_be(item));
                rivals.extend(may_be.map(|item| item.copy.ticket));
                continue;
            }
            let mut same = Vec::new();
            for item in self.untagged().filter(|item| shape.may_be(item)) {
                if shape.matches(item) {
                    same.push(item.copy.ticket);
                } else if shape.may_be_late(item) {
                    rivals.push(item.copy.ticket);
                }
            }
            matches.push((ticket, same));
        }
        // What is not unique is seen again by `may_have_stray`.
        let _ambiguous = self.take_unique(matches, &rivals, FoundBy::UniqueMatch);
    }

    /// Assigns the matches that are unique on both sides; gives back the tickets of the others.
    /// What is among the rivals is wanted by one more, each time.
    fn take_unique(
        &mut self,
        matches: Vec<(MasterTicket, Vec<FollowerTicket>)>,
        rivals: &[FollowerTicket],
        found_by: FoundBy,
    ) -> Vec<MasterTicket> {
        let mut claims: BTreeMap<FollowerTicket, usize> = BTreeMap::new();
        for candidate in matches.iter().flat_map(|(_, candidates)| candidates).chain(rivals) {
            *claims.entry(*candidate).or_default() += 1;
        }
        let mut ambiguous = Vec::new();
        for (ticket, candidates) in matches {
            match candidates.as_slice() {
                [] => {}
                [only] if claims.get(only) == Some(&1) => {
                    self.strays.remove(only);
                    if let Some(item) = self.stray_items.remove(only) {
                        self.give(ticket, Found { item, found_by, is_pairs: true });
                    }
                }
                [..] => ambiguous.push(ticket),
            }
        }
        ambiguous
    }

    /// An unexplained trade with our magic may be the copy of this ticket.
    pub(crate) fn may_have_stray(&self, ticket: MasterTicket) -> bool {
        self.shape_of(ticket).is_some_and(|shape| self.untagged().any(|item| shape.may_be(item)))
    }

    /// What the copy of a ticket would look like, where none is known: of an order in flight,
    /// or of a master's trade that may be copied and has no pair.
    fn shape_of(&self, ticket: MasterTicket) -> Option<Shape<'a>> {
        let skew = self.parts.limits.clock_skew.as_micros() as i64;
        let earlier = |at: Micros| Micros(at.0.saturating_sub(skew));
        let tag = (self.parts.rules.link, ticket);
        let wanted = self.wanted(ticket);
        if !self.tagged_history(ticket).is_empty() {
            return None;
        }
        if let Some(pair) = self.parts.pairs.main(ticket) {
            if pair.state != PairState::Sending {
                return None;
            }
            let sent_at = pair.sent_at?;
            let limits = &self.parts.limits;
            let until = sent_at.plus(limits.longest_delivery());
            return Some(Shape {
                tag,
                symbol: &pair.symbol,
                side: pair.side,
                kind: None,
                since: earlier(sent_at),
                in_flight: Some((pair.is_pending, until)),
                price: wanted.and_then(|view| self.price_range(view)),
                lots: [pair.lots_at_open, None],
            });
        }
        let view = wanted?;
        let is_barred = gate(self.parts.rules, view).is_some();
        if is_barred && self.parts.rules.mode != LinkMode::CloseOnly {
            return None;
        }
        let spec = usable_spec(self.parts.rules, view, &self.market).ok()?;
        let now = size_of(self.parts.rules, view, spec, &self.market).ok();
        let full = at_open(self.parts.rules, view, &self.market);
        Some(Shape {
            tag,
            symbol: &spec.symbol,
            side: copy_side(self.parts.rules, view.side()),
            kind: match view {
                MasterView::Position(_) => None,
                MasterView::Pending(order) => Some(copy_kind(self.parts.rules, order.kind)),
            },
            since: earlier(view.opened_at()),
            in_flight: None,
            price: self.price_range(view),
            lots: [now, full],
        })
    }

    /// The master's price, and how far from it a copy's may be.
    fn price_range(&self, view: MasterView<'_>) -> Option<(Price, Decimal)> {
        let spec = usable_spec(self.parts.rules, view, &self.market).ok()?;
        let point = point_of(spec)?;
        match view {
            MasterView::Position(p) => {
                Some((p.open_price?, Decimal::from(self.parts.rules.slippage_points) * point))
            }
            MasterView::Pending(order) => Some((order.price.rounded(spec.digits), point)),
        }
    }

    fn order_copies(&mut self) {
        for copies in self.copies.values_mut() {
            copies.sort_by_key(|f| (!f.is_pairs, f.item.copy.opened_at, f.item.copy.ticket));
        }
    }

    fn explain_history(&mut self) {
        let named = self.parts.pairs.rows().flat_map(|pair| self.ended_parts(pair));
        let mut explained: BTreeSet<FollowerTicket> = named.map(|t| t.ticket).collect();
        for (of, copies) in &self.copies {
            for CopyView { ticket, symbol, side, .. } in copies.iter().map(|f| f.item.copy) {
                let parts = self.parts_under(ticket, *of, symbol, side);
                explained.extend(parts.into_iter().map(|t| t.ticket));
            }
        }
        self.explained = explained;
    }

    /// Reads the tags of the history once: every ticket asks for its own.
    fn sort_ended_by_tag(&mut self) {
        let link = self.parts.rules.link;
        let ended = self.history.values().flatten().copied();
        let ours: Vec<&ClosedTrade> = ended.filter(|t| self.is_ours(t.magic)).collect();
        for trade in ours {
            match tag::decode(&trade.comment) {
                Some((of, ticket)) if of == link => {
                    self.tagged.entry(ticket).or_default().push(trade);
                }
                Some(_) | None => {}
            }
            match self.history_tag(trade) {
                Some((of, ticket)) if of == link => {
                    self.tagged_loosely.entry(ticket).or_default().push(trade);
                }
                Some(_) => {}
                None => self.untagged_ended.push(trade),
            }
        }
        for trades in self.tagged.values_mut() {
            trades.sort_by(|a, b| age_order(a, b));
        }
    }

    /// Finished trades with our magic and the exact tag of this ticket, oldest first.
    pub(crate) fn tagged_history(&self, ticket: MasterTicket) -> Vec<&'a ClosedTrade> {
        let tagged = self.tagged.get(&ticket).map_or(&[][..], Vec::as_slice);
        tagged.iter().copied().filter(|t| !self.is_open(t.ticket)).collect()
    }

    /// The follower's lists have something under this number, whosever it is.
    pub(crate) fn is_open(&self, ticket: FollowerTicket) -> bool {
        self.open.contains(&ticket)
    }

    /// Finished trades that may have been the copy of a ticket although no tag says so: brokers
    /// overwrite it when a stop is hit (P3). Good enough to hold an open back, not to close.
    pub(crate) fn loose_history(
        &self,
        ticket: MasterTicket,
        symbol: &Symbol,
        side: Side,
        since: Micros,
    ) -> Vec<&'a ClosedTrade> {
        let skew = self.parts.limits.clock_skew;
        let may_be = |t: &&ClosedTrade| {
            !self.explained.contains(&t.ticket)
                && t.symbol == *symbol
                && t.side == side
                && t.opened_at.plus(skew) >= since
        };
        let untagged = self.untagged_ended.iter().copied().filter(may_be);
        let tagged = self.tagged_loosely.get(&ticket).map_or(&[][..], Vec::as_slice);
        let mut trades: Vec<&ClosedTrade> = tagged.iter().copied().chain(untagged).collect();
        trades.sort_by(|a, b| age_order(a, b));
        trades
    }

    /// The tag of a finished part, also where only another part of the trade still shows it.
    fn history_tag(&self, trade: &ClosedTrade) -> Option<(LinkId, MasterTicket)> {
        tag::remnant(&trade.comment).or_else(|| {
            let onward = self.lineage.onward(trade.ticket);
            let tickets = self.lineage.back(trade.ticket).into_iter().chain(onward);
            let parts = tickets.flat_map(|ticket| self.history_of(ticket));
            parts.filter(|t| self.is_ours(t.magic)).find_map(|t| tag::remnant(&t.comment))
        })
    }

    /// The history reaches back far enough to say that something is not in it.
    pub(crate) fn history_reaches(&self, since: Micros) -> bool {
        self.parts.history.since.plus(self.parts.limits.clock_skew) <= since
    }

    /// The volumes that the target of a copy without a pair is computed from.
    ///
    /// The copy may have been opened when the master had closed a part already. How much the
    /// master had then follows from what the copy was opened with: as much less than at its
    /// open as the copy is less than a full one. Volumes are rounded down, so a part is known
    /// within a step, and the least that the master can have had is taken: the copy may keep a
    /// step, and nothing is closed because of a guess. Where it is not known at all, the volumes
    /// of now are taken.
    pub(crate) fn base_of_copy(&self, copy: &CopyView<'_>, view: MasterView<'_>) -> Base {
        let rules = self.parts.rules;
        let spec = usable_spec(rules, view, &self.market).ok();
        let full = at_open(rules, view, &self.market);
        let (Some(opened), Some(spec), Some(full)) = (self.opened_lots(copy), spec, full) else {
            return Base { lots_at_open: copy.lots, master_lots_at_open: view.lots() };
        };
        let master_at_open = view.lots_at_open().get();
        let then = if size_of(rules, view, spec, &self.market) == Ok(opened) {
            view.lots().get()
        } else if opened >= full {
            master_at_open
        } else {
            master_at_open * (opened.get() / (full.get() + spec.lots_step.get()))
        };
        let then = Lots::new(then.trunc_with_scale(LOTS_DIGITS)).ok();
        let master_lots_at_open = then.map_or(view.lots(), |then| then.max(view.lots()));
        Base { lots_at_open: opened, master_lots_at_open }
    }

    /// The same for a pair that does not know yet what was filled.
    pub(crate) fn base_of_pair(
        &self,
        pair: &Pair,
        copy: &CopyView<'_>,
        wanted: Option<MasterView<'_>>,
    ) -> Base {
        let master_at_open = pair.master_lots_at_open;
        match self.opened_lots(copy) {
            Some(lots_at_open) => Base { lots_at_open, master_lots_at_open: master_at_open },
            None => Base {
                lots_at_open: copy.lots,
                master_lots_at_open: wanted.map_or(master_at_open, MasterView::lots),
            },
        }
    }

    /// What a copy had when it was opened: its volume and what was closed of it since, if the
    /// history reaches back that far.
    fn opened_lots(&self, copy: &CopyView<'_>) -> Option<Lots> {
        if !self.history_reaches(copy.opened_at) {
            return None;
        }
        let tickets = self.lineage.back(copy.ticket);
        let parts = tickets.into_iter().flat_map(|ticket| self.history_of(ticket));
        let of_copy = parts.filter(|t| t.symbol == *copy.symbol && t.side == copy.side);
        let closed: Decimal = of_copy.map(|t| t.lots.get()).sum();
        Lots::new(copy.lots.get() + closed).ok()
    }
}

/// What a copy that is not known would look like.
struct Shape<'a> {
    tag: (LinkId, MasterTicket),
    symbol: &'a Symbol,
    side: Side,
    kind: Option<PendingKind>,
    since: Micros,
    /// Of an order in flight: it was sent as a pending order, and its longest delivery ends then.
    in_flight: Option<(bool, Micros)>,
    price: Option<(Price, Decimal)>,
    lots: [Option<Lots>; 2],
}

impl Shape<'_> {
    /// It cannot be excluded.
    fn may_be(&self, item: &Item<'_>) -> bool {
        item.hint.is_none_or(|hint| hint == self.tag)
            && item.copy.symbol == self.symbol
            && item.copy.side == self.side
            && item.copy.opened_at >= self.since
    }

    /// Kind, price and volume are those of the copy. Where the master's trade is gone, and its
    /// price with it, the time stands for the price.
    fn matches(&self, item: &Item<'_>) -> bool {
        match self.price {
            Some((price, near)) => {
                self.is_alike(item) && !prices_differ(price, item.copy.price, near)
            }
            None => self.may_be_late(item),
        }
    }

    /// It appeared between the sending of an order in flight and its longest delivery: one that is
    /// carried out late is filled at the price of that time.
    fn may_be_late(&self, item: &Item<'_>) -> bool {
        self.is_alike(item) && self.in_flight.is_some_and(|(_, until)| item.copy.opened_at <= until)
    }

    /// Kind and volume are those of the copy.
    fn is_alike(&self, item: &Item<'_>) -> bool {
        let was_pending = self.in_flight.is_some_and(|(is_pending, _)| is_pending);
        let is_kind = match self.kind {
            Some(kind) => item.copy.pending == Some(kind),
            None => item.copy.pending.is_none() || was_pending,
        };
        is_kind && self.lots.contains(&Some(item.copy.lots))
    }
}

/// The volume of a copy that was opened when the master's trade was.
fn at_open(rules: &LinkRules, view: MasterView<'_>, market: &Market<'_>) -> Option<Lots> {
    let spec = usable_spec(rules, view, market).ok()?;
    match view {
        MasterView::Position(position) => {
            let mut fresh = position.clone();
            fresh.lots = fresh.lots_at_open;
            size_of(rules, MasterView::Position(&fresh), spec, market).ok()
        }
        MasterView::Pending(_) => size_of(rules, view, spec, market).ok(),
    }
}

fn sorted_history(trades: &[ClosedTrade]) -> BTreeMap<FollowerTicket, Vec<&ClosedTrade>> {
    let mut by_ticket: BTreeMap<FollowerTicket, Vec<&ClosedTrade>> = BTreeMap::new();
    for trade in trades {
        by_ticket.entry(trade.ticket).or_default().push(trade);
    }
    for parts in by_ticket.values_mut() {
        parts.sort_by(|a, b| age_order(a, b));
    }
    by_ticket
}

/// Oldest first; the rest only makes the order independent of the list's.
fn age_order(a: &ClosedTrade, b: &ClosedTrade) -> std::cmp::Ordering {
    let key = |t: &ClosedTrade| (t.closed_at, t.ticket, t.lots, t.lots_left, t.close_price);
    key(a).cmp(&key(b)).then_with(|| a.comment.cmp(&b.comment)).then_with(|| {
        (a.opened_at, a.open_price, a.side, a.magic).cmp(&(
            b.opened_at,
            b.open_price,
            b.side,
            b.magic,
        ))
    })
}
