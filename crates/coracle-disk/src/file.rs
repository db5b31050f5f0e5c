//! Disk image files: formats, raw copies, and empty overlays.
//!
//! Images are untrusted: files that their headers refer to (backing file, data file) are never opened.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, Mapping, Storage as _,
    StorageCreateOptions, StorageOpenOptions,
};

use super::artifact::DISK_MAX;
use super::pull::{partial_path, publish};
use coracle_image::{ImageError, sparse::write_data};

/// First bytes of a qcow2 image (QEMU, docs/interop/qcow2.txt).
const QCOW2: &[u8; 4] = b"QFI\xfb";
/// Bytes per read and write.
const STEP: u64 = 2 << 20;
/// Known formats that are not supported: first bytes and name.
const FOREIGN: [(&[u8], &str); 5] = [
    (b"KDMV", "VMDK"),
    (b"# Disk DescriptorFile", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"conectix", "VHD"),
    (b"<<< Oracle VM VirtualBox", "VDI"),
];

/// Copies the raw or qcow2 image `from` to the raw sparse file `to`, which is synced before it gets its name. Reports bytes
/// done and total to `progress`. Returns the size of the disk in bytes. Blocking.
///
/// # Errors
/// `OciError::Unsupported` for other formats and for images with external files, `OciError::Hostile` for invalid sizes,
/// `OciError::StorageFull`, `OciError::Io`.
pub fn raw_copy(from: &Path, to: &Path, progress: &dyn Fn(u64, u64)) -> Result<u64, ImageError> {
    publish_copy(&open(from)?, (from, to), progress)
}

/// Moves a disk to its final path on the same file system. A raw disk is renamed; another format is copied, and the source
/// removed. Returns the size of the disk in bytes, and whether it was raw. Blocking.
///
/// # Errors
/// Like [`raw_copy`].
pub fn take_raw(from: &Path, to: &Path, progress: &dyn Fn(u64, u64)) -> Result<(u64, bool), ImageError> {
    let failed = |e| ImageError::io("move", from, e);
    let is_raw =
        File::open(from).and_then(|file| is_qcow2(&file)).map(|is_qcow2| !is_qcow2).map_err(failed)?;
    let disk = open(from)?;
    let bytes = disk.size();
    if is_raw && bytes > 0 && bytes.is_multiple_of(512) {
        drop(disk);
        File::open(from).and_then(|file| publish(&file, from, to)).map_err(failed)?;
        return Ok((bytes, true));
    }
    let bytes = publish_copy(&disk, (from, to), progress)?;
    fs::remove_file(from).map_err(failed)?;
    Ok((bytes, false))
}

/// True for a qcow2 image, by its first bytes. Blocking.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn is_qcow2(file: &File) -> io::Result<bool> {
    let mut head = [0; QCOW2.len()];
    match file.read_exact_at(&mut head, 0) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| head == *QCOW2),
    }
}

/// Like [`raw_copy`], for the qcow2 overlay `overlay` merged with its raw base disk `base`: the disk that a VM sees.
///
/// # Errors
/// Like [`raw_copy`].
pub fn merged_copy(
    overlay: &Path,
    base: &Path,
    to: &Path,
    progress: &dyn Fn(u64, u64),
) -> Result<u64, ImageError> {
    publish_copy(&open_over(overlay, base)?, (overlay, to), progress)
}

fn publish_copy(
    disk: &FormatAccess<Storage>,
    (from, to): (&Path, &Path),
    progress: &dyn Fn(u64, u64),
) -> Result<u64, ImageError> {
    let bytes = disk.size();
    if bytes == 0 || bytes > DISK_MAX || !bytes.is_multiple_of(512) {
        return Err(ImageError::hostile(format!("{}: invalid disk size {bytes}", from.display())));
    }
    let part = partial_path(to);
    let copied = copy(disk, bytes, &part, progress).and_then(|file| publish(&file, &part, to));
    copied.map_err(|e| {
        let _removed = fs::remove_file(&part);
        ImageError::io("copy to", to, e)
    })?;
    Ok(bytes)
}

