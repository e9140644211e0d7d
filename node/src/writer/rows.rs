//! The rows that a node writes about its followers.
//!
//! Plain data. Every instant is in microseconds UTC, every volume in lots of
//! its symbol, every token the lease token under which the fact was found.

use reconcile::{Pair, PairId, Volumes};
use schemas::{
    AccountId, FollowerTicket, Funds, LinkId, Lots, MasterTicket, Micros, Price, Symbol, Token,
};
use std::time::Duration;
use uuid::Uuid;

/// Longest free text of a row in characters; the tables check the same number.
pub const TEXT_CHARS_MAX: usize = 300;

/// One pair as its owner knows it now.
///
/// A row says everything, so that any version of it can be the first to reach the table. A row
/// that says `Closed` is only for an end that the broker confirmed for this follower ticket: it
/// is believed from a former owner as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairRow {
    /// The pair; among rows of one token the highest version wins.
    pub pair: Pair,
    /// The account that holds the copy; it must be the link's follower.
    pub follower: AccountId,
    /// The lease token of that account.
    pub token: Token,
    /// When the copy was opened.
    pub opened_at: Option<Micros>,
    /// When the copy ended.
    pub closed_at: Option<Micros>,
    /// Price at which it ended.
    pub close_price: Option<Price>,
    /// What the broker takes as a volume of the copy's symbol, if its session has said it; a row that
    /// was written keeps it.
    pub volumes: Option<Volumes>,
}

impl PairRow {
    /// What orders the versions of a pair: a later tenure before a higher version.
    pub fn rank(&self) -> (Token, u64) {
        (self.token, self.pair.version)
    }

    /// The pair has ended; its row does not change again.
    pub fn has_ended(&self) -> bool {
        self.pair.state.is_terminal()
    }

    /// Id of this ended row where its pair's own row belongs to something else.
    pub fn apart_id(&self) -> PairId {
        let ticket = self.pair.follower_ticket.map_or(0, FollowerTicket::get);
        let own = Uuid::from_u128(self.pair.id.0);
        PairId(Uuid::new_v5(&own, &ticket.to_be_bytes()).as_u128())
    }
}

/// How an action of a follower ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventOutcome {
    /// The broker carried it out.
    Done,
    /// Decided not to act.
    Skipped,
    /// The broker refused.
    Rejected,
    /// It did not reach the broker.
    NotSent,
    /// It may or may not have happened.
    Unknown,
}

impl EventOutcome {
    schemas::words! {
        /// The word in the table.
        pub fn as_str(self) in WORDS {
            EventOutcome::Done => "done",
            EventOutcome::Skipped => "skipped",
            EventOutcome::Rejected => "rejected",
            EventOutcome::NotSent => "not_sent",
            EventOutcome::Unknown => "unknown",
        }
    }
}

/// One thing that a follower did or decided; never edited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyEvent {
    /// Drawn when the fact is found, so that sending it twice stores it once.
    pub id: Uuid,
    /// When it happened, by the node's clock.
    pub at: Micros,
    /// The lease token of the follower's account.
    pub token: Token,
    /// Which link.
    pub link: LinkId,
    /// Which account acted.
    pub follower: AccountId,
    /// The trade on the master.
    pub master_ticket: MasterTicket,
    /// The copy, if known.
    pub follower_ticket: Option<FollowerTicket>,
    /// `OrderRequest::action`, or a word of the follower's own (`adopt`, `mark_closed`): a-z and `_`.
    pub action: &'static str,
    /// How it ended.
    pub outcome: EventOutcome,
    /// Why, a word from a closed list or the broker's own text.
    pub reason: Option<String>,
    /// Symbol at the follower's broker.
    pub symbol: Option<Symbol>,
    /// Volume opened or closed.
    pub lots: Option<Lots>,
    /// Price of the fill.
    pub price: Option<Price>,
    /// From the master's callback to the order call.
    pub own_time: Option<Duration>,
    /// From the order call to the broker's answer.
    pub broker_time: Option<Duration>,
}

/// What an account's session says of itself now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountStatus {
    /// Which account.
    pub account: AccountId,
    /// The lease token of the account.
    pub token: Token,
    /// State of the session: `connecting`, `reconciling`, `copying`, ...: a-z and `_`.
    pub session: &'static str,
    /// The last error or what it waits for.
    pub detail: Option<String>,
    /// Money, if the broker has said it.
    pub funds: Option<Funds>,
    /// Open trades, if the list is complete.
    pub positions_open: Option<u32>,
    /// Pending orders, if the list is complete.
    pub pendings_open: Option<u32>,
    /// When this was true, by the node's clock.
    pub at: Micros,
}

/// Anything that can be pushed to the writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row {
    /// A pair, live or ended.
    Pair(PairRow),
    /// A fact for the history.
    CopyEvent(CopyEvent),
    /// The state of an account.
    AccountStatus(AccountStatus),
}

impl Row {
    /// The account whose owner writes this row.
    pub fn account(&self) -> AccountId {
        match self {
            Row::Pair(row) => row.follower,
            Row::CopyEvent(row) => row.follower,
            Row::AccountStatus(row) => row.account,
        }
    }

    /// The statement that writes this row.
    pub fn kind(&self) -> RowKind {
        match self {
            Row::Pair(row) if row.has_ended() => RowKind::PairEnded,
            Row::Pair(_) => RowKind::PairLive,
            Row::AccountStatus(_) => RowKind::Status,
            Row::CopyEvent(_) => RowKind::Event,
        }
    }
}

/// The kinds of row, in the order in which they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowKind {
    /// Pairs that have ended. First: a live row may take the place of one.
    PairEnded,
    /// Live pairs.
    PairLive,
    /// Account status.
    Status,
    /// History. Last: nothing is decided from it.
    Event,
}

impl RowKind {
    /// All kinds, in the order in which they are written.
    pub const ALL: [RowKind; 4] =
        [RowKind::PairEnded, RowKind::PairLive, RowKind::Status, RowKind::Event];

    schemas::words! {
        /// The word used as a label.
        pub fn as_str(self) in WORDS {
            RowKind::PairEnded => "pair_ended",
            RowKind::PairLive => "pair_live",
            RowKind::Status => "status",
            RowKind::Event => "event",
        }
    }
}

/// A foreign text as a table takes it: no control characters, at most [`TEXT_CHARS_MAX`].
pub(crate) fn bounded_text(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(TEXT_CHARS_MAX).collect()
}
