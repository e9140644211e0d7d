//! The metrics of this process, served to Prometheus.
//!
//! One recorder for all tables ([`tables`]). The upkeep of histograms and the HTTP listener run
//! on the slow runtime, away from the measured path.

use crate::{account, metrics as node_metrics, writer};
use bus::metrics::{Metric, MetricKind};
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
    ]
    .concat()
}

/// Installs the recorder and serves `/metrics` on `listen`.
///
/// Errors: the address is taken, or a recorder is there already.
pub fn install(listen: SocketAddr, slow: &Handle) -> Result<(), BuildError> {
    let mut builder = PrometheusBuilder::new().with_http_listener(listen);
    for metric in tables() {
        if metric.kind == MetricKind::Histogram {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)?;
        }
    }
    let _entered = slow.enter();
    let (recorder, exporter) = builder.build()?;
    metrics::set_global_recorder(recorder)
        .map_err(|error| BuildError::FailedToSetGlobalRecorder(error))?;
    slow.spawn(async move {
        if exporter.await.is_err() {
            tracing::error!("the metrics listener has ended");
        }
    });
    describe();
    Ok(())
}

/// Unit and help of every metric; counters without labels are there at 0 from the start.
fn describe() {
    for metric in tables() {
        match metric.kind {
            MetricKind::Counter => {
                metrics::describe_counter!(metric.name, metrics::Unit::Count, metric.help);
                if metric.labels.is_empty() {
                    metrics::counter!(metric.name).increment(0);
                }
            }
            MetricKind::Gauge => match metric.unit {
                Some(unit) => metrics::describe_gauge!(metric.name, unit, metric.help),
                None => metrics::describe_gauge!(metric.name, metric.help),
            },
            MetricKind::Histogram => {
                metrics::describe_histogram!(metric.name, metrics::Unit::Seconds, metric.help);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_metric_of_every_table_follows_the_naming_rules_and_is_there_once() {
        let mut seen = BTreeSet::new();
        for metric in tables() {
            let name = metric.name;
            assert!(name.starts_with("lockstep_"), "{name}");
            assert!(seen.insert(name), "{name} is there twice");
            assert_eq!(name.ends_with("_total"), metric.kind == MetricKind::Counter, "{name}");
            assert_eq!(metric.buckets.is_empty(), metric.kind != MetricKind::Histogram, "{name}");
            assert!(metric.buckets.is_sorted() && metric.help.ends_with('.'), "{name}");
            for label in metric.labels {
                assert!(
                    !["account", "link", "ticket", "symbol"].contains(label),
                    "{name}: {label}"
                );
            }
        }
    }
}
