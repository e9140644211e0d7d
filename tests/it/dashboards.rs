//! The dashboards in `grafana/` against the metric tables, and against a real Prometheus.
//!
//! Decides: whether every panel says what it shows, and whether each of its queries answers.
//! In: `grafana/`, `lockstep::exporter::tables()`, two real nodes, a Prometheus if there is one.
//!
//! Invariants:
//! 1. A query names only metrics, labels and values of labels that a table has; every metric is on some
//!    panel.
//! 2. Every query answers at a Prometheus that scrapes two nodes, with a finite value.
//! 3. Every counter grows under the load of the test, or is listed in [`STAYS_AT_0`] with the reason.
//! 4. What a node serves is in the tables, labels and their values included.
//!
//! Not covered: Grafana itself. How a panel looks has not been seen by a test.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod expr;
mod fleet;
mod prometheus;

use bus::metrics::{Metric, MetricKind};
use devstack::Prometheus;
use expr::Expr;
use fleet::Fleet;
use lockstep_tests::http::Client;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Counters that may not grow under the load of the test, and why.
const STAYS_AT_0: &[(&str, &str)] = &[
    ("lockstep_lease_database_steps_total", "the database's clock does not step"),
    ("lockstep_lease_abandoned_total", "no session fails for long"),
    ("lockstep_lease_losses_total", "a node that is killed counts nothing any more"),
    ("lockstep_lease_rows_locked_total", "nobody holds a row"),
    ("lockstep_gate_dropped_total", "no order is on its way at the moment a lease is lost"),
    ("lockstep_gate_revocations_total", "the machine may or may not stall long enough"),
    ("lockstep_bus_events_local_total", "a master and its follower may be on two nodes"),
    ("lockstep_bus_messages_dropped_total", "every message is used"),
    ("lockstep_bus_epochs_raised_total", "the bus stays connected"),
    ("lockstep_bus_publishers_superseded_total", "each master has one publisher"),
    ("lockstep_bus_two_publishers_total", "each master has one publisher"),
    ("lockstep_bus_snapshots_wanted_total", "no follower needs a fresh snapshot of its own"),
    ("lockstep_bus_snapshot_tries_exhausted_total", "publishers answer"),
    ("lockstep_broker_session_open_failures_total", "the broker is there"),
    ("lockstep_reconcile_held_total", "no plan would close much"),
    ("lockstep_reconcile_restless_total", "plans come to rest"),
    ("lockstep_duplicates_found_total", "there are none"),
    ("lockstep_uptime_recorded_total", "the test may end before a whole minute has"),
    ("lockstep_uptime_degraded_total", "nothing is missing"),
];

/// Labels that Prometheus adds.
const TARGET_LABELS: &[&str] = &["instance", "job"];
/// Metrics that Prometheus adds.
const TARGET_METRICS: &[&str] = &["up"];

/// Columns of a Grafana page.
const COLUMNS: u64 = 24;

/// How long the queries may take to answer after the last trade: some scrapes.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Pause between two rounds of queries: one scrape.
const ANSWER_PAUSE: Duration = Duration::from_secs(1);

struct Dashboard {
    file: String,
    json: Value,
}

struct Query<'a> {
    panel: &'a str,
    legend: &'a str,
    text: &'a str,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../grafana")
}

fn dashboards() -> Vec<Dashboard> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder().join("dashboards")).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(file.ends_with(".json"), "{file} is no dashboard");
        let text = std::fs::read_to_string(&path).unwrap();
        let json = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        found.push(Dashboard { file, json });
    }
    assert!(!found.is_empty(), "there are no dashboards");
    found
}

impl Dashboard {
    /// Every panel that shows something, those inside collapsed rows included.
    fn panels(&self) -> Vec<&Value> {
        let mut found = Vec::new();
        let mut open: Vec<&Value> = self.json["panels"].as_array().unwrap().iter().collect();
        while let Some(panel) = open.pop() {
            open.extend(panel["panels"].as_array().into_iter().flatten());
            if panel["type"] != "row" {
                found.push(panel);
            }
        }
        found
    }

    fn queries(&self) -> Vec<Query<'_>> {
        self.panels()
            .into_iter()
            .flat_map(|panel| {
                let panel_title = text(panel, "title");
                panel["targets"].as_array().unwrap().iter().map(move |target| Query {
                    panel: panel_title,
                    legend: text(target, "legendFormat"),
                    text: text(target, "expr"),
                })
            })
            .collect()
    }
}

