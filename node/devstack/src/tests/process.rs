use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{LIMIT, eventually, is_alive};
use crate::{DevstackError, ManagedProcess, Nats, Postgres, ProcessSpec, StopSignal, Tools};

fn shell(script: &str) -> ProcessSpec {
    ProcessSpec::new("script", "sh").args(["-c", script])
}

/// Ends by itself, in case a test should fail to end it.
const LINGER: &str = "exec sleep 60";

fn state_letter(process: &ManagedProcess) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid()?)).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

#[tokio::test]
async fn a_line_of_output_is_found_on_either_stream_and_returned_whole() {
    let process = shell(&format!("echo 'listening on 4711'; echo 'ready now' >&2; {LINGER}"))
        .start()
        .unwrap();
    let line = process.wait_for_line("listening", LIMIT).await.unwrap();
    assert_eq!(line, "listening on 4711");
    assert_eq!(process.wait_for_line("ready", LIMIT).await.unwrap(), "ready now");
}

#[tokio::test]
async fn a_line_without_its_end_is_not_a_line_yet() {
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let script = format!(
        "printf 'port 12'; until [ -e {0} ]; do sleep 0.02; done; echo 34; {LINGER}",
        gate.display()
    );
    let process = shell(&script).start().unwrap();
    let early = process.wait_for_line("port", Duration::from_millis(300)).await;
    assert!(matches!(early, Err(DevstackError::TimedOut { .. })), "{early:?}");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(process.wait_for_line("port", LIMIT).await.unwrap(), "port 1234");
}

#[tokio::test]
async fn a_child_that_ends_too_early_is_reported_with_its_last_words() {
    let process = shell("echo 'cannot open ledger' >&2; exit 3").start().unwrap();
    let error = process.wait_for_line("ready", LIMIT).await.unwrap_err();
    let DevstackError::Ended { status, .. } = &error else { panic!("{error:?}") };
    assert_eq!(status.code(), Some(3));
    assert!(error.to_string().contains("cannot open ledger"), "{error}");
}

#[tokio::test]
async fn the_last_line_before_the_end_still_counts() {
    let process = shell("echo done").start().unwrap();
    process.wait(LIMIT).await.unwrap();
    assert_eq!(process.wait_for_line("done", LIMIT).await.unwrap(), "done");
}

#[tokio::test]
async fn a_missing_program_is_reported_at_once() {
    for program in ["no-such-program-here", "./no/such/program"] {
        let error = ProcessSpec::new("ghost", program).start().unwrap_err();
        assert!(matches!(error, DevstackError::Spawn { .. }), "{error:?}");
        assert!(error.to_string().contains(program), "{error}");
    }
}

#[tokio::test]
async fn arguments_environment_and_folder_reach_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let process = ProcessSpec::new("echo", "sh")
        .args(["-c", "echo \"$1|$WORD|$(pwd)|$(cat)|end\"", "sh", "two words"])
        .env("WORD", "a'b")
        .current_dir(folder.path())
        .start()
        .unwrap();
    let line = process.wait_for_line("end", LIMIT).await.unwrap();
    let folder = folder.path().canonicalize().unwrap();
    assert_eq!(line, format!("two words|a'b|{}||end", folder.display()));
}

#[tokio::test]
async fn kill_takes_the_children_of_the_child_too() {
    let process = shell("sleep 60 & echo child $!; wait").start().unwrap();
    let line = process.wait_for_line("child", LIMIT).await.unwrap();
    let grandchild: u32 = line.trim_start_matches("child ").parse().unwrap();
    assert!(is_alive(grandchild));
    let status = process.kill().unwrap();
    assert!(!status.success());
    eventually("the grandchild is gone", async || !is_alive(grandchild)).await;
}

