//! The verbs of an operator, against a real database, and against nodes that run.

use devstack::shared_postgres;
use lockstep_tests::binary;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{CliOutput, SOON, World, run_lockstep, until};
use paper::protocol::{AccountDecl, Style};
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use schemas::{AccountId, LinkId};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::AsyncReadExt;

/// An empty database, and a folder for files.
struct Desk {
    url: String,
    folder: tempfile::TempDir,
}

impl Desk {
    async fn new(name: &str) -> Desk {
        let url = shared_postgres().await.unwrap().create_database(name).await.unwrap();
        Desk { url, folder: tempfile::tempdir().unwrap() }
    }

    async fn cli(&self, arguments: &[&str]) -> CliOutput {
        run_lockstep(arguments, &[("LOCKSTEP_DATABASE_URL", &self.url)]).await
    }

    async fn done(&self, arguments: &[&str]) -> String {
        let output = self.cli(arguments).await;
        assert_eq!(output.code, Some(0), "{arguments:?}: {output:?}");
        output.stdout
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_a_verb_quietly() {
    let desk = Desk::new("operating-pipe").await;
    desk.done(&["migrate"]).await;
    for arguments in
        [&["status"][..], &["node", "--settings"], &["completions", "bash"], &["account", "list"]]
    {
        let mut command = tokio::process::Command::new(binary::lockstep());
        let command = command.args(arguments).env("LOCKSTEP_DATABASE_URL", &desk.url);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // As `head -0`: it is gone before the first word.
        drop(child.stdout.take());
        let mut complaint = String::new();
        child.stderr.take().unwrap().read_to_string(&mut complaint).await.unwrap();
        assert_eq!(
            (child.wait().await.unwrap().code(), complaint.as_str()),
            (Some(0), ""),
            "{arguments:?}"
        );
    }
}

/// Both ends of a terminal.
fn terminal() -> (OwnedFd, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    // It is not to become that of the tests.
    let not_ours = OFlags::NOCTTY.bits().cast_signed();
    let theirs = File::options().read(true).write(true).custom_flags(not_ours).open(name).unwrap();
    (ours, theirs)
}

fn shows_what_is_typed(terminal: &File) -> bool {
    tcgetattr(terminal).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON)
}

#[tokio::test]
async fn a_terminal_is_as_it_was_when_a_signal_ends_a_verb_that_has_it() {
    let desk = Desk::new("operating-terminal").await;
    desk.done(&["account", "add", "one", "--address", "127.0.0.1:4100"]).await;
    let key = desk.folder.path().join("master-key");
    desk.done(&["keys", "init", text(&key)]).await;
    for (arguments, ended_by, code) in [
        (&["account", "password", "one"][..], Signal::INT, 1),
        (&["account", "password", "one"], Signal::TERM, 1),
        (&["status", "--watch"], Signal::TERM, 0),
    ] {
        let (_ours, theirs) = terminal();
        assert!(shows_what_is_typed(&theirs));
        let mut child = tokio::process::Command::new(binary::lockstep())
            .args(arguments)
            .env("LOCKSTEP_DATABASE_URL", &desk.url)
            .env("LOCKSTEP_MASTER_KEY_FILE", &key)
            .stdin(theirs.try_clone().unwrap())
            .stdout(theirs.try_clone().unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        until("it has the terminal", SOON, async || (!shows_what_is_typed(&theirs)).then_some(()))
            .await;
        let pid = Pid::from_raw(child.id().unwrap() as i32).unwrap();
        kill_process(pid, ended_by).unwrap();
        let ended = tokio::time::timeout(SOON, child.wait()).await.unwrap().unwrap();
        assert_eq!(ended.code(), Some(code), "{arguments:?}: {ended:?}");
        assert!(shows_what_is_typed(&theirs), "{arguments:?}");
    }
}

#[tokio::test]
async fn completions_know_every_verb() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run_lockstep(&["completions", shell], &[]).await;
        assert_eq!(output.code, Some(0), "{output:?}");
        for verb in ["apply", "kill-switch", "status"] {
            assert!(output.stdout.contains(verb), "{shell}: {verb}");
        }
    }
    assert_eq!(run_lockstep(&["completions", "cmd"], &[]).await.code, Some(2));
}

