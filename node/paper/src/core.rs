//! The engine, the ledger and the list of connections, changed together under one lock.
//!
//! Decides in which order things are told: what one request causes is written to the ledger,
//! then pushed, then answered, before the next request is looked at.
//!
//! Invariants:
//! 1. Requests are decided in the order in which they are read from their sockets.
//! 2. No answer leaves before the ledger rows of its request are in the file.
//! 3. A connection that does not take its lines is cut off; it never holds up the others.

use crate::clock::{Clock, Now};
use crate::engine::{Effects, Engine};
use crate::error::PaperError;
use crate::faults::{Settings, SettingsChange};
use crate::ledger::{Fact, Ledger, LoginFact, RequestFact};
use crate::ledger_file::LedgerFile;
use crate::protocol::{
    FieldError, Instruction, LIST_ITEMS_MAX, LedgerPage, LoginKind, Op, OrderMeta, PAGE_ROWS_MAX,
    Push, Request,
};
use crate::wire;
use bytes::Bytes;
use schemas::{AccountId, NodeId, Quote, Symbol, Token};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    engine: Engine,
    ledger: Ledger,
    file: Option<LedgerFile>,
    settings: Settings,
    peers: BTreeMap<u64, Peer>,
    listeners: HashMap<AccountId, BTreeSet<u64>>,
    last_connection: u64,
}

/// What a request comes to: an encoded answer, when it may leave, and what comes after it.
struct Reply {
    line: Bytes,
    delay: Duration,
    after: Vec<Push>,
}

