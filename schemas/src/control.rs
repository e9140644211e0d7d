//! What is asked of the owner of an account, and what it answers.
//!
//! These messages are between programs of one release: an operator's command line or API, and the
//! node that owns the account. They have the version and the encoding of every other message.

use crate::ids::{
    AccountId, Epoch, FollowerTicket, LinkId, MasterTicket, Micros, NodeId, Seq, Symbol,
};
use crate::position::Side;
use crate::quantity::Lots;
use serde::{Deserialize, Serialize};

/// Steps in one answer; it stays well under a server's payload limit. What is more is counted.
pub const PLANNED_STEPS_MAX: usize = 2_000;

/// What the owner is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlVerb {
    /// Say what a comparison of both accounts would do now, and do nothing.
    Plan,
    /// Compare both accounts now, and do what comes of it. The answer is as for `Plan`.
    Reconcile,
    /// Hand the account over to another node, cleanly.
    Release,
}

/// A request to the owner of an account.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlRequest {
    /// Version of the contract.
    pub v: u8,
    /// The account.
    pub account: AccountId,
    /// What to do.
    pub verb: ControlVerb,
    /// Only this link of the account. Absent: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkId>,
}

/// What the owner answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlReply {
    /// Version of the contract.
    pub v: u8,
    /// The account.
    pub account: AccountId,
    /// Its owner.
    pub node: NodeId,
    /// Why nothing is done. Absent: it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// The plan of each link, by number; none for `Release`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plans: Vec<LinkPlan>,
}

/// What a comparison of a link comes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkPlan {
    /// The link.
    pub link: LinkId,
    /// Why there is no plan: one side is not known well enough. Then everything below is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// Incarnation of the master's publisher that was compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// Last event that was compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
    /// When the follower's account was read (node's clock).
    pub at_us: Micros,
    /// It would close many copies because they are absent, and waits for a second look.
    pub held: bool,
    /// What would be done, ascending by ticket.
    pub steps: Vec<PlannedStep>,
    /// Steps that found no room in the answer.
    pub left_out: u32,
    /// Tickets about which nothing is done now.
    pub waiting: Vec<PlannedWait>,
}

/// One step about one ticket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedStep {
    /// The master's trade or order.
    pub ticket: MasterTicket,
    /// What is done; a word of the crate reconcile.
    pub step: String,
    /// The copy, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<FollowerTicket>,
    /// Symbol at the follower's broker, where the step names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symbol: Option<Symbol>,
    /// Direction of the copy, where the step names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub side: Option<Side>,
    /// Volume that is traded, where some is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lots: Option<Lots>,
    /// Why, where the step says it; a word of the crate reconcile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A ticket that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedWait {
    /// The master's trade or order.
    pub ticket: MasterTicket,
    /// For what; a word of the crate reconcile.
    pub why: String,
}