#[tokio::test]
async fn the_configuration_is_checked_whole_and_shown_without_secrets() {
    let url = "postgres://lockstep:hunter2@db.example/lockstep";
    let good = [("LOCKSTEP_DATABASE_URL", url), ("LOCKSTEP_CYCLE", "10s")];
    let output = run_lockstep(&["config", "check"], &good).await;
    assert_eq!(output.code, Some(0), "{output:?}");
    let shown = run_lockstep(&["config", "show", "--json"], &good).await;
    assert!(!shown.stdout.contains("hunter2"), "{shown:?}");
    let shown = shown.json();
    let of = |name: &str| {
        let all = shown["settings"].as_array().unwrap();
        all.iter().find(|row| row["setting"] == name).unwrap().clone()
    };
    assert_eq!(of("LOCKSTEP_CYCLE")["value"], "10s");
    assert_eq!(of("LOCKSTEP_CYCLE")["from"], "environment");
    assert_eq!(of("LOCKSTEP_FENCE")["from"], "default");
    assert_eq!(of("LOCKSTEP_DATABASE_URL")["value"], "postgres://lockstep:***@db.example/lockstep");

    // A file goes before the environment.
    let desk = tempfile::tempdir().unwrap();
    let file = desk.path().join("node.env");
    std::fs::write(&file, "LOCKSTEP_CYCLE='12s'\n").unwrap();
    let shown = run_lockstep(&["config", "show", "--settings", text(&file)], &good).await;
    let row = shown.stdout.lines().find(|line| line.contains("LOCKSTEP_CYCLE")).unwrap();
    assert!(row.contains("12s") && row.contains("node.env"), "{row}");

    let bad = [
        ("LOCKSTEP_DATABASE_URL", url),
        ("LOCKSTEP_FENSE", "15s"),
        ("LOCKSTEP_LEASE", "60"),
        ("LOCKSTEP_CAPACITY", "many"),
    ];
    for verb in ["check", "show"] {
        let output = run_lockstep(&["config", verb], &bad).await;
        assert_eq!(output.code, Some(1), "{output:?}");
        for fault in ["LOCKSTEP_FENSE", "LOCKSTEP_FENCE", "LOCKSTEP_LEASE", "\"many\""] {
            assert!(output.stderr.contains(fault), "{verb}: {fault}: {output:?}");
        }
        let both = format!("{output:?}");
        assert!(!both.contains("hunter2"), "{both}");
    }
    let output = run_lockstep(&["config", "check", "--json"], &bad).await;
    assert_eq!(output.json()["faults"].as_array().unwrap().len(), 3, "{output:?}");
}

#[tokio::test]
async fn migrations_are_listed_applied_and_compared() {
    let desk = Desk::new("operating-migrate").await;
    let output = desk.cli(&["migrate", "status"]).await;
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stdout.contains("missing"), "{output:?}");
    let would = desk.cli(&["migrate", "--dry-run", "--json"]).await.json();
    let count = would.as_array().unwrap().len();
    assert!(count >= 9, "{would}");
    // Nothing was applied by looking.
    assert_eq!(desk.cli(&["migrate", "status"]).await.code, Some(1));
    let applied = desk.cli(&["migrate", "--json"]).await.json();
    assert_eq!(applied.as_array().unwrap().len(), count);
    assert!(applied[0]["applied_at"].is_string(), "{applied}");
    desk.done(&["migrate", "status"]).await;
    assert!(desk.done(&["migrate"]).await.contains("up to date"));

    let mut db = lockstep::database::connect(&desk.url, "test").await.unwrap();
    sqlx::query("update _sqlx_migrations set checksum = '\\x00' where version = 2")
        .execute(&mut db)
        .await
        .unwrap();
    for arguments in [&["migrate", "status"][..], &["migrate"]] {
        let output = desk.cli(arguments).await;
        assert_eq!(output.code, Some(1), "{output:?}");
        assert!(
            output.stderr.contains("0002") && output.stderr.contains("checksum differs"),
            "{output:?}"
        );
    }
}

const FILE: &str = r#"
[[account]]
name = "boss"
platform = "external"

[[account]]
name = "one"
address = "127.0.0.1:4100"

[[account]]
name = "two"
address = "127.0.0.1:4100"
disabled = true

[[link]]
master = "boss"
follower = "one"
value = 0.5
magic = 4711
symbol = { GOLD = "XAUUSD" }

[[link]]
master = "one"
follower = "two"
"#;

