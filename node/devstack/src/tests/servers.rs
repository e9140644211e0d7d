use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::{Connection, PgConnection, Row};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::{LIMIT, eventually, is_alive};
use crate::{FaultMode, FaultProxy, Nats, NatsCluster, Postgres, Tools, shared_postgres};

/// A client that speaks just enough of the protocol to see bytes move.
struct Client(BufReader<TcpStream>);

impl Client {
    async fn connect(server: &Nats) -> Self {
        let mut client = Self(BufReader::new(TcpStream::connect(server.addr()).await.unwrap()));
        client.expect("INFO ").await;
        client.send("CONNECT {\"verbose\":false}\r\nPING\r\n").await;
        client.expect("PONG").await;
        client
    }

    async fn send(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).await.unwrap();
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        line
    }

    async fn expect(&mut self, start: &str) {
        let line = tokio::time::timeout(LIMIT, self.line()).await.unwrap();
        assert!(line.starts_with(start), "{line:?} instead of {start:?}");
    }

    async fn is_silent(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(200), self.line()).await.is_err()
    }
}

#[tokio::test]
async fn two_servers_get_ports_of_their_own() {
    let tools = Tools::locate().unwrap();
    let (one, two) = (Nats::start(&tools).await.unwrap(), Nats::start(&tools).await.unwrap());
    assert_ne!(one.url(), two.url());
    Client::connect(&one).await;
    Client::connect(&two).await;
}

#[tokio::test]
async fn a_killed_server_comes_back_on_the_same_port() {
    let nats = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    Client::connect(&nats).await;
    let url = nats.url();
    nats.kill().unwrap();
    assert!(TcpStream::connect(nats.addr()).await.is_err());
    nats.restart().await.unwrap();
    assert_eq!(nats.url(), url);
    Client::connect(&nats).await;
}

#[tokio::test]
async fn a_frozen_server_keeps_its_connections_and_answers_late() {
    let nats = Nats::start(&Tools::locate().unwrap()).await.unwrap();
    let mut client = Client::connect(&nats).await;
    nats.freeze().unwrap();
    client.send("PING\r\n").await;
    assert!(client.is_silent().await);
    nats.thaw().unwrap();
    client.expect("PONG").await;
}

#[tokio::test]
async fn configuration_lines_reach_the_server() {
    let tools = Tools::locate().unwrap();
    let nats = Nats::start_with_config(&tools, "max_payload: 4096").await.unwrap();
    assert_eq!(nats.monitor("/varz").await.unwrap()["max_payload"], 4096);
}

#[tokio::test]
async fn a_configuration_the_server_refuses_is_reported_with_its_words() {
    let tools = Tools::locate().unwrap();
    let error = Nats::start_with_config(&tools, "max_payload: \"much\"").await.unwrap_err();
    assert!(error.to_string().contains("nats.conf:6"), "{error}");
}

async fn message_crosses(from: &Nats, to: &Nats) {
    let mut subscriber = Client::connect(to).await;
    subscriber.send("SUB crossing 1\r\nPING\r\n").await;
    subscriber.expect("PONG").await;
    let mut publisher = Client::connect(from).await;
    // The interest travels over the route behind the subscription; so it is sent until it arrives.
    eventually("the message crosses", async || {
        publisher.send("PUB crossing 2\r\nhi\r\n").await;
        !subscriber.is_silent().await
    })
    .await;
}

#[tokio::test]
async fn a_cluster_of_three_is_joined_and_each_of_them_may_die_and_come_back() {
    let cluster = NatsCluster::start(&Tools::locate().unwrap(), 3).await.unwrap();
    assert_eq!(cluster.urls().iter().collect::<BTreeSet<_>>().len(), 3);
    assert_eq!(cluster.url_list(), cluster.urls().join(","));
    for number in 0..3 {
        let (victim, other) = (cluster.server(number), cluster.server((number + 1) % 3));
        message_crosses(other, victim).await;
        victim.kill().unwrap();
        message_crosses(other, cluster.server((number + 2) % 3)).await;
        victim.restart().await.unwrap();
        cluster.wait_for_routes().await.unwrap();
        message_crosses(other, victim).await;
    }
}

