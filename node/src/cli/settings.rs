//! Settings as a person hands them over: the environment, and a file of `NAME=VALUE` lines such as
//! `lockstep init` writes, systemd reads (`EnvironmentFile=`) and a shell sources.
//!
//! Decides: what each variable is, and where it comes from. A file goes before the environment, as
//! it does for systemd and for a shell that sources it.
//! In: the text of the file. Out: [`Sourced`], or every line that cannot be read.

use super::CliError;
use crate::config::{PREFIX, ProcessVars, Vars};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Where a verb finds the settings of a node.
#[derive(Debug, clap::Args)]
pub(super) struct SettingsArg {
    /// A file of settings, as `lockstep init` writes it; it goes before the environment.
    #[arg(long, value_name = "FILE", global = true)]
    settings: Option<PathBuf>,
}

impl SettingsArg {
    /// The variables, with the origin of each.
    pub(super) fn read(&self) -> Result<Sourced, CliError> {
        let file = match &self.settings {
            None => BTreeMap::new(),
            Some(path) => read_file(path)?,
        };
        let from = self.settings.as_ref().map(|path| path.display().to_string());
        Ok(Sourced { file, from: from.unwrap_or_default() })
    }

    /// The variables with those of a file that is not written yet.
    pub(super) fn of_text(from: &str, text: &str) -> Result<Sourced, CliError> {
        let file = parse(text).map_err(|faults| told(from, &faults))?;
        Ok(Sourced { file, from: from.to_owned() })
    }
}

/// Variables of a file, and behind them those of the process.
#[derive(Debug)]
pub(super) struct Sourced {
    file: BTreeMap<String, String>,
    from: String,
}

impl Sourced {
    /// Where the value of a setting comes from.
    pub(super) fn origin(&self, name: &str) -> &str {
        // An empty text means the default, as for a node.
        let says = |text: Option<String>| text.is_some_and(|text| !text.trim().is_empty());
        if self.file.contains_key(name) {
            if says(self.get(name)) { &self.from } else { "default" }
        } else if says(ProcessVars.get(name)) {
            "environment"
        } else {
            "default"
        }
    }
}

impl Vars for Sourced {
    fn get(&self, name: &str) -> Option<String> {
        self.file.get(name).cloned().or_else(|| ProcessVars.get(name))
    }

    fn names(&self) -> Vec<String> {
        let mut names = ProcessVars.names();
        names.extend(self.file.keys().filter(|name| name.starts_with(PREFIX)).cloned());
        names.sort();
        names.dedup();
        names
    }
}

fn read_file(path: &Path) -> Result<BTreeMap<String, String>, CliError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::missing(format!("--settings {shown}"), error))?;
    parse(&text).map_err(|faults| told(&shown.to_string(), &faults))
}

fn told(from: &str, faults: &[(usize, String)]) -> CliError {
    let faults: Vec<String> =
        faults.iter().map(|(line, what)| format!("{from}:{line}: {what}")).collect();
    CliError::Usage(faults.join("\n"))
}

/// Why a value cannot stand between quotes in a file that shells and systemd read.
pub(super) fn unwritable(value: &str) -> Option<&'static str> {
    value.contains(['\'', '\n', '\\']).then_some("must be text without quotes and backslashes")
}

/// Variables of a text, or the lines that are none.
fn parse(text: &str) -> Result<BTreeMap<String, String>, Vec<(usize, String)>> {
    let mut values = BTreeMap::new();
    let mut faults = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        let line = line.strip_prefix("export ").unwrap_or(line);
        // The text of the line is not repeated: it may hold a secret.
        let Some((name, value)) = line.split_once('=') else {
            faults.push((number, "expected NAME=VALUE".to_owned()));
            continue;
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(is_name) {
            faults.push((number, "the name before = must be letters, digits and '_'".to_owned()));
            continue;
        }
        match unquoted(value.trim()) {
            Some(value) if values.insert(name.to_owned(), value.to_owned()).is_none() => {}
            Some(_) => faults.push((number, format!("{name} is there twice"))),
            None => faults.push((number, format!("{name}: a quote is not closed"))),
        }
    }
    if faults.is_empty() { Ok(values) } else { Err(faults) }
}

/// A value without the quotes around it; nothing if one is missing.
fn unquoted(value: &str) -> Option<&str> {
    let Some(quote) = value.chars().next().filter(|c| matches!(c, '\'' | '"')) else {
        return Some(value);
    };
    value[1..].strip_suffix(quote)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_settings_is_read_as_a_shell_and_systemd_read_it() {
        let text =
            "# for node 1\n\nLOCKSTEP_LEASE=60s\nexport LOCKSTEP_LOG='info'\nA=\"b c\"\nB=\n";
        let values = parse(text).unwrap();
        let expected =
            [("A", "b c"), ("B", ""), ("LOCKSTEP_LEASE", "60s"), ("LOCKSTEP_LOG", "info")];
        assert!(values.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(expected));
    }

    #[test]
    fn every_line_that_cannot_be_read_is_told_without_its_text() {
        let text = "A=1\nhunter2\nB='hunter2\nA=hunter2\n=hunter2\n";
        let faults = parse(text).unwrap_err();
        let lines: Vec<usize> = faults.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [2, 3, 4, 5]);
        assert!(!format!("{faults:?}").contains("hunter2"), "{faults:?}");
    }

    #[test]
    fn a_file_goes_before_the_environment_and_says_so() {
        let file = [("LOCKSTEP_LEASE".to_owned(), "50s".to_owned())].into();
        let vars = Sourced { file, from: "a.env".to_owned() };
        assert_eq!(vars.get("LOCKSTEP_LEASE").as_deref(), Some("50s"));
        assert_eq!(vars.origin("LOCKSTEP_LEASE"), "a.env");
        assert_eq!(vars.origin("LOCKSTEP_NO_SUCH"), "default");
        assert!(vars.names().contains(&"LOCKSTEP_LEASE".to_owned()));
    }
}
