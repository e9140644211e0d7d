//! The netting style: one trade a symbol.

use crate::engine_tests::{World, account, lots, open, price};
use crate::ledger::TradeEventKind;
use crate::protocol::{AccountChange, AccountDecl, Instruction, Style};
use schemas::{PendingKind, RejectClass, Side};

fn netting() -> World {
    World::new(Style::Mt5Netting)
}

#[test]
fn a_second_order_of_the_same_side_is_added_at_the_average_price() {
    let mut world = netting();
    let first = world.done(&open(Side::Buy, "1.00", Some("1.09"), None));
    let opened_at = world.only().opened_at;
    world.feed("1.10290", "1.10310");
    let second = world.done(&open(Side::Buy, "2.00", None, None));
    assert_eq!(second.ticket, first.ticket, "the trade keeps the ticket of its first order");
    assert_eq!(second.lots, Some(lots("2.00")), "what this order filled");
    let only = world.only();
    assert_eq!((only.lots, only.open_price), (lots("3.00"), price("1.10210")));
    assert_eq!(only.opened_at, opened_at, "and its opening time");
    assert_eq!(only.stop_loss, Some(price("1.09")), "an order without stops keeps them");
    assert_eq!(world.last.trades[0].event, TradeEventKind::Added);
    assert_eq!(world.last.trades[0].lots_left, Some(lots("3.00")));
}

#[test]
fn an_order_of_the_other_side_takes_from_the_trade_or_ends_it() {
    for (volume, left) in [("0.40", Some("0.60")), ("1.00", None)] {
        let mut world = netting();
        let ticket = world.done(&open(Side::Buy, "1.00", None, None)).ticket;
        let done = world.done(&open(Side::Sell, volume, None, None));
        assert_eq!((done.ticket, done.lots), (ticket, Some(lots(volume))));
        let positions = world.book().positions;
        let held: Vec<_> = positions.iter().map(|p| (p.ticket, p.side, p.lots)).collect();
        let expected: Vec<_> =
            left.into_iter().map(|left| (ticket, Side::Buy, lots(left))).collect();
        assert_eq!(held, expected, "{volume}");
        assert_eq!(world.history()[0].lots, lots(volume));
        assert_eq!(world.history()[0].lots_left, left.map(lots));
    }
}

#[test]
fn more_than_it_holds_turns_the_trade_over_in_one_step_under_its_ticket() {
    let mut world = netting();
    let ticket = world.done(&open(Side::Buy, "1.00", None, None)).ticket;
    let opened_at = world.only().opened_at;
    let revision = world.book().revision;
    world.done(&open(Side::Sell, "1.50", None, None));
    let only = world.only();
    assert_eq!((only.ticket, only.side, only.lots), (ticket, Side::Sell, lots("0.50")));
    assert_eq!(only.open_price, price("1.1"));
    assert!(only.opened_at > opened_at, "its life on this side begins here");
    assert_eq!(world.book().revision, revision + 1, "one step");
    match world.last_change() {
        AccountChange::PositionReversed { position, closed } => {
            assert_eq!(position, only);
            assert_eq!((closed.ticket, closed.side, closed.lots), (ticket, Side::Buy, lots("1")));
            assert_eq!(closed.lots_left, None);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.history().len(), 1);
    assert_eq!(
        world.refused(&Instruction::Close { ticket, lots: Some(lots("0.51")) }),
        RejectClass::Invalid
    );
}

#[test]
fn a_pending_order_that_fills_is_netted_and_its_number_ends() {
    let mut world = netting();
    let ticket = world.done(&open(Side::Buy, "1.00", None, None)).ticket;
    let place = Instruction::Place {
        symbol: "EURUSD".parse().unwrap(),
        kind: PendingKind::SellLimit,
        lots: lots("0.25"),
        price: price("1.11"),
        stop_loss: None,
        take_profit: None,
        magic: 77,
        comment: "b".to_owned(),
    };
    let placed = world.done(&place).ticket;
    world.feed("1.11000", "1.11010");
    assert!(world.book().pendings.is_empty());
    assert_eq!((world.only().ticket, world.only().lots), (ticket, lots("0.75")));
    let cancel = Instruction::Cancel { ticket: placed };
    assert_eq!(world.refused(&cancel), RejectClass::AlreadySo);
    let decl = AccountDecl::new(account(1), Style::Mt5Netting);
    assert_eq!(decl.comment_limit(), 31);
}
