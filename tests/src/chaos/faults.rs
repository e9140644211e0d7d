//! Breaks the world as a schedule says, and mends it again.
//!
//! Each fault is one function that breaks, waits and mends. What was broken when is kept as
//! [`Span`]s for the checker, which allows nothing outside them.

mod broker;

use super::load::{Wish, Wisher};
use super::schedule::{Fault, Kind};
use super::world::{NodeSite, ROLE, World};
use super::{Done, audit, timing};
use crate::world::wall;
use devstack::{DevstackError, Direction, FaultMode, FaultProxy};
use schemas::Micros;
use serde::Serialize;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use std::time::{Duration, Instant};

/// A node may take so long to end in an orderly way before it is killed.
const END_LIMIT: Duration = Duration::from_secs(20);
/// A NATS server in lame duck mode ends within this.
const LAME_DUCK_LIMIT: Duration = Duration::from_secs(45);
/// The nodes' sessions at a primary that is cut off end within this.
const SESSIONS_LIMIT: Duration = Duration::from_secs(10);
/// Between two resets.
const RESET_EVERY: Duration = Duration::from_millis(900);

/// A fault and when it held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Span {
    /// Its word.
    pub kind: &'static str,
    /// The node that it touched, if it was one.
    pub node: Option<String>,
    /// It can delay a delivery, or hold a node between its last check and the write, for longer
    /// than fence and settle: the one case in which S4 allows an extra order.
    pub excuses_extra: bool,
    /// Beginning.
    pub from: Micros,
    /// When everything was mended.
    pub until: Micros,
}

/// Breaks, waits, mends.
pub async fn run(world: &World, wisher: &Wisher, fault: Fault) -> Done<Span> {
    tokio::time::sleep(fault.after).await;
    let node = &world.nodes[fault.target];
    let from = wall();
    match fault.kind {
        Kind::CutDatabase => {
            let mode = [FaultMode::BlackHole, FaultMode::Refuse][pick(fault, 2)];
            hold(&[&node.database], mode, fault.lasts).await?;
        }
        Kind::CutBus => {
            let mode = [FaultMode::BlackHole, FaultMode::Refuse][pick(fault, 2)];
            hold(&node.bus.iter().collect::<Vec<_>>(), mode, fault.lasts).await?;
        }
        Kind::CutBroker => {
            let mode = [FaultMode::BlackHole, FaultMode::Refuse][pick(fault, 2)];
            hold(&[&node.broker], mode, fault.lasts).await?;
        }
        Kind::Latency => {
            let latency = Duration::from_millis(50 + fault.dice % 250);
            let ways: Vec<_> = node.ways().collect();
            hold(&ways, FaultMode::Latency(latency), fault.lasts).await?;
        }
        Kind::BlackHole => {
            let ways: Vec<_> = node.ways().collect();
            hold(&ways, FaultMode::BlackHole, fault.lasts).await?;
        }
        Kind::Reset => reset(node, fault.lasts).await?,
        Kind::HalfOpen => half_open(node, fault).await?,
        Kind::FreezeShort | Kind::FreezeLong => {
            node.process.freeze()?;
            tokio::time::sleep(fault.lasts).await;
            node.process.thaw()?;
        }
        Kind::Kill => kill(node, fault.lasts).await?,
        Kind::HandOver => hand_over(node, fault.lasts).await?,
        Kind::Twin => twin(world, node, fault).await?,
        Kind::MasterCut => {
            let mode = [FaultMode::BlackHole, FaultMode::Refuse][pick(fault, 2)];
            hold(&world.masters_bus.iter().collect::<Vec<_>>(), mode, fault.lasts).await?;
        }
        Kind::NatsKill => {
            let server = world.nats.server(fault.target);
            server.kill()?;
            tokio::time::sleep(fault.lasts).await;
            server.restart().await?;
        }
        Kind::NatsFreeze => {
            let server = world.nats.server(fault.target);
            server.freeze()?;
            tokio::time::sleep(fault.lasts).await;
            server.thaw()?;
        }
        Kind::LameDuck => {
            let server = world.nats.server(fault.target);
            server.lame_duck()?;
            server.process().wait(LAME_DUCK_LIMIT).await?;
            tokio::time::sleep(fault.lasts).await;
            server.restart().await?;
        }
        Kind::Promote => promote(world, fault.lasts).await?,
        Kind::LockRow => lock_row(world, fault).await?,
        Kind::RevokeWrites => revoke_writes(world, fault.lasts).await?,
        Kind::LateAnswers
        | Kind::LostAnswers
        | Kind::LostRequests
        | Kind::LateDelivery
        | Kind::UnsyncedLists
        | Kind::Kicks
        | Kind::Requotes => broker::run(world, fault).await?,
        Kind::BurstInTakeover => burst_in_takeover(node, wisher, fault).await?,
    }
    Ok(span(fault, node, from))
}

fn span(fault: Fault, node: &NodeSite, from: Micros) -> Span {
    let longest = timing::FENCE + timing::SETTLE;
    let holds = match fault.kind {
        Kind::FreezeLong => fault.lasts,
        Kind::LateDelivery => broker::longest_delivery(fault),
        _ => Duration::ZERO,
    };
    Span {
        kind: fault.kind.word(),
        node: fault.kind.touches_node().then(|| node.name.clone()),
        excuses_extra: holds > longest,
        from,
        until: wall(),
    }
}

