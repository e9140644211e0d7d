//! The loop that keeps the leases, on a thread of its own.
//!
//! Decides: nothing; it reads the clock, runs the cycle that `cycle.rs` asks for, hands the result
//! to the gate, and then tells the others.
//! In: commands, notifications of the database, wake-ups after a freeze.
//! Out: the gate's permissions; [`LeaseState`] in a watch channel; metrics.
//!
//! The state is a level, not a stream of events: a reader that missed three updates sees the same
//! as one that saw all of them (B1). [`super::diff`] says what changed between two of them.
//!
//! Invariants:
//! 1. The clock is read before anything else in a cycle.
//! 2. One cycle at a time, on one thread; commands wait, at most one query limit.
//! 3. The gate is changed before the state is published.
//! 4. A notification is a hint: what it would have brought, the next cycle brings as well.
//!
//! Not covered: `LISTEN` on a connection whose server vanished without a word. It is made anew
//! when a lease cycle fails; until then only the regular cycles claim.

use super::CHANNEL;
use super::cycle::{CycleReply, Holdings, LeaseTiming, Outcome, Tenure, TenureKey};
use super::share::Fleet;
use super::store::{LeaseError, OwnershipStore};
use super::term::{CycleNumber, trusted};
use crate::causes::with_causes;
use crate::clock::{NodeClock, NodeTime, Ticker};
use crate::database;
use crate::gate::{Gate, RevokeReason};
use crate::metrics::names;
use schemas::{AccountId, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// Commands that may wait for a running cycle; a sender waits when there are more.
pub const COMMANDS_MAX: usize = 1_024;

/// Pause after a cycle before a notification starts another: one for a burst of them, not one
/// each.
const NOTIFIED_PAUSE: Duration = Duration::from_millis(50);

/// A notification reaches all nodes at once; they begin their cycles spread out over this.
const NOTIFIED_SPREAD: Duration = Duration::from_millis(50);

/// Pause before `LISTEN` is tried again.
const LISTEN_RETRY: Duration = Duration::from_secs(2);

/// How often a node that ends tries to give its accounts back; then they expire.
const LAST_CYCLES_MAX: u32 = 3;

/// Outcome of a cycle that ended well, in metrics; the others are [`LeaseError::WORDS`].
pub(crate) const CONFIRMED: &str = "confirmed";

/// What was claimed, in metrics: free accounts, and those of an owner whose lease ran out.
pub(crate) const CLAIM_KINDS: &[&str] = &["free", "expired"];

/// What the loop needs to know.
#[derive(Debug, Clone)]
pub struct LeaseSettings {
    /// The owner to write into the rows; see [`super::boot_node_id`].
    pub node: NodeId,
    /// Platforms whose accounts this node can serve.
    pub platforms: Vec<String>,
    /// Times, already checked against each other.
    pub timing: LeaseTiming,
    /// Accounts this node owns at most.
    pub capacity: u32,
    /// Accounts it claims at most in one cycle.
    pub claim_rows_max: u32,
    /// Where to listen for free accounts; without it only the regular cycles claim.
    pub listen_url: Option<String>,
    /// Owners whose process is proven to be gone, see `predecessor.rs`.
    pub proven_dead: Vec<NodeId>,
}

/// What the node owns, as of the last cycle.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseState {
    /// Tenures that are held; a session belongs to each.
    pub held: BTreeMap<AccountId, Tenure>,
    /// The last confirmed cycle.
    pub cycle: CycleNumber,
    /// When that cycle was started; absent before the first.
    pub confirmed_at: Option<NodeTime>,
    /// Failed cycles since then.
    pub failures: u32,
    /// When the first of them was started.
    pub failing_since: Option<NodeTime>,
    /// Expired rows are left alone, because the database's time is in doubt.
    pub claims_frozen: bool,
    /// Enabled accounts that nobody owned, counted up to a bound.
    pub unowned: u32,
    /// Enabled accounts whose owner's lease ran out, counted up to a bound.
    pub orphaned: u32,
    /// Who is there to take accounts.
    pub fleet: Fleet,
    /// Timeline of the server that confirmed the last cycle, where it can be read.
    pub timeline: Option<u32>,
    /// The loop has ended; nothing is renewed any more.
    pub ended: bool,
}

