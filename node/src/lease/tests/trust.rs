//! Nobody is trusted after the row could expire, whatever is held up where.

use super::super::memory::Stage;
use super::super::task::{LeaseKeeper, LeaseSettings, start, watch_for_freezes};
use super::*;
use crate::clock::{ManualClock, NodeClock};
use crate::gate::{Denied, Gate};
use parking_lot::Mutex;
use proptest::prelude::*;
use schemas::Micros;
use std::sync::Arc;

const ACCOUNT: u64 = 1;
const NODES: usize = 2;

/// One true time; every machine's clock runs with it but shows something else.
struct Scene {
    table: MemoryTable,
    table_clock: ManualClock,
    node_clocks: Vec<ManualClock>,
    clocks: Vec<NodeClock>,
    gates: Vec<Gate>,
    fence: Duration,
}

impl Scene {
    /// Lets true time pass, second by second, and looks at every one of them.
    fn pass(&self, seconds: u64) {
        self.look();
        for _ in 0..seconds {
            self.table_clock.advance(Duration::from_secs(1));
            for clock in &self.node_clocks {
                clock.advance(Duration::from_secs(1));
            }
            self.look();
        }
    }

    fn look(&self) {
        // A cycle in progress holds the table; it lets time pass only outside of that.
        let row = self.table.row(account(ACCOUNT)).unwrap();
        let table_now = Micros(i64::try_from(self.wall().as_micros()).unwrap());
        let trusted: Vec<usize> = (0..NODES)
            .filter(|n| {
                self.gates[*n].permission(account(ACCOUNT), self.clocks[*n].now()).is_some()
            })
            .collect();
        assert!(trusted.len() <= 1, "two nodes are trusted at once");
        for n in trusted {
            assert_eq!(row.node_id.as_deref(), Some(name(n)), "another node owns the row");
            let left = row.lease_until.unwrap().since(table_now);
            assert!(left >= self.fence, "trusted with {left:?} left of the row");
        }
    }

    fn wall(&self) -> Duration {
        use crate::clock::Clock;
        self.table_clock.read().wall
    }
}

fn name(n: usize) -> &'static str {
    ["a", "b"][n]
}

#[derive(Debug, Clone)]
enum Act {
    /// A cycle of one node that is held up before each of its parts.
    Cycle {
        node: usize,
        delays: [u64; 5],
    },
    Wait(u64),
    Outage(bool),
}

fn act() -> impl Strategy<Value = Act> {
    // Mostly short, sometimes longer than the whole lease.
    let delay = || prop_oneof![6 => Just(0u64), 3 => 0..8u64, 1 => 0..90u64];
    let delays = [delay(), delay(), delay(), delay(), delay()];
    prop_oneof![
        6 => (0..NODES, delays).prop_map(|(node, delays)| Act::Cycle { node, delays }),
        3 => (0..40u64).prop_map(Act::Wait),
        1 => any::<bool>().prop_map(Act::Outage),
    ]
}

fn play(acts: Vec<Act>) {
    let table_clock = ManualClock::default();
    let table = MemoryTable::new(table_clock.clone());
    table.set_account(account(ACCOUNT), "paper", true);
    let node_clocks: Vec<ManualClock> = (0..NODES).map(|_| ManualClock::default()).collect();
    // Machines do not agree about the time of day.
    node_clocks[0].set_wall_back(Duration::from_secs(3_000));
    node_clocks[1].hold_guest(Duration::from_secs(3_000));
    let clocks: Vec<NodeClock> =
        node_clocks.iter().map(|clock| NodeClock::new(clock.clone())).collect();
    let gates: Vec<Gate> = (0..NODES).map(|_| Gate::new()).collect();
    let scene = Arc::new(Scene {
        table: table.clone(),
        table_clock,
        node_clocks,
        clocks: clocks.clone(),
        gates: gates.clone(),
        fence: TIMING.fence,
    });
    let delays = Arc::new(Mutex::new([0u64; 5]));
    let mut keepers: Vec<LeaseKeeper<MemoryOwnership>> = (0..NODES)
        .map(|n| {
            let (scene, delays) = (Arc::clone(&scene), Arc::clone(&delays));
            let hook = move |stage: Stage| {
                let seconds = delays.lock()[stage as usize];
                scene.pass(seconds);
            };
            // The limit plays no part: the rule has to hold without it.
            let store = MemoryOwnership::new(table.clone(), Duration::MAX).with_hook(hook);
            let settings = settings(name(n));
            LeaseKeeper::new(&settings, store, gates[n].clone(), clocks[n].clone())
        })
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for act in acts {
        match act {
            Act::Cycle { node, delays: by_stage } => {
                *delays.lock() = by_stage;
                // A refused cycle is part of the game.
                let _confirmed_or_not = runtime.block_on(keepers[node].cycle());
            }
            Act::Wait(seconds) => scene.pass(seconds),
            Act::Outage(on) => table.set_reachable(!on),
        }
        scene.look();
    }
    table.set_reachable(true);
    scene.pass(200);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn nobody_is_trusted_after_the_row_could_expire(acts in prop::collection::vec(act(), 1..25)) {
        play(acts);
    }
}

