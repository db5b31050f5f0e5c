//! Builds the root file system of one image.

use std::{collections::BTreeSet, fs::File, path::PathBuf, sync::Arc};

use super::{
    Budget, Unpacked, flatten,
    layer::{self, LayerReader},
    tree::{Child, Content, Dir, DirId, InodeId, Tree},
};
use crate::{
    Digest, ImageError, Limits, Progress, Step,
    erofs::{self, DataWriter},
    manifest::Packing,
    progress::Meter,
};

/// Small files held in memory until the inodes are written; beyond that they get blocks like the large ones.
const INLINE_BYTES_MAX: u64 = 64 << 20;

/// A layer as stored.
pub(crate) struct LayerFile {
    pub(crate) path: PathBuf,
    pub(crate) packing: Packing,
    pub(crate) digest: Digest,
    pub(crate) diff_id: Digest,
    pub(crate) size_bytes: u64,
}

/// One root file system to build.
pub(crate) struct Job {
    /// From the lowest to the topmost.
    pub(crate) layers: Vec<LayerFile>,
    pub(crate) chain_id: Digest,
    pub(crate) limits: Limits,
    pub(crate) progress: Arc<dyn Progress>,
}

/// The uuid of an image's root file system.
pub(crate) fn uuid(chain_id: &Digest) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&chain_id.bytes()[..16]);
    uuid
}

/// Writes the root file system into the empty `file`. The same layers give the same bytes. Blocking.
///
/// # Errors
/// [`ImageError::Hostile`] for what must not be unpacked, [`ImageError::DigestMismatch`] when a layer is not
/// what the configuration promised, [`ImageError::Unsupported`], [`ImageError::StorageFull`],
/// [`ImageError::Io`]. The file is then worthless.
pub(crate) fn build(job: &Job, file: File) -> Result<File, ImageError> {
    let mut builder = Builder {
        tree: Tree::default(),
        data: DataWriter::new(file),
        inline_left: INLINE_BYTES_MAX,
        budget: Budget { unpacked_bytes: job.limits.unpacked_bytes, entries: job.limits.entries },
        waiting: Vec::new(),
    };
    let root = builder.tree.new_dir(Dir::default())?;
    for layer in job.layers.iter().rev() {
        builder.layer(job, layer, root)?;
    }
    let objects = flatten::flatten(&builder.tree, root)?;
    erofs::write(builder.data, &objects, uuid(&job.chain_id))
        .map_err(|e| ImageError::io("write", "a root file system", e))
}

struct Builder {
    tree: Tree,
    data: DataWriter,
    inline_left: u64,
    budget: Budget,
    /// Hard links of the layers read so far whose target is in a lower one.
    waiting: Vec<InodeId>,
}

impl Builder {
    /// Reads one layer and lays it under the others. It is read a second time when a hard link shows a file
    /// whose bytes were passed over because its own name is hidden: that is rare, and the first pass cannot
    /// know.
    fn layer(&mut self, job: &Job, layer: &LayerFile, upper: DirId) -> Result<(), ImageError> {
        let mut forced = BTreeSet::new();
        let (mark, position, inline_left, budget) =
            (self.tree.mark(), self.data.position(), self.inline_left, self.budget.clone());
        loop {
            let root = self.tree.new_dir(Dir::default())?;
            let mut wanted = self.pass(job, layer, upper, root, &forced)?;
            let waiting: Vec<InodeId> = self.waiting.iter().copied().chain(self.pending(root)).collect();
            let layer::Bound { still, bound } = layer::bind(&mut self.tree, root, &waiting, &mut wanted)?;
            if wanted.is_subset(&forced) {
                for (link, target) in bound {
                    self.tree.inodes[link.0 as usize].content = Content::Alias(target);
                }
                self.waiting = still;
                self.tree.lay_under(upper, root);
                return Ok(());
            }
            forced.append(&mut wanted);
            self.tree.rewind(mark);
            self.data.rewind(position).map_err(|e| ImageError::io("cut", "a root file system", e))?;
            (self.inline_left, self.budget) = (inline_left, budget.clone());
        }
    }

    /// Reads the archive into a tree of its own and checks it against the configuration. Returns hidden
    /// members that links show.
    fn pass(
        &mut self,
        job: &Job,
        layer: &LayerFile,
        upper: DirId,
        root: DirId,
        forced: &BTreeSet<u64>,
    ) -> Result<BTreeSet<u64>, ImageError> {
        let meter = Meter::new(&job.progress, Step::Unpack, Some(layer.digest), layer.size_bytes);
        let mut stream = Unpacked::open(&layer.path, layer.packing, &mut self.budget, Some(meter))?;
        let mut reader = LayerReader {
            tree: &mut self.tree,
            upper,
            root,
            data: &mut self.data,
            inline_left: &mut self.inline_left,
            forced,
            wanted: BTreeSet::new(),
            limits: &job.limits,
        };
        reader.read(&mut stream)?;
        let wanted = reader.wanted;
        let actual = stream.digest();
        if actual != layer.diff_id {
            return Err(ImageError::DigestMismatch {
                what: format!("unpacked layer {}", layer.digest),
                expected: layer.diff_id,
                actual,
            });
        }
        Ok(wanted)
    }

    /// Links of the layer at `root` that wait for their target.
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
