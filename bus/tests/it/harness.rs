//! A master, a follower that checks the promises of its stream, and waits with a limit.

use bus::{
    ClientSettings, Closing, DoubtReason, Feed, FeedHandle, FeedMessage, FeedSettings, Publisher,
    PublisherHandle, PublisherSettings, PublisherStatus, start_epoch_now,
};
use schemas::{
    AccountId, Book, Epoch, MasterPosition, MasterTicket, Micros, Seq, Side, Symbol, codec, subject,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

pub(crate) const MASTER: AccountId = AccountId::MIN;

/// Limit of waits that should take milliseconds; generous, because machines build meanwhile.
pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) fn account(n: u64) -> AccountId {
    AccountId::new(n).unwrap()
}

pub(crate) fn ticket(n: u64) -> MasterTicket {
    MasterTicket::new(n).unwrap()
}

#[allow(clippy::disallowed_methods, reason = "a test stamps events like a session does")]
pub(crate) fn wall() -> Micros {
    Micros(std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64)
}

pub(crate) fn position(n: u64) -> MasterPosition {
    MasterPosition {
        ticket: ticket(n),
        symbol: Symbol::new("EURUSD").unwrap(),
        side: Side::Buy,
        lots: "0.1".parse().unwrap(),
        lots_at_open: "0.1".parse().unwrap(),
        open_price: Some("1.08512".parse().unwrap()),
        stop_loss: None,
        take_profit: None,
        opened_at: Micros(1_700_000_000_000_000),
        contract_size: None,
        is_copy: false,
    }
}

pub(crate) fn book_of(tickets: impl IntoIterator<Item = u64>) -> Book {
    let positions = tickets.into_iter().map(|n| (ticket(n), position(n))).collect();
    Book { positions, ..Book::default() }
}

