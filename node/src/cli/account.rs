//! `lockstep account`: add, list, switch on and off, give a password.

use super::table::{TableRow, or_dash, print_rows};
use super::{CliError, DatabaseArg, block_on, keys, password};
use crate::credentials::{CredentialError, Holder, seal};
use crate::directory::{self, AccountRow, DirectoryError, NewAccount};
use clap::{Args, Subcommand};
use schemas::AccountId;
use std::path::{Path, PathBuf};

/// Arguments of `lockstep account`.
#[derive(Debug, Args)]
pub struct AccountArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(subcommand)]
    verb: AccountVerb,
}

#[derive(Debug, Subcommand)]
enum AccountVerb {
    /// Add an account.
    Add {
        /// Name, unique: letters, digits, '.', '_' and '-'.
        name: String,
        /// Platform: `paper`, or `external` for a master whose publisher is not a node.
        #[arg(long, default_value = "paper", value_parser = ["paper", "external"])]
        platform: String,
        /// Address of the paper broker, such as 127.0.0.1:4100.
        #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
        address: Option<String>,
        /// Account number at the paper broker; default: the number this account gets here.
        #[arg(long, allow_negative_numbers = true)]
        login: Option<AccountId>,
        /// Paper only: each order call holds a thread until it is answered; its node needs
        /// LOCKSTEP_BLOCKING_FOLLOWERS.
        #[arg(long, requires = "address")]
        blocking: bool,
        /// Add it switched off.
        #[arg(long)]
        disabled: bool,
    },
    /// Store the password of an account at its broker, sealed with the present master key
    /// (`lockstep keys`). It is read from stdin, at a terminal unseen.
    Password {
        /// Name or number.
        account: String,
        /// Read it from this file instead.
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// Take the password away.
        #[arg(long, conflicts_with = "file")]
        remove: bool,
    },
    /// List accounts with their owners.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Let nodes own the account.
    Enable {
        /// Name or number.
        account: String,
    },
    /// Make its owner finish what is in flight and let go; open copies stay open.
    Disable {
        /// Name or number.
        account: String,
    },
}

impl TableRow for AccountRow {
    const HEAD: &'static [&'static str] =
        &["id", "name", "platform", "enabled", "node", "lease left", "token"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.name.clone(),
            self.platform.clone(),
            if self.enabled { "yes" } else { "no" }.into(),
            or_dash(self.node.clone()),
            or_dash(self.lease_left_s.map(|s| format!("{s:.1} s"))),
            self.token.to_string(),
        ]
    }
}

impl From<DirectoryError> for CliError {
    fn from(error: DirectoryError) -> Self {
        match error {
            DirectoryError::Database(sqlx::Error::Database(refusal))
                if refusal.constraint().is_some() =>
            {
                CliError::Usage(refusal.message().to_owned())
            }
            DirectoryError::Database(error) => error.into(),
            other => CliError::Usage(other.to_string()),
        }
    }
}

/// An error in the words of the command line, if the database refused by a rule that has some.
pub(super) fn refused(
    error: DirectoryError,
    explain: impl FnOnce(&str) -> Option<String>,
) -> CliError {
    let explained = match &error {
        DirectoryError::Database(sqlx::Error::Database(refusal)) => {
            refusal.constraint().and_then(explain)
        }
        _ => None,
    };
    explained.map_or_else(|| error.into(), CliError::Usage)
}

fn explain(rule: &str, name: &str) -> Option<String> {
    match rule {
        "trading_accounts_name_unique" => {
            Some(format!("name {name:?}: there is an account of this name already"))
        }
        "trading_accounts_name_word" => Some(format!(
            "name {name:?}: must be 1 to 64 letters, digits, '.', '_' and '-', and begin with a \
             letter or a digit"
        )),
        "trading_accounts_one_per_login" => Some(format!(
            "name {name:?}: another account has the same address and login; two owners of one \
             account at the broker would copy twice"
        )),
        _ => None,
    }
}

/// HOST:PORT with a port above 0.
pub(super) fn host_and_port(text: &str) -> Result<String, String> {
    let parts = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    match parts.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(1..)) => Ok(text.to_owned()),
        _ => Err("must be HOST:PORT with a port from 1 to 65535".into()),
    }
}

/// Runs `lockstep account`.
#[allow(clippy::print_stdout, reason = "a verb answers on stdout")]
pub fn run(args: AccountArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = args.database.connect().await?;
        match args.verb {
            AccountVerb::Add { name, platform, address, login, blocking, disabled } => {
                if platform == "paper" && address.is_none() {
                    return Err(CliError::Usage(
                        "a paper account needs --address HOST:PORT".into(),
                    ));
                }
                if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(CliError::Usage(format!(
                        "name {name:?}: must not be digits alone, it would be taken for the number \
                         of an account"
                    )));
                }
                let mut connection = serde_json::Map::new();
                if let Some(address) = address {
                    connection.insert("address".into(), address.into());
                }
                if let Some(login) = login {
                    connection.insert("login".into(), login.get().into());
                }
                if blocking {
                    connection.insert("blocking".into(), true.into());
                }
                let new = NewAccount {
                    name,
                    platform,
                    connection: connection.into(),
                    enabled: !disabled,
                };
                let id = directory::add_account(&mut db, &new)
                    .await
                    .map_err(|error| refused(error, |rule| explain(rule, &new.name)))?;
                println!("account {id} added: {}", new.name);
            }
            AccountVerb::Password { account, remove: true, .. } => {
                let id = directory::account_id(&mut db, &account).await?;
                let had = directory::remove_credential(&mut db, id).await?;
                println!(
                    "account {account} {}",
                    if had { "has no password any more" } else { "had no password" }
                );
            }
            AccountVerb::Password { account, file, remove: false } => {
                store_password(&mut db, &account, file.as_deref()).await?;
            }
            AccountVerb::List { json } => {
                print_rows(&directory::list_accounts(&mut db).await?, json)?;
            }
            AccountVerb::Enable { account } => switch(&mut db, &account, true).await?,
            AccountVerb::Disable { account } => switch(&mut db, &account, false).await?,
        }
        Ok(())
    })?
}

#[allow(clippy::print_stdout, reason = "a verb answers on stdout")]
async fn store_password(
    db: &mut sqlx::PgConnection,
    account: &str,
    file: Option<&Path>,
) -> Result<(), CliError> {
    let id = directory::account_id(db, account).await?;
    let platform = directory::account_platform(db, id).await?;
    let keys = keys::master_keys()?;
    // Nobody types a password that cannot be kept.
    let needed = keys.as_ref().ok_or(CredentialError::NoKey).map_err(wrong)?;
    let password = password::read(&format!("password of {account}"), file)?;
    let holder = Holder { account: id, platform: &platform };
    let sealed = seal(Some(needed), holder, &password).map_err(wrong)?;
    directory::store_credential(db, id, &sealed).await?;
    println!("password of account {account} stored, sealed with master key {}", sealed.key_id);
    Ok(())
}

fn wrong(error: CredentialError) -> CliError {
    CliError::Usage(error.to_string())
}

#[allow(clippy::print_stdout, reason = "a verb answers on stdout")]
async fn switch(db: &mut sqlx::PgConnection, account: &str, enabled: bool) -> Result<(), CliError> {
    let id = directory::account_id(db, account).await?;
    let changed = directory::enable_account(db, id, enabled).await?;
    let word = if enabled { "enabled" } else { "disabled" };
    println!("account {account} {}{word}", if changed { "" } else { "was already " });
    Ok(())
}
