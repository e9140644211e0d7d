//! What a follower knows, what it hears, and what it wants done.

use super::by_hand::{Asker, CloseAnswer, NotNow};
use super::queue::{Attempt, Slots, TicketKey};
use crate::broker::view::AccountView;
use crate::broker::{Outcome, SessionEvent};
use crate::clock::NodeTime;
use crate::writer::EventOutcome;
use bus::{FeedMessage, RequestReason};
use reconcile::{
    CopyAction, CopyStep, EndReason, FailReason, FollowerHistory, HeldPlan, Limits, LinkMode,
    LinkRules, Pair, PairId, PairState, Pairs,
};
use schemas::planted::{self, Bug};
use schemas::{
    AccountId, AccountSnapshot, Epoch, FollowerTicket, LinkId, Lots, Magic, MasterPending,
    MasterSnapshot, MasterTicket, Micros, OrderRequest, Price, Quote, Seq, Symbol, SymbolSpec,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// The instant of a step, by both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Node time, for waits.
    pub node: NodeTime,
    /// Wall clock, for ages of trades and quotes and for stamps.
    pub wall: Micros,
}

/// The waits and bounds of a follower.
#[derive(Debug, Clone)]
pub struct FollowerSettings {
    /// Orders on their way at once.
    pub parallel_orders: usize,
    /// Waits and ages of the planner.
    pub limits: Limits,
    /// So long at most a partial close waits for the row of its copy: a node that cannot write has
    /// lost the account by then. If it has not, the rows are at fault, and the volume counts more.
    pub row_wait_max: Duration,
    /// After these waits the new owner looks again for duplicates (H7).
    pub audits: Vec<Duration>,
    /// A reconcile without any other reason.
    pub routine: Duration,
}

/// Why a reconcile is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The feed gave a snapshot.
    Feed,
    /// The session at the broker was opened.
    Session,
    /// The lease was confirmed again after a hole.
    LeaseRestored,
    /// An order did not leave, and its ticket is as it was.
    NotSent,
    /// The rules changed.
    Rules,
    /// An outcome is unknown.
    Unresolved,
    /// A trade with our magic appeared that nothing explains.
    Unexplained,
    /// The last plan did something.
    Confirm,
    /// The last plan was held.
    Held,
    /// Something waits for a later look.
    Waiting,
    /// A late open needs a look into the history.
    LateOpen,
    /// The settle time has passed.
    Settled,
    /// Somebody asked for it.
    Asked,
    /// Look for duplicates after a takeover.
    Audit,
    /// Nothing in particular.
    Routine,
}

impl Reason {
    /// Nothing is known to be wrong: it may wait for room in the window, and leaves some.
    fn can_wait(self) -> bool {
        matches!(self, Reason::Confirm | Reason::Waiting | Reason::Routine)
    }

    schemas::words! {
        /// The word used in metrics.
        pub fn as_str(self) in WORDS {
            Reason::Feed => "feed",
            Reason::Session => "session",
            Reason::LeaseRestored => "lease_restored",
            Reason::NotSent => "not_sent",
            Reason::Rules => "rules",
            Reason::Unresolved => "unresolved",
            Reason::Unexplained => "unexplained",
            Reason::Confirm => "confirm",
            Reason::Held => "held",
            Reason::Waiting => "waiting",
            Reason::LateOpen => "late_open",
            Reason::Settled => "settled",
            Reason::Asked => "asked",
            Reason::Audit => "audit",
            Reason::Routine => "routine",
        }
    }
}

/// What a follower hears.
#[derive(Debug)]
pub enum Input {
    /// The feed of a master says something.
    Feed {
        /// Which master.
        master: AccountId,
        /// What.
        message: FeedMessage,
    },
    /// The session at the broker is open and synced.
    SessionOpened {
        /// The complete state.
        snapshot: AccountSnapshot,
        /// What the broker says of its symbols.
        symbols: Vec<SymbolSpec>,
        /// The rest of a partial close gets a new number and loses the tag (MT4).
        renumbers: bool,
    },
    /// The session says something.
    Session(SessionEvent),
    /// An order was answered.
    Answer {
        /// Which ticket.
        key: TicketKey,
        /// Which try.
        attempt: Attempt,
        /// What became of it.
        outcome: Outcome,
    },
    /// A read that was asked for is complete, or failed.
    Read {
        /// Which read.
        id: u64,
        /// The account and its history; nothing if the read failed.
        read: Option<AccountRead>,
    },
    /// The rules of all links of this account, each with its pair rows as they are stored.
    /// The rows count only for a link that is new here: of the others the follower knows better.
    Links(Vec<(LinkRules, Pairs)>),
    /// The row of a copy, one of [`Follower::unstored`], waits for the database no longer.
    Stored(TicketKey),
    /// A person wants the copy of a master's ticket closed.
    Close {
        /// Which one.
        key: TicketKey,
        /// Who waits for the answer.
        asker: Asker,
    },
    /// The lease is confirmed again after a hole.
    LeaseRestored,
    /// Time passed.
    Tick,
    /// The account will be let go: send nothing new.
    Drain,
}

