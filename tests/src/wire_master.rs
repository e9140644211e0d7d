//! A master with nothing but a NATS client and the wire contract, as somebody's own bridge is.
//!
//! It can do what no publisher of ours does: count an event and never send it.

use crate::master::position;
use crate::world::wall;
use futures_util::StreamExt;
use parking_lot::Mutex;
use schemas::{
    AccountId, Beacon, Book, Change, CloseReason, Epoch, MasterSnapshot, MasterTicket, Micros, Seq,
    TradeEvent, codec, subject,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Time between two beacons, as the contract asks for.
const BEACON_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Shared {
    account: AccountId,
    epoch: Epoch,
    seq: Seq,
    book: Book,
}

/// The master; its beacons and replies end with the value.
#[derive(Debug)]
pub struct WireMaster {
    client: async_nats::Client,
    shared: Arc<Mutex<Shared>>,
    _tasks: JoinSet<()>,
}

impl WireMaster {
    /// Connects and begins to speak, with nothing open.
    pub async fn start(url: &str, account: AccountId) -> WireMaster {
        let client = async_nats::connect(url).await.unwrap();
        let epoch = Epoch::new(wall().0.unsigned_abs()).unwrap();
        let shared = Shared { account, epoch, seq: Seq::ZERO, book: Book::default() };
        let shared = Arc::new(Mutex::new(shared));
        let requests = client.subscribe(subject::snapshot(account)).await.unwrap();
        client.flush().await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(answer(client.clone(), requests, Arc::clone(&shared)));
        tasks.spawn(speak(client.clone(), Arc::clone(&shared)));
        WireMaster { client, shared, _tasks: tasks }
    }

    /// What it holds.
    pub fn book(&self) -> Book {
        self.shared.lock().book.clone()
    }

    /// Opens a trade; the event is sent.
    pub async fn open(&self, ticket: u64, lots: &str) {
        let event = self.opened(ticket, lots);
        self.send(event).await;
    }

    /// Opens a trade; its event is counted and never sent.
    pub fn open_unsaid(&self, ticket: u64, lots: &str) -> Micros {
        self.opened(ticket, lots).at
    }

    /// Closes a trade; the event is sent.
    pub async fn close(&self, ticket: u64) {
        let event = self.closed(ticket);
        self.send(event).await;
    }

    /// Closes a trade; its event is counted and never sent.
    pub fn close_unsaid(&self, ticket: u64) -> Micros {
        self.closed(ticket).at
    }

    fn opened(&self, ticket: u64, lots: &str) -> TradeEvent {
        let ticket = MasterTicket::new(ticket).unwrap();
        self.change(Change::PositionOpened(position(ticket, lots.parse().unwrap(), wall())))
    }

    fn closed(&self, ticket: u64) -> TradeEvent {
        let ticket = MasterTicket::new(ticket).unwrap();
        let position = self.shared.lock().book.positions[&ticket].clone();
        self.change(Change::PositionClosed { position, price: None, reason: CloseReason::Client })
    }

    fn change(&self, change: Change) -> TradeEvent {
        let mut shared = self.shared.lock();
        shared.book.apply(&change);
        shared.seq = shared.seq.next();
        TradeEvent {
            account: shared.account,
            epoch: shared.epoch,
            seq: shared.seq,
            at: wall(),
            change,
        }
    }

    async fn send(&self, event: TradeEvent) {
        let payload = codec::encode_event(&event);
        self.client.publish(subject::event(event.account), payload.into()).await.unwrap();
        self.client.flush().await.unwrap();
    }
}

async fn speak(client: async_nats::Client, shared: Arc<Mutex<Shared>>) {
    let mut every = tokio::time::interval(BEACON_EVERY);
    loop {
        every.tick().await;
        let beacon = {
            let shared = shared.lock();
            Beacon {
                account: shared.account,
                epoch: shared.epoch,
                seq: shared.seq,
                at: wall(),
                open_trades: u32::try_from(shared.book.positions.len()).unwrap(),
                open_pendings: 0,
                digest: shared.book.digest(),
                funds: None,
            }
        };
        let payload = codec::encode_beacon(&beacon);
        client.publish(subject::beacon(beacon.account), payload.into()).await.unwrap();
    }
}

async fn answer(
    client: async_nats::Client,
    mut requests: async_nats::Subscriber,
    shared: Arc<Mutex<Shared>>,
) {
    while let Some(request) = requests.next().await {
        let Some(reply) = request.reply else { continue };
        let snapshot = {
            let shared = shared.lock();
            MasterSnapshot {
                account: shared.account,
                epoch: shared.epoch,
                seq: shared.seq,
                at: wall(),
                book: shared.book.clone(),
                funds: None,
            }
        };
        for page in codec::encode_snapshot(&snapshot) {
            client.publish(reply.clone(), page.into()).await.unwrap();
        }
    }
}
