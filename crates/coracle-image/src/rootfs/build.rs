//! Builds the root file system of one image.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::PathBuf,
    sync::Arc,
};

use super::{
    flatten,
    layer::{self, LayerReader},
    tree::{Child, Content, Dir, DirId, InodeId, Tree},
};
use crate::{
    Budget, Compression, DecompressReader, ImageError, Limits,
    erofs::{self, DataWriter},
    space::Guard,
};
use coracle_oci::{Digest, Meter, OciError, Progress, Step};
use coracle_types::RootfsLayout;

/// Limit of small-file content held in memory until the inodes are written, bytes. Further files are stored in blocks.
const INLINE_BYTES_MAX: u64 = 64 << 20;

/// Layer file in the store.
pub(crate) struct LayerFile {
    pub(crate) path: PathBuf,
    pub(crate) compression: Compression,
    pub(crate) digest: Digest,
    pub(crate) diff_id: Digest,
    pub(crate) size_bytes: u64,
}

/// Inputs of the build of one root file system.
pub(crate) struct Job {
    /// Layers from the lowest to the topmost.
    pub(crate) layers: Vec<LayerFile>,
    pub(crate) chain_id: Digest,
    /// Wanted layout.
    pub(crate) layout: RootfsLayout,
    pub(crate) limits: Limits,
    /// Bytes that stay free on the file system. `None`: the default.
    pub(crate) reserve_bytes: Option<u64>,
    pub(crate) progress: Arc<dyn Progress>,
}

/// UUID of the root file system with this chain id.
pub(crate) fn uuid(chain_id: &Digest) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&chain_id.bytes()[..16]);
    uuid
}

/// Writes the root file system into the empty `file`, and returns its layout: that of the job if the root directory fits. Equal
/// layers give equal bytes. Blocking.
///
/// # Errors
/// `OciError::Hostile`, `OciError::DigestMismatch` when a layer does not match its diff id,
/// `OciError::Unsupported`, `OciError::StorageFull`, `OciError::Io`. The content of the file is then
/// undefined.
pub(crate) fn build(job: &Job, file: File) -> Result<RootfsLayout, ImageError> {
    let guard = Guard::new(&file, job.reserve_bytes);
    let guard = guard.map_err(|e| ImageError::io("stat", "a root file system", e))?;
    let mut builder = Builder {
        tree: Tree::default(),
        data: DataWriter::guarded(file, guard),
        inline_left: INLINE_BYTES_MAX,
        budget: Budget::of(&job.limits),
        waiting: Vec::new(),
    };
    let root = builder.tree.new_dir(Dir::default())?;
    for layer in job.layers.iter().rev() {
        builder.layer(job, layer, root)?;
    }
    let objects = flatten::flatten(&builder.tree, root)?;
    let written = erofs::write(builder.data, &objects, uuid(&job.chain_id), job.layout);
    written.map_err(|e| ImageError::io("write", "a root file system", e))
}

struct Builder {
    tree: Tree,
    data: DataWriter,
    inline_left: u64,
    budget: Budget,
    /// Hard links of upper layers whose target must be in a lower layer.
    waiting: Vec<InodeId>,
}

impl Builder {
    /// Reads one layer and merges it under the layers read so far. Reads it a second time when a hard link needs a file whose
    /// own name is hidden and whose bytes were skipped, which is rare.
    fn layer(&mut self, job: &Job, layer: &LayerFile, upper: DirId) -> Result<(), ImageError> {
        let mut forced = BTreeSet::new();
        let (mark, position, inline_left, budget) =
            (self.tree.mark(), self.data.position(), self.inline_left, self.budget.clone());
        loop {
            let root = self.tree.new_dir(Dir::default())?;
            let mut wanted = self.pass(job, layer, upper, root, &forced)?;
            let waiting: Vec<InodeId> = self.waiting.iter().copied().chain(self.pending(root)).collect();
            let layer::Bound { still, bound } = layer::bind(&self.tree, root, &waiting, &mut wanted);
            if wanted.is_subset(&forced) {
                for (link, content) in bound {
                    self.tree.inodes[link.0 as usize].content = content;
                }
                self.waiting = still;
                self.tree.follow_links(upper, root)?;
                self.tree.merge_lower(upper, root);
                return Ok(());
            }
            forced.append(&mut wanted);
            self.tree.rewind(mark);
            self.data.rewind(position).map_err(|e| ImageError::io("cut", "a root file system", e))?;
            (self.inline_left, self.budget) = (inline_left, budget.clone());
        }
    }

    /// Reads the archive into a tree of its own and verifies its diff id. Returns the hidden members that hard links need.
    fn pass(
        &mut self,
        job: &Job,
        layer: &LayerFile,
        upper: DirId,
        root: DirId,
        forced: &BTreeSet<u64>,
    ) -> Result<BTreeSet<u64>, ImageError> {
        let meter = Meter::new(&job.progress, Step::Unpack, Some(layer.digest), layer.size_bytes);
        let mut stream =
            DecompressReader::open(&layer.path, layer.compression, &mut self.budget, Some(meter))?
                .hashed_like(&layer.diff_id);
        let mut reader = LayerReader {
            tree: &mut self.tree,
            upper,
            root,
            data: &mut self.data,
            inline_left: &mut self.inline_left,
            forced,
            wanted: BTreeSet::new(),
            aufs: BTreeMap::new(),
            limits: &job.limits,
        };
        reader.read(&mut stream)?;
        let wanted = reader.wanted;
        let actual = stream.digest();
        if actual != layer.diff_id {
            let what = format!("unpacked layer {}", layer.digest);
            return Err(OciError::digest_mismatch(what, layer.diff_id, actual).into());
        }
        Ok(wanted)
    }

    /// Hard links of the layer at `root` whose target is not resolved.
    fn pending(&self, root: DirId) -> Vec<InodeId> {
        let mut found = Vec::new();
        let mut dirs = vec![root];
        while let Some(dir) = dirs.pop() {
            for child in self.tree.dir(dir).children.values() {
                match child {
                    Child::Dir(dir) => dirs.push(*dir),
                    Child::Leaf(inode) if matches!(self.tree.inode(*inode).content, Content::Pending(_)) => {
                        found.push(*inode)
                    }
                    Child::Leaf(_) | Child::Whiteout => {}
                }
            }
        }
        found
    }
}
