//! The brokers: the paper broker's engine, connections to it, orders on their way, and the people
//! who trade on the master accounts.

use crate::plan::{
    FOLLOWERS_FROM, Fault, MASTERS, MS, Plan, SECOND, Style as PlanStyle, TRADING_FROM,
};
use crate::world::{Who, World, account};
use lockstep::broker::paper::event_of;
use lockstep::broker::{Outcome, SessionEvent, waits_for_the_sync_mark};
use lockstep::follower::{Attempt, TicketKey};
use paper::engine::{Effects, Engine};
use paper::faults::Settings;
use paper::protocol::{
    AccountChange, AccountDecl, FeedQuote, Instruction, OpenComment, OrderMeta, OrderReply, Push,
    Style,
};
use rust_decimal::Decimal;
use schemas::{
    AccountId, AccountSnapshot, ClosedTrade, FollowerTicket, Lots, Micros, NodeId, OrderRequest,
    PendingKind, Price, Quote, RejectClass, Rejection, Side, Symbol, SymbolSpec, Token,
};
use std::collections::BTreeMap;

/// What fence and settle time cover.
const DELIVERY_MAX: u64 = (crate::node::FENCE.as_micros() + crate::node::SETTLE.as_micros()) as u64;
/// Trades a master holds at most.
const OPEN_MAX: usize = 40;

/// One session of one account, as the broker knows it.
pub(crate) struct BrokerConnection {
    pub(crate) account: AccountId,
    pub(crate) who: Who,
    /// The broker sends nothing more; what is on its way still arrives.
    pub(crate) is_gone: bool,
    /// The client hears nothing more.
    is_cut: bool,
    /// Last thing that is on its way to the client.
    last_arrival: u64,
    /// Before this the lists are not complete.
    pub(crate) synced_at: u64,
}

/// An order on its way.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) connection: u64,
    pub(crate) who: Who,
    pub(crate) account: AccountId,
    pub(crate) key: TicketKey,
    pub(crate) attempt: Attempt,
    pub(crate) request: OrderRequest,
    pub(crate) token: Token,
    pub(crate) margin_us: i64,
    /// The master's volume when it was decided.
    pub(crate) master_lots: Option<Lots>,
    pub(crate) checked_at: u64,
    pub(crate) written_at: u64,
    /// No reset of the connection stops it.
    pub(crate) is_beyond_reset: bool,
    /// A freeze after the last check, or a delivery that took longer than any answer: its outcome is
    /// not waited for.
    pub(crate) is_late: bool,
    /// It was carried out later after its last check than fence and settle time cover.
    pub(crate) is_excused: bool,
}

pub(crate) struct Brokers {
    pub(crate) engine: Engine,
    pub(crate) connections: BTreeMap<u64, BrokerConnection>,
    connection_last: u64,
    pub(crate) orders: BTreeMap<u64, Order>,
    order_last: u64,
    mids: BTreeMap<&'static str, i64>,
}

/// Symbol, first price in points, digits.
const SYMBOLS: [(&str, i64, u32); 2] = [("EURUSD", 110_000, 5), ("XAUUSD", 195_000, 2)];
/// Points between bid and ask.
const SPREAD: i64 = 4;

pub(crate) fn symbol(name: &str) -> Symbol {
    Symbol::new(name).expect("a valid name")
}

fn price(points: i64, digits: u32) -> Price {
    Price::new(Decimal::new(points, digits)).expect("above zero")
}

pub(crate) fn lots(hundredths: i64) -> Lots {
    Lots::new(Decimal::new(hundredths, 2)).expect("above zero")
}

impl Brokers {
    pub(crate) fn new(plan: &Plan) -> Brokers {
        let mut engine = Engine::default();
        let mut decls: Vec<AccountDecl> =
            (1..=MASTERS).map(|id| AccountDecl::new(account(id), master_style(plan, id))).collect();
        for (id, follower) in plan.follower_ids().zip(&plan.followers) {
            let style = match follower.style {
                PlanStyle::Mt4 => Style::Mt4,
                PlanStyle::Mt5 | PlanStyle::Blank | PlanStyle::Prefixed => Style::Mt5,
            };
            let mut decl = AccountDecl::new(account(id), style);
            match follower.style {
                PlanStyle::Blank => decl.comment_open = OpenComment::Blank,
                PlanStyle::Prefixed => decl.comment_open = OpenComment::Prefix("srv:".into()),
                PlanStyle::Mt4 | PlanStyle::Mt5 => {}
            }
            decls.push(decl);
        }
        engine.declare_accounts(decls).expect("distinct accounts");
        let specs = SYMBOLS.iter().map(|(name, _, digits)| SymbolSpec {
            symbol: symbol(name),
            digits: *digits,
            lots_step: lots(1),
            lots_min: lots(1),
            lots_max: lots(5_000),
            contract_size: None,
            stops_level_points: 0,
        });
        engine.declare_symbols(specs.collect()).expect("distinct symbols");
        Brokers {
            engine,
            connections: BTreeMap::new(),
            connection_last: 0,
            orders: BTreeMap::new(),
            order_last: 0,
            mids: SYMBOLS.iter().map(|(name, mid, _)| (*name, *mid)).collect(),
        }
    }
}

