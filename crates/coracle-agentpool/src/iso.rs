//! The discovery ISO on a datastore: asked for with validators, streamed through, stored under its digest.
//!
//! The image service puts a fresh token into every download, so two downloads of one revision differ: what tells
//! revisions apart is the URL and the service's own validators, and only a new one, a forced refresh or a missing object
//! starts an upload.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coracle_api::agentpool::{IsoSpec, IsoStatus, IsoVersion, VsphereAgentPool, names};
use coracle_reconcile::Kind;
use coracle_vsphere::{File, Machines, VsphereError};
use futures_util::{StreamExt as _, stream};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;
use reqwest::{StatusCode, header};
use sha2::{Digest as _, Sha256};

use crate::{
    Context,
    error::chain,
    status::{pool_event, report_iso, say, seconds},
    vcenters::Provider,
};

/// A partial upload that is so old belongs to nobody.
const PARTIAL_AGE: SignedDuration = SignedDuration::from_hours(1);

/// How images are downloaded.
#[derive(Clone, Debug)]
pub struct IsoOptions {
    /// Largest image.
    pub bytes_max: u64,
    /// A download is given up when no byte came for so long.
    pub idle: Duration,
    /// Authorities in PEM besides the system's.
    pub ca_file: Option<PathBuf>,
    /// How a stored one is checked.
    pub verify: IsoVerify,
}

/// How an ISO on a datastore is checked when it is due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsoVerify {
    /// By name and size.
    #[default]
    Size,
    /// Read back whole, and compared by digest.
    Full,
}

impl Default for IsoOptions {
    fn default() -> Self {
        Self { bytes_max: 10 << 30, idle: Duration::from_secs(60), ca_file: None, verify: IsoVerify::Size }
    }
}

/// Why there is no ISO. Messages never hold the URL's query.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IsoError {
    /// The image service.
    #[error("download {url}")]
    Download {
        /// Without its token.
        url: String,
        /// Why.
        source: Box<reqwest::Error>,
    },
    /// It answers with something else.
    #[error("download {url}: {what}")]
    Refused {
        /// Without its token.
        url: String,
        /// What it said.
        what: String,
    },
    /// vCenter.
    #[error(transparent)]
    Vsphere(#[from] VsphereError),
}

/// One pass at a time for each folder of ISO images; those who come together share it.
#[derive(Debug)]
pub(crate) struct Cache {
    options: IsoOptions,
    places: Mutex<HashMap<String, Place>>,
}

type Place = Arc<tokio::sync::Mutex<Option<Known>>>;

/// What this process found last in a folder, so that a second pool of the same content need not ask again.
#[derive(Clone, Debug)]
struct Known {
    status: IsoStatus,
}

impl Cache {
    pub(crate) fn new(options: IsoOptions) -> Self {
        Self { options, places: Mutex::default() }
    }

    fn place(&self, key: String) -> Place {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone()
    }
}

/// A duration as Go writes it (`1h30m`, `10m`, `90s`); `None`: it is not one, or none is set.
#[must_use]
pub fn go_duration(text: &str) -> Option<SignedDuration> {
    let mut total = SignedDuration::ZERO;
    let mut rest = text.trim();
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let unit_end = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| digits + at);
        let seconds = match &rest[digits..unit_end] {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 0.001,
            _ => return None,
        };
        total = total.checked_add(SignedDuration::try_from_secs_f64(number * seconds).ok()?)?;
        rest = &rest[unit_end..];
    }
    (total > SignedDuration::ZERO).then_some(total)
}

/// How often the ISO of a pool is asked for.
#[must_use]
pub fn interval(iso: Option<&IsoSpec>) -> SignedDuration {
    iso.and_then(|iso| go_duration(&iso.check_interval)).unwrap_or(SignedDuration::from_mins(10))
}

