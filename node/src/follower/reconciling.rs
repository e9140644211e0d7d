//! When to read, and what to do with a complete read.

use super::queue::TicketKey;
use super::state::{
    AccountRead, Effect, Follower, Now, Planned, QUOTE_WAIT, READ_RETRY, ROUNDS_MAX, Reading,
    Reason, SecondLook, UNRESOLVED_LOOK,
};
use crate::causes::with_causes;
use crate::clock::NodeTime;
use reconcile::{
    CopyAction, CopyStep, FollowerHistory, InputError, InputParts, Note, Pair, PairState, Plan,
    ReconcileInput, SkipReason, WaitReason, history_needed_since, plan, quotes_needed,
};
use schemas::planted::{self, Bug};
use schemas::{AccountSnapshot, Epoch, LinkId, MasterTicket, Micros, Seq, Symbol};
use std::collections::{BTreeMap, BTreeSet};

/// What a reconcile of a link would do; or why that is unknown.
#[derive(Debug)]
pub struct Preview {
    /// The link.
    pub link: LinkId,
    /// The plan.
    pub plan: Result<Plan, String>,
}

impl Follower {
    /// Starts a read for all links whose reconcile is due and can be made.
    pub(super) fn begin_read(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if self.reading.is_some() || self.draining {
            return;
        }
        let Some(view) = &self.view else { return };
        let mut links = BTreeMap::new();
        let mut since = now.wall;
        let mut symbols = BTreeSet::new();
        for (id, link) in &self.links {
            let Some(master) = self.masters.get(&link.rules.master) else { continue };
            if link.second_look.is_some_and(|look| !look.answered) {
                continue;
            }
            if master.doubtful {
                continue;
            }
            let Some(reason) = link.ripe(now.node) else { continue };
            let limits = &self.settings.limits;
            let needed =
                history_needed_since(&link.rules, &master.snapshot, &link.pairs, now.wall, limits);
            since = since.min(needed);
            symbols.extend(quotes_needed(&link.rules, &master.snapshot, &view.symbols));
            links.insert(*id, reason);
        }
        if links.is_empty() {
            return;
        }
        for id in links.keys() {
            if let Some(link) = self.links.get_mut(id) {
                link.due = None;
                link.due_later = None;
                link.note_reconcile(now.node);
            }
        }
        self.reads += 1;
        let id = self.reads;
        self.reading = Some(Reading { id, begun: now, links, touched: BTreeSet::new() });
        effects.push(Effect::Read { id, since, symbols });
    }

    pub(super) fn on_read(
        &mut self,
        now: Now,
        id: u64,
        read: Option<AccountRead>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(reading) = self.reading.take_if(|reading| reading.id == id) else { return };
        let Some(read) = read.or_else(|| self.failed_is_empty(now)) else {
            for (id, reason) in reading.links {
                if let Some(link) = self.links.get_mut(&id) {
                    link.set_due(now.node.plus(READ_RETRY), reason);
                }
            }
            return;
        };
        for quote in &read.quotes {
            self.set_quote(quote.clone());
        }
        for (id, reason) in &reading.links {
            self.reconcile_link(now, *id, *reason, &reading, &read, effects);
        }
    }

    /// A failed read says nothing. Planted: it says that nothing is open.
    fn failed_is_empty(&self, now: Now) -> Option<AccountRead> {
        let link = self.links.values().next().filter(|_| planted::is(Bug::P9))?;
        let snapshot = AccountSnapshot {
            account: link.rules.follower,
            revision: 0,
            at: now.wall,
            positions: Vec::new(),
            pendings: Vec::new(),
            funds: None,
        };
        let history = FollowerHistory { since: Micros::default(), trades: Vec::new() };
        Some(AccountRead { snapshot, history, quotes: Vec::new() })
    }

    fn reconcile_link(
        &mut self,
        now: Now,
        id: LinkId,
        reason: Reason,
        reading: &Reading,
        read: &AccountRead,
        effects: &mut Vec<Effect>,
    ) {
        let busy = self.busy_tickets(id, &reading.touched);
        // The snapshot that ends a master's doubt makes it due again.
        let Some(planned) = self.plan_of(now, id, reading.begun.node, &busy, read) else { return };
        let plan = match planned {
            Ok(plan) => plan,
            Err(error) => {
                tracing::error!(link = %id, error = %with_causes(&error), "this link cannot be reconciled");
                if let Some(link) = self.links.get_mut(&id) {
                    link.set_due(now.node.plus(READ_RETRY), reason);
                }
                return;
            }
        };
        effects.push(summary(id, reading, (plan.basis.epoch, plan.basis.seq), reason, &plan));
        self.execute(now, id, reading, plan, &busy, effects);
    }