impl Brokers {
    /// The sessions of an account that the broker still serves.
    pub(crate) fn sessions_of(&self, id: AccountId) -> Vec<u64> {
        let of_account = self.connections.iter().filter(|(_, c)| c.account == id && !c.is_gone);
        of_account.map(|(number, _)| *number).collect()
    }
}

/// One master trades at a broker that renumbers.
fn master_style(plan: &Plan, id: u64) -> Style {
    if (plan.seed + id).is_multiple_of(3) { Style::Mt4 } else { Style::Mt5 }
}

/// The follower's broker renumbers the rest of a partial close.
pub(crate) fn renumbers(w: &World, follower: AccountId) -> bool {
    let place = w.plan.follower_ids().position(|id| id == follower.get());
    place.is_some_and(|place| w.plan.followers[place].style == PlanStyle::Mt4)
}

impl World {
    pub(crate) fn broker_now(&self) -> paper::clock::Now {
        paper::clock::Now { mono_us: self.now, wall: self.true_wall() }
    }

    fn broker_latency(&mut self) -> u64 {
        let mean = self.plan.latencies[2];
        self.rng.latency(mean)
    }

    pub(crate) fn is_cut_from_broker(&self, node: usize) -> bool {
        self.active.values().any(|f| matches!(f, Fault::BrokerCut { node: n } if *n == node))
    }

    fn broker_share(&self, which: impl Fn(&Fault) -> Option<f64>) -> f64 {
        self.active.values().find_map(which).unwrap_or(0.0)
    }
}

/// Prices move and masters trade, until nobody may any more.
pub(crate) fn begin(w: &mut World) {
    w.after(0, None, move_prices);
    for master in 1..=MASTERS {
        w.at(TRADING_FROM, None, move |w| act(w, master));
    }
}

fn move_prices(w: &mut World) {
    let mut quotes = Vec::new();
    for (name, first, digits) in SYMBOLS {
        let by = w.rng.range(0, 31) as i64 - 15;
        let mid = w.brokers.mids.get_mut(name).expect("listed");
        *mid = (*mid + by).clamp(first / 2, first * 2);
        let (bid, ask) = (price(*mid, digits), price(*mid + SPREAD, digits));
        quotes.push(FeedQuote { symbol: symbol(name), bid, ask });
    }
    let mut effects = Effects::default();
    let now = w.broker_now();
    w.brokers.engine.feed(now, &quotes, &mut effects).expect("declared symbols");
    tell(w, effects);
    let wait = if w.now < w.plan.faults_until { w.rng.range(500 * MS, 2 * SECOND) } else { SECOND };
    w.after(wait, None, move_prices);
}