/// The folder of a pool's images: no dots, no double slashes.
#[must_use]
pub fn prefix(pool: &VsphereAgentPool) -> String {
    let own = || format!("agent-forge/{}/{}", pool.namespace().unwrap_or_default(), pool.name_any());
    let text =
        pool.spec.iso.as_ref().map(|i| i.path_prefix.clone()).filter(|p| !p.is_empty()).unwrap_or_else(own);
    let mut parts: Vec<&str> = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    if parts.is_empty() { own() } else { parts.join("/") }
}

/// The URL without user information and query, which hold the token.
#[must_use]
pub fn redacted(url: &str) -> String {
    let bare = url.split(['?', '#']).next().unwrap_or(url);
    match bare.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) =
                rest.split_once('/').map_or((rest, String::new()), |(h, p)| (h, format!("/{p}")));
            format!("{scheme}://{}{path}", host.rsplit('@').next().unwrap_or(host))
        }
        None => bare.to_owned(),
    }
}

/// Why the ISO is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// It is not.
    No,
    /// The stored one may still be the right one.
    Check,
    /// It is uploaded whatever the service says.
    Refresh,
}

/// Whether the ISO of a pool is due.
#[must_use]
pub fn due(pool: &VsphereAgentPool, url: &str, now: Timestamp) -> Due {
    let Some(iso) = pool.status.as_ref().and_then(|s| s.iso.as_ref()) else { return Due::Refresh };
    let token = pool.annotations().get(names::FORCE_ISO_REFRESH).filter(|t| !t.is_empty());
    let outside = !iso.path.starts_with(&format!("{}/", prefix(pool)));
    let old_hash = !iso.url_hash.is_empty() && iso.url_hash != hash(url);
    if iso.path.is_empty() || iso.sha256.is_empty() || outside || old_hash {
        return Due::Refresh;
    }
    if token.is_some_and(|t| *t != iso.force_refresh_token) {
        return Due::Refresh;
    }
    let age = iso.checked_at.as_ref().map(|at| now.duration_since(at.0));
    if age.is_none_or(|age| age >= interval(pool.spec.iso.as_ref())) { Due::Check } else { Due::No }
}

fn hash(url: &str) -> String {
    hex::encode(Sha256::digest(url))
}

/// Makes sure that the ISO of `pool` is on its datastore; its path. Shared by all who ask at the same time.
///
/// # Errors
/// [`IsoError`]; the condition is written by then.
pub(crate) async fn ensure(
    cx: &Context,
    pool: &VsphereAgentPool,
    provider: &Provider,
    url: &str,
    in_use: &Machines,
) -> Result<String, IsoError> {
    let stored =
        |pool: &VsphereAgentPool| pool.status.as_ref().and_then(|s| s.iso.clone()).unwrap_or_default();
    let now = cx.config.clock.now();
    if due(pool, url, now) == Due::No {
        return Ok(stored(pool).path);
    }
    let folder = prefix(pool);
    let key = format!("{}/{}/{folder}", provider.vcenter.api.instance(), provider.site.iso.name);
    let place = cx.iso.place(key);
    // Whoever waits here finds what the one before did.
    let mut known = place.lock().await;
    let token = pool.annotations().get(names::FORCE_ISO_REFRESH).cloned().unwrap_or_default();
    let mut with = pool.clone();
    if let Some(known) = known.as_ref().filter(|k| k.status.url_hash == hash(url)) {
        let history = stored(pool).history;
        let mut status = known.status.clone();
        if history.len() > status.history.len() {
            status.history = history;
        }
        with.status.get_or_insert_default().iso = Some(status);
    }
    let result = match due(&with, url, now) {
        Due::No => Ok((stored(&with), "Reused")),
        due => pass(cx, &with, provider, url, due, &token).await,
    };
    match result {
        Ok((mut status, reason)) => {
            prune(cx, pool, provider, &mut status, in_use).await;
            *known = Some(Known { status: status.clone() });
            cx.config.pool_metrics.iso("ensure", "success");
            if stored(pool).path != status.path {
                let event = if reason == "Uploaded" { "ISOUploaded" } else { "ISOReused" };
                pool_event(cx, pool, Kind::Normal, event, format!("{} is {}", status.url, status.path)).await;
            }
            let path = status.path.clone();
            if let Err(error) =
                report_iso(cx, pool, Some(&status), say("ISOReady", true, reason, path.clone())).await
            {
                tracing::debug!(error = chain(&error), "ISO not reported; it is at the next pass");
            }
            Ok(path)
        }
        Err(error) => {
            cx.config.pool_metrics.iso("ensure", "error");
            let text = chain(&error);
            pool_event(cx, pool, Kind::Warning, "ISORefreshFailed", text.clone()).await;
            if let Err(error) =
                report_iso(cx, pool, None, say("ISOReady", false, "ISORefreshFailed", text)).await
            {
                tracing::debug!(error = chain(&error), "ISO not reported");
            }
            // An image that is there is better than none.
            Err(error)
        }
    }
}

