//! From requests of a kubelet to the words of the host core. Pure: what has to be looked at comes in as a value.

pub(crate) mod container;
pub(crate) mod disk;
mod memory_volume;
pub(crate) mod mounts;
pub(crate) mod resources;
pub(crate) mod sandbox;
pub(crate) mod security;
pub(crate) mod signals;
pub(crate) mod user_namespace;
