//! Extension API, by which users operate on the guest of a MikromVM: names of its group, paths and protocol.
//!
//! The API server proxies requests to the extension API (Kubernetes documentation, "Kubernetes API Aggregation Layer"), so that
//! RBAC controls access: `create` on `mikromvms/exec` of this group, for example.

/// API group.
pub const GROUP: &str = "subresources.coracle.dev";

/// Version of the API group.
pub const VERSION: &str = "v1alpha1";

/// Name of the APIService that registers the group.
pub const API_SERVICE: &str = "v1alpha1.subresources.coracle.dev";

/// Plural of the kind that the subresources belong to.
pub const RESOURCE: &str = "mikromvms";

/// WebSocket subprotocol: binary messages carry an HTTP/2 connection with calls of `coracle.host.v1`.
pub const PROTOCOL: &str = "v1alpha1.host.coracle.dev";

/// Operation of a user on a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subresource {
    /// Runs a process: `Exec`.
    Exec,
    /// Reads and writes the serial console: `Console`.
    Console,
    /// Reads the output of the workload: `Logs`. Without an upgrade the response is text, like that of `pods/log`.
    Log,
    /// Connects to ports: `PortForward`.
    PortForward,
    /// Copies files in and out: `CopyIn`, `CopyOut`.
    Copy,
    /// Returns the VM as its node reports it: `GetVm`, `WaitVm`.
    Instance,
}

impl Subresource {
    /// All subresources, by name.
    pub const ALL: [Self; 6] =
        [Self::Console, Self::Copy, Self::Exec, Self::Instance, Self::Log, Self::PortForward];

    /// Returns the last segment of the path.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Console => "console",
            Self::Log => "log",
            Self::PortForward => "portforward",
            Self::Copy => "cp",
            Self::Instance => "instance",
        }
    }

    /// Returns the subresource with that name; `None` for an unknown name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|subresource| subresource.name() == name)
    }

    /// Returns the RBAC verb that a user needs. Subresources that change or enter a guest need `create`, although a WebSocket
    /// begins with a GET.
    #[must_use]
    pub const fn verb(self) -> &'static str {
        match self {
            Self::Log | Self::Instance => "get",
            Self::Exec | Self::Console | Self::PortForward | Self::Copy => "create",
        }
    }

    /// Returns the calls of `coracle.host.v1.Host` that the subresource allows.
    #[must_use]
    pub const fn calls(self) -> &'static [&'static str] {
        match self {
            Self::Exec => &["Exec"],
            Self::Console => &["Console"],
            Self::Log => &["Logs"],
            Self::PortForward => &["PortForward"],
            Self::Copy => &["CopyIn", "CopyOut"],
            Self::Instance => &["GetVm", "WaitVm"],
        }
    }

    /// Returns the path of the subresource of one object.
    #[must_use]
    pub fn path(self, namespace: &str, name: &str) -> String {
        format!("/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{RESOURCE}/{name}/{}", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for one in Subresource::ALL {
            assert_eq!(Subresource::of_name(one.name()), Some(one));
        }
        assert_eq!(API_SERVICE, format!("{VERSION}.{GROUP}"));
        assert_eq!(Subresource::of_name("status"), None);
        assert_eq!(
            Subresource::Exec.path("team", "web"),
            "/apis/subresources.coracle.dev/v1alpha1/namespaces/team/mikromvms/web/exec"
        );
    }
}
