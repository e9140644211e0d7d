//! Percentiles of a round, and what several rounds come to.

use serde::Serialize;

/// Rounds of limit and system that a comparison needs, each.
pub const ROUNDS: usize = 7;
/// A round whose limit's p95 is this many times the best round's is repeated.
pub const NOISE: f64 = 2.5;
/// Rounds that may be repeated before the run says that the machine is too noisy.
pub const REPEATS_MAX: usize = 14;

/// What a round came to, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half of the samples are at most this.
    pub p50_us: f64,
    /// 95 of 100 samples are at most this.
    pub p95_us: f64,
    /// 99 of 100 samples are at most this.
    pub p99_us: f64,
    /// The largest sample.
    pub max_us: f64,
    /// How many there were.
    pub samples: usize,
}

impl Percentiles {
    /// Of samples in nanoseconds, in any order; nothing if there are none.
    pub fn of_ns(mut samples: Vec<u64>) -> Option<Self> {
        samples.sort_unstable();
        let at = |share: f64| {
            let place = (share * samples.len() as f64).ceil() as usize;
            samples.get(place.clamp(1, samples.len()) - 1).map(|ns| *ns as f64 / 1e3)
        };
        if samples.is_empty() {
            return None;
        }
        Some(Percentiles {
            p50_us: at(0.50)?,
            p95_us: at(0.95)?,
            p99_us: at(0.99)?,
            max_us: at(1.0)?,
            samples: samples.len(),
        })
    }

    /// The medians of several rounds' percentiles, the largest of all samples and their count;
    /// nothing if there are no rounds.
    pub fn median(rounds: &[Self]) -> Option<Self> {
        let of = |pick: fn(&Self) -> f64| median(rounds.iter().map(pick).collect());
        Some(Percentiles {
            p50_us: of(|r| r.p50_us)?,
            p95_us: of(|r| r.p95_us)?,
            p99_us: of(|r| r.p99_us)?,
            max_us: rounds.iter().map(|r| r.max_us).fold(0.0, f64::max),
            samples: rounds.iter().map(|r| r.samples).sum(),
        })
    }
}

/// The middle value; of an even number, the lower of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// Whether a round's limit met something else on the machine: far off the best round's p95.
pub fn is_noisy(limit: &Percentiles, best_p95_us: f64) -> bool {
    limit.p95_us > NOISE * best_p95_us
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_that_were_taken() {
        let hundred = Percentiles::of_ns((1..=100).rev().map(|us| us * 1_000).collect());
        let hundred = hundred.expect("there are samples");
        assert_eq!(
            (hundred.p50_us, hundred.p95_us, hundred.p99_us, hundred.max_us),
            (50.0, 95.0, 99.0, 100.0)
        );
        let one = Percentiles::of_ns(vec![7_000]).expect("there is a sample");
        assert_eq!((one.p50_us, one.p99_us, one.samples), (7.0, 7.0, 1));
        assert_eq!(Percentiles::of_ns(Vec::new()), None);
    }

    #[test]
    fn several_rounds_are_the_median_of_each_percentile_and_the_largest_sample() {
        let round = |p50_us: f64, max_us: f64| Percentiles {
            p50_us,
            p95_us: 2.0 * p50_us,
            p99_us: 3.0 * p50_us,
            max_us,
            samples: 10,
        };
        let all = Percentiles::median(&[round(3.0, 9.0), round(1.0, 90.0), round(2.0, 6.0)]);
        let all = all.expect("there are rounds");
        assert_eq!((all.p50_us, all.p95_us, all.p99_us), (2.0, 4.0, 6.0));
        assert_eq!((all.max_us, all.samples), (90.0, 30));
        assert_eq!(Percentiles::median(&[]), None);
    }

    #[test]
    fn a_round_far_off_the_best_one_is_noisy() {
        let limit = Percentiles::of_ns(vec![250_000]).expect("there is a sample");
        assert!(!is_noisy(&limit, 100.0) && is_noisy(&limit, 99.0));
    }
}
