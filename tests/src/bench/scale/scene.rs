//! The world that is measured: a master on one node, its followers on another.

use crate::bench::hand::Hand;
use crate::bench::own_time::{resident_kib, step_back};
use crate::bench::raw::Limit;
use crate::scrape::MetricsPage;
use crate::world::{Bus, Node, SOON, World, until};
use devstack::ProcessSpec;
use lockstep::clock::monotonic_ns;
use paper::protocol::{AccountDecl, Style};
use schemas::AccountId;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Number of the first follower; those before are the master's.
const FIRST: u64 = 1_000_001;
/// Number of the first account that only bare sessions use.
const FIRST_BARE: u64 = 5_000_001;
/// Bare sessions whose memory is measured.
const BARE: u64 = 500;
/// Accounts that are declared to the broker at once.
const DECLARED_AT_ONCE: usize = 500;
/// Orders of a follower in flight at once: a burst of 27 fits.
const PARALLEL_ORDERS: u32 = 32;
/// Longest wait for 10,000 followers.
const PATIENCE: Duration = Duration::from_secs(900);
/// The machine comes to rest.
const REST: Duration = Duration::from_secs(2);
/// The writer has nothing more to do: five of its turns.
const ROWS_REST: Duration = Duration::from_millis(500);
/// So long the node is watched at rest.
const IDLE: Duration = Duration::from_secs(5);
/// Between two looks at a page of metrics.
const LOOK: Duration = Duration::from_millis(50);

/// Servers, nodes and the master.
#[derive(Debug)]
pub(super) struct Scene {
    world: World,
    hand: Hand,
    lead: Node,
    follow: Node,
    page: MetricsPage,
    files: [PathBuf; 2],
    followers: u32,
    /// Memory of the node before it had accounts.
    kib_before: f64,
}

/// A span of time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    /// From, to: nanoseconds of `CLOCK_MONOTONIC`.
    pub(super) ns: (u64, u64),
    /// Events of the master.
    pub(super) events: usize,
}

impl Scene {
    /// Both nodes run; the second one has no accounts yet.
    pub(super) async fn start(folder: &Path, followers: u32) -> Scene {
        let mut world = World::start(&format!("scale-{followers}")).await;
        step_back(world.paper());
        let hand = Hand::start(&world).await;
        let files = ["lead", "follow"].map(|name| folder.join(format!("{name}.jsonl")));
        let page = MetricsPage::free().await;
        let node = |name: &str, capacity: u32, file: &Path| {
            world
                .node(name)
                .default_leases()
                .setting("LOCKSTEP_CAPACITY", capacity)
                .setting("LOCKSTEP_PARALLEL_ORDERS", PARALLEL_ORDERS)
                // A broker on the same cores answers the last of 10,000 orders late.
                .setting("LOCKSTEP_BROKER_CALL_LIMIT", "50s")
                .setting("LOCKSTEP_FENCE", "60s")
                .setting("LOCKSTEP_LEASE", "240s")
                .setting("LOCKSTEP_OWN_TIME_LOG", file.display())
        };
        let lead = node("lead", 1, &files[0]).start();
        world.until_session("leading", &[hand.master]).await;
        let follow = node("follow", followers, &files[1])
            .setting("LOCKSTEP_METRICS_LISTEN", page.address())
            .start();
        until("the node's metrics", SOON, async || {
            tokio::net::TcpStream::connect(page.address()).await.ok().map(drop)
        })
        .await;
        // Copies that are not late need no price; said to 10,000 sessions twice a second it costs more
        // than they do.
        world.stop_quotes();
        tokio::time::sleep(REST).await;
        let kib_before = resident_kib(follow.process.pid().unwrap());
        Scene { world, hand, lead, follow, page, files, followers, kib_before }
    }

