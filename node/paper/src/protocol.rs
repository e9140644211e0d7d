//! The words of the paper broker's protocol: one JSON object a line, over TCP.
//!
//! Decides nothing; it is the vocabulary of requests, answers and pushes. How a
//! line becomes a request, and how a malformed one is described, is in `wire.rs`.
//!
//! Invariants:
//! 1. Every request has an `id`; exactly one answer carries it. Pushes have none.
//! 2. Quantities are decimal text, times are microseconds UTC, as everywhere in Lockstep.
//! 3. A request with a field that is not known is refused, not read in part.
//!
//! Not covered: encryption; and passwords of drivers and auditors, whose names are believed.

use crate::faults::FaultSpec;
use crate::ledger::LedgerRow;
use schemas::{
    AccountId, BrokerPending, BrokerPosition, CloseReason, ClosedTrade, FollowerTicket, Funds,
    Lots, Micros, Money, NodeId, OrderDone, OrderRequest, PendingKind, Price, Quote, Rejection,
    Side, Symbol, SymbolSpec, Token,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest request line; a longer one is skipped and answered with an error. Chosen: a
/// declaration of 5,000 accounts fits.
pub const REQUEST_LINE_BYTES_MAX: usize = 1 << 20;
/// Longest line a client accepts from the broker. Chosen: a full account is 3 MB.
pub const ANSWER_LINE_BYTES_MAX: usize = 16 << 20;
/// Most trades plus pending orders in one `list` push.
pub const LIST_ITEMS_MAX: usize = 500;
/// Most entries in one page of an account's history or of the ledger.
pub const PAGE_ROWS_MAX: usize = 500;
/// Leverage of an account that declares none. Chosen: a usual retail account's.
pub const LEVERAGE_DEFAULT: u32 = 100;
/// Highest leverage that can be declared.
pub const LEVERAGE_MAX: u32 = 10_000;
/// Highest stop-out level that can be set, in percent.
pub const STOP_OUT_PERCENT_MAX: u32 = 1_000;
/// Most accounts in one page of `accounts` or `books`.
pub const PAGE_ACCOUNTS_MAX: usize = 200;

/// What is wrong with a request: the field, its value and the rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct FieldError {
    /// Path of the field in the request, such as `request.lots`; `line` for the whole line.
    pub field: String,
    /// The value as it was given, shortened; empty where there was none.
    pub value: String,
    /// What is wrong with it.
    pub text: String,
}

impl FieldError {
    /// An error about one field.
    pub fn new(field: impl Into<String>, value: impl ToString, text: impl Into<String>) -> Self {
        Self { field: field.into(), value: shorten(&value.to_string()), text: text.into() }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}: {}", self.field, self.value, self.text)
    }
}

/// At most 80 characters of a foreign text.
pub(crate) fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// The password of an account: it is never shown, and no answer repeats it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Password(String);

impl Password {
    /// Keeps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What a login may do. Only traders may need a password: the kind keeps mistakes away, not people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoginKind {
    /// Trades one account and hears of its changes.
    Trader,
    /// Declares accounts and symbols, feeds quotes, trades by hand, changes settings.
    Driver,
    /// Reads everything, changes nothing.
    Auditor,
}

/// How an account treats a partial close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Style {
    /// The ticket stays and holds less.
    Mt5,
    /// The closed part keeps the ticket and goes to the history; the rest gets a new ticket.
    Mt4,
    /// One trade a symbol: what is opened on the same side is added to it, on the other side
    /// taken from it, and more than it holds turns it over under the same ticket.
    Mt5Netting,
}

impl Style {
    /// Whether there is at most one trade a symbol.
    pub fn is_netting(self) -> bool {
        self == Style::Mt5Netting
    }

    /// Whether the rest of a partial close is a trade of its own, with a new number and another
    /// comment.
    pub fn renumbers(self) -> bool {
        self == Style::Mt4
    }
}

/// What the broker does to the comment of a new order, after cutting it to the length limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenComment {
    /// Keeps it.
    #[default]
    Keep,
    /// Empties it.
    Blank,
    /// Puts a text of its own in front, and cuts again.
    Prefix(String),
}

/// What the broker does to the comment when a stop closes the trade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CloseComment {
    /// Keeps it.
    Keep,
    /// Appends `[sl]` or `[tp]`, cutting the comment to make room.
    Suffix,
    /// Replaces it by `[sl]` or `[tp]`.
    Replace,
}

