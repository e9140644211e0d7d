//! One tenure of one account: the shell around its follower and its lead.
//!
//! Does the I/O: reads rows, opens the session at the broker, takes permits, sends orders,
//! hands answers and events to the pure parts, and pushes rows. It decides nothing about
//! trades.
//!
//! Here are its state and its loop; the rest by what it is about: `opening` and `ending`, `following`
//! (feeds), `executing` (orders and rows), `leading` (the account as a master), `wishes` (what people
//! want), `telling` (the status row).
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

use super::asking::OpenSessions;
use super::control::Ask;
use super::executing::Outbox;
use super::following::next_message;
use super::leading::Leading;
use super::metrics::{Counters, names};
use super::modes::{self, FleetWatch};
use super::reading::{Load, load};
use super::rows::Owner;
use super::telling::STATUS_EVERY;
use crate::broker::executor::Executor;
use crate::broker::paper::{PaperBrokerSession, PaperEvents, PaperSettings};
use crate::broker::{BrokerError, BrokerSession, LeftAt, Outcome, SessionEvent};
use crate::causes::with_causes;
use crate::clock::{NodeClock, NodeTime};
use crate::config::NodeConfig;
use crate::credentials::Sealed;
use crate::directory::{Directory, HeldLinks, SessionAccount};
use crate::follower::{
    AccountRead, Asker, Attempt, CloseAnswer, Effect, Follower, Input, Now, TicketKey,
};
use crate::gate::Gate;
use crate::lease::{LeaseState, TenureKey};
use crate::notes::{Note, Notes};
use crate::stamps::{Stamps, Trace};
use crate::tape::Tape;
use crate::writer::{Writer, store::PgRows};
use bus::{DoubtReason, FeedMessage, Feeds};
use futures_util::stream::{FuturesUnordered, StreamExt};
use schemas::{AccountId, Epoch, NodeId, Symbol};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Messages of one master's feed that wait for a follower; past it the feed sends a snapshot.
const FEED_MESSAGES_MAX: usize = 8_192;
/// Events of a broker that are taken in one turn, before anything else is looked at.
const EVENTS_PER_TURN: usize = 64;
/// How often a session looks at the clock: settle times, retries, the end of its permission.
pub(super) const TICK: Duration = Duration::from_millis(100);
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
/// Account and links are read again so often (chosen): nobody announces that a removed link has had its
/// time. Each account has its own moment.
const LINKS_REREAD: Duration = Duration::from_secs(600);
/// What the status row of a netting account with links that copy onto it says.
pub(super) const NETTING_WORD: &str = "unusable";
/// Why.
pub(super) const NETTING_DETAIL: &str = "netting account: it holds one trade a symbol, so it cannot be a follower; use a hedging account";
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

pub(super) type AnswerFuture = Pin<Box<dyn Future<Output = Answered> + Send>>;
pub(super) type ReadFuture = Pin<Box<dyn Future<Output = (u64, Option<AccountRead>)> + Send>>;

