//! `docker-archive:FILE`: a tar archive with `manifest.json`, configurations and layers.
//!
//! The file is read twice, because `manifest.json` usually comes last: first for the small members, then for the layers. Layers
//! are stored unchanged, with a new OCI manifest.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read},
    path::Path,
    sync::Arc,
};

use serde::Deserialize;

use super::{ImportedImage, check_diff_id, invalid, store_image};
use crate::{
    Budget, Compression, DecompressReader, Image, ImageError, Limits, Source,
    content::{ContentStore, layout, prune},
    manifest::{self, Config, Document},
    tarball::{Kind, Reader},
};
use coracle_oci::{
    Algorithm, Descriptor, Digest, Meter, Progress, Reference, Step,
    media_types::{OCI_CONFIG, OCI_MANIFEST},
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

/// Members found by the first pass.
#[derive(Default)]
struct Contents {
    manifest: Option<Vec<u8>>,
    /// Other small JSON members by name. One of them is the configuration.
    small: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Links by name: old versions of docker store a repeated layer as a link to the first.
    links: BTreeMap<Vec<u8>, Vec<u8>>,
}

pub(super) fn import(
    inner: &ContentStore,
    source: &Source,
    file: &Path,
    name: Option<Reference>,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let limits = &inner.options.limits;
    let contents = read(file, limits, |archive| contents(archive, limits))?;
    let item = parse_item(&contents, source)?;
    let config_bytes = contents.small.get(item.config.as_bytes());
    let config_bytes = config_bytes
        .ok_or_else(|| invalid(source, format!("configuration {} is missing", item.config)))?
        .clone();
    // Checks the configuration before gigabytes are copied.
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
        let imported = compose(config_bytes, &layers, names(&item, source)?, limits)?;
        store_image(inner, imported, name, source, |_, _| Ok(()))
    });
    let new = std::mem::take(&mut copies.new);
    drop(copies);
    if imported.is_err() {
        prune::discard(inner, &new)?;
    }
    imported
}

/// Opens the archive, compressed or not, and calls `work`.
fn read<T>(
    file: &Path,
    limits: &Limits,
    work: impl FnOnce(&mut Reader<'_, &mut DecompressReader<'_>>) -> Result<T, ImageError>,
) -> Result<T, ImageError> {
    let open = || File::open(file).map_err(|e| ImageError::io("open", file, e));
    let mut head = [0; 4];
    let got = open()?.read(&mut head).map_err(|e| ImageError::io("read", file, e))?;
    let compression = Compression::of_magic(&head[..got]);
    // Layers may be compressed too: the outer archive has a budget of its own.
    let mut budget = Budget::of(limits);
    let mut stream = DecompressReader::new(open()?, compression, &mut budget, None)
        .map_err(|e| ImageError::io("read", file, e))?;
    work(&mut Reader::new(&mut stream, limits))
}

