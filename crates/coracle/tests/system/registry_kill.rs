//! The registry is killed with SIGKILL repeatedly in the middle of pushes, moves of tags, deletions and syncs. Afterwards
//! everything that it acknowledged holds: pushed content is present byte for byte, deleted content is absent for HEAD and GET,
//! a tag names the manifest of its last acknowledged move, and no garbage survives the sweep.
//!
//! `CORACLE_KILLS` is the number of kills, `CORACLE_KILL_SECONDS` the time after which no further kill begins, `CORACLE_SEED`
//! the seed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::registry::RegistryDaemon;
use crate::support::until;
use coracle_testkit::elapse;
use coracle_testkit::oci::digest;
use coracle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const GRACE: [&str; 6] = ["--gc-grace", "2s", "--gc-every", "200ms", "--upload-age", "2s"];
/// Grace period of blobs, the first flag above.
const BLOB_GRACE: Duration = Duration::from_secs(2);
/// Maximum number of requests that are answered before a kill. An image takes about seven.
const ANSWERS_MAX: u64 = 80;
/// Number of clients, each with a repository of its own.
const CLIENTS: u64 = 4;
/// Minimum number of rounds, even after the time is over.
const KILLS_MIN: u64 = 3;
/// Longest wait for the registry to repair interrupted changes, and for its sweep.
const PATIENCE: Duration = Duration::from_secs(60);

/// Manifest that a client pushed.
struct Pushed {
    body: Vec<u8>,
    blobs: Vec<String>,
    fate: Fate,
    /// Whether the manifest was not verified since it changed.
    fresh: bool,
}

/// Acknowledged state of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Present,
    Deleted,
    /// The answer to the push was lost in the kill. A restart may enter the manifest late, or never.
    PushLost,
    /// The answer to the deletion was lost.
    DeletionLost,
}

/// Client, and what the registry acknowledged to it.
struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
    repo: String,
    rng: StdRng,
    /// Largest blob in bytes.
    blob_max: usize,
    manifests: BTreeMap<String, Pushed>,
    /// Digests that each tag may name now: exactly one if the last move was acknowledged.
    tags: BTreeMap<String, Vec<Option<String>>>,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

