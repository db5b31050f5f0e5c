//! Archive of a snapshot, for another node: a tar stream compressed with zstd.
//!
//! ```text
//! coracle-snapshot.json   {format, manifest, extents of the disk, SHA-256 of what follows}
//! memory                  as in the directory
//! disk                    what is not a hole, end to end
//! ```
//! The author of an archive is not trusted. An archive must have exactly three entries of these names in this order, with the
//! lengths and digests in the first one, and extents inside the disk. No part of it is used as a path.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use coracle_hypervisor::Slots;
use coracle_record::VolumeKind;
use coracle_types::SizeClass;
use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{DISK_FILE, MANIFEST_MAX, MEMORY_FILE, Part, SCHEMA, SnapshotInfo, SnapshotStore};

/// Version of the archive.
const FORMAT: u32 = 1;
const HEAD: &str = "coracle-snapshot.json";
const MEMORY: &str = "memory";
const DISK: &str = "disk";
/// Fast compression, which still reduces the memory of a guest to a fraction.
const LEVEL: i32 = 1;
const CHUNK: usize = 256 * 1024;
/// Maximum number of extents, more than any disk of this program has.
const EXTENTS_MAX: usize = 1 << 20;
/// Maximum size of the saved state beside the memory, bytes.
const DEVICES_MAX: u64 = 256 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    format: u32,
    snapshot: SnapshotInfo,
    memory_sha256: String,
    disk_sha256: String,
    /// Length of the disk, holes included.
    disk_length: u64,
    /// Offset and length of each range of data, in order.
    extents: Vec<(u64, u64)>,
}

/// Writes the snapshot `info` to `out`. Blocking.
///
/// # Errors
/// When the snapshot cannot be read, or `out` cannot be written.
pub fn write(store: &SnapshotStore, info: &SnapshotInfo, out: impl Write) -> io::Result<()> {
    let memory = File::open(store.memory_of(&info.name))?;
    let disk = File::open(store.disk_of(&info.name))?;
    let memory_length = memory.metadata()?.len();
    let extents = extents(&disk)?;
    let head = Head {
        format: FORMAT,
        snapshot: info.clone().without_access(),
        memory_sha256: digest(&mut Extents::new(&memory, vec![(0, memory_length)]))?,
        disk_sha256: digest(&mut Extents::new(&disk, extents.clone()))?,
        disk_length: disk.metadata()?.len(),
        extents: extents.clone(),
    };
    let head = serde_json::to_vec(&head)?;
    let mut archive = tar::Builder::new(zstd::Encoder::new(out, LEVEL)?);
    let length = |extents: &[(u64, u64)]| extents.iter().map(|(_, n)| n).sum::<u64>();
    append(&mut archive, HEAD, head.len() as u64, head.as_slice())?;
    append(&mut archive, MEMORY, memory_length, Extents::new(&memory, vec![(0, memory_length)]))?;
    append(&mut archive, DISK, length(&extents), Extents::new(&disk, extents))?;
    archive.into_inner()?.finish()?.flush()
}

fn append<W: Write>(
    archive: &mut tar::Builder<W>,
    name: &str,
    length: u64,
    content: impl Read,
) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(length);
    header.set_mode(0o600);
    header.set_entry_type(tar::EntryType::Regular);
    archive.append_data(&mut header, name, content)
}

/// Reads an archive into `part`, under the name of the part; the files are synced to disk before this returns. Blocking.
///
/// # Errors
/// `InvalidData` with the reason when the archive is invalid; [`Part`] then removes its files.
pub fn read(input: impl Read, part: &Part) -> io::Result<SnapshotInfo> {
    std::fs::create_dir_all(part.dir())?;
    let mut archive = tar::Archive::new(zstd::Decoder::new(input)?);
    // Raw, so that extension headers are refused: the library would read them without a limit.
    let mut entries = archive.entries()?.raw(true);
    let mut text = Vec::new();
    next(&mut entries, HEAD)?.take(MANIFEST_MAX * 16).read_to_end(&mut text)?;
    let head: Head =
        serde_json::from_slice(&text).map_err(|e| invalid_archive(format!("{HEAD} is none: {e}")))?;
    check(&head)?;
    let memory = next(&mut entries, MEMORY)?;
    let whole = [(0, head.snapshot.memory_bytes)];
    extract_entry(
        memory,
        &part.dir().join(MEMORY_FILE),
        head.snapshot.memory_bytes,
        &whole,
        &head.memory_sha256,
    )?;
    let disk = next(&mut entries, DISK)?;
    extract_entry(disk, &part.dir().join(DISK_FILE), head.disk_length, &head.extents, &head.disk_sha256)?;
    if entries.next().is_some() {
        return Err(invalid_archive("there is more in it than a snapshot".to_owned()));
    }
    // The author of the archive does not decide on access on this node.
    Ok(SnapshotInfo { name: part.name().clone(), ..head.snapshot.without_access() })
}

