//! Room on a disk, looked at before it is filled.

use std::path::Path;

use crate::ImageError;

/// Refuses beforehand what cannot fit, instead of filling the disk of a host that runs VMs.
pub(crate) fn check(dir: &Path, missing_bytes: u64, operation: &str) -> Result<(), ImageError> {
    let stat = rustix::fs::statvfs(dir).map_err(|e| ImageError::io("look at", dir, e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if missing_bytes <= free {
        return Ok(());
    }
    let operation = format!("{operation}, which needs {missing_bytes} bytes where {free} are free");
    Err(ImageError::StorageFull { operation, source: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_fit_is_refused_with_both_numbers() {
        let dir = tempfile::tempdir().unwrap();
        check(dir.path(), 0, "pull").unwrap();
        let refused = check(dir.path(), u64::MAX, "pull x").unwrap_err();
        assert!(matches!(refused, ImageError::StorageFull { .. }));
        assert!(
            refused.to_string().contains("pull x, which needs 18446744073709551615 bytes where"),
            "{refused}"
        );
    }
}
