//! Writable disk of a VM: an empty ext4 file system, made once per size and then copied sparsely.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_files as files;

/// Directories on the disk that the guest mounts its overlay from. `/etc` exists in advance, because every guest writes into it
/// and would first have to copy it up.
const DIRECTORIES: [&str; 3] = ["upper", "upper/etc", "work"];

/// Creates an empty ext4 disk of `size_mib` at `to`. Blocking. Idempotent: an existing disk is kept.
///
/// # Errors
/// When `mke2fs` is missing or fails, or no space is left.
pub fn ensure_overlay(cache_dir: &Path, to: &Path, size_mib: u64) -> io::Result<()> {
    if to.exists() {
        return Ok(());
    }
    copy(&ensure_blank(cache_dir, size_mib)?, to)
}

/// Copies a disk to `to` atomically. Blocking.
///
/// # Errors
/// Errors of the copy, such as a full file system.
pub fn copy(disk: &Path, to: &Path) -> io::Result<()> {
    let part = to.with_extension("part");
    files::copy_sparse(disk, &part)?;
    std::fs::rename(&part, to)?;
    files::sync_parent(to)
}

fn ensure_blank(cache_dir: &Path, size_mib: u64) -> io::Result<PathBuf> {
    let blank = cache_dir.join(format!("blank-{size_mib}.ext4"));
    if blank.exists() {
        return Ok(blank);
    }
    std::fs::create_dir_all(cache_dir)?;
    // The name is unique: two concurrent creations may race for the first blank disk of a size, and either result is usable.
    let part = tempfile_in(cache_dir, size_mib)?;
    let size = size_mib.checked_mul(1 << 20).ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::File::create(&part)?.set_len(size)?;
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", "coracle", "-J", "size=4"]);
    // A file of holes is zero already, so the kernel of the guest need not zero it. Metadata checksums are off: in a file of
    // the host they cost a clone more than they detect.
    command.args(["-E", "assume_storage_prezeroed=1,nodiscard", "-O", "^metadata_csum"]);
    let made = InitialContent::new(&part).and_then(|content| {
        if let Some(content) = &content {
            command.arg("-d").arg(&content.0);
        }
        let named =
            |e: io::Error| io::Error::new(e.kind(), format!("run mke2fs ({e}); install Debian's e2fsprogs"));
        let output =
            command.arg(&part).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").output().map_err(named)?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        std::fs::rename(&part, &blank)
    });
    if made.is_err() {
        let _leave_nothing = std::fs::remove_file(&part);
    }
    made.map(|()| blank)
}

/// Directory with the initial content of the disk, removed on drop.
struct InitialContent(PathBuf);

impl InitialContent {
    /// `None` without root: files on the disk would belong to the current user. The guest creates the directories itself then.
    fn new(part: &Path) -> io::Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let content = Self(part.with_extension("inside"));
        for directory in DIRECTORIES {
            let directory = content.0.join(directory);
            std::fs::create_dir_all(&directory)?;
            // Sets the mode of the container's root directory, independent of the umask.
            std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        }
        Ok(Some(content))
    }
}

impl Drop for InitialContent {
    fn drop(&mut self) {
        let _leave_nothing = files::remove_tree(&self.0);
    }
}

fn tempfile_in(dir: &Path, size_mib: u64) -> io::Result<PathBuf> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    Ok(dir.join(format!("blank-{size_mib}.{}.{n}.part", std::process::id())))
}
