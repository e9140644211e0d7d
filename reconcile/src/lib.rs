//! The pure reconcile: two states in, the actions that make them agree out.

pub mod action;
pub mod input;
pub mod pair;
pub mod sizing;
pub mod tag;
pub mod ticket;

pub use action::{
    AbsentFrom, Basis, CloseCause, CopyAction, CopyStep, EndReason, EndedHow, FailReason, FoundBy,
    HeldPlan, Note, Plan, SkipReason, StrayReason, WaitReason,
};
pub use input::{
    AboveMax, BelowMin, FollowerHistory, InputError, InputParts, Limits, LinkMode, LinkRules,
    ReconcileInput, Sizing, history_needed_since, quotes_needed,
};
pub use pair::{Pair, PairId, PairState, Pairs, Rejected, Stops};
pub use sizing::{SizeInput, size_copy, target_lots};
pub use ticket::{CopyView, Market, MasterView, TicketDecision, TicketInput, plan_ticket};

/// What makes the follower agree with the master, by the link's rules.
pub fn plan(input: &ReconcileInput<'_>) -> Plan {
    let _ = input;
    todo!("the next commit")
}
