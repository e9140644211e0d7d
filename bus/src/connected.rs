//! Waiting for a first connection, and saying why there is none.
//!
//! The client tries again for ever and tells of its failures in three words; which of them a person has
//! to mend is seen by one try of our own at each server.
//!
//! In: a client, the settings it was made of. Out: nothing once it is connected, else every server with
//! what it said ([`NotConnected`]).
//!
//! Invariants:
//! 1. The wait ends: at once where every server refuses for good, else after [`CONNECTED_WITHIN`].
//! 2. No secret is in what is said.
//!
//! Not covered: a connection that breaks later; feeds and publishers see to that.

use crate::client::{BusAuth, ClientSettings};
use async_nats::connection::State;
use async_nats::{Client, ConnectError, ConnectErrorKind, ServerAddr};
use futures_util::future::join_all;
use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind};
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for a first connection.
pub const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// A server that is there answers within that; who is not connected by then asks why.
const USUALLY_WITHIN: Duration = Duration::from_secs(1);
/// Longest try of our own at one server: it may have several addresses, each with the client's limit.
const TRY_LIMIT: Duration = Duration::from_secs(4);
/// Time between two looks at the connection.
const LOOK: Duration = Duration::from_millis(20);

/// Why a server gives no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// It does not know the user, or the secret is another one; a server does not say which.
    Login {
        /// Who asked, where a name was given.
        user: Option<String>,
    },
    /// TLS could not be agreed on, or the certificate is not one to trust.
    Tls(String),
    /// Nobody listens at that address.
    NobodyListens,
    /// The name has no address.
    NameNotFound(String),
    /// It takes the connection, or not even that, and says nothing.
    Silent,
    /// Something else, in words.
    Other(String),
}

impl Refusal {
    /// Waiting does not cure it.
    fn is_final(&self) -> bool {
        match self {
            Refusal::Login { .. } | Refusal::Tls(_) => true,
            Refusal::NobodyListens
            | Refusal::NameNotFound(_)
            | Refusal::Silent
            | Refusal::Other(_) => false,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Login { user: Some(user) } => {
                write!(f, "refuses the user {user:?}, whom it does not know, or its secret")
            }
            Refusal::Login { user: None } => f.write_str(
                "refuses who comes without a user and secret, or with this token \
                 (nats://USER:SECRET@host)",
            ),
            Refusal::Tls(why) => write!(f, "TLS failed: {why}"),
            Refusal::NobodyListens => f.write_str("nobody listens there"),
            Refusal::NameNotFound(why) => write!(f, "its name is not found: {why}"),
            Refusal::Silent => f.write_str("no answer"),
            Refusal::Other(why) => f.write_str(why),
        }
    }
}

/// No connection, and what each server that gave none said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not connected: {}", told(servers))]
pub struct NotConnected {
    /// Address without its secrets, and the reason; empty where the servers let us in by now.
    pub servers: Vec<(String, Refusal)>,
}

fn told(servers: &[(String, Refusal)]) -> String {
    if servers.is_empty() {
        return format!("it took more than {CONNECTED_WITHIN:?}");
    }
    let each = servers.iter().map(|(server, refusal)| format!("{server}: {refusal}"));
    each.collect::<Vec<_>>().join("; ")
}

/// Waits for a first connection: what is asked before it is there counts as asked on another one.
///
/// Errors: why each server gives none.
pub async fn connected(client: &Client, settings: &ClientSettings) -> Result<(), NotConnected> {
    if is_connected_within(client, USUALLY_WITHIN).await {
        return Ok(());
    }
    let servers = refusals(settings).await;
    let is_final = !servers.is_empty() && servers.iter().all(|(_, refusal)| refusal.is_final());
    let left = if is_final { Duration::ZERO } else { CONNECTED_WITHIN - USUALLY_WITHIN };
    if is_connected_within(client, left).await { Ok(()) } else { Err(NotConnected { servers }) }
}

async fn is_connected_within(client: &Client, limit: Duration) -> bool {
    let connected = async {
        while client.connection_state() != State::Connected {
            tokio::time::sleep(LOOK).await;
        }
    };
    timeout(limit, connected).await.is_ok()
}

/// One try at each server; those that let us in are left out.
async fn refusals(settings: &ClientSettings) -> Vec<(String, Refusal)> {
    let Ok(addresses) = settings.addresses() else { return Vec::new() };
    let user = match settings.auth(&addresses) {
        BusAuth::UserPassword { user, .. } => Some(user),
        BusAuth::None | BusAuth::Token(_) => None,
    };
    let each = addresses.iter().map(async |address| {
        let shown = format!("{}:{}", address.host(), address.port());
        let refusal = match timeout(TRY_LIMIT, attempt(settings, &addresses, address)).await {
            Ok(Ok(())) => return None,
            Ok(Err(error)) => classify(&error, user.clone()),
            Err(_) => Refusal::Silent,
        };
        Some((shown, refusal))
    });
    join_all(each).await.into_iter().flatten().collect()
}

