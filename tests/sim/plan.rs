//! What one seed is: the accounts and links, how busy the masters are, and which faults come when.
//!
//! In: a seed and a mode. Out: a [`Plan`], complete before the first step, so that a story can be
//! shortened by taking faults out and running the rest again.

use crate::rng::Rng;

/// One second of the world, in its unit.
pub(crate) const SECOND: u64 = 1_000_000;
/// One millisecond.
pub(crate) const MS: u64 = 1_000;
/// Every world has two masters.
pub(crate) const MASTERS: u64 = 2;
/// Follower accounts are numbered from here.
pub(crate) const FOLLOWERS_FROM: u64 = 101;
/// Nobody trades before this: the nodes claim their accounts.
pub(crate) const TRADING_FROM: u64 = 15 * SECOND;
/// In the liveness mode everything is healed at the end, and then has this long to settle:
/// a lease that runs out, a settle time, the last audit, and L4's two minutes.
pub(crate) const QUIET: u64 = 300 * SECOND;

/// What a run checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Mode {
    /// Faults until the end; the safety invariants after every step.
    Safety,
    /// Then everything heals but what is broken for good, and all must settle.
    Liveness,
}

/// How a follower's account looks at its broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Mt5,
    Mt4,
    /// MT5 whose comments come back empty.
    Blank,
    /// MT5 whose comments come back behind a text of the broker's, cut to its limit.
    Prefixed,
}

/// One follower.
#[derive(Debug, Clone)]
pub(crate) struct FollowerPlan {
    pub(crate) style: Style,
    /// Per link: which master, and the multiplier in hundredths.
    pub(crate) links: Vec<(u64, u32)>,
}

/// What a node is frozen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FreezeKind {
    /// SIGSTOP: all clocks go on.
    Stop,
    /// Suspend: the monotonic clock stands still.
    Suspend,
    /// A hypervisor's pause: only the wall clock shows it.
    Hold,
}

/// Where in its work a node may be caught by a freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Point {
    /// Between the last check and the write to the socket.
    GateToWrite,
    /// Between reading the clock and the begin of the lease transaction.
    StartToBegin,
    /// Between the statements and the commit.
    BeforeCommit,
    /// Between a complete read and the plan's first order.
    ReadToPlan,
}

/// One kind of fault with its numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fault {
    Crash {
        node: usize,
        restart_after: u64,
    },
    Shutdown {
        node: usize,
        restart_after: u64,
    },
    Twin {
        node: usize,
    },
    Freeze {
        node: usize,
        kind: FreezeKind,
    },
    FreezeAt {
        node: usize,
        point: Point,
        lasts: u64,
    },
    WallStep {
        node: usize,
        by: i64,
    },
    ExecutorStall {
        node: usize,
        wait: u64,
    },
    DbCut {
        node: usize,
    },
    DbSlow {
        latency: u64,
    },
    DbStall,
    DbLoseAcks {
        share: f64,
    },
    DbAway,
    DbLock {
        account: u64,
    },
    DbClock {
        by: i64,
    },
    DbFailover {
        lag: u64,
    },
    BusCut {
        node: usize,
    },
    BusDeaf {
        node: usize,
    },
    BusMute {
        node: usize,
    },
    BusPartition {
        a: usize,
        b: usize,
    },
    /// The road from the node's server is long, and the client is moved to another server.
    BusMoved {
        node: usize,
        by: u64,
    },
    BusLoss {
        share: f64,
    },
    BusDelay {
        by: u64,
    },
    BusReorder {
        by: u64,
    },
    BusDuplicates {
        share: f64,
    },
    BusGarbage {
        share: f64,
    },
    BrokerCut {
        node: usize,
    },
    BrokerDrop {
        account: u64,
    },
    BrokerAnswers {
        by: u64,
    },
    BrokerDelivers {
        by: u64,
    },
    /// The node's orders are held up on a road that no reset reaches, and its lease runs out.
    LateRoad {
        node: usize,
        by: u64,
    },
    BrokerAccepts {
        by: u64,
    },
    BrokerLosesAnswers {
        share: f64,
    },
    BrokerRequotes {
        share: f64,
    },
    BrokerRejects {
        share: f64,
    },
    BrokerUnsynced {
        lasts: u64,
    },
    ClosesByHand,
    StopsByHand,
    LinkCloseOnly {
        link: usize,
    },
    LinkPaused {
        link: usize,
    },
    AccountOff {
        account: u64,
    },
    BadRows {
        share: f64,
    },
}

