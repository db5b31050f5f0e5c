//! Generated and committed files. Each generator returns the files it wants;
//! one place writes or compares them, so `--check` cannot drift from a run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use prost::Message;

use crate::root;

/// File path below the repository root → wanted bytes.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Writes every generated file, or with `check` fails when one differs.
pub(crate) fn run(check: bool) -> Result<()> {
    let mut files = Files::new();
    proto(&mut files).context("generate gRPC code")?;
    let mut stale = Vec::new();
    for (path, wanted) in &files {
        let full = root().join(path);
        if std::fs::read(&full).ok().as_deref() == Some(wanted) {
            continue;
        }
        if check {
            stale.push(path.display().to_string());
            continue;
        }
        if let Some(dir) = full.parent() {
            std::fs::create_dir_all(dir)?;
        }
        std::fs::write(&full, wanted).with_context(|| format!("write {}", full.display()))?;
        eprintln!("wrote {}", path.display());
    }
    if !stale.is_empty() {
        bail!("out of date, run `cargo xtask codegen`:\n  {}", stale.join("\n  "));
    }
    Ok(())
}

const PROTOS: [&str; 3] =
    ["firecracker/v1/firecracker.proto", "coracle/guest/v1/guest.proto", "coracle/host/v1/host.proto"];

fn proto(files: &mut Files) -> Result<()> {
    let include = root().join("proto");
    let scratch = tempdir()?;
    for proto in PROTOS {
        let descriptors = protox::compile([proto], [&include])?;
        if proto.starts_with("firecracker") {
            // Served by gRPC reflection; source positions and comments are not wire facts.
            let mut bare = descriptors.clone();
            for file in &mut bare.file {
                file.source_code_info = None;
            }
            files
                .insert("crates/coracle-proto/src/generated/firecracker.v1.bin".into(), bare.encode_to_vec());
        }
        tonic_prost_build::configure()
            .build_transport(false)
            .emit_rerun_if_changed(false)
            .btree_map(".")
            .out_dir(&scratch)
            .compile_fds(descriptors)?;
    }
    for entry in std::fs::read_dir(&scratch)? {
        let path = entry?.path();
        let name = path.file_name().context("generated file without a name")?;
        let text = format(&path)?;
        files.insert(Path::new("crates/coracle-proto/src/generated").join(name), text);
    }
    std::fs::remove_dir_all(&scratch)?;
    Ok(())
}

fn format(path: &Path) -> Result<Vec<u8>> {
    let status = std::process::Command::new("rustfmt").args(["--edition", "2024"]).arg(path).status()?;
    anyhow::ensure!(status.success(), "rustfmt {}", path.display());
    Ok(std::fs::read(path)?)
}

fn tempdir() -> Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("coracle-codegen-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}
