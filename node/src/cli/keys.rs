//! `lockstep keys`: the master keys that brokers' passwords are sealed with.
//!
//! Invariants:
//! 1. A key is written to a file that its owner alone can read, and is printed nowhere.
//! 2. No key file is overwritten by `init`; `add` replaces it as a whole or not at all.
//! 3. `rotate` changes one row at a time, and only if it is as it was read: it may be stopped and run
//!    again, beside nodes and beside somebody who stores a new password.

use super::table::{TableRow, print_rows};
use super::{CliError, DatabaseArg, block_on, out};
use crate::config::{self, ProcessVars};
use crate::credentials::{CredentialError, Holder, MasterKey, MasterKeys, rewrap};
use crate::directory;
use clap::{Args, Subcommand};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Arguments of `lockstep keys`.
#[derive(Debug, Args)]
pub struct KeysArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(subcommand)]
    verb: KeysVerb,
}

#[derive(Debug, Subcommand)]
enum KeysVerb {
    /// Write a new master key into a new file, which nodes find by LOCKSTEP_MASTER_KEY_FILE.
    Init {
        /// The file.
        file: PathBuf,
    },
    /// Put a new master key before those of a file; what they have sealed can still be opened.
    Add {
        /// The file.
        file: PathBuf,
    },
    /// Wrap every password's key with the present master key, the first one of the file. Nodes need
    /// that one before, and the others until this is done.
    Rotate,
    /// List the master keys, and how many passwords each of them has wrapped.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs `lockstep keys`.
pub fn run(args: KeysArgs) -> Result<(), CliError> {
    match args.verb {
        KeysVerb::Init { file } => {
            let key = new_key()?;
            write_new(&file, &format!("{}\n", *key.to_line()))
                .map_err(|error| CliError::missing(file.display().to_string(), error))?;
            out::line(format_args!(
                "master key {} written to {}\n\
                 keep a copy away from the database and its backups: without it no password opens",
                key.id(),
                file.display()
            ))
        }
        KeysVerb::Add { file } => {
            let key = add(&file)?;
            out::line(format_args!(
                "master key {} is now the first one of {}\n\
                 give the file to every node, restart them one after the other, then `lockstep keys rotate`",
                key.id(),
                file.display()
            ))
        }
        KeysVerb::Rotate => block_on(rotate(&args.database))?,
        KeysVerb::List { json } => block_on(list(&args.database, json))?,
    }
}

fn new_key() -> Result<MasterKey, CliError> {
    MasterKey::random().map_err(|error| CliError::missing("master key", error))
}

/// The master keys of this shell, as a node would find them.
pub(super) fn master_keys() -> Result<Option<MasterKeys>, CliError> {
    config::master_keys(&ProcessVars).map_err(|faults| CliError::Usage(faults.join("\n")))
}

fn needed_keys() -> Result<MasterKeys, CliError> {
    master_keys()?.ok_or_else(|| CliError::Usage(CredentialError::NoKey.to_string()))
}

fn write_new(file: &Path, text: &str) -> std::io::Result<()> {
    let mut out = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    out.write_all(text.as_bytes())?;
    out.sync_all()
}

fn add(file: &Path) -> Result<MasterKey, CliError> {
    let failed = |error| CliError::missing(file.display().to_string(), error);
    let text = zeroize::Zeroizing::new(fs::read_to_string(file).map_err(failed)?);
    let wrong = |error| CliError::Usage(format!("{}: {error}", file.display()));
    MasterKeys::parse(&text).map_err(wrong)?;
    let key = new_key()?;
    let text = zeroize::Zeroizing::new(format!("{}\n{}", *key.to_line(), *text));
    MasterKeys::parse(&text).map_err(wrong)?;
    let mut fresh = file.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = PathBuf::from(fresh);
    // Left over from a run that was stopped; it was never in use.
    let _may_not_be_there = fs::remove_file(&fresh);
    write_new(&fresh, &text).map_err(failed)?;
    fs::rename(&fresh, file).map_err(failed)?;
    Ok(key)
}

async fn rotate(database: &DatabaseArg) -> Result<(), CliError> {
    let keys = needed_keys()?;
    let mut db = database.connect_to_write().await?;
    let mut rotated = 0_u64;
    let mut refused = Vec::new();
    let mut after = None;
    let present = keys.present().id().to_owned();
    while let Some(row) = directory::next_wrapped_by_others(&mut db, &present, after).await? {
        after = Some(row.account);
        let holder = Holder { account: row.account, platform: &row.platform };
        match rewrap(Some(&keys), holder, &row.wrapped) {
            // A password that was stored meanwhile is wrapped with the present key already.
            Ok(fresh) => {
                let was = &row.wrapped;
                let done = directory::replace_wrapped(&mut db, row.account, was, &fresh).await?;
                rotated += u64::from(done);
            }
            Err(error) => refused.push(format!("account {}: {error}", row.account)),
        }
    }
    out::line(format_args!("{rotated} passwords rotated to master key {present}"))?;
    if refused.is_empty() {
        return Ok(());
    }
    Err(CliError::No(format!(
        "{} passwords not rotated:\n  {}",
        refused.len(),
        refused.join("\n  ")
    )))
}

/// One master key in a list.
#[derive(Debug, Serialize)]
struct KeyRow {
    key: String,
    /// `present`, `accepted`, or `missing`: passwords are wrapped with it, and it is not here.
    state: &'static str,
    passwords: i64,
}

impl TableRow for KeyRow {
    const HEAD: &'static [&'static str] = &["key", "state", "passwords"];
    fn cells(&self) -> Vec<String> {
        vec![self.key.clone(), self.state.to_owned(), self.passwords.to_string()]
    }
}

async fn list(database: &DatabaseArg, json: bool) -> Result<(), CliError> {
    let keys = master_keys()?;
    let mut db = database.connect().await?;
    let mut used: BTreeMap<String, i64> =
        directory::count_wrapped(&mut db).await?.into_iter().collect();
    let mut rows = Vec::new();
    for (index, key) in keys.iter().flat_map(MasterKeys::ids).enumerate() {
        let state = if index == 0 { "present" } else { "accepted" };
        rows.push(KeyRow { key: key.to_owned(), state, passwords: used.remove(key).unwrap_or(0) });
    }
    let missing =
        used.into_iter().map(|(key, passwords)| KeyRow { key, state: "missing", passwords });
    rows.extend(missing);
    print_rows(&rows, json)?;
    Ok(())
}
