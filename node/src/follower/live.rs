//! One ticket at a time: from a wish to an order, and from its answer to the next wish.

use super::by_hand::{CloseAnswer, NotNow};
use super::queue::{Attempt, TicketKey, Turn};
use super::state::{
    Cause, Effect, Follower, Link, Master, Now, OPEN_TRIES_MAX, OnItsWay, Planned, RETRY_FIRST,
    RETRY_MAX, Reason, Record, Retry, TakenBack, UNRESOLVED_LOOK,
};
use crate::broker::{NotSent, Outcome, SessionEvent};
use crate::clock::NodeTime;
use crate::writer::EventOutcome;
use reconcile::{
    CopyAction, CopyStep, CopyView, EndedHow, FoundBy, Market, MasterView, Pair, PairState, Pairs,
    Stops, TicketInput, plan_ticket, tag,
};
use schemas::planted::{self, Bug};
use schemas::{
    BrokerPending, BrokerPosition, FollowerTicket, Lots, MasterPending, MasterTicket, Micros,
    OrderDone, RejectClass, Rejection, Side, Symbol,
};
use std::time::Duration;

impl OnItsWay {
    /// The pair as it is once the order has left; nothing where it has none.
    fn pair_when_sent(&self, now: Now) -> Option<Pair> {
        Pair::on_sent(self.before.as_ref(), &self.rest, &self.step, now.wall)
    }
}

impl Follower {
    /// Something about this ticket may need an order: now, or when its turn comes.
    pub(super) fn wake(
        &mut self,
        now: Now,
        key: TicketKey,
        cause: Option<Cause>,
        effects: &mut Vec<Effect>,
    ) {
        if self.draining || self.view.is_none() {
            return;
        }
        if let Some(cause) = cause {
            self.causes.insert(key, cause);
        }
        match self.slots.ask(key) {
            Turn::Now(attempt) => self.decide(now, key, attempt, effects),
            turn => {
                if let Some(cause) = self.causes.get_mut(&key) {
                    cause.waited = true;
                }
                if turn == Turn::AfterAnswer && cause.is_some() && self.has_unresolved_change(key) {
                    // The copy is known: a read is enough to go on, and a close should not wait.
                    self.look_again(key, now.node, Reason::Unresolved);
                }
            }
        }
    }

    fn has_unresolved_change(&self, key: TicketKey) -> bool {
        self.unresolved.get(&key).is_some_and(|order| !begins_copy(&order.step))
    }

    /// The master said that the trade of this copy ended.
    pub(super) fn is_told_ending(&self, key: TicketKey) -> bool {
        let Some(link) = self.links.get(&key.link) else { return false };
        let Some(master) = self.masters.get(&link.rules.master) else { return false };
        let pair = link.pairs.main(key.ticket).filter(|pair| pair.state.is_live());
        master.wanted(key.ticket).is_none() && pair.is_some_and(|pair| !link.is_unproven(pair))
    }

    /// Lets the next keys in line have their turn, as far as there is room.
    pub(super) fn use_room(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if self.draining || self.view.is_none() {
            return;
        }
        while let Some(key) = self.slots.next_waiting() {
            self.wake(now, key, None, effects);
        }
    }

    fn decide(&mut self, now: Now, key: TicketKey, attempt: Attempt, effects: &mut Vec<Effect>) {
        let cause = self.causes.remove(&key);
        let (action, plan, cause) = match (self.wished(key), self.planned.remove(&key)) {
            (Some(by_hand), _) => (Some(by_hand), None, None),
            // A plan has its own time; the event is why it was not decided before.
            (None, Some(planned)) => {
                let plan = planned.plan;
                (self.still_good(now, key, planned), plan, None)
            }
            (None, None) => (self.decide_alone(now, key), None, cause),
        };
        if let Some(action) = action
            && !self.must_wait(now, key, &action)
        {
            self.start(now, key, attempt, (action, plan), cause, effects);
        }
    }

    /// A planned open that waited for room holds only while opens are allowed, and as long as
    /// the quote that it was judged by (S6).
    fn still_good(&mut self, now: Now, key: TicketKey, planned: Planned) -> Option<CopyAction> {
        if !planned.action.steps.iter().any(begins_copy) {
            return Some(planned.action);
        }
        let is_fresh = now.node.since(planned.at) <= self.settings.limits.quote_age_max;
        if is_fresh && self.may_begin(key) {
            return Some(planned.action);
        }
        self.links.get_mut(&key.link)?.set_due(now.node, Reason::LateOpen);
        None
    }

