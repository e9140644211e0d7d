//! One tenure of one account: the shell around its follower and its lead.
//!
//! Does the I/O: reads rows, opens the session at the broker, takes permits, sends orders,
//! hands answers and events to the pure parts, and pushes rows. It decides nothing about
//! trades.
//!
//! Invariants:
//! 1. A permit is taken right before each order, and the order's own time is stamped there.
//! 2. What the session told is handed on before the answers that came after it.
//! 3. When the permission ends, the connection to the broker is cut off, so that nothing from
//!    its buffers is delivered later; when it comes back, the session is opened anew and
//!    everything is reconciled before anything live (H4, H8).
//! 4. A tenure is handed in for release only when no order is unanswered and no row is
//!    unwritten (S20); otherwise its lease is left to expire.
//! 5. Pairs are read only when no row of them waits in this node's writer: a session may follow
//!    another one of the same tenure.
//!
//! Not covered: which accounts there are; `account::manager` starts and stops tenures.

use super::asking::{OpenSessions, Wish};
use super::control::{self, Ask};
use super::executing::Outbox;
use super::leading::Leading;
use super::metrics::{Counters, names};
use super::modes::{self, FleetWatch};
use super::reading::{Load, load, read};
use super::rows::Owner;
use crate::broker::executor::{self, Executor};
use crate::broker::paper::{
    self as paper_platform, PaperBrokerSession, PaperEvents, PaperSettings,
};
use crate::broker::{BrokerError, BrokerSession, LeftAt, Outcome, SessionEvent};
use crate::causes::with_causes;
use crate::clock::{NodeClock, NodeTime};
use crate::config::NodeConfig;
use crate::credentials::{Holder, Sealed, unseal};
use crate::directory::{Directory, HeldLinks, SessionAccount};
use crate::follower::{
    AccountRead, Asker, Attempt, CloseAnswer, Effect, Follower, FollowerSettings, Input, Now,
    TicketKey,
};
use crate::gate::Gate;
use crate::lease::{LeaseState, TenureKey};
use crate::notes::{Note, Notes};
use crate::secret::Secret;
use crate::stamps::{Stamps, Trace};
use crate::tape::Tape;
use crate::writer::{AccountStatus, Row, Writer, store::PgRows};
use bus::{DoubtReason, FeedMessage, Feeds};
use futures_util::stream::{FuturesUnordered, StreamExt};
use reconcile::Limits;
use schemas::control::ControlVerb;
use schemas::planted::{self, Bug};
use schemas::{AccountId, Epoch, NodeId, Symbol};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Messages of one master's feed that wait for a follower; past it the feed sends a snapshot.
const FEED_MESSAGES_MAX: usize = 8_192;
/// Events of a broker that are taken in one turn, before anything else is looked at.
const EVENTS_PER_TURN: usize = 64;
/// How often a session looks at the clock: settle times, retries, the end of its permission.
const TICK: Duration = Duration::from_millis(100);
/// The same while nothing waits for the clock. The gate refuses orders by itself, so all that comes
/// later is that the session of a lost account is cut. With 10,000 accounts a look at each every
/// 100 ms takes a whole processor.
const TICK_AT_REST: Duration = Duration::from_millis(500);
/// First wait after a session could not be opened.
const OPEN_RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest such wait.
const OPEN_RETRY_MAX: Duration = Duration::from_secs(5);
/// Wait before rows that could not be read are asked for again.
pub(super) const LOAD_RETRY: Duration = Duration::from_secs(1);
/// How long a draining account waits for its last answers.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// How long a draining account waits until its rows are written.
const FLUSH_LIMIT: Duration = Duration::from_secs(10);
/// How long a draining master's last events may take to leave.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// A reconcile without any other reason: finds what nobody told of, such as a changed stop.
const ROUTINE_RECONCILE: Duration = Duration::from_secs(60);
/// Account and links are read again so often (chosen): nobody announces that a removed link has had its
/// time. Each account has its own moment.
const LINKS_REREAD: Duration = Duration::from_secs(600);
/// What the status row of a netting account with links that copy onto it says.
const NETTING_WORD: &str = "unusable";
/// Why.
const NETTING_DETAIL: &str = "netting account: it holds one trade a symbol, so it cannot be a follower; use a hedging account";
/// Reads of an account that operators may wait for at once.
const ASKED_MAX: usize = 4;
/// At most this often an account's status row is written.
const STATUS_EVERY: Duration = Duration::from_secs(5);
/// Most silent masters that a status names: three of the longest names fit its column.
const NAMED_MAX: usize = 3;

/// What all sessions of a node share.
#[derive(Debug)]
pub struct NodeContext {
    /// This process.
    pub node: NodeId,
    /// Its settings.
    pub config: NodeConfig,
    /// Its time.
    pub clock: NodeClock,
    /// Its permits.
    pub gate: Gate,
    /// Its feeds.
    pub feeds: Feeds,
    /// Its connection to the bus.
    pub bus: async_nats::Client,
    /// Its writer.
    pub writer: Writer,
    /// Its event log.
    pub notes: Notes,
    /// Its record of own times.
    pub stamps: Stamps,
    /// Pair rows, for reading.
    pub rows: Arc<PgRows>,
    /// Accounts and links.
    pub directory: Directory,
    /// Its threads for broker calls that hold one.
    pub executor: Executor,
    /// Its last copy events, for the API.
    pub tape: Tape,
    /// Its sessions that are open.
    pub open_sessions: OpenSessions,
    /// The fleet's mode, as its sessions heard of it.
    pub fleet_mode: FleetWatch,
    /// Where slow work runs.
    pub slow: Handle,
    /// Where sessions run.
    pub hot: Handle,
}

impl NodeContext {
    pub(super) fn now(&self) -> Now {
        Now { node: self.clock.now(), wall: self.clock.wall() }
    }
}

/// What the manager wants of a tenure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Work.
    Run,
    /// Finish what is in flight, write the rows, end.
    Drain,
    /// Another node is to have it: as for draining, but not before no order is on its way.
    Move,
    /// The tenure is lost: stop at once.
    Stop,
}

/// What the manager tells a tenure, last word wins.
#[derive(Debug, Clone)]
pub struct Control {
    /// What is wanted.
    pub wanted: watch::Receiver<Wanted>,
    /// Raised when the links of this account changed.
    pub links: watch::Receiver<u64>,
    /// What the node owns, and who else is there.
    pub lease: watch::Receiver<Arc<LeaseState>>,
}

