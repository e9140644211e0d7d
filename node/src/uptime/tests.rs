use super::store::{MinuteStore, read_last_day};
use super::task::Keeper;
use super::*;
use crate::database;
use devstack::{FaultMode, FaultProxy};
use sqlx::{Connection, Row};

const CYCLE: Duration = Duration::from_secs(20);
/// A whole minute, long ago.
const NOON: i64 = 1_700_000_040;

fn at(second: i64) -> Micros {
    Micros((NOON + second) * 1_000_000)
}

/// A look at a second after noon, with a lease cycle that was confirmed at another.
fn look(second: i64, confirmed: i64, missing: &[Reason]) -> Look {
    Look {
        at: at(second),
        lease_confirmed: Some(at(confirmed)),
        missing: missing.iter().copied().collect(),
    }
}

/// Looks every 5 s at these seconds, with a cycle confirmed every 20 s; the minutes that ended, as
/// (minute after noon, reasons).
fn minutes_of(
    record: &mut Record,
    seconds: std::ops::Range<i64>,
    missing: impl Fn(i64) -> Vec<Reason>,
) -> Vec<(i64, Vec<&'static str>)> {
    let looks = seconds.step_by(5).map(|second| look(second, second / 20 * 20, &missing(second)));
    looks.filter_map(|look| record.see(look)).map(|minute| words(&minute)).collect()
}

fn words(minute: &Minute) -> (i64, Vec<&'static str>) {
    let reasons = minute.reasons.iter().map(|reason| reason.as_str()).collect();
    ((minute.began.0 - at(0).0) / MINUTE_US, reasons)
}

fn fine(_: i64) -> Vec<Reason> {
    Vec::new()
}

#[test]
fn minutes_in_which_nothing_was_missing_are_ok() {
    let mut record = Record::new(CYCLE);
    assert_eq!(minutes_of(&mut record, 2..185, fine), [(0, vec![]), (1, vec![]), (2, vec![])]);
}

#[test]
fn a_minute_without_a_confirmed_cycle_is_degraded_and_the_next_with_one_is_not() {
    let mut record = Record::new(CYCLE);
    let confirmed = |second: i64| if second < 130 { 40 } else { 130 };
    let looks = (0..185).step_by(5).map(|second| look(second, confirmed(second), &[]));
    let minutes: Vec<_> = looks.filter_map(|look| record.see(look)).collect();
    let minutes: Vec<_> = minutes.iter().map(words).collect();
    assert_eq!(minutes, [(0, vec![]), (1, vec!["no account lease"]), (2, vec![])]);
}

#[test]
fn a_node_that_never_had_a_cycle_is_degraded() {
    let mut record = Record::new(CYCLE);
    let looks =
        (0..65).step_by(5).map(|second| Look { lease_confirmed: None, ..look(second, 0, &[]) });
    let minutes: Vec<_> = looks.filter_map(|look| record.see(look)).collect();
    assert_eq!(words(&minutes[0]), (0, vec!["no account lease"]));
}

#[test]
fn a_cycle_that_was_confirmed_after_the_last_look_of_a_minute_is_its_own() {
    let mut record = Record::new(CYCLE);
    let looks = (0..60).step_by(5).map(|second| look(second, -30, &[])).chain([look(60, 57, &[])]);
    let minutes: Vec<_> = looks.filter_map(|look| record.see(look)).collect();
    assert_eq!(words(&minutes[0]), (0, vec![]));
}

#[test]
fn cycles_that_are_longer_than_a_minute_leave_no_minute_without_a_lease() {
    let mut record = Record::new(Duration::from_secs(90));
    let looks = (0..305).step_by(5).map(|second| look(second, second / 90 * 90, &[]));
    let minutes: Vec<_> = looks.filter_map(|look| record.see(look)).collect();
    assert!(minutes.len() == 5 && minutes.iter().all(|m| m.reasons.is_empty()), "{minutes:?}");
}

