use super::*;
use crate::testing::{book_of, epoch, position, seq};
use schemas::{Change, CloseReason};

const MASTER: AccountId = AccountId::MIN;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn opened(e: u64, s: u64, n: u64) -> Arc<TradeEvent> {
    event(e, s, Change::PositionOpened(position(n, "1")))
}

fn closed(e: u64, s: u64, n: u64) -> Arc<TradeEvent> {
    let (price, reason) = (None, CloseReason::Unknown);
    event(e, s, Change::PositionClosed { position: position(n, "1"), price, reason })
}

/// An event whose time follows its position, as a publisher's does.
fn event(e: u64, s: u64, change: Change) -> Arc<TradeEvent> {
    let at = Micros((e * 1_000 + s) as i64);
    Arc::new(TradeEvent { account: MASTER, epoch: epoch(e), seq: seq(s), at, change })
}

fn snapshot(e: u64, s: u64, tickets: &[u64]) -> MasterSnapshot {
    MasterSnapshot {
        account: MASTER,
        epoch: epoch(e),
        seq: seq(s),
        at: Micros((e * 1_000 + s) as i64),
        book: book_of(tickets),
        funds: None,
    }
}

fn beacon(e: u64, s: u64, tickets: &[u64]) -> Beacon {
    let book = book_of(tickets);
    Beacon {
        account: MASTER,
        epoch: epoch(e),
        seq: seq(s),
        at: Micros((e * 1_000 + s) as i64),
        open_trades: book.positions.len() as u32,
        open_pendings: 0,
        digest: book.digest(),
        funds: None,
    }
}

/// What came out, in words short enough to compare.
fn words(outputs: &[FeedOutput]) -> Vec<String> {
    let follower = |to: &Recipients| match to {
        Recipients::All => String::new(),
        Recipients::One(account) => format!("@{account}"),
    };
    outputs
        .iter()
        .filter_map(|output| match output {
            FeedOutput::Send { to, message } => Some(match message {
                FeedMessage::Event { event, doubtful, .. } => {
                    let doubt = if *doubtful { "?" } else { "" };
                    format!("{}:{}{doubt}", event.epoch, event.seq)
                }
                FeedMessage::Snapshot(s, reason) => {
                    let tickets: Vec<_> = s.book.positions.keys().map(|t| t.get()).collect();
                    let (place, to) = (format!("{}:{}", s.epoch, s.seq), follower(to));
                    format!("snapshot{to} {place} {tickets:?} {}", reason.as_str())
                }
                FeedMessage::Doubt(reason) => format!("doubt{} {}", follower(to), reason.as_str()),
                FeedMessage::Funds(_) => "funds".into(),
            }),
            FeedOutput::RequestSnapshot { .. } => Some("request".into()),
            FeedOutput::CountTriesExhausted => Some("alarm".into()),
            FeedOutput::CountDropped(reason) => Some(format!("dropped {}", reason.as_str())),
            FeedOutput::TwoPublishers { followed, ignored } => {
                Some(format!("two publishers {followed} {ignored}"))
            }
            FeedOutput::CountGap(_) | FeedOutput::DoubtEnded(_) => None,
        })
        .collect()
}

fn new_feed() -> FeedState {
    FeedState::new(MASTER, FeedSettings::default(), 7, Duration::ZERO)
}

/// A feed at 5:10 with tickets 1 and 2, at second 1.
fn joined() -> FeedState {
    let mut feed = new_feed();
    feed.tick(Duration::ZERO);
    feed.observe_reply(Some(snapshot(5, 10, &[1, 2])), ms(1_000));
    assert_eq!(feed.doubt(), None);
    feed
}

fn see(feed: &mut FeedState, event: Arc<TradeEvent>, now: Duration) -> Vec<String> {
    words(&feed.observe_event(event, Instant::now(), now))
}

