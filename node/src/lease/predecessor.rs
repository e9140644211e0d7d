//! Whether the process that ran here before is proven to be dead.
//!
//! Decides: whose rows a process that was started again may claim before their lease runs out.
//! In: a folder, the node's name, this process's owner id. Out: [`StateLock`], to be kept until
//! the process ends, with the owners that are proven to hold nothing any more.
//!
//! A node keeps a lock on `<folder>/<name>.lock` for as long as it lives (`flock`, given up by the
//! kernel and nobody else), and has its owner id written in that file. Whoever gets the lock and
//! reads an owner id knows that the process of that id is gone. The kernel gives the lock up when
//! the last thread of the process has let go of its files; from then on none of its instructions
//! runs, so it writes to no socket and holds no permit (H7, H9, H10, H11).
//!
//! Invariants:
//! 1. Only the holder of the lock writes the file, and only its own owner id and those proven
//!    before it. It never lets go of the lock while it lives.
//! 2. A proof holds for one boot of one machine, and for the file it was written into (device and
//!    inode): after a restart of the machine, in a copy, a backup or an image of the folder, and on
//!    another machine it proves nothing.
//! 3. Without the lock nothing is proven, whatever the file says: a second process of the same name
//!    waits like everybody (H15), and leaves the file as it is.
//! 4. The folder must be on a file system that is known to be local. A lock of NFS, CIFS, FUSE or 9p
//!    may be given up by a server that lost sight of a living client.
//! 5. What is proven is death, and not that nothing is on its way. The takeover stays an unclean
//!    one: a new token, a reconcile at the start of each session (H16), and before the first open
//!    the fence and the settle time, counted from the claim. So between the last instruction of the
//!    old process and the first open of the new one lies as much as after a lease that ran out (H8).
//!
//! Containers: the lock belongs to an open file and not to a process number, so namespaces play no
//! part; containers of one machine that share the folder also share the lock and the boot id. With a
//! folder of its own, a container proves only what it wrote itself; with a folder that is new at
//! each start, nothing. A kernel of its own (a small virtual machine) has a boot id of its own.
//!
//! Not covered: a machine that was copied while it ran, memory included, with its lease going on in
//! both copies. There one owner id lives twice, which no lease can tell apart either.

use rustix::fs::{FlockOperation, flock, fstatfs};
use rustix::io::Errno;
use schemas::NodeId;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A predecessor that was killed a moment ago may still be ending; its lock is waited for this long.
pub const LOCK_WAIT: Duration = Duration::from_secs(1);
/// Between two tries for the lock.
const LOCK_LOOK: Duration = Duration::from_millis(20);
/// Owners in one file: a node that dies at every start before its first cycle leaves one each.
const OWNERS_MAX: usize = 8;
/// A lock file of ours is shorter.
const FILE_BYTES_MAX: u64 = 16_384;

/// File systems whose locks live in this kernel, by their number in `statfs(2)`.
const LOCAL_FILE_SYSTEMS: &[(i64, &str)] = &[
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x794c_7630, "overlayfs"),
    (0xf2f5_2010, "f2fs"),
    (0x2fc1_2fc1, "zfs"),
    (0xca45_1a4e, "bcachefs"),
];

/// The state folder cannot be used; the process ends with it.
#[derive(Debug, thiserror::Error)]
pub enum StateFolderError {
    /// It cannot be made, opened, read or written.
    #[error("{path}: {step} failed")]
    Io {
        /// Folder or file.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// Locks there may be given up while their holder lives.
    #[error("{path} is on a file system that is not known to be local (type 0x{kind:x})")]
    NotLocal {
        /// The file.
        path: PathBuf,
        /// Number of the file system.
        kind: i64,
    },
}

/// What came of the look at the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// The owners in [`StateLock::proven_dead`] are gone.
    Proven,
    /// Nobody was here before.
    FirstStart,
    /// Another process of this name lives.
    LockHeld,
    /// The file is from another boot or another machine.
    EarlierBoot,
    /// The file was copied, or belongs to another name, or cannot be read.
    NotOurs,
}

impl Finding {
    /// The word used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Finding::Proven => "proven",
            Finding::FirstStart => "first_start",
            Finding::LockHeld => "lock_held",
            Finding::EarlierBoot => "earlier_boot",
            Finding::NotOurs => "not_ours",
        }
    }
}

/// This boot of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// `/proc/sys/kernel/random/boot_id`: drawn by the kernel at its start.
    pub boot_id: String,
    /// `/etc/machine-id`, where there is one.
    pub machine_id: String,
}

impl Boot {
    /// What this machine says of itself.
    pub fn read() -> Result<Self, StateFolderError> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id = std::fs::read_to_string(path).map_err(failed(path, "read"))?;
        // Many containers have none; the boot id alone tells two kernels apart.
        let machine_id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
        Ok(Self { boot_id: boot_id.trim().to_owned(), machine_id: machine_id.trim().to_owned() })
    }
}

