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
//! 4. Who only reads changes nothing: the server refuses every write on such a connection, and a schema
//!    that is not this program's is named, with what to do.
//! 5. A database that is away is waited for only where a node starts, and not longer than
//!    [`StartWait::USUAL`]; what waiting does not cure ends at once.
//!
//! Not covered: which statements run; that is in the modules that own them.

use crate::causes::with_causes;
use crate::roles;
use sqlx::ConnectOptions;
use sqlx::migrate::MigrateError;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPool, PgPoolOptions};
use std::fmt;
use std::future::Future;
use std::io::ErrorKind;
use std::time::Duration;
use tokio::time::Instant;

/// The files of `migrations/`, forward only.
pub static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("../migrations");

/// How long a caller waits for a free connection of a pool (chosen: the query limit).
pub const POOL_WAIT: Duration = Duration::from_secs(5);

/// Longest wait for one connection (chosen: a packet that was lost is sent again three times by then).
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How a node that starts waits for a database that is away.
#[derive(Debug, Clone, Copy)]
pub struct StartWait {
    /// Between two tries; each is logged.
    pub every: Duration,
    /// No try begins later.
    pub limit: Duration,
}

impl StartWait {
    /// A failover takes seconds, up to a minute; service managers give a node that starts 120 s
    /// (`node/deploy`), and start it again when it ends.
    pub const USUAL: StartWait =
        StartWait { every: Duration::from_secs(3), limit: Duration::from_secs(90) };
}

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
    /// The schema is not this program's, and this verb only reads, or cannot mend it.
    #[error("{0}")]
    Schema(Differs),
    /// The schema is older than this program's, and the role may not change it.
    #[error(
        "the schema of the database is at migration {found}, this program's at {own}, and the role \
         {role:?} may not change it: run `lockstep roles apply` with the role that owns the tables, \
         and then this again"
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

/// How the schema of a database differs from this program's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Differs {
    /// No migration was ever applied.
    Empty,
    /// Migrations are missing.
    Older {
        /// The last one in the database.
        found: i64,
        /// The last one that the program has.
        own: i64,
    },
    /// The database has migrations that the program does not know.
    Newer {
        /// The last one in the database.
        found: i64,
        /// The last one that the program has.
        own: i64,
    },
    /// A migration was applied with another text.
    OtherBuild {
        /// Its number.
        version: i64,
    },
    /// The application of a migration was broken off.
    BrokenOff {
        /// Its number.
        version: i64,
    },
}

impl fmt::Display for Differs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Differs::Empty => f.write_str(
                "it has no tables of Lockstep yet: `lockstep migrate` makes them, with the role that \
                 shall own them",
            ),
            Differs::Older { found, own } => write!(
                f,
                "its schema is older than this program, at migration {found} and not at {own}: bring \
                 it up to date with `lockstep migrate`, or `lockstep roles apply` where there are \
                 roles, with the role that owns the tables"
            ),
            Differs::Newer { found, own } => write!(
                f,
                "its schema is newer than this program, at migration {found} and not at {own}: use \
                 the program of that version"
            ),
            Differs::OtherBuild { version } => write!(
                f,
                "its migration {version} is of another build: use the build that made this schema, \
                 or a newer one (`lockstep migrate status`)"
            ),
            Differs::BrokenOff { version } => write!(
                f,
                "its migration {version} was broken off: look at the server's log and at `lockstep \
                 migrate status`"
            ),
        }
    }
}

/// SQLSTATE of a right that the role lacks.
const INSUFFICIENT_PRIVILEGE: &str = "42501";

/// Whether the role of the connection lacks the right for it.
pub fn is_not_allowed(error: &sqlx::Error) -> bool {
    let state = error.as_database_error().and_then(|refusal| refusal.code());
    state.is_some_and(|state| state == INSUFFICIENT_PRIVILEGE)
}

/// Parameters of a URL that sqlx knows; it ignores any other, and with a mistyped `sslmode` goes on in
/// plaintext. `options[NAME]` is one as well.
const PARAMETERS: &[&str] = &[
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];