/// A complete read of an account.
#[derive(Debug)]
pub struct AccountRead {
    /// Everything it holds.
    pub snapshot: AccountSnapshot,
    /// What ended since the instant that was asked for.
    pub history: FollowerHistory,
    /// Quotes of the symbols that matter.
    pub quotes: Vec<Quote>,
}

/// The event that made an order necessary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// When the master's callback ran (publisher's clock).
    pub at: Micros,
    /// The order had to wait for an earlier answer of the broker, for its ticket or for room:
    /// then its time is the broker's as well.
    pub waited: bool,
}

/// What a follower wants done.
#[derive(Debug)]
pub enum Effect {
    /// Send an order, under a permit. Then call [`Follower::submitted`], or answer `NotSent`.
    Send {
        /// Which ticket.
        key: TicketKey,
        /// Which try.
        attempt: Attempt,
        /// The order.
        request: OrderRequest,
    },
    /// Read the account and its history since `since`; quotes of `symbols`.
    Read {
        /// Which read.
        id: u64,
        /// How far back.
        since: Micros,
        /// Whose quotes matter.
        symbols: BTreeSet<Symbol>,
    },
    /// Ask a master's publisher for a fresh snapshot.
    AskMaster {
        /// Which master.
        master: AccountId,
        /// Why.
        reason: RequestReason,
    },
    /// Write a pair down.
    Persist(Box<Pair>),
    /// Write down what was done or decided.
    Record(Box<Record>),
    /// A plan was made.
    Planned {
        /// The link.
        link: LinkId,
        /// The read that it was made from.
        plan: u64,
        /// When that read began.
        begun: Micros,
        /// Place in the master's feed that it was made from.
        position: (Epoch, Seq),
        /// Why.
        reason: Reason,
        /// What it does, by step.
        steps: Vec<&'static str>,
        /// It was held for a second look.
        held: bool,
        /// A second copy for one ticket was found.
        duplicates: usize,
    },
    /// Plans for a link did not come to rest within [`ROUNDS_MAX`] rounds.
    Restless(LinkId),
    /// What became of a wish to close a copy.
    CloseAnswered {
        /// Who waits for it.
        asker: Asker,
        /// What.
        answer: CloseAnswer,
    },
    /// A copy came back without the tag or the magic of its order: the broker does not keep them.
    /// To be stored, so that the next owner knows it as well (H53).
    Untaggable(LinkId),
}

/// One thing that was done or decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The ticket.
    pub key: TicketKey,
    /// The copy, if known.
    pub follower_ticket: Option<FollowerTicket>,
    /// The step.
    pub action: &'static str,
    /// How it ended.
    pub outcome: EventOutcome,
    /// Why.
    pub reason: Option<String>,
    /// Symbol of the copy.
    pub symbol: Option<Symbol>,
    /// Volume traded.
    pub lots: Option<Lots>,
    /// Price of the fill.
    pub price: Option<Price>,
    /// From the master's callback to the order call.
    pub own_time: Option<Duration>,
    /// From the order call to the answer.
    pub broker_time: Option<Duration>,
}

