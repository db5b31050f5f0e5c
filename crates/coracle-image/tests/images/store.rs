//! Names, prune, and exclusive ownership of the store.

use std::collections::HashSet;

use coracle_image::{ExposedPort, ImageError, Protocol, PullOptions, PullPolicy, Store};
use coracle_oci::Reference;
use coracle_testkit::{LIMIT, eventually_blocking};

use crate::common::{Bench, Layer, Parts, Stored, options, progress};

fn parts(content: &str) -> Parts {
    Parts::new(vec![Stored::gzip(&Layer::new().file("f", content).tar())])
}

fn name(text: &str) -> Reference {
    text.parse().unwrap()
}

#[tokio::test]
async fn image_has_its_configuration() {
    let bench = Bench::new();
    let parts = parts("x");
    let image = bench.import(&parts).await.unwrap();
    assert_eq!((image.architecture.as_str(), image.os.as_str()), ("amd64", "linux"));
    assert_eq!(image.references, [name("localhost/test/image:1")]);
    assert_eq!(image.config.entrypoint, ["/entry"]);
    assert_eq!(image.config.cmd, ["/bin/sh"]);
    assert_eq!(image.config.env, ["A=b"]);
    assert_eq!((image.config.user.as_str(), image.config.workdir.as_str()), ("1:2", "/w"));
    assert_eq!(image.config.exposed_ports, [ExposedPort { port: 80, protocol: Protocol::Tcp }]);
    assert_eq!(image.config.labels["k"], "v");
    assert_eq!(image.config.stop_signal.as_deref(), Some("SIGINT"));
    assert_eq!(image.created, Some("2024-05-06T07:08:09Z".parse().unwrap()));
    assert_eq!(image.size_bytes, parts.blobs().values().map(|b| b.len() as u64).sum::<u64>());
    assert_eq!(bench.store.list().await.unwrap(), std::slice::from_ref(&image));
    assert_eq!(bench.store.get(&image.references[0]).await.unwrap(), Some(image.clone()));
    assert_eq!(bench.store.get_by_digest(&image.digest).await.unwrap(), Some(image.clone()));
    assert_eq!(
        bench.store.get(&name("localhost/test/image").with_digest(image.digest)).await.unwrap(),
        Some(image)
    );
    assert_eq!(bench.store.get(&name("localhost/test/image:2")).await.unwrap(), None);
}

#[tokio::test]
async fn store_has_one_owner() {
    let bench = Bench::new();
    let image = bench.import(&parts("x")).await.unwrap();
    let second = Store::open(bench.path(), options());
    assert!(matches!(second, Err(ImageError::StoreBusy { .. })), "{second:?}");
    let path = bench.path();
    let Bench { dir, store } = bench;
    drop(store);
    let again = Store::open(path, options()).unwrap();
    assert_eq!(again.list().await.unwrap(), [image]);
    drop(dir);
}

#[tokio::test]
async fn store_open_waits_for_a_killed_owner() {
    let bench = Bench::new();
    let path = bench.path();
    let Bench { dir: _dir, store } = bench;
    drop(store);
    let lock = path.join(".lock").canonicalize().unwrap();
    let held = std::fs::File::options().write(true).open(&lock).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let dying = std::thread::spawn(move || {
        let opened = || {
            let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let locks =
                files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == lock)).count();
            (locks == 2).then_some(())
        };
        eventually_blocking(LIMIT, "the store opens its lock", opened).unwrap();
        drop(held);
    });
    Store::open(path, options()).unwrap();
    dying.join().unwrap();
}

#[tokio::test]
async fn policy_never_uses_stored_images_only() {
    let bench = Bench::new();
    let options = PullOptions { policy: PullPolicy::Never, ..PullOptions::default() };
    let absent = bench.store.pull(&name("localhost/test/image:1"), &options, progress()).await;
    assert!(matches!(absent, Err(ImageError::NotPresent { .. })));
    let image = bench.import(&parts("x")).await.unwrap();
    assert_eq!(bench.store.pull(&image.references[0], &options, progress()).await.unwrap(), image);
}

#[tokio::test]
async fn prune_keeps_images_in_use() {
    let bench = Bench::new();
    let shared = Stored::gzip(&Layer::new().file("shared", "s").tar());
    let own = |content: &str| Stored::gzip(&Layer::new().file("own", content).tar());
    let a = bench.import(&Parts::new(vec![shared.clone(), own("a")])).await.unwrap();
    let b = bench.import(&Parts::new(vec![shared, own("b")])).await.unwrap();
    assert_eq!(bench.store.list().await.unwrap().len(), 2, "the first lost its name, not its content");
    bench.store.tag(&a.digest, &name("kept:1")).await.unwrap();
    for image in [&a, &b] {
        bench.store.rootfs(image).await.unwrap();
    }
    let all = bench.listing();
    let nothing = bench.store.prune(&HashSet::new(), false).await.unwrap();
    assert!(nothing.removed.is_empty(), "{nothing:?}");
    assert!(bench.store.remove(&b.references[0]).await.unwrap());
    assert!(!bench.store.remove(&b.references[0]).await.unwrap());
    let used = bench.store.prune(&HashSet::from([b.digest]), false).await.unwrap();
    assert!(used.removed.is_empty(), "a VM uses it: {used:?}");
    let would = bench.store.prune(&HashSet::new(), true).await.unwrap();
    assert_eq!(would.removed.len(), 4, "manifest, configuration, layer, root file system: {would:?}");
    assert_eq!(bench.listing().len(), all.len(), "a dry run removes nothing");
    assert_eq!(bench.store.prune(&HashSet::new(), false).await.unwrap(), would);
    assert_eq!(bench.store.list().await.unwrap().len(), 1);
    assert!(bench.store.rootfs(&b).await.is_err());
    bench.store.rootfs(&a).await.unwrap();
}

#[tokio::test]
async fn store_open_removes_or_reports_leftovers() {
    let bench = Bench::new();
    let image = bench.import(&parts("x")).await.unwrap();
    let path = bench.path();
    std::fs::write(path.join("tmp/.tmpABC"), "left by a crash").unwrap();
    std::fs::write(path.join("partial/junk"), "no digest").unwrap();
    let (young, old) = (path.join("partial").join("a".repeat(64)), path.join("partial").join("b".repeat(64)));
    std::fs::write(&young, "young").unwrap();
    let week = std::time::Duration::from_secs(8 * 24 * 3600);
    let file = std::fs::File::create(&old).unwrap();
    file.set_modified(file.metadata().unwrap().modified().unwrap() - week).unwrap();
    let Bench { dir, store } = bench;
    drop(store);
    let store = Store::open(&path, options()).unwrap();
    assert_eq!(std::fs::read_dir(path.join("tmp")).unwrap().count(), 0);
    assert!(young.exists() && !old.exists() && !path.join("partial/junk").exists());
    std::fs::remove_file(path.join("blobs/sha256").join(image.digest.hex())).unwrap();
    assert_eq!(store.list().await.unwrap(), [], "a damaged image is left out");
    drop(store);
    std::fs::write(path.join("index.json"), "{").unwrap();
    let broken = Store::open(&path, options()).unwrap_err();
    assert_eq!(broken.code(), "COR-IMG-015");
    drop(dir);
}