/// What is wrong with the first parameter that would be ignored. Values are not told, nor what may be a
/// piece of one: a password with `?` or `&` in it that was not written as `%3F` or `%26`.
fn unknown_parameter(url: &str) -> Option<String> {
    let (_, query) = url.split_once('?')?;
    let query = query.split('#').next().unwrap_or_default();
    query.split('&').filter(|part| !part.is_empty()).find_map(|part| {
        let (name, value) =
            part.split_once('=').map_or((part, None), |(name, value)| (name, Some(value)));
        if PARAMETERS.contains(&name)
            || name.starts_with("options[")
            || name.starts_with("options%5B")
        {
            return None;
        }
        let is_word =
            name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        Some(match value {
            Some(_) if is_word => format!("parameter {name:?} is not known"),
            _ => "what follows '?' must be NAME=VALUE, joined by '&'".to_owned(),
        })
    })
}

/// Options for a connection that calls itself `lockstep-<role>`.
pub fn options(url: &str, role: &str) -> Result<PgConnectOptions, DatabaseError> {
    let options: PgConnectOptions = url.parse().map_err(|error: sqlx::Error| match error {
        sqlx::Error::Configuration(cause) => DatabaseError::Url(cause.to_string()),
        other => DatabaseError::Connect(other),
    })?;
    if let Some(what) = unknown_parameter(url) {
        return Err(DatabaseError::Url(what));
    }
    Ok(options.application_name(&format!("lockstep-{role}")).disable_statement_logging())
}

