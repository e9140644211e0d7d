//! The laws of the planner (S14) and of what it sends (S4 to S8, S13, S15, S19), over worlds
//! that no story explains: rows, trades, orders and histories that contradict each other.

use crate::action::{CopyStep, Plan};
use crate::fixture::*;
use crate::input::{AboveMax, BelowMin, FollowerHistory, Limits, LinkMode, LinkRules, Sizing};
use crate::pair::{Pair, PairId, PairState, Pairs, Rejected};
use crate::sizing::{SizeInput, size_copy, target_lots};
use crate::tag;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use schemas::{
    BrokerPending, BrokerPosition, ClosedTrade, Funds, LinkId, Lots, MasterPending, MasterPosition,
    MasterTicket, Micros, PendingKind, Price, Side, Symbol,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Few values each, so that coincidences are the rule.
const TICKETS: std::ops::RangeInclusive<u64> = 1..=5;
const COPIES: std::ops::RangeInclusive<u64> = 50..=57;

fn any_symbol() -> impl Strategy<Value = Symbol> {
    prop_oneof![6 => Just("EURUSD"), 2 => Just("XAUUSD"), 1 => Just("NOBODY")].prop_map(symbol)
}

fn any_side() -> impl Strategy<Value = Side> {
    prop_oneof![3 => Just(Side::Buy), 1 => Just(Side::Sell)]
}

fn any_lots() -> impl Strategy<Value = Lots> {
    prop::sample::select(vec!["0.01", "0.2", "0.3", "0.35", "0.5", "1", "60"]).prop_map(lots)
}

fn any_price() -> impl Strategy<Value = Price> {
    prop::sample::select(vec!["1.09", "1.1", "1.1", "1.1", "1.10005", "1.2"]).prop_map(price)
}

fn any_stop() -> impl Strategy<Value = Option<Price>> {
    option::weighted(
        0.4,
        prop::sample::select(vec!["1.05", "1.0999", "1.10001", "1.15", "1.1500049"])
            .prop_map(price),
    )
}

fn any_age() -> impl Strategy<Value = Micros> {
    prop::sample::select(vec![0, 1, 4, 6, 20, 60, 3_600, 100_000]).prop_map(seconds_ago)
}

fn any_magic() -> impl Strategy<Value = i64> {
    prop_oneof![8 => Just(MAGIC as i64), 1 => Just(0), 1 => Just(MAGIC as i64 + 1)]
}

fn any_kind() -> impl Strategy<Value = PendingKind> {
    prop_oneof![
        3 => Just(PendingKind::BuyLimit),
        1 => Just(PendingKind::SellLimit),
        1 => Just(PendingKind::BuyStop),
        1 => Just(PendingKind::SellStop),
    ]
}

fn any_comment() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => TICKETS.prop_map(tag_of),
        2 => COPIES.prop_map(|n| format!("from #{n}")),
        1 => COPIES.prop_map(|n| format!("to #{n}")),
        1 => TICKETS.prop_map(|n| format!("{}[sl]", tag_of(n))),
        1 => Just(tag::encode(LinkId::new(LINK + 1).unwrap(), mt(1)).unwrap().as_str().to_owned()),
        2 => Just(String::new()),
        1 => ".{0,30}",
    ]
}

fn any_sizing() -> impl Strategy<Value = Sizing> {
    prop_oneof![
        4 => Just(Sizing::Multiplier(dec("0.5"))),
        1 => Just(Sizing::Multiplier(dec("0.005"))),
        1 => Just(Sizing::FixedLots(lots("0.3"))),
        1 => Just(Sizing::BalanceRatio(dec("0.5"))),
        1 => Just(Sizing::EquityRatio(dec("2"))),
    ]
}

fn any_rules() -> impl Strategy<Value = LinkRules> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let weighted = |weight| prop::bool::weighted(weight);
    let rare = (weighted(0.2), weighted(0.1), weighted(0.2), weighted(0.2), weighted(0.1));
    (any_sizing(), flags, rare).prop_map(|(sizing, flags, rare)| {
        let (sync_existing, use_min, clamp, copy_stops, copy_pendings) = flags;
        let (reverse, close_only, align_contract, untagged, paused) = rare;
        LinkRules {
            sizing,
            sync_existing,
            below_min: if use_min { BelowMin::UseMin } else { BelowMin::Skip },
            above_max: if clamp { AboveMax::Clamp } else { AboveMax::Skip },
            copy_stops,
            copy_pendings,
            reverse,
            mode: match (close_only, untagged) {
                (true, _) => LinkMode::CloseOnly,
                (false, true) => LinkMode::CopyUntagged,
                (false, false) => LinkMode::Copy,
            },
            paused,
            align_contract,
            ..Scene::new().rules
        }
    })
}

