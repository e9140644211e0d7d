//! Which tenures run: one session for each account that the lease says is ours.
//!
//! Decides nothing about ownership; it follows the lease state. A lost account is told to
//! stop, a switched-off one to drain, a gained one is started. A drained tenure is handed in.
//!
//! Invariants:
//! 1. At most one session runs for an account; a new tenure waits for the end of the old one.
//! 2. A tenure is handed in only when its session ended drained.
//! 3. A session that ended by itself while its tenure goes on (a bug) is started again after a
//!    wait that doubles, so that one poison account does not keep the node busy; after the third
//!    time in one tenure the account is left to run out, if another node has room (H19).
//! 4. An account that cannot be served here, while another node has room, is let go, and this node
//!    keeps away from it for a while (H20).
//! 5. A node far above its share gives accounts away one by one, only such as have no order on
//!    their way, and stops when they come back (H22).

use super::asking::Wish;
use super::control::Ask;
use super::metrics::names;
use super::session::{self, Control, Ended, Gained, NodeContext, Wanted};
use crate::lease::share::Balance;
use crate::lease::{LeaseState, TenureKey, task::LeaseCommands};
use schemas::AccountId;
use schemas::control::ControlVerb;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Wait before a session that ended by itself is started again; doubles up to the next constant.
const RESTART_FIRST: Duration = Duration::from_secs(1);
/// Longest such wait.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// Sessions of one tenure that may end by themselves; then another node may try.
const CRASHES_MAX: u32 = 3;
/// How long this node keeps away from an account that it could not serve, as a part of the time
/// after which the next one gives it up: where no node can serve it, it goes round, and always has
/// somebody who tries.
const UNSERVED_BACK_OFF: f64 = 0.75;
/// How long it keeps away from one that it gave away: long enough for another to take it.
const GIVEN_BACK_OFF: Duration = Duration::from_secs(60);
/// How long a session may look for a moment without an order on its way, to move to another node.
const MOVE_LIMIT: Duration = Duration::from_secs(30);
/// How long a node claims nothing that did not hear a master which others heard.
const DEAF_PAUSE: Duration = Duration::from_secs(600);
/// How often the manager looks whether such a wait has passed.
const LOOK: Duration = Duration::from_secs(1);
/// Ends of sessions that wait to be noticed; more than a node has accounts.
const ENDS_MAX: usize = 16_384;

struct Running {
    tenure: TenureKey,
    /// Since when it is told to move to another node.
    moving_since: Option<Instant>,
    wanted: watch::Sender<Wanted>,
}

/// Starts and stops the sessions of a node.
pub struct Manager {
    context: Arc<NodeContext>,
    lease: LeaseCommands,
    links: watch::Receiver<u64>,
    running: BTreeMap<AccountId, Running>,
    /// Tenures whose session ended by itself: the wait, and when it is over.
    resting: BTreeMap<TenureKey, (Duration, Instant)>,
    /// How often sessions of a tenure ended by themselves.
    crashes: BTreeMap<TenureKey, u32>,
    /// Tenures that were let go: no session of theirs begins again (S20).
    handed_in: BTreeSet<TenureKey>,
    balance: Balance,
    lease_state: watch::Receiver<Arc<LeaseState>>,
    /// Tenures whose session was begun once: a second one cannot know what the first has sent.
    begun: BTreeMap<AccountId, TenureKey>,
    ends: mpsc::Sender<(TenureKey, Ended)>,
    ended: mpsc::Receiver<(TenureKey, Ended)>,
    /// What operators ask of the owners of accounts.
    asks: mpsc::Receiver<Ask>,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager").field("running", &self.running.len()).finish_non_exhaustive()
    }
}

impl Manager {
    /// No session yet. `links` is raised whenever a link changed; `asks` is what operators want.
    pub fn new(
        context: Arc<NodeContext>,
        lease: LeaseCommands,
        lease_state: watch::Receiver<Arc<LeaseState>>,
        links: watch::Receiver<u64>,
        asks: mpsc::Receiver<Ask>,
    ) -> Self {
        let (ends, ended) = mpsc::channel(ENDS_MAX);
        let balance = Balance::new(context.config.lease, context.config.cycle);
        Manager {
            context,
            lease,
            links,
            running: BTreeMap::new(),
            resting: BTreeMap::new(),
            crashes: BTreeMap::new(),
            handed_in: BTreeSet::new(),
            balance,
            lease_state,
            begun: BTreeMap::new(),
            ends,
            ended,
            asks,
        }
    }

    /// Follows the lease until `shutdown` is raised, then drains everything within `limit`.
    pub async fn run(mut self, mut shutdown: watch::Receiver<bool>, limit: Duration) {
        let mut state = self.lease_state.clone();
        loop {
            let now = Arc::clone(&state.borrow_and_update());
            self.follow(&now);
            self.give_away(&now);
            tokio::select! {
                biased;
                () = raised(&mut shutdown) => break,
                Some((tenure, how)) = self.ended.recv() => self.on_ended(tenure, how).await,
                Some(ask) = self.asks.recv() => self.on_ask(ask),
                changed = state.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(LOOK), if self.has_waits() => {}
            }
        }
        self.drain_all(limit).await;
    }