/// Somebody trades on a master account.
fn act(w: &mut World, master: u64) {
    if w.now >= w.plan.faults_until {
        return;
    }
    let id = account(master);
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let open: Vec<FollowerTicket> = book.positions.iter().map(|p| p.ticket).collect();
    let waiting: Vec<FollowerTicket> = book.pendings.iter().map(|p| p.ticket).collect();
    let room = OPEN_MAX.saturating_sub(open.len());
    match w.rng.range(0, 20) {
        0..5 if room > 0 => {
            open_one(w, id);
        }
        5..7 if room > 0 => {
            // In and out within a moment.
            if let Some(ticket) = open_one(w, id) {
                let wait = w.rng.log(MS, 300 * MS);
                w.after(wait, None, move |w| {
                    by_hand(w, id, Instruction::Close { ticket, lots: None });
                });
            }
        }
        7..8 => {
            let count = w.rng.range(2, 28).min(room as u64);
            for _ in 0..count {
                open_one(w, id);
            }
        }
        8..9 => {
            for ticket in open {
                by_hand(w, id, Instruction::Close { ticket, lots: None });
            }
        }
        9..12 if !open.is_empty() => {
            let ticket = *w.rng.pick(&open);
            by_hand(w, id, Instruction::Close { ticket, lots: None });
        }
        12..15 if !open.is_empty() => {
            let ticket = *w.rng.pick(&open);
            let held = book.positions.iter().find(|p| p.ticket == ticket).expect("listed").lots;
            let steps = (held.get() * Decimal::from(100)).trunc().try_into().unwrap_or(1_i64);
            if steps > 1 {
                let part = lots(w.rng.range(1, steps as u64) as i64);
                by_hand(w, id, Instruction::Close { ticket, lots: Some(part) });
            }
        }
        15..17 if !open.is_empty() => {
            let ticket = *w.rng.pick(&open);
            let position = book.positions.iter().find(|p| p.ticket == ticket).expect("listed");
            let (stop_loss, take_profit) = far_stops(w, &position.symbol, position.side);
            by_hand(w, id, Instruction::Modify { ticket, stop_loss, take_profit });
        }
        17..19 if room > 0 => place_one(w, id),
        19..20 if !waiting.is_empty() => {
            let ticket = *w.rng.pick(&waiting);
            by_hand(w, id, Instruction::Cancel { ticket });
        }
        _ => {}
    }
    let pace = w.plan.pace;
    let wait = w.rng.latency(pace);
    w.after(wait, None, move |w| act(w, master));
}

fn open_one(w: &mut World, id: AccountId) -> Option<FollowerTicket> {
    let (name, _, _) = *w.rng.pick(&SYMBOLS);
    let side = if w.rng.chance(0.5) { Side::Buy } else { Side::Sell };
    let volume = lots(w.rng.range(1, 300) as i64);
    let (stop_loss, take_profit) =
        if w.rng.chance(0.3) { far_stops(w, &symbol(name), side) } else { (None, None) };
    let open = Instruction::Open {
        symbol: symbol(name),
        side,
        lots: volume,
        stop_loss,
        take_profit,
        magic: 0,
        comment: String::new(),
    };
    by_hand(w, id, open)
}

fn digits_of(symbol: &Symbol) -> (i64, u32) {
    let listed = SYMBOLS.iter().find(|(name, _, _)| *name == symbol.as_str());
    listed.map(|(_, mid, digits)| (*mid, *digits)).expect("a listed symbol")
}

fn far_stops(w: &mut World, symbol: &Symbol, side: Side) -> (Option<Price>, Option<Price>) {
    let (_, digits) = digits_of(symbol);
    let mid = w.brokers.mids[symbol.as_str()];
    // Near enough that some of them are hit within the run.
    let below = price(mid - w.rng.range(40, 900) as i64, digits);
    let above = price(mid + w.rng.range(40, 900) as i64, digits);
    match side {
        Side::Buy => (Some(below), Some(above)),
        Side::Sell => (Some(above), Some(below)),
    }
}

fn place_one(w: &mut World, id: AccountId) {
    let (name, _, digits) = *w.rng.pick(&SYMBOLS);
    let mid = w.brokers.mids[name];
    let away = w.rng.range(10, 200) as i64;
    let (kind, points) = match w.rng.range(0, 4) {
        0 => (PendingKind::BuyLimit, mid - away),
        1 => (PendingKind::SellLimit, mid + SPREAD + away),
        2 => (PendingKind::BuyStop, mid + SPREAD + away),
        _ => (PendingKind::SellStop, mid - away),
    };
    let volume = lots(w.rng.range(1, 200) as i64);
    let place = Instruction::Place {
        symbol: symbol(name),
        kind,
        lots: volume,
        price: price(points, digits),
        stop_loss: None,
        take_profit: None,
        magic: 0,
        comment: String::new(),
    };
    by_hand(w, id, place);
}

/// An instruction of a person; the ticket where one came of it.
pub(crate) fn by_hand(
    w: &mut World,
    id: AccountId,
    instruction: Instruction,
) -> Option<FollowerTicket> {
    let mut effects = Effects::default();
    let now = w.broker_now();
    let settings = Settings::default();
    let reply = w
        .brokers
        .engine
        .order(now, id, None, &instruction, settings, &mut effects)
        .expect("declared");
    w.note(|| format!("account {id} by hand: {instruction:?} -> {reply:?}"));
    tell(w, effects);
    match reply {
        OrderReply::Done(done) => Some(done.ticket),
        _ => None,
    }
}

