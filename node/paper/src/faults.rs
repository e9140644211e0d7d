//! How the broker misbehaves: what holds for every order, and the faults that hit some.
//!
//! Decides for one order, and for one login, what is done to it. Inputs: the plan, `now`, the
//! request, and a draw (numbers below n) that the caller owns. Outputs: a `Treatment`, or a
//! `LoginTreatment`; what they do is carried out by `broker::Broker`.
//!
//! Invariants:
//! 1. The same plan, times, requests and draws give the same treatments. Nothing here is random:
//!    the draw is asked only for a share below 1000 and for a span with two ends.
//! 2. Faults are looked at in the order in which they were set. A refusal or a partial fill comes
//!    from the first one that hits; of two delays of one kind the longer holds.
//! 3. A fault counts as used only when it changed the treatment.
//!
//! Not covered: what belongs to an account for good (comment limits, stop-out level), which
//! stands in its declaration (`AccountDecl`).

use crate::protocol::{FieldError, Instruction, OpenComment};
use crate::settings::check_ms;
pub use crate::settings::{ANSWER_DELAY_DEFAULT, ANSWER_DELAY_MAX, Settings, SettingsChange};
use schemas::{AccountId, RejectClass, Rejection};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most faults that are set at a time.
pub const FAULTS_MAX: usize = 1_000;
/// A share of 1, in thousandths.
pub const SHARE_WHOLE: u32 = 1_000;
/// Longest text that is put in front of a comment.
pub const PREFIX_CHARS_MAX: usize = 31;
/// Longest time that a fault can be set for: a day.
const FOR_MS_MAX: u64 = 86_400_000;

/// A time between two ends, drawn evenly for each use; in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Shortest.
    pub min_ms: u64,
    /// Longest.
    pub max_ms: u64,
}

impl Span {
    /// Always the same time.
    pub fn of(time: Duration) -> Self {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self { min_ms: ms, max_ms: ms }
    }

    fn drawn(self, draw: &mut Draw<'_>) -> Duration {
        let more = self.max_ms.saturating_sub(self.min_ms);
        let more = if more == 0 { 0 } else { draw(more.saturating_add(1)) };
        Duration::from_millis(self.min_ms.saturating_add(more))
    }
}

/// Gives an even number below the one it is asked with. Owned and seeded by the caller.
pub type Draw<'a> = dyn FnMut(u64) -> u64 + 'a;

/// What an account's lists look like before they are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Withheld {
    /// Nothing is listed.
    All,
    /// Every second trade and order is missing.
    Half,
}

/// One way to misbehave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultKind {
    /// Refused with another price: class `requote`.
    Requote {},
    /// Refused with this class.
    Reject {
        /// Which.
        class: RejectClass,
    },
    /// Refused because the market is closed: class `later`.
    MarketClosed {},
    /// Opening and closing orders are carried out in part; the rest of the order is dropped.
    PartialFill {
        /// Of the volume asked for, 1 to 99; rounded down to the step, at least the smallest.
        percent: u32,
    },
    /// Carried out, and never answered.
    LostAnswer {},
    /// Lost on its way to the broker: not carried out, and never answered.
    LostRequest {},
    /// Held up on its way to the broker, and with it every later order of the same session.
    DeliveryDelay {
        /// How long.
        span: Span,
        /// Whether it is lost when its connection ends first; else it still arrives.
        #[serde(default)]
        dies_with_connection: bool,
    },
    /// Arrived, but carried out later; other orders may overtake it.
    AcceptanceDelay {
        /// How long.
        span: Span,
    },
    /// Answered later than the settings say: this long instead.
    AnswerDelay {
        /// How long.
        span: Span,
    },
    /// The comment of a new order is cut to this length.
    CommentCut {
        /// Characters that stay.
        chars: u32,
    },
    /// The comment of a new order is emptied.
    CommentBlank {},
    /// The comment of a new order gets a text in front.
    CommentPrefix {
        /// The text.
        text: String,
    },
    /// After a login the lists are not complete for a while.
    Unsynced {
        /// What is missing.
        lists: Withheld,
        /// How long.
        span: Span,
        /// The broker says at once that its lists are complete, and they are not. Only with
        /// `lists` = `all`: the margin in use then shows that it is not true.
        #[serde(default)]
        claims_complete: bool,
    },
    /// A login ends every earlier session of the account.
    SecondSessionKicks {},
}