    /// What the machine allows before there are followers: as many tasks, each with a connection of its
    /// own, that are woken by an event and write an order's bytes, with no copier code. For each of so
    /// many events the nanoseconds from its publication to the instruction before each write.
    pub(super) async fn floor(&self, events: usize) -> Vec<Vec<u64>> {
        let followers = self.followers as usize;
        let limit = Limit::start(&self.world.bus.url(0), false, followers).await;
        step_back(&limit.sink);
        limit.write(true).await;
        let mut all = Vec::new();
        for _ in 0..events {
            tokio::time::sleep(ROWS_REST).await;
            limit.take().await;
            limit.publish(1).await;
            let mut samples = Vec::with_capacity(followers);
            until("every task of the floor", PATIENCE, async || {
                tokio::time::sleep(LOOK).await;
                samples.extend(limit.take().await);
                (samples.len() >= followers).then_some(())
            })
            .await;
            all.push(samples);
        }
        all
    }

    async fn declare(&self, first: u64, count: u64) {
        let accounts: Vec<AccountDecl> = (first..first + count)
            .map(|id| AccountDecl::new(AccountId::new(id).unwrap(), Style::Mt5))
            .collect();
        for some in accounts.chunks(DECLARED_AT_ONCE) {
            self.world.driver.declare_accounts(some.to_vec()).await.unwrap();
        }
    }

