//! What a lease cycle asks for, and what its answer means. Pure.
//!
//! Decides: what to renew, release and claim; what was kept, lost and gained; when to try again.
//! In: the answer of the ownership store, the instant the attempt started, now.
//! Out: [`CycleRequest`], [`Confirmation`] for the gate, [`LeaseStep`]s, the next due instant.
//!
//! Invariants:
//! 1. A tenure is an account under one token. A token that changed is a loss and a gain, never a
//!    renewal (M7, H15).
//! 2. An account that this node owns by the database's word, but under a token it does not know
//!    (a claim whose commit was never answered), is worked for only after a renewal of that token
//!    was confirmed.
//! 3. An account that was handed in for release gets no permission again under that token.
//! 4. Rows of an owner whose lease ran out are not claimed while the database's time is in doubt
//!    (H12, H13). Free rows may be, unless another server answers: then the claims of others may be
//!    missing, nothing is claimed, and a lease that has run out since is not trusted again.
//! 5. A server of a lower timeline than the highest one seen or heard of is no database: it was
//!    demoted, and what it confirms holds nowhere else (H14).
//! 6. A tenure that was abandoned is neither renewed nor released: it runs out, as after a crash.
//!    Then its row is marked as let go: others look at one row of each owner, and that of an owner
//!    who lives and renews the rest would hide it.
//! 7. A node that pauses its claims does so for the sake of others that have room. Where there is
//!    none (any more), nothing is left without an owner for it.
//! 8. Rows that were to be had and could not be claimed are asked for again soon, a few times; a
//!    claim that brings nothing never makes the next one come at once.
//!
//! Not covered: a process that had its first answer after the database stepped its clock has nothing
//! to compare with, and claims what looks expired.

pub use super::doubt::{
    ClaimGuard, DATABASE_STEP_MAX, DatabaseBounds, DatabaseDoubt, DatabaseMark,
};
use super::share::{Fleet, SHARE_GRACE};
use super::term::{CycleNumber, LeaseTerm};
use crate::clock::NodeTime;
use crate::gate::{Confirmation, Confirmed};
use schemas::planted::{self, Bug};
use schemas::{AccountId, NodeId, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Pause before another cycle when the last one left something to do at once (chosen: long enough
/// for other nodes to take their share of many free accounts).
pub const FOLLOW_UP: Duration = Duration::from_millis(200);

/// At most this share of a cycle is taken off at random, so that nodes do not march in step. Never
/// added: the default settings have no slack above two cycles.
const CYCLE_JITTER: f64 = 0.1;

/// How long after the expiry of others a claim may be spread out.
const EXPIRY_JITTER_MAX: Duration = Duration::from_millis(300);

/// How often in a row rows that are to be had and were not got are asked for again after the short
/// pause of a failed cycle: somebody writes under them, for a moment (M6).
const FRUITLESS_MAX: u32 = 3;

/// So long an account that this node keeps away from is left to the others, who hear of it at once; if
/// nobody has taken it then, nobody will, and it is better here than nowhere.
pub const AVOIDED_FREE_MAX: Duration = Duration::from_secs(5);

/// Accounts this node keeps away from at most; the oldest entries go first.
const AVOIDED_MAX: usize = 1_000;

/// The settings of a lease that the pure part needs; checked in `config.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTiming {
    /// How long a row belongs to its owner after a renewal.
    pub lease: Duration,
    /// How much earlier than that the owner stops.
    pub fence: Duration,
    /// Between the starts of two cycles.
    pub cycle: Duration,
    /// After a failed cycle.
    pub retry: Duration,
    /// The longest a cycle may take, connecting included.
    pub query_limit: Duration,
}

/// An account and the tenure that is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenureKey {
    /// The account.
    pub account: AccountId,
    /// Its token.
    pub token: Token,
}

