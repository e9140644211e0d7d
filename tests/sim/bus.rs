//! The bus: connections of processes to servers, interest that takes its time, and what is lost,
//! late, doubled or out of order on the way.
//!
//! Messages of one publisher reach one subscriber in order, except where a fault says otherwise.
//! An answer to a snapshot request travels behind what its publisher said before it, and the
//! request makes the asker's interest known where it arrives (M12).

use crate::plan::{Fault, MS, SECOND};
use crate::world::{Who, World};
use schemas::{AccountId, Beacon, Epoch, MasterSnapshot, TradeEvent};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The client notices a dead server after this: its pings go unanswered.
const NOTICED_AFTER: (u64, u64) = (3 * SECOND, 9 * SECOND);
/// Time between two looks of a client whose server does not answer.
const RECONNECT_WAIT: u64 = SECOND;

/// What travels.
#[derive(Debug, Clone)]
pub(crate) enum Message {
    Event(Arc<TradeEvent>),
    Beacon(Beacon),
    /// Bytes that nobody can read.
    Garbage,
}

/// One process's connection, as its client believes it to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Connection {
    /// Grows with every connection of the process.
    pub(crate) number: u64,
    pub(crate) is_up: bool,
}

/// Who listens to a master since when, and from whom nothing can be missed any more.
#[derive(Debug, Clone, Copy)]
struct Interest {
    connection: u64,
    since: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Bus {
    interests: BTreeMap<(Who, AccountId), Interest>,
    /// Where the interest is known, per publisher's node: from when on.
    known: BTreeMap<(Who, AccountId, usize), u64>,
    /// Last arrival on a path: each connection of a publisher has its own.
    paths: BTreeMap<(Who, u64, Who), u64>,
    /// What is published on this connection of a process comes later by so much.
    long_roads: BTreeMap<Who, (u64, u64)>,
    /// When a client will notice that its server does not answer.
    noticing: BTreeMap<Who, u64>,
}

impl World {
    fn bus_fault(&self, is_it: impl Fn(&Fault) -> bool) -> bool {
        self.active.values().any(is_it)
    }

    fn is_cut_off(&self, node: usize) -> bool {
        self.bus_fault(|f| matches!(f, Fault::BusCut { node: n } if *n == node))
    }

    fn can_send(&self, node: usize) -> bool {
        !self.is_cut_off(node)
            && !self.bus_fault(|f| matches!(f, Fault::BusMute { node: n } if *n == node))
    }

    fn can_hear(&self, node: usize) -> bool {
        !self.is_cut_off(node)
            && !self.bus_fault(|f| matches!(f, Fault::BusDeaf { node: n } if *n == node))
    }

    fn is_parted(&self, one: usize, other: usize) -> bool {
        one != other
            && self.bus_fault(|f| {
                matches!(f, Fault::BusPartition { a, b }
                    if (*a, *b) == (one, other) || (*a, *b) == (other, one))
            })
    }

    fn bus_latency(&mut self) -> u64 {
        let slow = self.active.values().find_map(|f| match f {
            Fault::BusDelay { by } => Some(*by),
            _ => None,
        });
        let mean = slow.unwrap_or(self.plan.latencies[0]);
        self.rng.latency(mean)
    }

    fn share_of(&self, which: impl Fn(&Fault) -> Option<f64>) -> f64 {
        self.active.values().find_map(which).unwrap_or(0.0)
    }

