//! How this process connects to NATS, with settings that notice a dead server in time.
//!
//! Input: `ClientSettings`. Output: an `async_nats::Client` that reconnects for ever.
//!
//! Invariants:
//! 1. A server that stopped answering is left within 15 s of its last word, and another one is
//!    reached by then if there is one (M14).
//! 2. What the client says of its connection is counted and decides nothing (M10, M13, H34):
//!    the channel of these events is small and drops.
//!
//! A server in lame-duck mode closes its clients one by one over its own grace time. We count it
//! and let the server choose the moment: leaving at once would bring every node back together.

use crate::connection::ConnectionChanges;
use crate::error::BusError;
use crate::metrics::{CONNECTION_EVENTS, count};
use crate::roles::{inbox_prefix, is_user_name};
use async_nats::{Client, ConnectOptions, Event, ServerAddr};
use percent_encoding::percent_decode_str;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// Silence after which a server is asked for a sign of life.
///
/// The client gives up at the third unanswered ping, that is 3 intervals after the server's last
/// word: 9 s here, 180 s with the client's default of 60 s (M14).
pub const PING_INTERVAL: Duration = Duration::from_secs(3);

/// Longest wait for one connection attempt. Chosen so that a client that picks the frozen server
/// once more is still with another one 15 s after the freeze: 9 s, this, and the wait between.
pub const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// Messages one subscription holds before the client drops: the largest measured burst (5,000)
/// many times over. What is dropped anyway shows as a gap or by the next beacon.
pub const SUBSCRIPTION_CAPACITY: usize = 65_536;

/// Commands the client holds before `publish` waits: its default. More would only mean that more
/// old messages are delivered late after a reconnect (M15).
pub const CLIENT_CAPACITY: usize = 2_048;

/// First wait between two connection attempts; doubles up to `RECONNECT_DELAY_MAX`.
pub const RECONNECT_DELAY_MIN: Duration = Duration::from_millis(50);

/// Longest wait between two attempts. Chosen below the 6 s after which a feed counts as silent.
pub const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(2);

/// Longest name of a connection that is passed on to the server.
const NAME_BYTES_MAX: usize = 128;

/// How we prove who we are.
#[derive(Clone, Default)]
pub enum BusAuth {
    /// By what a URL carries (`nats://user:password@host`, `nats://token@host`), or not at all.
    #[default]
    None,
    /// A token.
    Token(String),
    /// User and password.
    UserPassword {
        /// User.
        user: String,
        /// Password.
        password: String,
    },
}

impl fmt::Debug for BusAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BusAuth::None => "None",
            BusAuth::Token(_) => "Token(hidden)",
            BusAuth::UserPassword { .. } => "UserPassword(hidden)",
        })
    }
}

/// Settings of one connection to the bus.
#[derive(Clone)]
pub struct ClientSettings {
    /// Servers of one cluster, such as `nats://host:4222`; at least one.
    pub urls: Vec<String>,
    /// Name of the connection, shown by the server's monitoring. 1 to 128 bytes.
    pub name: String,
    /// Credentials. Default: none.
    pub auth: BusAuth,
    /// File with root certificates for TLS. Default: those of the system.
    pub root_certificates: Option<PathBuf>,
    /// Refuse a connection without TLS. Default: only if a URL begins with `tls://`.
    pub require_tls: bool,
    /// Ping interval, 1 to 5 s. Default `PING_INTERVAL`.
    pub ping_interval: Duration,
    /// Gets the last thing that a server refused, in its words. Default: nobody; it is logged anyway.
    pub refusals: Option<watch::Sender<Option<String>>>,
    /// Hears when the connection is lost and back, see [`crate::ConnectionWatch`]. Default: nobody.
    pub changes: Option<ConnectionChanges>,
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A URL may carry a secret.
        f.debug_struct("ClientSettings")
            .field("servers", &self.urls.len())
            .field("name", &self.name)
            .field("auth", &self.auth)
            .finish_non_exhaustive()
    }
}

