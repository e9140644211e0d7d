//! The node's end: one connection, one session an account.
//!
//! Decides the outcome of an order: `NotSent` if no byte of it left, `Unknown` if it may have
//! left and no answer came, else what the broker said.
//!
//! Inputs: requests, bytes from the broker. Outputs: answers, pushes of each account in order.
//!
//! Invariants:
//! 1. `submit` hands the order to the kernel before it returns, or returns `NotSent`. Nothing
//!    waits in a queue of this process, so a permit checked right before it is not overtaken by
//!    one. (If the kernel takes only a part of a line, the rest follows within `FLUSH_LIMIT` or
//!    the connection is aborted.)
//! 2. After `abort` returns, this process sends nothing more, and what the kernel held is gone.
//! 3. A list of an account is handed out only when the broker's sync mark says it is complete.
//! 4. Pushes of one account arrive in the broker's order or the session ends; none is skipped.
//!
//! Not covered: call timeouts (the caller's), reconnecting (the caller's), and a frozen broker
//! process, which the kernel's keepalive does not see.

use crate::clock::wall_now;
use crate::error::PaperError;
use crate::lines::{Line, LineBuffer};
use crate::protocol::{
    ANSWER_LINE_BYTES_MAX, AccountBook, AccountChange, FieldError, HistoryPage, LoggedIn,
    LoginKind, Op, OrderMeta, OrderReply, Password, Push, Request, Style,
};
use crate::{socket, wire};
use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use schemas::{
    AccountId, AccountSnapshot, BrokerPending, BrokerPosition, ClosedTrade, Funds, Micros, NodeId,
    OrderDone, OrderRequest, Quote, RejectClass, Rejection, Symbol, SymbolSpec, Token,
};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// Longest wait for a connection.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the answer to a read. Orders have no limit here; the caller sets it.
pub const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Longest time that the rest of a half-written line may take.
pub const FLUSH_LIMIT: Duration = Duration::from_secs(2);
/// Most requests without an answer on one connection.
pub const IN_FLIGHT_MAX: usize = 65_536;
/// About what the line of an order takes.
const ORDER_LINE_BYTES: usize = 400;
/// Most pushes of one account that wait to be taken; past it the session ends.
pub const SESSION_PUSHES_MAX: usize = 4_096;

/// Who connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ident {
    /// The node process.
    pub node: NodeId,
}

/// What a node states with an order; the client adds the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendMeta {
    /// Lease token of the permit.
    pub token: Token,
    /// Time left to the own deadline, read right before this call; negative when it is over.
    pub deadline_margin_us: i64,
    /// The sender's wall clock.
    pub sent_at: Micros,
    /// The sender's own number for this order; the broker only records it.
    pub client_ref: u64,
}

/// Why an order did not leave. Nothing is open because of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSent {
    /// The connection is gone: connect again.
    #[error("connection lost: {0}")]
    Lost(String),
    /// The kernel takes no more bytes at the moment: try again under a new permit.
    #[error("the socket is full")]
    Busy,
    /// `IN_FLIGHT_MAX` requests wait for their answers: try again under a new permit.
    #[error("too many requests in flight")]
    TooMany,
}

/// What became of an order, as far as this end knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderOutcome {
    /// Carried out.
    Done(OrderDone),
    /// Refused; nothing happened.
    Rejected(Rejection),
    /// Never left this process; safe to try again under a new permit.
    NotSent(NotSent),
    /// May have been carried out: look for it, never send it again.
    Unknown(String),
}

/// What a session hears, in the broker's order. The stream ends when the session is over
/// (`PaperSession::lost_reason` says why).
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all of them are changes, and each is moved once"
)]
pub enum SessionPush {
    /// The first complete state. Comes once, before any change.
    Synced(AccountSnapshot),
    /// A change; its revision is one more than before.
    Change {
        /// Revision after it.
        revision: u64,
        /// What happened.
        change: AccountChange,
        /// Money after it.
        funds: Funds,
        /// When this process had it read: the broker's callback.
        received: Instant,
    },
}

/// One connection to the broker; clones share it. It closes when the last clone and session is gone.
#[derive(Debug, Clone)]
pub struct PaperClient {
    guard: Arc<Guard>,
}