fn any_master_position() -> impl Strategy<Value = MasterPosition> {
    let volumes = (any_lots(), any_lots());
    let stops = (any_stop(), any_stop());
    (
        TICKETS,
        any_symbol(),
        any_side(),
        volumes,
        option::weighted(0.9, any_price()),
        stops,
        any_age(),
        prop::bool::weighted(0.05),
    )
        .prop_map(
            |(ticket, symbol, side, (now, at_open), open_price, stops, opened_at, is_copy)| {
                MasterPosition {
                    symbol,
                    side,
                    lots: now,
                    lots_at_open: at_open,
                    open_price,
                    stop_loss: stops.0,
                    take_profit: stops.1,
                    opened_at,
                    is_copy,
                    ..master_position(ticket)
                }
            },
        )
}

fn any_master_pending() -> impl Strategy<Value = MasterPending> {
    (TICKETS, any_symbol(), any_kind(), any_lots(), any_price(), any_stop(), any_age()).prop_map(
        |(ticket, symbol, kind, lots, price, stop_loss, placed_at)| MasterPending {
            symbol,
            kind,
            lots,
            price,
            stop_loss,
            placed_at,
            ..master_pending(ticket)
        },
    )
}

fn any_copy() -> impl Strategy<Value = BrokerPosition> {
    (
        COPIES,
        any_symbol(),
        any_side(),
        any_lots(),
        any_price(),
        (any_stop(), any_stop()),
        any_age(),
        any_magic(),
        any_comment(),
    )
        .prop_map(
            |(ticket, symbol, side, lots, open_price, stops, opened_at, magic, comment)| {
                BrokerPosition {
                    symbol,
                    side,
                    lots,
                    open_price,
                    stop_loss: stops.0,
                    take_profit: stops.1,
                    opened_at,
                    magic,
                    comment,
                    ..copy_position(ticket, 1)
                }
            },
        )
}

fn any_waiting_copy() -> impl Strategy<Value = BrokerPending> {
    (
        COPIES,
        any_symbol(),
        any_kind(),
        any_lots(),
        any_price(),
        any_age(),
        any_magic(),
        any_comment(),
    )
        .prop_map(|(ticket, symbol, kind, lots, price, placed_at, magic, comment)| {
            BrokerPending {
                symbol,
                kind,
                lots,
                price,
                placed_at,
                magic,
                comment,
                ..copy_pending(ticket, 1)
            }
        })
}

fn any_closed() -> impl Strategy<Value = ClosedTrade> {
    (
        COPIES,
        any_symbol(),
        any_side(),
        any_lots(),
        (any_age(), any_age()),
        any_magic(),
        any_comment(),
        option::weighted(0.2, any_lots()),
    )
        .prop_map(|(ticket, symbol, side, lots, times, magic, comment, lots_left)| {
            ClosedTrade {
                symbol,
                side,
                lots,
                opened_at: times.0.min(times.1),
                closed_at: times.0.max(times.1),
                magic,
                comment: comment.clone(),
                lots_left,
                ..closed_trade(ticket, "")
            }
        })
}

fn any_pair() -> impl Strategy<Value = Pair> {
    let volumes = (option::weighted(0.9, any_lots()), any_lots());
    let state = prop::sample::select(vec![
        PairState::Sending,
        PairState::Sending,
        PairState::Open,
        PairState::Open,
        PairState::Open,
        PairState::Closing,
        PairState::Closed,
        PairState::Failed,
        PairState::Skipped,
    ]);
    (
        TICKETS,
        state,
        COPIES,
        any_symbol(),
        (any_side(), prop::bool::weighted(0.1)),
        volumes,
        option::weighted(0.9, any_age()),
        prop::bool::weighted(0.15),
        1..4u64,
    )
        .prop_map(
            |(
                ticket,
                state,
                copy,
                symbol,
                (side, reversed),
                volumes,
                sent_at,
                is_pending,
                version,
            )| {
                let scene = Scene::new();
                let named =
                    (state != PairState::Sending && state != PairState::Skipped).then(|| ft(copy));
                Pair {
                    id: PairId::new(scene.rules.link, mt(ticket), named),
                    link: scene.rules.link,
                    master_ticket: mt(ticket),
                    state,
                    is_pending,
                    follower_ticket: named,
                    symbol,
                    side,
                    master_side: if reversed { side.opposite() } else { side },
                    lots_at_open: volumes.0,
                    master_lots_at_open: volumes.1,
                    sent_at,
                    reason: None,
                    rejected: Rejected::default(),
                    version,
                }
            },
        )
}