pub(super) struct AccountSession {
    pub(super) context: Arc<NodeContext>,
    pub(super) gained: Gained,
    pub(super) owner: Owner,
    pub(super) control: Control,
    pub(super) follower: Option<Follower>,
    pub(super) feeds: Vec<(AccountId, mpsc::Receiver<FeedMessage>)>,
    /// When a feed that ended is attached to anew.
    pub(super) attach_at: Option<NodeTime>,
    /// When account and links are read again without a word from the database.
    pub(super) reread_at: NodeTime,
    pub(super) stretch: Option<u64>,
    /// Highest epoch that is stored, or was heard from another publisher.
    pub(super) epoch: Option<Epoch>,
    /// An epoch that the publisher began by itself, while it is being stored.
    pub(super) storing: Option<JoinHandle<()>>,
    /// Account and links are being read again, since they changed.
    pub(super) reloading: Option<JoinHandle<Load>>,
    /// How many links of this account are in the gauge of untaggable ones.
    pub(super) untaggable: usize,
    /// How many links of this account are in the gauges of held ones.
    pub(super) held: HeldLinks,
    /// Names of the masters it copies, for people.
    pub(super) master_names: BTreeMap<AccountId, String>,
    pub(super) last_status: Option<NodeTime>,
    pub(super) last_word: Option<&'static str>,
    /// The account at the broker cannot hold copies side by side.
    pub(super) cannot_follow: bool,
    /// How long an order may wait here after it was noted as sent.
    pub(super) orders_wait: Duration,
    /// Since when the session could not be opened.
    pub(super) down_since: Option<NodeTime>,
    /// Since when a master is doubtful, while the session is open.
    pub(super) silent_since: Option<NodeTime>,
    /// Whether another node hears what this one does not.
    pub(super) listening_elsewhere: Option<JoinHandle<bool>>,
    /// The event whose orders are being sent, while own times are recorded.
    pub(super) trace: Option<Trace>,
    /// What was decided and is not done yet; empty while the session waits.
    pub(super) outbox: Outbox,
    /// Who wait for a copy to be closed.
    pub(super) askers: BTreeMap<Asker, oneshot::Sender<CloseAnswer>>,
    pub(super) last_asker: Asker,
    pub(super) counters: Counters,
    /// Symbols of masters whose quotes were looked up in this turn.
    pub(super) quoted: Vec<(AccountId, Symbol)>,
}

/// What belongs to one connection to the broker.
pub(super) struct Connection {
    pub(super) session: Arc<PaperBrokerSession>,
    pub(super) events: PaperEvents,
    pub(super) answers: FuturesUnordered<AnswerFuture>,
    pub(super) reads: FuturesUnordered<ReadFuture>,
    /// Requests that wait for a read of the account, by its number; and when it began.
    pub(super) asked: BTreeMap<u64, (Ask, Now)>,
    pub(super) lead: Option<Leading>,
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

    pub(super) fn wanted(&self) -> Result<(), Wanted> {
        match *self.control.wanted.borrow() {
            Wanted::Run => Ok(()),
            // It moves when no order of it is on its way, and works until then.
            Wanted::Move if !self.is_flat() => Ok(()),
            other => Err(other),
        }
    }

    /// Waits, unless the manager wants something else.
    pub(super) async fn pause(&mut self, wait: Duration) -> Result<(), Wanted> {
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

    pub(super) fn permission(&self) -> Option<crate::gate::Permission> {
        let now = self.context.clock.now();
        let permission = self.context.gate.permission(self.owner.account, now)?;
        (permission.token == self.owner.token).then_some(permission)
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

    pub(super) fn on_event(&mut self, connection: &mut Connection, event: SessionEvent) {
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

    pub(super) fn on_answered(&mut self, connection: &mut Connection, answered: Answered) {
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

    pub(super) fn step(&mut self, connection: &mut Connection, input: Input) {
        let now = self.context.now();
        let Some(follower) = &mut self.follower else { return };
        let effects = follower.step(now, input);
        let untaggable = follower.links_untaggable();
        self.count_untaggable(untaggable);
        self.execute(connection, effects);
    }

    pub(super) fn count_untaggable(&mut self, now: usize) {
        if now != self.untaggable {
            let change = now as f64 - self.untaggable as f64;
            metrics::gauge!(names::LINKS_UNTAGGABLE).increment(change);
            self.untaggable = now;
        }
    }

    pub(super) fn count_held(&mut self, now: HeldLinks) {
        let before = std::mem::replace(&mut self.held, now);
        let change = |now, before| f64::from(now) - f64::from(before);
        let paused = change(now.paused, before.paused);
        metrics::gauge!(names::LINKS_PAUSED).increment(paused);
        let close_only = change(now.close_only, before.close_only);
        metrics::gauge!(names::LINKS_CLOSE_ONLY).increment(close_only);
    }

    /// The connection is given up: whatever is on its way has an unknown outcome.
    pub(super) fn cut(&mut self, connection: &mut Connection) {
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
