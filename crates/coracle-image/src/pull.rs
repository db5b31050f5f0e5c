//! Pulls images: looks up the stored image, decides, fetches and publishes.

mod fetch;

use std::sync::Arc;

use crate::{
    Image, ImageError,
    content::{ContentStore, blocking},
};
use coracle_oci::{
    Client, Credentials, Digest, OciError, Operation, Progress, ProgressEvent, PullOrigin, Reference,
    RetryPolicy, Step,
};

/// When a pull asks a registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// Only when the image is not stored. The tag `latest` (also implied) is resolved each time; the stored image is used when
    /// the registry does not answer. Names given on this host (import, tag) are not resolved.
    #[default]
    IfNotPresent,
    /// On every pull. Stored blobs are not fetched again.
    Always,
    /// Never.
    Never,
}

/// Options of a pull.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// When to ask a registry.
    pub policy: PullPolicy,
    /// Source of credentials.
    pub credentials: Credentials,
    /// Number of layers fetched concurrently, at least 1. Default 4.
    pub concurrency: usize,
    /// Origin of the requests.
    pub origin: PullOrigin,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            policy: PullPolicy::default(),
            credentials: Credentials::default(),
            concurrency: 4,
            origin: PullOrigin::default(),
        }
    }
}

/// Stored image of a reference.
struct Local {
    image: Image,
    /// Digests by which a registry may know the image: of the manifest, of the index, and of the reference itself.
    known_as: Vec<Digest>,
    /// True when the name was given on this host.
    local: bool,
}

/// Decision of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// Use the stored image.
    Use,
    /// Resolve the reference, and fetch if it names another image. `offline_ok`: use the stored image if the registry does not
    /// answer.
    Check { offline_ok: bool },
    /// Fetch the image.
    Fetch,
    /// Fail: the image is not stored, and the policy forbids a fetch.
    Refuse,
}

fn decide(policy: PullPolicy, floating: bool, present: bool, local: bool) -> Decision {
    match (policy, present) {
        (PullPolicy::Never, true) => Decision::Use,
        (PullPolicy::Never, false) => Decision::Refuse,
        (PullPolicy::Always | PullPolicy::IfNotPresent, false) => Decision::Fetch,
        (PullPolicy::Always, true) => Decision::Check { offline_ok: false },
        (PullPolicy::IfNotPresent, true) if floating && !local => Decision::Check { offline_ok: true },
        (PullPolicy::IfNotPresent, true) => Decision::Use,
    }
}

/// See [`crate::Store::pull`].
#[tracing::instrument(name = "pull", skip_all, fields(image = %reference))]
pub(crate) async fn pull(
    inner: &Arc<ContentStore>,
    reference: &Reference,
    options: &PullOptions,
    progress: Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let local = lookup(inner, reference).await?;
    let decision = decide(
        options.policy,
        reference.is_floating(),
        local.is_some(),
        local.as_ref().is_some_and(|l| l.local),
    );
    progress.event(ProgressEvent { step: Step::Resolve, item: None, done_bytes: 0, total_bytes: 0 });
    match (decision, local) {
        (Decision::Use, Some(local)) => Ok(local.image),
        (Decision::Check { offline_ok }, Some(local)) => match check(inner, reference, options, &local).await
        {
            Ok(true) => Ok(local.image),
            Ok(false) => fetch(inner, reference, options, &progress).await,
            Err(error) if offline_ok && error.is_transient() => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "resolve reference failed, using stored image"
                );
                Ok(local.image)
            }
            Err(error) => Err(error),
        },
        (Decision::Refuse, _) => Err(ImageError::NotPresent { image: reference.to_string() }),
        (Decision::Fetch, _) | (Decision::Use | Decision::Check { .. }, None) => {
            fetch(inner, reference, options, &progress).await
        }
    }
}

