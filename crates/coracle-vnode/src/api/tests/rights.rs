//! Authorisation, decided by a real API server.

use coracle_testkit::cluster;
use coracle_testkit::eventually_within;
use http::Request;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;

use super::clients::{request, send, send_http2};
use super::world::{Authority, DEADLINE, MASTERS, World};

/// Grants `user` the `verb` on a subresource of nodes, and waits until the API server applies the grant.
pub(super) async fn allow(client: &Client, user: &str, verb: &str, subresource: &str) -> anyhow::Result<()> {
    let name = format!("{}-{verb}-{subresource}", user.replace(':', "-"));
    let role: ClusterRole = serde_json::from_value(json!({
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": [format!("nodes/{subresource}")], "verbs": [verb]}],
    }))?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }))?;
    let how = PostParams::default();
    Api::all(client.clone()).create(&how, &role).await?;
    Api::all(client.clone()).create(&how, &binding).await?;
    let review: SubjectAccessReview =
        serde_json::from_value(json!({"spec": {"user": user, "resourceAttributes": {
            "verb": verb, "version": "v1", "resource": "nodes", "subresource": subresource, "name": "any",
        }}}))?;
    eventually_within(DEADLINE, "the right is known", async || {
        let answer = Api::all(client.clone()).create(&how, &review).await.ok()?;
        answer.status.is_some_and(|status| status.allowed).then_some(())
    })
    .await
}

/// Creates a service account and a token of it.
async fn account(client: &Client, namespace: &str, name: &str) -> anyhow::Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let account = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    accounts.create(&PostParams::default(), &account).await?;
    let asked: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
    let token = accounts.create_token_request(name, &PostParams::default(), &asked).await?;
    Ok(token.status.and_then(|status| status.token).unwrap_or_default())
}

#[test]
fn rights_are_those_that_the_api_server_gives() {
    cluster::run(async |cluster| {
        let client = cluster.client();
        let namespace = cluster.namespace().await?;
        let world = World::new(client.clone(), "rights-node", false).await;
        world.run(&namespace, "web", &["serve"], true).await;
        for (user, verb, subresource) in [
            ("stats-reader", "get", "stats"),
            ("metrics-reader", "get", "metrics"),
            ("pods-reader", "get", "pods"),
            ("health-reader", "get", "healthz"),
            ("proxy-reader", "get", "proxy"),
            ("proxy-creator", "create", "proxy"),
        ] {
            allow(&client, user, verb, subresource).await?;
        }
        let plain = account(&client, &namespace, "plain").await?;
        let reader = account(&client, &namespace, "reader").await?;
        allow(&client, &format!("system:serviceaccount:{namespace}:reader"), "get", "metrics").await?;
        let logs = format!("/containerLogs/{namespace}/web/main");
        let exec = format!("/exec/{namespace}/web/main?output=1&command=ls");
        let foreign = Authority::new("another");
        for (who, method, path, want) in [
            ("", "GET", "/healthz", 401),
            ("", "GET", "/no/such/path", 401),
            ("foreign", "GET", "/healthz", 401),
            ("token:invalid", "GET", "/healthz", 401),
            (&format!("token:{plain}"), "GET", "/healthz", 403),
            (&format!("token:{plain}"), "GET", "/no/such/path", 403),
            (&format!("token:{reader}"), "GET", "/metrics/resource", 200),
            (&format!("token:{reader}"), "GET", "/pods", 403),
            ("stats-reader", "GET", "/stats/summary", 200),
            ("stats-reader", "POST", "/stats/summary", 403),
            ("stats-reader", "GET", "/metrics", 403),
            ("metrics-reader", "GET", "/metrics", 200),
            ("metrics-reader", "GET", "/metrics/cadvisor", 200),
            ("metrics-reader", "GET", "/metrics/probes", 200),
            ("metrics-reader", "GET", "/stats/summary", 403),
            ("pods-reader", "GET", "/pods", 200),
            ("pods-reader", "GET", "/runningpods/", 200),
            ("pods-reader", "GET", &logs, 403),
            ("health-reader", "GET", "/healthz/ping", 200),
            ("proxy-reader", "GET", "/healthz", 200),
            ("proxy-reader", "GET", "/pods", 200),
            ("proxy-reader", "GET", "/stats/summary", 403),
            ("proxy-reader", "GET", &logs, 200),
            ("proxy-reader", "POST", &exec, 403),
            ("proxy-reader", "UPGRADE", &exec, 403),
            ("proxy-creator", "GET", &logs, 403),
            ("proxy-creator", "UPGRADE", &exec, 101),
        ] {
            let (leaf, token) = match who.split_once(':') {
                Some((_, token)) => (None, Some(token)),
                None if who.is_empty() => (None, None),
                None if who == "foreign" => (Some(foreign.leaf("admin", MASTERS)), None),
                None => (Some(world.ca.leaf(who, "team")), None),
            };
            let mut wanted = request(if method == "UPGRADE" { "GET" } else { method }, path);
            let headers = wanted.headers_mut();
            token.into_iter().for_each(|token| {
                headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
            });
            if method == "UPGRADE" {
                for (name, value) in [
                    ("connection", "Upgrade"),
                    ("upgrade", "websocket"),
                    ("sec-websocket-version", "13"),
                    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                    ("sec-websocket-protocol", "v4.channel.k8s.io"),
                ] {
                    headers.insert(name, value.parse().unwrap());
                }
            }
            let (got, body) = if want == 101 {
                let mut tasks = tokio::task::JoinSet::new();
                (
                    super::clients::begin(&world, leaf, wanted, &mut tasks).await.status().as_u16(),
                    String::new(),
                )
            } else {
                send(&world, leaf, wanted).await
            };
            assert_eq!(got, want, "{} {method} {path}: {body}", who.split(':').next().unwrap());
        }
        world.end().await;
        anyhow::Ok(())
    });
}

