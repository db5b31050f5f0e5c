//! Questions to the API server: whose token it is, and what a user may do.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::timeout;

use super::user::User;

/// Time for one answer of the API server.
const LIMIT: Duration = Duration::from_secs(10);

/// A review that has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewError {
    #[error("the API server does not answer")]
    TimedOut,
    #[error("the API server refuses the review")]
    Refused(#[from] Box<kube::Error>),
}

/// Access to a part of the node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Access {
    pub(super) user: User,
    pub(super) verb: &'static str,
    pub(super) subresource: &'static str,
}

/// Who decides on tokens and access.
#[async_trait]
pub(super) trait Reviews: Send + Sync {
    /// Whose token it is; `None`: it is invalid.
    async fn token(&self, token: &str) -> Result<Option<User>, ReviewError>;

    /// Whether this access is allowed.
    async fn access(&self, access: &Access) -> Result<bool, ReviewError>;
}

/// The API server decides.
pub(super) struct KubeReviews {
    pub(super) client: Client,
    /// Name of the node.
    pub(super) node: String,
}

#[async_trait]
impl Reviews for KubeReviews {
    async fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let status = create(&self.client, &review).await?.status.unwrap_or_default();
        let valid = status.authenticated == Some(true);
        Ok(status.user.filter(|_| valid).map(User::of_review).filter(|user| !user.name.is_empty()))
    }

    async fn access(&self, access: &Access) -> Result<bool, ReviewError> {
        let User { name, uid, groups, extra } = access.user.clone();
        let resource = ResourceAttributes {
            verb: Some(access.verb.to_owned()),
            version: Some("v1".to_owned()),
            resource: Some("nodes".to_owned()),
            subresource: Some(access.subresource.to_owned()),
            name: Some(self.node.clone()),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            user: Some(name),
            uid,
            groups: Some(groups),
            extra: Some(extra),
            resource_attributes: Some(resource),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let status = create(&self.client, &review).await?.status.unwrap_or_default();
        Ok(status.allowed && status.denied != Some(true))
    }
}

async fn create<K>(client: &Client, review: &K) -> Result<K, ReviewError>
where
    K: kube::Resource<DynamicType = ()>
        + serde::Serialize
        + serde::de::DeserializeOwned
        + Clone
        + std::fmt::Debug,
{
    let api = Api::all(client.clone());
    let answer = timeout(LIMIT, async { api.create(&PostParams::default(), review).await }).await;
    answer.map_err(|_| ReviewError::TimedOut)?.map_err(|error| Box::new(error).into())
}
