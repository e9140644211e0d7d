//! The limit: what the bus and the scheduler allow, with no copier code in between.
//!
//! Processes of the same layout as the system's: one publishes, one subscribes (or one does both,
//! on one connection, as a node does that leads and follows). The publisher's task is woken by its
//! control connection, as a session's is by its broker; it stamps, encodes and publishes each event
//! of a burst. The subscriber has one subscription, decodes once, and hands the event to a queue for
//! each follower; a task for each takes it and stamps. Runtime, client settings, event type and queues are those of a node.
//!
//! A second figure, the floor of any copier, adds what nobody can leave out: after its stamp each
//! task writes one line of an order's size to a connection of its own.
//!
//! Control lines: `publish COUNT`; `take` is answered with the samples in nanoseconds; `write 0|1`.

use bus::ClientSettings;
use devstack::{ManagedProcess, ProcessSpec};
use futures_util::StreamExt;
use lockstep::clock::monotonic_ns;
use parking_lot::Mutex;
use schemas::{
    AccountId, Change, Epoch, MasterPosition, MasterTicket, Micros, Seq, Side, Symbol, TradeEvent,
    codec, subject,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Tasks that are woken, as there are followers.
pub const FOLLOWERS: usize = 30;
/// Threads of a node's hot runtime.
const HOT_THREADS: usize = 2;
/// Messages of a feed that wait for a follower in a node.
const FEED_MESSAGES_MAX: usize = 8_192;
/// Bytes of an order of the paper broker's client, about.
const ORDER_BYTES: usize = 330;
/// The number under which the limit's events are published.
const MASTER: u64 = 999_999_999;
/// Samples of all tasks that there is room for without asking for more.
const SAMPLES: usize = 1 << 21;
/// Longest wait for a raw process to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for one to be there, with a connection for each of 10,000 tasks.
const START_LIMIT: Duration = Duration::from_secs(180);

/// What a raw process does.
#[derive(Debug, Clone, clap::Args)]
pub struct RawArgs {
    /// NATS server.
    #[arg(long)]
    nats: String,
    /// Where the bench listens for it.
    #[arg(long)]
    control: SocketAddr,
    /// Publishes.
    #[arg(long)]
    publisher: bool,
    /// Subscribes, and has tasks that are woken.
    #[arg(long)]
    subscriber: bool,
    /// Its tasks, one for each follower.
    #[arg(long, default_value_t = FOLLOWERS)]
    tasks: usize,
    /// Where its tasks write orders.
    #[arg(long)]
    sink: Option<SocketAddr>,
}

/// Runs a raw process until its control connection ends.
pub fn run(args: RawArgs) {
    lockstep::open_files::raise();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HOT_THREADS)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async move { tokio::spawn(serve(args)).await.unwrap() });
}

async fn serve(args: RawArgs) {
    let settings = ClientSettings::new(vec![args.nats], "raw-limit");
    let client = bus::connect(&settings).await.unwrap();
    let master = AccountId::new(MASTER).unwrap();
    let writes = Arc::new(AtomicBool::new(false));
    let samples = if args.subscriber {
        let messages = client.subscribe(subject::master_all(master)).await.unwrap();
        client.flush().await.unwrap();
        subscribe(messages, args.tasks, args.sink, Arc::clone(&writes)).await
    } else {
        Vec::new()
    };
    let control = TcpStream::connect(args.control).await.unwrap();
    control.set_nodelay(true).unwrap();
    let (from_bench, mut to_bench) = control.into_split();
    let mut lines = BufReader::new(from_bench).lines();
    let topic = async_nats::Subject::from(subject::event(master));
    let mut seq = Seq::ZERO;
    while let Ok(Some(line)) = lines.next_line().await {
        match line.split_once(' ') {
            Some(("publish", count)) => {
                for _ in 0..count.parse::<u32>().unwrap() {
                    seq = seq.next();
                    let payload = codec::encode_event(&event(master, seq));
                    client.publish(topic.clone(), payload.into()).await.unwrap();
                }
            }
            Some(("write", on)) => {
                writes.store(on == "1", Ordering::Relaxed);
                to_bench.write_all(b"ok\n").await.unwrap();
            }
            _ => {
                let taken: Vec<String> = samples
                    .iter()
                    .flat_map(|of_task: &Samples| std::mem::take(&mut *of_task.lock()))
                    .map(|ns| ns.to_string())
                    .collect();
                to_bench.write_all(format!("{}\n", taken.join(" ")).as_bytes()).await.unwrap();
            }
        }
    }
}

