//! The pair: one master ticket on one link, and the trade that is its copy.
//!
//! Decides: what a pair becomes when a step is sent, carried out or refused. The node and the
//! tests use these functions, so a row and a model of it cannot differ.
//!
//! Invariants:
//! 1. States only go forward: Sending, Open, Closing, then one of Closed, Failed, Skipped.
//!    A terminal pair never changes again (S10).
//! 2. A pair's id is a function of link, master ticket and the first follower ticket that was
//!    known (none while the order is in flight). It stays when the broker renumbers (B43, H51).
//! 3. The version grows with every change.
//!
//! Not covered: writing rows, and who may write them.

use crate::action::{CopyAction, CopyStep, EndReason, EndedHow, FailReason};
use schemas::{
    FollowerTicket, LinkId, Lots, MasterTicket, Micros, OrderDone, Price, Rejection, Side, Symbol,
};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use uuid::Uuid;

/// Identity of a pair; as a number it is a version 5 UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PairId(pub u128);

/// Namespace of pair ids; drawn once, never changed.
const PAIR_NAMESPACE: Uuid = Uuid::from_u128(0x8d0c_3f0e_52a9_4f3b_9a67_1c0b_e2f4_7d15);

impl PairId {
    /// The id of the pair of a master ticket, by the follower ticket where one is known.
    pub fn new(link: LinkId, ticket: MasterTicket, first: Option<FollowerTicket>) -> PairId {
        let mut name = [0u8; 24];
        name[..8].copy_from_slice(&link.get().to_be_bytes());
        name[8..16].copy_from_slice(&ticket.get().to_be_bytes());
        // Zero is no ticket, so it can stand for "none yet".
        name[16..].copy_from_slice(&first.map_or(0, FollowerTicket::get).to_be_bytes());
        PairId(Uuid::new_v5(&PAIR_NAMESPACE, &name).as_u128())
    }
}

impl fmt::Display for PairId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Uuid::from_u128(self.0).fmt(f)
    }
}

/// Where a pair is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PairState {
    /// The order may have gone out; no ticket is known.
    Sending,
    /// The copy is open, or waits as a pending order.
    Open,
    /// A close or cancellation may have gone out.
    Closing,
    /// The copy ended.
    Closed,
    /// The order came to nothing.
    Failed,
    /// It was decided not to copy.
    Skipped,
}

impl PairState {
    /// Every state, in the order of life.
    pub const ALL: [PairState; 6] = [
        PairState::Sending,
        PairState::Open,
        PairState::Closing,
        PairState::Closed,
        PairState::Failed,
        PairState::Skipped,
    ];

    /// The word in rows and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            PairState::Sending => "sending",
            PairState::Open => "open",
            PairState::Closing => "closing",
            PairState::Closed => "closed",
            PairState::Failed => "failed",
            PairState::Skipped => "skipped",
        }
    }

    /// The state of a word from a row.
    pub fn from_word(word: &str) -> Option<PairState> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// Nothing follows any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, PairState::Closed | PairState::Failed | PairState::Skipped)
    }

    /// There is, or may be, something at the broker.
    pub fn is_live(self) -> bool {
        !self.is_terminal()
    }

    /// Whether a pair of this state may go to `next`; staying in a live state is a new version.
    pub fn may_become(self, next: PairState) -> bool {
        !self.is_terminal() && next.rank() >= self.rank()
    }

    fn rank(self) -> u8 {
        match self {
            PairState::Sending => 0,
            PairState::Open => 1,
            PairState::Closing => 2,
            PairState::Closed | PairState::Failed | PairState::Skipped => 3,
        }
    }
}

/// What a broker refused for good, so that it is not asked again until it would be something
/// else (H60, B45). Closes are never remembered here: nothing may hold back a close (case 23).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Rejected {
    /// Stops of the trade or order.
    pub stops: Option<Stops>,
    /// Trigger price of the order; refused together with `stops`.
    pub pending_price: Option<Price>,
    /// Target volume of a partial close.
    pub target: Option<Lots>,
}

/// Both stops of a trade or order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stops {
    /// Stop loss.
    pub stop_loss: Option<Price>,
    /// Take profit.
    pub take_profit: Option<Price>,
}

