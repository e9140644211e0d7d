//! A real Postgres as a child, in a temporary folder, one database a test.
//!
//! Decides: which user it runs as, where its folder is, when it counts as up (its own pid file
//! says "ready").
//! In: [`Tools`]. Out: URLs of databases; stop, crash, restart.
//!
//! Invariants:
//! 1. It never runs as root: started by root, it runs as `postgres` or `nobody`, from programs
//!    that user can read, in a folder that user owns.
//! 2. Only its durability against a power cut is switched off (`fsync`); `synchronous_commit`, and
//!    so what a commit promises to other sessions and after a crash of the server, stays.
//! 3. Nothing of the environment (`PGHOST` and the like) reaches it.
//!
//! Not covered: passwords and TLS. It trusts whoever connects, on the loopback address only.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::guard::{Scratch, StopSignal};
use crate::{DevstackError, ManagedProcess, ProcessSpec, Tools};

/// initdb takes one or two seconds; this is for a machine that builds at the same time.
const INITDB_LIMIT: Duration = Duration::from_secs(120);
const START_LIMIT: Duration = Duration::from_secs(60);
/// The immediate shutdown takes some 50 ms.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How often another port is tried when somebody took the one we found free.
const PORT_ATTEMPTS: u32 = 5;
/// The superuser's name, and so the user in every URL.
pub(crate) const USER: &str = "lockstep";
/// A socket's path has at most 107 bytes on Linux; this leaves room for `/.s.PGSQL.65535`.
const SOCKET_FOLDER_BYTES: usize = 90;
/// Log kept for replicas: more than the tests write while one is made.
const WAL_KEPT: &str = "256MB";
/// Longest name of a database is 63 bytes; the counter needs some of them.
const PREFIX_CHARS: usize = 40;

/// A Postgres server.
#[derive(Debug)]
pub struct Postgres {
    process: ManagedProcess,
    port: u16,
    folder: Scratch,
    databases: AtomicU64,
}

/// Where a server lives and how its programs are run.
#[derive(Debug)]
pub(crate) struct Site {
    folder: Scratch,
    bin: PathBuf,
    run_as: Option<RunAs>,
}