impl Fault {
    /// The word it is counted and printed by.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Fault::Crash { .. } => "crash",
            Fault::Shutdown { .. } => "shutdown",
            Fault::Twin { .. } => "twin",
            Fault::Freeze { .. } => "freeze",
            Fault::FreezeAt { .. } => "freeze_at",
            Fault::WallStep { .. } => "wall_step",
            Fault::ExecutorStall { .. } => "executor_stall",
            Fault::DbCut { .. } => "db_cut",
            Fault::DbSlow { .. } => "db_slow",
            Fault::DbStall => "db_stall",
            Fault::DbLoseAcks { .. } => "db_lose_acks",
            Fault::DbAway => "db_away",
            Fault::DbLock { .. } => "db_lock",
            Fault::DbClock { .. } => "db_clock",
            Fault::DbFailover { .. } => "db_failover",
            Fault::BusCut { .. } => "bus_cut",
            Fault::BusDeaf { .. } => "bus_deaf",
            Fault::BusMute { .. } => "bus_mute",
            Fault::BusPartition { .. } => "bus_partition",
            Fault::BusMoved { .. } => "bus_moved",
            Fault::BusLoss { .. } => "bus_loss",
            Fault::BusDelay { .. } => "bus_delay",
            Fault::BusReorder { .. } => "bus_reorder",
            Fault::BusDuplicates { .. } => "bus_duplicates",
            Fault::BusGarbage { .. } => "bus_garbage",
            Fault::BrokerCut { .. } => "broker_cut",
            Fault::BrokerDrop { .. } => "broker_drop",
            Fault::BrokerAnswers { .. } => "broker_answers",
            Fault::BrokerDelivers { .. } => "broker_delivers",
            Fault::LateRoad { .. } => "late_road",
            Fault::BrokerAccepts { .. } => "broker_accepts",
            Fault::BrokerLosesAnswers { .. } => "broker_loses_answers",
            Fault::BrokerRequotes { .. } => "broker_requotes",
            Fault::BrokerRejects { .. } => "broker_rejects",
            Fault::BrokerUnsynced { .. } => "broker_unsynced",
            Fault::ClosesByHand => "closes_by_hand",
            Fault::StopsByHand => "stops_by_hand",
            Fault::LinkCloseOnly { .. } => "link_close_only",
            Fault::LinkPaused { .. } => "link_paused",
            Fault::AccountOff { .. } => "account_off",
            Fault::BadRows { .. } => "bad_rows",
        }
    }
}

/// A fault with its time.
#[derive(Debug, Clone)]
pub(crate) struct Scheduled {
    pub(crate) at: u64,
    pub(crate) lasts: u64,
    pub(crate) fault: Fault,
}

/// Draws one fault, and how long it lasts.
type Maker = fn(&mut Rng, &Plan) -> (Fault, u64);

/// Everything that is drawn before a world begins.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) mode: Mode,
    /// Accounts a node may own, and its clock's error in millionths.
    pub(crate) nodes: Vec<(u32, i64)>,
    pub(crate) followers: Vec<FollowerPlan>,
    /// Nobody trades or breaks anything after this.
    pub(crate) faults_until: u64,
    pub(crate) ends: u64,
    pub(crate) faults: Vec<Scheduled>,
    /// Mean time between two doings of a master.
    pub(crate) pace: u64,
    /// Mean latency of the bus, the database and the brokers.
    pub(crate) latencies: [u64; 3],
    /// Followers hear a master of their own node without the bus.
    pub(crate) local_path: bool,
}

impl Plan {
    pub(crate) fn draw(seed: u64, mode: Mode) -> Plan {
        let mut rng = Rng::new(seed ^ 0x9E37_79B9_7F4A_7C15);
        let node_count = rng.range(2, 5) as usize;
        let follower_count = rng.range(3, 7);
        let accounts = follower_count + MASTERS;
        let nodes = (0..node_count)
            .map(|_| {
                // Any one node can be lost and the others still own everything, or it is tight.
                let tight = accounts.div_ceil(node_count as u64 - 1) as u32;
                let capacity = if rng.chance(0.6) { accounts as u32 } else { tight };
                (capacity, rng.range(0, 401) as i64 - 200)
            })
            .collect();
        let followers = (0..follower_count).map(|_| follower(&mut rng)).collect();
        let faults_until = rng.range(400, 1_300) * SECOND;
        let ends = match mode {
            Mode::Safety => faults_until,
            Mode::Liveness => faults_until + QUIET,
        };
        let mut plan = Plan {
            seed,
            mode,
            nodes,
            followers,
            faults_until,
            ends,
            faults: Vec::new(),
            pace: *rng.pick(&[2, 4, 10, 30]) * SECOND,
            latencies: [
                *rng.pick(&[200, 1_000, 20_000]),
                *rng.pick(&[500, 2_000, 30_000]),
                *rng.pick(&[1_000, 10_000, 60_000]),
            ],
            local_path: true,
        };
        plan.draw_faults(&mut rng);
        plan.local_path = rng.chance(0.5);
        plan
    }

