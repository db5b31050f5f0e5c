//! Images against real peers: fsck.erofs and the kernel for root file systems, docker-registry and skopeo for pulls, and a
//! hostile server and hostile archives for everything else. One binary, because most of the time is spent on linking.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which the lint cannot see")]

mod commit;
mod common;
mod crash;
mod full;
mod guard;
mod hostile;
mod import;
mod links;
mod misbehaving;
mod registry;
mod rootfs;
mod spoiled;
mod store;
