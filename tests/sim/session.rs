//! One tenure in one process: the shell around the real follower, lead and publisher.
//!
//! It follows `account::session` step by step: rows, permission, login, work, cut, drain. What is
//! decided here is nothing about trades.

use crate::broker::Order;
use crate::bus::Message;
use crate::node::{AUDITS, BROKER_CALL_LIMIT, FENCE, LEASE, SEND_RESERVE, SETTLE};
use crate::plan::{MS, Point, SECOND};
use crate::world::{Who, World};
use bus::publisher::core::{Outgoing, PublisherCore, StateAt};
use bus::{Closing, EpochReason, FeedMessage, start_epoch};
use lockstep::account::ending::may_be_handed_in;
use lockstep::account::lead::Lead;
use lockstep::account::rows::{Owner, copy_event, pair_row, pairs_of};
use lockstep::broker::view::AccountView;
use lockstep::broker::{NotSent, Outcome, SessionEvent};
use lockstep::follower::{
    AccountRead, Attempt, Effect, Follower, FollowerSettings, Input, Now, Record, TicketKey,
};
use lockstep::gate::SendPermit;
use lockstep::lease::TenureKey;
use lockstep::writer::Row;
use reconcile::{FollowerHistory, Limits, LinkMode, LinkRules, Pair};
use schemas::{
    AccountId, AccountSnapshot, Beacon, Book, Digest, Epoch, LinkId, Micros, OrderRequest, Seq,
    SymbolSpec,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

const TICK: u64 = 100 * MS;
const LOOK: u64 = 200 * MS;
const BEACON: u64 = 2 * SECOND;
const OPEN_RETRY_FIRST: u64 = 200 * MS;
const OPEN_RETRY_MAX: u64 = 5 * SECOND;
/// Login, lists and a stored epoch take at most this long.
const OPEN_LIMIT: u64 = 15 * SECOND;
const LOAD_RETRY: u64 = SECOND;
const SUPERSEDED_WAIT: u64 = SECOND;
const DRAIN_LIMIT: u64 = 30 * SECOND;
const FLUSH_LIMIT: u64 = 10 * SECOND;
const REPLY_SPACING: u64 = 250 * MS;
const ROUTINE: Duration = Duration::from_secs(60);
const QUEUE_MAX: usize = 16_384;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Loading,
    Waiting,
    Connecting,
    Working,
    Draining { until: u64 },
    Flushing { until: u64 },
}

pub(crate) struct Session {
    pub(crate) tenure: TenureKey,
    number: u64,
    clean: bool,
    stage: Stage,
    pub(crate) follower: Option<Follower>,
    masters: BTreeSet<AccountId>,
    stretch: Option<u64>,
    epoch: Option<Epoch>,
    connection: Option<u64>,
    inbox: VecDeque<SessionEvent>,
    feed_queue: VecDeque<(AccountId, FeedMessage)>,
    lead: Option<Leading>,
    wait: u64,
    attempts: u64,
    drains: bool,
    rules_changed: bool,
    /// Links that the follower was told are paused, for the laws.
    paused: BTreeSet<LinkId>,
    /// What the follower was told of each master, for the laws.
    pub(crate) told: BTreeMap<AccountId, (Epoch, Seq, Book)>,
}

struct Leading {
    /// Its first epoch, which names it.
    began: Epoch,
    lead: Lead,
    core: PublisherCore,
    spoken_on: Option<u64>,
    silent_because: EpochReason,
    view: Option<AccountView>,
    digest: Option<((Epoch, Seq), Digest)>,
    askers: Vec<(Who, Option<Epoch>, u64)>,
    answered_at: Option<u64>,
}

impl Session {
    pub(crate) fn unanswered(&self) -> usize {
        self.follower.as_ref().map_or(0, Follower::unanswered)
    }

    /// Open at the broker, and everything it copies is in order.
    pub(crate) fn is_at_work(&self) -> bool {
        self.stage == Stage::Working && self.follower.as_ref().is_none_or(Follower::is_copying)
    }

    /// What it does, for a message.
    pub(crate) fn state(&self) -> String {
        let follower = self.follower.as_ref();
        let doubtful = follower.map(Follower::doubtful_masters);
        let has_view = follower.map(|f| f.view().is_some());
        format!("{:?}, doubtful {doubtful:?}, view {has_view:?}", self.stage)
    }

    /// Where its publisher stands.
    pub(crate) fn published(&self) -> Option<(Epoch, Seq)> {
        self.lead.as_ref().map(|leading| leading.core.position())
    }

    fn owner(&self) -> Owner {
        Owner { account: self.tenure.account, token: self.tenure.token }
    }
}

fn get(w: &mut World, who: Who, account: AccountId) -> Option<&mut Session> {
    w.process(who).sessions.get_mut(&account)
}

/// The session of this account, if it is still the one that planned a deed.
fn same(w: &mut World, who: Who, account: AccountId, number: u64) -> Option<&mut Session> {
    get(w, who, account).filter(|session| session.number == number)
}

fn now(w: &mut World, who: Who) -> Now {
    w.refresh_clock(who);
    let process = w.process(who);
    Now { node: process.clock.now(), wall: process.clock.wall() }
}

