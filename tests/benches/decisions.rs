//! `cargo bench`: what the pure parts of a copy cost: plan, sizing, codec, gap detector.
//!
//! Times and allocations; the time of a plan must grow with its pairs and no faster. What a copy costs
//! with servers and sockets is measured by `./run bench own-time`.

use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};
use lockstep_tests::bench::decisions::{Decision, SOME_PAIRS};

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

#[divan::bench(args = [10, 100, 1_000, 10_000])]
fn plan_at_rest(bencher: Bencher<'_, '_>, pairs: u64) {
    bencher.counter(ItemsCount::new(pairs)).bench_local(Decision::PlanAtRest.ready(pairs));
}

#[divan::bench(args = [10, 100, 1_000, 10_000])]
fn plan_without_rows(bencher: Bencher<'_, '_>, pairs: u64) {
    bencher.counter(ItemsCount::new(pairs)).bench_local(Decision::PlanWithoutRows.ready(pairs));
}

#[divan::bench]
fn decide_an_open(bencher: Bencher<'_, '_>) {
    bencher.bench_local(Decision::DecideAnOpen.ready(SOME_PAIRS));
}

#[divan::bench]
fn decide_a_close(bencher: Bencher<'_, '_>) {
    bencher.bench_local(Decision::DecideAClose.ready(SOME_PAIRS));
}

#[divan::bench]
fn size_a_copy(bencher: Bencher<'_, '_>) {
    bencher.bench_local(Decision::SizeACopy.ready(SOME_PAIRS));
}

#[divan::bench]
fn encode_an_event(bencher: Bencher<'_, '_>) {
    bencher.bench_local(Decision::EncodeAnEvent.ready(SOME_PAIRS));
}

#[divan::bench]
fn decode_an_event(bencher: Bencher<'_, '_>) {
    bencher.bench_local(Decision::DecodeAnEvent.ready(SOME_PAIRS));
}

#[divan::bench]
fn judge_an_event(bencher: Bencher<'_, '_>) {
    bencher.bench_local(Decision::JudgeAnEvent.ready(SOME_PAIRS));
}
