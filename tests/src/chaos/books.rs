//! What accounts hold by the broker's ledger, row by row: a look at it costs what is new.

use super::check::broker::{Copy, sent_at};
use super::timing;
use super::world::World;
use crate::oracle::State;
use paper::ledger::{Fact, LedgerRow, RequestFact, TradeEventKind, TradeFact};
use paper::protocol::{Instruction, OrderReply};
use schemas::{AccountId, FollowerTicket, LinkId};
use std::collections::{BTreeMap, BTreeSet};

/// The books.
#[derive(Debug, Default)]
pub struct Books {
    /// Rows that were read.
    pub rows: u64,
    leased: BTreeMap<AccountId, State>,
    copies: BTreeMap<LinkId, State>,
    /// Open copies by link and master ticket, with their number at the broker now.
    pub open: BTreeMap<(i64, i64), i64>,
    /// Of these, the ones whose rest the broker has given a new number, and taken the tag off it.
    pub renumbered: BTreeSet<(i64, i64)>,
    /// Copies that were ever opened.
    pub opened: BTreeSet<Copy>,
    /// Copies of which an open was refused.
    pub refused: BTreeSet<Copy>,
    /// See [`late_copies`].
    pub late: BTreeSet<Copy>,
    tickets: BTreeMap<(AccountId, FollowerTicket), Copy>,
}

/// Copies of which an order was carried out so long after it was sent that its sender had given it
/// up by then: longer than a call may take and clocks may differ. A copy that opens so late comes
/// as a stranger, and is closed; of a partial close that comes so late a second one is sent. No
/// sender can know of a broker like that, so nothing is promised of these copies but S1, S4, S5.
pub fn late_copies(rows: &[LedgerRow]) -> BTreeSet<Copy> {
    let mut books = Books::default();
    books.take(rows, &[]);
    books.late
}

impl Books {
    /// Reads what is new.
    pub async fn read(&mut self, world: &World) -> super::Done {
        let leased: Vec<AccountId> =
            world.masters.iter().filter(|m| m.is_leased).map(|m| m.account).collect();
        loop {
            let page = world.driver.ledger_page(self.rows).await?;
            self.take(&page.rows, &leased);
            if page.next.is_none() {
                return Ok(());
            }
        }
    }

    /// What a master that is traded at the broker holds.
    pub fn leased(&self, account: AccountId) -> State {
        self.leased.get(&account).cloned().unwrap_or_default()
    }

    /// What a link has copied.
    pub fn copies(&self, link: LinkId) -> State {
        self.copies.get(&link).cloned().unwrap_or_default()
    }

    fn take(&mut self, rows: &[LedgerRow], leased: &[AccountId]) {
        for row in rows {
            self.rows = row.row + 1;
            match &row.fact {
                Fact::Request(request) => {
                    if row.at_us.since(sent_at(row, request)) > timing::longest_answer() {
                        self.late.extend(self.copy_of(request));
                    }
                    let opens = matches!(request.instruction, Instruction::Open { .. });
                    if opens && matches!(request.reply, OrderReply::Rejected(_)) {
                        self.refused.extend(self.copy_of(request));
                    }
                }
                Fact::Trade(fact) => {
                    if leased.contains(&fact.account) {
                        let state = self.leased.entry(fact.account).or_default();
                        state.take(fact.first_ticket.get(), fact);
                    }
                    self.take_copy(fact);
                }
                Fact::Login(_) | Fact::Ended(_) | Fact::Lost(_) => {}
            }
        }
    }

    fn take_copy(&mut self, fact: &TradeFact) {
        let Some((link, ticket)) = reconcile::tag::decode(&fact.comment) else { return };
        let now = fact.new_ticket.unwrap_or(fact.ticket);
        self.tickets.insert((fact.account, now), (link, ticket.get()));
        self.copies.entry(link).or_default().take(ticket.get(), fact);
        let key = (link.as_i64(), ticket.as_i64());
        if now != fact.ticket {
            self.renumbered.insert(key);
        }
        match fact.event {
            TradeEventKind::Closed => drop(self.open.remove(&key)),
            TradeEventKind::Opened | TradeEventKind::PendingFilled => {
                self.opened.insert((link, ticket.get()));
                self.open.insert(key, now.as_i64());
            }
            TradeEventKind::Modified | TradeEventKind::Reduced | TradeEventKind::Added => {
                self.open.insert(key, now.as_i64());
            }
            TradeEventKind::PendingPlaced
            | TradeEventKind::PendingModified
            | TradeEventKind::PendingCancelled => {}
        }
    }

    fn copy_of(&self, request: &RequestFact) -> Option<Copy> {
        match &request.instruction {
            Instruction::Open { comment, .. } | Instruction::Place { comment, .. } => {
                reconcile::tag::decode(comment).map(|(link, ticket)| (link, ticket.get()))
            }
            Instruction::Close { ticket, .. }
            | Instruction::Modify { ticket, .. }
            | Instruction::ModifyPending { ticket, .. }
            | Instruction::Cancel { ticket } => {
                self.tickets.get(&(request.account, *ticket)).copied()
            }
        }
    }
}
