//! Tokens: anonymous reads, and writes that need a token.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use coracle_types::{Clock, UnixMillis};
use serde_json::{Value, json};

use crate::common::{Registry, digest, start, start_in, start_with};

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

/// Replaces the single sign-on of epoch.
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
async fn open_writes_need_no_token_but_token_routes_do() {
    let registry = start_with(|c| c.open_writes = true).await;
    assert_eq!(registry.get("/v2/").await.status, 200);
    let path = format!("/v2/a/blobs/uploads/?digest={}", digest(b"x"));
    assert_eq!(registry.send(registry.request("POST", &path).body("x")).await.status, 201);
    assert_eq!(registry.get("/api/tokens").await.status, 401);
}

#[tokio::test]
async fn first_token_file_is_private_and_stored_hashed() {
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
async fn token_route_returns_valid_tokens() {
    let registry = start().await;
    let anonymous = registry.get("/v2/token?service=epoch&scope=repository:a:pull").await.json();
    assert_eq!(
        (anonymous["expires_in"].as_i64(), anonymous["token"].as_str()),
        (Some(3600), Some("anonymous"))
    );
    assert_eq!(
        registry.send(registry.request("GET", "/v2/").bearer_auth("anonymous")).await.status,
        200,
        "may continue"
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
async fn token_is_created_shown_once_used_and_removed() {
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

/// HTTP/2 has `:authority` instead of `Host`.
#[tokio::test]
async fn challenge_over_http2_names_host_and_port() {
    let registry = start_with(|_| {}).await;
    let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let refused = http.post(format!("{}/v2/a/blobs/uploads/", registry.url)).send().await.unwrap();
    assert_eq!((refused.version(), refused.status().as_u16()), (reqwest::Version::HTTP_2, 401));
    let challenge = refused.headers()["www-authenticate"].to_str().unwrap();
    assert!(challenge.contains(&format!("realm=\"{}/v2/token\"", registry.url)), "{challenge}");
}

#[tokio::test]
async fn expired_token_is_refused() {
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

/// Creates a token as `asked` and returns its secret.
async fn create_token(registry: &Registry, asked: Value) -> String {
    let made = registry.call("POST", "/api/tokens", &[], asked.to_string()).await;
    assert_eq!(made.status, 201, "{asked}: {}", String::from_utf8_lossy(&made.body));
    made.json()["token"].as_str().unwrap().to_owned()
}

async fn status(registry: &Registry, token: &str, method: &str, path: &str) -> u16 {
    registry.send(registry.request(method, path).bearer_auth(token)).await.status
}

#[tokio::test]
async fn token_role_without_admin_manages_nothing() {
    let registry = start_with(|c| c.open_writes = true).await;
    for role in ["read", "push", "delete"] {
        let token = create_token(&registry, json!({"name": "ci", "role": role, "ttlSeconds": 60})).await;
        for (method, path) in [
            ("GET", "/api/tokens"),
            ("POST", "/api/tokens"),
            ("DELETE", "/api/tokens/x"),
            ("GET", "/tokens"),
            ("POST", "/api/garbage"),
            ("POST", "/api/catalog/sync"),
        ] {
            assert_eq!(status(&registry, &token, method, path).await, 403, "{role} {method} {path}");
        }
    }
}

#[tokio::test]
async fn push_token_cannot_delete() {
    let registry = start().await;
    let (named, _) = registry.image("a", "v1").await;
    let push = create_token(&registry, json!({"name": "ci", "role": "push"})).await;
    let delete = create_token(&registry, json!({"name": "ops", "role": "delete"})).await;
    assert_eq!(status(&registry, &push, "POST", "/v2/a/blobs/uploads/").await, 202);
    for (path, gone) in [
        ("/api/repositories/a/tags/v1".to_owned(), 204),
        (format!("/v2/a/manifests/{named}"), 202),
        (format!("/v2/a/blobs/{}", digest(b"layer")), 202),
    ] {
        assert_eq!(status(&registry, &push, "DELETE", &path).await, 403, "{path}");
        assert_eq!(status(&registry, &delete, "DELETE", &path).await, gone, "{path}");
    }
}

#[tokio::test]
async fn scoped_token_writes_only_in_its_repositories() {
    let registry = start().await;
    registry.image("other/app", "v1").await;
    let asked = json!({"name": "ci", "role": "delete", "repositories": ["team/*", "lib"]});
    let token = create_token(&registry, asked).await;
    for (method, path, want) in [
        ("POST", "/v2/team/app/blobs/uploads/", 202),
        ("POST", "/v2/lib/blobs/uploads/", 202),
        ("POST", "/v2/team/app/deep/blobs/uploads/", 403),
        ("POST", "/v2/other/app/blobs/uploads/", 403),
        ("DELETE", "/v2/other/app/manifests/v1", 403),
        ("DELETE", "/api/repositories/other/app/tags/v1", 403),
        ("GET", "/v2/other/app/manifests/v1", 200),
    ] {
        assert_eq!(status(&registry, &token, method, path).await, want, "{method} {path}");
    }
}

#[tokio::test]
async fn scoped_token_reads_only_its_repositories() {
    let registry = start_with(|c| c.private_reads = true).await;
    for repo in ["a/one", "team/app", "z"] {
        registry.image(repo, "v1").await;
    }
    let token =
        create_token(&registry, json!({"name": "ci", "role": "read", "repositories": ["team/*"]})).await;
    for (path, want) in [
        ("/v2/team/app/manifests/v1", 200),
        ("/v2/z/manifests/v1", 403),
        ("/v2/z/tags/list", 403),
        ("/dl/z", 403),
        ("/r/z", 403),
        ("/api/repositories/z/tags", 403),
        ("/api/garbage", 403),
        ("/api/stats", 403),
    ] {
        assert_eq!(status(&registry, &token, "GET", path).await, want, "{path}");
    }
    let get = async |path: &str| registry.send(registry.request("GET", path).bearer_auth(&token)).await;
    assert_eq!(get("/v2/_catalog").await.json()["repositories"], json!(["team/app"]));
    assert_eq!(get("/v2/_catalog?n=1").await.json()["repositories"], json!(["team/app"]));
    assert_eq!(get("/api/repositories").await.json().as_array().unwrap().len(), 1);
    let home = String::from_utf8(get("/").await.body).unwrap();
    assert!(home.contains("team/app") && !home.contains("a/one"), "{home}");
}

#[tokio::test]
async fn scoped_token_cannot_mount_unreadable_blobs() {
    let registry = start_with(|c| c.private_reads = true).await;
    let secret = registry.push("secret", b"memory of a guest").await;
    let shared = registry.push("team/base", b"base").await;
    let token =
        create_token(&registry, json!({"name": "ci", "role": "push", "repositories": ["team/*"]})).await;
    for (blob, from, want) in [
        (&secret, "&from=secret", 202),
        (&secret, "", 202),
        (&shared, "&from=team/base", 201),
        (&shared, "", 201),
    ] {
        let path = format!("/v2/team/app/blobs/uploads/?mount={blob}{from}");
        assert_eq!(status(&registry, &token, "POST", &path).await, want, "{path}");
    }
    assert_eq!(status(&registry, &token, "GET", &format!("/v2/team/app/blobs/{secret}")).await, 404);
}

#[tokio::test]
async fn token_request_with_invalid_rights_is_400() {
    let registry = start().await;
    for bad in [
        json!({"name": "x", "role": "root"}),
        json!({"name": "x", "role": "push", "readOnly": true}),
        json!({"name": "x", "role": "admin", "repositories": ["team/*"]}),
        json!({"name": "x", "repositories": []}),
        json!({"name": "x", "repositories": ["Team"]}),
        json!({"name": "x", "repositories": "team/*"}),
    ] {
        assert_eq!(registry.call("POST", "/api/tokens", &[], bad.to_string()).await.status, 400, "{bad}");
    }
}

#[tokio::test]
async fn expiring_admin_cannot_create_longer_lived_tokens() {
    let registry = start().await;
    let admin = create_token(&registry, json!({"name": "ops", "role": "admin", "ttlSeconds": 60})).await;
    let make = async |asked: Value| {
        registry
            .send(registry.request("POST", "/api/tokens").bearer_auth(&admin).body(asked.to_string()))
            .await
    };
    assert_eq!(make(json!({"name": "x", "ttlSeconds": 3600})).await.status, 403);
    let made = make(json!({"name": "x"})).await.json();
    assert!(made["expiresAt"].is_string(), "it ends with its maker: {made}");
    assert_eq!((&made["role"], &made["repositories"]), (&json!("delete"), &json!(["**"])));
}

#[tokio::test]
async fn revoked_first_token_stays_revoked_after_restart() {
    let registry = start().await;
    let list = registry.call("GET", "/api/tokens", &[], "").await.json();
    let id = list[0]["id"].as_str().unwrap();
    assert_eq!(registry.call("DELETE", &format!("/api/tokens/{id}"), &[], "").await.status, 204);
    assert_eq!(registry.call("GET", "/api/tokens", &[], "").await.status, 401);
    let registry = start_in(registry.end().await, |_| {}).await;
    assert_eq!(registry.call("GET", "/api/tokens", &[], "").await.status, 401, "after a restart, too");
    let dir = registry.end().await;
    std::fs::remove_file(dir.path().join("token")).unwrap();
    let registry = start_in(dir, |_| {}).await;
    assert_eq!(
        registry.call("GET", "/api/tokens", &[], "").await.status,
        200,
        "without the file it is a new one"
    );
}

#[tokio::test]
async fn environment_token_pushes_and_deletes_everywhere() {
    let registry = start_with(|c| c.token = Some("given".into())).await;
    registry.image("vms/web", "v1").await;
    for (method, path, want) in [
        ("POST", "/v2/any/where/blobs/uploads/", 202),
        ("DELETE", "/v2/vms/web/manifests/v1", 202),
        ("GET", "/api/tokens", 403),
    ] {
        assert_eq!(status(&registry, "given", method, path).await, want, "{method} {path}");
    }
}

/// Tokens of a release without roles: the table lacks these columns.
#[tokio::test]
async fn token_without_role_keeps_push_and_delete() {
    let registry = start().await;
    registry.image("a", "v1").await;
    let writer = create_token(&registry, json!({"name": "ci"})).await;
    let reader = create_token(&registry, json!({"name": "puller", "readOnly": true})).await;
    let dir = registry.end().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("registry.db"));
    let pool = sqlx::sqlite::SqlitePool::connect_with(options).await.unwrap();
    for statement in [
        "ALTER TABLE tokens DROP COLUMN role",
        "ALTER TABLE tokens DROP COLUMN repositories",
        "DELETE FROM facts WHERE name LIKE 'token-entered-%'",
    ] {
        sqlx::query(statement).execute(&pool).await.unwrap();
    }
    pool.close().await;
    let registry = start_in(dir, |_| {}).await;
    assert_eq!(status(&registry, &writer, "POST", "/v2/a/blobs/uploads/").await, 202);
    assert_eq!(status(&registry, &writer, "DELETE", "/v2/a/manifests/v1").await, 202);
    assert_eq!(status(&registry, &writer, "GET", "/api/tokens").await, 403);
    assert_eq!(status(&registry, &reader, "POST", "/v2/a/blobs/uploads/").await, 403);
    let list = registry.call("GET", "/api/tokens", &[], "").await.json();
    let roles: Vec<_> = list.as_array().unwrap().iter().map(|t| (&t["name"], &t["role"])).collect();
    for (name, role) in [("first", "admin"), ("ci", "delete"), ("puller", "read")] {
        assert!(roles.contains(&(&json!(name), &json!(role))), "{name}: {roles:?}");
    }
}