/// One master ticket on one link, and its copy. Volumes in lots, prices in the follower's symbol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    /// Identity; invariant 2.
    pub id: PairId,
    /// The link.
    pub link: LinkId,
    /// The master's trade or order.
    pub master_ticket: MasterTicket,
    /// Where it is in its life.
    pub state: PairState,
    /// The copy waits as a pending order, or was sent as one.
    pub is_pending: bool,
    /// The copy at the broker now.
    pub follower_ticket: Option<FollowerTicket>,
    /// Symbol of the copy.
    pub symbol: Symbol,
    /// Direction of the copy.
    pub side: Side,
    /// Direction of the master's trade when it was copied; differs from `side` on a reversed
    /// copy. Kept so that a change of the link's rules does not turn open copies over.
    pub master_side: Side,
    /// Volume that was filled, or asked for while the answer is due.
    pub lots_at_open: Option<Lots>,
    /// The master's volume when the copy was opened: what `lots_at_open` stands for.
    pub master_lots_at_open: Lots,
    /// When the order went out.
    pub sent_at: Option<Micros>,
    /// Why it ended.
    pub reason: Option<EndReason>,
    /// What the broker refused for good.
    pub rejected: Rejected,
    /// Grows with every change.
    pub version: u64,
}

impl Pair {
    /// It says which copy it is of, or there is none. The table takes no other rows.
    pub fn knows_its_copy(&self) -> bool {
        let may_lack_it = [PairState::Sending, PairState::Failed, PairState::Skipped];
        self.follower_ticket.is_some() || may_lack_it.contains(&self.state)
    }

    /// What the pair of an action's ticket is once a step of it is sent, or recorded where no
    /// order belongs to it. Nothing where the step changes no pair.
    pub fn on_sent(
        current: Option<&Pair>,
        action: &CopyAction,
        step: &CopyStep,
        now: Micros,
    ) -> Option<Pair> {
        if current.is_some_and(|pair| pair.state.is_terminal()) {
            return None;
        }
        match step {
            CopyStep::OpenCopy { symbol, side, master_side, lots, master_lots, .. } => {
                let mut pair = Pair::first(action, None, symbol, *side, *master_side, *master_lots);
                pair.lots_at_open = Some(*lots);
                pair.sent_at = Some(now);
                Some(pair)
            }
            CopyStep::PlacePending { symbol, kind, master_side, lots, master_lots, .. } => {
                let mut pair =
                    Pair::first(action, None, symbol, kind.side(), *master_side, *master_lots);
                pair.is_pending = true;
                pair.lots_at_open = Some(*lots);
                pair.sent_at = Some(now);
                Some(pair)
            }
            CopyStep::AdoptCopy {
                ticket,
                symbol,
                side,
                master_side,
                lots_at_open,
                master_lots_at_open,
                is_pending,
                opened_at,
                ..
            } => {
                let mut pair = current.cloned().unwrap_or_else(|| {
                    let copy = Some(*ticket);
                    Pair::first(action, copy, symbol, *side, *master_side, *master_lots_at_open)
                });
                pair.state = pair.state.max(PairState::Open);
                pair.follower_ticket = Some(*ticket);
                pair.symbol = symbol.clone();
                pair.side = *side;
                pair.is_pending = *is_pending;
                pair.lots_at_open = Some(*lots_at_open);
                pair.master_lots_at_open = *master_lots_at_open;
                pair.sent_at = pair.sent_at.or(Some(*opened_at));
                Some(pair.bumped(current))
            }
            CopyStep::RebindCopy { to, .. } => {
                let mut pair = current?.clone();
                pair.follower_ticket = Some(*to);
                Some(pair.bumped(current))
            }
            CopyStep::CloseCopy { .. } | CopyStep::CancelPending { .. } => {
                let mut pair = current?.clone();
                pair.state = PairState::Closing;
                Some(pair.bumped(current))
            }
            CopyStep::MarkClosed { ticket, symbol, side, master_side, master_lots, how } => {
                let mut pair = current.cloned().unwrap_or_else(|| {
                    let copy = Some(*ticket);
                    Pair::first(action, copy, symbol, *side, *master_side, *master_lots)
                });
                pair.follower_ticket = pair.follower_ticket.or(Some(*ticket));
                Some(pair.ended(PairState::Closed, EndReason::Ended(*how)))
            }
            CopyStep::MarkFailed { reason } => {
                Some(current?.ended(PairState::Failed, EndReason::Failed(*reason)))
            }
            CopyStep::SkipOpen { reason, symbol, side, master_side, master_lots } => {
                let pair = Pair::first(action, None, symbol, *side, *master_side, *master_lots);
                Some(pair.ended(PairState::Skipped, EndReason::Skipped(*reason)))
            }
            CopyStep::ReduceCopy { .. }
            | CopyStep::ModifyCopy { .. }
            | CopyStep::ModifyPending { .. }
            | CopyStep::CloseDuplicate { .. }
            | CopyStep::CloseOrphan { .. } => None,
        }
    }

