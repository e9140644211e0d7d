//! A file of accounts and links, read into the words of `lockstep account add` and `link add`.
//!
//! Decides: what the file declares, by the same parsers as the command line: each key is an option
//! of that verb, so that there is one list of rules.
//! In: the text. Out: [`Declared`], and every fault of the text with its place. Of entries with faults the
//! names are in it, so that what several entries come to is judged in the same run.
//!
//! Invariants:
//! 1. A key that is no option is a fault, and so is a value that the option refuses.
//! 2. A number is taken as it is written: no price or factor goes through a float.
//!
//! Not covered: what several entries come to, and what the database holds; that is `diff`.

use crate::cli::{account, link};
use crate::directory::{NewAccount, NewLink};
use clap::error::ErrorKind;
use clap::{ArgAction, Args, Command, FromArgMatches};
use schemas::AccountId;
use serde::Serialize;
use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A place in the file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct At {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// What is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fault {
    pub(super) at: At,
    pub(super) what: String,
}

impl Fault {
    pub(super) fn new(at: At, what: impl Into<String>) -> Fault {
        Fault { at, what: what.into() }
    }
}

/// An account of the file.
#[derive(Debug, Clone)]
pub(super) struct DeclaredAccount {
    pub(super) at: At,
    pub(super) account: NewAccount,
}

/// A link of the file; its accounts are names, and the numbers in `link` mean nothing.
#[derive(Debug, Clone)]
pub(super) struct DeclaredLink {
    pub(super) at: At,
    pub(super) master: String,
    pub(super) follower: String,
    pub(super) link: NewLink,
}

/// What a file declares, in its order.
#[derive(Debug, Clone, Default)]
pub(super) struct Declared {
    pub(super) accounts: Vec<DeclaredAccount>,
    pub(super) links: Vec<DeclaredLink>,
    /// Names of accounts whose entries have faults.
    pub(super) unread_accounts: Vec<(At, String)>,
    /// Master and follower of links whose entries have faults.
    pub(super) unread_links: Vec<(At, String, String)>,
}

/// Reads a file. With any fault, what is declared is not whole: it is good for finding more faults.
pub(super) fn parse(text: &str) -> (Declared, Vec<Fault>) {
    let mut reader = Reader { text, faults: Vec::new() };
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let at = reader.at(&error.span().unwrap_or_default());
        reader.faults.push(Fault::new(at, error.message()));
    }
    if !reader.faults.is_empty() {
        // What was guessed behind them would make faults of its own.
        reader.faults.sort();
        return (Declared::default(), reader.faults);
    }
    let mut declared = Declared::default();
    for (key, value) in document.get_ref() {
        match key.get_ref().as_ref() {
            "account" => {
                let (accounts, unread) = reader.accounts(value);
                declared.accounts.extend(accounts);
                let named = |(at, table)| Some((at, text_at(table, "name")?));
                declared.unread_accounts.extend(unread.into_iter().filter_map(named));
            }
            "link" => {
                let (links, unread) = reader.links(value);
                declared.links.extend(links);
                let named = |(at, table)| {
                    Some((at, text_at(table, "master")?, text_at(table, "follower")?))
                };
                declared.unread_links.extend(unread.into_iter().filter_map(named));
            }
            other => {
                let what = format!("unknown key {other:?}: a file has [[account]] and [[link]]");
                reader.fault(&key.span(), what);
            }
        }
    }
    declared.accounts.sort_by_key(|account| account.at);
    declared.links.sort_by_key(|link| link.at);
    reader.faults.sort();
    reader.faults.dedup();
    (declared, reader.faults)
}

/// The text of a key, if it has one.
fn text_at(table: &DeTable<'_>, key: &str) -> Option<String> {
    let (_, value) = table.iter().find(|(name, _)| name.get_ref() == key)?;
    match value.get_ref() {
        DeValue::String(text) => Some(text.clone().into_owned()),
        _ => None,
    }
}

struct Reader<'a> {
    text: &'a str,
    faults: Vec<Fault>,
}

type Entry<'i> = Spanned<DeValue<'i>>;

/// Entries with faults, and where they stand.
type Unread<'e, 'i> = Vec<(At, &'e DeTable<'i>)>;