impl FaultKind {
    /// The word used on the wire, in the ledger and in tables.
    pub fn as_str(&self) -> &'static str {
        match self {
            FaultKind::Requote {} => "requote",
            FaultKind::Reject { .. } => "reject",
            FaultKind::MarketClosed {} => "market_closed",
            FaultKind::PartialFill { .. } => "partial_fill",
            FaultKind::LostAnswer {} => "lost_answer",
            FaultKind::LostRequest {} => "lost_request",
            FaultKind::DeliveryDelay { .. } => "delivery_delay",
            FaultKind::AcceptanceDelay { .. } => "acceptance_delay",
            FaultKind::AnswerDelay { .. } => "answer_delay",
            FaultKind::CommentCut { .. } => "comment_cut",
            FaultKind::CommentBlank {} => "comment_blank",
            FaultKind::CommentPrefix { .. } => "comment_prefix",
            FaultKind::Unsynced { .. } => "unsynced",
            FaultKind::SecondSessionKicks {} => "second_session_kicks",
        }
    }

    fn is_about_logins(&self) -> bool {
        matches!(self, FaultKind::Unsynced { .. } | FaultKind::SecondSessionKicks {})
    }

    /// Whether it makes a difference to this kind of order.
    fn fits(&self, instruction: &Instruction) -> bool {
        let makes = matches!(instruction, Instruction::Open { .. } | Instruction::Place { .. });
        match self {
            FaultKind::PartialFill { .. } => {
                matches!(instruction, Instruction::Open { .. } | Instruction::Close { .. })
            }
            FaultKind::CommentCut { .. }
            | FaultKind::CommentBlank {}
            | FaultKind::CommentPrefix { .. } => makes,
            FaultKind::Unsynced { .. } | FaultKind::SecondSessionKicks {} => false,
            FaultKind::Requote {}
            | FaultKind::Reject { .. }
            | FaultKind::MarketClosed {}
            | FaultKind::LostAnswer {}
            | FaultKind::LostRequest {}
            | FaultKind::DeliveryDelay { .. }
            | FaultKind::AcceptanceDelay { .. }
            | FaultKind::AnswerDelay { .. } => true,
        }
    }
}

/// The words that name kinds of orders in a fault.
pub const ORDER_WORDS: [&str; 6] = ["open", "close", "modify", "place", "modify_pending", "cancel"];

/// A fault as it is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// Whose orders or logins; absent means everybody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<AccountId>,
    /// Which orders, of [`ORDER_WORDS`]; empty means all.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub orders: BTreeSet<String>,
    /// What happens.
    pub kind: FaultKind,
    /// To how many of them, in thousandths.
    #[serde(default = "whole")]
    pub share_permille: u32,
    /// After so many hits it is gone; absent means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// After so long it is gone; absent means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

fn whole() -> u32 {
    SHARE_WHOLE
}

impl FaultSpec {
    /// A fault that hits every order of everybody, for ever.
    pub fn new(kind: FaultKind) -> Self {
        let (account, count, for_ms) = (None, None, None);
        let share_permille = SHARE_WHOLE;
        Self { account, orders: BTreeSet::new(), kind, share_permille, count, for_ms }
    }

    /// Only this account.
    #[must_use]
    pub fn account(self, account: AccountId) -> Self {
        Self { account: Some(account), ..self }
    }

    /// Only orders of these kinds.
    #[must_use]
    pub fn orders(self, words: &[&str]) -> Self {
        Self { orders: words.iter().map(|word| (*word).to_owned()).collect(), ..self }
    }

    /// Only so many.
    #[must_use]
    pub fn count(self, count: u32) -> Self {
        Self { count: Some(count), ..self }
    }

    /// Only a share, in thousandths.
    #[must_use]
    pub fn share_permille(self, share_permille: u32) -> Self {
        Self { share_permille, ..self }
    }

