//! The publishing half of a session whose account is a master.
//!
//! Does the I/O: stores epochs under the lease token before they are spoken, starts the
//! publisher, hands it every new state. `account::lead` decides what is published.

use super::lead::Lead;
use super::rows::Owner;
use super::session::{AccountSession, LOAD_RETRY, NodeContext};
use crate::broker::paper::PaperBrokerSession;
use crate::broker::view::AccountView;
use crate::broker::{BrokerError, BrokerSession, SessionEvent};
use crate::directory::SessionAccount;
use bus::{Closing, Publisher, PublisherHandle, PublisherSettings, PublisherStatus, start_epoch};
use schemas::{AccountSnapshot, CloseReason, Epoch, Micros, SymbolSpec};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// The publishing half of an account that is a master.
pub(super) struct Leading {
    pub(super) lead: Lead,
    pub(super) publisher: PublisherHandle,
    pub(super) status: watch::Receiver<PublisherStatus>,
    /// Used where the account has no follower, and so no view of its own.
    pub(super) view: Option<AccountView>,
}

impl AccountSession {
    /// Starts to speak as a master, with an epoch that is stored before the first word.
    pub(super) async fn begin_leading(
        &mut self,
        account: &SessionAccount,
        session: &Arc<PaperBrokerSession>,
        snapshot: &AccountSnapshot,
        symbols: &[SymbolSpec],
    ) -> Result<Leading, BrokerError> {
        let oldest = snapshot.positions.iter().map(|p| p.opened_at).min();
        let history = session.history(oldest.unwrap_or(snapshot.at)).await?;
        let magics = account.links.iter().map(|link| link.magic);
        let mut lead = Lead::new(magics, &history);
        let view = AccountView::new(snapshot, symbols.to_vec());
        let epoch = start_epoch(self.context.clock.wall(), self.epoch, None);
        self.store_epoch(epoch).await?;
        let gate = self.context.gate.clone();
        let clock = self.context.clock.clone();
        let owner = self.owner;
        let may_publish = Arc::new(move || gate.may_speak(owner.account, owner.token, clock.now()));
        let publisher = Publisher::start(
            self.context.bus.clone(),
            owner.account,
            epoch,
            PublisherSettings {
                beacon_interval: self.context.config.beacon,
                ..PublisherSettings::default()
            },
            may_publish,
            &self.context.hot,
        );
        if let Some(funds) = &snapshot.funds {
            publisher.set_funds(funds.clone());
        }
        let book = lead.book(&view.positions, &view.pendings, &view.symbols);
        publisher.observe(self.context.clock.wall(), book, &BTreeMap::new());
        let status = publisher.status();
        let is_followed = self.follower.is_some() && !session.is_netting();
        let view = (!is_followed).then_some(view);
        Ok(Leading { lead, publisher, status, view })
    }

    async fn store_epoch(&mut self, epoch: Epoch) -> Result<(), BrokerError> {
        let failed = |why: String| BrokerError::Connection(format!("epoch not stored: {why}"));
        let task =
            self.context.slow.spawn(store_epoch(Arc::clone(&self.context), self.owner, epoch));
        match task.await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return Err(failed("the lease was lost".into())),
            Ok(Err(error)) => return Err(failed(error)),
            Err(panic) => return Err(failed(panic.to_string())),
        }
        self.epoch = Some(epoch);
        Ok(())
    }

    /// The publisher begins epochs by itself, after a hole in its connection or its permit: each
    /// is stored beside the work, so that the next owner begins above it (H27).
    pub(super) fn note_epoch(&mut self, leading: &Leading) {
        let PublisherStatus::Publishing { epoch } = *leading.status.borrow() else { return };
        if self.epoch.is_some_and(|known| known >= epoch) {
            return;
        }
        self.epoch = Some(epoch);
        let (context, owner) = (Arc::clone(&self.context), self.owner);
        let older = self.storing.replace(self.context.slow.spawn(async move {
            // Ends with the lease at the latest: then it is refused, and no error any more.
            while let Err(error) = store_epoch(Arc::clone(&context), owner, epoch).await {
                tracing::warn!(account = %owner.account, %epoch, %error, "epoch not stored");
                tokio::time::sleep(LOAD_RETRY).await;
            }
        }));
        if let Some(older) = older {
            older.abort();
        }
    }
}

impl Leading {
    pub(super) fn superseded_by(&self) -> Option<Epoch> {
        match *self.status.borrow() {
            PublisherStatus::Superseded { heard } => Some(heard),
            PublisherStatus::Waiting { .. }
            | PublisherStatus::Publishing { .. }
            | PublisherStatus::Stopped => None,
        }
    }

    pub(super) fn learn(&mut self, event: &SessionEvent) {
        if let Some(view) = &mut self.view {
            view.apply(event);
        }
        if let SessionEvent::Reduced { closed, .. } | SessionEvent::Closed { closed, .. } = event {
            self.lead.learn(closed);
        }
    }

    pub(super) fn publish(
        &mut self,
        at: Micros,
        event: &SessionEvent,
        shared: Option<&AccountView>,
    ) {
        if let SessionEvent::Funds(funds) = event {
            self.publisher.set_funds(funds.clone());
            return;
        }
        let Some(view) = self.view.as_ref().or(shared) else { return };
        let mut closings = BTreeMap::new();
        let ended = match event {
            SessionEvent::Closed { closed, reason } => Some((closed, *reason)),
            // Netting: what was there ended, and what is there is another trade.
            SessionEvent::Reduced { position, closed } if position.side != closed.side => {
                Some((closed, CloseReason::Client))
            }
            _ => None,
        };
        if let Some((closed, reason)) = ended {
            let ticket = self.lead.ticket_of(closed);
            closings.insert(ticket, Closing { price: Some(closed.close_price), reason });
        }
        let book = self.lead.book(&view.positions, &view.pendings, &view.symbols);
        self.publisher.observe(at, book, &closings);
    }
}

/// False if the lease is lost.
async fn store_epoch(
    context: Arc<NodeContext>,
    owner: Owner,
    epoch: Epoch,
) -> Result<bool, String> {
    let stored = context.directory.store_epoch(owner.account, owner.token, epoch).await;
    stored.map_err(|error| error.to_string())
}
