//! The pure core of a feed: what was heard goes in, with `now`; what to do comes out.
//!
//! `now` is time on a monotonic clock since any fixed instant; it never goes back.

use super::{DoubtReason, FeedMessage, FeedSettings, Follower, QUICK_TRIES};
use crate::gap::{GapDetector, Verdict};
use crate::metrics::DropReason;
use schemas::planted::{self, Bug};
use schemas::{
    AccountId, Beacon, Book, Digest, Epoch, Funds, MasterSnapshot, Micros, Seq, TradeEvent,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// To whom a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipients {
    /// Every follower of the feed.
    All,
    /// One of them.
    One(AccountId),
}

/// What the shell does next, in this order.
#[derive(Debug, Clone)]
pub enum FeedOutput {
    /// Hand a message on.
    Send {
        /// To whom.
        to: Recipients,
        /// What.
        message: FeedMessage,
    },
    /// Ask the publisher for a snapshot of at least epoch `heard`; answer with `observe_reply`.
    RequestSnapshot {
        /// Highest epoch heard so far.
        heard: Option<Epoch>,
    },
    /// Count a loss, by how it showed.
    CountGap(DoubtReason),
    /// Count a message that was not used, by reason.
    CountDropped(DropReason),
    /// Count a round of quick tries that settled nothing: an alarm.
    CountTriesExhausted,
    /// A doubt ended; it lasted this long.
    DoubtEnded(Duration),
    /// Two publishers speak for the master, in turns: call a person. Followers obey `followed`.
    TwoPublishers {
        /// The highest epoch.
        followed: Epoch,
        /// The one that should have stopped.
        ignored: Epoch,
    },
}

/// Beacons of an old epoch, each after one of the highest, that are no leftovers of a handover
/// any more: a publisher that is outbid stops at once, and its last beacon is alone.
const TURNS_ALARM: u32 = 3;

/// A doubt that is not settled.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    reason: DoubtReason,
    since: Duration,
}

/// A snapshot request: wanted, or on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    Idle,
    Wanted { not_before: Duration },
    InFlight,
}

/// The state of one master as this node knows it, and what is known about that knowledge.
#[derive(Debug)]
pub struct FeedState {
    master: AccountId,
    settings: FeedSettings,
    random: fastrand::Rng,
    detector: GapDetector,
    book: Book,
    digest: Option<Digest>,
    funds: Option<Funds>,
    doubt: Option<Doubt>,
    /// Highest position any message of the highest epoch spoke of.
    heard: Option<(Epoch, Seq)>,
    /// Events since the request was sent, by position: what the reply may not contain yet.
    buffer: BTreeMap<(Epoch, Seq), Arc<TradeEvent>>,
    /// Something was lost while the request was on its way: its reply cannot be brought up to date.
    reply_void: bool,
    request: Request,
    last_request: Option<Duration>,
    tries: u32,
    requesters: BTreeSet<Follower>,
    last_beacon: Duration,
    beacon_heard: bool,
    /// Last sign that the publisher lives: its beacon or its reply.
    last_life: Duration,
    /// Highest place of an event that came without the bus.
    heard_here: Option<(Epoch, Seq)>,
    rival: Rival,
}

/// What was heard of a publisher whose epoch is not the highest.
#[derive(Debug, Clone, Copy, Default)]
struct Rival {
    /// Beacons of an old epoch that came after one of the highest epoch.
    turns: u32,
    /// The last of them.
    at: Duration,
    /// The highest epoch spoke since.
    answered: bool,
}

impl FeedState {
    /// A feed that was just opened: doubtful, and it wants a snapshot at once.
    ///
    /// `seed` drives the jitter; two feeds get different ones.
    pub fn new(master: AccountId, settings: FeedSettings, seed: u64, now: Duration) -> Self {
        FeedState {
            master,
            settings,
            random: fastrand::Rng::with_seed(seed),
            detector: GapDetector::new(),
            book: Book::default(),
            digest: None,
            funds: None,
            doubt: Some(Doubt { reason: DoubtReason::Joining, since: now }),
            heard: None,
            buffer: BTreeMap::new(),
            reply_void: false,
            request: Request::Wanted { not_before: now },
            last_request: None,
            tries: 0,
            requesters: BTreeSet::new(),
            last_beacon: now,
            beacon_heard: false,
            last_life: now,
            heard_here: None,
            rival: Rival::default(),
        }
    }

