//! What happens: servers, one or two nodes, a master that trades all the time, the cut, the return.

use super::Ending;
use super::fates::{self, Fate, Fates};
use super::rows::{Row, Told, seconds};
use crate::master::Master;
use crate::oracle::State;
use crate::scrape::MetricsPage;
use crate::world::{Node, Owner, SOON, World, owners, until, wall};
use devstack::{FaultMode, FaultProxy, shared_postgres};
use schemas::{AccountId, MasterTicket, Micros};
use sqlx::PgConnection;
use sqlx::types::time::OffsetDateTime;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// The defaults, in seconds, for what is expected.
const LEASE: f64 = 60.0;
const STOPS: f64 = 45.0;
const CYCLE: f64 = 20.0;
const RESERVE: f64 = 2.0;
const SETTLE: f64 = 10.0;
/// When the node gets the database back.
const RETURN: f64 = 100.0;
/// When the master stops trading.
const END: f64 = 125.0;
/// The master opens one trade so often, and keeps it for so long.
const EVERY: Duration = Duration::from_millis(500);
const LIFE: f64 = 12.0;
/// Beyond what a follower may pay more when it is late.
const FAR_PRICE: &str = "1.12000";
const FOLLOWERS: u32 = 3;

/// What was seen while it went on.
#[derive(Debug, Default)]
struct Seen {
    /// Failed cycles of A by then.
    failed_at_20: f64,
    failed_at_58: f64,
    /// Orders A did not send for want of a permit, by the end of the lease.
    dropped: f64,
    lease_ends: f64,
    claimed: Option<f64>,
    unowned_at_90: i64,
    returned: Option<f64>,
}

struct Scene {
    world: World,
    master: Master,
    open: VecDeque<(f64, MasterTicket)>,
    opened: u64,
    proxy: FaultProxy,
    a: Node,
    b: Option<Node>,
    metrics_of_a: MetricsPage,
    db: PgConnection,
}

/// Plays one ending.
pub(super) async fn play(ending: Ending) -> Told {
    let mut scene = Scene::start(ending).await;
    let (zero, held) = scene.cut_after_a_renewal().await;
    let seen = scene.go_on(zero, &held).await;
    scene.end().await;
    let fates = fates::read(&scene.world, &scene.master, zero).await;
    let (title, word) = (ending.title(), ending.word());
    Told { title, word, rows: rows(ending, &seen, &fates, held.len()) }
}

impl Scene {
    async fn start(ending: Ending) -> Scene {
        let mut world = World::start(ending.word()).await;
        let account = world.add_external_account("master").await;
        world.add_followers(account, FOLLOWERS).await;
        let master = Master::start(vec![world.bus.url(0)], account).await;
        let proxy = FaultProxy::start(shared_postgres().await.unwrap().addr()).await.unwrap();
        let metrics_of_a = MetricsPage::free().await;
        let a = world
            .node("a")
            .default_leases()
            .database(world.database_url_by(&proxy))
            .setting("LOCKSTEP_METRICS_LISTEN", metrics_of_a.address())
            .start();
        world.until_copying().await;
        let b = match ending {
            Ending::Taken => Some(world.node("b").default_leases().start()),
            Ending::Nobody => None,
        };
        let db = world.database().await;
        let open = VecDeque::new();
        Scene { world, master, open, opened: 0, proxy, a, b, metrics_of_a, db }
    }

    /// Trades until A has renewed, cuts it off, and says when it renewed.
    async fn cut_after_a_renewal(&mut self) -> (Micros, BTreeMap<AccountId, i64>) {
        let before = lease_ends(&mut self.db).await;
        let mut every = tokio::time::interval(Duration::from_millis(5));
        let mut next = Instant::now();
        let start = wall();
        loop {
            every.tick().await;
            if Instant::now() >= next {
                next = Instant::now() + EVERY;
                self.trade((wall().0 - start.0) as f64 / 1e6);
            }
            let now = lease_ends(&mut self.db).await;
            if now > before {
                self.proxy.set_mode(FaultMode::BlackHole).await.unwrap();
                let held = self.world.owned_by(&self.a).await;
                let zero = Micros(now.0 - (LEASE * 1e6) as i64);
                let passed = (zero.0 - start.0) as f64 / 1e6;
                self.open.iter_mut().for_each(|(at, _)| *at -= passed);
                return (zero, held);
            }
        }
    }