/// Plans in a row that did something, before a link counts as restless: lineage, adoption,
/// close and confirmation need four.
pub(super) const ROUNDS_MAX: u32 = 6;
/// At most this many reconciles of a link within [`RECONCILE_WINDOW`] (L6).
pub(super) const RECONCILES_PER_WINDOW: usize = 3;
/// Of these, so many are kept for reasons that cannot wait: a look that only confirms must not
/// delay a snapshot, the end of the settle time or a second look by ten seconds.
pub(super) const RECONCILES_KEPT: usize = 1;
/// See [`RECONCILES_PER_WINDOW`].
pub(super) const RECONCILE_WINDOW: Duration = Duration::from_secs(10);
/// An open that was requoted is asked for this often (case 32).
pub(super) const OPEN_TRIES_MAX: u32 = 4;
/// First wait before an order that was refused for now is asked for again.
pub(super) const RETRY_FIRST: Duration = Duration::from_millis(500);
/// Longest such wait. A close is asked for at this pace until the market opens (case 34).
pub(super) const RETRY_MAX: Duration = Duration::from_secs(30);
/// So long after its time a refusal is forgotten.
pub(super) const RETRY_FORGOTTEN: Duration = Duration::from_secs(60);
/// Wait before an unresolved order is looked for again.
pub(super) const UNRESOLVED_LOOK: Duration = Duration::from_secs(1);
/// So long a late open waits for a price before it is skipped for want of one (chosen: a symbol that
/// is traded has a tick in that time).
pub(super) const QUOTE_WAIT: Duration = Duration::from_secs(10);
/// Wait before a failed read is repeated.
pub(super) const READ_RETRY: Duration = Duration::from_secs(1);

/// One link as its follower sees it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) rules: LinkRules,
    pub(super) pairs: Pairs,
    /// Opens are allowed: a plan was made from complete reads in this tenure.
    pub(super) reconciled: bool,
    /// The earliest reason for a reconcile that cannot wait, and from when on it may run.
    pub(super) due: Option<(NodeTime, Reason)>,
    /// The same of the reasons that can wait.
    pub(super) due_later: Option<(NodeTime, Reason)>,
    pub(super) held: Option<HeldPlan>,
    /// The second look that a held plan waits for; until then nothing else is planned.
    pub(super) second_look: Option<SecondLook>,
    /// Tickets that the master opened before our eyes in this tenure, after a complete read:
    /// nobody else can have copied them.
    pub(super) fresh: BTreeSet<MasterTicket>,
    /// Complete reads were made in this tenure, whether or not their plan was held.
    pub(super) read_once: bool,
    /// Orders that came to nothing and whose tickets are as if never tried.
    pub(super) taken_back: BTreeMap<MasterTicket, TakenBack>,
    /// Opens that the broker took only without their stops, if at all; as long as the master has
    /// the trade.
    pub(super) without_stops: BTreeSet<MasterTicket>,
    /// Trades and orders of the master that an unexplained trade with our magic may be the copy of,
    /// by the last plan: nothing is opened for them, not even when the order fills.
    pub(super) maybe_copied: BTreeSet<MasterTicket>,
    /// Copied trades that a snapshot is without and no event told the end of: only a plan, which
    /// can be held for a second look, may close their copies (H41).
    pub(super) unproven: BTreeSet<MasterTicket>,
    /// Since when a late open lacks a fresh quote.
    pub(super) unpriced: BTreeMap<MasterTicket, NodeTime>,
    /// A copy came back without its tag in this tenure; the rules say so from then on (H53).
    pub(super) found_untaggable: bool,
    pub(super) rounds: u32,
    /// When the last reconciles ran; at most [`RECONCILES_PER_WINDOW`].
    pub(super) recent: VecDeque<NodeTime>,
}

/// An order that the broker refused. Its row says that it was not sent, so that a later owner
/// does not wait for it.
#[derive(Debug)]
pub(super) struct TakenBack {
    /// The row that ends it, should the master's trade end before it is tried again.
    pub(super) failed: Pair,
    /// The pending order that the broker does not take: tried again when it changes; its fill is
    /// copied.
    pub(super) refused: Option<MasterPending>,
}

/// The row of an order that the broker refused for now, or that did not leave: nothing is there to wait
/// for.
fn is_unsent(pair: &Pair) -> bool {
    pair.state == PairState::Sending && pair.sent_at.is_none()
}

/// What an earlier owner took back and did not try again: its row ends with the master's trade.
fn taken_back(unsent: Pair) -> TakenBack {
    let failed = Pair {
        state: PairState::Failed,
        reason: Some(EndReason::Failed(FailReason::RejectedLater)),
        version: unsent.version + 1,
        ..unsent
    };
    TakenBack { failed, refused: None }
}

/// Where the second look at a held plan stands: both sides must be read after the wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct SecondLook {
    /// When the publisher is asked (again) for its state.
    pub(super) ask_at: NodeTime,
    /// It was asked after the wait.
    pub(super) asked: bool,
    /// Its answer is there.
    pub(super) answered: bool,
}

/// A master as this follower has applied it.
#[derive(Debug)]
pub(super) struct Master {
    pub(super) snapshot: MasterSnapshot,
    pub(super) doubtful: bool,
}

