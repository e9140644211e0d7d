//! Masters that trade all the time, from a seed.
//!
//! Inputs: how busy they are, and single wishes ([`Wish`]). Outputs: trades at the masters, and
//! what they did ([`Truth`]), kept apart from anything a node says.
//!
//! What they do: single trades and bursts, partial closes, changed stops, closes and bursts of
//! closes, and trades that are opened and closed within a moment. Prices stand still, so stops
//! are never met and a late copy is always allowed.

use super::books::Books;
use super::world::{MasterSite, World, bus_urls};
use super::{Done, timing};
use crate::master::Master;
use crate::oracle::State;
use crate::world::EURUSD;
use bus::PublisherSettings;
use fastrand::Rng;
use paper::PaperDriver;
use paper::protocol::{Instruction, OrderReply};
use parking_lot::Mutex;
use rust_decimal::Decimal;
use schemas::{AccountId, Book, Change, FollowerTicket, Lots, MasterTicket, Micros, Side, Symbol};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

/// Trades a master holds at most without being asked for more.
const OPEN_MAX: usize = 24;
/// Trades it keeps, so that there is something to compare.
const OPEN_MIN: usize = 3;
/// Closes of the burst during a takeover.
pub const BURST: usize = 27;

/// How busy the masters are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Nothing is done.
    Quiet,
    /// A trade now and then.
    Calm,
    /// All the time.
    Busy,
}

impl Pace {
    /// Shortest and longest pause between two actions of a master, in milliseconds.
    fn pause_ms(self) -> (u64, u64) {
        match self {
            Pace::Quiet => (50, 50),
            Pace::Calm => (300, 900),
            Pace::Busy => (60, 500),
        }
    }
}

/// What a master is asked to do out of turn.
#[derive(Debug)]
pub enum Wish {
    /// Open [`BURST`] trades at once.
    OpenBurst,
    /// Close up to [`BURST`] trades at once.
    CloseBurst,
}

/// What the external masters did, with the instants.
#[derive(Debug, Clone, Default)]
pub struct Truth {
    /// Every change of each.
    pub published: BTreeMap<AccountId, Vec<(Micros, Change)>>,
    /// What each holds now.
    pub books: BTreeMap<AccountId, Book>,
}

type Asked = (Wish, oneshot::Sender<()>);

/// The running masters; they end with the value.
#[derive(Debug)]
pub struct Load {
    pace: watch::Sender<Pace>,
    wishes: Vec<mpsc::Sender<Asked>>,
    idle: Vec<watch::Receiver<bool>>,
    truth: Arc<Mutex<Truth>>,
    leased: Vec<AccountId>,
    tasks: JoinSet<Done>,
}

impl Load {
    /// Starts the masters, quiet.
    pub async fn start(world: &World, seed: u64) -> Done<Load> {
        let (pace, paced) = watch::channel(Pace::Quiet);
        let mut load = Load {
            pace,
            wishes: Vec::new(),
            idle: Vec::new(),
            truth: Arc::default(),
            leased: Vec::new(),
            tasks: JoinSet::new(),
        };
        for (number, site) in world.masters.iter().enumerate() {
            let hand = hand(world, *site).await?;
            if site.is_leased {
                load.leased.push(site.account);
            }
            let (wishes, wished) = mpsc::channel(4);
            let (idle, is_idle) = watch::channel(false);
            let player = Player {
                hand,
                rng: Rng::with_seed(seed ^ (number as u64 + 1)),
                pace: paced.clone(),
                wished,
                idle,
                truth: Arc::clone(&load.truth),
            };
            load.wishes.push(wishes);
            load.idle.push(is_idle);
            load.tasks.spawn(player.run());
        }
        Ok(load)
    }

    /// Changes the pace; when it returns from a change to quiet, nothing more is done.
    pub async fn set_pace(&mut self, pace: Pace) -> Done {
        self.pace.send_replace(pace);
        if pace == Pace::Quiet {
            for idle in &mut self.idle {
                // A player that has ended says why below.
                let _ended = idle.wait_for(|idle| *idle).await;
            }
        }
        match self.tasks.try_join_next() {
            None => Ok(()),
            Some(ended) => Err(format!("a master ended: {ended:?}").into()),
        }
    }

    /// Who asks masters for something out of turn.
    pub fn wisher(&self) -> Wisher {
        Wisher(self.wishes.clone())
    }

    /// What the external masters did.
    pub fn truth(&self) -> Truth {
        self.truth.lock().clone()
    }