/// How a tenure's session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Nothing in flight, everything written: the tenure may be given back.
    Drained,
    /// Something is unanswered or unwritten: the lease must run out.
    NotDrained,
    /// It could not be served here, and another node has room.
    Unserved {
        /// Nothing in flight, everything written; otherwise the lease must run out.
        drained: bool,
        /// It is this node that does not hear the master.
        deaf: bool,
    },
    /// The tenure was lost.
    Stopped,
}

impl Ended {
    schemas::words! {
        /// The word in logs.
        pub fn as_str(self) in WORDS {
            Ended::Drained => "drained",
            Ended::NotDrained => "not_drained",
            Ended::Unserved { .. } => "unserved",
            Ended::Stopped => "stopped",
        }
    }
}

/// One tenure that this node has gained.
#[derive(Debug, Clone, Copy)]
pub struct Gained {
    /// Account and token.
    pub tenure: TenureKey,
    /// The account was free before, so nobody's order can still be on its way.
    pub clean: bool,
    /// It was taken over before its lease ran out, because its owner is proven dead.
    pub hastened: bool,
}

/// Whether a tenure that ends may be given back: no order of it is unanswered, and no row of it is
/// unwritten (S20). Otherwise its lease is left to run out.
pub fn may_be_handed_in(unanswered: usize, unwritten_rows: usize) -> bool {
    (unanswered == 0 && unwritten_rows == 0) || planted::is(Bug::P17)
}

/// The account's password at the broker, if it has one. It is opened for each login and not kept.
fn open_password(
    config: &NodeConfig,
    account: &SessionAccount,
) -> Result<Option<Secret>, BrokerError> {
    let Some(sealed) = &account.credential else { return Ok(None) };
    let holder = Holder { account: account.id, platform: &account.platform };
    Ok(Some(unseal(config.master_keys.as_ref(), holder, sealed)?))
}

/// What is stored as the account's password by now; nothing if it cannot be read, and the one that is
/// known stays.
async fn read_password(context: Arc<NodeContext>, account: AccountId) -> Option<Option<Sealed>> {
    let slow = context.slow.clone();
    let read = slow.spawn(async move { context.directory.credential(account).await });
    match read.await {
        Ok(Ok(credential)) => Some(credential),
        Ok(Err(error)) => {
            tracing::debug!(%account, error = %with_causes(&error), "password not read again");
            None
        }
        Err(_panic_was_logged) => None,
    }
}

/// Runs a tenure until it ends.
pub async fn run(context: Arc<NodeContext>, gained: Gained, control: Control) -> Ended {
    let mut session = AccountSession::new(context, gained, control);
    session.note(|account, token| Note::TenureBegins { account, token, clean: gained.clean });
    let ended = session.run().await;
    session.note(|account, token| Note::TenureEnds { account, token, how: ended.as_str() });
    session.leave_feeds();
    session.count_untaggable(0);
    session.count_held(HeldLinks::default());
    ended
}

/// What became of an order.
pub(super) struct Answered {
    pub(super) key: TicketKey,
    pub(super) attempt: Attempt,
    pub(super) action: &'static str,
    pub(super) outcome: Outcome,
    /// When it left, where that was not when it was handed over.
    pub(super) left: Option<LeftAt>,
}

type AnswerFuture = Pin<Box<dyn Future<Output = Answered> + Send>>;
pub(super) type ReadFuture = Pin<Box<dyn Future<Output = (u64, Option<AccountRead>)> + Send>>;

pub(super) struct AccountSession {
    pub(super) context: Arc<NodeContext>,
    gained: Gained,
    pub(super) owner: Owner,
    control: Control,
    pub(super) follower: Option<Follower>,
    pub(super) feeds: Vec<(AccountId, mpsc::Receiver<FeedMessage>)>,
    /// When a feed that ended is attached to anew.
    attach_at: Option<NodeTime>,
    /// When account and links are read again without a word from the database.
    reread_at: NodeTime,
    pub(super) stretch: Option<u64>,
    /// Highest epoch that is stored, or was heard from another publisher.
    pub(super) epoch: Option<Epoch>,
    /// An epoch that the publisher began by itself, while it is being stored.
    pub(super) storing: Option<JoinHandle<()>>,
    /// Account and links are being read again, since they changed.
    reloading: Option<JoinHandle<Load>>,
    /// How many links of this account are in the gauge of untaggable ones.
    untaggable: usize,
    /// How many links of this account are in the gauges of held ones.
    held: HeldLinks,
    /// Names of the masters it copies, for people.
    master_names: BTreeMap<AccountId, String>,
    last_status: Option<NodeTime>,
    last_word: Option<&'static str>,
    /// The account at the broker cannot hold copies side by side.
    cannot_follow: bool,
    /// How long an order may wait here after it was noted as sent.
    orders_wait: Duration,
    /// Since when the session could not be opened.
    down_since: Option<NodeTime>,
    /// Since when a master is doubtful, while the session is open.
    silent_since: Option<NodeTime>,
    /// Whether another node hears what this one does not.
    listening_elsewhere: Option<JoinHandle<bool>>,
    /// The event whose orders are being sent, while own times are recorded.
    pub(super) trace: Option<Trace>,
    /// What was decided and is not done yet; empty while the session waits.
    pub(super) outbox: Outbox,
    /// Who wait for a copy to be closed.
    askers: BTreeMap<Asker, oneshot::Sender<CloseAnswer>>,
    last_asker: Asker,
    pub(super) counters: Counters,
    /// Symbols of masters whose quotes were looked up in this turn.
    pub(super) quoted: Vec<(AccountId, Symbol)>,
}

/// What belongs to one connection to the broker.
pub(super) struct Connection {
    pub(super) session: Arc<PaperBrokerSession>,
    events: PaperEvents,
    pub(super) answers: FuturesUnordered<AnswerFuture>,
    pub(super) reads: FuturesUnordered<ReadFuture>,
    /// Requests that wait for a read of the account, by its number; and when it began.
    asked: BTreeMap<u64, (Ask, Now)>,
    lead: Option<Leading>,
}

/// Why the work on one connection ended.
enum Interrupted {
    /// The permission is gone, or the account's roles changed: begin again.
    Again,
    /// The connection is gone, or the broker ended the session: begin again, but not at full speed.
    Lost,
    /// A master is silent here and heard elsewhere.
    Unserved,
    /// The manager wants something else.
    Wanted(Wanted),
}

