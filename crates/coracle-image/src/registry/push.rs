//! Bringing blobs and manifests into a registry: HEAD, then a mount, then an upload that goes on where it broke off.

mod payload;

use std::time::Duration;

use backon::BackoffBuilder;
use bytes::Bytes;
use reqwest::{
    Method, RequestBuilder, Response, StatusCode, Url,
    header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE},
};
use tokio::time::{Instant, sleep_until};

use serde_json::{Value, json};

use super::Session;
use crate::{Descriptor, Digest, ImageError, manifest::OCI_INDEX};

use payload::Pulse;
pub(crate) use payload::{Payload, Sent};

/// Header of a registry that lists who refers to a manifest.
const SUBJECT: &str = "oci-subject";
/// Longest list of referrers that is read and written again, bytes.
const LIST_MAX: u64 = 4 << 20;

/// What a registry did with a blob that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offered {
    /// It had it.
    There,
    /// It took it from another repository.
    Mounted,
    /// Its bytes were moved.
    Moved,
}

/// An upload that was begun.
struct Begun {
    url: Url,
    /// Bytes of it that are there.
    done: u64,
    /// Something was sent since the registry said so.
    stale: bool,
}

impl Session {
    /// True when the repository has the blob.
    pub(crate) async fn has_blob(&self, digest: &Digest) -> Result<bool, ImageError> {
        self.retry(|| async {
            let request = self.request(Method::HEAD, &format!("blobs/{digest}")).await;
            match self
                .send(request.timeout(self.timeouts.request), "look for blob", &digest.to_string())
                .await
            {
                Ok(_) => Ok(true),
                Err(ImageError::NotFound { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Uploads a blob unless it is there. Returns whether its bytes were moved. Idempotent.
    pub(crate) async fn put_blob(&self, digest: &Digest, bytes: Bytes) -> Result<bool, ImageError> {
        let offered = self.offer_blob(digest, &Payload::Bytes(bytes), None, &payload::unheard()).await?;
        Ok(offered == Offered::Moved)
    }

    /// Brings a blob into the repository in the cheapest way: it is there, it is in the repository `from` of the same
    /// registry, or its bytes are moved. `sent` hears of those. Idempotent; what a cancelled call has sent is given up
    /// by the registry when its uploads expire.
    ///
    /// # Errors
    /// [`ImageError::Io`] for the file; those of the registry.
    pub(crate) async fn offer_blob(
        &self,
        digest: &Digest,
        payload: &Payload,
        from: Option<&str>,
        sent: &Sent,
    ) -> Result<Offered, ImageError> {
        if self.has_blob(digest).await? {
            return Ok(Offered::There);
        }
        let mut begun = match from {
            None => None,
            Some(from) => match self.retry(|| self.mount(digest, from)).await? {
                None => return Ok(Offered::Mounted),
                begun => begun,
            },
        };
        let (mut delays, mut renewed) = (self.backoff().build(), false);
        loop {
            let before = begun.as_ref().map_or(0, |b| b.done);
            let error = match self.try_upload(digest, payload, &mut begun, sent).await {
                Ok(()) => return Ok(Offered::Moved),
                Err(error) => error,
            };
            if begun.as_ref().is_some_and(|b| b.done > before) {
                delays = self.backoff().build();
            }
            if matches!(error, ImageError::Unauthorized { .. }) && !renewed {
                // Tokens live for minutes, large blobs take longer.
                renewed = true;
                self.authorize().await?;
                continue;
            }
            let delay: Duration = match delays.next() {
                Some(delay) if error.is_transient() => delay,
                _ => return Err(error),
            };
            tracing::debug!(blob = %digest, error = &error as &dyn std::error::Error, "upload is resumed");
            tokio::time::sleep(delay).await;
        }
    }

    /// Asks for a blob of another repository. `None`: it is there now. A registry that does not have it begins an
    /// upload instead.
    async fn mount(&self, digest: &Digest, from: &str) -> Result<Option<Begun>, ImageError> {
        let path = "blobs/uploads/";
        let query = [("mount", digest.to_string()), ("from", from.to_owned())];
        let request = self.request(Method::POST, path).await.query(&query).header(CONTENT_LENGTH, 0);
        let answer = self.send(request.timeout(self.timeouts.request), "mount blob", "repository").await?;
        match answer.status() {
            StatusCode::CREATED => Ok(None),
            _ => self.begun(&answer, 0).map(Some),
        }
    }

    /// One try: the whole blob in one request, or the rest of it behind what is there.
    async fn try_upload(
        &self,
        digest: &Digest,
        payload: &Payload,
        place: &mut Option<Begun>,
        sent: &Sent,
    ) -> Result<(), ImageError> {
        let begun = match place.take() {
            Some(begun) if !begun.stale => begun,
            Some(begun) => self.look_at_upload(begun, payload.len()).await?,
            None => self.begin_upload().await?,
        };
        let Begun { url, done, stale } = place.insert(begun);
        *stale = true;
        if *done == 0 {
            let request = self.to(Method::PUT, with_digest(url, digest)).await;
            self.send_body(request, payload, 0, digest, sent).await?;
            return Ok(());
        }
        let range = format!("{}-{}", *done, payload.len().saturating_sub(1));
        let request = self.to(Method::PATCH, url.clone()).await.header(CONTENT_RANGE, range);
        let answer = self.send_body(request, payload, *done, digest, sent).await?;
        let end = self.begun(&answer, payload.len())?;
        let request = self.to(Method::PUT, with_digest(&end.url, digest)).await.header(CONTENT_LENGTH, 0);
        self.send(request.timeout(self.timeouts.request), "end upload", &digest.to_string()).await.map(drop)
    }

    async fn begin_upload(&self) -> Result<Begun, ImageError> {
        let request = self.request(Method::POST, "blobs/uploads/").await.header(CONTENT_LENGTH, 0);
        let answer = self.send(request.timeout(self.timeouts.request), "begin upload", "repository").await?;
        self.begun(&answer, 0)
    }

    /// How far an upload is. One that the registry does not know, or of which it has nothing, is begun anew.
    async fn look_at_upload(&self, begun: Begun, bytes: u64) -> Result<Begun, ImageError> {
        let request = self.to(Method::GET, begun.url.clone()).await;
        let answer = self.send(request.timeout(self.timeouts.request), "look at upload", "upload").await;
        let Ok(answer) = answer else { return self.begin_upload().await };
        let said = answer.headers().get(RANGE).and_then(|range| range.to_str().ok());
        let last: Option<u64> = said.and_then(|range| range.rsplit('-').next()?.parse().ok());
        match last {
            // `0-0` is what registries say of an empty one.
            Some(last) if last > 0 && last < bytes => self.begun(&answer, last + 1),
            _ => self.begin_upload().await,
        }
    }

    /// Where the registry says that an upload is.
    fn begun(&self, answer: &Response, done: u64) -> Result<Begun, ImageError> {
        let location = answer.headers().get(LOCATION).and_then(|l| l.to_str().ok());
        let url = location.and_then(|l| answer.url().join(l).ok());
        let url = url.ok_or_else(|| self.status("begin upload", answer.status().as_u16()))?;
        Ok(Begun { url, done, stale: false })
    }

    /// Sends a body from `offset` on. A registry that takes nothing for too long, or does not answer in time when all
    /// was sent, is given up.
    async fn send_body(
        &self,
        request: RequestBuilder,
        payload: &Payload,
        offset: u64,
        digest: &Digest,
        sent: &Sent,
    ) -> Result<Response, ImageError> {
        let pulse = Pulse::new();
        let body = payload.body(offset, sent, &pulse).await?;
        let request = request
            .header(CONTENT_TYPE, "application/octet-stream")
            .header(CONTENT_LENGTH, payload.len() - offset)
            .body(body);
        let what = digest.to_string();
        tokio::select! {
            answer = self.send(request, "upload blob", &what) => answer,
            () = silent(&pulse, self.timeouts.read_idle, self.timeouts.request) => {
                Err(self.network("upload blob", "the registry takes nothing any more"))
            }
        }
    }

    /// Stores a manifest under a tag or digest. Idempotent. True when the registry lists it among those who refer to its
    /// subject: one that says nothing of that knows no such lists.
    pub(crate) async fn put_manifest(
        &self,
        name: &str,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<bool, ImageError> {
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

    /// Lists a manifest among those who refer to `subject`, by the tag that stands for the list in registries that know
    /// none. Idempotent. Two that do so at the same moment may lose one of them, as the specification has it.
    pub(crate) async fn list_referrer(
        &self,
        subject: &Digest,
        own: &Descriptor,
        artifact_type: &str,
    ) -> Result<(), ImageError> {
        let tag = subject.to_string().replace(':', "-");
        let known = match self.manifest(&tag, LIST_MAX).await {
            Ok(known) => Some(known.bytes),
            Err(ImageError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let Some(list) = with_referrer(known.as_deref(), own, artifact_type)? else { return Ok(()) };
        self.put_manifest(&tag, OCI_INDEX, list.into()).await.map(drop)
    }
}

/// The list with one more entry; `None`: it has it. Pure.
fn with_referrer(
    known: Option<&[u8]>,
    own: &Descriptor,
    artifact_type: &str,
) -> Result<Option<Vec<u8>>, ImageError> {
    let no_list = || ImageError::unsupported("a list of referrers that is none");
    let mut list = match known {
        Some(bytes) => serde_json::from_slice::<Value>(bytes).map_err(|_| no_list())?,
        None => json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}),
    };
    let entries = list.get_mut("manifests").and_then(Value::as_array_mut).ok_or_else(no_list)?;
    if entries.iter().any(|entry| entry["digest"] == own.digest.to_string()) {
        return Ok(None);
    }
    let mut entry = json!(own);
    entry["artifactType"] = artifact_type.into();
    entries.push(entry);
    Ok(Some(list.to_string().into_bytes()))
}

/// Ends when nothing of a body moved for `idle`, or nothing was heard for `answer` after its end.
async fn silent(pulse: &Pulse, idle: Duration, answer: Duration) {
    loop {
        let (last, ended) = pulse.last();
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
    fn a_referrer_is_listed_once_and_what_is_no_list_is_refused() {
        let own = |bytes: &[u8]| Descriptor {
            media_type: "application/vnd.oci.image.manifest.v1+json".to_owned(),
            digest: Digest::of(bytes),
            size: bytes.len() as u64,
        };
        let first = with_referrer(None, &own(b"one"), "kind").unwrap().unwrap();
        assert_eq!(with_referrer(Some(&first), &own(b"one"), "kind").unwrap(), None, "it is there");
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