fn contents(
    archive: &mut Reader<'_, &mut DecompressReader<'_>>,
    limits: &Limits,
) -> Result<Contents, ImageError> {
    let mut contents = Contents::default();
    let mut held = 0;
    while let Some(member) = archive.next_member()? {
        archive.input_mut().count_entry()?;
        let name = strip_dot_slash(&member.path);
        match member.kind {
            Kind::File if name == MANIFEST => {
                contents.manifest =
                    Some(read_small_member(archive, member.size_bytes, limits.manifest_bytes)?)
            }
            // Names of configurations are digests: plain, with `.json`, or below `blobs/`.
            Kind::File
                if is_config(&name)
                    && member.size_bytes <= limits.config_bytes
                    && held <= 16 * limits.config_bytes =>
            {
                held += member.size_bytes;
                contents
                    .small
                    .insert(name, read_small_member(archive, member.size_bytes, limits.config_bytes)?);
            }
            Kind::Symlink(target) if contents.links.len() <= 4 * limits.layers => {
                drop(contents.links.insert(name.clone(), resolve(&name, &target)))
            }
            Kind::HardLink(target) if contents.links.len() <= 4 * limits.layers => {
                drop(contents.links.insert(name, strip_dot_slash(&target)))
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

fn read_small_member(archive: &mut impl Read, size: u64, max: u64) -> Result<Vec<u8>, ImageError> {
    if size > max {
        return Err(ImageError::hostile(format!(
            "archive member of {size} bytes, at most {max} are allowed"
        )));
    }
    let mut bytes = Vec::new();
    archive.read_to_end(&mut bytes).map_err(crate::tarball::read_error)?;
    Ok(bytes)
}

fn strip_dot_slash(path: &[u8]) -> Vec<u8> {
    path.strip_prefix(b"./").unwrap_or(path).to_vec()
}

/// Member name that a link in `from` refers to. Resolves `.` and `..`.
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

fn parse_item(contents: &Contents, source: &Source) -> Result<Item, ImageError> {
    let bytes = contents.manifest.as_deref().ok_or_else(|| invalid(source, "manifest.json is missing"))?;
    let mut items: Vec<Item> = serde_json::from_slice(bytes)
        .map_err(|e| invalid(source, format!("cannot parse manifest.json: {e}")))?;
    match (items.pop(), items.len()) {
        (Some(item), 0) => Ok(item),
        (None, _) => Err(invalid(source, "it has no image")),
        (Some(_), more) => Err(invalid(source, format!("it has {} images; save one at a time", more + 1))),
    }
}

fn names(item: &Item, source: &Source) -> Result<Vec<Reference>, ImageError> {
    let tags = item.repo_tags.as_deref().unwrap_or_default();
    let parse = |tag: &String| tag.parse().map_err(|_| invalid(source, format!("invalid reference {tag:?}")));
    tags.iter().map(parse).collect()
}

/// Second pass: copies layers out of the archive.
struct Copies<'a> {
    inner: &'a ContentStore,
    progress: &'a Arc<dyn Progress>,
    /// Member names in layer order, with links resolved.
    wanted: Vec<Vec<u8>>,
    found: BTreeMap<Vec<u8>, Descriptor>,
    new: Vec<Digest>,
    /// Pins of copied blobs, which a prune must keep.
    pinned: Vec<crate::content::locks::Pinned>,
}

impl<'a> Copies<'a> {
    fn new(
        inner: &'a ContentStore,
        item: &Item,
        contents: &Contents,
        progress: &'a Arc<dyn Progress>,
    ) -> Self {
        let follow = |name: &String| {
            let name = strip_dot_slash(name.as_bytes());
            contents.links.get(&name).cloned().unwrap_or(name)
        };
        let wanted = item.layers.iter().map(follow).collect();
        Self { inner, progress, wanted, found: BTreeMap::new(), new: Vec::new(), pinned: Vec::new() }
    }

    fn take(&mut self, archive: &mut Reader<'_, &mut DecompressReader<'_>>) -> Result<(), ImageError> {
        while let Some(member) = archive.next_member()? {
            let name = strip_dot_slash(&member.path);
            if member.kind == Kind::File && self.wanted.contains(&name) {
                let blob = self.copy(archive)?;
                self.found.insert(name, blob);
            }
        }
        Ok(())
    }

    fn copy(&mut self, archive: &mut impl Read) -> Result<Descriptor, ImageError> {
        let mut peek = BufReader::with_capacity(64 << 10, archive);
        let head = std::io::BufRead::fill_buf(&mut peek).map_err(crate::tarball::read_error)?;
        let compression = Compression::of_magic(head);
        let mut blob = layout::copy_blob(&self.inner.layout, &mut peek, Algorithm::Sha256, |digest| {
            self.pinned.push(self.inner.pins.pin([*digest]));
            self.new.push(*digest);
            Ok(())
        })?;
        blob.media_type = compression.oci_media_type().to_owned();
        Meter::new(self.progress, Step::Download, Some(blob.digest), blob.size_bytes).at(blob.size_bytes);
        Ok(blob)
    }

    /// Descriptors of the copied layers, in order.
    fn finish(&self, source: &Source) -> Result<Vec<Descriptor>, ImageError> {
        let layer = |name: &Vec<u8>| {
            let missing = || invalid(source, format!("layer {} is missing", String::from_utf8_lossy(name)));
            self.found.get(name).cloned().ok_or_else(missing)
        };
        self.wanted.iter().map(layer).collect()
    }
}

fn compose(
    config_bytes: Vec<u8>,
    layers: &[Descriptor],
    names: Vec<Reference>,
    limits: &Limits,
) -> Result<ImportedImage, ImageError> {
    let descriptor = |media_type: &str, digest: &Digest, size: u64| serde_json::json!({"mediaType": media_type, "digest": digest, "size": size});
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor(OCI_CONFIG, &Digest::of(&config_bytes), config_bytes.len() as u64),
        "layers": layers.iter().map(|l| descriptor(&l.media_type, &l.digest, l.size_bytes)).collect::<Vec<_>>(),
    });
    let manifest_bytes = manifest.to_string().into_bytes();
    match manifest::parse(&manifest_bytes, None, limits)? {
        Document::Manifest(manifest) => {
            Ok(ImportedImage { manifest, manifest_bytes, config_bytes, index: None, names })
        }
        Document::Index(_) => Err(ImageError::unsupported("index inside an archive")),
    }
}
