//! Who should take how many accounts, and how soon after a crash. Pure.
//!
//! Decides: how many accounts a node claims while others could; which waiting account is left
//! alone for a while; whether a node should give one away.
//! In: what the last cycle read of the fleet, settings. Out: numbers and waits.
//!
//! Invariants:
//! 1. A share only delays: what is left after [`SHARE_GRACE`] is claimed by whoever has room, so
//!    that no account stays without an owner for the sake of balance (H22).
//! 2. A node gives away only what is above its share, and only to a node that is below its own;
//!    so every move makes the fleet more even, and no account goes back and forth.
//! 3. An account that was begun again and again without five good leases waits longer each time,
//!    by its own length, so that the one that kills its owners is soon alone in a claim (H19).
//!
//! Not covered: nodes of different strength; capacity is a limit and not a weight.

use crate::clock::NodeTime;
use schemas::AccountId;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a node that has its share leaves accounts to others before it takes them after all.
pub const SHARE_GRACE: Duration = Duration::from_secs(2);

/// So many leases a tenure must have lasted to count as one that went well (H19): five minutes.
const GOOD_LEASES: u32 = 5;

/// A wait doubles with each tenure that did not go well, up to so many leases: a quarter of an hour.
const CLAIM_WAIT_LEASES_MAX: u32 = 15;

/// How long a tenure must have lasted to count as one that went well (H19).
pub fn good_after(lease: Duration) -> Duration {
    lease * GOOD_LEASES
}

/// The nodes that are alive and take accounts, as of the last cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fleet {
    /// How many, this one included; 0 before the first cycle.
    pub nodes: u32,
    /// Enabled accounts: owned by these nodes, or by nobody (counted up to a bound).
    pub accounts: u32,
    /// What the least loaded other node with room owns; absent when no other has room.
    pub lowest_peer: Option<u32>,
}

impl Fleet {
    /// How many accounts a node claims while others could; no limit for a node that is alone.
    ///
    /// Shape: counts in, a count out. An even part, rounded up, and a tenth more, at least one:
    /// without it a node that restarts would have to give everything back.
    pub fn share(&self) -> u32 {
        if self.nodes <= 1 {
            return u32::MAX;
        }
        let even = self.accounts.div_ceil(self.nodes);
        even.saturating_add(even.div_ceil(10).max(1))
    }

    /// Whether a node that owns so many should give one away.
    pub fn is_above_share(&self, owned: u32) -> bool {
        let even = self.accounts.div_ceil(self.nodes.max(1));
        owned > self.share() && self.lowest_peer.is_some_and(|lowest| lowest < even)
    }
}

/// How long after the end of its lease an account is left alone that was begun `starts` times
/// without a tenure that went well. Kept equal to `lockstep_claim_wait` in the database.
///
/// Units: at `starts` 0 and 1 nothing: one owner that vanished says nothing about the account.
/// From then on half a lease (30 s), doubled each time up to fifteen leases (15 min), times 0.5 to
/// 1.5 by the account's number.
pub fn claim_wait(starts: u32, account: AccountId, lease: Duration) -> Duration {
    let Some(doublings) = starts.checked_sub(2) else { return Duration::ZERO };
    let wait =
        (lease / 2).saturating_mul(1 << doublings.min(10)).min(lease * CLAIM_WAIT_LEASES_MAX);
    let spread = (account.get() % 1_000_003 * 7_919 % 1_000) as u32;
    wait * (500 + spread) / 1_000
}

/// An account that came back to its giver within this time was not wanted elsewhere.
pub const CAME_BACK: Duration = Duration::from_secs(600);

/// After one came back, nothing is given away for this long.
pub const BALANCE_PAUSE: Duration = Duration::from_secs(3_600);

/// When a node gives accounts away (H22).
#[derive(Debug, Clone)]
pub struct Balance {
    /// Between two accounts that are given away: one cycle, so that each decision knows what became
    /// of the one before.
    every: Duration,
    /// So long the fleet must have been the same: two leases; a node that restarts is back by then.
    steady_for: Duration,
    steady: Option<(u32, NodeTime)>,
    next: NodeTime,
    given: BTreeMap<AccountId, NodeTime>,
}

impl Balance {
    /// Nothing was given away yet. With the default settings: three a minute, after two minutes.
    pub fn new(lease: Duration, cycle: Duration) -> Self {
        Self {
            every: cycle,
            steady_for: lease * 2,
            steady: None,
            next: NodeTime::START,
            given: BTreeMap::new(),
        }
    }

    /// Whether this node should give one account away now.
    ///
    /// Shape: now, how many accounts it owns, the fleet and how many accounts have no owner in; a
    /// yes or no out. Only while every account has an owner and the fleet has long been the same.
    pub fn wants_to_give(
        &mut self,
        now: NodeTime,
        owned: u32,
        fleet: &Fleet,
        without_owner: u32,
    ) -> bool {
        let since = match self.steady {
            Some((nodes, since)) if nodes == fleet.nodes && without_owner == 0 => since,
            Some(_) | None => {
                self.steady = Some((fleet.nodes, now));
                now
            }
        };
        self.given.retain(|_, at| now.since(*at) < CAME_BACK);
        now >= self.next && now.since(since) >= self.steady_for && fleet.is_above_share(owned)
    }

    /// This account is being given away.
    pub fn gives(&mut self, now: NodeTime, account: AccountId) {
        self.given.insert(account, now);
        self.next = now.plus(self.every);
    }

    /// This account was gained. One that was given away a moment ago found no other owner: this
    /// node stops giving for a while, or it would go back and forth.
    pub fn gains(&mut self, now: NodeTime, account: AccountId) {
        if self.given.remove(&account).is_some() {
            self.next = now.plus(BALANCE_PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "share_tests.rs"]
mod tests;
