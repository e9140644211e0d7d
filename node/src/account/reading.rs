//! What a session reads beside its work: rows of the database, and its account at the broker.

use super::rows;
use super::session::{NodeContext, ReadFuture};
use crate::broker::paper::PaperBrokerSession;
use crate::broker::{BrokerError, BrokerSession};
use crate::causes::with_causes;
use crate::directory::SessionAccount;
use crate::follower::AccountRead;
use crate::writer::RowSink;
use reconcile::FollowerHistory;
use schemas::{AccountId, Micros, Symbol};
use std::collections::BTreeSet;
use std::sync::Arc;

/// An account with its links and every pair row of each; or why they could not be read.
pub(super) type Load =
    Result<(SessionAccount, Vec<(reconcile::LinkRules, reconcile::Pairs)>), String>;

/// Account, links and pairs, read completely.
pub(super) async fn load(context: &NodeContext, account: AccountId) -> Load {
    let session = context.directory.session_account(account).await.map_err(|e| with_causes(&e))?;
    let loaded = context.rows.load_pairs(account).await.map_err(|e| with_causes(&e))?;
    let links =
        session.links.iter().map(|rules| (rules.clone(), rows::pairs_of(rules, &loaded))).collect();
    Ok((session, links))
}

/// One complete read of the account, its history and the quotes that matter; or nothing.
pub(super) fn read(
    session: Arc<PaperBrokerSession>,
    id: u64,
    since: Micros,
    symbols: BTreeSet<Symbol>,
) -> ReadFuture {
    Box::pin(async move {
        // History last: what ends between the two reads is then in both, and missing in neither.
        let complete = async {
            let snapshot = session.snapshot().await?;
            let trades = session.history(since).await?;
            Ok::<_, BrokerError>((snapshot, trades))
        };
        match complete.await {
            Ok((snapshot, trades)) => {
                let quotes = symbols.iter().filter_map(|symbol| session.quote(symbol)).collect();
                let history = FollowerHistory { since, trades };
                (id, Some(AccountRead { snapshot, history, quotes }))
            }
            Err(error) => {
                tracing::warn!(error = %with_causes(&error), "account not read");
                (id, None)
            }
        }
    })
}
