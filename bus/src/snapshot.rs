//! Asking a master's publisher for its state, in the one order that loses nothing (M11-M13).
//!
//! The caller has subscribed to the master before. Then, all on the same connection:
//! subscribe an inbox of our own, publish an echo to it and wait for it (the server handles what
//! one connection sends in order, so everything subscribed before the echo is known to it),
//! then send the request with that inbox as reply, and collect the pages.
//!
//! Invariants:
//! 1. A snapshot comes out only complete, from one publisher, at one (epoch, seq), with the
//!    digest that its publisher computed.
//! 2. Nobody there, no answer in time, a connection made anew meanwhile: an error, never an
//!    empty state.
//!
//! Not covered: whether the epoch is one to follow. The feed decides that.

use crate::error::BusError;
use async_nats::{Client, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use schemas::codec::{self, SnapshotPages};
use schemas::{AccountId, Epoch, MasterSnapshot, subject};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for our own echo. Chosen: a server that needs longer is as good as gone.
pub const ECHO_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait for the next page. The publisher spaces its replies by 250 ms.
pub const PAGE_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait for all pages of a large account.
pub const SNAPSHOT_LIMIT: Duration = Duration::from_secs(10);

/// Longest time a request can take; whoever waits longer waits for a task that is gone.
pub(crate) const REQUEST_LIMIT: Duration =
    Duration::from_secs(ECHO_LIMIT.as_secs() + SNAPSHOT_LIMIT.as_secs() + 3);

/// Publishers whose pages are kept apart in one request; more than two is an attack or a bug.
const PUBLISHERS_MAX: usize = 4;

/// What we send to ourselves; a page of a snapshot is a MessagePack map and never equal to it.
const ECHO: &[u8] = b"echo";

/// Proves that the server knows every subscription made on this connection so far.
///
/// Output: the inbox, still subscribed: the echo came back on it.
pub async fn prove_subscriptions(client: &Client, inbox: &str) -> Result<Subscriber, BusError> {
    let echo = async {
        let mut replies = client.subscribe(inbox.to_owned()).await.map_err(|_| BusError::Closed)?;
        client
            .publish(inbox.to_owned(), Bytes::from_static(ECHO))
            .await
            .map_err(|_| BusError::Closed)?;
        while let Some(message) = replies.next().await {
            if message.payload == ECHO {
                return Ok(replies);
            }
        }
        Err(BusError::Closed)
    };
    match tokio::time::timeout(ECHO_LIMIT, echo).await {
        Ok(replies) => replies,
        Err(_) => Err(BusError::NoEcho { waited: ECHO_LIMIT }),
    }
}

/// Asks for the snapshot of a master that is at least of epoch `heard`.
///
/// Errors: each means "unknown": the caller keeps what it has and asks again later.
pub async fn request(
    client: &Client,
    master: AccountId,
    heard: Option<Epoch>,
) -> Result<MasterSnapshot, BusError> {
    let statistics = client.statistics();
    let connects = statistics.connects.load(Ordering::Relaxed);
    let own = client.new_inbox();
    let unique = own.rsplit('.').next().unwrap_or_default();
    let inbox = subject::reply(master, unique);
    let mut replies = prove_subscriptions(client, &inbox).await?;
    let payload = Bytes::from(codec::encode_snapshot_request(master, heard));
    let exchange = async {
        client
            .publish_with_reply(subject::snapshot(master), inbox, payload)
            .await
            .map_err(|_| BusError::Closed)?;
        collect_pages(&mut replies, master, heard).await
    };
    let snapshot = tokio::time::timeout(SNAPSHOT_LIMIT, exchange)
        .await
        .map_err(|_| BusError::SnapshotTimedOut { master, waited: SNAPSHOT_LIMIT })??;
    if statistics.connects.load(Ordering::Relaxed) != connects {
        return Err(BusError::Reconnected);
    }
    Ok(snapshot)
}

async fn collect_pages(
    replies: &mut Subscriber,
    master: AccountId,
    heard: Option<Epoch>,
) -> Result<MasterSnapshot, BusError> {
    let mut assembly = Assembly { master, heard, publishers: BTreeMap::new() };
    loop {
        let message = tokio::time::timeout(PAGE_LIMIT, replies.next())
            .await
            .map_err(|_| BusError::SnapshotTimedOut { master, waited: PAGE_LIMIT })?
            .ok_or(BusError::Closed)?;
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            return Err(BusError::NoResponders { master });
        }
        let (back, snapshot) = assembly.take_off_runtime(message).await?;
        assembly = back;
        if let Some(snapshot) = snapshot {
            return Ok(snapshot);
        }
    }
}

/// The pages that came so far. Two publishers may answer (H26, H36): their pages stay apart.
struct Assembly {
    master: AccountId,
    heard: Option<Epoch>,
    publishers: BTreeMap<Epoch, SnapshotPages>,
}

/// Pages of this size are decoded where they arrive; larger ones would hold up the hot runtime.
const INLINE_BYTES_MAX: usize = 16 * 1024;

impl Assembly {
    async fn take_off_runtime(
        mut self,
        message: Message,
    ) -> Result<(Assembly, Option<MasterSnapshot>), BusError> {
        let small = message.payload.len() <= INLINE_BYTES_MAX;
        let work = move || {
            let snapshot = self.take(&message.payload)?;
            Ok((self, snapshot))
        };
        if small {
            return work();
        }
        tokio::task::spawn_blocking(work).await.map_err(|_| BusError::Closed)?
    }

    fn take(&mut self, payload: &[u8]) -> Result<Option<MasterSnapshot>, BusError> {
        let undecodable = |source| BusError::SnapshotUndecodable { master: self.master, source };
        let page = codec::decode_snapshot_page(payload).map_err(undecodable)?;
        let old = self.heard.is_some_and(|heard| page.epoch < heard);
        let crowd =
            self.publishers.len() >= PUBLISHERS_MAX && !self.publishers.contains_key(&page.epoch);
        if page.account != self.master || old || crowd {
            return Ok(None);
        }
        self.publishers.entry(page.epoch).or_default().take(page).map_err(undecodable)
    }
}
