//! Runs one test program to its end or to its time limit.
//!
//! The output goes to a file, not to a pipe: a child process that survives the program holds the pipe open, and a reader would
//! wait for its end.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{io, thread};

const POLL: Duration = Duration::from_millis(50);
/// Smallest warm pool: nodes of tests live for seconds, and preparing for bursts of starts would take processor time from other
/// tests.
const WARM_POOL_MIN: (&str, &str) = ("CORACLE_NODE_WARM_POOL_MIN", "1");

/// Result of a test program.
pub(super) struct Output {
    /// Whether the program ended in time with exit code 0.
    pub(super) passed: bool,
    /// Output of the program. If it was killed: also its threads and its child processes.
    pub(super) text: String,
}

/// Runs `program` with `args` in `folder`, for at most `limit`.
pub(super) fn run(program: &Path, args: &[String], folder: &Path, limit: Duration) -> Output {
    attempt(program, args, folder, limit)
        .unwrap_or_else(|error| Output { passed: false, text: format!("run {}: {error}", program.display()) })
}

fn attempt(program: &Path, args: &[String], folder: &Path, limit: Duration) -> io::Result<Output> {
    let printed = temporary_file()?;
    let mut child = Command::new(program)
        .args(args)
        .current_dir(folder)
        .env("CARGO_MANIFEST_DIR", folder)
        .env(WARM_POOL_MIN.0, WARM_POOL_MIN.1)
        .stdin(Stdio::null())
        .stdout(printed.try_clone()?)
        .stderr(printed.try_clone()?)
        .spawn()?;
    let (status, remark) = match wait(&mut child, limit)? {
        Some(status) => (Some(status), String::new()),
        None => (None, end(&mut child, limit)?),
    };
    let passed = status.is_some_and(|s| s.success());
    Ok(Output { passed, text: format!("{}{remark}{}", text_of(&printed)?, died(status)) })
}

/// Creates a file without a name.
fn temporary_file() -> io::Result<File> {
    let path = std::env::temp_dir().join(format!(
        "coracle-xtask-{}-{:?}",
        std::process::id(),
        thread::current().id()
    ));
    let file = File::options().read(true).append(true).create_new(true).open(&path)?;
    fs::remove_file(path)?;
    Ok(file)
}

fn text_of(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or_default()];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Waits for the end of a program; returns `None` after `limit`.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    while began.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(POLL);
    }
    Ok(None)
}

/// Kills a program that did not end in time, and returns a report on what it was doing.
fn end(child: &mut Child, limit: Duration) -> io::Result<String> {
    let tree = processes_below(child.id());
    let remark = format!("\nended after the limit of {} s; it was doing this:\n{tree}\n", limit.as_secs());
    child.kill()?;
    child.wait()?;
    Ok(remark)
}

/// Returns a line for a program that a signal killed, because it printed no summary.
fn died(status: Option<ExitStatus>) -> String {
    status.filter(|s| s.code().is_none()).map_or(String::new(), |status| format!("\nended by {status}\n"))
}

/// Lists the process and its descendants with the threads of each: name, state, and the kernel function that it waits in
/// (proc(5): `comm`, `status`, `wchan`).
fn processes_below(pid: u32) -> String {
    let (mut lines, mut waiting) = (String::new(), vec![(pid, 0)]);
    while let Some((pid, depth)) = waiting.pop() {
        let of_pid = format!("/proc/{pid}");
        let command = fs::read(format!("{of_pid}/cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        lines += &format!("{:1$}{pid} {command}\n", "", depth * 2);
        for thread in entries(&format!("{of_pid}/task")) {
            let of_thread = format!("{of_pid}/task/{thread}");
            let read = |file: &str| fs::read_to_string(format!("{of_thread}/{file}")).unwrap_or_default();
            lines += &format!("{:1$}  {2} {3}\n", "", depth * 2, read("comm").trim(), read("wchan").trim());
            let children = read("children");
            waiting.extend(children.split_whitespace().filter_map(|c| Some((c.parse().ok()?, depth + 1))));
        }
    }
    lines
}

fn entries(folder: &str) -> Vec<String> {
    let read = fs::read_dir(folder).into_iter().flatten().flatten();
    read.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::run;

    fn shell(script: &str, limit: Duration) -> super::Output {
        run(Path::new("/bin/sh"), &["-c".to_owned(), script.to_owned()], Path::new("/"), limit)
    }

    #[test]
    fn program_is_not_waited_for_beyond_its_end() {
        let began = Instant::now();
        let ended = shell("sleep 30 & echo one; echo two >&2; exit 3", Duration::from_secs(20));
        assert!(!ended.passed);
        assert_eq!(ended.text, "one\ntwo\n");
        assert!(began.elapsed() < Duration::from_secs(20), "it waited for what the program left behind");
    }

    #[test]
    fn program_without_an_end_is_ended_and_described() {
        let ended = shell("echo one; sleep 40; true", Duration::from_millis(500));
        assert!(!ended.passed);
        assert!(ended.text.starts_with("one\n"), "{}", ended.text);
        assert!(ended.text.contains("sleep 40"), "{}", ended.text);
    }

    #[test]
    fn program_ended_by_a_signal_reports_the_signal() {
        let ended = shell("kill -9 $$", Duration::from_secs(20));
        assert!(!ended.passed && ended.text.contains("signal: 9"), "{}", ended.text);
        assert!(shell("true", Duration::from_secs(20)).passed);
    }
}
