//! `lockstep account`: add, list, switch on and off, give a password.

use super::table::{TableRow, or_dash, print_rows};
use super::{CliError, DatabaseArg, block_on, keys, out, password};
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
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: AccountVerb,
}

#[derive(Debug, Subcommand)]
enum AccountVerb {
    /// Add an account.
    Add(AddArgs),
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
    List,
    /// Let nodes own the account.
    Enable {
        /// Name or number.
        account: String,
    },
    /// Make its owner finish what is in flight and let go; open copies stay open, and nobody follows
    /// or closes them any more.
    Disable {
        /// Name or number.
        account: String,
        /// Do not ask where copies are open.
        #[arg(long)]
        yes: bool,
    },
}

/// An account in words: those of `lockstep account add`, and of a file that is applied.
#[derive(Debug, Args)]
pub(super) struct AddArgs {
    /// Name, unique: letters, digits, '.', '_' and '-'.
    pub(super) name: String,
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
}

/// Longest name of an account; the table's own rule.
const NAME_CHARS_MAX: usize = 64;

impl AddArgs {
    /// The account that these words describe; what is wrong with them otherwise.
    pub(super) fn account(self) -> Result<NewAccount, String> {
        check_name(&self.name)?;
        if self.platform == "paper" && self.address.is_none() {
            return Err("a paper account needs --address HOST:PORT".into());
        }
        let mut connection = serde_json::Map::new();
        if let Some(address) = self.address {
            connection.insert("address".into(), address.into());
        }
        if let Some(login) = self.login {
            connection.insert("login".into(), login.get().into());
        }
        if self.blocking {
            connection.insert("blocking".into(), true.into());
        }
        Ok(NewAccount {
            name: self.name,
            platform: self.platform,
            connection: connection.into(),
            enabled: !self.disabled,
        })
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.len() > NAME_CHARS_MAX
        || !name.starts_with(|c: char| c.is_ascii_alphanumeric())
        || !name.chars().all(fits)
    {
        return Err(format!(
            "name {name:?}: must be 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' and '-', and \
             begin with a letter or a digit"
        ));
    }
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "name {name:?}: must not be digits alone, it would be taken for the number of an account"
        ));
    }
    Ok(())
}

impl TableRow for AccountRow {
    const HEAD: &'static [&'static str] =
        &["id", "name", "platform", "enabled", "mode", "node", "lease left", "token"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.name.clone(),
            self.platform.clone(),
            if self.enabled { "yes" } else { "no" }.into(),
            self.effective_mode.to_string(),
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

/// A rule by which the database refused something.
pub(super) struct Rule<'a> {
    /// Its name.
    pub(super) name: &'a str,
    /// The server's words on the values that broke it, such as `Key (name)=(a) already exists.`
    detail: Option<&'a str>,
}

impl Rule<'_> {
    /// The values that another row has already.
    fn values(&self) -> Option<Vec<&str>> {
        let (_, values) = self.detail?.split_once("=(")?;
        Some(values.rsplit_once(')')?.0.split(", ").collect())
    }
}

