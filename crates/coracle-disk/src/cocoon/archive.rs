//! Archive that cocoon imports and exports: spooled to files when read, and written from files. Blocking.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    path::Path,
};

use serde_json::Value;

use super::super::artifact::{CONFIG_MAX, DISK_MAX};
use super::wire::{CocoonVersion, Remote, RemoteBlob, RemoteFile, is_name};
use coracle_image::{
    ImageError, Limits,
    tarball::{self, Kind, Member, read_error},
};
use coracle_oci::{Digest, Hasher, HashingWriter};

const HEAD: &str = "snapshot.json";
/// Smallest file that v2 stores in chunks, bytes.
const PACKED_MIN: u64 = 1 << 20;
/// Raw size of a chunk, bytes: far below the 4096 MiB that readers allow.
const CHUNK: u64 = 64 << 20;
/// Limit of files in a snapshot.
const FILES_MAX: usize = 256;

/// Archive spooled to files.
pub(super) struct Spooled {
    /// Value of `config` in `snapshot.json`.
    pub(super) config: Value,
    pub(super) files: Vec<SpooledFile>,
}

pub(super) struct SpooledFile {
    pub(super) title: String,
    pub(super) mode: u32,
    /// Map and length of a sparse file.
    pub(super) sparse: Option<(String, u64)>,
    /// Length of the body in the archive, bytes.
    pub(super) body_bytes: u64,
    pub(super) packed: bool,
    pub(super) blobs: Vec<SpooledBlob>,
}

pub(super) struct SpooledBlob {
    pub(super) file: tempfile::TempPath,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
}

fn hostile(why: &str) -> ImageError {
    ImageError::hostile(format!("archive of a snapshot: {why}"))
}

fn spool_error(e: io::Error) -> ImageError {
    ImageError::io("spool", "the archive of a snapshot", e)
}

/// Spools an archive, uncompressed or compressed with gzip, to files in `folder`, which is created.
pub(super) fn spool(
    mut input: impl Read,
    version: CocoonVersion,
    level: i32,
    folder: &Path,
) -> Result<Spooled, ImageError> {
    std::fs::create_dir_all(folder).map_err(spool_error)?;
    let packing = Packing { version, level, folder };
    let mut magic = [0; 2];
    input.read_exact(&mut magic).map_err(|_| hostile("it is empty"))?;
    let whole = io::Cursor::new(magic).chain(input);
    // Raises the limit of headers: the map of a fragmented disk is long.
    let limits = Limits { header_bytes: 32 << 20, unpacked_bytes: DISK_MAX, ..Limits::default() };
    match magic {
        [0x1f, 0x8b] => entries(flate2::read::MultiGzDecoder::new(whole), &limits, &packing),
        _ => entries(whole, &limits, &packing),
    }
}

/// How spooled files are compressed, and where they are.
struct Packing<'a> {
    version: CocoonVersion,
    level: i32,
    folder: &'a Path,
}

fn entries(input: impl Read, limits: &Limits, packing: &Packing<'_>) -> Result<Spooled, ImageError> {
    let mut archive = tarball::Reader::new(input, limits);
    let first = archive.next_member()?.filter(|m| m.path == HEAD.as_bytes() && m.size_bytes <= CONFIG_MAX);
    let first = first.ok_or_else(|| hostile("snapshot.json is not the first entry"))?;
    let mut text = Vec::new();
    archive.by_ref().take(first.size_bytes).read_to_end(&mut text).map_err(read_error)?;
    let head: Value = serde_json::from_slice(&text).map_err(|_| hostile("snapshot.json cannot be parsed"))?;
    if head["version"] != 1 || !head["config"].is_object() {
        return Err(ImageError::unsupported("archive of a snapshot of a newer version"));
    }
    let mut files = Vec::<SpooledFile>::new();
    while let Some(member) = archive.next_member()? {
        let title = String::from_utf8(member.path.clone()).ok().filter(|t| is_name(t));
        let title = title.filter(|t| member.kind == Kind::File && files.iter().all(|f| f.title != *t));
        let title = title.ok_or_else(|| hostile("an entry is not a plain file, or is repeated"))?;
        if files.len() >= FILES_MAX {
            return Err(hostile("too many files"));
        }
        files.push(file(title, &member, archive.by_ref(), packing)?);
    }
    archive.drain()?;
    match files.is_empty() {
        true => Err(hostile("no files")),
        false => Ok(Spooled { config: head["config"].clone(), files }),
    }
}

