//! Who may send an order now: one permission per account, one permit per broker call.
//!
//! Decides: whether this node may write to a broker for an account at this instant.
//! In: results of lease cycles ([`Gate::apply`]), beats of the ticker, revocations.
//! Out: [`SendPermit`], which a broker call takes by value; a [`Denied`] with its reason.
//!
//! A permission is a value derived from the last cycle, not an event somebody must not miss (B1):
//! an account that is not in the result has none. All permissions are swapped in as one, what is
//! lost is gone before anything else is longer (H1).
//!
//! Invariants:
//! 1. No permit unless the account's token was confirmed by a cycle and at least the reserve is
//!    left until that confirmation's deadline.
//! 2. Results of a cycle older than the last one applied change nothing; a permission is replaced
//!    only by a higher token, or by a later deadline under the same token (H5).
//! 3. After [`Gate::revoke_all`] nothing is permitted until a cycle that *started* later is
//!    applied, and permits given before are void for good (H6).
//! 4. While the ticker is late by more than [`FREEZE_GAP`], nothing is permitted: a node that
//!    wakes from a freeze is refused before the ticker has even run.
//! 5. A permission that ended and came back has a new [`Permission::stretch`], however short the
//!    hole was: whoever acts for the account reconciles first when the number differs (H4).
//!
//! Not covered: what happens between the last check and the write to the socket; see
//! `lease/mod.rs`.

use crate::clock::{FREEZE_GAP, NodeTime};
use crate::lease::term::{CycleNumber, LeaseTerm};
use crate::metrics::names;
use parking_lot::RwLock;
use schemas::planted::{self, Bug};
use schemas::{AccountId, Token};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Why no order may be sent now. The work is dropped and counted; the reconcile after the next
/// confirmed cycle, or on the next owner, catches up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Denied {
    /// No cycle has confirmed this account, or it was taken away.
    #[error("the account is not leased by this node")]
    NotLeased,
    /// Too little is left until the deadline.
    #[error("the lease was not confirmed in time")]
    TooLate,
    /// The ticker is late: the node may have stood still.
    #[error("the node may have stood still just now")]
    Frozen,
    /// Everything was taken back, and no cycle that started since is confirmed.
    #[error("all leases were taken back and are not confirmed since")]
    Revoked,
    /// The permit is from before a revocation, or from an earlier tenure.
    #[error("the permit was given before the lease was lost or revoked")]
    Void,
}

impl Denied {
    schemas::words! {
        /// The word used in metrics.
        pub fn as_str(self) in WORDS {
            Denied::NotLeased => "not_leased",
            Denied::TooLate => "too_late",
            Denied::Frozen => "frozen",
            Denied::Revoked => "revoked",
            Denied::Void => "void",
        }
    }
}

/// Why all permissions are taken back at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RevokeReason {
    /// The ticker saw a gap.
    Freeze,
    /// The database that confirmed them is not the primary any more.
    Timeline,
    /// The node ends.
    Shutdown,
    /// Somebody asked for it.
    Operator,
}

impl RevokeReason {
    schemas::words! {
        /// The word used in metrics.
        pub fn as_str(self) in WORDS {
            RevokeReason::Freeze => "freeze",
            RevokeReason::Timeline => "timeline",
            RevokeReason::Shutdown => "shutdown",
            RevokeReason::Operator => "operator",
        }
    }
}

/// What a node may do for one account, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permission {
    /// Fencing token of the tenure.
    pub token: Token,
    /// First instant at which nothing may be done any more.
    pub deadline: NodeTime,
    /// Number of the unbroken stretch of permission, unique within the process.
    pub stretch: u64,
}

/// What one confirmed cycle says about one account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confirmed {
    /// Token under which the row is owned.
    pub token: Token,
    /// The new term; absent where the row is owned but could not be renewed this time, so that
    /// the earlier deadline stays.
    pub term: Option<LeaseTerm>,
}

