//! The shell of a publisher: watches connection and permit, sends the queue, answers requests.

use super::core::{EpochReason, Outgoing, StateAt};
use super::{MayPublish, PublisherSettings, PublisherStatus, Shared};
use crate::clock::wall_now;
use crate::metrics::{self as names, DropReason, PublisherMetrics, count, count_dropped};
use async_nats::connection::State;
use async_nats::{Client, Message, Statistics, Subject, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use schemas::{AccountId, Beacon, Digest, Epoch, Seq, codec, subject};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// How often connection and permit are looked at while nothing is sent.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Messages taken from the queue under one lock.
const BATCH_MAX: usize = 64;

/// Longest wait for room in the client. Without a server it never gets room (M17).
const HAND_OVER_LIMIT: Duration = Duration::from_secs(1);

/// Askers that share the next snapshot reply; one per node is expected.
const ASKERS_MAX: usize = 1_024;

/// Rows up to which a snapshot is encoded on the hot runtime: below a millisecond.
const INLINE_ROWS_MAX: usize = 200;

/// What a look at connection and permit found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// As before: send.
    Same,
    /// Up again: what was taken from the queue before belongs to an epoch that ended.
    New,
    /// Down: send nothing.
    Down,
}

/// Connection and permit: what every message needs.
#[derive(Clone)]
struct Voice {
    client: Client,
    statistics: Arc<Statistics>,
    may_publish: MayPublish,
}

impl Voice {
    fn connects(&self) -> u64 {
        self.statistics.connects.load(Ordering::Relaxed)
    }

    fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Hands a message to the client; false if there was no room in time.
    async fn send(&self, subject: Subject, payload: Vec<u8>) -> bool {
        let sent = self.client.publish(subject, Bytes::from(payload));
        matches!(tokio::time::timeout(HAND_OVER_LIMIT, sent).await, Ok(Ok(())))
    }
}

pub(super) struct PublisherTask {
    voice: Voice,
    account: AccountId,
    settings: PublisherSettings,
    shared: Arc<Shared>,
    status: watch::Sender<PublisherStatus>,
    event_subject: Subject,
    beacon_subject: Subject,
    /// The connection this epoch speaks on; nothing while silent.
    spoken_on: Option<u64>,
    silent_because: EpochReason,
    digest: Option<((Epoch, Seq), Digest)>,
    askers: Vec<Subject>,
    answered_at: Option<Instant>,
    answering: Arc<AtomicBool>,
    metrics: Arc<PublisherMetrics>,
}

impl PublisherTask {
    pub(super) fn new(
        client: Client,
        account: AccountId,
        settings: PublisherSettings,
        may_publish: MayPublish,
        shared: &Arc<Shared>,
        status: watch::Sender<PublisherStatus>,
    ) -> Self {
        let statistics = client.statistics();
        PublisherTask {
            voice: Voice { client, statistics, may_publish },
            account,
            settings,
            shared: Arc::clone(shared),
            status,
            event_subject: Subject::from(subject::event(account)),
            beacon_subject: Subject::from(subject::beacon(account)),
            spoken_on: None,
            silent_because: EpochReason::Disconnected,
            digest: None,
            askers: Vec::new(),
            answered_at: None,
            answering: Arc::default(),
            metrics: Arc::new(PublisherMetrics::new()),
        }
    }

