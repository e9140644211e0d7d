//! Connections to Postgres, and the migrations.
//!
//! Decides: how a connection of a node is set up.
//! In: the database URL. Out: single connections, pools, an up-to-date schema.
//!
//! Invariants:
//! 1. Every connection names itself (`application_name`), so that an operator sees whose it is.
//! 2. The lease never takes a connection from a pool (M3); pools are for everything else.
//!
//! Not covered: which statements run; that is in the modules that own them.

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPool, PgPoolOptions};
use std::time::Duration;

/// The files of `migrations/`, forward only.
pub static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("../migrations");

/// How long a caller waits for a free connection of a pool (chosen: the query limit).
pub const POOL_WAIT: Duration = Duration::from_secs(5);

/// Why the database could not be made ready; the process ends with it.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// The URL is not one of Postgres. Its text may hold a password, so it is not repeated.
    #[error("the database URL cannot be read: {0}")]
    Url(String),
    /// No connection.
    #[error("cannot connect to the database")]
    Connect(#[source] sqlx::Error),
    /// A migration failed, or the schema is not the one of this program.
    #[error("the database could not be migrated")]
    Migrate(#[from] sqlx::migrate::MigrateError),
}

/// Options for a connection that calls itself `lockstep-<role>`.
pub fn options(url: &str, role: &str) -> Result<PgConnectOptions, DatabaseError> {
    let options: PgConnectOptions = url.parse().map_err(|error: sqlx::Error| match error {
        sqlx::Error::Configuration(cause) => DatabaseError::Url(cause.to_string()),
        other => DatabaseError::Connect(other),
    })?;
    Ok(options.application_name(&format!("lockstep-{role}")).disable_statement_logging())
}

/// One connection that belongs to nobody else.
pub async fn connect(url: &str, role: &str) -> Result<PgConnection, DatabaseError> {
    options(url, role)?.connect().await.map_err(DatabaseError::Connect)
}

/// A pool for a part that may wait; it connects when it is first used.
pub fn pool(url: &str, role: &str, connections_max: u32) -> Result<PgPool, DatabaseError> {
    let pool = PgPoolOptions::new()
        .max_connections(connections_max)
        .acquire_timeout(POOL_WAIT)
        .connect_lazy_with(options(url, role)?);
    Ok(pool)
}

/// A connection of its own that hears what is announced on a channel.
pub async fn listen(url: &str, role: &str, channel: &str) -> Result<PgListener, DatabaseError> {
    let connect = DatabaseError::Connect;
    let options = options(url, role)?;
    let pool =
        PgPoolOptions::new().max_connections(1).connect_with(options).await.map_err(connect)?;
    let mut listener = PgListener::connect_with(&pool).await.map_err(connect)?;
    listener.listen(channel).await.map_err(connect)?;
    Ok(listener)
}

/// Brings the schema up to date. Several nodes may do so at once: the migrator takes a lock.
pub async fn migrate(url: &str) -> Result<(), DatabaseError> {
    let mut connection = connect(url, "migrate").await?;
    MIGRATOR.run(&mut connection).await?;
    Ok(())
}

/// A connection of its own, with the schema brought up to date first.
pub async fn connect_migrated(url: &str, role: &str) -> Result<PgConnection, DatabaseError> {
    migrate(url).await?;
    connect(url, role).await
}
