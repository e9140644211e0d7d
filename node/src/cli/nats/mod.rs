//! `lockstep nats`: the configuration of a cluster with TLS and one identity a user (H74).
//!
//! A folder is the whole of it: one sub-folder a server to copy to its machine, one file of
//! settings a user, the certificate everybody checks the servers by, and `cluster.json`, from which
//! the servers' files are written anew when a user is added or removed.
//!
//! Invariants:
//! 1. A secret stands in the file of its user alone, which only the owner can read; the servers
//!    get a hash.
//! 2. The key that signed the certificates is written nowhere: nobody can make another server. `renew`
//!    makes all certificates anew, with another key, and `ca.pem` then holds both authorities, so that
//!    servers and users may change one after the other.
//! 3. No file of an earlier cluster is overwritten by `init`.

mod cluster;
mod server;

use super::table::{TableRow, print_rows};
use super::{CliError, DatabaseArg, block_on, out};
use crate::directory;
use clap::{Args, Subcommand};
use cluster::{Cluster, Server, User};
use schemas::AccountId;
use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// What is left to do when the users have changed.
const RELOAD: &str = "copy users.conf to every server, then `nats-server --signal reload` there";

/// What is left to do when the certificates have changed.
const RENEWED: &str = "1. copy ca.pem to every server and every user; reload the servers (`nats-server --signal reload`) \
     and restart the users' processes one after the other\n\
     2. then copy cert.pem and key.pem to every server and reload it\n\
     ca.pem holds the authority of before as well: until a server has its new certificate it keeps to \
     the old one\n\
     do both before the next `renew`: ca.pem holds two authorities, and a second one now would drop that \
     which the servers use";

/// Arguments of `lockstep nats`.
#[derive(Debug, Args)]
pub struct NatsArgs {
    #[command(subcommand)]
    verb: NatsVerb,
}

#[derive(Debug, Subcommand)]
enum NatsVerb {
    /// Write a new cluster into a folder that does not exist yet.
    Init {
        /// The folder.
        folder: PathBuf,
        /// A server, as clients reach it: HOST[:PORT[:CLUSTER_PORT]]; 4222 and 6222 if not said. Give
        /// three of them, so that one may fail.
        #[arg(long = "server", value_name = "HOST[:PORT[:CLUSTER_PORT]]", required = true,
            value_parser = Server::parse)]
        servers: Vec<Server>,
        #[command(flatten)]
        users: UserArgs,
    },
    /// Add users to a cluster; its servers take them up at `nats-server --signal reload`.
    Add {
        /// The folder that `init` wrote.
        folder: PathBuf,
        #[command(flatten)]
        users: UserArgs,
    },
    /// Remove a user from a cluster.
    Remove {
        /// The folder that `init` wrote.
        folder: PathBuf,
        /// Name of the user.
        user: String,
    },
    /// Make all certificates anew before they run out; users and their secrets stay. `ca.pem` then holds
    /// the authority of before as well, so that nothing stops while the files are handed out. Hand them out
    /// to the end before the next `renew`: a second one drops the authority that the servers still use.
    Renew {
        /// The folder that `init` wrote.
        folder: PathBuf,
    },
    /// List the users of a cluster and what they may do, and until when its certificates are valid.
    List {
        /// The folder that `init` wrote.
        folder: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct UserArgs {
    /// A user for a node: all nodes may do the same, and each should have its own.
    #[arg(long = "node", value_name = "NAME", value_parser = user_name)]
    nodes: Vec<String>,
    /// A publisher and the masters that it speaks for: names or numbers of accounts. Names are looked
    /// up in the database.
    #[arg(long = "publisher", value_name = "NAME=MASTER[,MASTER]", value_parser = publisher)]
    publishers: Vec<(String, Vec<String>)>,
    /// A user that only listens.
    #[arg(long = "monitor", value_name = "NAME", value_parser = user_name)]
    monitors: Vec<String>,
    /// A user for a person: asks the nodes for a comparison or a hand-over, and hears their answers.
    #[arg(long = "operator", value_name = "NAME", value_parser = user_name)]
    operators: Vec<String>,
    #[command(flatten)]
    database: DatabaseArg,
}

fn user_name(text: &str) -> Result<String, String> {
    if bus::is_user_name(text) {
        Ok(text.to_owned())
    } else {
        Err("must be 1 to 64 characters of a-z, 0-9 and '-'".to_owned())
    }
}

fn publisher(text: &str) -> Result<(String, Vec<String>), String> {
    let (name, masters) =
        text.split_once('=').ok_or_else(|| "expected NAME=MASTER[,MASTER]".to_owned())?;
    let masters: Vec<String> = masters.split(',').map(str::to_owned).collect();
    if masters.iter().any(String::is_empty) {
        return Err("a master has no name".to_owned());
    }
    Ok((user_name(name)?, masters))
}

impl UserArgs {
    fn users(self) -> Result<Vec<(String, bus::Role)>, CliError> {
        let named = |names: Vec<String>, role: bus::Role| {
            names.into_iter().map(move |name| (name, role.clone()))
        };
        let mut users: Vec<(String, bus::Role)> = named(self.nodes, bus::Role::Node).collect();
        for (name, masters) in self.publishers {
            let masters: Vec<AccountId> =
                masters.iter().map(|m| master(&self.database, m)).collect::<Result<_, _>>()?;
            users.push((name, bus::Role::Publisher(BTreeSet::from_iter(masters))));
        }
        users.extend(named(self.monitors, bus::Role::Monitor));
        users.extend(named(self.operators, bus::Role::Operator));
        Ok(users)
    }
}

/// The account of this number, which need not be in any database yet, or of this name.
fn master(database: &DatabaseArg, word: &str) -> Result<AccountId, CliError> {
    if word.bytes().all(|byte| byte.is_ascii_digit()) {
        let read = word.parse::<AccountId>();
        return read
            .map_err(|error| CliError::Usage(format!("--publisher master {word:?}: {error}")));
    }
    block_on(async {
        let mut db = database.connect().await?;
        directory::account_id(&mut db, word).await.map_err(CliError::from)
    })?
}

#[derive(Debug, serde::Serialize)]
struct UserRow {
    user: String,
    role: String,
    publishes: Vec<String>,
    hears: Vec<String>,
}

impl TableRow for UserRow {
    const HEAD: &'static [&'static str] = &["user", "role", "publishes", "hears"];
    fn cells(&self) -> Vec<String> {
        vec![self.user.clone(), self.role.clone(), self.publishes.join("\n"), self.hears.join("\n")]
    }
}