/// Asks the service, and uploads when it must be.
async fn pass(
    cx: &Context,
    pool: &VsphereAgentPool,
    provider: &Provider,
    url: &str,
    due: Due,
    token: &str,
) -> Result<(IsoStatus, &'static str), IsoError> {
    let now = seconds(cx.config.clock.now());
    let old = pool.status.as_ref().and_then(|s| s.iso.clone()).unwrap_or_default();
    let (api, site, folder) = (&provider.vcenter.api, &provider.site, prefix(pool));
    let is_there = async |path: &str, size: Option<i64>| -> Result<bool, IsoError> {
        let Some(name) = path.strip_prefix(&format!("{folder}/")) else { return Ok(false) };
        let found = api.files(site, &folder, name).await?.unwrap_or_default();
        Ok(found.iter().any(|f| f.name == name && size.is_none_or(|s| i64::try_from(f.size) == Ok(s))))
    };
    let mut keep = due == Due::Check && is_there(&old.path, old.size_bytes).await?;
    if keep && cx.iso.options.verify == IsoVerify::Full {
        match api.digest(site, &old.path).await? {
            Some(digest) => keep = digest == old.sha256,
            // Read at the next pass, when the machine that holds it may have let go; until then it counts as it is.
            None => return Ok((old, "VerificationDeferred")),
        }
    }
    let refused = |what: String| IsoError::Refused { url: redacted(url), what };
    let download = |source: reqwest::Error| IsoError::Download {
        url: redacted(url),
        source: Box::new(source.without_url()),
    };
    let client = client(&cx.iso.options).map_err(refused)?;
    let mut request = client.get(url);
    for (name, value) in [(header::IF_NONE_MATCH, &old.etag), (header::IF_MODIFIED_SINCE, &old.last_modified)]
    {
        if keep && !value.is_empty() {
            request = request.header(name, value);
        }
    }
    let response = request.send().await.map_err(download)?;
    let mut status = IsoStatus {
        url: redacted(url),
        url_hash: hash(url),
        checked_at: Some(now.clone()),
        force_refresh_token: if token.is_empty() {
            old.force_refresh_token.clone()
        } else {
            token.to_owned()
        },
        ..old.clone()
    };
    let said =
        |name| response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let (modified, etag) = (said(header::LAST_MODIFIED), said(header::ETAG));
    let same = |new: &str, old: &str| !new.is_empty() && new == old;
    // An ETag says more than a date, which has only seconds.
    let unchanged =
        keep && if etag.is_empty() { same(&modified, &old.last_modified) } else { same(&etag, &old.etag) };
    if response.status() == StatusCode::NOT_MODIFIED && keep || unchanged {
        return Ok((status, "Reused"));
    }
    if !response.status().is_success() {
        return Err(refused(format!("HTTP status {}", response.status().as_u16())));
    }
    let length = response.content_length().ok_or_else(|| refused("it does not tell the length".into()))?;
    if length > cx.iso.options.bytes_max || length == 0 {
        return Err(refused(format!("{length} bytes are not between 1 and {}", cx.iso.options.bytes_max)));
    }
    let partial = format!("{folder}/.{:016x}.partial", rand::random::<u64>());
    api.make_folder(site, &folder).await?;
    // Only where something is uploaded can something be left over; at rest nothing is asked.
    let left = api.files(site, &folder, "*.partial").await?.unwrap_or_default();
    for name in stale(&left, now.0) {
        api.delete_file(site, &format!("{folder}/{name}")).await?;
    }
    let digest = Arc::new(Mutex::new(Sha256::new()));
    let sum = digest.clone();
    let body = stream::try_unfold(response, |mut response| async move {
        let chunk = response.chunk().await.map_err(|e| std::io::Error::other(e.without_url()))?;
        Ok::<_, std::io::Error>(chunk.map(|chunk| (chunk, response)))
    });
    let body = body.inspect(move |chunk| {
        if let Ok(chunk) = chunk {
            sum.lock().unwrap_or_else(PoisonError::into_inner).update(chunk);
        }
    });
    let uploaded = api.upload(site, &partial, length, body.boxed()).await;
    let whole = match &uploaded {
        Ok(()) => is_there(&partial, i64::try_from(length).ok()).await?,
        Err(_) => false,
    };
    if !whole {
        let _removed = api.delete_file(site, &partial).await;
        uploaded?;
        return Err(refused(format!("fewer than {length} bytes came")));
    }
    let sha256 = hex::encode(digest.lock().unwrap_or_else(PoisonError::into_inner).clone().finalize());
    let path = format!("{folder}/{sha256}.iso");
    let moved = api.move_file(site, &partial, &path).await?;
    if !moved {
        api.delete_file(site, &partial).await?;
    }
    let size = i64::try_from(length).ok();
    status.path.clone_from(&path);
    status.sha256.clone_from(&sha256);
    (status.last_modified, status.etag) = (modified, etag);
    (status.size_bytes, status.uploaded_at) = (size, Some(now.clone()));
    status.history.retain(|v| v.path != path);
    status.history.insert(0, IsoVersion { path, sha256, size_bytes: size, uploaded_at: Some(now) });
    Ok((status, if moved { "Uploaded" } else { "Reused" }))
}

