//! Opens: late ones, skipped ones, stops, pending orders, directions, symbols.

use crate::action::{CloseCause, CopyStep, FoundBy, Note, SkipReason, WaitReason};
use crate::fixture::*;
use crate::input::LinkMode;
use crate::pair::Stops;
use schemas::{PendingKind, Side};

fn late(ticket: u64) -> schemas::MasterPosition {
    let mut position = master_position(ticket);
    position.opened_at = seconds_ago(60);
    position
}

fn opened(steps: &[CopyStep]) -> Option<(Side, Stops, bool)> {
    match steps {
        [CopyStep::OpenCopy { side, stops, late, .. }] => Some((*side, *stops, *late)),
        _ => None,
    }
}

fn stops(stop_loss: &str, take_profit: &str) -> Stops {
    let level = |text: &str| (!text.is_empty()).then(|| price(text));
    Stops { stop_loss: level(stop_loss), take_profit: level(take_profit) }
}

// Case 10.
#[test]
fn late_open_inside_the_slippage_is_opened_outside_it_is_skipped() {
    let mut scene = Scene::new();
    let mut position = late(101);
    (position.symbol, position.open_price) = (symbol("XAUUSD"), Some(price("5000")));
    scene = scene.master_has(position);
    scene.symbols.get_mut(&symbol("XAUUSD")).unwrap().digits = 2;
    scene.rules.slippage_points = 100;
    let mut at = |bid, ask| {
        scene.quotes.insert(symbol("XAUUSD"), quote("XAUUSD", bid, ask));
        (opened(&scene.steps(101)).map(|(.., late)| late), scene.skip_reason(101))
    };
    let moved = (None, Some(SkipReason::LateOpenPriceMoved));
    assert_eq!(at("5000.40", "5000.50"), (Some(true), None));
    assert_eq!(at("5002.90", "5003.00"), moved);
    // A buy is judged by the ask, and in both directions.
    assert_eq!(at("5000.90", "5001.01"), moved);
    assert_eq!(at("4998.90", "4998.99"), moved);
}

// H58.
#[test]
fn late_open_with_an_unknown_price_is_skipped() {
    let scene = Scene::new().master_has(late(101));
    assert!(opened(&scene.steps(101)).is_some());

    let mut unknown = scene.clone();
    unknown.master.book.positions.get_mut(&mt(101)).unwrap().open_price = None;
    assert_eq!(unknown.skip_reason(101), Some(SkipReason::UnknownOpenPrice));

    let mut silent = scene.clone();
    silent.quotes.clear();
    assert_eq!(silent.skip_reason(101), Some(SkipReason::NoQuote));

    let mut stale = scene.clone();
    stale.quotes.get_mut(&symbol("EURUSD")).unwrap().at = seconds_ago(4);
    assert_eq!(stale.skip_reason(101), Some(SkipReason::StaleQuote));
}

// H58: 20 points are 0.00020 with five digits and 0.020 with three.
#[test]
fn slippage_is_in_points_of_the_follower() {
    let mut scene = Scene::new().master_has(late(101));
    scene.quotes.insert(symbol("EURUSD"), quote("EURUSD", "1.11", "1.11"));
    assert_eq!(scene.skip_reason(101), Some(SkipReason::LateOpenPriceMoved));
    scene.symbols.get_mut(&symbol("EURUSD")).unwrap().digits = 3;
    assert!(opened(&scene.steps(101)).is_some());
}

// H32, S6: five seconds are the limit, and a young open looks at no quote.
#[test]
fn open_of_the_last_five_seconds_needs_no_quote() {
    let mut scene = Scene::new();
    scene.quotes.clear();
    for (age, is_opened) in [(0, true), (5, true), (6, false)] {
        let mut position = master_position(101);
        position.opened_at = seconds_ago(age);
        let scene = scene.clone().master_has(position);
        let live = scene.live(101).action.map(|action| action.steps).unwrap_or_default();
        assert_eq!(opened(&live).is_some(), is_opened, "{age} s");
        assert_eq!(live, scene.steps(101), "live path and reconcile agree at {age} s");
    }
}