fn file(
    title: String,
    member: &Member,
    mut body: impl Read,
    packing: &Packing<'_>,
) -> Result<SpooledFile, ImageError> {
    let sparse = match &member.sparse {
        None => None,
        Some((map, size)) => {
            let (map, size) = (String::from_utf8_lossy(map), String::from_utf8_lossy(size));
            let size = size.parse().ok().filter(|n| *n <= DISK_MAX);
            let size = size.ok_or_else(|| hostile("a sparse file has no length"))?;
            check_map(&map, size, member.size_bytes)?;
            Some((map.into_owned(), size))
        }
    };
    let packed = packing.version == CocoonVersion::V2 && member.size_bytes >= PACKED_MIN;
    let (mut blobs, mut left) = (Vec::new(), member.size_bytes);
    while left > 0 || blobs.is_empty() {
        let raw = if packed { left.min(CHUNK) } else { left };
        blobs.push(blob(&mut body, raw, packed.then_some(packing.level), packing.folder)?);
        left -= raw;
    }
    Ok(SpooledFile { title, mode: member.mode.into(), sparse, body_bytes: member.size_bytes, packed, blobs })
}

/// Fails unless the map covers the bytes of the body in order and within the file.
fn check_map(map: &str, size: u64, body_bytes: u64) -> Result<(), ImageError> {
    let invalid = || hostile("the map of a sparse file is invalid");
    let map: Vec<Value> = serde_json::from_str(map).map_err(|_| invalid())?;
    let (mut end, mut sum) = (0u64, 0u64);
    for piece in &map {
        let (offset, length) = piece["o"].as_u64().zip(piece["l"].as_u64()).ok_or_else(invalid)?;
        let next = offset.checked_add(length).filter(|next| offset >= end && *next <= size);
        (end, sum) = (next.ok_or_else(invalid)?, sum + length);
    }
    if sum == body_bytes { Ok(()) } else { Err(invalid()) }
}

fn blob(
    body: &mut impl Read,
    raw: u64,
    level: Option<i32>,
    folder: &Path,
) -> Result<SpooledBlob, ImageError> {
    let file = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder).map_err(spool_error)?;
    let mut out = HashingWriter { to: file.as_file(), hasher: Hasher::default() };
    let copied = match level {
        None => io::copy(&mut body.take(raw), &mut out),
        Some(level) => zstd::Encoder::new(&mut out, level).and_then(|mut packed| {
            let copied = io::copy(&mut body.take(raw), &mut packed)?;
            packed.finish().map(|_| copied)
        }),
    };
    if copied.map_err(read_error)? != raw {
        return Err(hostile("a file is truncated"));
    }
    let (bytes, digest) = (out.hasher.bytes(), out.hasher.finish());
    Ok(SpooledBlob { file: file.into_temp_path(), digest, bytes })
}

/// Writes the archive of a snapshot from blobs in the directory `fetched`, named by digest. Returns the total bytes of the
/// bodies.
pub(super) fn write(
    remote: &Remote,
    name: &str,
    fetched: &Path,
    out: &mut dyn Write,
) -> Result<u64, ImageError> {
    let bodies: Vec<(File, u64)> =
        remote.files.iter().map(|file| body(file, fetched)).collect::<Result<_, _>>()?;
    let head = coracle_oci::cocoon::snapshot_json(&remote.config, name).to_string();
    let mut total = 0;
    let written = || -> io::Result<()> {
        let mut archive = tar::Builder::new(out);
        archive.append_data(&mut header(0o640, head.len() as u64), HEAD, head.as_bytes())?;
        for (file, (body, bytes)) in remote.files.iter().zip(bodies) {
            if let Some((map, size)) = &file.sparse {
                let size = size.to_string();
                let records =
                    [("COCOON.sparse.map", map.as_bytes()), ("COCOON.sparse.size", size.as_bytes())];
                archive.append_pax_extensions(records)?;
            }
            archive.append_data(&mut header(file.mode, bytes), &file.title, body)?;
            total += bytes;
        }
        archive.into_inner()?.flush()
    };
    written().map_err(|e| ImageError::io("write", "the archive of a snapshot", e))?;
    Ok(total)
}

/// Body of a file: its blob, or its decompressed chunks.
fn body(file: &RemoteFile, fetched: &Path) -> Result<(File, u64), ImageError> {
    let open = |blob: &RemoteBlob| {
        let path = fetched.join(blob.digest.hex());
        File::open(&path).map_err(|e| ImageError::io("open", path, e))
    };
    let (body, bytes) = match file.blobs.as_slice() {
        [blob] if !file.packed => (open(blob)?, blob.bytes),
        blobs => {
            let mut whole = tempfile::tempfile_in(fetched).map_err(spool_error)?;
            let mut bytes = 0;
            for blob in blobs {
                let left = file.body_bytes.unwrap_or(DISK_MAX).saturating_sub(bytes).saturating_add(1);
                bytes += append(open(blob)?, file.packed, left, &mut whole)?;
            }
            whole.rewind().map_err(spool_error)?;
            (whole, bytes)
        }
    };
    if file.body_bytes.is_some_and(|said| said != bytes) {
        return Err(hostile("the length of a file differs from its configuration"));
    }
    if let Some((map, size)) = &file.sparse {
        check_map(map, *size, bytes)?;
    }
    Ok((body, bytes))
}

