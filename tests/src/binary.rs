//! Where the program `lockstep` is.
//!
//! Decides: whether the one beside this test program is as new as its sources; if not, cargo
//! builds it, once a run. A test of another package gets no path to a binary from cargo.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// The program `lockstep`, built from these sources.
///
/// Panics with cargo's own words if it cannot be built.
pub fn lockstep() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let folder = profile_folder();
        let binary = folder.join("lockstep");
        if !is_fresh(&binary) {
            build(&folder);
        }
        assert!(binary.is_file(), "cargo built no {}", binary.display());
        binary
    })
}

/// The folder of the build profile: this program is `deps/it-HASH` in it.
fn profile_folder() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().and_then(Path::parent);
    folder.unwrap_or_else(|| panic!("{} is in no build folder", program.display())).to_owned()
}

/// The program is there, was made of the sources of this folder, and none of them is newer.
fn is_fresh(binary: &Path) -> bool {
    let Some(built) = modified(binary) else { return false };
    let Ok(list) = std::fs::read_to_string(binary.with_extension("d")) else { return false };
    let Some((_, sources)) = list.split_once(": ") else { return false };
    let sources: Vec<PathBuf> = sources
        .replace("\\ ", "\0")
        .split_whitespace()
        .map(|s| s.replace('\0', " ").into())
        .collect();
    let Ok(main) = workspace().join("node/src/main.rs").canonicalize() else { return false };
    sources.contains(&main)
        && sources.iter().all(|source| modified(source).is_some_and(|changed| changed <= built))
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn build(folder: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(workspace())
        .args(["build", "--quiet", "-p", "lockstep", "--bin", "lockstep"]);
    // The folder is TARGET/PROFILE; `debug` is the name of the profile `dev`.
    match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => {}
        Some(profile) => drop(command.args(["--profile", profile])),
    }
    if let Some(target) = folder.parent() {
        command.arg("--target-dir").arg(target);
    }
    let done = command.output().unwrap_or_else(|error| panic!("cargo could not be run: {error}"));
    assert!(
        done.status.success(),
        "lockstep could not be built ({}):\n{}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
}
