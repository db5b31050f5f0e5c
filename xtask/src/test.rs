//! Runs all tests: one build for the whole workspace, suites in parallel, with the seconds of each.
//!
//! Failed tests of a suite run once more with nothing in parallel. A test that passes then is unstable: it is listed last, with
//! the output of its failure, and does not fail the run. An unstable test is a defect of the product or of the test, which must
//! be fixed, but it must not hide whether the change under test is correct.
//!
//! A suite that exceeds its time limit is killed. Its tests that had not ended count as failed.

mod program;

use std::collections::VecDeque;
use std::io::Write;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::build;
use crate::progress::{record, say, step};
use program::Output;

/// Test program and its working directory.
struct Suite {
    name: String,
    package: String,
    program: PathBuf,
    folder: PathBuf,
}

/// Result of a suite.
struct SuiteResult {
    suite: Suite,
    seconds: f64,
    passed: bool,
    /// Output of the program.
    text: String,
}

/// Result of running a suite's failed tests again, with nothing in parallel.
enum Rerun {
    Passed(Vec<String>),
    Failed,
    /// The output names no failed test, or too many.
    Skipped,
}

/// Most failed tests of one suite that run again.
const RERUN_MAX: usize = 8;

/// Time limit of a suite beside others: twice what the longest takes on a machine with two cores.
const LIMIT: Duration = Duration::from_secs(40 * 60);
/// Time limit of failed tests that run alone.
const LIMIT_ALONE: Duration = Duration::from_secs(20 * 60);

/// Free space that the suites need for temporary files, bytes. Image stores among them keep 1 GiB free.
const SPACE: u64 = 4 << 30;

/// Suites that start before all others: the longest ones, so that none of them runs alone at the end.
const FIRST: [&str; 4] =
    ["coracle system", "coracle-host e2e", "coracle-bidnode api_bidnode", "coracle-agentpool api"];

/// Runs the suites, at most one per processor at a time. `only` selects crates. Continues after a failed suite and fails at the
/// end.
pub(crate) fn run_all(only: &[String]) -> Result<()> {
    let mut suites = suites()?;
    suites.retain(|s| only.is_empty() || only.contains(&s.package));
    if suites.is_empty() {
        bail!("no crate of that name has tests");
    }
    check_space(&std::env::temp_dir(), SPACE)?;
    suites.sort_by_key(|s| FIRST.iter().position(|first| s.name == *first).unwrap_or(FIRST.len()));
    let mut ended = step("running every test", None, |_| Ok(run_side_by_side(suites)))?;
    let total = ended.len();
    ended.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    eprintln!("\n{:>8}  suite", "seconds");
    for outcome in &ended {
        let verdict = if outcome.passed { "" } else { "  FAILED" };
        eprintln!("{:>8.1}  {}{verdict}", outcome.seconds, outcome.suite.name);
    }
    let failed: Vec<_> = ended.iter().filter(|o| !o.passed).collect();
    let reruns: Vec<_> = failed.iter().map(|outcome| outcome.run_again()).collect();
    for outcome in &failed {
        eprintln!("\n==> {}: failures", outcome.suite.name);
        eprintln!("{}", failures(&outcome.text));
    }
    let mut names = Vec::new();
    for (outcome, rerun) in failed.iter().zip(&reruns) {
        match rerun {
            Rerun::Passed(tests) => {
                say(&format!("UNSTABLE: {}: {} passed when run alone", outcome.suite.name, tests.join(", ")));
            }
            Rerun::Failed | Rerun::Skipped => names.push(outcome.suite.name.as_str()),
        }
    }
    if names.is_empty() {
        Ok(())
    } else {
        bail!("{} of {total} suites failed: {}", names.len(), names.join(", "))
    }
}

/// Fails if fewer than `needed` bytes are free in `dir`: many tests would fail late, each in another way.
fn check_space(dir: &Path, needed: u64) -> Result<()> {
    let state = rustix::fs::statvfs(dir).with_context(|| format!("inspect {}", dir.display()))?;
    let free = state.f_bavail.saturating_mul(state.f_frsize);
    ensure!(
        free >= needed,
        "{} has {} MiB free, and the tests need {}: remove what is not needed there, or set TMPDIR",
        dir.display(),
        free >> 20,
        needed >> 20
    );
    Ok(())
}

/// Returns the part of a test program's output that explains its failures, or everything if there is no such part.
fn failures(text: &str) -> &str {
    text.find("\nfailures:\n").map_or(text, |at| &text[at..])
}

/// Returns the names of failed tests, and of those that still ran when the suite was killed, as libtest prints them.
fn failed_tests(text: &str) -> Vec<String> {
    const LONG: &str = " has been running for over 60 seconds";
    let results = || text.lines().filter_map(|line| line.strip_prefix("test "));
    let ended = |name: &str| results().any(|r| r.strip_prefix(name).is_some_and(|r| r.starts_with(" ... ")));
    let failed = results().filter_map(|line| line.strip_suffix(" ... FAILED"));
    let unfinished = results().filter_map(|line| line.strip_suffix(LONG)).filter(|name| !ended(name));
    failed.chain(unfinished).map(str::to_owned).collect()
}