/// A tenure begins.
pub(crate) fn begin(w: &mut World, who: Who, tenure: TenureKey, clean: bool) {
    let account = tenure.account;
    w.note(|| format!("node {} begins {account} token {} clean {clean}", who.node, tenure.token));
    let number = w.rng.range(0, u64::MAX);
    let session = Session {
        tenure,
        number,
        clean,
        stage: Stage::Loading,
        follower: None,
        masters: BTreeSet::new(),
        stretch: None,
        epoch: None,
        connection: None,
        inbox: VecDeque::new(),
        feed_queue: VecDeque::new(),
        lead: None,
        wait: OPEN_RETRY_FIRST,
        attempts: 0,
        drains: false,
        rules_changed: false,
        paused: BTreeSet::new(),
        told: BTreeMap::new(),
    };
    w.process(who).sessions.insert(account, session);
    load(w, who, account, number);
    w.after(TICK, Some(who), move |w| tick(w, who, account, number));
}

fn load(w: &mut World, who: Who, account: AccountId, number: u64) {
    if w.process(who).writer.queue.pairs_pending(account) > 0 {
        // A session before this one, perhaps of the same tenure, is not written yet.
        return w.after(TICK, Some(who), move |w| {
            if same(w, who, account, number).is_some() {
                load(w, who, account, number);
            }
        });
    }
    crate::db::load(w, who, account, move |w, loaded| {
        let links = rules_of(w, account);
        let at = now(w, who);
        let Some(session) = same(w, who, account, number) else { return };
        let Some((pairs, epoch)) = loaded else {
            w.after(LOAD_RETRY, Some(who), move |w| {
                if same(w, who, account, number).is_some() {
                    load(w, who, account, number);
                }
            });
            return;
        };
        session.epoch = epoch;
        if !links.is_empty() {
            let settings = FollowerSettings {
                parallel_orders: 16,
                limits: Limits { delivery_max: FENCE + SETTLE, ..Limits::default() },
                row_wait_max: LEASE,
                audits: AUDITS.to_vec(),
                routine: ROUTINE,
            };
            let settle = (!session.clean).then(|| at.node.plus(SETTLE));
            let with_pairs =
                links.iter().map(|rules| (rules.clone(), pairs_of(rules, &pairs))).collect();
            session.paused = paused(&links);
            let follower = Follower::new(settings, with_pairs, settle, at);
            session.masters = follower.masters();
            session.follower = Some(follower);
        }
        session.stage = Stage::Waiting;
        let masters = session.masters.clone();
        for master in masters {
            crate::feed::attach(w, who, master, account);
        }
    });
}

/// The rules of an account's links, as its rows say them.
fn rules_of(w: &World, account: AccountId) -> Vec<LinkRules> {
    let of_account = w.links.values().filter(|facts| facts.rules.follower == account);
    of_account
        .map(|facts| {
            let mut rules = facts.rules.clone();
            if rules.mode == LinkMode::Copy && w.db.committed.untaggable.contains(&rules.link) {
                rules.mode = LinkMode::CopyUntagged;
            }
            rules
        })
        .collect()
}

fn paused(links: &[LinkRules]) -> BTreeSet<LinkId> {
    links.iter().filter(|rules| rules.paused).map(|rules| rules.link).collect()
}

/// The links of a follower changed: they are read again beside the work.
pub(crate) fn rules_changed(w: &mut World, who: Who, account: AccountId) {
    if let Some(session) = get(w, who, account) {
        session.rules_changed = true;
    }
}

fn permission(w: &mut World, who: Who, account: AccountId) -> Option<u64> {
    w.refresh_clock(who);
    let process = w.process(who);
    let token = process.sessions.get(&account)?.tenure.token;
    let now = process.clock.now();
    let permission = process.gate.permission(account, now)?;
    (permission.token == token).then_some(permission.stretch)
}

fn tick(w: &mut World, who: Who, account: AccountId, number: u64) {
    let Some(session) = same(w, who, account, number) else { return };
    let stage = session.stage;
    match stage {
        Stage::Loading | Stage::Connecting => {
            if session.drains {
                end_unconnected(w, who, account);
            }
        }
        Stage::Waiting => {
            if session.drains {
                end_unconnected(w, who, account);
            } else if let Some(stretch) = permission(w, who, account) {
                let at = now(w, who);
                let Some(session) = get(w, who, account) else { return };
                let restored = session.stretch.is_some_and(|before| before != stretch);
                session.stretch = Some(stretch);
                if restored && let Some(follower) = &mut session.follower {
                    let _no_effects = follower.step(at, Input::LeaseRestored);
                }
                session.stage = Stage::Connecting;
                connect(w, who, account, number);
            }
        }
        Stage::Working => look_at_the_clock(w, who, account),
        Stage::Draining { until } => drain_on(w, who, account, until),
        Stage::Flushing { until } => flush_on(w, who, account, until),
    }
    if same(w, who, account, number).is_some() {
        w.after(TICK, Some(who), move |w| tick(w, who, account, number));
    }
}

