//! The ledger: what arrived at the broker, in which order, and what became of it.
//!
//! It is the oracle of the tests: the promises S1 (one sender), S2 (no send after the own
//! deadline) and S4 (no duplicate open) are judged from it, never from a node's opinion.
//!
//! Inputs: facts of the engine, one at a time, in arrival order. Outputs: rows, findings.
//!
//! Invariants:
//! 1. Row numbers start at 0 and have no holes; the times of rows never go back.
//! 2. A request's row is written when it is decided, and comes before the rows of the trades it
//!    changed. When it arrived, and as which one, stands in it: a held-up order arrives, or is
//!    carried out, after others that were sent later.
//! 3. Magic and comment of a trade are those that were *sent*, whatever the broker shows later.
//!
//! Not covered: the bound on memory. Every row stays in memory while the broker runs
//! (about 1 kB each), because a test tool that forgets cannot be asked.

use crate::clock::Now;
use crate::protocol::{Instruction, LoginKind, OrderMeta, OrderReply};
use schemas::{AccountId, FollowerTicket, Lots, Micros, NodeId, Price, Side, Symbol, Token};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// One row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerRow {
    /// Its number.
    pub row: u64,
    /// When it happened: microseconds since the broker started, monotonic.
    pub at_mono_us: u64,
    /// The same by the wall clock.
    pub at_us: Micros,
    /// What happened.
    pub fact: Fact,
}

/// What a row tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fact {
    /// Somebody logged in.
    Login(LoginFact),
    /// A session was ended by the broker.
    Ended(EndedFact),
    /// A mutating request was decided.
    Request(RequestFact),
    /// A mutating request never arrived.
    Lost(LostFact),
    /// A trade or pending order changed.
    Trade(TradeFact),
}

/// A login.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoginFact {
    /// Connection, counted from 1.
    pub connection: u64,
    /// The account, if one was named.
    pub account: Option<AccountId>,
    /// Who.
    pub node: NodeId,
    /// As what.
    pub kind: LoginKind,
    /// The lease token it stated.
    pub token: Option<Token>,
    /// The faults that it was hit by.
    #[serde(default)]
    pub faults: Vec<String>,
}

/// The end of a session, by the broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedFact {
    /// Connection, counted from 1.
    pub connection: u64,
    /// The account.
    pub account: AccountId,
    /// Why.
    pub reason: String,
}

/// A mutating request that never arrived: a fault lost it on its way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostFact {
    /// Connection, counted from 1.
    pub connection: u64,
    /// The request's `id` on that connection.
    pub request: u64,
    /// The account it was for.
    pub account: AccountId,
    /// What the node stated.
    pub meta: OrderMeta,
    /// What was asked.
    pub instruction: Instruction,
    /// When it was sent: read from its socket.
    pub sent_mono_us: u64,
    /// The faults that it was hit by.
    pub faults: Vec<String>,
}

/// A mutating request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestFact {
    /// Connection, counted from 1.
    pub connection: u64,
    /// The account it was for.
    pub account: AccountId,
    /// What the node stated; absent for a trade by hand.
    pub meta: Option<OrderMeta>,
    /// What was asked.
    pub instruction: Instruction,
    /// What the broker decided, with the tickets, at the time of this row.
    pub reply: OrderReply,
    /// The request's `id` on that connection.
    pub request: u64,
    /// When it was sent: read from its socket.
    pub sent_mono_us: u64,
    /// When it arrived: later than sent only where a fault held it up on its way.
    pub arrived_mono_us: u64,
    /// As which one it arrived, counted from 1 over the whole broker.
    pub arrival: u64,
    /// Time from the decision to the answer; absent: it is never answered.
    pub answer_after_us: Option<u64>,
    /// The faults that it was hit by.
    #[serde(default)]
    pub faults: Vec<String>,
}

/// What happened to a trade or pending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TradeEventKind {
    /// A trade was opened at the market, or goes on under its ticket after it was turned over.
    Opened,
    /// Netting: volume was added to a trade.
    Added,
    /// Its stops were changed.
    Modified,
    /// A part was closed; in MT4 style the rest has `new_ticket`.
    Reduced,
    /// It ended.
    Closed,
    /// A pending order was placed.
    PendingPlaced,
    /// A pending order was changed.
    PendingModified,
    /// A pending order was deleted.
    PendingCancelled,
    /// A pending order became a trade.
    PendingFilled,
}

