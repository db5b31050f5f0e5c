//! Ours and the original's: reads for everybody, writes for tokens.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use coracle_types::{Clock, UnixMillis};
use serde_json::json;

use crate::common::{digest, start, start_in, start_with};

#[tokio::test]
async fn writes_need_a_token_and_reads_do_not() {
    let registry = start().await;
    let (named, _) = registry.image("a", "v1").await;
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 200);
    for (method, path) in [
        ("POST", "/v2/a/blobs/uploads/".to_owned()),
        ("PUT", "/v2/a/manifests/v2".to_owned()),
        ("DELETE", "/v2/a/manifests/v1".to_owned()),
        ("DELETE", format!("/v2/a/blobs/{named}")),
        ("DELETE", "/api/repositories/a/tags/v1".to_owned()),
        ("POST", "/api/catalog/sync".to_owned()),
        ("GET", "/api/tokens".to_owned()),
    ] {
        let refused = registry.send(registry.request(method, &path)).await;
        assert_eq!((refused.status, refused.code().as_str()), (401, "UNAUTHORIZED"), "{method} {path}");
        let challenge = refused.header("www-authenticate").unwrap();
        let want = format!("Bearer realm=\"{}/v2/token\",service=\"epoch\"", registry.url);
        assert_eq!(challenge, want);
        let wrong = registry.send(registry.request(method, &path).bearer_auth("cor_wrong")).await;
        assert_eq!(wrong.status, 401, "{method} {path}");
    }
}

#[tokio::test]
async fn private_reads_need_a_token_too() {
    let registry = start_with(|c| c.private_reads = true).await;
    let (named, _) = registry.image("a", "v1").await;
    let layer = digest(b"layer");
    for path in [
        "/v2/a/manifests/v1".to_owned(),
        format!("/v2/a/manifests/{named}"),
        format!("/v2/a/blobs/{layer}"),
        "/v2/_catalog".to_owned(),
        "/v2/a/tags/list".to_owned(),
        format!("/v2/a/referrers/{named}"),
        "/api/repositories".to_owned(),
        "/api/stats".to_owned(),
        "/dl/a".to_owned(),
        "/".to_owned(),
        "/r/a".to_owned(),
    ] {
        assert_eq!(registry.get(&path).await.status, 401, "{path}");
    }
    assert_eq!(registry.call("GET", "/v2/a/manifests/v1", &[], "").await.status, 200);
    assert_eq!(registry.get("/healthz").await.status, 200);
}

/// Where the original had single sign-on.
#[tokio::test]
async fn private_pages_need_a_token_and_pulls_do_not() {
    let registry = start_with(|c| c.private_pages = true).await;
    registry.image("a", "v1").await;
    for path in ["/", "/r/a", "/r/a@v1", "/api/stats", "/api/repositories", "/api/repositories/a/tags/v1"] {
        assert_eq!(registry.get(path).await.status, 401, "{path}");
        let person = registry.request("GET", path).basic_auth("anybody", Some(&registry.token));
        assert_eq!(registry.send(person).await.status, 200, "{path}");
    }
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 200);
    assert_eq!(registry.get("/v2/a/tags/list").await.status, 200);
}

#[tokio::test]
async fn open_writes_need_none_but_tokens_do() {
    let registry = start_with(|c| c.open_writes = true).await;
    assert_eq!(registry.get("/v2/").await.status, 200);
    let path = format!("/v2/a/blobs/uploads/?digest={}", digest(b"x"));
    assert_eq!(registry.send(registry.request("POST", &path).body("x")).await.status, 201);
    assert_eq!(registry.get("/api/tokens").await.status, 401);
}

#[tokio::test]
async fn first_token_is_kept_for_its_owner_alone_and_only_its_hash_in_the_database() {
    let registry = start().await;
    let file = registry.dir.path().join("token");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let token = registry.token.clone();
    let registry = start_in(registry.end().await, |_| {}).await;
    assert_eq!(registry.token, token, "a restart makes no other");
    for name in ["registry.db", "registry.db-wal"] {
        let bytes = std::fs::read(registry.dir.path().join(name)).unwrap_or_default();
        assert!(!bytes.windows(token.len()).any(|w| w == token.as_bytes()), "{name} holds the secret");
    }
}

