//! What makes the database say what a file says.
//!
//! In: what the file declares, and the rows. Out: the changes in the order in which they can be made,
//! or every reason why they must not be. Pure.
//!
//! Invariants:
//! 1. What is not in the file is left alone unless pruning is asked for, and is named.
//! 2. Rows that say what the file says make no change: applying twice changes nothing.
//! 3. With any fault there is no change at all. Entries of the file that could not be read count by their
//!    names: they are faults already, and no reason for others.
//! 4. What an account is at its broker changes only while nobody owns it and no copy of it is open;
//!    a link's magic only while the link is off and has no open copy. A session that runs would not
//!    hear of the first, and copies would not be recognised after the second.
//!
//! Not covered: what the database alone can refuse, such as two accounts of one login at a broker
//! where one of them has the number that it gets here.

use super::file::{At, Declared, DeclaredAccount, DeclaredLink, Fault};
use crate::cli::link;
use crate::directory::{NewAccount, NewLink};
use schemas::{AccountId, LinkId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What an account is at its broker: the keys of its settings that a file can say.
pub(super) const CONNECTION_WORDS: &[&str] = &["address", "login", "blocking"];

/// An account of the database.
#[derive(Debug, Clone)]
pub(super) struct StoredAccount {
    pub(super) id: AccountId,
    pub(super) account: NewAccount,
    /// A node owns it.
    pub(super) is_owned: bool,
    /// Copies that are open on it, or of its trades.
    pub(super) copies_open: i64,
}

/// A link of the database.
#[derive(Debug, Clone)]
pub(super) struct StoredLink {
    pub(super) id: LinkId,
    pub(super) master: String,
    pub(super) follower: String,
    pub(super) link: NewLink,
    /// It was removed; its magic is not given out again.
    pub(super) is_removed: bool,
    pub(super) copies_open: i64,
}

/// What the database holds.
#[derive(Debug, Clone, Default)]
pub(super) struct Stored {
    pub(super) accounts: Vec<StoredAccount>,
    pub(super) links: Vec<StoredLink>,
}

/// A word that changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Field {
    pub(super) field: &'static str,
    /// What it is; nothing for what is added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from: Option<String>,
    pub(super) to: String,
}

/// One row to write.
#[derive(Debug, Clone)]
pub(super) enum Step {
    AddAccount(NewAccount),
    ChangeAccount { id: AccountId, to: NewAccount },
    SwitchAccountOff { id: AccountId },
    AddLink { master: String, follower: String, link: NewLink },
    ChangeLink { id: LinkId, to: NewLink },
    RemoveLink { id: LinkId },
}

/// One change, for people and for the database.
#[derive(Debug, Clone)]
pub(super) struct Change {
    /// Where the file asks for it; nothing for what the file does not name.
    pub(super) at: Option<At>,
    /// The account, or the two of the link.
    pub(super) name: String,
    pub(super) fields: Vec<Field>,
    pub(super) step: Step,
}

/// What is to be done.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    pub(super) changes: Vec<Change>,
    /// What the file does not name and nobody asked to prune.
    pub(super) not_in_file: Vec<String>,
}

/// The changes, or every reason against them.
pub(super) fn diff(file: &Declared, stored: &Stored, prune: bool) -> Result<Plan, Vec<Fault>> {
    let mut differ = Differ::new(file, Some(stored), prune);
    differ.check_file();
    differ.accounts();
    differ.links();
    differ.what_is_not_in_the_file();
    if differ.faults.is_empty() {
        return Ok(differ.plan);
    }
    differ.faults.sort();
    differ.faults.dedup();
    Err(differ.faults)
}

/// The faults that the file has whatever the database holds, and the accounts that only the database
/// could know: it was not in reach.
pub(super) fn faults_of_file(file: &Declared) -> Vec<Fault> {
    let mut differ = Differ::new(file, None, false);
    differ.check_file();
    differ.faults
}

static NOTHING: Stored = Stored { accounts: Vec::new(), links: Vec::new() };

