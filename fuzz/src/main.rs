//! The mutating program: libFuzzer around the target that `CORACLE_FUZZ` names. Its arguments are libFuzzer's.
#![no_main]

use std::sync::LazyLock;

use coracle_fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("CORACLE_FUZZ").unwrap_or_default();
    let found = TARGETS.into_iter().find(|t| t.name == name);
    found.expect("CORACLE_FUZZ names a target")
});

fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
