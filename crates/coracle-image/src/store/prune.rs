//! Mark and sweep.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use super::{
    Inner,
    index::{self, Index},
    layout,
};
use crate::{Digest, ImageError, manifest};

/// What a prune removed, or would remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Each file, in order of path.
    pub removed: Vec<Removed>,
    /// Bytes on disk of all of them.
    pub freed_bytes: u64,
}

/// One removed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Path of the file.
    pub path: PathBuf,
    /// Bytes it took on disk.
    pub bytes: u64,
}

/// Everything that must stay.
#[derive(Default)]
struct Marked {
    manifests: HashSet<Digest>,
    blobs: HashSet<Digest>,
    rootfs: HashSet<Digest>,
}

/// Sweeps what nothing needs. Holds the index meanwhile, so that no image appears between marking and
/// sweeping.
pub(super) fn prune(
    inner: &Inner,
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
    sweep(inner, &layout.blobs(), &marked.blobs, dry_run, &mut report)?;
    sweep(inner, &layout.rootfs_dir(), &marked.rootfs, dry_run, &mut report)?;
    sweep(inner, &layout.partials(), &HashSet::new(), dry_run, &mut report)?;
    report.removed.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(report)
}

/// Removes blobs and unfinished downloads of a failed pull, but for those that something else needs.
pub(crate) fn discard(inner: &Inner, digests: &[Digest]) -> Result<(), ImageError> {
    let index = inner.index();
    let marked = mark(inner, &index, &HashSet::new())?;
    for digest in digests.iter().filter(|d| !marked.blobs.contains(d)) {
        let remove =
            || layout::remove(&inner.layout.blob(digest)).and(layout::remove(&inner.layout.partial(digest)));
        inner.pins.unless_pinned(digest, remove).transpose()?;
    }
    Ok(())
}

fn mark(inner: &Inner, index: &Index, in_use: &HashSet<Digest>) -> Result<Marked, ImageError> {
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
    inner: &Inner,
    dir: &Path,
    keep: &HashSet<Digest>,
    dry_run: bool,
    report: &mut PruneReport,
) -> Result<(), ImageError> {
    let fail = |e| ImageError::io("sweep", dir, e);
    for entry in fs::read_dir(dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        // Files with other names are not ours to remove.
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
