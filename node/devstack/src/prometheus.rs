//! A real Prometheus as a child, which scrapes nodes every second.
//!
//! Decides: when it counts as up (it listens).
//! In: the program, addresses of nodes, rules of alerts. Out: its address.
//!
//! Not covered: what it is asked; that is HTTP.

use crate::guard::{Scratch, StopSignal};
use crate::{DevstackError, ManagedProcess, ProcessSpec};
use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

/// How long it may take to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// A Prometheus with a job named `lockstep`.
#[derive(Debug)]
pub struct Prometheus {
    address: SocketAddr,
    _process: ManagedProcess,
    _folder: Scratch,
}

/// An address of this machine where nobody listens; another program may take it before its user does.
pub fn free_address() -> Result<SocketAddr, DevstackError> {
    let failed = |source| DevstackError::Io { doing: "looking for a free port".to_owned(), source };
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(failed)
}

impl Prometheus {
    /// Starts it with these nodes as targets, and with the rules of a file if there is one.
    pub async fn start(
        program: &Path,
        targets: &[SocketAddr],
        rules: Option<&Path>,
    ) -> Result<Prometheus, DevstackError> {
        let folder = Scratch::new()?;
        let file = folder.join("prometheus.yml");
        std::fs::write(&file, config(targets, rules)).map_err(|source| DevstackError::Io {
            doing: format!("writing {}", file.display()),
            source,
        })?;
        let address = free_address()?;
        let process = ProcessSpec::new("prometheus", program)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stop_signal(StopSignal::Term)
            .start()?;
        process.wait_for_port(address, START_LIMIT).await?;
        Ok(Prometheus { address, _process: process, _folder: folder })
    }

    /// Where it answers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn config(targets: &[SocketAddr], rules: Option<&Path>) -> String {
    let mut text =
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n".to_owned();
    // A JSON text is YAML as well.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    if let Some(rules) = rules {
        let _never = writeln!(text, "rule_files: [{}]", quoted(&rules.display().to_string()));
    }
    let targets: Vec<String> = targets.iter().map(|target| quoted(&target.to_string())).collect();
    text + &format!(
        "scrape_configs:\n- job_name: lockstep\n  static_configs:\n  - targets: [{}]\n",
        targets.join(", ")
    )
}
