//! Asking the owner of an account for something, over the bus.
//!
//! In: a request. Out: the owner's answer, or why there is none ([`crate::account::owner`]).

use super::on_bus::{BusArg, connected};
use super::{CliError, DatabaseArg};
use crate::account::owner::{self, AskError, Owned};
use crate::directory::{self, DirectoryError};
use schemas::control::{ControlReply, ControlRequest};

/// What is said of an account that no node can be asked about.
const EXTERNAL: &str =
    "is external: its own publisher leads it, and no node ever owns it or can be asked about it";

/// Who owns the account of this name or number.
pub(super) async fn owner(db: &mut sqlx::PgConnection, name: &str) -> Result<Owned, CliError> {
    let account = directory::account_id(db, name).await?;
    // It may have been deleted meanwhile.
    let missing = || DirectoryError::NoAccount(name.to_owned());
    Ok(owner::of(db, account).await?.ok_or_else(missing)?)
}

/// Asks the owner, whom the database names.
pub(super) async fn ask(
    bus: &BusArg,
    owned: &Owned,
    request: &ControlRequest,
) -> Result<ControlReply, CliError> {
    let what = format!("account {}", owned.name);
    let Some(node) = owned.owner() else {
        return Err(match owned.is_external {
            true => CliError::Usage(format!("{what} {EXTERNAL}")),
            false => CliError::missing(what, "no node owns it right now"),
        });
    };
    let client = bus.connect("lockstep-ask").await?;
    let there = connected(&client).await;
    there.map_err(|reason| CliError::missing(format!("bus at {}", bus.shown()), reason))?;
    owner::ask(&client, node, request).await.map_err(|error| match error {
        AskError::Bus(error) => bus.missing(error),
        AskError::Publish(error) => CliError::missing(format!("bus at {}", bus.shown()), error),
        AskError::Refused { node, reason } => {
            CliError::missing(format!("{what}, owned by {node}"), reason)
        }
        AskError::Silent { .. } => CliError::missing(
            what,
            format!(
                "its owner {error}: its session may be closed (`lockstep status`), or it hears another bus"
            ),
        ),
        AskError::NobodyHears | AskError::Ended => CliError::missing(what, error),
    })
}

/// The accounts that a verb concerns: the one of this name, or the follower of the link.
pub(super) async fn concerned(
    database: &DatabaseArg,
    target: &super::pause::Target,
) -> Result<(Owned, sqlx::PgConnection), CliError> {
    let mut db = database.connect().await?;
    let name = match target {
        super::pause::Target::Account(name) => name.clone(),
        super::pause::Target::Link(link) => {
            let follower = sqlx::query_scalar::<_, i64>(
                "select follower_id from copy_links where id = $1 and deleted_at is null",
            );
            let follower = follower.bind(link.as_i64()).fetch_optional(&mut db).await?;
            let missing = || CliError::Usage(format!("there is no {target}"));
            follower.ok_or_else(missing)?.to_string()
        }
    };
    Ok((owner(&mut db, &name).await?, db))
}