/// The result of one cycle, as far as the gate needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confirmation {
    /// Which cycle.
    pub number: CycleNumber,
    /// When it was started, before anything else was done.
    pub started: NodeTime,
    /// Every account that may be worked for; an account that is missing here loses its permission.
    pub accounts: BTreeMap<AccountId, Confirmed>,
}

/// What [`Gate::apply`] changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Applied {
    /// Accounts without permission now that had one.
    pub removed: Vec<AccountId>,
    /// Accounts whose permission begins a new stretch.
    pub begun: Vec<AccountId>,
    /// The result was older than what is known and changed nothing.
    pub outdated: bool,
}

/// Gives out permits. Clones share one state.
#[derive(Clone)]
pub struct Gate {
    inner: Arc<Inner>,
}

struct Inner {
    state: RwLock<State>,
    /// Last beat of the ticker in ns of node time; [`NO_TICKER`] before the first.
    beat_ns: AtomicU64,
}

const NO_TICKER: u64 = u64::MAX;

struct State {
    accounts: BTreeMap<AccountId, Permission>,
    /// The last permission of every account there ever was, for a gate that is node-wide.
    #[cfg(feature = "planted")]
    ever: BTreeMap<AccountId, Permission>,
    last_cycle: CycleNumber,
    /// Only cycles that started after this instant count.
    revoked_at: Option<NodeTime>,
    /// Raised by every revocation of everything; a permit carries the one it was given under.
    generation: u64,
    stretch_last: u64,
}

impl Default for Gate {
    fn default() -> Self {
        let state = State {
            accounts: BTreeMap::new(),
            #[cfg(feature = "planted")]
            ever: BTreeMap::new(),
            last_cycle: CycleNumber::NONE,
            revoked_at: None,
            generation: 0,
            stretch_last: 0,
        };
        Self { inner: Arc::new(Inner { state: RwLock::new(state), beat_ns: NO_TICKER.into() }) }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner.state.read();
        f.debug_struct("Gate")
            .field("accounts", &state.accounts.len())
            .field("generation", &state.generation)
            .finish()
    }
}

impl Gate {
    /// A gate that permits nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The right to send one order for an account.
    ///
    /// Shape: account, now and the reserve in; one permit, or the reason why not.
    /// Units: node time; `reserve` is what must be left until the deadline, so that the order is
    /// on its way before the fence begins (2 s by default).
    /// Errors: every [`Denied`]; each is counted.
    pub fn permit(
        &self,
        account: AccountId,
        now: NodeTime,
        reserve: Duration,
    ) -> Result<SendPermit, Denied> {
        match self.look(account, now, reserve) {
            Ok((permission, generation)) => Ok(SendPermit {
                gate: self.clone(),
                account,
                permission,
                reserve,
                generation,
                given: now,
            }),
            Err(denied) => Err(count(denied)),
        }
    }

    /// Whether a master's session may publish for its account now, and under which permission.
    ///
    /// Publishing needs the lease like trading does (H26), but no reserve: an event that arrives
    /// late is put in order by its epoch.
    pub fn may_publish(&self, account: AccountId, now: NodeTime) -> Result<Permission, Denied> {
        self.look(account, now, Duration::ZERO).map(|(permission, _)| permission).map_err(count)
    }

    /// Whether the holder of this tenure may speak for its master at `now`; nothing is counted.
    ///
    /// A publisher asks before every message (H26).
    pub fn may_speak(&self, account: AccountId, token: Token, now: NodeTime) -> bool {
        let permission = self.permission(account, now);
        // Planted: nobody asks the gate.
        planted::is(Bug::P18) || permission.is_some_and(|permission| permission.token == token)
    }

    /// The present permission of an account, if it is good at `now`; nothing is counted.
    pub fn permission(&self, account: AccountId, now: NodeTime) -> Option<Permission> {
        self.look(account, now, Duration::ZERO).ok().map(|(permission, _)| permission)
    }

    /// Why an order for this account could not leave now, if it could not; nothing is counted.
    pub fn denied(&self, account: AccountId, now: NodeTime, reserve: Duration) -> Option<Denied> {
        self.look(account, now, reserve).err()
    }

