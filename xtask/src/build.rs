//! Builds of the whole workspace: product, tests, and programs that only one command needs.
//!
//! Every build selects the whole workspace and then one program of it. A crate that is selected alone has other features of
//! shared dependencies, and cargo would build them a second time.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::progress::{self, cargo, step};

/// Builds `coracle` with the profile of the tests and of `up`, and returns its path.
pub(crate) fn product() -> Result<PathBuf> {
    program("coracle", 300)
}

/// Builds the binary `name` of any crate and returns its path. `usual` is the duration of a cold build, seconds.
pub(crate) fn program(name: &str, usual: u64) -> Result<PathBuf> {
    let mut build = Command::new("cargo");
    build.args(["build", "--locked", "--workspace", "--bin", name]);
    let messages = messages(&format!("building {name}"), usual, &mut build)?;
    program_of(name, &messages)
}

fn program_of(name: &str, messages: &[Value]) -> Result<PathBuf> {
    let named = messages.iter().filter(|m| m["target"]["name"] == name && m["target"]["kind"][0] == "bin");
    let path = named.filter_map(|m| m["executable"].as_str()).next_back();
    path.map(PathBuf::from).with_context(|| format!("cargo did not report the binary {name}"))
}

/// Profile of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Profile {
    /// Profile for users.
    Release,
    /// Profile of tests.
    Dev,
}

/// Builds `coracle` for packages and returns its path.
pub(crate) fn packaged(profile: Profile) -> Result<PathBuf> {
    match profile {
        Profile::Dev => product(),
        Profile::Release => {
            let mut build = Command::new("cargo");
            build.args(["build", "--locked", "--release", "--package", "coracle"]);
            program_of("coracle", &messages("building coracle for release", 700, &mut build)?)
        }
    }
}

/// Builds every test and returns cargo's messages, in their order.
pub(crate) fn tests() -> Result<Vec<Value>> {
    let mut build = Command::new("cargo");
    build.args(["test", "--locked", "--workspace", "--no-run"]);
    messages("building every test", 900, &mut build)
}

fn messages(name: &str, usual: u64, build: &mut Command) -> Result<Vec<Value>> {
    build.args(["--message-format", "json-render-diagnostics"]);
    if std::env::var_os(progress::TIMINGS).is_some() {
        build.arg("--timings");
    }
    let printed = step(name, Some(Duration::from_secs(usual)), |meter| {
        meter.expect(progress::packages(&["--workspace"])?);
        cargo(build, meter)
    })?;
    printed.lines().map(|line| serde_json::from_str(line).context("read a message of cargo")).collect()
}
