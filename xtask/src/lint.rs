//! Format, clippy, layers, generated files, links, licences.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use coracle_testkit::tools::tools_dir;

use crate::progress::{self, step};
use crate::{codegen, root, run, tidy};

/// Version of cargo-deny that is built into the tool cache.
const CARGO_DENY: &str = "0.20.2";

/// Runs every check, the quick ones first, and stops at the first that fails.
pub(crate) fn run_all() -> Result<()> {
    step("checking format", None, |_| run(Command::new("cargo").args(["fmt", "--all", "--check"])))?;
    step("checking layers and file lengths", None, |_| tidy::check())?;
    step("checking links in documents", None, |_| links())?;
    step("checking generated files", None, |_| codegen::run(true))?;
    step("checking licences, bans and sources of dependencies", None, |_| deny())?;
    clippy()
}

/// Runs clippy on everything, including the fuzzer, which no other command builds.
fn clippy() -> Result<()> {
    let mut command = Command::new("cargo");
    command.args([
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--features",
        "coracle-fuzz/libfuzzer",
    ]);
    command.args(["--message-format", "human", "--", "-D", "warnings"]);
    step("clippy", Some(Duration::from_secs(300)), |meter| {
        meter.expect(progress::packages(&["--workspace"])?);
        progress::cargo(&mut command, meter).map(|_| ())
    })
}

/// Checks that every relative link in a Markdown file leads to a file of the repository.
fn links() -> Result<()> {
    let mut broken = Vec::new();
    let output = Command::new("git").args(["ls-files", "*.md"]).current_dir(root()).output()?;
    for file in String::from_utf8(output.stdout)?.lines() {
        let text = fs::read_to_string(root().join(file)).with_context(|| file.to_owned())?;
        let dir = Path::new(file).parent().unwrap_or(Path::new(""));
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = target.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") {
                continue;
            }
            if !root().join(dir).join(path).exists() {
                broken.push(format!("{file}: {target}"));
            }
        }
    }
    if broken.is_empty() { Ok(()) } else { bail!("broken links:\n  {}", broken.join("\n  ")) }
}

/// Checks licences, bans and sources of all dependencies. Builds cargo-deny if it is missing.
pub(crate) fn deny() -> Result<()> {
    let home = tools_dir().join(format!("cargo-deny-{CARGO_DENY}"));
    let program = home.join("bin/cargo-deny");
    if !program.is_file() {
        let mut install = Command::new("cargo");
        // Without optimisation: cargo-deny reads only one lock file, but takes minutes to optimise.
        install.args(["install", "--debug", "--locked", "cargo-deny", "--version", CARGO_DENY, "--root"]);
        install.arg(&home).env("CARGO_PROFILE_DEV_DEBUG", "false");
        step("building cargo-deny", Some(Duration::from_secs(120)), |meter| {
            progress::cargo(&mut install, meter).map(|_| ())
        })?;
    }
    run(Command::new(program).current_dir(root()).args([
        "--all-features",
        "check",
        "bans",
        "licenses",
        "sources",
    ]))
}