/// Looks up the complete stored image of a reference.
async fn lookup(inner: &Arc<ContentStore>, reference: &Reference) -> Result<Option<Local>, ImageError> {
    let (inner, reference) = (Arc::clone(inner), reference.clone());
    blocking(move || {
        let entry = inner.index().find(&reference).cloned();
        let Some(entry) = entry else { return Ok(None) };
        let known_as =
            [entry.digest].into_iter().chain(entry.index).chain(reference.digest().copied()).collect();
        let image = inner.complete_image(&entry.digest)?;
        Ok(image.map(|image| Local { image, known_as, local: entry.local }))
    })
    .await
}

/// True when the reference names the stored image. False when it does not, or when the registry cannot resolve it without a
/// download.
async fn check(
    inner: &Arc<ContentStore>,
    reference: &Reference,
    options: &PullOptions,
    local: &Local,
) -> Result<bool, ImageError> {
    let digest = resolve(&client(inner, options), reference).await?;
    Ok(digest.is_some_and(|d| local.known_as.contains(&d)))
}

/// Digest of a name, from the first server that may resolve tags. `None` when the server cannot resolve it without a download.
async fn resolve(client: &Client<'_>, reference: &Reference) -> Result<Option<Digest>, OciError> {
    let mut last = None;
    for endpoint in client.endpoints(reference, Operation::Pull)? {
        if !endpoint.capabilities.resolve {
            continue;
        }
        let resolved = match client.open(endpoint, reference, Operation::Pull).await {
            Ok(session) => session.resolve().await,
            Err(error) => Err(error),
        };
        match resolved {
            Ok(digest) => return Ok(digest),
            Err(error) => last = Some(error),
        }
    }
    last.map_or(Ok(None), Err)
}

/// Fetches from the first server that has the image. Servers that may not resolve tags are asked by digest.
async fn fetch(
    inner: &Arc<ContentStore>,
    reference: &Reference,
    options: &PullOptions,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let client = client(inner, options);
    let mut last = None;
    for endpoint in client.endpoints(reference, Operation::Pull)? {
        let name = match reference.digest() {
            None if !endpoint.capabilities.resolve => match resolve(&client, reference).await {
                Ok(Some(digest)) => digest.to_string(),
                Ok(None) => continue,
                Err(error) => {
                    last = Some(error.into());
                    continue;
                }
            },
            _ => reference.api_name(),
        };
        let fetched = match client.open(endpoint, reference, Operation::Pull).await {
            Ok(session) => {
                fetch::fetch(inner, session, (reference, &name), options.concurrency, progress).await
            }
            Err(error) => Err(error.into()),
        };
        match fetched {
            // No other server can help with a full file system.
            Err(error @ ImageError::Oci(OciError::StorageFull { .. })) => return Err(error),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "fetch image from server failed");
                last = Some(error);
            }
            done => return done,
        }
    }
    Err(last.unwrap_or_else(|| ImageError::NotPresent { image: reference.to_string() }))
}

pub(crate) fn client<'a>(inner: &'a ContentStore, options: &'a PullOptions) -> Client<'a> {
    Client {
        registries: &inner.options.registries,
        credentials: &options.credentials,
        origin: options.origin,
        retry_policy: RetryPolicy {
            timeouts: inner.options.timeouts.clone(),
            retries: inner.options.retries,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decision_table() {
        use PullPolicy::{Always, IfNotPresent, Never};
        let (floating, fixed, here, absent, ours, theirs) = (true, false, true, false, true, false);
        for (why, policy, kind, present, local, want) in [
            ("never asks", Never, floating, here, theirs, Decision::Use),
            ("never fetches", Never, fixed, absent, theirs, Decision::Refuse),
            ("missing", IfNotPresent, fixed, absent, theirs, Decision::Fetch),
            ("a fixed tag is trusted", IfNotPresent, fixed, here, theirs, Decision::Use),
            ("latest moves", IfNotPresent, floating, here, theirs, Decision::Check { offline_ok: true }),
            ("but not when it was named here", IfNotPresent, floating, here, ours, Decision::Use),
            ("always asks", Always, fixed, here, ours, Decision::Check { offline_ok: false }),
            ("always fetches", Always, fixed, absent, theirs, Decision::Fetch),
        ] {
            assert_eq!(decide(policy, kind, present, local), want, "{why}");
        }
    }
}
