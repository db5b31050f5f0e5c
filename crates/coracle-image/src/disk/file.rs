//! Disk images as files: what they are, raw copies of them, and empty disks that lie over such a copy.
//!
//! An image is anybody's: whatever its header names beside it (a backing file, a file for its data) is never opened.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, Mapping, Storage as _,
    StorageCreateOptions, StorageOpenOptions,
};

use super::artifact::DISK_MAX;
use super::pull::{name, partial};
use crate::{ImageError, sparse};

/// Bytes that are looked at, read and written at once.
const STEP: u64 = 2 << 20;
/// What is wrong with formats that are known and not read: first bytes, name.
const FOREIGN: [(&[u8], &str); 5] = [
    (b"KDMV", "VMDK"),
    (b"# Disk DescriptorFile", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"conectix", "VHD"),
    (b"<<< Oracle VM VirtualBox", "VDI"),
];

/// Makes `to` a raw, sparse copy of the disk image `from`, which is raw or qcow2. It has its name when it is whole and
/// synced. `progress` hears of bytes done, of all. Blocking. Returns the size of the disk, bytes.
///
/// # Errors
/// [`ImageError::Unsupported`] for other formats and for images that are not whole by themselves,
/// [`ImageError::Hostile`] for impossible sizes, [`ImageError::StorageFull`], [`ImageError::Io`].
pub fn raw_copy(from: &Path, to: &Path, progress: &dyn Fn(u64, u64)) -> Result<u64, ImageError> {
    let disk = open(from)?;
    let bytes = disk.size();
    if bytes == 0 || bytes > DISK_MAX || !bytes.is_multiple_of(512) {
        return Err(ImageError::hostile(format!("{}: a disk of {bytes} bytes", from.display())));
    }
    let part = partial(to);
    let copied = copy(&disk, bytes, &part, progress).and_then(|file| name(&file, &part, to));
    copied.map_err(|e| {
        let _leave_nothing = fs::remove_file(&part);
        ImageError::io("copy to", to, e)
    })?;
    Ok(bytes)
}

/// Makes `to` an empty qcow2 disk of that size, a multiple of 512 bytes, that names nothing it lies over: whoever opens it
/// says what that is. Blocking.
///
/// # Errors
/// [`ImageError::Io`], [`ImageError::StorageFull`].
pub fn empty_overlay(to: &Path, bytes: u64) -> Result<(), ImageError> {
    let made = || -> io::Result<()> {
        let storage = Storage::create_open(StorageCreateOptions::new().filename(to).overwrite(true))?;
        Qcow2::<Storage>::create_builder(storage).size(bytes).create()?;
        File::open(to)?.sync_all()
    };
    made().map_err(|e| ImageError::io("make", to, e))
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
    if !head.starts_with(b"QFI\xfb") {
        return Raw::builder(storage).open(gate).map(FormatAccess::new).map_err(failed);
    }
    let broken =
        |e| ImageError::hostile(format!("{}: a qcow2 header that cannot be read: {e}", path.display()));
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
            sparse::write_data(&file, part, at)?;
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

    fn nothing(_: u64, _: u64) {}

    #[test]
    fn a_raw_image_is_copied_with_its_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"start", 0).unwrap();
        file.write_all_at(b"end", (64 << 20) - 512).unwrap();
        assert_eq!(raw_copy(&from, &to, &nothing).unwrap(), 64 << 20);
        assert_eq!(fs::read(&from).unwrap(), fs::read(&to).unwrap());
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20, "holes stay");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing beside it");
    }

    #[test]
    fn an_overlay_is_empty_and_small_and_copied_as_zeroes() {
        let dir = tempfile::tempdir().unwrap();
        let (overlay, raw) = (dir.path().join("overlay"), dir.path().join("raw"));
        empty_overlay(&overlay, 10 << 30).unwrap();
        assert!(overlay.metadata().unwrap().len() < 1 << 20);
        assert_eq!(open(&overlay).unwrap().size(), 10 << 30);
        assert_eq!(raw_copy(&overlay, &raw, &nothing).unwrap(), 10 << 30);
        assert_eq!(raw.metadata().unwrap().blocks(), 0);
    }

    #[test]
    fn an_image_that_names_another_file_is_refused_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (image, to) = (dir.path().join("image"), dir.path().join("to"));
        let storage = Storage::create_open(StorageCreateOptions::new().filename(&image)).unwrap();
        let over = Qcow2::<Storage>::create_builder(storage).size(1 << 20);
        over.backing("/etc/passwd".to_owned(), "raw".to_owned()).create().unwrap();
        let refused = raw_copy(&image, &to, &nothing).unwrap_err();
        assert!(matches!(refused, ImageError::Unsupported { .. }), "{refused}");
        assert!(refused.to_string().contains("/etc/passwd"), "{refused}");
        assert!(!to.exists());
    }

    #[test]
    fn broken_and_foreign_images_are_refused_by_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (image, to) = (dir.path().join("image"), dir.path().join("to"));
        let cases: [(&str, Vec<u8>, &str); 5] = [
            ("empty", vec![], "0 bytes"),
            ("odd length", vec![1; 513], "513 bytes"),
            ("VMDK", b"KDMV\0\0".to_vec(), "qemu-img convert"),
            ("cut off", b"QFI\xfb\0\0\0\x03".to_vec(), "qcow2"),
            ("VHDX", b"vhdxfile".to_vec(), "VHDX"),
        ];
        for (what, bytes, says) in cases {
            fs::write(&image, bytes).unwrap();
            let refused = raw_copy(&image, &to, &nothing).unwrap_err().to_string();
            assert!(refused.contains(says), "{what}: {refused}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{what}");
        }
    }
}