/// Runs each suite once, as many at a time as [`jobs`] says.
fn run_side_by_side(suites: Vec<Suite>) -> Vec<SuiteResult> {
    let total = suites.len();
    let (waiting, ended) = (Mutex::new(VecDeque::from(suites)), Mutex::new(Vec::new()));
    let next = || waiting.lock().ok()?.pop_front();
    thread::scope(|scope| {
        for _ in 0..jobs() {
            scope.spawn(|| {
                while let Some(suite) = next() {
                    let outcome = suite.run();
                    let name = &outcome.suite.name;
                    record(&format!("suite {name}"), outcome.seconds);
                    let Ok(mut ended) = ended.lock() else { return };
                    let (at, verdict) = (ended.len() + 1, if outcome.passed { "passed" } else { "FAILED" });
                    say(&format!("test {at} of {total}: {name} {verdict} in {:.1} s", outcome.seconds));
                    ended.push(outcome);
                }
            });
        }
    });
    ended.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of suites that run at once: `CORACLE_TEST_JOBS`, else one per processor.
fn jobs() -> usize {
    let asked = std::env::var("CORACLE_TEST_JOBS").ok().and_then(|n| n.parse().ok());
    asked.or_else(|| thread::available_parallelism().ok()).map_or(1, NonZero::get)
}

impl Suite {
    /// Runs the program to its end and prints its output in one piece, so that lines of suites do not mix.
    fn run(self) -> SuiteResult {
        let began = Instant::now();
        let Output { passed, text } = self.output(&[], LIMIT);
        let _closed = writeln!(std::io::stdout().lock(), "\n==> {}\n{text}", self.name);
        SuiteResult { suite: self, seconds: began.elapsed().as_secs_f64(), passed, text }
    }

    /// Runs the program with `args`.
    fn output(&self, args: &[String], limit: Duration) -> Output {
        program::run(&self.program, args, &self.folder, limit)
    }
}

impl SuiteResult {
    /// Runs the failed tests once more, one after the other, with nothing in parallel.
    fn run_again(&self) -> Rerun {
        let tests = failed_tests(&self.text);
        if tests.is_empty() || tests.len() > RERUN_MAX {
            return Rerun::Skipped;
        }
        say(&format!("{}: running {} alone", self.suite.name, tests.join(", ")));
        let args: Vec<_> =
            tests.iter().cloned().chain(["--exact", "--test-threads=1"].map(str::to_owned)).collect();
        let Output { passed, text } = self.suite.output(&args, LIMIT_ALONE);
        let _closed = writeln!(std::io::stdout().lock(), "\n==> {}, alone\n{text}", self.suite.name);
        if passed { Rerun::Passed(tests) } else { Rerun::Failed }
    }
}

/// Returns the test programs of the workspace.
fn suites() -> Result<Vec<Suite>> {
    let mut suites = Vec::new();
    for message in build::tests()? {
        let Some(program) = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)
        else {
            continue;
        };
        let manifest = message["manifest_path"].as_str().context("artifact without a manifest")?;
        let folder = Path::new(manifest).parent().context("manifest without a directory")?;
        let package = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let target = message["target"]["name"].as_str().unwrap_or_default();
        suites.push(Suite {
            name: format!("{package} {target}"),
            package,
            program: program.into(),
            folder: folder.to_owned(),
        });
    }
    suites.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(suites)
}

#[cfg(test)]
mod tests {
    use super::{check_space, failed_tests, failures};

    const OUTPUT: &str = "running 2 tests\ntest a::one ... ok\ntest a::two ... FAILED\n\nfailures:\n\n---- a::two stdout ----\nwhy\n";

    #[test]
    fn full_disk_is_reported_with_its_directory() {
        let dir = std::env::temp_dir();
        check_space(&dir, 0).unwrap();
        let error = check_space(&dir, u64::MAX).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{} has ", dir.display())), "{error}");
    }

    #[test]
    fn failed_tests_and_their_reasons_are_read() {
        assert_eq!(failed_tests(OUTPUT), ["a::two"]);
        assert!(failures(OUTPUT).ends_with("why\n"));
        assert!(!failures(OUTPUT).contains("a::one"));
        assert_eq!(failures("killed"), "killed");
    }

    #[test]
    fn tests_that_had_not_ended_are_read() {
        let text = "test a::one has been running for over 60 seconds\n\
                    test a::two has been running for over 60 seconds\n\
                    test a::two ... ok\n";
        assert_eq!(failed_tests(text), ["a::one"]);
    }
}