impl Reader<'_> {
    fn at(&self, span: &Range<usize>) -> At {
        let before = &self.text[..self.text.floor_char_boundary(span.start)];
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        At {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }

    fn fault(&mut self, span: &Range<usize>, what: impl Into<String>) {
        let at = self.at(span);
        self.faults.push(Fault::new(at, what));
    }

    fn accounts<'e, 'i>(
        &mut self,
        entries: &'e Entry<'i>,
    ) -> (Vec<DeclaredAccount>, Unread<'e, 'i>) {
        let command = account::AddArgs::augment_args(entry_command("account"));
        let read = |entry: &Read| {
            let words = account::AddArgs::from_arg_matches(&entry.matches)
                .map_err(|error| (entry.at, first_line(&error)))?;
            let at = entry.place("name");
            let account = words.account().map_err(|what| entry.blame(&what))?;
            Ok(DeclaredAccount { at, account })
        };
        self.entries(&command, entries, "name", read)
    }

    fn links<'e, 'i>(&mut self, entries: &'e Entry<'i>) -> (Vec<DeclaredLink>, Unread<'e, 'i>) {
        let command = link::AddArgs::augment_args(entry_command("link"));
        let read = |entry: &Read| {
            let words = link::AddArgs::from_arg_matches(&entry.matches)
                .map_err(|error| (entry.at, first_line(&error)))?;
            let (master, follower) = (words.master.clone(), words.follower.clone());
            let link =
                words.link(AccountId::MIN, AccountId::MIN).map_err(|what| entry.blame(&what))?;
            Ok(DeclaredLink { at: entry.place("master"), master, follower, link })
        };
        self.entries(&command, entries, "master", read)
    }

    /// Each entry, or that it has faults; it stands where its key `first` does.
    fn entries<'e, 'i, T>(
        &mut self,
        command: &Command,
        entries: &'e Entry<'i>,
        first: &str,
        read: impl Fn(&Read) -> Result<T, (At, String)>,
    ) -> (Vec<T>, Unread<'e, 'i>) {
        let name = command.get_name().to_owned();
        let Some(tables) = entries.get_ref().as_array() else {
            self.fault(&entries.span(), format!("must be written as [[{name}]]"));
            return (Vec::new(), Vec::new());
        };
        let (mut all, mut unread) = (Vec::new(), Vec::new());
        for entry in tables.iter() {
            let Some(table) = entry.get_ref().as_table() else {
                self.fault(&entry.span(), format!("must be written as [[{name}]]"));
                continue;
            };
            let key = table.iter().find(|(key, _)| key.get_ref() == first);
            let at = self.at(&key.map_or_else(|| entry.span(), |(key, _)| key.span()));
            let Some(matched) = self.entry(command, table, &entry.span()) else {
                unread.push((at, table));
                continue;
            };
            match read(&matched) {
                Ok(declared) => all.push(declared),
                Err((place, what)) => {
                    self.faults.push(Fault::new(place, what));
                    unread.push((at, table));
                }
            }
        }
        (all, unread)
    }

    /// One entry as the arguments of its verb; nothing if anything of it is wrong.
    fn entry(
        &mut self,
        command: &Command,
        table: &DeTable<'_>,
        span: &Range<usize>,
    ) -> Option<Read> {
        let faults_before = self.faults.len();
        let mut options = Vec::new();
        let mut positionals: Vec<(usize, String)> = Vec::new();
        let mut places = Vec::new();
        for (key, value) in table {
            let word = key.get_ref().as_ref();
            places.push((word.to_owned(), self.at(&key.span())));
            let Some(argument) = command.get_arguments().find(|a| is_named(a, word)) else {
                let words = command.get_arguments().map(name_of).collect::<Vec<_>>().join(", ");
                let what = format!("unknown key {word:?}: {} has {words}", command.get_name());
                self.fault(&key.span(), what);
                continue;
            };
            let texts = match texts_of(argument, value.get_ref()) {
                Ok(texts) => texts,
                Err(what) => {
                    self.fault(&value.span(), format!("{word} {what}"));
                    continue;
                }
            };
            if let Some(place) = place_of(command, argument) {
                positionals.extend(texts.into_iter().map(|text| (place, text)));
                continue;
            }
            let written: Vec<String> = if matches!(argument.get_action(), ArgAction::SetTrue) {
                texts.iter().map(|_| format!("--{word}")).collect()
            } else {
                texts.iter().map(|text| format!("--{word}={text}")).collect()
            };
            if let Err(what) = alone(command, &written) {
                self.fault(&value.span(), what);
            }
            options.extend(written);
        }
        for argument in command.get_positionals() {
            let name = name_of(argument);
            if !table.iter().any(|(key, _)| key.get_ref() == name) {
                self.fault(span, format!("{} needs {name}", command.get_name()));
            }
        }
        if self.faults.len() > faults_before {
            return None;
        }
        positionals.sort();
        options.push("--".to_owned());
        options.extend(positionals.into_iter().map(|(_, text)| text));
        match command.clone().try_get_matches_from(options) {
            Ok(matches) => Some(Read { at: self.at(span), places, matches }),
            Err(error) => {
                self.fault(span, first_line(&error));
                None
            }
        }
    }
}

