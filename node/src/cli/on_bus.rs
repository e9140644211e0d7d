//! The bus that a verb speaks on: which servers, and what they are checked by.

use super::CliError;
use crate::config::{check_nats_url, holds_certificate};
use crate::secret::SecretUrl;
use bus::ClientSettings;
use clap::Args;
use std::ops::Deref;
use std::path::PathBuf;
use tokio::sync::watch;

/// A client whose first connection may not be there yet, and what it was made of.
#[derive(Debug, Clone)]
pub(super) struct Connecting {
    client: async_nats::Client,
    settings: ClientSettings,
}

impl Connecting {
    /// The client alone.
    pub(super) fn into_client(self) -> async_nats::Client {
        self.client
    }
}

impl Deref for Connecting {
    type Target = async_nats::Client;

    fn deref(&self) -> &async_nats::Client {
        &self.client
    }
}

/// Waits for the first connection; why there is none, by server.
pub(super) async fn connected(connecting: &Connecting) -> Result<(), String> {
    let connected = bus::connected(&connecting.client, &connecting.settings).await;
    connected.map_err(|refused| refused.to_string())
}

/// Names the servers where no argument does.
const VARIABLE: &str = "LOCKSTEP_NATS_URLS";

/// Addresses of servers, without secrets.
pub(super) fn shown_urls(urls: &[String]) -> String {
    let shown = urls.iter().map(|url| SecretUrl::new(url.clone()).to_string());
    shown.collect::<Vec<_>>().join(",")
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
            let set = std::env::var(VARIABLE).ok().filter(|urls| !urls.trim().is_empty());
            let urls = set.unwrap_or_else(|| "nats://127.0.0.1:4222".into());
            urls.split(',').map(|url| url.trim().to_owned()).collect()
        })
    }

    /// The servers' addresses, without secrets.
    pub(super) fn shown(&self) -> String {
        shown_urls(&self.urls())
    }

    /// A connection of this name; it may not be there yet.
    pub(super) async fn connect(&self, name: &str) -> Result<Connecting, CliError> {
        self.connect_and_tell(name, None).await
    }

    /// The same, and what its servers refuse goes to `refusals`.
    async fn connect_and_tell(
        &self,
        name: &str,
        refusals: Option<watch::Sender<Option<String>>>,
    ) -> Result<Connecting, CliError> {
        let urls = self.urls();
        let name_of_urls = if self.nats.is_some() { "--nats" } else { VARIABLE };
        let wrong: Vec<String> = urls.iter().filter_map(|url| check_nats_url(url).err()).collect();
        if !wrong.is_empty() {
            let faults = wrong.iter().map(|what| format!("{name_of_urls} {what}"));
            return Err(CliError::Usage(faults.collect::<Vec<_>>().join("\n")));
        }
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
            ..ClientSettings::new(urls, name)
        };
        let client = bus::connect(&settings).await.map_err(|error| self.missing(error))?;
        Ok(Connecting { client, settings })
    }

    /// The same, and the connection is there.
    pub(super) async fn connected_and_tell(
        &self,
        name: &str,
        refusals: watch::Sender<Option<String>>,
    ) -> Result<async_nats::Client, CliError> {
        let connecting = self.connect_and_tell(name, Some(refusals)).await?;
        let there = connected(&connecting).await;
        there.map_err(|reason| CliError::missing(format!("bus at {}", self.shown()), reason))?;
        Ok(connecting.into_client())
    }

    /// What went wrong with the bus, and with which.
    pub(super) fn missing(&self, error: bus::BusError) -> CliError {
        CliError::missing(format!("bus at {}", self.shown()), error)
    }
}
