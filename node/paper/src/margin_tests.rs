//! Margin in use, refusals for want of it, and the stop-out.

use crate::engine::Effects;
use crate::engine_tests::{World, account, lots, open};
use crate::ledger::Cause;
use crate::protocol::{AccountChange, AccountDecl, Style};
use schemas::{CloseReason, Money, RejectClass, Side};

fn money(text: &str) -> Money {
    text.parse().unwrap()
}

/// 10,000 USD at leverage 100: a lot of EURUSD at 1.10010 takes 1,100.10.
fn with_stop_out(percent: Option<u32>) -> World {
    let decl = AccountDecl::new(account(1), Style::Mt5);
    World::with(AccountDecl { stop_out_percent: percent, ..decl })
}

#[test]
fn margin_used_is_zero_exactly_when_nothing_is_open() {
    let mut world = with_stop_out(None);
    assert_eq!(world.book().funds.margin_used, Some(money("0")));
    let ticket = world.done(&open(Side::Buy, "1.00", None, None)).ticket;
    assert_eq!(world.book().funds.margin_used, Some(money("1100.10")));
    world.done(&open(Side::Sell, "0.50", None, None));
    assert_eq!(world.book().funds.margin_used, Some(money("1650.10")));
    let close = |ticket| crate::protocol::Instruction::Close { ticket, lots: None };
    world.done(&close(ticket));
    let rest = world.only().ticket;
    world.done(&close(rest));
    assert_eq!(world.book().funds.margin_used, Some(money("0")));

    let decl = AccountDecl::new(account(1), Style::Mt5);
    let mut tiny = World::with(AccountDecl { leverage: Some(10_000), ..decl });
    tiny.done(&open(Side::Buy, "0.01", None, None));
    assert!(tiny.book().funds.margin_used > Some(money("0")));
}

#[test]
fn only_an_account_with_a_stop_out_level_is_refused_for_want_of_margin() {
    let mut world = with_stop_out(None);
    world.done(&open(Side::Buy, "20", None, None));
    let mut world = with_stop_out(Some(50));
    assert_eq!(world.refused(&open(Side::Buy, "9.10", None, None)), RejectClass::NoMoney);
    world.done(&open(Side::Buy, "9.00", None, None));
    assert_eq!(world.refused(&open(Side::Buy, "0.50", None, None)), RejectClass::NoMoney);
}

#[test]
fn below_the_level_the_largest_loss_goes_first_and_only_as_many_as_needed() {
    let mut world = with_stop_out(Some(50));
    let small = world.done(&open(Side::Buy, "1.00", None, None)).ticket;
    let large = world.done(&open(Side::Buy, "4.00", None, None)).ticket;
    // Margin 5,500.50; the level is reached at an equity of 2,750.25, a loss of 7,249.75.
    world.feed("1.08562", "1.08570");
    assert_eq!(world.book().positions.len(), 2, "equity 2,760 is above it");
    world.feed("1.08550", "1.08560");
    let left: Vec<_> = world.book().positions.iter().map(|p| p.ticket).collect();
    assert_eq!(left, [small], "after the larger loss is gone the rest is above the level");
    assert_eq!(world.last.trades[0].cause, Cause::StopOut);
    match world.last_change() {
        AccountChange::PositionClosed { closed, reason } => {
            assert_eq!((closed.ticket, closed.lots), (large, lots("4.00")));
            assert_eq!(reason, CloseReason::StopOut);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_a_level_an_account_may_lose_everything() {
    let mut world = with_stop_out(None);
    world.done(&open(Side::Buy, "5.00", None, None));
    world.feed("1.00000", "1.00010");
    assert_eq!(world.book().positions.len(), 1);
}

#[test]
fn a_level_that_is_set_later_and_a_withdrawal_are_looked_at_at_once() {
    let mut world = with_stop_out(None);
    world.done(&open(Side::Buy, "5.00", None, None));
    let (now, mut effects) = (world.now(), Effects::default());
    world.engine.set_stop_out(now, account(1), Some(100), &mut effects).unwrap();
    assert_eq!(effects.changes.len(), 0, "10,000 is enough for 5,500.50");
    world.engine.deposit(now, account(1), money("-6000"), &mut effects).unwrap();
    assert!(world.book().positions.is_empty());
    let error = world.engine.set_stop_out(now, account(1), Some(0), &mut effects).unwrap_err();
    assert_eq!((error.field.as_str(), error.value.as_str()), ("percent", "0"));
    let error = world.engine.stop_out(now, account(1), &mut effects).unwrap_err();
    assert!(error.text.contains("no trade"), "{error}");
}
