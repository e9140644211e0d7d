//! The engine, the ledger and the list of connections, changed together under one lock.
//!
//! Decides in which order things are told: what one request causes is written to the ledger,
//! then pushed, then answered, before the next request is looked at. What becomes of an order, and
//! when, is decided by `broker`.
//!
//! Invariants:
//! 1. Requests are looked at in the order in which they are read from their sockets.
//! 2. No answer leaves before the ledger rows of its request are in the file.
//! 3. A connection that does not take its lines is cut off; it never holds up the others.

use crate::broker::{self, Broker, Output, Sent, TraderLogin};
use crate::clock::{Clock, Now};
use crate::error::PaperError;
use crate::faults::{Settings, SettingsChange};
use crate::ledger::{Fact, Ledger, LoginFact};
use crate::ledger_file::LedgerFile;
use crate::protocol::{
    Ended, FieldError, LedgerPage, LoggedIn, LoginKind, Op, PAGE_ROWS_MAX, Push, Request,
    StoppedOut,
};
use crate::wire;
use bytes::Bytes;
use schemas::{AccountId, Quote, Symbol};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// A line for a connection, and how long after its making it may leave.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) line: Bytes,
    pub(crate) delay: Duration,
}

/// What the core knows of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    lines: mpsc::Sender<Outgoing>,
    kick: Arc<Notify>,
    is_driver: bool,
    is_auditor: bool,
    accounts: BTreeMap<AccountId, LoginKind>,
    /// Of all accounts that ever logged in here: what quotes are sent with.
    suffixes: BTreeSet<String>,
}

#[derive(Debug)]
pub(crate) struct Core {
    clock: Clock,
    broker: Broker,
    /// Of the shares and spans of faults.
    draws: fastrand::Rng,
    ledger: Ledger,
    file: Option<LedgerFile>,
    peers: BTreeMap<u64, Peer>,
    listeners: BTreeMap<AccountId, BTreeSet<u64>>,
    last_connection: u64,
}

/// What a request comes to: an encoded answer, and what comes after it.
struct Reply {
    line: Bytes,
    after: Vec<Push>,
}

impl Reply {
    fn at_once(id: u64, reply: &impl Serialize) -> Self {
        Self { line: wire::encode_ok(id, reply), after: Vec::new() }
    }
}

#[derive(Serialize)]
struct Nothing {}

/// Why a request was not carried out: the sender's fault, or the broker cannot go on.
pub(crate) enum Failed {
    Field(FieldError),
    Broker(PaperError),
}

impl From<FieldError> for Failed {
    fn from(error: FieldError) -> Self {
        Failed::Field(error)
    }
}

impl From<PaperError> for Failed {
    fn from(error: PaperError) -> Self {
        Failed::Broker(error)
    }
}

impl Core {
    pub(crate) fn new(settings: Settings, seed: u64, file: Option<LedgerFile>) -> Self {
        Self {
            clock: Clock::start(),
            broker: Broker::new(settings),
            draws: fastrand::Rng::with_seed(seed),
            ledger: Ledger::default(),
            file,
            peers: BTreeMap::new(),
            listeners: BTreeMap::new(),
            last_connection: 0,
        }
    }

    pub(crate) fn connect(&mut self, lines: mpsc::Sender<Outgoing>, kick: Arc<Notify>) -> u64 {
        self.last_connection += 1;
        let peer = Peer {
            lines,
            kick,
            is_driver: false,
            is_auditor: false,
            accounts: BTreeMap::new(),
            suffixes: BTreeSet::new(),
        };
        self.peers.insert(self.last_connection, peer);
        self.last_connection
    }

    /// Errors: only if the broker cannot go on.
    pub(crate) fn disconnect(&mut self, connection: u64) -> Result<(), PaperError> {
        let now = self.clock.now();
        self.forget(connection);
        let mut out = Vec::new();
        self.broker.disconnect(connection, &mut out);
        self.publish(now, out)
    }

    fn forget(&mut self, connection: u64) {
        let Some(peer) = self.peers.remove(&connection) else { return };
        for account in peer.accounts.into_keys() {
            self.stop_listening(account, connection);
        }
    }

    /// Does what is due by now, and says how long there is nothing more to do; absent: until
    /// something is asked. Errors: only if the broker cannot go on.
    pub(crate) fn run_due(&mut self) -> Result<Option<Duration>, PaperError> {
        let now = self.clock.now();
        let mut out = Vec::new();
        self.broker.run(now, &mut out);
        self.publish(now, out)?;
        let wait = |due: u64| Duration::from_micros(due.saturating_sub(now.mono_us));
        Ok(self.broker.next_due().map(wait))
    }

