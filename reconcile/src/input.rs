//! What a plan is made from: the rules of one link and complete reads of both sides.
//!
//! Inputs: rows of `copy_links`, the master's snapshot, the follower's snapshot, its history,
//! the pair rows, symbol specs and quotes of the follower's broker, and the instant.
//! Output: a [`ReconcileInput`], or the reason why these parts do not belong together.
//!
//! Invariants:
//! 1. Every list in an input is complete. A caller that could not read one has no input.
//! 2. The parts are about the same link, master and follower, and no other link of the
//!    follower has this link's magic.
//! 3. A ticket is in a list at most once, so the order of a list cannot matter.
//!
//! Not covered: whether the reads are newer than what was applied; the caller compares
//! [`crate::Basis`] with its own state before it executes (S12).

use crate::action::{HeldPlan, SkipReason};
use crate::pair::Pairs;
use crate::tag;
use rust_decimal::Decimal;
use schemas::{
    AccountId, AccountSnapshot, ClosedTrade, FollowerTicket, LinkId, Lots, Magic, MasterSnapshot,
    MasterTicket, Micros, Quote, Symbol, SymbolSpec,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How one link copies: one row of `copy_links`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkRules {
    /// The link.
    pub link: LinkId,
    /// Whose trades are copied.
    pub master: AccountId,
    /// Onto which account.
    pub follower: AccountId,
    /// What marks this link's orders at the follower's broker; of no other link there.
    pub magic: Magic,
    /// Trades that the master opened before this instant are not copied.
    pub copy_from: Micros,
    /// Copies them all the same, under the late-open rule.
    pub sync_existing: bool,
    /// Whether new copies are opened.
    pub mode: LinkMode,
    /// Nothing is ordered and nothing refused, whatever the mode; what is so is still written down.
    /// Beside the mode, so that a pause changes nothing of what is recognised.
    pub paused: bool,
    /// How the volume of a copy follows from the master's.
    pub sizing: Sizing,
    /// What happens to a volume under the broker's smallest.
    pub below_min: BelowMin,
    /// What happens to a volume over the broker's largest.
    pub above_max: AboveMax,
    /// Scales by the two contract sizes, so that the notional is copied and not the lots.
    pub align_contract: bool,
    /// Largest distance of a late open from the master's open price, in the follower's points.
    pub slippage_points: u32,
    /// Copies stop loss and take profit.
    pub copy_stops: bool,
    /// Copies pending orders; otherwise their fills are copied as trades.
    pub copy_pendings: bool,
    /// Copies in the other direction, with the stops exchanged.
    pub reverse: bool,
    /// Master symbol to follower symbol, where the names differ.
    pub symbol_map: BTreeMap<Symbol, Symbol>,
    /// What the follower's broker appends to symbol names; may be empty.
    pub symbol_suffix: String,
}

/// Whether a link opens new copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkMode {
    /// Opens, changes and closes.
    Copy,
    /// The same at a broker that does not keep our tags (H53): a copy is known by its row alone,
    /// so nothing is opened late and nothing adopted that no row speaks of.
    CopyUntagged,
    /// Changes and closes what is open; new trades are skipped for good, waiting orders cancelled.
    CloseOnly,
}

/// How the volume of a copy follows from the master's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizing {
    /// Master volume times this.
    Multiplier(Decimal),
    /// Always this, in lots of the follower's symbol.
    FixedLots(Lots),
    /// Master volume times this times (follower balance / master balance).
    BalanceRatio(Decimal),
    /// Master volume times this times (follower equity / master equity).
    EquityRatio(Decimal),
}

/// What happens to a volume under the broker's smallest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BelowMin {
    /// The trade is not copied.
    Skip,
    /// The smallest volume is used: the one case in which a volume is rounded up.
    UseMin,
}

/// What happens to a volume over the broker's largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AboveMax {
    /// The trade is not copied.
    Skip,
    /// The largest volume is used.
    Clamp,
}

