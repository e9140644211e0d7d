//! A link that was removed, and when its follower forgets it.

use super::world::*;
use crate::follower::Input;
use reconcile::{LinkMode, LinkRules, Pairs};

fn closes_only() -> LinkRules {
    LinkRules { mode: LinkMode::CloseOnly, ..rules(LINK, MASTER) }
}

fn other() -> (LinkRules, Pairs) {
    (rules(OTHER_LINK, OTHER_MASTER), Pairs::default())
}

#[test]
fn a_removed_link_is_followed_to_its_last_copy_and_its_silent_master_then_holds_nobody_up() {
    let mut world = World::copying_with(Setup {
        links: vec![(rules(LINK, MASTER), Pairs::default()), other()],
        ..Setup::default()
    });
    world.master_opens(1);
    world.calm(seconds(1));
    world.step(Input::Links(vec![(closes_only(), Pairs::default()), other()]));
    world.step(Input::Links(vec![other()]));
    assert!(world.follower.has_link(link(LINK)), "its copy is open");
    world.master_closes(1);
    world.calm(seconds(1));
    assert_eq!(world.actions(1), ["open", "close"]);
    world.doubt();
    assert!(!world.follower.is_copying());
    world.step(Input::Links(vec![other()]));
    assert!(!world.follower.has_link(link(LINK)));
    assert!(world.follower.is_copying());
    assert_eq!(world.follower.masters().into_iter().collect::<Vec<_>>(), [account(OTHER_MASTER)]);
    assert_eq!(world.follower.doubtful_masters(), []);
}

#[test]
fn a_master_that_was_never_heard_is_silent_as_one_that_is_doubtful() {
    let links = vec![(rules(LINK, MASTER), Pairs::default()), other()];
    let mut world = World::new(Setup { links, ..Setup::default() });
    world.open_session();
    let both = [account(MASTER), account(OTHER_MASTER)];
    assert_eq!(
        (world.follower.silent_masters(), world.follower.is_copying()),
        (both.into(), false)
    );
    world.snapshots();
    assert_eq!(world.follower.silent_masters(), []);
    world.doubt();
    assert_eq!(world.follower.silent_masters(), world.follower.doubtful_masters());
    assert!(!world.follower.silent_masters().is_empty());
}