impl AccountSession {
    fn new(context: Arc<NodeContext>, gained: Gained, control: Control) -> Self {
        let owner = Owner { account: gained.tenure.account, token: gained.tenure.token };
        let part = (owner.account.get() % 100) as f64 / 100.0;
        let reread_at = context.clock.now().plus(LINKS_REREAD.mul_f64(1.0 + part));
        AccountSession {
            context,
            gained,
            owner,
            control,
            follower: None,
            feeds: Vec::new(),
            attach_at: None,
            reread_at,
            stretch: None,
            epoch: None,
            storing: None,
            reloading: None,
            untaggable: 0,
            held: HeldLinks::default(),
            master_names: BTreeMap::new(),
            last_status: None,
            last_word: None,
            cannot_follow: false,
            orders_wait: Duration::ZERO,
            down_since: None,
            silent_since: None,
            listening_elsewhere: None,
            trace: None,
            outbox: Outbox::default(),
            askers: BTreeMap::new(),
            last_asker: 0,
            counters: Counters::default(),
            quoted: Vec::new(),
        }
    }

    async fn run(&mut self) -> Ended {
        self.status("connecting", None, true);
        for gauge in [names::LINKS_UNTAGGABLE, names::LINKS_PAUSED, names::LINKS_CLOSE_ONLY] {
            metrics::gauge!(gauge).increment(0.0);
        }
        let mut account = match self.load().await {
            Ok(account) => account,
            Err(wanted) => return self.end_unconnected(wanted).await,
        };
        let settings = match PaperSettings::from_json(account.id, &account.connection) {
            Ok(settings) => settings,
            Err(error) => return self.hold_unusable(&error).await,
        };
        self.attach_feeds();
        let mut wait = OPEN_RETRY_FIRST;
        loop {
            if let Err(wanted) = self.wait_for_permission().await {
                return self.end_unconnected(wanted).await;
            }
            let connected = match self.connect_while_wanted(&account, &settings).await {
                Ok(connected) => connected,
                Err(wanted) => return self.end_unconnected(wanted).await,
            };
            match connected {
                Ok(mut connection) => {
                    let opened = self.context.clock.now();
                    self.down_since = None;
                    let interrupted = self.work(&mut connection, &mut account).await;
                    let lasted = self.context.clock.now().since(opened);
                    if lasted >= OPEN_RETRY_MAX {
                        wait = OPEN_RETRY_FIRST;
                    }
                    match interrupted {
                        Interrupted::Again => self.cut(&mut connection),
                        Interrupted::Lost => {
                            self.cut(&mut connection);
                            // Two that end each other's sessions must not do it at full speed.
                            if lasted < OPEN_RETRY_MAX {
                                if let Err(wanted) = self.pause(wait).await {
                                    return self.end_unconnected(wanted).await;
                                }
                                wait = wait.saturating_mul(2).min(OPEN_RETRY_MAX);
                            }
                        }
                        Interrupted::Wanted(Wanted::Drain | Wanted::Move) => {
                            return self.drain(connection).await;
                        }
                        Interrupted::Unserved => {
                            let drained = self.drain(connection).await == Ended::Drained;
                            return Ended::Unserved { drained, deaf: true };
                        }
                        Interrupted::Wanted(Wanted::Run | Wanted::Stop) => {
                            self.cut(&mut connection);
                            return Ended::Stopped;
                        }
                    }
                }
                Err(error) => {
                    metrics::counter!(names::SESSION_OPEN_FAILURES).increment(1);
                    let reason = with_causes(&error);
                    tracing::warn!(account = %self.owner.account, %reason, "session not opened");
                    self.status("connecting", Some(reason), true);
                    let now = self.context.clock.now();
                    let down_since = *self.down_since.get_or_insert(now);
                    if now.since(down_since) >= self.context.config.session_down && self.has_peers()
                    {
                        tracing::warn!(account = %self.owner.account, "session down for too long, another node may try");
                        let ended = self.end_unconnected(Wanted::Drain).await;
                        return Ended::Unserved { drained: ended == Ended::Drained, deaf: false };
                    }
                    if error.may_be_the_password() {
                        let read = read_password(Arc::clone(&self.context), account.id);
                        if let Some(credential) = read.await {
                            account.credential = credential;
                        }
                    }
                    if let Err(wanted) = self.pause(wait).await {
                        return self.end_unconnected(wanted).await;
                    }
                    wait = wait.saturating_mul(2).min(OPEN_RETRY_MAX);
                }
            }
        }
    }

    /// Account, links and pairs, read completely; tried until it works.
    async fn load(&mut self) -> Result<SessionAccount, Wanted> {
        loop {
            self.wait_for_rows().await?;
            let context = Arc::clone(&self.context);
            let account = self.owner.account;
            let task = self.context.slow.spawn(async move { load(&context, account).await });
            match task.await.unwrap_or_else(|panic| Err(panic.to_string())) {
                Ok((account, links)) => {
                    self.master_names.clone_from(&account.master_names);
                    self.count_held(account.held);
                    self.context.fleet_mode.tell(account.fleet);
                    let settings = PaperSettings::from_json(account.id, &account.connection);
                    if settings.is_ok_and(|settings| settings.blocking) {
                        self.orders_wait = executor::WAIT_MAX;
                    }
                    self.begin_following(links);
                    self.epoch = account.epoch_max;
                    return Ok(account);
                }
                Err(reason) => {
                    tracing::warn!(account = %account, %reason, "account not read");
                    self.status("connecting", Some(reason), true);
                    self.pause(LOAD_RETRY).await?;
                }
            }
        }
    }

    /// Waits until no row of an earlier session of this account waits here for the database: one that
    /// began in the same tenure would not know what that one has done, and the rows of both would be
    /// stored. For one lease at most: a node that cannot write has lost the account by then, and if it has
    /// not, the rows are at fault, and the copies count more.
    async fn wait_for_rows(&mut self) -> Result<(), Wanted> {
        let account = self.owner.account;
        let pending = |session: &Self| session.context.writer.pairs_pending(account);
        if pending(self) == 0 {
            return Ok(());
        }
        let reason = format!("{} rows of the session before are not written yet", pending(self));
        tracing::info!(%account, %reason, "account not read");
        self.status("connecting", Some(reason), true);
        let until = self.context.clock.now().plus(self.context.config.lease);
        while pending(self) > 0 {
            if self.context.clock.now() >= until {
                tracing::error!(%account, rows = pending(self), "rows are not written, the account goes on without them");
                return Ok(());
            }
            self.pause(TICK).await?;
        }
        Ok(())
    }

