//! NATS, Postgres and our own processes as children, for the demo and the tests.
//!
//! Decides: nothing about trading; it starts real servers, breaks them on request, and leaves
//! nothing behind.
//! In: programs found by [`Tools::locate`]. Out: [`Nats`], [`NatsCluster`], [`Postgres`],
//! [`Prometheus`], [`ManagedProcess`] for any program, and [`FaultProxy`] to cut a connection in between.
//!
//! Invariants:
//! 1. Whatever is started here ends with its value, with a panic, and with this process, however
//!    that dies; temporary folders go the same way (see `guard.rs`).
//! 2. Every wait has a limit, and its error shows the last lines the child wrote.
//! 3. A missing program is an error that says how to get it, never a reason to skip.
//!
//! Not covered: Linux only; the servers listen on 127.0.0.1 and trust whoever connects.

mod error;
mod guard;
mod nats;
mod postgres;
mod process;
mod prometheus;
mod proxy;
mod replica;
mod tools;

pub use error::DevstackError;
pub use guard::StopSignal;
pub use nats::{Nats, NatsCluster};
pub use postgres::Postgres;
pub use process::{ManagedProcess, ProcessSpec};
pub use prometheus::{Prometheus, free_address};
pub use proxy::{Direction, FaultMode, FaultProxy};
pub use tools::Tools;

use tokio::sync::OnceCell;

static SHARED_POSTGRES: OnceCell<Postgres> = OnceCell::const_new();

/// The Postgres of this test binary, started by whoever asks first; it ends with the process.
///
/// Make a database of your own in it: [`Postgres::create_database`]. A test that stops or crashes
/// the server starts one for itself.
pub async fn shared_postgres() -> Result<&'static Postgres, DevstackError> {
    SHARED_POSTGRES.get_or_try_init(async || Postgres::start(&Tools::locate()?).await).await
}

#[cfg(test)]
mod tests;
