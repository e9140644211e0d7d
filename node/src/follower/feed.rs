//! What a master's feed says: events, snapshots, doubt.

use super::queue::TicketKey;
use super::state::{Cause, Effect, Follower, Link, Master, Now, Reason};
use bus::FeedMessage;
use schemas::planted::{self, Bug};
use schemas::{AccountId, Book, Change, LinkId, MasterSnapshot, MasterTicket, TradeEvent};

impl Follower {
    pub(super) fn on_feed(
        &mut self,
        now: Now,
        account: AccountId,
        message: FeedMessage,
        effects: &mut Vec<Effect>,
    ) {
        match message {
            FeedMessage::Snapshot(snapshot, _reason) => {
                self.on_snapshot(now, account, MasterSnapshot::clone(&snapshot));
            }
            FeedMessage::Doubt(_reason) => {
                if let Some(master) = self.masters.get_mut(&account) {
                    master.doubtful = true;
                }
            }
            FeedMessage::Funds(funds) => {
                if let Some(master) = self.masters.get_mut(&account) {
                    master.snapshot.funds = Some(funds);
                }
            }
            FeedMessage::Event { event, doubtful, .. } => {
                self.on_master_event(now, account, &event, doubtful, effects);
            }
        }
    }

    fn on_snapshot(&mut self, now: Now, account: AccountId, snapshot: MasterSnapshot) {
        let before = self.masters.get(&account).map(|master| &master.snapshot.book);
        for link in self.links.values_mut().filter(|l| l.rules.master == account) {
            link.note_absences(before, &snapshot.book);
            link.rounds = 0;
            match &mut link.second_look {
                Some(look) => {
                    look.answered |= look.asked;
                    link.set_due(now.node, Reason::Held);
                }
                None => link.set_due(now.node, Reason::Feed),
            }
        }
        self.masters.insert(account, Master { snapshot, doubtful: false });
        let links = self.links_of(account);
        // Planted: a plan outlives the state that it was made from.
        let outlives = planted::is(Bug::P14);
        self.planned.retain(|key, _| outlives || !links.contains(&key.link));
        for (_, order) in self.on_their_way.iter_mut().filter(|(k, _)| links.contains(&k.link)) {
            order.overtaken = true;
        }
    }

    fn on_master_event(
        &mut self,
        now: Now,
        account: AccountId,
        event: &TradeEvent,
        doubtful: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(master) = self.masters.get_mut(&account) else { return };
        // Planted: an epoch that was outbid is as good as any.
        let outbid = planted::is(Bug::P13) && event.epoch < master.snapshot.epoch;
        if (event.epoch, event.seq) <= (master.snapshot.epoch, master.snapshot.seq) && !outbid {
            // The state has it already (S11).
            return;
        }
        master.snapshot.book.apply(&event.change);
        if !doubtful {
            master.snapshot.epoch = event.epoch;
            master.snapshot.seq = event.seq;
            master.snapshot.at = event.at;
        }
        let ticket = event.change.ticket();
        let begins = matches!(event.change, Change::PositionOpened(_) | Change::PendingPlaced(_));
        for id in self.links_of(account) {
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.unproven.remove(&ticket);
            if event.change.is_ending() {
                link.without_stops.remove(&ticket);
            }
            if begins && link.read_once && !link.reconciled {
                link.fresh.insert(ticket);
            }
            let key = TicketKey { link: id, ticket };
            // What a plan wanted was decided from the state before this event.
            if !planted::is(Bug::P14) {
                self.planned.remove(&key);
            }
            if let Some(order) = self.on_their_way.get_mut(&key) {
                order.overtaken = true;
            }
            self.wake(now, key, Some(Cause { at: event.at, waited: false }), effects);
        }
    }

    fn links_of(&self, master: AccountId) -> Vec<LinkId> {
        let of_master = self.links.iter().filter(|(_, link)| link.rules.master == master);
        of_master.map(|(id, _)| *id).collect()
    }
}

impl Link {
    /// A snapshot replaces the state: which copied trades is it without, and nobody said why?
    fn note_absences(&mut self, before: Option<&Book>, after: &Book) {
        let holds = |book: &Book, ticket: &MasterTicket| {
            book.positions.contains_key(ticket) || book.pendings.contains_key(ticket)
        };
        self.without_stops.retain(|ticket| holds(after, ticket));
        let live = self.pairs.rows().filter(|pair| pair.state.is_live());
        let absent = live.map(|pair| pair.master_ticket).filter(|ticket| !holds(after, ticket));
        let told = |ticket: &MasterTicket| before.is_some_and(|book| !holds(book, ticket));
        self.unproven = absent.filter(|t| self.unproven.contains(t) || !told(t)).collect();
    }
}
