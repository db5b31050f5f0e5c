//! What becomes of a machine whose command has ended well: an image in a registry, where its owner asked for one.
//! So a Pod builds images: it runs scripts on a base, and its annotation says what comes of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_image::{Digest, NoProgress, PushOptions, Reference};
use coracle_proto::host as pb;
use tonic::Status;

use super::images;
use crate::vm::Commit;
use crate::{Exit, Host};

/// Annotation of a Pod, metadata of a VM: the reference under which its machine is pushed as an image when the command exited with 0.
pub const COMMIT_ANNOTATION: &str = "coracle.dev/commit";

/// The image that the annotations ask for. Pure; a door asks before it makes the machine, so that a word that is no
/// reference is refused then and not after hours of work.
///
/// # Errors
/// `InvalidArgument` for what is no reference, or one with a digest: that of the image is known when it is there.
pub fn commit_wish(annotations: &BTreeMap<String, String>) -> Result<Option<Reference>, Status> {
    let Some(text) = annotations.get(COMMIT_ANNOTATION) else { return Ok(None) };
    let wish = images::reference(text)?;
    match text.contains('@') {
        true => Err(Status::invalid_argument(format!(
            "{COMMIT_ANNOTATION}: {text} names a digest; an image that is yet to be made has a tag"
        ))),
        false => Ok(Some(wish)),
    }
}

impl Host {
    /// What the task of a VM does about its image when the command has ended.
    pub(crate) fn commit_job(&self) -> Commit {
        let host = self.downgrade();
        Box::new(move |vm, exit, wish| {
            let host = host.clone();
            Box::pin(async move {
                let host = host.upgrade().ok_or("the node stops")?;
                let made = host.commit_finished(vm.as_str(), &exit, &wish).await;
                made.map_err(|status| status.message().to_owned())
            })
        })
    }

    /// Makes an image of what the command left in `vm` and pushes it as `wish`, when the command exited with 0; returns
    /// the digest of its manifest. `None`: it did not, and nothing is made. The machine must still run. Idempotent: what
    /// is there is not moved again.
    ///
    /// # Errors
    /// Of the image or the registry; the image then stays on this node, under that name.
    pub async fn commit_finished(
        &self,
        vm: &str,
        exit: &Exit,
        wish: &Reference,
    ) -> Result<Option<Digest>, Status> {
        if !exit.success() {
            return Ok(None);
        }
        let request = pb::CommitVmRequest { vm: vm.to_owned(), reference: wish.to_string() };
        images::commit(self, request).await?;
        let pushed = self.images().push(wish, wish, &PushOptions::default(), Arc::new(NoProgress)).await;
        let name = wish.to_string();
        pushed.map(|report| Some(report.digest)).map_err(images::failed(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wish_table() {
        for (why, value, want) in [
            ("nobody asks", None, Ok(None)),
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
            let got = commit_wish(&annotations).map(|wish| wish.map(|r| r.to_string())).map_err(drop);
            assert_eq!(got, want.map(|w| w.map(str::to_owned)), "{why}");
        }
    }

    #[test]
    fn success_table() {
        for (why, code, signal, error, want) in [
            ("it ended well", 0, 0, "", true),
            ("a code", 3, 0, "", false),
            ("a signal", 137, 9, "", false),
            ("it never ran", 0, 0, "no such file", false),
        ] {
            assert_eq!(Exit { code, signal, error: error.to_owned() }.success(), want, "{why}");
        }
    }
}