impl LinkRules {
    /// What the follower's broker says of the symbol that a master's symbol is copied to.
    ///
    /// Order: the explicit map, else name plus suffix, else the same name. A map entry that
    /// the follower does not know is an error and does not fall through to the name.
    pub fn follower_spec<'s>(
        &self,
        symbol: &Symbol,
        specs: &'s BTreeMap<Symbol, SymbolSpec>,
    ) -> Result<&'s SymbolSpec, SkipReason> {
        if let Some(mapped) = self.symbol_map.get(symbol) {
            return specs.get(mapped).ok_or(SkipReason::SymbolUnmapped);
        }
        if !self.symbol_suffix.is_empty() {
            let mut name = String::with_capacity(symbol.as_str().len() + self.symbol_suffix.len());
            name.push_str(symbol.as_str());
            name.push_str(&self.symbol_suffix);
            if let Some(spec) = Symbol::new(name).ok().and_then(|name| specs.get(&name)) {
                return Ok(spec);
            }
        }
        specs.get(symbol).ok_or(SkipReason::SymbolUnmapped)
    }

    /// The follower's symbol for a master's symbol.
    pub fn follower_symbol(
        &self,
        symbol: &Symbol,
        specs: &BTreeMap<Symbol, SymbolSpec>,
    ) -> Result<Symbol, SkipReason> {
        self.follower_spec(symbol, specs).map(|spec| spec.symbol.clone())
    }
}

/// The waits and ages that decisions depend on, each with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// So long after it left an order may still be carried out. One that is nowhere to be found is
    /// given up only when older (H42), and what cannot be taken back, as a partial close cannot, is
    /// not asked for a second time before. 25 s: fence and settle time of DESIGN §4.
    pub delivery_max: Duration,
    /// Oldest quote that a late open may be judged by. 3 s (H58).
    pub quote_age_max: Duration,
    /// Oldest funds that a ratio may be computed from. 30 s (case 49).
    pub funds_age_max: Duration,
    /// From this age on an open is late and falls under the price rule. 5 s (H32, S6).
    pub late_after: Duration,
    /// How far the brokers' and the publisher's clocks may be apart where their times are
    /// compared. 2 s: chosen, as node clocks are set by NTP and brokers print whole seconds.
    pub clock_skew: Duration,
    /// Time between the two reads that confirm a held plan. 2 s (H41).
    pub second_look_after: Duration,
    /// This many absences at once are always believed. 3 (H41).
    pub absent_max: usize,
    /// Beyond that, this share of a link's pairs, in percent. 30 (H41).
    pub absent_max_percent: usize,
}

impl Limits {
    /// So long an order may be on its way before it is carried out, by clocks that differ.
    pub fn longest_delivery(&self) -> Duration {
        self.delivery_max + self.clock_skew
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            delivery_max: Duration::from_secs(25),
            quote_age_max: Duration::from_secs(3),
            funds_age_max: Duration::from_secs(30),
            late_after: Duration::from_secs(5),
            clock_skew: Duration::from_secs(2),
            second_look_after: Duration::from_secs(2),
            absent_max: 3,
            absent_max_percent: 30,
        }
    }
}

/// Every finished trade of the follower since an instant: a complete list, or it does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowerHistory {
    /// The list is complete from here on, by the broker's clock brought to UTC.
    pub since: Micros,
    /// The finished trades and finished parts of trades.
    pub trades: Vec<ClosedTrade>,
}

/// The parts of an input, as the caller has read them.
#[derive(Debug, Clone, Copy)]
pub struct InputParts<'a> {
    /// How the link copies.
    pub rules: &'a LinkRules,
    /// The master at (epoch, seq).
    pub master: &'a MasterSnapshot,
    /// The follower after its session's sync mark.
    pub follower: &'a AccountSnapshot,
    /// What the follower finished; [`history_needed_since`] says how far it has to reach.
    pub history: &'a FollowerHistory,
    /// Every live pair of the link, and its ended ones since `history.since` at least.
    pub pairs: &'a Pairs,
    /// Every symbol of the follower's broker.
    pub symbols: &'a BTreeMap<Symbol, SymbolSpec>,
    /// Latest quotes of the follower's broker; [`quotes_needed`] says of which symbols.
    pub quotes: &'a BTreeMap<Symbol, Quote>,
    /// Magics of the other links of this follower.
    pub other_magics: &'a BTreeSet<Magic>,
    /// Master tickets whose slot is taken: an order is in flight, the reads may be older than it.
    pub busy: &'a BTreeSet<MasterTicket>,
    /// Master tickets of unanswered orders that may be carried out after the read began, by the
    /// caller's own count of time. Their row's age counts beside it: it is of a wall clock, which
    /// can be set.
    pub on_the_road: &'a BTreeSet<MasterTicket>,
    /// What an earlier plan held, where this one is its second look.
    pub confirmed: Option<&'a HeldPlan>,
    /// The instant.
    pub now: Micros,
    /// Waits and ages.
    pub limits: &'a Limits,
}

