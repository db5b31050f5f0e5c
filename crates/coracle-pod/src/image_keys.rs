//! Keys that must have signed the images of pods.

use std::fmt;
use std::sync::Arc;

use coracle_image::PublicKeys;

type Look = dyn Fn() -> Result<Option<PublicKeys>, String> + Send + Sync;

/// The keys of which one must have signed the images of a pod, as the policy of its cluster says now. Clones are the same.
#[derive(Clone)]
pub struct ImageKeys(Arc<Look>);

impl Default for ImageKeys {
    /// Of a node without a policy: no signature is asked for.
    fn default() -> Self {
        Self::of(|| Ok(None))
    }
}

impl ImageKeys {
    /// What `look` finds: `None` where no signature is asked for, and why no image may be used while that is not known.
    #[must_use]
    pub fn of(look: impl Fn() -> Result<Option<PublicKeys>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }

    /// The keys now; `None`: no signature is asked for.
    ///
    /// # Errors
    /// Why that is not known.
    pub fn now(&self) -> Result<Option<PublicKeys>, String> {
        (self.0)()
    }
}

type LookIn = dyn Fn(&str) -> Result<Option<PublicKeys>, String> + Send + Sync;

/// The [`ImageKeys`] of each namespace. Clones are the same.
#[derive(Clone)]
pub struct NamespaceKeys(Arc<LookIn>);

impl Default for NamespaceKeys {
    /// Of a node without a policy: no signature is asked for.
    fn default() -> Self {
        Self::of(|_| Ok(None))
    }
}

impl NamespaceKeys {
    /// What `look` finds for a namespace, as [`ImageKeys::of`].
    #[must_use]
    pub fn of(look: impl Fn(&str) -> Result<Option<PublicKeys>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }

    /// The keys for pods of a namespace.
    #[must_use]
    pub fn of_namespace(&self, namespace: &str) -> ImageKeys {
        let (look, namespace) = (self.0.clone(), namespace.to_owned());
        ImageKeys::of(move || look(&namespace))
    }
}

impl fmt::Debug for NamespaceKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamespaceKeys").finish_non_exhaustive()
    }
}

impl fmt::Debug for ImageKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageKeys").finish_non_exhaustive()
    }
}