    fn follow(&mut self, state: &LeaseState) {
        let is_held = |key: &TenureKey| {
            state.held.get(&key.account).is_some_and(|tenure| tenure.token == key.token)
        };
        self.resting.retain(|key, _| is_held(key));
        self.crashes.retain(|key, _| is_held(key));
        self.handed_in.retain(is_held);
        for (account, running) in &self.running {
            let wanted = match state.held.get(account) {
                Some(tenure) if tenure.token == running.tenure.token && tenure.enabled => {
                    // A session that was told to move moves.
                    if running.is_moving() { continue } else { Wanted::Run }
                }
                Some(tenure) if tenure.token == running.tenure.token => Wanted::Drain,
                Some(_) | None => Wanted::Stop,
            };
            running.set(wanted);
        }
        self.begun.retain(|account, _| state.held.contains_key(account));
        for (account, tenure) in &state.held {
            // An old tenure's session that has not ended yet goes first; its end comes here again.
            if self.running.contains_key(account) || !tenure.enabled {
                continue;
            }
            let key = TenureKey { account: *account, token: tenure.token };
            if self.handed_in.contains(&key) {
                continue;
            }
            if self.resting.get(&key).is_some_and(|(_, until)| Instant::now() < *until) {
                continue;
            }
            let is_first = self.begun.insert(*account, key) != Some(key);
            let (clean, hastened) = (tenure.clean && is_first, tenure.hastened);
            if is_first {
                self.balance.gains(self.context.clock.now(), *account);
                let kind = tenure_kind((clean, hastened));
                metrics::counter!(names::TENURES, "kind" => kind).increment(1);
                tracing::info!(%account, token = %key.token, kind, "tenure begins");
            } else {
                tracing::info!(%account, token = %key.token, "tenure goes on in a new session");
            }
            self.start(Gained { tenure: key, clean, hastened });
        }
    }

    /// What an operator wants of an account: its session answers, or it moves. Where somebody else owns
    /// it, that one answers.
    fn on_ask(&mut self, ask: Ask) {
        let has_peers = self.has_peers();
        let now = self.context.clock.now();
        let account = ask.request.account;
        let Some(running) = self.running.get_mut(&account) else { return };
        match ask.request.verb {
            ControlVerb::Plan | ControlVerb::Reconcile => {
                let asked = self.context.open_sessions.ask(account, Wish::Compare(ask));
                if let Err((reason, Wish::Compare(ask))) = asked {
                    ask.answer(Err(reason.to_string()));
                }
            }
            ControlVerb::Release if !has_peers => ask.answer(Err(
                "no other node has room for it: it would be without an owner".to_owned(),
            )),
            ControlVerb::Release => {
                tracing::info!(%account, "account is handed over, an operator wants it");
                running.moving_since = Some(Instant::now());
                running.set(Wanted::Move);
                self.balance.gives(now, account);
                ask.answer(Ok(Vec::new()));
            }
        }
    }

    /// Tells one session to move to another node, if this one has far more than its share.
    fn give_away(&mut self, state: &LeaseState) {
        if let Some(moving) = self.running.values_mut().find(|running| running.is_moving()) {
            // One at a time; one that is never without an order stays.
            if moving.moving_since.is_none_or(|since| since.elapsed() >= MOVE_LIMIT) {
                moving.moving_since = None;
                moving.set(Wanted::Run);
            }
            return;
        }
        let now = self.context.clock.now();
        let owned = u32::try_from(state.held.len()).unwrap_or(u32::MAX);
        let without_owner = state.unowned.saturating_add(state.orphaned);
        if !self.balance.wants_to_give(now, owned, &state.fleet, without_owner) {
            return;
        }
        // Any will do; another one each time, as the one before may trade without a pause.
        let wanted = |running: &&mut Running| *running.wanted.borrow() == Wanted::Run;
        let candidates: Vec<&mut Running> = self.running.values_mut().filter(wanted).collect();
        let place = fastrand::usize(..candidates.len().max(1));
        if let Some(running) = candidates.into_iter().nth(place) {
            tracing::info!(account = %running.tenure.account, owned, fleet = ?state.fleet, "account is given to another node");
            running.moving_since = Some(Instant::now());
            running.set(Wanted::Move);
            self.balance.gives(now, running.tenure.account);
        }
    }

    fn unserved_back_off(&self) -> Duration {
        self.context.config.session_down.mul_f64(UNSERVED_BACK_OFF)
    }

    fn has_waits(&self) -> bool {
        !self.resting.is_empty() || self.running.values().any(Running::is_moving)
    }