/// An event as a node publishes them; its time is the stamp before encoding.
fn event(master: AccountId, seq: Seq) -> TradeEvent {
    let lots = "0.10".parse().unwrap();
    let position = MasterPosition {
        ticket: MasterTicket::new(1_000_000 + seq.get()).unwrap(),
        symbol: Symbol::new("EURUSD").unwrap(),
        side: Side::Buy,
        lots,
        lots_at_open: lots,
        open_price: Some("1.10000".parse().unwrap()),
        stop_loss: None,
        take_profit: None,
        opened_at: Micros(1_700_000_000_000_000),
        contract_size: Some(rust_decimal::Decimal::from(100_000)),
        is_copy: false,
    };
    let at = Micros(i64::try_from(monotonic_ns()).unwrap());
    let epoch = Epoch::new(1_700_000_000_000_000).unwrap();
    TradeEvent { account: master, epoch, seq, at, change: Change::PositionOpened(position) }
}

type Samples = Arc<Mutex<Vec<u64>>>;

async fn subscribe(
    mut messages: async_nats::Subscriber,
    tasks: usize,
    sink: Option<SocketAddr>,
    writes: Arc<AtomicBool>,
) -> Vec<Samples> {
    let (mut all, mut queues) = (Vec::new(), Vec::new());
    for _ in 0..tasks {
        let (queue, mut waiting) = mpsc::channel::<Arc<TradeEvent>>(FEED_MESSAGES_MAX);
        let samples: Samples = Arc::new(Mutex::new(Vec::with_capacity(SAMPLES / tasks)));
        let (own, writes) = (Arc::clone(&samples), Arc::clone(&writes));
        let broker = match sink {
            Some(addr) => Some(TcpStream::connect(addr).await.unwrap()),
            None => None,
        };
        if let Some(broker) = &broker {
            broker.set_nodelay(true).unwrap();
            broker.writable().await.unwrap();
        }
        tokio::spawn(async move {
            let order = [b'x'; ORDER_BYTES];
            while let Some(event) = waiting.recv().await {
                let now = monotonic_ns();
                own.lock().push(now.saturating_sub(event.at.0 as u64));
                if let Some(broker) = broker.as_ref().filter(|_| writes.load(Ordering::Relaxed)) {
                    // A full socket would only make the floor look better.
                    assert_eq!(broker.try_write(&order).unwrap(), ORDER_BYTES);
                }
            }
        });
        all.push(samples);
        queues.push(queue);
    }
    tokio::spawn(async move {
        while let Some(message) = messages.next().await {
            let event = Arc::new(codec::decode_event(&message.payload).unwrap());
            for queue in &queues {
                queue.try_send(Arc::clone(&event)).unwrap();
            }
        }
    });
    all
}

/// Reads what is written to it, and throws it away: the place of a broker.
pub fn run_sink(control: SocketAddr) {
    lockstep::open_files::raise();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async move {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut bench = TcpStream::connect(control).await.unwrap();
        let line = format!("{}\n", listener.local_addr().unwrap());
        bench.write_all(line.as_bytes()).await.unwrap();
        let accepting = async {
            while let Ok((mut from, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut bytes = vec![0; 64 * 1024];
                    while from.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
                });
            }
        };
        let mut nothing = [0; 1];
        tokio::select! {
            () = accepting => {}
            _ = bench.read(&mut nothing) => {}
        }
    });
}

