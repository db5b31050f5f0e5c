//! The registry is killed with SIGKILL in the middle of pushes, again and again: whatever it acknowledged is there and
//! right afterwards, an interrupted upload goes on where it was, and no garbage outlives the sweep.
//!
//! `CORACLE_KILLS` is the number of kills, `CORACLE_SEED` the seed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

#[path = "support/registry.rs"]
mod registry;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_testkit::oci::digest;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use registry::RegistryDaemon;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const GRACE: [&str; 6] = ["--gc-grace", "2s", "--gc-every", "200ms", "--upload-age", "2s"];
/// Requests that are answered before a kill, at most. An image takes some seven.
const ANSWERS_MAX: u64 = 120;

/// What was acknowledged: manifests by repository and digest, each with the blobs that it names.
#[derive(Default)]
struct Acknowledged {
    manifests: BTreeMap<String, Vec<u8>>,
    blobs: BTreeSet<String>,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// One client: pushes images of random blobs, in random ways, until its connection breaks. Counts the answers it got.
async fn push(
    http: reqwest::Client,
    base: String,
    token: String,
    seed: u64,
    known: Arc<Mutex<Acknowledged>>,
    answers: watch::Sender<u64>,
) -> Option<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let answered = || answers.send_modify(|n| *n += 1);
    loop {
        let mut layers = Vec::new();
        for _ in 0..rng.random_range(1..4) {
            let mut bytes = vec![0; rng.random_range(1..400_000)];
            rng.fill(&mut bytes[..]);
            let named = digest(&bytes);
            let size = bytes.len();
            let begun =
                http.post(format!("{base}/v2/k/blobs/uploads/")).bearer_auth(&token).send().await.ok()?;
            answered();
            let at = format!("{base}{}", begun.headers().get("location")?.to_str().ok()?);
            let cut = rng.random_range(0..=size);
            let rest = bytes.split_off(cut);
            let took = http.patch(&at).bearer_auth(&token).body(bytes).send().await.ok()?;
            assert_eq!(took.status(), 202);
            answered();
            let done =
                http.put(format!("{at}?digest={named}")).bearer_auth(&token).body(rest).send().await.ok()?;
            assert_eq!(done.status(), 201);
            answered();
            layers.push(json!({"mediaType": "application/octet-stream", "digest": named, "size": size}));
        }
        let blobs: Vec<String> = layers.iter().map(|l| l["digest"].as_str().unwrap().to_owned()).collect();
        let body = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": layers[0], "layers": layers});
        let body = serde_json::to_vec(&body).unwrap();
        let named = digest(&body);
        let url = format!("{base}/v2/k/manifests/{named}");
        let put = http
            .put(url)
            .bearer_auth(&token)
            .header("content-type", MANIFEST)
            .body(body.clone())
            .send()
            .await
            .ok()?;
        assert_eq!(put.status(), 201);
        let mut known = known.lock().unwrap();
        known.manifests.insert(named, body);
        known.blobs.extend(blobs);
        drop(known);
        answered();
    }
}

/// Everything that was acknowledged is there, byte for byte.
async fn verify(http: &reqwest::Client, base: &str, known: &Acknowledged) {
    for (named, body) in &known.manifests {
        let got = http.get(format!("{base}/v2/k/manifests/{named}")).send().await.unwrap();
        assert_eq!(got.status(), 200, "acknowledged manifest {named}");
        assert_eq!(got.bytes().await.unwrap(), body);
    }
    for named in &known.blobs {
        let got = http.get(format!("{base}/v2/k/blobs/{named}")).send().await.unwrap();
        assert_eq!(got.status(), 200, "acknowledged blob {named}");
        assert_eq!(&digest(&got.bytes().await.unwrap()), named);
    }
}

/// Hex names of the blobs that a stored manifest names.
fn blobs_of(file: &std::path::Path) -> Vec<String> {
    let body: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let layers = body["layers"].as_array().unwrap();
    layers.iter().map(|l| l["digest"].as_str().unwrap().trim_start_matches("sha256:").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_random_it_keeps_what_it_acknowledged() {
    let (kills, seed) = (number("CORACLE_KILLS", 20), number("CORACLE_SEED", 1));
    eprintln!("{kills} kills, seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let known = Arc::new(Mutex::new(Acknowledged::default()));
    // A connection to the registry that was killed is of no use to the next.
    let http = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
    let mut daemon = RegistryDaemon::start(&state, &GRACE);
    let (base, token) = (daemon.url(""), daemon.token());
    for kill in 0..kills {
        let (answers, mut heard) = watch::channel(0);
        let mut pushers = tokio::task::JoinSet::new();
        for pusher in 0..4 {
            let seed = seed.wrapping_mul(1_000_003) + kill * 10 + pusher;
            let (http, known, answers) = (http.clone(), Arc::clone(&known), answers.clone());
            pushers.spawn(push(http, base.clone(), token.clone(), seed, known, answers));
        }
        drop(answers);
        // Not after a time: on a busy machine that would be before the first answer, again and again.
        let enough = rng.random_range(1..ANSWERS_MAX);
        heard.wait_for(|n| *n >= enough).await.expect("no client gives up before the kill");
        sleep(Duration::from_micros(rng.random_range(0..5000))).await;
        let address = daemon.kill();
        while let Some(ended) = pushers.join_next().await {
            ended.unwrap();
        }
        daemon = RegistryDaemon::start_on(address, &state, &GRACE);
        let fresh = std::mem::take(&mut *known.lock().unwrap());
        verify(&http, &base, &fresh).await;
        let mut all = known.lock().unwrap();
        all.manifests.extend(fresh.manifests);
        all.blobs.extend(fresh.blobs);
    }
    let known = std::mem::take(&mut *known.lock().unwrap());
    assert!(known.manifests.len() as u64 >= kills, "only {} images in {kills} rounds", known.manifests.len());
    sleep(Duration::from_secs(4)).await;
    verify(&http, &base, &known).await;
    let files = |folder: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(state.join("registry").join(folder)).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(files("uploads"), BTreeSet::new(), "no upload outlives the sweep");
    let stored = files("blobs/sha256");
    let named: BTreeSet<String> =
        known.blobs.iter().map(|b| b.trim_start_matches("sha256:").to_owned()).collect();
    assert!(named.is_subset(&stored));
    // A manifest whose acknowledgement was lost with the connection is there, and keeps its blobs.
    let kept: BTreeSet<String> = files("manifests/k/_digests")
        .iter()
        .flat_map(|file| blobs_of(&state.join("registry/manifests/k/_digests").join(file)))
        .collect();
    assert_eq!(stored, kept, "files that no manifest names, or names without a file");
    eprintln!(
        "{} images, {} blobs acknowledged, {} files, none lost",
        known.manifests.len(),
        named.len(),
        stored.len()
    );
    daemon.kill();
}
