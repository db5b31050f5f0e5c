//! Tags of saved VMs in a registry: the operations that controllers need.

use std::fmt::Debug;

use async_trait::async_trait;
use coracle_oci::{
    Client, Credentials, OciError, Operation, PullOrigin, Reference, Registries, RegistryHost, RegistryHosts,
    RetryPolicy, Secret, Timeouts,
};
use reqwest::Url;
use std::time::Duration;

/// Time limit of one request to the registry.
const REQUEST: Duration = Duration::from_secs(10);
/// Retries of a request after a transient failure; reconciles are repeated anyway.
const RETRIES: usize = 1;

/// Saved states of VMs. The repository has the name of the VM.
#[async_trait]
pub trait SnapshotTags: Debug + Send + Sync {
    /// True when the tag exists. Reads only.
    ///
    /// # Errors
    /// [`RegistryError`] when the registry does not respond, or refuses.
    async fn has(&self, repository: &str, tag: &str) -> Result<bool, RegistryError>;

    /// Removes the tag. Idempotent: returns `Ok` when the tag does not exist.
    ///
    /// # Errors
    /// [`RegistryError`] when the registry does not respond, or refuses.
    async fn delete(&self, repository: &str, tag: &str) -> Result<(), RegistryError>;
}

/// A failed request to the registry.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {repository}:{tag} in the registry")]
pub struct RegistryError {
    operation: &'static str,
    repository: String,
    tag: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl RegistryError {
    /// Returns the error of `operation` on a tag.
    #[must_use]
    pub fn new(
        operation: &'static str,
        repository: &str,
        tag: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        let (repository, tag) = (repository.to_owned(), tag.to_owned());
        Self { operation, repository, tag, source: source.into() }
    }
}

/// Invalid configuration of a registry.
#[derive(Debug, thiserror::Error)]
#[error("invalid registry {url:?}: {reason}")]
pub struct InvalidRegistry {
    /// URL in the configuration.
    pub url: String,
    /// Reason why the URL is invalid.
    pub reason: String,
}

/// Placeholder without a registry: no state is saved, and none has to be removed.
#[derive(Clone, Copy, Debug)]
pub struct NoTags;

#[async_trait]
impl SnapshotTags for NoTags {
    async fn has(&self, _: &str, _: &str) -> Result<bool, RegistryError> {
        Ok(false)
    }

    async fn delete(&self, _: &str, _: &str) -> Result<(), RegistryError> {
        Ok(())
    }
}

/// Registry with the OCI distribution API.
pub struct OciTags {
    host: String,
    registries: Registries,
    credentials: Credentials,
}

impl Debug for OciTags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OciTags").field("host", &self.host).finish_non_exhaustive()
    }
}

impl OciTags {
    /// Creates a client of the registry at `url` (`http://HOST[:PORT]`, `https://HOST[:PORT]` or `HOST[:PORT]`, which is
    /// HTTPS). `token` is a bearer token for deletions; `trust` are certificates (PEM) to trust in addition to the system's.
    ///
    /// # Errors
    /// [`InvalidRegistry`] when the URL has another form.
    pub fn new(url: &str, token: Option<&str>, trust: Vec<u8>) -> Result<Self, InvalidRegistry> {
        let wrong = |reason: &str| InvalidRegistry { url: url.to_owned(), reason: reason.to_owned() };
        let text = if url.contains("://") { url.to_owned() } else { format!("https://{url}") };
        let root = Url::parse(&text).map_err(|error| wrong(&error.to_string()))?;
        if !matches!(root.scheme(), "http" | "https") {
            return Err(wrong("must begin with http:// or https://"));
        }
        let host = root.host_str().ok_or_else(|| wrong("has no host"))?;
        let host = root.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let server = RegistryHost { trust, ..RegistryHost::at(root) };
        let hosts = RegistryHosts { server, ..RegistryHosts::default() };
        let registries = Registries::default().with(&host, hosts);
        let credentials = match token.filter(|token| !token.is_empty()) {
            Some(token) => Credentials::Bearer(Secret::new(token)),
            None => Credentials::Anonymous,
        };
        Ok(Self { host, registries, credentials })
    }

    async fn session(
        &self,
        repository: &str,
        tag: &str,
        operation: Operation,
    ) -> Result<coracle_oci::Session, Box<dyn std::error::Error + Send + Sync>> {
        let reference: Reference = format!("{}/{repository}:{tag}", self.host).parse()?;
        let timeouts = Timeouts { request: REQUEST, ..Timeouts::default() };
        let client = Client {
            registries: &self.registries,
            credentials: &self.credentials,
            origin: PullOrigin::Local,
            retry_policy: RetryPolicy { timeouts, retries: RETRIES },
        };
        Ok(client.open_first(&reference, operation).await?)
    }
}

#[async_trait]
impl SnapshotTags for OciTags {
    async fn has(&self, repository: &str, tag: &str) -> Result<bool, RegistryError> {
        let failed = |source| RegistryError::new("look up", repository, tag, source);
        let session = self.session(repository, tag, Operation::Pull).await.map_err(failed)?;
        match session.resolve().await {
            Ok(_) => Ok(true),
            Err(OciError::NotFound { .. }) => Ok(false),
            Err(error) => Err(failed(error.into())),
        }
    }

    async fn delete(&self, repository: &str, tag: &str) -> Result<(), RegistryError> {
        let failed = |source| RegistryError::new("delete", repository, tag, source);
        let session = self.session(repository, tag, Operation::Push).await.map_err(failed)?;
        session.delete_tag().await.map_err(|error| failed(error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registry_url_table() {
        for (url, want) in [
            ("http://epoch.cocoon-system.svc:8080", Ok("epoch.cocoon-system.svc:8080")),
            ("https://registry.example", Ok("registry.example")),
            ("registry.example:5000/", Ok("registry.example:5000")),
            ("ftp://registry.example", Err("http://")),
            ("", Err("host")),
        ] {
            match (OciTags::new(url, Some("t"), Vec::new()), want) {
                (Ok(tags), Ok(host)) => assert_eq!(tags.host, host, "{url}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{url}: {error}"),
                (got, _) => panic!("{url}: {got:?}"),
            }
        }
    }
}