    fn begin_following(&mut self, links: Vec<(reconcile::LinkRules, reconcile::Pairs)>) {
        if links.is_empty() {
            return;
        }
        let config = &self.context.config;
        let settings = FollowerSettings {
            parallel_orders: config.parallel_orders as usize,
            // The fence holds a broker call. It is counted from when an order was noted: where its call
            // holds a thread, it may have waited for one since.
            limits: Limits {
                delivery_max: config.fence + config.settle + self.orders_wait,
                ..Limits::default()
            },
            row_wait_max: config.lease,
            audits: config.audits.clone(),
            routine: ROUTINE_RECONCILE,
        };
        let now = self.context.now();
        // After a lease that ran out at least a fence has passed since the last order of the old
        // owner; after one that did not, it has to pass here (H8).
        let fence = if self.gained.hastened { config.fence } else { Duration::ZERO };
        let settle = (!self.gained.clean).then(|| now.node.plus(fence + config.settle));
        let follower = Follower::new(settings, links, settle, now);
        self.follower = Some(follower);
    }

    /// Hears the masters that it has, and no others.
    fn attach_feeds(&mut self) {
        let Some(follower) = &self.follower else { return };
        let masters = follower.masters();
        let (feeds, account) = (&self.context.feeds, self.owner.account);
        self.feeds.retain(|(master, _)| {
            let is_ours = masters.contains(master);
            if !is_ours {
                feeds.detach(*master, account);
            }
            is_ours
        });
        for master in masters {
            if self.feeds.iter().all(|(attached, _)| *attached != master) {
                let (sender, receiver) = mpsc::channel(FEED_MESSAGES_MAX);
                self.context.feeds.attach(master, self.owner.account, sender);
                self.feeds.push((master, receiver));
            }
        }
    }

    fn leave_feeds(&mut self) {
        for (master, _) in self.feeds.drain(..) {
            self.context.feeds.detach(master, self.owner.account);
        }
    }

    fn wanted(&self) -> Result<(), Wanted> {
        match *self.control.wanted.borrow() {
            Wanted::Run => Ok(()),
            // It moves when no order of it is on its way, and works until then.
            Wanted::Move if !self.is_flat() => Ok(()),
            other => Err(other),
        }
    }

    /// Waits, unless the manager wants something else.
    async fn pause(&mut self, wait: Duration) -> Result<(), Wanted> {
        self.wanted()?;
        tokio::select! {
            changed = self.control.wanted.changed() => {
                if changed.is_err() {
                    return Err(Wanted::Stop);
                }
            }
            () = tokio::time::sleep(wait) => {}
        }
        self.wanted()
    }

    fn permission(&self) -> Option<crate::gate::Permission> {
        let now = self.context.clock.now();
        let permission = self.context.gate.permission(self.owner.account, now)?;
        (permission.token == self.owner.token).then_some(permission)
    }

    async fn wait_for_permission(&mut self) -> Result<(), Wanted> {
        loop {
            self.wanted()?;
            if let Some(permission) = self.permission() {
                let restored = self.stretch.is_some_and(|stretch| stretch != permission.stretch);
                self.stretch = Some(permission.stretch);
                if restored && let Some(follower) = &mut self.follower {
                    let now = self.context.now();
                    // No session is open: nothing but a due reconcile can come of it.
                    let _no_effects = follower.step(now, Input::LeaseRestored);
                }
                return Ok(());
            }
            self.pause(TICK).await?;
        }
    }

    /// Connects, unless the manager wants something else meanwhile: what is half open is dropped.
    async fn connect_while_wanted(
        &mut self,
        account: &SessionAccount,
        settings: &PaperSettings,
    ) -> Result<Result<Connection, BrokerError>, Wanted> {
        let mut wanted = self.control.wanted.clone();
        tokio::select! {
            biased;
            changed = wanted.wait_for(|wanted| !matches!(wanted, Wanted::Run | Wanted::Move)) => {
                Err(changed.map_or(Wanted::Stop, |wanted| *wanted))
            }
            connected = self.connect(account, settings) => Ok(connected),
        }
    }

    async fn connect(
        &mut self,
        account: &SessionAccount,
        settings: &PaperSettings,
    ) -> Result<Connection, BrokerError> {
        let context = Arc::clone(&self.context);
        if settings.blocking && context.executor.threads() == 0 {
            return Err(paper_platform::no_threads());
        }
        let password = open_password(&context.config, account)?;
        let (mut session, events, snapshot) = paper_platform::open(
            account.id,
            settings,
            password.as_ref(),
            &context.node,
            self.owner.token,
            context.clock.clone(),
        )
        .await?;
        if settings.blocking {
            session.hold_threads(&context.executor, context.config.parallel_orders as usize)?;
        }
        let session = Arc::new(session);
        self.refuse_netting(session.is_netting());
        let symbols = session.symbols().await?;
        let lead = if account.is_master {
            Some(self.begin_leading(account, &session, &snapshot, &symbols).await?)
        } else {
            None
        };
        let mut connection = Connection {
            session,
            events,
            answers: FuturesUnordered::new(),
            reads: FuturesUnordered::new(),
            asked: BTreeMap::new(),
            lead,
        };
        if self.cannot_follow {
            self.status(NETTING_WORD, Some(NETTING_DETAIL.to_owned()), true);
            return Ok(connection);
        }
        self.note(|account, token| Note::SessionOpened { account, token });
        if let Some(follower) = &mut self.follower {
            let renumbers = connection.session.renumbers();
            let opened = Input::SessionOpened { snapshot, symbols, renumbers };
            let effects = follower.step(context.now(), opened);
            self.execute(&mut connection, effects);
            self.catch_up(&mut connection);
        }
        self.status("reconciling", None, true);
        Ok(connection)
    }

    /// Copies on a netting account would flow into one trade a symbol, and closing one would close
    /// the others (H61): its follower is not told of the session, so that it never sends. The
    /// account may still be a master.
    fn refuse_netting(&mut self, is_netting: bool) {
        self.cannot_follow = is_netting && self.follower.is_some();
        if self.cannot_follow {
            tracing::error!(account = %self.owner.account, "{NETTING_DETAIL}");
        }
    }