    fn has_peers(&self) -> bool {
        self.lease_state.borrow().fleet.lowest_peer.is_some()
    }

    fn start(&mut self, gained: Gained) {
        let (wanted, receiver) = watch::channel(Wanted::Run);
        let mut links = self.links.clone();
        // It reads them after this; only what changes from now on is news to it.
        links.mark_unchanged();
        let control = Control { wanted: receiver, links, lease: self.lease_state.clone() };
        let context = Arc::clone(&self.context);
        let ends = self.ends.clone();
        let tenure = gained.tenure;
        let session = self.context.hot.spawn(session::run(context, gained, control));
        self.context.slow.spawn(async move {
            let how = match session.await {
                Ok(how) => how,
                Err(panic) => {
                    tracing::error!(account = %tenure.account, %panic, "session ended by a bug");
                    Ended::NotDrained
                }
            };
            // Nobody listens any more when the node ends; then nothing is handed in either.
            let _node_ends = ends.send((tenure, how)).await;
        });
        self.running.insert(tenure.account, Running { tenure, moving_since: None, wanted });
    }

    async fn on_ended(&mut self, tenure: TenureKey, how: Ended) {
        let word = how.as_str();
        metrics::counter!(names::TENURES_ENDED, "how" => word).increment(1);
        tracing::info!(account = %tenure.account, token = %tenure.token, how = word, "tenure ends");
        let wanted = self.running.remove(&tenure.account).map(|running| *running.wanted.borrow());
        let by_itself = how == Ended::NotDrained && wanted == Some(Wanted::Run);
        if by_itself && self.crashed_too_often(tenure) {
            self.resting.remove(&tenure);
            self.let_go(tenure, false, self.unserved_back_off()).await;
            return;
        }
        if by_itself {
            let last = self.resting.get(&tenure).map_or(RESTART_FIRST, |(wait, _)| *wait * 2);
            let wait = last.min(RESTART_MAX);
            self.resting.insert(tenure, (wait, Instant::now() + wait));
        } else {
            self.resting.remove(&tenure);
        }
        match how {
            Ended::Drained if wanted == Some(Wanted::Move) => {
                self.let_go(tenure, true, GIVEN_BACK_OFF).await;
            }
            Ended::Drained => self.let_go(tenure, true, Duration::ZERO).await,
            Ended::Unserved { drained, deaf } => {
                if deaf {
                    // A loop that has ended claims nothing anyway.
                    let _told = self.lease.pause_claims(DEAF_PAUSE).await;
                }
                self.let_go(tenure, drained, self.unserved_back_off()).await;
            }
            // One that could not be moved after all begins again here: that is better than to let its
            // lease run out.
            Ended::NotDrained | Ended::Stopped => {}
        }
    }

    /// Counts a session that ended by itself, and says whether another node should try.
    fn crashed_too_often(&mut self, tenure: TenureKey) -> bool {
        let crashes = self.crashes.entry(tenure).or_insert(0);
        *crashes += 1;
        *crashes >= CRASHES_MAX && self.has_peers()
    }

    /// Gives a tenure back where it is drained, and lets it run out where it is not.
    async fn let_go(&mut self, tenure: TenureKey, drained: bool, back_off: Duration) {
        // Until the lease loop has heard of it, its state still names the tenure.
        self.handed_in.insert(tenure);
        let told = if drained {
            self.lease.release(tenure, back_off).await
        } else {
            self.lease.abandon(tenure, back_off).await
        };
        if told.is_err() {
            tracing::warn!(account = %tenure.account, "lease loop has ended, account is left to expire");
        }
    }

    async fn drain_all(&mut self, limit: Duration) {
        self.running.values().for_each(|running| running.set(Wanted::Drain));
        let all = async {
            while !self.running.is_empty() {
                let Some((tenure, how)) = self.ended.recv().await else { return };
                self.on_ended(tenure, how).await;
            }
        };
        if tokio::time::timeout(limit, all).await.is_err() {
            tracing::warn!(left = self.running.len(), "not everything was drained in time");
        }
    }
}

schemas::words! {
    /// From whom a tenure comes, of whether it was released and whether its owner is proven dead.
    pub(super) fn tenure_kind(clean_hastened: (bool, bool)) in TENURE_KINDS {
        (true, _) => "free",
        (false, true) => "proven_dead",
        (false, false) => "expired",
    }
}

/// Waits until the flag is raised, or nobody can raise it any more.
async fn raised(flag: &mut watch::Receiver<bool>) {
    let _ended = flag.wait_for(|raised| *raised).await.map(|_guard| ());
}

impl Running {
    fn is_moving(&self) -> bool {
        *self.wanted.borrow() == Wanted::Move
    }

    fn set(&self, wanted: Wanted) {
        self.wanted.send_if_modified(|now| {
            let changed = *now != wanted;
            *now = wanted;
            changed
        });
    }
}