#[test]
fn joining_brings_the_snapshot_up_to_what_arrived_meanwhile() {
    let mut feed = new_feed();
    assert_eq!(words(&feed.tick(Duration::ZERO)), ["request"]);
    assert!(see(&mut feed, opened(5, 10, 2), ms(1)).is_empty());
    assert!(see(&mut feed, opened(5, 11, 3), ms(2)).is_empty());
    let out = feed.observe_reply(Some(snapshot(5, 10, &[1, 2])), ms(3));
    assert_eq!(words(&out), ["snapshot 5:11 [1, 2, 3] joining"]);
    assert_eq!(see(&mut feed, opened(5, 12, 4), ms(4)), ["5:12"]);
}

#[test]
fn a_hole_behind_the_snapshot_asks_again() {
    let mut feed = new_feed();
    feed.tick(Duration::ZERO);
    see(&mut feed, opened(5, 12, 3), ms(2));
    assert!(words(&feed.observe_reply(Some(snapshot(5, 10, &[1])), ms(3))).is_empty());
    assert_eq!(feed.doubt(), Some(DoubtReason::Joining));
    assert_eq!(words(&feed.tick(ms(1_000))), ["request"]);
    let out = feed.observe_reply(Some(snapshot(5, 12, &[1, 2, 3])), ms(1_001));
    assert_eq!(words(&out), ["snapshot 5:12 [1, 2, 3] joining"]);
}

#[test]
fn in_a_gap_known_endings_pass_and_opens_wait_for_the_snapshot() {
    let mut feed = joined();
    assert_eq!(see(&mut feed, opened(5, 12, 4), ms(2_000)), ["doubt gap", "request"]);
    assert_eq!(see(&mut feed, closed(5, 13, 1), ms(2_001)), ["5:13?"]);
    // Nobody knows ticket 9, and ticket 1 has ended already.
    assert!(see(&mut feed, closed(5, 14, 9), ms(2_002)).is_empty());
    assert!(see(&mut feed, closed(5, 15, 1), ms(2_003)).is_empty());
    let out = feed.observe_reply(Some(snapshot(5, 15, &[2, 3, 4])), ms(2_010));
    assert_eq!(words(&out), ["snapshot 5:15 [2, 3, 4] gap"]);
}

#[test]
fn the_event_that_shows_the_gap_passes_itself_if_it_is_a_known_ending() {
    let mut feed = joined();
    let out = see(&mut feed, closed(5, 12, 2), ms(2_000));
    assert_eq!(out, ["doubt gap", "5:12?", "request"]);
}

#[test]
fn a_beacon_finds_a_lost_last_event() {
    let mut feed = joined();
    let out = feed.observe_beacon(&beacon(5, 11, &[2]), ms(2_000));
    assert_eq!(words(&out), ["doubt beacon_ahead", "request"]);
    // The reply must contain what the beacon spoke of.
    assert!(words(&feed.observe_reply(Some(snapshot(5, 10, &[1, 2])), ms(2_001))).is_empty());
    feed.tick(ms(3_000));
    let out = feed.observe_reply(Some(snapshot(5, 11, &[2])), ms(3_001));
    assert_eq!(words(&out), ["snapshot 5:11 [2] beacon_ahead"]);
}

#[test]
fn a_digest_that_differs_is_a_doubt_and_one_that_agrees_is_not() {
    let mut feed = joined();
    assert!(words(&feed.observe_beacon(&beacon(5, 10, &[1, 2]), ms(2_000))).is_empty());
    let out = feed.observe_beacon(&beacon(5, 10, &[1]), ms(4_000));
    assert_eq!(words(&out), ["doubt digest_differs", "request"]);
}

#[test]
fn six_seconds_without_a_beacon_are_a_doubt() {
    let mut feed = joined();
    assert_eq!(feed.deadline(), ms(7_000));
    assert!(words(&feed.tick(ms(6_999))).is_empty());
    assert_eq!(words(&feed.tick(ms(7_000)))[0], "doubt silent");
    feed.tick(ms(7_200));
    assert_eq!(feed.request, Request::InFlight);
}

