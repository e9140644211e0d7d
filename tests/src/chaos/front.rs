//! One address of the broker for all nodes, with a way of its own for each of them.
//!
//! The broker's address is on the account row, the same for every node; to cut off one node from
//! the broker only, its connections must be told from the others'. Every connection begins with
//! a login that names the node, so the first line is looked at (and not taken), and the
//! connection is led to that node's proxy. What is on neither list is refused.

use devstack::FaultProxy;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// A login is one short line.
const LOGIN_BYTES_MAX: usize = 4_096;
/// Who has not said a word by then is let go.
const LOGIN_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at what has come of the login.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The front; it ends with the value.
#[derive(Debug)]
pub struct Front {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Front {
    /// Listens, and leads each node to its proxy.
    pub async fn start(ways: Vec<(String, Arc<FaultProxy>)>) -> io::Result<Front> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let addr = listener.local_addr()?;
        let ways: Arc<[(String, SocketAddr)]> =
            ways.into_iter().map(|(name, proxy)| (name, proxy.addr())).collect();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        // An error concerns one connection that went away.
                        let Ok((client, _)) = accepted else { continue };
                        connections.spawn(lead(client, Arc::clone(&ways)));
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Ok(Front { addr, task })
    }

    /// What accounts carry as the broker's address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn lead(mut client: TcpStream, ways: Arc<[(String, SocketAddr)]>) {
    let way = tokio::time::timeout(LOGIN_LIMIT, who(&client)).await;
    let way = way.ok().and_then(Result::ok).and_then(|line| way_of(&line, &ways));
    let server = match way {
        Some(addr) => TcpStream::connect(addr).await.ok(),
        None => None,
    };
    let Some(mut server) = server else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    if tokio::io::copy_bidirectional(&mut client, &mut server).await.is_err() {
        // A reset on one side is a reset on the other.
        let _ = client.set_zero_linger();
        let _ = server.set_zero_linger();
    }
}

/// The first line, left where it is.
async fn who(client: &TcpStream) -> io::Result<String> {
    let mut bytes = vec![0; LOGIN_BYTES_MAX];
    loop {
        let count = client.peek(&mut bytes).await?;
        if let Some(end) = bytes[..count].iter().position(|byte| *byte == b'\n') {
            return Ok(String::from_utf8_lossy(&bytes[..end]).into_owned());
        }
        if count == 0 || count == bytes.len() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The node's name is in the login with a random part behind it.
fn way_of(line: &str, ways: &[(String, SocketAddr)]) -> Option<SocketAddr> {
    let login: serde_json::Value = serde_json::from_str(line).ok()?;
    let node = login["node"].as_str()?;
    let is_of = |name: &str| node.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
    ways.iter().find(|(name, _)| is_of(name)).map(|(_, addr)| *addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_led_by_the_name_of_its_node() {
        let addr = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let ways = [("chaos-1".to_owned(), addr(1)), ("chaos-2".to_owned(), addr(2))];
        let way = |node: &str| {
            let line = format!(r#"{{"id":1,"op":"login","account":7,"node":"{node}"}}"#);
            way_of(&line, &ways)
        };
        assert_eq!(way("chaos-2-0a1b2c3d"), Some(addr(2)));
        assert_eq!(way("chaos-1-0a1b2c3d"), Some(addr(1)));
        assert_eq!(way("chaos-12-0a1b2c3d"), None);
        assert_eq!(way_of("no json", &ways), None);
    }
}
