//! Streaming replicas of a [`Postgres`], and their promotion.
//!
//! Decides: what of a running server's folder belongs into a copy.
//! In: a primary, and the address by which the replica is to reach it (its own, or a proxy's).
//! Out: a hot standby, which can be read, cut off and promoted.
//!
//! How: an online base backup through SQL (`pg_backup_start`, copy, `pg_backup_stop`), because the
//! pinned programs come without pg_basebackup. The log that the copy needs is streamed from the
//! primary, which keeps enough of it.
//!
//! Invariants:
//! 1. Replication is asynchronous: the primary never waits for the replica, so a promotion loses
//!    what was not streamed.
//! 2. A replica promoted is a server like every other, on a timeline of its own.
//!
//! Not covered: synchronous replication, slots, and going back (`pg_rewind`): a new replica is
//! made instead.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use crate::postgres::{Site, USER};
use crate::process::POLL;
use crate::{DevstackError, Postgres, Tools};

/// Folders whose content a copy must not or need not have; Postgres wants the folders themselves.
const EMPTIED: &[&str] = &[
    "pg_wal",
    "pg_dynshmem",
    "pg_notify",
    "pg_replslot",
    "pg_serial",
    "pg_snapshots",
    "pg_stat_tmp",
    "pg_subtrans",
];
/// Files of the running server that would mislead the copy.
const LEFT_OUT: &[&str] = &["postmaster.pid", "postmaster.opts", "backup_label", "standby.signal"];
/// How long replication may take to come as far as the primary, on a machine that builds as well.
const CAUGHT_UP_LIMIT: Duration = Duration::from_secs(30);
/// How long a promotion may take; it needs no checkpoint.
const PROMOTE_LIMIT_S: u32 = 30;

impl Postgres {
    /// Makes a streaming replica that reaches this server at `by`, and waits until it can be read.
    pub async fn start_replica(
        &self,
        tools: &Tools,
        by: SocketAddr,
    ) -> Result<Postgres, DevstackError> {
        let site = Site::new(tools)?;
        let mut admin = self.admin().await?;
        let label = "SELECT pg_backup_start('replica', true)::text";
        text(&mut admin, label).await?;
        let (from, to) = (self.data(), site.data());
        let copied = tokio::task::spawn_blocking({
            let to = to.clone();
            move || copy_data(&from, &to)
        });
        let files = copied.await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        let stop = "SELECT labelfile FROM pg_backup_stop(false)";
        let label = text(&mut admin, stop).await?;
        let doing = |source| DevstackError::Io {
            doing: format!("copying the data folder to {}", to.display()),
            source,
        };
        let mut files = files.map_err(doing)?;
        files.extend(write_replica_files(&to, &label, by).map_err(doing)?);
        for file in &files {
            site.give(file)?;
        }
        site.run(self.databases()).await
    }

    /// Waits until this replica has applied everything that `primary` has written by now.
    pub async fn wait_until_caught_up(&self, primary: &Postgres) -> Result<(), DevstackError> {
        let mut there = primary.admin().await?;
        let mut here = self.admin().await?;
        let wanted = text(&mut there, "SELECT pg_current_wal_lsn()::text").await?;
        let look = format!("SELECT (pg_last_wal_replay_lsn() >= '{wanted}'::pg_lsn)::text");
        let deadline = Instant::now() + CAUGHT_UP_LIMIT;
        while text(&mut here, &look).await? != "true" {
            if Instant::now() >= deadline {
                return Err(DevstackError::TimedOut {
                    name: "replica".to_owned(),
                    awaited: format!("log position {wanted}"),
                    limit: CAUGHT_UP_LIMIT,
                    log_tail: self.log_tail(),
                });
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Makes a replica a primary of its own, with what it has applied, and waits until it takes
    /// writes. The old primary goes on if nobody stops it.
    pub async fn promote(&self) -> Result<(), DevstackError> {
        let mut admin = self.admin().await?;
        let promote = format!("SELECT pg_promote(true, {PROMOTE_LIMIT_S})::text");
        let done = text(&mut admin, &promote).await?;
        if done == "true" {
            return Ok(());
        }
        Err(DevstackError::TimedOut {
            name: "replica".to_owned(),
            awaited: "promotion".to_owned(),
            limit: Duration::from_secs(PROMOTE_LIMIT_S.into()),
            log_tail: self.log_tail(),
        })
    }

    async fn admin(&self) -> Result<PgConnection, DevstackError> {
        let url = self.url("postgres");
        let failed = |source| DevstackError::Sql { statement: "connecting".to_owned(), source };
        PgConnection::connect(&url).await.map_err(failed)
    }
}

async fn text(admin: &mut PgConnection, statement: &str) -> Result<String, DevstackError> {
    // Safe: the statements of this file hold numbers and positions the server itself gave.
    let row = sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).fetch_one(admin).await;
    row.map(|row| row.get(0))
        .map_err(|source| DevstackError::Sql { statement: statement.to_owned(), source })
}

/// Copies a folder that changes meanwhile; returns everything that was made.
fn copy_data(from: &Path, to: &Path) -> io::Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    copy_folder(from, to, true, &mut made)?;
    let archive_status = to.join("pg_wal/archive_status");
    make_folder(&archive_status, &mut made)?;
    Ok(made)
}

fn make_folder(folder: &Path, made: &mut Vec<PathBuf>) -> io::Result<()> {
    fs::create_dir(folder)?;
    // Postgres refuses a data folder that others may look into.
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
    made.push(folder.to_owned());
    Ok(())
}

fn copy_folder(from: &Path, to: &Path, top: bool, made: &mut Vec<PathBuf>) -> io::Result<()> {
    make_folder(to, made)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let (source, target) = (entry.path(), to.join(&name));
        let listed = |names: &[&str]| names.iter().any(|listed| name == *listed);
        let is_folder = match entry.file_type() {
            Ok(kind) => kind.is_dir(),
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        if top && is_folder && listed(EMPTIED) {
            make_folder(&target, made)?;
        } else if is_folder {
            copy_folder(&source, &target, false, made)?;
        } else if !(top && listed(LEFT_OUT)) {
            match fs::copy(&source, &target) {
                Ok(_) => made.push(target),
                // The server removed it meanwhile; the log tells the copy so.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// What makes the copy a standby of the server at `by`.
fn write_replica_files(data: &Path, label: &str, by: SocketAddr) -> io::Result<Vec<PathBuf>> {
    let (label_file, signal) = (data.join("backup_label"), data.join("standby.signal"));
    fs::write(&label_file, label)?;
    fs::write(&signal, "")?;
    let (host, port) = (by.ip(), by.port());
    let settings = format!(
        "primary_conninfo = 'host={host} port={port} user={USER} application_name=replica'\n\
         wal_retrieve_retry_interval = '200ms'\n\
         wal_receiver_timeout = '3s'\n"
    );
    let conf = data.join("postgresql.auto.conf");
    let mut conf = fs::OpenOptions::new().append(true).open(conf)?;
    conf.write_all(settings.as_bytes())?;
    Ok(vec![label_file, signal])
}
