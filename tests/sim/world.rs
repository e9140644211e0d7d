//! The world of one seed: true time, machines and their clocks, what is broken just now.
//!
//! One thread, one queue of things to happen, ordered by true time and then by when they were
//! planned. What happens *in* a process waits while that process stands still, and is dropped
//! when it has died; what happens at the database, on the bus or at a broker does not.
//!
//! Nothing here reads a clock of this machine or an unseeded random number, and nothing iterates
//! in hash order: a seed gives the same trace, byte for byte.

use crate::broker::Brokers;
use crate::bus::Bus;
use crate::db::Db;
use crate::node::Process;
use crate::oracle::Oracle;
use crate::plan::{Fault, FreezeKind, Mode, Plan, Point, SECOND, Scheduled};
use crate::rng::Rng;
use lockstep::clock::{Clock, Reading};
use parking_lot::Mutex;
use reconcile::{AboveMax, BelowMin, LinkMode, LinkRules, Sizing};
use rust_decimal::Decimal;
use schemas::{AccountId, LinkId, Magic, Micros};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// When every world begins, by a right clock.
pub(crate) const BEGIN: i64 = 1_700_000_000_000_000;
/// Things that may happen in one run; more is a world that does not come to rest.
const STEPS_MAX: u64 = 20_000_000;

/// One incarnation of a process on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Who {
    pub(crate) node: usize,
    pub(crate) incarnation: u64,
}

type Deed = Box<dyn FnOnce(&mut World)>;

struct Due {
    at: u64,
    number: u64,
    who: Option<Who>,
    deed: Deed,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// The clocks of one machine; the process on it reads what was set last.
#[derive(Debug, Clone)]
pub(crate) struct MachineClock(Arc<Mutex<Reading>>);

impl Clock for MachineClock {
    fn read(&self) -> Reading {
        *self.0.lock()
    }
}

/// A machine.
pub(crate) struct Machine {
    pub(crate) name: String,
    pub(crate) capacity: u32,
    rate_ppm: i64,
    clock: MachineClock,
    monotonic_lost: u64,
    boottime_lost: u64,
    wall_off: i64,
    pub(crate) frozen_until: u64,
    pub(crate) process: Option<Process>,
    pub(crate) incarnation: u64,
}

impl Machine {
    fn new(name: String, capacity: u32, rate_ppm: i64) -> Machine {
        let zero = Reading {
            monotonic: Duration::ZERO,
            boottime: Duration::ZERO,
            wall: Duration::from_micros(BEGIN as u64),
        };
        Machine {
            name,
            capacity,
            rate_ppm,
            clock: MachineClock(Arc::new(Mutex::new(zero))),
            monotonic_lost: 0,
            boottime_lost: 0,
            wall_off: 0,
            frozen_until: 0,
            process: None,
            incarnation: 0,
        }
    }

    pub(crate) fn clock(&self) -> MachineClock {
        self.clock.clone()
    }

    fn set_clock(&self, now: u64) {
        let passed = (now as i64 + now as i64 * self.rate_ppm / 1_000_000).max(0) as u64;
        let at = |us: u64| Duration::from_micros(us);
        let wall = (BEGIN + passed as i64 + self.wall_off).max(0) as u64;
        *self.clock.0.lock() = Reading {
            monotonic: at(1_000 * SECOND + passed - self.monotonic_lost),
            boottime: at(2_000 * SECOND + passed - self.boottime_lost),
            wall: at(wall),
        };
    }
}

/// A link, as the administrator knows it.
#[derive(Debug, Clone)]
pub(crate) struct LinkFacts {
    pub(crate) rules: LinkRules,
    /// Was ever close-only, or its account switched off.
    pub(crate) was_restricted: bool,
}

/// The world of one seed.
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<Due>>,
    numbers: u64,
    pub(crate) rng: Rng,
    pub(crate) machines: Vec<Machine>,
    pub(crate) links: BTreeMap<LinkId, LinkFacts>,
    pub(crate) db: Db,
    pub(crate) bus: Bus,
    pub(crate) brokers: Brokers,
    pub(crate) oracle: Oracle,
    /// Faults that are on, by their place in the plan.
    pub(crate) active: BTreeMap<usize, Fault>,
    /// How often each fault was begun, and what was reached.
    pub(crate) faults_begun: BTreeMap<&'static str, u64>,
    pub(crate) reached: BTreeMap<&'static str, u64>,
    pub(crate) trace: Option<Vec<String>>,
    /// For the parts that measure with it; its difference to itself is all that is used.
    pub(crate) base: Instant,
    pub(crate) healed: bool,
}

