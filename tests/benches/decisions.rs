//! `cargo bench`: what the pure parts of a copy cost: plan, sizing, codec, gap detector.
//!
//! Times and allocations; the time of a plan must grow with its pairs and no faster. What a copy costs
//! with servers and sockets is measured by `./run bench own-time`.

#![allow(clippy::unwrap_used, reason = "values that are written here are right, or the bench ends")]

use bus::GapDetector;
use divan::{AllocProfiler, Bencher, black_box};
use reconcile::{
    AboveMax, BelowMin, FollowerHistory, InputParts, Limits, LinkMode, LinkRules, Market,
    MasterView, Pair, PairId, PairState, Pairs, ReconcileInput, SizeInput, Sizing, TicketInput,
    plan, plan_ticket, size_copy, tag,
};
use rust_decimal::Decimal;
use schemas::{
    AccountId, AccountSnapshot, Book, BrokerPosition, Change, Epoch, FollowerTicket, LinkId, Lots,
    Magic, MasterPosition, MasterSnapshot, MasterTicket, Micros, Quote, Seq, Side, Symbol,
    SymbolSpec, TradeEvent, codec,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

const NOW: Micros = Micros(1_700_000_000_000_000);
const MASTER: u64 = 1;
const FOLLOWER: u64 = 2;

fn main() {
    divan::main();
}

fn symbol() -> Symbol {
    Symbol::new("EURUSD").unwrap()
}

fn lots(text: &str) -> Lots {
    text.parse().unwrap()
}

fn ticket(number: u64) -> MasterTicket {
    MasterTicket::new(1_000_000 + number).unwrap()
}

fn spec() -> SymbolSpec {
    SymbolSpec {
        symbol: symbol(),
        digits: 5,
        lots_step: lots("0.01"),
        lots_min: lots("0.01"),
        lots_max: lots("50"),
        contract_size: Some(Decimal::from(100_000)),
        stops_level_points: 0,
    }
}

fn rules() -> LinkRules {
    LinkRules {
        link: LinkId::new(7).unwrap(),
        master: AccountId::new(MASTER).unwrap(),
        follower: AccountId::new(FOLLOWER).unwrap(),
        magic: Magic::new(7_007).unwrap(),
        copy_from: Micros(0),
        sync_existing: true,
        mode: LinkMode::Copy,
        paused: false,
        sizing: Sizing::Multiplier(Decimal::new(5, 1)),
        below_min: BelowMin::Skip,
        above_max: AboveMax::Clamp,
        align_contract: false,
        slippage_points: 50,
        copy_stops: true,
        copy_pendings: true,
        reverse: false,
        symbol_map: BTreeMap::new(),
        symbol_suffix: String::new(),
    }
}

fn position(number: u64) -> MasterPosition {
    MasterPosition {
        ticket: ticket(number),
        symbol: symbol(),
        side: Side::Buy,
        lots: lots("1"),
        lots_at_open: lots("1"),
        open_price: Some("1.10000".parse().unwrap()),
        stop_loss: Some("1.09000".parse().unwrap()),
        take_profit: None,
        opened_at: NOW,
        contract_size: None,
        is_copy: false,
    }
}

/// A link at rest: so many trades, each with its pair and its copy.
struct Scene {
    rules: LinkRules,
    master: MasterSnapshot,
    follower: AccountSnapshot,
    history: FollowerHistory,
    pairs: Pairs,
    symbols: BTreeMap<Symbol, SymbolSpec>,
    quotes: BTreeMap<Symbol, Quote>,
    limits: Limits,
    nothing: (BTreeSet<Magic>, BTreeSet<MasterTicket>),
}

impl Scene {
    fn new(pairs: u64) -> Scene {
        let rules = rules();
        let copy = |number| FollowerTicket::new(2_000_000 + number).unwrap();
        let pair = |number| Pair {
            id: PairId::new(rules.link, ticket(number), None),
            link: rules.link,
            master_ticket: ticket(number),
            state: PairState::Open,
            is_pending: false,
            follower_ticket: Some(copy(number)),
            symbol: symbol(),
            side: Side::Buy,
            master_side: Side::Buy,
            lots_at_open: Some(lots("0.5")),
            master_lots_at_open: lots("1"),
            sent_at: Some(NOW),
            reason: None,
            rejected: Default::default(),
            version: 2,
        };
        let held = |number| BrokerPosition {
            ticket: copy(number),
            symbol: symbol(),
            side: Side::Buy,
            lots: lots("0.5"),
            open_price: "1.10000".parse().unwrap(),
            stop_loss: Some("1.09000".parse().unwrap()),
            take_profit: None,
            opened_at: NOW,
            magic: rules.magic.as_i64(),
            comment: tag::encode(rules.link, ticket(number)).unwrap().as_str().to_owned(),
        };
        let positions = (0..pairs).map(|number| (ticket(number), position(number))).collect();
        let quote = Quote {
            symbol: symbol(),
            bid: "1.10000".parse().unwrap(),
            ask: "1.10002".parse().unwrap(),
            at: NOW,
        };
        Scene {
            master: MasterSnapshot {
                account: rules.master,
                epoch: Epoch::MIN,
                seq: Seq::ZERO,
                at: NOW,
                book: Book { positions, ..Book::default() },
                funds: None,
            },
            follower: AccountSnapshot {
                account: rules.follower,
                revision: 1,
                at: NOW,
                positions: (0..pairs).map(held).collect(),
                pendings: Vec::new(),
                funds: None,
            },
            history: FollowerHistory { since: Micros(0), trades: Vec::new() },
            pairs: Pairs::new((0..pairs).map(pair)),
            symbols: BTreeMap::from([(symbol(), spec())]),
            quotes: BTreeMap::from([(symbol(), quote)]),
            limits: Limits::default(),
            nothing: Default::default(),
            rules,
        }
    }

    fn input(&self) -> ReconcileInput<'_> {
        let input = ReconcileInput::new(InputParts {
            rules: &self.rules,
            master: &self.master,
            follower: &self.follower,
            history: &self.history,
            pairs: &self.pairs,
            symbols: &self.symbols,
            quotes: &self.quotes,
            other_magics: &self.nothing.0,
            busy: &self.nothing.1,
            on_the_road: &self.nothing.1,
            confirmed: None,
            now: NOW,
            limits: &self.limits,
        });
        input.expect("the parts belong together")
    }

    fn market(&self) -> Market<'_> {
        Market {
            symbols: &self.symbols,
            quotes: &self.quotes,
            master_funds: None,
            follower_funds: None,
            now: NOW,
            limits: &self.limits,
        }
    }
}

