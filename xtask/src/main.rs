//! Developer entry points: `cargo xtask {setup,up,test,soak,lint,bench,codegen,tidy}`.

mod codegen;

use std::path::Path;

use anyhow::Result;
use clap::{Parser, Subcommand};

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
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Codegen { check } => codegen::run(check),
    }
}

/// The repository's root, wherever the command was started.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ lies below the root")
}
