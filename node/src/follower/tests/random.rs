//! Chance: faults and time come as a seed wants them.
//!
//! While faults last, every order is judged as it is sent (`World::judge`), and every row as it
//! is written. Then the faults stop and time passes: the follower must hold exactly the copies
//! that its master's trades and its own final words ask for, with nothing unresolved and no plan
//! that does not come to rest. A failure names its seed.

use super::world::{
    LINK, MASTER, MasterSim, OTHER_LINK, OTHER_MASTER, Setup, World, lots, price, rules, seconds,
};
use crate::follower::TicketKey;
use paper::protocol::{Instruction, Style};
use reconcile::{PairState, Pairs};
use schemas::{Change, CloseReason, MasterPosition, RejectClass, TradeEvent};
use std::collections::BTreeSet;
use std::time::Duration;

const SEEDS: u64 = 300;
const STEPS: usize = 150;

#[test]
fn whatever_happens_no_law_is_broken_and_the_follower_comes_to_agree() {
    let mut copies = 0;
    for seed in 0..SEEDS {
        let world = std::panic::catch_unwind(|| Chance::new(seed).run());
        match world {
            Ok(open) => copies += open,
            Err(panic) => {
                eprintln!("seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(copies > SEEDS as usize, "only {copies} copies in the end: chance shows nothing");
}

struct Chance {
    random: fastrand::Rng,
    world: World,
    next_ticket: u64,
    /// Events that a gap took away from the follower, so that its feed is in doubt.
    doubt: bool,
}

impl Chance {
    fn new(seed: u64) -> Chance {
        let mut random = fastrand::Rng::with_seed(seed);
        let style = if random.bool() { Style::Mt4 } else { Style::Mt5 };
        let settle = random.bool().then(|| seconds(10));
        let mut links = vec![(rules(LINK, MASTER), Pairs::default())];
        if random.bool() {
            links.push((rules(OTHER_LINK, OTHER_MASTER), Pairs::default()));
        }
        let parallel = random.usize(1..5);
        let world = World::new(Setup { style, links, settle, parallel, ..Setup::default() });
        Chance { random, world, next_ticket: 1, doubt: false }
    }

    fn run(mut self) -> usize {
        self.world.open_session();
        self.world.snapshots();
        for _ in 0..STEPS {
            self.anything();
        }
        self.settle_down();
        self.judge_the_end()
    }

    fn anything(&mut self) {
        match self.random.u8(0..100) {
            0..30 => self.time(),
            30..50 => self.master_trades(),
            50..70 => self.order_moves(),
            70..80 => self.world.answer_reads(),
            80..84 => self.burst(),
            84..88 => self.by_hand(),
            _ => self.fault(),
        }
    }

    fn time(&mut self) {
        let milliseconds = if self.random.u8(0..10) == 0 { 3_000 } else { 300 };
        self.world.pass(Duration::from_millis(self.random.u64(10..milliseconds)));
        self.world.quote("1.10000", "1.10002");
        if !self.world.asked.is_empty() && self.random.bool() {
            self.world.asked.clear();
            self.world.snapshots();
            self.doubt = false;
        }
    }

    fn burst(&mut self) {
        for _ in 0..self.random.usize(2..8) {
            self.master_trades();
        }
    }

    fn master_trades(&mut self) {
        let masters: Vec<u64> = self.world.masters.keys().copied().collect();
        let master = masters[self.random.usize(..masters.len())];
        let Some(change) = self.change_of(master) else { return };
        let event = self.world.unheard(master, change);
        self.deliver(&event, master);
    }

    fn deliver(&mut self, event: &TradeEvent, master: u64) {
        let is_doubtful = self.doubt && master == MASTER;
        if is_doubtful {
            // In doubt a feed hands on the endings of what was known, and nothing else.
            let known =
                self.world.masters[&master].told.positions.contains_key(&event.change.ticket());
            if known && matches!(event.change, Change::PositionClosed { .. }) {
                self.world.deliver(event, true);
            }
            return;
        }
        for _ in 0..self.random.usize(1..3) {
            self.world.deliver(event, false);
        }
    }

    fn change_of(&mut self, master: u64) -> Option<Change> {
        let sim = &self.world.masters[&master];
        let kind = self.random.u8(0..10);
        if kind < 4 || sim.book == schemas::Book::default() {
            return Some(self.beginning());
        }
        if kind == 4 {
            return self.pending_change(master);
        }
        let position = self.any_position(master)?;
        Some(match kind {
            5 => {
                let stop = ["1.09", "1.08", "1.07"][self.random.usize(..3)];
                Change::PositionModified(MasterPosition {
                    stop_loss: Some(price(stop)),
                    ..position
                })
            }
            6 => {
                let previous_lots = position.lots;
                let half = (position.lots.get() / rust_decimal::Decimal::TWO).round_dp(2);
                let Ok(half) = schemas::Lots::new(half) else { return None };
                Change::VolumeChanged {
                    position: MasterPosition { lots: half, ..position },
                    previous_lots,
                }
            }
            _ => Change::PositionClosed { position, price: None, reason: CloseReason::Client },
        })
    }

    fn beginning(&mut self) -> Change {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        if self.random.u8(0..5) == 0 {
            return Change::PendingPlaced(self.world.pending(ticket));
        }
        Change::PositionOpened(self.world.position(ticket))
    }

    fn any_position(&mut self, master: u64) -> Option<MasterPosition> {
        let book = &self.world.masters[&master].book;
        let place = self.random.usize(..book.positions.len().max(1));
        book.positions.values().nth(place).cloned()
    }

    fn pending_change(&mut self, master: u64) -> Option<Change> {
        let mut pending = self.world.masters[&master].book.pendings.values().next()?.clone();
        Some(match self.random.u8(0..3) {
            0 => {
                pending.price = price("1.085");
                Change::PendingModified(pending)
            }
            1 => Change::PendingCancelled(pending),
            _ => {
                let position = self.world.position(pending.ticket.get());
                Change::PendingFilled(position)
            }
        })
    }

    fn order_moves(&mut self) {
        if self.world.flying.is_empty() {
            return;
        }
        let place = self.random.usize(..self.world.flying.len());
        if self.world.flying[place].reply.is_none() {
            self.world.arrive(place);
        } else {
            self.world.answer(place);
        }
    }

    fn by_hand(&mut self) {
        // Whoever renumbers a copy that no answer has named yet makes it anybody's: an MT4 rest
        // keeps no tag. Such a pair waits for a person, and is not what is judged here.
        let mut positions = self.world.positions();
        positions.retain(|copy| {
            self.world.rows.values().any(|row| row.follower_ticket == Some(copy.ticket))
        });
        if positions.is_empty() {
            return;
        }
        let position = &positions[self.random.usize(..positions.len())];
        let ticket = position.ticket;
        let rows = self.world.rows.values();
        let touched = rows.filter(|row| row.follower_ticket == Some(ticket));
        let touched = touched.map(|row| TicketKey { link: row.link, ticket: row.master_ticket });
        self.world.meddled.extend(touched);
        let instruction = match self.random.u8(0..3) {
            0 => Instruction::Close { ticket, lots: None },
            1 => Instruction::Modify { ticket, stop_loss: None, take_profit: Some(price("1.2")) },
            _ => Instruction::Close { ticket, lots: Some(lots("0.01")) },
        };
        self.world.by_hand(instruction);
    }

    fn fault(&mut self) {
        match self.random.u8(0..11) {
            0 | 7 | 8 if !self.world.flying.is_empty() => {
                let place = self.random.usize(..self.world.flying.len());
                self.world.time_out(place);
            }
            1 | 9 | 10 => self.ghost_comes(),
            2 => self.refuse(),
            3 if self.world.session => self.world.lose_session(),
            3 | 4 => {
                if !self.world.session {
                    self.world.open_session();
                }
            }
            5 => {
                self.world.permits = !self.world.permits;
                if self.world.permits {
                    self.world.step(crate::follower::Input::LeaseRestored);
                }
            }
            _ => self.doubt_or_snapshot(),
        }
    }

    /// An order of unknown outcome arrives late, inside the longest answer, or never.
    fn ghost_comes(&mut self) {
        self.forget_old_ghosts();
        if !self.world.ghosts.is_empty() {
            self.world.ghost_arrives(0);
        }
    }

    fn forget_old_ghosts(&mut self) {
        let now = self.world.now().wall;
        self.world.ghosts.retain(|ghost| now.since(ghost.sent_at) < seconds(10));
    }

    fn refuse(&mut self) {
        let classes = [
            RejectClass::Requote,
            RejectClass::Later,
            RejectClass::Invalid,
            RejectClass::NoMoney,
            RejectClass::AlreadySo,
        ];
        let class = classes[self.random.usize(..classes.len())];
        let actions = ["open", "close", "modify", "partial_close", "place", "cancel"];
        let action = actions[self.random.usize(..actions.len())];
        self.world.refusals.push((action, class));
    }

    fn doubt_or_snapshot(&mut self) {
        if self.doubt {
            self.world.snapshots();
        } else {
            self.world.doubt();
        }
        self.doubt = !self.doubt;
    }

    /// The faults stop, and time passes.
    fn settle_down(&mut self) {
        self.world.refusals.clear();
        self.world.ghosts.clear();
        if !self.world.permits {
            self.world.permits = true;
            self.world.step(crate::follower::Input::LeaseRestored);
        }
        if !self.world.session {
            self.world.open_session();
        }
        self.world.snapshots();
        self.world.calm(seconds(150));
    }

    fn judge_the_end(&self) -> usize {
        let world = &self.world;
        assert_eq!(world.restless, 0, "plans that do not come to rest");
        assert_eq!(world.follower.unanswered(), 0, "orders without an end");
        assert!(world.follower.is_copying());
        let mut copies = 0;
        for (master, id) in [(MASTER, LINK), (OTHER_MASTER, OTHER_LINK)] {
            if let Some(sim) = world.masters.get(&master) {
                copies += judge_link(world, sim, id, &world.meddled);
            }
        }
        assert_eq!(world.positions().len() + world.pendings().len(), copies, "copies of nothing");
        copies
    }
}

/// Every trade of the master has its copy, or a final word; gives back the number of copies.
fn judge_link(world: &World, sim: &MasterSim, id: u64, by_hand: &BTreeSet<TicketKey>) -> usize {
    let mut copies = 0;
    let of_link = |row: &&reconcile::Pair| row.link.get() == id;
    for position in sim.book.positions.values() {
        let rows = world.rows.values().filter(of_link);
        let mut rows = rows.filter(|row| row.master_ticket == position.ticket);
        let Some(row) = rows.clone().find(|row| row.state.is_live()).or_else(|| rows.next()) else {
            panic!("no word about trade {}", position.ticket);
        };
        let key = TicketKey { link: row.link, ticket: row.master_ticket };
        if row.state.is_terminal() {
            let is_ended = row.state == PairState::Closed;
            assert!(!is_ended || by_hand.contains(&key), "nobody ended this copy: {row:?}");
            continue;
        }
        assert_eq!(row.state, PairState::Open, "{row:?}");
        let ticket = row.follower_ticket.expect("an open pair names its copy");
        let open = world.positions().into_iter().find(|copy| copy.ticket == ticket);
        let waits = world.pendings().iter().any(|copy| copy.ticket == ticket);
        assert!(open.is_some() || waits, "the copy of {row:?} is not there");
        if let Some(copy) = open {
            let opened = row.lots_at_open.expect("an open pair has a volume");
            let spec = super::world::spec();
            let target =
                reconcile::target_lots(opened, row.master_lots_at_open, position.lots, &spec);
            // By hand a copy may have less; and less than a step cannot be closed.
            let is_right = copy.lots == target || (by_hand.contains(&key) && copy.lots < target);
            assert!(is_right || row.rejected.target.is_some(), "{copy:?} {row:?} {target}");
            if row.rejected == reconcile::Rejected::default() {
                assert_eq!(copy.stop_loss, position.stop_loss, "{row:?}");
            }
        }
        copies += 1;
    }
    for pending in sim.book.pendings.values() {
        let rows = world.rows.values().filter(of_link);
        let live = rows.filter(|r| r.master_ticket == pending.ticket && r.state == PairState::Open);
        copies += live.count();
    }
    for row in world.rows.values().filter(of_link).filter(|row| row.state.is_live()) {
        let is_there = sim.book.positions.contains_key(&row.master_ticket)
            || sim.book.pendings.contains_key(&row.master_ticket);
        assert!(is_there, "live without a master: {row:?}");
    }
    copies
}