    /// One step of the master: a trade is opened, every other one at a price that is far away;
    /// what is old is closed.
    fn trade(&mut self, now: f64) {
        self.opened += 1;
        let price = if self.opened.is_multiple_of(2) { Some(FAR_PRICE) } else { None };
        self.open.push_back((now, self.master.open_at("0.10", price)));
        while self.open.front().is_some_and(|(at, _)| now - at >= LIFE) {
            let (_, ticket) = self.open.pop_front().unwrap();
            self.master.close(ticket);
        }
    }

    async fn go_on(&mut self, zero: Micros, held: &BTreeMap<AccountId, i64>) -> Seen {
        let mut seen = Seen { lease_ends: LEASE, ..Seen::default() };
        let mut every = tokio::time::interval(EVERY / 10);
        let mut ticks = 0u32;
        let mut healed = false;
        loop {
            every.tick().await;
            let now = (wall().0 - zero.0) as f64 / 1e6;
            ticks += 1;
            if ticks.is_multiple_of(10) {
                self.trade(now);
            }
            if seen.claimed.is_none() {
                self.look_for_a_claim(&mut seen, held, zero, now).await;
            }
            if seen.failed_at_20 == 0.0 && (CYCLE + 6.0..STOPS).contains(&now) {
                seen.failed_at_20 = self.failed_cycles().await;
            }
            if seen.failed_at_58 == 0.0 && (58.0..LEASE).contains(&now) {
                seen.failed_at_58 = self.failed_cycles().await;
                seen.dropped = self.metrics_of_a.sum("lockstep_gate_dropped_total").await;
            }
            if seen.unowned_at_90 == 0 && (90.0..91.0).contains(&now) {
                let sql = "select count(*) from trading_accounts
                           where platform = 'paper' and enabled and lease_until < clock_timestamp()";
                seen.unowned_at_90 = sqlx::query_scalar(sql).fetch_one(&mut self.db).await.unwrap();
            }
            if now >= RETURN && !healed {
                healed = true;
                self.proxy.set_mode(FaultMode::Pass).await.unwrap();
            }
            if healed && seen.returned.is_none() && self.has_returned(held).await {
                seen.returned = Some(now);
            }
            if now >= END {
                return seen;
            }
        }
    }

    async fn look_for_a_claim(
        &mut self,
        seen: &mut Seen,
        held: &BTreeMap<AccountId, i64>,
        zero: Micros,
        now: f64,
    ) {
        let owners: BTreeMap<AccountId, Owner> = owners(&mut self.db).await;
        if held.iter().all(|(account, token)| owners[account].token > *token) {
            seen.claimed = Some(now);
        } else if now < RETURN {
            let ends = lease_ends(&mut self.db).await;
            seen.lease_ends = (ends.0 - zero.0) as f64 / 1e6;
        }
    }

    /// A has had a cycle: it renewed what nobody took, or knows that it lost it.
    async fn has_returned(&mut self, held: &BTreeMap<AccountId, i64>) -> bool {
        match self.b {
            Some(_) => self.metrics_of_a.sum("lockstep_lease_owned_accounts").await == 0.0,
            None => {
                let renewed = lease_ends(&mut self.db).await > wall();
                renewed && self.world.owned_by(&self.a).await == *held
            }
        }
    }

    /// Lease cycles of A that did not confirm anything.
    async fn failed_cycles(&self) -> f64 {
        let failed = |line: &str| !line.contains("confirmed");
        self.metrics_of_a.sum_where("lockstep_lease_cycles_total", failed).await
    }

    /// The master closes everything; the followers must end flat.
    async fn end(&mut self) {
        let left: Vec<MasterTicket> = self.open.drain(..).map(|(_, ticket)| ticket).collect();
        // What was opened last must have had the time to be copied.
        let last = left.last().copied().unwrap();
        let world = &self.world;
        until("the last trade is decided on every follower", SOON, async || {
            let ledger = world.ledger().await;
            let has = |link| State::of_copies(&ledger, link).trades.contains_key(&last.get());
            world.links.iter().all(has).then_some(())
        })
        .await;
        self.master.close_many(&left);
        let world = &self.world;
        until("every follower is flat", SOON, async || {
            let ledger = world.ledger().await;
            let flat = |link| State::of_copies(&ledger, link).trades.is_empty();
            world.links.iter().all(flat).then_some(())
        })
        .await;
    }
}

