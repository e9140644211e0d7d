//! How many files and connections this process may have open at once.
//!
//! Decides: nothing; asks the system for as many as it allows. Systems start a process with a soft
//! limit far below the hard one (often 1,024), and a node holds one connection for each account.
//! Out: what was granted.

use crate::causes::with_causes;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files of a node that are not the connections of its accounts: servers, metrics, logs (chosen, with
/// room to spare).
pub const OTHER_FILES: u64 = 64;

/// Raises the soft limit to the hard one; says what holds now, absent where there is no limit.
pub fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, wanted) {
            tracing::warn!(error = %with_causes(&error), ?limit, "the limit of open files could not be raised");
        }
    }
    getrlimit(Resource::Nofile).current
}
