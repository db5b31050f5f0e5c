//! Commits the root of a running VM as an image: the layers of its base image, and one more layer with the differences.
//!
//! ```text
//! upper directory of the VM's overlay, as a tar stream ─▶ the layer (`changes.rs`)
//! ```
//! An older guest agent sends the whole root instead, which is compared with the image:
//! ```text
//! layers of the base ─▶ listing (metadata) ─┐
//! root of the VM, as a tar stream ───────────┴─▶ same? skipped   changed or new? layer   gone? whiteout
//! ```
//! A file is unchanged when type, mode, owner, size and time (whole seconds) are equal: an overlay keeps them for unchanged
//! files. Extended attributes of changed files are lost, because this stream has none.

mod changes;
mod listing;

use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    Budget, Compression, Image, ImageError, Limits,
    content::{ContentStore, index::Entry},
    manifest::ImageManifest,
    rootfs::kept_bytes,
    space::{Guard, Guarded},
    tarball::path::{Name, classify},
    tarball::{self, Kind, Member, read_error, shown},
};
use coracle_oci::{
    Digest, Hasher, HashingWriter, Reference,
    media_types::{OCI_CONFIG, OCI_MANIFEST},
};
use listing::{FileProperties, Listing};

/// Compression level. Low, because a layer is decompressed more often than it is compressed.
const LEVEL: i32 = 3;
/// Files that the guest agent writes into every VM, or that belong to one VM only. Never committed.
const OWN: [&[u8]; 5] =
    [b"etc/hostname", b"etc/hosts", b"etc/resolv.conf", b"etc/machine-id", b"var/lib/dbus/machine-id"];
/// Mount points in every VM. Their content is never committed.
const MOUNTS: [&[u8]; 4] = [b"dev", b"proc", b"run", b"sys"];
/// Mount points that the guest agent makes in the upper directory. Never committed: the image has its own, or needs none.
const MADE_MOUNTS: [&[u8]; 3] = [b"dev", b"proc", b"sys"];

/// Content of the tar stream of a [`VmRoot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootKind {
    /// The whole root, without extended attributes.
    Whole,
    /// The upper directory of the root's overlay: character devices 0/0 are whiteouts, extended attributes
    /// are PAX records `SCHILY.xattr.*`.
    Changes,
}

/// Root of a running VM.
#[derive(Debug)]
pub struct VmRoot<R> {
    /// Tar stream; untrusted.
    pub tar: R,
    /// Content of the stream.
    pub kind: RootKind,
    /// Absolute paths of mounts. The files of the image below them are hidden, not deleted.
    pub mounts: Vec<PathBuf>,
}

/// See [`crate::Store::commit`]. Blocking.
pub(crate) fn commit<R: Read>(
    inner: &ContentStore,
    base: &Digest,
    root: &mut VmRoot<R>,
    name: &Reference,
    created: jiff::Timestamp,
) -> Result<Image, ImageError> {
    let absent = || ImageError::NotPresent { image: base.to_string() };
    let (manifest, _) = inner.manifest(base)?.ok_or_else(absent)?;
    let config = inner.layout.read(&manifest.config.digest, inner.options.limits.config_bytes)?;
    let config: Value = serde_json::from_slice(&config.ok_or_else(absent)?)
        .map_err(|e| ImageError::hostile(format!("cannot parse configuration: {e}")))?;
    let _pinned = inner.pins.pin(manifest.layers.iter().map(|l| l.digest).chain([*base]));
    if manifest.layers.len() >= inner.options.limits.layers {
        return Err(ImageError::unsupported(format!(
            "the image has {} layers already; use one with fewer layers",
            manifest.layers.len()
        )));
    }
    let listing = match root.kind {
        RootKind::Whole => Some(Listing::read(inner, &manifest, &config)?),
        RootKind::Changes => None,
    };
    let layer = write_layer(inner, listing.as_ref(), root)?;
    publish(inner, &manifest, config, &layer, name, created)
}

/// Layer that was written to the store.
struct NewLayer {
    digest: Digest,
    diff_id: Digest,
    bytes: u64,
}