fn connect(w: &mut World, who: Who, account: AccountId, number: u64) {
    let Some(session) = get(w, who, account) else { return };
    session.attempts += 1;
    let attempt = session.attempts;
    w.after(OPEN_LIMIT, Some(who), move |w| {
        let waits = same(w, who, account, number)
            .is_some_and(|s| s.stage == Stage::Connecting && s.attempts == attempt);
        if waits {
            retry_open(w, who, account);
        }
    });
    crate::broker::log_in(w, who, account, move |w, opened| {
        let here = same(w, who, account, number)
            .is_some_and(|s| s.stage == Stage::Connecting && s.attempts == attempt);
        let Some((connection, snapshot, symbols)) = opened else {
            if here {
                retry_open(w, who, account);
            }
            return;
        };
        if !here {
            crate::broker::cut(w, connection);
            return;
        }
        let session = get(w, who, account).expect("it is here");
        session.connection = Some(connection);
        session.inbox.clear();
        if w.links.values().any(|facts| facts.rules.master == account) {
            begin_leading(w, who, account, number, snapshot, symbols);
        } else {
            work(w, who, account, snapshot, symbols);
        }
    });
}

fn retry_open(w: &mut World, who: Who, account: AccountId) {
    let Some(session) = get(w, who, account) else { return };
    let wait = session.wait;
    session.attempts += 1;
    session.wait = (wait * 2).min(OPEN_RETRY_MAX);
    let number = session.number;
    give_connection_up(w, who, account);
    w.after(wait, Some(who), move |w| {
        if let Some(session) = same(w, who, account, number) {
            session.stage = Stage::Waiting;
        }
    });
}

fn give_connection_up(w: &mut World, who: Who, account: AccountId) {
    let Some(session) = get(w, who, account) else { return };
    session.lead = None;
    if let Some(connection) = session.connection.take() {
        crate::broker::cut(w, connection);
    }
}

/// Starts to speak as a master, with an epoch that is stored before the first word.
fn begin_leading(
    w: &mut World,
    who: Who,
    account: AccountId,
    number: u64,
    snapshot: AccountSnapshot,
    symbols: Vec<SymbolSpec>,
) {
    let at = now(w, who);
    let session = get(w, who, account).expect("it is here");
    let epoch = start_epoch(at.wall, session.epoch, None);
    let (token, connection) = (session.tenure.token, session.connection);
    crate::db::store_epoch(w, who, account, token, epoch, move |w, stored| {
        let here = same(w, who, account, number)
            .is_some_and(|s| s.stage == Stage::Connecting && s.connection == connection);
        if !here {
            return;
        }
        if stored != Some(true) {
            retry_open(w, who, account);
            return;
        }
        let oldest = snapshot.positions.iter().map(|p| p.opened_at).min();
        let history = crate::broker::history(w, account, oldest.unwrap_or(snapshot.at));
        let magics: Vec<_> = w
            .links
            .values()
            .filter(|facts| facts.rules.follower == account)
            .map(|facts| facts.rules.magic)
            .collect();
        let at = now(w, who);
        let base = w.base;
        let session = get(w, who, account).expect("it is here");
        session.epoch = Some(epoch);
        let mut lead = Lead::new(magics, &history);
        let view = AccountView::new(&snapshot, symbols.clone());
        let mut core = PublisherCore::new(account, epoch, QUEUE_MAX);
        if let Some(funds) = &snapshot.funds {
            core.set_funds(funds.clone());
        }
        let book = lead.book(&view.positions, &view.pendings, &view.symbols);
        core.observe(at.wall, book, &BTreeMap::new(), base);
        let own_view = session.follower.is_none().then_some(view);
        session.lead = Some(Leading {
            began: epoch,
            lead,
            core,
            spoken_on: None,
            silent_because: EpochReason::Disconnected,
            view: own_view,
            digest: None,
            askers: Vec::new(),
            answered_at: None,
        });
        w.note(|| format!("node {} speaks for {account} with epoch {epoch}", who.node));
        w.after(0, Some(who), move |w| look(w, who, account, number, epoch));
        w.after(0, Some(who), move |w| beacon(w, who, account, number, epoch));
        work(w, who, account, snapshot, symbols);
    });
}

fn work(
    w: &mut World,
    who: Who,
    account: AccountId,
    mut snapshot: AccountSnapshot,
    symbols: Vec<SymbolSpec>,
) {
    let at = now(w, who);
    snapshot.at = at.wall;
    let session = get(w, who, account).expect("it is here");
    session.stage = Stage::Working;
    session.wait = OPEN_RETRY_FIRST;
    w.reach("session_opened");
    let renumbers = crate::broker::renumbers(w, account);
    step(w, who, account, Input::SessionOpened { snapshot, symbols, renumbers });
    if let Some(number) = get(w, who, account).map(|s| s.number) {
        drain_inbox(w, who, account, number);
        pump_feed(w, who, account, number);
    }
}

fn drain_inbox(w: &mut World, who: Who, account: AccountId, number: u64) {
    loop {
        let Some(session) = same(w, who, account, number) else { return };
        if !matches!(session.stage, Stage::Working | Stage::Draining { .. }) {
            return;
        }
        let Some(event) = session.inbox.pop_front() else { return };
        on_event(w, who, account, event);
    }
}

