//! What every place for rows has to do.

use crate::world::*;
use lockstep::writer::*;
use reconcile::{Pair, PairState, Rejected, Stops, Volumes};
use schemas::*;
use std::time::{Duration, Instant};

use RowOutcome::{Already, Busy, Ended, NotOwner, Written};

fn states(rows: &[PairRow]) -> Vec<(PairState, Option<u64>)> {
    rows.iter()
        .map(|row| (row.pair.state, row.pair.follower_ticket.map(FollowerTicket::get)))
        .collect()
}

pub(crate) async fn stale_live_row_of_the_old_owner_is_refused_while_its_ended_rows_go_in_and_its_writer_is_empty(
    world: &impl World,
) {
    let open = pair(11, 1, PairState::Open, Some(901));
    world.store("a", [Row::Pair(open)]).await;
    world.set_owner(11, "b", 2).await;

    let writer = world.writer("a");
    writer.push(Row::Pair(versioned(pair(11, 1, PairState::Closed, Some(901)), 1, 2)));
    writer.push(Row::Pair(pair(11, 2, PairState::Open, Some(902))));
    writer.push(Row::Pair(pair(11, 3, PairState::Skipped, None)));
    writer.push(Row::AccountStatus(status(11, "copying", 1)));
    writer.push(Row::CopyEvent(event(11)));
    flush(&writer, 11).await;

    assert_eq!(writer.pending(account(11)), 0);
    let stored = states(&world.pairs(11).await);
    assert_eq!(stored, [(PairState::Closed, Some(901))], "a fact; the skip was a decision");
    assert_eq!(world.status(11).await, None);
    assert_eq!(world.count_events().await, 1);
}

pub(crate) async fn row_buffered_in_an_earlier_tenure_of_the_same_node_is_refused(
    world: &impl World,
) {
    world.set_owner(11, "b", 2).await;
    world.set_owner(11, "a", 3).await;
    let buffered = Row::Pair(pair(11, 1, PairState::Open, Some(901)));
    assert_eq!(world.store("a", [buffered]).await, [NotOwner]);
    let of_now = versioned(pair(11, 1, PairState::Open, Some(901)), 3, 1);
    assert_eq!(world.store("a", [Row::Pair(of_now)]).await, [Written]);
}

pub(crate) async fn late_end_of_an_older_copy_does_not_end_the_new_live_pair(world: &impl World) {
    world.set_owner(11, "b", 2).await;
    let live = versioned(pair(11, 1, PairState::Open, Some(902)), 2, 1);
    world.store("b", [Row::Pair(live)]).await;

    let late = versioned(pair(11, 1, PairState::Closed, Some(901)), 1, 7);
    assert_eq!(world.store("a", [Row::Pair(late.clone())]).await, [Written]);
    let stored = world.pairs(11).await;
    assert_eq!(states(&stored), [(PairState::Open, Some(902)), (PairState::Closed, Some(901))]);
    // Sent again it is known.
    assert_eq!(world.store("a", [Row::Pair(late)]).await, [Already]);
    // The live pair still changes.
    let closing = versioned(pair(11, 1, PairState::Closing, Some(902)), 2, 2);
    assert_eq!(world.store("b", [Row::Pair(closing)]).await, [Written]);
    assert_eq!(world.pairs(11).await.len(), 2);
}

pub(crate) async fn confirmed_end_of_the_same_copy_ends_the_pair_whoever_tells_it(
    world: &impl World,
) {
    world.set_owner(11, "b", 2).await;
    let live = versioned(pair(11, 1, PairState::Open, Some(901)), 2, 4);
    world.store("b", [Row::Pair(live)]).await;
    let end = versioned(pair(11, 1, PairState::Closed, Some(901)), 1, 3);
    assert_eq!(world.store("a", [Row::Pair(end)]).await, [Written]);
    let stored = world.pairs(11).await;
    assert_eq!(states(&stored), [(PairState::Closed, Some(901))]);
    assert_eq!(stored[0].pair.version, 4);
}