/// The earliest end of a lease that somebody holds.
async fn lease_ends(db: &mut PgConnection) -> Micros {
    let ends: Option<OffsetDateTime> = sqlx::query_scalar(
        "select min(lease_until) from trading_accounts where node_id is not null",
    )
    .fetch_one(db)
    .await
    .unwrap();
    Micros(i64::try_from(ends.unwrap().unix_timestamp_nanos() / 1000).unwrap())
}

fn rows(ending: Ending, seen: &Seen, fates: &Fates, held: usize) -> Vec<Row> {
    let mut rows = rows_of_a(seen, fates, held);
    match ending {
        Ending::Taken => rows.extend(rows_of_b(seen, fates)),
        Ending::Nobody => rows.extend(rows_of_nobody(seen, fates, held)),
    }
    rows.push(row_of_copies(fates));
    rows
}

/// Until the lease ends both endings are one.
fn rows_of_a(seen: &Seen, fates: &Fates, held: usize) -> Vec<Row> {
    let (at_once, all, slowest) = fates.at_once(0.0, CYCLE, "a-");
    let (later, of_later, slowest_later) = fates.at_once(CYCLE, STOPS - RESERVE - 1.0, "a-");
    let (last, _) = fates.last_order("a-", STOPS + 1.0);
    let stopped = last.is_some_and(|at| at < STOPS && at > STOPS - RESERVE - 2.0);
    let between = fates.orders.iter().filter(|(at, _)| *at > STOPS && *at < LEASE).count();
    let words = |copied: usize, all: usize, slowest: f64| {
        format!("{copied} of {all} copies at once, the slowest after {:.0} ms", slowest * 1e3)
    };
    vec![
        Row {
            at: "0".into(),
            what: "A renews, then loses the database",
            expected: format!("A owns {FOLLOWERS} followers and copies"),
            seen: format!("owns {held}; until 20: {}", words(at_once, all, slowest)),
            ok: held == FOLLOWERS as usize && at_once == all && all > 0,
        },
        Row {
            at: "20".into(),
            what: "A's renewal fails",
            expected: "A tries again every 2 s and copies on: its permits hold until 45".into(),
            seen: format!(
                "{} cycles failed by 26; until 42: {}",
                seen.failed_at_20,
                words(later, of_later, slowest_later)
            ),
            ok: seen.failed_at_20 >= 1.0 && later == of_later && of_later > 0,
        },
        Row {
            at: "45".into(),
            what: "A's permits end, by its own clock",
            expected: "last order before 43 (2 s are the send reserve); what follows is dropped and counted".into(),
            seen: format!(
                "last order at {}, {} orders dropped, {} failed cycles",
                last.map_or("-".into(), seconds),
                seen.dropped,
                seen.failed_at_58
            ),
            ok: stopped && seen.dropped > 0.0,
        },
        Row {
            at: "60".into(),
            what: "the lease ends in the database",
            expected: "nobody sends between 45 and 60".into(),
            seen: format!("ended at {}, {between} orders", seconds(seen.lease_ends)),
            ok: between == 0 && (seen.lease_ends - LEASE).abs() < 0.5,
        },
    ]
}