impl LeaseState {
    /// Whether an order may leave at `now`: the last confirmation is not older than `trusted`, which is
    /// what is left of a lease without its fence.
    pub fn permits(&self, now: NodeTime, trusted: Duration) -> bool {
        !self.ended && self.confirmed_at.is_some_and(|at| now < at.plus(trusted))
    }

    /// How long no cycle was confirmed, where the last one failed.
    pub fn away_for(&self, now: NodeTime) -> Option<Duration> {
        self.failing_since.map(|since| now.since(since))
    }
}

/// Says once a node, and not an account, that its permits have ended, and that they are back.
#[derive(Debug)]
pub struct PermitWatch {
    lease: watch::Receiver<Arc<LeaseState>>,
    trusted: Duration,
    permits: bool,
}

impl PermitWatch {
    /// A watch over a node that has had no permits yet.
    pub fn new(lease: watch::Receiver<Arc<LeaseState>>, trusted: Duration) -> Self {
        Self { lease, trusted, permits: false }
    }

    /// Logs what changed since the last look; whether orders may leave, if that is what changed.
    pub fn look(&mut self, now: NodeTime) -> Option<bool> {
        let lease = self.lease.borrow();
        let permits = lease.permits(now, self.trusted);
        // A node that ends says so by itself.
        if lease.ended || permits == self.permits {
            return None;
        }
        self.permits = permits;
        if permits {
            tracing::info!(held = lease.held.len(), "leases are confirmed: orders may leave");
        } else {
            tracing::warn!(
                held = lease.held.len(),
                failures = lease.failures,
                "the leases were not confirmed in time: this node sends no order until they are"
            );
        }
        Some(permits)
    }
}

#[derive(Debug)]
enum Command {
    Release { tenure: TenureKey, back_off: Duration },
    Drained { tenure: TenureKey },
    Abandon { tenure: TenureKey, back_off: Duration },
    TimelineHeard { timeline: u32 },
    PauseClaims { pause: Duration },
    SetCapacity { accounts: u32 },
    Shutdown,
}

/// The loop has ended, so that the command reaches nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lease loop has ended")]
pub struct LeaseEnded;

/// The node's side of the loop. When it is dropped, the loop gives back what was drained and ends.
#[derive(Debug)]
pub struct LeaseHandle {
    commands: mpsc::Sender<Command>,
    state: watch::Receiver<Arc<LeaseState>>,
    wake: Arc<Notify>,
    ended: oneshot::Receiver<()>,
    thread: JoinHandle<()>,
}

/// A clonable part of [`LeaseHandle`], for sessions that hand their account in.
#[derive(Debug, Clone)]
pub struct LeaseCommands {
    commands: mpsc::Sender<Command>,
}

impl LeaseCommands {
    /// Gives a drained tenure back at once; this node keeps away from the account for `back_off`.
    ///
    /// The caller promises that the session has ended, no request is in flight and no row is
    /// unwritten (S20).
    pub async fn release(&self, tenure: TenureKey, back_off: Duration) -> Result<(), LeaseEnded> {
        self.send(Command::Release { tenure, back_off }).await
    }

    /// Marks a tenure as drained: it is given back with the next cycle, or with the shutdown.
    pub async fn drained(&self, tenure: TenureKey) -> Result<(), LeaseEnded> {
        self.send(Command::Drained { tenure }).await
    }

    /// Lets a tenure run out that cannot be drained, and keeps away from the account for `back_off`.
    ///
    /// The caller promises that the session has ended.
    pub async fn abandon(&self, tenure: TenureKey, back_off: Duration) -> Result<(), LeaseEnded> {
        self.send(Command::Abandon { tenure, back_off }).await
    }

    /// Claims nothing for so long while another node has room, and tells the others that there is
    /// none here.
    pub async fn pause_claims(&self, pause: Duration) -> Result<(), LeaseEnded> {
        self.send(Command::PauseClaims { pause }).await
    }

