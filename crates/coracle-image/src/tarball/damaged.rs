//! Error of a damaged archive.

use crate::ImageError;

/// Error of an archive that is damaged as `how` says.
pub(super) fn damaged(how: &str) -> ImageError {
    ImageError::hostile(format!("archive is damaged: {how}"))
}
