//! One ticket at a time: from a wish to an order, and from its answer to the next wish.

use super::queue::{Attempt, TicketKey, Turn};
use super::state::{
    Cause, Effect, Follower, Now, OPEN_TRIES_MAX, OnItsWay, RETRY_FIRST, RETRY_MAX, Reason, Record,
    RecordOutcome, Retry,
};
use crate::broker::{Outcome, SessionEvent};
use reconcile::{
    CopyAction, CopyStep, CopyView, EndedHow, FoundBy, Market, MasterView, Pair, Pairs, Stops,
    TicketInput, plan_ticket, tag,
};
use schemas::{BrokerPosition, FollowerTicket, OrderDone, RejectClass, Rejection};
use std::time::Duration;

impl Follower {
    /// Something about this ticket may need an order: now, or when its turn comes.
    pub(super) fn wake(
        &mut self,
        now: Now,
        key: TicketKey,
        cause: Option<Cause>,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(cause) = cause {
            self.causes.insert(key, cause);
        }
        if self.draining || self.view.is_none() {
            return;
        }
        match self.slots.ask(key) {
            Turn::Now(attempt) => self.decide(now, key, attempt, effects),
            Turn::AfterAnswer | Turn::AfterRoom => {
                if let Some(cause) = self.causes.get_mut(&key) {
                    cause.waited = true;
                }
            }
        }
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
        if self.retries.get(&key).is_some_and(|retry| retry.at != crate::clock::NodeTime::NEVER) {
            return;
        }
        let cause = self.causes.remove(&key);
        let action = match self.planned.remove(&key) {
            Some(planned) => Some(planned.action),
            None => self.decide_alone(now, key),
        };
        if let Some(action) = action {
            self.start(now, key, attempt, action, cause, effects);
        }
    }