    pub(super) async fn run(mut self) {
        let mut looks = tokio::time::interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.voice.is_connected() {
            looks.tick().await;
            if self.shared.closing.load(Ordering::Acquire) {
                self.status.send_replace(PublisherStatus::Stopped);
                return;
            }
        }
        let client = self.voice.client.clone();
        let heard = client.subscribe(subject::master_all(self.account)).await;
        let asked = client.subscribe(subject::snapshot(self.account)).await;
        match (heard, asked) {
            (Ok(heard), Ok(asked)) => self.speak(heard, asked, looks).await,
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(account = %self.account, %error, "publisher cannot subscribe");
                self.status.send_replace(PublisherStatus::Stopped);
            }
        }
    }

    async fn speak(
        &mut self,
        mut heard: Subscriber,
        mut asked: Subscriber,
        mut looks: tokio::time::Interval,
    ) {
        let shared = Arc::clone(&self.shared);
        let mut beacons = tokio::time::interval(self.settings.beacon_interval);
        beacons.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                message = heard.next() => match message {
                    Some(message) => self.hear(&message),
                    None => break,
                },
                () = shared.wake.notified() => {}
                _ = beacons.tick() => shared.core.lock().push_beacon(wall_now()),
                _ = looks.tick() => {}
                message = asked.next() => match message {
                    Some(message) => self.take_asker(message),
                    None => break,
                },
            }
            let superseded = shared.core.lock().superseded();
            if let Some(heard) = superseded {
                metrics::counter!(names::SUPERSEDED).increment(1);
                self.status.send_replace(PublisherStatus::Superseded { heard });
                return;
            }
            self.send_queue().await;
            self.answer();
            self.report();
            if shared.closing.load(Ordering::Acquire) {
                // Written to the socket is all that can be waited for; peers prove the rest.
                let _ = tokio::time::timeout(HAND_OVER_LIMIT, self.voice.client.flush()).await;
                break;
            }
        }
        shared.core.lock().go_offline();
        self.status.send_replace(PublisherStatus::Stopped);
    }

    /// Whatever is said under the account's subjects, our own echo included. Events count as
    /// well: followers that heard one of a higher epoch are deaf to us until we are above it.
    fn hear(&mut self, message: &Message) {
        let heard = match subject::parse(&message.subject) {
            Some(subject::Subject::Event(_)) => codec::decode_event(&message.payload)
                .map(|event| (event.account, event.epoch, event.seq))
                .ok(),
            Some(subject::Subject::Beacon(_)) => codec::decode_beacon(&message.payload)
                .map(|beacon| (beacon.account, beacon.epoch, beacon.seq))
                .ok(),
            Some(subject::Subject::Snapshot(_)) | None => return,
        };
        match heard {
            Some((account, epoch, seq)) if account == self.account => {
                self.shared.core.lock().hear(epoch, seq);
            }
            Some(_) | None => count_dropped(DropReason::Undecodable),
        }
    }

    /// Looks at connection and permit; begins a new epoch when both are back.
    fn check_link(&mut self) -> Link {
        let connects = self.voice.connects();
        let connected = self.voice.is_connected();
        let permitted = (self.voice.may_publish)();
        let same = self.spoken_on == Some(connects);
        if connected && permitted && same {
            return Link::Same;
        }
        if self.spoken_on.take().is_some() {
            self.silent_because =
                if connected && same { EpochReason::PermitLost } else { EpochReason::Disconnected };
            self.fall_silent();
        }
        if !(connected && permitted) {
            return Link::Down;
        }
        self.spoken_on = Some(connects);
        self.shared.core.lock().go_online(wall_now(), self.silent_because);
        Link::New
    }

    fn fall_silent(&self) {
        let dropped = self.shared.core.lock().go_offline();
        self.count_dropped(dropped);
    }

    fn count_dropped(&self, dropped: usize) {
        let reason = self.silent_because.as_str();
        metrics::counter!(names::DROPPED, "reason" => reason).increment(dropped as u64);
    }

    async fn send_queue(&mut self) {
        loop {
            if self.check_link() == Link::Down {
                return;
            }
            let batch = self.shared.core.lock().take(BATCH_MAX);
            if batch.is_empty() {
                return;
            }
            if !self.send_batch(batch).await {
                return;
            }
        }
    }

    /// Sends what was taken; false if the link went down on the way.
    async fn send_batch(&mut self, batch: Vec<Outgoing>) -> bool {
        let mut rest = batch.len();
        for message in batch {
            match self.check_link() {
                Link::Same => {}
                Link::New => {
                    self.count_dropped(rest);
                    return true;
                }
                Link::Down => {
                    self.count_dropped(rest);
                    return false;
                }
            }
            if !self.send(message).await {
                self.silent_because = EpochReason::Disconnected;
                self.spoken_on = None;
                self.fall_silent();
                self.count_dropped(rest);
                return false;
            }
            rest -= 1;
        }
        true
    }

    async fn send(&mut self, message: Outgoing) -> bool {
        match message {
            Outgoing::Event { event, queued } => {
                let payload = codec::encode_event(&event);
                if !self.voice.send(self.event_subject.clone(), payload).await {
                    return false;
                }
                if let Some(hook) = &self.settings.on_published {
                    hook(&event);
                }
                self.metrics.wait_seconds.record(queued.elapsed());
                self.metrics.events.increment(1);
                true
            }
            Outgoing::Beacon(state) => {
                let payload = codec::encode_beacon(&self.beacon_of(&state));
                self.metrics.beacons.increment(1);
                self.voice.send(self.beacon_subject.clone(), payload).await
            }
        }
    }

    fn beacon_of(&mut self, state: &StateAt) -> Beacon {
        let position = (state.epoch, state.seq);
        let digest = match self.digest {
            Some((known, digest)) if known == position => digest,
            _ => state.book.digest(),
        };
        self.digest = Some((position, digest));
        Beacon {
            account: self.account,
            epoch: state.epoch,
            seq: state.seq,
            at: state.at,
            open_trades: u32::try_from(state.book.positions.len()).unwrap_or(u32::MAX),
            open_pendings: u32::try_from(state.book.pendings.len()).unwrap_or(u32::MAX),
            digest,
            funds: state.funds.clone(),
        }
    }

    fn take_asker(&mut self, message: Message) {
        let request = codec::decode_snapshot_request(&message.payload).ok();
        let request = request.filter(|request| request.account == self.account);
        if let Some(heard) = request.as_ref().and_then(|request| request.heard) {
            // Whoever heard more than we ever said is deaf to us, however long ago that was: a
            // restored database may have forgotten it (H28).
            self.shared.core.lock().hear(heard, Seq::ZERO);
        }
        match message.reply {
            Some(reply) if request.is_some() && self.askers.len() < ASKERS_MAX => {
                self.askers.push(reply)
            }
            Some(_) | None => count_dropped(DropReason::BadRequest),
        }
    }

    /// Sends one snapshot to everybody who asked, unless the last one was just sent.
    fn answer(&mut self) {
        let spaced = self.answered_at.is_none_or(|at| at.elapsed() >= self.settings.reply_spacing);
        let busy = self.answering.load(Ordering::Acquire);
        if self.askers.is_empty() || !spaced || busy {
            return;
        }
        let askers = std::mem::take(&mut self.askers);
        let core = self.shared.core.lock();
        let state = core.speaks().then(|| core.state(wall_now())).flatten();
        drop(core);
        let (Some(state), Some(connects)) = (state, self.spoken_on) else {
            // Unknown is not empty: whoever asked hears nothing and holds.
            metrics::counter!(names::DROPPED, "reason" => DropReason::RequestWhileSilent.as_str())
                .increment(askers.len() as u64);
            return;
        };
        self.answered_at = Some(Instant::now());
        self.answering.store(true, Ordering::Release);
        let reply = Reply {
            voice: self.voice.clone(),
            connects,
            account: self.account,
            state,
            metrics: Arc::clone(&self.metrics),
            _answering: Answering(Arc::clone(&self.answering)),
        };
        // Events go on meanwhile: an asker keeps what comes after the snapshot's position.
        tokio::spawn(reply.send(askers));
    }

    fn report(&self) {
        let mut core = self.shared.core.lock();
        let raised = core.take_raised();
        let (epoch, _) = core.position();
        let speaks = core.speaks();
        drop(core);
        for reason in raised {
            count(names::EPOCHS_RAISED, "reason", reason.as_str());
        }
        let status = if speaks {
            PublisherStatus::Publishing { epoch }
        } else {
            PublisherStatus::Waiting { epoch }
        };
        self.status.send_if_modified(|known| std::mem::replace(known, status) != status);
    }
}

