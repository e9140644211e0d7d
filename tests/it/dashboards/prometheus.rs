//! What a real Prometheus is asked.

use devstack::Prometheus;
use lockstep_tests::http::Client;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// How long one answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// The window of a query: longer than the test.
const WINDOW_S: i64 = 600;

/// The program that `variable` names, or the one that `./run check grafana` got, or the one on PATH.
pub(super) fn find(name: &str, variable: &str) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(variable) {
        let program = PathBuf::from(named);
        assert!(program.is_file(), "{variable}: there is no file {}", program.display());
        return Some(program);
    }
    let got = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.lockstep/prometheus/usr/bin");
    let path = std::env::var_os("PATH")?;
    [got]
        .into_iter()
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// A line that the test runner does not swallow.
pub(super) fn say(line: &str) {
    // Who closed stderr does not want to hear it.
    let _nobody_listens = writeln!(std::io::stderr(), "{line}");
}

/// The values of each series that a query has in the last minutes.
///
/// Errors: what Prometheus said, or what it did not.
pub(super) async fn series(prometheus: &Prometheus, query: &str) -> Result<Vec<Vec<f64>>, String> {
    let now_s = lockstep::clock::NodeClock::system().wall().0 / 1_000_000;
    let page = format!(
        "/api/v1/query_range?query={}&start={}&end={now_s}&step=1",
        percent_encoded(query),
        now_s - WINDOW_S
    );
    let body = Client::at(prometheus.address()).try_ask("GET", &page, &[], None).await?.body;
    let answer: Value = serde_json::from_str(&body).map_err(|e| format!("{e}: {body}"))?;
    if answer["status"] != "success" {
        return Err(body);
    }
    let result = answer["data"]["result"].as_array().ok_or_else(|| body.clone())?;
    result
        .iter()
        .map(|series| {
            let values = series["values"].as_array().ok_or_else(|| body.clone())?;
            values
                .iter()
                .map(|pair| pair[1].as_str().and_then(|v| v.parse().ok()))
                .collect::<Option<Vec<f64>>>()
                .ok_or_else(|| format!("values that are no numbers: {series}"))
        })
        .collect()
}

fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// Prometheus' own lint of a metrics page (`check metrics`) or another text, if its tool is there.
pub(super) async fn promtool(args: &[&str], input: &str) {
    let Some(program) = find("promtool", "LOCKSTEP_PROMTOOL") else {
        say("SKIPPED: promtool: there is none; it comes with prometheus");
        return;
    };
    let mut promtool = tokio::process::Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
    let ended = tokio::time::timeout(ANSWER_LIMIT, promtool.wait_with_output()).await;
    let ended = ended.expect("promtool ends in time").unwrap();
    let said = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(ended.status.success(), "promtool {args:?}: {}\n{input}", said.concat());
}