/// An order that has left, or is about to.
#[derive(Debug)]
pub(super) struct OnItsWay {
    pub(super) attempt: Attempt,
    pub(super) step: CopyStep,
    /// What is left of its action, and the action's other words.
    pub(super) rest: CopyAction,
    /// The plan that wanted it.
    pub(super) plan: Option<u64>,
    pub(super) cause: Option<Cause>,
    /// The pair before and after sending.
    pub(super) before: Option<Pair>,
    pub(super) after: Option<Pair>,
    pub(super) submitted: Option<Now>,
    /// The master changed since it was decided: what is left of the action is decided anew.
    pub(super) overtaken: bool,
    pub(super) own_time: Option<Duration>,
}

/// What an order was decided from, for whoever checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grounds {
    /// What it is for.
    pub step: &'static str,
    /// Why, where there is more than one reason for such a step.
    pub reason: Option<&'static str>,
    /// The plan that wanted it: the number of its read. Nothing if an event was followed at once.
    pub plan: Option<u64>,
    /// Place in the master's feed.
    pub position: (Epoch, Seq),
    /// The feed is in doubt.
    pub doubtful: bool,
}

/// A read of the account that runs.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) id: u64,
    pub(super) begun: Now,
    pub(super) links: BTreeMap<LinkId, Reason>,
    /// What was touched since the read began: the plan leaves it alone.
    pub(super) touched: BTreeSet<TicketKey>,
}

/// An action that a plan decided and that has not started yet.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) action: CopyAction,
    /// The plan: the number of its read.
    pub(super) plan: Option<u64>,
    /// When it was decided: its prices are of that time.
    pub(super) at: NodeTime,
}

/// When a refused order may be asked for again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retry {
    /// What was refused; anything else need not wait.
    pub(super) step: &'static str,
    pub(super) at: NodeTime,
    pub(super) tries: u32,
    /// Its time came, and it was looked at.
    pub(super) asked: bool,
}

/// The state machine of one follower.
#[derive(Debug)]
pub struct Follower {
    pub(super) settings: FollowerSettings,
    pub(super) links: BTreeMap<LinkId, Link>,
    pub(super) masters: BTreeMap<AccountId, Master>,
    pub(super) view: Option<AccountView>,
    pub(super) quotes: BTreeMap<Symbol, Quote>,
    pub(super) slots: Slots,
    pub(super) on_their_way: BTreeMap<TicketKey, OnItsWay>,
    /// Orders of unknown outcome; their slots are taken.
    pub(super) unresolved: BTreeMap<TicketKey, OnItsWay>,
    /// When an order of unknown outcome is old enough to be given up.
    pub(super) last_looks: BTreeSet<(NodeTime, LinkId)>,
    pub(super) planned: BTreeMap<TicketKey, Planned>,
    pub(super) causes: BTreeMap<TicketKey, Cause>,
    pub(super) retries: BTreeMap<TicketKey, Retry>,
    /// Copies that a person wants closed, and who waits for the answer.
    pub(super) wishes: BTreeMap<TicketKey, Vec<Asker>>,
    pub(super) by_ticket: BTreeMap<FollowerTicket, TicketKey>,
    /// The broker renumbers the rest of a partial close.
    pub(super) renumbers: bool,
    /// Copies at such a broker that no stored row names yet, and the first tick that saw them so.
    pub(super) unstored: BTreeMap<TicketKey, Option<NodeTime>>,
    pub(super) reading: Option<Reading>,
    pub(super) reads: u64,
    /// When this tenure began here.
    pub(super) begun: NodeTime,
    pub(super) settle_until: Option<NodeTime>,
    pub(super) audits: VecDeque<NodeTime>,
    pub(super) draining: bool,
}

