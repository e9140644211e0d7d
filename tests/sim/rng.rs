//! Seeded random numbers: the only source of chance in a simulated world.

/// One stream of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Rng(fastrand::Rng);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    pub(crate) fn chance(&mut self, share: f64) -> bool {
        self.0.f64() < share
    }

    /// From `least`, below `end`; `least` where there is nothing between.
    pub(crate) fn range(&mut self, least: u64, end: u64) -> u64 {
        if end <= least { least } else { self.0.u64(least..end) }
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        self.0.usize(0..len)
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.0.usize(0..of.len())]
    }

    /// Every order of magnitude between the two is as likely as every other.
    pub(crate) fn log(&mut self, least: u64, most: u64) -> u64 {
        let (low, high) = ((least as f64).ln(), (most as f64).ln());
        (low + (high - low) * self.0.f64()).exp() as u64
    }

    /// Around `mean`: mostly below twice of it, seldom ten times.
    pub(crate) fn latency(&mut self, mean: u64) -> u64 {
        let spread = -(1.0 - self.0.f64()).ln();
        (mean as f64 * (0.3 + 0.7 * spread.min(15.0))) as u64 + 1
    }
}