/// Any world. Absence is believed at once, so that every plan is given out.
fn any_scene() -> impl Strategy<Value = Scene> {
    let master = (vec(any_master_position(), 0..5), vec(any_master_pending(), 0..3));
    let follower = (vec(any_copy(), 0..6), vec(any_waiting_copy(), 0..3));
    let past = (vec(any_closed(), 0..5), prop::sample::select(vec![172_800, 172_800, 30]));
    let market = (option::weighted(0.8, any_age()), any_price(), 0..40u32, any::<bool>());
    let busy = vec(TICKETS, 0..2);
    let renumbers = any::<bool>();
    (any_rules(), master, follower, past, vec(any_pair(), 0..5), market, busy, renumbers).prop_map(
        |(rules, master, follower, past, pairs, market, busy, renumbers)| {
            let mut scene = Scene { rules, ..Scene::new() };
            for position in master.0 {
                scene = scene.master_has(position);
            }
            for order in master.1 {
                scene = scene.master_waits(order);
            }
            let positions: BTreeMap<_, _> = follower.0.into_iter().map(|p| (p.ticket, p)).collect();
            let pendings: BTreeMap<_, _> = follower.1.into_iter().map(|o| (o.ticket, o)).collect();
            scene.follower.positions = positions.into_values().collect();
            // A broker numbers trades and orders from one counter.
            let is_free =
                |o: &BrokerPending| !scene.follower.positions.iter().any(|p| p.ticket == o.ticket);
            scene.follower.pendings = pendings.into_values().filter(is_free).collect();
            scene.history = FollowerHistory { since: seconds_ago(past.1), trades: past.0 };
            // The unique index: one live row a ticket.
            let mut live = BTreeSet::new();
            let rows =
                pairs.into_iter().filter(|p| p.state.is_terminal() || live.insert(p.master_ticket));
            scene.pairs = Pairs::new(rows);
            let (quoted_at, bid, level, with_funds) = market;
            scene.quotes.clear();
            for (name, spec) in &mut scene.symbols {
                spec.stops_level_points = level;
                if let Some(at) = quoted_at {
                    let quote = schemas::Quote { symbol: name.clone(), bid, ask: bid, at };
                    scene.quotes.insert(name.clone(), quote);
                }
            }
            if with_funds {
                scene.master.funds = Some(funds("10000", "USD", NOW));
                scene.follower.funds = Some(funds("7000", "USD", NOW));
            }
            scene.busy = busy.into_iter().map(mt).collect();
            scene.limits = Limits { absent_max: usize::MAX, ..Limits::default() };
            scene.partial = if renumbers { Partial::Renumbers } else { Partial::KeepsTicket };
            scene
        },
    )
}