    /// What this pair is once the broker has carried out a step.
    pub fn on_done(&self, step: &CopyStep, done: &OrderDone) -> Pair {
        let mut pair = self.clone();
        if self.state.is_terminal() {
            return pair;
        }
        match step {
            CopyStep::OpenCopy { lots, .. } => {
                pair.state = pair.state.max(PairState::Open);
                pair.follower_ticket = Some(done.ticket);
                pair.lots_at_open = Some(done.lots.unwrap_or(*lots));
            }
            CopyStep::PlacePending { .. } => {
                pair.state = pair.state.max(PairState::Open);
                pair.follower_ticket = Some(done.ticket);
            }
            CopyStep::CloseCopy { cause, .. } | CopyStep::CancelPending { cause, .. } => {
                return self.ended(PairState::Closed, EndReason::Closed(*cause));
            }
            CopyStep::ReduceCopy { .. } => {
                pair.follower_ticket = done.remainder.or(pair.follower_ticket);
                pair.rejected.target = None;
            }
            CopyStep::ModifyCopy { .. } | CopyStep::ModifyPending { .. } => {
                pair.rejected.stops = None;
                pair.rejected.pending_price = None;
            }
            CopyStep::AdoptCopy { .. }
            | CopyStep::RebindCopy { .. }
            | CopyStep::MarkClosed { .. }
            | CopyStep::MarkFailed { .. }
            | CopyStep::SkipOpen { .. }
            | CopyStep::CloseDuplicate { .. }
            | CopyStep::CloseOrphan { .. } => return pair,
        }
        pair.bumped(Some(self))
    }

    /// What this pair is once a close of its copy was filled in part: the rest, by its number now,
    /// still has to be closed.
    pub fn on_closed_in_part(&self, rest: FollowerTicket) -> Pair {
        if self.state.is_terminal() || self.follower_ticket == Some(rest) {
            return self.clone();
        }
        let pair = Pair { follower_ticket: Some(rest), ..self.clone() };
        pair.bumped(Some(self))
    }

    /// What this pair is once the caller takes a refusal as final. Refusals that pass (requote,
    /// later) are asked again by the caller and do not come here until it gives up.
    pub fn on_rejected(&self, step: &CopyStep, rejection: &Rejection) -> Pair {
        let mut pair = self.clone();
        if self.state.is_terminal() {
            return pair;
        }
        match step {
            CopyStep::OpenCopy { .. } | CopyStep::PlacePending { .. } => {
                let reason = FailReason::from(rejection.class);
                return self.ended(PairState::Failed, EndReason::Failed(reason));
            }
            CopyStep::ReduceCopy { target, .. } => pair.rejected.target = Some(*target),
            CopyStep::ModifyCopy { stops, .. } => pair.rejected.stops = Some(*stops),
            CopyStep::ModifyPending { price, stops, .. } => {
                pair.rejected.stops = Some(*stops);
                pair.rejected.pending_price = Some(*price);
            }
            // A refused close stays Closing and is planned again: the master has no trade there.
            CopyStep::CloseCopy { .. }
            | CopyStep::CancelPending { .. }
            | CopyStep::AdoptCopy { .. }
            | CopyStep::RebindCopy { .. }
            | CopyStep::MarkClosed { .. }
            | CopyStep::MarkFailed { .. }
            | CopyStep::SkipOpen { .. }
            | CopyStep::CloseDuplicate { .. }
            | CopyStep::CloseOrphan { .. } => return pair,
        }
        pair.bumped(Some(self))
    }