/// What caused a change of a trade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// An order of a node.
    Order,
    /// A person (the driver).
    Manual,
    /// The stop loss.
    StopLoss,
    /// The take profit.
    TakeProfit,
    /// Equity fell below the stop-out level.
    StopOut,
    /// The price reached a pending order.
    Trigger,
}

/// A change of a trade or pending order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TradeFact {
    /// The account.
    pub account: AccountId,
    /// What happened.
    pub event: TradeEventKind,
    /// Why.
    pub cause: Cause,
    /// Its number before the event.
    pub ticket: FollowerTicket,
    /// The number it was opened or placed under, kept through renumbering.
    pub first_ticket: FollowerTicket,
    /// Its number after the event, where it changed.
    pub new_ticket: Option<FollowerTicket>,
    /// Symbol as the account sees it.
    pub symbol: Symbol,
    /// Direction.
    pub side: Side,
    /// Volume opened, placed or closed by this event.
    pub lots: Lots,
    /// Volume that stays open after it; absent when nothing does.
    pub lots_left: Option<Lots>,
    /// Price of the fill or the close, or at which a pending order waits.
    pub price: Option<Price>,
    /// Stop loss after it.
    pub stop_loss: Option<Price>,
    /// Take profit after it.
    pub take_profit: Option<Price>,
    /// Magic as sent.
    pub magic: i64,
    /// Comment as sent.
    pub comment: String,
}

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Violation {
    /// S1: a request carried a lower token than an earlier one for the account.
    TokenDecreased {
        /// Row of the late request.
        row: u64,
        /// The account.
        account: AccountId,
        /// Who sent it.
        node: NodeId,
        /// Its token.
        token: Token,
        /// The highest token before it.
        highest: Token,
    },
    /// S2: a request was sent after the sender's own deadline.
    SentAfterDeadline {
        /// Row of the request.
        row: u64,
        /// The account.
        account: AccountId,
        /// Who sent it.
        node: NodeId,
        /// What was left, below zero.
        deadline_margin_us: i64,
    },
    /// S4: a second trade or waiting order was made for one tag.
    DuplicateOpen {
        /// Row of the trade that made it one too many.
        row: u64,
        /// The account.
        account: AccountId,
        /// Magic as sent.
        magic: i64,
        /// Comment as sent.
        comment: String,
        /// First tickets of everything made for this tag so far.
        tickets: Vec<FollowerTicket>,
    },
}

/// Rows in arrival order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    rows: Vec<LedgerRow>,
}

impl Ledger {
    /// A ledger of rows that were read elsewhere.
    pub fn from_rows(rows: Vec<LedgerRow>) -> Self {
        Self { rows }
    }

    /// All rows.
    pub fn rows(&self) -> &[LedgerRow] {
        &self.rows
    }

    /// Adds one row.
    pub fn append(&mut self, now: Now, fact: Fact) -> &LedgerRow {
        let row = self.rows.len() as u64;
        self.rows.push(LedgerRow { row, at_mono_us: now.mono_us, at_us: now.wall, fact });
        self.rows.last().expect("a row was just added")
    }

    /// The requests of nodes, with what they stated.
    pub fn orders(&self) -> impl Iterator<Item = (&LedgerRow, &RequestFact, &OrderMeta)> {
        self.rows.iter().filter_map(|row| match &row.fact {
            Fact::Request(request) => request.meta.as_ref().map(|meta| (row, request, meta)),
            Fact::Login(_) | Fact::Ended(_) | Fact::Lost(_) | Fact::Trade(_) => None,
        })
    }

    /// The changes of trades.
    pub fn trades(&self) -> impl Iterator<Item = (&LedgerRow, &TradeFact)> {
        self.rows.iter().filter_map(|row| match &row.fact {
            Fact::Trade(trade) => Some((row, trade)),
            Fact::Login(_) | Fact::Ended(_) | Fact::Lost(_) | Fact::Request(_) => None,
        })
    }

    /// The smallest stated margin, in microseconds; absent without orders.
    pub fn deadline_margin_min_us(&self) -> Option<i64> {
        self.orders().map(|(_, _, meta)| meta.deadline_margin_us).min()
    }

