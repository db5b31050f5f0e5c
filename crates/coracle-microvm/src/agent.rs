//! Client of nodes: one connection to each node, a deadline on each call, one error type.
//!
//! ```text
//!  Connections ─ one per node ─▶ Dialer ─ TCP, TLS ─▶ NodeClient
//!                                                       ├─ HostService    coracle.host.v1, our nodes
//!                                                       └─ AgentService   firecracker.v1, all others
//! ```

mod address;
mod agent_service;
mod call;
mod client;
mod connections;
mod dialer;
mod error;
mod fence;
mod host_channels;
mod host_service;
mod node_snapshots;
mod snapshot_client;
mod snapshots;
mod stream;
mod vm_info;

pub use address::AgentAddress;
pub use call::Deadlines;
pub(crate) use client::NodeClient;
pub(crate) use connections::Connections;
pub use dialer::AgentTls;
pub(crate) use dialer::Dialer;
pub use error::{AgentError, Origin};
pub use host_channels::{HostChannels, NoHostService};
pub use node_snapshots::NodeSnapshots;
pub use snapshot_client::SavedSnapshot;
pub(crate) use snapshot_client::SnapshotClient;
pub(crate) use snapshots::copy_snapshot;
pub use stream::{ByteStream, Connect, TcpConnect};
pub use vm_info::{Fence, State, VmInfo};
