use crate::codec::{self, DecodeError, SnapshotPages};
use crate::golden::{beacon, book, events, pending, position, snapshot};
use crate::{
    AccountId, Book, Change, Epoch, FollowerTicket, Lots, Magic, MasterPending, MasterPosition,
    MasterTicket, Price, Seq, Side, Symbol, subject,
};
use proptest::prelude::*;
use rust_decimal::Decimal;
use serde_json::{Value, json};

fn ticket(n: u64) -> MasterTicket {
    MasterTicket::new(n).unwrap()
}

/// An event as a JSON map, changed by `edit`, as MessagePack again.
fn edited(edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let bytes = codec::encode_event(&events()[0]);
    let mut value: Value = rmp_serde::from_slice(&bytes).unwrap();
    edit(&mut value);
    rmp_serde::to_vec_named(&value).unwrap()
}

#[test]
fn a_poison_value_is_refused_with_its_field_and_value() {
    let cases: Vec<(&str, Value, &str)> = vec![
        ("lots", json!("-0.10"), "-0.1"),
        ("lots", json!("0"), "above 0"),
        ("lots", json!("1000000000000"), "1000000000000"),
        ("lots", json!(0.1), "floating point"),
        ("lots", json!("NaN"), "NaN"),
        ("lots", json!("1e5"), "1e5"),
        ("lots", json!("1,2345"), "1,2345"),
        ("lots", json!(" 1"), " 1"),
        ("lots", json!("+1"), "+1"),
        ("lots", json!(".5"), ".5"),
        ("lots", json!("0.000000001"), "more than 8 digits"),
        ("open_price", json!("1,2345"), "1,2345"),
        ("open_price", json!("-1.5"), "-1.5"),
        ("side", json!(7), ""),
        ("side", json!("long"), "long"),
        ("ticket", json!(0), "0"),
        ("ticket", json!(9_223_372_036_854_775_808_u64), "9223372036854775808"),
        ("ticket", json!(-1), "-1"),
        ("symbol", json!("EUR\"USD"), "EUR"),
        ("symbol", json!("*"), "*"),
        ("symbol", json!(""), "symbol"),
        ("symbol", json!("X".repeat(65)), "XXX"),
        ("contract_size", json!("-1"), "-1"),
        ("opened_at_us", json!("yesterday"), "FixStr"),
    ];
    for (field, value, mention) in cases {
        let bytes = edited(|event| event["position"][field] = value.clone());
        match codec::decode_event(&bytes) {
            Err(DecodeError::Field { field: named, problem }) => {
                assert_eq!(named, format!("position.{field}"), "{value}: {problem}");
                assert!(problem.contains(mention), "{field}={value}: {problem}");
            }
            other => panic!("{field}={value} was not refused: {other:?}"),
        }
    }
}

