//! The socket around the broker: accepts, reads lines, writes lines.
//!
//! Decides nothing about trading. An order is carried out when its line is read, unless a fault
//! holds it up; its answer leaves after the answer delay, and holds up neither reads nor other
//! answers.
//!
//! Invariants:
//! 1. Lines without delay leave in the order they were made; delayed ones when they are due,
//!    so a push about an order usually comes before the order's answer.
//! 2. A connection that is too slow is cut off with a reset (`OUTGOING_LINES_MAX`).
//! 3. If the ledger file fails, the broker stops and says so.

use crate::core::{Core, Outgoing};
use crate::error::PaperError;
use crate::faults::{Settings, SettingsChange};
use crate::ledger_file::LedgerFile;
use crate::lines::{Line, LineBuffer};
use crate::protocol::{FieldError, REQUEST_LINE_BYTES_MAX};
use crate::socket;
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

/// Most lines that wait to be written to one connection; past it the connection is cut off.
pub const OUTGOING_LINES_MAX: usize = 32_768;
/// Most delayed answers of one connection; past it the connection is cut off.
pub const DELAYED_ANSWERS_MAX: usize = 65_536;
/// Free places that must be there before the next request is read, so that a client that asks
/// faster than it reads is slowed down before it is cut off.
const OUTGOING_LINES_RESERVE: usize = 8_192;
/// Most connections at a time: a node of 10,000 accounts and some others.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Bytes written in one go at most before new lines are looked at.
const WRITE_BYTES_MAX: usize = 256 * 1024;
/// Pause after a failed accept (too many open files), so that it does not spin.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How a broker is started.
#[derive(Debug, Clone)]
pub struct PaperConfig {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where to append the ledger; must be a new or empty file. Absent keeps it in memory only.
    pub ledger_path: Option<PathBuf>,
    /// Settings at the start; a driver can change them later.
    pub settings: Settings,
    /// What the shares and spans of faults are drawn from.
    pub seed: u64,
}

/// A broker that listens and does not serve yet.
#[derive(Debug)]
pub struct PaperServer {
    listener: TcpListener,
    addr: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    core: Mutex<Core>,
    /// Something is due earlier than it was.
    sooner: Notify,
    stop: watch::Sender<bool>,
    failure: Mutex<Option<PaperError>>,
}

/// Listens, tells where through `on_ready`, and serves until `shutdown` is done.
pub async fn run(
    config: PaperConfig,
    on_ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), PaperError> {
    let server = PaperServer::bind(config).await?;
    on_ready(server.local_addr());
    server.serve(shutdown).await
}

impl PaperServer {
    /// Listens and opens the ledger file.
    pub async fn bind(config: PaperConfig) -> Result<PaperServer, PaperError> {
        let failed = |source| PaperError::Listen { addr: config.listen.to_string(), source };
        let settings =
            config.settings.changed(SettingsChange::default()).map_err(PaperError::Config)?;
        let file = config.ledger_path.as_deref().map(LedgerFile::create).transpose()?;
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let core = Mutex::new(Core::new(settings, config.seed, file));
        let (stop, failure) = (watch::Sender::new(false), Mutex::new(None));
        let shared = Arc::new(Shared { core, sooner: Notify::new(), stop, failure });
        Ok(PaperServer { listener, addr, shared })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves until `shutdown` is done or the ledger file fails; then every connection is closed.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), PaperError> {
        tracing::info!(addr = %self.addr, "paper broker listens");
        let mut stopped = self.shared.stop.subscribe();
        tokio::spawn(due_loop(self.shared.clone()));
        tokio::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut shutdown => break,
                () = until_stopped(&mut stopped) => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => self.welcome(stream, from),
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
        self.shared.stop.send_replace(true);
        let failure = self.shared.failure.lock().take();
        failure.map_or(Ok(()), Err)
    }

    fn welcome(&self, stream: TcpStream, from: SocketAddr) {
        if self.shared.core.lock().connections() >= CONNECTIONS_MAX {
            tracing::warn!(%from, "refused: {CONNECTIONS_MAX} connections are open");
            return;
        }
        if let Err(error) = socket::tune(&stream) {
            tracing::warn!(%from, %error, "a connection ended before it was served");
            return;
        }
        let (sender, receiver) = mpsc::channel(OUTGOING_LINES_MAX);
        let kick = Arc::new(Notify::new());
        let id = self.shared.core.lock().connect(sender.clone(), kick.clone());
        tracing::debug!(connection = id, %from, "connected");
        let stream = Arc::new(stream);
        tokio::spawn(write_loop(stream.clone(), receiver, kick, self.shared.stop.subscribe()));
        tokio::spawn(read_loop(self.shared.clone(), stream, id, sender.downgrade()));
    }
}

impl Shared {
    /// The ledger cannot be written: nothing that happens from here on would be evidence.
    fn fail(&self, error: PaperError) {
        tracing::error!(%error, "the paper broker stops: its ledger cannot be written");
        *self.failure.lock() = Some(error);
        self.stop.send_replace(true);
    }
}