struct Differ<'a> {
    file: &'a Declared,
    stored: &'a Stored,
    /// What is not in `stored` is not in the database either.
    is_database_read: bool,
    prune: bool,
    faults: Vec<Fault>,
    plan: Plan,
}

/// Platform, address and login of an account.
type Login = (String, String, String);

/// What an account is at its broker; its login is its number where none is said. Nothing where there
/// is no number yet.
fn login_of(account: &NewAccount, id: Option<AccountId>) -> Option<Login> {
    let said = |key: &str| account.connection.get(key).map(plain);
    let login = said("login").or_else(|| id.map(|id| id.to_string()))?;
    Some((account.platform.clone(), said("address")?, login))
}

/// A link in words.
pub(super) fn between(master: &str, follower: &str) -> String {
    format!("{master} → {follower}")
}

impl<'a> Differ<'a> {
    fn new(file: &'a Declared, stored: Option<&'a Stored>, prune: bool) -> Self {
        Differ {
            file,
            stored: stored.unwrap_or(&NOTHING),
            is_database_read: stored.is_some(),
            prune,
            faults: Vec::new(),
            plan: Plan::default(),
        }
    }

    fn check_file(&mut self) {
        self.check_doubles();
        self.check_names();
        self.check_ends();
        self.check_magics();
        self.check_cycles();
    }

    fn fault(&mut self, at: At, what: String) {
        self.faults.push(Fault::new(at, what));
    }

