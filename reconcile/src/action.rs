//! What a plan consists of: one action per master ticket, each a short list of steps.
//!
//! Invariants:
//! 1. A plan has at most one action per (link, master ticket) (S14).
//! 2. The steps of an action are executed one after the other; none needs what an earlier one
//!    returns. An unknown outcome ends the action, a refusal does not concern its other steps.
//! 3. Every step that ends or refuses something names its reason from a closed list (S7). The
//!    evidence is the plan's [`Basis`]: the two complete reads it was made from.
//!
//! Not covered: sending. [`CopyStep::request`] says what is sent; the permit is the caller's.

use crate::input::LinkRules;
use crate::pair::Stops;
use crate::tag::{self, TagError};
use schemas::{
    Epoch, FollowerTicket, LinkId, Lots, MasterTicket, Micros, OrderRequest, PendingKind, Price,
    RejectClass, Seq, Side, Symbol,
};
use std::collections::BTreeSet;

/// A closed list of words for rows and metric labels.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Every value.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];
            /// Every word.
            pub const WORDS: &'static [&'static str] = &[$($word,)*];

            /// The word in rows and metric labels.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }

            /// The value of a word from a row.
            pub fn from_word(word: &str) -> Option<$name> {
                match word {
                    $($word => Some($name::$variant),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

words! {
    /// Why a trade is not copied. Final for its (link, master ticket) (H57, S19).
    SkipReason {
        /// The master opened it before the link's `copy_from`.
        BeforeCopyFrom = "before_copy_from",
        /// It is a copy itself (H65).
        IsACopy = "is_a_copy",
        /// The link only closes.
        CloseOnly = "close_only",
        /// The follower's broker has no such symbol (case 65).
        SymbolUnmapped = "symbol_unmapped",
        /// The broker's digits of the symbol are no price's digits.
        BadSymbolSpec = "bad_symbol_spec",
        /// Late, and the price left the link's slippage (case 10).
        LateOpenPriceMoved = "late_open_price_moved",
        /// Late, and nobody knows at which price the master opened (H58).
        UnknownOpenPrice = "unknown_open_price",
        /// Late, and the follower's broker has not quoted the symbol (H58).
        NoQuote = "no_quote",
        /// Late, and the last quote is older than 3 s (H58).
        StaleQuote = "stale_quote",
        /// The volume is under the broker's smallest (cases 46, 47).
        BelowMin = "below_min",
        /// The volume is over the broker's largest.
        AboveMax = "above_max",
        /// A ratio needs funds that one side does not say.
        UnknownFunds = "unknown_funds",
        /// A ratio needs funds above zero on both sides.
        NoFunds = "no_funds",
        /// The funds are older than 30 s (case 49).
        StaleEquity = "stale_equity",
        /// The accounts have different currencies and no rate is known, so a ratio of their
        /// funds would be wrong by that rate.
        CurrencyDiffers = "currency_differs",
        /// Contract alignment needs a contract size that one side does not say.
        UnknownContractSize = "unknown_contract_size",
        /// The volume is too large to compute with.
        NumberTooLarge = "number_too_large",
        /// Its copy was there and ended before this owner took over, or cannot be told from one
        /// that did (H43).
        EndedBeforeTakeover = "ended_before_takeover",
        /// The link's id does not fit into a tag; or it is late, and the broker keeps no tags, so
        /// that nobody can tell whether a copy is there (H53).
        Untaggable = "untaggable",
    }
}

words! {
    /// Why an order came to nothing. Final for its (link, master ticket).
    FailReason {
        /// It is older than the broker's longest answer and neither open nor in the history (H42).
        NeverArrived = "never_arrived",
        /// Requoted until the caller gave up.
        RejectedRequote = "rejected_requote",
        /// Refused for the time being until the caller gave up.
        RejectedLater = "rejected_later",
        /// The request was wrong.
        RejectedInvalid = "rejected_invalid",
        /// Not enough money.
        RejectedNoMoney = "rejected_no_money",
        /// The broker says that it was done already.
        RejectedAlreadySo = "rejected_already_so",
        /// Trading is disabled.
        RejectedDisabled = "rejected_disabled",
        /// The lease token was outdated.
        RejectedStaleToken = "rejected_stale_token",
    }
}

impl From<RejectClass> for FailReason {
    fn from(class: RejectClass) -> FailReason {
        match class {
            RejectClass::Requote => FailReason::RejectedRequote,
            RejectClass::Later => FailReason::RejectedLater,
            RejectClass::Invalid => FailReason::RejectedInvalid,
            RejectClass::NoMoney => FailReason::RejectedNoMoney,
            RejectClass::AlreadySo => FailReason::RejectedAlreadySo,
            RejectClass::Disabled => FailReason::RejectedDisabled,
            RejectClass::StaleToken => FailReason::RejectedStaleToken,
        }
    }
}

words! {
    /// Why a trade or order of the follower is closed or cancelled (S7).
    CloseCause {
        /// The master's trade is closed: an event says so, or a complete snapshot is without it.
        MasterClosed = "master_closed",
        /// The master's ticket is in the other direction now: another trade (H64).
        MasterReversed = "master_reversed",
        /// The pair was closing already and the copy is still there.
        ClosingResumed = "closing_resumed",
        /// The link only closes, and a waiting order would open.
        LinkClosesOnly = "link_closes_only",
        /// A second copy of one master ticket (H55).
        Duplicate = "duplicate",
        /// Our tag, no pair, and the master has no such trade (H56).
        OrphanMasterGone = "orphan_master_gone",
        /// Our tag or ticket, and the pair has ended (S5).
        OrphanPairEnded = "orphan_pair_ended",
        /// Somebody asked for it through the API.
        UserRequest = "user_request",
    }
}

words! {
    /// How it is known that a copy ended.
    EndedHow {
        /// The follower's history has it.
        History = "ended_in_history",
        /// A complete list of open trades is without it.
        Absent = "ended_absent",
        /// The broker's session reported it.
        Reported = "ended_reported",
    }
}

words! {
    /// How a trade was recognised as a copy.
    FoundBy {
        /// The pair names its ticket.
        Ticket = "ticket",
        /// Exact tag and magic.
        Tag = "tag",
        /// The broker renumbered it and says so, in a comment or the history (H51).
        Lineage = "lineage",
        /// The broker renumbered it without saying so; magic, symbol, side, open price and
        /// volumes match exactly one ended part (H51).
        Shape = "shape",
        /// No tag; magic, symbol, side, price and volume match exactly one master trade (H56).
        UniqueMatch = "unique_match",
        /// A waiting order became a trade.
        Fill = "fill",
    }
}

/// Why a pair ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndReason {
    /// It was not copied.
    Skipped(SkipReason),
    /// The order came to nothing.
    Failed(FailReason),
    /// We closed the copy.
    Closed(CloseCause),
    /// The copy ended without us: by its stops, by hand, by its broker.
    Ended(EndedHow),
}

impl EndReason {
    /// The word in rows and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            EndReason::Skipped(reason) => reason.as_str(),
            EndReason::Failed(reason) => reason.as_str(),
            EndReason::Closed(cause) => cause.as_str(),
            EndReason::Ended(how) => how.as_str(),
        }
    }

    /// The reason of a word from a row. The four lists share no word.
    pub fn from_word(word: &str) -> Option<EndReason> {
        SkipReason::from_word(word)
            .map(EndReason::Skipped)
            .or_else(|| FailReason::from_word(word).map(EndReason::Failed))
            .or_else(|| CloseCause::from_word(word).map(EndReason::Closed))
            .or_else(|| EndedHow::from_word(word).map(EndReason::Ended))
    }
}

