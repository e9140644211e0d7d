//! Which faults come when, from a seed alone.
//!
//! Inputs: a seed and how many rounds there is time for. Outputs: rounds of one to three faults,
//! each with its target, its start within the round and how long it lasts.
//!
//! Invariants:
//! 1. The same seed gives the same schedule.
//! 2. Kinds are dealt like cards: none comes a second time before each has come once, so a run of
//!    [`ROUNDS_FOR_EVERY_KIND`] rounds has every kind.
//! 3. Two faults of a round never need the same part of the world, and at least one node is left
//!    alone.

use fastrand::Rng;
use std::collections::BTreeSet;
use std::time::Duration;

/// Nodes of the world.
pub const NODES: usize = 3;
/// NATS servers of the world.
pub const SERVERS: usize = 3;
/// Faults of one round at most.
pub const FAULTS_MAX: usize = 3;
/// Nodes that the faults of a round may touch: one is left alone, so that somebody can take over.
const NODES_TOUCHED_MAX: usize = NODES - 1;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "`word` and `meaning` say it")]
pub enum Kind {
    CutDatabase,
    CutBus,
    CutBroker,
    Latency,
    BlackHole,
    Reset,
    HalfOpen,
    FreezeShort,
    FreezeLong,
    Kill,
    HandOver,
    Twin,
    MasterCut,
    NatsKill,
    NatsFreeze,
    LameDuck,
    Promote,
    LockRow,
    RevokeWrites,
    LateAnswers,
    LostAnswers,
    LostRequests,
    LateDelivery,
    UnsyncedLists,
    Kicks,
    Requotes,
    BurstInTakeover,
}

/// Every kind.
pub const KINDS: &[Kind] = &[
    Kind::CutDatabase,
    Kind::CutBus,
    Kind::CutBroker,
    Kind::Latency,
    Kind::BlackHole,
    Kind::Reset,
    Kind::HalfOpen,
    Kind::FreezeShort,
    Kind::FreezeLong,
    Kind::Kill,
    Kind::HandOver,
    Kind::Twin,
    Kind::MasterCut,
    Kind::NatsKill,
    Kind::NatsFreeze,
    Kind::LameDuck,
    Kind::Promote,
    Kind::LockRow,
    Kind::RevokeWrites,
    Kind::LateAnswers,
    Kind::LostAnswers,
    Kind::LostRequests,
    Kind::LateDelivery,
    Kind::UnsyncedLists,
    Kind::Kicks,
    Kind::Requotes,
    Kind::BurstInTakeover,
];

/// What only one fault of a round may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Node(usize),
    Bus,
    Database,
    Broker,
    Masters,
}