    fn check(&self) -> Result<(), FieldError> {
        if self.share_permille == 0 || self.share_permille > SHARE_WHOLE {
            let text = format!("must be 1 to {SHARE_WHOLE}");
            return Err(FieldError::new("fault.share_permille", self.share_permille, text));
        }
        if self.count == Some(0) {
            return Err(FieldError::new("fault.count", 0, "must be at least 1"));
        }
        if let Some(ms) = self.for_ms.filter(|ms| *ms == 0 || *ms > FOR_MS_MAX) {
            let text = format!("must be 1 to {FOR_MS_MAX} ms");
            return Err(FieldError::new("fault.for_ms", ms, text));
        }
        if let Some(word) = self.orders.iter().find(|w| !ORDER_WORDS.contains(&w.as_str())) {
            let text = format!("must be one of {}", ORDER_WORDS.join(", "));
            return Err(FieldError::new("fault.orders", word, text));
        }
        if self.kind.is_about_logins() && !self.orders.is_empty() {
            let text = format!("must be empty, {} is about logins", self.kind.as_str());
            let words = self.orders.iter().cloned().collect::<Vec<_>>().join(" ");
            return Err(FieldError::new("fault.orders", words, text));
        }
        self.check_kind()
    }

    fn check_kind(&self) -> Result<(), FieldError> {
        match &self.kind {
            FaultKind::PartialFill { percent } if *percent == 0 || *percent > 99 => {
                Err(FieldError::new("fault.kind.percent", percent, "must be 1 to 99"))
            }
            FaultKind::CommentPrefix { text } if text.chars().count() > PREFIX_CHARS_MAX => {
                let rule = format!("must be at most {PREFIX_CHARS_MAX} characters");
                Err(FieldError::new("fault.kind.text", text, rule))
            }
            FaultKind::Unsynced { lists: Withheld::Half, claims_complete: true, .. } => {
                let text = "needs lists = all: nothing would show that half a list is not whole";
                Err(FieldError::new("fault.kind.claims_complete", true, text))
            }
            FaultKind::DeliveryDelay { span, .. }
            | FaultKind::AcceptanceDelay { span }
            | FaultKind::AnswerDelay { span }
            | FaultKind::Unsynced { span, .. } => {
                check_ms("fault.kind.span.max_ms", span.max_ms)?;
                if span.min_ms > span.max_ms {
                    let text = format!("must be at most max_ms, {}", span.max_ms);
                    return Err(FieldError::new("fault.kind.span.min_ms", span.min_ms, text));
                }
                Ok(())
            }
            FaultKind::Requote {}
            | FaultKind::Reject { .. }
            | FaultKind::MarketClosed {}
            | FaultKind::PartialFill { .. }
            | FaultKind::LostAnswer {}
            | FaultKind::LostRequest {}
            | FaultKind::CommentCut { .. }
            | FaultKind::CommentBlank {}
            | FaultKind::CommentPrefix { .. }
            | FaultKind::SecondSessionKicks {} => Ok(()),
        }
    }
}

/// A fault that is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its number, to take it away by.
    pub id: u64,
    /// What was asked for.
    pub spec: FaultSpec,
    /// When it ends, in microseconds since the broker started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_mono_us: Option<u64>,
    /// When it was listed: how long it still holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
    /// How often it hit.
    pub hits: u64,
}

impl Fault {
    fn is_over(&self, now_mono_us: u64) -> bool {
        let spent = self.spec.count.is_some_and(|count| self.hits >= u64::from(count));
        spent || self.until_mono_us.is_some_and(|until| now_mono_us >= until)
    }
}

/// What the broker does with an order instead of carrying it out in full.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Verdict {
    /// Carries it out as it is.
    #[default]
    CarryOut,
    /// Refuses it, whatever it is.
    Refuse(Rejection),
    /// Fills this share of the volume, in percent, and drops the rest.
    FillPart(u32),
}

/// What becomes of the comment of a new order, before the account's own rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommentFault {
    /// Cut to so many characters.
    Cut(u32),
    /// Blanked or prefixed instead of what the account declares.
    As(OpenComment),
}

/// What happens to one order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Treatment {
    /// From its sending to its arrival at the broker; absent: it never arrives.
    pub deliver_after: Option<Duration>,
    /// It is lost if its connection ends before it arrives.
    pub dies_with_connection: bool,
    /// From its arrival to the instant at which it is carried out or refused.
    pub accept_after: Duration,
    /// From there to its answer; absent: it is never answered.
    pub answer_after: Option<Duration>,
    /// How it is carried out.
    pub verdict: Verdict,
    /// What becomes of its comment.
    pub comment: Option<CommentFault>,
    /// The faults that made it so, for the ledger.
    pub faults: Vec<String>,
}