/// An entry whose words are all right, one by one.
struct Read {
    at: At,
    places: Vec<(String, At)>,
    matches: clap::ArgMatches,
}

impl Read {
    /// Where a key stands; the entry's place where it has none.
    fn place(&self, key: &str) -> At {
        self.places.iter().find(|(name, _)| name == key).map_or(self.at, |(_, at)| *at)
    }

    /// The place of the key that the sentence begins with.
    fn blame(&self, what: &str) -> (At, String) {
        let word = what.split([' ', ':']).next().unwrap_or_default().trim_start_matches("--");
        (self.place(word), what.replace("--", ""))
    }
}

fn entry_command(name: &'static str) -> Command {
    Command::new(name).no_binary_name(true).disable_help_flag(true)
}

fn name_of(argument: &clap::Arg) -> &str {
    argument.get_long().unwrap_or_else(|| argument.get_id().as_str())
}

fn is_named(argument: &clap::Arg, word: &str) -> bool {
    name_of(argument) == word
}

/// Which positional argument it is.
fn place_of(command: &Command, argument: &clap::Arg) -> Option<usize> {
    command.get_positionals().position(|positional| positional.get_id() == argument.get_id())
}

/// The texts that an argument is given; none for a switch that is off.
fn texts_of(argument: &clap::Arg, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    match (argument.get_action(), value) {
        (ArgAction::SetTrue, DeValue::Boolean(is_on)) => {
            Ok(is_on.then(|| "true".to_owned()).into_iter().collect())
        }
        (ArgAction::SetTrue, other) => {
            Err(format!("must be true or false, got a {}", other.type_str()))
        }
        (ArgAction::Append, DeValue::Table(pairs)) => pairs
            .iter()
            .map(|(key, value)| Ok(format!("{}={}", key.get_ref(), text_of(value.get_ref())?)))
            .collect(),
        (ArgAction::Append, DeValue::Array(values)) => {
            values.iter().map(|value| text_of(value.get_ref())).collect()
        }
        (_, value) => Ok(vec![text_of(value)?]),
    }
}

fn text_of(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.clone().into_owned()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        DeValue::Integer(_) => Err("must be a decimal number".to_owned()),
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            Err(format!("must be a text or a number, got a {}", value.type_str()))
        }
    }
}