impl ClientSettings {
    /// Settings with the defaults.
    pub fn new(urls: Vec<String>, name: impl Into<String>) -> Self {
        ClientSettings {
            urls,
            name: name.into(),
            auth: BusAuth::None,
            root_certificates: None,
            require_tls: false,
            ping_interval: PING_INTERVAL,
            refusals: None,
            changes: None,
        }
    }

    pub(crate) fn addresses(&self) -> Result<Vec<ServerAddr>, BusError> {
        let bad = |field, problem| Err(BusError::Setting { field, problem });
        if self.urls.is_empty() {
            return bad("urls", "needs at least one server".into());
        }
        if self.name.is_empty() || self.name.len() > NAME_BYTES_MAX {
            return bad("name", format!("must have 1 to 128 bytes, got {}", self.name.len()));
        }
        let allowed = Duration::from_secs(1)..=Duration::from_secs(5);
        if !allowed.contains(&self.ping_interval) {
            return bad(
                "ping_interval",
                format!("must be 1 s to 5 s, got {:?}", self.ping_interval),
            );
        }
        let parse = |(index, url): (usize, &String)| {
            url.parse::<ServerAddr>().map_err(|error| BusError::Setting {
                field: "urls",
                problem: format!("entry {} is not a server address: {error}", index + 1),
            })
        };
        self.urls.iter().enumerate().map(parse).collect()
    }

    /// Our credentials: those of the settings, else those of the first URL that has some. The
    /// client reads none from a URL, and learns of servers by addresses that have none.
    pub(crate) fn auth(&self, addresses: &[ServerAddr]) -> BusAuth {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let in_url = addresses.iter().find_map(|address| {
            let user = decoded(address.username()?);
            Some(match address.password() {
                Some(password) => BusAuth::UserPassword { user, password: decoded(password) },
                None => BusAuth::Token(user),
            })
        });
        match &self.auth {
            BusAuth::None => in_url.unwrap_or_default(),
            given => given.clone(),
        }
    }

    fn options(&self, addresses: &[ServerAddr]) -> ConnectOptions {
        let (refusals, changes) = (self.refusals.clone(), self.changes.clone());
        self.quiet_options(addresses).retry_on_initial_connect().event_callback(move |event| {
            count(CONNECTION_EVENTS, "event", event_word(&event));
            if let Some(changes) = &changes {
                changes.tell(&event);
            }
            // A subject that is denied is only said here; the call that used it went well.
            if let Event::ServerError(error) = event {
                tracing::error!(%error, "the bus refused something");
                if let Some(refusals) = &refusals {
                    refusals.send_replace(Some(error.to_string()));
                }
            }
            std::future::ready(())
        })
    }

    /// The same without counting, without logging, and with one try at the first connection.
    pub(crate) fn quiet_options(&self, addresses: &[ServerAddr]) -> ConnectOptions {
        let mut options = ConnectOptions::new()
            .name(&self.name)
            .ping_interval(self.ping_interval)
            .connection_timeout(CONNECTION_TIMEOUT)
            .subscription_capacity(SUBSCRIPTION_CAPACITY)
            .client_capacity(CLIENT_CAPACITY)
            .max_reconnects(None)
            .reconnect_delay_callback(reconnect_delay)
            // A server that we learn of is asked for TLS as well.
            .require_tls(self.require_tls || addresses.iter().any(ServerAddr::tls_required));
        options = match self.auth(addresses) {
            BusAuth::None => options,
            BusAuth::Token(token) => options.token(token),
            BusAuth::UserPassword { user, password } => {
                if is_user_name(&user) {
                    options = options.custom_inbox_prefix(inbox_prefix(&user));
                }
                options.user_and_password(user, password)
            }
        };
        match &self.root_certificates {
            Some(path) => options.add_root_certificates(path.clone()),
            None => options,
        }
    }
}