    /// Works on one connection until something ends it.
    ///
    /// The order of the arms: the feed, whose orders are what is waited for, and after a turn of it,
    /// because it can come in floods, everything else once; then what ends the work and the clock, as
    /// both come seldom; then what the session told, before the answers that came after it; people last.
    async fn work(
        &mut self,
        connection: &mut Connection,
        account: &mut SessionAccount,
    ) -> Interrupted {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut has_fed = false;
        let (mut rests, mut looked) = (false, false);
        let (_entered, mut wishes) = self.context.open_sessions.enter(self.owner.account);
        loop {
            let others_first = std::mem::take(&mut has_fed);
            if rests && !std::mem::take(&mut looked) {
                // Something came: it may need the clock soon.
                rests = false;
                tick.reset();
            }
            tokio::select! {
                biased;
                (master, message) = next_message(&mut self.feeds, others_first) => {
                    has_fed = true;
                    match message {
                        Some(message) => self.follow_feeds(connection, master, message).await,
                        None => self.on_feed_ended(connection, master),
                    }
                }
                changed = self.control.wanted.changed() => {
                    let wanted = if changed.is_err() { Err(Wanted::Stop) } else { self.wanted() };
                    match wanted {
                        // It moves when it is flat; the clock looks.
                        Ok(()) | Err(Wanted::Move) => {}
                        Err(wanted) => return Interrupted::Wanted(wanted),
                    }
                }
                _ = tick.tick() => {
                    if let Some(interrupted) = self.look_at_the_clock(connection).await {
                        return interrupted;
                    }
                    (looked, rests) = (true, self.rests(connection));
                    if rests {
                        tick.reset_after(TICK_AT_REST);
                    }
                }
                event = connection.events.next() => {
                    let mut next = Some(event);
                    for _ in 0..EVENTS_PER_TURN {
                        let Some(event) = next else { break };
                        if let SessionEvent::Lost(reason) = event {
                            tracing::warn!(account = %self.owner.account, %reason, "session lost");
                            return Interrupted::Lost;
                        }
                        self.on_event(connection, event);
                        next = connection.events.try_next();
                    }
                    if let Some(event) = next {
                        self.on_event(connection, event);
                    }
                }
                Some(answered) = connection.answers.next() => {
                    self.on_answered(connection, answered);
                    if self.may_move() {
                        return Interrupted::Wanted(Wanted::Move);
                    }
                }
                Some((id, read)) = connection.reads.next() => {
                    match connection.asked.remove(&id) {
                        Some((ask, begun)) => self.answer(ask, begun, read),
                        None => self.step(connection, Input::Read { id, read }),
                    }
                }
                Ok(()) = self.control.links.changed() => self.begin_reload(Duration::ZERO),
                loaded = finished(&mut self.reloading) => {
                    if self.take_over(connection, account, loaded).await {
                        return Interrupted::Again;
                    }
                }
                Some(wish) = wishes.recv() => self.on_wish(connection, wish),
            }
        }
    }

    /// Nothing needs the clock for a while: it leads nobody, and its follower waits for nothing.
    fn rests(&self, connection: &Connection) -> bool {
        let until = self.context.clock.now().plus(TICK_AT_REST);
        connection.lead.is_none()
            && self.attach_at.is_none()
            && self.follower.as_ref().is_some_and(|follower| follower.rests_until(until))
    }

    /// The end of the permission, the publisher's status, the follower's own waits.
    async fn look_at_the_clock(&mut self, connection: &mut Connection) -> Option<Interrupted> {
        if self.permission().is_none_or(|p| Some(p.stretch) != self.stretch) {
            tracing::info!(account = %self.owner.account, "permission ended, session cut");
            return Some(Interrupted::Again);
        }
        if let Some(leading) = &mut connection.lead {
            self.look_at_publisher(leading).await;
        }
        if self.attach_at.take_if(|at| self.context.clock.now() >= *at).is_some() {
            self.attach_feeds();
        }
        let now = self.context.clock.now();
        if now >= self.reread_at {
            self.reread_at = now.plus(LINKS_REREAD);
            self.begin_reload(Duration::ZERO);
        }
        for key in self.stored_since() {
            self.step(connection, Input::Stored(key));
        }
        self.step(connection, Input::Tick);
        self.routine_status();
        if self.may_move() {
            return Some(Interrupted::Wanted(Wanted::Move));
        }
        if self.is_deaf_alone().await { Some(Interrupted::Unserved) } else { None }
    }

    /// Copies that partial closes wait for, and whose rows are settled by now.
    fn stored_since(&self) -> Vec<TicketKey> {
        let Some(follower) = &self.follower else { return Vec::new() };
        let (writer, account) = (&self.context.writer, self.owner.account);
        let is_stored = |pair| !writer.is_pair_pending(account, pair);
        let stored = follower.unstored().filter(|(_, pair)| is_stored(*pair));
        stored.map(|(key, _)| key).collect()
    }

    /// Another node is to have the account, and no order is on its way.
    fn may_move(&self) -> bool {
        self.wanted() == Err(Wanted::Move)
    }

    fn is_flat(&self) -> bool {
        self.follower.as_ref().is_none_or(|follower| follower.unanswered() == 0)
    }

    fn has_peers(&self) -> bool {
        self.control.lease.borrow().fleet.lowest_peer.is_some()
    }

    /// Whether a master has been silent here for long, while another node hears it (H20).
    ///
    /// The database is asked beside the work, once in so long a time.
    async fn is_deaf_alone(&mut self) -> bool {
        let now = self.context.clock.now();
        let doubtful = self.follower.as_ref().map(Follower::doubtful_masters).unwrap_or_default();
        if doubtful.is_empty() {
            self.silent_since = None;
            return false;
        }
        if let Some(asked) = self.listening_elsewhere.take_if(|asked| asked.is_finished()) {
            self.silent_since = Some(now);
            return asked.await.unwrap_or(false) && self.has_peers();
        }
        let since = *self.silent_since.get_or_insert(now);
        let is_long = now.since(since) >= self.context.config.silent_here;
        if is_long && self.has_peers() && self.listening_elsewhere.is_none() {
            let context = Arc::clone(&self.context);
            self.listening_elsewhere = Some(self.context.slow.spawn(async move {
                let heard = context.directory.is_heard_elsewhere(&doubtful, &context.node).await;
                heard.unwrap_or_else(|error| {
                    tracing::warn!(error = %with_causes(&error), "cannot see whether other nodes hear the masters");
                    false
                })
            }));
        }
        false
    }

    fn on_event(&mut self, connection: &mut Connection, event: SessionEvent) {
        let received = connection.events.received();
        let at = self.context.clock.wall_at(received);
        if let Some(leading) = &mut connection.lead {
            leading.learn(&event);
        }
        if connection.lead.is_none() {
            return self.step(connection, Input::Session(event));
        }
        self.step(connection, Input::Session(event.clone()));
        if let Some(leading) = &mut connection.lead {
            let view = self.follower.as_ref().and_then(Follower::view);
            let queued = leading.publish(at, &event, view);
            self.context.stamps.called_back(&leading.publisher, queued, received);
        }
    }