    /// Copies of this ticket may begin: its link was reconciled, or the trade began before our
    /// eyes after a complete read; there is no doubt, and nothing to settle.
    fn may_begin(&self, key: TicketKey) -> bool {
        let Some(link) = self.links.get(&key.link) else { return false };
        let master = self.masters.get(&link.rules.master);
        let is_known = link.reconciled || (link.read_once && link.fresh.contains(&key.ticket));
        is_known && master.is_some_and(|m| !m.doubtful) && self.settle_until.is_none()
    }

    /// The broker refused this order for now, and the time to ask again has not come.
    pub(super) fn must_wait(&self, now: Now, key: TicketKey, action: &CopyAction) -> bool {
        let Some(retry) = self.retries.get(&key) else { return false };
        let first = action.steps.iter().find(|step| is_order(step));
        now.node < retry.at && first.is_some_and(|step| step.as_str() == retry.step)
    }

    /// The decision from what is known without a read.
    fn decide_alone(&mut self, now: Now, key: TicketKey) -> Option<CopyAction> {
        let link = self.links.get(&key.link)?;
        let view = self.view.as_ref()?;
        let master = self.masters.get(&link.rules.master)?;
        let wanted = master.wanted(key.ticket);
        let pair = link.pairs.main(key.ticket);
        if wanted.is_none() && pair.is_none_or(|pair| link.is_unproven(pair)) {
            return None;
        }
        let ticket = pair.and_then(|pair| pair.follower_ticket);
        let copy = ticket.and_then(|ticket| match view.positions.get(&ticket) {
            Some(position) => Some(CopyView::from(position)),
            None => view.pendings.get(&ticket).map(CopyView::from),
        });
        let decision = plan_ticket(&TicketInput {
            rules: &link.rules,
            ticket: key.ticket,
            wanted,
            pair,
            copy,
            market: Market {
                symbols: &view.symbols,
                quotes: &self.quotes,
                master_funds: master.snapshot.funds.as_ref(),
                follower_funds: view.funds.as_ref(),
                now: now.wall,
                limits: &self.settings.limits,
            },
        });
        let mut action = self.without_early_reduction(decision.action?)?;
        if master.doubtful {
            // Endings are safe to follow; everything else waits for the snapshot (H39).
            action.steps.retain(|step| ends_copy(step) || !is_order(step));
        }
        if !action.steps.iter().any(begins_copy) {
            return Some(action);
        }
        let is_unsure = self.links.get(&key.link)?.maybe_copied.contains(&key.ticket);
        if !self.may_begin(key) || is_unsure || self.was_refused(key, &action.steps) {
            // The reconcile that is due anyway will see it.
            return None;
        }
        // Whatever judges a late open, a skip included, must have seen the history (H43).
        let opened_at = wanted.map_or(now.wall, MasterView::opened_at);
        if now.wall.since(opened_at) > self.settings.limits.late_after {
            self.links.get_mut(&key.link)?.set_due(now.node, Reason::LateOpen);
            return None;
        }
        Some(action)
    }

    /// Carries an action out up to its first order; the rest follows the answer.
    fn start(
        &mut self,
        now: Now,
        key: TicketKey,
        attempt: Attempt,
        (mut action, plan): (CopyAction, Option<u64>),
        cause: Option<Cause>,
        effects: &mut Vec<Effect>,
    ) {
        while !action.steps.is_empty() {
            let mut step = action.steps.remove(0);
            if self.reduces_early(key, &step) {
                return; // an adoption made this the copy of a pair that no row names yet
            }
            let Some(link) = self.links.get(&key.link) else { return };
            if let CopyStep::OpenCopy { stops, .. } = &mut step
                && link.without_stops.contains(&key.ticket)
            {
                *stops = Stops::default();
            }
            let request = match step.request(&link.rules, key.ticket) {
                Ok(request) => request,
                Err(_) => return,
            };
            let before = link.pairs.main(key.ticket);
            match request {
                None => {
                    let after = Pair::on_sent(before, &action, &step, now.wall);
                    self.note(key, &step, after, effects);
                }
                Some(_) if link.rules.paused && !self.wishes.contains_key(&key) => return,
                // Its pair is made when it has left: until then only the order counts.
                Some(request) => {
                    let before = before.cloned();
                    self.slots.take(key, attempt);
                    self.touch(key);
                    let order = OnItsWay {
                        attempt,
                        step,
                        rest: action,
                        plan,
                        cause,
                        before,
                        after: None,
                        submitted: None,
                        overtaken: false,
                        own_time: None,
                    };
                    self.on_their_way.insert(key, order);
                    effects.push(Effect::Send { key, attempt, request });
                    return;
                }
            }
        }
    }