/// The broker's session says something.
pub(crate) fn broker_says(
    w: &mut World,
    who: Who,
    account: AccountId,
    connection: u64,
    event: SessionEvent,
) {
    let Some(session) = get(w, who, account) else { return };
    if session.connection != Some(connection) {
        return;
    }
    let number = session.number;
    session.inbox.push_back(event);
    drain_inbox(w, who, account, number);
}

fn on_event(w: &mut World, who: Who, account: AccountId, event: SessionEvent) {
    let at = now(w, who).wall;
    if let SessionEvent::Lost(_) = event {
        let draining =
            get(w, who, account).is_some_and(|s| matches!(s.stage, Stage::Draining { .. }));
        if draining {
            cut(w, who, account);
            finish(w, who, account, false);
        } else {
            cut(w, who, account);
        }
        return;
    }
    let Some(session) = get(w, who, account) else { return };
    if let Some(leading) = &mut session.lead {
        if let Some(view) = &mut leading.view {
            view.apply(&event);
        }
        if let SessionEvent::Reduced { closed, .. } | SessionEvent::Closed { closed, .. } = &event {
            leading.lead.learn(closed);
        }
    }
    step(w, who, account, Input::Session(event.clone()));
    let base = w.base;
    let Some(session) = get(w, who, account) else { return };
    let shared = session.follower.as_ref().and_then(Follower::view);
    let Some(leading) = &mut session.lead else { return };
    if let SessionEvent::Funds(funds) = event {
        leading.core.set_funds(funds);
        return;
    }
    let Some(view) = leading.view.as_ref().or(shared) else { return };
    let mut closings = BTreeMap::new();
    if let SessionEvent::Closed { closed, reason } = &event {
        let ticket = leading.lead.ticket_of(closed);
        closings.insert(ticket, Closing { price: Some(closed.close_price), reason: *reason });
    }
    let book = leading.lead.book(&view.positions, &view.pendings, &view.symbols);
    leading.core.observe(at, book, &closings, base);
    pump_publisher(w, who, account);
}

fn step(w: &mut World, who: Who, account: AccountId, input: Input) {
    let at = now(w, who);
    let Some(session) = get(w, who, account) else { return };
    let Some(follower) = &mut session.follower else { return };
    let effects = follower.step(at, input);
    execute(w, who, account, effects);
}

fn execute(w: &mut World, who: Who, account: AccountId, effects: Vec<Effect>) {
    let mut todo = VecDeque::from(effects);
    while let Some(effect) = todo.pop_front() {
        match effect {
            Effect::Send { key, attempt, request } => {
                let more = send(w, who, account, key, attempt, request);
                more.into_iter().rev().for_each(|effect| todo.push_front(effect));
            }
            Effect::Read { id, since, .. } => read(w, who, account, id, since),
            Effect::AskMaster { master, .. } => {
                w.after(0, Some(who), move |w| crate::feed::request(w, who, master, account));
            }
            Effect::Persist(pair) => persist(w, who, account, *pair),
            Effect::Record(record) => keep_record(w, who, account, *record),
            Effect::Planned { reason, steps, held, duplicates, .. } => {
                w.note(|| {
                    format!(
                        "node {} plans {account} ({}): {steps:?}{}",
                        who.node,
                        reason.as_str(),
                        if held { " HELD" } else { "" }
                    )
                });
                crate::oracle::planned(w, account, &steps, held, duplicates);
            }
            // Nobody asks for a close here.
            Effect::CloseAnswered { .. } => {}
            Effect::Untaggable(link) => {
                w.note(|| format!("link {link} keeps no tags"));
                w.reach("untaggable");
                let token = get(w, who, account).map(|s| s.tenure.token);
                if let Some(token) = token {
                    crate::db::store_untaggable(w, who, account, token, link);
                }
            }
            Effect::Restless(link) => {
                w.note(|| format!("link {link} does not come to rest"));
                w.reach("restless");
            }
        }
    }
}

fn read(w: &mut World, who: Who, account: AccountId, id: u64, since: Micros) {
    let Some(session) = get(w, who, account) else { return };
    let (number, Some(connection)) = (session.number, session.connection) else { return };
    crate::broker::read(w, connection, who, since, move |w, read| {
        let here = same(w, who, account, number).is_some_and(|s| s.connection == Some(connection));
        if !here {
            return;
        }
        if w.caught(who, Point::ReadToPlan) {
            w.after(0, Some(who), move |w| give_read(w, who, account, number, id, since, read));
        } else {
            give_read(w, who, account, number, id, since, read);
        }
    });
}

type RawRead = Option<(AccountSnapshot, Vec<schemas::ClosedTrade>, Vec<schemas::Quote>)>;

fn give_read(
    w: &mut World,
    who: Who,
    account: AccountId,
    number: u64,
    id: u64,
    since: Micros,
    read: RawRead,
) {
    let wall = now(w, who).wall;
    let here = same(w, who, account, number).is_some_and(|s| s.stage == Stage::Working);
    if !here {
        return;
    }
    let read = read.map(|(mut snapshot, trades, quotes)| {
        snapshot.at = wall;
        AccountRead { snapshot, history: FollowerHistory { since, trades }, quotes }
    });
    step(w, who, account, Input::Read { id, read });
}