/// An account as a driver declares it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccountDecl {
    /// Its login.
    pub account: AccountId,
    /// Balance at the start, in `currency`.
    pub balance: Money,
    /// Currency code; printed, never converted.
    pub currency: Symbol,
    /// How a partial close looks.
    pub style: Style,
    /// What this account's group appends to every symbol, such as `.m`.
    #[serde(default)]
    pub suffix: String,
    /// Longest comment, in characters; absent means 31 for MT5 style and 27 for MT4 style.
    #[serde(default)]
    pub comment_max: Option<u32>,
    /// What happens to the comment of a new order.
    #[serde(default)]
    pub comment_open: OpenComment,
    /// What happens to it when a stop closes the trade; absent means `keep` for MT5 style
    /// (the opening deal keeps its comment) and `suffix` for MT4 style.
    #[serde(default)]
    pub comment_close: Option<CloseComment>,
    /// Margin of a trade is its value at its opening price divided by this; absent means 100.
    #[serde(default)]
    pub leverage: Option<u32>,
    /// Below this equity, in percent of the margin in use, trades are closed, the largest loss
    /// first; and an order that needs more margin than is free is refused. Absent: neither.
    #[serde(default)]
    pub stop_out_percent: Option<u32>,
    /// What a trader has to say at its login; absent: any trader is let in. Told to nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<Password>,
}

impl AccountDecl {
    /// An account with 10,000 USD, no suffix and the comment rules of its style.
    pub fn new(account: AccountId, style: Style) -> Self {
        Self {
            account,
            balance: "10000".parse().expect("a constant that is money"),
            currency: Symbol::new("USD").expect("a constant that is a currency"),
            style,
            suffix: String::new(),
            comment_max: None,
            comment_open: OpenComment::Keep,
            comment_close: None,
            leverage: None,
            stop_out_percent: None,
            password: None,
        }
    }

    /// The leverage that holds for this account.
    pub fn leverage_used(&self) -> u32 {
        self.leverage.unwrap_or(LEVERAGE_DEFAULT)
    }

    /// The comment length that holds for this account.
    pub fn comment_limit(&self) -> usize {
        self.comment_max.map_or(
            match self.style {
                Style::Mt5 | Style::Mt5Netting => 31,
                Style::Mt4 => 27,
            },
            |max| max as usize,
        )
    }

    /// The rule for comments at a stop that holds for this account.
    pub fn comment_at_stop(&self) -> CloseComment {
        self.comment_close.unwrap_or(match self.style {
            Style::Mt5 | Style::Mt5Netting => CloseComment::Keep,
            Style::Mt4 => CloseComment::Suffix,
        })
    }
}

/// A price as a driver feeds it; the broker stamps the time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeedQuote {
    /// Symbol without any account's suffix.
    pub symbol: Symbol,
    /// What a seller gets.
    pub bid: Price,
    /// What a buyer pays.
    pub ask: Price,
}

/// A trading instruction as the engine and the ledger see it: an order of a node, or one by hand.
///
/// On the wire it is written flat with its name in `op`, in the ledger as `{"open":{...}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs, reason = "the fields are those of schemas::OrderRequest")]
pub enum Instruction {
    /// Open at the market.
    Open {
        symbol: Symbol,
        side: Side,
        lots: Lots,
        stop_loss: Option<Price>,
        take_profit: Option<Price>,
        /// 0 for a trade by hand.
        #[serde(default)]
        magic: i64,
        #[serde(default)]
        comment: String,
    },
    /// Close all or a part.
    Close { ticket: FollowerTicket, lots: Option<Lots> },
    /// Set both stops of a trade.
    Modify { ticket: FollowerTicket, stop_loss: Option<Price>, take_profit: Option<Price> },
    /// Place a pending order.
    Place {
        symbol: Symbol,
        kind: PendingKind,
        lots: Lots,
        price: Price,
        stop_loss: Option<Price>,
        take_profit: Option<Price>,
        /// 0 for an order by hand.
        #[serde(default)]
        magic: i64,
        #[serde(default)]
        comment: String,
    },
    /// Change a pending order.
    ModifyPending {
        ticket: FollowerTicket,
        price: Price,
        stop_loss: Option<Price>,
        take_profit: Option<Price>,
    },
    /// Delete a pending order.
    Cancel { ticket: FollowerTicket },
}

impl Instruction {
    /// A market order by hand without stops.
    pub fn open_by_hand(symbol: Symbol, side: Side, lots: Lots) -> Self {
        Instruction::Open {
            symbol,
            side,
            lots,
            stop_loss: None,
            take_profit: None,
            magic: 0,
            comment: String::new(),
        }
    }

    /// The word that names its kind: one of `faults::ORDER_WORDS`.
    pub fn word(&self) -> &'static str {
        match self {
            Instruction::Open { .. } => "open",
            Instruction::Close { .. } => "close",
            Instruction::Modify { .. } => "modify",
            Instruction::Place { .. } => "place",
            Instruction::ModifyPending { .. } => "modify_pending",
            Instruction::Cancel { .. } => "cancel",
        }
    }
}

