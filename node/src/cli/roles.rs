//! `lockstep roles`: database roles with no more rights than their work needs.

use super::{CliError, DatabaseArg, block_on, out};
use crate::database;
use crate::roles;
use clap::{Args, Subcommand};

/// Arguments of `lockstep roles`.
#[derive(Debug, Args)]
pub struct RolesArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(subcommand)]
    verb: RolesVerb,
}

#[derive(Debug, Subcommand)]
enum RolesVerb {
    /// Bring the schema up to date, make the roles that are missing, and give each its rights. The
    /// database's URL has to name the role that owns the tables.
    Apply,
    /// Print the SQL of `apply`, for an administrator to read and run.
    Print,
}

/// Runs `lockstep roles`.
pub fn run(args: RolesArgs) -> Result<(), CliError> {
    match args.verb {
        RolesVerb::Print => out::raw(format!("{}\n{}", roles::CREATE, roles::GRANT).as_bytes()),
        RolesVerb::Apply => block_on(apply(args.database))?,
    }
}

async fn apply(database: DatabaseArg) -> Result<(), CliError> {
    let mut db = database.connect_to_write().await?;
    let missing = roles::missing(&mut db).await?;
    if !missing.is_empty() {
        roles::create(&mut db).await.map_err(|error| refused_to(error, || {
            format!(
                "this role may not create the missing roles: {}. Have an administrator run the first \
                 part of `lockstep roles print`, and then this again",
                missing.join(", ")
            )
        }))?;
    }
    roles::grant(&mut db).await.map_err(|error| {
        refused_to(error, || {
            "this role may not grant rights: use the one that owns the tables".to_owned()
        })
    })?;
    for role in roles::ROLES {
        let was_made = missing.iter().any(|made| made == role);
        out::line(format_args!("{role} {}", if was_made { "made" } else { "granted" }))?;
    }
    Ok(())
}

/// In the words of the command line, if the reason is a right that the role lacks.
fn refused_to(error: sqlx::Error, what: impl FnOnce() -> String) -> CliError {
    if database::is_not_allowed(&error) { CliError::missing(what(), error) } else { error.into() }
}