    fn declared(&self, name: &str) -> Option<&'a DeclaredAccount> {
        self.file.accounts.iter().find(|declared| declared.account.name == name)
    }

    /// The file names it, in an entry that could be read or not.
    fn is_named(&self, name: &str) -> bool {
        let unread = || self.file.unread_accounts.iter().any(|(_, unread)| unread == name);
        self.declared(name).is_some() || unread()
    }

    fn stored_account(&self, name: &str) -> Option<&'a StoredAccount> {
        self.stored.accounts.iter().find(|stored| stored.account.name == name)
    }

    fn stored_link(&self, of: &DeclaredLink) -> Option<&'a StoredLink> {
        let is_it = |stored: &&StoredLink| {
            !stored.is_removed && stored.master == of.master && stored.follower == of.follower
        };
        self.stored.links.iter().find(is_it)
    }

    /// Links that are there and not in the file, and stay.
    fn kept_links(&self) -> impl Iterator<Item = &'a StoredLink> {
        let (file, prune) = (self.file, self.prune);
        let links = self.stored.links.iter();
        links.filter(move |stored| !prune && !stored.is_removed && !is_declared(file, stored))
    }

    /// Names and pairs that two entries have, read or not.
    fn check_doubles(&mut self) {
        let file = self.file;
        let read = file.accounts.iter().map(|d| (d.at, d.account.name.clone()));
        for (at, name, first) in doubles(read.chain(file.unread_accounts.iter().cloned())) {
            self.fault(at, format!("name {name:?}: line {} has it already", first.line));
        }
        let named = |at: At, master: &str, follower: &str| (at, between(master, follower));
        let read = file.links.iter().map(|link| named(link.at, &link.master, &link.follower));
        let unread = file.unread_links.iter().map(|(at, m, f)| named(*at, m, f));
        for (at, named, first) in doubles(read.chain(unread)) {
            self.fault(at, format!("link {named}: line {} has it already", first.line));
        }
    }

    fn check_names(&mut self) {
        let mut names: BTreeSet<&str> = BTreeSet::new();
        let mut logins: BTreeMap<Login, String> = BTreeMap::new();
        for stored in &self.stored.accounts {
            if !self.is_named(&stored.account.name)
                && let Some(login) = login_of(&stored.account, Some(stored.id))
            {
                logins.insert(login, format!("account {:?}", stored.account.name));
            }
        }
        for declared in &self.file.accounts {
            let account = &declared.account;
            if !names.insert(&account.name) {
                continue;
            }
            let id = self.stored_account(&account.name).map(|stored| stored.id);
            let Some(login) = login_of(account, id) else { continue };
            let here = format!("{:?} on line {}", account.name, declared.at.line);
            if let Some(other) = logins.insert(login, here) {
                let what = format!(
                    "account {:?}: {other} has the same address and login; two owners of one account \
                     at the broker would copy twice",
                    account.name
                );
                self.fault(declared.at, what);
            }
        }
    }

    /// Both accounts of each link, whether its entry could be read or not.
    fn check_ends(&mut self) {
        let file = self.file;
        let read = file.links.iter().map(|link| (link.at, &link.master, &link.follower));
        let unread = file.unread_links.iter().map(|(at, m, f)| (*at, m, f));
        let mut all: Vec<(At, &String, &String)> = read.chain(unread).collect();
        all.sort();
        let mut places: BTreeSet<(&str, &str)> = BTreeSet::new();
        for (at, master, follower) in all {
            if !places.insert((master, follower)) {
                continue;
            }
            if master == follower {
                let named = between(master, follower);
                self.fault(at, format!("link {named}: from an account to itself"));
            }
            for (role, name) in [("master", master), ("follower", follower)] {
                self.check_account_of(at, role, name);
            }
        }
    }

    fn check_magics(&mut self) {
        let mut places: BTreeSet<(&str, &str)> = BTreeSet::new();
        let mut magics: BTreeMap<(&str, u64), String> = BTreeMap::new();
        let of_others =
            self.stored.links.iter().filter(|s| s.is_removed || !is_declared(self.file, s));
        for stored in of_others {
            let Some(magic) = stored.link.magic else { continue };
            let what = format!("link {}, {}", stored.id, between(&stored.master, &stored.follower));
            magics.insert((&stored.follower, magic.get()), what);
        }
        for link in &self.file.links {
            let named = between(&link.master, &link.follower);
            if !places.insert((&link.master, &link.follower)) {
                continue;
            }
            let stored = self.stored_link(link).and_then(|stored| stored.link.magic);
            let Some(magic) = link.link.magic.or(stored) else { continue };
            let here = format!("line {}, {named}", link.at.line);
            if let Some(other) = magics.insert((&link.follower, magic.get()), here) {
                let what = format!(
                    "link {named}: magic {magic} is that of another link of {}: {other}",
                    link.follower
                );
                self.fault(link.at, what);
            }
        }
    }

    fn check_account_of(&mut self, at: At, role: &str, name: &str) {
        if self.file.unread_accounts.iter().any(|(_, unread)| unread == name) {
            return;
        }
        let declared = self.declared(name).map(|declared| &declared.account);
        let stored = self.stored_account(name).map(|stored| &stored.account);
        let Some(account) = declared.or(stored) else {
            let why = match self.is_database_read {
                true => "there is no account of this name",
                false => {
                    "this file has no account of this name, and the database could not be asked"
                }
            };
            return self.fault(at, format!("{role} {name:?}: {why}"));
        };
        if role == "follower" && account.platform == "external" {
            self.fault(at, format!("{role} {name:?}: {}", link::NO_FOLLOWER));
        }
        if self.prune && declared.is_none() {
            let what =
                format!("{role} {name:?}: it is not in this file, and --prune would switch it off");
            self.fault(at, what);
        }
    }

    /// Links that are off count as well, as they do in the database.
    fn check_cycles(&mut self) {
        let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for stored in self.kept_links() {
            next.entry(&stored.master).or_default().insert(&stored.follower);
        }
        for link in &self.file.links {
            if link.master == link.follower {
                continue;
            }
            if let Some(way) = way_between(&next, &link.follower, &link.master) {
                let circle: Vec<&str> = [link.master.as_str()].into_iter().chain(way).collect();
                let what = format!(
                    "link {}: would close a cycle of copies: {}",
                    between(&link.master, &link.follower),
                    circle.join(" → ")
                );
                self.fault(link.at, what);
                continue;
            }
            next.entry(&link.master).or_default().insert(&link.follower);
        }
    }

    fn accounts(&mut self) {
        for declared in &self.file.accounts {
            let (name, to) = (&declared.account.name, &declared.account);
            let Some(stored) = self.stored_account(name) else {
                let fields = added(account_words(to));
                self.change(Some(declared.at), name.clone(), fields, Step::AddAccount(to.clone()));
                continue;
            };
            let fields = changed(account_words(&stored.account), account_words(to));
            if fields.is_empty() {
                continue;
            }
            let at_broker = fields.iter().find(|field| field.field != "disabled");
            if let Some(field) = at_broker
                && let Some(why) = why_fixed(stored)
            {
                let what = format!(
                    "account {name:?}: {} cannot change from {} to {} while {why}",
                    field.field,
                    or_nothing(field.from.as_deref()),
                    or_nothing(Some(&field.to)),
                );
                self.fault(declared.at, what);
            }
            let step = Step::ChangeAccount { id: stored.id, to: to.clone() };
            self.change(Some(declared.at), name.clone(), fields, step);
        }
    }

    fn links(&mut self) {
        for declared in &self.file.links {
            let named = between(&declared.master, &declared.follower);
            let Some(stored) = self.stored_link(declared) else {
                let (master, follower) = (declared.master.clone(), declared.follower.clone());
                let link = declared.link.clone();
                let mut fields = added(link::words(&link));
                let magic = link.magic.map_or_else(|| "a free one".to_owned(), |m| m.to_string());
                fields.push(Field { field: "magic", from: None, to: magic });
                let step = Step::AddLink { master, follower, link };
                self.change(Some(declared.at), named, fields, step);
                continue;
            };
            let mut fields = changed(link::words(&stored.link), link::words(&declared.link));
            let magic = declared.link.magic.or(stored.link.magic);
            if magic != stored.link.magic {
                let word = |magic: Option<schemas::Magic>| magic.map(|m| m.to_string());
                let (from, to) = (word(stored.link.magic), word(magic).unwrap_or_default());
                if stored.link.enabled || stored.copies_open > 0 {
                    let what = format!(
                        "link {named}: magic cannot change from {} to {to} while it is on or has open \
                         copies ({} now), which would not be recognised any more; switch it off and \
                         wait for their end",
                        or_nothing(from.as_deref()),
                        stored.copies_open
                    );
                    self.fault(declared.at, what);
                }
                fields.push(Field { field: "magic", from, to });
            }
            if !fields.is_empty() {
                let to = NewLink { magic, ..declared.link.clone() };
                let step = Step::ChangeLink { id: stored.id, to };
                self.change(Some(declared.at), named, fields, step);
            }
        }
    }

    /// Removed links go first, so that what takes their place closes no cycle with them; accounts are
    /// switched off last.
    fn what_is_not_in_the_file(&mut self) {
        let mut first = Vec::new();
        for stored in &self.stored.links {
            if stored.is_removed || is_declared(self.file, stored) {
                continue;
            }
            let named = between(&stored.master, &stored.follower);
            if !self.prune {
                self.plan.not_in_file.push(format!("link {named}"));
                continue;
            }
            let step = Step::RemoveLink { id: stored.id };
            let to = match stored.copies_open {
                0 => "removed".to_owned(),
                open => format!("removed; its {open} open copies are followed to their end"),
            };
            let fields = vec![Field { field: "link", from: Some("there".to_owned()), to }];
            first.push(Change { at: None, name: named, fields, step });
        }
        first.append(&mut self.plan.changes);
        self.plan.changes = first;
        for stored in &self.stored.accounts {
            let name = &stored.account.name;
            if self.is_named(name) || !stored.account.enabled {
                continue;
            }
            if !self.prune {
                self.plan.not_in_file.push(format!("account {name}"));
                continue;
            }
            if stored.copies_open > 0 {
                // It has no line: the file is what does not name it.
                let what = format!(
                    "account {name:?} is not in the file and has {} open copies, which nobody would \
                     manage once it is off: close them first, or name it",
                    stored.copies_open
                );
                self.fault(At { line: 1, column: 1 }, what);
            }
            let (from, to) = (Some("false".to_owned()), "true".to_owned());
            let fields = vec![Field { field: "disabled", from, to }];
            let step = Step::SwitchAccountOff { id: stored.id };
            self.change(None, name.clone(), fields, step);
        }
    }

    fn change(&mut self, at: Option<At>, name: String, fields: Vec<Field>, step: Step) {
        self.plan.changes.push(Change { at, name, fields, step });
    }
}

