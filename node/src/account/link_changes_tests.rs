use super::*;
use devstack::{FaultMode, FaultProxy};

/// A test that waits for longer than this has failed.
const PATIENCE: Duration = Duration::from_secs(20);

const QUICK: Keeping = Keeping {
    ask_after: Duration::from_millis(100),
    limit: Duration::from_millis(500),
    retry: Duration::from_millis(50),
};

/// A database, a way to it that can be broken, and the number of somebody who listens by it.
async fn listening(keeping: Keeping) -> (FaultProxy, String, watch::Receiver<u64>) {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database("links").await.unwrap();
    let proxy = FaultProxy::start(server.addr()).await.unwrap();
    let (before, database) = url.rsplit_once('/').unwrap();
    let (user, _) = before.rsplit_once('@').unwrap();
    let way = format!("{user}@{}/{database}", proxy.addr());
    let (raised, mut number) = watch::channel(0);
    tokio::spawn(async move { keep_listening(&way, &raised, keeping).await });
    rises(&mut number, "it listens").await;
    (proxy, url, number)
}

async fn rises(number: &mut watch::Receiver<u64>, why: &str) {
    tokio::time::timeout(PATIENCE, number.changed()).await.expect(why).unwrap();
}

#[tokio::test]
async fn a_change_is_heard() {
    let (_proxy, url, mut number) = listening(KEEPING).await;
    let mut db = database::connect(&url, "test").await.unwrap();
    sqlx::query("select pg_notify('lockstep_links', '1')").execute(&mut db).await.unwrap();
    rises(&mut number, "the change").await;
}

#[tokio::test]
async fn what_changed_while_the_connection_was_away_is_looked_for() {
    let (proxy, _url, mut number) = listening(Keeping { ask_after: PATIENCE, ..QUICK }).await;
    proxy.reset_connections().await.unwrap();
    rises(&mut number, "a new connection").await;
}

#[tokio::test]
async fn a_connection_that_does_not_answer_any_more_is_made_anew() {
    let (proxy, _url, mut number) = listening(QUICK).await;
    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    // Long enough to be asked and given up, several times over.
    tokio::time::sleep((QUICK.ask_after + QUICK.limit) * 4).await;
    assert!(!number.has_changed().unwrap(), "nothing gets through");
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    rises(&mut number, "a new connection").await;
}

#[tokio::test]
async fn a_quiet_connection_that_answers_is_kept() {
    let (_proxy, url, mut number) = listening(QUICK).await;
    let mut db = database::connect(&url, "test").await.unwrap();
    let asked = "select count(*) from pg_stat_activity where application_name = 'lockstep-links'
                 and datname = current_database() and query = 'select 1'";
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while sqlx::query_scalar::<_, i64>(asked).fetch_one(&mut db).await.unwrap() == 0 {
        assert!(tokio::time::Instant::now() < deadline, "it is never asked");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!number.has_changed().unwrap(), "it was not made anew");
    sqlx::query("select pg_notify('lockstep_links', '1')").execute(&mut db).await.unwrap();
    rises(&mut number, "a change after it was asked").await;
}
