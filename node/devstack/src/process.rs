//! One child process: any program, its output kept, signals, waiting with a deadline.
//!
//! Decides: when a child counts as ready or ended.
//! In: a [`ProcessSpec`]. Out: a [`ManagedProcess`] with signals, exit status and log lines.
//!
//! Invariants:
//! 1. The child leads its own process group: a Ctrl-C at the terminal does not reach it, and
//!    SIGKILL takes its children too.
//! 2. It ends with the value (drop), with a panic, and with this process (`guard.rs`).
//! 3. Its id is signalled only while it has not been waited for, so never somebody else's.
//! 4. No runtime owns it: it may be shared by tests that each have their own.
//!
//! Not covered: children that leave the process group. Postgres' do; they end with the postmaster.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};
use tokio::net::TcpStream;

use crate::DevstackError;
use crate::guard::{self, Scratch, StopSignal};

/// How often a condition outside (a file, a port, an exit) is looked at again.
pub(crate) const POLL: Duration = Duration::from_millis(10);
/// How long a child that was asked to stop may take on drop before SIGKILL.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// How much of a log an error message carries.
const TAIL_LINES: usize = 30;
const TAIL_BYTES: u64 = 16 * 1024;
/// Waits for the guard to know the child, then becomes the program, under the same process id.
const LAUNCH: &str = r#"IFS= read -r go || exit 125; exec "$@" </dev/null"#;

/// What to run, and how.
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    envs: Vec<(OsString, Option<OsString>)>,
    folder: Option<PathBuf>,
    log_folder: Option<PathBuf>,
    user: Option<(u32, u32)>,
    stop: StopSignal,
}

impl ProcessSpec {
    /// `name` is for messages and log files; `program` is a path, or a name to find on `PATH`.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            envs: Vec::new(),
            folder: None,
            log_folder: None,
            user: None,
            stop: StopSignal::Kill,
        }
    }

    /// The same under another name, with log files of its own.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable; the others are inherited.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs.push((key.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Keeps an environment variable from being inherited.
    #[must_use]
    pub fn env_remove(mut self, key: impl AsRef<OsStr>) -> Self {
        self.envs.push((key.as_ref().to_owned(), None));
        self
    }

    /// The working folder; without it, this process's own.
    #[must_use]
    pub fn current_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Where `NAME.out` and `NAME.err` are written and stay; without it they go with the process.
    #[must_use]
    pub fn log_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.log_folder = Some(folder.into());
        self
    }

    /// How it is asked to stop on drop and when this process dies. Default: SIGKILL.
    #[must_use]
    pub fn stop_signal(mut self, stop: StopSignal) -> Self {
        self.stop = stop;
        self
    }

    /// Runs it as another user; only root may.
    #[must_use]
    pub(crate) fn user(mut self, uid: u32, gid: u32) -> Self {
        self.user = Some((uid, gid));
        self
    }

    /// Starts it.
    pub fn start(self) -> Result<ManagedProcess, DevstackError> {
        let logs = Logs::open(&self)?;
        let (child, started_at) = spawn(&self, &logs)?;
        Ok(ManagedProcess {
            spec: self,
            logs,
            run: Mutex::new(Run { state: State::Running(child), log_start: started_at }),
        })
    }
}

/// A child process. It ends when this value is dropped, and with this process.
#[derive(Debug)]
pub struct ManagedProcess {
    spec: ProcessSpec,
    logs: Logs,
    run: Mutex<Run>,
}

#[derive(Debug)]
struct Run {
    state: State,
    /// Lengths of the two log files when this run began: lines of an earlier run do not count.
    log_start: [u64; 2],
}

#[derive(Debug)]
enum State {
    Running(Child),
    Ended(ExitStatus),
}

#[derive(Debug)]
struct Logs {
    out: PathBuf,
    err: PathBuf,
    _scratch: Option<Scratch>,
}