fn is_declared(file: &Declared, stored: &StoredLink) -> bool {
    let is_it = |l: &DeclaredLink| l.master == stored.master && l.follower == stored.follower;
    let is_unread = |(_, master, follower): &(At, String, String)| {
        *master == stored.master && *follower == stored.follower
    };
    !stored.is_removed && (file.links.iter().any(is_it) || file.unread_links.iter().any(is_unread))
}

/// What comes a second time, and where it was first.
fn doubles(named: impl Iterator<Item = (At, String)>) -> Vec<(At, String, At)> {
    let mut named: Vec<(At, String)> = named.collect();
    named.sort();
    let mut first: BTreeMap<String, At> = BTreeMap::new();
    let mut doubles = Vec::new();
    for (at, name) in named {
        match first.get(&name) {
            Some(before) => doubles.push((at, name, *before)),
            None => {
                first.insert(name, at);
            }
        }
    }
    doubles
}

/// What keeps an account as it is at its broker.
fn why_fixed(stored: &StoredAccount) -> Option<String> {
    if stored.copies_open > 0 {
        return Some(format!("it has {} open copies", stored.copies_open));
    }
    if stored.account.enabled || stored.is_owned {
        return Some(
            "it is on or a node owns it, whose session would not hear of it: switch it off first"
                .to_owned(),
        );
    }
    None
}