#[test]
fn what_is_missing_at_two_looks_in_a_row_degrades_the_minute_of_the_second() {
    let mut record = Record::new(CYCLE);
    let missing = |second: i64| match second {
        30 => vec![Reason::Broker],
        // Alone, between two that found it.
        90 => vec![Reason::Bus, Reason::Database],
        115 | 120 | 125 => vec![Reason::Bus],
        _ => vec![],
    };
    assert_eq!(
        minutes_of(&mut record, 0..245, missing),
        [(0, vec![]), (1, vec![]), (2, vec!["bus"]), (3, vec![])]
    );
    let mut record = Record::new(CYCLE);
    let missing = |second: i64| match second {
        10 | 15 => vec![Reason::Broker, Reason::Bus],
        40 | 45 => vec![Reason::Database],
        _ => vec![],
    };
    assert_eq!(minutes_of(&mut record, 0..65, missing), [(0, vec!["bus", "database", "broker"])]);
}

#[test]
fn a_minute_that_was_not_seen_from_end_to_end_has_no_row() {
    // The node started in the middle of it.
    let mut record = Record::new(CYCLE);
    assert_eq!(minutes_of(&mut record, 20..125, fine), [(1, vec![])]);
    // The process stood still in the middle of one, and over the end of another.
    let mut record = Record::new(CYCLE);
    assert_eq!(minutes_of(&mut record, 0..10, fine), []);
    assert_eq!(minutes_of(&mut record, 40..100, fine), []);
    assert_eq!(minutes_of(&mut record, 600..665, fine), [(10, vec![])]);
}

#[test]
fn what_was_seen_to_be_missing_is_known_of_a_minute_that_was_seen_in_part() {
    let mut record = Record::new(CYCLE);
    let bus = |_| vec![Reason::Bus];
    assert_eq!(minutes_of(&mut record, 30..65, bus), [(0, vec!["bus"])]);
}

#[test]
fn a_clock_that_is_set_back_changes_no_minute_and_makes_none_twice() {
    let mut record = Record::new(CYCLE);
    assert_eq!(minutes_of(&mut record, 0..185, fine).len(), 3);
    let bus = |second| if second < 120 { vec![Reason::Bus] } else { vec![] };
    // Looks at three minutes that are decided, and then at two new ones.
    assert_eq!(minutes_of(&mut record, 0..305, bus), [(3, vec![]), (4, vec![])]);
    let waiting: Vec<_> = record.waiting(100).iter().map(words).collect();
    assert_eq!(waiting, (0..5).map(|minute| (minute, vec![])).collect::<Vec<_>>());
}

#[test]
fn minutes_wait_oldest_first_until_they_are_written_and_the_oldest_goes_when_it_is_full() {
    let mut record = Record::new(CYCLE);
    let minutes = WAITING_MAX as i64 + 2;
    minutes_of(&mut record, 0..minutes * 60 + 5, fine);
    let waiting = record.waiting(WAITING_MAX + 10);
    assert_eq!((waiting.len(), words(&waiting[0]).0), (WAITING_MAX, 2));
    let some = record.waiting(10);
    record.written(&some);
    assert_eq!((record.waiting(1)[0].began, some.len()), (at(12 * 60), 10));
}

/// Looks at every minute of a stretch that just ended, and writes what waits.
async fn live(keeper: &mut Keeper, minutes: std::ops::Range<i64>, missing: &[Reason]) {
    for second in (minutes.start * 60..minutes.end * 60 + 5).step_by(5) {
        let mut look = look(second, second, missing);
        if !keeper.ask().await {
            look.missing.insert(Reason::Database);
        }
        keeper.see(look).await;
    }
}

/// Minutes that are in the table, as (minute after noon, state, reasons).
async fn rows(db: &mut sqlx::PgConnection) -> Vec<(i64, String, Vec<String>)> {
    sqlx::query(
        "select (extract(epoch from minute)::bigint - $1) / 60 as minute, state, reasons \
         from node_minutes where node = 'node-a' order by minute",
    )
    .bind(NOON)
    .fetch_all(db)
    .await
    .unwrap()
    .iter()
    .map(|row| (row.get("minute"), row.get("state"), row.get("reasons")))
    .collect()
}

fn through(proxy: &FaultProxy, url: &str) -> String {
    let (before, database) = url.rsplit_once('/').unwrap();
    let (user, _) = before.rsplit_once('@').unwrap();
    format!("{user}@{}/{database}", proxy.addr())
}