async fn attempt(
    settings: &ClientSettings,
    all: &[ServerAddr],
    address: &ServerAddr,
) -> Result<(), ConnectError> {
    let options = settings.quiet_options(all);
    let Ok(address) = crate::client::without_secret(address.clone()) else { return Ok(()) };
    options.connect(address).await.map(drop)
}

fn classify(error: &ConnectError, user: Option<String>) -> Refusal {
    let cause = error.source();
    let words = cause.map_or_else(|| error.to_string(), ToString::to_string);
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            Refusal::Login { user }
        }
        ConnectErrorKind::Dns => Refusal::NameNotFound(words),
        ConnectErrorKind::TimedOut => Refusal::Silent,
        ConnectErrorKind::Tls => Refusal::Tls(words),
        ConnectErrorKind::Io => match cause.and_then(|c| c.downcast_ref::<io::Error>()) {
            Some(error) if error.kind() == ErrorKind::ConnectionRefused => Refusal::NobodyListens,
            // That is how the client's TLS says it.
            Some(error) if error.kind() == ErrorKind::InvalidData => Refusal::Tls(words),
            Some(_) | None => Refusal::Other(words),
        },
        ConnectErrorKind::ServerParse | ConnectErrorKind::MaxReconnects => Refusal::Other(words),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// A server that says hello in these words, and then this to whatever it is told.
    async fn server(info: &'static str, answer: &'static [u8]) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    client.write_all(info.as_bytes()).await.unwrap();
                    let _heard = client.read(&mut [0; 4096]).await;
                    let _sent = client.write_all(answer).await;
                    // Open until the client has read it.
                    let _closed = client.read(&mut [0; 4096]).await;
                });
            }
        });
        port
    }

    const HELLO: &str = "INFO {\"server_id\":\"x\",\"server_name\":\"x\",\"version\":\"2.12.0\",\
        \"go\":\"go\",\"host\":\"127.0.0.1\",\"port\":4222,\"headers\":true,\"max_payload\":1048576,\
        \"proto\":1,\"client_id\":1}\r\n";

    async fn refusal(url: String) -> Refusal {
        let settings = ClientSettings::new(vec![url], "test");
        let (_, refusal) = refusals(&settings).await.pop().expect("a refusal");
        refusal
    }

    #[tokio::test]
    async fn each_reason_why_there_is_no_connection_is_told_apart() {
        let denies = server(HELLO, b"-ERR 'Authorization Violation'\r\n").await;
        let login = refusal(format!("nats://alice:hunter2@127.0.0.1:{denies}")).await;
        assert_eq!(login, Refusal::Login { user: Some("alice".into()) });
        let nobody = refusal(format!("nats://127.0.0.1:{denies}")).await;
        assert_eq!(nobody, Refusal::Login { user: None });

        let plain = server(HELLO, b"-ERR 'Unknown Protocol Operation'\r\n").await;
        let tls = refusal(format!("tls://127.0.0.1:{plain}")).await;
        assert!(matches!(tls, Refusal::Tls(_)), "{tls:?}");

        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(refusal(format!("nats://{free}")).await, Refusal::NobodyListens);

        let unknown = refusal("nats://no-such-host.invalid:4222".into()).await;
        assert!(matches!(unknown, Refusal::NameNotFound(_)), "{unknown:?}");

        let full = server(HELLO, b"-ERR 'maximum connections exceeded'\r\n").await;
        let other = refusal(format!("nats://127.0.0.1:{full}")).await;
        assert!(matches!(&other, Refusal::Other(why) if why.contains("maximum")), "{other:?}");

        // It takes connections and never says a word.
        let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = mute.local_addr().unwrap();
        assert_eq!(refusal(format!("nats://{address}")).await, Refusal::Silent);
    }

    #[tokio::test]
    async fn what_waiting_does_not_cure_is_told_before_the_wait_is_over_and_without_a_secret() {
        let denies = server(HELLO, b"-ERR 'Authorization Violation'\r\n").await;
        let url = format!("nats://alice:hunter2@127.0.0.1:{denies}");
        let settings = ClientSettings::new(vec![url], "test");
        let client = crate::client::connect(&settings).await.unwrap();
        let refused = timeout(CONNECTED_WITHIN, connected(&client, &settings)).await;
        let told = refused.expect("told in time").unwrap_err().to_string();
        assert!(told.contains("alice") && told.contains(&denies.to_string()), "{told}");
        assert!(!told.contains("hunter2"), "{told}");
    }
}
