//! The error of a damaged archive.

use crate::ImageError;

/// The archive is damaged, in this way.
pub(super) fn damaged(how: &str) -> ImageError {
    ImageError::hostile(format!("archive is damaged: {how}"))
}
