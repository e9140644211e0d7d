//! Chaos on real processes: a world, faults from a seed, and a checker that believes no node.
//!
//! Decides: whether the promises S1 to S20 and L1 to L6 that show from outside held while servers,
//! connections and nodes failed.
//! In: a time and a seed. Out: a [`verdict::Verdict`], and on a violation the evidence.
//!
//! | module | what |
//! |---|---|
//! | `schedule` | which faults come when, from the seed (pure) |
//! | `timing` | the short times of the nodes, and the bounds that follow |
//! | `world`, `front` | servers, nodes, proxies |
//! | `faults` | breaks and mends |
//! | `load` | masters that trade |
//! | `audit`, `tap` | what was committed; what was said on the bus |
//! | `books` | what accounts hold now, by the ledger |
//! | `check` | joins the evidence and finds violations (pure) |
//! | `run`, `verdict` | rounds, the settle check, the last line |
//!
//! Not covered: clocks that step, disks that fill, brokers that answer out of order, and what the
//! paper broker cannot do yet; `README.md` lists those.

pub mod audit;
pub mod books;
pub mod check;
pub mod faults;
pub mod front;
pub mod load;
pub mod run;
pub mod schedule;
pub mod tap;
pub mod timing;
pub mod verdict;
pub mod world;

/// What the harness could not do: the world is broken in a way that nobody ordered.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
/// The result of something that only the harness can fail at.
pub type Done<T = ()> = Result<T, Failure>;