impl Client {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url =
            if path.starts_with("/v2/") { path.to_owned() } else { format!("/v2/{}/{path}", self.repo) };
        self.http.request(method, format!("{}{url}", self.base)).bearer_auth(&self.token)
    }

    /// Performs random operations until the connection breaks, and counts the answers.
    async fn work(mut self, answers: watch::Sender<u64>) -> Self {
        while self.step(&answers).await.is_some() {}
        self
    }

    async fn step(&mut self, answers: &watch::Sender<u64>) -> Option<()> {
        let present = self.manifests.iter().filter(|(_, m)| m.fate == Fate::Present);
        let present: Vec<String> = present.map(|(named, _)| named.clone()).collect();
        let chosen = present.choose(&mut self.rng).cloned();
        match (self.rng.random_range(0..10), chosen) {
            (0..2, Some(named)) => self.delete(&named, answers).await,
            (2, _) => self.untag(answers).await,
            (3..5, Some(named)) => {
                let body = self.manifests[&named].body.clone();
                self.put(&named, body, None, answers).await
            }
            _ => {
                let began = Instant::now();
                let (body, blobs) = self.push_blobs(answers).await?;
                let named = digest(&body);
                let pushed = Pushed { body: body.clone(), blobs, fate: Fate::PushLost, fresh: true };
                self.manifests.insert(named.clone(), pushed);
                self.put(&named, body, Some(began), answers).await
            }
        }
    }

    /// Pushes random blobs, and returns a manifest that names them.
    async fn push_blobs(&mut self, answers: &watch::Sender<u64>) -> Option<(Vec<u8>, Vec<String>)> {
        let mut layers = Vec::new();
        for _ in 0..self.rng.random_range(1..4) {
            let most = if self.rng.random_ratio(1, 8) { self.blob_max } else { 400_000 };
            let mut bytes = vec![0; self.rng.random_range(1..most)];
            self.rng.fill(&mut bytes[..]);
            let (named, size) = (digest(&bytes), bytes.len());
            let begun = answered(self.request(Method::POST, "blobs/uploads/"), 202, answers).await?;
            let at = begun.headers().get("location")?.to_str().ok()?.to_owned();
            let rest = bytes.split_off(self.rng.random_range(0..=size));
            answered(self.request(Method::PATCH, &at).body(bytes), 202, answers).await?;
            let last = format!("{at}?digest={named}");
            answered(self.request(Method::PUT, &last).body(rest), 201, answers).await?;
            layers.push(json!({"mediaType": "application/octet-stream", "digest": named, "size": size}));
        }
        let blobs = layers.iter().map(|l| l["digest"].as_str().unwrap().to_owned()).collect();
        let body = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": layers[0], "layers": layers});
        Some((serde_json::to_vec(&body).unwrap(), blobs))
    }

    /// Puts a manifest by its digest, or moves a tag to it. The blobs of a new manifest are younger than `began`: on a slow
    /// machine the sweep may already have removed them.
    async fn put(
        &mut self,
        named: &str,
        body: Vec<u8>,
        began: Option<Instant>,
        answers: &watch::Sender<u64>,
    ) -> Option<()> {
        let tag = self.rng.random_ratio(2, 3).then(|| format!("t{}", self.rng.random_range(0..3)));
        if let Some(tag) = &tag {
            let may = self.tags.entry(tag.clone()).or_insert_with(|| vec![None]);
            may.push(Some(named.to_owned()));
        }
        let path = format!("manifests/{}", tag.as_deref().unwrap_or(named));
        let request = self.request(Method::PUT, &path).header("content-type", MANIFEST).body(body);
        let answer = request.send().await.ok()?;
        answers.send_modify(|n| *n += 1);
        let swept = answer.status() == 400 && began.is_some_and(|began| began.elapsed() > BLOB_GRACE);
        if swept {
            self.manifests.remove(named);
            if let Some(tag) = tag {
                self.tags.get_mut(&tag)?.pop();
            }
            return Some(());
        }
        assert_eq!(answer.status(), 201, "{named}: {:?}", answer.text().await);
        self.settle(named, Fate::Present);
        if let Some(tag) = tag {
            self.tags.insert(tag, vec![Some(named.to_owned())]);
        }
        Some(())
    }

    async fn delete(&mut self, named: &str, answers: &watch::Sender<u64>) -> Option<()> {
        self.settle(named, Fate::DeletionLost);
        let of = |may: &&mut Vec<Option<String>>| may.iter().any(|d| d.as_deref() == Some(named));
        self.tags.values_mut().filter(of).for_each(|may| may.push(None));
        answered(self.request(Method::DELETE, &format!("manifests/{named}")), 202, answers).await?;
        self.settle(named, Fate::Deleted);
        self.tags.values_mut().filter(of).for_each(|may| *may = vec![None]);
        Some(())
    }

    async fn untag(&mut self, answers: &watch::Sender<u64>) -> Option<()> {
        let named = self.tags.iter().find(|(_, may)| may[0].is_some());
        let Some(tag) = named.map(|(tag, _)| tag.clone()) else { return Some(()) };
        self.tags.get_mut(&tag)?.push(None);
        answered(self.request(Method::DELETE, &format!("manifests/{tag}")), 202, answers).await?;
        self.tags.insert(tag, vec![None]);
        Some(())
    }

    fn settle(&mut self, named: &str, fate: Fate) {
        let pushed = self.manifests.get_mut(named).unwrap();
        (pushed.fate, pushed.fresh) = (fate, true);
    }

    /// Checks that everything that was acknowledged holds. An operation without an answer has either result, which is recorded.
    async fn verify(&mut self, all: bool) {
        let looked: Vec<String> =
            self.manifests.iter().filter(|(_, m)| all || m.fresh).map(|(named, _)| named.clone()).collect();
        for named in looked {
            let fate = self.manifests[&named].fate;
            let lost = matches!(fate, Fate::PushLost | Fate::DeletionLost);
            let (status, _, body) = self.look(&named, lost).await;
            let want = match fate {
                Fate::Present => vec![200],
                Fate::Deleted => vec![404],
                Fate::PushLost | Fate::DeletionLost => vec![200, 404],
            };
            assert!(want.contains(&status), "{fate:?} {named} of {} is {status}", self.repo);
            if status == 200 {
                assert!(body == self.manifests[&named].body, "{named}");
                self.verify_blobs(&self.manifests[&named].blobs).await;
            }
            let pushed = self.manifests.get_mut(&named).unwrap();
            pushed.fresh = false;
            pushed.fate = match (status, fate) {
                (200, _) => Fate::Present,
                (_, Fate::PushLost) => Fate::PushLost,
                _ => Fate::Deleted,
            };
        }
        for (tag, may) in std::mem::take(&mut self.tags) {
            let (_, is, _) = self.look(&tag, may.len() > 1).await;
            assert!(may.contains(&is), "{tag} of {} is {is:?}, which is none of {may:?}", self.repo);
            self.tags.insert(tag, vec![is]);
        }
    }

    async fn verify_blobs(&self, blobs: &[String]) {
        for named in blobs {
            let got = self.request(Method::GET, &format!("blobs/{named}")).send().await.unwrap();
            assert_eq!(got.status(), 200, "acknowledged blob {named}");
            assert_eq!(&digest(&got.bytes().await.unwrap()), named);
        }
    }

    /// Returns status, digest and bytes of a manifest, after checking that HEAD and GET agree. Interrupted changes are repaired
    /// after the start, so HEAD and GET of a lost one may differ for a while.
    async fn look(&self, reference: &str, lost: bool) -> (u16, Option<String>, Vec<u8>) {
        let limit = if lost { PATIENCE } else { Duration::ZERO };
        until(&format!("HEAD and GET of {reference} agree"), limit, async || {
            let path = format!("manifests/{reference}");
            let head = seen(self.request(Method::HEAD, &path)).await;
            let (status, named, body) = seen(self.request(Method::GET, &path)).await;
            let agree = (head.0, &head.1) == (status, &named);
            if agree { Ok((status, named, body)) } else { Err(format!("HEAD {}, GET {status}", head.0)) }
        })
        .await
    }
}

