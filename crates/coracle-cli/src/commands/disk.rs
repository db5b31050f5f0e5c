//! `coracle image push` and `coracle image pull --disk`: disks between files and registries, without a node.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use coracle_disk::{DiskFormat, DiskOptions, DiskProgress, DiskReport, pull_disk, push_disk};
use coracle_image::ImageError;
use coracle_oci::{OciError, Reference};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::{ImagePushArgs, ProgressMode, RegistryFlags, WrittenAs};
use crate::error::{Failure, exit};
use crate::{output, registries};

/// Pushes a raw disk and prints the digest of its manifest.
pub async fn push(args: ImagePushArgs, file: &Path) -> Result<(), Failure> {
    let reference: Reference = args.reference.parse().map_err(failure)?;
    let format = match args.format {
        WrittenAs::Chunks => DiskFormat::Chunks,
        WrittenAs::ContainerDisk => DiskFormat::ContainerDisk,
        WrittenAs::CloudImage => DiskFormat::CloudImage,
        WrittenAs::Tart => DiskFormat::Tart,
    };
    let (concurrency, chunk_bytes) = (args.parallel, args.chunk_size);
    let registries = registries::load_with_warnings(&args.registries)?;
    let options = DiskOptions { format, concurrency, chunk_bytes, registries, ..DiskOptions::default() };
    let bar = bar(args.progress, "push");
    let pushed = push_disk(file, &reference, &options, progress(&bar)).await;
    finish(&bar, "moved", pushed)
}

/// Pulls a disk into a file and prints the digest of its manifest.
pub async fn pull(
    reference: &str,
    path: &Path,
    flags: &RegistryFlags,
    mode: ProgressMode,
) -> Result<(), Failure> {
    let reference: Reference = reference.parse().map_err(failure)?;
    let options =
        DiskOptions { registries: registries::load_with_warnings(flags)?, ..DiskOptions::default() };
    let bar = bar(mode, "pull");
    let pulled = pull_disk(&reference, path, &options, progress(&bar)).await;
    finish(&bar, "fetched", pulled)
}

fn bar(mode: ProgressMode, what: &'static str) -> ProgressBar {
    if mode != ProgressMode::Auto || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0).with_prefix(what);
    let style = "{prefix:6} {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar
}

fn progress(bar: &ProgressBar) -> DiskProgress {
    let bar = bar.clone();
    Arc::new(move |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })
}

fn finish(bar: &ProgressBar, verb: &str, report: Result<DiskReport, ImageError>) -> Result<(), Failure> {
    bar.finish_and_clear();
    let report = report.map_err(failure)?;
    let (moved, size) = (output::bytes(report.moved_bytes), output::bytes(report.disk_bytes));
    eprintln!("{verb} {moved} in {} of {} chunks of a disk of {size}", report.moved, report.chunks);
    output::write(&format!("{}\n", report.digest))
}

pub fn failure(error: impl Into<ImageError>) -> Failure {
    let error = error.into();
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(source) = cause {
        message = format!("{message}: {source}");
        cause = source.source();
    }
    let code = match &error {
        ImageError::Oci(OciError::NotFound { .. }) => exit::NOT_FOUND,
        ImageError::Oci(OciError::Unauthorized { .. }) => exit::FORBIDDEN,
        ImageError::Oci(OciError::Unsupported { .. }) => exit::UNSUPPORTED,
        ImageError::Oci(OciError::InvalidReference { .. }) => exit::USAGE,
        _ => exit::FAILED,
    };
    let failure = Failure::new(error.code(), message).exit(code);
    match error.help() {
        Some(help) => failure.help(help),
        None => failure,
    }
}
