use super::*;
use tempfile::TempDir;

fn owner(number: u32) -> NodeId {
    NodeId::new(format!("paper-host-{number:08x}")).unwrap()
}

fn boot(id: &str) -> Boot {
    Boot { boot_id: id.into(), machine_id: "machine".into() }
}

async fn start(folder: &Path, number: u32, boot_id: &str) -> StateLock {
    take(folder, "paper-host", &owner(number), &boot(boot_id)).await.unwrap()
}

#[tokio::test]
async fn process_that_ended_is_proven_dead_to_the_next_one() {
    let folder = TempDir::new().unwrap();
    let first = start(folder.path(), 1, "b").await;
    assert_eq!((first.finding(), first.proven_dead()), (Finding::FirstStart, &[][..]));
    drop(first);
    let second = start(folder.path(), 2, "b").await;
    assert_eq!((second.finding(), second.proven_dead()), (Finding::Proven, &[owner(1)][..]));
}

#[tokio::test]
async fn process_that_lives_proves_nothing_and_its_entry_stays() {
    let folder = TempDir::new().unwrap();
    let first = start(folder.path(), 1, "b").await;
    let second = start(folder.path(), 2, "b").await;
    assert_eq!((second.finding(), second.proven_dead()), (Finding::LockHeld, &[][..]));
    drop((first, second));
    // The second one never held the lock, so it is not proven dead either.
    let third = start(folder.path(), 3, "b").await;
    assert_eq!(third.proven_dead(), [owner(1)]);
}

#[tokio::test]
async fn lock_file_of_an_earlier_boot_proves_nothing() {
    let folder = TempDir::new().unwrap();
    drop(start(folder.path(), 1, "before").await);
    let second = start(folder.path(), 2, "after").await;
    assert_eq!((second.finding(), second.proven_dead()), (Finding::EarlierBoot, &[][..]));
    drop(second);
    assert_eq!(start(folder.path(), 3, "after").await.proven_dead(), [owner(2)]);
}

#[tokio::test]
async fn lock_file_of_another_machine_proves_nothing() {
    let folder = TempDir::new().unwrap();
    drop(start(folder.path(), 1, "b").await);
    let other = Boot { machine_id: "another".into(), ..boot("b") };
    let second = take(folder.path(), "paper-host", &owner(2), &other).await.unwrap();
    assert_eq!(second.proven_dead(), []);
}

#[tokio::test]
async fn copy_of_a_living_processs_lock_file_proves_nothing() {
    let (folder, copy) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let _lives = start(folder.path(), 1, "b").await;
    let name = "paper-host.lock";
    std::fs::copy(folder.path().join(name), copy.path().join(name)).unwrap();
    let second = start(copy.path(), 2, "b").await;
    assert_eq!((second.finding(), second.proven_dead()), (Finding::NotOurs, &[][..]));
}

#[tokio::test]
async fn file_that_was_torn_by_a_crash_proves_nothing() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("paper-host.lock");
    drop(start(folder.path(), 1, "b").await);
    let whole = std::fs::read_to_string(&path).unwrap();
    for torn in [&whole[..whole.len() / 2], "{}", "\0\0\0"] {
        // In place, as a crash would leave it: another inode would prove nothing anyway.
        std::fs::write(&path, torn).unwrap();
        let second = start(folder.path(), 2, "b").await;
        assert_eq!((second.finding(), second.proven_dead()), (Finding::NotOurs, &[][..]), "{torn}");
    }
}

#[tokio::test]
async fn processes_that_died_one_after_the_other_are_all_proven_dead_up_to_a_bound() {
    let folder = TempDir::new().unwrap();
    for number in 0..20 {
        drop(start(folder.path(), number, "b").await);
    }
    let last = start(folder.path(), 20, "b").await;
    let newest_first: Vec<NodeId> = (12..20).rev().map(owner).collect();
    assert_eq!(last.proven_dead(), newest_first);
}

#[tokio::test]
async fn lock_that_is_given_up_a_moment_later_is_waited_for() {
    let folder = TempDir::new().unwrap();
    let first = start(folder.path(), 1, "b").await;
    let second = start(folder.path(), 2, "b");
    tokio::pin!(second);
    // It has tried once, and waits.
    tokio::select! {
        biased;
        _ = &mut second => panic!("the lock is held"),
        () = std::future::ready(()) => {}
    }
    drop(first);
    assert_eq!(second.await.proven_dead(), [owner(1)]);
}

#[tokio::test]
async fn folder_that_cannot_be_made_and_file_system_that_is_not_local_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = take(&file.join("under"), "paper-host", &owner(1), &boot("b")).await.unwrap_err();
    assert!(error.to_string().contains("under: make failed"), "{error}");
    // The kernel's own view of processes stands for every file system that is not on the list.
    let proc = Path::new("/proc/self/stat");
    let error = check_local(&File::open(proc).unwrap(), proc).unwrap_err();
    assert!(matches!(error, StateFolderError::NotLocal { .. }), "{error}");
    assert!(error.to_string().starts_with("/proc/self/stat is on a file system"), "{error}");
}
