//! Sessions at the paper broker.
//!
//! Settings of an account on this platform: `address` (HOST:PORT); where the number at the
//! broker is another than here, `login`; and `blocking`, true to have each order call hold a
//! thread until it is answered, as the calls of many vendors' libraries do. Each account has a
//! connection of its own, so that cutting one account off at its deadline cuts nobody else.
//!
//! The blocking flavour keeps the one connection: what the broker tells comes before the answer
//! that it belongs to, and a second login would end the first session at many brokers.

use super::executor::{BlockingCall, Executor, Lane};
use super::{
    Answer, BrokerError, BrokerSession, LeftAt, NotSent, Outcome, PermittedOrder, SessionEvent,
};
use crate::clock::NodeClock;
use crate::gate::{SendPermit, SpentPermit};
use crate::secret::Secret;
use paper::client::{OrderOutcome, PaperClient, PaperSession, SendMeta, SessionPush};
use paper::protocol::{AccountChange, Password};
use paper::{Ident, PaperError};
use schemas::{
    AccountId, AccountSnapshot, ClosedTrade, Micros, NodeId, OrderRequest, Quote, Symbol,
    SymbolSpec, Token,
};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Longest wait for the broker's sync mark after a login. Brokers are known to take 10 s.
const SYNC_LIMIT: Duration = Duration::from_secs(12);

/// Where an account is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PaperSettings {
    /// HOST:PORT of the broker.
    pub address: String,
    /// The account's number there.
    pub login: AccountId,
    /// Each order call holds a thread until it is answered.
    pub blocking: bool,
}

impl PaperSettings {
    /// Reads the settings of an account; unknown keys are refused.
    pub fn from_json(
        account: AccountId,
        settings: &serde_json::Value,
    ) -> Result<Self, BrokerError> {
        let wrong = |problem: String| BrokerError::Settings(problem);
        let map = settings
            .as_object()
            .ok_or_else(|| wrong(format!("must be a JSON object, got {settings}")))?;
        let known = |key: &&String| matches!(key.as_str(), "address" | "login" | "blocking");
        if let Some(key) = map.keys().find(|key| !known(key)) {
            return Err(wrong(format!("{key}: not a setting of the paper platform")));
        }
        let address = map
            .get("address")
            .and_then(serde_json::Value::as_str)
            .ok_or_else(|| wrong("address: must be HOST:PORT as text, it is missing".into()))?;
        let login = match map.get("login") {
            None => account,
            Some(value) => value
                .as_u64()
                .and_then(|number| AccountId::new(number).ok())
                .ok_or_else(|| wrong(format!("login: must be a number above 0, got {value}")))?,
        };
        let blocking = match map.get("blocking") {
            None => false,
            Some(value) => value
                .as_bool()
                .ok_or_else(|| wrong(format!("blocking: must be true or false, got {value}")))?,
        };
        Ok(PaperSettings { address: address.to_owned(), login, blocking })
    }
}

/// An open session of one account.
pub struct PaperBrokerSession {
    client: PaperClient,
    session: PaperSession,
    account: AccountId,
    clock: NodeClock,
    /// The way to the threads, where order calls hold one.
    lane: Option<Lane>,
}

impl std::fmt::Debug for PaperBrokerSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PaperBrokerSession").field("account", &self.account).finish()
    }
}

/// What a session says, one event at a time, until it is lost.
#[derive(Debug)]
pub struct PaperEvents {
    pushes: mpsc::Receiver<SessionPush>,
    waiting: Option<SessionEvent>,
    received: Instant,
    session: PaperSession,
}

impl PaperEvents {
    /// When the callback of the last event ran: the socket's reader had understood it.
    pub fn received(&self) -> Instant {
        self.received
    }

    /// The next event; after `Lost` there is none. May be dropped and asked again.
    pub async fn next(&mut self) -> SessionEvent {
        if let Some(event) = self.waiting.take() {
            return event;
        }
        loop {
            let Some(push) = self.pushes.recv().await else {
                return SessionEvent::Lost(self.session.lost_reason().unwrap_or_default());
            };
            if let Some(event) = self.event_of_push(push) {
                return event;
            }
        }
    }