pub(crate) fn invalid_archive(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Returns the next entry, which must be a plain file of this name.
fn next<'a, R: Read>(entries: &mut tar::Entries<'a, R>, name: &str) -> io::Result<tar::Entry<'a, R>> {
    let entry = entries.next().ok_or_else(|| invalid_archive(format!("it ends before {name}")))?;
    let entry = entry.map_err(|e| invalid_archive(format!("it is cut off or damaged before {name}: {e}")))?;
    let plain = entry.header().entry_type() == tar::EntryType::Regular;
    if plain && &*entry.path_bytes() == name.as_bytes() {
        return Ok(entry);
    }
    Err(invalid_archive(format!(
        "{:?} stands where {name} must",
        String::from_utf8_lossy(&entry.path_bytes())
    )))
}

/// Checks all values of the head that determine sizes.
fn check(head: &Head) -> io::Result<()> {
    let info = &head.snapshot;
    if head.format != FORMAT {
        return Err(invalid_archive(format!(
            "it is of format {}, and this version reads {FORMAT}",
            head.format
        )));
    }
    check_sizes(info, head.disk_length)?;
    if head.extents.len() > EXTENTS_MAX {
        return Err(invalid_archive("its disk is in too many pieces".to_owned()));
    }
    let mut end = 0;
    for (offset, length) in &head.extents {
        let next = offset.checked_add(*length).filter(|next| *offset >= end && *next <= head.disk_length);
        end = next.ok_or_else(|| invalid_archive("a piece of its disk lies outside of it".to_owned()))?;
    }
    Ok(())
}

/// Checks the manifest of a foreign snapshot against the sizes of memory and disk, `disk_length` bytes.
pub(crate) fn check_sizes(info: &SnapshotInfo, disk_length: u64) -> io::Result<()> {
    if info.schema > SCHEMA {
        return Err(invalid_archive(format!(
            "its manifest is of schema {}, and this version reads {SCHEMA}",
            info.schema
        )));
    }
    if info.size_class.is_some_and(|class| class != SizeClass::of(info.vcpus, info.memory)) {
        return Err(invalid_archive("its machine is of another size class than its VM".to_owned()));
    }
    check_slots(info)?;
    let memory = info.size_class.map_or(info.memory, |class| class.memory);
    let memory_max = memory.bytes().saturating_add(DEVICES_MAX);
    if info.memory_bytes > memory_max {
        return Err(invalid_archive(format!(
            "{} bytes are no memory of {} MiB",
            info.memory_bytes,
            memory.get()
        )));
    }
    if info.disk_mib.checked_mul(1 << 20) != Some(disk_length) {
        return Err(invalid_archive(format!("{disk_length} bytes are no disk of {} MiB", info.disk_mib)));
    }
    Ok(())
}

/// Checks that the disks of a copy are in read-only slots, each in a slot of its own other than the root's.
fn check_slots(info: &SnapshotInfo) -> io::Result<()> {
    let disks = info.volumes.iter().filter_map(|volume| match volume.kind {
        VolumeKind::Disk { slot, .. } | VolumeKind::Block { slot } => Some(slot),
        VolumeKind::SharedDir | VolumeKind::Tmpfs(_) => None,
    });
    let mut taken = HashSet::from([0]);
    for slot in disks.chain(info.images.iter().map(|image| image.slot)) {
        if !Slots::default().is_read_only(slot) || !taken.insert(slot) {
            return Err(invalid_archive(format!("slot {slot} is not free for one of its disks")));
        }
    }
    Ok(())
}

/// Writes the extents of an entry to a new file of `length` bytes.
fn extract_entry(
    mut entry: impl Read,
    to: &Path,
    length: u64,
    extents: &[(u64, u64)],
    sha256: &str,
) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let name = to.file_name().unwrap_or_default().display().to_string();
    let file = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    file.set_len(length)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    for (offset, length) in extents {
        let mut done = 0;
        while done < *length {
            let want = usize::try_from(length - done).unwrap_or(CHUNK).min(CHUNK);
            let piece = buffer.get_mut(..want).unwrap_or_default();
            let read = entry
                .read(piece)
                .map_err(|e| invalid_archive(format!("{name} is cut off or damaged: {e}")))?;
            if read == 0 {
                return Err(invalid_archive(format!("{name} is shorter than it says")));
            }
            let piece = piece.get(..read).unwrap_or_default();
            digest.update(piece);
            file.write_all_at(piece, offset + done)?;
            done += read as u64;
        }
    }
    if entry.read(&mut buffer)? != 0 {
        return Err(invalid_archive(format!("{name} is longer than it says")));
    }
    if hex(digest) != sha256 {
        return Err(invalid_archive(format!("{name} has not the digest that it should have")));
    }
    file.sync_all()
}

