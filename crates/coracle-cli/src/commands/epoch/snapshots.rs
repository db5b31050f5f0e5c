//! Snapshots and disks between the original registry, files, and the original runtime's program.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use coracle_disk::{
    CocoonVersion, DiskFormat, DiskOptions, DiskReport, pull_cocoon, pull_disk, push_cocoon, push_disk,
};
use coracle_image::ImageError;
use coracle_oci::{Digest, OciError, Reference};

use super::{Server, split};
use crate::cli::{RegistryPullArgs, RegistryPushArgs};
use crate::commands::disk::failure;
use crate::error::Failure;
use crate::output;

/// Time that the blobs of an interrupted pull are kept.
const PULL_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Pushes a disk or a snapshot. `pushes` keeps an archive until it is pushed: temporary directories are often in memory.
pub(super) async fn push(pushes: &Path, args: RegistryPushArgs) -> Result<(), Failure> {
    let (repository, tag) = split(&args.name);
    let (reference, options) = Server::new(&args.server)?.transfer_target(repository, tag)?;
    forget_old(pushes);
    let options = DiskOptions { spool: Some(pushes.to_owned()), ..options };
    let version = if args.chunked { CocoonVersion::V2 } else { CocoonVersion::V1 };
    let name = repository.rsplit('/').next().unwrap_or(repository);
    let pushed = match &args.file {
        Some(file) if file == Path::new("-") => {
            push_cocoon(std::io::stdin(), version, &reference, &options).await
        }
        Some(file) => push_file(file, version, &reference, options).await?,
        None => {
            let mut cocoon =
                run(&args.cocoon, &["snapshot", "export", name, "-o", "-"], Stdio::null(), Stdio::piped())?;
            let archive = cocoon.stdout.take().ok_or_else(|| Failure::usage("no output of the runtime"))?;
            let pushed = push_cocoon(archive, version, &reference, &options).await;
            wait_for_exit(cocoon, &args.cocoon)?;
            pushed
        }
    };
    print_report("moved", pushed)
}

/// Pushes a disk, or the archive of a snapshot, which its first bytes distinguish.
async fn push_file(
    file: &Path,
    version: CocoonVersion,
    reference: &Reference,
    options: DiskOptions,
) -> Result<Result<DiskReport, ImageError>, Failure> {
    let failed = |e: std::io::Error| Failure::usage(format!("read {}: {e}", file.display()));
    let mut head = Vec::new();
    File::open(file).map_err(failed)?.take(512).read_to_end(&mut head).map_err(failed)?;
    if head.starts_with(b"snapshot.json\0") || head.starts_with(&[0x1f, 0x8b]) {
        return Ok(push_cocoon(File::open(file).map_err(failed)?, version, reference, &options).await);
    }
    let options = DiskOptions { format: DiskFormat::CloudImage, ..options };
    Ok(push_disk(file, reference, &options, Arc::new(|_, _| {})).await)
}

/// Pulls a disk or a snapshot. `pulls` keeps the blobs of a pull that is not written to a file.
pub(super) async fn pull(pulls: &Path, args: RegistryPullArgs) -> Result<(), Failure> {
    let (repository, tag) = split(&args.name);
    let server = Server::new(&args.server)?;
    let path = format!("api/repositories/{repository}/tags/{tag}");
    let kind = server.json(&path).await?["kind"].as_str().unwrap_or_default().to_owned();
    let (reference, options) = server.transfer_target(repository, tag)?;
    let name = repository.rsplit('/').next().unwrap_or(repository);
    let spool = || {
        forget_old(pulls);
        pulls.join(&Digest::of(reference.to_string().as_bytes()).hex()[..16])
    };
    let pulled = match (args.file.as_deref(), kind.as_str()) {
        (Some(file), "snapshot") if file == Path::new("-") => {
            pull_cocoon(&reference, name, &options, &spool(), std::io::stdout()).await
        }
        (Some(file), "snapshot") => archive(file, &reference, name, &options).await?,
        (Some(file), _) => pull_disk(&reference, file, &options, Arc::new(|_, _| {})).await,
        (None, "snapshot") => {
            let verb = ["snapshot", "import", "--name", name];
            let mut cocoon = run(&args.cocoon, &verb, Stdio::piped(), Stdio::null())?;
            let input = cocoon.stdin.take().ok_or_else(|| Failure::usage("no input of the runtime"))?;
            let pulled = pull_cocoon(&reference, name, &options, &spool(), input).await;
            let ended = wait_for_exit(cocoon, &args.cocoon);
            // The program itself reports why it stopped reading, but it cannot know about data that never arrived.
            if matches!(pulled, Ok(_) | Err(ImageError::Oci(OciError::Io { .. }))) {
                ended?;
            }
            pulled
        }
        (None, _) => return Err(Failure::usage("a disk is pulled into a file: say which by --file")),
    };
    let quiet = args.file.as_deref() == Some(Path::new("-"));
    if quiet { pulled.map(drop).map_err(failure) } else { print_report("fetched", pulled) }
}

/// Removes pulls that were not resumed for a week, and files of pushes that were killed. Files that cannot be removed stay.
fn forget_old(dir: &Path) {
    let old = |entry: &std::fs::DirEntry| {
        let touched = entry.metadata().and_then(|m| m.modified()).ok();
        touched.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > PULL_AGE)
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten().filter(old) {
        let path = entry.path();
        let _next_time =
            if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    }
}

/// Pulls an archive into a file, which appears when it is complete.
async fn archive(
    file: &Path,
    reference: &Reference,
    name: &str,
    options: &DiskOptions,
) -> Result<Result<DiskReport, ImageError>, Failure> {
    let failed = |e: std::io::Error| Failure::usage(format!("write {}: {e}", file.display()));
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder).map_err(failed)?;
    let out = std::io::BufWriter::new(part.reopen().map_err(failed)?);
    // The writer flushes the buffer.
    let spool = PathBuf::from(format!("{}.parts", file.display()));
    let pulled = match pull_cocoon(reference, name, options, &spool, out).await {
        Ok(report) => report,
        Err(error) => return Ok(Err(error)),
    };
    part.as_file().sync_all().map_err(failed)?;
    part.persist(file).map_err(|e| failed(e.error))?;
    Ok(Ok(pulled))
}

fn print_report(verb: &str, report: Result<DiskReport, ImageError>) -> Result<(), Failure> {
    let report = report.map_err(failure)?;
    eprintln!("{verb} {} in {} of {} chunks", output::bytes(report.moved_bytes), report.moved, report.chunks);
    output::write(&format!("{}\n", report.digest))
}

fn run(program: &Path, args: &[&str], input: Stdio, out: Stdio) -> Result<Child, Failure> {
    let failed = |e: std::io::Error| {
        Failure::usage(format!("run {}: {e}", program.display()))
            .help("EPOCH_COCOON_BINARY names the original runtime's program; or use --file")
    };
    Command::new(program).args(args).stdin(input).stdout(out).spawn().map_err(failed)
}

/// Waits for the program, whose failure is a failure of the command.
fn wait_for_exit(mut child: Child, program: &Path) -> Result<(), Failure> {
    match child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::usage(format!("{} ended with {status}", program.display()))),
        Err(e) => Err(Failure::usage(format!("wait for {}: {e}", program.display()))),
    }
}