#[tokio::test]
async fn minutes_are_written_late_after_the_database_was_away_and_never_twice() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    let proxy = FaultProxy::start(server.addr()).await.unwrap();
    let store = MinuteStore::new(&through(&proxy, &url), "node-a").unwrap();
    let mut keeper = Keeper::new(store, Record::new(CYCLE));
    let row = |minute: i64, reasons: &[&str]| {
        let state = if reasons.is_empty() { "ok" } else { "degraded" };
        (minute, state.to_owned(), reasons.iter().map(|r| (*r).to_owned()).collect::<Vec<_>>())
    };

    live(&mut keeper, 0..2, &[]).await;
    assert_eq!(rows(&mut db).await, [row(0, &[]), row(1, &[])]);

    proxy.set_mode(FaultMode::Refuse).await.unwrap();
    live(&mut keeper, 2..5, &[Reason::Broker]).await;
    assert_eq!(rows(&mut db).await.len(), 2, "the database is away");

    proxy.set_mode(FaultMode::Pass).await.unwrap();
    live(&mut keeper, 5..7, &[]).await;
    let away = ["database", "broker"];
    let mut expected: Vec<_> = (2..6).map(|minute| row(minute, &away)).collect();
    expected.splice(0..0, [row(0, &[]), row(1, &[])]);
    expected.push(row(6, &[]));
    assert_eq!(rows(&mut db).await, expected);

    // The answer to a statement was lost, and it is sent again; or a second process of the name.
    let mut again = MinuteStore::new(&url, "node-a").unwrap();
    let bus = Minute { began: at(60), reasons: [Reason::Bus].into() };
    again.write(&[bus]).await.unwrap();
    assert_eq!(rows(&mut db).await, expected);
}

#[tokio::test]
async fn minutes_that_the_database_refused_wait_for_the_next_time() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    let mut keeper = Keeper::new(MinuteStore::new(&url, "node-a").unwrap(), Record::new(CYCLE));
    // It answers, and has no such table.
    let rename = "alter table node_minutes rename to elsewhere";
    sqlx::query(rename).execute(&mut db).await.unwrap();
    live(&mut keeper, 0..2, &[]).await;
    let back = "alter table elsewhere rename to node_minutes";
    sqlx::query(back).execute(&mut db).await.unwrap();
    live(&mut keeper, 2..3, &[]).await;
    let minutes: Vec<i64> = rows(&mut db).await.iter().map(|(minute, ..)| *minute).collect();
    assert_eq!(minutes, [0, 1, 2]);
}

#[tokio::test]
async fn a_node_drops_its_own_oldest_minutes_and_nobody_elses() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    sqlx::query(
        "insert into node_minutes (node, minute, reasons) \
         select node, to_timestamp($1) - make_interval(days => days), '{}' \
         from unnest(array['node-a', 'node-b']) node, unnest(array[89, 91]) days",
    )
    .bind(NOON)
    .execute(&mut db)
    .await
    .unwrap();
    let mut store = MinuteStore::new(&url, "node-a").unwrap();
    store.write(&[Minute { began: at(0), reasons: Reasons::new() }]).await.unwrap();
    let left: Vec<(String, i64)> = sqlx::query_as(
        "select node, (extract(epoch from minute)::bigint - $1) / 86400 from node_minutes order by 1, 2",
    )
    .bind(NOON)
    .fetch_all(&mut db)
    .await
    .unwrap();
    let left: Vec<(&str, i64)> = left.iter().map(|(node, day)| (node.as_str(), *day)).collect();
    assert_eq!(left, [("node-a", -89), ("node-a", 0), ("node-b", -91), ("node-b", -89)]);
}

#[tokio::test]
async fn a_database_that_takes_no_rows_counts_as_away() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    let mut store = MinuteStore::new(&url, "node-a").unwrap();
    store.ask().await.unwrap();
    let read_only = "do $$ begin execute format(\
        'alter database %I set default_transaction_read_only = on', current_database()); end $$";
    sqlx::query(read_only).execute(&mut db).await.unwrap();
    let mut store = MinuteStore::new(&url, "node-a").unwrap();
    assert!(matches!(store.ask().await, Err(super::store::UptimeError::ReadOnly)));
}

