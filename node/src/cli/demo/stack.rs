//! What `./run stack` adds to the demo: a Prometheus, and the API of every node.
//!
//! In: where Prometheus is, the rules of its alerts. Out: addresses for a person, and for the nodes.
//!
//! Invariant: a node that is killed and started again listens where it did before.

use crate::api::tokens::{self, Scope};
use crate::cli::CliError;
use crate::secret::Secret;
use devstack::{Prometheus, free_address};
use sqlx::PgConnection;
use std::net::SocketAddr;
use std::path::Path;

/// The demo is over long before.
const TOKEN_DAYS: u16 = 1;

/// Where everything is.
pub(super) struct Stack {
    metrics: Vec<SocketAddr>,
    api: Vec<SocketAddr>,
    token: Secret,
    prometheus: Prometheus,
}

impl Stack {
    /// Starts Prometheus for so many nodes, and makes a token that may operate them.
    pub(super) async fn start(
        program: &Path,
        rules: Option<&Path>,
        nodes: u32,
        db: &mut PgConnection,
    ) -> Result<Stack, CliError> {
        let free = || (0..nodes).map(|_| free_address()).collect::<Result<Vec<_>, _>>();
        let failed = |error| CliError::missing("addresses of the stack", error);
        let (metrics, api) = (free().map_err(failed)?, free().map_err(failed)?);
        let (_row, token) = tokens::add(db, "stack", Scope::Operate, TOKEN_DAYS)
            .await
            .map_err(|error| CliError::missing("token", error))?;
        // It runs in a folder of its own.
        let rules = rules.map(std::path::absolute).transpose()?;
        let prometheus = Prometheus::start(program, &metrics, rules.as_deref())
            .await
            .map_err(|error| CliError::missing("Prometheus", error))?;
        Ok(Stack { metrics, api, token, prometheus })
    }

    /// Where node number `index` serves its metrics.
    pub(super) fn metrics(&self, index: u32) -> String {
        self.metrics[index as usize].to_string()
    }

    /// Where it serves its API.
    pub(super) fn api(&self, index: u32) -> String {
        self.api[index as usize].to_string()
    }

    /// For a person.
    pub(super) fn addresses(&self, database_url: &str, nats_url: &str) -> String {
        let mut text = format!(
            "the stack is there:\n    Prometheus   http://{}/alerts\n    Postgres     {database_url}\n    \
             NATS         {nats_url}\n    token        {}",
            self.prometheus.address(),
            self.token.expose()
        );
        for (index, (metrics, api)) in self.metrics.iter().zip(&self.api).enumerate() {
            text += &format!(
                "\n    demo-node-{}  http://{metrics}/metrics  http://{api}/v1/nodes",
                index + 1
            );
        }
        text
    }
}
