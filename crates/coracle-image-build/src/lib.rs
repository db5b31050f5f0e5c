//! Builds disk images by operating a VM as a person would: types keys on its keyboard and serial console, waits for output on
//! both, takes screenshots.
//!
//! ```text
//! build file ─▶ steps ─┬─ keys ────────▶ screen of the VMM (RFB), before any system is up
//!                      ├─ waits ───────◀ its frames: still, or like a picture
//!                      └─ text, waits ─▶ serial console
//! ```
//! An installer prompts on the screen; a system without the guest agent is logged in to at the serial console. This crate does
//! not start the VM: the caller starts it and reports when it is off.

mod build_file;
mod keys;
mod run;
mod screen;
mod serial;

pub use build_file::{Area, BuildFile, Picture, Step};
pub use run::{Machine, StepError, run};
pub use screen::{Frame, Screen, ScreenError};
pub use serial::Serial;
