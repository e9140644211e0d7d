//! The library of the `lockstep` process.
pub mod history;