    /// Another node has seen a server of this timeline.
    pub async fn timeline_heard(&self, timeline: u32) -> Result<(), LeaseEnded> {
        self.send(Command::TimelineHeard { timeline }).await
    }

    /// From now on, own at most so many accounts; what is held stays. 0 stops claiming.
    pub async fn set_capacity(&self, accounts: u32) -> Result<(), LeaseEnded> {
        self.send(Command::SetCapacity { accounts }).await
    }

    async fn send(&self, command: Command) -> Result<(), LeaseEnded> {
        self.commands.send(command).await.map_err(|_closed| LeaseEnded)
    }
}

impl LeaseHandle {
    /// The commands, to be handed around.
    pub fn commands(&self) -> LeaseCommands {
        LeaseCommands { commands: self.commands.clone() }
    }

    /// What the node owns; changes after every cycle. When waiting for a change fails, the loop has
    /// died: nothing is renewed any more, permits run out, and the process had better end.
    pub fn state(&self) -> watch::Receiver<Arc<LeaseState>> {
        self.state.clone()
    }

    /// Starts a cycle at once when notified: after a freeze, before the permits are back.
    pub fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Gives back what was drained, and ends. What was not drained is left to expire.
    pub async fn shutdown(self) {
        // A loop that has ended already needs no telling.
        let _may_have_ended = self.commands.send(Command::Shutdown).await;
        let _may_have_ended = self.ended.await;
        // The thread has nothing left to do but drop its runtime.
        let _panic_was_printed = self.thread.join();
    }
}

/// Starts the loop on its own thread and runtime.
///
/// Errors: the operating system gave no thread or no runtime.
pub fn start<S: OwnershipStore>(
    settings: LeaseSettings,
    store: S,
    gate: Gate,
    clock: NodeClock,
) -> std::io::Result<LeaseHandle> {
    let (commands, commands_in) = mpsc::channel(COMMANDS_MAX);
    let (ended_out, ended) = oneshot::channel();
    let wake = Arc::new(Notify::new());
    let keeper = LeaseKeeper::new(&settings, store, gate, clock);
    let state = keeper.state();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let woken = Arc::clone(&wake);
    let thread = std::thread::Builder::new().name("lockstep-lease".into()).spawn(move || {
        runtime.block_on(run(keeper, settings, commands_in, woken));
        // A name lookup that hangs in its own thread must not hold up the end of the node.
        runtime.shutdown_background();
        // Nobody may be waiting for the end.
        let _nobody_waits = ended_out.send(());
    })?;
    Ok(LeaseHandle { commands, state, wake, ended, thread })
}

/// Closes the gate when the node stood still, and wakes the lease loop to confirm anew.
///
/// `each_tick` runs after that, and must not wait. The returned value keeps the thread; dropping it
/// closes the gate for good.
pub fn watch_for_freezes(
    clock: NodeClock,
    gate: Gate,
    wake: Arc<Notify>,
    mut each_tick: impl FnMut(NodeTime) + Send + 'static,
) -> std::io::Result<Ticker> {
    Ticker::start(clock, move |now, freeze| {
        if let Some(freeze) = freeze {
            // First the revocation, then the beat: a beat alone would open the gate again.
            gate.revoke_all(now, RevokeReason::Freeze);
            wake.notify_one();
            tracing::warn!(gap = ?freeze.gap, "the node stood still; all leases are confirmed anew");
        }
        gate.beat(now);
        each_tick(now);
    })
}

/// The loop without its waiting: one cycle at a time, on whatever store.
#[derive(Debug)]
pub struct LeaseKeeper<S> {
    holdings: Holdings,
    store: S,
    gate: Gate,
    clock: NodeClock,
    state: watch::Sender<Arc<LeaseState>>,
    due: NodeTime,
    finished: NodeTime,
}