// H57, S19.
#[test]
fn skipped_trade_is_not_opened_when_the_price_comes_back() {
    let mut scene = Scene::new().master_has(late(101));
    scene.quotes.insert(symbol("EURUSD"), quote("EURUSD", "1.2", "1.2"));
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    scene.quotes.insert(symbol("EURUSD"), quote("EURUSD", "1.1", "1.1"));
    assert_eq!(scene.plan().actions, []);
    assert_eq!(scene.live(101).action, None);
}

// H59.
#[test]
fn trade_from_before_the_link_is_skipped_unless_existing_ones_are_wanted() {
    let mut scene = Scene::new().master_has(late(101));
    scene.rules.copy_from = seconds_ago(30);
    assert_eq!(scene.skip_reason(101), Some(SkipReason::BeforeCopyFrom));
    scene.rules.sync_existing = true;
    assert_eq!(opened(&scene.steps(101)).map(|(.., late)| late), Some(true));
}

// H65.
#[test]
fn copy_on_the_master_is_not_copied_on() {
    let mut position = master_position(101);
    position.is_copy = true;
    let scene = Scene::new().master_has(position);
    assert_eq!(scene.skip_reason(101), Some(SkipReason::IsACopy));
}

#[test]
fn link_that_only_closes_opens_nothing_and_still_closes() {
    let mut scene = Scene::new().master_has(master_position(101));
    scene.rules.mode = LinkMode::CloseOnly;
    assert_eq!(scene.skip_reason(101), Some(SkipReason::CloseOnly));
    let scene = scene.clone().pair(scene.open_pair(90, 55)).follower_has(copy_position(55, 90));
    let close = CopyStep::CloseCopy { ticket: ft(55), cause: CloseCause::MasterClosed };
    assert_eq!(scene.steps(90), [close]);
}

#[test]
fn paused_link_orders_nothing_and_refuses_nothing() {
    let scene = Scene::new().master_has(master_position(101)).master_waits(master_pending(102));
    let mut scene = scene.clone().pair(scene.open_pair(90, 55)).follower_has(copy_position(55, 90));
    let actions = |scene: &Scene| scene.plan().actions.len();
    assert_eq!(actions(&scene), 3, "an open, an order, a close");
    scene.rules.paused = true;
    let plan = scene.plan();
    assert!(plan.actions.is_empty(), "{plan:?}");
    let why = WaitReason::LinkPaused;
    let waits = [90, 101, 102].map(|ticket| Note::Waiting { ticket: mt(ticket), why });
    assert_eq!(plan.notes, waits);
    for ticket in [90, 101, 102] {
        let live = scene.live(ticket);
        assert_eq!((live.action, live.waiting), (None, Some(why)), "{ticket}");
    }
    scene.rules.mode = LinkMode::CloseOnly;
    assert!(scene.plan().actions.is_empty(), "no skip for good either");
}

#[test]
fn paused_link_writes_down_what_ended_and_what_is_found() {
    let scene = Scene::new().follower_has(copy_position(56, 102));
    let mut scene = scene.clone().master_has(master_position(102)).pair(scene.open_pair(101, 55));
    scene.rules.paused = true;
    assert!(matches!(scene.steps(101)[..], [CopyStep::MarkClosed { .. }]));
    assert!(matches!(scene.steps(102)[..], [CopyStep::AdoptCopy { .. }]));
}

#[test]
fn paused_link_holds_no_plan_for_closes_that_it_does_not_make() {
    let mut scene = Scene::new();
    for n in 0..10 {
        let pair = scene.open_pair(100 + n, 50 + n);
        scene = scene.pair(pair).follower_has(copy_position(50 + n, 100 + n));
    }
    assert!(scene.plan().held.is_some());
    scene.rules.paused = true;
    assert!(scene.plan().held.is_none());
}

// Case 65.
#[test]
fn symbol_that_the_follower_does_not_know_is_skipped_with_its_reason() {
    let mut position = master_position(101);
    position.symbol = symbol("XAUUSD");
    let mut scene = Scene::new().master_has(position);
    scene.symbols.remove(&symbol("XAUUSD"));
    scene.symbols.insert(symbol("GOLD"), spec("GOLD"));
    assert_eq!(scene.skip_reason(101), Some(SkipReason::SymbolUnmapped));
    scene.rules.symbol_map.insert(symbol("XAUUSD"), symbol("GOLD"));
    assert!(opened(&scene.steps(101)).is_some());
}

