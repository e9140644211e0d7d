//! One process: the lease loop around the real keeper and gate, and which sessions run.
//!
//! `LeaseKeeper::cycle` is the real one. It asks a store that only notes the request; the world
//! carries it to the database and back, and then the keeper goes on where it stopped.

use crate::bus::Connection;
use crate::feed::Feed;
use crate::plan::{Fault, MS, Point, SECOND};
use crate::session::Session;
use crate::world::{Who, World};
use crate::writer::WriterState;
use lockstep::clock::NodeClock;
use lockstep::gate::{Gate, RevokeReason};
use lockstep::lease::cycle::{CycleReply, CycleRequest};
use lockstep::lease::task::{LeaseKeeper, LeaseState};
use lockstep::lease::{
    CycleNumber, LeaseError, LeaseSettings, LeaseTiming, OwnershipStore, TenureKey,
};
use parking_lot::Mutex;
use schemas::{AccountId, NodeId};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::watch;

pub(crate) const LEASE: Duration = Duration::from_secs(60);
pub(crate) const FENCE: Duration = Duration::from_secs(15);
pub(crate) const CYCLE: Duration = Duration::from_secs(20);
pub(crate) const RETRY: Duration = Duration::from_secs(2);
pub(crate) const SEND_RESERVE: Duration = Duration::from_secs(2);
pub(crate) const BROKER_CALL_LIMIT: Duration = Duration::from_secs(10);
pub(crate) const SETTLE: Duration = Duration::from_secs(10);
pub(crate) const AUDITS: [Duration; 3] =
    [Duration::from_secs(5), Duration::from_secs(30), Duration::from_secs(120)];
/// A node that ends gives its sessions this long.
const SHUTDOWN_LIMIT: u64 = 45 * SECOND;
/// A notification starts a cycle at the soonest this long after the last.
const NOTIFIED_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Idle,
    Asked(CycleRequest),
    Waiting(CycleNumber),
    Answered(Result<CycleReply, LeaseError>),
}

/// Notes the request and waits for the world.
struct NotingStore(Arc<Mutex<Slot>>);

impl OwnershipStore for NotingStore {
    async fn cycle(&mut self, request: &CycleRequest) -> Result<CycleReply, LeaseError> {
        *self.0.lock() = Slot::Asked(request.clone());
        std::future::poll_fn(|_| {
            let mut slot = self.0.lock();
            match std::mem::take(&mut *slot) {
                Slot::Answered(answer) => Poll::Ready(answer),
                other => {
                    *slot = other;
                    Poll::Pending
                }
            }
        })
        .await
    }
}

type Keeper = LeaseKeeper<NotingStore>;
type Running = Pin<Box<dyn Future<Output = (Keeper, bool)>>>;

/// What waits until the keeper is free.
enum Command {
    HandIn(TenureKey, Duration),
    Hurry(Duration),
}

/// One running process.
pub(crate) struct Process {
    pub(crate) id: NodeId,
    /// When it had its first answer from the database.
    pub(crate) first_answer_at: Option<u64>,
    pub(crate) clock: NodeClock,
    pub(crate) gate: Gate,
    state: watch::Receiver<Arc<LeaseState>>,
    keeper: Option<Keeper>,
    running: Option<Running>,
    slot: Arc<Mutex<Slot>>,
    commands: Vec<Command>,
    wakes: u64,
    /// True time at which the running cycle read its clock.
    pub(crate) cycle_started: u64,
    pub(crate) sessions: BTreeMap<AccountId, Session>,
    begun: BTreeMap<AccountId, TenureKey>,
    pub(crate) feeds: BTreeMap<AccountId, Feed>,
    pub(crate) bus: Connection,
    /// Server and timeline of the lease connection.
    pub(crate) db_connection: Option<(u64, u32)>,
    pub(crate) writer: WriterState,
    ending: bool,
    /// When the transaction of the last cycle began, by this node's clock.
    begun_at: Duration,
}

impl Process {
    /// The transaction of the running cycle begins at the server.
    pub(crate) fn note_begun(&mut self) {
        self.begun_at = self.clock.now().since_start();
    }
}

pub(crate) fn timing() -> LeaseTiming {
    LeaseTiming {
        lease: LEASE,
        fence: FENCE,
        cycle: CYCLE,
        retry: RETRY,
        query_limit: Duration::from_micros(crate::db::QUERY_LIMIT),
    }
}

