//! Reasons of events, as the kubelet and the virtual-kubelet library spell them.

/// An image is being pulled.
pub const PULLING: &str = "Pulling";
/// An image is on the node.
pub const PULLED: &str = "Pulled";
/// A pull Secret is missing or cannot be read; the pull is tried without it.
pub const FAILED_IMAGE_PULL_SECRETS: &str = "FailedToRetrieveImagePullSecret";
/// A container was created.
pub const CREATED: &str = "Created";
/// A container was started.
pub const STARTED: &str = "Started";
/// A container is being stopped.
pub const KILLING: &str = "Killing";
/// A restart or a pull is delayed by backoff.
pub const BACK_OFF: &str = "BackOff";
/// An operation on a container failed.
pub const FAILED: &str = "Failed";
/// A probe failed.
pub const UNHEALTHY: &str = "Unhealthy";
/// A probe passed with a warning.
pub const PROBE_WARNING: &str = "ProbeWarning";
/// Files of a volume cannot be written.
pub const FAILED_MOUNT: &str = "FailedMount";
/// The VM cannot be created or started.
pub const FAILED_CREATE_POD_SANDBOX: &str = "FailedCreatePodSandBox";
/// A postStart hook failed.
pub const FAILED_POST_START_HOOK: &str = "FailedPostStartHook";
/// A preStop hook failed.
pub const FAILED_PRE_STOP_HOOK: &str = "FailedPreStopHook";
/// Keys of an object are invalid as names of environment variables.
pub const INVALID_ENVIRONMENT_VARIABLE_NAMES: &str = "InvalidEnvironmentVariableNames";
/// Fields of the spec have no effect on this node.
pub const IGNORED_FIELDS: &str = "IgnoredFields";
/// Fields of the spec are not supported by this node.
pub const UNSUPPORTED_FIELDS: &str = "UnsupportedFields";
/// The pod ran longer than `activeDeadlineSeconds`.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// An optional ConfigMap is missing.
pub const OPTIONAL_CONFIG_MAP_NOT_FOUND: &str = "OptionalConfigMapNotFound";
/// An optional key of a ConfigMap is missing.
pub const OPTIONAL_CONFIG_MAP_KEY_NOT_FOUND: &str = "OptionalConfigMapKeyNotFound";
/// An optional Secret is missing.
pub const OPTIONAL_SECRET_NOT_FOUND: &str = "OptionalSecretNotFound";
/// An optional key of a Secret is missing.
pub const OPTIONAL_SECRET_KEY_NOT_FOUND: &str = "OptionalSecretKeyNotFound";
/// A ConfigMap is missing, and its container waits.
pub const MANDATORY_CONFIG_MAP_NOT_FOUND: &str = "MandatoryConfigMapNotFound";
/// A key of a ConfigMap is missing, and its container waits.
pub const MANDATORY_CONFIG_MAP_KEY_NOT_FOUND: &str = "MandatoryConfigMapKeyNotFound";
/// A Secret is missing, and its container waits.
pub const MANDATORY_SECRET_NOT_FOUND: &str = "MandatorySecretNotFound";
/// A key of a Secret is missing, and its container waits.
pub const MANDATORY_SECRET_KEY_NOT_FOUND: &str = "MandatorySecretKeyNotFound";
