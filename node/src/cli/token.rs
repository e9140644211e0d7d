//! `lockstep token`: who may use the API.

use super::table::{TableRow, or_dash, print_rows};
use super::{CliError, DatabaseArg, block_on, out};
use crate::api::tokens::{self, Scope, TokenError, TokenRow};
use clap::{Args, Subcommand};

/// Arguments of `lockstep token`.
#[derive(Debug, Args)]
pub struct TokenArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(subcommand)]
    verb: TokenVerb,
}

#[derive(Debug, Subcommand)]
enum TokenVerb {
    /// Make a token. It is shown this once; only its hash is stored.
    Add {
        /// What it is called, in lists and logs.
        name: String,
        /// What it allows; each allows what the ones before it do.
        #[arg(long, value_enum, default_value = "read")]
        scope: Scope,
        /// After so many days it is refused.
        #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u16).range(1..=3650))]
        days: u16,
    },
    /// List tokens.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take a token back: it is refused from now on.
    Revoke {
        /// What it is called.
        name: String,
    },
}

impl TableRow for TokenRow {
    const HEAD: &'static [&'static str] = &["id", "name", "scope", "created", "expires", "revoked"];
    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.name.clone(),
            self.scope.as_str().to_owned(),
            self.created_at.clone(),
            self.expires_at.clone(),
            or_dash(self.revoked_at.clone()),
        ]
    }
}

impl From<TokenError> for CliError {
    fn from(error: TokenError) -> Self {
        match error {
            TokenError::Database(error) => error.into(),
            TokenError::Random(_) | TokenError::Scope { .. } => CliError::missing("token", error),
            TokenError::NameTaken(_) | TokenError::BadName(_) => CliError::Usage(error.to_string()),
        }
    }
}

/// Runs `lockstep token`.
#[allow(clippy::print_stderr, reason = "the token stands on stdout alone, for a pipe")]
pub fn run(args: TokenArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = match &args.verb {
            TokenVerb::List { .. } => args.database.connect().await?,
            TokenVerb::Add { .. } | TokenVerb::Revoke { .. } => {
                args.database.connect_to_write().await?
            }
        };
        match args.verb {
            TokenVerb::Add { name, scope, days } => {
                let (row, secret) = tokens::add(&mut db, &name, scope, days).await?;
                let (scope, until) = (row.scope.as_str(), &row.expires_at);
                eprintln!(
                    "token {} added: {name}, {scope}, until {until}; it is shown this once",
                    row.id
                );
                out::line(secret.expose())?;
            }
            TokenVerb::List { json } => {
                print_rows(&tokens::list(&mut db, 0, i64::MAX).await?, json)?
            }
            TokenVerb::Revoke { name } => {
                if !tokens::revoke(&mut db, &name).await? {
                    return Err(CliError::No(format!("there is no good token named {name:?}")));
                }
                out::line(format_args!("token {name} revoked"))?;
            }
        }
        Ok(())
    })?
}