    /// The plan of a link from a complete read that began at `begun`; nothing while its master is in
    /// doubt or the account was not seen. Changes nothing.
    fn plan_of(
        &self,
        now: Now,
        id: LinkId,
        begun: NodeTime,
        busy: &BTreeSet<MasterTicket>,
        read: &AccountRead,
    ) -> Option<Result<Plan, InputError>> {
        let on_the_road = self.on_the_road(id, begun);
        let other_magics = self.other_magics(id);
        let link = self.links.get(&id)?;
        let master = self.masters.get(&link.rules.master).filter(|master| !master.doubtful)?;
        let view = self.view.as_ref()?;
        let input = ReconcileInput::new(InputParts {
            rules: &link.rules,
            master: &master.snapshot,
            follower: &read.snapshot,
            history: &read.history,
            pairs: &link.pairs,
            symbols: &view.symbols,
            quotes: &self.quotes,
            other_magics: &other_magics,
            busy,
            on_the_road: &on_the_road,
            confirmed: link.held.as_ref(),
            now: now.wall,
            limits: &self.settings.limits,
        });
        Some(input.map(|input| plan(&input)))
    }

    /// What has to be read for [`Follower::preview`]: how far back, and whose quotes. Nothing while no
    /// session is open.
    pub fn preview_needs(
        &self,
        now: Now,
        only: Option<LinkId>,
    ) -> Option<(Micros, BTreeSet<Symbol>)> {
        let view = self.view.as_ref()?;
        let mut needs = (now.wall, BTreeSet::new());
        for (_, link) in self.links.iter().filter(|(id, _)| only.is_none_or(|only| only == **id)) {
            let Some(master) = self.masters.get(&link.rules.master) else { continue };
            let (rules, pairs, limits) = (&link.rules, &link.pairs, &self.settings.limits);
            let since = history_needed_since(rules, &master.snapshot, pairs, now.wall, limits);
            needs.0 = needs.0.min(since);
            needs.1.extend(quotes_needed(rules, &master.snapshot, &view.symbols));
        }
        Some(needs)
    }

    /// What a reconcile would do now, from a complete read that began at `begun`; nothing is done.
    /// What of it has its own time (the settle time, a refusal's wait) is in it as well.
    pub fn preview(
        &mut self,
        now: Now,
        begun: NodeTime,
        read: &AccountRead,
        only: Option<LinkId>,
    ) -> Vec<Preview> {
        for quote in &read.quotes {
            self.set_quote(quote.clone());
        }
        let ids = self.links.keys().copied().filter(|id| only.is_none_or(|only| only == *id));
        let preview = |link: LinkId| {
            let busy = self.busy_tickets(link, &BTreeSet::new());
            let plan = match self.plan_of(now, link, begun, &busy, read) {
                None => Err("its master is in doubt, or was not heard yet".to_owned()),
                Some(planned) => planned.map_err(|error| error.to_string()),
            };
            Preview { link, plan }
        };
        ids.map(preview).collect()
    }

    /// Somebody wants a reconcile now, of one link or of all.
    pub fn compare_now(&mut self, now: Now, only: Option<LinkId>) {
        for (_, link) in
            self.links.iter_mut().filter(|(id, _)| only.is_none_or(|only| only == **id))
        {
            link.set_due(now.node, Reason::Asked);
        }
    }

    /// What a plan must not touch: orders on their way, what moved since the read began, and
    /// closes that wait for room. The last are statements of the master, to be carried out in their
    /// turn: counted as absent, they would hold the plan (H41), and every late open with it.
    fn busy_tickets(&self, link: LinkId, touched: &BTreeSet<TicketKey>) -> BTreeSet<MasterTicket> {
        let on_their_way = self.on_their_way.keys().copied();
        let closes = self.slots.waiting_keys().filter(|key| self.is_told_ending(*key));
        let all = on_their_way.chain(touched.iter().copied()).chain(closes);
        all.filter(|key| key.link == link).map(|key| key.ticket).collect()
    }

    /// Orders that nobody answered and that a broker may still carry out after `at`: those that were
    /// sent a moment before it, and in the first moments of a tenure all that its predecessor left.
    /// Counted by this node's steady clock: a wall clock that is set forward makes no order older.
    fn on_the_road(&self, id: LinkId, at: NodeTime) -> BTreeSet<MasterTicket> {
        let is_young = |since| at.surely_since(since) <= self.settings.limits.longest_delivery();
        let link = self.links.get(&id).filter(|_| is_young(self.begun));
        let inherited = link.into_iter().flat_map(|link| {
            let sending = |pair: &&Pair| pair.state == PairState::Sending;
            link.pairs.rows().filter(sending).map(|pair| pair.master_ticket)
        });
        let of_ours = self.unresolved.iter().filter(|(key, order)| {
            key.link == id && order.submitted.is_some_and(|sent| is_young(sent.node))
        });
        inherited.chain(of_ours.map(|(key, _)| key.ticket)).collect()
    }

