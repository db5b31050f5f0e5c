//! Commands that call a node and end.

pub mod agentpool;
mod archive;
pub mod console;
pub mod cp;
pub mod disk;
pub mod epoch;
pub mod events;
pub mod exec;
pub mod explain;
pub mod image;
mod image_build;
mod listen;
pub mod logs;
pub mod port_forward;
pub mod power;
pub mod run;
pub mod snapshot;
pub mod template;
pub mod terminal;
pub mod transfer;
pub mod vm;
pub mod vnc;
pub mod volume;

use clap::CommandFactory;

use crate::cli::{Cli, CrdCommand};
use crate::error::Failure;

/// Prints a completion script.
pub fn completion(shell: clap_complete::Shell) -> miette::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "coracle", &mut script);
    crate::output::write_bytes(&script)?;
    Ok(0)
}

/// Prints the custom resource definitions; the BidNode definition includes additional instance types.
pub fn crd(command: CrdCommand) -> miette::Result<u8> {
    let CrdCommand::Print { add } = command;
    let mut documents = Vec::new();
    for crd in coracle_api::crds() {
        let is_bidnode = crd.spec.names.kind == "BidNode";
        let crd = if is_bidnode { coracle_api::bidnode::crd_with(&add) } else { crd };
        let text = serde_saphyr::to_string(&crd).map_err(|e| Failure::new("COR-CLI-004", e.to_string()))?;
        documents.push(text);
    }
    crate::output::write(&documents.join("---\n"))?;
    Ok(0)
}