/// Polls until the condition holds; says what it waited for when it does not.
pub(crate) async fn eventually(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Connects as a node does, and waits for the server.
pub(crate) async fn client(url: &str) -> async_nats::Client {
    let client = bus::connect(&ClientSettings::new(vec![url.to_owned()], "test")).await.unwrap();
    eventually(SOON, "connected", || is_connected(&client)).await;
    client
}

pub(crate) fn is_connected(client: &async_nats::Client) -> bool {
    client.connection_state() == async_nats::connection::State::Connected
}

/// A master whose session reads its whole state after every change.
pub(crate) struct Master {
    pub(crate) handle: PublisherHandle,
    pub(crate) book: Book,
    pub(crate) permit: Arc<AtomicBool>,
}

impl Master {
    pub(crate) fn start(client: &async_nats::Client, book: Book) -> Master {
        Master::start_at(client, book, start_epoch_now(None, None))
    }

    pub(crate) fn start_at(client: &async_nats::Client, book: Book, epoch: Epoch) -> Master {
        Master::start_with(client, book, epoch, PublisherSettings::default())
    }

    pub(crate) fn start_with(
        client: &async_nats::Client,
        book: Book,
        epoch: Epoch,
        settings: PublisherSettings,
    ) -> Master {
        let permit = Arc::new(AtomicBool::new(true));
        let may_publish = Arc::clone(&permit);
        let handle = Publisher::start(
            client.clone(),
            MASTER,
            epoch,
            settings,
            Arc::new(move || may_publish.load(Ordering::Relaxed)),
            &Handle::current(),
        );
        let master = Master { handle, book, permit };
        master.observe();
        master
    }

    /// Started, and speaking.
    pub(crate) async fn speaking(client: &async_nats::Client, book: Book) -> Master {
        let master = Master::start(client, book);
        eventually(SOON, "the master speaks", || master.epoch_spoken().is_some()).await;
        master
    }

    pub(crate) fn observe(&self) -> usize {
        self.handle.observe(wall(), self.book.clone(), &BTreeMap::<_, Closing>::new())
    }

    pub(crate) fn open(&mut self, n: u64) -> usize {
        self.book.positions.insert(ticket(n), position(n));
        self.observe()
    }

    pub(crate) fn close(&mut self, n: u64) -> usize {
        self.book.positions.remove(&ticket(n));
        self.observe()
    }

    pub(crate) fn status(&self) -> PublisherStatus {
        *self.handle.status().borrow()
    }

    pub(crate) fn epoch_spoken(&self) -> Option<Epoch> {
        match self.status() {
            PublisherStatus::Publishing { epoch } => Some(epoch),
            _ => None,
        }
    }
}

/// One follower: holds what its stream led to, and checks S11 at every message.
pub(crate) struct Follower {
    receiver: mpsc::Receiver<FeedMessage>,
    pub(crate) book: Book,
    pub(crate) position: Option<(Epoch, Seq)>,
    pub(crate) doubtful: bool,
    pub(crate) doubts: Vec<DoubtReason>,
    pub(crate) snapshots: Vec<DoubtReason>,
    pub(crate) events: u64,
}

impl Follower {
    pub(crate) fn attach(feed: &FeedHandle, number: u64, queue: usize) -> Follower {
        let (sender, follower) = Follower::new(queue);
        feed.attach(account(number), sender);
        follower
    }

    pub(crate) fn new(queue: usize) -> (mpsc::Sender<FeedMessage>, Follower) {
        let (sender, receiver) = mpsc::channel(queue);
        let follower = Follower {
            receiver,
            book: Book::default(),
            position: None,
            doubtful: true,
            doubts: Vec::new(),
            snapshots: Vec::new(),
            events: 0,
        };
        (sender, follower)
    }

    /// A feed of its own on this connection, with this follower.
    pub(crate) fn join(client: &async_nats::Client) -> (FeedHandle, Follower) {
        let feed = Feed::open(client.clone(), MASTER, FeedSettings::default(), &Handle::current());
        let follower = Follower::attach(&feed, 100, 100_000);
        (feed, follower)
    }

    fn take(&mut self, message: FeedMessage) {
        match message {
            FeedMessage::Event { event, doubtful: false, .. } => {
                let (epoch, seq) = self.position.expect("a snapshot came first");
                assert_eq!((event.epoch, event.seq), (epoch, seq.next()), "out of order");
                self.position = Some((event.epoch, event.seq));
                self.book.apply(&event.change);
                self.events += 1;
            }
            FeedMessage::Event { event, doubtful: true, .. } => {
                assert!(event.change.is_ending());
                self.book.apply(&event.change);
            }
            FeedMessage::Snapshot(snapshot, reason) => {
                let position = Some((snapshot.epoch, snapshot.seq));
                assert!(position >= self.position, "{position:?} after {:?}", self.position);
                self.position = position;
                self.book = snapshot.book.clone();
                self.doubtful = false;
                self.snapshots.push(reason);
            }
            FeedMessage::Doubt(reason) => {
                self.doubtful = true;
                self.doubts.push(reason);
            }
            FeedMessage::Funds(_) => {}
        }
    }

    /// Takes messages until the condition holds.
    pub(crate) async fn until(
        &mut self,
        limit: Duration,
        what: &str,
        mut holds: impl FnMut(&Follower) -> bool,
    ) {
        let deadline = tokio::time::Instant::now() + limit;
        while !holds(self) {
            match tokio::time::timeout_at(deadline, self.receiver.recv()).await {
                Ok(Some(message)) => self.take(message),
                Ok(None) => panic!("the feed ended while waiting for: {what}"),
                Err(_) => panic!(
                    "not within {limit:?}: {what}; at {:?}, {} trades, doubts {:?}",
                    self.position,
                    self.book.positions.len(),
                    self.doubts
                ),
            }
        }
    }

    pub(crate) async fn until_joined(&mut self) {
        self.until(SOON, "the first snapshot", |f| !f.doubtful).await;
    }

    /// Until the follower has the master's state, and trusts it.
    pub(crate) async fn until_equal(&mut self, limit: Duration, master: &Master) {
        let handle = master.handle.clone();
        self.until(limit, "the master's state", |follower| {
            !follower.doubtful
                && follower.position == Some(handle.position())
                && follower.book == master.book
        })
        .await;
    }
}

/// Listens to everything of the master, past all judgement; returns once the server knows it.
pub(crate) async fn eavesdrop(client: &async_nats::Client) -> async_nats::Subscriber {
    let messages = client.subscribe(subject::master_all(MASTER)).await.unwrap();
    // Asking our own inbox is answered only after the server took the subscription above.
    let inbox = client.new_inbox();
    let mut echo = client.subscribe(inbox.clone()).await.unwrap();
    client.publish(inbox, "echo".into()).await.unwrap();
    use futures_util::StreamExt;
    tokio::time::timeout(SOON, echo.next()).await.unwrap().unwrap();
    messages
}

/// Asks for the snapshot without a feed; the subscription receives the pages.
pub(crate) async fn ask(client: &async_nats::Client) -> async_nats::Subscriber {
    let inbox = client.new_inbox();
    let replies = client.subscribe(inbox.clone()).await.unwrap();
    let payload = codec::encode_snapshot_request(MASTER, None).into();
    client.publish_with_reply(subject::snapshot(MASTER), inbox, payload).await.unwrap();
    replies
}
