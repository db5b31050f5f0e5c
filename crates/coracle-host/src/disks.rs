//! The writable disk of a VM: an empty ext4 made once per size, then copied sparsely.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::files;

/// Makes `to` an empty ext4 of `size_mib`. Blocking, idempotent: an existing disk is kept.
///
/// # Errors
/// `mke2fs` missing or failing; no space.
pub(crate) fn ensure_overlay(cache_dir: &Path, to: &Path, size_mib: u64) -> io::Result<()> {
    if to.exists() {
        return Ok(());
    }
    let blank = ensure_blank(cache_dir, size_mib)?;
    let part = to.with_extension("part");
    files::copy_sparse(&blank, &part)?;
    std::fs::rename(&part, to)?;
    files::sync_parent(to)
}

fn ensure_blank(cache_dir: &Path, size_mib: u64) -> io::Result<PathBuf> {
    let blank = cache_dir.join(format!("blank-{size_mib}.ext4"));
    if blank.exists() {
        return Ok(blank);
    }
    std::fs::create_dir_all(cache_dir)?;
    // Unique: two creations may race for the first blank of a size, and either is as good.
    let part = tempfile_in(cache_dir, size_mib)?;
    let size = size_mib.checked_mul(1 << 20).ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::File::create(&part)?.set_len(size)?;
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", "coracle"])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "-J", "size=4"])
        .arg(&part)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output();
    let made = match output {
        Ok(output) if output.status.success() => std::fs::rename(&part, &blank),
        Ok(output) => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
        Err(e) => Err(io::Error::new(e.kind(), format!("run mke2fs ({e}); install Debian's e2fsprogs"))),
    };
    if made.is_err() {
        let _leave_nothing = std::fs::remove_file(&part);
    }
    made.map(|()| blank)
}

fn tempfile_in(dir: &Path, size_mib: u64) -> io::Result<PathBuf> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    Ok(dir.join(format!("blank-{size_mib}.{}.{n}.part", std::process::id())))
}