/// Tells the sessions what changed.
fn tell(w: &mut World, effects: Effects) {
    for (id, push) in effects.changes {
        let Push::Change { change, funds, .. } = push else { continue };
        crate::oracle::account_changed(w, id, &change);
        let numbers = w.brokers.sessions_of(id);
        for number in numbers {
            let event = event_of(change.clone());
            let funds = funds.clone();
            to_client(w, number, move |w, who, id| {
                if let Some(event) = event {
                    crate::session::broker_says(w, who, id, number, event);
                }
                crate::session::broker_says(w, who, id, number, SessionEvent::Funds(funds));
            });
        }
    }
}

/// Something travels to the client, behind what is on its way already.
fn to_client(w: &mut World, number: u64, deed: impl FnOnce(&mut World, Who, AccountId) + 'static) {
    let at = w.now + w.broker_latency();
    let Some(connection) = w.brokers.connections.get_mut(&number) else { return };
    if connection.is_gone {
        return;
    }
    let at = at.max(connection.last_arrival);
    connection.last_arrival = at;
    let (who, id) = (connection.who, connection.account);
    w.at(at, Some(who), move |w| {
        let there = w.brokers.connections.get(&number).is_some_and(|c| !c.is_cut);
        if there {
            deed(w, who, id);
        }
    });
}

/// A session logs in; its lists come when the broker has them together.
pub(crate) fn log_in(
    w: &mut World,
    who: Who,
    id: AccountId,
    then: impl FnOnce(&mut World, Option<(u64, AccountSnapshot, Vec<SymbolSpec>)>) + 'static,
) {
    if w.is_cut_from_broker(who.node) {
        let wait = w.rng.range(SECOND, 10 * SECOND);
        w.after(wait, Some(who), move |w| then(w, None));
        return;
    }
    let there = w.broker_latency();
    w.after(there, None, move |w| {
        let now = w.now;
        // A second session of an account ends the first.
        let older = w.brokers.sessions_of(id);
        for number in older {
            w.reach("session_kicked");
            drop_connection(w, number);
        }
        let unsynced = w.active.values().find_map(|f| match f {
            Fault::BrokerUnsynced { lasts } => Some(*lasts),
            _ => None,
        });
        let synced_at = now + unsynced.unwrap_or(0);
        w.brokers.connection_last += 1;
        let number = w.brokers.connection_last;
        w.brokers.connections.insert(
            number,
            BrokerConnection {
                account: id,
                who,
                is_gone: false,
                is_cut: false,
                last_arrival: now,
                synced_at,
            },
        );
        let wait = if waits_for_the_sync_mark() { synced_at } else { now };
        w.at(wait, None, move |w| {
            let snapshot = listed(w, number, id);
            let symbols = w.brokers.engine.symbols(id).expect("declared");
            if unsynced.is_some() {
                w.reach("lists_unsynced_after_login");
            }
            to_client(w, number, move |w, _, _| then(w, Some((number, snapshot, symbols))));
        });
    });
}

/// What the broker lists of an account on this connection: not complete before its sync mark.
fn listed(w: &World, number: u64, id: AccountId) -> AccountSnapshot {
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let is_synced = w.brokers.connections.get(&number).is_some_and(|c| w.now >= c.synced_at);
    AccountSnapshot {
        account: id,
        revision: book.revision,
        at: w.true_wall(),
        positions: if is_synced { book.positions } else { Vec::new() },
        pendings: if is_synced { book.pendings } else { Vec::new() },
        funds: Some(book.funds),
    }
}

/// A complete read: the account first, its history last.
pub(crate) fn read(
    w: &mut World,
    number: u64,
    who: Who,
    since: Micros,
    then: impl FnOnce(&mut World, Option<(AccountSnapshot, Vec<ClosedTrade>, Vec<Quote>)>) + 'static,
) {
    let there = w.broker_latency();
    let Some(connection) = w.brokers.connections.get(&number) else { return };
    let id = connection.account;
    if w.is_cut_from_broker(who.node) {
        w.after(5 * SECOND, Some(who), move |w| then(w, None));
        return;
    }
    w.after(there, None, move |w| {
        let snapshot = listed(w, number, id);
        let between = w.broker_latency();
        w.after(between, None, move |w| {
            let trades = history(w, id, since);
            let quotes = w.brokers.engine.quotes(id).expect("declared");
            to_client(w, number, move |w, _, _| then(w, Some((snapshot, trades, quotes))));
        });
    });
}