#[tokio::test]
async fn a_file_is_applied_as_a_whole_and_a_second_time_changes_nothing() {
    let desk = Desk::new("operating-apply").await;
    let file = desk.file("accounts.toml", FILE);
    let apply = |rest: &[&'static str]| -> Vec<String> {
        let head = ["apply".to_owned(), "-f".to_owned(), text(&file).to_owned()];
        head.into_iter().chain(rest.iter().map(|word| (*word).to_owned())).collect()
    };
    let run = async |rest: &[&'static str]| {
        let words = apply(rest);
        desk.cli(&words.iter().map(String::as_str).collect::<Vec<_>>()).await
    };
    // Who only looks makes no tables.
    let untouched = run(&["--dry-run"]).await;
    assert_eq!(untouched.code, Some(3), "{untouched:?}");
    assert!(untouched.stderr.contains("`lockstep migrate`"), "{untouched:?}");
    assert_eq!(desk.cli(&["migrate", "status"]).await.code, Some(1));
    desk.done(&["migrate"]).await;
    let dry = run(&["--dry-run", "--json"]).await.json();
    assert_eq!((&dry["applied"], dry["changes"].as_array().unwrap().len()), (&false.into(), 5));
    assert_eq!(desk.cli(&["account", "list", "--json"]).await.json().as_array().unwrap().len(), 0);
    assert_eq!(run(&[]).await.code, Some(0));
    let links = desk.cli(&["link", "list", "--json"]).await.json();
    assert_eq!(links[0]["magic"], 4711);
    assert_eq!(links[0]["sizing_value"], "0.5");
    assert_eq!(links[0]["options"][0], "--symbol GOLD=XAUUSD");
    assert_eq!(links[1]["master"], "one");
    let again = run(&["--json", "--prune"]).await.json();
    assert_eq!(again["changes"].as_array().unwrap().len(), 0, "{again}");

    // What else is there stays, is told, and goes only when asked for.
    desk.done(&["account", "add", "three", "--address", "127.0.0.1:4101"]).await;
    desk.done(&["link", "add", "boss", "three"]).await;
    let said = run(&[]).await.stdout;
    assert!(said.contains("link boss → three") && said.contains("account three"), "{said}");
    let pruned = run(&["--prune"]).await.stdout;
    assert!(pruned.contains("removed") && pruned.contains("2 changes applied"), "{pruned}");
    assert_eq!(desk.cli(&["link", "list", "--json"]).await.json().as_array().unwrap().len(), 2);
    assert_eq!(desk.cli(&["account", "list", "--json"]).await.json()[3]["enabled"], false);

    // A changed rule, and what a person has changed meanwhile.
    std::fs::write(&file, FILE.replace("value = 0.5", "value = 2")).unwrap();
    desk.done(&["link", "disable", "2"]).await;
    let said = run(&[]).await.stdout;
    assert!(said.contains("value: 0.5 → 2") && said.contains("disabled: true → false"), "{said}");
    assert!(run(&[]).await.stdout.contains("nothing to change"));
}

#[tokio::test]
async fn a_file_with_faults_changes_nothing_and_tells_them_all_with_their_places() {
    let desk = Desk::new("operating-apply-faults").await;
    desk.done(&["account", "add", "old", "--address", "127.0.0.1:4100"]).await;
    let link = |master: &str, follower: &str, rest: &str| {
        format!("[[link]]\nmaster = \"{master}\"\nfollower = \"{follower}\"\n{rest}\n")
    };
    let account = |name: &str, rest: &str| format!("[[account]]\nname = \"{name}\"\n{rest}\n");
    let login = |login: u32| format!("address = \"127.0.0.1:4100\"\nlogin = {login}");
    let cases = [
        (link("one", "boss", ""), "26:1", "only publishes"),
        (link("two", "one", ""), "26:1", "two → one → two"),
        (account("one", "platform = \"external\""), "26:1", "line 7 has it already"),
        (link("two", "one", "magic = 4711"), "26:1", "magic 4711"),
        (link("boss", "two", "valu = 3"), "28:1", "valu"),
        (link("boss", "two", "value = -3"), "28:1", "-3"),
        (account("new", &login(1)), "26:1", "account \"old\" has the same address"),
        // Only the database knows which number an account gets, and with it its login.
        (account("new", &login(3)), "26:1", "same address"),
    ];
    for (more, place, what) in &cases {
        let file = desk.file("faults.toml", &format!("{FILE}{more}"));
        let output = desk.cli(&["apply", "-f", text(&file)]).await;
        assert_eq!(output.code, Some(2), "{more}: {output:?}");
        let place = format!("faults.toml:{place}: ");
        let told = output.stderr.lines().find(|line| line.contains(&place) && line.contains(what));
        assert!(told.is_some(), "{more}: {place}{what}: {output:?}");
    }
    let both = format!("{FILE}{}{}", cases[4].0, cases[5].0);
    let output = desk.cli(&["apply", "-f", text(&desk.file("both.toml", &both))]).await;
    // Neither can be read, and both are of the same two accounts.
    for told in ["3 faults", "valu", "-3", "link boss → two: line 26 has it already"] {
        assert!(output.stderr.contains(told), "{told}: {output:?}");
    }
    assert_eq!(desk.cli(&["account", "list", "--json"]).await.json().as_array().unwrap().len(), 1);
    assert_eq!(desk.cli(&["apply", "-f", "/no/such/file"]).await.code, Some(3));
}