/// A reconcile of a link at rest.
#[divan::bench(args = [10, 100, 1_000, 10_000])]
fn plan_at_rest(bencher: Bencher<'_, '_>, pairs: u64) {
    let scene = Scene::new(pairs);
    assert_eq!(plan(&scene.input()).actions, [], "nothing is to be done");
    bencher
        .counter(divan::counter::ItemsCount::new(pairs))
        .bench_local(|| plan(black_box(&scene.input())));
}

/// A reconcile after a takeover: no row is left, and every copy is adopted by its tag.
#[divan::bench(args = [10, 100, 1_000, 10_000])]
fn plan_without_rows(bencher: Bencher<'_, '_>, pairs: u64) {
    let mut scene = Scene::new(pairs);
    scene.pairs = Pairs::default();
    assert_eq!(plan(&scene.input()).actions.len() as u64, pairs, "each is adopted");
    bencher
        .counter(divan::counter::ItemsCount::new(pairs))
        .bench_local(|| plan(black_box(&scene.input())));
}

/// One event of a master that opens a trade, decided alone.
#[divan::bench]
fn decide_an_open(bencher: Bencher<'_, '_>) {
    let scene = Scene::new(100);
    let position = position(100);
    let input = TicketInput {
        rules: &scene.rules,
        ticket: position.ticket,
        wanted: Some(MasterView::Position(&position)),
        pair: None,
        copy: None,
        market: scene.market(),
    };
    assert!(plan_ticket(&input).action.is_some());
    bencher.bench_local(|| plan_ticket(black_box(&input)));
}

/// One event of a master that closes a trade, decided alone.
#[divan::bench]
fn decide_a_close(bencher: Bencher<'_, '_>) {
    let scene = Scene::new(100);
    let input = TicketInput {
        rules: &scene.rules,
        ticket: ticket(50),
        wanted: None,
        pair: scene.pairs.main(ticket(50)),
        copy: Some((&scene.follower.positions[50]).into()),
        market: scene.market(),
    };
    assert!(plan_ticket(&input).action.is_some());
    bencher.bench_local(|| plan_ticket(black_box(&input)));
}

#[divan::bench]
fn size_a_copy(bencher: Bencher<'_, '_>) {
    let (rules, spec) = (rules(), spec());
    let input = SizeInput {
        master_lots_at_open: lots("1"),
        master_lots: lots("0.7"),
        master_contract_size: None,
        master_funds: None,
        follower_funds: None,
        spec: &spec,
        now: NOW,
        funds_age_max: Duration::from_secs(30),
    };
    assert_eq!(size_copy(&rules, &input), Ok(lots("0.35")));
    bencher.bench_local(|| size_copy(black_box(&rules), black_box(&input)));
}

fn event() -> TradeEvent {
    let (epoch, seq) = (Epoch::MIN, Seq::ZERO.next());
    let account = AccountId::new(MASTER).unwrap();
    TradeEvent { account, epoch, seq, at: NOW, change: Change::PositionOpened(position(1)) }
}

#[divan::bench]
fn encode_an_event(bencher: Bencher<'_, '_>) {
    let event = event();
    bencher.bench_local(|| codec::encode_event(black_box(&event)));
}

#[divan::bench]
fn decode_an_event(bencher: Bencher<'_, '_>) {
    let bytes = codec::encode_event(&event());
    bencher.bench_local(|| codec::decode_event(black_box(&bytes)));
}

#[divan::bench]
fn judge_an_event(bencher: Bencher<'_, '_>) {
    let mut gaps = GapDetector::new();
    let mut seq = Seq::ZERO;
    gaps.accept_snapshot(Epoch::MIN, seq, NOW);
    bencher.bench_local(|| {
        seq = seq.next();
        gaps.observe_event(Epoch::MIN, black_box(seq), NOW)
    });
}
