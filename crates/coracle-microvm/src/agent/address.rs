//! Addresses of a node.

/// Address of an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentAddress {
    /// `host:port` of the agent service.
    pub address: String,
    /// Server name in the agent's certificate, when it differs from the host.
    pub server_name: Option<String>,
    /// `host:port` of the host service of the same node, which is preferred to the agent service.
    pub host_service: Option<String>,
}
