//! S7, S11, S12, S13 and L6 of the reconciles, from what the nodes noted.
//!
//! The notes are the nodes' own words: good enough to show that a node broke its own rules, not
//! to show that it did not.

use super::{Evidence, Report};
use serde::{Deserialize, Serialize};

/// One note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeNote {}

pub(super) fn check(_evidence: &Evidence, _report: &mut Report) {}