    /// How many accounts have a permission that is good at `now`.
    pub fn permitted(&self, now: NodeTime) -> usize {
        let state = self.inner.state.read();
        state.accounts.values().filter(|permission| now < permission.deadline).count()
    }

    fn look(
        &self,
        account: AccountId,
        now: NodeTime,
        reserve: Duration,
    ) -> Result<(Permission, u64), Denied> {
        let beat_ns = self.inner.beat_ns.load(Ordering::Acquire);
        if beat_ns != NO_TICKER
            && now.since(NodeTime::after_start(Duration::from_nanos(beat_ns))) > FREEZE_GAP
        {
            return Err(Denied::Frozen);
        }
        let state = self.inner.state.read();
        let Some(permission) = state.permission_of(account) else {
            let revoked = state.revoked_at.is_some();
            return Err(if revoked { Denied::Revoked } else { Denied::NotLeased });
        };
        if now >= permission.deadline || permission.deadline.left(now) < reserve {
            return Err(Denied::TooLate);
        }
        Ok((permission, state.generation))
    }

    /// Takes over the result of a confirmed cycle.
    ///
    /// Shape: the result and now in; what has changed out. Called before anybody else hears of it.
    /// Invariants: numbers 2, 3 and 5 of this module.
    pub fn apply(&self, confirmation: &Confirmation, now: NodeTime) -> Applied {
        let mut state = self.inner.state.write();
        if confirmation.number <= state.last_cycle {
            return Applied { outdated: true, ..Applied::default() };
        }
        state.last_cycle = confirmation.number;

        let lost = |id: &AccountId| !confirmation.accounts.contains_key(id);
        let removed: Vec<AccountId> = state.accounts.keys().copied().filter(lost).collect();
        for account in &removed {
            state.accounts.remove(account);
        }

        // A cycle that was already under way when everything was revoked proves nothing about
        // the time since.
        if state.revoked_at.is_some_and(|revoked_at| confirmation.started <= revoked_at) {
            return Applied { removed, ..Applied::default() };
        }
        state.revoked_at = None;
        let mut begun = Vec::new();
        for (account, confirmed) in &confirmation.accounts {
            if state.extend(*account, *confirmed, now) {
                begun.push(*account);
            }
        }
        Applied { removed, begun, outdated: false }
    }

    /// Takes every permission back, until a cycle that starts after `now` is confirmed.
    pub fn revoke_all(&self, now: NodeTime, reason: RevokeReason) {
        {
            let mut state = self.inner.state.write();
            state.accounts.clear();
            state.generation += 1;
            state.revoked_at = state.revoked_at.max(Some(now));
        }
        metrics::counter!(names::GATE_REVOCATIONS, "reason" => reason.as_str()).increment(1);
    }

    /// Takes the permission of one account back; the next confirmed cycle that names it gives a
    /// new one.
    pub fn revoke(&self, account: AccountId) {
        self.inner.state.write().accounts.remove(&account);
    }

    /// The ticker lives. From the first beat on, a missing one closes the gate.
    pub fn beat(&self, now: NodeTime) {
        let beat_ns = u64::try_from(now.since_start().as_nanos()).unwrap_or(NO_TICKER - 1);
        self.inner.beat_ns.store(beat_ns, Ordering::Release);
    }
}

impl State {
    fn permission_of(&self, account: AccountId) -> Option<Permission> {
        #[cfg(feature = "planted")]
        if planted::is(Bug::P3) {
            // The best permission of any account, under the token that this one had.
            let deadline = self.accounts.values().map(|permission| permission.deadline).max()?;
            return self.ever.get(&account).map(|last| Permission { deadline, ..*last });
        }
        self.accounts.get(&account).copied()
    }