#[tokio::test]
async fn sigterm_lets_the_program_end_its_own_way() {
    let script = "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.02; done";
    let process = shell(script).start().unwrap();
    process.wait_for_line("up", LIMIT).await.unwrap();
    process.terminate().unwrap();
    assert_eq!(process.wait(LIMIT).await.unwrap().code(), Some(7));
    process.wait_for_line("bye", LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_program_that_ignores_its_stop_signal_is_killed_after_the_limit() {
    let script = "trap '' TERM; echo up; while :; do sleep 0.02; done";
    let process = shell(script).stop_signal(StopSignal::Term).start().unwrap();
    process.wait_for_line("up", LIMIT).await.unwrap();
    let status = process.stop(Duration::from_millis(200)).await.unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}

#[tokio::test]
async fn a_frozen_process_stands_still_until_it_is_thawed() {
    let process = shell(LINGER).start().unwrap();
    for _ in 0..3 {
        process.freeze().unwrap();
        assert_eq!(state_letter(&process), Some('T'));
        process.freeze().unwrap();
        process.thaw().unwrap();
        eventually("it goes on", async || state_letter(&process) == Some('S')).await;
    }
}

#[tokio::test]
async fn a_signal_to_a_process_that_has_ended_is_an_error_and_not_somebody_elses_signal() {
    let process = shell("exit 0").start().unwrap();
    process.wait(LIMIT).await.unwrap();
    for result in [process.terminate(), process.freeze(), process.thaw(), process.interrupt()] {
        assert!(matches!(result, Err(DevstackError::NotRunning { .. })), "{result:?}");
    }
    assert!(process.kill().unwrap().success());
}

#[tokio::test]
async fn after_a_restart_lines_of_the_earlier_run_do_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("[ -e once ] || echo first; touch once; echo up; {LINGER}");
    let process =
        shell(&script).current_dir(folder.path()).log_folder(folder.path()).start().unwrap();
    process.wait_for_line("up", LIMIT).await.unwrap();
    let first = process.pid();
    process.restart().unwrap();
    process.wait_for_line("up", LIMIT).await.unwrap();
    assert_ne!(process.pid(), first);
    let old = process.wait_for_line("first", Duration::from_millis(100)).await;
    assert!(matches!(old, Err(DevstackError::TimedOut { .. })), "{old:?}");
    let whole = std::fs::read_to_string(process.stdout_path()).unwrap();
    assert_eq!(whole, "first\nup\nup\n");
}

#[tokio::test]
async fn a_dropped_process_is_gone_and_a_kept_log_stays() {
    let folder = tempfile::tempdir().unwrap();
    let process = shell(&format!("echo up; {LINGER}")).log_folder(folder.path()).start().unwrap();
    process.wait_for_line("up", LIMIT).await.unwrap();
    let pid = process.pid().unwrap();
    drop(process);
    assert!(!is_alive(pid));
    let log = std::fs::read_to_string(folder.path().join("script.out")).unwrap();
    assert_eq!(log, "up\n");
}

#[tokio::test]
async fn a_process_outlives_the_runtime_it_was_started_in() {
    let process = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { shell(&format!("echo up; {LINGER}")).start().unwrap() })
    })
    .join()
    .unwrap();
    process.wait_for_line("up", LIMIT).await.unwrap();
    assert_eq!(process.try_wait().unwrap(), None);
}

/// What the parent in the tests below starts, and where it says so.
const REPORT: &str = "DEVSTACK_TEST_REPORT";

#[tokio::test]
#[ignore = "the parent that the two tests below start and end; alone it does nothing"]
async fn parent_of_servers() {
    let Some(report) = std::env::var_os(REPORT) else { return };
    let tools = Tools::locate().unwrap();
    let nats = Nats::start(&tools).await.unwrap();
    let postgres = Postgres::start(&tools).await.unwrap();
    postgres.create_database("used").await.unwrap();
    let frozen = shell(LINGER).start().unwrap();
    frozen.freeze().unwrap();
    let mut lines = String::new();
    for process in [nats.process(), postgres.process(), &frozen] {
        let folder = process.stdout_path().parent().unwrap().display();
        lines.push_str(&format!("{} {folder}\n", process.pid().unwrap()));
    }
    let partial = Path::new(&report).with_extension("partial");
    std::fs::File::create(&partial).unwrap().write_all(lines.as_bytes()).unwrap();
    std::fs::rename(partial, &report).unwrap();
    std::future::pending::<()>().await;
}

async fn parent_with_servers(folder: &Path) -> (ManagedProcess, Vec<(u32, PathBuf)>) {
    let report = folder.join("report");
    let parent = ProcessSpec::new("parent", std::env::current_exe().unwrap())
        .args(["--exact", "tests::process::parent_of_servers", "--ignored", "--nocapture"])
        .env(REPORT, &report)
        .start()
        .unwrap();
    let read = async || Ok(std::fs::read_to_string(&report).ok());
    let report = parent.wait_until("servers", 3 * LIMIT, read).await.unwrap();
    let children: Vec<(u32, PathBuf)> = report
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(pid, folder)| (pid.parse().unwrap(), folder.into()))
        .collect();
    assert_eq!(children.len(), 3);
    for (pid, folder) in &children {
        assert!(is_alive(*pid) && folder.is_dir());
    }
    (parent, children)
}

async fn nothing_is_left(children: Vec<(u32, PathBuf)>) {
    for (pid, folder) in children {
        eventually("the child is gone", async || !is_alive(pid)).await;
        eventually("its folder is gone", async || !folder.exists()).await;
    }
}

#[tokio::test]
async fn nothing_is_left_when_the_parent_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (parent, children) = parent_with_servers(folder.path()).await;
    parent.kill().unwrap();
    nothing_is_left(children).await;
}

/// SIGINT ends it in the same way; but a shell's background jobs, tests included, ignore that one.
#[tokio::test]
async fn nothing_is_left_when_the_parent_is_terminated() {
    let folder = tempfile::tempdir().unwrap();
    let (parent, children) = parent_with_servers(folder.path()).await;
    parent.terminate().unwrap();
    parent.wait(LIMIT).await.unwrap();
    nothing_is_left(children).await;
}