/// An error in the words of the command line, if the database refused by a rule that has some.
pub(super) fn refused(
    error: DirectoryError,
    explain: impl FnOnce(&Rule<'_>) -> Option<String>,
) -> CliError {
    let explained = match &error {
        DirectoryError::Database(sqlx::Error::Database(refusal)) => {
            let detail = refusal.try_downcast_ref::<sqlx::postgres::PgDatabaseError>();
            let detail = detail.and_then(|refusal| refusal.detail());
            refusal.constraint().and_then(|name| explain(&Rule { name, detail }))
        }
        _ => None,
    };
    explained.map_or_else(|| error.into(), CliError::Usage)
}

/// Why the database refused an account, where that is a rule of accounts.
pub(super) fn explain(rule: &Rule<'_>, name: &str) -> Option<String> {
    match rule.name {
        "trading_accounts_name_unique" => {
            Some(format!("name {name:?}: there is an account of this name already"))
        }
        "trading_accounts_one_per_login" => {
            let at = match rule.values().as_deref() {
                Some([_, address, login]) => format!(": --address {address}, --login {login}"),
                _ => String::new(),
            };
            Some(format!(
                "name {name:?}: another account has the same address and login{at} (without --login \
                 it is the account's own number); two owners of one account at the broker would copy \
                 twice"
            ))
        }
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
pub fn run(args: AccountArgs) -> Result<(), CliError> {
    block_on(async {
        let json = args.json;
        match args.verb {
            AccountVerb::Add(add) => {
                let new = add.account().map_err(CliError::Usage)?;
                let mut db = args.database.connect_to_write().await?;
                let id = directory::add_account(&mut db, &new)
                    .await
                    .map_err(|error| refused(error, |rule| explain(rule, &new.name)))?;
                if json {
                    return out::json(&serde_json::json!({ "id": id, "name": new.name }));
                }
                out::line(format_args!("account {id} added: {}", new.name))
            }
            AccountVerb::List => {
                let mut db = args.database.connect().await?;
                print_rows(&directory::list_accounts(&mut db).await?, json)
            }
            AccountVerb::Password { account, remove: true, .. } => {
                let mut db = args.database.connect_to_write().await?;
                let id = directory::account_id(&mut db, &account).await?;
                let had = directory::remove_credential(&mut db, id).await?;
                if json {
                    return out::json(&serde_json::json!({ "id": id, "changed": had }));
                }
                let word = if had { "has no password any more" } else { "had no password" };
                out::line(format_args!("account {account} {word}"))
            }
            AccountVerb::Password { account, file, remove: false } => {
                let mut db = args.database.connect_to_write().await?;
                store_password(&mut db, &account, file.as_deref(), json).await
            }
            AccountVerb::Enable { account } => enable(&args.database, &account, json).await,
            AccountVerb::Disable { account, yes } => {
                disable(&mut args.database.connect_to_write().await?, &account, yes, json).await
            }
        }
    })?
}

async fn store_password(
    db: &mut sqlx::PgConnection,
    account: &str,
    file: Option<&Path>,
    json: bool,
) -> Result<(), CliError> {
    let id = directory::account_id(db, account).await?;
    let platform = directory::account_platform(db, id).await?;
    let keys = keys::master_keys()?;
    // Nobody types a password that cannot be kept.
    let needed = keys.as_ref().ok_or(CredentialError::NoKey).map_err(wrong)?;
    let password = password::read(&format!("password of {account}"), file).await?;
    let holder = Holder { account: id, platform: &platform };
    let sealed = seal(Some(needed), holder, &password).map_err(wrong)?;
    directory::store_credential(db, id, &sealed).await?;
    if json {
        return out::json(&serde_json::json!({ "id": id, "master_key": sealed.key_id }));
    }
    let key = sealed.key_id;
    out::line(format_args!("password of account {account} stored, sealed with master key {key}"))
}

fn wrong(error: CredentialError) -> CliError {
    CliError::Usage(error.to_string())
}

async fn enable(database: &DatabaseArg, account: &str, json: bool) -> Result<(), CliError> {
    let mut db = database.connect_to_write().await?;
    let id = directory::account_id(&mut db, account).await?;
    let changed = directory::enable_account(&mut db, id, true).await?;
    if json {
        return out::json(&Switched { id, enabled: true, changed });
    }
    out::line(format_args!("account {account} {}enabled", was(changed)))
}

async fn disable(
    db: &mut sqlx::PgConnection,
    account: &str,
    yes: bool,
    json: bool,
) -> Result<(), CliError> {
    let id = directory::account_id(db, account).await?;
    let open = directory::open_copies_of(db, id).await?;
    if open > 0 && !yes {
        let leaves = format!(
            "{open} open copies of account {account} stay open, and nobody follows or closes them \
             while it is off"
        );
        super::confirm(&leaves, "nothing was switched off")?;
    }
    let changed = directory::enable_account(db, id, false).await?;
    // What was opened since it was asked is left as well.
    let open = directory::open_copies_of(db, id).await?;
    if json {
        return out::json(&SwitchedOff {
            switched: Switched { id, enabled: false, changed },
            copies_open: open,
        });
    }
    let left = match open {
        0 => String::new(),
        open => format!(": its {open} open copies stay open, and nobody follows or closes them"),
    };
    out::line(format_args!("account {account} {}disabled{left}", was(changed)))
}

fn was(changed: bool) -> &'static str {
    if changed { "" } else { "was already " }
}

/// What became of an account that was switched off.
#[derive(Debug, serde::Serialize)]
struct SwitchedOff {
    #[serde(flatten)]
    switched: Switched<AccountId>,
    /// Copies that nobody follows or closes now.
    copies_open: i64,
}

/// What became of an account or a link that was switched.
#[derive(Debug, serde::Serialize)]
pub(super) struct Switched<T> {
    /// Its number.
    pub(super) id: T,
    /// It is on.
    pub(super) enabled: bool,
    /// It was not so before.
    pub(super) changed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::tests::database_with;
    use crate::directory::{NewLink, add_link};
    use reconcile::Sizing;
    use rust_decimal::Decimal;

    #[tokio::test]
    async fn an_account_with_open_copies_is_switched_off_only_by_somebody_who_says_yes() {
        let names = [("boss", "external"), ("one", "paper"), ("idle", "paper")];
        let (_url, mut db, ids) = database_with("account-off", &names).await;
        let plain = NewLink::plain(ids[0], ids[1], Sizing::Multiplier(Decimal::ONE));
        let link = add_link(&mut db, &plain).await.unwrap();
        crate::cli::tests::insert_open_pair(&mut db, link, 7).await;
        for account in ["one", "boss"] {
            let refused = disable(&mut db, account, false, false).await.unwrap_err();
            assert!(matches!(refused, CliError::Usage(_)), "{refused}");
            assert!(
                refused.to_string().contains("--yes") && refused.to_string().contains("1 open")
            );
        }
        disable(&mut db, "idle", false, false).await.unwrap();
        disable(&mut db, "one", true, false).await.unwrap();
        let accounts = directory::list_accounts(&mut db).await.unwrap();
        let on: Vec<_> = accounts.iter().filter(|a| a.enabled).map(|a| &*a.name).collect();
        assert_eq!(on, ["boss"]);
    }
}