/// The limit, ready to be measured.
#[derive(Debug)]
pub struct Limit {
    publisher: Arc<tokio::sync::Mutex<Control>>,
    subscriber: Arc<tokio::sync::Mutex<Control>>,
    /// The reader of the orders.
    pub sink: ManagedProcess,
    _sink_control: TcpStream,
    _processes: Vec<ManagedProcess>,
}

#[derive(Debug)]
struct Control {
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
}

impl Control {
    async fn say(&mut self, line: &str) {
        self.write.write_all(line.as_bytes()).await.unwrap();
    }

    async fn ask(&mut self, line: &str) -> String {
        self.say(line).await;
        let answer = tokio::time::timeout(ANSWER_LIMIT, self.lines.next_line()).await;
        answer.expect("a raw process does not answer").unwrap().expect("a raw process ended")
    }
}

impl Limit {
    /// Starts its processes: two, or one that does both; with so many tasks that are woken.
    pub async fn start(nats: &str, is_one_process: bool, tasks: usize) -> Limit {
        let program = std::env::current_exe().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = listener.local_addr().unwrap().to_string();
        let tasks = tasks.to_string();
        let spec = |name: &str, words: &[&str]| {
            ProcessSpec::new(name, &program).args(words).args(["--control", &control])
        };
        let sink = spec("raw-sink", &["raw-sink"]).start().unwrap();
        let (sink_control, _) = listener.accept().await.unwrap();
        let mut sink_control = BufReader::new(sink_control);
        let mut sink_addr = String::new();
        sink_control.read_line(&mut sink_addr).await.unwrap();
        let start = async |name: &str, words: &[&str]| {
            let process = spec(name, &["raw", "--nats", nats])
                .args(words)
                .args(["--sink", sink_addr.trim(), "--tasks", &tasks])
                .start()
                .unwrap();
            let accepted = tokio::time::timeout(START_LIMIT, listener.accept()).await;
            let (stream, _) =
                accepted.unwrap_or_else(|_| panic!("{}", process.log_tail())).unwrap();
            stream.set_nodelay(true).unwrap();
            let (read, write) = stream.into_split();
            let control = Control { lines: BufReader::new(read).lines(), write };
            (process, Arc::new(tokio::sync::Mutex::new(control)))
        };
        let (first, publisher, rest) = if is_one_process {
            let (process, control) = start("raw", &["--publisher", "--subscriber"]).await;
            (process, Arc::clone(&control), (None, control))
        } else {
            let (process, control) = start("raw-publisher", &["--publisher"]).await;
            let (other, subscriber) = start("raw-subscriber", &["--subscriber"]).await;
            (process, control, (Some(other), subscriber))
        };
        let (second, subscriber) = rest;
        let limit = Limit {
            publisher,
            subscriber,
            sink,
            _sink_control: sink_control.into_inner(),
            _processes: std::iter::once(first).chain(second).collect(),
        };
        limit.prove().await;
        limit
    }

    /// Publishes until something arrives: only that proves a subscription.
    async fn prove(&self) {
        crate::world::until("the limit's subscription", ANSWER_LIMIT, async || {
            self.publish(1).await;
            (!self.take().await.is_empty()).then_some(())
        })
        .await;
    }

    /// Publishes events back to back.
    pub async fn publish(&self, count: usize) {
        self.publisher.lock().await.say(&format!("publish {count}\n")).await;
    }

    /// Whether tasks write an order each, after their stamp.
    pub async fn write(&self, on: bool) {
        self.subscriber.lock().await.ask(&format!("write {}\n", u8::from(on))).await;
    }

    /// The samples since the last call, in nanoseconds.
    pub async fn take(&self) -> Vec<u64> {
        let line = self.subscriber.lock().await.ask("take\n").await;
        line.split_whitespace().map(|ns| ns.parse().unwrap()).collect()
    }
}