impl World {
    pub(crate) fn new(plan: Plan, trace: bool) -> World {
        let links = links_of(&plan);
        let rng = Rng::new(plan.seed);
        let mut machines: Vec<Machine> = plan
            .nodes
            .iter()
            .enumerate()
            .map(|(index, (capacity, ppm))| Machine::new(format!("node-{index}"), *capacity, *ppm))
            .collect();
        // A second process with the same host name runs on a machine of its own.
        let twins: Vec<Machine> = machines
            .iter()
            .map(|machine| Machine::new(machine.name.clone(), machine.capacity, -machine.rate_ppm))
            .collect();
        machines.extend(twins);
        World {
            now: 0,
            queue: BinaryHeap::new(),
            numbers: 0,
            rng,
            machines,
            db: Db::new(&plan, &links),
            bus: Bus::default(),
            brokers: Brokers::new(&plan),
            oracle: Oracle::default(),
            links,
            active: BTreeMap::new(),
            faults_begun: BTreeMap::new(),
            reached: BTreeMap::new(),
            trace: trace.then(Vec::new),
            base: instant(),
            healed: false,
            plan,
        }
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(&mut self) {
        // The parts under test draw their jitter from the thread's generator.
        fastrand::seed(self.plan.seed);
        self.begin();
        let mut steps = 0;
        while let Some(Reverse(due)) = self.queue.pop() {
            if due.at > self.plan.ends || self.oracle.violation.is_some() {
                break;
            }
            self.now = due.at;
            steps += 1;
            if steps > STEPS_MAX {
                self.violate("L4", "the world does not come to rest".into());
                break;
            }
            self.happen(due);
        }
        if self.oracle.violation.is_none() {
            self.now = self.plan.ends;
            crate::oracle::at_the_end(self);
        }
    }

    fn happen(&mut self, due: Due) {
        if let Some(who) = due.who {
            let machine = &self.machines[who.node];
            if machine.process.is_none() || machine.incarnation != who.incarnation {
                return;
            }
            if machine.frozen_until > self.now {
                let at = machine.frozen_until;
                self.push(at, due.who, due.deed);
                return;
            }
            machine.set_clock(self.now);
        }
        (due.deed)(self);
    }

    fn begin(&mut self) {
        for node in 0..self.plan.nodes.len() {
            let at = self.rng.range(0, 3 * SECOND);
            self.at(at, None, move |w| crate::node::start(w, node));
        }
        crate::broker::begin(self);
        for (place, scheduled) in self.plan.faults.clone().into_iter().enumerate() {
            crate::faults::schedule(self, place, scheduled);
        }
        if self.plan.mode == Mode::Liveness {
            let at = self.plan.faults_until;
            self.at(at, None, crate::faults::heal);
        }
    }

    fn push(&mut self, at: u64, who: Option<Who>, deed: Deed) {
        self.numbers += 1;
        self.queue.push(Reverse(Due { at, number: self.numbers, who, deed }));
    }

    /// Plans a deed for an instant; one of a process waits until it runs, and dies with it.
    pub(crate) fn at(
        &mut self,
        at: u64,
        who: Option<Who>,
        deed: impl FnOnce(&mut World) + 'static,
    ) {
        self.push(at.max(self.now), who, Box::new(deed));
    }

    pub(crate) fn after(
        &mut self,
        wait: u64,
        who: Option<Who>,
        deed: impl FnOnce(&mut World) + 'static,
    ) {
        self.push(self.now + wait, who, Box::new(deed));
    }

    pub(crate) fn process(&mut self, who: Who) -> &mut Process {
        let machine = &mut self.machines[who.node];
        assert!(machine.incarnation == who.incarnation, "a deed of a dead process");
        machine.process.as_mut().expect("a deed of a dead process")
    }

    pub(crate) fn is_alive(&self, who: Who) -> bool {
        let machine = &self.machines[who.node];
        machine.process.is_some() && machine.incarnation == who.incarnation
    }

    /// Reads the clock of a machine anew: the world went on since the deed began.
    pub(crate) fn refresh_clock(&self, who: Who) {
        self.machines[who.node].set_clock(self.now);
    }

    /// A right clock's word.
    pub(crate) fn true_wall(&self) -> Micros {
        Micros(BEGIN + self.now as i64)
    }

    /// Whether a process is caught at this point; if so it stands still from now on.
    pub(crate) fn caught(&mut self, who: Who, point: Point) -> bool {
        let wanted = self.active.iter().find_map(|(place, fault)| match fault {
            Fault::FreezeAt { node, point: at, lasts } if *node == who.node && *at == point => {
                Some((*place, *lasts))
            }
            _ => None,
        });
        let Some((place, lasts)) = wanted else { return false };
        // Once for each time it was planned.
        self.active.remove(&place);
        self.note(|| format!("node {} is caught {point:?} for {lasts} us", who.node));
        self.freeze(who.node, FreezeKind::Stop, lasts);
        self.reach("frozen_at_a_point");
        true
    }

    pub(crate) fn freeze(&mut self, node: usize, kind: FreezeKind, lasts: u64) {
        let now = self.now;
        let machine = &mut self.machines[node];
        machine.frozen_until = machine.frozen_until.max(now) + lasts;
        match kind {
            FreezeKind::Stop => {}
            FreezeKind::Suspend => machine.monotonic_lost += lasts,
            FreezeKind::Hold => {
                machine.monotonic_lost += lasts;
                machine.boottime_lost += lasts;
            }
        }
    }

    pub(crate) fn step_wall(&mut self, node: usize, by: i64) {
        self.machines[node].wall_off += by;
    }

    pub(crate) fn reach(&mut self, what: &'static str) {
        *self.reached.entry(what).or_default() += 1;
    }

    /// One line of the story; made only where it is kept.
    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let at = self.now;
            trace.push(format!("{:>6}.{:06} {}", at / SECOND, at % SECOND, line()));
        }
    }

    pub(crate) fn violate(&mut self, law: &'static str, what: String) {
        if self.oracle.violation.is_none() {
            self.note(|| format!("VIOLATION {law}: {what}"));
            self.oracle.violation = Some(crate::oracle::Violation { law, what, at: self.now });
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "a fixed instant; only differences to it are used")]
fn instant() -> Instant {
    Instant::now()
}