pub(crate) async fn ended_pair_does_not_come_back_to_life(world: &impl World) {
    let end = Row::Pair(pair(11, 1, PairState::Closed, Some(901)));
    assert_eq!(world.store("a", [end.clone()]).await, [Written]);
    let later = Row::Pair(versioned(pair(11, 1, PairState::Open, Some(901)), 1, 9));
    assert_eq!(world.store("a", [later]).await, [Ended]);
    let otherwise = Row::Pair(versioned(pair(11, 1, PairState::Failed, None), 1, 9));
    assert_eq!(world.store("a", [otherwise]).await, [Already]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Closed, Some(901))]);
}

pub(crate) async fn end_without_a_copy_from_a_former_owner_leaves_the_live_pair_alone(
    world: &impl World,
) {
    world.store("a", [Row::Pair(pair(11, 1, PairState::Sending, None))]).await;
    world.set_owner(11, "b", 2).await;
    let late = versioned(pair(11, 1, PairState::Failed, None), 1, 2);
    assert_eq!(world.store("a", [Row::Pair(late)]).await, [NotOwner]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Sending, None)]);

    // The owner looked at the broker and may say so.
    let resolved = versioned(pair(11, 1, PairState::Failed, None), 2, 2);
    assert_eq!(world.store("b", [Row::Pair(resolved)]).await, [Written]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Failed, None)]);
}

// Found by the simulation: the copy had no row, and the owner after that closed it as an orphan.
pub(crate) async fn late_decision_of_a_former_owner_does_not_forbid_the_row_of_a_copy(
    world: &impl World,
) {
    world.set_owner(11, "b", 2).await;
    let decided = pair(11, 1, PairState::Skipped, None);
    assert_eq!(world.store("a", [Row::Pair(decided)]).await, [NotOwner]);
    let opened = versioned(pair(11, 1, PairState::Open, Some(901)), 2, 2);
    assert_eq!(world.store("b", [Row::Pair(opened)]).await, [Written]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Open, Some(901))]);
}

pub(crate) async fn end_of_a_copy_that_was_renumbered_ends_its_pair(world: &impl World) {
    world.store("a", [Row::Pair(pair(11, 1, PairState::Open, Some(901)))]).await;
    let end = versioned(pair(11, 1, PairState::Closed, Some(902)), 1, 3);
    assert_eq!(world.store("a", [Row::Pair(end)]).await, [Written]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Closed, Some(902))]);
}

pub(crate) async fn one_bad_row_in_a_hundred_costs_only_itself(world: &impl World) {
    let writer = world.writer("a");
    for ticket in 1..=100 {
        let mut row = pair(11, ticket, PairState::Open, Some(900 + ticket));
        if ticket == 42 {
            row.pair.link = link(999);
        }
        writer.push(Row::Pair(row));
    }
    let begun = Instant::now();
    flush(&writer, 11).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "took {:?}", begun.elapsed());
    let stored = world.pairs(11).await;
    assert_eq!(stored.len(), 99);
    assert!(stored.iter().all(|row| row.pair.master_ticket.get() != 42));
}

pub(crate) async fn batch_that_is_sent_twice_is_stored_once(world: &impl World) {
    let rows = [
        Row::Pair(pair(11, 1, PairState::Open, Some(901))),
        Row::Pair(pair(11, 2, PairState::Closed, Some(902))),
        Row::Pair(pair(11, 3, PairState::Skipped, None)),
        Row::CopyEvent(event(11)),
    ];
    assert_eq!(world.store("a", rows.clone()).await, [Written; 4]);
    let stored = world.pairs(11).await;
    assert_eq!(world.store("a", rows).await, [Already; 4]);
    assert_eq!(world.pairs(11).await, stored);
    assert_eq!(world.count_events().await, 1);
}