/// One cycle: one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CycleRequest {
    /// Which cycle of this process.
    pub number: CycleNumber,
    /// Whose cycle.
    pub node: NodeId,
    /// Platforms whose accounts this node can serve.
    pub platforms: Vec<String>,
    /// How long the rows shall belong to the node.
    pub lease: Duration,
    /// Accounts this node would own at most, for the others to know; 0 while it lets go.
    pub capacity: u32,
    /// A server of a lower timeline is refused before it commits.
    pub timeline_min: Option<u32>,
    /// Drained tenures to give back, by account.
    pub release: Vec<TenureKey>,
    /// Tenures to renew, by account.
    pub renew: Vec<TenureKey>,
    /// Abandoned tenures, by account: once their leases have run out, their rows say so.
    pub let_go: Vec<TenureKey>,
    /// What may be claimed; absent at capacity or while ending.
    pub claim: Option<ClaimRequest>,
}

/// How much may be claimed, and of what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// At most so many rows in this cycle (H18).
    pub rows_max: u32,
    /// At most so many rows of this node after it, by the database's count (S16).
    pub capacity: u32,
    /// Whether rows of owners whose lease ran out may be taken.
    pub expired: bool,
    /// What the database's time must say for them to be taken; nothing to compare with before the
    /// first answer.
    pub database: Option<DatabaseBounds>,
    /// Accounts this node keeps away from for a while: while others own them, and as long as they are
    /// free for less than [`AVOIDED_FREE_MAX`].
    pub avoid: Vec<AccountId>,
    /// Processes that are proven to be dead, see `predecessor.rs`: their rows may be taken although
    /// their leases have not run out.
    pub proven_dead: Vec<NodeId>,
}

/// A row that was claimed in this cycle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedRow {
    /// The new tenure.
    pub tenure: TenureKey,
    /// Whose lease had run out, or who is proven dead; absent for a row that was free.
    pub previous_owner: Option<String>,
}

/// A row that belongs to this node at the end of the cycle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedRow {
    /// The tenure.
    pub tenure: TenureKey,
    /// Platform word of the account.
    pub platform: String,
    /// False when the account was switched off and has to be drained.
    pub enabled: bool,
}

/// The answer to a committed cycle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CycleReply {
    /// Given back.
    pub released: Vec<AccountId>,
    /// Renewed.
    pub renewed: Vec<AccountId>,
    /// Claimed.
    pub claimed: Vec<ClaimedRow>,
    /// Everything that is this node's now.
    pub owned: Vec<OwnedRow>,
    /// Until the earliest lease of another node runs out; absent when none is held.
    pub next_expiry: Option<Duration>,
    /// Enabled accounts of these platforms that nobody owns, counted up to a bound.
    pub unowned: u32,
    /// Enabled accounts whose owner's lease ran out and which nobody has claimed, up to a bound.
    pub orphaned: u32,
    /// For how long the one of all these has had no owner that waits longest.
    pub unowned_for: Option<Duration>,
    /// Who is there to take accounts, this node included.
    pub fleet: Fleet,
    /// The database's time.
    pub database: DatabaseMark,
}

/// What is known about one account that this node owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenure {
    /// Fencing token.
    pub token: Token,
    /// Platform word of the account.
    pub platform: String,
    /// False when the account was switched off: drain it and hand it in for release.
    pub enabled: bool,
    /// True when the account was free before this tenure, so that no order of an earlier owner can
    /// still be on its way and nothing has to settle.
    pub clean: bool,
    /// Whose lease had run out before this tenure.
    pub previous_owner: Option<String>,
    /// True when it was taken over before the lease had run out, on the proof that its owner is
    /// dead: no fence has passed since the owner's last order, so settling takes that much longer.
    pub hastened: bool,
    /// The last confirmed term; absent until a renewal is confirmed.
    pub term: Option<LeaseTerm>,
}

