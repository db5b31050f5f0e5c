//! Format, clippy, layers, generated files, links, licences.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use coracle_testkit::tools::tools_dir;

use crate::{codegen, root, run, step, tidy};

/// The version that is built into the tool cache.
const CARGO_DENY: &str = "0.20.2";

/// Runs every check and stops at the first that fails.
pub(crate) fn run_all() -> Result<()> {
    step("format");
    run(Command::new("cargo").args(["fmt", "--all", "--check"]))?;
    step("layers and file lengths");
    tidy::check()?;
    step("generated files");
    codegen::run(true)?;
    step("links in documents");
    links()?;
    step("licences, bans and sources of dependencies");
    deny()?;
    step("clippy");
    run(Command::new("cargo").args([
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        // The fuzzer itself, which nothing else builds.
        "--features",
        "coracle-fuzz/libfuzzer",
        "--",
        "-D",
        "warnings",
    ]))
}

/// Every relative link in a Markdown file leads to a file of the repository.
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

/// Licences, bans and sources of all dependencies. Builds cargo-deny when it is not there.
pub(crate) fn deny() -> Result<()> {
    let home = tools_dir().join(format!("cargo-deny-{CARGO_DENY}"));
    let program = home.join("bin/cargo-deny");
    if !program.is_file() {
        step("building cargo-deny (minutes, once)");
        run(Command::new("cargo")
            .args(["install", "--quiet", "--locked", "cargo-deny", "--version", CARGO_DENY, "--root"])
            .arg(&home))?;
    }
    run(Command::new(program).current_dir(root()).args([
        "--all-features",
        "check",
        "bans",
        "licenses",
        "sources",
    ]))
}
