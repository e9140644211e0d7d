//! Sessions at the paper broker.
//!
//! Settings of an account on this platform: `address` (HOST:PORT) and, where the number at
//! the broker is another than here, `login`. Each account has a connection of its own, so
//! that cutting one account off at its deadline cuts nobody else.

use super::{Answer, BrokerError, BrokerSession, NotSent, Outcome, PermittedOrder, SessionEvent};
use crate::clock::NodeClock;
use crate::gate::SendPermit;
use paper::client::{OrderOutcome, PaperClient, PaperSession, SendMeta, SessionPush};
use paper::protocol::AccountChange;
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
        if let Some(key) = map.keys().find(|k| !matches!(k.as_str(), "address" | "login")) {
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
        Ok(PaperSettings { address: address.to_owned(), login })
    }
}

/// An open session of one account.
pub struct PaperBrokerSession {
    client: PaperClient,
    session: PaperSession,
    account: AccountId,
    clock: NodeClock,
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
    node: &NodeId,
    token: Token,
    clock: NodeClock,
) -> Result<(PaperBrokerSession, PaperEvents, AccountSnapshot), BrokerError> {
    let ident = Ident { node: node.clone() };
    let client = PaperClient::connect(&settings.address, ident).await?;
    let (session, mut pushes) = client.open_account(settings.login, token).await?;
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
    Ok((PaperBrokerSession { client, session, account, clock }, events, snapshot))
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

impl PaperBrokerSession {
    /// Whether the account holds at most one trade a symbol.
    pub fn is_netting(&self) -> bool {
        self.session.is_netting()
    }

    /// Whether the rest of a partial close has a new number and not our tag.
    pub fn renumbers(&self) -> bool {
        self.session.renumbers()
    }
}

impl BrokerSession for PaperBrokerSession {
    fn submit(&self, permit: SendPermit, request: &OrderRequest, attempt: u64) -> Answer {
        let mut answers = self.submit_all(vec![PermittedOrder { permit, request, attempt }]);
        answers.pop().unwrap_or_else(|| not_sent(NotSent::Session))
    }

    fn submit_all(&self, orders: Vec<PermittedOrder<'_>>) -> Vec<Answer> {
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
            let meta = SendMeta {
                token: spent.token,
                deadline_margin_us: i64::try_from(spent.margin.as_micros()).unwrap_or(i64::MAX),
                sent_at,
                client_ref: attempt,
            };
            leaving.push((request, meta));
            answers.push(None);
        }
        let mut left = self.session.submit_all(&leaving).into_iter();
        let answer = |known: Option<Answer>| {
            known.unwrap_or_else(|| match left.next() {
                Some(Ok(answer)) => Box::pin(async move { outcome_of(answer.await) }),
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
        self.client.abort();
    }
}

fn not_sent(why: NotSent) -> Answer {
    Box::pin(std::future::ready(Outcome::NotSent(why)))
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
