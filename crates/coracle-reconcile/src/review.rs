//! Whose a bearer token is, by the API server's word.

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::{Api, Client, api::PostParams};

/// Asks the API server about a token (Kubernetes API, `TokenReview`). With an audience, a token that was made for
/// others is none. `None`: it is nobody's, or over.
///
/// # Errors
/// The API server does not answer, or does not let us ask.
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
    // A server that knows nothing of audiences names none: its word is not about ours.
    let ours = audience.is_none_or(|a| status.audiences.iter().flatten().any(|b| b == a));
    Ok(status.user.filter(|_| ours && status.authenticated == Some(true)))
}
