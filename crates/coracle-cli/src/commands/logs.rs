//! `coracle logs`.

use std::io::Write;

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;

use crate::cli::{Global, LogsArgs};
use crate::client::{NameMatch, reach};
use crate::error::Failure;
use crate::output::write_bytes;

/// Prints a workload's output: its stdout to stdout, its stderr to stderr.
pub async fn run(global: &Global, args: LogsArgs) -> miette::Result<u8> {
    let mut reached = reach(global, &args.vm, NameMatch::Prefix, Subresource::Log).await?;
    let since_unix_ms = args.since.map_or(0, super::vm::before_now_ms);
    let request = pb::LogsRequest { vm: reached.vm, follow: args.follow, tail: args.tail, since_unix_ms };
    let mut chunks = reached.node.logs(request).await.map_err(Failure::from)?.into_inner();
    let mut line_begins = [true, true];
    while let Some(chunk) = chunks.message().await.map_err(Failure::from)? {
        let stderr = chunk.stream() == pb::logs_response::Stream::Stderr;
        let data =
            if args.timestamps { stamp(&chunk, &mut line_begins[usize::from(stderr)]) } else { chunk.data };
        if stderr {
            let _stderr_gone = std::io::stderr().write_all(&data);
        } else {
            write_bytes(&data)?;
        }
    }
    Ok(0)
}

/// Puts the time before each line; a line may arrive in several chunks.
fn stamp(chunk: &pb::LogsResponse, line_begins: &mut bool) -> Vec<u8> {
    let time = jiff::Timestamp::from_nanosecond(chunk.time_unix_ns.into()).unwrap_or_default();
    let mut out = Vec::with_capacity(chunk.data.len() + 64);
    for line in chunk.data.split_inclusive(|b| *b == b'\n') {
        if *line_begins {
            out.extend_from_slice(format!("{time:.3} ").as_bytes());
        }
        out.extend_from_slice(line);
        *line_begins = line.ends_with(b"\n");
    }
    out
}
