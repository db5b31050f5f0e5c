//! Transfer from the image service to a datastore: digested on the way, without an intermediate copy.

use std::{sync::Arc, time::Duration};

use coracle_vsphere::Body;
use futures_util::{StreamExt as _, stream};
use jiff::Timestamp;
use parking_lot::Mutex;
use reqwest::Response;
use sha2::{Digest as _, Sha256};

use super::{IsoError, IsoOptions, redact_url, stale};
use crate::vcenters::Provider;

/// Creates a client that trusts the system's authorities and those of the options.
pub(super) fn client(options: &IsoOptions) -> Result<reqwest::Client, String> {
    let mut builder =
        reqwest::Client::builder().connect_timeout(Duration::from_secs(10)).read_timeout(options.idle);
    if let Some(file) = &options.ca_file {
        let pem = std::fs::read(file).map_err(|e| format!("read {}: {e}", file.display()))?;
        let bundle = reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| e.to_string())?;
        builder = builder.tls_certs_merge(bundle);
    }
    builder.build().map_err(|e| e.to_string())
}

/// An image on the datastore.
pub(super) struct Stored {
    pub(super) path: String,
    pub(super) sha256: String,
    pub(super) size: Option<i64>,
    /// Whether the datastore did not have this content before.
    pub(super) is_new: bool,
}

/// Whether `path` is in `folder`, with the given size if one is given.
pub(super) async fn is_there(
    provider: &Provider,
    folder: &str,
    path: &str,
    size: Option<i64>,
) -> Result<bool, IsoError> {
    let Some(name) = path.strip_prefix(&format!("{folder}/")) else { return Ok(false) };
    let found = provider.vcenter.api.files(&provider.site, folder, name).await?.unwrap_or_default();
    Ok(found.iter().any(|f| f.name == name && size.is_none_or(|s| i64::try_from(f.size) == Ok(s))))
}

/// Streams `response` into a temporary file, and renames the file once it is complete.
pub(super) async fn store(
    provider: &Provider,
    options: &IsoOptions,
    folder: &str,
    url: &str,
    response: Response,
    now: Timestamp,
) -> Result<Stored, IsoError> {
    let refused = |what: String| IsoError::Refused { url: redact_url(url), what };
    let (api, site) = (&provider.vcenter.api, &provider.site);
    let length = response.content_length().ok_or_else(|| refused("it does not tell the length".into()))?;
    if length > options.bytes_max || length == 0 {
        return Err(refused(format!("{length} bytes are not between 1 and {}", options.bytes_max)));
    }
    let size = i64::try_from(length).ok();
    let partial = format!("{folder}/.{:016x}.partial", rand::random::<u64>());
    api.make_folder(site, folder).await?;
    // Partial files can remain only where something is uploaded, so no call is made otherwise.
    let left = api.files(site, folder, "*.partial").await?.unwrap_or_default();
    for name in stale(&left, now) {
        api.delete_file(site, &format!("{folder}/{name}")).await?;
    }
    let (body, digest) = digest_body(response);
    let uploaded = api.upload(site, &partial, length, body).await;
    let whole = match &uploaded {
        Ok(()) => is_there(provider, folder, &partial, size).await?,
        Err(_) => false,
    };
    if !whole {
        let _removed = api.delete_file(site, &partial).await;
        uploaded?;
        return Err(refused(format!("fewer than {length} bytes came")));
    }
    let sha256 = hex::encode(digest.lock().clone().finalize());
    let path = format!("{folder}/{sha256}.iso");
    let is_new = api.move_file(site, &partial, &path).await?;
    if !is_new {
        api.delete_file(site, &partial).await?;
    }
    Ok(Stored { path, sha256, size, is_new })
}

/// Body of a response, and the digest of the bytes that have passed through it.
fn digest_body(response: Response) -> (Body, Arc<Mutex<Sha256>>) {
    let digest = Arc::new(Mutex::new(Sha256::new()));
    let sum = digest.clone();
    let body = stream::try_unfold(response, |mut response| async move {
        let chunk = response.chunk().await.map_err(|e| std::io::Error::other(e.without_url()))?;
        Ok::<_, std::io::Error>(chunk.map(|chunk| (chunk, response)))
    });
    let body = body.inspect(move |chunk| {
        if let Ok(chunk) = chunk {
            sum.lock().update(chunk);
        }
    });
    (body.boxed(), digest)
}
