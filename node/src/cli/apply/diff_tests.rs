use super::super::file::parse;
use super::*;
use reconcile::Sizing;
use rust_decimal::Decimal;
use schemas::Magic;

const ACCOUNTS: &str = "\
[[account]]
name = \"boss\"
platform = \"external\"
[[account]]
name = \"one\"
address = \"127.0.0.1:4100\"
login = 1
[[account]]
name = \"two\"
address = \"127.0.0.1:4100\"
login = 2
";

fn account(id: u64, name: &str, connection: serde_json::Value) -> StoredAccount {
    let platform = if connection == serde_json::json!({}) { "external" } else { "paper" };
    let account = NewAccount {
        name: name.to_owned(),
        platform: platform.to_owned(),
        connection,
        enabled: true,
    };
    StoredAccount { id: AccountId::new(id).unwrap(), account, is_owned: false, copies_open: 0 }
}

fn link(id: u64, master: &str, follower: &str, magic: u64) -> StoredLink {
    let plain = NewLink::plain(AccountId::MIN, AccountId::MIN, Sizing::Multiplier(Decimal::ONE));
    StoredLink {
        id: LinkId::new(id).unwrap(),
        master: master.to_owned(),
        follower: follower.to_owned(),
        link: NewLink { magic: Some(Magic::from_i64(magic as i64).unwrap()), ..plain },
        is_removed: false,
        copies_open: 0,
    }
}

fn at(login: u64) -> serde_json::Value {
    serde_json::json!({ "address": "127.0.0.1:4100", "login": login })
}

fn stored() -> Stored {
    Stored {
        accounts: vec![
            account(1, "boss", serde_json::json!({})),
            account(2, "one", at(1)),
            account(3, "two", at(2)),
        ],
        links: vec![link(1, "boss", "one", 7001)],
    }
}

fn planned(text: &str, stored: &Stored, prune: bool) -> Plan {
    let (declared, faults) = parse(text);
    assert_eq!(faults, []);
    diff(&declared, stored, prune).unwrap()
}

/// The faults, each with its line before it.
fn faults(text: &str, stored: &Stored, prune: bool) -> Vec<String> {
    let (declared, unread) = parse(text);
    assert_eq!(unread, []);
    let faults = diff(&declared, stored, prune).unwrap_err();
    faults.iter().map(|fault| format!("{} {}", fault.at.line, fault.what)).collect()
}

fn steps(plan: &Plan) -> Vec<String> {
    let word = |change: &Change| {
        let step = match change.step {
            Step::AddAccount(_) | Step::AddLink { .. } => "add",
            Step::ChangeAccount { .. } | Step::ChangeLink { .. } => "change",
            Step::SwitchAccountOff { .. } => "off",
            Step::RemoveLink { .. } => "remove",
        };
        format!("{step} {}", change.name)
    };
    plan.changes.iter().map(word).collect()
}

fn entry(rest: &str) -> String {
    format!("{ACCOUNTS}[[link]]\nmaster = \"boss\"\nfollower = \"one\"\n{rest}")
}

#[test]
fn what_is_missing_is_added_accounts_first() {
    let plan = planned(&entry(""), &Stored::default(), false);
    assert_eq!(steps(&plan), ["add boss", "add one", "add two", "add boss → one"]);
}

#[test]
fn rows_that_say_what_the_file_says_make_no_change() {
    let plan = planned(&entry("magic = 7001\nvalue = 1.00"), &stored(), true);
    assert_eq!(steps(&plan), [""; 0]);
    // A magic that the file does not name is the one that the link has.
    assert_eq!(steps(&planned(&entry(""), &stored(), true)), [""; 0]);
}

#[test]
fn a_changed_rule_is_told_with_what_it_was() {
    let plan = planned(&entry("value = 0.5\ndisabled = true"), &stored(), false);
    assert_eq!(steps(&plan), ["change boss → one"]);
    let field =
        |field, from: &str, to: &str| Field { field, from: Some(from.into()), to: to.into() };
    assert_eq!(
        plan.changes[0].fields,
        [field("disabled", "false", "true"), field("value", "1", "0.5")]
    );
}

#[test]
fn what_the_file_does_not_name_goes_only_when_asked_for() {
    let only = "[[account]]\nname = \"boss\"\nplatform = \"external\"\n";
    let plan = planned(only, &stored(), false);
    assert_eq!(steps(&plan), [""; 0]);
    assert_eq!(plan.not_in_file, ["link boss → one", "account one", "account two"]);
    let plan = planned(only, &stored(), true);
    assert_eq!(steps(&plan), ["remove boss → one", "off one", "off two"]);
    let mut copying = stored();
    copying.accounts[1].copies_open = 2;
    let told = faults(only, &copying, true);
    assert!(told[0].contains("\"one\"") && told[0].contains("2 open copies"), "{told:?}");
}

