//! The discovery ISO on a datastore: asked for with validators, streamed through, stored under its digest.
//!
//! The image service puts a fresh token into every download, so two downloads of one revision differ: what tells
//! revisions apart is the URL and the service's own validators, and only a new one, a forced refresh or a missing object
//! starts an upload.

mod cache;
mod upload;

use std::{collections::HashSet, path::PathBuf, time::Duration};

use coracle_api::agentpool::{IsoSpec, IsoVersion, VsphereAgentPool, names};
use coracle_vsphere::{File, VsphereError};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;
use sha2::{Digest as _, Sha256};

pub(crate) use cache::{Cache, delete_all, ensure};

/// Age after which a partial upload is abandoned.
const PARTIAL_AGE: SignedDuration = SignedDuration::from_hours(1);

/// Download of images.
#[derive(Clone, Debug)]
pub struct IsoOptions {
    /// Largest image.
    pub bytes_max: u64,
    /// A download is given up when no byte came for so long.
    pub idle: Duration,
    /// Authorities in PEM besides the system's.
    pub ca_file: Option<PathBuf>,
    /// Check of a stored image.
    pub verify: IsoVerify,
}

/// Check of an ISO on a datastore.
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
        /// Cause.
        source: Box<reqwest::Error>,
    },
    /// Unexpected answer.
    #[error("download {url}: {what}")]
    Refused {
        /// Without its token.
        url: String,
        /// Status of the answer.
        what: String,
    },
    /// The image is being checked or uploaded in the background.
    #[error("{url} is being stored")]
    Pending {
        /// Without its token.
        url: String,
    },
    /// vCenter.
    #[error(transparent)]
    Vsphere(#[from] VsphereError),
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

/// Interval of checks of a pool's ISO.
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
    /// Not due.
    No,
    /// The stored one may still be the right one.
    Check,
    /// It is uploaded without a check.
    Refresh,
}

/// Whether the ISO of a pool is due. One that a VM did not find is at least checked (`is_lost`). Pure.
#[must_use]
pub fn due(pool: &VsphereAgentPool, url: &str, now: Timestamp, is_lost: bool) -> Due {
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
    let is_old = age.is_none_or(|age| age >= interval(pool.spec.iso.as_ref()));
    if is_lost || is_old { Due::Check } else { Due::No }
}

fn hash(url: &str) -> String {
    hex::encode(Sha256::digest(url))
}

/// Versions that are not kept: those past the limit which no VM holds.
#[must_use]
pub fn surplus(history: &[IsoVersion], current: &str, keep: usize, held: &HashSet<String>) -> Vec<String> {
    let past = history.iter().skip(keep).map(|v| v.path.clone());
    past.filter(|path| path != current && !held.iter().any(|h| h.ends_with(&format!("] {path}")))).collect()
}

/// Uploads that were given up long ago. Another upload into the same folder may be under way.
fn stale(files: &[File], now: Timestamp) -> Vec<&str> {
    let is_old = |file: &&File| {
        let at: Option<Timestamp> = file.modified.parse().ok();
        at.is_some_and(|at| now.duration_since(at) >= PARTIAL_AGE)
    };
    files.iter().filter(is_old).map(|file| file.name.as_str()).collect()
}

#[cfg(test)]
mod tests;
