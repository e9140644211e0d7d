//! When a fault begins and ends, and the healing of everything.

use crate::plan::{Fault, SECOND, Scheduled};
use crate::world::{World, account};
use reconcile::LinkMode;
use schemas::LinkId;

pub(crate) fn schedule(w: &mut World, place: usize, scheduled: Scheduled) {
    if let Fault::DbFailover { lag } = scheduled.fault {
        // What the copy has is what was committed before its lag.
        let at = scheduled.at.saturating_sub(lag);
        w.at(at, None, |w| w.db.replica = Some(w.db.committed.clone()));
    }
    let at = scheduled.at;
    w.at(at, None, move |w| begin(w, place, &scheduled));
}

fn begin(w: &mut World, place: usize, scheduled: &Scheduled) {
    if w.healed {
        return;
    }
    crate::world::begins(w, place, scheduled);
    match scheduled.fault.clone() {
        Fault::Crash { node, restart_after } => {
            crate::node::crash(w, node);
            w.after(restart_after, None, move |w| crate::node::start(w, node));
        }
        Fault::Shutdown { node, restart_after } => {
            crate::node::shut_down(w, node);
            w.after(restart_after + 60 * SECOND, None, move |w| crate::node::start(w, node));
        }
        Fault::Twin { node } => {
            let twin = w.plan.nodes.len() + node;
            crate::node::start(w, twin);
            w.after(scheduled.lasts, None, move |w| crate::node::crash(w, twin));
        }
        Fault::Freeze { node, kind } => w.freeze(node, kind, scheduled.lasts),
        Fault::WallStep { node, by } => w.step_wall(node, by),
        Fault::DbClock { by } => {
            w.db.clock_off += by;
            w.db.jumped_at = Some(w.now);
        }
        Fault::DbFailover { .. } => fail_over(w),
        Fault::DbLock { account: id } => {
            w.db.lock_by_hand(account(id));
            w.after(scheduled.lasts, None, |w| w.db.unlock_by_hand());
        }
        Fault::BusMoved { node, by } => crate::bus::move_later(w, node, by, scheduled.lasts),
        Fault::BrokerCut { node } => {
            keep(w, place, scheduled);
            crate::broker::cut_off(w, node);
        }
        Fault::BrokerDrop { account: id } => {
            let id = account(id);
            let numbers = w.brokers.sessions_of(id);
            for number in numbers {
                crate::broker::drop_connection(w, number);
            }
        }
        Fault::ClosesByHand => crate::broker::meddle(w, true),
        Fault::StopsByHand => crate::broker::meddle(w, false),
        Fault::LinkCloseOnly { link } => {
            let Some(id) = w.links.keys().nth(link).copied() else { return };
            set_mode(w, id, LinkMode::CloseOnly);
            w.after(scheduled.lasts, None, move |w| set_mode(w, id, LinkMode::Copy));
        }
        Fault::LinkPaused { link } => {
            let Some(id) = w.links.keys().nth(link).copied() else { return };
            set_paused(w, id, true);
            w.after(scheduled.lasts, None, move |w| set_paused(w, id, false));
        }
        Fault::AccountOff { account: id } => {
            set_enabled(w, id, false);
            w.after(scheduled.lasts, None, move |w| set_enabled(w, id, true));
        }
        _ => keep(w, place, scheduled),
    }
}

fn keep(w: &mut World, place: usize, scheduled: &Scheduled) {
    w.active.insert(place, scheduled.fault.clone());
    w.after(scheduled.lasts, None, move |w| {
        w.active.remove(&place);
    });
}

fn fail_over(w: &mut World) {
    let Some(replica) = w.db.replica.take() else { return };
    w.db.committed = replica;
    w.db.timeline += 1;
    w.db.jumped_at = Some(w.now);
    w.db.failed_over_at = Some(w.now);
    w.db.restart();
    crate::oracle::history_lost(w);
}

fn set_mode(w: &mut World, id: LinkId, mode: LinkMode) {
    let Some(facts) = w.links.get_mut(&id) else { return };
    facts.rules.mode = mode;
    facts.was_restricted = true;
    tell_rules(w, id);
}

/// What its master opens meanwhile is copied late afterwards, or it is said why not.
fn set_paused(w: &mut World, id: LinkId, paused: bool) {
    let Some(facts) = w.links.get_mut(&id) else { return };
    facts.rules.paused = paused;
    if !paused {
        crate::oracle::pause_ended(w, id);
    }
    tell_rules(w, id);
}

/// Each node hears of it in its own time.
fn tell_rules(w: &mut World, id: LinkId) {
    let follower = w.links[&id].rules.follower;
    for node in 0..w.machines.len() {
        if let Some(who) = w.who(node) {
            let wait = w.rng.range(1_000, SECOND);
            w.after(wait, Some(who), move |w| crate::session::rules_changed(w, who, follower));
        }
    }
}

fn set_enabled(w: &mut World, id: u64, enabled: bool) {
    let id = account(id);
    match w.db.committed.rows.get_mut(&id) {
        Some(row) if row.enabled != enabled => row.enabled = enabled,
        Some(_) | None => return,
    }
    for facts in w.links.values_mut() {
        if facts.rules.follower == id || facts.rules.master == id {
            facts.was_restricted = true;
        }
    }
}

/// Every fault ends; every node runs again but those that are lost for good.
pub(crate) fn heal(w: &mut World) {
    w.healed = true;
    w.active.clear();
    w.db.unlock_by_hand();
    let ids: Vec<u64> = w.db.committed.rows.keys().map(|id| id.get()).collect();
    for id in ids {
        set_enabled(w, id, true);
    }
    let links: Vec<LinkId> = w.links.keys().copied().collect();
    for link in links {
        if w.links[&link].rules.mode == LinkMode::CloseOnly {
            set_mode(w, link, LinkMode::Copy);
        }
        if w.links[&link].rules.paused {
            set_paused(w, link, false);
        }
    }
    w.note(|| "everything heals".into());
    // One node may stay away for good where the others have room for all.
    let needed = w.db.committed.rows.len() as u32;
    let lost = w.rng.index(w.plan.nodes.len());
    let others: u32 =
        w.plan.nodes.iter().enumerate().filter(|(n, _)| *n != lost).map(|(_, (c, _))| *c).sum();
    let loses_one = w.plan.nodes.len() > 1 && others >= needed && w.rng.chance(0.4);
    for node in 0..w.machines.len() {
        if node >= w.plan.nodes.len() || (loses_one && node == lost) {
            crate::node::crash(w, node);
        } else {
            crate::node::start(w, node);
        }
    }
}
