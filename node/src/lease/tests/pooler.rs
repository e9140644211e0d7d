//! A pooler in transaction mode between a node and its database (B17): as small as can be, with real
//! server connections behind it. It speaks enough of the protocol to hand a server connection out
//! for one transaction at a time, in turn.

use super::super::store::LeaseError;
use super::*;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

struct Pooler {
    addr: SocketAddr,
    _clients: JoinSet<()>,
}

impl Pooler {
    async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mut clients = JoinSet::new();
        clients.spawn(async move {
            let mut served = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                served.spawn(async move {
                    // A client that goes away ends its part; nothing else depends on it.
                    let _gone = serve(client, server).await;
                });
            }
        });
        Self { addr, _clients: clients }
    }
}

/// Two server connections, handed out in turn.
async fn serve(mut client: TcpStream, server: SocketAddr) -> std::io::Result<()> {
    let startup = read_startup(&mut client).await?;
    let mut servers = Vec::new();
    for n in 0..2 {
        let mut server = TcpStream::connect(server).await?;
        server.write_all(&startup).await?;
        let greeting = read_until_ready(&mut server).await?;
        if n == 0 {
            client.write_all(&greeting).await?;
        }
        servers.push(server);
    }
    let mut turn = 0;
    loop {
        // A client speaks until it asks for an answer: a query, or the end of an extended one.
        loop {
            let (kind, message) = read_message(&mut client).await?;
            servers[turn].write_all(&message).await?;
            if matches!(kind, b'Q' | b'S') {
                break;
            }
        }
        let answer = read_until_ready(&mut servers[turn]).await?;
        client.write_all(&answer).await?;
        if answer.last() == Some(&b'I') {
            turn = 1 - turn;
        }
    }
}

async fn read_startup(client: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    const SSL_REQUEST: u32 = 80_877_103;
    loop {
        let length = client.read_u32().await?;
        let mut body = vec![0; length as usize - 4];
        client.read_exact(&mut body).await?;
        if body[..4] == SSL_REQUEST.to_be_bytes() {
            client.write_all(b"N").await?;
            continue;
        }
        return Ok([&length.to_be_bytes()[..], &body].concat());
    }
}

async fn read_message(stream: &mut TcpStream) -> std::io::Result<(u8, Vec<u8>)> {
    let kind = stream.read_u8().await?;
    let length = stream.read_u32().await?;
    let mut message = vec![kind];
    message.extend(length.to_be_bytes());
    message.resize(1 + length as usize, 0);
    stream.read_exact(&mut message[5..]).await?;
    Ok((kind, message))
}

/// Everything up to and with `ReadyForQuery`, whose last byte says whether a transaction is open.
async fn read_until_ready(server: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let (kind, message) = read_message(server).await?;
        all.extend(message);
        if kind == b'Z' {
            return Ok(all);
        }
    }
}

#[tokio::test]
async fn pooler_in_transaction_mode_is_refused_before_anything_is_claimed() {
    let world = PostgresWorld::new().await;
    world.fill(1).await;
    let server = devstack::shared_postgres().await.unwrap();
    let pooler = Pooler::start(server.addr()).await;
    let (before, after) = world.url.rsplit_once('@').unwrap();
    let (_, database) = after.split_once('/').unwrap();
    let url = format!("{before}@{}/{database}", pooler.addr);
    let mut store = PostgresOwnership::new(&url, TIMING.query_limit).unwrap();
    let error = store.cycle(&claiming("a", 5)).await.unwrap_err();
    assert!(matches!(error, LeaseError::Pooler), "{error:?}");
    assert_eq!(world.row(1).await, Row { node_id: None, token: token(0) });
    // The server itself is taken.
    assert_eq!(world.store().cycle(&claiming("a", 5)).await.unwrap().claimed.len(), 1);
}