fn send(
    w: &mut World,
    who: Who,
    account: AccountId,
    key: TicketKey,
    attempt: Attempt,
    request: OrderRequest,
) -> Vec<Effect> {
    let at = now(w, who);
    let process = w.process(who);
    let permit = process.gate.permit(account, at.node, SEND_RESERVE);
    let Some(session) = process.sessions.get_mut(&account) else { return Vec::new() };
    let permit = permit.ok().filter(|permit| Some(permit.stretch()) == session.stretch);
    let Some(follower) = &mut session.follower else { return Vec::new() };
    let (Some(permit), Some(connection)) = (permit, session.connection) else {
        let outcome = Outcome::NotSent(NotSent::Gate);
        return follower.step(at, Input::Answer { key, attempt, outcome });
    };
    let number = session.number;
    let mut order = Order {
        connection,
        who,
        account,
        key,
        attempt,
        request,
        token: permit.token(),
        margin_us: 0,
        master_lots: None,
        checked_at: 0,
        written_at: 0,
        is_beyond_reset: false,
        is_late: false,
        is_excused: false,
    };
    crate::oracle::order_decided(w, &mut order);
    let wait = crate::node::executor_wait(w, who);
    if wait == 0 {
        if let Err(order) = leave(w, permit, order) {
            let Order { key, attempt, .. } = *order;
            let outcome = Outcome::NotSent(NotSent::Gate);
            let at = now(w, who);
            let Some(session) = get(w, who, account) else { return Vec::new() };
            let Some(follower) = &mut session.follower else { return Vec::new() };
            return follower.step(at, Input::Answer { key, attempt, outcome });
        }
    } else {
        // It waits in the executor's queue, and its permit with it (H9).
        w.after(wait, Some(who), move |w| {
            let here =
                same(w, who, account, number).is_some_and(|s| s.connection == Some(connection));
            if !here {
                return;
            }
            if leave(w, permit, order).is_err() {
                w.reach("denied_after_the_queue");
                let outcome = Outcome::NotSent(NotSent::Gate);
                step(w, who, account, Input::Answer { key, attempt, outcome });
            }
        });
    }
    let limit = BROKER_CALL_LIMIT.as_micros() as u64 + wait;
    w.after(limit, Some(who), move |w| {
        if same(w, who, account, number).is_some() {
            let outcome = Outcome::Unknown("no answer within the call limit".into());
            step(w, who, account, Input::Answer { key, attempt, outcome });
        }
    });
    let at = now(w, who);
    let Some(session) = get(w, who, account) else { return Vec::new() };
    let Some(follower) = &mut session.follower else { return Vec::new() };
    follower.submitted(key, attempt, at)
}

/// The last check and the write; the order comes back where it must not leave.
fn leave(w: &mut World, permit: SendPermit, mut order: Order) -> Result<(), Box<Order>> {
    let who = order.who;
    let at = now(w, who);
    let spent = match permit.spend(at.node) {
        Ok(spent) => spent,
        Err(_denied) => return Err(Box::new(order)),
    };
    order.token = spent.token;
    order.margin_us = spent.margin.as_micros() as i64;
    order.checked_at = w.now;
    crate::oracle::order_leaves(w, &order);
    if w.caught(who, Point::GateToWrite) {
        let checked_at = w.now;
        w.after(0, Some(who), move |w| {
            let frozen = w.now - checked_at;
            order.is_late = frozen > crate::node::SEND_RESERVE.as_micros() as u64;
            crate::broker::write(w, order);
        });
    } else {
        crate::broker::write(w, order);
    }
    Ok(())
}

/// An order is answered.
pub(crate) fn answered(
    w: &mut World,
    who: Who,
    account: AccountId,
    connection: u64,
    key: TicketKey,
    attempt: Attempt,
    outcome: Outcome,
) {
    let here = get(w, who, account).is_some_and(|s| s.connection == Some(connection));
    if here {
        step(w, who, account, Input::Answer { key, attempt, outcome });
    }
}

fn persist(w: &mut World, who: Who, account: AccountId, pair: Pair) {
    let wall = now(w, who).wall;
    let Some(session) = get(w, who, account) else { return };
    let owner = session.owner();
    w.note(|| {
        format!(
            "node {} pair {}/{} {:?} copy {:?} v{}",
            who.node, pair.link, pair.master_ticket, pair.state, pair.follower_ticket, pair.version
        )
    });
    crate::writer::push(w, who, Row::Pair(pair_row(owner, pair, None, wall)));
}

fn keep_record(w: &mut World, who: Who, account: AccountId, record: Record) {
    let wall = now(w, who).wall;
    let Some(session) = get(w, who, account) else { return };
    let owner = session.owner();
    w.note(|| {
        format!(
            "node {} {} {:?} {:?} {}",
            who.node,
            record.action,
            record.key,
            record.outcome,
            record.reason.as_deref().unwrap_or("")
        )
    });
    crate::oracle::recorded(w, account, &record);
    crate::writer::push(w, who, Row::CopyEvent(copy_event(owner, record, wall)));
}

// Feeds.