/// One difference between two sets of tenures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseStep {
    /// Not ours any more: stop at once.
    Lost {
        /// Which tenure ended.
        tenure: TenureKey,
    },
    /// Still ours under the same token.
    Kept {
        /// Which tenure goes on.
        tenure: TenureKey,
    },
    /// Ours now: start a session, reconcile, then copy.
    Gained {
        /// Which tenure began.
        tenure: TenureKey,
        /// Whether the account was free before; if not, settle before the first open.
        clean: bool,
        /// Whose lease had run out.
        previous_owner: Option<String>,
    },
}

/// What changed from one set of tenures to the next: losses first, then what goes on, then gains.
pub fn diff(
    before: &BTreeMap<AccountId, Tenure>,
    after: &BTreeMap<AccountId, Tenure>,
) -> Vec<LeaseStep> {
    let same = |account: &AccountId, token: Token, other: &BTreeMap<AccountId, Tenure>| {
        other.get(account).is_some_and(|tenure| tenure.token == token)
    };
    let (kept, lost): (Vec<_>, Vec<_>) = before
        .iter()
        .map(|(account, tenure)| TenureKey { account: *account, token: tenure.token })
        .partition(|key| same(&key.account, key.token, after));
    let gained = after.iter().filter(|(account, tenure)| !same(account, tenure.token, before)).map(
        |(account, tenure)| LeaseStep::Gained {
            tenure: TenureKey { account: *account, token: tenure.token },
            clean: tenure.clean,
            previous_owner: tenure.previous_owner.clone(),
        },
    );
    let lost = lost.into_iter().map(|tenure| LeaseStep::Lost { tenure });
    let kept = kept.into_iter().map(|tenure| LeaseStep::Kept { tenure });
    lost.chain(kept).chain(gained).collect()
}

/// Everything a node knows about its leases; the loop in `task.rs` only feeds it.
#[derive(Debug, Clone)]
pub struct Holdings {
    node: NodeId,
    platforms: Vec<String>,
    timing: LeaseTiming,
    capacity: u32,
    claim_rows_max: u32,
    held: BTreeMap<AccountId, Tenure>,
    releasing: BTreeMap<AccountId, Token>,
    /// Tenures that are left to run out, and until when.
    abandoned: BTreeMap<AccountId, (Token, NodeTime)>,
    avoided: BTreeMap<AccountId, NodeTime>,
    guard: ClaimGuard,
    number: CycleNumber,
    proven_dead: Vec<NodeId>,
    timeline_max: Option<u32>,
    fleet: Fleet,
    /// Nothing is claimed before this instant.
    claims_paused_until: NodeTime,
    /// Since when this node leaves accounts to others because it has its share.
    left_since: Option<NodeTime>,
    /// Cycles in a row that wanted rows and got none.
    fruitless: u32,
}

/// What a confirmed cycle comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// For the gate, before anybody else hears of it.
    pub confirmation: Confirmation,
    /// Losses, then what goes on, then gains.
    pub steps: Vec<LeaseStep>,
    /// Accounts given back.
    pub released: usize,
    /// Claimed rows that were free.
    pub claimed_free: usize,
    /// Claimed rows of an owner whose lease had run out.
    pub claimed_expired: usize,
    /// Rows that were not renewed although they are still this node's: somebody locks them.
    pub locked: usize,
    /// Shortest time that was left on a tenure before this cycle renewed it.
    pub margin: Option<Duration>,
    /// The database's time jumped.
    pub doubt: Option<DatabaseDoubt>,
    /// When the next cycle is due, before jitter.
    pub wish: Wish,
}

/// What the next cycle should wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    started: NodeTime,
    finished: NodeTime,
    /// Something is left to do at once.
    follow_up: bool,
    /// Something is left to do that needs others to let go first.
    retry: bool,
    /// When there may be something to take: a lease of others runs out, a freeze of claims ends,
    /// or others have had the time to take what is above this node's share.
    expiry: Option<NodeTime>,
}