/// Which database a URL leads to, and as whom, for people; no password is in it.
pub fn shown(url: &str) -> Option<String> {
    let options = options(url, "shown").ok()?;
    let place = match options.get_socket() {
        Some(socket) => format!("{}:{}", socket.display(), options.get_port()),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    let role = options.get_username();
    // Without a name the server takes that of the role.
    let name = options.get_database().unwrap_or(role);
    Some(format!("{name} at {place}, role {role}"))
}

/// One connection that belongs to nobody else.
pub async fn connect(url: &str, role: &str) -> Result<PgConnection, DatabaseError> {
    open(options(url, role)?).await
}

async fn open(options: PgConnectOptions) -> Result<PgConnection, DatabaseError> {
    let connected = tokio::time::timeout(CONNECT_LIMIT, options.connect()).await;
    let silent = || {
        let what = format!("no answer within {CONNECT_LIMIT:?}");
        sqlx::Error::Io(std::io::Error::new(ErrorKind::TimedOut, what))
    };
    connected.unwrap_or_else(|_| Err(silent())).map_err(DatabaseError::Connect)
}

/// A connection that can only read, to a database whose schema is this program's. Nothing is migrated,
/// and no right but to read is needed; a replica is good enough.
///
/// Errors: `Schema` where the schema is another one, `Unreadable` where that cannot be seen.
pub async fn connect_to_read(url: &str, role: &str) -> Result<PgConnection, DatabaseError> {
    let read_only = [("default_transaction_read_only", "on")];
    let mut connection = open(options(url, role)?.options(read_only)).await?;
    match differs(&applied(&mut connection).await?) {
        None => Ok(connection),
        Some(differs) => Err(DatabaseError::Schema(differs)),
    }
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
/// Errors: `Schema` where it is not an older one, `OtherSchema` where the role may not change it.
pub async fn migrate(url: &str) -> Result<(), DatabaseError> {
    let mut connection = connect(url, "migrate").await?;
    let applied = applied(&mut connection).await?;
    match differs(&applied) {
        None => return Ok(()),
        Some(Differs::Empty | Differs::Older { .. }) => {}
        Some(differs) => return Err(DatabaseError::Schema(differs)),
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
        let (found, own) = (last(&applied), last_own());
        return Err(DatabaseError::OtherSchema { found, own, role: role.unwrap_or_default() });
    }
    // The migration is done, and counts; who lacks a right on what it made will be told so.
    if let Err(error) = roles::grant(&mut connection).await {
        tracing::warn!(error = %with_causes(&error), "the rights of the database roles were not renewed; `lockstep roles apply` does it");
    }
    Ok(())
}

/// The same for a node that starts: a database that is away is waited for.
///
/// Errors: at once what waiting does not cure, such as a wrong password; the last one after the limit.
pub async fn migrate_when_there(url: &str, wait: StartWait) -> Result<(), DatabaseError> {
    when_there(wait, || migrate(url)).await
}

async fn when_there<F>(wait: StartWait, mut attempt: impl FnMut() -> F) -> Result<(), DatabaseError>
where
    F: Future<Output = Result<(), DatabaseError>>,
{
    let began = Instant::now();
    loop {
        let Err(error) = attempt().await else { return Ok(()) };
        let waited = began.elapsed();
        if !may_come_back(&error) || waited + wait.every > wait.limit {
            return Err(error);
        }
        let (waited_s, limit_s) = (waited.as_secs(), wait.limit.as_secs());
        tracing::warn!(error = %with_causes(&error), waited_s, limit_s, "the database is away; trying again");
        tokio::time::sleep(wait.every).await;
    }
}

/// Whether a database may answer soon that did not now.
fn may_come_back(error: &DatabaseError) -> bool {
    let source = match error {
        DatabaseError::Connect(source) | DatabaseError::Unreadable(source) => source,
        DatabaseError::Migrate(MigrateError::Execute(source)) => source,
        DatabaseError::Migrate(_)
        | DatabaseError::Url(_)
        | DatabaseError::Schema(_)
        | DatabaseError::OtherSchema { .. } => return false,
    };
    match source {
        // A certificate that does not fit is no outage.
        sqlx::Error::Io(error) => error.kind() != ErrorKind::InvalidData,
        // Connections that break, too many of them, a server that starts or stops.
        sqlx::Error::Database(refusal) => refusal.code().is_some_and(|state| {
            state.starts_with("08") || state.starts_with("53") || state.starts_with("57P")
        }),
        _ => false,
    }
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

fn last(applied: &[Applied]) -> i64 {
    applied.iter().map(|migration| migration.version).max().unwrap_or(0)
}

fn last_own() -> i64 {
    MIGRATOR.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// How the schema differs from ours; nothing where exactly our migrations were applied.
fn differs(applied: &[Applied]) -> Option<Differs> {
    let (found, own) = (last(applied), last_own());
    let ours = |version: i64| MIGRATOR.iter().find(|migration| migration.version == version);
    for Applied { version, checksum, success } in applied {
        let version = *version;
        match ours(version) {
            None if version > own => return Some(Differs::Newer { found, own }),
            None => return Some(Differs::OtherBuild { version }),
            Some(_) if !success => return Some(Differs::BrokenOff { version }),
            Some(migration) if migration.checksum.as_ref() != checksum.as_slice() => {
                return Some(Differs::OtherBuild { version });
            }
            Some(_) => {}
        }
    }
    if applied.is_empty() {
        return Some(Differs::Empty);
    }
    (applied.len() < MIGRATOR.iter().count()).then_some(Differs::Older { found, own })
}

/// A connection of its own, with the schema brought up to date first.
pub async fn connect_migrated(url: &str, role: &str) -> Result<PgConnection, DatabaseError> {
    migrate(url).await?;
    connect(url, role).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causes::fake;
    use std::cell::Cell;

    fn ours() -> Vec<Applied> {
        let ours = MIGRATOR.iter();
        ours.map(|m| Applied { version: m.version, checksum: m.checksum.to_vec(), success: true })
            .collect()
    }

    #[test]
    fn a_schema_of_another_version_is_named_with_what_to_do() {
        let own = last_own();
        assert_eq!(differs(&ours()), None);
        assert_eq!(differs(&[]), Some(Differs::Empty));
        let mut older = ours();
        older.pop();
        let told = differs(&older).unwrap();
        assert_eq!(told, Differs::Older { found: own - 1, own });
        assert!(
            told.to_string().contains("older") && told.to_string().contains("lockstep migrate")
        );
        let mut newer = ours();
        newer.push(Applied { version: own + 2, checksum: vec![1], success: true });
        let told = differs(&newer).unwrap();
        assert_eq!(told, Differs::Newer { found: own + 2, own });
        assert!(
            told.to_string()
                .contains(&format!("newer than this program, at migration {}", own + 2))
        );
        let mut other = ours();
        other[2].checksum = vec![1];
        assert_eq!(differs(&other), Some(Differs::OtherBuild { version: other[2].version }));
        let mut broken = ours();
        broken[2].success = false;
        assert_eq!(differs(&broken), Some(Differs::BrokenOff { version: broken[2].version }));
    }

    #[tokio::test]
    async fn who_only_reads_migrates_nothing_and_cannot_write() {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("readers").await.unwrap();
        let refused = connect_to_read(&url, "test").await.unwrap_err();
        assert!(matches!(refused, DatabaseError::Schema(Differs::Empty)), "{refused}");
        let mut db = connect_migrated(&url, "test").await.unwrap();
        let mut reader = connect_to_read(&url, "test").await.unwrap();
        let refused =
            sqlx::query("update fleet_mode set mode = 'paused'").execute(&mut reader).await;
        let state = refused.unwrap_err().as_database_error().unwrap().code().unwrap().into_owned();
        assert_eq!(state, "25006");
        sqlx::query("delete from _sqlx_migrations where version = $1")
            .bind(last_own())
            .execute(&mut db)
            .await
            .unwrap();
        let refused = connect_to_read(&url, "test").await.unwrap_err();
        assert!(matches!(refused, DatabaseError::Schema(Differs::Older { .. })), "{refused}");
        let found = last(&applied(&mut db).await.unwrap());
        assert!(found < last_own(), "the reader applied what was missing");
    }

    const QUICK: StartWait =
        StartWait { every: Duration::from_millis(5), limit: Duration::from_secs(20) };

    /// A database behind a front that breaks the first `failures` connections.
    async fn behind_a_front(url: &str, failures: usize) -> String {
        let place = url.split_once('@').unwrap().1.split_once('/').unwrap().0.to_owned();
        let front = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let shown = url.replace(&place, &front.local_addr().unwrap().to_string());
        tokio::spawn(async move {
            for number in 0.. {
                let (mut client, _) = front.accept().await.unwrap();
                if number < failures {
                    continue;
                }
                let mut server = tokio::net::TcpStream::connect(&place).await.unwrap();
                tokio::spawn(async move {
                    let _ended = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        shown
    }

    #[tokio::test]
    async fn a_node_that_starts_while_its_database_is_away_waits_for_it() {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("awaited").await.unwrap();
        let front = behind_a_front(&url, 3).await;
        migrate_when_there(&front, QUICK).await.unwrap();
        connect_to_read(&url, "test").await.unwrap();
    }

    #[tokio::test]
    async fn what_waiting_does_not_cure_ends_a_start_at_once() {
        for state in ["28P01", "28000", "3D000", "42501"] {
            let refusal = DatabaseError::Connect(fake::refusal(state).await);
            assert!(!may_come_back(&refusal), "{state}");
        }
        for state in ["57P03", "57P01", "53300", "08006"] {
            let refusal = DatabaseError::Connect(fake::refusal(state).await);
            assert!(may_come_back(&refusal), "{state}");
        }
        let tries = Cell::new(0);
        let ended = when_there(QUICK, || {
            tries.set(tries.get() + 1);
            async { Err(DatabaseError::Connect(fake::refusal("28P01").await)) }
        });
        assert!(ended.await.is_err());
        assert_eq!(tries.get(), 1);
    }

    #[tokio::test]
    async fn a_database_that_stays_away_ends_a_start_after_the_limit() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let url = format!("postgres://u@{free}/x");
        let wait = StartWait { limit: Duration::from_millis(100), ..QUICK };
        let ended = tokio::time::timeout(QUICK.limit, migrate_when_there(&url, wait)).await;
        assert!(matches!(ended, Ok(Err(DatabaseError::Connect(_)))), "{ended:?}");
    }
}