impl PaperClient {
    /// Connects; no account is open yet.
    pub async fn connect(addr: &str, ident: Ident) -> Result<PaperClient, PaperError> {
        let failed = |source| PaperError::Connect { addr: addr.to_owned(), source };
        let connecting = tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(addr)).await;
        let timed_out = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let stream = connecting.unwrap_or(Err(timed_out)).map_err(failed)?;
        socket::tune(&stream).map_err(failed)?;
        stream.writable().await.map_err(failed)?;
        let wire = Arc::new(Wire::new(stream, ident.node));
        tokio::spawn(read_loop(wire.clone()));
        tokio::spawn(flush_loop(wire.clone()));
        Ok(PaperClient { guard: Arc::new(Guard { wire }) })
    }

    /// Logs in to an account as a trader and returns its session and what it hears.
    ///
    /// Errors: `AlreadyOpen` if this connection has it, `Refused` if the broker does not know it.
    pub async fn open_account(
        &self,
        account: AccountId,
        token: Token,
    ) -> Result<(PaperSession, mpsc::Receiver<SessionPush>), PaperError> {
        self.open_account_with(account, token, None).await
    }

    /// The same for an account that may have a password.
    ///
    /// Errors: as there; `Refused` as well if it is not this one.
    pub async fn open_account_with(
        &self,
        account: AccountId,
        token: Token,
        password: Option<Password>,
    ) -> Result<(PaperSession, mpsc::Receiver<SessionPush>), PaperError> {
        let wire = &self.guard.wire;
        let (pushes, receiver) = mpsc::channel(SESSION_PUSHES_MAX);
        let state = wire.add_route(account, pushes)?;
        let login = Op::Login {
            account: Some(account),
            node: wire.node.clone(),
            kind: LoginKind::Trader,
            token: Some(token),
            password,
        };
        // Made before the call, so that giving up during it says goodbye.
        let mut inner = SessionInner { guard: self.guard.clone(), account, state, style: None };
        let logged_in: LoggedIn = wire.call("login", &Request::Other(login)).await?;
        inner.style = logged_in.style;
        Ok((PaperSession { inner: Arc::new(inner) }, receiver))
    }

    /// The last quote that the broker pushed for a symbol; quotes come once an account is open.
    pub fn quote(&self, symbol: &Symbol) -> Option<Quote> {
        self.guard.wire.table.lock().quotes.get(symbol).cloned()
    }

    /// Ends the connection with a reset, at once; orders in flight become `Unknown`.
    pub fn abort(&self) {
        self.guard.wire.die("aborted by this node");
    }

    /// Why the connection ended, if it did.
    pub fn lost_reason(&self) -> Option<String> {
        self.guard.wire.lost.borrow().clone()
    }

    /// Waits until the connection has ended, and says why.
    pub async fn lost(&self) -> String {
        let mut lost = self.guard.wire.lost.subscribe();
        match lost.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "the connection is gone".to_owned(),
        }
    }

    /// Sends a request of any kind and decodes its answer; for the driver.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        op: &'static str,
        request: &Request,
    ) -> Result<T, PaperError> {
        self.guard.wire.call(op, request).await
    }

    pub(crate) fn node(&self) -> &NodeId {
        &self.guard.wire.node
    }
}

/// One account on a connection; clones share it. Logs out when the last clone is gone.
#[derive(Debug, Clone)]
pub struct PaperSession {
    inner: Arc<SessionInner>,
}

impl PaperSession {
    /// The account.
    pub fn account(&self) -> AccountId {
        self.inner.account
    }

    /// Whether the account holds at most one trade a symbol.
    pub fn is_netting(&self) -> bool {
        self.inner.style.is_some_and(Style::is_netting)
    }

    /// Whether the rest of a partial close has a new number and no comment of ours.
    pub fn renumbers(&self) -> bool {
        self.inner.style.is_some_and(Style::renumbers)
    }

    /// Writes the order to the socket, now. The caller checks its permit immediately before.
    ///
    /// Never waits. Errors: `NotSent`, in which case no byte of it was written.
    pub fn submit(&self, request: &OrderRequest, meta: SendMeta) -> Result<PendingAnswer, NotSent> {
        let answer = self.submit_all(&[(request, meta)]).pop();
        answer.unwrap_or(Err(NotSent::Lost("nothing was sent".to_owned())))
    }