/// Clears the flag however the reply ends.
struct Answering(Arc<AtomicBool>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// One snapshot on its way to those who asked.
struct Reply {
    voice: Voice,
    connects: u64,
    account: AccountId,
    state: StateAt,
    metrics: Arc<PublisherMetrics>,
    _answering: Answering,
}

impl Reply {
    async fn send(self, askers: Vec<Subject>) {
        let Some(pages) = self.encoded().await else { return };
        for asker in askers {
            for page in &pages {
                let same = self.voice.is_connected() && self.voice.connects() == self.connects;
                if !same || !(self.voice.may_publish)() {
                    count_dropped(DropReason::ReplyCut);
                    return;
                }
                let sent = self.voice.client.publish(asker.clone(), page.clone());
                if !matches!(tokio::time::timeout(HAND_OVER_LIMIT, sent).await, Ok(Ok(()))) {
                    count_dropped(DropReason::ReplyCut);
                    return;
                }
            }
            self.metrics.answered.increment(1);
        }
    }

    async fn encoded(&self) -> Option<Vec<Bytes>> {
        // Encoded anew for every reply, also where nothing changed: a snapshot says when it was
        // taken and how much money there is, and a held plan waits for a later one (H41).
        let (state, account) = (self.state.clone(), self.account);
        let rows = state.book.positions.len() + state.book.pendings.len();
        let encode = move || {
            let pages = codec::encode_snapshot(&state.to_snapshot(account));
            pages.into_iter().map(Bytes::from).collect()
        };
        if rows <= INLINE_ROWS_MAX {
            return Some(encode());
        }
        tokio::task::spawn_blocking(encode).await.ok()
    }
}
