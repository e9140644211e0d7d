//! Named cases: what happened to users of other copiers (CASES.md) and what could happen here
//! (HAZARDS.md), each with the right plan. The number is in the comment above the test.

mod changing;
mod identity;
mod opening;
mod recovery;
mod sizing;
mod takeovers;
