//! Transfers of the disk: our chunks compared with the single layer of skopeo, both through our registry.

use std::{path::Path, process::Command, sync::Arc, time::Instant};

use anyhow::{Context as _, Result, ensure};
use coracle_disk::{DiskOptions, DiskReport, pull_disk, push_disk};
use coracle_oci::Reference;
use coracle_testkit::tools;
use serde_json::json;

use super::servers::{Server, Which};
use super::{ROUNDS, data, median, print_figure};

pub(crate) async fn measure(dir: &Path, told: &mut Vec<&'static str>) -> Result<()> {
    let disk = dir.join("disk.raw");
    data::disk(&disk)?;
    let layout = dir.join("disk-layout");
    one_layer(&layout, &disk)?;
    let (mut theirs, mut ours) = ((vec![], vec![]), (vec![], vec![]));
    let mut first = None;
    for round in 0..ROUNDS {
        let state = dir.join("server");
        let server = Server::start(Which::Ours, &state)?;
        for turn in [round % 2, (round + 1) % 2] {
            data::forget(&disk)?;
            data::forget(&layout)?;
            if turn == 0 {
                let (push, pull) = skopeo_round(dir, &layout, &server)?;
                theirs.0.push(push);
                theirs.1.push(pull);
            } else {
                let (push, pull, report) = our_round(dir, &disk, &server).await?;
                ours.0.push(push);
                ours.1.push(pull);
                first = Some(report);
            }
        }
        if round + 1 == ROUNDS {
            let first = first.take().context("a first push")?;
            delta(&disk, &server, &first, told).await?;
        }
        drop(server);
        std::fs::remove_dir_all(&state)?;
    }
    let (data, whole) = (data::mib(data::data_bytes()), data::mib(data::DISK_BYTES));
    eprintln!(
        "a disk of {whole} MiB with {data} MiB of data; push, pull in seconds, {ROUNDS} samples each, medians"
    );
    eprintln!(
        "skopeo, one layer as it is: {:.2?} {:.2?}\nours, windows: {:.2?} {:.2?}",
        theirs.0, theirs.1, ours.0, ours.1
    );
    let both = |times: &(Vec<f64>, Vec<f64>)| median(&times.0) + median(&times.1);
    eprintln!("push and pull together: {:.2} times skopeo's; goal 3", both(&theirs) / both(&ours));
    print_figure(told, "chunked.push_ratio", median(&theirs.0) / median(&ours.0));
    print_figure(told, "chunked.pull_ratio", median(&theirs.1) / median(&ours.1));
    Ok(())
}

/// Writes an OCI layout whose only layer is the disk.
fn one_layer(layout: &Path, disk: &Path) -> Result<()> {
    let blobs = layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs)?;
    let put = |bytes: &[u8]| -> Result<String> {
        let digest = coracle_testkit::oci::digest(bytes);
        std::fs::write(blobs.join(digest.trim_start_matches("sha256:")), bytes)?;
        Ok(digest)
    };
    let bytes = std::fs::read(disk)?;
    let layer = put(&bytes)?;
    let config =
        json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [layer]}})
            .to_string();
    let config_digest = put(config.as_bytes())?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config.len()},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": bytes.len()}],
    })
    .to_string();
    let digest = put(manifest.as_bytes())?;
    let index = json!({"schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": manifest.len(),
        "annotations": {"org.opencontainers.image.ref.name": "1"},
    }]});
    std::fs::write(layout.join("index.json"), index.to_string())?;
    Ok(std::fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?)
}

/// Times a push and a pull by skopeo without compression, which would only make it slower.
fn skopeo_round(dir: &Path, layout: &Path, server: &Server) -> Result<(f64, f64)> {
    let skopeo = tools::tool("skopeo").context("no skopeo: cargo xtask setup")?;
    let image = format!("docker://{}/bench/whole:1", server.address());
    let login = server.login().context("our registry")?;
    let run = |from: &str, to: &str| -> Result<f64> {
        let mut command = Command::new(&skopeo);
        command.args([
            "copy",
            "--quiet",
            "--preserve-digests",
            "--src-tls-verify=false",
            "--dest-tls-verify=false",
        ]);
        if to == image {
            command.args(["--dest-creds", &login]);
        }
        let began = Instant::now();
        let output = command.args([from, to]).output()?;
        ensure!(output.status.success(), "skopeo: {}", String::from_utf8_lossy(&output.stderr));
        Ok(began.elapsed().as_secs_f64())
    };
    let push = run(&format!("oci:{}:1", layout.display()), &image)?;
    data::forget(server.data())?;
    let copy = dir.join("disk-copy");
    let pull = run(&image, &format!("oci:{}:1", copy.display()))?;
    for blob in std::fs::read_dir(layout.join("blobs/sha256"))? {
        let blob = blob?;
        data::compare(&blob.path(), &copy.join("blobs/sha256").join(blob.file_name()))?;
    }
    std::fs::remove_dir_all(copy)?;
    Ok((push, pull))
}

async fn our_round(dir: &Path, disk: &Path, server: &Server) -> Result<(f64, f64, DiskReport)> {
    let (name, options) = registry_target(server)?;
    let began = Instant::now();
    let report = push_disk(disk, &name, &options, Arc::new(|_, _| {})).await?;
    let push = began.elapsed().as_secs_f64();
    data::forget(server.data())?;
    let back = dir.join("back.raw");
    let began = Instant::now();
    pull_disk(&name, &back, &options, Arc::new(|_, _| {})).await?;
    let pull = began.elapsed().as_secs_f64();
    data::compare(disk, &back)?;
    std::fs::remove_file(back)?;
    Ok((push, pull, report))
}

fn registry_target(server: &Server) -> Result<(Reference, DiskOptions)> {
    let name = format!("{}/bench/disk:1", server.address()).parse()?;
    Ok((name, DiskOptions { credentials: server.credentials(), ..DiskOptions::default() }))
}

/// Measures the push of the disk after one percent of its data changed.
async fn delta(disk: &Path, server: &Server, first: &DiskReport, told: &mut Vec<&'static str>) -> Result<()> {
    let changed = data::change(disk)?;
    let (name, options) = registry_target(server)?;
    let second = push_disk(disk, &name, &options, Arc::new(|_, _| {})).await?;
    eprintln!(
        "{:.1} MiB changed: {:.1} MiB in {} windows moved, {:.1} MiB in {} before; goal: at most 0.03",
        data::mib(changed << 4) / 16.0,
        data::mib(second.moved_bytes << 4) / 16.0,
        second.moved,
        data::mib(first.moved_bytes),
        first.moved
    );
    let bytes = |n: u64| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    print_figure(told, "delta.bytes_ratio", bytes(second.moved_bytes) / bytes(first.moved_bytes));
    Ok(())
}
