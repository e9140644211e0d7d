//! The pure parts of a copy, each ready to be done again and again: plan, sizing, codec, gap detector.
//!
//! In: which part, and the pairs of its link. Out: a closure that does it once. `cargo bench` measures
//! its time and what it allocates, `./run bench instructions` its instructions.

use bus::GapDetector;
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
use std::hint::black_box;
use std::time::Duration;

const NOW: Micros = Micros(1_700_000_000_000_000);
const MASTER: u64 = 1;
const FOLLOWER: u64 = 2;

/// Pairs of a link whose size does not matter to the part.
pub const SOME_PAIRS: u64 = 100;

/// One part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Decision {
    /// A reconcile of a link at rest.
    PlanAtRest,
    /// A reconcile after a takeover: no row is left, and every copy is adopted by its tag.
    PlanWithoutRows,
    /// One event of a master that opens a trade, decided alone.
    DecideAnOpen,
    /// One event of a master that closes a trade, decided alone.
    DecideAClose,
    /// The volume of a copy.
    SizeACopy,
    /// An event, to bytes.
    EncodeAnEvent,
    /// And back.
    DecodeAnEvent,
    /// Whether an event is the next one.
    JudgeAnEvent,
}

impl Decision {
    /// Ready to be done; checked once that it does what it is called.
    pub fn ready(self, pairs: u64) -> Box<dyn FnMut()> {
        match self {
            Decision::PlanAtRest => plan_of(Scene::new(pairs), 0),
            Decision::PlanWithoutRows => {
                let scene = Scene { pairs: Pairs::default(), ..Scene::new(pairs) };
                plan_of(scene, pairs)
            }
            Decision::DecideAnOpen => {
                let (scene, position) = (Scene::new(pairs), position(pairs));
                ticket_of(scene, position.ticket, Some(position))
            }
            Decision::DecideAClose => ticket_of(Scene::new(pairs), ticket(pairs / 2), None),
            Decision::SizeACopy => size(),
            Decision::EncodeAnEvent => {
                let event = event();
                Box::new(move || {
                    black_box(codec::encode_event(black_box(&event)));
                })
            }
            Decision::DecodeAnEvent => {
                let bytes = codec::encode_event(&event());
                assert!(codec::decode_event(&bytes).is_ok());
                Box::new(move || {
                    let _event = black_box(codec::decode_event(black_box(&bytes)));
                })
            }
            Decision::JudgeAnEvent => {
                let (mut gaps, mut seq) = (GapDetector::new(), Seq::ZERO);
                gaps.accept_snapshot(Epoch::MIN, seq, NOW);
                Box::new(move || {
                    seq = seq.next();
                    black_box(gaps.observe_event(Epoch::MIN, black_box(seq), NOW));
                })
            }
        }
    }
}

fn plan_of(scene: Scene, actions: u64) -> Box<dyn FnMut()> {
    assert_eq!(plan(&scene.input()).actions.len() as u64, actions);
    Box::new(move || {
        black_box(plan(black_box(&scene.input())));
    })
}

/// What is to be done about a trade that the master holds, or holds no more.
fn ticket_of(scene: Scene, ticket: MasterTicket, held: Option<MasterPosition>) -> Box<dyn FnMut()> {
    let ours = scene.pairs.main(ticket).and_then(|pair| pair.follower_ticket);
    let copy = scene.follower.positions.iter().find(|held| Some(held.ticket) == ours).cloned();
    let decide = move || {
        let input = TicketInput {
            rules: &scene.rules,
            ticket,
            wanted: held.as_ref().map(MasterView::Position),
            pair: scene.pairs.main(ticket),
            copy: copy.as_ref().map(Into::into),
            market: scene.market(),
        };
        plan_ticket(black_box(&input)).action.is_some()
    };
    assert!(decide(), "there is something to do");
    Box::new(move || {
        black_box(decide());
    })
}

fn size() -> Box<dyn FnMut()> {
    let (rules, spec) = (rules(), spec());
    let (at_open, now) = (lots("1"), lots("0.7"));
    let size = move || {
        let input = SizeInput {
            master_lots_at_open: at_open,
            master_lots: now,
            master_contract_size: None,
            master_funds: None,
            follower_funds: None,
            spec: &spec,
            now: NOW,
            funds_age_max: Duration::from_secs(30),
        };
        size_copy(black_box(&rules), black_box(&input))
    };
    assert_eq!(size(), Ok(lots("0.35")));
    Box::new(move || {
        let _lots = black_box(size());
    })
}

fn event() -> TradeEvent {
    let (epoch, seq) = (Epoch::MIN, Seq::ZERO.next());
    let account = AccountId::new(MASTER).unwrap();
    TradeEvent { account, epoch, seq, at: NOW, change: Change::PositionOpened(position(1)) }
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
