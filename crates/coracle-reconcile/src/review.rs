//! Authentication of bearer tokens by the API server.

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::{Api, Client, api::PostParams};

/// Authenticates a token by a TokenReview. With an audience, tokens for other audiences are refused. `None`:
/// the token is invalid or expired.
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
    // A server without support for audiences returns none: it did not check ours.
    let ours = audience.is_none_or(|a| status.audiences.iter().flatten().any(|b| b == a));
    Ok(status.user.filter(|_| ours && status.authenticated == Some(true)))
}
