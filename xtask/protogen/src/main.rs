//! `coracle-protogen PROTO_DIR OUT_DIR`: generates the gRPC code of every file of `proto/`, and the descriptors that reflection
//! serves. A program of its own, so that `cargo xtask` does not wait for the build of a protobuf compiler.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use prost::Message;

/// Guest channel protocol, of which a node has thousands of streams open.
const GUEST: &str = "coracle/guest/v1/guest.proto";

const PROTOS: [&str; 5] = [
    "cri/runtime.proto",
    "firecracker/v1/firecracker.proto",
    GUEST,
    "coracle/host/v1/host.proto",
    "coracle/market/v1/market.proto",
];

/// Lists of encoded messages, which are shared instead of copied.
const ENCODED_LISTS: [&str; 4] = [
    ".runtime.v1.ListContainersResponse.containers",
    ".runtime.v1.ListPodSandboxResponse.items",
    ".runtime.v1.StreamContainersResponse.containers",
    ".runtime.v1.StreamPodSandboxesResponse.pod_sandboxes",
];

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let usage = "usage: coracle-protogen PROTO_DIR OUT_DIR";
    let (include, out) = (arguments.next().context(usage)?, arguments.next().context(usage)?);
    PROTOS.iter().try_for_each(|proto| generate(proto, &include, &out).with_context(|| (*proto).to_owned()))
}

fn generate(proto: &str, include: &Path, out: &Path) -> Result<()> {
    let descriptors = protox::compile([proto], [include])?;
    if proto.starts_with("firecracker") {
        // gRPC reflection serves these descriptors; source positions and comments do not affect the wire format.
        let mut bare = descriptors.clone();
        for file in &mut bare.file {
            file.source_code_info = None;
        }
        let path = out.join("firecracker.v1.bin");
        fs::write(&path, bare.encode_to_vec()).with_context(|| format!("write {}", path.display()))?;
    }
    let mut config =
        tonic_prost_build::configure().build_transport(false).emit_rerun_if_changed(false).btree_map(".");
    for list in ENCODED_LISTS {
        config = config.bytes(list);
    }
    if proto == GUEST {
        config = config.codec_path("crate::codec::CompactCodec");
    }
    Ok(config.out_dir(out).compile_fds(descriptors)?)
}
