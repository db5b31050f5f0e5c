//! `docker-archive:FILE`: a tar with `manifest.json`, configurations and layers.
//!
//! The file is read twice, because `manifest.json` usually comes last: first for the small members, then for
//! the layers. Layers go into the store as they are; the OCI manifest around them is ours.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read},
    path::Path,
    sync::Arc,
};

use serde::Deserialize;

use super::{Brought, check_diff_id, invalid, take_over};
use crate::{
    Digest, Image, ImageError, Limits, Progress, Reference, Source, Step,
    manifest::{self, Blob, Config, Document, Packing},
    progress::Meter,
    rootfs::{Budget, Unpacked},
    store::{Inner, layout, prune},
    tarball::{Kind, Reader},
};

const MANIFEST: &[u8] = b"manifest.json";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Item {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// What the first reading finds.
#[derive(Default)]
struct Contents {
    manifest: Option<Vec<u8>>,
    /// Other small JSON members by name; one of them is the configuration.
    small: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Old versions of docker store a layer that occurs twice as a link to the first.
    links: BTreeMap<Vec<u8>, Vec<u8>>,
}

pub(super) fn import(
    inner: &Inner,
    source: &Source,
    file: &Path,
    name: Option<Reference>,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let limits = &inner.options.limits;
    let contents = read(file, limits, |archive| contents(archive, limits))?;
    let item = item(&contents, source)?;
    let config_bytes = contents.small.get(item.config.as_bytes());
    let config_bytes = config_bytes
        .ok_or_else(|| invalid(source, format!("its configuration {} is missing", item.config)))?
        .clone();
    // Judged before gigabytes are copied.
    let config = Config::parse(&config_bytes, limits)?;
    config.check(item.layers.len(), &inner.options.platform, &source.to_string())?;
    if item.layers.len() > limits.layers {
        return Err(ImageError::hostile(format!(
            "{} layers, at most {} are allowed",
            item.layers.len(),
            limits.layers
        )));
    }
    let mut copies = Copies::new(inner, &item, &contents, progress);
    let copied = read(file, limits, |archive| copies.take(archive)).and_then(|()| copies.finish(source));
    let imported = copied.and_then(|layers| {
        let mut pairs = layers.iter().zip(config.diff_ids());
        pairs.try_for_each(|(layer, diff_id)| {
            check_diff_id(inner, &inner.layout.blob(&layer.digest), layer, diff_id)
        })?;
        let brought = compose(config_bytes, &layers, names(&item, source)?, limits)?;
        take_over(inner, brought, name, source, |_, _| Ok(()))
    });
    let new = std::mem::take(&mut copies.new);
    drop(copies);
    if imported.is_err() {
        prune::discard(inner, &new)?;
    }
    imported
}

/// Opens the archive, compressed or not, and reads it with `work`.
fn read<T>(
    file: &Path,
    limits: &Limits,
    work: impl FnOnce(&mut Reader<'_, &mut Unpacked<'_>>) -> Result<T, ImageError>,
) -> Result<T, ImageError> {
    let open = || File::open(file).map_err(|e| ImageError::io("open", file, e));
    let mut head = [0; 4];
    let got = open()?.read(&mut head).map_err(|e| ImageError::io("read", file, e))?;
    let packing = Packing::of_magic(&head[..got]);
    // Layers inside may themselves be compressed: the outer archive gets a budget of its own.
    let mut budget = Budget { unpacked_bytes: limits.unpacked_bytes, entries: limits.entries };
    let mut stream =
        Unpacked::new(open()?, packing, &mut budget, None).map_err(|e| ImageError::io("read", file, e))?;
    work(&mut Reader::new(&mut stream, limits))
}

fn contents(archive: &mut Reader<'_, &mut Unpacked<'_>>, limits: &Limits) -> Result<Contents, ImageError> {
    let mut contents = Contents::default();
    let mut held = 0;
    while let Some(member) = archive.next_member()? {
        archive.input_mut().count_entry()?;
        let name = plain(&member.path);
        match member.kind {
            Kind::File if name == MANIFEST => {
                contents.manifest = Some(small(archive, member.size_bytes, limits.manifest_bytes)?)
            }
            // Configurations have a digest for a name: plain, with `.json`, or below `blobs/`.
            Kind::File
                if is_config(&name)
                    && member.size_bytes <= limits.config_bytes
                    && held <= 16 * limits.config_bytes =>
            {
                held += member.size_bytes;
                contents.small.insert(name, small(archive, member.size_bytes, limits.config_bytes)?);
            }
            Kind::Symlink(target) if contents.links.len() <= 4 * limits.layers => {
                drop(contents.links.insert(name.clone(), resolve(&name, &target)))
            }
            Kind::HardLink(target) if contents.links.len() <= 4 * limits.layers => {
                drop(contents.links.insert(name, plain(&target)))
            }
            _ => {}
        }
    }
    Ok(contents)
}

fn is_config(name: &[u8]) -> bool {
    let stem = name.strip_suffix(b".json").unwrap_or(name);
    let stem = stem.strip_prefix(b"blobs/sha256/").unwrap_or(stem);
    stem.len() == 64 && stem.iter().all(u8::is_ascii_hexdigit)
}

fn small(archive: &mut impl Read, size: u64, max: u64) -> Result<Vec<u8>, ImageError> {
    if size > max {
        return Err(ImageError::hostile(format!(
            "archive member of {size} bytes, at most {max} are allowed"
        )));
    }
    let mut bytes = Vec::new();
    archive.read_to_end(&mut bytes).map_err(crate::tarball::read_error)?;
    Ok(bytes)
}

fn plain(path: &[u8]) -> Vec<u8> {
    path.strip_prefix(b"./").unwrap_or(path).to_vec()
}

/// A link's target as a member name: only `..` at its beginning occurs.
fn resolve(from: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = from.split(|b| *b == b'/').collect();
    parts.pop();
    for part in target.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join(&b'/')
}

fn item(contents: &Contents, source: &Source) -> Result<Item, ImageError> {
    let bytes = contents.manifest.as_deref().ok_or_else(|| invalid(source, "it has no manifest.json"))?;
    let mut items: Vec<Item> = serde_json::from_slice(bytes)
        .map_err(|e| invalid(source, format!("its manifest.json does not parse: {e}")))?;
    match (items.pop(), items.len()) {
        (Some(item), 0) => Ok(item),
        (None, _) => Err(invalid(source, "it holds no image")),
        (Some(_), more) => Err(invalid(source, format!("it holds {} images; save one at a time", more + 1))),
    }
}

fn names(item: &Item, source: &Source) -> Result<Vec<Reference>, ImageError> {
    let tags = item.repo_tags.as_deref().unwrap_or_default();
    let parse = |tag: &String| {
        tag.parse().map_err(|_| invalid(source, format!("it names itself {tag:?}, which is no reference")))
    };
    tags.iter().map(parse).collect()
}

/// Copies layers out of the archive as they come by.
struct Copies<'a> {
    inner: &'a Inner,
    progress: &'a Arc<dyn Progress>,
    /// Member names in layer order, links resolved.
    wanted: Vec<Vec<u8>>,
    found: BTreeMap<Vec<u8>, Blob>,
    new: Vec<Digest>,
    /// Keeps prune away from what was copied and has no name yet.
    pinned: Vec<crate::store::locks::Pinned>,
}