#[test]
fn anonymous_requests_have_the_rights_of_their_user() {
    cluster::run(async |cluster| {
        let client = cluster.client();
        allow(&client, "system:anonymous", "get", "healthz").await?;
        let world = World::new(client, "anonymous-node", true).await;
        assert_eq!(send(&world, None, request("GET", "/healthz")).await, (200, "ok".into()));
        let (status, body) = send(&world, None, request("GET", "/logs/")).await;
        let want = "Forbidden (user=system:anonymous, verb=get, resource=nodes, subresource(s)=[log])\n";
        assert_eq!((status, body.as_str()), (403, want));
        world.end().await;
        anyhow::Ok(())
    });
}

#[test]
fn server_takes_large_headers_http2_and_renewed_certificates() {
    cluster::run(async |cluster| {
        let world = World::new(cluster.client(), "transport-node", false).await;
        let admin = || Some(world.ca.leaf("admin", MASTERS));
        let large = |bytes: usize| {
            let builder = Request::builder()
                .uri("/healthz")
                .header("host", "node")
                .header("x-large", "x".repeat(bytes));
            builder.body(axum::body::Body::empty()).unwrap()
        };
        assert_eq!(send(&world, admin(), large(900 << 10)).await.0, 200);
        assert_eq!(send(&world, admin(), large(2 << 20)).await.0, 431);
        let http2 = |path: &str| {
            Request::builder().uri(format!("https://node{path}")).body(axum::body::Body::empty()).unwrap()
        };
        assert_eq!(send_http2(&world, admin(), http2("/healthz")).await, (200, "ok".into()));
        world.run("shop", "web", &["serve"], false).await;
        let exec = "/exec/shop/web/main?output=1&command=ls";
        assert_eq!(send_http2(&world, admin(), http2(exec)).await.0, 400, "there are no upgrades of HTTP/2");
        let shown = async || {
            let stream = world.connect(None, b"http/1.1").await;
            stream.get_ref().1.peer_certificates().unwrap()[0].clone()
        };
        let before = shown().await;
        assert_eq!(before, shown().await);
        world.renew("transport-node");
        assert_ne!(before, shown().await);
        world.end().await;
        anyhow::Ok(())
    });
}