/// Starts a connection and returns at once, with or without a server in reach.
///
/// The client logs every connection event at info by itself; a log filter of `async_nats=warn`
/// keeps an event storm out of the logs (B29).
///
/// Errors: `Setting` for a value out of range, `Connect` for what waiting does not cure.
pub async fn connect(settings: &ClientSettings) -> Result<Client, BusError> {
    let addresses = settings.addresses()?;
    let options = settings.options(&addresses);
    let addresses: Vec<ServerAddr> =
        addresses.into_iter().map(without_secret).collect::<Result<_, _>>()?;
    options.connect(addresses).await.map_err(BusError::Connect)
}

/// An address without what it logs in with, which the options hold: the client writes addresses to its
/// log as they are.
pub(crate) fn without_secret(address: ServerAddr) -> Result<ServerAddr, BusError> {
    let mut url = address.into_inner();
    // Both refuse an address without a host, which none of these is.
    let _no_host = url.set_username("");
    let _no_host = url.set_password(None);
    let wrong =
        |error: std::io::Error| BusError::Setting { field: "urls", problem: error.to_string() };
    ServerAddr::from_url(url).map_err(wrong)
}

/// Wait before a connection attempt: doubling, bounded, and half of it random, so that the nodes
/// of a cluster do not come back in one instant.
fn reconnect_delay(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX).min(10);
    let delay = (RECONNECT_DELAY_MIN * 2u32.pow(doublings)).min(RECONNECT_DELAY_MAX);
    delay.mul_f64(0.5 + 0.5 * fastrand::f64())
}

schemas::words! {
    /// The word in metrics.
    pub(crate) fn event_word(event: &Event) in EVENT_WORDS {
        Event::Connected => "connected",
        Event::Disconnected => "disconnected",
        Event::LameDuckMode => "lame_duck_mode",
        Event::Draining => "draining",
        Event::Closed => "closed",
        Event::SlowConsumer(_) => "slow_consumer",
        Event::ServerError(_) => "server_error",
        Event::ClientError(_) => "client_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_between_attempts_is_bounded_and_not_the_same_for_all() {
        for attempts in [0, 1, 2, 7, 50, usize::MAX] {
            assert!(reconnect_delay(attempts) <= RECONNECT_DELAY_MAX);
            assert!(reconnect_delay(attempts) >= RECONNECT_DELAY_MIN / 2);
        }
        let waits: std::collections::BTreeSet<_> = (0..20).map(|_| reconnect_delay(9)).collect();
        assert!(waits.len() > 1);
    }

    #[test]
    fn a_dead_server_is_left_within_fifteen_seconds() {
        const PINGS_UNTIL_GIVEN_UP: u32 = 3;
        let noticed = PING_INTERVAL * PINGS_UNTIL_GIVEN_UP;
        let moved = noticed + CONNECTION_TIMEOUT + RECONNECT_DELAY_MIN * 3;
        assert!(moved < Duration::from_secs(15));
    }

    #[test]
    fn an_address_that_the_client_gets_holds_no_secret_and_leads_to_the_same_place() {
        for (url, place) in [
            ("nats://fleet:hunter2@host:4333", "nats://host:4333"),
            ("tls://hunter2@host", "tls://host:4222"),
            ("nats://host:4222", "nats://host:4222"),
        ] {
            let address = without_secret(url.parse().unwrap()).unwrap();
            assert!(!format!("{address:?}").contains("hunter2"), "{address:?}");
            let there = format!("{}://{}:{}", address.scheme(), address.host(), address.port());
            assert_eq!(there, place);
        }
    }

    #[test]
    fn a_bad_setting_is_named_and_no_password_is_shown() {
        let mut settings = ClientSettings::new(vec!["nats://u:hunter2@host:x".into()], "n");
        let error = settings.addresses().unwrap_err().to_string();
        assert!(error.contains("urls") && !error.contains("hunter2"), "{error}");
        settings.urls = vec!["localhost".into()];
        settings.auth = BusAuth::Token("hunter2".into());
        assert!(!format!("{settings:?}").contains("hunter2"));
        settings.ping_interval = Duration::from_secs(60);
        assert!(settings.addresses().unwrap_err().to_string().contains("ping_interval"));
    }
}
