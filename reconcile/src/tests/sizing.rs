//! Volumes at open.

use crate::action::SkipReason;
use crate::fixture::*;
use crate::input::{AboveMax, BelowMin, LinkRules, Sizing};
use crate::sizing::{SizeInput, size_copy};
use schemas::{Funds, Lots, SymbolSpec};

struct Sized {
    rules: LinkRules,
    spec: SymbolSpec,
    master: Option<Funds>,
    follower: Option<Funds>,
    master_contract: Option<&'static str>,
}

fn sized(sizing: Sizing) -> Sized {
    let mut rules = Scene::new().rules;
    rules.sizing = sizing;
    let spec = spec("EURUSD");
    Sized { rules, spec, master: None, follower: None, master_contract: Some("100000") }
}

impl Sized {
    fn limits(mut self, step: &str, min: &str, max: &str) -> Self {
        self.spec.lots_step = lots(step);
        self.spec.lots_min = lots(min);
        self.spec.lots_max = lots(max);
        self
    }

    fn of_part(&self, now: &str, at_open: &str) -> Result<Lots, SkipReason> {
        let input = SizeInput {
            master_lots_at_open: lots(at_open),
            master_lots: lots(now),
            master_contract_size: self.master_contract.map(dec),
            master_funds: self.master.as_ref(),
            follower_funds: self.follower.as_ref(),
            spec: &self.spec,
            now: NOW,
            funds_age_max: std::time::Duration::from_secs(30),
        };
        size_copy(&self.rules, &input)
    }

    fn of(&self, master: &str) -> Result<Lots, SkipReason> {
        self.of_part(master, master)
    }
}

fn times(value: &str) -> Sized {
    sized(Sizing::Multiplier(dec(value)))
}

// Case 38: a volume over the largest became half of the largest.
#[test]
fn volume_above_the_largest_is_the_largest_or_a_skip() {
    let mut sized = times("1").limits("0.01", "0.01", "50");
    assert_eq!(sized.of("55"), Ok(lots("50")));
    sized.rules.above_max = AboveMax::Skip;
    assert_eq!(sized.of("55"), Err(SkipReason::AboveMax));
    assert_eq!(sized.of("50"), Ok(lots("50")));
}

// Case 39.
#[test]
fn volume_is_rounded_down_to_whole_steps() {
    for (step, master, copy) in
        [("0.05", "0.13", "0.1"), ("0.25", "0.3", "0.25"), ("10", "17", "10")]
    {
        assert_eq!(times("1").limits(step, step, "100").of(master), Ok(lots(copy)), "{step}");
    }
    // No float takes part: 0.29 is 29 steps and not 28.
    assert_eq!(times("1").of("0.29"), Ok(lots("0.29")));
    assert_eq!(times("0.1").of("2.9"), Ok(lots("0.29")));
}

// Cases 42, 46 and 47.
#[test]
fn volume_below_the_smallest_is_skipped_or_the_smallest() {
    for master in ["0.001", "0.005"] {
        let mut sized = times("1");
        assert_eq!(sized.of(master), Err(SkipReason::BelowMin));
        sized.rules.below_min = BelowMin::UseMin;
        assert_eq!(sized.of(master), Ok(lots("0.01")));
    }
    let mut sized = times("0.4").limits("0.1", "1", "50");
    assert_eq!(sized.of("1"), Err(SkipReason::BelowMin));
    sized.rules.below_min = BelowMin::UseMin;
    assert_eq!(sized.of("1"), Ok(lots("1")));
}

// Case 43.
#[test]
fn aligned_contracts_copy_the_notional() {
    let mut sized = times("1");
    (sized.master_contract, sized.spec.contract_size) = (Some("10"), Some(dec("100")));
    assert_eq!(sized.of("1"), Ok(lots("1")));
    sized.rules.align_contract = true;
    assert_eq!(sized.of("1"), Ok(lots("0.1")));
    sized.master_contract = None;
    assert_eq!(sized.of("1"), Err(SkipReason::UnknownContractSize));
}

// Case 48: the published vectors of our formula. There is no leverage cut and no rounding to
// one significant digit, and a rate between two currencies belongs into a multiplier.
#[test]
fn ratio_is_value_times_follower_funds_over_master_funds() {
    for sizing in [Sizing::EquityRatio(dec("0.5")), Sizing::BalanceRatio(dec("0.5"))] {
        let mut sized = sized(sizing);
        sized.master = Some(funds("15000", "USD", NOW));
        sized.follower = Some(funds("40000", "USD", NOW));
        assert_eq!(sized.of("1"), Ok(lots("1.33")));
        assert_eq!(sized.of("3"), Ok(lots("4")), "divided once, at the end");
        sized.follower = Some(funds("40000", "EUR", NOW));
        assert_eq!(sized.of("1"), Err(SkipReason::CurrencyDiffers));
    }
    assert_eq!(times("1.6933").of("1"), Ok(lots("1.69")), "the vector's 40000 x .5/15000 x 1.27");
}

// Case 49.
#[test]
fn ratio_with_unknown_old_or_no_funds_is_a_skip_and_never_one() {
    let mut sized = sized(Sizing::EquityRatio(dec("1")));
    sized.master = Some(funds("10000", "USD", NOW));
    assert_eq!(sized.of("1"), Err(SkipReason::UnknownFunds));
    sized.follower = Some(funds("10000", "USD", seconds_ago(31)));
    assert_eq!(sized.of("1"), Err(SkipReason::StaleEquity));
    sized.follower = Some(funds("10000", "USD", seconds_ago(30)));
    assert_eq!(sized.of("1"), Ok(lots("1")));
    for none in ["0", "-5"] {
        sized.follower = Some(funds(none, "USD", NOW));
        assert_eq!(sized.of("1"), Err(SkipReason::NoFunds));
    }
}

#[test]
fn fixed_lots_do_not_depend_on_the_masters_volume() {
    let sized = sized(Sizing::FixedLots(lots("0.3")));
    assert_eq!(sized.of("1"), Ok(lots("0.3")));
    assert_eq!(sized.of("25"), Ok(lots("0.3")));
    assert_eq!(sized.of_part("0.5", "1"), Ok(lots("0.15")), "a late open of a halved trade");
}

#[test]
fn late_open_of_a_reduced_trade_has_the_volume_that_a_timely_one_would_have_now() {
    assert_eq!(times("0.5").of_part("0.4", "1"), Ok(lots("0.2")));
    let clamped = times("1").limits("0.01", "0.01", "50");
    assert_eq!(clamped.of_part("50", "100"), Ok(lots("25")), "from the largest, not from 100");
}

#[test]
fn numbers_too_large_to_compute_with_are_a_skip() {
    let huge = times("79228162514264337593543950335");
    assert_eq!(huge.of("1000000"), Err(SkipReason::NumberTooLarge));
}
