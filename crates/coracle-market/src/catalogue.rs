//! Built-in instance types: list price and reserve, in US$ per node-hour.

use coracle_auction::{Params, Price};
use coracle_proto::market as pb;

const DOLLAR: i64 = 1_000_000;

/// Name, list price (= cap) and reserve in micro-dollars.
pub(crate) const DEFAULT: [(&str, i64, i64); 5] = [
    ("h100-8x", 64 * DOLLAR, 16 * DOLLAR),
    ("h100-4x", 32 * DOLLAR, 8 * DOLLAR),
    ("a100-8x", 16 * DOLLAR, 4 * DOLLAR),
    ("a100-4x", 8 * DOLLAR, 2 * DOLLAR),
    ("l40s-4x", 5 * DOLLAR, DOLLAR + DOLLAR / 4),
];

/// Name, vCPUs, memory in GiB, number and model of the accelerators.
const SHAPES: [(&str, u32, u64, u32, &str); 5] = [
    ("h100-8x", 192, 2048, 8, "h100"),
    ("h100-4x", 96, 1024, 4, "h100"),
    ("a100-8x", 96, 1024, 8, "a100"),
    ("a100-4x", 48, 512, 4, "a100"),
    ("l40s-4x", 64, 512, 4, "l40s"),
];

/// Hardware of the built-in instance types.
pub(crate) fn types() -> impl Iterator<Item = pb::InstanceType> {
    DEFAULT.into_iter().zip(SHAPES).map(|((name, cap, _), (_, vcpus, memory_gib, gpus, model))| {
        pb::InstanceType {
            name: name.into(),
            vcpus,
            memory_mib: memory_gib * 1024,
            gpu_model: model.into(),
            gpus,
            extended_resources: [("nvidia.com/gpu".to_owned(), gpus.to_string())].into(),
            labels: std::collections::BTreeMap::new(),
            list_price_micros: cap,
        }
    })
}

/// Parameters of a built-in instance type.
pub(crate) fn params(cap: i64, reserve: i64) -> Params {
    Params::new(Price::micros(reserve), Price::micros(cap))
}
