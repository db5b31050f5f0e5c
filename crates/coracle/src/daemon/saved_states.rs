//! Registry of a local system, which keeps the saved states of pods that are VMs.

use std::net::Ipv4Addr;
use std::path::Path;

use miette::{IntoDiagnostic as _, WrapErr as _};

use super::plane::{self, Program};
use super::supervise::Supervisor;

/// URL of the registry, and a token that may write to it.
#[derive(Clone)]
pub(super) struct SavedStates {
    url: String,
    token: String,
}

impl SavedStates {
    /// Starts the registry on a port of the loopback interface, and waits until it listens.
    ///
    /// # Errors
    /// The registry does not start.
    pub(super) async fn start(state: &Path, children: &mut Supervisor) -> miette::Result<Self> {
        let [port] = plane::free_ports([Ipv4Addr::LOCALHOST])?;
        let at = format!("127.0.0.1:{port}");
        // The registry contains memory of guests: other users of this machine must not read it without the token.
        let state_dir = state.display().to_string();
        let args = ["registry", "serve", "--state", &state_dir, "--listen", &at, "--private-reads"];
        children.start(Program {
            name: "registry",
            path: std::env::current_exe().into_diagnostic()?,
            args: args.map(str::to_owned).into(),
            env: vec![],
        });
        plane::wait_listening("registry", port).await?;
        let file = state.join("registry/token");
        let token = tokio::fs::read_to_string(&file)
            .await
            .into_diagnostic()
            .wrap_err_with(|| format!("read {}", file.display()))?;
        Ok(Self { url: format!("http://{at}"), token: token.trim().to_owned() })
    }

    /// Configures a node to keep states in the registry.
    pub(super) fn configure_node(&self, node: &mut Program) {
        node.env.push(("CORACLE_NODE_VIRTUAL_NODE_REGISTRY", self.url.clone()));
        node.env.push(("CORACLE_NODE_VIRTUAL_NODE_REGISTRY_TOKEN", self.token.clone()));
    }

    /// Configures the CocoonSet controllers to see and remove states.
    pub(super) fn configure_operator(&self, operator: &mut Program) {
        operator.env.push(("CORACLE_OPERATOR_COCOON_REGISTRY", self.url.clone()));
        operator.env.push(("CORACLE_OPERATOR_COCOON_REGISTRY_TOKEN", self.token.clone()));
    }
}