    /// A step that only writes something down.
    fn note(
        &mut self,
        key: TicketKey,
        step: &CopyStep,
        pair: Option<Pair>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pair) = pair else { return };
        self.touch(key);
        let skipped = matches!(step, CopyStep::SkipOpen { .. });
        effects.push(Effect::Record(Box::new(Record {
            key,
            follower_ticket: pair.follower_ticket,
            action: step.as_str(),
            outcome: if skipped { EventOutcome::Skipped } else { EventOutcome::Done },
            reason: step.reason().map(str::to_owned),
            symbol: Some(pair.symbol.clone()),
            lots: None,
            price: None,
            own_time: None,
            broker_time: None,
        })));
        self.keep(pair, effects);
    }

    /// Makes a pair the newest version, here and in its row; gives back what was kept.
    pub(super) fn keep(&mut self, mut pair: Pair, effects: &mut Vec<Effect>) -> Pair {
        let link = self.links.get_mut(&pair.link);
        if let Some(old) = link.and_then(|link| link.taken_back.remove(&pair.master_ticket)) {
            if old.failed.id == pair.id {
                // Its row has an earlier try already.
                pair.version = pair.version.max(old.failed.version);
            } else {
                effects.push(Effect::Persist(Box::new(old.failed)));
            }
        }
        debug_assert!(pair.knows_its_copy(), "the table would not take it: {pair:?}");
        effects.push(Effect::Persist(Box::new(pair.clone())));
        self.note_unstored(&pair);
        self.put_pair(pair.clone());
        self.end_wish(&pair, effects);
        pair
    }

    /// The order left at `now`: its pair may be written down.
    pub fn submitted(&mut self, key: TicketKey, attempt: Attempt, now: Now) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(order) = self.on_their_way.get_mut(&key).filter(|o| o.attempt == attempt) else {
            return effects;
        };
        order.submitted = Some(now);
        let direct = order.cause.filter(|cause| !cause.waited);
        order.own_time = direct.map(|cause| now.wall.since(cause.at));
        if let Some(after) = order.pair_when_sent(now) {
            let kept = self.keep(after, &mut effects);
            if let Some(order) = self.on_their_way.get_mut(&key) {
                order.after = Some(kept);
            }
        }
        effects
    }

    /// The order was handed to a thread when it was noted, and left only at `at`: its times count
    /// from there.
    pub fn left(&mut self, key: TicketKey, attempt: Attempt, at: Now) {
        let Some(order) = self.on_their_way.get_mut(&key).filter(|o| o.attempt == attempt) else {
            return;
        };
        order.submitted = Some(at);
        let direct = order.cause.filter(|cause| !cause.waited);
        order.own_time = direct.map(|cause| at.wall.since(cause.at));
    }

    /// From the master's callback to the order call of an order on its way, if an event caused it
    /// and it did not have to wait for an answer of the broker first.
    pub fn own_time(&self, key: TicketKey) -> Option<Duration> {
        self.on_their_way.get(&key).and_then(|order| order.own_time)
    }

    pub(super) fn on_answer(
        &mut self,
        now: Now,
        key: TicketKey,
        attempt: Attempt,
        outcome: Outcome,
        effects: &mut Vec<Effect>,
    ) {
        let is_first_word =
            self.on_their_way.get(&key).is_some_and(|order| order.submitted.is_none());
        if is_first_word && !matches!(outcome, Outcome::NotSent(_)) {
            // It left, whatever became of it: its pair comes first.
            effects.extend(self.submitted(key, attempt, now));
        }
        if let Outcome::Unknown(_) = outcome
            && planted::is(Bug::P20)
            && self.ask_for_it_again(now, key, attempt, effects)
        {
            return;
        }
        if let Outcome::Unknown(reason) = outcome {
            return self.on_unknown(now, key, attempt, reason, effects);
        }
        let Some(again) = self.slots.answered(key, attempt) else { return };
        let Some(mut order) = self.on_their_way.remove(&key) else { return };
        self.touch(key);
        match outcome {
            Outcome::Done(done) => self.on_done(now, key, order, &done, effects),
            Outcome::Rejected(rejection) => {
                self.on_rejected(now, key, order, &rejection, effects);
                if again {
                    self.wake(now, key, None, effects);
                }
            }
            Outcome::NotSent(why) => {
                if order.submitted.is_none() {
                    order.after = order.pair_when_sent(now);
                }
                let reason = Some(why.as_str().into());
                self.record(now, key, &order, EventOutcome::NotSent, reason, effects);
                self.unsend_unsent(key, &order, why, effects);
                let not_now = CloseAnswer::NotNow(NotNow::NotSent(why));
                self.forget_wish(key, &not_now, effects);
                // Dropped, never queued: a reconcile finds it again. A permit can be refused in
                // the last seconds of a permission that is renewed in time, with no word of it.
                if let Some(link) = self.links.get_mut(&key.link) {
                    link.set_due(now.node.plus(UNRESOLVED_LOOK), Reason::NotSent);
                }
            }
            Outcome::Unknown(_) => {}
        }
    }

    fn on_done(
        &mut self,
        now: Now,
        key: TicketKey,
        order: OnItsWay,
        done: &OrderDone,
        effects: &mut Vec<Effect>,
    ) {
        self.retries.remove(&key);
        self.record_done(now, key, &order, done, effects);
        if begins_copy(&order.step) {
            self.look_at_tag(key, done.ticket, effects);
        }
        let is_stray =
            matches!(order.step, CopyStep::CloseDuplicate { .. } | CopyStep::CloseOrphan { .. });
        let main = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket)).cloned();
        let left = self.left_open(&order.step, done);
        if is_stray && left.is_some() {
            self.look_again(key, now.node, Reason::Unexplained);
        }
        if let Some(pair) = main.filter(|_| !is_stray) {
            let next = match left {
                Some(rest) => pair.on_closed_in_part(rest),
                None => pair.on_done(&order.step, done),
            };
            if next != pair {
                self.keep(next, effects);
            }
        }
        self.end_if_reported(key, effects);
        if !order.rest.steps.is_empty() && !order.overtaken {
            self.planned
                .insert(key, Planned { action: order.rest, plan: order.plan, at: now.node });
        }
        // Whatever is left of it, was wished meanwhile, or is necessary after the answer.
        self.wake(now, key, None, effects);
    }

    /// What a close that was filled in part has left open, by its number now. The session told of
    /// it before the answer.
    fn left_open(&self, step: &CopyStep, done: &OrderDone) -> Option<FollowerTicket> {
        let (CopyStep::CloseCopy { ticket, .. }
        | CopyStep::CloseDuplicate { ticket, .. }
        | CopyStep::CloseOrphan { ticket, .. }) = step
        else {
            return None;
        };
        let rest = done.remainder.unwrap_or(*ticket);
        self.view.as_ref()?.positions.contains_key(&rest).then_some(rest)
    }

    fn on_rejected(
        &mut self,
        now: Now,
        key: TicketKey,
        order: OnItsWay,
        rejection: &Rejection,
        effects: &mut Vec<Effect>,
    ) {
        let class = rejection.class;
        let reason = format!("{}: {}", class.as_str(), rejection.text);
        if ends_copy(&order.step) {
            self.tell(key, &CloseAnswer::Underway(reason.clone()), effects);
        }
        self.record(now, key, &order, EventOutcome::Rejected, Some(reason), effects);
        let opens = begins_copy(&order.step);
        if class == RejectClass::StaleToken {
            // The account is somebody else's by now, and so is every word about its trades.
            if opens {
                self.take_back(key, &order);
            }
            return self.look_again(key, now.node.plus(RETRY_FIRST), Reason::NotSent);
        }
        let passes = matches!(class, RejectClass::Requote | RejectClass::Later)
            || (ends_copy(&order.step) && class != RejectClass::AlreadySo);
        let tries = self.retries.get(&key).filter(|retry| retry.step == order.step.as_str());
        let tries = tries.map_or(1, |retry| retry.tries + 1);
        if passes && (!opens || tries < OPEN_TRIES_MAX) {
            return self.ask_again(now, key, &order, rejection, tries, effects);
        }
        self.retries.remove(&key);
        if matches!(order.step, CopyStep::PlacePending { .. }) {
            return self.refuse_pending(key, &order, rejection, effects);
        }
        if class == RejectClass::Invalid && self.may_open_without_stops(key, &order.step) {
            if let Some(after) = self.take_back(key, &order) {
                self.unsend(key, after, &order.step, rejection, None, effects);
            }
            return self.wake(now, key, order.cause, effects);
        }
        let main = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket)).cloned();
        // What is already so is no reason to hold it back when it is not so any more.
        if let Some(pair) = main.filter(|_| opens || class != RejectClass::AlreadySo) {
            let next = pair.on_rejected(&order.step, rejection);
            if next != pair {
                self.keep(next, effects);
            }
        }
        self.end_if_reported(key, effects);
        if !opens {
            // A refused close or change: look at what is really there before trying again.
            self.look_again(key, now.node.plus(RETRY_FIRST), Reason::Unexplained);
        }
    }

    fn look_again(&mut self, key: TicketKey, at: NodeTime, reason: Reason) {
        if let Some(link) = self.links.get_mut(&key.link) {
            link.set_due(at, reason);
        }
    }

    /// A refusal that passes: the same order is asked for again after a growing wait.
    fn ask_again(
        &mut self,
        now: Now,
        key: TicketKey,
        order: &OnItsWay,
        rejection: &Rejection,
        tries: u32,
        effects: &mut Vec<Effect>,
    ) {
        if begins_copy(&order.step)
            && let Some(after) = self.take_back(key, order)
        {
            self.unsend(key, after, &order.step, rejection, None, effects);
        }
        let wait = RETRY_FIRST.saturating_mul(1 << (tries - 1).min(8)).min(RETRY_MAX);
        let at = now.node.plus(wait);
        self.retries.insert(key, Retry { step: order.step.as_str(), at, tries, asked: false });
        // A copy that no pair names is only closed by a plan.
        self.look_again(key, at, Reason::Waiting);
    }

    /// Planted ([`Bug::P20`]): an open of unknown outcome is taken for one that was not sent.
    fn ask_for_it_again(
        &mut self,
        now: Now,
        key: TicketKey,
        attempt: Attempt,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let order = self.on_their_way.get(&key).filter(|order| begins_copy(&order.step));
        if order.is_none() || self.slots.answered(key, attempt).is_none() {
            return false;
        }
        let Some(order) = self.on_their_way.remove(&key) else { return false };
        self.touch(key);
        self.record(now, key, &order, EventOutcome::NotSent, None, effects);
        self.take_back(key, &order);
        self.look_again(key, now.node.plus(UNRESOLVED_LOOK), Reason::NotSent);
        self.wake(now, key, order.cause, effects);
        true
    }

    fn on_unknown(
        &mut self,
        now: Now,
        key: TicketKey,
        attempt: Attempt,
        reason: String,
        effects: &mut Vec<Effect>,
    ) {
        if !self.slots.unknown(key, attempt, now.node) {
            return;
        }
        let Some(order) = self.on_their_way.remove(&key) else { return };
        self.touch(key);
        self.tell(key, &CloseAnswer::Underway(reason.clone()), effects);
        self.record(now, key, &order, EventOutcome::Unknown, Some(reason), effects);
        self.unresolved.insert(key, order);
        self.look_again(key, now.node, Reason::Unresolved);
        self.last_looks.insert((self.when_surely_old(now.node), key.link));
    }

    /// When an order that was sent at this instant, or before it, can arrive no more and its ticket
    /// is looked at once more.
    pub(super) fn when_surely_old(&self, sent: NodeTime) -> NodeTime {
        sent.plus(self.settings.limits.longest_delivery()).plus(UNRESOLVED_LOOK)
    }

    /// Leaves out a partial close whose time has not come; what is planned later has it again.
    pub(super) fn without_early_reduction(&self, mut action: CopyAction) -> Option<CopyAction> {
        let key = TicketKey { link: action.link, ticket: action.master_ticket };
        action.steps.retain(|step| !self.reduces_early(key, step));
        (!action.steps.is_empty()).then_some(action)
    }

    /// Whether this is a partial close that must wait. Closes in full do not wait.
    ///
    /// 1. Before the settle time has passed one of the former owner may still arrive, and two of
    ///    them close too much (H8, H49).
    /// 2. Where the broker gives the rest a new number and no tag, the copy's row must be stored
    ///    first: a next owner without it could not know whose trade the rest is (H51).
    fn reduces_early(&self, key: TicketKey, step: &CopyStep) -> bool {
        matches!(step, CopyStep::ReduceCopy { .. })
            && (self.settle_until.is_some() || self.unstored.contains_key(&key))
    }

    /// Remembers a copy that gets its first row that names it. A later row need not be waited for:
    /// from any of the copy's numbers the history leads to the last one.
    fn note_unstored(&mut self, pair: &Pair) {
        let key = TicketKey { link: pair.link, ticket: pair.master_ticket };
        if !pair.state.is_live() || pair.follower_ticket.is_none() {
            self.unstored.remove(&key);
            return;
        }
        let before = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket));
        let was_named =
            before.is_some_and(|old| old.id == pair.id && old.follower_ticket.is_some());
        if self.renumbers && !was_named {
            self.unstored.insert(key, None);
        }
    }

    /// Puts the pair back to what it was before an order that changed nothing; gives back what
    /// its row says instead.
    fn take_back(&mut self, key: TicketKey, order: &OnItsWay) -> Option<Pair> {
        let after = order.after.clone()?;
        let link = self.links.get_mut(&key.link)?;
        let others = link.pairs.rows().filter(|pair| pair.id != after.id).cloned();
        let rows: Vec<Pair> = others.chain(order.before.clone()).collect();
        link.pairs = Pairs::new(rows);
        Some(after)
    }

    /// Nothing is there: the ticket is as if it had never been tried. Its row, which says that
    /// an order is out, says from now on that it was not sent.
    fn unsend(
        &mut self,
        key: TicketKey,
        after: Pair,
        step: &CopyStep,
        rejection: &Rejection,
        refused: Option<MasterPending>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(link) = self.links.get_mut(&key.link) else { return };
        let unsent = Pair { sent_at: None, version: after.version + 1, ..after };
        let failed = unsent.on_rejected(step, rejection);
        link.taken_back.insert(key.ticket, TakenBack { failed, refused });
        effects.push(Effect::Persist(Box::new(unsent)));
    }

    /// An order that was handed to a thread, and noted, and never left it: it is as if it had never
    /// been tried, so that a reconcile may ask for it again.
    fn unsend_unsent(
        &mut self,
        key: TicketKey,
        order: &OnItsWay,
        why: NotSent,
        effects: &mut Vec<Effect>,
    ) {
        if order.submitted.is_none() || !begins_copy(&order.step) {
            return;
        }
        let Some(after) = self.take_back(key, order) else { return };
        let text = format!("not sent: {}", why.as_str());
        let rejection = Rejection { class: RejectClass::Later, text };
        self.unsend(key, after, &order.step, &rejection, None, effects);
    }

    /// The broker does not take this pending order, because the market is past its price, say.
    /// Nothing waits there, and when the master's is filled, the fill is copied.
    fn refuse_pending(
        &mut self,
        key: TicketKey,
        order: &OnItsWay,
        rejection: &Rejection,
        effects: &mut Vec<Effect>,
    ) {
        let Some(after) = self.take_back(key, order) else { return };
        let Some(link) = self.links.get(&key.link) else { return };
        let master = self.masters.get(&link.rules.master);
        let pending = master.and_then(|m| m.snapshot.book.pendings.get(&key.ticket)).cloned();
        self.unsend(key, after, &order.step, rejection, pending, effects);
    }

    /// The broker refused an open, perhaps for a stop that the market has passed by now: it is
    /// tried once without, and the stops are set afterwards where that is possible (case 24).
    fn may_open_without_stops(&mut self, key: TicketKey, step: &CopyStep) -> bool {
        let CopyStep::OpenCopy { stops, .. } = step else { return false };
        let Some(link) = self.links.get_mut(&key.link) else { return false };
        *stops != Stops::default() && link.without_stops.insert(key.ticket)
    }

    /// The same pending order was refused before; it is placed again when it changes.
    pub(super) fn was_refused(&self, key: TicketKey, steps: &[CopyStep]) -> bool {
        if !steps.iter().any(|step| matches!(step, CopyStep::PlacePending { .. })) {
            return false;
        }
        let Some(link) = self.links.get(&key.link) else { return false };
        let master = self.masters.get(&link.rules.master);
        let now = master.and_then(|master| master.snapshot.book.pendings.get(&key.ticket));
        let refused = link.taken_back.get(&key.ticket).and_then(|old| old.refused.as_ref());
        now.is_some() && now == refused
    }

    /// The session told that the pair's copy ended while an order for it was on its way.
    fn end_if_reported(&mut self, key: TicketKey, effects: &mut Vec<Effect>) {
        let Some(pair) = self.links.get(&key.link).and_then(|l| l.pairs.main(key.ticket)) else {
            return;
        };
        let reported = pair.state.is_live()
            && pair
                .follower_ticket
                .zip(self.view.as_ref())
                .is_some_and(|(ticket, view)| view.closed(ticket).is_some());
        if reported {
            let next = pair.on_ended(EndedHow::Reported);
            self.keep(next, effects);
        }
    }

    fn record_done(
        &self,
        now: Now,
        key: TicketKey,
        order: &OnItsWay,
        done: &OrderDone,
        effects: &mut Vec<Effect>,
    ) {
        let mut record = self.new_record(now, key, order, EventOutcome::Done);
        record.follower_ticket = Some(done.ticket);
        record.lots = done.lots;
        record.price = done.price;
        record.reason = order.step.reason().map(str::to_owned);
        effects.push(Effect::Record(Box::new(record)));
    }

    fn record(
        &self,
        now: Now,
        key: TicketKey,
        order: &OnItsWay,
        outcome: EventOutcome,
        reason: Option<String>,
        effects: &mut Vec<Effect>,
    ) {
        let mut record = self.new_record(now, key, order, outcome);
        record.reason = reason;
        effects.push(Effect::Record(Box::new(record)));
    }

    fn new_record(
        &self,
        now: Now,
        key: TicketKey,
        order: &OnItsWay,
        outcome: EventOutcome,
    ) -> Record {
        let pair = order.after.as_ref().or(order.before.as_ref());
        Record {
            key,
            follower_ticket: pair.and_then(|pair| pair.follower_ticket),
            action: order.step.as_str(),
            outcome,
            reason: None,
            symbol: pair.map(|pair| pair.symbol.clone()),
            lots: None,
            price: None,
            own_time: order.own_time,
            broker_time: order.submitted.map(|at| now.node.since(at.node)),
        }
    }

    /// Something happened at the broker, by us, by a stop or by hand.
    pub(super) fn on_session(&mut self, now: Now, event: &SessionEvent, effects: &mut Vec<Effect>) {
        let Some(view) = &mut self.view else { return };
        view.apply(event);
        match event {
            SessionEvent::Closed { closed, .. } => {
                if let Some(key) = self.touched_by(closed.ticket)
                    && !self.slots.is_busy(key)
                {
                    self.end_if_reported(key, effects);
                }
            }
            SessionEvent::Reduced { position, closed } => {
                if let Some(key) = self.touched_by(closed.ticket) {
                    self.rebind(now, key, closed.ticket, position.ticket, effects);
                    self.wake(now, key, None, effects);
                }
            }
            SessionEvent::PendingFilled(position) | SessionEvent::Position(position) => {
                match self.touched_by(position.ticket) {
                    Some(key) => self.wake(now, key, None, effects),
                    None => self.explain(now, &Appeared::from(position), effects),
                }
            }
            SessionEvent::Pending(pending) => {
                if self.touched_by(pending.ticket).is_none() {
                    self.explain(now, &Appeared::from(pending), effects);
                }
            }
            SessionEvent::PendingGone(ticket) => {
                if let Some(key) = self.touched_by(*ticket)
                    && !self.slots.is_busy(key)
                {
                    // Deleted or expired, by whom is not said: the next plan looks.
                    self.look_again(key, now.node, Reason::Unexplained);
                }
            }
            SessionEvent::Funds(_) | SessionEvent::Lost(_) => {}
        }
    }

    fn touched_by(&mut self, ticket: FollowerTicket) -> Option<TicketKey> {
        let key = self.by_ticket.get(&ticket).copied()?;
        self.touch(key);
        Some(key)
    }

    /// The broker gave the rest of a partly closed copy a new number (MT4).
    fn rebind(
        &mut self,
        now: Now,
        key: TicketKey,
        from: FollowerTicket,
        to: FollowerTicket,
        effects: &mut Vec<Effect>,
    ) {
        if from == to || self.slots.is_busy(key) {
            return;
        }
        let action = CopyAction { link: key.link, master_ticket: key.ticket, steps: Vec::new() };
        let step = CopyStep::RebindCopy { from, to, found_by: FoundBy::Lineage };
        let current = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket));
        let next = Pair::on_sent(current, &action, &step, now.wall);
        self.note(key, &step, next, effects);
    }

    /// What no pair names: ours, if an order for its tag is on its way; what an order of unknown
    /// outcome made, if there is one; else, if it carries our magic, a reason to look at once (H7).
    fn explain(&mut self, now: Now, appeared: &Appeared<'_>, effects: &mut Vec<Effect>) {
        let tagged = tag::decode(appeared.comment);
        let key = tagged.map(|(link, ticket)| TicketKey { link, ticket });
        if let Some(key) = key {
            self.touch(key);
            if self.slots.is_busy(key) || self.adopt_reported(now, key, appeared, effects) {
                return;
            }
        }
        for link in self.links.values_mut() {
            if link.rules.magic.as_i64() == appeared.magic {
                link.set_due(now.node, Reason::Unexplained);
            }
        }
    }

    /// The open whose outcome is unknown was carried out after all.
    fn adopt_reported(
        &mut self,
        now: Now,
        key: TicketKey,
        appeared: &Appeared<'_>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(link) = self.links.get(&key.link) else { return false };
        let Some(pair) = link.pairs.main(key.ticket) else { return false };
        let is_ours = link.rules.magic.as_i64() == appeared.magic;
        if !is_ours || pair.state != PairState::Sending || !self.slots.is_unknown(key) {
            return false;
        }
        let action = CopyAction { link: key.link, master_ticket: key.ticket, steps: Vec::new() };
        let step = CopyStep::AdoptCopy {
            ticket: appeared.ticket,
            found_by: FoundBy::Tag,
            symbol: appeared.symbol.clone(),
            side: appeared.side,
            master_side: pair.master_side,
            lots_at_open: appeared.lots,
            master_lots_at_open: pair.master_lots_at_open,
            is_pending: appeared.is_pending,
            opened_at: appeared.at,
        };
        let next = Pair::on_sent(Some(pair), &action, &step, now.wall);
        self.resolve(key);
        self.note(key, &step, next, effects);
        self.wake(now, key, None, effects);
        true
    }

    /// What became of this order is known.
    pub(super) fn resolve(&mut self, key: TicketKey) {
        self.slots.resolved(key);
        self.unresolved.remove(&key);
    }
}

