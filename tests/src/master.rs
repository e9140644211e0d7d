//! An external master that the test moves by hand, with the publisher that every master has.

use crate::world::{EURUSD, PRICE, wall};
use bus::{ClientSettings, Publisher, PublisherHandle, PublisherSettings, start_epoch};
use schemas::{
    AccountId, Book, Change, CloseReason, Funds, Lots, MasterPending, MasterPosition, MasterTicket,
    Micros, PendingKind, Price, Side, Symbol,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A master whose trades are what the test says.
#[derive(Debug)]
pub struct Master {
    /// Its account.
    pub account: AccountId,
    /// What it holds.
    pub book: Book,
    /// What it has published, with the instants.
    pub published: Vec<(Micros, Change)>,
    /// The publisher.
    pub handle: PublisherHandle,
    last_ticket: u64,
}

impl Master {
    /// Connects to these servers and begins to speak, with nothing open.
    pub async fn start(urls: Vec<String>, account: AccountId) -> Master {
        Master::start_with(urls, account, PublisherSettings::default()).await
    }

    /// The same with other times.
    pub async fn start_with(
        urls: Vec<String>,
        account: AccountId,
        settings: PublisherSettings,
    ) -> Master {
        let client = bus::connect(&ClientSettings::new(urls, "test-master")).await.unwrap();
        Master::speak(client, account, settings)
    }

    /// Speaks over a connection of the caller's, with nothing open.
    pub fn start_on(client: async_nats::Client, account: AccountId) -> Master {
        Master::speak(client, account, PublisherSettings::default())
    }

    fn speak(
        client: async_nats::Client,
        account: AccountId,
        settings: PublisherSettings,
    ) -> Master {
        let handle = Publisher::start(
            client,
            account,
            start_epoch(wall(), None, None),
            settings,
            Arc::new(|| true),
            &tokio::runtime::Handle::current(),
        );
        handle.set_funds(Funds {
            balance: "10000".parse().unwrap(),
            equity: "10000".parse().unwrap(),
            margin_used: None,
            currency: Symbol::new("USD").unwrap(),
            at: wall(),
        });
        handle.observe(wall(), Book::default(), &BTreeMap::new());
        Master { account, book: Book::default(), published: Vec::new(), handle, last_ticket: 0 }
    }

    fn publish(&mut self, changes: Vec<Change>) {
        let at = wall();
        for change in &changes {
            self.book.apply(change);
            self.published.push((at, change.clone()));
        }
        // A number below the count only says that nobody is connected now.
        let _queued = self.handle.publish(at, changes).unwrap();
    }

    fn ticket(&mut self) -> MasterTicket {
        self.last_ticket += 1;
        MasterTicket::new(self.last_ticket).unwrap()
    }

    /// Opens `count` trades of `lots` in one burst.
    pub fn open_many(&mut self, count: usize, lots: &str) -> Vec<MasterTicket> {
        let at = wall();
        let positions: Vec<MasterPosition> =
            (0..count).map(|_| position(self.ticket(), lots.parse().unwrap(), at)).collect();
        let tickets = positions.iter().map(|p| p.ticket).collect();
        self.publish(positions.into_iter().map(Change::PositionOpened).collect());
        tickets
    }

    /// Opens one trade at another price than the broker's.
    pub fn open_at(&mut self, lots: &str, price: Option<&str>) -> MasterTicket {
        let mut opened = position(self.ticket(), lots.parse().unwrap(), wall());
        if let Some(price) = price {
            opened.open_price = Some(price.parse().unwrap());
        }
        let ticket = opened.ticket;
        self.publish(vec![Change::PositionOpened(opened)]);
        ticket
    }

    /// Opens one trade of another symbol.
    pub fn open_in(&mut self, symbol: &str, lots: &str) -> MasterTicket {
        let opened = position(self.ticket(), lots.parse().unwrap(), wall());
        let opened = MasterPosition { symbol: Symbol::new(symbol).unwrap(), ..opened };
        let ticket = opened.ticket;
        self.publish(vec![Change::PositionOpened(opened)]);
        ticket
    }

    /// Opens one trade.
    pub fn open(&mut self, lots: &str) -> MasterTicket {
        self.open_many(1, lots)[0]
    }

    /// Closes trades in one burst.
    pub fn close_many(&mut self, tickets: &[MasterTicket]) {
        let closed = tickets.iter().map(|ticket| Change::PositionClosed {
            position: self.book.positions[ticket].clone(),
            price: None,
            reason: CloseReason::Client,
        });
        let closed = closed.collect();
        self.publish(closed);
    }

    /// Closes one trade.
    pub fn close(&mut self, ticket: MasterTicket) {
        self.close_many(&[ticket]);
    }

    /// Closes a part, so that `left` stays.
    pub fn reduce(&mut self, ticket: MasterTicket, left: &str) {
        let mut position = self.book.positions[&ticket].clone();
        let previous_lots = position.lots;
        position.lots = left.parse().unwrap();
        self.publish(vec![Change::VolumeChanged { position, previous_lots }]);
    }

    /// Sets both stops.
    pub fn modify(&mut self, ticket: MasterTicket, stop_loss: &str, take_profit: &str) {
        let mut position = self.book.positions[&ticket].clone();
        position.stop_loss = Some(stop_loss.parse().unwrap());
        position.take_profit = Some(take_profit.parse().unwrap());
        self.publish(vec![Change::PositionModified(position)]);
    }

    /// Places a pending order.
    pub fn place(&mut self, kind: PendingKind, lots: &str, price: &str) -> MasterTicket {
        let ticket = self.ticket();
        self.publish(vec![Change::PendingPlaced(MasterPending {
            ticket,
            symbol: Symbol::new(EURUSD).unwrap(),
            kind,
            lots: lots.parse().unwrap(),
            price: price.parse().unwrap(),
            stop_loss: None,
            take_profit: None,
            placed_at: wall(),
            contract_size: None,
            is_copy: false,
        })]);
        ticket
    }
}

/// A trade at the price that the broker quotes.
pub fn position(ticket: MasterTicket, lots: Lots, opened_at: Micros) -> MasterPosition {
    MasterPosition {
        ticket,
        symbol: Symbol::new(EURUSD).unwrap(),
        side: Side::Buy,
        lots,
        lots_at_open: lots,
        open_price: Some(PRICE.parse::<Price>().unwrap()),
        stop_loss: None,
        take_profit: None,
        opened_at,
        contract_size: None,
        is_copy: false,
    }
}
