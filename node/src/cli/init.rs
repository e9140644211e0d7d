//! `lockstep init`: asks for what a node must know, writes a file of settings, and checks it.
//!
//! Invariants:
//! 1. A file that is there is never overwritten, and the new one is its owner's alone to read.
//! 2. Every setting that is not the default is in the file, asked for or not: a node that has the file
//!    alone is the node that was checked.
//! 3. Without a terminal nobody is asked: what flags and environment do not say is a fault.

use super::settings::{SettingsArg, unwritable};
use super::{CliError, config, doctor, out};
use crate::config::{ProcessVars, SETTINGS, Vars};
use crate::secret::SecretUrl;
use clap::Args;
use std::fs::OpenOptions;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// Arguments of `lockstep init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// The file to write; it must not be there yet.
    #[arg(long, value_name = "FILE", default_value = "lockstep.env")]
    file: PathBuf,
    /// Postgres URL. Default: LOCKSTEP_DATABASE_URL, where everybody on the machine cannot read a
    /// password.
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// NATS servers, separated by commas. Default: LOCKSTEP_NATS_URLS.
    #[arg(long, value_name = "URLS")]
    nats: Option<String>,
    /// Certificates (PEM) that those of the servers are checked by. Default:
    /// LOCKSTEP_NATS_ROOT_CERTIFICATES.
    #[arg(long, value_name = "FILE")]
    nats_root_certificates: Option<String>,
    /// Name of the node. Default: LOCKSTEP_NODE_NAME, else the platform and the host name.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Folder on a local disk by which a restarted node takes its own accounts at once. Default:
    /// LOCKSTEP_STATE_FOLDER.
    #[arg(long, value_name = "FOLDER")]
    state_folder: Option<String>,
    /// Write the file without checking servers and machine.
    #[arg(long)]
    no_doctor: bool,
    /// Print the checks as JSON.
    #[arg(long)]
    json: bool,
}

/// One setting that is asked for.
struct Question {
    name: &'static str,
    words: &'static str,
    flag: Option<String>,
    /// Taken when nobody says anything; a setting without one must be said.
    default: Option<&'static str>,
}

/// Runs `lockstep init`.
pub fn run(args: InitArgs) -> Result<(), CliError> {
    let shown = args.file.display().to_string();
    if args.file.exists() {
        return Err(CliError::Usage(format!(
            "--file {shown}: is there already, and is not overwritten"
        )));
    }
    let is_asked = std::io::stdin().is_terminal();
    let mut text =
        "# Made by `lockstep init`. `lockstep node --settings` explains every setting.\n"
            .to_owned();
    let mut answers = Vec::new();
    for question in questions(&args) {
        answers.push((question.name, answer(&question, is_asked)?));
    }
    answers.extend(unasked(&answers, &ProcessVars));
    for (name, value) in answers {
        if let Some(what) = unwritable(&value) {
            return Err(CliError::Usage(format!("{name}: {what}")));
        }
        if !value.is_empty() {
            text += &format!("{name}='{value}'\n");
        }
    }
    // What is wrong in itself is not written.
    let vars = SettingsArg::of_text(&shown, &text)?;
    config::read(&vars).map_err(|faults| CliError::Usage(faults.join("\n")))?;
    write(&args.file, &text).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => CliError::Usage(format!("--file {shown}: is there already")),
        _ => CliError::missing(format!("--file {shown}"), error),
    })?;
    let next = format!("set -a; . {shown}; set +a; lockstep node");
    if !args.json {
        out::line(format_args!("{shown} is written; a node with it: {next}"))?;
    }
    if args.no_doctor { Ok(()) } else { doctor::examine(&vars, args.json) }
}