#[test]
fn a_link_that_takes_the_place_of_a_removed_one_comes_after_it() {
    let mut turned = stored();
    turned.links = vec![link(1, "one", "two", 7001)];
    let text = format!("{ACCOUNTS}[[link]]\nmaster = \"two\"\nfollower = \"one\"\n");
    assert!(faults(&text, &turned, false)[0].contains("cycle"));
    assert_eq!(steps(&planned(&text, &turned, true)), ["remove one → two", "add two → one"]);
}

#[test]
fn names_links_logins_and_magics_are_there_once() {
    let text = format!(
        "{ACCOUNTS}[[account]]\nname = \"one\"\nplatform = \"external\"\n\
         [[account]]\nname = \"three\"\naddress = \"127.0.0.1:4100\"\nlogin = 2\n\
         [[link]]\nmaster = \"boss\"\nfollower = \"one\"\nmagic = 9\n\
         [[link]]\nmaster = \"boss\"\nfollower = \"one\"\n\
         [[link]]\nmaster = \"two\"\nfollower = \"one\"\nmagic = 9\n"
    );
    let told = faults(&text, &Stored::default(), false);
    let expected = [
        ("13 ", "name \"one\": line 5 has it already"),
        ("16 ", "\"two\" on line 9 has the same address and login"),
        ("24 ", "line 20 has it already"),
        ("27 ", "magic 9 is that of another link of one: line 20"),
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    for (told, (line, what)) in told.iter().zip(expected) {
        assert!(told.starts_with(line) && told.contains(what), "{told}");
    }
    // A login that nobody names is the number of the account.
    let mut old = Stored { accounts: vec![account(2, "old", at(9))], links: Vec::new() };
    old.accounts[0].account.connection.as_object_mut().unwrap().remove("login");
    let told = faults(ACCOUNTS, &old, false);
    assert!(told[0].starts_with("9 ") && told[0].contains("account \"old\""), "{told:?}");
    // Also against a link that the file does not name, and one that was removed.
    let mut other = stored();
    other.links = vec![link(4, "two", "one", 500)];
    for is_removed in [false, true] {
        other.links[0].is_removed = is_removed;
        let told = faults(&entry("magic = 500"), &other, false);
        assert!(told[0].starts_with("13 ") && told[0].contains("link 4"), "{told:?}");
    }
}

#[test]
fn a_cycle_is_told_with_its_whole_way() {
    let text = format!(
        "{ACCOUNTS}[[account]]\nname = \"three\"\naddress = \"127.0.0.1:4100\"\nlogin = 3\n\
         [[link]]\nmaster = \"one\"\nfollower = \"two\"\n\
         [[link]]\nmaster = \"two\"\nfollower = \"three\"\ndisabled = true\n\
         [[link]]\nmaster = \"three\"\nfollower = \"one\"\n\
         [[link]]\nmaster = \"one\"\nfollower = \"one\"\n"
    );
    let told = faults(&text, &Stored::default(), false);
    assert_eq!(told.len(), 2, "{told:#?}");
    assert!(told[0].starts_with("24 "), "{told:?}");
    assert!(told[0].contains("three → one → two → three"), "{told:?}");
    assert!(told[1].contains("to itself"), "{told:?}");
    // Half of it may be in the database.
    let mut half = stored();
    half.links = vec![link(1, "two", "one", 7001)];
    let text = format!("{ACCOUNTS}[[link]]\nmaster = \"one\"\nfollower = \"two\"\n");
    assert!(faults(&text, &half, false)[0].contains("one → two → one"));
}

#[test]
fn a_link_needs_accounts_that_can_do_their_part() {
    let text = format!(
        "{ACCOUNTS}[[link]]\nmaster = \"nobody\"\nfollower = \"one\"\n\
         [[link]]\nmaster = \"one\"\nfollower = \"boss\"\n"
    );
    let told = faults(&text, &Stored::default(), false);
    assert!(
        told[0].contains("master \"nobody\"") && told[1].contains("only publishes"),
        "{told:?}"
    );
    // An account of the database will do, unless it would be switched off.
    let only = "[[link]]\nmaster = \"boss\"\nfollower = \"two\"\n";
    assert_eq!(steps(&planned(only, &stored(), false)), ["add boss → two"]);
    assert_eq!(faults(only, &stored(), true).len(), 2);
}

#[test]
fn what_an_account_is_at_its_broker_changes_only_while_nobody_works_on_it() {
    let text = ACCOUNTS
        .replace("login = 1", "login = 11")
        .replace("[[account]]\nname = \"one\"", "[[account]]\nname = \"one\"\ndisabled = true");
    let told = faults(&text, &stored(), false);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].contains("login cannot change from 1 to 11") && told[0].contains("switch it off"),
        "{told:?}"
    );
    let mut off = stored();
    off.accounts[1].account.enabled = false;
    off.accounts[1].copies_open = 3;
    assert!(faults(&text, &off, false)[0].contains("3 open copies"));
    off.accounts[1].copies_open = 0;
    off.accounts[1].is_owned = true;
    assert!(faults(&text, &off, false)[0].contains("owns it"));
    off.accounts[1].is_owned = false;
    assert_eq!(steps(&planned(&text, &off, false)), ["change one"]);
    // Settings that no file can say stay as they are, and make no difference.
    off.accounts[1].account.connection["credentials"] = "sealed".into();
    assert_eq!(steps(&planned(&text, &off, false)), ["change one"]);
}

