//! The begin of a session: account and rows are read, a permission is waited for, the broker is reached.
//!
//! Does the I/O; nothing about trades is decided before everything was read.

use super::reading::load;
use super::session::{
    AccountSession, Connection, LOAD_RETRY, NETTING_DETAIL, NETTING_WORD, TICK, Wanted,
};
use crate::broker::executor;
use crate::broker::paper::{self as paper_platform, PaperSettings};
use crate::broker::{BrokerError, BrokerSession};
use crate::config::NodeConfig;
use crate::credentials::{Holder, unseal};
use crate::directory::SessionAccount;
use crate::follower::{Follower, FollowerSettings, Input};
use crate::notes::Note;
use crate::secret::Secret;
use futures_util::stream::FuturesUnordered;
use reconcile::Limits;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A reconcile without any other reason: finds what nobody told of, such as a changed stop.
const ROUTINE_RECONCILE: Duration = Duration::from_secs(60);

/// The account's password at the broker, if it has one. It is opened for each login and not kept.
fn open_password(
    config: &NodeConfig,
    account: &SessionAccount,
) -> Result<Option<Secret>, BrokerError> {
    let Some(sealed) = &account.credential else { return Ok(None) };
    let holder = Holder { account: account.id, platform: &account.platform };
    Ok(Some(unseal(config.master_keys.as_ref(), holder, sealed)?))
}

impl AccountSession {
    /// Account, links and pairs, read completely; tried until it works.
    pub(super) async fn load(&mut self) -> Result<SessionAccount, Wanted> {
        loop {
            self.wait_for_rows().await?;
            let context = Arc::clone(&self.context);
            let account = self.owner.account;
            let task = self.context.slow.spawn(async move { load(&context, account).await });
            match task.await.unwrap_or_else(|panic| Err(panic.to_string())) {
                Ok((account, links)) => {
                    self.master_names.clone_from(&account.master_names);
                    self.count_held(account.held);
                    self.context.fleet_mode.tell(account.fleet);
                    let settings = PaperSettings::from_json(account.id, &account.connection);
                    if settings.is_ok_and(|settings| settings.blocking) {
                        self.orders_wait = executor::WAIT_MAX;
                    }
                    self.begin_following(links);
                    self.epoch = account.epoch_max;
                    return Ok(account);
                }
                Err(reason) => {
                    tracing::warn!(account = %account, %reason, "account not read");
                    self.status("connecting", Some(reason), true);
                    self.pause(LOAD_RETRY).await?;
                }
            }
        }
    }

    /// Waits until no row of an earlier session of this account waits here for the database: one that
    /// began in the same tenure would not know what that one has done, and the rows of both would be
    /// stored. For one lease at most: a node that cannot write has lost the account by then, and if it has
    /// not, the rows are at fault, and the copies count more.
    pub(super) async fn wait_for_rows(&mut self) -> Result<(), Wanted> {
        let account = self.owner.account;
        let pending = |session: &Self| session.context.writer.pairs_pending(account);
        if pending(self) == 0 {
            return Ok(());
        }
        let reason = format!("{} rows of the session before are not written yet", pending(self));
        tracing::info!(%account, %reason, "account not read");
        self.status("connecting", Some(reason), true);
        let until = self.context.clock.now().plus(self.context.config.lease);
        while pending(self) > 0 {
            if self.context.clock.now() >= until {
                tracing::error!(%account, rows = pending(self), "rows are not written, the account goes on without them");
                return Ok(());
            }
            self.pause(TICK).await?;
        }
        Ok(())
    }

