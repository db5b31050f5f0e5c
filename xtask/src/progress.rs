//! Progress on stderr: which step runs, how far it is, how long it took. Steps may run in parallel, so each line is complete
//! and names its step.
//!
//! ```text
//! [   0 s] building kube-apiserver, kubectl (about 170 s)
//! [  30 s] building kube-apiserver, kubectl: 30 s so far
//! [ 164 s] building kube-apiserver, kubectl: done in 164 s
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::root;

/// File to which each ended step is appended as a JSON line; `bench build` reads it.
pub(crate) const STEPS_FILE: &str = "CORACLE_XTASK_STEPS";
/// Variable that makes builds of the workspace report the time of each crate.
pub(crate) const TIMINGS: &str = "CORACLE_XTASK_TIMINGS";
/// Interval at which a step reports that it still runs.
const INTERVAL: Duration = Duration::from_secs(20);
/// Number of last lines of a failed program's log that are shown.
const LOG_LINES_SHOWN: usize = 40;

static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Starts the clock of the lines.
pub(crate) fn begin() {
    LazyLock::force(&BEGAN);
}

/// Prints one line with the seconds since the start.
pub(crate) fn say(line: &str) {
    eprintln!("[{:>4} s] {line}", BEGAN.elapsed().as_secs());
}

/// Runs a step: prints its start, every 20 s that it still runs, and its duration. `usual` is its duration on a machine with
/// two cores.
pub(crate) fn step<T>(
    name: &str,
    usual: Option<Duration>,
    work: impl FnOnce(&Meter) -> Result<T>,
) -> Result<T> {
    let about = usual.map_or(String::new(), |usual| format!(" (about {} s)", usual.as_secs()));
    say(&format!("{name}{about}"));
    let began = Instant::now();
    let meter = Meter::default();
    let result = thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        let meter = &meter;
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(INTERVAL) {
                say(&format!("{name}: {}{} s so far", meter.text(), began.elapsed().as_secs()));
            }
        });
        let result = work(meter);
        drop(ended);
        result
    });
    let seconds = began.elapsed().as_secs_f64();
    let outcome = if result.is_ok() { "done in" } else { "FAILED after" };
    say(&format!("{name}: {outcome} {seconds:.0} s"));
    record(name, seconds);
    result
}

/// Progress of a step that can be counted.
#[derive(Default)]
pub(crate) struct Meter {
    done: AtomicUsize,
    total: AtomicUsize,
}

impl Meter {
    /// Sets the maximum number of units.
    pub(crate) fn expect(&self, total: usize) {
        self.total.store(total, Relaxed);
    }

    /// Counts one unit.
    pub(crate) fn count(&self) {
        self.done.fetch_add(1, Relaxed);
    }

    fn text(&self) -> String {
        match (self.done.load(Relaxed), self.total.load(Relaxed)) {
            (0, _) => String::new(),
            (done, total) if done < total => format!("{done} of {total} crates, "),
            (done, _) => format!("{done} crates, "),
        }
    }
}

/// Appends a step to [`STEPS_FILE`]. If the file cannot be written, the record is lost and the step continues.
pub(crate) fn record(name: &str, seconds: f64) {
    let Some(path) = std::env::var_os(STEPS_FILE) else { return };
    let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) else { return };
    let _lost = writeln!(file, "{}", json!({"step": name, "seconds": seconds}));
}

/// Runs a program with its output in `log`, because other programs run in parallel.
///
/// # Errors
/// The program fails. The error has the end of its log, and the log's path.
pub(crate) fn logged(command: &mut Command, log: &Path) -> Result<()> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
    if command.get_current_dir().is_none() {
        command.current_dir(root());
    }
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("run {program}"))?;
    if !status.success() {
        let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        let lines: Vec<_> = text.lines().collect();
        let end = lines.get(lines.len().saturating_sub(LOG_LINES_SHOWN)..).unwrap_or_default().join("\n");
        bail!("{program}: {status}; the end of {}:\n{end}", log.display());
    }
    Ok(())
}

/// Runs a cargo command that compiles: counts its crates in `meter`, and prints only its warnings and errors. Returns its
/// stdout.
///
/// # Errors
/// The command fails.
pub(crate) fn cargo(command: &mut Command, meter: &Meter) -> Result<String> {
    let shown: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    command.current_dir(root()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("run cargo")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let text = thread::scope(|scope| {
        let reader = scope.spawn(move || stdout.map(std::io::read_to_string).transpose());
        for line in stderr.into_iter().flat_map(|pipe| BufReader::new(pipe).lines()).map_while(Result::ok) {
            pass_on(&line, meter);
        }
        reader.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause))
    });
    let status = child.wait().context("wait for cargo")?;
    if !status.success() {
        bail!("cargo {}: {status}", shown.join(" "));
    }
    Ok(text?.unwrap_or_default())
}

/// Counts a crate, drops lines without information, prints the rest.
fn pass_on(line: &str, meter: &Meter) {
    match line.split_whitespace().next() {
        Some("Compiling" | "Checking" | "Documenting") => meter.count(),
        Some(
            "Blocking" | "Downloaded" | "Downloading" | "Executable" | "Finished" | "Fresh" | "Locking"
            | "Timing" | "Updating",
        ) => {}
        _ => eprintln!("{line}"),
    }
}

/// Counts the distinct packages of a selection, which a cold build compiles.
pub(crate) fn packages(selection: &[&str]) -> Result<usize> {
    let output = Command::new("cargo")
        .args(["tree", "--locked", "--prefix", "none", "--format", "{p}"])
        .args(selection)
        .current_dir(root())
        .output()
        .context("run cargo tree")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().collect::<BTreeSet<_>>().len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter_text_shows_total_until_it_is_passed() {
        let meter = Meter::default();
        assert_eq!(meter.text(), "");
        meter.count();
        assert_eq!(meter.text(), "1 crates, ");
        meter.expect(2);
        assert_eq!(meter.text(), "1 of 2 crates, ");
        meter.count();
        assert_eq!(meter.text(), "2 crates, ");
    }

    #[test]
    fn failed_program_shows_end_of_its_log() {
        let log = std::env::temp_dir().join(format!("xtask-progress-{}.log", std::process::id()));
        let mut fails = Command::new("sh");
        let error =
            logged(fails.args(["-c", "echo out; echo err >&2; exit 3"]), &log).unwrap_err().to_string();
        fs::remove_file(&log).unwrap();
        assert!(error.starts_with("sh: exit status: 3"), "{error}");
        assert!(error.ends_with("out\nerr"), "{error}");
    }
}