/// Starts a process on a machine that has none.
pub(crate) fn start(w: &mut World, node: usize) {
    if w.machines[node].process.is_some() {
        return;
    }
    let draw = w.rng.range(0, u64::from(u32::MAX));
    let machine = &mut w.machines[node];
    machine.incarnation += 1;
    let who = Who { node, incarnation: machine.incarnation };
    w.refresh_clock(who);
    let machine = &mut w.machines[node];
    let id = NodeId::new(format!("{}-{draw:08x}", machine.name)).expect("a valid name");
    let clock = NodeClock::new(machine.clock());
    let gate = Gate::new();
    let slot = Arc::new(Mutex::new(Slot::Idle));
    let settings = LeaseSettings {
        node: id.clone(),
        platforms: vec!["paper".into()],
        timing: timing(),
        capacity: machine.capacity,
        claim_rows_max: 100,
        listen_url: None,
        proven_dead: Vec::new(),
    };
    let store = NotingStore(Arc::clone(&slot));
    let keeper = LeaseKeeper::new(&settings, store, gate.clone(), clock.clone());
    machine.process = Some(Process {
        id,
        first_answer_at: None,
        clock,
        gate,
        state: keeper.state(),
        keeper: Some(keeper),
        running: None,
        slot,
        commands: Vec::new(),
        wakes: 0,
        cycle_started: 0,
        sessions: BTreeMap::new(),
        begun: BTreeMap::new(),
        feeds: BTreeMap::new(),
        bus: Connection { number: 0, is_up: false },
        db_connection: None,
        writer: WriterState::default(),
        ending: false,
        begun_at: Duration::ZERO,
    });
    w.note(|| format!("node {node} starts, incarnation {}", who.incarnation));
    crate::bus::connect(w, who);
    w.after(0, Some(who), move |w| tick(w, who));
    w.after(0, Some(who), move |w| pump_lease(w, who));
}

/// SIGKILL.
pub(crate) fn crash(w: &mut World, node: usize) {
    let Some(who) = w.who(node) else { return };
    let sessions = w.process(who).sessions.iter();
    let ends: Vec<_> = sessions.map(|(id, session)| (*id, session.unanswered())).collect();
    for (id, unanswered) in ends {
        crate::oracle::session_ended(w, id, unanswered);
    }
    w.note(|| format!("node {node} is killed"));
    crate::broker::process_died(w, who);
    w.machines[node].process = None;
    w.machines[node].frozen_until = 0;
}

/// SIGTERM: everything is drained and given back.
pub(crate) fn shut_down(w: &mut World, node: usize) {
    let Some(who) = w.who(node) else { return };
    w.after(0, Some(who), move |w| {
        w.note(|| format!("node {node} is told to end"));
        w.process(who).ending = true;
        let sessions: Vec<AccountId> = w.process(who).sessions.keys().copied().collect();
        for account in sessions {
            crate::session::drain(w, who, account);
        }
        let until = w.now + SHUTDOWN_LIMIT;
        await_drained(w, who, until);
    });
}

fn await_drained(w: &mut World, who: Who, until: u64) {
    let process = w.process(who);
    let is_drained = process.sessions.is_empty();
    if is_drained || w.now >= until {
        end_lease(w, who);
    } else {
        w.after(100 * MS, Some(who), move |w| await_drained(w, who, until));
    }
}

/// The last cycles give back what was handed in; then the process is gone.
fn end_lease(w: &mut World, who: Who) {
    let process = w.process(who);
    if process.running.is_some() {
        w.after(50 * MS, Some(who), move |w| end_lease(w, who));
        return;
    }
    serve_commands(process);
    let Some(mut keeper) = process.keeper.take() else { return };
    process.running = Some(Box::pin(async move {
        keeper.end().await;
        (keeper, true)
    }));
    poll_lease(w, who);
}

/// The ticker: four times a second it says that the process lives, or that it stood still.
fn tick(w: &mut World, who: Who) {
    let process = w.process(who);
    let (now, freeze) = process.clock.tick();
    let gate = process.gate.clone();
    if freeze.is_some() {
        gate.revoke_all(now, RevokeReason::Freeze);
        process.commands.push(Command::Hurry(Duration::ZERO));
        w.reach("freeze_noticed");
        pump_lease(w, who);
    }
    gate.beat(now);
    w.after(250 * MS, Some(who), move |w| tick(w, who));
}

/// A hint of the database that an account is free.
pub(crate) fn notified(w: &mut World, who: Who) {
    w.process(who).commands.push(Command::Hurry(NOTIFIED_PAUSE));
    pump_lease(w, who);
}

pub(crate) fn hand_in(w: &mut World, who: Who, tenure: TenureKey) {
    let process = w.process(who);
    process.commands.push(Command::HandIn(tenure, Duration::ZERO));
    process.commands.push(Command::Hurry(Duration::ZERO));
    w.after(0, Some(who), move |w| pump_lease(w, who));
}

fn serve_commands(process: &mut Process) {
    let Some(keeper) = &mut process.keeper else { return };
    for command in process.commands.drain(..) {
        match command {
            Command::HandIn(tenure, back_off) => keeper.hand_in(tenure, back_off),
            Command::Hurry(pause) => keeper.hurry(pause, Duration::ZERO),
        }
    }
}

