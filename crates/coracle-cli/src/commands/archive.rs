//! Archives from the node: into a file that appears when it is complete, or to standard output.

use std::io;
use std::path::Path;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

use crate::cli::ProgressMode;
use crate::error::Failure;
use crate::output;
use crate::progress::ProgressDisplay;
use crate::tasks::stop_signal;

/// Writes the archive. A file appears when it is complete; ^C leaves no partial file.
///
/// # Errors
/// Errors of the node and of the file.
pub(super) async fn save(
    archive: impl Stream<Item = Result<Vec<u8>, Status>> + Unpin,
    file: &Path,
) -> Result<(), Failure> {
    if file == Path::new("-") {
        return copy(archive, tokio::io::stdout()).await.map(drop);
    }
    let failed = |e: io::Error| Failure::usage(format!("write {}: {e}", file.display()));
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Removed on drop, also after ^C.
    let part = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder).map_err(failed)?;
    let mut progress = ProgressDisplay::new(ProgressMode::Auto);
    progress.step(&format!("writing {}", file.display()));
    let out = tokio::fs::File::from_std(part.reopen().map_err(failed)?);
    let written = tokio::select! {
        written = copy(archive, out) => written,
        () = stop_signal() => Err(Status::cancelled("interrupted").into()),
    };
    progress.done();
    let bytes = written?;
    part.persist(file).map_err(|e| failed(e.error))?;
    eprintln!("{} in {}", output::bytes(bytes), file.display());
    Ok(())
}

async fn copy(
    mut archive: impl Stream<Item = Result<Vec<u8>, Status>> + Unpin,
    mut out: impl AsyncWrite + Unpin,
) -> Result<u64, Failure> {
    let failed = |e: io::Error| Failure::usage(format!("write the archive: {e}"));
    let mut bytes = 0;
    while let Some(piece) = archive.next().await {
        let piece = piece?;
        out.write_all(&piece).await.map_err(failed)?;
        bytes += piece.len() as u64;
    }
    out.flush().await.map_err(failed)?;
    Ok(bytes)
}