/// Any world that one broker can be in: a ticket has one magic, symbol, direction and tag, and
/// is not open beside the trade that continues it. What is open and what was written by hand,
/// by us or by nobody stays any.
fn any_brokers_scene() -> impl Strategy<Value = Scene> {
    any_scene().prop_map(|mut scene| {
        let positions = scene.follower.positions.iter();
        let mut known: BTreeMap<_, (i64, Symbol, Side, String)> = positions
            .map(|p| (p.ticket, (p.magic, p.symbol.clone(), p.side, p.comment.clone())))
            .collect();
        let open: BTreeSet<_> = known.keys().copied().collect();
        let waiting: BTreeSet<_> = scene.follower.pendings.iter().map(|o| o.ticket).collect();
        scene.history.trades.retain(|t| !waiting.contains(&t.ticket));
        for t in &mut scene.history.trades {
            let first = (t.magic, t.symbol.clone(), t.side, t.comment.clone());
            let (magic, symbol, side, comment) = known.entry(t.ticket).or_insert(first).clone();
            (t.magic, t.symbol, t.side) = (magic, symbol, side);
            let is_ended_as_continued = t.comment.starts_with("to #") && open.contains(&t.ticket);
            let is_tagged_otherwise = tag::remnant(&t.comment) != tag::remnant(&comment);
            if is_ended_as_continued || is_tagged_otherwise {
                t.comment.clear();
            }
        }
        let continued: BTreeSet<String> =
            open.iter().chain(&waiting).map(|ticket| format!("from #{ticket}")).collect();
        let positions = scene.follower.positions.iter_mut().map(|p| &mut p.comment);
        let pendings = scene.follower.pendings.iter_mut().map(|o| &mut o.comment);
        let ended = scene.history.trades.iter_mut().map(|t| &mut t.comment);
        for comment in positions.chain(pendings).chain(ended) {
            if continued.contains(comment) {
                comment.clear();
            }
        }
        scene
    })
}

fn steps_of(plan: &Plan) -> impl Iterator<Item = (MasterTicket, &CopyStep)> {
    plan.actions.iter().flat_map(|a| a.steps.iter().map(move |s| (a.master_ticket, s)))
}

/// What the follower holds and what is known of each ticket, without the broker's numbers.
#[derive(Debug, PartialEq, Eq)]
struct End {
    open: BTreeMap<String, usize>,
    pairs: BTreeMap<MasterTicket, (bool, Option<Lots>)>,
}

fn end_of(scene: &Scene) -> End {
    let mut open = BTreeMap::new();
    for p in &scene.follower.positions {
        let stops = (p.stop_loss, p.take_profit);
        let words = format!("{} {:?} {} {:?} {}", p.symbol, p.side, p.lots, stops, p.magic);
        *open.entry(words).or_default() += 1;
    }
    for o in &scene.follower.pendings {
        let words = format!("{} {:?} {} {} {:?}", o.symbol, o.kind, o.lots, o.price, o.stop_loss);
        *open.entry(words).or_default() += 1;
    }
    let tickets: BTreeSet<MasterTicket> = scene.pairs.tickets().collect();
    let main = tickets.into_iter().filter_map(|ticket| scene.pairs.main(ticket));
    let volume = |p: &Pair| p.lots_at_open.filter(|_| p.state.is_live());
    let pairs = main.map(|p| (p.master_ticket, (p.state.is_live(), volume(p)))).collect();
    End { open, pairs }
}