    /// Every broken promise of S1, S2 and S4. S1 and S2 are judged in the order in which requests
    /// arrived, S4 by what was carried out.
    pub fn violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut highest: BTreeMap<AccountId, Token> = BTreeMap::new();
        for (row, request) in self.arrivals() {
            judge_request(row.row, request, &mut highest, &mut found);
        }
        let mut made = BTreeMap::new();
        for (row, trade) in self.trades() {
            judge_trade(row.row, trade, &mut made, &mut found);
        }
        found
    }

    /// The requests in the order in which they arrived; rows are in the order of decisions.
    pub fn arrivals(&self) -> Vec<(&LedgerRow, &RequestFact)> {
        let mut all = Vec::new();
        for row in &self.rows {
            if let Fact::Request(request) = &row.fact {
                all.push((row, request));
            }
        }
        all.sort_by_key(|(row, request)| (request.arrival, row.row));
        all
    }

    /// Rows of requests that were *carried out* after one of a higher token for their account had
    /// arrived. No broken promise of S1, which is about arrival: it is what a broker that accepts
    /// late, or a request held up on its way, does to a takeover, and the evidence for the one
    /// exception of S4.
    pub fn overtaken(&self) -> Vec<u64> {
        let mut seen: BTreeMap<AccountId, Vec<(u64, Token)>> = BTreeMap::new();
        for (_, request) in self.arrivals() {
            if let Some(meta) = &request.meta {
                let arrived = (request.arrived_mono_us, meta.token);
                seen.entry(request.account).or_default().push(arrived);
            }
        }
        let is_overtaken = |row: &LedgerRow, request: &RequestFact, meta: &OrderMeta| {
            matches!(request.reply, OrderReply::Done(_))
                && seen[&request.account]
                    .iter()
                    .any(|(at, token)| *at <= row.at_mono_us && *token > meta.token)
        };
        let overtaken =
            self.orders().filter(|(row, request, meta)| is_overtaken(row, request, meta));
        overtaken.map(|(row, ..)| row.row).collect()
    }

    /// How often each kind of fault hit, by its word.
    pub fn faults(&self) -> BTreeMap<&str, u64> {
        let mut hits = BTreeMap::new();
        for row in &self.rows {
            let words = match &row.fact {
                Fact::Login(login) => &login.faults,
                Fact::Request(request) => &request.faults,
                Fact::Lost(lost) => &lost.faults,
                Fact::Ended(_) | Fact::Trade(_) => continue,
            };
            for word in words {
                *hits.entry(word.as_str()).or_default() += 1;
            }
        }
        hits
    }

    /// Reads the file that a broker has written. A last line without its end is left out: the
    /// broker was killed while it wrote, and had not answered the request yet.
    pub fn read_file(path: &Path) -> Result<Ledger, LedgerFileError> {
        let text = std::fs::read_to_string(path).map_err(LedgerFileError::Read)?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut rows: Vec<LedgerRow> = Vec::new();
        for (index, line) in whole.lines().enumerate() {
            let row: LedgerRow = serde_json::from_str(line)
                .map_err(|source| LedgerFileError::Row { line: index + 1, source })?;
            if row.row != rows.len() as u64 {
                let (expected, got) = (rows.len() as u64, row.row);
                return Err(LedgerFileError::Hole { line: index + 1, expected, got });
            }
            rows.push(row);
        }
        Ok(Ledger { rows })
    }
}

