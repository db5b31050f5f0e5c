//! Files on a datastore.

use reqwest::Method;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::{
    session::Session,
    tasks::TaskWatch,
    xml::{el, reference, text},
};
use crate::{File, Object, Site, VsphereError};

/// Datastore path of `path`: `[store] path`.
pub(super) fn datastore_path(site: &Site, path: &str) -> String {
    format!("[{}] {path}", site.iso.name)
}

/// Percent-encodes all characters of a path or a query value except the unreserved ones (RFC 3986, section 2.3).
fn percent(text: &str, keep_slash: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || (keep_slash && byte == b'/');
        if plain {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

pub(super) async fn make_folder(session: &Session, site: &Site, folder: &str) -> Result<(), VsphereError> {
    let arguments = text("name", datastore_path(site, folder))
        + &reference("datacenter", &site.datacenter)
        + &text("createParentDirectories", true);
    match session.call("MakeDirectory", &session.content.file_manager, &arguments).await {
        Err(error) if error.fault() == Some("FileAlreadyExists") => Ok(()),
        other => other.map(drop),
    }
}

/// Path and query of a file's URL at vCenter.
pub(super) fn url(site: &Site, path: &str) -> String {
    let datacenter = percent(site.spec.datacenter.trim_matches('/'), false);
    format!("{}&dcPath={datacenter}", url_at_host(site, path))
}

/// Path and query of a file's URL at a host, which does not know the datacenters of vCenter.
pub(super) fn url_at_host(site: &Site, path: &str) -> String {
    format!("/folder/{}?dsName={}", percent(path, true), percent(&site.iso.name, false))
}

/// Reads a file and returns its SHA-256. Gives up when no byte arrives for a while. `None`: a VM has locked the file.
pub(super) async fn digest(
    session: &Session,
    site: &Site,
    path: &str,
) -> Result<Option<String>, VsphereError> {
    let operation = || format!("read {}", datastore_path(site, path));
    let request = session.request(Method::GET, &url(site, path)).await;
    let mut response = request.send().await.map_err(|e| session.transport(operation(), e))?;
    match response.status().as_u16() {
        200 => {}
        // A host refuses to open a file that a VM has locked.
        403 | 409 | 423 | 500 => return Ok(None),
        status => return Err(VsphereError::Status { operation: operation(), status }),
    }
    let mut sum = Sha256::new();
    loop {
        let stalled =
            |_| VsphereError::Protocol { operation: operation(), what: "no byte came for too long".into() };
        let chunk = timeout(session.options().upload_idle, response.chunk()).await.map_err(stalled)?;
        match chunk.map_err(|e| session.transport(operation(), e))? {
            Some(bytes) => sum.update(&bytes),
            None => return Ok(Some(hex::encode(sum.finalize()))),
        }
    }
}

/// Files of a folder; `None`: the folder does not exist.
pub(super) async fn search(
    session: &Session,
    tasks: &TaskWatch,
    browser: &Object,
    site: &Site,
    folder: &str,
    pattern: &str,
) -> Result<Option<Vec<File>>, VsphereError> {
    let details = el(
        "details",
        text("fileType", false)
            + &text("fileSize", true)
            + &text("modification", true)
            + &text("fileOwner", false),
    );
    let spec = el("searchSpec", details + &text("matchPattern", pattern));
    let arguments = text("datastorePath", datastore_path(site, folder)) + &spec;
    let task = session.start_task("SearchDatastore_Task", browser, &arguments).await;
    let ended = match task {
        Ok(task) => tasks.wait_task(&task).await,
        Err(error) => Err(error),
    };
    match ended {
        // vCenter no longer knows the task, for example after its restart. This says nothing about files.
        Ok(None) => Err(VsphereError::Protocol {
            operation: format!("search {}", datastore_path(site, folder)),
            what: "the task has no result".into(),
        }),
        Ok(Some(result)) => Ok(Some(
            result
                .all("file")
                .map(|f| File {
                    name: f.text_of("path").to_owned(),
                    size: f.text_of("fileSize").parse().unwrap_or(0),
                    modified: f.text_of("modification").to_owned(),
                })
                .collect(),
        )),
        Err(error) if error.fault() == Some("FileNotFound") => Ok(None),
        Err(error) => Err(error),
    }
}

/// Renames a file; false: the new name is taken.
pub(super) async fn rename(
    session: &Session,
    tasks: &TaskWatch,
    site: &Site,
    from: &str,
    to: &str,
) -> Result<bool, VsphereError> {
    let datacenter = &site.datacenter;
    let arguments = text("sourceName", datastore_path(site, from))
        + &reference("sourceDatacenter", datacenter)
        + &text("destinationName", datastore_path(site, to))
        + &reference("destinationDatacenter", datacenter)
        + &text("force", false);
    match run(session, tasks, "MoveDatastoreFile_Task", &arguments).await {
        Ok(()) => Ok(true),
        Err(error) if error.fault() == Some("FileAlreadyExists") => Ok(false),
        Err(error) => Err(error),
    }
}

/// Deletes a file. Returns `Ok` if the file does not exist.
pub(super) async fn remove(
    session: &Session,
    tasks: &TaskWatch,
    site: &Site,
    path: &str,
) -> Result<(), VsphereError> {
    let arguments = text("name", datastore_path(site, path)) + &reference("datacenter", &site.datacenter);
    match run(session, tasks, "DeleteDatastoreFile_Task", &arguments).await {
        Err(error) if error.fault() == Some("FileNotFound") => Ok(()),
        other => other,
    }
}

/// Runs a task of the file manager to its end.
async fn run(
    session: &Session,
    tasks: &TaskWatch,
    method: &'static str,
    arguments: &str,
) -> Result<(), VsphereError> {
    let manager = &session.content.file_manager;
    let task = session.start_task(method, manager, arguments).await?;
    tasks.wait_task(&task).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_escaped_and_slashes_stay() {
        assert_eq!(percent("a b/ü&c.iso", true), "a%20b/%C3%BC%26c.iso");
        assert_eq!(percent("dc/1", false), "dc%2F1");
    }
}