    fn on_answered(&mut self, connection: &mut Connection, answered: Answered) {
        let Answered { key, attempt, action, outcome, left } = answered;
        let word = outcome.as_str();
        self.note(|account, token| Note::Answered { account, token, attempt, outcome: word });
        self.counters.finished(word).increment(1);
        if let (Some(LeftAt { node, wall }), Some(follower)) = (left, &mut self.follower) {
            follower.left(key, attempt, Now { node, wall });
            self.count_own_time(key, action);
        }
        self.step(connection, Input::Answer { key, attempt, outcome });
    }

    /// Somebody wants something of the account.
    fn on_wish(&mut self, connection: &mut Connection, wish: Wish) {
        match wish {
            Wish::Close { key, answer } => self.on_close_wish(connection, key, answer),
            Wish::Compare(ask) => self.on_ask(connection, ask),
        }
    }

    /// Somebody wants a copy closed.
    fn on_close_wish(
        &mut self,
        connection: &mut Connection,
        key: TicketKey,
        answer: oneshot::Sender<CloseAnswer>,
    ) {
        if self.follower.is_none() {
            // A master that copies nothing has no copies.
            return self.answer_wish(answer, CloseAnswer::NoSuchCopy);
        }
        self.last_asker += 1;
        let asker = self.last_asker;
        self.askers.insert(asker, answer);
        self.step(connection, Input::Close { key, asker });
    }

    /// What became of a wish.
    pub(super) fn answer_asker(&mut self, asker: Asker, answer: CloseAnswer) {
        if let Some(waiting) = self.askers.remove(&asker) {
            self.answer_wish(waiting, answer);
        }
    }

    fn answer_wish(&self, waiting: oneshot::Sender<CloseAnswer>, answer: CloseAnswer) {
        if waiting.send(answer).is_err() {
            tracing::debug!(account = %self.owner.account, "who wanted a copy closed has gone");
        }
    }

    /// A feed's task is gone: unknown until it is opened anew, and nothing is taken for quiet.
    pub(super) fn on_feed_ended(&mut self, connection: &mut Connection, master: AccountId) {
        tracing::error!(account = %self.owner.account, %master, "feed ended, attaching anew");
        self.feeds.retain(|(attached, _)| *attached != master);
        self.attach_at = Some(self.context.clock.now().plus(LOAD_RETRY));
        let message = FeedMessage::Doubt(DoubtReason::Joining);
        self.step(connection, Input::Feed { master, message });
    }

    /// Reads account and links beside the work; a read that runs already begins anew, because it
    /// may be older than the change.
    fn begin_reload(&mut self, wait: Duration) {
        let context = Arc::clone(&self.context);
        let account = self.owner.account;
        if let Some(older) = self.reloading.take() {
            older.abort();
        }
        self.reloading = Some(self.context.slow.spawn(async move {
            tokio::time::sleep(wait).await;
            load(&context, account).await
        }));
    }

    /// Takes over what was read again. True where the session has to begin anew: it is a
    /// follower or a master now, and was none, or is none any more.
    async fn take_over(
        &mut self,
        connection: &mut Connection,
        account: &mut SessionAccount,
        loaded: Load,
    ) -> bool {
        let (now, links) = match loaded {
            Ok(loaded) => loaded,
            Err(reason) => {
                // The links as they were stay in force until they can be read.
                tracing::warn!(account = %self.owner.account, %reason, "links not read again");
                self.begin_reload(LOAD_RETRY);
                return false;
            }
        };
        let begins = self.follower.is_none() && !links.is_empty();
        let other_master = account.is_master != now.is_master;
        self.context.fleet_mode.tell(now.fleet);
        modes::tell(self.owner.account, &modes::changes(&account.modes, &now.modes));
        account.modes = now.modes;
        account.is_master = now.is_master;
        account.links = now.links;
        self.master_names = now.master_names;
        self.count_held(now.held);
        if let Some(leading) = &mut connection.lead {
            leading.set_magics(account.links.iter().map(|link| link.magic));
        }
        if begins {
            self.begin_following(links);
        } else {
            self.step(connection, Input::Links(links));
        }
        self.attach_feeds();
        begins || other_master
    }

    /// Reads the account for an operator who asks what a comparison would do.
    fn on_ask(&mut self, connection: &mut Connection, ask: Ask) {
        let now = self.context.now();
        let only = ask.request.link;
        let Some(follower) = self.follower.as_ref().filter(|_| !self.cannot_follow) else {
            return ask.answer(Err("it copies nothing: there is nothing to compare".to_owned()));
        };
        if only.is_some_and(|link| !follower.has_link(link)) {
            return ask.answer(Err("its owner does not know the link yet".to_owned()));
        }
        let Some((since, symbols)) = follower.preview_needs(now, only) else {
            return ask.answer(Err("its session at the broker is not open".to_owned()));
        };
        if connection.asked.len() >= ASKED_MAX {
            return ask.answer(Err("others are asking for the same".to_owned()));
        }
        // The follower counts its own reads up from nothing, and these down from the end.
        let id = connection.asked.keys().next().map_or(u64::MAX, |lowest| lowest - 1);
        connection.asked.insert(id, (ask, now));
        connection.reads.push(read(Arc::clone(&connection.session), id, since, symbols));
    }

    /// Says what a comparison would do, and has one made if that is wanted.
    fn answer(&mut self, ask: Ask, begun: Now, read: Option<AccountRead>) {
        let now = self.context.now();
        let (Some(follower), Some(read)) = (&mut self.follower, read) else {
            return ask.answer(Err("its account could not be read at the broker".to_owned()));
        };
        let only = ask.request.link;
        let previews = follower.preview(now, begun.node, &read, only);
        if ask.request.verb == ControlVerb::Reconcile {
            follower.compare_now(now, only);
        }
        ask.answer(Ok(control::told(previews, begun.wall)));
    }

    fn step(&mut self, connection: &mut Connection, input: Input) {
        let now = self.context.now();
        let Some(follower) = &mut self.follower else { return };
        let effects = follower.step(now, input);
        let untaggable = follower.links_untaggable();
        self.count_untaggable(untaggable);
        self.execute(connection, effects);
    }

    fn count_untaggable(&mut self, now: usize) {
        if now != self.untaggable {
            let change = now as f64 - self.untaggable as f64;
            metrics::gauge!(names::LINKS_UNTAGGABLE).increment(change);
            self.untaggable = now;
        }
    }