/// One order to the executor, about one master ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyStep {
    /// The pair is this trade or order of the follower. Recorded, not sent.
    AdoptCopy {
        /// The copy.
        ticket: FollowerTicket,
        /// How it was recognised.
        found_by: FoundBy,
        /// Symbol of the copy.
        symbol: Symbol,
        /// Direction of the copy.
        side: Side,
        /// Direction of the master's trade.
        master_side: Side,
        /// Volume of the copy when it was opened.
        lots_at_open: Lots,
        /// The master's volume that `lots_at_open` stands for.
        master_lots_at_open: Lots,
        /// It waits as a pending order.
        is_pending: bool,
        /// When the broker opened or took it.
        opened_at: Micros,
    },
    /// The pair's copy has a new ticket. Recorded, not sent.
    RebindCopy {
        /// The ticket that the pair names.
        from: FollowerTicket,
        /// The ticket it has now.
        to: FollowerTicket,
        /// How it was recognised.
        found_by: FoundBy,
    },
    /// Open a copy at the market.
    OpenCopy {
        /// Symbol of the follower's broker.
        symbol: Symbol,
        /// Direction of the copy.
        side: Side,
        /// Direction of the master's trade.
        master_side: Side,
        /// Volume of the copy.
        lots: Lots,
        /// The master's volume now: what the copy's volume stands for.
        master_lots: Lots,
        /// Stops that may be set with it; one that the broker would refuse is left out.
        stops: Stops,
        /// The price rule of late opens was applied and holds.
        late: bool,
    },
    /// Close a copy completely.
    CloseCopy {
        /// The copy.
        ticket: FollowerTicket,
        /// Why.
        cause: CloseCause,
    },
    /// Close a part of a copy.
    ReduceCopy {
        /// The copy.
        ticket: FollowerTicket,
        /// How much is closed.
        lots: Lots,
        /// What is left: the target, not a share (H49).
        target: Lots,
    },
    /// Set both stops of a copy.
    ModifyCopy {
        /// The copy.
        ticket: FollowerTicket,
        /// Both stops; none removes.
        stops: Stops,
    },
    /// The copy ended. Recorded, not sent; a pair is made if there is none.
    MarkClosed {
        /// The copy as it was last known.
        ticket: FollowerTicket,
        /// Symbol of the copy.
        symbol: Symbol,
        /// Direction of the copy.
        side: Side,
        /// Direction of the master's trade.
        master_side: Side,
        /// The master's volume.
        master_lots: Lots,
        /// How it is known.
        how: EndedHow,
    },
    /// The order came to nothing. Recorded, not sent.
    MarkFailed {
        /// Why.
        reason: FailReason,
    },
    /// The trade is not copied, now or later. Recorded, not sent.
    SkipOpen {
        /// Why.
        reason: SkipReason,
        /// The follower's symbol, or the master's where it is not mapped.
        symbol: Symbol,
        /// Direction that the copy would have had.
        side: Side,
        /// Direction of the master's trade.
        master_side: Side,
        /// The master's volume.
        master_lots: Lots,
    },
    /// Close or cancel a second copy.
    CloseDuplicate {
        /// The copy that goes.
        ticket: FollowerTicket,
        /// It waits as a pending order.
        is_pending: bool,
    },
    /// Close or cancel a copy that nothing justifies.
    CloseOrphan {
        /// The copy.
        ticket: FollowerTicket,
        /// It waits as a pending order.
        is_pending: bool,
        /// Why.
        cause: CloseCause,
    },
    /// Place a pending order.
    PlacePending {
        /// Symbol of the follower's broker.
        symbol: Symbol,
        /// Limit or stop, and direction.
        kind: PendingKind,
        /// Direction of the master's order.
        master_side: Side,
        /// Volume of the copy.
        lots: Lots,
        /// The master's volume.
        master_lots: Lots,
        /// Price at which it triggers.
        price: Price,
        /// Stops of the trade it becomes.
        stops: Stops,
    },
    /// Change price and stops of a pending order.
    ModifyPending {
        /// The order.
        ticket: FollowerTicket,
        /// Price at which it triggers.
        price: Price,
        /// Both stops; none removes.
        stops: Stops,
    },
    /// Delete a pending order.
    CancelPending {
        /// The order.
        ticket: FollowerTicket,
        /// Why.
        cause: CloseCause,
    },
}