/// Sends a request. Returns `None` if its answer was lost.
async fn answered(request: RequestBuilder, want: u16, answers: &watch::Sender<u64>) -> Option<Response> {
    let answer = request.send().await.ok()?;
    assert_eq!(answer.status(), want, "{}", answer.url());
    answers.send_modify(|n| *n += 1);
    Some(answer)
}

async fn seen(request: RequestBuilder) -> (u16, Option<String>, Vec<u8>) {
    let answer = request.send().await.unwrap();
    let named = answer.headers().get("docker-content-digest").map(|d| d.to_str().unwrap().to_owned());
    (answer.status().as_u16(), named, answer.bytes().await.unwrap().to_vec())
}

/// Makes the registry reread its storage in parallel with all clients, until the connection breaks.
async fn sync(http: reqwest::Client, base: String, token: String, log: PathBuf) {
    loop {
        let sync = http.post(format!("{base}/api/catalog/sync")).bearer_auth(&token);
        let Ok(answer) = sync.send().await else { return };
        let status = answer.status();
        assert_eq!(status, 200, "{}", std::fs::read_to_string(&log).unwrap());
        // Syncs run beside the clients and must not displace them: this interval defines their share of the load.
        elapse(Duration::from_millis(20)).await;
    }
}

/// Kills a registry with these arguments repeatedly. Returns the clients, and the registry after the last kill.
async fn kill_again_and_again(state: &Path, args: &[&str], blob_max: usize) -> (Vec<Client>, RegistryDaemon) {
    let (kills, seed) = (number("CORACLE_KILLS", 12), number("CORACLE_SEED", 1));
    let end = Duration::from_secs(number("CORACLE_KILL_SECONDS", 8));
    let (began, mut rng, mut done) = (Instant::now(), StdRng::seed_from_u64(seed), 0);
    // Connections to the killed registry cannot be reused.
    let http = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
    let mut daemon = RegistryDaemon::start(state, args);
    let client = |n| Client {
        http: http.clone(),
        base: daemon.url(""),
        token: daemon.token(),
        repo: format!("k{n}"),
        rng: StdRng::seed_from_u64(seed.wrapping_mul(1_000_003) + n),
        blob_max,
        manifests: BTreeMap::new(),
        tags: BTreeMap::new(),
    };
    let mut clients: Vec<Client> = (0..CLIENTS).map(client).collect();
    while done < kills && (began.elapsed() < end || done < KILLS_MIN) {
        let (answers, mut heard) = watch::channel(0);
        let log = state.with_extension("log");
        let (mut working, mut syncing) = (JoinSet::new(), JoinSet::new());
        syncing.spawn(sync(http.clone(), clients[0].base.clone(), clients[0].token.clone(), log));
        for client in clients.drain(..) {
            working.spawn(client.work(answers.clone()));
        }
        drop(answers);
        // Waits for answers instead of a time: on a busy machine the kill would come before the first answer in every round.
        let enough = rng.random_range(1..ANSWERS_MAX);
        heard.wait_for(|n| *n >= enough).await.expect("no client gives up before the kill");
        // Random moment of the kill.
        elapse(Duration::from_micros(rng.random_range(0..5000))).await;
        let address = daemon.kill();
        clients = working.join_all().await;
        syncing.join_all().await;
        daemon = RegistryDaemon::start_on(address, state, args);
        for client in &mut clients {
            client.verify(false).await;
        }
        done += 1;
    }
    // Waits until all garbage of the kills is old enough to be swept. The answer comes after the sweep.
    elapse(BLOB_GRACE).await;
    let sweep = http.post(daemon.url("/api/garbage")).bearer_auth(daemon.token()).send().await.unwrap();
    assert_eq!(sweep.status(), 200);
    for client in &mut clients {
        client.verify(true).await;
    }
    let count = |fate| clients.iter().flat_map(|c| c.manifests.values()).filter(|m| m.fate == fate).count();
    let (present, deleted) = (count(Fate::Present), count(Fate::Deleted));
    assert!(
        present + deleted >= usize::try_from(done).unwrap(),
        "only {present} + {deleted} in {done} rounds"
    );
    eprintln!("{done} kills, seed {seed}: {present} images present, {deleted} deleted, as acknowledged");
    (clients, daemon)
}

