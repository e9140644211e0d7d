//! The guard: no child and no temporary folder outlives this process.
//!
//! Decides: nothing; it keeps a list and acts on it once, when this process is gone.
//! In: process ids and folders to watch, and to forget. Out: at the end of this process, a stop
//! signal and then SIGKILL to every watched process group, and the folders removed.
//!
//! How: one small `sh` a process (`guard.sh`), in its own process group, reads orders from a pipe.
//! The pipe's end is the end of this process, whatever ended it: a panic, Ctrl-C, SIGKILL.
//! (`PR_SET_PDEATHSIG` is not used: it needs unsafe code, and it fires when the *thread* that
//! forked ends, which for a test is much too early.)
//!
//! Invariants:
//! 1. A process is on the list before it runs its program: `process.rs` starts it as a shell that
//!    waits for a line, and sends the line after [`watch`] has returned.
//! 2. A process that was waited for is off the list before its id can be used again by one of our
//!    own children.
//!
//! Not covered: the guard itself being killed by somebody.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

use crate::DevstackError;

const SCRIPT: &str = include_str!("guard.sh");

static GUARD: Mutex<Option<Child>> = Mutex::new(None);

/// How a process is asked to stop; SIGKILL follows where that does not help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGKILL to the whole process group, at once.
    Kill,
    /// SIGTERM: the program's own clean shutdown.
    Term,
    /// SIGQUIT: for Postgres the immediate shutdown, which still removes its shared memory.
    Quit,
}

impl StopSignal {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "KILL",
            Self::Term => "TERM",
            Self::Quit => "QUIT",
        }
    }

    pub(crate) fn signal(self) -> rustix::process::Signal {
        match self {
            Self::Kill => rustix::process::Signal::KILL,
            Self::Term => rustix::process::Signal::TERM,
            Self::Quit => rustix::process::Signal::QUIT,
        }
    }
}

/// Puts a process (leader of its own group) on the list.
pub(crate) fn watch(pid: u32, stop: StopSignal) -> Result<(), DevstackError> {
    order(&format!("+ {pid} {}\n", stop.name())).map_err(DevstackError::Guard)
}

/// Takes a process off the list, after it was waited for.
pub(crate) fn forget(pid: u32) {
    // A guard that is gone has nothing to forget.
    let _ = order(&format!("- {pid}\n"));
}

fn order(line: &str) -> io::Result<()> {
    let mut guard = GUARD.lock().unwrap_or_else(PoisonError::into_inner);
    let child = match &mut *guard {
        Some(child) => child,
        empty => empty.insert(start()?),
    };
    let pipe = child.stdin.as_mut().expect("the guard is started with a piped stdin");
    // One write of less than PIPE_BUF: a line is never torn by our own death.
    pipe.write_all(line.as_bytes())
}

fn start() -> io::Result<Child> {
    Command::new("/bin/sh")
        // By the environment, so that a list of processes stays readable.
        .args(["-c", r#"eval "$LOCKSTEP_GUARD""#, "lockstep-guard"])
        .env("LOCKSTEP_GUARD", SCRIPT)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// A temporary folder that is removed on drop, or by the guard.
#[derive(Debug)]
pub(crate) struct Scratch(TempDir);

impl Scratch {
    /// A new empty folder below `parent`, mode 0700, owned by this process.
    pub(crate) fn new_in(parent: &Path) -> Result<Self, DevstackError> {
        let failed = |source| DevstackError::Io {
            doing: format!("making a temporary folder in {}", parent.display()),
            source,
        };
        let folder =
            tempfile::Builder::new().prefix("lockstep-").tempdir_in(parent).map_err(failed)?;
        order(&format!("d {}\n", folder.path().display())).map_err(DevstackError::Guard)?;
        Ok(Self(folder))
    }

    /// A new empty folder in the system's temporary folder.
    pub(crate) fn new() -> Result<Self, DevstackError> {
        Self::new_in(&std::env::temp_dir())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Removed here first: if we die in between, the guard removes what is left of it.
        let _ = std::fs::remove_dir_all(self.0.path());
        let _ = order(&format!("f {}\n", self.0.path().display()));
    }
}