// The bus is slow, and the master trades all the time: every beacon comes late here.
#[test]
fn a_beacon_that_events_of_this_process_overtook_is_a_sign_of_life_and_no_restart() {
    let mut feed = joined();
    let mut last = 10;
    for second in 2..20 {
        last += 1;
        let heard =
            feed.observe_local_event(opened(5, last, 8), Instant::now(), ms(second * 1_000));
        assert_eq!(words(&heard), [format!("5:{last}")]);
        // Sent before the event, by a clock that had gone on further when it was.
        let late = Beacon { at: Micros(90_000), ..beacon(5, last - 1, &[7]) };
        let out = feed.observe_beacon(&late, ms(second * 1_000 + 100));
        assert_eq!(words(&out), ["dropped came_locally"]);
    }
    assert_eq!(feed.doubt(), None);
    let again = feed.observe_event(opened(5, last, 8), Instant::now(), ms(19_200));
    assert_eq!(words(&again), ["dropped came_locally"]);
    // One that was overtaken by nothing is judged as ever.
    let restarted = Beacon { at: Micros(99_000), ..beacon(5, last, &[7]) };
    let out = feed.observe_beacon(&restarted, ms(19_300));
    assert_eq!(words(&out)[0], "doubt digest_differs");
}

#[test]
fn a_publisher_back_under_its_old_epoch_is_followed_from_its_new_count() {
    let mut feed = joined();
    let low = TradeEvent { at: Micros(99_000), ..(*opened(5, 1, 7)).clone() };
    let out = words(&feed.observe_event(Arc::new(low), Instant::now(), ms(2_000)));
    assert_eq!(out, ["doubt restarted", "request"]);
    let reply = MasterSnapshot { at: Micros(99_001), ..snapshot(5, 1, &[7]) };
    let out = feed.observe_reply(Some(reply), ms(2_001));
    assert_eq!(words(&out), ["snapshot 5:1 [7] restarted"]);
    assert_eq!(
        see(
            &mut feed,
            Arc::new(TradeEvent { at: Micros(99_002), ..(*opened(5, 2, 8)).clone() }),
            ms(2_002)
        ),
        ["5:2"]
    );
}

#[test]
fn a_restarted_publisher_with_a_slow_clock_is_believed_after_the_quick_tries() {
    let mut feed = joined();
    assert_eq!(
        words(&feed.observe_beacon(&beacon(5, 2, &[7]), ms(5_000))),
        ["dropped late_beacon"]
    );
    let mut now = ms(7_000);
    feed.tick(now);
    for tries in 1..=QUICK_TRIES {
        // The first waits for its jitter, the others for their spacing.
        now += ms(500);
        feed.tick(now);
        assert_eq!(feed.request, Request::InFlight);
        let out = words(&feed.observe_reply(Some(snapshot(5, 2, &[7])), now));
        assert_eq!(out.is_empty(), tries < QUICK_TRIES, "{out:?}");
    }
    assert_eq!((feed.position(), feed.doubt()), (Some((epoch(5), seq(2))), None));
}

#[test]
fn a_new_epoch_waits_for_its_snapshot_and_the_old_one_is_dropped() {
    let mut feed = joined();
    let out = feed.observe_beacon(&beacon(6, 0, &[1]), ms(2_000));
    assert_eq!(words(&out), ["doubt new_epoch", "request"]);
    assert_eq!(see(&mut feed, opened(5, 11, 3), ms(2_001)), ["dropped old_epoch"]);
    let refused = feed.observe_reply(Some(snapshot(5, 11, &[1, 2, 3])), ms(2_002));
    assert_eq!(words(&refused), ["dropped old_epoch_snapshot"]);
    feed.tick(ms(3_000));
    let out = feed.observe_reply(Some(snapshot(6, 0, &[1])), ms(3_001));
    assert_eq!(words(&out), ["snapshot 6:0 [1] new_epoch"]);
    let old = feed.observe_beacon(&beacon(5, 12, &[1]), ms(3_002));
    assert_eq!(words(&old), ["dropped old_epoch_beacon"]);
}

