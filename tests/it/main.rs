//! Integration tests of Lockstep with real servers, in one program.

mod dashboards;
