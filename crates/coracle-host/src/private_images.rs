//! Repositories whose images were pulled with a caller's credentials. Such an image does not belong to everyone: a later user
//! must show credentials that the registry accepts, or has accepted on this node before.
//!
//! The repository is recorded before the first byte is fetched, so after a crash none of its images counts as public. Accepted
//! credentials are kept in memory only: after a restart the registry is asked again.
//!
//! Source: Kubernetes documentation, "Ensure Secret Pulled Images".

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_image::PullPolicy;
use coracle_oci::{Credentials, Digest, PullOrigin, Reference};
use parking_lot::Mutex;

use crate::files;

/// Maximum number of accepted credentials in memory. When it is exceeded, all of them are verified again.
const ACCEPTED_MAX: usize = 4096;

/// Private repositories, stored in a file.
#[derive(Debug)]
pub(crate) struct PrivateImages {
    file: PathBuf,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    repositories: BTreeSet<String>,
    accepted: HashSet<(String, Digest)>,
}

/// Use of an image by a caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use<'a> {
    pub(crate) reference: &'a Reference,
    pub(crate) credentials: &'a Credentials,
    pub(crate) origin: PullOrigin,
    pub(crate) policy: PullPolicy,
    /// Whether the image is present.
    pub(crate) is_here: bool,
}

/// Decision on the use of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Allowed, according to the pull policy.
    Allow,
    /// Allowed if the registry accepts the credentials.
    Ask,
    /// Refused, because the pull policy forbids asking the registry.
    Refuse,
}

impl PrivateImages {
    /// Opens the file of a state directory.
    pub(crate) fn open(state: &Path) -> io::Result<Arc<Self>> {
        let file = state.join("private-images.json");
        let repositories = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::other)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => return Err(error),
        };
        Ok(Arc::new(Self { file, known: Mutex::new(Known { repositories, ..Known::default() }) }))
    }

    /// Whether a use with these credentials needs a decision: the repository is private, or becomes private.
    pub(crate) fn needs_decision(&self, reference: &Reference, credentials: &Credentials) -> bool {
        is_from_caller(credentials) || self.known.lock().repositories.contains(&repository(reference))
    }

    /// Decides on a use. A pull with credentials of the caller is recorded first.
    ///
    /// # Errors
    /// When the record cannot be written: nothing may be pulled then.
    pub(crate) async fn begin(self: &Arc<Self>, wanted: Use<'_>) -> io::Result<Decision> {
        let repository = repository(wanted.reference);
        let (decision, is_noted) = {
            let known = self.known.lock();
            (known.decide(&repository, wanted), known.repositories.contains(&repository))
        };
        let fetches = !wanted.is_here || wanted.policy == PullPolicy::Always;
        if fetches && is_from_caller(wanted.credentials) && !is_noted {
            self.change(move |repositories| repositories.insert(repository)).await?;
        }
        Ok(decision)
    }

    /// Records that the registry has accepted the credentials.
    ///
    /// # Errors
    /// When the repository cannot be removed from the file: the registry is asked again.
    pub(crate) async fn record_accepted(self: &Arc<Self>, wanted: Use<'_>) -> io::Result<()> {
        let repository = repository(wanted.reference);
        {
            let mut known = self.known.lock();
            if !known.repositories.contains(&repository) {
                return Ok(());
            }
            if is_from_caller(wanted.credentials) {
                if known.accepted.len() >= ACCEPTED_MAX {
                    known.accepted.clear();
                }
                known.accepted.insert((repository, wanted.credentials.fingerprint()));
                return Ok(());
            }
        }
        // A repository that the node can pull from by itself is public.
        self.change(move |repositories| repositories.remove(&repository)).await
    }

    async fn change(
        self: &Arc<Self>,
        change: impl FnOnce(&mut BTreeSet<String>) -> bool + Send + 'static,
    ) -> io::Result<()> {
        let images = self.clone();
        files::blocking(move || {
            let mut known = images.known.lock();
            let mut repositories = known.repositories.clone();
            if change(&mut repositories) {
                let text = serde_json::to_vec(&repositories).map_err(io::Error::other)?;
                files::write_atomic(&images.file, &text)?;
                known.repositories = repositories;
            }
            Ok(())
        })
        .await
    }
}

