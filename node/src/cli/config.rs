//! `lockstep config`: what a node would make of its settings.
//!
//! In: the environment and a file of settings. Out: every setting with its value and where that comes
//! from, and every fault at once. Secrets are hidden.

use super::settings::{SettingsArg, Sourced};
use super::table::{TableRow, render};
use super::{CliError, node, out};
use crate::config::{self, MASTER_KEY, MasterKeySource, NodeConfig, SETTINGS, Setting, Vars};
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
        from: origin(vars, setting.name),
        meaning: setting.meaning,
    };
    SETTINGS.iter().map(row).collect()
}

/// Where a value comes from: that of the master keys may be in a file that another setting names.
fn origin(vars: &Sourced, name: &str) -> String {
    let source = if name == MASTER_KEY { config::master_key_source(vars) } else { None };
    match source {
        Some(MasterKeySource::File(path)) => format!("file {}", path.display()),
        Some(MasterKeySource::Credential(path)) => format!("credential {}", path.display()),
        Some(MasterKeySource::Variable) | None => vars.origin(name).to_owned(),
    }
}

fn as_written(setting: &Setting, vars: &dyn Vars) -> String {
    let given = vars.get(setting.name).filter(|text| !text.trim().is_empty());
    let text = given.unwrap_or_else(|| setting.default.unwrap_or_default().to_owned());
    if text.is_empty() {
        text
    } else if setting.name.contains("URL") {
        let urls = text.split(',').map(|url| SecretUrl::new(url.trim()).to_string());
        urls.collect::<Vec<_>>().join(",")
    } else if SECRET_WORDS.iter().any(|word| setting.name.contains(word))
        && !setting.name.ends_with("_FILE")
    {
        "***".to_owned()
    } else {
        text
    }
}

/// A setting with one of these in its name may hold a secret, unless it names the file that does.
const SECRET_WORDS: &[&str] = &["KEY", "SECRET", "TOKEN", "PASSWORD"];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn master_keys_out_of_a_file_are_shown_to_come_from_there() {
        let vars = |text: &str| SettingsArg::of_text("a.env", text).unwrap();
        let from = |vars: &Sourced| {
            let row = shown(vars, None).into_iter().find(|row| row.setting == MASTER_KEY);
            row.unwrap().from
        };
        assert_eq!(from(&vars("A=1")), "default");
        assert_eq!(from(&vars("LOCKSTEP_MASTER_KEY=hunter2")), "a.env");
        assert_eq!(from(&vars("LOCKSTEP_MASTER_KEY_FILE=/etc/x/key")), "file /etc/x/key");
        let folder = std::env::temp_dir().join(format!("lockstep-shown-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let unit = vars(&format!("CREDENTIALS_DIRECTORY={}", folder.display()));
        assert_eq!(from(&unit), "default", "it has no such credential");
        let credential = folder.join("lockstep-master-key");
        std::fs::write(&credential, "").unwrap();
        assert_eq!(from(&unit), format!("credential {}", credential.display()));
        std::fs::remove_dir_all(&folder).unwrap();
    }

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
        assert_eq!(written("LOCKSTEP_MASTER_KEY_FILE", "/etc/x/key"), "/etc/x/key");
    }
}