impl Wish {
    /// When the next cycle is due.
    ///
    /// Shape: the timing and a random number of 0..1 in; an instant out.
    /// Invariants: never later than one cycle after the start of the last one.
    pub fn due(&self, timing: &LeaseTiming, random: f64) -> NodeTime {
        let mut due = self.started.plus(timing.cycle.mul_f64(1.0 - CYCLE_JITTER * random));
        if self.retry {
            due = due.min(self.finished.plus(timing.retry));
        }
        if let Some(expiry) = self.expiry {
            let soonest = self.finished.plus(FOLLOW_UP);
            due = due.min(soonest.max(expiry.plus(EXPIRY_JITTER_MAX.mul_f64(random))));
        }
        if self.follow_up {
            due = due.min(self.finished.plus(FOLLOW_UP.mul_f64(0.5 + random / 2.0)));
        }
        due
    }
}

impl Holdings {
    /// A node that owns nothing yet.
    pub fn new(
        node: NodeId,
        platforms: Vec<String>,
        timing: LeaseTiming,
        capacity: u32,
        claim_rows_max: u32,
    ) -> Self {
        Self {
            node,
            platforms,
            timing,
            capacity,
            claim_rows_max,
            held: BTreeMap::new(),
            releasing: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            avoided: BTreeMap::new(),
            guard: ClaimGuard::default(),
            number: CycleNumber::NONE,
            proven_dead: Vec::new(),
            timeline_max: None,
            fleet: Fleet::default(),
            claims_paused_until: NodeTime::START,
            left_since: None,
            fruitless: 0,
        }
    }

    /// Rows of these processes, which are proven to be dead, may be claimed at once.
    pub fn set_proven_dead(&mut self, proven_dead: Vec<NodeId>) {
        self.proven_dead = proven_dead;
    }

    /// Somebody saw a server of this timeline. True when it is higher than any before, so that
    /// what the present server has confirmed may hold nowhere else.
    pub fn note_timeline(&mut self, timeline: u32) -> bool {
        let is_higher = self.timeline_max.is_some_and(|highest| timeline > highest);
        self.timeline_max = self.timeline_max.max(Some(timeline));
        is_higher
    }

    /// The highest timeline that was seen or heard of.
    pub fn timeline_max(&self) -> Option<u32> {
        self.timeline_max
    }

    /// The fleet as of the last cycle.
    pub fn fleet(&self) -> Fleet {
        self.fleet
    }

    /// The tenures this node owns and has not handed in.
    pub fn held(&self) -> &BTreeMap<AccountId, Tenure> {
        &self.held
    }

    /// Whether tenures wait to be given back.
    pub fn is_releasing(&self) -> bool {
        !self.releasing.is_empty()
    }

    /// Whether expired rows are left alone at `now`.
    pub fn claims_are_frozen(&self, now: NodeTime) -> bool {
        !self.guard.expired_may_be_claimed(now)
    }

    /// The timing this was made with.
    pub fn timing(&self) -> &LeaseTiming {
        &self.timing
    }

    /// From the next cycle on, claim up to this many accounts; what is held stays held.
    pub fn set_capacity(&mut self, capacity: u32) {
        self.capacity = capacity;
    }

    /// Claims nothing before this instant while another node has room, and tells the others that
    /// there is none here.
    pub fn pause_claims(&mut self, until: NodeTime) {
        self.claims_paused_until = self.claims_paused_until.max(until);
    }

