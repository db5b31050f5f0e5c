//! Pulls from a real registry that a real client filled.

use std::{
    cell::Cell,
    net::TcpListener,
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use coracle_image::{ImageError, PullOptions, PullPolicy};
use coracle_oci::{
    Credentials, OciError, Progress, ProgressEvent, Reference, Registries, RegistryHosts, Secret, Step,
};

use crate::common::{Bench, Layer, Parts, Stored, has_programs, options, progress, push};
use coracle_testkit::registry::{DebianRegistry, LOGIN};

fn parts(content: &str) -> Parts {
    let low = Layer::new().file("base", vec![b'b'; 300_000]).tar();
    Parts::new(vec![
        Stored::gzip(&low),
        Stored::gzip(&Layer::new().file("f", content).tar()),
        Stored::gzip(&low),
    ])
}

fn anonymous() -> PullOptions {
    PullOptions { credentials: Credentials::Anonymous, ..PullOptions::default() }
}

fn docker_config(dir: &Path, registry: &DebianRegistry, login: &str) -> PullOptions {
    let config =
        serde_json::json!({"auths": {registry.address().to_string(): {"auth": STANDARD.encode(login)}}});
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    PullOptions { credentials: Credentials::Docker { dir: Some(dir.to_owned()) }, ..PullOptions::default() }
}

#[derive(Default)]
struct Recorder(Mutex<Vec<ProgressEvent>>);

impl Progress for Recorder {
    fn event(&self, event: ProgressEvent) {
        self.0.lock().unwrap().push(event);
    }
}

#[tokio::test]
async fn anonymous_pull_reports_progress() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let parts = parts("one");
    let reference = push(&registry, &parts, "a/b:1", None);
    let bench = Bench::new();
    let seen = Arc::new(Recorder::default());
    let image = bench.store.pull(&reference, &anonymous(), seen.clone()).await.unwrap();
    assert_eq!(image.digest, coracle_oci::Digest::of(&parts.manifest));
    assert_eq!(image.references, std::slice::from_ref(&reference));
    for layer in &image.layers {
        let events = seen.0.lock().unwrap().clone();
        let last = events
            .iter()
            .rev()
            .find(|e| e.step == Step::Download && e.item == Some(layer.digest))
            .unwrap()
            .clone();
        assert_eq!((last.done_bytes, last.total_bytes), (layer.size_bytes, layer.size_bytes));
    }
    bench.store.rootfs_with(&image, seen.clone()).await.unwrap();
    assert!(seen.0.lock().unwrap().iter().any(|e| e.step == Step::Unpack));

    let missing: Reference = format!("{}/a/b:2", registry.address()).parse().unwrap();
    let error = bench.store.pull(&missing, &anonymous(), progress()).await.unwrap_err();
    assert!(matches!(error, ImageError::Oci(OciError::NotFound { .. })), "{error}");
    assert_eq!(error.code(), "COR-IMG-004");

    let pinned = reference.with_digest(image.digest);
    assert_eq!(bench.store.pull(&pinned, &anonymous(), progress()).await.unwrap().digest, image.digest);

    let arm = Parts::for_architecture(vec![], "arm64");
    let arm = push(&registry, &arm, "a/arm:1", None);
    let before = bench.listing();
    let error = bench.store.pull(&arm, &anonymous(), progress()).await.unwrap_err();
    assert!(matches!(error, ImageError::Oci(OciError::WrongArchitecture { .. })), "{error}");
    assert_eq!(bench.listing(), before);
}

#[tokio::test]
async fn pull_policy_follows_a_moved_tag() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let bench = Bench::with(coracle_image::StoreOptions { retries: 1, ..options() });
    let fixed = push(&registry, &parts("one"), "a:1", None);
    let latest = push(&registry, &parts("one"), "a:latest", None);
    let pull = async |reference: &Reference, policy| {
        let options = PullOptions { policy, ..anonymous() };
        bench.store.pull(reference, &options, progress()).await.map(|image| image.digest)
    };
    let first = pull(&fixed, PullPolicy::IfNotPresent).await.unwrap();
    assert_eq!(pull(&latest, PullPolicy::IfNotPresent).await.unwrap(), first);
    push(&registry, &parts("two"), "a:1", None);
    push(&registry, &parts("two"), "a:latest", None);
    assert_eq!(pull(&fixed, PullPolicy::IfNotPresent).await.unwrap(), first, "a fixed tag is trusted");
    let second = pull(&latest, PullPolicy::IfNotPresent).await.unwrap();
    assert_ne!(second, first, "latest has moved");
    assert_eq!(pull(&fixed, PullPolicy::Always).await.unwrap(), second);
    drop(registry);
    assert_eq!(pull(&latest, PullPolicy::IfNotPresent).await.unwrap(), second, "offline");
    let error = pull(&latest, PullPolicy::Always).await.unwrap_err();
    assert!(matches!(error, ImageError::Oci(OciError::Network { .. })) && error.is_transient(), "{error}");
}