    fn execute(
        &mut self,
        now: Now,
        id: LinkId,
        reading: &Reading,
        mut plan: Plan,
        busy: &BTreeSet<MasterTicket>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let waits = self.settings.limits.second_look_after;
        link.read_once = true;
        if let Some(held) = plan.held {
            tracing::warn!(link = %id, absent = held.absent.len(), of = held.of, "plan held for a second look");
            link.held = Some(held);
            let ask_at = now.node.plus(waits);
            link.second_look = Some(SecondLook { ask_at, asked: false, answered: false });
            link.set_due(ask_at, Reason::Held);
            return;
        }
        link.second_look = None;
        link.held = None;
        link.reconciled = true;
        link.fresh.clear();
        link.unproven.clear();
        if !planted::is(Bug::P16) {
            link.set_due(now.node.plus(self.settings.routine), Reason::Routine);
        }
        if !busy.is_empty() {
            link.set_due(now.node.plus(UNRESOLVED_LOOK), Reason::Waiting);
        }
        self.resolve_unknowns(reading.begun.node, id, &mut plan);
        self.wait_for_notes(now, id, &plan.notes);
        self.carry_out(now, id, reading.id, plan.actions, effects);
        self.wake_wishes(now, id, effects);
    }

    /// An order of unknown outcome is settled by a plan that has looked at its ticket and does
    /// not wait for the answer.
    fn resolve_unknowns(&mut self, begun: NodeTime, id: LinkId, plan: &mut Plan) {
        let mut open: BTreeSet<MasterTicket> = plan.notes.iter().filter_map(still_open).collect();
        plan.actions.retain(|action| {
            let key = TicketKey { link: id, ticket: action.master_ticket };
            let repeats = self.repeats_reduction(begun, key, action);
            if repeats {
                open.insert(action.master_ticket);
            }
            !repeats
        });
        let unknowns = self.slots.unknowns().map(|(key, _)| key);
        let settled: Vec<TicketKey> =
            unknowns.filter(|key| key.link == id && !open.contains(&key.ticket)).collect();
        for key in settled {
            self.resolve(key);
        }
    }

    /// A partial close of unknown outcome may still be carried out, and a second one with it, and
    /// what was closed too much cannot be had back: it is not sent again while it may arrive, unless
    /// the volume shows that it did (H49). A read that began earlier may not show what arrived since.
    fn repeats_reduction(&self, begun: NodeTime, key: TicketKey, action: &CopyAction) -> bool {
        let Some(order) = self.unresolved.get(&key) else { return false };
        let CopyStep::ReduceCopy { target: left, .. } = &order.step else { return false };
        let is_young = order.submitted.is_some_and(|at| {
            begun.surely_since(at.node) <= self.settings.limits.longest_delivery()
        });
        is_young
            && action.steps.iter().any(|step| match step {
                // More than it leaves is still there, whatever else was closed of it.
                CopyStep::ReduceCopy { lots, target, .. } => lots.get() + target.get() > left.get(),
                _ => false,
            })
    }

    /// Which tickets an unexplained trade may be the copy of. An order that was one of them stays
    /// one when it fills, as long as anything is unexplained: its fill is as new as any, and its
    /// copy is not.
    fn note_maybe_copied(&mut self, id: LinkId, notes: &[Note]) {
        let now = notes.iter().filter_map(|note| match note {
            Note::Waiting { ticket, why: WaitReason::StrayMayBeCopy } => Some(*ticket),
            Note::Waiting { .. } | Note::ReportOrphan { .. } => None,
        });
        let is_unexplained = notes.iter().any(|note| matches!(note, Note::ReportOrphan { .. }));
        let Some(link) = self.links.get_mut(&id) else { return };
        let master = self.masters.get(&link.rules.master);
        let is_held = |ticket: &MasterTicket| master.is_some_and(|m| m.wanted(*ticket).is_some());
        let has_row = |ticket: &MasterTicket| link.pairs.main(*ticket).is_some();
        link.maybe_copied.retain(|t| is_unexplained && is_held(t) && !has_row(t));
        link.maybe_copied.extend(now);
    }