/// A feed hands a message on.
pub(crate) fn feed_says(
    w: &mut World,
    who: Who,
    account: AccountId,
    master: AccountId,
    message: FeedMessage,
) {
    let Some(session) = get(w, who, account) else { return };
    session.feed_queue.push_back((master, message));
    let number = session.number;
    w.after(0, Some(who), move |w| pump_feed(w, who, account, number));
}

fn pump_feed(w: &mut World, who: Who, account: AccountId, number: u64) {
    loop {
        let Some(session) = same(w, who, account, number) else { return };
        if session.stage != Stage::Working {
            return;
        }
        let Some((master, message)) = session.feed_queue.pop_front() else { return };
        crate::oracle::follower_told(w, who, account, master, &message);
        let Some(session) = get(w, who, account) else { return };
        if let (FeedMessage::Event { event, .. }, Some(follower)) = (&message, &session.follower) {
            let symbols = follower.copied_symbols(master, event.change.symbol());
            let quotes = w.brokers.engine.quotes(account).expect("declared");
            let session = get(w, who, account).expect("it is here");
            let follower = session.follower.as_mut().expect("it is there");
            for quote in quotes.into_iter().filter(|q| symbols.contains(&q.symbol)) {
                follower.set_quote(quote);
            }
        }
        step(w, who, account, Input::Feed { master, message });
    }
}

// The end of permission, and of tenures.

/// Copies that partial closes wait for, and whose rows are settled by now.
fn stored_since(w: &mut World, who: Who, account: AccountId) -> Vec<TicketKey> {
    let Some(session) = get(w, who, account) else { return Vec::new() };
    let Some(follower) = &session.follower else { return Vec::new() };
    let unstored: Vec<_> = follower.unstored().collect();
    let queue = &w.process(who).writer.queue;
    let stored = unstored.into_iter().filter(|(_, pair)| !queue.is_pair_pending(account, *pair));
    stored.map(|(key, _)| key).collect()
}

fn look_at_the_clock(w: &mut World, who: Who, account: AccountId) {
    let stretch = permission(w, who, account);
    let Some(session) = get(w, who, account) else { return };
    if stretch.is_none() || stretch != session.stretch {
        w.note(|| format!("node {} has no permission for {account}, session cut", who.node));
        w.reach("permission_ended");
        cut(w, who, account);
        return;
    }
    let superseded = session.lead.as_ref().and_then(|leading| leading.core.superseded());
    if let Some(heard) = superseded {
        session.epoch = session.epoch.max(Some(heard));
        w.reach("superseded");
        cut(w, who, account);
        if let Some(session) = get(w, who, account) {
            session.stage = Stage::Connecting;
            let number = session.number;
            w.after(SUPERSEDED_WAIT, Some(who), move |w| {
                if let Some(session) = same(w, who, account, number) {
                    session.stage = Stage::Waiting;
                }
            });
        }
        return;
    }
    note_epoch(w, who, account);
    for key in stored_since(w, who, account) {
        step(w, who, account, Input::Stored(key));
    }
    step(w, who, account, Input::Tick);
    let Some(session) = get(w, who, account) else { return };
    if session.rules_changed {
        session.rules_changed = false;
        take_rules(w, who, account);
    }
}

fn take_rules(w: &mut World, who: Who, account: AccountId) {
    let Some(session) = get(w, who, account) else { return };
    let number = session.number;
    crate::db::load(w, who, account, move |w, loaded| {
        let here = same(w, who, account, number).is_some_and(|s| s.stage == Stage::Working);
        match loaded {
            Some((pairs, _)) if here => {
                let links = rules_of(w, account);
                let told = paused(&links);
                let links = links.into_iter().map(|rules| {
                    let pairs = pairs_of(&rules, &pairs);
                    (rules, pairs)
                });
                let links = links.collect();
                if let Some(session) = get(w, who, account) {
                    session.paused = told;
                }
                step(w, who, account, Input::Links(links));
            }
            _ => rules_changed(w, who, account),
        }
    });
}

fn note_epoch(w: &mut World, who: Who, account: AccountId) {
    let Some(session) = get(w, who, account) else { return };
    let Some(leading) = &session.lead else { return };
    if !leading.core.speaks() {
        return;
    }
    let (epoch, _) = leading.core.position();
    if session.epoch.is_some_and(|known| known >= epoch) {
        return;
    }
    session.epoch = Some(epoch);
    let (token, number) = (session.tenure.token, session.number);
    w.reach("epoch_raised");
    store_later(w, who, account, number, token, epoch);
}

fn store_later(
    w: &mut World,
    who: Who,
    account: AccountId,
    number: u64,
    token: schemas::Token,
    epoch: Epoch,
) {
    crate::db::store_epoch(w, who, account, token, epoch, move |w, stored| {
        let newest = same(w, who, account, number).is_some_and(|s| s.epoch == Some(epoch));
        if stored.is_none() && newest {
            w.after(LOAD_RETRY, Some(who), move |w| {
                store_later(w, who, account, number, token, epoch);
            });
        }
    });
}