    /// Adds the followers and waits until all of them copy; how long that took.
    pub(super) async fn add_followers(&mut self) -> Duration {
        let count = i64::from(self.followers);
        self.declare(FIRST, u64::from(self.followers)).await;
        let mut db = self.world.database().await;
        let begun = Instant::now();
        sqlx::query(
            "with added as (
                 insert into trading_accounts (id, platform, name, connection)
                 select $1 + n, 'paper', 'follower-' || n, jsonb_build_object('address', $3::text)
                 from generate_series(0, $2 - 1) n returning id
             )
             insert into copy_links (master_id, follower_id, magic)
             select $4, added.id, 7001 from added",
        )
        .bind(FIRST as i64)
        .bind(count)
        .bind(self.world.paper_addr.to_string())
        .bind(self.hand.master.as_i64())
        .execute(&mut db)
        .await
        .unwrap();
        until("every follower copies", PATIENCE, async || {
            let copying: i64 = sqlx::query_scalar(
                "select count(*) from trading_accounts a join account_status s on s.account_id = a.id
                 where a.node_id is not null and s.lease_token = a.lease_token
                     and s.session = 'copying'",
            )
            .fetch_one(&mut db)
            .await
            .unwrap();
            tokio::time::sleep(LOOK).await;
            (copying == count).then_some(())
        })
        .await;
        let took = begun.elapsed();
        tokio::time::sleep(REST).await;
        took
    }

    /// Memory that the followers take, in KiB.
    pub(super) fn kib_of_followers(&self) -> f64 {
        resident_kib(self.follow.process.pid().unwrap()) - self.kib_before
    }

    /// Memory of a bare session at the broker, in KiB.
    pub(super) async fn kib_per_session(&self) -> f64 {
        self.declare(FIRST_BARE, BARE).await;
        let program = std::env::current_exe().unwrap();
        let process = ProcessSpec::new("bare-sessions", program)
            .args(["bare-sessions", "--broker", &self.world.paper_addr.to_string()])
            .args(["--first", &FIRST_BARE.to_string(), "--count", &BARE.to_string()])
            .start()
            .unwrap();
        let status = process.wait(PATIENCE).await.unwrap();
        assert!(status.success(), "{status}: {}", process.log_tail());
        let said = std::fs::read_to_string(process.stdout_path()).unwrap();
        said.trim().parse().unwrap_or_else(|error| panic!("{said:?}: {error}"))
    }

    /// Processor time of the node up to now.
    pub(super) fn cpu(&self) -> Duration {
        let pid = self.follow.process.pid().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // After the name, which is in brackets: state is field 3, utime 14, stime 15.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 10)
    }

    /// Share of one processor that the node takes while nothing happens.
    pub(super) async fn idle_cpu(&self) -> f64 {
        self.until_rows_rest().await;
        let (before, begun) = (self.cpu(), Instant::now());
        tokio::time::sleep(IDLE).await;
        (self.cpu() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
    }

    async fn answered(&self) -> f64 {
        self.page.sum("lockstep_broker_calls_finished_total").await
    }

    /// Rows of pairs and events; those of a session's status never come to an end.
    async fn rows(&self) -> f64 {
        let is_of_trades = |line: &str| !line.contains("kind=\"status\"");
        self.page.sum_where("lockstep_writer_rows_total", is_of_trades).await
    }

    /// Waits until so many more orders are answered than were.
    async fn until_answered(&self, before: f64, events: usize) {
        let wanted = before + events as f64 * f64::from(self.followers);
        until("every order is answered", PATIENCE, async || {
            tokio::time::sleep(LOOK).await;
            (self.answered().await >= wanted).then_some(())
        })
        .await;
    }

    /// Trades are opened and closed one at a time; a span for each.
    pub(super) async fn singles(&mut self, events: usize) -> Vec<Span> {
        let mut spans = Vec::new();
        for event in 0..events {
            self.until_rows_rest().await;
            let before = self.answered().await;
            let from = monotonic_ns();
            if event % 2 == 0 {
                self.hand.open(&self.world).await;
            } else {
                self.hand.close(&self.world).await;
            }
            self.until_answered(before, 1).await;
            spans.push(Span { ns: (from, monotonic_ns()), events: 1 });
        }
        spans
    }

    /// So many trades are opened together, and closed together; a span for each, and how many rows a
    /// second were written meanwhile.
    pub(super) async fn bursts(&mut self, events: usize) -> (Vec<Span>, f64) {
        let mut spans = Vec::new();
        let (mut rows, mut took) = (0.0, Duration::ZERO);
        for opens in [true, false] {
            self.until_rows_rest().await;
            self.hand.hold_burst(&self.world, events, opens).await;
            let (before, rows_before) = (self.answered().await, self.rows().await);
            let begun = Instant::now();
            let from = monotonic_ns();
            self.hand.release();
            self.until_answered(before, events).await;
            spans.push(Span { ns: (from, monotonic_ns()), events });
            took += self.until_rows_rest().await.duration_since(begun);
            rows += self.rows().await - rows_before;
        }
        (spans, rows / took.as_secs_f64())
    }

    /// Waits until the writer has written everything; when it had.
    async fn until_rows_rest(&self) -> Instant {
        let (mut rows, mut since) = (self.rows().await, Instant::now());
        let deadline = Instant::now() + PATIENCE;
        while since.elapsed() < ROWS_REST {
            assert!(Instant::now() < deadline, "rows come without end");
            tokio::time::sleep(LOOK).await;
            let now = self.rows().await;
            if now > rows {
                (rows, since) = (now, Instant::now());
            }
        }
        since
    }

    /// The bus is killed and started again; how long until every follower has made a plan, and how
    /// many plans it took.
    pub(super) async fn restart_bus(&self) -> (Duration, f64) {
        let Bus::One(nats) = &self.world.bus else { unreachable!("one server") };
        let reconciles = async || self.page.sum("lockstep_reconciles_total").await;
        let before = reconciles().await;
        nats.kill().unwrap();
        until("the node notices", SOON, async || {
            (self.page.sum("lockstep_bus_feeds_doubtful").await > 0.0).then_some(())
        })
        .await;
        nats.restart().await.unwrap();
        let begun = Instant::now();
        until("every follower has made a plan", PATIENCE, async || {
            tokio::time::sleep(LOOK).await;
            (reconciles().await >= before + f64::from(self.followers)).then_some(())
        })
        .await;
        let took = begun.elapsed();
        tokio::time::sleep(REST).await;
        (took, reconciles().await - before)
    }

    /// Ends the nodes, which write what they recorded; the files.
    pub(super) async fn end(self) -> Vec<PathBuf> {
        for node in [&self.lead, &self.follow] {
            node.process.terminate().unwrap();
        }
        for node in [&self.lead, &self.follow] {
            let status = node.process.wait(PATIENCE).await.unwrap();
            assert!(status.success(), "{status}: {}", node.process.log_tail());
        }
        self.files.into()
    }
}
