//! Annotation that requests an image of the root file system that a VM's workload leaves.

use std::collections::BTreeMap;

use coracle_oci::{OciError, Reference};

use crate::HostError;

/// Metadata of a VM, annotation of a Pod: reference under which the VM is pushed as an image when its workload exited
/// with 0.
pub const COMMIT_ANNOTATION: &str = "coracle.dev/commit";

/// Returns the image that the metadata request. Frontends check it before they create the VM, so that an invalid reference is
/// refused at once. Pure.
///
/// # Errors
/// [`HostError::Invalid`] for an invalid reference, and for one with a digest.
pub fn commit_request(metadata: &BTreeMap<String, String>) -> Result<Option<Reference>, HostError> {
    let Some(text) = metadata.get(COMMIT_ANNOTATION) else { return Ok(None) };
    let invalid = |error: OciError| HostError::Invalid { message: format!("{COMMIT_ANNOTATION}: {error}") };
    let reference = text.parse().map_err(invalid)?;
    match text.contains('@') {
        true => Err(HostError::Invalid {
            message: format!(
                "{COMMIT_ANNOTATION}: {text} names a digest, which is not known before the image is made: use a tag"
            ),
        }),
        false => Ok(Some(reference)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_request_table() {
        for (why, value, want) in [
            ("no annotation", None, Ok(None)),
            ("a tag", Some("registry.example:5000/xcode:26"), Ok(Some("registry.example:5000/xcode:26"))),
            ("no tag is latest", Some("registry.example/xcode"), Ok(Some("registry.example/xcode:latest"))),
            ("no reference", Some("Not A Reference"), Err(())),
            ("nothing", Some(""), Err(())),
            (
                "a digest",
                Some(concat!(
                    "r.example/x@sha256:",
                    "0000000000000000000000000000000000000000000000000000000000000000"
                )),
                Err(()),
            ),
        ] {
            let annotations =
                value.map(|v| (COMMIT_ANNOTATION.to_owned(), v.to_owned())).into_iter().collect();
            let got =
                commit_request(&annotations).map(|reference| reference.map(|r| r.to_string())).map_err(drop);
            assert_eq!(got, want.map(|w| w.map(str::to_owned)), "{why}");
        }
    }
}