impl CopyStep {
    schemas::words! {
        /// The word in metrics and rows.
        pub fn as_str(&self) in WORDS {
            CopyStep::AdoptCopy { .. } => "adopt_copy",
            CopyStep::RebindCopy { .. } => "rebind_copy",
            CopyStep::OpenCopy { .. } => "open_copy",
            CopyStep::CloseCopy { .. } => "close_copy",
            CopyStep::ReduceCopy { .. } => "reduce_copy",
            CopyStep::ModifyCopy { .. } => "modify_copy",
            CopyStep::MarkClosed { .. } => "mark_closed",
            CopyStep::MarkFailed { .. } => "mark_failed",
            CopyStep::SkipOpen { .. } => "skip_open",
            CopyStep::CloseDuplicate { .. } => "close_duplicate",
            CopyStep::CloseOrphan { .. } => "close_orphan",
            CopyStep::PlacePending { .. } => "place_pending",
            CopyStep::ModifyPending { .. } => "modify_pending",
            CopyStep::CancelPending { .. } => "cancel_pending",
        }
    }

    /// The step writes down what is so already: nothing is sent, and nothing refused.
    pub fn is_fact(&self) -> bool {
        matches!(
            self,
            CopyStep::AdoptCopy { .. }
                | CopyStep::RebindCopy { .. }
                | CopyStep::MarkClosed { .. }
                | CopyStep::MarkFailed { .. }
        )
    }

