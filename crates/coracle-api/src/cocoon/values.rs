//! Values of fields and annotations.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Defines an enumeration with one text for each value, the same in manifests and in annotations.
macro_rules! texts {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_doc])* #[serde(rename = $text)] $value,)+
        }

        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$value),+];

            /// Returns the value in manifests and annotations.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }

            /// Parses a value of an annotation. Case and surrounding space are ignored.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                let text = text.trim();
                Self::ALL.iter().copied().find(|value| value.as_str().eq_ignore_ascii_case(text))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

texts! {
    /// Creation of a VM.
    Mode {
        /// Restored from a snapshot.
        #[default]
        Clone = "clone",
        /// Created from an image.
        Run = "run",
        /// Existing VM.
        Static = "static",
    }
}

texts! {
    /// Operating system of a guest.
    Os {
        /// Linux.
        #[default]
        Linux = "linux",
        /// Windows.
        Windows = "windows",
        /// Android.
        Android = "android",
        /// macOS.
        Macos = "macos",
    }
}

texts! {
    /// Which VMs are saved in the registry when their pods are deleted.
    SnapshotPolicy {
        /// All VMs.
        #[default]
        Always = "always",
        /// VMs of main agents.
        MainOnly = "main-only",
        /// No VM.
        Never = "never",
    }
}

texts! {
    /// Hypervisor of a VM.
    Backend {
        /// Cloud Hypervisor.
        #[default]
        CloudHypervisor = "cloud-hypervisor",
        /// Firecracker.
        Firecracker = "firecracker",
    }
}

texts! {
    /// Protocol by which users reach a guest.
    ConnType {
        /// Secure Shell.
        #[default]
        Ssh = "ssh",
        /// Remote Desktop.
        Rdp = "rdp",
        /// VNC.
        Vnc = "vnc",
        /// Android Debug Bridge.
        Adb = "adb",
    }
}

texts! {
    /// Treatment of the pods of a suspended set.
    HibernatePolicy {
        /// The pods stay.
        #[default]
        Retain = "retain",
        /// The pods are deleted once their VMs are saved.
        Release = "release",
    }
}

texts! {
    /// Role of a pod in its set.
    Role {
        /// Main agent, slot 0.
        #[default]
        Main = "main",
        /// Sub-agent, a slot above 0.
        SubAgent = "sub-agent",
        /// Toolbox, without a slot.
        Toolbox = "toolbox",
    }
}

texts! {
    /// State of a VM that its node reports.
    LifecycleState {
        /// The VM is being created.
        #[default]
        Creating = "creating",
        /// The VM runs.
        Ready = "ready",
        /// The VM is being saved.
        Hibernating = "hibernating",
        /// The VM was saved, and removed from the node.
        Hibernated = "hibernated",
        /// The VM could not be created, saved or restored.
        Failed = "failed",
    }
}

impl SnapshotPolicy {
    /// True when the VM in `slot` is saved at deletion. `None`: a VM without a slot.
    #[must_use]
    pub fn saves(self, slot: Option<u32>) -> bool {
        match self {
            Self::Always => true,
            Self::MainOnly => slot == Some(0),
            Self::Never => false,
        }
    }
}

impl ConnType {
    /// Returns the protocol by which users reach a guest: the requested one, else VNC when the guest has a VNC port, else by
    /// operating system.
    #[must_use]
    pub fn infer(asked: Option<Self>, has_vnc: bool, os: Os) -> Self {
        match (asked, has_vnc, os) {
            (Some(asked), _, _) => asked,
            (None, true, _) => Self::Vnc,
            (None, false, Os::Android) => Self::Adb,
            (None, false, Os::Windows) => Self::Rdp,
            (None, false, Os::Linux | Os::Macos) => Self::Ssh,
        }
    }
}

impl LifecycleState {
    /// True for states that the node leaves only when the pod changes.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Ready | Self::Hibernated | Self::Failed => true,
            Self::Creating | Self::Hibernating => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_in_any_case() {
        assert_eq!(Mode::parse(" Static "), Some(Mode::Static));
        assert_eq!(Backend::parse("Cloud-Hypervisor"), Some(Backend::CloudHypervisor));
        assert_eq!(Mode::parse("cloen"), None);
        for state in LifecycleState::ALL {
            assert_eq!(LifecycleState::parse(state.as_str()), Some(*state));
        }
    }

    #[test]
    fn snapshot_policy_table() {
        use SnapshotPolicy::{Always, MainOnly, Never};
        for (policy, slot, want) in [
            (Always, None, true),
            (Always, Some(3), true),
            (MainOnly, Some(0), true),
            (MainOnly, Some(1), false),
            (MainOnly, None, false),
            (Never, Some(0), false),
        ] {
            assert_eq!(policy.saves(slot), want, "{policy} {slot:?}");
        }
    }

    #[test]
    fn connection_type_table() {
        for (asked, has_vnc, os, want) in [
            (Some(ConnType::Ssh), true, Os::Windows, ConnType::Ssh),
            (None, true, Os::Android, ConnType::Vnc),
            (None, false, Os::Android, ConnType::Adb),
            (None, false, Os::Windows, ConnType::Rdp),
            (None, false, Os::Linux, ConnType::Ssh),
        ] {
            assert_eq!(ConnType::infer(asked, has_vnc, os), want, "{asked:?} {has_vnc} {os}");
        }
    }
}
