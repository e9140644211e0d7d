//! A connection's ups and downs, for people: when it was lost, when it is back, and with which server.
//!
//! Decides: nothing but the words.
//! In: what the client says of its connection. Out: [`ConnectionNews`], one for each change.
//!
//! Invariants:
//! 1. No secret is in what is said.
//! 2. Nothing else rests on it: the channel of the client's events is small and drops (M10), and so does
//!    this one.
//!
//! Not covered: a first connection that does not come about; see `connected`.

use async_nats::{Client, Event, ServerInfo};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

/// Changes that may wait to be told; more are dropped.
const CHANGES_MAX: usize = 64;
/// Longest wait until the client knows the server that it has just reached.
const KNOWN_WITHIN: Duration = Duration::from_secs(1);
/// Time between two looks at that.
const LOOK: Duration = Duration::from_millis(10);

/// What the client said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Connected,
    Lost,
    LameDuck,
}

impl Change {
    pub(crate) fn of(event: &Event) -> Option<Change> {
        match event {
            Event::Connected => Some(Change::Connected),
            Event::Disconnected => Some(Change::Lost),
            Event::LameDuckMode => Some(Change::LameDuck),
            Event::Draining
            | Event::Closed
            | Event::SlowConsumer(_)
            | Event::ServerError(_)
            | Event::ClientError(_) => None,
        }
    }
}

/// Where a connection's changes go in, see [`crate::ClientSettings::changes`].
#[derive(Debug, Clone)]
pub struct ConnectionChanges(mpsc::Sender<Change>);

impl ConnectionChanges {
    pub(crate) fn tell(&self, event: &Event) {
        if let Some(change) = Change::of(event) {
            // Nothing rests on it, and the event is counted.
            let _full_or_unheard = self.0.try_send(change);
        }
    }
}

/// Both ends: one for the settings of a client, one to hear from.
pub fn connection_changes() -> (ConnectionChanges, HeardChanges) {
    let (sender, receiver) = mpsc::channel(CHANGES_MAX);
    (ConnectionChanges(sender), HeardChanges(receiver))
}

/// What waits to be told.
#[derive(Debug)]
pub struct HeardChanges(mpsc::Receiver<Change>);

/// What became of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionNews {
    /// It is there for the first time.
    There {
        /// With which server.
        server: String,
    },
    /// It is lost; the client tries every server until one lets it in.
    Lost {
        /// With which server it was.
        server: String,
    },
    /// It is there again.
    Back {
        /// With which server.
        server: String,
        /// How long there was none, where the loss was heard.
        away: Option<Duration>,
    },
    /// The server ends soon, and closes its connections one by one.
    LameDuck {
        /// Which.
        server: String,
    },
}

impl fmt::Display for ConnectionNews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionNews::There { server } => write!(f, "connected to the bus at {server}"),
            ConnectionNews::Lost { server } => {
                write!(f, "the connection to the bus at {server} is lost; trying every server")
            }
            ConnectionNews::Back { server, away: Some(away) } => {
                write!(f, "connected to the bus again, at {server}, after {away:.1?}")
            }
            ConnectionNews::Back { server, away: None } => {
                write!(f, "connected to the bus again, at {server}")
            }
            ConnectionNews::LameDuck { server } => {
                write!(f, "the bus server {server} is about to end, and will close this connection")
            }
        }
    }
}

impl ConnectionNews {
    /// Writes it down. A connection that is lost comes back by itself, and the node goes on meanwhile.
    pub fn log(&self) {
        match self {
            ConnectionNews::There { .. } | ConnectionNews::Back { .. } => tracing::info!("{self}"),
            ConnectionNews::Lost { .. } | ConnectionNews::LameDuck { .. } => {
                tracing::warn!("{self}");
            }
        }
    }
}

/// Tells what becomes of a connection. It keeps the client, so the connection stays for as long as this
/// is there.
#[derive(Debug)]
pub struct ConnectionWatch {
    client: Client,
    changes: HeardChanges,
    /// Addresses of the settings, without secrets.
    addresses: Vec<(String, u16)>,
    server: Option<ServerInfo>,
    lost_at: Option<Instant>,
}

impl ConnectionWatch {
    /// A watch over a client that was made with the other end of these changes.
    pub fn new(client: Client, settings: &crate::ClientSettings, changes: HeardChanges) -> Self {
        let addresses = settings.addresses().unwrap_or_default();
        let addresses = addresses.iter().map(|at| (at.host().to_owned(), at.port())).collect();
        ConnectionWatch { client, changes, addresses, server: None, lost_at: None }
    }

    /// The next change; nothing when there will be none.
    pub async fn next(&mut self) -> Option<ConnectionNews> {
        let change = self.changes.0.recv().await?;
        Some(match change {
            Change::Connected => {
                let is_first = self.server.is_none();
                self.learn().await;
                let (server, lost_at) = (self.shown(), self.lost_at.take());
                match is_first {
                    true => ConnectionNews::There { server },
                    false => ConnectionNews::Back { server, away: lost_at.map(|at| at.elapsed()) },
                }
            }
            Change::Lost => {
                self.lost_at = Some(Instant::now());
                ConnectionNews::Lost { server: self.shown() }
            }
            Change::LameDuck => ConnectionNews::LameDuck { server: self.shown() },
        })
    }

    /// The client says that it is connected before it knows with whom.
    async fn learn(&mut self) {
        let key = |server: &ServerInfo| (server.server_id.clone(), server.client_id);
        let before = self.server.as_ref().map(key);
        let looking = async {
            loop {
                match self.client.try_server_info() {
                    Some(server) if before != Some(key(&server)) => return server,
                    Some(_) | None => tokio::time::sleep(LOOK).await,
                }
            }
        };
        if let Ok(server) = timeout(KNOWN_WITHIN, looking).await {
            self.server = Some(server);
        }
    }

    fn shown(&self) -> String {
        match &self.server {
            Some(server) => shown(&Known::of(server), &self.addresses),
            None => "an address that is not known".to_owned(),
        }
    }
}

/// What a server says of itself.
#[derive(Debug, Clone, Copy)]
struct Known<'a> {
    name: &'a str,
    host: &'a str,
    port: u16,
}

impl<'a> Known<'a> {
    fn of(server: &'a ServerInfo) -> Self {
        Known { name: &server.server_name, host: &server.host, port: server.port }
    }
}

/// A server's address, as the settings have it where one of theirs must be it. A server tells the address
/// that it listens at, which often is that of no machine; then its name tells which one it is.
fn shown(server: &Known<'_>, addresses: &[(String, u16)]) -> String {
    let Known { name, host, port } = *server;
    let is_any = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified());
    if !is_any {
        return format!("{host}:{port}");
    }
    let mut of_port = addresses.iter().filter(|(_, of_address)| *of_address == port);
    match (of_port.next(), of_port.next()) {
        (Some((host, _)), None) => format!("{host}:{port}"),
        _ => format!("{name} (port {port})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_listens_everywhere_is_told_by_the_address_that_leads_to_it_or_by_its_name() {
        let at = |host, port| {
            shown(
                &Known { name: "n1", host, port },
                &[("one".to_owned(), 4222), ("two".to_owned(), 4222), ("three".to_owned(), 4333)],
            )
        };
        assert_eq!(at("10.0.0.7", 4222), "10.0.0.7:4222");
        assert_eq!(at("0.0.0.0", 4333), "three:4333");
        assert_eq!(at("::", 4222), "n1 (port 4222)");
        assert_eq!(at("0.0.0.0", 5555), "n1 (port 5555)");
    }
}