    /// The applied position.
    pub fn position(&self) -> Option<(Epoch, Seq)> {
        self.detector.position()
    }

    /// Why the feed is doubtful now.
    pub fn doubt(&self) -> Option<DoubtReason> {
        self.doubt.map(|d| d.reason)
    }

    /// Time of the last beacon, or of the opening, and whether one was heard.
    pub fn last_beacon(&self) -> (Duration, bool) {
        (self.last_beacon, self.beacon_heard)
    }

    /// The master's state at the applied position; empty before the first snapshot.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// When `tick` has something to do, at the latest.
    pub fn deadline(&self) -> Duration {
        let silent = self.last_life + self.settings.silent_after;
        match self.request {
            Request::Wanted { not_before } => not_before.min(silent),
            Request::Idle | Request::InFlight => silent,
        }
    }

    /// What a follower that just attached receives.
    pub fn welcome(&self, follower: Follower) -> FeedOutput {
        let message = match self.doubt {
            Some(doubt) => FeedMessage::Doubt(doubt.reason),
            None => FeedMessage::Snapshot(self.snapshot(), DoubtReason::Joining),
        };
        FeedOutput::Send { to: Recipients::One(follower), message }
    }

    /// What a follower whose queue reply_void receives once there is room again; nothing while
    /// the feed is doubtful, because the snapshot that ends the doubt goes to everybody.
    pub fn catch_up(&self, follower: Follower) -> Option<FeedOutput> {
        let message = FeedMessage::Snapshot(self.snapshot(), DoubtReason::SlowConsumer);
        self.doubt.is_none().then_some(FeedOutput::Send { to: Recipients::One(follower), message })
    }

    /// A follower wants a fresh snapshot from the publisher.
    pub fn observe_request(&mut self, follower: Follower, now: Duration) -> Vec<FeedOutput> {
        self.requesters.insert(follower);
        // An answer on its way is shared: it is brought up to date before it is handed on.
        if self.request == Request::Idle {
            self.want(now, Duration::ZERO);
        }
        self.tick(now)
    }

    /// Forgets a follower that left.
    pub fn forget(&mut self, follower: Follower) {
        self.requesters.remove(&follower);
    }

    /// The connection was made anew: messages may be lost that nothing will ever name.
    pub fn observe_reconnect(&mut self, now: Duration) -> Vec<FeedOutput> {
        let mut out = Vec::new();
        self.reply_void = true;
        self.fall_into_doubt(DoubtReason::Reconnected, now, &mut out);
        out.extend(self.tick(now));
        out
    }

    /// A message on the master's subjects that is not of our contract.
    pub fn observe_undecodable(&mut self, now: Duration) -> Vec<FeedOutput> {
        let mut out = vec![FeedOutput::CountDropped(DropReason::Undecodable)];
        out.push(FeedOutput::CountGap(DoubtReason::Undecodable));
        self.reply_void = true;
        self.fall_into_doubt(DoubtReason::Undecodable, now, &mut out);
        out.extend(self.tick(now));
        out
    }

    /// An event of a publisher of this process, which the bus brings as well. It is judged as one
    /// from there is.
    pub fn observe_local_event(
        &mut self,
        event: Arc<TradeEvent>,
        received: Instant,
        now: Duration,
    ) -> Vec<FeedOutput> {
        self.heard_here = self.heard_here.max(Some((event.epoch, event.seq)));
        self.observe_event(event, received, now)
    }

    /// An event arrived.
    pub fn observe_event(
        &mut self,
        event: Arc<TradeEvent>,
        received: Instant,
        now: Duration,
    ) -> Vec<FeedOutput> {
        if event.account != self.master {
            return self.observe_undecodable(now);
        }
        let mut out = Vec::new();
        if self.doubt.is_some() {
            self.hold_event(event, received, now, &mut out);
            return out;
        }
        let verdict = self.detector.observe_event(event.epoch, event.seq, event.at);
        if verdict != Verdict::OldEpoch && verdict != Verdict::Duplicate {
            self.keep(&event, &mut out);
        }
        match verdict {
            Verdict::InOrder => {
                self.hear(event.epoch, event.seq);
                self.book.apply(&event.change);
                self.digest = None;
                let message = FeedMessage::Event { event, doubtful: false, received };
                out.push(FeedOutput::Send { to: Recipients::All, message });
            }
            Verdict::Duplicate => {
                let came_here = Some((event.epoch, event.seq)) <= self.heard_here;
                let why = if came_here { DropReason::CameLocally } else { DropReason::Duplicate };
                out.push(FeedOutput::CountDropped(why));
            }
            Verdict::OldEpoch => out.push(FeedOutput::CountDropped(DropReason::OldEpoch)),
            Verdict::Gap { .. } | Verdict::NewEpoch | Verdict::Restarted => {
                let reason = doubt_of(verdict, DoubtReason::Gap);
                self.lose_track(reason, event.epoch, event.seq, now, &mut out);
                self.pass_ending(event, received, &mut out);
                out.extend(self.tick(now));
            }
        }
        out
    }

