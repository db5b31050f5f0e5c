//! Uploads of blobs and manifests: HEAD, then a mount, then an upload that resumes after an interruption.

mod payload;

use std::time::Duration;

use bytes::Bytes;
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE},
};
use tokio::time::{Instant, sleep_until};

use serde_json::{Value, json};

use super::Attempts;
use crate::{Descriptor, Digest, OciError, Session, client::RENEWALS_MAX, media_types::OCI_INDEX};

use payload::Activity;
pub use payload::{Payload, SentBytes};

/// Response header of a registry that supports the referrers API.
const SUBJECT: &str = "oci-subject";
/// Longest list of referrers that is extended, bytes.
const LIST_MAX: u64 = 4 << 20;

/// Result of offering a blob to a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// The repository already had the blob.
    Present,
    /// The registry mounted it from another repository.
    Mounted,
    /// The blob was uploaded.
    Uploaded,
}

/// Upload in progress.
struct Begun {
    url: Url,
    /// Bytes that the registry has.
    done: u64,
    /// True when bytes were sent after the registry reported `done`.
    stale: bool,
}

impl Session {
    /// True when the repository has the blob.
    ///
    /// # Errors
    /// Errors of the registry.
    pub async fn has_blob(&self, digest: &Digest) -> Result<bool, OciError> {
        self.retry(|| async {
            let request = self.request(Method::HEAD, &format!("blobs/{digest}")).await;
            match self.send(request.timeout(self.timeouts.request), "check blob", &digest.to_string()).await {
                Ok(_) => Ok(true),
                Err(OciError::NotFound { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Uploads a blob unless it is present. Returns true when its bytes were uploaded. Idempotent.
    ///
    /// # Errors
    /// Errors of the registry.
    pub async fn put_blob(&self, digest: &Digest, bytes: Bytes) -> Result<bool, OciError> {
        let offered =
            self.offer_blob(digest, &Payload::Bytes(bytes), None, &payload::ignore_progress()).await?;
        Ok(offered == Offered::Uploaded)
    }

    /// Makes a blob available in the repository at the lowest cost: checks whether it is present, mounts it from the repository
    /// `from` of the same registry, or uploads it. Reports uploaded bytes to `sent`. Idempotent. After a cancelled call, the
    /// registry discards the uploaded bytes when the upload expires.
    ///
    /// # Errors
    /// [`OciError::Io`] for the file; those of the registry.
    pub async fn offer_blob(
        &self,
        digest: &Digest,
        payload: &Payload,
        from: Option<&str>,
        sent: &SentBytes,
    ) -> Result<Offered, OciError> {
        if self.has_blob(digest).await? {
            return Ok(Offered::Present);
        }
        let mut begun = match from {
            None => None,
            Some(from) => match self.retry(|| self.mount(digest, from)).await? {
                None => return Ok(Offered::Mounted),
                begun => begun,
            },
        };
        let mut attempts = Attempts::new(self);
        loop {
            let before = begun.as_ref().map_or(0, |b| b.done);
            let attempt = self.try_upload(digest, payload, &mut begun, sent).await;
            let Err(error) = attempt else { return Ok(Offered::Uploaded) };
            if begun.as_ref().is_some_and(|b| b.done > before) {
                attempts.reset();
            }
            attempts.after(error).await?;
        }
    }

    /// Mounts a blob of another repository and returns `None`. A registry that cannot mount the blob begins an upload instead,
    /// which is returned.
    async fn mount(&self, digest: &Digest, from: &str) -> Result<Option<Begun>, OciError> {
        let path = "blobs/uploads/";
        let query = [("mount", digest.to_string()), ("from", from.to_owned())];
        let request = self.request(Method::POST, path).await.query(&query).header(CONTENT_LENGTH, 0);
        let answer = self.send(request.timeout(self.timeouts.request), "mount blob", "repository").await?;
        match answer.status() {
            StatusCode::CREATED => Ok(None),
            _ => self.upload_from_response(&answer, 0).map(Some),
        }
    }

    /// Makes one attempt: sends the whole blob in one request, or the part that the registry does not have.
    async fn try_upload(
        &self,
        digest: &Digest,
        payload: &Payload,
        upload: &mut Option<Begun>,
        sent: &SentBytes,
    ) -> Result<(), OciError> {
        let begun = match upload.as_ref() {
            Some(begun) if !begun.stale => upload.take(),
            Some(begun) => match self.upload_status(begun, payload.len()).await? {
                // Unknown upload: perhaps finished by a request whose response was lost.
                None if self.has_blob(digest).await? => return Ok(()),
                known => known.flatten(),
            },
            None => None,
        };
        let begun = match begun {
            Some(begun) => begun,
            None => self.begin_upload().await?,
        };
        let Begun { url, done, stale } = upload.insert(begun);
        *stale = true;
        if *done == 0 {
            self.send_body((Method::PUT, &with_digest(url, digest)), payload, 0, digest, sent).await?;
            return Ok(());
        }
        let mut end = url.clone();
        if *done < payload.len() {
            let answer = self.send_body((Method::PATCH, url), payload, *done, digest, sent).await?;
            end = self.upload_from_response(&answer, payload.len())?.url;
        }
        let request = self.to(Method::PUT, with_digest(&end, digest)).await.header(CONTENT_LENGTH, 0);
        self.send(request.timeout(self.timeouts.request), "end upload", &digest.to_string()).await.map(drop)
    }

    async fn begin_upload(&self) -> Result<Begun, OciError> {
        let request = self.request(Method::POST, "blobs/uploads/").await.header(CONTENT_LENGTH, 0);
        let answer = self.send(request.timeout(self.timeouts.request), "begin upload", "repository").await?;
        self.upload_from_response(&answer, 0)
    }

    /// Progress of an upload. `None`: the registry does not know the upload. `Some(None)`: the upload cannot be resumed.
    async fn upload_status(&self, begun: &Begun, bytes: u64) -> Result<Option<Option<Begun>>, OciError> {
        let request = self.to(Method::GET, begun.url.clone()).await;
        let answer =
            self.send(request.timeout(self.timeouts.request), "get status of upload", "upload").await;
        let answer = match answer {
            Ok(answer) => answer,
            Err(OciError::NotFound { .. }) => return Ok(None),
            Err(error) if error.is_transient() => return Err(error),
            Err(_) => return Ok(Some(None)),
        };
        let said = answer.headers().get(RANGE).and_then(|range| range.to_str().ok());
        let last: Option<u64> = said.and_then(|range| range.rsplit('-').next()?.parse().ok());
        match last {
            // Registries answer `0-0` for an empty upload.
            Some(last) if last > 0 && last < bytes => {
                self.upload_from_response(&answer, last + 1).map(|b| Some(Some(b)))
            }
            _ => Ok(Some(None)),
        }
    }

    /// Upload at the location in the response.
    fn upload_from_response(&self, answer: &Response, done: u64) -> Result<Begun, OciError> {
        let location = answer.headers().get(LOCATION).and_then(|l| l.to_str().ok());
        let url = location.and_then(|l| answer.url().join(l).ok());
        let url = url.ok_or_else(|| self.status("begin upload", answer.status().as_u16()))?;
        Ok(Begun { url, done, stale: false })
    }

    /// Sends a body from `offset`, and again if the token has expired: a refused request stores nothing. Fails when the
    /// registry accepts no bytes for too long, or does not answer in time after the last byte.
    async fn send_body(
        &self,
        (method, url): (Method, &Url),
        payload: &Payload,
        offset: u64,
        digest: &Digest,
        sent: &SentBytes,
    ) -> Result<Response, OciError> {
        let what = digest.to_string();
        for renewals in 0.. {
            let activity = Activity::new();
            let body = payload.body(offset, sent, &activity).await?;
            let mut request = self.to(method.clone(), url.clone()).await;
            if offset > 0 {
                let range = format!("{offset}-{}", payload.len().saturating_sub(1));
                request = request.header(CONTENT_RANGE, range);
            }
            let request = request
                .header(CONTENT_TYPE, "application/octet-stream")
                .header(CONTENT_LENGTH, payload.len() - offset)
                .body(body);
            let authorization = self.authorization().await;
            let error = tokio::select! {
                answer = self.send(request, "upload blob", &what) => match answer {
                    Ok(answer) => return Ok(answer),
                    Err(error) => error,
                },
                () = wait_for_stall(&activity, self.timeouts.read_idle, self.timeouts.request) => {
                    return Err(self.network("upload blob", "the registry accepts no more bytes"));
                }
            };
            let expired = authorization.filter(|_| matches!(error, OciError::Unauthorized { .. }));
            match expired {
                Some(expired) if renewals < RENEWALS_MAX && self.renew(&expired).await?.is_some() => {}
                _ => return Err(error),
            }
        }
        Err(self.unauthorized(None))
    }

    /// Stores a manifest under a tag or digest. Idempotent. Returns true when the registry supports the referrers API and
    /// lists the manifest as a referrer of its subject.
    ///
    /// # Errors
    /// Errors of the registry.
    pub async fn put_manifest(&self, name: &str, media_type: &str, bytes: Bytes) -> Result<bool, OciError> {
        self.retry(|| async {
            let request = self.request(Method::PUT, &format!("manifests/{name}")).await;
            let request = request.header(CONTENT_TYPE, media_type).body(bytes.clone());
            let answer =
                self.send(request.timeout(self.timeouts.request), "put manifest", "repository").await?;
            match answer.status() {
                StatusCode::CREATED | StatusCode::OK | StatusCode::ACCEPTED => {
                    Ok(answer.headers().contains_key(SUBJECT))
                }
                status => Err(self.status("put manifest", status.as_u16())),
            }
        })
        .await
    }

    /// Lists a manifest as a referrer of `subject` by the referrers tag schema, for registries without the referrers API.
    /// Idempotent. Two concurrent calls may lose one entry (OCI distribution specification, "Referrers Tag Schema").
    ///
    /// # Errors
    /// [`OciError::Unsupported`] when the tag names another document; those of the registry.
    pub async fn list_referrer(
        &self,
        subject: &Digest,
        own: &Descriptor,
        artifact_type: &str,
    ) -> Result<(), OciError> {
        let tag = subject.to_string().replace(':', "-");
        let known = match self.manifest(&tag, LIST_MAX).await {
            Ok(known) => Some(known.bytes),
            Err(OciError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let Some(list) = with_referrer(known.as_deref(), own, artifact_type)? else { return Ok(()) };
        self.put_manifest(&tag, OCI_INDEX, list.into()).await.map(drop)
    }
}

/// Adds an entry to the list. `None` if the list already has the entry. Pure.
fn with_referrer(
    known: Option<&[u8]>,
    own: &Descriptor,
    artifact_type: &str,
) -> Result<Option<Vec<u8>>, OciError> {
    let not_a_list = || OciError::unsupported("the referrers tag names something other than an index");
    let mut list = match known {
        Some(bytes) => serde_json::from_slice::<Value>(bytes).map_err(|_| not_a_list())?,
        None => json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}),
    };
    let entries = list.get_mut("manifests").and_then(Value::as_array_mut).ok_or_else(not_a_list)?;
    if entries.iter().any(|entry| entry["digest"] == own.digest.to_string()) {
        return Ok(None);
    }
    let mut entry = json!(own);
    entry["artifactType"] = artifact_type.into();
    entries.push(entry);
    Ok(Some(list.to_string().into_bytes()))
}

/// Completes when no byte of a body was read for `idle`, or when `answer` has passed since the end of the body.
async fn wait_for_stall(activity: &Activity, idle: Duration, answer: Duration) {
    loop {
        let (last, ended) = activity.last();
        let until: Instant = last + if ended { answer } else { idle };
        if Instant::now() >= until {
            return;
        }
        sleep_until(until).await;
    }
}

fn with_digest(url: &Url, digest: &Digest) -> Url {
    let mut url = url.clone();
    url.query_pairs_mut().append_pair("digest", &digest.to_string());
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn referrer_is_listed_once_and_other_documents_fail() {
        let own = |bytes: &[u8]| Descriptor {
            media_type: "application/vnd.oci.image.manifest.v1+json".to_owned(),
            digest: Digest::of(bytes),
            size_bytes: bytes.len() as u64,
        };
        let first = with_referrer(None, &own(b"one"), "kind").unwrap().unwrap();
        assert_eq!(with_referrer(Some(&first), &own(b"one"), "kind").unwrap(), None, "already listed");
        let both = with_referrer(Some(&first), &own(b"two"), "kind").unwrap().unwrap();
        let list: Value = serde_json::from_slice(&both).unwrap();
        assert_eq!(list["mediaType"], OCI_INDEX);
        let entry = |bytes: &[u8]| {
            json!({
                "mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 3,
                "digest": Digest::of(bytes).to_string(), "artifactType": "kind",
            })
        };
        assert_eq!(list["manifests"], json!([entry(b"one"), entry(b"two")]));
        for hostile in ["", "7", "[]", "{}", r#"{"manifests": 1}"#] {
            assert!(with_referrer(Some(hostile.as_bytes()), &own(b"one"), "kind").is_err(), "{hostile}");
        }
    }
}