fn plain(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn or_nothing(text: Option<&str>) -> &str {
    text.filter(|text| !text.is_empty()).unwrap_or("nothing")
}

fn account_words(account: &NewAccount) -> Vec<(&'static str, String)> {
    let said = |key: &str| account.connection.get(key).map(plain).unwrap_or_default();
    let off = |text: String| if text == "false" { String::new() } else { text };
    let mut words = vec![("platform", account.platform.clone())];
    words.extend(CONNECTION_WORDS.iter().map(|key| (*key, off(said(key)))));
    words.push(("disabled", (!account.enabled).to_string()));
    words
}

/// What an added row says beyond nothing.
fn added(words: Vec<(&'static str, String)>) -> Vec<Field> {
    let told = words.into_iter().filter(|(_, to)| !to.is_empty() && to != "false");
    told.map(|(field, to)| Field { field, from: None, to }).collect()
}

fn changed(from: Vec<(&'static str, String)>, to: Vec<(&'static str, String)>) -> Vec<Field> {
    let pairs = from.into_iter().zip(to).filter(|((_, from), (_, to))| from != to);
    pairs.map(|((field, from), (_, to))| Field { field, from: Some(from), to }).collect()
}

/// A way along the links, its ends included.
fn way_between<'a>(
    next: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    from: &'a str,
    to: &'a str,
) -> Option<Vec<&'a str>> {
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut waiting = vec![from];
    while let Some(here) = waiting.pop() {
        if here == to {
            let mut way = vec![here];
            while let Some(before) = way.last().and_then(|last| came_from.get(last)) {
                way.push(before);
            }
            way.reverse();
            return Some(way);
        }
        for follower in next.get(here).into_iter().flatten() {
            if *follower != from && !came_from.contains_key(follower) {
                came_from.insert(follower, here);
                waiting.push(follower);
            }
        }
    }
    None
}

#[cfg(test)]
#[path = "diff_tests.rs"]
mod tests;