/// Uploads that were given up long ago. Another upload into the same folder may be under way.
fn stale(files: &[File], now: Timestamp) -> Vec<&str> {
    let is_old = |file: &&File| {
        let at: Option<Timestamp> = file.modified.parse().ok();
        at.is_some_and(|at| now.duration_since(at) >= PARTIAL_AGE)
    };
    files.iter().filter(is_old).map(|file| file.name.as_str()).collect()
}

/// Deletes all images below the prefix of a pool that is deleted, where it asks for that.
pub(crate) async fn delete_all(pool: &VsphereAgentPool, provider: &Provider) -> Result<usize, VsphereError> {
    let (api, site, folder) = (&provider.vcenter.api, &provider.site, prefix(pool));
    let mut count = 0;
    for pattern in ["*.iso", "*.partial"] {
        for file in api.files(site, &folder, pattern).await?.unwrap_or_default() {
            api.delete_file(site, &format!("{folder}/{}", file.name)).await?;
            count += 1;
        }
    }
    Ok(count)
}

fn client(options: &IsoOptions) -> Result<reqwest::Client, String> {
    let mut builder =
        reqwest::Client::builder().connect_timeout(Duration::from_secs(10)).read_timeout(options.idle);
    if let Some(file) = &options.ca_file {
        let pem = std::fs::read(file).map_err(|e| format!("read {}: {e}", file.display()))?;
        let bundle = reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| e.to_string())?;
        builder = builder.tls_certs_merge(bundle);
    }
    builder.build().map_err(|e| e.to_string())
}