/// What an option alone is refused for; that it needs another one is told of the whole entry.
fn alone(command: &Command, written: &[String]) -> Result<(), String> {
    let dummies = command.get_positionals().map(|_| "x".to_owned());
    let words = written.iter().cloned().chain(["--".to_owned()]).chain(dummies);
    match command.clone().try_get_matches_from(words) {
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(first_line(&error)),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The sentence of an error of the command line, in the words of a file.
fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let sentence: Vec<&str> = text
        .trim_start_matches("error: ")
        .lines()
        .map(str::trim)
        .take_while(|l| !l.is_empty())
        .collect();
    sentence.join(" ").replace("--", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        parse(text).1.iter().map(|fault| format!("{} {}", fault.at, fault.what)).collect()
    }

    #[test]
    fn entries_are_read_as_the_command_line_reads_its_words() {
        let text = r#"
            [[account]]
            name = "alice"
            address = "127.0.0.1:4100"
            login = 77

            [[account]]
            name = "boss"
            platform = "external"
            disabled = true

            [[link]]
            master = "boss"
            follower = "alice"
            value = 0.10
            magic = 4711
            below-min = "use-min"
            slippage-points = 30
            no-stops = true
            reverse = false
            symbol = { GOLD = "XAUUSD", "US30.c" = "DJ30" }
        "#;
        let (declared, faults) = parse(text);
        assert_eq!(faults, []);
        let [alice, boss] = &declared.accounts[..] else { panic!("{declared:?}") };
        assert_eq!(alice.account.connection["login"], 77);
        assert!(alice.account.enabled && !boss.account.enabled);
        assert_eq!(boss.account.platform, "external");
        let [link] = &declared.links[..] else { panic!("{declared:?}") };
        let words = link::words(&link.link);
        let word = |name: &str| words.iter().find(|(word, _)| *word == name).unwrap().1.as_str();
        assert_eq!(link.link.magic.unwrap().get(), 4711);
        let expected = [
            ("value", "0.1"),
            ("below-min", "use-min"),
            ("slippage-points", "30"),
            ("no-stops", "true"),
            ("no-pendings", "false"),
            ("reverse", "false"),
            ("symbol", "GOLD=XAUUSD US30.c=DJ30"),
        ];
        for (name, value) in expected {
            assert_eq!(word(name), value, "{name}");
        }
    }

    #[test]
    fn every_rule_of_a_link_is_compared_by_a_word_of_its_own() {
        let command = link::AddArgs::augment_args(entry_command("link"));
        let plain = NewLink::plain(
            AccountId::MIN,
            AccountId::MIN,
            reconcile::Sizing::Multiplier(rust_decimal::Decimal::ONE),
        );
        let words: Vec<&str> = link::words(&plain).iter().map(|(word, _)| *word).collect();
        // The magic is kept where the file names none.
        let options = command.get_arguments().filter_map(clap::Arg::get_long);
        let unlike: Vec<&str> = options.filter(|o| *o != "magic" && !words.contains(o)).collect();
        assert!(unlike.is_empty(), "{unlike:?}");
    }

    #[test]
    fn every_fault_is_told_at_once_with_its_place() {
        let text = "\
acount = 1
[[account]]
name = \"bad name\"
address = \"nowhere\"
[[account]]
name = \"one\"
adress = \"127.0.0.1:1\"
[[link]]
master = \"one\"
value = 0
[[link]]
master = \"one\"
follower = \"two\"
value = 0
[[link]]
master = \"one\"
follower = \"two\"
sizing = \"lots\"
slippage-points = -5
reverse = \"yes\"
symbol = { GOLD = 1.5, X = true }
magic = 0x10
";
        let told = faults(text);
        let expected = [
            ("1:1", "acount"),
            ("4:11", "nowhere"),
            ("7:1", "adress"),
            ("8:1", "follower"),
            ("14:1", "value must be above 0, got 0"),
            ("18:10", "possible values: multiplier"),
            ("19:19", "-5"),
            ("20:11", "reverse must be true or false"),
            ("21:10", "symbol must be a text"),
            ("22:9", "magic must be a decimal"),
        ];
        assert_eq!(told.len(), expected.len(), "{told:#?}");
        for (told, (at, what)) in told.iter().zip(expected) {
            assert!(
                told.starts_with(&format!("{at} ")) && told.contains(what),
                "{told} / {at} {what}"
            );
        }
        assert_eq!(
            faults("[[account]]\nname = \"bad name\"\nplatform = \"external\"")[0][..4],
            *"2:1 "
        );
    }

    #[test]
    fn text_that_is_no_toml_is_told_where_it_breaks() {
        let told = faults("[[account]]\nname = \n[[link]]\nmaster = \"a\nfollower = \"b\"\n");
        assert!(told.len() >= 2, "{told:?}");
        assert!(told[0].starts_with("2:") && told[1].starts_with("4:"), "{told:?}");
        let told = faults("[[account]]\nname = \"a\"\nname = \"b\"\n");
        assert!(told[0].starts_with("3:1 duplicate key"), "{told:?}");
    }
}