    /// A beacon arrived.
    pub fn observe_beacon(&mut self, beacon: &Beacon, now: Duration) -> Vec<FeedOutput> {
        if beacon.account != self.master {
            return self.observe_undecodable(now);
        }
        let newer_epoch = Some(beacon.epoch) > self.detector.highest_epoch();
        match self.detector.observe_beacon(beacon.epoch, beacon.seq, beacon.at) {
            Verdict::OldEpoch => {
                let mut out = vec![FeedOutput::CountDropped(DropReason::OldEpochBeacon)];
                out.extend(self.note_rival(beacon.epoch, now));
                out
            }
            // Events of this process came before it. That says nothing of the publisher, which lives.
            Verdict::Duplicate | Verdict::Restarted if self.is_overtaken(beacon) => {
                let mut out = vec![FeedOutput::CountDropped(DropReason::CameLocally)];
                self.note_life(now);
                self.take_funds(beacon, &mut out);
                out.extend(self.tick(now));
                out
            }
            // A late beacon from before is no sign of life: a publisher that counts low for ever
            // with a clock that is behind ends as silent, and is asked.
            Verdict::Duplicate => vec![FeedOutput::CountDropped(DropReason::LateBeacon)],
            verdict => self.follow_beacon(beacon, verdict, newer_epoch, now),
        }
    }

    /// The beacon was sent before an event that came without the bus, and so before it.
    fn is_overtaken(&self, beacon: &Beacon) -> bool {
        let heard = self.heard_here.filter(|(epoch, _)| *epoch == beacon.epoch);
        heard.is_some_and(|(_, seq)| beacon.seq < seq)
    }

    fn note_life(&mut self, now: Duration) {
        self.last_beacon = now;
        self.beacon_heard = true;
        self.last_life = now;
        self.rival.answered = true;
    }

    fn follow_beacon(
        &mut self,
        beacon: &Beacon,
        verdict: Verdict,
        newer_epoch: bool,
        now: Duration,
    ) -> Vec<FeedOutput> {
        self.note_life(now);
        let mut out = Vec::new();
        self.take_funds(beacon, &mut out);
        let doubt = match verdict {
            Verdict::InOrder => {
                let differs = self.doubt.is_none() && !self.agrees_with(beacon);
                differs.then_some(DoubtReason::DigestDiffers)
            }
            // Still waiting for the snapshot of an epoch that was heard before.
            Verdict::NewEpoch if !newer_epoch => {
                self.hear(beacon.epoch, beacon.seq);
                None
            }
            other => Some(doubt_of(other, DoubtReason::BeaconAhead)),
        };
        if let Some(reason) = doubt {
            self.lose_track(reason, beacon.epoch, beacon.seq, now, &mut out);
        }
        out.extend(self.tick(now));
        out
    }

    /// A beacon of an old epoch: a leftover, or a publisher that does not stop (H26).
    fn note_rival(&mut self, ignored: Epoch, now: Duration) -> Option<FeedOutput> {
        let followed = self.detector.highest_epoch()?;
        if now.saturating_sub(self.rival.at) > self.settings.silent_after {
            self.rival.turns = 0;
        }
        self.rival.at = now;
        if !std::mem::take(&mut self.rival.answered) {
            return None;
        }
        self.rival.turns += 1;
        if self.rival.turns < TURNS_ALARM {
            return None;
        }
        // Said again every few turns, for as long as it lasts.
        self.rival.turns = 0;
        Some(FeedOutput::TwoPublishers { followed, ignored })
    }

