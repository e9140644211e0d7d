//! Cases; the properties are in `properties.rs`, the real files in `shared_tests.rs`.

use std::collections::BTreeMap;

use schemas::event::Change;
use schemas::ids::{MasterTicket, Symbol};
use schemas::position::{MasterPending, MasterPosition, Side};
use schemas::quantity::Price;

use super::*;

/// What an account holds after some steps.
#[derive(Debug, Default, Clone)]
pub(super) struct Book {
    pub(super) positions: BTreeMap<MasterTicket, MasterPosition>,
    pub(super) pendings: BTreeMap<MasterTicket, MasterPending>,
    pub(super) positions_max: usize,
}

impl Book {
    /// Applies a step; panics where the change does not fit what is there.
    pub(super) fn apply(&mut self, step: &Step) {
        let ticket = step.change.ticket();
        match &step.change {
            Change::PositionOpened(position) => {
                assert_eq!(position.lots, position.lots_at_open);
                assert!(self.positions.insert(ticket, position.clone()).is_none());
            }
            Change::PendingFilled(position) => {
                assert!(self.pendings.remove(&ticket).is_some());
                assert!(self.positions.insert(ticket, position.clone()).is_none());
            }
            Change::PositionModified(position) => {
                let before = self.positions.insert(ticket, position.clone()).unwrap();
                assert_eq!(before.lots, position.lots);
            }
            Change::VolumeChanged { position, previous_lots } => {
                let before = self.positions.insert(ticket, position.clone()).unwrap();
                assert_eq!(before.lots, *previous_lots);
                assert_ne!(before.lots, position.lots);
            }
            Change::PositionClosed { position, price, .. } => {
                let before = self.positions.remove(&ticket).unwrap();
                assert_eq!(&before, position);
                assert!(price.is_some());
            }
            Change::PendingPlaced(order) => {
                assert!(self.pendings.insert(ticket, order.clone()).is_none());
            }
            Change::PendingModified(order) => {
                assert!(self.pendings.insert(ticket, order.clone()).is_some());
            }
            Change::PendingCancelled(_) => assert!(self.pendings.remove(&ticket).is_some()),
        }
        self.positions_max = self.positions_max.max(self.positions.len());
    }
}

/// Plays steps from an empty account, checking the order of time as well.
pub(super) fn play(steps: &[Step]) -> Book {
    let mut book = Book::default();
    for pair in steps.windows(2) {
        assert!(pair[0].offset_us <= pair[1].offset_us);
        assert_eq!(pair[0].at == pair[1].at, pair[0].offset_us == pair[1].offset_us);
    }
    for step in steps {
        book.apply(step);
    }
    book
}

/// A level that a step's price reaches belongs to a trade that ends in that step or never had it.
pub(super) fn assert_no_stop_is_reached_early(steps: &[Step]) {
    let mut book = Book::default();
    for step in steps {
        let ends = matches!(step.change, Change::PositionClosed { .. });
        if ends {
            book.apply(step);
        }
        if let Some((symbol, price)) = &step.quote {
            for position in book.positions.values().filter(|p| &p.symbol == symbol) {
                // A volume change sets new levels at its own price.
                if position.ticket != step.change.ticket() {
                    assert!(!reached(position, *price), "{position:?} by {price} at {}", step.at);
                }
            }
        }
        if !ends {
            book.apply(step);
        }
        if let (Some((_, price)), Some(position)) =
            (&step.quote, book.positions.get(&step.change.ticket()))
        {
            assert!(!reached(position, *price), "{position:?} by its own {price} at {}", step.at);
        }
    }
}

fn reached(position: &MasterPosition, price: Price) -> bool {
    let (stop, target) = (position.stop_loss, position.take_profit);
    match position.side {
        Side::Buy => stop.is_some_and(|s| price <= s) || target.is_some_and(|t| price >= t),
        Side::Sell => stop.is_some_and(|s| price >= s) || target.is_some_and(|t| price <= t),
    }
}