    /// An event that is there now. That the session is lost is left for [`PaperEvents::next`].
    pub fn try_next(&mut self) -> Option<SessionEvent> {
        if let Some(event) = self.waiting.take() {
            return Some(event);
        }
        loop {
            let push = self.pushes.try_recv().ok()?;
            if let Some(event) = self.event_of_push(push) {
                return Some(event);
            }
        }
    }

    fn event_of_push(&mut self, push: SessionPush) -> Option<SessionEvent> {
        let SessionPush::Change { change, funds, received, .. } = push else { return None };
        self.received = received;
        let funds = SessionEvent::Funds(funds);
        match event_of(change) {
            Some(event) => {
                self.waiting = Some(funds);
                Some(event)
            }
            None => Some(funds),
        }
    }
}

/// What a change of an account means to its session; nothing if only the money changed.
pub fn event_of(change: AccountChange) -> Option<SessionEvent> {
    Some(match change {
        AccountChange::PositionOpened { position }
        | AccountChange::PositionModified { position } => SessionEvent::Position(position),
        AccountChange::PositionReduced { position, closed }
        | AccountChange::PositionReversed { position, closed } => {
            SessionEvent::Reduced { position, closed }
        }
        AccountChange::PositionClosed { closed, reason } => SessionEvent::Closed { closed, reason },
        AccountChange::PendingPlaced { pending } | AccountChange::PendingModified { pending } => {
            SessionEvent::Pending(pending)
        }
        AccountChange::PendingCancelled { pending } => SessionEvent::PendingGone(pending.ticket),
        AccountChange::PendingFilled { position } => SessionEvent::PendingFilled(position),
        AccountChange::FundsChanged {} => return None,
    })
}

/// Connects, logs in and waits for the sync mark. The first complete state comes with it.
pub async fn open(
    account: AccountId,
    settings: &PaperSettings,
    password: Option<&Secret>,
    node: &NodeId,
    token: Token,
    clock: NodeClock,
) -> Result<(PaperBrokerSession, PaperEvents, AccountSnapshot), BrokerError> {
    let ident = Ident { node: node.clone() };
    let client = PaperClient::connect(&settings.address, ident).await?;
    let password = password.map(|password| Password::new(password.expose()));
    let (session, mut pushes) = client.open_account_with(settings.login, token, password).await?;
    let synced = async {
        loop {
            match pushes.recv().await {
                Some(SessionPush::Synced(snapshot)) => return Some(snapshot),
                Some(SessionPush::Change { .. }) => {}
                None => return None,
            }
        }
    };
    let snapshot = tokio::time::timeout(SYNC_LIMIT, synced)
        .await
        .map_err(|_| BrokerError::Connection("no sync mark after the login".into()))?
        .ok_or_else(|| BrokerError::Connection(session.lost_reason().unwrap_or_default()))?;
    let snapshot = plausible(AccountSnapshot { account, ..snapshot })?;
    let received = Instant::now();
    let events = PaperEvents { pushes, waiting: None, received, session: session.clone() };
    Ok((PaperBrokerSession { client, session, account, clock, lane: None }, events, snapshot))
}

/// Refuses a read that cannot be true: no trade, and margin in use (H41). The account is not
/// flat, its list is not there yet.
fn plausible(snapshot: AccountSnapshot) -> Result<AccountSnapshot, BrokerError> {
    match snapshot.margin_of_nothing() {
        None => Ok(snapshot),
        Some(margin) => Err(BrokerError::Incomplete(format!(
            "no trade is listed, but a margin of {margin} is in use"
        ))),
    }
}

/// What the broker is told with an order, made on the line before it is written.
fn meta_of(spent: SpentPermit, sent_at: Micros, attempt: u64) -> SendMeta {
    SendMeta {
        token: spent.token,
        deadline_margin_us: i64::try_from(spent.margin.as_micros()).unwrap_or(i64::MAX),
        sent_at,
        client_ref: attempt,
    }
}

/// What a blocking account is told on a node that has no threads for it.
pub fn no_threads() -> BrokerError {
    let text = "blocking: this node has no threads for it, see LOCKSTEP_BLOCKING_FOLLOWERS";
    BrokerError::Settings(text.to_owned())
}

impl PaperBrokerSession {
    /// Whether the account holds at most one trade a symbol.
    pub fn is_netting(&self) -> bool {
        self.session.is_netting()
    }