#[tokio::test]
async fn the_table_knows_the_reasons_of_this_program_and_no_other() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    let insert =
        "insert into node_minutes (node, minute, reasons) values ($1, to_timestamp(0), $2)";
    let all: Vec<&str> = Reason::WORDS.to_vec();
    sqlx::query(insert).bind("all").bind(&all).execute(&mut db).await.unwrap();
    assert!(sqlx::query(insert).bind("one").bind(["weather"]).execute(&mut db).await.is_err());
    let constraint: String = sqlx::query_scalar(
        "select pg_get_constraintdef(oid) from pg_constraint \
         where conname = 'node_minutes_reasons_word'",
    )
    .fetch_one(&mut db)
    .await
    .unwrap();
    assert_eq!(constraint.matches("'::text").count(), Reason::WORDS.len(), "{constraint}");
}

#[tokio::test]
async fn status_tells_ok_degraded_and_missing_minutes_apart() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    // One transaction, and so one moment.
    let mut db = db.begin().await.unwrap();
    // Ten minutes until the latest whole one that may be written: the first five are ok, two have no
    // row, and the last three are degraded, the last for another reason. Another node began long ago.
    sqlx::query(
        "with last as (select date_trunc('minute', now() - interval '20 s') as until) \
         insert into node_minutes (node, minute, reasons) \
         select 'young', until - make_interval(mins => back), \
           case when back > 5 then '{}' when back = 1 then '{bus,broker}' else '{database}' end::text[] \
         from last, unnest(array[10, 9, 8, 7, 6, 3, 2, 1]) back \
         union all select 'old', until - make_interval(hours => hours), '{}' \
         from last, unnest(array[1, 30]) hours \
         union all select 'gone', until - interval '30 h', '{}' from last",
    )
    .execute(&mut *db)
    .await
    .unwrap();
    let nodes = read_last_day(&mut db).await.unwrap();
    let names: Vec<&str> = nodes.iter().map(|node| node.node.as_str()).collect();
    assert_eq!(names, ["old", "young"]);
    assert_eq!((nodes[0].ok_minutes, nodes[0].missing_minutes), (1, 24 * 60 - 1));
    let young = &nodes[1];
    assert_eq!((young.ok_minutes, young.degraded_minutes, young.missing_minutes), (5, 3, 2));
    assert!((young.ok_percent - 50.0).abs() < 0.01, "{young:?}");
    let runs: Vec<_> =
        young.degraded.iter().map(|time| (time.minutes, time.reasons.join(" "))).collect();
    assert_eq!(runs, [(1, "bus broker".to_owned()), (2, "database".to_owned())]);
}

#[tokio::test]
async fn a_node_has_ended_when_it_writes_no_minutes_and_none_of_its_processes_renews_a_lease() {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("uptime").await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    let mut db = db.begin().await.unwrap();
    sqlx::raw_sql(
        "insert into node_minutes (node, minute, reasons) \
         select node, date_trunc('minute', now()) - make_interval(mins => back), '{}' \
         from (values ('writes', 2), ('leases-only', 90), ('ended', 90), ('never-there', 90)) n (node, back); \
         insert into lease_nodes (node_id, platforms, capacity, owned, alive_until) values \
         ('leases-only-00000001', '{paper}', 9, 0, now() + interval '60 s'), \
         ('ended-00000002', '{paper}', 9, 0, now() - interval '10 min')",
    )
    .execute(&mut *db)
    .await
    .unwrap();
    let nodes = read_last_day(&mut db).await.unwrap();
    let states: Vec<_> = nodes.iter().map(|node| (node.node.as_str(), node.state)).collect();
    assert_eq!(
        states,
        [
            ("ended", "ended"),
            ("leases-only", "alive"),
            ("never-there", "ended"),
            ("writes", "alive")
        ]
    );
    let json = serde_json::to_value(&nodes[0]).unwrap();
    assert_eq!(json["state"], "ended");
    assert!(nodes[0].last_minute < nodes[3].last_minute, "{nodes:?}");
}