    /// What a master holds now.
    pub fn state(&self, master: AccountId, books: &Books) -> State {
        if self.leased.contains(&master) {
            return books.leased(master);
        }
        self.truth.lock().books.get(&master).map(State::of_book).unwrap_or_default()
    }
}

/// Asks masters for something out of turn.
#[derive(Debug, Clone)]
pub struct Wisher(Vec<mpsc::Sender<Asked>>);

impl Wisher {
    /// Asks every master, and waits until each has done it.
    pub async fn ask(&self, wish: impl Fn() -> Wish) {
        for wishes in &self.0 {
            let (done, is_done) = oneshot::channel();
            if wishes.send((wish(), done)).await.is_ok() {
                let _ended = is_done.await;
            }
        }
    }
}

async fn hand(world: &World, site: MasterSite) -> Done<Hand> {
    if site.is_leased {
        let (driver, account) = (world.driver.clone(), site.account);
        return Ok(Hand::Leased { driver, account, open: BTreeMap::new() });
    }
    let settings =
        PublisherSettings { beacon_interval: timing::BEACON, ..PublisherSettings::default() };
    let urls = bus_urls(&world.masters_bus);
    Ok(Hand::External(Box::new(Master::start_with(urls, site.account, settings).await)))
}

/// Who trades.
enum Hand {
    External(Box<Master>),
    /// By hand at the broker; of each trade its first number, its number now and its volume.
    Leased {
        driver: PaperDriver,
        account: AccountId,
        open: BTreeMap<u64, (FollowerTicket, Decimal)>,
    },
}

impl Hand {
    /// Open trades by their first number, with their volume.
    fn open(&self) -> Vec<(u64, Decimal)> {
        match self {
            Hand::External(master) => {
                let positions = master.book.positions.values();
                positions.map(|p| (p.ticket.get(), p.lots.get())).collect()
            }
            Hand::Leased { open, .. } => open.iter().map(|(t, (_, lots))| (*t, *lots)).collect(),
        }
    }

    async fn opens(&mut self, count: usize, lots: Decimal) -> Done<Vec<u64>> {
        match self {
            Hand::External(master) => {
                let tickets = master.open_many(count, &lots.to_string());
                Ok(tickets.into_iter().map(MasterTicket::get).collect())
            }
            Hand::Leased { driver, account, open } => {
                let mut opened = Vec::new();
                for _ in 0..count {
                    let symbol = Symbol::new(EURUSD)?;
                    let order = Instruction::open_by_hand(symbol, Side::Buy, Lots::new(lots)?);
                    let ticket = does(driver, *account, order).await?.ticket;
                    open.insert(ticket.get(), (ticket, lots));
                    opened.push(ticket.get());
                }
                Ok(opened)
            }
        }
    }