/// Why a ledger file cannot be used as evidence.
#[derive(Debug, thiserror::Error)]
pub enum LedgerFileError {
    /// The file cannot be read.
    #[error("ledger file cannot be read")]
    Read(#[source] std::io::Error),
    /// A line is not a row.
    #[error("ledger file line {line} is not a row")]
    Row {
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A row is missing or doubled.
    #[error("ledger file line {line}: row must be {expected}, got {got}")]
    Hole {
        /// Which line, from 1.
        line: usize,
        /// The row number that should be here.
        expected: u64,
        /// The row number that is.
        got: u64,
    },
}

fn judge_request(
    row: u64,
    request: &RequestFact,
    highest: &mut BTreeMap<AccountId, Token>,
    found: &mut Vec<Violation>,
) {
    let Some(meta) = &request.meta else { return };
    let account = request.account;
    let seen = highest.entry(account).or_insert(meta.token);
    if meta.token < *seen {
        found.push(Violation::TokenDecreased {
            row,
            account,
            node: meta.node.clone(),
            token: meta.token,
            highest: *seen,
        });
    }
    *seen = (*seen).max(meta.token);
    if meta.deadline_margin_us < 0 {
        found.push(Violation::SentAfterDeadline {
            row,
            account,
            node: meta.node.clone(),
            deadline_margin_us: meta.deadline_margin_us,
        });
    }
}

/// A trade counts from its opening, a pending order from its placing; only the deletion of an
/// order that never became a trade takes it back. Trades by hand have no tag and do not count.
fn judge_trade<'a>(
    row: u64,
    trade: &'a TradeFact,
    made: &mut BTreeMap<(AccountId, i64, &'a str), Vec<FollowerTicket>>,
    found: &mut Vec<Violation>,
) {
    use TradeEventKind::{Added, Opened, PendingPlaced};
    let is_made = matches!(trade.event, Opened | Added | PendingPlaced);
    let is_taken_back = trade.event == TradeEventKind::PendingCancelled;
    if trade.magic == 0 || !(is_made || is_taken_back) {
        return;
    }
    let tickets = made.entry((trade.account, trade.magic, trade.comment.as_str())).or_default();
    if is_taken_back {
        tickets.retain(|ticket| *ticket != trade.first_ticket);
        return;
    }
    tickets.push(trade.first_ticket);
    if tickets.len() > 1 {
        found.push(Violation::DuplicateOpen {
            row,
            account: trade.account,
            magic: trade.magic,
            comment: trade.comment.clone(),
            tickets: tickets.clone(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(events: &[(TradeEventKind, u64, i64, &str)]) -> Ledger {
        let mut ledger = Ledger::default();
        for (event, ticket, magic, comment) in events {
            let ticket = FollowerTicket::new(*ticket).unwrap();
            let fact = TradeFact {
                account: AccountId::new(1).unwrap(),
                event: *event,
                cause: Cause::Order,
                ticket,
                first_ticket: ticket,
                new_ticket: None,
                symbol: "EURUSD".parse().unwrap(),
                side: Side::Buy,
                lots: "1".parse().unwrap(),
                lots_left: None,
                price: None,
                stop_loss: None,
                take_profit: None,
                magic: *magic,
                comment: (*comment).to_owned(),
            };
            ledger.append(Now { mono_us: 1, wall: Micros(1) }, Fact::Trade(fact));
        }
        ledger
    }

    fn rows_found(events: &[(TradeEventKind, u64, i64, &str)]) -> Vec<u64> {
        let row = |violation| match violation {
            Violation::DuplicateOpen { row, .. } => row,
            other => panic!("{other:?}"),
        };
        ledger(events).violations().into_iter().map(row).collect()
    }

    #[test]
    fn a_second_opening_for_a_tag_is_a_duplicate_even_after_the_first_was_closed() {
        use TradeEventKind::{Closed, Opened};
        assert_eq!(
            rows_found(&[(Opened, 1, 7, "a"), (Closed, 1, 7, "a"), (Opened, 2, 7, "a")]),
            [2]
        );
        assert!(
            rows_found(&[(Opened, 1, 7, "a"), (Opened, 2, 7, "b"), (Opened, 3, 8, "a")]).is_empty()
        );
        assert!(rows_found(&[(Opened, 1, 0, "a"), (Opened, 2, 0, "a")]).is_empty(), "by hand");
    }

    #[test]
    fn a_pending_order_counts_once_and_not_at_all_if_it_was_deleted() {
        use TradeEventKind::{Opened, PendingCancelled, PendingFilled, PendingPlaced};
        let (placed, filled) = ((PendingPlaced, 1, 7, "a"), (PendingFilled, 1, 7, "a"));
        assert!(rows_found(&[placed, filled]).is_empty());
        assert!(
            rows_found(&[placed, (PendingCancelled, 1, 7, "a"), (Opened, 2, 7, "a")]).is_empty()
        );
        assert_eq!(rows_found(&[placed, (Opened, 2, 7, "a")]), [1]);
        assert_eq!(rows_found(&[placed, filled, (PendingPlaced, 3, 7, "a")]), [2]);
    }

    #[test]
    fn a_file_with_a_missing_row_is_no_evidence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let whole = ledger(&[
            (TradeEventKind::Opened, 1, 7, "a"),
            (TradeEventKind::Opened, 2, 7, "b"),
            (TradeEventKind::Opened, 3, 7, "c"),
        ]);
        let lines: Vec<String> =
            whole.rows().iter().map(|row| serde_json::to_string(row).unwrap() + "\n").collect();
        std::fs::write(&path, lines.concat()).unwrap();
        assert_eq!(Ledger::read_file(&path).unwrap(), whole);
        std::fs::write(&path, lines[0].clone() + &lines[2]).unwrap();
        let error = Ledger::read_file(&path).unwrap_err();
        assert!(matches!(error, LedgerFileError::Hole { line: 2, expected: 1, got: 2 }));
        std::fs::write(&path, lines[0].clone() + "{}\n").unwrap();
        let error = Ledger::read_file(&path).unwrap_err();
        assert!(matches!(error, LedgerFileError::Row { line: 2, .. }));
    }
}
