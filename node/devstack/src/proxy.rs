//! A TCP proxy that can be told to fail, between one client and one server.
//!
//! Decides: what happens to connections and bytes, by [`FaultMode`].
//! In: the server's address, mode switches, another server. Out: an address to give to the client.
//!
//! Invariants:
//! 1. A switch is in effect when [`FaultProxy::set_mode`] returns.
//! 2. Bytes are delayed or held, never dropped, reordered or changed, unless the connection dies.
//! 3. The port stays ours while connections are refused.
//! 4. What happens to one side of a held connection (its end included) is not seen by the other
//!    side before the hold ends, as with a cable that is out.
//! 5. What is held of a side that has reset its connection is dropped: a kernel does not send
//!    again what its program has given up.
//!
//! Not covered: loss inside a connection; TCP does not show it to a program.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::DevstackError;

/// Bytes are read in pieces of this size, and so many pieces are held a direction before the
/// sender feels it. A megabyte is more than any statement or burst of events in a test.
const PIECE_BYTES: usize = 16 * 1024;
const PIECES_HELD: usize = 64;
/// Connections the kernel keeps until they are accepted.
const BACKLOG: u32 = 1024;

/// What the proxy does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultMode {
    /// Everything goes through.
    Pass,
    /// Connections are accepted and stay open, bytes are held in both directions; they arrive when
    /// the mode changes.
    BlackHole,
    /// Open connections are reset, new ones are refused.
    Refuse,
    /// Every piece arrives so much later, in each direction.
    Latency(Duration),
    /// Connections stay open; bytes go through in one direction and are held in this one.
    HalfOpen(Direction),
}

/// Where bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

impl FaultMode {
    fn holds(self, direction: Direction) -> bool {
        match self {
            FaultMode::BlackHole => true,
            FaultMode::HalfOpen(dead) => dead == direction,
            FaultMode::Pass | FaultMode::Refuse | FaultMode::Latency(_) => false,
        }
    }
}

/// A running proxy. It ends with the value, and with the runtime it was started in.
#[derive(Debug)]
pub struct FaultProxy {
    addr: SocketAddr,
    orders: mpsc::Sender<Order>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Order {
    kind: OrderKind,
    done: oneshot::Sender<io::Result<()>>,
}

#[derive(Debug, Clone, Copy)]
enum OrderKind {
    Mode(FaultMode),
    Reset,
    Target(SocketAddr),
}

#[derive(Debug, Clone, Copy)]
struct Wanted {
    mode: FaultMode,
    /// Connections older than this are to be reset.
    generation: u64,
}

impl FaultProxy {
    /// Listens at a free port and passes everything to `target`, until told otherwise.
    pub async fn start(target: SocketAddr) -> Result<Self, DevstackError> {
        let failed =
            |source| DevstackError::Io { doing: format!("starting a proxy to {target}"), source };
        // Bound and never listening: it keeps the port while the listener is closed.
        let reserved = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
        let addr = reserved.local_addr().map_err(failed)?;
        let listener = listen(addr).map_err(failed)?;
        let (orders, orders_in) = mpsc::channel(1);
        let wanted = Wanted { mode: FaultMode::Pass, generation: 0 };
        let serving = Serving {
            target,
            addr,
            _reserved: reserved,
            listener: Some(listener),
            wanted: watch::Sender::new(wanted),
            connections: JoinSet::new(),
        };
        Ok(Self { addr, orders, task: tokio::spawn(serving.run(orders_in)) })
    }

    /// Where the client connects.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Switches; when it returns, the new mode is in effect for old and new connections.
    pub async fn set_mode(&self, mode: FaultMode) -> Result<(), DevstackError> {
        self.order(OrderKind::Mode(mode)).await
    }

    /// Resets every open connection once; new ones are treated as the mode says.
    pub async fn reset_connections(&self) -> Result<(), DevstackError> {
        self.order(OrderKind::Reset).await
    }

    /// Sends new connections to another server, and resets the open ones.
    pub async fn retarget(&self, target: SocketAddr) -> Result<(), DevstackError> {
        self.order(OrderKind::Target(target)).await
    }

