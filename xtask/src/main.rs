//! Developer entry points: `cargo xtask {setup,up,test,soak,lint,bench,codegen,tidy}`.

mod bench;
mod codegen;
mod fuzz;
mod guest_image;
mod kernel_elf;
mod lint;
mod setup;
mod soak;
mod system_image;
mod test;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use serde_json::Value;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Everything a developer of coracle runs")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Regenerate what is generated and committed: gRPC code, CRDs, RBAC, references.
    Codegen {
        /// Change nothing; fail when a file would change.
        #[arg(long)]
        check: bool,
    },
    /// Build the guest's kernel and initramfs; prints their folder.
    GuestImage,
    /// Install and build everything that builds, tests and `up` need.
    Setup,
    /// Set up, build, and run `coracle up` with the given arguments.
    Up {
        /// Arguments of `coracle up`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Set up and run every test.
    Test {
        /// Only these crates.
        crates: Vec<String>,
    },
    /// Run scenarios with the counts that promises name.
    Soak {
        /// Only these scenarios.
        names: Vec<String>,
    },
    /// Run benchmarks; figures on stdout.
    Bench {
        /// Only these benchmarks.
        names: Vec<String>,
    },
    /// Format, clippy, layers, generated files, links.
    Lint,
    /// Check licences, bans and sources of the dependencies.
    Deny,
    /// Check the layers of the crates and the length of files.
    Tidy,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Codegen { check } => codegen::run(check),
        Command::GuestImage => guest_image::run(),
        Command::Setup => setup::ensure(),
        Command::Up { args } => up(&args),
        Command::Test { crates } => setup::ensure().and_then(|()| test::run_all(&crates)),
        Command::Soak { names } => soak::run_all(&names),
        Command::Bench { names } => bench::run_all(&names),
        Command::Lint => lint::run_all(),
        Command::Deny => lint::deny(),
        Command::Tidy => tidy::check(),
    }
}

/// The release build of `coracle up`, in this terminal.
fn up(args: &[String]) -> Result<()> {
    setup::ensure()?;
    step("building coracle");
    run(Process::new("cargo").args(["build", "--locked", "--release", "--package", "coracle"]))?;
    let metadata = metadata()?;
    let target = metadata["target_directory"].as_str().context("target folder")?;
    run(Process::new(format!("{target}/release/coracle")).arg("up").args(args))
}

/// Says what happens next, on stderr.
fn step(what: &str) {
    eprintln!("==> {what}");
}

/// Runs a program in the repository's root and fails when it does.
fn run(command: &mut Process) -> Result<()> {
    if command.get_current_dir().is_none() {
        command.current_dir(root());
    }
    let shown = format!("{} {}", command.get_program().display(), arguments(command));
    let status = command.status().with_context(|| format!("run {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

fn arguments(command: &Process) -> String {
    let words: Vec<_> = command.get_args().map(|a| a.display().to_string()).collect();
    words.join(" ")
}

/// What cargo knows of the workspace, dependencies apart.
fn metadata() -> Result<Value> {
    let output = Process::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root())
        .output()
        .context("run cargo metadata")?;
    serde_json::from_slice(&output.stdout).context("read cargo metadata")
}

/// Name and manifest of each crate of the workspace.
fn members() -> Result<Vec<(String, String)>> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("packages")?;
    let text = |p: &Value, key: &str| p[key].as_str().unwrap_or_default().to_owned();
    Ok(packages.iter().map(|p| (text(p, "name"), text(p, "manifest_path"))).collect())
}

/// The repository's root, wherever the command was started. Asked of cargo at run time: two checkouts may share one
/// target folder, and so one program.
fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let manifest =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        Path::new(&manifest).parent().expect("xtask/ lies below the root").to_owned()
    });
    &ROOT
}
