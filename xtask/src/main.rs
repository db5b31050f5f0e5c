//! Developer entry points: `cargo xtask {setup,up,test,soak,lint,bench,package,codegen,tidy}`.

mod bench;
mod build;
mod codegen;
mod fuzz;
mod guest_image;
mod kernel_elf;
mod lint;
mod package;
mod progress;
mod setup;
mod soak;
mod test;
mod tidy;
mod workspace;

use std::os::unix::process::CommandExt;
use std::process::Command as Process;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use progress::say;
use setup::Purpose;
use workspace::{members, metadata, root, run};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Everything a developer of coracle runs")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Regenerate committed files: gRPC code, CRDs, RBAC, references.
    Codegen {
        /// Change no file; fail if one would change.
        #[arg(long)]
        check: bool,
    },
    /// Build the kernel and initramfs of guests; prints their directory.
    GuestImage,
    /// Install and build everything that tests and `up` need.
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
    /// Run scenarios with the repeat counts that the documentation promises.
    Soak {
        /// Only these scenarios.
        names: Vec<String>,
    },
    /// Run benchmarks; results on stdout.
    Bench {
        /// Only these benchmarks. `build` runs only when named: it takes an hour.
        names: Vec<String>,
        /// `build`: also begin with an empty tool cache (Go peers, guest kernel, images).
        #[arg(long)]
        cold_tools: bool,
        /// `build`: also begin with empty caches of crates and Go modules.
        #[arg(long)]
        cold_registry: bool,
    },
    /// Build packages for users: an OCI image, a Debian package, the kubectl plugin.
    Package(package::Options),
    /// Format, clippy, layers, generated files, links.
    Lint,
    /// Check licences, bans and sources of the dependencies.
    Deny,
    /// Check the layers of the crates and the length of files.
    Tidy,
}

fn main() -> Result<()> {
    progress::begin();
    match Cli::parse().command {
        Command::Codegen { check } => codegen::run(check),
        Command::GuestImage => guest_image::run(),
        Command::Setup => set_up(),
        Command::Up { args } => up(&args),
        Command::Test { crates } => set_up().and_then(|()| test::run_all(&crates)),
        Command::Soak { names } => soak::run_all(&names),
        Command::Bench { names, cold_tools, cold_registry } => {
            bench::run_all(&names, bench::Cold { tools: cold_tools, registry: cold_registry })
        }
        Command::Package(options) => package::run(&options),
        Command::Lint => lint::run_all(),
        Command::Deny => lint::deny(),
        Command::Tidy => tidy::check(),
    }
}

/// Sets up what any command needs.
fn set_up() -> Result<()> {
    progress::step("setup", None, |_| setup::ensure(Purpose::Test))
}

/// Sets up, builds, and replaces this process with `coracle up`.
fn up(args: &[String]) -> Result<()> {
    if !coracle_testkit::tools::tools_dir().join("bin/kube-apiserver").exists() {
        say(
            "first run: builds coracle, etcd and Kubernetes; about 10 minutes on 2 cores. Later runs take seconds",
        );
    }
    let program = setup::ensure_and(Purpose::Up, build::product)?;
    // exec(2), so that ^C reaches `coracle up` directly and the shell waits for its clean end.
    let error = Process::new(&program).arg("up").args(args).current_dir(root()).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
}
