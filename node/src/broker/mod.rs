//! The seam to a broker: one session per leased account.
//!
//! A session is opened under a lease token and dies with it. The only function that
//! changes anything at a broker is [`BrokerSession::submit`] (`submit_all` for several), and it
//! takes a [`SendPermit`] by value: no order can skip the gate, and no permit can be used twice.
//!
//! Invariants:
//! 1. `snapshot` and `history` give complete reads or an error, never a part. An empty list with
//!    margin in use is an error, whatever the broker says of it (H41).
//! 2. The permit is checked again inside `submit`, on the line before the bytes are
//!    handed to the socket, so a call that was held up does not send. Where a call holds a
//!    thread, this happens on that thread, when it is the call's turn (H9).
//! 3. An outcome is one of four: done, rejected, not sent, unknown. Losing the
//!    connection after the bytes left is unknown.
//! 4. What an order changed is in the session's queue of events before its answer is given.
//!
//! One file a platform: `paper`. [`executor`] has the threads for calls that hold one.

pub mod executor;
pub mod paper;
pub mod view;

use crate::clock::NodeTime;
use crate::credentials::CredentialError;
use crate::gate::SendPermit;
use schemas::planted::{self, Bug};
use schemas::{
    AccountSnapshot, BrokerPending, BrokerPosition, CloseReason, ClosedTrade, FollowerTicket,
    Funds, Micros, OrderDone, OrderRequest, Quote, Rejection, Symbol, SymbolSpec,
};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// What became of an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The broker carried it out.
    Done(OrderDone),
    /// The broker refused; nothing happened.
    Rejected(Rejection),
    /// It never left: safe to try again under a new permit.
    NotSent(NotSent),
    /// It may have happened: look for the tag, never send an open again.
    Unknown(String),
}

impl Outcome {
    schemas::words! {
        /// The word in metrics and notes.
        pub fn as_str(&self) in WORDS {
            Outcome::Done(_) => "done",
            Outcome::Rejected(_) => "rejected",
            Outcome::NotSent(_) => "not_sent",
            Outcome::Unknown(_) => "unknown",
        }
    }
}

/// Why an order never left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotSent {
    /// The gate gave no permit, or the permit ran out before the bytes left.
    Gate,
    /// There is no usable connection to the broker.
    Session,
    /// No thread for the call was free in time.
    Busy,
}

impl NotSent {
    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            NotSent::Gate => "gate",
            NotSent::Session => "session",
            NotSent::Busy => "busy",
        }
    }
}

/// What a session tells on its own. One event is one step of the broker: what belongs together
/// comes together, so that no state in between is ever seen.
#[derive(Debug, Clone)]
pub enum SessionEvent {
    /// A trade appeared, or its stops or volume changed.
    Position(BrokerPosition),
    /// A part of a trade was closed; the rest may have a new number. Netting: all of it was, and
    /// it goes on under its number on the other side.
    Reduced {
        /// What stays open.
        position: BrokerPosition,
        /// The closed part, under the number it had.
        closed: ClosedTrade,
    },
    /// A trade ended.
    Closed {
        /// Its line of the history.
        closed: ClosedTrade,
        /// Why, as far as the broker says.
        reason: CloseReason,
    },
    /// A pending order appeared or changed.
    Pending(BrokerPending),
    /// A pending order was deleted or expired.
    PendingGone(FollowerTicket),
    /// A pending order became a trade of the same number.
    PendingFilled(BrokerPosition),
    /// Money of the account.
    Funds(Funds),
    /// The connection is gone; the session must be opened anew.
    Lost(String),
}

/// Whether a session counts as open only with the broker's sync mark: before it, the lists may be
/// without trades that are there (H41).
///
/// The paper broker's lists come with the mark and cannot be had before; the simulated broker's can.
pub fn waits_for_the_sync_mark() -> bool {
    !planted::is(Bug::P9)
}

/// Why a session could not be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The account's settings do not make a session: mend the row.
    #[error("account settings: {0}")]
    Settings(String),
    /// The broker is not there, or the connection was lost: try again.
    #[error("connection: {0}")]
    Connection(String),
    /// The broker calls a list complete that cannot be: read again, nothing is known.
    #[error("list not complete: {0}")]
    Incomplete(String),
    /// The broker answered, with a refusal.
    #[error("refused: {0}")]
    Refused(String),
    /// The account's password cannot be opened here: give the node the key, or store it anew.
    #[error("password: {0}")]
    Password(#[from] CredentialError),
}

impl BrokerError {
    /// Whether another password may be all that it takes.
    pub fn may_be_the_password(&self) -> bool {
        match self {
            BrokerError::Refused(_) | BrokerError::Password(_) => true,
            BrokerError::Settings(_) | BrokerError::Connection(_) | BrokerError::Incomplete(_) => {
                false
            }
        }
    }
}

