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
        // This program is TARGET/PROFILE/deps/it-HASH.
        let program = std::env::current_exe().unwrap();
        let folder = program.parent().and_then(Path::parent);
        let binary = folder.map(|folder| folder.join(NAME)).filter(|binary| binary.is_file());
        binary.unwrap_or_else(|| {
            panic!("no {NAME} beside {}: run the tests with cargo test", program.display())
        })
    })
}
