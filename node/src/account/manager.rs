//! Which tenures run: one session for each account that the lease says is ours.
//!
//! Decides nothing about ownership; it follows the lease state. A lost account is told to
//! stop, a switched-off one to drain, a gained one is started. A drained tenure is handed in.
//!
//! Invariants:
//! 1. At most one session runs for an account; a new tenure waits for the end of the old one.
//! 2. A tenure is handed in only when its session ended drained.
//! 3. A session that ended by itself while its tenure goes on (a bug) is started again after a
//!    wait that doubles, so that one poison account does not keep the node busy (H19).

use super::metrics::names;
use super::session::{self, Control, Ended, Gained, NodeContext, Wanted};
use crate::lease::{LeaseState, TenureKey, task::LeaseCommands};
use schemas::AccountId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Wait before a session that ended by itself is started again; doubles up to the next constant.
const RESTART_FIRST: Duration = Duration::from_secs(1);
/// Longest such wait.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// How often the manager looks whether such a wait has passed.
const LOOK: Duration = Duration::from_secs(1);
/// Ends of sessions that wait to be noticed; more than a node has accounts.
const ENDS_MAX: usize = 16_384;

struct Running {
    tenure: TenureKey,
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
    /// Tenures whose session was begun once: a second one cannot know what the first has sent.
    begun: BTreeMap<AccountId, TenureKey>,
    ends: mpsc::Sender<(TenureKey, Ended)>,
    ended: mpsc::Receiver<(TenureKey, Ended)>,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager").field("running", &self.running.len()).finish_non_exhaustive()
    }
}

impl Manager {
    /// No session yet. `links` is raised whenever a link changed.
    pub fn new(
        context: Arc<NodeContext>,
        lease: LeaseCommands,
        links: watch::Receiver<u64>,
    ) -> Self {
        let (ends, ended) = mpsc::channel(ENDS_MAX);
        Manager {
            context,
            lease,
            links,
            running: BTreeMap::new(),
            resting: BTreeMap::new(),
            begun: BTreeMap::new(),
            ends,
            ended,
        }
    }

    /// Follows the lease until `shutdown` is raised, then drains everything within `limit`.
    pub async fn run(
        mut self,
        mut state: watch::Receiver<Arc<LeaseState>>,
        mut shutdown: watch::Receiver<bool>,
        limit: Duration,
    ) {
        loop {
            let now = Arc::clone(&state.borrow_and_update());
            self.follow(&now);
            tokio::select! {
                biased;
                () = raised(&mut shutdown) => break,
                Some((tenure, how)) = self.ended.recv() => self.on_ended(tenure, how).await,
                changed = state.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(LOOK), if !self.resting.is_empty() => {}
            }
        }
        self.drain_all(limit).await;
    }

    fn follow(&mut self, state: &LeaseState) {
        self.resting.retain(|key, _| {
            state.held.get(&key.account).is_some_and(|tenure| tenure.token == key.token)
        });
        for (account, running) in &self.running {
            let wanted = match state.held.get(account) {
                Some(tenure) if tenure.token == running.tenure.token && tenure.enabled => {
                    Wanted::Run
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
            if self.resting.get(&key).is_some_and(|(_, until)| Instant::now() < *until) {
                continue;
            }
            let is_first = self.begun.insert(*account, key) != Some(key);
            self.start(Gained {
                tenure: key,
                clean: tenure.clean && is_first,
                hastened: tenure.hastened,
            });
        }
    }

    fn start(&mut self, gained: Gained) {
        let (wanted, receiver) = watch::channel(Wanted::Run);
        let control = Control { wanted: receiver, links: self.links.clone() };
        let context = Arc::clone(&self.context);
        let ends = self.ends.clone();
        let tenure = gained.tenure;
        let kind = match (gained.clean, gained.hastened) {
            (true, _) => "free",
            (false, true) => "proven_dead",
            (false, false) => "expired",
        };
        metrics::counter!(names::TENURES, "kind" => kind).increment(1);
        tracing::info!(account = %tenure.account, token = %tenure.token, kind, "tenure begins");
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
        self.running.insert(tenure.account, Running { tenure, wanted });
    }

    async fn on_ended(&mut self, tenure: TenureKey, how: Ended) {
        let word = match how {
            Ended::Drained => "drained",
            Ended::NotDrained => "not_drained",
            Ended::Stopped => "stopped",
        };
        metrics::counter!(names::TENURES_ENDED, "how" => word).increment(1);
        tracing::info!(account = %tenure.account, token = %tenure.token, how = word, "tenure ends");
        let wanted = self.running.remove(&tenure.account).map(|running| *running.wanted.borrow());
        if how == Ended::NotDrained && wanted == Some(Wanted::Run) {
            let last = self.resting.get(&tenure).map_or(RESTART_FIRST, |(wait, _)| *wait * 2);
            let wait = last.min(RESTART_MAX);
            self.resting.insert(tenure, (wait, Instant::now() + wait));
        } else {
            self.resting.remove(&tenure);
        }
        if how == Ended::Drained && self.lease.release(tenure, Duration::ZERO).await.is_err() {
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

/// Waits until the flag is raised, or nobody can raise it any more.
async fn raised(flag: &mut watch::Receiver<bool>) {
    let _ended = flag.wait_for(|raised| *raised).await.map(|_guard| ());
}

impl Running {
    fn set(&self, wanted: Wanted) {
        self.wanted.send_if_modified(|now| {
            let changed = *now != wanted;
            *now = wanted;
            changed
        });
    }
}