/// Runs `lockstep nats`.
pub fn run(args: NatsArgs) -> Result<(), CliError> {
    match args.verb {
        NatsVerb::Init { folder, servers, users } => init(&folder, servers, users.users()?),
        NatsVerb::Add { folder, users } => {
            let mut cluster = read(&folder)?;
            let users = users.users()?;
            if users.is_empty() {
                return Err(CliError::Usage(
                    "give --node, --publisher, --monitor or --operator".to_owned(),
                ));
            }
            add_users(&folder, &mut cluster, users)?;
            out::line(RELOAD)
        }
        NatsVerb::Remove { folder, user } => {
            let mut cluster = read(&folder)?;
            if cluster.users.remove(&user).is_none() {
                return Err(CliError::Usage(format!("user {user:?}: there is none of this name")));
            }
            if cluster.users.is_empty() {
                return Err(no_users());
            }
            write_servers(&folder, &cluster)?;
            let settings = settings_file(&folder, &user);
            match fs::remove_file(&settings) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(CliError::missing(settings.display().to_string(), error));
                }
                Ok(()) | Err(_) => {}
            }
            out::line(RELOAD)
        }
        NatsVerb::Renew { folder } => {
            let mut cluster = read(&folder)?;
            let path = folder.join("ca.pem");
            let shown = path.display().to_string();
            let before =
                fs::read_to_string(&path).map_err(|e| CliError::missing(shown.clone(), e))?;
            let before = server::first_certificate(&before)
                .ok_or_else(|| CliError::Usage(format!("{shown}: holds no certificate")))?;
            write_certificates(&folder, &mut cluster, Some(before))?;
            write_servers(&folder, &cluster)?;
            out::line(format_args!("{}\n{RENEWED}", valid(&cluster)))
        }
        NatsVerb::List { folder, json } => {
            let cluster = read(&folder)?;
            let rows = cluster.users.iter().map(|(name, user)| {
                let subjects = user.role().subjects(name);
                UserRow {
                    user: name.clone(),
                    role: user.role_word(),
                    publishes: subjects.publish,
                    hears: subjects.subscribe,
                }
            });
            print_rows(&rows.collect::<Vec<_>>(), json)?;
            if json { Ok(()) } else { out::line(format_args!("\n{}", valid(&cluster))) }
        }
    }
}

/// Until when the certificates are valid, and what then.
fn valid(cluster: &Cluster) -> String {
    let until = cluster.valid_until.as_deref().unwrap_or("ten years after they were made");
    format!("the certificates are valid until {until}; `lockstep nats renew` makes new ones before")
}

fn init(
    folder: &Path,
    servers: Vec<Server>,
    users: Vec<(String, bus::Role)>,
) -> Result<(), CliError> {
    let mut cluster = Cluster::new(servers).map_err(CliError::Usage)?;
    if users.is_empty() {
        return Err(no_users());
    }
    check_names(&cluster, &users)?;
    fs::create_dir(folder).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => CliError::Usage(format!(
            "folder {}: is there already; `lockstep nats add` adds users",
            folder.display()
        )),
        _ => CliError::missing(folder.display().to_string(), error),
    })?;
    let made = write_new(folder, &mut cluster, users);
    if made.is_err() {
        // It is ours, and nobody has used it.
        let _gone = fs::remove_dir_all(folder);
    }
    made?;
    let homes: Vec<String> =
        cluster.servers.iter().map(|s| folder.join(s.folder()).display().to_string()).collect();
    out::line(format_args!(
        "on each server's machine: copy its folder there ({}), then\n  \
         cd THAT_FOLDER && nats-server -c nats.conf\n{}",
        homes.join(", "),
        valid(&cluster)
    ))
}