pub(crate) fn history(w: &World, id: AccountId, since: Micros) -> Vec<ClosedTrade> {
    let mut trades = Vec::new();
    let mut after = 0;
    loop {
        let page = w.brokers.engine.history(id, since, after).expect("declared");
        trades.extend(page.trades);
        match page.next {
            Some(next) => after = next,
            None => return trades,
        }
    }
}

/// The bytes of an order leave.
pub(crate) fn write(w: &mut World, mut order: Order) {
    order.written_at = w.now;
    let slow = w.active.values().find_map(|f| match f {
        Fault::BrokerDelivers { by } => Some(*by),
        _ => None,
    });
    let mut wait = w.broker_latency();
    if let Some(by) = slow {
        wait += w.rng.range(0, by);
    }
    if w.is_cut_from_broker(order.who.node) {
        w.reach("order_written_into_the_void");
        return;
    }
    let road = w.active.values().find_map(|f| match f {
        Fault::LateRoad { node, by } if *node == order.who.node => Some(*by),
        _ => None,
    });
    if let Some(by) = road.filter(|_| w.rng.chance(0.5)) {
        order.is_beyond_reset = true;
        wait = by;
    }
    w.brokers.order_last += 1;
    let number = w.brokers.order_last;
    w.brokers.orders.insert(number, order);
    w.after(wait, None, move |w| arrive(w, number));
}

fn arrive(w: &mut World, number: u64) {
    let Some(order) = w.brokers.orders.get_mut(&number) else { return };
    let waited = w.now - order.written_at;
    if waited > crate::node::BROKER_CALL_LIMIT.as_micros() as u64 {
        order.is_late = true;
    }
    let order = order.clone();
    crate::oracle::order_arrived(w, &order);
    let slow = w.active.values().find_map(|f| match f {
        Fault::BrokerAccepts { by } => Some(*by),
        _ => None,
    });
    let wait = slow.map_or(0, |by| w.rng.range(0, by));
    w.after(wait, None, move |w| execute(w, number));
}

fn execute(w: &mut World, number: u64) {
    let Some(mut order) = w.brokers.orders.remove(&number) else { return };
    order.is_excused = w.now - order.checked_at > DELIVERY_MAX;
    let requotes =
        w.broker_share(
            |f| if let Fault::BrokerRequotes { share } = f { Some(*share) } else { None },
        );
    let rejects = w
        .broker_share(|f| if let Fault::BrokerRejects { share } = f { Some(*share) } else { None });
    let loses = w.broker_share(|f| {
        if let Fault::BrokerLosesAnswers { share } = f { Some(*share) } else { None }
    });
    let reply = if requotes > w.rng.unit() {
        w.reach("requote");
        rejected(RejectClass::Requote)
    } else if rejects > w.rng.unit() {
        let classes =
            [RejectClass::Later, RejectClass::NoMoney, RejectClass::Invalid, RejectClass::Disabled];
        let class = *w.rng.pick(&classes);
        rejected(class)
    } else {
        carry_out(w, &order)
    };
    w.note(|| {
        let Order { account, key, request, token, .. } = &order;
        format!("account {account} {key:?} token {token}: {request:?} -> {reply:?}")
    });
    if loses > w.rng.unit() {
        w.reach("answer_lost");
        return;
    }
    let slow = w.active.values().find_map(|f| match f {
        Fault::BrokerAnswers { by } => Some(*by),
        _ => None,
    });
    let wait = w.rng.range(20 * MS, 200 * MS) + slow.map_or(0, |by| w.rng.range(0, by));
    let connection = order.connection;
    w.after(wait, None, move |w| {
        let outcome = match reply {
            OrderReply::Done(done) => Outcome::Done(done),
            OrderReply::Rejected(rejection) => Outcome::Rejected(rejection),
        };
        to_client(w, connection, move |w, who, id| {
            crate::session::answered(w, who, id, connection, order.key, order.attempt, outcome);
        });
    });
}

fn rejected(class: RejectClass) -> OrderReply {
    OrderReply::Rejected(Rejection { class, text: "by the world".into() })
}

fn carry_out(w: &mut World, order: &Order) -> OrderReply {
    let meta = OrderMeta {
        node: NodeId::new("sim").expect("a name"),
        token: order.token,
        deadline_margin_us: order.margin_us,
        sent_at_us: Micros(0),
        client_ref: order.attempt,
    };
    let instruction = Instruction::from(order.request.clone());
    let now = w.broker_now();
    let mut effects = Effects::default();
    let reply = w
        .brokers
        .engine
        .order(now, order.account, Some(&meta), &instruction, Settings::default(), &mut effects)
        .expect("declared");
    crate::oracle::order_executed(w, order, &reply);
    tell(w, effects);
    reply
}