    /// Why the step ends or refuses something, where it does; the word for a metric label.
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            CopyStep::CloseCopy { cause, .. }
            | CopyStep::CancelPending { cause, .. }
            | CopyStep::CloseOrphan { cause, .. } => Some(cause.as_str()),
            CopyStep::CloseDuplicate { .. } => Some(CloseCause::Duplicate.as_str()),
            CopyStep::MarkClosed { how, .. } => Some(how.as_str()),
            CopyStep::MarkFailed { reason } => Some(reason.as_str()),
            CopyStep::SkipOpen { reason, .. } => Some(reason.as_str()),
            CopyStep::AdoptCopy { found_by, .. } | CopyStep::RebindCopy { found_by, .. } => {
                Some(found_by.as_str())
            }
            CopyStep::OpenCopy { .. }
            | CopyStep::ReduceCopy { .. }
            | CopyStep::ModifyCopy { .. }
            | CopyStep::PlacePending { .. }
            | CopyStep::ModifyPending { .. } => None,
        }
    }

    /// What is sent to the broker for this step; nothing for a step that is only recorded.
    pub fn request(
        &self,
        rules: &LinkRules,
        master_ticket: MasterTicket,
    ) -> Result<Option<OrderRequest>, TagError> {
        Ok(match self {
            CopyStep::OpenCopy { symbol, side, lots, stops, .. } => Some(OrderRequest::Open {
                symbol: symbol.clone(),
                side: *side,
                lots: *lots,
                stop_loss: stops.stop_loss,
                take_profit: stops.take_profit,
                magic: rules.magic,
                comment: tag::encode(rules.link, master_ticket)?.as_str().to_owned(),
            }),
            CopyStep::PlacePending { symbol, kind, lots, price, stops, .. } => {
                Some(OrderRequest::Place {
                    symbol: symbol.clone(),
                    kind: *kind,
                    lots: *lots,
                    price: *price,
                    stop_loss: stops.stop_loss,
                    take_profit: stops.take_profit,
                    magic: rules.magic,
                    comment: tag::encode(rules.link, master_ticket)?.as_str().to_owned(),
                })
            }
            CopyStep::CloseCopy { ticket, .. } => {
                Some(OrderRequest::Close { ticket: *ticket, lots: None })
            }
            CopyStep::ReduceCopy { ticket, lots, .. } => {
                Some(OrderRequest::Close { ticket: *ticket, lots: Some(*lots) })
            }
            CopyStep::CloseDuplicate { ticket, is_pending }
            | CopyStep::CloseOrphan { ticket, is_pending, .. } => Some(if *is_pending {
                OrderRequest::Cancel { ticket: *ticket }
            } else {
                OrderRequest::Close { ticket: *ticket, lots: None }
            }),
            CopyStep::ModifyCopy { ticket, stops } => Some(OrderRequest::Modify {
                ticket: *ticket,
                stop_loss: stops.stop_loss,
                take_profit: stops.take_profit,
            }),
            CopyStep::ModifyPending { ticket, price, stops } => Some(OrderRequest::ModifyPending {
                ticket: *ticket,
                price: *price,
                stop_loss: stops.stop_loss,
                take_profit: stops.take_profit,
            }),
            CopyStep::CancelPending { ticket, .. } => {
                Some(OrderRequest::Cancel { ticket: *ticket })
            }
            CopyStep::AdoptCopy { .. }
            | CopyStep::RebindCopy { .. }
            | CopyStep::MarkClosed { .. }
            | CopyStep::MarkFailed { .. }
            | CopyStep::SkipOpen { .. } => None,
        })
    }
}

/// What is to be done about one master ticket of one link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyAction {
    /// The link.
    pub link: LinkId,
    /// The master's trade or order.
    pub master_ticket: MasterTicket,
    /// In this order; never empty.
    pub steps: Vec<CopyStep>,
}