impl Treatment {
    /// An order that nothing happens to.
    pub fn plain(answer_after: Duration) -> Self {
        Self {
            deliver_after: Some(Duration::ZERO),
            dies_with_connection: false,
            accept_after: Duration::ZERO,
            answer_after: Some(answer_after),
            verdict: Verdict::CarryOut,
            comment: None,
            faults: Vec::new(),
        }
    }

    /// Returns whether it made a difference.
    fn add(&mut self, kind: &FaultKind, draw: &mut Draw<'_>, own_answer: &mut bool) -> bool {
        match kind {
            FaultKind::Requote {} => self.refuse(RejectClass::Requote, "requote"),
            FaultKind::Reject { class } => self.refuse(*class, "refused as a fault"),
            FaultKind::MarketClosed {} => self.refuse(RejectClass::Later, "market closed"),
            FaultKind::PartialFill { percent } => {
                let is_first = self.verdict == Verdict::CarryOut;
                if is_first {
                    self.verdict = Verdict::FillPart(*percent);
                }
                is_first
            }
            FaultKind::LostAnswer {} => self.answer_after.take().is_some(),
            FaultKind::LostRequest {} => {
                self.answer_after = None;
                self.deliver_after.take().is_some()
            }
            FaultKind::DeliveryDelay { span, dies_with_connection } => {
                let delay = span.drawn(draw);
                let longer = self.deliver_after.is_some_and(|old| delay > old);
                if longer {
                    self.deliver_after = Some(delay);
                    self.dies_with_connection = *dies_with_connection;
                }
                longer
            }
            FaultKind::AcceptanceDelay { span } => {
                let delay = span.drawn(draw);
                let longer = delay > self.accept_after;
                self.accept_after = self.accept_after.max(delay);
                longer
            }
            FaultKind::AnswerDelay { span } => {
                let delay = span.drawn(draw);
                let replaces = !*own_answer || self.answer_after.is_some_and(|old| delay > old);
                if replaces && self.answer_after.is_some() {
                    (self.answer_after, *own_answer) = (Some(delay), true);
                }
                replaces
            }
            FaultKind::CommentCut { chars } => self.mangle(CommentFault::Cut(*chars)),
            FaultKind::CommentBlank {} => self.mangle(CommentFault::As(OpenComment::Blank)),
            FaultKind::CommentPrefix { text } => {
                self.mangle(CommentFault::As(OpenComment::Prefix(text.clone())))
            }
            FaultKind::Unsynced { .. } | FaultKind::SecondSessionKicks {} => false,
        }
    }

    fn refuse(&mut self, class: RejectClass, text: &str) -> bool {
        let is_first = self.verdict == Verdict::CarryOut;
        if is_first {
            self.verdict = Verdict::Refuse(Rejection { class, text: text.to_owned() });
        }
        is_first
    }

    fn mangle(&mut self, comment: CommentFault) -> bool {
        let is_first = self.comment.is_none();
        self.comment.get_or_insert(comment);
        is_first
    }
}

/// What a login is shown instead of the whole account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsynced {
    /// What is missing.
    pub lists: Withheld,
    /// For how long.
    pub lasts: Duration,
    /// The sync mark comes at once, and is not true.
    pub claims_complete: bool,
}

/// What happens at one login.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoginTreatment {
    /// Earlier sessions of the account end.
    pub kicks_others: bool,
    /// The lists are not complete for a while.
    pub unsynced: Option<Unsynced>,
    /// The faults that made it so, for the ledger.
    pub faults: Vec<String>,
}

/// The faults that are set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    faults: BTreeMap<u64, Fault>,
    last_id: u64,
}

impl FaultPlan {
    /// Sets one more fault and gives it a number.
    ///
    /// Errors: a field outside its range, or `FAULTS_MAX` faults are set.
    pub fn set(&mut self, now_mono_us: u64, spec: FaultSpec) -> Result<Fault, FieldError> {
        spec.check()?;
        self.drop_over(now_mono_us);
        if self.faults.len() >= FAULTS_MAX {
            let text = format!("at most {FAULTS_MAX} faults can be set");
            return Err(FieldError::new("fault", self.faults.len(), text));
        }
        self.last_id += 1;
        let until_mono_us = spec.for_ms.map(|ms| now_mono_us.saturating_add(ms * 1_000));
        let left_ms = spec.for_ms;
        let fault = Fault { id: self.last_id, spec, until_mono_us, left_ms, hits: 0 };
        self.faults.insert(fault.id, fault.clone());
        Ok(fault)
    }

