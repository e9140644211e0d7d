//! Tells the other nodes which timeline the database has, and hears theirs.
//!
//! Decides: nothing; what it hears goes to the lease loop.
//! In: the lease state; messages of other nodes. Out: messages; [`LeaseCommands::timeline_heard`].
//!
//! After a failover the demoted server may live on, and a node whose connection still leads there
//! would renew its leases where nobody else looks (H14). The timeline of the write-ahead log grows
//! with every promotion, so the highest one that any node has seen says which server is current.
//!
//! Invariants:
//! 1. Only databases of one system identifier are compared: another fleet on the same bus is not
//!    heard.
//! 2. A timeline that is absurdly higher than our own is ignored: a bad message must not close
//!    every gate for good.
//!
//! Not promised: without a quorum a node that is cut from the bus and from the new primary, and not
//! from the old one, keeps renewing there. Only a server that cannot commit alone prevents that:
//! run Postgres with a synchronous standby. Servers that do not tell their identifier or timeline
//! (some managed ones) are not compared at all. A node that has seen timeline 3 refuses a new, empty
//! database of timeline 1 in its place until it is started again.

use super::task::{LeaseCommands, LeaseState};
use crate::causes::with_causes;
use crate::database;
use futures_util::StreamExt;
use schemas::subject;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How often a node says what it has seen.
pub const SPREAD_EVERY: Duration = Duration::from_secs(2);

/// Promotions between two messages that are believed.
pub const TIMELINE_JUMP_MAX: u32 = 100;

/// Pause before the database or the bus is asked again.
const RETRY: Duration = Duration::from_secs(2);

/// Spreads and hears timelines until the lease loop ends.
pub async fn spread(
    bus: async_nats::Client,
    url: String,
    state: watch::Receiver<Arc<LeaseState>>,
    lease: LeaseCommands,
) {
    let system = loop {
        match system_identifier(&url).await {
            Ok(Some(system)) => break system,
            Ok(None) => {
                tracing::warn!(
                    "the database does not tell its identifier; timelines are not compared"
                );
                return;
            }
            Err(error) => {
                tracing::warn!(error = %with_causes(&error), "the database's identifier is not known yet")
            }
        }
        tokio::time::sleep(RETRY).await;
    };
    let subject = subject::timeline(system);
    while !state.borrow().ended {
        if let Err(error) = exchange(&bus, &subject, &state, &lease).await {
            tracing::warn!(error = %with_causes(&error), "timelines are not heard");
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn exchange(
    bus: &async_nats::Client,
    subject: &str,
    state: &watch::Receiver<Arc<LeaseState>>,
    lease: &LeaseCommands,
) -> Result<(), async_nats::SubscribeError> {
    let mut messages = bus.subscribe(subject.to_owned()).await?;
    let mut every = tokio::time::interval(SPREAD_EVERY);
    loop {
        let own = state.borrow().timeline;
        tokio::select! {
            message = messages.next() => {
                let Some(message) = message else { return Ok(()) };
                if let Some(timeline) = believable(&message.payload, own)
                    && lease.timeline_heard(timeline).await.is_err()
                {
                    return Ok(());
                }
            }
            _ = every.tick() => {
                if let Some(own) = own {
                    // It is said again soon; a bus that is away is somebody else's news.
                    let _said_or_not = bus.publish(subject.to_owned(), own.to_string().into()).await;
                }
                if state.borrow().ended {
                    return Ok(());
                }
            }
        }
    }
}

/// The timeline in a message, if it can be true.
fn believable(payload: &[u8], own: Option<u32>) -> Option<u32> {
    let text = std::str::from_utf8(payload).ok()?;
    let timeline: u32 = text.parse().ok()?;
    let most = own.map_or(TIMELINE_JUMP_MAX, |own| own.saturating_add(TIMELINE_JUMP_MAX));
    (timeline <= most).then_some(timeline)
}

/// What tells one database cluster, with all its replicas, from another.
async fn system_identifier(url: &str) -> Result<Option<u64>, database::DatabaseError> {
    let mut connection = database::connect(url, "timeline").await?;
    let found: Result<i64, sqlx::Error> =
        sqlx::query_scalar("select system_identifier from pg_control_system()")
            .fetch_one(&mut connection)
            .await;
    match found {
        // The server counts without a sign.
        Ok(system) => Ok(Some(system.cast_unsigned())),
        Err(sqlx::Error::Database(_)) => Ok(None),
        Err(error) => Err(database::DatabaseError::Connect(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeline_that_is_absurd_or_no_number_is_not_believed() {
        assert_eq!(believable(b"3", Some(2)), Some(3));
        assert_eq!(believable(b"102", Some(2)), Some(102));
        assert_eq!(believable(b"103", Some(2)), None);
        assert_eq!(believable(b"4294967295", Some(1)), None);
        for bad in [&b""[..], b"-1", b"2 ", b"\xff"] {
            assert_eq!(believable(bad, Some(2)), None);
        }
    }
}