/// The client closes its socket hard: what is still in its buffers is gone; what has left may
/// still arrive, unless it waits for a retransmission that will not come.
pub(crate) fn cut(w: &mut World, number: u64) {
    if let Some(connection) = w.brokers.connections.get_mut(&number) {
        connection.is_gone = true;
        connection.is_cut = true;
    }
    let now = w.now;
    let dropped: Vec<u64> = w
        .brokers
        .orders
        .iter()
        .filter(|(_, o)| {
            o.connection == number && !o.is_beyond_reset && now - o.written_at > 5 * SECOND
        })
        .map(|(number, _)| *number)
        .collect();
    for number in dropped {
        if w.rng.chance(0.5) {
            w.brokers.orders.remove(&number);
        }
    }
}

/// The broker ends a session; its client hears of it.
pub(crate) fn drop_connection(w: &mut World, number: u64) {
    to_client(w, number, move |w, who, id| {
        crate::session::broker_says(w, who, id, number, SessionEvent::Lost("by the broker".into()));
    });
    if let Some(connection) = w.brokers.connections.get(&number) {
        let (who, id) = (connection.who, connection.account);
        w.note(|| format!("account {id}: session {number} of node {} is ended", who.node));
    }
    if let Some(connection) = w.brokers.connections.get_mut(&number) {
        connection.is_gone = true;
    }
}

/// The way between a node and the brokers is cut: every session on it is lost, and its client
/// notices when its own limits pass.
pub(crate) fn cut_off(w: &mut World, node: usize) {
    let lost: Vec<(u64, Who, AccountId)> = w
        .brokers
        .connections
        .iter()
        .filter(|(_, c)| c.who.node == node && !c.is_gone)
        .map(|(number, c)| (*number, c.who, c.account))
        .collect();
    for (number, who, id) in lost {
        if let Some(connection) = w.brokers.connections.get_mut(&number) {
            connection.is_gone = true;
            connection.is_cut = true;
        }
        let noticed = w.rng.range(SECOND, 12 * SECOND);
        w.after(noticed, Some(who), move |w| {
            let lost = SessionEvent::Lost("no answer".into());
            crate::session::broker_says(w, who, id, number, lost);
        });
    }
}

/// The kernel closes the sockets of a dead process.
pub(crate) fn process_died(w: &mut World, who: Who) {
    let numbers: Vec<u64> = w
        .brokers
        .connections
        .iter()
        .filter(|(_, c)| c.who == who && !c.is_gone)
        .map(|(number, _)| *number)
        .collect();
    for number in numbers {
        cut(w, number);
    }
}

/// Somebody closes a copy by hand, or moves its stop.
pub(crate) fn meddle(w: &mut World, closes: bool) {
    let count = w.plan.followers.len() as u64;
    let id = account(FOLLOWERS_FROM + w.rng.range(0, count));
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    if book.positions.is_empty() {
        return;
    }
    let position = w.rng.pick(&book.positions).clone();
    if closes {
        w.reach("copy_closed_by_hand");
        by_hand(w, id, Instruction::Close { ticket: position.ticket, lots: None });
    } else {
        let (stop_loss, take_profit) = far_stops(w, &position.symbol, position.side);
        by_hand(w, id, Instruction::Modify { ticket: position.ticket, stop_loss, take_profit });
    }
}

/// The tickets that a change is about: what went, what came.
pub(crate) fn tickets_of(
    change: &AccountChange,
) -> (Option<FollowerTicket>, Option<FollowerTicket>) {
    match change {
        AccountChange::PositionOpened { position }
        | AccountChange::PositionModified { position }
        | AccountChange::PendingFilled { position } => (None, Some(position.ticket)),
        AccountChange::PositionReduced { position, closed }
        | AccountChange::PositionReversed { position, closed } => {
            (Some(closed.ticket), Some(position.ticket))
        }
        AccountChange::PositionClosed { closed, .. } => (Some(closed.ticket), None),
        AccountChange::PendingPlaced { pending } | AccountChange::PendingModified { pending } => {
            (None, Some(pending.ticket))
        }
        AccountChange::PendingCancelled { pending } => (Some(pending.ticket), None),
        AccountChange::FundsChanged {} => (None, None),
    }
}
