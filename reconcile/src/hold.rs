//! The second look at a plan that rests on much absence (H41).
//!
//! Decides: whether a plan that would close, or mark closed, more than max(3, 30 %) of a
//! link's tickets only because a list is without them, is given out or held.
//!
//! Invariants:
//! 1. A held plan has no actions: a read that is doubtful for closing is doubtful for opening.
//! 2. Only a later pair of reads confirms: both newer than the held plan's, the follower's and
//!    the plan itself at least `second_look_after` later.
//! 3. Only what is absent in both looks, from the same list, is confirmed. What is newly absent
//!    is judged by the same limit.
//!
//! Not covered: the live path. A close event is a statement of the master, not an absence.

use crate::action::{AbsentFrom, Basis, HeldPlan};
use crate::input::{InputParts, Limits};
use schemas::MasterTicket;
use std::collections::BTreeSet;

/// The held plan, if this one has to be held.
pub(crate) fn hold(
    parts: &InputParts<'_>,
    basis: Basis,
    absent: BTreeSet<(MasterTicket, AbsentFrom)>,
    of: usize,
) -> Option<HeldPlan> {
    if !is_too_much(absent.len(), of, parts.limits) {
        return None;
    }
    let earlier = parts.confirmed.filter(|held| held.link == parts.rules.link);
    if let Some(held) = earlier {
        if is_second_look(held, basis, parts.limits) {
            let unconfirmed = absent.difference(&held.absent).count();
            if !is_too_much(unconfirmed, of, parts.limits) {
                return None;
            }
        } else if absent.is_subset(&held.absent) {
            // Asked again too early: the first look keeps its time, or it would never pass.
            return Some(held.clone());
        }
    }
    Some(HeldPlan { link: parts.rules.link, absent, of, basis })
}

fn is_too_much(absent: usize, of: usize, limits: &Limits) -> bool {
    absent > limits.absent_max
        && absent.saturating_mul(100) > of.saturating_mul(limits.absent_max_percent)
}

fn is_second_look(held: &HeldPlan, basis: Basis, limits: &Limits) -> bool {
    let first = held.basis;
    let master_is_newer = basis.epoch > first.epoch
        || (basis.epoch == first.epoch
            && basis.seq >= first.seq
            && basis.master_at > first.master_at);
    master_is_newer
        && basis.follower_at.since(first.follower_at) >= limits.second_look_after
        && basis.planned_at.since(first.planned_at) >= limits.second_look_after
}
