//! Errors of vCenter, and their classes.

use std::{collections::BTreeMap, fmt};

/// Fault of vCenter: its type and its text fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Type of the fault, such as `DuplicateName`.
    pub kind: String,
    /// Localized message; empty if vCenter sent none.
    pub message: String,
    /// Fields of the fault that hold text, by name.
    pub fields: BTreeMap<String, String>,
}

impl Fault {
    /// Creates a fault of the type `kind`, without message and fields.
    #[must_use]
    pub fn of(kind: &str) -> Self {
        Self { kind: kind.to_owned(), ..Self::default() }
    }
}

impl Fault {
    /// Whether vCenter refused to create a VM because it does not choose a host itself, for example where DRS is off.
    #[must_use]
    pub fn asks_for_host(&self) -> bool {
        let property = self.fields.get("invalidProperty");
        self.kind == "InvalidArgument" && property.is_none_or(|p| p.contains("host"))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind)?;
        for (name, value) in &self.fields {
            write!(f, " {name}={value}")?;
        }
        // The simulator repeats the type as its message.
        if !self.message.is_empty() && !self.message.contains(&self.kind) {
            write!(f, ": {}", self.message)?;
        }
        Ok(())
    }
}

/// Class of an error, which determines when to retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultClass {
    /// The user is refused. Wait long before a retry: vCenter could lock the account.
    Auth,
    /// The session or the connection was lost: log in again.
    Session,
    /// The request can never succeed as it is.
    Config,
    /// Not enough capacity at present.
    Capacity,
    /// Another client changed the object: observe again.
    Race,
    /// The object no longer exists.
    Gone,
    /// Any other error.
    Other,
}

/// Error of a vCenter call. Messages hold neither passwords nor tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VsphereError {
    /// The server could not be reached, or the connection broke.
    #[error("{operation} at {server}")]
    Transport {
        /// Name of the operation.
        operation: String,
        /// Host and port.
        server: String,
        /// Cause, without its URL, which may hold a token.
        source: Box<reqwest::Error>,
    },
    /// The HTTP status was not the expected one.
    #[error("{operation}: HTTP status {status}")]
    Status {
        /// Name of the operation.
        operation: String,
        /// HTTP status code.
        status: u16,
    },
    /// The server answered with a fault, or a task ended in one.
    #[error("{operation}: {fault}")]
    Fault {
        /// Operation and object.
        operation: String,
        /// Fault of the answer or of the task.
        fault: Fault,
    },
    /// The answer cannot be parsed.
    #[error("{operation}: {what}")]
    Protocol {
        /// Name of the operation.
        operation: String,
        /// Why the answer cannot be parsed.
        what: String,
    },
    /// The inventory has no object of a name in the specification.
    #[error("{field}: no {kind} {name:?}")]
    NoSuchName {
        /// Field of the specification.
        field: &'static str,
        /// Kind of the object that was searched for.
        kind: &'static str,
        /// Name that was not found.
        name: String,
    },
    /// Several objects of the inventory have the name.
    #[error("{field}: {name:?} names more than one: {}", .candidates.join(", "))]
    Ambiguous {
        /// Field of the specification.
        field: &'static str,
        /// Name that is ambiguous.
        name: String,
        /// Ids of the objects that have the name.
        candidates: Vec<String>,
    },
    /// vSphere does not support a value of the specification.
    #[error("{field}: {value:?} is not one of {allowed}")]
    Unsupported {
        /// Field of the specification.
        field: &'static str,
        /// Unsupported value.
        value: String,
        /// Valid values.
        allowed: &'static str,
    },
    /// No datastore has enough space for the VM.
    #[error("no datastore of {pod} is accessible and has {needed_mib} MiB free")]
    NoSpace {
        /// Name of the datastore cluster.
        pod: String,
        /// Needed space in MiB.
        needed_mib: u64,
    },
    /// A recent login was refused, so no other login was attempted.
    #[error("login at {server} was refused; it is tried again after a while or when the Secret changes")]
    LoginHeld {
        /// Host and port.
        server: String,
    },
    /// TLS could not be set up from the credentials.
    #[error("set up TLS for {server}: {what}")]
    Tls {
        /// Host and port.
        server: String,
        /// Why the setup failed.
        what: String,
    },
    /// The task still runs after the longest wait. The task continues and can be awaited again.
    #[error("task {task} still runs after {seconds} s ({state})")]
    TaskRuns {
        /// Id of the task.
        task: String,
        /// Seconds waited.
        seconds: u64,
        /// State and progress of the task.
        state: String,
    },
    /// The user may not read a property.
    #[error("read {property} of {object}: {fault}")]
    Unreadable {
        /// Type and id of the object.
        object: String,
        /// Name of the property.
        property: String,
        /// Fault that vCenter reported for the property.
        fault: Fault,
    },
    /// The tagging service refused a request.
    #[error("{operation}: {kind}: {message}")]
    Tagging {
        /// Name of the operation.
        operation: String,
        /// Type of the error, such as `INVALID_ARGUMENT`.
        kind: String,
        /// Message of the service.
        message: String,
    },
    /// The client was closed.
    #[error("the session was closed")]
    Closed,
}

