//! A follower between a model broker and its masters, moved by hand.
//!
//! The broker is the paper broker's engine, so tickets, comments and histories are a broker's.
//! Orders wait in `flying` until a case lets them arrive, answers them or loses them. Every
//! order is judged as it is sent: see [`World::judge`].

use crate::broker::{NotSent, Outcome, SessionEvent, paper::event_of};
use crate::clock::{ManualClock, NodeClock, NodeTime};
use crate::follower::{
    AccountRead, Asker, Attempt, CloseAnswer, Effect, Follower, FollowerSettings, Input, Now,
    Reason, Record, TicketKey,
};
use bus::{DoubtReason, FeedMessage, RequestReason};
use paper::engine::{Effects, Engine, Terms};
use paper::faults::{Settings, Verdict};
use paper::protocol::{
    AccountDecl, FeedQuote, Instruction, OpenComment, OrderMeta, OrderReply, Push, Style,
};
use reconcile::{
    AboveMax, BelowMin, FollowerHistory, Limits, LinkMode, LinkRules, Pair, PairId, PairState,
    Pairs, Sizing, tag,
};
use schemas::{
    AccountId, AccountSnapshot, Book, BrokerPending, BrokerPosition, Change, CloseReason, Epoch,
    FollowerTicket, LinkId, Lots, Magic, MasterPending, MasterPosition, MasterSnapshot,
    MasterTicket, Micros, NodeId, OrderRequest, PendingKind, Price, RejectClass, Rejection, Seq,
    Side, Symbol, SymbolSpec, Token, TradeEvent,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// When every world begins.
const BEGIN: i64 = 1_700_000_000_000_000;
pub(super) const TICK: Duration = Duration::from_millis(100);
/// Fence and settle time.
pub(super) const DELIVERY_MAX: Duration = Duration::from_secs(25);
pub(super) const LINK: u64 = 7;
pub(super) const MASTER: u64 = 1;
pub(super) const OTHER_LINK: u64 = 8;
pub(super) const OTHER_MASTER: u64 = 2;
const FOLLOWER: u64 = 100;
/// So long at most a partial close waits for the row of its copy.
pub(super) const ROW_WAIT_MAX: Duration = Duration::from_secs(60);

pub(super) fn account(id: u64) -> AccountId {
    AccountId::new(id).unwrap()
}

pub(super) fn mt(ticket: u64) -> MasterTicket {
    MasterTicket::new(ticket).unwrap()
}

pub(super) fn lots(text: &str) -> Lots {
    text.parse().unwrap()
}

pub(super) fn price(text: &str) -> Price {
    text.parse().unwrap()
}

pub(super) fn link(id: u64) -> LinkId {
    LinkId::new(id).unwrap()
}

pub(super) fn key(ticket: u64) -> TicketKey {
    TicketKey { link: link(LINK), ticket: mt(ticket) }
}

pub(super) fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn settings(parallel_orders: usize) -> FollowerSettings {
    FollowerSettings {
        parallel_orders,
        limits: Limits { delivery_max: DELIVERY_MAX, ..Limits::default() },
        row_wait_max: ROW_WAIT_MAX,
        audits: vec![seconds(15), seconds(40)],
        routine: seconds(60),
    }
}

fn symbol() -> Symbol {
    Symbol::new("EURUSD").unwrap()
}

pub(super) fn rules(id: u64, master: u64) -> LinkRules {
    LinkRules {
        link: link(id),
        master: account(master),
        follower: account(FOLLOWER),
        magic: Magic::new(7_000 + id).unwrap(),
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

/// One order that left.
#[derive(Debug, Clone)]
pub(super) struct Flying {
    pub(super) key: TicketKey,
    pub(super) attempt: Attempt,
    pub(super) request: OrderRequest,
    pub(super) sent_at: Micros,
    /// What the broker answered; nothing before the order arrived there.
    pub(super) reply: Option<OrderReply>,
}

/// A master as it really is.
#[derive(Debug)]
pub(super) struct MasterSim {
    pub(super) epoch: u64,
    pub(super) seq: u64,
    pub(super) book: Book,
    /// What the follower was told, by events and snapshots.
    pub(super) told: Book,
}

/// How a world begins.
pub(super) struct Setup {
    pub(super) style: Style,
    pub(super) links: Vec<(LinkRules, Pairs)>,
    pub(super) settle: Option<Duration>,
    pub(super) parallel: usize,
    /// What the broker makes of an order's comment.
    pub(super) comments: OpenComment,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            style: Style::Mt5,
            links: vec![(rules(LINK, MASTER), Pairs::default())],
            settle: None,
            parallel: 16,
            comments: OpenComment::Keep,
        }
    }
}

pub(super) struct World {
    pub(super) follower: Follower,
    pub(super) broker: Engine,
    pub(super) masters: BTreeMap<u64, MasterSim>,
    /// Orders that left and are not answered.
    pub(super) flying: Vec<Flying>,
    /// Orders of lost sessions: they may still arrive.
    pub(super) ghosts: Vec<Flying>,
    /// Reads that were asked for.
    pub(super) reads: Vec<(u64, Micros, Instant)>,
    /// Every read's instant.
    pub(super) read_times: Vec<Duration>,
    /// What masters were asked for.
    pub(super) asked: Vec<RequestReason>,
    /// Rows as the writer would have them.
    pub(super) rows: BTreeMap<PairId, Pair>,
    pub(super) records: Vec<Record>,
    pub(super) plans: Vec<(Reason, Vec<&'static str>, bool, usize)>,
    pub(super) restless: usize,
    /// What those were told who wanted a copy closed.
    pub(super) close_answers: Vec<(Asker, CloseAnswer)>,
    /// Links whose broker was found to keep no tags.
    pub(super) untaggable: Vec<LinkId>,
    pub(super) permits: bool,
    pub(super) session: bool,
    /// The broker gives the rest of a partial close a new number.
    renumbers: bool,
    /// Rows wait for the database.
    pub(super) database_away: bool,
    /// The broker's next answers to orders of these actions, instead of what it would do.
    pub(super) refusals: Vec<(&'static str, RejectClass)>,
    /// The next orders of these actions are filled to so many percent only.
    pub(super) fills: Vec<(&'static str, u32)>,
    /// How many opening orders were carried out for a ticket.
    pub(super) opened: BTreeMap<TicketKey, usize>,
    /// Tickets whose copies somebody changed by hand.
    pub(super) meddled: BTreeSet<TicketKey>,
    /// Every request that left, in order.
    pub(super) sent: Vec<(TicketKey, OrderRequest)>,
    passed: Duration,
    /// By so much the node's wall clock was set forward.
    pub(super) set_forward: Duration,
}

impl World {
    pub(super) fn new(setup: Setup) -> World {
        let mut broker = Engine::default();
        let decl = AccountDecl::new(account(FOLLOWER), setup.style);
        let decl = AccountDecl { comment_open: setup.comments, ..decl };
        broker.declare_accounts(vec![decl]).unwrap();
        broker.declare_symbols(vec![spec()]).unwrap();
        let masters = setup.links.iter().map(|(rules, _)| {
            let sim = MasterSim { epoch: 1, seq: 0, book: Book::default(), told: Book::default() };
            (rules.master.get(), sim)
        });
        let masters = masters.collect();
        let now = Now { node: NodeTime::START, wall: Micros(BEGIN) };
        let settle = setup.settle.map(|wait| now.node.plus(wait));
        let follower = Follower::new(settings(setup.parallel), setup.links, settle, now);
        let mut world = World {
            follower,
            broker,
            masters,
            flying: Vec::new(),
            ghosts: Vec::new(),
            reads: Vec::new(),
            read_times: Vec::new(),
            asked: Vec::new(),
            rows: BTreeMap::new(),
            records: Vec::new(),
            plans: Vec::new(),
            restless: 0,
            close_answers: Vec::new(),
            untaggable: Vec::new(),
            permits: true,
            session: false,
            renumbers: setup.style.renumbers(),
            database_away: false,
            refusals: Vec::new(),
            fills: Vec::new(),
            opened: BTreeMap::new(),
            meddled: BTreeSet::new(),
            sent: Vec::new(),
            passed: Duration::ZERO,
            set_forward: Duration::ZERO,
        };
        world.quote("1.10000", "1.10002");
        world
    }

    /// The owner is lost with everything it knew; the next one begins with these links and rows.
    /// What the lost one had sent and was not carried out may arrive late.
    pub(super) fn next_owner(&mut self, links: Vec<(LinkRules, Pairs)>) {
        self.session = false;
        self.reads.clear();
        let flying = std::mem::take(&mut self.flying);
        self.ghosts.extend(flying.into_iter().filter(|order| order.reply.is_none()));
        self.rows = links
            .iter()
            .flat_map(|(_, pairs)| pairs.rows().map(|pair| (pair.id, pair.clone())))
            .collect();
        let now = self.now();
        let settle = Some(now.node.plus(seconds(10)));
        self.follower = Follower::new(settings(16), links, settle, now);
        self.quote("1.10000", "1.10002");
        self.open_session();
        self.snapshots();
    }

    /// A follower that copies: session open, snapshots heard, first reconcile done.
    pub(super) fn copying() -> World {
        Self::copying_with(Setup::default())
    }

    pub(super) fn copying_with(setup: Setup) -> World {
        let mut world = World::new(setup);
        world.open_session();
        world.snapshots();
        world.answer_reads();
        world.calm(seconds(1));
        world
    }

    pub(super) fn now(&self) -> Now {
        let clocks = ManualClock::default();
        let node = NodeClock::new(clocks.clone());
        clocks.advance(self.passed);
        clocks.hold_guest(self.set_forward);
        let wall = Micros(BEGIN).plus(self.passed + self.set_forward);
        Now { node: node.now(), wall }
    }

    /// The broker's and the master's clocks are set by nobody.
    fn broker_now(&self) -> paper::clock::Now {
        let mono_us = u64::try_from(self.passed.as_micros()).unwrap();
        paper::clock::Now { mono_us, wall: Micros(BEGIN).plus(self.passed) }
    }

    // Time and inputs.

    pub(super) fn step(&mut self, input: Input) {
        let effects = self.follower.step(self.now(), input);
        self.execute(effects);
        self.store_rows();
    }

    /// The database takes every row at once, unless it is away.
    fn store_rows(&mut self) {
        if self.database_away {
            return;
        }
        let unstored: Vec<TicketKey> = self.follower.unstored().map(|(key, _)| key).collect();
        for key in unstored {
            self.step(Input::Stored(key));
        }
    }

    /// The database takes what has waited for it.
    pub(super) fn database_returns(&mut self) {
        self.database_away = false;
        self.store_rows();
    }

    /// Time passes in ticks; nothing else happens.
    pub(super) fn pass(&mut self, by: Duration) {
        let until = self.passed + by;
        while self.passed < until {
            self.passed += TICK.min(until - self.passed);
            self.step(Input::Tick);
        }
    }

    /// Time passes, and everything that is asked for is answered at once.
    pub(super) fn calm(&mut self, by: Duration) {
        let until = self.passed + by;
        while self.passed < until {
            self.passed += TICK;
            self.quote("1.10000", "1.10002");
            self.step(Input::Tick);
            self.answer_everything();
        }
    }

    pub(super) fn answer_everything(&mut self) {
        for _ in 0..10_000 {
            if !self.flying.is_empty() {
                self.carry_out();
            } else if !self.reads.is_empty() {
                self.answer_reads();
            } else if !self.asked.is_empty() {
                self.asked.clear();
                self.snapshots();
            } else {
                return;
            }
        }
        panic!("orders or reads without end");
    }

    fn execute(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { key, attempt, request } => self.send(key, attempt, request),
                Effect::Read { id, since, .. } => {
                    self.reads.push((id, since, Instant::now()));
                    self.read_times.push(self.passed);
                }
                Effect::AskMaster { reason, .. } => self.asked.push(reason),
                Effect::Persist(pair) => self.persist(*pair),
                Effect::Record(record) => self.records.push(*record),
                Effect::Planned { reason, steps, held, duplicates, .. } => {
                    self.plans.push((reason, steps, held, duplicates));
                }
                Effect::Restless(_) => self.restless += 1,
                Effect::CloseAnswered { asker, answer } => self.close_answers.push((asker, answer)),
                Effect::Untaggable(link) => self.untaggable.push(link),
            }
        }
    }

    /// What the writer does: an ended row stays, a live one needs a newer version.
    fn persist(&mut self, pair: Pair) {
        if let Some(row) = self.rows.get(&pair.id) {
            assert!(
                row.state.is_live() || row.state == pair.state,
                "an ended row is written again: {row:?} -> {pair:?}"
            );
            assert!(
                pair.state.is_terminal() || pair.version > row.version,
                "the writer would not take this row: {row:?} -> {pair:?}"
            );
        }
        let rows = self.rows.values().chain([&pair]);
        let same = |p: &&Pair| (p.link, p.master_ticket) == (pair.link, pair.master_ticket);
        let live: BTreeSet<PairId> =
            rows.filter(same).filter(|p| p.state.is_live()).map(|p| p.id).collect();
        assert!(live.len() <= 1, "two live rows for {pair:?}");
        self.rows.insert(pair.id, pair);
    }

    fn send(&mut self, key: TicketKey, attempt: Attempt, request: OrderRequest) {
        let refusal = match (self.session, self.permits) {
            (false, _) => Some(NotSent::Session),
            (true, false) => Some(NotSent::Gate),
            (true, true) => None,
        };
        if let Some(why) = refusal {
            return self.step(Input::Answer { key, attempt, outcome: Outcome::NotSent(why) });
        }
        self.judge(key, &request);
        self.sent.push((key, request.clone()));
        let sent_at = self.broker_now().wall;
        self.flying.push(Flying { key, attempt, request, sent_at, reply: None });
        let effects = self.follower.submitted(key, attempt, self.now());
        self.execute(effects);
    }

    /// The laws of every order: one at a time for a ticket; an open only for what the follower
    /// was told is open, and never again after one that was, or may yet be, carried out.
    fn judge(&self, key: TicketKey, request: &OrderRequest) {
        assert!(
            self.flying.iter().all(|order| order.key != key),
            "two orders at once for {key:?}: {request:?}"
        );
        if let OrderRequest::Close { lots: Some(lots), .. } = request {
            self.judge_partial_close(key, *lots);
        }
        if !opens(request) {
            return;
        }
        assert_eq!(self.opened.get(&key), None, "opened twice: {request:?}");
        assert!(
            self.ghosts.iter().all(|ghost| ghost.key != key || !is_opening(ghost)),
            "opened while an open may still arrive: {request:?}"
        );
        let master = if key.link == link(LINK) { MASTER } else { OTHER_MASTER };
        let told = &self.masters[&master].told;
        let known = match request {
            OrderRequest::Place { .. } => told.pendings.contains_key(&key.ticket),
            _ => told.positions.contains_key(&key.ticket),
        };
        assert!(known, "opened without a cause: {key:?} {request:?}");
        let ended = self.rows.values().any(|row| {
            (row.link, row.master_ticket) == (key.link, key.ticket) && row.state.is_terminal()
        });
        assert!(!ended, "opened after a final word: {key:?}");
    }

    /// A partial close of unknown outcome that still arrives must not end below the target, with
    /// this one beside it (H49).
    fn judge_partial_close(&self, key: TicketKey, lots: Lots) {
        if self.meddled.contains(&key) {
            return;
        }
        let now = self.broker_now().wall;
        let may_arrive = self.ghosts.iter().filter(|ghost| {
            let is_young = now.since(ghost.sent_at) < DELIVERY_MAX;
            ghost.key == key && is_young
        });
        let closing: rust_decimal::Decimal = may_arrive
            .filter_map(|ghost| match &ghost.request {
                OrderRequest::Close { lots, .. } => lots.map(Lots::get),
                _ => None,
            })
            .sum();
        let pair = self.rows.values().find(|row| {
            (row.link, row.master_ticket) == (key.link, key.ticket) && row.state.is_live()
        });
        let pair = pair.expect("a copy that is reduced has a pair");
        let copy = self.positions().into_iter().find(|c| Some(c.ticket) == pair.follower_ticket);
        let Some(copy) = copy else { return };
        let master = if key.link == link(LINK) { MASTER } else { OTHER_MASTER };
        let Some(told) = self.masters[&master].told.positions.get(&key.ticket) else { return };
        let opened = pair.lots_at_open.expect("an open pair has a volume");
        let target =
            reconcile::target_lots(opened, pair.master_lots_at_open, told.lots, &spec()).get();
        assert!(
            copy.lots.get() - closing - lots.get() >= target,
            "closed twice: {lots} and {closing} of {copy:?}, wanted {target}"
        );
    }

    // The broker.

    pub(super) fn quote(&mut self, bid: &str, ask: &str) {
        let quote = FeedQuote { symbol: symbol(), bid: price(bid), ask: price(ask) };
        let mut effects = Effects::default();
        self.broker.feed(self.broker_now(), &[quote], &mut effects).unwrap();
        let quotes = self.broker.quotes(account(FOLLOWER)).unwrap();
        quotes.into_iter().for_each(|quote| self.follower.set_quote(quote));
        self.tell(effects);
    }

    fn tell(&mut self, effects: Effects) {
        if !self.session {
            return;
        }
        for (_, push) in effects.changes {
            let Push::Change { change, funds, .. } = push else { continue };
            if let Some(event) = event_of(change) {
                self.step(Input::Session(event));
            }
            self.step(Input::Session(SessionEvent::Funds(funds)));
        }
    }

    /// Lets the order at this place reach the broker, and the session tell of it.
    pub(super) fn arrive(&mut self, place: usize) {
        let mut order = self.flying[place].clone();
        let effects = self.reach_broker(&mut order);
        self.flying[place] = order;
        self.tell(effects);
    }

    fn reach_broker(&mut self, order: &mut Flying) -> Effects {
        let mut effects = Effects::default();
        let action = order.request.action();
        if let Some(at) = self.refusals.iter().position(|(of, _)| *of == action) {
            let (_, class) = self.refusals.remove(at);
            order.reply = Some(OrderReply::Rejected(Rejection { class, text: "by case".into() }));
            return effects;
        }
        let meta = OrderMeta {
            node: NodeId::new("n").unwrap(),
            token: Token::MIN,
            deadline_margin_us: 0,
            sent_at_us: self.broker_now().wall,
            client_ref: order.attempt,
        };
        let instruction = Instruction::from(order.request.clone());
        let now = self.broker_now();
        let follower = account(FOLLOWER);
        let mut terms = Terms::default();
        if let Some(at) = self.fills.iter().position(|(of, _)| *of == action) {
            terms.verdict = Verdict::FillPart(self.fills.remove(at).1);
        }
        let reply =
            self.broker.order_on(now, follower, Some(&meta), &instruction, &terms, &mut effects);
        let reply = reply.unwrap();
        if matches!(reply, OrderReply::Done(_)) && is_opening(order) {
            *self.opened.entry(order.key).or_default() += 1;
        }
        order.reply = Some(reply);
        effects
    }

    /// The broker's answer to the order at this place, which has arrived there.
    pub(super) fn answer(&mut self, place: usize) {
        let order = self.flying.remove(place);
        let outcome = match order.reply.expect("arrived") {
            OrderReply::Done(done) => Outcome::Done(done),
            OrderReply::Rejected(rejection) => Outcome::Rejected(rejection),
        };
        self.step(Input::Answer { key: order.key, attempt: order.attempt, outcome });
    }

    /// The first order arrives and is answered.
    pub(super) fn carry_out(&mut self) {
        if self.flying[0].reply.is_none() {
            self.arrive(0);
        }
        self.answer(0);
    }

    /// The answer to the order at this place will not come in time.
    pub(super) fn time_out(&mut self, place: usize) {
        let order = self.flying.remove(place);
        let (key, attempt) = (order.key, order.attempt);
        if order.reply.is_none() {
            self.ghosts.push(order);
        }
        let outcome = Outcome::Unknown("no answer".into());
        self.step(Input::Answer { key, attempt, outcome });
    }

    /// An order of which nobody expects an answer any more reaches the broker.
    pub(super) fn ghost_arrives(&mut self, place: usize) {
        let mut order = self.ghosts.remove(place);
        let effects = self.reach_broker(&mut order);
        self.tell(effects);
    }

    /// Somebody trades by hand on the follower's account.
    pub(super) fn by_hand(&mut self, instruction: Instruction) -> OrderReply {
        let mut effects = Effects::default();
        let now = self.broker_now();
        let follower = account(FOLLOWER);
        let reply =
            self.broker.order(now, follower, None, &instruction, Settings::default(), &mut effects);
        self.tell(effects);
        reply.unwrap()
    }

    /// The broker closes the trade with the largest loss for want of margin.
    pub(super) fn stop_out(&mut self) {
        let mut effects = Effects::default();
        let now = self.broker_now();
        self.broker.stop_out(now, account(FOLLOWER), &mut effects).unwrap();
        self.tell(effects);
    }

    /// Somebody else's node opens a copy of this ticket.
    pub(super) fn foreign_copy(&mut self, ticket: u64) {
        let id = link(LINK);
        let reply = self.by_hand(Instruction::Open {
            symbol: symbol(),
            side: Side::Buy,
            lots: lots("1"),
            stop_loss: None,
            take_profit: None,
            magic: rules(LINK, MASTER).magic.as_i64(),
            comment: tag::encode(id, mt(ticket)).unwrap().as_str().to_owned(),
        });
        assert!(matches!(reply, OrderReply::Done(_)));
        *self.opened.entry(key(ticket)).or_default() += 1;
    }

    pub(super) fn open_session(&mut self) {
        self.session = true;
        let snapshot = self.account_snapshot();
        self.step(Input::SessionOpened {
            snapshot,
            symbols: vec![spec()],
            renumbers: self.renumbers,
        });
    }

    /// The connection breaks: what did not arrive may arrive later, or never.
    pub(super) fn lose_session(&mut self) {
        self.session = false;
        self.reads.clear();
        let flying = std::mem::take(&mut self.flying);
        self.ghosts.extend(flying.into_iter().filter(|order| order.reply.is_none()));
        self.step(Input::Session(SessionEvent::Lost("cut".into())));
    }

    fn account_snapshot(&self) -> AccountSnapshot {
        let book = self.broker.book(self.broker_now(), account(FOLLOWER)).unwrap();
        AccountSnapshot {
            account: account(FOLLOWER),
            revision: book.revision,
            at: self.now().wall,
            positions: book.positions,
            pendings: book.pendings,
            funds: Some(book.funds),
        }
    }

    /// What a read would give now.
    pub(super) fn take_read(&self, since: Micros) -> AccountRead {
        let history = self.broker.history(account(FOLLOWER), since, 0).unwrap();
        AccountRead {
            snapshot: self.account_snapshot(),
            history: FollowerHistory { since, trades: history.trades },
            quotes: self.broker.quotes(account(FOLLOWER)).unwrap(),
        }
    }

    pub(super) fn answer_reads(&mut self) {
        for (id, since, _) in std::mem::take(&mut self.reads) {
            let read = Some(self.take_read(since));
            self.step(Input::Read { id, read });
        }
    }

    pub(super) fn positions(&self) -> Vec<BrokerPosition> {
        self.broker.book(self.broker_now(), account(FOLLOWER)).unwrap().positions
    }

    pub(super) fn pendings(&self) -> Vec<BrokerPending> {
        self.broker.book(self.broker_now(), account(FOLLOWER)).unwrap().pendings
    }

    /// The only open trade.
    pub(super) fn copy(&self) -> BrokerPosition {
        let positions = self.positions();
        assert_eq!(positions.len(), 1, "{positions:?}");
        positions[0].clone()
    }

    pub(super) fn copy_ticket(&self) -> FollowerTicket {
        self.copy().ticket
    }

    // The masters.

    pub(super) fn master(&mut self) -> &mut MasterSim {
        self.masters.get_mut(&MASTER).unwrap()
    }

    /// The master has a fresh trade, and nobody was told.
    pub(super) fn master_has(&mut self, ticket: u64) {
        let position = self.position(ticket);
        self.master_has_position(position);
    }

    pub(super) fn master_has_position(&mut self, position: MasterPosition) {
        self.master().book.positions.insert(position.ticket, position);
    }

    /// A buy of 1.00 at the market.
    pub(super) fn position(&self, ticket: u64) -> MasterPosition {
        MasterPosition {
            ticket: mt(ticket),
            symbol: symbol(),
            side: Side::Buy,
            lots: lots("1"),
            lots_at_open: lots("1"),
            open_price: Some(price("1.10002")),
            stop_loss: None,
            take_profit: None,
            opened_at: self.broker_now().wall,
            contract_size: None,
            is_copy: false,
        }
    }

    /// A buy limit of 1.00 under the market.
    pub(super) fn pending(&self, ticket: u64) -> MasterPending {
        MasterPending {
            ticket: mt(ticket),
            symbol: symbol(),
            kind: PendingKind::BuyLimit,
            lots: lots("1"),
            price: price("1.09"),
            stop_loss: None,
            take_profit: None,
            placed_at: self.broker_now().wall,
            contract_size: None,
            is_copy: false,
        }
    }

    /// The master changes, and nobody hears of it.
    pub(super) fn unheard(&mut self, master: u64, change: Change) -> TradeEvent {
        let at = self.broker_now().wall;
        let sim = self.masters.get_mut(&master).unwrap();
        sim.book.apply(&change);
        sim.seq += 1;
        TradeEvent {
            account: account(master),
            epoch: Epoch::new(sim.epoch).unwrap(),
            seq: Seq::new(sim.seq).unwrap(),
            at,
            change,
        }
    }

    pub(super) fn deliver(&mut self, event: &TradeEvent, doubtful: bool) {
        let sim = self.masters.get_mut(&event.account.get()).unwrap();
        sim.told.apply(&event.change);
        let event = Arc::new(event.clone());
        let master = event.account;
        let message = FeedMessage::Event { event, doubtful, received: Instant::now() };
        self.step(Input::Feed { master, message });
    }

    pub(super) fn change_of(&mut self, master: u64, change: Change) {
        let event = self.unheard(master, change);
        self.deliver(&event, false);
    }

    pub(super) fn change(&mut self, change: Change) {
        self.change_of(MASTER, change);
    }

    pub(super) fn master_opens(&mut self, ticket: u64) {
        self.change(Change::PositionOpened(self.position(ticket)));
    }

    pub(super) fn closing(&self, master: u64, ticket: u64) -> Change {
        let position = self.masters[&master].book.positions[&mt(ticket)].clone();
        Change::PositionClosed { position, price: None, reason: CloseReason::Client }
    }

    pub(super) fn master_closes(&mut self, ticket: u64) {
        let change = self.closing(MASTER, ticket);
        self.change(change);
    }

    pub(super) fn master_stops(&mut self, ticket: u64, stop_loss: Option<&str>) {
        let mut position = self.master().book.positions[&mt(ticket)].clone();
        position.stop_loss = stop_loss.map(price);
        self.change(Change::PositionModified(position));
    }

    pub(super) fn master_reduces(&mut self, ticket: u64, to: &str) {
        let mut position = self.master().book.positions[&mt(ticket)].clone();
        let previous_lots = position.lots;
        position.lots = lots(to);
        self.change(Change::VolumeChanged { position, previous_lots });
    }

    pub(super) fn doubt(&mut self) {
        let message = FeedMessage::Doubt(DoubtReason::Gap);
        self.step(Input::Feed { master: account(MASTER), message });
    }

    /// Every master's feed gives the state that is really there.
    pub(super) fn snapshots(&mut self) {
        for master in self.masters.keys().copied().collect::<Vec<_>>() {
            let book = self.masters[&master].book.clone();
            self.snapshot_of(master, book);
        }
    }

    /// A feed gives this state, whatever is really there.
    pub(super) fn snapshot_of(&mut self, master: u64, book: Book) {
        let at = self.broker_now().wall;
        let sim = self.masters.get_mut(&master).unwrap();
        sim.told = book.clone();
        let snapshot = MasterSnapshot {
            account: account(master),
            epoch: Epoch::new(sim.epoch).unwrap(),
            seq: Seq::new(sim.seq).unwrap(),
            at,
            book,
            funds: None,
        };
        let message = FeedMessage::Snapshot(Arc::new(snapshot), DoubtReason::Gap);
        self.step(Input::Feed { master: account(master), message });
    }

    // What can be asked afterwards.

    pub(super) fn pair(&self, ticket: u64) -> Option<&Pair> {
        let rows = self.rows.values().filter(|row| row.master_ticket == mt(ticket));
        rows.max_by_key(|row| (row.state.is_live(), row.version))
    }

    pub(super) fn state(&self, ticket: u64) -> Option<PairState> {
        self.pair(ticket).map(|pair| pair.state)
    }

    /// The actions that left for a ticket, in order.
    pub(super) fn actions(&self, ticket: u64) -> Vec<&'static str> {
        let of_ticket = self.sent.iter().filter(|(key, _)| key.ticket == mt(ticket));
        of_ticket.map(|(_, request)| request.action()).collect()
    }
}

pub(super) fn is_opening(order: &Flying) -> bool {
    opens(&order.request)
}

fn opens(request: &OrderRequest) -> bool {
    matches!(request, OrderRequest::Open { .. } | OrderRequest::Place { .. })
}

pub(super) fn spec() -> SymbolSpec {
    SymbolSpec {
        symbol: symbol(),
        digits: 5,
        lots_step: lots("0.01"),
        lots_min: lots("0.01"),
        lots_max: lots("50"),
        contract_size: None,
        stops_level_points: 0,
    }
}