    /// When there is something to do without being asked.
    pub(crate) fn next_due(&self) -> Option<u64> {
        self.broker.next_due()
    }

    pub(crate) fn connections(&self) -> usize {
        self.peers.len()
    }

    fn stop_listening(&mut self, account: AccountId, connection: u64) {
        if let Some(listeners) = self.listeners.get_mut(&account) {
            listeners.remove(&connection);
            if listeners.is_empty() {
                self.listeners.remove(&account);
            }
        }
    }

    /// Takes one line of a connection. Errors: only if the broker cannot go on.
    pub(crate) fn take_line(&mut self, connection: u64, line: &[u8]) -> Result<(), PaperError> {
        let (id, request) = match wire::decode_request(line) {
            Ok(decoded) => decoded,
            Err(bad) => {
                self.refuse(connection, bad.id, &bad.error);
                return Ok(());
            }
        };
        match self.take_request(connection, id, request) {
            Ok(None) => Ok(()),
            Ok(Some(reply)) => {
                self.send_now(connection, reply.line);
                for push in reply.after {
                    self.send_now(connection, wire::encode_push(&push));
                }
                Ok(())
            }
            Err(Failed::Field(error)) => {
                self.refuse(connection, Some(id), &error);
                Ok(())
            }
            Err(Failed::Broker(error)) => Err(error),
        }
    }

    pub(crate) fn refuse(&mut self, connection: u64, id: Option<u64>, error: &FieldError) {
        self.send_now(connection, wire::encode_error(id, error));
    }

    /// The answer, unless it is given later, or never.
    fn take_request(
        &mut self,
        conn: u64,
        id: u64,
        request: Request,
    ) -> Result<Option<Reply>, Failed> {
        let now = self.clock.now();
        let mut out = Vec::new();
        match request {
            Request::Order { account, meta, instruction } => {
                self.require_trader(conn, account)?;
                let sent = Sent { connection: conn, request: id, account, meta, instruction };
                let Self { broker, draws, .. } = self;
                broker.order(now, sent, &mut |below| draws.u64(0..below), &mut out)?;
                self.publish(now, out)?;
                Ok(None)
            }
            Request::Manual { account, instruction } => {
                self.require_driver(conn)?;
                let reply = self.broker.manual(now, conn, id, account, instruction, &mut out)?;
                self.publish(now, out)?;
                Ok(Some(Reply::at_once(id, &reply)))
            }
            Request::Other(op) => self.take_op(now, conn, id, op).map(Some),
        }
    }

    fn take_op(&mut self, now: Now, conn: u64, id: u64, op: Op) -> Result<Reply, Failed> {
        match op {
            Op::Login { account, node, kind, token, password } => {
                if let (LoginKind::Trader, Some(account)) = (kind, account) {
                    self.broker.engine().check_password(account, password.as_ref())?;
                }
                let faults = Vec::new();
                let fact = LoginFact { connection: conn, account, node, kind, token, faults };
                self.login(now, conn, id, fact)
            }
            Op::Logout { account } => {
                if self.peer(conn)?.accounts.remove(&account).is_none() {
                    return Err(FieldError::new("account", account, "is not logged in here").into());
                }
                self.stop_listening(account, conn);
                self.broker.logout(conn, account);
                Ok(Reply::at_once(id, &Nothing {}))
            }
            Op::Ping {} => Ok(Reply::at_once(id, &Nothing {})),
            Op::Snapshot { account } => {
                self.require_reader(conn, account)?;
                Ok(Reply::at_once(id, &self.broker.book(now, conn, account)?))
            }
            Op::History { account, since_us, after } => {
                self.require_reader(conn, account)?;
                let page = self.broker.history(conn, account, since_us, after)?;
                Ok(Reply::at_once(id, &page))
            }
            Op::Symbols { account } => {
                self.require_reader(conn, account)?;
                Ok(Reply::at_once(id, &self.broker.engine().symbols(account)?))
            }
            Op::Quotes { account } => {
                self.require_reader(conn, account)?;
                Ok(Reply::at_once(id, &self.broker.engine().quotes(account)?))
            }
            Op::Accounts { after } => {
                self.require_auditor(conn)?;
                Ok(Reply::at_once(id, &self.broker.engine().accounts(after)))
            }
            Op::Books { after } => {
                self.require_auditor(conn)?;
                Ok(Reply::at_once(id, &self.broker.engine().books(now, after)))
            }
            Op::Ledger { from } => {
                self.require_auditor(conn)?;
                Ok(Reply::at_once(id, &self.ledger_page(from)))
            }
            Op::FaultList {} => {
                self.require_auditor(conn)?;
                Ok(Reply::at_once(id, &self.broker.faults(now)))
            }
            op => {
                self.require_driver(conn)?;
                self.drive(now, id, op)
            }
        }
    }

