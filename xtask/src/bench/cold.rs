//! `bench build`: the waiting times of a newcomer, of CI and of a developer. Runs the real commands in a fresh clone of the
//! last commit with empty caches, and reads their own record of steps.
//!
//! Debian packages cannot be removed again: if they are already installed, their minute is missing from the results.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::progress::{STEPS_FILE, TIMINGS, say};
use crate::root;

/// Name of the benchmark.
pub(super) const NAME: &str = "build";
/// Number of rows in the tables of slow crates and suites.
const ROWS: usize = 10;

/// Caches that are emptied besides the target directory, which is always emptied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cold {
    /// Tool cache and Go's build cache.
    pub(crate) tools: bool,
    /// Downloaded crates and Go modules.
    pub(crate) registry: bool,
}

/// Runs all measurements; stdout has a JSON line for each.
pub(super) fn run(cold: Cold) -> Result<()> {
    let work = std::env::temp_dir().join(format!("coracle-bench-build-{}", std::process::id()));
    fs::create_dir_all(&work).with_context(|| format!("create {}", work.display()))?;
    let result = measure(&work, cold);
    fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))?;
    result
}

fn measure(work: &Path, cold: Cold) -> Result<()> {
    machine(cold);
    let ci = Scene::new(&work.join("ci"), cold)?;
    let seconds = ci.time(ci.command("bash").arg(".ci/run"))?;
    figure("build.ci_cold_s", seconds)?;
    let steps = ci.steps()?;
    for (name, step) in [
        ("build.setup_cold_s", "setup"),
        ("build.test_build_s", "building every test"),
        ("build.tests_s", "running every test"),
    ] {
        let seconds = steps.get(step).with_context(|| format!("step \"{step}\" not found in the record"))?;
        figure(name, *seconds)?;
    }
    let suites = steps.iter().filter_map(|(name, seconds)| Some((name.strip_prefix("suite ")?, *seconds)));
    table("suite", suites.collect());
    ci.slowest_crates()?;
    figure("build.touch_host_s", ci.touch_host()?)?;
    drop(ci);

    let up = Scene::new(&work.join("up"), cold)?;
    let state = work.join("state");
    let seconds = up.time(up.xtask().args(["up", "--", "--detach", "--state"]).arg(&state))?;
    figure("build.up_cold_s", seconds)?;
    let program = up.target().join("debug/coracle");
    let down = Command::new(&program).arg("down").arg("--state").arg(&state).status()?;
    ensure!(down.success(), "{} down: {down}", program.display());
    up.slowest_crates()
}

/// Prints properties of the machine that are needed to interpret the results.
fn machine(cold: Cold) {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let emptied = [(true, "target directory"), (cold.tools, "tool cache"), (cold.registry, "registry cache")];
    let emptied: Vec<_> = emptied.iter().filter(|(is, _)| *is).map(|(_, name)| *name).collect();
    say(&format!("{processors} processors, load {}; empty: {}", load.trim(), emptied.join(", ")));
    let changed = Command::new("git").args(["status", "--porcelain"]).current_dir(root()).output();
    if changed.is_ok_and(|o| !o.stdout.is_empty()) {
        say("changes that are not committed are not measured");
    }
}

/// Fresh clone and its caches, which are removed with it.
struct Scene {
    folder: PathBuf,
    cold: Cold,
}

