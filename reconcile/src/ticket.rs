//! What is to be done about one master ticket: the live path, and the core of every plan.
//!
//! Decides: open or skip, change, reduce, close. [`crate::plan`] calls the same functions for
//! each ticket, so a live copy and a reconcile cannot disagree.

use crate::action::{CloseCause, CopyAction, CopyStep, FoundBy, SkipReason, WaitReason};
use crate::input::{Limits, LinkMode, LinkRules};
use crate::pair::{Pair, PairState, Rejected, Stops};
use crate::pendings::{manage_pending, place_pending};
use crate::price_guard::{LateOpen, check_late_open, point_of};
use crate::sizing::{SizeInput, Surplus, size_copy, surplus, target_lots};
use crate::stops::{market_reference, settable, stops_differ, wanted_stops};
use crate::tag;
use rust_decimal::Decimal;
use schemas::planted::{self, Bug};
use schemas::{
    BrokerPending, BrokerPosition, FollowerTicket, Funds, LinkId, Lots, MasterPending,
    MasterPosition, MasterTicket, Micros, PendingKind, Price, Quote, Side, Symbol, SymbolSpec,
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
    /// When the broker opened or took it.
    pub opened_at: Micros,
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
            opened_at: p.opened_at,
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
            opened_at: o.placed_at,
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
/// the price; a terminal pair never gets an action; a copy that is not known is only ever closed.
/// Not covered: history, duplicates, orphans. Those need complete reads: [`crate::plan`].
pub fn plan_ticket(input: &TicketInput<'_>) -> TicketDecision {
    let mut decided = Decided::default();
    match (input.pair, input.copy) {
        (Some(pair), _) if pair.state.is_terminal() => {}
        (Some(pair), Some(copy)) => {
            let base =
                Base { lots_at_open: copy.lots, master_lots_at_open: pair.master_lots_at_open };
            let facts = bind(pair, &copy, FoundBy::Ticket, base, &mut decided);
            manage(input.rules, input.wanted, &facts, &copy, &input.market, &mut decided);
        }
        (Some(pair), None) => manage_unread(pair, input.wanted, &mut decided),
        (None, _) => {
            if let Some(view) = input.wanted {
                decide_open(input.rules, view, &input.market).put(
                    input.rules,
                    view,
                    &input.market,
                    &mut decided,
                );
            }
        }
    }
    if input.rules.paused {
        decided.keep_facts();
    }
    decided.into_decision(input.rules.link, input.ticket)
}

/// Steps and waits of one ticket, while they are being decided.
#[derive(Debug, Default)]
pub(crate) struct Decided {
    pub(crate) steps: Vec<CopyStep>,
    pub(crate) waiting: Option<WaitReason>,
}

impl Decided {
    pub(crate) fn step(&mut self, step: CopyStep) {
        self.steps.push(step);
    }

    /// The first reason counts: it is what stands in the way.
    pub(crate) fn wait(&mut self, why: WaitReason) {
        self.waiting.get_or_insert(why);
    }

    /// Leaves out what a paused link does not do; says whether there was anything.
    pub(crate) fn keep_facts(&mut self) -> bool {
        let before = self.steps.len();
        self.steps.retain(CopyStep::is_fact);
        let is_held_back = self.steps.len() < before;
        if is_held_back {
            self.wait(WaitReason::LinkPaused);
        }
        is_held_back
    }

    fn into_decision(self, link: LinkId, master_ticket: MasterTicket) -> TicketDecision {
        let Decided { steps, waiting } = self;
        let action = (!steps.is_empty()).then_some(CopyAction { link, master_ticket, steps });
        TicketDecision { action, waiting }
    }
}

/// The two volumes that a copy's target is computed from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Base {
    pub(crate) lots_at_open: Lots,
    pub(crate) master_lots_at_open: Lots,
}

/// What decisions about an open copy need of its pair, whether it has a row yet or not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    pub(crate) is_closing: bool,
    pub(crate) side: Side,
    pub(crate) master_side: Side,
    pub(crate) base: Base,
    pub(crate) rejected: Rejected,
}

