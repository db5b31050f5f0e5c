//! Authorisation of API requests to a whole virtual node.

use coracle_testkit::{cluster, eventually};
use coracle_vnode::CertificateSource;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::world::World;

#[test]
fn requests_need_a_user_and_a_right() {
    cluster::run(async |cluster| {
        let mut world = World::new(cluster).await?;
        world.options.certificate = CertificateSource::SelfSigned;
        let daemon = world.start().await?;
        let (namespace, name) = (&world.namespace, &world.options.name);
        let nodes: Api<Node> = Api::all(cluster.client());
        let port = eventually("the node has a port", async || {
            let status = nodes.get_opt(name).await.ok()??.status?;
            Some(status.daemon_endpoints?.kubelet_endpoint?.port).filter(|port| *port > 0)
        })
        .await?;
        let how = PostParams::default();
        let mut tokens = Vec::new();
        let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), namespace);
        for name in ["reader", "plain"] {
            accounts.create(&how, &serde_json::from_value(json!({"metadata": {"name": name}}))?).await?;
            let asked: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
            let token = accounts.create_token_request(name, &how, &asked).await?;
            tokens.push(token.status.and_then(|status| status.token).unwrap_or_default());
        }
        let role: ClusterRole = serde_json::from_value(json!({
            "metadata": {"name": "pods-of-api-node"},
            "rules": [{"apiGroups": [""], "resources": ["nodes/pods"], "resourceNames": [name], "verbs": ["get"]}],
        }))?;
        let binding: ClusterRoleBinding = serde_json::from_value(json!({
            "metadata": {"name": "pods-of-api-node"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "pods-of-api-node"},
            "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
        }))?;
        Api::all(cluster.client()).create(&how, &role).await?;
        Api::all(cluster.client()).create(&how, &binding).await?;
        // A request before the binding is effective would make the node cache a denial for 30 s.
        let user = format!("system:serviceaccount:{namespace}:reader");
        let review: SubjectAccessReview =
            serde_json::from_value(json!({"spec": {"user": user, "resourceAttributes": {
                "verb": "get", "version": "v1", "resource": "nodes", "subresource": "pods", "name": name,
            }}}))?;
        eventually("the right is known", async || {
            let answer = Api::all(cluster.client()).create(&how, &review).await.ok()?;
            answer.status.is_some_and(|status| status.allowed).then_some(())
        })
        .await?;
        let client = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).build()?;
        let get = async |path: &str, token: &str| {
            let mut request = client.get(format!("https://127.0.0.1:{port}{path}"));
            if !token.is_empty() {
                request = request.bearer_auth(token);
            }
            request.send().await.map(|response| response.status().as_u16())
        };
        for (why, path, token, want) in [
            ("no credentials", "/pods", "", 401),
            ("an invalid token", "/pods", "invalid", 401),
            ("a user without a right", "/pods", &tokens[1], 403),
            ("a user with another right", "/stats/summary", &tokens[0], 403),
            ("a user with the right", "/runningpods/", &tokens[0], 200),
        ] {
            assert_eq!(get(path, token).await?, want, "{why}");
        }
        daemon.stop().await
    });
}
