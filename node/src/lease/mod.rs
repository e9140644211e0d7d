//! Which accounts this node owns, and for how long it may believe it.
//!
//! Ownership is on the account row: owner, end of the lease by the database's clock, and a token
//! that rises with every new tenure. One cycle is one transaction: give back what was drained,
//! renew what is held, claim what is free up to the capacity, read back what is true.
//!
//! ```text
//!  started          commit                                   deadline          row expires
//!     |------- cycle ----|------------ trusted ------------------|---- fence -------|--> others
//!     |<------------------------ lease - fence ----------------->|                  |    claim
//!     |<------------------------ lease, at the least ------------------------------>|
//! ```
//!
//! | file | decides |
//! |---|---|
//! | `term` | until when a confirmation is trusted (pure) |
//! | `cycle` | what to renew, claim, give back; what was lost and gained; when to try again (pure) |
//! | `doubt` | when the database's time, or the server, is not to be trusted (pure) |
//! | `share` | how many accounts a node takes, and how long one is left alone after a crash (pure) |
//! | `predecessor` | whether the process before this one is proven dead |
//! | `store` | the SQL of a cycle, and which connections may be used again |
//! | `claim` | the SQL that finds and takes what has no living owner |
//! | `memory` | the same without a server, for tests and simulation |
//! | `timelines` | tells the other nodes of the database's timeline, and hears theirs |
//! | `task` | the loop on its own thread, runtime and connection |
//!
//! Invariants:
//! 1. The clock is read before anything else in a cycle; trust counts from there (H3, H4).
//! 2. One cycle at a time; its result reaches the gate before it reaches anybody else (H5).
//! 3. Nobody is trusted after the row could have expired, however long connecting, begin, update
//!    and commit took.
//! 4. The owner is the node's name and a number drawn at its start: a restart is a new tenure, and
//!    two nodes with one name are two owners (H15, B7).
//! 5. A tenure is given back only after its caller said that it is drained (S20); what is not
//!    drained expires.
//!
//! Not promised: a process that is frozen between its last check and the socket write, or a packet
//! that is delayed, for longer than fence and settle can still make one order too many at a broker
//! that checks no token. The next owner finds it in its audits and closes it. A database clock
//! that jumps, or a server that lost the last renewals, is noticed by every node that was running,
//! which then leaves expired rows alone for one lease and one fence; a node that starts just after
//! the jump has nothing to compare with.

mod claim;
pub mod cycle;
pub mod doubt;
pub mod memory;
pub mod predecessor;
pub mod share;
pub mod store;
pub mod task;
pub mod term;
pub mod timelines;

/// What is added to the owner of a row that its owner, who lives, has let run out. Nobody has that
/// name, so the row is found by every node as that of an owner that is gone. No boot id ends so.
pub const LET_GO: &str = ".gone";

/// The channel on which the database announces free accounts.
pub const CHANNEL: &str = "lockstep_accounts";

pub use cycle::{
    ClaimRequest, CycleRequest, Holdings, LeaseStep, LeaseTiming, Tenure, TenureKey, diff,
};
pub(crate) use store::leads_to_pooler;
pub use store::{LeaseError, OwnershipStore, PostgresOwnership};
pub use task::{LeaseHandle, LeaseSettings, LeaseState, PermitWatch, start, watch_for_freezes};
pub use term::{CycleNumber, LeaseTerm, trusted};

use schemas::{IdError, NodeId};

/// The owner that a process writes into the rows: its name, and eight hex digits drawn now.
///
/// Call it once, at the start of the process.
pub fn boot_node_id(name: &str) -> Result<NodeId, IdError> {
    NodeId::new(format!("{name}-{:08x}", fastrand::u32(..)))
}

/// The name of a node, without what [`boot_node_id`] put behind it.
pub fn name_of(node: &str) -> &str {
    node.rsplit_once('-').map_or(node, |(name, _drawn)| name)
}

#[cfg(test)]
mod tests;
