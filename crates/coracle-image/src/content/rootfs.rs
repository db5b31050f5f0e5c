//! Root file systems of the store, built on demand.

use std::{fs::File, path::PathBuf, sync::Arc};

use coracle_oci::{Digest, OciError, Progress};
use coracle_types::RootfsLayout;

use super::{ContentStore, StoreOptions, blocking};
use crate::{Compression, Image, ImageError, Layer, Rootfs, erofs, manifest, rootfs};

/// Key of the lock of a root file system. The chain id is hashed, because it may also be the digest of a blob.
fn rootfs_key(chain_id: &Digest) -> Digest {
    Digest::of(format!("rootfs {chain_id}").as_bytes())
}

impl ContentStore {
    /// Root file system of an image, see [`crate::Store::rootfs_in`].
    pub(crate) async fn rootfs(
        self: Arc<Self>,
        image: &Image,
        layout: Option<RootfsLayout>,
        progress: Arc<dyn Progress>,
    ) -> Result<Rootfs, ImageError> {
        let pinned =
            self.pins.pin(image.layers.iter().map(|l| l.digest).chain([image.digest, image.chain_id]));
        let guard = self.locks.lock(rootfs_key(&image.chain_id)).await;
        let image = image.clone();
        blocking(move || {
            let built = self.ensure_rootfs(&image, layout, progress);
            drop((guard, pinned));
            built
        })
        .await
    }

    /// File of the image's root file system in this layout. `None` accepts either: the root directory comes last where it does not
    /// fit, and in files of earlier versions.
    pub(crate) fn built_rootfs(&self, image: &Image, layout: Option<RootfsLayout>) -> Option<PathBuf> {
        let acceptable = match layout {
            Some(layout) => vec![layout],
            None => vec![RootfsLayout::RootFirst, RootfsLayout::RootLast],
        };
        let is_complete = |path: &PathBuf| {
            let uuid = rootfs::uuid(&image.chain_id);
            let file = File::open(path);
            file.and_then(|file| erofs::identity(&file, &uuid, RootfsLayout::of(path))).unwrap_or(false)
        };
        acceptable.into_iter().map(|layout| self.layout.rootfs(&image.chain_id, layout)).find(is_complete)
    }

    /// Builds the root file system unless it exists. The caller holds the lock of `rootfs_key`.
    fn ensure_rootfs(
        &self,
        image: &Image,
        layout: Option<RootfsLayout>,
        progress: Arc<dyn Progress>,
    ) -> Result<Rootfs, ImageError> {
        let built = |path: PathBuf| match std::fs::metadata(&path) {
            Ok(meta) => Ok(Rootfs { bytes: meta.len(), path }),
            Err(e) => Err(ImageError::io("stat", path, e)),
        };
        if let Some(path) = self.built_rootfs(image, layout) {
            return built(path);
        }
        let job = self.rootfs_job(image, layout.unwrap_or(RootfsLayout::RootFirst), progress)?;
        let temp = self.layout.temp_file()?;
        let file = temp.reopen().map_err(|e| ImageError::io("open", temp.path(), e))?;
        let path = self.layout.rootfs(&image.chain_id, rootfs::build(&job, file)?);
        self.layout.publish(temp, &path, 0o444)?;
        built(path)
    }

    fn rootfs_job(
        &self,
        image: &Image,
        layout: RootfsLayout,
        progress: Arc<dyn Progress>,
    ) -> Result<rootfs::Job, ImageError> {
        let layer = |layer: &Layer| {
            let path = self.layout.blob(&layer.digest);
            if !path.exists() {
                return Err(ImageError::NotPresent {
                    image: format!("{} (its layer {} is missing)", image.digest, layer.digest),
                });
            }
            let compression = Compression::of_media_type(&layer.media_type)?;
            Ok(rootfs::LayerFile {
                path,
                compression,
                digest: layer.digest,
                diff_id: layer.diff_id,
                size_bytes: layer.size_bytes,
            })
        };
        let layers = image.layers.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
        let chain_id = manifest::chain_id(&layers.iter().map(|l| l.diff_id).collect::<Vec<_>>());
        if chain_id != image.chain_id {
            let what = format!("layers of image {}", image.digest);
            return Err(OciError::digest_mismatch(what, image.chain_id, chain_id).into());
        }
        let StoreOptions { limits, reserve_bytes, .. } = &self.options;
        let (limits, reserve_bytes) = (limits.clone(), *reserve_bytes);
        Ok(rootfs::Job { layers, chain_id, layout, limits, reserve_bytes, progress })
    }
}
