//! Crashes: after a kill at any moment, the next open and all operations after it succeed.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
    time::Duration,
};

use coracle_image::{PullOptions, PullPolicy, Store, StoreOptions};
use coracle_oci::{Credentials, Reference};
use coracle_testkit::registry::DebianRegistry;

use crate::common::{Layer, Parts, Stored, has_programs, noise, options, progress, push};

const DIR: &str = "CORACLE_IMAGE_CRASH_DIR";
const NAME: &str = "CORACLE_IMAGE_CRASH_NAME";
const KILLS: u64 = 12;

fn store_options() -> StoreOptions {
    StoreOptions { retries: 0, ..options() }
}

fn pull_options() -> PullOptions {
    PullOptions { policy: PullPolicy::Always, credentials: Credentials::Anonymous, ..PullOptions::default() }
}

/// Child process: pulls, builds, untags and prunes in a loop until it is killed. Does nothing without the variables that the
/// parent sets.
#[tokio::test]
async fn child_pulls_until_killed() {
    let (Some(dir), Some(name)) = (std::env::var_os(DIR), std::env::var(NAME).ok()) else { return };
    let store = Store::open(dir, store_options()).unwrap();
    let reference: Reference = name.parse().unwrap();
    println!("ready");
    loop {
        let image = store.pull(&reference, &pull_options(), progress()).await.unwrap();
        store.rootfs(&image).await.unwrap();
        store.remove(&reference).await.unwrap();
        store.prune(&Default::default(), false).await.unwrap();
    }
}

#[tokio::test]
async fn store_survives_kill_at_random_points() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = DebianRegistry::start().unwrap();
    let layer = |seed| Stored::gzip(&Layer::new().file(&format!("f{seed}"), noise(1_500_000, seed)).tar());
    let reference =
        push(&registry, &Parts::new([2_654_435_761, 40_503, 97].map(layer).into()), "crash:1", None);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("images");
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::child_pulls_until_killed", "--nocapture"])
            .env(DIR, &path)
            .env(NAME, reference.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|l| l.unwrap().contains("ready")), "the child did not begin");
        // Delays spread over one round of the loop. Not random, so that a failure can be reproduced.
        coracle_testkit::elapse(Duration::from_millis(kill * 37 % 331)).await;
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "kill {kill}: the child ended by itself");

        let store = Store::open(&path, store_options()).unwrap();
        for image in store.list().await.unwrap() {
            if !image.references.is_empty() {
                store.rootfs(&image).await.unwrap();
            }
        }
        store.get(&reference).await.unwrap();
        if kill % 3 == 2 {
            let image = store.pull(&reference, &pull_options(), progress()).await.unwrap();
            let rootfs = store.rootfs(&image).await.unwrap();
            if has_programs(&["fsck.erofs"]) {
                crate::common::run("fsck.erofs", &[rootfs.path.to_str().unwrap()]);
            }
            assert_eq!(std::fs::read_dir(path.join("tmp")).unwrap().count(), 0, "kill {kill}");
        }
    }
}
