//! Token reviews and access reviews.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use kube::Client;
use tokio::time::timeout;

use crate::api_server::{review_access, review_token};
use crate::user::User;

/// Time limit of a review.
const LIMIT: Duration = Duration::from_secs(10);

/// Error of a review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The API server did not answer within ten seconds.
    #[error("the API server does not answer")]
    TimedOut,
    /// The API server returned an error.
    #[error("the API server refuses the review")]
    Refused(#[from] Box<kube::Error>),
}

/// Access to a subresource (Kubernetes, `authorization.k8s.io/v1` ResourceAttributes).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Access {
    /// User who requests access.
    pub user: User,
    /// Verb, e.g. `get` or `create`.
    pub verb: &'static str,
    /// API group; the core group is empty.
    pub group: &'static str,
    /// Version of the API group.
    pub version: &'static str,
    /// Resource: plural name of the kind.
    pub resource: &'static str,
    /// Subresource.
    pub subresource: &'static str,
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
}

/// Decides on tokens and access.
#[async_trait]
pub trait Reviews: Send + Sync {
    /// Returns the user of a token; `None`: the token is invalid.
    ///
    /// # Errors
    /// [`ReviewError`].
    async fn token(&self, token: &str) -> Result<Option<User>, ReviewError>;

    /// Returns whether this access is allowed.
    ///
    /// # Errors
    /// [`ReviewError`].
    async fn access(&self, access: &Access) -> Result<bool, ReviewError>;
}

/// Reviews by the API server. The client needs permission to create TokenReviews and SubjectAccessReviews.
pub struct KubeReviews {
    /// Client of the API server.
    pub client: Client,
}

#[async_trait]
impl Reviews for KubeReviews {
    async fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let user = answer(review_token(&self.client, token, None)).await?;
        Ok(user.map(User::of_review).filter(|user| !user.name.is_empty()))
    }

    async fn access(&self, access: &Access) -> Result<bool, ReviewError> {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let resource = ResourceAttributes {
            verb: text(access.verb),
            group: text(access.group),
            version: text(access.version),
            resource: text(access.resource),
            subresource: text(access.subresource),
            namespace: text(&access.namespace),
            name: text(&access.name),
            ..ResourceAttributes::default()
        };
        let User { name, uid, groups, extra } = access.user.clone();
        let user = UserInfo { username: Some(name), uid, groups: Some(groups), extra: Some(extra) };
        answer(review_access(&self.client, user, resource)).await
    }
}

async fn answer<T>(review: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ReviewError> {
    let answer = timeout(LIMIT, review).await;
    answer.map_err(|_| ReviewError::TimedOut)?.map_err(|error| Box::new(error).into())
}