fn write_layer<R: Read>(
    inner: &ContentStore,
    listing: Option<&Listing>,
    root: &mut VmRoot<R>,
) -> Result<NewLayer, ImageError> {
    let mut file = inner.layout.temp_file()?;
    let failed = |e| ImageError::io("write layer in", &inner.layout.dir, e);
    let guard = Guard::new(file.as_file(), inner.options.reserve_bytes).map_err(failed)?;
    let packed = HashingWriter { to: Guarded { to: file.as_file_mut(), guard }, hasher: Hasher::default() };
    let packed = zstd::Encoder::new(packed, LEVEL).map_err(failed)?;
    let mut archive = tar::Builder::new(HashingWriter { to: packed, hasher: Hasher::default() });
    match listing {
        Some(listing) => copy_differences(inner, listing, root, &mut archive)?,
        None => changes::copy(inner, root, &mut archive)?,
    }
    let plain = archive.into_inner().map_err(failed)?;
    let diff_id = plain.hasher.finish();
    let packed = plain.to.finish().map_err(failed)?;
    let bytes = packed.hasher.bytes();
    let digest = packed.hasher.finish();
    inner.layout.publish(file, &inner.layout.blob(&digest), 0o644)?;
    Ok(NewLayer { digest, diff_id, bytes })
}

/// Remaining budget of the stream, from the limits of an image.
struct Bounds<'l> {
    limits: &'l Limits,
    budget: Budget,
}

impl<'l> Bounds<'l> {
    fn of(limits: &'l Limits) -> Self {
        Self { limits, budget: Budget::of(limits) }
    }

    fn take(&mut self, member: &Member) -> Result<(), ImageError> {
        let xattrs: usize = member.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        if xattrs > self.limits.xattr_bytes {
            return Err(ImageError::hostile(format!(
                "{} has extended attributes of {xattrs} bytes",
                shown(&member.path)
            )));
        }
        for (left, bytes, why) in [
            (&mut self.budget.entries, 1, "the machine has too many files"),
            (&mut self.budget.unpacked_bytes, member.size_bytes, "the machine's files are too large"),
            (
                &mut self.budget.metadata_bytes,
                kept_bytes(member),
                "names and attributes of the machine's files take too much memory",
            ),
        ] {
            *left = left.checked_sub(bytes).ok_or_else(|| ImageError::hostile(why))?;
        }
        Ok(())
    }
}

/// Copies changed and new files, and writes whiteouts for deleted ones.
fn copy_differences<R: Read>(
    inner: &ContentStore,
    listing: &Listing,
    root: &mut VmRoot<R>,
    out: &mut tar::Builder<impl Write>,
) -> Result<(), ImageError> {
    let limits = &inner.options.limits;
    let mut seen: BTreeSet<Vec<u8>> = OWN.iter().map(|path| path.to_vec()).collect();
    let mut bounds = Bounds::of(limits);
    let volumes: Vec<Vec<u8>> = root.mounts.iter().map(|path| below_root(path)).collect();
    let mut archive = tarball::Reader::new(&mut root.tar, limits);
    while let Some(member) = archive.next_member()? {
        let path = match classify(&member.path, limits)? {
            Name::Entry { above, name } => [above.as_slice(), &[name]].concat().join(&b'/'),
            // A file with the name of a whiteout cannot be stored in an image layer.
            Name::Whiteout { .. } | Name::Opaque { .. } | Name::Ignored | Name::Root => continue,
        };
        bounds.take(&member)?;
        if OWN.contains(&path.as_slice()) || !seen.insert(path.clone()) || volumes.contains(&path) {
            continue;
        }
        if !listing.has(&path, &FileProperties::of(&member)) {
            append(out, &path, &member, &mut archive)?;
        }
    }
    archive.drain()?;
    let mounts: Vec<&[u8]> = MOUNTS.into_iter().chain(volumes.iter().map(Vec::as_slice)).collect();
    for gone in listing.deleted_paths(&seen, &mounts) {
        whiteout(&gone, out)?;
    }
    out.finish().map_err(read_error)
}

/// Appends a whiteout: an empty file that hides a name of the lower layers.
fn whiteout(path: &[u8], out: &mut tar::Builder<impl Write>) -> Result<(), ImageError> {
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    header.set_mode(0);
    header.set_entry_type(tar::EntryType::Regular);
    out.append_data(&mut header, path_of(path), io::empty()).map_err(read_error)
}

/// Path relative to the root, as in an archive: `/var/lib/web/` becomes `var/lib/web`.
fn below_root(path: &Path) -> Vec<u8> {
    let names = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.as_bytes()),
        _ => None,
    });
    names.collect::<Vec<_>>().join(&b'/')
}

