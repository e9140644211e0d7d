//! Laws that hold for every input.

use proptest::collection::vec;
use proptest::prelude::*;

use super::tests::{FIXTURES, assert_no_stop_is_reached_early, play};
use super::*;

/// One damage to a file.
#[derive(Debug, Clone)]
enum Damage {
    Byte(prop::sample::Index, u8),
    Cut(prop::sample::Index, usize),
    Repeat(prop::sample::Index, usize),
    Insert(prop::sample::Index, &'static [u8]),
    SwapDigit(prop::sample::Index, u8),
}

/// Pieces that mean something to one of the parsers.
const PIECES: [&[u8]; 14] = [
    b"\"",
    b"</td>",
    b"<tr>",
    b"<table>",
    b",",
    b";",
    b"\n",
    b"to #5001",
    b"from #5003",
    b"close hedge by #5004",
    b"-",
    b" ",
    b"\xff\xfe",
    b"99999999999999999999",
];

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        (at(), 1..400_usize).prop_map(|(at, length)| Damage::Cut(at, length)),
        (at(), 1..400_usize).prop_map(|(at, length)| Damage::Repeat(at, length)),
        (at(), prop::sample::select(&PIECES[..])).prop_map(|(at, piece)| Damage::Insert(at, piece)),
        // Digits turn into digits, so that much still loads and the timeline is tried too.
        (at(), b'0'..=b'9').prop_map(|(at, digit)| Damage::SwapDigit(at, digit)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    match damage {
        Damage::Byte(at, byte) => {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        Damage::Cut(at, length) => {
            let at = at.index(bytes.len());
            bytes.drain(at..(at + length).min(bytes.len()));
        }
        Damage::Repeat(at, length) => {
            let at = at.index(bytes.len());
            let piece = bytes[at..(at + length).min(bytes.len())].to_vec();
            bytes.splice(at..at, piece);
        }
        Damage::Insert(at, piece) => {
            let at = at.index(bytes.len());
            bytes.splice(at..at, piece.iter().copied());
        }
        Damage::SwapDigit(at, digit) => {
            let places: Vec<usize> =
                (0..bytes.len()).filter(|place| bytes[*place].is_ascii_digit()).collect();
            if !places.is_empty() {
                bytes[places[at.index(places.len())]] = *digit;
            }
        }
    }
}

/// Loads, and if that works, plays: `play` panics where a step does not fit the account.
fn load_and_play(bytes: &[u8]) -> bool {
    let Ok(history) = load_bytes("damaged", bytes) else { return false };
    let steps = timeline(&history);
    let book = play(&steps);
    if history.source.levels == Levels::Final {
        assert_no_stop_is_reached_early(&steps);
    }
    let open: Decimal =
        history.trades.iter().filter(|t| t.close.is_none()).map(lots_at_the_end).sum();
    let left: Decimal = book.positions.values().map(|position| position.lots.get()).sum();
    assert_eq!(left, open);
    symbols(&history);
    true
}

fn lots_at_the_end(trade: &HistoryTrade) -> Decimal {
    let last = trade.changes.iter().rev().find_map(|change| match change.kind {
        TradeChangeKind::Volume { lots, .. } => Some(lots),
        TradeChangeKind::Levels { .. } => None,
    });
    last.unwrap_or(trade.lots).get()
}

#[test]
fn every_fixture_loads_and_plays() {
    for (name, bytes) in FIXTURES {
        assert!(load_and_play(bytes), "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_to_a_file_makes_a_parser_panic_or_a_timeline_contradict_itself(
        which in 0..FIXTURES.len(),
        damages in vec(damage(), 1..6),
    ) {
        let mut bytes = FIXTURES[which].1.to_vec();
        for damage in &damages {
            apply(&mut bytes, damage);
        }
        load_and_play(&bytes);
    }

    #[test]
    fn no_bytes_at_all_make_a_parser_panic(bytes in vec(any::<u8>(), 0..400)) {
        load_and_play(&bytes);
    }

    #[test]
    fn no_cell_makes_a_number_or_a_time_panic(text in "\\PC{0,40}") {
        cell::parse_decimal(&text);
        cell::parse_time(&text);
        cell::digits_after_point(&text);
    }

    #[test]
    fn printed_numbers_are_read_exactly(units in any::<i32>(), scale in 0..6_u32) {
        let value = Decimal::new(i64::from(units), scale);
        prop_assert_eq!(cell::parse_decimal(&value.to_string()), Some(value));
    }
}
