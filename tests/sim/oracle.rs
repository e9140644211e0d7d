//! The laws, judged from what really happened and not from what a node believes.
//!
//! The oracle knows true time, every order at the broker, every commit of the database and every
//! message that a follower was given. HAZARDS-style numbers name the laws: S for safety after
//! every step, L for what must be true once everything has healed and come to rest.

use crate::broker::{Order, tickets_of};
use crate::node::{FENCE, LEASE, SEND_RESERVE};
use crate::plan::{MASTERS, MS, Mode, SECOND, Style};
use crate::world::{Who, World, account};
use bus::{DoubtReason, FeedMessage};
use lockstep::account::lead::Lead;
use lockstep::follower::{Record, TicketKey};
use lockstep::lease::cycle::{CycleReply, DATABASE_STEP_MAX};
use lockstep::lease::memory::MemoryRow;
use lockstep::lease::share::claim_wait;
use lockstep::writer::batch::Batch;
use lockstep::writer::{EventOutcome, PairRow, Row, RowKind, RowOutcome};
use paper::protocol::{AccountChange, OrderReply};
use reconcile::{LinkMode, PairId, PairState, target_lots};
use schemas::{
    AccountId, Book, FollowerTicket, LinkId, Lots, MasterTicket, OrderRequest, SymbolSpec, Token,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// A node's clock may be wrong by this over a lease: 200 millionths of 60 s, and a step of the loop.
const CLOCK_ERROR: u64 = 20 * MS;
/// Past a jump of the database, a process that did not see it cannot know.
const JUMP_IS_UNKNOWN: u64 = 80 * SECOND;
/// A row that is not written after this long, with nothing broken, is stuck.
const WRITTEN_AFTER: u64 = 10 * SECOND;
/// L4: so long after everything has healed, all agrees.
const SETTLED_AFTER: u64 = 120 * SECOND;
/// Reconciles of a link in ten seconds, at most (L6).
const STORM: usize = 3;

/// A broken law.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub(crate) law: &'static str,
    pub(crate) what: String,
    pub(crate) at: u64,
}

#[derive(Debug, Clone, Copy)]
struct Tenure {
    who: Who,
    claimed_at: u64,
}

#[derive(Debug, Clone)]
struct Opened {
    ticket: FollowerTicket,
    lots: Lots,
    master_lots: Option<Lots>,
    is_excused: bool,
}

/// What is known of the true course of things.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) violation: Option<Violation>,
    pub(crate) orders: u64,
    pub(crate) opens: u64,
    pub(crate) excused_duplicates: u64,
    pub(crate) unpromised: u64,
    /// Smallest time that was left until the deadline at the last check, less the reserve.
    pub(crate) margin_min_us: Option<u64>,
    /// Until when a process may trust, by true time.
    trusted: BTreeMap<(AccountId, Who), (Token, u64)>,
    tenures: BTreeMap<AccountId, Tenure>,
    claims: u64,
    places: BTreeMap<(AccountId, Who, Token), u64>,
    arrived: BTreeMap<AccountId, u64>,
    opened: BTreeMap<TicketKey, Vec<Opened>>,
    copies: BTreeMap<(AccountId, FollowerTicket), TicketKey>,
    ended: BTreeSet<TicketKey>,
    cancelled: BTreeSet<TicketKey>,
    /// Copies whose broker gave their rest a new number, and took the tag off it.
    renumbered: BTreeSet<TicketKey>,
    /// Copies whose rows a failover may have lost.
    rows_lost: BTreeSet<TicketKey>,
    /// An order of theirs came later than fence and settle time cover.
    excused: BTreeSet<TicketKey>,
    decided: BTreeSet<TicketKey>,
    /// Copies that were found by their tag, or otherwise without their row.
    adopted: BTreeSet<TicketKey>,
    /// Accounts whose last session ended with an order unanswered.
    unanswered: BTreeSet<AccountId>,
    /// When an account that had to wait longer was claimed (H19).
    waited_until: BTreeMap<AccountId, u64>,
    /// When a final row of a ticket was first committed.
    finals: BTreeMap<TicketKey, u64>,
    leads: BTreeMap<AccountId, Lead>,
    truth: BTreeMap<AccountId, Book>,
    plans: BTreeMap<AccountId, VecDeque<u64>>,
    /// A jump of the database was not seen by a process that claimed after it.
    overlaps: BTreeSet<AccountId>,
}