impl Site {
    pub(crate) fn new(tools: &Tools) -> Result<Self, DevstackError> {
        let run_as = run_as()?;
        let folder = Scratch::new_in(&temporary_folder(run_as.as_ref())?)?;
        if let Some(user) = &run_as {
            give(folder.path(), user)?;
        }
        let bin = readable_programs(tools, run_as.as_ref(), &folder)?;
        Ok(Self { folder, bin, run_as })
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn command(&self, name: &str, program: &str) -> ProcessSpec {
        let spec = ProcessSpec::new(name, self.bin.join(program))
            .current_dir(self.folder.path())
            .log_folder(self.folder.path())
            .env("LC_ALL", "C")
            .env("TZ", "UTC");
        let spec = foreign_settings().fold(spec, ProcessSpec::env_remove);
        match &self.run_as {
            Some(user) => spec.user(user.uid, user.gid),
            None => spec,
        }
    }

    /// Gives a path to the user the server runs as.
    pub(crate) fn give(&self, path: &Path) -> Result<(), DevstackError> {
        self.run_as.as_ref().map_or(Ok(()), |user| give(path, user))
    }

    /// Runs the server over the data folder and waits until it takes connections. `databases`
    /// have been made in it before.
    pub(crate) async fn run(self, databases: u64) -> Result<Postgres, DevstackError> {
        let data = self.data();
        let mut attempt = 1;
        loop {
            let port = free_port()?;
            let settings = settings(port, self.folder.path());
            let process = self
                .command("postgres", "postgres")
                .arg("-D")
                .arg(&data)
                .args(settings.iter().flat_map(|setting| ["-c", setting]))
                .stop_signal(StopSignal::Quit)
                .start()?;
            match await_ready(&process, &data).await {
                Ok(()) => {
                    let databases = AtomicU64::new(databases);
                    return Ok(Postgres { process, port, folder: self.folder, databases });
                }
                Err(DevstackError::Ended { log_tail, .. })
                    if attempt < PORT_ATTEMPTS && log_tail.contains("could not bind") =>
                {
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The user Postgres runs as, when we are root.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RunAs {
    name: String,
    uid: u32,
    gid: u32,
}

impl Postgres {
    /// Makes a new, empty server and waits until it takes connections.
    pub async fn start(tools: &Tools) -> Result<Self, DevstackError> {
        let site = Site::new(tools)?;
        let initdb = site
            .command("initdb", "initdb")
            .arg("-D")
            .arg(site.data())
            .args(["-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])
            .arg("--no-instructions")
            .start()?;
        let status = initdb.wait(INITDB_LIMIT).await?;
        if !status.success() {
            return Err(DevstackError::Ended {
                name: "initdb".to_owned(),
                status,
                awaited: "the data folder was made".to_owned(),
                log_tail: initdb.log_tail(),
            });
        }
        site.run(0).await
    }

    /// The URL of a database, which need not exist.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{USER}@{}/{database}", self.addr())
    }

    /// Where it listens, for a proxy in between.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// Makes an empty database with a name of its own, and returns its URL.
    ///
    /// `prefix` makes the name readable; what is no letter, digit or `_` in it becomes `_`.
    pub async fn create_database(&self, prefix: &str) -> Result<String, DevstackError> {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let prefix: String = prefix
            .chars()
            .take(PREFIX_CHARS)
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' })
            .collect();
        let name = format!("{prefix}_{number}");
        let statement = format!("CREATE DATABASE \"{name}\"");
        let failed = |source| DevstackError::Sql { statement: statement.clone(), source };
        let mut admin = PgConnection::connect(&self.url("postgres")).await.map_err(failed)?;
        // Safe: the name holds letters, digits and underscores only.
        sqlx::raw_sql(AssertSqlSafe(statement.clone()))
            .execute(&mut admin)
            .await
            .map_err(failed)?;
        admin.close().await.map_err(failed)?;
        Ok(self.url(&name))
    }

    /// Stops it at once, as if it had crashed: open connections break, and a restart recovers from
    /// the log. What was committed is kept.
    pub async fn stop(&self) -> Result<(), DevstackError> {
        self.process.stop(STOP_LIMIT).await.map(drop)
    }

    /// Starts it again on the same port, with its databases, after [`Postgres::stop`] (or stops it
    /// first).
    pub async fn restart(&self) -> Result<(), DevstackError> {
        self.stop().await?;
        self.process.restart()?;
        await_ready(&self.process, &self.data()).await
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// How many databases were made in it.
    pub(crate) fn databases(&self) -> u64 {
        self.databases.load(Ordering::Relaxed)
    }

    /// The last lines it logged.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    /// Its process, for what is not offered here. Freezing it stops the postmaster only, not the
    /// sessions; to cut a client off, use [`crate::FaultProxy`].
    pub fn process(&self) -> &ManagedProcess {
        &self.process
    }
}

fn settings(port: u16, folder: &Path) -> Vec<String> {
    // The socket is for a person with psql; where its path would be too long, there is none.
    let socket = folder.display().to_string();
    let socket = if socket.len() <= SOCKET_FOLDER_BYTES { socket } else { String::new() };
    vec![
        format!("port={port}"),
        "listen_addresses=127.0.0.1".to_owned(),
        format!("unix_socket_directories={socket}"),
        "max_connections=200".to_owned(),
        "fsync=off".to_owned(),
        "synchronous_commit=on".to_owned(),
        // What a replica needs that is made later; kept instead of a slot for it, which would
        // have to be dropped.
        format!("wal_keep_size={WAL_KEPT}"),
        "timezone=UTC".to_owned(),
        // In the data folder, and so gone with it, instead of in a /dev/shm that may be small.
        "dynamic_shared_memory_type=mmap".to_owned(),
        "logging_collector=off".to_owned(),
    ]
}

/// Waits for the word in the server's own pid file: no stranger on the port can say it.
async fn await_ready(process: &ManagedProcess, data: &Path) -> Result<(), DevstackError> {
    let pid_file = data.join("postmaster.pid");
    process
        .wait_until("connections accepted", START_LIMIT, async || {
            let text = fs::read_to_string(&pid_file).unwrap_or_default();
            let mut lines = text.lines();
            let ours = lines.next().map(str::to_owned) == process.pid().map(|pid| pid.to_string());
            // The eighth line is its state.
            Ok((ours && lines.nth(6).is_some_and(|state| state.trim() == "ready")).then_some(()))
        })
        .await
}

/// A port nobody listens at now; the caller tries again if somebody does by then.
fn free_port() -> Result<u16, DevstackError> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|addr| addr.port())
        .map_err(|source| DevstackError::Io { doing: "finding a free port".to_owned(), source })
}

/// Names of variables that would change what initdb or the server does.
fn foreign_settings() -> impl Iterator<Item = std::ffi::OsString> {
    std::env::vars_os().map(|(name, _)| name).filter(|name| {
        let name = name.to_string_lossy();
        name.starts_with("PG") || (name.starts_with("LC_") && name != "LC_ALL")
    })
}

/// Whom to run as: nobody else, unless we are root.
fn run_as() -> Result<Option<RunAs>, DevstackError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    find_user(&passwd).map(Some).ok_or(DevstackError::NoUser)
}

fn find_user(passwd: &str) -> Option<RunAs> {
    let user = |wanted: &str| {
        passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, uid, gid, ..] = fields[..] else { return None };
            let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
            (name == wanted && uid != 0).then(|| RunAs { name: name.to_owned(), uid, gid })
        })
    };
    user("postgres").or_else(|| user("nobody"))
}

/// The first temporary folder that the user may enter.
fn temporary_folder(run_as: Option<&RunAs>) -> Result<PathBuf, DevstackError> {
    let Some(user) = run_as else { return Ok(std::env::temp_dir()) };
    let candidates = [std::env::temp_dir(), PathBuf::from("/tmp"), PathBuf::from("/var/tmp")];
    candidates.iter().find(|folder| others_may_enter(folder)).cloned().ok_or_else(|| {
        DevstackError::NoTemporaryFolder {
            user: user.name.clone(),
            tried: candidates.map(|folder| folder.display().to_string()).join(", "),
        }
    })
}

/// Whether everybody may enter this folder and every one above it. Groups and access lists are
/// not looked at: "no" for a folder that can be entered only costs a copy.
fn others_may_enter(folder: &Path) -> bool {
    let Ok(folder) = folder.canonicalize() else { return false };
    folder.ancestors().all(|folder| {
        fs::metadata(folder).is_ok_and(|meta| meta.is_dir() && meta.mode() & 0o001 != 0)
    })
}

/// The folder with the programs, or with a copy of them where the user cannot read them: a project
/// under `/root`, for one.
fn readable_programs(
    tools: &Tools,
    run_as: Option<&RunAs>,
    folder: &Scratch,
) -> Result<PathBuf, DevstackError> {
    let bin = &tools.postgres_bin;
    if run_as.is_none() || others_may_enter(bin) {
        return Ok(bin.clone());
    }
    let Some(tree) = &tools.postgres_tree else { return Ok(bin.clone()) };
    let copy = folder.join("postgres");
    copy_tree(tree, &copy).map_err(|source| DevstackError::Io {
        doing: format!("copying {} to {}", tree.display(), copy.display()),
        source,
    })?;
    let below = bin.strip_prefix(tree).expect("the programs are inside the tree they came from");
    Ok(copy.join(below))
}

/// Copies files and folders so that everybody can read and run them.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(from)? {
        let (source, target) = {
            let entry = entry?;
            (entry.path(), to.join(entry.file_name()))
        };
        // Follows links: the copy stands alone.
        if fs::metadata(&source)?.is_dir() {
            copy_tree(&source, &target)?;
        } else {
            fs::copy(&source, &target)?;
            let mode = fs::metadata(&target)?.mode() | 0o444;
            fs::set_permissions(&target, fs::Permissions::from_mode(mode | (mode & 0o100) >> 6))?;
        }
    }
    Ok(())
}

