//! Asking the owner of an account for something, over the bus.
//!
//! In: a request. Out: the owner's answer, or why there is none within [`ANSWER_LIMIT`]: a request
//! without an answer has not been refused, and may still be carried out.

use super::on_bus::{BusArg, connected};
use super::{CliError, DatabaseArg};
use crate::causes::with_causes;
use crate::directory;
use futures_util::StreamExt;
use schemas::codec;
use schemas::control::{ControlReply, ControlRequest};
use schemas::{AccountId, subject};
use sqlx::Row;
use std::time::Duration;

/// Longest wait for an answer: the owner reads its account at the broker, 10 s at most, and the way.
const ANSWER_LIMIT: Duration = Duration::from_secs(12);

/// Who owns an account, by the database.
#[derive(Debug, Clone)]
pub(super) struct Owned {
    /// The account.
    pub(super) account: AccountId,
    /// Its name.
    pub(super) name: String,
    /// Its owner; nothing without one, and where its lease has ended.
    pub(super) node: Option<String>,
    /// The token of the tenure.
    pub(super) token: i64,
}

/// Who owns the account of this name or number.
pub(super) async fn owner(db: &mut sqlx::PgConnection, name: &str) -> Result<Owned, CliError> {
    let account = directory::account_id(db, name).await?;
    let row = sqlx::query(
        "select name, lease_token, case when lease_until > clock_timestamp() then node_id end as node \
         from trading_accounts where id = $1",
    )
    .bind(account.as_i64())
    .fetch_one(db)
    .await?;
    let (name, token) = (row.get("name"), row.get("lease_token"));
    Ok(Owned { account, name, node: row.get("node"), token })
}

/// Asks the owner, whom the database names.
pub(super) async fn ask(
    bus: &BusArg,
    owned: &Owned,
    request: &ControlRequest,
) -> Result<ControlReply, CliError> {
    let what = format!("account {}", owned.name);
    let Some(node) = &owned.node else {
        return Err(CliError::missing(what, "no node owns it right now"));
    };
    let client = bus.connect("lockstep-ask").await?;
    let there = connected(&client).await;
    there.map_err(|reason| CliError::missing(format!("bus at {}", bus.shown()), reason))?;
    // The name of the user is in the inbox, where there are users; only it hears what goes there.
    let inbox = client.new_inbox();
    let unique = inbox.split_once('.').map_or(inbox.as_str(), |(_, unique)| unique);
    let reply = subject::control_reply(unique);
    let replies = bus::snapshot::prove_subscriptions(&client, &reply).await;
    let mut replies = replies.map_err(|error| bus.missing(error))?;
    let payload = codec::encode_control_request(request);
    let to = subject::control_account(request.account);
    client
        .publish_with_reply(to, reply, payload.into())
        .await
        .map_err(|error| CliError::missing(format!("bus at {}", bus.shown()), error))?;
    let answered = tokio::time::timeout(ANSWER_LIMIT, async {
        while let Some(message) = replies.next().await {
            if message.status.is_some() {
                return Err("no node hears requests on this bus".to_owned());
            }
            match codec::decode_control_reply(&message.payload) {
                Ok(reply) if reply.account == request.account && reply.node.as_str() == node => {
                    return Ok(reply);
                }
                // Somebody who lost it a moment ago.
                Ok(_) => {}
                // Our own echo is none, and neither is anything else that is not an answer.
                Err(error) => tracing::debug!(error = %with_causes(&error), "not an answer"),
            }
        }
        Err("the connection to the bus ended".to_owned())
    });
    match answered.await {
        Ok(Ok(reply)) => match reply.refused {
            None => Ok(reply),
            Some(reason) => {
                Err(CliError::missing(format!("{what}, owned by {}", reply.node), reason))
            }
        },
        Ok(Err(reason)) => Err(CliError::missing(what, reason)),
        Err(_) => Err(CliError::missing(
            what,
            format!(
                "its owner {node} did not answer within {ANSWER_LIMIT:?}: its session may be closed \
                 (`lockstep status`), or it hears another bus"
            ),
        )),
    }
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