/// Creates an empty qcow2 overlay of `bytes`, a multiple of 512. Its header names no backing file, because the VMM configures
/// the backing file. Blocking.
///
/// # Errors
/// `OciError::Io`, `OciError::StorageFull`.
pub fn empty_overlay(to: &Path, bytes: u64) -> Result<(), ImageError> {
    let made = || -> io::Result<()> {
        let storage = Storage::create_open(StorageCreateOptions::new().filename(to).overwrite(true))?;
        Qcow2::<Storage>::create_builder(storage).size(bytes).create()?;
        File::open(to)?.sync_all()
    };
    made().map_err(|e| ImageError::io("create", to, e))
}

/// Opens an overlay that this node created, whose header names no other file.
fn open_over(overlay: &Path, base: &Path) -> Result<FormatAccess<Storage>, ImageError> {
    let storage = |path: &Path| {
        let opened = Storage::open(StorageOpenOptions::new().filename(path));
        opened.map_err(|e| ImageError::io("open", path, e))
    };
    let raw = Raw::builder(storage(base)?).open(DenyImplicitOpenGate::default());
    let raw = raw.map(FormatAccess::new).map_err(|e| ImageError::io("open", base, e))?;
    let over = Qcow2::<Storage>::builder(storage(overlay)?).backing(Some(raw)).data_file(None);
    let broken = |e| ImageError::hostile(format!("{}: cannot read qcow2 header: {e}", overlay.display()));
    over.open(DenyImplicitOpenGate::default()).map(FormatAccess::new).map_err(broken)
}

fn open(path: &Path) -> Result<FormatAccess<Storage>, ImageError> {
    let failed = |e| ImageError::io("open", path, e);
    let mut head = Vec::new();
    File::open(path).and_then(|file| file.take(64).read_to_end(&mut head)).map_err(failed)?;
    if let Some((_, format)) = FOREIGN.iter().find(|(magic, _)| head.starts_with(magic)) {
        let path = path.display();
        return Err(ImageError::unsupported(format!(
            "{path}: a {format} disk; `qemu-img convert -O qcow2 {path} NEW` makes one that is"
        )));
    }
    let storage = Storage::open(StorageOpenOptions::new().filename(path)).map_err(failed)?;
    let gate = DenyImplicitOpenGate::default();
    if !head.starts_with(QCOW2) {
        return Raw::builder(storage).open(gate).map(FormatAccess::new).map_err(failed);
    }
    let broken = |e| ImageError::hostile(format!("{}: cannot read qcow2 header: {e}", path.display()));
    let disk = Qcow2::<Storage>::builder(storage).backing(None).data_file(None).open(gate).map_err(broken)?;
    let named = disk.implicit_backing_file().or_else(|| disk.implicit_external_data_file());
    if let Some(other) = named {
        return Err(ImageError::unsupported(format!(
            "{}: an image that lies over another ({other:?}); `qemu-img convert` makes one that is whole",
            path.display()
        )));
    }
    Ok(FormatAccess::new(disk))
}