fn give(folder: &Path, user: &RunAs) -> Result<(), DevstackError> {
    std::os::unix::fs::chown(folder, Some(user.uid), Some(user.gid)).map_err(|source| {
        DevstackError::Io { doing: format!("giving {} to {}", folder.display(), user.name), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";

    #[test]
    fn started_by_root_it_runs_as_postgres_before_nobody() {
        let with_postgres = format!("{PASSWD}postgres:x:101:104::/var/lib/postgresql:/bin/bash\n");
        assert_eq!(find_user(&with_postgres).unwrap().name, "postgres");
        let nobody = RunAs { name: "nobody".to_owned(), uid: 65534, gid: 65534 };
        assert_eq!(find_user(PASSWD), Some(nobody));
    }

    #[test]
    fn a_second_root_is_not_a_user_to_run_as() {
        assert_eq!(find_user("postgres:x:0:0::/root:/bin/sh\nbroken line\n"), None);
    }

    #[test]
    fn a_folder_below_a_closed_one_cannot_be_entered_by_others() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(outer.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!others_may_enter(&inner));
        fs::set_permissions(outer.path(), fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(others_may_enter(&inner), others_may_enter(outer.path().parent().unwrap()));
    }

    #[test]
    fn a_copied_tree_can_be_read_and_run_by_everybody() {
        let from = tempfile::tempdir().unwrap();
        fs::create_dir(from.path().join("bin")).unwrap();
        for (name, mode) in [("bin/run", 0o700), ("data", 0o600)] {
            fs::write(from.path().join(name), "x").unwrap();
            fs::set_permissions(from.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let to = tempfile::tempdir().unwrap();
        let copy = to.path().join("copy");
        copy_tree(from.path(), &copy).unwrap();
        let mode = |name: &str| fs::metadata(copy.join(name)).unwrap().mode() & 0o777;
        assert_eq!(mode("bin"), 0o755);
        assert_eq!(mode("bin/run") & 0o005, 0o005);
        assert_eq!(mode("data") & 0o005, 0o004);
    }
}
