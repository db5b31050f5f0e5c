//! Pulling: look what is here, decide, fetch, make visible.

mod fetch;

use std::sync::Arc;

use crate::{
    Credentials, Digest, Image, ImageError, Progress, ProgressEvent, Reference, Step, auth,
    registry::{self, Session, endpoints},
    store::{Inner, blocking},
};

/// When a registry is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// When the image is not here. The tag `latest` (or none) asks each time what it means now, and uses what
    /// is here when the registry cannot be reached. Names given on this host (import, tag) are never asked
    /// for.
    #[default]
    IfNotPresent,
    /// Each time. Blobs that are here are not fetched again.
    Always,
    /// Not at all.
    Never,
}

/// How one pull is done.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// When the registry is asked.
    pub policy: PullPolicy,
    /// Where credentials come from.
    pub credentials: Credentials,
    /// Layers fetched at the same time, at least 1. Default 4.
    pub concurrency: usize,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self { policy: PullPolicy::default(), credentials: Credentials::default(), concurrency: 4 }
    }
}

/// What is in the store under a reference.
struct Local {
    image: Image,
    /// Digests a registry may call it by: the manifest's, and the index's it came through.
    known_as: Vec<Digest>,
    /// Named on this host.
    local: bool,
}

/// What to do about a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// Take what is here.
    Use,
    /// Ask what the reference means now; fetch when that is not here. `offline_ok`: what is here will do if
    /// nobody answers.
    Check { offline_ok: bool },
    /// Fetch.
    Fetch,
    /// Not here, and not to be fetched.
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
    inner: &Arc<Inner>,
    reference: &Reference,
    options: &PullOptions,
    progress: Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let local = look(inner, reference).await?;
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
                    "registry does not answer, the stored image is used"
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

/// The stored image, if all of it is here.
async fn look(inner: &Arc<Inner>, reference: &Reference) -> Result<Option<Local>, ImageError> {
    let (inner, reference) = (Arc::clone(inner), reference.clone());
    blocking(move || {
        let entry = inner.index().find(&reference).cloned();
        let Some(entry) = entry else { return Ok(None) };
        let known_as = std::iter::once(entry.digest).chain(entry.index).collect();
        let image = inner.complete_image(&entry.digest)?;
        Ok(image.map(|image| Local { image, known_as, local: entry.local }))
    })
    .await
}

/// True when the reference still means the stored image. False when it does not, or the registry does not say
/// without a download.
async fn check(
    inner: &Arc<Inner>,
    reference: &Reference,
    options: &PullOptions,
    local: &Local,
) -> Result<bool, ImageError> {
    let mut last = None;
    for session in sessions(inner, reference, options).await? {
        let resolved = match session.await {
            Ok(session) => session.resolve().await,
            Err(error) => Err(error),
        };
        match resolved {
            Ok(digest) => return Ok(digest.is_some_and(|d| local.known_as.contains(&d))),
            Err(error) => last = Some(error),
        }
    }
    last.map_or(Ok(false), Err)
}

/// Fetches from the first server that has the image.
async fn fetch(
    inner: &Arc<Inner>,
    reference: &Reference,
    options: &PullOptions,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let mut last = None;
    for session in sessions(inner, reference, options).await? {
        let fetched = match session.await {
            Ok(session) => fetch::fetch(inner, session, reference, options.concurrency, progress).await,
            Err(error) => Err(error),
        };
        match fetched {
            // No other server can help there.
            Err(error @ ImageError::StorageFull { .. }) => return Err(error),
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "server does not deliver the image"
                );
                last = Some(error);
            }
            done => return done,
        }
    }
    Err(last.unwrap_or_else(|| ImageError::NotPresent { image: reference.to_string() }))
}

/// Conversations with all servers that may have the image, each begun when it is its turn. A mirror gets its
/// own credentials only.
async fn sessions(
    inner: &Arc<Inner>,
    reference: &Reference,
    options: &PullOptions,
) -> Result<Vec<impl Future<Output = Result<Session, ImageError>>>, ImageError> {
    let http = match inner.http.get() {
        Some(http) => http.clone(),
        None => {
            let made = registry::client(&inner.options.timeouts, registry::Operation::Pull, &[]);
            let fail = |e: reqwest::Error| ImageError::Network {
                registry: reference.registry().to_owned(),
                operation: "prepare HTTP client".to_owned(),
                source: e.into(),
            };
            inner.http.get_or_init(|| made.as_ref().cloned().unwrap_or_default());
            made.map_err(fail)?
        }
    };
    let begin = |endpoint: registry::Endpoint| {
        let (http, reference, options) = (http.clone(), reference.clone(), options.clone());
        let (timeouts, retries) = (inner.options.timeouts.clone(), inner.options.retries);
        async move {
            let own = endpoint.host == reference.registry();
            let login = match &options.credentials {
                auth::Credentials::Basic { .. } | auth::Credentials::Bearer(_) if !own => {
                    auth::Login::Anonymous
                }
                credentials => auth::lookup(credentials, &endpoint.host).await?,
            };
            Session::open(http, endpoint, reference, login, timeouts, retries).await
        }
    };
    Ok(endpoints(reference, &inner.options.registries).into_iter().map(begin).collect())
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