    /// The snapshot request ended: with a complete state, or with nothing.
    pub fn observe_reply(
        &mut self,
        reply: Option<MasterSnapshot>,
        now: Duration,
    ) -> Vec<FeedOutput> {
        let mut out = Vec::new();
        if self.request == Request::InFlight {
            self.request = Request::Idle;
            let reply = reply.or_else(|| self.no_answer_is_empty());
            let settled = match reply {
                Some(reply) if reply.account == self.master => self.adopt(reply, now, &mut out),
                Some(_) | None => false,
            };
            if !settled {
                self.try_again(now, &mut out);
            }
        }
        out.extend(self.tick(now));
        out
    }

    /// No answer says nothing. Planted: it says that nothing is open.
    fn no_answer_is_empty(&self) -> Option<MasterSnapshot> {
        let (epoch, seq) = self.heard.or(self.position()).unwrap_or((Epoch::MIN, Seq::ZERO));
        planted::is(Bug::P9).then(|| MasterSnapshot {
            account: self.master,
            epoch,
            seq,
            at: self.detector.applied_at().unwrap_or_default(),
            book: Book::default(),
            funds: None,
        })
    }

    /// Time passed: notices silence, and sends the request whose time has come.
    pub fn tick(&mut self, now: Duration) -> Vec<FeedOutput> {
        let mut out = Vec::new();
        if now >= self.last_life + self.settings.silent_after {
            self.last_life = now;
            // Planted: without beacons silence says nothing.
            if !planted::is(Bug::P19) {
                self.fall_into_doubt(DoubtReason::Silent, now, &mut out);
            }
        }
        if let Request::Wanted { not_before } = self.request
            && now >= not_before
        {
            self.request = Request::InFlight;
            self.last_request = Some(now);
            self.buffer.clear();
            self.reply_void = false;
            out.push(FeedOutput::RequestSnapshot { heard: self.detector.highest_epoch() });
        }
        out
    }

    /// An event while doubtful: kept for the snapshot; an ending of a known ticket passes.
    fn hold_event(
        &mut self,
        event: Arc<TradeEvent>,
        received: Instant,
        now: Duration,
        out: &mut Vec<FeedOutput>,
    ) {
        if self.is_old(event.epoch) {
            out.push(FeedOutput::CountDropped(DropReason::OldEpoch));
            return;
        }
        let newer_epoch = Some(event.epoch) > self.detector.highest_epoch();
        let applied = self.detector.position();
        let below = applied.is_some_and(|(epoch, seq)| epoch == event.epoch && event.seq <= seq);
        let before = self.detector.applied_at().is_some_and(|at| event.at <= at);
        if below && before {
            out.push(FeedOutput::CountDropped(DropReason::Duplicate));
            return;
        }
        self.detector.hear(event.epoch);
        self.keep(&event, out);
        if newer_epoch || below {
            let reason = if below { DoubtReason::Restarted } else { DoubtReason::NewEpoch };
            self.lose_track(reason, event.epoch, event.seq, now, out);
        } else {
            self.hear(event.epoch, event.seq);
        }
        self.pass_ending(event, received, out);
        out.extend(self.tick(now));
    }

    /// H39: an ending of a ticket that is open as far as we know is safe to follow at once.
    fn pass_ending(
        &mut self,
        event: Arc<TradeEvent>,
        received: Instant,
        out: &mut Vec<FeedOutput>,
    ) {
        let ticket = event.change.ticket();
        let known =
            self.book.positions.contains_key(&ticket) || self.book.pendings.contains_key(&ticket);
        if event.change.is_ending() && known {
            self.book.apply(&event.change);
            self.digest = None;
            let message = FeedMessage::Event { event, doubtful: true, received };
            out.push(FeedOutput::Send { to: Recipients::All, message });
        }
    }

    /// Keeps an event for the snapshot that is on its way.
    fn keep(&mut self, event: &Arc<TradeEvent>, out: &mut Vec<FeedOutput>) {
        if self.request != Request::InFlight {
            return;
        }
        if self.buffer.len() >= self.settings.buffer_events_max {
            self.buffer.clear();
            self.reply_void = true;
        }
        if self.reply_void {
            out.push(FeedOutput::CountDropped(DropReason::BufferFull));
            return;
        }
        self.buffer.insert((event.epoch, event.seq), Arc::clone(event));
    }

    fn take_funds(&mut self, beacon: &Beacon, out: &mut Vec<FeedOutput>) {
        if let Some(funds) = &beacon.funds
            && self.funds.as_ref() != Some(funds)
        {
            self.funds = Some(funds.clone());
            let message = FeedMessage::Funds(funds.clone());
            out.push(FeedOutput::Send { to: Recipients::All, message });
        }
    }

