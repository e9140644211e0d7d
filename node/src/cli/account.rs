//! `lockstep account`: add, list, switch on and off.

use super::table::{TableRow, or_dash, print_rows};
use super::{CliError, DatabaseArg, block_on};
use crate::directory::{self, AccountRow, DirectoryError, NewAccount};
use clap::{Args, Subcommand};

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
        #[arg(long, default_value = "paper")]
        platform: String,
        /// Address of the paper broker, such as 127.0.0.1:4100.
        #[arg(long, value_name = "HOST:PORT")]
        address: Option<String>,
        /// Account number at the paper broker; default: the number this account gets here.
        #[arg(long)]
        login: Option<u64>,
        /// Add it switched off.
        #[arg(long)]
        disabled: bool,
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

/// Runs `lockstep account`.
#[allow(clippy::print_stdout, reason = "a verb answers on stdout")]
pub fn run(args: AccountArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = args.database.connect().await?;
        match args.verb {
            AccountVerb::Add { name, platform, address, login, disabled } => {
                if platform == "paper" && address.is_none() {
                    return Err(CliError::Usage(
                        "a paper account needs --address HOST:PORT".into(),
                    ));
                }
                let mut connection = serde_json::Map::new();
                if let Some(address) = address {
                    connection.insert("address".into(), address.into());
                }
                if let Some(login) = login {
                    connection.insert("login".into(), login.into());
                }
                let new = NewAccount {
                    name,
                    platform,
                    connection: connection.into(),
                    enabled: !disabled,
                };
                let id = directory::add_account(&mut db, &new).await?;
                println!("account {id} added: {}", new.name);
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
async fn switch(db: &mut sqlx::PgConnection, account: &str, enabled: bool) -> Result<(), CliError> {
    let id = directory::account_id(db, account).await?;
    let changed = directory::enable_account(db, id, enabled).await?;
    let word = if enabled { "enabled" } else { "disabled" };
    println!("account {account} {}{word}", if changed { "" } else { "was already " });
    Ok(())
}
