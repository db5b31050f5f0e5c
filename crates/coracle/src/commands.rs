//! Commands that speak to a node and end.

pub(crate) mod agentpool;
mod archive;
pub(crate) mod console;
pub(crate) mod cp;
pub(crate) mod disk;
pub(crate) mod doctor;
pub(crate) mod epoch;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod explain;
pub(crate) mod image;
pub(crate) mod logs;
pub(crate) mod port_forward;
pub(crate) mod power;
pub(crate) mod run;
pub(crate) mod snapshot;
pub(crate) mod template;
pub(crate) mod terminal;
pub(crate) mod vm;

use clap::CommandFactory;

use crate::cli::Cli;

/// Prints a completion script.
pub(crate) fn completion(shell: clap_complete::Shell) -> miette::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "coracle", &mut script);
    crate::output::write_bytes(&script)?;
    Ok(0)
}
