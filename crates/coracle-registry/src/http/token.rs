//! `/v2/token`: exchanges credentials for a bearer token. Tokens of the registry already are bearer tokens: a valid token is
//! returned unchanged.

use axum::Json;
use axum::body::Body;
use axum::http::Method;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::read_bounded;
use crate::auth::{ANONYMOUS, request_token};
use crate::error::{Code, ErrorResponse};
use crate::registry::Registry;

/// Largest form, bytes.
const FORM_MAX: u64 = 64 << 10;

pub(super) async fn token(registry: &Registry, parts: &Parts, body: Body) -> Result<Response, ErrorResponse> {
    let mut shown = request_token(&parts.headers);
    if parts.method == Method::POST {
        let form = read_bounded(registry, body, FORM_MAX).await?;
        let field = |name: &str| {
            form_urlencoded::parse(&form)
                .find(|(k, v)| k == name && !v.is_empty())
                .map(|(_, v)| v.into_owned())
        };
        shown =
            shown.or_else(|| field("password")).or_else(|| field("refresh_token")).filter(|t| t != ANONYMOUS);
    }
    let token = match shown {
        Some(shown) => {
            let known = registry.gate.holder(&registry.meta, &shown, registry.now()).await?;
            known.ok_or_else(|| ErrorResponse::new(Code::Unauthorized, "the token is invalid or expired"))?;
            shown
        }
        None if registry.empty_token => String::new(),
        None => ANONYMOUS.to_owned(),
    };
    let issued = jiff::Timestamp::from_millisecond(registry.now()).unwrap_or_default().to_string();
    Ok(Json(json!({"token": token, "access_token": token, "expires_in": 3600, "issued_at": issued}))
        .into_response())
}
