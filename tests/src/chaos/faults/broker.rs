//! What the broker does to all nodes.

use super::pick;
use crate::chaos::schedule::{Fault, Kind};
use crate::chaos::world::World;
use crate::chaos::{Done, timing};
use paper::faults::{FaultKind, FaultSpec, Span, Withheld};
use schemas::AccountId;
use std::time::{Duration, Instant};

/// Answers that come later than any call may take.
const LATE_ANSWER: Duration = Duration::from_millis(timing::CALL_LIMIT.as_millis() as u64 + 1_000);
/// Between two kicks of somebody's session.
const KICK_EVERY: Duration = Duration::from_millis(600);
/// Between two resets while lists come late.
const RESET_EVERY: Duration = Duration::from_secs(3);

/// The longest that an order is held up on its way. Half of the time its sender still waits for it
/// then, and nothing is excused; else it is longer than fence and settle.
pub(super) fn longest_delivery(fault: Fault) -> Duration {
    match pick(fault, 2) {
        0 => timing::longest_answer() - Duration::from_millis(500),
        _ => timing::FENCE + timing::SETTLE + Duration::from_secs(2),
    }
}

pub(super) async fn run(world: &World, fault: Fault) -> Done {
    let until = Instant::now() + fault.lasts;
    let spec = FaultSpec {
        for_ms: Some(fault.lasts.as_millis() as u64),
        share_permille: share(fault.kind),
        ..FaultSpec::new(kind(fault))
    };
    world.driver.set_fault(spec).await?;
    let mut number = pick(fault, world.links.len());
    while Instant::now() < until {
        let left = until.saturating_duration_since(Instant::now());
        match fault.kind {
            Kind::Kicks => {
                let account: AccountId = world.links[number % world.links.len()].link.follower;
                world.driver.kick(account).await?;
                number += 1;
                tokio::time::sleep(KICK_EVERY.min(left)).await;
            }
            Kind::UnsyncedLists => {
                for node in &world.nodes {
                    node.broker.reset_connections().await?;
                }
                tokio::time::sleep(RESET_EVERY.min(left)).await;
            }
            _ => tokio::time::sleep(left).await,
        }
    }
    if fault.kind == Kind::LateDelivery {
        // What was sent last is still on its way.
        tokio::time::sleep(longest_delivery(fault)).await;
    }
    Ok(())
}

fn share(kind: Kind) -> u32 {
    match kind {
        Kind::LostAnswers | Kind::LostRequests => 150,
        Kind::LateDelivery | Kind::Requotes => 300,
        _ => 1_000,
    }
}

fn kind(fault: Fault) -> FaultKind {
    match fault.kind {
        Kind::LateAnswers => FaultKind::AnswerDelay { span: Span::of(LATE_ANSWER) },
        Kind::LostAnswers => FaultKind::LostAnswer {},
        Kind::LostRequests => FaultKind::LostRequest {},
        Kind::LateDelivery => {
            let max_ms = longest_delivery(fault).as_millis() as u64;
            let span = Span { min_ms: 500, max_ms };
            match fault.dice / 2 % 3 {
                0 => FaultKind::AcceptanceDelay { span },
                one => FaultKind::DeliveryDelay { span, dies_with_connection: one == 1 },
            }
        }
        Kind::UnsyncedLists => {
            let lists = [Withheld::All, Withheld::Half][pick(fault, 2)];
            let claims_complete = lists == Withheld::All && (fault.dice / 2).is_multiple_of(2);
            let span = Span { min_ms: 1_000, max_ms: 4_000 };
            FaultKind::Unsynced { lists, span, claims_complete }
        }
        Kind::Kicks => FaultKind::SecondSessionKicks {},
        _ => FaultKind::Requote {},
    }
}
