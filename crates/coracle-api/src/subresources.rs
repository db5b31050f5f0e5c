//! The extension API: what users do with the guest of a MikromVM. Names of its group, paths and protocol.
//!
//! The API server passes requests on (Kubernetes documentation, "Kubernetes API Aggregation Layer"), so that access is a
//! matter of RBAC: `create` on `mikromvms/exec` of this group, for example.

/// API group.
pub const GROUP: &str = "subresources.coracle.dev";

/// Its version.
pub const VERSION: &str = "v1alpha1";

/// Name of the APIService that registers it.
pub const API_SERVICE: &str = "v1alpha1.subresources.coracle.dev";

/// Plural of the kind whose subresources they are.
pub const RESOURCE: &str = "mikromvms";

/// WebSocket subprotocol: binary messages carry an HTTP/2 connection with calls of `coracle.host.v1`.
pub const PROTOCOL: &str = "v1alpha1.host.coracle.dev";

/// What a user does with a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subresource {
    /// Run a process: `Exec`.
    Exec,
    /// Read and write the serial console: `Console`.
    Console,
    /// Read what the workload printed: `Logs`. Without an upgrade the answer is text, as that of `pods/log`.
    Log,
    /// Connect to ports: `PortForward`.
    PortForward,
    /// Copy files in and out: `CopyIn`, `CopyOut`.
    Copy,
    /// The VM as its node knows it: `GetVm`, `WaitVm`.
    Instance,
}

impl Subresource {
    /// All of them, by name.
    pub const ALL: [Self; 6] =
        [Self::Console, Self::Copy, Self::Exec, Self::Instance, Self::Log, Self::PortForward];

    /// Last segment of the path.
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

    /// That of a name; unknown ones have none.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|subresource| subresource.name() == name)
    }

    /// Verb that a user needs. What changes a guest, or enters it, is `create`, although a WebSocket begins with a GET.
    #[must_use]
    pub const fn verb(self) -> &'static str {
        match self {
            Self::Log | Self::Instance => "get",
            Self::Exec | Self::Console | Self::PortForward | Self::Copy => "create",
        }
    }

    /// Calls of `coracle.host.v1.Host` that it allows.
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

    /// Path of the subresource of one object.
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