async fn one(connection: &mut PgConnection, query: &'static str) -> String {
    sqlx::query(query).fetch_one(connection).await.unwrap().get(0)
}

#[tokio::test]
async fn every_test_gets_an_empty_database_of_its_own() {
    let postgres = shared_postgres().await.unwrap();
    let made = at_once(8, || postgres.create_database("Same name!")).await;
    let urls: BTreeSet<String> = made.into_iter().map(Result::unwrap).collect();
    assert_eq!(urls.len(), 8);
    for url in &urls {
        assert!(url.contains("/same_name_"), "{url}");
        let mut connection = PgConnection::connect(url).await.unwrap();
        sqlx::query("CREATE TABLE t (id int)").execute(&mut connection).await.unwrap();
    }
}

/// Runs the same thing so many times at once.
async fn at_once<T, F>(count: usize, make: impl Fn() -> F) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let tasks: Vec<_> = (0..count).map(|_| tokio::spawn(make())).collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

#[tokio::test]
async fn the_server_keeps_commit_semantics_and_never_runs_as_root() {
    let postgres = shared_postgres().await.unwrap();
    let mut connection = PgConnection::connect(&postgres.url("postgres")).await.unwrap();
    assert_eq!(one(&mut connection, "SHOW synchronous_commit").await, "on");
    assert_eq!(one(&mut connection, "SHOW max_connections").await, "200");
    assert_eq!(one(&mut connection, "SHOW timezone").await, "UTC");
    assert_eq!(one(&mut connection, "SHOW server_encoding").await, "UTF8");
    let pid = postgres.process().pid().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let ids = |kind: &str| -> Vec<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(kind)).unwrap();
        line.split_whitespace().map(|id| id.parse().unwrap()).collect()
    };
    assert!(!ids("Uid:").contains(&0) && !ids("Gid:").contains(&0) && !ids("Groups:").contains(&0));
}

#[tokio::test]
async fn what_was_committed_is_there_after_a_crash_and_a_restart() {
    let postgres = Postgres::start(&Tools::locate().unwrap()).await.unwrap();
    let url = postgres.create_database("kept").await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::query("CREATE TABLE t AS SELECT 'kept' AS word").execute(&mut connection).await.unwrap();
    postgres.stop().await.unwrap();
    assert!(sqlx::query("SELECT 1").execute(&mut connection).await.is_err());
    assert!(PgConnection::connect(&url).await.is_err());
    postgres.restart().await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    assert_eq!(one(&mut connection, "SELECT word FROM t").await, "kept");
}

#[tokio::test]
async fn a_dropped_postgres_is_gone_with_its_sessions_and_its_folder() {
    let postgres = Postgres::start(&Tools::locate().unwrap()).await.unwrap();
    let mut connection = PgConnection::connect(&postgres.url("postgres")).await.unwrap();
    let session = one(&mut connection, "SELECT pg_backend_pid()::text").await.parse().unwrap();
    let server = postgres.process().pid().unwrap();
    let folder = postgres.process().stdout_path().parent().unwrap().to_owned();
    assert!(is_alive(session) && is_alive(server) && folder.is_dir());
    drop(postgres);
    assert!(!is_alive(server) && !folder.exists());
    eventually("the session is gone", async || !is_alive(session)).await;
}

#[tokio::test]
async fn a_server_whose_programs_others_may_not_read_still_starts() {
    let tools = Tools::locate().unwrap();
    let Some(tree) = tools.postgres_tree.clone() else {
        // Installed programs, not the project's: everybody may read those.
        return;
    };
    let closed = tempfile::tempdir().unwrap();
    let copy = closed.path().join("postgres");
    crate::postgres::copy_tree(&tree, &copy).unwrap();
    let below = tools.postgres_bin.strip_prefix(&tree).unwrap();
    let tools =
        Tools { postgres_bin: copy.join(below), postgres_tree: Some(copy.clone()), ..tools };
    let postgres = Postgres::start(&tools).await.unwrap();
    PgConnection::connect(&postgres.url("postgres")).await.unwrap();
}