impl VsphereError {
    /// Returns the class of the error.
    #[must_use]
    pub fn class(&self) -> FaultClass {
        match self {
            Self::Transport { source, .. } if is_tls(source.as_ref()) => FaultClass::Config,
            Self::Transport { .. } | Self::Closed => FaultClass::Session,
            Self::Status { status: 401 | 403, .. } | Self::LoginHeld { .. } => FaultClass::Auth,
            Self::Status { status: 507, .. } | Self::NoSpace { .. } => FaultClass::Capacity,
            Self::Status { status: 404, .. } => FaultClass::Gone,
            Self::Status { .. } => FaultClass::Session,
            Self::Fault { fault, .. } | Self::Unreadable { fault, .. } => class_of(&fault.kind),
            Self::NoSuchName { .. }
            | Self::Ambiguous { .. }
            | Self::Unsupported { .. }
            | Self::Tagging { .. }
            | Self::Tls { .. } => FaultClass::Config,
            Self::Protocol { .. } | Self::TaskRuns { .. } => FaultClass::Other,
        }
    }

    /// Type of the fault, if the error is a fault.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        match self {
            Self::Fault { fault, .. } => Some(&fault.kind),
            _ => None,
        }
    }

    /// Creates the error of a task that ended in `fault`.
    #[must_use]
    pub fn task(operation: impl Into<String>, fault: Fault) -> Self {
        Self::Fault { operation: operation.into(), fault }
    }
}

/// Whether TLS failed although the server was reached, for example because its certificate was refused.
fn is_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    error.is::<rustls::Error>()
        || wrapped.is_some_and(|inner| is_tls(inner))
        || error.source().is_some_and(is_tls)
}

/// Class of a fault type. The name of each subtype of `InsufficientResourcesFault` says which resource is insufficient.
fn class_of(kind: &str) -> FaultClass {
    match kind {
        "InvalidLogin" | "NoPermission" | "InvalidLocale" => FaultClass::Auth,
        "NotAuthenticated" | "HostNotConnected" | "HostCommunication" => FaultClass::Session,
        "InvalidArgument"
        | "InvalidDeviceSpec"
        | "InvalidDeviceBacking"
        | "NotSupported"
        | "InvalidName"
        | "InvalidDatastore"
        | "DatacenterMismatch"
        | "RestrictedVersion"
        | "InvalidVmConfig"
        | "GenericVmConfigFault"
        | "MethodNotFound"
        | "InvalidRequest" => FaultClass::Config,
        "NoDiskSpace" | "OutOfBounds" => FaultClass::Capacity,
        kind if kind.starts_with("Insufficient") => FaultClass::Capacity,
        "DuplicateName" | "FileAlreadyExists" | "AlreadyExists" | "InvalidPowerState" | "InvalidState"
        | "ConcurrentAccess" | "TaskInProgress" | "ResourceInUse" | "FileLocked" => FaultClass::Race,
        "ManagedObjectNotFound" | "FileNotFound" | "NotFound" => FaultClass::Gone,
        _ => FaultClass::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_class_table() {
        use FaultClass::*;
        for (kind, want) in [
            ("InvalidLogin", Auth),
            ("NoPermission", Auth),
            ("NotAuthenticated", Session),
            ("InvalidArgument", Config),
            ("InvalidDeviceSpec", Config),
            ("NotSupported", Config),
            ("InsufficientResourcesFault", Capacity),
            ("InsufficientMemoryResourcesFault", Capacity),
            ("NoDiskSpace", Capacity),
            ("InsufficientStorageSpace", Capacity),
            ("DuplicateName", Race),
            ("FileAlreadyExists", Race),
            ("InvalidPowerState", Race),
            ("ConcurrentAccess", Race),
            ("TaskInProgress", Race),
            ("ResourceInUse", Race),
            ("InvalidDatastore", Config),
            ("DatacenterMismatch", Config),
            ("RestrictedVersion", Config),
            ("ManagedObjectNotFound", Gone),
            ("FileNotFound", Gone),
            ("SomethingNew", Other),
        ] {
            assert_eq!(VsphereError::task("x", Fault::of(kind)).class(), want, "{kind}");
        }
        let unavailable = VsphereError::Status { operation: "x".into(), status: 503 };
        assert_eq!(unavailable.class(), Session);
    }
}