fn us(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn opens(request: &OrderRequest) -> bool {
    matches!(request, OrderRequest::Open { .. } | OrderRequest::Place { .. })
}

// Leases.

/// A step of the database's clock that no node can tell from a slow cycle; the fence covers it.
fn step_unseen(w: &World) -> u64 {
    let limit = crate::db::QUERY_LIMIT + us(DATABASE_STEP_MAX);
    if w.db.jumped_at.is_some_and(|at| w.now < at + JUMP_IS_UNKNOWN) { limit } else { 0 }
}

/// A lease transaction changed this row.
pub(crate) fn ownership_committed(
    w: &mut World,
    id: AccountId,
    before: &MemoryRow,
    after: &MemoryRow,
    who: Who,
) {
    if before.token == after.token {
        if after.node_id.is_none() {
            w.note(|| format!("{id} is given back by node {}", who.node));
            given_back(w, id, who);
        }
        return;
    }
    w.note(|| {
        let kind = if before.node_id.is_some() { "expired" } else { "free" };
        format!("{id} is claimed by node {} with token {}, {kind}", who.node, after.token)
    });
    if before.node_id.is_some() {
        w.reach("takeover");
        if before.starts >= 2 {
            w.oracle.waited_until.insert(id, w.now);
        }
        if w.oracle.unanswered.remove(&id) {
            w.reach("takeover_with_an_order_in_flight");
        }
    } else {
        w.reach("claim_of_a_free_account");
    }
    claimed_while_trusted(w, id, who);
    let now = w.now;
    w.oracle.claims += 1;
    let place = w.oracle.claims;
    let tenure = Tenure { who, claimed_at: now };
    w.oracle.tenures.insert(id, tenure);
    w.oracle.places.insert((id, who, after.token), place);
}

/// S3: nobody else may still trust the account, not even a tenure whose claim a failover has taken
/// back.
fn claimed_while_trusted(w: &mut World, id: AccountId, who: Who) {
    let now = w.now;
    let others = w.oracle.trusted.iter().filter(|((of, by), _)| *of == id && *by != who);
    let until = others.map(|(_, (_, until))| *until + us(FENCE)).max();
    let Some(until) = until.filter(|until| now + CLOCK_ERROR + step_unseen(w) < *until) else {
        return;
    };
    // After one such claim, the next one may meet the same tenure.
    if is_jump_unseen(w, who) || w.oracle.overlaps.contains(&id) {
        w.oracle.unpromised += 1;
        w.oracle.overlaps.insert(id);
        return;
    }
    let early = (until - now) as f64 / SECOND as f64;
    w.violate(
        "S3",
        format!(
            "account {id}: claimed by node {} {early:.3} s before the owner's lease could end",
            who.node
        ),
    );
}

/// The database jumped, and this process had no answer of it before: it has nothing to compare with.
fn is_jump_unseen(w: &World, who: Who) -> bool {
    let first_answer = w.machines[who.node].process.as_ref().and_then(|p| p.first_answer_at);
    w.db.jumped_at.is_some_and(|at| {
        first_answer.is_none_or(|answer| answer >= at) && w.now < at + JUMP_IS_UNKNOWN
    })
}

fn given_back(w: &mut World, id: AccountId, who: Who) {
    w.reach("given_back");
    w.oracle.trusted.remove(&(id, who));
    let flying = w.brokers.orders.values().find(|o| {
        o.account == id && o.who == who && w.now - o.written_at < 10 * SECOND && !o.is_late
    });
    if let Some(order) = flying {
        let request = format!("{:?}", order.request);
        w.violate("S20", format!("account {id} is given back with an order in flight: {request}"));
    }
    if w.is_alive(who) && w.process(who).writer.queue.pending(id) > 0 {
        w.violate("S20", format!("account {id} is given back with rows unwritten"));
    }
}

/// The database's past changed: what it had promised since is void.
pub(crate) fn history_lost(w: &mut World) {
    w.reach("failover");
    w.oracle.finals.clear();
    let rows_lost: Vec<TicketKey> = w.oracle.copies.values().copied().collect();
    w.oracle.rows_lost.extend(rows_lost);
}

/// S16, after each commit of a lease transaction.
pub(crate) fn capacity(w: &mut World, who: Who) {
    let Some(process) = &w.machines[who.node].process else { return };
    let id = process.id.as_str();
    let owned = w.db.committed.rows.values().filter(|r| r.node_id.as_deref() == Some(id)).count();
    let capacity = w.machines[who.node].capacity as usize;
    if owned > capacity {
        w.violate("S16", format!("node {} owns {owned} of at most {capacity}", who.node));
    }
}

/// A process learns what was confirmed.
pub(crate) fn cycle_answered(w: &mut World, who: Who, reply: &CycleReply) {
    let until = w.process(who).cycle_started + us(LEASE) - us(FENCE);
    let claimed = reply.claimed.iter().map(|row| row.tenure);
    let owned: BTreeMap<AccountId, Token> =
        reply.owned.iter().map(|row| (row.tenure.account, row.tenure.token)).collect();
    let renewed = reply.renewed.iter().filter_map(|id| Some((*id, *owned.get(id)?)));
    let confirmed: Vec<(AccountId, Token)> =
        claimed.map(|key| (key.account, key.token)).chain(renewed).collect();
    for (id, token) in confirmed {
        w.oracle.trusted.insert((id, who), (token, until));
    }
}

fn is_trusted(
    w: &World,
    id: AccountId,
    who: Who,
    token: Token,
    reserve: u64,
) -> Result<u64, String> {
    match w.oracle.trusted.get(&(id, who)) {
        None => Err("nothing was ever confirmed".into()),
        Some((held, _)) if *held != token => Err(format!("confirmed is token {held}")),
        Some((_, until)) if w.now + reserve > until + CLOCK_ERROR => {
            Err(format!("{:.3} s too late", (w.now + reserve - until) as f64 / SECOND as f64))
        }
        Some((_, until)) => Ok((until + CLOCK_ERROR).saturating_sub(w.now + reserve)),
    }
}

// Orders.

/// A session ended, or its process, with so many orders unanswered.
pub(crate) fn session_ended(w: &mut World, id: AccountId, unanswered: usize) {
    if unanswered > 0 {
        w.oracle.unanswered.insert(id);
    } else {
        w.oracle.unanswered.remove(&id);
    }
}

/// The last check has just let an order pass.
pub(crate) fn order_leaves(w: &mut World, order: &Order) {
    let Order { account: id, who, token, .. } = *order;
    w.oracle.orders += 1;
    match is_trusted(w, id, who, token, us(SEND_RESERVE)) {
        Ok(margin) => {
            let least = w.oracle.margin_min_us.get_or_insert(margin);
            *least = (*least).min(margin);
        }
        Err(why) => {
            w.violate(
                "S2",
                format!("account {id}: node {} sends under token {token}: {why}", who.node),
            );
        }
    }
}

/// A follower wants an order sent, and has a permit.
pub(crate) fn order_decided(w: &mut World, order: &mut Order) {
    let told = crate::session::told_of(w, order.who, order.account, order.key.link);
    order.master_lots = told.and_then(|book| {
        let position = book.positions.get(&order.key.ticket).map(|p| p.lots);
        position.or_else(|| book.pendings.get(&order.key.ticket).map(|p| p.lots))
    });
    if opens(&order.request) {
        open_decided(w, order);
    }
    if crate::session::is_told_paused(w, order.who, order.account, order.key.link) {
        w.violate("pause", format!("{:?} is paused, and {:?} leaves", order.key, order.request));
    }
    match &order.request {
        OrderRequest::Close { ticket, lots: None } => close_decided(w, order.account, *ticket),
        OrderRequest::Cancel { ticket } => cancel_decided(w, order.account, *ticket, order.key),
        _ => {}
    }
}

fn open_decided(w: &mut World, order: &Order) {
    let Order { account: id, who, key, .. } = *order;
    let is_excused = w.oracle.overlaps.contains(&id) || w.oracle.excused.contains(&key);
    if w.oracle.ended.contains(&key) && !is_excused {
        w.violate("S5", format!("{key:?} had a copy that ended, and is opened again"));
    }
    let tenure = w.oracle.tenures.get(&id).copied();
    if let (Some(at), Some(tenure)) = (w.oracle.finals.get(&key), tenure)
        && *at < tenure.claimed_at
    {
        w.violate("S19", format!("{key:?} was decided for good before this tenure, and is opened"));
    }
    let told = crate::session::told_of(w, who, id, key.link);
    let told = told.map(|book| {
        let position = book.positions.get(&key.ticket);
        (position.map(|p| p.side), book.pendings.contains_key(&key.ticket))
    });
    let cause = match (&order.request, told) {
        (OrderRequest::Open { side, .. }, Some((Some(held), _))) => *side == held,
        (OrderRequest::Place { .. }, Some((_, is_pending))) => is_pending,
        _ => false,
    };
    if !cause {
        w.violate("S6", format!("{key:?} is opened, and its master holds nothing of the kind"));
    }
}

fn truth_of(w: &World, link: LinkId) -> Option<&Book> {
    let master = w.links.get(&link)?.rules.master;
    w.oracle.truth.get(&master)
}

/// Whether a pause held anything back.
pub(crate) fn pause_ended(w: &mut World, link: LinkId) {
    let id = w.links[&link].rules.follower;
    let truth = truth_of(w, link).cloned().unwrap_or_default();
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let key = |ticket| w.oracle.copies.get(&(id, ticket)).filter(|key| key.link == link);
    let held: BTreeSet<MasterTicket> =
        book.positions.iter().filter_map(|p| key(p.ticket)).map(|key| key.ticket).collect();
    if truth.positions.keys().any(|ticket| !held.contains(ticket)) {
        w.reach("pause_ended_over_an_open");
    }
    if held.iter().any(|ticket| !truth.positions.contains_key(ticket)) {
        w.reach("pause_ended_over_an_end");
    }
}

fn copies_held(w: &World, id: AccountId, key: TicketKey) -> usize {
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let positions = book.positions.iter().map(|p| p.ticket);
    let tickets = positions.chain(book.pendings.iter().map(|p| p.ticket));
    tickets.filter(|ticket| w.oracle.copies.get(&(id, *ticket)) == Some(&key)).count()
}

fn close_decided(w: &mut World, id: AccountId, ticket: FollowerTicket) {
    let Some(key) = w.oracle.copies.get(&(id, ticket)).copied() else {
        w.violate("S7", format!("account {id}: {ticket} is closed, and is no copy of ours"));
        return;
    };
    let is_open = truth_of(w, key.link).is_some_and(|b| b.positions.contains_key(&key.ticket));
    let may_be_given_up = w.oracle.excused.contains(&key)
        // A waiting order of a link that only closes is cancelled, or closed as it fills.
        || w.links.get(&key.link).is_some_and(|facts| facts.rules.mode == LinkMode::CloseOnly);
    if is_open && !may_be_given_up && copies_held(w, id, key) < 2 {
        w.violate(
            "S7",
            format!("{key:?}: the copy {ticket} is closed, and its master's trade is open"),
        );
    }
}

fn cancel_decided(w: &mut World, id: AccountId, ticket: FollowerTicket, key: TicketKey) {
    let restricted = w.links.get(&key.link).is_some_and(|facts| facts.was_restricted);
    let waits = truth_of(w, key.link).is_some_and(|b| b.pendings.contains_key(&key.ticket));
    let may_be_given_up = w.oracle.excused.contains(&key);
    if waits && !restricted && !may_be_given_up && copies_held(w, id, key) < 2 {
        w.violate(
            "S7",
            format!("{key:?}: the order {ticket} is cancelled, and its master's waits"),
        );
    }
}

/// An order reaches the broker.
pub(crate) fn order_arrived(w: &mut World, order: &Order) {
    let Some(place) = w.oracle.places.get(&(order.account, order.who, order.token)).copied() else {
        w.violate("S1", format!("an order under a token that was never claimed: {order:?}"));
        return;
    };
    // A failover may take a claim back. When every lease under it has run out, the tenure before it
    // is the one that counts, and may begin anew.
    let over = us(LEASE) + us(FENCE);
    let taken_back = w.db.failed_over_at.is_some_and(|at| w.now >= at + over);
    let highest = w.oracle.arrived.entry(order.account).or_default();
    let is_late = place < *highest;
    *highest = if taken_back { place } else { (*highest).max(place) };
    if !is_late || taken_back {
        return;
    }
    if order.is_late || w.oracle.overlaps.contains(&order.account) {
        w.reach("late_arrival_of_an_older_tenure");
    } else {
        w.violate(
            "S1",
            format!(
                "account {}: an order of an older tenure arrives after one of a later: {:?}",
                order.account, order.request
            ),
        );
    }
}

/// The broker carried an order out or refused it.
pub(crate) fn order_executed(w: &mut World, order: &Order, reply: &OrderReply) {
    if order.is_excused {
        w.oracle.excused.insert(order.key);
    }
    let OrderReply::Done(done) = reply else { return };
    let late = w.oracle.tenures.get(&order.account).is_some_and(|t| t.who != order.who);
    if late {
        w.reach("executed_after_a_takeover");
    }
    let deadline = w.oracle.trusted.get(&(order.account, order.who)).map(|(_, until)| *until);
    if deadline.is_some_and(|until| w.now > until) {
        w.reach("answer_after_the_deadline");
    }
    if opens(&order.request) {
        opened(w, order, done.ticket, done.lots);
    }
    if let OrderRequest::Close { lots: Some(_), .. } = order.request {
        reduced(w, order, done.remainder.unwrap_or(done.ticket));
    }
}

fn opened(w: &mut World, order: &Order, ticket: FollowerTicket, lots: Option<Lots>) {
    let key = order.key;
    w.oracle.opens += 1;
    w.oracle.copies.insert((order.account, ticket), key);
    let asked = match &order.request {
        OrderRequest::Open { lots, .. } | OrderRequest::Place { lots, .. } => *lots,
        _ => unreachable!("only opening requests come here"),
    };
    let is_excused = order.is_excused || w.oracle.overlaps.contains(&order.account);
    let fact =
        Opened { ticket, lots: lots.unwrap_or(asked), master_lots: order.master_lots, is_excused };
    let all = w.oracle.opened.entry(key).or_default();
    // An order that was cancelled before it filled is no copy any more.
    if w.oracle.cancelled.remove(&key) {
        all.clear();
    }
    all.push(fact);
    if all.len() < 2 {
        return;
    }
    if all.len() == 2 && all.iter().any(|opened| opened.is_excused) {
        w.oracle.excused_duplicates += 1;
        w.reach("excused_duplicate");
        return;
    }
    let tickets: Vec<FollowerTicket> = all.iter().map(|opened| opened.ticket).collect();
    w.violate("S4", format!("{key:?} is opened more than once: {tickets:?}"));
}

fn spec_of(w: &World, id: AccountId, symbol: &schemas::Symbol) -> Option<SymbolSpec> {
    let symbols = w.brokers.engine.symbols(id).expect("declared");
    symbols.into_iter().find(|spec| spec.symbol == *symbol)
}

/// The volume that a copy should have now, as far as it is known what it was opened for.
fn target_now(w: &World, id: AccountId, key: TicketKey, ticket: FollowerTicket) -> Option<Lots> {
    let master = truth_of(w, key.link)?.positions.get(&key.ticket)?;
    let root = w.oracle.opened.get(&key)?;
    let opened = root.iter().find(|o| o.ticket == ticket).or_else(|| root.first())?;
    let spec = spec_of(w, id, &master.symbol)?;
    Some(target_lots(opened.lots, opened.master_lots?, master.lots, &spec))
}

fn reduced(w: &mut World, order: &Order, ticket: FollowerTicket) {
    let id = order.account;
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let Some(left) = book.positions.iter().find(|p| p.ticket == ticket).map(|p| p.lots) else {
        return;
    };
    let Some(target) = target_now(w, id, order.key, ticket) else { return };
    if left < target && !w.oracle.excused.contains(&order.key) {
        w.violate("S8", format!("{:?} is reduced to {left}, below its target {target}", order.key));
    }
}

/// Something changed at a broker.
pub(crate) fn account_changed(w: &mut World, id: AccountId, change: &AccountChange) {
    if id.get() <= MASTERS {
        return master_changed(w, id, change);
    }
    let (gone, now) = tickets_of(change);
    let Some(gone) = gone else { return };
    let Some(key) = w.oracle.copies.get(&(id, gone)).copied() else { return };
    match now {
        Some(now) => {
            w.oracle.copies.insert((id, now), key);
            if now != gone {
                w.oracle.renumbered.insert(key);
                w.reach("copy_renumbered");
            }
        }
        // A cancelled order leaves no line in the broker's history: whoever has lost its row cannot
        // know of it.
        None if matches!(change, AccountChange::PendingCancelled { .. }) => {
            w.oracle.cancelled.insert(key);
        }
        None => {
            w.oracle.ended.insert(key);
        }
    }
}

fn master_changed(w: &mut World, id: AccountId, change: &AccountChange) {
    let lead = w.oracle.leads.entry(id).or_insert_with(|| Lead::new([], &[]));
    if let AccountChange::PositionReduced { closed, .. }
    | AccountChange::PositionClosed { closed, .. } = change
    {
        lead.learn(closed);
    }
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let positions = book.positions.into_iter().map(|p| (p.ticket, p)).collect();
    let pendings = book.pendings.into_iter().map(|p| (p.ticket, p)).collect();
    let symbols = w.brokers.engine.symbols(id).expect("declared");
    let symbols = symbols.into_iter().map(|s| (s.symbol.clone(), s)).collect();
    let lead = w.oracle.leads.get_mut(&id).expect("just made");
    let book = lead.book(&positions, &pendings, &symbols);
    w.oracle.truth.insert(id, book);
}

// The bus.

/// A publisher hands a message to its client.
pub(crate) fn published(w: &mut World, who: Who, id: AccountId, token: Token) {
    if let Err(why) = is_trusted(w, id, who, token, 0) {
        w.violate("S2", format!("node {} publishes for {id} under token {token}: {why}", who.node));
    }
}

/// A follower is given a message of its feed.
pub(crate) fn follower_told(
    w: &mut World,
    who: Who,
    id: AccountId,
    master: AccountId,
    message: &FeedMessage,
) {
    let Some(session) = w.process(who).sessions.get_mut(&id) else { return };
    let mut broken = None;
    match message {
        FeedMessage::Event { event, doubtful, .. } => {
            let Some((epoch, seq, book)) = session.told.get_mut(&master) else { return };
            book.apply(&event.change);
            let closing_early =
                session.follower.as_ref().is_some_and(|f| f.is_on_its_way(event.change.ticket()));
            if !doubtful {
                if event.epoch != *epoch || event.seq != seq.next() {
                    broken = Some(format!(
                        "event ({}, {}) after ({epoch}, {seq})",
                        event.epoch, event.seq
                    ));
                }
                (*epoch, *seq) = (event.epoch, event.seq);
            }
            if event.change.is_ending() && closing_early {
                w.reach("close_before_open_merged");
            }
        }
        FeedMessage::Snapshot(snapshot, reason) => {
            let reached = (snapshot.epoch, snapshot.seq);
            if let Some((epoch, seq, _)) = session.told.get(&master)
                && reached < (*epoch, *seq)
                && *reason != DoubtReason::Restarted
            {
                broken = Some(format!("snapshot {reached:?} after ({epoch}, {seq})"));
            }
            session.told.insert(master, (reached.0, reached.1, snapshot.book.clone()));
        }
        FeedMessage::Doubt(_) => w.reach("doubt"),
        FeedMessage::Funds(_) => {}
    }
    if let Some(what) = broken {
        w.violate("S11", format!("follower {id} of master {master}: {what}"));
    }
}

// Plans and decisions.

/// A plan was made.
pub(crate) fn planned(
    w: &mut World,
    id: AccountId,
    steps: &[&'static str],
    held: bool,
    duplicates: usize,
) {
    w.reach("reconcile");
    if held {
        w.reach("mass_close_held");
    }
    for step in steps {
        match *step {
            "adopt_copy" => w.reach("adopted_by_tag"),
            "rebind_copy" => w.reach("adopted_by_lineage"),
            "skip_open" => w.reach("late_open_skipped"),
            "mark_closed" => w.reach("found_closed_in_history"),
            _ => {}
        }
    }
    for _ in 0..duplicates {
        w.reach("duplicate_found_and_closed");
    }
    let links = w.links.values().filter(|facts| facts.rules.follower == id).count();
    let now = w.now;
    let recent = w.oracle.plans.entry(id).or_default();
    recent.push_back(now);
    while recent.front().is_some_and(|at| *at + 10 * SECOND < now) {
        recent.pop_front();
    }
    // A new session begins a new count, and a slow read comes later than it was asked for.
    if recent.len() > 3 * STORM * links {
        let count = recent.len();
        w.violate("L6", format!("account {id}: {count} reconciles in ten seconds"));
    }
}

/// A follower writes down what it did or decided.
pub(crate) fn recorded(w: &mut World, _id: AccountId, record: &Record) {
    // An open that was lost on its way is looked for, and never sent again.
    let is_given_up = record.action == "mark_failed";
    if is_given_up || matches!(record.outcome, EventOutcome::Skipped | EventOutcome::Rejected) {
        w.oracle.decided.insert(record.key);
        w.reach("decision_recorded");
    }
    if record.action == "adopt_copy" {
        w.oracle.adopted.insert(record.key);
    }
    if record.outcome == EventOutcome::Unknown {
        w.reach("outcome_unknown");
    }
}

// Rows.

/// The stored rows that a batch may change.
pub(crate) fn stored_before(w: &World, batch: &Batch) -> BTreeMap<PairId, PairRow> {
    let pairs = &w.db.committed.tables.pairs;
    let ids = batch.pairs().into_iter().flat_map(|row| [row.pair.id, row.apart_id()]);
    ids.filter_map(|id| Some((id, pairs.get(&id)?.clone()))).collect()
}

/// A batch is committed.
pub(crate) fn rows_committed(
    w: &mut World,
    batch: &Batch,
    outcomes: &[RowOutcome],
    before: &BTreeMap<PairId, PairRow>,
) {
    let written = |outcome: &RowOutcome| *outcome == RowOutcome::Written;
    if matches!(batch.kind(), RowKind::PairLive | RowKind::Status) {
        for (row, _) in batch.rows().zip(outcomes).filter(|(_, outcome)| written(outcome)) {
            let (id, token) = match row {
                Row::Pair(row) => (row.follower, row.token),
                Row::AccountStatus(row) => (row.account, row.token),
                Row::CopyEvent(_) => continue,
            };
            let held = w.db.owner(id).map(|(_, token)| token);
            if held != Some(token) {
                w.violate("S9", format!("a live row of {id} under token {token} is committed, the account is under {held:?}"));
            }
        }
    }
    for (row, outcome) in batch.pairs().into_iter().zip(outcomes) {
        pair_committed(w, row, before);
        if written(outcome) && row.has_ended() && row.pair.state != PairState::Failed {
            let key = TicketKey { link: row.pair.link, ticket: row.pair.master_ticket };
            let now = w.now;
            w.oracle.finals.entry(key).or_insert(now);
        }
    }
}

fn pair_committed(w: &mut World, row: &PairRow, before: &BTreeMap<PairId, PairRow>) {
    let key = TicketKey { link: row.pair.link, ticket: row.pair.master_ticket };
    let pairs = &w.db.committed.tables.pairs;
    for id in [row.pair.id, row.apart_id()] {
        if let (Some(old), Some(new)) = (before.get(&id), pairs.get(&id))
            && old.has_ended()
            && old.pair.state != new.pair.state
        {
            let what = format!("{key:?}: an ended row became {:?}", new.pair.state);
            w.violate("S10", what);
            return;
        }
    }
    let of_key = |r: &&PairRow| {
        (r.pair.link, r.pair.master_ticket) == (key.link, key.ticket) && !r.has_ended()
    };
    // An end adds no live row.
    let live = if row.has_ended() { 0 } else { pairs.values().filter(of_key).count() };
    if live > 1 {
        w.violate("S10", format!("{key:?} has {live} live rows"));
        return;
    }
    killed_alive(w, row, before, key);
}

/// An end that was written must not take away the row of a copy that lives (H44).
fn killed_alive(w: &mut World, row: &PairRow, before: &BTreeMap<PairId, PairRow>, key: TicketKey) {
    let pairs = &w.db.committed.tables.pairs;
    let killed = before.values().find(|old| {
        let now = pairs.get(&old.pair.id);
        !old.has_ended()
            && old.pair.follower_ticket.is_some()
            && old.pair.follower_ticket != row.pair.follower_ticket
            && now.is_some_and(PairRow::has_ended)
    });
    let Some(ticket) = killed.and_then(|old| old.pair.follower_ticket) else { return };
    let book = w.brokers.engine.book(w.broker_now(), row.follower).expect("declared");
    if book.positions.iter().any(|p| p.ticket == ticket) {
        w.violate(
            "S10",
            format!(
                "{key:?}: the row of the open copy {ticket} is ended by one of {:?}",
                row.pair.follower_ticket
            ),
        );
    }
}

/// A row is given up: the tables do not take what it says. No fault makes a row like that, so the node
/// that wrote it is wrong, and what is stored stays old for good.
pub(crate) fn row_dropped(w: &mut World, row: &str, error: &str) {
    w.violate("L5", format!("a row is dropped because of {error}: {row}"));
}

// The end.

/// What must hold when everything has healed and come to rest.
pub(crate) fn at_the_end(w: &mut World) {
    if w.plan.mode != Mode::Liveness {
        return;
    }
    owners(w);
    feeds(w);
    let links: Vec<LinkId> = w.links.keys().copied().collect();
    for link in links {
        copies_agree(w, link);
    }
    for node in 0..w.machines.len() {
        let process = w.machines[node].process.as_ref();
        let since = process.and_then(|p| p.writer.waiting_since);
        if since.is_some_and(|since| w.now - since > WRITTEN_AFTER) {
            w.violate("L4", format!("node {node} has rows that are not written"));
        }
    }
}

/// It is owned by nobody who runs.
fn is_orphan(w: &World, row: &MemoryRow) -> bool {
    let runs = |owner: &String| {
        let processes = w.machines.iter().filter_map(|machine| machine.process.as_ref());
        processes.into_iter().any(|process| process.id.as_str() == owner)
    };
    !row.node_id.as_ref().is_some_and(runs)
}

/// Too many tenures of it ended early: it waits for its next owner by its own length (H19), or the
/// end of that wait is not long enough ago for what L4 promises.
fn is_left_alone(w: &World, id: AccountId) -> bool {
    let waited_until = w.oracle.waited_until.get(&id);
    let waits = w.db.committed.rows.get(&id).is_some_and(|row| {
        let wait = claim_wait(row.starts, id, LEASE) + Duration::from_micros(SETTLED_AFTER);
        let is_over = row.lease_until.is_none_or(|until| until.plus(wait) < w.db_clock());
        row.starts >= 2 && row.node_id.is_some() && !is_over && is_orphan(w, row)
    });
    waits || waited_until.is_some_and(|at| w.now < at + SETTLED_AFTER)
}

/// The account or a master of its links is left alone.
fn waits_for_an_owner(w: &World, id: AccountId) -> bool {
    let links = w.links.values().filter(|facts| facts.rules.follower == id);
    links.map(|facts| facts.rules.master).chain([id]).any(|id| is_left_alone(w, id))
}

fn owners(w: &mut World) {
    let rows = w.db.committed.rows.iter();
    let orphan = rows.into_iter().find(|(id, row)| is_orphan(w, row) && !is_left_alone(w, **id));
    if let Some((id, row)) = orphan {
        let what = format!("account {id} is owned by {:?}, which does not run", row.node_id);
        w.violate("L4", what);
    }
    for machine in 0..w.machines.len() {
        let Some(process) = &w.machines[machine].process else { continue };
        let idle = process.sessions.values().find(|session| {
            !session.is_at_work() && !waits_for_an_owner(w, session.tenure.account)
        });
        if let Some(session) = idle {
            let (id, state) = (session.tenure.account, session.state());
            let what = format!("account {id} on node {machine} does not work: {state}");
            w.violate("L4", what);
            return;
        }
    }
}

fn feeds(w: &mut World) {
    for master in (1..=MASTERS).map(account) {
        if is_left_alone(w, master) {
            continue;
        }
        let position = w
            .machines
            .iter()
            .find_map(|machine| machine.process.as_ref()?.sessions.get(&master)?.published());
        let behind = w.machines.iter().enumerate().find_map(|(node, machine)| {
            let feed = machine.process.as_ref()?.feeds.get(&master)?;
            let agrees = feed.core.doubt().is_none() && feed.core.position() == position;
            (!agrees).then(|| (node, feed.core.position(), feed.core.doubt()))
        });
        if let Some((node, at, doubt)) = behind {
            let what = format!(
                "node {node} has master {master} at {at:?} (doubt {doubt:?}), published is {position:?}"
            );
            w.violate("L4", what);
        }
    }
}

fn copies_agree(w: &mut World, link: LinkId) {
    let rules = w.links[&link].rules.clone();
    let id = rules.follower;
    if waits_for_an_owner(w, id) {
        w.reach("account_left_alone_after_many_starts");
        return;
    }
    let truth = w.oracle.truth.get(&rules.master).cloned().unwrap_or_default();
    let book = w.brokers.engine.book(w.broker_now(), id).expect("declared");
    let mut held: BTreeMap<MasterTicket, Vec<(FollowerTicket, Option<Lots>)>> = BTreeMap::new();
    let positions = book.positions.iter().map(|p| (p.ticket, Some(p.lots)));
    for (ticket, lots) in positions.chain(book.pendings.iter().map(|p| (p.ticket, None))) {
        if let Some(key) = w.oracle.copies.get(&(id, ticket)).filter(|key| key.link == link) {
            held.entry(key.ticket).or_default().push((ticket, lots));
        }
    }
    let is_blank = is_untagged(w, id);
    for (ticket, copies) in &held {
        let key = TicketKey { link, ticket: *ticket };
        let is_open = truth.positions.contains_key(ticket) || truth.pendings.contains_key(ticket);
        if copies.len() > 1 && !(is_blank && came_too_late(w, key)) {
            w.violate("L4", format!("{key:?} has {} copies at rest", copies.len()));
        } else if !(is_open || is_stranger(w, key, is_blank)) {
            w.violate("L4", format!("{key:?} is left open: its master's trade is gone"));
        } else if let (Some(lots), Some(target)) =
            (copies[0].1, target_now(w, id, key, copies[0].0))
            && lots != target
            && !(w.oracle.adopted.contains(&key) && is_a_step_above(w, id, key, lots, target))
            && !is_settled_otherwise(w, key, is_blank)
        {
            w.violate("L4", format!("{key:?} holds {lots}, and should hold {target}"));
        }
    }
    for ticket in truth.positions.keys().chain(truth.pendings.keys()) {
        let key = TicketKey { link, ticket: *ticket };
        let decided = w.oracle.ended.contains(&key)
            || w.oracle.cancelled.contains(&key)
            || w.oracle.decided.contains(&key)
            || w.links[&link].was_restricted
            || is_blank;
        if !held.contains_key(ticket) && !decided {
            w.violate("L4", format!("{key:?} is not copied, and nobody said why"));
        }
    }
}

/// One of the two was held up beyond fence and settling: at a broker without tags it can only be
/// reported.
fn came_too_late(w: &World, key: TicketKey) -> bool {
    w.oracle.opened.get(&key).is_some_and(|all| all.iter().any(|opened| opened.is_excused))
}

/// What the master had when a copy without a row was opened is known within a step of the copy's
/// volume; such a copy keeps the step (S8).
fn is_a_step_above(w: &World, id: AccountId, key: TicketKey, lots: Lots, target: Lots) -> bool {
    let master = truth_of(w, key.link).and_then(|book| book.positions.get(&key.ticket));
    let spec = master.and_then(|position| spec_of(w, id, &position.symbol));
    spec.is_some_and(|spec| lots.get() - spec.lots_step.get() == target.get())
}

/// Refused changes of volume are remembered and not asked for again, and what came later than fence
/// and settle time cover may have been done twice.
fn is_settled_otherwise(w: &World, key: TicketKey, is_untagged: bool) -> bool {
    w.oracle.decided.contains(&key)
        || w.oracle.excused.contains(&key)
        || is_stranger(w, key, is_untagged)
}

/// Neither the broker nor a row says whose copy this is: it is only reported. Where a broker keeps
/// tags until it renumbers, the row was there before, and only a failover can have lost it.
fn is_stranger(w: &World, key: TicketKey, is_untagged: bool) -> bool {
    let o = &w.oracle;
    let has_no_tag = is_untagged || (o.renumbered.contains(&key) && o.rows_lost.contains(&key));
    has_no_tag && row_lost(w, key)
}

/// The broker does not keep tags: a copy without its row is only reported.
fn is_untagged(w: &World, id: AccountId) -> bool {
    let place = w.plan.follower_ids().position(|of| of == id.get());
    place.is_some_and(|place| {
        matches!(w.plan.followers[place].style, Style::Blank | Style::Prefixed)
    })
}

/// No row names a copy of this ticket.
fn row_lost(w: &World, key: TicketKey) -> bool {
    let rows = w.db.committed.tables.pairs.values();
    !rows
        .filter(|r| (r.pair.link, r.pair.master_ticket) == (key.link, key.ticket))
        .any(|r| !r.has_ended() && r.pair.follower_ticket.is_some())
}