pub(crate) async fn lower_version_never_replaces_a_higher_one(world: &impl World) {
    let at = |version, state| Row::Pair(versioned(pair(11, 1, state, Some(901)), 1, version));
    assert_eq!(world.store("a", [at(3, PairState::Closing)]).await, [Written]);
    assert_eq!(world.store("a", [at(2, PairState::Open)]).await, [Already]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Closing, Some(901))]);
    // A new tenure begins to count again.
    world.set_owner(11, "a", 2).await;
    let of_new = versioned(pair(11, 1, PairState::Closing, Some(902)), 2, 1);
    assert_eq!(world.store("a", [Row::Pair(of_new)]).await, [Written]);
    assert_eq!(states(&world.pairs(11).await), [(PairState::Closing, Some(902))]);
}

pub(crate) async fn second_live_pair_of_one_ticket_is_refused(world: &impl World) {
    let first = pair(11, 1, PairState::Open, Some(901));
    let mut second = pair(11, 1, PairState::Open, Some(902));
    second.pair.id = reconcile::PairId(77);
    world.store("a", [Row::Pair(first)]).await;
    let writer = world.writer("a");
    writer.push(Row::Pair(second.clone()));
    flush(&writer, 11).await;
    assert_eq!(states(&world.pairs(11).await), [(PairState::Open, Some(901))]);

    // Ended and opened in one flush: the end goes first.
    writer.push(Row::Pair(second));
    writer.push(Row::Pair(versioned(pair(11, 1, PairState::Closed, Some(901)), 1, 2)));
    flush(&writer, 11).await;
    let stored = states(&world.pairs(11).await);
    assert_eq!(stored, [(PairState::Open, Some(902)), (PairState::Closed, Some(901))]);
}

pub(crate) async fn pair_that_was_opened_and_does_not_say_which_copy_it_is_of_is_refused(
    world: &impl World,
) {
    let writer = world.writer("a");
    for state in [PairState::Open, PairState::Closing, PairState::Closed] {
        writer.push(Row::Pair(pair(11, 1, state, None)));
        flush(&writer, 11).await;
        assert_eq!(states(&world.pairs(11).await), [], "{state:?}");
    }
    for (ticket, state) in (1..).zip([PairState::Sending, PairState::Failed, PairState::Skipped]) {
        writer.push(Row::Pair(pair(11, ticket, state, None)));
    }
    flush(&writer, 11).await;
    assert_eq!(world.pairs(11).await.len(), 3, "there is none yet, or none at all");
}

pub(crate) async fn row_of_a_link_that_is_gone_is_dropped_and_the_account_is_flushed(
    world: &impl World,
) {
    let writer = world.writer("a");
    let mut gone = pair(11, 1, PairState::Open, Some(901));
    gone.pair.link = link(999);
    writer.push(Row::Pair(gone));
    // Somebody else's link does not open the fence of this account either.
    let mut foreign = pair(11, 2, PairState::Open, Some(902));
    foreign.pair.link = link(12);
    writer.push(Row::Pair(foreign));
    flush(&writer, 11).await;
    assert_eq!(world.pairs(11).await, []);
    assert_eq!(world.pairs(12).await, []);
}

pub(crate) async fn status_is_the_last_one_of_the_owner(world: &impl World) {
    let say = |session, token| Row::AccountStatus(status(11, session, token));
    assert_eq!(world.store("a", [say("connecting", 1)]).await, [Written]);
    assert_eq!(world.store("a", [say("copying", 1)]).await, [Written]);
    assert_eq!(world.status(11).await, Some(("copying".to_owned(), 1, Some(3))));
    world.set_owner(11, "b", 2).await;
    assert_eq!(world.store("b", [say("reconciling", 2)]).await, [Written]);
    assert_eq!(world.store("a", [say("copying", 1)]).await, [NotOwner]);
    assert_eq!(world.status(11).await, Some(("reconciling".to_owned(), 2, Some(3))));
}