impl<S: OwnershipStore> LeaseKeeper<S> {
    /// A keeper that owns nothing; its first cycle is due at once.
    pub fn new(settings: &LeaseSettings, store: S, gate: Gate, clock: NodeClock) -> Self {
        let mut holdings = Holdings::new(
            settings.node.clone(),
            settings.platforms.clone(),
            settings.timing,
            settings.capacity,
            settings.claim_rows_max,
        );
        holdings.set_proven_dead(settings.proven_dead.clone());
        let due = clock.now();
        let state = watch::Sender::new(Arc::new(LeaseState::default()));
        Self { holdings, store, gate, clock, state, due, finished: NodeTime::START }
    }

    /// What is owned, after every change.
    pub fn state(&self) -> watch::Receiver<Arc<LeaseState>> {
        self.state.subscribe()
    }

    /// When the next cycle is due.
    pub fn due(&self) -> NodeTime {
        self.due
    }

    /// Runs one cycle.
    ///
    /// Errors: [`LeaseError`] of the store, already counted; nothing was confirmed.
    pub async fn cycle(&mut self) -> Result<(), LeaseError> {
        let started = self.clock.now();
        let request = self.holdings.request(started);
        let answer = self.store.cycle(&request).await;
        let finished = self.clock.now();
        self.finished = finished;
        let reply = match answer {
            Ok(reply) => reply,
            Err(error) => {
                self.due = finished.plus(self.holdings.timing().retry);
                metrics::counter!(names::LEASE_CYCLES, "outcome" => error.as_str()).increment(1);
                self.publish(|state| {
                    state.failures = state.failures.saturating_add(1);
                    state.failing_since.get_or_insert(started);
                });
                return Err(error);
            }
        };
        let outcome = self.holdings.confirm(&request, started, finished, &reply);
        self.gate.apply(&outcome.confirmation, finished);
        self.due = outcome.wish.due(self.holdings.timing(), fastrand::f64());
        let claims_frozen = self.holdings.claims_are_frozen(finished);
        self.tell_return(finished);
        self.publish(|state| {
            state.cycle = outcome.confirmation.number;
            state.confirmed_at = Some(started);
            state.failures = 0;
            state.failing_since = None;
            state.claims_frozen = claims_frozen;
            state.unowned = reply.unowned;
            state.orphaned = reply.orphaned;
            state.fleet = reply.fleet;
            state.timeline = reply.database.timeline;
        });
        self.record(&outcome, finished.since(started), &reply);
        Ok(())
    }

    /// One line for all the failures before a cycle that went well; each of them has its own.
    fn tell_return(&self, now: NodeTime) {
        let state = self.state.borrow();
        if let Some(away) = state.away_for(now) {
            let failures = state.failures;
            tracing::info!(?away, failures, "the database of the leases is back");
        }
    }

    /// Takes a drained tenure in: no permit from now on, given back by the next cycle.
    pub fn hand_in(&mut self, tenure: TenureKey, back_off: Duration) {
        let now = self.clock.now();
        if self.holdings.hand_in(tenure, now.plus(back_off)) {
            self.gate.revoke(tenure.account);
            self.publish(|_| {});
        }
    }

    /// Lets a tenure run out: no permit from now on, and no renewal.
    pub fn abandon(&mut self, tenure: TenureKey, back_off: Duration) {
        let now = self.clock.now();
        if self.holdings.abandon(tenure, now.plus(back_off)) {
            self.gate.revoke(tenure.account);
            metrics::counter!(names::LEASE_ABANDONED).increment(1);
            self.publish(|_| {});
        }
    }

    /// Claims nothing for so long, while another node has room.
    pub fn pause_claims(&mut self, pause: Duration) {
        let until = self.clock.now().plus(pause);
        self.holdings.pause_claims(until);
    }

    /// Another node has seen this timeline. If it is higher than any before, the server that
    /// confirmed our leases was demoted, and what it confirmed since holds nowhere else: all
    /// permits are taken back until a server of that timeline confirms (H14).
    pub fn timeline_heard(&mut self, timeline: u32) {
        if self.holdings.note_timeline(timeline) {
            let now = self.clock.now();
            self.gate.revoke_all(now, RevokeReason::Timeline);
            self.due = now;
            tracing::warn!(
                timeline,
                "another node has seen a newer primary; all leases are confirmed anew"
            );
        }
    }