/// A text that has to be there and say something.
fn text<'a>(of: &'a Value, field: &str) -> &'a str {
    let found = of[field].as_str().unwrap_or_default();
    assert!(!found.trim().is_empty(), "{field} is missing in {of}");
    found
}

/// Names as they are exported, with the table's row.
fn exported() -> BTreeMap<String, Metric> {
    let mut names = BTreeMap::new();
    for metric in lockstep::exporter::tables() {
        if metric.kind == MetricKind::Histogram {
            for suffix in ["_bucket", "_sum", "_count"] {
                names.insert(format!("{}{suffix}", metric.name), metric);
            }
        } else {
            names.insert(metric.name.to_owned(), metric);
        }
    }
    names
}

#[test]
fn every_panel_says_what_it_shows_in_which_unit_and_from_where() {
    let (mut uids, mut titles) = (BTreeSet::new(), BTreeSet::new());
    let all = dashboards();
    assert_eq!(all.len(), 5, "{:?}", all.iter().map(|d| &d.file).collect::<Vec<_>>());
    for dashboard in all {
        let file = &dashboard.file;
        text(&dashboard.json, "title");
        text(&dashboard.json, "description");
        let uid = text(&dashboard.json, "uid");
        assert_eq!(format!("{}.json", uid.trim_start_matches("lockstep-")), *file);
        assert!(uids.insert(uid.to_owned()), "{file}: uid is there twice");
        let to_others = &dashboard.json["links"][0];
        assert_eq!(to_others["type"], "dashboards", "{file}: no links to the others");
        assert_eq!(to_others["tags"], dashboard.json["tags"], "{file}: other tags");
        assert_no_overlap(&dashboard);
        let variables = dashboard.json["templating"]["list"].as_array().unwrap();
        let source = variables.iter().find(|v| v["name"] == "datasource").unwrap();
        assert_eq!(
            (&source["type"], &source["query"]),
            (&"datasource".into(), &"prometheus".into())
        );
        let mut ids = BTreeSet::new();
        for row in dashboard.json["panels"].as_array().unwrap() {
            assert!(ids.insert(row["id"].as_u64().unwrap()), "{file}: id {} twice", row["id"]);
        }
        for panel in dashboard.panels() {
            let title = text(panel, "title");
            assert!(titles.insert(title.to_owned()), "{file}: {title} is there twice");
            assert!(text(panel, "description").ends_with('.'), "{file}: {title}: description");
            text(&panel["fieldConfig"]["defaults"], "unit");
            text(panel, "interval");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{file}: {title}");
            let steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"].as_array().unwrap();
            let values: Vec<f64> =
                steps.iter().skip(1).map(|s| s["value"].as_f64().unwrap()).collect();
            assert!(
                steps[0]["value"].is_null() && values.is_sorted(),
                "{file}: {title}: {steps:?}"
            );
            let mut refs = BTreeSet::new();
            for target in panel["targets"].as_array().unwrap() {
                assert!(refs.insert(text(target, "refId")), "{file}: {title}: refId twice");
                assert_eq!(target["datasource"]["uid"], "${datasource}", "{file}: {title}");
            }
            assert!(!refs.is_empty(), "{file}: {title}: no query");
        }
    }
}

/// Each panel has its own place on the page.
fn assert_no_overlap(dashboard: &Dashboard) {
    let mut taken = BTreeMap::new();
    for panel in dashboard.json["panels"].as_array().unwrap() {
        let (title, place) = (text(panel, "title"), &panel["gridPos"]);
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|field| place[field].as_u64().unwrap());
        assert!(w > 0 && h > 0 && x + w <= COLUMNS, "{}: {title}: {place}", dashboard.file);
        for cell in (x..x + w).flat_map(|column| (y..y + h).map(move |row| (column, row))) {
            if let Some(other) = taken.insert(cell, title) {
                panic!("{}: {title} lies over {other} at {cell:?}", dashboard.file);
            }
        }
    }
}

