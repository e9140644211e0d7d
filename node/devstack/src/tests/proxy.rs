use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{LIMIT, eventually};
use crate::{Direction, FaultMode, FaultProxy};

/// Long enough to be sure that nothing comes, which would come in a millisecond.
const QUIET: Duration = Duration::from_millis(200);

/// A server that sends back what it gets, and closes when the client does.
struct Echo {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Echo {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                    let _ = write.shutdown().await;
                });
            }
        });
        Self { addr, task }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn ask(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
}

async fn answer(stream: &mut TcpStream, text: &str) {
    let mut bytes = vec![0; text.len()];
    timeout(LIMIT, stream.read_exact(&mut bytes)).await.unwrap().unwrap();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
}

async fn is_quiet(stream: &mut TcpStream) -> bool {
    timeout(QUIET, stream.read_u8()).await.is_err()
}

async fn connected() -> (Echo, FaultProxy, TcpStream) {
    let echo = Echo::start().await;
    let proxy = FaultProxy::start(echo.addr).await.unwrap();
    let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
    ask(&mut stream, "hello").await;
    answer(&mut stream, "hello").await;
    (echo, proxy, stream)
}

#[tokio::test]
async fn everything_passes_in_order_and_the_end_too() {
    let (_echo, _proxy, stream) = connected().await;
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let (mut read, mut write) = stream.into_split();
    let expected = sent.clone();
    let writer = tokio::spawn(async move {
        write.write_all(&sent).await.unwrap();
        write.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    timeout(LIMIT, read.read_to_end(&mut got)).await.unwrap().unwrap();
    writer.await.unwrap();
    assert!(got == expected, "{} bytes of {}", got.len(), expected.len());
}

#[tokio::test]
async fn a_black_hole_holds_bytes_and_new_connections_and_gives_them_later() {
    let (_echo, proxy, mut old) = connected().await;
    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    ask(&mut old, "one").await;
    let mut new = TcpStream::connect(proxy.addr()).await.unwrap();
    ask(&mut new, "two").await;
    assert!(is_quiet(&mut old).await && is_quiet(&mut new).await);
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    answer(&mut old, "one").await;
    answer(&mut new, "two").await;
}

#[tokio::test]
async fn a_black_hole_hides_the_end_of_one_side_from_the_other() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await.unwrap();
    for reset in [false, true] {
        let client = TcpStream::connect(proxy.addr()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        proxy.set_mode(FaultMode::BlackHole).await.unwrap();
        if reset {
            client.set_zero_linger().unwrap();
        }
        drop(client);
        assert!(is_quiet(&mut server).await);
        proxy.set_mode(FaultMode::Pass).await.unwrap();
        let end = timeout(LIMIT, server.read_u8()).await.unwrap().unwrap_err();
        let expected = if reset { ErrorKind::ConnectionReset } else { ErrorKind::UnexpectedEof };
        assert_eq!(end.kind(), expected);
    }
}

#[tokio::test]
async fn refusing_resets_what_is_open_and_refuses_what_comes_until_it_passes_again() {
    let (_echo, proxy, mut stream) = connected().await;
    for _ in 0..3 {
        proxy.set_mode(FaultMode::Refuse).await.unwrap();
        let end = timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap_err();
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        let refused = TcpStream::connect(proxy.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        proxy.set_mode(FaultMode::Pass).await.unwrap();
        stream = TcpStream::connect(proxy.addr()).await.unwrap();
        ask(&mut stream, "again").await;
        answer(&mut stream, "again").await;
    }
}

#[tokio::test]
async fn a_black_hole_can_turn_into_a_refusal() {
    let (_echo, proxy, mut stream) = connected().await;
    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    ask(&mut stream, "lost").await;
    let mut waiting = TcpStream::connect(proxy.addr()).await.unwrap();
    proxy.set_mode(FaultMode::Refuse).await.unwrap();
    for stream in [&mut stream, &mut waiting] {
        assert!(timeout(LIMIT, stream.read_u8()).await.unwrap().is_err());
    }
}

#[tokio::test]
async fn a_reset_ends_open_connections_and_takes_new_ones() {
    let (_echo, proxy, mut stream) = connected().await;
    proxy.reset_connections().await.unwrap();
    let end = timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
    ask(&mut stream, "new").await;
    answer(&mut stream, "new").await;
}

#[tokio::test]
async fn a_half_open_connection_carries_bytes_one_way_and_the_rest_later() {
    let (_echo, proxy, mut stream) = connected().await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let other = FaultProxy::start(listener.local_addr().unwrap()).await.unwrap();
    let mut client = TcpStream::connect(other.addr()).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    for (dead, alive_is_client) in [(Direction::ToServer, false), (Direction::ToClient, true)] {
        other.set_mode(FaultMode::HalfOpen(dead)).await.unwrap();
        ask(&mut client, "to the server").await;
        ask(&mut server, "to the client").await;
        if alive_is_client {
            answer(&mut server, "to the server").await;
            assert!(is_quiet(&mut client).await);
        } else {
            answer(&mut client, "to the client").await;
            assert!(is_quiet(&mut server).await);
        }
        other.set_mode(FaultMode::Pass).await.unwrap();
        if alive_is_client {
            answer(&mut client, "to the client").await;
        } else {
            answer(&mut server, "to the server").await;
        }
    }
    // And of an echo nothing comes back either way.
    for dead in [Direction::ToServer, Direction::ToClient] {
        proxy.set_mode(FaultMode::HalfOpen(dead)).await.unwrap();
        ask(&mut stream, "echo").await;
        assert!(is_quiet(&mut stream).await);
        proxy.set_mode(FaultMode::Pass).await.unwrap();
        answer(&mut stream, "echo").await;
    }
}

#[tokio::test]
async fn what_is_held_of_a_side_that_has_reset_never_arrives() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await.unwrap();
    for mode in [FaultMode::BlackHole, FaultMode::HalfOpen(Direction::ToServer)] {
        for _ in 0..20 {
            let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            proxy.set_mode(mode).await.unwrap();
            ask(&mut client, "given up").await;
            tokio::task::yield_now().await;
            client.set_zero_linger().unwrap();
            drop(client);
            assert!(timeout(Duration::from_millis(20), server.read_u8()).await.is_err());
            proxy.set_mode(FaultMode::Pass).await.unwrap();
            let end = timeout(LIMIT, server.read_u8()).await.unwrap().unwrap_err();
            assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        }
    }
}

#[tokio::test]
async fn another_server_takes_the_new_connections_and_the_old_ones_are_reset() {
    let (_echo, proxy, mut stream) = connected().await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    proxy.retarget(listener.local_addr().unwrap()).await.unwrap();
    let end = timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    ask(&mut client, "new").await;
    let (mut server, _) = listener.accept().await.unwrap();
    answer(&mut server, "new").await;
}

#[tokio::test]
async fn latency_delays_each_direction_and_ends_with_the_mode() {
    let latency = Duration::from_millis(80);
    let (_echo, proxy, mut stream) = connected().await;
    proxy.set_mode(FaultMode::Latency(latency)).await.unwrap();
    let begun = Instant::now();
    ask(&mut stream, "late").await;
    answer(&mut stream, "late").await;
    assert!(begun.elapsed() >= 2 * latency, "{:?}", begun.elapsed());
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    let begun = Instant::now();
    ask(&mut stream, "soon").await;
    answer(&mut stream, "soon").await;
    assert!(begun.elapsed() < latency, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_server_that_is_away_is_seen_as_a_reset() {
    let (echo, proxy, stream) = connected().await;
    drop((echo, stream));
    eventually("the server is away", async || {
        let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
        matches!(timeout(QUIET, stream.read_u8()).await, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionReset)
    })
    .await;
}

#[tokio::test]
async fn a_dropped_proxy_ends_its_connections_and_frees_its_port() {
    let (_echo, proxy, mut stream) = connected().await;
    let addr = proxy.addr();
    drop(proxy);
    assert!(timeout(LIMIT, stream.read_u8()).await.unwrap().is_err());
    eventually("the port is free", async || TcpStream::connect(addr).await.is_err()).await;
}
