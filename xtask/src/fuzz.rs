//! Runs the fuzz targets for a minute each, guided by the coverage of our own crates. One JSON line per target.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::progress::say;
use crate::{metadata, root};

/// Name of the scenario.
pub(crate) const NAME: &str = "fuzz";
/// Maximum size of a generated input, bytes.
const INPUT_MAX: u32 = 16 << 10;

/// Fuzzes every target that has a corpus for `CORACLE_FUZZ_SECONDS` (60), from `CORACLE_SEED` (1). Continues after a target
/// that failed and fails at the end. Inputs that made a target fail are in `fuzz/crashes/<target>/`. Inputs that reached new
/// code are below the target directory, and the next run continues with them.
pub(crate) fn run_all() -> Result<()> {
    let number = |name: &str, usual: u32| {
        std::env::var(name).map_or(Ok(usual), |n| n.parse().with_context(|| format!("read {name}")))
    };
    let (seconds, seed) = (number("CORACLE_FUZZ_SECONDS", 60)?, number("CORACLE_SEED", 1)?);
    say("building the fuzz targets");
    let program = build()?;
    let mut targets = folders(&root().join("fuzz/corpus"))?;
    targets.sort();
    let mut broken = Vec::new();
    for target in targets {
        say(&format!("soak {NAME} {target}: {seconds} s, seed {seed}"));
        let line = one(&program, &target, seconds, seed)?;
        writeln!(std::io::stdout(), "{line}")?;
        if line["broken"] == true {
            broken.push(target);
        }
    }
    if broken.is_empty() { Ok(()) } else { bail!("see fuzz/crashes/ of {}", broken.join(", ")) }
}

/// Builds the program with coverage for all crates of the workspace, beside the artifacts of the tests.
fn build() -> Result<PathBuf> {
    let output = Command::new("cargo")
        .args(["build", "--locked", "--workspace", "--features", "coracle-fuzz/libfuzzer"])
        .args(["--bin", "coracle-fuzz", "--message-format", "json-render-diagnostics"])
        .env("RUSTC_WORKSPACE_WRAPPER", root().join("fuzz/rustc.sh"))
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()
        .context("run cargo build")?;
    if !output.status.success() {
        bail!("the fuzz targets do not build");
    }
    let text = String::from_utf8(output.stdout)?;
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let named = messages.filter(|m| m["target"]["name"] == "coracle-fuzz");
    let program = named.filter_map(|m| m["executable"].as_str().map(PathBuf::from)).next_back();
    program.context("cargo did not report the program")
}

fn folders(below: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(below).with_context(|| format!("read {}", below.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Runs one target; its log stays beside its results.
fn one(program: &Path, target: &str, seconds: u32, seed: u32) -> Result<Value> {
    let home = metadata()?["target_directory"].as_str().context("target directory")?.to_owned();
    let (found, log) = (Path::new(&home).join("fuzz").join(target), format!("{home}/fuzz/{target}.log"));
    let (corpus, crashes) =
        (root().join("fuzz/corpus").join(target), root().join("fuzz/crashes").join(target));
    for folder in [&found, &crashes] {
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let known = folders(&crashes)?.len();
    let mut command = Command::new(program);
    command.env("CORACLE_FUZZ", target).arg(&found).arg(&corpus).args([
        format!("-max_total_time={seconds}"),
        format!("-seed={seed}"),
        format!("-max_len={INPUT_MAX}"),
        format!("-artifact_prefix={}/", crashes.display()),
        "-timeout=10".to_owned(),
        "-rss_limit_mb=2048".to_owned(),
        "-print_final_stats=1".to_owned(),
    ]);
    // Files of an input are removed after it ran; none of them has to reach a disk.
    if Path::new("/dev/shm").is_dir() {
        command.env("TMPDIR", "/dev/shm");
    }
    let file = fs::File::create(&log).with_context(|| log.clone())?;
    let status = command.stdout(Stdio::null()).stderr(file).status().context("run the fuzz target")?;
    let said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let broken = !status.success() || folders(&crashes)?.len() > known;
    if folders(&crashes)?.is_empty() {
        fs::remove_dir(&crashes)?;
    }
    Ok(json!({
        "soak": NAME, "target": target, "seconds": seconds, "seed": seed, "runs": after(&said, "number_of_executed_units:"),
        "edges": after(&said, "cov:"), "peak_mib": after(&said, "peak_rss_mb:"), "broken": broken, "ended": status.to_string(),
        "log": log,
    }))
}

/// Returns the number after the last occurrence of a word.
fn after(text: &str, word: &str) -> Option<u64> {
    let (_, behind) = text.rsplit_once(word)?;
    behind.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzz_statistics_are_read_by_key() {
        let log = "#2 INITED cov: 12 ft: 13\n#9 DONE cov: 40 ft: 41\nstat::number_of_executed_units: 900\n";
        assert_eq!((after(log, "cov:"), after(log, "number_of_executed_units:")), (Some(40), Some(900)));
        assert_eq!(after(log, "peak_rss_mb:"), None);
    }
}