    async fn order(&self, kind: OrderKind) -> Result<(), DevstackError> {
        let (done, answer) = oneshot::channel();
        let gone = DevstackError::ProxyGone { addr: self.addr };
        if self.orders.send(Order { kind, done }).await.is_err() {
            return Err(gone);
        }
        match answer.await {
            Ok(result) => result.map_err(|source| DevstackError::Io {
                doing: format!("switching the proxy at {} to {kind:?}", self.addr),
                source,
            }),
            Err(_) => Err(gone),
        }
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // Takes the connections along: their tasks belong to it.
        self.task.abort();
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    bind(addr)?.listen(BACKLOG)
}

struct Serving {
    target: SocketAddr,
    addr: SocketAddr,
    _reserved: TcpSocket,
    listener: Option<TcpListener>,
    wanted: watch::Sender<Wanted>,
    connections: JoinSet<()>,
}

impl Serving {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        loop {
            tokio::select! {
                biased;
                order = orders.recv() => {
                    let Some(order) = order else { return };
                    let result = self.obey(order.kind).await;
                    let _ = order.done.send(result);
                }
                client = accept(self.listener.as_ref()) => {
                    let wanted = self.wanted.subscribe();
                    self.connections.spawn(serve(client, self.target, wanted));
                }
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    async fn obey(&mut self, order: OrderKind) -> io::Result<()> {
        match order {
            OrderKind::Mode(FaultMode::Refuse) => {
                // The kernel resets what it has accepted for us and refuses what comes.
                self.listener = None;
                self.wanted.send_modify(|wanted| wanted.mode = FaultMode::Refuse);
                self.reset_all().await;
            }
            OrderKind::Mode(mode) => {
                if self.listener.is_none() {
                    self.listener = Some(listen(self.addr)?);
                }
                self.wanted.send_modify(|wanted| wanted.mode = mode);
            }
            OrderKind::Reset => self.reset_all().await,
            OrderKind::Target(target) => {
                self.target = target;
                self.reset_all().await;
            }
        }
        Ok(())
    }

    async fn reset_all(&mut self) {
        self.wanted.send_modify(|wanted| wanted.generation += 1);
        while self.connections.join_next().await.is_some() {}
    }
}

async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        // An error concerns one connection that went away, or a moment without descriptors.
        match listener.accept().await {
            Ok((client, _)) => return client,
            Err(_) => tokio::time::sleep(crate::process::POLL).await,
        }
    }
}

/// Carries one connection to its end; it is reset when the proxy says so or a side was reset.
async fn serve(mut client: TcpStream, target: SocketAddr, wanted: watch::Receiver<Wanted>) {
    let born = wanted.borrow().generation;
    let reset = {
        let mut wanted = wanted.clone();
        async move {
            // An error means that the proxy is gone, which ends its connections too.
            let _ = wanted.wait_for(|wanted| wanted.generation != born).await;
        }
    };
    tokio::pin!(reset);
    let dialled = tokio::select! {
        biased;
        () = &mut reset => None,
        server = dial(target, wanted.clone()) => server.ok(),
    };
    let Some(mut server) = dialled else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let in_order = {
        let (client_in, client_out) = client.split();
        let (server_in, server_out) = server.split();
        let both = async {
            tokio::try_join!(
                carry(client_in, server_out, wanted.clone(), Direction::ToServer),
                carry(server_in, client_out, wanted.clone(), Direction::ToClient),
            )
        };
        tokio::select! {
            biased;
            () = &mut reset => false,
            ended = both => ended.is_ok(),
        }
    };
    if !in_order {
        let _ = client.set_zero_linger();
        let _ = server.set_zero_linger();
    }
}

async fn dial(target: SocketAddr, mut wanted: watch::Receiver<Wanted>) -> io::Result<TcpStream> {
    open(&mut wanted, Direction::ToServer).await;
    TcpStream::connect(target).await
}

/// Waits while the mode holds bytes of this direction.
async fn open(wanted: &mut watch::Receiver<Wanted>, direction: Direction) {
    let _ = wanted.wait_for(|wanted| !wanted.mode.holds(direction)).await;
}

/// One direction: a reader that stamps pieces with the time they are due, and a writer.
async fn carry(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    wanted: watch::Receiver<Wanted>,
    direction: Direction,
) -> io::Result<()> {
    let source_is_gone = AtomicBool::new(false);
    let source_is_gone = &source_is_gone;
    let (pieces, mut pieces_in) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES_HELD);
    let mut at_reader = wanted.clone();
    let reader = async move {
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            let count = match from.read(&mut piece).await {
                Ok(count) => count,
                Err(error) => {
                    source_is_gone.store(true, Ordering::Relaxed);
                    open(&mut at_reader, direction).await;
                    return Err(error);
                }
            };
            if count == 0 {
                return Ok(());
            }
            piece.truncate(count);
            let latency = match at_reader.borrow().mode {
                FaultMode::Latency(latency) => latency,
                FaultMode::Pass
                | FaultMode::BlackHole
                | FaultMode::Refuse
                | FaultMode::HalfOpen(_) => Duration::ZERO,
            };
            if pieces.send((Instant::now() + latency, piece)).await.is_err() {
                return Ok(());
            }
        }
    };
    let mut at_writer = wanted;
    let writer = async move {
        while let Some((due, piece)) = pieces_in.recv().await {
            sleep_until(due).await;
            open(&mut at_writer, direction).await;
            if source_is_gone.load(Ordering::Relaxed) {
                // The reader ends the connection.
                return std::future::pending().await;
            }
            to.write_all(&piece).await?;
        }
        open(&mut at_writer, direction).await;
        to.shutdown().await
    };
    tokio::try_join!(reader, writer).map(drop)
}