fn copy(
    disk: &FormatAccess<Storage>,
    bytes: u64,
    to: &Path,
    progress: &dyn Fn(u64, u64),
) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(true).open(to)?;
    file.set_len(bytes)?;
    let mut buffer = vec![0; usize::try_from(STEP).map_err(io::Error::other)?];
    let mut at = 0;
    while at < bytes {
        let (mapping, length) = disk.get_mapping(at, bytes - at)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let zero = matches!(mapping, Mapping::Zero { .. });
        let end = if zero { at + length } else { at + length.min(STEP) };
        if !zero && let Some(part) = buffer.get_mut(..usize::try_from(end - at).map_err(io::Error::other)?) {
            disk.read(&mut *part, at)?;
            write_data(&file, part, at)?;
        }
        at = end;
        progress(at, bytes);
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    fn ignore_progress(_: u64, _: u64) {}

    #[test]
    fn raw_copy_keeps_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"start", 0).unwrap();
        file.write_all_at(b"end", (64 << 20) - 512).unwrap();
        assert_eq!(raw_copy(&from, &to, &ignore_progress).unwrap(), 64 << 20);
        assert_eq!(fs::read(&from).unwrap(), fs::read(&to).unwrap());
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20, "holes stay");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing beside it");
    }

    #[test]
    fn empty_overlay_is_small_and_copies_as_zeros() {
        let dir = tempfile::tempdir().unwrap();
        let (overlay, raw) = (dir.path().join("overlay"), dir.path().join("raw"));
        empty_overlay(&overlay, 10 << 30).unwrap();
        assert!(overlay.metadata().unwrap().len() < 1 << 20);
        assert_eq!(open(&overlay).unwrap().size(), 10 << 30);
        assert_eq!(raw_copy(&overlay, &raw, &ignore_progress).unwrap(), 10 << 30);
        assert_eq!(raw.metadata().unwrap().blocks(), 0);
    }

    #[test]
    fn merged_copy_is_the_overlay_over_its_base() {
        let dir = tempfile::tempdir().unwrap();
        let (base, overlay, to) =
            (dir.path().join("base"), dir.path().join("overlay"), dir.path().join("to"));
        let file = File::create(&base).unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(b"of the base", 0).unwrap();
        file.write_all_at(b"hidden", 2 << 20).unwrap();
        empty_overlay(&overlay, 8 << 20).unwrap();
        let storage = Storage::open(StorageOpenOptions::new().filename(&overlay).write(true)).unwrap();
        let raw = Storage::open(StorageOpenOptions::new().filename(&base)).unwrap();
        let raw = FormatAccess::new(Raw::builder(raw).open(DenyImplicitOpenGate::default()).unwrap());
        let over = Qcow2::<Storage>::builder(storage).backing(Some(raw)).write(true);
        let disk = FormatAccess::new(over.open(DenyImplicitOpenGate::default()).unwrap());
        disk.write(&b"written"[..], 2 << 20).unwrap();
        disk.write(&b"behind the base"[..], 6 << 20).unwrap();
        disk.flush().unwrap();
        drop(disk);
        assert_eq!(merged_copy(&overlay, &base, &to, &ignore_progress).unwrap(), 8 << 20);
        let file = File::open(&to).unwrap();
        for (at, want) in [(0, &b"of the base"[..]), (2 << 20, b"written"), (6 << 20, b"behind the base")] {
            let mut found = vec![0; want.len()];
            file.read_exact_at(&mut found, at).unwrap();
            assert_eq!(found, want, "at {at}");
        }
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20, "holes stay");
    }

    #[test]
    fn image_with_external_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (image, to) = (dir.path().join("image"), dir.path().join("to"));
        let storage = Storage::create_open(StorageCreateOptions::new().filename(&image)).unwrap();
        let over = Qcow2::<Storage>::create_builder(storage).size(1 << 20);
        over.backing("/etc/passwd".to_owned(), "raw".to_owned()).create().unwrap();
        let refused = raw_copy(&image, &to, &ignore_progress).unwrap_err();
        assert!(matches!(refused, ImageError::Oci(coracle_oci::OciError::Unsupported { .. })), "{refused}");
        assert!(refused.to_string().contains("/etc/passwd"), "{refused}");
        assert!(!to.exists());
    }

    #[test]
    fn unsupported_image_is_refused_by_format() {
        let dir = tempfile::tempdir().unwrap();
        let (image, to) = (dir.path().join("image"), dir.path().join("to"));
        let cases: [(&str, Vec<u8>, &str); 5] = [
            ("empty", vec![], "disk size 0"),
            ("odd length", vec![1; 513], "disk size 513"),
            ("VMDK", b"KDMV\0\0".to_vec(), "qemu-img convert"),
            ("cut off", b"QFI\xfb\0\0\0\x03".to_vec(), "qcow2"),
            ("VHDX", b"vhdxfile".to_vec(), "VHDX"),
        ];
        for (what, bytes, says) in cases {
            fs::write(&image, bytes).unwrap();
            let refused = raw_copy(&image, &to, &ignore_progress).unwrap_err().to_string();
            assert!(refused.contains(says), "{what}: {refused}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{what}");
        }
    }
}
