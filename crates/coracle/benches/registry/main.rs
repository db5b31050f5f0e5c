//! `cargo xtask bench registry`: the same disk and the same container image through Debian's docker-registry and ours.
//!
//! One client, this process, pushes and pulls the image. The registries are processes of their own on one file system, each
//! with its default durability. The data that they read is dropped from the page cache first. The order of the registries
//! alternates. The bytes are compared after each pull.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark reports by panicking")]

mod data;
mod disks;
mod servers;

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coracle_image::{PullOptions, PullPolicy, PushOptions, Source, Store, StoreOptions};
use coracle_oci::{NoProgress, Reference};
use coracle_testkit::figures::{cpu_seconds, figure, no_figure, peak_rss_mib};

use servers::{Server, Which};

/// Number of pushes and pulls per registry.
const ROUNDS: usize = 3;
/// Number of layers of the image, which are transferred in parallel.
const LAYERS: usize = 8;
const FIGURES: [(&str, &str); 6] = [
    ("registry.push_ratio", "x"),
    ("registry.pull_ratio", "x"),
    ("registry.rss_mib", "MiB"),
    ("chunked.push_ratio", "x"),
    ("chunked.pull_ratio", "x"),
    ("delta.bytes_ratio", "x"),
];

fn main() {
    let _the_only_one = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut told = Vec::new();
    if let Err(error) = runtime.block_on(measure(dir.path(), &mut told)) {
        eprintln!("registry: {error:#}");
        for (name, unit) in FIGURES.iter().filter(|(name, _)| !told.contains(name)) {
            no_figure(name, &format!("{error:#}"), unit);
        }
    }
}

fn print_figure(told: &mut Vec<&'static str>, name: &'static str, value: f64) {
    let unit = FIGURES.iter().find(|(known, _)| *known == name).map_or("x", |(_, unit)| unit);
    figure(name, value, unit);
    told.push(name);
}

async fn measure(dir: &Path, told: &mut Vec<&'static str>) -> Result<()> {
    images(dir, told).await.context("the container image")?;
    disks::measure(dir, told).await.context("the disk")
}

/// Durations of transfers of one registry, in seconds.
#[derive(Default)]
struct Times {
    push: Vec<f64>,
    pull: Vec<f64>,
    /// CPU seconds of a pull: of the client, and of our registry.
    pull_cpu: Vec<(f64, f64)>,
}

async fn images(dir: &Path, told: &mut Vec<&'static str>) -> Result<()> {
    let layout = dir.join("layout");
    data::image(&layout, LAYERS)?;
    let store = Store::open(dir.join("store"), StoreOptions::default())?;
    let name: Reference = "localhost/bench/image:1".parse()?;
    let source = Source::OciDir { dir: layout.clone(), tag: Some("1".into()) };
    store.import(&source, Some(&name), Arc::new(NoProgress)).await?;
    std::fs::remove_dir_all(&layout)?;
    let (mut debian, mut ours, mut peak) = (Times::default(), Times::default(), 0.0_f64);
    for round in 0..ROUNDS {
        let mut order = [Which::Debian, Which::Ours];
        order.rotate_left(round % 2);
        for which in order {
            let state = dir.join("server");
            let server = Server::start(which, &state)?;
            let times = if which == Which::Ours { &mut ours } else { &mut debian };
            image_round(dir, &store, &name, &server, times).await.with_context(|| format!("{which:?}"))?;
            if let Some(pid) = server.pid() {
                peak = peak.max(peak_rss_mib(pid)?);
            }
            drop(server);
            let _absent = std::fs::remove_dir_all(&state);
        }
    }
    drop(store);
    std::fs::remove_dir_all(dir.join("store"))?;
    let bytes = data::mib(data::IMAGE_BYTES);
    for (who, times) in [("docker-registry", &debian), ("ours", &ours)] {
        let rate = |seconds: &[f64]| bytes / median(seconds);
        let (push, pull) = (rate(&times.push), rate(&times.pull));
        eprintln!(
            "{who}: push {push:.0} MiB/s {:.2?} s, pull {pull:.0} MiB/s {:.2?} s",
            times.push, times.pull
        );
        eprintln!(
            "  processor seconds of each pull, the client's and our registry's: {:.2?}",
            times.pull_cpu
        );
    }
    eprintln!(
        "{ROUNDS} samples each, medians; {LAYERS} layers at once; goals: at least 1.5 and 1.5, at most 64 MiB"
    );
    print_figure(told, "registry.push_ratio", median(&debian.push) / median(&ours.push));
    print_figure(told, "registry.pull_ratio", median(&debian.pull) / median(&ours.pull));
    print_figure(told, "registry.rss_mib", peak);
    Ok(())
}

/// Times one push and one pull, then compares the bytes.
async fn image_round(
    dir: &Path,
    store: &Store,
    name: &Reference,
    server: &Server,
    times: &mut Times,
) -> Result<()> {
    let target: Reference = format!("{}/bench/image:1", server.address()).parse()?;
    let options =
        PushOptions { credentials: server.credentials(), concurrency: LAYERS, ..PushOptions::default() };
    data::forget(&dir.join("store"))?;
    let began = Instant::now();
    let pushed = store.push(name, &target, &options, Arc::new(NoProgress)).await?;
    times.push.push(began.elapsed().as_secs_f64());
    ensure!(pushed.moved == LAYERS + 1, "{} blobs were moved", pushed.moved);
    data::forget(server.data())?;
    let copy = Store::open(dir.join("copy"), StoreOptions::default())?;
    let options = PullOptions {
        policy: PullPolicy::Always,
        credentials: server.credentials(),
        concurrency: LAYERS,
        ..PullOptions::default()
    };
    let cpu = || -> Result<(f64, f64)> {
        let theirs = server.pid().map_or(Ok(0.0), cpu_seconds)?;
        Ok((cpu_seconds(std::process::id())?, theirs))
    };
    let (began, before) = (Instant::now(), cpu()?);
    let pulled = copy.pull(&target, &options, Arc::new(NoProgress)).await?;
    times.pull.push(began.elapsed().as_secs_f64());
    let after = cpu()?;
    times.pull_cpu.push((after.0 - before.0, after.1 - before.1));
    ensure!(pulled.digest == pushed.digest, "another image came back");
    for layer in &pulled.layers {
        let blob = |root: &str| dir.join(root).join("blobs/sha256").join(layer.digest.hex());
        data::compare(&blob("store"), &blob("copy"))?;
    }
    drop(copy);
    Ok(std::fs::remove_dir_all(dir.join("copy"))?)
}

/// Returns the median of an odd number of samples.
fn median(samples: &[f64]) -> f64 {
    coracle_testkit::figures::percentile(samples, 50)
}

/// Time limit of every step.
const LIMIT: Duration = Duration::from_secs(600);