/// The connection is given up: whatever is on its way has an unknown outcome.
fn cut(w: &mut World, who: Who, account: AccountId) {
    give_connection_up(w, who, account);
    let at = now(w, who);
    let Some(session) = get(w, who, account) else { return };
    let unanswered = session.unanswered();
    crate::oracle::session_ended(w, account, unanswered);
    let Some(session) = get(w, who, account) else { return };
    session.stage = Stage::Waiting;
    let Some(follower) = &mut session.follower else { return };
    let effects = follower.step(at, Input::Session(SessionEvent::Lost("cut".into())));
    for effect in effects {
        match effect {
            Effect::Record(record) => keep_record(w, who, account, *record),
            Effect::Persist(pair) => persist(w, who, account, *pair),
            Effect::Send { .. }
            | Effect::Read { .. }
            | Effect::AskMaster { .. }
            | Effect::Planned { .. }
            | Effect::CloseAnswered { .. }
            | Effect::Untaggable(_)
            | Effect::Restless(_) => {}
        }
    }
}

/// The tenure is lost.
pub(crate) fn stop(w: &mut World, who: Who, account: AccountId) {
    w.note(|| format!("node {} has lost {account}", who.node));
    cut(w, who, account);
    remove(w, who, account);
}

fn remove(w: &mut World, who: Who, account: AccountId) {
    let Some(session) = w.process(who).sessions.remove(&account) else { return };
    for master in session.masters {
        crate::feed::detach(w, who, master, account);
    }
    w.after(0, Some(who), move |w| crate::node::follow(w, who));
}

/// The tenure is to be given back.
pub(crate) fn drain(w: &mut World, who: Who, account: AccountId) {
    let until = w.now + DRAIN_LIMIT;
    let Some(session) = get(w, who, account) else { return };
    if session.drains {
        return;
    }
    session.drains = true;
    if session.stage == Stage::Working {
        session.stage = Stage::Draining { until };
        step(w, who, account, Input::Drain);
        drain_on(w, who, account, until);
    }
}

fn drain_on(w: &mut World, who: Who, account: AccountId, until: u64) {
    let has_permission = permission(w, who, account).is_some();
    let Some(session) = get(w, who, account) else { return };
    if may_be_handed_in(session.unanswered(), 0) {
        session.lead = None;
        give_connection_up(w, who, account);
        let until = w.now + FLUSH_LIMIT;
        if let Some(session) = get(w, who, account) {
            session.stage = Stage::Flushing { until };
        }
        flush_on(w, who, account, until);
    } else if !has_permission || w.now >= until {
        cut(w, who, account);
        finish(w, who, account, false);
    }
}

fn flush_on(w: &mut World, who: Who, account: AccountId, until: u64) {
    let unwritten = w.process(who).writer.queue.pending(account);
    if may_be_handed_in(0, unwritten) {
        finish(w, who, account, true);
    } else if w.now >= until {
        finish(w, who, account, false);
    }
}

fn end_unconnected(w: &mut World, who: Who, account: AccountId) {
    let Some(session) = get(w, who, account) else { return };
    let unanswered = session.unanswered();
    give_connection_up(w, who, account);
    if may_be_handed_in(unanswered, 0) {
        let until = w.now + FLUSH_LIMIT;
        if let Some(session) = get(w, who, account) {
            session.stage = Stage::Flushing { until };
        }
    } else {
        finish(w, who, account, false);
    }
}

fn finish(w: &mut World, who: Who, account: AccountId, drained: bool) {
    let Some(session) = get(w, who, account) else { return };
    let tenure = session.tenure;
    w.note(|| format!("node {} ends {account}, drained: {drained}", who.node));
    remove(w, who, account);
    if drained {
        w.reach("drained");
        crate::node::hand_in(w, who, tenure);
    }
}

// The publisher.

fn leading(
    w: &mut World,
    who: Who,
    account: AccountId,
    number: u64,
    began: Epoch,
) -> Option<&mut Leading> {
    let session = same(w, who, account, number)?;
    session.lead.as_mut().filter(|leading| leading.began == began)
}

fn look(w: &mut World, who: Who, account: AccountId, number: u64, began: Epoch) {
    if leading(w, who, account, number, began).is_none() {
        return;
    }
    pump_publisher(w, who, account);
    w.after(LOOK, Some(who), move |w| look(w, who, account, number, began));
}

fn beacon(w: &mut World, who: Who, account: AccountId, number: u64, began: Epoch) {
    let wall = now(w, who).wall;
    let Some(leading) = leading(w, who, account, number, began) else { return };
    leading.core.push_beacon(wall);
    pump_publisher(w, who, account);
    w.after(BEACON, Some(who), move |w| beacon(w, who, account, number, began));
}

/// The client lost its connection, or has a new one.
pub(crate) fn bus_changed(w: &mut World, who: Who) {
    let accounts: Vec<AccountId> = w.process(who).sessions.keys().copied().collect();
    for account in accounts {
        pump_publisher(w, who, account);
    }
}