    /// From the next cycle on, own at most so many accounts.
    pub fn set_capacity(&mut self, accounts: u32) {
        self.holdings.set_capacity(accounts);
    }

    /// Closes the gate and gives back what was handed in.
    pub async fn end(&mut self) {
        self.gate.revoke_all(self.clock.now(), RevokeReason::Shutdown);
        for _ in 0..LAST_CYCLES_MAX {
            if !self.holdings.is_releasing() {
                break;
            }
            let started = self.clock.now();
            let request = self.holdings.last_request();
            match self.store.cycle(&request).await {
                Ok(reply) => {
                    let outcome =
                        self.holdings.confirm(&request, started, self.clock.now(), &reply);
                    count_releases(outcome.released);
                }
                Err(error) => {
                    tracing::warn!(error = %with_causes(&error), "accounts could not be given back; trying again");
                }
            }
        }
        self.state.send_replace(Arc::new(LeaseState { ended: true, ..LeaseState::default() }));
    }

    /// Makes the next cycle due after `wait`, but not sooner than a pause after the last one.
    pub fn hurry(&mut self, pause: Duration, wait: Duration) {
        self.due = self.due.min(self.clock.now().plus(wait).max(self.finished.plus(pause)));
    }

    fn publish(&self, change: impl FnOnce(&mut LeaseState)) {
        let mut state = LeaseState::clone(&self.state.borrow());
        state.held = self.holdings.held().clone();
        change(&mut state);
        self.state.send_replace(Arc::new(state));
    }

    fn record(&self, outcome: &Outcome, took: Duration, reply: &CycleReply) {
        metrics::counter!(names::LEASE_CYCLES, "outcome" => CONFIRMED).increment(1);
        metrics::histogram!(names::LEASE_CYCLE_DURATION).record(took.as_secs_f64());
        metrics::gauge!(names::LEASE_CONFIRMED).set(self.clock.wall().0 as f64 / 1e6);
        metrics::gauge!(names::LEASE_OWNED).set(self.holdings.held().len() as f64);
        let unowned = f64::from(reply.unowned) + f64::from(reply.orphaned);
        metrics::gauge!(names::LEASE_UNOWNED).set(unowned);
        let unowned_since = self.clock.wall().0 as f64 / 1e6
            - reply.unowned_for.unwrap_or(Duration::ZERO).as_secs_f64();
        metrics::gauge!(names::LEASE_UNOWNED_OLDEST).set(unowned_since);
        metrics::gauge!(names::LEASE_NODES).set(f64::from(reply.fleet.nodes));
        let frozen = self.holdings.claims_are_frozen(self.clock.now());
        metrics::gauge!(names::LEASE_CLAIMS_FROZEN).set(f64::from(u8::from(frozen)));
        let timing = self.holdings.timing();
        let trust = trusted(timing.lease, timing.fence);
        metrics::gauge!(names::LEASE_TRUST).set(trust.as_secs_f64());
        if let Some(margin) = outcome.margin {
            metrics::gauge!(names::LEASE_MARGIN).set(margin.as_secs_f64());
        }
        metrics::counter!(names::LEASE_CLAIMS, "kind" => CLAIM_KINDS[0])
            .increment(outcome.claimed_free as u64);
        metrics::counter!(names::LEASE_CLAIMS, "kind" => CLAIM_KINDS[1])
            .increment(outcome.claimed_expired as u64);
        metrics::counter!(names::LEASE_ROWS_LOCKED).increment(outcome.locked as u64);
        count_releases(outcome.released);
        if let Some(doubt) = outcome.doubt {
            metrics::counter!(names::LEASE_DATABASE_STEPS, "kind" => doubt.as_str()).increment(1);
            tracing::warn!(
                kind = doubt.as_str(),
                "the database's time is in doubt; expired rows are left alone"
            );
        }
        for step in &outcome.steps {
            match step {
                super::LeaseStep::Lost { tenure } => {
                    metrics::counter!(names::LEASE_LOSSES).increment(1);
                    tracing::info!(account = %tenure.account, token = %tenure.token, "lease lost");
                }
                super::LeaseStep::Gained { tenure, clean, previous_owner } => {
                    tracing::info!(
                        account = %tenure.account, token = %tenure.token, clean,
                        previous_owner = previous_owner.as_deref(), "lease gained"
                    );
                }
                super::LeaseStep::Kept { .. } => {}
            }
        }
    }
}