#[test]
fn symbol_is_looked_up_in_the_map_then_with_the_suffix_then_by_name() {
    let mut scene = Scene::new();
    for name in ["EURUSD.x", "GOLD"] {
        scene.symbols.insert(symbol(name), spec(name));
    }
    scene.rules.symbol_suffix = ".x".to_owned();
    scene.rules.symbol_map.insert(symbol("GBPUSD"), symbol("GBPUSD.y"));
    let find = |name: &str| scene.rules.follower_symbol(&symbol(name), &scene.symbols);
    assert_eq!(find("EURUSD"), Ok(symbol("EURUSD.x")));
    assert_eq!(find("GOLD"), Ok(symbol("GOLD")));
    assert_eq!(find("GBPUSD"), Err(SkipReason::SymbolUnmapped), "the map does not fall through");
}

// Case 24.
#[test]
fn stop_inside_the_stop_level_is_left_out_and_set_when_the_broker_allows_it() {
    let mut position = master_position(101);
    position.stop_loss = Some(price("1.0999"));
    let mut scene = Scene::new().master_has(position);
    scene.symbols.get_mut(&symbol("EURUSD")).unwrap().stops_level_points = 20;
    assert_eq!(opened(&scene.steps(101)), Some((Side::Buy, stops("", ""), false)));
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    assert_eq!(scene.plan().actions, []);

    scene.quotes.insert(symbol("EURUSD"), quote("EURUSD", "1.1002", "1.1003"));
    let ticket = scene.follower.positions[0].ticket;
    let modify = CopyStep::ModifyCopy { ticket, stops: stops("1.0999", "") };
    assert_eq!(scene.steps(101), [modify]);
}

// Case 25: the broker took the open without its stops.
#[test]
fn stops_missing_after_the_open_are_set_by_the_next_plan() {
    let mut position = master_position(101);
    (position.stop_loss, position.take_profit) = (Some(price("1.09")), Some(price("1.12")));
    let mut scene = Scene::new().master_has(position);
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    let ticket = scene.follower.positions[0].ticket;
    (scene.follower.positions[0].stop_loss, scene.follower.positions[0].take_profit) = (None, None);
    let modify = CopyStep::ModifyCopy { ticket, stops: stops("1.09", "1.12") };
    assert_eq!(scene.steps(101), [modify]);
}

// Case 35.
#[test]
fn reversed_copy_has_the_stops_exchanged() {
    let mut position = master_position(101);
    (position.stop_loss, position.take_profit) = (Some(price("1.095")), Some(price("1.11")));
    let mut scene = Scene::new().master_has(position);
    scene.rules.reverse = true;
    let expected = Some((Side::Sell, stops("1.11", "1.095"), false));
    assert_eq!(opened(&scene.steps(101)), expected);
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    assert_eq!(scene.plan().actions, []);
    // Turning the rule off leaves open copies as they are.
    scene.rules.reverse = false;
    assert_eq!(scene.plan().actions, []);
}

#[test]
fn link_without_stops_copies_none_and_leaves_the_followers_own() {
    let mut position = master_position(101);
    position.stop_loss = Some(price("1.09"));
    let mut scene = Scene::new().master_has(position);
    scene.rules.copy_stops = false;
    assert_eq!(opened(&scene.steps(101)), Some((Side::Buy, stops("", ""), false)));
    let mut copy = copy_position(55, 101);
    copy.take_profit = Some(price("1.3"));
    let scene = scene.clone().pair(scene.open_pair(101, 55)).follower_has(copy);
    assert_eq!(scene.steps(101), []);
}