    pub(crate) fn who(&self, node: usize) -> Option<Who> {
        let machine = &self.machines[node];
        machine.process.as_ref()?;
        Some(Who { node, incarnation: machine.incarnation })
    }
}

/// The client connects, at the start and again.
pub(crate) fn connect(w: &mut World, who: Who) {
    let wait = w.bus_latency().min(2 * SECOND);
    w.after(wait, Some(who), move |w| {
        // A handshake needs both directions.
        if !w.can_send(who.node) || !w.can_hear(who.node) {
            w.after(RECONNECT_WAIT, Some(who), move |w| connect(w, who));
            return;
        }
        let connection = &mut w.process(who).bus;
        connection.number += 1;
        connection.is_up = true;
        let number = connection.number;
        w.note(|| format!("node {} is on the bus, connection {number}", who.node));
        // The subscriptions follow the connection; what comes between is lost (M13).
        let wait = w.rng.range(0, 100 * MS);
        let masters: Vec<AccountId> = w.process(who).feeds.keys().copied().collect();
        for master in masters {
            w.after(wait, Some(who), move |w| subscribe(w, who, master));
        }
        look(w, who);
    });
}

/// The client's own look at its connection: pings that are not answered end it.
pub(crate) fn look(w: &mut World, who: Who) {
    let is_up = w.process(who).bus.is_up;
    if !is_up {
        return;
    }
    let is_well = w.can_send(who.node) && w.can_hear(who.node);
    let (least, most) = NOTICED_AFTER;
    if is_well {
        w.bus.noticing.remove(&who);
    } else {
        let now = w.now;
        let lasts = w.rng.range(least, most);
        let noticed_at = *w.bus.noticing.entry(who).or_insert(now + lasts);
        if noticed_at <= now {
            w.bus.noticing.remove(&who);
            disconnect(w, who);
            w.after(RECONNECT_WAIT, Some(who), move |w| connect(w, who));
            return;
        }
    }
    w.after(500 * MS, Some(who), move |w| look(w, who));
}

fn disconnect(w: &mut World, who: Who) {
    w.process(who).bus.is_up = false;
    w.note(|| format!("node {} is off the bus", who.node));
    crate::session::bus_changed(w, who);
}

/// From now on the road from the node's server is long, and after `lasts` its client is told to go
/// to another server: what it says there overtakes what it has said.
pub(crate) fn move_later(w: &mut World, node: usize, by: u64, lasts: u64) {
    let Some(who) = w.who(node) else { return };
    let connection = w.process(who).bus;
    w.bus.long_roads.insert(who, (connection.number, by));
    w.after(lasts, Some(who), move |w| {
        if w.process(who).bus == connection && connection.is_up {
            disconnect(w, who);
            connect(w, who);
        }
    });
}

pub(crate) fn subscribe(w: &mut World, who: Who, master: AccountId) {
    let connection = w.process(who).bus;
    if !connection.is_up || !w.process(who).feeds.contains_key(&master) {
        return;
    }
    if !w.can_send(who.node) {
        // It waits in the socket, unless the connection ends first.
        w.after(500 * MS, Some(who), move |w| {
            if w.process(who).bus.number == connection.number {
                subscribe(w, who, master);
            }
        });
        return;
    }
    let since = w.now + w.bus_latency();
    w.bus.interests.insert((who, master), Interest { connection: connection.number, since });
    w.bus.known.retain(|(of, m, _), _| (*of, *m) != (who, master));
}

pub(crate) fn unsubscribe(w: &mut World, who: Who, master: AccountId) {
    w.bus.interests.remove(&(who, master));
    w.bus.known.retain(|(of, m, _), _| (*of, *m) != (who, master));
}

fn listeners(w: &mut World, from: Who, master: AccountId) -> Vec<Who> {
    let all: Vec<(Who, Interest)> = w
        .bus
        .interests
        .iter()
        .filter(|((_, m), _)| *m == master)
        .map(|((who, _), interest)| (*who, *interest))
        .collect();
    let mut reached = Vec::new();
    for (who, interest) in all {
        if !w.is_alive(who) {
            w.bus.interests.remove(&(who, master));
            continue;
        }
        // Interest spreads from server to server.
        let spread = w.rng.range(0, 300 * MS);
        let known = *w.bus.known.entry((who, master, from.node)).or_insert(interest.since + spread);
        let connected = w.machines[who.node].process.as_ref().map(|p| p.bus);
        let same = connected.is_some_and(|c| c.is_up && c.number == interest.connection);
        if same && w.now >= known && w.can_hear(who.node) && !w.is_parted(from.node, who.node) {
            reached.push(who);
        }
    }
    reached
}

/// A publisher says something on one of its account's subjects. What its client believes to be
/// sent may reach nobody.
pub(crate) fn publish(w: &mut World, from: Who, master: AccountId, message: Message) {
    if !w.can_send(from.node) {
        w.reach("published_into_the_void");
        return;
    }
    for to in listeners(w, from, master) {
        if w.share_of(|f| if let Fault::BusLoss { share } = f { Some(*share) } else { None })
            > w.rng.unit()
        {
            w.reach("message_lost");
            continue;
        }
        let mut message = message.clone();
        let garbage =
            w.share_of(|f| if let Fault::BusGarbage { share } = f { Some(*share) } else { None });
        if garbage > w.rng.unit() {
            message = Message::Garbage;
        }
        let doubled = w
            .share_of(|f| if let Fault::BusDuplicates { share } = f { Some(*share) } else { None })
            > w.rng.unit();
        for _ in 0..=usize::from(doubled) {
            let at = arrival(w, from, to);
            let message = message.clone();
            w.at(at, Some(to), move |w| crate::feed::hear(w, to, master, message));
        }
    }
    // The publisher hears its own subjects, and so those of another publisher of the account.
    crate::session::overhear(w, from, master, &message);
}

fn arrival(w: &mut World, from: Who, to: Who) -> u64 {
    let mut at = w.now + w.bus_latency();
    let number = w.process(from).bus.number;
    if let Some((of, by)) = w.bus.long_roads.get(&from)
        && *of == number
    {
        at += by;
    }
    let reorder = w.active.values().find_map(|f| match f {
        Fault::BusReorder { by } => Some(*by),
        _ => None,
    });
    if let Some(by) = reorder {
        return at + w.rng.range(0, by);
    }
    let last = w.bus.paths.entry((from, number, to)).or_default();
    at = at.max(*last);
    *last = at;
    at
}

/// Asks whoever publishes for a master; the answer, or none, is given to `feed::answered`.
pub(crate) fn request_snapshot(
    w: &mut World,
    who: Who,
    master: AccountId,
    heard: Option<Epoch>,
    number: u64,
) {
    // The request's own limits: an echo, then the pages.
    let limit = 3 * SECOND;
    w.after(limit, Some(who), move |w| crate::feed::answered(w, who, master, number, None));
    let connection = w.process(who).bus;
    if !connection.is_up || !w.can_send(who.node) {
        return;
    }
    let subscribed = w.bus.interests.get(&(who, master)).map(|i| i.connection);
    if subscribed != Some(connection.number) {
        return;
    }
    let there = w.bus_latency();
    w.after(there, None, move |w| {
        let publishers = crate::session::publishers_of(w, master);
        let mut asked = false;
        for publisher in publishers {
            if !w.can_hear(publisher.node)
                || !w.can_send(publisher.node)
                || w.is_parted(who.node, publisher.node)
            {
                continue;
            }
            asked = true;
            let now = w.now;
            // The request came over the same routes as the interest, behind it.
            w.bus.known.insert((who, master, publisher.node), now);
            w.after(0, Some(publisher), move |w| {
                crate::session::asked(w, publisher, master, who, heard, number);
            });
        }
        if !asked {
            let back = w.bus_latency();
            w.after(back, Some(who), move |w| {
                w.reach("no_responders");
                crate::feed::answered(w, who, master, number, None);
            });
        }
    });
}

/// A publisher's answer to a request.
pub(crate) fn reply(
    w: &mut World,
    from: Who,
    to: Who,
    heard: Option<Epoch>,
    number: u64,
    snapshot: MasterSnapshot,
) {
    if !w.can_send(from.node) || !w.is_alive(to) || !w.can_hear(to.node) {
        return;
    }
    if heard.is_some_and(|heard| snapshot.epoch < heard) {
        return;
    }
    let at = arrival(w, from, to);
    let master = snapshot.account;
    w.at(at, Some(to), move |w| {
        crate::feed::answered(w, to, master, number, Some(snapshot));
    });
}
