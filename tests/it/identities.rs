//! A cluster made by `lockstep nats`: who may say and hear what (H74).

use async_nats::ConnectOptions;
use bus::ClientSettings;
use devstack::{ManagedProcess, ProcessSpec, Tools};
use futures_util::StreamExt;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{CliOutput, SOON, World, run_lockstep, until};
use rustix::process::{Pid, Signal, kill_process};
use schemas::{AccountId, subject};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// How often servers are started anew because somebody took a port meanwhile.
const STARTS_MAX: usize = 5;

/// A message that did not arrive by then is said again.
const HEARD_WITHIN: Duration = Duration::from_millis(200);

/// A cluster on this machine, from the files that `lockstep nats init` wrote.
struct Secured {
    home: tempfile::TempDir,
    servers: Vec<ManagedProcess>,
}

async fn nats(arguments: &[&str]) -> CliOutput {
    run_lockstep(&[&["nats"], arguments].concat(), &[]).await
}

async fn done(arguments: &[&str]) -> String {
    let output = nats(arguments).await;
    assert_eq!(output.code, Some(0), "{arguments:?}: {output:?}");
    output.stdout
}

fn free_ports(count: usize) -> Vec<u16> {
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

async fn init(folder: &str, ports: &[u16], users: &[&str]) {
    let servers: Vec<String> =
        ports.chunks(2).map(|p| format!("--server=127.0.0.1:{}:{}", p[0], p[1])).collect();
    let servers: Vec<&str> = servers.iter().map(String::as_str).collect();
    done(&[&["init", folder], &servers[..], users].concat()).await;
}

/// The folders of the servers of a cluster, by name.
fn server_folders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

fn start_server(folder: &Path) -> ManagedProcess {
    ProcessSpec::new("nats", Tools::locate().unwrap().nats_server)
        .args(["-c", "nats.conf"])
        .current_dir(folder)
        .start()
        .unwrap()
}

impl Secured {
    async fn start(users: &[&str]) -> Secured {
        Secured::start_with(3, users).await
    }

    async fn start_with(servers: usize, users: &[&str]) -> Secured {
        for _ in 0..STARTS_MAX {
            let home = tempfile::tempdir().unwrap();
            let folder = home.path().join("bus");
            init(folder.to_str().unwrap(), &free_ports(2 * servers), users).await;
            let servers: Vec<_> = server_folders(&folder).iter().map(|f| start_server(f)).collect();
            let secured = Secured { home, servers };
            if secured.is_up().await {
                return secured;
            }
        }
        panic!("no cluster after {STARTS_MAX} tries");
    }

    /// False if a server ended: somebody had taken its port.
    async fn is_up(&self) -> bool {
        until("the servers have routes to each other", SOON, async || {
            if self.servers.iter().any(|server| server.try_wait().unwrap().is_some()) {
                return Some(false);
            }
            let joined = |server: &ManagedProcess| {
                let log = std::fs::read_to_string(server.stderr_path()).unwrap();
                log.contains("Server is ready")
                    && log.matches("Route connection created").count() + 1 >= self.servers.len()
            };
            self.servers.iter().all(joined).then_some(true)
        })
        .await
    }

    fn folder(&self) -> PathBuf {
        self.home.path().join("bus")
    }

    /// The settings of a user, from its file.
    fn settings(&self, user: &str) -> BTreeMap<String, String> {
        let text = std::fs::read_to_string(self.folder().join(format!("{user}.env"))).unwrap();
        let pairs = text.lines().map(|line| line.split_once('=').unwrap());
        let unquoted = |value: &str| value.trim_matches('\'').to_owned();
        pairs.map(|(name, value)| (name.to_owned(), unquoted(value))).collect()
    }

    /// A connection of this user, as a process of ours makes it.
    async fn client(&self, user: &str) -> async_nats::Client {
        let settings = self.settings(user);
        let urls = settings["LOCKSTEP_NATS_URLS"].split(',').map(str::to_owned).collect();
        let settings = ClientSettings {
            root_certificates: Some(PathBuf::from(&settings["LOCKSTEP_NATS_ROOT_CERTIFICATES"])),
            ..ClientSettings::new(urls, user)
        };
        let client = bus::connect(&settings).await.unwrap();
        until("connected", SOON, async || is_connected(&client).then_some(())).await;
        client
    }

    /// `nats-server --signal reload`.
    fn reload(&self) {
        for server in &self.servers {
            let pid = Pid::from_raw(server.pid().unwrap() as i32).unwrap();
            kill_process(pid, Signal::HUP).unwrap();
        }
    }
}

fn is_connected(client: &async_nats::Client) -> bool {
    client.connection_state() == async_nats::connection::State::Connected
}

fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

#[tokio::test]
async fn a_fleet_copies_over_a_cluster_where_everybody_may_do_his_own_part_alone() {
    let mut world = World::start("identities").await;
    let master = world.add_external_account("master").await;
    world.add_followers(master, 3).await;
    let publisher = format!("--publisher=alice={master}");
    let mut bus = Secured::start(&["--node=node-1", "--node=node-2", &publisher]).await;
    let node = |name: &str, user: &str| {
        let settings = bus.settings(user);
        settings.iter().fold(world.node(name), |node, (name, value)| node.setting(name, value))
    };
    let alice = bus.client("alice").await;
    let mut master = Master::start_on(alice, master);
    let _a = node("a", "node-1").setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    let _b = node("b", "node-2").setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    world.until_copying().await;
    master.open_many(4, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    // Who was at this server goes to one that it was told of, with its name and its secret.
    bus.servers.remove(0).kill().unwrap();
    let closed = master.open_many(1, "0.20");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    master.close(closed[0]);
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}

#[tokio::test]
async fn a_publisher_cannot_speak_for_another_master_nor_answer_for_it_nor_hear_it() {
    let bus = Secured::start(&["--node=node-1", "--publisher=alice=7"]).await;
    let (node, alice) = (bus.client("node-1").await, bus.client("alice").await);
    let inbox = node.new_inbox();
    assert!(inbox.starts_with("_INBOX.node-1."), "{inbox}");
    let all = node.subscribe("lockstep.v1.>").await.unwrap();
    let answers = node.subscribe(inbox.clone()).await.unwrap();
    let replies = node.subscribe("lockstep-reply.v1.>").await.unwrap();
    let heard = futures_util::stream::select(all, answers);
    let mut heard = futures_util::stream::select(heard, replies);
    let mut of_seven = alice.subscribe(subject::master_all(account(7))).await.unwrap();
    let mut of_eight = alice.subscribe(subject::master_all(account(8))).await.unwrap();
    let mut of_all = alice.subscribe("lockstep.v1.>").await.unwrap();

    let denied = [
        subject::event(account(8)),
        subject::beacon(account(8)),
        subject::snapshot(account(7)),
        subject::timeline(1),
        subject::reply(account(8), "x"),
        inbox,
    ];
    // Who may send a message to himself gets no leave from it to answer just anywhere.
    let own = alice.new_inbox();
    let mut echoes = alice.subscribe(own.clone()).await.unwrap();
    for subject in denied.iter().cloned() {
        alice.publish_with_reply(own.clone(), subject, "to myself".into()).await.unwrap();
        tokio::time::timeout(SOON, echoes.next()).await.unwrap().unwrap();
    }
    let first = loop {
        for subject in denied.iter().cloned().chain([subject::event(account(7))]) {
            alice.publish(subject, "from alice".into()).await.unwrap();
        }
        // Until the servers have told each other of the subscription.
        let next = tokio::time::timeout(HEARD_WITHIN, heard.next()).await;
        if let Ok(message) = next {
            break message.unwrap();
        }
    };
    // In the order in which it was said: everything else was said before.
    assert_eq!(first.subject.as_str(), subject::event(account(7)));

    loop {
        node.publish(subject::event(account(8)), "from the node".into()).await.unwrap();
        node.publish(subject::event(account(7)), "from the node".into()).await.unwrap();
        let next = tokio::time::timeout(HEARD_WITHIN, of_seven.next()).await;
        if next.is_ok_and(|message| message.unwrap().payload == "from the node") {
            break;
        }
    }
    for quiet in [&mut of_eight, &mut of_all] {
        // What was denied has ended, or is silent.
        let said = futures_util::FutureExt::now_or_never(quiet.next());
        assert!(said.flatten().is_none(), "alice hears master 8");
    }
}

#[tokio::test]
async fn playing_a_history_for_a_master_of_somebody_else_ends_at_the_first_refusal() {
    let bus = Secured::start_with(1, &["--publisher=alice=7"]).await;
    let settings = bus.settings("alice");
    let variables: Vec<(&str, &str)> =
        settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let play = ["publish", "--history", "demo", "--account", "8"];
    let refused = run_lockstep(&play, &variables).await;
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(refused.stderr.contains("may not speak for account 8"), "{refused:?}");
}

#[tokio::test]
async fn a_monitor_hears_trades_and_says_nothing() {
    // One server, which handles what one connection says in its order.
    let bus = Secured::start_with(1, &["--monitor=grafana", "--publisher=alice=7"]).await;
    let (alice, monitor) = (bus.client("alice").await, bus.client("grafana").await);
    let mut said = alice.subscribe(subject::master_all(account(7))).await.unwrap();
    let inbox = alice.new_inbox();
    let mut echo = alice.subscribe(inbox.clone()).await.unwrap();
    alice.publish(inbox, "echo".into()).await.unwrap();
    tokio::time::timeout(SOON, echo.next()).await.unwrap().unwrap();
    monitor.publish(subject::event(account(7)), "from the monitor".into()).await.unwrap();
    // The server hears of this after that.
    let mut heard = monitor.subscribe("lockstep.v1.master.>").await.unwrap();
    until("the monitor hears alice", SOON, async || {
        alice.publish(subject::event(account(7)), "from alice".into()).await.unwrap();
        tokio::time::timeout(HEARD_WITHIN, heard.next()).await.ok().flatten()
    })
    .await;
    let first = tokio::time::timeout(SOON, said.next()).await.unwrap().unwrap();
    assert_eq!(first.payload, "from alice");
}

#[tokio::test]
async fn an_operator_asks_owners_and_neither_hears_trades_nor_speaks_of_them() {
    let mut world = World::start("identities-operator").await;
    let master = world.add_external_account("master").await;
    let follower = world.add_paper_account("one", paper::protocol::Style::Mt5).await;
    world.add_link(master, follower, 1).await;
    let publisher = format!("--publisher=alice={master}");
    // One server, which handles what one connection says in its order.
    let users = ["--node=node-1", "--operator=olga", "--operator=otto", &publisher];
    let bus = Secured::start_with(1, &users).await;
    let node = bus
        .settings("node-1")
        .iter()
        .fold(world.node("a"), |node, (name, value)| node.setting(name, value));
    let _node = node.start();
    let _master = Master::start_on(bus.client("alice").await, master);
    world.until_copying().await;
    let ask = async |user: &str| {
        let settings = bus.settings(user);
        let mut variables = vec![("LOCKSTEP_DATABASE_URL", world.database_url.as_str())];
        variables.extend(settings.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        run_lockstep(&["reconcile", "one", "--dry-run"], &variables).await
    };
    assert_eq!(ask("olga").await.code, Some(0));
    assert_eq!(ask("node-1").await.code, Some(0));
    // Who is no operator gets no answer.
    assert_eq!(ask("alice").await.code, Some(3));

    let (olga, node) = (bus.client("olga").await, bus.client("node-1").await);
    let mut all = node.subscribe("lockstep.v1.>").await.unwrap();
    let mut overheard = olga.subscribe(subject::control_replies("otto")).await.unwrap();
    let mut trades = olga.subscribe("lockstep.v1.master.>").await.unwrap();
    let own = subject::control_reply("olga.x");
    let mut echoes = olga.subscribe(own.clone()).await.unwrap();
    let denied = [
        subject::event(master),
        subject::beacon(master),
        subject::snapshot(master),
        subject::timeline(1),
        subject::reply(master, "x"),
        subject::control_reply("otto.x"),
    ];
    for subject in denied.iter().cloned().chain([own]) {
        olga.publish(subject, "from olga".into()).await.unwrap();
    }
    tokio::time::timeout(SOON, echoes.next()).await.unwrap().unwrap();
    // The server heard what was denied before that, and this after it.
    node.publish(subject::timeline(1), "from the node".into()).await.unwrap();
    node.publish(subject::control_reply("otto.x"), "from the node".into()).await.unwrap();
    loop {
        let message = tokio::time::timeout(SOON, all.next()).await.unwrap().unwrap();
        assert_ne!(message.payload, "from olga", "{}", message.subject);
        if message.payload == "from the node" {
            break;
        }
    }
    for quiet in [&mut overheard, &mut trades] {
        let said = futures_util::FutureExt::now_or_never(quiet.next());
        assert!(said.flatten().is_none(), "olga hears what is not hers");
    }
}

#[tokio::test]
async fn certificates_are_made_anew_without_a_moment_in_which_nobody_gets_in() {
    let bus = Secured::start_with(1, &["--node=node-1"]).await;
    let folder = bus.folder();
    let old = bus.home.path().join("old.pem");
    std::fs::copy(folder.join("ca.pem"), &old).unwrap();
    let said = done(&["renew", folder.to_str().unwrap()]).await;
    assert!(said.contains("valid until 20") && said.contains("--signal reload"), "{said}");
    let listed = done(&["list", folder.to_str().unwrap()]).await;
    assert!(listed.contains("node-1") && listed.contains("valid until 20"), "{listed}");
    // The server has its old certificate still; who has the new file believes both.
    drop(bus.client("node-1").await);
    bus.reload();
    let settings = |root: PathBuf| {
        let settings = bus.settings("node-1");
        let urls = vec![settings["LOCKSTEP_NATS_URLS"].clone()];
        ClientSettings { root_certificates: Some(root), ..ClientSettings::new(urls, "x") }
    };
    let with_the_old = settings(old);
    until("the server has its new certificate", SOON, async || {
        let client = bus::connect(&with_the_old).await.unwrap();
        let refused = bus::connected(&client, &with_the_old).await.err()?;
        matches!(refused.servers[..], [(_, bus::Refusal::Tls(_))]).then_some(())
    })
    .await;
    drop(bus.client("node-1").await);
    // The next time the eldest is forgotten.
    done(&["renew", folder.to_str().unwrap()]).await;
    let believed = std::fs::read_to_string(folder.join("ca.pem")).unwrap();
    assert_eq!(believed.matches("BEGIN CERTIFICATE").count(), 2);
}

#[tokio::test]
async fn why_the_bus_lets_nobody_in_is_told_apart() {
    let bus = Secured::start_with(1, &["--node=node-1"]).await;
    let settings = bus.settings("node-1");
    let (good, root) =
        (&settings["LOCKSTEP_NATS_URLS"], &settings["LOCKSTEP_NATS_ROOT_CERTIFICATES"]);
    let (login, place) = good.rsplit_once('@').unwrap();
    let (user, secret) = login.strip_prefix("tls://").unwrap().split_once(':').unwrap();
    let other = bus.home.path().join("other");
    init(other.to_str().unwrap(), &free_ports(2), &["--node=node-1"]).await;
    let strange = other.join("ca.pem").display().to_string();
    let free = free_ports(1)[0];
    let cases = [
        (format!("tls://{user}:wrong-{secret}@{place}"), root, "refuses the user \"node-1\""),
        (format!("tls://nobody:{secret}@{place}"), root, "refuses the user \"nobody\""),
        (format!("tls://{place}"), root, "without a user"),
        (good.clone(), &strange, "TLS failed: invalid peer certificate"),
        (format!("tls://{login}@127.0.0.1:{free}"), root, "nobody listens there"),
    ];
    let url = "postgres://nobody@127.0.0.1:1/x";
    for (urls, root, told) in &cases {
        let urls = urls.replace("tls://tls://", "tls://");
        let variables = [
            ("LOCKSTEP_DATABASE_URL", url),
            ("LOCKSTEP_NATS_URLS", &urls),
            ("LOCKSTEP_NATS_ROOT_CERTIFICATES", root),
        ];
        let output = run_lockstep(&["doctor", "--json"], &variables).await;
        let checks = output.json();
        let nats =
            checks.as_array().unwrap().iter().find(|check| check["check"] == "nats").unwrap();
        assert!(nats["says"].as_str().unwrap().contains(told), "{told}: {nats}");
        assert!(!output.stdout.contains(secret), "{output:?}");
    }
}

#[tokio::test]
async fn a_stranger_gets_no_connection() {
    let bus = Secured::start(&["--node=node-1"]).await;
    let settings = bus.settings("node-1");
    let url = settings["LOCKSTEP_NATS_URLS"].split(',').next().unwrap();
    let (before, address) = url.rsplit_once('@').unwrap();
    let secret = before.rsplit_once(':').unwrap().1;
    let certificates = PathBuf::from(&settings["LOCKSTEP_NATS_ROOT_CERTIFICATES"]);
    let server = format!("tls://{address}");

    let known = ConnectOptions::new().add_root_certificates(certificates.clone());
    let connect = |options: ConnectOptions| options.connect(server.clone());
    let right = known.clone().user_and_password("node-1".into(), secret.into());
    assert!(connect(right).await.is_ok());
    for (user, password) in [("node-1", "guessed"), ("nobody", secret), ("node-1", "")] {
        let options = known.clone().user_and_password(user.into(), password.into());
        assert!(connect(options).await.is_err(), "{user} {password:?}");
    }
    assert!(connect(known.clone()).await.is_err(), "without a name");
    // A server that nobody vouches for is not told the secret.
    let trusting = ConnectOptions::new().user_and_password("node-1".into(), secret.into());
    assert!(connect(trusting).await.is_err(), "the certificate is not of the system's");

    // In the clear, with the right secret.
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let connect = format!(
        "CONNECT {{\"user\":\"node-1\",\"pass\":\"{secret}\",\"verbose\":false}}\r\nPING\r\n"
    );
    socket.write_all(connect.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // The server closes; a reset is as good.
    let _read = tokio::time::timeout(SOON, socket.read_to_end(&mut answer)).await.unwrap();
    assert!(!String::from_utf8_lossy(&answer).contains("PONG"));
}

#[tokio::test]
async fn a_server_of_another_cluster_gets_no_route() {
    let bus = Secured::start(&["--node=node-1"]).await;
    let ours = server_folders(&bus.folder());
    let conf = std::fs::read_to_string(ours[0].join("nats.conf")).unwrap();
    let route = conf.lines().find(|line| line.contains("nats-route://")).unwrap();
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("foreign");
    init(folder.to_str().unwrap(), &free_ports(2), &["--node=node-1"]).await;
    let theirs = server_folders(&folder).remove(0);
    let conf = std::fs::read_to_string(theirs.join("nats.conf")).unwrap();
    let conf = conf.replace("routes: [\n", &format!("routes: [\n{route}\n"));
    assert!(conf.contains(route));
    std::fs::write(theirs.join("nats.conf"), conf).unwrap();
    let foreign = start_server(&theirs);
    until("the foreign server is refused", SOON, async || {
        let log = std::fs::read_to_string(foreign.stderr_path()).unwrap();
        log.contains("TLS route handshake error").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_user_that_is_added_comes_in_and_one_that_is_removed_is_thrown_out_at_the_reload() {
    let bus = Secured::start(&["--node=node-1"]).await;
    let folder = bus.folder();
    let folder = folder.to_str().unwrap();
    done(&["add", folder, "--publisher=bob=7,9"]).await;
    bus.reload();
    let bob = bus.client("bob").await;
    done(&["remove", folder, "bob"]).await;
    bus.reload();
    until("bob is out", SOON, async || (!is_connected(&bob)).then_some(())).await;
    let listed = nats(&["list", folder, "--json"]).await.json();
    let users: Vec<&str> =
        listed.as_array().unwrap().iter().map(|user| user["user"].as_str().unwrap()).collect();
    assert_eq!(users, ["node-1"]);
}

#[tokio::test]
async fn a_secret_stands_in_the_file_of_its_user_alone_and_nobody_else_can_read_that() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("bus");
    let shown = folder.to_str().unwrap();
    let server = "--server=n1.example";
    let said = done(&["init", shown, server, "--node=a", "--publisher=b=7"]).await;
    let secret = |user: &str| {
        let text = std::fs::read_to_string(folder.join(format!("{user}.env"))).unwrap();
        text.split_once(&format!("tls://{user}:")).unwrap().1[..64].to_owned()
    };
    let secrets = [secret("a"), secret("b")];
    let home = folder.join("n1.example-4222");
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap().chain(std::fs::read_dir(&home).unwrap()) {
        files.extend(Some(entry.unwrap().path()).filter(|path| path.is_file()));
    }
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let held = secrets.iter().filter(|secret| text.contains(*secret)).count();
        let is_env = file.extension().is_some_and(|e| e == "env");
        assert_eq!(held, usize::from(is_env), "{}", file.display());
        let is_secret = is_env || text.contains("PRIVATE KEY") || text.contains("$2a$");
        let mode = file.metadata().unwrap().permissions().mode() & 0o077;
        assert_eq!(mode == 0, is_secret, "{}: {mode:o}", file.display());
    }
    assert!(secrets.iter().all(|secret| !said.contains(secret)));

    let other = folder.with_file_name("other");
    let other = other.to_str().unwrap();
    let wrong: &[(&[&str], &str)] = &[
        (&["init", shown, server, "--node=a"], "there already"),
        (&["init", other, server], "needs a user"),
        (&["init", other, "--server=n1:0", "--node=a"], "port"),
        (&["init", other, server, server, "--node=a"], "used twice"),
        (&["init", other, server, "--node=a.b"], "a.b"),
        (&["init", other, server, "--node=a", "--monitor=a"], "\"a\""),
        (&["init", other, server, "--publisher=b"], "NAME=MASTER"),
        (&["init", other, server, "--publisher=b=0"], "0"),
        (&["add", shown, "--node=a"], "\"a\""),
        (&["add", shown], "--node"),
        (&["remove", shown, "nobody"], "nobody"),
    ];
    for (arguments, word) in wrong {
        let output = nats(arguments).await;
        assert_eq!(output.code, Some(2), "{arguments:?}: {output:?}");
        assert!(output.stderr.contains(word), "{arguments:?}: {output:?}");
    }
    assert!(!Path::new(other).exists());
}