    /// `submit` of several orders in one write, in their order; one answer each, in the same order.
    ///
    /// Errors: `NotSent` of an order, in which case no byte of it was written. A write that fails
    /// as a whole is every order's.
    pub fn submit_all(
        &self,
        orders: &[(&OrderRequest, SendMeta)],
    ) -> Vec<Result<PendingAnswer, NotSent>> {
        let wire = &self.inner.guard.wire;
        if let Some(reason) = self.lost_reason() {
            return orders.iter().map(|_| Err(NotSent::Lost(reason.clone()))).collect();
        }
        let Some((_, first)) = orders.first() else { return Vec::new() };
        let mut lines = Vec::with_capacity(orders.len() * ORDER_LINE_BYTES);
        let mut meta = OrderMeta {
            node: wire.node.clone(),
            token: first.token,
            deadline_margin_us: first.deadline_margin_us,
            sent_at_us: first.sent_at,
            client_ref: first.client_ref,
        };
        let mut encode = |(request, of_order): &(&OrderRequest, SendMeta)| {
            let id = wire.next_id();
            let waiting = wire.expect_answer(id)?;
            meta.token = of_order.token;
            meta.deadline_margin_us = of_order.deadline_margin_us;
            meta.sent_at_us = of_order.sent_at;
            meta.client_ref = of_order.client_ref;
            wire::encode_order(&mut lines, id, self.inner.account, &meta, request);
            Ok(PendingAnswer { waiting })
        };
        let answers: Vec<Result<PendingAnswer, NotSent>> = orders.iter().map(&mut encode).collect();
        match wire.write_now(&lines) {
            Ok(()) => answers,
            Err(not_sent) => answers.into_iter().map(|a| a.and(Err(not_sent.clone()))).collect(),
        }
    }

    /// `submit`, then the answer.
    pub async fn order(&self, request: &OrderRequest, meta: SendMeta) -> OrderOutcome {
        match self.submit(request, meta) {
            Ok(answer) => answer.await,
            Err(not_sent) => OrderOutcome::NotSent(not_sent),
        }
    }

    /// `order`, holding the calling thread until the answer is there, as a vendor's library does.
    ///
    /// Not for a thread of a runtime: nothing else would run on it meanwhile.
    pub fn order_blocking(&self, request: &OrderRequest, meta: SendMeta) -> OrderOutcome {
        match self.submit(request, meta) {
            Ok(answer) => crate::blocking::wait(answer),
            Err(not_sent) => OrderOutcome::NotSent(not_sent),
        }
    }

    /// Whether the broker has said that the lists of this account are complete.
    pub fn is_synced(&self) -> bool {
        self.inner.state.synced.load(Ordering::Acquire) && self.lost_reason().is_none()
    }

    /// Reads everything the account holds, at one revision. Every push up to that revision has
    /// been put into the session's queue before this returns.
    pub async fn snapshot(&self) -> Result<AccountSnapshot, PaperError> {
        self.require_synced()?;
        let op = Op::Snapshot { account: self.inner.account };
        let book: AccountBook = self.call("snapshot", op).await?;
        if !book.complete {
            return Err(PaperError::NotSynced { account: self.inner.account });
        }
        Ok(snapshot_of(book))
    }

    /// The complete list of trades that were closed at or after `since`, in that order.
    pub async fn history(&self, since: Micros) -> Result<Vec<ClosedTrade>, PaperError> {
        self.require_synced()?;
        let mut trades = Vec::new();
        let mut after = 0;
        loop {
            let op = Op::History { account: self.inner.account, since_us: since, after };
            let page: HistoryPage = self.call("history", op).await?;
            trades.extend(page.trades);
            match page.next {
                Some(next) => after = next,
                None => return Ok(trades),
            }
        }
    }

    /// The symbols as this account sees them.
    pub async fn symbols(&self) -> Result<Vec<SymbolSpec>, PaperError> {
        self.call("symbols", Op::Symbols { account: self.inner.account }).await
    }

    /// The last quote of every symbol that has one, asked from the broker.
    pub async fn quotes(&self) -> Result<Vec<Quote>, PaperError> {
        self.call("quotes", Op::Quotes { account: self.inner.account }).await
    }

    /// The last quote that was pushed for a symbol.
    pub fn quote(&self, symbol: &Symbol) -> Option<Quote> {
        self.inner.guard.wire.table.lock().quotes.get(symbol).cloned()
    }

    /// Ends the whole connection with a reset, at once: every account on it.
    pub fn abort(&self) {
        self.inner.guard.wire.die("aborted by this node");
    }

    /// Why the session ended, if it did.
    pub fn lost_reason(&self) -> Option<String> {
        let own = self.inner.state.lost.lock().clone();
        own.or_else(|| self.inner.guard.wire.lost.borrow().clone())
    }

    fn require_synced(&self) -> Result<(), PaperError> {
        if let Some(reason) = self.lost_reason() {
            return Err(PaperError::Lost { reason });
        }
        if !self.is_synced() {
            return Err(PaperError::NotSynced { account: self.inner.account });
        }
        Ok(())
    }

