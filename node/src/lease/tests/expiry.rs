//! When expired rows are claimed: at the moment, by several nodes one after the other, and never
//! by asking again and again. On one true time that only the test moves.

use super::super::share::SHARE_GRACE;
use super::super::task::{LeaseKeeper, LeaseSettings};
use super::*;
use crate::clock::{Clock as _, ManualClock, NodeClock};
use crate::gate::Gate;

/// Beyond the jitter a claim may be later than the expiry by this.
const LATE_MAX: Duration = Duration::from_millis(500);

struct Stage {
    table: MemoryTable,
    hands: Vec<ManualClock>,
    nodes: Vec<(String, LeaseKeeper<MemoryOwnership>, NodeClock)>,
    /// When each node ran a cycle, since the start of the stage.
    cycles: Vec<(String, Duration)>,
    now: Duration,
}

impl Stage {
    fn new(accounts: u64) -> Self {
        let table_clock = ManualClock::default();
        let table = MemoryTable::new(table_clock.clone());
        for id in 1..=accounts {
            table.set_account(account(id), "paper", true);
        }
        Self {
            table,
            hands: vec![table_clock],
            nodes: Vec::new(),
            cycles: Vec::new(),
            now: Duration::ZERO,
        }
    }

    fn add(&mut self, name: &str, capacity: u32) {
        let hands = ManualClock::default();
        let clock = NodeClock::new(hands.clone());
        let settings = LeaseSettings {
            node: node(name),
            platforms: vec!["paper".into()],
            timing: TIMING,
            capacity,
            claim_rows_max: 50,
            listen_url: None,
            proven_dead: Vec::new(),
        };
        let store = MemoryOwnership::new(self.table.clone(), TIMING.query_limit);
        let keeper = LeaseKeeper::new(&settings, store, Gate::new(), clock.clone());
        self.hands.push(hands);
        self.nodes.push((name.to_owned(), keeper, clock));
    }

    fn remove(&mut self, name: &str) {
        self.nodes.retain(|(other, ..)| other != name);
    }

    /// Lets time pass millisecond by millisecond; each cycle that is due runs.
    async fn pass(&mut self, time: Duration) {
        for _ in 0..time.as_millis() {
            self.now += Duration::from_millis(1);
            self.hands.iter().for_each(|hands| hands.advance(Duration::from_millis(1)));
            for (name, keeper, clock) in &mut self.nodes {
                if keeper.due() <= clock.now() {
                    self.cycles.push((name.clone(), self.now));
                    keeper.cycle().await.unwrap();
                }
            }
        }
    }

    fn owned_by(&self, name: &str) -> usize {
        let (_, keeper, _) = self.nodes.iter().find(|(other, ..)| other == name).unwrap();
        keeper.state().borrow().held.len()
    }

    fn cycles_between(&self, from: Duration, to: Duration) -> usize {
        self.cycles.iter().filter(|(_, at)| *at >= from && *at < to).count()
    }

    /// When the lease of an account runs out.
    fn expiry_of(&self, id: u64) -> Duration {
        let until = self.table.row(account(id)).unwrap().lease_until.unwrap();
        let start = ManualClock::default();
        Duration::from_micros(until.0 as u64) - start.read().wall
    }
}

#[tokio::test]
async fn rows_of_a_node_that_vanished_are_claimed_when_they_expire_and_not_a_cycle_later() {
    for round in 0..20 {
        let mut stage = Stage::new(30);
        stage.add("dead", 100);
        stage.pass(Duration::from_secs(1)).await;
        stage.add("b", 100);
        stage.add("c", 100);
        stage.pass(Duration::from_millis(27_000 + round * 711)).await;
        stage.remove("dead");
        let expiry = stage.expiry_of(1);
        let rest = expiry - stage.now;
        stage.pass(rest + LATE_MAX).await;
        assert_eq!(stage.owned_by("b") + stage.owned_by("c"), 30, "round {round}");
    }
}

