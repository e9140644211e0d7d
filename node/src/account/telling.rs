//! The account's status row: what its session does, for people.
//!
//! Decides: the word, and the reason where nothing is copied.
//! In: the follower's state. Out: rows of `account_status`, at changes and every [`STATUS_EVERY`].

use super::session::{AccountSession, NETTING_DETAIL, NETTING_WORD};
use crate::follower::Follower;
use crate::writer::{AccountStatus, Row};
use schemas::AccountId;
use std::collections::BTreeMap;
use std::time::Duration;

/// At most this often an account's status row is written.
pub(super) const STATUS_EVERY: Duration = Duration::from_secs(5);
/// Most silent masters that a status names: three of the longest names fit its column.
const NAMED_MAX: usize = 3;

impl AccountSession {
    pub(super) fn routine_status(&mut self) {
        if self.cannot_follow {
            return self.status(NETTING_WORD, Some(NETTING_DETAIL.to_owned()), false);
        }
        let word = match &self.follower {
            Some(follower) if follower.is_paused() => "paused",
            Some(follower) if !follower.is_copying() => "reconciling",
            Some(_) => "copying",
            None => "leading",
        };
        let reconciling = self.follower.as_ref().filter(|_| word == "reconciling");
        let detail = reconciling.and_then(|f| not_heard(&f.silent_masters(), &self.master_names));
        self.status(word, detail, false);
    }

    /// Writes what the session does; unless `now` is set, at most every [`STATUS_EVERY`] and at changes.
    pub(super) fn status(&mut self, session: &'static str, detail: Option<String>, at_once: bool) {
        let now = self.context.now();
        let changed = self.last_word != Some(session);
        let recent = self.last_status.is_some_and(|at| now.node.since(at) < STATUS_EVERY);
        if recent && !changed && !at_once {
            return;
        }
        self.last_status = Some(now.node);
        self.last_word = Some(session);
        let view = self.follower.as_ref().and_then(Follower::view);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        self.context.writer.push(Row::AccountStatus(AccountStatus {
            account: self.owner.account,
            token: self.owner.token,
            session,
            detail,
            funds: view.and_then(|view| view.funds.clone()),
            positions_open: view.map(|view| count(view.positions.len())),
            pendings_open: view.map(|view| count(view.pendings.len())),
            at: now.wall,
        }));
    }
}

/// Why nothing is copied, if that is for masters that are silent.
fn not_heard(masters: &[AccountId], names: &BTreeMap<AccountId, String>) -> Option<String> {
    let name = |id: &AccountId| names.get(id).cloned().unwrap_or_else(|| id.to_string());
    let (named, rest) = masters.split_at(masters.len().min(NAMED_MAX));
    let named: Vec<String> = named.iter().map(name).collect();
    match (masters.len(), rest.len()) {
        (0, _) => None,
        (1, _) => Some(format!("master {} is not heard", named.join(", "))),
        (_, 0) => Some(format!("masters {} are not heard", named.join(", "))),
        (_, more) => Some(format!("masters {} and {more} more are not heard", named.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_that_waits_names_the_masters_that_are_silent() {
        let ids: Vec<AccountId> = (1..=5).map(|id| AccountId::new(id).unwrap()).collect();
        let names = ids[..4].iter().zip(["boss", "chief", "head", "lead"]);
        let names = names.map(|(id, name)| (*id, name.to_owned())).collect();
        let said = |masters: &[AccountId]| not_heard(masters, &names).unwrap_or_default();
        assert_eq!(not_heard(&[], &names), None);
        assert_eq!(said(&ids[..1]), "master boss is not heard");
        assert_eq!(said(&ids[4..]), "master 5 is not heard");
        assert_eq!(said(&ids[..2]), "masters boss, chief are not heard");
        assert_eq!(said(&ids), "masters boss, chief, head and 2 more are not heard");
    }
}