    /// The decision from what is known without a read.
    fn decide_alone(&mut self, now: Now, key: TicketKey) -> Option<CopyAction> {
        let link = self.links.get(&key.link)?;
        let view = self.view.as_ref()?;
        let master = self.masters.get(&link.rules.master)?;
        let book = &master.snapshot.book;
        let wanted = match book.positions.get(&key.ticket) {
            Some(position) => Some(MasterView::Position(position)),
            None => book.pendings.get(&key.ticket).map(MasterView::Pending),
        };
        let pair = link.pairs.main(key.ticket);
        if pair.is_none() && wanted.is_none() {
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
        let action = decision.action?;
        let known = link.reconciled || (link.read_once && link.fresh.contains(&key.ticket));
        let allowed = known && !master.doubtful && self.settle_until.is_none();
        let begins = action.steps.iter().any(begins_copy);
        if !begins {
            return Some(action);
        }
        if !allowed || self.was_refused(key, &action.steps) {
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
        mut action: CopyAction,
        cause: Option<Cause>,
        effects: &mut Vec<Effect>,
    ) {
        while !action.steps.is_empty() {
            let mut step = action.steps.remove(0);
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
            let before = link.pairs.main(key.ticket).cloned();
            let mut after = Pair::on_sent(before.as_ref(), &action, &step, now.wall);
            if let (Some(pair), Some(floor)) = (&mut after, link.versions.get(&key.ticket)) {
                pair.version = pair.version.max(floor + 1);
            }
            match request {
                None => self.note(now, key, &step, after, effects),
                Some(request) => {
                    self.slots.take(key, attempt);
                    self.touch(key);
                    let order = OnItsWay {
                        attempt,
                        step,
                        rest: action,
                        cause,
                        before,
                        after,
                        submitted: None,
                        own_time: None,
                    };
                    self.on_their_way.insert(key, order);
                    effects.push(Effect::Send { key, attempt, request, cause });
                    return;
                }
            }
        }
    }

    /// A step that only writes something down.
    fn note(
        &mut self,
        _now: Now,
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
            outcome: if skipped { RecordOutcome::Skipped } else { RecordOutcome::Done },
            reason: step.reason().map(str::to_owned),
            symbol: Some(pair.symbol.clone()),
            lots: None,
            price: None,
            own_time: None,
            broker_time: None,
        })));
        self.keep(pair, effects);
    }

    fn keep(&mut self, pair: Pair, effects: &mut Vec<Effect>) {
        effects.push(Effect::Persist(Box::new(pair.clone())));
        self.put_pair(pair);
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
        if let Some(after) = order.after.clone() {
            self.keep(after, &mut effects);
        }
        effects
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
        if let Outcome::Unknown(reason) = outcome {
            return self.on_unknown(now, key, attempt, reason, effects);
        }
        let Some(again) = self.slots.answered(key, attempt) else { return };
        let Some(order) = self.on_their_way.remove(&key) else { return };
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
                self.record(
                    now,
                    key,
                    &order,
                    RecordOutcome::NotSent,
                    Some(why.as_str().into()),
                    effects,
                );
                // Dropped, never queued: what comes after the hole reconciles.
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
        let is_stray =
            matches!(order.step, CopyStep::CloseDuplicate { .. } | CopyStep::CloseOrphan { .. });
        let main = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket)).cloned();
        if let Some(pair) = main.filter(|_| !is_stray) {
            let next = pair.on_done(&order.step, done);
            if next != pair {
                self.keep(next, effects);
            }
        }
        self.end_if_reported(key, effects);
        if order.rest.steps.is_empty() {
            // Whatever was wished meanwhile, and whatever the answer makes necessary.
            self.wake(now, key, None, effects);
        } else if let Turn::Now(attempt) = self.slots.ask(key) {
            self.start(now, key, attempt, order.rest, None, effects);
        } else {
            self.planned.insert(key, super::state::Planned { action: order.rest });
        }
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
        self.record(now, key, &order, RecordOutcome::Rejected, Some(reason), effects);
        let tries = self.retries.get(&key).map_or(1, |retry| retry.tries + 1);
        let passes = matches!(class, RejectClass::Requote | RejectClass::Later);
        let opens = begins_copy(&order.step);
        if passes && (!opens || tries < OPEN_TRIES_MAX) {
            if opens {
                self.take_back(key, &order, effects);
            }
            let wait = RETRY_FIRST.saturating_mul(1 << tries.min(8)).min(RETRY_MAX);
            self.retries.insert(key, Retry { at: now.node.plus(wait), tries });
            return;
        }
        self.retries.remove(&key);
        if matches!(order.step, CopyStep::PlacePending { .. }) {
            self.refuse_pending(key, &order, effects);
            return;
        }
        if class == RejectClass::Invalid && self.may_open_without_stops(key, &order.step) {
            self.take_back(key, &order, effects);
            self.wake(now, key, order.cause, effects);
            return;
        }
        let main = self.links.get(&key.link).and_then(|link| link.pairs.main(key.ticket)).cloned();
        if let Some(pair) = main {
            let next = pair.on_rejected(&order.step, rejection);
            if next != pair {
                self.keep(next, effects);
            }
        }
        self.end_if_reported(key, effects);
        if let Some(link) = self.links.get_mut(&key.link)
            && !opens
        {
            // A refused close or change: look at what is really there before trying again.
            link.set_due(now.node.plus(RETRY_FIRST), Reason::Waiting);
        }
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
        self.record(now, key, &order, RecordOutcome::Unknown, Some(reason), effects);
        if let Some(link) = self.links.get_mut(&key.link) {
            link.set_due(now.node, Reason::Unresolved);
        }
    }

    /// Nothing is there: the ticket is as if it had never been tried. The row that says that
    /// the order was sent is replaced by one that says that it was not, which a later owner
    /// does not wait for; what comes next has a higher version.
    fn take_back(&mut self, key: TicketKey, order: &OnItsWay, effects: &mut Vec<Effect>) {
        let Some(after) = &order.after else { return };
        let Some(link) = self.links.get_mut(&key.link) else { return };
        let others = link.pairs.rows().filter(|pair| pair.id != after.id).cloned();
        let rows: Vec<Pair> = others.chain(order.before.clone()).collect();
        link.pairs = Pairs::new(rows);
        let unsent = Pair { sent_at: None, version: after.version + 1, ..after.clone() };
        link.versions.insert(key.ticket, unsent.version);
        effects.push(Effect::Persist(Box::new(unsent)));
    }

    /// The broker refused an open, perhaps for a stop that the market has passed by now: it is
    /// tried once without, and the stops are set afterwards where that is possible (case 24).
    fn may_open_without_stops(&mut self, key: TicketKey, step: &CopyStep) -> bool {
        let CopyStep::OpenCopy { stops, .. } = step else { return false };
        let Some(link) = self.links.get_mut(&key.link) else { return false };
        *stops != Stops::default() && link.without_stops.insert(key.ticket)
    }

    /// The broker does not take this pending order, because the market is past its price, say.
    /// Nothing waits there, and when the master's is filled, the fill is copied.
    fn refuse_pending(&mut self, key: TicketKey, order: &OnItsWay, effects: &mut Vec<Effect>) {
        self.take_back(key, order, effects);
        let Some(link) = self.links.get_mut(&key.link) else { return };
        let Some(master) = self.masters.get(&link.rules.master) else { return };
        if let Some(pending) = master.snapshot.book.pendings.get(&key.ticket) {
            link.refused_pendings.insert(key.ticket, pending.clone());
        }
    }

    /// The same pending order was refused before; it is placed again when it changes.
    pub(super) fn was_refused(&self, key: TicketKey, steps: &[CopyStep]) -> bool {
        if !steps.iter().any(|step| matches!(step, CopyStep::PlacePending { .. })) {
            return false;
        }
        let Some(link) = self.links.get(&key.link) else { return false };
        let master = self.masters.get(&link.rules.master);
        let now = master.and_then(|master| master.snapshot.book.pendings.get(&key.ticket));
        now.is_some() && now == link.refused_pendings.get(&key.ticket)
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
        let mut record = self.new_record(now, key, order, RecordOutcome::Done);
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
        outcome: RecordOutcome,
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
        outcome: RecordOutcome,
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
                    None => self.explain(now, position),
                }
            }
            SessionEvent::Pending(pending) => {
                self.touched_by(pending.ticket);
            }
            SessionEvent::PendingGone(ticket) => {
                if let Some(key) = self.touched_by(*ticket)
                    && let Some(link) = self.links.get_mut(&key.link)
                {
                    // Deleted or expired, by whom is not said: the next plan looks.
                    link.set_due(now.node, Reason::Unexplained);
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
        self.note(now, key, &step, next, effects);
    }

    /// A trade that no pair names: ours, if an order for its tag is on its way; else, if it
    /// carries our magic, a reason to look at once (H7).
    fn explain(&mut self, now: Now, position: &BrokerPosition) {
        let tagged = tag::decode(&position.comment);
        let key = tagged.map(|(link, ticket)| TicketKey { link, ticket });
        if let Some(key) = key {
            self.touch(key);
            if self.slots.is_busy(key) {
                return;
            }
        }
        for link in self.links.values_mut() {
            if link.rules.magic.as_i64() == position.magic {
                link.set_due(now.node, Reason::Unexplained);
            }
        }
    }
}

/// The step makes, or refuses to make, a copy.
pub(super) fn begins_copy(step: &CopyStep) -> bool {
    matches!(
        step,
        CopyStep::OpenCopy { .. } | CopyStep::PlacePending { .. } | CopyStep::SkipOpen { .. }
    )
}