impl Known {
    fn decide(&self, repository: &str, wanted: Use<'_>) -> Decision {
        let is_open = wanted.origin == PullOrigin::Local || !self.repositories.contains(repository);
        let is_accepted =
            || self.accepted.contains(&(repository.to_owned(), wanted.credentials.fingerprint()));
        match wanted.policy {
            _ if !wanted.is_here || is_open || is_accepted() => Decision::Allow,
            PullPolicy::Never => Decision::Refuse,
            PullPolicy::Always | PullPolicy::IfNotPresent => Decision::Ask,
        }
    }
}

fn repository(reference: &Reference) -> String {
    format!("{}/{}", reference.registry(), reference.repository())
}

/// Whether the credentials are from a caller: neither those of the node nor empty.
fn is_from_caller(credentials: &Credentials) -> bool {
    !matches!(credentials, Credentials::Docker { .. } | Credentials::Anonymous)
}

#[cfg(test)]
mod tests {
    use coracle_oci::Secret;

    use super::*;

    fn login(password: &str) -> Credentials {
        Credentials::Basic { user: "user".into(), password: Secret::new(password) }
    }

    #[tokio::test]
    async fn secret_pulled_image_requires_accepted_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let images = PrivateImages::open(dir.path()).unwrap();
        let reference: Reference = "registry.example/team/app:1".parse().unwrap();
        let (own, right, wrong) = (Credentials::default(), login("right"), login("wrong"));
        let cluster = |credentials, policy, is_here| Use {
            reference: &reference,
            credentials,
            origin: PullOrigin::Cluster,
            policy,
            is_here,
        };
        use Decision::{Allow, Ask, Refuse};
        use PullPolicy::{IfNotPresent, Never};
        assert_eq!(
            images.begin(cluster(&own, IfNotPresent, true)).await.unwrap(),
            Allow,
            "no secret brought it"
        );
        assert!(!images.needs_decision(&reference, &own) && images.needs_decision(&reference, &right));
        assert_eq!(
            images.begin(cluster(&right, IfNotPresent, false)).await.unwrap(),
            Allow,
            "a fetch asks anyway"
        );
        images.record_accepted(cluster(&right, IfNotPresent, false)).await.unwrap();
        for (why, credentials, policy, want) in [
            ("whose fetch it was", &right, IfNotPresent, Allow),
            ("whose fetch it was", &right, Never, Allow),
            ("another secret", &wrong, IfNotPresent, Ask),
            ("another secret", &wrong, Never, Refuse),
            ("no secret", &own, IfNotPresent, Ask),
            ("no secret", &own, Never, Refuse),
        ] {
            assert_eq!(
                images.begin(cluster(credentials, policy, true)).await.unwrap(),
                want,
                "{why}: {policy:?}"
            );
        }
        let local = Use { origin: PullOrigin::Local, ..cluster(&own, Never, true) };
        assert_eq!(images.begin(local).await.unwrap(), Allow, "the administrator of the node");

        let again = PrivateImages::open(dir.path()).unwrap();
        assert_eq!(again.begin(cluster(&right, IfNotPresent, true)).await.unwrap(), Ask, "after a restart");
        again.record_accepted(cluster(&own, IfNotPresent, true)).await.unwrap();
        assert_eq!(again.begin(cluster(&wrong, Never, true)).await.unwrap(), Allow, "the node may pull it");
    }

    #[tokio::test]
    async fn private_fetch_is_recorded_before_the_pull() {
        let dir = tempfile::tempdir().unwrap();
        let reference: Reference = "registry.example/team/app:1".parse().unwrap();
        let wanted = Use {
            reference: &reference,
            credentials: &login("right"),
            origin: PullOrigin::Cluster,
            policy: PullPolicy::IfNotPresent,
            is_here: false,
        };
        PrivateImages::open(dir.path()).unwrap().begin(wanted).await.unwrap();
        let after_a_crash = PrivateImages::open(dir.path()).unwrap();
        let other = Use { credentials: &Credentials::Anonymous, is_here: true, ..wanted };
        assert_eq!(after_a_crash.begin(other).await.unwrap(), Decision::Ask);
    }
}
