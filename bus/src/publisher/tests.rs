use super::*;
use crate::publisher::start_epoch;
use crate::testing::{book_of, epoch, position, seq, ticket};
use proptest::prelude::*;
use schemas::CloseReason;

const NO_CLOSINGS: BTreeMap<MasterTicket, Closing> = BTreeMap::new();

fn speaking(queue_max: usize) -> PublisherCore {
    let mut core = PublisherCore::new(AccountId::MIN, epoch(100), queue_max);
    core.observe(Micros(1), Book::default(), &NO_CLOSINGS, Instant::now());
    core.go_online(Micros(1), EpochReason::Disconnected);
    core.take(usize::MAX);
    core
}

fn events(messages: &[Outgoing]) -> Vec<&TradeEvent> {
    messages
        .iter()
        .filter_map(|m| match m {
            Outgoing::Event { event, .. } => Some(event),
            Outgoing::Beacon(_) => None,
        })
        .collect()
}

#[test]
fn the_first_state_is_announced_by_a_beacon_and_not_as_opens() {
    let mut core = PublisherCore::new(AccountId::MIN, epoch(100), 10);
    core.go_online(Micros(1), EpochReason::Disconnected);
    assert!(core.state(Micros(1)).is_none());
    assert!(core.take(10).is_empty());
    assert_eq!(core.observe(Micros(2), book_of(&[1, 2]), &NO_CLOSINGS, Instant::now()), 0);
    let sent = core.take(10);
    let [Outgoing::Beacon(beacon)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((beacon.epoch, beacon.seq), (epoch(100), seq(0)));
    assert_eq!(beacon.book.positions.len(), 2);
}

#[test]
fn changes_before_the_first_state_are_refused() {
    let mut core = PublisherCore::new(AccountId::MIN, epoch(100), 10);
    let change = Change::PositionOpened(position(1, "1"));
    let refused = core.publish(Micros(1), vec![change], Instant::now());
    assert!(matches!(refused, Err(BusError::NotObserved { .. })));
}

#[test]
fn a_state_becomes_events_with_places_and_what_is_known_of_the_close() {
    let mut core = speaking(10);
    core.observe(Micros(5), book_of(&[1, 2]), &NO_CLOSINGS, Instant::now());
    let closing = Closing { price: None, reason: CloseReason::StopLoss };
    let closings = BTreeMap::from([(ticket(1), closing)]);
    // A stamp from before the last event does not go back in time.
    core.observe(Micros(4), book_of(&[2]), &closings, Instant::now());
    let sent = core.take(10);
    let sent = events(&sent);
    assert_eq!(sent.iter().map(|e| e.seq.get()).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(sent.iter().all(|e| e.at == Micros(5)));
    let Change::PositionClosed { reason, .. } = &sent[2].change else { panic!("{sent:?}") };
    assert_eq!(*reason, CloseReason::StopLoss);
}

#[test]
fn a_full_queue_is_dropped_and_the_epoch_raised_with_a_beacon_of_the_new_state() {
    let mut core = speaking(3);
    core.observe(Micros(500), book_of(&[1, 2, 3]), &NO_CLOSINGS, Instant::now());
    core.observe(Micros(501), book_of(&[1, 2, 3, 4]), &NO_CLOSINGS, Instant::now());
    let sent = core.take(10);
    let [Outgoing::Beacon(beacon)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((beacon.epoch, beacon.seq), (epoch(501), seq(0)));
    assert_eq!(*beacon.book, book_of(&[1, 2, 3, 4]));
    assert_eq!(core.take_raised(), [EpochReason::QueueFull]);
}

#[test]
fn what_waited_for_a_lost_connection_is_dropped_and_the_epoch_raised_above_a_slow_clock() {
    let mut core = speaking(10);
    core.observe(Micros(5), book_of(&[1]), &NO_CLOSINGS, Instant::now());
    assert_eq!(core.go_offline(), 1);
    assert_eq!(core.observe(Micros(6), book_of(&[1, 2]), &NO_CLOSINGS, Instant::now()), 0);
    core.go_online(Micros(7), EpochReason::Disconnected);
    let sent = core.take(10);
    let [Outgoing::Beacon(beacon)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((beacon.epoch, beacon.seq), (epoch(101), seq(0)));
    assert_eq!(*beacon.book, book_of(&[1, 2]));
}

#[test]
fn a_beacon_speaks_of_exactly_the_events_before_it() {
    let mut core = speaking(10);
    core.observe(Micros(5), book_of(&[1]), &NO_CLOSINGS, Instant::now());
    core.push_beacon(Micros(6));
    core.observe(Micros(7), book_of(&[1, 2]), &NO_CLOSINGS, Instant::now());
    let sent = core.take(10);
    let [Outgoing::Event { .. }, Outgoing::Beacon(beacon), Outgoing::Event { .. }] = &sent[..]
    else {
        panic!("{sent:?}")
    };
    assert_eq!(beacon.seq, seq(1));
    assert_eq!(*beacon.book, book_of(&[1]));
}

#[test]
fn a_side_that_turned_under_one_ticket_only_closes_and_the_state_agrees() {
    let mut core = speaking(10);
    core.observe(Micros(5), book_of(&[1]), &NO_CLOSINGS, Instant::now());
    let mut turned = book_of(&[1]);
    let position = turned.positions.get_mut(&ticket(1)).unwrap();
    position.side = position.side.opposite();
    assert_eq!(core.observe(Micros(6), turned, &NO_CLOSINGS, Instant::now()), 1);
    assert_eq!(*core.state(Micros(6)).unwrap().book, Book::default());
}

#[test]
fn a_state_that_was_given_up_begins_a_new_epoch_when_it_is_known_again() {
    let mut core = speaking(10);
    core.suspend();
    assert!(core.state(Micros(5)).is_none());
    core.push_beacon(Micros(5));
    assert!(core.take(10).is_empty());
    assert_eq!(core.observe(Micros(6), book_of(&[1]), &NO_CLOSINGS, Instant::now()), 0);
    assert_eq!(core.position(), (epoch(101), seq(0)));
    assert_eq!(core.take_raised(), [EpochReason::Suspended]);
}

#[test]
fn a_higher_position_heard_silences_for_good_and_its_own_echo_does_not() {
    let mut core = speaking(10);
    core.observe(Micros(5), book_of(&[1]), &NO_CLOSINGS, Instant::now());
    core.hear(epoch(100), seq(1));
    core.hear(epoch(99), seq(50));
    assert_eq!(core.superseded(), None);
    core.hear(epoch(101), seq(0));
    assert_eq!(core.superseded(), Some(epoch(101)));
    assert!(core.take(10).is_empty());
    assert_eq!(core.observe(Micros(6), book_of(&[]), &NO_CLOSINGS, Instant::now()), 0);
    assert!(core.state(Micros(7)).is_none());
}

proptest! {
    #[test]
    fn a_start_epoch_is_above_everything_known(
        now in any::<i64>(), stored in proptest::option::of(1u64..1 << 60),
        heard in proptest::option::of(1u64..1 << 60),
    ) {
        let (stored, heard) = (stored.map(epoch), heard.map(epoch));
        let start = start_epoch(Micros(now), stored, heard);
        prop_assert!(Some(start) > stored && Some(start) > heard);
        prop_assert!(i128::from(start.get()) >= i128::from(now));
    }

    /// Followers that apply what is sent, from the last beacon at seq 0 on, have the state.
    #[test]
    fn what_is_sent_leads_to_the_state_and_positions_only_grow(
        steps in proptest::collection::vec((0u8..8, proptest::collection::btree_set(1u64..9, 0..6)), 1..60),
    ) {
        let mut core = speaking(7);
        let mut last = core.position();
        let mut book = Book::default();
        for (at, (step, tickets)) in steps.into_iter().enumerate() {
            let at = Micros(at as i64);
            match step {
                0 => { core.go_offline(); }
                1 => core.go_online(at, EpochReason::Disconnected),
                2 => core.push_beacon(at),
                3 => core.suspend(),
                _ => {
                    let tickets: Vec<_> = tickets.into_iter().collect();
                    core.observe(at, book_of(&tickets), &NO_CLOSINGS, Instant::now());
                }
            }
            prop_assert!(core.position() >= last);
            last = core.position();
            if step % 2 == 0 {
                continue;
            }
            for message in core.take(usize::MAX) {
                match message {
                    Outgoing::Event { event, .. } => book.apply(&event.change),
                    Outgoing::Beacon(state) if state.seq == seq(0) => book = (*state.book).clone(),
                    Outgoing::Beacon(state) => prop_assert_eq!(&book, &*state.book),
                }
            }
            if let Some(state) = core.state(at) && core.speaks() {
                prop_assert_eq!(&book, &*state.book);
            }
        }
    }
}
