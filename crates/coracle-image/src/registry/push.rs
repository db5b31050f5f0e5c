//! Bringing blobs and manifests into a registry: HEAD before an upload, one request for its bytes.

use bytes::Bytes;
use reqwest::{
    Method, StatusCode, Url,
    header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION},
};

use super::Session;
use crate::{Digest, ImageError};

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
        if self.has_blob(digest).await? {
            return Ok(false);
        }
        self.retry(|| async {
            let begun = self.request(Method::POST, "blobs/uploads/").await.header(CONTENT_LENGTH, 0);
            let begun = self.send(begun.timeout(self.timeouts.request), "begin upload", "repository").await?;
            let location = begun.headers().get(LOCATION).and_then(|l| l.to_str().ok());
            let target = location.and_then(|l| begun.url().join(l).ok());
            let mut target: Url =
                target.ok_or_else(|| self.status("begin upload", begun.status().as_u16()))?;
            target.query_pairs_mut().append_pair("digest", &digest.to_string());
            let request = self.to(Method::PUT, target).await;
            let request = request.header(CONTENT_TYPE, "application/octet-stream").body(bytes.clone());
            self.send(request, "upload blob", &digest.to_string()).await.map(drop)
        })
        .await?;
        Ok(true)
    }

    /// Stores a manifest under a tag or digest. Idempotent.
    pub(crate) async fn put_manifest(
        &self,
        name: &str,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<(), ImageError> {
        self.retry(|| async {
            let request = self.request(Method::PUT, &format!("manifests/{name}")).await;
            let request = request.header(CONTENT_TYPE, media_type).body(bytes.clone());
            let answer =
                self.send(request.timeout(self.timeouts.request), "put manifest", "repository").await?;
            match answer.status() {
                StatusCode::CREATED | StatusCode::OK | StatusCode::ACCEPTED => Ok(()),
                status => Err(self.status("put manifest", status.as_u16())),
            }
        })
        .await
    }
}
