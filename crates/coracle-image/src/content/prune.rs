//! Prune of the store by mark and sweep.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use super::{
    ContentStore,
    index::{self, Index},
    layout,
};
use crate::{ImageError, manifest};
use coracle_oci::Digest;

/// Result of a prune, or of its dry run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Removed files, sorted by path.
    pub removed: Vec<Removed>,
    /// Bytes on disk of the removed files.
    pub freed_bytes: u64,
}

/// Removed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Path of the file.
    pub path: PathBuf,
    /// Bytes on disk.
    pub bytes: u64,
}

/// Content to keep.
#[derive(Default)]
struct Marked {
    manifests: HashSet<Digest>,
    blobs: HashSet<Digest>,
    rootfs: HashSet<Digest>,
}

/// Sweeps unmarked content. Locks the index, so that no image appears between marking and sweeping.
pub(crate) fn prune(
    inner: &ContentStore,
    in_use: &HashSet<Digest>,
    dry_run: bool,
) -> Result<PruneReport, ImageError> {
    let mut index = inner.index();
    let marked = mark(inner, &index, in_use)?;
    if !dry_run {
        let mut next = index.clone();
        next.entries.retain(|e| marked.manifests.contains(&e.digest));
        if next != *index {
            index::save(&inner.layout, &next)?;
            *index = next;
        }
    }
    let mut report = PruneReport::default();
    let layout = &inner.layout;
    for dir in layout.blob_dirs() {
        sweep(inner, &dir, &marked.blobs, dry_run, &mut report)?;
    }
    sweep(inner, &layout.rootfs_dir(), &marked.rootfs, dry_run, &mut report)?;
    sweep(inner, &layout.partials(), &HashSet::new(), dry_run, &mut report)?;
    report.removed.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(report)
}

/// Removes blobs and partial downloads of a failed pull, unless another image needs them.
pub(crate) fn discard(inner: &ContentStore, digests: &[Digest]) -> Result<(), ImageError> {
    let index = inner.index();
    let marked = mark(inner, &index, &HashSet::new())?;
    for digest in digests.iter().filter(|d| !marked.blobs.contains(d)) {
        let remove =
            || layout::remove(&inner.layout.blob(digest)).and(layout::remove(&inner.layout.partial(digest)));
        inner.pins.unless_pinned(digest, remove).transpose()?;
    }
    Ok(())
}

fn mark(inner: &ContentStore, index: &Index, in_use: &HashSet<Digest>) -> Result<Marked, ImageError> {
    let named = index.entries.iter().filter(|e| e.reference.is_some()).map(|e| e.digest);
    let mut marked = Marked::default();
    for digest in named.chain(in_use.iter().copied()) {
        marked.manifests.insert(digest);
        marked.blobs.insert(digest);
        if let Some((manifest, config)) = inner.manifest(&digest)? {
            marked.blobs.insert(manifest.config.digest);
            marked.blobs.extend(manifest.layers.iter().map(|l| l.digest));
            marked.rootfs.insert(manifest::chain_id(config.diff_ids()));
        }
    }
    Ok(marked)
}

fn sweep(
    inner: &ContentStore,
    dir: &Path,
    keep: &HashSet<Digest>,
    dry_run: bool,
    report: &mut PruneReport,
) -> Result<(), ImageError> {
    let fail = |e| ImageError::io("sweep", dir, e);
    for entry in fs::read_dir(dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        // Files with other names are kept.
        let digest =
            path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| Digest::from_hex(stem).ok());
        let Some(digest) = digest.filter(|d| !keep.contains(d)) else { continue };
        let bytes = fs::metadata(&path).map_or(0, |m| std::os::unix::fs::MetadataExt::blocks(&m) * 512);
        let remove = || if dry_run { Ok(()) } else { layout::remove(&path) };
        if inner.pins.unless_pinned(&digest, remove).transpose()?.is_some() {
            report.freed_bytes += bytes;
            report.removed.push(Removed { path, bytes });
        }
    }
    Ok(())
}