/// Content of a lock file.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    boot: Boot,
    device: u64,
    inode: u64,
    /// The holder of the lock, and before it those that it found proven.
    owners: Vec<NodeId>,
}

/// The lock, if it was got. Keep it until the process ends: when it is dropped, the next process
/// takes this one for dead.
#[derive(Debug)]
pub struct StateLock {
    _file: Option<File>,
    finding: Finding,
    proven_dead: Vec<NodeId>,
}

impl StateLock {
    /// What came of the look at the file.
    pub fn finding(&self) -> Finding {
        self.finding
    }

    /// Owners whose process is proven to be gone.
    pub fn proven_dead(&self) -> &[NodeId] {
        &self.proven_dead
    }
}

fn failed(path: &Path, step: &'static str) -> impl FnOnce(io::Error) -> StateFolderError {
    let path = path.to_owned();
    move |source| StateFolderError::Io { path, step, source }
}

/// Takes the lock of this node, and looks who held it before.
///
/// Shape: folder, node name, the owner id of this process and this boot in; the lock and what it
/// proves out. Makes the folder if there is none.
/// Errors: [`StateFolderError`]; a lock that somebody holds is not an error.
pub async fn take(
    folder: &Path,
    name: &str,
    owner: &NodeId,
    boot: &Boot,
) -> Result<StateLock, StateFolderError> {
    std::fs::create_dir_all(folder).map_err(failed(folder, "make"))?;
    let path = folder.join(format!("{name}.lock"));
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed(&path, "open"))?;
    check_local(&file, &path)?;
    if !lock(&file, &path).await? {
        let proven_dead = Vec::new();
        return Ok(StateLock { _file: None, finding: Finding::LockHeld, proven_dead });
    }
    let own = file.metadata().map_err(failed(&path, "look"))?;
    let (finding, proven_dead) = match read(&mut file).map_err(failed(&path, "read"))? {
        None => (Finding::FirstStart, Vec::new()),
        Some(text) => judge(&text, name, boot, (own.dev(), own.ino())),
    };
    let owners = std::iter::once(owner).chain(&proven_dead).take(OWNERS_MAX).cloned().collect();
    let (device, inode) = (own.dev(), own.ino());
    let entry = Entry { name: name.to_owned(), boot: boot.clone(), device, inode, owners };
    write(&mut file, &entry).map_err(failed(&path, "write"))?;
    Ok(StateLock { _file: Some(file), finding, proven_dead })
}

/// Whether a lock file in this folder would do; makes the folder if there is none, and leaves nothing
/// else.
pub fn check_folder(folder: &Path) -> Result<(), StateFolderError> {
    std::fs::create_dir_all(folder).map_err(failed(folder, "make"))?;
    let path = folder.join(format!(".doctor-{}", std::process::id()));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let file = file.map_err(failed(&path, "open"))?;
    let checked = check_local(&file, &path);
    std::fs::remove_file(&path).map_err(failed(&path, "remove"))?;
    checked
}

fn check_local(file: &File, path: &Path) -> Result<(), StateFolderError> {
    let kind = fstatfs(file).map_err(|e| failed(path, "look")(e.into()))?.f_type;
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures")]
    let kind = kind as i64;
    if LOCAL_FILE_SYSTEMS.iter().any(|(local, _)| *local == kind) {
        Ok(())
    } else {
        Err(StateFolderError::NotLocal { path: path.to_owned(), kind })
    }
}

async fn lock(file: &File, path: &Path) -> Result<bool, StateFolderError> {
    let mut waited = Duration::ZERO;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if waited >= LOCK_WAIT => return Ok(false),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(error) => return Err(failed(path, "lock")(error.into())),
        }
        tokio::time::sleep(LOCK_LOOK).await;
        waited += LOCK_LOOK;
    }
}

fn read(file: &mut File) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok((!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned()))
}

/// What the file of a lock that was got says of the owners in it.
fn judge(text: &str, name: &str, boot: &Boot, place: (u64, u64)) -> (Finding, Vec<NodeId>) {
    let Ok(entry) = serde_json::from_str::<Entry>(text) else {
        return (Finding::NotOurs, Vec::new());
    };
    if entry.boot != *boot {
        (Finding::EarlierBoot, Vec::new())
    } else if entry.name != name || (entry.device, entry.inode) != place {
        (Finding::NotOurs, Vec::new())
    } else {
        (Finding::Proven, entry.owners)
    }
}

/// Written in place, as the lock is on this very file. Torn by a crash it cannot be read, and
/// proves nothing.
fn write(file: &mut File, entry: &Entry) -> io::Result<()> {
    let text = serde_json::to_vec(entry).map_err(io::Error::other)?;
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(&text)
}

#[cfg(test)]
#[path = "predecessor_tests.rs"]
mod tests;