#[test]
fn a_missing_field_is_named() {
    for field in ["account", "epoch", "seq", "at_us"] {
        let bytes = edited(|event| {
            event.as_object_mut().unwrap().remove(field);
        });
        let error = codec::decode_event(&bytes).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let without_position = edited(|event| {
        event.as_object_mut().unwrap().remove("position");
    });
    let error = codec::decode_event(&without_position).unwrap_err().to_string();
    assert_eq!(error, "field position: position_opened needs it");
}

#[test]
fn an_event_numbered_zero_is_refused() {
    let error = codec::decode_event(&edited(|event| event["seq"] = json!(0))).unwrap_err();
    assert_eq!(error.to_string(), "field seq: events count from 1, got 0");
}

#[test]
fn an_unknown_field_is_ignored() {
    let bytes = edited(|event| {
        event["a_later_field"] = json!({"x": [1, 2, 3]});
        event["position"]["another"] = json!("y");
    });
    assert_eq!(codec::decode_event(&bytes).unwrap(), events()[0]);
}

#[test]
fn an_unknown_kind_or_version_is_an_error_of_its_own() {
    let kind = codec::decode_event(&edited(|event| event["kind"] = json!("margin_called")));
    assert_eq!(kind, Err(DecodeError::Kind { kind: "margin_called".into() }));
    let version = codec::decode_event(&edited(|event| event["v"] = json!(2)));
    assert_eq!(version, Err(DecodeError::Version { version: 2 }));
}

#[test]
fn an_array_of_the_right_values_is_no_message() {
    let event: Value = rmp_serde::from_slice(&codec::encode_event(&events()[0])).unwrap();
    let values: Vec<&Value> = event.as_object().unwrap().values().collect();
    let bytes = rmp_serde::to_vec_named(&values).unwrap();
    assert!(matches!(codec::decode_event(&bytes), Err(DecodeError::Field { .. })));
    let request = rmp_serde::to_vec(&codec::SnapshotRequest {
        v: codec::VERSION,
        account: events()[0].account,
        heard: None,
    });
    assert!(codec::decode_snapshot_request(&request.unwrap()).is_err());
}

#[test]
fn a_newer_version_with_other_field_types_is_still_named_a_version() {
    let bytes = edited(|event| {
        event["v"] = json!(9);
        event["account"] = json!("text");
    });
    assert_eq!(codec::decode_event(&bytes), Err(DecodeError::Version { version: 9 }));
}

#[test]
fn a_message_over_the_size_limit_is_refused_before_it_is_read() {
    let bytes = vec![0; codec::MESSAGE_BYTES_MAX + 1];
    assert!(matches!(codec::decode_event(&bytes), Err(DecodeError::TooLarge { .. })));
}

#[test]
fn an_incomplete_snapshot_page_is_not_a_snapshot() {
    let page = codec::encode_snapshot(&snapshot()).remove(0);
    let mut value: Value = rmp_serde::from_slice(&page).unwrap();
    value["complete"] = json!(false);
    let bytes = rmp_serde::to_vec_named(&value).unwrap();
    let error = codec::decode_snapshot_page(&bytes).unwrap_err().to_string();
    assert_eq!(error, "field complete: an incomplete read is not a snapshot");
}

#[test]
fn a_snapshot_page_whose_rows_were_cut_does_not_make_a_snapshot() {
    let page = codec::encode_snapshot(&snapshot()).remove(0);
    let mut page = codec::decode_snapshot_page(&page).unwrap();
    page.positions.clear();
    let error = SnapshotPages::default().take(page).unwrap_err().to_string();
    assert!(error.starts_with("field digest:"), "{error}");
}

fn large_snapshot(trades: u64) -> crate::MasterSnapshot {
    let mut large = snapshot();
    for n in 1..=trades {
        large.book.positions.insert(ticket(n), MasterPosition { ticket: ticket(n), ..position() });
    }
    large
}

#[test]
fn a_snapshot_of_ten_thousand_trades_travels_in_pages_under_the_payload_limit() {
    let large = large_snapshot(10_000);
    let pages = codec::encode_snapshot(&large);
    assert!(pages.len() > 1 && pages.iter().all(|p| p.len() < codec::MESSAGE_BYTES_MAX / 2));
    let mut collector = SnapshotPages::default();
    let mut joined = None;
    for bytes in pages.iter().rev() {
        assert_eq!(joined, None, "a snapshot came out before its last page");
        joined = collector.take(codec::decode_snapshot_page(bytes).unwrap()).unwrap();
    }
    assert_eq!(joined, Some(large));
}

#[test]
fn pages_of_two_snapshots_are_never_joined() {
    let old = codec::encode_snapshot(&large_snapshot(1500));
    let mut newer = large_snapshot(1500);
    newer.seq = newer.seq.next();
    let newer_pages = codec::encode_snapshot(&newer);
    let mut collector = SnapshotPages::default();
    for bytes in [&old[0], &newer_pages[1]] {
        let page = codec::decode_snapshot_page(bytes).unwrap();
        assert_eq!(collector.take(page).unwrap(), None);
    }
    let page = codec::decode_snapshot_page(&newer_pages[0]).unwrap();
    assert_eq!(collector.take(page).unwrap(), Some(newer));
}

#[test]
fn a_subject_is_read_back_only_in_its_one_spelling() {
    let seven = AccountId::new(7).unwrap();
    assert_eq!(subject::parse(&subject::event(seven)), Some(subject::Subject::Event(seven)));
    assert_eq!(subject::parse(&subject::beacon(seven)), Some(subject::Subject::Beacon(seven)));
    assert_eq!(subject::parse(&subject::snapshot(seven)), Some(subject::Subject::Snapshot(seven)));
    for foreign in [
        "lockstep.v1.master.007.event",
        "lockstep.v1.master.+7.event",
        "lockstep.v1.master.0.event",
        "lockstep.v1.master.7.event.x",
        "lockstep.v1.master.*.event",
        "lockstep.v1.master.7.>",
        "lockstep.v2.master.7.event",
        "lockstep.v1.snapshot.7.x",
        "",
    ] {
        assert_eq!(subject::parse(foreign), None, "{foreign}");
    }
}

#[test]
fn a_reversed_trade_under_one_ticket_closes_and_does_not_open() {
    let mut reversed = book();
    reversed.positions.values_mut().for_each(|p| p.side = Side::Sell);
    let changes = book().diff(&reversed);
    assert!(matches!(changes.as_slice(), [Change::PositionClosed { .. }]), "{changes:?}");
}

#[test]
fn a_filled_pending_order_is_told_as_filled_not_as_cancelled_and_opened() {
    let mut before = Book::default();
    before.pendings.insert(pending().ticket, pending());
    let mut after = Book::default();
    let filled = MasterPosition { ticket: pending().ticket, ..position() };
    after.positions.insert(filled.ticket, filled.clone());
    assert_eq!(before.diff(&after), vec![Change::PendingFilled(filled)]);
}

#[test]
fn closes_come_before_opens_in_a_diff() {
    let mut next = Book::default();
    next.positions.insert(ticket(1), MasterPosition { ticket: ticket(1), ..position() });
    let kinds: Vec<_> = book().diff(&next).iter().map(Change::kind).collect();
    assert_eq!(kinds, ["position_closed", "pending_cancelled", "position_opened"]);
}

#[test]
fn the_digest_of_the_worked_example_in_the_readme_is_the_one_computed() {
    let readme = include_str!("../README.md");
    let digest = book().digest().0.to_string();
    assert!(readme.contains(&digest), "README.md should give {digest} for the golden state");
    assert_eq!(beacon().digest, book().digest());
}

#[test]
fn volumes_are_rounded_down_in_whole_steps() {
    let lots = |text: &str| text.parse::<Lots>().unwrap();
    let floor = |value: &str, step: &str| {
        Lots::floor_step(value.parse::<Decimal>().unwrap(), lots(step)).map(|l| l.to_string())
    };
    assert_eq!(floor("0.13", "0.05").as_deref(), Some("0.1"));
    assert_eq!(floor("0.30", "0.25").as_deref(), Some("0.25"));
    assert_eq!(floor("17", "10").as_deref(), Some("10"));
    assert_eq!(floor("0.3", "0.1").as_deref(), Some("0.3"));
    assert_eq!(floor("0.0099", "0.01"), None);
    assert_eq!(floor("-1", "0.01"), None);
}

#[test]
fn a_ticket_of_zero_cannot_be_made() {
    assert!(FollowerTicket::new(0).is_err());
    assert!(MasterTicket::from_i64(-5).is_err());
    assert!(Magic::new(1 << 31).is_err());
    assert!(Epoch::new(0).is_err());
    assert_eq!(Seq::new(0).unwrap(), Seq::ZERO);
}

fn any_lots() -> impl Strategy<Value = Lots> {
    (1_i64..100_000).prop_map(|n| Lots::new(Decimal::new(n, 2)).unwrap())
}

fn any_price() -> impl Strategy<Value = Option<Price>> {
    proptest::option::of((1_i64..10_000_000).prop_map(|n| Price::new(Decimal::new(n, 5)).unwrap()))
}

prop_compose! {
    fn any_position()(
        n in 1_u64..12, symbol in "[A-Z]{6}[.@-]?", buy: bool, lots in any_lots(),
        open_price in any_price(), stop_loss in any_price(), take_profit in any_price(),
        is_copy: bool,
    ) -> MasterPosition {
        MasterPosition {
            ticket: ticket(n),
            symbol: Symbol::new(symbol).unwrap(),
            side: if buy { Side::Buy } else { Side::Sell },
            lots, lots_at_open: lots, open_price, stop_loss, take_profit, is_copy,
            ..position()
        }
    }
}

prop_compose! {
    fn any_book()(
        positions in proptest::collection::vec(any_position(), 0..8),
        pendings in proptest::collection::vec((12_u64..20, any_lots()), 0..4),
    ) -> Book {
        Book {
            positions: positions.into_iter().map(|p| (p.ticket, p)).collect(),
            pendings: pendings
                .into_iter()
                .map(|(n, lots)| (ticket(n), MasterPending { ticket: ticket(n), lots, ..pending() }))
                .collect(),
        }
    }
}

proptest! {
    #[test]
    fn applying_a_diff_leads_to_the_next_state(before in any_book(), after in any_book()) {
        let mut reached = before.clone();
        for change in before.diff(&after) {
            reached.apply(&change);
        }
        let mut expected = after.clone();
        for (ticket, old) in &before.positions {
            if expected.positions.get(ticket).is_some_and(|new| new.side != old.side) {
                expected.positions.remove(ticket);
            }
        }
        prop_assert_eq!(reached, expected);
    }

    #[test]
    fn equal_states_have_no_diff_and_one_digest(state in any_book()) {
        prop_assert!(state.diff(&state).is_empty());
        prop_assert_eq!(state.digest(), state.clone().digest());
    }

    #[test]
    fn a_changed_volume_or_stop_changes_the_digest(state in any_book(), stop in any_price()) {
        for key in state.positions.keys() {
            let mut other = state.clone();
            let p = other.positions.get_mut(key).unwrap();
            if p.stop_loss != stop {
                p.stop_loss = stop;
                prop_assert_ne!(state.digest(), other.digest());
            }
        }
    }

    #[test]
    fn every_event_survives_the_wire(p in any_position(), seq in 1_u64..u64::MAX / 2) {
        let event = crate::TradeEvent {
            seq: Seq::new(seq).unwrap(),
            change: Change::PositionOpened(p),
            ..events().remove(0)
        };
        prop_assert_eq!(codec::decode_event(&codec::encode_event(&event)).unwrap(), event);
    }

    #[test]
    fn no_bytes_make_decoding_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = codec::decode_event(&bytes);
        let _ = codec::decode_beacon(&bytes);
        let _ = codec::decode_snapshot_request(&bytes);
        let _ = codec::decode_snapshot_page(&bytes);
    }

    #[test]
    fn no_damage_to_a_message_makes_decoding_panic(at in 0_usize..300, with: u8) {
        for event in events() {
            let mut bytes = codec::encode_event(&event);
            let at = at % bytes.len();
            bytes[at] = with;
            let _ = codec::decode_event(&bytes);
        }
    }

    #[test]
    fn floor_step_never_rounds_up(value in 1_i64..10_000_000, step in 1_i64..1000) {
        let value = Decimal::new(value, 4);
        let step = Lots::new(Decimal::new(step, 3)).unwrap();
        match Lots::floor_step(value, step) {
            Some(lots) => {
                prop_assert!(lots.get() <= value && value - lots.get() < step.get());
                prop_assert!((lots.get() / step.get()).fract().is_zero());
            }
            None => prop_assert!(value < step.get()),
        }
    }
}

#[test]
fn margin_in_use_without_a_trade_contradicts_the_list() {
    use crate::{AccountId, AccountSnapshot, Funds, Micros, Symbol};
    let funds = |margin: Option<&str>| Funds {
        balance: "10".parse().unwrap(),
        equity: "10".parse().unwrap(),
        margin_used: margin.map(|margin| margin.parse().unwrap()),
        currency: Symbol::new("USD").unwrap(),
        at: Micros(1),
    };
    let empty = |funds: Option<Funds>| AccountSnapshot {
        account: AccountId::new(1).unwrap(),
        revision: 1,
        at: Micros(1),
        positions: Vec::new(),
        pendings: Vec::new(),
        funds,
    };
    for (margin, contradicts) in [(None, false), (Some("0"), false), (Some("0.01"), true)] {
        let found = empty(Some(funds(margin))).margin_of_nothing();
        assert_eq!(found.is_some(), contradicts, "{margin:?}");
    }
    assert_eq!(empty(None).margin_of_nothing(), None);
    let old = r#"{"balance":"10","equity":"10","currency":"USD","at_us":1}"#;
    assert_eq!(serde_json::from_str::<Funds>(old).unwrap(), funds(None));
}