/// Parts that belong together. Only complete reads make one.
#[derive(Debug, Clone, Copy)]
pub struct ReconcileInput<'a> {
    pub(crate) parts: InputParts<'a>,
}

/// Why parts do not make an input. The caller fixes its reads; nothing is planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// A part is about another account.
    #[error("{part} is of account {got}, the link's {part} is account {want}")]
    WrongAccount {
        /// `master` or `follower`.
        part: &'static str,
        /// What the link says.
        want: AccountId,
        /// What the part says.
        got: AccountId,
    },
    /// A pair row belongs to another link.
    #[error("pair of master ticket {ticket} is of link {got}, planned is link {want}")]
    WrongLink {
        /// The pair's master ticket.
        ticket: MasterTicket,
        /// The link that is planned.
        want: LinkId,
        /// The pair's link.
        got: LinkId,
    },
    /// A second link of the follower has the same magic, so its copies cannot be told apart (H54).
    #[error("magic {0} of this link is also the magic of another link of the follower")]
    MagicShared(Magic),
    /// A broker's list names a ticket twice: it was not read in one piece.
    #[error("{list} name follower ticket {ticket} twice")]
    TicketTwice {
        /// `positions` or `pendings`.
        list: &'static str,
        /// The ticket.
        ticket: FollowerTicket,
    },
    /// The link's id does not fit into a tag.
    #[error(transparent)]
    Tag(#[from] tag::TagError),
}

impl<'a> ReconcileInput<'a> {
    /// Checks that the parts belong together.
    pub fn new(parts: InputParts<'a>) -> Result<Self, InputError> {
        let rules = parts.rules;
        tag::check_link(rules.link)?;
        same_account("master", rules.master, parts.master.account)?;
        same_account("follower", rules.follower, parts.follower.account)?;
        if parts.other_magics.contains(&rules.magic) {
            return Err(InputError::MagicShared(rules.magic));
        }
        for pair in parts.pairs.rows() {
            if pair.link != rules.link {
                let (ticket, got) = (pair.master_ticket, pair.link);
                return Err(InputError::WrongLink { ticket, want: rules.link, got });
            }
        }
        once("positions", parts.follower.positions.iter().map(|p| p.ticket))?;
        once("pendings", parts.follower.pendings.iter().map(|o| o.ticket))?;
        Ok(Self { parts })
    }
}

fn same_account(part: &'static str, want: AccountId, got: AccountId) -> Result<(), InputError> {
    if want == got { Ok(()) } else { Err(InputError::WrongAccount { part, want, got }) }
}

fn once(
    list: &'static str,
    tickets: impl Iterator<Item = FollowerTicket>,
) -> Result<(), InputError> {
    let mut seen = BTreeSet::new();
    for ticket in tickets {
        if !seen.insert(ticket) {
            return Err(InputError::TicketTwice { list, ticket });
        }
    }
    Ok(())
}

/// How far back the follower's history has to reach, so that no open of this master is held
/// back for want of it: the earliest of the master's trades and of the orders in flight, less
/// the clock skew. Older trades that are before `copy_from` are skipped and need none.
pub fn history_needed_since(
    rules: &LinkRules,
    master: &MasterSnapshot,
    pairs: &Pairs,
    now: Micros,
    limits: &Limits,
) -> Micros {
    let positions = master
        .book
        .positions
        .values()
        .filter(|p| rules.sync_existing || p.opened_at >= rules.copy_from)
        .map(|p| p.opened_at);
    let pendings = master.book.pendings.values().map(|o| o.placed_at);
    let sent = pairs.rows().filter(|p| p.state.is_live()).filter_map(|p| p.sent_at);
    let earliest = positions.chain(pendings).chain(sent).min().unwrap_or(now).min(now);
    Micros(earliest.0.saturating_sub(limits.clock_skew.as_micros() as i64))
}

/// The follower's symbols of which a quote is looked at: every symbol that a trade or order of
/// the master is copied to. A late open without a fresh one is skipped for good.
pub fn quotes_needed(
    rules: &LinkRules,
    master: &MasterSnapshot,
    symbols: &BTreeMap<Symbol, SymbolSpec>,
) -> BTreeSet<Symbol> {
    let positions = master.book.positions.values().map(|p| &p.symbol);
    let pendings = master.book.pendings.values().map(|o| &o.symbol);
    positions.chain(pendings).filter_map(|s| rules.follower_symbol(s, symbols).ok()).collect()
}