/// Appends up to `bytes_max` bytes of a blob.
fn append(blob: File, packed: bool, bytes_max: u64, to: &mut File) -> Result<u64, ImageError> {
    if !packed {
        return io::copy(&mut blob.take(bytes_max), to).map_err(spool_error);
    }
    let unpacked = zstd::Decoder::new(blob).and_then(|mut packed| {
        packed.window_log_max(27)?;
        io::copy(&mut packed.take(bytes_max), to)
    });
    unpacked.map_err(|e| match e.raw_os_error() {
        Some(_) => spool_error(e),
        None => hostile("a chunk cannot be decompressed"),
    })
}

fn header(mode: u32, bytes: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(mode);
    header.set_size(bytes);
    header
}

#[cfg(test)]
mod tests {
    use coracle_testkit::spoil::spoil as make_wrong;
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::wire;
    use super::*;

    /// Entry of a test archive: name, body, and for a sparse file map and length.
    type Entry<'a> = (&'a str, &'a [u8], Option<(&'a str, &'a str)>);

    fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
        let mut out = tar::Builder::new(Vec::new());
        for (name, bytes, sparse) in entries {
            if let Some((map, size)) = sparse {
                let records =
                    [("COCOON.sparse.map", map.as_bytes()), ("COCOON.sparse.size", size.as_bytes())];
                out.append_pax_extensions(records).unwrap();
            }
            let mut header = header(0o600, bytes.len() as u64);
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            out.append(&header, *bytes).unwrap();
        }
        out.into_inner().unwrap()
    }

    /// Directory with all blobs, as a pull leaves it.
    fn fetched_dir(spooled: &Spooled) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for blob in spooled.files.iter().flat_map(|f| &f.blobs) {
            std::fs::copy(&blob.file, dir.path().join(blob.digest.hex())).unwrap();
        }
        dir
    }

    /// Spools into the temporary directory of the system.
    fn spool(input: impl Read, version: CocoonVersion, level: i32) -> Result<Spooled, ImageError> {
        super::spool(input, version, level, &std::env::temp_dir())
    }

    #[test]
    fn spooled_files_exist_until_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("state/spool");
        let bytes = archive(&[("snapshot.json", CONFIG, None), ("m", &[1; 9000], None), ("n", b"", None)]);
        let spooled = super::spool(bytes.as_slice(), CocoonVersion::V1, 1, &folder).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
        assert!(spooled.files.iter().flat_map(|f| &f.blobs).all(|blob| blob.file.starts_with(&folder)));
        drop(spooled);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        super::spool(&bytes[..6000], CocoonVersion::V1, 1, &folder).err().unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing is left of one that fails");
    }

    const CONFIG: &[u8] =
        br#"{"version":1,"config":{"id":"s1","image":"ubuntu","cpu":2,"memory":1024,"hypervisor":"ch"}}"#;

    #[test]
    fn archive_round_trip_in_both_versions() {
        let memory: Vec<u8> = (0..3_000_000u32).map(|n| (n / 1000).to_le_bytes()[0]).collect();
        let map = r#"[{"o":0,"l":1500000},{"o":4000000,"l":1500000}]"#;
        let plain = archive(&[
            ("snapshot.json", CONFIG, None),
            ("config.json", b"{}", None),
            ("memory-ranges", &memory, Some((map, "6000000"))),
            ("empty", b"", None),
        ]);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        for (input, version) in
            [(plain.clone(), CocoonVersion::V1), (gzip.finish().unwrap(), CocoonVersion::V2)]
        {
            let spooled = spool(input.as_slice(), version, 1).unwrap();
            let (config, manifest) = wire::write(&spooled, version);
            let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
            let remote = wire::read(&json(&manifest), &json(&config)).unwrap();
            let (fetched, mut back) = (fetched_dir(&spooled), Vec::new());
            assert_eq!(write(&remote, "vm", fetched.path(), &mut back).unwrap(), 3_000_002);
            let again = spool(back.as_slice(), CocoonVersion::V1, 1).unwrap();
            let map = |(map, size): &(String, u64)| (serde_json::from_str::<Value>(map).unwrap(), *size);
            let told = |s: &Spooled| {
                let one =
                    |f: &SpooledFile| (f.title.clone(), f.mode, f.sparse.as_ref().map(map), f.body_bytes);
                s.files.iter().map(one).collect::<Vec<_>>()
            };
            assert_eq!(told(&again), told(&spooled), "{version:?}");
            let first = spool(plain.as_slice(), CocoonVersion::V1, 1).unwrap();
            let digests = |s: &Spooled| s.files.iter().map(|f| f.blobs[0].digest).collect::<Vec<_>>();
            assert_eq!(digests(&again), digests(&first), "{version:?}: byte for byte");
            assert_eq!((&again.config["image"], &again.config["cpu"]), (&json!("ubuntu"), &json!(2)));
        }
    }

    #[test]
    fn invalid_archive_table() {
        let head = ("snapshot.json", CONFIG, None);
        let file = ("config.json", b"{}".as_slice(), None);
        for (why, entries) in [
            ("no head", vec![file]),
            ("head alone", vec![head]),
            ("a path outside", vec![head, ("../etc/x", b"x".as_slice(), None)]),
            ("a name twice", vec![head, file, file]),
            ("a map that leads out", vec![head, ("m", b"xx".as_slice(), Some((r#"[{"o":9,"l":2}]"#, "10")))]),
            (
                "a map of more than there is",
                vec![head, ("m", b"xx".as_slice(), Some((r#"[{"o":0,"l":3}]"#, "10")))],
            ),
            ("a newer head", vec![("snapshot.json", br#"{"version":2,"config":{}}"#.as_slice(), None), file]),
        ] {
            assert!(spool(archive(&entries).as_slice(), CocoonVersion::V1, 1).is_err(), "{why}");
        }
        let whole = archive(&[head, ("config.json", &[7; 2000], None)]);
        assert!(spool(&whole[..whole.len() - 2500], CocoonVersion::V1, 1).is_err(), "cut off in a file");
        assert!(spool(&b""[..], CocoonVersion::V1, 1).is_err());
    }

    #[test]
    fn invalid_artifact_table() {
        let bytes = vec![1; 1_500_000];
        let spooled = spool(
            archive(&[("snapshot.json", CONFIG, None), ("m", &bytes, None)]).as_slice(),
            CocoonVersion::V2,
            1,
        )
        .unwrap();
        let (config, manifest) = wire::write(&spooled, CocoonVersion::V2);
        let good: (Value, Value) =
            (serde_json::from_slice(&manifest).unwrap(), serde_json::from_slice(&config).unwrap());
        type Change = fn(&mut (Value, Value));
        let changes: [(&str, Change); 6] = [
            ("a missing file", |g| g.0["layers"] = json!([])),
            ("a missing chunk", |g| g.0["layers"][0]["annotations"]["cocoonstack.chunk.count"] = "2".into()),
            ("another first chunk", |g| {
                g.0["layers"][0]["annotations"]["cocoonstack.chunk.index"] = "1".into()
            }),
            ("a path", |g| g.0["layers"][0]["annotations"]["org.opencontainers.image.title"] = "../x".into()),
            ("another artifact", |g| g.0["artifactType"] = "application/vnd.example".into()),
            ("a newer version", |g| g.1["schemaVersion"] = "v9".into()),
        ];
        for (why, change) in changes {
            let mut changed = good.clone();
            change(&mut changed);
            assert!(wire::read(&changed.0, &changed.1).is_err(), "{why}");
        }
        let mut remote = wire::read(&good.0, &good.1).unwrap();
        remote.files[0].body_bytes = Some(1_499_999);
        let fetched = fetched_dir(&spooled);
        assert!(write(&remote, "vm", fetched.path(), &mut Vec::new()).is_err(), "another length");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Accepted archives have plain names, and no more bytes than the input.
        #[test]
        fn spool_fuzz_does_not_panic_or_expand(draws in prop::collection::vec(any::<(u8, usize, u64)>(), 1..4), v2 in any::<bool>()) {
            let map = r#"[{"o":0,"l":1000},{"o":9000,"l":500}]"#;
            let mut tar = archive(&[
                ("snapshot.json", CONFIG, None),
                ("config.json", b"{}", None),
                ("memory-ranges", &[7; 1500], Some((map, "20000"))),
                ("overlay.raw", &[8; 3000], None),
            ]);
            make_wrong(&mut tar, &draws);
            let version = if v2 { CocoonVersion::V2 } else { CocoonVersion::V1 };
            if let Ok(spooled) = spool(tar.as_slice(), version, 1) {
                assert!(spooled.files.iter().all(|f| is_name(&f.title)));
                let stored: u64 = spooled.files.iter().flat_map(|f| &f.blobs).map(|b| b.bytes).sum();
                assert!(stored <= tar.len() as u64 && spooled.files.len() <= FILES_MAX);
            }
        }
    }
}
