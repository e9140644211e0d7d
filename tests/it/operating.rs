//! The verbs of an operator, against a real database, and against nodes that run.

use devstack::shared_postgres;
use lockstep_tests::binary;
use lockstep_tests::world::{CliOutput, run_lockstep};
use std::path::Path;
use std::process::Stdio;
use tokio::io::AsyncReadExt;

/// An empty database.
struct Desk {
    url: String,
}

impl Desk {
    async fn new(name: &str) -> Desk {
        let url = shared_postgres().await.unwrap().create_database(name).await.unwrap();
        Desk { url }
    }

    async fn cli(&self, arguments: &[&str]) -> CliOutput {
        run_lockstep(arguments, &[("LOCKSTEP_DATABASE_URL", &self.url)]).await
    }

    async fn done(&self, arguments: &[&str]) -> String {
        let output = self.cli(arguments).await;
        assert_eq!(output.code, Some(0), "{arguments:?}: {output:?}");
        output.stdout
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