#[test]
fn requests_are_spaced_and_slow_down_after_five_with_an_alarm() {
    let mut feed = new_feed();
    let (mut sent, mut alarms) = (Vec::new(), 0);
    for now in (0..20_000).step_by(10).map(ms) {
        let mut out = words(&feed.tick(now));
        if out.contains(&"request".to_owned()) {
            sent.push(now);
            out.extend(words(&feed.observe_reply(None, now + ms(1))));
        }
        alarms += out.iter().filter(|word| *word == "alarm").count();
    }
    let gaps: Vec<Duration> = sent.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(gaps.iter().all(|gap| *gap >= ms(250)), "{gaps:?}");
    assert!(gaps[..4].iter().all(|gap| *gap <= ms(480)), "{gaps:?}");
    assert!(gaps[4..].iter().all(|gap| *gap >= ms(1_990) && *gap <= ms(2_230)), "{gaps:?}");
    assert!(alarms >= 2, "{alarms}");
}

#[test]
fn a_new_epoch_does_not_wait_for_a_slow_retry() {
    let mut feed = new_feed();
    let mut now = Duration::ZERO;
    for _ in 0..6 {
        now += ms(2_500);
        feed.tick(now);
        feed.observe_reply(None, now);
    }
    now += ms(300);
    assert!(words(&feed.tick(now)).is_empty());
    assert_eq!(words(&feed.observe_beacon(&beacon(9, 0, &[]), now)), ["request"]);
}

#[test]
fn a_fresh_snapshot_goes_to_who_asked_and_is_not_a_doubt() {
    let mut feed = joined();
    let (a, b) = (AccountId::new(71).unwrap(), AccountId::new(72).unwrap());
    assert_eq!(words(&feed.observe_request(a, ms(2_000))), ["request"]);
    assert!(words(&feed.observe_request(b, ms(2_001))).is_empty());
    assert_eq!(see(&mut feed, opened(5, 11, 3), ms(2_002)), ["5:11"]);
    // The reply is from before event 11, which was applied meanwhile (H31).
    let out = feed.observe_reply(Some(snapshot(5, 10, &[1, 2])), ms(2_003));
    let expected = ["@71", "@72"].map(|to| format!("snapshot{to} 5:11 [1, 2, 3] requested"));
    assert_eq!(words(&out), expected);
}

#[test]
fn a_fresh_snapshot_that_differs_goes_to_everybody() {
    let mut feed = joined();
    feed.observe_request(AccountId::new(71).unwrap(), ms(2_000));
    let out = feed.observe_reply(Some(snapshot(5, 10, &[1])), ms(2_001));
    assert_eq!(words(&out), ["snapshot 5:10 [1] digest_differs"]);
}

#[test]
fn a_follower_that_attaches_gets_the_state_or_the_doubt() {
    let mut feed = joined();
    let late = AccountId::new(80).unwrap();
    assert_eq!(words(&[feed.welcome(late)]), ["snapshot@80 5:10 [1, 2] joining"]);
    feed.observe_undecodable(ms(2_000));
    assert_eq!(words(&[feed.welcome(late)]), ["doubt@80 undecodable"]);
    assert!(feed.catch_up(late).is_none());
}

#[test]
fn a_buffer_that_overflowed_asks_again() {
    let settings = FeedSettings { buffer_events_max: 2, ..FeedSettings::default() };
    let mut feed = FeedState::new(MASTER, settings, 7, Duration::ZERO);
    feed.tick(Duration::ZERO);
    for n in 11..=13 {
        see(&mut feed, opened(5, n, n), ms(n));
    }
    assert!(words(&feed.observe_reply(Some(snapshot(5, 13, &[1])), ms(20))).is_empty());
    assert_eq!(words(&feed.tick(ms(1_000))), ["request"]);
    let out = feed.observe_reply(Some(snapshot(5, 13, &[1])), ms(1_001));
    assert_eq!(words(&out), ["snapshot 5:13 [1] joining"]);
}

