//! Public keys that verify the signatures of pod images.

use std::fmt;
use std::sync::Arc;

use coracle_image::PublicKeys;

type KeySource = dyn Fn() -> Result<Option<PublicKeys>, String> + Send + Sync;

/// Keys of which one must have signed the images of a pod, by the current policy of its cluster. Clones share the source.
#[derive(Clone)]
pub struct ImageKeys(Arc<KeySource>);

impl Default for ImageKeys {
    /// Keys of a node without a policy: no signature is required.
    fn default() -> Self {
        Self::of(|| Ok(None))
    }
}

impl ImageKeys {
    /// Returns keys that `look` provides: `None` when no signature is required, or the reason why the keys are not known; then
    /// no image may be used.
    #[must_use]
    pub fn of(look: impl Fn() -> Result<Option<PublicKeys>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }

    /// Returns the current keys; `None`: no signature is required.
    ///
    /// # Errors
    /// The reason why the keys are not known.
    pub fn now(&self) -> Result<Option<PublicKeys>, String> {
        (self.0)()
    }
}

type NamespaceKeySource = dyn Fn(&str) -> Result<Option<PublicKeys>, String> + Send + Sync;

/// [`ImageKeys`] of each namespace. Clones share the source.
#[derive(Clone)]
pub struct NamespaceKeys(Arc<NamespaceKeySource>);

impl Default for NamespaceKeys {
    /// Keys of a node without a policy: no signature is required.
    fn default() -> Self {
        Self::of(|_| Ok(None))
    }
}

impl NamespaceKeys {
    /// Returns keys that `look` provides for a namespace, like [`ImageKeys::of`].
    #[must_use]
    pub fn of(look: impl Fn(&str) -> Result<Option<PublicKeys>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }

    /// Returns the keys for pods of a namespace.
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