words! {
    /// Why nothing, or not everything, is done about a ticket now. It is planned again.
    WaitReason {
        /// The order may still be carried out (H42).
        AnswerDue = "answer_due",
        /// An order for it is in flight.
        SlotBusy = "slot_busy",
        /// The link is paused; what is to be done is done when it is not any more.
        LinkPaused = "link_paused",
        /// The follower's read is older than the order.
        ReadOlderThanOrder = "read_older_than_order",
        /// The follower's history does not reach back to when the master opened it.
        HistoryTooShort = "history_too_short",
        /// An unexplained trade with our magic may be its copy, so nothing is opened (H53).
        StrayMayBeCopy = "stray_may_be_copy",
        /// The copy's volume or stops are not known: read the account.
        CopyNotRead = "copy_not_read",
        /// A stop is nearer to the market than the broker allows (case 24).
        StopsTooClose = "stops_too_close",
        /// The broker refused these stops; they are sent again when they change (H60).
        StopsRefused = "stops_refused",
        /// The broker refused this partial close; it is sent again when the target changes.
        ReduceRefused = "reduce_refused",
        /// What is to be closed is less than the broker's smallest volume (H50).
        ReduceTooSmall = "reduce_too_small",
        /// The copy's symbol has no usable spec.
        SpecUnknown = "spec_unknown",
        /// The link copies no pending orders; the fill is copied.
        PendingsNotCopied = "pendings_not_copied",
        /// The pending order was placed before `copy_from`; its fill is judged by its own time.
        PendingBeforeCopyFrom = "pending_before_copy_from",
        /// The link only closes; the fill of the order is judged when it comes.
        PendingCloseOnly = "pending_close_only",
        /// The follower's market is already past the trigger price; the fill is copied.
        PendingPricePassed = "pending_price_passed",
    }
}

words! {
    /// Why a trade with our magic is left alone and reported (H56).
    StrayReason {
        /// Our magic and no tag: it may be anybody's who uses the same number.
        MagicOnly = "magic_only",
        /// Our magic and the tag of another link.
        OtherLinksTag = "other_links_tag",
    }
}

/// Something an operator should see; no action belongs to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    /// A ticket that waits.
    Waiting {
        /// The master's trade or order.
        ticket: MasterTicket,
        /// For what.
        why: WaitReason,
    },
    /// A trade or order of the follower that looks like ours and is not touched.
    ReportOrphan {
        /// The trade or order.
        ticket: FollowerTicket,
        /// Why it is left alone.
        why: StrayReason,
    },
}

/// The two reads that a plan was made from: the evidence of all its actions, and what the
/// caller compares with its own state before it executes (S12).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Basis {
    /// Incarnation of the master's publisher.
    pub epoch: Epoch,
    /// Last event that the master's snapshot contains.
    pub seq: Seq,
    /// When the master's snapshot was taken (publisher's clock).
    pub master_at: Micros,
    /// The follower's revision.
    pub follower_revision: u64,
    /// When the follower's read was complete (node's clock).
    pub follower_at: Micros,
    /// When the plan was made.
    pub planned_at: Micros,
}

/// From which list a ticket is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AbsentFrom {
    /// The master has no such trade, so its copy would be closed.
    Master,
    /// The follower has no such copy, so the pair would be marked closed.
    Follower,
    /// No live pair explains a copy, so it would be closed as an orphan.
    Pairs,
}

/// A plan that was not given out, because too much of it rests on absence (H41).
///
/// The caller reads both sides anew, at least `second_look_after` later, and passes this value
/// as `confirmed`. What is absent in both reads is believed then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldPlan {
    /// The link.
    pub link: LinkId,
    /// What is absent, and from where.
    pub absent: BTreeSet<(MasterTicket, AbsentFrom)>,
    /// How many tickets of the link the absence is measured by.
    pub of: usize,
    /// The reads.
    pub basis: Basis,
}

/// What makes the two states agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The reads that it was made from.
    pub basis: Basis,
    /// Ascending by master ticket, each ticket once. Empty while the plan is held.
    pub actions: Vec<CopyAction>,
    /// What waits or is left alone, ascending.
    pub notes: Vec<Note>,
    /// Set if the plan was held.
    pub held: Option<HeldPlan>,
}