#[tokio::test]
async fn nodes_that_wait_for_one_expiry_ask_at_different_times_and_not_before_it() {
    let mut stage = Stage::new(30);
    stage.add("dead", 100);
    stage.pass(Duration::from_secs(1)).await;
    for name in ["b", "c", "d", "e", "f"] {
        stage.add(name, 100);
    }
    stage.pass(Duration::from_secs(21)).await;
    stage.remove("dead");
    let expiry = stage.expiry_of(1);
    let rest = expiry - stage.now;
    stage.pass(rest).await;
    // Five nodes with a cycle of 20 s, jitter included: three each in the last 40 s, and no more.
    let before = stage.cycles_between(expiry - Duration::from_secs(39), expiry);
    assert!(before <= 5 * 3, "{before} cycles before the expiry");
    stage.pass(Duration::from_secs(1)).await;
    let first: BTreeMap<&String, Duration> = stage
        .cycles
        .iter()
        .rev()
        .filter(|(_, at)| *at >= expiry)
        .map(|(name, at)| (name, *at))
        .collect();
    let times: std::collections::BTreeSet<Duration> = first.values().copied().collect();
    assert!(times.len() >= 3, "all at once: {first:?}");
    // After the claim they go back to their regular cycles.
    let after = stage.cycles_between(expiry, expiry + Duration::from_secs(1));
    assert!(after <= 5 * 4, "{after} cycles in the second after the expiry");
    let owned: usize = ["b", "c", "d", "e", "f"].map(|name| stage.owned_by(name)).iter().sum();
    assert_eq!(owned, 30);
    let most = ["b", "c", "d", "e", "f"].map(|name| stage.owned_by(name)).into_iter().max();
    assert!(most <= Some(7), "an even part of 6, and one more: {most:?}");
}

#[tokio::test]
async fn rows_that_cannot_be_had_at_their_expiry_are_asked_for_a_few_times_and_then_seldom() {
    let mut stage = Stage::new(2);
    stage.add("dead", 100);
    stage.pass(Duration::from_secs(1)).await;
    stage.remove("dead");
    stage.add("b", 100);
    stage.pass(Duration::from_secs(1)).await;
    let expiry = stage.expiry_of(1);
    // The dead owner's writer still holds one row, and a human the other.
    stage.table.set_locked(account(1), true);
    stage.table.set_locked(account(2), true);
    let rest = expiry - stage.now;
    stage.pass(rest + Duration::from_secs(1)).await;
    assert_eq!(stage.owned_by("b"), 0);
    stage.table.set_locked(account(1), false);
    stage.pass(Duration::from_millis(2_500)).await;
    assert_eq!(stage.owned_by("b"), 1, "asked for again after the pause of a failed cycle");
    stage.pass(Duration::from_secs(60)).await;
    let asked = stage.cycles_between(expiry, expiry + Duration::from_secs(60));
    assert!(asked <= 12, "{asked} cycles in a minute for a row that stays locked");
}

#[tokio::test]
async fn claims_that_were_frozen_are_made_up_for_when_the_freeze_ends() {
    let mut stage = Stage::new(1);
    stage.add("dead", 100);
    stage.pass(Duration::from_secs(1)).await;
    stage.add("b", 100);
    stage.pass(Duration::from_secs(1)).await;
    stage.remove("dead");
    let expiry = stage.expiry_of(1);
    let rest = expiry - stage.now;
    stage.pass(rest - Duration::from_secs(25)).await;
    stage.table.set_timeline(2);
    // The next regular cycle sees the promotion, and leaves expired rows alone for 60 + 15 s.
    let seen = stage.now;
    stage.pass(Duration::from_secs(20)).await;
    let frozen_until = {
        let (_, keeper, _) = &stage.nodes[0];
        assert!(keeper.state().borrow().claims_frozen);
        let at = stage.cycles.iter().map(|(_, at)| *at).find(|at| *at >= seen).unwrap();
        at + TIMING.lease + TIMING.fence
    };
    let rest = frozen_until - stage.now;
    stage.pass(rest - Duration::from_millis(10)).await;
    assert_eq!(stage.owned_by("b"), 0);
    let asked = stage.cycles_between(seen, stage.now);
    assert!(asked <= 6, "{asked} cycles while claims were frozen");
    stage.pass(LATE_MAX).await;
    assert_eq!(stage.owned_by("b"), 1);
}

