//! Images that were found to be signed, by their digest and the keys. They are kept in a file: a container that is started
//! again after the daemon was has no credentials by which its registry could be asked again.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_image::PublicKeys;
use coracle_oci::Digest;
use parking_lot::Mutex;

use crate::files;

/// Images that are remembered. With more of them, all are looked for again.
const IMAGES_MAX: usize = 4096;

/// What was found, kept in a file.
#[derive(Debug)]
pub(crate) struct SignedImages {
    file: PathBuf,
    /// Digests of images, and fingerprints of the keys.
    known: Mutex<BTreeSet<(Digest, Digest)>>,
}

impl SignedImages {
    /// Those of a state directory. A file that cannot be read as such is one without images.
    pub(crate) fn open(state: &Path) -> io::Result<Arc<Self>> {
        let file = state.join("signed-images.json");
        let known = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => return Err(error),
        };
        Ok(Arc::new(Self { file, known: Mutex::new(known) }))
    }

    /// One of these keys was found to have signed the image.
    pub(crate) fn has(&self, image: &Digest, keys: &PublicKeys) -> bool {
        self.known.lock().contains(&(*image, keys.fingerprint()))
    }

    /// Remembers that. Idempotent.
    ///
    /// # Errors
    /// Those of the file: the image is remembered until the daemon ends.
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