    fn agrees_with(&mut self, beacon: &Beacon) -> bool {
        let digest = *self.digest.get_or_insert_with(|| self.book.digest());
        digest == beacon.digest
            && self.book.positions.len() == beacon.open_trades as usize
            && self.book.pendings.len() == beacon.open_pendings as usize
    }

    fn hear(&mut self, epoch: Epoch, seq: Seq) {
        self.heard = self.heard.max(Some((epoch, seq)));
    }

    /// The messages prove a loss or a new incarnation at this position.
    fn lose_track(
        &mut self,
        reason: DoubtReason,
        epoch: Epoch,
        seq: Seq,
        now: Duration,
        out: &mut Vec<FeedOutput>,
    ) {
        if reason == DoubtReason::Restarted {
            self.heard = Some((epoch, seq));
        } else {
            self.hear(epoch, seq);
        }
        let new_incarnation = matches!(reason, DoubtReason::NewEpoch | DoubtReason::Restarted);
        let known = self.doubt() == Some(reason) && reason == DoubtReason::Restarted;
        if self.position().is_some() && (self.doubt.is_none() || (new_incarnation && !known)) {
            out.push(FeedOutput::CountGap(reason));
        }
        self.fall_into_doubt(reason, now, out);
        if new_incarnation && !known {
            self.hurry(now);
        }
    }

    /// Becomes doubtful (the first reason stays, except that a restart is always said).
    fn fall_into_doubt(&mut self, reason: DoubtReason, now: Duration, out: &mut Vec<FeedOutput>) {
        match &mut self.doubt {
            Some(doubt) if reason == DoubtReason::Restarted => doubt.reason = reason,
            Some(_) => {}
            None => {
                self.doubt = Some(Doubt { reason, since: now });
                self.tries = 0;
                let message = FeedMessage::Doubt(reason);
                out.push(FeedOutput::Send { to: Recipients::All, message });
            }
        }
        if self.request == Request::Idle {
            let jitter = if reason.is_mass_cause() { self.jitter() } else { Duration::ZERO };
            self.want(now, jitter);
        }
    }

    /// A publisher just spoke for the first time: a slow retry need not be waited for.
    fn hurry(&mut self, now: Duration) {
        self.tries = 0;
        if let Request::Wanted { .. } = self.request {
            self.want(now, Duration::ZERO);
        }
    }

    /// Plans the next request, no sooner than the spacing allows.
    fn want(&mut self, now: Duration, wait: Duration) {
        let spaced = self.last_request.map_or(now, |last| last + self.settings.snapshot_spacing);
        self.request = Request::Wanted { not_before: spaced.max(now) + wait };
    }

    fn jitter(&mut self) -> Duration {
        self.settings.mass_jitter_max.mul_f64(self.random.f64())
    }

    fn try_again(&mut self, now: Duration, out: &mut Vec<FeedOutput>) {
        self.tries += 1;
        if self.tries.is_multiple_of(QUICK_TRIES) {
            out.push(FeedOutput::CountTriesExhausted);
        }
        let wait = if self.tries < QUICK_TRIES {
            Duration::ZERO
        } else {
            self.settings.slow_spacing.saturating_sub(self.settings.snapshot_spacing)
        };
        let jitter = self.jitter();
        self.want(now, wait + jitter);
    }

    /// Brings a reply up to date and takes it over; false if it does not settle the doubt.
    fn adopt(&mut self, reply: MasterSnapshot, now: Duration, out: &mut Vec<FeedOutput>) -> bool {
        let taken = (reply.epoch, reply.seq);
        if self.is_old(reply.epoch) {
            out.push(FeedOutput::CountDropped(DropReason::OldEpochSnapshot));
            return false;
        }
        if self.reply_void {
            return false;
        }
        let restarted = self.is_restart(taken, reply.at);
        let Some(current) = roll_forward(reply, &self.buffer) else { return false };
        let reached = (current.epoch, current.seq);
        let behind = self.heard.is_some_and(|heard| reached < heard);
        // After the quick tries the publisher's own word counts more than what was once heard.
        let insists = self.tries + 1 >= QUICK_TRIES && Some(reached.0) == self.heard.map(|h| h.0);
        // Planted: an epoch that was outbid is as good as any.
        let outbid = planted::is(Bug::P13) && self.heard.is_some_and(|heard| reached.0 < heard.0);
        if behind && !restarted && !insists && !outbid {
            return false;
        }
        self.settle(current, restarted || behind, now, out);
        true
    }