    async fn call<T: DeserializeOwned>(&self, name: &'static str, op: Op) -> Result<T, PaperError> {
        self.inner.guard.wire.call(name, &Request::Other(op)).await
    }
}

/// The answer to a submitted order; dropping it does not take the order back.
#[derive(Debug)]
#[must_use = "an order was sent; its outcome must be recorded"]
pub struct PendingAnswer {
    waiting: Waiting,
}

impl Future for PendingAnswer {
    type Output = OrderOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OrderOutcome> {
        Pin::new(&mut self.waiting.receiver).poll(cx).map(|answer| match answer {
            Ok(Ok(text)) => match serde_json::from_str(text.get()) {
                Ok(OrderReply::Done(done)) => OrderOutcome::Done(done),
                Ok(OrderReply::Rejected(rejection)) => OrderOutcome::Rejected(rejection),
                Err(e) => OrderOutcome::Unknown(format!("answer not understood: {e}")),
            },
            // There is no session of the account, because the broker ended it a moment ago: the
            // order itself was not looked at, and nothing final is said of it.
            Ok(Err(error)) if error.field == "account" => {
                OrderOutcome::NotSent(NotSent::Lost(error.to_string()))
            }
            Ok(Err(error)) => OrderOutcome::Rejected(Rejection {
                class: RejectClass::Invalid,
                text: error.to_string(),
            }),
            Err(_) => OrderOutcome::Unknown(self.waiting.wire.lost_text()),
        })
    }
}

#[derive(Debug)]
struct Guard {
    wire: Arc<Wire>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.wire.die("closed by this node");
    }
}

#[derive(Debug)]
struct SessionInner {
    guard: Arc<Guard>,
    account: AccountId,
    state: Arc<SessionState>,
    style: Option<Style>,
}

impl Drop for SessionInner {
    fn drop(&mut self) {
        let wire = &self.guard.wire;
        if !wire.table.lock().remove_own_route(self.account, &self.state) {
            return;
        }
        let request = Request::Other(Op::Logout { account: self.account });
        let line = wire::encode_request(wire.next_id(), &request);
        if let Err(reason) = wire.write_now(&line) {
            tracing::debug!(account = %self.account, %reason, "could not say goodbye to the broker");
        }
    }
}

#[derive(Debug, Default)]
struct SessionState {
    synced: AtomicBool,
    lost: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Route {
    pushes: mpsc::Sender<SessionPush>,
    state: Arc<SessionState>,
    positions: Vec<BrokerPosition>,
    pendings: Vec<BrokerPending>,
}

type Answer = Result<Box<RawValue>, FieldError>;

#[derive(Debug, Default)]
struct Table {
    answers: BTreeMap<u64, oneshot::Sender<Answer>>,
    routes: BTreeMap<AccountId, Route>,
    quotes: BTreeMap<Symbol, Quote>,
}

#[derive(Debug, Default)]
struct Out {
    /// The rest of a line that the kernel took only in part.
    rest: BytesMut,
    dead: bool,
}

#[derive(Debug)]
struct Wire {
    stream: TcpStream,
    node: NodeId,
    out: Mutex<Out>,
    table: Mutex<Table>,
    flush: Notify,
    lost: watch::Sender<Option<String>>,
    last_id: AtomicU64,
}

/// A place in the table of answers; leaves it when dropped.
#[derive(Debug)]
struct Waiting {
    id: u64,
    wire: Arc<Wire>,
    receiver: oneshot::Receiver<Answer>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.wire.table.lock().answers.remove(&self.id);
    }
}

impl Wire {
    fn new(stream: TcpStream, node: NodeId) -> Self {
        Self {
            stream,
            node,
            out: Mutex::default(),
            table: Mutex::default(),
            flush: Notify::new(),
            lost: watch::Sender::new(None),
            last_id: AtomicU64::new(0),
        }
    }

    fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn lost_text(&self) -> String {
        self.lost.borrow().clone().unwrap_or_else(|| "the connection is gone".to_owned())
    }

    fn add_route(
        &self,
        account: AccountId,
        pushes: mpsc::Sender<SessionPush>,
    ) -> Result<Arc<SessionState>, PaperError> {
        let mut table = self.table.lock();
        if let Some(reason) = self.lost.borrow().clone() {
            return Err(PaperError::Lost { reason });
        }
        if table.routes.contains_key(&account) {
            return Err(PaperError::AlreadyOpen { account });
        }
        let state = Arc::new(SessionState::default());
        let (positions, pendings) = (Vec::new(), Vec::new());
        table.routes.insert(account, Route { pushes, state: state.clone(), positions, pendings });
        Ok(state)
    }

