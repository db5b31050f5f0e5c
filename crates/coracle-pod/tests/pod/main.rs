//! Pods: decisions in tables, and whole lives over a runtime in memory on a paused clock.

mod container_spec;
mod env;
mod fields;
mod network;
mod resources;
mod support;
mod volumes;
