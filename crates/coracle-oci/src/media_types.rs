//! Media types of the OCI image specification and of docker's image manifest, schema 2.

/// OCI image manifest.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// OCI image index.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// OCI image configuration.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Docker image manifest.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker manifest list.
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Docker image configuration.
pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// Media types of manifests and indexes that the client reads, as a value of `Accept`.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";
