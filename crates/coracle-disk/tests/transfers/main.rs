//! Transfers of images and disks: registry configuration against docker-registry, uploads against a server with faults.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which the lint cannot see")]

#[path = "../../../coracle-image/tests/images/common.rs"]
#[expect(dead_code, reason = "shared with the tests of coracle-image")]
mod common;
mod hosts;
mod uploads;
