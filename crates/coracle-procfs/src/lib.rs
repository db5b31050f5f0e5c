//! What is wrong with the kernel of a guest, as `/proc` shows it: its agent tells the host, which cannot look.

pub mod stuck;
pub mod timer;