    async fn closes(&mut self, tickets: &[u64]) -> Done {
        match self {
            Hand::External(master) => {
                let tickets: Vec<MasterTicket> =
                    tickets.iter().map(|t| MasterTicket::new(*t)).collect::<Result<_, _>>()?;
                master.close_many(&tickets);
            }
            Hand::Leased { driver, account, open } => {
                for first in tickets {
                    if let Some((ticket, _)) = open.remove(first) {
                        does(driver, *account, Instruction::Close { ticket, lots: None }).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Closes a part, so that `left` stays.
    async fn reduces(&mut self, first: u64, left: Decimal) -> Done {
        match self {
            Hand::External(master) => master.reduce(MasterTicket::new(first)?, &left.to_string()),
            Hand::Leased { driver, account, open } => {
                let Some((ticket, lots)) = open.get_mut(&first) else { return Ok(()) };
                let closed = Some(Lots::new(*lots - left)?);
                let order = Instruction::Close { ticket: *ticket, lots: closed };
                let done = does(driver, *account, order).await?;
                *ticket = done.remainder.unwrap_or(*ticket);
                *lots = left;
            }
        }
        Ok(())
    }

    async fn modifies(&mut self, first: u64, stop_loss: &str, take_profit: &str) -> Done {
        match self {
            Hand::External(master) => {
                master.modify(MasterTicket::new(first)?, stop_loss, take_profit);
            }
            Hand::Leased { driver, account, open } => {
                let Some((ticket, _)) = open.get(&first) else { return Ok(()) };
                let (stop_loss, take_profit) =
                    (Some(stop_loss.parse()?), Some(take_profit.parse()?));
                let order = Instruction::Modify { ticket: *ticket, stop_loss, take_profit };
                does(driver, *account, order).await?;
            }
        }
        Ok(())
    }
}

async fn does(
    driver: &PaperDriver,
    account: AccountId,
    order: Instruction,
) -> Done<schemas::OrderDone> {
    match driver.manual(account, order.clone()).await? {
        OrderReply::Done(done) => Ok(done),
        OrderReply::Rejected(rejection) => Err(format!("{order:?}: {rejection:?}").into()),
    }
}

struct Player {
    hand: Hand,
    rng: Rng,
    pace: watch::Receiver<Pace>,
    wished: mpsc::Receiver<Asked>,
    idle: watch::Sender<bool>,
    truth: Arc<Mutex<Truth>>,
}

impl Player {
    async fn run(mut self) -> Done {
        loop {
            let pace = *self.pace.borrow();
            let (shortest, longest) = pace.pause_ms();
            let pause = Duration::from_millis(self.rng.u64(shortest..=longest));
            self.idle.send_if_modified(|idle| {
                let changed = *idle != (pace == Pace::Quiet);
                *idle = pace == Pace::Quiet;
                changed
            });
            tokio::select! {
                wish = self.wished.recv() => {
                    let Some((wish, done)) = wish else { return Ok(()) };
                    self.grant(wish).await?;
                    let _asker_is_gone = done.send(());
                }
                changed = self.pace.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                }
                () = tokio::time::sleep(pause) => {
                    if pace != Pace::Quiet {
                        self.act().await?;
                    }
                }
            }
            self.tell();
        }
    }

    async fn grant(&mut self, wish: Wish) -> Done {
        match wish {
            Wish::OpenBurst => self.hand.opens(BURST, Decimal::new(10, 2)).await.map(drop),
            Wish::CloseBurst => {
                let open = self.hand.open();
                let tickets: Vec<u64> = open.iter().rev().take(BURST).map(|(t, _)| *t).collect();
                self.hand.closes(&tickets).await
            }
        }
    }

    async fn act(&mut self) -> Done {
        let open = self.hand.open();
        let one = (!open.is_empty()).then(|| open[self.rng.usize(0..open.len())]);
        let may_close = open.len() > OPEN_MIN;
        match (self.rng.u32(0..100), one) {
            (0..30, _) if open.len() < OPEN_MAX => {
                let lots = self.lots();
                self.hand.opens(1, lots).await?;
            }
            (30..38, _) if open.len() < OPEN_MAX => {
                let (count, lots) = (self.rng.usize(3..=8), self.lots());
                self.hand.opens(count, lots).await?;
            }
            (38..50, _) => {
                let lots = self.lots();
                let opened = self.hand.opens(1, lots).await?;
                tokio::time::sleep(Duration::from_millis(self.rng.u64(0..80))).await;
                self.hand.closes(&opened).await?;
            }
            (50..64, Some((ticket, lots))) => {
                // Halves, on the step of the volume.
                let left = (lots / Decimal::TWO).round_dp(2);
                if left >= Decimal::new(1, 2) && left < lots {
                    self.hand.reduces(ticket, left).await?;
                }
            }
            (64..78, Some((ticket, _))) => {
                // Ten points apart: a stop within a point of the wanted one is left as it is.
                let (below, above) = (self.rng.u32(0..100), self.rng.u32(0..100));
                let (below, above) = (format!("1.05{below:02}0"), format!("1.15{above:02}0"));
                self.hand.modifies(ticket, &below, &above).await?;
            }
            (95.., _) if may_close => {
                let count = (open.len() - OPEN_MIN).min(self.rng.usize(2..=8));
                let tickets: Vec<u64> = open.iter().take(count).map(|(t, _)| *t).collect();
                self.hand.closes(&tickets).await?;
            }
            (_, Some((ticket, _))) if may_close => self.hand.closes(&[ticket]).await?,
            (..) => {
                let lots = self.lots();
                self.hand.opens(1, lots).await?;
            }
        }
        Ok(())
    }

    fn lots(&mut self) -> Decimal {
        Decimal::new(self.rng.i64(2..=60) * 2, 2)
    }

    fn tell(&self) {
        if let Hand::External(master) = &self.hand {
            let mut truth = self.truth.lock();
            let told = truth.published.entry(master.account).or_default();
            told.extend(master.published[told.len()..].iter().cloned());
            truth.books.insert(master.account, master.book.clone());
        }
    }
}