#[tokio::test]
async fn private_image_pull_requires_the_right_password() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start_with_password().unwrap();
    let reference = push(&registry, &parts("x"), "private:1", Some(LOGIN));
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new();
    let before = bench.listing();
    for (why, options) in [
        ("anonymous", anonymous()),
        ("wrong password", docker_config(dir.path(), &registry, "user:wrong")),
        (
            "wrong, given",
            PullOptions {
                credentials: Credentials::Basic { user: "user".into(), password: Secret::new("no") },
                ..anonymous()
            },
        ),
    ] {
        let error = bench.store.pull(&reference, &options, progress()).await.expect_err(why);
        assert!(matches!(error, ImageError::Oci(OciError::Unauthorized { .. })), "{why}: {error}");
        assert!(error.help().unwrap().contains(&format!("docker login {}", registry.address())));
        assert_eq!(bench.listing(), before, "{why}");
    }
    let image = bench
        .store
        .pull(&reference, &docker_config(dir.path(), &registry, "user:secret"), progress())
        .await
        .unwrap();
    bench.store.rootfs(&image).await.unwrap();
}

const CHILD: &str = "CORACLE_IMAGE_HELPER_NAME";

/// Child process: pulls with the configuration in its environment.
#[tokio::test]
async fn child_pulls_with_its_environment() {
    let Ok(name) = std::env::var(CHILD) else { return };
    let pulled = Bench::new().store.pull(&name.parse().unwrap(), &PullOptions::default(), progress()).await;
    println!("code {}", pulled.map_or_else(|e| e.code().to_owned(), |_| "ok".to_owned()));
}

#[tokio::test]
async fn pull_uses_credential_helpers() {
    use std::os::unix::fs::PermissionsExt;
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start_with_password().unwrap();
    let reference = push(&registry, &parts("x"), "private:1", Some(LOGIN));
    let dir = tempfile::tempdir().unwrap();
    let good =
        r#"read server; echo "{\"ServerURL\":\"$server\",\"Username\":\"user\",\"Secret\":\"secret\"}""#;
    for (helper, script) in [
        ("good", good),
        ("none", "echo credentials not found in native keychain; exit 1"),
        ("broken", "exit 3"),
    ] {
        let path = dir.path().join(format!("docker-credential-{helper}"));
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let by_host = |helper: &str| format!(r#"{{"credHelpers":{{"{}":"{helper}"}}}}"#, registry.address());
    for (config, want) in [
        (by_host("good"), "code ok"),
        (r#"{"credsStore":"good"}"#.to_owned(), "code ok"),
        (by_host("none"), "code COR-IMG-005"),
        (by_host("broken"), "code COR-IMG-016"),
        (by_host("missing"), "code COR-IMG-016"),
        (by_host("../evil"), "code COR-IMG-016"),
        ("{".to_owned(), "code COR-IMG-016"),
    ] {
        std::fs::write(dir.path().join("config.json"), &config).unwrap();
        let path = std::env::join_paths([dir.path(), Path::new("/bin"), Path::new("/usr/bin")]).unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "registry::child_pulls_with_its_environment", "--nocapture"])
            .env(CHILD, reference.to_string())
            .env("DOCKER_CONFIG", dir.path())
            .env("PATH", path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains(want), "{config}: {said}");
    }
}

#[tokio::test]
async fn pull_falls_back_from_a_dead_mirror_to_the_next() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    push(&registry, &parts("x"), "library/thing:1", None);
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let text = format!("[host.'http://{dead}']\n[host.'http://{}']", registry.address());
    let hosts = RegistryHosts::parse(&text).unwrap().hosts();
    let registries = Registries::default().with("docker.io", hosts);
    let bench = Bench::with(coracle_image::StoreOptions { registries, retries: 0, ..options() });
    let image = bench.store.pull(&"thing:1".parse().unwrap(), &anonymous(), progress()).await.unwrap();
    assert_eq!(image.references[0].to_string(), "docker.io/library/thing:1");
}

#[tokio::test]
async fn concurrent_pulls_share_downloads() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let reference = push(&registry, &parts("x"), "a:1", None);
    let bench = Bench::new();
    let seen = Arc::new(Recorder::default());
    let options = anonymous();
    let pull = || bench.store.pull(&reference, &options, seen.clone());
    let (a, b, c) = tokio::join!(pull(), pull(), pull());
    let image = a.unwrap();
    assert_eq!((&image, &image), (&b.unwrap(), &c.unwrap()));
    let whole = |e: &&ProgressEvent| e.step == Step::Download && e.done_bytes == e.total_bytes;
    let ends = seen.0.lock().unwrap().iter().filter(whole).count();
    assert_eq!(ends, 2, "each of the two different layers was fetched once");
    assert_eq!(std::fs::read_dir(bench.path().join("partial")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prune_keeps_blobs_of_a_running_pull() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let reference = push(&registry, &parts("x"), "a:1", None);
    let bench = Bench::new();
    let options = anonymous();
    for round in 0..20 {
        let pulled = Cell::new(false);
        let pull = async {
            let image = bench.store.pull(&reference, &options, progress()).await;
            let built = match &image {
                Ok(image) => bench.store.rootfs(image).await.map(drop),
                Err(_) => Ok(()),
            };
            pulled.set(true);
            built.and(image)
        };
        let prune = async {
            while !pulled.get() {
                bench.store.prune(&Default::default(), false).await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        let (image, ()) = tokio::join!(pull, prune);
        let image = image.unwrap_or_else(|e| unreachable!("round {round}: {e}"));
        assert_eq!(bench.store.get(&reference).await.unwrap(), Some(image), "round {round}");
        bench.store.remove(&reference).await.unwrap();
    }
    bench.store.prune(&Default::default(), false).await.unwrap();
    assert_eq!(
        bench.listing().len(),
        3,
        "the lock, the layout's marker and the index: {:?}",
        bench.listing()
    );
}
