//! Connections to Postgres, and the migrations.
//!
//! Decides: how a connection of a node is set up; whether the schema is the one of this program.
//! In: the database URL. Out: single connections, pools, an up-to-date schema.
//!
//! Invariants:
//! 1. Every connection names itself (`application_name`), so that an operator sees whose it is.
//! 2. The lease never takes a connection from a pool (M3); pools are for everything else.
//! 3. Nothing is changed in a schema that is up to date already, so that a role without the right to
//!    change it is enough.
//!
//! Not covered: which statements run; that is in the modules that own them.

use crate::roles;
use sqlx::ConnectOptions;
use sqlx::migrate::MigrateError;
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
    Migrate(#[from] MigrateError),
    /// Which migrations were applied cannot be read: the role has no rights there.
    #[error(
        "the schema's version cannot be read; `lockstep roles apply` gives its roles the right to"
    )]
    Unreadable(#[source] sqlx::Error),
    /// The schema is older or newer than this program's, and the role may not change it.
    #[error(
        "the schema of the database is at migration {found}, this program's at {own}, and the role \
         {role:?} may not change it: {}",
        advice(*found, *own)
    )]
    OtherSchema {
        /// The last migration in the database; 0 if there is none.
        found: i64,
        /// The last one that the program has.
        own: i64,
        /// Whom the database takes us for.
        role: String,
    },
}

fn advice(found: i64, own: i64) -> &'static str {
    if found > own {
        "the program is the older one, update it"
    } else {
        "run `lockstep roles apply` with the role that owns the tables, and then this again"
    }
}

/// SQLSTATE of a right that the role lacks.
const INSUFFICIENT_PRIVILEGE: &str = "42501";

/// Whether the role of the connection lacks the right for it.
pub fn is_not_allowed(error: &sqlx::Error) -> bool {
    let state = error.as_database_error().and_then(|refusal| refusal.code());
    state.is_some_and(|state| state == INSUFFICIENT_PRIVILEGE)
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

/// Brings the schema up to date, and with it the rights of the roles that are there. Several nodes
/// may do so at once: the migrator takes a lock.
///
/// Errors: `OtherSchema` where it is not up to date and the role may not change it.
pub async fn migrate(url: &str) -> Result<(), DatabaseError> {
    let mut connection = connect(url, "migrate").await?;
    let applied = applied(&mut connection).await?;
    if is_own(&applied) {
        return Ok(());
    }
    if let Err(error) = MIGRATOR.run(&mut connection).await {
        let (MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _)) = &error
        else {
            return Err(error.into());
        };
        if !is_not_allowed(source) {
            return Err(error.into());
        }
        let role = sqlx::query_scalar("select current_user::text").fetch_one(&mut connection).await;
        let found = applied.iter().map(|migration| migration.version).max().unwrap_or(0);
        let own = MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or(0);
        return Err(DatabaseError::OtherSchema { found, own, role: role.unwrap_or_default() });
    }
    // The migration is done, and counts; who lacks a right on what it made will be told so.
    if let Err(error) = roles::grant(&mut connection).await {
        tracing::warn!(%error, "the rights of the database roles were not renewed; `lockstep roles apply` does it");
    }
    Ok(())
}

/// A row of the migrator's table.
#[derive(Debug, sqlx::FromRow)]
struct Applied {
    version: i64,
    checksum: Vec<u8>,
    success: bool,
}

async fn applied(connection: &mut PgConnection) -> Result<Vec<Applied>, DatabaseError> {
    let exists: bool = sqlx::query_scalar("select to_regclass('_sqlx_migrations') is not null")
        .fetch_one(&mut *connection)
        .await
        .map_err(DatabaseError::Connect)?;
    if !exists {
        return Ok(Vec::new());
    }
    sqlx::query_as("select version, checksum, success from _sqlx_migrations order by version")
        .fetch_all(connection)
        .await
        .map_err(DatabaseError::Unreadable)
}

/// Whether exactly our migrations were applied.
fn is_own(applied: &[Applied]) -> bool {
    let ours = MIGRATOR.iter().map(|m| (m.version, m.checksum.as_ref(), true));
    let theirs = applied.iter().map(|m| (m.version, m.checksum.as_slice(), m.success));
    ours.eq(theirs)
}

/// A connection of its own, with the schema brought up to date first.
pub async fn connect_migrated(url: &str, role: &str) -> Result<PgConnection, DatabaseError> {
    migrate(url).await?;
    connect(url, role).await
}