    fn count_held(&mut self, now: HeldLinks) {
        let before = std::mem::replace(&mut self.held, now);
        let change = |now, before| f64::from(now) - f64::from(before);
        let paused = change(now.paused, before.paused);
        metrics::gauge!(names::LINKS_PAUSED).increment(paused);
        let close_only = change(now.close_only, before.close_only);
        metrics::gauge!(names::LINKS_CLOSE_ONLY).increment(close_only);
    }

    /// The connection is given up: whatever is on its way has an unknown outcome.
    fn cut(&mut self, connection: &mut Connection) {
        connection.session.abort();
        self.note(|account, token| Note::SessionCut { account, token });
        if let Some(leading) = &connection.lead {
            leading.publisher.suspend();
        }
        let now = self.context.now();
        let Some(follower) = &mut self.follower else { return };
        let effects = follower.step(now, Input::Session(SessionEvent::Lost("cut".into())));
        for effect in effects {
            match effect {
                Effect::Record(record) => self.record(*record),
                Effect::Persist(pair) => self.persist(*pair),
                Effect::CloseAnswered { asker, answer } => self.answer_asker(asker, answer),
                Effect::Send { .. }
                | Effect::Read { .. }
                | Effect::AskMaster { .. }
                | Effect::Planned { .. }
                | Effect::Restless(_)
                | Effect::Untaggable(_) => {}
            }
        }
        // Those who wait for a close that nobody answered learn of it from the rows.
        self.askers.clear();
        self.status("connecting", None, true);
    }

    /// Lets go: no new order, the last answers, the last rows.
    async fn drain(&mut self, mut connection: Connection) -> Ended {
        self.status("draining", None, true);
        self.step(&mut connection, Input::Drain);
        let drained = tokio::time::timeout(DRAIN_LIMIT, self.last_answers(&mut connection)).await;
        if let Some(leading) = &connection.lead {
            leading.publisher.close(CLOSE_LIMIT).await;
        }
        if drained != Ok(true) {
            self.cut(&mut connection);
            return Ended::NotDrained;
        }
        drop(connection);
        self.flushed().await
    }

    /// True when no order is unanswered; false when that will not be.
    async fn last_answers(&mut self, connection: &mut Connection) -> bool {
        loop {
            let awaited = self.follower.as_ref().map_or(0, Follower::awaited);
            if awaited == 0 || may_be_handed_in(self.unanswered(), 0) {
                // An outcome that stays unknown is for the next owner: no answer will come.
                return may_be_handed_in(self.unanswered(), 0);
            }
            if *self.control.wanted.borrow() == Wanted::Stop {
                return false;
            }
            tokio::select! {
                biased;
                event = connection.events.next() => {
                    if matches!(event, SessionEvent::Lost(_)) {
                        return false;
                    }
                    self.on_event(connection, event);
                }
                Some(answered) = connection.answers.next() => {
                    self.on_answered(connection, answered);
                }
                () = tokio::time::sleep(TICK) => {
                    if self.permission().is_none() {
                        return false;
                    }
                }
            }
        }
    }

    fn unanswered(&self) -> usize {
        self.follower.as_ref().map_or(0, Follower::unanswered)
    }

    async fn flushed(&mut self) -> Ended {
        let account = self.owner.account;
        if may_be_handed_in(0, self.context.writer.pending(account)) {
            return Ended::Drained;
        }
        let flush = self.context.writer.flush_account(account);
        match tokio::time::timeout(FLUSH_LIMIT, flush).await {
            Ok(Ok(())) => Ended::Drained,
            Ok(Err(_)) | Err(_) => Ended::NotDrained,
        }
    }

    /// The end of a tenure that has no session: nothing is in flight, but rows may wait.
    async fn end_unconnected(&mut self, wanted: Wanted) -> Ended {
        match wanted {
            Wanted::Drain | Wanted::Move if may_be_handed_in(self.unanswered(), 0) => {
                self.flushed().await
            }
            Wanted::Drain | Wanted::Move => Ended::NotDrained,
            Wanted::Run | Wanted::Stop => Ended::Stopped,
        }
    }

    /// Settings that make no session: nothing to do until somebody mends the row.
    async fn hold_unusable(&mut self, error: &BrokerError) -> Ended {
        let reason = with_causes(error);
        tracing::error!(account = %self.owner.account, %reason, "account cannot be used");
        self.status("unusable", Some(reason), true);
        loop {
            if let Err(wanted) = self.pause(STATUS_EVERY).await {
                return self.end_unconnected(wanted).await;
            }
        }
    }

    fn routine_status(&mut self) {
        if self.cannot_follow {
            return self.status(NETTING_WORD, Some(NETTING_DETAIL.to_owned()), false);
        }
        let word = match &self.follower {
            Some(follower) if follower.is_paused() => "paused",
            Some(follower) if !follower.is_copying() => "reconciling",
            Some(_) => "copying",
            None => "leading",
        };
        let reconciling = self.follower.as_ref().filter(|_| word == "reconciling");
        let detail = reconciling.and_then(|f| not_heard(&f.silent_masters(), &self.master_names));
        self.status(word, detail, false);
    }

    /// Writes what the session does; unless `now` is set, at most every [`STATUS_EVERY`] and at changes.
    fn status(&mut self, session: &'static str, detail: Option<String>, at_once: bool) {
        let now = self.context.now();
        let changed = self.last_word != Some(session);
        let recent = self.last_status.is_some_and(|at| now.node.since(at) < STATUS_EVERY);
        if recent && !changed && !at_once {
            return;
        }
        self.last_status = Some(now.node);
        self.last_word = Some(session);
        let view = self.follower.as_ref().and_then(Follower::view);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        self.context.writer.push(Row::AccountStatus(AccountStatus {
            account: self.owner.account,
            token: self.owner.token,
            session,
            detail,
            funds: view.and_then(|view| view.funds.clone()),
            positions_open: view.map(|view| count(view.positions.len())),
            pendings_open: view.map(|view| count(view.pendings.len())),
            at: now.wall,
        }));
    }
}

/// Why nothing is copied, if that is for masters that are silent.
fn not_heard(masters: &[AccountId], names: &BTreeMap<AccountId, String>) -> Option<String> {
    let name = |id: &AccountId| names.get(id).cloned().unwrap_or_else(|| id.to_string());
    let (named, rest) = masters.split_at(masters.len().min(NAMED_MAX));
    let named: Vec<String> = named.iter().map(name).collect();
    match (masters.len(), rest.len()) {
        (0, _) => None,
        (1, _) => Some(format!("master {} is not heard", named.join(", "))),
        (_, 0) => Some(format!("masters {} are not heard", named.join(", "))),
        (_, more) => Some(format!("masters {} and {more} more are not heard", named.join(", "))),
    }
}