#[test]
fn renewal_that_took_ten_seconds_to_answer_is_trusted_ten_seconds_less() {
    let mut delays = [0; 5];
    delays[Stage::Answer as usize] = 10;
    play(vec![
        Act::Cycle { node: 0, delays },
        Act::Wait(34),
        Act::Cycle { node: 1, delays: [0; 5] },
    ]);
}

#[test]
fn wait_for_the_connection_before_the_claim_costs_the_owner_and_not_the_fence() {
    let mut delays = [0; 5];
    delays[Stage::Connect as usize] = 16;
    play(vec![
        Act::Cycle { node: 0, delays },
        Act::Wait(60),
        Act::Cycle { node: 1, delays: [0; 5] },
    ]);
}

fn settings(name: &str) -> LeaseSettings {
    LeaseSettings {
        node: node(name),
        platforms: vec!["paper".into()],
        timing: TIMING,
        capacity: 10,
        claim_rows_max: 10,
        listen_url: None,
        proven_dead: Vec::new(),
    }
}

#[tokio::test]
async fn node_that_stood_still_sends_nothing_until_a_later_renewal_is_confirmed() {
    let table = MemoryTable::new(SystemClock);
    table.set_account(account(ACCOUNT), "paper", true);
    let hands = ManualClock::default();
    let (clock, gate) = (NodeClock::new(hands.clone()), Gate::new());
    let settings = settings("a");
    let store = MemoryOwnership::new(table.clone(), TIMING.query_limit);
    let lease = start(settings, store, gate.clone(), clock.clone()).unwrap();
    let ticker = watch_for_freezes(clock.clone(), gate.clone(), lease.wake(), |_| {}).unwrap();
    let may_send = || gate.permit(account(ACCOUNT), clock.now(), Duration::from_secs(2));
    eventually("the node may send", async || may_send().is_ok()).await;
    let before = may_send().unwrap();

    // The database is away, so that nothing can be confirmed after the freeze.
    table.set_reachable(false);
    hands.suspend(Duration::from_secs(3));
    assert_eq!(may_send().unwrap_err(), Denied::Frozen, "before the ticker has noticed");
    eventually("the ticker has noticed", async || may_send().unwrap_err() == Denied::Revoked).await;

    table.set_reachable(true);
    eventually("the node may send again", async || {
        // A clock that stands still would put the renewal at the instant of the freeze.
        hands.advance(Duration::from_millis(10));
        may_send().is_ok()
    })
    .await;
    assert_ne!(may_send().unwrap().stretch(), before.stretch());
    assert_eq!(before.spend(clock.now()).unwrap_err(), Denied::Void);
    drop(ticker);
    lease.shutdown().await;
}

#[tokio::test]
async fn node_on_a_demoted_primary_sends_nothing_once_it_hears_of_a_newer_one() {
    let table = MemoryTable::new(SystemClock);
    table.set_account(account(ACCOUNT), "paper", true);
    let hands = ManualClock::default();
    let (clock, gate) = (NodeClock::new(hands.clone()), Gate::new());
    let settings = settings("a");
    let store = MemoryOwnership::new(table.clone(), TIMING.query_limit);
    let mut keeper = LeaseKeeper::new(&settings, store, gate.clone(), clock.clone());
    keeper.cycle().await.unwrap();
    let may_send = || gate.permit(account(ACCOUNT), clock.now(), Duration::from_secs(2));
    let before = may_send().unwrap();

    // What others have seen already is no news.
    keeper.timeline_heard(1);
    assert!(may_send().is_ok());
    keeper.timeline_heard(2);
    assert_eq!(may_send().unwrap_err(), Denied::Revoked);
    assert_eq!(before.spend(clock.now()).unwrap_err(), Denied::Revoked);
    assert_eq!(keeper.due(), clock.now(), "confirmed anew at once");
    hands.advance(Duration::from_secs(1));
    assert_eq!(keeper.cycle().await.unwrap_err().as_str(), "old_timeline");
    assert_eq!(may_send().unwrap_err(), Denied::Revoked);

    // The new primary still has this node as the owner.
    table.set_timeline(2);
    hands.advance(Duration::from_secs(1));
    keeper.cycle().await.unwrap();
    assert!(may_send().is_ok());
}

#[tokio::test]
async fn a_database_that_is_back_was_away_since_the_first_cycle_that_failed() {
    let table = MemoryTable::new(SystemClock);
    let hands = ManualClock::default();
    let clock = NodeClock::new(hands.clone());
    let settings = settings("a");
    let store = MemoryOwnership::new(table.clone(), TIMING.query_limit);
    let mut keeper = LeaseKeeper::new(&settings, store, Gate::new(), clock.clone());
    let state = keeper.state();
    let away = || state.borrow().away_for(clock.now());
    keeper.cycle().await.unwrap();
    assert_eq!(away(), None);
    table.set_reachable(false);
    for failed in 0..3 {
        keeper.cycle().await.unwrap_err();
        assert_eq!(away(), Some(Duration::from_secs(2 * failed)));
        hands.advance(Duration::from_secs(2));
    }
    assert_eq!((away(), state.borrow().failures), (Some(Duration::from_secs(6)), 3));
    table.set_reachable(true);
    keeper.cycle().await.unwrap();
    assert_eq!((away(), state.borrow().failures), (None, 0));
}