    /// What only a driver may do.
    fn drive(&mut self, now: Now, id: u64, op: Op) -> Result<Reply, Failed> {
        let mut out = Vec::new();
        let reply = match op {
            Op::DeclareAccounts { accounts } => {
                self.broker.engine_mut().declare_accounts(accounts)?;
                Reply::at_once(id, &Nothing {})
            }
            Op::DeclareSymbols { symbols } => {
                self.broker.engine_mut().declare_symbols(symbols)?;
                Reply::at_once(id, &Nothing {})
            }
            Op::Feed { quotes } => {
                self.broker.feed(now, &quotes, &mut out)?;
                Reply::at_once(id, &Nothing {})
            }
            Op::Deposit { account, amount } => {
                self.broker.deposit(now, account, amount, &mut out)?;
                Reply::at_once(id, &Nothing {})
            }
            Op::Settings { answer_delay_ms, check_tokens } => {
                let change = SettingsChange { answer_delay_ms, check_tokens };
                self.broker.set_settings(self.broker.settings().changed(change)?);
                Reply::at_once(id, &self.broker.settings())
            }
            Op::FaultSet { fault } => Reply::at_once(id, &self.broker.set_fault(now, fault)?),
            Op::FaultClear { fault, account } => {
                Reply::at_once(id, &self.broker.clear_faults(fault, account)?)
            }
            Op::Kick { account } => {
                let sessions = self.broker.kick(account, None, "ended by a driver", &mut out);
                Reply::at_once(id, &Ended { sessions })
            }
            Op::StopOutLevel { account, percent } => {
                self.broker.set_stop_out(now, account, percent, &mut out)?;
                Reply::at_once(id, &Nothing {})
            }
            Op::StopOut { account } => {
                let ticket = self.broker.stop_out(now, account, &mut out)?;
                Reply::at_once(id, &StoppedOut { ticket })
            }
            Op::Login { .. }
            | Op::Logout { .. }
            | Op::Ping {}
            | Op::Snapshot { .. }
            | Op::History { .. }
            | Op::Symbols { .. }
            | Op::Quotes { .. }
            | Op::Accounts { .. }
            | Op::Books { .. }
            | Op::Ledger { .. }
            | Op::FaultList {} => unreachable!("taken before"),
        };
        self.publish(now, out)?;
        Ok(reply)
    }

    fn login(&mut self, now: Now, conn: u64, id: u64, who: LoginFact) -> Result<Reply, Failed> {
        let (account, kind) = (who.account, who.kind);
        let (mut after, mut out, mut style) = (Vec::new(), Vec::new(), None);
        let lists = match (kind, account) {
            (LoginKind::Trader, None) => {
                let text = "is missing; a trader names its account";
                return Err(FieldError::new("account", "", text).into());
            }
            (LoginKind::Trader, Some(account)) => {
                let LoginFact { connection, node, token, .. } = who;
                let who = TraderLogin { connection, account, node, token };
                let Self { broker, draws, .. } = self;
                broker.login(now, who, &mut |below| draws.u64(0..below), &mut out)?
            }
            (LoginKind::Driver | LoginKind::Auditor, account) => {
                let book = account.map(|account| self.broker.engine().book(now, account));
                out.push(Output::Write(Fact::Login(who)));
                book.transpose()?.map(|book| broker::lists(book, false)).unwrap_or_default()
            }
        };
        if let Some(account) = account {
            let suffix = self.broker.engine().suffix(account)?.to_owned();
            style = Some(self.broker.engine().style(account)?);
            if self.peer(conn)?.suffixes.insert(suffix) {
                let quotes = self.broker.engine().quotes(account)?;
                after.extend(quotes.into_iter().map(Push::Quote));
            }
            after.extend(lists);
            self.listeners.entry(account).or_default().insert(conn);
            self.peer(conn)?.accounts.insert(account, kind);
        }
        let peer = self.peer(conn)?;
        peer.is_driver |= kind == LoginKind::Driver;
        peer.is_auditor |= kind == LoginKind::Auditor;
        self.publish(now, out)?;
        Ok(Reply { after, ..Reply::at_once(id, &LoggedIn { style }) })
    }