#[test]
fn pending_order_is_placed_modified_and_cancelled_with_the_masters() {
    let mut scene = Scene::new().master_waits(master_pending(101));
    let steps = scene.steps(101);
    assert!(
        matches!(&steps[..], [CopyStep::PlacePending { kind: PendingKind::BuyLimit, lots: l, .. }] if *l == lots("0.5")),
        "{steps:?}"
    );
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    assert_eq!(scene.plan().actions, []);
    let ticket = scene.follower.pendings[0].ticket;

    scene.master.book.pendings.get_mut(&mt(101)).unwrap().price = price("1.08");
    let modify = CopyStep::ModifyPending { ticket, price: price("1.08"), stops: Stops::default() };
    assert_eq!(
        (scene.steps(101), scene.live(101).action.unwrap().steps),
        (vec![modify.clone()], vec![modify])
    );

    scene.master.book.pendings.clear();
    let cancel = CopyStep::CancelPending { ticket, cause: CloseCause::MasterClosed };
    assert_eq!(scene.steps(101), [cancel]);
}

// H63.
#[test]
fn copy_of_an_order_that_filled_is_kept_whichever_side_filled_first() {
    let mut placed = Scene::new().master_waits(master_pending(101));
    let plan = placed.plan();
    placed.execute(&plan, usize::MAX);
    let ticket = placed.follower.pendings[0].ticket;
    let fill = |scene: &mut Scene| {
        scene.follower.pendings.clear();
        let mut filled = copy_position(ticket.get(), 101);
        (filled.open_price, filled.opened_at) = (price("1.09"), NOW);
        scene.follower.positions.push(filled);
    };
    let master_fills = |scene: &mut Scene| {
        scene.master.book.pendings.clear();
        let mut filled = master_position(101);
        filled.open_price = Some(price("1.09"));
        scene.master.book.positions.insert(mt(101), filled);
    };

    let mut follower_first = placed.clone();
    fill(&mut follower_first);
    let steps = follower_first.steps(101);
    assert!(
        matches!(
            steps[..],
            [CopyStep::AdoptCopy { found_by: FoundBy::Fill, is_pending: false, .. }]
        ),
        "{steps:?}"
    );
    let plan = follower_first.plan();
    follower_first.execute(&plan, usize::MAX);
    assert_eq!(follower_first.plan().actions, []);

    let mut master_first = placed.clone();
    master_fills(&mut master_first);
    assert_eq!(master_first.plan().actions, [], "our order still waits at its price");
    fill(&mut master_first);
    let plan = master_first.plan();
    master_first.execute(&plan, usize::MAX);
    assert_eq!(master_first.plan().actions, []);
    assert_eq!(master_first.follower.positions.len(), 1);
}

// H63: the order filled between the two reads, so both lists have it.
#[test]
fn order_that_is_in_both_lists_counts_as_a_trade() {
    let scene = Scene::new()
        .master_has(master_position(101))
        .follower_waits(copy_pending(55, 101))
        .follower_has(copy_position(55, 101));
    let steps = scene.steps(101);
    assert!(matches!(steps[..], [CopyStep::AdoptCopy { is_pending: false, .. }]), "{steps:?}");
}

#[test]
fn order_of_a_link_that_copies_no_orders_is_copied_when_it_fills() {
    let mut scene = Scene::new().master_waits(master_pending(101));
    scene.rules.copy_pendings = false;
    assert_eq!(scene.plan().actions, []);
    assert_eq!(scene.live(101).waiting, Some(WaitReason::PendingsNotCopied));
    scene.master.book.pendings.clear();
    let scene = scene.master_has(master_position(101));
    assert!(opened(&scene.steps(101)).is_some());
}

#[test]
fn order_whose_price_has_passed_is_left_to_its_fill() {
    let mut scene = Scene::new().master_waits(master_pending(101));
    scene.quotes.insert(symbol("EURUSD"), quote("EURUSD", "1.085", "1.0851"));
    assert_eq!(scene.plan().actions, []);
    assert_eq!(scene.live(101).waiting, Some(WaitReason::PendingPricePassed));
}

#[test]
fn reversed_order_waits_at_the_same_price_for_the_other_direction() {
    let mut scene = Scene::new().master_waits(master_pending(101));
    scene.rules.reverse = true;
    let steps = scene.steps(101);
    assert!(
        matches!(&steps[..], [CopyStep::PlacePending { kind: PendingKind::SellStop, price: p, .. }] if *p == price("1.09")),
        "{steps:?}"
    );
}