fn write_new(
    folder: &Path,
    cluster: &mut Cluster,
    users: Vec<(String, bus::Role)>,
) -> Result<(), CliError> {
    for server in &cluster.servers {
        let home = folder.join(server.folder());
        fs::create_dir(&home).map_err(|e| CliError::missing(home.display().to_string(), e))?;
        write(&home.join("nats.conf"), &server::conf(cluster, server), Secrecy::Public)?;
    }
    write_certificates(folder, cluster, None)?;
    add_users(folder, cluster, users)
}

/// A new authority, and what it signs; it is believed beside the one of before.
fn write_certificates(
    folder: &Path,
    cluster: &mut Cluster,
    before: Option<&str>,
) -> Result<(), CliError> {
    let failed = |error| CliError::missing("certificate", error);
    let authority = server::Authority::new(cluster).map_err(failed)?;
    let believed = [authority.certificate().trim_end(), before.unwrap_or_default()].join("\n");
    let believed = format!("{}\n", believed.trim_end());
    // Whoever believes too much too early still believes the servers.
    write(&folder.join("ca.pem"), &believed, Secrecy::Public)?;
    for server in &cluster.servers {
        let home = folder.join(server.folder());
        write(&home.join("ca.pem"), &believed, Secrecy::Public)?;
        let (certificate, key) = authority.issue(server).map_err(failed)?;
        write(&home.join("cert.pem"), &certificate, Secrecy::Public)?;
        write(&home.join("key.pem"), &key, Secrecy::Secret)?;
    }
    cluster.valid_until = Some(authority.valid_until());
    Ok(())
}

/// New users with new secrets, and their files of settings.
fn add_users(
    folder: &Path,
    cluster: &mut Cluster,
    users: Vec<(String, bus::Role)>,
) -> Result<(), CliError> {
    check_names(cluster, &users)?;
    let root = fs::canonicalize(folder)
        .map_err(|error| CliError::missing(folder.display().to_string(), error))?
        .join("ca.pem");
    // It stands between quotes in a file that shells read.
    if root.to_str().is_none_or(|path| path.contains(['\'', '\n'])) {
        return Err(CliError::Usage(format!(
            "folder {}: its path must be text without quotes",
            root.display()
        )));
    }
    let mut settings = Vec::new();
    for (name, role) in users {
        let secret = cluster::new_secret();
        let user = User::new(&role, &secret).map_err(|e| CliError::missing("secret", e))?;
        let path = settings_file(folder, &name);
        settings.push((path, cluster.settings_of(&name, &secret, &root), user.role_word()));
        cluster.users.insert(name, user);
    }
    // The servers first: a secret that they do not know would be handed out.
    write_servers(folder, cluster)?;
    for (path, text, role) in settings {
        write(&path, &text, Secrecy::Secret)?;
        out::line(format_args!("{}: {role}", path.display()))?;
    }
    Ok(())
}

/// To a server without any user everybody may say everything.
fn no_users() -> CliError {
    CliError::Usage(
        "a cluster needs a user: --node, --publisher, --monitor or --operator".to_owned(),
    )
}

fn check_names(cluster: &Cluster, users: &[(String, bus::Role)]) -> Result<(), CliError> {
    for (at, (name, _)) in users.iter().enumerate() {
        let is_earlier = users[..at].iter().any(|(other, _)| other == name);
        if is_earlier || cluster.users.contains_key(name) {
            return Err(CliError::Usage(format!(
                "user {name:?}: there is one of this name already"
            )));
        }
    }
    Ok(())
}

fn settings_file(folder: &Path, user: &str) -> PathBuf {
    folder.join(format!("{user}.env"))
}

fn manifest(folder: &Path) -> PathBuf {
    folder.join("cluster.json")
}

fn read(folder: &Path) -> Result<Cluster, CliError> {
    let path = manifest(folder);
    let shown = path.display().to_string();
    let text = fs::read_to_string(&path).map_err(|e| CliError::missing(shown.clone(), e))?;
    serde_json::from_str(&text).map_err(|e| CliError::Usage(format!("{shown}: {e}")))
}

/// What depends on the users: the manifest, and a file in the folder of each server.
fn write_servers(folder: &Path, cluster: &Cluster) -> Result<(), CliError> {
    let users = server::users_conf(cluster);
    for server in &cluster.servers {
        write(&folder.join(server.folder()).join("users.conf"), &users, Secrecy::Secret)?;
    }
    let text = serde_json::to_string_pretty(cluster)
        .map_err(|error| CliError::missing("cluster.json", error))?;
    write(&manifest(folder), &text, Secrecy::Secret)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Secrecy {
    Public,
    Secret,
}

/// Whole or not at all, and never readable by others in between.
fn write(path: &Path, text: &str, secrecy: Secrecy) -> Result<(), CliError> {
    let mode = if secrecy == Secrecy::Secret { 0o600 } else { 0o644 };
    let new = path.with_extension("new");
    let written = || -> std::io::Result<()> {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    written().map_err(|error| {
        let _gone = fs::remove_file(&new);
        CliError::missing(path.display().to_string(), error)
    })
}