    fn ledger_page(&self, from: u64) -> LedgerPage {
        let rows = self.ledger.rows();
        let start = usize::try_from(from).unwrap_or(usize::MAX).min(rows.len());
        let end = (start + PAGE_ROWS_MAX).min(rows.len());
        let next = (end < rows.len()).then_some(end as u64);
        LedgerPage { rows: rows[start..end].to_vec(), next }
    }

    // Who may do what.

    fn peer(&mut self, connection: u64) -> Result<&mut Peer, FieldError> {
        let gone = || FieldError::new("line", "", "the connection is being cut off");
        self.peers.get_mut(&connection).ok_or_else(gone)
    }

    fn require_driver(&mut self, connection: u64) -> Result<(), FieldError> {
        let text = "needs a login of kind driver on this connection";
        let is_driver = self.peer(connection)?.is_driver;
        if is_driver { Ok(()) } else { Err(FieldError::new("op", "", text)) }
    }

    fn require_auditor(&mut self, connection: u64) -> Result<(), FieldError> {
        let text = "needs a login of kind auditor or driver on this connection";
        let peer = self.peer(connection)?;
        let may = peer.is_auditor || peer.is_driver;
        if may { Ok(()) } else { Err(FieldError::new("op", "", text)) }
    }

    fn require_reader(&mut self, connection: u64, account: AccountId) -> Result<(), FieldError> {
        if self.peer(connection)?.accounts.contains_key(&account) {
            return Ok(());
        }
        let text = "is not logged in on this connection";
        self.require_auditor(connection).map_err(|_| FieldError::new("account", account, text))
    }

    fn require_trader(&mut self, connection: u64, account: AccountId) -> Result<(), FieldError> {
        match self.peer(connection)?.accounts.get(&account) {
            Some(LoginKind::Trader) => Ok(()),
            Some(LoginKind::Driver | LoginKind::Auditor) | None => {
                let text = "has no trader logged in on this connection";
                Err(FieldError::new("account", account, text))
            }
        }
    }

    // Writing down and telling.

    /// First everything is written down, then it is told, in order.
    fn publish(&mut self, now: Now, out: Vec<Output>) -> Result<(), PaperError> {
        let mut told = Vec::with_capacity(out.len());
        for output in out {
            let Output::Write(fact) = output else {
                told.push(output);
                continue;
            };
            let row = self.ledger.append(now, fact);
            if let Some(file) = &mut self.file {
                file.add(row);
            }
        }
        if let Some(file) = &mut self.file {
            file.write()?;
        }
        for output in told {
            self.tell(output);
        }
        Ok(())
    }

    fn tell(&mut self, output: Output) {
        match output {
            Output::Write(_) => {}
            Output::Quote(quote) => self.push_quote(&quote),
            Output::Change { account, push } => {
                let Some(listeners) = self.listeners.get(&account).cloned() else { return };
                let line = wire::encode_push(&push);
                for connection in listeners {
                    self.send_now(connection, line.clone());
                }
            }
            Output::Push { connection, push } => {
                if let Push::Ended { account, .. } = &push {
                    self.stop_listening(*account, connection);
                    if let Some(peer) = self.peers.get_mut(&connection) {
                        peer.accounts.remove(account);
                    }
                }
                self.send_now(connection, wire::encode_push(&push));
            }
            Output::Answer { connection, request, reply, after } => {
                let line = wire::encode_ok(request, &reply);
                self.send(connection, Outgoing { line, delay: after });
            }
        }
    }

    /// Once a connection and suffix, not once an account.
    fn push_quote(&mut self, quote: &Quote) {
        let mut lines: BTreeMap<String, Bytes> = BTreeMap::new();
        let mut sends = Vec::new();
        for (connection, peer) in &self.peers {
            for suffix in &peer.suffixes {
                let line = lines.entry(suffix.clone()).or_insert_with(|| {
                    let symbol = Symbol::new(format!("{}{suffix}", quote.symbol))
                        .expect("symbol and suffix were checked when they were declared");
                    wire::encode_push(&Push::Quote(Quote { symbol, ..quote.clone() }))
                });
                sends.push((*connection, line.clone()));
            }
        }
        for (connection, line) in sends {
            self.send_now(connection, line);
        }
    }

    fn send_now(&mut self, connection: u64, line: Bytes) {
        self.send(connection, Outgoing { line, delay: Duration::ZERO });
    }

    fn send(&mut self, connection: u64, outgoing: Outgoing) {
        let Some(peer) = self.peers.get(&connection) else { return };
        if peer.lines.try_send(outgoing).is_err() {
            tracing::warn!(connection, "cut off: it does not take its lines");
            peer.kick.notify_one();
            // Its sessions at the broker end when its reader notices, a moment later.
            self.forget(connection);
        }
    }
}
