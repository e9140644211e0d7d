//! What a run came to, as one object and as a table.

use super::check::{Finding, Law};
use super::schedule::KINDS;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

/// What a run came to.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Verdict {
    /// The same seed gives the same faults.
    pub seed: u64,
    /// Rounds of faults.
    pub rounds: u64,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Orders of nodes that arrived at the broker.
    pub orders: u64,
    /// Copies that were opened.
    pub opens: u64,
    /// Copies beyond the first for one trade.
    pub duplicates: u64,
    /// Of those, what a long freeze excuses: found and closed in time.
    pub excused_extras: u64,
    /// Copies that were not there when everything had been mended.
    pub missing: u64,
    /// Copies whose open was lost on its way and is never sent again, or of which the broker has
    /// carried an order out later than anybody waits for one.
    pub given_up: u64,
    /// Broken promises.
    pub violations: u64,
    /// The least time any order had left on its lease when it was sent.
    pub min_deadline_margin_ms: Option<f64>,
    /// The longest time from the last mending to everything being equal.
    pub longest_divergence_s: f64,
    /// From the last renewal of an owner that vanished to the next one's first reconcile.
    pub takeover_s: Takeovers,
    /// Rows that the database refused, as the nodes' logs tell.
    pub rows_refused: u64,
    /// The longest that this process was woken too late: how busy the machine was.
    pub machine_lag_max_ms: f64,
    /// The longest that a small write to the disk took.
    pub disk_lag_max_ms: f64,
    /// Where the evidence is, if something is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<PathBuf>,
    /// The first violations, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
    /// The records of the shortest story that a violation has.
    #[serde(skip)]
    pub story: Vec<String>,
}

/// How long takeovers took.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Takeovers {
    /// How many.
    pub count: u64,
    /// Half took at most so long.
    pub p50: f64,
    /// 19 of 20 took at most so long.
    pub p95: f64,
    /// The longest.
    pub max: f64,
}

/// Findings of a law in words; `stories.txt` has all of them.
const FINDINGS_OF_LAW_MAX: usize = 4;

impl Takeovers {
    /// Of these times.
    pub fn of(mut times: Vec<Duration>) -> Takeovers {
        times.sort();
        let at = |share: f64| -> f64 {
            let rank = (share * times.len() as f64).ceil() as usize;
            times.get(rank.saturating_sub(1)).map_or(0.0, |time| round(time.as_secs_f64()))
        };
        Takeovers { count: times.len() as u64, p50: at(0.5), p95: at(0.95), max: at(1.0) }
    }
}

/// To milliseconds.
pub(super) fn round(number: f64) -> f64 {
    (number * 1_000.0).round() / 1_000.0
}

impl Verdict {
    /// Nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.violations == 0 && self.missing == 0
    }

    /// Takes findings over.
    pub(super) fn take(&mut self, findings: &[Finding]) {
        self.violations += findings.len() as u64;
        let mut laws: BTreeMap<Law, usize> = BTreeMap::new();
        for finding in findings {
            let count = laws.entry(finding.law).or_default();
            *count += 1;
            if *count <= FINDINGS_OF_LAW_MAX {
                self.findings.push(finding.to_string());
            }
        }
    }

    /// For a person.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a string does not fail.
            let _ok = writeln!(text, "{name:<24} {value}");
        };
        line("seed", self.seed.to_string());
        line("rounds", self.rounds.to_string());
        for kind in KINDS {
            let count = self.faults.get(kind.word()).copied().unwrap_or(0);
            line(&format!("  {}", kind.word()), format!("{count:<3} {}", kind.meaning()));
        }
        line("orders", self.orders.to_string());
        line("opens", self.opens.to_string());
        line("duplicates", format!("{} ({} excused)", self.duplicates, self.excused_extras));
        line("missing", self.missing.to_string());
        line("given up", format!("{} of which an order was lost or far too late", self.given_up));
        line("violations", self.violations.to_string());
        let margin = self.min_deadline_margin_ms.map_or("-".to_owned(), |ms| format!("{ms} ms"));
        line("min deadline margin", margin);
        line("longest divergence", format!("{} s", self.longest_divergence_s));
        let takeover = self.takeover_s;
        line(
            "takeovers",
            format!(
                "{}; p50 {} s, p95 {} s, max {} s",
                takeover.count, takeover.p50, takeover.p95, takeover.max
            ),
        );
        line("rows refused", self.rows_refused.to_string());
        line("machine lag", format!("at most {} ms", self.machine_lag_max_ms));
        line("disk lag", format!("at most {} ms", self.disk_lag_max_ms));
        for finding in &self.findings {
            line("violation", finding.clone());
        }
        if let Some(folder) = &self.evidence {
            line("evidence", folder.display().to_string());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_happened() {
        let times = (1..=20).map(Duration::from_secs).collect();
        let takeovers = Takeovers::of(times);
        assert_eq!((takeovers.p50, takeovers.p95, takeovers.max), (10.0, 19.0, 20.0));
        let one = Takeovers::of(vec![Duration::from_millis(1_500)]);
        assert_eq!((one.p50, one.p95, one.max), (1.5, 1.5, 1.5));
        assert_eq!(Takeovers::of(Vec::new()).max, 0.0);
    }

    #[test]
    fn a_missing_copy_or_a_violation_is_not_clean() {
        assert!(Verdict::default().is_clean());
        assert!(!Verdict { missing: 1, ..Verdict::default() }.is_clean());
        assert!(!Verdict { violations: 1, ..Verdict::default() }.is_clean());
    }
}
