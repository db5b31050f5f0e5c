//! Authentication of bearer tokens by the API server, and authorization of their users.

use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};

/// Authenticates a token by a TokenReview. With an audience, tokens for other audiences are refused. `None`: the token is
/// invalid or expired.
///
/// # Errors
/// The API server does not answer, or forbids the review.
pub async fn review_token(
    client: &Client,
    token: &str,
    audience: Option<&str>,
) -> Result<Option<UserInfo>, kube::Error> {
    let audiences = audience.map(|audience| vec![audience.to_owned()]);
    let spec = TokenReviewSpec { token: token.to_owned(), audiences };
    let review = TokenReview { spec, ..TokenReview::default() };
    let api: Api<TokenReview> = Api::all(client.clone());
    let status = api.create(&PostParams::default(), &review).await?.status.unwrap_or_default();
    // An API server without support for audiences returns none: it did not check the audience.
    let ours = audience.is_none_or(|a| status.audiences.iter().flatten().any(|b| b == a));
    Ok(status.user.filter(|_| ours && status.authenticated == Some(true)))
}

/// Checks by a SubjectAccessReview whether a user has a permission. The API server applies the rules of the cluster (RBAC,
/// webhooks), including those for the user's groups.
///
/// # Errors
/// The API server does not answer, or forbids the review.
pub async fn review_access(
    client: &Client,
    user: UserInfo,
    access: ResourceAttributes,
) -> Result<bool, kube::Error> {
    let spec = SubjectAccessReviewSpec {
        user: user.username,
        groups: user.groups,
        uid: user.uid,
        extra: user.extra,
        resource_attributes: Some(access),
        ..SubjectAccessReviewSpec::default()
    };
    let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed && status.denied != Some(true)))
}