impl From<OrderRequest> for Instruction {
    fn from(request: OrderRequest) -> Self {
        match request {
            OrderRequest::Open { symbol, side, lots, stop_loss, take_profit, magic, comment } => {
                Instruction::Open {
                    symbol,
                    side,
                    lots,
                    stop_loss,
                    take_profit,
                    magic: magic.as_i64(),
                    comment,
                }
            }
            OrderRequest::Close { ticket, lots } => Instruction::Close { ticket, lots },
            OrderRequest::Modify { ticket, stop_loss, take_profit } => {
                Instruction::Modify { ticket, stop_loss, take_profit }
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
            } => Instruction::Place {
                symbol,
                kind,
                lots,
                price,
                stop_loss,
                take_profit,
                magic: magic.as_i64(),
                comment,
            },
            OrderRequest::ModifyPending { ticket, price, stop_loss, take_profit } => {
                Instruction::ModifyPending { ticket, price, stop_loss, take_profit }
            }
            OrderRequest::Cancel { ticket } => Instruction::Cancel { ticket },
        }
    }
}

/// What a node states with each order. Nothing of it is believed, all of it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrderMeta {
    /// Who sends.
    pub node: NodeId,
    /// Lease token that the order is sent under.
    pub token: Token,
    /// Time left until the sender's own deadline at the instruction before the write;
    /// negative when it was already over.
    pub deadline_margin_us: i64,
    /// The sender's clock at that instruction.
    pub sent_at_us: Micros,
    /// The sender's own number for this order; only recorded.
    #[serde(default)]
    pub client_ref: u64,
}

/// Requests other than orders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs, reason = "account and token mean the same in every request")]
pub enum Op {
    /// Starts a session. A trader names the account; a driver or auditor may leave it out.
    Login {
        #[serde(default)]
        account: Option<AccountId>,
        node: NodeId,
        kind: LoginKind,
        #[serde(default)]
        token: Option<Token>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        password: Option<Password>,
    },
    /// Ends the session of one account.
    Logout { account: AccountId },
    /// Answered at once.
    Ping {},
    /// Trades, pending orders and money of one account at one revision.
    Snapshot { account: AccountId },
    /// A page of the closed trades of one account: closed at or after `since_us`, from entry `after`.
    History {
        account: AccountId,
        since_us: Micros,
        #[serde(default)]
        after: u64,
    },
    /// The symbols as this account sees them.
    Symbols { account: AccountId },
    /// The last quote of every symbol as this account sees it.
    Quotes { account: AccountId },
    /// Driver: new accounts.
    DeclareAccounts { accounts: Vec<AccountDecl> },
    /// Driver: new symbols, without suffix.
    DeclareSymbols { symbols: Vec<SymbolSpec> },
    /// Driver: new prices; triggers stops and pending orders.
    Feed { quotes: Vec<FeedQuote> },
    /// Driver: money in, or out if negative.
    Deposit { account: AccountId, amount: Money },
    /// Driver: changes what is given, answers with what holds.
    Settings {
        #[serde(default)]
        answer_delay_ms: Option<u64>,
        #[serde(default)]
        check_tokens: Option<bool>,
    },
    /// Driver: one more fault.
    FaultSet { fault: FaultSpec },
    /// Auditor: the faults that are set.
    FaultList {},
    /// Driver: takes faults away: one, those of an account, or all.
    FaultClear {
        #[serde(default)]
        fault: Option<u64>,
        #[serde(default)]
        account: Option<AccountId>,
    },
    /// Driver: ends every trader's session of an account.
    Kick { account: AccountId },
    /// Driver: sets the stop-out level of an account; absent takes it away.
    StopOutLevel {
        account: AccountId,
        #[serde(default)]
        percent: Option<u32>,
    },
    /// Driver: closes the trade with the largest loss, whatever the margin says.
    StopOut { account: AccountId },
    /// Auditor: a page of the accounts after `after`.
    Accounts {
        #[serde(default)]
        after: Option<AccountId>,
    },
    /// Auditor: a page of the accounts after `after`, each with everything it holds.
    Books {
        #[serde(default)]
        after: Option<AccountId>,
    },
    /// Auditor: a page of the ledger from row `from`.
    Ledger { from: u64 },
}

/// One decoded request line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// An order of a node: recorded with its token and margin.
    Order {
        /// The account it is for.
        account: AccountId,
        /// What the sender states.
        meta: OrderMeta,
        /// What to do.
        instruction: Instruction,
    },
    /// A driver trading as a person at the terminal would.
    Manual {
        /// The account it is for.
        account: AccountId,
        /// What to do.
        instruction: Instruction,
    },
    /// Anything else.
    Other(Op),
}