impl Follower {
    /// A follower at the begin of a tenure.
    ///
    /// Shape: its links with every pair row of each; `settle_until` after an unclean takeover.
    /// Source: `copy_links` and `pairs`, read completely under the lease.
    pub fn new(
        settings: FollowerSettings,
        links: Vec<(LinkRules, Pairs)>,
        settle_until: Option<NodeTime>,
        now: Now,
    ) -> Self {
        let audits = match settle_until {
            Some(_) => settings.audits.iter().map(|wait| now.node.plus(*wait)).collect(),
            None => VecDeque::new(),
        };
        let slots = Slots::new(settings.parallel_orders);
        let mut follower = Follower {
            settings,
            links: BTreeMap::new(),
            masters: BTreeMap::new(),
            view: None,
            quotes: BTreeMap::new(),
            slots,
            on_their_way: BTreeMap::new(),
            unresolved: BTreeMap::new(),
            last_looks: BTreeSet::new(),
            planned: BTreeMap::new(),
            causes: BTreeMap::new(),
            retries: BTreeMap::new(),
            wishes: BTreeMap::new(),
            by_ticket: BTreeMap::new(),
            renumbers: false,
            unstored: BTreeMap::new(),
            reading: None,
            reads: 0,
            begun: now.node,
            settle_until,
            audits,
            draining: false,
        };
        let orders_are_old = follower.when_surely_old(now.node);
        for (rules, pairs) in links {
            if pairs.rows().any(|pair| pair.state == PairState::Sending && !is_unsent(pair)) {
                follower.last_looks.insert((orders_are_old, rules.link));
            }
            follower.add_link(rules, pairs);
        }
        follower
    }

    fn add_link(&mut self, rules: LinkRules, pairs: Pairs) {
        let link = rules.link;
        let (unsent, sent): (Vec<Pair>, Vec<Pair>) = pairs.rows().cloned().partition(is_unsent);
        let pairs = Pairs::new(sent);
        let taken_back = unsent.into_iter().map(|pair| (pair.master_ticket, taken_back(pair)));
        for pair in pairs.rows().filter(|pair| pair.state.is_live()) {
            if let Some(ticket) = pair.follower_ticket {
                self.by_ticket.insert(ticket, TicketKey { link, ticket: pair.master_ticket });
            }
        }
        let state = Link {
            rules,
            pairs,
            reconciled: false,
            due: None,
            due_later: None,
            held: None,
            second_look: None,
            fresh: BTreeSet::new(),
            read_once: false,
            taken_back: taken_back.collect(),
            without_stops: BTreeSet::new(),
            maybe_copied: BTreeSet::new(),
            unproven: BTreeSet::new(),
            unpriced: BTreeMap::new(),
            found_untaggable: false,
            rounds: 0,
            recent: VecDeque::new(),
        };
        self.links.insert(link, state);
    }

    /// Where it stands in a master's feed.
    pub fn position(&self, master: AccountId) -> Option<(Epoch, Seq)> {
        self.masters.get(&master).map(|master| (master.snapshot.epoch, master.snapshot.seq))
    }

    /// What an order on its way was decided from.
    pub fn grounds(&self, key: TicketKey) -> Option<Grounds> {
        let order = self.on_their_way.get(&key)?;
        let master = self.masters.get(&self.links.get(&key.link)?.rules.master)?;
        Some(Grounds {
            step: order.step.as_str(),
            reason: order.step.reason(),
            plan: order.plan,
            position: (master.snapshot.epoch, master.snapshot.seq),
            doubtful: master.doubtful,
        })
    }

    /// The masters whose feeds this follower needs.
    pub fn masters(&self) -> BTreeSet<AccountId> {
        self.links.values().map(|link| link.rules.master).collect()
    }

    /// The session's view of the account, while it is open.
    pub fn view(&self) -> Option<&AccountView> {
        self.view.as_ref()
    }

    /// Every link has made a plan from complete reads, and nothing is doubtful.
    pub fn is_copying(&self) -> bool {
        self.view.is_some()
            && self.links.values().all(|link| {
                link.reconciled
                    && self.masters.get(&link.rules.master).is_some_and(|master| !master.doubtful)
            })
    }

    /// Whether no [`Input::Tick`] is needed before `until`: it copies, no order is out, nothing is
    /// planned or tried again, and no reconcile or audit is due.
    pub fn rests_until(&self, until: NodeTime) -> bool {
        let is_later = |at: Option<NodeTime>| at.is_none_or(|at| at > until);
        let is_at_rest = |link: &Link| {
            link.second_look.is_none()
                && is_later(link.due.map(|(at, _)| at))
                && is_later(link.due_later.map(|(at, _)| at))
        };
        self.is_copying()
            && self.unanswered() == 0
            && self.settle_until.is_none()
            && self.reading.is_none()
            && self.planned.is_empty()
            && self.retries.is_empty()
            && self.unstored.is_empty()
            && self.wishes.is_empty()
            && is_later(self.audits.front().copied())
            && is_later(self.last_looks.first().map(|(at, _)| *at))
            && self.links.values().all(is_at_rest)
    }

    /// Nothing leaves for any of its links.
    pub fn is_paused(&self) -> bool {
        !self.links.is_empty() && self.links.values().all(|link| link.rules.paused)
    }