/// Records what a pair does not say yet of its copy: a ticket, a new ticket, a fill.
pub(crate) fn bind(
    pair: &Pair,
    copy: &CopyView<'_>,
    found_by: FoundBy,
    read: Base,
    decided: &mut Decided,
) -> Facts {
    let is_fill = pair.is_pending && copy.pending.is_none() && pair.state != PairState::Sending;
    let is_unanswered = pair.state == PairState::Sending || pair.follower_ticket.is_none();
    let base = match pair.lots_at_open {
        Some(lots_at_open) if !is_unanswered && !is_fill => {
            Base { lots_at_open, master_lots_at_open: pair.master_lots_at_open }
        }
        Some(_) | None => read,
    };
    let facts = Facts {
        is_closing: pair.state == PairState::Closing,
        side: copy.side,
        master_side: pair.master_side,
        base,
        rejected: pair.rejected,
    };
    // A row without a volume, or that says something else than the tag, is corrected as well.
    let is_as_read =
        copy.side == pair.side && *copy.symbol == pair.symbol && pair.lots_at_open.is_some();
    match pair.follower_ticket {
        Some(from) if !is_unanswered && !is_fill && is_as_read => {
            if from != copy.ticket {
                decided.step(CopyStep::RebindCopy { from, to: copy.ticket, found_by });
            }
        }
        Some(_) | None => {
            let found_by = if is_fill { FoundBy::Fill } else { found_by };
            decided.step(adopt(copy, found_by, pair.master_side, facts.base));
        }
    }
    facts
}

/// The step that records a copy.
pub(crate) fn adopt(
    copy: &CopyView<'_>,
    found_by: FoundBy,
    master_side: Side,
    base: Base,
) -> CopyStep {
    CopyStep::AdoptCopy {
        ticket: copy.ticket,
        found_by,
        symbol: copy.symbol.clone(),
        side: copy.side,
        master_side,
        lots_at_open: base.lots_at_open,
        master_lots_at_open: base.master_lots_at_open,
        is_pending: copy.pending.is_some(),
        opened_at: copy.opened_at,
    }
}

/// An open copy: close it, or bring its stops and its volume to where they should be.
pub(crate) fn manage(
    rules: &LinkRules,
    wanted: Option<MasterView<'_>>,
    facts: &Facts,
    copy: &CopyView<'_>,
    market: &Market<'_>,
    decided: &mut Decided,
) {
    let Some(view) = wanted else {
        let cause =
            if facts.is_closing { CloseCause::ClosingResumed } else { CloseCause::MasterClosed };
        return decided.step(end_copy(copy.ticket, copy.pending.is_some(), cause));
    };
    let end = if facts.is_closing {
        Some(CloseCause::ClosingResumed)
    } else if view.side() != facts.master_side {
        Some(CloseCause::MasterReversed)
    } else if rules.mode == LinkMode::CloseOnly && copy.pending.is_some() {
        Some(CloseCause::LinkClosesOnly)
    } else {
        None
    };
    if let Some(cause) = end {
        return decided.step(end_copy(copy.ticket, copy.pending.is_some(), cause));
    }
    let spec = market.symbols.get(copy.symbol);
    let Some((spec, point)) = spec.and_then(|spec| Some((spec, point_of(spec)?))) else {
        return decided.wait(WaitReason::SpecUnknown);
    };
    match copy.pending {
        Some(_) => manage_pending(rules, view, facts, copy, spec, decided),
        None => {
            if rules.copy_stops {
                manage_stops(view, facts, copy, (spec, point), market, decided);
            }
            manage_volume(view, facts, copy, spec, decided);
        }
    }
}

/// The order that ends a copy.
pub(crate) fn end_copy(ticket: FollowerTicket, is_pending: bool, cause: CloseCause) -> CopyStep {
    if is_pending {
        CopyStep::CancelPending { ticket, cause }
    } else {
        CopyStep::CloseCopy { ticket, cause }
    }
}

