use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn epoch(n: u64) -> Epoch {
    Epoch::new(n).unwrap()
}

fn seq(n: u64) -> Seq {
    Seq::new(n).unwrap()
}

fn at_position(e: u64, s: u64, at: i64) -> GapDetector {
    let mut detector = GapDetector::new();
    detector.accept_snapshot(epoch(e), seq(s), Micros(at));
    detector
}

#[test]
fn the_direct_successor_is_in_order_and_moves_the_position() {
    let mut detector = at_position(5, 10, 100);
    assert_eq!(detector.observe_event(epoch(5), seq(11), Micros(101)), Verdict::InOrder);
    assert_eq!(detector.position(), Some((epoch(5), seq(11))));
}

#[test]
fn before_a_snapshot_everything_is_a_new_epoch() {
    let mut detector = GapDetector::new();
    assert_eq!(detector.observe_event(epoch(5), seq(1), Micros(1)), Verdict::NewEpoch);
    assert_eq!(detector.observe_beacon(epoch(5), seq(0), Micros(1)), Verdict::NewEpoch);
    assert_eq!(detector.position(), None);
}

#[test]
fn a_hole_names_what_was_expected() {
    let mut detector = at_position(5, 10, 100);
    let verdict = detector.observe_event(epoch(5), seq(13), Micros(101));
    assert_eq!(verdict, Verdict::Gap { expected: seq(11), got: seq(13) });
    assert_eq!(detector.position(), Some((epoch(5), seq(10))));
}

#[test]
fn a_redelivered_event_is_a_duplicate_and_a_later_low_seq_is_a_restart() {
    let mut detector = at_position(5, 57, 1_000);
    assert_eq!(detector.observe_event(epoch(5), seq(57), Micros(1_000)), Verdict::Duplicate);
    assert_eq!(detector.observe_event(epoch(5), seq(3), Micros(400)), Verdict::Duplicate);
    assert_eq!(detector.observe_event(epoch(5), seq(1), Micros(1_001)), Verdict::Restarted);
    assert_eq!(detector.observe_beacon(epoch(5), seq(0), Micros(1_001)), Verdict::Restarted);
    assert_eq!(detector.observe_beacon(epoch(5), seq(56), Micros(999)), Verdict::Duplicate);
}

#[test]
fn a_lower_epoch_stays_dropped_once_a_higher_one_was_heard_by_beacon_alone() {
    let mut detector = at_position(5, 10, 100);
    assert_eq!(detector.observe_beacon(epoch(6), seq(0), Micros(90)), Verdict::NewEpoch);
    assert_eq!(detector.observe_event(epoch(5), seq(11), Micros(101)), Verdict::OldEpoch);
    assert_eq!(detector.observe_event(epoch(6), seq(1), Micros(91)), Verdict::NewEpoch);
}

#[test]
fn a_beacon_that_is_ahead_reports_the_lost_tail() {
    let mut detector = at_position(5, 10, 100);
    let verdict = detector.observe_beacon(epoch(5), seq(12), Micros(101));
    assert_eq!(verdict, Verdict::Gap { expected: seq(10), got: seq(12) });
}

proptest! {
    /// S11: whatever is lost of a stream, the loss is reported before anything behind it is applied.
    #[test]
    fn any_hole_is_reported(
        first in 0u64..1_000,
        count in 1u64..60,
        lost in proptest::collection::btree_set(0u64..60, 0..20),
    ) {
        let mut detector = at_position(7, first, 0);
        let mut reported = false;
        let mut applied = first;
        for n in (1..=count).filter(|n| !lost.contains(&(n - 1))) {
            let hole = applied + 1 != first + n;
            match detector.observe_event(epoch(7), seq(first + n), Micros(n as i64)) {
                Verdict::InOrder => {
                    prop_assert!(!hole);
                    applied += 1;
                }
                Verdict::Gap { expected, got } => {
                    reported = true;
                    prop_assert_eq!(expected, seq(applied + 1));
                    prop_assert_eq!(got, seq(first + n));
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
        let beacon = detector.observe_beacon(epoch(7), seq(first + count), Micros(99));
        let all_there = lost.iter().all(|n| *n >= count);
        prop_assert_eq!(all_there, !reported && beacon == Verdict::InOrder);
        prop_assert_eq!(all_there, beacon == Verdict::InOrder);
    }

    /// H27: for all pairs of positions, an event of an unknown incarnation is never swallowed.
    #[test]
    fn over_all_pairs_of_positions_nothing_is_silently_swallowed(
        old_epoch in 1u64..5, old_seq in 0u64..60, old_at in 0i64..1_000,
        new_epoch in 1u64..5, new_seq in 1u64..60, later in 1i64..1_000,
    ) {
        let mut detector = at_position(old_epoch, old_seq, old_at);
        let verdict = detector.observe_event(epoch(new_epoch), seq(new_seq), Micros(old_at + later));
        let expected = match (new_epoch.cmp(&old_epoch), new_seq) {
            (std::cmp::Ordering::Less, _) => Verdict::OldEpoch,
            (std::cmp::Ordering::Greater, _) => Verdict::NewEpoch,
            (_, n) if n <= old_seq => Verdict::Restarted,
            (_, n) if n == old_seq + 1 => Verdict::InOrder,
            (_, n) => Verdict::Gap { expected: seq(old_seq + 1), got: seq(n) },
        };
        prop_assert_eq!(verdict, expected);
    }

    /// S11 over any mixture of events, beacons and repairs.
    #[test]
    fn applied_positions_strictly_increase(
        steps in proptest::collection::vec((0u8..3, 1u64..4, 0u64..12, 0i64..50), 1..200),
    ) {
        let mut detector = at_position(1, 0, 0);
        let mut seen = BTreeSet::from([(epoch(1), seq(0))]);
        for (kind, e, s, at) in steps {
            let before = detector.position().unwrap();
            match kind {
                0 => {
                    detector.observe_beacon(epoch(e), seq(s), Micros(at));
                    prop_assert_eq!(detector.position(), Some(before));
                }
                1 => {
                    let verdict = detector.observe_event(epoch(e), seq(s.max(1)), Micros(at));
                    if verdict == Verdict::InOrder {
                        let after = detector.position().unwrap();
                        prop_assert_eq!(after, (before.0, before.1.next()));
                        prop_assert!(seen.insert(after));
                    } else {
                        prop_assert_eq!(detector.position(), Some(before));
                    }
                }
                _ => {
                    let snapshot = (epoch(e), seq(s));
                    if snapshot > before && Some(snapshot.0) >= detector.highest_epoch() {
                        detector.accept_snapshot(snapshot.0, snapshot.1, Micros(at));
                        prop_assert!(seen.insert(snapshot));
                    }
                }
            }
        }
    }
}