    fn wait_for_notes(&mut self, now: Now, id: LinkId, notes: &[Note]) {
        self.note_maybe_copied(id, notes);
        let looks_again = notes.iter().any(|note| {
            matches!(
                note,
                Note::Waiting {
                    why: WaitReason::AnswerDue
                        | WaitReason::SlotBusy
                        | WaitReason::ReadOlderThanOrder
                        | WaitReason::HistoryTooShort
                        | WaitReason::CopyNotRead
                        | WaitReason::StopsTooClose,
                    ..
                }
            )
        });
        if looks_again && let Some(link) = self.links.get_mut(&id) {
            link.set_due(now.node.plus(UNRESOLVED_LOOK), Reason::Waiting);
        }
    }

    /// A skip is final, and a quote that is a few seconds old says nothing of the trade: what lacks a
    /// fresh one is looked at again before it is skipped for want of it (H57, H58).
    fn wait_for_quotes(
        &mut self,
        now: Now,
        id: LinkId,
        mut actions: Vec<CopyAction>,
    ) -> Vec<CopyAction> {
        let Some(link) = self.links.get_mut(&id) else { return actions };
        let master = self.masters.get(&link.rules.master);
        link.unpriced.retain(|ticket, _| master.is_some_and(|m| m.wanted(*ticket).is_some()));
        let mut waits = false;
        actions.retain(|action| {
            if !action.steps.iter().any(lacks_quote) {
                return true;
            }
            let since = *link.unpriced.entry(action.master_ticket).or_insert(now.node);
            let is_over = now.node.since(since) >= QUOTE_WAIT;
            waits |= !is_over;
            is_over
        });
        if waits {
            link.set_due(now.node.plus(UNRESOLVED_LOOK), Reason::Waiting);
        }
        actions
    }

    fn carry_out(
        &mut self,
        now: Now,
        id: LinkId,
        read: u64,
        actions: Vec<CopyAction>,
        effects: &mut Vec<Effect>,
    ) {
        let settling = self.settle_until.is_some();
        let actions: Vec<CopyAction> = actions
            .into_iter()
            .filter_map(|action| self.without_early_reduction(action))
            // Before the settle time has passed nothing is opened, and nothing is refused for
            // good either: the order of the former owner may still appear (H8).
            .filter(|action| !(settling && action.steps.iter().any(super::live::begins_copy)))
            // What the broker refused for now has its own time.
            .filter(|action| {
                let key = TicketKey { link: id, ticket: action.master_ticket };
                !self.must_wait(now, key, action) && !self.was_refused(key, &action.steps)
            })
            .collect();
        let actions = self.wait_for_quotes(now, id, actions);
        let Some(link) = self.links.get_mut(&id) else { return };
        let is_unsure = |action: &CopyAction| {
            link.maybe_copied.contains(&action.master_ticket)
                && action.steps.iter().any(super::live::begins_copy)
        };
        let actions: Vec<CopyAction> = actions.into_iter().filter(|a| !is_unsure(a)).collect();
        if actions.is_empty() {
            link.rounds = 0;
            return;
        }
        link.rounds += 1;
        if link.rounds > ROUNDS_MAX {
            effects.push(Effect::Restless(id));
        } else {
            link.set_due(now.node.plus(UNRESOLVED_LOOK), Reason::Confirm);
        }
        for action in actions {
            let key = TicketKey { link: id, ticket: action.master_ticket };
            self.planned.insert(key, Planned { action, plan: Some(read), at: now.node });
            self.wake(now, key, None, effects);
        }
    }
}

/// The open is skipped because its price is not known just now.
fn lacks_quote(step: &CopyStep) -> bool {
    let CopyStep::SkipOpen { reason, .. } = step else { return false };
    matches!(reason, SkipReason::StaleQuote | SkipReason::NoQuote)
}

/// The ticket of a note that says that nothing was decided about an order's outcome.
fn still_open(note: &Note) -> Option<MasterTicket> {
    match note {
        Note::Waiting {
            ticket,
            why: WaitReason::AnswerDue | WaitReason::ReadOlderThanOrder | WaitReason::SlotBusy,
        } => Some(*ticket),
        Note::Waiting { .. } | Note::ReportOrphan { .. } => None,
    }
}

fn summary(
    link: LinkId,
    reading: &Reading,
    position: (Epoch, Seq),
    reason: Reason,
    plan: &Plan,
) -> Effect {
    let steps = plan.actions.iter().flat_map(|action| &action.steps);
    let duplicates =
        steps.clone().filter(|step| matches!(step, CopyStep::CloseDuplicate { .. })).count();
    Effect::Planned {
        link,
        plan: reading.id,
        begun: reading.begun.wall,
        position,
        reason,
        steps: steps.map(CopyStep::as_str).collect(),
        held: plan.held.is_some(),
        duplicates,
    }
}
