//! ISO images on the datastores: checked when due, uploaded when necessary, pruned.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use coracle_api::agentpool::{IsoStatus, IsoVersion, VsphereAgentPool, names};
use coracle_reconcile::{Kind, WallTime as _};
use coracle_vsphere::{SiteVms, VsphereError};
use jiff::Timestamp;
use kube::ResourceExt as _;
use parking_lot::Mutex;
use reqwest::{
    RequestBuilder, Response, StatusCode,
    header::{self, HeaderName},
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{Due, IsoError, IsoOptions, IsoVerify, due, hash, prefix, redact_url, surplus, upload};
use crate::{
    Context,
    error::chain,
    status::{new_condition, pool_event, report_iso, seconds},
    vcenters::Provider,
};

/// Checks of ISO images, at most one at a time for each folder. A separate task runs each check, so that a slow image service
/// blocks no worker that serves VMs of other pools. Concurrent callers share its result.
#[derive(Debug)]
pub(crate) struct Cache {
    options: IsoOptions,
    places: Mutex<HashMap<String, Place>>,
    checks: Mutex<HashMap<String, Check>>,
    /// Folders with an image that a VM did not find. The next check of such a folder does not wait until it is due.
    lost: Mutex<HashSet<String>>,
    tasks: Mutex<JoinSet<()>>,
}

/// Result of a check: the path of the image.
type Checked = Result<String, Arc<IsoError>>;
type Check = watch::Receiver<Option<(Instant, Checked)>>;

type Place = Arc<tokio::sync::Mutex<Option<Known>>>;

/// Last result of this process for a folder, so that a second pool with the same content sends no request.
#[derive(Clone, Debug)]
struct Known {
    status: IsoStatus,
}

impl Cache {
    pub(crate) fn new(options: IsoOptions) -> Self {
        Self {
            options,
            places: Mutex::default(),
            checks: Mutex::default(),
            lost: Mutex::default(),
            tasks: Mutex::default(),
        }
    }

    /// Records that a VM of the pool did not find its image, so that the image is checked before the next VM is created. This
    /// can happen because pools that share a folder may have different intervals, and users may delete files.
    pub(crate) fn record_lost_image(&self, pool: &VsphereAgentPool, provider: &Provider) {
        self.lost.lock().insert(folder_key(pool, provider));
    }

    fn is_due(&self, folder: &str, pool: &VsphereAgentPool, url: &str, now: Timestamp) -> bool {
        due(pool, url, now, self.lost.lock().contains(folder)) != Due::No
    }

    fn place(&self, key: String) -> Place {
        self.places.lock().entry(key).or_default().clone()
    }

    /// Cancels checks that still run.
    pub(crate) async fn close(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
    }
}

/// Key of the folder of a pool's images: vCenter, datastore and path.
fn folder_key(pool: &VsphereAgentPool, provider: &Provider) -> String {
    format!("{}/{}/{}", provider.vcenter.api.instance(), provider.site.iso.name, prefix(pool))
}

/// Makes sure that the ISO of `pool` is on its datastore, and returns its path. Concurrent callers share one check, and also
/// its failure for a short time afterwards.
///
/// # Errors
/// [`IsoError::Pending`] while the check takes longer than a reconcile may wait. For other errors the condition has been
/// written already.
pub(crate) async fn ensure(
    cx: &Arc<Context>,
    pool: &VsphereAgentPool,
    provider: &Provider,
    url: &str,
    in_use: &Arc<SiteVms>,
) -> Checked {
    let token = pool.annotations().get(names::FORCE_ISO_REFRESH).map(String::as_str).unwrap_or_default();
    let now = cx.config.clock.timestamp();
    if !cx.iso.is_due(&folder_key(pool, provider), pool, url, now) {
        return Ok(pool.status.as_ref().and_then(|s| s.iso.clone()).unwrap_or_default().path);
    }
    let place = format!("{}/{}/{}", provider.vcenter.serial, provider.site.iso.name, prefix(pool));
    let mut check = check_of(cx, &format!("{place} {} {token}", hash(url)), pool, provider, url, in_use);
    match timeout(cx.config.times.patience, check.wait_for(Option::is_some)).await {
        Ok(Ok(done)) => done.as_ref().map_or_else(|| Err(pending(url)), |(_, checked)| checked.clone()),
        Ok(Err(_)) | Err(_) => Err(pending(url)),
    }
}

fn pending(url: &str) -> Arc<IsoError> {
    Arc::new(IsoError::Pending { url: redact_url(url) })
}

/// Returns the check that is under way or failed a moment ago, or else starts a new one.
fn check_of(
    cx: &Arc<Context>,
    key: &str,
    pool: &VsphereAgentPool,
    provider: &Provider,
    url: &str,
    in_use: &Arc<SiteVms>,
) -> Check {
    let mut checks = cx.iso.checks.lock();
    let pause = cx.config.backoff.base;
    checks.retain(|_, check| match &*check.borrow() {
        None => check.has_changed().is_ok(),
        Some((at, checked)) => checked.is_err() && at.elapsed() < pause,
    });
    if let Some(check) = checks.get(key) {
        return check.clone();
    }
    let (tell, check) = watch::channel(None);
    checks.insert(key.to_owned(), check.clone());
    let (cx_of_task, pool, provider) = (cx.clone(), pool.clone(), provider.clone());
    let (url, in_use) = (url.to_owned(), in_use.clone());
    let mut tasks = cx.iso.tasks.lock();
    while tasks.try_join_next().is_some() {}
    tasks.spawn(async move {
        let checked = Box::pin(check_now(&cx_of_task, &pool, &provider, &url, &in_use)).await;
        tell.send_replace(Some((Instant::now(), checked.map_err(Arc::new))));
    });
    check
}

async fn check_now(
    cx: &Context,
    pool: &VsphereAgentPool,
    provider: &Provider,
    url: &str,
    in_use: &SiteVms,
) -> Result<String, IsoError> {
    let stored =
        |pool: &VsphereAgentPool| pool.status.as_ref().and_then(|s| s.iso.clone()).unwrap_or_default();
    let now = cx.config.clock.timestamp();
    let key = folder_key(pool, provider);
    if !cx.iso.is_due(&key, pool, url, now) {
        return Ok(stored(pool).path);
    }
    let place = cx.iso.place(key.clone());
    // A caller that waited for the lock finds the result of the previous one.
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
    // Remove the mark before the check: a mark set from now on stays for the next check.
    let is_lost = cx.iso.lost.lock().remove(&key);
    let result = match due(&with, url, now, is_lost) {
        Due::No => Ok((stored(&with), "Reused")),
        due => pass(cx, &with, provider, url, due, &token).await,
    };
    if is_lost && result.is_err() {
        cx.iso.lost.lock().insert(key);
    }
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
                report_iso(cx, pool, Some(&status), new_condition("ISOReady", true, reason, path.clone()))
                    .await
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
                report_iso(cx, pool, None, new_condition("ISOReady", false, "ISORefreshFailed", text)).await
            {
                tracing::debug!(error = chain(&error), "ISO not reported");
            }
            // An existing image is better than none, so it stays in the status.
            Err(error)
        }
    }
}

