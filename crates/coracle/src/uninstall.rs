//! `coracle uninstall --cluster`.

use std::time::Duration;

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_cli::cli::{Global, UninstallArgs};
use coracle_cli::error::{Failure, exit};
use coracle_install::uninstall::{Options, Refusal, UninstallError, uninstall};
use miette::IntoDiagnostic as _;

/// Removes the installation, and prints a line for each step to stderr.
pub(crate) async fn run(global: &Global, args: UninstallArgs) -> miette::Result<u8> {
    let client = coracle_cli::connect(global).await?;
    let options = Options {
        namespace: global.namespace.clone().unwrap_or_else(|| SYSTEM_NAMESPACE.to_owned()),
        delete_objects: args.delete_objects,
        abandon: args.abandon,
        keep_workloads: args.keep_workloads,
    };
    let limit = Duration::try_from(args.timeout).into_diagnostic()?;
    let say = |step: &str| eprintln!("{step}");
    uninstall(&client, &options, limit, say).await.map_err(failure)?;
    Ok(0)
}

fn failure(error: UninstallError) -> Failure {
    let message = error.to_string();
    match error {
        UninstallError::Refused(Refusal::HasObjects { .. }) => Failure::new("COR-CLU-001", message)
            .help("delete them, or add --delete-objects, which ends their VMs")
            .exit(exit::CONFLICT),
        UninstallError::Refused(_) => Failure::new("COR-CLU-002", message)
            .help("see why: coracle doctor --cluster; --abandon removes the objects and leaves VMs on their nodes")
            .exit(exit::CONFLICT),
        UninstallError::Late { .. } => Failure::new("COR-CLU-003", message)
            .help("see what holds it: kubectl get -o yaml; then run the command again")
            .exit(exit::TIMED_OUT),
        error => {
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            Failure::new("COR-API-001", format!("{message}: {cause}"))
        }
    }
}
