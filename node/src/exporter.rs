//! The metrics of this process, served to Prometheus.
//!
//! One recorder for all tables ([`tables`]). The upkeep of histograms and the HTTP listener run
//! on the slow runtime, away from the measured path.

use crate::{account, api, metrics as node_metrics, writer};
use bus::metrics::{Metric, MetricKind};
use metrics::{Label, Unit};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};
use std::net::SocketAddr;
use tokio::runtime::Handle;

/// Every metric this process can export, table by table.
pub fn tables() -> Vec<Metric> {
    [
        bus::metrics::METRICS,
        node_metrics::METRICS,
        account::metrics::METRICS,
        writer::metrics::METRICS,
        api::metrics::METRICS,
    ]
    .concat()
}

/// Installs the recorder and serves `/metrics` on `listen`.
///
/// Errors: the address is taken, or a recorder is there already.
pub fn install(listen: SocketAddr, slow: &Handle) -> Result<(), BuildError> {
    let builder = builder()?.with_http_listener(listen);
    let _entered = slow.enter();
    let (recorder, exporter) = builder.build()?;
    metrics::set_global_recorder(recorder).map_err(BuildError::FailedToSetGlobalRecorder)?;
    slow.spawn(async move {
        if exporter.await.is_err() {
            tracing::error!("the metrics listener has ended");
        }
    });
    describe();
    Ok(())
}

/// A recorder that has the buckets of the tables.
fn builder() -> Result<PrometheusBuilder, BuildError> {
    tables().iter().filter(|metric| metric.kind == MetricKind::Histogram).try_fold(
        PrometheusBuilder::new(),
        |builder, metric| {
            builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)
        },
    )
}

/// Unit and help of every metric. Every counter is there at 0 from the start, with every value of its
/// labels: an increase does not see the step from nothing to the first count.
///
/// The text format has no units: the name says the unit, which a test holds them to.
fn describe() {
    for metric in tables() {
        let unit = metric.unit.unwrap_or(Unit::Count);
        match metric.kind {
            MetricKind::Counter => {
                metrics::describe_counter!(metric.name, unit, metric.help);
                for series in metric.series() {
                    let labels: Vec<Label> =
                        series.into_iter().map(|(name, word)| Label::new(name, word)).collect();
                    metrics::counter!(metric.name, labels).increment(0);
                }
            }
            MetricKind::Gauge => metrics::describe_gauge!(metric.name, unit, metric.help),
            MetricKind::Histogram => metrics::describe_histogram!(metric.name, unit, metric.help),
        }
    }
}

/// The page `METRICS.md`: every metric of [`tables`], for people.
pub fn page() -> String {
    let mut page = String::from(PAGE_HEAD);
    for metric in tables() {
        let kind = match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let unit = match metric.unit {
            Some(Unit::Seconds) => "s",
            Some(_) => "count",
            None => "1 or 0",
        };
        let labels: Vec<String> = metric
            .labels
            .iter()
            .map(|label| {
                let words: Vec<&str> = label.values().collect();
                format!("`{}`: {}", label.name, words.join(", "))
            })
            .collect();
        let buckets: Vec<String> = metric.buckets.iter().map(f64::to_string).collect();
        let buckets = match buckets.is_empty() {
            true => String::new(),
            false => format!(" Buckets: {}.", buckets.join(", ")),
        };
        page.push_str(&format!(
            "| `{}` | {kind} | {unit} | {} | {}{buckets} |\n",
            metric.name,
            labels.join("; "),
            metric.help
        ));
    }
    page
}

/// What stands before the table of [`page`].
const PAGE_HEAD: &str = "\
# Metrics of a node

Made from the metric tables in the code; do not edit.
Write it anew with `LOCKSTEP_BLESS=1 cargo test -p lockstep --lib exporter`.

A node serves these at `/metrics` on `LOCKSTEP_METRICS_LISTEN`. Counters are there at 0
from the start, with every value of their labels; other series from the first time they are set.

| metric | kind | unit | labels | meaning |
|---|---|---|---|---|
";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Series that one metric may have on a node (chosen: steps of a plan times their ends fit).
    const SERIES_MAX: usize = 100;

    #[test]
    fn every_metric_of_every_table_follows_the_naming_rules_and_is_there_once() {
        let mut seen = BTreeSet::new();
        for metric in tables() {
            let name = metric.name;
            assert!(name.starts_with("lockstep_"), "{name}");
            assert!(seen.insert(name), "{name} is there twice");
            assert_eq!(name.ends_with("_total"), metric.kind == MetricKind::Counter, "{name}");
            assert_eq!(metric.buckets.is_empty(), metric.kind != MetricKind::Histogram, "{name}");
            assert!(metric.buckets.is_sorted(), "{name}: {:?}", metric.buckets);
            assert!(metric.help.ends_with('.'), "{name}: {}", metric.help);
            let is_seconds = name.ends_with("_seconds");
            assert_eq!(is_seconds, metric.unit == Some(Unit::Seconds), "{name}: {:?}", metric.unit);
            for label in metric.labels {
                let words: BTreeSet<&str> = label.values().collect();
                assert!(
                    !["account", "link", "ticket", "symbol"].contains(&label.name),
                    "{name}: {}",
                    label.name
                );
                assert!(!words.is_empty(), "{name}: {} says nothing", label.name);
                assert_eq!(words.len(), label.values().count(), "{name}: {}: twice", label.name);
            }
            assert!(metric.series().len() <= SERIES_MAX, "{name}: {}", metric.series().len());
        }
    }

    #[test]
    fn every_counter_is_at_0_with_every_value_of_its_labels_before_anything_happened() {
        let recorder = builder().unwrap().build_recorder();
        metrics::with_local_recorder(&recorder, describe);
        let page = recorder.handle().render();
        let there: BTreeSet<&str> = page.lines().collect();
        let mut expected = BTreeSet::new();
        for metric in tables().iter().filter(|metric| metric.kind == MetricKind::Counter) {
            for series in metric.series() {
                let labels: Vec<String> =
                    series.iter().map(|(name, word)| format!("{name}=\"{word}\"")).collect();
                expected.insert(match labels.is_empty() {
                    true => format!("{} 0", metric.name),
                    false => format!("{}{{{}}} 0", metric.name, labels.join(",")),
                });
            }
        }
        for series in &expected {
            assert!(there.contains(series.as_str()), "{series} is not there");
        }
        assert_eq!(
            there.iter().filter(|line| !line.starts_with('#') && !line.is_empty()).count(),
            expected.len()
        );
    }

    #[test]
    fn the_page_of_metrics_is_the_one_that_the_tables_make() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("METRICS.md");
        if std::env::var_os("LOCKSTEP_BLESS").is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(written == page(), "{} is not up to date; see its head", path.display());
    }
}