/// Lists the files of a directory; none if it is absent.
fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
}

/// Returns the hex names of the blobs that a stored manifest names; none if it was removed meanwhile.
fn blobs_of(file: &Path) -> Vec<String> {
    let Ok(bytes) = std::fs::read(file) else { return Vec::new() };
    let body: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let layers = body["layers"].as_array().unwrap();
    layers.iter().map(|l| l["digest"].as_str().unwrap().trim_start_matches("sha256:").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registry_keeps_acknowledged_data_after_kills() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let (clients, daemon) = kill_again_and_again(&state, &GRACE, 400_001).await;
    let registry = state.join("registry");
    let named = |b: &String| b.trim_start_matches("sha256:").to_owned();
    let present = clients.iter().flat_map(|c| c.manifests.values()).filter(|m| m.fate == Fate::Present);
    let acknowledged: BTreeSet<String> = present.flat_map(|m| &m.blobs).map(named).collect();
    until("exactly the blobs of manifests are stored", PATIENCE, async || {
        // A manifest whose answer was lost is either stored with its blobs, or absent.
        let kept: BTreeSet<String> = (0..CLIENTS)
            .flat_map(|n| files(&registry.join(format!("manifests/k{n}/_digests"))))
            .flat_map(|file| blobs_of(&file))
            .collect();
        let name = |file: PathBuf| file.file_name().unwrap().to_str().unwrap().to_owned();
        let stored: BTreeSet<String> = files(&registry.join("blobs/sha256")).into_iter().map(name).collect();
        assert!(acknowledged.is_subset(&stored));
        let uploads = files(&registry.join("uploads"));
        if stored == kept && uploads.is_empty() {
            return Ok(());
        }
        let (more, fewer) = (stored.difference(&kept).count(), kept.difference(&stored).count());
        Err(format!("{more} blobs too many, {fewer} too few, uploads {uploads:?}"))
    })
    .await;
    daemon.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registry_on_s3_keeps_acknowledged_data_after_kills() {
    let Some(store) = S3Server::start().unwrap() else { return };
    let dir = tempfile::tempdir().unwrap();
    let s3 = [
        ["--s3-endpoint", store.url()],
        ["--s3-bucket", BUCKET],
        ["--s3-access-key", ACCESS_KEY],
        ["--s3-secret-key", SECRET_KEY],
    ];
    let args = [&GRACE[..], s3.as_flattened()].concat();
    // The largest blobs are uploaded in several parts.
    let (_, daemon) = kill_again_and_again(&dir.path().join("state"), &args, 12_000_000).await;
    daemon.kill();
}
