//! The whole broker without a network: sessions, faults, and orders on their way to the engine.
//!
//! Decides when an order arrives, when it is carried out, and when it is answered; what a fresh
//! login is shown; which sessions end. Inputs: requests, `now`, and a draw that the caller owns.
//! Outputs: `Output`s in order, and the time at which it wants to be asked again (`next_due`).
//! The server puts a socket around it; a simulation calls it with its own clock and its own draw.
//!
//! Invariants:
//! 1. No clock, no randomness, no hash order: equal calls give equal outputs, and a clone goes on
//!    as the original does.
//! 2. Orders of one session arrive in the order in which they were sent. An accepted order may be
//!    overtaken by later ones while the broker takes its time with it.
//! 3. An order that arrives after its session was ended by the broker is refused. One that arrives
//!    after its connection is gone is decided all the same, unless its fault says otherwise.
//! 4. The token of an order is seen when it arrives, and checked when it is carried out.
//! 5. `Output::Write` of a request comes before those of the trades it changed, before what is
//!    told of them, and before its answer.
//!
//! Not covered: a delay of reads. Only orders are held up, so a read can overtake an order.

use crate::clock::Now;
use crate::engine::{Effects, Engine, Terms};
use crate::faults::{Draw, Fault, FaultPlan, FaultSpec, Settings, Treatment, Withheld};
use crate::ledger::{EndedFact, Fact, LoginFact, LostFact, RequestFact};
use crate::protocol::{
    AccountBook, FeedQuote, FieldError, HistoryPage, Instruction, LIST_ITEMS_MAX, LoginKind,
    OrderMeta, OrderReply, Push,
};
use schemas::{
    AccountId, FollowerTicket, Micros, Money, NodeId, Quote, RejectClass, Rejection, Token,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most orders that are on their way at a time; past it an order is not understood.
pub const ON_THEIR_WAY_MAX: usize = 100_000;
/// What a session is told that a later login ended.
pub const KICKED: &str = "another session of this account was opened";

/// What has to be written down or said, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all of them are facts and changes, and each is moved once"
)]
pub enum Output {
    /// A row for the ledger.
    Write(Fact),
    /// To every session of this account.
    Change {
        /// The account.
        account: AccountId,
        /// What changed.
        push: Push,
    },
    /// A new price, without suffix.
    Quote(Quote),
    /// To one connection. After `Push::Ended` the account has no session there any more.
    Push {
        /// Which.
        connection: u64,
        /// What.
        push: Push,
    },
    /// The answer to an order.
    Answer {
        /// The connection it came from; it may be gone.
        connection: u64,
        /// Its `id` there.
        request: u64,
        /// What became of it.
        reply: OrderReply,
        /// How long from now it is held back.
        after: Duration,
    },
}

/// An order as it was read from its connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// The connection, counted from 1.
    pub connection: u64,
    /// Its `id` there.
    pub request: u64,
    /// The account it is for.
    pub account: AccountId,
    /// What the sender states.
    pub meta: OrderMeta,
    /// What to do.
    pub instruction: Instruction,
}

/// Who logs in as a trader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraderLogin {
    /// The connection, counted from 1.
    pub connection: u64,
    /// The account.
    pub account: AccountId,
    /// Who.
    pub node: NodeId,
    /// The lease token.
    pub token: Option<Token>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Session {
    /// Counts logins over the whole broker.
    login: u64,
    /// An order that is sent now arrives no earlier: those before it come first.
    line_free_us: u64,
    shown: Shown,
}

/// What a session is told of its account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Everything,
    Part { lists: Withheld, claims_complete: bool },
}

/// An order on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OnItsWay {
    sent: Sent,
    login: u64,
    sent_mono_us: u64,
    /// When, and as which one; 0 before it arrived.
    arrived: (u64, u64),
    treatment: Treatment,
    /// Its session was ended by the broker while it was on its way.
    is_ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "nearly all of them are orders")]
