//! What a person allows, and that it changed: one line of the log a change.
//!
//! Decides: what of the modes that a session reads again is another one than before.
//! In: the modes of an account, of its links, and of the fleet, as they are read. Out: the changes.
//!
//! Invariants:
//! 1. What is read for the first time is no change.
//! 2. The fleet's mode is told once a node, however many of its sessions read it, and an older read
//!    that comes late tells nothing.
//!
//! Not covered: what a mode does; see `directory` and `follower`.

use crate::directory::{FleetMode, Mode, OwnModes};
use parking_lot::Mutex;
use schemas::{AccountId, LinkId};
use std::fmt;

/// What has another mode now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModeChange {
    what: Changed,
    from: Mode,
    to: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changed {
    Account,
    Link(LinkId),
    Fleet,
}

impl fmt::Display for ModeChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModeChange { what, from, to } = self;
        match what {
            Changed::Account => write!(f, "the account's mode is {to} now, and was {from}"),
            Changed::Link(link) => write!(f, "the mode of link {link} is {to} now, and was {from}"),
            Changed::Fleet => write!(f, "the mode of the whole fleet is {to} now, and was {from}"),
        }
    }
}

/// What changed between two reads of an account. A link that was not there before is no change.
pub(super) fn changes(before: &OwnModes, now: &OwnModes) -> Vec<ModeChange> {
    let account = (Changed::Account, before.account, now.account);
    let links = now.links.iter().filter_map(|(link, to)| {
        let from = before.links.get(link)?;
        Some((Changed::Link(*link), *from, *to))
    });
    let all = std::iter::once(account).chain(links);
    let changed = all.filter(|(_, from, to)| from != to);
    changed.map(|(what, from, to)| ModeChange { what, from, to }).collect()
}

/// Writes them down.
pub(super) fn tell(account: AccountId, changes: &[ModeChange]) {
    for change in changes {
        tracing::info!(%account, "{change}");
    }
}

/// The fleet's mode as this node last heard of it.
#[derive(Debug, Default)]
pub struct FleetWatch(Mutex<Option<FleetMode>>);

impl FleetWatch {
    /// Takes in what a session has read; what that changed.
    pub(super) fn heard(&self, now: FleetMode) -> Option<ModeChange> {
        let mut last = self.0.lock();
        let before = match *last {
            Some(before) if now.changed_at <= before.changed_at => return None,
            before => before,
        };
        *last = Some(now);
        let from = before?.mode;
        (from != now.mode).then_some(ModeChange { what: Changed::Fleet, from, to: now.mode })
    }

    /// The same, written down.
    pub(super) fn tell(&self, now: Option<FleetMode>) {
        if let Some(change) = now.and_then(|now| self.heard(now)) {
            tracing::info!("{change}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::{Duration, OffsetDateTime};

    fn link(id: u64) -> LinkId {
        LinkId::new(id).unwrap()
    }

    fn told(before: &OwnModes, now: &OwnModes) -> Vec<String> {
        changes(before, now).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_mode_that_is_another_one_is_told_and_a_new_link_is_no_change() {
        let modes = |account, links: &[(u64, Mode)]| OwnModes {
            account,
            links: links.iter().map(|(id, mode)| (link(*id), *mode)).collect(),
        };
        let before = modes(Mode::Copy, &[(1, Mode::Copy), (2, Mode::Paused), (3, Mode::Copy)]);
        assert!(told(&before, &before).is_empty());
        let now = modes(
            Mode::CloseOnly,
            &[(1, Mode::Paused), (2, Mode::Copy), (3, Mode::Copy), (4, Mode::Paused)],
        );
        assert_eq!(
            told(&before, &now),
            [
                "the account's mode is close_only now, and was copy",
                "the mode of link 1 is paused now, and was copy",
                "the mode of link 2 is copy now, and was paused",
            ]
        );
        assert!(told(&now, &modes(Mode::CloseOnly, &[])).is_empty());
    }

    #[test]
    fn the_kill_switch_is_told_once_a_node_and_a_late_read_tells_nothing() {
        let at = |s, mode| FleetMode {
            mode,
            changed_at: OffsetDateTime::UNIX_EPOCH + Duration::seconds(s),
        };
        let watch = FleetWatch::default();
        assert_eq!(watch.heard(at(1, Mode::Copy)), None);
        let change = watch.heard(at(2, Mode::Paused)).unwrap().to_string();
        assert_eq!(change, "the mode of the whole fleet is paused now, and was copy");
        assert_eq!(watch.heard(at(2, Mode::Paused)), None, "another session has read it as well");
        assert_eq!(watch.heard(at(1, Mode::Copy)), None, "this one began to read before it");
        assert!(watch.heard(at(3, Mode::Copy)).is_some());
        assert_eq!(watch.heard(at(5, Mode::Copy)), None, "paused and resumed in between");
    }
}