/// Does what is due without being asked: orders and lists that were held up.
async fn due_loop(shared: Arc<Shared>) {
    let mut stopped = shared.stop.subscribe();
    loop {
        let ran = shared.core.lock().run_due();
        let wait = match ran {
            Ok(wait) => wait,
            Err(error) => return shared.fail(error),
        };
        tokio::select! {
            biased;
            () = until_stopped(&mut stopped) => return,
            () = shared.sooner.notified() => {}
            () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
        }
    }
}

/// A sender that is gone means the same as a stop.
async fn until_stopped(stopped: &mut watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stop| *stop).await;
}

async fn read_loop(
    shared: Arc<Shared>,
    stream: Arc<TcpStream>,
    id: u64,
    outgoing: mpsc::WeakSender<Outgoing>,
) {
    let mut stopped = shared.stop.subscribe();
    let mut lines = LineBuffer::new(REQUEST_LINE_BYTES_MAX);
    loop {
        tokio::select! {
            biased;
            () = until_stopped(&mut stopped) => break,
            ready = stream.readable() => if ready.is_err() { break },
        }
        match stream.try_read_buf(lines.space()) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => {
                tracing::debug!(connection = id, %error, "connection lost");
                break;
            }
        }
        if !take_lines(&shared, &mut lines, id, &outgoing).await {
            break;
        }
    }
    let disconnected = shared.core.lock().disconnect(id);
    if let Err(error) = disconnected {
        shared.fail(error);
    }
    tracing::debug!(connection = id, "disconnected");
}

/// Returns whether the connection goes on.
async fn take_lines(
    shared: &Shared,
    lines: &mut LineBuffer,
    id: u64,
    outgoing: &mpsc::WeakSender<Outgoing>,
) -> bool {
    while let Some(line) = lines.next() {
        // Holds the channel open for this check alone: the core decides when a connection ends.
        let Some(sender) = outgoing.upgrade() else { return false };
        if sender.capacity() < OUTGOING_LINES_RESERVE
            && sender.reserve_many(OUTGOING_LINES_RESERVE).await.is_err()
        {
            return false;
        }
        drop(sender);
        let mut core = shared.core.lock();
        let due = core.next_due();
        let taken = match line {
            Line::Complete(line) => core.take_line(id, &line),
            Line::TooLong => {
                let text = format!("must be at most {REQUEST_LINE_BYTES_MAX} bytes");
                core.refuse(id, None, &FieldError::new("line", "", text));
                Ok(())
            }
        };
        if core.next_due() != due {
            shared.sooner.notify_one();
        }
        drop(core);
        if let Err(error) = taken {
            shared.fail(error);
            return false;
        }
    }
    true
}

/// Answers that wait for their time.
#[derive(Debug, Default)]
struct Delayed {
    by_due: BTreeMap<(Instant, u64), Bytes>,
    count: u64,
}

impl Delayed {
    fn add(&mut self, outgoing: Outgoing) {
        self.count += 1;
        self.by_due.insert((Instant::now() + outgoing.delay, self.count), outgoing.line);
    }

    fn next_due(&self) -> Option<Instant> {
        self.by_due.keys().next().map(|(due, _)| *due)
    }

    fn take_due(&mut self, now: Instant, out: &mut BytesMut) {
        while let Some(entry) = self.by_due.first_entry() {
            if entry.key().0 > now {
                return;
            }
            out.extend_from_slice(&entry.remove());
        }
    }
}

/// Writes until nothing is left to write and nobody can add to it, or it is cut off.
async fn write_loop(
    stream: Arc<TcpStream>,
    mut incoming: mpsc::Receiver<Outgoing>,
    kick: Arc<Notify>,
    mut stopped: watch::Receiver<bool>,
) {
    let writing = write_lines(&stream, &mut incoming);
    tokio::select! {
        biased;
        () = kick.notified() => {}
        () = until_stopped(&mut stopped) => {}
        written = writing => match written {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, "a connection does not take what is written"),
        },
    }
    socket::abort(&stream);
}

async fn write_lines(
    stream: &TcpStream,
    incoming: &mut mpsc::Receiver<Outgoing>,
) -> std::io::Result<()> {
    let (mut delayed, mut out, mut is_open) = (Delayed::default(), BytesMut::new(), true);
    while is_open || !delayed.by_due.is_empty() {
        let due = delayed.next_due();
        tokio::select! {
            biased;
            received = incoming.recv(), if is_open => match received {
                Some(outgoing) => sort_in(outgoing, &mut delayed, &mut out),
                None => is_open = false,
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        while out.len() < WRITE_BYTES_MAX
            && let Ok(outgoing) = incoming.try_recv()
        {
            sort_in(outgoing, &mut delayed, &mut out);
        }
        if delayed.by_due.len() > DELAYED_ANSWERS_MAX {
            return Err(std::io::Error::other("too many answers wait for their time"));
        }
        delayed.take_due(Instant::now(), &mut out);
        write_all(stream, &mut out).await?;
    }
    Ok(())
}

fn sort_in(outgoing: Outgoing, delayed: &mut Delayed, out: &mut BytesMut) {
    if outgoing.delay.is_zero() {
        out.extend_from_slice(&outgoing.line);
    } else {
        delayed.add(outgoing);
    }
}

async fn write_all(stream: &TcpStream, out: &mut BytesMut) -> std::io::Result<()> {
    while !out.is_empty() {
        stream.writable().await?;
        match stream.try_write(out) {
            Ok(written) => drop(out.split_to(written)),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