#[test]
fn a_panel_leads_to_the_runbook_where_there_is_an_alert_for_it() {
    let alerts: BTreeSet<String> =
        alerts().into_iter().map(|(name, _)| name.to_lowercase()).collect();
    let mut linked = BTreeSet::new();
    for dashboard in dashboards() {
        let variables = dashboard.json["templating"]["list"].as_array().unwrap();
        let runbook = variables.iter().find(|v| v["name"] == "runbook").unwrap();
        assert_eq!(
            (&runbook["type"], &runbook["query"]),
            (&"constant".into(), &"RUNBOOK.md".into())
        );
        for panel in dashboard.panels() {
            let place = format!("{}: {}", dashboard.file, text(panel, "title"));
            for link in panel["links"].as_array().into_iter().flatten() {
                let alert = text(link, "url").strip_prefix("${runbook}#").unwrap();
                assert!(alerts.contains(alert), "{place}: no alert {alert}");
                assert!(text(link, "title").to_lowercase().ends_with(alert), "{place}: {link}");
                let steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"].as_array();
                assert!(steps.unwrap().len() > 1, "{place}: an alert, and no bad side");
                linked.insert(alert.to_owned());
            }
        }
    }
    assert_eq!(linked, alerts, "alerts that a panel leads to, and those that there are");
}

#[test]
fn the_runbook_names_only_panels_that_there_are() {
    let runbook = std::fs::read_to_string(folder().join("RUNBOOK.md")).unwrap();
    let dashboards = dashboards();
    let titles: BTreeSet<&str> =
        dashboards.iter().flat_map(Dashboard::panels).map(|panel| text(panel, "title")).collect();
    let mut named = 0;
    for line in runbook.lines().filter_map(|line| line.strip_prefix("**Look at:**")) {
        let Some((_, panels)) = line.split_once("panel") else { continue };
        for (place, word) in panels.split('*').enumerate() {
            if place % 2 == 1 {
                assert!(titles.contains(word), "{line}: {word} is no panel");
                named += 1;
            }
        }
    }
    assert!(named > 10, "{named}");
}

