//! Everything that crosses the bus, as each of its servers gives it out.
//!
//! One plain subscription to `>` at every server, past all proxies. What a tap did not hear
//! proves nothing (the bus loses messages); what it heard was said.

use parking_lot::Mutex;
use schemas::subject::Subject;
use schemas::{AccountId, Epoch, Micros, Seq, codec, subject};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

use crate::world::wall;
use futures_util::StreamExt;

/// One thing that was said.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct BusRecord {
    /// When the first tap heard it.
    pub heard_at: Micros,
    /// When its speaker says that it was said or read.
    pub at: Micros,
    /// Which master.
    pub master: AccountId,
    /// Incarnation of the publisher.
    pub epoch: Epoch,
    /// Place in it.
    pub seq: Seq,
    /// What it was.
    pub what: Said,
}

/// What kind of thing was said.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// A trade event: its kind and ticket.
    Event(String, u64),
    /// A beacon.
    Beacon,
    /// The first page of a snapshot reply.
    Snapshot,
}

/// The taps; they end with the value.
#[derive(Debug)]
pub struct Tap {
    heard: Arc<Mutex<Heard>>,
    _tasks: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Heard {
    records: Vec<BusRecord>,
    /// What another tap has already heard, without the instant of hearing.
    known: BTreeSet<(AccountId, Epoch, Seq, Said, Micros)>,
}

impl Tap {
    /// Listens at these servers.
    pub async fn start(urls: &[String]) -> Result<Tap, async_nats::Error> {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let mut tasks = JoinSet::new();
        for url in urls {
            let client = async_nats::ConnectOptions::new()
                .name("chaos-tap")
                .ping_interval(Duration::from_secs(60))
                .connect(url)
                .await?;
            let mut messages = client.subscribe(">").await?;
            client.flush().await?;
            let heard = Arc::clone(&heard);
            tasks.spawn(async move {
                let _client = client;
                while let Some(message) = messages.next().await {
                    if let Some(record) = read(&message) {
                        heard.lock().take(record);
                    }
                }
            });
        }
        Ok(Tap { heard, _tasks: tasks })
    }

    /// What was heard so far.
    pub fn records(&self) -> Vec<BusRecord> {
        self.heard.lock().records.clone()
    }
}

impl Heard {
    fn take(&mut self, record: BusRecord) {
        let key = (record.master, record.epoch, record.seq, record.what.clone(), record.at);
        if self.known.insert(key) {
            self.records.push(record);
        }
    }
}

fn read(message: &async_nats::Message) -> Option<BusRecord> {
    let heard_at = wall();
    let payload = &message.payload;
    match subject::parse(&message.subject) {
        Some(Subject::Event(_)) => {
            let event = codec::decode_event(payload).ok()?;
            let what = Said::Event(event.change.kind().to_owned(), event.change.ticket().get());
            let (epoch, seq) = (event.epoch, event.seq);
            Some(BusRecord { heard_at, at: event.at, master: event.account, epoch, seq, what })
        }
        Some(Subject::Beacon(_)) => {
            let beacon = codec::decode_beacon(payload).ok()?;
            let (epoch, seq, what) = (beacon.epoch, beacon.seq, Said::Beacon);
            Some(BusRecord { heard_at, at: beacon.at, master: beacon.account, epoch, seq, what })
        }
        Some(Subject::Snapshot(_)) => None,
        // A reply comes to an inbox.
        None => {
            let page = codec::decode_snapshot_page(payload).ok().filter(|page| page.page == 0)?;
            let (epoch, seq, what) = (page.epoch, page.seq, Said::Snapshot);
            Some(BusRecord { heard_at, at: page.at_us, master: page.account, epoch, seq, what })
        }
    }
}