#[tokio::test]
async fn node_that_has_its_share_takes_the_rest_after_a_grace_if_nobody_else_does() {
    let mut stage = Stage::new(0);
    stage.add("a", 100);
    stage.add("b", 3);
    // Until each has seen the other.
    stage.pass(Duration::from_secs(21)).await;
    (1..=20).for_each(|id| stage.table.set_account(account(id), "paper", true));
    let limit = stage.now + TIMING.cycle;
    while stage.owned_by("a") == 0 && stage.now < limit {
        stage.pass(Duration::from_millis(1)).await;
    }
    // The first claim still goes by what was there before.
    stage.pass(Duration::from_millis(500)).await;
    assert_eq!(stage.owned_by("a"), 11, "an even part of 10, and a tenth");
    // b has no room for its share; nothing may stay without an owner for the sake of balance.
    stage.pass(SHARE_GRACE + Duration::from_secs(1)).await;
    let b = stage.owned_by("b");
    assert_eq!(stage.owned_by("a") + b, 20);
    assert!(b <= 3, "{b}");
}

#[tokio::test]
async fn two_nodes_that_start_together_share_what_is_free() {
    let mut stage = Stage::new(40);
    stage.add("a", 100);
    stage.add("b", 100);
    stage.pass(Duration::from_secs(5)).await;
    assert_eq!(stage.owned_by("a") + stage.owned_by("b"), 40);
    stage.add("c", 100);
    stage.pass(Duration::from_secs(120)).await;
    assert_eq!(stage.owned_by("c"), 0, "what is owned is not taken");
}

// Two nodes, each deaf to what the other hears, once left what both had given back to nobody for ten
// minutes, and a node that was deaf left the accounts of one that died to nobody as well.
#[tokio::test]
async fn nodes_that_pause_claims_take_what_nobody_else_can() {
    let mut stage = Stage::new(2);
    stage.add("a", 100);
    stage.pass(Duration::from_secs(1)).await;
    (3..=4).for_each(|id| stage.table.set_account(account(id), "paper", true));
    stage.add("b", 100);
    // Until each has seen the other.
    stage.pass(Duration::from_secs(21)).await;
    assert_eq!((stage.owned_by("a"), stage.owned_by("b")), (2, 2));
    let pause = Duration::from_secs(600);
    let back_off = Duration::from_secs(45);
    for (_, keeper, _) in &mut stage.nodes {
        let account = *keeper.state().borrow().held.keys().next().unwrap();
        let token = keeper.state().borrow().held[&account].token;
        keeper.pause_claims(pause);
        keeper.hand_in(TenureKey { account, token }, back_off);
        keeper.hurry(Duration::ZERO, Duration::ZERO);
    }
    stage.pass(TIMING.cycle + SHARE_GRACE + Duration::from_secs(3)).await;
    assert_eq!(stage.owned_by("a") + stage.owned_by("b"), 4, "nobody has room, so all have");

    assert!(stage.owned_by("a") < 4);
    stage.remove("b");
    stage.pass(TIMING.lease + TIMING.retry + Duration::from_secs(2)).await;
    assert_eq!(stage.owned_by("a"), 4, "the pause is not over, and b is gone");
}

#[test]
fn permits_that_end_and_come_back_are_told_once_each_for_a_whole_node() {
    use crate::clock::NodeTime;
    use crate::lease::{LeaseState, PermitWatch};
    let at = |seconds| NodeTime::START.plus(Duration::from_secs(seconds));
    let (lease, state) = tokio::sync::watch::channel(std::sync::Arc::new(LeaseState::default()));
    let confirm = |seconds| {
        let confirmed_at = Some(at(seconds));
        lease.send_replace(LeaseState { confirmed_at, ..LeaseState::default() }.into());
    };
    let mut watch = PermitWatch::new(state, TIMING.lease - TIMING.fence);
    assert_eq!(watch.look(at(0)), None);
    confirm(1);
    assert_eq!(
        [2, 3, 45, 46, 47, 60].map(|s| watch.look(at(s))),
        [Some(true), None, None, Some(false), None, None]
    );
    confirm(61);
    assert_eq!([62, 63].map(|s| watch.look(at(s))), [Some(true), None]);
    lease.send_replace(LeaseState { ended: true, ..LeaseState::default() }.into());
    assert_eq!(watch.look(at(64)), None, "a node that ends has said so");
}