    /// The pair's copy ended at the broker, as its session reports.
    pub fn on_ended(&self, how: EndedHow) -> Pair {
        if self.state.is_terminal() {
            return self.clone();
        }
        self.ended(PairState::Closed, EndReason::Ended(how))
    }

    /// The copy is in the other direction than the master's trade.
    pub fn is_reversed(&self) -> bool {
        self.side != self.master_side
    }

    fn first(
        action: &CopyAction,
        ticket: Option<FollowerTicket>,
        symbol: &Symbol,
        side: Side,
        master_side: Side,
        master_lots: Lots,
    ) -> Pair {
        Pair {
            id: PairId::new(action.link, action.master_ticket, ticket),
            link: action.link,
            master_ticket: action.master_ticket,
            state: PairState::Sending,
            is_pending: false,
            follower_ticket: ticket,
            symbol: symbol.clone(),
            side,
            master_side,
            lots_at_open: None,
            master_lots_at_open: master_lots,
            sent_at: None,
            reason: None,
            rejected: Rejected::default(),
            version: 1,
        }
    }

    fn ended(&self, state: PairState, reason: EndReason) -> Pair {
        let mut pair = self.clone();
        pair.state = state;
        pair.reason = Some(reason);
        pair.bumped(Some(self))
    }

    fn bumped(mut self, from: Option<&Pair>) -> Pair {
        self.version = from.map_or(1, |pair| pair.version + 1);
        self
    }
}

/// Every pair row of a link that matters: complete, or it does not exist.
///
/// A unique index allows one live row per ticket. Should there be two, the one that is further
/// in its life decides, the copy of the other is a duplicate, and its row comes next.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pairs {
    /// Rows of a ticket: live ones first, then by progress and version, furthest first.
    by_ticket: BTreeMap<MasterTicket, Vec<Pair>>,
}

impl Pairs {
    /// Sorts complete rows. Of a row that is there more than once the newest version counts.
    pub fn new(rows: impl IntoIterator<Item = Pair>) -> Pairs {
        let mut newest: BTreeMap<PairId, Pair> = BTreeMap::new();
        for row in rows {
            match newest.get(&row.id) {
                Some(known) if !is_newer(&row, known) => {}
                Some(_) | None => {
                    newest.insert(row.id, row);
                }
            }
        }
        let mut by_ticket: BTreeMap<MasterTicket, Vec<Pair>> = BTreeMap::new();
        for row in newest.into_values() {
            by_ticket.entry(row.master_ticket).or_default().push(row);
        }
        for rows in by_ticket.values_mut() {
            rows.sort_by_key(|p| {
                let Pair { state, version, id, .. } = *p;
                (state.is_terminal(), Reverse(state.rank()), Reverse(version), id)
            });
        }
        Pairs { by_ticket }
    }

    /// The row that decides about a ticket: the live one, else the newest.
    pub fn main(&self, ticket: MasterTicket) -> Option<&Pair> {
        self.of(ticket).first()
    }

    /// Every row of a ticket, the deciding one first.
    pub fn of(&self, ticket: MasterTicket) -> &[Pair] {
        self.by_ticket.get(&ticket).map_or(&[], Vec::as_slice)
    }

    /// Every row.
    pub fn rows(&self) -> impl Iterator<Item = &Pair> {
        self.by_ticket.values().flatten()
    }

    /// Every ticket that has a row.
    pub fn tickets(&self) -> impl Iterator<Item = MasterTicket> + '_ {
        self.by_ticket.keys().copied()
    }

    /// Puts a changed row in the place of its older version.
    pub fn put(&mut self, row: Pair) {
        let mut rows: Vec<Pair> = self.by_ticket.remove(&row.master_ticket).unwrap_or_default();
        rows.push(row);
        let sorted = Pairs::new(rows);
        self.by_ticket.extend(sorted.by_ticket);
    }
}

/// Terminal wins over live, then the higher version (H70); the rest only makes it a total order.
fn is_newer(row: &Pair, known: &Pair) -> bool {
    (row.state.is_terminal(), row.version, row) > (known.state.is_terminal(), known.version, known)
}
