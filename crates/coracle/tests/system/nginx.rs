//! A real image end to end: a Debian root file system with nginx is pushed by skopeo to Debian's docker-registry, pulled by the
//! node, and run as a MikromVM, which serves its page.

use std::time::Duration;

use crate::support::{coracle_ok, fetch, kubectl, node_tools, registry_config, until};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::{netns, tools};

#[test]
fn nginx_from_a_registry_serves_its_page() {
    netns::run_within(Duration::from_secs(240), || async {
        let programs = ["etcd", "kube-apiserver", "kubectl", "docker-registry", "skopeo"];
        if node_tools().is_none() || tools::require(programs).is_none() {
            return;
        }
        let layout = tools::tools_dir().join("web/current");
        if !layout.join("index.json").is_file() {
            return tools::skip("no web image; `cargo xtask setup` makes it");
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let registry = DebianRegistry::start().unwrap();
        let image = registry.push(&layout, "1", "web/nginx:1", None).unwrap();
        let config = registry_config(dir.path(), &[&registry.address().to_string()]);
        coracle_ok(&state, &["up", "--detach", "--no-demo", "--registry-config", &config]).await;

        let object = dir.path().join("web.yaml");
        let text = format!(
            "apiVersion: vm.mikrom.es/v1alpha1\nkind: MikromVM\nmetadata: {{name: web}}\n\
             spec: {{image: {image}, vcpuCount: 1, memoryMB: 256}}\n"
        );
        std::fs::write(&object, text).unwrap();
        kubectl(&state, &["apply", "-f", object.to_str().unwrap()]).await.unwrap();
        let address = until("an address", Duration::from_secs(120), || async {
            let ip = kubectl(&state, &["get", "mvm", "web", "-o", "jsonpath={.status.ipAddress}"]).await?;
            if ip.is_empty() {
                Err(kubectl(&state, &["get", "mvm", "web", "-o", "yaml"]).await?)
            } else {
                Ok(ip)
            }
        })
        .await;
        let page = until("the page", Duration::from_secs(60), || fetch(format!("{address}:80"))).await;
        assert!(page.contains("served by nginx in a microVM") && page.contains("Server: nginx"), "{page}");
        let workers = coracle_ok(&state, &["exec", "default-web", "sh", "-c", "cat /proc/[0-9]*/comm"]).await;
        assert!(workers.matches("nginx").count() >= 2, "a master and its workers: {workers}");
        coracle_ok(&state, &["down"]).await;
    });
}