    pub(crate) fn follower_ids(&self) -> impl Iterator<Item = u64> + use<> {
        let count = self.followers.len() as u64;
        FOLLOWERS_FROM..FOLLOWERS_FROM + count
    }

    fn link_count(&self) -> usize {
        self.followers.iter().map(|f| f.links.len()).sum()
    }

    /// Each kind has a rate of its own, and none is a likely one: a run of few kinds reaches deeper.
    fn draw_faults(&mut self, rng: &mut Rng) {
        let makers: &[Maker] = &[
            |r, p| {
                let restart_after = r.range(1, 120) * SECOND;
                (Fault::Crash { node: r.index(p.nodes.len()), restart_after }, 0)
            },
            |r, p| {
                let restart_after = r.range(1, 60) * SECOND;
                (Fault::Shutdown { node: r.index(p.nodes.len()), restart_after }, 0)
            },
            |r, p| (Fault::Twin { node: r.index(p.nodes.len()) }, r.range(20, 200) * SECOND),
            |r, p| {
                let kind = *r.pick(&[FreezeKind::Stop, FreezeKind::Suspend, FreezeKind::Hold]);
                (Fault::Freeze { node: r.index(p.nodes.len()), kind }, r.log(100 * MS, 90 * SECOND))
            },
            |r, p| {
                let point = *r.pick(&[
                    Point::GateToWrite,
                    Point::StartToBegin,
                    Point::BeforeCommit,
                    Point::ReadToPlan,
                ]);
                let lasts = r.log(100 * MS, 30 * SECOND);
                (Fault::FreezeAt { node: r.index(p.nodes.len()), point, lasts }, 60 * SECOND)
            },
            |r, p| {
                let by = (r.range(1, 240) as i64 - 120) * SECOND as i64;
                (Fault::WallStep { node: r.index(p.nodes.len()), by }, 0)
            },
            |r, p| {
                let wait = r.log(100 * MS, 25 * SECOND);
                (
                    Fault::ExecutorStall { node: r.index(p.nodes.len()), wait },
                    r.range(5, 60) * SECOND,
                )
            },
            |r, p| (Fault::DbCut { node: r.index(p.nodes.len()) }, r.log(SECOND, 180 * SECOND)),
            |r, _| {
                (Fault::DbSlow { latency: r.log(10 * MS, 20 * SECOND) }, r.log(SECOND, 60 * SECOND))
            },
            |r, _| (Fault::DbStall, r.log(200 * MS, 20 * SECOND)),
            |r, _| (Fault::DbLoseAcks { share: r.unit() * 0.7 }, r.range(5, 60) * SECOND),
            |r, _| (Fault::DbAway, r.log(SECOND, 120 * SECOND)),
            |r, p| (Fault::DbLock { account: r.account(p) }, r.log(SECOND, 90 * SECOND)),
            |r, _| (Fault::DbClock { by: (r.range(1, 240) as i64 - 120) * SECOND as i64 }, 0),
            |r, _| (Fault::DbFailover { lag: r.log(100 * MS, 60 * SECOND) }, 0),
            |r, p| (Fault::BusCut { node: r.index(p.nodes.len()) }, r.log(SECOND, 120 * SECOND)),
            |r, p| (Fault::BusDeaf { node: r.index(p.nodes.len()) }, r.log(SECOND, 180 * SECOND)),
            |r, p| (Fault::BusMute { node: r.index(p.nodes.len()) }, r.log(SECOND, 180 * SECOND)),
            |r, p| {
                let a = r.index(p.nodes.len());
                let b = r.index(p.nodes.len());
                (Fault::BusPartition { a, b }, r.log(SECOND, 60 * SECOND))
            },
            |r, p| {
                let by = r.log(100 * MS, 10 * SECOND);
                (Fault::BusMoved { node: r.index(p.nodes.len()), by }, r.range(1, 10) * SECOND)
            },
            |r, _| (Fault::BusLoss { share: r.unit() * 0.3 }, r.range(2, 90) * SECOND),
            |r, _| (Fault::BusDelay { by: r.log(10 * MS, 10 * SECOND) }, r.range(2, 60) * SECOND),
            |r, _| (Fault::BusReorder { by: r.log(MS, 5 * SECOND) }, r.range(2, 40) * SECOND),
            |r, _| (Fault::BusDuplicates { share: r.unit() * 0.05 }, r.range(5, 120) * SECOND),
            |r, _| (Fault::BusGarbage { share: r.unit() * 0.02 }, r.range(5, 60) * SECOND),
            |r, p| (Fault::BrokerCut { node: r.index(p.nodes.len()) }, r.log(SECOND, 90 * SECOND)),
            |r, p| (Fault::BrokerDrop { account: r.account(p) }, 0),
            |r, _| {
                (Fault::BrokerAnswers { by: r.log(100 * MS, 30 * SECOND) }, r.range(3, 60) * SECOND)
            },
            |r, _| {
                (
                    Fault::BrokerDelivers { by: r.log(100 * MS, 30 * SECOND) },
                    r.range(3, 40) * SECOND,
                )
            },
            |r, p| {
                let by = r.range(20, 70) * SECOND;
                (Fault::LateRoad { node: r.index(p.nodes.len()), by }, r.range(40, 90) * SECOND)
            },
            |r, _| {
                (Fault::BrokerAccepts { by: r.log(100 * MS, 9 * SECOND) }, r.range(3, 60) * SECOND)
            },
            |r, _| (Fault::BrokerLosesAnswers { share: r.unit() * 0.2 }, r.range(5, 90) * SECOND),
            |r, _| (Fault::BrokerRequotes { share: r.unit() * 0.3 }, r.range(5, 90) * SECOND),
            |r, _| (Fault::BrokerRejects { share: r.unit() * 0.2 }, r.range(5, 60) * SECOND),
            |r, _| {
                (
                    Fault::BrokerUnsynced { lasts: r.log(100 * MS, 10 * SECOND) },
                    r.range(30, 200) * SECOND,
                )
            },
            |_, _| (Fault::ClosesByHand, 0),
            |_, _| (Fault::StopsByHand, 0),
            |r, p| {
                (Fault::LinkCloseOnly { link: r.index(p.link_count()) }, r.range(10, 120) * SECOND)
            },
            |r, p| (Fault::AccountOff { account: r.account(p) }, r.range(10, 90) * SECOND),
            |r, _| (Fault::BadRows { share: r.unit() * 0.5 }, r.range(5, 30) * SECOND),
            |r, p| {
                (Fault::LinkPaused { link: r.index(p.link_count()) }, r.log(SECOND, 120 * SECOND))
            },
        ];
        let calm = rng.chance(0.05);
        for make in makers {
            let count = if calm || rng.chance(0.55) { 0 } else { rng.range(1, 4) };
            for _ in 0..count {
                let (fault, lasts) = make(rng, self);
                let at = rng.range(TRADING_FROM + 5 * SECOND, self.faults_until);
                let lasts = lasts.min(self.faults_until - at);
                self.faults.push(Scheduled { at, lasts, fault });
            }
        }
        self.faults.sort_by_key(|scheduled| scheduled.at);
    }
}

fn follower(rng: &mut Rng) -> FollowerPlan {
    let style = match rng.range(0, 10) {
        0..4 => Style::Mt5,
        4..7 => Style::Mt4,
        7..8 => Style::Blank,
        _ => Style::Prefixed,
    };
    let multiplier = |rng: &mut Rng| *rng.pick(&[100, 50, 200, 30]);
    let links = match rng.range(0, 3) {
        0 => vec![(1, multiplier(rng))],
        1 => vec![(2, multiplier(rng))],
        _ => vec![(1, multiplier(rng)), (2, multiplier(rng))],
    };
    FollowerPlan { style, links }
}

impl Rng {
    /// Any account of the plan.
    fn account(&mut self, plan: &Plan) -> u64 {
        let count = MASTERS + plan.followers.len() as u64;
        let number = self.range(0, count);
        if number < MASTERS { number + 1 } else { FOLLOWERS_FROM + number - MASTERS }
    }
}