fn path_of(bytes: &[u8]) -> PathBuf {
    std::ffi::OsStr::from_bytes(bytes).into()
}

fn append(
    out: &mut tar::Builder<impl Write>,
    path: &[u8],
    member: &Member,
    data: &mut impl Read,
) -> Result<(), ImageError> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(member.mode.into());
    header.set_uid(member.uid.into());
    header.set_gid(member.gid.into());
    header.set_mtime(u64::try_from(member.mtime.0).unwrap_or(0));
    header.set_size(member.size_bytes);
    let device = |header: &mut tar::Header, kind, major, minor| {
        header.set_entry_type(kind);
        header.set_device_major(major).and_then(|()| header.set_device_minor(minor))
    };
    let path = path_of(path);
    let records = member.xattrs.iter().filter_map(|(name, value)| {
        Some((format!("SCHILY.xattr.{}", std::str::from_utf8(name).ok()?), value.as_slice()))
    });
    let records: Vec<(String, &[u8])> = records.collect();
    if !records.is_empty() {
        let records = records.iter().map(|(key, value)| (key.as_str(), *value));
        out.append_pax_extensions(records).map_err(read_error)?;
    }
    let written = match &member.kind {
        Kind::File => {
            header.set_entry_type(tar::EntryType::Regular);
            out.append_data(&mut header, path, data.take(member.size_bytes))
        }
        Kind::Symlink(to) => {
            header.set_entry_type(tar::EntryType::Symlink);
            out.append_link(&mut header, path, path_of(to))
        }
        Kind::HardLink(to) => {
            header.set_entry_type(tar::EntryType::Link);
            out.append_link(&mut header, path, path_of(to))
        }
        Kind::Dir => {
            header.set_entry_type(tar::EntryType::Directory);
            out.append_data(&mut header, path, io::empty())
        }
        Kind::Fifo => {
            header.set_entry_type(tar::EntryType::Fifo);
            out.append_data(&mut header, path, io::empty())
        }
        Kind::Char { major, minor } => device(&mut header, tar::EntryType::Char, *major, *minor)
            .and_then(|()| out.append_data(&mut header, path, io::empty())),
        Kind::Block { major, minor } => device(&mut header, tar::EntryType::Block, *major, *minor)
            .and_then(|()| out.append_data(&mut header, path, io::empty())),
    };
    written.map_err(read_error)
}

/// Stores configuration and manifest, then names the image.
fn publish(
    inner: &ContentStore,
    base: &ImageManifest,
    mut config: Value,
    layer: &NewLayer,
    name: &Reference,
    created: jiff::Timestamp,
) -> Result<Image, ImageError> {
    let damaged = || ImageError::hostile("configuration without a list of layers");
    let diff_ids = config["rootfs"]["diff_ids"].as_array_mut().ok_or_else(damaged)?;
    diff_ids.push(layer.diff_id.to_string().into());
    config["created"] = created.to_string().into();
    if let Some(history) = config["history"].as_array_mut() {
        history.push(json!({"created": created.to_string(), "created_by": "coracle commit"}));
    }
    let config = config.to_string().into_bytes();
    let config_digest = inner.layout.put(&config)?;
    let mut layers = Vec::new();
    for blob in &base.layers {
        let media_type = Compression::of_media_type(&blob.media_type)?.oci_media_type();
        layers.push(
            json!({"mediaType": media_type, "digest": blob.digest.to_string(), "size": blob.size_bytes}),
        );
    }
    let media_type = Compression::Zstd.oci_media_type();
    layers.push(json!({"mediaType": media_type, "digest": layer.digest.to_string(), "size": layer.bytes}));
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": config_digest.to_string(), "size": config.len()},
        "layers": layers,
        "annotations": {"org.opencontainers.image.base.digest": base.digest.to_string()},
    });
    let manifest = manifest.to_string().into_bytes();
    let digest = inner.layout.put(&manifest)?;
    inner.change(|index| {
        index.put(Entry {
            media_type: OCI_MANIFEST.to_owned(),
            digest,
            size_bytes: manifest.len() as u64,
            reference: Some(name.clone()),
            index: None,
            local: true,
        });
        Ok(())
    })?;
    inner.image(&digest)?.ok_or(ImageError::NotPresent { image: digest.to_string() })
}
