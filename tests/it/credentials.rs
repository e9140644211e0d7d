//! Passwords of accounts at their broker, sealed at rest.

use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{CliOutput, SOON, World, until};
use paper::protocol::{AccountDecl, Password, Style};
use schemas::AccountId;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Key files and password files of one test.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Files(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path(name), text).unwrap();
        self.path(name).display().to_string()
    }
}

async fn account_with_password(world: &World, name: &str, password: &str) -> AccountId {
    let password = Some(Password::new(password));
    world
        .add_declared_account(name, world.paper_addr, |account| AccountDecl {
            password,
            ..AccountDecl::new(account, Style::Mt5)
        })
        .await
}

/// `lockstep` with this key file.
async fn lockstep(world: &World, key: &Path, arguments: &[&str]) -> CliOutput {
    let key = key.display().to_string();
    let variables = [
        ("LOCKSTEP_DATABASE_URL", world.database_url.as_str()),
        ("LOCKSTEP_MASTER_KEY_FILE", &key),
    ];
    lockstep_tests::world::run_lockstep(arguments, &variables).await
}

async fn done(world: &World, key: &Path, arguments: &[&str]) -> CliOutput {
    let output = lockstep(world, key, arguments).await;
    assert_eq!(output.code, Some(0), "{arguments:?}: {output:?}");
    output
}

async fn detail_of(world: &World, account: AccountId) -> Option<String> {
    sqlx::query_scalar("select coalesce(detail, '') from account_status where account_id = $1")
        .bind(account.as_i64())
        .fetch_optional(&mut world.database().await)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_sealed_password_opens_the_session_before_and_after_a_rotation() {
    let mut world = World::start("sealed").await;
    let files = Files::new();
    let key = files.path("master-key");
    let external = world.add_external_account("master").await;
    let follower = account_with_password(&world, "follower", "open-sesame").await;
    world.add_link(external, follower, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], external).await;
    done(&world, &key, &["keys", "init", key.to_str().unwrap()]).await;
    let mode = std::fs::metadata(&key).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = lockstep(&world, &key, &["keys", "init", key.to_str().unwrap()]).await;
    assert_eq!(again.code, Some(3), "a key file is never overwritten: {again:?}");
    let password = files.write("password", "open-sesame\n");
    done(&world, &key, &["account", "password", "follower", "--file", &password]).await;
    let old_key = std::fs::read_to_string(&key).unwrap();
    let node = |name: &str, key: &Path| {
        world.node(name).setting("LOCKSTEP_MASTER_KEY_FILE", key.display())
    };
    let a = node("a", &key).start();
    world.until_copying().await;
    master.open("0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;

    done(&world, &key, &["keys", "add", key.to_str().unwrap()]).await;
    let both = std::fs::read_to_string(&key).unwrap();
    assert!(both.ends_with(&old_key) && both.lines().count() == 2);
    let new_key = files.path("new-key");
    std::fs::write(&new_key, both.lines().next().unwrap()).unwrap();
    // The new one alone cannot wrap anew what the old one has wrapped, and says so.
    let alone = lockstep(&world, &new_key, &["keys", "rotate"]).await;
    assert_eq!(alone.code, Some(1), "{alone:?}");
    assert!(alone.stderr.contains(&format!("account {follower}: the master key ")), "{alone:?}");
    let listed = done(&world, &new_key, &["keys", "list", "--json"]).await.json();
    assert_eq!((&listed[0]["state"], &listed[0]["passwords"]), (&"present".into(), &0.into()));
    assert_eq!((&listed[1]["state"], &listed[1]["passwords"]), (&"missing".into(), &1.into()));
    done(&world, &key, &["keys", "rotate"]).await;
    let listed = done(&world, &key, &["keys", "list", "--json"]).await.json();
    assert_eq!((&listed[0]["state"], &listed[0]["passwords"]), (&"present".into(), &1.into()));
    assert_eq!((&listed[1]["state"], &listed[1]["passwords"]), (&"accepted".into(), &0.into()));
    // A node with the new key alone takes the account over.
    let _b = node("b", &new_key).start();
    a.process.terminate().unwrap();
    a.process.wait(SOON).await.unwrap();
    world.until_copying().await;
    master.open("0.20");
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
}

#[tokio::test]
async fn an_account_whose_password_does_not_open_waits_and_says_why_and_the_others_work() {
    let mut world = World::start("unsealed").await;
    let files = Files::new();
    let (key, other_key) = (files.path("key"), files.path("other-key"));
    for key in [&key, &other_key] {
        done(&world, key, &["keys", "init", key.to_str().unwrap()]).await;
    }
    let external = world.add_external_account("master").await;
    let calm = world.add_paper_account("calm", Style::Mt5).await;
    let none = account_with_password(&world, "none", "s1").await;
    let wrong = account_with_password(&world, "wrong", "s2").await;
    let foreign = account_with_password(&world, "foreign", "s3").await;
    let moved = account_with_password(&world, "moved", "s4").await;
    for follower in [calm, none, wrong, foreign, moved] {
        world.add_link(external, follower, 1).await;
    }
    let store = async |key: &Path, account: &str, password: &str| {
        let file = files.write(account, password);
        done(&world, key, &["account", "password", account, "--file", &file]).await;
    };
    store(&key, "wrong", "not-s2").await;
    store(&other_key, "foreign", "s3").await;
    // A row that was made for another account.
    store(&key, "calm", "s4").await;
    sqlx::query("update account_credentials set account_id = $1 where account_id = $2")
        .bind(moved.as_i64())
        .bind(calm.as_i64())
        .execute(&mut world.database().await)
        .await
        .unwrap();
    let mut master = Master::start(vec![world.bus.url(0)], external).await;
    let node = world.node("a").setting("LOCKSTEP_MASTER_KEY_FILE", key.display()).start();
    world.until_session("copying", &[calm]).await;
    for (account, says) in [
        (none, "password \"***\": is missing or wrong"),
        (wrong, "password \"***\": is missing or wrong"),
        (foreign, "that the password is wrapped with is not here"),
        (moved, "the sealed password does not belong to this account"),
    ] {
        until(says, SOON, async || {
            detail_of(&world, account).await.filter(|detail| detail.contains(says))
        })
        .await;
    }
    master.open("0.10");
    // What is mended is taken up by the session that waits, without a restart.
    store(&key, "none", "s1").await;
    store(&key, "wrong", "s2").await;
    store(&key, "foreign", "s3").await;
    store(&key, "moved", "s4").await;
    world.until_copying().await;
    let ledger = world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    assert_clean(&ledger);
    assert!(node.process.try_wait().unwrap().is_none());

    let keyless = world.cli(&["account", "password", "calm"]).await;
    assert_eq!(keyless.code, Some(2));
    assert!(keyless.stderr.contains("there is no master key here"), "{keyless:?}");
    let removed = done(&world, &key, &["account", "password", "wrong", "--remove"]).await;
    assert_eq!(removed.stdout.trim(), "account wrong has no password any more");
}