enum Step {
    Arrives(OnItsWay),
    IsCarriedOut(OnItsWay),
    Syncs { connection: u64, account: AccountId, login: u64 },
}

/// The broker.
#[derive(Debug, Clone, Default)]
pub struct Broker {
    engine: Engine,
    settings: Settings,
    faults: FaultPlan,
    sessions: BTreeMap<(u64, AccountId), Session>,
    /// By the time at which it is due, then in the order of asking.
    steps: BTreeMap<(u64, u64), Step>,
    last_step: u64,
    last_login: u64,
    last_arrival: u64,
}

impl Broker {
    /// A broker without accounts.
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Accounts, symbols and prices, for reading.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Accounts and symbols, for declaring them. Orders and prices go through the broker.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// What holds for every order.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Sets what holds for every order from now on.
    pub fn set_settings(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Sets one more fault.
    pub fn set_fault(&mut self, now: Now, spec: FaultSpec) -> Result<Fault, FieldError> {
        if let Some(account) = spec.account {
            self.engine.style(account)?;
        }
        self.faults.set(now.mono_us, spec)
    }

    /// The faults that are set.
    pub fn faults(&mut self, now: Now) -> Vec<Fault> {
        self.faults.list(now.mono_us)
    }

    /// Takes faults away: one, those of an account, or all.
    pub fn clear_faults(
        &mut self,
        id: Option<u64>,
        account: Option<AccountId>,
    ) -> Result<Vec<Fault>, FieldError> {
        self.faults.clear(id, account)
    }

    /// When `run` has something to do next, in microseconds since the broker started.
    pub fn next_due(&self) -> Option<u64> {
        self.steps.keys().next().map(|(due, _)| *due)
    }

    /// Does everything that is due.
    pub fn run(&mut self, now: Now, out: &mut Vec<Output>) {
        while let Some(first) = self.steps.first_entry() {
            let due = first.key().0;
            if due > now.mono_us {
                return;
            }
            match first.remove() {
                Step::Arrives(order) => self.arrive(now, due, order, out),
                Step::IsCarriedOut(order) => self.carry_out(now, order, out),
                Step::Syncs { connection, account, login } => {
                    self.sync(now, connection, account, login, out);
                }
            }
        }
    }

    fn at(&mut self, due_us: u64, step: Step) {
        self.last_step += 1;
        self.steps.insert((due_us, self.last_step), step);
    }

    // Sessions.

    /// A trader begins a session. What is returned follows the answer to the login.
    ///
    /// Errors: the account is not declared, or the token is old and tokens are checked.
    pub fn login(
        &mut self,
        now: Now,
        who: TraderLogin,
        draw: &mut Draw<'_>,
        out: &mut Vec<Output>,
    ) -> Result<Vec<Push>, FieldError> {
        let TraderLogin { connection, account, node, token } = who;
        self.engine.login(account, token, self.settings)?;
        let treatment = self.faults.decide_login(now.mono_us, account, draw);
        let (kind, faults) = (LoginKind::Trader, treatment.faults);
        let fact = LoginFact { connection, account: Some(account), node, kind, token, faults };
        out.push(Output::Write(Fact::Login(fact)));
        if treatment.kicks_others {
            self.kick(account, Some(connection), KICKED, out);
        }
        self.last_login += 1;
        let login = self.last_login;
        let shown = match treatment.unsynced {
            None => Shown::Everything,
            Some(unsynced) => {
                let due = now.mono_us.saturating_add(micros(unsynced.lasts));
                self.at(due, Step::Syncs { connection, account, login });
                let (lists, claims_complete) = (unsynced.lists, unsynced.claims_complete);
                Shown::Part { lists, claims_complete }
            }
        };
        let line_free_us = self.sessions.get(&(connection, account)).map_or(0, |s| s.line_free_us);
        self.sessions.insert((connection, account), Session { login, line_free_us, shown });
        Ok(lists(self.book(now, connection, account)?, false))
    }

    /// A trader ends its session.
    pub fn logout(&mut self, connection: u64, account: AccountId) {
        self.sessions.remove(&(connection, account));
    }

    /// A connection is gone, and the sessions on it.
    pub fn disconnect(&mut self, connection: u64, out: &mut Vec<Output>) {
        self.sessions.retain(|(of, _), _| *of != connection);
        let dies = |step: &Step| {
            matches!(step, Step::Arrives(order)
                if order.sent.connection == connection && order.treatment.dies_with_connection)
        };
        let dead: Vec<_> =
            self.steps.iter().filter(|(_, s)| dies(s)).map(|(key, _)| *key).collect();
        for key in dead {
            if let Some(Step::Arrives(order)) = self.steps.remove(&key) {
                out.push(lost(order));
            }
        }
    }

    /// Ends the sessions of an account, except those of one connection; returns how many.
    pub fn kick(
        &mut self,
        account: AccountId,
        except: Option<u64>,
        reason: &str,
        out: &mut Vec<Output>,
    ) -> usize {
        let goes =
            |(connection, of): &(u64, AccountId)| *of == account && Some(*connection) != except;
        let gone: Vec<_> = self.sessions.keys().filter(|key| goes(key)).copied().collect();
        let mut logins = BTreeSet::new();
        for key in &gone {
            let (connection, reason) = (key.0, reason.to_owned());
            logins.extend(self.sessions.remove(key).map(|session| session.login));
            let fact = EndedFact { connection, account, reason: reason.clone() };
            out.push(Output::Write(Fact::Ended(fact)));
            out.push(Output::Push { connection, push: Push::Ended { account, reason } });
        }
        for step in self.steps.values_mut() {
            if let Step::Arrives(order) = step
                && logins.contains(&order.login)
            {
                order.is_ended = true;
            }
        }
        gone.len()
    }

    /// Whether this connection has a trader's session of the account.
    pub fn has_session(&self, connection: u64, account: AccountId) -> bool {
        self.sessions.contains_key(&(connection, account))
    }

    /// What the account holds, as the session of this connection is shown it; without a session
    /// there, everything.
    pub fn book(
        &self,
        now: Now,
        connection: u64,
        account: AccountId,
    ) -> Result<AccountBook, FieldError> {
        let mut book = self.engine.book(now, account)?;
        let session = self.sessions.get(&(connection, account));
        if let Some(Shown::Part { lists, claims_complete }) = session.map(|s| s.shown) {
            withhold(lists, &mut book.positions);
            withhold(lists, &mut book.pendings);
            book.complete = claims_complete;
        }
        Ok(book)
    }

    /// A page of the account's closed trades, as the session of this connection is shown it.
    ///
    /// Errors: the account is not declared, or its lists are not complete there.
    pub fn history(
        &self,
        connection: u64,
        account: AccountId,
        since: Micros,
        after: u64,
    ) -> Result<HistoryPage, FieldError> {
        let session = self.sessions.get(&(connection, account));
        match session.map(|session| session.shown) {
            Some(Shown::Part { claims_complete: false, .. }) => {
                Err(FieldError::new("account", account, "is not synced yet"))
            }
            _ => self.engine.history(account, since, after),
        }
    }

    fn sync(
        &mut self,
        now: Now,
        connection: u64,
        account: AccountId,
        login: u64,
        out: &mut Vec<Output>,
    ) {
        let session = self.sessions.get_mut(&(connection, account));
        let Some(session) = session.filter(|session| session.login == login) else { return };
        let was = std::mem::replace(&mut session.shown, Shown::Everything);
        let Shown::Part { claims_complete: false, .. } = was else { return };
        let Ok(book) = self.engine.book(now, account) else { return };
        let pushes = lists(book, true).into_iter();
        out.extend(pushes.map(|push| Output::Push { connection, push }));
    }

    // Orders.

    /// Takes an order of a node: it is carried out in this call, or by a later `run`.
    ///
    /// Errors: the connection has no session of the account, or too many are on their way.
    pub fn order(
        &mut self,
        now: Now,
        sent: Sent,
        draw: &mut Draw<'_>,
        out: &mut Vec<Output>,
    ) -> Result<(), FieldError> {
        let account = sent.account;
        let Some(session) = self.sessions.get_mut(&(sent.connection, account)) else {
            let text = "has no trader logged in on this connection";
            return Err(FieldError::new("account", account, text));
        };
        if self.steps.len() >= ON_THEIR_WAY_MAX {
            let text = format!("more than {ON_THEIR_WAY_MAX} orders are on their way");
            return Err(FieldError::new("account", account, text));
        }
        let (delay, login) = (self.settings.answer_delay(), session.login);
        let treatment = self.faults.decide(now.mono_us, account, &sent.instruction, delay, draw);
        let deliver_after = treatment.deliver_after;
        let sent_mono_us = now.mono_us;
        let order =
            OnItsWay { sent, login, sent_mono_us, arrived: (0, 0), treatment, is_ended: false };
        let Some(deliver_after) = deliver_after else {
            out.push(lost(order));
            return Ok(());
        };
        let due = now.mono_us.saturating_add(micros(deliver_after)).max(session.line_free_us);
        session.line_free_us = due;
        self.at(due, Step::Arrives(order));
        self.run(now, out);
        Ok(())
    }

    /// Carries out an order by hand, at once; no fault hits it.
    pub fn manual(
        &mut self,
        now: Now,
        connection: u64,
        request: u64,
        account: AccountId,
        instruction: Instruction,
        out: &mut Vec<Output>,
    ) -> Result<OrderReply, FieldError> {
        let mut effects = Effects::default();
        let reply =
            self.engine.order(now, account, None, &instruction, self.settings, &mut effects)?;
        self.last_arrival += 1;
        out.push(Output::Write(Fact::Request(RequestFact {
            connection,
            account,
            meta: None,
            instruction,
            reply: reply.clone(),
            request,
            sent_mono_us: now.mono_us,
            arrived_mono_us: now.mono_us,
            arrival: self.last_arrival,
            answer_after_us: Some(0),
            faults: Vec::new(),
        })));
        put(effects, out);
        Ok(reply)
    }

    fn arrive(&mut self, now: Now, due_us: u64, mut order: OnItsWay, out: &mut Vec<Output>) {
        self.last_arrival += 1;
        order.arrived = (now.mono_us, self.last_arrival);
        let (account, token) = (order.sent.account, order.sent.meta.token);
        if !order.is_ended {
            self.engine.see_token(account, token).expect("a session's account is declared");
        }
        let accept_after = micros(order.treatment.accept_after);
        if accept_after == 0 || order.is_ended {
            return self.carry_out(now, order, out);
        }
        self.at(due_us.saturating_add(accept_after), Step::IsCarriedOut(order));
    }

    fn carry_out(&mut self, now: Now, order: OnItsWay, out: &mut Vec<Output>) {
        let OnItsWay { sent, sent_mono_us, arrived, treatment, is_ended, .. } = order;
        let Sent { connection, request, account, meta, instruction } = sent;
        let Treatment { answer_after, verdict, comment, faults, .. } = treatment;
        let mut effects = Effects::default();
        let reply = if is_ended {
            let (class, text) = (RejectClass::Disabled, "the session was ended".to_owned());
            OrderReply::Rejected(Rejection { class, text })
        } else {
            let terms = Terms { settings: self.settings, verdict, comment };
            self.engine
                .order_on(now, account, Some(&meta), &instruction, &terms, &mut effects)
                .expect("a session's account is declared")
        };
        let answer = answer_after.map(|after| Output::Answer {
            connection,
            request,
            reply: reply.clone(),
            after,
        });
        out.push(Output::Write(Fact::Request(RequestFact {
            connection,
            account,
            meta: Some(meta),
            instruction,
            reply,
            request,
            sent_mono_us,
            arrived_mono_us: arrived.0,
            arrival: arrived.1,
            answer_after_us: answer_after.map(micros),
            faults,
        })));
        put(effects, out);
        out.extend(answer);
    }

    // The market and the money.

    /// Takes prices, and does what they trigger; all of them or none.
    pub fn feed(
        &mut self,
        now: Now,
        quotes: &[FeedQuote],
        out: &mut Vec<Output>,
    ) -> Result<(), FieldError> {
        let mut effects = Effects::default();
        self.engine.feed(now, quotes, &mut effects)?;
        put(effects, out);
        Ok(())
    }

    /// Money in, or out if negative.
    pub fn deposit(
        &mut self,
        now: Now,
        account: AccountId,
        amount: Money,
        out: &mut Vec<Output>,
    ) -> Result<(), FieldError> {
        let mut effects = Effects::default();
        self.engine.deposit(now, account, amount, &mut effects)?;
        put(effects, out);
        Ok(())
    }

    /// Sets the stop-out level of an account, or takes it away, and looks at once.
    pub fn set_stop_out(
        &mut self,
        now: Now,
        account: AccountId,
        percent: Option<u32>,
        out: &mut Vec<Output>,
    ) -> Result<(), FieldError> {
        let mut effects = Effects::default();
        self.engine.set_stop_out(now, account, percent, &mut effects)?;
        put(effects, out);
        Ok(())
    }

    /// Closes the trade with the largest loss, as a stop-out does, whatever the margin says.
    pub fn stop_out(
        &mut self,
        now: Now,
        account: AccountId,
        out: &mut Vec<Output>,
    ) -> Result<FollowerTicket, FieldError> {
        let mut effects = Effects::default();
        let ticket = self.engine.stop_out(now, account, &mut effects)?;
        put(effects, out);
        Ok(ticket)
    }
}

/// The whole account in pieces, and the mark that says it was the whole; without the mark where
/// the book itself says that it is not complete.
pub fn lists(book: AccountBook, anew: bool) -> Vec<Push> {
    let AccountBook { account, revision, positions, pendings, funds, complete } = book;
    let counted = (positions.len(), pendings.len());
    let mut pushes = Vec::new();
    for positions in positions.chunks(LIST_ITEMS_MAX) {
        let (positions, pendings) = (positions.to_vec(), Vec::new());
        pushes.push(Push::List { account, positions, pendings, anew: false });
    }
    for pendings in pendings.chunks(LIST_ITEMS_MAX) {
        let (positions, pendings) = (Vec::new(), pendings.to_vec());
        pushes.push(Push::List { account, positions, pendings, anew: false });
    }
    if anew {
        let (positions, pendings) = (Vec::new(), Vec::new());
        pushes.insert(0, Push::List { account, positions, pendings, anew });
    }
    if complete {
        let (positions, pendings) = counted;
        pushes.push(Push::Synced { account, revision, positions, pendings, funds });
    }
    pushes
}

fn withhold<T>(lists: Withheld, items: &mut Vec<T>) {
    let mut number = 0;
    items.retain(|_| {
        number += 1;
        lists == Withheld::Half && number % 2 == 0
    });
}

fn lost(order: OnItsWay) -> Output {
    let OnItsWay { sent, sent_mono_us, treatment, .. } = order;
    let Sent { connection, request, account, meta, instruction } = sent;
    let faults = treatment.faults;
    Output::Write(Fact::Lost(LostFact {
        connection,
        request,
        account,
        meta,
        instruction,
        sent_mono_us,
        faults,
    }))
}

fn put(effects: Effects, out: &mut Vec<Output>) {
    out.extend(effects.trades.into_iter().map(|trade| Output::Write(Fact::Trade(trade))));
    out.extend(effects.quotes.into_iter().map(Output::Quote));
    let change = |(account, push)| Output::Change { account, push };
    out.extend(effects.changes.into_iter().map(change));
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