#[test]
fn waiting_order_of_a_link_that_only_closes_is_cancelled() {
    let mut scene = Scene::new().master_waits(master_pending(101));
    let plan = scene.plan();
    scene.execute(&plan, usize::MAX);
    scene.rules.mode = LinkMode::CloseOnly;
    let steps = scene.steps(101);
    assert!(
        matches!(steps[..], [CopyStep::CancelPending { cause: CloseCause::LinkClosesOnly, .. }]),
        "{steps:?}"
    );
}

// H63: a tagged order is a copy like a trade.
#[test]
fn waiting_order_found_by_tag_is_adopted_not_placed_again() {
    let scene =
        Scene::new().master_waits(master_pending(101)).follower_waits(copy_pending(55, 101));
    let steps = scene.steps(101);
    assert!(matches!(steps[..], [CopyStep::AdoptCopy { is_pending: true, .. }]), "{steps:?}");
}

// H53: the broker keeps no tags, so a copy that a former owner made would not be seen.
#[test]
fn link_at_a_broker_without_tags_opens_at_once_and_nothing_late() {
    let scene = |position| {
        let mut scene = Scene::new().master_has(position);
        scene.rules.mode = LinkMode::CopyUntagged;
        scene
    };
    let fresh = scene(master_position(101));
    assert!(opened(&fresh.steps(101)).is_some());
    assert!(opened(&fresh.live(101).action.unwrap().steps).is_some());
    let late = scene(late(101));
    assert_eq!(late.skip_reason(101), Some(SkipReason::Untaggable));
    assert!(matches!(
        late.live(101).action.unwrap().steps[..],
        [CopyStep::SkipOpen { reason: SkipReason::Untaggable, .. }]
    ));

    let mut orders = Scene::new().master_waits(master_pending(102));
    orders.rules.mode = LinkMode::CopyUntagged;
    // Its fill would be a fresh trade: a copy that waits unseen would fill beside it.
    assert_eq!(orders.skip_reason(102), Some(SkipReason::Untaggable));
    assert!(matches!(
        orders.live(102).action.unwrap().steps[..],
        [CopyStep::SkipOpen { reason: SkipReason::Untaggable, .. }]
    ));
    orders.master.book.pendings.get_mut(&mt(102)).unwrap().placed_at = seconds_ago(1);
    assert!(matches!(orders.steps(102)[..], [CopyStep::PlacePending { .. }]));
}

// Seen in a simulation: the first order's trade had ended, the second one's was filled late and far
// from its master's price; taken for the first one's copy it was closed.
#[test]
fn at_a_broker_without_tags_two_orders_in_flight_are_not_told_apart_by_the_price() {
    let mut late = copy_position(55, 102);
    late.comment = String::new();
    late.opened_at = seconds_ago(1);
    late.open_price = price("1.2");
    let mut scene = Scene::new().master_has(master_position(102)).follower_has(late);
    scene.rules.mode = LinkMode::CopyUntagged;
    let (first, second) = (scene.sending_pair(101, 2), scene.sending_pair(102, 2));
    let scene = scene.pair(first).pair(second);
    assert_eq!((scene.steps(101), scene.steps(102)), (vec![], vec![]));
}

// H53: without tags every copy looks like the next one; a row says which is whose.
#[test]
fn at_a_broker_without_tags_a_copy_is_known_by_its_row_and_by_nothing_else() {
    let mut blank = copy_position(55, 101);
    blank.comment = String::new();
    blank.opened_at = seconds_ago(1);
    let mut scene = Scene::new().master_has(master_position(101)).follower_has(blank);
    scene.rules.mode = LinkMode::CopyUntagged;
    // It may be the copy: it is not taken, and no second one is opened.
    assert_eq!(scene.steps(101), []);
    let by_ticket = scene.open_pair(101, 55);
    let mut closed = scene.clone().pair(by_ticket);
    assert_eq!(closed.steps(101), []);
    closed.master.book.positions.clear();
    assert!(matches!(closed.steps(101)[..], [CopyStep::CloseCopy { .. }]));
    // An order that we know to have sent has a row as well.
    let in_flight = scene.sending_pair(101, 2);
    assert!(matches!(
        scene.pair(in_flight).steps(101)[..],
        [CopyStep::AdoptCopy { found_by: FoundBy::UniqueMatch, .. }]
    ));
}