#[test]
fn the_dashboards_and_the_tables_of_the_readme_are_what_their_one_source_makes() {
    let made = std::process::Command::new("python3")
        .arg(folder().join(".make.py"))
        .arg("--check")
        .output()
        .expect("python3, which the README of the project asks for");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn grafana_is_told_to_load_the_whole_folder_from_the_data_source_that_panels_choose() {
    let read =
        |file: &str| std::fs::read_to_string(folder().join("provisioning").join(file)).unwrap();
    let provider = read("dashboards/lockstep.yaml");
    for line in ["apiVersion: 1", "type: file", "path: ${LOCKSTEP_DASHBOARDS}"] {
        assert!(
            provider.lines().any(|given| given.trim() == line),
            "{line} is missing: {provider}"
        );
    }
    let source = read("datasources/lockstep.yaml");
    for line in ["apiVersion: 1", "type: prometheus", "url: ${LOCKSTEP_PROMETHEUS_URL}"] {
        assert!(source.lines().any(|given| given.trim() == line), "{line} is missing: {source}");
    }
}

#[test]
fn queries_name_only_metrics_and_labels_that_a_table_has() {
    let exported = exported();
    for dashboard in dashboards() {
        for query in dashboard.queries() {
            let place = format!("{}: {}: {}", dashboard.file, query.panel, query.text);
            let expr = Expr::read(query.text).unwrap_or_else(|error| panic!("{place}: {error}"));
            assert!(!expr.metrics.is_empty(), "{place}: no metric");
            let mut labels: BTreeSet<&str> = TARGET_LABELS.iter().copied().collect();
            let mut values = BTreeSet::new();
            for name in &expr.metrics {
                if TARGET_METRICS.contains(&name.as_str()) {
                    continue;
                }
                let metric =
                    exported.get(name).unwrap_or_else(|| panic!("{place}: {name} is in no table"));
                labels.extend(metric.labels.iter().map(|label| label.name));
                values.extend(metric.series().into_iter().flatten());
                if name.ends_with("_bucket") {
                    labels.insert("le");
                }
                let is_level = metric.kind == MetricKind::Gauge;
                assert!(!is_level || expr.ranges == 0, "{place}: the rate of a level");
            }
            for label in &expr.labels {
                assert!(labels.contains(label.as_str()), "{place}: no label {label}");
            }
            for (label, words) in &expr.values {
                let is_ours = !TARGET_LABELS.contains(&label.as_str()) && label != "le";
                for word in words.split('|').filter(|_| is_ours) {
                    assert!(values.contains(&(label.as_str(), word)), "{place}: no {label} {word}");
                }
            }
            for label in expr::placeholders(query.legend) {
                assert!(expr.grouped_by.contains(label), "{place}: legend names {label}");
            }
            for range in &expr.range_texts {
                assert!(["$__rate_interval", "$__range"].contains(&range.as_str()), "{place}");
            }
        }
    }
}

#[test]
fn every_metric_is_on_a_panel() {
    let dashboards = dashboards();
    let shown: BTreeSet<String> = dashboards
        .iter()
        .flat_map(Dashboard::queries)
        .flat_map(|query| Expr::read(query.text).unwrap().metrics)
        .collect();
    for metric in lockstep::exporter::tables() {
        let bucket = format!("{}_bucket", metric.name);
        assert!(
            shown.contains(metric.name) || shown.contains(&bucket),
            "{} is shown nowhere",
            metric.name
        );
    }
}

#[test]
fn the_readme_says_of_every_panel_what_to_do() {
    let readme = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let rows: BTreeMap<&str, Vec<&str>> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| "))
        .map(|line| line.trim_end_matches('|').split('|').map(str::trim).collect::<Vec<_>>())
        .filter(|cells| cells.len() == 4)
        .map(|cells| (cells[0], cells))
        .collect();
    let mut titles = BTreeSet::from(["panel"]);
    let dashboards = dashboards();
    for query in dashboards.iter().flat_map(Dashboard::queries) {
        titles.insert(query.panel);
        let row = rows.get(query.panel).unwrap_or_else(|| panic!("no row for {}", query.panel));
        for name in Expr::read(query.text).unwrap().metrics {
            let named = row[1].split('`').any(|word| !word.is_empty() && name.ends_with(word));
            assert!(named, "{}: {name} is not named", query.panel);
        }
        assert!(row.iter().all(|cell| !cell.is_empty()), "{}: {row:?}", query.panel);
    }
    for row in rows.keys().filter(|row| !row.starts_with("---")) {
        assert!(titles.contains(row), "the README names {row}, which is no panel");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_answers_at_a_prometheus_that_scrapes_two_real_nodes() {
    let Some(program) = prometheus::find("prometheus", "LOCKSTEP_PROMETHEUS") else {
        prometheus::say(
            "SKIPPED: dashboards against a real Prometheus: there is none; ./run check \
             grafana gets it (Debian, Ubuntu), or set LOCKSTEP_PROMETHEUS to the program",
        );
        return;
    };
    let mut fleet = Fleet::start().await;
    let prometheus = Prometheus::start(&program, &fleet.metrics_addresses(), None).await.unwrap();
    fleet.trade_through_a_kill().await;

    let dashboards = dashboards();
    let queries: Vec<Query<'_>> = dashboards.iter().flat_map(Dashboard::queries).collect();
    let deadline = Instant::now() + ANSWER_LIMIT;
    loop {
        fleet.ask_the_api().await;
        let missing = unanswered(&prometheus, &queries).await;
        if missing.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "no value for:\n{}", missing.join("\n"));
        tokio::time::sleep(ANSWER_PAUSE).await;
    }
    assert_counters_grew(&prometheus).await;
    let owned =
        prometheus::series(&prometheus, "sum by (instance) (lockstep_lease_owned_accounts)").await;
    assert_eq!(owned.unwrap().len(), 2, "both nodes are scraped");

    for address in fleet.metrics_addresses() {
        let page = Client::at(address).get("/metrics").await.body;
        assert_metrics_page(&page);
        prometheus::promtool(&["check", "metrics"], &page).await;
    }
    let example = folder().join("prometheus.yml");
    prometheus::promtool(&["check", "config", example.to_str().unwrap()], "").await;
    fleet.stop().await;
}

/// What is at 0 from the start shows nothing but that: under load each counter has to count.
async fn assert_counters_grew(prometheus: &Prometheus) {
    let mut idle = Vec::new();
    for metric in lockstep::exporter::tables().iter().filter(|m| m.kind == MetricKind::Counter) {
        let series =
            prometheus::series(prometheus, &format!("sum({})", metric.name)).await.unwrap();
        if !series.iter().flatten().any(|value| *value > 0.0) {
            idle.push(metric.name);
        }
    }
    idle.retain(|name| !STAYS_AT_0.iter().any(|(listed, _)| listed == name));
    assert!(idle.is_empty(), "counters that did not grow: {idle:?}");
}

/// The alerts of the rules, each with its expression.
fn alerts() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(folder().join("alerts/lockstep.rules.yml")).unwrap();
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("- alert: ") {
            found.push((name.to_owned(), String::new()));
        } else if let Some(expr) = line.strip_prefix("expr: ") {
            found.last_mut().expect("an alert has a name first").1 = expr.to_owned();
        }
    }
    assert!(found.len() > 10 && found.iter().all(|(_, expr)| !expr.is_empty()), "{found:?}");
    found
}