    fn expect_answer(self: &Arc<Self>, id: u64) -> Result<Waiting, NotSent> {
        let (sender, receiver) = oneshot::channel();
        let mut table = self.table.lock();
        if let Some(reason) = self.lost.borrow().clone() {
            return Err(NotSent::Lost(reason));
        }
        if table.answers.len() >= IN_FLIGHT_MAX {
            return Err(NotSent::TooMany);
        }
        table.answers.insert(id, sender);
        Ok(Waiting { id, wire: self.clone(), receiver })
    }

    /// Gives a line to the kernel without waiting.
    fn write_now(&self, line: &[u8]) -> Result<(), NotSent> {
        if line.is_empty() {
            return Ok(());
        }
        let mut out = self.out.lock();
        if out.dead {
            return Err(NotSent::Lost(self.lost_text()));
        }
        if !out.rest.is_empty() {
            return Err(NotSent::Busy);
        }
        match self.stream.try_write(line) {
            Ok(written) if written == line.len() => Ok(()),
            Ok(written) => {
                out.rest.extend_from_slice(&line[written..]);
                self.flush.notify_one();
                Ok(())
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Err(NotSent::Busy),
            Err(e) => {
                drop(out);
                self.die(&format!("write failed: {e}"));
                Err(NotSent::Lost(e.to_string()))
            }
        }
    }

    /// For requests that need no permit: waits while the socket is full.
    async fn write_when_possible(&self, line: &Bytes) -> Result<(), NotSent> {
        loop {
            match self.write_now(line) {
                Err(NotSent::Busy) => {}
                other => return other,
            }
            let rest_is_waiting = !self.out.lock().rest.is_empty();
            if rest_is_waiting {
                tokio::task::yield_now().await;
            }
            if let Err(e) = self.stream.writable().await {
                self.die(&format!("write failed: {e}"));
            }
        }
    }

    async fn call<T: DeserializeOwned>(
        self: &Arc<Self>,
        op: &'static str,
        request: &Request,
    ) -> Result<T, PaperError> {
        let lost = |not_sent: NotSent| PaperError::Lost { reason: not_sent.to_string() };
        let id = self.next_id();
        let line = wire::encode_request(id, request);
        let mut waiting = self.expect_answer(id).map_err(lost)?;
        let exchange = async {
            self.write_when_possible(&line).await.map_err(lost)?;
            let gone = |_| PaperError::Lost { reason: self.lost_text() };
            (&mut waiting.receiver).await.map_err(gone)
        };
        let answer = tokio::time::timeout(CALL_LIMIT, exchange)
            .await
            .map_err(|_| PaperError::Timeout { op, limit_s: CALL_LIMIT.as_secs() })??;
        let text = answer.map_err(PaperError::Refused)?;
        serde_json::from_str(text.get()).map_err(|e| PaperError::Answer { op, text: e.to_string() })
    }

    /// Ends the connection. First the writing, then everybody who waits is told.
    fn die(&self, reason: &str) {
        {
            let mut out = self.out.lock();
            if out.dead {
                return;
            }
            out.dead = true;
            out.rest.clear();
            socket::abort(&self.stream);
        }
        let mut table = self.table.lock();
        self.lost.send_replace(Some(reason.to_owned()));
        table.answers.clear();
        table.routes.clear();
        self.flush.notify_one();
    }

    fn receive(&self, line: &Bytes) -> Result<(), String> {
        let incoming: wire::Incoming =
            serde_json::from_slice(line).map_err(|e| format!("line not understood: {e}"))?;
        if let Some(push) = incoming.push {
            self.route(push);
            return Ok(());
        }
        let answer = match (incoming.ok, incoming.error) {
            (Some(ok), None) => Ok(ok),
            (None, Some(error)) => Err(error),
            _ => return Err("answer with neither or both of ok and error".to_owned()),
        };
        let Some(id) = incoming.id else {
            return Err(format!("the broker could not read a line of ours: {answer:?}"));
        };
        // Nobody waits any more: the caller gave up, or it was a logout.
        if let Some(waiting) = self.table.lock().answers.remove(&id) {
            let _ = waiting.send(answer);
        }
        Ok(())
    }

    fn route(&self, push: Push) {
        let mut table = self.table.lock();
        match push {
            Push::Quote(quote) => {
                table.quotes.insert(quote.symbol.clone(), quote);
            }
            Push::List { account, positions, pendings, anew } => {
                if let Some(route) = table.routes.get_mut(&account) {
                    if anew {
                        route.positions.clear();
                        route.pendings.clear();
                    }
                    route.positions.extend(positions);
                    route.pendings.extend(pendings);
                }
            }
            Push::Synced { account, revision, positions, pendings, funds } => {
                let Some(route) = table.routes.get_mut(&account) else { return };
                let book = AccountBook {
                    account,
                    revision,
                    positions: std::mem::take(&mut route.positions),
                    pendings: std::mem::take(&mut route.pendings),
                    funds,
                    complete: true,
                };
                let counted = (book.positions.len(), book.pendings.len());
                if counted != (positions, pendings) {
                    table.end_route(account, "the broker listed another number than it counted");
                    return;
                }
                route.state.synced.store(true, Ordering::Release);
                table.hand_over(account, SessionPush::Synced(snapshot_of(book)));
            }
            Push::Ended { account, reason } => table.end_route(account, &reason),
            Push::Change { account, revision, change, funds } => {
                // Before the mark it belongs to an earlier session; the lists will contain it.
                let is_synced = |r: &Route| r.state.synced.load(Ordering::Acquire);
                if table.routes.get(&account).is_some_and(is_synced) {
                    let received = Instant::now();
                    let push = SessionPush::Change { revision, change, funds, received };
                    table.hand_over(account, push);
                }
            }
        }
    }
}

impl Table {
    /// A session that was ended here and opened again has another state; its route stays.
    fn remove_own_route(&mut self, account: AccountId, state: &Arc<SessionState>) -> bool {
        let is_own = self.routes.get(&account).is_some_and(|r| Arc::ptr_eq(&r.state, state));
        is_own && self.routes.remove(&account).is_some()
    }