impl Scene {
    fn new(folder: &Path, cold: Cold) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let scene = Self { folder: folder.to_owned(), cold };
        let cloned =
            Command::new("git").args(["clone", "--quiet"]).arg(root()).arg(scene.clone()).status()?;
        ensure!(cloned.success(), "cannot clone {}: {cloned}", root().display());
        Ok(scene)
    }

    fn clone(&self) -> PathBuf {
        self.folder.join("clone")
    }

    fn target(&self) -> PathBuf {
        self.folder.join("target")
    }

    fn steps_file(&self) -> PathBuf {
        self.folder.join("steps")
    }

    /// Returns a command in the clone, with the environment of a newcomer's shell.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.clone()).stdin(Stdio::null()).stdout(Stdio::null());
        // Variables that `cargo xtask` sets for its programs must not reach those of the clone.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CARGO_") && name != "CARGO_HOME" {
                command.env_remove(name);
            }
        }
        command.env("CARGO_TARGET_DIR", self.target()).env(STEPS_FILE, self.steps_file()).env(TIMINGS, "1");
        if self.cold.tools {
            command
                .env("CORACLE_TOOLS", self.folder.join("tools"))
                .env("GOCACHE", self.folder.join("go-build"));
        }
        if self.cold.registry {
            command.env("CARGO_HOME", self.folder.join("cargo"));
            // Without this flag the modules are read-only on disk, and the directory cannot be removed.
            command.env("GOMODCACHE", self.folder.join("go-mod")).env("GOFLAGS", "-modcacherw");
        }
        command
    }

    fn xtask(&self) -> Command {
        let mut command = self.command("cargo");
        command.arg("xtask");
        command
    }

    /// Returns the duration in seconds of a command that must succeed. Shows its progress.
    fn time(&self, command: &mut Command) -> Result<f64> {
        let began = Instant::now();
        let status = command.status().context("run a command of the clone")?;
        ensure!(status.success(), "{:?}: {status}", command.get_args().collect::<Vec<_>>());
        Ok(began.elapsed().as_secs_f64())
    }

    /// Returns the duration in seconds of each step; steps of the same name are added.
    fn steps(&self) -> Result<BTreeMap<String, f64>> {
        let path = self.steps_file();
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let mut steps = BTreeMap::new();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).context("read the record of steps")?;
            let name = line["step"].as_str().context("step without a name")?.to_owned();
            *steps.entry(name).or_default() += line["seconds"].as_f64().context("step without seconds")?;
        }
        Ok(steps)
    }

    /// Prints the crates that took longest, from all of cargo's reports.
    fn slowest_crates(&self) -> Result<()> {
        let folder = self.target().join("cargo-timings");
        let mut units = Vec::new();
        for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
            let path = entry?.path();
            // `cargo-timing.html` is a copy of the newest report.
            if path.file_name().is_some_and(|name| name != "cargo-timing.html") {
                units.extend(crate_times(&fs::read_to_string(&path)?)?);
            }
        }
        table("crate", units);
        Ok(())
    }

    /// Returns the seconds to build the tests of the host core after a change of one line.
    fn touch_host(&self) -> Result<f64> {
        let build = || {
            let mut command = self.command("cargo");
            command.args(["test", "--locked", "--quiet", "--package", "coracle-host", "--no-run"]);
            command
        };
        self.time(&mut build())?;
        let source = self.clone().join("crates/coracle-host/src/host.rs");
        let mut file = OpenOptions::new().append(true).open(&source)?;
        writeln!(file, "const _: u32 = 1;").with_context(|| format!("change {}", source.display()))?;
        self.time(&mut build())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.folder);
    }
}

/// Returns crates and seconds of cargo's timing report: one line of its page is `const UNIT_DATA = [...];`.
fn crate_times(page: &str) -> Result<Vec<(String, f64)>> {
    let (_, data) = page.split_once("const UNIT_DATA = ").context("cargo's timings have no UNIT_DATA")?;
    let (data, _) = data.split_once("];").context("cargo's timings end within UNIT_DATA")?;
    let units: Vec<Value> = serde_json::from_str(&format!("{data}]")).context("read cargo's timings")?;
    let text = |unit: &Value, key: &str| unit[key].as_str().unwrap_or_default().trim().to_owned();
    let unit = |unit: &Value| {
        let name = format!("{} {} {}", text(unit, "name"), text(unit, "version"), text(unit, "target"));
        (name.trim().to_owned(), unit["duration"].as_f64().unwrap_or_default())
    };
    Ok(units.iter().map(unit).collect())
}

/// Prints the slowest rows to stderr.
fn table<S: AsRef<str>>(what: &str, mut rows: Vec<(S, f64)>) {
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    eprintln!("\n{:>8}  {what}", "seconds");
    for (name, seconds) in rows.iter().take(ROWS) {
        eprintln!("{seconds:>8.1}  {}", name.as_ref());
    }
    eprintln!();
}

/// Prints a result.
fn figure(name: &str, seconds: f64) -> Result<()> {
    let value = (seconds * 10.0).round() / 10.0;
    let line = json!({"bench": NAME, "figure": name, "value": value, "unit": "s"});
    writeln!(std::io::stdout(), "{line}").context("print a figure")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crate_times_are_read_from_cargos_page() {
        let page = "<script>\nconst UNIT_DATA = [{\"name\": \"a\", \"version\": \"1.0\", \"target\": \" bin \\\"a\\\"\", \
            \"duration\": 1.5}];\nconst X = [];";
        assert_eq!(crate_times(page).unwrap(), [("a 1.0 bin \"a\"".to_owned(), 1.5)]);
        assert!(crate_times("").is_err());
    }
}
