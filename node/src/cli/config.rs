//! `lockstep config`: what a node would make of its settings.
//!
//! In: the environment and a file of settings. Out: every setting with its value and where that comes
//! from, and every fault at once. Secrets are hidden.

use super::settings::{SettingsArg, Sourced};
use super::table::{TableRow, render};
use super::{CliError, node, out};
use crate::config::{NodeConfig, SETTINGS, Setting, Vars};
use crate::secret::SecretUrl;
use clap::{Args, Subcommand};
use serde::Serialize;

/// Arguments of `lockstep config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(flatten)]
    settings: SettingsArg,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: ConfigVerb,
}

#[derive(Debug, Subcommand)]
enum ConfigVerb {
    /// Say whether a node may start with these settings; exit code 1 if not.
    Check,
    /// Print every setting with its value and where that comes from.
    Show,
}

#[derive(Debug, Serialize)]
struct Shown {
    setting: &'static str,
    value: String,
    from: String,
    meaning: &'static str,
}

impl TableRow for Shown {
    const HEAD: &'static [&'static str] = &["setting", "value", "from"];
    fn cells(&self) -> Vec<String> {
        vec![self.setting.to_owned(), self.value.clone(), self.from.clone()]
    }
}

#[derive(Debug, Serialize)]
struct Checked {
    valid: bool,
    faults: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    settings: Vec<Shown>,
}

/// The settings of a node, or every fault in them.
pub(super) fn read(vars: &Sourced) -> Result<NodeConfig, Vec<String>> {
    let config = NodeConfig::from_vars(vars).map_err(|error| error.faults)?;
    let faults = node::unusable(&config);
    if faults.is_empty() { Ok(config) } else { Err(faults) }
}

/// Runs `lockstep config`.
pub fn run(args: ConfigArgs) -> Result<(), CliError> {
    let vars = args.settings.read()?;
    let read = read(&vars);
    let settings = match args.verb {
        ConfigVerb::Check => Vec::new(),
        ConfigVerb::Show => shown(&vars, read.as_ref().ok()),
    };
    let faults = read.err().unwrap_or_default();
    if args.json {
        out::json(&Checked { valid: faults.is_empty(), faults: faults.clone(), settings })?;
    } else if !settings.is_empty() {
        out::line(render(Shown::HEAD, settings.iter().map(TableRow::cells)))?;
    } else if faults.is_empty() {
        out::line("the settings are valid")?;
    }
    if faults.is_empty() { Ok(()) } else { Err(wrong(&faults)) }
}

/// All faults, one a line.
fn wrong(faults: &[String]) -> CliError {
    let is = if faults.len() == 1 { "setting is" } else { "settings are" };
    CliError::No(format!("{} {is} wrong:\n  {}", faults.len(), faults.join("\n  ")))
}

/// Every setting, as a node sees it; as it is written where the settings are no node's.
fn shown(vars: &Sourced, config: Option<&NodeConfig>) -> Vec<Shown> {
    let effective = config.map(NodeConfig::effective).unwrap_or_default();
    let value = |setting: &Setting| {
        let of = effective.iter().find(|(name, _)| *name == setting.name);
        of.map_or_else(|| as_written(setting, vars), |(_, value)| value.clone())
    };
    let row = |setting: &Setting| Shown {
        setting: setting.name,
        value: value(setting),
        from: vars.origin(setting.name).to_owned(),
        meaning: setting.meaning,
    };
    SETTINGS.iter().map(row).collect()
}

fn as_written(setting: &Setting, vars: &dyn Vars) -> String {
    let given = vars.get(setting.name).filter(|text| !text.trim().is_empty());
    let text = given.unwrap_or_else(|| setting.default.unwrap_or_default().to_owned());
    if text.is_empty() {
        text
    } else if setting.name.contains("URL") {
        let urls = text.split(',').map(|url| SecretUrl::new(url.trim()).to_string());
        urls.collect::<Vec<_>>().join(",")
    } else if SECRET_WORDS.iter().any(|word| setting.name.contains(word)) {
        "***".to_owned()
    } else {
        text
    }
}

/// A setting with one of these in its name may hold a secret.
const SECRET_WORDS: &[&str] = &["KEY", "SECRET", "TOKEN", "PASSWORD"];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_setting_that_is_wrong_is_shown_as_written_and_without_its_secret() {
        let written = |name: &'static str, text: &str| {
            let setting = SETTINGS.iter().find(|setting| setting.name == name).unwrap();
            as_written(setting, &BTreeMap::from([(name.to_owned(), text.to_owned())]))
        };
        assert_eq!(written("LOCKSTEP_LEASE", "60"), "60");
        assert_eq!(written("LOCKSTEP_LEASE", " "), "60s");
        let urls = written("LOCKSTEP_NATS_URLS", "nats://a:hunter2@b:4222, tls://hunter2@c");
        assert_eq!(urls, "nats://a:***@b:4222,tls://***@c");
        let key = Setting { name: "LOCKSTEP_MASTER_KEY", default: None, meaning: "" };
        let vars = BTreeMap::from([("LOCKSTEP_MASTER_KEY".to_owned(), "hunter2".to_owned())]);
        assert_eq!(as_written(&key, &vars), "***");
    }
}