impl<'a> Copies<'a> {
    fn new(inner: &'a Inner, item: &Item, contents: &Contents, progress: &'a Arc<dyn Progress>) -> Self {
        let follow = |name: &String| {
            let name = plain(name.as_bytes());
            contents.links.get(&name).cloned().unwrap_or(name)
        };
        let wanted = item.layers.iter().map(follow).collect();
        Self { inner, progress, wanted, found: BTreeMap::new(), new: Vec::new(), pinned: Vec::new() }
    }

    fn take(&mut self, archive: &mut Reader<'_, &mut Unpacked<'_>>) -> Result<(), ImageError> {
        while let Some(member) = archive.next_member()? {
            let name = plain(&member.path);
            if member.kind == Kind::File && self.wanted.contains(&name) {
                let blob = self.copy(archive)?;
                self.found.insert(name, blob);
            }
        }
        Ok(())
    }

    fn copy(&mut self, archive: &mut impl Read) -> Result<Blob, ImageError> {
        let mut peek = BufReader::with_capacity(64 << 10, archive);
        let head = std::io::BufRead::fill_buf(&mut peek).map_err(crate::tarball::read_error)?;
        let packing = Packing::of_magic(head);
        let mut blob = layout::copy_blob(&self.inner.layout, &mut peek, |digest| {
            self.pinned.push(self.inner.pins.pin([*digest]));
            self.new.push(*digest);
            Ok(())
        })?;
        blob.media_type = packing.oci_media_type().to_owned();
        Meter::new(self.progress, Step::Download, Some(blob.digest), blob.size_bytes).at(blob.size_bytes);
        Ok(blob)
    }

    /// Layers in order.
    fn finish(&self, source: &Source) -> Result<Vec<Blob>, ImageError> {
        let layer = |name: &Vec<u8>| {
            let missing =
                || invalid(source, format!("its layer {} is missing", String::from_utf8_lossy(name)));
            self.found.get(name).cloned().ok_or_else(missing)
        };
        self.wanted.iter().map(layer).collect()
    }
}

fn compose(
    config_bytes: Vec<u8>,
    layers: &[Blob],
    names: Vec<Reference>,
    limits: &Limits,
) -> Result<Brought, ImageError> {
    let descriptor = |media_type: &str, digest: &Digest, size: u64| serde_json::json!({"mediaType": media_type, "digest": digest, "size": size});
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": manifest::OCI_MANIFEST,
        "config": descriptor(manifest::OCI_CONFIG, &Digest::of(&config_bytes), config_bytes.len() as u64),
        "layers": layers.iter().map(|l| descriptor(&l.media_type, &l.digest, l.size_bytes)).collect::<Vec<_>>(),
    });
    let manifest_bytes = manifest.to_string().into_bytes();
    match manifest::parse(&manifest_bytes, None, limits)? {
        Document::Manifest(manifest) => {
            Ok(Brought { manifest, manifest_bytes, config_bytes, index: None, names })
        }
        Document::Index(_) => Err(ImageError::unsupported("an index inside an archive")),
    }
}