proptest! {
    #![proptest_config(config())]

    // S14: total, and never two actions for a ticket.
    #[test]
    fn every_world_has_a_plan_with_one_action_a_ticket(scene in any_scene()) {
        let plan = scene.plan();
        let tickets: Vec<MasterTicket> = plan.actions.iter().map(|a| a.master_ticket).collect();
        prop_assert!(tickets.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", tickets);
        prop_assert!(plan.actions.iter().all(|action| !action.steps.is_empty()));
        // No two steps of a plan are about one trade of the follower with the same order.
        let mut ended = BTreeSet::new();
        for (_, step) in steps_of(&plan) {
            if let CopyStep::CloseCopy { ticket, .. }
            | CopyStep::CancelPending { ticket, .. }
            | CopyStep::CloseDuplicate { ticket, .. }
            | CopyStep::CloseOrphan { ticket, .. } = step
            {
                prop_assert!(ended.insert(*ticket), "{ticket} is closed twice");
            }
        }
    }

    // S14: deterministic and independent of the order of the inputs.
    #[test]
    fn plan_does_not_depend_on_the_order_of_the_inputs(scene in any_scene(), turn in 0..5usize) {
        fn shuffle<T>(list: &mut [T], turn: usize) {
            list.reverse();
            let by = turn.min(list.len());
            list.rotate_left(by);
        }
        let mut other = scene.clone();
        shuffle(&mut other.follower.positions, turn);
        shuffle(&mut other.follower.pendings, turn);
        shuffle(&mut other.history.trades, turn);
        let mut rows: Vec<Pair> = other.pairs.rows().cloned().collect();
        shuffle(&mut rows, turn);
        other.pairs = Pairs::new(rows);
        prop_assert_eq!(scene.plan(), other.plan());
        prop_assert_eq!(scene.plan(), scene.plan());
    }

    // S14: planning after a perfectly executed plan gives nothing to do.
    #[test]
    fn executed_plan_leaves_nothing_to_do(scene in any_brokers_scene()) {
        let mut after = scene.clone();
        after.execute(&scene.plan(), usize::MAX);
        prop_assert_eq!(after.plan().actions, vec![]);
    }

    // S14: executing any part and planning again leads to the same end.
    #[test]
    fn interrupted_plan_leads_to_the_same_end(scene in any_brokers_scene(), count in 0..8usize) {
        let mut whole = scene.clone();
        whole.execute(&scene.plan(), usize::MAX);
        let mut part = scene.clone();
        part.execute(&scene.plan(), count);
        let rest = part.plan();
        part.execute(&rest, usize::MAX);
        prop_assert_eq!(&part.plan().actions, &vec![]);
        prop_assert_eq!(end_of(&part), end_of(&whole));
    }

    // S4, S5, S19: nothing is opened that has a copy, had one, or was decided about.
    #[test]
    fn nothing_is_opened_twice_or_against_a_final_decision(scene in any_scene()) {
        for (ticket, step) in steps_of(&scene.plan()) {
            if !matches!(step, CopyStep::OpenCopy { .. } | CopyStep::PlacePending { .. }) {
                continue;
            }
            prop_assert_eq!(scene.pairs.main(ticket), None);
            prop_assert!(!scene.busy.contains(&ticket));
            let tag = tag_of(ticket.get());
            let ours = MAGIC as i64;
            let open = scene.follower.positions.iter().map(|p| (p.magic, &p.comment));
            let waiting = scene.follower.pendings.iter().map(|o| (o.magic, &o.comment));
            let ended = scene.history.trades.iter().map(|t| (t.magic, &t.comment));
            let mut all = open.chain(waiting).chain(ended);
            prop_assert!(!all.any(|(magic, comment)| magic == ours && *comment == tag));
        }
    }

    #[test]
    fn nothing_is_ordered_or_refused_for_a_paused_link(mut scene in any_scene(), ticket in TICKETS) {
        scene.rules.paused = true;
        let plan = scene.plan();
        prop_assert!(steps_of(&plan).all(|(_, step)| step.is_fact()));
        let live = scene.live(ticket).action.map_or(Vec::new(), |action| action.steps);
        prop_assert!(live.iter().all(CopyStep::is_fact));
    }

    // S6: every open has its cause in the master's state, a late one the price rule as well.
    #[test]
    fn every_open_has_its_cause(scene in any_scene()) {
        for (ticket, step) in steps_of(&scene.plan()) {
            let CopyStep::OpenCopy { symbol, side, late, .. } = step else { continue };
            let master = scene.master.book.positions.get(&ticket);
            prop_assert!(master.is_some());
            let Some(master) = master else { continue };
            prop_assert!(!master.is_copy && scene.rules.mode != LinkMode::CloseOnly);
            prop_assert!(!late || scene.rules.mode != LinkMode::CopyUntagged);
            prop_assert!(scene.rules.sync_existing || master.opened_at >= scene.rules.copy_from);
            prop_assert_eq!(*side == master.side, !scene.rules.reverse);
            prop_assert!(scene.history.since <= master.opened_at, "the history was searched");
            prop_assert_eq!(*late, scene.now.since(master.opened_at) > Duration::from_secs(5));
            if *late {
                let quote = &scene.quotes[symbol];
                prop_assert!(scene.now.since(quote.at) <= Duration::from_secs(3));
                let paid = if *side == Side::Buy { quote.ask } else { quote.bid };
                let moved = (paid.get() - master.open_price.unwrap().get()).abs();
                prop_assert!(moved <= dec("0.0002"));
            }
        }
    }

    // S7 and cases 56, 66: no order names a trade that is not ours.
    #[test]
    fn no_order_names_a_trade_that_is_not_ours(scene in any_scene()) {
        let named: BTreeSet<_> = scene.pairs.rows().filter_map(|p| p.follower_ticket).collect();
        let positions = scene.follower.positions.iter().map(|p| (p.ticket, p.magic));
        let pendings = scene.follower.pendings.iter().map(|o| (o.ticket, o.magic));
        let magics: BTreeMap<_, _> = pendings.chain(positions).collect();
        for (ticket, step) in steps_of(&scene.plan()) {
            let touched = match step.request(&scene.rules, ticket).unwrap() {
                Some(schemas::OrderRequest::Close { ticket, .. }
                | schemas::OrderRequest::Cancel { ticket }
                | schemas::OrderRequest::Modify { ticket, .. }
                | schemas::OrderRequest::ModifyPending { ticket, .. }) => ticket,
                _ => continue,
            };
            let magic = magics.get(&touched).copied();
            let is_ours = magic == Some(MAGIC as i64);
            prop_assert!(is_ours || (magic == Some(0) && named.contains(&touched)), "{step:?}");
        }
    }

    // S8: a copy shrinks to its target and never grows.
    #[test]
    fn partial_close_never_takes_more_than_the_surplus(scene in any_scene()) {
        let open: BTreeMap<_, _> =
            scene.follower.positions.iter().map(|p| (p.ticket, p.lots)).collect();
        for (_, step) in steps_of(&scene.plan()) {
            let CopyStep::ReduceCopy { ticket, lots: closed, target } = step else { continue };
            prop_assert_eq!(closed.get() + target.get(), open[ticket].get());
            prop_assert!(*target >= lots("0.01"));
        }
    }

    // H41: whatever is held is nothing but absence, and a held plan does nothing.
    #[test]
    fn more_than_the_limit_of_absences_is_never_given_out(scene in any_scene()) {
        let mut careful = scene.clone();
        careful.limits = Limits { absent_max: 1, absent_max_percent: 0, ..Limits::default() };
        let plan = careful.plan();
        match plan.held {
            Some(held) => {
                prop_assert_eq!(plan.actions, vec![]);
                prop_assert!(held.absent.len() > 1);
            }
            None => prop_assert_eq!(plan.actions, scene.plan().actions),
        }
    }

    // S8: the volume laws of sizing.
    #[test]
    fn sizes_are_whole_steps_between_the_limits(
        sizing in any_sizing(),
        (use_min, clamp) in (any::<bool>(), any::<bool>()),
        (at_open, now) in (1..200_000u32, 1..200_000u32),
        (step, min, max) in (1..50u32, 1..200u32, 1..6_000u32),
    ) {
        let hundredths = |n: u32| Lots::new(rust_decimal::Decimal::new(i64::from(n), 2)).unwrap();
        let mut spec = spec("EURUSD");
        (spec.lots_step, spec.lots_min, spec.lots_max) =
            (hundredths(step), hundredths(min), hundredths(max));
        let rules = LinkRules {
            sizing,
            below_min: if use_min { BelowMin::UseMin } else { BelowMin::Skip },
            above_max: if clamp { AboveMax::Clamp } else { AboveMax::Skip },
            ..Scene::new().rules
        };
        let (master, follower) = (funds("10000", "USD", NOW), funds("7000", "USD", NOW));
        let size = |now: u32, at_open: u32| {
            let input = SizeInput {
                master_lots_at_open: hundredths(at_open),
                master_lots: hundredths(now),
                master_contract_size: None,
                master_funds: Some(&master as &Funds),
                follower_funds: Some(&follower),
                spec: &spec,
                now: NOW,
                funds_age_max: Duration::from_secs(30),
            };
            size_copy(&rules, &input)
        };
        let Ok(lots) = size(now, at_open) else { return Ok(()) };
        prop_assert!(lots <= spec.lots_max && lots >= spec.lots_min);
        let is_whole = (lots.get() % spec.lots_step.get()).is_zero();
        prop_assert!(is_whole || (use_min && lots == spec.lots_min));
        let part = rust_decimal::Decimal::from(now.min(at_open)) / rust_decimal::Decimal::from(at_open);
        let exact = part * match sizing {
            Sizing::Multiplier(value) => value * hundredths(at_open).get(),
            Sizing::FixedLots(fixed) => fixed.get(),
            Sizing::BalanceRatio(value) | Sizing::EquityRatio(value) => {
                value * hundredths(at_open).get() * dec("0.7")
            }
        };
        let grain = dec("0.000000000001");
        prop_assert!(lots.get() <= exact + grain || (use_min && lots == spec.lots_min));
        if let (Ok(more), true) = (size(now + 1, at_open + 1), now >= at_open) {
            prop_assert!(more >= lots, "grows with the master's volume");
        }
    }

    #[test]
    fn targets_stay_between_the_smallest_volume_and_the_copys_own(
        (copy, at_open, now) in (1..5_000u32, 1..5_000u32, 1..5_000u32),
    ) {
        let hundredths = |n: u32| Lots::new(rust_decimal::Decimal::new(i64::from(n), 2)).unwrap();
        let spec = spec("EURUSD");
        let target = |now: u32| target_lots(hundredths(copy), hundredths(at_open), hundredths(now), &spec);
        prop_assert!(target(now) <= hundredths(copy) && target(now) >= spec.lots_min);
        prop_assert!(target(now + 1) >= target(now));
        if now <= at_open && target(now) > spec.lots_min {
            // floor(copy x now / at_open), computed in whole steps.
            let steps = u64::from(copy) * u64::from(now) / u64::from(at_open);
            prop_assert_eq!(target(now), hundredths(steps as u32));
        }
    }

    // S15.
    #[test]
    fn tags_give_back_what_they_were_made_of(link in 1..36u64.pow(8), ticket in 1..=i64::MAX as u64) {
        let (link, ticket) = (LinkId::new(link).unwrap(), MasterTicket::new(ticket).unwrap());
        let tag = tag::encode(link, ticket).unwrap();
        prop_assert_eq!(tag.as_str().len(), tag::TAG_LEN);
        prop_assert_eq!(tag::decode(tag.as_str()), Some((link, ticket)));
    }

    // Case 54, S15: no text panics, and what decodes is the one text of its ticket.
    #[test]
    fn text_that_decodes_is_the_tag_of_what_it_decodes_to(text in prop_oneof![".*", "L[0-9a-z]{23}", "L0{12}[0-9a-z]{11}"]) {
        if let Some((link, ticket)) = tag::decode(&text) {
            let tag = tag::encode(link, ticket).unwrap();
            prop_assert_eq!(tag.as_str(), text.as_str());
        }
        let _hint = tag::remnant(&text);
    }

    // Live path and reconcile agree about every ticket whose pair and copy nothing contradicts.
    #[test]
    fn live_path_and_reconcile_decide_the_same(scene in any_brokers_scene()) {
        let mut scene = scene;
        let plan = scene.plan();
        scene.execute(&plan, usize::MAX);
        // What no live pair names, or one of another shape does, is the reconcile's alone.
        let live = scene.pairs.rows().filter(|p| p.state.is_live() && scene.live_copy_is_whole(p));
        let named: BTreeSet<_> = live.filter_map(|p| p.follower_ticket).collect();
        scene.follower.positions.retain(|p| named.contains(&p.ticket));
        scene.follower.pendings.retain(|o| named.contains(&o.ticket));
        scene.history.trades.clear();
        scene.history.since = seconds_ago(200_000);
        scene.busy.clear();
        // The master goes on: every second ticket is halved, the others move their stops.
        for (ticket, position) in &mut scene.master.book.positions {
            if ticket.get() % 2 == 0 {
                position.lots = position.lots_at_open.min(lots("0.2"));
            } else {
                position.stop_loss = Some(price("1.01"));
            }
        }
        let plan = scene.plan();
        for ticket in TICKETS {
            let is_stray = plan.notes.iter().any(|n| matches!(n, crate::Note::ReportOrphan { .. }));
            let has_copy = scene.pairs.main(mt(ticket)).is_none_or(|pair| {
                pair.state != PairState::Sending
                    && (pair.state.is_terminal() || scene.live_copy_is_whole(pair))
            });
            let positions = scene.follower.positions.iter().map(|p| &p.comment);
            let mut comments = positions.chain(scene.follower.pendings.iter().map(|o| &o.comment));
            let tag = tag_of(ticket);
            let is_tagged = comments.any(|comment| *comment == tag);
            let is_live = scene.pairs.main(mt(ticket)).is_some_and(|pair| pair.state.is_live());
            if is_stray || !has_copy || (is_tagged && !is_live) {
                continue;
            }
            let planned = plan.actions.iter().find(|a| a.master_ticket == mt(ticket));
            prop_assert_eq!(planned.cloned(), scene.live(ticket).action);
        }
    }
}

/// Failures print their seed; they are turned into named cases and not kept in a file.
fn config() -> ProptestConfig {
    let cases = ProptestConfig::default().cases.max(512);
    ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 4_000,
        ..ProptestConfig::default()
    }
}