pub(crate) async fn locked_account_row_holds_up_only_its_own_rows(world: &impl World) {
    world.lock(11).await;
    let open = |follower| Row::Pair(pair(follower, 1, PairState::Open, Some(901)));
    let failed = Row::Pair(pair(11, 2, PairState::Closed, Some(902)));
    let say = |id| Row::AccountStatus(status(id, "copying", 1));
    let outcomes = world.store("a", [failed, open(11), say(11)]).await;
    assert_eq!(outcomes, [Written, Busy, Busy]);

    let writer = world.writer("a");
    for follower in FOLLOWERS {
        writer.push(open(follower));
        writer.push(say(follower));
    }
    for follower in FOLLOWERS.skip(1) {
        flush(&writer, follower).await;
        assert_eq!(states(&world.pairs(follower).await), [(PairState::Open, Some(901))]);
    }
    assert_eq!(writer.pending(account(11)), 2);
    world.unlock(11).await;
    flush(&writer, 11).await;
    let stored = states(&world.pairs(11).await);
    assert_eq!(stored, [(PairState::Open, Some(901)), (PairState::Closed, Some(902))]);
}

pub(crate) async fn loaded_pairs_are_the_stored_ones_in_every_field(world: &impl World) {
    let full = |base: PairRow| PairRow {
        pair: Pair {
            is_pending: true,
            side: Side::Sell,
            lots_at_open: Some("0.03".parse().unwrap()),
            master_lots_at_open: "2.12345678".parse().unwrap(),
            sent_at: Some(Micros(1_790_000_000_123_456)),
            rejected: Rejected {
                stops: Some(Stops { stop_loss: Some("1.2".parse().unwrap()), take_profit: None }),
                pending_price: Some("1.0912345678".parse().unwrap()),
                target: Some("0.01".parse().unwrap()),
            },
            version: 6,
            ..base.pair
        },
        opened_at: Some(Micros(1_790_000_001_000_001)),
        volumes: Some(volumes("0.001")),
        ..base
    };
    let live = full(pair(11, 1, PairState::Open, Some(901)));
    let removed_stops = Rejected { stops: Some(Stops::default()), ..Rejected::default() };
    let mut other = pair(11, 2, PairState::Sending, None);
    other.pair.rejected = removed_stops;
    let mut ended = full(pair(11, 3, PairState::Closed, Some(i64::MAX as u64)));
    ended.closed_at = Some(Micros(-1));
    ended.close_price = Some("0.00001".parse().unwrap());
    ended.pair.reason = reconcile::EndReason::from_word("late_open_price_moved");
    assert!(ended.pair.reason.is_some());
    let of_another = pair(12, 4, PairState::Open, Some(904));

    let rows = [&live, &other, &ended, &of_another].map(|row| Row::Pair(row.clone()));
    assert_eq!(world.store("a", rows).await, [Written; 4]);
    let loaded = world.rows("b").load_pairs(account(11)).await.unwrap();
    assert_eq!(loaded, LoadedPairs { live: vec![live, other], ended: vec![ended] });
    let nothing = world.rows("b").load_pairs(account(13)).await.unwrap();
    assert_eq!(nothing, LoadedPairs { live: vec![], ended: vec![] });
}

/// What the broker takes as a volume, with this step.
fn volumes(step: &str) -> Volumes {
    Volumes { step: step.parse().unwrap(), min: "0.01".parse().unwrap() }
}

/// A session that is not open does not know it.
pub(crate) async fn what_a_broker_takes_as_a_volume_stays_until_it_says_otherwise(
    world: &impl World,
) {
    let row = |step: Option<&str>, version| {
        let row = versioned(pair(11, 1, PairState::Open, Some(901)), 1, version);
        Row::Pair(PairRow { volumes: step.map(volumes), ..row })
    };
    for (step, known) in [(Some("0.1"), "0.1"), (None, "0.1"), (Some("0.01"), "0.01")] {
        let version = world.pairs(11).await.first().map_or(1, |row| row.pair.version + 1);
        assert_eq!(world.store("a", [row(step, version)]).await, [Written]);
        assert_eq!(world.pairs(11).await[0].volumes, Some(volumes(known)));
    }
}

pub(crate) async fn load_that_fails_is_an_error(world: &impl World) {
    world.store("a", [Row::Pair(pair(11, 1, PairState::Open, Some(901)))]).await;
    world.set_away().await;
    assert!(world.rows("b").load_pairs(account(11)).await.is_err());
}
