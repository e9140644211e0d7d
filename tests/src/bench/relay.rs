//! A relay between a node and the broker that can hold back what the broker says.
//!
//! A burst of a master is events that its terminal hands over together. Made by hand one after the
//! other they would reach the node one by one, as far apart as the broker needs for each; held back
//! and let go in one write they arrive as the burst that the limit is measured with.

use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What a line of the broker that tells of a change begins with.
const CHANGE: &[u8] = br#"{"push":{"change":"#;
/// Bytes read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// A running relay; it ends with the value.
#[derive(Debug)]
pub struct Relay {
    addr: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    holds: watch::Sender<bool>,
    /// Changes that are held back.
    held: Mutex<usize>,
}

impl Relay {
    /// Relays connections to the broker at `target`.
    pub async fn start(target: SocketAddr) -> io::Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared { holds: watch::Sender::new(false), held: Mutex::new(0) });
        let mut tasks = JoinSet::new();
        let relayed = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((node, _)) = listener.accept().await {
                connections.spawn(relay(node, target, Arc::clone(&relayed)));
            }
        });
        Ok(Relay { addr, shared, _tasks: tasks })
    }

    /// Where nodes connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Holds back what the broker says from now on.
    pub fn hold(&self) {
        self.shared.holds.send_replace(true);
    }

    /// How many changes of the account are held back.
    pub fn held(&self) -> usize {
        *self.shared.held.lock()
    }

    /// Hands over what was held back, in one write.
    pub fn release(&self) {
        self.shared.holds.send_replace(false);
    }
}

/// One connection, until a side ends it.
async fn relay(node: TcpStream, target: SocketAddr, shared: Arc<Shared>) {
    let Ok(broker) = TcpStream::connect(target).await else { return };
    let tuned = node.set_nodelay(true).and_then(|()| broker.set_nodelay(true));
    if tuned.is_err() {
        return;
    }
    let (mut from_node, mut to_node) = node.into_split();
    let (mut from_broker, mut to_broker) = broker.into_split();
    let up = async {
        // Its end shows in the other direction.
        let _ended = tokio::io::copy(&mut from_node, &mut to_broker).await;
    };
    let down = async {
        let mut holds = shared.holds.subscribe();
        let mut waiting = Vec::with_capacity(PIECE_BYTES);
        loop {
            let is_held = *holds.borrow_and_update();
            if !is_held && !waiting.is_empty() {
                *shared.held.lock() = 0;
                if to_node.write_all(&waiting).await.is_err() {
                    return;
                }
                waiting.clear();
            }
            tokio::select! {
                biased;
                read = from_broker.read_buf(&mut waiting) => match read {
                    Ok(0) | Err(_) => return,
                    Ok(_) if is_held => *shared.held.lock() = changes(&waiting),
                    Ok(_) => {}
                },
                changed = holds.changed() => if changed.is_err() { return },
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}

/// Complete lines that tell of a change.
fn changes(bytes: &[u8]) -> usize {
    bytes
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| line.ends_with(b"\n") && line.starts_with(CHANGE))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn what_is_held_back_comes_in_one_piece_when_it_is_let_go() {
        let broker = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let relay = Relay::start(broker.local_addr().unwrap()).await.unwrap();
        let mut node = TcpStream::connect(relay.addr()).await.unwrap();
        let (mut broker, _) = broker.accept().await.unwrap();
        relay.hold();
        let line = b"{\"push\":{\"change\":{}}}\n";
        for count in 1..=3 {
            broker.write_all(line).await.unwrap();
            let limit = std::time::Instant::now() + Duration::from_secs(10);
            while relay.held() < count {
                assert!(std::time::Instant::now() < limit, "{} held", relay.held());
                tokio::task::yield_now().await;
            }
        }
        assert!(node.try_read(&mut [0; 8]).is_err(), "nothing came");
        relay.release();
        node.readable().await.unwrap();
        let mut got = vec![0; 1024];
        let count = node.read(&mut got).await.unwrap();
        assert_eq!(&got[..count], line.repeat(3).as_slice());
    }
}
