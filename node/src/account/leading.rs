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
use crate::causes::with_causes;
use crate::clock::NodeTime;
use crate::directory::SessionAccount;
use crate::follower::Follower;
use bus::{
    Closing, OnPublished, Publisher, PublisherHandle, PublisherSettings, PublisherStatus,
    start_epoch,
};
use schemas::{AccountSnapshot, Book, CloseReason, Epoch, Magic, Micros, SymbolSpec};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Wait before a master whose publisher was outbid speaks again: two that outbid each other must
/// not do it at full speed.
const OUTBID_WAIT: Duration = Duration::from_secs(1);

/// The way back of a publisher that heard a higher epoch. The account's session and its copying
/// go on meanwhile.
enum Return {
    /// Until then it stays silent.
    Waits(NodeTime),
    /// The next epoch is being stored, which asks the database whether the lease is still ours.
    Stores(Epoch, JoinHandle<Result<bool, String>>),
}

/// The publishing half of an account that is a master.
pub(super) struct Leading {
    pub(super) lead: Lead,
    pub(super) publisher: PublisherHandle,
    pub(super) status: watch::Receiver<PublisherStatus>,
    /// Used where the account has no follower, and so no view of its own.
    pub(super) view: Option<AccountView>,
    /// What was published last, as long as the next change can be told from it alone.
    book: Option<Book>,
    returns: Option<Return>,
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
        let publisher = self.start_publisher(epoch);
        if let Some(funds) = &snapshot.funds {
            publisher.set_funds(funds.clone());
        }
        let book = lead.book(&view.positions, &view.pendings, &view.symbols);
        publisher.observe(self.context.clock.wall(), book, &BTreeMap::new());
        let status = publisher.status();
        let is_followed = self.follower.is_some() && !session.is_netting();
        let view = (!is_followed).then_some(view);
        Ok(Leading { lead, publisher, status, view, book: None, returns: None })
    }

    /// What follows when an event was handed to the bus: followers on this node hear of it at once,
    /// and measurements are taken.
    fn on_published(&self) -> Option<OnPublished> {
        let stamp = self.context.stamps.on_published();
        if !self.context.config.local_path {
            return stamp;
        }
        let context = Arc::clone(&self.context);
        Some(Arc::new(move |event| {
            if let Some(stamp) = &stamp {
                stamp(event);
            }
            context.feeds.deliver(event);
        }))
    }

    fn start_publisher(&self, epoch: Epoch) -> PublisherHandle {
        let gate = self.context.gate.clone();
        let clock = self.context.clock.clone();
        let owner = self.owner;
        let may_publish = Arc::new(move || gate.may_speak(owner.account, owner.token, clock.now()));
        let beacon_interval = self.context.config.beacon;
        let on_published = self.on_published();
        Publisher::start(
            self.context.bus.clone(),
            owner.account,
            epoch,
            PublisherSettings { beacon_interval, on_published, ..PublisherSettings::default() },
            may_publish,
            &self.context.hot,
        )
    }

    /// Stores epochs that the publisher began by itself; where it was outbid, brings it back above
    /// what it heard, if the lease is still ours (H28).
    pub(super) async fn look_at_publisher(&mut self, leading: &mut Leading) {
        let now = self.context.now();
        let again = Return::Waits(now.node.plus(OUTBID_WAIT));
        leading.returns = match leading.returns.take() {
            None => match leading.superseded_by() {
                Some(heard) => {
                    tracing::warn!(account = %self.owner.account, %heard, "another publisher speaks for this master");
                    self.epoch = self.epoch.max(Some(heard));
                    Some(again)
                }
                None => {
                    self.note_epoch(leading);
                    None
                }
            },
            Some(Return::Waits(until)) if now.node < until => Some(Return::Waits(until)),
            Some(Return::Waits(_)) => {
                let epoch = start_epoch(now.wall, self.epoch, None);
                let stores = store_epoch(Arc::clone(&self.context), self.owner, epoch);
                Some(Return::Stores(epoch, self.context.slow.spawn(stores)))
            }
            Some(Return::Stores(epoch, task)) if !task.is_finished() => {
                Some(Return::Stores(epoch, task))
            }
            Some(Return::Stores(epoch, task)) => {
                match task.await.unwrap_or_else(|panic| Err(panic.to_string())) {
                    Ok(true) => {
                        self.speak_again(leading, epoch);
                        None
                    }
                    // The lease is lost: the manager will say so.
                    Ok(false) => Some(again),
                    Err(reason) => {
                        tracing::warn!(account = %self.owner.account, %epoch, %reason, "epoch not stored");
                        Some(again)
                    }
                }
            }
        };
    }

    fn speak_again(&mut self, leading: &mut Leading, epoch: Epoch) {
        self.epoch = self.epoch.max(Some(epoch));
        let shared = self.follower.as_ref().and_then(Follower::view);
        // Without a view the session is being lost, and begins anew with a publisher of its own.
        let Some(view) = leading.view.as_ref().or(shared) else { return };
        let publisher = self.start_publisher(epoch);
        if let Some(funds) = &view.funds {
            publisher.set_funds(funds.clone());
        }
        let book = leading.lead.book(&view.positions, &view.pendings, &view.symbols);
        publisher.observe(self.context.clock.wall(), book, &BTreeMap::new());
        leading.book = None;
        leading.status = publisher.status();
        leading.publisher = publisher;
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
            while let Err(reason) = store_epoch(Arc::clone(&context), owner, epoch).await {
                tracing::warn!(account = %owner.account, %epoch, %reason, "epoch not stored");
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

    /// The links that copy onto this account changed.
    pub(super) fn set_magics(&mut self, magics: impl IntoIterator<Item = Magic>) {
        self.lead.set_magics(magics);
        self.book = None;
    }

    /// Publishes what an event changed; how many events of ours it became.
    ///
    /// Most events are of one trade, and only that trade is looked at. Where another can have changed
    /// with it, the whole book is made and compared.
    pub(super) fn publish(
        &mut self,
        at: Micros,
        event: &SessionEvent,
        shared: Option<&AccountView>,
    ) -> usize {
        if let SessionEvent::Funds(funds) = event {
            self.publisher.set_funds(funds.clone());
            return 0;
        }
        let Some(view) = self.view.as_ref().or(shared) else { return 0 };
        // Unless it is put back, the next event makes the whole book.
        if let Some(mut book) = self.book.take()
            && let Some(changes) = self.lead.change_alone(&mut book, event, view)
            // Before the first state there is nothing to change.
            && let Ok(queued) = self.publisher.publish(at, changes)
        {
            self.book = Some(book);
            return queued;
        }
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
        let is_of_one = matches!(event, SessionEvent::Position(_) | SessionEvent::Closed { .. });
        self.book = is_of_one.then(|| book.clone());
        self.publisher.observe(at, book, &closings)
    }
}

/// False if the lease is lost.
async fn store_epoch(
    context: Arc<NodeContext>,
    owner: Owner,
    epoch: Epoch,
) -> Result<bool, String> {
    let stored = context.directory.store_epoch(owner.account, owner.token, epoch).await;
    stored.map_err(|error| with_causes(&error))
}
