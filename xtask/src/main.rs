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
    /// Regenerate what is generated and committed: gRPC code, CRDs, RBAC, references.
    Codegen {
        /// Change nothing; fail when a file would change.
        #[arg(long)]
        check: bool,
    },
    /// Build the guest's kernel and initramfs; prints their directory.
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
    /// Run scenarios with the counts that promises name.
    Soak {
        /// Only these scenarios.
        names: Vec<String>,
    },
    /// Run benchmarks; figures on stdout.
    Bench {
        /// Only these benchmarks. `build` runs only when named: it takes an hour.
        names: Vec<String>,
        /// `build`: begin with an empty tool cache too (Go peers, guest kernel, images).
        #[arg(long)]
        cold_tools: bool,
        /// `build`: begin with empty caches of crates and Go modules too.
        #[arg(long)]
        cold_registry: bool,
    },
    /// Make what users install: an OCI image, a Debian package, the plugin of kubectl.
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

/// Everything that any command needs.
fn set_up() -> Result<()> {
    progress::step("setup", None, |_| setup::ensure(Purpose::Test))
}

/// Sets up, builds and becomes `coracle up`.
fn up(args: &[String]) -> Result<()> {
    if !coracle_testkit::tools::tools_dir().join("bin/kube-apiserver").exists() {
        say(
            "first run: builds coracle, etcd and Kubernetes; about 10 minutes on 2 cores. Later runs take seconds",
        );
    }
    let program = setup::ensure_and(Purpose::Up, build::product)?;
    // The product takes this process's place, so that ^C waits for its clean end.
    let error = Process::new(&program).arg("up").args(args).current_dir(root()).exec();
    Err(error).with_context(|| format!("run {}", program.display()))
}
