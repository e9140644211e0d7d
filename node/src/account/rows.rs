//! Pairs and records as rows, and rows as pairs.

use crate::follower::Record;
use crate::writer::{CopyEvent, LoadedPairs, PairRow};
use reconcile::{LinkRules, Pair, Pairs, Volumes};
use schemas::{AccountId, Micros, Token};
use uuid::Uuid;

/// What every row of a follower's tenure carries.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// The follower.
    pub account: AccountId,
    /// The lease token.
    pub token: Token,
}

/// A pair as its row. `volumes`: what its broker takes of the copy's symbol.
pub fn pair_row(owner: Owner, pair: Pair, volumes: Option<Volumes>, now: Micros) -> PairRow {
    let closed_at = pair.state.is_terminal().then_some(now);
    PairRow {
        pair,
        follower: owner.account,
        token: owner.token,
        opened_at: None,
        closed_at,
        close_price: None,
        volumes,
    }
}

/// The pairs of one link, from a complete read of its follower's rows.
pub fn pairs_of(rules: &LinkRules, loaded: &LoadedPairs) -> Pairs {
    let rows = loaded.live.iter().chain(&loaded.ended).map(|row| &row.pair);
    Pairs::new(rows.filter(|pair| pair.link == rules.link).cloned())
}

/// A record as its row; the id is drawn once, so that sending it twice stores it once.
pub fn copy_event(owner: Owner, record: Record, now: Micros) -> CopyEvent {
    CopyEvent {
        id: Uuid::new_v4(),
        at: now,
        token: owner.token,
        link: record.key.link,
        follower: owner.account,
        master_ticket: record.key.ticket,
        follower_ticket: record.follower_ticket,
        action: record.action,
        outcome: record.outcome,
        reason: record.reason,
        symbol: record.symbol,
        lots: record.lots,
        price: record.price,
        own_time: record.own_time,
        broker_time: record.broker_time,
    }
}