fn rows_of_b(seen: &Seen, fates: &Fates) -> Vec<Row> {
    let claimed = seen.claimed.unwrap_or(f64::NAN);
    let reconciled = fates.first_order("b-", STOPS).unwrap_or(f64::NAN);
    let opened = fates.first_open("b-", STOPS).unwrap_or(f64::NAN);
    let (_, of_a) = fates.last_order("a-", STOPS);
    let returned = seen.returned.unwrap_or(f64::NAN);
    vec![
        Row {
            at: seconds(claimed),
            what: "first claim",
            expected: "B claims within 1 s after 60".into(),
            seen: format!("all accounts under a new token at {}", seconds(claimed)),
            ok: (LEASE..LEASE + 1.0).contains(&claimed),
        },
        Row {
            at: seconds(reconciled),
            what: "first reconcile",
            expected: "B closes what the master closed within 5 s, opens nothing for 10 s".into(),
            seen: format!(
                "first close at {}, first open at {}",
                seconds(reconciled),
                seconds(opened)
            ),
            ok: reconciled < claimed + 5.0
                && (claimed + SETTLE - 0.5..claimed + SETTLE + 5.0).contains(&opened),
        },
        Row {
            at: "100".into(),
            what: "A gets the database back",
            expected: "A learns within 10 s that it owns nothing, and sends nothing".into(),
            seen: format!("knows at {}, {of_a} orders of A after 45", seconds(returned)),
            ok: returned < RETURN + 10.0 && of_a == 0,
        },
    ]
}

fn rows_of_nobody(seen: &Seen, fates: &Fates, held: usize) -> Vec<Row> {
    let returned = seen.returned.unwrap_or(f64::NAN);
    let reconciled = fates.first_order("a-", STOPS).unwrap_or(f64::NAN);
    let opened = fates.first_open("a-", STOPS).unwrap_or(f64::NAN);
    let nobody = fates.orders.iter().filter(|(at, _)| *at > STOPS && *at < RETURN).count();
    vec![
        Row {
            at: "-".into(),
            what: "first claim",
            expected: "nobody claims; the accounts are counted as without an owner".into(),
            seen: format!(
                "{} of {held} without an owner at 90, {nobody} orders",
                seen.unowned_at_90
            ),
            ok: seen.claimed.is_none() && seen.unowned_at_90 == held as i64 && nobody == 0,
        },
        Row {
            at: "100".into(),
            what: "A gets the database back",
            expected: "A renews within 10 s, under its old token: nobody else had it".into(),
            seen: format!("renewed at {}", seconds(returned)),
            ok: returned < RETURN + 10.0,
        },
        Row {
            at: seconds(reconciled),
            what: "first reconcile",
            expected: "within 5 s of that, before anything live".into(),
            seen: format!(
                "first close at {}, first open at {}",
                seconds(reconciled),
                seconds(opened)
            ),
            ok: reconciled >= RETURN && reconciled < returned + 5.0 && opened < returned + 10.0,
        },
    ]
}

/// What became of every copy there should have been.
fn row_of_copies(fates: &Fates) -> Row {
    let count = |wanted: &dyn Fn(&Fate) -> bool| fates.of.values().filter(|f| wanted(f)).count();
    let copied = |node: &'static str, late: bool| {
        count(
            &move |fate| matches!(fate, Fate::Copied { by, after, .. } if by.starts_with(node) && (*after > 2.0) == late),
        )
    };
    let skipped = count(&|fate| matches!(fate, Fate::Skipped(_)));
    let wrongly =
        count(&|fate| matches!(fate, Fate::Skipped(reason) if reason != "late_open_price_moved"));
    let ended = count(&|fate| *fate == Fate::EndedBefore);
    let forgotten = fates.forgotten(STOPS - RESERVE - 1.0, STOPS);
    let late = copied("a-", true) + copied("b-", true);
    Row {
        at: "all".into(),
        what: "copies",
        expected:
            "at once, or late within the price, or skipped `late_open_price_moved`, or closed \
                   by the master before anybody could; none twice, none forgotten"
                .into(),
        seen: format!(
            "{} trades on {FOLLOWERS} followers: {} at once by A, {} at once by B, {late} late, \
             {skipped} skipped, {ended} over before; {} twice, {} forgotten{}; smallest margin {} ms",
            fates.trades.len(),
            copied("a-", false),
            copied("b-", false),
            fates.duplicates,
            forgotten.len(),
            forgotten.first().map_or(String::new(), |first| format!(" (such as {first})")),
            fates.margin_min_ms,
        ),
        ok: fates.duplicates == 0
            && forgotten.is_empty()
            && wrongly == 0
            && fates.violations == 0
            && late > 0
            && skipped > 0
            && ended > 0
            && fates.margin_min_ms >= (RESERVE * 1e3) as i64 - 1,
    }
}
