//! x
/// x
#[must_use]
pub fn manifests() -> Vec<(String, String)> { vec![] }