#[tokio::test]
async fn token_route_gives_back_what_is_right() {
    let registry = start().await;
    let anonymous = registry.get("/v2/token?service=epoch&scope=repository:a:pull").await.json();
    assert_eq!(
        (anonymous["expires_in"].as_i64(), anonymous["token"].as_str()),
        (Some(3600), Some("anonymous"))
    );
    assert_eq!(
        registry.send(registry.request("GET", "/v2/").bearer_auth("anonymous")).await.status,
        200,
        "may go on"
    );
    let basic = registry.request("GET", "/v2/token").basic_auth("anybody", Some(&registry.token));
    assert_eq!(registry.send(basic).await.json()["token"], registry.token);
    for field in ["password", "refresh_token"] {
        let form =
            registry.request("POST", "/v2/token").body(format!("grant_type=x&{field}={}", registry.token));
        assert_eq!(registry.send(form).await.json()["access_token"], registry.token, "{field}");
    }
    let wrong = registry.request("GET", "/v2/token").basic_auth("anybody", Some("wrong"));
    assert_eq!(registry.send(wrong).await.status, 401);
    let basic = registry.request("POST", "/v2/a/blobs/uploads/").basic_auth("anybody", Some(&registry.token));
    assert_eq!(registry.send(basic).await.status, 202, "clients that never ask for a bearer");
    let original = start_with(|c| c.empty_token = true).await;
    assert_eq!(original.get("/v2/token").await.json()["token"], "");
}

#[tokio::test]
async fn tokens_are_made_shown_once_used_and_removed() {
    let registry = start().await;
    let made = registry.call("POST", "/api/tokens", &[], r#"{"name":"ci"}"#).await;
    assert_eq!((made.status, &made.json()["name"]), (201, &json!("ci")));
    let (token, id) =
        (made.json()["token"].as_str().unwrap().to_owned(), made.json()["id"].as_str().unwrap().to_owned());
    let write = || registry.request("POST", "/v2/a/blobs/uploads/").bearer_auth(&token);
    assert_eq!(registry.send(write()).await.status, 202);
    let list = registry.call("GET", "/api/tokens", &[], "").await;
    assert!(!String::from_utf8_lossy(&list.body).contains(&token), "never shown again");
    let row = list.json().as_array().unwrap().iter().find(|t| t["id"] == id.as_str()).unwrap().clone();
    assert_eq!((&row["name"], &row["createdBy"]), (&json!("ci"), &json!("first")));
    assert!(row["lastUsed"].is_string());
    assert_eq!(registry.call("DELETE", &format!("/api/tokens/{id}"), &[], "").await.status, 204);
    assert_eq!(registry.send(write()).await.status, 401, "at once");
    for bad in ["{}", r#"{"name":""}"#, "x", r#"{"name":"a","ttlSeconds":-1}"#] {
        assert_eq!(registry.call("POST", "/api/tokens", &[], bad).await.status, 400, "{bad}");
    }
}

#[tokio::test]
async fn expired_token_is_no_token() {
    let clock = Clock::fixed(UnixMillis(1_800_000_000_000));
    let own = clock.clone();
    let registry = start_with(move |c| c.clock = own).await;
    let made = registry.call("POST", "/api/tokens", &[], r#"{"name":"ci","ttlSeconds":60}"#).await.json();
    let token = made["token"].as_str().unwrap();
    let write = || registry.request("POST", "/v2/a/blobs/uploads/").bearer_auth(token);
    assert_eq!(registry.send(write()).await.status, 202);
    clock.advance(Duration::from_secs(61));
    let refused = registry.send(write()).await;
    assert_eq!((refused.status, refused.code().as_str()), (401, "UNAUTHORIZED"));
    assert!(refused.header("www-authenticate").is_some());
}

#[tokio::test]
async fn read_only_token_cannot_write() {
    let registry = start_with(|c| c.private_reads = true).await;
    registry.image("a", "v1").await;
    let made = registry.call("POST", "/api/tokens", &[], r#"{"name":"puller","readOnly":true}"#).await.json();
    let token = made["token"].as_str().unwrap();
    assert_eq!(
        registry.send(registry.request("GET", "/v2/a/manifests/v1").bearer_auth(token)).await.status,
        200
    );
    let refused = registry.send(registry.request("POST", "/v2/a/blobs/uploads/").bearer_auth(token)).await;
    assert_eq!((refused.status, refused.code().as_str()), (403, "DENIED"));
    assert_eq!(registry.send(registry.request("GET", "/api/tokens").bearer_auth(token)).await.status, 403);
}
