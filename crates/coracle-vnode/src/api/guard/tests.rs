use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use coracle_access::ReviewError;
use http::{HeaderValue, Method};

use super::*;

/// Fake reviews: tokens are user names, and `broken` causes an error. Users have the permission of their name, e.g. `get/pods`.
#[derive(Default)]
struct Names {
    asked: Arc<AtomicUsize>,
}

#[async_trait]
impl Reviews for Names {
    async fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match token {
            "broken" => Err(ReviewError::TimedOut),
            "invalid" => Ok(None),
            name => Ok(Some(User { name: name.to_owned(), ..User::default() })),
        }
    }

    async fn access(&self, access: &Access) -> Result<bool, ReviewError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match access.user.name.as_str() {
            "unknown" => Err(ReviewError::TimedOut),
            name => Ok(name == format!("{}/{}", access.verb, access.subresource)),
        }
    }
}

fn headers(authorization: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if !authorization.is_empty() {
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(authorization).unwrap());
    }
    headers
}

fn peer(name: &str) -> Peer {
    Peer((!name.is_empty()).then(|| Arc::new(User { name: name.to_owned(), ..User::default() })))
}

async fn decide(guard: &Guard, peer: &Peer, authorization: &str, method: &Method, path: &str) -> u16 {
    let decision = async {
        let user = guard.authenticate(peer, &headers(authorization)).await?;
        guard.authorize(user, attributes(method, path, false)).await
    };
    decision.await.map_or_else(|failure| failure.status.as_u16(), |()| 200)
}

#[tokio::test]
async fn decision_table() {
    for (why, anonymous, certificate, authorization, path, want) in [
        ("no credentials", false, "", "", "/pods", 401),
        ("anonymous without a right", true, "", "", "/pods", 403),
        ("an invalid token", false, "", "Bearer invalid", "/pods", 401),
        ("an invalid token is not anonymous", true, "", "Bearer invalid", "/pods", 401),
        ("another scheme is not anonymous", true, "", "Basic abc", "/pods", 401),
        ("no answer about the token", false, "", "Bearer broken", "/pods", 401),
        ("the first subresource", false, "", "Bearer get/pods", "/pods", 200),
        ("the second subresource", false, "", "Bearer get/proxy", "/pods", 200),
        ("the scheme in capitals", false, "", "BEARER get/proxy", "/pods", 200),
        ("another subresource", false, "", "Bearer get/stats", "/pods", 403),
        ("only proxy", false, "", "Bearer get/pods", "/containerLogs/a/b/c", 403),
        ("another verb", false, "", "Bearer create/proxy", "/containerLogs/a/b/c", 403),
        ("a certificate", false, "get/metrics", "", "/metrics", 200),
        ("a certificate before a token", false, "get/metrics", "Bearer get/stats", "/stats/summary", 403),
        ("no answer about the access", false, "", "Bearer unknown", "/pods", 500),
    ] {
        let guard = Guard::new(Box::new(Names::default()), "node".to_owned(), anonymous);
        let got = decide(&guard, &peer(certificate), authorization, &Method::GET, path).await;
        assert_eq!(got, want, "{why}");
    }
}

#[tokio::test(start_paused = true)]
async fn review_answers_are_cached_for_their_ttl() {
    let asked = Arc::new(AtomicUsize::new(0));
    let guard = Guard::new(Box::new(Names { asked: asked.clone() }), "node".to_owned(), false);
    let ask = async |authorization: &str, wait: u64| {
        tokio::time::advance(Duration::from_secs(wait)).await;
        let before = asked.load(Ordering::SeqCst);
        decide(&guard, &peer(""), authorization, &Method::GET, "/metrics").await;
        asked.load(Ordering::SeqCst) - before
    };
    let allowed = "Bearer get/metrics";
    assert_eq!((ask(allowed, 0).await, ask(allowed, 119).await), (2, 0));
    assert_eq!(ask(allowed, 1).await, 1, "the token after 2 minutes");
    assert_eq!((ask(allowed, 119).await, ask(allowed, 61).await), (0, 2), "the access after 5");
    let denied = "Bearer get/stats";
    assert_eq!((ask(denied, 0).await, ask(denied, 29).await, ask(denied, 1).await), (2, 0, 1));
    assert_eq!((ask("Bearer invalid", 0).await, ask("Bearer invalid", 9).await), (1, 0));
    assert_eq!(
        (ask("Bearer broken", 0).await, ask("Bearer broken", 0).await),
        (1, 1),
        "a failure is not kept"
    );
}

#[tokio::test]
async fn refusal_names_what_is_missing() {
    let guard = Guard::new(Box::new(Names::default()), "node".to_owned(), true);
    let refused = guard.authorize(User::anonymous(), attributes(&Method::GET, "/pods", false)).await;
    let want = "Forbidden (user=system:anonymous, verb=get, resource=nodes, subresource(s)=[pods proxy])";
    assert_eq!(refused.unwrap_err().message, want);
}