    /// Masters whose state is in doubt.
    pub fn doubtful_masters(&self) -> Vec<AccountId> {
        let doubtful = self.masters.iter().filter(|(_, master)| master.doubtful);
        doubtful.map(|(master, _)| *master).collect()
    }

    /// Masters whose state is in doubt, or was never told: no link of theirs copies.
    pub fn silent_masters(&self) -> Vec<AccountId> {
        let is_heard = |id: &AccountId| self.masters.get(id).is_some_and(|master| !master.doubtful);
        self.masters().into_iter().filter(|id| !is_heard(id)).collect()
    }

    /// Orders on their way, those of unknown outcome included.
    pub fn unanswered(&self) -> usize {
        self.slots.on_their_way() + self.slots.unknowns().count()
    }

    /// Copies whose rows a partial close has to wait for; told with [`Input::Stored`].
    pub fn unstored(&self) -> impl Iterator<Item = (TicketKey, PairId)> {
        self.unstored.keys().filter_map(|key| {
            let pair = self.links.get(&key.link)?.pairs.main(key.ticket)?;
            Some((*key, pair.id))
        })
    }

    /// Orders whose answer may still come. One of unknown outcome is not among them: nothing but a
    /// later look settles it.
    pub fn awaited(&self) -> usize {
        self.slots.on_their_way()
    }

    /// Whether an order for a master ticket is on its way.
    pub fn is_on_its_way(&self, ticket: MasterTicket) -> bool {
        self.on_their_way.keys().any(|key| key.ticket == ticket)
    }

    /// The last price of a symbol, as the session has it; set before a feed event is given in.
    pub fn set_quote(&mut self, quote: Quote) {
        self.quotes.insert(quote.symbol.clone(), quote);
    }

    /// It copies on this link.
    pub fn has_link(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }

    /// Links whose broker does not keep our tags (H53).
    pub fn links_untaggable(&self) -> usize {
        let links = self.links.values();
        links.filter(|link| link.rules.mode == LinkMode::CopyUntagged).count()
    }

    /// The symbols at this broker that a master's symbol is copied to.
    pub fn copied_symbols(&self, master: AccountId, symbol: &Symbol) -> BTreeSet<Symbol> {
        let Some(view) = &self.view else { return BTreeSet::new() };
        self.links
            .values()
            .filter(|link| link.rules.master == master)
            .filter_map(|link| link.rules.follower_symbol(symbol, &view.symbols).ok())
            .collect()
    }

    pub(super) fn other_magics(&self, link: LinkId) -> BTreeSet<Magic> {
        self.links.iter().filter(|(id, _)| **id != link).map(|(_, l)| l.rules.magic).collect()
    }

