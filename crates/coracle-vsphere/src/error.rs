//! Errors of vCenter, and their classes.

use std::{collections::BTreeMap, fmt};

/// Fault of vCenter: its type and its text fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// The type, as `DuplicateName`.
    pub kind: String,
    /// The localized message, where there is one.
    pub message: String,
    /// Fields of the fault that hold text.
    pub fields: BTreeMap<String, String>,
}

impl Fault {
    /// A fault of that type, without message and fields.
    #[must_use]
    pub fn of(kind: &str) -> Self {
        Self { kind: kind.to_owned(), ..Self::default() }
    }
}

impl Fault {
    /// Whether the creation of a VM was refused because vCenter does not choose a host by itself, as where DRS is off.
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

/// Class of an error, which determines the retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultClass {
    /// The user is refused: wait long, an account could be locked out.
    Auth,
    /// The session or the connection broke: log in again.
    Session,
    /// The request can never work as it is.
    Config,
    /// No capacity now.
    Capacity,
    /// Another client changed the object: observe again.
    Race,
    /// The object no longer exists.
    Gone,
    /// Anything else.
    Other,
}

/// A call that did not succeed. Messages hold neither passwords nor tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VsphereError {
    /// The server could not be reached, or the connection broke.
    #[error("{operation} at {server}")]
    Transport {
        /// Operation.
        operation: String,
        /// Host and port.
        server: String,
        /// Why; without its URL, which may hold a token.
        source: Box<reqwest::Error>,
    },
    /// An HTTP status other than expected.
    #[error("{operation}: HTTP status {status}")]
    Status {
        /// Operation.
        operation: String,
        /// The status.
        status: u16,
    },
    /// The server answered with a fault, or a task ended in one.
    #[error("{operation}: {fault}")]
    Fault {
        /// Operation and object.
        operation: String,
        /// The fault.
        fault: Fault,
    },
    /// An answer that cannot be read.
    #[error("{operation}: {what}")]
    Protocol {
        /// Operation.
        operation: String,
        /// Fault of the answer.
        what: String,
    },
    /// A name of the specification that the inventory does not have.
    #[error("{field}: no {kind} {name:?}")]
    NoSuchName {
        /// Field of the specification.
        field: &'static str,
        /// Kind of the object.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// A name that several objects have.
    #[error("{field}: {name:?} names more than one: {}", .candidates.join(", "))]
    Ambiguous {
        /// Field of the specification.
        field: &'static str,
        /// The name.
        name: String,
        /// Paths of these objects.
        candidates: Vec<String>,
    },
    /// A value of the specification that vSphere does not know.
    #[error("{field}: {value:?} is not one of {allowed}")]
    Unsupported {
        /// Field of the specification.
        field: &'static str,
        /// The value.
        value: String,
        /// Valid values.
        allowed: &'static str,
    },
    /// No datastore has room for the machine.
    #[error("no datastore of {pod} is accessible and has {needed_mib} MiB free")]
    NoSpace {
        /// The datastore cluster.
        pod: String,
        /// Needed space.
        needed_mib: u64,
    },
    /// Logging in was refused a short while ago; it was not tried again.
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
        /// Reason.
        what: String,
    },
    /// A task that still runs after the longest wait. It continues, and can be awaited again.
    #[error("task {task} still runs after {seconds} s ({state})")]
    TaskRuns {
        /// Id of the task.
        task: String,
        /// Time of the wait.
        seconds: u64,
        /// State and progress.
        state: String,
    },
    /// A property that the user may not read.
    #[error("read {property} of {object}: {fault}")]
    Unreadable {
        /// Type and id of the object.
        object: String,
        /// The property.
        property: String,
        /// Why not.
        fault: Fault,
    },
    /// A refusal of the tagging service.
    #[error("{operation}: {kind}: {message}")]
    Tagging {
        /// Operation.
        operation: String,
        /// Type of the error, as `INVALID_ARGUMENT`.
        kind: String,
        /// Text of the service.
        message: String,
    },
    /// The client was closed.
    #[error("the session was closed")]
    Closed,
}

impl VsphereError {
    /// Class of the error.
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

    /// The type of the fault, if it is one.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        match self {
            Self::Fault { fault, .. } => Some(&fault.kind),
            _ => None,
        }
    }

    /// A task that ended in `fault`.
    #[must_use]
    pub fn task(operation: impl Into<String>, fault: Fault) -> Self {
        Self::Fault { operation: operation.into(), fault }
    }
}

/// True when the server was reached and its certificate or its TLS refused.
fn is_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    error.is::<rustls::Error>()
        || wrapped.is_some_and(|inner| is_tls(inner))
        || error.source().is_some_and(is_tls)
}

/// The class of a fault's type. Subtypes of `InsufficientResourcesFault` all say what is insufficient in their names.
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
    fn every_fault_of_the_contract_has_its_class() {
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