impl Reply {
    fn at_once(id: u64, reply: &impl Serialize) -> Self {
        Self { line: wire::encode_ok(id, reply), delay: Duration::ZERO, after: Vec::new() }
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
    pub(crate) fn new(settings: Settings, file: Option<LedgerFile>) -> Self {
        Self {
            clock: Clock::start(),
            engine: Engine::default(),
            ledger: Ledger::default(),
            file,
            settings,
            peers: BTreeMap::new(),
            listeners: HashMap::new(),
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

    pub(crate) fn disconnect(&mut self, connection: u64) {
        let Some(peer) = self.peers.remove(&connection) else { return };
        for account in peer.accounts.into_keys() {
            self.stop_listening(account, connection);
        }
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
            Ok(reply) => {
                self.send(connection, Outgoing { line: reply.line, delay: reply.delay });
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

    fn take_request(&mut self, conn: u64, id: u64, request: Request) -> Result<Reply, Failed> {
        match request {
            Request::Order { account, meta, instruction } => {
                self.require_trader(conn, account)?;
                let mut reply = self.order(conn, id, account, Some(meta), instruction)?;
                reply.delay = self.settings.answer_delay();
                Ok(reply)
            }
            Request::Manual { account, instruction } => {
                self.require_driver(conn)?;
                self.order(conn, id, account, None, instruction)
            }
            Request::Other(op) => self.take_op(conn, id, op),
        }
    }

    fn take_op(&mut self, conn: u64, id: u64, op: Op) -> Result<Reply, Failed> {
        let now = self.clock.now();
        match op {
            Op::Login { account, node, kind, token } => {
                return self.login(conn, id, account, node, kind, token);
            }
            Op::Logout { account } => {
                let peer = self.peer(conn)?;
                if peer.accounts.remove(&account).is_none() {
                    return Err(FieldError::new("account", account, "is not logged in here").into());
                }
                self.stop_listening(account, conn);
            }
            Op::Ping {} => {}
            Op::Snapshot { account } => {
                self.require_reader(conn, account)?;
                return Ok(Reply::at_once(id, &self.engine.book(now, account)?));
            }
            Op::History { account, since_us, after } => {
                self.require_reader(conn, account)?;
                return Ok(Reply::at_once(id, &self.engine.history(account, since_us, after)?));
            }
            Op::Symbols { account } => {
                self.require_reader(conn, account)?;
                return Ok(Reply::at_once(id, &self.engine.symbols(account)?));
            }
            Op::Quotes { account } => {
                self.require_reader(conn, account)?;
                return Ok(Reply::at_once(id, &self.engine.quotes(account)?));
            }
            Op::DeclareAccounts { accounts } => {
                self.require_driver(conn)?;
                self.engine.declare_accounts(accounts)?;
            }
            Op::DeclareSymbols { symbols } => {
                self.require_driver(conn)?;
                self.engine.declare_symbols(symbols)?;
            }
            Op::Feed { quotes } => {
                self.require_driver(conn)?;
                let mut effects = Effects::default();
                self.engine.feed(now, &quotes, &mut effects)?;
                self.publish(now, None, effects)?;
            }
            Op::Deposit { account, amount } => {
                self.require_driver(conn)?;
                let mut effects = Effects::default();
                self.engine.deposit(now, account, amount, &mut effects)?;
                self.publish(now, None, effects)?;
            }
            Op::Settings { answer_delay_ms, check_tokens } => {
                self.require_driver(conn)?;
                let change = SettingsChange { answer_delay_ms, check_tokens };
                self.settings = self.settings.changed(change)?;
                return Ok(Reply::at_once(id, &self.settings));
            }
            Op::Accounts { after } => {
                self.require_auditor(conn)?;
                return Ok(Reply::at_once(id, &self.engine.accounts(after)));
            }
            Op::Books { after } => {
                self.require_auditor(conn)?;
                return Ok(Reply::at_once(id, &self.engine.books(now, after)));
            }
            Op::Ledger { from } => {
                self.require_auditor(conn)?;
                return Ok(Reply::at_once(id, &self.ledger_page(from)));
            }
        }
        Ok(Reply::at_once(id, &Nothing {}))
    }

    fn order(
        &mut self,
        connection: u64,
        id: u64,
        account: AccountId,
        meta: Option<OrderMeta>,
        instruction: Instruction,
    ) -> Result<Reply, Failed> {
        let now = self.clock.now();
        let mut effects = Effects::default();
        let settings = self.settings;
        let reply =
            self.engine.order(now, account, meta.as_ref(), &instruction, settings, &mut effects)?;
        let answer = Reply::at_once(id, &reply);
        let request = RequestFact { connection, account, meta, instruction, reply };
        self.publish(now, Some(Fact::Request(request)), effects)?;
        Ok(answer)
    }

    fn login(
        &mut self,
        connection: u64,
        id: u64,
        account: Option<AccountId>,
        node: NodeId,
        kind: LoginKind,
        token: Option<Token>,
    ) -> Result<Reply, Failed> {
        let now = self.clock.now();
        let mut after = Vec::new();
        match (kind, account) {
            (LoginKind::Trader, None) => {
                let text = "is missing; a trader names its account";
                return Err(FieldError::new("account", "", text).into());
            }
            (LoginKind::Trader, Some(account)) => {
                self.engine.login(account, token, self.settings)?
            }
            (LoginKind::Driver | LoginKind::Auditor, _) => {}
        }
        if let Some(account) = account {
            let suffix = self.engine.suffix(account)?.to_owned();
            if self.peer(connection)?.suffixes.insert(suffix) {
                after.extend(self.engine.quotes(account)?.into_iter().map(Push::Quote));
            }
            after.extend(self.lists(account)?);
            self.listeners.entry(account).or_default().insert(connection);
            self.peer(connection)?.accounts.insert(account, kind);
        }
        let peer = self.peer(connection)?;
        peer.is_driver |= kind == LoginKind::Driver;
        peer.is_auditor |= kind == LoginKind::Auditor;
        let fact = Fact::Login(LoginFact { connection, account, node, kind, token });
        self.publish(now, Some(fact), Effects::default())?;
        Ok(Reply { after, ..Reply::at_once(id, &Nothing {}) })
    }

    /// The whole account in pieces, and the mark that says it was the whole.
    fn lists(&self, account: AccountId) -> Result<Vec<Push>, FieldError> {
        let book = self.engine.book(self.clock.now(), account)?;
        let mut pushes = Vec::new();
        let counted = (book.positions.len(), book.pendings.len());
        for positions in book.positions.chunks(LIST_ITEMS_MAX) {
            let (positions, pendings) = (positions.to_vec(), Vec::new());
            pushes.push(Push::List { account, positions, pendings });
        }
        for pendings in book.pendings.chunks(LIST_ITEMS_MAX) {
            let (positions, pendings) = (Vec::new(), pendings.to_vec());
            pushes.push(Push::List { account, positions, pendings });
        }
        pushes.push(Push::Synced {
            account,
            revision: book.revision,
            positions: counted.0,
            pendings: counted.1,
            funds: book.funds,
        });
        Ok(pushes)
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

    fn publish(
        &mut self,
        now: Now,
        cause: Option<Fact>,
        effects: Effects,
    ) -> Result<(), PaperError> {
        let trades = effects.trades.into_iter().map(Fact::Trade);
        for fact in cause.into_iter().chain(trades) {
            let row = self.ledger.append(now, fact);
            if let Some(file) = &mut self.file {
                file.add(row);
            }
        }
        if let Some(file) = &mut self.file {
            file.write()?;
        }
        for quote in effects.quotes {
            self.push_quote(&quote);
        }
        for (account, push) in effects.changes {
            let Some(listeners) = self.listeners.get(&account).cloned() else { continue };
            let line = wire::encode_push(&push);
            for connection in listeners {
                self.send_now(connection, line.clone());
            }
        }
        Ok(())
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
            self.disconnect(connection);
        }
    }
}
