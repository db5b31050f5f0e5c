//! Reasons for refusing a request of a kubelet, and their gRPC codes. Pure.

use coracle_host::{Fault, HostError};
use coracle_image::ImageError;
use coracle_oci::OciError;
use tonic::{Code, Status};

/// Refusal by the server itself. Those of the host core are [`HostError`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("invalid {what}: {why}")]
    Invalid { what: &'static str, why: String },
    #[error("{what} \"{id}\" not found")]
    NotFound { what: &'static str, id: String },
    #[error("{what} \"{name}\" exists already as {id}")]
    Exists { what: &'static str, name: String, id: String },
    #[error("cannot {operation} {what} \"{id}\": {why}")]
    State { operation: &'static str, what: &'static str, id: String, why: &'static str },
    #[error("{what} is not supported: {why}")]
    Unsupported { what: &'static str, why: &'static str },
    #[error(
        "cannot resize pod: its VM has {vcpus} virtual CPUs and {memory_mib} MiB, and keeps them until the pod is made anew"
    )]
    Resize { vcpus: u8, memory_mib: u32 },
    /// The kubelet recognises the first word.
    #[error("RROUnsupported: a recursive read-only mount must be read-only and private")]
    RecursiveReadOnly,
    /// The kubelet recognises the first word.
    #[error("ImageVolumeMountFailed: {0}")]
    ImageVolume(String),
    #[error("the command was ended after {0} s")]
    ExecTimeout(i64),
    #[error("cannot start container \"{id}\": {why}")]
    Start { id: String, why: String },
    #[error("too many streaming sessions wait for their client")]
    TooManySessions,
}

impl Refusal {
    pub(crate) fn invalid(what: &'static str, why: impl Into<String>) -> Self {
        Self::Invalid { what, why: why.into() }
    }

    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } | Self::Unsupported { .. } | Self::RecursiveReadOnly => {
                Code::InvalidArgument
            }
            Self::NotFound { .. } => Code::NotFound,
            Self::Exists { .. } => Code::AlreadyExists,
            Self::State { .. } | Self::Resize { .. } => Code::FailedPrecondition,
            Self::ImageVolume(_) | Self::Start { .. } => Code::Internal,
            Self::ExecTimeout(_) => Code::DeadlineExceeded,
            Self::TooManySessions => Code::ResourceExhausted,
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

/// Returns the status of an error of the host core, with its causes: a kubelet shows the text in events of the pod.
pub(crate) fn of_host(error: &HostError) -> Status {
    let code = match error.fault() {
        Fault::NotFound => Code::NotFound,
        Fault::AlreadyExists => Code::AlreadyExists,
        Fault::Invalid => Code::InvalidArgument,
        Fault::Exhausted => Code::ResourceExhausted,
        Fault::Precondition => Code::FailedPrecondition,
        Fault::Unavailable => Code::Unavailable,
        Fault::TimedOut => Code::DeadlineExceeded,
        Fault::Denied => Code::PermissionDenied,
        Fault::Internal => Code::Internal,
    };
    Status::new(code, error.chain())
}

/// Returns the status of a failed pull. The kubelet takes the reason from the first word of the message, and recognises it only
/// with the code Unknown (cri-client, `pkg/remote_image.go`; kubelet, `pkg/kubelet/images`).
pub(crate) fn of_image(error: &ImageError) -> Status {
    let text = chain(error);
    match error {
        ImageError::Oci(OciError::InvalidReference { .. }) => Status::invalid_argument(text),
        ImageError::Oci(OciError::NotFound { .. }) | ImageError::NotPresent { .. } => Status::not_found(text),
        ImageError::Oci(OciError::Unauthorized { .. }) => Status::permission_denied(text),
        ImageError::Oci(OciError::Network { .. }) => Status::unknown(format!("RegistryUnavailable: {text}")),
        ImageError::Oci(OciError::StorageFull { .. }) => Status::resource_exhausted(text),
        _ if error.is_transient() => Status::unavailable(text),
        _ => Status::unknown(text),
    }
}

/// Like [`of_pull`], for an image that a namespace may not use.
pub(crate) fn of_signature(error: &HostError) -> Status {
    match error {
        HostError::Unsigned { .. } => unsigned_image(&error.chain()),
        error => of_pull(error),
    }
}

/// Like [`of_signature`], with a reason of the server itself.
pub(crate) fn unsigned_image(why: &str) -> Status {
    Status::unknown(format!("SignatureValidationFailed: {why}"))
}

/// Like [`of_image`], for an error of the host core.
pub(crate) fn of_pull(error: &HostError) -> Status {
    match error {
        HostError::Image { source, .. } => of_image(source),
        error => of_host(error),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_the_codes_of_the_contract() {
        let (what, id) = ("container", "x".to_owned());
        for (refusal, code, text) in [
            (
                Refusal::invalid("mount", "the source is relative"),
                Code::InvalidArgument,
                "invalid mount: the source is relative",
            ),
            (Refusal::NotFound { what, id: id.clone() }, Code::NotFound, "container \"x\" not found"),
            (
                Refusal::Exists { what, name: "web".into(), id: id.clone() },
                Code::AlreadyExists,
                "container \"web\" exists already as x",
            ),
            (
                Refusal::State { operation: "attach to", what, id: id.clone(), why: "it is not running" },
                Code::FailedPrecondition,
                "cannot attach to container \"x\": it is not running",
            ),
            (
                Refusal::RecursiveReadOnly,
                Code::InvalidArgument,
                "RROUnsupported: a recursive read-only mount must be read-only and private",
            ),
            (
                Refusal::ImageVolume("no /x in it".into()),
                Code::Internal,
                "ImageVolumeMountFailed: no /x in it",
            ),
            (Refusal::ExecTimeout(3), Code::DeadlineExceeded, "the command was ended after 3 s"),
        ] {
            let status = Status::from(refusal);
            assert_eq!((status.code(), status.message()), (code, text));
        }
    }

    #[test]
    fn errors_of_the_host_core_keep_their_kind() {
        let missing = HostError::NoContainer { vm: "pod".into(), id: "x".into() };
        assert_eq!(of_host(&missing).code(), Code::NotFound);
        let image = ImageError::NotPresent { image: "a:1".into() };
        assert_eq!(of_image(&image).code(), Code::NotFound);
    }
}
