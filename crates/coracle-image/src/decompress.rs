//! Bounded decompression of layers that also computes their digest.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use crate::{Compression, ImageError, Limits, tarball::LimitExceeded};
use coracle_oci::{Digest, Hasher, Meter};

/// Largest accepted zstd window: 128 MiB, the default limit of `zstd -d`.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Remaining limits of an image, shared by all of its layers.
#[derive(Clone, Debug)]
pub struct Budget {
    /// Decompressed bytes left.
    pub unpacked_bytes: u64,
    /// Archive entries left.
    pub entries: u64,
    /// Bytes of memory left for names and attributes.
    pub metadata_bytes: u64,
}

impl Budget {
    /// Initial budget of one image.
    #[must_use]
    pub fn of(limits: &Limits) -> Self {
        let Limits { unpacked_bytes, entries, metadata_bytes, .. } = *limits;
        Self { unpacked_bytes, entries, metadata_bytes }
    }
}

/// Reader that decompresses a layer.
pub struct DecompressReader<'b> {
    inner: Box<dyn Read + 'b>,
    hasher: Hasher,
    budget: &'b mut Budget,
}

impl<'b> DecompressReader<'b> {
    /// Opens a stored layer. Reports to `meter` how many stored bytes were read.
    ///
    /// # Errors
    /// [`ImageError::Oci`] when the file cannot be opened.
    pub fn open(
        path: &Path,
        compression: Compression,
        budget: &'b mut Budget,
        meter: Option<Meter>,
    ) -> Result<Self, ImageError> {
        let file = File::open(path).map_err(|e| ImageError::io("open layer", path, e))?;
        Self::new(file, compression, budget, meter).map_err(|e| ImageError::io("open layer", path, e))
    }

    /// Decompresses `from`.
    ///
    /// # Errors
    /// Errors of the decompressor.
    pub fn new(
        from: impl Read + 'b,
        compression: Compression,
        budget: &'b mut Budget,
        meter: Option<Meter>,
    ) -> io::Result<Self> {
        let input = BufReader::with_capacity(128 << 10, Metered { from, done: 0, meter });
        let inner: Box<dyn Read + 'b> = match compression {
            Compression::None => Box::new(input),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
            Compression::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(input)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
        };
        Ok(Self { inner, hasher: Hasher::default(), budget })
    }

    /// Hashes with the algorithm of `digest` instead of SHA-256. Call it before the first read.
    #[must_use]
    pub fn hashed_like(mut self, digest: &Digest) -> Self {
        self.hasher = digest.hasher();
        self
    }

    /// Counts an archive entry.
    ///
    /// # Errors
    /// [`ImageError::Oci`] when the image has too many.
    pub fn count_entry(&mut self) -> Result<(), ImageError> {
        let left = self.budget.entries.checked_sub(1);
        self.budget.entries = left.ok_or_else(|| ImageError::hostile("the image has too many files"))?;
        Ok(())
    }

    /// Charges the memory of an entry that is kept until the image is complete.
    ///
    /// # Errors
    /// [`ImageError::Oci`] when the image needs too much.
    pub fn charge_metadata(&mut self, bytes: u64) -> Result<(), ImageError> {
        let left = self.budget.metadata_bytes.checked_sub(bytes);
        self.budget.metadata_bytes = left
            .ok_or_else(|| ImageError::hostile("names and attributes of the image take too much memory"))?;
        Ok(())
    }

    /// Digest of all bytes read.
    #[must_use]
    pub fn digest(self) -> Digest {
        self.hasher.finish()
    }
}

impl Read for DecompressReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buffer)?;
        let left = self.budget.unpacked_bytes.checked_sub(got as u64);
        self.budget.unpacked_bytes =
            left.ok_or_else(|| LimitExceeded::error("the image unpacks to too many bytes".to_owned()))?;
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