/// A trade or pending order that the session tells of.
struct Appeared<'a> {
    ticket: FollowerTicket,
    symbol: &'a Symbol,
    side: Side,
    lots: Lots,
    magic: i64,
    comment: &'a str,
    is_pending: bool,
    at: Micros,
}

impl<'a> From<&'a BrokerPosition> for Appeared<'a> {
    fn from(p: &'a BrokerPosition) -> Self {
        Appeared {
            ticket: p.ticket,
            symbol: &p.symbol,
            side: p.side,
            lots: p.lots,
            magic: p.magic,
            comment: &p.comment,
            is_pending: false,
            at: p.opened_at,
        }
    }
}

impl<'a> From<&'a BrokerPending> for Appeared<'a> {
    fn from(o: &'a BrokerPending) -> Self {
        Appeared {
            ticket: o.ticket,
            symbol: &o.symbol,
            side: o.kind.side(),
            lots: o.lots,
            magic: o.magic,
            comment: &o.comment,
            is_pending: true,
            at: o.placed_at,
        }
    }
}

impl Master {
    /// What the master has under a ticket.
    pub(super) fn wanted(&self, ticket: MasterTicket) -> Option<MasterView<'_>> {
        let book = &self.snapshot.book;
        let position = book.positions.get(&ticket).map(MasterView::Position);
        position.or_else(|| book.pendings.get(&ticket).map(MasterView::Pending))
    }
}

impl Link {
    /// Nothing but a snapshot without it says that the pair's master trade ended.
    fn is_unproven(&self, pair: &Pair) -> bool {
        pair.state != PairState::Closing && self.unproven.contains(&pair.master_ticket)
    }
}

/// The step makes, or refuses to make, a copy.
pub(super) fn begins_copy(step: &CopyStep) -> bool {
    matches!(
        step,
        CopyStep::OpenCopy { .. } | CopyStep::PlacePending { .. } | CopyStep::SkipOpen { .. }
    )
}

/// The step ends a copy.
fn ends_copy(step: &CopyStep) -> bool {
    matches!(
        step,
        CopyStep::CloseCopy { .. }
            | CopyStep::CancelPending { .. }
            | CopyStep::CloseDuplicate { .. }
            | CopyStep::CloseOrphan { .. }
    )
}

/// The step is sent to the broker, not only recorded.
fn is_order(step: &CopyStep) -> bool {
    !matches!(
        step,
        CopyStep::AdoptCopy { .. }
            | CopyStep::RebindCopy { .. }
            | CopyStep::MarkClosed { .. }
            | CopyStep::MarkFailed { .. }
            | CopyStep::SkipOpen { .. }
    )
}