fn manage_stops(
    view: MasterView<'_>,
    facts: &Facts,
    copy: &CopyView<'_>,
    (spec, point): (&SymbolSpec, Decimal),
    market: &Market<'_>,
    decided: &mut Decided,
) {
    let wanted = wanted_stops(view, facts.side != facts.master_side, spec);
    if !stops_differ(wanted, copy.stops, point) {
        return;
    }
    let reference = market_reference(copy.side, market.quotes.get(copy.symbol), market);
    let (stops, is_all) = settable(wanted, copy.stops, copy.side, reference, spec);
    if !is_all {
        decided.wait(WaitReason::StopsTooClose);
    }
    if !stops_differ(stops, copy.stops, point) {
        return;
    }
    if facts.rejected.stops == Some(stops) {
        return decided.wait(WaitReason::StopsRefused);
    }
    decided.step(CopyStep::ModifyCopy { ticket: copy.ticket, stops });
}

fn manage_volume(
    view: MasterView<'_>,
    facts: &Facts,
    copy: &CopyView<'_>,
    spec: &SymbolSpec,
    decided: &mut Decided,
) {
    let Base { mut lots_at_open, master_lots_at_open } = facts.base;
    if planted::is(Bug::P15) {
        lots_at_open = copy.lots; // the master's share of what is left
    }
    let target = target_lots(lots_at_open, master_lots_at_open, view.lots(), spec);
    let lots = match surplus(copy.lots, target, spec) {
        Surplus::None => return,
        Surplus::TooSmall => return decided.wait(WaitReason::ReduceTooSmall),
        Surplus::Close(lots) => lots,
    };
    let Some(target) = copy.lots.minus(lots) else { return };
    if facts.rejected.target == Some(target) {
        return decided.wait(WaitReason::ReduceRefused);
    }
    decided.step(CopyStep::ReduceCopy { ticket: copy.ticket, lots, target });
}

/// A copy of which only the ticket is known can be ended, and nothing else.
fn manage_unread(pair: &Pair, wanted: Option<MasterView<'_>>, decided: &mut Decided) {
    let Some(ticket) = pair.follower_ticket else {
        return decided.wait(WaitReason::AnswerDue);
    };
    let cause = match wanted {
        _ if pair.state == PairState::Closing => CloseCause::ClosingResumed,
        None => CloseCause::MasterClosed,
        Some(view) if view.side() != pair.master_side => CloseCause::MasterReversed,
        Some(_) => return decided.wait(WaitReason::CopyNotRead),
    };
    decided.step(end_copy(ticket, pair.is_pending, cause));
}

/// What becomes of a trade or order of the master that has no copy.
#[derive(Debug)]
pub(crate) enum OpenDecision {
    /// This step opens or places its copy.
    Open(CopyStep),
    /// It is not copied, for good.
    Skip(SkipReason),
    /// It is not copied now.
    Wait(WaitReason),
}

impl OpenDecision {
    /// Adds what was decided.
    pub(crate) fn put(
        self,
        rules: &LinkRules,
        view: MasterView<'_>,
        market: &Market<'_>,
        decided: &mut Decided,
    ) {
        match self {
            OpenDecision::Open(step) => decided.step(step),
            OpenDecision::Skip(reason) => decided.step(skip(rules, view, market, reason)),
            OpenDecision::Wait(why) => decided.wait(why),
        }
    }
}

/// The step that records a skip.
pub(crate) fn skip(
    rules: &LinkRules,
    view: MasterView<'_>,
    market: &Market<'_>,
    reason: SkipReason,
) -> CopyStep {
    let mapped = rules.follower_spec(view.symbol(), market.symbols).map(|spec| &spec.symbol);
    CopyStep::SkipOpen {
        reason,
        symbol: mapped.unwrap_or(view.symbol()).clone(),
        side: copy_side(rules, view.side()),
        master_side: view.side(),
        master_lots: view.lots(),
    }
}

/// Direction of the copy of a trade of this direction.
pub(crate) fn copy_side(rules: &LinkRules, master_side: Side) -> Side {
    if rules.reverse { master_side.opposite() } else { master_side }
}