/// What the environment says of all other settings, where it is not the default.
fn unasked(asked: &[(&'static str, String)], vars: &dyn Vars) -> Vec<(&'static str, String)> {
    let others =
        SETTINGS.iter().filter(|setting| asked.iter().all(|(name, _)| *name != setting.name));
    let said = others.filter_map(|setting| {
        let value = vars.get(setting.name)?.trim().to_owned();
        (!value.is_empty() && Some(value.as_str()) != setting.default)
            .then_some((setting.name, value))
    });
    said.collect()
}

fn questions(args: &InitArgs) -> [Question; 5] {
    let question = |name, words, flag: &Option<String>, default| Question {
        name,
        words,
        flag: flag.clone(),
        default,
    };
    [
        question(
            "LOCKSTEP_DATABASE_URL",
            "Postgres URL, such as postgres://lockstep:password@db.example/lockstep",
            &args.database,
            None,
        ),
        question(
            "LOCKSTEP_NATS_URLS",
            "NATS servers, separated by commas",
            &args.nats,
            Some("nats://127.0.0.1:4222"),
        ),
        question(
            "LOCKSTEP_NATS_ROOT_CERTIFICATES",
            "File with the certificates that the NATS servers are checked by; empty: the system's",
            &args.nats_root_certificates,
            Some(""),
        ),
        question(
            "LOCKSTEP_NODE_NAME",
            "Name of the node; empty: by the host",
            &args.node_name,
            Some(""),
        ),
        question(
            "LOCKSTEP_STATE_FOLDER",
            "Folder on a local disk for a quick restart; empty: none",
            &args.state_folder,
            Some(""),
        ),
    ]
}

/// A flag, or what a person says, or what the environment says, or the default.
fn answer(question: &Question, is_asked: bool) -> Result<String, CliError> {
    if let Some(flag) = &question.flag {
        return Ok(flag.clone());
    }
    let set = ProcessVars.get(question.name).filter(|text| !text.trim().is_empty());
    let fallback = set.or_else(|| question.default.map(str::to_owned));
    if !is_asked {
        return fallback.ok_or_else(|| {
            CliError::Usage(format!(
                "{} is missing: give the flag or set the variable, or answer at a terminal",
                question.name
            ))
        });
    }
    loop {
        let offered =
            fallback.as_ref().filter(|text| !text.is_empty()).map(|text| hidden(question, text));
        let offered = offered.map_or_else(String::new, |text| format!(" [{text}]"));
        out::ask(format_args!("{}{offered}: ", question.words))?;
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line)?;
        let line = line.trim();
        match (&fallback, line) {
            (_, said) if !said.is_empty() => return Ok(said.to_owned()),
            (Some(fallback), _) => return Ok(fallback.clone()),
            (None, _) if read == 0 => {
                return Err(CliError::Usage(format!("{} is missing", question.name)));
            }
            (None, _) => {}
        }
    }
}

fn hidden(question: &Question, text: &str) -> String {
    if !question.name.contains("URL") {
        return text.to_owned();
    }
    let urls = text.split(',').map(|url| SecretUrl::new(url.trim()).to_string());
    urls.collect::<Vec<_>>().join(",")
}

fn write(path: &PathBuf, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn what_is_set_and_not_asked_for_is_kept_where_it_is_not_the_default() {
        let vars: BTreeMap<String, String> = [
            ("LOCKSTEP_API_LISTEN", "127.0.0.1:9470"),
            ("LOCKSTEP_MASTER_KEY_FILE", "/etc/lockstep/master-key"),
            ("LOCKSTEP_METRICS_LISTEN", "127.0.0.1:9464"),
            ("LOCKSTEP_EVENT_LOG", " "),
            ("LOCKSTEP_NODE_NAME", "of the environment"),
            ("LOCKSTEP_TOOLS", "/tools"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        let mut kept = unasked(&[("LOCKSTEP_NODE_NAME", "said".to_owned())], &vars);
        kept.sort_unstable();
        let expected = [
            ("LOCKSTEP_API_LISTEN", "127.0.0.1:9470"),
            ("LOCKSTEP_MASTER_KEY_FILE", "/etc/lockstep/master-key"),
        ];
        assert!(kept.iter().map(|(name, value)| (*name, value.as_str())).eq(expected), "{kept:?}");
    }
}
