//! The writer's decisions, without a server: time is paused, the sink is memory.

use super::batch::*;
use super::memory::{MemoryDatabase, MemoryRows};
use super::*;
use proptest::prelude::*;
use reconcile::{Pair, PairId, PairState};
use schemas::{FollowerTicket, LinkId, MasterTicket, NodeId, Side, Symbol, Token};
use std::collections::BTreeMap;
use tokio::task::JoinHandle;
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

fn account(n: u64) -> AccountId {
    AccountId::new(n).unwrap()
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn token(n: u64) -> Token {
    Token::new(n).unwrap()
}

/// A pair of link 11 and follower 11.
fn pair(ticket: u64, state: PairState, copy: Option<u64>, version: u64) -> PairRow {
    let link = LinkId::new(11).unwrap();
    let master_ticket = MasterTicket::new(ticket).unwrap();
    let pair = Pair {
        id: PairId::new(link, master_ticket, None),
        link,
        master_ticket,
        state,
        is_pending: false,
        follower_ticket: copy.map(|copy| FollowerTicket::new(copy).unwrap()),
        symbol: Symbol::new("EURUSD").unwrap(),
        side: Side::Buy,
        master_side: Side::Buy,
        lots_at_open: None,
        master_lots_at_open: "1.5".parse().unwrap(),
        sent_at: None,
        reason: None,
        rejected: Default::default(),
        version,
    };
    PairRow {
        pair,
        follower: account(11),
        token: token(1),
        opened_at: None,
        closed_at: None,
        close_price: None,
        volumes: None,
    }
}

fn event(n: u64) -> CopyEvent {
    CopyEvent {
        id: Uuid::from_u128(u128::from(n)),
        at: schemas::Micros(1_700_000_000_000_000),
        token: token(1),
        link: LinkId::new(11).unwrap(),
        follower: account(11),
        master_ticket: MasterTicket::new(1).unwrap(),
        follower_ticket: None,
        action: "open",
        outcome: EventOutcome::Done,
        reason: None,
        symbol: None,
        lots: None,
        price: None,
        own_time: None,
        broker_time: None,
    }
}

fn status(session: &'static str) -> AccountStatus {
    AccountStatus {
        account: account(11),
        token: token(1),
        session,
        detail: None,
        funds: None,
        positions_open: None,
        pendings_open: None,
        at: schemas::Micros(0),
    }
}

fn refused(sqlstate: &str) -> WriteError {
    WriteError::Refused { sqlstate: sqlstate.to_owned(), constraint: None, message: String::new() }
}

/// A database in which node `a` owns follower 11 under token 1.
fn database() -> MemoryDatabase {
    let database = MemoryDatabase::default();
    database.set_owner(account(11), node("a"), token(1));
    database.add_link(LinkId::new(11).unwrap(), account(11));
    database
}

fn start(database: &MemoryDatabase) -> (Writer, JoinHandle<()>) {
    let (writer, task) = Writer::new(WriterConfig::default());
    let sink = Arc::new(MemoryRows::new(database.clone(), node("a")));
    (writer, tokio::spawn(task.run(sink)))
}

/// Writes a row and waits until it is durable.
async fn written(writer: &Writer, row: Row) {
    writer.push(row);
    writer.flush_account(account(11)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rows_that_a_promoted_replica_lacks_are_written_again() {
    let database = database();
    let (writer, _task) = start(&database);
    written(&writer, Row::Pair(pair(1, PairState::Open, Some(5), 1))).await;
    let replica = database.replica();
    written(&writer, Row::Pair(pair(1, PairState::Closed, Some(5), 2))).await;
    written(&writer, Row::Pair(pair(2, PairState::Open, Some(6), 1))).await;
    written(&writer, Row::CopyEvent(event(1))).await;
    let before = (database.pairs(), database.events());

    database.promote(&replica);
    assert_eq!((database.pairs().len(), database.events().len()), (1, 0));
    // Anything that is written shows that the server is another one.
    written(&writer, Row::AccountStatus(status("copying"))).await;
    writer.flush_account(account(11)).await.unwrap();
    assert_eq!((database.pairs(), database.events()), before);
}

#[tokio::test(start_paused = true)]
async fn rows_are_not_kept_for_ever_to_be_written_again() {
    let database = database();
    let (writer, _task) = start(&database);
    let replica = database.replica();
    written(&writer, Row::Pair(pair(1, PairState::Open, Some(5), 1))).await;
    tokio::time::sleep(super::recent::RECENT_FOR + SECOND).await;
    written(&writer, Row::Pair(pair(2, PairState::Open, Some(6), 1))).await;
    database.promote(&replica);
    written(&writer, Row::AccountStatus(status("copying"))).await;
    writer.flush_account(account(11)).await.unwrap();
    let tickets: Vec<u64> =
        database.pairs().iter().map(|row| row.pair.master_ticket.get()).collect();
    assert_eq!(tickets, [2]);
}

#[test]
fn sqlstates_decide_what_is_dropped_kept_and_sent_again() {
    // (SQLSTATE, what it is, many rows, one row)
    let table = [
        ("22P02", "text that is no number", Next::SplitRows, Next::DropRow),
        ("22003", "number out of range", Next::SplitRows, Next::DropRow),
        ("22008", "time out of range", Next::SplitRows, Next::DropRow),
        ("22021", "zero byte in a text", Next::SplitRows, Next::DropRow),
        ("23502", "not null", Next::SplitRows, Next::DropRow),
        ("23503", "foreign key", Next::SplitRows, Next::DropRow),
        ("23505", "unique", Next::SplitRows, Next::DropRow),
        ("23514", "check", Next::SplitRows, Next::DropRow),
        ("42P01", "no such table", Next::KeepAndAlarm, Next::KeepAndAlarm),
        ("42703", "no such column", Next::KeepAndAlarm, Next::KeepAndAlarm),
        ("42501", "no right", Next::KeepAndAlarm, Next::KeepAndAlarm),
        ("28P01", "password", Next::KeepAndAlarm, Next::KeepAndAlarm),
        ("3D000", "no such database", Next::KeepAndAlarm, Next::KeepAndAlarm),
        ("40001", "serialization", Next::RetryLater, Next::RetryLater),
        ("40P01", "deadlock", Next::RetryLater, Next::RetryLater),
        ("08006", "connection broke", Next::RetryLater, Next::RetryLater),
        ("25006", "read only", Next::RetryLater, Next::RetryLater),
        ("25P02", "transaction is aborted", Next::RetryLater, Next::RetryLater),
        ("26000", "statement is not there", Next::RetryLater, Next::RetryLater),
        ("53100", "disk full", Next::RetryLater, Next::RetryLater),
        ("53300", "too many connections", Next::RetryLater, Next::RetryLater),
        ("55000", "database takes no connections", Next::RetryLater, Next::RetryLater),
        ("57014", "statement timeout", Next::RetryLater, Next::RetryLater),
        ("57P01", "server shuts down", Next::RetryLater, Next::RetryLater),
        ("57P03", "server starts", Next::RetryLater, Next::RetryLater),
        ("58030", "server I/O", Next::RetryLater, Next::RetryLater),
        ("XX000", "internal", Next::RetryLater, Next::RetryLater),
        ("0A000", "cached plan", Next::RetryLater, Next::RetryLater),
        ("55P03", "lock not available", Next::SplitRows, Next::HoldRow),
        ("54000", "row too large for an index", Next::SplitRows, Next::HoldRow),
        ("P0001", "somebody's trigger", Next::SplitRows, Next::HoldRow),
        ("21000", "row twice", Next::SplitRows, Next::HoldRow),
        ("99", "nonsense", Next::SplitRows, Next::HoldRow),
        ("", "nothing", Next::SplitRows, Next::HoldRow),
    ];
    let rows = |count: u64| (1..=count).map(|n| Row::Pair(pair(n, PairState::Open, Some(n), 1)));
    let many = Batch::sorted(rows(3)).remove(0);
    let one = Batch::sorted(rows(1)).remove(0);
    for (sqlstate, what, for_many, for_one) in table {
        assert_eq!(many.on_refused(&refused(sqlstate)), for_many, "{sqlstate} {what}, many");
        assert_eq!(one.on_refused(&refused(sqlstate)), for_one, "{sqlstate} {what}, one");
    }
    let lost = WriteError::Unreachable { message: String::new() };
    assert_eq!(many.on_refused(&lost), Next::RetryLater);
    assert_eq!(one.on_refused(&WriteError::TimedOut { limit: SECOND }), Next::RetryLater);
}

#[test]
fn newest_version_of_a_pair_is_the_one_that_is_written() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for version in [2, 3, 1] {
        queue.push(Row::Pair(pair(1, PairState::Open, Some(9), version)), now);
    }
    assert_eq!(queue.pending(account(11)), 1);
    let batch = queue.take(now).unwrap();
    assert_eq!(batch.pairs()[0].pair.version, 3);
    assert!(queue.take(now).is_none());
}

#[test]
fn row_that_comes_back_does_not_replace_a_newer_one() {
    let now = Instant::now();
    let mut queue = Queue::default();
    queue.push(Row::Pair(pair(1, PairState::Sending, None, 1)), now);
    let batch = queue.take(now).unwrap();
    queue.push(Row::Pair(pair(1, PairState::Open, Some(9), 2)), now);
    assert_eq!(queue.pending(account(11)), 2);
    for entry in batch.entries {
        queue.put_back(entry);
    }
    assert_eq!(queue.pending(account(11)), 1);
    assert_eq!(queue.take(now).unwrap().pairs()[0].pair.version, 2);
}

#[test]
fn row_that_comes_back_after_its_pair_ended_is_needless() {
    let now = Instant::now();
    let mut queue = Queue::default();
    queue.push(Row::Pair(pair(1, PairState::Open, Some(9), 1)), now);
    let batch = queue.take(now).unwrap();
    queue.push(Row::Pair(pair(1, PairState::Closed, Some(9), 2)), now);
    for entry in batch.entries {
        queue.put_back(entry);
    }
    assert_eq!(queue.pending(account(11)), 1);
    assert_eq!(queue.take(now).unwrap().kind(), RowKind::PairEnded);
    assert!(queue.take(now).is_none());
}

#[test]
fn end_of_an_earlier_tenure_leaves_the_live_row_of_the_later_one() {
    let now = Instant::now();
    let mut queue = Queue::default();
    queue.push(Row::Pair(pair(1, PairState::Closed, Some(8), 5)), now);
    let later = PairRow { token: token(3), ..pair(1, PairState::Open, Some(9), 1) };
    queue.push(Row::Pair(later), now);
    assert_eq!(queue.take(now).unwrap().kind(), RowKind::PairEnded);
    assert_eq!(queue.take(now).unwrap().kind(), RowKind::PairLive);
    assert_eq!(queue.pending(account(11)), 2);
}

#[test]
fn two_ends_of_one_pair_go_in_two_batches() {
    let rows = [8, 9].map(|copy| Row::Pair(pair(1, PairState::Closed, Some(copy), 1)));
    let batches = Batch::sorted(rows);
    assert_eq!(batches.iter().map(Batch::len).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn pairs_go_before_status_and_status_before_events() {
    let rows = [
        Row::CopyEvent(event(1)),
        Row::AccountStatus(status("copying")),
        Row::Pair(pair(1, PairState::Open, Some(9), 1)),
        Row::Pair(pair(2, PairState::Closed, Some(8), 1)),
    ];
    let kinds: Vec<RowKind> = Batch::sorted(rows).iter().map(Batch::kind).collect();
    assert_eq!(kinds, RowKind::ALL);
}

#[test]
fn events_and_pairs_are_bounded_and_what_does_not_fit_is_handed_back() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for n in 0..EVENTS_MAX as u64 {
        assert_eq!(queue.push(Row::CopyEvent(event(n)), now), Pushed::Queued);
    }
    let one_more = Row::CopyEvent(event(u64::MAX));
    assert_eq!(queue.push(one_more.clone(), now), Pushed::Full(Box::new(one_more)));

    for n in 1..=PAIRS_MAX as u64 {
        assert_eq!(
            queue.push(Row::Pair(pair(n, PairState::Open, Some(n), 1)), now),
            Pushed::Queued
        );
    }
    let one_more = Row::Pair(pair(PAIRS_MAX as u64 + 1, PairState::Open, Some(1), 1));
    assert_eq!(queue.push(one_more.clone(), now), Pushed::Full(Box::new(one_more)));
    // What is there already still changes, and ends.
    let changed = queue.push(Row::Pair(pair(1, PairState::Closing, Some(1), 2)), now);
    assert_eq!(changed, Pushed::Coalesced);
    let ended = queue.push(Row::Pair(pair(1, PairState::Closed, Some(1), 3)), now);
    assert_eq!(ended, Pushed::Coalesced);
    assert_eq!(queue.pending(account(11)), EVENTS_MAX + PAIRS_MAX);
}

#[test]
fn a_pair_is_pending_from_its_first_push_until_its_last_row_is_settled() {
    let now = Instant::now();
    let mut queue = Queue::default();
    let row = |lots| Row::Pair(pair(1, PairState::Open, Some(1), lots));
    let id = pair(1, PairState::Open, Some(1), 1).pair.id;
    assert!(!queue.is_pair_pending(account(11), id));
    queue.push(row(1), now);
    let pairs = |queue: &Queue| [11, 12].map(|id| queue.pairs_pending(account(id)));
    assert_eq!(pairs(&queue), [1, 0]);
    let written = queue.take(now).unwrap();
    assert!(queue.is_pair_pending(account(11), id), "it is being written");
    queue.push(row(2), now);
    queue.settle(&written.entries[0].row);
    assert!(queue.is_pair_pending(account(11), id), "a newer row waits");
    let failed = queue.take(now).unwrap().entries.remove(0);
    queue.put_back(failed);
    assert!(queue.is_pair_pending(account(11), id), "it was not written");
    let written = queue.take(now).unwrap();
    queue.settle(&written.entries[0].row);
    assert!(!queue.is_pair_pending(account(11), id));
    assert_eq!(pairs(&queue), [0, 0]);
    assert_eq!(queue.pending(account(11)), 0);
}

#[test]
fn status_is_replaced_by_the_last_push_even_if_the_clock_was_set_back() {
    let now = Instant::now();
    let mut queue = Queue::default();
    let early = AccountStatus { at: schemas::Micros(9), ..status("connecting") };
    queue.push(Row::AccountStatus(early), now);
    queue.push(Row::AccountStatus(status("copying")), now);
    assert_eq!(queue.take(now).unwrap().statuses()[0].session, "copying");
}

#[test]
fn row_that_is_held_waits_longer_each_time_and_the_others_do_not() {
    let mut now = Instant::now();
    let mut queue = Queue::default();
    queue.push(Row::Pair(pair(1, PairState::Open, Some(1), 1)), now);
    let mut waits = Vec::new();
    for _ in 0..8 {
        let entry = queue.take(now).unwrap().entries.remove(0);
        queue.hold(entry, now, 0.0);
        queue.push(Row::Pair(pair(2, PairState::Open, Some(2), 1)), now);
        let other = queue.take(now).unwrap();
        assert_eq!((other.len(), other.pairs()[0].pair.master_ticket.get()), (1, 2));
        queue.settle(&other.entries[0].row);
        let wait = (0..).map(Duration::from_millis).find(|wait| {
            queue.take(now + *wait).map(|batch| queue.put_back(batch.entries[0].clone())).is_some()
        });
        waits.push(wait.unwrap());
        now += wait.unwrap();
    }
    assert!(waits.is_sorted(), "{waits:?}");
    assert_eq!((waits[0], waits[7]), (RETRY_FIRST, RETRY_MAX));
}

#[tokio::test(start_paused = true)]
async fn row_is_written_within_a_tenth_of_a_second() {
    let database = database();
    let (writer, _task) = start(&database);
    writer.push(Row::Pair(pair(1, PairState::Open, Some(9), 1)));
    tokio::time::sleep(Duration::from_millis(101)).await;
    assert_eq!(database.pairs().len(), 1);
    assert_eq!(writer.pending(account(11)), 0);
}

#[tokio::test(start_paused = true)]
async fn half_an_hour_without_database_keeps_one_row_a_pair_and_drains_afterwards() {
    let database = database();
    database.set_away(true);
    let (writer, _task) = start(&database);
    for version in 1..=1_800 {
        for ticket in 1..=30 {
            writer.push(Row::Pair(pair(ticket, PairState::Open, Some(ticket), version)));
        }
        writer.push(Row::AccountStatus(status("copying")));
        tokio::time::sleep(SECOND).await;
    }
    assert_eq!(writer.pending(account(11)), 31);
    assert!(database.pairs().is_empty());

    database.set_away(false);
    let flushed = tokio::time::timeout(RETRY_MAX + SECOND, writer.flush_account(account(11))).await;
    assert_eq!(flushed, Ok(Ok(())));
    assert!(database.pairs().iter().all(|row| row.pair.version == 1_800));
    assert_eq!(database.pairs().len(), 30);
}

#[tokio::test(start_paused = true)]
async fn flush_of_one_account_does_not_wait_for_the_locked_row_of_another() {
    let database = database();
    let other = account(12);
    database.set_owner(other, node("a"), token(1));
    database.add_link(LinkId::new(12).unwrap(), other);
    database.set_locked(other, true);
    let (writer, _task) = start(&database);
    let link = LinkId::new(12).unwrap();
    let mut of_other = PairRow { follower: other, ..pair(2, PairState::Open, Some(8), 1) };
    of_other.pair.link = link;
    writer.push(Row::Pair(of_other));
    writer.push(Row::Pair(pair(1, PairState::Open, Some(9), 1)));
    let flushed = tokio::time::timeout(SECOND, writer.flush_account(account(11))).await;
    assert_eq!(flushed, Ok(Ok(())));
    assert_eq!(writer.pending(other), 1);

    database.set_locked(other, false);
    let flushed = tokio::time::timeout(RETRY_MAX, writer.flush_account(other)).await;
    assert_eq!(flushed, Ok(Ok(())));
    assert_eq!(database.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn shutdown_writes_what_waits_and_takes_nothing_more() {
    let database = database();
    let (writer, task) = start(&database);
    writer.push(Row::CopyEvent(event(1)));
    writer.push(Row::Pair(pair(1, PairState::Open, Some(9), 1)));
    let left = writer.shutdown(SECOND).await;
    assert_eq!(left, LeftBehind { pairs: 0, statuses: 0, events: 0 });
    assert_eq!((database.pairs().len(), database.events().len()), (1, 1));
    task.await.unwrap();
    writer.push(Row::CopyEvent(event(2)));
    assert_eq!(writer.pending(account(11)), 0);
}

#[tokio::test(start_paused = true)]
async fn shutdown_keeps_its_deadline_while_the_database_is_away_and_says_what_is_lost() {
    let database = database();
    database.set_away(true);
    let (writer, _task) = start(&database);
    writer.push(Row::CopyEvent(event(1)));
    writer.push(Row::Pair(pair(1, PairState::Open, Some(9), 1)));
    let begun = Instant::now();
    let left = writer.shutdown(2 * SECOND).await;
    assert_eq!(left, LeftBehind { pairs: 1, statuses: 0, events: 1 });
    assert!(begun.elapsed() <= Duration::from_millis(2_200), "{:?}", begun.elapsed());
    assert_eq!(writer.flush_account(account(11)).await, Err(WriterStopped));
}

/// Answers each statement after a second.
struct SlowRows(MemoryRows);

impl RowSink for SlowRows {
    async fn persist(&self, batch: &Batch) -> Result<Vec<RowOutcome>, WriteError> {
        tokio::time::sleep(SECOND).await;
        self.0.persist(batch).await
    }

    async fn load_pairs(&self, follower: AccountId) -> Result<LoadedPairs, WriteError> {
        self.0.load_pairs(follower).await
    }

    fn timeline(&self) -> Option<u32> {
        None
    }

    async fn prepare(&self) -> Result<(), WriteError> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_that_has_time_for_two_batches_writes_pairs_and_leaves_events() {
    let database = database();
    let (writer, task) = Writer::new(WriterConfig::default());
    writer.push(Row::CopyEvent(event(1)));
    writer.push(Row::AccountStatus(status("copying")));
    writer.push(Row::Pair(pair(1, PairState::Open, Some(9), 1)));
    writer.push(Row::Pair(pair(2, PairState::Closed, Some(8), 1)));
    let sink = SlowRows(MemoryRows::new(database.clone(), node("a")));
    tokio::spawn(task.run(Arc::new(sink)));
    let left = writer.shutdown(Duration::from_millis(2_500)).await;
    assert_eq!(left, LeftBehind { pairs: 0, statuses: 1, events: 1 });
    assert_eq!(database.pairs().len(), 2);
}

/// One step in the life of a few pairs at one node.
#[derive(Debug, Clone)]
enum Step {
    Push(Box<PairRow>),
    /// The next batch is stored.
    Store,
    /// The next batch fails and comes back.
    Fail,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let row = (1..4_u64, 0..6_usize, 1..3_u64, 1..6_u64, 1..4_u64).prop_map(
        |(ticket, state, copy, version, tenure)| {
            let state = PairState::ALL[state];
            let copy = (state != PairState::Sending).then_some(copy);
            PairRow { token: token(tenure), ..pair(ticket, state, copy, version) }
        },
    );
    let step = prop_oneof![4 => row.prop_map(|row| Step::Push(Box::new(row))), 1 => Just(Step::Store), 1 => Just(Step::Fail)];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #[test]
    fn retry_delay_stays_inside_its_bounds(attempts: u32, jitter: f64) {
        let delay = retry_delay(attempts, if jitter.is_nan() { 0.0 } else { jitter });
        prop_assert!(delay >= RETRY_FIRST / 2 && delay <= RETRY_MAX);
    }

    // Whatever comes and fails: an ended ticket is stored as ended, no live row of the same
    // tenure outlives it, and the count of an account ends at zero.
    #[test]
    fn ended_wins_and_nothing_is_lost_in_any_order(steps in steps()) {
        let now = Instant::now();
        let mut queue = Queue::default();
        let mut stored: Vec<PairRow> = Vec::new();
        let mut pushed: Vec<PairRow> = Vec::new();
        let mut store = |queue: &mut Queue| {
            let Some(batch) = queue.take(now) else { return false };
            for entry in &batch.entries {
                queue.settle(&entry.row);
            }
            stored.extend(batch.pairs().into_iter().cloned());
            true
        };
        for step in steps {
            match step {
                Step::Push(row) => {
                    pushed.push((*row).clone());
                    queue.push(Row::Pair(*row), now);
                }
                Step::Store => { store(&mut queue); }
                Step::Fail => {
                    for entry in queue.take(now).into_iter().flat_map(|batch| batch.entries) {
                        queue.put_back(entry);
                    }
                }
            }
        }
        while store(&mut queue) {}
        prop_assert_eq!(queue.pending_of_all(), 0);
        prop_assert!(pushed.iter().all(|row| !queue.is_pair_pending(row.follower, row.pair.id)));

        let mut best: BTreeMap<_, PairRow> = BTreeMap::new();
        for row in pushed.iter().filter(|row| !row.has_ended()) {
            let held = best.entry(row.pair.id).or_insert_with(|| row.clone());
            if row.rank() > held.rank() {
                *held = row.clone();
            }
        }
        for row in pushed.iter().filter(|row| row.has_ended()) {
            let same = |s: &&PairRow| s.pair.id == row.pair.id && s.pair.follower_ticket == row.pair.follower_ticket;
            prop_assert!(stored.iter().filter(same).any(|s| s.has_ended() && s.rank() >= row.rank()));
        }
        for (id, row) in best {
            let ended = pushed.iter().any(|e| {
                e.pair.id == id && e.has_ended()
                    && (e.token >= row.token || e.pair.follower_ticket == row.pair.follower_ticket)
            });
            let is_best = |s: &&PairRow| s.pair.id == id && !s.has_ended() && s.rank() == row.rank();
            prop_assert!(ended || stored.iter().any(|s| is_best(&s)));
        }
    }
}