fn pick(fault: Fault, choices: usize) -> usize {
    (fault.dice % choices as u64) as usize
}

async fn hold(ways: &[&FaultProxy], mode: FaultMode, lasts: Duration) -> Done {
    for way in ways {
        way.set_mode(mode).await?;
    }
    tokio::time::sleep(lasts).await;
    for way in ways {
        way.set_mode(FaultMode::Pass).await?;
    }
    Ok(())
}

async fn reset(node: &NodeSite, lasts: Duration) -> Done {
    let until = Instant::now() + lasts;
    while Instant::now() < until {
        for way in node.ways() {
            way.reset_connections().await?;
        }
        tokio::time::sleep(RESET_EVERY).await;
    }
    Ok(())
}

async fn half_open(node: &NodeSite, fault: Fault) -> Done {
    let direction = [Direction::ToServer, Direction::ToClient][pick(fault, 2)];
    let ways: Vec<&FaultProxy> = match (fault.dice / 2) % 3 {
        0 => vec![&node.database],
        1 => node.bus.iter().collect(),
        _ => vec![node.broker.as_ref()],
    };
    hold(&ways, FaultMode::HalfOpen(direction), fault.lasts).await
}

async fn kill(node: &NodeSite, lasts: Duration) -> Done {
    node.process.kill()?;
    tokio::time::sleep(lasts).await;
    Ok(node.process.restart()?)
}

async fn hand_over(node: &NodeSite, lasts: Duration) -> Done {
    node.process.terminate()?;
    match node.process.wait(END_LIMIT).await {
        Ok(_) | Err(DevstackError::TimedOut { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    tokio::time::sleep(lasts).await;
    Ok(node.process.restart()?)
}

async fn twin(world: &World, node: &NodeSite, fault: Fault) -> Done {
    let number = (fault.dice % 100_000) as usize;
    let twin = node.start_twin(&world.folder, number)?;
    tokio::time::sleep(fault.lasts).await;
    if fault.dice.is_multiple_of(2) {
        twin.terminate()?;
        match twin.wait(END_LIMIT).await {
            Ok(_) | Err(DevstackError::TimedOut { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    twin.kill()?;
    Ok(())
}

/// The replica hears nothing any more, the primary works on for a while, and is then fenced off
/// and stopped for good; the replica takes its place with what it has.
async fn promote(world: &World, unheard: Duration) -> Done {
    let mut servers = world.servers.lock().await;
    let (replica, link) = servers.replica.take().ok_or("there is no replica to promote")?;
    link.set_mode(FaultMode::BlackHole).await?;
    tokio::time::sleep(unheard).await;
    let mut db = lockstep::database::connect(&servers.primary.url("chaos"), "chaos").await?;
    fence_off(&mut db).await?;
    let audit = audit::read(&mut db).await?;
    servers.former_audits.push(audit);
    drop(db);
    servers.primary.stop().await?;
    replica.promote().await?;
    for node in &world.nodes {
        node.database.retarget(replica.addr()).await?;
    }
    servers.primary = replica;
    Ok(())
}

/// No node comes in any more, and their sessions end; what they were committing is over then.
async fn fence_off(db: &mut PgConnection) -> Done {
    // The replica does not hear of it.
    sqlx::raw_sql("alter role chaos_node nologin").execute(&mut *db).await?;
    let deadline = Instant::now() + SESSIONS_LIMIT;
    loop {
        let end = "select count(pg_terminate_backend(pid)) as left from pg_stat_activity where usename = $1";
        let left: i64 = sqlx::query(end).bind(ROLE).fetch_one(&mut *db).await?.try_get("left")?;
        if left == 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("{left} sessions do not end").into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn lock_row(world: &World, fault: Fault) -> Done {
    let mut db = world.database().await?;
    let followers = &world.links;
    let account = followers[pick(fault, followers.len())].link.follower;
    let mut locked = db.begin().await?;
    sqlx::query("select 1 from trading_accounts where id = $1 for update")
        .bind(account.as_i64())
        .execute(&mut *locked)
        .await?;
    tokio::time::sleep(fault.lasts).await;
    Ok(locked.commit().await?)
}

async fn revoke_writes(world: &World, lasts: Duration) -> Done {
    let mut db = world.database().await?;
    for (statement, wait) in [
        (format!("revoke insert, update on pairs, copy_events, account_status from {ROLE}"), lasts),
        (
            format!("grant insert, update on pairs, copy_events, account_status to {ROLE}"),
            Duration::ZERO,
        ),
    ] {
        // Safe: made of constants.
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut db).await?;
        tokio::time::sleep(wait).await;
    }
    Ok(())
}

/// A burst of trades, the kill, and their closes while somebody else takes the accounts over:
/// the lease of a killed node ends 9 to 10 s after it.
async fn burst_in_takeover(node: &NodeSite, wisher: &Wisher, fault: Fault) -> Done {
    wisher.ask(|| Wish::OpenBurst).await;
    tokio::time::sleep(Duration::from_millis(fault.dice % 400)).await;
    node.process.kill()?;
    let lease = timing::LEASE - timing::CYCLE;
    tokio::time::sleep(lease + Duration::from_millis(fault.dice % 3_000)).await;
    wisher.ask(|| Wish::CloseBurst).await;
    tokio::time::sleep(fault.lasts).await;
    Ok(node.process.restart()?)
}