fn links_of(plan: &Plan) -> BTreeMap<LinkId, LinkFacts> {
    let mut links = BTreeMap::new();
    let mut number = 0;
    for (id, follower) in plan.follower_ids().zip(&plan.followers) {
        for (master, hundredths) in &follower.links {
            number += 1;
            let link = LinkId::new(number).expect("from 1");
            let rules = LinkRules {
                link,
                master: account(*master),
                follower: account(id),
                magic: Magic::new(7_000 + number).expect("a small number"),
                copy_from: Micros(0),
                sync_existing: true,
                mode: LinkMode::Copy,
                paused: false,
                sizing: Sizing::Multiplier(Decimal::new(i64::from(*hundredths), 2)),
                below_min: BelowMin::Skip,
                above_max: AboveMax::Clamp,
                align_contract: false,
                slippage_points: 50,
                copy_stops: true,
                copy_pendings: true,
                reverse: false,
                symbol_map: BTreeMap::new(),
                symbol_suffix: String::new(),
            };
            links.insert(link, LinkFacts { rules, was_restricted: false });
        }
    }
    links
}

pub(crate) fn account(id: u64) -> AccountId {
    AccountId::new(id).expect("from 1")
}

/// A scheduled fault that begins now.
pub(crate) fn begins(world: &mut World, place: usize, scheduled: &Scheduled) {
    *world.faults_begun.entry(scheduled.fault.word()).or_default() += 1;
    let fault = scheduled.fault.clone();
    world.note(|| format!("fault {place}: {fault:?} for {} us", scheduled.lasts));
}