    fn hand_over(&mut self, account: AccountId, push: SessionPush) {
        let Some(route) = self.routes.get(&account) else { return };
        if route.pushes.try_send(push).is_err() {
            self.end_route(account, "its pushes were not taken in time, or nobody listens");
        }
    }

    fn end_route(&mut self, account: AccountId, reason: &str) {
        if let Some(route) = self.routes.remove(&account) {
            *route.state.lost.lock() = Some(reason.to_owned());
            tracing::warn!(%account, reason, "paper session ended");
        }
    }
}

fn snapshot_of(book: AccountBook) -> AccountSnapshot {
    AccountSnapshot {
        account: book.account,
        revision: book.revision,
        at: wall_now(),
        positions: book.positions,
        pendings: book.pendings,
        funds: Some(book.funds),
    }
}

async fn read_loop(wire: Arc<Wire>) {
    let mut lost = wire.lost.subscribe();
    let mut lines = LineBuffer::new(ANSWER_LINE_BYTES_MAX);
    let reason = loop {
        tokio::select! {
            biased;
            _ = lost.wait_for(Option::is_some) => return,
            ready = wire.stream.readable() => if let Err(e) = ready { break e.to_string() },
        }
        match wire.stream.try_read_buf(lines.space()) {
            Ok(0) => break "closed by the broker".to_owned(),
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(e) => break format!("read failed: {e}"),
        }
        if let Err(reason) = take_lines(&wire, &mut lines) {
            break reason;
        }
    };
    wire.die(&reason);
}

fn take_lines(wire: &Wire, lines: &mut LineBuffer) -> Result<(), String> {
    while let Some(line) = lines.next() {
        match line {
            Line::Complete(line) => wire.receive(&line)?,
            Line::TooLong => return Err("a line of the broker is too long".to_owned()),
        }
    }
    Ok(())
}

/// Writes the rest of a half-written line, within its limit.
async fn flush_loop(wire: Arc<Wire>) {
    loop {
        wire.flush.notified().await;
        if wire.out.lock().dead {
            return;
        }
        match tokio::time::timeout(FLUSH_LIMIT, flush_rest(&wire)).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => return wire.die(&format!("write failed: {e}")),
            Err(_) => return wire.die("the rest of a line could not be written in time"),
        }
    }
}

async fn flush_rest(wire: &Wire) -> std::io::Result<()> {
    loop {
        wire.stream.writable().await?;
        let mut out = wire.out.lock();
        if out.rest.is_empty() {
            return Ok(());
        }
        match wire.stream.try_write(&out.rest) {
            Ok(written) => out.rest.advance(written),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
}
