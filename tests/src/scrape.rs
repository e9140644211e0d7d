//! What a node's metrics page says.

use crate::http::Client;

/// Where a node shows its metrics.
#[derive(Debug, Clone)]
pub struct MetricsPage(Client);

impl MetricsPage {
    /// A free address, for `LOCKSTEP_METRICS_LISTEN`.
    pub async fn free() -> MetricsPage {
        MetricsPage(Client::free().await)
    }

    /// The address.
    pub fn address(&self) -> &str {
        self.0.address()
    }

    /// Sum of a metric over its labels; 0 where it has no series yet.
    pub async fn sum(&self, name: &str) -> f64 {
        self.sum_where(name, |_| true).await
    }

    /// The same over the series whose lines fit.
    pub async fn sum_where(&self, name: &str, fits: impl Fn(&str) -> bool) -> f64 {
        let text = self.text().await;
        let of_name = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
        });
        let values = of_name.filter(|line| fits(line)).map(|line| {
            line.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok()).unwrap_or(0.0)
        });
        values.sum()
    }

    /// Tenures that the node began when the lease of another one had run out.
    pub async fn expired_tenures(&self) -> f64 {
        let is_expired = |line: &str| line.contains("kind=\"expired\"");
        self.sum_where("lockstep_tenures_begun_total", is_expired).await
    }

    /// The whole page.
    pub async fn text(&self) -> String {
        self.0.get("/metrics").await.body
    }
}
