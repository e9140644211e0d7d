//! The bus that a verb speaks on: which servers, and what they are checked by.

use super::CliError;
use crate::config::{SecretUrl, holds_certificate};
use async_nats::connection::State;
use bus::ClientSettings;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// Longest wait for a first connection.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// Time between two looks at the connection.
const LOOK: Duration = Duration::from_millis(20);

/// Waits for a first connection: what is asked before it is there counts as asked on another one.
pub(super) async fn connected(client: &async_nats::Client) -> Result<(), String> {
    let connected = async {
        while client.connection_state() != State::Connected {
            tokio::time::sleep(LOOK).await;
        }
    };
    let waited = tokio::time::timeout(CONNECTED_WITHIN, connected).await;
    waited.map_err(|_| format!("not connected within {CONNECTED_WITHIN:?}"))
}

/// Where the bus is.
#[derive(Debug, Args)]
pub(super) struct BusArg {
    /// NATS servers, separated by commas. Default: LOCKSTEP_NATS_URLS, else nats://127.0.0.1:4222. A
    /// secret belongs into LOCKSTEP_NATS_URLS: everybody on the machine can read a command line.
    #[arg(long, value_delimiter = ',')]
    nats: Option<Vec<String>>,
    /// Certificates (PEM) that those of the servers are checked by. Default:
    /// LOCKSTEP_NATS_ROOT_CERTIFICATES, else those of the system.
    #[arg(long, value_name = "FILE")]
    nats_root_certificates: Option<PathBuf>,
}

impl BusArg {
    fn urls(&self) -> Vec<String> {
        self.nats.clone().unwrap_or_else(|| {
            let set = std::env::var("LOCKSTEP_NATS_URLS");
            let urls = set.unwrap_or_else(|_| "nats://127.0.0.1:4222".into());
            urls.split(',').map(|url| url.trim().to_owned()).collect()
        })
    }

    /// The servers' addresses, without secrets.
    pub(super) fn shown(&self) -> String {
        let shown: Vec<String> =
            self.urls().into_iter().map(|url| SecretUrl::new(url).to_string()).collect();
        shown.join(",")
    }

    /// A connection of this name; it may not be there yet.
    pub(super) async fn connect(&self, name: &str) -> Result<async_nats::Client, CliError> {
        self.connect_and_tell(name, None).await
    }

    /// The same, and what its servers refuse goes to `refusals`.
    pub(super) async fn connect_and_tell(
        &self,
        name: &str,
        refusals: Option<watch::Sender<Option<String>>>,
    ) -> Result<async_nats::Client, CliError> {
        let certificates = self.nats_root_certificates.clone();
        let certificates = certificates
            .or_else(|| std::env::var_os("LOCKSTEP_NATS_ROOT_CERTIFICATES").map(Into::into));
        let certificates = certificates.filter(|path: &PathBuf| !path.as_os_str().is_empty());
        if let Some(path) = &certificates {
            let text = std::fs::read_to_string(path)
                .map_err(|error| CliError::missing(path.display().to_string(), error))?;
            if !holds_certificate(&text) {
                return Err(CliError::Usage(format!(
                    "--nats-root-certificates {}: must hold a certificate in PEM",
                    path.display()
                )));
            }
        }
        let settings = ClientSettings {
            root_certificates: certificates,
            refusals,
            ..ClientSettings::new(self.urls(), name)
        };
        bus::connect(&settings).await.map_err(|error| CliError::missing("bus", error))
    }

    /// What went wrong with the bus, and with which.
    pub(super) fn missing(&self, error: bus::BusError) -> CliError {
        CliError::missing(format!("bus at {}", self.shown()), error)
    }
}
