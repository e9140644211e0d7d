//! No secret leaves a node: not in its log at its most talkative, not in a row, a message, a metric or
//! an answer, and not when something goes wrong (H76, S18).

use devstack::{FaultMode, FaultProxy, Nats, Tools, shared_postgres};
use futures_util::StreamExt;
use lockstep_tests::http::Client;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::State;
use lockstep_tests::scrape::MetricsPage;
use lockstep_tests::world::{Node, SOON, World, run_lockstep, until};
use paper::protocol::{AccountDecl, Password, Style};
use parking_lot::Mutex;
use sqlx::AssertSqlSafe;
use std::sync::Arc;

const BROKER: &str = "Kx7brokerQpassword";
const BROKER_WRONG: &str = "Zu3brokerQwrong";
const BUS: &str = "Nw5busQpassword";
const BUS_WRONG: &str = "Ht8busQwrong";
const DATABASE: &str = "Lm2databaseQpassword";
const DATABASE_WRONG: &str = "Vg6databaseQwrong";
/// The secret of a token that nobody made.
const TOKEN_WRONG: &str = "5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed";

/// Everything that was seen from outside, with the place where it was.
#[derive(Default)]
struct Seen(Vec<(String, String)>);

impl Seen {
    fn add(&mut self, place: &str, text: impl Into<String>) {
        self.0.push((place.to_owned(), text.into()));
    }

    fn add_log_of(&mut self, node: &Node) {
        for path in [node.process.stdout_path(), node.process.stderr_path()] {
            let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
            self.add(&format!("log of {}", node.name), text);
        }
    }

    /// Also as base64 and in hexadecimal, from any position in the encoded text.
    fn assert_without(&self, secret: &str) {
        let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        let mut forms = vec![secret.to_owned(), hex.clone(), hex.to_uppercase()];
        for skipped in 0..3 {
            forms.push(base64_middle(secret.as_bytes(), skipped));
        }
        for (place, text) in &self.0 {
            for form in &forms {
                if let Some(at) = text.find(form.as_str()) {
                    let around = text.get(at.saturating_sub(200)..).unwrap_or(&text[at..]);
                    let around: String = around.chars().take(300).collect();
                    panic!("{place} holds {secret} as {form}: {around}");
                }
            }
        }
    }
}

/// What base64 makes of the middle of these bytes, if so many come before them.
fn base64_middle(bytes: &[u8], before: usize) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let whole = &bytes[(3 - before) % 3..];
    let whole = &whole[..whole.len() / 3 * 3];
    let letters = whole.chunks(3).flat_map(|three| {
        let bits = u32::from(three[0]) << 16 | u32::from(three[1]) << 8 | u32::from(three[2]);
        [18, 12, 6, 0].map(|shift| char::from(LETTERS[(bits >> shift & 63) as usize]))
    });
    letters.collect()
}

/// A login that Postgres asks for its password.
async fn add_login_with_password(world: &World, login: &str) {
    assert_eq!(world.cli(&["roles", "apply"]).await.code, Some(0));
    let mut db = world.database().await;
    let file: String = sqlx::query_scalar("show hba_file").fetch_one(&mut db).await.unwrap();
    // The first line that fits counts, so that nobody else is asked.
    let sql = format!(
        "create role {login} login password '{DATABASE}' in role lockstep_node, lockstep_api;
         create temp table hba (number serial, line text);
         insert into hba (line) values ('host all {login} 127.0.0.1/32 scram-sha-256');
         copy hba (line) from '{file}';
         copy (select line from hba order by number) to '{file}';
         select pg_reload_conf()"
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut db).await.unwrap();
}