    /// Takes in one thing that happened.
    pub fn step(&mut self, now: Now, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Feed { master, message } => self.on_feed(now, master, message, &mut effects),
            Input::SessionOpened { snapshot, symbols, renumbers } => {
                self.renumbers = renumbers;
                self.on_session_opened(now, &snapshot, symbols);
            }
            Input::Session(SessionEvent::Lost(_)) => self.on_session_lost(now, &mut effects),
            Input::Session(event) => self.on_session(now, &event, &mut effects),
            Input::Answer { key, attempt, outcome } => {
                self.on_answer(now, key, attempt, outcome, &mut effects);
            }
            Input::Read { id, read } => self.on_read(now, id, read, &mut effects),
            Input::Links(links) => self.on_links(now, links),
            Input::Close { key, asker } => self.on_close(now, key, asker, &mut effects),
            // Planted: the reconcile of the claim is the only one.
            Input::LeaseRestored if planted::is(Bug::P16) => {}
            Input::LeaseRestored => self.all_due(now.node, Reason::LeaseRestored),
            Input::Stored(key) => self.on_stored(now, key, &mut effects),
            Input::Tick => self.on_tick(now, &mut effects),
            Input::Drain => {
                self.draining = true;
                self.forget_waiting_wishes(NotNow::Draining, &mut effects);
            }
        }
        self.use_room(now, &mut effects);
        self.begin_read(now, &mut effects);
        effects
    }

    fn on_session_opened(
        &mut self,
        now: Now,
        snapshot: &AccountSnapshot,
        symbols: Vec<SymbolSpec>,
    ) {
        self.view = Some(AccountView::new(snapshot, symbols));
        self.reading = None;
        // Before anything live, everything is reconciled once more (H4).
        self.planned.clear();
        self.slots.drop_waiting();
        if planted::is(Bug::P16) && self.reads > 0 {
            return; // the claim's was made
        }
        for link in self.links.values_mut() {
            link.reconciled = false;
            link.read_once = false;
            link.fresh.clear();
        }
        self.all_due(now.node, Reason::Session);
    }

    /// Answers of a lost session will not come any more: what is on its way is unknown.
    fn on_session_lost(&mut self, now: Now, effects: &mut Vec<Effect>) {
        self.view = None;
        self.reading = None;
        let open: Vec<(TicketKey, Attempt)> =
            self.on_their_way.iter().map(|(key, order)| (*key, order.attempt)).collect();
        for (key, attempt) in open {
            let outcome = Outcome::Unknown("connection lost".into());
            self.on_answer(now, key, attempt, outcome, effects);
        }
        self.forget_waiting_wishes(NotNow::NoSession, effects);
    }

    fn on_links(&mut self, now: Now, links: Vec<(LinkRules, Pairs)>) {
        let mut changed = BTreeSet::new();
        self.forget_all_but(&links.iter().map(|(rule, _)| rule.link).collect());
        for (mut rule, pairs) in links {
            if let Some(link) = self.links.get_mut(&rule.link) {
                link.keep_untagged(&mut rule);
            }
            match self.links.get_mut(&rule.link) {
                Some(link) if link.rules == rule => {}
                Some(link) => {
                    changed.insert(rule.link);
                    link.rules = rule;
                    link.set_due(now.node, Reason::Rules);
                }
                None => {
                    let id = rule.link;
                    self.add_link(rule, pairs);
                    if let Some(link) = self.links.get_mut(&id) {
                        link.set_due(now.node, Reason::Rules);
                    }
                }
            }
        }
        // What was decided by other rules is decided anew, and does not leave a paused link.
        self.planned.retain(|key, _| !changed.contains(&key.link));
        for (_, order) in self.on_their_way.iter_mut().filter(|(k, _)| changed.contains(&k.link)) {
            order.overtaken = true;
        }
    }

    /// Forgets links that were removed and have nothing open, and masters that no link is left of.
    fn forget_all_but(&mut self, known: &BTreeSet<LinkId>) {
        let at_work = self.on_their_way.keys().chain(self.unresolved.keys());
        let at_work = at_work.chain(self.planned.keys()).chain(self.retries.keys());
        let at_work = at_work.chain(self.wishes.keys()).chain(self.unstored.keys());
        let at_work: BTreeSet<LinkId> = at_work.map(|key| key.link).collect();
        self.links.retain(|id, link| {
            let has_live = link.pairs.rows().any(|pair| pair.state.is_live());
            known.contains(id) || at_work.contains(id) || has_live
        });
        let links = &self.links;
        self.by_ticket.retain(|_, key| links.contains_key(&key.link));
        self.causes.retain(|key, _| links.contains_key(&key.link));
        self.last_looks.retain(|(_, link)| links.contains_key(link));
        let masters = self.masters();
        self.masters.retain(|master, _| masters.contains(master));
    }

    pub(super) fn all_due(&mut self, at: NodeTime, reason: Reason) {
        self.links.values_mut().for_each(|link| link.set_due(at, reason));
    }

    fn on_tick(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if self.settle_until.is_some_and(|until| now.node.is_surely_at(until)) {
            self.settle_until = None;
            self.all_due(now.node, Reason::Settled);
        }
        while self.audits.front().is_some_and(|at| now.node.is_surely_at(*at)) {
            self.audits.pop_front();
            self.all_due(now.node, Reason::Audit);
        }
        while self.last_looks.first().is_some_and(|(at, _)| now.node.is_surely_at(*at)) {
            let (_, link) = self.last_looks.pop_first().expect("it was just looked at");
            if let Some(link) = self.links.get_mut(&link) {
                link.set_due(now.node, Reason::Unresolved);
            }
        }
        self.try_again(now, effects);
        self.give_rows_up(now, effects);
        self.end_what_was_taken_back(effects);
        let unknown: BTreeSet<LinkId> = self.slots.unknowns().map(|(key, _)| key.link).collect();
        for link in unknown {
            if let Some(link) = self.links.get_mut(&link) {
                link.set_due(now.node.plus(UNRESOLVED_LOOK), Reason::Waiting);
            }
        }
        self.ask_for_second_looks(now, effects);
    }

    fn try_again(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let mut ripe = Vec::new();
        self.retries.retain(|key, retry| {
            if now.node >= retry.at && !retry.asked {
                retry.asked = true;
                ripe.push(*key);
            }
            now.node.since(retry.at) <= RETRY_FORGOTTEN
        });
        for key in ripe {
            self.wake(now, key, None, effects);
        }
    }

    /// Rows that partial closes have waited for long enough.
    fn give_rows_up(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let max = self.settings.row_wait_max;
        let mut over = Vec::new();
        for (key, since) in &mut self.unstored {
            if now.node.surely_since(*since.get_or_insert(now.node)) >= max {
                over.push(*key);
            }
        }
        for key in over {
            self.on_stored(now, key, effects);
        }
    }

    fn on_stored(&mut self, now: Now, key: TicketKey, effects: &mut Vec<Effect>) {
        if self.unstored.remove(&key).is_some() {
            self.wake(now, key, None, effects);
        }
    }

    /// Rows that say that an order is out, of trades that ended before it was tried again.
    fn end_what_was_taken_back(&mut self, effects: &mut Vec<Effect>) {
        let mut ended = Vec::new();
        for link in self.links.values_mut() {
            let Some(master) = self.masters.get(&link.rules.master) else { continue };
            let book = &master.snapshot.book;
            let is_there =
                |t: &MasterTicket| book.positions.contains_key(t) || book.pendings.contains_key(t);
            let gone: Vec<MasterTicket> =
                link.taken_back.keys().filter(|ticket| !is_there(ticket)).copied().collect();
            ended.extend(gone.iter().filter_map(|ticket| link.taken_back.remove(ticket)));
        }
        for TakenBack { failed, .. } in ended {
            let key = TicketKey { link: failed.link, ticket: failed.master_ticket };
            self.retries.remove(&key);
            self.keep(failed, effects);
        }
    }

    fn ask_for_second_looks(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let wait = self.settings.limits.second_look_after;
        for link in self.links.values_mut() {
            let Some(look) = &mut link.second_look else { continue };
            if now.node >= look.ask_at && !look.answered {
                // Asked again as long as no answer makes the second look possible.
                look.ask_at = now.node.plus(wait);
                look.asked = true;
                let master = link.rules.master;
                effects.push(Effect::AskMaster { master, reason: RequestReason::HeldPlan });
            }
        }
    }

    /// Something about this ticket changed: what was decided for it before no longer counts.
    pub(super) fn touch(&mut self, key: TicketKey) {
        if planted::is(Bug::P14) {
            return; // plans, and the read that runs, stay as they are
        }
        self.planned.remove(&key);
        if let Some(reading) = &mut self.reading {
            reading.touched.insert(key);
        }
    }

    /// Takes a pair over as the newest version, and keeps the index of tickets right.
    pub(super) fn put_pair(&mut self, pair: Pair) {
        let key = TicketKey { link: pair.link, ticket: pair.master_ticket };
        let Some(link) = self.links.get_mut(&pair.link) else { return };
        if let Some(old) = link.pairs.main(pair.master_ticket).and_then(|p| p.follower_ticket) {
            self.by_ticket.remove(&old);
        }
        if let Some(ticket) = pair.follower_ticket
            && pair.state.is_live()
        {
            self.by_ticket.insert(ticket, key);
        }
        link.pairs.put(pair);
    }
}

impl Link {
    /// Makes a reconcile due; of each kind an earlier instant wins, and so does its reason.
    pub(super) fn set_due(&mut self, at: NodeTime, reason: Reason) {
        let due = if reason.can_wait() { &mut self.due_later } else { &mut self.due };
        match due {
            Some((due, _)) if *due <= at => {}
            _ => *due = Some((at, reason)),
        }
    }

    /// Why a reconcile may run now, if it may: its time has come, and it makes no storm.
    pub(super) fn ripe(&self, now: NodeTime) -> Option<Reason> {
        let in_window = |at: &&NodeTime| now.since(**at) < RECONCILE_WINDOW;
        let room = RECONCILES_PER_WINDOW - self.recent.iter().filter(in_window).count();
        let due = self.due.filter(|_| room > 0);
        let later = self.due_later.filter(|_| room > RECONCILES_KEPT);
        due.into_iter().chain(later).find(|(at, _)| now >= *at).map(|(_, reason)| reason)
    }

    pub(super) fn note_reconcile(&mut self, now: NodeTime) {
        self.recent.push_back(now);
        while self.recent.len() > RECONCILES_PER_WINDOW {
            self.recent.pop_front();
        }
    }
}
