//! Service account tokens in volumes.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::volumes;
use crate::time::{add, seconds, until};

/// Lifetime in seconds of a token whose volume sets none, and the shortest one that the API server issues.
const LIFETIME: i64 = 3607;
const LIFETIME_MIN: i64 = 600;
/// A token is renewed after this time at the latest.
const AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Service account token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The secret.
    pub value: String,
    /// Time of issue.
    pub issued_at: Timestamp,
    /// Expiry time.
    pub expires_at: Timestamp,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// Request for a token of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRequest {
    /// Name of the volume.
    pub volume: String,
    /// Path of the token in the volume.
    pub path: String,
    /// Audience of the token; empty: the API server.
    pub audience: String,
    /// Requested lifetime.
    pub lifetime: Duration,
}

/// Returns the requests for all tokens in the volumes of a pod.
#[must_use]
pub fn token_requests(pod: &Pod) -> Vec<TokenRequest> {
    let projected = volumes(pod).filter_map(|(_, volume)| Some((volume, volume.projected.as_ref()?)));
    let tokens = projected.flat_map(|(volume, projected)| {
        let sources = projected.sources.iter().flatten();
        sources.filter_map(move |source| Some((volume, source.service_account_token.as_ref()?)))
    });
    let request = |(volume, source): (&k8s_openapi::api::core::v1::Volume, &_)| {
        let source: &k8s_openapi::api::core::v1::ServiceAccountTokenProjection = source;
        TokenRequest {
            volume: volume.name.clone(),
            path: source.path.clone(),
            audience: source.audience.clone().unwrap_or_default(),
            lifetime: seconds(source.expiration_seconds.unwrap_or(LIFETIME).max(LIFETIME_MIN)),
        }
    };
    tokens.map(request).collect()
}

impl Token {
    /// Returns when the token is renewed: after 80 % of its lifetime, or after a day.
    #[must_use]
    pub fn renew_at(&self) -> Timestamp {
        let life = until(self.issued_at, self.expires_at);
        add(self.issued_at, (life / 5 * 4).min(AGE_MAX))
    }
}

/// Returns the tokens that must be requested now, and when the next one is due.
pub(crate) fn due(
    pod: &Pod,
    tokens: &BTreeMap<(String, String), Token>,
    now: Timestamp,
) -> (Vec<TokenRequest>, Option<Timestamp>) {
    let mut next: Option<Timestamp> = None;
    let mut wanted = token_requests(pod);
    wanted.retain(|request| {
        let key = (request.volume.clone(), request.path.clone());
        let Some(at) = tokens.get(&key).map(Token::renew_at) else { return true };
        next = Some(next.map_or(at, |next| next.min(at))).filter(|at| *at > now).or(next);
        at <= now
    });
    (wanted, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_renewed_at_80_percent_or_after_a_day() {
        let token = |life: u64| Token {
            value: String::new(),
            issued_at: Timestamp::UNIX_EPOCH,
            expires_at: add(Timestamp::UNIX_EPOCH, Duration::from_secs(life)),
        };
        assert_eq!(token(3600).renew_at().as_second(), 2880);
        assert_eq!(token(365 * 86400).renew_at().as_second(), 86400);
    }

    #[test]
    fn due_tokens_are_missing_or_old_ones() {
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {"containers": [], "volumes": [
            {"name": "v", "projected": {"sources": [
                {"serviceAccountToken": {"path": "token"}},
                {"serviceAccountToken": {"path": "vault", "audience": "vault", "expirationSeconds": 600}},
            ]}},
        ]}}))
        .unwrap();
        let now = Timestamp::UNIX_EPOCH;
        let (wanted, next) = due(&pod, &BTreeMap::new(), now);
        let lifetimes: Vec<_> = wanted.iter().map(|r| (r.path.as_str(), r.lifetime.as_secs())).collect();
        assert_eq!((lifetimes, next), (vec![("token", 3607), ("vault", 600)], None));
        let token =
            Token { value: String::new(), issued_at: now, expires_at: add(now, Duration::from_secs(1000)) };
        let both = ["token", "vault"].map(|path| (("v".to_owned(), path.to_owned()), token.clone())).into();
        assert_eq!(due(&pod, &both, now), (vec![], Some(add(now, Duration::from_secs(800)))));
        assert_eq!(due(&pod, &both, add(now, Duration::from_secs(800))).0.len(), 2);
    }

    #[test]
    fn token_is_not_shown_in_logs() {
        let (issued_at, expires_at) = (Timestamp::UNIX_EPOCH, Timestamp::MAX);
        let shown = format!("{:?}", Token { value: "secret".into(), issued_at, expires_at });
        assert!(!shown.contains("secret"), "{shown}");
    }
}