/// When a call that waited for a thread began: the instant before the broker's own code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftAt {
    /// Node time, which the permit was checked with.
    pub node: NodeTime,
    /// Wall clock, for own time and stamps.
    pub wall: Micros,
}

/// The answer of the broker, when it comes.
#[must_use = "an order may have been sent; its outcome must be recorded"]
pub struct Answer(Kind);

enum Kind {
    Now(Option<Outcome>),
    Later(Pin<Box<dyn Future<Output = Outcome> + Send>>),
    Called(executor::CallAnswer),
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Kind::Now(outcome) => f.debug_tuple("Answer").field(outcome).finish(),
            Kind::Later(_) => f.write_str("Answer(later)"),
            Kind::Called(call) => f.debug_tuple("Answer").field(call).finish(),
        }
    }
}

impl Answer {
    /// One that is there already.
    pub fn now(outcome: Outcome) -> Self {
        Answer(Kind::Now(Some(outcome)))
    }

    /// One that comes by itself; the order has left.
    pub fn later(answer: impl Future<Output = Outcome> + Send + 'static) -> Self {
        Answer(Kind::Later(Box::pin(answer)))
    }

    pub(crate) fn called(call: executor::CallAnswer) -> Self {
        Answer(Kind::Called(call))
    }

    /// Whether the order leaves on another thread, now or later; [`Answer::left_at`] says when.
    pub fn leaves_by_itself(&self) -> bool {
        matches!(self.0, Kind::Called(_))
    }

    /// When the order left, where that was not within `submit`; nothing as long as it has not.
    pub fn left_at(&self) -> Option<LeftAt> {
        match &self.0 {
            Kind::Now(_) | Kind::Later(_) => None,
            Kind::Called(call) => call.left_at(),
        }
    }

    /// The outcome within this limit, or what is known after it: an order that still waits for a
    /// thread is taken back and was not sent; any other may have happened (H11).
    pub async fn within(mut self, limit: Duration) -> (Outcome, Option<LeftAt>) {
        let answered = tokio::time::timeout(limit, &mut self).await;
        let outcome = match (answered, &mut self.0) {
            (Ok(outcome), _) => outcome,
            (Err(_), Kind::Called(call)) => call.give_up(),
            (Err(_), Kind::Now(_) | Kind::Later(_)) => {
                Outcome::Unknown("no answer within the call limit".into())
            }
        };
        (outcome, self.left_at())
    }
}

impl Future for Answer {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        match &mut self.0 {
            Kind::Now(outcome) => match outcome.take() {
                Some(outcome) => Poll::Ready(outcome),
                None => Poll::Pending,
            },
            Kind::Later(answer) => answer.as_mut().poll(cx),
            Kind::Called(call) => Pin::new(call).poll(cx),
        }
    }
}

/// An order with the right to send it.
#[derive(Debug)]
pub struct PermittedOrder<'a> {
    /// The right.
    pub permit: SendPermit,
    /// The order.
    pub request: &'a OrderRequest,
    /// The caller's number for it.
    pub attempt: u64,
}

/// One open session at a broker.
pub trait BrokerSession: Send + Sync + 'static {
    /// Hands one order to the socket at once, or to a thread that will, under a permit, and gives
    /// its answer later. Never waits. `attempt` is the caller's number for it; a broker may only record it.
    fn submit(&self, permit: SendPermit, request: &OrderRequest, attempt: u64) -> Answer;
    /// Hands orders over as [`BrokerSession::submit`] does each of them, in their order, and gives
    /// their answers in the same order. A platform that can writes them at once.
    fn submit_all(&self, orders: Vec<PermittedOrder<'_>>) -> Vec<Answer> {
        let each =
            |order: PermittedOrder<'_>| self.submit(order.permit, order.request, order.attempt);
        orders.into_iter().map(each).collect()
    }
    /// The last price of a symbol, as the broker pushed it.
    fn quote(&self, symbol: &Symbol) -> Option<Quote>;
    /// The complete state of the account.
    fn snapshot(&self) -> impl Future<Output = Result<AccountSnapshot, BrokerError>> + Send;
    /// All trades, and parts of trades, that ended since `since`.
    fn history(
        &self,
        since: Micros,
    ) -> impl Future<Output = Result<Vec<ClosedTrade>, BrokerError>> + Send;
    /// What the broker says of its symbols.
    fn symbols(&self) -> impl Future<Output = Result<Vec<SymbolSpec>, BrokerError>> + Send;
    /// Cuts the connection so that nothing in its buffers is delivered any more.
    fn abort(&self);
}