impl Kind {
    /// The word in the verdict.
    pub fn word(self) -> &'static str {
        match self {
            Kind::CutDatabase => "cut_database",
            Kind::CutBus => "cut_bus",
            Kind::CutBroker => "cut_broker",
            Kind::Latency => "latency",
            Kind::BlackHole => "black_hole",
            Kind::Reset => "reset",
            Kind::HalfOpen => "half_open",
            Kind::FreezeShort => "freeze_short",
            Kind::FreezeLong => "freeze_long",
            Kind::Kill => "kill_and_restart",
            Kind::HandOver => "hand_over",
            Kind::Twin => "same_name_twice",
            Kind::MasterCut => "cut_masters_bus",
            Kind::NatsKill => "nats_killed",
            Kind::NatsFreeze => "nats_frozen",
            Kind::LameDuck => "nats_lame_duck",
            Kind::Promote => "replica_promoted",
            Kind::LockRow => "lease_row_locked",
            Kind::RevokeWrites => "writes_revoked",
            Kind::LateAnswers => "late_answers",
            Kind::LostAnswers => "lost_answers",
            Kind::LostRequests => "lost_requests",
            Kind::LateDelivery => "late_delivery",
            Kind::UnsyncedLists => "unsynced_lists",
            Kind::Kicks => "kicked_sessions",
            Kind::Requotes => "requotes",
            Kind::BurstInTakeover => "burst_in_takeover",
        }
    }

    /// What happens, in a sentence.
    pub fn meaning(self) -> &'static str {
        match self {
            Kind::CutDatabase => "one node loses the database and nothing else",
            Kind::CutBus => "one node loses the bus and nothing else",
            Kind::CutBroker => "one node loses the broker and nothing else",
            Kind::Latency => "everything one node sends and hears is late",
            Kind::BlackHole => "one node is cut off from everything, its connections stay",
            Kind::Reset => "one node's connections are reset again and again",
            Kind::HalfOpen => "one direction of a node's connections is dead",
            Kind::FreezeShort => "a node stands still for less than its lease",
            Kind::FreezeLong => "a node stands still for longer than its lease",
            Kind::Kill => "a node is killed and started again 3 s later",
            Kind::HandOver => "a node is told to end and started again",
            Kind::Twin => "a second process of the same name runs beside a node",
            Kind::MasterCut => "the external masters lose the bus",
            Kind::NatsKill => "a NATS server is killed and started again",
            Kind::NatsFreeze => "a NATS server stands still",
            Kind::LameDuck => "a NATS server goes lame duck and is started again",
            Kind::Promote => "replication stops, the primary ends, the replica is promoted",
            Kind::LockRow => "somebody locks one lease row for longer than the lease",
            Kind::RevokeWrites => "the nodes may not write their rows",
            Kind::LateAnswers => "the broker answers later than a call may take",
            Kind::LostAnswers => "some orders are carried out and never answered",
            Kind::LostRequests => "some orders never arrive and are never answered",
            Kind::LateDelivery => "orders arrive seconds after they were sent",
            Kind::UnsyncedLists => "lists are empty or in part for seconds after a reconnect",
            Kind::Kicks => "the broker ends sessions, and a new one ends the older",
            Kind::Requotes => "some orders are refused with another price",
            Kind::BurstInTakeover => "27 closes while a killed node's accounts are taken over",
        }
    }

    /// Shortest and longest time it lasts, in milliseconds; a lease is 10 s.
    fn lasts_ms(self) -> (u64, u64) {
        match self {
            Kind::CutDatabase => (9_000, 14_000),
            Kind::CutBus | Kind::CutBroker | Kind::HalfOpen => (5_000, 10_000),
            Kind::Latency | Kind::Reset | Kind::MasterCut => (4_000, 8_000),
            Kind::BlackHole => (3_000, 13_000),
            Kind::FreezeShort => (1_000, 7_000),
            Kind::FreezeLong => (11_000, 16_000),
            // The time until it is started again.
            Kind::Kill | Kind::BurstInTakeover => (3_000, 3_000),
            Kind::HandOver => (1_000, 3_000),
            Kind::Twin => (5_000, 12_000),
            Kind::NatsKill => (3_000, 8_000),
            Kind::NatsFreeze => (5_000, 14_000),
            Kind::LameDuck => (1_000, 1_000),
            // How long the primary goes on unheard.
            Kind::Promote => (1_500, 4_000),
            Kind::LockRow => (11_000, 13_000),
            Kind::RevokeWrites => (4_000, 9_000),
            Kind::LateAnswers
            | Kind::LostAnswers
            | Kind::LostRequests
            | Kind::LateDelivery
            | Kind::UnsyncedLists
            | Kind::Kicks
            | Kind::Requotes => (5_000, 8_000),
        }
    }

    /// It is done to one node, not to a server or everybody.
    pub fn touches_node(self) -> bool {
        match self {
            Kind::CutDatabase
            | Kind::CutBus
            | Kind::CutBroker
            | Kind::Latency
            | Kind::BlackHole
            | Kind::Reset
            | Kind::HalfOpen
            | Kind::FreezeShort
            | Kind::FreezeLong
            | Kind::Kill
            | Kind::HandOver
            | Kind::Twin
            | Kind::BurstInTakeover => true,
            Kind::MasterCut
            | Kind::NatsKill
            | Kind::NatsFreeze
            | Kind::LameDuck
            | Kind::Promote
            | Kind::LockRow
            | Kind::RevokeWrites
            | Kind::LateAnswers
            | Kind::LostAnswers
            | Kind::LostRequests
            | Kind::LateDelivery
            | Kind::UnsyncedLists
            | Kind::Kicks
            | Kind::Requotes => false,
        }
    }

    fn part(self, target: usize) -> Part {
        match self {
            _ if self.touches_node() => Part::Node(target),
            Kind::NatsKill | Kind::NatsFreeze | Kind::LameDuck => Part::Bus,
            Kind::Promote | Kind::LockRow | Kind::RevokeWrites => Part::Database,
            Kind::MasterCut => Part::Masters,
            _ => Part::Broker,
        }
    }
}

/// One fault of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// Which node, or which NATS server; without meaning for the other kinds.
    pub target: usize,
    /// From the beginning of the round's faults.
    pub after: Duration,
    /// How long.
    pub lasts: Duration,
    /// For what is left to choose when it happens.
    pub dice: u64,
}

