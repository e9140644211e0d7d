//! A new version: nodes and servers are replaced one after the other while a master trades.

use crate::takeover::judged;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{Bus, Node, SOON, TAKEOVER, World, until};
use paper::Ledger;
use paper::protocol::Instruction;
use reconcile::tag;
use schemas::{Change, MasterTicket, Micros};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Time between two trades.
const TRADE_EVERY: Duration = Duration::from_millis(100);
/// Trades that the master keeps open: each lives for two seconds, longer than any order waits for room.
const OPEN_MAX: usize = 20;
/// Longest time from a trade to its copy while nodes are replaced. Accounts change hands within two seconds
/// (L2); the rest is for a machine that builds meanwhile.
const GAP_OF_NODES: Duration = Duration::from_secs(6);
/// The same while servers of the bus are: the 12 s after which everything is repaired (L3).
const GAP_OF_SERVERS: Duration = Duration::from_secs(12);

/// A master that trades whenever it is looked at.
struct Busy {
    master: Master,
    open: VecDeque<MasterTicket>,
    every: tokio::time::Interval,
}

impl Busy {
    fn new(master: Master) -> Busy {
        let mut every = tokio::time::interval(TRADE_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        Busy { master, open: VecDeque::new(), every }
    }

    async fn trade(&mut self) {
        self.every.tick().await;
        self.open.push_back(self.master.open("0.10"));
        if self.open.len() > OPEN_MAX {
            self.master.close(self.open.pop_front().unwrap());
        }
    }

    /// Trades until there is an answer.
    async fn trade_until<T>(&mut self, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
        until(what, TAKEOVER, async || {
            self.trade().await;
            look().await
        })
        .await
    }

    async fn trade_for(&mut self, times: usize) {
        for _ in 0..times {
            self.trade().await;
        }
    }
}

/// The longest time from a trade of the master to the arrival of its copy's first order anywhere.
fn longest_gap(master: &Master, ledger: &Ledger) -> Duration {
    let mut opened: BTreeMap<MasterTicket, Micros> = BTreeMap::new();
    for (at, change) in &master.published {
        if let Change::PositionOpened(position) = change {
            opened.insert(position.ticket, *at);
        }
    }
    let mut first = BTreeMap::new();
    for (row, request, _) in ledger.orders() {
        if let Instruction::Open { comment, .. } = &request.instruction
            && let Some((link, ticket)) = tag::decode(comment)
        {
            first.entry((link, ticket)).or_insert(row.at_us);
        }
    }
    let gaps = first.iter().map(|((_, ticket), at)| at.since(opened[ticket]));
    gaps.max().expect("something was copied")
}

async fn judge(world: &World, busy: &Busy, what: &str, limit: Duration) {
    let ledger = world.until_equal(TAKEOVER, |_| State::of_book(&busy.master.book)).await;
    assert_clean(&ledger);
    judged(world, &busy.master, &ledger, &[]);
    let gap = longest_gap(&busy.master, &ledger);
    #[allow(
        clippy::print_stdout,
        reason = "the measured gap, for whoever runs it with --nocapture"
    )]
    {
        println!("{what}: {} trades, longest gap {gap:?}", busy.master.published.len());
    }
    assert!(gap < limit, "{what}: a copy came after {gap:?}");
}

/// Ends a node in an orderly way while the master trades.
async fn end(busy: &mut Busy, node: &Node) {
    node.process.terminate().unwrap();
    let status =
        busy.trade_until("the old process ends", async || node.process.try_wait().unwrap()).await;
    assert!(status.success(), "{status}\n{}", node.process.log_tail());
}

#[tokio::test]
async fn nodes_that_are_replaced_one_after_the_other_copy_every_trade_once() {
    let mut world = World::start("rolling-nodes").await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 6).await;
    let master = Master::start(vec![world.bus.url(0)], account).await;
    let start = |name: &str| world.node(name).setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    let mut fleet: Vec<Node> = ["a", "b", "c"].map(start).into();
    world.until_copying().await;
    let mut db = world.database().await;
    let mut busy = Busy::new(master);
    busy.trade_for(10).await;
    for index in 0..fleet.len() {
        let name = fleet[index].name.clone();
        end(&mut busy, &fleet[index]).await;
        let fresh = start(&name);
        busy.trade_until("every account has an owner again", async || {
            let owners = world.owners().await;
            let is_owned =
                |link: &lockstep_tests::oracle::Link| owners[&link.follower].node.is_some();
            world.links.iter().all(is_owned).then_some(())
        })
        .await;
        busy.trade_until("the new process may own accounts", async || {
            let nodes: i64 = sqlx::query_scalar(
                "select count(*) from lease_nodes where capacity > 0 and alive_until > now()",
            )
            .fetch_one(&mut db)
            .await
            .unwrap();
            (nodes == fleet.len() as i64).then_some(())
        })
        .await;
        fleet[index] = fresh;
        busy.trade_for(5).await;
    }
    judge(&world, &busy, "three nodes replaced", GAP_OF_NODES).await;
}

#[tokio::test]
async fn servers_of_the_bus_that_are_replaced_one_after_the_other_lose_no_trade() {
    let mut world = World::start_with_cluster("rolling-servers", 3).await;
    let account = world.add_external_account("master").await;
    world.add_followers(account, 4).await;
    let master = Master::start(vec![world.bus.url(2)], account).await;
    let _a = world.node("a").nats(world.bus.url(0)).setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    let _b = world.node("b").nats(world.bus.url(1)).setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    world.until_copying().await;
    let mut busy = Busy::new(master);
    busy.trade_for(10).await;
    let Bus::Cluster(cluster) = &world.bus else { panic!("one server is no cluster") };
    for server in cluster.servers() {
        server.process().terminate().unwrap();
        busy.trade_until("the old server ends", async || server.process().try_wait().unwrap())
            .await;
        busy.trade_for(5).await;
        tokio::time::timeout(SOON, server.restart()).await.unwrap().unwrap();
        cluster.wait_for_routes().await.unwrap();
        busy.trade_for(5).await;
    }
    judge(&world, &busy, "three servers replaced", GAP_OF_SERVERS).await;
}