    /// A higher epoch was heard.
    fn is_old(&self, epoch: Epoch) -> bool {
        let highest = self.detector.highest_epoch();
        !planted::is(Bug::P13) && highest.is_some_and(|highest| epoch < highest)
    }

    /// The publisher's state has a lower seq at a later time than what was applied.
    fn is_restart(&self, taken: (Epoch, Seq), at: Micros) -> bool {
        let said = self.doubt() == Some(DoubtReason::Restarted);
        let below = self.position().is_some_and(|p| p.0 == taken.0 && taken.1 < p.1);
        let later = self.detector.applied_at().is_some_and(|applied| at > applied);
        // What was heard since the request may be just what the reply does not contain yet.
        let explained = self.buffer.contains_key(&(taken.0, taken.1.next()));
        said || (below && later && !explained)
    }

    /// Takes over a state that is up to date.
    fn settle(
        &mut self,
        current: MasterSnapshot,
        restarted: bool,
        now: Duration,
        out: &mut Vec<FeedOutput>,
    ) {
        let reached = (current.epoch, current.seq);
        let same_place = self.position() == Some(reached);
        let same_state = same_place && self.book == current.book;
        let reason = match self.doubt.take() {
            Some(doubt) => {
                out.push(FeedOutput::DoubtEnded(now.saturating_sub(doubt.since)));
                Some(doubt.reason)
            }
            None if same_state => None,
            None if same_place => Some(DoubtReason::DigestDiffers),
            None => Some(DoubtReason::Requested),
        };
        if reason == Some(DoubtReason::DigestDiffers) && same_place {
            out.push(FeedOutput::CountGap(DoubtReason::DigestDiffers));
        }
        self.detector.accept_snapshot(current.epoch, current.seq, current.at);
        self.heard = Some(reached);
        if current.funds.is_some() {
            self.funds = current.funds;
        }
        self.book = current.book;
        self.digest = None;
        self.buffer.clear();
        self.tries = 0;
        self.last_life = now;
        let requesters = std::mem::take(&mut self.requesters);
        let snapshot = self.snapshot();
        let send = |to, reason| FeedOutput::Send {
            to,
            message: FeedMessage::Snapshot(Arc::clone(&snapshot), reason),
        };
        match reason {
            Some(_) if restarted => out.push(send(Recipients::All, DoubtReason::Restarted)),
            Some(reason) => out.push(send(Recipients::All, reason)),
            None => out.extend(
                requesters.into_iter().map(|f| send(Recipients::One(f), DoubtReason::Requested)),
            ),
        }
    }

    /// The state at the applied position. Only called when there is one.
    fn snapshot(&self) -> Arc<MasterSnapshot> {
        let (epoch, seq) = self.position().expect("a feed without doubt has a position");
        Arc::new(MasterSnapshot {
            account: self.master,
            epoch,
            seq,
            at: self.detector.applied_at().unwrap_or_default(),
            book: self.book.clone(),
            funds: self.funds.clone(),
        })
    }
}

fn doubt_of(verdict: Verdict, gap: DoubtReason) -> DoubtReason {
    match verdict {
        Verdict::NewEpoch => DoubtReason::NewEpoch,
        Verdict::Restarted => DoubtReason::Restarted,
        Verdict::Gap { .. } | Verdict::InOrder | Verdict::Duplicate | Verdict::OldEpoch => gap,
    }
}

/// Applies what arrived after the snapshot was taken; nothing if there is a hole or a newer epoch.
fn roll_forward(
    mut snapshot: MasterSnapshot,
    buffer: &BTreeMap<(Epoch, Seq), Arc<TradeEvent>>,
) -> Option<MasterSnapshot> {
    let taken = (snapshot.epoch, snapshot.seq);
    for ((epoch, seq), event) in buffer.range(taken..).filter(|(position, _)| **position > taken) {
        if *epoch != snapshot.epoch || *seq != snapshot.seq.next() {
            return None;
        }
        snapshot.book.apply(&event.change);
        snapshot.seq = *seq;
        snapshot.at = snapshot.at.max(event.at);
    }
    Some(snapshot)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
