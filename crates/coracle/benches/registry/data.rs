//! Transferred data: an image of random bytes, and a disk with typical contents. The same bytes in every run.

use std::{fs::File, io::Read, os::unix::fs::FileExt, path::Path};

use anyhow::{Context as _, Result, ensure};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use rustix::fs::Advice;

/// Sizes of the image and of the disk: one GiB each.
pub(crate) const IMAGE_BYTES: u64 = 1 << 30;
pub(crate) const DISK_BYTES: u64 = 1 << 30;
/// Length of each range of data on the disk, which a hole of one and a half times the length follows.
const PIECE_BYTES: u64 = 16 << 20;
const STRIDE_BYTES: u64 = 40 << 20;
const MIB: usize = 1 << 20;

/// Generator of pseudo-random bytes (xorshift).
struct Noise(u64);

impl Noise {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut all = Vec::with_capacity(count + 8);
        while all.len() < count {
            all.extend_from_slice(&self.next().to_le_bytes());
        }
        all.truncate(count);
        all
    }

    /// Returns text of few different words, which compresses like logs, sources and tables.
    fn text(&mut self, count: usize) -> Vec<u8> {
        const WORDS: [&str; 16] = [
            "error ",
            "the ",
            "kernel: ",
            "0x7ffd",
            "user=",
            "systemd[1] ",
            "started ",
            "{\"id\": ",
            "\n",
            "libc.so.6 ",
            "of ",
            "int main ",
            "2026-11-",
            "true, ",
            "/usr/share/",
            "    ",
        ];
        let mut all = Vec::with_capacity(count + 64);
        while all.len() < count {
            let draw = self.next();
            let word = usize::try_from(draw % 16).unwrap_or(0);
            all.extend_from_slice(WORDS[word].as_bytes());
            all.extend_from_slice((draw >> 48).to_string().as_bytes());
        }
        all.truncate(count);
        all
    }
}

/// Writes an OCI layout with one image, tagged `1`, whose layers are archives of random bytes.
pub(crate) fn image(layout: &Path, layers: usize) -> Result<()> {
    let each = usize::try_from(IMAGE_BYTES)? / layers;
    let seeds = 1..=u64::try_from(layers)?;
    let layer = |seed| LayerTar::new().file("noise", 0o644, &Noise::new(seed).bytes(each)).finish();
    let layers: Vec<_> = seeds.map(layer).collect();
    write_layout(layout, &layers, &ImageSpec::default(), "1").map(drop)
}

/// Writes a disk with two fifths of data, half of it random and half of it text; the rest are holes.
pub(crate) fn disk(path: &Path) -> Result<()> {
    let file = File::create(path)?;
    file.set_len(DISK_BYTES)?;
    let piece = usize::try_from(PIECE_BYTES)?;
    for at in (0..DISK_BYTES - PIECE_BYTES).step_by(usize::try_from(STRIDE_BYTES)?) {
        let mut noise = Noise::new(at + 1);
        let bytes =
            if (at / STRIDE_BYTES).is_multiple_of(2) { noise.bytes(piece) } else { noise.text(piece) };
        file.write_all_at(&bytes, at)?;
    }
    Ok(file.sync_all()?)
}

/// Returns the bytes of the disk outside of holes.
pub(crate) fn data_bytes() -> u64 {
    (DISK_BYTES - PIECE_BYTES).div_ceil(STRIDE_BYTES) * PIECE_BYTES
}

/// Changes one percent of the data, in two places.
pub(crate) fn change(path: &Path) -> Result<u64> {
    let file = File::options().write(true).open(path)?;
    let half = data_bytes() / 200;
    for (n, at) in
        [3 * STRIDE_BYTES + PIECE_BYTES / 3, 10 * STRIDE_BYTES + PIECE_BYTES / 2].into_iter().enumerate()
    {
        let bytes = Noise::new(1000 + u64::try_from(n)?).bytes(usize::try_from(half)?);
        file.write_all_at(&bytes, at)?;
    }
    file.sync_all()?;
    Ok(2 * half)
}

/// Syncs the files below a directory and drops them from the page cache. Only these files, because other programs use the
/// machine.
pub(crate) fn forget(path: &Path) -> Result<()> {
    if path.is_dir() {
        return std::fs::read_dir(path)?.try_for_each(|entry| forget(&entry?.path()));
    }
    if let Ok(file) = File::open(path) {
        file.sync_data()?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// Fails unless two files have the same bytes.
pub(crate) fn compare(left: &Path, right: &Path) -> Result<()> {
    let open = |path: &Path| File::open(path).with_context(|| format!("open {}", path.display()));
    let (mut one, mut other) = (open(left)?, open(right)?);
    ensure!(one.metadata()?.len() == other.metadata()?.len(), "{} has another length", right.display());
    let (mut a, mut b) = (vec![0; MIB], vec![0; MIB]);
    loop {
        let n = one.read(&mut a)?;
        if n == 0 {
            return Ok(());
        }
        other.read_exact(&mut b[..n])?;
        ensure!(a[..n] == b[..n], "{} has other bytes", right.display());
    }
}

/// Converts bytes to MiB, for rates.
pub(crate) fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 20).unwrap_or(u32::MAX))
}