/// Rounds after which every kind has come, whatever the seed (found by trying many). A round takes
/// 15 to 25 s, so ten minutes are enough.
pub const ROUNDS_FOR_EVERY_KIND: usize = 18;

/// Deals rounds.
#[derive(Debug)]
pub struct Schedule {
    rng: Rng,
    deck: Vec<Kind>,
    wanted: Vec<Kind>,
    /// Two until every kind has come, then one.
    faults_min: usize,
}

impl Schedule {
    /// A schedule from a seed; of these kinds only, if any are named.
    pub fn new(seed: u64, only: &[Kind]) -> Schedule {
        let wanted = if only.is_empty() { KINDS.to_vec() } else { only.to_vec() };
        Schedule { rng: Rng::with_seed(seed), deck: Vec::new(), wanted, faults_min: 2 }
    }

    /// The next round.
    pub fn round(&mut self) -> Vec<Fault> {
        if self.deck.is_empty() {
            self.deck = self.wanted.clone();
            self.rng.shuffle(&mut self.deck);
        }
        let count = self.rng.usize(self.faults_min..=FAULTS_MAX);
        let mut parts: BTreeSet<Part> = BTreeSet::new();
        let mut faults = Vec::new();
        let mut put_back = Vec::new();
        while faults.len() < count {
            let Some(kind) = self.deck.pop() else { break };
            match self.place(kind, &parts) {
                Some(fault) => {
                    parts.insert(kind.part(fault.target));
                    faults.push(fault);
                }
                None => put_back.push(kind),
            }
        }
        // The next round takes them first.
        put_back.reverse();
        self.deck.extend(put_back);
        if self.deck.is_empty() {
            self.faults_min = 1;
        }
        faults
    }

    fn place(&mut self, kind: Kind, taken: &BTreeSet<Part>) -> Option<Fault> {
        let nodes = taken.iter().filter(|part| matches!(part, Part::Node(_))).count();
        if kind.touches_node() && nodes >= NODES_TOUCHED_MAX {
            return None;
        }
        let first = self.rng.usize(0..NODES);
        let target = (0..NODES)
            .map(|step| (first + step) % NODES)
            .find(|target| !taken.contains(&kind.part(*target)))?;
        let (shortest, longest) = kind.lasts_ms();
        Some(Fault {
            kind,
            target,
            after: Duration::from_millis(self.rng.u64(0..2_000)),
            lasts: Duration::from_millis(self.rng.u64(shortest..=longest)),
            dice: self.rng.u64(..),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(seed: u64, count: usize) -> Vec<Vec<Fault>> {
        let mut schedule = Schedule::new(seed, &[]);
        (0..count).map(|_| schedule.round()).collect()
    }

    #[test]
    fn one_seed_gives_one_schedule_and_another_seed_another() {
        assert_eq!(rounds(7, 30), rounds(7, 30));
        assert_ne!(rounds(7, 30), rounds(8, 30));
    }

    #[test]
    fn every_kind_comes_within_the_promised_rounds() {
        for seed in 0..5_000 {
            let seen: BTreeSet<Kind> =
                rounds(seed, ROUNDS_FOR_EVERY_KIND).iter().flatten().map(|f| f.kind).collect();
            assert_eq!(seen.len(), KINDS.len(), "seed {seed}: {seen:?}");
        }
    }

    #[test]
    fn a_round_leaves_a_node_alone_and_breaks_each_part_once() {
        for seed in 0..500 {
            for round in rounds(seed, 40) {
                assert!((1..=FAULTS_MAX).contains(&round.len()));
                let parts: BTreeSet<Part> =
                    round.iter().map(|fault| fault.kind.part(fault.target)).collect();
                assert_eq!(parts.len(), round.len(), "{round:?}");
                let nodes = round.iter().filter(|fault| fault.kind.touches_node()).count();
                assert!(nodes < NODES, "{round:?}");
            }
        }
    }

    #[test]
    fn a_freeze_is_shorter_or_longer_than_the_lease_as_its_name_says() {
        let lease_ms = crate::chaos::timing::LEASE.as_millis() as u64;
        assert!(Kind::FreezeShort.lasts_ms().1 < lease_ms);
        assert!(Kind::FreezeLong.lasts_ms().0 > lease_ms);
        assert!(Kind::LockRow.lasts_ms().0 > lease_ms);
    }
}
