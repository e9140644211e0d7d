//! The loop that looks, and writes what was seen.
//!
//! In: the lease's state, the bus connection, the count of open sessions, the database's answer.
//! Out: rows of `node_minutes`, counters. On the slow runtime; nothing waits for it.
//!
//! Bounds: one question to the database at a time, one statement of at most a day's minutes, and
//! [`super::WAITING_MAX`] minutes that wait.

use super::store::{MinuteStore, ROWS_MAX};
use super::{LOOK_EVERY, Look, Minute, Reason, Record, state_word};
use crate::account::asking::OpenSessions;
use crate::causes::with_causes;
use crate::clock::NodeClock;
use crate::lease::LeaseState;
use crate::metrics::names;
use async_nats::connection::State;
use schemas::Micros;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// What is looked at.
#[derive(Debug)]
pub struct Sights {
    /// The node's time.
    pub clock: NodeClock,
    /// What it owns.
    pub lease: watch::Receiver<Arc<LeaseState>>,
    /// Its connection to the bus.
    pub bus: async_nats::Client,
    /// Its sessions at brokers.
    pub sessions: OpenSessions,
}

/// Looks until the runtime ends.
pub async fn run(sights: Sights, store: MinuteStore, record: Record) {
    let mut keeper = Keeper::new(store, record);
    let mut pause = tokio::time::interval(LOOK_EVERY);
    pause.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        pause.tick().await;
        let database = keeper.ask().await;
        keeper.see(sights.look(database)).await;
    }
}

impl Sights {
    fn look(&self, database: bool) -> Look {
        let lease = self.lease.borrow();
        let wanted = lease.held.values().filter(|tenure| tenure.enabled).count();
        let there = [
            (Reason::Bus, self.bus.connection_state() == State::Connected),
            (Reason::Database, database),
            (Reason::Broker, self.sessions.open() >= wanted),
        ];
        let missing = there.into_iter().filter(|(_, is_there)| !is_there);
        let (now, at) = (self.clock.now(), self.clock.wall());
        let ago_us = lease.confirmed_at.map(|confirmed| now.since(confirmed).as_micros() as i64);
        Look {
            at,
            lease_confirmed: ago_us.map(|ago_us| Micros(at.0.saturating_sub(ago_us))),
            missing: missing.map(|(reason, _)| reason).collect(),
        }
    }
}

/// The minutes, and the way to the database.
#[derive(Debug)]
pub(super) struct Keeper {
    store: MinuteStore,
    record: Record,
    /// The database did not answer at the last look.
    away: bool,
}

impl Keeper {
    pub(super) fn new(store: MinuteStore, record: Record) -> Self {
        Keeper { store, record, away: false }
    }

    /// Whether the database answers, and takes rows.
    pub(super) async fn ask(&mut self) -> bool {
        let answer = self.store.ask().await;
        if let Err(error) = &answer
            && !self.away
        {
            tracing::warn!(error = with_causes(error), "the database is away; minutes wait");
        }
        self.away = answer.is_err();
        !self.away
    }

    /// Takes in a look, and writes what waits where the database is there.
    pub(super) async fn see(&mut self, look: Look) {
        let is_there = !look.missing.contains(&Reason::Database);
        if let Some(minute) = self.record.see(look) {
            count(&minute);
        }
        if is_there {
            self.write().await;
        }
    }

    async fn write(&mut self) {
        loop {
            let minutes = self.record.waiting(ROWS_MAX);
            if minutes.is_empty() {
                return;
            }
            if let Err(error) = self.store.write(&minutes).await {
                tracing::warn!(
                    error = with_causes(&error),
                    waiting = minutes.len(),
                    "minutes not written"
                );
                return;
            }
            self.record.written(&minutes);
        }
    }
}

fn count(minute: &Minute) {
    let state = state_word(minute.reasons.is_empty());
    metrics::counter!(names::UPTIME_RECORDED, "state" => state).increment(1);
    for reason in &minute.reasons {
        metrics::counter!(names::UPTIME_DEGRADED, "reason" => reason.as_str()).increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Tenure;
    use bus::ClientSettings;
    use devstack::{Nats, Tools};
    use schemas::{AccountId, Token};

    /// What is looked at by a node that owns one account, and another one that is switched off.
    async fn sights(bus: String) -> Sights {
        let tenure = |enabled| Tenure {
            token: Token::MIN,
            platform: "paper".to_owned(),
            enabled,
            clean: true,
            previous_owner: None,
            hastened: false,
            term: None,
        };
        let held = [(AccountId::MIN, tenure(true)), (AccountId::MAX, tenure(false))].into();
        let state = LeaseState { held, ..LeaseState::default() };
        Sights {
            clock: NodeClock::system(),
            // It can be looked at after its sender is gone.
            lease: watch::channel(Arc::new(state)).1,
            bus: bus::connect(&ClientSettings::new(vec![bus], "test")).await.unwrap(),
            sessions: OpenSessions::default(),
        }
    }

    fn missing(sights: &Sights, database: bool) -> Vec<Reason> {
        sights.look(database).missing.into_iter().collect()
    }

    #[tokio::test]
    async fn a_look_finds_what_of_bus_database_and_sessions_is_not_there() {
        let nats = Nats::start(&Tools::locate().unwrap()).await.unwrap();
        let node = sights(nats.url()).await;
        node.bus.flush().await.unwrap();
        assert_eq!(missing(&node, true), [Reason::Broker]);
        let open = node.sessions.open_for_tests(AccountId::MIN);
        assert_eq!(missing(&node, true), []);
        assert_eq!(missing(&node, false), [Reason::Database]);
        drop(open);
        assert_eq!(missing(&node, true), [Reason::Broker]);
        let nobody = devstack::free_address().unwrap();
        let cut_off = sights(format!("nats://{nobody}")).await;
        assert_eq!(missing(&cut_off, true), [Reason::Bus, Reason::Broker]);
    }
}
