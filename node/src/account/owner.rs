//! The owner of an account: who it is by the database, and asking it for something over the bus.
//!
//! In: an account; a request, a connection, and the owner. Out: what its row says; the owner's answer, or
//! why there is none within [`ANSWER_LIMIT`].
//!
//! Invariants:
//! 1. Whoever's lease has ended by the database's clock is not told as the owner.
//! 2. A request without an answer has not been refused, and may still be carried out.

use crate::causes::with_causes;
use bus::BusError;
use futures_util::StreamExt;
use schemas::control::{ControlReply, ControlRequest};
use schemas::{AccountId, codec, subject};
use sqlx::{PgConnection, Row};
use std::time::Duration;

/// Longest wait for an answer: the owner reads its account at the broker, 10 s at most, and the way.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(12);

/// Who has an account, by its row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owned {
    /// The account.
    pub account: AccountId,
    /// Its name.
    pub name: String,
    /// Nodes may own it.
    pub is_enabled: bool,
    /// No node is ever to own it: its publisher is another program.
    pub is_external: bool,
    /// The node that had it last, whether its lease lasts or not; nothing where it was given back.
    pub last_node: Option<String>,
    /// The token of the last tenure.
    pub token: i64,
    /// That node's lease lasts.
    pub is_leased: bool,
}

impl Owned {
    /// The owner; nothing without one, and where its lease has ended.
    pub fn owner(&self) -> Option<&str> {
        self.last_node.as_deref().filter(|_| self.is_leased)
    }
}

/// Who has this account; nothing if there is no such account.
pub async fn of(db: &mut PgConnection, account: AccountId) -> Result<Option<Owned>, sqlx::Error> {
    let row = sqlx::query(
        "select name, enabled, platform = 'external' as is_external, node_id, lease_token, lease_until > clock_timestamp() as is_leased \
         from trading_accounts where id = $1",
    );
    let row = row.bind(account.as_i64()).fetch_optional(db).await?;
    Ok(row.map(|row| Owned {
        account,
        name: row.get("name"),
        is_enabled: row.get("enabled"),
        is_external: row.get("is_external"),
        last_node: row.get("node_id"),
        token: row.get("lease_token"),
        is_leased: row.get("is_leased"),
    }))
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The bus does not show that it would bring an answer; nothing was asked.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The request did not leave.
    #[error("the request did not leave: {0}")]
    Publish(String),
    /// Nothing was asked: no node is there.
    #[error("no node hears requests on this bus")]
    NobodyHears,
    /// The connection ended; it may still be carried out.
    #[error("the connection to the bus ended")]
    Ended,
    /// It did not answer; it may still be carried out.
    #[error("{node} did not answer within {ANSWER_LIMIT:?}")]
    Silent {
        /// The owner.
        node: String,
    },
    /// It will not.
    #[error("{node} refuses: {reason}")]
    Refused {
        /// The owner.
        node: String,
        /// Why.
        reason: String,
    },
}

/// Asks the owner, `node`.
pub async fn ask(
    client: &async_nats::Client,
    node: &str,
    request: &ControlRequest,
) -> Result<ControlReply, AskError> {
    // The name of the user is in the inbox, where there are users; only it hears what goes there.
    let inbox = client.new_inbox();
    let unique = inbox.split_once('.').map_or(inbox.as_str(), |(_, unique)| unique);
    let reply = subject::control_reply(unique);
    let mut replies = bus::snapshot::prove_subscriptions(client, &reply).await?;
    let payload = codec::encode_control_request(request);
    let to = subject::control_account(request.account);
    let sent = client.publish_with_reply(to, reply, payload.into()).await;
    sent.map_err(|error| AskError::Publish(error.to_string()))?;
    let answered = tokio::time::timeout(ANSWER_LIMIT, async {
        while let Some(message) = replies.next().await {
            if message.status.is_some() {
                return Err(AskError::NobodyHears);
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
        Err(AskError::Ended)
    });
    let reply = answered.await.map_err(|_| AskError::Silent { node: node.to_owned() })??;
    match reply.refused {
        None => Ok(reply),
        Some(reason) => Err(AskError::Refused { node: reply.node.to_string(), reason }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::tests::database_with;

    #[tokio::test]
    async fn a_node_whose_lease_has_ended_is_named_and_not_told_as_the_owner() {
        let names = ["free", "late", "held"].map(|name| (name, "paper"));
        let (_url, mut db, accounts) = database_with("owner", &names).await;
        sqlx::raw_sql(
            "update trading_accounts set node_id = 'n-1', lease_token = 7, \
             lease_until = clock_timestamp() + interval '1 hour' where name = 'held'; \
             update trading_accounts set node_id = 'n-1', lease_token = 6, enabled = false, \
             lease_until = clock_timestamp() - interval '1 s' where name = 'late'",
        )
        .execute(&mut db)
        .await
        .unwrap();
        let mut seen = Vec::new();
        for account in accounts {
            let owned = of(&mut db, account).await.unwrap().unwrap();
            let owner = owned.owner().map(str::to_owned);
            seen.push((owned.name, owned.is_enabled, owned.last_node, owned.token, owner));
        }
        let node = || Some("n-1".to_owned());
        assert_eq!(seen[0], ("free".to_owned(), true, None, 0, None));
        assert_eq!(seen[1], ("late".to_owned(), false, node(), 6, None));
        assert_eq!(seen[2], ("held".to_owned(), true, node(), 7, node()));
        assert_eq!(of(&mut db, AccountId::new(99).unwrap()).await.unwrap(), None);
    }
}
