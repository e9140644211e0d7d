//! A publisher, a wire that loses, repeats, delays and reorders, and one follower.
//!
//! Phase one checks after every step that the follower could rely on what it received; phase two
//! ends the faults and checks that it arrives at the publisher's state.

use super::*;
use crate::publisher::EpochReason;
use crate::publisher::testing::{Outgoing, PublisherCore};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Debug, Clone)]
enum Step {
    Open(u64),
    Close(u64),
    Resize(u64),
    Beacon,
    Deliver,
    DeliverOutOfOrder(usize),
    Lose(usize),
    Repeat(usize),
    Reconnect,
    Unreadable,
    NewEpoch,
    Answer,
    Reply,
    NoReply,
    Ask,
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1u64..40).prop_map(Step::Open),
        4 => (1u64..40).prop_map(Step::Close),
        2 => (1u64..40).prop_map(Step::Resize),
        2 => Just(Step::Beacon),
        14 => Just(Step::Deliver),
        2 => any::<usize>().prop_map(Step::DeliverOutOfOrder),
        1 => any::<usize>().prop_map(Step::Lose),
        1 => any::<usize>().prop_map(Step::Repeat),
        1 => Just(Step::Reconnect),
        1 => Just(Step::Unreadable),
        1 => Just(Step::NewEpoch),
        4 => Just(Step::Answer),
        4 => Just(Step::Reply),
        1 => Just(Step::NoReply),
        1 => Just(Step::Ask),
        3 => (0u64..3_000).prop_map(Step::Wait),
    ]
}

#[derive(Debug, Clone)]
enum Wire {
    Event(TradeEvent),
    Beacon(Beacon),
}

struct World {
    core: PublisherCore,
    /// The publisher's true state at every position it ever had.
    truth: BTreeMap<(Epoch, Seq), Book>,
    wire: Vec<Wire>,
    feed: FeedState,
    requested: bool,
    reply: Option<MasterSnapshot>,
    now: Duration,
    follower: FollowerModel,
}

#[derive(Default)]
struct FollowerModel {
    position: Option<(Epoch, Seq)>,
    book: Book,
    doubtful: bool,
}

const FOLLOWER: AccountId = AccountId::MAX;

impl World {
    fn new() -> Self {
        let mut core = PublisherCore::new(MASTER, epoch(1), 1_000);
        core.go_online(Micros(0), EpochReason::Disconnected);
        core.observe(Micros(0), book_of(&[1, 2, 3]), &BTreeMap::new(), Instant::now());
        let mut world = World {
            core,
            truth: BTreeMap::new(),
            wire: Vec::new(),
            feed: new_feed(),
            requested: false,
            reply: None,
            now: Duration::ZERO,
            follower: FollowerModel { doubtful: true, ..FollowerModel::default() },
        };
        world.remember();
        world
    }

    fn at(&self) -> Micros {
        Micros(self.now.as_micros() as i64)
    }

    /// Notes the publisher's state and puts what it says on the wire.
    fn remember(&mut self) {
        let state = self.core.state(self.at()).expect("observed at the start");
        self.truth.insert((state.epoch, state.seq), (*state.book).clone());
        for message in self.core.take(usize::MAX) {
            self.wire.push(match message {
                Outgoing::Event { event, .. } => Wire::Event(event),
                Outgoing::Beacon(state) => Wire::Beacon(Beacon {
                    account: MASTER,
                    epoch: state.epoch,
                    seq: state.seq,
                    at: state.at,
                    open_trades: state.book.positions.len() as u32,
                    open_pendings: 0,
                    digest: state.book.digest(),
                    funds: None,
                }),
            });
        }
    }

    fn publish(&mut self, change: Option<Change>) {
        if let Some(change) = change {
            let at = self.at();
            self.core.publish(at, vec![change], Instant::now()).unwrap();
            self.remember();
        }
    }

    fn held(&self, n: u64) -> Option<schemas::MasterPosition> {
        let state = self.core.state(self.at()).unwrap();
        state.book.positions.get(&crate::testing::ticket(n)).cloned()
    }

    fn deliver(&mut self, index: usize) -> Result<(), TestCaseError> {
        if self.wire.is_empty() {
            return Ok(());
        }
        let outputs = match self.wire.remove(index % self.wire.len()) {
            Wire::Event(event) => {
                self.feed.observe_event(Arc::new(event), Instant::now(), self.now)
            }
            Wire::Beacon(beacon) => self.feed.observe_beacon(&beacon, self.now),
        };
        self.receive(outputs)
    }