/// The rules that no price and no volume can change. None: the trade may be copied.
pub(crate) fn gate(rules: &LinkRules, view: MasterView<'_>) -> Option<OpenDecision> {
    if view.is_copy() {
        return Some(OpenDecision::Skip(SkipReason::IsACopy));
    }
    let is_early = !rules.sync_existing && view.opened_at() < rules.copy_from;
    // An order that is not placed gets no final answer here: its fill is a trade of its own time.
    match view {
        MasterView::Position(_) if rules.mode == LinkMode::CloseOnly => {
            Some(OpenDecision::Skip(SkipReason::CloseOnly))
        }
        MasterView::Position(_) if is_early => Some(OpenDecision::Skip(SkipReason::BeforeCopyFrom)),
        MasterView::Pending(_) if rules.mode == LinkMode::CloseOnly => {
            Some(OpenDecision::Wait(WaitReason::PendingCloseOnly))
        }
        MasterView::Pending(_) if !rules.copy_pendings => {
            Some(OpenDecision::Wait(WaitReason::PendingsNotCopied))
        }
        MasterView::Pending(_) if is_early => {
            Some(OpenDecision::Wait(WaitReason::PendingBeforeCopyFrom))
        }
        MasterView::Position(_) | MasterView::Pending(_) => None,
    }
}

/// Open, place, skip or wait: the decision about a trade that has no copy and never had one.
pub(crate) fn decide_open(
    rules: &LinkRules,
    view: MasterView<'_>,
    market: &Market<'_>,
) -> OpenDecision {
    if let Some(decision) = gate(rules, view) {
        return decision;
    }
    let decision = match view {
        MasterView::Position(position) => {
            open_position(rules, position, market).map(OpenDecision::Open)
        }
        MasterView::Pending(order) => place_pending(rules, order, market),
    };
    decision.unwrap_or_else(OpenDecision::Skip)
}

fn open_position(
    rules: &LinkRules,
    position: &MasterPosition,
    market: &Market<'_>,
) -> Result<CopyStep, SkipReason> {
    let view = MasterView::Position(position);
    let spec = usable_spec(rules, view, market)?;
    let side = copy_side(rules, position.side);
    let quote = market.quotes.get(&spec.symbol);
    let late = is_late(position.opened_at, market);
    if late && rules.mode == LinkMode::CopyUntagged {
        // A copy of it may be there, and nothing at the broker would say so.
        return Err(SkipReason::Untaggable);
    }
    if late {
        check_late_open(&LateOpen {
            side,
            open_price: position.open_price,
            quote,
            spec,
            slippage_points: rules.slippage_points,
            now: market.now,
            quote_age_max: market.limits.quote_age_max,
        })?;
    }
    let lots = size_of(rules, view, spec, market)?;
    let stops = if rules.copy_stops {
        let wanted = wanted_stops(view, rules.reverse, spec);
        settable(wanted, Stops::default(), side, market_reference(side, quote, market), spec).0
    } else {
        Stops::default()
    };
    Ok(CopyStep::OpenCopy {
        symbol: spec.symbol.clone(),
        side,
        master_side: position.side,
        lots,
        master_lots: position.lots,
        stops,
        late,
    })
}

/// The open is older than the live path takes; the price rule decides (H32, S6).
pub(crate) fn is_late(opened_at: Micros, market: &Market<'_>) -> bool {
    market.now.since(opened_at) > market.limits.late_after
}

/// The follower's symbol, if its orders can be tagged and its prices computed with.
pub(crate) fn usable_spec<'a>(
    rules: &LinkRules,
    view: MasterView<'_>,
    market: &Market<'a>,
) -> Result<&'a SymbolSpec, SkipReason> {
    tag::check_link(rules.link).map_err(|_| SkipReason::Untaggable)?;
    let spec = rules.follower_spec(view.symbol(), market.symbols)?;
    point_of(spec).map(|_| spec).ok_or(SkipReason::BadSymbolSpec)
}

/// The volume that a copy would be opened with now.
pub(crate) fn size_of(
    rules: &LinkRules,
    view: MasterView<'_>,
    spec: &SymbolSpec,
    market: &Market<'_>,
) -> Result<Lots, SkipReason> {
    size_copy(
        rules,
        &SizeInput {
            master_lots_at_open: view.lots_at_open(),
            master_lots: view.lots(),
            master_contract_size: view.contract_size(),
            master_funds: market.master_funds,
            follower_funds: market.follower_funds,
            spec,
            now: market.now,
            funds_age_max: market.limits.funds_age_max,
        },
    )
}
