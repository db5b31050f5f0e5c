//! Commands that speak to a node and end.

pub(crate) mod console;
pub(crate) mod cp;
pub(crate) mod doctor;
pub(crate) mod exec;
pub(crate) mod image;
pub(crate) mod logs;
pub(crate) mod port_forward;
pub(crate) mod run;
pub(crate) mod terminal;
pub(crate) mod vm;

use std::path::Path;

use clap::CommandFactory;
use miette::{IntoDiagnostic, WrapErr};

use crate::cli::Cli;

/// Prints a completion script.
pub(crate) fn completion(shell: clap_complete::Shell) -> miette::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "coracle", &mut script);
    crate::output::write_bytes(&script)?;
    Ok(0)
}

/// Writes the Kubernetes manifests that the binary is made for.
pub(crate) fn manifests(dir: &Path) -> miette::Result<u8> {
    for (path, yaml) in coracle_microvm::manifests() {
        let path = dir.join(path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).into_diagnostic()?;
        }
        std::fs::write(&path, yaml).into_diagnostic().wrap_err_with(|| path.display().to_string())?;
    }
    Ok(0)
}