/// Queries the image service, and uploads the image if necessary.
async fn pass(
    cx: &Context,
    pool: &VsphereAgentPool,
    provider: &Provider,
    url: &str,
    due: Due,
    token: &str,
) -> Result<(IsoStatus, &'static str), IsoError> {
    let now = seconds(cx.config.clock.timestamp());
    let old = pool.status.as_ref().and_then(|s| s.iso.clone()).unwrap_or_default();
    let (api, site, folder) = (&provider.vcenter.api, &provider.site, prefix(pool));
    let mut keep =
        due == Due::Check && upload::is_there(provider, &folder, &old.path, old.size_bytes).await?;
    if keep && cx.iso.options.verify == IsoVerify::Full {
        match api.digest(site, &old.path).await? {
            Some(digest) => keep = digest == old.sha256,
            // A VM holds the file open. A later reconcile reads it; until then it counts as valid.
            None => return Ok((old, "VerificationDeferred")),
        }
    }
    let refused = |what: String| IsoError::Refused { url: redact_url(url), what };
    let download = |source: reqwest::Error| IsoError::Download {
        url: redact_url(url),
        source: Box::new(source.without_url()),
    };
    let client = upload::client(&cx.iso.options).map_err(refused)?;
    let request = make_conditional(client.get(url), &old, keep);
    let response = request.send().await.map_err(download)?;
    let mut status = IsoStatus {
        url: redact_url(url),
        url_hash: hash(url),
        checked_at: Some(now.clone()),
        force_refresh_token: if token.is_empty() {
            old.force_refresh_token.clone()
        } else {
            token.to_owned()
        },
        ..old.clone()
    };
    let (modified, etag) = (header_of(&response, header::LAST_MODIFIED), header_of(&response, header::ETAG));
    let same = |new: &str, old: &str| !new.is_empty() && new == old;
    // An ETag is more precise than a date, which has a resolution of seconds.
    let unchanged =
        keep && if etag.is_empty() { same(&modified, &old.last_modified) } else { same(&etag, &old.etag) };
    if response.status() == StatusCode::NOT_MODIFIED && keep || unchanged {
        return Ok((status, "Reused"));
    }
    if !response.status().is_success() {
        return Err(refused(format!("HTTP status {}", response.status().as_u16())));
    }
    let stored = upload::store(provider, &cx.iso.options, &folder, url, response, now.0).await?;
    let upload::Stored { path, sha256, size, is_new } = stored;
    status.path.clone_from(&path);
    status.sha256.clone_from(&sha256);
    (status.last_modified, status.etag) = (modified, etag);
    (status.size_bytes, status.uploaded_at) = (size, Some(now.clone()));
    status.history.retain(|v| v.path != path);
    status.history.insert(0, IsoVersion { path, sha256, size_bytes: size, uploaded_at: Some(now) });
    Ok((status, if is_new { "Uploaded" } else { "Reused" }))
}

