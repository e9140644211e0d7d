//! What an operator asks of nodes that run, and of the machine before there are any.

use lockstep_tests::binary;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::scrape::MetricsPage;
use lockstep_tests::world::{SOON, TAKEOVER, World, run_lockstep, until};
use paper::protocol::Style;
use schemas::MasterTicket;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

#[tokio::test]
async fn an_owner_says_what_a_comparison_would_do_and_makes_one_when_asked() {
    let mut world = World::start("asking-plan").await;
    let boss = world.add_external_account("boss").await;
    let one = world.add_paper_account("one", Style::Mt5).await;
    world.add_link(boss, one, 1).await;
    let unowned = world.cli(&["reconcile", "one", "--dry-run"]).await;
    assert_eq!(unowned.code, Some(3), "{unowned:?}");
    assert!(unowned.stderr.contains("no node owns it"), "{unowned:?}");
    let page = MetricsPage::free().await;
    let _node = world.node("a").setting("LOCKSTEP_METRICS_LISTEN", page.address()).start();
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    world.until_copying().await;
    let asked = async || {
        page.sum_where("lockstep_reconciles_total", |line| line.contains("\"asked\"")).await
    };
    let old = master.open_many(2, "0.50");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    let plan = world.cli(&["reconcile", "one", "--dry-run", "--json"]).await;
    assert_eq!(plan.code, Some(0), "{plan:?}");
    let plan = plan.json();
    assert_eq!(plan["begun"], false);
    assert_eq!(plan["plans"][0]["link"], 1, "{plan}");
    assert!(plan["plans"][0]["epoch"].is_number(), "{plan}");
    assert_eq!(plan["plans"][0]["steps"].as_array().unwrap().len(), 0, "{plan}");

    // What a paused link leaves undone is in the plan, and asking for it does nothing about it.
    assert_eq!(world.cli(&["pause", "1"]).await.code, Some(0));
    let waits = async |ticket: MasterTicket| {
        let plan = world.cli(&["reconcile", "1", "--dry-run", "--json"]).await.json();
        let waiting = plan["plans"][0]["waiting"].as_array().unwrap().clone();
        waiting.iter().any(|wait| wait["ticket"] == ticket.get() && wait["why"] == "link_paused")
    };
    until("an open waits for the end of the pause", SOON, async || {
        let held = master.open("0.20");
        waits(held).await.then_some(())
    })
    .await;
    master.close(old[0]);
    until("a close waits for the end of the pause", SOON, async || {
        waits(old[0]).await.then_some(())
    })
    .await;
    assert_eq!(world.cli(&["resume", "1"]).await.code, Some(0));
    assert_eq!(asked().await, 0.0, "who looks at a plan has none carried out");
    let done = world.cli(&["reconcile", "1"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.stdout.contains("the owner compares and acts now"), "{done:?}");
    until("it compares", SOON, async || (asked().await > 0.0).then_some(())).await;
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    assert_eq!(world.cli(&["reconcile", "99"]).await.code, Some(2));
    let external = world.cli(&["reconcile", "boss"]).await;
    assert_eq!(external.code, Some(2), "{external:?}");
    assert!(external.stderr.contains("boss is external"), "{external:?}");
    assert_clean(&world.ledger().await);
}

#[tokio::test]
async fn an_account_is_handed_over_by_its_owner_when_there_is_another_one() {
    let mut world = World::start("asking-release").await;
    let boss = world.add_external_account("boss").await;
    let one = world.add_paper_account("one", Style::Mt5).await;
    world.add_link(boss, one, 1).await;
    let a = world.node("a").start();
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    world.until_copying().await;
    let listed = world.cli(&["lease", "list", "--json"]).await.json();
    let row = &listed.as_array().unwrap()[1];
    assert!(a.is(row["node"].as_str().unwrap()) && row["session"] == "copying", "{listed}");
    let before = row["token"].as_i64().unwrap();
    let alone = world.cli(&["lease", "release", "one"]).await;
    assert_eq!(alone.code, Some(3), "{alone:?}");
    assert!(alone.stderr.contains("no other node has room"), "{alone:?}");
    assert_eq!(world.owners().await[&one].token, before);

    let page = MetricsPage::free().await;
    let b = world.node("b").setting("LOCKSTEP_METRICS_LISTEN", page.address()).start();
    let released = until("the account is handed over", TAKEOVER, async || {
        let released = world.cli(&["lease", "release", "one", "--json"]).await;
        (released.code == Some(0)).then(|| released.json())
    })
    .await;
    assert!(a.is(released["from"].as_str().unwrap()), "{released}");
    assert!(b.is(released["to"].as_str().unwrap()), "{released}");
    assert_eq!(released["token"], before + 1, "nobody had it in between");
    assert_eq!(page.expired_tenures().await, 0.0, "nor did its lease run out");
    master.open_many(2, "0.50");
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}

#[tokio::test]
async fn the_doctor_tells_what_works_and_how_to_mend_what_does_not() {
    let world = World::start("asking-doctor").await;
    let well = world.cli(&["doctor", "--json"]).await;
    assert_eq!(well.code, Some(0), "{well:?}");
    let checks = well.json();
    let outcome = |name: &str| {
        let all = checks.as_array().unwrap();
        let found = all.iter().find(|check| check["check"] == name);
        found.unwrap_or_else(|| panic!("{name}: {checks}"))["outcome"].as_str().unwrap().to_owned()
    };
    for name in [
        "settings",
        "postgres",
        "postgres pooler",
        "postgres primary",
        "postgres schema",
        "postgres rights",
        "clocks",
        "nats",
        "nats permissions",
        "nats payload",
    ] {
        assert_eq!(outcome(name), "ok", "{name}: {checks}");
    }
    assert_eq!(
        (outcome("state folder").as_str(), outcome("nats cluster").as_str()),
        ("warn", "warn")
    );

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.env");
    let bad = "LOCKSTEP_DATABASE_URL='postgres://lockstep:hunter2@127.0.0.1:1/x'\n\
               LOCKSTEP_NATS_URLS='nats://u:hunter2@127.0.0.1:1'\nLOCKSTEP_FENSE='15s'\n";
    std::fs::write(&file, bad).unwrap();
    let ill = world.cli(&["doctor", "--settings", file.to_str().unwrap()]).await;
    assert_eq!(ill.code, Some(1), "{ill:?}");
    for word in ["LOCKSTEP_FENSE", "127.0.0.1:1", "not connected", "→", "FAIL"] {
        assert!(ill.stdout.contains(word), "{word}: {ill:?}");
    }
    assert!(ill.stderr.contains("3 checks failed"), "{ill:?}");
    assert!(!format!("{ill:?}").contains("hunter2"), "{ill:?}");
}

#[tokio::test]
async fn init_writes_a_file_that_nobody_else_reads_and_never_over_another_one() {
    let world = World::start("asking-init").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("node.env");
    let shown = file.to_str().unwrap();
    let state = folder.path().join("state");
    let arguments = ["init", "--file", shown, "--state-folder", state.to_str().unwrap()];
    // Nobody is asked without a terminal.
    let unsaid = run_lockstep(&arguments, &[]).await;
    assert_eq!(unsaid.code, Some(2), "{unsaid:?}");
    assert!(unsaid.stderr.contains("LOCKSTEP_DATABASE_URL") && !file.exists(), "{unsaid:?}");
    let listen = "127.0.0.1:0";
    let variables = [
        ("LOCKSTEP_DATABASE_URL", world.database_url.as_str()),
        ("LOCKSTEP_NATS_URLS", &world.bus.url(0)),
        ("LOCKSTEP_METRICS_LISTEN", listen),
    ];
    let made = run_lockstep(&arguments, &variables).await;
    assert_eq!(made.code, Some(0), "{made:?}");
    assert!(
        made.stdout.contains("lockstep node") && made.stdout.contains("postgres schema"),
        "{made:?}"
    );
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(
        written.contains(&format!("LOCKSTEP_DATABASE_URL='{}'", world.database_url)),
        "{written}"
    );
    assert!(written.contains(&format!("LOCKSTEP_METRICS_LISTEN='{listen}'")), "{written}");
    let valid = run_lockstep(&["config", "check", "--settings", shown], &[]).await;
    assert_eq!(valid.code, Some(0), "{valid:?}");

    let again = world.cli(&arguments).await;
    assert_eq!(again.code, Some(2), "{again:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), written);
    let other = folder.path().join("other.env");
    let wrong = ["init", "--no-doctor", "--file", other.to_str().unwrap(), "--nats", "elsewhere"];
    let wrong = world.cli(&wrong).await;
    assert_eq!(wrong.code, Some(2), "{wrong:?}");
    assert!(wrong.stderr.contains("LOCKSTEP_NATS_URLS") && !other.exists(), "{wrong:?}");
}

#[tokio::test]
async fn a_watched_status_goes_on_without_a_terminal_until_its_reader_is_gone() {
    let world = World::start("asking-watch").await;
    let mut command = tokio::process::Command::new(binary::lockstep());
    let command =
        command.args(["status", "--watch"]).env("LOCKSTEP_DATABASE_URL", &world.database_url);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut pictures = 0;
    while pictures < 2 {
        let line = tokio::time::timeout(SOON, lines.next_line()).await.unwrap().unwrap().unwrap();
        assert!(!line.contains('\u{1b}'), "{line:?}");
        pictures += usize::from(line.starts_with("accounts:"));
    }
    drop(lines);
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).await.unwrap();
    assert_eq!((child.wait().await.unwrap().code(), complaint.as_str()), (Some(0), ""));
}