/// The next message of any of the feeds, each in its turn, or nothing from one that has ended;
/// waits for ever without feeds. With `others_first` whatever else is ready in the same `select!` goes
/// before it once.
pub(super) async fn next_message(
    feeds: &mut [(AccountId, mpsc::Receiver<FeedMessage>)],
    mut others_first: bool,
) -> (AccountId, Option<FeedMessage>) {
    std::future::poll_fn(|cx| {
        if std::mem::take(&mut others_first) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        for place in 0..feeds.len() {
            let (master, receiver) = &mut feeds[place];
            if let Poll::Ready(message) = receiver.poll_recv(cx) {
                let master = *master;
                // A master that floods takes its turn behind the others.
                feeds[place..].rotate_left(1);
                return Poll::Ready((master, message));
            }
        }
        Poll::Pending
    })
    .await
}

/// What waits in the feeds now, in each feed's order; at most [`FEED_MESSAGES_MAX`] of each. That a
/// feed has ended is left for [`next_message`] to tell.
pub(super) fn told_meanwhile(
    feeds: &mut [(AccountId, mpsc::Receiver<FeedMessage>)],
) -> Vec<(AccountId, FeedMessage)> {
    let mut told = Vec::new();
    for (master, receiver) in feeds {
        for _ in 0..receiver.len() {
            told.extend(receiver.try_recv().map(|message| (*master, message)));
        }
    }
    told
}

/// The result of a task that may run; waits for ever without one. May be dropped and asked again.
async fn finished(task: &mut Option<JoinHandle<Load>>) -> Load {
    let Some(running) = task else { return std::future::pending().await };
    let loaded = running.await.unwrap_or_else(|panic| Err(panic.to_string()));
    *task = None;
    loaded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenure_is_handed_in_only_with_everything_answered_and_written() {
        assert!(may_be_handed_in(0, 0));
        assert!(!may_be_handed_in(1, 0));
        assert!(!may_be_handed_in(0, 1));
    }

    #[test]
    fn a_follower_that_waits_names_the_masters_that_are_silent() {
        let ids: Vec<AccountId> = (1..=5).map(|id| AccountId::new(id).unwrap()).collect();
        let names = ids[..4].iter().zip(["boss", "chief", "head", "lead"]);
        let names = names.map(|(id, name)| (*id, name.to_owned())).collect();
        let said = |masters: &[AccountId]| not_heard(masters, &names).unwrap_or_default();
        assert_eq!(not_heard(&[], &names), None);
        assert_eq!(said(&ids[..1]), "master boss is not heard");
        assert_eq!(said(&ids[4..]), "master 5 is not heard");
        assert_eq!(said(&ids[..2]), "masters boss, chief are not heard");
        assert_eq!(said(&ids), "masters boss, chief, head and 2 more are not heard");
    }

    #[tokio::test]
    async fn a_master_that_floods_takes_its_turn_behind_the_others() {
        let account = |id: u64| AccountId::new(id).unwrap();
        let mut feeds = Vec::new();
        let mut senders = Vec::new();
        for (id, messages) in [(1, 5), (2, 2), (3, 0)] {
            let (sender, receiver) = mpsc::channel(8);
            for _ in 0..messages {
                sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
            }
            senders.push(sender);
            feeds.push((account(id), receiver));
        }
        let mut order = Vec::new();
        for _ in 0..7 {
            order.push(next_message(&mut feeds, false).await.0.get());
        }
        assert_eq!(order, [1, 2, 1, 2, 1, 1, 1]);
    }

    #[tokio::test]
    async fn what_was_told_without_a_session_is_taken_in_order_and_no_end_of_a_feed_with_it() {
        let account = |id: u64| AccountId::new(id).unwrap();
        let mut feeds = Vec::new();
        for (id, reasons) in [
            (1, vec![DoubtReason::Gap, DoubtReason::Joining, DoubtReason::Gap]),
            (2, vec![]),
            (3, vec![DoubtReason::Joining]),
        ] {
            let (sender, receiver) = mpsc::channel(8);
            for reason in reasons {
                sender.send(FeedMessage::Doubt(reason)).await.unwrap();
            }
            feeds.push((account(id), receiver));
        }
        let told = told_meanwhile(&mut feeds);
        let told: Vec<_> = told
            .into_iter()
            .map(|(master, message)| match message {
                FeedMessage::Doubt(reason) => (master.get(), reason),
                other => panic!("{other:?}"),
            })
            .collect();
        let (gap, joining) = (DoubtReason::Gap, DoubtReason::Joining);
        assert_eq!(told, [(1, gap), (1, joining), (1, gap), (3, joining)]);
        assert!(told_meanwhile(&mut feeds).is_empty());
        assert!(next_message(&mut feeds, false).await.1.is_none());
    }

    #[tokio::test]
    async fn after_a_turn_of_the_feeds_others_that_are_ready_go_first_once() {
        let (sender, receiver) = mpsc::channel(8);
        let mut feeds = vec![(AccountId::MIN, receiver)];
        sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
        for others_first in [true, false] {
            let fed = tokio::select! {
                biased;
                _ = next_message(&mut feeds, others_first) => true,
                () = std::future::ready(()) => false,
            };
            assert_eq!(fed, !others_first);
        }
        sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
        let alone = next_message(&mut feeds, true);
        tokio::time::timeout(TICK * 100, alone).await.expect("nobody else was ready");
    }

    #[tokio::test]
    async fn a_feed_that_ended_is_told_after_its_last_message() {
        let (sender, receiver) = mpsc::channel(8);
        let mut feeds = vec![(AccountId::MIN, receiver)];
        sender.send(FeedMessage::Doubt(DoubtReason::Gap)).await.unwrap();
        drop(sender);
        assert!(next_message(&mut feeds, false).await.1.is_some());
        assert!(next_message(&mut feeds, false).await.1.is_none());
    }

    #[tokio::test]
    async fn a_read_beside_the_work_survives_being_asked_for_and_dropped() {
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            gone.await.map_err(|e| e.to_string())?;
            Err("read".to_owned())
        });
        let mut reloading: Option<JoinHandle<Load>> = Some(task);
        tokio::select! {
            biased;
            _ = finished(&mut reloading) => panic!("it is not there yet"),
            () = std::future::ready(()) => {}
        }
        go.send(()).unwrap();
        assert_eq!(finished(&mut reloading).await.unwrap_err(), "read");
        assert!(reloading.is_none());
    }
}
