//! The command line against a real database, and against nodes that run.

use devstack::shared_postgres;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{State, assert_clean};
use lockstep_tests::world::{CliOutput, SOON, World, run_lockstep, until};
use paper::protocol::{AccountDecl, Style};
use schemas::{AccountId, MasterTicket};
use std::time::Duration;

/// A database for one test, without anything else.
struct Database {
    url: String,
}

impl Database {
    async fn new(name: &str) -> Database {
        Database { url: shared_postgres().await.unwrap().create_database(name).await.unwrap() }
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

#[tokio::test]
async fn accounts_and_links_are_added_listed_and_switched() {
    let db = Database::new("cli").await;
    db.done(&["account", "add", "boss", "--platform", "external"]).await;
    db.done(&["account", "add", "one", "--address", "127.0.0.1:4100"]).await;
    db.done(&[
        "account",
        "add",
        "two",
        "--address",
        "127.0.0.1:4100",
        "--login",
        "77",
        "--disabled",
    ])
    .await;
    let table = db.done(&["account", "list"]).await;
    for word in ["NAME", "boss", "external", "one", "two", "no"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let accounts = db.cli(&["account", "list", "--json"]).await.json();
    let accounts = accounts.as_array().unwrap();
    assert_eq!(accounts.len(), 3);
    assert_eq!(accounts[2]["name"], "two");
    assert_eq!(accounts[2]["enabled"], false);
    assert_eq!(accounts[2]["connection"]["login"], 77);
    assert_eq!(accounts[0]["platform"], "external");

    let said = db.done(&["account", "enable", "two"]).await;
    assert!(said.contains("enabled"), "{said}");
    assert!(db.done(&["account", "enable", "two"]).await.contains("already"));
    db.done(&["account", "disable", "3"]).await;
    assert_eq!(db.cli(&["account", "list", "--json"]).await.json()[2]["enabled"], false);

    db.done(&["link", "add", "boss", "one", "--value", "1.5", "--magic", "4711"]).await;
    db.done(&["link", "add", "boss", "two", "--sizing", "fixed_lots", "--value", "0.2"]).await;
    let table = db.done(&["link", "list"]).await;
    assert!(table.contains("4711") && table.contains("fixed_lots"), "{table}");
    let links = db.cli(&["link", "list", "--json"]).await.json();
    assert_eq!(links.as_array().unwrap().len(), 2);
    assert_eq!(links[0]["master"], "boss");
    assert_eq!(links[0]["follower"], "one");
    assert_eq!(links[0]["magic"], 4711);
    assert_eq!(links[0]["sizing_value"], "1.5");
    db.done(&["link", "disable", "1"]).await;
    assert_eq!(db.cli(&["link", "list", "--json"]).await.json()[0]["enabled"], false);
    db.done(&["link", "enable", "1"]).await;
    assert_eq!(db.cli(&["link", "list", "--json"]).await.json()[0]["enabled"], true);

    let status = db.cli(&["status", "--json"]).await.json();
    assert_eq!(status["accounts"]["enabled"], 2);
    assert_eq!(status["accounts"]["unowned"], 1);
    assert_eq!(status["accounts"]["disabled"], 1);
    assert!(status["nodes"].as_array().unwrap().is_empty());
    let text = db.done(&["status"]).await;
    assert!(text.contains("2 enabled") && text.contains("1 unowned"), "{text}");
}

#[tokio::test]
async fn a_wrong_value_gives_exit_code_two_and_names_field_and_value() {
    let db = Database::new("cli-wrong").await;
    db.done(&["account", "add", "boss", "--platform", "external"]).await;
    db.done(&["account", "add", "one", "--address", "127.0.0.1:4100"]).await;
    db.done(&["account", "add", "two", "--address", "127.0.0.1:4100"]).await;
    db.done(&["link", "add", "boss", "one"]).await;
    let at = ["--address", "127.0.0.1:4100"];
    let account = |rest: &[&'static str]| [&["account", "add"], rest].concat();
    let link = |rest: &[&'static str]| [&["link", "add", "boss", "two"], rest].concat();
    let cases: Vec<(Vec<&str>, &str, &str)> = vec![
        ([account(&["bad name"]), at.to_vec()].concat(), "name", "bad name"),
        ([account(&[""]), at.to_vec()].concat(), "name", "\"\""),
        ([account(&["one"]), at.to_vec()].concat(), "name", "one"),
        ([account(&["77"]), at.to_vec()].concat(), "name", "77"),
        (account(&["x", "--platform", "Paper!"]), "platform", "Paper!"),
        (account(&["x", "--platform", "mt5"]), "platform", "mt5"),
        (account(&["x"]), "address", "paper"),
        (account(&["x", "--address", "nowhere"]), "address", "nowhere"),
        (account(&["x", "--address", "host:0"]), "address", "host:0"),
        (account(&["x", "--address", "host:99999"]), "address", "host:99999"),
        ([account(&["x", "--login", "0"]), at.to_vec()].concat(), "login", "0"),
        ([account(&["x", "--login", "-4"]), at.to_vec()].concat(), "login", "-4"),
        (vec!["account", "enable", "nobody"], "account", "nobody"),
        (vec!["account", "disable", "99"], "account", "99"),
        (vec!["link", "add", "nobody", "one"], "account", "nobody"),
        (vec!["link", "add", "one", "nobody"], "account", "nobody"),
        (vec!["link", "add", "one", "one"], "itself", "one"),
        (vec!["link", "add", "boss", "one"], "link", "one"),
        (vec!["link", "add", "one", "boss"], "follower", "boss"),
        (link(&["--value", "0"]), "value", "0"),
        (link(&["--value", "-1"]), "value", "-1"),
        (link(&["--value", "much"]), "value", "much"),
        (link(&["--value", "1000001"]), "value", "1000001"),
        (link(&["--magic", "0"]), "magic", "0"),
        (link(&["--magic", "3000000000"]), "magic", "3000000000"),
        (link(&["--sizing", "lots"]), "sizing", "lots"),
        (link(&["--slippage-points", "-5"]), "slippage-points", "-5"),
        (link(&["--slippage-points", "4000000000"]), "slippage-points", "4000000000"),
        (link(&["--symbol", "GOLD"]), "symbol", "GOLD"),
        (link(&["--symbol-suffix", "12345678901234567"]), "symbol-suffix", "12345678901234567"),
        (vec!["link", "enable", "99"], "link", "99"),
        (vec!["link", "disable", "0"], "link", "0"),
        (vec!["link", "disable", "first"], "link", "first"),
    ];
    let mut wrong = Vec::new();
    for (arguments, field, value) in &cases {
        let output = db.cli(arguments).await;
        let says = output.stderr.to_lowercase();
        let named = says.contains(field) && says.contains(&value.to_lowercase());
        if output.code != Some(2) || !named || !output.stdout.is_empty() {
            wrong.push(format!("{arguments:?} should name {field} and {value}: {output:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Nothing of it was done.
    assert_eq!(db.cli(&["account", "list", "--json"]).await.json().as_array().unwrap().len(), 3);
    assert_eq!(db.cli(&["link", "list", "--json"]).await.json().as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn two_accounts_with_one_login_at_a_broker_are_refused() {
    let db = Database::new("cli-login").await;
    db.done(&["account", "add", "a", "--address", "127.0.0.1:4100"]).await;
    // The login is the account's own number where none is given.
    let output =
        db.cli(&["account", "add", "b", "--address", "127.0.0.1:4100", "--login", "1"]).await;
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("same address and login"), "{output:?}");
    for named in ["name \"b\"", "--address 127.0.0.1:4100", "--login 1"] {
        assert!(output.stderr.contains(named), "{named}: {output:?}");
    }
    db.done(&["account", "add", "c", "--address", "127.0.0.1:4101", "--login", "1"]).await;
}

#[tokio::test]
async fn a_node_for_a_platform_that_is_not_built_in_does_not_start() {
    let variables =
        [("LOCKSTEP_DATABASE_URL", "postgres://127.0.0.1:1/x"), ("LOCKSTEP_PLATFORMS", "mt5")];
    let output = run_lockstep(&["node"], &variables).await;
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("LOCKSTEP_PLATFORMS \"mt5\""), "{output:?}");
}

#[tokio::test]
async fn a_link_that_would_close_a_cycle_or_reuse_a_magic_is_refused() {
    let db = Database::new("cli-cycle").await;
    for name in ["a", "b", "c", "d"] {
        db.done(&["account", "add", name, "--address", "127.0.0.1:4100"]).await;
    }
    db.done(&["link", "add", "a", "b", "--magic", "500"]).await;
    db.done(&["link", "add", "b", "c"]).await;
    // A link that is switched off counts as well.
    db.done(&["link", "disable", "2"]).await;
    for (master, follower) in [("c", "a"), ("b", "a"), ("c", "b")] {
        let output = db.cli(&["link", "add", master, follower]).await;
        assert_eq!(output.code, Some(2), "{output:?}");
        assert!(output.stderr.contains("cycle"), "{output:?}");
    }
    // The same magic for a second link of the same follower; for another follower it is free.
    let output = db.cli(&["link", "add", "d", "b", "--magic", "500"]).await;
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("magic") && output.stderr.contains("500"), "{output:?}");
    db.done(&["link", "add", "d", "c", "--magic", "500"]).await;
    db.done(&["link", "add", "d", "b"]).await;
}

#[tokio::test]
async fn a_database_that_is_not_there_gives_exit_code_three_and_no_password() {
    let url = "postgres://lockstep:hunter2@127.0.0.1:1/nothing";
    let output = run_lockstep(&["account", "list"], &[("LOCKSTEP_DATABASE_URL", url)]).await;
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(output.stderr.contains("database") && !output.stderr.contains("hunter2"), "{output:?}");
    let output = run_lockstep(&["account", "list"], &[]).await;
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("LOCKSTEP_DATABASE_URL"), "{output:?}");
}

async fn done(world: &World, arguments: &[&str]) {
    let output = world.cli(arguments).await;
    assert_eq!(output.code, Some(0), "{arguments:?}: {output:?}");
}

/// Opens a trade, then changes an old one, and says whether the first was copied when the second
/// had been: events come in order.
async fn copies_opens(world: &World, master: &mut Master, old: MasterTicket, level: u32) -> bool {
    let probe = master.open("0.10");
    let stop_loss = format!("1.0{level:04}");
    master.modify(old, &stop_loss, "1.20000");
    let stop_loss = Some(stop_loss.parse().unwrap());
    until("the change of the old trade", SOON, async || {
        let copies = State::of_copies(&world.ledger().await, &world.links[0]);
        let copy = &copies.trades[&old.get()];
        (copy.stop_loss == stop_loss).then(|| copies.trades.contains_key(&probe.get()))
    })
    .await
}

#[tokio::test]
async fn what_is_added_and_switched_off_while_a_node_runs_takes_effect_at_once() {
    let mut world = World::start("cli-live").await;
    let _node = world.node("a").start();
    // Owned before there is any link.
    let address = world.paper_addr.to_string();
    done(&world, &["account", "add", "boss", "--platform", "external"]).await;
    done(&world, &["account", "add", "one", "--address", &address]).await;
    let boss = AccountId::new(1).unwrap();
    let one = AccountId::new(2).unwrap();
    world.driver.declare_accounts(vec![AccountDecl::new(one, Style::Mt5)]).await.unwrap();
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    world.until_session("leading", &[one]).await;
    done(&world, &["link", "add", "boss", "one"]).await;
    let link = schemas::LinkId::new(1).unwrap();
    let multiplier = rust_decimal::Decimal::ONE;
    world.links.push(lockstep_tests::oracle::Link { link, follower: one, multiplier });
    world.until_copying().await;
    let old = master.open_many(3, "0.50");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let status = world.cli(&["status", "--json"]).await.json();
    assert_eq!(status["nodes"][0]["accounts"], 1, "{status}");
    let text = world.cli(&["status"]).await.stdout;
    assert!(text.contains("NODE") && text.contains("a-"), "{text}");

    // A link that is switched off opens nothing new, and still manages and closes.
    done(&world, &["link", "disable", "1"]).await;
    let mut level = 0;
    until("opens are not copied any more", SOON, async || {
        // Ten points each time: one point is no difference.
        level += 10;
        (!copies_opens(&world, &mut master, old[0], level).await).then_some(())
    })
    .await;
    master.reduce(old[1], "0.20");
    master.close(old[2]);
    let expected = |master: &Master| {
        let mut state = State::of_book(&master.book);
        state.trades.retain(|ticket, _| *ticket == old[0].get() || *ticket == old[1].get());
        state
    };
    let copied = |ledger: &paper::Ledger, world: &World| {
        let mut state = State::of_copies(ledger, &world.links[0]);
        // What was opened before the link was read again was copied rightly.
        state.trades.retain(|ticket, _| *ticket <= old[2].get());
        state
    };
    let wanted = expected(&master);
    until("the old trades follow the master", SOON, async || {
        let ledger = world.ledger().await;
        (copied(&ledger, &world) == wanted).then_some(())
    })
    .await;
    let held = State::of_copies(&world.ledger().await, &world.links[0]);

    // An account that is switched off is let go, with its copies open; switched on, it goes on.
    done(&world, &["account", "disable", "one", "--yes"]).await;
    let before = world.owners().await[&one].token;
    until("the account is let go", Duration::from_secs(5), async || {
        world.owners().await[&one].node.is_none().then_some(())
    })
    .await;
    assert_eq!(State::of_copies(&world.ledger().await, &world.links[0]), held);
    master.close(old[1]);
    done(&world, &["account", "enable", "one"]).await;
    let wanted = expected(&master);
    assert_eq!(wanted.trades.len(), 1);
    until("the account follows again", SOON, async || {
        let ledger = world.ledger().await;
        (copied(&ledger, &world) == wanted).then_some(())
    })
    .await;
    assert!(world.owners().await[&one].token > before);
    let ledger = world.ledger().await;
    assert_clean(&ledger);
}