/// Versions that are not kept: those past the limit which no VM holds.
#[must_use]
pub fn surplus(history: &[IsoVersion], current: &str, keep: usize, held: &HashSet<String>) -> Vec<String> {
    let past = history.iter().skip(keep).map(|v| v.path.clone());
    past.filter(|path| path != current && !held.iter().any(|h| h.ends_with(&format!("] {path}")))).collect()
}

/// Deletes old versions. One that cannot be deleted stays in the history and is tried again.
async fn prune(
    cx: &Context,
    pool: &VsphereAgentPool,
    provider: &Provider,
    status: &mut IsoStatus,
    in_use: &Machines,
) {
    // What VMs hold is known only while the watch is up to date.
    if !in_use.is_current {
        return;
    }
    let keep = pool.spec.iso.clone().unwrap_or_default().retain_versions;
    let held: HashSet<_> = in_use.vms.values().filter_map(|vm| vm.cdrom.as_ref()?.iso.clone()).collect();
    let keep = usize::try_from(keep.max(1)).unwrap_or(1);
    for path in surplus(&status.history, &status.path, keep, &held) {
        match provider.vcenter.api.delete_file(&provider.site, &path).await {
            Ok(()) => {
                cx.config.pool_metrics.iso("delete", "success");
                status.history.retain(|v| v.path != path);
            }
            Err(error) => {
                cx.config.pool_metrics.iso("delete", "error");
                pool_event(cx, pool, Kind::Warning, "ISOPruneFailed", format!("{path}: {}", chain(&error)))
                    .await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_in_no_url_that_is_shown() {
        for (url, want) in [
            ("https://h/images/1?api_key=secret&version=4.18", "https://h/images/1"),
            ("https://u:secret@h:8443/a/b.iso#secret", "https://h:8443/a/b.iso"),
            ("http://h?image_token=secret", "http://h"),
        ] {
            assert_eq!(redacted(url), want);
        }
    }

    #[test]
    fn intervals_are_written_as_go_writes_them() {
        for (text, want) in [
            ("10m", Some(600)),
            ("1h30m", Some(5400)),
            ("90s", Some(90)),
            ("0s", None),
            ("", None),
            ("soon", None),
            ("5", None),
        ] {
            assert_eq!(go_duration(text).map(|d| d.as_secs()), want, "{text}");
        }
    }

    #[test]
    fn an_iso_that_a_vm_holds_is_never_pruned() {
        let v = |p: &str| IsoVersion { path: p.into(), ..IsoVersion::default() };
        let history = [v("p/3.iso"), v("p/2.iso"), v("p/1.iso"), v("p/0.iso")];
        let held = HashSet::from(["[ds] p/1.iso".to_owned()]);
        assert_eq!(surplus(&history, "p/3.iso", 2, &held), ["p/0.iso"]);
        assert_eq!(surplus(&history, "p/0.iso", 2, &HashSet::new()), ["p/1.iso"], "the current one stays");
    }

    #[test]
    fn only_an_upload_that_was_given_up_long_ago_is_removed() {
        let file =
            |name: &str, modified: &str| File { name: name.into(), size: 1, modified: modified.into() };
        let files = [
            file(".old.partial", "2026-06-01T08:59:00Z"),
            file(".young.partial", "2026-06-01T09:30:00Z"),
            file(".unknown.partial", ""),
        ];
        assert_eq!(stale(&files, "2026-06-01T10:00:00Z".parse().unwrap()), [".old.partial"]);
    }

    #[test]
    fn a_prefix_stays_inside_the_datastore() {
        let mut pool = VsphereAgentPool::default();
        (pool.metadata.namespace, pool.metadata.name) = (Some("ns".into()), Some("p".into()));
        for (given, want) in
            [("", "agent-forge/ns/p"), ("a//b/./c", "a/b/c"), ("a/../../x", "x"), ("..", "agent-forge/ns/p")]
        {
            pool.spec.iso = Some(IsoSpec { path_prefix: given.into(), ..IsoSpec::default() });
            assert_eq!(prefix(&pool), want, "{given}");
        }
    }
}