#[test]
fn a_magic_changes_only_while_the_link_is_off_and_has_no_open_copy() {
    let text = entry("magic = 9\ndisabled = true");
    let mut now = stored();
    assert!(faults(&text, &now, false)[0].contains("magic cannot change from 7001 to 9"));
    now.links[0].link.enabled = false;
    now.links[0].copies_open = 1;
    assert!(faults(&text, &now, false)[0].contains("open copies (1 now)"));
    now.links[0].copies_open = 0;
    assert_eq!(steps(&planned(&text, &now, false)), ["change boss → one"]);
}

#[test]
fn entries_with_faults_hide_no_other_fault_and_make_none() {
    // The second "two" has a wrong key, the first link a wrong value; both are known by their names.
    let text = format!(
        "{ACCOUNTS}[[account]]\nname = \"two\"\nadress = \"127.0.0.1:4100\"\n\
         [[account]]\nname = \"three\"\nlogin = 3\n\
         [[link]]\nmaster = \"boss\"\nfollower = \"one\"\nvalue = -3\n\
         [[link]]\nmaster = \"boss\"\nfollower = \"one\"\n\
         [[link]]\nmaster = \"boss\"\nfollower = \"three\"\n"
    );
    let (declared, unread) = parse(&text);
    assert_eq!(unread.len(), 3, "{unread:?}");
    let mut of_file = faults_of_file(&declared);
    of_file.sort();
    let with_database = diff(&declared, &stored(), true).unwrap_err();
    assert_eq!(of_file, with_database);
    let told: Vec<String> = of_file.iter().map(|f| format!("{} {}", f.at, f.what)).collect();
    let expected = [
        "13:1 name \"two\": line 9 has it already",
        "23:1 link boss → one: line 19 has it already",
    ];
    assert_eq!(told, expected);
}

#[test]
fn links_of_an_account_to_itself_or_to_nobody_are_told_in_the_first_run() {
    // The first link has a wrong key besides, and no database is in reach.
    let text = format!(
        "{ACCOUNTS}[[link]]\nmaster = \"one\"\nfollower = \"one\"\nvalu = 2\n\
         [[link]]\nmaster = \"nobody\"\nfollower = \"two\"\n\
         [[link]]\nmaster = \"one\"\nfollower = \"boss\"\n"
    );
    let (declared, unread) = parse(&text);
    assert_eq!(unread.len(), 1, "{unread:?}");
    let told = |faults: Vec<Fault>| -> Vec<String> {
        faults.iter().map(|fault| format!("{} {}", fault.at.line, fault.what)).collect()
    };
    let itself = "13 link one → one: from an account to itself";
    let nobody = "17 master \"nobody\": ";
    let boss = format!("20 follower \"boss\": {}", link::NO_FOLLOWER);
    let of_file = told(faults_of_file(&declared));
    let unsure = format!(
        "{nobody}this file has no account of this name, and the database could not be asked"
    );
    assert_eq!(of_file, [itself, &unsure, &boss]);
    let with_database = told(diff(&declared, &Stored::default(), false).unwrap_err());
    assert_eq!(
        with_database,
        [itself, &format!("{nobody}there is no account of this name"), &boss]
    );
}