    /// The faults that are set now, in the order they were set.
    pub fn list(&mut self, now_mono_us: u64) -> Vec<Fault> {
        self.drop_over(now_mono_us);
        let left = |until: u64| until.saturating_sub(now_mono_us).div_ceil(1_000);
        let listed = |f: &Fault| Fault { left_ms: f.until_mono_us.map(left), ..f.clone() };
        self.faults.values().map(listed).collect()
    }

    /// Takes one fault away, or all of an account, or all; returns what was taken away.
    ///
    /// Errors: there is no fault of this number.
    pub fn clear(
        &mut self,
        id: Option<u64>,
        account: Option<AccountId>,
    ) -> Result<Vec<Fault>, FieldError> {
        if let Some(id) = id.filter(|id| !self.faults.contains_key(id)) {
            return Err(FieldError::new("fault", id, "is not set, or is over"));
        }
        let goes = |fault: &Fault| {
            id.is_none_or(|id| fault.id == id)
                && account.is_none_or(|account| fault.spec.account == Some(account))
        };
        let (gone, kept) = std::mem::take(&mut self.faults).into_iter().partition(|(_, f)| goes(f));
        self.faults = kept;
        let gone: BTreeMap<u64, Fault> = gone;
        Ok(gone.into_values().collect())
    }

    /// What happens to an order that is sent now.
    pub fn decide(
        &mut self,
        now_mono_us: u64,
        account: AccountId,
        instruction: &Instruction,
        answer_delay: Duration,
        draw: &mut Draw<'_>,
    ) -> Treatment {
        self.drop_over(now_mono_us);
        let mut treatment = Treatment::plain(answer_delay);
        let mut own_answer = false;
        for fault in self.faults.values_mut() {
            let spec = &fault.spec;
            let is_meant = spec.account.is_none_or(|meant| meant == account)
                && (spec.orders.is_empty() || spec.orders.contains(instruction.word()))
                && spec.kind.fits(instruction);
            if is_meant
                && is_drawn(spec.share_permille, draw)
                && treatment.add(&spec.kind, draw, &mut own_answer)
            {
                fault.hits += 1;
                treatment.faults.push(spec.kind.as_str().to_owned());
            }
        }
        treatment
    }

    /// What happens at a login that comes now.
    pub fn decide_login(
        &mut self,
        now_mono_us: u64,
        account: AccountId,
        draw: &mut Draw<'_>,
    ) -> LoginTreatment {
        self.drop_over(now_mono_us);
        let mut treatment = LoginTreatment::default();
        for fault in self.faults.values_mut() {
            let spec = &fault.spec;
            let is_meant = spec.account.is_none_or(|meant| meant == account)
                && spec.kind.is_about_logins()
                && is_drawn(spec.share_permille, draw);
            let hits = match &spec.kind {
                FaultKind::Unsynced { lists, span, claims_complete } if is_meant => {
                    let lasts = span.drawn(draw);
                    let (lists, claims_complete) = (*lists, *claims_complete);
                    let is_first = treatment.unsynced.is_none() && !lasts.is_zero();
                    if is_first {
                        treatment.unsynced = Some(Unsynced { lists, lasts, claims_complete });
                    }
                    is_first
                }
                FaultKind::SecondSessionKicks {} if is_meant => {
                    !std::mem::replace(&mut treatment.kicks_others, true)
                }
                _ => false,
            };
            if hits {
                fault.hits += 1;
                treatment.faults.push(spec.kind.as_str().to_owned());
            }
        }
        treatment
    }

    fn drop_over(&mut self, now_mono_us: u64) {
        self.faults.retain(|_, fault| !fault.is_over(now_mono_us));
    }
}

fn is_drawn(share_permille: u32, draw: &mut Draw<'_>) -> bool {
    share_permille >= SHARE_WHOLE || draw(u64::from(SHARE_WHOLE)) < u64::from(share_permille)
}
