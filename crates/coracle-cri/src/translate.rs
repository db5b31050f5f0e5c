//! Translates requests of a kubelet into types of the host core. Pure: observations are passed in as values.

pub(crate) mod container;
pub(crate) mod disk;
mod memory_volume;
pub(crate) mod mounts;
pub(crate) mod resources;
pub(crate) mod sandbox;
pub(crate) mod security;
pub(crate) mod signals;
pub(crate) mod user_namespace;