    /// Hands a drained tenure in: it is not held from now on, and given back by the next cycle.
    ///
    /// The caller promises that no request is in flight for it and none of its rows unwritten
    /// (S20). Until `avoid_until` this node does not claim the account again.
    /// Returns whether this was a tenure of this node.
    pub fn hand_in(&mut self, tenure: TenureKey, avoid_until: NodeTime) -> bool {
        match self.held.get(&tenure.account) {
            Some(held) if held.token == tenure.token => {
                self.held.remove(&tenure.account);
                self.releasing.insert(tenure.account, tenure.token);
                self.avoid(tenure.account, avoid_until);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Lets a tenure run out that cannot be drained here: it is neither renewed nor given back, and
    /// not claimed by this node again until `until`. If nobody has taken it by then, it is this
    /// node's once more.
    ///
    /// Returns whether this was a tenure of this node.
    pub fn abandon(&mut self, tenure: TenureKey, until: NodeTime) -> bool {
        match self.held.get(&tenure.account) {
            Some(held) if held.token == tenure.token => {
                self.held.remove(&tenure.account);
                self.abandoned.insert(tenure.account, (tenure.token, until));
                self.avoid(tenure.account, until);
                true
            }
            Some(_) | None => false,
        }
    }

    fn avoid(&mut self, account: AccountId, until: NodeTime) {
        self.avoided.insert(account, until);
        if self.avoided.len() > AVOIDED_MAX {
            let soonest = self.avoided.iter().min_by_key(|(_, until)| **until).map(|(id, _)| *id);
            if let Some(soonest) = soonest {
                self.avoided.remove(&soonest);
            }
        }
    }

    /// What the cycle that starts now shall do.
    pub fn request(&mut self, started: NodeTime) -> CycleRequest {
        self.number = self.number.next();
        self.avoided.retain(|_, until| *until > started);
        self.abandoned.retain(|_, (_, until)| *until > started);
        let rows_max = self.room(started).min(self.claim_rows_max);
        let may_claim = rows_max > 0 && !self.guard.history_is_lost(started);
        let claim = may_claim.then(|| ClaimRequest {
            rows_max,
            capacity: self.capacity,
            expired: self.guard.expired_may_be_claimed(started),
            database: self.guard.bounds(started, self.timing.query_limit),
            avoid: self.avoided.keys().copied().collect(),
            proven_dead: self.proven_dead.clone(),
        });
        CycleRequest {
            number: self.number,
            node: self.node.clone(),
            platforms: self.platforms.clone(),
            lease: self.timing.lease,
            capacity: if started < self.claims_paused_until { 0 } else { self.capacity },
            timeline_min: self.timeline_max,
            release: keys(self.releasing.iter().map(|(account, token)| (*account, *token))),
            renew: keys(self.held.iter().map(|(account, tenure)| (*account, tenure.token))),
            let_go: keys(self.abandoned.iter().map(|(account, (token, _))| (*account, *token))),
            claim,
        }
    }

    /// The last cycle of a node that ends: gives back what was handed in, and nothing else.
    pub fn last_request(&mut self) -> CycleRequest {
        let mut request = self.request(NodeTime::NEVER);
        request.renew.clear();
        request.claim = None;
        request.capacity = 0;
        request
    }

    fn owned(&self) -> u32 {
        let owned = self.held.len() + self.releasing.len() + self.abandoned.len();
        u32::try_from(owned).unwrap_or(u32::MAX)
    }

    /// Another node had room at the last cycle.
    fn has_peers(&self) -> bool {
        self.fleet.lowest_peer.is_some()
    }

    /// How many more accounts this node would take now: up to its share, and up to its capacity
    /// once the others have had the time to take what is above it.
    fn room(&self, now: NodeTime) -> u32 {
        if now < self.claims_paused_until && self.has_peers() {
            return 0;
        }
        let waited = self.left_since.is_some_and(|since| now.since(since) >= SHARE_GRACE);
        let most = if waited { self.capacity } else { self.capacity.min(self.fleet.share()) };
        most.saturating_sub(self.owned())
    }

    /// Takes over the answer to a committed cycle.
    ///
    /// Shape: the request, the instants before and after it and the answer in; what it comes to
    /// out. Units: node time.
    /// Invariants: numbers 1 to 4 of this module.
    pub fn confirm(
        &mut self,
        request: &CycleRequest,
        started: NodeTime,
        finished: NodeTime,
        reply: &CycleReply,
    ) -> Outcome {
        let timing = self.timing;
        let doubt =
            self.guard.observe(reply.database, started, finished, timing.lease + timing.fence);
        if let Some(timeline) = reply.database.timeline {
            self.note_timeline(timeline);
        }
        self.fleet = reply.fleet;
        let margin = self.margin(started, &reply.renewed);
        let released = reply.released.len();
        for account in &reply.released {
            self.releasing.remove(account);
        }

        let trusted_from = trusted_from(started, finished);
        let history_lost = self.guard.history_is_lost(finished);
        let after = self.tenures_after(request, trusted_from, reply, history_lost);
        // What is not ours under that token any more needs no release: it ended by itself.
        let owned: BTreeSet<TenureKey> = reply.owned.iter().map(|row| row.tenure).collect();
        self.releasing.retain(|account, token| {
            owned.contains(&TenureKey { account: *account, token: *token })
        });

        let renewed_now = LeaseTerm::confirmed(trusted_from, timing.lease, timing.fence);
        self.abandoned.retain(|account, (token, _)| {
            owned.contains(&TenureKey { account: *account, token: *token })
        });
        let accounts = after
            .iter()
            .map(|(account, tenure)| {
                let term = tenure.term.filter(|term| *term == renewed_now);
                (*account, Confirmed { token: tenure.token, term })
            })
            .collect();
        let asked: BTreeSet<TenureKey> = request.renew.iter().copied().collect();
        let renewed: BTreeSet<AccountId> = reply.renewed.iter().copied().collect();
        let locked = owned
            .iter()
            .filter(|key| asked.contains(key) && !renewed.contains(&key.account))
            .count();
        let unconfirmed = !history_lost && after.values().any(|tenure| tenure.term.is_none());
        let claim_full = request
            .claim
            .as_ref()
            .is_some_and(|claim| reply.claimed.len() >= claim.rows_max as usize);
        let steps = diff(&self.held, &after);
        self.held = after;

        let wish = self.wish(started, finished, reply, unconfirmed, claim_full, locked);
        let claimed_expired =
            reply.claimed.iter().filter(|row| row.previous_owner.is_some()).count();
        Outcome {
            confirmation: Confirmation { number: request.number, started, accounts },
            steps,
            released,
            claimed_free: reply.claimed.len() - claimed_expired,
            claimed_expired,
            locked,
            margin,
            doubt,
            wish,
        }
    }

    fn wish(
        &mut self,
        started: NodeTime,
        finished: NodeTime,
        reply: &CycleReply,
        unconfirmed: bool,
        claim_full: bool,
        locked: usize,
    ) -> Wish {
        let has_capacity = self.owned() < self.capacity;
        let may_claim_expired = self.guard.expired_may_be_claimed(finished);
        let to_be_had =
            reply.unowned.saturating_add(if may_claim_expired { reply.orphaned } else { 0 });
        let leaves = to_be_had > 0 && has_capacity && self.owned() >= self.fleet.share();
        self.left_since = if leaves { self.left_since.or(Some(finished)) } else { None };
        let grace_end = self.left_since.map(|since| since.plus(SHARE_GRACE));
        let has_room = self.room(finished) > 0;
        let got_none = reply.claimed.is_empty();
        self.fruitless = if got_none && has_room && to_be_had > 0 { self.fruitless + 1 } else { 0 };
        // What is frozen now is looked at when that ends; what has not run out yet, when it does.
        let free_are_frozen = self.guard.history_is_lost(finished) && reply.unowned > 0;
        let frozen = (!may_claim_expired && reply.orphaned > 0) || free_are_frozen;
        let expiry = if frozen { Some(Duration::ZERO) } else { reply.next_expiry };
        // A freeze is counted by the clock that nobody sets, and so is the rest of it.
        let freeze = self.guard.frozen_until().surely_since(finished);
        let expiry = expiry.filter(|_| has_capacity).map(|left| finished.plus(left.max(freeze)));
        let soonest = [expiry, grace_end.filter(|end| *end > finished)].into_iter().flatten().min();
        Wish {
            started,
            finished,
            follow_up: unconfirmed || (claim_full && has_room),
            retry: locked > 0
                || self.is_releasing()
                || (1..=FRUITLESS_MAX).contains(&self.fruitless),
            expiry: soonest,
        }
    }

    fn tenures_after(
        &self,
        request: &CycleRequest,
        trusted_from: NodeTime,
        reply: &CycleReply,
        history_lost: bool,
    ) -> BTreeMap<AccountId, Tenure> {
        let term = LeaseTerm::confirmed(trusted_from, self.timing.lease, self.timing.fence);
        let renewed: BTreeSet<AccountId> = reply.renewed.iter().copied().collect();
        let asked: BTreeSet<TenureKey> = request.renew.iter().copied().collect();
        let claimed: BTreeMap<TenureKey, &ClaimedRow> =
            reply.claimed.iter().map(|row| (row.tenure, row)).collect();
        let handed_in = |key: &TenureKey| {
            self.releasing.get(&key.account) == Some(&key.token)
                || self.abandoned.get(&key.account).is_some_and(|(token, _)| *token == key.token)
        };

        let rows = reply.owned.iter().filter(|row| !handed_in(&row.tenure));
        rows.map(|row| {
            let key = row.tenure;
            let before = self.held.get(&key.account).filter(|held| held.token == key.token);
            let claim = claimed.get(&key);
            // Where commits may be missing, only a lease that has not run out since its last
            // confirmation is surely still ours: of any other the claim may be among them.
            let is_unbroken = before
                .and_then(|before| before.term)
                .is_some_and(|term| trusted_from < term.deadline().plus(self.timing.fence));
            let is_renewed = renewed.contains(&key.account) && asked.contains(&key);
            let confirmed = claim.is_some() || (is_renewed && (is_unbroken || !history_lost));
            let tenure = Tenure {
                token: key.token,
                platform: row.platform.clone(),
                enabled: row.enabled,
                clean: match (before, claim) {
                    (Some(before), _) => before.clean,
                    (None, Some(claim)) => claim.previous_owner.is_none(),
                    // A claim that was never answered: whose it was before is not known.
                    (None, None) => false,
                },
                previous_owner: match (before, claim) {
                    (Some(before), _) => before.previous_owner.clone(),
                    (None, Some(claim)) => claim.previous_owner.clone(),
                    (None, None) => None,
                },
                hastened: match (before, claim) {
                    (Some(before), _) => before.hastened,
                    (None, Some(claim)) => claim.previous_owner.as_deref().is_some_and(|owner| {
                        self.proven_dead.iter().any(|dead| dead.as_str() == owner)
                    }),
                    (None, None) => !self.proven_dead.is_empty(),
                },
                term: if confirmed { Some(term) } else { before.and_then(|before| before.term) },
            };
            (key.account, tenure)
        })
        .collect()
    }

    fn margin(&self, now: NodeTime, renewed: &[AccountId]) -> Option<Duration> {
        let terms = renewed.iter().filter_map(|account| self.held.get(account)?.term);
        terms.map(|term| term.left(now)).min()
    }
}

/// The instant that a term counts from: the one before anything else was done (H3, H4).
fn trusted_from(started: NodeTime, finished: NodeTime) -> NodeTime {
    if planted::is(Bug::P1) {
        return finished; // the answer came
    }
    let begun = planted::begun().map(NodeTime::after_start);
    match begun.filter(|at| (started..=finished).contains(at)) {
        Some(begun) if planted::is(Bug::P2) => begun, // the transaction had begun
        _ => started,
    }
}

fn keys(pairs: impl Iterator<Item = (AccountId, Token)>) -> Vec<TenureKey> {
    pairs.map(|(account, token)| TenureKey { account, token }).collect()
}

#[cfg(test)]
#[path = "cycle_tests.rs"]
mod tests;
