//! What a follower does, told as cases and shaken by chance.
//!
//! `world` is a broker (the paper broker's engine), masters and a clock, all moved by hand:
//! nothing happens between two lines of a case. Each file of cases has one subject; `random`
//! lets faults and time come as a seed wants them, and judges every order and the end.

mod by_hand;
mod changes;
mod doubt;
mod faults;
mod lost;
mod opening;
mod pausing;
mod pendings;
mod random;
mod reads;
mod refused;
mod removing;
mod takeovers;
mod world;