    /// The follower's side, and what it may rely on (S11, H31-H33, H39).
    fn receive(&mut self, outputs: Vec<FeedOutput>) -> Result<(), TestCaseError> {
        for output in outputs {
            let message = match output {
                FeedOutput::RequestSnapshot { .. } => {
                    prop_assert!(!self.requested, "two requests at a time");
                    self.requested = true;
                    continue;
                }
                FeedOutput::Send { message, .. } => message,
                _ => continue,
            };
            let follower = &mut self.follower;
            match message {
                FeedMessage::Event { event, doubtful: false, .. } => {
                    prop_assert!(!follower.doubtful, "an event in doubt");
                    let (epoch, seq) = follower.position.expect("a snapshot came first");
                    prop_assert_eq!((event.epoch, event.seq), (epoch, seq.next()));
                    follower.position = Some((event.epoch, event.seq));
                    follower.book.apply(&event.change);
                    prop_assert_eq!(&follower.book, &self.truth[&(event.epoch, event.seq)]);
                }
                FeedMessage::Event { event, doubtful: true, .. } => {
                    prop_assert!(follower.doubtful && event.change.is_ending());
                    let known = follower.book.positions.remove(&event.change.ticket());
                    prop_assert!(known.is_some(), "an ending of an unknown ticket");
                }
                FeedMessage::Snapshot(snapshot, reason) => {
                    let position = (snapshot.epoch, snapshot.seq);
                    prop_assert_ne!(reason, DoubtReason::Restarted);
                    prop_assert!(Some(position) >= follower.position, "a step back");
                    prop_assert_eq!(&snapshot.book, &self.truth[&position]);
                    follower.position = Some(position);
                    follower.book = snapshot.book.clone();
                    follower.doubtful = false;
                }
                FeedMessage::Doubt(_) => follower.doubtful = true,
                FeedMessage::Funds(_) => {}
            }
        }
        Ok(())
    }

    fn answer(&mut self) {
        if self.requested && self.reply.is_none() {
            self.reply = self.core.state(self.at()).map(|s| s.to_snapshot(MASTER));
        }
    }

    fn reply(&mut self, reply: Option<MasterSnapshot>) -> Result<(), TestCaseError> {
        if self.requested {
            self.requested = false;
            let outputs = self.feed.observe_reply(reply, self.now);
            self.receive(outputs)?;
        }
        Ok(())
    }

    fn run(&mut self, step: Step) -> Result<(), TestCaseError> {
        let (at, now) = (self.at(), self.now);
        match step {
            Step::Open(n) if self.held(n).is_none() => {
                self.publish(Some(Change::PositionOpened(position(n, "1"))));
            }
            Step::Open(_) => {}
            Step::Close(n) => {
                let close = |position| Change::PositionClosed {
                    position,
                    price: None,
                    reason: CloseReason::Unknown,
                };
                self.publish(self.held(n).map(close));
            }
            Step::Resize(n) => {
                let previous = self.held(n).map(|held| held.lots);
                let resize = |previous_lots| Change::VolumeChanged {
                    position: position(n, "0.5"),
                    previous_lots,
                };
                self.publish(previous.map(resize));
            }
            Step::Beacon => {
                self.core.push_beacon(at);
                self.remember();
            }
            Step::Deliver => self.deliver(0)?,
            Step::DeliverOutOfOrder(n) => self.deliver(n)?,
            Step::Lose(n) if !self.wire.is_empty() => {
                self.wire.remove(n % self.wire.len());
            }
            Step::Repeat(n) if !self.wire.is_empty() => {
                let again = self.wire[n % self.wire.len()].clone();
                self.wire.push(again);
            }
            Step::Lose(_) | Step::Repeat(_) => {}
            Step::Reconnect => {
                let outputs = self.feed.observe_reconnect(now);
                self.receive(outputs)?;
            }
            Step::Unreadable => {
                let outputs = self.feed.observe_undecodable(now);
                self.receive(outputs)?;
            }
            Step::NewEpoch => {
                self.core.go_offline();
                self.core.go_online(at, EpochReason::Disconnected);
                self.remember();
            }
            Step::Answer => self.answer(),
            Step::Reply => {
                if let Some(reply) = self.reply.take() {
                    self.reply(Some(reply))?;
                }
            }
            Step::NoReply => {
                self.reply = None;
                self.reply(None)?;
            }
            Step::Ask => {
                let outputs = self.feed.observe_request(FOLLOWER, now);
                self.receive(outputs)?;
            }
            Step::Wait(millis) => {
                self.now += ms(millis);
                let outputs = self.feed.tick(self.now);
                self.receive(outputs)?;
            }
        }
        Ok(())
    }

    /// No more faults: beacons come, requests are answered. 12 s must be enough (L3).
    fn heal(&mut self) -> Result<(), TestCaseError> {
        for tick in 0..120 {
            if tick % 20 == 0 {
                self.core.push_beacon(self.at());
                self.remember();
            }
            while !self.wire.is_empty() {
                self.deliver(0)?;
            }
            self.answer();
            if let Some(reply) = self.reply.take() {
                self.reply(Some(reply))?;
            }
            self.run(Step::Wait(100))?;
        }
        let state = self.core.state(self.at()).unwrap();
        prop_assert_eq!(self.feed.doubt(), None);
        prop_assert_eq!(self.follower.position, Some((state.epoch, state.seq)));
        prop_assert_eq!(&self.follower.book, &*state.book);
        prop_assert_eq!(self.feed.book(), &*state.book);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_follower_can_rely_on_every_message_and_ends_at_the_masters_state(
        steps in proptest::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new();
        let outputs = world.feed.tick(world.now);
        world.receive(outputs)?;
        for step in steps {
            world.run(step)?;
        }
        world.heal()?;
    }
}