/// Looks at connection and permit, and sends what waits.
fn pump_publisher(w: &mut World, who: Who, account: AccountId) {
    let at = now(w, who);
    let process = w.process(who);
    let bus = process.bus;
    let gate = process.gate.clone();
    let Some(session) = process.sessions.get_mut(&account) else { return };
    let token = session.tenure.token;
    let permitted = gate.may_speak(account, token, at.node);
    let Some(leading) = &mut session.lead else { return };
    if leading.core.superseded().is_some() {
        return;
    }
    let same = leading.spoken_on == Some(bus.number);
    if !(bus.is_up && permitted && same) {
        if leading.spoken_on.take().is_some() {
            leading.silent_because =
                if bus.is_up && same { EpochReason::PermitLost } else { EpochReason::Disconnected };
            leading.core.go_offline();
        }
        if !(bus.is_up && permitted) {
            return;
        }
        leading.spoken_on = Some(bus.number);
        leading.core.go_online(at.wall, leading.silent_because);
    }
    let messages: Vec<Message> = leading
        .core
        .take(usize::MAX)
        .into_iter()
        .map(|outgoing| match outgoing {
            Outgoing::Event { event, .. } => Message::Event(std::sync::Arc::new(event)),
            Outgoing::Beacon(state) => Message::Beacon(beacon_of(leading, account, &state)),
        })
        .collect();
    let _counted = leading.core.take_raised();
    for message in messages {
        crate::oracle::published(w, who, account, token);
        crate::bus::publish(w, who, account, message.clone());
        // Followers here need not wait for the bus, which brings it a second time.
        if let Message::Event(event) = message
            && w.plan.local_path
        {
            w.after(0, Some(who), move |w| crate::feed::hear_here(w, who, account, event));
        }
    }
    answer(w, who, account);
}

fn beacon_of(leading: &mut Leading, account: AccountId, state: &StateAt) -> Beacon {
    let position = (state.epoch, state.seq);
    let digest = match leading.digest {
        Some((known, digest)) if known == position => digest,
        _ => state.book.digest(),
    };
    leading.digest = Some((position, digest));
    Beacon {
        account,
        epoch: state.epoch,
        seq: state.seq,
        at: state.at,
        open_trades: state.book.positions.len() as u32,
        open_pendings: state.book.pendings.len() as u32,
        digest,
        funds: state.funds.clone(),
    }
}

/// Another publisher of the account hears what one said.
pub(crate) fn overhear(w: &mut World, from: Who, account: AccountId, message: &Message) {
    let position = match message {
        Message::Event(event) => (event.epoch, event.seq),
        Message::Beacon(beacon) => (beacon.epoch, beacon.seq),
        Message::Garbage => return,
    };
    for to in publishers_of(w, account) {
        if to == from {
            continue;
        }
        let wait = w.rng.range(MS, 50 * MS);
        w.after(wait, Some(to), move |w| {
            if let Some(session) = get(w, to, account)
                && let Some(leading) = &mut session.lead
            {
                leading.core.hear(position.0, position.1);
            }
        });
    }
}

/// The processes that have a publisher for this account on the bus.
pub(crate) fn publishers_of(w: &World, account: AccountId) -> Vec<Who> {
    let nodes = w.machines.iter().enumerate();
    nodes
        .filter_map(|(node, machine)| {
            let process = machine.process.as_ref()?;
            let leads = process.sessions.get(&account).is_some_and(|s| s.lead.is_some());
            (process.bus.is_up && leads).then_some(Who { node, incarnation: machine.incarnation })
        })
        .collect()
}

/// Somebody asks for a snapshot.
pub(crate) fn asked(
    w: &mut World,
    who: Who,
    account: AccountId,
    asker: Who,
    heard: Option<Epoch>,
    number: u64,
) {
    let Some(session) = get(w, who, account) else { return };
    let Some(leading) = &mut session.lead else { return };
    if let Some(heard) = heard {
        // A database that lost commits may have forgotten an epoch that others remember (H28).
        leading.core.hear(heard, Seq::ZERO);
    }
    leading.askers.push((asker, heard, number));
    pump_publisher(w, who, account);
}

fn answer(w: &mut World, who: Who, account: AccountId) {
    let wall = now(w, who).wall;
    let at = w.now;
    let Some(session) = get(w, who, account) else { return };
    let Some(leading) = &mut session.lead else { return };
    let spaced = leading.answered_at.is_none_or(|before| at >= before + REPLY_SPACING);
    if leading.askers.is_empty() || !spaced {
        return;
    }
    let askers = std::mem::take(&mut leading.askers);
    if !leading.core.speaks() || leading.spoken_on.is_none() {
        return;
    }
    let Some(state) = leading.core.state(wall) else { return };
    leading.answered_at = Some(at);
    let snapshot = state.to_snapshot(account);
    for (asker, heard, number) in askers {
        crate::bus::reply(w, who, asker, heard, number, snapshot.clone());
    }
}

/// Whether the follower of this process was told that the link is paused.
pub(crate) fn is_told_paused(w: &World, who: Who, account: AccountId, link: LinkId) -> bool {
    let process = w.machines[who.node].process.as_ref();
    let session = process.and_then(|process| process.sessions.get(&account));
    session.is_some_and(|session| session.paused.contains(&link))
}

/// The links of this follower, as a session that copies them knows their masters.
pub(crate) fn told_of(w: &World, who: Who, account: AccountId, link: LinkId) -> Option<&Book> {
    let master = w.links.get(&link)?.rules.master;
    let process = w.machines[who.node].process.as_ref()?;
    process.sessions.get(&account)?.told.get(&master).map(|(_, _, book)| book)
}
