//! Where the program `lockstep` is.
//!
//! Cargo builds it under the name `lockstep-under-test` before the tests of this package run, and
//! puts it beside them; it is as new as they are.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const NAME: &str = "lockstep-under-test";

/// The program `lockstep`.
pub fn lockstep() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // A test is TARGET/PROFILE/deps/it-HASH, a program TARGET/PROFILE/timeline.
        let program = std::env::current_exe().unwrap();
        let folders = program.ancestors().skip(1).take(2);
        let binary = folders.map(|folder| folder.join(NAME)).find(|binary| binary.is_file());
        binary.unwrap_or_else(|| {
            panic!("no {NAME} beside {}: run the tests with cargo test", program.display())
        })
    })
}