impl Logs {
    fn open(spec: &ProcessSpec) -> Result<Self, DevstackError> {
        let (folder, scratch) = match &spec.log_folder {
            Some(folder) => (folder.clone(), None),
            None => {
                let scratch = Scratch::new()?;
                (scratch.path().to_owned(), Some(scratch))
            }
        };
        Ok(Self {
            out: folder.join(format!("{}.out", spec.name)),
            err: folder.join(format!("{}.err", spec.name)),
            _scratch: scratch,
        })
    }

    fn both(&self) -> [&Path; 2] {
        [&self.out, &self.err]
    }
}

fn spawn(spec: &ProcessSpec, logs: &Logs) -> Result<(Child, [u64; 2]), DevstackError> {
    let failed = |source| DevstackError::Spawn {
        name: spec.name.clone(),
        program: spec.program.clone(),
        source,
    };
    let out = append(&logs.out)?;
    let err = append(&logs.err)?;
    let length = |file: &File| file.metadata().map(|meta| meta.len());
    let log_start = [length(&out).map_err(failed)?, length(&err).map_err(failed)?];
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", LAUNCH])
        .arg(&spec.name)
        .arg(find_program(&spec.program).map_err(failed)?)
        .args(&spec.args)
        .stdin(Stdio::piped())
        .stdout(out)
        .stderr(err)
        .process_group(0);
    for (key, value) in &spec.envs {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    if let Some(folder) = &spec.folder {
        command.current_dir(folder);
    }
    if let Some((uid, gid)) = spec.user {
        command.uid(uid).gid(gid);
    }
    let mut child = command.spawn().map_err(failed)?;
    let mut go = child.stdin.take().expect("spawned with a piped stdin");
    let released =
        guard::watch(child.id(), spec.stop).and_then(|()| go.write_all(b"go\n").map_err(failed));
    if let Err(error) = released {
        // Not released, so it ends by itself at the end of its stdin.
        drop(go);
        let _ = child.wait();
        guard::forget(child.id());
        return Err(error);
    }
    Ok((child, log_start))
}

/// The shell would report a missing program only in the log; the caller is told at once.
fn find_program(program: &Path) -> io::Result<PathBuf> {
    if program.components().count() > 1 {
        return program.canonicalize();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "not a file in any folder of PATH"))
}

fn append(path: &Path) -> Result<File, DevstackError> {
    OpenOptions::new().create(true).append(true).open(path).map_err(|source| DevstackError::Io {
        doing: format!("opening the log {}", path.display()),
        source,
    })
}

impl ManagedProcess {
    /// The name given in the spec.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The process id of the run that goes on, or of nobody when it has ended.
    pub fn pid(&self) -> Option<u32> {
        match &self.run().state {
            State::Running(child) => Some(child.id()),
            State::Ended(_) => None,
        }
    }

    /// The file with what it writes to stdout.
    pub fn stdout_path(&self) -> &Path {
        &self.logs.out
    }

    /// The file with what it writes to stderr.
    pub fn stderr_path(&self) -> &Path {
        &self.logs.err
    }

    /// SIGKILL to it and its children, and waits for its end. Nothing if it has ended already.
    pub fn kill(&self) -> Result<ExitStatus, DevstackError> {
        let mut run = self.run();
        self.reap(&mut run)?;
        if let State::Running(child) = &mut run.state {
            // It may end by itself in between: the group is then empty, and that is what we want.
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            let status = child.wait().map_err(|source| self.io("waiting for it", source))?;
            guard::forget(child.id());
            run.state = State::Ended(status);
        }
        match run.state {
            State::Ended(status) => Ok(status),
            State::Running(_) => unreachable!("waited for above"),
        }
    }

    /// SIGTERM to the process alone, as an operator or a service manager would.
    pub fn terminate(&self) -> Result<(), DevstackError> {
        self.signal("SIGTERM", |pid| kill_process(pid, Signal::TERM))
    }