#[tokio::test]
async fn an_operator_applies_looks_pauses_and_resumes_while_nodes_run() {
    let mut world = World::start("operating-live").await;
    let _node = world.node("a").start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("accounts.toml");
    let declared = |disabled: bool| {
        format!(
            "[[account]]\nname = \"boss\"\nplatform = \"external\"\n[[account]]\nname = \"one\"\n\
             address = \"{}\"\n[[link]]\nmaster = \"boss\"\nfollower = \"one\"\ndisabled = {disabled}\n",
            world.paper_addr
        )
    };
    std::fs::write(&file, declared(false)).unwrap();
    let (boss, one) = (AccountId::new(1).unwrap(), AccountId::new(2).unwrap());
    world.driver.declare_accounts(vec![AccountDecl::new(one, Style::Mt5)]).await.unwrap();
    done(&world, &["apply", "-f", text(&file)]).await;
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    let link = LinkId::new(1).unwrap();
    let multiplier = rust_decimal::Decimal::ONE;
    world.links.push(lockstep_tests::oracle::Link { link, follower: one, multiplier });
    world.until_copying().await;
    master.open_many(3, "0.50");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    let nats = world.bus.url(0);
    let diff = async || world.cli(&["positions", "one", "--diff", "--json", "--nats", &nats]).await;
    until("rows and master agree", SOON, async || {
        let output = diff().await;
        let is_whole = |output: &CliOutput| {
            let positions = output.json()[0]["positions"].as_array().unwrap().clone();
            positions.len() == 3 && positions.iter().all(|row| row["difference"] == "none")
        };
        (output.code == Some(0) && is_whole(&output)).then_some(())
    })
    .await;
    let events = world.cli(&["events", "tail", "--link", "1", "--json"]).await.json();
    let opened = events.as_array().unwrap().iter().filter(|event| event["action"] == "open_copy");
    assert_eq!(opened.count(), 3, "{events}");

    // What is paused is not copied, and the difference says so.
    let said = done(&world, &["pause", "1", "--close-only"]).await;
    assert!(said.contains("close_only") && said.contains(" to "), "{said}");
    let links = world.cli(&["link", "list", "--json"]).await.json();
    assert_eq!(links[0]["effective_mode"], "close_only");
    done(&world, &["resume", "1"]).await;
    let refused = world.cli(&["kill-switch"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused.stderr.contains("1 of 1 links") && refused.stderr.contains("--yes"),
        "{refused:?}"
    );
    let stopped = world.cli(&["kill-switch", "--yes", "--json"]).await.json();
    assert_eq!((&stopped["mode"], &stopped["links_not_copying"]), (&"paused".into(), &1.into()));
    done(&world, &["resume", "--all"]).await;
    assert_eq!(world.cli(&["pause", "nobody"]).await.code, Some(2));
    assert_eq!(world.cli(&["resume"]).await.code, Some(2));

    // A change of the file reaches the node that runs: the link opens nothing more.
    std::fs::write(&file, declared(true)).unwrap();
    done(&world, &["apply", "-f", text(&file)]).await;
    until("opens are not copied any more", SOON, async || {
        let probe = master.open("0.10");
        let skip = world.cli(&["why", "1", &probe.to_string(), "--json"]).await;
        skip.stdout.contains("close_only").then_some(())
    })
    .await;

    // A master that does not answer is unknown, and nothing is taken for extra.
    drop(master);
    until("the master is unknown", SOON, async || {
        let output = diff().await;
        (output.code == Some(3) && output.json()[0]["master_state"]["state"] == "unknown")
            .then_some(())
    })
    .await;
    let output = diff().await;
    let positions = output.json()[0]["positions"].as_array().unwrap().clone();
    assert!(positions.iter().all(|row| row["difference"] == "unknown"), "{output:?}");
    assert_clean(&world.ledger().await);
}

async fn done(world: &World, arguments: &[&str]) -> String {
    let output = world.cli(arguments).await;
    assert_eq!(output.code, Some(0), "{arguments:?}: {output:?}");
    output.stdout
}