/// Makes the request conditional if the old image still exists.
fn make_conditional(mut request: RequestBuilder, old: &IsoStatus, keep: bool) -> RequestBuilder {
    let validators = [(header::IF_NONE_MATCH, &old.etag), (header::IF_MODIFIED_SINCE, &old.last_modified)];
    for (name, value) in validators.into_iter().filter(|(_, value)| keep && !value.is_empty()) {
        request = request.header(name, value);
    }
    request
}

fn header_of(response: &Response, name: HeaderName) -> String {
    response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
}

/// Images that other pools name in their status, in the form of a drive's `[store] path`. They must be kept, because pools may
/// share a prefix while the VMs of each are in a folder of its own.
fn images_of_others(cx: &Context, pool: &VsphereAgentPool) -> Vec<String> {
    let pools = cx.caches.pools.state();
    let others = pools.iter().filter(|p| p.uid() != pool.uid());
    let isos = others.filter_map(|p| p.status.as_ref()?.iso.clone());
    let retained = |p: &IsoStatus| p.history.iter().map(|v| v.path.clone()).collect::<Vec<_>>();
    isos.flat_map(|iso| retained(&iso).into_iter().chain([iso.path]))
        .map(|path| format!("[] {path}"))
        .collect()
}

/// Deletes old versions. A version that cannot be deleted stays in the history and is tried again.
async fn prune(
    cx: &Context,
    pool: &VsphereAgentPool,
    provider: &Provider,
    status: &mut IsoStatus,
    in_use: &SiteVms,
) {
    // The images that VMs hold are known only while the watch is up to date.
    if !in_use.is_current {
        return;
    }
    let keep = pool.spec.iso.clone().unwrap_or_default().retain_versions;
    let mut held: HashSet<_> = in_use.vms.values().filter_map(|vm| vm.cdrom.as_ref()?.iso.clone()).collect();
    held.extend(images_of_others(cx, pool));
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

/// Deletes all images below the prefix of a deleted pool, if the pool requests that.
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