#[test]
fn a_reply_that_was_on_its_way_during_a_reconnect_or_an_unreadable_message_is_void() {
    for reconnect in [true, false] {
        let mut feed = joined();
        feed.observe_beacon(&beacon(5, 12, &[]), ms(2_000));
        let now = ms(2_001);
        if reconnect {
            feed.observe_reconnect(now)
        } else {
            feed.observe_undecodable(now)
        };
        assert!(words(&feed.observe_reply(Some(snapshot(5, 12, &[])), ms(2_002))).is_empty());
        assert_eq!(feed.doubt(), Some(DoubtReason::BeaconAhead));
    }
}

#[test]
fn a_reconnect_asks_within_its_jitter() {
    let mut feed = joined();
    assert_eq!(words(&feed.observe_reconnect(ms(2_000)))[0], "doubt reconnected");
    assert!(feed.deadline() <= ms(2_200));
    feed.tick(ms(2_200));
    assert_eq!(feed.request, Request::InFlight);
}

#[test]
fn a_message_of_another_account_under_our_subject_is_not_trusted() {
    let mut feed = joined();
    let foreign = TradeEvent { account: AccountId::new(9).unwrap(), ..(*opened(5, 11, 3)).clone() };
    let out = words(&feed.observe_event(Arc::new(foreign), Instant::now(), ms(2_000)));
    assert_eq!(out, ["dropped undecodable", "doubt undecodable", "request"]);
}

#[path = "properties.rs"]
mod properties;

// DESIGN section 3: two live epochs in turns are an alarm; what a handover leaves is none.
#[test]
fn two_publishers_in_turns_are_an_alarm_and_leftovers_of_a_handover_are_not() {
    let mut feed = joined();
    let old = "dropped old_epoch_beacon".to_owned();
    let mut hear = |e, s, at| words(&feed.observe_beacon(&beacon(e, s, &[1, 2]), ms(at)));
    // Several late ones in a row are one turn.
    for at in [1_100, 1_200, 1_300, 1_400, 1_500] {
        assert_eq!(hear(4, 90, at), std::slice::from_ref(&old));
    }
    let mut alarms = 0;
    for turn in 1..=7 {
        assert!(hear(5, 10, turn * 2_000).is_empty());
        let said = hear(4, 90, turn * 2_000 + 1_000);
        let is_alarm = said == [old.clone(), "two publishers 5 4".to_owned()];
        assert!(is_alarm || said == std::slice::from_ref(&old), "{said:?}");
        alarms += u32::from(is_alarm);
    }
    assert_eq!(alarms, 2);
}

#[test]
fn old_beacons_that_come_seldom_are_no_alarm() {
    let mut feed = joined();
    for second in 1..60 {
        let now = ms(1_000 + second * 1_000);
        feed.observe_beacon(&beacon(5, 10, &[1, 2]), now);
        if second % 8 == 0 {
            let said = words(&feed.observe_beacon(&beacon(4, 90, &[]), now));
            assert_eq!(said, ["dropped old_epoch_beacon"]);
        }
    }
}

// H75: the numbers of a message are input.
#[test]
fn the_last_numbers_there_are_do_no_harm() {
    let mut feed = new_feed();
    feed.tick(Duration::ZERO);
    let last = MasterSnapshot {
        epoch: schemas::Epoch::MAX,
        seq: schemas::Seq::MAX,
        ..snapshot(5, 10, &[1])
    };
    feed.observe_reply(Some(last), ms(1));
    see(&mut feed, opened(5, 11, 2), ms(2));
    let event = TradeEvent { epoch: schemas::Epoch::MAX, ..(*opened(5, 11, 2)).clone() };
    see(&mut feed, Arc::new(event), ms(3));
    let above = crate::publisher::start_epoch(Micros(1), Some(schemas::Epoch::MAX), None);
    assert_eq!(above, schemas::Epoch::MAX);
}
