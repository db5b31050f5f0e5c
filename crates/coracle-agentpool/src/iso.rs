//! The discovery ISO on a datastore: requested with HTTP validators, streamed through, stored under its digest.
//!
//! The image service puts a fresh token into every download, so two downloads of one revision differ. Revisions are
//! distinguished by the URL and the service's own validators. Only a new revision, a forced refresh or a missing object starts
//! an upload.

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

/// Options for the download of images.
#[derive(Clone, Debug)]
pub struct IsoOptions {
    /// Largest image in bytes.
    pub bytes_max: u64,
    /// Time without a byte after which a download is given up.
    pub idle: Duration,
    /// PEM file of certificate authorities that are trusted in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// How a stored image is checked.
    pub verify: IsoVerify,
}

/// How an ISO on a datastore is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsoVerify {
    /// Compare name and size.
    #[default]
    Size,
    /// Read the whole file back and compare its digest.
    Full,
}

impl Default for IsoOptions {
    fn default() -> Self {
        Self { bytes_max: 10 << 30, idle: Duration::from_secs(60), ca_file: None, verify: IsoVerify::Size }
    }
}

/// Error of the ISO. Messages never hold the URL's query.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IsoError {
    /// The request to the image service failed.
    #[error("download {url}")]
    Download {
        /// URL without its token.
        url: String,
        /// Cause.
        source: Box<reqwest::Error>,
    },
    /// The image service returned an unexpected answer.
    #[error("download {url}: {what}")]
    Refused {
        /// URL without its token.
        url: String,
        /// Status of the answer.
        what: String,
    },
    /// The image is being checked or uploaded in the background.
    #[error("{url} is being stored")]
    Pending {
        /// URL without its token.
        url: String,
    },
    /// A call of vCenter failed.
    #[error(transparent)]
    Vsphere(#[from] VsphereError),
}

/// Parses a duration as Go writes it (`1h30m`, `10m`, `90s`). Returns `None` if the text is invalid or empty.
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

/// Interval between checks of a pool's ISO.
#[must_use]
pub fn interval(iso: Option<&IsoSpec>) -> SignedDuration {
    iso.and_then(|iso| go_duration(&iso.check_interval)).unwrap_or(SignedDuration::from_mins(10))
}

/// Folder of a pool's images, without dots and double slashes.
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

/// Returns the URL without user information and query, which hold the token.
#[must_use]
pub fn redact_url(url: &str) -> String {
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

/// Whether and how the ISO must be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Not due.
    No,
    /// The stored ISO may still be current and must be checked.
    Check,
    /// The ISO is uploaded without a check.
    Refresh,
}

/// Decides whether the ISO of a pool is due. An ISO that a VM did not find (`is_lost`) is at least checked. Pure.
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

/// Old versions to be deleted: those beyond the limit that no VM holds.
#[must_use]
pub fn surplus(history: &[IsoVersion], current: &str, keep: usize, held: &HashSet<String>) -> Vec<String> {
    let past = history.iter().skip(keep).map(|v| v.path.clone());
    past.filter(|path| path != current && !held.iter().any(|h| h.ends_with(&format!("] {path}")))).collect()
}

/// Partial uploads that were abandoned long ago. A recent one may belong to another upload into the same folder that is under
/// way.
fn stale(files: &[File], now: Timestamp) -> Vec<&str> {
    let is_old = |file: &&File| {
        let at: Option<Timestamp> = file.modified.parse().ok();
        at.is_some_and(|at| now.duration_since(at) >= PARTIAL_AGE)
    };
    files.iter().filter(is_old).map(|file| file.name.as_str()).collect()
}

#[cfg(test)]
mod tests;