    pub(super) fn begin_following(&mut self, links: Vec<(reconcile::LinkRules, reconcile::Pairs)>) {
        if links.is_empty() {
            return;
        }
        let config = &self.context.config;
        let settings = FollowerSettings {
            parallel_orders: config.parallel_orders as usize,
            // The fence holds a broker call. It is counted from when an order was noted: where its call
            // holds a thread, it may have waited for one since.
            limits: Limits {
                delivery_max: config.fence + config.settle + self.orders_wait,
                ..Limits::default()
            },
            row_wait_max: config.lease,
            audits: config.audits.clone(),
            routine: ROUTINE_RECONCILE,
        };
        let now = self.context.now();
        // After a lease that ran out at least a fence has passed since the last order of the old
        // owner; after one that did not, it has to pass here (H8).
        let fence = if self.gained.hastened { config.fence } else { Duration::ZERO };
        let settle = (!self.gained.clean).then(|| now.node.plus(fence + config.settle));
        let follower = Follower::new(settings, links, settle, now);
        self.follower = Some(follower);
    }

    pub(super) async fn wait_for_permission(&mut self) -> Result<(), Wanted> {
        loop {
            self.wanted()?;
            if let Some(permission) = self.permission() {
                let restored = self.stretch.is_some_and(|stretch| stretch != permission.stretch);
                self.stretch = Some(permission.stretch);
                if restored && let Some(follower) = &mut self.follower {
                    let now = self.context.now();
                    // No session is open: nothing but a due reconcile can come of it.
                    let _no_effects = follower.step(now, Input::LeaseRestored);
                }
                return Ok(());
            }
            self.pause(TICK).await?;
        }
    }

    /// Connects, unless the manager wants something else meanwhile: what is half open is dropped.
    pub(super) async fn connect_while_wanted(
        &mut self,
        account: &SessionAccount,
        settings: &PaperSettings,
    ) -> Result<Result<Connection, BrokerError>, Wanted> {
        let mut wanted = self.control.wanted.clone();
        tokio::select! {
            biased;
            changed = wanted.wait_for(|wanted| !matches!(wanted, Wanted::Run | Wanted::Move)) => {
                Err(changed.map_or(Wanted::Stop, |wanted| *wanted))
            }
            connected = self.connect(account, settings) => Ok(connected),
        }
    }

    pub(super) async fn connect(
        &mut self,
        account: &SessionAccount,
        settings: &PaperSettings,
    ) -> Result<Connection, BrokerError> {
        let context = Arc::clone(&self.context);
        if settings.blocking && context.executor.threads() == 0 {
            return Err(paper_platform::no_threads());
        }
        let password = open_password(&context.config, account)?;
        let (mut session, events, snapshot) = paper_platform::open(
            account.id,
            settings,
            password.as_ref(),
            &context.node,
            self.owner.token,
            context.clock.clone(),
        )
        .await?;
        if settings.blocking {
            session.hold_threads(&context.executor, context.config.parallel_orders as usize)?;
        }
        let session = Arc::new(session);
        self.refuse_netting(session.is_netting());
        let symbols = session.symbols().await?;
        let lead = if account.is_master {
            Some(self.begin_leading(account, &session, &snapshot, &symbols).await?)
        } else {
            None
        };
        let mut connection = Connection {
            session,
            events,
            answers: FuturesUnordered::new(),
            reads: FuturesUnordered::new(),
            asked: BTreeMap::new(),
            lead,
        };
        if self.cannot_follow {
            self.status(NETTING_WORD, Some(NETTING_DETAIL.to_owned()), true);
            return Ok(connection);
        }
        self.note(|account, token| Note::SessionOpened { account, token });
        if let Some(follower) = &mut self.follower {
            let renumbers = connection.session.renumbers();
            let opened = Input::SessionOpened { snapshot, symbols, renumbers };
            let effects = follower.step(context.now(), opened);
            self.execute(&mut connection, effects);
            self.catch_up(&mut connection);
        }
        self.status("reconciling", None, true);
        Ok(connection)
    }

    /// Copies on a netting account would flow into one trade a symbol, and closing one would close
    /// the others (H61): its follower is not told of the session, so that it never sends. The
    /// account may still be a master.
    pub(super) fn refuse_netting(&mut self, is_netting: bool) {
        self.cannot_follow = is_netting && self.follower.is_some();
        if self.cannot_follow {
            tracing::error!(account = %self.owner.account, "{NETTING_DETAIL}");
        }
    }
}