    /// SIGINT to the process alone: Ctrl-C.
    pub fn interrupt(&self) -> Result<(), DevstackError> {
        self.signal("SIGINT", |pid| kill_process(pid, Signal::INT))
    }

    /// SIGUSR2, which nats-server reads as "lame duck".
    pub(crate) fn signal_user2(&self) -> Result<(), DevstackError> {
        self.signal("SIGUSR2", |pid| kill_process(pid, Signal::USR2))
    }

    /// SIGSTOP: it keeps its sockets and its memory and does nothing. When this returns, every
    /// thread of it stands still (its children are told, and not waited for).
    pub fn freeze(&self) -> Result<(), DevstackError> {
        self.signal("SIGSTOP", |pid| {
            kill_process_group(pid, Signal::STOP)?;
            // Its end is an answer too, and left to be collected.
            let news = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(pid), news).map(drop)
        })
    }

    /// SIGCONT: it goes on where it was frozen.
    pub fn thaw(&self) -> Result<(), DevstackError> {
        self.signal("SIGCONT", |pid| kill_process_group(pid, Signal::CONT))
    }

    /// Asks it to stop with its stop signal, waits, and kills it if that does not help.
    pub async fn stop(&self, limit: Duration) -> Result<ExitStatus, DevstackError> {
        match self.signal("the stop signal", |pid| kill_process(pid, self.spec.stop.signal())) {
            Ok(()) | Err(DevstackError::NotRunning { .. }) => {}
            Err(error) => return Err(error),
        }
        match self.wait(limit).await {
            Err(DevstackError::TimedOut { .. }) => self.kill(),
            other => other,
        }
    }

    /// Kills it if it still runs, and starts the same again. Output goes on in the same files.
    pub fn restart(&self) -> Result<(), DevstackError> {
        self.kill()?;
        let mut run = self.run();
        let (child, log_start) = spawn(&self.spec, &self.logs)?;
        *run = Run { state: State::Running(child), log_start };
        Ok(())
    }

    /// How it ended, or `None` while it runs.
    pub fn try_wait(&self) -> Result<Option<ExitStatus>, DevstackError> {
        let mut run = self.run();
        self.reap(&mut run)
    }

    /// Waits for its end.
    pub async fn wait(&self, limit: Duration) -> Result<ExitStatus, DevstackError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(self.timed_out("end", limit));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits for a complete line of this run, on stdout or stderr, that contains `needle`; returns
    /// it. Lines that are there already count.
    pub async fn wait_for_line(
        &self,
        needle: &str,
        limit: Duration,
    ) -> Result<String, DevstackError> {
        let awaited = format!("a line with {needle:?}");
        let start = self.run().log_start;
        let [out, err] = self.logs.both();
        let mut readers = [LineReader::new(out, start[0]), LineReader::new(err, start[1])];
        self.wait_until(&awaited, limit, async || {
            for reader in &mut readers {
                let found =
                    reader.find(needle).map_err(|source| self.io("reading its log", source))?;
                if found.is_some() {
                    return Ok(found);
                }
            }
            Ok(None)
        })
        .await
    }

    /// Waits until something accepts connections at `addr`.
    pub async fn wait_for_port(
        &self,
        addr: SocketAddr,
        limit: Duration,
    ) -> Result<(), DevstackError> {
        self.wait_until(&format!("listener at {addr}"), limit, async || {
            Ok(TcpStream::connect(addr).await.ok().map(drop))
        })
        .await
    }

    /// Looks at a condition until it holds, the process ends, or the time is over.
    pub(crate) async fn wait_until<T>(
        &self,
        awaited: &str,
        limit: Duration,
        mut look: impl AsyncFnMut() -> Result<Option<T>, DevstackError>,
    ) -> Result<T, DevstackError> {
        let deadline = Instant::now() + limit;
        loop {
            // The exit is read before the condition: what it did last still counts.
            let ended = self.try_wait()?;
            let looked = tokio::time::timeout_at(deadline.into(), look()).await;
            if let Ok(answer) = looked
                && let Some(found) = answer?
            {
                return Ok(found);
            }
            if let Some(status) = ended {
                return Err(DevstackError::Ended {
                    name: self.spec.name.clone(),
                    status,
                    awaited: awaited.to_owned(),
                    log_tail: self.log_tail(),
                });
            }
            if Instant::now() >= deadline {
                return Err(self.timed_out(awaited, limit));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The last lines of stdout and stderr, for a message.
    pub fn log_tail(&self) -> String {
        self.logs.both().map(tail).concat()
    }

    fn timed_out(&self, awaited: &str, limit: Duration) -> DevstackError {
        DevstackError::TimedOut {
            name: self.spec.name.clone(),
            awaited: awaited.to_owned(),
            limit,
            log_tail: self.log_tail(),
        }
    }

    fn io(&self, doing: &str, source: io::Error) -> DevstackError {
        DevstackError::Io { doing: format!("{}: {doing}", self.spec.name), source }
    }

    fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap(&self, run: &mut Run) -> Result<Option<ExitStatus>, DevstackError> {
        match &mut run.state {
            State::Ended(status) => Ok(Some(*status)),
            State::Running(child) => {
                let status =
                    child.try_wait().map_err(|source| self.io("asking for its end", source))?;
                if let Some(status) = status {
                    guard::forget(child.id());
                    run.state = State::Ended(status);
                }
                Ok(status)
            }
        }
    }

    fn signal(
        &self,
        signal: &'static str,
        send: impl FnOnce(Pid) -> rustix::io::Result<()>,
    ) -> Result<(), DevstackError> {
        let mut run = self.run();
        self.reap(&mut run)?;
        match &run.state {
            State::Running(child) => send(Pid::from_child(child))
                .map_err(|errno| self.io(&format!("sending {signal}"), errno.into())),
            State::Ended(status) => Err(DevstackError::NotRunning {
                name: self.spec.name.clone(),
                status: *status,
                signal,
            }),
        }
    }
}

impl Drop for ManagedProcess {
    fn drop(&mut self) {
        if self.spec.stop != StopSignal::Kill
            && self
                .signal("the stop signal", |pid| kill_process(pid, self.spec.stop.signal()))
                .is_ok()
        {
            // A frozen process would not see the signal.
            let _ = self.thaw();
            let deadline = Instant::now() + STOP_LIMIT;
            while matches!(self.try_wait(), Ok(None)) && Instant::now() < deadline {
                #[allow(
                    clippy::disallowed_methods,
                    reason = "drop cannot await; this polls the exit of a child, with a deadline"
                )]
                std::thread::sleep(POLL);
            }
        }
        let _ = self.kill();
    }
}

/// Reads a growing file, line by line, from where it was left.
struct LineReader<'a> {
    path: &'a Path,
    offset: u64,
    /// The start of a line whose end is not written yet.
    partial: Vec<u8>,
}

impl<'a> LineReader<'a> {
    fn new(path: &'a Path, offset: u64) -> Self {
        Self { path, offset, partial: Vec::new() }
    }

    fn find(&mut self, needle: &str) -> io::Result<Option<String>> {
        let mut file = File::open(self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        self.offset += file.read_to_end(&mut self.partial)? as u64;
        while let Some(end) = self.partial.iter().position(|&byte| byte == b'\n') {
            let rest = self.partial.split_off(end + 1);
            let line = std::mem::replace(&mut self.partial, rest);
            let line = String::from_utf8_lossy(&line[..end]).into_owned();
            if line.contains(needle) {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }
}

fn tail(path: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) => {
            let lines: Vec<&str> = text.lines().collect();
            let first = lines.len().saturating_sub(TAIL_LINES);
            lines[first..].iter().map(|line| format!("  {line}\n")).collect()
        }
        Err(error) => format!("  (the log {} cannot be read: {error})\n", path.display()),
    }
}
