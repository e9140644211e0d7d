//! A master at the paper broker that is traded by hand, whose bursts a relay lets go in one write.

use super::relay::Relay;
use crate::world::{EURUSD, SOON, World, until};
use futures_util::future::join_all;
use paper::protocol::{Instruction, OrderReply, Style};
use schemas::{AccountId, FollowerTicket, Side, Symbol};
use std::collections::VecDeque;

/// The master's account, its relay, and what is open, oldest first.
#[derive(Debug)]
pub(super) struct Hand {
    /// The account.
    pub(super) master: AccountId,
    relay: Relay,
    open: VecDeque<FollowerTicket>,
}

impl Hand {
    /// Adds the account, which nodes reach by way of the relay.
    pub(super) async fn start(world: &World) -> Hand {
        let relay = Relay::start(world.paper_addr).await.unwrap();
        let master = world.add_paper_account_at("master", Style::Mt5, relay.addr()).await;
        Hand { master, relay, open: VecDeque::new() }
    }

    async fn trade(&self, world: &World, instruction: Instruction) -> FollowerTicket {
        match world.driver.manual(self.master, instruction).await.unwrap() {
            OrderReply::Done(done) => done.ticket,
            OrderReply::Rejected(rejection) => panic!("by hand: {rejection:?}"),
        }
    }

    /// Opens a trade.
    pub(super) async fn open(&mut self, world: &World) {
        let ticket = self.trade(world, opening()).await;
        self.open.push_back(ticket);
    }

    /// Closes the oldest one.
    pub(super) async fn close(&mut self, world: &World) {
        let ticket = self.open.pop_front().unwrap();
        self.trade(world, Instruction::Close { ticket, lots: None }).await;
    }

    /// Opens so many trades, or closes so many, of which the node hears when the burst is released.
    pub(super) async fn hold_burst(&mut self, world: &World, events: usize, opens: bool) {
        let instructions: Vec<Instruction> = (0..events)
            .map(|_| match opens {
                true => opening(),
                false => {
                    let ticket = self.open.pop_back().unwrap();
                    Instruction::Close { ticket, lots: None }
                }
            })
            .collect();
        self.relay.hold();
        let tickets = join_all(instructions.into_iter().map(|i| self.trade(world, i))).await;
        until("the burst at the relay", SOON, async || (self.relay.held() >= events).then_some(()))
            .await;
        if opens {
            self.open.extend(tickets);
        }
    }

    /// Hands over what was held back, in one write.
    pub(super) fn release(&self) {
        self.relay.release();
    }
}

fn opening() -> Instruction {
    let symbol = Symbol::new(EURUSD).unwrap();
    Instruction::open_by_hand(symbol, Side::Buy, "0.10".parse().unwrap())
}