    /// Whether this began a new stretch.
    fn extend(&mut self, account: AccountId, confirmed: Confirmed, now: NodeTime) -> bool {
        let before = self.accounts.get(&account).copied();
        let Some(term) = confirmed.term else {
            // Owned, but not renewed: an earlier tenure's permission must not outlive it.
            if before.is_some_and(|before| before.token != confirmed.token) {
                self.accounts.remove(&account);
            }
            return false;
        };
        if !term.is_trusted(now) {
            return false;
        }
        let deadline = term.deadline();
        let unbroken = match before {
            Some(before) if before.token > confirmed.token => return false,
            Some(before) if before.token == confirmed.token => {
                if deadline <= before.deadline {
                    return false;
                }
                (now < before.deadline).then_some(before.stretch)
            }
            Some(_) | None => None,
        };
        let stretch = unbroken.unwrap_or_else(|| {
            self.stretch_last += 1;
            self.stretch_last
        });
        let permission = Permission { token: confirmed.token, deadline, stretch };
        self.accounts.insert(account, permission);
        #[cfg(feature = "planted")]
        self.ever.insert(account, permission);
        unbroken.is_none()
    }
}

fn count(denied: Denied) -> Denied {
    metrics::counter!(names::GATE_DROPPED, "reason" => denied.as_str()).increment(1);
    denied
}

/// The right to send one order now, for one account, under one token.
///
/// A broker call takes it by value, so that no order skips the check and no permit pays for two
/// orders (H10). A job that waits in a queue carries it along and asks [`SendPermit::still_valid`]
/// when it leaves (H9); the function that writes to the broker turns it into a [`SpentPermit`] in
/// the statement before the write.
#[must_use = "a permit that is not spent sends nothing"]
pub struct SendPermit {
    gate: Gate,
    account: AccountId,
    permission: Permission,
    reserve: Duration,
    generation: u64,
    given: NodeTime,
}

impl fmt::Debug for SendPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendPermit")
            .field("account", &self.account)
            .field("permission", &self.permission)
            .field("given", &self.given)
            .finish()
    }
}

impl SendPermit {
    /// For which account.
    pub fn account(&self) -> AccountId {
        self.account
    }

    /// Under which token.
    pub fn token(&self) -> Token {
        self.permission.token
    }

    /// Until when, as it stood when the permit was given.
    pub fn deadline(&self) -> NodeTime {
        self.permission.deadline
    }

    /// In which unbroken stretch of permission.
    pub fn stretch(&self) -> u64 {
        self.permission.stretch
    }

    /// Time left until the deadline when the permit was given.
    pub fn margin(&self) -> Duration {
        self.permission.deadline.left(self.given)
    }

    /// Whether an order may still be sent under this permit.
    pub fn still_valid(&self, now: NodeTime) -> bool {
        self.check(now).is_ok()
    }

    /// The last check, in the statement before the write.
    ///
    /// Shape: the permit by value and now in; what the broker is told about it out.
    /// Errors: [`Denied`]; the order was not sent and is safe to ask for again.
    pub fn spend(self, now: NodeTime) -> Result<SpentPermit, Denied> {
        let permission = self.check(now).map_err(count)?;
        Ok(SpentPermit {
            account: self.account,
            token: permission.token,
            margin: permission.deadline.left(now),
        })
    }

    /// A renewal since the permit was given makes its deadline later; a revocation, a new tenure
    /// or a hole in the permission voids it.
    fn check(&self, now: NodeTime) -> Result<Permission, Denied> {
        if planted::is(Bug::P4) {
            return Ok(self.permission); // as it was before the queue
        }
        let (permission, generation) = self.gate.look(self.account, now, self.reserve)?;
        let same = generation == self.generation
            && permission.token == self.permission.token
            && permission.stretch == self.permission.stretch;
        if same { Ok(permission) } else { Err(Denied::Void) }
    }
}

/// A permit that was spent on the order which is being written now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpentPermit {
    /// For which account.
    pub account: AccountId,
    /// Under which token; a broker that checks tokens is told it.
    pub token: Token,
    /// Time that was left until the deadline, never less than the reserve.
    pub margin: Duration,
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
