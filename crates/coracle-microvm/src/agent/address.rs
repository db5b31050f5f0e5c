//! Where a node is reached.

/// Where an agent listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentAddress {
    /// `host:port`.
    pub address: String,
    /// The name in its certificate, when it is not the host.
    pub server_name: Option<String>,
    /// `host:port` of the host service of the same node, which is used instead.
    pub host_service: Option<String>,
}