fn pump_lease(w: &mut World, who: Who) {
    let process = w.process(who);
    if process.running.is_some() || process.ending && process.keeper.is_none() {
        return;
    }
    serve_commands(process);
    let Some(keeper) = &process.keeper else { return };
    let left = keeper.due().left(process.clock.now());
    if left.is_zero() {
        start_cycle(w, who);
        return;
    }
    process.wakes += 1;
    let wake = process.wakes;
    let wait = left.as_micros() as u64 + 1;
    w.after(wait, Some(who), move |w| {
        if w.process(who).wakes == wake {
            pump_lease(w, who);
        }
    });
}

fn start_cycle(w: &mut World, who: Who) {
    let now = w.now;
    let process = w.process(who);
    let Some(mut keeper) = process.keeper.take() else { return };
    process.cycle_started = now;
    process.running = Some(Box::pin(async move {
        let _counted = keeper.cycle().await;
        (keeper, false)
    }));
    poll_lease(w, who);
}

fn poll_lease(w: &mut World, who: Who) {
    let process = w.process(who);
    let Some(mut running) = process.running.take() else { return };
    match running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready((_, true)) => {
            w.note(|| format!("node {} ends", who.node));
            crate::broker::process_died(w, who);
            w.machines[who.node].process = None;
        }
        Poll::Ready((keeper, false)) => {
            process.keeper = Some(keeper);
            after_cycle(w, who);
        }
        Poll::Pending => {
            process.running = Some(running);
            let slot = Arc::clone(&process.slot);
            let mut slot = slot.lock();
            match std::mem::take(&mut *slot) {
                Slot::Asked(request) => {
                    *slot = Slot::Waiting(request.number);
                    drop(slot);
                    w.process(who).cycle_started = w.now;
                    if w.caught(who, Point::StartToBegin) {
                        w.after(0, Some(who), move |w| crate::db::send_cycle(w, who, request));
                    } else {
                        crate::db::send_cycle(w, who, request);
                    }
                }
                other => *slot = other,
            }
        }
    }
}

/// Whether the process still waits for this cycle.
pub(crate) fn lease_waits(w: &mut World, who: Who, number: CycleNumber) -> bool {
    w.is_alive(who) && matches!(*w.process(who).slot.lock(), Slot::Waiting(n) if n == number)
}

/// The answer to a cycle, or its end without one.
pub(crate) fn lease_answered(
    w: &mut World,
    who: Who,
    number: CycleNumber,
    answer: Result<CycleReply, LeaseError>,
) {
    if !lease_waits(w, who, number) {
        return;
    }
    let now = w.now;
    let process = w.process(who);
    match &answer {
        Ok(_) => process.first_answer_at = process.first_answer_at.or(Some(now)),
        Err(_) => process.db_connection = None,
    }
    let reply = answer.as_ref().ok().cloned();
    #[cfg(feature = "planted")]
    schemas::planted::note_begun(process.begun_at);
    *process.slot.lock() = Slot::Answered(answer);
    if let Some(reply) = reply {
        crate::oracle::cycle_answered(w, who, &reply);
    }
    poll_lease(w, who);
}

fn after_cycle(w: &mut World, who: Who) {
    if w.process(who).state.borrow().claims_frozen {
        w.reach("claims_frozen");
    }
    follow(w, who);
    pump_lease(w, who);
}

/// What the manager does: a lost account stops, a switched-off one drains, a gained one begins.
pub(crate) fn follow(w: &mut World, who: Who) {
    let process = w.process(who);
    let state = Arc::clone(&process.state.borrow_and_update());
    if process.ending {
        return;
    }
    let mut stops = Vec::new();
    let mut drains = Vec::new();
    for (account, session) in &process.sessions {
        match state.held.get(account) {
            Some(tenure) if tenure.token == session.tenure.token && tenure.enabled => {}
            Some(tenure) if tenure.token == session.tenure.token => drains.push(*account),
            Some(_) | None => stops.push(*account),
        }
    }
    process.begun.retain(|account, _| state.held.contains_key(account));
    for account in stops {
        crate::session::stop(w, who, account);
    }
    for account in drains {
        crate::session::drain(w, who, account);
    }
    let process = w.process(who);
    let mut gained = Vec::new();
    for (account, tenure) in &state.held {
        if process.sessions.contains_key(account) || !tenure.enabled {
            continue;
        }
        let key = TenureKey { account: *account, token: tenure.token };
        let is_first = process.begun.insert(*account, key) != Some(key);
        gained.push((key, tenure.clean && is_first));
    }
    for (key, clean) in gained {
        crate::session::begin(w, who, key, clean);
    }
}

/// How long a call waits in this process's executor before it is sent.
pub(crate) fn executor_wait(w: &World, who: Who) -> u64 {
    let stalls = w.active.values().find_map(|fault| match fault {
        Fault::ExecutorStall { node, wait } if *node == who.node => Some(*wait),
        _ => None,
    });
    stalls.unwrap_or(0)
}
