//! The world that is measured: servers, nodes, 30 followers, and a master that is moved.

use super::Layout;
use crate::bench::hand::Hand;
use crate::bench::raw::FOLLOWERS;
use crate::world::{Node, World};
use devstack::ManagedProcess;
use lockstep::clock::monotonic_ns;
use paper::faults::{FaultKind, FaultSpec, SettingsChange, Span};
use paper::protocol::Style;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The broker carries an order out so long after it arrived, and answers after another
/// [`ANSWER_MS`]: a round trip of 130 ms, in the middle of which the trade appears.
const ACCEPTANCE_MS: u64 = 60;
const ANSWER_MS: u64 = 70;
/// Orders of a follower in flight at once: a burst of 27 fits, so that no order of it waits for a
/// broker's answer.
const PARALLEL_ORDERS: u32 = 32;
/// Between two events of the quiet shape.
pub(super) const QUIET_EVERY: Duration = Duration::from_millis(50);
/// Between two bursts; everything that follows from one is over by then.
pub(super) const BURST_EVERY: Duration = Duration::from_millis(400);
/// Trades that stay open in the quiet shape: each is closed long after its copies were answered.
const QUIET_OPEN: usize = 14;
/// The machine comes to rest between the preparation of a burst and its begin.
const REST: Duration = Duration::from_millis(20);
/// How long a node may take to end.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Servers, nodes and the master.
#[derive(Debug)]
pub(super) struct Scene {
    world: World,
    hand: Hand,
    nodes: Vec<Node>,
    files: Vec<PathBuf>,
}

/// What a span of time was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    /// From, to: nanoseconds of `CLOCK_MONOTONIC`.
    pub(super) ns: (u64, u64),
    /// Events of the master.
    pub(super) events: usize,
    /// All of them opened trades, or closed them; nothing where both happened.
    pub(super) opens: Option<bool>,
}

impl Scene {
    /// Starts everything and waits until all followers copy. The nodes' files go into `folder`.
    pub(super) async fn start(
        layout: Layout,
        folder: &Path,
        settings: &[(String, String)],
    ) -> Scene {
        let world = World::start(&format!("own-time-{}", layout.word())).await;
        step_back(world.paper());
        let answer = SettingsChange { answer_delay_ms: Some(ANSWER_MS), check_tokens: None };
        world.driver.settings(answer).await.unwrap();
        let span = Span { min_ms: ACCEPTANCE_MS, max_ms: ACCEPTANCE_MS };
        world.driver.set_fault(FaultSpec::new(FaultKind::AcceptanceDelay { span })).await.unwrap();
        let hand = Hand::start(&world).await;
        let master = hand.master;
        let mut scene = Scene { world, hand, nodes: Vec::new(), files: Vec::new() };
        match layout {
            Layout::OneNode => {
                scene.add_followers().await;
                scene.start_node("both", FOLLOWERS + 1, folder, settings);
            }
            Layout::TwoNodes => {
                // It is full before there is anything else to take.
                scene.start_node("lead", 1, folder, settings);
                scene.world.until_session("leading", &[master]).await;
                scene.add_followers().await;
                scene.start_node("follow", FOLLOWERS, folder, settings);
            }
        }
        scene.world.until_copying().await;
        for _ in 0..QUIET_OPEN {
            scene.hand.open(&scene.world).await;
        }
        tokio::time::sleep(BURST_EVERY).await;
        scene
    }

    async fn add_followers(&mut self) {
        for index in 0..FOLLOWERS {
            let name = format!("follower-{index}");
            let follower = self.world.add_paper_account(&name, Style::Mt5).await;
            self.world.add_link(self.hand.master, follower, 1).await;
        }
    }

    fn start_node(
        &mut self,
        name: &str,
        capacity: usize,
        folder: &Path,
        settings: &[(String, String)],
    ) {
        let file = folder.join(format!("{name}.jsonl"));
        let spec = self.world.node(name).default_leases();
        let spec = settings.iter().fold(spec, |spec, (name, value)| spec.setting(name, value));
        let node = spec
            .setting("LOCKSTEP_CAPACITY", capacity)
            .setting("LOCKSTEP_PARALLEL_ORDERS", PARALLEL_ORDERS)
            .setting("LOCKSTEP_OWN_TIME_LOG", file.display())
            .start();
        self.files.push(file);
        self.nodes.push(node);
    }

    /// URL of the bus.
    pub(super) fn nats(&self) -> String {
        self.world.bus.url(0)
    }

    /// Events one at a time: a trade is opened, the oldest is closed, and so on.
    pub(super) async fn quiet(&mut self, events: usize) -> Vec<Stretch> {
        let from = monotonic_ns();
        let mut every = tokio::time::interval(QUIET_EVERY);
        for event in 0..events {
            every.tick().await;
            if event % 2 == 0 {
                self.hand.open(&self.world).await
            } else {
                self.hand.close(&self.world).await
            }
        }
        every.tick().await;
        vec![Stretch { ns: (from, monotonic_ns()), events, opens: None }]
    }

    /// Pairs of bursts: so many trades are opened together, and then closed together.
    pub(super) async fn bursts(&mut self, pairs: usize, events: usize) -> Vec<Stretch> {
        let mut spans = Vec::new();
        for _ in 0..pairs {
            for opens in [true, false] {
                self.hand.hold_burst(&self.world, events, opens).await;
                tokio::time::sleep(REST).await;
                let from = monotonic_ns();
                self.hand.release();
                tokio::time::sleep(BURST_EVERY).await;
                spans.push(Stretch { ns: (from, monotonic_ns()), events, opens: Some(opens) });
            }
        }
        spans
    }

    /// Ends the nodes, which write what they recorded; the files.
    pub(super) async fn end(self) -> Vec<PathBuf> {
        for node in &self.nodes {
            node.process.terminate().unwrap();
        }
        for node in &self.nodes {
            let status = node.process.wait(END_LIMIT).await.unwrap();
            assert!(status.success(), "{status}: {}", node.process.log_tail());
        }
        self.files
    }
}

/// The broker's process stands for a machine elsewhere: it runs when nobody else wants to.
pub(in crate::bench) fn step_back(process: &ManagedProcess) {
    let pid = process.pid().unwrap().to_string();
    let words = ["--idle", "--all-tasks", "--pid", "0", &pid];
    let done = std::process::Command::new("chrt").args(words).output();
    let done = done.unwrap_or_else(|error| panic!("chrt (util-linux) is needed: {error}"));
    assert!(done.status.success(), "chrt: {}", String::from_utf8_lossy(&done.stderr));
}

/// Memory of a process that is in use, in KiB.
pub(in crate::bench) fn resident_kib(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
