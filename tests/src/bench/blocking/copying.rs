//! Followers that copy a burst: the real state machine, the real gate, and a pool for the calls.
//!
//! Each follower is a task of a runtime with two workers, as on a node. What is left out beside a
//! node is what comes before and after: the bus, and the rows.

use super::pools::Pool;
use super::stamps::Stamps;
use bus::{DoubtReason, FeedMessage};
use futures_util::stream::{FuturesUnordered, StreamExt};
use lockstep::broker::executor::BlockingCall;
use lockstep::broker::{LeftAt, Outcome, SessionEvent};
use lockstep::clock::NodeClock;
use lockstep::follower::{
    AccountRead, Attempt, Effect, Follower, FollowerSettings, Input, Now, TicketKey,
};
use lockstep::gate::{Confirmation, Confirmed, Gate};
use lockstep::lease::{CycleNumber, LeaseTerm};
use reconcile::{AboveMax, BelowMin, FollowerHistory, Limits, LinkMode, LinkRules, Pairs, Sizing};
use schemas::{
    AccountId, AccountSnapshot, Book, BrokerPosition, Change, Epoch, FollowerTicket, LinkId, Magic,
    MasterPosition, MasterSnapshot, MasterTicket, Micros, OrderDone, OrderRequest, Quote, Seq,
    Side, Symbol, SymbolSpec, Token, TradeEvent,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// What must be left of a permit, as on a node.
const SEND_RESERVE: Duration = Duration::from_secs(2);
/// Orders that are handed over together, at most, as in a session.
const DECIDED_MAX: usize = 256;
/// Longest wait for an answer, as on a node.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Steps until a follower must be copying.
const STEPS_MAX: usize = 100;

pub(super) fn account(id: usize) -> AccountId {
    AccountId::new(id as u64).expect("counted from 1")
}

fn master() -> AccountId {
    account(1)
}

/// The account of a follower.
pub(super) fn follower_account(number: usize) -> AccountId {
    account(100 + number)
}

fn symbol() -> Symbol {
    Symbol::new("EURUSD").expect("a symbol")
}

/// Permission for all of them.
pub(super) fn permission(followers: usize, clock: &NodeClock) -> Gate {
    let (gate, now) = (Gate::new(), clock.now());
    let term = LeaseTerm::confirmed(now, Duration::from_secs(3_600), Duration::from_secs(15));
    let confirmed = Confirmed { token: Token::MIN, term: Some(term) };
    let accounts = (0..followers).map(|n| (follower_account(n), confirmed)).collect();
    gate.apply(&Confirmation { number: CycleNumber::NONE.next(), started: now, accounts }, now);
    gate
}

fn now(clock: &NodeClock) -> Now {
    Now { node: clock.now(), wall: clock.wall() }
}

/// An order that was decided and is not handed over yet.
struct Decided {
    key: TicketKey,
    attempt: Attempt,
    request: OrderRequest,
    /// It was decided when an earlier one was answered.
    waited: bool,
}

/// One follower, with its clock and its way to the broker.
pub(super) struct Seat {
    number: usize,
    follower: Follower,
    clock: NodeClock,
    gate: Gate,
    pool: Arc<dyn Pool>,
    stamps: Arc<Stamps>,
    decided: Vec<Decided>,
    answers: FuturesUnordered<AnswerFuture>,
    quote: Quote,
    last_ticket: u64,
    done: usize,
}

type AnswerFuture = std::pin::Pin<
    Box<dyn Future<Output = (TicketKey, Attempt, OrderRequest, Outcome, Option<LeftAt>)> + Send>,
>;

impl Seat {
    /// A follower of one link that has read its account and copies.
    pub(super) fn new(
        number: usize,
        cap: usize,
        clock: &NodeClock,
        gate: &Gate,
        pool: &Arc<dyn Pool>,
        stamps: &Arc<Stamps>,
    ) -> Self {
        let settings = FollowerSettings {
            parallel_orders: cap,
            limits: Limits::default(),
            row_wait_max: Duration::from_secs(60),
            audits: Vec::new(),
            routine: Duration::from_secs(60),
        };
        let follower =
            Follower::new(settings, vec![(rules(number), Pairs::default())], None, now(clock));
        let mut seat = Seat {
            number,
            follower,
            clock: clock.clone(),
            gate: gate.clone(),
            pool: Arc::clone(pool),
            stamps: Arc::clone(stamps),
            decided: Vec::new(),
            answers: FuturesUnordered::new(),
            quote: quote(clock.wall()),
            last_ticket: 0,
            done: 0,
        };
        seat.begin();
        seat
    }

    fn begin(&mut self) {
        let mut effects = self.step(Input::SessionOpened {
            snapshot: self.snapshot(),
            symbols: vec![spec()],
            renumbers: false,
        });
        let at = self.clock.wall();
        let snapshot = MasterSnapshot {
            account: master(),
            epoch: Epoch::MIN,
            seq: Seq::ZERO,
            at,
            book: Book::default(),
            funds: None,
        };
        let message = FeedMessage::Snapshot(Arc::new(snapshot), DoubtReason::Joining);
        effects.extend(self.step(Input::Feed { master: master(), message }));
        for _ in 0..STEPS_MAX {
            let mut next = Vec::new();
            for effect in effects.drain(..) {
                if let Effect::Read { id, since, .. } = effect {
                    let history = FollowerHistory { since, trades: Vec::new() };
                    let quotes = vec![quote(at)];
                    let read = AccountRead { snapshot: self.snapshot(), history, quotes };
                    next.extend(self.step(Input::Read { id, read: Some(read) }));
                }
            }
            if next.is_empty() && self.follower.is_copying() {
                return;
            }
            next.extend(self.step(Input::Tick));
            effects = next;
        }
        panic!("a follower of an empty account does not begin to copy");
    }

    fn snapshot(&self) -> AccountSnapshot {
        AccountSnapshot {
            account: follower_account(self.number),
            revision: 0,
            at: self.clock.wall(),
            positions: Vec::new(),
            pendings: Vec::new(),
            funds: None,
        }
    }

    fn step(&mut self, input: Input) -> Vec<Effect> {
        let now = now(&self.clock);
        self.follower.step(now, input)
    }

    /// Copies what its feed says, until all of it is answered; how many were done.
    pub(super) async fn run(
        mut self,
        mut feed: mpsc::UnboundedReceiver<FeedMessage>,
        events: usize,
    ) -> usize {
        let mut answered = 0;
        while answered < events {
            // As a session's loop: what was answered before what is new, and what comes together is
            // decided and handed over together.
            tokio::select! {
                biased;
                Some((key, attempt, request, outcome, left)) = self.answers.next() => {
                    answered += 1;
                    self.on_answer(key, attempt, &request, outcome, left);
                }
                Some(message) = feed.recv() => {
                    self.on_feed(message);
                    while self.decided.len() < DECIDED_MAX
                        && let Ok(message) = feed.try_recv()
                    {
                        self.on_feed(message);
                    }
                }
                else => break,
            }
            self.submit();
        }
        self.done
    }

    fn on_feed(&mut self, message: FeedMessage) {
        self.follower.set_quote(self.quote.clone());
        let effects = self.step(Input::Feed { master: master(), message });
        self.decide(effects, false);
    }

    fn on_answer(
        &mut self,
        key: TicketKey,
        attempt: Attempt,
        request: &OrderRequest,
        outcome: Outcome,
        left: Option<LeftAt>,
    ) {
        if let (
            Outcome::Done(done),
            OrderRequest::Open { symbol, side, lots, magic, comment, .. },
        ) = (&outcome, request)
        {
            self.done += 1;
            let position = BrokerPosition {
                ticket: done.ticket,
                symbol: symbol.clone(),
                side: *side,
                lots: *lots,
                open_price: "1.1".parse().expect("a price"),
                stop_loss: None,
                take_profit: None,
                opened_at: self.clock.wall(),
                magic: magic.as_i64(),
                comment: comment.clone(),
            };
            let effects = self.step(Input::Session(SessionEvent::Position(position)));
            self.decide(effects, true);
        }
        if let Some(LeftAt { node, wall }) = left {
            self.follower.left(key, attempt, Now { node, wall });
        }
        let effects = self.step(Input::Answer { key, attempt, outcome });
        self.decide(effects, true);
    }

    fn decide(&mut self, effects: Vec<Effect>, waited: bool) {
        let orders = effects.into_iter().filter_map(|effect| match effect {
            Effect::Send { key, attempt, request } => {
                Some(Decided { key, attempt, request, waited })
            }
            _ => None,
        });
        self.decided.extend(orders);
    }

    /// As a session does it: a permit for each order, all of them together, and what follows from
    /// that afterwards.
    fn submit(&mut self) {
        let decided = std::mem::take(&mut self.decided);
        let at = now(&self.clock);
        let mut calls = Vec::with_capacity(decided.len());
        for order in &decided {
            let permit = self.gate.permit(follower_account(self.number), at.node, SEND_RESERVE);
            calls.push((permit.expect("the lease of a benchmark holds"), self.call(order)));
        }
        let answers = self.pool.submit_all(self.number, calls);
        for (Decided { key, attempt, request, .. }, answer) in decided.into_iter().zip(answers) {
            let _rows = self.follower.submitted(key, attempt, at);
            self.answers.push(Box::pin(async move {
                let (outcome, left) = answer.within(CALL_LIMIT).await;
                (key, attempt, request, outcome, left)
            }));
        }
    }

    fn call(&mut self, order: &Decided) -> BlockingCall {
        self.last_ticket += 1;
        let ticket = FollowerTicket::new(self.last_ticket).expect("counted from 1");
        let event = usize::try_from(order.key.ticket.get()).expect("few") - 1;
        let (stamps, number, waited) = (Arc::clone(&self.stamps), self.number, order.waited);
        let holds = self.pool.has_threads();
        Box::new(move |_spent, _left| {
            stamps.begins(number, event, waited);
            if holds {
                stamps.hold(number, event);
            }
            Outcome::Done(OrderDone { ticket, lots: None, price: None, remainder: None })
        })
    }
}

/// The master opens its next trade: what every follower is told, decoded once.
pub(super) fn opening(event: usize, at: Micros) -> Arc<TradeEvent> {
    let ticket = MasterTicket::new(event as u64 + 1).expect("counted from 1");
    let lots = "1".parse().expect("a volume");
    Arc::new(TradeEvent {
        account: master(),
        epoch: Epoch::MIN,
        seq: Seq::new(event as u64 + 1).expect("small"),
        at,
        change: Change::PositionOpened(MasterPosition {
            ticket,
            symbol: symbol(),
            side: Side::Buy,
            lots,
            lots_at_open: lots,
            open_price: Some("1.1".parse().expect("a price")),
            stop_loss: None,
            take_profit: None,
            opened_at: at,
            contract_size: None,
            is_copy: false,
        }),
    })
}

/// The message that a feed makes of it.
pub(super) fn told(event: &Arc<TradeEvent>) -> FeedMessage {
    FeedMessage::Event { event: Arc::clone(event), doubtful: false, received: Instant::now() }
}

fn quote(at: Micros) -> Quote {
    let price = || "1.1".parse().expect("a price");
    Quote { symbol: symbol(), bid: price(), ask: price(), at }
}

fn spec() -> SymbolSpec {
    SymbolSpec {
        symbol: symbol(),
        digits: 5,
        lots_step: "0.01".parse().expect("a volume"),
        lots_min: "0.01".parse().expect("a volume"),
        lots_max: "50".parse().expect("a volume"),
        contract_size: None,
        stops_level_points: 0,
    }
}

fn rules(number: usize) -> LinkRules {
    LinkRules {
        link: LinkId::new(number as u64 + 1).expect("counted from 1"),
        master: master(),
        follower: follower_account(number),
        magic: Magic::new(7_000 + number as u64).expect("a magic"),
        copy_from: Micros(0),
        sync_existing: true,
        mode: LinkMode::Copy,
        paused: false,
        sizing: Sizing::Multiplier(rust_decimal::Decimal::ONE),
        below_min: BelowMin::Skip,
        above_max: AboveMax::Clamp,
        align_contract: false,
        slippage_points: 50,
        copy_stops: true,
        copy_pendings: true,
        reverse: false,
        symbol_map: BTreeMap::new(),
        symbol_suffix: String::new(),
    }
}
