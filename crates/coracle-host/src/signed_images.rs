//! Images whose signatures were verified, by digest and keys. They are stored in a file, because a container that is started
//! after a restart of the daemon has no credentials to ask its registry again.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_image::PublicKeys;
use coracle_oci::Digest;
use parking_lot::Mutex;

use crate::files;

/// Maximum number of stored images. When it is exceeded, all of them are verified again.
const IMAGES_MAX: usize = 4096;

/// Verified images, stored in a file.
#[derive(Debug)]
pub(crate) struct SignedImages {
    file: PathBuf,
    /// Digests of images, and fingerprints of their keys.
    known: Mutex<BTreeSet<(Digest, Digest)>>,
}

impl SignedImages {
    /// Opens the file of a state directory. An unreadable file counts as empty.
    pub(crate) fn open(state: &Path) -> io::Result<Arc<Self>> {
        let file = state.join("signed-images.json");
        let known = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => return Err(error),
        };
        Ok(Arc::new(Self { file, known: Mutex::new(known) }))
    }

    /// Whether one of these keys is known to have signed the image.
    pub(crate) fn has(&self, image: &Digest, keys: &PublicKeys) -> bool {
        self.known.lock().contains(&(*image, keys.fingerprint()))
    }

    /// Stores the image as verified. Idempotent.
    ///
    /// # Errors
    /// Errors of the file: the image is remembered until the daemon ends.
    pub(crate) async fn add(self: &Arc<Self>, image: Digest, keys: &PublicKeys) -> io::Result<()> {
        let (images, found) = (self.clone(), (image, keys.fingerprint()));
        files::blocking(move || {
            let mut known = images.known.lock();
            if known.len() >= IMAGES_MAX {
                known.clear();
            }
            known.insert(found);
            let text = serde_json::to_vec(&*known).map_err(io::Error::other)?;
            files::write_atomic(&images.file, &text)
        })
        .await
    }
}
