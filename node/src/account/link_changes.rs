//! Hears that links changed, so that the sessions read theirs again.
//!
//! Decides: when the links may have changed.
//! In: announcements of the database. Out: a number that is raised.
//!
//! Invariants:
//! 1. The number is raised after every new connection: what changed while nobody listened is read
//!    then.
//! 2. A connection that has been quiet is asked whether it lives; without an answer it is made
//!    anew. A server that vanished without a word announces nothing, and closes nothing either.
//!
//! Not covered: what changed; a session that reads its links again sees it.

use crate::causes::with_causes;
use crate::database;
use std::time::Duration;
use tokio::sync::watch;

/// The channel on which the database announces changed links.
pub const CHANNEL: &str = "lockstep_links";

/// How a connection that listens is kept (chosen: a change of rules is late by a minute at most).
const KEEPING: Keeping = Keeping {
    ask_after: Duration::from_secs(30),
    limit: Duration::from_secs(5),
    retry: Duration::from_secs(2),
};

/// The waits of a connection that listens.
#[derive(Debug, Clone, Copy)]
struct Keeping {
    /// Without a word for so long, it is asked whether it lives.
    ask_after: Duration,
    /// The longest that connecting and an answer may take.
    limit: Duration,
    /// Pause before it is made anew.
    retry: Duration,
}

/// Why the connection is made anew.
#[derive(Debug, thiserror::Error)]
enum Deaf {
    #[error("no connection")]
    Connect(#[from] database::DatabaseError),
    #[error("the connection was lost")]
    Lost,
    #[error("the connection failed")]
    Failed(#[from] sqlx::Error),
    #[error("no answer within {0:?}")]
    Silent(Duration),
}

/// Raises the number whenever links may have changed, until nobody looks at it any more.
pub async fn listen(url: String, raised: watch::Sender<u64>) {
    keep_listening(&url, &raised, KEEPING).await;
}

async fn keep_listening(url: &str, raised: &watch::Sender<u64>, keeping: Keeping) {
    while !raised.is_closed() {
        let deaf = hear(url, raised, keeping).await;
        tracing::warn!(error = %with_causes(&deaf), "changes of links are not heard");
        tokio::time::sleep(keeping.retry).await;
    }
}

/// Hears until the connection is no good any more.
async fn hear(url: &str, raised: &watch::Sender<u64>, keeping: Keeping) -> Deaf {
    let Keeping { ask_after, limit, .. } = keeping;
    let connected = database::listen(url, "links", CHANNEL);
    let mut listener = match tokio::time::timeout(limit, connected).await {
        Ok(Ok(listener)) => listener,
        Ok(Err(error)) => return error.into(),
        Err(_elapsed) => return Deaf::Silent(limit),
    };
    loop {
        raised.send_modify(|count| *count += 1);
        // Made anew by itself, the connection would hide what it missed.
        let heard = loop {
            match tokio::time::timeout(ask_after, listener.try_recv()).await {
                Ok(heard) => break heard,
                Err(_quiet) => {
                    let lives = sqlx::query("select 1").execute(&mut listener);
                    match tokio::time::timeout(limit, lives).await {
                        Ok(Ok(_)) => {}
                        Ok(Err(error)) => return error.into(),
                        Err(_elapsed) => return Deaf::Silent(limit),
                    }
                }
            }
        };
        match heard {
            Ok(Some(_)) => {}
            Ok(None) => return Deaf::Lost,
            Err(error) => return error.into(),
        }
    }
}

#[cfg(test)]
#[path = "link_changes_tests.rs"]
mod tests;