#[tokio::test]
async fn a_replica_follows_and_when_promoted_lacks_what_it_was_cut_off_from() {
    let tools = Tools::locate().unwrap();
    let primary = Postgres::start(&tools).await.unwrap();
    let url = primary.create_database("world").await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::query("CREATE TABLE t AS SELECT 1 AS n").execute(&mut connection).await.unwrap();
    let link = FaultProxy::start(primary.addr()).await.unwrap();
    let replica = primary.start_replica(&tools, link.addr()).await.unwrap();
    sqlx::query("INSERT INTO t VALUES (2)").execute(&mut connection).await.unwrap();
    replica.wait_until_caught_up(&primary).await.unwrap();

    link.set_mode(FaultMode::BlackHole).await.unwrap();
    sqlx::query("INSERT INTO t VALUES (3)").execute(&mut connection).await.unwrap();
    let timeline = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)";
    let before = one(&mut connection, timeline).await;
    primary.stop().await.unwrap();
    replica.promote().await.unwrap();

    let mut connection = PgConnection::connect(&replica.url("world_0")).await.unwrap();
    let rows = "SELECT string_agg(n::text, ' ' ORDER BY n) FROM t";
    assert_eq!(one(&mut connection, rows).await, "1 2");
    assert_ne!(one(&mut connection, timeline).await, before);
    sqlx::query("INSERT INTO t VALUES (4)").execute(&mut connection).await.unwrap();
    let third = replica.start_replica(&tools, replica.addr()).await.unwrap();
    third.wait_until_caught_up(&replica).await.unwrap();
    let mut connection = PgConnection::connect(&third.url("world_0")).await.unwrap();
    assert_eq!(one(&mut connection, rows).await, "1 2 4");
    assert_eq!(replica.create_database("world").await.unwrap(), replica.url("world_1"));
}

#[tokio::test]
async fn a_replica_made_under_load_has_every_row() {
    let tools = Tools::locate().unwrap();
    let primary = Postgres::start(&tools).await.unwrap();
    let url = primary.create_database("busy").await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::query("CREATE TABLE t (n bigint)").execute(&mut connection).await.unwrap();
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let writing = tokio::spawn(async move {
        let mut written: i64 = 0;
        while stopped.try_recv().is_err() {
            let insert = sqlx::query("INSERT INTO t VALUES ($1)").bind(written);
            insert.execute(&mut connection).await.unwrap();
            written += 1;
        }
        written
    });
    let replica = primary.start_replica(&tools, primary.addr()).await.unwrap();
    stop.send(()).unwrap();
    let written = writing.await.unwrap();
    replica.wait_until_caught_up(&primary).await.unwrap();
    let mut connection = PgConnection::connect(&replica.url("busy_0")).await.unwrap();
    let count = one(&mut connection, "SELECT count(*)::text FROM t").await;
    assert_eq!(count, written.to_string());
    assert!(written > 0);
}

#[tokio::test]
async fn a_lame_duck_closes_its_clients_ends_and_comes_back() {
    let tools = Tools::locate().unwrap();
    let settings = "lame_duck_duration: \"30s\"\nlame_duck_grace_period: \"100ms\"";
    let cluster = NatsCluster::start_unadvertised(&tools, 2, settings).await.unwrap();
    let (duck, other) = (cluster.server(0), cluster.server(1));
    let mut client = Client::connect(duck).await;
    duck.lame_duck().unwrap();
    assert_eq!(tokio::time::timeout(LIMIT, client.line()).await.unwrap(), "");
    duck.process().wait(LIMIT).await.unwrap();
    duck.restart().await.unwrap();
    message_crosses(other, duck).await;
}

#[tokio::test]
async fn an_unadvertised_cluster_tells_its_clients_of_no_other_server() {
    let tools = Tools::locate().unwrap();
    for advertised in [true, false] {
        let cluster = match advertised {
            true => NatsCluster::start(&tools, 2).await.unwrap(),
            false => NatsCluster::start_unadvertised(&tools, 2, "").await.unwrap(),
        };
        let stream = TcpStream::connect(cluster.server(0).addr()).await.unwrap();
        let mut info = String::new();
        BufReader::new(stream).read_line(&mut info).await.unwrap();
        let other = cluster.server(1).addr().to_string();
        assert_eq!(info.contains(&other), advertised, "{info}");
    }
}