/// Returns the ranges of a file that are not holes.
fn extents(file: &File) -> io::Result<Vec<(u64, u64)>> {
    let length = file.metadata()?.len();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < length {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break, // only a hole is left
            Err(e) => return Err(e.into()),
        };
        at = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        found.push((start, at - start));
    }
    Ok(found)
}

/// Reads the extents of a file end to end.
struct Extents<'a> {
    file: &'a File,
    left: std::collections::VecDeque<(u64, u64)>,
}

impl<'a> Extents<'a> {
    fn new(file: &'a File, extents: Vec<(u64, u64)>) -> Self {
        Self { file, left: extents.into() }
    }
}

impl Read for Extents<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some((offset, length)) = self.left.front_mut().filter(|_| !buffer.is_empty()) else {
            return Ok(0);
        };
        let want = usize::try_from(*length).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(buffer.get_mut(..want).unwrap_or_default(), *offset)?;
        if read == 0 && want > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (*offset, *length) = (*offset + read as u64, *length - read as u64);
        if *length == 0 {
            self.left.pop_front();
        }
        Ok(read)
    }
}

fn digest(content: &mut impl Read) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        match content.read(&mut buffer)? {
            0 => return Ok(hex(digest)),
            n => digest.update(buffer.get(..n).unwrap_or_default()),
        }
    }
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use coracle_testkit::spoil::spoil;
    use proptest::prelude::*;

    use super::*;
    use crate::tests::fill;

    /// Returns a host with a snapshot whose disk has holes, and its archive.
    fn export_archive() -> (tempfile::TempDir, SnapshotStore, Vec<u8>) {
        let state = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(state.path(), coracle_types::UnixMillis(0)).unwrap();
        let info = fill(&store, "first");
        let disk = File::options().write(true).open(store.disk_of(&info.name)).unwrap();
        disk.set_len(64 << 20).unwrap();
        disk.write_all_at(b"middle", 32 << 20).unwrap();
        let mut archive = Vec::new();
        write(&store, &info, &mut archive).unwrap();
        (state, store, archive)
    }

    fn import(store: &SnapshotStore, archive: &[u8]) -> io::Result<SnapshotInfo> {
        let part = store.begin("second".parse().unwrap()).unwrap();
        let info = read(archive, &part)?;
        part.seal(&info)?;
        Ok(info)
    }

    /// Returns the archive with changed entries: name, type, content.
    fn rewrite_archive(
        archive: &[u8],
        change: impl Fn(&mut Vec<(String, tar::EntryType, Vec<u8>)>),
    ) -> Vec<u8> {
        let mut entries = Vec::new();
        for entry in tar::Archive::new(zstd::Decoder::new(archive).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            entries.push((name, tar::EntryType::Regular, content));
        }
        change(&mut entries);
        let mut out = tar::Builder::new(zstd::Encoder::new(Vec::new(), LEVEL).unwrap());
        for (name, kind, content) in entries {
            let mut header = tar::Header::new_ustar();
            // Written directly, because the library refuses names that lead out of the directory.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(kind);
            header.set_size(content.len() as u64);
            header.set_cksum();
            out.append(&header, content.as_slice()).unwrap();
        }
        out.into_inner().unwrap().finish().unwrap()
    }

    fn change_head(
        entries: &mut [(String, tar::EntryType, Vec<u8>)],
        change: impl Fn(&mut serde_json::Value),
    ) {
        let mut value = serde_json::from_slice(&entries[0].2).unwrap();
        change(&mut value);
        entries[0].2 = serde_json::to_vec(&value).unwrap();
    }

    #[test]
    fn import_ignores_owner_and_grants_of_the_archive() {
        let (_state, store, archive) = export_archive();
        let grant = |entries: &mut Vec<(String, tar::EntryType, Vec<u8>)>| {
            change_head(entries, |head| {
                head["snapshot"]["sharedWith"] = serde_json::json!(["team"]);
                head["snapshot"]["owner"] = serde_json::json!({"namespace": "team", "uid": "u-1"});
            });
        };
        let info = import(&store, &rewrite_archive(&archive, grant)).unwrap();
        assert_eq!((info.owner, info.shared_with), (coracle_record::Owner::default(), [].into()));
    }

    #[test]
    fn archive_round_trip_keeps_content_and_holes() {
        let (_state, store, archive) = export_archive();
        assert!(archive.len() < 1 << 20, "holes take no room: {}", archive.len());
        let info = import(&store, &archive).unwrap();
        let first = store.get(&"first".parse().unwrap()).unwrap().unwrap();
        assert_eq!(SnapshotInfo { name: first.name.clone(), ..info.clone() }, first);
        for file in [SnapshotStore::disk_of, SnapshotStore::memory_of] {
            assert_eq!(
                std::fs::read(file(&store, &first.name)).unwrap(),
                std::fs::read(file(&store, &info.name)).unwrap()
            );
        }
        assert!(coracle_files::allocated_bytes(&store.disk_of(&info.name)) < 1 << 20);
    }

    #[test]
    fn tampered_archive_is_refused_and_leaves_nothing() {
        use tar::EntryType;
        let (state, store, archive) = export_archive();
        type Entries = Vec<(String, EntryType, Vec<u8>)>;
        type Change = fn(&mut Entries);
        let changes: [(&str, Change); 14] = [
            ("a path outside", |e| e[1].0 = "../../../etc/cron.d/x".to_owned()),
            ("an absolute path", |e| e[2].0 = "/etc/passwd".to_owned()),
            ("a link", |e| e[1].1 = EntryType::Symlink),
            ("a hard link", |e| e[1].1 = EntryType::Link),
            ("another order", |e| e.swap(1, 2)),
            ("one too many", |e| e.push(("extra".to_owned(), EntryType::Regular, vec![]))),
            ("one missing", |e| e.truncate(2)),
            ("no head", |e| _ = e.remove(0)),
            ("another byte of memory", |e| e[1].2[0] ^= 1),
            ("another byte of the disk", |e| e[2].2[0] ^= 1),
            ("more memory", |e| e[1].2.push(0)),
            ("less memory", |e| e[1].2.truncate(5)),
            ("an extent outside", |e| change_head(e, |h| h["extents"][0][0] = (1u64 << 40).into())),
            ("memory without end", |e| {
                change_head(e, |h| h["snapshot"]["memoryBytes"] = (1u64 << 50).into())
            }),
        ];
        for (why, change) in changes {
            let error = import(&store, &rewrite_archive(&archive, change)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{why}: {error}");
        }
        let newer = rewrite_archive(&archive, |e| change_head(e, |h| h["format"] = 9.into()));
        assert!(import(&store, &newer).unwrap_err().to_string().contains("format 9"));
        for (why, bytes) in [("nothing", 0), ("a beginning", 40), ("all but the end", archive.len() - 40)] {
            assert!(import(&store, &archive[..bytes]).is_err(), "{why}");
        }
        assert!(import(&store, &[b"no archive at all ".as_slice(); 100].concat()).is_err());
        let left: Vec<_> = std::fs::read_dir(state.path().join("snapshots")).unwrap().collect();
        assert_eq!(left.len(), 1, "only the first is there: {left:?}");
    }

    #[test]
    fn oversize_tar_name_is_refused_by_header() {
        let (_state, store, _) = export_archive();
        for kind in [b'L', b'K', b'x', b'g'] {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::new(kind));
            header.set_size(1 << 40);
            header.set_cksum();
            let archive = zstd::encode_all(header.as_bytes().as_slice(), LEVEL).unwrap();
            let error = import(&store, &archive).unwrap_err();
            assert!(error.to_string().contains("stands where coracle-snapshot.json must"), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Imports damaged archives. A refused archive leaves nothing; an accepted one is not larger than declared.
        #[test]
        fn damaged_archive_never_panics_and_leaves_nothing(draws in prop::collection::vec(any::<(u8, usize, u64)>(), 1..4), outside in any::<bool>()) {
            let (state, store, archive) = export_archive();
            let mut spoiled = zstd::decode_all(archive.as_slice()).unwrap();
            spoil(&mut spoiled, &draws);
            let mut spoiled = zstd::encode_all(spoiled.as_slice(), LEVEL).unwrap();
            if outside {
                // Damages the compressed stream, too.
                let at = draws[0].1 % spoiled.len();
                spoiled[at] = draws[0].0;
            }
            match import(&store, &spoiled) {
                Ok(info) => {
                    let length = |path| std::fs::metadata(path).unwrap().len();
                    assert_eq!(length(store.memory_of(&info.name)), info.memory_bytes);
                    assert_eq!(length(store.disk_of(&info.name)), info.disk_mib << 20);
                }
                Err(_) => {
                    let left = std::fs::read_dir(state.path().join("snapshots")).unwrap();
                    assert_eq!(left.count(), 1, "only the first is there");
                }
            }
            assert!(!state.path().join("snapshots/outside").exists() && !state.path().join("outside").exists());
        }
    }
}
