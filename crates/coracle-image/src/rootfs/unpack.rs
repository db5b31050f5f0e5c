//! The decompressed bytes of one layer: counted, bounded and hashed as they pass.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use crate::{Digest, ImageError, digest::Hasher, manifest::Packing, progress::Meter, tarball::Refusal};

/// Largest zstd window that is accepted: 128 MiB, what `zstd -d` accepts without being asked.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// What is left of the bounds over all layers of an image.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    pub(crate) unpacked_bytes: u64,
    pub(crate) entries: u64,
}

/// A decompressing reader.
pub(crate) struct Unpacked<'b> {
    inner: Box<dyn Read + 'b>,
    hasher: Hasher,
    budget: &'b mut Budget,
}

impl<'b> Unpacked<'b> {
    /// Opens a stored layer. `meter` hears of the stored bytes as they are read.
    pub(crate) fn open(
        path: &Path,
        packing: Packing,
        budget: &'b mut Budget,
        meter: Option<Meter>,
    ) -> Result<Self, ImageError> {
        let file = File::open(path).map_err(|e| ImageError::io("open layer", path, e))?;
        Self::new(file, packing, budget, meter).map_err(|e| ImageError::io("open layer", path, e))
    }

    pub(crate) fn new(
        from: impl Read + 'b,
        packing: Packing,
        budget: &'b mut Budget,
        meter: Option<Meter>,
    ) -> io::Result<Self> {
        let input = BufReader::with_capacity(128 << 10, Metered { from, done: 0, meter });
        let inner: Box<dyn Read + 'b> = match packing {
            Packing::Plain => Box::new(input),
            Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
            Packing::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(input)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
        };
        Ok(Self { inner, hasher: Hasher::default(), budget })
    }

    /// One more archive entry.
    pub(crate) fn count_entry(&mut self) -> Result<(), ImageError> {
        let left = self.budget.entries.checked_sub(1);
        self.budget.entries = left.ok_or_else(|| ImageError::hostile("the image has too many files"))?;
        Ok(())
    }

    /// Digest of all that was read.
    pub(crate) fn digest(self) -> Digest {
        self.hasher.finish()
    }
}

impl Read for Unpacked<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buffer)?;
        let left = self.budget.unpacked_bytes.checked_sub(got as u64);
        self.budget.unpacked_bytes =
            left.ok_or_else(|| Refusal::error("the image unpacks to too many bytes".to_owned()))?;
        self.hasher.update(&buffer[..got]);
        Ok(got)
    }
}

struct Metered<R> {
    from: R,
    done: u64,
    meter: Option<Meter>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.from.read(buffer)?;
        self.done += got as u64;
        if let Some(meter) = &self.meter {
            meter.at(self.done);
        }
        Ok(got)
    }
}