#[tokio::test]
async fn planted_secrets_are_nowhere_to_be_seen_whatever_goes_wrong() {
    let mut world = World::start("secrets").await;
    let mut seen = Seen::default();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let users = format!("authorization {{ user: fleet, password: {BUS} }}");
    let nats = Nats::start_with_config(&Tools::locate().unwrap(), &users).await.unwrap();
    let bus_url = |password: &str| format!("nats://fleet:{password}@{}", nats.addr());
    add_login_with_password(&world, "it_secret").await;
    let proxy = FaultProxy::start(shared_postgres().await.unwrap().addr()).await.unwrap();
    let by_proxy = world.database_url_by(&proxy);
    let (_, place) = by_proxy.rsplit_once('@').unwrap();
    let database_url = |password: &str| format!("postgres://it_secret:{password}@{place}");

    let external = world.add_external_account("master").await;
    let key = folder.path().join("key").display().to_string();
    let key_words = ["keys", "init", key.as_str()];
    let made = run_lockstep(&key_words, &[]).await;
    assert_eq!(made.code, Some(0));
    seen.add("keys init", made.stdout + &made.stderr);
    let master_key = std::fs::read_to_string(&key).unwrap().trim().to_owned();
    let mut followers = Vec::new();
    for (name, stored) in [("right", BROKER), ("wrong", BROKER_WRONG)] {
        let password = Some(Password::new(BROKER));
        let follower = world
            .add_declared_account(name, world.paper_addr, |account| AccountDecl {
                password,
                ..AccountDecl::new(account, Style::Mt5)
            })
            .await;
        world.add_link(external, follower, 1).await;
        followers.push(follower);
        let variables = [
            ("LOCKSTEP_DATABASE_URL", world.database_url.as_str()),
            ("LOCKSTEP_MASTER_KEY_FILE", &key),
        ];
        let password = file(name, stored);
        let arguments = ["account", "password", name, "--file", &password];
        let answer = run_lockstep(&arguments, &variables).await;
        assert_eq!(answer.code, Some(0), "{answer:?}");
        seen.add("account password", answer.stdout + &answer.stderr);
    }

    // Only the first one ever copies.
    world.links.truncate(1);

    // What goes over the bus, heard by somebody who may hear everything.
    let everything = bus::ClientSettings::new(vec![bus_url(BUS)], "listener");
    let listener = bus::connect(&everything).await.unwrap();
    let mut messages = listener.subscribe(">").await.unwrap();
    listener.flush().await.unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hearing = tokio::spawn({
        let heard = Arc::clone(&heard);
        async move {
            while let Some(message) = messages.next().await {
                let text = String::from_utf8_lossy(&message.payload).into_owned();
                heard.lock().push(format!("{} {text} {:?}", message.subject, message.headers));
            }
        }
    });

    let mut master = Master::start(vec![bus_url(BUS)], external).await;
    let page = MetricsPage::free().await;
    let talkative = |name: &str| {
        let spec = world.node(name).setting("LOCKSTEP_LOG", "trace");
        spec.setting("LOCKSTEP_MASTER_KEY_FILE", &key)
    };
    let api = Client::free().await;
    let a = talkative("a")
        .database(database_url(DATABASE))
        .nats(bus_url(BUS))
        .setting("LOCKSTEP_METRICS_LISTEN", page.address())
        .setting("LOCKSTEP_API_LISTEN", api.address())
        .start();
    world.until_session("copying", &followers[..1]).await;
    master.open("0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    // The other one is refused, and tried again.
    until("two refused logins", SOON, async || {
        (page.sum("lockstep_broker_session_open_failures_total").await >= 2.0).then_some(())
    })
    .await;
    let token = world.cli(&["token", "add", "seen", "--scope", "read"]).await.stdout;
    let (_, token_secret) = token.trim().rsplit_once('_').unwrap();
    for (shown, status) in [(token.trim(), 200), (&format!("lst_1_{TOKEN_WRONG}"), 401)] {
        let answer = api.with(shown).get("/v1/accounts").await;
        assert_eq!(answer.status, status);
        seen.add("API", format!("{answer:?}"));
        let answer = api.with(shown).put("/v1/fleet/mode", "{\"mode\": \"copy\"}").await;
        seen.add("API", format!("{answer:?}"));
    }

    // The database goes away, and comes back.
    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    until("a failed cycle", SOON, async || {
        let failed = |line: &str| !line.contains("confirmed");
        (page.sum_where("lockstep_lease_cycles_total", failed).await > 0.0).then_some(())
    })
    .await;
    proxy.set_mode(FaultMode::Pass).await.unwrap();
    world.until_session("copying", &followers[..1]).await;

    // Wrong passwords of a node's own.
    let shut_out = talkative("b").database(database_url(DATABASE_WRONG)).nats(bus_url(BUS)).start();
    let status = shut_out.process.wait(SOON).await.unwrap();
    assert_eq!(status.code(), Some(3));
    let unheard = talkative("c").database(database_url(DATABASE)).nats(bus_url(BUS_WRONG)).start();
    until("the bus refuses it", SOON, async || {
        let log = std::fs::read_to_string(nats.process().stderr_path()).unwrap();
        log.contains("authentication error").then_some(())
    })
    .await;
    for words in [&["node", "--settings"][..], &["node"], &["doctor"], &["config", "show"]] {
        let url = database_url(DATABASE);
        let bus = bus_url(BUS);
        let variables = [
            ("LOCKSTEP_DATABASE_URL", url.as_str()),
            ("LOCKSTEP_NATS_URLS", &bus),
            ("LOCKSTEP_MASTER_KEY", &master_key),
            // A fault, so that the node complains of its settings and ends.
            ("LOCKSTEP_FENSE", BROKER),
        ];
        let answer = run_lockstep(words, &variables).await;
        seen.add(&words.join(" "), answer.stdout + &answer.stderr);
    }
    for words in [
        &["status", "--json"][..],
        &["account", "list", "--json"],
        &["keys", "list"],
        &["token", "list"],
    ] {
        let answer = world.cli(words).await;
        seen.add(&words.join(" "), answer.stdout + &answer.stderr);
    }
    seen.add("metrics", page.text().await);
    let rows: Vec<String> = sqlx::query_scalar(
        "select t::text from (
             select to_jsonb(a) from trading_accounts a union all select to_jsonb(s) from account_status s
             union all select to_jsonb(c) from account_credentials c
             union all select to_jsonb(p) from pairs p union all select to_jsonb(e) from copy_events e
             union all select to_jsonb(n) from lease_nodes n union all select to_jsonb(t) from api_tokens t) t",
    )
    .fetch_all(&mut world.database().await)
    .await
    .unwrap();
    assert!(rows.iter().any(|row| row.contains("is missing or wrong")), "{rows:?}");
    seen.add("rows", rows.join("\n"));
    seen.add("ledger", serde_json::to_string(world.ledger().await.rows()).unwrap());
    for node in [&a, &unheard] {
        node.process.terminate().unwrap();
        node.process.wait(SOON).await.unwrap();
    }
    hearing.abort();
    let heard = heard.lock().join("\n");
    assert!(heard.contains("lockstep.v1.master."), "{heard}");
    seen.add("bus", heard);
    for node in [&a, &shut_out, &unheard] {
        seen.add_log_of(node);
    }
    // The net is one: what a node does say is in it.
    let log =
        &seen.0.iter().find(|(place, text)| place == "log of a" && !text.is_empty()).unwrap().1;
    assert!(log.contains("DEBUG async_nats") && log.contains("postgres://it_secret:***@"));
    let secrets = [BROKER, BROKER_WRONG, BUS, BUS_WRONG, DATABASE, DATABASE_WRONG];
    for secret in secrets.into_iter().chain([master_key.as_str(), token_secret, TOKEN_WRONG]) {
        if secret == BROKER {
            // The name of an unknown setting is told, its value is not.
            assert!(seen.0.iter().any(|(_, text)| text.contains("LOCKSTEP_FENSE")));
        }
        seen.assert_without(secret);
    }
}