/// What became of an order at the broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderReply {
    /// Carried out.
    Done(OrderDone),
    /// Refused; nothing changed.
    Rejected(Rejection),
}

/// The answer to a login.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedIn {
    /// How the account treats partial closes and whether it nets; absent without an account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub style: Option<Style>,
}

/// The answer to `kick`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// How many sessions were ended.
    pub sessions: usize,
}

/// The answer to `stop_out`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoppedOut {
    /// The trade that was closed.
    pub ticket: FollowerTicket,
}

/// Everything an account holds at one revision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountBook {
    /// The account.
    pub account: AccountId,
    /// Number of changes of this account so far.
    pub revision: u64,
    /// Open trades, ascending by ticket.
    pub positions: Vec<BrokerPosition>,
    /// Pending orders, ascending by ticket.
    pub pendings: Vec<BrokerPending>,
    /// Money.
    pub funds: Funds,
    /// Whether these are all of them, as far as the broker says.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub complete: bool,
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_true(value: &bool) -> bool {
    *value
}

/// A page of closed trades.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryPage {
    /// In the order they were closed.
    pub trades: Vec<ClosedTrade>,
    /// Where the next page starts; absent on the last one.
    pub next: Option<u64>,
}

/// A page of the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerPage {
    /// In the order of their numbers.
    pub rows: Vec<LedgerRow>,
    /// Where the next page starts; absent on the last one.
    pub next: Option<u64>,
}

/// A page of accounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountsPage {
    /// Ascending.
    pub accounts: Vec<AccountDecl>,
    /// Ask for the next page after this account; absent on the last one.
    pub next: Option<AccountId>,
}

/// A page of accounts with what they hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BooksPage {
    /// Ascending by account; each consistent in itself, the page as a whole at one instant.
    pub books: Vec<AccountBook>,
    /// Ask for the next page after this account; absent on the last one.
    pub next: Option<AccountId>,
}

/// One change of an account.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccountChange {
    /// A trade was opened at the market.
    PositionOpened {
        /// The trade.
        position: BrokerPosition,
    },
    /// Stops were changed.
    PositionModified {
        /// The trade after it.
        position: BrokerPosition,
    },
    /// A part was closed. In MT4 style `position` has a new ticket, and `closed` the old one.
    PositionReduced {
        /// What stays open.
        position: BrokerPosition,
        /// What was closed.
        closed: ClosedTrade,
    },
    /// Netting: a trade was turned over; it goes on under its ticket on the other side.
    PositionReversed {
        /// The trade after it.
        position: BrokerPosition,
        /// All that was open before.
        closed: ClosedTrade,
    },
    /// A trade ended.
    PositionClosed {
        /// The closed trade.
        closed: ClosedTrade,
        /// By whom.
        reason: CloseReason,
    },
    /// A pending order was placed.
    PendingPlaced {
        /// The order.
        pending: BrokerPending,
    },
    /// A pending order was changed.
    PendingModified {
        /// The order after it.
        pending: BrokerPending,
    },
    /// A pending order was deleted.
    PendingCancelled {
        /// The order.
        pending: BrokerPending,
    },
    /// A pending order became a trade under its own ticket.
    PendingFilled {
        /// The trade.
        position: BrokerPosition,
    },
    /// Only the money changed.
    FundsChanged {},
}

/// What the broker says unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all of them are changes, and each is moved once"
)]
pub enum Push {
    /// A part of what the account holds, after a login. Not complete before `synced`.
    List {
        /// The account.
        account: AccountId,
        /// Some of its trades.
        positions: Vec<BrokerPosition>,
        /// Some of its pending orders.
        pendings: Vec<BrokerPending>,
        /// What was listed before is forgotten: the listing begins again.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        anew: bool,
    },
    /// The lists of this account are complete; what follows are changes.
    Synced {
        /// The account.
        account: AccountId,
        /// The revision that the lists show.
        revision: u64,
        /// Number of trades that were listed.
        positions: usize,
        /// Number of pending orders that were listed.
        pendings: usize,
        /// Money.
        funds: Funds,
    },
    /// A change of an account; its revision is one more than before.
    Change {
        /// The account.
        account: AccountId,
        /// Revision after the change.
        revision: u64,
        /// What happened.
        change: AccountChange,
        /// Money after it.
        funds: Funds,
    },
    /// The session of this account on this connection is over; its orders are refused.
    Ended {
        /// The account.
        account: AccountId,
        /// Why.
        reason: String,
    },
    /// A price, with the suffix of the accounts on this connection.
    Quote(Quote),
}
