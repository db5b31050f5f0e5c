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
pub(crate) mod market;
pub(crate) mod port_forward;
pub(crate) mod power;
pub(crate) mod run;
pub(crate) mod snapshot;
pub(crate) mod template;
pub(crate) mod terminal;
pub(crate) mod vm;
pub(crate) mod volume;

use clap::CommandFactory;

use crate::cli::{Cli, CrdCommand};
use crate::error::Failure;

/// Prints a completion script.
pub(crate) fn completion(shell: clap_complete::Shell) -> miette::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "coracle", &mut script);
    crate::output::write_bytes(&script)?;
    Ok(0)
}

/// Prints the custom resource definitions, BidNode's with more instance types.
pub(crate) fn crd(command: CrdCommand) -> miette::Result<u8> {
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