fn count_releases(released: usize) {
    metrics::counter!(names::LEASE_RELEASES).increment(released as u64);
}

async fn run<S: OwnershipStore>(
    mut keeper: LeaseKeeper<S>,
    settings: LeaseSettings,
    mut commands: mpsc::Receiver<Command>,
    wake: Arc<Notify>,
) {
    let notified = Arc::new(Notify::new());
    let listen_anew = Arc::new(Notify::new());
    let listener = settings.listen_url.clone().map(|url| {
        let (notified, anew) = (Arc::clone(&notified), Arc::clone(&listen_anew));
        let (platforms, limit) = (settings.platforms.clone(), settings.timing.query_limit);
        tokio::spawn(async move { listen(&url, &platforms, limit, &notified, &anew).await })
    });
    loop {
        let wait = keeper.due().left(keeper.clock.now());
        // Commands first: a node that hands in many accounts gets one cycle for all of them.
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(Command::Release { tenure, back_off }) => {
                    keeper.hand_in(tenure, back_off);
                    keeper.hurry(Duration::ZERO, Duration::ZERO);
                }
                Some(Command::Drained { tenure }) => keeper.hand_in(tenure, Duration::ZERO),
                Some(Command::Abandon { tenure, back_off }) => keeper.abandon(tenure, back_off),
                Some(Command::PauseClaims { pause }) => keeper.pause_claims(pause),
                Some(Command::TimelineHeard { timeline }) => keeper.timeline_heard(timeline),
                Some(Command::SetCapacity { accounts }) => {
                    keeper.set_capacity(accounts);
                    keeper.hurry(Duration::ZERO, Duration::ZERO);
                }
                Some(Command::Shutdown) | None => break,
            },
            () = wake.notified() => keeper.hurry(Duration::ZERO, Duration::ZERO),
            () = notified.notified() => {
                keeper.hurry(NOTIFIED_PAUSE, NOTIFIED_SPREAD.mul_f64(fastrand::f64()));
            }
            () = tokio::time::sleep(wait) => {
                if keeper.due() <= keeper.clock.now() && let Err(error) = keeper.cycle().await {
                    tracing::warn!(error = %with_causes(&error), "lease cycle failed; trying again");
                    listen_anew.notify_one();
                }
            }
        }
    }
    keeper.end().await;
    if let Some(listener) = listener {
        listener.abort();
        let _aborted = listener.await;
    }
}

/// Waits for announcements of the database, and passes those about our platforms on.
async fn listen(
    url: &str,
    platforms: &[String],
    limit: Duration,
    notified: &Notify,
    anew: &Notify,
) {
    loop {
        match tokio::time::timeout(limit, database::listen(url, "listen", CHANNEL)).await {
            Ok(Ok(mut listener)) => {
                // Whatever was announced before we listened is looked for now.
                notified.notify_one();
                loop {
                    tokio::select! {
                        // Made anew by itself, the connection would hide what it missed.
                        heard = listener.try_recv() => match heard {
                            Ok(None) => {
                                tracing::info!("the connection that listens was lost");
                                break;
                            }
                            Ok(Some(heard)) if platforms.iter().any(|word| word == heard.payload()) => {
                                notified.notify_one();
                            }
                            Ok(Some(_other_platform)) => {}
                            Err(error) => {
                                tracing::warn!(error = %with_causes(&error), "no longer listening for free accounts");
                                break;
                            }
                        },
                        () = anew.notified() => break,
                    }
                }
            }
            Ok(Err(error)) => {
                tracing::warn!(error = %with_causes(&error), "cannot listen for free accounts");
            }
            Err(_elapsed) => tracing::warn!("cannot listen for free accounts: no answer"),
        }
        tokio::time::sleep(LISTEN_RETRY).await;
    }
}