    /// Whether the rest of a partial close has a new number and not our tag.
    pub fn renumbers(&self) -> bool {
        self.session.renumbers()
    }

    /// Has order calls hold a thread from now on, at most `cap` at once.
    ///
    /// Errors: `Settings` on a node that has no threads for it.
    pub fn hold_threads(&mut self, executor: &Executor, cap: usize) -> Result<(), BrokerError> {
        self.lane = Some(executor.open(self.account, cap).ok_or_else(no_threads)?);
        Ok(())
    }

    fn call(&self, order: PermittedOrder<'_>) -> (SendPermit, BlockingCall) {
        let PermittedOrder { permit, request, attempt } = order;
        let (session, request) = (self.session.clone(), request.clone());
        let call = move |spent, left: LeftAt| {
            outcome_of(session.order_blocking(&request, meta_of(spent, left.wall, attempt)))
        };
        (permit, Box::new(call))
    }
}

impl BrokerSession for PaperBrokerSession {
    fn submit(&self, permit: SendPermit, request: &OrderRequest, attempt: u64) -> Answer {
        let mut answers = self.submit_all(vec![PermittedOrder { permit, request, attempt }]);
        answers.pop().unwrap_or_else(|| not_sent(NotSent::Session))
    }

    fn submit_all(&self, orders: Vec<PermittedOrder<'_>>) -> Vec<Answer> {
        if let Some(lane) = &self.lane {
            return lane.submit_all(orders.into_iter().map(|order| self.call(order)).collect());
        }
        let mut answers: Vec<Option<Answer>> = Vec::with_capacity(orders.len());
        let mut leaving = Vec::with_capacity(orders.len());
        let sent_at = self.clock.wall();
        // The last check: between it and the write there is nothing but the encoding.
        let now = self.clock.now();
        for PermittedOrder { permit, request, attempt } in orders {
            let Ok(spent) = permit.spend(now) else {
                answers.push(Some(not_sent(NotSent::Gate)));
                continue;
            };
            leaving.push((request, meta_of(spent, sent_at, attempt)));
            answers.push(None);
        }
        let mut left = self.session.submit_all(&leaving).into_iter();
        let answer = |known: Option<Answer>| {
            known.unwrap_or_else(|| match left.next() {
                Some(Ok(answer)) => Answer::later(async move { outcome_of(answer.await) }),
                Some(Err(_)) | None => not_sent(NotSent::Session),
            })
        };
        answers.into_iter().map(answer).collect()
    }

    fn quote(&self, symbol: &Symbol) -> Option<Quote> {
        self.session.quote(symbol)
    }

    async fn snapshot(&self) -> Result<AccountSnapshot, BrokerError> {
        let snapshot = self.session.snapshot().await?;
        plausible(AccountSnapshot { account: self.account, ..snapshot })
    }

    async fn history(&self, since: Micros) -> Result<Vec<ClosedTrade>, BrokerError> {
        Ok(self.session.history(since).await?)
    }

    async fn symbols(&self) -> Result<Vec<SymbolSpec>, BrokerError> {
        Ok(self.session.symbols().await?)
    }

    fn abort(&self) {
        // First what has not begun, or it would begin on a connection that is gone.
        if let Some(lane) = &self.lane {
            lane.close();
        }
        self.client.abort();
    }
}

fn not_sent(why: NotSent) -> Answer {
    Answer::now(Outcome::NotSent(why))
}

fn outcome_of(outcome: OrderOutcome) -> Outcome {
    match outcome {
        OrderOutcome::Done(done) => Outcome::Done(done),
        OrderOutcome::Rejected(rejection) => Outcome::Rejected(rejection),
        OrderOutcome::NotSent(_) => Outcome::NotSent(NotSent::Session),
        OrderOutcome::Unknown(reason) => Outcome::Unknown(reason),
    }
}

impl From<PaperError> for BrokerError {
    fn from(error: PaperError) -> Self {
        match error {
            PaperError::Refused(refusal) => BrokerError::Refused(refusal.to_string()),
            other => BrokerError::Connection(other.to_string()),
        }
    }
}

#[cfg(test)]
#[path = "paper_tests.rs"]
mod tests;
