//! Asking the owner of an account for something, over the bus.
//!
//! In: a request, a connection, and who owns the account by the database. Out: the owner's answer, or why
//! there is none within [`ANSWER_LIMIT`].
//!
//! Invariant: a request without an answer has not been refused, and may still be carried out.

use crate::causes::with_causes;
use bus::BusError;
use futures_util::StreamExt;
use schemas::control::{ControlReply, ControlRequest};
use schemas::{codec, subject};
use std::time::Duration;

/// Longest wait for an answer: the owner reads its account at the broker, 10 s at most, and the way.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(12);

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