#[test]
fn every_alert_has_a_heading_in_the_runbook_and_a_load_that_makes_it_fire_and_one_that_does_not() {
    let read = |file: &str| std::fs::read_to_string(folder().join(file)).unwrap();
    let (rules, runbook, loads) =
        (read("alerts/lockstep.rules.yml"), read("RUNBOOK.md"), read("alerts/lockstep.test.yml"));
    let mut headings: BTreeSet<&str> =
        runbook.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    for (name, _) in alerts() {
        assert!(headings.remove(name.as_str()), "{name} has no heading");
        let link = format!("runbook_url: RUNBOOK.md#{}", name.to_lowercase());
        assert!(rules.contains(&link), "{name} does not lead to its heading");
        for load in [format!("{name} fires\n"), format!("{name} stays quiet\n")] {
            assert!(loads.contains(&load), "there is no {load}");
        }
    }
    assert!(headings.is_empty(), "headings of no alert: {headings:?}");
    for part in runbook.split("\n## ").skip(1) {
        for word in ["**Means:**", "**Look at:**", "**Do:**"] {
            assert!(part.contains(word), "{word} is missing: {part}");
        }
    }
}

#[test]
fn alerts_name_only_metrics_that_a_table_has() {
    let exported = exported();
    for (name, expr) in alerts() {
        let words = expr.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let ours: BTreeSet<&str> = words.filter(|word| word.starts_with("lockstep_")).collect();
        assert!(!ours.is_empty() || expr.contains("up{"), "{name}: {expr}");
        for metric in ours {
            assert!(exported.contains_key(metric), "{name}: {metric} is in no table");
        }
    }
}

#[tokio::test]
async fn alerts_fire_when_they_should_and_are_quiet_when_not() {
    let alerts = folder().join("alerts");
    let file = |name: &str| alerts.join(name).to_str().unwrap().to_owned();
    prometheus::promtool(&["check", "rules", &file("lockstep.rules.yml")], "").await;
    prometheus::promtool(&["test", "rules", &file("lockstep.test.yml")], "").await;
}

/// The queries that have no finite value in any series; a query that fails ends the test.
async fn unanswered(prometheus: &Prometheus, queries: &[Query<'_>]) -> Vec<String> {
    let mut missing = Vec::new();
    for query in queries {
        let answer = prometheus::series(prometheus, &expr::with_variables(query.text)).await;
        let series =
            answer.unwrap_or_else(|error| panic!("{}: {}: {error}", query.panel, query.text));
        if !series.iter().any(|values| values.iter().any(|v| v.is_finite())) {
            missing.push(format!("{}: {} ({} series)", query.panel, query.text, series.len()));
        }
    }
    missing
}

/// Help and kind of every metric that is there, its labels with values of their lists, and every
/// counter with all of them.
fn assert_metrics_page(page: &str) {
    let exported = exported();
    for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let name = line.split(['{', ' ']).next().unwrap();
        let metric = exported.get(name).unwrap_or_else(|| panic!("{name} is in no table"));
        // The last one: the words of routes have braces.
        let labels = line.split_once('{').map_or("", |(_, rest)| rest.rsplit_once('}').unwrap().0);
        let known: BTreeSet<_> = metric.series().into_iter().flatten().collect();
        for pair in labels.split(',').filter(|pair| !pair.is_empty() && !pair.starts_with("le=")) {
            let (label, word) = pair.split_once('=').unwrap();
            assert!(
                known.contains(&(label, word.trim_matches('"'))),
                "{line}: {pair} is in no table"
            );
        }
        assert!(
            page.contains(&format!("# HELP {} {}\n", metric.name, metric.help)),
            "{name}: help"
        );
        let kind = match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        assert!(page.contains(&format!("# TYPE {} {kind}\n", metric.name)), "{name}: {kind}");
    }
    for metric in lockstep::exporter::tables() {
        if metric.kind == MetricKind::Counter {
            let there =
                page.lines().filter(|line| line.split(['{', ' ']).next() == Some(metric.name));
            assert_eq!(there.count(), metric.series().len(), "{}: series", metric.name);
        }
    }
}
