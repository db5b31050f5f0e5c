//! A new image of what a running machine's root looks like: the layers of its image, and one more with what differs.
//!
//! ```text
//! layers of the base ─▶ listing (metadata) ─┐
//! the machine's root, as a tar stream ──────┴─▶ same? skipped   changed or new? into the layer   gone? a whiteout
//! ```
//! A file counts as the same when type, mode, owner, size and time (whole seconds) are: what overlay file systems keep
//! for what was not touched. Extended attributes of what changed are lost, because the stream has none.

mod listing;

use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    Digest, Image, ImageError, Reference,
    digest::{Hashed, Hasher},
    manifest::{Manifest, OCI_CONFIG, OCI_MANIFEST, Packing},
    rootfs::path::{Name, judge},
    store::{Inner, index::Entry},
    tarball::{self, Kind, Member, read_error},
};
use listing::{Listing, What};

/// Fast; a layer is read more often than it is made.
const LEVEL: i32 = 3;
/// What the agent writes into every machine, and what belongs to one machine alone.
const OWN: [&[u8]; 5] =
    [b"etc/hostname", b"etc/hosts", b"etc/resolv.conf", b"etc/machine-id", b"var/lib/dbus/machine-id"];
/// File systems of their own in every machine.
const MOUNTS: [&[u8]; 4] = [b"dev", b"proc", b"run", b"sys"];

/// What a workload sees.
#[derive(Debug)]
pub struct MachineRoot<R> {
    /// All of it as a tar stream, hostile like its guest.
    pub tar: R,
    /// Absolute paths at which there is something that is no part of it: what the image has there cannot be seen, and
    /// is not gone.
    pub mounts: Vec<PathBuf>,
}

/// See [`crate::Store::commit`]. Blocking.
pub(crate) fn commit<R: Read>(
    inner: &Inner,
    base: &Digest,
    root: &mut MachineRoot<R>,
    name: &Reference,
    created: jiff::Timestamp,
) -> Result<Image, ImageError> {
    let absent = || ImageError::NotPresent { image: base.to_string() };
    let (manifest, _) = inner.manifest(base)?.ok_or_else(absent)?;
    let config = inner.layout.read(&manifest.config.digest, inner.options.limits.config_bytes)?;
    let config: Value = serde_json::from_slice(&config.ok_or_else(absent)?)
        .map_err(|e| ImageError::hostile(format!("a configuration that does not parse: {e}")))?;
    let _pinned = inner.pins.pin(manifest.layers.iter().map(|l| l.digest).chain([*base]));
    if manifest.layers.len() >= inner.options.limits.layers {
        return Err(ImageError::unsupported(format!(
            "the image has {} layers already; start again from one with less",
            manifest.layers.len()
        )));
    }
    let listing = Listing::read(inner, &manifest, &config)?;
    let layer = write_layer(inner, &listing, root)?;
    publish(inner, &manifest, config, &layer, name, created)
}

/// A layer in the store.
struct NewLayer {
    digest: Digest,
    diff_id: Digest,
    bytes: u64,
}

fn write_layer<R: Read>(
    inner: &Inner,
    listing: &Listing,
    root: &mut MachineRoot<R>,
) -> Result<NewLayer, ImageError> {
    let mut file = inner.layout.temp_file()?;
    let failed = |e| ImageError::io("write layer in", &inner.layout.dir, e);
    let packed = Hashed { to: file.as_file_mut(), hasher: Hasher::default() };
    let packed = zstd::Encoder::new(packed, LEVEL).map_err(failed)?;
    let mut archive = tar::Builder::new(Hashed { to: packed, hasher: Hasher::default() });
    copy_changes(inner, listing, root, &mut archive)?;
    let plain = archive.into_inner().map_err(failed)?;
    let diff_id = plain.hasher.finish();
    let packed = plain.to.finish().map_err(failed)?;
    let bytes = packed.hasher.bytes;
    let digest = packed.hasher.finish();
    inner.layout.publish(file, &inner.layout.blob(&digest), 0o644)?;
    Ok(NewLayer { digest, diff_id, bytes })
}

fn copy_changes<R: Read>(
    inner: &Inner,
    listing: &Listing,
    root: &mut MachineRoot<R>,
    out: &mut tar::Builder<impl Write>,
) -> Result<(), ImageError> {
    let limits = &inner.options.limits;
    let failed = |e| ImageError::io("write layer in", &inner.layout.dir, e);
    let mut seen: BTreeSet<Vec<u8>> = OWN.iter().map(|path| path.to_vec()).collect();
    let (mut bytes, mut entries) = (limits.unpacked_bytes, limits.entries);
    let volumes: Vec<Vec<u8>> = root.mounts.iter().map(|path| below_root(path)).collect();
    let mut archive = tarball::Reader::new(&mut root.tar, limits);
    while let Some(member) = archive.next_member()? {
        let path = match judge(&member.path, limits)? {
            Name::Entry { above, name } => [above.as_slice(), &[name]].concat().join(&b'/'),
            // A machine's files are its own: this one looks like bookkeeping of layers, and cannot be in one.
            Name::Whiteout { .. } | Name::Opaque { .. } | Name::Ignored | Name::Root => continue,
        };
        entries =
            entries.checked_sub(1).ok_or_else(|| ImageError::hostile("the machine has too many files"))?;
        bytes = bytes
            .checked_sub(member.size_bytes)
            .ok_or_else(|| ImageError::hostile("the machine's files are too large"))?;
        if OWN.contains(&path.as_slice()) || !seen.insert(path.clone()) || volumes.contains(&path) {
            continue;
        }
        if !listing.has(&path, &What::of(&member)) {
            append(out, &path, &member, &mut archive)?;
        }
    }
    archive.drain()?;
    let mounts: Vec<&[u8]> = MOUNTS.into_iter().chain(volumes.iter().map(Vec::as_slice)).collect();
    for gone in listing.gone(&seen, &mounts) {
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        header.set_mode(0);
        header.set_entry_type(tar::EntryType::Regular);
        out.append_data(&mut header, path_of(&gone), io::empty()).map_err(failed)?;
    }
    out.finish().map_err(failed)
}

/// `/var/lib/web/` as an archive names it.
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

/// The new image gets its name when all of it is there.
fn publish(
    inner: &Inner,
    base: &Manifest,
    mut config: Value,
    layer: &NewLayer,
    name: &Reference,
    created: jiff::Timestamp,
) -> Result<Image, ImageError> {
    let damaged = || ImageError::hostile("a configuration without a list of layers");
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
        let media_type = Packing::of_media_type(&blob.media_type)?.oci_media_type();
        layers.push(
            json!({"mediaType": media_type, "digest": blob.digest.to_string(), "size": blob.size_bytes}),
        );
    }
    let media_type = Packing::Zstd.oci_media_type();
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
